//! Real file systems on a loop device over the file. The server is killed while they are in use; then the
//! kernel recovers what is left, its checkers find no errors, and everything that was synced is there.
//!
//! ```text
//!   files, SQLite, tar ─► ext4 │ XFS │ btrfs ─► loop ─► file ─► server ─► image        SIGKILL, again and again
//! ```
//!
//! In CI each file system meets two kinds of image; with `VELLUM_TEST_SCALE` all of them, for more rounds.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use vellum_core::Random;

use super::shown::{Loop, Shown, Tree, has_loops_and, is_here};
use super::support::dir::Dir;
use super::support::program::{has, path_text, run, skipped, succeed};
use super::support::scale;
use super::tree::{Batch, Expected, files_in, sync_all};
use super::{KINDS, Kind, seed};

/// As small as XFS may be, and some more.
const DISK_BYTES: usize = 400 << 20;
const STEPS: usize = 400;

struct System {
    name: &'static str,
    make: &'static [&'static str],
    check: &'static [&'static str],
}

const EXT4: System = System { name: "ext4", make: &["mkfs.ext4", "-q", "-F"], check: &["e2fsck", "-fn"] };
const XFS: System = System { name: "xfs", make: &["mkfs.xfs", "-q", "-f"], check: &["xfs_repair", "-n"] };
const BTRFS: System = System { name: "btrfs", make: &["mkfs.btrfs", "-q", "-f"], check: &["btrfs", "check"] };

impl System {
    fn is_here(&self) -> bool {
        let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
        if !known.lines().any(|line| line.trim_start() == self.name) {
            skipped(&format!("the kernel does not know {}", self.name));
            return false;
        }
        is_here() && has_loops_and(&[self.make[0], self.check[0]])
    }

    #[track_caller]
    fn is_clean(&self, device: &str) {
        let ran = run(self.check[0], &[&self.check[1..], &[device]].concat());
        assert_eq!(ran.code, 0, "{:?}:\n{}\n{}", self.check, ran.out, ran.err);
    }
}

/// A program that commits one row after the other, and reports each.
const COMMITS: &str = "
import hashlib, sqlite3, sys
db = sqlite3.connect(sys.argv[1])
db.execute('pragma journal_mode=' + sys.argv[2])
db.execute('pragma synchronous=extra')
db.execute('create table if not exists rows(id integer primary key, bytes blob)')
db.commit()
n = db.execute('select coalesce(max(id), 0) from rows').fetchone()[0]
while True:
    n += 1
    db.execute('insert into rows values (?, ?)', (n, hashlib.sha256(str(n).encode()).digest() * (n % 90 + 1)))
    db.commit()
    print(n, flush=True)
";

/// A program that checks whether the first rows, this many, are there, and the file is complete.
const ROWS: &str = "
import hashlib, sqlite3, sys
db = sqlite3.connect(sys.argv[1])
assert db.execute('pragma integrity_check').fetchone()[0] == 'ok'
rows = dict(db.execute('select id, bytes from rows'))
for n in range(1, int(sys.argv[2]) + 1):
    assert rows.get(n) == hashlib.sha256(str(n).encode()).digest() * (n % 90 + 1), n
";

/// A program that commits rows until the disk is gone.
struct Sqlite {
    child: Child,
    /// How many rows it has reported as committed.
    rows: Arc<AtomicU64>,
}

impl Sqlite {
    fn is_here() -> bool {
        let is_here = has("python3") && run("python3", &["-c", "import sqlite3"]).code == 0;
        if !is_here {
            skipped("python3 has no sqlite3");
        }
        is_here
    }

    fn start(database: &Path, journal: &str) -> Self {
        let mut child = Command::new("python3")
            .args(["-c", COMMITS, path_text(database), journal])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("it can be started");
        let lines = BufReader::new(child.stdout.take().expect("it was asked for")).lines();
        let rows = Arc::new(AtomicU64::new(0));
        let count = rows.clone();
        // It ends with the program.
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                count.store(line.parse().expect("a number"), Ordering::Release);
            }
        });
        Self { child, rows }
    }

    /// Waits until it has committed something, or has ended.
    fn has_begun(&mut self) {
        while self.rows.load(Ordering::Acquire) == 0 && self.child.try_wait().expect("a child").is_none() {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Ends it. Returns how many rows it has reported as committed.
    fn kill(self) -> u64 {
        let rows = self.rows.clone();
        drop(self);
        // Its output has been read by now, or nearly all of it.
        std::thread::sleep(Duration::from_millis(20));
        rows.load(Ordering::Acquire)
    }
}

impl Drop for Sqlite {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Unpacks our own documents into the file system, and remembers them.
fn unpack(into: &Path, expected: &mut Expected) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("our own directory");
    let archive = into.with_file_name("docs.tar");
    succeed("tar", &["-C", path_text(&root), "-cf", path_text(&archive), "docs", "crates/vellum-core"]);
    std::fs::create_dir(into).expect("a directory");
    succeed("tar", &["-C", path_text(into), "-xf", path_text(&archive)]);
    std::fs::remove_file(&archive).expect("the archive");
    sync_all(into).expect("a sync");
    for part in ["docs", "crates/vellum-core"] {
        for path in files_in(&root.join(part)).expect("our own files") {
            let bytes = std::fs::read(&path).expect("our own file");
            expected.insert(into.join(path.strip_prefix(&root).expect("below it")), bytes);
        }
    }
}

/// What a story has come to so far.
#[derive(Default)]
struct Story {
    expected: Expected,
    batches: usize,
    rows: u64,
}

impl Story {
    /// Works, and syncs what was done; then works on until the server is killed.
    fn round(&mut self, shown: &mut Shown, at: &Path, random: &mut Random, has_sqlite: bool) {
        for _ in 0..2 {
            let mut batch = self.batch(at, random);
            batch.work(STEPS).expect("the disk is there");
            batch.keep(&mut self.expected).expect("a sync");
        }
        if self.rows == 0 && has("tar") {
            unpack(&at.join(format!("unpacked-{}", self.batches)), &mut self.expected);
        }
        if has("fstrim") {
            succeed("fstrim", &[at]);
        }
        let journal = if random.one_in(2) { "wal" } else { "delete" };
        let sqlite = has_sqlite.then(|| {
            let mut sqlite = Sqlite::start(&at.join("rows.db"), journal);
            sqlite.has_begun();
            sqlite
        });
        let mut batch = self.batch(at, random);
        std::thread::scope(|scope| {
            let worker = scope.spawn(move || {
                // Until the disk is gone. What is not synced may still succeed, in memory.
                while batch.work(1).is_ok() && batch.len() < 100_000 {}
                batch
            });
            std::thread::sleep(Duration::from_millis(100 + random.below(500)));
            shown.kill();
            let rows = sqlite.map_or(0, Sqlite::kill);
            self.rows = self.rows.max(rows);
            assert!(!has_sqlite || self.rows > 0, "no row was committed");
            worker.join().expect("the worker").crashed(&mut self.expected);
        });
    }

    fn batch(&mut self, at: &Path, random: &mut Random) -> Batch {
        self.batches += 1;
        Batch::new(at, &format!("batch-{}", self.batches), random.fork()).expect("a directory")
    }

    fn judge(&self, at: &Path) -> Result<(), String> {
        self.expected.judge()?;
        if self.rows > 0 {
            let ran = run("python3", &["-c", ROWS, path_text(&at.join("rows.db")), &self.rows.to_string()]);
            if ran.code != 0 {
                return Err(format!("SQLite, {} rows: {}", self.rows, ran.err));
            }
        }
        Ok(())
    }
}

/// One file system on one image, killed often.
fn rounds(system: &System, kind: &Kind, number: u64) {
    let dir = Dir::new("fuse-fs");
    let image = kind.make(&dir, DISK_BYTES);
    let at = dir.join("mounted");
    let has_sqlite = Sqlite::is_here();
    let mut random = Random::from_seed(seed() ^ number);
    let mut story = Story::default();
    let count = 3 * scale();
    for round in 0..=count {
        let about = format!("{} on {}, round {round}, seed {}", system.name, kind.name, seed());
        let mut shown = Shown::start(&dir.join("disk"), &[&image]);
        let is_direct = (round as u64 + number).is_multiple_of(2);
        let Some(device) = Loop::over(&shown.file, is_direct) else { return };
        if round == 0 {
            succeed(system.make[0], &[&system.make[1..], &[&device.0]].concat());
        } else {
            // The kernel recovers its file system; then nothing is wrong with it, and nothing is missing.
            let tree = Tree::mount(&device.0, &at);
            story.judge(&at).unwrap_or_else(|what| panic!("{about}: {what}"));
            tree.unmount();
            system.is_clean(&device.0);
        }
        if round == count {
            drop(device);
            shown.stop();
            break;
        }
        let tree = Tree::mount(&device.0, &at);
        story.round(&mut shown, &at, &mut random, has_sqlite);
        // No file of the dead tree is open any more: it goes, and with it the device.
        drop(tree);
    }
    assert!(story.expected.len() > 50, "{} files were synced", story.expected.len());
    kind.is_sound(&image);
}

/// One story at a time: `mkfs.btrfs` inspects what is behind every mounted loop device, and gives up where a
/// server was just killed.
static ALONE: Mutex<()> = Mutex::new(());

fn story(system: &System, kinds: [usize; 2]) {
    if !system.is_here() {
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for (number, kind) in KINDS.iter().enumerate() {
        if kind.format != "raw" && (scale() > 1 || kinds.contains(&number)) {
            rounds(system, kind, number as u64);
        }
    }
}

#[test]
fn ext4_survives_kills() {
    story(&EXT4, [0, 1]);
}

#[test]
fn xfs_survives_kills() {
    story(&XFS, [0, 3]);
}

#[test]
fn btrfs_survives_kills() {
    story(&BTRFS, [0, 2]);
}
