//! What commands on fast media refuse, say and leave behind, as somebody meets them who has read nothing.

use super::refused;
use super::support::client::Client;
use super::support::dir::Dir;
use super::support::noise;
use super::support::program::vellum;
use super::support::server::Server;
use super::tier::{attached, status};

/// A refusal leaves no new medium, and nothing on an old one.
#[test]
fn an_attachment_that_is_refused_leaves_nothing() {
    let dir = Dir::new("tier-refused");
    let (image, fast, _) = attached(&dir);
    let (other, linear) = (dir.text("other"), dir.text("linear.vlm"));
    refused(
        1,
        &["another fast medium", "detach"],
        &["tier", "attach", "--fast", &other, "--fast-size", "8M", &image],
    );
    assert!(!dir.join("other").exists(), "a medium was made in vain");
    vellum(&["create", "-q", "-f", "vellum", "-o", "layout=linear", &linear, "1M"]).answer();
    refused(1, &["layout=table"], &["tier", "attach", "--fast", &other, "--fast-size", "8M", &linear]);
    assert!(!dir.join("other").exists(), "a medium was made in vain");
    refused(1, &["layout=table"], &["tier", "attach", "--fast", &fast, &linear]);
    let rows = vellum(&["tier", "list", "--output", "json", "--fast", &fast]).json();
    assert_eq!(rows["disks"].as_array().map(Vec::len), Some(1), "{rows}");
}

/// A remedy that is named is one that the command takes.
#[test]
fn what_is_refused_names_what_to_do() {
    let dir = Dir::new("tier-words");
    let (image, fast, _) = attached(&dir);
    let (qcow2, control) = (dir.text("disk.qcow2"), dir.text("ctl"));
    vellum(&["create", "-q", "-f", "qcow2", &qcow2, "1M"]).answer();
    for command in
        [&["promote", "--all"][..], &["demote", "--all"], &["move", "--all"], &["move", "--back", "--all"]]
    {
        let words = [&["tier"], command, &["--fast", &fast, &qcow2]].concat();
        refused(1, &["only images of the format vellum"], &words);
    }
    for command in ["promote", "demote", "move"] {
        let ran = vellum(&["tier", command, "--fast", &fast, &image]);
        assert!(ran.code == 1 && ran.err.contains("--range") && ran.err.contains("--all"), "{ran:?}");
    }
    let ran = vellum(&["tier", "status", "--disk", "one", &image]);
    assert!(ran.code == 1 && ran.err.contains("--disk"), "{ran:?}");

    let server = Server::start(&[&image, "--control", &control]);
    refused(1, &[&fast, "serve it with --fast"], &["tier", "promote", "--control", &control, "--all"]);
    server.stop();
    let server = Server::start(&[&image, "--fast", &fast, "--control", &control]);
    for command in [&["list", "--fast", &fast][..], &["forget", "--fast", &fast, "disk"], &["detach", &image]]
    {
        let ran = vellum(&[&["tier"], command].concat());
        assert!(ran.code == 1 && ran.err.contains("stop that server first"), "{ran:?}");
        assert!(!ran.err.contains("--control"), "the command does not take it: {ran:?}");
    }
    server.stop();

    vellum(&["tier", "move", "--fast", &fast, "--range", "0+64k", &image]).answer();
    for more in [&["--fast", &fast][..], &[]] {
        let ran = vellum(&[&["tier", "detach"], more, &[&image]].concat());
        assert!(ran.code == 1 && ran.err.contains("--back --all"), "{ran:?}");
        assert!(!ran.err.contains("give that medium"), "it was given, or is not taken: {ran:?}");
    }
}

/// The same budget is told everywhere, and where nothing was to be done, that is said.
#[test]
fn what_is_said_is_what_is_so() {
    let dir = Dir::new("tier-said");
    let (image, fast, _) = attached(&dir);
    let budget = status(&["--fast", &fast, &image])["budget-bytes"].as_u64();
    let rows = vellum(&["tier", "list", "--output", "json", "--fast", &fast]).json();
    assert_eq!(budget, rows["disks"][0]["budget-bytes"].as_u64());
    assert!(budget < Some(16 << 20), "more than the medium has: {budget:?}");
    let said = vellum(&["tier", "pin", "--fast", &fast, &image]).answer();
    assert!(said.contains("no files are pinned") && said.contains("--path"), "{said}");
    let said = vellum(&["tier", "move", "--copied", "--fast", &fast, &image]).answer();
    assert!(said.contains("have no copy there") && !said.contains("no room"), "{said}");
    let help = vellum(&["tier", "--help"]).answer();
    assert!(
        help.split_whitespace().collect::<Vec<_>>().join(" ").contains("unless parts were moved"),
        "{help}"
    );
}

/// Why units did not move, and what else there is to know of them.
#[test]
fn what_is_not_moved_says_why() {
    let dir = Dir::new("tier-why");
    let (image, fast) = (dir.text("disk.vlm"), dir.text("fast"));
    let make = ["create", "-q", "-f", "vellum", "-o", "layout=table,unit_size=64k", "--fast", &fast];
    vellum(&[&make[..], &["--fast-size", "8M", "--fast-budget", "128k", &image, "1M"]].concat()).answer();
    let server = Server::start(&[&image, "--fast", &fast]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    client.write(0, &noise(4 * (64 << 10), 6), 0).expect("it is written");
    client.flush().expect("a flush");
    drop(client);
    server.stop();
    // Two units find room, two do not, and twelve are zero.
    let said = vellum(&["tier", "move", "--all", "--fast", &fast, &image]).answer();
    for word in ["2 units (128 KiB) are", "2 found no room", "12 are zero"] {
        assert!(said.contains(word) && !said.contains("have no copy"), "{word}: {said}");
    }
    let done = vellum(&["tier", "move", "--all", "--output", "json", "--fast", &fast, &image]).json();
    let number = |field: &str| done[field].as_u64();
    assert_eq!(
        (number("there"), number("no-room"), number("zero"), number("not-copied")),
        (Some(2), Some(2), Some(12), Some(0)),
        "{done}"
    );
    let said = vellum(&["tier", "status", &image]).answer();
    assert!(said.contains("the disk needs this medium"), "{said}");
    let said = vellum(&["tier", "move", "--back", "--range", "0+64k", "--fast", &fast, &image]).answer();
    assert!(said.contains("1 unit is read"), "{said}");

    // Another medium at the place of the right one is called another one.
    let ran = vellum(&["tier", "detach", &image]);
    assert!(ran.err.contains("convert --salvage"), "{ran:?}");
    let ran = vellum(&["tier", "forget", "--fast", &fast, &image]);
    assert!(ran.code == 1 && ran.err.contains("--force"), "{ran:?}");
    std::fs::rename(&fast, dir.join("away")).expect("it is lost");
    let other = dir.text("other.vlm");
    vellum(&[&make[..], &["--fast-size", "8M", &other, "1M"]].concat()).answer();
    let ran = vellum(&["convert", "-O", "raw", "--fast", &fast, &image, &dir.text("copy.raw")]);
    assert!(ran.code == 1 && ran.err.contains("is another fast medium"), "{ran:?}");
    // That something was lost is said in any case.
    let ran = vellum(&["convert", "-q", "--salvage", "-O", "raw", &image, &dir.text("left.raw")]);
    assert!(ran.code == 0 && ran.err.contains("65536 bytes in all could not be read"), "{ran:?}");
    assert!(!ran.err.contains("bytes at"), "{ran:?}");
}

/// Nothing is copied for a move that is refused.
#[test]
fn a_disk_with_snapshots_is_refused_before_anything_is_copied() {
    let dir = Dir::new("tier-snapshots");
    let (image, fast, _) = attached(&dir);
    vellum(&["snapshot", "create", &image, "mine"]).answer();
    let says = ["has snapshots", "delete them"];
    refused(1, &says, &["tier", "move", "--range", "0+1M", "--fast", &fast, &image]);
    assert_eq!(status(&["--fast", &fast, &image])["units"].as_u64(), Some(0));
    let control = dir.text("ctl");
    let server = Server::start(&[&image, "--fast", &fast, "--control", &control]);
    refused(1, &says, &["tier", "move", "--all", "--control", &control]);
    assert_eq!(status(&["--control", &control])["units"].as_u64(), Some(0));
    server.stop();
    // What is copied, and nothing else, of a part of the disk.
    vellum(&["snapshot", "delete", &image, "mine"]).answer();
    vellum(&["tier", "promote", "--range", "0+1M", "--fast", &fast, &image]).answer();
    let said =
        ["tier", "move", "--output", "json", "--copied", "--range", "512k+1M", "--fast", &fast, &image];
    let done = vellum(&said).json();
    assert_eq!((done["moved"].as_u64(), done["not-copied"].as_u64()), (Some(8), Some(8)), "{done}");
}

/// A status says what the copies take, and nothing of what was taken back.
#[test]
fn what_was_taken_back_takes_nothing() {
    let dir = Dir::new("tier-used");
    let (image, fast, _) = attached(&dir);
    vellum(&["tier", "promote", "--range", "0+1M", "--fast", &fast, &image]).answer();
    vellum(&["tier", "demote", "--range", "256k+768k", "--fast", &fast, &image]).answer();
    let there = status(&["--fast", &fast, &image]);
    assert_eq!(
        (there["units"].as_u64(), there["used-bytes"].as_u64()),
        (Some(4), Some(256 << 10)),
        "{there}"
    );
}

/// What is shared is the image. A medium that a server has is that server's.
#[test]
fn a_medium_in_use_is_not_shared() {
    let dir = Dir::new("tier-shared");
    let (image, fast, _) = attached(&dir);
    vellum(&["tier", "move", "--range", "0+1M", "--fast", &fast, &image]).answer();
    let control = dir.text("ctl");
    let server = Server::start(&[&image, "--fast", &fast, "--control", &control]);
    for command in [&["map", "-U"][..], &["map", "-U", "--salvage"], &["check", "-U"], &["map"]] {
        let ran = vellum(&[command, &["--fast", &fast, &image]].concat());
        assert!(ran.code == 1 && ran.err.contains("stop that server"), "{command:?}: {ran:?}");
        assert!(!ran.err.contains("or use --force-share"), "{command:?}: {ran:?}");
    }
    let copy = dir.text("copy.raw");
    let ran = vellum(&["convert", "-U", "-O", "raw", "--fast", &fast, &image, &copy]);
    assert!(ran.code == 1 && ran.err.contains("stop that server"), "{ran:?}");
    // A new image on top of it is served with the same medium.
    let top = dir.text("top.vlm");
    let said = vellum(&["snapshot", "external", "--control", &control, &top]).answer();
    assert!(said.contains(&format!("vellum serve -f vellum --fast {fast} {top}")), "{said}");
    server.stop();
}
