//! Files of real file systems of XFS whose log has to be replayed, against a kernel that has replayed it.
//!
//! ```text
//!   mount ─► changes of files ─► shutdown, as at a power cut ─┬─► copy: what is found here
//!            ▲─────────────── again, with the next changes ◄──┴─► mount: the kernel replays; umount; what `xfs_db` says
//! ```
//!
//! The images in `golden/` were made so, and are there for machines that do not mount XFS. Beside each is what `xfs_db` said
//! after the kernel's replay. With `VELLUM_GOLDEN=write` in the environment a missing one is made; an existing one is never
//! made again.

mod tools;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use futures_lite::future::block_on;
use vellum_core::{Buffer, Disk as _, GuestOffset, MemoryDisk, Random, WriteFlags};
use vellum_guest::{Volume, VolumeKind, find_files, look};

use crate::tools::{
    Dir, KINDS, SECTOR, asked, files_below, fill, found, good, has_programs, make, mount, same, sectors_of,
    skipped, text,
};

/// The log of a new file system is short: it goes round often.
const MIB: u64 = 200;

fn scale() -> u64 {
    std::env::var("VELLUM_TEST_SCALE").ok().and_then(|scale| scale.parse().ok()).unwrap_or(1)
}

/// Ends the file system as a power cut does. With `is_logged`, what is only in memory goes to the log before.
fn cut(dir: &Dir, is_logged: bool) {
    let how = if is_logged { "shutdown -f" } else { "shutdown" };
    good("xfs_io", &["-x", "-c", how, text(&dir.mount())], "");
    good("umount", &[text(&dir.mount())], "");
}

/// Lets a kernel replay the log of the image, and leaves it mounted. The files below `/share` are named by their inodes.
fn replayed(dir: &Dir) -> Option<Vec<String>> {
    if !mount(dir) {
        return None;
    }
    let mut files = Vec::new();
    files_below(&dir.mount().join("share"), &mut files);
    good("umount", &[text(&dir.mount())], "");
    files.sort();
    files.dedup();
    Some(files)
}

/// Compares what is found in an image as it is with what is there when the kernel has replayed its log. How many sectors.
fn judge(what: &str, dir: &Dir) -> Option<usize> {
    let dirty = dir.0.join("dirty");
    fs::copy(dir.image(), &dirty).expect("a copy");
    let got = found(&dirty, &["/share"]);
    let files = replayed(dir)?;
    let got = got.unwrap_or_else(|error| panic!("{what}: {}", error.chain()));
    assert_eq!(got.files, files.len() as u64, "{what}");
    let wanted = asked(&dir.image(), &files);
    same(what, &wanted, &sectors_of(&got));
    fs::remove_file(&dirty).expect("it is there");
    Some(wanted.len())
}

/// Changes some files at random. What does not work, such as for want of space, is left.
fn change(root: &Path, random: &mut Random, steps: u64) {
    let share = root.join("share");
    let name = |random: &mut Random| {
        let directory = share.join(format!("d{}", random.below(6)));
        (
            directory.clone(),
            directory.join(format!("file {} {}", "x".repeat(random.index(120)), random.below(40))),
        )
    };
    for _ in 0..steps {
        let (directory, path) = name(random);
        drop(fs::create_dir_all(&directory));
        let file = || fs::OpenOptions::new().write(true).create(true).truncate(false).open(&path);
        let done = match random.below(14) {
            0..4 => file().and_then(|file| {
                let at = random.below(3 << 20);
                file.write_all_at(&vec![0x5a; 1 + random.index(60_000)], at)
            }),
            4 => file().and_then(|file| {
                // Enough holes for a tree.
                (0..1 + random.below(300)).try_for_each(|hole| file.write_all_at(&[0x5a; 700], hole * 9000))
            }),
            5 => file().and_then(|file| file.set_len(random.below(1 << 20))),
            6 => fs::remove_file(&path),
            7 => fs::rename(&path, name(random).1),
            8 => fs::hard_link(&path, name(random).1),
            9 => (0..40).try_for_each(|index| {
                fs::write(directory.join(format!("small {index}")), vec![1; index * 37])
            }),
            10 => (0..40).try_for_each(|index| fs::remove_file(directory.join(format!("small {index}")))),
            11 => fs::remove_dir_all(&directory),
            12 => {
                let from = name(random).1;
                let copy = ["--reflink=always", text(&from), text(&path)];
                drop(Command::new("cp").args(copy).output());
                Ok(())
            }
            _ => {
                let punch = ["-p", "-o", &random.below(1 << 20).to_string(), "-l", "70000", text(&path)]
                    .map(str::to_owned);
                drop(Command::new("fallocate").args(punch).output());
                file().and_then(|file| file.sync_all())
            }
        };
        drop(done);
    }
}

#[test]
fn what_a_power_cut_leaves_is_found_where_a_kernel_finds_it() {
    if !has_programs() {
        return;
    }
    let dir = Dir::new("xfs-cut");
    let mut random = Random::from_seed(31);
    for kind in KINDS {
        let what = format!("{kind:?}");
        if !make(&dir.image(), MIB, kind) || !mount(&dir) {
            continue;
        }
        if kind == KINDS[0] || kind == KINDS[2] {
            fill(&dir.mount());
        }
        fs::create_dir_all(dir.mount().join("share/kept")).expect("a directory");
        fs::write(dir.mount().join("share/kept/file"), vec![7; 9 << 20]).expect("it has space");
        good("sync", &[], "");
        for round in 0..2 * scale() {
            let (steps, is_logged) = (random.below(200), random.below(2) == 0);
            change(&dir.mount(), &mut random, steps);
            cut(&dir, is_logged);
            let sectors = judge(&format!("{what}, round {round}"), &dir).expect("it was mounted before");
            assert!(sectors > 10_000, "{what}: there is something to find: {sectors}");
            assert!(mount(&dir), "{what}");
        }
        good("umount", &[text(&dir.mount())], "");
    }
}

#[test]
fn a_file_system_at_work_is_found_as_its_log_has_it() {
    if !has_programs() {
        return;
    }
    let dir = Dir::new("xfs-work");
    let mut random = Random::from_seed(32);
    if !make(&dir.image(), MIB, &[]) || !mount(&dir) {
        return;
    }
    change(&dir.mount(), &mut random, 300);
    good("sync", &[], "");
    let copy = Dir::new("xfs-work-copy");
    fs::copy(dir.image(), copy.image()).expect("a copy");
    good("umount", &[text(&dir.mount())], "");
    judge("at work", &copy).expect("it was mounted before");
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// The golden images: path, the sectors of all its files.
fn wanted(name: &str) -> BTreeMap<String, (u64, BTreeSet<u64>)> {
    let text = fs::read_to_string(golden().join(format!("{name}.files"))).expect("what is in a golden image");
    let mut paths: BTreeMap<String, (u64, BTreeSet<u64>)> = BTreeMap::new();
    for line in text.lines() {
        let mut words = line.split(' ');
        let mut number = || words.next().and_then(|word| word.parse::<u64>().ok()).expect("a number");
        let (files, first, count) = (number(), number(), number());
        let (its, sectors) = paths.entry(words.next().expect("a path").to_owned()).or_default();
        *its = files;
        sectors.extend(first..first + count);
    }
    paths
}

fn unpacked(name: &str) -> Vec<u8> {
    let packed = fs::read(golden().join(format!("{name}.img.zst"))).expect("a golden image");
    zstd::decode_all(&packed[..]).expect("it is zstd")
}

/// The names of the golden images.
fn goldens() -> Vec<String> {
    let files = fs::read_dir(golden()).expect("the golden images");
    let name = |file: fs::DirEntry| Some(file.file_name().to_str()?.strip_suffix(".files")?.to_owned());
    let mut names: Vec<String> = files.flatten().filter_map(name).collect();
    names.sort();
    assert!(!names.is_empty(), "there are some");
    names
}

#[test]
fn golden_images_are_read_as_the_kernel_has_replayed_them() {
    if std::env::var("VELLUM_GOLDEN").is_ok_and(|value| value == "write")
        && !golden().join("xfs-v5.files").exists()
    {
        make_golden();
    }
    for name in goldens() {
        let disk = MemoryDisk::holding(&unpacked(&name));
        block_on(async {
            let volume = look(&*disk).await.expect("its volumes")[0];
            assert_eq!(volume.kind, VolumeKind::Xfs);
            for (path, (files, sectors)) in wanted(&name) {
                let got = find_files(&*disk, &volume, std::slice::from_ref(&path), &mut |_| true).await;
                let got = got.unwrap_or_else(|error| panic!("{name}, {path}: {}", error.chain()));
                assert_eq!(got.files, files, "{name}, {path}");
                same(&format!("{name}, {path}"), &sectors, &sectors_of(&got));
            }
        });
    }
}

#[test]
fn a_log_that_is_damaged_is_an_error_or_another_answer_and_ends() {
    for name in goldens() {
        let whole = unpacked(&name);
        let size = whole.len() as u64;
        let disk = MemoryDisk::holding(&whole);
        let block = u64::from(u32::from_be_bytes(whole[4..8].try_into().expect("4 bytes")));
        let log = u64::from_be_bytes(whole[48..56].try_into().expect("8 bytes"));
        let group_blocks = u64::from(u32::from_be_bytes(whole[84..88].try_into().expect("4 bytes")));
        let first = ((log >> whole[124]) * group_blocks + (log & ((1 << whole[124]) - 1))) * block;
        let len = u64::from(u32::from_be_bytes(whole[96..100].try_into().expect("4 bytes"))) * block;
        let used: Vec<u64> = (first / SECTOR..(first + len) / SECTOR)
            .filter(|sector| {
                whole[usize::try_from(sector * SECTOR).expect("small") + 8..][..504]
                    .iter()
                    .any(|byte| *byte != 0)
            })
            .collect();
        let put = |sector: u64, bytes: &[u8]| {
            let at = GuestOffset::new(sector * SECTOR);
            block_on(disk.write(at, Buffer::copy_of(bytes), WriteFlags::default())).expect("memory");
        };
        let volume = Volume { partition: None, span: GuestOffset::ZERO.span(size), kind: VolumeKind::Xfs };
        let mut random = Random::from_seed(12);
        let (mut failed, tried) = (0, 200 * scale());
        for _ in 0..tried {
            let mut damaged = BTreeMap::new();
            for _ in 0..1 + random.below(3) {
                let sector = *random.pick(&used);
                let from = usize::try_from(sector * SECTOR).expect("small");
                let bytes = damaged.entry(sector).or_insert_with(|| whole[from..from + 512].to_vec());
                match random.below(4) {
                    // A block that was not written, or is of another time.
                    0 => bytes.fill(0),
                    1 => bytes[3] = bytes[3].wrapping_sub(1),
                    _ => bytes[random.index(512)] ^= 1 << random.below(8),
                }
            }
            damaged.iter().for_each(|(sector, bytes)| put(*sector, bytes));
            match block_on(find_files(&*disk, &volume, &["/".to_owned()], &mut |_| true)) {
                Ok(found) => assert!(found.spans.iter().all(|span| span.end().bytes() <= size)),
                Err(_) => failed += 1,
            }
            for sector in damaged.keys() {
                let from = usize::try_from(sector * SECTOR).expect("small");
                put(*sector, &whole[from..from + 512]);
            }
        }
        assert!(failed > tried / 10, "{name}: some damage is seen: {failed} of {tried}");
    }
}

/// Writes the golden image of version 5.
fn make_golden() {
    let dir = Dir::new("xfs-golden");
    let kind = ["-b", "size=1024", "-i", "size=512", "-m", "rmapbt=1,reflink=1,bigtime=1", "-l", "size=6m"];
    assert!(make(&dir.image(), 40, &kind) && mount(&dir));
    let mut random = Random::from_seed(5);
    change(&dir.mount(), &mut random, 120);
    good("umount", &[text(&dir.mount())], "");
    assert!(mount(&dir));
    change(&dir.mount(), &mut random, 90);
    good("sync", &[], "");
    change(&dir.mount(), &mut random, 60);
    cut(&dir, true);
    pack("xfs-v5", &dir);
}

/// Packs an image whose log is to be replayed, and what a kernel makes of it.
fn pack(name: &str, dir: &Dir) {
    fs::create_dir_all(golden()).expect("a directory");
    let mut whole = fs::read(dir.image()).expect("an image");
    assert!(mount(dir));
    let mut paths = BTreeMap::new();
    for path in ["share", "share/d0", "share/d1", "share/d2", "share/d3", "share/d4", "share/d5"] {
        let mut files = Vec::new();
        if dir.mount().join(path).is_dir() {
            files_below(&dir.mount().join(path), &mut files);
            files.sort();
            files.dedup();
            paths.insert(format!("/{path}"), files);
        }
    }
    good("umount", &[text(&dir.mount())], "");
    let mut lines = String::new();
    let mut data = BTreeSet::new();
    for (path, files) in paths {
        let sectors: Vec<u64> = asked(&dir.image(), &files).into_iter().collect();
        data.extend(sectors.iter().copied());
        if sectors.is_empty() {
            skipped(&format!("{path} has no data"));
        }
        let mut rest = &sectors[..];
        while let Some(first) = rest.first() {
            let run = rest.iter().zip(*first..).take_while(|(sector, wanted)| *sector == wanted).count();
            writeln!(lines, "{} {first} {run} {path}", files.len()).expect("memory");
            rest = &rest[run..];
        }
    }
    // The bytes of the files are not looked at.
    for sector in data {
        let from = usize::try_from(sector * SECTOR).expect("small");
        whole[from..from + 512].fill(0);
    }
    fs::write(golden().join(format!("{name}.files")), lines).expect("it has space");
    let packed = zstd::encode_all(&whole[..], 19).expect("memory");
    fs::write(golden().join(format!("{name}.img.zst")), packed).expect("it has space");
}
