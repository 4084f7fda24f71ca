//! What a request has for all of a unit takes the place of what only the fast medium has, whether or not that can be read.
//!
//! ```text
//!   data    fresh unit, checks ► gate: entry, bit cleared      as a unit that is copied back, from other bytes
//!   zeros   gate: entry 0, bit cleared                          no space is taken
//!                                                               a commit follows, then the request goes on
//! ```
//!
//! 1. Where a crash leaves the request unfinished, the unit has all that it had, or all that the request has. So the bytes of a
//!    lost unit are never others than those that a guest wrote after it was lost.
//! 2. The bit is cleared, durably, before the request is answered: if the medium gives the unit again some day, it does not count.
//! 3. A part of a unit takes the place of nothing. It fails where the rest cannot be read.

use vellum_core::{Buffer, GuestSpan, Result};

use super::geometry::Bits;
use super::image::Native;
use super::publish::WORD_COST;
use super::tier_state::{Copied, Leaving, State, Tier};

/// The entry, and the bit.
const WORDS: u64 = 2;

/// What a request has for the bytes of its span.
#[derive(Clone, Copy)]
pub(super) enum New<'a> {
    /// It changes nothing of the disk.
    Nothing,
    Data(&'a Buffer),
    Zeros,
}

/// Where the bytes of a unit come from that only the fast medium has.
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    Fast,
    /// So many bytes of a request, from this one on.
    Data {
        data: &'a Buffer,
        at: usize,
        len: usize,
    },
    Zeros,
}

impl<'a> New<'a> {
    /// The fast medium, unless the request has everything of what the disk has of the unit.
    pub(super) fn source(self, span: GuestSpan, unit: GuestSpan) -> Source<'a> {
        let len = |bytes: u64| usize::try_from(bytes).expect("within a request");
        match self {
            _ if span.intersect(unit) != unit => Source::Fast,
            New::Nothing => Source::Fast,
            New::Data(data) => {
                Source::Data { data, at: len(unit.start() - span.start()), len: len(unit.len()) }
            }
            New::Zeros => Source::Zeros,
        }
    }
}

impl Native {
    /// Makes a moved unit one of which the image stores nothing, in the open transaction. The caller has claimed it.
    pub(super) async fn enter_zeros(&self, tier: &Tier, unit: u64) -> Result<()> {
        let (entry, bit) = (self.places.entry(unit), self.places.fast_bit(unit).expect("it is copied"));
        self.find(|| self.entry(unit)).await?;
        self.find(|| self.home.get(bit)).await?;
        self.reserve(&[entry.word, bit.word]).await?;
        let gate = self.enter_changing(WORDS * WORD_COST, || vec![entry.word]).await?;
        tier.with(|state| {
            self.put_entry(entry, 0);
            self.leave_fast(tier, state, unit, bit);
        });
        drop(gate);
        self.engine.commits.note_change();
        Ok(())
    }

    /// Clears the bit of a unit whose entry does not lead to the fast medium any more. The caller holds the gate.
    pub(super) fn leave_fast(&self, tier: &Tier, state: &mut State, unit: u64, bit: Bits) {
        self.home.change(bit.word, |word| bit.set(word, 0));
        state.clearing.insert(unit);
        state.missing.remove(&unit);
        if let Some(Copied { slots, .. }) = state.copied.remove(&unit) {
            let stamp = tier.epochs.now();
            state.leaving.push(Leaving { unit, slots, stamp, is_durable: false });
        }
    }
}
