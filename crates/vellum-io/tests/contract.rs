//! Every kind of file, through every driver, keeps the contract of `Storage`.
//!
//! The suite of `vellum-core` runs on: {ring, threads} × {page cache, O_DIRECT} × {a file on a real file
//! system, a file on tmpfs, a loop device of 512-byte and one of 4096-byte blocks}.

mod common;

use common::{DeviceFixture, FileFixture, LoopDevice, MODES, TempDir, skip, writing};
use vellum_core::contract::{StorageFixture, storage, storage_random_operations};
use vellum_core::{BlockSize, ErrorKind};
use vellum_io::{IoMode, io_mode, run};

/// Runs the suite on the fixture, in one mode.
fn suite(mode: IoMode, fixture: &dyn StorageFixture) {
    let ran = run(mode, async || {
        assert_eq!(io_mode(), mode);
        match fixture.fresh(1 << 20).await {
            Err(error) if error.kind() == ErrorKind::Unsupported => return skip(&error.chain()),
            fresh => drop(fresh.expect("a fresh storage")),
        }
        storage(fixture).await;
        for seed in 2..6 {
            storage_random_operations(fixture, seed, 300).await;
        }
    });
    match ran {
        Err(error) if mode == IoMode::Uring => skip(&error.chain()),
        ran => ran.expect("the worker works"),
    }
}

fn files(mode: IoMode, direct: bool) {
    suite(mode, &FileFixture::new(TempDir::new(), writing(direct)));
}

fn tmpfs(mode: IoMode, direct: bool) {
    let shm = std::path::Path::new("/dev/shm");
    if !shm.is_dir() {
        return skip("there is no /dev/shm");
    }
    suite(mode, &FileFixture::new(TempDir::within(shm), writing(direct)));
}

fn device(block: u32, direct: bool) {
    let Some(device) = LoopDevice::new(4 << 20, block) else { return };
    for mode in MODES {
        suite(mode, &DeviceFixture { path: device.path.clone(), options: writing(direct) });
    }
}

#[test]
fn a_file_through_a_ring() {
    files(IoMode::Uring, false);
}

#[test]
fn a_file_through_threads() {
    files(IoMode::Threads, false);
}

#[test]
fn a_file_past_the_page_cache_through_a_ring() {
    files(IoMode::Uring, true);
}

#[test]
fn a_file_past_the_page_cache_through_threads() {
    files(IoMode::Threads, true);
}

#[test]
fn a_file_in_memory() {
    for mode in MODES {
        tmpfs(mode, false);
        tmpfs(mode, true);
    }
}

#[test]
fn a_device_of_small_blocks() {
    device(512, false);
}

#[test]
fn a_device_of_small_blocks_past_the_page_cache() {
    device(512, true);
}

#[test]
fn a_device_of_large_blocks() {
    device(4096, false);
}

#[test]
fn a_device_of_large_blocks_past_the_page_cache() {
    device(4096, true);
}

#[test]
fn limits_say_what_the_host_does() {
    run(IoMode::Auto, async || {
        let dir = TempDir::new();
        let fixture = FileFixture::new(dir, writing(false));
        let file = fixture.fresh(0).await.expect("a file");
        assert_eq!(file.limits().block_size, BlockSize::from_shift(0));
        assert!(file.limits().physical_block >= BlockSize::PAGE);
        assert!(file.limits().grows_zeroed && !file.limits().fixed_len && !file.limits().read_only);
        let fixture = FileFixture::new(TempDir::new(), writing(true));
        match fixture.fresh(0).await {
            Ok(file) => assert!(file.limits().block_size >= BlockSize::SECTOR),
            Err(error) => skip(&error.chain()),
        }
    })
    .expect("a worker");
    for block in [512, 4096] {
        let Some(device) = LoopDevice::new(1 << 20, block) else { return };
        run(IoMode::Auto, async || {
            let fixture = DeviceFixture { path: device.path.clone(), options: writing(true) };
            let file = fixture.fresh(1 << 20).await.expect("a device");
            assert_eq!(file.limits().block_size.bytes(), u64::from(block));
            assert_eq!(file.len(), 1 << 20);
            assert!(file.limits().fixed_len && !file.limits().grows_zeroed);
        })
        .expect("a worker");
    }
}
