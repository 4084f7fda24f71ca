//! Written homes that can name no session: what one opening leaves for the next, over every crash.

mod common;
use vellum_flash as flash;

use std::time::Duration;

use common::named::{BYTES, Counts, Opening, compare, explore, open};
use futures_lite::future::block_on;
use vellum_core::{Buffer, Disk, GuestOffset, ImageOffset, MemoryStorage, SharedStorage, WriteFlags};
use vellum_flash::FlashPolicy;
use vellum_sim::{Content, Drive, DriveOptions, Fault, FaultPlan, Operation, World};

#[allow(clippy::print_stderr, reason = "how much was looked at is worth knowing")]
fn all(slots: u64, programs: u64) {
    let is_soak = std::env::var("VELLUM_EXPLORE").is_ok_and(|what| what == "all");
    let mut counts = Counts::default();
    for seed in 0..programs * if is_soak { 20 } else { 1 } {
        if let Err(what) = explore(slots, seed, &mut counts) {
            panic!("{slots} slots, seed {seed}: {what}");
        }
    }
    eprintln!("{slots} slots: {counts:?}");
    assert!(counts.warm > counts.programs && counts.cold > counts.programs, "{counts:?}");
}

#[test]
fn with_slots_for_all() {
    all(64, 12);
}

#[test]
fn with_few_slots() {
    all(12, 12);
}

/// After a flush of home that failed nobody knows what home has: the next opening finds nothing, also when the close succeeds.
#[test]
fn a_flush_of_home_that_failed_leaves_no_name() {
    let policies = [FlashPolicy::WriteThrough, FlashPolicy::ReadOnly];
    for (policy, fails) in policies.into_iter().flat_map(|policy| [(policy, true), (policy, false)]) {
        let world = World::new(5);
        let faults = FaultPlan::none();
        let options = DriveOptions { faults: faults.clone(), ..DriveOptions::default() };
        let content = Content::of(&vec![7; usize::try_from(BYTES).unwrap()]);
        let home = Drive::from_content(&world, content, options);
        let (home, flash): (SharedStorage, SharedStorage) = (home, MemoryStorage::new("flash"));
        let blocks = world.run(async {
            let first = open(&flash, &home, 64, policy, Some(1), 1).await.unwrap();
            for block in 0..4 {
                let at = GuestOffset::new(block * 4096);
                drop(first.disk.read(at, Buffer::for_overwrite(4096)).await.unwrap());
            }
            for number in 0..8 {
                first.cache.tend(Duration::from_secs(number)).await;
            }
            let at = GuestOffset::new(5 * 4096);
            first.disk.write(at, Buffer::copy_of(&[8; 4096]), WriteFlags::default()).await.unwrap();
            if fails {
                faults.add(Fault::nth(Operation::Flush, 0));
            }
            assert_eq!(first.disk.flush().await.is_err(), fails, "{policy:?}");
            assert!(first.blocks() >= 4, "{policy:?}");
            first.disk.flush().await.unwrap();
            first.close(Some(1)).await.unwrap();
            let second = open(&flash, &home, 64, policy, Some(1), 2).await.unwrap();
            second.blocks()
        });
        assert_eq!(blocks > 0, !fails, "{policy:?}, {blocks} blocks");
    }
}

/// A name is found once: who opens it takes it away. A name that was never left finds nothing, and rows without one are gone.
#[test]
fn what_is_left_is_found_by_its_name_alone() {
    let (flash, home): (SharedStorage, SharedStorage) =
        (MemoryStorage::new("flash"), MemoryStorage::new("home"));
    block_on(async {
        home.set_len(BYTES).await.unwrap();
        home.write(ImageOffset::new(0), Buffer::copy_of(&[9; 65536])).await.unwrap();
        let through = FlashPolicy::WriteThrough;
        let fill = async |open: &Opening| {
            open.disk
                .write(GuestOffset::ZERO, Buffer::copy_of(&[5; 8192]), WriteFlags::default())
                .await
                .unwrap();
        };
        let first = open(&flash, &home, 64, through, None, 1).await.unwrap();
        fill(&first).await;
        first.close(Some(1)).await.unwrap();
        let other = open(&flash, &home, 64, through, Some(2), 2).await.unwrap();
        assert_eq!(other.blocks(), 0);
        other.close(None).await.unwrap();
        let again = open(&flash, &home, 64, through, Some(1), 3).await.unwrap();
        assert_eq!(again.blocks(), 2);
        compare("again", &*again.disk, &*home).await.unwrap();
        // Killed: the name is gone.
        drop(again);
        let cold = open(&flash, &home, 64, through, Some(1), 4).await.unwrap();
        assert_eq!((cold.blocks(), cold.cache.rows().len()), (0, 2));
        fill(&cold).await;
        cold.close(None).await.unwrap();
        let last = open(&flash, &home, 64, FlashPolicy::ReadOnly, Some(1), 5).await.unwrap();
        assert_eq!((last.blocks(), last.cache.rows().len()), (0, 2), "that of the kill, and its own");
    });
}
