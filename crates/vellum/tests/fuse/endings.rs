//! How a file comes and goes: in good order, in use, unmounted by another program, and after its server was
//! killed.

use std::fs::{File, OpenOptions};
use std::io::BufRead;
use std::os::unix::fs::FileExt;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::shown::{Shown, is_here, is_mounted};
use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::{path_text, succeed, vellum, vellum_command, wait};
use super::support::server::Server;
use super::{KINDS, MIB};

#[test]
fn a_file_that_was_made_goes_and_one_that_was_there_stays() {
    if !is_here() {
        return;
    }
    let dir = Dir::new("fuse-come");
    let image = KINDS[0].make(&dir, MIB);
    let shown = Shown::start(&dir.join("made"), &[&image]);
    assert_eq!(std::fs::metadata(&shown.file).expect("the file").len(), MIB as u64);
    let said = shown.stop();
    assert!(said.contains(&format!("serving {}\n", dir.text("made"))) && said.contains("closed"), "{said}");
    assert_eq!(dir.names(), ["image"]);
    KINDS[0].is_sound(&image);

    File::create(dir.join("found")).expect("an empty file");
    let shown = Shown::start(&dir.join("found"), &[&image]);
    assert_eq!(std::fs::metadata(&shown.file).expect("the file").len(), MIB as u64);
    shown.stop();
    assert_eq!(std::fs::metadata(dir.join("found")).expect("it stays").len(), 0);
}

#[test]
fn what_is_no_empty_file_is_not_mounted_on() {
    if !is_here() {
        return;
    }
    let dir = Dir::new("fuse-refused");
    let image = KINDS[0].make(&dir, MIB);
    let other = dir.text("other");
    vellum(&["create", "-f", "qcow2", &other, "1M"]).answer();
    let shown = Shown::start(&dir.join("disk"), &[&image]);
    let refused = |file: &str, arguments: &[&str], word: &str| {
        let ran = Shown::try_start(&dir.join(file), arguments).err().expect("it is refused");
        assert!(ran.code == 1 && ran.err.contains(word), "{ran:?}");
    };
    refused("disk", &[&other], "something is mounted");
    refused("image", &[&other], "not empty");
    refused("", &[&other], "not a regular file");
    refused("none/disk", &[&other], "can't mount on");
    assert!(!dir.join("none").exists());
    // A name has no slash; a path with `=` in it is a path for the one that it has.
    let named = format!("nobody={}", dir.text("file"));
    assert!(Server::try_start(&["--fuse", &named, &other]).is_err_and(|ran| ran.err.contains("no export")));
    assert!(
        Server::try_start(&["--fuse", "x=", &other])
            .is_err_and(|ran| ran.err.contains("does not name a file"))
    );
    let nothing = vellum(&["serve", &other]);
    assert!(nothing.code == 1 && nothing.err.contains("--nbd"), "{nothing:?}");
    // None of that has touched the one that is served.
    std::fs::read(&shown.file).expect("all of it");
    shown.stop();
    Shown::start(&dir.join("a=b"), &[&other]).stop();
    assert_eq!(dir.names(), ["image", "other"]);
}

#[test]
fn several_disks_are_several_files() {
    if !is_here() {
        return;
    }
    let dir = Dir::new("fuse-several");
    for (name, size) in [("one", "1M"), ("two", "2M")] {
        vellum(&["create", "-f", "qcow2", &dir.text(name), size]).answer();
    }
    let exports = [format!("one={}", dir.text("one")), format!("two={}", dir.text("two"))];
    let files = [format!("one={}", dir.text("file-one")), format!("two={}", dir.text("file-two"))];
    let mut arguments: Vec<&str> = exports.iter().flat_map(|export| ["--export", export]).collect();
    let ambiguous = Shown::try_start(&dir.join("file"), &arguments).err().expect("which?");
    assert!(ambiguous.err.contains("several disks"), "{ambiguous:?}");
    arguments.extend(files.iter().flat_map(|file| ["--fuse", file]));
    let server = Server::start(&arguments);
    for (name, size) in [("one", 1), ("two", 2)] {
        let path = dir.join(&format!("file-{name}"));
        let file = OpenOptions::new().write(true).open(&path).expect("the file");
        assert_eq!(file.metadata().expect("facts").len(), size * MIB as u64);
        file.write_all_at(name.as_bytes(), 0).expect("a write");
    }
    for name in ["one", "two"] {
        let mut client = Client::connect(&server.peer(), name).expect("NBD");
        assert_eq!(client.read(0, 3).expect("a read"), name.as_bytes());
    }
    server.stop();
    assert_eq!(dir.names(), ["one", "two"]);
}

#[test]
fn a_file_in_use_is_taken_away_and_nothing_that_was_synced_is_lost() {
    if !is_here() {
        return;
    }
    let dir = Dir::new("fuse-busy");
    let image = KINDS[1].make(&dir, 8 * MIB);
    let shown = Shown::start(&dir.join("disk"), &[&image]);
    let file = OpenOptions::new().read(true).write(true).open(&shown.file).expect("the file");
    let synced = AtomicU64::new(0);
    let (said, error) = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for sector in (1..).map(|number| number % (16 << 10)) {
                if let Err(error) = file.write_all_at(&[1; 512], sector * 512).and_then(|()| file.sync_data())
                {
                    return error;
                }
                synced.fetch_max(sector, Ordering::Relaxed);
            }
            unreachable!("it goes round")
        });
        while synced.load(Ordering::Relaxed) < 20 {
            std::thread::sleep(Duration::from_millis(5));
        }
        let said = shown.stop();
        (said, writer.join().expect("the writer"))
    });
    assert!(said.contains("is in use; it is unmounted"), "{said}");
    let gone = [Errno::NOTCONN, Errno::CONNABORTED].map(|errno| Some(errno.raw_os_error()));
    assert!(gone.contains(&error.raw_os_error()), "{error}");
    file.read_at(&mut [0; 512], 0).expect_err("nobody is behind it");
    drop(file);
    assert_eq!(dir.names(), ["image"]);
    KINDS[1].is_sound(&image);
    let server = Server::start(&[&image]);
    let mut client = Client::connect(&server.peer(), "").expect("NBD");
    for sector in 1..=synced.load(Ordering::Relaxed) {
        assert_eq!(client.read(sector * 512, 512).expect("a read"), [1; 512], "sector {sector}");
    }
    server.stop();
}

#[test]
fn what_a_killed_server_left_is_taken_away_by_the_next() {
    if !is_here() {
        return;
    }
    let dir = Dir::new("fuse-stale");
    let image = KINDS[0].make(&dir, MIB);
    for round in 0..2_u8 {
        let mut shown = Shown::start(&dir.join("disk"), &[&image]);
        let file = OpenOptions::new().read(true).write(true).open(&shown.file).expect("the file");
        if round == 1 {
            let mut byte = [0];
            file.read_exact_at(&mut byte, 99).expect("a read");
            assert_eq!(byte, [7], "it was synced before the kill");
        }
        file.write_all_at(&[7], 99).expect("a write");
        file.sync_all().expect("a sync");
        if round == 1 {
            // What the kernel remembers of it, for a second, outlives the server; the next is not misled.
            std::fs::metadata(&shown.file).expect("its facts");
        }
        shown.kill();
        if round == 0 {
            file.read_at(&mut [0], 0).expect_err("nobody is behind it");
            let error = std::fs::metadata(&shown.file).expect_err("nobody is behind it");
            assert_eq!(error.raw_os_error(), Some(Errno::NOTCONN.raw_os_error()), "{error}");
        }
        let next = Shown::start(&dir.join("disk"), &[&image]);
        next.server().says("unmounted the stale mount");
        next.stop();
        drop(shown);
    }
    assert!(!is_mounted(&dir.join("disk")));
}

#[test]
fn what_another_mounted_at_the_path_stays() {
    if !is_here() {
        return;
    }
    let dir = Dir::new("fuse-another");
    let images = ["one", "two"].map(|name| {
        vellum(&["create", "-f", "qcow2", &dir.text(name), "1M"]).answer();
        dir.text(name)
    });
    for is_open in [true, false] {
        let first = Shown::start(&dir.join("disk"), &[&images[0]]);
        let file = OpenOptions::new().read(true).write(true).open(&first.file).expect("the file");
        file.write_all_at(b"first", 0).expect("a write");
        let file = is_open.then_some(file);
        succeed("umount", &["-l", path_text(&first.file)]);
        let second = Shown::start(&dir.join("disk"), &[&images[1]]);
        let other = OpenOptions::new().read(true).write(true).open(&second.file).expect("the other");
        other.write_all_at(b"second", 0).expect("a write");
        if let Some(file) = &file {
            let mut bytes = [0; 5];
            file.read_exact_at(&mut bytes, 0).expect("it is served as long as it is open");
            assert_eq!(&bytes, b"first");
        }
        let said = first.stop_elsewhere();
        assert!(!is_open || said.contains("unmounted by another program"), "{said}");
        let mut bytes = [0; 6];
        other.read_exact_at(&mut bytes, 0).expect("it is served");
        assert_eq!(&bytes, b"second");
        other.sync_all().expect("a sync");
        if let Some(file) = file {
            file.read_at(&mut [0], 0).expect_err("nobody is behind it");
        }
        drop(other);
        second.stop();
        // The second found the file that the first had made.
        std::fs::remove_file(dir.join("disk")).expect("the file is there");
    }
    for image in &images {
        assert_eq!(vellum(&["check", image]).code, 0);
    }
}

#[test]
fn a_file_that_a_user_put_there_meanwhile_stays() {
    if !is_here() {
        return;
    }
    let dir = Dir::new("fuse-put");
    let image = KINDS[0].make(&dir, MIB);
    let disk = dir.join("disk");
    for is_new in [true, false] {
        let shown = Shown::start(&disk, &[&image]);
        succeed("umount", &[path_text(&disk)]);
        if is_new {
            // Empty as the one that was made, and on many file systems with its number.
            std::fs::remove_file(&disk).expect("nothing is mounted there");
            File::create(&disk).expect("another");
        } else {
            std::fs::write(&disk, b"mine").expect("bytes in it");
        }
        let said = shown.stop();
        assert!(said.contains("is not removed"), "{said}");
        assert_eq!(std::fs::read(&disk).expect("it stays"), if is_new { &b""[..] } else { b"mine" });
        std::fs::remove_file(&disk).expect("the file is there");
    }
}

/// A server with nothing but a file, which the support for servers does not start.
fn file_alone(dir: &Dir, image: &str) -> Child {
    let file = dir.text("disk");
    let mut child = vellum_command()
        .args(["serve", image, "--fuse", &file])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("our own program can be started");
    let mut line = String::new();
    let stderr = child.stderr.as_mut().expect("it was asked for");
    std::io::BufReader::with_capacity(1, stderr).read_line(&mut line).expect("a line");
    assert_eq!(line, format!("serving {file}\n"));
    child
}

#[test]
fn a_server_of_one_file_ends_when_that_is_unmounted() {
    if !is_here() {
        return;
    }
    let dir = Dir::new("fuse-alone");
    let image = KINDS[0].make(&dir, MIB);
    let child = file_alone(&dir, &image);
    std::fs::write(dir.join("bytes"), [5; 512]).expect("bytes");
    succeed(
        "dd",
        &[&format!("if={}", dir.text("bytes")), &format!("of={}", dir.text("disk")), "conv=notrunc"],
    );
    succeed("umount", &[path_text(&dir.join("disk"))]);
    let ran = wait(child, Instant::now(), Duration::from_secs(60)).expect("it ends by itself");
    assert!(ran.code == 0 && ran.err.contains("closed"), "{ran:?}");
    assert_eq!(dir.names(), ["bytes", "image"]);
    KINDS[0].is_sound(&image);

    // One that serves something else continues, and ends by a signal.
    let shown = Shown::start(&dir.join("disk"), &[&image]);
    succeed("umount", &[path_text(&shown.file)]);
    let mut client = Client::connect(&shown.server().peer(), "").expect("NBD");
    assert_eq!(client.read(0, 512).expect("a read"), [5; 512]);
    drop(client);
    shown.stop();
}
