//! Failing, holding and counting chosen operations.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use common::{any_order, drive_of, read, span, write};
use vellum_core::{Error, ErrorKind, Result, Storage, Zeroes};
use vellum_sim::{
    Delay, DriveOptions, Effect, Fault, FaultPlan, Operation, Operations, Repeat, World, fault_loop,
};

fn kinds(results: Vec<Result<()>>) -> Vec<Option<ErrorKind>> {
    results.into_iter().map(|result| result.err().map(|error| error.kind())).collect()
}

#[test]
fn the_nth_fails_once_or_for_ever_until_the_plan_is_cleared() -> Result<()> {
    let world = World::new(1);
    let nth = Fault::nth(Operation::Write, 1);
    for (repeat, last) in [(Repeat::Once, None), (Repeat::ForEver, Some(ErrorKind::NoSpace))] {
        let faults = FaultPlan::of(Fault { repeat, error: ErrorKind::NoSpace, ..nth.clone() });
        let drive = drive_of(&world, 1 << 16, DriveOptions { faults, ..DriveOptions::default() });
        world.run(async {
            let mut results = Vec::new();
            for _ in 0..3 {
                results.push(write(&*drive, 0, 512, 1).await);
                drive.flush().await?;
                read(&*drive, 0, 1).await?;
            }
            assert_eq!(kinds(results), [None, Some(ErrorKind::NoSpace), last]);
            drive.faults().clear();
            write(&*drive, 0, 512, 1).await
        })?;
        assert_eq!(drive.faults().seen(Operation::Write), 4);
        assert_eq!(drive.faults().seen(Operations::ALL), 10);
        assert_eq!(drive.faults().hits(), if repeat == Repeat::Once { 1 } else { 2 });
    }
    Ok(())
}

#[test]
fn each_kind_can_fail_and_only_where_it_should() {
    let world = World::new(1);
    for operation in Operation::ALL {
        let faults = FaultPlan::of(Fault { within: Some(span(4096, 4096)), ..Fault::nth(operation, 0) });
        if operation == Operation::Flush {
            // A flush has no place.
            faults.clear();
            faults.add(Fault::nth(operation, 0));
        }
        let drive = drive_of(&world, 1 << 16, DriveOptions { faults, ..DriveOptions::default() });
        world.run(async {
            for start in [0, 4096] {
                let here = span(start, 512);
                let results = [
                    (Operation::Read, read(&*drive, start, 512).await.map(drop)),
                    (Operation::Write, write(&*drive, start, 512, 1).await),
                    (Operation::WriteZeroes, drive.write_zeroes(here, Zeroes::MayUnmap).await),
                    (Operation::Discard, drive.discard(here).await),
                    (Operation::Preallocate, drive.preallocate(here).await),
                ];
                for (kind, result) in results {
                    assert_eq!(result.is_err(), kind == operation && start == 4096, "{kind} at {start}");
                }
            }
            assert_eq!(drive.set_len(5000).await.is_err(), operation == Operation::SetLen);
            assert_eq!(drive.flush().await.is_err(), operation == Operation::Flush);
        });
        assert_eq!(drive.faults().hits(), 1, "{operation}");
    }
}

/// Contract 5.
#[test]
fn a_failed_write_may_have_changed_some_of_its_sectors_and_no_others() {
    let mut partly = 0;
    for seed in 0..30 {
        for (effect, length) in [(Effect::None, 0), (Effect::Some, 8), (Effect::All, 8)] {
            let world = World::new(seed);
            let faults = FaultPlan::of(Fault { effect, ..Fault::nth(Operation::Write, 0) });
            let drive = drive_of(&world, 8192, DriveOptions { faults, ..DriveOptions::default() });
            world.run(write(&*drive, 2048, 4096, 7)).expect_err("it fails");
            let content = drive.content().to_vec();
            assert!(content[..2048].iter().chain(&content[6144..]).all(|byte| *byte == 0));
            let sectors: Vec<&[u8]> = content[2048..6144].chunks(512).collect();
            assert!(sectors.iter().all(|sector| **sector == [0; 512] || **sector == [7; 512]));
            let changed = sectors.iter().filter(|sector| sector[0] == 7).count();
            assert!(changed <= length && (effect != Effect::All || changed == 8));
            partly += usize::from(effect == Effect::Some && (1..8).contains(&changed));
            world.run(write(&*drive, 2048, 4096, 8)).expect("it may be tried again");
        }
    }
    assert!(partly > 20, "{partly}");
}

#[test]
fn a_failed_write_without_effect_does_not_make_the_drive_longer() {
    let world = World::new(1);
    let faults = FaultPlan::of(Fault::nth(Operation::Write, 0));
    let drive = drive_of(&world, 1000, DriveOptions { faults, ..DriveOptions::default() });
    world.run(write(&*drive, 900, 500, 7)).expect_err("it fails");
    assert_eq!(drive.len(), 1000);
    assert_eq!(drive.content().to_vec(), [0; 1000]);
}

/// A flush that ran beside the one that failed must not promise what that one lost.
#[test]
fn a_flush_beside_a_failed_one_fails_too() {
    let world = World::new(1);
    let faults = FaultPlan::of(Fault::nth(Operation::Flush, 0));
    let drive = drive_of(&world, 4096, DriveOptions { faults, ..DriveOptions::default() });
    let hold = drive.hold(Operation::Flush);
    world.run(async {
        let flush = || {
            let drive = drive.clone();
            world.spawn(async move { drive.flush().await })
        };
        let (first, second) = (flush(), flush());
        hold.caught(2).await;
        hold.release();
        assert_eq!(first.await.expect_err("it fails").kind(), ErrorKind::Io);
        assert_eq!(second.await.expect_err("it fails").kind(), ErrorKind::Poisoned);
    });
}

/// A scenario of three operations; all of them are met in every variant, and the last run meets none.
#[test]
fn a_fault_loop_fails_every_operation_in_turn() {
    let report = fault_loop(1, async |world, plan| {
        let options = DriveOptions { faults: plan.clone(), ..DriveOptions::default() };
        let drive = drive_of(world, 1 << 16, options);
        let result = async {
            write(&*drive, 0, 512, 1).await?;
            drive.flush().await?;
            read(&*drive, 0, 512).await?;
            Ok::<_, Error>(())
        }
        .await;
        assert_eq!(result.is_err(), plan.hits() > 0);
    });
    assert_eq!((report.runs, report.failures), (8 * 4, 8 * 3));
}

#[test]
fn a_fault_loop_says_which_operation_it_was() {
    let careless = || {
        fault_loop(9, async |world, plan| {
            let options = DriveOptions { faults: plan.clone(), ..DriveOptions::default() };
            let drive = drive_of(world, 1 << 16, options);
            write(&*drive, 0, 512, 1).await.ok();
            drive.flush().await.expect("nobody thought of this");
        });
    };
    let panic = catch_unwind(AssertUnwindSafe(careless)).expect_err("it is found");
    let message = panic.downcast_ref::<String>().expect("with a message");
    assert!(
        message.starts_with("operation 1 fails (Once, Io, effect None): seed 9 at 0ns: nobody"),
        "{message}"
    );
}

#[test]
fn reads_go_on_while_a_flush_is_held() -> Result<()> {
    let world = World::new(1);
    let options = DriveOptions { delay: any_order(), ..DriveOptions::default() };
    let drive = drive_of(&world, 1 << 16, options);
    world.run(async {
        let hold = drive.hold(Operation::Flush);
        let flush = world.spawn({
            let drive = drive.clone();
            async move { drive.flush().await }
        });
        hold.caught(1).await;
        let before = world.now();
        for _ in 0..10 {
            read(&*drive, 0, 4096).await?;
        }
        assert!(world.now() - before < Duration::from_millis(6));
        assert!(!flush.is_finished());
        assert_eq!((hold.count(), drive.in_flight()), (1, 1));
        hold.release();
        flush.await
    })
}

#[test]
fn a_hold_on_a_run_lets_others_pass_and_can_release_one_by_one() -> Result<()> {
    let world = World::new(1);
    let drive = drive_of(&world, 1 << 16, DriveOptions::default());
    let hold = drive.hold_within(Operation::Write | Operation::WriteZeroes, span(4096, 4096));
    world.run(async {
        write(&*drive, 0, 4096, 1).await?;
        let writers = [1u8, 2].map(|value| {
            let drive = drive.clone();
            world.spawn(async move { write(&*drive, 4000, 200, value).await })
        });
        hold.caught(2).await;
        let [first, second] = writers;
        assert!(hold.release_one());
        first.await?;
        assert_eq!(read(&*drive, 4096, 1).await?, [1]);
        assert!(!second.is_finished());
        drop(hold);
        second.await?;
        assert_eq!(read(&*drive, 4096, 1).await?, [2]);
        Ok(())
    })
}

#[test]
fn counts_are_reported_since_a_mark() -> Result<()> {
    let world = World::new(1);
    let delay = Delay::fixed(Duration::from_micros(10)).with_flush(Duration::from_millis(500));
    let drive = drive_of(&world, 1 << 16, DriveOptions { delay, ..DriveOptions::default() });
    world.run(async {
        write(&*drive, 0, 4096, 1).await?;
        let mark = drive.counts();
        write(&*drive, 0, 512, 1).await?;
        drive.flush().await?;
        let since = drive.counts_since(mark);
        assert_eq!((since.writes, since.bytes_written, since.flushes, since.reads), (1, 512, 1, 0));
        assert_eq!(world.now(), Duration::from_micros(500_020));
        Ok(())
    })
}
