//! Files of real file systems, against what `debugfs` says of them.
//!
//! Each is made by `mkfs` from a tree with a part of this machine's `/usr/share`, with files that have holes, and with a
//! directory of many names. A machine without these programs says so and passes.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use futures_lite::future::block_on;
use vellum_core::{GuestOffset, GuestSpan, MemoryDisk};
use vellum_guest::{FileFacts, Found, Volume, VolumeKind, find_files, has_path, look};

const SECTOR: u64 = 512;

/// A directory that is gone at the end.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("vellum-guest-{name}-{}", std::process::id()));
        drop(fs::remove_dir_all(&path));
        fs::create_dir_all(&path).expect("a temporary directory");
        Self(path)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

#[allow(clippy::print_stderr, reason = "a test that is skipped says why")]
fn skipped(what: &str) {
    eprintln!("skipped: {what}");
}

fn has(programs: &[&str]) -> bool {
    let missing = programs.iter().find(|program| {
        Command::new(program).arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err()
    });
    if let Some(missing) = missing {
        skipped(&format!("{missing} is not installed"));
    }
    missing.is_none()
}

/// Runs a program with this input, and returns its output.
fn run(program: &str, args: &[&str], input: &str) -> String {
    let mut child = Command::new(program)
        .args(args)
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
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // `e2fsck` has 1 for what it has changed.
    let is_good = output.status.success() || program == "e2fsck" && output.status.code() == Some(1);
    assert!(is_good, "{program} {args:?}: {text} {}", String::from_utf8_lossy(&output.stderr));
    text
}

/// Copies regular files until there are this many bytes.
fn copy_some(from: &Path, to: &Path, left: &mut u64, depth: u32) {
    let Ok(entries) = fs::read_dir(from) else { return };
    let mut entries: Vec<_> = entries.flatten().collect();
    entries.sort_by_key(fs::DirEntry::file_name);
    fs::create_dir_all(to).expect("a directory");
    for entry in entries.into_iter().take(24) {
        let Ok(kind) = entry.file_type() else { continue };
        let its = to.join(entry.file_name());
        if kind.is_dir() && depth > 0 {
            copy_some(&entry.path(), &its, left, depth - 1);
        } else if kind.is_file()
            && entry.metadata().is_ok_and(|facts| facts.len() < *left / 4)
            && let Ok(bytes) = fs::read(entry.path())
        {
            *left -= bytes.len() as u64;
            fs::write(its, bytes).expect("it has space");
        }
    }
}

/// The tree that the file systems are made of.
fn tree(dir: &Path) -> PathBuf {
    let root = dir.join("tree");
    let share = root.join("usr/share");
    copy_some(Path::new("/usr/share"), &share, &mut (6 << 20), 3);
    fs::create_dir_all(root.join("etc/many")).expect("a directory");
    fs::create_dir_all(share.join("many")).expect("a directory");
    for number in 0..700 {
        let text = vec![7; number % 5000 + 1];
        let name = format!("a file with a rather long name, and the number {number}");
        fs::write(share.join("many").join(name), &text).expect("it has space");
        fs::write(root.join(format!("etc/many/{number}")), &text).expect("it has space");
    }
    // Holes: at the start, between, and at the end.
    let mut holes = fs::File::create(share.join("holes")).expect("it has space");
    let write_at = |file: &mut fs::File, at: u64, len: usize| {
        std::os::unix::fs::FileExt::write_all_at(file, &vec![0xa5; len], at).expect("it has space");
    };
    for at in (1..60).map(|number| number * 70_000) {
        write_at(&mut holes, at, 5000);
    }
    holes.set_len(6 << 20).expect("a longer file");
    // Long enough for three levels of indirect blocks of 1 KiB.
    let mut large = fs::File::create(share.join("large")).expect("it has space");
    write_at(&mut large, 0, 9 << 20);
    write_at(&mut large, 70 << 20, 9000);
    fs::write(share.join("tiny"), b"tiny").expect("it has space");
    fs::hard_link(share.join("large"), share.join("large too")).expect("a link");
    std::os::unix::fs::symlink("../../etc/many", share.join("linked")).expect("a link");
    std::os::unix::fs::symlink("usr/share", root.join("short")).expect("a link");
    let long = format!("/{}usr/share", "usr/../".repeat(20));
    std::os::unix::fs::symlink(long, root.join("long")).expect("a link");
    root
}

fn files_below(at: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(at).expect("a directory").flatten() {
        match entry.file_type().expect("it is there") {
            kind if kind.is_dir() => files_below(&entry.path(), found),
            kind if kind.is_file() => found.push(entry.path()),
            _ => {}
        }
    }
}

/// The sectors with bytes of the files below a directory of the tree, as `debugfs` says.
fn asked(image: &Path, tree: &Path, below: &str, block: u64) -> BTreeSet<u64> {
    let mut files = Vec::new();
    files_below(&tree.join(below), &mut files);
    let (mut commands, mut lens) = (String::new(), Vec::new());
    for file in &files {
        let name = file.strip_prefix(tree).expect("below it").to_str().expect("UTF-8").to_owned();
        let len = fs::metadata(file).expect("it is there").len();
        for number in 0..len.div_ceil(block) {
            commands += &format!("bmap \"/{name}\" {number}\n");
            lens.push((len - number * block).min(block));
        }
    }
    let answer = run("debugfs", &["-f", "-", image.to_str().expect("UTF-8")], &commands);
    let answers: Vec<&str> = answer.lines().filter(|line| !line.starts_with("debugfs")).collect();
    assert_eq!(answers.len(), lens.len(), "an answer for each block: {:?}", answers.first());
    let mut sectors = BTreeSet::new();
    for (answer, len) in answers.iter().zip(lens) {
        let block_at: u64 =
            answer.split_whitespace().next().and_then(|word| word.parse().ok()).expect(answer);
        if block_at != 0 && !answer.contains("uninit") {
            let first = block_at * block / SECTOR;
            sectors.extend(first..first + len.div_ceil(SECTOR));
        }
    }
    sectors
}

fn sectors_of(spans: &[GuestSpan]) -> BTreeSet<u64> {
    let sectors = |span: &GuestSpan| span.start().bytes() / SECTOR..span.end().bytes().div_ceil(SECTOR);
    spans.iter().flat_map(sectors).collect()
}

fn found(image: &[u8], paths: &[&str]) -> Found {
    let disk = MemoryDisk::holding(image);
    block_on(async {
        let volumes = look(&*disk).await.expect("its volumes");
        assert_eq!((volumes.len(), volumes[0].kind), (1, VolumeKind::Ext), "{volumes:?}");
        let paths: Vec<String> = paths.iter().map(|path| (*path).to_owned()).collect();
        find_files(&*disk, &volumes[0], &paths, &mut |_| true).await.expect("they are there")
    })
}

#[test]
fn the_sectors_are_exactly_those_that_debugfs_names() {
    if !has(&["mkfs.ext4", "debugfs", "e2fsck"]) {
        return;
    }
    let dir = Dir::new("kinds");
    let tree = tree(&dir.0);
    let image = dir.0.join("image");
    let name = image.to_str().expect("UTF-8");
    let kinds: [(&str, u64, &[&str]); 9] = [
        ("ext4", 4096, &[]),
        ("ext4", 1024, &[]),
        ("ext4", 4096, &["-O", "^64bit,^metadata_csum,^flex_bg", "-I", "128"]),
        ("ext4", 4096, &["-O", "meta_bg,^resize_inode", "-g", "4096"]),
        ("ext4", 1024, &["-O", "meta_bg,^resize_inode", "-g", "2048"]),
        ("ext4", 4096, &["-O", "sparse_super2,bigalloc", "-C", "16384"]),
        ("ext4", 65536, &[]),
        ("ext3", 4096, &[]),
        ("ext2", 1024, &[]),
    ];
    for (kind, block, more) in kinds {
        drop(fs::remove_file(&image));
        let mut args = vec!["-q", "-F", "-t", kind, "-N", "8192", "-d", tree.to_str().expect("UTF-8")];
        let block_size = block.to_string();
        args.extend(["-b", &block_size]);
        args.extend(more);
        let mkfs = Command::new("mkfs.ext4").args(&args).arg(name).arg("128M").output().expect("it is there");
        if !mkfs.status.success() && block == 65536 {
            skipped("mkfs makes no blocks of 64 KiB here");
            continue;
        }
        assert!(mkfs.status.success(), "{args:?}: {}", String::from_utf8_lossy(&mkfs.stderr));
        // Directories get an index.
        run("e2fsck", &["-f", "-y", "-D", name], "");
        let bytes = fs::read(&image).expect("it was made");
        let wanted = asked(&image, &tree, "usr/share", block);
        let share = found(&bytes, &["/usr/share"]);
        let got = sectors_of(&share.spans);
        assert!(wanted.len() > 20_000, "there is something to find: {}", wanted.len());
        assert_eq!(
            (wanted.difference(&got).count(), got.difference(&wanted).count()),
            (0, 0),
            "{kind} {more:?}: sectors that are missing, and too many"
        );
        for also in
            [&["/usr/share", "/usr/share/many"][..], &["/short"], &["/long/"], &["/usr/../usr/./share"]]
        {
            assert!(found(&bytes, also) == share, "{kind} {more:?} {also:?}");
        }
        let linked = sectors_of(&found(&bytes, &["/usr/share/linked"]).spans);
        assert!(linked == asked(&image, &tree, "etc/many", block), "{kind} {more:?}: a link that is named");
    }
}

#[test]
fn what_only_the_journal_has_counts() {
    if !has(&["mkfs.ext4", "debugfs", "e2fsck"]) {
        return;
    }
    let dir = Dir::new("journal");
    let tree = tree(&dir.0);
    let (old, new) = (dir.0.join("old"), dir.0.join("new"));
    let (old_name, new_name) = (old.to_str().expect("UTF-8"), new.to_str().expect("UTF-8"));
    for options in ["^64bit,^metadata_csum", "64bit,metadata_csum"] {
        drop(fs::remove_file(&old));
        let tree = tree.to_str().expect("UTF-8");
        run("mkfs.ext4", &["-q", "-F", "-b", "4096", "-O", options, "-d", tree, old_name, "64M"], "");
        fs::copy(&old, &new).expect("it has space");
        let changes =
            format!("write {tree}/usr/share/tiny /etc/fresh\nrm /usr/share/large\nmkdir /etc/more\n");
        run("debugfs", &["-w", "-f", "-", new_name], &changes);
        // What has changed becomes a transaction of the old one's journal.
        let (before, after) = (fs::read(&old).expect("an image"), fs::read(&new).expect("an image"));
        let blocks: Vec<usize> = (0..before.len() / 4096)
            .filter(|block| before[block * 4096..][..4096] != after[block * 4096..][..4096])
            .collect();
        // Not the superblock, which says that there is a journal to replay.
        let blocks: Vec<usize> = blocks.into_iter().filter(|block| *block != 0).collect();
        let bytes: Vec<u8> = blocks.iter().flat_map(|block| after[block * 4096..][..4096].to_vec()).collect();
        fs::write(dir.0.join("blocks"), bytes).expect("it has space");
        let list: Vec<String> = blocks.iter().map(ToString::to_string).collect();
        let file = dir.0.join("blocks").display().to_string();
        let journal = format!("jo\njw -b {} {file}\njc\n", list.join(","));
        run("debugfs", &["-w", "-f", "-", old_name], &journal);
        let unreplayed = fs::read(&old).expect("an image");
        assert_ne!(unreplayed[1024 + 0x60] & 4, 0, "it needs recovery");
        let paths = ["/usr/share", "/etc"];
        let changed = found(&after, &paths);
        assert!(found(&before, &paths) != changed, "there is a change to find");
        assert!(found(&unreplayed, &paths) == changed, "{options}");
        run("e2fsck", &["-f", "-y", old_name], "");
        assert!(found(&fs::read(&old).expect("an image"), &paths) == changed, "{options}: replayed");
    }
}

#[test]
fn file_times_choose() {
    if !has(&["mkfs.ext4", "debugfs"]) {
        return;
    }
    let dir = Dir::new("times");
    let (tree, image) = (dir.0.join("tree"), dir.0.join("image"));
    fs::create_dir_all(tree.join("a")).expect("a directory");
    for name in ["old-read", "old-unread", "new"] {
        fs::write(tree.join("a").join(name), vec![7; 9000]).expect("it has space");
    }
    let name = image.to_str().expect("UTF-8");
    run("mkfs.ext4", &["-q", "-F", "-d", tree.to_str().expect("UTF-8"), name, "16M"], "");
    let now = 4_300_000_000_i64; // after 2038, where the extra bits count
    let mut commands = String::new();
    for (name, modified, accessed) in
        [("old-read", now - 90 * 86400, now - 3600), ("old-unread", 1_000, 2_000), ("new", now - 60, now)]
    {
        commands += &format!("sif /a/{name} mtime @{modified}\nsif /a/{name} atime @{accessed}\n");
    }
    run("debugfs", &["-w", "-f", "-", name], &commands);
    let disk = MemoryDisk::holding(&fs::read(&image).expect("an image"));
    let mut seen = Vec::new();
    let mut wanted = |file: &FileFacts| {
        seen.push((file.bytes, file.modified, file.accessed));
        file.modified < now - 30 * 86400 && file.accessed > now - 7 * 86400
    };
    let found = block_on(async {
        let volume = look(&*disk).await.expect("a volume")[0];
        find_files(&*disk, &volume, &["/".to_owned()], &mut wanted).await.expect("files")
    });
    seen.sort_unstable();
    assert_eq!(
        seen,
        [(9000, 1_000, 2_000), (9000, now - 90 * 86400, now - 3600), (9000, now - 60, now)],
        "{found:?}"
    );
    assert_eq!((found.files, found.others), (1, 2));
    assert_eq!(found.spans.iter().map(|span| span.len()).sum::<u64>(), 9000);
}

#[test]
fn partitions_of_a_guid_table_and_of_an_mbr_are_found() {
    if !has(&["mkfs.ext4", "debugfs", "sgdisk"]) {
        return;
    }
    let dir = Dir::new("partitions");
    let tree = tree(&dir.0);
    let image = dir.0.join("image");
    run(
        "mkfs.ext4",
        &["-q", "-F", "-d", tree.to_str().expect("UTF-8"), image.to_str().expect("UTF-8"), "64M"],
        "",
    );
    let system = fs::read(&image).expect("an image");
    let alone = found(&system, &["/usr/share"]);
    let moved = |by: u64| -> Vec<GuestSpan> {
        alone
            .spans
            .iter()
            .map(|span| (GuestOffset::new(span.start().bytes() + by)).span(span.len()))
            .collect()
    };
    let looked =
        |bytes: &[u8]| -> Vec<Volume> { block_on(look(&*MemoryDisk::holding(bytes))).expect("volumes") };
    let disk_path = dir.0.join("disk");
    let name = disk_path.to_str().expect("UTF-8");
    fs::File::create(&disk_path).expect("a file").set_len(80 << 20).expect("a longer one");
    run("sgdisk", &["-n", "1:2048:+1M", "-n", "7:6144:+64M", name], "");
    let mut disk = fs::read(&disk_path).expect("a disk");
    let at = 6144 * 512;
    disk[at..at + system.len()].copy_from_slice(&system);
    let is_there = |disk: &[u8], number: u32, at: u64| {
        let volumes = looked(disk);
        let volume = volumes.iter().find(|volume| volume.partition == Some(number)).expect("it is there");
        assert_eq!((volume.span.start().bytes(), volume.kind), (at, VolumeKind::Ext));
        let disk = MemoryDisk::holding(disk);
        let found = block_on(find_files(&*disk, volume, &["/usr/share".to_owned()], &mut |_| true));
        assert!(found.expect("files").spans == moved(at), "the same files, further on");
        assert!(block_on(has_path(&*disk, volume, "/etc/many")).expect("it is read"));
        assert!(!block_on(has_path(&*disk, volume, "/etc/none")).expect("it is read"));
        volumes.len()
    };
    assert_eq!(is_there(&disk, 7, at as u64), 2);
    // The second header counts where the first one is damaged; with both, there are no partitions.
    disk[512 + 40] ^= 1;
    assert_eq!(is_there(&disk, 7, at as u64), 2);
    let last = disk.len() - 512;
    disk[last] ^= 1;
    assert!(block_on(look(&*MemoryDisk::holding(&disk))).is_err());
    // An MBR with a primary partition, and two logical ones.
    let mut disk = vec![0_u8; 80 << 20];
    let mut entry = |table: usize, index: usize, kind: u8, first: u32, count: u32| {
        let at = table * 512 + 446 + 16 * index;
        disk[at + 4] = kind;
        disk[at + 8..at + 12].copy_from_slice(&first.to_le_bytes());
        disk[at + 12..at + 16].copy_from_slice(&count.to_le_bytes());
        disk[table * 512 + 510..table * 512 + 512].copy_from_slice(&[0x55, 0xaa]);
    };
    let sectors = u32::try_from(system.len() / 512).expect("small");
    entry(0, 0, 0x83, 64, 64);
    entry(0, 2, 0x0f, 2048, 150_000);
    entry(2048, 0, 0x83, 64, 128);
    entry(2048, 1, 0x05, 1024, 140_000);
    entry(3072, 0, 0x83, 8, sectors);
    let at = 3080 * 512;
    disk[at..at + system.len()].copy_from_slice(&system);
    assert_eq!(is_there(&disk, 6, at as u64), 3);
    // A chain that goes in circles ends.
    disk[3072 * 512 + 446 + 16 + 4] = 5;
    disk[3072 * 512 + 446 + 16 + 8] = 1;
    assert!(block_on(look(&*MemoryDisk::holding(&disk))).is_err());
}

#[test]
fn damage_is_an_error_or_another_answer_and_ends() {
    if !has(&["mkfs.ext4"]) {
        return;
    }
    let dir = Dir::new("damage");
    let (tree, image) = (dir.0.join("tree"), dir.0.join("image"));
    for number in 0..40 {
        fs::create_dir_all(tree.join(format!("d{number}"))).expect("a directory");
        fs::write(tree.join(format!("d{number}/f")), vec![1; number * 700]).expect("it has space");
    }
    let name = image.to_str().expect("UTF-8");
    run("mkfs.ext4", &["-q", "-F", "-b", "1024", "-d", tree.to_str().expect("UTF-8"), name, "2M"], "");
    let bytes = fs::read(&image).expect("an image");
    let mut random = vellum_core::Random::from_seed(9);
    let mut failed = 0;
    for _ in 0..1500 {
        let mut bytes = bytes.clone();
        for _ in 0..1 + random.below(4) {
            // Where something is: metadata comes first.
            let at = usize::try_from(1024 + random.below(250 << 10)).expect("small");
            bytes[at] = u8::try_from(random.below(256)).expect("a byte");
        }
        let size = bytes.len() as u64;
        let disk = MemoryDisk::holding(&bytes);
        let volume = Volume { partition: None, span: GuestOffset::ZERO.span(size), kind: VolumeKind::Ext };
        match block_on(find_files(&*disk, &volume, &["/".to_owned()], &mut |_| true)) {
            Ok(found) => assert!(found.spans.iter().all(|span| span.end().bytes() <= size)),
            Err(_) => failed += 1,
        }
    }
    assert!(failed > 10, "some damage is seen: {failed}");
}
