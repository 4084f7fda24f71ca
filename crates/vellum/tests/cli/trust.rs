//! Images whose headers refer to files of others.
//!
//! Each of these was an attack that worked: a guest, or the owner of an uploaded image, reads and writes
//! another user's disk.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::loops::LoopDevice;
use super::support::noise;
use super::support::program::{Ran, finish, vellum, vellum_command};
use super::support::server::Server;
use super::{MIB, refused};

const SECRET: &[u8] = b"the neighbour's secret";

/// Another user's disk.
fn put_victim(path: &Path) {
    let mut bytes = vec![0; MIB];
    bytes[..SECRET.len()].copy_from_slice(SECRET);
    std::fs::write(path, bytes).expect("the victim");
}

fn starts_with_secret(path: &Path) -> bool {
    std::fs::read(path).is_ok_and(|bytes| bytes.starts_with(SECRET))
}

/// Makes a qcow2 image over `backing`, which is not opened.
#[track_caller]
fn put_overlay(image: &str, backing: &str) {
    vellum(&["create", "-q", "-f", "qcow2", "-u", "-b", backing, "-F", "raw", image, "1M"]).answer();
}

/// Makes a qcow2 image whose header has this name of a data file, which was not checked when it was made.
#[track_caller]
fn put_with_data_file(dir: &Dir, image: &str, data_file: &str) {
    // An absolute path, of the same length: a data file's name is written as it is given.
    let stand_in = format!("/tmp/{:0width$}", std::process::id(), width = data_file.len() - "/tmp/".len());
    assert_eq!(stand_in.len(), data_file.len(), "{stand_in}");
    let made = dir.text("made.qcow2");
    let option = format!("journal=off,data_file={stand_in}");
    vellum(&["create", "-q", "-f", "qcow2", "-o", &option, &made, "1M"]).answer();
    let mut bytes = std::fs::read(&made).expect("the image");
    let at = bytes.windows(stand_in.len()).position(|part| part == stand_in.as_bytes()).expect("the name");
    bytes[at..at + data_file.len()].copy_from_slice(data_file.as_bytes());
    for name in [made, stand_in] {
        std::fs::remove_file(name).expect("it was just made");
    }
    let target = std::fs::OpenOptions::new().write(true).create(true).truncate(false).open(image);
    std::io::Write::write_all(&mut target.expect("the image's place"), &bytes).expect("the image");
}

#[track_caller]
fn serve_refused(words: &[&str], arguments: &[&str]) {
    let Err(ran) = Server::try_start(arguments).map(|_| ()) else { panic!("{arguments:?} is served") };
    let ran: Ran = *ran;
    assert_eq!(ran.code, 1, "{ran:?}");
    for word in words {
        assert!(ran.err.contains(word), "{arguments:?} does not say {word:?}: {}", ran.err);
    }
}

/// Writes the first block of what is served.
#[track_caller]
fn write_through(arguments: &[&str]) {
    let server = Server::start(arguments);
    let mut client = Client::connect(&server.peer(), "").expect("a client");
    client.write(0, &noise(65_536, 1), 0).expect("a write");
    client.disconnect();
    server.stop();
}

#[test]
fn an_image_on_a_device_neither_reads_nor_writes_other_devices() {
    let (Some(own), Some(victim)) = (LoopDevice::new(8 << 20, 512), LoopDevice::new(1 << 20, 512)) else {
        return;
    };
    let dir = Dir::new("trust");
    put_victim(&victim.path);
    let (image, out) = (own.text(), dir.text("out.raw"));
    put_overlay(&image, &victim.text());
    for said in [&[][..], &["-f", "qcow2"]] {
        let arguments = [&["convert", "-O", "raw"], said, &[&image, &out]].concat();
        refused(1, &["device", &victim.text(), "--allow-dir /dev"], &arguments);
        refused(
            1,
            &["device", "--allow-dir /dev"],
            &[&["info", "--backing-chain"], said, &[&image]].concat(),
        );
        refused(1, &["device", "--allow-dir /dev"], &[&["map"], said, &[&image]].concat());
        assert!(!Path::new(&out).exists());
    }
    vellum(&["convert", "-O", "raw", "--allow-dir", "/dev", &image, &out]).answer();
    assert!(starts_with_secret(Path::new(&out)), "it is allowed now");

    put_with_data_file(&dir, &image, &victim.text());
    for said in [&[][..], &["-f", "qcow2"]] {
        serve_refused(&["--data-file", &victim.text()], &[&[image.as_str()], said].concat());
        serve_refused(&["device", "--allow-dir"], &[&[image.as_str(), "-r"], said].concat());
        let ran = refused(
            1,
            &["device"],
            &[&["convert", "-O", "raw"], said, &[&image, &dir.text("out2.raw")]].concat(),
        );
        assert!(ran.err.contains("--allow-dir"), "{ran:?}");
    }
    assert!(starts_with_secret(&victim.path), "nothing was written");
    write_through(&[&image, "--data-file", &victim.text()]);
    assert!(!starts_with_secret(&victim.path), "it was named now");
}

#[test]
fn a_data_file_is_written_only_when_it_or_its_directory_is_named() {
    let dir = Dir::new("trust");
    let (image, victim) = (dir.text("hostile.qcow2"), dir.join("victim.raw"));
    let named = victim.display().to_string();
    put_victim(&victim);
    put_with_data_file(&dir, &image, "victim.raw");
    for said in [&[][..], &["-f", "qcow2"]] {
        serve_refused(&["--data-file", &named, "a header alone"], &[&[image.as_str()], said].concat());
    }
    serve_refused(&["--data-file"], &[&image, "--data-file", &image]);
    serve_refused(&["none.raw"], &[&image, "--data-file", &dir.text("none.raw")]);
    let source = dir.text("source.raw");
    std::fs::write(&source, noise(MIB, 2)).expect("a disk");
    let ran = refused(1, &["--data-file"], &["convert", "-n", "-O", "qcow2", &source, &image]);
    assert!(ran.err.contains("a header alone"), "{ran:?}");
    assert!(starts_with_secret(&victim), "nothing was written");
    // It is read: the file is beside the image.
    Server::start(&[&image, "-r"]).stop();
    write_through(&[&image, "--data-file", &named]);
    assert!(!starts_with_secret(&victim));
    put_victim(&victim);
    write_through(&[&image, "--allow-dir", &dir.text("")]);
    assert!(!starts_with_secret(&victim));
    vellum(&["convert", "-n", "-O", "qcow2", "--data-file", &named, &source, &image]).answer();
    vellum(&["compare", &source, &image]).answer();
}

#[test]
fn a_raw_disk_whose_guest_wrote_the_header_of_an_image_is_not_taken_for_one() {
    let dir = Dir::new("trust");
    let (guest, out) = (dir.text("guest.raw"), dir.text("out.raw"));
    put_victim(&dir.join("victim.raw"));
    put_overlay(&dir.text("made.qcow2"), "victim.raw");
    let header = std::fs::read(dir.join("made.qcow2")).expect("the image");
    let mut disk = vec![0; 2 * MIB];
    disk[..header.len().min(MIB)].copy_from_slice(&header[..header.len().min(MIB)]);
    std::fs::write(&guest, &disk).expect("the guest's disk");
    let ways = ["guest.raw is expected to be a raw disk", "-f raw", "-f qcow2"];
    for arguments in [
        &["convert", "-O", "raw", &guest, &out][..],
        &["map", &guest],
        &["check", "-r", "all", &guest],
        &["recover", &guest],
        &["resize", &guest, "+1M"],
        &["journal", "disable", &guest],
        &["info", "--backing-chain", &guest],
    ] {
        refused(1, &ways, arguments);
    }
    refused(2, &ways, &["compare", &guest, &guest]);
    serve_refused(&ways, &[&guest]);
    serve_refused(&ways, &[&guest, "-r"]);
    assert_eq!(std::fs::read(&guest).expect("it is there"), disk, "nothing was written");
    // It is reported all the same.
    assert_eq!(vellum(&["info", "--output", "json", &guest]).json()["format"], "qcow2");
    vellum(&["convert", "-f", "raw", "-O", "raw", &guest, &out]).answer();
    assert_eq!(std::fs::read(&out).expect("the copy"), disk);
    vellum(&["convert", "-f", "qcow2", "-O", "raw", &guest, &out]).answer();
    assert!(starts_with_secret(Path::new(&out)), "the user says that it is an image");
}

#[test]
fn an_image_whose_name_says_nothing_refers_only_to_what_is_allowed() {
    let dir = Dir::new("trust");
    put_victim(&dir.join("victim.raw"));
    for name in ["disk.img", "disk"] {
        let (image, out) = (dir.text(name), dir.text("out.raw"));
        put_overlay(&image, "victim.raw");
        let words = ["only its content", "-f qcow2", "--allow-dir"];
        refused(1, &words, &["convert", "-O", "raw", &image, &out]);
        serve_refused(&words, &[&image]);
        vellum(&["convert", "-f", "qcow2", "-O", "raw", &image, &out]).answer();
        assert!(starts_with_secret(Path::new(&out)));
        vellum(&["convert", "-O", "raw", "--allow-dir", &dir.text(""), &image, &out]).answer();
        // One that refers to nothing is opened.
        vellum(&["create", "-q", "-f", "qcow2", &image, "1M"]).answer();
        write_through(&[&image]);
    }
    // The image above states the format.
    put_overlay(&dir.text("disk.img"), "victim.raw");
    let over = dir.text("over.qcow2");
    vellum(&["create", "-q", "-b", "disk.img", "-F", "qcow2", &over]).answer();
    vellum(&["map", &over]).answer();
}

/// `create` and `serve` report the same about an image, and the way out that they name works.
#[test]
fn create_says_at_once_what_serving_the_image_will_take() {
    let dir = Dir::new("trust");
    std::fs::create_dir_all(dir.join("far")).expect("a directory");
    std::fs::create_dir_all(dir.join("clones")).expect("a directory");
    let far = dir.text("far/t.raw");
    std::fs::write(&far, noise(MIB, 1)).expect("a template");
    std::os::unix::fs::symlink(&far, dir.join("clones/link.raw")).expect("a link");
    std::fs::copy(&far, dir.join("clones/near.raw")).expect("a template");
    let allow = format!("--allow-dir {}", dir.text("far"));
    for (name, backing, words) in [
        ("far.qcow2", far.as_str(), &["outside its own directory", &allow][..]),
        ("far.vlm", "../far/t.raw", &["outside its own directory", &allow]),
        ("link.qcow2", "link.raw", &["far/t.raw", &allow]),
        ("clone.img", "near.raw", &["only its content", "-f qcow2"]),
        ("clone.raw", "near.raw", &["is expected to be a raw disk", "-f qcow2"]),
        ("near.qcow2", "near.raw", &[]),
    ] {
        let image = dir.text(&format!("clones/{name}"));
        let mut arguments = vec!["create", "-q", "-b", backing, "-F", "raw"];
        if !name.ends_with("vlm") {
            arguments.extend(["-f", "qcow2"]);
        }
        let ran = vellum(&[&arguments[..], &[&image]].concat());
        assert_eq!((ran.code, ran.err.is_empty()), (0, words.is_empty()), "{ran:?}");
        for word in words {
            assert!(ran.err.contains(word), "{name} does not say {word:?}: {}", ran.err);
        }
        if words.is_empty() {
            write_through(&[&image]);
            continue;
        }
        serve_refused(words, &[&image]);
        match name.ends_with("g") || name.ends_with("raw") {
            true => write_through(&[&image, "-f", "qcow2"]),
            false => {
                write_through(&[&image, "--allow-dir", &dir.text("far")]);
                if name.ends_with("qcow2") {
                    refused(1, words, &["resize", &image, "+1M"]);
                }
                vellum(&["resize", "-q", "--allow-dir", &dir.text("far"), &image, "+1M"]).answer();
            }
        }
        let (far, clones) = (dir.text("far"), dir.text("clones"));
        let allowed = [&arguments[..], &["--allow-dir", &far, "--allow-dir", &clones, &image]].concat();
        let ran = vellum(&allowed);
        assert_eq!((ran.code, ran.err.is_empty()), (0, name != "clone.raw"), "{ran:?}");
    }
    let image = dir.text("clones/data.qcow2");
    let ran = vellum(&["create", "-q", "-o", "data_file=data.raw", &image, "1M"]);
    assert!(ran.code == 0 && ran.err.contains("--data-file"), "{ran:?}");
}

#[test]
fn a_backing_circle_is_told_as_one() {
    let dir = Dir::new("trust");
    let (own, one, other) = (dir.text("self.qcow2"), dir.text("one.qcow2"), dir.text("other.qcow2"));
    for (image, backing) in [(&own, "self.qcow2"), (&one, "other.qcow2"), (&other, "one.qcow2")] {
        vellum(&["create", "-q", "-u", "-b", backing, "-F", "qcow2", image, "1M"]).answer();
    }
    for image in [&own, &one] {
        serve_refused(&["loop", "appears again"], &[image]);
        refused(1, &["loop"], &["map", image]);
        refused(1, &["loop", "appears again"], &["info", "--backing-chain", image]);
    }
}

#[test]
fn an_empty_backing_format_is_not_one() {
    let dir = Dir::new("trust");
    let (base, clone) = (dir.text("base.qcow2"), dir.text("clone.qcow2"));
    vellum(&["create", "-q", "-f", "qcow2", &base, "1M"]).answer();
    put_overlay(&clone, "base.qcow2");
    let mut bytes = std::fs::read(&clone).expect("the image");
    // The header extension of 3 bytes gets the length 0; what was its text is an extension that no program knows.
    let extension = [&[0xe2, 0x79, 0x2a, 0xca, 0, 0, 0, 3][..], b"raw\0\0\0\0\0"].concat();
    let at = bytes.windows(extension.len()).position(|part| part == extension).expect("the extension");
    bytes[at + 7] = 0;
    std::fs::write(&clone, &bytes).expect("the image");
    vellum(&["map", &clone]).answer();
    let chain = vellum(&["info", "--backing-chain", "--output", "json", &clone]).json();
    assert_eq!(chain[1]["format"], "qcow2", "{chain}");
}

#[test]
fn what_is_wrong_below_is_named_with_its_depth() {
    let dir = Dir::new("trust");
    for part in ["near", "far"] {
        std::fs::create_dir(dir.join(part)).expect("a directory");
    }
    let (top, middle) = (dir.text("near/top.qcow2"), dir.text("near/middle.qcow2"));
    vellum(&["create", "-q", "-f", "qcow2", "-u", "-b", "middle.qcow2", "-F", "qcow2", &top, "1M"]).answer();
    put_victim(&dir.join("far/victim.raw"));
    for (backing, word) in [("gone.raw", "no such file"), ("../far/victim.raw", "--allow-dir")] {
        put_overlay(&middle, backing);
        for arguments in [&["map", &top][..], &["info", "--backing-chain", &top]] {
            refused(1, &[&format!("{backing} (depth 2)"), word], arguments);
        }
    }
}

#[test]
fn a_backing_name_that_is_not_utf8_is_named_as_such() {
    let dir = Dir::new("trust");
    let mut command = vellum_command();
    command.args(["create", "-F", "raw", "-b"]).arg(std::ffi::OsStr::from_bytes(b"ba\xFFse.raw"));
    command.arg(dir.join("disk.qcow2"));
    let ran = finish(command, None);
    assert!(ran.code == 1 && ran.err.contains("not UTF-8") && !ran.err.contains("Usage"), "{ran:?}");
}
