//! Converting a disk: a copy of it in a new image, which gets its name when it is complete, or in one that is
//! there.
//!
//! ```text
//!   a new image        created under a temporary name ► filled ► renamed to the target       (a draft)
//!   one in place       a device, several hard links, a directory that cannot be written ► filled where it is
//!   an existing one    opened ► filled where it is
//! ```
//!
//! What a conversion that fails leaves behind is never taken for a whole image: a draft is removed, a new file
//! in place is emptied. The error says which, and what is left. One that ends well is durable, unless its caller wants no
//! flushes. A draft is flushed once, when it is whole and closed: nobody recovers one that is not. Everything else is flushed
//! as its format needs.

use std::cell::Cell;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vellum_core::{BlockSize, Context, Error, ErrorKind, GuestSpan, Result, SharedDisk, Storage as _};
use vellum_format::image::FileGrowth;
use vellum_format::luks::Secrets;
use vellum_format::{FormatKind, native, qcow2};
use vellum_io::{Draft, File};
use vellum_layer::{Chain, Encrypted, Gate};

use crate::bitmaps::{BitmapCopy, add_copies, may_add_copies};
use crate::copy::{CopyCompression, CopyOptions, copy};
use crate::create::{CreateTarget, create_native, create_qcow2_instead, new_luks, new_raw};
use crate::host::check_new_name;
use crate::image::{ImageOptions, Remote, open_image};
use crate::joined::joined;
use crate::replaced::replaced_that_reads;
use crate::salvage::Salvaged;
pub use crate::same_file::same_file;
use crate::same_file::{files_of, files_of_top, first_same_file, refuse_same_file};
use crate::signals::Stop;
use crate::window::Window;

/// The file of a new image grows by this much at a time, or by as much as the disk has: all writes wait meanwhile.
const GROWTH_BYTES: u64 = 1 << 30;

/// For this much at a time the host's file system finds space, which must not be far more than is written.
const ALLOCATED_BYTES: u64 = 64 << 20;

/// What a disk is converted into, and how.
#[derive(Debug, Clone)]
pub struct Conversion {
    /// The image that gets the copy.
    pub target: PathBuf,
    /// Its format.
    pub format: FormatKind,
    /// The options of a new qcow2 image; of a raw one its preallocation, of a luks one that and its keys.
    pub qcow2: qcow2::CreateOptions,
    /// The options of a new image of the native format.
    pub native: native::CreateOptions,
    /// What opens the target, where that is encrypted.
    pub secrets: Arc<Secrets>,
    /// The target exists already and is filled.
    pub fills_existing: bool,
    /// What an existing target must be, if the user has said that it is encrypted.
    pub must_be_encrypted: Option<Encrypted>,
    /// An existing target reads as zero already.
    pub target_is_zero: bool,
    /// Data files that an existing target may have and write, because the user named them.
    pub data_files: Vec<PathBuf>,
    /// Where references of the target may lead, besides its own directory.
    pub allow_dirs: Vec<PathBuf>,
    /// How remote images are asked for.
    pub remote: Remote,
    /// Past the page cache.
    pub direct: bool,
    /// A raw or qcow2 target is written past the page cache where its file system can do that.
    pub writes_direct: bool,
    /// Nothing is flushed: a crash of the machine after the end may leave a part of the copy under the target's name.
    pub never_flushed: bool,
    /// Pieces in flight at once, at least one.
    pub pieces_at_once: usize,
    /// Runs of zeros at least this long are not written; zero writes everything, holes too.
    pub sparse_bytes: u64,
    /// Pieces may be written in any order.
    pub out_of_order: bool,
    /// Write at most this many bytes a second.
    pub rate: Option<u64>,
    /// What cannot be read of the source is zero in the copy, and told ([`Step::Lost`]).
    pub salvages: bool,
    /// Data is stored compressed.
    pub compression: Option<ConvertCompression>,
    /// The backing image of a new one, by its name there, and its format: only what reads differently is copied.
    pub backing: Option<(String, FormatKind)>,
    /// Bitmaps that the copy gets, before it has its name.
    pub bitmaps: Vec<BitmapCopy>,
}

/// How the data of a new image is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ConvertCompression {
    /// From fast to small; what is usual for the method, when not given.
    pub level: Option<i32>,
}

/// How far a conversion is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The target is open, and is not encrypted.
    IsPlain,
    /// The target is open, and this many bytes are to be copied.
    Begins(u64),
    /// This many have been copied.
    Copied(u64),
    /// No more will be copied: all are, or the copy has failed.
    Ends,
    /// This could not be read, and is zero in the copy.
    Lost(GuestSpan),
    /// So many bytes could not be read in all.
    LostInAll(u64),
}

/// Converts open disks, one behind the other, and closes them. `progress` gets each step. Must be called on a worker.
///
/// # Errors
/// The errors of the disks and of creating the new one, and what is left of it; `Closed` when it was stopped.
pub async fn convert(
    sources: Vec<Chain>,
    conversion: &Conversion,
    stop: &mut Stop,
    progress: &dyn Fn(Step),
) -> Result<()> {
    let disks: Vec<SharedDisk> = sources.iter().map(|source| source.disk().clone()).collect();
    let files: Vec<PathBuf> = sources.iter().flat_map(files_of).collect();
    let known = match &sources[..] {
        [only] => only.tier().map(|tier| tier.missing()).unwrap_or_default(),
        _ => Vec::new(),
    };
    let close = async || {
        let mut closed = Ok(());
        for source in sources {
            closed = closed.and(source.close().await);
        }
        closed
    };
    let disk = match joined(&disks) {
        Ok(disk) => disk,
        Err(error) => return close().await.and(Err(error)),
    };
    let size = disk.geometry().size;
    if !conversion.salvages {
        return convert_and((&disk, &files), size, close, conversion, stop, progress).await;
    }
    let salvaged = Arc::new(Salvaged::of(disk, known));
    let disk: SharedDisk = salvaged.clone();
    let done = convert_and((&disk, &files), size, close, conversion, stop, progress).await;
    let lost = salvaged.lost();
    lost.runs.iter().for_each(|run| progress(Step::Lost(*run)));
    if lost.bytes > 0 {
        progress(Step::LostInAll(lost.bytes));
    }
    done
}

/// As [`convert`], for the part of the disk that begins there and has as many bytes, or as many as the disk has from
/// there on.
///
/// # Errors
/// Those of [`convert`].
pub async fn convert_part(
    source: Chain,
    (start, bytes): (u64, u64),
    conversion: &Conversion,
    stop: &mut Stop,
    progress: &dyn Fn(Step),
) -> Result<()> {
    let disk: SharedDisk = Arc::new(Window::of(source.disk().clone(), start, bytes));
    let sized = match conversion.format {
        // Other disks are in whole sectors anyway.
        FormatKind::Raw => disk.geometry().size.next_multiple_of(BlockSize::SECTOR.bytes()),
        _ => disk.geometry().size,
    };
    let files = files_of(&source);
    convert_and((&disk, &files), sized, async || source.close().await, conversion, stop, progress).await
}

/// As [`convert`], for a disk that needs no closing.
pub(crate) async fn convert_disk(
    source: &SharedDisk,
    conversion: &Conversion,
    stop: &mut Stop,
    progress: &dyn Fn(Step),
) -> Result<()> {
    convert_and((source, &[]), source.geometry().size, async || Ok(()), conversion, stop, progress).await
}

async fn convert_and(
    (source, source_files): (&SharedDisk, &[PathBuf]),
    new_size: u64,
    close: impl AsyncFnOnce() -> Result<()>,
    conversion: &Conversion,
    stop: &mut Stop,
    progress: &dyn Fn(Step),
) -> Result<()> {
    let bitmaps = &conversion.bitmaps[..];
    let (draft, loses_its_data) = match begin(conversion, source_files).await {
        Ok(begun) => begun,
        Err(error) => {
            close().await?;
            return Err(error);
        }
    };
    let has_begun = Cell::new(false);
    let copying = Copying {
        how: conversion,
        source_files,
        draft: draft.as_ref(),
        loses_its_data: loses_its_data.clone(),
        has_begun,
        progress,
    };
    let data_file = DataFile::of(&copying)?;
    let copied = copying.make_and_fill(source, new_size, stop).await;
    let mut copied = copied.and(close().await);
    if copied.is_ok() && !bitmaps.is_empty() {
        let path = draft.as_ref().map_or(&*conversion.target, Draft::path);
        let added = add_copies(path, conversion.format, bitmaps).await;
        copied = added.context(|| "can't add the bitmaps to the copy");
    }
    let has_begun = copying.has_begun.get();
    let done = match (copied, draft) {
        (Ok(()), Some(draft)) => {
            let fate = Fate::of(&draft, loses_its_data.as_deref());
            let made = std::fs::metadata(draft.path()).ok().map(|facts| (facts.dev(), facts.ino()));
            let published = match conversion.never_flushed {
                true => draft.publish_at_once().await,
                false => draft.publish().await, // commit point
            };
            published.map_err(|error| {
                let there = std::fs::metadata(&conversion.target);
                let has_name = there.is_ok_and(|facts| Some((facts.dev(), facts.ino())) == made);
                let kind = error.kind();
                error.context(if has_name { named(conversion) } else { removed(conversion, fate, kind) })
            })
        }
        (Ok(()), None) => Ok(()),
        (Err(error), Some(draft)) => {
            let fate = Fate::of(&draft, loses_its_data.as_deref());
            let left = give_up_draft(conversion, draft, fate, error.kind());
            Err(error.context(left))
        }
        (Err(error), None) if has_begun => {
            let left = give_up_in_place(conversion);
            Err(error.context(left))
        }
        (Err(error), None) => Err(error),
    };
    // What the old image still has is not to be deleted.
    let is_old_whole = loses_its_data.is_some_and(|old| old.len() > 0);
    done.map_err(|error| match data_file.filter(|_| has_begun && !is_old_whole) {
        Some(data_file) => data_file.give_up(error),
        None => error,
    })
}

/// What the target is filled under, and the image there that loses its data ([`replaced_that_reads`]). Nothing has changed until this returns.
async fn begin(how: &Conversion, source_files: &[PathBuf]) -> Result<(Option<Draft>, Option<Arc<File>>)> {
    refuse_source_as_target(how, &how.target, source_files)?;
    if how.fills_existing {
        if !how.bitmaps.is_empty() {
            may_add_copies(&how.target, how.format, &how.bitmaps).await?;
        }
        return Ok((None, None));
    }
    check_new_name(&how.target)?;
    let Some(draft) = Draft::begin(&how.target).await? else { return Ok((None, None)) };
    // Where a link is the target, the names of its other files start from another directory.
    refuse_source_as_target(how, draft.target(), source_files)?;
    let loses_its_data = match &how.qcow2.data_file {
        Some(name) => replaced_that_reads(&draft, &how.target, name).await?,
        None => None,
    };
    Ok((Some(draft), loses_its_data))
}

/// One conversion, once the source is open.
struct Copying<'a> {
    how: &'a Conversion,
    /// The files that are read.
    source_files: &'a [PathBuf],
    /// The file that gets the target's name when it is complete. Without one the target is filled in place.
    draft: Option<&'a Draft>,
    /// The image that it replaces, if that reads the data file that will be filled.
    loses_its_data: Option<Arc<File>>,
    /// Whether the target, or a data file, may have been changed.
    has_begun: Cell<bool>,
    progress: &'a dyn Fn(Step),
}

impl Copying<'_> {
    fn path(&self) -> &Path {
        self.draft.map_or(&self.how.target, Draft::path)
    }

    /// Whether the target is written past the page cache, where that can be done.
    fn writes_direct(&self) -> bool {
        self.how.writes_direct && self.lays_out_at_once()
    }

    /// Whether pieces are small: what is written goes to the page cache, and is neither packed nor compressed.
    fn in_small_pieces(&self) -> bool {
        let bypasses_cache = self.how.direct || self.writes_direct();
        self.lays_out_at_once() && !bypasses_cache && self.how.compression.is_none()
    }

    /// Into the page cache, ext4 looks for space for each block that has none, which is two fifths of the time a write takes.
    fn growth(&self, size: u64) -> FileGrowth {
        let hole_bytes = size.min(GROWTH_BYTES);
        match self.how.fills_existing {
            true => FileGrowth::Usual,
            false if self.in_small_pieces() => {
                FileGrowth::Allocated { hole_bytes, space_bytes: size.min(ALLOCATED_BYTES) }
            }
            false => FileGrowth::Hole(hole_bytes),
        }
    }

    /// Whether a write has its place as soon as it has begun, so that pieces that begin in the order of the disk lie in that order:
    /// at once, or once the file has grown, which is seldom ([`GROWTH_BYTES`]).
    fn lays_out_at_once(&self) -> bool {
        matches!(self.how.format, FormatKind::Raw | FormatKind::Qcow2 | FormatKind::Luks)
    }

    /// Whether what is written is not to be flushed by those who write it: a draft all of which is one file is flushed before it
    /// gets its name, or nothing is.
    fn is_flushed_elsewhere(&self) -> bool {
        let is_one_file = self.how.qcow2.data_file.is_none();
        self.how.never_flushed || self.draft.is_some() && is_one_file
    }

    async fn make_and_fill(&self, source: &SharedDisk, new_size: u64, stop: &mut Stop) -> Result<()> {
        if !self.how.fills_existing {
            let made = stop.or_stopped(self.make(new_size)).await;
            // With other errors it was not opened, or is a device too small.
            let is_device = !self.path().metadata().is_ok_and(|facts| facts.is_file());
            self.has_begun.set(match made.as_ref().map_err(Error::kind) {
                Ok(()) | Err(ErrorKind::Closed | ErrorKind::Io) => true,
                Err(ErrorKind::NoSpace) => !is_device,
                Err(_) => false,
            });
            made?;
        }
        self.fill(source, source.geometry().size, stop).await
    }

    /// Where the data file of a new image is, if it has one. The user named it.
    fn new_data_file(&self) -> Result<Option<PathBuf>> {
        let name = self.how.qcow2.data_file.as_ref().filter(|_| !self.how.fills_existing);
        name.map(|name| Gate::resolve(self.path(), name)).transpose()
    }

    async fn make(&self, size: u64) -> Result<()> {
        let target = CreateTarget {
            path: self.path().to_owned(),
            size: Some(size),
            backing: self.how.backing.clone(),
            trust_backing: self.how.backing.is_none(),
            allow_dirs: self.how.allow_dirs.clone(),
            remote: self.how.remote.clone(),
            trust_base: false,
            secrets: self.how.secrets.clone(),
            stands_on_encrypted: Arc::default(),
            never_flushed: self.is_flushed_elsewhere(),
        };
        match self.how.format {
            FormatKind::Raw => {
                new_raw(self.path(), size, self.how.qcow2.preallocation, self.is_flushed_elsewhere()).await
            }
            FormatKind::Qcow2 => {
                let old = self.loses_its_data.as_deref();
                create_qcow2_instead(&target, self.how.qcow2.clone(), old).await.map(drop)
            }
            FormatKind::Native => create_native(&target, self.how.native.clone()).await.map(drop),
            FormatKind::Foreign(_) => self.how.format.check_is_written(),
            FormatKind::Luks => {
                let new = &self.how.qcow2;
                let keys = new.encryption.as_deref();
                let made = new_luks(self.path(), size, keys, new.preallocation, self.is_flushed_elsewhere());
                made.await.map(drop)
            }
        }
    }

    async fn fill(&self, source: &SharedDisk, size: u64, stop: &Stop) -> Result<()> {
        let how = self.how;
        // The user named it, wherever it is.
        let backing = how.backing.as_ref().map(|(name, _)| Gate::resolve(self.path(), name)).transpose()?;
        let beside = backing.as_deref().and_then(Path::parent).map(Path::to_owned);
        let options = ImageOptions {
            format: Some(how.format),
            direct: how.direct,
            writes_direct: self.writes_direct(),
            never_flushed: self.is_flushed_elsewhere(),
            allow_dirs: how.allow_dirs.iter().cloned().chain(beside).collect(),
            remote: how.remote.clone(),
            secrets: how.secrets.clone(),
            must_be_encrypted: how.must_be_encrypted,
            growth: self.growth(size),
            data_files: how.data_files.iter().cloned().chain(self.new_data_file()?).collect(),
            ..ImageOptions::default()
        };
        let target = open_image(self.path(), &options).await?;
        // Nothing was written yet.
        if let Err(error) = refuse_among(&files_of_top(&target), self.source_files, &how.target) {
            target.close().await?;
            return Err(error);
        }
        let room = target.disk().geometry().size;
        if room < size {
            target.close().await?;
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("{} has {room} bytes, but the source has {size}", how.target.display()),
            ));
        }
        if !target.top().head.is_encrypted() {
            (self.progress)(Step::IsPlain);
        }
        let compression = match self.compression(&target) {
            Ok(compression) => compression,
            Err(error) => {
                target.close().await?;
                return Err(error);
            }
        };
        (self.progress)(Step::Begins(size));
        // Parts of a luks image that were never written read as random bytes, so zeros have to be written.
        let zeros_are_data = how.format == FormatKind::Luks;
        let is_fresh = !how.fills_existing && !target.top().storage.limits().fixed_len && !zeros_are_data;
        let copying = CopyOptions {
            pieces_at_once: how.pieces_at_once,
            sparse_bytes: if zeros_are_data && !how.target_is_zero { 0 } else { how.sparse_bytes },
            target_is_zero: is_fresh && how.backing.is_none() || how.target_is_zero,
            skips_same: how.backing.is_some(),
            out_of_order: how.out_of_order,
            overlaps: self.lays_out_at_once(),
            looks_up: how.format == FormatKind::Qcow2,
            in_small_pieces: self.in_small_pieces(),
            compression,
            rate: how.rate,
            stop: &stop.flag,
        };
        self.has_begun.set(true);
        let copied = |bytes| (self.progress)(Step::Copied(bytes));
        let result = copy(source, target.disk(), copying, &copied).await;
        (self.progress)(Step::Ends);
        // Closed in any case; the first error is reported.
        let closed = target.close().await;
        result.and(closed)
    }
}

impl Copying<'_> {
    /// What compresses the data, if it is to be compressed.
    fn compression<'a>(&self, target: &'a Chain) -> Result<Option<CopyCompression<'a>>> {
        let Some(ConvertCompression { level }) = self.how.compression else { return Ok(None) };
        let name = self.how.target.display();
        let Some(compressing) = target.top().opened.compressing.as_deref() else {
            let format = self.how.format;
            return Err(Error::unsupported(format!(
                "{name}: {format} images do not store compressed data: use qcow2"
            )));
        };
        let levels = compressing.levels();
        match level.filter(|level| !levels.contains(level)) {
            None => Ok(Some(CopyCompression { target: compressing, level })),
            Some(level) => Err(Error::invalid(format!(
                "{name}: there is no compression level {level}: use {} to {}",
                levels.start(),
                levels.end()
            ))),
        }
    }
}

/// Removes a draft; says what is under the target's name.
fn give_up_draft(how: &Conversion, draft: Draft, fate: Fate, why: ErrorKind) -> String {
    let path = draft.path().to_owned();
    if let Err(error) = draft.discard() {
        return format!("the unfinished copy {} cannot be removed ({error}): delete it", path.display());
    }
    removed(how, fate, why)
}

/// The copy has its name, and the error came afterwards.
fn named(how: &Conversion) -> String {
    let target = how.target.display();
    format!(
        "{target} is the whole copy, but its name is not durable: after a crash of the machine it may not be there"
    )
}

/// What became of the target when its copy was given up.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// There was none.
    NotCreated,
    /// It is as it was.
    Unchanged,
    /// Its data was in the data file of the copy.
    Emptied,
}

impl Fate {
    fn of(draft: &Draft, loses_its_data: Option<&File>) -> Self {
        match draft.replaces() {
            true if loses_its_data.is_some_and(|old| old.len() == 0) => Self::Emptied,
            true => Self::Unchanged,
            false => Self::NotCreated,
        }
    }
}

/// What is under the target's name, now that the draft is not there any more.
fn removed(how: &Conversion, fate: Fate, why: ErrorKind) -> String {
    let target = how.target.display();
    match fate {
        Fate::Unchanged if why == ErrorKind::NoSpace => format!(
            "{target} is unchanged, the unfinished copy was removed; there must be room for both until the copy is complete, or \
             delete the old one first"
        ),
        Fate::Unchanged => format!("{target} is unchanged, the unfinished copy was removed"),
        Fate::NotCreated => format!("{target} was not created, the unfinished copy was removed"),
        Fate::Emptied => format!(
            "{target} was emptied, as its data was in the same data file and is overwritten; the unfinished copy was removed"
        ),
    }
}

/// Empties a new file that was filled in place, so that it is not taken for a whole image; says what is left.
fn give_up_in_place(how: &Conversion) -> String {
    let target = how.target.display();
    let part = format!("{target} contains only part of the copy and must be filled again before it is used");
    let is_file = how.target.metadata().is_ok_and(|facts| facts.is_file());
    if how.fills_existing || !is_file {
        return part;
    }
    match std::fs::OpenOptions::new().write(true).truncate(true).open(&how.target) {
        Ok(_) => format!("{target} was emptied because the copy is incomplete"),
        Err(error) => format!("{part}; it cannot be emptied ({error})"),
    }
}

/// The data file of a new image: filled under its own name, as it stands in the image.
struct DataFile {
    path: PathBuf,
    existed: bool,
}

impl DataFile {
    fn of(copying: &Copying<'_>) -> Result<Option<Self>> {
        let path = copying.new_data_file()?;
        Ok(path.map(|path| Self { existed: path.exists(), path }))
    }

    fn give_up(self, error: Error) -> Error {
        if !self.existed && std::fs::remove_file(&self.path).is_ok() {
            return error;
        }
        error.context(format!("{} contains only part of the copy's data: delete it", self.path.display()))
    }
}

/// Checks that what is written is nothing that is read: no name in the target, which will be at `place`, leads to a file of the source.
fn refuse_source_as_target(how: &Conversion, place: &Path, source_files: &[PathBuf]) -> Result<()> {
    let data_file = how.qcow2.data_file.as_ref().filter(|_| how.format == FormatKind::Qcow2);
    let data_file = data_file.map(|name| Gate::resolve(place, name)).transpose()?;
    if let Some(data_file) = data_file.as_ref().filter(|_| !how.fills_existing) {
        refuse_same_file(place, data_file)?;
    }
    let backing = how.backing.as_ref().map(|(name, _)| Gate::resolve(place, name)).transpose()?;
    let read: Vec<PathBuf> = source_files.iter().cloned().chain(backing).collect();
    let written: Vec<PathBuf> =
        [how.target.clone()].into_iter().chain(how.data_files.iter().cloned()).chain(data_file).collect();
    refuse_among(&written, &read, &how.target)
}

/// Checks that no file that is written is among those that are read.
fn refuse_among(written: &[PathBuf], read: &[PathBuf], target: &Path) -> Result<()> {
    let Some(one) = first_same_file(written, read) else { return Ok(()) };
    let target = target.display();
    Err(Error::invalid(format!(
        "{one} is read for the copy, and writing {target} would overwrite it: name another file"
    )))
}
