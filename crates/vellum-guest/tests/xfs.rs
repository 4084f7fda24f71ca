//! Files of real file systems of XFS, against what `xfs_db` says of them.
//!
//! Some are made by `mkfs.xfs` from a list of files, which needs no rights. Where this machine mounts one, others get what
//! a list cannot say: holes, space that was never written, extents enough for a tree, shared extents, directories of all
//! forms. A machine without these programs says so and passes.

mod tools;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use futures_lite::future::block_on;
use vellum_core::{Buffer, Disk as _, GuestOffset, MemoryDisk, Random, WriteFlags};
use vellum_guest::{FileFacts, Volume, VolumeKind, find_files, has_path, look};

use crate::tools::{
    Dir, KINDS, SECTOR, asked, files_below, fill, found, good, has_programs, make, mount, same, sectors_of,
    text,
};

/// A list of files for `mkfs.xfs`, and the names of its files.
fn listed(dir: &Path) -> (PathBuf, Vec<String>) {
    let (list, mut names) = (dir.join("list"), Vec::new());
    let mut lines = "-\n0 0\nd--755 0 0\nshare d--755 0 0\n".to_owned();
    for index in 0..90_usize {
        let data = dir.join(format!("data{index}"));
        fs::write(&data, vec![7; index * index * 37]).expect("it has space");
        writeln!(lines, "a-file-with-a-name-{index} ---644 0 0 {}", text(&data)).expect("memory");
        names.push(format!("path /share/a-file-with-a-name-{index}"));
    }
    let data = dir.join("large");
    fs::write(&data, vec![9; 5 << 20]).expect("it has space");
    writeln!(lines, "few d--755 0 0\nlarge ---644 0 0 {}\n$", text(&data)).expect("memory");
    names.push("path /share/few/large".to_owned());
    lines += "$\nlink l--777 0 0 share/few\n$\n";
    fs::write(&list, lines).expect("it has space");
    (list, names)
}

#[test]
fn what_mkfs_puts_there_is_found_where_xfs_db_says() {
    if !has_programs() {
        return;
    }
    let dir = Dir::new("xfs-list");
    let (list, names) = listed(&dir.0);
    let image = dir.image();
    let more: [&[&str]; 2] = [&["-b", "size=65536"], &["-b", "size=16384", "-n", "size=65536"]];
    for kind in KINDS.into_iter().chain(more) {
        if !make(&image, 160, &[kind, &["-p", text(&list)]].concat()) {
            continue;
        }
        let what = format!("{kind:?}");
        let share = found(&image, &["/share"]).expect(&what);
        assert_eq!(share.files, 91, "{what}");
        same(&what, &asked(&image, &names), &sectors_of(&share));
        let few = found(&image, &["/link/large"]).expect(&what);
        same(&what, &asked(&image, &names[90..]), &sectors_of(&few));
    }
}

#[test]
fn what_a_kernel_has_written_is_found_where_xfs_db_says() {
    if !has_programs() {
        return;
    }
    let dir = Dir::new("xfs-mount");
    let image = dir.image();
    for kind in KINDS {
        if !make(&image, 240, kind) {
            continue;
        }
        if !mount(&dir) {
            continue;
        }
        fill(&dir.mount());
        let (mut share, mut some) = (Vec::new(), Vec::new());
        files_below(&dir.mount().join("share"), &mut share);
        files_below(&dir.mount().join("share/some"), &mut some);
        let what = format!("{kind:?}");
        good("umount", &[text(&dir.mount())], "");
        let got = found(&image, &["/share"]).expect(&what);
        let mut unique = share.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(got.files, unique.len() as u64, "{what}");
        let wanted = asked(&image, &unique);
        assert!(wanted.len() > 40_000, "{what}: there is something to find: {}", wanted.len());
        same(&what, &wanted, &sectors_of(&got));
        same(&what, &asked(&image, &some), &sectors_of(&found(&image, &["/long link"]).expect(&what)));
        assert_eq!(found(&image, &["/link/"]).expect(&what).files, 2, "{what}");
        let missing = found(&image, &["/share/none"]).expect_err("it is not there");
        assert_eq!(missing.kind(), vellum_core::ErrorKind::NotFound);
    }
}

#[test]
fn times_of_files_are_those_of_the_guest() {
    if !has_programs() {
        return;
    }
    let dir = Dir::new("xfs-times");
    for (kind, modified) in [(&["-m", "bigtime=0"][..], 1_000), (&["-m", "bigtime=1"], 4_300_000_000_i64)] {
        if !make(&dir.image(), 40, kind) {
            continue;
        }
        if !mount(&dir) {
            continue;
        }
        let file = dir.mount().join("file");
        fs::write(&file, [7; 9000]).expect("it has space");
        for (which, seconds) in [("-m", modified), ("-a", modified + 77)] {
            good("touch", &[which, "-d", &format!("@{seconds}"), text(&file)], "");
        }
        good("umount", &[text(&dir.mount())], "");
        let disk = MemoryDisk::holding(&fs::read(dir.image()).expect("an image"));
        let mut seen = Vec::new();
        block_on(async {
            let volume = look(&*disk).await.expect("a volume")[0];
            let mut wanted = |facts: &FileFacts| {
                seen.push(*facts);
                true
            };
            find_files(&*disk, &volume, &["/file".to_owned()], &mut wanted).await.expect("it is there");
            assert!(has_path(&*disk, &volume, "/file").await.expect("it is read"));
            assert!(!has_path(&*disk, &volume, "/none").await.expect("it is read"));
        });
        assert_eq!(seen, [FileFacts { bytes: 9000, modified, accessed: modified + 77 }], "{kind:?}");
    }
}

#[test]
fn damage_is_an_error_or_another_answer_and_ends() {
    if !has_programs() {
        return;
    }
    let dir = Dir::new("xfs-damage");
    let (list, _) = listed(&dir.0);
    let (mut tried, mut failed) = (0, 0);
    for kind in [&["-m", "crc=0", "-b", "size=1024"][..], &["-n", "size=8192"], &["-m", "rmapbt=1"]] {
        if !make(&dir.image(), 64, &[kind, &["-p", text(&list)]].concat()) {
            continue;
        }
        // What the file system has is in its first groups; the rest is a hole.
        let whole = fs::read(dir.image()).expect("an image");
        let used: Vec<usize> = (0..whole.len() / 512)
            .filter(|sector| whole[sector * 512..][..512].iter().any(|byte| *byte != 0))
            .filter(|sector| !matches!(whole[sector * 512], 7 | 9))
            .collect();
        let size = whole.len() as u64;
        let disk = MemoryDisk::holding(&whole);
        let put = |sector: usize, bytes: &[u8]| {
            let at = GuestOffset::new(sector as u64 * SECTOR);
            block_on(disk.write(at, Buffer::copy_of(bytes), WriteFlags::default())).expect("memory");
        };
        let volume = Volume { partition: None, span: GuestOffset::ZERO.span(size), kind: VolumeKind::Xfs };
        let mut random = Random::from_seed(11);
        for _ in 0..500 {
            let mut damaged = BTreeMap::new();
            for _ in 0..1 + random.below(6) {
                // The superblock, the first inodes and directories more often than others.
                let sector = match random.below(3) {
                    0 => used[0],
                    1 => used[random.index(used.len().min(200))],
                    _ => *random.pick(&used),
                };
                let bytes = damaged.entry(sector).or_insert_with(|| whole[sector * 512..][..512].to_vec());
                let at = random.index(if sector == 0 { 256 } else { 512 });
                bytes[at] = match random.below(3) {
                    0 => 0xff,
                    1 => bytes[at] ^ 1 << random.below(8),
                    _ => u8::try_from(random.below(256)).expect("a byte"),
                };
            }
            damaged.iter().for_each(|(sector, bytes)| put(*sector, bytes));
            tried += 1;
            match block_on(find_files(&*disk, &volume, &["/".to_owned()], &mut |_| true)) {
                Ok(found) => assert!(found.spans.iter().all(|span| span.end().bytes() <= size)),
                Err(_) => failed += 1,
            }
            damaged.keys().for_each(|sector| put(*sector, &whole[sector * 512..][..512]));
        }
    }
    assert!(tried == 0 || failed > 100 && tried - failed > 100, "some damage is seen: {failed} of {tried}");
}
