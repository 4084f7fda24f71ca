//! Written homes that can name no session: what one opening leaves for the next, over every crash.

mod common;
use vellum_flash as flash;

use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::named::{BYTES, Counts, Opening, compare, explore, open};
use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, Error, ErrorKind, GuestOffset, ImageOffset, LocalFuture, MemoryStorage, Result,
    SharedStorage, Storage, WriteFlags,
};
use vellum_flash::FlashPolicy;
use vellum_sim::{ForwardStorage, Forwarding};

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

/// A file whose next flush fails, if so wished, and those after it do not.
struct Flaky {
    inner: SharedStorage,
    fails: Arc<AtomicBool>,
}

impl ForwardStorage for Flaky {
    fn inner(&self) -> &dyn Storage {
        &*self.inner
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        match self.fails.swap(false, Ordering::Relaxed) {
            true => Box::pin(ready(Err(Error::new(ErrorKind::Io, "the line was down")))),
            false => self.inner.flush(),
        }
    }
}

/// After a flush of home that failed nobody knows what home has: the next opening finds nothing, also when later flushes
/// succeed.
#[test]
fn a_flush_of_home_that_failed_leaves_no_name() {
    let policies = [FlashPolicy::WriteThrough, FlashPolicy::ReadOnly];
    for (policy, fails) in policies.into_iter().flat_map(|policy| [(policy, true), (policy, false)]) {
        let (flash, file): (SharedStorage, SharedStorage) =
            (MemoryStorage::new("flash"), MemoryStorage::new("home"));
        let is_failing = Arc::new(AtomicBool::new(false));
        let home: SharedStorage = Forwarding::new(Flaky { inner: file.clone(), fails: is_failing.clone() });
        block_on(async {
            file.set_len(BYTES).await.unwrap();
            file.write(ImageOffset::new(0), Buffer::copy_of(&[7; 32768])).await.unwrap();
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
            is_failing.store(fails, Ordering::Relaxed);
            assert_eq!(first.disk.flush().await.is_err(), fails, "{policy:?}");
            assert!(first.blocks() >= 4, "{policy:?}");
            first.disk.flush().await.unwrap();
            first.close(Some(1)).await.unwrap();
            let second = open(&flash, &home, 64, policy, Some(1), 2).await.unwrap();
            assert_eq!(second.blocks() > 0, !fails, "{policy:?}, {} blocks", second.blocks());
        });
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
        assert_eq!((cold.blocks(), cold.cache.rows().len()), (0, 1), "nothing can find what the kill left");
        fill(&cold).await;
        cold.close(None).await.unwrap();
        let last = open(&flash, &home, 64, FlashPolicy::ReadOnly, Some(1), 5).await.unwrap();
        assert_eq!((last.blocks(), last.cache.rows().len()), (0, 1));
    });
}

/// Flash whose writes of blocks of ones wait as long as the gate is shut.
struct Gated {
    inner: SharedStorage,
    is_shut: Arc<AtomicBool>,
}

impl ForwardStorage for Gated {
    fn inner(&self) -> &dyn Storage {
        &*self.inner
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let is_late = data.to_vec().iter().all(|byte| *byte == 0x11);
            while is_late && self.is_shut.load(Ordering::Relaxed) {
                futures_lite::future::yield_now().await;
            }
            self.inner.write(at, data).await
        })
    }
}

/// What was read of a disk that is closed meanwhile is not kept for the disk that gets its row.
#[test]
fn what_is_admitted_late_is_not_another_disks() {
    block_on(async {
        let memory: SharedStorage = MemoryStorage::new("flash");
        let is_shut = Arc::new(AtomicBool::new(false));
        let gated = Gated { inner: memory.clone(), is_shut: is_shut.clone() };
        let flash: SharedStorage = Forwarding::new(gated);
        let cache = common::cache_on(&flash, 256, 1).await.unwrap();
        let homes = [0x11, 0x33].map(|byte| vellum_core::MemoryDisk::holding(&vec![byte; 256 << 10]));
        let options = |home: &Arc<vellum_core::MemoryDisk>| vellum_flash::DiskOptions {
            disk: [0; 16],
            home: home.clone(),
            sessions: None,
            policy: FlashPolicy::ReadOnly,
            trusts_home: false,
        };
        let read = async |disk: &vellum_flash::FlashDisk| {
            let buffer = Buffer::for_overwrite(256 << 10);
            disk.read(vellum_core::GuestOffset::ZERO, buffer).await.unwrap().to_vec()
        };
        let first = cache.open_file(options(&homes[0]), None).await.unwrap();
        assert!(read(&first).await == vec![0x11; 256 << 10]);
        is_shut.store(true, Ordering::Relaxed);
        let exchanged = async {
            // The admission has its slots, and writes them.
            for _ in 0..20 {
                futures_lite::future::yield_now().await;
            }
            first.close().await.unwrap();
            first.leave_as(async || None).await.unwrap();
            cache.open_file(options(&homes[1]), None).await.unwrap()
        };
        let opened = async {
            for _ in 0..1000 {
                futures_lite::future::yield_now().await;
            }
            is_shut.store(false, Ordering::Relaxed);
        };
        let tended = async { while cache.tend(Duration::ZERO).await {} };
        let ((second, ()), ()) =
            futures_lite::future::zip(futures_lite::future::zip(exchanged, opened), tended).await;
        for _ in 0..3 {
            assert!(read(&second).await == vec![0x33; 256 << 10], "another disk's bytes are read");
            while cache.tend(Duration::ZERO).await {}
        }
        second.close().await.unwrap();
        second.leave_as(async || None).await.unwrap();
        cache.close().await.unwrap();
        common::cache_on(&memory, 256, 2).await.expect("nothing in it is of no disk");
    });
}
