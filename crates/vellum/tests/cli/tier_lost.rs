//! A disk of which a fast medium alone has parts, when that medium is lost, damaged or not given, through the program: what is left is
//! read, copied and brought back, and what is lost is told.

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::noise;
use super::support::program::{until_let_go, vellum};
use super::support::server::Server;
use super::tier::{attached, same, status};
use super::{MIB, refused};

/// The size of a unit, and of a slot of the medium.
const UNIT: usize = 64 << 10;
/// Where the medium has its entries, of 32 bytes, and where its slots begin.
const ENTRIES_AT: usize = 520 << 10;
pub(super) const SLOTS_AT: u64 = 576 << 10;

/// As [`attached`]; the first mebibyte is in the slots from 0 on alone.
fn moved(dir: &Dir) -> (String, String, Vec<u8>) {
    let (image, fast, bytes) = attached(dir);
    vellum(&["tier", "move", "--fast", &fast, "--range", "0+1M", &image]).answer();
    (image, fast, bytes)
}

/// The copy of a disk, and what was said of it.
fn salvaged(dir: &Dir, image: &str, more: &[&str]) -> (Vec<u8>, String) {
    let copy = dir.text("salvaged.raw");
    let ran = vellum(&[&["convert", "--salvage", "-O", "raw"], more, &[image, &copy]].concat());
    assert_eq!(ran.code, 0, "{ran:?}");
    (std::fs::read(&copy).expect("a copy"), ran.err)
}

#[test]
fn without_its_medium_a_disk_is_salvaged() {
    let dir = Dir::new("tier-salvage");
    let (image, fast, mut bytes) = moved(&dir);
    let raw = dir.text("copy.raw");
    // With its medium a closed image is copied and mapped as any.
    vellum(&["convert", "-q", "-O", "raw", "--fast", &fast, &image, &raw]).answer();
    same(&std::fs::read(&raw).expect("a copy"), &bytes, "with its medium");
    let checked = vellum(&["check", "--output", "json", "--fast", &fast, &image]).json();
    assert_eq!(
        (checked["moved-units"].as_u64(), checked["lost-bytes"].as_u64()),
        (Some(16), Some(0)),
        "{checked}"
    );

    let map = vellum(&["map", "--output", "json", "--fast", &fast, &image]).json();
    let first = &map[0];
    assert_eq!((first["start"].as_u64(), first["length"].as_u64()), (Some(0), Some(MIB as u64)), "{map}");
    assert!(first["data"] == true && first["compressed"] == false && first["moved"] == true, "{map}");
    assert!(map[1].get("moved").is_none(), "{map}");

    let away = dir.text("away");
    std::fs::rename(&fast, &away).expect("it is lost");
    refused(1, &["alone", "--back"], &["convert", "-O", "raw", &image, &raw]);
    let (copy, said) = salvaged(&dir, &image, &[]);
    bytes[..MIB].fill(0);
    same(&copy, &bytes, "what is left");
    assert!(said.contains("1048576 bytes at 0x0 could not be read"), "{said}");
    assert!(said.contains("16 units (1048576 bytes)"), "{said}");

    let checked = vellum(&["check", "--output", "json", &image]).json();
    assert_eq!(
        (checked["moved-bytes"].as_u64(), checked.get("lost-bytes")),
        (Some(MIB as u64), None),
        "{checked}"
    );
    let checked = vellum(&["check", &image]);
    assert!(checked.code == 0 && checked.err.contains("16 units (1048576 bytes)"), "{checked:?}");
    let checked = vellum(&["check", "--fast", &fast, &image]);
    assert!(
        checked.code == 2 && checked.err.contains("1048576 bytes of the disk at 0 are lost"),
        "{checked:?}"
    );

    let map = vellum(&["map", "--salvage", "--output", "json", &image]).json();
    let rows = map.as_array().expect("rows");
    let lost: Vec<_> = rows.iter().filter(|row| row["lost"] == true).collect();
    assert!(
        matches!(&lost[..], [row] if row["start"] == 0 && row["length"] == MIB as u64 && row["compressed"] == false),
        "{map}"
    );
    assert!(vellum(&["map", "--salvage", &image]).answer().contains("lost"));

    let place = Dir::short();
    let socket = format!("unix:{}", place.text("s"));
    assert_ne!(vellum(&["serve", "--nbd", &socket, "--salvage", &image]).code, 0, "it would be written");
    let server = Server::start(&[&image, "--read-only", "--salvage"]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    for at in [0, MIB - 512] {
        client.read(at as u64, 512).expect_err("what is lost is no zeros");
    }
    let rest = u32::try_from(bytes.len() - MIB).expect("small");
    same(&client.read(MIB as u64, rest).expect("it is read"), &bytes[MIB..], "what is left");
    client.write(2 << 20, &[1; 512], 0).expect_err("it is only read");
    drop(client);
    server.stop();
    std::fs::rename(&away, &fast).expect("it is found");
    assert_eq!(status(&["--fast", &fast, &image])["moved"].as_u64(), Some(16));
}

/// The end of the medium is missing, or the entry of a unit.
#[test]
fn what_is_left_of_a_medium_is_copied_and_brought_back() {
    let dir = Dir::new("tier-left");
    let (image, fast, mut bytes) = moved(&dir);
    let sound = std::fs::read(&fast).expect("a medium");
    let file = std::fs::OpenOptions::new().write(true).open(&fast).expect("a medium");
    file.set_len(SLOTS_AT + 8 * UNIT as u64).expect("it is cut");
    let (copy, said) = salvaged(&dir, &image, &["--fast", &fast]);
    let mut left = bytes.clone();
    left[8 * UNIT..MIB].fill(0);
    same(&copy, &left, "of a medium that was cut off");
    assert!(said.contains("524288 bytes at 0x80000 could not be read"), "{said}");
    let map = vellum(&["map", "--salvage", "--output", "json", "--fast", &fast, &image]).json();
    let lost: Vec<_> = map.as_array().expect("rows").iter().filter(|row| row["lost"] == true).collect();
    assert!(
        matches!(&lost[..], [row] if row["start"] == 8 * UNIT as u64 && row["length"] == 8 * UNIT as u64),
        "{map}"
    );

    // What is left comes back, and what is gone is no zeros when the medium is made longer again.
    let (image_2, fast_2) = (dir.text("image-2.vlm"), dir.text("fast-2"));
    std::fs::copy(&image, &image_2).expect("a copy");
    std::fs::copy(&fast, &fast_2).expect("a copy");
    let back = vellum(&["tier", "move", "--back", "--all", "--fast", &fast_2, &image_2]);
    assert!(back.code == 1 && back.out.contains("8 units"), "{back:?}");
    assert!(back.err.contains("was cut off") && back.err.contains("524288 bytes at 524288"), "{back:?}");
    let file = std::fs::OpenOptions::new().write(true).open(&fast_2).expect("a medium");
    file.set_len(sound.len() as u64).expect("it is longer again");
    let ran = vellum(&["convert", "-O", "raw", "--fast", &fast_2, &image_2, &dir.text("refused.raw")]);
    assert!(ran.code == 1 && ran.err.contains("is on its fast medium alone"), "{ran:?}");
    assert!(ran.err.contains("was cut off"), "{ran:?}");
    let place = Dir::short();
    let socket = format!("unix:{}", place.text("s"));
    let ran = vellum(&["serve", "--nbd", &socket, "--fast", &fast_2, &image_2]);
    assert!(ran.code == 1 && ran.err.contains("because it was cut off"), "{ran:?}");
    assert!(!ran.err.contains("put back from a copy"), "{ran:?}");
    let (copy, _) = salvaged(&dir, &image_2, &["--fast", &fast_2]);
    same(&copy, &left, "of a medium that is longer again");
    std::fs::write(&fast, &sound).expect("a medium");

    let mut damaged = sound.clone();
    damaged[ENTRIES_AT + 5 * 32] ^= 1;
    std::fs::write(&fast, &damaged).expect("it is written");
    let moved = vellum(&["tier", "move", "--fast", &fast, "--all", &image]);
    for word in ["1 of 16 units", "put back from a copy", "--salvage", "--back"] {
        assert!(moved.code == 1 && moved.err.contains(word), "{word}: {moved:?}");
    }
    let back = vellum(&["tier", "move", "--back", "--all", "--fast", &fast, &image]);
    assert_eq!(back.code, 1, "{back:?}");
    assert!(back.out.contains("15 units") && back.err.contains("65536 bytes at 327680"), "{back:?}");
    let left = status(&["--fast", &fast, &image]);
    assert_eq!((left["moved"].as_u64(), left["missing"].as_u64()), (Some(0), Some(1)), "{left}");
    let back = vellum(&["tier", "move", "--back", "--all", "--output", "json", "--fast", &fast, &image]);
    assert!(back.code == 1 && back.out.contains("\"left-bytes\": 65536"), "{back:?}");
    let (copy, _) = salvaged(&dir, &image, &["--fast", &fast]);
    let lost = 5 * UNIT..6 * UNIT;
    bytes[lost.clone()].fill(0);
    same(&copy, &bytes, "but for one unit");
    // The sector can be read again, and the unit is there.
    damaged[ENTRIES_AT + 5 * 32] ^= 1;
    let now = std::fs::read(&fast).expect("a medium");
    let mended: Vec<u8> =
        now.iter().enumerate().map(|(at, byte)| byte ^ u8::from(at == ENTRIES_AT + 5 * 32)).collect();
    std::fs::write(&fast, &mended).expect("it is written");
    vellum(&["tier", "move", "--back", "--all", "--fast", &fast, &image]).answer();
    let raw = dir.text("copy.raw");
    vellum(&["convert", "-q", "-O", "raw", &image, &raw]).answer();
    bytes[lost.clone()].copy_from_slice(&noise(8 * MIB, 3)[lost]);
    same(&std::fs::read(&raw).expect("a copy"), &bytes, "home again");
}

/// The medium has lost the entry of a unit. The disk is served and written, and a write of all of the unit takes its place.
#[test]
fn a_lost_unit_is_overwritten_as_a_whole() {
    let dir = Dir::new("tier-overwritten");
    let (image, fast, mut bytes) = moved(&dir);
    let control = dir.text("ctl");
    let flip = |at: usize| {
        let mut medium = std::fs::read(&fast).expect("a medium");
        medium[at] ^= 1;
        std::fs::write(&fast, &medium).expect("it is written");
    };
    flip(ENTRIES_AT + 5 * 32);
    let place = Dir::short();
    let socket = format!("unix:{}", place.text("s"));
    let ran = vellum(&["serve", "--nbd", &socket, "--fast", &fast, &image]);
    let says = |word: &str| ran.err.contains(word);
    assert!(ran.code == 1 && says("1 of 16 units") && says("`vellum serve --salvage`"), "{ran:?}");
    let server = Server::start(&[&image, "--salvage", "--fast", &fast, "--control", &control]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    let at = 5 * UNIT;
    client.read(at as u64, 512).expect_err("what is lost is no zeros");
    client.write(at as u64, &noise(512, 8), 0).expect_err("the rest of the unit cannot be read");
    assert_eq!(status(&["--control", &control])["missing"].as_u64(), Some(1));
    let written = noise(UNIT, 9);
    client.write(at as u64, &written, 0).expect("it takes the place of what is lost");
    client.write(at as u64 + 512, &written[..512], 0).expect("and is written as any");
    client.flush().expect("a flush");
    bytes[at..at + UNIT].copy_from_slice(&written);
    bytes[at + 512..at + 1024].copy_from_slice(&written[..512]);
    same(&client.read_all().expect("it is read"), &bytes, "overwritten");
    assert_eq!(status(&["--control", &control])["missing"].as_u64(), Some(0));
    server.kill();
    until_let_go(&image);

    // Nothing is missing, and the entry that can be read again brings nothing back.
    for _ in 0..2 {
        let server = Server::start(&[&image, "--fast", &fast]);
        let mut client = Client::connect(&server.peer(), "").expect("it is served");
        same(&client.read_all().expect("it is read"), &bytes, "after a kill");
        drop(client);
        server.stop();
        flip(ENTRIES_AT + 5 * 32);
    }
}

/// A server has seen that its medium was cut off: what becomes zeros when it is longer again is not read. Units that are only copied
/// are in the image; those that are there alone are errors.
#[test]
fn a_medium_that_was_cut_while_it_was_open_is_not_believed_when_it_is_longer() {
    let dir = Dir::new("tier-longer");
    let (image, fast, bytes) = moved(&dir);
    vellum(&["tier", "promote", "--fast", &fast, "--range", "1M+1M", &image]).answer();
    let (control, len) = (dir.text("control"), std::fs::metadata(&fast).expect("a medium").len());
    let server = Server::start(&[&image, "--fast", &fast, "--control", &control]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    let read = |client: &mut Client, unit: usize| client.read((unit * UNIT) as u64, 64 << 10);
    let has = |unit: usize| bytes[unit * UNIT..][..UNIT].to_vec();
    let file = std::fs::OpenOptions::new().write(true).open(&fast).expect("a medium");
    file.set_len(SLOTS_AT + 8 * UNIT as u64).expect("it is cut");
    for unit in [0, 7, 20] {
        assert!(read(&mut client, unit).expect("there") == has(unit), "unit {unit}");
    }
    assert!(read(&mut client, 9).is_err(), "it was cut off");
    file.set_len(len).expect("it is longer again");
    assert!(read(&mut client, 9).is_err(), "zeros were read");
    assert!(read(&mut client, 20).expect("the image has it") == has(20));
    drop((client, server));
}

/// A disk that is served gets a backing image of which the server's medium alone has parts.
#[test]
fn a_served_disk_is_rebased_onto_what_its_medium_has() {
    let dir = Dir::new("tier-rebased");
    let (image, fast, bytes) = moved(&dir);
    let (old, top) = (dir.text("old.vlm"), dir.text("top.vlm"));
    let (old_raw, options) = (dir.text("old.raw"), "layout=table,unit_size=64k");
    let mut shown = bytes.clone();
    shown[512 << 10..3 * MIB].copy_from_slice(&noise(5 * MIB / 2, 4));
    std::fs::write(&old_raw, &shown).expect("a disk");
    vellum(&["convert", "-q", "-f", "raw", "-O", "vellum", "-o", options, &old_raw, &old]).answer();
    vellum(&["create", "-q", "-f", "vellum", "-o", options, "-b", &old, "-F", "vellum", &top]).answer();
    let control = dir.text("ctl");
    let rebase = ["rebase", "-q", "--control", &control, "-b", &image];

    // Without the medium nothing is changed.
    let server = Server::start(&[&top, "--control", &control]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    refused(1, &[&image, "alone", &fast, "--back"], &rebase);
    same(&client.read_all().expect("it is read"), &shown, "as before");
    client.write(0, &shown[..512], 0).expect("it is written");
    drop(client);
    server.stop();

    let server = Server::start(&[&top, "--control", &control, "--fast", &fast]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    vellum(&rebase).answer();
    same(&client.read_all().expect("it is read"), &shown, "over another image");
    client.write(7 << 20, &noise(512, 5), 0).expect("it is written");
    shown[7 << 20..(7 << 20) + 512].copy_from_slice(&noise(512, 5));
    same(&client.read_all().expect("it is read"), &shown, "written");
    drop(client);
    server.stop();
    assert!(vellum(&["info", &top]).answer().contains("disk.vlm"));
    let place = Dir::short();
    let socket = format!("unix:{}", place.text("s"));
    refused(1, &[&image, "alone", "--fast"], &["serve", "--nbd", &socket, &top]);
    let server = Server::start(&[&top, "--fast", &fast]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    same(&client.read_all().expect("it is read"), &shown, "after a restart");
    drop(client);
    server.stop();
}

/// A server does not note where its medium was cut off, so it brings nothing home from it: what is gone would be zeros at its old length.
#[test]
fn a_server_brings_nothing_home_from_a_medium_that_was_cut() {
    let dir = Dir::new("tier-cut-served");
    let (image, fast, bytes) = moved(&dir);
    let (control, len) = (dir.text("control"), std::fs::metadata(&fast).expect("a medium").len());
    let server = Server::start(&[&image, "--fast", &fast, "--control", &control]);
    let file = std::fs::OpenOptions::new().write(true).open(&fast).expect("a medium");
    file.set_len(SLOTS_AT + 8 * UNIT as u64).expect("it is cut");
    let back = ["tier", "move", "--back", "--all", "--control", &control];
    let cut = format!("was cut to {} bytes", SLOTS_AT + 8 * UNIT as u64);
    let words =
        ["was cut off", "what was behind its end stays lost", "Stop the server", "`truncate -s`", &cut];
    refused(1, &words, &back);
    file.set_len(len).expect("it is longer again");
    refused(1, &words, &back);
    refused(1, &["was cut off"], &["tier", "promote", "--control", &control, "--range", "2M+1M"]);
    assert_eq!(status(&["--control", &control])["moved"].as_u64(), Some(16));
    file.set_len(SLOTS_AT + 8 * UNIT as u64).expect("it is cut");
    server.stop();
    let back = vellum(&["tier", "move", "--back", "--all", "--fast", &fast, &image]);
    assert!(back.code == 1 && back.out.contains("8 units"), "{back:?}");
    file.set_len(len).expect("it is longer again");
    let (copy, _) = salvaged(&dir, &image, &["--fast", &fast]);
    let mut left = bytes.clone();
    left[8 * UNIT..MIB].fill(0);
    same(&copy, &left, "longer again");
}

/// What is said of a medium that was cut off, to a disk that has copies there and nothing alone.
#[test]
fn a_disk_leaves_a_medium_that_was_cut_off() {
    let dir = Dir::new("tier-left-behind");
    let (image, fast, _) = moved(&dir);
    let (other, len) = (dir.text("other.vlm"), std::fs::metadata(&fast).expect("a medium").len());
    vellum(&["create", "-q", "-f", "vellum", "-o", "layout=table", "--fast", &fast, &other, "4M"]).answer();
    let file = std::fs::OpenOptions::new().write(true).open(&fast).expect("a medium");
    file.set_len(SLOTS_AT + 8 * UNIT as u64).expect("it is cut");
    let ran = vellum(&["tier", "detach", "--fast", &fast, &other]);
    assert!(ran.code == 1 && ran.err.contains("without --fast"), "{ran:?}");
    assert_eq!(vellum(&["tier", "move", "--back", "--all", "--fast", &fast, &image]).code, 1);
    file.set_len(len).expect("it is longer again");
    let ran = vellum(&["tier", "detach", "--fast", &fast, &other]);
    assert!(
        ran.code == 1 && ran.err.contains("was cut off") && ran.err.contains("without --fast"),
        "{ran:?}"
    );
    let said = vellum(&["tier", "detach", &other]).answer();
    assert!(said.contains("unless that medium was cut off or its tables are damaged"), "{said}");
    // A server says what it has.
    let server = Server::start(&["--salvage", &image, "--fast", &fast]);
    server.says("it was cut off");
    server.stop();
}
