//! What the tests share: places for files, loop devices, and reporting why a test was skipped.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::print_stderr,
    reason = "each test uses a part, and reports on stderr"
)]

use std::cell::Cell;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use vellum_core::contract::StorageFixture;
use vellum_core::{LocalFuture, Result, SharedStorage, Storage};
use vellum_io::{File, IoMode, LockMode, OpenOptions, run};

pub const MODES: [IoMode; 2] = [IoMode::Uring, IoMode::Threads];

/// What takes longer has hung, or waits for something else than it should: far longer than anything here
/// takes on a busy machine.
pub const LONG: Duration = Duration::from_secs(60);

/// Runs a test in both modes, or the one there is.
pub fn in_both_modes<F: Future<Output = ()>>(test: impl Fn() -> F) {
    for mode in MODES {
        match run(mode, async || test().await) {
            Ok(()) => {}
            Err(error) if mode == IoMode::Uring => skip(&error.chain()),
            Err(error) => panic!("{error:?}"),
        }
    }
}

/// Prints why something is not tested here.
pub fn skip(reason: &str) {
    eprintln!("skipped: {reason}");
}

pub fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|facts| std::os::unix::fs::MetadataExt::uid(&facts) == 0)
}

/// A directory that goes with the test.
pub struct TempDir(PathBuf);

impl TempDir {
    /// On the file system the program was built on, which is a real one, or where `VELLUM_TEST_DIR` says.
    pub fn new() -> Self {
        let chosen = std::env::var_os("VELLUM_TEST_DIR").map(PathBuf::from);
        Self::within(chosen.as_deref().unwrap_or(Path::new(env!("CARGO_TARGET_TMPDIR"))))
    }

    pub fn within(parent: &Path) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("vellum-io-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed));
        let path = parent.join(name);
        std::fs::create_dir_all(&path).expect("a directory for the test");
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

/// Runs a program; its output when it succeeds, what it complained of when it does not.
pub fn call(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output =
        Command::new(program).args(arguments).output().map_err(|error| format!("{program}: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// A loop device over a file of its own.
pub struct LoopDevice {
    pub path: PathBuf,
    dir: TempDir,
}

impl LoopDevice {
    /// A device of `len` bytes that moves blocks of `block` bytes; prints the reason if none is available.
    pub fn new(len: u64, block: u32) -> Option<Self> {
        Self::over(TempDir::new(), len, block)
    }

    pub fn over(dir: TempDir, len: u64, block: u32) -> Option<Self> {
        if !is_root() {
            skip("loop devices are root's");
            return None;
        }
        let backing = dir.join("backing");
        std::fs::File::create(&backing).and_then(|file| file.set_len(len)).expect("a file for the device");
        let backing = backing.display().to_string();
        match call("losetup", &["--show", "-f", "-b", &block.to_string(), &backing]) {
            Ok(path) => Some(Self { path: path.into(), dir }),
            Err(reason) => {
                skip(&format!("no loop device: {reason}"));
                None
            }
        }
    }
}

impl LoopDevice {
    /// Makes it smaller while it is in use.
    #[allow(dead_code, reason = "one of the tests has no use for it")]
    pub fn shrink(&self, len: u64) {
        let backing = self.dir.join("backing");
        let file = std::fs::OpenOptions::new().write(true).open(backing).expect("the file of the device");
        file.set_len(len).expect("it is cut");
        call("losetup", &["-c", &self.path.display().to_string()])
            .expect("the device takes the size of its file");
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        drop(call("losetup", &["-d", &self.path.display().to_string()]));
    }
}

/// Files in a directory, for the contract suite.
pub struct FileFixture {
    pub dir: TempDir,
    pub options: OpenOptions,
    pub count: Cell<u32>,
}

impl FileFixture {
    pub fn new(dir: TempDir, options: OpenOptions) -> Self {
        Self { dir, options, count: Cell::new(0) }
    }

    fn path(&self) -> PathBuf {
        self.dir.join(&format!("file-{}", self.count.get()))
    }
}

impl StorageFixture for FileFixture {
    fn fresh(&self, len: u64) -> LocalFuture<'_, Result<SharedStorage>> {
        Box::pin(async move {
            drop(std::fs::remove_file(self.path()));
            self.count.set(self.count.get() + 1);
            let file = File::create_new(self.path(), self.options).await?;
            file.set_len(len).await?;
            Ok(file as SharedStorage)
        })
    }

    fn reopen(&self) -> LocalFuture<'_, Result<SharedStorage>> {
        Box::pin(async move { Ok(File::open(self.path(), self.options).await? as SharedStorage) })
    }
}

/// A block device, for the contract suite. Each fresh storage is the device with zeros all over.
pub struct DeviceFixture {
    pub path: PathBuf,
    pub options: OpenOptions,
}

impl StorageFixture for DeviceFixture {
    fn fresh(&self, len: u64) -> LocalFuture<'_, Result<SharedStorage>> {
        Box::pin(async move {
            let file = File::open(&self.path, self.options).await?;
            assert!(file.len() >= len, "the device is large enough for the suite");
            let all = vellum_core::ImageOffset::ZERO.span(file.len());
            file.write_zeroes(all, vellum_core::Zeroes::MayUnmap).await?;
            Ok(file as SharedStorage)
        })
    }

    fn reopen(&self) -> LocalFuture<'_, Result<SharedStorage>> {
        Box::pin(async move { Ok(File::open(&self.path, self.options).await? as SharedStorage) })
    }
}

/// Open for writing, past the page cache or not, with the lock of a writer.
pub fn writing(direct: bool) -> OpenOptions {
    OpenOptions::writing().direct(direct)
}

/// As above, with no lock, for files that the test itself opens twice.
pub fn unlocked(direct: bool) -> OpenOptions {
    writing(direct).lock(LockMode::None)
}
