//! The copy-on-write chain: an image, its backing image, that image's own, and so on down.
//!
//! ```text
//!   top      overlay.qcow2 ── reads and writes          opened last, over the others
//!   below    middle.qcow2  ── reads only
//!   below    base.raw      ── reads only                 found first by following the names down
//! ```
//!
//! A format knows only that there may be a disk below. Which one it is, is decided here, once, when the chain
//! is opened: the names are followed down through the headers, each is checked by the [`Gate`], then the
//! disks are opened from the bottom up.
//!
//! 1. No file is opened that the gate has not admitted, and no image twice in one chain (a loop). Both are
//!    checked on the path with its links resolved, and the opener opens exactly that path: a link that is put
//!    in its place meanwhile is refused.
//! 2. Only the top image is opened for writing; and, while what is above it is merged into it, one below
//!    ([`merge`](crate::merge)). Then nobody shares what is below.
//! 3. The memory for mappings is divided among the images, so that a long chain takes no more than a short
//!    one.
//! 4. Two or more images below the top are read through one [`View`](crate::view::View), so that a read in a
//!    long chain costs no more than in a short one.
//! 5. Disks of one process that stand on the same images may share them ([`Templates`]): each is opened once.
//!
//! 6. An image may also stand on a snapshot of another one, which may be written meanwhile (`forks`).
//!
//! `way_down` follows the names, also for those that only describe a chain. `change` has the operations that
//! replace its disk: restoring a snapshot, and resizing.
//!
//! Long because what is asked of an image on the way to its disk is asked in one place, in one order.

mod below;
mod change;
mod flash;
mod forks;
mod pins;
mod share;
mod taps;
mod templates;
#[cfg(test)]
mod tests;
mod way_down;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vellum_core::pin::Pin;
use vellum_core::{
    Clock, Context, Error, ErrorKind, HostTally, Inline, LocalFuture, Offload, Result, SharedDisk,
    SharedStorage, Storage,
};
use vellum_format::fast::{FastMedium, Tiers};
use vellum_format::handover::Handover;
use vellum_format::image::{FileGrowth, Files, Head, OpenOptions, Opened};
use vellum_format::luks::Secrets;
use vellum_format::session::may_use;
use vellum_format::{FormatKind, Prealloc, needs_replay, probe, replayed_in_memory, settle};

use crate::gate::{Gate, Trust};
use crate::hydrate::{BaseFiles, Tap, TapOptions};
use below::{Below, Stand};
use flash::TablesState;
pub use flash::{FlashChoice, Flashed, FlashedTables};
use forks::Fork;
pub(crate) use pins::said;
use pins::{FoundBelow, check_content_id, files_below};
use taps::{over, tap_over};
pub use templates::{HeldForks, Templates};
pub use way_down::{Backing, Step, WayDown};

/// Images in one chain, at most.
pub const DEPTH_MAX: usize = 256;

/// The purpose of opening a file; it decides what other programs may do with it meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Reading: no other program may write.
    Read,
    /// Reading the header, whatever others do with the file.
    Look,
    /// Reading an image whose journal must be replayed in memory: no other program may write, whatever the
    /// user has allowed.
    Replay,
    /// Writing: no other program may write, or rely on the content.
    Write,
}

/// Opens files for the chain: the only place that knows where they are.
pub trait Opener {
    /// The file's own path: absolute, links followed.
    fn canonical<'a>(&'a self, path: &'a Path) -> LocalFuture<'a, Result<PathBuf>>;

    /// Opens the file at a canonical path, and fails with `Refused` if the path leads through a link by now.
    /// Its name in messages is `name`.
    fn open<'a>(
        &'a self,
        canonical: &'a Path,
        name: &'a Path,
        purpose: Purpose,
    ) -> LocalFuture<'a, Result<SharedStorage>>;

    /// The format of what has this canonical name, where the kind of name alone states it. Such content is never
    /// probed.
    fn stated_format(&self, _canonical: &Path) -> Option<FormatKind> {
        None
    }

    /// What shows whether these paths still lead to the same files, links followed; `None` when the opener
    /// cannot tell. Files of such an opener are not shared.
    fn identities(&self, _paths: Vec<PathBuf>) -> LocalFuture<'_, Option<Vec<Identity>>> {
        Box::pin(std::future::ready(None))
    }

    /// Which of its ways this opener has of opening files. Disks whose files are opened in different ways
    /// share none.
    fn way(&self) -> u64 {
        0
    }
}

/// What distinguishes a file from all others that may have its name: the device, its number there, and when
/// it was changed last.
pub type Identity = [u64; 4];

/// Which image of a chain must be encrypted.
///
/// A program that can write to the file can clear the mark that says so, and what a guest writes then is stored as plain bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encrypted {
    /// The top one: options of the image say so.
    Top,
    /// One of them: secrets were given.
    Any,
}

impl Encrypted {
    /// Checks the header of an image.
    ///
    /// # Errors
    /// `Refused` when it says that the image is not encrypted.
    pub fn check(self, name: &Path, is_encrypted: bool) -> Result<()> {
        let name = name.display();
        let why = match self {
            _ if is_encrypted => return Ok(()),
            Self::Top => format!(
                "{name} is not encrypted, but its options say that it is (encrypt.*, key-secret): omit them, unless it was \
                 encrypted before: then the file was changed, and is restored from a backup"
            ),
            Self::Any => format!(
                "a secret was given, but neither {name} nor an image below it is encrypted: omit --secret, unless it was \
                 encrypted before: then the file was changed, and is restored from a backup"
            ),
        };
        Err(Error::new(ErrorKind::Refused, why))
    }
}

/// How a chain is opened.
#[derive(Clone)]
pub struct ChainOptions {
    /// The format of the top image; guessed when it is not given.
    pub format: Option<FormatKind>,
    /// Nothing is written.
    pub read_only: bool,
    /// Open this internal snapshot of the top image.
    pub snapshot: Option<String>,
    /// Open the top image alone, as if it had no backing file.
    pub without_backing: bool,
    /// Which files may be referred to.
    pub gate: Gate,
    /// Memory for the mappings of the whole chain, in bytes. By default each image has what its whole mapping
    /// takes, up to [`MAPPING_BYTES_DEFAULT`](vellum_format::image::MAPPING_BYTES_DEFAULT), and all together
    /// have at most four times that.
    pub mapping_bytes_max: Option<u64>,
    /// Where long computations run.
    pub offload: Arc<dyn Offload>,
    /// Whether the top image prepares space ahead of need.
    pub prealloc: Prealloc,
    /// Zones of a native image are emptied in quiet times.
    pub compaction: bool,
    /// If true, flushes of an image wait a little for one another where that lets them share (group commit).
    pub clock: Option<Arc<dyn Clock>>,
    /// Images at URLs that prove nothing are taken for fixed, because the user says so.
    pub trust_base: bool,
    /// An image that is opened for writing records what proves the images below, also where all of them are files.
    pub pin_base: bool,
    /// The image with so many images above it is opened for writing as well: it gets what those have.
    pub merges_into: Option<usize>,
    /// The images below the top are shared with the other disks of these templates.
    pub templates: Option<Arc<Templates>>,
    /// What the top image reads from below is seen, and copied. Not where it is only read, or has nothing below.
    pub tap: Option<TapOptions>,
    /// As `tap`, where the top image itself asks for copies.
    pub wished_tap: Option<TapOptions>,
    /// What opens encrypted images.
    pub secrets: Arc<Secrets>,
    /// Which image must be encrypted, if the user has said that one is.
    pub must_be_encrypted: Option<Encrypted>,
    /// Images that are only read may be encrypted in a mode that is not written any more.
    pub may_be_weak: bool,
    /// The flash cache over the disks.
    pub flash: Option<FlashChoice>,
    /// A fast medium that may have copies of units of images that name it.
    pub fast: Option<Arc<FastMedium>>,
    /// How the file of the top image grows.
    pub growth: FileGrowth,
    /// What an image has on a fast medium alone, and what is not there, is a read error. Images that are only read are opened
    /// without their medium, too.
    pub salvages: bool,
}

impl Default for ChainOptions {
    fn default() -> Self {
        Self {
            format: None,
            read_only: false,
            snapshot: None,
            without_backing: false,
            gate: Gate::default(),
            mapping_bytes_max: None,
            offload: Arc::new(Inline),
            prealloc: Prealloc::default(),
            compaction: false,
            clock: None,
            trust_base: false,
            pin_base: false,
            merges_into: None,
            templates: None,
            tap: None,
            wished_tap: None,
            secrets: Arc::default(),
            must_be_encrypted: None,
            may_be_weak: false,
            flash: None,
            fast: None,
            growth: FileGrowth::Usual,
            salvages: false,
        }
    }
}

impl ChainOptions {
    /// Whether the image with so many above it is opened for writing.
    fn writes_at(&self, depth: usize) -> bool {
        let is_written = !self.read_only && self.snapshot.is_none();
        is_written && (depth == 0 || self.merges_into == Some(depth))
    }
}

/// One image of a chain.
pub struct Member {
    /// The path as it was requested, or as it is in the image above.
    pub path: PathBuf,
    /// Its file.
    pub storage: SharedStorage,
    /// Its external data file: path and file.
    pub data_file: Option<(PathBuf, SharedStorage)>,
    /// The further files that have its data, in formats that are only read.
    pub parts: Vec<(PathBuf, SharedStorage)>,
    /// Its header, as it was before opening.
    pub head: Box<dyn Head>,
    /// It was not closed, and is read as it will be once it is recovered. The file is as it was found.
    pub is_replayed: bool,
    /// Whether it stands for a snapshot inside it, whose name in the image above says all that could change.
    pub is_snapshot: bool,
    /// What its format made of it: the disk, over those below, and the snapshots.
    pub opened: Opened,
    /// The flash cache over its disk.
    pub flash: Option<Flashed>,
    /// The flash cache between the image and its tables.
    pub tables: Option<FlashedTables>,
}

/// An open chain.
pub struct Chain {
    top: Member,
    /// What the top image costs the host.
    pub top_tally: HostTally,
    below: Option<Stand>,
    /// Between the top image and those below.
    tap: Option<Arc<Tap>>,
    base_files: Arc<BaseFiles>,
    /// The disk as it is open now has everything that those below have.
    is_whole: bool,
    options: ChainOptions,
    /// How much the mapping of the top image takes as a whole, in bytes.
    top_need: u64,
    /// Which file the top image is, for its row in a flash cache.
    flash_id: Option<Identity>,
    /// Why the disk on top is closed, if it could not be opened again.
    gone: Option<Error>,
    was_left_open: bool,
    fork: Fork,
}

/// An image that was found on the way down and has no disk yet.
struct Found {
    path: PathBuf,
    storage: SharedStorage,
    data_file: Option<(PathBuf, SharedStorage)>,
    parts: Vec<(PathBuf, SharedStorage)>,
    head: Box<dyn Head>,
    is_replayed: bool,
}

impl Found {
    /// Compares what the image records of those below with what they are, and records it where it must be.
    async fn hold_against_pin(&mut self, below: &Stand, options: &ChainOptions) -> Result<()> {
        let found = FoundBelow::of(below.members().iter());
        // What is below changes, and proves nothing until that has ended.
        if options.merges_into.is_some() {
            return Ok(());
        }
        // The target of a migration is only read. What its pin is to prove comes to be while it waits.
        if matches!(self.head.handover(), Some(Handover::Awaiting(_) | Handover::Void(_))) {
            return Ok(());
        }
        let is_read = options.read_only || options.snapshot.is_some();
        let trusts = options.trust_base || is_read;
        let Some(pin) = found.hold_against(self.head.pin(), trusts, options.pin_base)? else {
            return Ok(());
        };
        if is_read {
            return Ok(());
        }
        let flash = options.flash.as_ref().map(|choice| choice.cache.id());
        may_use(self.storage.name(), self.head.session(), flash)?;
        let format = self.head.kind().format();
        format.set_pin(&self.storage, &pin).await?;
        self.head = format.read(&*self.storage).await?;
        Ok(())
    }
}

impl Chain {
    /// Opens the image and everything below it.
    ///
    /// # Errors
    /// `Refused` for a reference that the gate does not allow, `Corrupt` for a loop or a damaged image,
    /// `Invalid` when a disk of unknown format is to be written, and what the files say; each names the file
    /// and its depth.
    pub async fn open(opener: &dyn Opener, path: &Path, options: &ChainOptions) -> Result<Self> {
        let (mut way, step) = WayDown::begin(opener, &options.gate, path, options.format).await?;
        let writes = !options.read_only && options.snapshot.is_none();
        let Some(templates) = options.templates.as_ref().filter(|_| writes) else {
            return Self::open_at(&mut way, step, options).await;
        };
        // Disks that stand on snapshots of this image have the file open, for reading.
        let parent = templates.parent(&step.canonical);
        let turn = parent.detach().await;
        match Self::open_at(&mut way, step, options).await {
            Ok(mut chain) => {
                if let Some(snapshots) = &chain.top.opened.snapshots {
                    turn.attach(snapshots);
                    chain.fork.parent = Some(parent);
                }
                Ok(chain)
            }
            Err(error) => {
                turn.read_file(opener).await;
                Err(error)
            }
        }
    }

    async fn open_at(way: &mut WayDown<'_>, step: Step, options: &ChainOptions) -> Result<Self> {
        // Noted before it is opened, of the path that is opened.
        let flash_id = match &options.flash {
            Some(_) => way.opener().identities(vec![step.canonical.clone()]).await,
            None => None,
        };
        let flash_id = flash_id.and_then(|found| found.first().copied());
        let (mut image, next) = find_one(way, &step, options).await?;
        if options.must_be_encrypted == Some(Encrypted::Top) {
            Encrypted::Top.check(&image.path, image.head.is_encrypted())?;
        }
        let options = &options.with_wish(image.head.wish());
        let was_left_open = image.head.was_left_open();
        let was_pinned = image.head.pin().is_some();
        let top_need = mapping_need(&*image.head, &image.storage, options.read_only);
        let shared = options.templates.as_ref().filter(|_| options.merges_into.is_none());
        let below = match (next, shared) {
            (None, _) => None,
            (Some(step), None) => Some(Stand::on(Below::open(way, step, options, top_need).await?)),
            (Some(step), Some(templates)) => Some(templates.stand(way, step, options).await?),
        };
        if options.must_be_encrypted == Some(Encrypted::Any) {
            let mut members = below.iter().flat_map(|below| below.members());
            let is_encrypted = image.head.is_encrypted() || members.any(|member| member.head.is_encrypted());
            Encrypted::Any.check(&image.path, is_encrypted)?;
        }
        if let Some(below) = &below {
            check_content_id(&*image.head, below.members().first()).map_err(|error| step.describe(error))?;
            image.hold_against_pin(below, options).await.map_err(|error| step.describe(error))?;
        }
        let top_tally = HostTally::default();
        let state = match image.head.pin().is_some() == was_pinned {
            true => TablesState::found(options.is_written()),
            false => TablesState::Reopened,
        };
        let tables = flash::over_tables(options, &*image.head, &image.storage, flash_id.as_ref(), state);
        let tables = tables.await.map_err(|error| step.describe(error))?;
        let how = How {
            tables: tables.as_ref(),
            read_only: options.read_only,
            snapshot: options.snapshot.clone(),
            tally: &top_tally,
            mapping_share: top_share(top_need, below.as_ref(), options),
            fills: below.as_ref().and_then(Stand::fills),
            options,
        };
        let base_files = below.as_ref().map(|below| files_below(below.members())).unwrap_or_default();
        let tap = tap_over(below.as_ref(), &base_files, options);
        let Found { path, storage, data_file, parts, head, is_replayed } = image;
        let files = files_of(&storage, data_file.as_ref(), over(below.as_ref(), tap.as_ref()));
        let opened = open_disk(&*head, files, &parts, how).await;
        let opened = opened.map_err(|error| way_down::describe(error, &path, 0))?;
        let is_snapshot = options.snapshot.is_some();
        let flash = None;
        let mut top =
            Member { path, storage, data_file, parts, head, is_replayed, is_snapshot, opened, flash, tables };
        if let Some(tap) = &tap {
            tap.is_below(&*top.opened.disk);
        }
        let options = options.clone();
        if let Err(error) = top.put_under_flash(&options, flash_id.as_ref(), state).await {
            // It is as it was found, or recovered.
            drop(top.opened.disk.close().await);
            return Err(step.describe(error));
        }
        let chain = Self {
            top,
            top_tally,
            below,
            tap,
            base_files,
            is_whole: false,
            options,
            top_need,
            flash_id,
            gone: None,
            was_left_open,
            fork: Fork::default(),
        };
        chain.tell_flash();
        Ok(chain)
    }

    /// The top image.
    pub fn top(&self) -> &Member {
        &self.top
    }

    /// The images, from the top down.
    pub fn members(&self) -> impl Iterator<Item = &Member> {
        std::iter::once(&self.top).chain(self.below.iter().flat_map(|below| below.members()))
    }

    /// The image with this many images above it.
    ///
    /// # Panics
    /// When the chain is shorter.
    pub fn member(&self, depth: usize) -> &Member {
        self.members().nth(depth).expect("the chain is as long")
    }

    /// Whether the guest's data is encrypted in one of the images.
    pub fn is_any_encrypted(&self) -> bool {
        self.members().any(|member| member.head.is_encrypted())
    }

    /// What stands between the top image and those below, if that was wanted and there are any.
    pub fn tap(&self) -> Option<&Arc<Tap>> {
        self.tap.as_ref()
    }

    /// What the images below cost the host, also for other disks of the process that share them.
    pub fn below_tally(&self) -> HostTally {
        self.below.as_ref().map(|below| below.tally().clone()).unwrap_or_default()
    }

    /// The disk on top.
    pub fn disk(&self) -> &SharedDisk {
        self.top.disk()
    }

    /// What the top image reads where it has nothing, if there is anything below it.
    pub fn disk_below(&self) -> Option<SharedDisk> {
        self.below.as_ref().map(|below| below.disk().clone())
    }

    /// The copies on a fast medium that the top image was opened with, if it was.
    pub fn tier(&self) -> Option<&Arc<dyn Tiers>> {
        self.top.opened.tier.as_ref()
    }

    /// Whether the previous writer of the top image had not closed it when it was opened: writes that were
    /// answered and not flushed may be missing. A raw image does not record this, nor does a native one without a journal.
    pub fn was_left_open(&self) -> bool {
        self.was_left_open
    }

    /// Makes true what the top image reads as, after a flush of it may have failed. Formats that know whether
    /// they were closed have done it by now; this is for an image that has no such mark and for a data file. Asked before
    /// anybody uses the disk.
    ///
    /// # Errors
    /// Those of the storage.
    pub async fn settle(&self) -> Result<()> {
        let top = &self.top;
        let unaware = (!top.head.knows_whether_closed()).then_some(&top.storage);
        let data_file = top.data_file.as_ref().map(|(_, file)| file);
        for storage in unaware.into_iter().chain(data_file) {
            settle(&**storage).await?;
        }
        Ok(())
    }

    /// The pin that an image over this one is to record; `None` where everything below it is a file.
    ///
    /// # Errors
    /// `Refused` when something at a URL proves nothing and is not trusted, `Unsupported` when the pin is too long.
    pub fn pin_of_all(&self) -> Result<Option<Pin>> {
        let found = FoundBelow::of(self.members());
        found.hold_against(None, self.options.trust_base, self.options.pin_base)
    }

    /// As above, where an image over this one has recorded one before: also where everything below it is a file.
    ///
    /// # Errors
    /// As above.
    pub fn pin_to_have(&self) -> Result<Option<Pin>> {
        FoundBelow::of(self.members()).hold_against(None, self.options.trust_base, true)
    }

    /// Why the disk on top is closed, if a change closed it and could not open it again.
    pub fn gone(&self) -> Option<&Error> {
        self.gone.as_ref()
    }

    /// Closes all disks, the top one first; those below when no other disk of the process stands on them. The
    /// first error is returned, but the others are closed all the same.
    pub async fn close(&self) -> Result<()> {
        let (top, below) = self.close_each().await;
        top.and(below)
    }

    /// As above, with what became of the top one, and of those below: what was answered is in the top one.
    pub async fn close_each(&self) -> (Result<()>, Result<()>) {
        let top = self.top.close().await;
        let below = match &self.below {
            Some(below) => below.leave().await,
            None => Ok(()),
        };
        (self.gone.clone().map_or(Ok(()), Err).and(top), below)
    }
}

impl Member {
    /// Its disk, under the flash cache if there is one.
    pub fn disk(&self) -> &SharedDisk {
        self.flash.as_ref().map_or(&self.opened.disk, Flashed::disk)
    }

    /// Puts the flash cache over the disk of the top image.
    async fn put_under_flash(
        &mut self,
        options: &ChainOptions,
        place: Option<&Identity>,
        state: TablesState,
    ) -> Result<()> {
        let is_written = !options.read_only && options.snapshot.is_none();
        // The proof of the file says nothing of a second one, or of which snapshot is read.
        let is_proven = self.data_file.is_none() && self.parts.is_empty() && !self.is_snapshot;
        self.flash = match options.flash.as_ref().filter(|_| is_written || is_proven) {
            Some(choice) => {
                let state = is_proven.then_some(state);
                let (head, opened, storage) = (&*self.head, &self.opened, &*self.storage);
                flash::over_top(choice, head, opened, storage, place, is_written, state).await?
            }
            None => None,
        };
        Ok(())
    }

    /// Closes it for good.
    async fn close(&self) -> Result<()> {
        let closed = self.close_disk().await;
        self.leave_cache(closed.is_ok()).await;
        closed
    }

    async fn close_disk(&self) -> Result<()> {
        self.disk().close().await.context(|| format!("can't close {}", self.path.display()))
    }

    /// After its disk was closed. The image is what it is by then: an error costs what is cached.
    async fn leave_cache(&self, is_done: bool) {
        if let Some(flash) = &self.flash {
            let _kept = flash.leave(&*self.storage, is_done).await;
        }
        if let Some(tables) = &self.tables {
            let _kept = tables.close(&*self.storage, is_done).await;
        }
    }
}

/// The memory for the mapping of the top image, in bytes.
fn top_share(need: u64, below: Option<&Stand>, options: &ChainOptions) -> u64 {
    let below = below.map_or(&[][..], |below| below.needs());
    let needs: Vec<u64> = std::iter::once(need).chain(below.iter().copied()).collect();
    share::shares(&needs, options.mapping_bytes_max).images[0]
}

/// How one image of a chain is opened.
struct How<'a> {
    tables: Option<&'a FlashedTables>,
    read_only: bool,
    snapshot: Option<String>,
    tally: &'a HostTally,
    mapping_share: u64,
    /// What blocks that are written in part are completed from, if that is not the disk below as guests read it.
    fills: Option<SharedDisk>,
    options: &'a ChainOptions,
}

/// What an image is opened with, over the disk below it.
fn files_of(
    image: &SharedStorage,
    data_file: Option<&(PathBuf, SharedStorage)>,
    below: Option<SharedDisk>,
) -> Files {
    Files { image: image.clone(), data_file: data_file.map(|(_, file)| file.clone()), below }
}

/// How much memory all of the image's mapping takes, in bytes.
fn mapping_need(head: &dyn Head, storage: &SharedStorage, read_only: bool) -> u64 {
    head.mapping_bytes(read_only.then(|| storage.len()))
}

/// The disk that an image makes.
async fn open_disk(
    head: &dyn Head,
    mut files: Files,
    parts: &[(PathBuf, SharedStorage)],
    how: How<'_>,
) -> Result<Opened> {
    let How { tables, read_only, snapshot, tally, mapping_share, fills, options } = how;
    if read_only || snapshot.is_some() {
        flash::may_only_read(options, head, files.image.name())?;
    }
    if let Some(file) = files.data_file.as_ref().filter(|_| !read_only && head.was_left_open()) {
        settle(&**file).await?;
    }
    let open = OpenOptions {
        read_only,
        snapshot,
        mapping_bytes_max: mapping_share,
        offload: options.offload.clone(),
        tally: tally.clone(),
        prealloc: options.prealloc,
        compaction: options.compaction,
        clock: options.clock.clone(),
        secrets: options.secrets.clone(),
        may_be_weak: options.may_be_weak,
        without_below: options.without_backing,
        // Those below are only read, and never behind.
        flash: options.flash.as_ref().filter(|_| !read_only).and_then(|choice| choice.id_for(head)),
        fills,
        tables: tables.map(|tables| tables.put_into(&mut files)),
        fast: options.fast.clone(),
        growth: options.growth,
        // What lies below an image that is written is read as a whole.
        salvages: options.salvages && read_only == options.read_only,
    };
    head.open_in_parts(files, parts.iter().map(|(_, file)| file.clone()).collect(), open).await
}

/// An image on the way, and the next one below it.
async fn find_one(
    way: &mut WayDown<'_>,
    step: &Step,
    options: &ChainOptions,
) -> Result<(Found, Option<Step>)> {
    let found = find_file(way.opener(), step, options).await;
    let (trust, image) = found.map_err(|error| step.describe(error))?;
    if options.without_backing {
        return Ok((image, None));
    }
    let referrer = step.referrer(&image.storage, trust);
    let next = way.next_below(step, referrer, &*image.head).await?;
    Ok((image, next))
}

async fn find_file(opener: &dyn Opener, step: &Step, options: &ChainOptions) -> Result<(Trust, Found)> {
    let Step { path, canonical, format, depth, snapshot } = step;
    if snapshot.is_some() {
        // Its content is read in another way (`forks`). Whoever writes the file may be doing so now.
        let storage = opener.open(canonical, path, Purpose::Look).await?;
        let head = FormatKind::Native.format().read(&*storage).await?;
        let (data_file, parts) = (None, Vec::new());
        let found = Found { path: path.clone(), storage, data_file, parts, head, is_replayed: false };
        return Ok((Trust::Declared, found));
    }
    let writes = options.writes_at(*depth);
    let purpose = if writes { Purpose::Write } else { Purpose::Read };
    let storage = opener.open(canonical, path, purpose).await?;
    let (kind, trust) = match *format {
        Some(kind) => (kind, Trust::Declared),
        None => guess_format(&*storage, path, canonical).await?,
    };
    if !kind.format().is_recognised() && format.is_none() && writes {
        return Err(Error::invalid(format!(
            "{}: the format is not recognised; if this is a raw disk, use `-f raw` to write it",
            path.display()
        )));
    }
    let (storage, is_replayed) = match writes {
        true => (storage, false),
        false => {
            let read = replayed_or_closed(opener, canonical, path, storage, kind).await?;
            read.ok_or_else(|| being_written(path))?
        }
    };
    let head = kind.format().read(&*storage).await?;
    let data_file = match head.data_file() {
        None => None,
        Some(name) => {
            let path = Gate::resolve(path, name)?;
            let canonical_file = opener.canonical(&path).await?;
            let context = || "can't open its data file";
            let image = step.referrer(&storage, trust);
            options.gate.check_data_file(image, &canonical_file, writes).context(context)?;
            Some((path.clone(), opener.open(&canonical_file, &path, purpose).await.context(context)?))
        }
    };
    let mut parts = Vec::with_capacity(head.parts().len());
    for name in head.parts() {
        parts.push(open_part(opener, step, &storage, trust, name, options).await?);
    }
    Ok((trust, Found { path: path.clone(), storage, data_file, parts, head, is_replayed }))
}

/// A file that an image names as a part of itself. It is only read.
async fn open_part(
    opener: &dyn Opener,
    step: &Step,
    image: &SharedStorage,
    trust: Trust,
    name: &str,
    options: &ChainOptions,
) -> Result<(PathBuf, SharedStorage)> {
    let context = || format!("can't open its extent {name:?}");
    let path = Gate::resolve(&step.path, name).context(context)?;
    let canonical = opener.canonical(&path).await.context(context)?;
    options.gate.check_data_file(step.referrer(image, trust), &canonical, false).context(context)?;
    if canonical == step.canonical {
        return Err(Error::corrupt(format!("{} names itself as its extent", step.path.display())));
    }
    let file = opener.open(&canonical, &path, Purpose::Read).await.context(context)?;
    Ok((path, file))
}

/// The format of a file by what it holds, held against its names; and whether they declare it.
///
/// # Errors
/// `Refused` when the name suggests another format, `Unsupported` for a format that is not read here.
pub async fn guess_format(
    storage: &dyn Storage,
    name: &Path,
    canonical: &Path,
) -> Result<(FormatKind, Trust)> {
    let kind = probe(storage).await?;
    Ok((kind, Trust::of(&[name, canonical], kind)?))
}

/// The image as it reads once it is recovered, in memory; one that was closed as it is. Nothing when another
/// program writes it just now: then a part of what it holds is in that program's memory.
///
/// # Errors
/// The errors of the recovery and of opening.
pub async fn replayed(
    opener: &dyn Opener,
    canonical: &Path,
    name: &Path,
    storage: SharedStorage,
    kind: FormatKind,
) -> Result<Option<SharedStorage>> {
    let read = replayed_or_closed(opener, canonical, name, storage, kind).await?;
    Ok(read.map(|(storage, _)| storage))
}

/// As above, with whether it had to be replayed.
async fn replayed_or_closed(
    opener: &dyn Opener,
    canonical: &Path,
    name: &Path,
    storage: SharedStorage,
    kind: FormatKind,
) -> Result<Option<(SharedStorage, bool)>> {
    if !needs_replay(&*storage, kind).await? {
        return Ok(Some((storage, false)));
    }
    let locked = match opener.open(canonical, name, Purpose::Replay).await {
        Err(error) if error.kind() == ErrorKind::Locked => return Ok(None),
        opened => opened?,
    };
    // It may have been closed meanwhile.
    match needs_replay(&*locked, kind).await? {
        true => replayed_in_memory(locked, kind).await.map(|read| Some((read, true))),
        false => Ok(Some((locked, false))),
    }
}

/// Why such an image cannot be read, whatever the user allows.
pub fn being_written(name: &Path) -> Error {
    Error::unsupported(format!(
        "{} is being served or written by another program, and part of its data is known to that program only: read \
         it through that program, or stop it first",
        name.display()
    ))
}
