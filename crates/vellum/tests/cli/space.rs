//! Where there is no room, and where the room is a block device.

use super::MIB;
use super::support::client::Client;
use super::support::dir::Dir;
use super::support::loops::{Failing, LoopDevice, Mount};
use super::support::program::{has, qemu_dump, qemu_io, run, succeed, vellum};
use super::support::server::Server;
use super::support::{first_difference, noise, patchy};
use super::{refused, support};
use crate::requires;

const NO_SPACE: i32 = 28;
const PIECE: usize = 48 << 10;

/// Formats, with the options that images of them are made with.
const KINDS: [(&str, &str); 3] = [("raw", ""), ("qcow2", "journal=off"), ("qcow2", "journal=on")];

/// The arguments that say so.
fn said(options: &str) -> Vec<&str> {
    if options.is_empty() { Vec::new() } else { vec!["-o", options] }
}

/// Fills the disk until the file system is full, makes room, continues, and finds every byte that was
/// written.
fn fill(mount: &Mount, (format, options): (&str, &str), way: &[&str]) {
    let about = format!("{format} {options} {way:?}");
    let (image, ballast) = (mount.dir.text("image"), mount.dir.join("ballast"));
    vellum(&[&["create", "-q", "-f", format], &said(options)[..], &[&image, "64M"]].concat()).answer();
    std::fs::write(&ballast, noise(8 * MIB, 70)).expect("there is room yet");
    let server = Server::start(&[&[&image, "-f", format], way].concat());
    let mut client = Client::connect(&server.peer(), "").expect("a server");
    let mut disk = vec![0; 64 * MIB];
    let pieces = disk.len() / PIECE;
    let (mut failed, mut refusals) = (Vec::new(), 0);
    for piece in 0..pieces {
        let (at, bytes) = (piece * PIECE, noise(PIECE, 71 + piece as u64));
        match client.write(at as u64, &bytes, 0) {
            Ok(()) => disk[at..at + PIECE].copy_from_slice(&bytes),
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(NO_SPACE), "{about}: {error}");
                failed.push(piece);
                refusals += 1;
            }
        }
        if refusals == 5 {
            break;
        }
    }
    assert_eq!(refusals, 5, "{about}: the file system is not full");
    // What was answered is there; a write that failed may have been done in part, so its place counts for
    // nothing.
    let first = client.read_all().expect("reads go on");
    for piece in &failed {
        let range = piece * PIECE..(piece + 1) * PIECE;
        disk[range.clone()].copy_from_slice(&first[range]);
    }
    assert_eq!(first_difference(&first, &disk), None, "{about}: full");
    std::fs::remove_file(&ballast).expect("the ballast");
    for piece in failed {
        let (at, bytes) = (piece * PIECE, noise(PIECE, 5000 + piece as u64));
        client
            .write(at as u64, &bytes, 0)
            .unwrap_or_else(|error| panic!("{about}: there is room again: {error}"));
        disk[at..at + PIECE].copy_from_slice(&bytes);
    }
    client.flush().unwrap_or_else(|error| panic!("{about}: there is room again: {error}"));
    assert_eq!(
        first_difference(&client.read_all().expect("reads go on"), &disk),
        None,
        "{about}: room again"
    );
    client.disconnect();
    server.stop();
    let server = Server::start(&[&image, "-f", format, "--read-only"]);
    let mut client = Client::connect(&server.peer(), "").expect("a server");
    assert_eq!(first_difference(&client.read_all().expect("reads"), &disk), None, "{about}: reopened");
    client.disconnect();
    server.stop();
    if format == "qcow2" {
        vellum(&["check", &image]).answer();
        if has("qemu-img") {
            succeed("qemu-img", &["check", &image]);
        }
    }
    std::fs::remove_file(&image).expect("the image");
}

#[test]
fn a_full_file_system_loses_nothing() {
    let Some(ext4) = Mount::ext4(32 << 20) else { return };
    for kind in KINDS {
        fill(&ext4, kind, &[]);
        fill(&ext4, kind, &["--io", "threads"]);
    }
}

#[test]
fn a_full_tmpfs_loses_nothing() {
    let Some(tmpfs) = Mount::tmpfs(24 << 20) else { return };
    for kind in KINDS {
        fill(&tmpfs, kind, &[]);
    }
}

#[test]
fn making_an_image_where_there_is_no_room() {
    let Some(mount) = Mount::tmpfs(4 << 20) else { return };
    let dir = Dir::new("room");
    std::fs::write(dir.join("source"), noise(8 * MIB, 80)).expect("a disk");
    let target = mount.dir.text("target");
    for format in ["raw", "qcow2"] {
        refused(
            1,
            &["target", "space"],
            &["convert", "-f", "raw", "-O", format, &dir.text("source"), &target],
        );
        assert_eq!(mount.dir.names(), Vec::<String>::new(), "{format}: half an image is left");
        refused(
            1,
            &["target", "space"],
            &["create", "-f", format, "-o", "preallocation=full", &target, "8M"],
        );
        assert_eq!(mount.dir.names(), Vec::<String>::new(), "{format}: half an image is left");
    }
}

#[test]
fn images_live_on_block_devices() {
    for block in [512, 4096] {
        let Some(device) = LoopDevice::new(48 << 20, block) else { return };
        let path = device.text();
        let dir = Dir::new("device");
        let bytes = patchy(24 * MIB, 90);
        std::fs::write(dir.join("source"), &bytes).expect("a disk");
        let source = dir.text("source");
        let kinds = KINDS.into_iter().flat_map(|kind| [(kind, false), (kind, true)]);
        for ((format, options), direct) in kinds {
            let about = format!("{format} {options} on blocks of {block}, direct {direct}");
            let way = if direct { &["--direct"][..] } else { &[] };
            let said = said(options);
            let convert =
                [&["convert", "-f", "raw", "-O", format], &said[..], way, &[&source, &path]].concat();
            let ran = vellum(&convert);
            assert_eq!(ran.code, 0, "{about}: {}", ran.err);
            let server = Server::start(&[&[&path, "-f", format], way].concat());
            let mut client = Client::connect(&server.peer(), "").expect("a server");
            let mut expected = client.read_all().expect("reads");
            let device_is_longer = usize::try_from(client.size).expect("short") > bytes.len();
            assert_eq!(device_is_longer, format == "raw", "{about}");
            assert_eq!(first_difference(&expected[..bytes.len()], &bytes), None, "{about}");
            for index in 0..20_usize {
                let (at, piece) = (index * 1_150_976, noise(20_480, 100 + index as u64));
                client.write(at as u64, &piece, 0).unwrap_or_else(|error| panic!("{about}: {error}"));
                expected[at..at + piece.len()].copy_from_slice(&piece);
            }
            client.zero(5 << 20, 1 << 20, 0).expect("zeros");
            expected[5 << 20..6 << 20].fill(0);
            client.flush().expect("a flush");
            assert_eq!(first_difference(&client.read_all().expect("reads"), &expected), None, "{about}");
            client.disconnect();
            if options != "journal=on" {
                server.stop();
            } else {
                server.kill();
                let recovered = vellum(&["recover", "--output", "json", &path]).json();
                assert!(recovered["journal"]["records-replayed"].as_u64() > Some(0), "{about}: {recovered}");
            }
            let copy = dir.text("copy");
            vellum(&["convert", "-f", format, "-O", "raw", &path, &copy]).answer();
            let copied = std::fs::read(&copy).expect("the copy");
            assert_eq!(first_difference(&copied, &expected), None, "{about}");
            if format == "qcow2" {
                vellum(&["check", &path]).answer();
                if has("qemu-img") {
                    succeed("qemu-img", &["check", "-f", "qcow2", &path]);
                    let same = run("qemu-img", &["compare", "-f", "qcow2", "-F", "raw", &path, &copy]);
                    assert_eq!(same.code, 0, "{about}: {same:?}");
                }
            }
        }
        // A device does not grow.
        vellum(&["create", "-q", &dir.text("large"), "64M"]).answer();
        let large = dir.text("large");
        refused(1, &[&path], &["convert", "-f", "raw", "-O", "raw", &large, &path]);
        vellum(&["create", "-q", "-f", "qcow2", &path, "1G"]).answer();
        let server = Server::start(&[&path, "-f", "qcow2"]);
        let mut client = Client::connect(&server.peer(), "").expect("a server");
        let piece = support::noise(1 << 20, 3);
        let full = (0..1024_u64).find_map(|mib| client.write(mib << 20, &piece, 0).err());
        assert_eq!(full.expect("the device is full").raw_os_error(), Some(NO_SPACE));
        client.disconnect();
        server.stop();
        vellum(&["check", &path]).answer();
    }
}

/// Deleting snapshots is what makes room. The newest one goes although nothing can be written beside what is there.
#[test]
fn a_snapshot_is_deleted_where_there_is_no_room() {
    requires!("qemu-img", "qemu-io");
    for mount in [Mount::ext4(48 << 20), Mount::tmpfs(24 << 20)].into_iter().flatten() {
        for options in ["cluster_size=4k", "cluster_size=64k,extended_l2=on"] {
            let (image, ballast) = (mount.dir.text("image"), mount.dir.join("ballast"));
            succeed("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, &image, "64M"]);
            let write =
                |byte: u8| drop(qemu_io(&["-f", "qcow2", &image], &[format!("write -P {byte} 0 3M")]));
            for (byte, name) in [(1, "one"), (2, "two"), (3, "three")] {
                write(byte);
                vellum(&["snapshot", "create", &image, name]).answer();
            }
            write(4);
            let disk = qemu_dump(image.as_ref(), "qcow2", None);
            let mut filling = std::fs::File::create(&ballast).expect("a file");
            let pieces = [vec![7; 1 << 16], vec![7; 512]];
            pieces.iter().for_each(|piece| while std::io::Write::write_all(&mut filling, piece).is_ok() {});
            drop(filling.sync_all());
            let before = std::fs::read(&image).expect("the image");
            refused(
                1,
                &["delete the newest snapshot first", "space"],
                &["snapshot", "delete", &image, "one"],
            );
            assert!(std::fs::read(&image).expect("the image") == before, "{options}: it was changed");
            vellum(&["snapshot", "delete", &image, "three"]).answer();
            succeed("qemu-img", &["check", "-q", &image]);
            assert_eq!(vellum(&["check", "-q", &image]).code, 0, "{options}");
            // Now there is room.
            vellum(&["snapshot", "delete", &image, "one"]).answer();
            vellum(&["snapshot", "delete", &image, "two"]).answer();
            succeed("qemu-img", &["check", "-q", &image]);
            assert!(qemu_dump(image.as_ref(), "qcow2", None) == disk, "{options}");
            let mut filling = std::fs::File::options().append(true).open(&ballast).expect("a file");
            std::io::Write::write_all(&mut filling, &vec![7; 6 << 20]).expect("the host has the space again");
            std::fs::remove_file(&ballast).expect("the file");
        }
    }
}

/// A user whose image could not be made must not believe that the old one is still there, nor that it is lost.
#[test]
fn a_failure_says_whether_what_was_there_is_gone() {
    let Some(mount) = Mount::tmpfs(16 << 20) else { return };
    let (image, secret) = (mount.dir.text("image"), mount.dir.text("secret"));
    std::fs::write(&secret, "correct horse").expect("a secret");
    let secret = format!("id=s,file={secret}");
    let old = noise(MIB, 90);
    let luks = ["-f", "luks", "--secret", &secret, "-o"];
    let luks_full = [&luks[..], &["key-secret=s,iter-time=10,preallocation=falloc"]].concat();
    let luks_huge = [&luks[..], &["key-secret=s,iter-time=10"]].concat();
    for (kind, size, is_gone) in [
        (&["-f", "raw", "-o", "preallocation=falloc"][..], "64M", true),
        (&["-f", "qcow2", "-o", "preallocation=falloc"], "64M", true),
        (&["-f", "vellum", "-o", "preallocation=falloc"], "64M", false),
        (&luks_full, "64M", true),
        (&luks_huge, "8E", false),
    ] {
        std::fs::write(&image, &old).expect("what was there");
        let ran = vellum(&[&["create"], kind, &[&image, size]].concat());
        assert_eq!(ran.code, 1, "{kind:?}: {ran:?}");
        assert_eq!(ran.err.contains("what it held before is gone"), is_gone, "{kind:?}: {ran:?}");
        assert_eq!(std::fs::read(&image).expect("there") != old, is_gone, "{kind:?}");
        // A file of its own is removed again.
        std::fs::remove_file(&image).expect("there");
        let ran = vellum(&[&["create"], kind, &[&image, size]].concat());
        assert!(ran.code == 1 && !ran.err.contains("gone") && !mount.dir.join("image").exists(), "{ran:?}");
    }
}

/// A flush that fails after the disk has grown.
#[test]
fn a_failed_resize_says_how_long_the_disk_is() {
    let Some(device) = Failing::new() else { return };
    let Some(mount) = Mount::ext4_on(&device.path) else { return };
    let image = mount.dir.text("image");
    vellum(&["create", "-q", "-f", "raw", &image, "1M"]).answer();
    device.fail();
    refused(
        1,
        &[&image, "has 8388608 bytes now, but perhaps not the space for them", "can't flush"],
        &["resize", "-f", "raw", "--preallocation", "full", &image, "8M"],
    );
    assert_eq!(std::fs::metadata(&image).expect("there").len(), 8 << 20);
}
