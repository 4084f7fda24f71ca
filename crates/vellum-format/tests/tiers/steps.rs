//! What guests, promotions and another disk do in a program.

use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, GuestSpan, Random, Result as CoreResult, WriteFlags, ZeroFlags,
};
use vellum_format::fast::{Promotion, Reason, Tiers};
use vellum_format::native::Native;

use super::Setup;

/// A program has at most as many snapshots at a time.
const SNAPSHOTS: [&str; 3] = ["one", "two", "three"];

/// The other disk takes slots of the medium, and gives them back.
pub(super) async fn step_of_other(random: &mut Random, setup: &Setup, other: &Native) -> CoreResult<()> {
    let at = |unit: u64| GuestOffset::new(unit * setup.unit());
    let unit = random.below(3);
    match random.below(6) {
        0..=1 => {
            let value = u8::try_from(random.below(255)).expect("below 255");
            let data = vec![value; usize::try_from(setup.unit()).unwrap()];
            other.write(at(unit), Buffer::copy_of(&data), WriteFlags::default()).await
        }
        2 => or_open_without(other.demote(&[at(unit).span(1)]).await.map(drop)),
        _ => promote(random, other, at(unit).span(1)).await,
    }
}

/// Makes a snapshot, or deletes one.
async fn step_of_snapshots(random: &mut Random, native: &Native) -> CoreResult<()> {
    let name = *random.pick(&SNAPSHOTS);
    let done = match random.one_in(2) {
        true => native.snapshot_create(name, 0).await.map(drop),
        false => native.snapshot_delete(name).await,
    };
    match done {
        // Units that are moved are in the way.
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(()),
        Err(error) if matches!(error.kind(), ErrorKind::Invalid | ErrorKind::NotFound) => Ok(()),
        done => done,
    }
}

/// One step of a guest.
pub(super) async fn step(
    random: &mut Random,
    setup: &Setup,
    disk: &dyn Disk,
    native: &Native,
) -> CoreResult<()> {
    let (size, unit) = (setup.size(), setup.unit());
    let units = size.div_ceil(unit);
    let span = |at: u64, len: u64| GuestOffset::new(at).span(len.min(size - at));
    // Few units, so that they are promoted and written again.
    let some_unit = |random: &mut Random| random.below(units) * unit;
    let bytes = |random: &mut Random, len: u64| {
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        random.fill(&mut bytes);
        Buffer::copy_of(&bytes)
    };
    let fua = WriteFlags { fua: random.one_in(12) };
    if setup.moves && random.one_in(if setup.overwrites { 4 } else { 6 }) {
        let range = span(some_unit(random), 1 + random.below(3 * unit));
        return move_away(native, range).await;
    }
    if setup.overwrites && random.one_in(4) {
        let whole = span(some_unit(random), unit * (1 + random.below(2)));
        return match random.below(4) {
            0 => disk.discard(whole, fua).await,
            1 => {
                let flags = ZeroFlags { may_unmap: random.one_in(2), fua: fua.fua, ..ZeroFlags::default() };
                disk.write_zeroes(whole, flags).await
            }
            _ => disk.write(whole.start(), bytes(random, whole.len()), fua).await,
        };
    }
    if setup.snapshots && random.one_in(12) {
        return step_of_snapshots(random, native).await;
    }
    if setup.demotes && !random.one_in(4) {
        let span = span(random.below(3.min(units)) * unit, 4096);
        return match random.below(4) {
            0 => disk.write(span.start(), bytes(random, span.len()), fua).await,
            1 => or_open_without(native.demote(&[span]).await.map(drop)),
            _ => promote(random, native, span).await,
        };
    }
    match random.below(32) {
        0..=7 => {
            let within = 4096 * random.below(unit / 4096);
            let at = some_unit(random) + if random.one_in(2) { within } else { 0 };
            let span = span(at.min(size - 512), 4096);
            disk.write(span.start(), bytes(random, span.len()), fua).await
        }
        8..=9 => {
            let at = random.below(size / 512) * 512;
            let span = span(at, 512 * (1 + random.below(20)));
            disk.write(span.start(), bytes(random, span.len()), fua).await
        }
        10..=11 => {
            let span = span(some_unit(random), unit);
            disk.write(span.start(), bytes(random, span.len()), fua).await
        }
        12 => {
            let span = span(random.below(size / 4096) * 4096, 4096 * (1 + random.below(40)));
            disk.write_zeroes(span, ZeroFlags { may_unmap: random.one_in(2), ..ZeroFlags::default() }).await
        }
        13 => disk.discard(span(some_unit(random), unit * (1 + random.below(2))), fua).await,
        14..=19 => disk.flush().await,
        20..=21 => {
            let span = span(random.below(size / 512) * 512, 1 + random.below(2 * unit));
            let len = usize::try_from(span.len()).unwrap();
            disk.read(span.start(), Buffer::for_overwrite(len)).await.map(drop)
        }
        22 => {
            let span = span(some_unit(random), 1 + random.below(2 * unit));
            or_open_without(native.demote(&[span]).await.map(drop))
        }
        _ => {
            let range = span(some_unit(random), 1 + random.below(3 * unit));
            promote(random, native, range).await
        }
    }
}

async fn promote(random: &mut Random, native: &Native, range: GuestSpan) -> CoreResult<()> {
    let reason = *random.pick(&Reason::ALL);
    let promotion = Promotion { ranges: vec![range], reason, copies_base: random.one_in(2) };
    or_open_without(native.promote(promotion).await.map(drop))
}

async fn move_away(native: &Native, range: GuestSpan) -> CoreResult<()> {
    or_open_without(native.move_away(&[range]).await.map(drop))
}

/// Where the image is open without its medium, or has snapshots where it must not, there is nothing to do.
fn or_open_without(done: CoreResult<()>) -> CoreResult<()> {
    match done {
        // The medium has units of another time of the image alone.
        Err(error) if error.kind() == ErrorKind::Refused => Ok(()),
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(()),
        done => done,
    }
}
