//! The second opinion: `qemu-img` and `qemu-io` on images that were written here, and the other way round.
//! There is no file of ours in between: an image is a memory storage that is dumped for QEMU and loaded back.
//!
//! The matrix over real files, chains and the server is with the command line; this one needs nothing but
//! QEMU and is quick enough to run at every change of the format.

#![allow(clippy::print_stderr, reason = "a test says why it was skipped")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use futures_lite::future::block_on;
use vellum_core::{Buffer, Disk, GuestOffset, MemoryStorage, Random, SharedStorage, WriteFlags, ZeroFlags};
use vellum_format::qcow2::{Compression, CreateOptions, Files, Header, OpenOptions, Qcow2, create};

const SIZE: usize = 6 << 20;

fn has_qemu() -> bool {
    let found = Command::new("qemu-img").arg("--version").output().is_ok();
    if !found {
        eprintln!("skipped: qemu-img is not installed");
    }
    found
}

struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("vellum-qemu-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?} failed:\n{text}");
    text
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

async fn open(image: &Arc<MemoryStorage>) -> Arc<Qcow2> {
    let image: SharedStorage = image.clone();
    let header = Header::read(&*image).await.unwrap();
    Qcow2::open(header, Files { image, data_file: None, below: None }, OpenOptions::default()).await.unwrap()
}

/// Random writes, zeros and discards; returns what the disk must read as.
async fn scribble(disk: &Qcow2, model: &mut [u8], seed: u64, count: usize) {
    let mut random = Random::from_seed(seed);
    for _ in 0..count {
        let align = *random.pick(&[1, 512, 4096, 65_536]);
        let at = random.index(model.len()) / align * align;
        let len = (1 + random.index(150_000)).next_multiple_of(align).min(model.len() - at);
        let span = GuestOffset::new(at as u64).span(len as u64);
        match random.below(8) {
            0 => {
                let flags = ZeroFlags { may_unmap: random.one_in(2), ..ZeroFlags::default() };
                disk.write_zeroes(span, flags).await.unwrap();
                model[at..at + len].fill(0);
            }
            1 => {
                disk.discard(span, WriteFlags::default()).await.unwrap();
                let read = disk.read(span.start(), Buffer::zeroed(len)).await.unwrap();
                read.copy_to(0, &mut model[at..at + len]);
            }
            2 => disk.flush().await.unwrap(),
            _ => {
                random.fill(&mut model[at..at + len]);
                disk.write(span.start(), Buffer::copy_of(&model[at..at + len]), WriteFlags::default())
                    .await
                    .unwrap();
            }
        }
    }
}

fn agree(dir: &Dir, name: &str, image: &[u8], model: &[u8]) {
    let (qcow2, raw) = (dir.path(name), dir.path("model.raw"));
    std::fs::write(&qcow2, image).unwrap();
    std::fs::write(&raw, model).unwrap();
    let checked = run("qemu-img", &["check", text(&qcow2)]);
    assert!(checked.contains("No errors were found"), "{name}: {checked}");
    run("qemu-img", &["compare", "-f", "qcow2", "-F", "raw", text(&qcow2), text(&raw)]);
}

fn configurations() -> Vec<(&'static str, CreateOptions)> {
    let plain = CreateOptions { size: SIZE as u64, ..CreateOptions::without_journal() };
    vec![
        ("default", plain.clone()),
        ("v2", CreateOptions { version: 2, ..plain.clone() }),
        ("c512", CreateOptions { cluster_size: 512, ..plain.clone() }),
        ("c512r64", CreateOptions { cluster_size: 512, refcount_bits: 64, ..plain.clone() }),
        ("c4k r1", CreateOptions { cluster_size: 4096, refcount_bits: 1, ..plain.clone() }),
        ("c2m", CreateOptions { cluster_size: 2 << 20, ..plain.clone() }),
        ("ext16k", CreateOptions { cluster_size: 16_384, extended_l2: true, ..plain.clone() }),
        ("ext128k", CreateOptions { cluster_size: 131_072, extended_l2: true, ..plain.clone() }),
        ("lazy zstd", CreateOptions { lazy_refcounts: true, compression: Compression::Zstd, ..plain }),
    ]
}

#[test]
fn qemu_reads_what_was_written_here() {
    if !has_qemu() {
        return;
    }
    let dir = Dir::new("theirs");
    for (name, options) in configurations() {
        block_on(async {
            let image = MemoryStorage::new(name);
            create(&*image, None, &options).await.unwrap();
            agree(&dir, name, &image.content().to_vec(), &vec![0; SIZE]);
            let mut model = vec![0; SIZE];
            for round in 0..3 {
                let disk = open(&image).await;
                scribble(&disk, &mut model, 77 + round, 150).await;
                disk.close().await.unwrap();
                agree(&dir, name, &image.content().to_vec(), &model);
            }
        });
    }
}

#[test]
fn what_qemu_wrote_is_read_and_written_on_here() {
    if !has_qemu() {
        return;
    }
    let dir = Dir::new("ours");
    for options in [
        "cluster_size=64k",
        "compat=0.10",
        "cluster_size=512,refcount_bits=8",
        "cluster_size=2M,refcount_bits=64",
        "extended_l2=on,cluster_size=32k",
        "compression_type=zstd",
        "lazy_refcounts=on",
        "preallocation=metadata",
    ] {
        let path = dir.path("image.qcow2");
        let size = SIZE.to_string();
        run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, text(&path), &size]);
        run(
            "qemu-io",
            &[
                "-f",
                "qcow2",
                "-c",
                "write -P 1 0 100k",
                "-c",
                "write -P 2 1M 1M",
                "-c",
                "write -z 1200k 64k",
                "-c",
                "write -P 3 3000001 4567",
                "-c",
                "discard 1M 64k",
                "-c",
                "write -P 4 5M 128k",
                text(&path),
            ],
        );
        if !["extended", "prealloc", "2M"].iter().any(|word| options.contains(word)) {
            run(
                "qemu-io",
                &["-f", "qcow2", "-c", "write -c -P 5 4M 64k", "-c", "write -c -P 6 4160k 64k", text(&path)],
            );
        }
        // A snapshot makes clusters shared; what is written afterwards must not show in it.
        run("qemu-img", &["snapshot", "-c", "before", text(&path)]);
        let raw = dir.path("expected.raw");
        run("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", text(&path), text(&raw)]);
        let before = std::fs::read(&raw).unwrap();
        let mut model = before.clone();
        block_on(async {
            let image = MemoryStorage::holding(options, &std::fs::read(&path).unwrap());
            let disk = open(&image).await;
            let read = disk.read(GuestOffset::ZERO, Buffer::zeroed(SIZE)).await.unwrap();
            assert!(read.to_vec() == model, "{options}: reads differently here");
            scribble(&disk, &mut model, 5, 200).await;
            disk.close().await.unwrap();
            agree(&dir, "image.qcow2", &image.content().to_vec(), &model);
            // The snapshot, as QEMU and as this program read it.
            run(
                "qemu-img",
                &["convert", "-f", "qcow2", "-l", "before", "-O", "raw", text(&path), text(&raw)],
            );
            assert!(std::fs::read(&raw).unwrap() == before, "{options}: the snapshot changed");
            let shared: SharedStorage = image.clone();
            let header = Header::read(&*shared).await.unwrap();
            let files = Files { image: shared, data_file: None, below: None };
            let open = OpenOptions { snapshot: Some("before".to_owned()), ..OpenOptions::default() };
            let snapshot = Qcow2::open(header, files, open).await.unwrap();
            let read = snapshot.read(GuestOffset::ZERO, Buffer::zeroed(SIZE)).await.unwrap();
            assert!(read.to_vec() == before, "{options}: the snapshot reads differently here");
        });
    }
}
