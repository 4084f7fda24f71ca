//! Removing the base from an image.
//!
//! ```text
//!   closed: packed blocks over the base made plain ► closed ► what the masks call zero, or the base's, made zero in its
//!           place ► flush ─┐
//!   open:   the same, cell by cell, with guests at work ► flush ► closed ─┐
//!           ┌──────────────┴──────────────────────────────────────────────┘
//!           superblock without base, bitmap and masks ► flush           commit point ► the other copy ► flush
//! ```
//!
//! 1. The caller has written everything that the base has and the image had not: where the disk still shows the
//!    base, the base reads as zero. So the disk reads the same before and after.
//! 2. Without masks each byte of a unit counts, and in `linear` each byte of the data. So what the masks call
//!    zero is made zero in its place while they still count; until the commit point nobody reads these bytes.
//! 3. Regions stay where they are. Those of bitmap and masks are no more, and in `linear` neither is the
//!    journal's; their space is left as a gap.
//! 4. A crash leaves the disk over its base, or the disk alone. Both copies of the superblock are written, so that
//!    a damaged one is not replaced by one that still names the base. After a failed flush the next attempt says
//!    that the base is gone only when a flush has succeeded.
//! 5. While the image is open (`prepare`), a cell is looked at and zeroed under its claim. After that its places stay zero:
//!    a fresh unit is zero, and data becomes visible as soon as it is written. Only a write that fails, or a copy that is
//!    given up, leaves bytes behind that no mask names; that is counted (`claims.rs`), and then it counts as not prepared.
//!    In `linear`, what was filled is left alone: it is what the disk reads there, and needs no bit any more. Where
//!    *filled* is taken back, the rest of the block is the base's again. That counts in the same way, and the count is taken
//!    before the caller makes sure that nothing is missing.
//! 6. A unit with a packed block of which the image has everything stays as it is: it needs no mask.
//! 7. Snapshots also read from the base: an image that has some is left as it is.

use std::sync::atomic::{AtomicBool, Ordering};

use futures_lite::future::yield_now;
use vellum_core::{
    Context, Disk, Error, ErrorKind, GuestOffset, GuestSpan, ImageOffset, ImageSpan, LocalFuture, Result,
    SharedStorage, Zeroes,
};

use super::geometry::{Places, SUB_BLOCK};
use super::image::{Native, Origin, Sub};
use super::open::OpenOptions;
use super::superblock::Superblocks;
use super::zero::Space;
use crate::image::Detaching;
use crate::state::UnderWay;

/// The mapping is looked at for this many bytes of the guest at a time.
const LOOKED_AT_ONCE: u64 = 64 << 20;
/// And for this many while guests wait for the worker.
const LOOKED_BESIDE_GUESTS: u64 = 16 << 20;

/// Removes the base from a closed image. Where the disk still shows it, it reads as zero from then on.
///
/// # Errors
/// `Unsupported` when the image has snapshots, `Closed` when it was stopped, `Corrupt` for a damaged image, and
/// the errors of the storage.
pub(super) async fn detach(image: &SharedStorage, is_prepared: bool, stop: &AtomicBool) -> Result<()> {
    let detached = async {
        if !is_prepared && !prepare_closed(image, stop).await? {
            // An earlier attempt may have come this far without being durable.
            return image.flush().await;
        }
        let_go(image).await
    };
    detached.await.context(|| format!("can't detach {} from its backing image", image.name()))
}

/// False when there is no base.
async fn prepare_closed(image: &SharedStorage, stop: &AtomicBool) -> Result<bool> {
    // Opening it finishes an interrupted change.
    let native = Native::open(image.clone(), None, without_base(false)).await?;
    let prepared = prepare(&native, stop).await;
    native.close().await?;
    let Some(over) = prepared? else { return Ok(false) };
    zero_in_place(image, over, stop).await?;
    image.flush().await?;
    Ok(true)
}

/// Changes the superblocks, as the last step.
async fn let_go(image: &SharedStorage) -> Result<()> {
    let mut superblocks = Superblocks::read(&**image).await?;
    superblocks.superblock.detach()?;
    superblocks.superblock.draw_generation(None);
    superblocks.write(&**image).await?;
    image.flush().await?; // commit point
    superblocks.write(&**image).await?;
    image.flush().await
}

fn without_base(read_only: bool) -> OpenOptions {
    OpenOptions { read_only, without_base: true, without_key: true, ..OpenOptions::default() }
}

/// Stopping is safe before the commit point: the image still has its base.
fn go_on(stop: &AtomicBool) -> Result<()> {
    match stop.load(Ordering::Relaxed) {
        true => Err(Error::new(ErrorKind::Closed, "stopped by a signal")),
        false => Ok(()),
    }
}

/// The part of the disk that lies over the base, if there is one and the image may be detached from it.
fn over_base(native: &Native) -> Result<Option<GuestSpan>> {
    let shape = native.places.shape();
    let Some(base_bytes) = shape.base_bytes else { return Ok(None) };
    if shape.layout.has_table() && !native.snapshots()?.is_empty() {
        return Err(Error::unsupported(
            "the image has snapshots, which also read from the backing image: delete them first",
        ));
    }
    Ok(Some(GuestOffset::ZERO.span(SUB_BLOCK.round_up(base_bytes).min(shape.size))))
}

/// Makes each packed block over the base plain. The part of the disk that lies over the base, if there is one.
async fn prepare(native: &Native, stop: &AtomicBool) -> Result<Option<GuestSpan>> {
    let shape = native.places.shape();
    let Some(over) = over_base(native)? else { return Ok(None) };
    if let Some(unit) = shape.layout.unit().filter(|_| shape.zone().is_some()) {
        let _inside = native.engine.epochs.enter();
        for number in 0..unit.count_for(over.len()) {
            let (_, form) = native.find(|| native.entry_and_form(number)).await?;
            go_on(stop)?;
            if form != 0 {
                native.make_plain(number, None).await?;
            }
        }
    }
    Ok(Some(over))
}

/// Zeroes the space of everything that the masks call zero, or the base's. The image is closed, so home says all.
async fn zero_in_place(image: &SharedStorage, over: GuestSpan, stop: &AtomicBool) -> Result<()> {
    let native = Native::open(image.clone(), None, without_base(true)).await?;
    let mut rest = over;
    while !rest.is_empty() {
        go_on(stop)?;
        let now;
        (now, rest) = rest.split_at(LOOKED_AT_ONCE);
        let mut at = now.start();
        for part in native.parts(now).await? {
            let span = at.span(part.len);
            at = span.end();
            match part.from {
                Origin::Below | Origin::Zero => zero_places(&native, image, span).await?,
                Origin::Broken => return Err(native.broken(span.start())),
                Origin::Embedded(_) => {
                    return Err(Error::corrupt(format!(
                        "a packed block at {} cannot be moved",
                        span.start()
                    )));
                }
                Origin::Host(_) | Origin::NoUnit | Origin::Moved => {}
            }
        }
    }
    native.close().await
}

/// Zeroes the space of a part of the disk, as far as there is any.
async fn zero_places(native: &Native, image: &SharedStorage, span: GuestSpan) -> Result<()> {
    let places: Places = native.places;
    let in_file = ImageOffset::ZERO.span(image.len());
    let zero = async |space: ImageSpan| match space.intersect(in_file) {
        space if space.is_empty() => Ok(()),
        space => image.write_zeroes(space, Zeroes::MayUnmap).await,
    };
    let Some(unit) = places.shape().layout.unit() else {
        return zero((places.data_offset() + span.start().bytes()).span(span.len())).await;
    };
    for piece in unit.pieces_of(span) {
        let (number, _) =
            native.find(|| native.entry_and_form(unit.cluster_of(piece.start()).index())).await?;
        if number != 0 {
            let start = places.unit(number).start() + unit.within(piece.start());
            zero(start.span(piece.len())).await?;
        }
    }
    Ok(())
}

impl Native {
    async fn prepare_alone(&self, mark: u64, stop: &dyn Fn() -> bool) -> Result<()> {
        // The last step makes the bits of units void.
        self.superblocks.lock().await.superblock.may_do_without_fast()?;
        let mut rest = over_base(self)?.unwrap_or_else(|| GuestOffset::ZERO.span(0));
        while !rest.is_empty() {
            // Tables in memory are looked at without any waiting.
            yield_now().await;
            if stop() {
                return Err(Error::new(ErrorKind::Closed, "stopped"));
            }
            let now;
            (now, rest) = rest.split_at(LOOKED_BESIDE_GUESTS);
            let parts = {
                let _inside = self.engine.epochs.enter();
                self.parts(now).await?
            };
            let mut at = now.start();
            for part in parts {
                let span = at.span(part.len);
                at = span.end();
                match part.from {
                    Origin::Below | Origin::Zero => self.zero_unseen(span).await?,
                    Origin::Broken => return Err(self.broken(span.start())),
                    Origin::Embedded(_) | Origin::Host(_) | Origin::NoUnit | Origin::Moved => {}
                }
            }
        }
        Disk::flush(self).await?;
        self.ready_alone.store(mark, Ordering::Release);
        Ok(())
    }

    /// Zeroes the places of what the image has not, or calls zero.
    async fn zero_unseen(&self, span: GuestSpan) -> Result<()> {
        for span in self.with_space(span).await? {
            for piece in self.cell.pieces_of(span) {
                self.zero_unseen_in_cell(piece).await?;
            }
        }
        Ok(())
    }

    /// The parts of a run that may have space. In `linear` most of what is zero has none.
    async fn with_space(&self, span: GuestSpan) -> Result<Vec<GuestSpan>> {
        if self.unit().is_some() {
            return Ok(vec![span]);
        }
        let start = self.places.linear(span.start());
        let end = ImageOffset::new(self.data.len()).min(start + span.len()).max(start);
        let (mut spaces, mut rest) = (Vec::new(), ImageSpan::between(start, end));
        while !rest.is_empty() {
            let runs = self.data.runs(rest).await?;
            let Some(last) = runs.last() else { break };
            rest = ImageSpan::between(last.span.end(), end.max(last.span.end()));
            let data = runs.iter().filter(|run| run.is_data);
            // Whole sub-blocks: what is beside a run is a hole, and zero.
            spaces.extend(data.map(|run| {
                let from = SUB_BLOCK.round_down((span.start() + (run.span.start() - start)).bytes());
                let to = SUB_BLOCK.round_up((span.start() + (run.span.end() - start)).bytes());
                GuestSpan::between(GuestOffset::new(from), GuestOffset::new(to)).intersect(span)
            }));
        }
        Ok(spaces)
    }

    async fn zero_unseen_in_cell(&self, piece: GuestSpan) -> Result<()> {
        loop {
            self.unshare(piece).await?;
            let _inside = self.engine.epochs.enter();
            if self.find(|| self.holds_any(piece)).await? {
                continue; // it has begun to be moved in between
            }
            let cell = self.cell_of(piece.start());
            if self.unit().is_some() {
                if self.find(|| self.entry(cell.index())).await? == 0 {
                    return Ok(());
                }
                // Another program may have packed a block of a unit that also has something of the base.
                self.make_plain(cell.index(), None).await?;
            }
            let held = self.engine.claims.claim(cell, self.parts_of(piece)).await;
            // Zeros that were dropped half way may land later, over bytes that were written since.
            let under_way = UnderWay::begin(&self.engine.state, "a zeroing of unused space");
            let done = self.zero_unseen_claimed(piece).await;
            under_way.end();
            self.release_claim(held);
            if done? {
                return Ok(());
            }
        }
    }

    /// False when the unit has become one with a packed block, and must be looked at again.
    async fn zero_unseen_claimed(&self, piece: GuestSpan) -> Result<bool> {
        let place = match self.unit() {
            None => self.places.linear(piece.start()),
            Some(unit) => {
                let number = self.cell_of(piece.start()).index();
                match self.find(|| self.entry_and_form(number)).await? {
                    (0, _) => return Ok(true),
                    (entry, 0) => self.places.unit(entry).start() + unit.within(piece.start()),
                    _ => return Ok(false),
                }
            }
        };
        let block = self.places.shape().block;
        let mut unseen: Vec<GuestSpan> = Vec::new();
        for sub in SUB_BLOCK.pieces_of(piece) {
            let (state, _) = self.find(|| self.first_state(sub)).await?;
            // What was filled is what the disk reads there, whatever the mask says.
            let is_filled = self.filled.has(block.cluster_of(sub.start()).index());
            if is_filled || !matches!(state, Sub::Base | Sub::Zero) {
                continue;
            }
            match unseen.last_mut() {
                Some(last) if last.end() == sub.start() => {
                    *last = GuestSpan::between(last.start(), sub.end())
                }
                _ => unseen.push(sub),
            }
        }
        let in_file = ImageOffset::ZERO.span(self.data.len());
        for span in unseen {
            let space = (place + (span.start() - piece.start())).span(span.len()).intersect(in_file);
            if !space.is_empty() {
                self.zero_in_place(space, Space::Free).await?;
            }
        }
        self.engine.commits.note_change();
        Ok(true)
    }
}

impl Detaching for Native {
    fn mark(&self) -> u64 {
        self.engine.claims.spoiled()
    }

    fn prepare<'a>(&'a self, mark: u64, stop: &'a dyn Fn() -> bool) -> LocalFuture<'a, Result<()>> {
        Box::pin(self.prepare_alone(mark, stop))
    }

    fn is_prepared(&self) -> bool {
        self.ready_alone.load(Ordering::Acquire) == self.engine.claims.spoiled()
    }
}
