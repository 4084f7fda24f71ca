//! What a file does beyond the contract suite: refusing files that are not images, exact lengths with
//! O_DIRECT, requests of several workers on one file, and reporting failures of the host.

mod common;

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use common::{LoopDevice, MODES, TempDir, call, in_both_modes, is_root, skip, unlocked, writing};
use futures_lite::future::poll_once;
use vellum_core::{Buffer, ErrorKind, ImageOffset, Random, Storage, Zeroes, join_all};
use vellum_io::{File, IoMode, LockMode, OpenOptions, Workers, WorkersConfig, clock, run, spawn_local};

fn at(bytes: u64) -> ImageOffset {
    ImageOffset::new(bytes)
}

fn filled(value: u8, len: usize) -> Buffer {
    let mut buffer = Buffer::for_overwrite(len);
    buffer.fill(value);
    buffer
}

/// A new file past the page cache, or why there is none.
async fn direct_file(path: &Path) -> Option<Arc<File>> {
    match File::create_new(path, unlocked(true)).await {
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            skip(&error.chain());
            None
        }
        file => Some(file.expect("a file")),
    }
}

#[test]
fn only_files_and_block_devices_are_opened_and_nothing_blocks() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        let fifo = dir.join("fifo");
        call("mkfifo", &[&fifo.display().to_string()]).expect("a pipe");
        let socket = dir.join("socket");
        let _listener = UnixListener::bind(&socket).expect("a socket");
        std::os::unix::fs::symlink(&fifo, dir.join("link")).expect("a link");
        for path in
            [&fifo, &socket, &dir.join("link"), dir.path(), Path::new("/dev/null"), Path::new("/dev/zero")]
        {
            for options in [OpenOptions::reading(), writing(false), unlocked(true)] {
                let error = File::open(path, options).await.expect_err("it is no image");
                assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
                assert!(error.to_string().contains(&path.display().to_string()));
            }
        }
        let error = File::open(dir.join("none"), writing(false)).await.expect_err("there is none");
        assert_eq!(error.kind(), ErrorKind::NotFound);
        fs::write(dir.join("there"), b"").expect("a file");
        let error = File::create_new(dir.join("there"), writing(false)).await.expect_err("there is one");
        assert!(error.chain().contains("exists"), "{error:?}");
    });
}

#[test]
fn a_file_that_cannot_be_opened_is_not_created() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        let options = OpenOptions::writing().lock(LockMode::Read);
        File::create_new(dir.join("file"), options).await.expect_err("a writer with a reader's lock");
        assert!(!dir.join("file").exists());
        // The name is free for the next.
        drop(File::create_new(dir.join("file"), writing(false)).await.expect("a file"));
        assert!(dir.join("file").exists());
    });
}

#[test]
fn the_lock_fits_the_way_of_opening() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        fs::write(dir.join("file"), b"").expect("a file");
        for options in [
            OpenOptions::writing().lock(LockMode::Read),
            OpenOptions::writing().lock(LockMode::ForceShare),
            OpenOptions::reading().lock(LockMode::Write),
        ] {
            let error = File::open(dir.join("file"), options).await.expect_err("these contradict each other");
            assert_eq!(error.kind(), ErrorKind::Invalid);
        }
    });
}

#[test]
fn a_file_for_reading_is_not_changed() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        fs::write(dir.join("file"), b"content").expect("a file");
        let file = File::open(dir.join("file"), OpenOptions::reading()).await.expect("a file");
        assert!(file.limits().read_only);
        let failures = [
            file.write(at(0), Buffer::zeroed(1)).await,
            file.write_zeroes(at(0).span(1), Zeroes::MayUnmap).await,
            file.discard(at(0).span(1)).await,
            file.set_len(0).await,
            file.preallocate(at(0).span(100)).await,
        ];
        for failure in failures {
            assert_eq!(failure.expect_err("it is for reading").kind(), ErrorKind::ReadOnly);
        }
        file.flush().await.expect("there is nothing to flush");
        assert_eq!(file.read(at(0), Buffer::zeroed(10)).await.expect("a read").to_vec(), b"content\0\0\0");
    });
}

/// Another program cuts a file that is only read, or writes it. What it had is an error then and not zero, and it is known
/// to be another one.
#[test]
fn a_file_that_is_changed_from_outside_is_noticed() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        for (direct, keeps_len) in [(false, false), (true, false), (false, true), (true, true)] {
            let path = dir.join("base");
            fs::write(&path, vec![7; 20_000]).expect("a file");
            let options = match keeps_len {
                true => OpenOptions { direct, keeps_len, ..OpenOptions::writing() },
                false => OpenOptions { direct, ..OpenOptions::reading() },
            };
            let Ok(file) = File::open(&path, options).await else { continue };
            let proven = file.proof_now().await.expect("it is there");
            // Opening for writing tries whether holes can be made, and so changes the file's times after it was looked at.
            assert!(proven.is_some() && (keeps_len || proven == file.proof()));
            assert_eq!(
                file.read(at(16_000), Buffer::zeroed(8000)).await.expect("a read").to_vec()[3999..4001],
                [7, 0]
            );
            assert_eq!(file.proof_now().await.expect("it is there"), proven, "a read is no change");

            assert_eq!(file.look_at_len().await.expect("nothing has happened"), 20_000);
            let other = fs::OpenOptions::new().write(true).open(&path).expect("no lock is asked for");
            other.set_len(10_000).expect("it is cut");
            assert_ne!(file.proof_now().await.expect("it is there"), proven);
            assert!(
                file.read(at(0), Buffer::zeroed(8192))
                    .await
                    .expect("a read")
                    .to_vec()
                    .iter()
                    .all(|byte| *byte == 7)
            );
            for (start, len) in [(8000, 4096), (12_000, 100), (12_288, 4096)] {
                let error = file.read(at(start), Buffer::zeroed(len)).await.expect_err("it was cut");
                assert_eq!(error.kind(), ErrorKind::Changed, "{start} {len}");
                assert!(error.chain().contains("cut to 10000 bytes"), "{}", error.chain());
            }
            assert_eq!(file.look_at_len().await.expect_err("it was cut").kind(), ErrorKind::Changed);
            assert!(file.read(at(20_480), Buffer::zeroed(100)).await.expect("past its end").is_zero());
            assert_eq!(
                file.runs(at(0).span(20_000)).await.expect_err("it was cut").kind(),
                ErrorKind::Changed
            );

            fs::write(&path, vec![8; 20_000]).expect("a file");
            assert_ne!(
                file.proof_now().await.expect("it is there"),
                proven,
                "the time of its last change is another"
            );
        }
    });
}

/// A device that is made smaller fails where it has nothing any more, and does not read as zeros there.
#[test]
fn a_device_that_becomes_smaller_is_noticed() {
    in_both_modes(|| async {
        let Some(device) = LoopDevice::new(1 << 20, 512) else { return };
        let options = OpenOptions { keeps_len: true, ..OpenOptions::writing() };
        let file = File::open(&device.path, options).await.expect("a device");
        file.write(at(0), Buffer::copy_of(&vec![7; 1 << 20])).await.expect("written");
        file.flush().await.expect("flushed");
        device.shrink(512 << 10);
        assert_eq!(file.look_at_len().await.expect_err("it is smaller").kind(), ErrorKind::Changed);
        for (start, len) in [(512 << 10, 4096), (768 << 10, 64 << 10)] {
            let error = file.read(at(start), Buffer::zeroed(len)).await.expect_err("it is smaller");
            assert!(error.chain().contains("ends before 1048576 bytes"), "{}", error.chain());
        }
        assert!(
            file.read(at(0), Buffer::zeroed(4096))
                .await
                .expect("read")
                .to_vec()
                .iter()
                .all(|byte| *byte == 7)
        );
    });
}

#[test]
fn requests_beyond_what_a_file_can_be_are_answered() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        for direct in [false, true] {
            let path = dir.join(if direct { "direct" } else { "cached" });
            let Ok(file) = File::create_new(&path, unlocked(direct)).await else { continue };
            let far = at(u64::MAX - 4095);
            let read = file.read(far, filled(1, 4095)).await.expect("a read past the end");
            assert!(read.is_zero());
            assert!(file.read(at(u64::MAX), filled(1, 100)).await.expect("a read past all").is_zero());
            let error = file.write(far, filled(1, 4095)).await.expect_err("no file is so long");
            assert_eq!(error.kind(), ErrorKind::NoSpace);
            let error = file.write(at(u64::MAX), filled(1, 100)).await.expect_err("no file is so long");
            assert_eq!(error.kind(), ErrorKind::NoSpace);
            let error = file.write(at((1 << 63) - 1), filled(1, 1)).await.expect_err("no file is so long");
            assert_eq!(error.kind(), ErrorKind::NoSpace);
            let error = file.set_len(u64::MAX).await.expect_err("no file is so long");
            assert_eq!(error.kind(), ErrorKind::NoSpace);
            assert_eq!(file.len(), 0);
            assert!(file.runs(far.span(100)).await.expect("runs").is_empty());
        }
    });
}

/// Past the page cache too, the file on disk is exactly as long as what was written.
#[test]
fn lengths_past_the_page_cache_are_exact() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        let path = dir.join("file");
        let Some(file) = direct_file(&path).await else { return };
        let on_disk = || fs::metadata(&path).expect("the file").len();
        let mut model: Vec<u8> = Vec::new();
        let mut random = Random::from_seed(11);
        for step in 0..400u64 {
            let start = random.index(model.len() + 3000);
            let len = random.index(20_000) + 1;
            let value = u8::try_from(step % 250 + 1).expect("a byte");
            match random.below(8) {
                0 => {
                    let len = random.index(model.len() + 5000);
                    file.set_len(len as u64).await.expect("a length");
                    model.resize(len, 0);
                }
                1 => {
                    let how = if random.one_in(2) { Zeroes::Allocated } else { Zeroes::MayUnmap };
                    file.write_zeroes(at(start as u64).span(len as u64), how).await.expect("zeros");
                    model.resize(model.len().max(start + len), 0);
                    model[start..start + len].fill(0);
                }
                2 => {
                    file.preallocate(at(start as u64).span(len as u64)).await.expect("space");
                    model.resize(model.len().max(start + len), 0);
                }
                _ => {
                    file.write(at(start as u64), filled(value, len)).await.expect("a write");
                    model.resize(model.len().max(start + len), 0);
                    model[start..start + len].fill(value);
                }
            }
            assert_eq!((file.len(), on_disk()), (model.len() as u64, model.len() as u64), "step {step}");
            if model.len() > 300_000 {
                file.set_len(0).await.expect("a length");
                model.clear();
            }
            if step % 20 == 0 {
                let all = file.read(at(0), filled(9, model.len() + 100)).await.expect("a read").to_vec();
                assert!(all[..model.len()] == model && all[model.len()..].iter().all(|byte| *byte == 0));
                assert!(
                    fs::read(&path).expect("the file") == model,
                    "step {step}: as the page cache sees it"
                );
            }
        }
    });
}

/// Many small writes into the same blocks and around them, beside whole-block writes: none is lost.
#[test]
fn changes_of_parts_of_blocks_lose_no_neighbours() {
    let mut fixtures: Vec<(std::path::PathBuf, bool)> = Vec::new();
    let dir = TempDir::new();
    fixtures.push((dir.join("file"), true));
    let device = LoopDevice::new(1 << 20, 4096);
    if let Some(device) = &device {
        fixtures.push((device.path.clone(), false));
    }
    for (path, create) in fixtures {
        for mode in MODES {
            let Ok(workers) = Workers::start(WorkersConfig { threads: 3, mode, ..WorkersConfig::default() })
            else {
                continue;
            };
            drop(if create { fs::remove_file(&path) } else { Ok(()) });
            let opened = path.clone();
            let file = workers.spawn(0, move || async move {
                let file = if create {
                    direct_file(&opened).await?
                } else {
                    File::open(&opened, unlocked(true)).await.expect("a device")
                };
                file.write(at(0), Buffer::zeroed(1 << 20)).await.expect("a write");
                Some(file)
            });
            let Some(file) = futures_lite::future::block_on(file).expect("it ends") else { continue };
            // Worker w owns every byte range of 700 bytes whose number is w modulo 3; in the last quarter
            // they write whole blocks of 4 KiB, again each its own.
            let tasks: Vec<_> = (0..3u64)
                .map(|worker| {
                    let file = file.clone();
                    workers.spawn(usize::try_from(worker).expect("small"), move || async move {
                        let file = Rc::new(file);
                        for round in 1..=6u8 {
                            let mut writes = Vec::new();
                            for n in (worker..1000).step_by(3) {
                                let file = file.clone();
                                writes.push(spawn_local(async move {
                                    file.write(at(n * 700), filled(round, 700)).await.expect("a write");
                                    if n < 64 {
                                        let place = at((192 + n) * 4096);
                                        file.write(place, filled(round, 4096)).await.expect("a write");
                                    }
                                }));
                            }
                            for write in writes {
                                write.await;
                            }
                            // What this worker wrote is there, whatever the others do beside it.
                            for n in (worker..1000).step_by(3) {
                                let read = file.read(at(n * 700), Buffer::zeroed(700)).await.expect("a read");
                                let bytes = read.to_vec();
                                assert!(
                                    bytes.iter().all(|byte| *byte == round),
                                    "round {round}: run {n} was lost"
                                );
                            }
                        }
                    })
                })
                .collect();
            for task in tasks {
                futures_lite::future::block_on(task).expect("it ends");
            }
            let end = workers.spawn(1, move || async move {
                let all = file.read(at(0), Buffer::zeroed(1 << 20)).await.expect("a read").to_vec();
                assert!(all[..700_000].iter().all(|byte| *byte == 6));
                assert!(all[192 * 4096..].iter().all(|byte| *byte == 6));
                file.flush().await.expect("a flush");
            });
            futures_lite::future::block_on(end).expect("it ends");
            workers.join();
        }
    }
}

/// A whole block that is written while a part of it is changed: afterwards the rest is that of the whole
/// block.
#[test]
fn a_whole_block_is_not_lost_beside_a_change_of_part_of_it() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        let Some(file) = direct_file(&dir.join("file")).await else { return };
        let file = Rc::new(file);
        let blocks = 64;
        file.write(at(0), Buffer::zeroed(blocks * 4096)).await.expect("a write");
        let mut random = Random::from_seed(8);
        for round in 0..40u8 {
            let (part, whole) = (round * 2 + 1, round * 2 + 2);
            let mut tasks = Vec::new();
            for block in 0..blocks as u64 {
                let order = random.one_in(2);
                for is_whole in [order, !order] {
                    let file = file.clone();
                    let wait = Duration::from_micros(random.below(300));
                    tasks.push(spawn_local(async move {
                        clock().sleep(wait).await;
                        let (place, data) = match is_whole {
                            true => (block * 4096, filled(whole, 4096)),
                            false => (block * 4096 + 700, filled(part, 100)),
                        };
                        file.write(at(place), data).await.expect("a write");
                    }));
                }
            }
            for task in tasks {
                task.await;
            }
            let all = file.read(at(0), Buffer::zeroed(blocks * 4096)).await.expect("a read").to_vec();
            for (index, block) in all.chunks(4096).enumerate() {
                let rest = block[..700].iter().chain(&block[800..]);
                assert!(rest.clone().all(|byte| *byte == whole), "round {round}: block {index} was lost");
                assert!(block[700..800].iter().all(|byte| *byte == block[700]));
                assert!(block[700] == part || block[700] == whole);
            }
        }
    });
}

/// The last block grows under small appends of several workers, and nothing of it is lost.
#[test]
fn appends_past_the_page_cache_by_several_workers() {
    for mode in MODES {
        let dir = TempDir::new();
        let path = dir.join("file");
        let Ok(workers) = Workers::start(WorkersConfig { threads: 2, mode, ..WorkersConfig::default() })
        else {
            continue;
        };
        let opened = path.clone();
        let file = workers.spawn(0, move || async move { direct_file(&opened).await });
        let Some(file) = futures_lite::future::block_on(file).expect("it ends") else { continue };
        let end = Arc::new(AtomicU64::new(0));
        let tasks: Vec<_> = (0..2)
            .map(|worker| {
                let (file, end) = (file.clone(), end.clone());
                workers.spawn(worker, move || async move {
                    for n in 0..400u64 {
                        // Now and then whole blocks, which go past the page cache.
                        let len = if n % 7 == 0 { 4096 * 3 } else { n % 900 + 1 };
                        let place = end.fetch_add(len, SeqCst);
                        let value = u8::try_from(place % 251).expect("a byte");
                        let len = usize::try_from(len).expect("small");
                        file.write(at(place), filled(value, len)).await.expect("a write");
                        let read = file.read(at(place), Buffer::zeroed(len)).await.expect("a read");
                        assert!(
                            read.to_vec().iter().all(|byte| *byte == value),
                            "append {n} of {worker} was lost"
                        );
                    }
                })
            })
            .collect();
        for task in tasks {
            futures_lite::future::block_on(task).expect("it ends");
        }
        assert_eq!(fs::metadata(&path).expect("the file").len(), end.load(SeqCst));
        assert_eq!(file.len(), end.load(SeqCst));
        workers.join();
    }
}

#[test]
fn memory_at_any_address_and_in_any_number_of_pieces() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        for direct in [false, true] {
            let path = dir.join(if direct { "direct" } else { "cached" });
            drop(fs::remove_file(&path));
            let Ok(file) = File::create_new(&path, unlocked(direct)).await else { continue };
            // Memory that starts at an odd address.
            let mut odd = filled(4, 8192 + 3);
            let odd = odd.split_off(3);
            file.write(at(4096), odd).await.expect("a write");
            let mut target = Buffer::zeroed(8192 + 1);
            let target = target.split_off(1);
            let read = file.read(at(4096), target).await.expect("a read");
            assert!(read.to_vec().iter().all(|byte| *byte == 4));
            // More pieces than one call takes; whole blocks and crumbs.
            for (size, count) in [(4096usize, 1500usize), (3, 5000), (700, 2100)] {
                let mut pieces = Buffer::empty();
                for n in 0..count {
                    pieces.append(filled(u8::try_from(n % 251).expect("a byte"), size));
                }
                let expected = pieces.to_vec();
                file.write(at(8192), pieces).await.expect("a write");
                let mut target = Buffer::empty();
                for _ in 0..count {
                    target.append(Buffer::for_overwrite(size));
                }
                let read = file.read(at(8192), target).await.expect("a read");
                assert!(read.to_vec() == expected, "{count} pieces of {size} bytes");
            }
        }
    });
}

#[test]
fn overlapping_writes_of_many_pieces_do_not_mix_sectors() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        let file = File::create_new(dir.join("file"), unlocked(false)).await.expect("a file");
        let writes: Vec<_> = (1..=8u8)
            .map(|value| {
                let mut pieces = Buffer::empty();
                for _ in 0..2000 {
                    pieces.append(filled(value, 520));
                }
                file.write(at(1024), pieces)
            })
            .collect();
        for written in join_all(writes).await {
            written.expect("a write");
        }
        let all = file.read(at(1024), Buffer::zeroed(1_040_000 / 512 * 512)).await.expect("a read").to_vec();
        for (index, sector) in all.chunks(512).enumerate() {
            assert!(sector.iter().all(|byte| *byte == sector[0]), "sector {index} is mixed");
        }
    });
}

#[test]
fn holes_are_found_and_made() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        let file = File::create_new(dir.join("file"), unlocked(false)).await.expect("a file");
        file.set_len(4 << 20).await.expect("a length");
        let runs = file.runs(at(0).span(u64::MAX)).await.expect("runs");
        assert_eq!(
            runs.iter().map(|run| (run.span.len(), run.is_data)).collect::<Vec<_>>(),
            [(4 << 20, false)]
        );
        file.write(at(1 << 20), filled(1, 2 << 20)).await.expect("a write");
        file.flush().await.expect("a flush");
        if !file.limits().discards {
            return skip("this file system makes no holes");
        }
        file.discard(at((1 << 20) + 100).span(1 << 20)).await.expect("a discard");
        let runs = file.runs(at(0).span(4 << 20)).await.expect("runs");
        let data: u64 = runs.iter().filter(|run| run.is_data).map(|run| run.span.len()).sum();
        assert!(data <= (1 << 20) + 8192, "a megabyte was given back: {runs:?}");
        let before = allocated(&dir.join("file"));
        file.preallocate(at(0).span(8 << 20)).await.expect("space");
        assert_eq!(file.len(), 8 << 20);
        assert!(allocated(&dir.join("file")) >= before + (6 << 20));
        file.write_zeroes(at(0).span(8 << 20), Zeroes::MayUnmap).await.expect("zeros");
        assert!(allocated(&dir.join("file")) < 1 << 20, "zeros that may be a hole are one");
        file.write_zeroes(at(0).span(8 << 20), Zeroes::Allocated).await.expect("zeros");
        assert!(allocated(&dir.join("file")) >= 8 << 20, "zeros that stay allocated have space");
    });
}

fn allocated(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(&fs::metadata(path).expect("the file")) * 512
}

/// A small file system in memory, for running out of space.
struct SmallTmpfs(TempDir);

impl SmallTmpfs {
    fn new(size: &str) -> Option<Self> {
        if !is_root() {
            skip("mounting is root's");
            return None;
        }
        let dir = TempDir::new();
        let options = format!("size={size}");
        match call("mount", &["-t", "tmpfs", "-o", &options, "none", &dir.path().display().to_string()]) {
            Ok(_) => Some(Self(dir)),
            Err(reason) => {
                skip(&format!("no tmpfs: {reason}"));
                None
            }
        }
    }
}

impl Drop for SmallTmpfs {
    fn drop(&mut self) {
        drop(call("umount", &["-l", &self.0.path().display().to_string()]));
    }
}

#[test]
fn a_full_host_is_reported_and_harms_nothing_else() {
    let Some(mount) = SmallTmpfs::new("2m") else { return };
    in_both_modes(|| async {
        let path = mount.0.join("file");
        drop(fs::remove_file(&path));
        let file = File::create_new(&path, unlocked(false)).await.expect("a file");
        file.write(at(0), filled(1, 1 << 20)).await.expect("a write that fits");
        let error = file.write(at(1 << 20), filled(2, 4 << 20)).await.expect_err("a write that does not");
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{error:?}");
        assert!(error.to_string().contains(&path.display().to_string()));
        let error = file.preallocate(at(0).span(8 << 20)).await.expect_err("nor does this");
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        let read = file.read(at(0), Buffer::zeroed(1 << 20)).await.expect("a read");
        assert!(read.to_vec().iter().all(|byte| *byte == 1));
        // The failed write has poisoned nothing.
        file.set_len(1 << 20).await.expect("a length");
        file.write(at(0), filled(3, 4096)).await.expect("a write that fits");
        file.flush().await.expect("a flush");
    });
}

/// A device whose backing file finds no space: writes go into the page cache, and the flush fails.
#[test]
fn after_a_failed_flush_the_file_refuses_changes() {
    for dropped in [false, true] {
        for mode in MODES {
            let Some(mount) = SmallTmpfs::new("2m") else { return };
            let dir = TempDir::within(mount.0.path());
            let Some(device) = LoopDevice::over(dir, 64 << 20, 512) else { return };
            let ran = run(mode, async || {
                let file = File::open(&device.path, unlocked(false)).await.expect("a device");
                for n in 0..16 {
                    file.write(at(n << 20), filled(1, 1 << 20)).await.expect("the page cache takes it");
                }
                if dropped {
                    // The failure is reported to no caller, and it counts all the same.
                    let mut flush = file.flush();
                    assert!(poll_once(&mut flush).await.is_none());
                    clock().sleep(Duration::from_millis(1)).await;
                    drop(flush);
                    for _ in 0..6000 {
                        if file.write(at(0), filled(1, 512)).await.is_err() {
                            break;
                        }
                        clock().sleep(Duration::from_millis(10)).await;
                    }
                } else {
                    let error = file.flush().await.expect_err("the device can't keep it");
                    assert!(matches!(error.kind(), ErrorKind::Io | ErrorKind::NoSpace), "{error:?}");
                }
                let failures = [
                    file.write(at(0), filled(1, 512)).await,
                    file.write_zeroes(at(0).span(512), Zeroes::Allocated).await,
                    file.discard(at(0).span(512)).await,
                    file.flush().await,
                ];
                for failure in failures {
                    let error = failure.expect_err("it is poisoned");
                    assert_eq!(error.kind(), ErrorKind::Poisoned, "{error:?}");
                    assert!(error.to_string().contains("reopen it"));
                }
                file.read(at(0), Buffer::zeroed(512)).await.expect("reads go on");
            });
            if let Err(error) = ran {
                skip(&error.chain());
            }
        }
    }
}

/// After a failed flush Linux shows what it has not written. The same device, whose writes fail from the
/// second MiB on.
#[test]
fn after_a_failed_flush_a_file_opened_anew_is_brought_to_show_what_the_medium_has() {
    const LEN: u64 = 16 << 20;
    let Some(mount) = SmallTmpfs::new("2m") else { return };
    let dir = TempDir::within(mount.0.path());
    let Some(device) = LoopDevice::over(dir, 64 << 20, 512) else { return };
    let ran = run(IoMode::Auto, async || {
        // Closing a device for the last time empties its cache.
        let open = File::open(&device.path, unlocked(false)).await.expect("a device");
        for n in 0..LEN >> 20 {
            open.write(at(n << 20), filled(1, 1 << 20)).await.expect("the page cache takes it");
        }
        open.flush().await.expect_err("the device can't keep it");
        let again = File::open(&device.path, unlocked(false)).await.expect("a device");
        again.flush().await.expect("the host does not tell it again");
        let direct = File::open(&device.path, unlocked(true)).await.expect("a device");
        let medium = direct.read(at(0), Buffer::zeroed(16 << 20)).await.expect("a read").to_vec();
        let shown = async || again.read(at(0), Buffer::zeroed(16 << 20)).await.expect("a read").to_vec();
        if shown().await == medium {
            return skip("this kernel does not show what it has not written");
        }
        assert!(!again.reconcile(at(0).span(again.len())).await.expect("an answer"), "nobody holds a page");
        assert!(shown().await == medium, "what is read is what the medium has");
    });
    if let Err(error) = ran {
        skip(&error.chain());
    }
}

/// Mapped pages cannot be dropped.
#[test]
fn a_page_that_stays_in_the_cache_is_written_again() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        let path = dir.join("file");
        let file = File::create_new(&path, unlocked(false)).await.expect("a file");
        let bytes: Vec<u8> = (0..100_000u32).map(|n| u8::try_from(n % 251).expect("a byte")).collect();
        let all = at(0).span(bytes.len() as u64);
        // The kernel may write dirty pages at any time, and they are clean then.
        let mut stayed = false;
        for _ in 0..100 {
            file.write(at(0), Buffer::copy_of(&bytes)).await.expect("a write");
            stayed |= file.reconcile(all).await.expect("an answer");
        }
        assert!(stayed, "dirty pages stay");
        file.flush().await.expect("a flush");
        assert!(!file.reconcile(all).await.expect("an answer"), "clean ones are dropped");
        // SAFETY: a new mapping of a file that is longer, of which one byte is read while it is there.
        let mapped = unsafe {
            let fd = std::os::fd::AsRawFd::as_raw_fd(&std::os::fd::AsFd::as_fd(&*file));
            let mapped = libc::mmap(std::ptr::null_mut(), 8192, libc::PROT_READ, libc::MAP_SHARED, fd, 4096);
            assert_ne!(mapped, libc::MAP_FAILED);
            assert_eq!(mapped.cast::<u8>().read_volatile(), bytes[4096]);
            mapped
        };
        assert!(file.reconcile(all).await.expect("an answer"), "a mapped page stays");
        file.flush().await.expect("a flush");
        // SAFETY: the mapping from above, which is not used any more.
        assert_eq!(unsafe { libc::munmap(mapped, 8192) }, 0);
        assert!(!file.reconcile(all).await.expect("an answer"));
        assert_eq!(file.len(), 100_000);
        let read = file.read(at(0), Buffer::zeroed(bytes.len())).await.expect("a read");
        assert!(read.to_vec() == bytes);
    });
}

/// The limit on file sizes is one request's error, not the program's end. In a process of its own.
#[test]
fn the_limit_on_file_sizes_is_reported() {
    if std::env::var_os("VELLUM_TEST_CHILD").is_none() {
        let test = ["the_limit_on_file_sizes_is_reported", "--exact", "--nocapture"];
        let program = std::env::current_exe().expect("this program");
        let output =
            Command::new(program).args(test).env("VELLUM_TEST_CHILD", "1").output().expect("it runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let limit = libc::rlimit { rlim_cur: 1 << 20, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: sets a limit of this process from a value that lives through the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
    in_both_modes(|| async {
        let dir = TempDir::new();
        for direct in [false, true] {
            let path = dir.join(if direct { "direct" } else { "cached" });
            let Ok(file) = File::create_new(&path, unlocked(direct)).await else { continue };
            // Short at the limit, then refused.
            let error = file.write(at(0), filled(1, 2 << 20)).await.expect_err("past the limit");
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{error:?}");
            let error = file.set_len(2 << 20).await.expect_err("past the limit");
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{error:?}");
            file.write(at(0), filled(1, 1 << 20)).await.expect("up to the limit");
        }
    });
}

#[test]
fn many_workers_use_one_file() {
    for mode in MODES {
        let dir = TempDir::new();
        let Ok(workers) = Workers::start(WorkersConfig { threads: 4, mode, ..WorkersConfig::default() })
        else {
            continue;
        };
        let path = dir.join("file");
        let file = run(IoMode::Auto, async || File::create_new(&path, writing(false)).await.expect("a file"));
        let file = file.expect("a worker");
        let tasks: Vec<_> = (0..4usize)
            .map(|worker| {
                let file = file.clone();
                workers.spawn(worker, move || async move {
                    let tasks: Vec<_> = (0..8u64)
                        .map(|lane| {
                            let file = file.clone();
                            spawn_local(async move {
                                let mine = (worker as u64 * 8 + lane) * 65_536;
                                let mut random = Random::from_seed(mine);
                                for _ in 0..200 {
                                    let value = u8::try_from(random.below(256)).expect("a byte");
                                    let len = random.index(8192) + 1;
                                    let place = mine + random.below(65_536 - len as u64);
                                    file.write(at(place), filled(value, len)).await.expect("a write");
                                    if random.one_in(20) {
                                        file.flush().await.expect("a flush");
                                    }
                                    let read =
                                        file.read(at(place), Buffer::zeroed(len)).await.expect("a read");
                                    assert!(read.to_vec().iter().all(|byte| *byte == value));
                                }
                            })
                        })
                        .collect();
                    for task in tasks {
                        task.await;
                    }
                })
            })
            .collect();
        for task in tasks {
            futures_lite::future::block_on(task).expect("it ends");
        }
        workers.join();
        assert!(file.len() <= 32 * 65_536);
    }
}
