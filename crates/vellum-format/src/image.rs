//! The operations that every format has: the only way in which images are opened, inspected, changed and
//! repaired.
//!
//! ```text
//!   FormatKind ──format()──► Format    operations on a closed image: recover, check, resize, revert
//!                              │ read
//!                              ▼
//!                            Head      what the image records: its size, other images, whether it was closed
//!                              │ open, over the disk below
//!                              ▼
//!                            Opened    the disk, and its snapshots where it keeps some
//! ```
//!
//! A format implements the first two in a file of its own (`raw.rs`, `qcow2/format.rs`, `native/format.rs`),
//! and has a line in `formats.rs`. Operations that only some formats support have a default here that says
//! so.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use vellum_core::pin::Pin;
use vellum_core::{
    BlockSize, Clock, Error, HostTally, Inline, LocalFuture, Offload, Result, SharedDisk, SharedStorage,
    Storage,
};

pub use crate::closed_bitmaps::{Bitmap, BitmapChange, Bits, ClosedBitmaps, MergeSource, OpenBitmaps};
pub use crate::closed_snapshots::{Amend, ClosedSnapshots, Growth, Reserve, Wanted};
pub use crate::compressing::{BlockContent, Compressing, PackedBlock};
use crate::fast::{FastId, FastMedium, NamedFast, Tiers};
pub use crate::growth::FileGrowth;
use crate::handover::Handover;
use crate::luks::{KeyArea, Secrets};
use crate::prealloc::Prealloc;
use crate::probe::FormatKind;
use crate::report::{CheckReport, JournalChange, Recovery, Repair};
use crate::session::{CacheId, Session, Sessions};
pub use crate::snapshot_facts::{Machine, Snapshot};
pub use crate::views::Views;
use crate::wish::Wish;
pub use crate::zero_places::ZeroPlaces;

/// The default limit for the mappings of one image in memory, in bytes: enough for 256 GiB of 64 KiB
/// clusters.
pub const MAPPING_BYTES_DEFAULT: u64 = 32 << 20;

/// The files of an image, and the disk below it.
pub struct Files {
    /// The image file.
    pub image: SharedStorage,
    /// The external data file, if the image refers to one.
    pub data_file: Option<SharedStorage>,
    /// What the disk reads as where the image has nothing.
    pub below: Option<SharedDisk>,
}

/// How an image of any format is opened. A format ignores the options that it has no use for.
#[derive(Clone)]
pub struct OpenOptions {
    /// Write nothing, not even a repair.
    pub read_only: bool,
    /// Open this internal snapshot (by id or name) instead of the disk, read-only.
    pub snapshot: Option<String>,
    /// Memory for the mapping, in bytes.
    pub mapping_bytes_max: u64,
    /// Where long computations run.
    pub offload: Arc<dyn Offload>,
    /// Counts what the image costs the host.
    pub tally: HostTally,
    /// Whether space is prepared ahead of need when the disk is tended.
    pub prealloc: Prealloc,
    /// Whether sparsely used zones are emptied in quiet times, when the disk is tended.
    pub compaction: bool,
    /// With a clock, flushes wait briefly for one another where that lets them share (group commit).
    pub clock: Option<Arc<dyn Clock>>,
    /// What opens encrypted images: each secret is tried on each of them.
    pub secrets: Arc<Secrets>,
    /// An image that is only read may be encrypted in a mode that is not written any more.
    pub may_be_weak: bool,
    /// The image is opened for what it has itself; where that is nothing, it reads as zero, and its map says that it is below.
    pub without_below: bool,
    /// The flash cache over the disk. Without it an image of which a cache holds writes is refused, and its first change voids a session.
    pub flash: Option<CacheId>,
    /// From where a block that is written in part is completed; what is below, when not given: the same bytes, and no cache keeps them.
    pub fills: Option<SharedDisk>,
    /// The fast medium that may have copies of units of the disk. An image that is changed without the one it names makes them void.
    pub fast: Option<Arc<FastMedium>>,
    /// What only the fast medium should have, and has not, is a read error. To be only read, an image is then opened with any or none.
    pub salvages: bool,
    /// From where tables are read, where a cache keeps them; from the image, when not given.
    pub tables: Option<CachedTables>,
    /// How the file grows.
    pub growth: FileGrowth,
}

/// The tables of an image, where a cache keeps them.
#[derive(Clone)]
pub struct CachedTables {
    /// The image file, for reads of its tables; reads as the file does. What is written, through whatever handle, this knows
    /// before it reaches the file.
    pub storage: SharedStorage,
    /// Counts entries that were looked up, each once, whether or not they had to be read first.
    pub lookups: Arc<AtomicU64>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            snapshot: None,
            mapping_bytes_max: MAPPING_BYTES_DEFAULT,
            offload: Arc::new(Inline),
            tally: HostTally::default(),
            prealloc: Prealloc::default(),
            compaction: false,
            clock: None,
            secrets: Arc::default(),
            may_be_weak: false,
            without_below: false,
            flash: None,
            fills: None,
            fast: None,
            salvages: false,
            tables: None,
            growth: FileGrowth::Usual,
        }
    }
}

/// An image that is open.
pub struct Opened {
    /// Its disk.
    pub disk: SharedDisk,
    /// Its snapshots, where the format can make them.
    pub snapshots: Option<Arc<dyn Snapshots>>,
    /// Stores data compressed, where the format can and the image is open for writing.
    pub compressing: Option<Arc<dyn Compressing>>,
    /// What takes long of a detach, where the format has that.
    pub detaching: Option<Arc<dyn Detaching>>,
    /// What ties it to its flash cache, where it is open for writing with one and the image has a place for that.
    pub sessions: Option<Arc<dyn Sessions>>,
    /// Its bitmaps, in formats that have some.
    pub bitmaps: Option<Arc<dyn OpenBitmaps>>,
    /// Its snapshots beside its disk, if it has any and the format changes them only while the image is closed.
    pub views: Option<Arc<dyn Views>>,
    /// Its copies on a fast medium, where it was opened with the one that it names.
    pub tier: Option<Arc<dyn Tiers>>,
    /// Where its zeros have space, in formats that say so.
    pub zeros: Option<Arc<dyn ZeroPlaces>>,
}

/// An image that is to be below another one.
#[derive(Debug, Clone, Copy)]
pub struct NewBacking<'a> {
    /// Its name, as it will stand in the image above.
    pub name: &'a str,
    /// Its format, where that is to be recorded.
    pub format: Option<&'a str>,
    /// The size of its disk, in bytes, where it is known.
    pub size: Option<u64>,
    /// What proves its content, and that of the images below it.
    pub pin: Option<&'a Pin>,
}

/// The part of a [detach](Format::detach) that takes as long as the disk is large, done while the disk is open and in use.
pub trait Detaching: Send + Sync {
    /// How often a request has undone what this does, so far. To be asked before it is made sure that the image has
    /// everything that the disk below has.
    fn mark(&self) -> u64;

    /// Makes ready in place what the disk would otherwise read wrongly without the disk below. It goes step by step, and
    /// requests continue. `stop` is asked between two steps. Since the mark it has been made sure that the image has everything.
    ///
    /// # Errors
    /// `Closed` when it was stopped, and the errors of the image. The disk is the same before and after, in any case.
    fn prepare<'a>(&'a self, mark: u64, stop: &'a dyn Fn() -> bool) -> LocalFuture<'a, Result<()>>;

    /// Whether it is ready: it has been prepared, and no request has undone that since its mark. Closing the image well changes
    /// nothing of it.
    fn is_prepared(&self) -> bool;
}

/// How far a format supports snapshots inside an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotSupport {
    /// It has none.
    None,
    /// They are listed and read; other programs make them.
    Read,
    /// They can also be made and deleted, and the disk can be restored from one.
    Kept,
}

/// One format: what is done with an image of it that is not open otherwise.
pub trait Format: Sync {
    /// Its kind.
    fn kind(&self) -> FormatKind;

    /// The versions of it that are read and written, oldest first. A format without versions has none.
    fn versions(&self) -> &'static [u32] {
        &[]
    }

    /// Whether a file of this format can be recognised by its content.
    fn is_recognised(&self) -> bool {
        true
    }

    /// How far it supports snapshots.
    fn snapshot_support(&self) -> SnapshotSupport {
        SnapshotSupport::None
    }

    /// The image's header, checked, in order to open or change it.
    ///
    /// # Errors
    /// What is wrong with it, and the errors of the storage.
    fn read<'a>(&'a self, image: &'a dyn Storage) -> LocalFuture<'a, Result<Box<dyn Head>>>;

    /// Replays the journal of an image that was not closed. One that was, or has none, is left as it is.
    ///
    /// # Errors
    /// `Corrupt` when the journal is not what was flushed once, and the errors of the storage.
    fn recover<'a>(&'a self, _image: &'a SharedStorage) -> LocalFuture<'a, Result<Recovery>> {
        ready(Ok(Recovery::default()))
    }

    /// As above, for a copy in memory, of an image that may be one that must not be changed.
    ///
    /// # Errors
    /// As [`recover`](Format::recover).
    fn replay<'a>(&'a self, image: &'a SharedStorage) -> LocalFuture<'a, Result<Recovery>> {
        self.recover(image)
    }

    /// Checks the image, and repairs it on request. `say` gets a line for each thing found. `None` if there
    /// is nothing that could be checked.
    ///
    /// # Errors
    /// When the image cannot be read so far, or a repair cannot be written. What is wrong inside it is a
    /// count.
    fn check<'a>(
        &'a self,
        image: &'a SharedStorage,
        repair: Repair,
        say: &'a mut dyn FnMut(String),
    ) -> LocalFuture<'a, Result<Option<CheckReport>>>;

    /// Finishes a change of its size that was interrupted. Returns the size of the disk, in bytes.
    ///
    /// # Errors
    /// The errors of the image.
    fn finish<'a>(&'a self, image: &'a SharedStorage) -> LocalFuture<'a, Result<u64>>;

    /// Finishes changes of a closed image that a crash interrupted, and says which. Its journal has been replayed.
    ///
    /// # Errors
    /// As for opening it read-write.
    fn finish_interrupted<'a>(&'a self, _: &'a SharedStorage) -> LocalFuture<'a, Result<Vec<&'static str>>> {
        ready(Ok(Vec::new()))
    }

    /// Resizes the disk, in bytes.
    ///
    /// # Errors
    /// Why it cannot have this size; `Invalid` for a smaller one without `may_shrink`.
    fn resize<'a>(
        &'a self,
        image: &'a SharedStorage,
        size: u64,
        may_shrink: bool,
    ) -> LocalFuture<'a, Result<()>>;

    /// As above, for a larger size, in a certain way.
    ///
    /// # Errors
    /// `Unsupported` for a way that the format does not have, and `NoSpace` when there is too little to reserve: then the disk
    /// has its old size.
    fn grow_with<'a>(
        &'a self,
        image: &'a SharedStorage,
        size: u64,
        growth: &'a Growth,
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            if growth.reserve != Reserve::Nothing {
                return Err(Error::unsupported(format!(
                    "{}: space for what is added is not reserved in this format: omit --preallocation",
                    image.name()
                )));
            }
            self.resize(image, size, false).await
        })
    }

    /// Whether a disk can grow over a longer one below, of which nothing is seen then ([`Growth::below`]). If so, the size of a
    /// block: one in which the disk ends must be the image's own.
    fn hides_below<'a>(&'a self, _image: &'a dyn Storage) -> LocalFuture<'a, Result<Option<BlockSize>>> {
        ready(Ok(None))
    }

    /// As above, for a larger size while the image is being served: [`may_grow`](Format::may_grow) has been
    /// called.
    ///
    /// # Errors
    /// As [`resize`](Format::resize).
    fn grow<'a>(&'a self, image: &'a SharedStorage, size: u64) -> LocalFuture<'a, Result<()>> {
        self.resize(image, size, false)
    }

    /// Whether the disk of an image that is served can become as large as this, as far as it can be known
    /// before it is closed for that.
    ///
    /// # Errors
    /// Why it cannot.
    fn may_grow<'a>(&'a self, _image: &'a SharedStorage, _size: u64) -> LocalFuture<'a, Result<()>> {
        ready(Ok(()))
    }

    /// Opens an image to manage its snapshots, without the disk below it.
    ///
    /// # Errors
    /// As opening it; `Unsupported` where [snapshots are not kept](SnapshotSupport::Kept).
    fn open_alone<'a>(
        &'a self,
        image: &'a SharedStorage,
    ) -> LocalFuture<'a, Result<(SharedDisk, Arc<dyn Snapshots>)>> {
        ready(Err(keeps_none(self.kind(), image)))
    }

    /// What changes the snapshots of an image that is not open, where that is how the format changes them.
    fn closed_snapshots(&self) -> Option<&'static dyn ClosedSnapshots> {
        None
    }

    /// What lists and changes the bitmaps of an image that is not open, where the format has some.
    fn closed_bitmaps(&self) -> Option<&'static dyn ClosedBitmaps> {
        None
    }

    /// Changes what a closed image is, in place; its disk and its snapshots read the same. A crash leaves it with or without
    /// each of the changes.
    ///
    /// # Errors
    /// `Unsupported` for a format or a change that needs a copy, and the errors of the image.
    fn amend<'a>(&'a self, image: &'a SharedStorage, _wish: &'a Amend) -> LocalFuture<'a, Result<()>> {
        ready(Err(Error::unsupported(format!("{}: {} images cannot be amended", image.name(), self.kind()))))
    }

    /// Reverts the disk of an image to a snapshot.
    ///
    /// # Errors
    /// `NotFound` when there is no such snapshot, `Unsupported` where [they are not
    /// kept](SnapshotSupport::Kept), and the errors of the image.
    fn revert<'a>(&'a self, image: &'a SharedStorage, _wanted: &'a str) -> LocalFuture<'a, Result<()>> {
        ready(Err(keeps_none(self.kind(), image)))
    }

    /// Removes the reference to the image below from a closed image. Where the disk still shows what is below,
    /// it reads as zero from then on: whatever the disk below has there must have been written before. That there
    /// is no reference is durable when this returns, also where an earlier attempt has removed it. `stop` is set
    /// from outside to stop between two steps. Where the image was [prepared](Detaching) in its last opening, and closed
    /// well, it only changes the header.
    ///
    /// # Errors
    /// `Unsupported` when the image has snapshots, because they also read from the image below, `Closed` when it
    /// was stopped, and the errors of the image.
    fn detach<'a>(
        &'a self,
        _image: &'a SharedStorage,
        _is_prepared: bool,
        _stop: &'a AtomicBool,
    ) -> LocalFuture<'a, Result<()>> {
        ready(Ok(()))
    }

    /// Records in a closed image what proves the content of the images below it. It is durable when this returns. It says
    /// nothing of the disk itself, so it may also be recorded while a flash cache holds writes; the caller has that cache.
    ///
    /// # Errors
    /// `Unsupported` if the format has no place for it, `NoSpace` if the header has no room, and the errors of the
    /// image.
    fn set_pin<'a>(&'a self, image: &'a SharedStorage, _pin: &'a Pin) -> LocalFuture<'a, Result<()>> {
        ready(Err(Error::unsupported(format!("{} has no backing image", image.name()))))
    }

    /// Gives a closed image this image below, with what proves its content; it is durable when this returns, and a crash
    /// leaves the old one or the new one. Nothing else changes: where the disk shows what is below, it reads as the new one
    /// from then on.
    ///
    /// # Errors
    /// `Unsupported` if the format has no place for it, or the image has snapshots, which also read from below; `NoSpace` if
    /// the header has no room; and the errors of the image.
    fn set_backing<'a>(
        &'a self,
        image: &'a SharedStorage,
        _backing: NewBacking<'a>,
    ) -> LocalFuture<'a, Result<()>> {
        ready(Err(Error::unsupported(format!(
            "{} is a {} image, which has no backing image",
            image.name(),
            self.kind()
        ))))
    }

    /// Records in a closed image how far it is in a migration; it is durable when this returns, also where an earlier
    /// attempt has recorded it, and a crash leaves the state before or after it. Nothing else changes, whatever state
    /// the image is in.
    ///
    /// # Errors
    /// `Unsupported` if the format has no place for it, or the image was not closed; `NoSpace` if its header has no
    /// room; and the errors of the image.
    fn set_handover<'a>(
        &'a self,
        image: &'a SharedStorage,
        _handover: Option<Handover>,
    ) -> LocalFuture<'a, Result<()>> {
        ready(Err(Error::unsupported(format!(
            "{} is a {} image, which has no place for the mark that its disk has moved: after a crash two hosts could \
             write the disk. Convert it with `vellum convert -O qcow2` first",
            image.name(),
            self.kind()
        ))))
    }

    /// Takes the session with a flash cache out of a closed image, and the mark that the cache holds writes: they are
    /// given up, and the image is what its disk reads as. It is durable when this returns; a crash leaves the session or
    /// not. Nothing else changes, whatever state the image is in. Returns the session that there was.
    ///
    /// # Errors
    /// The errors of the image.
    fn forget_session<'a>(&'a self, _image: &'a SharedStorage) -> LocalFuture<'a, Result<Option<Session>>> {
        ready(Ok(None))
    }

    /// Names, in the image, a fast medium that may have copies of units of its disk from now on. The medium has a row for
    /// it already. Nothing is copied by this. `name` says where the medium is, for people. Durable when it returns.
    ///
    /// # Errors
    /// `Unsupported` where the image has no place for it, and the errors of the image.
    fn attach_fast<'a>(
        &'a self,
        image: &'a SharedStorage,
        _id: FastId,
        _name: &'a str,
    ) -> LocalFuture<'a, Result<()>> {
        let why = "only images of the format vellum can have a fast medium; with others, put the backing image on fast storage";
        ready(Err(Error::unsupported(format!("{}: {why}", image.name()))))
    }

    /// Names none any more. Whether it did. Durable when it returns.
    ///
    /// # Errors
    /// The errors of the image.
    fn detach_fast<'a>(&'a self, _image: &'a SharedStorage) -> LocalFuture<'a, Result<bool>> {
        ready(Ok(false))
    }

    /// Sets whether the image is written with a journal from now on: `None` for none, `Some(None)` for one of
    /// its recorded size, or of the default size if it has none recorded, else the size in bytes. Messages
    /// call the image `name`.
    ///
    /// # Errors
    /// `Unsupported` if the format leaves no choice, and the errors of the image.
    fn set_journal<'a>(
        &'a self,
        image: &'a SharedStorage,
        name: &'a str,
        setting: Option<Option<u64>>,
    ) -> LocalFuture<'a, Result<JournalChange>>;
}

/// The contents of an image's header.
pub trait Head: Send + Sync {
    /// Its format.
    fn kind(&self) -> FormatKind;

    /// The size of the disk, in bytes.
    fn size(&self) -> u64;

    /// The name of the image below, and its format, as recorded in this one.
    fn backing(&self) -> Option<(&str, Option<&str>)> {
        None
    }

    /// The format of the image below, as recorded in this one.
    fn backing_format(&self) -> Option<&str> {
        self.backing()?.1
    }

    /// What proves that the images below are the ones that this image was made over, if it records that.
    fn pin(&self) -> Option<&Pin> {
        None
    }

    /// A number that a writer of the image changes with its content, in formats that have that.
    fn content_id(&self) -> Option<u32> {
        None
    }

    /// The [content number](Head::content_id) that the image below must have, in formats that record that.
    fn content_id_below(&self) -> Option<u32> {
        None
    }

    /// What it asks of the program that serves it.
    fn wish(&self) -> Wish {
        Wish::default()
    }

    /// What it records of a migration.
    fn handover(&self) -> Option<Handover> {
        None
    }

    /// The session with a flash cache that it names.
    fn session(&self) -> Option<Session> {
        None
    }

    /// Its UUID, where it has one.
    fn uuid(&self) -> Option<[u8; 16]> {
        None
    }

    /// The fast medium that it names.
    fn fast(&self) -> Option<NamedFast> {
        None
    }

    /// Whether it has a place for a session with a flash cache.
    ///
    /// # Errors
    /// `Unsupported`, with the reason why it has none. A cache then can't hold writes of it.
    fn has_place_for_session(&self) -> Result<()> {
        Err(Error::unsupported(format!(
            "a {} image has no place for a session with a flash cache: another program could write it, and nothing would \
             show that. Convert it with `vellum convert -O qcow2`, or use the policy readonly",
            self.kind()
        )))
    }

    /// The name of the file that has the guest's data, if that is not the image itself.
    fn data_file(&self) -> Option<&str> {
        None
    }

    /// The names of further files that have the guest's data, in formats that are only read.
    fn parts(&self) -> &[String] {
        &[]
    }

    /// Whether the format records if an image was closed.
    fn knows_whether_closed(&self) -> bool {
        true
    }

    /// Whether the image records that its last writer has not closed it.
    fn was_left_open(&self) -> bool {
        false
    }

    /// Whether the image's content is known only after its journal is replayed.
    fn needs_replay(&self) -> bool {
        false
    }

    /// Whether its refcounts may be wrong although it does not record that, so that only a full scan can
    /// tell. `is_replayed`: its journal has been replayed.
    fn may_be_miscounted(&self, _is_replayed: bool) -> bool {
        false
    }

    /// Whether the image below would show through behind the present end of this disk once the disk has
    /// grown, because no field limits how much of it counts.
    fn shows_all_below(&self) -> bool {
        false
    }

    /// The size in which space is allocated, in bytes.
    fn cluster_size(&self) -> Option<u64> {
        None
    }

    /// Whether the guest's data is encrypted.
    fn is_encrypted(&self) -> bool {
        false
    }

    /// Where its LUKS header and key material are, if it has any.
    fn key_area(&self) -> Option<KeyArea> {
        None
    }

    /// The size of the whole mapping in memory, in bytes. `held` is the number of bytes of data beyond which
    /// nothing will be added, if there is such a bound.
    fn mapping_bytes(&self, _held: Option<u64>) -> u64 {
        0
    }

    /// Opens the image that it was read from.
    ///
    /// # Errors
    /// The errors of the image and the storage; `NotFound` for a snapshot that does not exist.
    fn open<'a>(&'a self, files: Files, options: OpenOptions) -> LocalFuture<'a, Result<Opened>>;

    /// As above, with the files that [`parts`](Head::parts) names, in its order.
    ///
    /// # Errors
    /// As [`open`](Head::open).
    fn open_in_parts<'a>(
        &'a self,
        files: Files,
        _parts: Vec<SharedStorage>,
        options: OpenOptions,
    ) -> LocalFuture<'a, Result<Opened>> {
        self.open(files, options)
    }

    /// Its snapshots, as the closed image has them. `replayed` is the image after the replay of its journal.
    /// It is `None` while another program writes the image.
    ///
    /// # Errors
    /// When the list is damaged.
    fn snapshots<'a>(
        &'a self,
        _image: &'a SharedStorage,
        _replayed: Option<&'a SharedStorage>,
    ) -> LocalFuture<'a, Result<Vec<Snapshot>>> {
        ready(Ok(Vec::new()))
    }

    /// The facts that only its format has, under QEMU's names where there are any.
    ///
    /// # Errors
    /// When the metadata that they come from is damaged.
    fn facts<'a>(&'a self, _image: &'a dyn Storage) -> LocalFuture<'a, Result<Vec<(&'static str, Fact)>>> {
        ready(Ok(Vec::new()))
    }

    /// Warnings about costs of writing the image that the user did not ask for, a line each. Called after
    /// opening for writing; messages call the image `name`.
    fn losses<'a>(&'a self, _image: &'a dyn Storage, _name: &'a str) -> LocalFuture<'a, Vec<String>> {
        ready(Vec::new())
    }
}

/// The snapshots of an image that is open.
pub trait Snapshots: Send + Sync {
    /// All snapshots, in the order in which they were made.
    ///
    /// # Errors
    /// `Unsupported` when the layout has no place for any.
    fn list(&self) -> Result<Vec<Snapshot>>;

    /// Makes a snapshot. Returns its number.
    ///
    /// # Errors
    /// `Invalid` for an impossible name, and the errors of the image.
    fn create<'a>(&'a self, name: &'a str, now_seconds: u64) -> LocalFuture<'a, Result<u32>>;

    /// Deletes a snapshot, by its number or name.
    ///
    /// # Errors
    /// `NotFound` when there is none, `Refused` when clones stand on it, and the errors of the image.
    fn delete<'a>(&'a self, wanted: &'a str) -> LocalFuture<'a, Result<()>>;

    /// Gives a snapshot another name, by its number or name.
    ///
    /// # Errors
    /// `NotFound` when there is none, `Invalid` for an impossible name, `Refused` when clones stand on it, and the errors of the
    /// image.
    fn rename<'a>(&'a self, wanted: &'a str, name: &'a str) -> LocalFuture<'a, Result<()>>;

    /// Records durably that clones stand on a snapshot, by its number or name: it cannot be deleted until it is
    /// [released](Snapshots::release).
    ///
    /// # Errors
    /// `NotFound` when there is none, and the errors of the image.
    fn mark_cloned<'a>(&'a self, wanted: &'a str) -> LocalFuture<'a, Result<Snapshot>>;

    /// Records that no clone stands on a snapshot any more, by its number or name.
    ///
    /// # Errors
    /// `NotFound` when there is none, `Locked` while it is open, and the errors of the image.
    fn release<'a>(&'a self, wanted: &'a str) -> LocalFuture<'a, Result<()>>;

    /// The number of the snapshot with this name.
    ///
    /// # Errors
    /// As [`list`](Snapshots::list).
    fn named(&self, name: &str) -> Result<Option<u32>>;

    /// Opens a snapshot as a read-only disk, beside the disk itself.
    ///
    /// # Errors
    /// `NotFound` when there is none.
    fn open(self: Arc<Self>, id: u32) -> Result<SharedDisk>;

    /// Whether any snapshot is open.
    fn has_open(&self) -> bool;

    /// Stops a deletion in progress at a point where it can be continued later.
    fn stop_deleting(&self);
}

/// A fact about an image, to be reported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fact {
    /// A text.
    Text(String),
    /// A number.
    Number(u64),
    /// Yes or no.
    Flag(bool),
    /// Facts with names.
    Group(Vec<(&'static str, Fact)>),
    /// Facts without names.
    List(Vec<Fact>),
}

impl Wish {
    /// What is said of it where an image is described.
    pub(crate) fn facts(self) -> impl Iterator<Item = (&'static str, Fact)> {
        let said = [("copy-on-read", self.copy_on_read), ("prefetch", self.prefetch)];
        said.into_iter().filter(|(_, is_asked)| *is_asked).map(|(name, is_asked)| (name, is_asked.into()))
    }
}

impl From<Handover> for Fact {
    fn from(handover: Handover) -> Self {
        let number = handover.number().to_string();
        Self::Group(vec![("state", handover.word().into()), ("number", number.into())])
    }
}

impl From<Session> for Fact {
    fn from(session: Session) -> Self {
        Self::Group(vec![
            ("cache", session.cache.to_string().into()),
            ("number", session.number.to_string().into()),
            ("state", session.state.word().into()),
        ])
    }
}

impl From<&str> for Fact {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Fact {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<u64> for Fact {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl From<bool> for Fact {
    fn from(flag: bool) -> Self {
        Self::Flag(flag)
    }
}

/// A future that is ready.
pub(crate) fn ready<'a, T: 'a>(value: T) -> LocalFuture<'a, T> {
    Box::pin(std::future::ready(value))
}

fn keeps_none(kind: FormatKind, image: &SharedStorage) -> Error {
    Error::unsupported(format!("{}: snapshots of {kind} images cannot be created", image.name()))
}
