//! An export of an NBD server as an image.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::support::dir::Dir;
use super::support::program::{path_text, vellum};
use super::support::server::Server;
use super::support::until;
use crate::requires;

const MIB: usize = 1 << 20;

/// What the exports here hold: data, and much that is zero.
fn content() -> Vec<u8> {
    let mut bytes = vec![0; 16 * MIB];
    for (start, len) in [(0, 5000), (3 * MIB + 7, 70_000), (15 * MIB, MIB)] {
        for (at, byte) in bytes.iter_mut().enumerate().skip(start).take(len) {
            *byte = u8::try_from(at % 251 + 1).expect("small");
        }
    }
    bytes
}

/// A server of another program, ended with the test.
struct Foreign(Child);

impl Foreign {
    /// Starts it, and waits until its socket is there.
    fn start(program: &str, arguments: &[&str], socket: &Path) -> Self {
        let child = Command::new(program).args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let started = Self(child.expect("it is installed"));
        until("its socket is there", || socket.exists());
        started
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The export is described, compared and copied, and the copy is equal.
#[track_caller]
fn reads_as(uri: &str, raw: &str, dir: &Dir) {
    let facts = vellum(&["info", "--output", "json", uri]).json();
    assert_eq!((&facts["format"], &facts["virtual-size"]), (&"raw".into(), &(16 * MIB).into()), "{facts}");
    let copy = dir.text("copy.qcow2");
    vellum(&["convert", uri, &copy]).answer();
    vellum(&["compare", "-F", "raw", &copy, raw]).answer();
    vellum(&["compare", "-F", "raw", uri, raw]).answer();
    std::fs::remove_file(&copy).expect("the copy");
}

fn raw_in(dir: &Dir) -> String {
    let raw = dir.text("disk.raw");
    std::fs::write(&raw, content()).expect("a file");
    raw
}

#[test]
fn an_export_of_our_own_server_is_an_image() {
    let dir = Dir::new("nbd-own");
    let raw = raw_in(&dir);
    let image = dir.text("disk.qcow2");
    vellum(&["convert", "-f", "raw", "-O", "qcow2", &raw, &image]).answer();
    let server = Server::start(&["--nbd", "tcp:127.0.0.1:0", "--export", &format!("a disk={image}")]);
    for uri in [server.uri("a%20disk"), server.tcp_uri("a%20disk")] {
        reads_as(&uri, &raw, &dir);
        let map = vellum(&["map", "--output", "json", &uri]).json();
        let data: u64 = map
            .as_array()
            .expect("extents")
            .iter()
            .filter(|extent| extent["zero"] == false)
            .map(|extent| extent["length"].as_u64().expect("a number"))
            .sum();
        assert!(data < 2 * MIB as u64, "zeros are known: {data} bytes are data");
    }
    server.stop();
}

#[test]
fn exports_of_other_servers_are_images() {
    requires!("qemu-nbd");
    let dir = Dir::short();
    let raw = raw_in(&dir);
    let socket = dir.join("qemu");
    let arguments = ["-f", "raw", "-x", "disk", "-t", "-r", "-k", path_text(&socket), &raw];
    let _server = Foreign::start("qemu-nbd", &arguments, &socket);
    reads_as(&format!("nbd+unix:///disk?socket={}", path_text(&socket)), &raw, &dir);
}

#[test]
fn exports_of_nbdkit_are_images() {
    requires!("nbdkit");
    let dir = Dir::short();
    let raw = raw_in(&dir);
    // As it is, without structured replies, and only in whole blocks.
    for (name, filters) in [
        ("plain", &[][..]),
        ("simple", &["--no-sr"]),
        ("blocks", &["--filter=blocksize-policy", "blocksize-minimum=4096", "blocksize-error-policy=error"]),
    ] {
        let socket = dir.join(name);
        let (flags, parameters): (Vec<&str>, Vec<&str>) =
            filters.iter().partition(|word| word.starts_with("--"));
        let path = path_text(&socket);
        let arguments = [&["-f", "-U", path][..], &flags, &["file", &raw], &parameters].concat();
        let _server = Foreign::start("nbdkit", &arguments, &socket);
        reads_as(&format!("nbd+unix:///?socket={path}"), &raw, &dir);
    }
}

#[test]
fn what_cannot_be_opened_is_named_with_the_reason() {
    let dir = Dir::new("nbd-refused");
    let image = dir.text("disk.raw");
    vellum(&["create", "-f", "raw", &image, "1M"]).answer();
    let server = Server::start(&["-f", "raw", "--export", &format!("disk={image}")]);
    for (uri, words) in [
        (server.uri("other"), &["other", "no export"][..]),
        (format!("nbd+unix:///disk?socket={}", dir.text("nothing")), &["nothing"]),
        ("nbd://127.0.0.1:1/disk".to_owned(), &["127.0.0.1:1"]),
        ("nbd://".to_owned(), &["cannot name an image"]),
        ("nbds://127.0.0.1:1/disk".to_owned(), &["127.0.0.1:1"]),
    ] {
        let ran = vellum(&["info", &uri]);
        assert_eq!((ran.code, ran.err.lines().count()), (1, 1), "{uri}: {ran:?}");
        assert!(words.iter().all(|word| ran.err.contains(word)), "{uri}: {}", ran.err);
    }
    server.stop();
}

/// What its guest has written to it is not taken for an image that names other files.
#[test]
fn an_export_is_never_probed() {
    let dir = Dir::new("nbd-probed");
    let (secret, image) = (dir.text("secret.raw"), dir.text("disk.raw"));
    std::fs::write(&secret, [7; 4096]).expect("a file");
    vellum(&["create", "-f", "qcow2", "-b", &secret, "-F", "raw", &image]).answer();
    let server = Server::start(&["-r", "-f", "raw", "--export", &format!("disk={image}")]);
    assert_eq!(vellum(&["info", "--output", "json", &server.uri("disk")]).json()["format"], "raw");
    server.stop();
}
