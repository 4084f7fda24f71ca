//! `linear`: blocks of the base of which the image has a copy, before the bitmap says so.
//!
//! ```text
//!   a fill      all of the block claimed ► base: its bytes, zero: zeros, data: nothing ► filled, in memory
//!   a reader    filled? ► the image                           (bit, mask and base are not looked at)
//!   a writer    bit and masks, as if the block were not filled: its bytes are recorded like any
//!   zeros       filled is taken back under the claim ► mask
//!   the close   flush ► bits of the filled blocks ► commit
//! ```
//!
//! This is FVD's free copy-on-read (paper section 3.2): losing *filled* is harmless, because base and image have the
//! same bytes there. So a fill writes nothing but the bytes themselves, and the superblock is not marked for it.
//!
//! 1. While a block is filled, the image has in its place what the disk reads: where a mask says base or zero, a fill
//!    has put it there, and since then nobody has changed it; where a mask says data, it was there.
//! 2. Whoever makes a part of a block zero by its mask takes *filled* back first, with the part claimed. Otherwise the
//!    zeros would be hidden behind the filled bytes, and a close would hide them for ever.
//! 3. Writers do not look at *filled*: a sub-block that was not the image's gets its mask, with a check. So what they
//!    flush does not depend on a bit that a crash forgets.
//! 4. A bit is written only at a clean close, after a flush that began when all fills had ended. If it cannot be, the
//!    block is read from the base again.

use vellum_core::{Buffer, ErrorKind, Filled, GuestOffset, GuestSpan, LocalFuture, Result, try_join_all};

use super::geometry::SUB_BLOCK;
use super::home_pages::Missing;
use super::image::{Native, Sub};
use super::publish::WORD_COST;
use crate::claims::Held;
use crate::engine::Commit as _;
use crate::perturb;
use crate::state::UnderWay;

/// A word of the bitmap has this many bits.
const BITS_AT_ONCE: u64 = 64;

impl Native {
    /// As [`Native::first_state`], for a reader: what was filled is the image's.
    pub(super) fn first_state_shown(&self, span: GuestSpan) -> Result<(Sub, u64), Missing> {
        let block = self.places.shape().block;
        let start = span.start();
        if start < self.base_end() && self.filled.has(block.cluster_of(start).index()) {
            // The image has all of the block, and what lies behind the last mask in any case.
            return Ok((Sub::Image, span.len().min(block.bytes() - block.within(start))));
        }
        self.first_state(span)
    }

    /// Takes back *filled* from the blocks of a part that is about to become zero by its masks. The caller has
    /// claimed the part.
    pub(super) fn take_filled_back(&self, part: GuestSpan) {
        let block = self.places.shape().block;
        let blocks = block.cluster_of(part.start()).index()..block.count_for(part.end().bytes());
        if self.filled.take_back(blocks) {
            // The bytes of the base stay in their places.
            self.engine.claims.note_spoiled();
        }
        perturb::point();
    }

    /// Keeps a copy of whole blocks of the base.
    pub(super) async fn fill_linear(&self, span: GuestSpan, mut data: Buffer) -> Result<Filled> {
        let mut filled = Filled::default();
        for piece in self.places.shape().block.pieces_of(span) {
            let bytes = data.split_to(usize::try_from(piece.len()).expect("within the buffer"));
            filled.kept += self.fill_block(piece, bytes).await?;
        }
        Ok(filled)
    }

    /// Keeps a copy of one block. Returns how many bytes of it are no longer read from the base.
    async fn fill_block(&self, span: GuestSpan, data: Buffer) -> Result<u64> {
        let block = self.places.shape().block.cluster_of(span.start()).index();
        if self.filled.has(block) || self.find(|| self.home.get(self.places.bit(block))).await? == 1 {
            return Ok(0);
        }
        self.load_masks(&[self.subs_of(block).start]).await?;
        let _inside = self.engine.epochs.enter();
        let Some(held) = self.try_claim_all(span) else { return Ok(0) };
        // A copy that was dropped half way may land later, over bytes that were written since.
        let under_way = UnderWay::begin(&self.engine.state, "a copy of the base");
        let result = self.fill_claimed(block, span, data).await;
        under_way.end();
        if result.is_err() {
            held.iter().for_each(Held::spoil);
        }
        held.into_iter().for_each(|held| self.release_claim(held));
        result
    }

    fn try_claim_all(&self, span: GuestSpan) -> Option<Vec<Held<'_>>> {
        let mut all = Vec::new();
        for piece in self.cell.pieces_of(span) {
            match self.engine.claims.try_claim(self.cell_of(piece.start()), self.parts_of(piece)) {
                Some(held) => all.push(held),
                None => {
                    all.into_iter().for_each(|held| self.release_claim(held));
                    return None;
                }
            }
        }
        Some(all)
    }

    async fn fill_claimed(&self, block: u64, span: GuestSpan, mut data: Buffer) -> Result<u64> {
        let mut writes: Vec<(GuestOffset, Buffer)> = Vec::new();
        let mut kept = 0;
        for piece in SUB_BLOCK.pieces_of(span) {
            let bytes = data.split_to(usize::try_from(piece.len()).expect("within the buffer"));
            let bytes = match self.find(|| self.sub(SUB_BLOCK.cluster_of(piece.start()).index())).await? {
                Sub::Base => bytes,
                Sub::Zero => Buffer::zeroed(bytes.len()),
                Sub::Image => continue,
                Sub::Broken => return Ok(0),
            };
            kept += piece.len();
            match writes.last_mut() {
                Some((at, before)) if *at + before.len() as u64 == piece.start() => before.append(bytes),
                _ => writes.push((piece.start(), bytes)),
            }
        }
        let writes = writes.into_iter().map(|(at, bytes)| {
            let place = self.places.linear(at);
            let write = async move { self.data.write(place, self.stored(place, bytes).await?).await };
            Box::pin(write) as LocalFuture<'_, Result<()>>
        });
        try_join_all(writes.collect::<Vec<_>>()).await?;
        self.filled.add(block, self.places.shape().blocks());
        Ok(kept)
    }

    /// Writes the bits of the filled blocks. The image is being closed, and no request is inside.
    pub(super) async fn keep_filled(&self) -> Result<()> {
        if !self.filled.any() {
            return Ok(());
        }
        self.flush_storage().await?;
        match self.begin_journal().await {
            // Nothing is lost with the bits.
            Err(error) if error.kind() == ErrorKind::NoSpace => return Ok(()),
            begun => begun?,
        }
        let blocks = self.places.shape().blocks();
        for first in (0..blocks).step_by(usize::try_from(BITS_AT_ONCE).expect("small")) {
            let filled = self.filled.of_word(first);
            if filled == 0 {
                continue;
            }
            let bits = self.places.bit(first);
            self.find(|| self.home.get(bits)).await?;
            match self.reserve(&[bits.word]).await {
                // Nothing is lost with them.
                Err(error) if error.kind() == ErrorKind::NoSpace => continue,
                reserved => reserved?,
            }
            let _gate = self.enter_transaction(WORD_COST).await?;
            for block in (0..BITS_AT_ONCE).filter(|bit| filled >> bit & 1 == 1).map(|bit| first + bit) {
                let bit = self.places.bit(block);
                self.home.change(bit.word, |word| bit.set(word, 1));
            }
        }
        Ok(())
    }
}
