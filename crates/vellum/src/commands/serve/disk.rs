//! What guests see of the image that is served, and what becomes of what they write.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use clap::ValueEnum;
use vellum_core::{Context, Error, Result};
use vellum_daemon::image::open_file;
use vellum_daemon::{
    CreateTarget, DiscardMode, Encrypted, FormatKind, ImageOptions, IoMode, Part, Qcow2Options, SparseMode,
    ZeroDetection, create_qcow2, run,
};

use super::super::create::text_of_name;
use super::{IMAGES, NBD, WRITES};
use crate::args::parse_size;

/// What guests see of a disk
#[derive(Debug, clap::Args)]
pub(crate) struct DiskArgs {
    /// IMAGE is a list of options in the words of QEMU, such as driver=raw,offset=1048576,file.filename=a.raw
    ///
    /// `json:{…}` with the same keys is understood in any case.
    #[arg(long, requires = "image", conflicts_with = "format", help_heading = IMAGES)]
    pub(super) image_opts: bool,
    /// Serve IMAGE under the export name NAME instead of the empty name
    #[arg(long, value_name = "NAME", requires = "image", help_heading = IMAGES)]
    pub(super) export_name: Option<String>,
    /// Describe IMAGE to clients that list the exports. Default: its file name
    #[arg(long, value_name = "TEXT", requires = "image", help_heading = IMAGES)]
    pub(super) description: Option<String>,
    /// Serve the part of the disk that begins at this offset
    #[arg(long, value_name = "BYTES", value_parser = parse_size, requires = "image", conflicts_with_all = ["export", "control", "export_snapshots", "prefetch", "copy_on_read"], help_heading = IMAGES)]
    offset: Option<u64>,
    /// Serve a part of the disk of this size. Default: all that follows --offset
    #[arg(long, value_name = "BYTES", value_parser = parse_size, requires = "image", conflicts_with_all = ["export", "control", "export_snapshots", "prefetch", "copy_on_read"], help_heading = IMAGES)]
    size: Option<u64>,
    /// Only read IMAGE: what is written goes to a temporary file, and is gone when the server ends
    ///
    /// The file is in TMPDIR (default /var/tmp). It has no name once the server is ready.
    #[arg(long, requires = "image", conflicts_with_all = ["export", "control", "snapshot", "read_only", "prefetch", "copy_on_read", "flash", "fast"], help_heading = IMAGES)]
    temporary: bool,
    /// With --read-only or --fast: serve images although their fast medium is lost or damaged
    ///
    /// What the medium alone had (`vellum tier move`) is an I/O error, and everything else is read. With --read-only, of a medium
    /// that is given with --fast, what is left is used. Without it, the medium must be there as a whole, but for damaged entries of
    /// its tables; a write, zeros or a discard of all of a lost unit takes its place.
    #[arg(long, help_heading = IMAGES)]
    pub(super) salvage: bool,
    /// Do not start unless IMAGE has the dirty bitmap NAME; may be given several times
    ///
    /// NBD clients see every bitmap that can be relied on as qemu:dirty-bitmap:NAME, whether it is named here or not.
    #[arg(long = "bitmap", value_name = "NAME", requires = "image", conflicts_with_all = ["export", "temporary"], help_heading = NBD)]
    pub(super) bitmaps: Vec<String>,
    /// What to do when a guest discards (trims) blocks
    #[arg(long, value_enum, value_name = "HOW", default_value = "unmap", help_heading = WRITES)]
    discard: Discard,
    /// Whether to look for writes of zeros, and to make zeros without data of them
    #[arg(long, value_enum, value_name = "HOW", default_value = "off", help_heading = WRITES)]
    detect_zeroes: Detect,
}

/// What becomes of discarded blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Discard {
    /// Keep them: their space stays allocated
    #[value(alias = "off")]
    Ignore,
    /// Free their space
    #[value(alias = "on")]
    Unmap,
}

/// Whether writes are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Detect {
    /// Write what comes
    Off,
    /// A write of nothing but zeros becomes zeros that keep their space
    On,
    /// A write of nothing but zeros frees the space (needs --discard unmap)
    Unmap,
}

impl DiskArgs {
    /// How disks treat what is not needed.
    pub(super) fn sparse(&self) -> Result<SparseMode> {
        if self.detect_zeroes == Detect::Unmap && self.discard == Discard::Ignore {
            return Err(Error::invalid(
                "--detect-zeroes unmap frees space, which --discard ignore forbids: use --discard unmap, or \
                 --detect-zeroes on",
            ));
        }
        Ok(SparseMode {
            discard: match self.discard {
                Discard::Ignore => DiscardMode::Ignore,
                Discard::Unmap => DiscardMode::Unmap,
            },
            detection: match self.detect_zeroes {
                Detect::Off => ZeroDetection::Off,
                Detect::On => ZeroDetection::On,
                Detect::Unmap => ZeroDetection::Unmap,
            },
        })
    }

    /// The part of the disk that is served: as these options say, else as its name says.
    pub(super) fn part(&self, named: Option<Part>) -> Result<Option<Part>> {
        match (self.offset, self.size, named) {
            (None, None, named) => Ok(named),
            (_, _, Some(_)) => {
                Err(Error::invalid("the image's options name a part of it: omit --offset and --size"))
            }
            (offset, size, None) => Ok(Some(Part { offset: offset.unwrap_or(0), size })),
        }
    }

    /// The temporary image over this one, if one is wanted.
    pub(super) fn temporary(&self, image: &Path, options: &ImageOptions) -> Result<Option<Temporary>> {
        if !self.temporary {
            return Ok(None);
        }
        if options.must_be_encrypted.is_some() {
            let reading = ImageOptions { read_only: true, ..options.clone() };
            run(IoMode::Auto, async || open_file(image, &reading).await)??;
        }
        Temporary::over(image, options).map(Some)
    }
}

/// An image in a directory of its own, both removed when this is dropped.
pub(super) struct Temporary {
    dir: PathBuf,
    /// The image.
    pub(super) path: PathBuf,
    /// Where the image below is.
    pub(super) below: PathBuf,
}

/// Which image of a disk must be encrypted: the one that is named, if its options say so; one of them, where a secret was given for
/// the only disk.
pub(super) fn must_be_encrypted(
    said: Option<Encrypted>,
    is_temporary: bool,
    only: bool,
) -> Option<Encrypted> {
    // The image of a temporary one was looked at.
    said.filter(|_| !is_temporary).or_else(|| only.then_some(Encrypted::Any))
}

impl Temporary {
    fn over(image: &Path, options: &ImageOptions) -> Result<Self> {
        let parent =
            std::env::var_os("TMPDIR").filter(|dir| !dir.is_empty()).map_or("/var/tmp".into(), PathBuf::from);
        let parent = std::path::absolute(&parent).context(|| format!("can't use {}", parent.display()))?;
        // Only the owner gets into it, and it must not be there: nobody else puts anything at its name.
        let names = (0..100).map(|number| parent.join(format!("vellum-{}-{number}", std::process::id())));
        let mut made = Err(Error::invalid("no name is free"));
        for dir in names {
            let context =
                || format!("can't make the directory {} for a temporary image (TMPDIR)", dir.display());
            made = make_private(&dir).context(context).map(|()| dir);
            if made.is_ok() {
                break;
            }
        }
        let dir = made?;
        let canonical = match vellum_core::Url::of_path(image) {
            Some(_) => image.to_owned(),
            None => image.canonicalize().context(|| format!("can't open {}", image.display()))?,
        };
        let temporary = Self {
            path: dir.join("written.qcow2"),
            below: canonical.parent().map_or_else(|| canonical.clone(), Path::to_owned),
            dir,
        };
        let reading = ImageOptions { read_only: true, ..options.clone() };
        let name = text_of_name(canonical.clone().into_os_string())?;
        let target = |format: FormatKind| CreateTarget {
            path: temporary.path.clone(),
            size: None,
            backing: Some((name.clone(), format)),
            trust_backing: false,
            allow_dirs: options.allow_dirs.clone(),
            remote: options.remote.clone(),
            trust_base: options.trust_base,
            secrets: options.secrets.clone(),
            stands_on_encrypted: Arc::default(),
            never_flushed: false,
        };
        // Nothing in it is needed after a crash.
        let new = Qcow2Options { journal: None, ..Qcow2Options::default() };
        run(IoMode::Auto, async || {
            let format = match options.format {
                Some(format) => format,
                None => open_file(&canonical, &reading).await?.1,
            };
            let target = target(format);
            create_qcow2(&target, new).await?;
            match target.stands_on_encrypted.load(Ordering::Relaxed) {
                false => Ok(()),
                true => Err(Error::unsupported(format!(
                    "{} is encrypted, and --temporary would keep what guests write unencrypted in {}: make an encrypted clone \
                     (`vellum create -b … -o encrypt.format=luks,encrypt.key-secret=ID`), serve it, and delete it afterwards",
                    image.display(),
                    parent.display()
                ))),
            }
        })??;
        Ok(temporary)
    }
}

fn make_private(dir: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new().mode(0o700).create(dir)
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // What cannot be removed is a file that nothing uses.
        drop(std::fs::remove_file(&self.path));
        drop(std::fs::remove_dir(&self.dir));
    }
}
