//! An image is written by one program at a time; references stay where they are allowed; a raw disk is called
//! raw.

use super::MIB;
use super::refused;
use super::support::client::Client;
use super::support::dir::Dir;
use super::support::noise;
use super::support::program::{finish, qemu_io, run, succeed, vellum, vellum_command};
use super::support::server::{Foreign, Server};
use crate::requires;

fn qcow2(dir: &Dir, name: &str) -> String {
    let path = dir.text(name);
    vellum(&["create", "-q", "-f", "qcow2", &path, "8M"]).answer();
    path
}

#[test]
fn what_we_serve_qemu_does_not_open() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("locks");
    let path = qcow2(&dir, "image.qcow2");
    let server = Server::start(&[&path]);
    for arguments in
        [&["info", &path][..], &["check", &path], &["resize", &path, "9M"], &["compare", &path, &path]]
    {
        let ran = run("qemu-img", arguments);
        assert!(ran.code != 0 && ran.err.contains("lock"), "{arguments:?}: {ran:?}");
    }
    let ran = run("qemu-io", &["-f", "qcow2", "-c", "read 0 512", &path]);
    assert!(ran.code != 0 && ran.err.contains("lock"), "{ran:?}");
    succeed("qemu-img", &["info", "-U", &path]);
    server.stop();
    succeed("qemu-img", &["info", &path]);
    // Served for reading, others may read.
    let server = Server::start(&[&path, "--read-only"]);
    succeed("qemu-img", &["info", &path]);
    let ran = run("qemu-io", &["-f", "qcow2", "-c", "write 0 512", &path]);
    assert!(ran.code != 0 && ran.err.contains("lock"), "{ran:?}");
    server.stop();
    // The lock goes with the process, whatever becomes of it.
    let server = Server::start(&[&path]);
    server.kill();
    qemu_io(&["-f", "qcow2", &path], &["write 0 512".to_owned()]);
}

#[test]
fn what_qemu_serves_we_do_not_open() {
    requires!("qemu-nbd");
    let dir = Dir::new("locks");
    let path = qcow2(&dir, "image.qcow2");
    let before = std::fs::metadata(&path).expect("the image").len();
    let foreign = Foreign::start("qemu-nbd", |socket| {
        ["-t", "-k", socket, "-f", "qcow2", &path].map(str::to_owned).to_vec()
    });
    let socket = format!("unix:{}", dir.text("s"));
    let other = dir.text("other");
    for arguments in [
        &["info", &path][..],
        &["map", &path],
        &["check", &path],
        &["convert", &path, &other],
        &["serve", &path, "--nbd", &socket, "--read-only"],
    ] {
        refused(1, &["image.qcow2", "in use", "--force-share"], arguments);
    }
    for arguments in [
        &["serve", &path, "--nbd", &socket][..],
        &["recover", &path],
        &["check", "-r", "all", &path],
        &["create", "-f", "qcow2", &path, "1M"],
        &["create", "-f", "raw", &path, "1M"],
    ] {
        refused(1, &["image.qcow2", "in use", "close it there first"], arguments);
    }
    refused(2, &["image.qcow2", "in use"], &["compare", &path, &path]);
    refused(1, &["--force-share"], &["check", "-r", "all", "-U", &path]);
    assert_eq!(std::fs::metadata(&path).expect("the image").len(), before, "it is not touched");
    vellum(&["info", "--force-share", &path]).answer();
    vellum(&["map", "-U", &path]).answer();
    let server = Server::start(&[&path, "--read-only", "--force-share"]);
    server.stop();
    foreign.stop();
    vellum(&["check", &path]).answer();
}

#[test]
fn what_is_below_a_disk_that_is_served_is_not_written() {
    let dir = Dir::new("locks");
    let base = qcow2(&dir, "base.qcow2");
    let clone = dir.text("clone.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", &clone]).answer();
    let other = dir.text("other.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", &other]).answer();
    let server = Server::start(&[&clone]);
    let socket = format!("unix:{}", dir.text("s"));
    refused(1, &["base.qcow2", "in use"], &["serve", &base, "--nbd", &socket]);
    refused(1, &["clone.qcow2", "in use"], &["serve", &clone, "--nbd", &socket]);
    vellum(&["info", &base]).answer();
    if super::support::program::has("qemu-io") {
        let ran = run("qemu-io", &["-f", "qcow2", "-c", "write 0 512", &base]);
        assert!(ran.code != 0 && ran.err.contains("lock"), "{ran:?}");
    }
    // A second clone of the same base is no conflict.
    Server::start(&[&other]).stop();
    server.stop();
    Server::start(&[&base]).stop();
}

#[test]
fn references_lead_nowhere_else() {
    let dir = Dir::new("references");
    for part in ["images", "templates"] {
        std::fs::create_dir(dir.join(part)).expect("a directory");
    }
    let bytes = noise(MIB, 60);
    std::fs::write(dir.join("templates/base"), &bytes).expect("a template");
    let (inside, templates) = (dir.join("images"), dir.text("templates"));
    std::os::unix::fs::symlink(dir.join("templates/base"), inside.join("link")).expect("a link");
    let absolute = dir.text("templates/base");
    let socket = format!("unix:{}", dir.text("s"));
    for (index, name) in ["../templates/base", &absolute, "link"].into_iter().enumerate() {
        let clone = dir.text(&format!("images/clone{index}"));
        vellum(&["create", "-q", "-u", "-f", "qcow2", "-b", name, "-F", "raw", &clone, "1M"]).answer();
        let out = dir.text("out");
        for arguments in [
            &["convert", &clone, &out][..],
            &["map", &clone],
            &["info", "--backing-chain", &clone],
            &["serve", &clone, "--nbd", &socket],
        ] {
            refused(1, &["--allow-dir", "base"], arguments);
        }
        assert!(!dir.join("out").exists());
        // An image can be inspected without opening what it refers to.
        vellum(&["info", &clone]).answer();
        vellum(&["check", &clone]).answer();
        vellum(&["convert", "--allow-dir", &templates, &clone, &out]).answer();
        assert_eq!(std::fs::read(&out).expect("the copy"), bytes, "{name}");
        std::fs::remove_file(&out).expect("the copy");
        let mut command = vellum_command();
        command.args(["map", &clone]).env("VELLUM_ALLOW_DIRS", &templates);
        finish(command, None).answer();
    }
    // A data file is a reference too.
    let image = dir.text("images/data.qcow2");
    let option = format!("data_file={}", dir.text("templates/new"));
    vellum(&["create", "-q", "-f", "qcow2", "-o", &option, &image, "1M"]).answer();
    refused(1, &["--allow-dir", "new"], &["serve", &image, "--nbd", &socket]);
    Server::start(&[&image, "--allow-dir", &templates]).stop();
}

#[test]
fn a_raw_disk_is_written_when_it_is_said_to_be_raw() {
    let dir = Dir::new("raw");
    let (raw, qcow2) = (dir.text("disk"), qcow2(&dir, "image.qcow2"));
    std::fs::write(&raw, noise(MIB, 61)).expect("a disk");
    let socket = format!("unix:{}", dir.text("s"));
    refused(1, &["disk", "-f raw"], &["serve", &raw, "--nbd", &socket]);
    Server::start(&[&raw, "--read-only"]).stop();
    let server = Server::start(&[&raw, "-f", "raw"]);
    // A guest that writes the first bytes of a qcow2 image makes no qcow2 image.
    let header = std::fs::read(&qcow2).expect("the image");
    let mut client = Client::connect(&server.peer(), "").expect("a server");
    client.write(0, &header[..512], 0).expect("a write");
    client.disconnect();
    server.stop();
    let server = Server::start(&[&raw, "-f", "raw"]);
    let mut client = Client::connect(&server.peer(), "").expect("a server");
    assert_eq!(client.size, MIB as u64);
    assert_eq!(client.read(0, 512).expect("a read"), &header[..512]);
    client.disconnect();
    server.stop();
    // Two exports cannot have one name, nor one socket two servers.
    let one = format!("a={raw}");
    refused(
        1,
        &["a"],
        &["serve", "-f", "raw", "--export", &one, "--export", &format!("a={qcow2}"), "--nbd", &socket],
    );
}
