//! Fast media beside images (`docs/design/0021-tiers.md`): made, attached, filled, and open in a server.
//!
//! ```text
//!   attach    medium made, if it is not there ► its row for the image ► the image names it
//!   detach    the image names none ► the row is taken away
//!   serve     --fast PATH: open and locked for all disks of the server, whose images may name it
//! ```
//!
//! Each function must be called on a worker. A medium is opened for writing only where the user names it: what an image
//! says of it is for people.

mod pieces;
#[cfg(test)]
mod tests;
mod units;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;
use serde_json::{Value, json};
use vellum_core::{Context, Error, ErrorKind, GuestOffset, GuestSpan, Random, Result, SharedStorage};
use vellum_format::fast::{
    FastId, FastMedium, NamedFast, NewRow, Promoted, Promotion, Reason, RowFacts, TierFacts, Tiers, create,
    note_cut,
};
use vellum_io::{File, OpenOptions};
use vellum_layer::Chain;

use crate::flash::random_bytes;
use crate::image::{ImageOptions, open_file, open_image};
use crate::occupied::holds_something;
pub use pieces::Watch;
pub use units::{DemotedUnits, MovedUnits, PromotedUnits};

const ONLY_NATIVE: &str = "only images of the format vellum can have a fast medium. With others, put the backing image on fast storage";

/// The snapshot of a served disk that the guest's file system is read from.
pub(crate) const FILES_SNAPSHOT: &str = "vellum-tier-files";

/// Parts of a disk that are listed, at most.
pub(crate) const LISTED_MAX: usize = 1000;

/// A fast medium for an image.
#[derive(Debug, Clone)]
pub struct FastFor {
    /// The file or block device.
    pub path: PathBuf,
    /// How large it is made, in bytes, if it is not there yet. Of a block device, all of it when not given.
    pub size: Option<u64>,
    /// What the image's copies may take of it, in bytes; all of it when not given.
    pub budget: Option<u64>,
}

/// An image that was attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attached {
    /// Whether the medium was made for this.
    pub is_new: bool,
    /// How many bytes of copies the medium has room for.
    pub room: u64,
    /// At most this many of them are the image's.
    pub budget: u64,
}

/// What is copied to the fast medium, or taken back.
#[derive(Debug, Clone)]
pub struct Ranges {
    /// Offset and length, in bytes; everything where there is none.
    pub ranges: Vec<(u64, u64)>,
    /// Also what is read from the backing image.
    pub copies_base: bool,
}

impl Ranges {
    fn spans(&self, size: u64) -> Result<Vec<GuestSpan>> {
        if self.ranges.is_empty() {
            return Ok(vec![GuestOffset::ZERO.span(size)]);
        }
        let span = |(at, len): &(u64, u64)| {
            let span = GuestSpan::checked(GuestOffset::new(*at), *len);
            span.filter(|span| span.end().bytes() <= size && !span.is_empty()).ok_or_else(|| {
                Error::invalid(format!(
                    "the range {at}+{len} does not lie in the disk, which has {size} bytes"
                ))
            })
        };
        self.ranges.iter().map(span).collect()
    }
}

fn context(path: &Path) -> impl Fn() -> String + '_ {
    move || format!("can't open the fast medium {}", path.display())
}

fn locked(path: &Path, error: Error) -> Error {
    error.context(format!(
        "the fast medium {} is in use: one server at a time has it, and all of its disks are served by that one",
        path.display()
    ))
}

async fn open_storage(path: &Path) -> Result<SharedStorage> {
    // What is cut off fails, and is then read from the image.
    let opened = File::open(path, OpenOptions { keeps_len: true, ..OpenOptions::writing() }).await;
    Ok(opened.map_err(|error| match error.kind() {
        ErrorKind::Locked => locked(path, error),
        ErrorKind::NotFound => error.context(format!(
            "can't open the fast medium {} (`vellum tier attach` makes one)",
            path.display()
        )),
        _ => error.context(context(path)()),
    })?)
}

async fn open_on(storage: SharedStorage) -> Result<Arc<FastMedium>> {
    let medium = FastMedium::open(storage, Random::from_seed(u64::from_be_bytes(random_bytes()?))).await?;
    if let Some(damage) = medium.damage() {
        tracing::warn!("{damage}");
    }
    Ok(medium)
}

/// Opens a fast medium, and locks it.
///
/// # Errors
/// `Locked` while another program has it, `Invalid` when it is none, and the errors of the storage.
pub async fn open_medium(path: &Path) -> Result<Arc<FastMedium>> {
    open_on(open_storage(path).await?).await.context(context(path))
}

/// As above, to bring back what is there of this image. A medium that was cut off says so from then on, if it is the image's.
async fn medium_to_bring_back(path: &Path, image: &Path, options: &ImageOptions) -> Result<Arc<FastMedium>> {
    let named = {
        let (storage, kind) = open_file(image, options).await?;
        kind.format().read(&*storage).await?.fast()
    };
    let storage = open_storage(path).await?;
    if let Some(named) = named
        && note_cut(&storage, named.id).await.context(context(path))?
    {
        tracing::warn!(
            "{} was cut off: what was behind its end stays lost, also if it is made longer again",
            path.display()
        );
    }
    open_on(storage).await.context(context(path))
}

/// What an image that is only read is opened with: its fast medium, or, to salvage, what is left of it. That may be nothing.
///
/// # Errors
/// As for [`open_medium`]; to salvage only `Locked`.
pub async fn medium_to_read(path: Option<&Path>, salvages: bool) -> Result<Option<Arc<FastMedium>>> {
    let Some(path) = path else { return Ok(None) };
    if !salvages {
        return open_medium(path).await.map(Some);
    }
    let opened = async {
        let storage = File::open(path, OpenOptions { keeps_len: true, ..OpenOptions::reading() }).await?;
        FastMedium::open_to_salvage(storage, Random::from_seed(0)).await
    };
    match opened.await {
        Ok(medium) => Ok(Some(medium)),
        Err(error) if error.kind() == ErrorKind::Locked => Err(locked(path, error)),
        Err(error) => {
            tracing::warn!("{}: nothing of it is read", error.context(context(path)()).chain());
            Ok(None)
        }
    }
}

/// As above, for a command that may share the image with a server. The medium is not shared.
///
/// # Errors
/// As above, but `Refused` while another program has it.
pub async fn medium_beside(path: Option<&Path>, salvages: bool) -> Result<Option<Arc<FastMedium>>> {
    medium_to_read(path, salvages).await.map_err(|error| match error.kind() {
        ErrorKind::Locked => error
            .context("the fast medium cannot be shared: stop that server first")
            .with_kind(ErrorKind::Refused),
        _ => error,
    })
}

/// Opens a fast medium, which is made if there is none yet, unless something is against that. Whether it was.
async fn open_or_make(fast: &FastFor, against: Option<Error>) -> Result<(Arc<FastMedium>, bool)> {
    let path = &fast.path;
    let is_new = !path.exists();
    let storage: SharedStorage = match is_new {
        true if fast.size.is_none() => {
            let why = format!("{} does not exist: give its size to make it (--fast-size)", path.display());
            return Err(Error::new(ErrorKind::NotFound, why));
        }
        true => match &against {
            Some(error) => return Err(error.clone()),
            None => File::create_new(path, OpenOptions::writing()).await?,
        },
        false => open_storage(path).await?,
    };
    if !is_new && let Some(medium) = medium_there(&storage).await.context(context(path))? {
        return Ok((medium, false));
    }
    if let Some(error) = against.filter(|_| !is_new) {
        return Err(error);
    }
    let made = async {
        let bytes = fast.size.unwrap_or(storage.len());
        let id =
            FastId::new(random_bytes()?).ok_or_else(|| Error::corrupt("the host gave no random bytes"))?;
        create(&storage, bytes, id).await?;
        open_on(storage.clone()).await
    };
    let made = made.await;
    if made.is_err() && is_new {
        drop(storage);
        drop(std::fs::remove_file(path));
    }
    Ok((made?, true))
}

/// The fast medium that is there, if anything is: that is one, or not to be lost. So is what cannot be read.
async fn medium_there(storage: &SharedStorage) -> Result<Option<Arc<FastMedium>>> {
    if matches!(holds_something(storage).await, Ok(false)) {
        return Ok(None);
    }
    let opened = open_on(storage.clone()).await.map_err(|error| match error.kind() {
        ErrorKind::Invalid => error.context(
            "something else is there, which is not overwritten: if nobody needs it, remove the file, or empty the device \
             (`blkdiscard -z`), and try again",
        ),
        ErrorKind::Corrupt | ErrorKind::Io => error.context(
            "it cannot be opened, and is not made anew: it may have parts of disks alone (`vellum convert --salvage` reads what their \
             images have). If nobody needs it, use another one, or remove the file, or empty the device (`blkdiscard -z`)",
        ),
        _ => error,
    });
    opened.map(Some)
}

/// Attaches a closed image to a fast medium. Nothing is copied by this.
///
/// # Errors
/// `Unsupported` for an image that has no place for it, `Refused` for one that names another medium, and the errors of
/// both.
pub async fn attach(image: &Path, fast: &FastFor, options: &ImageOptions) -> Result<Attached> {
    let (storage, kind) = open_file(image, options).await?;
    let head = kind.format().read(&*storage).await?;
    let Some(uuid) = head.uuid() else {
        return Err(Error::unsupported(format!("{}: {ONLY_NATIVE}", image.display())));
    };
    if head.is_encrypted() {
        let why = "the image is encrypted, and the fast medium would have copies of its data as they are: keep the image \
                   itself on fast storage, or copy it into one that is not encrypted (`vellum convert`)";
        return Err(Error::unsupported(format!("{}: {why}", image.display())));
    }
    let attached_elsewhere = |other: NamedFast| {
        let why = format!(
            "{} is attached to another fast medium, last seen at {}: `vellum tier detach` it first",
            image.display(),
            other.name
        );
        Error::new(ErrorKind::Refused, why)
    };
    // No new medium is the one that it names.
    let is_file = !fast.path.exists();
    let (medium, is_new) = open_or_make(fast, head.fast().map(attached_elsewhere)).await?;
    if let Some(other) = head.fast().filter(|named| named.id != medium.id()) {
        return Err(attached_elsewhere(other));
    }
    let has_row = medium.rows().iter().any(|row| row.uuid == uuid);
    if !has_row && head.fast().is_some_and(|named| named.is_needed) {
        let why = "units of it are on its fast medium alone, which has lost what it knew of this image: a new row would not bring \
                   them back";
        return Err(Error::new(ErrorKind::Refused, format!("{}: {why}", image.display())));
    }
    let budget = fast.budget.unwrap_or(u64::MAX);
    let name = image.display().to_string();
    medium.attach(NewRow { uuid, budget, name }).await?;
    let place = fast.path.canonicalize().unwrap_or_else(|_| fast.path.clone());
    let named = kind.format().attach_fast(&storage, medium.id(), &place.display().to_string()).await;
    if named.is_err() && !has_row {
        // Such as for an image of a layout that can have none: it leaves nothing on the medium, and no medium.
        drop(medium.forget(uuid, false).await);
        if is_new && is_file {
            drop(std::fs::remove_file(&fast.path));
        }
    }
    named?;
    let room = medium.room_bytes();
    Ok(Attached { is_new, room, budget: budget.min(room) })
}

/// Lets an image name no fast medium, and takes its row away on `fast`, if that is given. Returns what it named.
///
/// # Errors
/// The errors of both.
pub async fn detach(image: &Path, fast: Option<&Path>, options: &ImageOptions) -> Result<Option<NamedFast>> {
    let (storage, kind) = open_file(image, options).await?;
    let head = kind.format().read(&*storage).await?;
    let named = head.fast();
    if let Some(named) = named.as_ref().filter(|named| named.is_needed) {
        let (image, medium) = (image.display(), &named.name);
        return Err(Error::new(
            ErrorKind::Refused,
            format!(
                "{image}: units of it are on its fast medium alone, last seen at {medium}: bring them back first (`vellum tier move \
                 --back --all --fast PATH {image}`), or, if that medium is lost, copy what is left (`vellum convert --salvage {image} \
                 NEW`)"
            ),
        ));
    }
    let medium = match fast {
        Some(path) => Some(open_medium(path).await.map_err(|error| match error.kind() {
            ErrorKind::Locked => error,
            _ => error.context("without --fast the image is detached, and its space there stays taken"),
        })?),
        None => None,
    };
    if let Some(medium) = &medium {
        medium.check_tables()?;
    }
    kind.format().detach_fast(&storage).await?;
    if let (Some(medium), Some(uuid)) = (medium, head.uuid()) {
        medium.forget(uuid, false).await?;
    }
    Ok(named)
}

/// A disk that a fast medium has a row for, as programs read it.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct TierRow {
    /// The UUID of its image.
    pub uuid: String,
    /// Where the image was when it was attached.
    pub filename: String,
    /// At most this many bytes of copies are its.
    pub budget_bytes: u64,
    /// Its copies take this many bytes, as far as is known without the image.
    pub used_bytes: u64,
    /// Units of it may be here alone.
    pub is_needed: bool,
}

fn uuid_text(uuid: [u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

fn rows_of(medium: &FastMedium) -> Vec<([u8; 16], TierRow)> {
    let row = |row: RowFacts| {
        let RowFacts { uuid, name, budget, used, is_needed, .. } = row;
        let facts = TierRow {
            uuid: uuid_text(uuid),
            filename: name,
            budget_bytes: budget.min(medium.room_bytes()),
            used_bytes: used,
            is_needed,
        };
        (uuid, facts)
    };
    medium.rows().into_iter().map(row).collect()
}

/// The disks that a fast medium has rows for, and how many of its bytes are free.
///
/// # Errors
/// Those of the medium.
pub async fn rows(fast: &Path) -> Result<(u64, Vec<TierRow>)> {
    let medium = open_medium(fast).await?;
    Ok((medium.free_bytes(), rows_of(&medium).into_iter().map(|(_, row)| row).collect()))
}

/// Takes the row of a disk away, without its image, and all that the medium has of the disk. `wanted` is a UUID or a name
/// that [`rows`] lists. An image that is attached still, and was only not found, has no copies then, and loses nothing but the
/// units that were moved: a disk that has some is refused unless `even_needed`.
///
/// # Errors
/// `Refused` as said, `NotFound` where there is no such row, `Invalid` where several have the name, and those of the medium.
pub async fn forget(fast: &Path, wanted: &str, even_needed: bool) -> Result<TierRow> {
    let medium = open_medium(fast).await?;
    let mut found = rows_of(&medium);
    found.retain(|(_, row)| row.uuid == wanted || row.filename == wanted);
    match found.len() {
        0 => Err(Error::new(
            ErrorKind::NotFound,
            format!("{} has no row for {wanted} (`vellum tier list`)", fast.display()),
        )),
        1 => {
            let (uuid, row) = found.remove(0);
            medium.forget(uuid, even_needed).await?;
            Ok(row)
        }
        _ => Err(Error::invalid(format!(
            "{} has several rows for {wanted}: name one by its UUID",
            fast.display()
        ))),
    }
}

/// What a closed image names, and with the medium what it has there.
///
/// # Errors
/// The errors of both.
pub async fn status(
    image: &Path,
    fast: Option<&Path>,
    options: &ImageOptions,
) -> Result<(Option<NamedFast>, Option<TierFacts>)> {
    let Some(fast) = fast else {
        let (storage, kind) = open_file(image, options).await?;
        return Ok((kind.format().read(&*storage).await?.fast(), None));
    };
    let fast = Some(open_medium(fast).await?);
    let chain = open_image(image, &ImageOptions { fast, ..options.clone() }).await?;
    let named = chain.top().head.fast();
    let facts = chain.tier().map(|tier| tier.facts());
    chain.close().await?;
    Ok((named, facts))
}

/// Copies ranges of a closed image to its fast medium, or takes them back.
///
/// # Errors
/// The errors of both, and why the medium cannot be used.
pub async fn promote(
    image: &Path,
    fast: &Path,
    ranges: &Ranges,
    options: &ImageOptions,
) -> Result<PromotedUnits> {
    let medium = open_medium(fast).await?;
    let chain = open_image(image, &ImageOptions { fast: Some(medium), ..options.clone() }).await?;
    let done = promote_in(&chain, ranges).await;
    let closed = chain.close().await;
    done.and_then(|done| closed.map(|()| done))
}

/// As above, the other way. What the fast medium alone has and does not give stays there, and is told.
///
/// # Errors
/// As above.
pub async fn demote(
    image: &Path,
    fast: &Path,
    ranges: &Ranges,
    options: &ImageOptions,
    watch: Watch<'_>,
) -> Result<DemotedUnits> {
    demote_found(image, fast, options, async |chain| demote_in(chain, ranges, watch).await).await
}

/// As above, of what is found in the image when it is open.
pub(crate) async fn demote_found<T>(
    image: &Path,
    fast: &Path,
    options: &ImageOptions,
    act: impl AsyncFnOnce(&Chain) -> Result<T>,
) -> Result<T> {
    let medium = medium_to_bring_back(fast, image, options).await?;
    // What its tables have lost is no reason to leave the rest there.
    let options = ImageOptions { fast: Some(medium), salvages: true, ..options.clone() };
    let chain = open_image(image, &options).await?;
    let done = act(&chain).await;
    let closed = chain.close().await;
    done.and_then(|done| closed.map(|()| done))
}

/// Copies ranges of a closed image to its fast medium, unless they are there, and frees their space in the image. With
/// `only_copied`, of the ranges only what is there.
///
/// # Errors
/// As above; `Unsupported` where the image has snapshots, `Corrupt` for a copy that is not the same.
pub async fn move_away(
    image: &Path,
    fast: &Path,
    (ranges, only_copied): (&Ranges, bool),
    options: &ImageOptions,
    watch: Watch<'_>,
) -> Result<MovedUnits> {
    let medium = open_medium(fast).await?;
    let chain = open_image(image, &ImageOptions { fast: Some(medium), ..options.clone() }).await?;
    let done = move_in(&chain, ranges, only_copied, watch).await;
    let closed = chain.close().await;
    done.and_then(|done| closed.map(|()| done))
}

pub(crate) async fn move_in(
    chain: &Chain,
    ranges: &Ranges,
    only_copied: bool,
    watch: Watch<'_>,
) -> Result<MovedUnits> {
    let (tier, size) = (tier_of(chain)?, chain.disk().geometry().size);
    let spans = ranges.spans(size)?;
    end_files_snapshot(chain).await?;
    tier.may_move()?;
    let mut done = MovedUnits::none(tier.unit_bytes());
    let each = watch.each(&spans, size, async |piece| {
        let copied = match only_copied {
            true => Promoted::default(),
            false => {
                let promotion = Promotion { ranges: vec![piece], reason: Reason::Asked, copies_base: false };
                tier.promote(promotion).await?
            }
        };
        done.add(MovedUnits::after(tier.unit_bytes(), copied, tier.move_away(&[piece]).await?));
        Ok(())
    });
    let to_the_end = each.await;
    let to_the_end = to_the_end.map_err(|error| match done.moved {
        0 => error,
        moved => error.context(format!("{moved} units were moved before, and are on the fast medium alone")),
    })?;
    Ok(MovedUnits { interrupted: !to_the_end, ..done })
}

/// Deletes the snapshot that a program which was killed has left of looking for files: it would keep units from moving. None is in use,
/// as only one at a time looks for files or moves units.
async fn end_files_snapshot(chain: &Chain) -> Result<()> {
    let Some(snapshots) = &chain.top().opened.snapshots else { return Ok(()) };
    match snapshots.named(FILES_SNAPSHOT)? {
        Some(id) => snapshots.delete(&format!("snapshot.id={id}")).await,
        None => Ok(()),
    }
}

pub(crate) fn tier_of(chain: &Chain) -> Result<&Arc<dyn Tiers>> {
    chain.tier().ok_or_else(|| {
        let head = &chain.top().head;
        Error::unsupported(match (head.uuid(), head.fast()) {
            (None, _) => ONLY_NATIVE.to_owned(),
            (Some(_), None) => "the disk is attached to no fast medium (`vellum tier attach`)".to_owned(),
            (Some(_), Some(named)) => format!(
                "the disk is open without its fast medium, last seen at {}: serve it with --fast PATH",
                named.name
            ),
        })
    })
}

pub(crate) async fn promote_in(chain: &Chain, ranges: &Ranges) -> Result<PromotedUnits> {
    let tier = tier_of(chain)?;
    let ranges_of_disk = ranges.spans(chain.disk().geometry().size)?;
    let promotion =
        Promotion { ranges: ranges_of_disk, reason: Reason::Asked, copies_base: ranges.copies_base };
    let done = tier.promote(promotion).await?;
    Ok(PromotedUnits::of(tier.facts().unit_bytes, done))
}

pub(crate) async fn demote_in(chain: &Chain, ranges: &Ranges, watch: Watch<'_>) -> Result<DemotedUnits> {
    let size = chain.disk().geometry().size;
    let (spans, tier) = (ranges.spans(size)?, tier_of(chain)?);
    tier.check_not_cut().await?;
    let mut done = DemotedUnits::default();
    let each = watch.each(&spans, size, async |piece| {
        done.add(tier.demote(&[piece]).await?.into());
        Ok(())
    });
    let to_the_end = each.await?;
    Ok(DemotedUnits { interrupted: !to_the_end, ..done })
}

pub(crate) fn facts_in(chain: &Chain) -> Result<Value> {
    Ok(facts_json(&tier_of(chain)?.facts()))
}

/// The state of a tier as programs read it.
pub fn facts_json(facts: &TierFacts) -> Value {
    let by_reason = |units: [u64; 4]| -> serde_json::Map<String, Value> {
        let named = Reason::ALL.iter().zip(units);
        named.map(|(reason, units)| (reason.word().to_owned(), json!(units))).collect()
    };
    let reasons = by_reason(facts.by_reason);
    json!({
        "trouble": facts.trouble.as_ref().map(Error::chain),
        "unit-size": facts.unit_bytes,
        "units": facts.units,
        "units-by-reason": reasons,
        "moved": facts.moved,
        "disk-units": facts.disk_units,
        "strip": facts.strip.to_vec(),
        "used-bytes": facts.used,
        "budget-bytes": facts.budget,
        "fast-reads": facts.fast_reads[0],
        "fast-read-bytes": facts.fast_reads[1],
        "slow-reads": facts.slow_reads[0],
        "slow-read-bytes": facts.slow_reads[1],
        "failed-reads": facts.failed_reads,
        "lost-reads": facts.lost_reads,
        "missing": facts.missing,
        "promoted": facts.promoted,
        "promoted-by-reason": by_reason(facts.promoted_by),
        "demoted": facts.demoted,
    })
}
