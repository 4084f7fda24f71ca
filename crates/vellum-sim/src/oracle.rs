//! What a guest may find after a crash: the judge of every crash test.
//!
//! An [`Oracle`] records what the guest asked of a disk, when, and when it was answered. For a crash at any
//! position it knows which values each 512-byte sector may have ([`Disk`] contract 1 and 2):
//!
//! ```text
//!   write A   ├──┤                               For a crash at ▲: A is durable, because it had returned before the
//!   flush          ├────┤                        flush was submitted, and the flush has returned. B was not lost by
//!   write B           ├───┤                      right, nor kept by right. So the sector may read as A or as B,
//!   write C                 ├──── … ▲            or as C, and as nothing else: not as what was there before A.
//! ```
//!
//! 1. A value is *overruled* when a durable write began after it had returned. Every value that is not
//!    overruled is admissible, the initial content among them.
//! 2. A discard makes zero admissible and overrules nothing: each sector reads as zero or as before.
//! 3. A request that failed, or was never answered, may have happened in any sector. It is never durable.
//! 4. A write of part of a sector makes a new value out of the old one. Where such writes follow each other,
//!    the values are known exactly; where they ran concurrently, each byte is judged by itself.
//! 5. What a crash has lost does not become durable by a later flush: a test that continues after a crash
//!    notes it in the oracle ([`Oracle::note_crash`]).
//!
//! Positions are those of the world, so one oracle judges a disk that is stored on several drives.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use vellum_core::{
    Buffer, Disk, Extent, Filled, Filling, Geometry, GuestOffset, GuestSpan, ImageOffset, LocalFuture,
    Result, SharedDisk, WriteFlags, ZeroFlags, lock,
};

use crate::content::{Content, SECTOR_BYTES, to_usize};
use crate::expectation::{Expectation, Segment};
use crate::guest::{Fact, GuestRequest};
use crate::world::{Core, Position, World};

/// The number of a request with an oracle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestId(usize);

#[derive(Debug, Clone)]
struct Recorded {
    request: GuestRequest,
    digest: u64,
    submitted: Position,
    ended: Option<(Position, bool)>,
}

/// Records what a guest does, and knows what it may find. Copies are handles of one record.
#[derive(Clone)]
pub struct Oracle(Arc<Record>);

struct Record {
    core: Arc<Core>,
    initial: Content,
    history: Mutex<HistoryOfGuest>,
}

#[derive(Default)]
struct HistoryOfGuest {
    requests: Vec<Recorded>,
    crashes: Vec<Position>,
}

impl Oracle {
    /// An oracle for a disk that reads as `initial` and is as long.
    pub fn new(world: &World, initial: Content) -> Self {
        Self(Arc::new(Record { core: world.core().clone(), initial, history: Mutex::default() }))
    }

    /// The disk, with every request to it recorded.
    pub fn watch(&self, disk: SharedDisk) -> Arc<OracleDisk> {
        Arc::new(OracleDisk { inner: disk, oracle: self.clone() })
    }

    /// Records that a request begins now.
    pub fn begin(&self, request: GuestRequest) -> RequestId {
        let submitted = self.0.core.take_position();
        let digest = request.digest();
        let mut history = self.lock();
        history.requests.push(Recorded { request, digest, submitted, ended: None });
        RequestId(history.requests.len() - 1)
    }

    /// Records that a request returns now.
    pub fn end(&self, id: RequestId, succeeded: bool) {
        let position = self.0.core.take_position();
        let recorded = &mut self.lock().requests[id.0];
        assert!(recorded.ended.is_none(), "a request returns once");
        recorded.ended = Some((position, succeeded));
    }

    /// Records that the disk crashed now and went on afterwards: what was not durable is never made so by a
    /// later flush, and what was not answered never will be.
    pub fn note_crash(&self) {
        let position = self.0.core.take_position();
        self.lock().crashes.push(position);
    }

    /// How many requests it has recorded.
    pub fn requests(&self) -> usize {
        self.lock().requests.len()
    }

    /// Where the guest was answered: from there on more may be promised than one position earlier.
    pub fn answers(&self) -> Vec<Position> {
        let ended = |recorded: &Recorded| recorded.ended.map(|(ended, _)| ended.next());
        self.lock().requests.iter().filter_map(ended).collect()
    }

    /// What may be found after a crash at `position`.
    pub fn expect_at(&self, position: Position) -> Expectation {
        let history = self.lock();
        let facts: Vec<Fact> = history.facts(position);
        let segments = segments_of(&facts);
        drop(history);
        Expectation::new(position, self.0.initial.clone(), facts, segments)
    }

    /// What must be found when nothing has crashed: everything that returned is as good as durable.
    pub fn expect_running(&self) -> Expectation {
        let history = self.lock();
        let position = self.0.core.position();
        let mut facts = history.facts(position);
        for fact in &mut facts {
            fact.durable = fact.ended.is_some() && !fact.uncertain;
        }
        let segments = segments_of(&facts);
        drop(history);
        Expectation::new(position, self.0.initial.clone(), facts, segments)
    }

    fn lock(&self) -> MutexGuard<'_, HistoryOfGuest> {
        lock(&self.0.history)
    }
}

impl HistoryOfGuest {
    /// The changes submitted before `position`, as they stood there.
    fn facts(&self, position: Position) -> Vec<Fact> {
        let past = &self.requests[..self.requests.partition_point(|request| request.submitted < position)];
        let crash_after =
            |from: Position| self.crashes.iter().copied().find(|crash| from < *crash && *crash < position);
        // An answer that comes after a crash was never given.
        let ended_by = |recorded: &Recorded| {
            let cut_off = crash_after(recorded.submitted);
            recorded.ended.filter(|(ended, _)| *ended < position && cut_off.is_none_or(|cut| *ended < cut))
        };
        // For each stretch between two crashes: what ended before this is durable.
        let mut flushes: Vec<Position> = past
            .iter()
            .filter(|recorded| matches!(recorded.request, GuestRequest::Flush))
            .filter(|recorded| ended_by(recorded).is_some_and(|(_, succeeded)| succeeded))
            .map(|recorded| recorded.submitted)
            .collect();
        flushes.sort_unstable();
        let flushed = |ended: Position| {
            let first = flushes.partition_point(|flush| *flush <= ended);
            flushes
                .get(first)
                .is_some_and(|flush| !self.crashes.iter().any(|crash| ended < *crash && *crash < *flush))
        };
        let fact_of = |(number, recorded): (usize, &Recorded)| {
            let ended = ended_by(recorded);
            let succeeded = ended.is_some_and(|(_, succeeded)| succeeded);
            let fua = recorded.request.is_fua();
            let durable = ended.is_some_and(|(ended, _)| succeeded && (fua || flushed(ended)));
            // Cut off or not, what a crash came after has ended, whatever became of it.
            let crash = crash_after(recorded.submitted);
            Fact {
                number,
                request: recorded.request.clone(),
                digest: recorded.digest,
                submitted: recorded.submitted,
                ended: ended.map(|(ended, _)| ended).or(crash),
                durable,
                uncertain: !durable && (crash.is_some() || ended.is_some() && !succeeded),
            }
        };
        let changes = past.iter().enumerate().filter(|(_, recorded)| !recorded.request.span().is_empty());
        changes.map(fact_of).collect()
    }
}

/// Cuts the disk into runs of sectors that the same requests touch. A sector that some request touches only
/// in part is a run of its own.
fn segments_of(facts: &[Fact]) -> Vec<Segment> {
    let sector = SECTOR_BYTES as u64;
    let mut cuts = BTreeSet::new();
    for fact in facts {
        let span = fact.request.span();
        for at in [span.start().bytes(), span.end().bytes()] {
            cuts.extend([at / sector, at.div_ceil(sector)]);
        }
    }
    let cuts: Vec<u64> = cuts.into_iter().collect();
    let mut segments: Vec<Segment> =
        cuts.windows(2).map(|cut| Segment { sectors: cut[0]..cut[1], facts: Vec::new() }).collect();
    for (index, fact) in facts.iter().enumerate() {
        let span = fact.request.span();
        let first = cuts.partition_point(|cut| *cut < span.start().bytes() / sector);
        for segment in &mut segments[first..] {
            if segment.sectors.start * sector >= span.end().bytes() {
                break;
            }
            segment.facts.push(index);
        }
    }
    segments.retain(|segment| !segment.facts.is_empty());
    segments
}

/// A disk whose guest is recorded by an [`Oracle`].
pub struct OracleDisk {
    inner: SharedDisk,
    oracle: Oracle,
}

impl OracleDisk {
    async fn record(&self, request: GuestRequest, work: LocalFuture<'_, Result<()>>) -> Result<()> {
        let id = self.oracle.begin(request);
        let result = work.await;
        self.oracle.end(id, result.is_ok());
        result
    }
}

impl Disk for OracleDisk {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.inner.below()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.inner.read(at, buffer)
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        if GuestSpan::checked(at, data.len() as u64).is_none() {
            return self.inner.write(at, data, flags);
        }
        let request = GuestRequest::Write { at, data: data.to_vec().into(), fua: flags.fua };
        Box::pin(self.record(request, self.inner.write(at, data, flags)))
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.record(GuestRequest::Flush, self.inner.flush()))
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        let request = GuestRequest::WriteZeroes { span, fua: flags.fua };
        Box::pin(self.record(request, self.inner.write_zeroes(span, flags)))
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.record(GuestRequest::Discard { span }, self.inner.discard(span, flags)))
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.inner.map(span)
    }

    fn filling(&self) -> Option<Filling> {
        self.inner.filling()
    }

    /// Nothing that the guest could rely on.
    fn fill(&self, at: GuestOffset, data: Buffer) -> LocalFuture<'_, Result<Filled>> {
        self.inner.fill(at, data)
    }

    /// Nothing to be held against it.
    fn tend(&self, now: Duration) -> LocalFuture<'_, bool> {
        self.inner.tend(now)
    }

    /// A disk that closes well has made everything durable.
    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.record(GuestRequest::Flush, self.inner.close()))
    }
}

/// Reads a whole disk.
pub async fn read_disk(disk: &dyn Disk) -> Result<Content> {
    let size = disk.geometry().size;
    let mut content = Content::zeroed(size);
    let mut at = 0;
    while at < size {
        let len = (size - at).min(64 << 10);
        let buffer = disk.read(GuestOffset::new(at), Buffer::for_overwrite(to_usize(len))).await?;
        if !buffer.is_zero() {
            content.write(ImageOffset::new(at), &buffer.to_vec());
        }
        at += len;
    }
    Ok(content)
}
