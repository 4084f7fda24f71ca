//! Units that hold their own entry: how one is allocated, read, and turned into a plain unit.
//!
//! ```text
//!   first write, a block of it can be packed, and is all of it that becomes the image's (`pack_over_base.rs`)
//!         claim the whole unit ► a unit of an open zone ► data, one block packed with the entry: one write
//!   read                       ► the block is read and unpacked
//!   the block is overwritten   ► gate: entry without form, the block's bytes in the journal, the zone's bit
//! ```
//!
//! 1. A write that allocates such a unit claims all of it. No other write touches the unit before it is
//!    published.
//! 2. The block is never overwritten in place: a torn write would lose the entry together with the data. Its
//!    new bytes go through the journal, together with the table's new entry. So the paper's relocation of a
//!    cluster whose lead block no longer compresses needs neither a read nor another place.
//! 3. A reader of the block gets the image's bytes, not newer ones of the journal, which are checkpointed
//!    only after the entry has changed. So a block that cannot be unpacked while the table still calls it
//!    packed is damaged.
//! 4. An embedded allocation that fails is invalidated, by a bit in the open transaction. Otherwise two
//!    blocks could name one unit of the disk.

use vellum_core::{
    Buffer, Context, Error, ErrorKind, GuestCluster, GuestOffset, GuestSpan, ImageOffset, LocalFuture, Result,
};

use super::embed::{BLOCK_LEN, BLOCKS_MAX, Identity, Packed, unpack};
use super::geometry::{SUB_BLOCK, TAG_WORD};
use super::image::{Native, Origin};
use super::publish::{EmbeddedAlloc, RECORDING_COST, Step, WORD_COST};
use super::read::Part;
use crate::engine::Commit as _;

/// At most this many blocks of a write are tried.
const TRIED_MAX: usize = 3;

impl Native {
    /// Whether the first write of this part may embed the entry, as far as is known before the claim.
    pub(super) fn could_embed(&self, cell: GuestCluster) -> bool {
        // A missing page is not loaded for this. The unit is then a plain one.
        self.may_embed()
            && self.entry(cell.index()).is_ok_and(|entry| entry == 0)
            && self.may_change_unrecorded(self.places.entry(cell.index()).word)
    }

    /// The unit and the packed block for a step that embeds its entry, or `None`. The step's bytes begin at
    /// `within` in `data`.
    pub(super) async fn embed(
        &self,
        step: &Step<'_>,
        data: &Buffer,
        within: usize,
    ) -> Result<Option<EmbeddedAlloc>> {
        if step.held().mask() != u32::MAX || !self.may_embed() {
            return Ok(None);
        }
        let guest_unit = self.cell_of(step.plan.part.start()).index();
        if self.is_over_base(guest_unit) {
            if !self.may_pack_over_base(guest_unit) {
                return Ok(None);
            }
            self.load_masks(&step.plan.subs).await?;
        }
        if !self.words_embedded(step).into_iter().all(|word| self.may_change_unrecorded(word)) {
            return Ok(None);
        }
        let packed = match step.plan.subs[..] {
            [] => self.pack_some(step.plan.part, data, within),
            [sub] => self.pack_sub(step, sub, data, within).await?,
            _ => None, // what is not in the packed block could be lost where that is not
        };
        let Some((block, packed)) = packed else { return Ok(None) };
        let Some(given) = self.take_open_unit() else { return Ok(None) };
        let identity = Identity {
            tag: given.tag,
            guest_unit: u32::try_from(guest_unit).expect("at most 2^26"),
            image_unit: given.unit,
            block,
        };
        Ok(Some(EmbeddedAlloc { given, block, bytes: packed.block(identity) }))
    }

    /// The words of home that a recovery changes when it finds the packed block of a step, or the program when it
    /// records it.
    fn words_embedded(&self, step: &Step<'_>) -> Vec<ImageOffset> {
        let mut words = self.words_of(&step.plan.subs);
        words.push(self.places.entry(self.cell_of(step.plan.part.start()).index()).word);
        words
    }

    /// This sub-block of the base, if it can be packed. Where the part covers only some of it, it is filled up from the
    /// base.
    async fn pack_sub(
        &self,
        step: &Step<'_>,
        sub: u64,
        data: &Buffer,
        within: usize,
    ) -> Result<Option<(u8, Packed)>> {
        let part = step.plan.part;
        let start = SUB_BLOCK.start_of(GuestCluster::new(sub));
        let block = self.cell.within(start) / SUB_BLOCK.bytes();
        if block >= BLOCKS_MAX {
            return Ok(None);
        }
        let index = |bytes: u64| usize::try_from(bytes).expect("within a unit");
        let mut plain = vec![0; BLOCK_LEN];
        let here = part.intersect(start.span(SUB_BLOCK.bytes()));
        let written = index(here.start() - start)..index(here.end() - start);
        data.copy_to(within + index(here.start() - part.start()), &mut plain[written]);
        let (head, tail) = self.fill_of(step);
        for rest in [head, tail].into_iter().filter(|rest| !rest.is_empty()) {
            let from_below = self.fill(rest).await?.to_vec();
            plain[index(rest.start() - start)..][..from_below.len()].copy_from_slice(&from_below);
        }
        Ok(Packed::of(&plain).map(|packed| (u8::try_from(block).expect("at most 30"), packed)))
    }

    /// A block of the part that can be packed. A block that the part covers only partly is filled up with
    /// zeros.
    fn pack_some(&self, part: GuestSpan, data: &Buffer, within: usize) -> Option<(u8, Packed)> {
        let start = self.cell.within(part.start());
        let end = start + part.len();
        let whole = SUB_BLOCK.count_for(start)..(end / SUB_BLOCK.bytes()).min(BLOCKS_MAX);
        let blocks =
            if whole.is_empty() { start / SUB_BLOCK.bytes()..start / SUB_BLOCK.bytes() + 1 } else { whole };
        let step = ((blocks.end - blocks.start) / TRIED_MAX as u64).max(1);
        for block in blocks.step_by(usize::try_from(step).expect("small")).take(TRIED_MAX) {
            if block >= BLOCKS_MAX {
                return None;
            }
            let at = block * SUB_BLOCK.bytes();
            let (from, to) = (at.max(start), (at + SUB_BLOCK.bytes()).min(end));
            let mut plain = vec![0; BLOCK_LEN];
            let index = |bytes: u64| usize::try_from(bytes).expect("within a unit");
            data.copy_to(within + index(from - start), &mut plain[index(from - at)..index(to - at)]);
            if let Some(packed) = Packed::of(&plain) {
                return Some((u8::try_from(block).expect("at most 30"), packed));
            }
        }
        None
    }

    /// The step's bytes with the packed block in its place, and where in the unit they begin.
    pub(super) fn with_block(
        &self,
        step: &Step<'_>,
        embedded: &EmbeddedAlloc,
        mut piece: Buffer,
    ) -> (u64, Buffer) {
        let start = self.cell.within(step.plan.part.start());
        let at = u64::from(embedded.block) * SUB_BLOCK.bytes();
        let index = |bytes: u64| usize::try_from(bytes).expect("within a unit");
        let head = piece.split_to(index(at.saturating_sub(start)));
        let end = (at + SUB_BLOCK.bytes()).min(step.plan.part.len() + start);
        drop(piece.split_to(index(end - at.max(start))));
        let mut bytes = head;
        bytes.append(Buffer::copy_of(&embedded.bytes));
        bytes.append(piece);
        (start.min(at), bytes)
    }

    /// Makes a unit that holds its own entry part of the disk.
    pub(super) async fn publish_embedded(&self, step: &Step<'_>, embedded: &EmbeddedAlloc) -> Result<()> {
        let number = self.cell_of(step.plan.part.start()).index();
        let bits = self.places.entry(number);
        let entry = u64::from(self.places.make_entry(embedded.given.unit, u32::from(embedded.block) + 1));
        let words = self.words_embedded(step);
        self.reserve(&words).await?;
        {
            let _gate = self.journal().expect("begun before").shared();
            self.engine.state.check_stopped()?;
            if self.may_embed() && words.iter().all(|word| self.may_change_unrecorded(*word)) {
                self.home.change_unrecorded(bits.word, |word| bits.set(word, entry));
                self.note_embedded(embedded.given.unit, number);
                if let (Some(zones), true) = (&self.zones, self.is_over_base(number)) {
                    zones.over_base.note(number, step.plan.subs.first().copied());
                }
                return Ok(());
            }
        }
        // A snapshot is being made, so the table must have the entry.
        let _gate = self.enter_changing(RECORDING_COST, || words.clone()).await?;
        self.home.change(bits.word, |word| bits.set(word, entry));
        self.publish_subs(&step.plan.subs);
        self.note_not_embedded(embedded.given.unit);
        Ok(())
    }

    /// Makes sure that an embedded allocation that failed never counts. The unit may hold anything by now,
    /// even its entry.
    pub(super) async fn invalidate_embedded(&self, unit: u32) {
        // If this fails, the image has stopped.
        if let Ok(_gate) = self.enter_transaction(WORD_COST).await {
            self.note_not_embedded(unit);
            self.free(unit);
        }
    }

    /// The bytes of the block that holds its unit's entry.
    pub(super) async fn unpack(&self, guest_unit: u64, at: ImageOffset) -> Result<Vec<u8>> {
        let bytes = self.under.read(at, Buffer::for_overwrite(BLOCK_LEN)).await?;
        unpack(bytes.contiguous().slice(), self.identity(guest_unit, at).await?)
    }

    /// The identity that the packed block at this place must have.
    async fn identity(&self, guest_unit: u64, at: ImageOffset) -> Result<Identity> {
        let image_unit = self.number_of(at);
        let Some((zone, _)) = self.places.zone_of(image_unit) else {
            return Err(Error::corrupt(
                "a unit outside every zone cannot hold its entry: run `vellum check`",
            ));
        };
        let tag = self.find(|| self.home.word(self.places.zone_word(zone, TAG_WORD))).await?;
        let within = at - self.places.unit(image_unit).start();
        Ok(Identity {
            tag,
            guest_unit: u32::try_from(guest_unit).expect("at most 2^26"),
            image_unit,
            block: u8::try_from(within / SUB_BLOCK.bytes()).expect("at most 30"),
        })
    }

    /// Reads parts that are contiguous in the image and include packed blocks. The caller is inside an epoch.
    pub(super) async fn read_joined(
        &self,
        at: GuestOffset,
        parts: &[Part],
        mut buffer: Buffer,
    ) -> Result<Buffer> {
        if buffer.is_lent() {
            // A guest that lent its buffer must not see packed blocks, which contain their zone's tag, nor
            // change them before they are unpacked.
            let own = Buffer::for_overwrite(buffer.len());
            let filled = self.read_joined_here(at, parts, own).await?;
            buffer.copy_from(0, filled.contiguous().slice());
            return Ok(buffer);
        }
        self.read_joined_here(at, parts, buffer).await
    }

    async fn read_joined_here(&self, at: GuestOffset, parts: &[Part], buffer: Buffer) -> Result<Buffer> {
        let (Origin::Host(start) | Origin::Embedded(start)) = parts[0].from else {
            unreachable!("it lies in the image")
        };
        let mut filled = self.plain()?.read(start, buffer).await?;
        let mut within = 0;
        for part in parts {
            let here = usize::try_from(within).expect("within the buffer");
            if let Origin::Embedded(block) = part.from {
                let mut bytes = vec![0; BLOCK_LEN];
                filled.copy_to(here, &mut bytes);
                let identity = self.identity(self.cell_of(at + within).index(), block).await?;
                let plain = match unpack(&bytes, identity) {
                    Ok(plain) => plain,
                    // The journal may have newer bytes.
                    Err(_) => {
                        self.read_embedded(at + within, block, Buffer::zeroed(BLOCK_LEN)).await?.to_vec()
                    }
                };
                filled.copy_from(here, &plain);
            }
            within += part.len;
        }
        Ok(filled)
    }

    /// Reads from a block that holds its unit's entry. The caller is inside an epoch.
    pub(super) async fn read_embedded(
        &self,
        at: GuestOffset,
        block: ImageOffset,
        mut buffer: Buffer,
    ) -> Result<Buffer> {
        let number = self.cell_of(at).index();
        match self.unpack(number, block).await {
            Ok(plain) => {
                let from = usize::try_from(SUB_BLOCK.within(at)).expect("within a block");
                let len = buffer.len();
                buffer.copy_from(0, &plain[from..from + len]);
                Ok(buffer)
            }
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                let (now, _) = self.find(|| self.place(at)).await?;
                if now == Origin::Embedded(block) {
                    return Err(error.context(format!(
                        "{}: the disk at {:#x}",
                        self.engine.name,
                        at.bytes()
                    )));
                }
                // It was turned into a plain block during the read.
                let again: LocalFuture<'_, Result<Buffer>> =
                    Box::pin(self.read_span(at.span(buffer.len() as u64), buffer));
                again.await
            }
            Err(error) => Err(error),
        }
    }

    /// Turns the block that holds its unit's entry into a plain block, with the content `new` if all of it
    /// changes. There is nothing to do when it is plain already, or when a snapshot has come to see it. The
    /// caller is inside an epoch.
    pub(super) async fn make_plain(&self, number: u64, new: Option<Buffer>) -> Result<()> {
        self.begin_journal().await?;
        let (_, form) = self.find(|| self.entry_and_form(number)).await?;
        let Some(block) = form.checked_sub(1) else { return Ok(()) };
        let start = self.cell.start_of(GuestCluster::new(number)) + u64::from(block) * SUB_BLOCK.bytes();
        // It may lie behind the end of the disk, when the disk is about to grow.
        let part = start.span(SUB_BLOCK.bytes());
        let held = self.engine.claims.claim(GuestCluster::new(number), self.parts_of(part)).await;
        let done = self.make_plain_claimed(number, new).await;
        self.release_claim(held);
        done.context(|| format!("{}: can't overwrite the disk at {:#x}", self.engine.name, start.bytes()))
    }

    async fn make_plain_claimed(&self, number: u64, new: Option<Buffer>) -> Result<()> {
        let (unit, form) = self.find(|| self.entry_and_form(number)).await?;
        let Some(block) = form.checked_sub(1) else { return Ok(()) };
        let at = self.places.unit(unit).start() + u64::from(block) * SUB_BLOCK.bytes();
        let data = match new {
            Some(new) => new,
            None => Buffer::copy_of(&self.unpack(number, at).await?),
        };
        let bits = self.places.entry(number);
        self.reserve(&[bits.word]).await?;
        loop {
            if self.find(|| self.is_held(number)).await? {
                return Ok(());
            }
            {
                let _gate = self.enter_changing(RECORDING_COST, || vec![bits.word]).await?;
                if self.entry_and_form(number) != Ok((unit, form)) {
                    return Ok(()); // freed, or copied
                }
                if self.is_held(number) != Ok(false) {
                    continue;
                }
                let journal = self.journal().expect("it has begun");
                if journal.take_whole(at, &data) {
                    // From here on readers find the new bytes. Readers that looked before find the old ones.
                    self.mark_recorded(unit);
                    let entry = u64::from(self.places.make_entry(unit, 0));
                    self.home.change(bits.word, |word| bits.set(word, entry));
                    break;
                }
            }
            // The journal has no room for more guest data, so the data that it has is checkpointed first.
            let journal = self.journal().expect("it has begun");
            journal.request_checkpoint();
            self.commit().await?;
        }
        self.engine.commits.note_change();
        Ok(())
    }
}
