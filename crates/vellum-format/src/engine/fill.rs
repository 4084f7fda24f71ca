//! The order of a fill: the image keeps a copy of what the disk below has (copy-on-read, prefetch, flattening).
//!
//! ```text
//!   parts that the disk reads from below ──► claimed, if that is possible at once ──► still read from below?
//!     ──► room in the open transaction ──► a place ──► data ──► published with its checks, as by a write ──► released
//! ```
//!
//! A fill is a write that may be left out. Whatever it would have to wait for, it drops the part instead.
//!
//! 1. The bytes were read from below while the disk was open. Nothing becomes *below* again while it is open, so a
//!    part that is *below* under the claim was never changed, and the bytes are still right.
//! 2. A claim is held for one write to the image and the publishing. It is never held while the disk below is read,
//!    or until a flush has ended: the guest that waits for the claim may be the one that would flush.
//! 3. Every byte is in a check of the same transaction. If it is lost in a crash, the transaction is cut, and the
//!    disk reads from below again. This was never acknowledged as durable.
//! 4. Fills join the open transaction as far as there is room, and never ask for a commit.
//! 5. What a snapshot sees is not filled.

use vellum_core::{BlockSize, Buffer, Filled, GuestSpan, Result};

use super::write::gather;
use super::writer::{Step, Writer};
use crate::claims::Held;
use crate::perturb;

/// A fill is done in pieces of at most this many bytes, so that a guest waits for no more than one of them.
const BYTES_AT_ONCE: u64 = 1 << 20;

/// What a format gives so that copies of the disk below can become its own.
pub(crate) trait Copier: Writer {
    /// The parts of a run that the disk reads from below, in order. Each lies in one cell, and consists of whole
    /// units that can be published, but for one at the end of the disk.
    async fn parts_below(&self, span: GuestSpan) -> Result<Vec<GuestSpan>>;

    /// Claims a part without waiting. `None` when it must be left out.
    async fn plan_copy<'a>(&'a self, part: GuestSpan) -> Result<Option<Step<'a, Self>>>;

    /// Settles where each step's bytes go.
    async fn place_copies(&self, steps: &mut [Step<'_, Self>]) -> Result<()>;

    /// Makes a step's bytes part of the disk. They have been written. False when the open transaction has no room.
    async fn publish_copy(&self, step: &Step<'_, Self>) -> Result<bool>;
}

/// How a disk is filled.
pub(crate) trait Fill: Copier {
    /// Keeps a copy of what the disk below has, as far as that is possible at once.
    async fn fill_in_parts(&self, span: GuestSpan, mut data: Buffer) -> Result<Filled> {
        let mut sum = Filled::default();
        let mut rest = span;
        while !rest.is_empty() && !sum.wants_flush {
            let (now, later) = rest.split_between_blocks(BYTES_AT_ONCE.max(self.cell().bytes()));
            let part = data.split_to(usize::try_from(now.len()).expect("within the buffer"));
            loop {
                let (filled, has_more) = fill_some(self, now, part.duplicate()).await?;
                sum.kept += filled.kept;
                sum.wants_flush |= filled.wants_flush;
                if !has_more || filled.kept == 0 || filled.wants_flush {
                    break;
                }
            }
            rest = later;
        }
        Ok(sum)
    }
}

impl<C: Copier> Fill for C {}

/// What a fill is about to do.
#[derive(Default)]
struct Planned {
    /// The bytes of the steps.
    bytes: Buffer,
    /// The open transaction has no room for more.
    wants_flush: bool,
    /// A cell has another part that can be filled once the first one is.
    has_more: bool,
}

/// Also returns whether there is more that can be filled in the same way.
async fn fill_some<C: Copier>(image: &C, span: GuestSpan, data: Buffer) -> Result<(Filled, bool)> {
    let engine = image.engine();
    let _inside = engine.epochs.enter();
    let mut steps = Vec::new();
    let result = match plan(image, span, data, &mut steps).await {
        Ok(Planned { bytes, wants_flush, has_more }) if !steps.is_empty() => {
            let copied = copy(image, &mut steps, bytes).await;
            engine.commits.note_change();
            copied.map(|(kept, had_room)| (Filled { kept, wants_flush: wants_flush || !had_room }, has_more))
        }
        planned => planned.map(|planned| (Filled { kept: 0, wants_flush: planned.wants_flush }, false)),
    };
    if result.is_err() {
        steps.iter().filter_map(|step| step.held.as_ref()).for_each(Held::spoil);
    }
    image.release_steps(steps).await;
    result
}

/// Claims what can be filled.
async fn plan<'a, C: Copier>(
    image: &'a C,
    span: GuestSpan,
    mut data: Buffer,
    steps: &mut Vec<Step<'a, C>>,
) -> Result<Planned> {
    let mut planned = Planned::default();
    let mut at = span.start();
    let mut last_cell = None;
    for part in image.parts_below(span).await? {
        let cell = image.cell().cluster_of(part.start());
        if last_cell == Some(cell) {
            planned.has_more = true;
            continue;
        }
        perturb::point(); // somebody may write there now
        let Some(step) = image.plan_copy(part).await? else { continue };
        if image.journal().is_none_or(|journal| !journal.has_room_for_copy(part.len())) {
            image.release_steps(vec![step]).await;
            planned.wants_flush = true;
            break;
        }
        steps.push(step);
        last_cell = Some(cell);
        drop(data.split_to(usize::try_from(part.start() - at).expect("within the buffer")));
        planned.bytes.append(data.split_to(usize::try_from(part.len()).expect("within the buffer")));
        at = part.end();
    }
    Ok(planned)
}

/// Copies the bytes to their places and publishes them. Returns how many were kept, and whether the open transaction
/// had room for all of them.
async fn copy<C: Copier>(image: &C, steps: &mut [Step<'_, C>], mut data: Buffer) -> Result<(u64, bool)> {
    image.place_copies(steps).await?;
    let (mut kept, mut had_room) = (0, true);
    let mut lens = Vec::with_capacity(steps.len());
    for step in &*steps {
        lens.push(step.fresh.iter().map(|fresh| fresh.end - fresh.start).sum::<u64>());
    }
    // Checked even where the open transaction is fenced: it may be sealed before this is published, and then the
    // next one would need a fence for the sake of a copy.
    let writes = gather(image, steps, &mut data, true).await?;
    writes.write(image, steps).await?;
    for (step, len) in steps.iter_mut().zip(lens) {
        step.is_published = image.publish_copy(step).await?;
        match step.is_published {
            true => kept += len,
            false => {
                // Its place has the bytes all the same, and must not be taken for zeros by whoever gets it next.
                step.held().spoil();
                had_room = false;
            }
        }
    }
    Ok((kept, had_room))
}

/// The whole blocks of `unit` in a copy of the disk below. One in which the disk below ends is filled up with zeros.
pub(crate) fn whole_units(
    span: GuestSpan,
    mut data: Buffer,
    unit: BlockSize,
    below_end: u64,
    size: u64,
) -> (GuestSpan, Buffer) {
    let start = span.start().bytes();
    let end = span.end().bytes().min(below_end).max(start);
    let whole = match end == below_end || end == size {
        true => unit.round_up(end).min(size),
        false => unit.round_down(end).max(start),
    };
    let index = |at: u64| usize::try_from(at - start).expect("within the buffer");
    drop(data.split_off(index(end.min(whole))));
    data.append(Buffer::zeroed(index(whole) - data.len()));
    (span.start().span(whole - start), data)
}

#[cfg(test)]
mod tests {
    use vellum_core::GuestOffset;

    use super::*;

    #[test]
    fn a_copy_has_whole_units() {
        // Start and length of the copy, end of the disk below, size of the disk; length then, and how many of the
        // bytes are zeros.
        let table = [
            ((0, 8192), 1 << 20, 1 << 20, (8192, 0)),
            ((0, 8191), 1 << 20, 1 << 20, (4096, 0)),
            ((4096, 100), 1 << 20, 1 << 20, (0, 0)),
            ((4096, 100), 4196, 1 << 20, (4096, 3996)),
            ((4096, 8192), 4196, 1 << 20, (4096, 3996)),
            ((4096, 100), 4196, 4608, (512, 412)),
            ((4096, 512), 1 << 20, 4608, (512, 0)),
            ((8192, 4096), 4196, 1 << 20, (0, 0)),
        ];
        for ((at, len), below_end, size, (whole, zeros)) in table {
            let data = Buffer::copy_of(&vec![1; len]);
            let span = GuestOffset::new(at).span(len as u64);
            let (copied, bytes) = whole_units(span, data, BlockSize::PAGE, below_end, size);
            let bytes = bytes.to_vec();
            assert_eq!((copied.len(), bytes.len()), (whole, usize::try_from(whole).unwrap()), "{span}");
            assert_eq!(bytes.iter().filter(|byte| **byte == 0).count(), zeros, "{span}");
        }
    }
}
