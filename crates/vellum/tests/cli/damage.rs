//! Damage is reported, repaired where possible, and never causes a panic.

use std::os::unix::fs::FileExt;

use super::support::dir::Dir;
use super::support::noise;
use super::support::program::{has, run, vellum};
use super::{MIB, refused};

const CLUSTER: u64 = 65536;

/// A qcow2 image with two mebibytes of data, and where its first L2 table and its refcount block are.
fn image(dir: &Dir) -> (String, u64, u64) {
    let (raw, path) = (dir.text("raw"), dir.text("image.qcow2"));
    std::fs::write(&raw, noise(2 * MIB, 50)).expect("a disk");
    vellum(&["convert", "-f", "raw", "-O", "qcow2", &raw, &path]).answer();
    let number = |at: u64| {
        let file = std::fs::File::open(&path).expect("the image");
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).expect("eight bytes");
        u64::from_be_bytes(bytes) & 0x00ff_ffff_ffff_fe00
    };
    let (l2, block) = (number(number(40)), number(number(48)));
    (path, l2, block)
}

fn poke(path: &str, at: u64, bytes: &[u8]) {
    let file = std::fs::File::options().write(true).open(path).expect("the image");
    file.write_all_at(bytes, at).expect("the poke");
}

/// Both programs return the same exit code, and the same numbers.
#[track_caller]
fn checked(path: &str, code: i32) {
    let mine = vellum(&["check", "--output", "json", path]);
    assert_eq!(mine.code, code, "{mine:?}");
    if has("qemu-img") {
        let yours = run("qemu-img", &["check", "--output=json", path]);
        assert_eq!(yours.code, code, "{yours:?}");
        let parse = |text: &str| serde_json::from_str::<serde_json::Value>(text).expect("JSON");
        let (mine, yours) = (parse(&mine.out), parse(&yours.out));
        for field in ["check-errors", "leaks", "total-clusters", "format", "filename"] {
            assert_eq!(mine[field], yours[field], "{field}:\n{mine}\n{yours}");
        }
        // QEMU also counts what follows from an error it has counted.
        let is_corrupt = |answer: &serde_json::Value| answer["corruptions"].as_u64() > Some(0);
        assert_eq!(is_corrupt(&mine), is_corrupt(&yours), "{mine}\n{yours}");
    }
}

#[test]
fn leaks_are_3_and_repaired() {
    let dir = Dir::new("damage");
    let (path, _, block) = image(&dir);
    checked(&path, 0);
    // Two more clusters have a refcount although nothing refers to them.
    let end = std::fs::metadata(&path).expect("the image").len() / CLUSTER;
    let file = std::fs::File::options().write(true).open(&path).expect("the image");
    file.set_len((end + 2) * CLUSTER).expect("a longer image");
    for cluster in [end, end + 1] {
        poke(&path, block + 2 * cluster, &[0, 1]);
    }
    checked(&path, 3);
    let human = vellum(&["check", &path]);
    assert!(human.out.contains("2 leaked clusters were found on the image."), "{human:?}");
    let ran = vellum(&["check", "-r", "leaks", "--output", "json", &path]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(ran.json()["leaks-fixed"], 2);
    checked(&path, 0);
    assert_eq!(vellum(&["compare", "-F", "raw", &path, &dir.text("raw")]).code, 0);
}

#[test]
fn corruption_is_2_and_repaired_where_it_can_be() {
    let dir = Dir::new("damage");
    let (path, l2, block) = image(&dir);
    // A cluster in use that is not counted.
    let used = l2 / CLUSTER;
    poke(&path, block + 2 * used, &[0, 0]);
    checked(&path, 2);
    let leaks_only = vellum(&["check", "-r", "leaks", &path]);
    assert_eq!(leaks_only.code, 2, "{leaks_only:?}");
    let all = vellum(&["check", "-r", "all", &path]);
    assert_eq!(all.code, 0, "{all:?}");
    checked(&path, 0);
    assert_eq!(vellum(&["compare", "-F", "raw", &path, &dir.text("raw")]).code, 0);
    // An entry that leads to a place which is no cluster.
    poke(&path, l2 + 8, &(0x8000_0000_0000_0000_u64 | (1 << 50) | 512).to_be_bytes());
    assert_eq!(vellum(&["check", &path]).code, 2);
    let read = vellum(&["convert", "-O", "raw", &path, &dir.text("out")]);
    assert_eq!(read.code, 1, "{read:?}");
    assert!(read.err.contains("image.qcow2") && !read.err.contains("panicked"), "{read:?}");
    assert!(!dir.join("out").exists());
    refused(4, &["image.qcow2"], &["compare", "-F", "raw", &path, &dir.text("raw")]);
}

#[test]
fn a_dirty_image_is_told_and_recovered() {
    let dir = Dir::new("damage");
    let (path, l2, block) = image(&dir);
    poke(&path, 79, &[1]);
    poke(&path, block + 2 * (l2 / CLUSTER), &[0, 0]);
    let info = vellum(&["info", "--output", "json", &path]).json();
    assert_eq!(info["dirty-flag"], true);
    let answer = vellum(&["recover", "--output", "json", &path]).json();
    assert_eq!(answer["was-dirty"], true, "{answer}");
    checked(&path, 0);
    assert_eq!(vellum(&["info", "--output", "json", &path]).json()["dirty-flag"], false);
    assert!(vellum(&["recover", &path]).answer().contains("nothing to do"));
    assert!(vellum(&["recover", "-f", "raw", &dir.text("raw")]).answer().contains("nothing to do"));
    // An image that is known to be corrupt is read, and not written.
    poke(&path, 79, &[2]);
    vellum(&["info", &path]).answer();
    assert_eq!(vellum(&["compare", "-F", "raw", &path, &dir.text("raw")]).code, 0);
    let socket = format!("unix:{}", dir.text("s"));
    refused(1, &["image.qcow2", "corrupt"], &["serve", &path, "--nbd", &socket]);
}

#[test]
fn compare_tells_by_its_exit_code() {
    let dir = Dir::new("compare");
    let (one, two, longer) = (dir.text("one"), dir.text("two"), dir.text("longer"));
    let mut bytes = noise(2 * MIB, 51);
    std::fs::write(&one, &bytes).expect("a disk");
    std::fs::write(&longer, [&bytes[..], &vec![0; MIB]].concat()).expect("a disk");
    bytes[MIB + 5000] ^= 1;
    std::fs::write(&two, &bytes).expect("a disk");
    let cases: [&[&str]; 6] = [
        &[&one, &one],
        &[&one, &two],
        &[&one, &longer],
        &["-s", &one, &longer],
        &["-q", &one, &two],
        &[&two, &dir.text("none")],
    ];
    for (case, code) in cases.iter().zip([0, 1, 0, 1, 1, 2]) {
        let arguments = [&["compare", "-f", "raw", "-F", "raw"], *case].concat();
        let mine = vellum(&arguments);
        assert_eq!(mine.code, code, "{case:?}: {mine:?}");
        if has("qemu-img") {
            let yours = run("qemu-img", &arguments);
            assert_eq!(yours.code, code, "{case:?}: {yours:?}");
            // QEMU reports the sector of a mismatch, Vellum the byte.
            let text = |out: &str| out.split(" at offset").next().map(str::to_owned);
            assert_eq!(text(&yours.out), text(&mine.out), "{case:?}");
        }
    }
    let mismatch = vellum(&["compare", "-f", "raw", "-F", "raw", &one, &two]);
    assert_eq!(mismatch.out, format!("Content mismatch at offset {}!\n", MIB + 5000));
}

#[test]
fn broken_files_are_one_clear_line() {
    let dir = Dir::new("broken");
    let (path, ..) = image(&dir);
    let whole = std::fs::read(&path).expect("the image");
    let mut broken: Vec<(&str, Vec<u8>)> = vec![
        ("short header", whole[..50].to_vec()),
        ("no tables", whole[..70_000].to_vec()),
        ("only magic", whole[..4].to_vec()),
    ];
    let pokes: [(&str, usize, &[u8]); 9] = [
        ("version 9", 4, &9u32.to_be_bytes()),
        ("huge clusters", 20, &40u32.to_be_bytes()),
        ("no clusters", 20, &0u32.to_be_bytes()),
        ("huge disk", 24, &u64::MAX.to_be_bytes()),
        ("encrypted", 32, &1u32.to_be_bytes()),
        ("L1 out of order", 40, &12345u64.to_be_bytes()),
        ("L1 too long", 36, &u32::MAX.to_be_bytes()),
        ("unknown feature", 72, &(1u64 << 60).to_be_bytes()),
        ("header length", 100, &u32::MAX.to_be_bytes()),
    ];
    for (name, at, bytes) in pokes {
        let mut image = whole.clone();
        image[at..at + bytes.len()].copy_from_slice(bytes);
        broken.push((name, image));
    }
    let socket = format!("unix:{}", dir.text("s"));
    for (name, bytes) in broken {
        let bad = dir.text("bad.qcow2");
        std::fs::write(&bad, bytes).expect("the file");
        let out = dir.text("out");
        let commands: [&[&str]; 6] = [
            &["info", &bad],
            &["map", &bad],
            &["check", &bad],
            &["convert", "-O", "raw", &bad, &out],
            &["recover", &bad],
            &["serve", &bad, "--nbd", &socket],
        ];
        for command in commands {
            let ran = vellum(command);
            // What needs no key is done without one.
            if name == "encrypted" && ["info", "check", "recover"].contains(&command[0]) {
                let answer = ran.answer();
                assert!(command[0] != "info" || answer.contains("encrypted: yes"), "what it is can be told");
                continue;
            }
            // A guest size may be absurd and still fit what qcow2 can say.
            assert!(!ran.err.contains("panicked"), "{name}: {command:?}: {ran:?}");
            super::is_refusal(&ran, 1, &["bad.qcow2"], command);
        }
        assert!(!dir.join("out").exists(), "{name}");
        refused(2, &["bad.qcow2"], &["compare", &bad, &path]);
    }
    for name in ["none", ""] {
        let what = dir.text(name);
        refused(1, &[what.trim_end_matches('/')], &["info", &what]);
        refused(1, &[what.trim_end_matches('/')], &["check", &what]);
    }
    refused(63, &["raw", "image"], &["check", "-f", "raw", &dir.text("raw")]);
    refused(63, &[&dir.text("raw")], &["check", "-f", "raw", "--output", "json", &dir.text("raw")]);
}

/// A revert that a power cut interrupted after its commit point: the mark is in the list of snapshots, and nothing else has changed.
#[test]
fn an_interrupted_revert_is_finished() {
    const SUPERBLOCK_PLACE_OF_LIST: u64 = 144;
    const LIST: u64 = 512 << 10;
    for repair in [&["recover"][..], &["check", "-r", "all"], &["check", "-r", "leaks"]] {
        let dir = Dir::new("interrupted-revert");
        let (raw, path, back) = (dir.text("raw"), dir.text("image.vlm"), dir.text("back.raw"));
        let old = noise(MIB, 50);
        std::fs::write(&raw, &old).expect("a disk");
        vellum(&["convert", "-f", "raw", "-O", "vellum", "-o", "layout=table", &raw, &path]).answer();
        vellum(&["snapshot", "create", &path, "one"]).answer();
        std::fs::write(&raw, noise(MIB, 51)).expect("a disk");
        vellum(&["convert", "-n", "-f", "raw", "-O", "vellum", &raw, &path]).answer();
        let file = std::fs::File::open(&path).expect("the image");
        let mut place = [0; 8];
        file.read_exact_at(&mut place, SUPERBLOCK_PLACE_OF_LIST).expect("eight bytes");
        poke(&path, u64::from_be_bytes(place) + LIST - 128 + 12, &1_u32.to_be_bytes());
        refused(1, &["revert", "vellum recover"], &["convert", &path, &back]);
        let checked = vellum(&["check", &path]);
        assert!(checked.code == 2 && checked.err.contains("vellum recover"), "{checked:?}");
        let said = vellum(&[repair, &[&path]].concat());
        assert!(
            said.code == 0 && format!("{}{}", said.out, said.err).contains("a revert to a snapshot"),
            "{said:?}"
        );
        vellum(&["check", &path]).answer();
        vellum(&["convert", &path, &back]).answer();
        assert!(std::fs::read(&back).expect("there") == old, "{repair:?}");
        let sound = std::fs::read(&path).expect("the image");
        assert!(vellum(&["recover", &path]).answer().contains("nothing to do"));
        assert!(std::fs::read(&path).expect("the image") == sound, "what needs nothing is only read");
    }
}
