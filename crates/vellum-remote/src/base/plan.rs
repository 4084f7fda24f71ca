//! The decisions of the fetch engine, as pure functions of what is known: what to fetch, how far to read ahead, when to
//! try again, when to ask a second time. Time and chance are arguments.

use std::ops::Range;
use std::time::Duration;

/// Bytes of a block: what is fetched at least.
pub const FETCH_BLOCK: u64 = 64 << 10;

/// Streams of sequential reads that are followed at once.
const STREAMS_MAX: usize = 8;

/// Reads ahead begin with this many blocks.
const AHEAD_FIRST: u64 = 2;

/// So many blocks may be ahead, or have been in vain, before anything was asked for; and one more for each
/// [`EARNED_WITH`] that were.
const UNUSED_FIRST: u64 = 16;
const EARNED_WITH: u64 = 16;

/// The first pause before a request is tried again. It doubles, up to [`PAUSE_MAX`].
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// The pause before try `tries` + 1: random between half of the backoff and all of it.
pub(crate) fn pause(tries: u32, chance: u64) -> Duration {
    let full = PAUSE_FIRST.saturating_mul(1 << tries.min(16)).min(PAUSE_MAX);
    let half = full / 2;
    half + half.mul_f64((chance % 1024) as f64 / 1024.0)
}

/// What to do after a request has failed in a way that may pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterFailure {
    Pause(Duration),
    GiveUp,
}

/// `now` and `deadline` on the same clock. A pause that would end at the deadline or later is cut, so that there is one last
/// try, and after the deadline there is none.
pub(crate) fn after_failure(tries: u32, chance: u64, now: Duration, deadline: Duration) -> AfterFailure {
    if now >= deadline {
        return AfterFailure::GiveUp;
    }
    AfterFailure::Pause(pause(tries, chance).min(deadline - now))
}

/// The missing blocks as few runs, none longer than `run_max` blocks.
pub(super) fn runs(missing: &[u64], run_max: u64) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for block in missing {
        match runs.last_mut() {
            Some(run) if run.end == *block && run.end - run.start < run_max => run.end += 1,
            _ => runs.push(*block..*block + 1),
        }
    }
    runs
}

/// How long requests take, as far as it is remembered.
#[derive(Debug, Default)]
pub(super) struct Pace {
    recent: Vec<Duration>,
    next: usize,
    requests: u64,
    hedges: u64,
}

impl Pace {
    const REMEMBERED: usize = 64;
    /// Before this many requests nothing is known.
    const KNOWN_FROM: usize = 16;
    /// Second requests are at most one of this many.
    const HEDGE_SHARE: u64 = 20;
    const HEDGE_AFTER_MIN: Duration = Duration::from_millis(20);

    pub(super) fn note(&mut self, took: Duration) {
        self.requests += 1;
        match self.recent.len() {
            Self::REMEMBERED => self.recent[self.next] = took,
            _ => self.recent.push(took),
        }
        self.next = (self.next + 1) % Self::REMEMBERED;
    }

    /// After how long a second request may be made; `None` while too little is known, or too many were made.
    pub(super) fn hedge_after(&self) -> Option<Duration> {
        if self.recent.len() < Self::KNOWN_FROM || self.hedges * Self::HEDGE_SHARE >= self.requests {
            return None;
        }
        let mut sorted = self.recent.clone();
        sorted.sort_unstable();
        let high = sorted[(sorted.len() * 95).div_ceil(100) - 1];
        Some((high * 2).max(Self::HEDGE_AFTER_MIN))
    }

    pub(super) fn note_hedge(&mut self) {
        self.hedges += 1;
    }
}

/// How much is asked for at once. Each silence of the server halves it, down to an eighth; each eighth answer after that
/// doubles it again. What a slow link has to bring for one request is then less, and so is what is lost.
#[derive(Debug, Default)]
pub(super) struct Width {
    halvings: u32,
    answers: u32,
}

impl Width {
    const HALVINGS_MAX: u32 = 3;
    const ANSWERS: u32 = 8;

    /// What is left of the most that may be asked for.
    pub(super) fn of(&self, most: u64) -> u64 {
        (most >> self.halvings).max(1)
    }

    pub(super) fn on_silence(&mut self) {
        self.halvings = (self.halvings + 1).min(Self::HALVINGS_MAX);
        self.answers = 0;
    }

    /// True when there is more room now.
    pub(super) fn on_answer(&mut self) -> bool {
        self.answers += 1;
        let has_grown = self.halvings > 0 && self.answers >= Self::ANSWERS;
        if has_grown {
            self.halvings -= 1;
            self.answers = 0;
        }
        has_grown
    }
}

#[derive(Debug, Clone, Copy)]
struct Stream {
    /// The block behind the last one that was read.
    next: u64,
    /// The block behind the last one that was asked for.
    ahead: u64,
    window: u64,
    used: u64,
}

/// What is read ahead. Reads that go on where an earlier one ended make a stream; its window doubles while it goes on.
///
/// What was read ahead and has not been asked for is *unused*: it may be asked for soon, or never. The number of
/// such blocks is bounded: [`UNUSED_FIRST`], and a sixteenth of those that were fetched because a read wanted them. Blocks that streams left
/// behind when they ended stay unused, so that what is fetched in vain has the same bound whether it is still in memory or
/// was dropped.
#[derive(Debug, Default)]
pub(super) struct ReadAhead {
    streams: Vec<Stream>,
    clock: u64,
    /// Fetched, and wanted by a read.
    wanted: u64,
    unused: u64,
}

impl ReadAhead {
    /// A read of these blocks came: the blocks to fetch ahead, at most `window_max` of them.
    pub(super) fn on_read(&mut self, read: &Range<u64>, end: u64, window_max: u64) -> Range<u64> {
        self.clock += 1;
        let clock = self.clock;
        // The last block of the read before may be read again, because reads are not aligned to blocks.
        let follows = |stream: &&mut Stream| read.start == stream.next || read.start + 1 == stream.next;
        let Some(stream) = self.streams.iter_mut().find(follows) else {
            if self.streams.len() == STREAMS_MAX {
                let oldest = (0..STREAMS_MAX).min_by_key(|index| self.streams[*index].used).expect("some");
                self.streams.swap_remove(oldest);
            }
            self.streams.push(Stream { next: read.end, ahead: read.end, window: 0, used: clock });
            return 0..0;
        };
        let has_advanced = read.end > stream.next;
        stream.next = stream.next.max(read.end);
        stream.used = clock;
        if !has_advanced {
            return 0..0;
        }
        let ahead = stream.ahead.max(stream.next);
        if ahead - stream.next > stream.window / 2 {
            return 0..0;
        }
        let room = (UNUSED_FIRST + self.wanted / EARNED_WITH).saturating_sub(self.unused);
        let window = (stream.window * 2).clamp(AHEAD_FIRST, window_max);
        let until = (stream.next + window).min(end).min(ahead + room);
        // No more than it got: the next request is made when half of that is used, and not one for each block.
        stream.window = until.saturating_sub(stream.next);
        if until <= ahead {
            return 0..0;
        }
        stream.ahead = until;
        ahead..until
    }

    /// So many blocks are fetched because a read wants them.
    pub(super) fn on_wanted(&mut self, blocks: u64) {
        self.wanted += blocks;
    }

    /// So many are fetched ahead.
    pub(super) fn on_ahead(&mut self, blocks: u64) {
        self.unused += blocks;
    }

    /// A block that was fetched ahead is wanted by a read.
    pub(super) fn on_used(&mut self) {
        self.unused = self.unused.saturating_sub(1);
        self.wanted += 1;
    }

    /// So many blocks ahead did not come.
    pub(super) fn on_failed(&mut self, blocks: u64) {
        self.unused = self.unused.saturating_sub(blocks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_and_end_at_the_deadline() {
        for (tries, least, most) in [(0, 25, 50), (1, 50, 100), (4, 400, 800), (30, 2500, 5000)] {
            for chance in [0, 511, 1023, u64::MAX] {
                let is = pause(tries, chance).as_millis();
                assert!((least..=most).contains(&is), "{tries} {chance}: {is}");
            }
        }
        let ms = Duration::from_millis;
        for (now, deadline, then) in [
            (0, 60_000, AfterFailure::Pause(ms(25))),
            (59_990, 60_000, AfterFailure::Pause(ms(10))),
            (60_000, 60_000, AfterFailure::GiveUp),
            (70_000, 60_000, AfterFailure::GiveUp),
        ] {
            assert_eq!(after_failure(0, 0, ms(now), ms(deadline)), then, "{now}");
        }
    }

    #[test]
    fn silence_halves_what_is_asked_for_and_answers_double_it() {
        let mut width = Width::default();
        assert_eq!((width.of(16), width.of(1)), (16, 1));
        for left in [8, 4, 2, 2] {
            width.on_silence();
            assert_eq!((width.of(16), width.of(1)), (left, 1));
        }
        let grown: Vec<u64> = (1..=30).filter(|_| width.on_answer()).collect();
        assert_eq!((grown, width.of(16)), (vec![8, 16, 24], 16));
    }

    #[test]
    #[allow(clippy::single_range_in_vec_init, reason = "runs of one block are meant")]
    fn neighbours_are_fetched_together() {
        for (missing, expected) in [
            (&[][..], &[][..]),
            (&[3], &[3..4]),
            (&[3, 4, 5], &[3..6]),
            (&[3, 5, 6], &[3..4, 5..7]),
            (&[0, 1, 2, 3, 4, 5], &[0..4, 4..6]),
        ] {
            assert_eq!(runs(missing, 4), expected, "{missing:?}");
        }
    }

    #[test]
    fn a_second_request_is_rare_and_late() {
        let ms = Duration::from_millis;
        let mut pace = Pace::default();
        for _ in 0..15 {
            pace.note(ms(30));
            assert_eq!(pace.hedge_after(), None, "too little is known");
        }
        (0..49).for_each(|_| pace.note(ms(30)));
        assert_eq!(pace.hedge_after(), Some(ms(60)));
        // 64 requests, of which at most a twentieth may be made twice.
        let mut hedges = 0;
        while pace.hedge_after().is_some() {
            pace.note_hedge();
            hedges += 1;
        }
        assert_eq!(hedges, 4);
        (0..64).for_each(|_| pace.note(ms(1)));
        assert_eq!(pace.hedge_after(), Some(ms(20)));
    }

    /// What is fetched ahead of each of these reads.
    fn ahead(reads: &[Range<u64>]) -> Vec<Range<u64>> {
        let mut state = ReadAhead::default();
        reads.iter().map(|read| state.on_read(read, 1000, 16)).collect()
    }

    #[test]
    fn reading_ahead_begins_with_the_second_read_of_a_stream_and_grows() {
        assert_eq!(ahead(&[0..1, 1..2, 2..3, 3..4, 4..5]), [0..0, 2..4, 4..7, 0..0, 7..13]);
        assert_eq!(ahead(&[0..1, 500..501, 7..8, 900..901]), [0..0, 0..0, 0..0, 0..0], "random reads");
        assert_eq!(ahead(&[5..6, 5..6, 5..6]), [0..0, 0..0, 0..0], "the same block again");
        assert_eq!(ahead(&[0..1, 700..701, 1..2, 701..702]), [0..0, 0..0, 2..4, 702..704], "two streams");
        assert_eq!(ahead(&[997..998, 998..999, 999..1000]), [0..0, 999..1000, 0..0], "the end");
    }

    #[test]
    fn what_is_unused_bounds_what_is_read_ahead_until_more_is_earned() {
        let mut state = ReadAhead::default();
        // Streams that end after their second block, each with two blocks ahead.
        let mut begun = 0;
        for stream in 0..100 {
            let at = stream * 100;
            state.on_read(&(at..at + 1), 20_000, 16);
            let ahead = state.on_read(&(at + 1..at + 2), 20_000, 16);
            state.on_ahead(ahead.end - ahead.start);
            begun += ahead.end - ahead.start;
        }
        assert_eq!(begun, UNUSED_FIRST, "all of them in vain");
        state.on_wanted(2 * EARNED_WITH - 1);
        state.on_read(&(15_000..15_001), 20_000, 16);
        assert_eq!(state.on_read(&(15_001..15_002), 20_000, 16), 15_002..15_003, "one is earned");
        state.on_ahead(1);
        state.on_used();
        assert_eq!(
            state.on_read(&(15_002..15_003), 20_000, 16),
            15_003..15_005,
            "and another, and one was used"
        );
        state.on_ahead(2);
        assert_eq!(state.on_read(&(15_003..15_006), 20_000, 16), 0..0);
        state.on_failed(2);
        state.on_read(&(16_000..16_001), 20_000, 16);
        assert_eq!(
            state.on_read(&(16_001..16_002), 20_000, 16),
            16_002..16_004,
            "what did not come is not in vain"
        );
    }

    #[test]
    fn a_stream_whose_blocks_are_used_is_read_ahead_to_the_full_window() {
        let mut state = ReadAhead::default();
        let (mut ahead, mut requests, mut most) = (0, 0, 0);
        for at in 0..2000 {
            match at < ahead {
                true => state.on_used(),
                false => state.on_wanted(1),
            }
            let now = state.on_read(&(at..at + 1), 10_000, 64);
            if !now.is_empty() {
                state.on_ahead(now.end - now.start);
                requests += 1;
                ahead = now.end;
            }
            most = most.max(ahead.saturating_sub(at + 1));
        }
        assert_eq!(most, 64);
        assert!(requests < 200, "{requests}");
    }
}
