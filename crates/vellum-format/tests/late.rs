//! An older write that lands where a unit was zeroed meanwhile, and is being filled again.
//!
//! ```text
//!   W writes in place ───────── held ─────────────────► lands, answered
//!          unit made zero, answered
//!                 N writes the unit again ─ its bytes are there ── held ────────────────► published, answered
//!                                                           Z zeros, sent after W's answer
//! ```
//!
//! What must hold: W was answered before Z was sent, so no read returns W's bytes once Z was answered, with a
//! crash or without one (contract 1 and 3). And a journal's check of N's bytes must not fail because of W:
//! what was flushed with them would be lost. With the seeded mistake each of these fails
//! (`crates/vellum-seeded/tests/found.rs`).

#[path = "late/trials.rs"]
mod trials;

use futures_lite::future::{block_on, poll_once};
use trials::{CLUSTER, Fixture, all, flushed_beside, read_again, sector, write, zero};
use vellum_core::{Disk, ErrorKind, HostTally, SharedStorage};
use vellum_format::qcow2::check::check;
use vellum_format::qcow2::{CreateOptions, Header, OpenOptions};
use vellum_format::report::Repair;

#[test]
fn what_was_overwritten_does_not_come_back() {
    for options in all() {
        let read = read_again(&options);
        assert!(read == 3 || read == 0, "{options:?}: the sector reads as {read}");
    }
}

/// Flushes of the host that a cluster costs which was zero and is written again, while a request for another
/// one hangs. `None`: it waits for that.
fn flushes_beside_a_hung_request(options: &CreateOptions, is_hung: bool) -> Option<u64> {
    let fixture = Fixture::new(options.clone());
    let tally = HostTally::default();
    let disk = fixture.open_with(OpenOptions { tally: tally.clone(), ..OpenOptions::default() });
    for cluster in [0, 1] {
        block_on(write(&disk, cluster * CLUSTER, vec![1; 8192])).unwrap();
    }
    block_on(disk.flush()).unwrap();
    fixture.held.hold(2);
    let mut hung = write(&disk, 5 * CLUSTER, vec![2; 8192]);
    if is_hung {
        assert!(block_on(poll_once(&mut hung)).is_none(), "it hangs");
    }
    zero(&disk, 0, CLUSTER, false);
    let flushes = || tally.data.counts().flushes + tally.metadata.counts().flushes;
    let before = flushes();
    let mut newer = write(&disk, 4096, vec![3; 512]);
    let answered = block_on(poll_once(&mut newer));
    let is_answered = answered.is_some();
    if let Some(result) = answered {
        result.unwrap();
        block_on(disk.flush()).unwrap();
        assert_eq!((sector(&disk, 0), sector(&disk, 4096)), (0, 3));
    }
    let after = flushes();
    fixture.held.free(2);
    block_on(hung).unwrap();
    if !is_answered {
        block_on(newer).unwrap();
    }
    assert_eq!((sector(&disk, 0), sector(&disk, 4096), sector(&disk, CLUSTER)), (0, 3, 1));
    block_on(disk.close()).unwrap();
    let shared: SharedStorage = fixture.image.clone();
    let header = block_on(Header::read(&*shared)).unwrap();
    let report = block_on(check(&header, &shared, Repair::Nothing, &mut |_| {})).unwrap();
    assert!(report.is_clean(), "{options:?}: {report:?}");
    is_answered.then_some(after - before)
}

#[test]
fn a_cluster_that_was_zero_is_written_while_a_request_for_another_hangs() {
    for options in all() {
        let alone = flushes_beside_a_hung_request(&options, false);
        let beside = flushes_beside_a_hung_request(&options, true);
        match options.data_file {
            None => assert!(beside.is_some() && beside <= alone, "{options:?}: {beside:?}, alone {alone:?}"),
            Some(_) => assert_eq!(beside, None, "there is no other place for it"),
        }
    }
}

#[test]
fn what_was_flushed_beside_it_is_there() {
    for options in all().into_iter().filter(|options| options.journal.is_some()) {
        assert_eq!(flushed_beside(&options), Some(7), "{options:?}");
    }
}

/// A write that waits for a claim while a part of what it writes is made zero beside it, and then finds the
/// host full: it fails for lack of space, as one would that had not waited.
#[test]
fn a_write_beside_zeros_that_finds_the_host_full_says_so() {
    for options in all().into_iter().filter(|options| options.data_file.is_none()) {
        let fixture = Fixture::new(options.clone());
        let disk = fixture.open();
        block_on(write(&disk, CLUSTER, vec![1; 4096])).unwrap();
        fixture.held.hold(2);
        let mut before = write(&disk, CLUSTER - 512, vec![2; 512]);
        assert!(block_on(poll_once(&mut before)).is_none(), "it holds the claim");
        let both = usize::try_from(512 + 4096).unwrap();
        let mut late = write(&disk, CLUSTER - 512, vec![3; both]);
        assert!(block_on(poll_once(&mut late)).is_none(), "it waits for the claim");
        zero(&disk, CLUSTER, CLUSTER, false);
        fixture.held.refuse(Some(3));
        fixture.held.free(2);
        block_on(before).unwrap();
        assert_eq!(block_on(late).unwrap_err().kind(), ErrorKind::NoSpace, "{options:?}");
        fixture.held.refuse(None);
        block_on(write(&disk, CLUSTER - 512, vec![3; both])).unwrap();
        assert_eq!((sector(&disk, CLUSTER - 512), sector(&disk, CLUSTER)), (3, 3));
        block_on(disk.close()).unwrap();
    }
}
