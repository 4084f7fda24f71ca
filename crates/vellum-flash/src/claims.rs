//! Which request changes which blocks of a disk, and what was changed while somebody looked.
//!
//! ```text
//!   claim  ├──────┤      a writer: others that want any of these blocks wait
//!   watch     ├─────────────┤      write-back, a read: holds up nobody; at the end it knows what was claimed
//!   touched   ├───┤
//!   join   ├──────┤      a writer under writethrough: others may join, and each of them knows it
//! ```
//!
//! 1. No block has two claims at a time.
//! 2. A watch knows each of its blocks that anybody had claimed at any time since it began: those that were
//!    claimed then already, and each claim since.
//! 3. What the holder of a watch decides at its end ([`Watch::end`]) happens before any later claim. So nobody
//!    plans a change by what is just being decided.
//!    The same holds for what the holder of a joined claim decides ([`Joined::end`]): whoever joins later sees it.
//! 4. A holder of a claim waits for nothing but transfers: never for slots, a commit, or another claim.
//!
//! 5. A joined claim and a claim of the same blocks wait for each other. Of two joined claims that overlap, both know it
//!    from then on. A holder of a joined claim may wait for a commit: nothing that a commit waits for joins.
//!
//! The number of claims and watches is that of the requests under way, so watches are looked through one by one.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use event_listener::Event;
use vellum_core::lock;

/// A watch lists at most this many runs; after that, only the first and the last block that was touched.
const TOUCHED_MAX: usize = 64;

/// All claims and watches of one disk.
#[derive(Default)]
pub(crate) struct Claims {
    table: Mutex<Table>,
    released: Event,
}

#[derive(Default)]
struct Table {
    /// First block of each claim, and the block after its last.
    held: BTreeMap<u64, u64>,
    watches: Vec<Watched>,
    joined: Vec<Shared>,
    /// How many watches and joined claims there have been.
    begun: u64,
}

struct Shared {
    number: u64,
    blocks: Range<u64>,
    contested: Touched,
}

struct Watched {
    number: u64,
    blocks: Range<u64>,
    touched: Touched,
    claims: u64,
}

/// Blocks that were claimed while they were watched.
#[derive(Debug, Default)]
pub(crate) struct Touched(Vec<Range<u64>>);

impl Touched {
    /// Whether this block was touched, or may have been.
    pub(crate) fn contains(&self, block: u64) -> bool {
        self.0.iter().any(|run| run.contains(&block))
    }

    /// The parts of the run that were not touched, in order.
    pub(crate) fn rest_of(&self, blocks: Range<u64>) -> Vec<Range<u64>> {
        let mut touched: Vec<_> = self.0.clone();
        touched.sort_unstable_by_key(|run| run.start);
        let (mut rest, mut at) = (Vec::new(), blocks.start);
        for run in touched {
            if run.start > at {
                rest.push(at..run.start.min(blocks.end));
            }
            at = at.max(run.end);
            if at >= blocks.end {
                return rest.into_iter().filter(|run| run.start < run.end).collect();
            }
        }
        rest.push(at..blocks.end);
        rest.into_iter().filter(|run| run.start < run.end).collect()
    }

    fn add(&mut self, run: Range<u64>) {
        if self.0.len() < TOUCHED_MAX {
            return self.0.push(run);
        }
        let all = self.0.iter().fold(run, |all, run| all.start.min(run.start)..all.end.max(run.end));
        self.0 = vec![all];
    }
}

impl Table {
    fn is_free(&self, blocks: &Range<u64>) -> bool {
        let before = self.held.range(..blocks.end).next_back();
        before.is_none_or(|(_, end)| *end <= blocks.start)
    }

    fn is_joined(&self, blocks: &Range<u64>) -> bool {
        self.joined.iter().any(|other| blocks.start < other.blocks.end && other.blocks.start < blocks.end)
    }

    fn hold(&mut self, blocks: &Range<u64>) {
        self.touch(blocks);
        self.held.insert(blocks.start, blocks.end);
    }

    fn join(&mut self, blocks: &Range<u64>) -> u64 {
        self.touch(blocks);
        let mut contested = Touched::default();
        for other in &mut self.joined {
            let both = blocks.start.max(other.blocks.start)..blocks.end.min(other.blocks.end);
            if both.start < both.end {
                other.contested.add(both.clone());
                contested.add(both);
            }
        }
        self.begun += 1;
        self.joined.push(Shared { number: self.begun, blocks: blocks.clone(), contested });
        self.begun
    }

    fn touch(&mut self, blocks: &Range<u64>) {
        for watch in &mut self.watches {
            let both = blocks.start.max(watch.blocks.start)..blocks.end.min(watch.blocks.end);
            if both.start < both.end {
                watch.touched.add(both);
                watch.claims += 1;
            }
        }
    }

    fn leave(&mut self, number: u64) -> Option<Shared> {
        let index = self.joined.iter().position(|shared| shared.number == number)?;
        Some(self.joined.swap_remove(index))
    }

    fn index_of(&self, number: u64) -> usize {
        let found = self.watches.iter().position(|watch| watch.number == number);
        found.expect("a watch is listed until it ends")
    }
}

impl Claims {
    /// Claims the blocks, of which there is at least one, when nobody else holds any of them.
    pub(crate) async fn claim(&self, blocks: Range<u64>) -> Held<'_> {
        loop {
            let listener = {
                let mut table = lock(&self.table);
                if table.is_free(&blocks) && !table.is_joined(&blocks) {
                    table.hold(&blocks);
                    return Held { claims: self, first: blocks.start };
                }
                self.released.listen()
            };
            listener.await;
        }
    }

    /// Claims the blocks, of which there is at least one, together with others that join.
    pub(crate) async fn join(&self, blocks: Range<u64>) -> Joined<'_> {
        loop {
            let listener = {
                let mut table = lock(&self.table);
                if table.is_free(&blocks) {
                    return Joined { claims: self, number: table.join(&blocks) };
                }
                self.released.listen()
            };
            listener.await;
        }
    }

    /// Watches the blocks from now on.
    pub(crate) fn watch(self: &Arc<Self>, blocks: Range<u64>) -> Watch {
        let mut table = lock(&self.table);
        let (mut touched, mut claims) = (Touched::default(), 0);
        for (start, end) in table.held.range(..blocks.end) {
            let both = blocks.start.max(*start)..blocks.end.min(*end);
            if both.start < both.end {
                touched.add(both);
                claims += 1;
            }
        }
        for other in &table.joined {
            let both = blocks.start.max(other.blocks.start)..blocks.end.min(other.blocks.end);
            if both.start < both.end {
                touched.add(both);
                claims += 1;
            }
        }
        table.begun += 1;
        let number = table.begun;
        table.watches.push(Watched { number, blocks, touched, claims });
        drop(table);
        Watch { claims: self.clone(), number }
    }
}

/// Blocks that the holder may change.
pub(crate) struct Held<'a> {
    claims: &'a Claims,
    first: u64,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let was_held = lock(&self.claims.table).held.remove(&self.first);
        debug_assert!(was_held.is_some());
        self.claims.released.notify(usize::MAX);
    }
}

/// Blocks that the holder changes, perhaps at the same time as others.
pub(crate) struct Joined<'a> {
    claims: &'a Claims,
    number: u64,
}

impl Joined<'_> {
    /// Ends it. What `decide` does, who is told which blocks others had joined too, happens before any later claim.
    pub(crate) fn end<T>(self, decide: impl FnOnce(&Touched) -> T) -> T {
        let mut table = lock(&self.claims.table);
        let own = table.leave(self.number).expect("a joined claim is listed until it ends");
        decide(&own.contested)
    }
}

impl Drop for Joined<'_> {
    fn drop(&mut self) {
        lock(&self.claims.table).leave(self.number);
        self.claims.released.notify(usize::MAX);
    }
}

/// Blocks that somebody looks at.
pub(crate) struct Watch {
    claims: Arc<Claims>,
    number: u64,
}

impl Watch {
    /// Whether this block was touched so far.
    pub(crate) fn is_touched(&self, block: u64) -> bool {
        let table = lock(&self.claims.table);
        table.watches[table.index_of(self.number)].touched.contains(block)
    }

    /// How many claims of its blocks there were so far.
    pub(crate) fn claims(&self) -> u64 {
        let table = lock(&self.claims.table);
        table.watches[table.index_of(self.number)].claims
    }

    /// What `decide` does happens before any later claim (rule 3).
    pub(crate) fn decide<T>(&self, decide: impl FnOnce(&Touched) -> T) -> T {
        let table = lock(&self.claims.table);
        decide(&table.watches[table.index_of(self.number)].touched)
    }

    /// Ends the watch. What `decide` does happens before any later claim (rule 3).
    pub(crate) fn end<T>(self, decide: impl FnOnce(&Touched) -> T) -> T {
        self.decide(decide)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut table = lock(&self.claims.table);
        let index = table.index_of(self.number);
        table.watches.swap_remove(index);
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::{block_on, poll_once};

    use super::*;

    #[test]
    fn overlapping_claims_wait_and_others_do_not() {
        let claims = Arc::new(Claims::default());
        block_on(async {
            let first = claims.claim(10..20).await;
            let beside = claims.claim(20..21).await;
            let before = claims.claim(0..10).await;
            for overlapping in [19..30, 5..11, 10..11, 0..100, 15..16, 20..21] {
                let mut waiting = Box::pin(claims.claim(overlapping.clone()));
                assert!(poll_once(&mut waiting).await.is_none(), "{overlapping:?}");
            }
            let mut waiting = Box::pin(claims.claim(19..20));
            assert!(poll_once(&mut waiting).await.is_none());
            drop(beside);
            assert!(poll_once(&mut waiting).await.is_none());
            drop(first);
            drop(waiting.await);
            drop(before);
            drop(claims.claim(0..100).await);
        });
    }

    #[test]
    fn a_watch_knows_what_was_claimed_before_it_and_since() {
        let claims = Arc::new(Claims::default());
        block_on(async {
            let before = claims.claim(0..4).await;
            let watch = claims.watch(2..50);
            drop(before);
            drop(claims.claim(10..12).await);
            drop(claims.claim(49..60).await);
            drop(claims.claim(50..51).await);
            assert!(watch.is_touched(3) && watch.is_touched(11) && !watch.is_touched(12));
            watch.end(|touched| {
                let of: Vec<u64> = (0..60).filter(|block| touched.contains(*block)).collect();
                assert_eq!(of, [2, 3, 10, 11, 49]);
                let rest = |run: Range<u64>| -> Vec<(u64, u64)> {
                    touched.rest_of(run).into_iter().map(|run| (run.start, run.end)).collect()
                };
                assert_eq!(rest(0..60), [(0, 2), (4, 10), (12, 49), (50, 60)]);
                assert_eq!(rest(10..12), []);
                assert_eq!(rest(3..11), [(4, 10)]);
            });
            claims.watch(0..100).end(|touched| assert!(!(0..100).any(|block| touched.contains(block))));
        });
    }

    #[test]
    fn those_who_join_know_each_other_and_exclude_claims() {
        let claims = Arc::new(Claims::default());
        block_on(async {
            let first = claims.join(0..10).await;
            let watch = claims.watch(0..100);
            let second = claims.join(8..20).await;
            let mut waiting = Box::pin(claims.claim(19..30));
            assert!(poll_once(&mut waiting).await.is_none());
            let of = |touched: &Touched| (0..30).filter(|n| touched.contains(*n)).collect::<Vec<u64>>();
            assert_eq!(first.end(of), [8, 9]);
            let third = claims.join(9..10).await;
            assert_eq!(third.end(of), [9], "the second is still there");
            assert!(poll_once(&mut waiting).await.is_none());
            assert_eq!(second.end(of), [8, 9]);
            drop(waiting.await);
            assert!(claims.join(19..30).await.end(of).is_empty());
            assert_eq!(watch.end(of), (0..30).collect::<Vec<u64>>());
            let claim = claims.claim(0..2).await;
            let mut waiting = Box::pin(claims.join(1..3));
            assert!(poll_once(&mut waiting).await.is_none());
            drop(claim);
            drop(waiting.await);
            drop(claims.claim(0..9).await);
        });
    }

    #[test]
    fn a_watch_that_lists_too_much_says_more_than_was_touched_never_less() {
        let claims = Arc::new(Claims::default());
        let watch = claims.watch(0..10_000);
        block_on(async {
            for n in 0..500 {
                drop(claims.claim(n * 7..n * 7 + 1).await);
            }
        });
        watch.end(|touched| {
            assert!((0..500).all(|n| touched.contains(n * 7)));
            assert!(!touched.contains(5000));
        });
    }
}
