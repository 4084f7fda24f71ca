//! Real file systems of XFS, and what `xfs_db` says of them.

#![allow(dead_code, reason = "each file of tests uses some of it")]

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use futures_lite::future::block_on;
use vellum_core::{Error, MemoryDisk};
use vellum_guest::{Found, VolumeKind, find_files, look};

pub(crate) const SECTOR: u64 = 512;

/// A directory that is gone at the end, and what may be mounted there.
pub(crate) struct Dir(pub(crate) PathBuf);

impl Dir {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("vellum-guest-{name}-{}", std::process::id()));
        drop(fs::remove_dir_all(&path));
        fs::create_dir_all(path.join("mount")).expect("a temporary directory");
        Self(path)
    }

    pub(crate) fn mount(&self) -> PathBuf {
        self.0.join("mount")
    }

    pub(crate) fn image(&self) -> PathBuf {
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
pub(crate) fn skipped(what: &str) {
    eprintln!("skipped: {what}");
}

pub(crate) fn has_programs() -> bool {
    let missing = ["mkfs.xfs", "xfs_db"].into_iter().find(|program| {
        Command::new(program).arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err()
    });
    if let Some(missing) = missing {
        skipped(&format!("{missing} is not installed"));
    }
    missing.is_none()
}

pub(crate) fn run(program: &str, args: &[&str], input: &str) -> Output {
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

pub(crate) fn good(program: &str, args: &[&str], input: &str) -> String {
    let output = run(program, args, input);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {text} {errors}");
    text
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// Makes a file system; whether this `mkfs.xfs` can.
pub(crate) fn make(image: &Path, mib: u64, options: &[&str]) -> bool {
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
pub(crate) fn mount(dir: &Dir) -> bool {
    let mounted = run("mount", &["-o", "loop,nouuid", text(&dir.image()), text(&dir.mount())], "");
    if !mounted.status.success() {
        let why = String::from_utf8_lossy(&mounted.stderr);
        skipped(&format!("a file system of XFS cannot be mounted: {}", why.trim()));
    }
    mounted.status.success()
}

pub(crate) fn number<'a>(words: &mut impl Iterator<Item = &'a str>, after: &str) -> Option<u64> {
    words.find(|word| *word == after)?;
    words.next()?.parse().ok()
}

/// The sectors with bytes of these files, which are named as `xfs_db` takes them.
pub(crate) fn asked(image: &Path, files: &[String]) -> BTreeSet<u64> {
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

pub(crate) fn found(image: &Path, paths: &[&str]) -> Result<Found, Error> {
    let disk = MemoryDisk::holding(&fs::read(image).expect("an image"));
    block_on(async {
        let volumes = look(&*disk).await.expect("its volumes");
        assert_eq!((volumes.len(), volumes[0].kind), (1, VolumeKind::Xfs), "{volumes:?}");
        let paths: Vec<String> = paths.iter().map(|path| (*path).to_owned()).collect();
        find_files(&*disk, &volumes[0], &paths, &mut |_| true).await
    })
}

pub(crate) fn sectors_of(found: &Found) -> BTreeSet<u64> {
    let sectors =
        |span: &vellum_core::GuestSpan| span.start().bytes() / SECTOR..span.end().bytes().div_ceil(SECTOR);
    found.spans.iter().flat_map(sectors).collect()
}

pub(crate) fn same(what: &str, wanted: &BTreeSet<u64>, got: &BTreeSet<u64>) {
    let differ = (wanted.difference(got).count(), got.difference(wanted).count());
    assert_eq!(differ, (0, 0), "{what}: sectors that are missing, and too many, of {}", wanted.len());
}

pub(crate) const KINDS: [&[&str]; 11] = [
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

/// What a list for `mkfs.xfs` cannot say.
pub(crate) fn fill(root: &Path) {
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

pub(crate) fn files_below(at: &Path, found: &mut Vec<String>) {
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
