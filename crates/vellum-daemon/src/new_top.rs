//! An image without data that goes on top of another one: for a snapshot, or in the place of one that was committed.
//!
//! It is laid out as the image that was on top until then, where it has the same format: whoever chose the size of clusters or units, the
//! journal or none, gets them again, and programs that could read the old image can read the new one. Otherwise it is as `vellum create
//! -b` makes it.
//!
//! Where the old image is encrypted the new one is too: with a key of its own, which all secrets that were given and open the old one open.
//! Slots of the old one whose secrets were not given are named, in the answer and in the log: whoever has their secrets adds them.
//!
//! Not taken over: a data file, the wish to be filled, a fast medium, bitmaps, snapshots, and space that was allocated ahead.

use std::path::Path;
use std::sync::Arc;

use vellum_core::{Error, Offload, Result};
use vellum_format::luks::{NewKeys, Secrets};
use vellum_format::native::{Layout, Superblocks};
use vellum_format::qcow2::{CreateOptions as Qcow2Options, Header};
use vellum_format::{FormatKind, native};
use vellum_io::Draft;
use vellum_layer::Member;

use crate::create::{CreateTarget, write_native, write_qcow2};
use crate::host::Pool;

/// How it is laid out.
#[derive(Debug, Clone)]
pub(crate) enum NewTop {
    Qcow2(Box<Qcow2Options>),
    Native(Box<native::CreateOptions>),
}

impl NewTop {
    /// Like the image that is on top, where that has this format. Where that is encrypted, this takes as long as opening it does.
    ///
    /// # Errors
    /// Those of its header; `Unsupported` for an encryption that is not made.
    pub(crate) async fn like(old: &Member, format: FormatKind, secrets: &Secrets) -> Result<Self> {
        let is_like = old.head.kind() == format;
        let encryption = match (old.head.is_encrypted(), old.head.key_area()) {
            (false, _) => None,
            (true, Some(area)) => {
                let pool: Arc<dyn Offload> = Arc::new(Pool);
                Some(NewKeys::like(area, &old.storage, secrets, &pool).await?)
            }
            (true, None) => {
                return Err(Error::unsupported(format!(
                    "{} is encrypted in a way that new images are not: convert it (`vellum convert -o encrypt.format=luks`)",
                    old.path.display()
                )));
            }
        };
        Ok(match format {
            FormatKind::Native if is_like => {
                let superblock = Superblocks::read(&*old.storage).await?.superblock;
                let options = native_options(&superblock);
                Self::Native(Box::new(native::CreateOptions { encryption, ..options }))
            }
            FormatKind::Native => {
                let (has_table, has_zones) = (true, true);
                let zoned = native::CreateOptions { has_table, has_zones, encryption, ..Default::default() };
                Self::Native(Box::new(zoned))
            }
            _ if is_like => {
                let header = Header::read(&*old.storage).await?;
                Self::Qcow2(Box::new(Qcow2Options { encryption, ..qcow2_options(&header) }))
            }
            // With subclusters a write that covers only a part of a cluster copies nothing from below.
            _ => Self::Qcow2(Box::new(Qcow2Options {
                extended_l2: true,
                encryption,
                ..Qcow2Options::default()
            })),
        })
    }

    /// The key slots of the old image that open nothing here.
    pub(crate) fn slots_left(&self) -> Vec<usize> {
        let keys = match self {
            Self::Qcow2(options) => &options.encryption,
            Self::Native(options) => &options.encryption,
        };
        keys.as_ref().map_or_else(Vec::new, |keys| keys.slots_left().to_vec())
    }

    /// Says so in the log.
    pub(crate) fn say_slots_left(slots: &[usize], image: &Path, below: &Path) {
        if !slots.is_empty() {
            tracing::warn!(
                "key slots {slots:?} of {} do not open {}, because this server has no secrets of theirs: add them with `vellum key add`",
                below.display(),
                image.display()
            );
        }
    }

    /// Makes it in this draft, for a disk of `size` bytes: durable, over the image of this name and format.
    ///
    /// # Errors
    /// Those of the file.
    pub(crate) async fn make(self, draft: &Draft, size: u64, backing: (String, FormatKind)) -> Result<()> {
        let (name, format) = (backing.0.clone(), Some(backing.1.to_string()));
        let target = CreateTarget {
            path: draft.path().to_owned(),
            size: Some(size),
            backing: Some(backing),
            trust_backing: true,
            allow_dirs: Vec::new(),
            remote: Default::default(),
            trust_base: false,
            secrets: Arc::default(),
            stands_on_encrypted: Arc::default(),
            never_flushed: false,
        };
        match self {
            Self::Native(options) => {
                let base = Some(native::NewBase { name, format, size, zeros: Vec::new() });
                let options = native::CreateOptions { size, base, ..*options };
                write_native(&target, &options, None).await.map(drop)
            }
            Self::Qcow2(options) => {
                let options = Qcow2Options { size, backing: Some((name, format)), ..*options }.settled();
                write_qcow2(&target, (None, None), &options, None).await
            }
        }
    }
}

fn native_options(old: &native::Superblock) -> native::CreateOptions {
    let shape = old.places().shape();
    let journal = old.places().region(native::Region::Journal).len();
    native::CreateOptions {
        has_table: shape.layout != Layout::Linear,
        has_zones: shape.zone().is_some(),
        zone_size: shape.zone().map(|zone| zone.bytes()),
        embed: shape.zone().map(|_| old.embeds()),
        unit_size: shape.layout.unit().map(|unit| unit.bytes()),
        // A linear image has a bitmap, and a journal, only over another one.
        block_size: shape.base_bytes.map(|_| shape.block.bytes()),
        journal_bytes: Some(journal).filter(|bytes| *bytes > 0),
        ..native::CreateOptions::default()
    }
}

fn qcow2_options(old: &Header) -> Qcow2Options {
    let default = Qcow2Options::default();
    let version = old.version();
    let cluster_size = old.cluster_size().bytes();
    // As for any image over another one, unless somebody has chosen otherwise for one.
    let can_have_subclusters = version >= 3 && cluster_size >= SUBCLUSTERS_FROM;
    let extended_l2 = old.has_subclusters() || (old.backing_file().is_none() && can_have_subclusters);
    // With a data file it cannot have one, and nobody has chosen.
    let journal = match old.has_data_file() || old.has_misplaced_journal() {
        true => default.journal.filter(|_| version >= 3 && cluster_size >= JOURNAL_FROM),
        false => old.journal_bytes(),
    };
    Qcow2Options {
        version,
        cluster_size,
        refcount_bits: old.refcount_bits(),
        extended_l2,
        lazy_refcounts: old.has_lazy_refcounts(),
        compression: old.compression(),
        journal,
        prealloc: old.prealloc(),
        ..default
    }
}

/// Clusters of this many bytes and more can have subclusters.
const SUBCLUSTERS_FROM: u64 = 16 << 10;
/// And of this many a journal.
const JOURNAL_FROM: u64 = 4 << 10;
