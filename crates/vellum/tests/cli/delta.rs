//! What changed between two disks, and the same change made to a copy of the first.

use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use vellum_core::Random;

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::loops::Failing;
use super::support::program::{pid_of, vellum, vellum_command, wait};
use super::support::server::Server;
use super::support::{noise, patchy, scale};
use super::{MIB, refused};

/// Writes, zeros and discards at random, through a server.
fn change(dir: &Dir, image: &str, size: usize, seed: u64) {
    let allowed = dir.path().to_str().expect("a name");
    let server = Server::start(&["--allow-dir", allowed, image]);
    let mut client = Client::connect(&server.peer(), "").expect("a server");
    let mut random = Random::from_seed(seed);
    for _ in 0..12 {
        let len = (512 << random.index(9)).min(size);
        let at = random.index(size - len + 1) / 512 * 512;
        match random.index(4) {
            0 => client.zero(at as u64, u32::try_from(len).expect("small"), 0).expect("zeros"),
            1 => client.trim(at as u64, u32::try_from(len).expect("small")).expect("discarded"),
            _ => client.write(at as u64, &noise(len, random.any()), 0).expect("written"),
        }
    }
    client.flush().expect("flushed");
    client.disconnect();
    server.stop();
}

/// The bytes of a disk, or of a snapshot of one.
fn bytes_of(dir: &Dir, image: &str, snapshot: Option<&str>) -> Vec<u8> {
    let copy = dir.text("bytes");
    let mut all = vec!["convert", "-q", "-O", "raw"];
    all.extend(snapshot.iter().flat_map(|name| ["-l", name]));
    all.extend([image, &copy]);
    vellum(&all).answer();
    std::fs::read(copy).expect("the copy")
}

/// The runs that a diff lists are exactly the blocks that differ.
fn is_right(answer: &serde_json::Value, before: &[u8], after: &[u8]) {
    let mut listed = vec![None; after.len().div_ceil(4096)];
    for run in answer["extents"].as_array().expect("a list") {
        let number = |name: &str| usize::try_from(run[name].as_u64().expect("a number")).expect("small");
        let (start, end) = (number("start"), number("start") + number("length"));
        assert!(start % 4096 == 0 && (end % 4096 == 0 || end == after.len()), "{run}");
        listed[start / 4096..end.div_ceil(4096)].fill(run["zero"].as_bool());
    }
    for (block, listed) in listed.into_iter().enumerate() {
        let part = |bytes: &[u8]| {
            let mut part = bytes[bytes.len().min(block * 4096)..bytes.len().min((block + 1) * 4096)].to_vec();
            part.resize(4096, 0);
            part
        };
        let (before, after) = (part(before), part(after));
        let wanted = (before != after).then(|| after.iter().all(|byte| *byte == 0));
        assert_eq!(listed, wanted, "block {block}");
    }
}

#[test]
fn what_changed_between_two_snapshots_is_listed_and_applied() {
    let size = 3 * MIB;
    for (number, (format, options)) in [
        ("vellum", "layout=table"),
        ("vellum", "layout=zoned,zone_size=1M"),
        ("qcow2", "cluster_size=64k"),
        ("qcow2", "extended_l2=on,journal=off"),
    ]
    .into_iter()
    .enumerate()
    {
        let dir = Dir::new("delta");
        let extension = if format == "qcow2" { "qcow2" } else { "vlm" };
        let (base, image) = (dir.text("base.raw"), dir.text(&format!("disk.{extension}")));
        std::fs::write(&base, patchy(2 * MIB, 1)).expect("a base");
        vellum(&["create", "-q", "-f", format, "-o", options, "-b", &base, "-F", "raw", &image, "3M"])
            .answer();
        for (name, seed) in [("one", 10), ("two", 11), ("three", 12)] {
            change(&dir, &image, size, seed + 100 * number as u64);
            vellum(&["snapshot", "create", &image, name]).answer();
        }
        change(&dir, &image, size, 13);
        let at = |name: &str| format!("{image}@{name}");
        let all = [at("one"), at("two"), at("three"), image.clone()];
        let contents: Vec<Vec<u8>> =
            [Some("one"), Some("two"), Some("three"), None].map(|name| bytes_of(&dir, &image, name)).into();
        for (old, before) in all.iter().zip(&contents) {
            for (new, after) in all.iter().zip(&contents) {
                let answer = vellum(&["diff", "--output", "json", old, new]).json();
                is_right(&answer, before, after);
                let read = answer["bytes-read"].as_u64().expect("a number");
                assert!(
                    old != new || read < 2 * MIB as u64,
                    "{options}: {read} bytes of equal disks were read"
                );
            }
        }
        // A chain of deltas makes the last of the first.
        let copy = dir.text("copy.raw");
        std::fs::write(&copy, &contents[0]).expect("a copy");
        for (pair, after) in all.windows(2).zip(&contents[1..]) {
            let delta = dir.text("delta");
            vellum(&["diff", "-q", "--delta", &delta, &pair[0], &pair[1]]).answer();
            vellum(&["apply", "-q", "-f", "raw", &delta, &copy]).answer();
            assert!(std::fs::read(&copy).expect("the copy") == *after, "{options}: {pair:?}");
            let again = vellum(&["apply", "--output", "json", "-f", "raw", &delta, &copy]).json();
            assert_eq!(again["bytes-written"], 0, "it has it already");
        }
    }
}

#[test]
fn snapshots_of_a_served_disk_are_compared_through_its_server() {
    let dir = Dir::new("delta");
    let image = dir.text("disk.vlm");
    vellum(&["create", "-q", "-f", "vellum", &image, "2M"]).answer();
    for (name, seed) in [("one", 1), ("two", 2)] {
        change(&dir, &image, 2 * MIB, seed);
        vellum(&["snapshot", "create", &image, name]).answer();
    }
    let wanted =
        vellum(&["diff", "--output", "json", &format!("{image}@one"), &format!("{image}@two")]).json();
    let server = Server::start(&["--export-snapshots", "--export", &format!("d={image}")]);
    let answer = vellum(&["diff", "--output", "json", &server.uri("d@one"), &server.uri("d@two")]).json();
    assert_eq!(answer["extents"], wanted["extents"]);
    server.stop();
}

#[test]
fn an_image_that_is_another_is_left_alone() {
    let dir = Dir::new("delta");
    let (old, new, other, delta) = (dir.text("old"), dir.text("new"), dir.text("other"), dir.text("delta"));
    let before = noise(2 * MIB, 5);
    let mut after = before.clone();
    after[MIB..MIB + 70_000].copy_from_slice(&noise(70_000, 6));
    after[8192..16_384].fill(0);
    after.resize(2 * MIB + 4096, 9);
    for (path, bytes) in [(&old, &before), (&new, &after)] {
        std::fs::write(path, bytes).expect("a disk");
    }
    let says = vellum(&["diff", "-f", "raw", "-F", "raw", "--delta", &delta, &old, &new]).answer();
    assert!(says.contains("changed, written to") && says.contains("the size was"), "{says}");
    let apply = |image: &str| ["apply", "-f", "raw", &delta, image].map(str::to_owned);
    // The size comes first.
    let words: Vec<String> = apply(&old).into();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    refused(1, &["vellum resize", &old], &words);
    // One byte that the delta does not know, in a run that it changes; the rest of the run is as it was.
    let mut bytes = before.clone();
    bytes.resize(after.len(), 0);
    for at in [8192, MIB + 69_999, 2 * MIB + 1] {
        let mut bytes = bytes.clone();
        bytes[at] ^= 1;
        std::fs::write(&other, &bytes).expect("another disk");
        refused(1, &[&other, "not the disk"], &["apply", "-f", "raw", &delta, &other]);
        assert!(std::fs::read(&other).expect("it is there") == bytes, "byte {at}");
    }
    // Damage anywhere: nothing is written.
    let whole = std::fs::read(&delta).expect("the delta");
    std::fs::write(&other, &bytes).expect("a disk");
    let damaged = dir.text("damaged");
    let step = (whole.len() / (40 * scale())).max(1);
    for at in (0..whole.len()).step_by(step).chain([whole.len() - 1]) {
        let mut changed = whole.clone();
        changed[at] ^= 0x10;
        std::fs::write(&damaged, &changed).expect("a delta");
        refused(1, &[&damaged], &["apply", "-f", "raw", &damaged, &other]);
        std::fs::write(&damaged, &whole[..at]).expect("a delta");
        refused(1, &[&damaged], &["apply", "-f", "raw", &damaged, &other]);
    }
    std::fs::write(&damaged, [&whole[..], &[0]].concat()).expect("a delta");
    refused(1, &[&damaged, "does not end"], &["apply", "-f", "raw", &damaged, &other]);
    assert!(std::fs::read(&other).expect("it is there") == bytes);
    refused(1, &["/dev/null", "plain file"], &["apply", "-f", "raw", "/dev/null", &other]);
    refused(1, &[&old, "not a delta"], &["apply", "-f", "raw", &old, &other]);
    vellum(&["apply", "-q", "-f", "raw", &delta, &other]).answer();
    assert!(std::fs::read(&other).expect("it is there") == after);
}

/// Killed anywhere, and run again: it is the new disk.
#[test]
fn an_application_that_was_cut_off_is_continued() {
    let dir = Dir::new("delta");
    let (old, new, delta) = (dir.text("old"), dir.text("new"), dir.text("delta"));
    let (before, after) = (noise(24 * MIB, 1), noise(24 * MIB, 2));
    std::fs::write(&old, &before).expect("a disk");
    std::fs::write(&new, &after).expect("a disk");
    vellum(&["diff", "-q", "-f", "raw", "-F", "raw", "--delta", &delta, &old, &new]).answer();
    for (format, signal) in [("raw", Signal::KILL), ("qcow2", Signal::KILL), ("vellum", Signal::INT)] {
        for wait_ms in (0..10 * scale() as u64).map(|round| 15 + 35 * (round % 10)) {
            let image = dir.text("image");
            vellum(&["convert", "-q", "-f", "raw", "-O", format, &old, &image]).answer();
            let begun = Instant::now();
            let mut command = vellum_command();
            command
                .args(["apply", "-q", "-f", format, &delta, &image])
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            let child = command.spawn().expect("our own program");
            std::thread::sleep(Duration::from_millis(wait_ms));
            // It may have ended.
            let _ = kill_process(pid_of(&child), signal);
            wait(child, begun, Duration::from_secs(60)).expect("it ends");
            vellum(&["apply", "-q", "-f", format, &delta, &image]).answer();
            assert_eq!(vellum(&["compare", "-f", format, "-F", "raw", &image, &new]).code, 0, "{format}");
        }
    }
}

/// Its flush failed, and the page cache shows what the medium does not have.
#[test]
fn what_a_failed_flush_left_in_the_page_cache_is_not_taken_for_written() {
    let Some(device) = Failing::new() else { return };
    let dir = Dir::new("delta");
    let (old, new, delta) = (dir.text("old"), dir.text("new"), dir.text("delta"));
    let mut after = vec![0; 32 * MIB];
    std::fs::write(&old, &after).expect("a disk");
    after[MIB..3 * MIB].copy_from_slice(&noise(2 * MIB, 4));
    std::fs::write(&new, &after).expect("a disk");
    vellum(&["diff", "-q", "-f", "raw", "-F", "raw", "--delta", &delta, &old, &new]).answer();
    device.fail();
    refused(1, &[&device.path], &["apply", "-f", "raw", &delta, &device.path]);
    device.succeed();
    vellum(&["apply", "-q", "-f", "raw", &delta, &device.path]).answer();
    assert!(std::fs::read(device.backing()).expect("the file below") == after, "it is on the medium");
}
