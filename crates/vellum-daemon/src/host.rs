//! The host's files, as the chain opens them, and the host's threads, for long computations.

use std::os::unix::fs::MetadataExt as _;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};

use futures_lite::FutureExt as _;
use vellum_core::{Context, Error, ErrorKind, LocalFuture, Offload, Result, SharedStorage, join_all};
use vellum_io::{File, LockMode, OpenOptions, spawn_local, unblock, unblock_at};
use vellum_layer::gate::ALLOW_DIRS_VARIABLE;
use vellum_layer::{Gate, Identity, Opener, Purpose};

/// How files are opened.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostOptions {
    /// Past the page cache (O_DIRECT).
    pub direct: bool,
    /// Others may write what is read.
    pub force_share: bool,
}

/// Opens files of this host.
#[derive(Debug, Clone, Copy, Default)]
pub struct Host {
    options: HostOptions,
}

impl Host {
    /// Opens files in this way.
    pub fn new(options: HostOptions) -> Self {
        Self { options }
    }

    /// The gate that lets references into these directories and those of the environment, and to these data
    /// files.
    ///
    /// # Errors
    /// When one of them does not exist.
    pub fn gate(dirs: &[PathBuf], data_files: &[PathBuf]) -> Result<Gate> {
        let variable = std::env::var_os(ALLOW_DIRS_VARIABLE).unwrap_or_default();
        let from_environment = std::env::split_paths(&variable).filter(|dir| !dir.as_os_str().is_empty());
        let canonical = |dir: PathBuf| {
            dir.canonicalize().context(|| format!("can't allow references into {}", dir.display()))
        };
        let dirs: Result<Vec<PathBuf>> =
            dirs.iter().cloned().chain(from_environment).map(canonical).collect();
        let data_files: Result<Vec<PathBuf>> = data_files
            .iter()
            .map(|file| file.canonicalize().context(|| format!("can't use the data file {}", file.display())))
            .collect();
        Ok(Gate::allowing(dirs?).with_data_files(data_files?))
    }
}

/// The file's own path: absolute, links resolved. This may block where the storage does not answer, so it
/// does not run on a worker.
pub(crate) async fn canonical_path(path: &Path) -> std::io::Result<PathBuf> {
    let asked = path.to_owned();
    unblock_at(path, move || asked.canonicalize()).await
}

/// The time of the last change tells a file from an earlier one that had its number.
fn identity(path: &Path) -> Option<Identity> {
    let facts = std::fs::metadata(path).ok()?;
    let changed = facts.ctime().checked_mul(1_000_000_000)?.checked_add(facts.ctime_nsec())?;
    Some([facts.dev(), facts.rdev(), facts.ino(), changed.cast_unsigned()])
}

/// Whether it is a name that QEMU, or another program, would open over a network or with a driver of its own.
fn is_url(name: &str) -> bool {
    let schemes = ["json:", "nbd:", "fd:", "rbd:", "ssh:", "iscsi:", "nfs:", "gluster:", "fat:"];
    name.contains("://") || schemes.iter().any(|scheme| name.starts_with(scheme))
}

impl Opener for Host {
    fn canonical<'a>(&'a self, path: &'a Path) -> LocalFuture<'a, Result<PathBuf>> {
        Box::pin(async move {
            canonical_path(path).await.map_err(|error| {
                let name = path.display().to_string();
                match error.kind() {
                    std::io::ErrorKind::NotFound if is_url(&name) => Error::unsupported(format!(
                        "{name}: URLs and QEMU's other ways of naming a disk are not supported, only files and \
                         block devices; nbdfuse or qemu-nbd can provide it as one"
                    )),
                    std::io::ErrorKind::NotFound => {
                        Error::new(ErrorKind::NotFound, format!("{name}: no such file"))
                    }
                    _ => Error::io(error, format!("can't open {name}")),
                }
            })
        })
    }

    fn open<'a>(
        &'a self,
        canonical: &'a Path,
        _name: &'a Path,
        purpose: Purpose,
    ) -> LocalFuture<'a, Result<SharedStorage>> {
        let (writable, lock) = match purpose {
            Purpose::Write => (true, LockMode::Write),
            Purpose::Read if self.options.force_share => (false, LockMode::ForceShare),
            Purpose::Read | Purpose::Replay => (false, LockMode::Read),
        };
        // The path was checked, so exactly the file there must be opened: not the target of a link that was
        // created since.
        let options = OpenOptions {
            writable,
            direct: self.options.direct,
            lock,
            without_links: true,
            ..OpenOptions::default()
        };
        Box::pin(async move { Ok(File::open(canonical, options).await? as SharedStorage) })
    }

    fn identities(&self, paths: Vec<PathBuf>) -> LocalFuture<'_, Option<Vec<Identity>>> {
        // Each where calls for its own storage wait: one that does not answer takes no threads of another.
        let one =
            |path: PathBuf| Box::pin(async move { unblock_at(&path.clone(), move || identity(&path)).await });
        Box::pin(async move { join_all(paths.into_iter().map(one)).await.into_iter().collect() })
    }

    fn way(&self) -> u64 {
        u64::from(self.options.direct) | u64::from(self.options.force_share) << 1
    }
}

/// Long computations go to the threads that also do what blocks.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pool;

impl Offload for Pool {
    fn run(&self, job: Box<dyn FnOnce() + Send>) {
        // A job that panics gives no answer; the future that waits for it handles that.
        let done = AssertUnwindSafe(unblock(job)).catch_unwind();
        spawn_local(async move { drop(done.await) }).detach();
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::offload;
    use vellum_io::{IoMode, run};

    use super::*;

    #[test]
    fn a_job_that_panics_is_for_whoever_waits_for_it() {
        run(IoMode::Threads, async || {
            let lost = AssertUnwindSafe(offload(&Pool, || panic!("as planned"))).catch_unwind().await;
            assert!(lost.is_err());
            assert_eq!(offload(&Pool, || 1).await, 1, "and the worker goes on");
        })
        .expect("a worker");
    }
}
