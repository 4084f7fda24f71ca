//! A disk with a fast medium, through the program: made, promoted, served, written, and without its medium.

use serde_json::Value;

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::{until_let_go, vellum};
use super::support::server::Server;
use super::support::{first_difference, noise};
use super::{MIB, refused};

const SIZE: usize = 8 * MIB;

/// An image with data, attached to a new fast medium.
fn attached(dir: &Dir) -> (String, String, Vec<u8>) {
    let (raw, image, fast) = (dir.text("disk.raw"), dir.text("disk.vlm"), dir.text("fast"));
    let mut bytes = noise(SIZE, 3);
    bytes[4 * MIB..5 * MIB].fill(0);
    std::fs::write(&raw, &bytes).expect("a disk");
    let options = "layout=table,unit_size=64k";
    vellum(&["convert", "-q", "-f", "raw", "-O", "vellum", "-o", options, &raw, &image]).answer();
    let said = vellum(&["tier", "attach", "--fast", &fast, "--fast-size", "16M", &image]).answer();
    assert!(said.contains("is attached to"), "{said}");
    (image, fast, bytes)
}

fn status(arguments: &[&str]) -> Value {
    vellum(&[&["tier", "status", "--output", "json"], arguments].concat()).json()
}

fn same(found: &[u8], expected: &[u8], when: &str) {
    assert_eq!(first_difference(found, expected), None, "{when}");
}

#[test]
fn promoted_parts_are_read_from_the_fast_medium_until_they_are_written() {
    let dir = Dir::new("tier");
    let (image, fast, mut bytes) = attached(&dir);
    let done =
        vellum(&["tier", "promote", "--output", "json", "--fast", &fast, "--range", "3M+2M", &image]).json();
    // A mebibyte of it is zero, and convert stores none of that.
    assert_eq!((done["promoted"].as_u64(), done["zero"].as_u64()), (Some(16), Some(16)), "{done}");
    let there = status(&["--fast", &fast, &image]);
    assert_eq!((there["units"].as_u64(), there["units-by-reason"]["asked"].as_u64()), (Some(16), Some(16)));
    assert_eq!(vellum(&["check", &image]).code, 0);

    let control = dir.text("ctl");
    let server = Server::start(&[&image, "--fast", &fast, "--control", &control]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    same(&client.read_all().expect("it is read"), &bytes, "served");
    let before = std::fs::read(&fast).expect("the medium");
    let there = status(&["--control", &control]);
    assert!(there["fast-read-bytes"].as_u64() >= Some(1 << 20), "{there}");
    let written = noise(200_000, 9);
    client.write(3 << 20, &written, 0).expect("it is written");
    client.flush().expect("a flush");
    bytes[3 * MIB..3 * MIB + written.len()].copy_from_slice(&written);
    same(&client.read_all().expect("it is read"), &bytes, "written");
    let there = status(&["--control", &control]);
    assert_eq!((there["units"].as_u64(), there["demoted"].as_u64()), (Some(12), Some(4)), "{there}");
    // H10 of the paper: nothing that a guest does writes to the fast medium.
    assert!(std::fs::read(&fast).expect("the medium") == before, "a guest's write reached the fast medium");
    let done = vellum(&["tier", "promote", "--control", &control, "--all"]).answer();
    assert!(done.contains("units"), "{done}");
    same(&client.read_all().expect("it is read"), &bytes, "all promoted");
    client.write(0, &written, 0).expect("it is written");
    client.flush().expect("a flush");
    bytes[..written.len()].copy_from_slice(&written);
    server.kill();
    until_let_go(&image);

    // After the kill, what was promoted and not written counts.
    let server = Server::start(&[&image, "--fast", &fast, "--control", &control]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    same(&client.read_all().expect("it is read"), &bytes, "after a kill");
    let there = status(&["--control", &control]);
    assert_eq!(there["units"].as_u64(), Some(112 - 4), "{there}");
    drop(client);
    server.stop();
}

#[test]
fn without_its_medium_a_disk_is_served_and_its_copies_are_void_once_it_is_written() {
    let dir = Dir::new("tier-without");
    let (image, fast, mut bytes) = attached(&dir);
    vellum(&["tier", "promote", "--fast", &fast, "--all", &image]).answer();
    let server = Server::start(&[&image]);
    let said = server.says("has a fast medium");
    assert!(said.contains("--fast"), "{said}");
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    same(&client.read_all().expect("it is read"), &bytes, "without the medium");
    let written = noise(5000, 1);
    client.write(70_000, &written, 0).expect("it is written");
    client.flush().expect("a flush");
    bytes[70_000..75_000].copy_from_slice(&written);
    drop(client);
    server.stop();
    let there = status(&["--fast", &fast, &image]);
    assert_eq!((there["units"].as_u64(), there["counts"].as_bool()), (Some(0), Some(false)), "{there}");
    vellum(&["tier", "promote", "--fast", &fast, "--range", "0+1M", &image]).answer();
    let server = Server::start(&[&image, "--fast", &fast]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    same(&client.read_all().expect("it is read"), &bytes, "with the medium again");
    drop(client);
    server.stop();
    let said = vellum(&["tier", "detach", "--fast", &fast, &image]).answer();
    assert!(said.contains("is detached"), "{said}");
    assert!(vellum(&["tier", "status", &image]).answer().contains("names no fast medium"));
    assert_eq!(vellum(&["check", &image]).code, 0);
}

#[test]
fn what_cannot_have_a_fast_medium_says_why() {
    let dir = Dir::new("tier-refused");
    let (qcow2, linear, table) = (dir.text("disk.qcow2"), dir.text("linear.vlm"), dir.text("table.vlm"));
    let fast = dir.text("fast");
    vellum(&["create", "-q", "-f", "qcow2", &qcow2, "16M"]).answer();
    vellum(&["create", "-q", "-f", "vellum", "-o", "layout=linear", &linear, "16M"]).answer();
    let size = ["--fast-size", "16M"];
    let attach = |fast: &str, size: &[&str], image: &str, words: &[&str]| {
        refused(1, words, &[&["tier", "attach", "--fast", fast], size, &[image]].concat());
    };
    attach(&fast, &size, &qcow2, &["format vellum"]);
    attach(&fast, &size, &linear, &["layout=table"]);
    let create = ["create", "-q", "-f", "vellum", "-o", "layout=table", "--fast", &fast, &table, "16M"];
    vellum(&create).answer();
    let info = vellum(&["info", &table]).answer();
    assert!(info.contains("no copy there counts"), "{info}");
    refused(1, &["16777216"], &["tier", "promote", "--fast", &fast, "--range", "15M+2M", &table]);
    let other = dir.text("other");
    attach(&other, &[], &table, &["--fast-size"]);
    attach(&other, &size, &table, &["detach"]);
    attach(&qcow2, &[], &table, &["no fast medium"]);
}
