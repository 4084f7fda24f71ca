//! A guest that changes its memory while it is written: nothing but its own bytes may suffer, and an image
//! that is killed after a flush has one of the values of each byte.
//!
//! ```text
//!   write of 0x11, lent ──► format ──► here: the guest turns what is still its memory into 0x12 ──► storage
//! ```
//!
//! Data that is read into lent memory is the guest's, never what the format stores beside it: a packed block
//! contains a zone's tag.
//!
//! Bytes that the format copied arrive as 0x11, the rest as 0x12, and both are correct. A checksum of bytes
//! that did not arrive is not: then recovery would discard a write that was flushed.

mod common;
#[path = "lent/trials.rs"]
mod trials;

use std::sync::atomic::Ordering::Relaxed;

use common::SIZE;
use common::native::NativeSetup;
use futures_lite::future::block_on;
use trials::{Kind, Restless, SEEDS, other, run};
use vellum_core::{GuestOffset, MemoryStorage, SharedBytes, WriteFlags};

#[test]
fn a_guest_that_changes_its_memory_loses_nothing_that_was_flushed() {
    for kind in Kind::all() {
        let mut changed = 0;
        for seed in 0..SEEDS * common::scale() {
            changed += block_on(run(&kind, seed, 12)).expect("nothing is lost");
        }
        assert!(changed > 0, "{}: some bytes were written as they lay", kind.name());
    }
}

#[test]
fn a_guest_sees_no_packed_block() {
    const UNIT: u64 = 64 << 10;
    let mut setup = NativeSetup::zoned("zoned", 8 * SIZE, UNIT, 1 << 20);
    // A small one has no room for a block twice, and takes it home at once.
    setup.options.journal_bytes = Some(1 << 20);
    let kind = Kind::Native(setup);
    let image = MemoryStorage::holding("image", &kind.empty().0);
    let restless = Restless::over(image.clone());
    let len = 8192;
    block_on(async {
        let disk = kind.open(restless.clone()).await.expect("it opens");
        let write = async |unit: u64, value: u8| {
            let memory = SharedBytes::zeroed(4096);
            memory.lend(&[(0, 4096)]).fill(value);
            let at = GuestOffset::new(unit * UNIT);
            disk.write(at, memory.lend(&[(0, 4096)]), WriteFlags::default()).await.expect("it is written");
        };
        // With the first a zone is opened; those behind are allocated in it. Some are read packed, some when
        // they are so no more, and the new bytes are in the journal only.
        for unit in 0..12 {
            write(unit, 4).await;
            disk.flush().await.expect("flushed");
        }
        for unit in 0..12 {
            if unit % 2 == 0 {
                write(unit, 8).await;
            }
            let memory = SharedBytes::zeroed(len);
            disk.read(GuestOffset::new(unit * UNIT), memory.lend(&[(0, len)])).await.expect("it is read");
            let value = if unit % 2 == 0 { 8 } else { 4 };
            let seen = memory.get(0, len);
            assert!(seen[..4096].iter().all(|byte| [value, other(value)].contains(byte)), "unit {unit}");
            assert!(seen[4096..].iter().all(|byte| *byte == 0), "unit {unit}");
            assert_eq!(restless.foreign.load(Relaxed), 0, "unit {unit}: a packed block");
        }
        disk.close().await.expect("it closes");
    });
}
