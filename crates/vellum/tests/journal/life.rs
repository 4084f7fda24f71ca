//! A server is killed, and the state of its image for all programs; a server ends in good order, and the
//! state then.

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::noise;
use super::support::program::{has, qemu_io, run, vellum};
use super::support::server::Server;
use super::{FEATURE, MIB, bytes_of, closed_after, is_clean, journal_of, killed_after};
use crate::requires;

/// An image that was left by a killed server, and what it must read as.
fn left_open(dir: &Dir) -> (String, Vec<u8>) {
    let image = dir.text("disk.qcow2");
    let made = vellum(&["create", "-f", "qcow2", "-o", "journal=on,journal_size=256k", &image, "8M"]);
    assert!(made.answer().contains("journal=on journal_size=262144"));
    assert_eq!(journal_of(&image)["size"], 256 << 10);
    assert_eq!(journal_of(&image)["needs-recovery"], false);
    let mut bytes = vec![0; 8 * MIB];
    let data = noise(3 * MIB, 60);
    killed_after(&image, |client| {
        client.write(MIB as u64 + 512, &data, 0).expect("a write");
        client.zero(2 << 20, 70_000, 0).expect("zeros");
        client.flush().expect("a flush");
    });
    bytes[MIB + 512..4 * MIB + 512].copy_from_slice(&data);
    bytes[2 * MIB..2 * MIB + 70_000].fill(0);
    (image, bytes)
}

#[test]
fn a_killed_server_leaves_an_image_that_reads_as_it_will_be_recovered() {
    let dir = Dir::new("journal");
    let (image, bytes) = left_open(&dir);
    if has("qemu-img") {
        for command in ["info", "check"] {
            let ran = run("qemu-img", &[command, &image]);
            assert!(ran.code == 1 && ran.err.contains(FEATURE), "{command}: {ran:?}");
        }
    }
    let info = vellum(&["info", &image]).answer();
    let line = format!("    journal: 256 KiB, must be replayed: run `vellum recover {image}`");
    assert!(info.contains(&line) && info.contains("cleanly shut down: no"), "{info}");
    let info = vellum(&["info", "--output", "json", &image]).json();
    assert_eq!(info["dirty-flag"], true);
    assert_eq!(info["format-specific"]["data"]["journal"]["needs-recovery"], true, "{info}");

    // A reader replays the journal in memory.
    let before = std::fs::read(&image).expect("the image");
    let (raw, out, above) = (dir.text("raw"), dir.text("out"), dir.text("above.qcow2"));
    std::fs::write(&raw, &bytes).expect("what was flushed");
    assert!(vellum(&["check", &image]).answer().contains("No errors"));
    assert!(vellum(&["compare", "-F", "raw", &image, &raw]).answer().contains("identical"));
    vellum(&["convert", "-O", "raw", &image, &out]).answer();
    assert!(std::fs::read(&out).expect("a copy") == bytes, "what was flushed is there");
    let map = vellum(&["map", "--output", "json", &image]).json();
    vellum(&["create", "-f", "qcow2", "-b", &image, "-F", "qcow2", &above]).answer();
    vellum(&["convert", "-O", "raw", &above, &out]).answer();
    assert!(std::fs::read(&out).expect("a copy") == bytes, "and so it is from above");
    for arguments in [&[image.as_str(), "--read-only"][..], &[&above]] {
        let server = Server::start(arguments);
        let mut client = Client::connect(&server.peer(), "").expect("a server");
        let read = client.read(MIB as u64, 65_536).expect("a read");
        assert!(read == bytes[MIB..MIB + 65_536], "{arguments:?}");
        drop(client);
        server.stop();
    }
    assert!(std::fs::read(&image).expect("the image") == before, "nobody wrote it");

    let answer = vellum(&["recover", "--output", "json", &image]).json();
    assert_eq!(answer["was-dirty"], true, "{answer}");
    assert!(answer["journal"]["records-replayed"].as_u64() >= Some(1), "{answer}");
    assert_eq!(answer["journal"]["repaired"], false, "{answer}");
    assert_eq!(journal_of(&image)["needs-recovery"], false);
    is_clean(&image);
    assert!(bytes_of(&image) == bytes, "what was flushed is there");
    assert_eq!(vellum(&["map", "--output", "json", &image]).json(), map, "as it was in memory");
    assert!(vellum(&["recover", &image]).answer().contains("nothing to do"));
}

#[test]
fn what_is_being_served_is_not_replayed_in_memory() {
    let dir = Dir::new("journal");
    for (format, options) in [("qcow2", "journal=on,journal_size=256k"), ("vellum", "layout=table")] {
        let (image, other) = (dir.text("served"), dir.text("other"));
        vellum(&["create", "-q", "-f", format, "-o", options, &image, "8M"]).answer();
        vellum(&["create", "-q", "-f", "raw", &other, "8M"]).answer();
        let server = Server::start(&[&image]);
        let mut client = Client::connect(&server.peer(), "").expect("a server");
        client.write(MIB as u64, &noise(70_000, 3), 0).expect("a write");
        client.flush().expect("a flush");
        let commands: [&[&str]; 4] = [
            &["compare", "-U", &image, &other],
            &["map", "-U", &image],
            &["check", "-U", &image],
            &["convert", "-U", "-O", "raw", &image, &other],
        ];
        for command in commands {
            let ran = vellum(command);
            assert!(ran.code == if command[0] == "compare" { 2 } else { 1 }, "{command:?}: {ran:?}");
            assert!(ran.err.contains("is being served or written"), "{command:?}: {}", ran.err);
            let wrong = ["vellum recover", "--force-share"];
            assert!(!wrong.iter().any(|wrong| ran.err.contains(wrong)), "{command:?}: {}", ran.err);
        }
        let info = vellum(&["info", "-U", &image]).answer();
        assert!(info.contains("in use by the program that writes the image"), "{info}");
        // A command without the option --force-share does not advise it.
        let above = dir.text("above.qcow2");
        let ran = vellum(&["create", "-f", "qcow2", "-b", &image, "-F", format, &above]);
        assert!(ran.code == 1 && ran.err.contains("in use"), "{ran:?}");
        assert!(!ran.err.contains("--force-share"), "{}", ran.err);
        drop(client);
        server.stop();
    }
}

#[test]
fn recovery_is_told_in_words_too_and_done_by_any_server() {
    let dir = Dir::new("journal");
    let (image, bytes) = left_open(&dir);
    let copy = dir.text("copy.qcow2");
    std::fs::copy(&image, &copy).expect("a copy");
    let said = vellum(&["recover", &copy]).answer();
    assert!(said.contains("was recovered: ") && said.contains("journal records replayed"), "{said}");
    Server::start(&[&image, "-f", "qcow2"]).stop();
    for image in [&image, &copy] {
        is_clean(image);
        assert!(bytes_of(image) == bytes, "what was flushed is there");
    }
    // Turned off on an image that was left open: replayed first.
    killed_after(&image, |client| client.write(0, &[7; 512], 1).expect("a durable write"));
    let said = vellum(&["journal", "disable", &image]).answer();
    assert!(said.contains("was not closed: ") && said.contains("the journal is now disabled"), "{said}");
    assert_eq!(journal_of(&image), serde_json::Value::Null);
    is_clean(&image);
    assert_eq!(bytes_of(&image)[..512], [7; 512]);
}

#[test]
fn closed_it_is_plain_qcow2() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("journal");
    let image = dir.text("disk.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", "-o", "journal=on", &image, "4M"]).answer();
    let mut bytes = vec![0; 4 * MIB];
    for round in 1..4u8 {
        let at = usize::from(round) * 70_000;
        closed_after(&image, |client| client.write(at as u64, &[round; 90_000], 0).expect("a write"));
        bytes[at..at + 90_000].fill(round);
        is_clean(&image);
        let end = std::fs::metadata(&image).expect("the image").len();
        assert!(end < 2 << 20, "the journal is given back: {end}");
        let theirs = at + 1_000_000;
        qemu_io(&["-f", "qcow2", &image], &[format!("write -P {} {theirs} 5000", round + 100)]);
        bytes[theirs..theirs + 5000].fill(round + 100);
        is_clean(&image);
        assert_eq!(journal_of(&image)["size"], 1 << 20, "QEMU leaves the wish where it is");
        assert!(bytes_of(&image) == bytes, "round {round}");
    }
}

#[test]
fn what_cannot_have_a_journal_is_told() {
    let dir = Dir::new("journal");
    let image = dir.text("disk.qcow2");
    for (options, word) in [
        ("journal=on,compat=v2", "journal needs compat=1.1"),
        ("journal=on,data_file=data", "journal and data_file"),
        ("journal=on,journal_size=63k", "must be 65536 to 67108864"),
        ("journal_size=65M", "must be 65536 to 67108864"),
        ("journal=off,journal_size=1M", "journal_size"),
        ("journal=maybe", "on, off"),
    ] {
        let ran = vellum(&["create", "-f", "qcow2", "-o", options, &image, "1M"]);
        assert!(ran.code == 1 && ran.err.contains(word), "{options}: {ran:?}");
        assert_eq!(dir.names(), Vec::<String>::new(), "{options}");
    }
    let ran = vellum(&["create", "-f", "raw", "-o", "journal=on", &image, "1M"]);
    assert!(ran.code == 1 && ran.err.contains("-o journal is a qcow2 option"), "{ran:?}");
    // Off can be given everywhere.
    for options in ["journal=off,compat=v2", "journal=off,data_file=data", "journal=off"] {
        vellum(&["create", "-q", "-f", "qcow2", "-o", options, &image, "1M"]).answer();
        assert_eq!(journal_of(&image), serde_json::Value::Null, "{options}");
    }
    let copy = dir.text("copy.qcow2");
    vellum(&["convert", "-O", "qcow2", "-o", "journal_size=128k", &image, &copy]).answer();
    assert_eq!(journal_of(&copy)["size"], 128 << 10);
    is_clean(&copy);
}
