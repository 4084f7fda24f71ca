//! What can be done with an image that no server uses: it is checked, recovered, resized, given a journal,
//! and its snapshots are made, listed and deleted. All of it concerns one file, without the images below.
//! Each function must be called on a worker.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use vellum_core::{Buffer, Context, Error, ErrorKind, GuestOffset, Result, SharedStorage, WriteFlags};
use vellum_format::FormatKind;
use vellum_format::image::{Amend, Format, Growth, Reserve, Snapshot, SnapshotSupport, Wanted};
use vellum_format::luks::Secrets;
use vellum_format::qcow2::Preallocation;
use vellum_format::report::{CheckReport, JournalChange, Recovered, Repair};
use vellum_format::session::{Session, may_use};

use crate::bitmaps::names_of;
use crate::clones_of::{refuse_while_cloned, with_clones};
use crate::create::reserve_of;
use crate::data_file::make_durable;
use crate::host::{Pool, canonical_path};
use crate::image::{ImageOptions, Remote, open_file, open_file_replayed, open_image};
use crate::inspect::len_below;
use crate::tier::{FILES_SNAPSHOT, LISTED_MAX, medium_beside, tier_of};

/// What a check came to.
pub struct Checked {
    /// The format of the image.
    pub format: FormatKind,
    /// What was counted; nothing, where the format has nothing that could be checked.
    pub report: Option<CheckReport>,
    /// A line for each thing found.
    pub lines: Vec<String>,
    /// The session with a flash cache that it names.
    pub session: Option<Session>,
    /// What its fast medium alone has, if there is any.
    pub moved: Option<MovedFound>,
}

/// What was found of the parts of a disk that a fast medium alone has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MovedFound {
    /// So many units.
    pub units: u64,
    /// The size of a unit in bytes.
    pub unit_bytes: u64,
    /// What of it cannot be read there, in bytes. Not known where the medium was not given.
    pub lost_bytes: Option<u64>,
}

/// Compares an image's metadata with its content, and repairs it on request.
///
/// # Errors
/// When it cannot be opened or read so far, or a repair cannot be written.
pub async fn check(
    path: &Path,
    options: &ImageOptions,
    fast: Option<&Path>,
    repair: Repair,
) -> Result<Checked> {
    let options = ImageOptions { read_only: repair == Repair::Nothing, ..options.clone() };
    let (storage, format) = match repair {
        Repair::Nothing => open_file_replayed(path, &options).await?,
        _ => {
            let (storage, format) = open_file(path, &options).await?;
            make_durable(path, &options, &storage, format).await?;
            (storage, format)
        }
    };
    let mut lines = Vec::new();
    let mut report = format.format().check(&storage, repair, &mut |line| lines.push(line)).await?;
    let head = format.format().read(&*storage).await?;
    let moved = match (&mut report, fast) {
        (Some(report), Some(fast)) if report.moved_units > 0 => {
            let reading = ImageOptions { read_only: true, ..options.clone() };
            Some(find_moved(path, fast, &reading, (report, &mut lines)).await?)
        }
        (Some(report), None) if report.moved_units > 0 => {
            let (units, unit_bytes) = (report.moved_units, head.cluster_size().unwrap_or_default());
            let bytes = units * unit_bytes;
            let named = head.fast().map(|named| format!(", last seen at {}", named.name)).unwrap_or_default();
            lines.push(format!(
                "{units} units ({bytes} bytes) are on a fast medium alone{named}: `vellum check --fast PATH` says whether it has them"
            ));
            Some(MovedFound { units, unit_bytes, lost_bytes: None })
        }
        _ => None,
    };
    let session = head.session();
    if let Some(session) = session.filter(Session::holds_writes) {
        lines.push(format!(
            "{} is behind its disk: the flash cache {} holds writes of it. What was checked is what the image has",
            path.display(),
            session.cache
        ));
    }
    Ok(Checked { format, report, lines, session, moved })
}

/// Looks, on the medium that is given, for the units that it alone has. What is lost is corrupt.
async fn find_moved(
    path: &Path,
    fast: &Path,
    options: &ImageOptions,
    (report, lines): (&mut CheckReport, &mut Vec<String>),
) -> Result<MovedFound> {
    let medium = medium_beside(Some(fast), true).await?;
    let options = ImageOptions { fast: medium, salvages: true, without_backing: true, ..options.clone() };
    let chain = open_image(path, &options).await?;
    let looked = async {
        let tier = tier_of(&chain)?;
        let unit_bytes = tier.unit_bytes();
        let (units, lost) = tier.look_for_lost().await?;
        let lost_bytes: u64 = lost.iter().map(|span| span.len()).sum();
        report.corruptions += lost_bytes.div_ceil(unit_bytes);
        for span in lost.iter().take(LISTED_MAX) {
            lines.push(format!(
                "ERROR {} bytes of the disk at {} are lost: they are on the fast medium alone, and cannot be read there",
                span.len(),
                span.start().bytes()
            ));
        }
        lines.push(format!(
            "{units} units are on the fast medium alone; of these {lost_bytes} bytes are lost"
        ));
        Ok(MovedFound { units, unit_bytes, lost_bytes: Some(lost_bytes) })
    };
    let found = looked.await;
    chain.close().await?;
    found
}

/// Does what any opening for writing does first, and nothing else.
///
/// # Errors
/// What opening and the recovery say; `Corrupt` when something is left that cannot be repaired.
pub async fn recover(path: &Path, options: &ImageOptions) -> Result<Recovered> {
    let (storage, kind) = open_file(path, options).await?;
    let format = kind.format();
    let mut head = format.read(&*storage).await?;
    may_use(&path.display().to_string(), head.session(), None)?;
    let mut done = Recovered { was_dirty: head.was_left_open(), ..Recovered::default() };
    if done.was_dirty {
        make_durable(path, options, &storage, kind).await?;
    }
    if head.needs_replay() {
        let context = || format!("can't recover {}", path.display());
        done.replayed = Some(format.recover(&storage).await.context(context)?);
        head = format.read(&*storage).await?;
    }
    done.finished = format.finish_interrupted(&storage).await?;
    if !head.may_be_miscounted(done.replayed.is_some()) {
        return Ok(done);
    }
    let report = format.check(&storage, Repair::All, &mut |_| {}).await?.unwrap_or_default();
    if report.corruptions > 0 || report.check_errors > 0 {
        return Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "{}: {} corruptions and {} unreadable parts cannot be repaired; `vellum check` lists them, and reading \
                 what is sound still works (`vellum convert`)",
                path.display(),
                report.corruptions,
                report.check_errors
            ),
        ));
    }
    Ok(Recovered { report, ..done })
}

/// How the disk of an image is resized.
#[derive(Debug, Clone, Default)]
pub struct ResizeOptions {
    /// The image's format; guessed when not given, but never for a raw disk.
    pub format: Option<FormatKind>,
    /// The disk may become smaller.
    pub may_shrink: bool,
    /// Space for what is added.
    pub preallocation: Preallocation,
    /// What opens encrypted images: those below, of which the last cluster may be needed, and the image itself where its last
    /// cluster is not whole.
    pub secrets: Arc<Secrets>,
    /// Where references may lead, besides the image's own directory.
    pub allow_dirs: Vec<PathBuf>,
    /// How remote images are asked for.
    pub remote: Remote,
}

/// Resizes the disk of an image. `wanted` computes the new size from the old one. Returns both, in bytes.
///
/// # Errors
/// Why it cannot have that size, and the errors of the image.
pub async fn resize(
    path: &Path,
    options: &ResizeOptions,
    wanted: impl FnOnce(u64) -> Result<u64>,
) -> Result<(u64, u64)> {
    let reading = ImageOptions {
        format: options.format,
        allow_dirs: options.allow_dirs.clone(),
        remote: options.remote.clone(),
        ..ImageOptions::reading()
    };
    let below = len_below(path, &reading).await?;
    let image = ImageOptions { format: options.format, ..ImageOptions::default() };
    let (mut storage, kind) = open_file(path, &image).await?;
    let format = kind.format();
    let before = format.finish(&storage).await?;
    let size = wanted(before)?;
    let longer = below.filter(|below| size > before && *below > before);
    let block = match longer {
        Some(_) => format.hides_below(&*storage).await?,
        None => None,
    };
    if let Some(below) = longer.filter(|_| block.is_none()) {
        return Err(Error::unsupported(format!(
            "{}: the backing image ({below} bytes) is larger than the disk, and its data would appear beyond \
             {before}: copy the disk into a larger image",
            path.display()
        )));
    }
    if !format.is_recognised() && options.format.is_none() {
        return Err(Error::invalid(format!(
            "{}: the format is not recognised; if this is a raw disk, use `-f raw` to change it",
            path.display()
        )));
    }
    let reserve = reserve_of(options.preallocation);
    if reserve != Reserve::Nothing && size < before {
        return Err(Error::invalid(
            "a disk that becomes smaller has nothing to preallocate: omit --preallocation",
        ));
    }
    if size <= before || longer.is_none() && reserve == Reserve::Nothing && options.secrets.is_empty() {
        if let Err(error) = format.resize(&storage, size, options.may_shrink).await {
            let is_past = size != before && has_size(format, &storage, size).await;
            let context = || {
                let name = path.display();
                format!(
                    "the disk of {name} has {size} bytes now; `vellum recover {name}` finishes the change"
                )
            };
            return Err(if is_past { error.context(context()) } else { error });
        }
        return Ok((before, size));
    }
    if block.is_some_and(|block| !before.is_multiple_of(block.bytes())) {
        drop(storage);
        let writing = ImageOptions {
            allow_dirs: options.allow_dirs.clone(),
            remote: options.remote.clone(),
            secrets: options.secrets.clone(),
            ..image.clone()
        };
        own_the_end(path, &writing).await?;
        storage = open_file(path, &image).await?.0;
    }
    let growth = Growth {
        below: longer.unwrap_or(0),
        reserve,
        secrets: options.secrets.clone(),
        offload: Arc::new(Pool),
    };
    match format.grow_with(&storage, size, &growth).await {
        Err(error) if has_size(format, &storage, size).await => Err(error).context(|| {
            let name = path.display();
            match reserve {
                Reserve::Nothing => format!("the disk of {name} has {size} bytes now"),
                _ => format!("the disk of {name} has {size} bytes now, but perhaps not the space for them"),
            }
        }),
        grown => grown.map(|()| (before, size)),
    }
}

/// Whether a change of size that failed was past its commit point.
async fn has_size(format: &dyn Format, storage: &SharedStorage, size: u64) -> bool {
    format.read(&**storage).await.is_ok_and(|head| head.size() == size)
}

/// Writes the last bytes of a disk once more, so that the image has the cluster in which it ends: the disk below goes on there.
async fn own_the_end(path: &Path, options: &ImageOptions) -> Result<()> {
    let chain = open_image(path, options).await?;
    let done = async {
        let disk = chain.disk();
        let len = disk.geometry().size.min(512);
        let at = GuestOffset::new(disk.geometry().size - len);
        let len = usize::try_from(len).expect("at most 512");
        let bytes = disk.read(at, Buffer::for_overwrite(len)).await?;
        disk.write(at, bytes, WriteFlags::default()).await
    };
    let done = done.await;
    let closed = chain.close().await;
    done.and(closed)
}

/// Adds a journal to an image, of this size if one is given; or removes it.
///
/// # Errors
/// `Unsupported` if the format leaves no choice, and the errors of the image.
pub async fn set_journal(path: &Path, wish: Option<Option<u64>>) -> Result<JournalChange> {
    let (storage, kind) = open_file(path, &ImageOptions::default()).await?;
    kind.format().set_journal(&storage, &path.display().to_string(), wish).await
}

/// Changes what an image is, in place.
///
/// # Errors
/// `Unsupported` for a format or a change that needs a copy, and the errors of the image.
pub async fn amend(path: &Path, format: Option<FormatKind>, wish: &Amend) -> Result<()> {
    let options = ImageOptions { format, ..ImageOptions::default() };
    let (storage, kind) = open_file(path, &options).await?;
    kind.format().amend(&storage, wish).await
}

/// The snapshots of an image, in the order in which they were made.
///
/// # Errors
/// `Unsupported` for a format without snapshots, and the errors of the image.
pub async fn snapshots(path: &Path, format: Option<FormatKind>, force_share: bool) -> Result<Vec<Snapshot>> {
    listed(path, format, force_share).await?.map_err(|kind| none_in(path, kind))
}

/// As above; nothing for a format without snapshots.
///
/// # Errors
/// The errors of the image.
pub async fn snapshots_if_any(
    path: &Path,
    format: Option<FormatKind>,
    force_share: bool,
) -> Result<Option<Vec<Snapshot>>> {
    listed(path, format, force_share).await.map(std::result::Result::ok)
}

/// The snapshots of an image, or its format if that has none.
async fn listed(
    path: &Path,
    format: Option<FormatKind>,
    force_share: bool,
) -> Result<std::result::Result<Vec<Snapshot>, FormatKind>> {
    let options = ImageOptions { format, force_share, ..ImageOptions::reading() };
    let (storage, kind) = open_file_replayed(path, &options).await?;
    if kind.format().snapshot_support() == SnapshotSupport::None {
        return Ok(Err(kind));
    }
    kind.format().read(&*storage).await?.snapshots(&storage, Some(&storage)).await.map(Ok)
}

/// Makes a snapshot. Returns its id. `may_repeat` allows a name that another snapshot has, where the format does.
///
/// # Errors
/// `Unsupported` for a format that cannot make snapshots, and the errors of the image.
pub async fn snapshot_create(
    path: &Path,
    format: Option<FormatKind>,
    name: &str,
    may_repeat: bool,
) -> Result<String> {
    let now = since_1970();
    refuse_own_name(name)?;
    let (storage, format) = keeper(path, format, "created").await?;
    if let Some(closed) = format.closed_snapshots() {
        return closed.create(&storage, name, now, may_repeat).await;
    }
    let (disk, snapshots) = format.open_alone(&storage).await?;
    let made = snapshots.create(name, now.as_secs()).await;
    let closed = disk.close().await;
    let id = made?;
    closed.map(|()| id.to_string())
}

/// A snapshot of this name would be deleted by the next change of pins.
pub(crate) fn refuse_own_name(name: &str) -> Result<()> {
    match name == FILES_SNAPSHOT {
        true => Err(Error::invalid(format!(
            "{name} is the name of a snapshot that `vellum tier pin` makes: use another"
        ))),
        false => Ok(()),
    }
}

/// The time, for a snapshot.
pub(crate) fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Deletes a snapshot.
///
/// # Errors
/// As [`snapshot_create`]; `NotFound` when there is none.
pub async fn snapshot_delete(path: &Path, format: Option<FormatKind>, wanted: Wanted<'_>) -> Result<()> {
    let (storage, format) = keeper(path, format, "deleted").await?;
    if let Some(closed) = format.closed_snapshots() {
        return closed.delete(&storage, wanted).await;
    }
    let only_by_name = matches!(wanted, Wanted::Name(_));
    let wanted = wanted.text();
    let (disk, snapshots) = format.open_alone(&storage).await?;
    let deleted = match only_by_name {
        true => snapshots.delete(&format!("snapshot.name={wanted}")).await,
        false => snapshots.delete(wanted).await,
    };
    let all = snapshots.list();
    let closed = disk.close().await;
    match (deleted, all, canonical_path(path).await) {
        (Err(error), Ok(all), Ok(image)) => Err(with_clones(error, &image, &all, wanted).await),
        (deleted, ..) => deleted.and(closed),
    }
}

/// Records that clones stand on a snapshot, unless the image says so already.
///
/// # Errors
/// As [`snapshot_delete`].
pub(crate) async fn snapshot_hold(path: &Path, format: Option<FormatKind>, wanted: &str) -> Result<Snapshot> {
    let (storage, format) = cloned(path, format, "cloned").await?;
    let (disk, snapshots) = format.open_alone(&storage).await?;
    let marked = snapshots.mark_cloned(wanted).await;
    let closed = disk.close().await;
    marked.and_then(|snapshot| closed.map(|()| snapshot))
}

/// Releases a snapshot on which no clone stands any more, so that it can be deleted. Clones are looked for in the
/// image's directory and in `look_in`.
///
/// # Errors
/// `Refused` when there is a clone, and as [`snapshot_delete`].
pub async fn snapshot_release(
    path: &Path,
    format: Option<FormatKind>,
    wanted: &str,
    look_in: &[PathBuf],
) -> Result<()> {
    // The lock keeps others from making a clone meanwhile.
    let (storage, format) = cloned(path, format, "released").await?;
    let image = canonical_path(path).await.context(|| format!("can't find {}", path.display()))?;
    let (disk, snapshots) = format.open_alone(&storage).await?;
    let released = async {
        let snapshot = snapshot_of(&snapshots.list()?, wanted)?;
        refuse_while_cloned(&image, &snapshot, look_in).await?;
        snapshots.release(&snapshot.id).await
    };
    let released = released.await;
    let closed = disk.close().await;
    released.and(closed)
}

/// The snapshot of this number, else of this name.
pub(crate) fn snapshot_of(all: &[Snapshot], wanted: &str) -> Result<Snapshot> {
    let by_id = all.iter().find(|one| one.id == wanted);
    let found = by_id.or_else(|| all.iter().find(|one| one.name == wanted));
    found
        .cloned()
        .ok_or_else(|| Error::new(ErrorKind::NotFound, format!("there is no snapshot named {wanted}")))
}

/// Gives a snapshot another name.
///
/// # Errors
/// As [`snapshot_delete`].
pub async fn snapshot_rename(
    path: &Path,
    format: Option<FormatKind>,
    wanted: &str,
    name: &str,
) -> Result<()> {
    refuse_own_name(name)?;
    let (storage, format) = keeper(path, format, "renamed").await?;
    if let Some(closed) = format.closed_snapshots() {
        return closed.rename(&storage, Wanted::IdOrName(wanted), name).await;
    }
    let (disk, snapshots) = format.open_alone(&storage).await?;
    let renamed = snapshots.rename(wanted, name).await;
    let closed = disk.close().await;
    renamed.and(closed)
}

/// Makes the disk what a snapshot has. Returns the names of its bitmaps, which are gone then: they say nothing of the disk as it is.
///
/// # Errors
/// As [`snapshot_delete`].
pub async fn snapshot_revert(path: &Path, format: Option<FormatKind>, wanted: &str) -> Result<Vec<String>> {
    let (storage, format) = keeper(path, format, "reverted to").await?;
    let bitmaps = names_of(format, &*storage).await;
    format.revert(&storage, wanted).await?;
    Ok(bitmaps)
}

/// The image for writing, which must be of a format that makes snapshots.
async fn keeper(
    path: &Path,
    format: Option<FormatKind>,
    what: &str,
) -> Result<(SharedStorage, &'static dyn Format)> {
    let options = ImageOptions { format, ..ImageOptions::default() };
    let (storage, kind) = open_file(path, &options).await?;
    match kind.format().snapshot_support() {
        SnapshotSupport::Kept => Ok((storage, kind.format())),
        SnapshotSupport::Read => Err(Error::unsupported(format!(
            "{}: snapshots of {kind} images can be listed and read, not {what}",
            path.display()
        ))),
        SnapshotSupport::None => Err(none_in(path, kind)),
    }
}

/// As above, of a format that records which snapshots have clones.
async fn cloned(
    path: &Path,
    format: Option<FormatKind>,
    what: &str,
) -> Result<(SharedStorage, &'static dyn Format)> {
    let (storage, format) = keeper(path, format, what).await?;
    match format.closed_snapshots() {
        None => Ok((storage, format)),
        Some(_) => Err(Error::unsupported(format!(
            "{}: snapshots of {} images cannot be {what}; only those of vellum images can have clones",
            path.display(),
            format.kind()
        ))),
    }
}

fn none_in(path: &Path, kind: FormatKind) -> Error {
    Error::unsupported(format!("{}: a {kind} image has no snapshots", path.display()))
}
