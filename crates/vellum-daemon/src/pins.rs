//! Which files of the guest a fast medium is to have: pins, by path, and choices by file times.
//!
//! ```text
//!   pins file ─┐
//!   change  ───┴► pins ─► paths ─► file system of the guest, read from a snapshot ─► spans ─► promote (a rule)
//!                  │                                                                └► units of no pin any more: demote
//!                  └► pins file
//!   times ──────────────► all files ─► modified long ago, read lately ─► spans ─► promote (file times)
//! ```
//!
//! A pins file is beside the image, with `.pins` behind its name: JSON, for people too. It says what is wanted; what the
//! fast medium has, the image and the medium say. Files change: a pin is looked up again each time that pins are
//! changed, or applied.
//!
//! 1. The guest is not asked, and its disk is not written. A disk that is served is read from a snapshot.
//! 2. A pin of a path that is not there is refused when it is made, and later reported.
//! 3. The pins file is replaced as a whole. It is written before units are promoted, so that what was interrupted is done
//!    by the next `vellum tier pin`.
//!
//! Left out: a schedule. `vellum tier pin` without a path applies the pins again, from a timer of the host.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use vellum_core::{BlockSize, Context, Disk, Error, ErrorKind, GuestOffset, GuestSpan, Result};
use vellum_format::fast::{Promotion, Reason};
use vellum_guest::{FileFacts, Found, Volume, VolumeKind, find_files, has_path, look};
use vellum_io::unblock_at;
use vellum_layer::Chain;

use crate::image::{ImageOptions, open_image};
use crate::plain_file::read_at_most;
use crate::tier::{
    DemotedUnits, MovedUnits, PromotedUnits, Ranges, Watch, demote_found, demote_in, move_in, open_medium,
    tier_of,
};

/// The longest pins file, in bytes.
const FILE_MAX: u64 = 1 << 20;
/// The longest heat file, in bytes.
const HEAT_MAX: u64 = 256 << 20;
const DAY: i64 = 86_400;

/// A path in the guest whose files the fast medium is to have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Pin {
    /// A file or a directory, with all below it.
    pub path: String,
    /// The partition with the file system; the only one that has the path when not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partition: Option<u32>,
    /// Also what is read from the backing image.
    #[serde(default)]
    pub copy: bool,
}

/// A change of the pins of a disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PinChange {
    /// New ones, or the same path anew.
    pub add: Vec<Pin>,
    /// Paths that are pinned no more.
    pub remove: Vec<String>,
}

/// Files that were written long ago and read lately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileTimes {
    /// Not written for this many days.
    pub old_mtime: u32,
    /// Read within this many days.
    pub recent_atime: u32,
    /// Also what is read from the backing image.
    pub copy: bool,
}

/// What became of it, as programs read it.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ChosenFiles {
    /// The units.
    #[serde(flatten)]
    pub units: PromotedUnits,
    /// How many files were chosen.
    pub files: u64,
    /// Bytes of the disk that they have.
    pub file_bytes: u64,
    /// Units that went back because no pin is left for them, and what of them could not.
    #[serde(flatten)]
    pub demoted: DemotedUnits,
    /// The pins that the disk has now.
    pub pins: Vec<Pin>,
    /// Pinned paths that are not there.
    pub missing: Vec<String>,
}

/// What became of files that were moved, as programs read it.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct MovedFiles {
    /// The units.
    #[serde(flatten)]
    pub units: MovedUnits,
    /// How many files there are.
    pub files: u64,
    /// Bytes of the disk that they have.
    pub file_bytes: u64,
}

/// What became of files that were brought back, as programs read it.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct DemotedFiles {
    /// The units.
    #[serde(flatten)]
    pub units: DemotedUnits,
    /// How many files there are.
    pub files: u64,
    /// Bytes of the disk that they have.
    pub file_bytes: u64,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PinsFile {
    version: u32,
    pins: Vec<Pin>,
}

/// The file with the pins of an image.
///
/// # Errors
/// `Unsupported` for an image that is no file.
fn pins_file(image: &Path) -> Result<PathBuf> {
    beside(image, ".pins")?.ok_or_else(|| {
        let why = "pins are kept in a file beside the image, and this image is a device: use `vellum tier promote --range`";
        Error::unsupported(format!("{}: {why}", image.display()))
    })
}

/// A file beside an image; none beside a device.
fn beside(image: &Path, ending: &str) -> Result<Option<PathBuf>> {
    let image = image.canonicalize().context(|| format!("can't open {}", image.display()))?;
    if !image.is_file() {
        return Ok(None);
    }
    let mut name = image.into_os_string();
    name.push(ending);
    Ok(Some(name.into()))
}

/// Replaces a file as a whole.
fn replace(file: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut new = file.to_owned().into_os_string();
    new.push(".new");
    let new = PathBuf::from(new);
    // A link that somebody has put there is not followed.
    drop(std::fs::remove_file(&new));
    let mut made = std::fs::File::create_new(&new)?;
    std::io::Write::write_all(&mut made, bytes)?;
    made.sync_all()?;
    std::fs::rename(&new, file)
}

/// What was kept of the heat of a disk.
///
/// # Errors
/// Those of reading it.
pub(crate) async fn heat_of(image: &Path) -> Result<Option<Vec<u8>>> {
    let image = image.to_owned();
    unblock_at(&image.clone(), move || {
        let Some(file) = beside(&image, ".heat")? else { return Ok(None) };
        // It is a hint: what is no such file counts as none.
        Ok(read_at_most(&file, OFlags::NOFOLLOW, HEAT_MAX).ok())
    })
    .await
}

/// Keeps the heat of a disk.
///
/// # Errors
/// Those of writing it.
pub(crate) async fn keep_heat(image: &Path, heat: Vec<u8>) -> Result<()> {
    let image = image.to_owned();
    unblock_at(&image.clone(), move || match beside(&image, ".heat")? {
        Some(file) => replace(&file, &heat).context(|| format!("can't write {}", file.display())),
        None => Ok(()),
    })
    .await
}

/// The pins of an image; none, where there is no such file.
///
/// # Errors
/// `Invalid` for a file that is none of this kind, and the errors of reading it.
pub async fn pins_of(image: &Path) -> Result<Vec<Pin>> {
    let image = image.to_owned();
    unblock_at(&image.clone(), move || {
        let Ok(file) = pins_file(&image) else { return Ok(Vec::new()) };
        let context = || format!("can't read {}", file.display());
        let bytes = match read_at_most(&file, OFlags::NOFOLLOW, FILE_MAX) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            read => read.context(context)?,
        };
        let remedy = "mend it, or remove it and pin again";
        let found: PinsFile = serde_json::from_slice(&bytes).map_err(|error| {
            Error::invalid(format!("{} is no file with pins ({error}): {remedy}", file.display()))
        })?;
        match found.version {
            1 => Ok(found.pins),
            version => {
                let why = format!("{} has version {version}, and 1 is known here", file.display());
                Err(Error::unsupported(why))
            }
        }
    })
    .await
}

async fn keep_pins(image: &Path, pins: &[Pin]) -> Result<()> {
    let (image, pins) = (image.to_owned(), pins.to_vec());
    unblock_at(&image.clone(), move || {
        let file = pins_file(&image)?;
        let context = || format!("can't write {}", file.display());
        if pins.is_empty() {
            return match std::fs::remove_file(&file) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error).context(context),
                _ => Ok(()),
            };
        }
        let text = serde_json::to_string_pretty(&PinsFile { version: 1, pins }).expect("it has names only");
        replace(&file, text.as_bytes()).context(context)
    })
    .await
}

/// The pins after a change.
fn changed(mut pins: Vec<Pin>, change: &PinChange) -> Result<Vec<Pin>> {
    for path in &change.remove {
        let before = pins.len();
        pins.retain(|pin| pin.path != *path);
        if pins.len() == before {
            return Err(Error::new(ErrorKind::NotFound, format!("{path} is not pinned")));
        }
    }
    for new in &change.add {
        if !new.path.starts_with('/') {
            return Err(Error::invalid(format!("{}: a path in the guest begins with a slash", new.path)));
        }
        pins.retain(|pin| pin.path != new.path);
        pins.push(new.clone());
    }
    Ok(pins)
}

/// What the pins of a disk mean at a time.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    /// By whether what is in the backing image is copied, too.
    spans: [Vec<GuestSpan>; 2],
    files: u64,
    bytes: u64,
    missing: Vec<String>,
}

impl Wanted {
    fn add(&mut self, found: Found, copies: bool) {
        self.files += found.files;
        self.bytes += found.spans.iter().map(|span| span.len()).sum::<u64>();
        self.spans[usize::from(copies)].extend(found.spans);
    }
}

/// A change of pins that is being made.
pub(crate) struct Pinning {
    change: PinChange,
    pins: Vec<Pin>,
    before: Vec<Pin>,
}

impl Pinning {
    pub(crate) async fn begin(image: &Path, change: &PinChange) -> Result<Self> {
        let before = pins_of(image).await?;
        let pins = changed(before.clone(), change).context(|| image.display().to_string())?;
        Ok(Self { change: change.clone(), pins, before })
    }

    /// Looks the pins up: those that are to be, and those that are to be no more.
    pub(crate) async fn find(&self, disk: &dyn Disk) -> Result<(Wanted, Wanted)> {
        let is_new = |pin: &Pin| self.change.add.contains(pin);
        let volumes = look(disk).await.context(|| "can't read the partitions of the guest")?;
        let wanted = find_pins(disk, &volumes, &self.pins).await?;
        if let Some(missing) = self.pins.iter().find(|pin| is_new(pin) && wanted.missing.contains(&pin.path))
        {
            return Err(Error::new(ErrorKind::NotFound, format!("{} is not in the guest", missing.path)));
        }
        let gone: Vec<Pin> = self.before.iter().filter(|pin| !self.pins.contains(pin)).cloned().collect();
        Ok((wanted, find_pins(disk, &volumes, &gone).await?))
    }

    /// Keeps the pins, and makes the fast medium have what they want.
    pub(crate) async fn apply(
        self,
        image: &Path,
        chain: &Chain,
        found: (Wanted, Wanted),
    ) -> Result<ChosenFiles> {
        let (wanted, gone) = found;
        let tier = tier_of(chain)?;
        let unit = tier.facts().unit_bytes;
        let back = units_without(&gone, &wanted, unit, chain.disk().geometry().size);
        if !back.is_empty() {
            tier.check_not_cut().await?;
        }
        if self.pins != self.before {
            keep_pins(image, &self.pins).await?;
        }
        let demoted = match back.is_empty() {
            true => DemotedUnits::default(),
            false => tier.demote(&back).await?.into(),
        };
        let units = promote(chain, &wanted, Reason::Rule).await?;
        Ok(ChosenFiles {
            units,
            files: wanted.files,
            file_bytes: wanted.bytes,
            demoted,
            pins: self.pins,
            missing: wanted.missing,
        })
    }
}

async fn find_pins(disk: &dyn Disk, volumes: &[Volume], pins: &[Pin]) -> Result<Wanted> {
    let mut wanted = Wanted::default();
    for pin in pins {
        let Some(volume) = volume_of(disk, volumes, pin).await? else {
            wanted.missing.push(pin.path.clone());
            continue;
        };
        let found = find_files(disk, &volume, std::slice::from_ref(&pin.path), &mut |_| true).await;
        wanted.add(found.context(|| in_volume(&volume))?, pin.copy);
    }
    Ok(wanted)
}

/// Where the files at these paths are, each of which must be there.
pub(crate) async fn find_paths(disk: &dyn Disk, paths: &[Pin]) -> Result<Wanted> {
    changed(Vec::new(), &PinChange { add: paths.to_vec(), remove: Vec::new() })?;
    let volumes = look(disk).await.context(|| "can't read the partitions of the guest")?;
    let wanted = find_pins(disk, &volumes, paths).await?;
    match wanted.missing.first() {
        Some(missing) => Err(Error::new(ErrorKind::NotFound, format!("{missing} is not in the guest"))),
        None => Ok(wanted),
    }
}

/// The units of files; none where there are no files, which would be the whole disk.
fn ranges_of(chain: &Chain, wanted: &Wanted) -> Result<Option<Ranges>> {
    let unit_size = tier_of(chain)?.unit_bytes();
    let disk = GuestOffset::ZERO.span(chain.disk().geometry().size);
    let spans: Vec<GuestSpan> = wanted.spans.iter().flatten().copied().collect();
    let runs = BlockSize::from_bytes(unit_size).map(|unit| unit_runs(&spans, unit)).unwrap_or_default();
    let runs = runs.into_iter().map(|run| run.intersect(disk)).filter(|run| !run.is_empty());
    let ranges: Vec<(u64, u64)> = runs.map(|run| (run.start().bytes(), run.len())).collect();
    Ok((!ranges.is_empty()).then_some(Ranges { ranges, copies_base: false }))
}

/// Moves the units of files.
pub(crate) async fn move_wanted(chain: &Chain, wanted: Wanted, watch: Watch<'_>) -> Result<MovedFiles> {
    let units = match ranges_of(chain, &wanted)? {
        None => MovedUnits::none(tier_of(chain)?.unit_bytes()),
        Some(ranges) => move_in(chain, &ranges, false, watch).await?,
    };
    Ok(MovedFiles { units, files: wanted.files, file_bytes: wanted.bytes })
}

/// Brings the units of files back.
pub(crate) async fn demote_wanted(chain: &Chain, wanted: Wanted, watch: Watch<'_>) -> Result<DemotedFiles> {
    let units = match ranges_of(chain, &wanted)? {
        None => DemotedUnits::default(),
        Some(ranges) => demote_in(chain, &ranges, watch).await?,
    };
    Ok(DemotedFiles { units, files: wanted.files, file_bytes: wanted.bytes })
}

fn in_volume(volume: &Volume) -> String {
    match volume.partition {
        Some(number) => format!("the file system in partition {number} of the guest"),
        None => "the file system of the guest".to_owned(),
    }
}

/// The file system with a pin's path.
async fn volume_of(disk: &dyn Disk, volumes: &[Volume], pin: &Pin) -> Result<Option<Volume>> {
    let known: Vec<&Volume> = volumes
        .iter()
        .filter(|volume| volume.kind != VolumeKind::Other)
        .filter(|volume| pin.partition.is_none() || volume.partition == pin.partition)
        .collect();
    if known.is_empty() {
        let where_to = match pin.partition {
            Some(number) => format!("partition {number} of the guest has"),
            None => "the guest's disk has".to_owned(),
        };
        return Err(Error::unsupported(format!(
            "{where_to} no file system that is read here (ext2, ext3, ext4 or XFS, not on LVM and not encrypted): \
             name parts of the disk instead (`vellum tier promote --range`, `vellum tier move --range`)"
        )));
    }
    let (mut having, mut unread) = (Vec::new(), None);
    for volume in known {
        match has_path(disk, volume, &pin.path).await.context(|| in_volume(volume)) {
            Ok(true) => having.push(*volume),
            Ok(false) => {}
            // One that cannot be read, such as an XFS with a log that is damaged, is no obstacle to a path of another one.
            Err(error) if matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Corrupt) => {
                unread.get_or_insert(error);
            }
            Err(error) => return Err(error),
        }
    }
    match having.as_slice() {
        [] => unread.map_or(Ok(None), Err),
        [one] => Ok(Some(*one)),
        several => {
            let numbers: Vec<String> =
                several.iter().filter_map(|one| one.partition).map(|number| number.to_string()).collect();
            let numbers = numbers.join(" and ");
            let why = format!("{} is in partitions {numbers}: name one with --partition", pin.path);
            Err(Error::invalid(why))
        }
    }
}

/// Whole units of `gone` that nothing in `wanted` touches.
fn units_without(gone: &Wanted, wanted: &Wanted, unit: u64, size: u64) -> Vec<GuestSpan> {
    let Some(unit) = BlockSize::from_bytes(unit) else { return Vec::new() };
    let units = |wanted: &Wanted| {
        let mut units: Vec<GuestSpan> = wanted.spans.iter().flatten().map(|span| unit.widen(*span)).collect();
        units.sort_unstable_by_key(|span| span.start());
        units
    };
    let disk = GuestOffset::ZERO.span(size);
    let (kept, mut back) = (units(wanted), Vec::new());
    let mut next = 0;
    for gone in units(gone) {
        let mut at = gone.start();
        // Those that end before this one begins are of no later one, either.
        while next < kept.len() && kept[next].end() <= gone.start() {
            next += 1;
        }
        for kept in kept[next..].iter().take_while(|kept| kept.start() < gone.end()) {
            if kept.start() > at {
                back.push(GuestSpan::between(at, kept.start()));
            }
            at = at.max(kept.end());
        }
        if at < gone.end() {
            back.push(GuestSpan::between(at, gone.end()));
        }
    }
    back.into_iter().map(|span| span.intersect(disk)).filter(|span| !span.is_empty()).collect()
}

async fn promote(chain: &Chain, wanted: &Wanted, reason: Reason) -> Result<PromotedUnits> {
    let tier = tier_of(chain)?;
    let mut done = PromotedUnits::none(tier.facts().unit_bytes);
    // Those that copy come last: what the others have left in the backing image is then not left.
    for (copies_base, spans) in [false, true].into_iter().zip(&wanted.spans) {
        let unit = BlockSize::from_bytes(done.unit_size).filter(|_| !spans.is_empty());
        let Some(unit) = unit else { continue };
        let ranges = unit_runs(spans, unit);
        done.add(tier.promote(Promotion { ranges, reason, copies_base }).await?);
    }
    Ok(done)
}

/// The units that spans touch, each once.
fn unit_runs(spans: &[GuestSpan], unit: BlockSize) -> Vec<GuestSpan> {
    let mut units: Vec<GuestSpan> = spans.iter().map(|span| unit.widen(*span)).collect();
    units.sort_unstable_by_key(|span| span.start());
    let mut runs: Vec<GuestSpan> = Vec::with_capacity(units.len());
    for one in units {
        match runs.last_mut() {
            Some(last) if one.start() <= last.end() => {
                *last = GuestSpan::between(last.start(), last.end().max(one.end()));
            }
            _ => runs.push(one),
        }
    }
    runs
}

/// Changes the pins of a closed image, and makes its fast medium have what they want.
///
/// # Errors
/// `NotFound` for paths that are not there or not pinned, those of the guest's file system, and those of
/// [`promote`](crate::tier::promote).
pub async fn pin(
    image: &Path,
    fast: &Path,
    change: &PinChange,
    options: &ImageOptions,
) -> Result<ChosenFiles> {
    let pinning = Pinning::begin(image, change).await?;
    with_chain(image, fast, options, async |chain| {
        let found = pinning.find(&**chain.disk()).await.context(|| image.display().to_string())?;
        pinning.apply(image, chain, found).await
    })
    .await
}

/// Copies the files of a closed image that were written long ago and read lately.
///
/// # Errors
/// As above.
pub async fn promote_by_times(
    image: &Path,
    fast: &Path,
    times: FileTimes,
    options: &ImageOptions,
) -> Result<ChosenFiles> {
    with_chain(image, fast, options, async |chain| {
        let wanted = find_by_times(&**chain.disk(), times).await.context(|| image.display().to_string())?;
        apply_times(image, chain, wanted).await
    })
    .await
}

/// Moves the units of the files at these paths in a closed image: their space in the image is free then.
///
/// # Errors
/// As above, and those of [`move_away`](crate::tier::move_away).
pub async fn move_files(
    image: &Path,
    fast: &Path,
    paths: &[Pin],
    options: &ImageOptions,
    watch: Watch<'_>,
) -> Result<MovedFiles> {
    with_chain(image, fast, options, async |chain| {
        let wanted = find_paths(&**chain.disk(), paths).await.context(|| image.display().to_string())?;
        move_wanted(chain, wanted, watch).await
    })
    .await
}

/// Brings the units of the files at these paths back to a closed image.
///
/// # Errors
/// As above, and those of [`demote`](crate::tier::demote).
pub async fn demote_files(
    image: &Path,
    fast: &Path,
    paths: &[Pin],
    options: &ImageOptions,
    watch: Watch<'_>,
) -> Result<DemotedFiles> {
    demote_found(image, fast, options, async |chain| {
        let wanted = find_paths(&**chain.disk(), paths).await.context(|| image.display().to_string())?;
        demote_wanted(chain, wanted, watch).await
    })
    .await
}

async fn with_chain<T>(
    image: &Path,
    fast: &Path,
    options: &ImageOptions,
    act: impl AsyncFnOnce(&Chain) -> Result<T>,
) -> Result<T> {
    let medium = open_medium(fast).await?;
    let chain = open_image(image, &ImageOptions { fast: Some(medium), ..options.clone() }).await?;
    let done = act(&chain).await;
    let closed = chain.close().await;
    done.and_then(|done| closed.map(|()| done))
}

/// The files of all file systems that were written long ago and read lately.
pub(crate) async fn find_by_times(disk: &dyn Disk, times: FileTimes) -> Result<Wanted> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let now = i64::try_from(now).unwrap_or(i64::MAX);
    let (written_by, read_since) =
        (now - i64::from(times.old_mtime) * DAY, now - i64::from(times.recent_atime) * DAY);
    let mut is_wanted =
        |file: &FileFacts| file.modified <= written_by && file.accessed >= read_since && file.bytes > 0;
    let volumes = look(disk).await.context(|| "can't read the partitions of the guest")?;
    let known: Vec<&Volume> = volumes.iter().filter(|volume| volume.kind != VolumeKind::Other).collect();
    if known.is_empty() {
        let why = "the guest's disk has no file system that is read here (ext2, ext3, ext4 or XFS, not on LVM and not encrypted)";
        return Err(Error::unsupported(why));
    }
    let (mut wanted, mut read, mut unread) = (Wanted::default(), 0, None);
    for volume in known {
        let found = find_files(disk, volume, &["/".to_owned()], &mut is_wanted).await;
        match found.context(|| in_volume(volume)) {
            Ok(found) => {
                wanted.add(found, times.copy);
                read += 1;
            }
            // As for a path.
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                unread.get_or_insert(error);
            }
            Err(error) => return Err(error),
        }
    }
    match unread {
        Some(error) if read == 0 => Err(error),
        _ => Ok(wanted),
    }
}

pub(crate) async fn apply_times(image: &Path, chain: &Chain, wanted: Wanted) -> Result<ChosenFiles> {
    let units = promote(chain, &wanted, Reason::Times).await?;
    let (files, file_bytes, pins) = (wanted.files, wanted.bytes, pins_of(image).await?);
    Ok(ChosenFiles { units, files, file_bytes, demoted: DemotedUnits::default(), pins, missing: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: u64 = 1 << 16;

    fn wanted(spans: &[(u64, u64)]) -> Wanted {
        let spans = spans.iter().map(|(at, len)| GuestOffset::new(*at).span(*len)).collect();
        Wanted { spans: [spans, Vec::new()], ..Wanted::default() }
    }

    #[test]
    fn what_no_pin_wants_any_more_goes_back_by_whole_units() {
        let gone = wanted(&[(10, 5), (UNIT + 1, 3 * UNIT), (9 * UNIT, 1), (20 * UNIT, 10 * UNIT)]);
        let kept = wanted(&[(100, 1), (2 * UNIT + 5, 1), (21 * UNIT, UNIT), (25 * UNIT, UNIT)]);
        let back = units_without(&gone, &kept, UNIT, 29 * UNIT + 7);
        let back: Vec<(u64, u64)> =
            back.iter().map(|span| (span.start().bytes() / UNIT, span.len() / UNIT)).collect();
        assert_eq!(back, [(1, 1), (3, 2), (9, 1), (20, 1), (22, 3), (26, 3)]);
        assert!(units_without(&gone, &gone, UNIT, 100 * UNIT).is_empty());
    }

    /// An ext4 and an XFS, in partitions of an MBR.
    fn two_systems(xfs: &[u8]) -> std::sync::Arc<vellum_core::MemoryDisk> {
        let ext = vellum_guest::samples::ext(false);
        let mut disk = vec![0; 512];
        for (number, (first, count)) in
            [(1, ext.len()), (1 + ext.len() / 512, xfs.len())].into_iter().enumerate()
        {
            let at = 446 + 16 * number;
            disk[at + 4] = 0x83;
            disk[at + 8..at + 12].copy_from_slice(&u32::try_from(first).unwrap().to_le_bytes());
            disk[at + 12..at + 16].copy_from_slice(&u32::try_from(count / 512).unwrap().to_le_bytes());
        }
        disk[510..].copy_from_slice(&[0x55, 0xaa]);
        vellum_core::MemoryDisk::holding(&[&disk, &ext[..], xfs].concat())
    }

    #[test]
    fn a_file_system_that_cannot_be_read_is_no_obstacle_to_another_one() {
        let clean = vellum_guest::samples::xfs(true);
        let (mut elsewhere, mut damaged) = (clean.clone(), clean.clone());
        // The log is on another device; its last record is no unmount, and leads nowhere.
        elsewhere[48..56].fill(0);
        damaged[40 * 1024 + 512 + 9] = 0;
        futures_lite::future::block_on(async {
            for (xfs, path, expected) in [
                (&clean, "/old", Err(ErrorKind::Invalid)),
                (&clean, "/none", Ok(None)),
                (&elsewhere, "/old", Ok(Some(1))),
                (&elsewhere, "/none", Err(ErrorKind::Unsupported)),
                (&damaged, "/old", Ok(Some(1))),
                (&damaged, "/none", Err(ErrorKind::Corrupt)),
            ] {
                let disk = two_systems(xfs);
                let volumes = look(&*disk).await.unwrap();
                assert_eq!(volumes.len(), 2);
                let pin = Pin { path: path.to_owned(), partition: None, copy: false };
                let found = volume_of(&*disk, &volumes, &pin).await;
                let found = found.map(|volume| volume.and_then(|volume| volume.partition));
                assert_eq!(found.map_err(|error| error.kind()), expected, "{path}");
            }
            let times = FileTimes { old_mtime: 30, recent_atime: 365_000, copy: false };
            assert_eq!(find_by_times(&*two_systems(&clean), times).await.unwrap().files, 4);
            assert_eq!(find_by_times(&*two_systems(&elsewhere), times).await.unwrap().files, 2);
        });
    }

    #[test]
    fn units_are_named_once() {
        let unit = BlockSize::from_bytes(UNIT).expect("a power of two");
        let spans = [(5 * UNIT + 1, 9), (3, 4), (4 * UNIT, 100), (9, UNIT)];
        let spans = spans.map(|(at, len)| GuestOffset::new(at).span(len));
        let runs: Vec<(u64, u64)> = unit_runs(&spans, unit)
            .iter()
            .map(|run| (run.start().bytes() / UNIT, run.len() / UNIT))
            .collect();
        assert_eq!(runs, [(0, 2), (4, 2)]);
    }

    #[test]
    fn pins_are_changed_by_path() {
        let pin = |path: &str, copy| Pin { path: path.to_owned(), partition: None, copy };
        let change = |add: &[Pin], remove: &[&str]| PinChange {
            add: add.to_vec(),
            remove: remove.iter().map(|path| (*path).to_owned()).collect(),
        };
        let pins = changed(vec![pin("/a", false), pin("/b", false)], &change(&[pin("/b", true)], &["/a"]));
        assert_eq!(pins.expect("it is legal"), [pin("/b", true)]);
        assert_eq!(changed(Vec::new(), &change(&[], &["/a"])).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(
            changed(Vec::new(), &change(&[pin("a", false)], &[])).unwrap_err().kind(),
            ErrorKind::Invalid
        );
    }
}
