//! Checking a closed image against the numbered invariants of `docs/format/native.md`, and repairing what can
//! be repaired.
//!
//! ```text
//!   superblock   also the other copy
//!   keys         the LUKS header of an encrypted image, and where its material is
//!   bitmap       bits past the base                                             base.rs
//!   masks        past the base; the value 3 where it counts
//!   table        entries past the disk; units outside the file                  units.rs
//!   snapshots    list, chains, map units, copies of table pages                 views.rs
//!   partials     units that nothing names; circles
//!   packed       blocks that hold their units' entries                        packed.rs
//!   all          a unit that is named for two purposes
//! ```
//!
//! There are no refcounts, so nothing is counted. Every name of a unit is collected with its purpose, and a
//! unit must not be named for two purposes.
//!
//! 1. Holes of the file are not read. Memory is eight bytes for each name of a unit that really exists, and
//!    twelve more where it has a packed block, whatever the superblock claims.
//! 2. A repair writes zeros where nothing counts: bits past the base, entries past the disk, slots and copies
//!    of things that no longer exist. It also rewrites an unreadable copy of the superblock. So it may be
//!    interrupted anywhere, and loses no guest byte.

mod base;
mod packed;
mod units;
mod views;

use vellum_core::{
    BlockSize, Buffer, Context, Error, ImageOffset, ImageSpan, Result, SharedStorage, Storage, Zeroes,
    is_zero,
};

use super::geometry::{Layout, Places, Region};
use super::superblock::Superblocks;
use super::unfinished::while_in_use;
use crate::report::{CheckReport, Repair};
use crate::truth::settle;

/// This many bytes are read at once.
const PIECE: BlockSize = BlockSize::from_shift(18);
/// At most this many lines are reported. Further findings are only counted.
const LINES_MAX: u64 = 1000;
/// At most this many repairs are made in one run.
const FIXES_MAX: usize = 1 << 16;
/// What leaves entries, bits or masks behind the end, and who clears them.
const CUT_OFF: &str = "what a shrink that was cut off leaves, and `vellum recover` clears";

/// Checks an image, and repairs it on request. `say` gets a line for each finding: what, where, and what to
/// do.
///
/// # Errors
/// When no superblock can be used, the journal must be replayed first, or a repair cannot be written. Damage
/// behind the superblock is not an error but a count.
pub async fn check(
    image: &SharedStorage,
    repair: Repair,
    say: &mut dyn FnMut(String),
) -> Result<CheckReport> {
    if repair != Repair::Nothing {
        settle(&**image).await?;
    }
    let mut superblocks = Superblocks::read(&**image).await?;
    if superblocks.superblock.needs_replay() {
        let error = superblocks.superblock.replay_first(image.name());
        return Err(error.context(format!("can't check {}", image.name())));
    }
    if let Some(error) = &superblocks.other_is_bad {
        say(format!(
            "superblock {}: {}; the other copy is valid (`vellum check -r all`, or the next program that writes the \
             image, rewrites this one)",
            superblocks.slot.other().name(),
            error.chain()
        ));
    }
    let first = Walk::run(&superblocks, &**image, say).await?;
    let wanted = |fix: &Fix| repair == Repair::All || (fix.is_leak && repair != Repair::Nothing);
    let fixes: Vec<Fix> = first.fixes.into_iter().filter(wanted).collect();
    let rewrites = repair == Repair::All && superblocks.other_is_bad.is_some();
    if fixes.is_empty() && !rewrites {
        return Ok(first.report);
    }
    if !fixes.is_empty() {
        let repairs = async || {
            for fix in &fixes {
                fix.apply(&**image).await.context(|| format!("can't repair {}", image.name()))?;
            }
            Ok(())
        };
        while_in_use(image, &mut superblocks, None, repairs).await?;
    }
    if rewrites && superblocks.other_is_bad.is_some() {
        image.flush().await?;
        superblocks.write(&**image).await?;
    }
    image.flush().await?;
    let mut after = Walk::run(&superblocks, &**image, &mut |_| {}).await?.report;
    after.corruptions_fixed =
        first.report.corruptions.saturating_sub(after.corruptions) + u64::from(rewrites);
    after.leaks_fixed = first.report.leaks.saturating_sub(after.leaks);
    Ok(after)
}

/// One write of a repair.
struct Fix {
    /// The finding wastes space and does no other harm.
    is_leak: bool,
    what: Change,
}

enum Change {
    /// These bytes become zero.
    Zero(ImageSpan),
    /// This byte gets this value.
    Byte(ImageOffset, u8),
}

impl Fix {
    async fn apply(&self, image: &dyn Storage) -> Result<()> {
        match self.what {
            Change::Zero(span) => image.write_zeroes(span, Zeroes::MayUnmap).await,
            Change::Byte(at, value) => image.write(at, Buffer::copy_of(&[value])).await,
        }
    }
}

/// One pass over an image.
struct Walk<'a> {
    superblocks: &'a Superblocks,
    places: Places,
    image: &'a dyn Storage,
    say: &'a mut dyn FnMut(String),
    lines: u64,
    report: CheckReport,
    fixes: Vec<Fix>,
    names: units::Names,
    packed: Vec<packed::Named>,
}

struct Walked {
    report: CheckReport,
    fixes: Vec<Fix>,
}

impl<'a> Walk<'a> {
    async fn run(
        superblocks: &'a Superblocks,
        image: &'a dyn Storage,
        say: &'a mut dyn FnMut(String),
    ) -> Result<Walked> {
        let places = superblocks.superblock.places();
        let report = CheckReport { total_clusters: places.shape().units(), ..CheckReport::default() };
        let (fixes, names) = (Vec::new(), units::Names::default());
        let packed = Vec::new();
        let mut walk = Self { superblocks, places, image, say, lines: 0, report, fixes, names, packed };
        walk.keys().await;
        walk.bitmap().await?;
        walk.masks().await?;
        walk.report.image_end_offset = places.end_of_parts().unwrap_or(places.data_offset()).bytes();
        match places.shape().layout {
            Layout::Linear => walk.report.image_end_offset += places.shape().size,
            Layout::Table(_) | Layout::Zoned { .. } => {
                walk.table().await?;
                let snapshots = walk.snapshots().await?;
                walk.map_units(&snapshots).await?;
                walk.partials().await?;
                walk.packed_blocks().await?;
                walk.doubles();
            }
        }
        if walk.lines > LINES_MAX {
            (walk.say)(format!("{} more of these are not listed", walk.lines - LINES_MAX));
        }
        Ok(Walked { report: walk.report, fixes: walk.fixes })
    }

    /// A header with which no secret opens the image. Nothing repairs it.
    async fn keys(&mut self) {
        let Some(area) = self.superblocks.superblock.key_area() else { return };
        match area.header(self.image).await {
            Ok(header) if header.mode().is_for_writing() => {}
            Ok(header) => {
                self.error(|| format!("keys: aes-{} is not for these images", header.mode().name()))
            }
            Err(error) => self.error(|| format!("keys: {}", error.chain())),
        }
    }

    fn report_line(&mut self, line: impl FnOnce() -> String) {
        self.lines += 1;
        if self.lines <= LINES_MAX {
            (self.say)(line());
        }
    }

    fn error(&mut self, line: impl FnOnce() -> String) {
        self.report.corruptions += 1;
        self.report_line(|| format!("ERROR {}", line()));
    }

    fn leak(&mut self, line: impl FnOnce() -> String) {
        self.report.leaks += 1;
        self.report_line(|| format!("Leaked {}", line()));
    }

    fn fix(&mut self, is_leak: bool, what: Change) {
        if self.fixes.len() < FIXES_MAX {
            self.fixes.push(Fix { is_leak, what });
        }
    }

    /// Reports an error that zeros in its place repair.
    fn error_to_zero(&mut self, span: ImageSpan, line: impl FnOnce() -> String) {
        self.error(|| format!("{} (`vellum check -r all` clears it)", line()));
        self.fix(false, Change::Zero(span));
    }

    fn leak_to_zero(&mut self, span: ImageSpan, line: impl FnOnce() -> String) {
        self.leak(|| format!("{} (`vellum check -r leaks` frees it)", line()));
        self.fix(true, Change::Zero(span));
    }

    fn unreadable(&mut self, what: &str, error: &Error) {
        self.report.check_errors += 1;
        self.report_line(|| format!("ERROR: I/O error in {what}: {}", error.chain()));
    }

    /// The bytes of a run. `None`, and counted, when they cannot be read.
    async fn read(&mut self, span: ImageSpan, what: &str) -> Option<Vec<u8>> {
        let len = usize::try_from(span.len()).expect("a piece");
        match self.image.read(span.start(), Buffer::for_overwrite(len)).await {
            Ok(buffer) => Some(buffer.to_vec()),
            Err(error) => {
                self.unreadable(what, &error);
                None
            }
        }
    }

    /// The next piece at or behind `at` that may contain something other than zeros.
    async fn next_piece(&mut self, region: ImageSpan, at: &mut ImageOffset) -> Result<Option<ImageSpan>> {
        while *at < region.end() {
            let rest = ImageSpan::between(*at, region.end());
            // Behind the end of a file there is nothing.
            let Some(run) = self.image.runs(rest).await?.first().copied().filter(|run| !run.span.is_empty())
            else {
                *at = region.end();
                return Ok(None);
            };
            let end = run.span.end().bytes().min(PIECE.round_down(at.bytes()) + PIECE.bytes());
            if run.is_data {
                let piece = ImageSpan::between(*at, ImageOffset::new(end));
                *at = piece.end();
                return Ok(Some(piece));
            }
            *at = run.span.end();
        }
        Ok(None)
    }

    /// The next bytes of a region, or of a part of it, that are not all zero.
    async fn next_bytes(
        &mut self,
        region: Region,
        span: ImageSpan,
        at: &mut ImageOffset,
    ) -> Result<Option<(ImageOffset, Vec<u8>)>> {
        *at = (*at).max(span.start());
        while let Some(piece) = self.next_piece(span, at).await? {
            if let Some(bytes) = self.read(piece, region.name()).await.filter(|bytes| !is_zero(bytes)) {
                return Ok(Some((piece.start(), bytes)));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests;
