//! Files of the guest that move to the fast medium, of a closed image and of a disk that is served, also a second time.

use futures_lite::future::block_on;
use vellum_core::{Buffer, ImageOffset, MemoryStorage, SharedStorage};
use vellum_format::FormatKind;

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::noise;
use super::support::program::{path_text, succeed, vellum};
use super::support::server::Server;
use super::tier::{same, status, units_of_files};
use super::tier_lost::SLOTS_AT;
use super::{MIB, refused};
use crate::requires;

const UNIT: u64 = 65_536;

#[test]
fn the_units_of_files_move_and_no_others() {
    requires!("mkfs.ext4", "debugfs");
    let dir = Dir::new("tier-move-path");
    let tree = dir.join("tree");
    for (name, units) in [("one", 5), ("two/a", 3), ("two/b", 2), ("three", 4)] {
        let file = tree.join(name);
        std::fs::create_dir_all(file.parent().expect("a directory")).expect("it has space");
        std::fs::write(file, noise(units * 65_536 - 100, units as u64)).expect("it has space");
    }
    let (system, image, fast) = (dir.text("system"), dir.text("disk.vlm"), dir.text("fast"));
    succeed("mkfs.ext4", &["-q", "-F", "-b", "4096", "-d", path_text(&tree), &system, "8M"]);
    let disk = std::fs::read(&system).expect("a disk");
    let [one, two, three] = ["one", "two", "three"].map(|name| units_of_files(&system, &tree, name, UNIT, 0));
    let options = "layout=table,unit_size=64k";
    vellum(&["convert", "-q", "-f", "raw", "-O", "vellum", "-o", options, &system, &image]).answer();
    vellum(&["tier", "attach", "--fast", &fast, "--fast-size", "16M", &image]).answer();

    let files = ["tier", "move", "--output", "json"];
    let closed =
        |path: &str| vellum(&[&files[..], &["--fast", &fast, "--path", path, &image]].concat()).json();
    let done = closed("/one");
    assert_eq!((done["files"].as_u64(), done["moved"].as_u64()), (Some(1), Some(one.len() as u64)), "{done}");
    // And home again, the same units.
    vellum(&["tier", "move", "--fast", &fast, "--path", "/three", &image]).answer();
    let back = [&files[..], &["--back", "--path", "/three", "--fast", &fast, &image]].concat();
    let done = vellum(&back).json();
    assert_eq!(
        (done["files"].as_u64(), done["demoted"].as_u64()),
        (Some(1), Some(three.len() as u64)),
        "{done}"
    );
    let rest = one.difference(&three).count() as u64;
    assert_eq!(status(&["--fast", &fast, &image])["moved"].as_u64(), Some(rest));
    vellum(&["tier", "move", "--fast", &fast, "--path", "/one", &image]).answer();
    refused(1, &["/none", "not in the guest"], &["tier", "move", "--fast", &fast, "--path", "/none", &image]);
    refused(1, &["none", "slash"], &["tier", "move", "--fast", &fast, "--path", "none", &image]);
    // They are read from the medium to find the next ones.
    let done = closed("/two");
    let new = two.difference(&one).count() as u64;
    assert_eq!((done["files"].as_u64(), done["moved"].as_u64()), (Some(2), Some(new)), "{done}");

    let control = dir.text("ctl");
    let server = Server::start(&[&image, "--fast", &fast, "--control", &control]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    let before = (one.union(&two).count()) as u64;
    assert_eq!(status(&["--control", &control])["moved"].as_u64(), Some(before));
    let said = vellum(&["tier", "move", "--control", &control, "--path", "/three"]).answer();
    assert!(said.starts_with("1 file"), "{said}");
    let all = one.union(&two).copied().collect::<std::collections::BTreeSet<u64>>();
    let all = all.union(&three).count() as u64;
    let there = status(&["--control", &control]);
    assert_eq!((there["moved"].as_u64(), there["units"].as_u64()), (Some(all), Some(all)), "{there}");
    // So are pins looked up.
    let pinned = vellum(&["tier", "pin", "--output", "json", "--control", &control, "--path", "/one"]).json();
    assert_eq!(
        (pinned["promoted"].as_u64(), pinned["there"].as_u64()),
        (Some(0), Some(one.len() as u64)),
        "{pinned}"
    );
    same(&client.read_all().expect("it is read"), &disk, "moved");
    let said = vellum(&["tier", "move", "--back", "--control", &control, "--path", "/three"]).answer();
    assert!(said.starts_with("1 file") && said.contains("read from the image again"), "{said}");
    let rest = one.union(&two).filter(|unit| !three.contains(unit)).count() as u64;
    assert_eq!(status(&["--control", &control])["moved"].as_u64(), Some(rest));
    same(&client.read_all().expect("it is read"), &disk, "some are home");
    // The first move of a served disk has a snapshot to read.
    vellum(&["tier", "move", "--back", "--all", "--control", &control]).answer();
    vellum(&["tier", "move", "--control", &control, "--path", "/three"]).answer();
    assert_eq!(status(&["--control", &control])["moved"].as_u64(), Some(three.len() as u64));
    assert!(!vellum(&["snapshot", "list", "--control", &control]).answer().contains("vellum-tier-files"));
    same(&client.read_all().expect("it is read"), &disk, "moved again");
    drop(client);
    server.stop();

    // What a clone has not written stays in its backing image, and is counted.
    vellum(&["tier", "move", "--back", "--all", "--fast", &fast, &image]).answer();
    let clone = dir.text("clone.vlm");
    let create = [
        "create", "-q", "-f", "vellum", "-o", options, "-b", &image, "-F", "vellum", "--fast", &fast, &clone,
    ];
    vellum(&create).answer();
    let server = Server::start(&[&clone]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    let first = *three.first().expect("there are some");
    let within = usize::try_from(first * UNIT).expect("small");
    client.write(first * UNIT, &disk[within..within + 4096], 0).expect("it is written");
    drop(client);
    server.stop();
    let done = vellum(&[&files[..], &["--fast", &fast, "--path", "/three", &clone]].concat()).json();
    assert_eq!(
        (done["moved"].as_u64(), done["not-stored"].as_u64(), done["not-copied"].as_u64()),
        (Some(0), Some(three.len() as u64), Some(0)),
        "{done}"
    );
    assert_eq!(disk.len(), 8 * MIB);
}

/// What is no longer pinned would come home, and be zeros where the medium ends.
#[test]
fn what_was_moved_stays_pinned_while_its_medium_is_cut_off() {
    requires!("mkfs.ext4", "debugfs");
    let dir = Dir::new("tier-unpin-cut");
    let tree = dir.join("tree");
    std::fs::create_dir(&tree).expect("it has space");
    std::fs::write(tree.join("one"), noise(12 * 65_536, 1)).expect("it has space");
    let (system, image, fast) = (dir.text("system"), dir.text("disk.vlm"), dir.text("fast"));
    let control = dir.text("ctl");
    succeed("mkfs.ext4", &["-q", "-F", "-b", "4096", "-d", path_text(&tree), &system, "8M"]);
    let units = units_of_files(&system, &tree, "one", UNIT, 0).len() as u64;
    let options = "layout=table,unit_size=64k";
    vellum(&["convert", "-q", "-f", "raw", "-O", "vellum", "-o", options, &system, &image]).answer();
    vellum(&["tier", "attach", "--fast", &fast, "--fast-size", "16M", &image]).answer();
    vellum(&["tier", "move", "--fast", &fast, "--path", "/one", &image]).answer();
    let server = Server::start(&[&image, "--fast", &fast, "--control", &control]);
    vellum(&["tier", "pin", "--control", &control, "--path", "/one"]).answer();
    let file = std::fs::OpenOptions::new().write(true).open(&fast).expect("a medium");
    let len = file.metadata().expect("a medium").len();
    file.set_len(SLOTS_AT + (units - 2) * UNIT).expect("it is cut");
    let unpin = ["tier", "unpin", "--control", &control, "--path", "/one"];
    refused(1, &["was cut off", "Stop the server"], &unpin);
    let there = status(&["--control", &control]);
    assert_eq!(there["moved"].as_u64(), Some(units), "{there}");
    file.set_len(len).expect("it is longer again");
    refused(1, &["was cut off", "Stop the server"], &unpin);
    let there = status(&["--control", &control]);
    assert_eq!(there["moved"].as_u64(), Some(units), "{there}");
    let pinned = std::fs::read_to_string(format!("{image}.pins")).expect("there are pins");
    assert!(pinned.contains("/one"), "{pinned}");
    server.stop();
}

/// The snapshot that a server which was killed has left of looking for files keeps no unit from moving. One of the user's does.
#[test]
fn a_snapshot_that_was_left_behind_keeps_nothing_from_moving() {
    let dir = Dir::new("tier-move-left");
    let (image, fast) = (dir.text("disk.vlm"), dir.text("fast"));
    let options = "layout=table,unit_size=64k";
    std::fs::write(dir.join("raw"), noise(4 * 65_536, 1)).expect("it has space");
    vellum(&["convert", "-q", "-f", "raw", "-O", "vellum", "-o", options, &dir.text("raw"), &image]).answer();
    vellum(&["tier", "attach", "--fast", &fast, "--fast-size", "16M", &image]).answer();
    let storage: SharedStorage = MemoryStorage::holding("disk", &std::fs::read(&image).expect("an image"));
    block_on(async {
        let (disk, snapshots) = FormatKind::Native.format().open_alone(&storage).await.expect("it opens");
        snapshots.create("vellum-tier-files", 0).await.expect("it has space");
        disk.close().await.expect("it is complete");
    });
    let len = usize::try_from(storage.len()).expect("small");
    let bytes = block_on(storage.read(ImageOffset::ZERO, Buffer::zeroed(len))).expect("it is read");
    std::fs::write(&image, bytes.to_vec()).expect("it has space");
    assert!(vellum(&["snapshot", "list", &image]).answer().contains("vellum-tier-files"));

    vellum(&["snapshot", "create", &image, "mine"]).answer();
    refused(1, &["snapshots", "delete them"], &["tier", "move", "--all", "--fast", &fast, &image]);
    vellum(&["snapshot", "delete", &image, "mine"]).answer();
    vellum(&["tier", "move", "--all", "--fast", &fast, &image]).answer();
    assert!(!vellum(&["snapshot", "list", &image]).answer().contains("vellum-tier-files"));
    assert_eq!(status(&["--fast", &fast, &image])["moved"].as_u64(), Some(4));
}
