//! Changes: what goes into slots, what becomes a run of zeros, and what goes past the cache.
//!
//! ```text
//!   promise ─► claim ─► plan ─► carry over ─► slots ─► publish ─► the claim ends
//!     slots, bytes of     │ in place: proven, dirty, and has all these sectors
//!     the record, runs    └ a free slot: these sectors, and what the old entry has
//! ```
//!
//! 1. In place is written only where a proven entry says that these very sectors are dirty in this slot.
//! 2. Every other write takes a free slot. What the old entry has of the block, and the write has not, is carried
//!    over; all of it counts as dirty.
//! 3. A sector of which only some bytes are written is completed, from the slot under the claim, or from home before
//!    the promise: what home said holds if nobody else has claimed the block since.
//! 4. Bytes that are checked do not change: lent memory is copied first.

use vellum_core::{
    Buffer, Error, ErrorKind, GuestOffset, GuestSpan, ImageOffset, Result, WriteFlags, ZeroFlags,
};

use super::count;
use super::read::in_blocks;
use crate::claims::Watch;
use crate::layout::{BLOCK_BYTES, BLOCK_LEN, Key, SECTOR_BYTES, SECTOR_LEN, SECTORS_ALL, Slot};
use crate::open::{Open, PUT_BYTES, ROW_BYTES, RUN_BYTES, Share};
use crate::options::FlashPolicy;
use crate::record::Checks;
use crate::shared::Home;
use crate::state::{Found, Need, State};
use crate::zeros::Run;

/// A part of a write has at most this many blocks.
const PART_BLOCKS_MAX: u64 = 256;
/// A part of a run of zeros has at most this many blocks.
const ZERO_BLOCKS_MAX: u64 = 1 << 18;

/// Where the rest of a block comes from that is put into a new slot.
#[derive(Debug, Clone, Copy)]
pub(super) enum Under {
    Slot(Slot, u8),
    Zero,
    Home,
}

/// What is done with a part of a write that lies in one block.
struct Step {
    key: Key,
    /// Which of its bytes.
    from: u64,
    to: u64,
    /// Where they go.
    slot: Slot,
    /// None for a write in place.
    fresh: Option<Fresh>,
}

struct Fresh {
    under: Under,
    /// The sectors of the new entry.
    sectors: u8,
}

/// A block that is to be published.
struct Done {
    key: Key,
    slot: Slot,
    sectors: u8,
    checks: Checks,
}

/// What home has of sectors that a request writes in part, and whether it still holds.
#[derive(Default)]
pub(super) struct Edges {
    watch: Option<Watch>,
    sectors: Vec<(GuestOffset, Vec<u8>)>,
}

impl Edges {
    /// Whether anybody but the one who holds the claim now has claimed the blocks since they were read.
    fn have_changed(&self) -> bool {
        self.watch.as_ref().is_some_and(|watch| watch.claims() > 1)
    }

    /// What home has of the sector at this offset of the disk, if that was read.
    fn find(&self, at: u64) -> Option<&Vec<u8>> {
        self.sectors.iter().find(|(edge, _)| edge.bytes() == at).map(|(_, bytes)| bytes)
    }
}

/// Why a write cannot be done as it stands.
enum Unplanned {
    /// This part of the map has no room for another group.
    PartIsFull(u32),
    /// A sector that is written in part is known here no more.
    EdgeIsMissing,
}

/// The sectors that some of these bytes of a block are in.
pub(super) fn touched(from: u64, to: u64) -> u8 {
    let (first, end) = (from / SECTOR_BYTES, to.div_ceil(SECTOR_BYTES));
    (first..end).fold(0, |sectors, sector| sectors | 1 << sector)
}

/// The sectors that lie whole within these bytes, or end with the disk there.
pub(super) fn whole(from: u64, to: u64, block_bytes: u64) -> u8 {
    let is_whole = |sector: &u64| {
        let end = ((sector + 1) * SECTOR_BYTES).min(block_bytes);
        from <= sector * SECTOR_BYTES && end <= to && sector * SECTOR_BYTES < end
    };
    (0..8).filter(is_whole).fold(0, |sectors, sector| sectors | 1 << sector)
}

impl Home {
    pub(super) async fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> Result<()> {
        let span = self.check_change(GuestSpan::checked(at, data.len() as u64))?;
        if !span.is_empty() {
            match self.policy() {
                FlashPolicy::WriteBack => {}
                FlashPolicy::WriteThrough => return self.write_through(span, data, flags).await,
                FlashPolicy::ReadOnly | FlashPolicy::Off => {
                    return self.drop_cached(span, async || self.disk.write(at, data, flags).await).await;
                }
            }
            self.begin().await?;
            self.write_data(at, data.owned()).await?;
        }
        if flags.fua { self.flush().await } else { Ok(()) }
    }

    /// The bytes, part by part.
    async fn write_data(&self, mut at: GuestOffset, mut data: Buffer) -> Result<()> {
        let blocks = self.part_blocks();
        while !data.is_empty() {
            let end = GuestOffset::new((at.bytes() / BLOCK_BYTES + blocks) * BLOCK_BYTES);
            let (part, _) = at.span(data.len() as u64).split_at(end - at);
            let bytes = data.split_to(usize::try_from(part.len()).expect("within a buffer"));
            self.write_part(part, bytes).await?;
            at = part.end();
        }
        Ok(())
    }

    /// How many blocks a part of a write has.
    fn part_blocks(&self) -> u64 {
        let open = self.cache.open_rows().len();
        let state = self.cache.state();
        // A request is no more than the reserve of its disk.
        let of_slots = u64::from(state.slots.total() / 4).min(state.reserve(open)).max(1);
        let bytes = Open::bytes_max(Share::Guest, state.record_bytes_max()) - ROW_BYTES - RUN_BYTES;
        PART_BLOCKS_MAX.min(of_slots).min((bytes / PUT_BYTES) as u64)
    }

    async fn write_part(&self, span: GuestSpan, data: Buffer) -> Result<()> {
        let blocks = span.start().bytes() / BLOCK_BYTES..span.end().bytes().div_ceil(BLOCK_BYTES);
        let number = blocks.end - blocks.start;
        let need = Need {
            slots: u32::try_from(number).expect("a part is short"),
            bytes: usize::try_from(number).expect("a part is short") * PUT_BYTES + RUN_BYTES + ROW_BYTES,
            runs: 1,
            is_zero: false,
        };
        let cache = &*self.cache;
        let mut reads_all = false;
        loop {
            let edges = self.read_edges(span, reads_all).await?;
            let mut promise = cache.promise(self, need).await?;
            let claim = self.claims.claim(blocks.clone()).await;
            let inside = cache.epochs.enter();
            cache.stop.check()?;
            if edges.have_changed() {
                continue;
            }
            let planned = self.plan(span, &edges, |state, key| promise.take(state, key));
            let steps = match planned {
                Ok(steps) => steps,
                Err(Unplanned::PartIsFull(part)) => {
                    drop((promise, inside, claim));
                    cache.make_part_room(self, part).await?;
                    continue;
                }
                // A slot was given up while this waited. Home is not read with a promise, a claim or an epoch.
                Err(Unplanned::EdgeIsMissing) => {
                    reads_all = true;
                    continue;
                }
            };
            let under_way = cache.stop.under_way("a write");
            let written = self.fill_slots(&steps, data, &edges).await;
            under_way.end();
            let mut state = cache.state();
            match written {
                Ok(done) => {
                    cache.note_change();
                    count(&self.tally.writes, number);
                    if let [first, ..] = &done[..] {
                        let first = first.key.block();
                        let last = done[done.len() - 1].key.block();
                        state.leave_runs(Key::new(self.row, first), last + 1 - first);
                    }
                    for Done { key, slot, sectors, checks } in done {
                        state.put(key, slot, sectors, true, Some(checks), Share::Guest);
                        self.mask(&mut state, key.block(), sectors);
                    }
                }
                Err(error) => {
                    count(&self.tally.errors, 1);
                    for step in steps.iter().filter(|step| step.fresh.is_some()) {
                        state.give_back(step.slot);
                    }
                    return Err(error);
                }
            }
            drop(state);
            drop((inside, claim, promise));
            return Ok(());
        }
    }

    /// Reads sectors of which only some bytes are written, and which only home has. It comes before the promise and
    /// the claim: what waits for home keeps nothing from other disks. With `reads_all` also what flash has now, clean.
    async fn read_edges(&self, span: GuestSpan, reads_all: bool) -> Result<Edges> {
        let (start, end, size) = (span.start().bytes(), span.end().bytes(), self.size());
        let first = (!start.is_multiple_of(SECTOR_BYTES)).then_some(start / SECTOR_BYTES);
        let last = (!end.is_multiple_of(SECTOR_BYTES) && end != size).then_some(end / SECTOR_BYTES);
        let mut edges = Edges::default();
        for sector in first.into_iter().chain(last.filter(|last| Some(*last) != first)) {
            let blocks = start / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES);
            edges.watch.get_or_insert_with(|| self.claims.watch(blocks));
            let key = Key::new(self.row, sector / 8);
            let is_here = match self.cache.state().find(key) {
                Found::Slot { sectors, dirty, .. } => {
                    (dirty || !reads_all) && sectors & 1 << (sector % 8) != 0
                }
                Found::Zero => true,
                Found::Home => false,
            };
            if is_here {
                continue;
            }
            let at = GuestOffset::new(sector * SECTOR_BYTES);
            let len = usize::try_from(SECTOR_BYTES.min(size - at.bytes())).expect("a sector");
            let home = self.disk.read(at, Buffer::for_overwrite(len)).await?;
            edges.sectors.push((at, home.to_vec()));
        }
        Ok(edges)
    }

    /// Decides for each block where its bytes go.
    fn plan(
        &self,
        span: GuestSpan,
        edges: &Edges,
        mut take: impl FnMut(&mut State, Key) -> Slot,
    ) -> Result<Vec<Step>, Unplanned> {
        let size = self.size();
        let mut state = self.cache.state();
        if let Some(part) = in_blocks(span).find_map(|(block, ..)| state.full_part(Key::new(self.row, block)))
        {
            return Err(Unplanned::PartIsFull(part));
        }
        let lacks_edge = |(block, from, to): (u64, u64, u64)| {
            let start = block * BLOCK_BYTES;
            let has = match state.find(Key::new(self.row, block)) {
                Found::Slot { sectors, .. } => sectors,
                Found::Zero => SECTORS_ALL,
                Found::Home => 0,
            };
            let partial = touched(from, to) & !whole(from, to, BLOCK_BYTES.min(size - start)) & !has;
            (0..8u64).any(|sector| {
                partial & 1 << sector != 0 && edges.find(start + sector * SECTOR_BYTES).is_none()
            })
        };
        if in_blocks(span).any(lacks_edge) {
            return Err(Unplanned::EdgeIsMissing);
        }
        let plan_one = |(block, from, to)| {
            let key = Key::new(self.row, block);
            let touched = touched(from, to);
            let (under, sectors) = match state.find(key) {
                Found::Slot { slot, sectors, dirty: true }
                    if touched & !sectors == 0 && state.is_proven(key) =>
                {
                    return Step { key, from, to, slot, fresh: None };
                }
                Found::Slot { slot, sectors, .. } => (Under::Slot(slot, sectors), touched | sectors),
                Found::Zero => (Under::Zero, State::sectors_of(block, size)),
                Found::Home => (Under::Home, touched),
            };
            let slot = take(&mut state, key);
            Step { key, from, to, slot, fresh: Some(Fresh { under, sectors }) }
        };
        Ok(in_blocks(span).map(plan_one).collect())
    }

    /// Brings the bytes to their slots. Returns what is to be published.
    async fn fill_slots(&self, steps: &[Step], mut data: Buffer, edges: &Edges) -> Result<Vec<Done>> {
        let mut parts: Vec<(ImageOffset, Buffer)> = Vec::with_capacity(steps.len());
        let mut done = Vec::with_capacity(steps.len());
        for Step { key, from, to, slot, fresh } in steps {
            let bytes = data.split_to(usize::try_from(to - from).expect("within a block"));
            let at = self.cache.slot_at(*slot);
            let Some(Fresh { under, sectors }) = fresh else {
                parts.push((at + *from, bytes));
                continue;
            };
            let block = self.whole_block(*key, (*from, *to), bytes, *under, edges).await?;
            let checks = Checks::of(*sectors, block.slice());
            done.push(Done { key: *key, slot: *slot, sectors: *sectors, checks });
            parts.push(only_sectors(at, block, *sectors));
        }
        parts.sort_unstable_by_key(|(at, _)| *at);
        count(&self.tally.slot_writes, parts.iter().map(|(_, bytes)| bytes.len() as u64).sum());
        self.cache.write_slots(parts).await?;
        Ok(done)
    }

    /// The block as its new slot has it, in one piece; what the new entry has not is zero.
    pub(super) async fn whole_block(
        &self,
        key: Key,
        (from, to): (u64, u64),
        bytes: Buffer,
        under: Under,
        edges: &Edges,
    ) -> Result<Buffer> {
        if to - from == BLOCK_BYTES {
            return Ok(bytes.contiguous());
        }
        let start = GuestOffset::new(key.block() * BLOCK_BYTES);
        let block_bytes = BLOCK_BYTES.min(self.size() - start.bytes());
        let mut block = match under {
            Under::Slot(slot, _) => {
                let buffer = Buffer::for_overwrite(BLOCK_LEN);
                self.cache.read_slots(self.cache.slot_at(slot), buffer).await?.contiguous()
            }
            Under::Zero | Under::Home => Buffer::zeroed(BLOCK_LEN),
        };
        let has = match under {
            Under::Slot(_, sectors) => sectors,
            Under::Zero => SECTORS_ALL,
            Under::Home => 0,
        };
        for sector in (0..8u64).filter(|sector| has & 1 << sector == 0) {
            let at = usize::try_from(sector * SECTOR_BYTES).expect("within a block");
            block.slice_mut()[at..at + SECTOR_LEN].fill(0);
        }
        // Sectors of which only some bytes are written, and which nothing here has: at most two.
        let partial = touched(from, to) & !whole(from, to, block_bytes) & !has;
        for sector in (0..8u64).filter(|sector| partial & 1 << sector != 0) {
            let at = sector * SECTOR_BYTES;
            let len = usize::try_from(SECTOR_BYTES.min(block_bytes - at)).expect("a sector");
            let home = edges.find((start + at).bytes()).filter(|bytes| bytes.len() == len);
            let home =
                home.ok_or_else(|| Error::new(ErrorKind::Io, "a sector beside the write was not read"))?;
            block.copy_from(usize::try_from(at).expect("within a block"), home);
        }
        block.copy_from(usize::try_from(from).expect("within a block"), bytes.contiguous().slice());
        Ok(block)
    }

    // Zeros.

    pub(super) async fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> Result<()> {
        let span = self.check_change(Some(span))?;
        if !span.is_empty() {
            let change = async || self.disk.write_zeroes(span, flags).await;
            match self.policy() {
                FlashPolicy::WriteBack => {}
                FlashPolicy::WriteThrough => return self.zero_through(span, change).await,
                FlashPolicy::ReadOnly | FlashPolicy::Off => return self.drop_cached(span, change).await,
            }
            self.begin().await?;
            let (head, middle, tail) = self.whole_blocks(span);
            for edge in [head, tail] {
                if !edge.is_empty() {
                    let len = usize::try_from(edge.len()).expect("less than a block");
                    self.write_data(edge.start(), Buffer::zeroed(len)).await?;
                }
            }
            self.zero_blocks(middle, flags.may_unmap).await?;
        }
        if flags.fua { self.flush().await } else { Ok(()) }
    }

    pub(super) async fn discard(&self, span: GuestSpan, flags: WriteFlags) -> Result<()> {
        let span = self.check_change(Some(span))?;
        if !span.is_empty() {
            let change = async || self.disk.discard(span, flags).await;
            match self.policy() {
                FlashPolicy::WriteBack => {}
                FlashPolicy::WriteThrough => return self.zero_through(span, change).await,
                FlashPolicy::ReadOnly | FlashPolicy::Off => return self.drop_cached(span, change).await,
            }
            self.begin().await?;
            // What is not whole stays as it is.
            let (_, middle, _) = self.whole_blocks(span);
            self.zero_blocks(middle, true).await?;
        }
        if flags.fua { self.flush().await } else { Ok(()) }
    }

    /// What lies before the first whole block, the whole ones, and what lies behind. A block with which the disk
    /// ends is whole.
    fn whole_blocks(&self, span: GuestSpan) -> (GuestSpan, GuestSpan, GuestSpan) {
        let (start, end) = (span.start().bytes(), span.end().bytes());
        let first = start.next_multiple_of(BLOCK_BYTES).min(end);
        let last = if end == self.size() { end } else { (end / BLOCK_BYTES * BLOCK_BYTES).max(first) };
        let between = |a: u64, b: u64| GuestSpan::between(GuestOffset::new(a), GuestOffset::new(b));
        // A part of the last block that does not begin it is not whole.
        let last = if first == end && !start.is_multiple_of(BLOCK_BYTES) { first } else { last };
        (between(start, first), between(first, last), between(last, end))
    }

    async fn zero_blocks(&self, span: GuestSpan, may_free: bool) -> Result<()> {
        if span.is_empty() {
            return Ok(());
        }
        let mut first = span.start().bytes() / BLOCK_BYTES;
        let end = span.end().bytes().div_ceil(BLOCK_BYTES);
        let need = Need { slots: 0, bytes: 2 * RUN_BYTES + ROW_BYTES, runs: 2, is_zero: true };
        while first < end {
            let blocks = (end - first).min(ZERO_BLOCKS_MAX);
            let promise = self.cache.promise(self, need).await?;
            let claim = self.claims.claim(first..first + blocks).await;
            self.cache.stop.check()?;
            self.cache.state().zero(Run { key: Key::new(self.row, first), blocks, may_free });
            drop((claim, promise));
            first += blocks;
        }
        Ok(())
    }

    // Past the cache.

    /// Makes a change of home, after which nothing is cached of these bytes.
    pub(crate) async fn drop_cached(
        &self,
        span: GuestSpan,
        change: impl AsyncFnOnce() -> Result<()>,
    ) -> Result<()> {
        let blocks = span.start().bytes() / BLOCK_BYTES..span.end().bytes().div_ceil(BLOCK_BYTES);
        let first = Key::new(self.row, blocks.start);
        let number = blocks.end - blocks.start;
        self.leave_session().await?;
        loop {
            let claim = self.claims.claim(blocks.clone()).await;
            if self.drop_blocks(first, number) {
                let changed = change().await;
                drop(claim);
                self.cache.freed.notify(usize::MAX);
                return changed;
            }
            drop(claim);
            self.cache.commit_all().await?;
        }
    }

    /// Nothing is cached of these blocks any more. False when the record has no room to say so of all of them.
    pub(super) fn drop_blocks(&self, first: Key, number: u64) -> bool {
        let mut state = self.cache.state();
        let keys = state.map.keys_between(first, number);
        let room = state.room_for(Share::Evict) / 16;
        for key in keys.iter().take(room) {
            state.drop_block(*key, Share::Evict);
        }
        keys.len() <= room
    }
}

/// The part of a block that holds these sectors, and where it goes.
pub(super) fn only_sectors(at: ImageOffset, mut block: Buffer, sectors: u8) -> (ImageOffset, Buffer) {
    let first = sectors.trailing_zeros() as usize;
    let end = 8 - sectors.leading_zeros() as usize;
    drop(block.split_off(end * SECTOR_LEN));
    drop(block.split_to(first * SECTOR_LEN));
    (at + (first * SECTOR_LEN) as u64, block)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sectors_are_touched_or_whole() {
        assert_eq!((touched(0, 4096), whole(0, 4096, 4096)), (0xFF, 0xFF));
        assert_eq!((touched(511, 513), whole(511, 513, 4096)), (0b11, 0));
        assert_eq!((touched(512, 1025), whole(512, 1025, 4096)), (0b110, 0b10));
        assert_eq!(whole(512, 1000, 1000), 0b10, "the disk ends there");
        assert_eq!(whole(0, 999, 1000), 0b1);
    }
}
