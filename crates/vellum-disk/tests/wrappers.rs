//! A disk on a thread of its own: used from several threads, abandoned half way, dropped, refused.

use std::path::{Path, PathBuf};
use std::pin::pin;

use futures_lite::future::{block_on, poll_once, zip};
use vellum_disk::{Buffer, ErrorKind, Image, blocking, threaded};

/// A directory of its own, removed at the end.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let place = std::env::var_os("VELLUM_TEST_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
        let path = place.join(format!("vellum-disk-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory");
        Self(path)
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

fn create(path: &Path) -> blocking::Disk {
    let path = path.to_owned();
    blocking::Disk::start(move || Image::create(path, 16 << 20)).expect("a new disk")
}

fn read(disk: &blocking::Disk, at: u64) -> [u8; 5] {
    let mut bytes = [0; 5];
    disk.read_at(at, &mut bytes).expect("a read");
    bytes
}

#[test]
fn threads_share_a_disk_and_it_is_there_after_closing() {
    let dir = Dir::new("share");
    let path = dir.path("disk.qcow2");
    let disk = create(&path);
    std::thread::scope(|scope| {
        for index in 0..4_u64 {
            let disk = &disk;
            scope.spawn(move || {
                disk.write_at(index << 20, &[u8::try_from(index).expect("small") + 1; 5]).expect("a write");
                disk.flush().expect("a flush");
            });
        }
    });
    disk.close().expect("a clean close");
    let disk = blocking::Disk::open(&path).expect("the disk again");
    assert_eq!(disk.size(), 16 << 20);
    for index in 0..4_u64 {
        assert_eq!(read(&disk, index << 20), [u8::try_from(index).expect("small") + 1; 5]);
    }
    disk.discard(0, 1 << 20).expect("a discard");
    let past = disk.write_at(16 << 20, b"x").expect_err("behind the end");
    assert_eq!(past.kind(), ErrorKind::Invalid);
    assert_eq!(disk.discard(u64::MAX, 2).expect_err("behind everything").kind(), ErrorKind::Invalid);
    disk.close().expect("a clean close");
}

#[test]
fn a_disk_that_is_dropped_is_closed() {
    let dir = Dir::new("drop");
    let path = dir.path("disk.qcow2");
    let disk = create(&path);
    disk.write_at(4096, b"hello").expect("a write");
    drop(disk);
    let disk = blocking::Disk::open(&path).expect("no lock is left");
    assert_eq!(read(&disk, 4096), *b"hello", "also what was not flushed");
}

#[test]
fn a_request_whose_future_is_dropped_is_completed_before_the_disk_is_closed() {
    let dir = Dir::new("abandon");
    let path = dir.path("disk.qcow2");
    let new = path.clone();
    block_on(async {
        let disk = threaded::Disk::start(move || Image::create(new, 16 << 20)).await.expect("a new disk");
        for index in 0..16_u64 {
            // Polled once, which makes the request, and dropped.
            let data = Buffer::copy_of(b"hello");
            drop(poll_once(pin!(disk.write_at(index << 20, data))).await);
        }
        disk.close().await.expect("a clean close");
    });
    let disk = blocking::Disk::open(&path).expect("the disk again");
    for index in 0..16_u64 {
        assert_eq!(read(&disk, index << 20), *b"hello");
    }
}

#[test]
fn futures_of_a_threaded_disk_are_send_and_run_at_the_same_time() {
    fn is_send<T: Send>(value: T) -> T {
        value
    }
    let dir = Dir::new("send");
    let path = dir.path("disk.vlm");
    block_on(async {
        let disk = threaded::Disk::start(move || Image::create(path, 16 << 20)).await.expect("a new disk");
        let one = is_send(disk.write_at(0, Buffer::copy_of(b"first")));
        let two = is_send(disk.write_at(1 << 20, Buffer::copy_of(b"other")));
        let (one, two) = zip(one, two).await;
        one.and(two).expect("both writes");
        is_send(disk.flush()).await.expect("a flush");
        let read = is_send(disk.read_at(1 << 20, Buffer::for_overwrite(5))).await.expect("a read");
        assert_eq!(read.to_vec(), b"other");
        is_send(disk.close()).await.expect("a clean close");
    });
}

#[test]
fn an_image_that_cannot_be_opened_says_why() {
    let dir = Dir::new("refused");
    let absent = blocking::Disk::open(dir.path("absent.qcow2")).err().expect("there is none");
    assert_eq!(absent.kind(), ErrorKind::NotFound);
    let unnamed = dir.path("disk");
    let unnamed = blocking::Disk::start(move || Image::create(unnamed, 1 << 20)).err().expect("no format");
    assert!(unnamed.chain().contains("does not show its format"), "{}", unnamed.chain());
    let path = dir.path("disk.qcow2");
    let disk = create(&path);
    let second = blocking::Disk::open(&path).err().expect("it is open already");
    assert_eq!(second.kind(), ErrorKind::Locked);
    disk.close().expect("a clean close");
}

#[test]
fn a_template_elsewhere_is_refused_until_its_directory_is_allowed() {
    let (dir, other) = (Dir::new("clone"), Dir::new("template"));
    let (template, clone) = (other.path("template.raw"), dir.path("clone.qcow2"));
    std::fs::write(&template, vec![7; 1 << 20]).expect("a template");
    let (one, two) = (template.clone(), clone.clone());
    let refused = blocking::Disk::start(move || Image::clone_of(one, two)).err().expect("it is elsewhere");
    assert_eq!(refused.kind(), ErrorKind::Refused);
    let new =
        vellum_disk::NewImage::of(vellum_disk::FormatKind::Qcow2).backing(&template).allow_dir(&other.0);
    let disk = blocking::Disk::start(move || new.create(clone)).expect("its directory is allowed");
    assert_eq!(read(&disk, 4096), [7; 5]);
    disk.close().expect("a clean close");
}

#[test]
fn after_a_panic_on_its_thread_a_disk_is_closed() {
    let dir = Dir::new("panic");
    let path = dir.path("disk.qcow2");
    let disk = create(&path);
    disk.write_at(4096, b"hello").expect("a write");
    disk.flush().expect("a flush");
    let panicked = disk.with(async |_| panic!("as planned"));
    assert_eq!(panicked.expect_err("it has no value").kind(), ErrorKind::Closed);
    assert_eq!(disk.flush().expect_err("its thread is gone").kind(), ErrorKind::Closed);
    assert_eq!(disk.close().expect_err("its thread is gone").kind(), ErrorKind::Closed);
    let disk = blocking::Disk::open(&path).expect("it is recovered");
    assert_eq!(read(&disk, 4096), *b"hello", "what was flushed is there");
    disk.close().expect("a clean close");
}
