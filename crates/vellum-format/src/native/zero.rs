//! Zeros and discards.
//!
//! | the sub-block now | zeros | discard |
//! |---|---|---|
//! | base | mask: zero | the same |
//! | zero already | nothing | nothing |
//! | image, in place | zeros in place | passed on to the host |
//! | image, and the whole unit is released | bits of its blocks, entry 0 | the same |
//! | image, in no unit | nothing | nothing |
//!
//! Zeros over part of a sub-block of the base are written as data. A discard leaves such a part alone.

use vellum_core::{Buffer, Error, GuestOffset, GuestSpan, ImageOffset, Result, ZeroFlags, Zeroes};

use super::geometry::SUB_BLOCK;
use super::image::{Native, Origin, Sub, mask};
use super::publish::{RECORDING_COST, WORD_COST};
use super::write::{Done, LookAgain};
use crate::claims::Held;
use crate::engine::{Commit as _, Write as _};

/// What happens to the space of bytes that become zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Space {
    Keep,
    Free,
    /// The bytes are not needed any more. The host may do nothing.
    Discard,
}

impl Native {
    pub(super) async fn zero_span(&self, span: GuestSpan, flags: ZeroFlags) -> Result<()> {
        if flags.fast_only && !self.engine.geometry.fast_zeroes {
            return Err(Error::unsupported(format!("{} does not support fast zeroing", self.engine.name)));
        }
        let space = if flags.may_unmap { Space::Free } else { Space::Keep };
        self.each_cell(span, space).await
    }

    pub(super) async fn discard_span(&self, span: GuestSpan) -> Result<()> {
        // The disk may end inside the last sub-block, which counts as whole.
        let start = SUB_BLOCK.round_up(span.start().bytes());
        let is_last = span.end().bytes() == self.engine.geometry.size;
        let end = if is_last { span.end().bytes() } else { SUB_BLOCK.round_down(span.end().bytes()) };
        if start >= end {
            return Ok(());
        }
        let whole = GuestSpan::between(GuestOffset::new(start), GuestOffset::new(end));
        self.each_cell(whole, Space::Discard).await
    }

    async fn each_cell(&self, span: GuestSpan, space: Space) -> Result<()> {
        let mut rest = span;
        while !rest.is_empty() {
            // Where no bit and no entry can change, the host zeroes everything at once.
            if self.unit().is_none() && rest.start() >= self.base_end() {
                let done = self.zero_in_place(self.places.linear(rest.start()).span(rest.len()), space).await;
                self.engine.commits.note_change();
                return done;
            }
            let (part, mut later) = self.first_part(rest);
            let mut part = part;
            if !(self.is_whole_cell(part) && space != Space::Keep) {
                let (cut, is_embedded) = self.cut_at_embedded(part).await?;
                if cut.len() < part.len() {
                    later = GuestSpan::between(cut.end(), rest.end());
                    part = cut;
                }
                if is_embedded {
                    // A packed block is not zeroed in place, and letting go of a part of it would gain
                    // nothing.
                    if space != Space::Discard {
                        let zeros = Buffer::zeroed(usize::try_from(part.len()).expect("within a block"));
                        self.write_span(part, zeros).await?;
                    }
                    rest = later;
                    continue;
                }
            }
            let is_whole = self.is_whole_cell(part);
            let mut rounds = 0;
            let done = loop {
                if !is_whole {
                    if space == Space::Discard && self.find(|| self.holds_any(part)).await? {
                        break Done::Yes; // nothing would be gained by a copy
                    }
                    self.unshare(part).await?;
                }
                let given = self.units.as_ref().map_or(0, |units| units.given());
                // This starts over when space was missing. Parts that are zero already cost nothing then.
                let result = {
                    let _inside = self.engine.epochs.enter();
                    if !is_whole && self.find(|| self.holds_any(part)).await? {
                        continue; // a snapshot was made in between
                    }
                    let result = self.zero_part(part, space).await;
                    self.engine.commits.note_change();
                    result
                };
                match result {
                    Err(error) if error.kind() == vellum_core::ErrorKind::NoSpace => {
                        if !self.space_again(&mut rounds, given, 1).await? {
                            return Err(error);
                        }
                    }
                    result => break result?,
                }
            };
            if done == Done::After(LookAgain) {
                continue;
            }
            rest = later;
        }
        Ok(())
    }

    /// The part of a cell up to the block that holds its unit's entry, or within that block (then `true`), or
    /// behind it.
    async fn cut_at_embedded(&self, part: GuestSpan) -> Result<(GuestSpan, bool)> {
        let Some(unit) = self.unit().filter(|_| self.places.shape().zone().is_some()) else {
            return Ok((part, false));
        };
        let (_, form) = self.find(|| self.entry_and_form(unit.cluster_of(part.start()).index())).await?;
        let Some(block) = form.checked_sub(1) else { return Ok((part, false)) };
        let at = u64::from(block) * SUB_BLOCK.bytes();
        let within = unit.within(part.start());
        Ok(if within < at {
            (part.split_at(at - within).0, false)
        } else if within < at + SUB_BLOCK.bytes() {
            (part.split_at(at + SUB_BLOCK.bytes() - within).0, true)
        } else {
            (part, false)
        })
    }

    /// Whether the part is all that the disk has of a cell.
    fn is_whole_cell(&self, part: GuestSpan) -> bool {
        part.start() == self.cell.start_of(self.cell_of(part.start()))
            && (part.len() == self.cell.bytes() || part.end().bytes() == self.engine.geometry.size)
    }

    /// Zeros a part of one cell.
    async fn zero_part(&self, part: GuestSpan, space: Space) -> Result<Done> {
        let parts = self.parts(part).await?;
        if parts.iter().all(|part| matches!(part.from, Origin::NoUnit | Origin::Zero)) {
            return Ok(Done::Yes);
        }
        self.refuse_moved(part, &parts)?;
        // Partly covered sub-blocks of the base are written as data. What is left are whole sub-blocks, and
        // the image's bytes.
        let inner = self.write_edges(part).await?;
        if inner.is_empty() {
            return Ok(Done::Yes);
        }
        let held = self.engine.claims.claim(self.cell_of(inner.start()), self.parts_of(inner)).await;
        let result = self.zero_claimed(inner, space, &held).await;
        self.release_claim(held);
        result
    }

    /// Writes zeros over the edges of the part that lie in sub-blocks of the base, and returns the rest.
    async fn write_edges(&self, part: GuestSpan) -> Result<GuestSpan> {
        let (mut start, mut end) = (part.start(), part.end());
        let size = self.engine.geometry.size;
        let is_whole = |at: GuestOffset| SUB_BLOCK.aligns(at) || at.bytes() == size;
        if !is_whole(start) {
            let edge = start.span((SUB_BLOCK.bytes() - SUB_BLOCK.within(start)).min(part.len()));
            if self.find(|| self.first_state(edge)).await?.0 == Sub::Base {
                self.write_zeros(edge).await?;
                start = edge.end();
            }
        }
        if start < end && !is_whole(end) {
            let edge =
                GuestSpan::between(GuestOffset::new(SUB_BLOCK.round_down(end.bytes())).max(start), end);
            if self.find(|| self.first_state(edge)).await?.0 == Sub::Base {
                self.write_zeros(edge).await?;
                end = edge.start();
            }
        }
        Ok(GuestSpan::between(start, end))
    }

    async fn write_zeros(&self, span: GuestSpan) -> Result<()> {
        let mut zeros = Buffer::zeroed(usize::try_from(span.len()).expect("within a sub-block"));
        // The sub-block is still read from the base, so it does not hold its unit's entry.
        self.write_allocating(span, &mut zeros).await.map(drop)
    }

    async fn zero_claimed(&self, part: GuestSpan, space: Space, _held: &Held<'_>) -> Result<Done> {
        let (entry, form) = match self.unit() {
            None => (None, 0),
            Some(unit) => {
                let number = unit.cluster_of(part.start()).index();
                let (entry, form) = self.find(|| self.entry_and_form(number)).await?;
                (Some((number, entry)), form)
            }
        };
        let is_held = match entry {
            Some((number, _)) => self.find(|| self.is_held(number)).await?,
            None => false,
        };
        let lets_go = entry.filter(|(_, entry)| {
            self.is_whole_cell(part) && (*entry == 0 || space != Space::Keep || is_held)
        });
        if lets_go.is_none() && form != 0 && self.touches_block(part, form - 1) {
            return Ok(Done::After(LookAgain)); // it was allocated after it was looked up
        }
        let subs = self.find(|| self.base_subs(part)).await?;
        let place = match (entry, lets_go) {
            (_, Some(_)) | (Some((_, 0)), None) => None,
            (Some((_, entry)), None) => {
                let unit = self.unit().expect("it has an entry");
                Some(self.places.unit(entry).start() + unit.within(part.start()))
            }
            (None, _) => Some(self.places.linear(part.start())),
        };
        if let Some(place) = place {
            self.zero_image_parts(part, place, space).await?;
        }
        let frees = lets_go.filter(|(_, entry)| *entry != 0);
        if subs.is_empty() && frees.is_none() {
            return Ok(Done::Yes);
        }
        self.begin_journal().await?;
        self.take_filled_back(part);
        self.load_masks(&subs).await?;
        let mut words = self.words_of(&subs);
        words.extend(frees.map(|(number, _)| self.places.entry(number).word));
        self.reserve(&words).await?;
        // The unit's zone may also have a word to change, and a block packed there its mask.
        let cost = words.len() as u64 * WORD_COST + RECORDING_COST;
        let gate = self.enter_changing(cost, || words.clone()).await?;
        // The entry is changed first: once a bit says that the image has a block, no stale byte of the unit
        // may be visible.
        if let Some((number, _)) = frees {
            self.put_entry(self.places.entry(number), 0);
        }
        self.publish_zeros(part, &subs, lets_go.is_some());
        drop(gate);
        Ok(Done::Yes)
    }

    /// The sub-blocks of a run that are read from the base.
    fn base_subs(&self, part: GuestSpan) -> Result<Vec<u64>, super::home_pages::Missing> {
        let mut subs = Vec::new();
        let mut rest = part.intersect(GuestSpan::between(GuestOffset::ZERO, self.base_end()));
        while !rest.is_empty() {
            let (sub, len) = self.first_state(rest)?;
            let (now, later) = rest.split_at(len);
            if matches!(sub, Sub::Base | Sub::Broken) {
                subs.push(SUB_BLOCK.cluster_of(now.start()).index());
            }
            rest = later;
        }
        Ok(subs)
    }

    /// Zeroes in place the parts that the image has.
    async fn zero_image_parts(&self, part: GuestSpan, place: ImageOffset, space: Space) -> Result<()> {
        let mut rest = part;
        while !rest.is_empty() {
            let (mut sub, mut len) = self.find(|| self.first_state(rest)).await?;
            let (mut now, mut later) = rest.split_at(len);
            // Neighbours in the same state are zeroed together.
            while !later.is_empty() {
                let (next, next_len) = self.find(|| self.first_state(later)).await?;
                if next != sub {
                    break;
                }
                len += next_len;
                (now, later) = rest.split_at(len);
                sub = next;
            }
            if sub == Sub::Image {
                self.zero_in_place((place + (now.start() - part.start())).span(now.len()), space).await?;
            }
            rest = later;
        }
        Ok(())
    }

    pub(super) async fn zero_in_place(&self, span: vellum_core::ImageSpan, space: Space) -> Result<()> {
        self.begin_in_place().await?;
        if let Some(journal) = self.journal() {
            journal.make_way(span, async || self.commit().await).await?;
        }
        match space {
            Space::Keep => self.data.write_zeroes(span, Zeroes::Allocated).await,
            Space::Free => self.data.write_zeroes(span, Zeroes::MayUnmap).await,
            Space::Discard => self.data.discard(span).await,
        }
    }

    /// Turns sub-blocks of the base into zeros. When the unit is released, blocks that lie wholly in the part
    /// get their bit instead. The caller holds the gate, and everything is loaded.
    fn publish_zeros(&self, part: GuestSpan, subs: &[u64], lets_go: bool) {
        for sub in subs {
            let block = self.block_of_sub(*sub);
            let _one_at_a_time = self.lock_block(block);
            let span = self.places.block_span(block);
            if lets_go && part.intersect(span) == span {
                let bit = self.places.bit(block);
                self.home.change(bit.word, |word| bit.set(word, 1));
            } else {
                let bits = self.places.mask(*sub);
                self.home.change(bits.word, |word| bits.set(word, mask::ZERO));
            }
        }
    }
}
