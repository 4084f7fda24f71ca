//! Files read into, and written from, the memory of a guest in place, even if that memory changes or goes
//! away meanwhile.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use common::{TempDir, in_both_modes, skip, unlocked};
use vellum_core::{Buffer, ErrorKind, ImageOffset, SharedBytes, Storage, join_all};
use vellum_io::{File, GuestRam};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

const PAGE: usize = 4096;
const LEN: usize = 16 * PAGE;

/// Memory of a guest, from address 0 on, and the file that it is.
fn ram() -> (std::fs::File, Arc<GuestRam>) {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let file = std::fs::File::from(rustix::fs::memfd_create("guest", flags).expect("a memfd"));
    file.set_len(LEN as u64).expect("its length");
    let shared = file.try_clone().expect("a descriptor");
    let mapping = MmapRegion::from_file(FileOffset::new(shared, 0), LEN).expect("it is mapped");
    let region = GuestRegionMmap::new(mapping, GuestAddress(0)).expect("a region");
    let mapped = GuestMemoryMmap::default().insert_region(Arc::new(region)).expect("there is room");
    (file, GuestRam::new(mapped).expect("it may be written"))
}

/// A file of these bytes; nothing where it cannot be had past the page cache.
async fn file(path: &Path, direct: bool, bytes: &[u8]) -> Option<Arc<File>> {
    std::fs::write(path, bytes).expect("a file");
    match File::open(path, unlocked(direct)).await {
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            skip(&error.chain());
            None
        }
        file => Some(file.expect("it opens")),
    }
}

fn numbered(len: usize) -> Vec<u8> {
    (0..len).map(|index| u8::try_from(index % 251).expect("a byte")).collect()
}

#[test]
fn memory_that_is_cut_off_fails_its_request_and_nothing_else() {
    in_both_modes(|| async {
        for direct in [false, true] {
            let dir = TempDir::new();
            let before = numbered(LEN);
            let Some(file) = file(&dir.join("disk"), direct, &before).await else { return };
            let (memory, ram) = ram();
            let lent =
                |page: usize, pages: usize| ram.lend([((page * PAGE) as u64, pages * PAGE)]).expect("lent");
            memory.set_len(8 * PAGE as u64).expect("it is cut off");
            for (page, pages) in [(8, 4), (6, 4)] {
                let read = file.read(ImageOffset::ZERO, lent(page, pages)).await;
                assert_eq!(read.expect_err("there is no memory").kind(), ErrorKind::Io, "direct {direct}");
                let written = file.write(ImageOffset::new(8 * PAGE as u64), lent(page, pages)).await;
                assert_eq!(written.expect_err("there is no memory").kind(), ErrorKind::Io, "direct {direct}");
            }
            // What the writes did not cover is as it was, and the next requests work.
            lent(0, 8).fill(1);
            file.write(ImageOffset::new(12 * PAGE as u64), lent(0, 4)).await.expect("there is memory");
            let after = file.read(ImageOffset::ZERO, lent(0, 8)).await.expect("there is memory");
            assert!(after.to_vec() == before[..8 * PAGE], "direct {direct}");
        }
    });
}

#[test]
fn memory_that_is_taken_back_stays_until_the_request_has_ended() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        let bytes = numbered(LEN);
        let file = file(&dir.join("disk"), false, &bytes).await.expect("a file");
        let (memory, ram) = ram();
        let reads: Vec<_> = (0..16)
            .map(|page| {
                let at = (page * PAGE) as u64;
                file.read(ImageOffset::new(at), ram.lend([(at, PAGE)]).expect("it is there"))
            })
            .collect();
        drop(ram);
        for read in join_all(reads).await {
            drop(read.expect("it is read"));
        }
        let mut seen = vec![0; LEN];
        std::os::unix::fs::FileExt::read_exact_at(&memory, &mut seen, 0).expect("the guest's own view");
        assert!(seen == bytes);
    });
}

#[test]
fn writes_of_memory_that_changes_have_some_of_its_bytes_and_harm_nothing() {
    in_both_modes(|| async {
        for (direct, from) in [(false, 0), (false, 1), (true, 0), (true, 1)] {
            let dir = TempDir::new();
            let Some(file) = file(&dir.join("disk"), direct, &[0xEE; 3 * LEN]).await else { return };
            let memory = SharedBytes::zeroed(LEN + PAGE);
            let is_over = Arc::new(AtomicBool::new(false));
            let guest = std::thread::spawn({
                let (memory, is_over) = (memory.clone(), is_over.clone());
                move || {
                    while !is_over.load(Relaxed) {
                        for value in 1..4 {
                            memory.set(0, &[value; LEN + PAGE]);
                        }
                    }
                }
            });
            // Neither end of it is that of a block.
            let (at, len) = (LEN + 100, LEN - 300);
            for _ in 0..20 {
                let lent = memory.lend(&[(from, 5000), (from + 5000, len - 5000)]);
                file.write(ImageOffset::new(at as u64), lent).await.expect("it is written");
            }
            is_over.store(true, Relaxed);
            guest.join().expect("the guest ends");
            let seen =
                file.read(ImageOffset::ZERO, Buffer::zeroed(3 * LEN)).await.expect("it is read").to_vec();
            let (before, rest) = seen.split_at(at);
            let (written, behind) = rest.split_at(len);
            assert!(before.iter().chain(behind).all(|byte| *byte == 0xEE), "direct {direct}, from {from}");
            assert!(written.iter().all(|byte| *byte < 4), "direct {direct}, from {from}");
        }
    });
}

#[test]
fn the_end_of_a_file_is_zeros_in_lent_memory_and_nothing_beside_it_changes() {
    in_both_modes(|| async {
        for direct in [false, true] {
            let dir = TempDir::new();
            let Some(file) = file(&dir.join("disk"), direct, &numbered(5000)).await else { return };
            let (_, ram) = ram();
            ram.mapped().write_slice(&[7; LEN], GuestAddress(0)).expect("memory");
            for (from, at, len) in
                [(PAGE, 0, 2 * PAGE), (PAGE, 1000, PAGE + 1), (PAGE + 3, 512, 8000), (PAGE, 9000, 10)]
            {
                let room = ram.lend([(from as u64, len / 2), ((from + len / 2) as u64, len - len / 2)]);
                let room = file.read(ImageOffset::new(at as u64), room.expect("it is there")).await;
                assert_eq!(room.expect("it is read").lent_len(), len);
                let mut seen = vec![0; LEN];
                ram.mapped().read_slice(&mut seen, GuestAddress(0)).expect("memory");
                let mut expected = numbered(5000);
                expected.resize(3 * LEN, 0);
                assert!(seen[from..from + len] == expected[at..at + len], "direct {direct}, {len} at {at}");
                assert!(
                    seen[..from].iter().chain(&seen[from + len..]).all(|byte| *byte == 7),
                    "direct {direct}"
                );
                ram.mapped().write_slice(&[7; LEN], GuestAddress(0)).expect("memory");
            }
        }
    });
}
