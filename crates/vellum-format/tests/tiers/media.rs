//! What an image and a fast medium do in trouble, and who writes where.

use futures_lite::future::block_on;
use vellum_core::{Disk, GuestOffset, Random, SharedStorage, WriteFlags};
use vellum_format::FormatKind;
use vellum_format::fast::{FastId, FastMedium, NewRow, Promotion, Reason, Tiers};
use vellum_format::native::{Native, OpenOptions};
use vellum_sim::{Drive, Fault, Operation};

use crate::trials::{
    Both, UNIT, UNITS, a_copy_of_an_image_in_use_does_not_read_what_was_promoted_later,
    a_copy_of_the_image_does_not_read_the_copies_of_the_original,
    a_medium_that_has_forgotten_is_not_believed, a_slot_that_is_written_again_has_no_entry_meanwhile,
    a_unit_that_was_written_while_its_entry_was_lost_stays_written, an_earlier_promotion_does_not_come_back,
    another_disk_does_not_read_what_its_row_had_before, chain,
    damaged_entries_do_not_bring_an_earlier_promotion_back, ensure, promote, put, reads, unit_span,
    what_another_disk_promotes_brings_no_old_copies_back, what_was_void_stays_void,
};

#[test]
fn copies_of_images_and_old_media() {
    a_copy_of_the_image_does_not_read_the_copies_of_the_original().unwrap();
    a_medium_that_has_forgotten_is_not_believed().unwrap();
    what_was_void_stays_void().unwrap();
}

#[test]
fn copies_that_are_put_back_and_damaged_entries() {
    a_copy_of_an_image_in_use_does_not_read_what_was_promoted_later().unwrap();
    an_earlier_promotion_does_not_come_back().unwrap();
    damaged_entries_do_not_bring_an_earlier_promotion_back().unwrap();
    another_disk_does_not_read_what_its_row_had_before().unwrap();
    what_another_disk_promotes_brings_no_old_copies_back().unwrap();
    a_slot_that_is_written_again_has_no_entry_meanwhile().unwrap();
    a_unit_that_was_written_while_its_entry_was_lost_stays_written().unwrap();
}

fn writes_of(drive: &Drive) -> usize {
    let log = drive.log();
    let is_change = |operation: Operation| !matches!(operation, Operation::Read);
    log.events().iter().filter(|event| is_change(event.operation())).count()
}

/// Row H10 of the paper: all of a guest's writes go to the slow medium.
#[test]
fn a_guest_never_writes_to_the_fast_medium() {
    let both = Both::new();
    both.world
        .run(async {
            let disk = both.open(1).await?;
            for unit in 0..UNITS {
                put(&disk, unit, 1).await?;
            }
            let promotion = Promotion {
                ranges: vec![GuestOffset::ZERO.span(UNITS * UNIT)],
                reason: Reason::Asked,
                copies_base: false,
            };
            let done = disk.promote(promotion).await.map_err(chain)?;
            ensure(done.units == UNITS, format!("{done:?}"))?;
            let (before, slow) = (writes_of(&both.fast), writes_of(&both.image));
            for unit in 0..UNITS {
                reads(&disk, unit, 1, "from the fast medium").await?;
            }
            ensure(disk.facts().fast_reads[0] == UNITS, "all of it is read from the fast medium")?;
            for unit in 0..UNITS {
                put(&disk, unit, 2).await?;
                reads(&disk, unit, 2, "once it is written").await?;
            }
            disk.write_zeroes(unit_span(0), vellum_core::ZeroFlags::default()).await.map_err(chain)?;
            disk.discard(unit_span(1), WriteFlags::default()).await.map_err(chain)?;
            disk.close().await.map_err(chain)?;
            ensure(writes_of(&both.fast) == before, "a guest's write reached the fast medium")?;
            ensure(writes_of(&both.image) > slow, "they went to the slow one")
        })
        .unwrap();
}

#[test]
fn a_read_that_the_fast_medium_fails_is_answered_by_the_image() {
    let both = Both::new();
    both.world
        .run(async {
            let disk = both.open(1).await?;
            put(&disk, 0, 1).await?;
            promote(&disk, 0).await?;
            both.faults.add(Fault::nth(Operation::Read, 0));
            reads(&disk, 0, 1, "although the medium fails").await?;
            ensure(disk.facts().failed_reads == 1, format!("{:?}", disk.facts()))?;
            reads(&disk, 0, 1, "afterwards").await?;
            ensure(disk.facts().fast_reads[0] == 1, "the medium works again")
        })
        .unwrap();
}

#[test]
fn after_a_failed_flush_of_the_medium_nothing_is_promoted_and_all_is_read() {
    let both = Both::new();
    both.world
        .run(async {
            let disk = both.open(1).await?;
            put(&disk, 0, 1).await?;
            put(&disk, 1, 2).await?;
            promote(&disk, 0).await?;
            both.faults.add(Fault::nth(Operation::Flush, 0));
            ensure(promote(&disk, 1).await.is_err(), "the flush fails")?;
            ensure(promote(&disk, 1).await.is_err(), "and nothing is promoted until it is opened again")?;
            reads(&disk, 0, 1, "from its copy").await?;
            reads(&disk, 1, 2, "from the image").await?;
            put(&disk, 0, 3).await?;
            disk.close().await.map_err(chain)?;
            drop(disk);
            let disk = both.open(2).await?;
            reads(&disk, 0, 3, "once it was written").await?;
            reads(&disk, 1, 2, "as before").await
        })
        .unwrap();
}

#[test]
fn a_larger_disk_keeps_its_copies_and_a_snapshot_reads_the_slow_medium() {
    let both = Both::new();
    both.world
        .run(async {
            let disk = both.open(1).await?;
            put(&disk, 0, 1).await?;
            disk.snapshot_create("one", 0).await.map_err(chain)?;
            put(&disk, 0, 2).await?;
            promote(&disk, 0).await?;
            disk.close().await.map_err(chain)?;
            drop(disk);
            let image: SharedStorage = both.image.clone();
            FormatKind::Native.format().resize(&image, 9 * UNIT, false).await.map_err(chain)?;
            let disk = both.open(2).await?;
            ensure(disk.facts().units == 1, "the copy counts")?;
            reads(&disk, 0, 2, "after the disk has grown").await?;
            drop(disk);
            let fast = Some(both.medium(3).await.map_err(chain)?);
            let options = OpenOptions { snapshot: Some("one".to_owned()), fast, ..OpenOptions::default() };
            let snapshot = Native::open(image, None, options).await.map_err(chain)?;
            reads(&snapshot, 0, 1, "in the snapshot").await
        })
        .unwrap();
}

#[test]
fn a_budget_is_kept_and_slots_come_back() {
    let both = Both::new();
    both.world
        .run(async {
            let medium = both.medium(1).await.map_err(chain)?;
            medium
                .attach(NewRow { uuid: [7; 16], budget: 2 * UNIT, name: String::new() })
                .await
                .map_err(chain)?;
            let options =
                OpenOptions { journal_key: Some(1), fast: Some(medium.clone()), ..OpenOptions::default() };
            let disk = Native::open(both.image.clone(), None, options).await.map_err(chain)?;
            for unit in 0..3 {
                put(&disk, unit, 1).await?;
            }
            for (unit, units) in [(0, 1), (1, 1), (2, 0)] {
                let done = promote(&disk, unit).await?;
                ensure(done.units == units && done.no_room == 1 - units, format!("{unit}: {done:?}"))?;
            }
            put(&disk, 0, 2).await?;
            let done = promote(&disk, 2).await?;
            ensure(done.units == 1, format!("the slot of the unit that was written is free: {done:?}"))?;
            ensure(disk.facts().used == 2 * UNIT, "both slots are taken")?;
            ensure(disk.demote(&[unit_span(2)]).await.map_err(chain)?.units == 1, "it is taken back")?;
            disk.close().await.map_err(chain)?;
            drop(disk);
            ensure(medium.forget([7; 16], false).await.map_err(chain)?, "the row is there")?;
            ensure(medium.free_bytes() == medium.room_bytes(), "all slots are free")
        })
        .unwrap();
}

#[test]
fn an_image_that_was_detached_can_be_attached_again() {
    let both = Both::new();
    both.world.run(async {
        let image: SharedStorage = both.image.clone();
        let format = FormatKind::Native.format();
        let places = |head: Box<dyn vellum_format::image::Head>| head.fast().is_some();
        for _ in 0..3 {
            assert!(format.detach_fast(&image).await.unwrap());
            assert!(!places(format.read(&*image).await.unwrap()));
            assert!(!format.detach_fast(&image).await.unwrap());
            format.attach_fast(&image, FastId::new([4; 16]).unwrap(), "another").await.unwrap();
            let head = format.read(&*image).await.unwrap();
            let named = head.fast().unwrap();
            assert_eq!((named.name.as_str(), named.counts, named.number), ("another", false, None));
        }
        let disk = both.open(1).await.unwrap();
        assert!(disk.facts().trouble.is_some(), "it names another medium");
        put(&disk, 0, 1).await.unwrap();
        reads(&disk, 0, 1, "from the image").await.unwrap();
        disk.close().await.unwrap();
    });
}

#[test]
fn what_is_no_fast_medium_is_refused() {
    block_on(async {
        for bytes in [vec![], vec![0; 8192], vec![7; 1 << 20]] {
            let storage = vellum_core::MemoryStorage::holding("medium", &bytes);
            assert!(FastMedium::open(storage, Random::from_seed(1)).await.is_err());
        }
    });
}
