//! What may be found at one crash position, prepared for judging many images of it.
//!
//! ```text
//!   sectors      0 ..... 8 ..... 16 .......... 40
//!   requests     │ 1     │ 1, 4  │ none        │        each run has the same requests, so the same judgement
//! ```
//!
//! There are three ways to judge a sector, from the usual to the rare; the strongest that is exact is chosen:
//! *values* (all its requests cover it as a whole: it must be one of theirs), *chain* (some cover it in part,
//! one after the other: the values they made), *bytes* (some ran concurrently: each byte by itself).

use std::fmt;
use std::ops::Range;

use vellum_core::{Buffer, Disk, Error, GuestOffset, GuestSpan, ImageOffset, Result};

use crate::content::{Content, SECTOR_BYTES, to_usize};
use crate::guest::{Fact, GuestRequest};
use crate::mix::{digest_of, mix};
use crate::world::Position;

/// A disk is read in pieces of this size.
const READ_MAX: u64 = 64 << 10;
/// More possible values than this in a chain, and bytes are judged one by one.
const CHAIN_VALUES_MAX: usize = 64;

type Sector = [u8; SECTOR_BYTES];

/// A run of sectors that the same requests touch.
pub(crate) struct Segment {
    pub(crate) sectors: Range<u64>,
    /// In the order of their submission.
    pub(crate) facts: Vec<usize>,
}

/// What may be found after a crash. See the module and [`Oracle`](crate::Oracle).
pub struct Expectation {
    position: Position,
    initial: Content,
    facts: Vec<Fact>,
    /// In order; what is between them reads as at first.
    judged: Vec<(Segment, Judgement)>,
}

enum Judgement {
    Values(Vec<Source>),
    Chain(Vec<Sector>),
    /// Runs of bytes within the sector that the same requests touch, and the values each byte of them may
    /// have.
    Bytes(Vec<(Range<usize>, Vec<Sector>)>),
}

/// Where a value comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Initial,
    Zeroes,
    Fact(usize),
}

/// The disk after the crash is not what it may be.
#[derive(Debug)]
pub enum Violation {
    /// A sector has a value that it may not have.
    WrongSector(Box<WrongSector>),
    /// A run cannot be read.
    Unreadable {
        /// The run.
        span: GuestSpan,
        /// Why not.
        error: Error,
    },
}

/// A sector with a value it may not have.
#[derive(Debug)]
pub struct WrongSector {
    /// Where the crash was.
    pub position: Position,
    /// Which sector, counted from zero.
    pub sector: u64,
    /// Its bytes.
    pub found: Vec<u8>,
    /// What it may be, in words.
    pub admissible: Vec<String>,
    /// A description of it, when it is recognised: an older value, zeros.
    pub resembles: Option<String>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable { span, error } => write!(f, "{span} cannot be read: {}", error.chain()),
            Self::WrongSector(wrong) => {
                let at = wrong.sector * SECTOR_BYTES as u64;
                write!(
                    f,
                    "after a crash at {}, sector {} ({at:#x}) reads as ",
                    wrong.position, wrong.sector
                )?;
                write!(f, "{}", sketch(&wrong.found))?;
                if let Some(resembles) = &wrong.resembles {
                    write!(f, ", which is {resembles}")?;
                }
                write!(f, "; admissible: {}", wrong.admissible.join(", "))
            }
        }
    }
}

impl std::error::Error for Violation {}

/// The first bytes and a digest: enough to recognise a value by.
fn sketch(bytes: &[u8]) -> String {
    let mut whole = bytes.to_vec();
    whole.resize(SECTOR_BYTES, 0);
    let start: Vec<String> = bytes.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("[{} … {:08x}]", start.join(" "), digest_of(&whole) >> 32)
}

impl Expectation {
    pub(crate) fn new(
        position: Position,
        initial: Content,
        facts: Vec<Fact>,
        segments: Vec<Segment>,
    ) -> Self {
        let mut expectation = Self { position, initial, facts, judged: Vec::new() };
        let judge = |segment: Segment| {
            let judgement = expectation.judgement(&segment);
            (segment, judgement)
        };
        let judged = segments.into_iter().map(judge).collect();
        expectation.judged = judged;
        expectation
    }

    /// The runs that some request touched, in order.
    pub fn touched(&self) -> impl Iterator<Item = GuestSpan> {
        self.judged.iter().map(|(segment, _)| self.span_of(&segment.sectors))
    }

    /// Judges the touched runs of a disk, which was recovered after the crash.
    pub async fn check_disk(&self, disk: &dyn Disk) -> Result<(), Violation> {
        for span in self.touched() {
            self.check_disk_span(disk, span).await?;
        }
        Ok(())
    }

    /// Judges the whole disk, including what was never written.
    pub async fn check_whole_disk(&self, disk: &dyn Disk) -> Result<(), Violation> {
        self.check_disk_span(disk, GuestOffset::ZERO.span(self.initial.len())).await
    }

    async fn check_disk_span(&self, disk: &dyn Disk, span: GuestSpan) -> Result<(), Violation> {
        let mut rest = span;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(READ_MAX);
            let buffer = Buffer::for_overwrite(to_usize(now.len()));
            let read = disk.read(now.start(), buffer).await;
            let bytes = read.map_err(|error| Violation::Unreadable { span: now, error })?.contiguous();
            self.check_bytes(now.start(), bytes.slice())?;
            rest = later;
        }
        Ok(())
    }

    /// Judges a content that holds the guest's bytes one to one: a raw image.
    pub fn check(&self, content: &Content) -> Result<(), Violation> {
        for span in self.touched() {
            let mut bytes = vec![0; to_usize(span.len())];
            content.read(ImageOffset::new(span.start().bytes()), &mut bytes);
            self.check_bytes(span.start(), &bytes)?;
        }
        Ok(())
    }

    /// Judges bytes that were read from `at` on, which must be the start of a sector.
    pub fn check_bytes(&self, at: GuestOffset, bytes: &[u8]) -> Result<(), Violation> {
        let first = at.bytes() / SECTOR_BYTES as u64;
        assert_eq!(at.bytes() % SECTOR_BYTES as u64, 0, "sectors are judged as a whole");
        let end = first + bytes.len().div_ceil(SECTOR_BYTES) as u64;
        let mut next = self.judged.partition_point(|(segment, _)| segment.sectors.end <= first);
        let mut sector = first;
        while sector < end {
            let (judged, run_end) = match self.judged.get(next) {
                Some(judged) if judged.0.sectors.start <= sector => (Some(judged), judged.0.sectors.end),
                Some((segment, _)) => (None, segment.sectors.start),
                None => (None, end),
            };
            let run = sector..run_end.min(end);
            let found = &bytes[to_usize(run.start - first) * SECTOR_BYTES..];
            let found = &found[..found.len().min(to_usize(run.end - run.start) * SECTOR_BYTES)];
            // Most runs have one value, as a whole.
            if !self.admits_run(judged, sector, found) {
                for (sector, found) in run.clone().zip(found.chunks(SECTOR_BYTES)) {
                    if !self.admits(judged, sector, found) {
                        return Err(self.violation(judged, sector, found));
                    }
                }
            }
            next += usize::from(judged.is_some());
            sector = run.end;
        }
        Ok(())
    }

    /// Stands for everything that may be found: two expectations with the same digest, of oracles with the
    /// same initial content, admit the same.
    pub fn digest(&self) -> u64 {
        self.judged.iter().fold(0, |sum, (segment, judgement)| {
            let place = mix(segment.sectors.start, segment.sectors.end);
            mix(mix(sum, place), self.digest_of_judgement(judgement))
        })
    }

    fn digest_of_judgement(&self, judgement: &Judgement) -> u64 {
        let source = |source: &Source| match source {
            Source::Initial => 1,
            Source::Zeroes => 2,
            Source::Fact(index) => mix(3, self.facts[*index].digest),
        };
        let values = |seed: u64, values: &[Sector]| {
            values.iter().fold(seed, |digest, value| mix(digest, digest_of(value)))
        };
        match judgement {
            // The order says nothing.
            Judgement::Values(sources) => {
                sources.iter().map(source).fold(0, |sum: u64, source| sum.wrapping_add(mix(4, source)))
            }
            Judgement::Chain(chain) => values(5, chain),
            Judgement::Bytes(runs) => runs.iter().fold(6, |digest, (run, bytes)| {
                values(mix(digest, (run.start << 16 | run.end) as u64), bytes)
            }),
        }
    }

    /// Whether all of a run comes from one source that each of its sectors may come from. When not, it may
    /// still be right.
    fn admits_run(&self, judged: Option<&(Segment, Judgement)>, sector: u64, found: &[u8]) -> bool {
        match judged {
            None => self.matches(Source::Initial, sector, found),
            Some((_, Judgement::Values(sources))) => {
                sources.iter().any(|source| self.matches(*source, sector, found))
            }
            Some(_) => false,
        }
    }

    fn admits(&self, judged: Option<&(Segment, Judgement)>, sector: u64, found: &[u8]) -> bool {
        match judged {
            None => self.matches(Source::Initial, sector, found),
            Some((_, Judgement::Values(sources))) => {
                sources.iter().any(|source| self.matches(*source, sector, found))
            }
            Some((_, Judgement::Chain(values))) => values.iter().any(|value| value[..found.len()] == *found),
            Some((_, Judgement::Bytes(runs))) => runs.iter().all(|(run, values)| {
                let run = run.start..run.end.min(found.len());
                run.into_iter().all(|byte| values.iter().any(|value| value[byte] == found[byte]))
            }),
        }
    }

    /// Whether a run has the bytes of a source that covers all of it.
    fn matches(&self, source: Source, sector: u64, found: &[u8]) -> bool {
        let at = sector * SECTOR_BYTES as u64;
        match source {
            Source::Zeroes => vellum_core::is_zero(found),
            Source::Fact(index) => match &self.facts[index].request {
                GuestRequest::Write { at: start, data, .. } => {
                    let from = to_usize(at - start.bytes());
                    data[from..from + found.len()] == *found
                }
                _ => vellum_core::is_zero(found),
            },
            Source::Initial => self.initial.holds(ImageOffset::new(at), found),
        }
    }

    /// The value of a sector that comes from a source; where the source covers it in part, the rest is zero.
    fn value(&self, source: Source, sector: u64) -> Sector {
        let mut value = [0; SECTOR_BYTES];
        match source {
            Source::Zeroes => {}
            Source::Initial => {
                self.initial.read(ImageOffset::new(sector * SECTOR_BYTES as u64), &mut value);
            }
            Source::Fact(index) => self.put(index, sector, &mut value),
        }
        value
    }

    /// Copies the bytes that a request writes to a sector to their place.
    fn put(&self, index: usize, sector: u64, value: &mut Sector) {
        let request = &self.facts[index].request;
        let whole = GuestOffset::new(sector * SECTOR_BYTES as u64).span(SECTOR_BYTES as u64);
        let part = request.span().intersect(whole);
        let target = &mut value[to_usize(part.start() - whole.start())..][..to_usize(part.len())];
        match request {
            GuestRequest::Write { at, data, .. } => {
                target.copy_from_slice(&data[to_usize(part.start() - *at)..][..to_usize(part.len())]);
            }
            _ => target.fill(0),
        }
    }

    /// What is not overruled, for a sector or for one byte.
    fn sources(&self, facts: &[usize], byte: Option<u64>) -> Vec<Source> {
        let covers = |index: &&usize| {
            byte.is_none_or(|byte| self.facts[**index].request.span().contains(GuestOffset::new(byte)))
        };
        let facts: Vec<usize> = facts.iter().filter(covers).copied().collect();
        // What begins last among the durable overrules the most.
        let overruling = facts
            .iter()
            .map(|index| &self.facts[*index])
            .filter(|fact| fact.durable && !matches!(fact.request, GuestRequest::Discard { .. }))
            .map(|fact| fact.submitted)
            .max();
        let mut sources = Vec::new();
        if overruling.is_none() {
            sources.push(Source::Initial);
        }
        for index in facts {
            let fact = &self.facts[index];
            let overruled = match (fact.ended, overruling) {
                (Some(ended), Some(overruling)) => ended < overruling,
                _ => false,
            };
            if overruled {
                continue;
            }
            sources.push(match fact.request {
                GuestRequest::Write { .. } => Source::Fact(index),
                _ => Source::Zeroes,
            });
        }
        sources
    }

    fn judgement(&self, segment: &Segment) -> Judgement {
        let span = self.span_of(&segment.sectors);
        let is_whole = |index: &usize| self.facts[*index].request.span().intersect(span) == span;
        if segment.facts.iter().all(is_whole) {
            return Judgement::Values(self.sources(&segment.facts, None));
        }
        self.chain(segment).map_or_else(|| Judgement::Bytes(self.bytes(segment)), Judgement::Chain)
    }

    /// Cuts a sector where requests begin and end.
    fn bytes(&self, segment: &Segment) -> Vec<(Range<usize>, Vec<Sector>)> {
        let sector = segment.sectors.start;
        let whole = GuestOffset::new(sector * SECTOR_BYTES as u64).span(SECTOR_BYTES as u64);
        let mut cuts = vec![whole.start(), whole.end()];
        for index in &segment.facts {
            let part = self.facts[*index].request.span().intersect(whole);
            cuts.extend([part.start(), part.end()]);
        }
        cuts.sort_unstable();
        cuts.dedup();
        let run_of = |cut: &[GuestOffset]| {
            let run = to_usize(cut[0] - whole.start())..to_usize(cut[1] - whole.start());
            let sources = self.sources(&segment.facts, Some(cut[0].bytes()));
            (run, sources.into_iter().map(|source| self.value(source, sector)).collect())
        };
        cuts.windows(2).map(run_of).collect()
    }

    /// The values that requests made which followed one another; `None` when they did not, or made too many.
    fn chain(&self, segment: &Segment) -> Option<Vec<Sector>> {
        let sector = segment.sectors.start;
        let facts: Vec<&Fact> = segment.facts.iter().map(|index| &self.facts[*index]).collect();
        let one_by_one =
            facts.windows(2).all(|pair| pair[0].ended.is_some_and(|end| end < pair[1].submitted));
        if !one_by_one {
            return None;
        }
        let mut now = vec![self.value(Source::Initial, sector)];
        let mut admissible = now.clone();
        for (index, fact) in segment.facts.iter().zip(facts) {
            let is_discard = matches!(fact.request, GuestRequest::Discard { .. });
            let mut after = now.clone();
            for value in &mut after {
                self.put(*index, sector, value);
            }
            if is_discard || fact.uncertain {
                after.extend_from_slice(&now);
            }
            after.sort_unstable();
            after.dedup();
            if fact.durable && !is_discard {
                admissible.clear();
            }
            admissible.extend_from_slice(&after);
            now = after;
            if now.len() > CHAIN_VALUES_MAX {
                return None;
            }
        }
        admissible.sort_unstable();
        admissible.dedup();
        Some(admissible)
    }

    fn span_of(&self, sectors: &Range<u64>) -> GuestSpan {
        let size = self.initial.len();
        let start = (sectors.start * SECTOR_BYTES as u64).min(size);
        let end = (sectors.end * SECTOR_BYTES as u64).min(size);
        GuestSpan::between(GuestOffset::new(start), GuestOffset::new(end))
    }

    fn violation(&self, judged: Option<&(Segment, Judgement)>, sector: u64, found: &[u8]) -> Violation {
        let name = |source: Source| match source {
            Source::Initial => "the initial value".to_owned(),
            Source::Zeroes => "zeros".to_owned(),
            Source::Fact(index) => format!("write {}", self.facts[index].number),
        };
        let describe = |source: Source| {
            let value = self.value(source, sector);
            format!("{} {}", name(source), sketch(&value[..found.len()]))
        };
        let admissible = match judged {
            None => vec![describe(Source::Initial)],
            Some((_, Judgement::Values(sources))) => sources.iter().map(|source| describe(*source)).collect(),
            Some((_, Judgement::Chain(values))) => {
                values.iter().map(|value| sketch(&value[..found.len()])).collect()
            }
            Some((segment, Judgement::Bytes(_))) => {
                let requests: Vec<String> =
                    segment.facts.iter().map(|index| self.facts[*index].number.to_string()).collect();
                vec![format!("byte by byte what the requests {} leave", requests.join(", "))]
            }
        };
        let facts = judged.map_or(&[][..], |(segment, _)| &segment.facts);
        let overruled = facts.iter().rev().map(|index| Source::Fact(*index));
        let resembles = [Source::Zeroes, Source::Initial]
            .into_iter()
            .chain(overruled)
            .find(|source| self.value(*source, sector)[..found.len()] == *found)
            .map(name);
        Violation::WrongSector(Box::new(WrongSector {
            position: self.position,
            sector,
            found: found.to_vec(),
            admissible,
            resembles,
        }))
    }
}
