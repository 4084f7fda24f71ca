//! The host's files, as the chain opens them, and the host's threads, for long computations.

use std::path::{Path, PathBuf};

use vellum_core::{Context, Error, ErrorKind, LocalFuture, Offload, Result, SharedStorage};
use vellum_io::{File, LockMode, OpenOptions, spawn_local, unblock};
use vellum_layer::gate::ALLOW_DIRS_VARIABLE;
use vellum_layer::{Gate, Opener, Purpose};

/// How files are opened.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostOptions {
    /// Past the page cache (O_DIRECT).
    pub direct: bool,
    /// What is read may be written by others meanwhile.
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

    /// The gate that lets references into these directories, and into those of the environment.
    ///
    /// # Errors
    /// When a directory does not exist.
    pub fn gate(dirs: &[PathBuf]) -> Result<Gate> {
        let variable = std::env::var_os(ALLOW_DIRS_VARIABLE).unwrap_or_default();
        let from_environment = std::env::split_paths(&variable).filter(|dir| !dir.as_os_str().is_empty());
        let canonical = |dir: PathBuf| {
            dir.canonicalize().context(|| format!("can't allow references into {}", dir.display()))
        };
        let dirs: Result<Vec<PathBuf>> =
            dirs.iter().cloned().chain(from_environment).map(canonical).collect();
        Ok(Gate::allowing(dirs?))
    }
}

impl Opener for Host {
    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        path.canonicalize().context(|| format!("can't open {}", path.display()))
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
            Purpose::Read => (false, LockMode::Read),
        };
        let options = OpenOptions { writable, direct: self.options.direct, lock, ..OpenOptions::default() };
        Box::pin(async move {
            let file = File::open(canonical, options).await?;
            // A path can change between the question and the answer. What counts is where it leads now.
            if canonical.canonicalize().ok().as_deref() != Some(canonical) {
                return Err(Error::new(
                    ErrorKind::Refused,
                    format!("{} was moved or replaced by a link while it was opened", canonical.display()),
                ));
            }
            Ok(file as SharedStorage)
        })
    }
}

/// Long computations go to the threads that also do what blocks.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pool;

impl Offload for Pool {
    fn run(&self, job: Box<dyn FnOnce() + Send>) {
        spawn_local(unblock(job)).detach();
    }
}
