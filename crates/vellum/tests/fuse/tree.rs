//! Files that are made, changed, moved and deleted at random, and recorded: what must be there after a crash.
//!
//! ```text
//!   batch-0   batch-1   batch-2   batch-3 …
//!   └─ synced, and never touched again ─┘  └─ worked on when the server is killed: only what was synced by
//!                                             itself (file and directory), and not touched since, must be there
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate};
use vellum_core::Random;

/// Files of one batch at most; more are deleted.
const FILES_MAX: usize = 60;

/// A directory that is worked on.
pub struct Batch {
    root: PathBuf,
    random: Random,
    next: u32,
    /// Those that may be changed.
    files: BTreeMap<PathBuf, Vec<u8>>,
    /// Those that were synced by themselves, and are left alone.
    pinned: BTreeMap<PathBuf, Vec<u8>>,
    dirs: Vec<PathBuf>,
}

/// What must be there.
#[derive(Default)]
pub struct Expected {
    files: BTreeMap<PathBuf, Vec<u8>>,
    /// Directories in which nothing else is.
    whole: BTreeSet<PathBuf>,
}

/// Makes durable what was done in the file system of this directory.
pub fn sync_all(dir: &Path) -> io::Result<()> {
    Ok(rustix::fs::syncfs(File::open(dir)?)?)
}

impl Batch {
    /// In a new directory of this name, which is made durable.
    pub fn new(parent: &Path, name: &str, random: Random) -> io::Result<Self> {
        let root = parent.join(name);
        std::fs::create_dir(&root)?;
        sync_all(parent)?;
        let (files, pinned, dirs) = (BTreeMap::new(), BTreeMap::new(), vec![root.clone()]);
        Ok(Self { root, random, next: 0, files, pinned, dirs })
    }

    /// Does this many random operations, or stops when one fails.
    pub fn work(&mut self, steps: usize) -> io::Result<()> {
        (0..steps).try_for_each(|_| self.step())
    }

    /// How many names it has given.
    pub fn len(&self) -> u32 {
        self.next
    }

    /// All of it is durable, and stays as it is.
    pub fn keep(mut self, expected: &mut Expected) -> io::Result<()> {
        sync_all(&self.root)?;
        expected.files.append(&mut self.files);
        expected.files.append(&mut self.pinned);
        expected.whole.insert(self.root);
        Ok(())
    }

    /// The file system crashed: only what was synced itself must be there.
    pub fn crashed(mut self, expected: &mut Expected) {
        expected.files.append(&mut self.pinned);
    }

    fn step(&mut self) -> io::Result<()> {
        let kind = if self.files.len() >= FILES_MAX { 9 } else { self.random.below(12) };
        match kind {
            0..4 => self.create(),
            _ if self.files.is_empty() => self.create(),
            4..6 => self.overwrite(),
            6 => self.append(),
            7 => self.cut(),
            8 => self.rename(),
            9 => self.delete(),
            10 => self.sync_one(),
            _ => {
                let dir = self.new_path("dir");
                std::fs::create_dir(&dir)?;
                self.dirs.push(dir);
                Ok(())
            }
        }
    }

    fn new_path(&mut self, kind: &str) -> PathBuf {
        self.next += 1;
        let number = self.next;
        self.random.pick(&self.dirs).join(format!("{kind}-{number}"))
    }

    fn some_bytes(&mut self) -> Vec<u8> {
        let longest = *self.random.pick(&[100, 5000, 40_000, 300_000]);
        let mut bytes = vec![0; self.random.index(longest)];
        self.random.fill(&mut bytes);
        bytes
    }

    /// One that may be changed, taken out: it is put back once it is changed.
    fn take_one(&mut self) -> (PathBuf, Vec<u8>) {
        let index = self.random.index(self.files.len());
        let path = self.files.keys().nth(index).expect("there are so many").clone();
        let bytes = self.files.remove(&path).expect("it is there");
        (path, bytes)
    }

    fn create(&mut self) -> io::Result<()> {
        let (path, bytes) = (self.new_path("file"), self.some_bytes());
        File::create(&path)?.write_all(&bytes)?;
        self.files.insert(path, bytes);
        Ok(())
    }

    fn overwrite(&mut self) -> io::Result<()> {
        let (path, mut bytes) = self.take_one();
        let (at, new) = (self.random.index(bytes.len() + 1), self.some_bytes());
        OpenOptions::new().write(true).open(&path)?.write_all_at(&new, at as u64)?;
        let end = at + new.len();
        bytes.resize(bytes.len().max(end), 0);
        bytes[at..end].copy_from_slice(&new);
        self.files.insert(path, bytes);
        Ok(())
    }

    fn append(&mut self) -> io::Result<()> {
        let (path, mut bytes) = self.take_one();
        let new = self.some_bytes();
        OpenOptions::new().append(true).open(&path)?.write_all(&new)?;
        bytes.extend(new);
        self.files.insert(path, bytes);
        Ok(())
    }

    /// A hole, or another length.
    fn cut(&mut self) -> io::Result<()> {
        let (path, mut bytes) = self.take_one();
        let file = OpenOptions::new().write(true).open(&path)?;
        let at = self.random.index(bytes.len() + 1);
        if self.random.one_in(2) && at < bytes.len() {
            let len = 1 + self.random.index(bytes.len() - at);
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&file, how, at as u64, len as u64)?;
            bytes[at..at + len].fill(0);
        } else {
            file.set_len(at as u64)?;
            bytes.truncate(at);
        }
        self.files.insert(path, bytes);
        Ok(())
    }

    fn rename(&mut self) -> io::Result<()> {
        let (path, bytes) = self.take_one();
        let to = self.new_path("moved");
        std::fs::rename(&path, &to)?;
        self.files.insert(to, bytes);
        Ok(())
    }

    fn delete(&mut self) -> io::Result<()> {
        let (path, _) = self.take_one();
        std::fs::remove_file(path)
    }

    /// The file, and every directory on the way to it.
    fn sync_one(&mut self) -> io::Result<()> {
        let (path, bytes) = self.take_one();
        File::open(&path)?.sync_all()?;
        for dir in path.ancestors().skip(1).take_while(|dir| dir.starts_with(&self.root)) {
            File::open(dir)?.sync_all()?;
        }
        self.pinned.insert(path, bytes);
        Ok(())
    }
}

impl Expected {
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// One more file that was synced.
    pub fn insert(&mut self, path: PathBuf, bytes: Vec<u8>) {
        self.files.insert(path, bytes);
    }

    /// Looks at everything.
    pub fn judge(&self) -> Result<(), String> {
        for (path, bytes) in &self.files {
            let found = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
            if found != *bytes {
                let at = found.iter().zip(bytes).position(|(is, should)| is != should);
                let (is, should) = (found.len(), bytes.len());
                return Err(format!("{}: {is} bytes for {should}; differs at {at:?}", path.display()));
            }
        }
        for root in &self.whole {
            for path in files_in(root).map_err(|error| format!("{}: {error}", root.display()))? {
                if !self.files.contains_key(&path) {
                    return Err(format!("{} was deleted, and is there", path.display()));
                }
            }
        }
        Ok(())
    }
}

/// All files below a directory.
pub fn files_in(root: &Path) -> io::Result<Vec<PathBuf>> {
    let (mut files, mut dirs) = (Vec::new(), vec![root.to_owned()]);
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir)? {
            let entry = entry?;
            let list = if entry.file_type()?.is_dir() { &mut dirs } else { &mut files };
            list.push(entry.path());
        }
    }
    Ok(files)
}
