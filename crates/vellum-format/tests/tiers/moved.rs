//! Units that only the fast medium has, and what may happen to it or to the image: each returns what went wrong.

use std::sync::Arc;

use vellum_core::{Buffer, Disk, ErrorKind, GuestOffset, ImageOffset, Random, SharedStorage, WriteFlags};
use vellum_format::FormatKind;
use vellum_format::fast::{FastId, FastMedium, Moved, Promotion, Reason, Tiers};
use vellum_format::native::check::check;
use vellum_format::native::{Native, OpenOptions};
use vellum_format::report::Repair;
use vellum_sim::{Drive, DriveOptions, Fault, Operation};

use crate::trials::{Both, Trial, UNIT, UNITS, chain, ensure, promote, put, reads, unit_span};

/// [`UNIT`], as a length in memory.
const UNIT_LEN: usize = 64 << 10;

pub(crate) async fn move_away(disk: &Native, unit: u64) -> Result<Moved, String> {
    disk.move_away(&[unit_span(unit)]).await.map_err(chain)
}

/// A disk of which the first unit is moved and the second one copied; closed.
pub(crate) async fn moved(both: &Both) -> Trial {
    let disk = both.open(1).await?;
    for unit in 0..3 {
        put(&disk, unit, 1).await?;
    }
    for unit in 0..2 {
        promote(&disk, unit).await?;
    }
    let done = move_away(&disk, 0).await?;
    ensure(done.units == 1 && disk.facts().moved == 1, format!("{done:?}"))?;
    disk.close().await.map_err(chain)
}

pub(crate) fn promotion_of(unit: u64) -> Promotion {
    Promotion { ranges: vec![unit_span(unit)], reason: Reason::Asked, copies_base: false }
}

pub(crate) fn is_refused<T>(what: &str, done: Result<T, vellum_core::Error>, kind: ErrorKind) -> Trial {
    match done {
        Err(error) if error.kind() == kind => Ok(()),
        Err(error) => Err(format!("{what}: {}", error.chain())),
        Ok(_) => Err(format!("{what}: it was done")),
    }
}

async fn is_sound(image: &Arc<Drive>) -> Trial {
    let storage: SharedStorage = image.clone();
    let mut lines = Vec::new();
    let report = check(&storage, Repair::Nothing, &mut |line| lines.push(line)).await.map_err(chain)?;
    ensure(report.is_clean(), format!("{lines:?}"))
}

pub(crate) async fn open_with(
    both: &Both,
    image: &Arc<Drive>,
    fast: Option<&Arc<Drive>>,
    read_only: bool,
) -> vellum_core::Result<Arc<Native>> {
    let fast = match fast {
        Some(fast) => Some(FastMedium::open(fast.clone(), Random::from_seed(9)).await?),
        None => None,
    };
    let options = OpenOptions { journal_key: Some(1), fast, read_only, ..OpenOptions::default() };
    Native::open(image.clone(), both.below(), options).await
}

pub(crate) fn what_is_moved_is_read_written_and_brought_back() -> Trial {
    let both = Both::new();
    both.world.run(async {
        moved(&both).await?;
        is_sound(&both.image).await?;
        let disk = both.open(2).await?;
        ensure(disk.facts().moved == 1, "it is moved in the next opening")?;
        reads(&disk, 0, 1, "from the fast medium").await?;
        ensure(disk.facts().fast_reads[0] == 1, "it was read there")?;
        // A part of it: the rest is copied back.
        let at = GuestOffset::new(4096);
        disk.write(at, Buffer::copy_of(&[5; 512]), WriteFlags::default()).await.map_err(chain)?;
        ensure(disk.facts().moved == 0, "it has come back")?;
        let bytes = disk.read(GuestOffset::ZERO, Buffer::zeroed(UNIT_LEN)).await.map_err(chain)?.to_vec();
        let expected: Vec<u8> =
            (0..UNIT_LEN).map(|at| if (4096..4608).contains(&at) { 5 } else { 1 }).collect();
        ensure(bytes == expected, "what was not written is what it was")?;
        disk.flush().await.map_err(chain)?;
        // And all of them go and come.
        for unit in 0..3 {
            promote(&disk, unit).await?;
        }
        let all = GuestOffset::ZERO.span(UNITS * UNIT);
        let done = disk.move_away(&[all]).await.map_err(chain)?;
        ensure(done.units == 3 && done.not_copied == UNITS - 3, format!("{done:?}"))?;
        disk.discard(unit_span(1), WriteFlags::default()).await.map_err(chain)?;
        disk.write_zeroes(unit_span(2).split_at(512).0, vellum_core::ZeroFlags::default())
            .await
            .map_err(chain)?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        is_sound(&both.image).await?;
        let disk = both.open(3).await?;
        ensure(disk.facts().moved == 1, "two of them were changed")?;
        reads(&disk, 2, 0, "where zeros were written").await?;
        ensure(disk.demote(&[all]).await.map_err(chain)?.units == 1, "one was there")?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        is_sound(&both.image).await?;
        let disk = both.open_alone().await?;
        let bytes = disk.read(GuestOffset::ZERO, Buffer::zeroed(UNIT_LEN)).await.map_err(chain)?.to_vec();
        ensure(bytes == expected, "the image alone has it again")
    })
}

pub(crate) fn an_image_is_not_used_without_its_medium() -> Trial {
    let both = Both::new();
    both.world.run(async {
        moved(&both).await?;
        let before = both.image.content();
        let image: SharedStorage = both.image.clone();
        let format = FormatKind::Native.format();
        for read_only in [false, true] {
            let opened = open_with(&both, &both.image, None, read_only).await;
            is_refused("opened alone", opened, ErrorKind::Refused)?;
        }
        is_refused("resized", format.resize(&image, 9 * UNIT, false).await, ErrorKind::Refused)?;
        is_refused("shrunk", format.resize(&image, UNIT, true).await, ErrorKind::Refused)?;
        is_refused("detached", format.detach_fast(&image).await, ErrorKind::Refused)?;
        is_refused("finished", format.finish(&image).await, ErrorKind::Refused)?;
        is_refused("reverted", format.revert(&image, "one").await, ErrorKind::Refused)?;
        is_refused("repaired", format.check(&image, Repair::All, &mut |_| {}).await, ErrorKind::Refused)?;
        let other = FastId::new([9; 16]).unwrap();
        is_refused("attached", format.attach_fast(&image, other, "other").await, ErrorKind::Refused)?;
        ensure(both.image.content() == before, "something was written")?;
        let named = format.read(&*image).await.map_err(chain)?.fast();
        ensure(named.is_some_and(|named| named.is_needed && named.counts), "it says so")?;
        // It is the same medium, under another name.
        format.attach_fast(&image, FastId::new([3; 16]).unwrap(), "elsewhere").await.map_err(chain)?;
        let medium = both.medium(4).await.map_err(chain)?;
        is_refused("forgotten", medium.forget([7; 16], false).await, ErrorKind::Refused)?;
        drop(medium);
        let disk = both.open(5).await?;
        reads(&disk, 0, 1, "with its medium").await?;
        disk.demote(&[unit_span(0)]).await.map_err(chain)?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        ensure(format.detach_fast(&image).await.map_err(chain)?, "nothing is moved any more")?;
        let medium = both.medium(6).await.map_err(chain)?;
        ensure(medium.forget([7; 16], false).await.map_err(chain)?, "the row is not needed any more")?;
        let disk = both.open_alone().await?;
        reads(&disk, 0, 1, "without it").await
    })
}

/// One good copy of the superblock is enough, and says the same: also while the disk is open, before a close writes both again.
pub(crate) fn each_copy_of_the_superblock_says_so() -> Trial {
    let both = Both::new();
    both.world.run(async {
        let disk = both.open(1).await?;
        put(&disk, 0, 1).await?;
        promote(&disk, 0).await?;
        ensure(move_away(&disk, 0).await?.units == 1, "it is moved")?;
        for slot in [0, 4096] {
            let mut content = both.image.content();
            content.write(ImageOffset::new(slot), &[0x5A; 512]);
            let damaged = Drive::from_content(&both.world, content, DriveOptions::default());
            let opened = open_with(&both, &damaged, None, true).await;
            is_refused("opened by the other copy", opened, ErrorKind::Refused)?;
        }
        disk.close().await.map_err(chain)
    })
}

/// The medium is one of another time, or its table is damaged.
pub(crate) fn a_medium_of_another_time_is_refused() -> Trial {
    let both = Both::new();
    both.world.run(async {
        let disk = both.open(1).await?;
        put(&disk, 0, 1).await?;
        promote(&disk, 0).await?;
        let old = both.copy_of(&both.fast);
        put(&disk, 0, 2).await?;
        put(&disk, 1, 3).await?;
        promote(&disk, 0).await?;
        promote(&disk, 1).await?;
        move_away(&disk, 0).await?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        for read_only in [false, true] {
            let opened = open_with(&both, &both.image, Some(&old), read_only).await;
            is_refused("with an old medium", opened, ErrorKind::Changed)?;
        }
        let damaged = both.damage_entries();
        let opened = open_with(&both, &both.image, Some(&damaged), false).await;
        is_refused("with a damaged table", opened, ErrorKind::Changed)?;
        let disk = open_with(&both, &both.image, Some(&damaged), true).await.map_err(chain)?;
        let read = disk.read(GuestOffset::ZERO, Buffer::zeroed(512)).await;
        is_refused("read what is lost", read, ErrorKind::Io)?;
        reads(&disk, 1, 3, "beside it").await?;
        drop(disk);
        let disk = both.open(3).await?;
        reads(&disk, 0, 2, "with its medium").await
    })
}

/// An image is put back from a copy that was made while a unit was moved.
pub(crate) fn an_image_of_another_time_is_refused_or_right() -> Trial {
    for how in ["taken back", "promoted again", "overwritten"] {
        let both = Both::new();
        both.world.run(async {
            moved(&both).await?;
            let closed = both.copy_of(&both.image);
            let disk = both.open(2).await?;
            put(&disk, 2, 4).await?;
            let in_use = both.copy_of(&both.image);
            put(&disk, 0, 2).await?;
            match how {
                "promoted again" => {
                    promote(&disk, 0).await?;
                }
                "overwritten" => {
                    for unit in 1..UNITS {
                        put(&disk, unit, 9).await?;
                        promote(&disk, unit).await?;
                    }
                }
                _ => {}
            }
            disk.close().await.map_err(chain)?;
            drop(disk);
            for copy in [closed, in_use] {
                match open_with(&both, &copy, Some(&both.copy_of(&both.fast)), false).await {
                    Err(error) => is_refused::<()>(how, Err(error), ErrorKind::Changed)?,
                    Ok(disk) => reads(&disk, 0, 1, how).await?,
                }
            }
            let disk = both.open(3).await?;
            reads(&disk, 0, 2, "in the image itself").await
        })?;
    }
    Ok(())
}

/// A copy of the image that was made before its units were moved is used, and promotes.
pub(crate) fn a_copy_from_before_the_move_takes_nothing_away() -> Trial {
    let both = Both::new();
    both.world.run(async {
        let disk = both.open(1).await?;
        put(&disk, 0, 1).await?;
        promote(&disk, 0).await?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        let copy = both.copy_of(&both.image);
        let disk = both.open(2).await?;
        move_away(&disk, 0).await?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        let disk = open_with(&both, &copy, Some(&both.fast), false).await.map_err(chain)?;
        reads(&disk, 0, 1, "in the copy").await?;
        for unit in 0..2 {
            put(&disk, unit, 2).await?;
        }
        // What it does with the row would be the end of what the row is needed for.
        is_refused("promoted", disk.promote(promotion_of(1)).await, ErrorKind::Refused)?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        let disk = both.open(3).await?;
        reads(&disk, 0, 1, "in the image whose unit was moved").await
    })
}

/// What the medium has is not what was copied: nothing is freed, and the copy is not read any more.
pub(crate) fn a_copy_that_is_not_the_same_is_not_the_only_one() -> Trial {
    let both = Both::new();
    both.world.run(async {
        let disk = both.open(1).await?;
        put(&disk, 0, 1).await?;
        promote(&disk, 0).await?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        let mut content = both.fast.content();
        content.write(ImageOffset::new((576 << 10) + 512), &[9; 512]); // slot 0
        let damaged = Drive::from_content(&both.world, content, DriveOptions::default());
        let disk = open_with(&both, &both.image, Some(&damaged), false).await.map_err(chain)?;
        is_refused("moved", disk.move_away(&[unit_span(0)]).await, ErrorKind::Corrupt)?;
        ensure(disk.demote(&[unit_span(0)]).await.map_err(chain)?.units == 0, "it was taken away")?;
        ensure(disk.facts().units == 0, "it is read from the image")?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        let disk = both.open_alone().await?;
        let bytes = disk.read(GuestOffset::ZERO, Buffer::zeroed(4096)).await.map_err(chain)?.to_vec();
        ensure(bytes == [1; 4096], "the image has it")
    })
}

pub(crate) fn snapshots_and_moved_units_exclude_each_other() -> Trial {
    let both = Both::new();
    both.world.run(async {
        moved(&both).await?;
        let disk = both.open(2).await?;
        is_refused("a snapshot", disk.snapshot_create("one", 0).await, ErrorKind::Unsupported)?;
        disk.demote(&[unit_span(0)]).await.map_err(chain)?;
        disk.snapshot_create("one", 0).await.map_err(chain)?;
        promote(&disk, 0).await?;
        is_refused("a move", disk.move_away(&[unit_span(0)]).await, ErrorKind::Unsupported)?;
        disk.snapshot_delete("one").await.map_err(chain)?;
        ensure(move_away(&disk, 0).await?.units == 1, "without a snapshot")?;
        reads(&disk, 0, 1, "moved").await
    })
}

pub(crate) fn what_the_medium_fails_is_an_error_and_nothing_else() -> Trial {
    let both = Both::new();
    both.world.run(async {
        moved(&both).await?;
        let disk = both.open(2).await?;
        let all = |disk: Arc<Native>| async move { disk.read(GuestOffset::ZERO, Buffer::zeroed(4096)).await };
        both.faults.add(Fault::nth(Operation::Read, 0));
        is_refused("read", all(disk.clone()).await, ErrorKind::Io)?;
        ensure(disk.lost_reads() == 1 && disk.facts().trouble.is_some(), format!("{:?}", disk.facts()))?;
        both.faults.add(Fault::nth(Operation::Read, 0));
        let data = Buffer::copy_of(&[2; 512]);
        is_refused(
            "written",
            disk.write(GuestOffset::ZERO, data, WriteFlags::default()).await,
            ErrorKind::Io,
        )?;
        reads(&disk, 0, 1, "when it works again").await?;
        reads(&disk, 2, 1, "what is in the image").await?;
        put(&disk, 0, 2).await?;
        reads(&disk, 0, 2, "written").await?;
        disk.close().await.map_err(chain)
    })
}

/// A unit that cannot be read, on the medium or in the image, stays as it is; those before and behind it are moved, durably.
pub(crate) fn what_cannot_be_read_is_left_and_the_rest_is_moved() -> Trial {
    for fails_in_image in [false, true] {
        let both = Both::new();
        both.world.run(async {
            let disk = both.open(1).await?;
            for unit in 0..4 {
                put(&disk, unit, 1).await?;
                promote(&disk, unit).await?;
            }
            let map = disk.map(unit_span(1)).await.map_err(chain)?;
            let [vellum_core::Extent { place: vellum_core::Place::Data { at, .. }, .. }] = &map[..] else {
                return Err(format!("{map:?}"));
            };
            let (faults, at) = match fails_in_image {
                true => (both.image.faults(), *at),
                false => (both.fast.faults(), ImageOffset::new((576 << 10) + UNIT)), // slot 1
            };
            faults.add(Fault { within: Some(at.span(UNIT)), ..Fault::nth(Operation::Read, 0) });
            let done = disk.move_away(&[GuestOffset::ZERO.span(3 * UNIT)]).await.map_err(chain)?;
            ensure(done.units == 2 && done.left == [unit_span(1)], format!("{done:?}"))?;
            ensure(done.why.as_ref().is_some_and(|why| why.kind() == ErrorKind::Io), format!("{done:?}"))?;
            ensure(disk.facts().moved == 2, "two are moved")?;
            // As if power were cut now.
            let (image, fast) = (both.copy_of(&both.image), both.copy_of(&both.fast));
            let cut = open_with(&both, &image, Some(&fast), false).await.map_err(chain)?;
            ensure(cut.facts().moved == 2, "two are moved durably")?;
            for unit in 0..4 {
                reads(&cut, unit, 1, "after a cut").await?;
            }
            drop(cut);
            let again = move_away(&disk, 1).await?;
            ensure(again.units == 1 && again.left.is_empty(), "it can be read again")?;
            disk.close().await.map_err(chain)?;
            drop(disk);
            is_sound(&both.image).await
        })?;
    }
    Ok(())
}

#[test]
fn moved_units() {
    what_cannot_be_read_is_left_and_the_rest_is_moved().unwrap();
    what_is_moved_is_read_written_and_brought_back().unwrap();
    snapshots_and_moved_units_exclude_each_other().unwrap();
    what_the_medium_fails_is_an_error_and_nothing_else().unwrap();
    a_copy_that_is_not_the_same_is_not_the_only_one().unwrap();
}

#[test]
fn moved_units_need_their_medium() {
    an_image_is_not_used_without_its_medium().unwrap();
    each_copy_of_the_superblock_says_so().unwrap();
    a_medium_of_another_time_is_refused().unwrap();
    an_image_of_another_time_is_refused_or_right().unwrap();
    a_copy_from_before_the_move_takes_nothing_away().unwrap();
}

/// Guests write nothing to the fast medium, also where units are moved.
#[test]
fn a_guest_never_writes_to_the_medium_that_alone_has_a_unit() {
    let both = Both::new();
    both.world
        .run(async {
            moved(&both).await?;
            let disk = both.open(2).await?;
            let writes = || {
                both.fast.log().events().iter().filter(|event| event.operation() != Operation::Read).count()
            };
            let before = writes();
            reads(&disk, 0, 1, "moved").await?;
            put(&disk, 0, 2).await?;
            ensure(writes() == before, "a guest's write reached the fast medium")?;
            disk.close().await.map_err(chain)?;
            drop(disk);
            // Nothing is there alone any more, and that was said.
            let image: SharedStorage = both.image.clone();
            let named = FormatKind::Native.format().read(&*image).await.map_err(chain)?.fast();
            ensure(named.is_some_and(|named| !named.is_needed), "the medium is needed still")?;
            let disk = both.open(3).await?;
            reads(&disk, 0, 2, "it is there").await
        })
        .unwrap();
}
