//! Interleavings, crashes and failing drives.
//!
//! Each test prints its seed when it fails; the same seed gives the same run.

use vellum_core::{Disk, ErrorKind, GuestOffset, ZeroFlags};
use vellum_sim::{Fault, FaultPlan, Operation, Repeat, World};

use super::common::native::{NativeSetup, encrypted_setups, native_setups};
use super::common::{busy_drive, sim};

#[test]
fn the_contract_holds_when_the_drive_answers_in_any_order() {
    sim::contract_in_any_order(&native_setups());
    sim::contract_in_any_order(&encrypted_setups());
}

/// A long write is done in pieces. Wherever it begins, no piece ends within a sector: a kill between two of
/// them leaves each sector old or new.
#[test]
fn a_kill_between_the_pieces_of_a_long_write_tears_no_sector() {
    let k = |kib: u64| kib << 10;
    let setups = [
        NativeSetup::linear("linear over a base", k(1024)).over(vec![9; 600_000], k(16)),
        NativeSetup::table("table", k(1024), k(64)),
        NativeSetup::zoned("zoned", k(1024), k(64), k(1024)),
    ];
    for setup in setups {
        sim::kill_between_pieces(&setup, 400_001, false);
    }
}

/// Several guests at once, then a crash at many moments, many ways. Whatever is left opens, is recovered, and
/// reads as the contract allows.
#[test]
fn crashes_of_a_busy_image() {
    sim::crashes_of_a_busy_image(&native_setups());
    sim::crashes_of_a_busy_image(&encrypted_setups());
}

/// The Nth host operation fails, for every N, once and forever, with and without space: no wrong byte after
/// opening again, and every error says what it was about.
#[test]
fn every_host_operation_fails_once() {
    let allocating = Operation::Write | Operation::WriteZeroes | Operation::Preallocate;
    sim::every_host_operation_fails(&native_setups(), allocating, 15);
    sim::every_host_operation_fails(&encrypted_setups(), allocating, 15);
}

/// Zeros over a base need no space but that of the masks. Where the host is full the request says so, and the
/// disk lives on: the space is not missed later, when the journal takes the masks home.
#[test]
fn space_for_masks_is_there_before_a_change_is_accepted() {
    for setup in native_setups().into_iter().filter(|setup| setup.name.contains("over a base")) {
        let world = World::new(0);
        let plan = FaultPlan::none();
        let drive = busy_drive(&world, setup.empty_image(), plan.clone());
        world.run(async {
            let disk = setup.open(&drive).await.unwrap();
            let zero = async |at: u64| {
                disk.write_zeroes(GuestOffset::new(at).span(4096), ZeroFlags::default()).await
            };
            let full = Fault {
                error: ErrorKind::NoSpace,
                repeat: Repeat::ForEver,
                ..Fault::nth(Operation::Preallocate, 0)
            };
            plan.add(full);
            assert_eq!(zero(4096).await.expect_err(setup.name).kind(), ErrorKind::NoSpace);
            disk.flush().await.unwrap();
            plan.clear();
            zero(4096).await.unwrap();
            disk.flush().await.unwrap();
            disk.close().await.unwrap();
        });
        assert!(plan.hits() > 0, "{}", setup.name);
    }
}

#[test]
fn after_a_failed_flush_nothing_is_written_until_the_image_is_reopened() {
    for setup in native_setups() {
        sim::nothing_is_written_after_a_failed_flush(&setup, 512);
    }
}
