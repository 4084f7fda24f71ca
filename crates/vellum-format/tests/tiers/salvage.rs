//! What is left of a disk when the fast medium that alone has parts of it is lost, damaged, or gives some of them no more. Never
//! zeros and never old bytes.

use std::sync::Arc;

use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, GuestSpan, ImageOffset, ImageSpan, Random, Result, SharedStorage,
    Storage as _, WriteFlags, ZeroFlags,
};
use vellum_format::FormatKind;
use vellum_format::fast::{FastId, FastMedium, NewRow, Tiers, note_cut};
use vellum_format::native::check::check;
use vellum_format::native::{Native, OpenOptions};
use vellum_format::report::Repair;
use vellum_sim::{Drive, DriveOptions, Fault, Operation, Repeat};

use crate::moved::{is_refused, move_away, open_with, promotion_of};
use crate::trials::{Both, Trial, UNIT, UNITS, chain, ensure, promote, put, reads, unit_span};

/// Where a medium has its entries, and where its slots begin.
const ENTRIES_AT: u64 = 520 << 10;
const SLOTS_AT: u64 = 576 << 10;

/// Where it has its rows.
const ROWS_AT: ImageOffset = ImageOffset::new(8 << 10);

/// The place of a slot. The first promotion takes the first one.
fn slot(number: u64) -> ImageSpan {
    ImageOffset::new(SLOTS_AT + number * UNIT).span(UNIT)
}

/// Units 0 to 3 are moved, each to the slot of its number, and have its number plus one. Unit 4 is in the image alone.
async fn four_moved(both: &Both) -> Trial {
    let disk = both.open(1).await?;
    for unit in 0..5 {
        put(&disk, unit, value_of(unit)).await?;
    }
    for unit in 0..4 {
        promote(&disk, unit).await?;
        move_away(&disk, unit).await?;
    }
    disk.close().await.map_err(chain)
}

fn value_of(unit: u64) -> u8 {
    u8::try_from(unit + 1).expect("small")
}

/// The disk, as it is opened to read what is left.
async fn salvage(both: &Both, fast: Option<Arc<FastMedium>>, read_only: bool) -> Result<Arc<Native>> {
    let options =
        OpenOptions { journal_key: Some(1), fast, read_only, salvages: true, ..OpenOptions::default() };
    Native::open(both.image.clone(), both.below(), options).await
}

async fn what_is_left_of(fast: &Arc<Drive>) -> Result<Arc<FastMedium>> {
    FastMedium::open_to_salvage(fast.clone(), Random::from_seed(5)).await
}

/// Each of the units reads as it was, but for the lost ones, which are errors.
async fn has_all_but(disk: &Native, lost: &[u64], when: &str) -> Trial {
    for unit in 0..5 {
        match lost.contains(&unit) {
            false => reads(disk, unit, value_of(unit), when).await?,
            true => {
                let at = GuestOffset::new(unit * UNIT);
                is_refused(when, disk.read(at, Buffer::zeroed(512)).await, ErrorKind::Io)?;
            }
        }
    }
    let spans: Vec<GuestSpan> = lost.iter().map(|unit| unit_span(*unit)).collect();
    let (moved, found) = disk.look_for_lost().await.map_err(chain)?;
    let all: Vec<GuestSpan> = found
        .iter()
        .flat_map(|span| (0..span.len() / UNIT).map(|at| (span.start() + at * UNIT).span(UNIT)))
        .collect();
    ensure(moved == 4 && all == spans, format!("{when}: {moved} moved, and lost are {found:?}"))
}

pub(crate) fn a_unit_that_cannot_be_read_does_not_keep_the_others_there() -> Trial {
    let both = Both::new();
    both.world.run(async {
        four_moved(&both).await?;
        let disk = both.open(2).await?;
        let fails =
            Fault { within: Some(slot(1)), repeat: Repeat::ForEver, ..Fault::nth(Operation::Read, 0) };
        both.faults.add(fails);
        // A write fails, and what it can take back is taken back.
        let data = Buffer::zeroed(65_536);
        is_refused(
            "written",
            disk.write(GuestOffset::new(512), data, WriteFlags::default()).await,
            ErrorKind::Io,
        )?;
        ensure(disk.facts().moved == 3, format!("{:?}", disk.facts()))?;
        reads(&disk, 0, 1, "beside a write that failed").await?;
        let done = disk.demote(&[GuestOffset::ZERO.span(UNITS * UNIT)]).await.map_err(chain)?;
        ensure(done.units == 2 && done.left == [unit_span(1)], format!("{done:?}"))?;
        ensure(done.why.is_some_and(|why| why.kind() == ErrorKind::Io), "it says why")?;
        ensure(disk.facts().moved == 1, "one is left")?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        is_refused("alone", open_with(&both, &both.image, None, true).await, ErrorKind::Refused)?;
        both.faults.clear();
        let disk = both.open(3).await?;
        let done = disk.demote(&[unit_span(1)]).await.map_err(chain)?;
        ensure(done.units == 1 && done.left.is_empty(), format!("{done:?}"))?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        let disk = both.open_alone().await?;
        for unit in 0..5 {
            reads(&disk, unit, value_of(unit), "home again").await?;
        }
        disk.close().await.map_err(chain)
    })
}

pub(crate) fn without_its_medium_a_disk_is_read_as_far_as_it_goes() -> Trial {
    let both = Both::new();
    both.world.run(async {
        let early = both.copy_of(&both.fast);
        four_moved(&both).await?;
        is_refused("alone", open_with(&both, &both.image, None, true).await, ErrorKind::Refused)?;
        is_refused("written without it", salvage(&both, None, false).await, ErrorKind::Refused)?;
        let disk = salvage(&both, None, true).await.map_err(chain)?;
        has_all_but(&disk, &[0, 1, 2, 3], "without a medium").await?;
        ensure(disk.facts().missing == 4 && disk.facts().trouble.is_some(), format!("{:?}", disk.facts()))?;
        drop(disk);
        // A medium of another time has nothing that is believed.
        let old = FastMedium::open(early, Random::from_seed(4)).await.map_err(chain)?;
        is_refused(
            "written with an old one",
            salvage(&both, Some(old.clone()), false).await,
            ErrorKind::Changed,
        )?;
        let disk = salvage(&both, Some(old), true).await.map_err(chain)?;
        has_all_but(&disk, &[0, 1, 2, 3], "with an old medium").await?;
        drop(disk);
        let disk = both.open(3).await?;
        has_all_but(&disk, &[], "with its medium").await?;
        disk.close().await.map_err(chain)
    })
}

/// Some pages of its tables, or some slots, cannot be read, or its end is missing.
pub(crate) fn what_is_left_of_a_medium_is_read() -> Trial {
    let both = Both::new();
    both.world.run(async {
        four_moved(&both).await?;
        let fails = |within| Fault {
            within: Some(within),
            repeat: Repeat::ForEver,
            ..Fault::nth(Operation::Read, 0)
        };
        for (lost, within) in [
            (&[2][..], slot(2)),
            (&[0, 1, 2, 3], ImageOffset::new(ENTRIES_AT).span(512)),
            (&[0, 1, 2, 3], ROWS_AT.span(512)),
            // The row of another disk, and none that it lies beside.
            (&[], (ROWS_AT + 512).span(512)),
            // The first copy of its superblock.
            (&[], ImageOffset::ZERO.span(512)),
        ] {
            both.faults.add(fails(within));
            let medium = what_is_left_of(&both.fast).await.map_err(chain)?;
            let disk = salvage(&both, Some(medium), true).await.map_err(chain)?;
            has_all_but(&disk, lost, &format!("unreadable at {:#x}", within.start().bytes())).await?;
            both.faults.clear();
        }
        let cut = both.copy_of(&both.fast);
        cut.set_len(slot(2).start().bytes() + 512).await.map_err(chain)?;
        ensure(
            FastMedium::open(cut.clone(), Random::from_seed(6)).await.is_err(),
            "it is shorter than it was",
        )?;
        let medium = what_is_left_of(&cut).await.map_err(chain)?;
        let disk = salvage(&both, Some(medium.clone()), true).await.map_err(chain)?;
        for (unit, value) in [(0, 1), (1, 2), (2, 3), (4, 5)] {
            reads(&disk, unit, value, "of a medium that was cut off").await?;
        }
        let (moved, lost) = disk.look_for_lost().await.map_err(chain)?;
        ensure((moved, lost) == (4, vec![GuestOffset::new(2 * UNIT).span(2 * UNIT)]), "what was cut off")?;
        for at in [2 * UNIT + 512, 3 * UNIT] {
            is_refused("cut off", disk.read(GuestOffset::new(at), Buffer::zeroed(512)).await, ErrorKind::Io)?;
        }
        drop(disk);
        // Nothing is ever written there.
        is_refused("forgotten", medium.forget([7; 16], true).await, ErrorKind::ReadOnly)?;
        let log = cut.log();
        let is_change = |operation| matches!(operation, Operation::Write | Operation::Flush);
        ensure(!log.events().iter().any(|event| is_change(event.operation())), "it was written")
    })
}

/// The entry of one unit is damaged: the others are brought back, and it stays what it was.
pub(crate) fn what_the_tables_have_lost_does_not_keep_the_others_there() -> Trial {
    let both = Both::new();
    both.world.run(async {
        four_moved(&both).await?;
        let sound = both.fast.content();
        let mut content = sound.clone();
        content.write(ImageOffset::new(ENTRIES_AT + 2 * 32), &[0x5A; 32]);
        let damaged = Drive::from_content(&both.world, content, DriveOptions::default());
        is_refused("open", open_with(&both, &both.image, Some(&damaged), false).await, ErrorKind::Changed)?;
        let medium = FastMedium::open(damaged.clone(), Random::from_seed(4)).await.map_err(chain)?;
        let disk = salvage(&both, Some(medium), false).await.map_err(chain)?;
        has_all_but(&disk, &[2], "while the others are there").await?;
        let all = [GuestOffset::ZERO.span(UNITS * UNIT)];
        let done = disk.demote(&all).await.map_err(chain)?;
        ensure(done.units == 3 && done.left == [unit_span(2)], format!("{done:?}"))?;
        // It is neither written nor forgotten.
        let data = Buffer::copy_of(&[9; 512]);
        let at = GuestOffset::new(2 * UNIT);
        is_refused("written", disk.write(at, data, WriteFlags::default()).await, ErrorKind::Io)?;
        let flags = WriteFlags::default();
        is_refused(
            "discarded",
            disk.discard(unit_span(2).split_at(UNIT - 4096).0, flags).await,
            ErrorKind::Io,
        )?;
        is_refused("promoted", disk.promote(promotion_of(2)).await, ErrorKind::Refused)?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        let storage: SharedStorage = both.image.clone();
        let named = FormatKind::Native.format().read(&*storage).await.map_err(chain)?.fast();
        ensure(named.is_some_and(|named| named.is_needed), "its medium is needed")?;
        let mut lines = Vec::new();
        let report = check(&storage, Repair::Nothing, &mut |line| lines.push(line)).await.map_err(chain)?;
        ensure(report.is_clean() && report.moved_units == 1, format!("{report:?} {lines:?}"))?;
        // The sector can be read again.
        let mut entry = [0; 32];
        sound.read(ImageOffset::new(ENTRIES_AT + 2 * 32), &mut entry);
        let at = ImageOffset::new(ENTRIES_AT + 2 * 32);
        let mut content = damaged.content();
        content.write(at, &entry);
        let mended = Drive::from_content(&both.world, content, DriveOptions::default());
        let disk = open_with(&both, &both.image, Some(&mended), false).await.map_err(chain)?;
        for unit in 0..5 {
            reads(&disk, unit, value_of(unit), "when it can be read again").await?;
        }
        let done = disk.demote(&all).await.map_err(chain)?;
        ensure(done.units == 1 && done.left.is_empty(), format!("{done:?}"))?;
        disk.close().await.map_err(chain)
    })
}

/// A write, zeros or a discard of all of a unit takes the place of what the medium does not give, and of a part of it nothing does.
pub(crate) fn what_is_lost_is_overwritten_as_a_whole() -> Trial {
    let both = Both::new();
    both.world.run(async {
        four_moved(&both).await?;
        let disk = both.open(2).await?;
        for unit in 1..4 {
            both.faults.add(Fault {
                within: Some(slot(unit)),
                repeat: Repeat::ForEver,
                ..Fault::nth(Operation::Read, 0)
            });
        }
        let refused_in_part = async || {
            let part = |unit: u64| (GuestOffset::new(unit * UNIT) + 4096).span(UNIT - 4096);
            let data = Buffer::zeroed(usize::try_from(UNIT - 4096).unwrap());
            is_refused(
                "written",
                disk.write(part(1).start(), data, WriteFlags::default()).await,
                ErrorKind::Io,
            )?;
            is_refused("zeroed", disk.write_zeroes(part(2), ZeroFlags::default()).await, ErrorKind::Io)?;
            is_refused("discarded", disk.discard(part(3), WriteFlags::default()).await, ErrorKind::Io)
        };
        refused_in_part().await?;
        has_all_but(&disk, &[1, 2, 3], "after a part was written").await?;
        let lost = disk.lost_reads();
        put(&disk, 1, 11).await?;
        disk.write_zeroes(unit_span(2), ZeroFlags::default()).await.map_err(chain)?;
        disk.discard(unit_span(3), WriteFlags::default()).await.map_err(chain)?;
        disk.flush().await.map_err(chain)?;
        let has = async |disk: &Native, when: &str| {
            for (unit, value) in [(0, 1), (1, 11), (2, 0), (3, 0), (4, 5)] {
                reads(disk, unit, value, when).await?;
            }
            Ok::<(), String>(())
        };
        has(&disk, "when it was overwritten").await?;
        ensure(disk.facts().moved == 1 && disk.lost_reads() == lost, format!("{:?}", disk.facts()))?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        // It can be read again, and does not come back.
        both.faults.clear();
        let disk = both.open(3).await?;
        has(&disk, "when the medium gives it again").await?;
        let done = disk.demote(&[GuestOffset::ZERO.span(UNITS * UNIT)]).await.map_err(chain)?;
        ensure(done.units == 1 && done.left.is_empty(), format!("{done:?}"))?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        let disk = both.open_alone().await?;
        has(&disk, "home again").await?;
        disk.close().await.map_err(chain)
    })
}

/// The same of a unit whose entry is damaged, in an image that is opened for writing to salvage it.
pub(crate) fn what_the_tables_have_lost_is_overwritten_as_a_whole() -> Trial {
    let both = Both::new();
    both.world.run(async {
        four_moved(&both).await?;
        let (at, mut entry) = (ImageOffset::new(ENTRIES_AT + 2 * 32), [0; 32]);
        let mut content = both.fast.content();
        content.read(at, &mut entry);
        content.write(at, &[0x5A; 32]);
        let damaged = Drive::from_content(&both.world, content, DriveOptions::default());
        let medium = FastMedium::open(damaged.clone(), Random::from_seed(4)).await.map_err(chain)?;
        let disk = salvage(&both, Some(medium), false).await.map_err(chain)?;
        has_all_but(&disk, &[2], "before").await?;
        let part = disk.write(unit_span(2).start(), Buffer::zeroed(512), WriteFlags::default()).await;
        is_refused("written in part", part, ErrorKind::Io)?;
        put(&disk, 2, 22).await?;
        ensure(disk.facts().missing == 0 && disk.missing().is_empty(), "it is lost no more")?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        let has = async |disk: &Native, when: &str| {
            for (unit, value) in [(0, 1), (1, 2), (2, 22), (3, 4), (4, 5)] {
                reads(disk, unit, value, when).await?;
            }
            Ok::<(), String>(())
        };
        // No unit is missing, so the disk opens without being salvaged.
        let disk = open_with(&both, &both.image, Some(&damaged), false).await.map_err(chain)?;
        has(&disk, "when it was overwritten").await?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        let mut content = damaged.content();
        content.write(at, &entry);
        let mended = Drive::from_content(&both.world, content, DriveOptions::default());
        let disk = open_with(&both, &both.image, Some(&mended), false).await.map_err(chain)?;
        has(&disk, "when the entry can be read again").await?;
        let done = disk.demote(&[GuestOffset::ZERO.span(UNITS * UNIT)]).await.map_err(chain)?;
        ensure(done.units == 3 && done.left.is_empty(), format!("{done:?}"))?;
        disk.close().await.map_err(chain)
    })
}

/// Sectors of the tables cannot be read: what the medium has goes home, nothing is written there, and nothing new comes, since an
/// older copy of it may be in what is not seen.
pub(crate) fn a_bad_sector_of_the_tables_does_not_keep_the_units_there() -> Trial {
    let both = Both::new();
    both.world.run(async {
        four_moved(&both).await?;
        let all = [GuestOffset::ZERO.span(UNITS * UNIT)];
        let fails = |within| Fault {
            within: Some(within),
            repeat: Repeat::ForEver,
            ..Fault::nth(Operation::Read, 0)
        };
        let entries = ImageOffset::new(ENTRIES_AT).span(512);
        for within in [ImageOffset::ZERO.span(512), (ROWS_AT + 512).span(512), entries] {
            let (image, fast) = (both.image.content(), both.fast.content());
            both.faults.add(fails(within));
            let image = Drive::from_content(&both.world, image, DriveOptions::default());
            let options = DriveOptions { faults: both.faults.clone(), ..DriveOptions::default() };
            let fast = Drive::from_content(&both.world, fast, options);
            let medium = FastMedium::open(fast.clone(), Random::from_seed(4)).await.map_err(chain)?;
            let options = OpenOptions {
                journal_key: Some(1),
                fast: Some(medium.clone()),
                salvages: within == entries,
                ..OpenOptions::default()
            };
            let disk = Native::open(image, both.below(), options).await.map_err(chain)?;
            let promoted = disk.promote(promotion_of(4)).await;
            let row = NewRow { uuid: [8; 16], budget: 0, name: String::new() };
            let attached = medium.attach(row).await;
            let mut units = 4;
            if within.start() == ImageOffset::ZERO {
                let promoted = promoted.map_err(chain)?;
                ensure(promoted.units == 1, format!("{promoted:?}"))?;
                attached.map_err(chain)?;
                ensure(medium.forget([8; 16], false).await.map_err(chain)?, "it is forgotten")?;
                units = 5;
            } else {
                is_refused("promoted", promoted, ErrorKind::Refused)?;
                is_refused("attached", attached, ErrorKind::Refused)?;
            }
            if within == entries {
                has_all_but(&disk, &[0, 1, 2, 3], "without its entries").await?;
                disk.close().await.map_err(chain)?;
                drop(disk);
                for row in medium.rows() {
                    is_refused("forgotten", medium.forget(row.uuid, true).await, ErrorKind::Refused)?;
                }
            } else {
                has_all_but(&disk, &[], "but for a sector that nobody needs").await?;
                let done = disk.demote(&all).await.map_err(chain)?;
                ensure(done.units == units && done.left.is_empty(), format!("{done:?}"))?;
                disk.close().await.map_err(chain)?;
            }
            let is_written = |event: &vellum_sim::Event| {
                event.operation() == Operation::Write && !event.span().intersect(within).is_empty()
            };
            ensure(!fast.log().events().iter().any(is_written), format!("{within:?} was written"))?;
            both.faults.clear();
        }
        Ok(())
    })
}

/// What a medium has that was cut off comes back, and what is gone stays lost when it is made longer.
pub(crate) fn what_was_cut_off_stays_lost() -> Trial {
    let both = Both::new();
    both.world.run(async {
        four_moved(&both).await?;
        let id = FastMedium::open(both.fast.clone(), Random::from_seed(6)).await.map_err(chain)?.id();
        let len = both.fast.len();
        let cut = both.copy_of(&both.fast);
        cut.set_len(slot(2).start().bytes() + 512).await.map_err(chain)?;
        let storage: SharedStorage = cut.clone();
        let opened = async || FastMedium::open(storage.clone(), Random::from_seed(6)).await;
        is_refused("shorter", opened().await, ErrorKind::Changed)?;
        let another = FastId::new([0x99; 16]).expect("an id");
        ensure(!note_cut(&storage, another).await.map_err(chain)?, "it is another disk's")?;
        is_refused("still shorter", opened().await, ErrorKind::Changed)?;
        ensure(note_cut(&storage, id).await.map_err(chain)?, "it was cut off")?;
        ensure(!note_cut(&storage, id).await.map_err(chain)?, "that is known")?;
        let disk = salvage(&both, Some(opened().await.map_err(chain)?), false).await.map_err(chain)?;
        has_all_but(&disk, &[2, 3], "cut off").await?;
        let done = disk.demote(&[GuestOffset::ZERO.span(UNITS * UNIT)]).await.map_err(chain)?;
        let lost = [GuestOffset::new(2 * UNIT).span(2 * UNIT)];
        ensure(done.units == 2 && done.left == lost, format!("{done:?}"))?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        // Zeros in the place of what is gone.
        cut.set_len(len).await.map_err(chain)?;
        ensure(!note_cut(&storage, id).await.map_err(chain)?, "it is as long as it was")?;
        let refused = open_with(&both, &both.image, Some(&cut), false).await;
        is_refused("longer again", refused, ErrorKind::Changed)?;
        let medium = opened().await.map_err(chain)?;
        ensure(medium.room_bytes() == 2 * UNIT, format!("{} bytes", medium.room_bytes()))?;
        let disk = salvage(&both, Some(medium), false).await.map_err(chain)?;
        for unit in [2, 3] {
            let read = disk.read(GuestOffset::new(unit * UNIT), Buffer::zeroed(512)).await;
            is_refused("longer again", read, ErrorKind::Io)?;
            put(&disk, unit, 9).await?;
        }
        // An older copy may be in what was cut off, so no newer one is made.
        is_refused("promoted", disk.promote(promotion_of(4)).await, ErrorKind::Refused)?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        let behind = slot(2).start();
        let is_used =
            |event: &vellum_sim::Event| event.operation() == Operation::Write && event.span().end() > behind;
        ensure(!cut.log().events().iter().any(is_used), "what was cut off was written")?;
        let disk = open_with(&both, &both.image, Some(&cut), false).await.map_err(chain)?;
        for (unit, value) in [(0, 1), (1, 2), (2, 9), (3, 9), (4, 5)] {
            reads(&disk, unit, value, "when all is overwritten").await?;
        }
        disk.close().await.map_err(chain)
    })
}

/// Where a medium was cut off is noted on both superblocks, at the latest when it is used again.
pub(crate) fn a_cut_that_was_noted_once_counts() -> Trial {
    let both = Both::new();
    both.world.run(async {
        four_moved(&both).await?;
        let copy = ImageOffset::new(4096).span(4096);
        let id = FastMedium::open(both.fast.clone(), Random::from_seed(6)).await.map_err(chain)?.id();
        for opens in [false, true] {
            let content = both.fast.content();
            let faults = DriveOptions { faults: both.faults.clone(), ..DriveOptions::default() };
            let cut = Drive::from_content(&both.world, content, faults);
            let len = cut.len();
            cut.set_len(slot(2).start().bytes()).await.map_err(chain)?;
            let storage: SharedStorage = cut.clone();
            both.faults.add(Fault { within: Some(copy), ..Fault::nth(Operation::Write, 0) });
            is_refused("one page", note_cut(&storage, id).await, ErrorKind::Io)?;
            both.faults.clear();
            if opens {
                FastMedium::open(storage.clone(), Random::from_seed(6)).await.map_err(chain)?;
            } else {
                ensure(!note_cut(&storage, id).await.map_err(chain)?, "that is known")?;
            }
            cut.set_len(len).await.map_err(chain)?;
            for damaged in [0, 4096] {
                let longer = both.copy_of(&cut);
                let page = Buffer::zeroed(4096);
                longer.write(ImageOffset::new(damaged), page).await.map_err(chain)?;
                let medium = FastMedium::open(longer, Random::from_seed(6)).await.map_err(chain)?;
                let room = medium.room_bytes();
                ensure(room == 2 * UNIT, format!("{opens} {damaged}: room for {room} bytes"))?;
            }
        }
        Ok(())
    })
}

/// Of a row that is damaged nothing is known, and no other one suffers for it: not even if it had more than is kept in memory.
pub(crate) fn a_damaged_row_keeps_no_other_disk_away() -> Trial {
    let both = Both::new();
    both.world.run(async {
        four_moved(&both).await?;
        let other = both.copy_of(&both.fast);
        other.write(ROWS_AT + 512, Buffer::copy_of(&[7; 512])).await.map_err(chain)?;
        let entries = ImageOffset::new(ENTRIES_AT + 512);
        other.write(entries, Buffer::copy_of(&[7; 512])).await.map_err(chain)?;
        let disk = open_with(&both, &both.image, Some(&other), false).await.map_err(chain)?;
        has_all_but(&disk, &[], "beside a damaged row").await?;
        is_refused("promoted", disk.promote(promotion_of(4)).await, ErrorKind::Refused)?;
        let done = disk.demote(&[GuestOffset::ZERO.span(UNITS * UNIT)]).await.map_err(chain)?;
        ensure(done.units == 4 && done.left.is_empty(), format!("{done:?}"))?;
        disk.close().await.map_err(chain)
    })
}

/// An image that is only read shares its row with others that read it, and with none that writes.
pub(crate) fn an_image_that_is_only_read_is_open_more_than_once() -> Trial {
    let both = Both::new();
    both.world.run(async {
        four_moved(&both).await?;
        let medium = FastMedium::open(both.fast.clone(), Random::from_seed(4)).await.map_err(chain)?;
        let open = |read_only| {
            let fast = Some(medium.clone());
            let options = OpenOptions { journal_key: Some(1), fast, read_only, ..OpenOptions::default() };
            Native::open(both.image.clone(), both.below(), options)
        };
        let first = open(true).await.map_err(chain)?;
        let second = open(true).await.map_err(chain)?;
        is_refused("written beside", open(false).await, ErrorKind::Locked)?;
        first.close().await.map_err(chain)?;
        drop(first);
        reads(&second, 0, 1, "by the other one").await?;
        is_refused("written beside", open(false).await, ErrorKind::Locked)?;
        drop(second);
        let written = open(false).await.map_err(chain)?;
        is_refused("read beside", open(true).await, ErrorKind::Locked)?;
        written.close().await.map_err(chain)
    })
}

#[test]
fn salvaged() {
    a_unit_that_cannot_be_read_does_not_keep_the_others_there().unwrap();
    without_its_medium_a_disk_is_read_as_far_as_it_goes().unwrap();
    what_is_left_of_a_medium_is_read().unwrap();
    what_the_tables_have_lost_does_not_keep_the_others_there().unwrap();
    an_image_that_is_only_read_is_open_more_than_once().unwrap();
    what_is_lost_is_overwritten_as_a_whole().unwrap();
    a_bad_sector_of_the_tables_does_not_keep_the_units_there().unwrap();
    what_was_cut_off_stays_lost().unwrap();
    a_cut_that_was_noted_once_counts().unwrap();
    a_damaged_row_keeps_no_other_disk_away().unwrap();
    what_the_tables_have_lost_is_overwritten_as_a_whole().unwrap();
}
