//! Files of real file systems of XFS, against what `xfs_db` says of them.
//!
//! Some are made by `mkfs.xfs` from a list of files, which needs no rights. Where this machine mounts one, others get what
//! a list cannot say: holes, space that was never written, extents enough for a tree, shared extents, directories of all
//! forms. A machine without these programs says so and passes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use futures_lite::future::block_on;
use vellum_core::{Buffer, Disk as _, Error, GuestOffset, MemoryDisk, Random, WriteFlags};
use vellum_guest::{FileFacts, Found, Volume, VolumeKind, find_files, has_path, look};

const SECTOR: u64 = 512;

/// A directory that is gone at the end, and what may be mounted there.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("vellum-guest-{name}-{}", std::process::id()));
        drop(fs::remove_dir_all(&path));
        fs::create_dir_all(path.join("mount")).expect("a temporary directory");
        Self(path)
    }

    fn mount(&self) -> PathBuf {
        self.0.join("mount")
    }

    fn image(&self) -> PathBuf {
        self.0.join("image")
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        drop(Command::new("umount").arg(self.mount()).stderr(Stdio::null()).status());
        drop(fs::remove_dir_all(&self.0));
    }
}

#[allow(clippy::print_stderr, reason = "a test that is skipped says why")]
fn skipped(what: &str) {
    eprintln!("skipped: {what}");
}

fn has_programs() -> bool {
    let missing = ["mkfs.xfs", "xfs_db"].into_iter().find(|program| {
        Command::new(program).arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err()
    });
    if let Some(missing) = missing {
        skipped(&format!("{missing} is not installed"));
    }
    missing.is_none()
}

fn run(program: &str, args: &[&str], input: &str) -> Output {
    let mut child = Command::new(program)
        .args(args)
        // With these `mkfs.xfs` makes file systems of less than 300 MiB.
        .envs(["TEST_DIR", "TEST_DEV", "QA_CHECK_FS"].map(|name| (name, "1")))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it is there");
    let mut stdin = child.stdin.take().expect("piped");
    let input = input.to_owned();
    let writer = std::thread::spawn(move || drop(stdin.write_all(input.as_bytes())));
    let output = child.wait_with_output().expect("it ends");
    writer.join().expect("it was written");
    output
}

fn good(program: &str, args: &[&str], input: &str) -> String {
    let output = run(program, args, input);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {text} {errors}");
    text
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// Makes a file system; whether this `mkfs.xfs` can.
fn make(image: &Path, mib: u64, options: &[&str]) -> bool {
    drop(fs::remove_file(image));
    fs::File::create(image).expect("an image").set_len(mib << 20).expect("it has space");
    let mut args = vec!["-q", "-f"];
    args.extend(options);
    args.push(text(image));
    let made = run("mkfs.xfs", &args, "");
    if !made.status.success() {
        let why = String::from_utf8_lossy(&made.stderr);
        skipped(&format!("mkfs.xfs {options:?}: {}", why.lines().next().unwrap_or_default()));
    }
    made.status.success()
}

/// Whether it is mounted now.
fn mount(dir: &Dir) -> bool {
    let mounted = run("mount", &["-o", "loop,nouuid", text(&dir.image()), text(&dir.mount())], "");
    if !mounted.status.success() {
        let why = String::from_utf8_lossy(&mounted.stderr);
        skipped(&format!("a file system of XFS cannot be mounted: {}", why.trim()));
    }
    mounted.status.success()
}

fn number<'a>(words: &mut impl Iterator<Item = &'a str>, after: &str) -> Option<u64> {
    words.find(|word| *word == after)?;
    words.next()?.parse().ok()
}

/// The sectors with bytes of these files, which are named as `xfs_db` takes them.
fn asked(image: &Path, files: &[String]) -> BTreeSet<u64> {
    let mut commands = "sb 0\nprint blocksize agblocks\n".to_owned();
    for file in files {
        writeln!(commands, "{file}\nbmap\nprint core.size").expect("memory");
    }
    let answer = good("xfs_db", &["-r", text(image)], &commands);
    let mut facts = [0, 0];
    let mut extents: Vec<[u64; 4]> = Vec::new();
    let (mut sectors, mut sizes) = (BTreeSet::new(), 0);
    for line in answer.lines() {
        let value = || line.rsplit(' ').next().and_then(|value| value.parse::<u64>().ok()).expect(line);
        if line.starts_with("blocksize") {
            facts[0] = value();
        } else if line.starts_with("agblocks") {
            facts[1] = value();
        } else if line.starts_with("data offset") {
            let mut words = line.split(' ');
            let offset = number(&mut words, "offset").expect(line);
            words.next();
            words.next();
            let place = words.next().expect(line).trim_matches(['(', ')']);
            let (group, block) = place.split_once('/').expect(line);
            let [group, block]: [u64; 2] = [group, block].map(|part| part.parse().expect("a number"));
            let count = number(&mut words, "count").expect(line);
            let flag = number(&mut words, "flag").expect(line);
            extents.push([offset, group * facts[1] + block, count, flag]);
        } else if line.starts_with("core.size") {
            sizes += 1;
            let size = value();
            for [offset, block, count, flag] in std::mem::take(&mut extents) {
                let len = (count * facts[0]).min(size.saturating_sub(offset * facts[0]));
                let first = block * facts[0] / SECTOR;
                if flag == 0 {
                    sectors.extend(first..first + len.div_ceil(SECTOR));
                }
            }
        }
    }
    assert_eq!(sizes, files.len(), "an answer for each file");
    sectors
}

fn found(image: &Path, paths: &[&str]) -> Result<Found, Error> {
    let disk = MemoryDisk::holding(&fs::read(image).expect("an image"));
    block_on(async {
        let volumes = look(&*disk).await.expect("its volumes");
        assert_eq!((volumes.len(), volumes[0].kind), (1, VolumeKind::Xfs), "{volumes:?}");
        let paths: Vec<String> = paths.iter().map(|path| (*path).to_owned()).collect();
        find_files(&*disk, &volumes[0], &paths, &mut |_| true).await
    })
}

fn sectors_of(found: &Found) -> BTreeSet<u64> {
    let sectors =
        |span: &vellum_core::GuestSpan| span.start().bytes() / SECTOR..span.end().bytes().div_ceil(SECTOR);
    found.spans.iter().flat_map(sectors).collect()
}

fn same(what: &str, wanted: &BTreeSet<u64>, got: &BTreeSet<u64>) {
    let differ = (wanted.difference(got).count(), got.difference(wanted).count());
    assert_eq!(differ, (0, 0), "{what}: sectors that are missing, and too many, of {}", wanted.len());
}

const KINDS: [&[&str]; 11] = [
    &[],
    &["-m", "crc=0"],
    &["-b", "size=1024"],
    &["-b", "size=1024", "-m", "crc=0", "-n", "ftype=0"],
    &["-b", "size=512", "-m", "crc=0", "-i", "size=256"],
    &["-n", "size=16384", "-d", "agcount=7"],
    &["-b", "size=1024", "-n", "size=8192", "-i", "size=512"],
    &["-i", "size=2048"],
    &["-i", "nrext64=1,size=1024", "-m", "bigtime=1,rmapbt=1,reflink=1"],
    &["-i", "sparse=0", "-m", "bigtime=0,reflink=0"],
    &["-d", "su=65536,sw=2", "-l", "su=65536"],
];

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

/// What a list for `mkfs.xfs` cannot say.
fn fill(root: &Path) {
    let share = root.join("share");
    fs::create_dir_all(share.join("short")).expect("a directory");
    let write = |path: &Path, parts: &[(u64, usize)]| {
        let file = fs::File::create(path).expect("a file");
        for (at, len) in parts {
            file.write_all_at(&vec![0xa5; *len], *at).expect("it has space");
        }
        file
    };
    // Directories of one block, of some, and with an index of more than one block.
    for (name, files) in [("short", 3_usize), ("one", 25), ("some", 400), ("many", 6000)] {
        let at = share.join(name);
        fs::create_dir_all(&at).expect("a directory");
        for index in 0..files {
            let name = format!("a file with a rather long name and the number {index}");
            write(&at.join(name), &[(0, index % 9000)]);
        }
        // Entries that are gone leave room between others.
        for index in (0..files).step_by(7) {
            fs::remove_file(at.join(format!("a file with a rather long name and the number {index}")))
                .expect("it was made");
        }
    }
    // A few holes, and then enough of them that the extents need a tree, with more levels where blocks are small.
    let holes =
        |count: u64| -> Vec<(u64, usize)> { (1..=count).map(|index| (index * 20_000, 3000)).collect() };
    write(&share.join("holes"), &holes(5)).set_len(300_000).expect("a longer file");
    write(&share.join("tree"), &holes(2600));
    write(&share.join("large"), &[(0, 9 << 20), (40 << 20, 9000)]);
    let ahead = write(&share.join("ahead"), &[(0, 5000)]);
    drop(ahead);
    // Space that is there and was never written, inside the file.
    let name = share.join("ahead");
    good("fallocate", &["-l", "3M", text(&name)], "");
    fs::OpenOptions::new()
        .write(true)
        .open(&name)
        .expect("it is there")
        .write_all_at(&[1; 9000], 1 << 20)
        .expect("space");
    // Attributes take room from the extents in the inode.
    drop(
        Command::new("setfattr")
            .args(["-n", "user.note", "-v", &"x".repeat(40), text(&share.join("holes"))])
            .status(),
    );
    symlink("share/short", root.join("link")).expect("a link");
    symlink(format!("/{}share/some", "share/../".repeat(90)), root.join("long link")).expect("a link");
    fs::hard_link(share.join("large"), share.join("large too")).expect("a link");
    let shares = Command::new("cp")
        .args(["--reflink=always", text(&share.join("tree")), text(&share.join("shared"))])
        .output();
    drop(shares);
}

fn files_below(at: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(at).expect("a directory").flatten() {
        match entry.file_type().expect("it is there") {
            kind if kind.is_dir() => files_below(&entry.path(), found),
            kind if kind.is_file() => {
                found.push(format!("inode {}", entry.metadata().expect("it is there").ino()));
            }
            _ => {}
        }
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
        good("sync", &[], "");
        // A guest is at work: what is in the log only is not known.
        let what = format!("{kind:?}");
        let open = found(&image, &["/share"]).expect_err(&what).chain();
        assert!(open.contains("the log"), "{what}: {open}");
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
