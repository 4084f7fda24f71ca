//! A disk with a fast medium, through the program: made, promoted, served, written, and without its medium.

use std::collections::BTreeSet;

use serde_json::Value;

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::{path_text, succeed, until_let_go, vellum};
use super::support::server::Server;
use super::support::{first_difference, noise, until};
use super::{MIB, refused};
use crate::requires;

const SIZE: usize = 8 * MIB;

/// An image with data, attached to a new fast medium.
pub(super) fn attached(dir: &Dir) -> (String, String, Vec<u8>) {
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

pub(super) fn status(arguments: &[&str]) -> Value {
    vellum(&[&["tier", "status", "--output", "json"], arguments].concat()).json()
}

pub(super) fn same(found: &[u8], expected: &[u8], when: &str) {
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

/// A medium that is away, or not what it was, takes no disk out of service.
#[test]
fn a_server_starts_without_its_fast_medium() {
    let dir = Dir::new("tier-damaged");
    let (image, fast, bytes) = attached(&dir);
    vellum(&["tier", "promote", "--fast", &fast, "--all", &image]).answer();
    let sound = std::fs::read(&fast).expect("a medium");
    for (what, how) in
        [("missing", None), ("empty", Some(0)), ("short", Some(4096)), ("zeros", Some(usize::MAX))]
    {
        match how {
            None => std::fs::remove_file(&fast).expect("removed"),
            Some(len) if len > sound.len() => std::fs::write(&fast, vec![0; sound.len()]).expect("written"),
            Some(len) => std::fs::write(&fast, &sound[..len]).expect("written"),
        }
        refused(
            1,
            &["fast"],
            &["serve", "--require-all", "--nbd", "unix:/nonexistent/s", &image, "--fast", &fast],
        );
        let server = Server::start(&[&image, "--fast", &fast]);
        let said = server.says("served from their images alone");
        assert!(said.contains("fast"), "{what}: {said}");
        let mut client = Client::connect(&server.peer(), "").expect("it is served");
        same(&client.read_all().expect("it is read"), &bytes, what);
        drop(client);
        server.stop();
    }
    std::fs::write(&fast, &sound).expect("written");
    let served = Server::start(&[&image, "--fast", &fast]);
    // The other server has its lock.
    refused(1, &["fast", "in use"], &["serve", "--nbd", "unix:/nonexistent/s", &image, "--fast", &fast]);
    served.stop();
}

/// The image of a paused disk does not change, so that it can be copied.
#[test]
fn a_paused_disk_is_left_alone() {
    let dir = Dir::new("tier-paused");
    let (image, fast, _) = attached(&dir);
    let place = Dir::short();
    let control = place.text("control");
    let server = Server::start(&[&image, "--fast", &fast, "--control", &control]);
    vellum(&["tier", "promote", "--control", &control, "--range", "0+1M"]).answer();
    vellum(&["pause", "--control", &control]).answer();
    let before = std::fs::read(&image).expect("an image");
    for what in [
        &["promote", "--all"][..],
        &["demote", "--all"],
        &["pin", "--path", "/etc"],
        &["promote", "--old-mtime", "1", "--recent-atime", "1"],
    ] {
        let (command, rest) = what.split_first().expect("a command");
        refused(1, &["paused", "resume"], &[&["tier", command, "--control", &control], rest].concat());
    }
    assert!(std::fs::read(&image).expect("an image") == before, "nothing was written");
    vellum(&["resume", "--control", &control]).answer();
    vellum(&["tier", "promote", "--control", &control, "--all"]).answer();
    server.stop();
}

/// What lies where pins are kept neither blocks nor is it followed.
#[test]
fn a_file_of_pins_that_is_none_is_refused() {
    let dir = Dir::new("tier-pins");
    let (image, fast, _) = attached(&dir);
    let pins = format!("{image}.pins");
    assert!(std::process::Command::new("mkfifo").arg(&pins).status().expect("mkfifo").success());
    refused(1, &["disk.vlm.pins", "no plain file"], &["tier", "status", "--fast", &fast, &image]);
    std::fs::remove_file(&pins).expect("removed");
    std::os::unix::fs::symlink("/dev/zero", &pins).expect("a link");
    refused(1, &["disk.vlm.pins"], &["tier", "status", "--fast", &fast, &image]);
    refused(1, &["vellum-tier-files", "use another"], &["snapshot", "create", &image, "vellum-tier-files"]);
}

/// What is cut off while the medium is in use is read from the image.
#[test]
fn a_medium_that_is_cut_is_not_read_as_zeros() {
    let dir = Dir::new("tier-cut");
    let (image, fast, bytes) = attached(&dir);
    vellum(&["tier", "promote", "--fast", &fast, "--all", &image]).answer();
    let server = Server::start(&[&image, "--fast", &fast]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    let file = std::fs::OpenOptions::new().write(true).open(&fast).expect("a medium");
    file.set_len(1 << 20).expect("it is cut");
    same(&client.read_all().expect("it is read"), &bytes, "from a medium that was cut");
    drop(client);
    server.stop();
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
    let create = ["create", "-q", "-f", "vellum", "-o", "layout=table", "--fast", &fast];
    vellum(&[&create[..], &size, &[&table, "16M"]].concat()).answer();
    let info = vellum(&["info", &table]).answer();
    assert!(info.contains("no copy there counts"), "{info}");
    refused(1, &["16777216"], &["tier", "promote", "--fast", &fast, "--range", "15M+2M", &table]);
    let other = dir.text("other");
    attach(&other, &[], &table, &["--fast-size"]);
    attach(&other, &size, &table, &["detach"]);
    attach(&qcow2, &[], &table, &["no fast medium"]);
    // A disk with nothing at its beginning is not taken for an empty file.
    let disk = dir.text("disk.raw");
    let mut bytes = vec![0; 8 * MIB];
    bytes[5 * MIB] = 1;
    std::fs::write(&disk, &bytes).expect("a disk");
    attach(&disk, &size, &table, &["no fast medium"]);
    assert!(std::fs::read(&disk).expect("it is there") == bytes);
}

/// The units with bytes of the files below a directory, as `debugfs` says: what it names block by block.
pub(super) fn units_of_files(
    system: &str,
    tree: &std::path::Path,
    below: &str,
    unit: u64,
    at: u64,
) -> BTreeSet<u64> {
    let mut files = vec![tree.join(below)];
    let (mut commands, mut found) = (String::new(), BTreeSet::new());
    while let Some(path) = files.pop() {
        if path.is_dir() {
            files.extend(
                std::fs::read_dir(&path).expect("a directory").map(|entry| entry.expect("a name").path()),
            );
            continue;
        }
        let name = path.strip_prefix(tree).expect("below it").display().to_string();
        for block in 0..std::fs::metadata(&path).expect("a file").len().div_ceil(4096) {
            commands += &format!("bmap \"/{name}\" {block}\n");
        }
    }
    let script = format!("{system}.commands");
    std::fs::write(&script, commands).expect("it has space");
    let said = succeed("debugfs", &["-f", &script, system]);
    for line in said.lines().filter(|line| !line.starts_with("debugfs")) {
        let block: u64 = line.split_whitespace().next().and_then(|word| word.parse().ok()).expect(line);
        if block > 0 {
            found.insert((at + block * 4096) / unit);
        }
    }
    found
}

/// A tree with a part of this machine's `/usr/share`, and with files that lie elsewhere.
fn guest_tree(dir: &Dir) -> std::path::PathBuf {
    let tree = dir.join("tree");
    for at in ["usr/share/own", "etc", "home"] {
        std::fs::create_dir_all(tree.join(at)).expect("a directory");
    }
    let mut left = 4 * MIB;
    for entry in ["doc", "misc", "perl", "locale", "zoneinfo"].iter().map(|name| format!("/usr/share/{name}"))
    {
        let mut next = vec![std::path::PathBuf::from(entry)];
        while let Some(path) = next.pop() {
            let Ok(entries) = std::fs::read_dir(&path) else { continue };
            for entry in entries.flatten().take(12) {
                match entry.file_type() {
                    Ok(kind) if kind.is_dir() => next.push(entry.path()),
                    Ok(kind) if kind.is_file() => {
                        let Ok(bytes) = std::fs::read(entry.path()) else { continue };
                        if bytes.len() > left / 8 {
                            continue;
                        }
                        left -= bytes.len();
                        let to = tree.join(entry.path().strip_prefix("/").expect("absolute"));
                        std::fs::create_dir_all(to.parent().expect("a directory")).expect("a directory");
                        std::fs::write(to, bytes).expect("it has space");
                    }
                    _ => {}
                }
            }
        }
    }
    let places = ["usr/share/own", "etc", "home"];
    for (number, at) in (0..30).zip(places.into_iter().cycle()) {
        let bytes = noise(3 * 65_536, number);
        std::fs::write(tree.join(at).join(number.to_string()), bytes).expect("it has space");
    }
    tree
}

const UNIT: u64 = 65_536;

/// Which units are read from the fast medium, asked of each.
fn fast_units(control: &str, client: &mut Client, units: u64) -> BTreeSet<u64> {
    let mut fast = BTreeSet::new();
    let fast_reads = || status(&["--control", control])["fast-reads"].as_u64().expect("a number");
    let mut before = fast_reads();
    for unit in 0..units {
        client.read(unit * UNIT + 512, 512).expect("it is read");
        let now = fast_reads();
        if now > before {
            fast.insert(unit);
        }
        before = now;
    }
    fast
}

#[test]
fn pinned_paths_are_exactly_the_units_with_bytes_of_their_files() {
    requires!("mkfs.ext4", "debugfs");
    let dir = Dir::new("tier-pins");
    let tree = guest_tree(&dir);
    let (system, image, fast) = (dir.text("system"), dir.text("disk.vlm"), dir.text("fast"));
    let mkfs = ["-q", "-F", "-b", "4096", "-d", path_text(&tree), &system, "24M"];
    succeed("mkfs.ext4", &mkfs);
    // On a partition of an MBR, which begins within a unit.
    let start: u32 = 63 * 512 + 1024 * 1024;
    let mut disk = vec![0; 63 * 512 + MIB];
    disk[446 + 4] = 0x83;
    disk[446 + 8..446 + 12].copy_from_slice(&(start / 512).to_le_bytes());
    disk[446 + 12..446 + 16].copy_from_slice(&(24_u32 << 11).to_le_bytes());
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    disk.extend(std::fs::read(&system).expect("a file system"));
    let raw = dir.text("disk.raw");
    std::fs::write(&raw, &disk).expect("it has space");
    let options = "layout=table,unit_size=64k";
    vellum(&["convert", "-q", "-f", "raw", "-O", "vellum", "-o", options, &raw, &image]).answer();
    vellum(&["tier", "attach", "--fast", &fast, "--fast-size", "64M", &image]).answer();

    let share = units_of_files(&system, &tree, "usr/share", UNIT, start.into());
    let etc = units_of_files(&system, &tree, "etc", UNIT, start.into());
    let pin = |more: &[&str]| vellum(&[&["tier", "pin", "--output", "json"], more].concat()).json();
    let done = pin(&["--fast", &fast, "--path", "/usr/share", &image]);
    assert_eq!(done["promoted"].as_u64(), Some(share.len() as u64), "{done}");
    let there = status(&["--fast", &fast, &image]);
    assert_eq!(there["units-by-reason"]["rule"].as_u64(), Some(share.len() as u64), "{there}");
    assert_eq!(there["pins"][0]["path"].as_str(), Some("/usr/share"), "{there}");
    refused(1, &["/none", "not in the guest"], &["tier", "pin", "--fast", &fast, "--path", "/none", &image]);
    refused(1, &["/etc", "not pinned"], &["tier", "unpin", "--fast", &fast, "--path", "/etc", &image]);

    let control = dir.text("ctl");
    let server = Server::start(&[&image, "--fast", &fast, "--control", &control]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    let units = disk.len() as u64 / UNIT;
    assert!(fast_units(&control, &mut client, units) == share, "each unit of /usr/share, and no other");
    // While it is served: one more path, and then the first one no more.
    let both: BTreeSet<u64> = share.union(&etc).copied().collect();
    pin(&["--control", &control, "--path", "/etc"]);
    assert!(fast_units(&control, &mut client, units) == both, "/usr/share and /etc");
    let unpin = ["tier", "unpin", "--output", "json", "--control", &control, "--path", "/usr/share"];
    let done = vellum(&unpin).json();
    assert_eq!(done["demoted"].as_u64(), Some(both.len() as u64 - etc.len() as u64), "{done}");
    assert!(fast_units(&control, &mut client, units) == etc, "/etc");
    same(&client.read_all().expect("it is read"), &disk, "nothing has changed");
    // What is written goes back, and comes again when the pins are looked up again.
    let first = *etc.iter().next().expect("there are some");
    client
        .write(first * UNIT, &disk[usize::try_from(first * UNIT).expect("small")..][..512], 0)
        .expect("it is written");
    let done = pin(&["--control", &control]);
    assert_eq!(
        (done["promoted"].as_u64(), done["there"].as_u64()),
        (Some(1), Some(etc.len() as u64 - 1)),
        "{done}"
    );
    drop(client);
    server.stop();
    assert_eq!(vellum(&["check", &image]).code, 0);
    let snapshots = vellum(&["snapshot", "list", &image]).out;
    assert!(!snapshots.contains("vellum-tier-files"), "what it was read from is deleted: {snapshots}");

    // What a clone has not written is in its template.
    let clone = dir.text("clone.vlm");
    let create = [
        "create", "-q", "-f", "vellum", "-o", options, "-b", &image, "-F", "vellum", "--fast", &fast, &clone,
    ];
    vellum(&create).answer();
    let done = pin(&["--fast", &fast, "--path", "/etc", &clone]);
    assert_eq!(
        (done["promoted"].as_u64(), done["in-backing"].as_u64()),
        (Some(0), Some(etc.len() as u64)),
        "{done}"
    );
    let done = pin(&["--fast", &fast, "--path", "/etc", "--copy", &clone]);
    assert_eq!(
        (done["promoted"].as_u64(), done["in-backing"].as_u64()),
        (Some(etc.len() as u64), Some(0)),
        "{done}"
    );
}

#[test]
fn files_that_were_written_long_ago_and_read_lately_are_promoted() {
    requires!("mkfs.ext4", "debugfs");
    let dir = Dir::new("tier-times");
    let tree = dir.join("tree");
    std::fs::create_dir_all(&tree).expect("a directory");
    for name in ["chosen", "unread", "new"] {
        std::fs::write(tree.join(name), noise(4 * 65_536, 1)).expect("it has space");
    }
    let (system, image, fast) = (dir.text("system"), dir.text("disk.vlm"), dir.text("fast"));
    succeed("mkfs.ext4", &["-q", "-F", "-b", "4096", "-d", path_text(&tree), &system, "8M"]);
    let now =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs();
    let mut commands = String::new();
    for (name, written_days, read_days) in [("chosen", 100, 2), ("unread", 100, 60), ("new", 3, 1)] {
        let (written, read) = (now - written_days * 86_400, now - read_days * 86_400);
        commands += &format!("sif /{name} mtime @{written}\nsif /{name} atime @{read}\n");
    }
    let script = dir.text("commands");
    std::fs::write(&script, commands).expect("it has space");
    succeed("debugfs", &["-w", "-f", &script, &system]);
    let chosen = units_of_files(&system, &tree, "chosen", UNIT, 0).len() as u64;
    let options = "layout=table,unit_size=64k";
    vellum(&["convert", "-q", "-f", "raw", "-O", "vellum", "-o", options, &system, &image]).answer();
    vellum(&["tier", "attach", "--fast", &fast, "--fast-size", "16M", &image]).answer();
    let times = ["tier", "promote", "--output", "json", "--old-mtime", "30", "--recent-atime", "7"];
    let done = vellum(&[&times[..], &["--fast", &fast, &image]].concat()).json();
    assert_eq!((done["files"].as_u64(), done["promoted"].as_u64()), (Some(1), Some(chosen)), "{done}");
    let control = dir.text("ctl");
    let server = Server::start(&[&image, "--fast", &fast, "--control", &control]);
    let done = vellum(&[&times[..], &["--control", &control]].concat()).json();
    assert_eq!((done["files"].as_u64(), done["there"].as_u64()), (Some(1), Some(chosen)), "{done}");
    let there = status(&["--control", &control]);
    assert_eq!(there["units-by-reason"]["times"].as_u64(), Some(chosen), "{there}");
    server.stop();
}

#[test]
fn what_is_read_often_comes_to_the_fast_medium_by_itself_and_goes_back_when_it_is_written() {
    let dir = Dir::new("tier-heat");
    let (image, fast, mut bytes) = attached(&dir);
    let control = dir.text("ctl");
    let arguments = [&image, "--fast", &fast, "--tier-heat", "on", "--control", &control];
    let server = Server::start(&arguments);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    // Written once: what is hot is what is read after that.
    let written = noise(MIB, 11);
    client.write(0, &written, 0).expect("it is written");
    client.flush().expect("a flush");
    bytes[..MIB].copy_from_slice(&written);
    let units = |there: &Value| there["units"].as_u64().expect("a number");
    assert_eq!(units(&status(&["--control", &control])), 0);
    // One pass, but for the last mebibyte.
    let most = u32::try_from(7 * MIB).expect("small");
    same(&client.read(0, most).expect("it is read"), &bytes[..7 * MIB], "the first pass");
    // A mebibyte of it is zero, and needs no copy.
    until("the units that were read are copied", || units(&status(&["--control", &control])) == 96);
    let before = status(&["--control", &control]);
    assert_eq!(before["units-by-reason"]["heat"].as_u64(), Some(96), "{before}");
    for part in [0..4, 5..7] {
        let (at, len) = (part.start as u64 * MIB as u64, u32::try_from(part.len() * MIB).expect("small"));
        same(
            &client.read(at, len).expect("it is read"),
            &bytes[part.start * MIB..part.end * MIB],
            "the second pass",
        );
    }
    let after = status(&["--control", &control]);
    assert_eq!(after["slow-reads"], before["slow-reads"], "the second pass is all fast: {after}");
    let stats = vellum(&["stats", "--control", &control, "--output", "json"]).json();
    assert_eq!(stats["disks"][0]["tier"]["promoted-by-reason"]["heat"].as_u64(), Some(96), "{stats}");
    assert!(vellum(&["stats", "--control", &control]).answer().contains("fast medium: 6 MiB"));
    // A unit that is written goes back, and one pass does not bring it again.
    client.write(5 * MIB as u64, &written[..4096], 0).expect("it is written");
    client.flush().expect("a flush");
    bytes[5 * MIB..5 * MIB + 4096].copy_from_slice(&written[..4096]);
    client.read(5 * MIB as u64, 65_536).expect("it is read");
    client.read(7 * MIB as u64, 65_536).expect("it is read");
    until("another unit is copied", || units(&status(&["--control", &control])) == 96);
    let read = client.read(5 * MIB as u64, 65_536).expect("it is read");
    same(&read, &bytes[5 * MIB..][..65_536], "a unit that was written");
    until("it was read twice", || units(&status(&["--control", &control])) == 97);
    drop(client);
    server.stop();
    // Over a restart it is remembered what is hot.
    let heat = std::path::PathBuf::from(format!("{image}.heat"));
    assert!(heat.exists());
    vellum(&["tier", "demote", "--fast", &fast, "--all", &image]).answer();
    let server = Server::start(&arguments);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    until("what was hot is copied again", || units(&status(&["--control", &control])) == 97);
    same(&client.read_all().expect("it is read"), &bytes, "after a restart");
    drop(client);
    server.stop();
    // A damaged one does no harm.
    std::fs::write(&heat, b"VELLUMt1 and no more").expect("it has space");
    vellum(&["tier", "demote", "--fast", &fast, "--all", &image]).answer();
    let server = Server::start(&arguments);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    same(&client.read_all().expect("it is read"), &bytes, "without its heat");
    drop(client);
    server.stop();
    assert_eq!(vellum(&["check", &image]).code, 0);
}

#[test]
fn what_a_fast_medium_has_of_a_deleted_image_is_listed_and_freed() {
    let dir = Dir::new("tier-gone");
    let (image, fast, _) = attached(&dir);
    vellum(&["tier", "promote", "--fast", &fast, "--all", &image]).answer();
    let other = dir.text("other.vlm");
    let options = "layout=table,unit_size=64k";
    vellum(&["create", "-q", "-f", "vellum", "-o", options, "--fast", &fast, &other, "16M"]).answer();
    let list = || vellum(&["tier", "list", "--fast", &fast, "--output", "json"]).json();
    let all = list();
    assert_eq!(all["disks"].as_array().map(Vec::len), Some(2), "{all}");
    assert_eq!(all["disks"][0]["used-bytes"].as_u64(), Some(7 * MIB as u64), "{all}");
    assert!(vellum(&["tier", "list", "--fast", &fast]).answer().contains("disk.vlm"));
    std::fs::remove_file(&image).expect("it was there");
    refused(1, &["no row", "tier list"], &["tier", "forget", "--fast", &fast, "/none.vlm"]);
    let uuid = all["disks"][0]["uuid"].as_str().expect("a UUID");
    let said = vellum(&["tier", "forget", "--fast", &fast, uuid]).answer();
    assert!(said.contains("7 MiB"), "{said}");
    let left = list();
    assert_eq!(left["disks"].as_array().map(Vec::len), Some(1), "{left}");
    let free = |said: &Value| said["free-bytes"].as_u64().expect("a number");
    assert_eq!(free(&left) - free(&all), 7 * MIB as u64, "{left}");
    // One whose image is there loses its copies, and nothing else.
    vellum(&["tier", "forget", "--fast", &fast, &other]).answer();
    assert_eq!(status(&[&other])["counts"], false);
    vellum(&["tier", "attach", "--fast", &fast, &other]).answer();
}

fn space_of(image: &str) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(image).expect("an image")) * 512
}

#[test]
fn moved_parts_are_on_the_fast_medium_alone_until_they_are_written_or_brought_back() {
    let dir = Dir::new("tier-moved");
    let (image, fast, mut bytes) = attached(&dir);
    let before = space_of(&image);
    vellum(&["tier", "promote", "--fast", &fast, "--range", "6M+1M", &image]).answer();
    let of = ["--output", "json", "--fast", &fast, &image];
    let done = vellum(&[&["tier", "move", "--range", "0+2M"][..], &of].concat()).json();
    assert_eq!((done["moved"].as_u64(), done["not-copied"].as_u64()), (Some(32), Some(0)), "{done}");
    let done = vellum(&[&["tier", "move", "--copied"][..], &of].concat()).json();
    // The rest of the disk has no copy.
    assert_eq!((done["moved"].as_u64(), done["there"].as_u64()), (Some(16), Some(32)), "{done}");
    assert!(space_of(&image) + 2 * MIB as u64 <= before, "{} of {before}", space_of(&image));
    assert_eq!(vellum(&["check", &image]).code, 0);
    let there = status(&["--fast", &fast, &image]);
    assert_eq!(there["moved"].as_u64(), Some(48), "{there}");
    assert!(vellum(&["tier", "status", "--fast", &fast, &image]).answer().contains("there alone"));

    // Without the medium nothing is done, and the message names it and what to do.
    let raw = dir.text("copy.raw");
    let place = Dir::short();
    let socket = format!("unix:{}", place.text("s"));
    for what in [
        &["serve", "--nbd", &socket, &image][..],
        &["convert", "-O", "raw", &image, &raw],
        &["resize", &image, "16M"],
        &["check", "-r", "all", &image],
        &["tier", "detach", &image],
        &["tier", "detach", "--fast", &fast, &image],
        &["snapshot", "create", &image, "one"],
    ] {
        refused(1, &["alone", "fast", "--back"], what);
    }
    refused(1, &["alone", "--back"], &["tier", "forget", "--fast", &fast, &image]);
    let clone = dir.text("clone.vlm");
    let code = vellum(&["create", "-q", "-f", "vellum", "-b", &image, "-F", "vellum", &clone]).code;
    assert!(code != 0 || vellum(&["convert", "-O", "raw", &clone, &raw]).code != 0, "over what is not there");

    let control = dir.text("ctl");
    let serve = [&image, "--fast", &fast, "--control", &control];
    let server = Server::start(&serve);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    same(&client.read_all().expect("it is read"), &bytes, "moved");
    let medium = std::fs::read(&fast).expect("the medium");
    let written = noise(200_000, 9);
    client.write(70_000, &written, 0).expect("it is written");
    client.flush().expect("a flush");
    bytes[70_000..270_000].copy_from_slice(&written);
    same(&client.read_all().expect("it is read"), &bytes, "written");
    assert!(std::fs::read(&fast).expect("the medium") == medium, "a guest's write reached the fast medium");
    refused(1, &["alone", "--back"], &["snapshot", "create", "--control", &control, "one"]);
    let there = status(&["--control", &control]);
    assert_eq!(there["moved"].as_u64(), Some(44), "{there}");
    let done = vellum(&["tier", "move", "--control", &control, "--range", "0+1M"]).answer();
    assert!(done.contains("4 units"), "{done}");
    client.write(0, &written, 0).expect("it is written");
    client.flush().expect("a flush");
    bytes[..written.len()].copy_from_slice(&written);
    server.kill();
    until_let_go(&image);

    refused(1, &["alone", "fast"], &["serve", "--nbd", &socket, &image]);
    let server = Server::start(&serve);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    same(&client.read_all().expect("it is read"), &bytes, "after a kill");
    assert_eq!(status(&["--control", &control])["moved"].as_u64(), Some(44));
    let back = vellum(&["tier", "move", "--back", "--all", "--control", &control]).answer();
    assert!(back.contains("44 units"), "{back}");
    same(&client.read_all().expect("it is read"), &bytes, "home again");
    drop(client);
    server.stop();
    assert_eq!(vellum(&["check", &image]).code, 0);
    vellum(&["convert", "-q", "-O", "raw", &image, &raw]).answer();
    same(&std::fs::read(&raw).expect("a copy"), &bytes, "the image alone");
    vellum(&["tier", "detach", "--fast", &fast, &image]).answer();
}

/// The guest gets I/O errors for what is lost, and the server says so once.
#[test]
fn a_lost_medium_is_an_error_for_what_it_alone_had() {
    let dir = Dir::new("tier-lost");
    let (image, fast, bytes) = attached(&dir);
    vellum(&["tier", "move", "--fast", &fast, "--range", "0+1M", &image]).answer();
    let sound = std::fs::read(&fast).expect("a medium");
    let control = dir.text("ctl");
    let server = Server::start(&[&image, "--fast", &fast, "--control", &control]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    let file = std::fs::OpenOptions::new().write(true).open(&fast).expect("a medium");
    file.set_len(576 << 10).expect("it is cut");
    assert!(client.read(0, 4096).is_err(), "what is lost");
    same(&client.read(2 << 20, 1 << 20).expect("it is read"), &bytes[2 * MIB..3 * MIB], "what is not");
    let there = status(&["--control", &control]);
    assert!(there["lost-reads"].as_u64() > Some(0) && there["trouble"].is_string(), "{there}");
    let said = server.says("alone cannot be read");
    assert!(said.contains("I/O errors"), "{said}");
    drop(client);
    server.stop();
    // A medium that is not there, or another time's, is not taken for it.
    refused(1, &["fast"], &["tier", "status", "--fast", &fast, &image]);
    std::fs::write(&fast, &sound).expect("written");
    vellum(&["tier", "move", "--back", "--all", "--fast", &fast, &image]).answer();
    let raw = dir.text("copy.raw");
    vellum(&["convert", "-q", "-O", "raw", &image, &raw]).answer();
    same(&std::fs::read(&raw).expect("a copy"), &bytes, "brought back");
}
