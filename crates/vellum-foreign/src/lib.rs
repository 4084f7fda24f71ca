//! Readers for the disk images of other programs.
//!
//! ```text
//!   look(kind, file) ─► Description     size, names of other files, facts       only the header is read
//!                          │ open, with those files
//!                          ▼
//!                        Disk           read-only
//!                          │ each request: which run lies where?
//!                          ▼
//!                        Layout         one for each format; reads its tables through bounded pages
//! ```
//!
//! A format answers *where* bytes are ([`layout`]); one disk for all of them reads and decompresses
//! (`disk.rs`). Nothing is ever written: the log of a VHDX is replayed in memory.
//!
//! 1. An image is untrusted. No memory is allocated in proportion to a number that it states: tables are read
//!    page by page as they are needed, and what must be held as a whole has a fixed bound.
//! 2. A byte that an image claims to have, and that its file does not have, is an error, never a zero.
//! 3. Other files that an image names are opened by the caller, which decides whether it may.
//! 4. What is not understood is refused by name: an unknown feature, an encrypted image, a compression that is
//!    not read here.
//!
//! Left out: writing, repair, snapshots inside these images, seSparse extents of VMDK, differencing VHD, VHDX
//! and VDI images, Parallels bundles, dmg images with a resource fork or with ADC, LZFSE or LZMA chunks.

#![forbid(unsafe_code)]

mod bytes;
mod disk;
mod dmg;
mod kind;
mod layout;
mod pages;
mod parallels;
mod qcow1;
mod qed;
#[cfg(feature = "samples")]
#[doc(hidden)]
pub mod samples;
mod unpack;
mod vdi;
mod vhd;
mod vhdx;
mod vmdk;

use std::sync::Arc;

pub use kind::ForeignKind;
use vellum_core::{Context, Error, HostTally, Offload, Result, SharedDisk, SharedStorage, Storage, Tallied};

use disk::ReadDisk;
use layout::Header;

/// A fact about an image, to be reported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ForeignFact {
    /// A text.
    Text(String),
    /// A number.
    Number(u64),
    /// Facts with names, in a list.
    List(Vec<Vec<(&'static str, ForeignFact)>>),
}

/// What the header of an image records.
pub struct Description {
    kind: ForeignKind,
    size: u64,
    cluster_size: Option<u64>,
    backing: Option<(String, Option<String>)>,
    content_id: Option<u32>,
    content_id_below: Option<u32>,
    parts: Vec<String>,
    was_left_open: bool,
    facts: Vec<(&'static str, ForeignFact)>,
    header: Box<dyn Header>,
}

/// What an image is opened with.
pub struct ForeignFiles {
    /// The image file.
    pub image: SharedStorage,
    /// The other files that hold its data, as [`Description::parts`] names them.
    pub parts: Vec<SharedStorage>,
    /// What the disk reads as where the image has nothing.
    pub below: Option<SharedDisk>,
    /// Where chunks are decompressed.
    pub offload: Arc<dyn Offload>,
    /// Counts what the image costs the host.
    pub tally: HostTally,
}

/// Reads the header of an image.
///
/// # Errors
/// `Corrupt` for a header that contradicts itself or the file, `Unsupported` for what is not read here, and
/// the errors of the storage.
pub async fn look(kind: ForeignKind, image: &dyn Storage) -> Result<Description> {
    let description = match kind {
        ForeignKind::Vdi => vdi::look(image).await,
        ForeignKind::Qed => qed::look(image).await,
        ForeignKind::Parallels => parallels::look(image).await,
        ForeignKind::Qcow1 => qcow1::look(image).await,
        ForeignKind::Vhd => vhd::look(image).await,
        ForeignKind::Vhdx => vhdx::look(image).await,
        ForeignKind::Dmg => dmg::look(image).await,
        ForeignKind::Vmdk => vmdk::look(image).await,
    };
    let description =
        description.context(|| format!("{}: can't read the {} image", image.name(), kind.name()))?;
    if i64::try_from(description.size).is_err() {
        return Err(Error::corrupt(format!("{}: no disk has {} bytes", image.name(), description.size)));
    }
    Ok(description)
}

impl Description {
    /// The size of the disk, in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The size in which space is allocated, in bytes.
    pub fn cluster_size(&self) -> Option<u64> {
        self.cluster_size
    }

    /// The name of the image below, and its format where that is stated.
    pub fn backing(&self) -> Option<(&str, Option<&str>)> {
        self.backing.as_ref().map(|(name, format)| (name.as_str(), format.as_deref()))
    }

    /// A number that a writer changes with the content: the CID of a VMDK.
    pub fn content_id(&self) -> Option<u32> {
        self.content_id
    }

    /// The [content number](Description::content_id) that the image below must have, if it has one.
    pub fn content_id_below(&self) -> Option<u32> {
        self.content_id_below
    }

    /// The names of other files that hold the data of the disk. An image can name any file: the caller decides
    /// whether it may.
    pub fn parts(&self) -> &[String] {
        &self.parts
    }

    /// Whether the image records that its last writer has not closed it.
    pub fn was_left_open(&self) -> bool {
        self.was_left_open
    }

    /// The facts that only its format has, under QEMU's names where there are any.
    pub fn facts(&self) -> &[(&'static str, ForeignFact)] {
        &self.facts
    }

    /// Opens the disk, read-only.
    ///
    /// # Errors
    /// `Corrupt` when a file is too short or contradicts the header, and the errors of the storage.
    pub async fn open(&self, files: ForeignFiles) -> Result<SharedDisk> {
        let ForeignFiles { image, parts, below, offload, tally } = files;
        if parts.len() != self.parts.len() {
            return Err(Error::invalid(format!(
                "{} needs {} other files and got {}",
                image.name(),
                self.parts.len(),
                parts.len()
            )));
        }
        let name = image.name().to_owned();
        let all = std::iter::once(image).chain(parts);
        let all: Vec<SharedStorage> = all.map(|file| Tallied::shared(file, tally.data.clone())).collect();
        let context = || format!("{name}: can't open the {} image", self.kind.name());
        let opened = self.header.open(all).await.context(context)?;
        Ok(ReadDisk::over(self.kind, self.size, self.cluster_size, opened, below, offload))
    }
}

impl Description {
    /// Of an image with no more than a size.
    fn of(kind: ForeignKind, size: u64, header: impl Header + 'static) -> Self {
        Self {
            kind,
            size,
            cluster_size: None,
            backing: None,
            content_id: None,
            content_id_below: None,
            parts: Vec::new(),
            was_left_open: false,
            facts: Vec::new(),
            header: Box::new(header),
        }
    }
}
