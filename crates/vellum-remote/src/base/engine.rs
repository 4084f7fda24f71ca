//! The fetch engine: reads of any bytes become few requests for aligned blocks of a remote object.
//!
//! ```text
//!   read ─► blocks ─► in memory? ── yes ─► copied
//!                        │ no                         a task of the runtime for each run
//!                        ├─► being fetched? ── wait   ┌──────────────────────────────────────────────────┐
//!                        └─► runs ──────────────────► │ request ─► failed? pause, again, until the deadline │
//!                            and what is read ahead   │         └► silent? a second request beside it      │
//!                                                     └──────────────────────────────────────────────────┘
//! ```
//!
//! 1. Two readers of one missing block fetch it once. Missing neighbours are fetched with one request, of at most
//!    [`RUN_BYTES_MAX`].
//! 2. Memory is bounded: [`CACHE_BYTES`] of blocks for each base, and [`IN_FLIGHT_MAX`] requests at once. A read takes
//!    its blocks in windows of [`RUN_BYTES_MAX`].
//! 3. A request that fails in a way that may pass is tried again, with growing random pauses, behind the bytes that
//!    have arrived: meanwhile the read is held. It fails when nothing has arrived for the base's timeout, whether it
//!    waits for a place or for bytes, and at most [`LAST_TRY`] later. A failure that will not pass, such as a base that
//!    has changed, fails at once. A failure is not remembered: the next read tries again.
//! 4. One base never waits for another: the limits are each base's own, and no thread waits with a request.
//! 5. What is read ahead takes no place from a read that waits: it is left out while all places are taken.
//! 6. All limits are on silence ([`Watch`]): whatever the link's pace, a request goes on as long as bytes keep coming. After
//!    a silence, less is asked for at once.
//! 7. All decisions are in `plan.rs`. Time, chance, and the tasks are given by a [`Ground`], and answers by a
//!    [`Transport`], so that tests script both.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use event_listener::Event;
use futures_util::future::{Either, select};
use vellum_core::pin::Proof;
use vellum_core::{
    Buffer, Error, ErrorKind, ImageOffset, ImageSpan, Limits, LocalFuture, Result, Storage, StorageRun,
    Zeroes, lock,
};

use super::kept::Kept;
use super::plan::{AfterFailure, FETCH_BLOCK, Pace, ReadAhead, Width, after_failure, runs};
pub(crate) use crate::silence::{Failure, Parts};
use crate::silence::{Ground, Heard, LAST_TRY, Watch};

/// The longest request, in bytes.
pub(crate) const RUN_BYTES_MAX: u64 = 1 << 20;

/// Blocks of one base in memory, in bytes.
pub const CACHE_BYTES: u64 = 32 << 20;

/// Requests of one base at once.
pub(crate) const IN_FLIGHT_MAX: usize = 16;

const RUN_BLOCKS_MAX: u64 = RUN_BYTES_MAX / FETCH_BLOCK;
const CACHE_BLOCKS: usize = 512;
const AHEAD_BLOCKS_MAX: u64 = 64;

/// Where bytes come from.
pub(crate) trait Transport: Send + Sync {
    /// Exactly the bytes of this range, of the content that was there when it was opened.
    fn fetch(&self, range: Range<u64>) -> Parts;
}

/// What was done for one remote base.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FetchCounts {
    /// Requests that were made, with those that were made again.
    pub requests: u64,
    /// Bytes that they brought.
    pub fetched_bytes: u64,
    /// Requests that were made again after one had failed.
    pub retries: u64,
    /// Second requests beside a slow one.
    pub hedges: u64,
    /// Blocks that were read ahead, and asked for later.
    pub ahead_used: u64,
    /// Blocks that were read ahead, and dropped unused.
    pub ahead_wasted: u64,
    /// Blocks, and chunks of templates, that the cache of this host had.
    pub cached: u64,
    /// Reads that were given up after the timeout, or failed for good.
    pub failed: u64,
}

impl FetchCounts {
    pub(crate) fn add(&mut self, other: Self) {
        let pairs = [
            (&mut self.requests, other.requests),
            (&mut self.fetched_bytes, other.fetched_bytes),
            (&mut self.retries, other.retries),
            (&mut self.hedges, other.hedges),
            (&mut self.ahead_used, other.ahead_used),
            (&mut self.ahead_wasted, other.ahead_wasted),
            (&mut self.cached, other.cached),
            (&mut self.failed, other.failed),
        ];
        pairs.into_iter().for_each(|(sum, count)| *sum += count);
    }
}

#[derive(Default)]
struct Counters {
    requests: AtomicU64,
    fetched_bytes: AtomicU64,
    retries: AtomicU64,
    hedges: AtomicU64,
    ahead_used: AtomicU64,
    ahead_wasted: AtomicU64,
    cached: AtomicU64,
    failed: AtomicU64,
}

/// A number of bytes or blocks of one window.
fn small(number: u64) -> usize {
    usize::try_from(number).expect("at most one window")
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

/// A run that is being fetched, or has been.
struct Fetch {
    first: u64,
    /// When bytes of it arrived last, or else when its silence began.
    heard: Heard,
    /// Why its last try failed.
    failure: Mutex<Option<Error>>,
    result: OnceLock<Result<Bytes, Failure>>,
    done: Event,
}

struct Block {
    bytes: Bytes,
    /// When it was used last, by the count of reads.
    used: u64,
    /// It was read ahead and nothing has asked for it yet.
    is_ahead: bool,
}

enum Slot {
    Ready(Block),
    Pending(Arc<Fetch>),
}

#[derive(Default)]
struct State {
    slots: HashMap<u64, Slot>,
    ready: usize,
    reads: u64,
    in_flight: usize,
    ahead: ReadAhead,
    pace: Pace,
    width: Width,
}

impl State {
    /// Requests that may be in flight now.
    fn places(&self) -> usize {
        small(self.width.of(IN_FLIGHT_MAX as u64))
    }
}

struct Inner {
    name: String,
    len: u64,
    proof: Option<Proof>,
    limits: Limits,
    timeout: Duration,
    kept: Option<Kept>,
    transport: Box<dyn Transport>,
    ground: Box<dyn Ground>,
    state: Mutex<State>,
    /// A request has ended, so that there is a place for another one.
    place: Event,
    /// When bytes of any request arrived last.
    heard: Heard,
    counters: Counters,
}

/// A remote object as a storage that can only be read.
pub struct RemoteBase(Arc<Inner>);

/// What a remote base is, as it was found when it was opened.
pub(crate) struct Facts {
    pub(crate) name: String,
    pub(crate) len: u64,
    pub(crate) proof: Option<Proof>,
    pub(crate) timeout: Duration,
    /// Its blocks in the cache of this host.
    pub(crate) kept: Option<Kept>,
}

impl RemoteBase {
    pub(crate) fn new(facts: Facts, transport: Box<dyn Transport>, ground: Box<dyn Ground>) -> Self {
        let Facts { name, len, proof, timeout, kept } = facts;
        let limits = Limits {
            read_only: true,
            grows_zeroed: false,
            fast_zeroes: false,
            discards: false,
            ..Limits::plain()
        };
        Self(Arc::new(Inner {
            name,
            len,
            proof,
            limits,
            timeout,
            kept,
            transport,
            ground,
            state: Mutex::default(),
            place: Event::new(),
            heard: Heard::default(),
            counters: Counters::default(),
        }))
    }

    /// What was done for it so far.
    pub fn counts(&self) -> FetchCounts {
        let counters = &self.0.counters;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        FetchCounts {
            requests: load(&counters.requests),
            fetched_bytes: load(&counters.fetched_bytes),
            retries: load(&counters.retries),
            hedges: load(&counters.hedges),
            ahead_used: load(&counters.ahead_used),
            ahead_wasted: load(&counters.ahead_wasted),
            cached: load(&counters.cached),
            failed: load(&counters.failed),
        }
    }

    /// The blocks of one window, from the first to the last.
    async fn blocks(&self, wanted: Range<u64>) -> Result<Vec<Bytes>> {
        let inner = &self.0;
        // Since when nothing that this read waits for has arrived.
        let mut silent_since = inner.ground.now();
        let mut found: Vec<Option<Bytes>> = vec![None; small(wanted.end - wanted.start)];
        let mut is_first = true;
        loop {
            let (waits, missing) = inner.look(&wanted, &mut found, is_first);
            is_first = false;
            if let Some(missing) = missing {
                let run_max = lock(&inner.state).width.of(RUN_BLOCKS_MAX);
                for run in runs(&missing, run_max) {
                    inner.take_place(&mut silent_since).await?;
                    inner.begin(run, false, silent_since);
                }
                continue;
            }
            if waits.is_empty() {
                return Ok(found.into_iter().map(|block| block.expect("none is missing")).collect());
            }
            for fetch in waits {
                match inner.wait(&fetch, &mut silent_since).await? {
                    // Taken at once: the cache may have dropped it before this reader looks again.
                    Ok(bytes) => {
                        take(&fetch, bytes, &wanted, &mut found);
                        inner.note_used(&wanted);
                    }
                    // It was begun for an earlier reader, or ahead: this one has time left.
                    Err(Failure::Passing(_)) if inner.ground.now() < silent_since + inner.timeout => {}
                    Err(Failure::Final(error) | Failure::Passing(error)) => {
                        add(&inner.counters.failed, 1);
                        return Err(error.clone());
                    }
                }
            }
        }
    }

    async fn read_bytes(&self, at: ImageOffset, mut buffer: Buffer) -> Result<Buffer> {
        let total = buffer.len();
        let mut filled = 0;
        while filled < total {
            let from = at.bytes().saturating_add(filled as u64);
            if from >= self.0.len {
                let mut behind = buffer.split_off(filled);
                behind.fill(0);
                buffer.append(behind);
                break;
            }
            let window_end = (from / RUN_BYTES_MAX + 1) * RUN_BYTES_MAX;
            let to = window_end.min(self.0.len).min(from + (total - filled) as u64);
            let wanted = from / FETCH_BLOCK..to.div_ceil(FETCH_BLOCK);
            let first = wanted.start;
            for (block, bytes) in (first..).zip(self.blocks(wanted).await?) {
                let start = (block * FETCH_BLOCK).max(from);
                let end = ((block + 1) * FETCH_BLOCK).min(to);
                let inside = small(start - block * FETCH_BLOCK)..small(end - block * FETCH_BLOCK);
                let count = inside.len();
                buffer.copy_from(filled, &bytes[inside]);
                filled += count;
            }
        }
        Ok(buffer)
    }
}

/// Puts the blocks of a run that was fetched where they are wanted.
fn take(fetch: &Fetch, bytes: &Bytes, wanted: &Range<u64>, found: &mut [Option<Bytes>]) {
    for (index, block) in fetch.blocks(bytes).enumerate() {
        let number = fetch.first + index as u64;
        if wanted.contains(&number) {
            found[small(number - wanted.start)] = Some(block);
        }
    }
}

impl Fetch {
    fn blocks<'a>(&self, bytes: &'a Bytes) -> impl Iterator<Item = Bytes> + 'a {
        let size = small(FETCH_BLOCK);
        (0..bytes.len()).step_by(size).map(move |at| bytes.slice(at..bytes.len().min(at + size)))
    }
}

impl Inner {
    fn end_block(&self) -> u64 {
        self.len.div_ceil(FETCH_BLOCK)
    }

    /// What is in memory of these blocks goes to `found`. What must be waited for, and what is missing, if any is.
    fn look(
        self: &Arc<Self>,
        wanted: &Range<u64>,
        found: &mut [Option<Bytes>],
        is_first: bool,
    ) -> (Vec<Arc<Fetch>>, Option<Vec<u64>>) {
        let mut state = lock(&self.state);
        state.reads += 1;
        let now = state.reads;
        let (mut waits, mut missing) = (Vec::<Arc<Fetch>>::new(), Vec::new());
        for block in wanted.clone() {
            let index = small(block - wanted.start);
            if found[index].is_some() {
                continue;
            }
            match state.slots.get_mut(&block) {
                Some(Slot::Ready(ready)) => {
                    let was_ahead = std::mem::take(&mut ready.is_ahead);
                    ready.used = now;
                    found[index] = Some(ready.bytes.clone());
                    if was_ahead {
                        add(&self.counters.ahead_used, 1);
                        state.ahead.on_used();
                    }
                }
                Some(Slot::Pending(fetch)) => {
                    if waits.last().is_none_or(|last| !Arc::ptr_eq(last, fetch)) {
                        waits.push(fetch.clone());
                    }
                }
                None => missing.push(block),
            }
        }
        if is_first {
            let window_max = state.width.of(AHEAD_BLOCKS_MAX);
            let ahead = state.ahead.on_read(wanted, self.end_block(), window_max);
            let ahead: Vec<u64> = ahead.filter(|block| !state.slots.contains_key(block)).collect();
            let run_max = state.width.of(RUN_BLOCKS_MAX);
            drop(state);
            for run in runs(&ahead, run_max) {
                // Half of the places are for reads that wait.
                let has_place = {
                    let mut state = lock(&self.state);
                    let has_place = state.in_flight < state.places() / 2;
                    state.in_flight += usize::from(has_place);
                    has_place
                };
                if has_place {
                    self.begin(run, true, self.ground.now());
                }
            }
        }
        (waits, Some(missing).filter(|missing| !missing.is_empty()))
    }

    /// A reader has waited for these blocks: those of them that were read ahead were not in vain.
    fn note_used(&self, wanted: &Range<u64>) {
        let mut state = lock(&self.state);
        for block in wanted.clone() {
            if let Some(Slot::Ready(ready)) = state.slots.get_mut(&block)
                && std::mem::take(&mut ready.is_ahead)
            {
                add(&self.counters.ahead_used, 1);
                state.ahead.on_used();
            }
        }
    }

    /// Takes a place. While bytes of other requests arrive, one will become free.
    async fn take_place(&self, silent_since: &mut Duration) -> Result<()> {
        loop {
            let listener = self.place.listen();
            {
                let mut state = lock(&self.state);
                if state.in_flight < state.places() {
                    state.in_flight += 1;
                    return Ok(());
                }
            }
            *silent_since = (*silent_since).max(self.heard.time());
            let Some(left) = self.left(*silent_since) else {
                add(&self.counters.failed, 1);
                let why =
                    Error::new(ErrorKind::Io, "all requests that may be made at once wait for the server");
                return Err(self.given_up(why));
            };
            select(listener, self.ground.sleep(left)).await;
        }
    }

    /// The result of a fetch. An error when nothing of it arrives for too long.
    async fn wait<'a>(
        &self,
        fetch: &'a Fetch,
        silent_since: &mut Duration,
    ) -> Result<&'a Result<Bytes, Failure>> {
        loop {
            let listener = fetch.done.listen();
            if let Some(result) = fetch.result.get() {
                return Ok(result);
            }
            *silent_since = (*silent_since).max(fetch.heard.time());
            let Some(left) = self.left(*silent_since) else {
                add(&self.counters.failed, 1);
                let silent = || Error::new(ErrorKind::Io, "the server is silent");
                return Err(self.given_up(lock(&fetch.failure).clone().unwrap_or_else(silent)));
            };
            select(listener, self.ground.sleep(left)).await;
        }
    }

    /// How long a read may still wait; `None` when it is to fail.
    fn left(&self, silent_since: Duration) -> Option<Duration> {
        let until = silent_since + self.timeout + LAST_TRY;
        until.checked_sub(self.ground.now()).filter(|left| !left.is_zero())
    }

    fn given_up(&self, why: Error) -> Error {
        let seconds = self.timeout.as_secs_f64().round();
        why.context(format!("{}: no answer for {seconds} s (--remote-timeout)", self.name))
            .with_kind(ErrorKind::Io)
    }

    /// Begins to fetch what of the run is still missing. A place has been taken.
    fn begin(self: &Arc<Self>, run: Range<u64>, is_ahead: bool, silent_since: Duration) {
        let fetch = {
            let mut state = lock(&self.state);
            // Another reader may have begun while this one waited for its place.
            let mut missing = run.clone().skip_while(|block| state.slots.contains_key(block));
            let first = missing.next();
            let count = missing.take_while(|block| !state.slots.contains_key(block)).count() as u64;
            let Some(first) = first else {
                state.in_flight -= 1;
                self.offer_places(&state);
                return;
            };
            let fetch = Arc::new(Fetch {
                first,
                heard: Heard::at(silent_since),
                failure: Mutex::default(),
                result: OnceLock::new(),
                done: Event::new(),
            });
            for block in first..=first + count {
                state.slots.insert(block, Slot::Pending(fetch.clone()));
            }
            match is_ahead {
                true => state.ahead.on_ahead(count + 1),
                false => state.ahead.on_wanted(count + 1),
            }
            (fetch, first..first + count + 1)
        };
        let (fetch, run) = fetch;
        let inner = self.clone();
        self.ground.spawn(Box::pin(async move {
            let bytes = run.start * FETCH_BLOCK..(run.end * FETCH_BLOCK).min(inner.len);
            let result = inner.fetch_with_patience(bytes, &fetch).await;
            inner.settle(&fetch, run, result, is_ahead);
        }));
    }

    /// Publishes the result of a fetch, makes room, and wakes those that wait.
    fn settle(&self, fetch: &Fetch, run: Range<u64>, result: Result<Bytes, Failure>, is_ahead: bool) {
        {
            let mut state = lock(&self.state);
            state.in_flight -= 1;
            let now = state.reads;
            match &result {
                Ok(bytes) => {
                    for (block, bytes) in run.zip(fetch.blocks(bytes)) {
                        state.slots.insert(block, Slot::Ready(Block { bytes, used: now, is_ahead }));
                        state.ready += 1;
                    }
                    self.make_room(&mut state);
                }
                Err(_) => {
                    if is_ahead {
                        state.ahead.on_failed(run.end - run.start);
                    }
                    run.for_each(|block| drop(state.slots.remove(&block)));
                }
            }
        }
        drop(fetch.result.set(result));
        fetch.done.notify(usize::MAX);
        self.offer_places(&lock(&self.state));
    }

    /// Wakes as many as there are places for, besides those that were woken before.
    fn offer_places(&self, state: &State) {
        self.place.notify_additional(state.places().saturating_sub(state.in_flight));
    }

    /// Drops the blocks that were used least recently, an eighth of all at once.
    fn make_room(&self, state: &mut State) {
        if state.ready <= CACHE_BLOCKS {
            return;
        }
        let ready = |(number, slot): (&u64, &Slot)| match slot {
            Slot::Ready(block) => Some((block.used, *number)),
            Slot::Pending(_) => None,
        };
        let mut all: Vec<(u64, u64)> = state.slots.iter().filter_map(ready).collect();
        all.sort_unstable();
        for (_, number) in all.into_iter().take(state.ready - CACHE_BLOCKS * 7 / 8) {
            if let Some(Slot::Ready(block)) = state.slots.remove(&number) {
                state.ready -= 1;
                if block.is_ahead {
                    add(&self.counters.ahead_wasted, 1);
                }
            }
        }
    }

    /// Tries until there are bytes, a failure that will not pass, or no more time.
    async fn fetch_with_patience(&self, range: Range<u64>, fetch: &Fetch) -> Result<Bytes, Failure> {
        let Some(kept) = &self.kept else { return self.ask_with_patience(range, fetch).await };
        if let Some(bytes) = kept.get(&range).await {
            add(&self.counters.cached, (range.end - range.start).div_ceil(FETCH_BLOCK));
            return Ok(bytes);
        }
        let bytes = self.ask_with_patience(range.clone(), fetch).await?;
        kept.put(&range, &bytes);
        Ok(bytes)
    }

    async fn ask_with_patience(&self, range: Range<u64>, fetch: &Fetch) -> Result<Bytes, Failure> {
        let mut got = BytesMut::with_capacity(small(range.end - range.start));
        let mut tries = 0;
        loop {
            let heard_before = fetch.heard.time();
            let error = match self.fetch_once(&range, &mut got, fetch).await {
                Ok(()) => return Ok(got.freeze()),
                Err(Failure::Passing(error)) => error,
                Err(error) => return Err(error),
            };
            let (heard, now) = (fetch.heard.time(), self.ground.now());
            let error = {
                let mut last = lock(&fetch.failure);
                // A try that the timeout cut short says less than the one before.
                if last.is_none() || now < heard + self.timeout {
                    *last = Some(error);
                }
                last.clone().expect("there is one")
            };
            if heard > heard_before {
                tries = 0;
            }
            match after_failure(tries, self.ground.chance(), now, heard + self.timeout) {
                AfterFailure::GiveUp => return Err(Failure::Passing(self.given_up(error))),
                AfterFailure::Pause(pause) => self.ground.sleep(pause).await,
            }
            tries += 1;
            add(&self.counters.retries, 1);
        }
    }

    /// One request for what is still to come, and a second one beside it when it is silent for longer than others take.
    /// The first answer counts; what is dropped is cancelled. What has arrived is added to `got`, also after a failure.
    async fn fetch_once(&self, range: &Range<u64>, got: &mut BytesMut, fetch: &Fetch) -> Result<(), Failure> {
        let begun = self.ground.now();
        let rest = range.start + got.len() as u64..range.end;
        let (of_first, of_second) = (Mutex::default(), Mutex::default());
        let mut first = Box::pin(self.receive(rest.clone(), &of_first, fetch));
        let hedge_after = lock(&self.state).pace.hedge_after();
        let answer = match hedge_after {
            None => first.await,
            Some(time) => {
                let mut had = 0;
                loop {
                    match select(first, self.ground.sleep(time)).await {
                        Either::Left((answer, _)) => break answer,
                        Either::Right(((), goes_on)) => first = goes_on,
                    }
                    let has = lock(&of_first).len();
                    if has > had {
                        had = has;
                        continue;
                    }
                    lock(&self.state).pace.note_hedge();
                    add(&self.counters.hedges, 1);
                    let second = Box::pin(self.receive(rest.clone(), &of_second, fetch));
                    break match select(first, second).await {
                        // A failure of one is no answer while the other may still bring one.
                        Either::Left((Err(Failure::Passing(_)), other)) => other.await,
                        Either::Right((Err(Failure::Passing(_)), other)) => other.await,
                        Either::Left((answer, _)) | Either::Right((answer, _)) => answer,
                    };
                }
            }
        };
        let (of_first, of_second) =
            (std::mem::take(&mut *lock(&of_first)), std::mem::take(&mut *lock(&of_second)));
        got.extend_from_slice(if of_first.len() < of_second.len() { &of_second } else { &of_first });
        if answer.is_ok() {
            let mut state = lock(&self.state);
            state.pace.note(self.ground.now().saturating_sub(begun));
            if state.width.on_answer() {
                self.offer_places(&state);
            }
        }
        answer
    }

    /// One request. What arrives is added to `got`: when it succeeds, all of the range.
    async fn receive(&self, range: Range<u64>, got: &Mutex<BytesMut>, fetch: &Fetch) -> Result<(), Failure> {
        add(&self.counters.requests, 1);
        let wanted = small(range.end - range.start);
        let mut parts = self.transport.fetch(range);
        let mut watch = Watch::begin(self.ground.now());
        loop {
            let next = watch.next(&mut parts, &*self.ground, fetch.heard.time(), self.timeout).await;
            let (part, is_progress) = match next {
                Ok(Some(part)) => part,
                Ok(None) => break,
                Err(Some(failure)) => return Err(failure),
                Err(None) => {
                    lock(&self.state).width.on_silence();
                    return Err(watch.said(self.ground.now()));
                }
            };
            add(&self.counters.fetched_bytes, part.len() as u64);
            let mut got = lock(got);
            if part.len() > wanted - got.len() {
                let why = format!("more than the {wanted} bytes came that were asked for");
                return Err(Failure::Passing(Error::new(ErrorKind::Io, why)));
            }
            got.extend_from_slice(&part);
            if is_progress {
                let now = self.ground.now();
                fetch.heard.note(now);
                self.heard.note(now);
            }
        }
        match lock(got).len() {
            len if len == wanted => Ok(()),
            len => {
                let why = format!("{len} bytes came instead of {wanted}");
                Err(Failure::Passing(Error::new(ErrorKind::Io, why)))
            }
        }
    }

    fn refuse_change<T>(&self) -> Result<T> {
        Err(Error::new(ErrorKind::ReadOnly, format!("{} is at a URL and cannot be written", self.name)))
    }
}

impl Storage for RemoteBase {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn limits(&self) -> &Limits {
        &self.0.limits
    }

    fn len(&self) -> u64 {
        self.0.len
    }

    fn proof(&self) -> Option<Proof> {
        self.0.proof.clone()
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(self.read_bytes(at, buffer))
    }

    fn write(&self, _at: ImageOffset, _data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(self.0.refuse_change()))
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn write_zeroes(&self, _span: ImageSpan, _how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(self.0.refuse_change()))
    }

    fn discard(&self, _span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(self.0.refuse_change()))
    }

    fn set_len(&self, _len: u64) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(self.0.refuse_change()))
    }

    fn preallocate(&self, _span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(self.0.refuse_change()))
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        let inside = span.intersect(ImageOffset::ZERO.span(self.0.len));
        let run = (!inside.is_empty()).then_some(StorageRun { span: inside, is_data: true });
        Box::pin(std::future::ready(Ok(run.into_iter().collect())))
    }
}

#[cfg(test)]
mod tests;
