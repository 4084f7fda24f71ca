//! Vellum and QEMU keep each other, and themselves, from writing an image that is in use.
//!
//! The peers are the real `qemu-img`, `qemu-io` and `qemu-nbd`, where they are installed.

mod common;

use std::fs::OpenOptions as StdOpenOptions;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{LONG, LoopDevice, TempDir, call, in_both_modes, skip};
use vellum_core::{ErrorKind, Result};
use vellum_io::{File, IoMode, LockMode, OpenOptions, run};

fn reading() -> OpenOptions {
    OpenOptions::reading()
}

fn sharing() -> OpenOptions {
    OpenOptions::reading().lock(LockMode::ForceShare)
}

fn open(path: &Path, options: OpenOptions) -> Result<Arc<File>> {
    run(IoMode::Auto, async || File::open(path, options).await).expect("a worker")
}

/// Asserts that the image is in use, and that the message says which and what to do.
fn assert_locked(path: &Path, options: OpenOptions) {
    let error = open(path, options).expect_err("the image is in use");
    assert_eq!(error.kind(), ErrorKind::Locked, "{error:?}");
    assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    assert!(error.to_string().contains("close it there"), "{error}");
}

#[test]
fn files_of_one_process_exclude_each_other() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        let path = dir.join("image");
        let writer = File::create_new(&path, OpenOptions::writing()).await.expect("an image");
        for (options, is_free) in [(OpenOptions::writing(), false), (reading(), false), (sharing(), true)] {
            assert_eq!(File::open(&path, options).await.is_ok(), is_free, "beside a writer: {options:?}");
        }
        drop(writer);
        let reader = File::open(&path, reading()).await.expect("the writer has gone");
        for (options, is_free) in [(OpenOptions::writing(), false), (reading(), true), (sharing(), true)] {
            assert_eq!(File::open(&path, options).await.is_ok(), is_free, "beside a reader: {options:?}");
        }
        drop(reader);
        let sharer = File::open(&path, sharing()).await.expect("the reader has gone");
        let writer = File::open(&path, OpenOptions::writing()).await.expect("a sharer excludes nobody");
        drop((sharer, writer));
        let unlocked = File::open(&path, OpenOptions::writing().lock(LockMode::None)).await.expect("no lock");
        let writer = File::open(&path, OpenOptions::writing().direct(true)).await;
        match writer {
            Err(error) if error.kind() == ErrorKind::Unsupported => skip(&error.chain()),
            writer => drop(writer.expect("a file without a lock excludes nobody")),
        }
        drop(unlocked);
    });
}

#[test]
fn a_direct_writer_holds_one_lock_and_lets_go_of_it() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        let path = dir.join("image");
        std::fs::write(&path, [0; 4096]).expect("an image");
        for _ in 0..20 {
            match File::open(&path, OpenOptions::writing().direct(true)).await {
                Err(error) if error.kind() == ErrorKind::Unsupported => return skip(&error.chain()),
                file => drop(file.expect("nobody else has it")),
            }
        }
    });
}

fn has(program: &str) -> bool {
    let found = call(program, &["--version"]).is_ok();
    if !found {
        skip(&format!("{program} is not installed"));
    }
    found
}

fn image(dir: &TempDir, format: &str) -> PathBuf {
    let path = dir.join(&format!("image.{format}"));
    call("qemu-img", &["create", "-f", format, &path.display().to_string(), "16M"]).expect("an image");
    path
}

/// A `qemu-nbd` that serves an image, until dropped.
struct Served(Child);

impl Served {
    fn new(dir: &TempDir, image: &Path, format: &str, extra: &[&str]) -> Self {
        let socket = dir.join("nbd");
        drop(std::fs::remove_file(&socket));
        let child = Command::new("qemu-nbd")
            .args(["-t", "-k", &socket.display().to_string(), "-f", format])
            .args(extra)
            .arg(image)
            .stderr(Stdio::piped())
            .spawn()
            .expect("qemu-nbd starts");
        let served = Self(child);
        // It listens before it opens the image, and greets afterwards.
        let start = Instant::now();
        let greets = || UnixStream::connect(&socket).and_then(|mut stream| stream.read_exact(&mut [0; 8]));
        while greets().is_err() {
            assert!(start.elapsed() < LONG, "qemu-nbd serves");
            std::thread::sleep(Duration::from_millis(10));
        }
        served
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn info(path: &Path, format: &str, extra: &[&str]) -> Result<String, String> {
    let path = path.display().to_string();
    let mut arguments = vec!["info", "-f", format];
    arguments.extend(extra);
    arguments.push(&path);
    call("qemu-img", &arguments)
}

fn qemu_io(path: &Path, format: &str, extra: &[&str], command: &str) -> Result<String, String> {
    let path = path.display().to_string();
    let mut arguments = vec!["-f", format, "-c", command];
    arguments.extend(extra);
    arguments.push(&path);
    call("qemu-io", &arguments)
}

#[test]
fn an_image_that_qemu_writes_is_left_alone() {
    if !has("qemu-nbd") {
        return;
    }
    let dir = TempDir::new();
    for format in ["qcow2", "raw"] {
        let path = image(&dir, format);
        let served = Served::new(&dir, &path, format, &[]);
        assert_locked(&path, OpenOptions::writing());
        assert_locked(&path, reading());
        drop(open(&path, sharing()).expect("reading by force"));
        drop(served);
        drop(open(&path, OpenOptions::writing()).expect("qemu has gone"));
    }
}

#[test]
fn an_image_that_qemu_reads_can_be_read() {
    if !has("qemu-nbd") {
        return;
    }
    let dir = TempDir::new();
    for format in ["qcow2", "raw"] {
        let path = image(&dir, format);
        let served = Served::new(&dir, &path, format, &["-r"]);
        assert_locked(&path, OpenOptions::writing());
        drop(open(&path, reading()).expect("two readers"));
        drop(open(&path, sharing()).expect("two readers"));
        drop(served);
    }
}

#[test]
fn qemu_leaves_an_image_alone_that_we_write() {
    if !has("qemu-img") || !has("qemu-io") {
        return;
    }
    let dir = TempDir::new();
    let path = image(&dir, "qcow2");
    let writer = open(&path, OpenOptions::writing()).expect("nobody else has it");
    let error = info(&path, "qcow2", &[]).expect_err("we write it");
    assert!(error.contains("lock"), "{error}");
    info(&path, "qcow2", &["-U"]).expect("reading by force");
    let error = qemu_io(&path, "qcow2", &[], "write 0 64k").expect_err("we write it");
    assert!(error.contains("lock"), "{error}");
    let error = call("qemu-img", &["resize", "-f", "qcow2", &path.display().to_string(), "32M"]);
    assert!(error.expect_err("we write it").contains("lock"));
    drop(writer);
    qemu_io(&path, "qcow2", &[], "write 0 64k").expect("we have gone");

    let path = image(&dir, "raw");
    let writer = open(&path, OpenOptions::writing()).expect("nobody else has it");
    let error = qemu_io(&path, "raw", &[], "write 0 64k").expect_err("we write it");
    assert!(error.contains("lock"), "{error}");
    drop(writer);
}

#[test]
fn qemu_reads_beside_us_and_does_not_write_what_we_read() {
    if !has("qemu-img") || !has("qemu-io") {
        return;
    }
    let dir = TempDir::new();
    for format in ["qcow2", "raw"] {
        let path = image(&dir, format);
        let reader = open(&path, reading()).expect("nobody else has it");
        info(&path, format, &[]).expect("two readers");
        qemu_io(&path, format, &["-r"], "read 0 64k").expect("two readers");
        let error = qemu_io(&path, format, &[], "write 0 64k").expect_err("we read it");
        assert!(error.contains("lock"), "{error}");
        drop(reader);
        let sharer = open(&path, sharing()).expect("nobody else has it");
        qemu_io(&path, format, &[], "write 0 64k").expect("we read by force, which excludes nobody");
        drop(sharer);
    }
}

#[test]
fn devices_are_locked_as_files_are() {
    if !has("qemu-nbd") || !has("qemu-img") {
        return;
    }
    let Some(device) = LoopDevice::new(16 << 20, 512) else { return };
    let dir = TempDir::new();
    let path = device.path.display().to_string();
    call("qemu-img", &["create", "-f", "qcow2", &path, "8M"]).expect("an image on the device");
    let served = Served::new(&dir, &device.path, "qcow2", &[]);
    assert_locked(&device.path, OpenOptions::writing());
    assert_locked(&device.path, reading());
    drop(open(&device.path, sharing()).expect("reading by force"));
    drop(served);
    let writer = open(&device.path, OpenOptions::writing()).expect("qemu has gone");
    assert!(info(&device.path, "qcow2", &[]).expect_err("we write it").contains("lock"));
    info(&device.path, "qcow2", &["-U"]).expect("reading by force");
    drop(writer);
}

/// A lock that is held for a moment only, as during an inspection of an image, is waited out.
#[test]
fn a_conflict_that_passes_is_not_reported() {
    let dir = TempDir::new();
    let path = dir.join("image");
    let first = {
        drop(StdOpenOptions::new().create_new(true).write(true).open(&path).expect("an image"));
        open(&path, reading()).expect("nobody else has it")
    };
    let thread = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        drop(first);
    });
    drop(open(&path, OpenOptions::writing()).expect("it was free soon enough"));
    thread.join().expect("it ends");
}
