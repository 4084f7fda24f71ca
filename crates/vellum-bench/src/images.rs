//! The disks that are served: the same bytes raw, as qcow2 with every cluster mapped, and through an empty
//! qcow2 overlay.
//!
//! ```text
//!   disk.raw ──► converted: disk.qcow2        every 4 KiB block begins with its tag (load::workload)
//!        ▲─────── overlay.qcow2               maps nothing: each read goes down to disk.raw
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::Advice;
use vellum_core::{Context, Result};
use vellum_lab::guest::filler;
use vellum_lab::programs::run;

use crate::load::workload::stamp;

/// Which disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Image {
    /// Byte for byte.
    Raw,
    /// All clusters mapped.
    Qcow2,
    /// Nothing mapped, over the raw one.
    Overlay,
}

impl Image {
    /// All of them.
    pub(crate) const ALL: [Self; 3] = [Self::Raw, Self::Qcow2, Self::Overlay];

    /// A short name, for choosing it.
    pub(crate) fn id(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
            Self::Overlay => "overlay",
        }
    }

    /// The name in a table.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2, mapped",
            Self::Overlay => "empty qcow2 overlay on raw",
        }
    }

    /// The format to open it with.
    pub(crate) fn format(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 | Self::Overlay => "qcow2",
        }
    }
}

/// The images in their directory; removed when dropped.
pub(crate) struct Images {
    dir: PathBuf,
}

const PIECE_BYTES: usize = 1 << 20;

impl Images {
    /// Makes all images, of `size` bytes, with this `vellum`.
    pub(crate) fn make(dir: &Path, size: u64, vellum: &Path) -> Result<Self> {
        let dir = dir.join(format!("vellum-bench-{}", std::process::id()));
        fs::create_dir_all(&dir).context(|| format!("can't make {}", dir.display()))?;
        // The path of the image below is relative to the current directory, not to the overlay, so it is made
        // absolute.
        let dir = dir.canonicalize().context(|| format!("can't find {}", dir.display()))?;
        let images = Self { dir };
        let raw = images.path(Image::Raw);
        write_raw(&raw, size).context(|| format!("can't write {}", raw.display()))?;
        let (qcow2, overlay) = (images.path(Image::Qcow2), images.path(Image::Overlay));
        run(Command::new(vellum).args(["convert", "-q", "-f", "raw", "-O", "qcow2"]).arg(&raw).arg(&qcow2))?;
        let mut create = Command::new(vellum);
        create.args(["create", "-q", "-f", "qcow2", "-b"]).arg(&raw).args(["-F", "raw"]).arg(&overlay);
        run(&mut create)?;
        for image in Image::ALL {
            images.settle(image)?;
            images.prepare(image, false)?;
        }
        Ok(images)
    }

    /// Where sockets and logs go.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The image's file.
    pub(crate) fn path(&self, image: Image) -> PathBuf {
        self.dir.join(match image {
            Image::Raw => "disk.raw",
            Image::Qcow2 => "disk.qcow2",
            Image::Overlay => "overlay.qcow2",
        })
    }

    /// The file that holds the image's data.
    fn data(&self, image: Image) -> PathBuf {
        match image {
            Image::Overlay => self.path(Image::Raw),
            image => self.path(image),
        }
    }

    fn settle(&self, image: Image) -> Result<()> {
        settle(&self.data(image))
    }

    /// Nothing of the image waits to be written, and all of it is in the page cache, or none.
    pub(crate) fn prepare(&self, image: Image, cached: bool) -> Result<()> {
        prepare(&self.data(image), cached)
    }
}

/// Nothing of the file waits to be written.
pub(crate) fn settle(path: &Path) -> Result<()> {
    let sync = || OpenOptions::new().write(true).open(path)?.sync_all();
    sync().context(|| format!("can't flush {}", path.display()))
}

/// Nothing of the file waits to be written, and all of it is in the page cache, or none.
///
/// What enters the cache here enters in single pages, as if a guest had read here and there. Where long
/// reads, read-ahead or long writes have left large folios, ext4 (Linux 6.18) takes ten to forty times as
/// long for an overwrite of 4 KiB by any program. So a file that was just made is prepared without the cache
/// once.
pub(crate) fn prepare(path: &Path, cached: bool) -> Result<()> {
    settle(path)?;
    let arrange = || {
        let mut file = File::open(path)?;
        if !cached {
            return Ok(rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?);
        }
        rustix::fs::fadvise(&file, 0, None, Advice::Random)?;
        let mut piece = vec![0; PIECE_BYTES];
        while file.read(&mut piece)? > 0 {}
        Ok::<_, io::Error>(())
    };
    arrange().context(|| format!("can't read {}", path.display()))
}

impl Drop for Images {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.dir));
    }
}

/// A disk full of bytes that do not compress.
pub(crate) fn write_raw(path: &Path, size: u64) -> io::Result<()> {
    let mut file = File::create(path)?;
    let mut piece = filler(PIECE_BYTES);
    let mut at = 0;
    while at < size {
        stamp(&mut piece, at);
        file.write_all(&piece)?;
        at += PIECE_BYTES as u64;
    }
    Ok(())
}

/// A disk that is full of such bytes in some of its units, and has holes elsewhere.
pub(crate) fn write_raw_where(path: &Path, unit: u64, full: &[bool]) -> io::Result<()> {
    let mut file = File::create(path)?;
    let mut piece = filler(usize::try_from(unit).expect("a unit fits in memory"));
    for (index, _) in full.iter().enumerate().filter(|(_, full)| **full) {
        let at = index as u64 * unit;
        stamp(&mut piece, at);
        file.seek(io::SeekFrom::Start(at))?;
        file.write_all(&piece)?;
    }
    file.set_len(full.len() as u64 * unit)
}
