//! The host's files, as the chain opens them, and the host's threads, for long computations.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::MetadataExt as _;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use futures_lite::FutureExt as _;
use vellum_core::{
    Context, Error, ErrorKind, LocalFuture, Offload, Result, SharedStorage, Url, UrlPrefix, join_all,
};
use vellum_format::FormatKind;
use vellum_io::{File, LockMode, OpenOptions, spawn_local, unblock, unblock_at};
use vellum_layer::gate::{ALLOW_DIRS_VARIABLE, ALLOW_URLS_VARIABLE};
use vellum_layer::{Gate, Identity, Opener, Purpose};
use vellum_remote::nbd;
use vellum_remote::{Opened, RemoteOptions};

/// How files are opened.
#[derive(Debug, Clone, Default)]
pub struct HostOptions {
    /// Past the page cache (O_DIRECT).
    pub direct: bool,
    /// What is written, past the page cache where its file system can do that.
    pub writes_direct: bool,
    /// What is written is never flushed.
    pub never_flushed: bool,
    /// Others may write what is read.
    pub force_share: bool,
    /// How remote images are read.
    pub remote: RemoteOptions,
    /// Becomes true when one is asked for.
    pub asks_remote: Arc<AtomicBool>,
}

/// Opens files of this host, for one opening of an image.
#[derive(Debug, Clone)]
pub struct Host {
    options: HostOptions,
    /// When that was asked for: what others find at a URL after this is found for it, too.
    asked: Instant,
}

impl Default for Host {
    fn default() -> Self {
        Self::new(HostOptions::default())
    }
}

impl Host {
    /// Opens files in this way.
    pub fn new(options: HostOptions) -> Self {
        Self { options, asked: Instant::now() }
    }

    /// The gate that lets references into these directories and those of the environment, to these URLs and those of
    /// the environment, and to these data files. An entry of `places` that begins like a URL is a prefix of URLs.
    ///
    /// # Errors
    /// When one of them does not exist.
    pub fn gate(places: &[PathBuf], data_files: &[PathBuf]) -> Result<Gate> {
        let variable = std::env::var_os(ALLOW_DIRS_VARIABLE).unwrap_or_default();
        let from_environment = std::env::split_paths(&variable).filter(|dir| !dir.as_os_str().is_empty());
        let canonical = |dir: PathBuf| {
            dir.canonicalize().context(|| format!("can't allow references into {}", dir.display()))
        };
        let dirs: Result<Vec<PathBuf>> = places
            .iter()
            .filter(|place| !is_prefix(place))
            .cloned()
            .chain(from_environment)
            .map(canonical)
            .collect();
        let data_files: Result<Vec<PathBuf>> = data_files
            .iter()
            .map(|file| file.canonicalize().context(|| format!("can't use the data file {}", file.display())))
            .collect();
        Ok(Gate::allowing(dirs?).with_urls(Self::url_prefixes(places)?).with_data_files(data_files?))
    }

    /// The prefixes of URLs among these places, and those of the environment.
    ///
    /// # Errors
    /// `Invalid` for one that is not the beginning of a URL.
    pub(crate) fn url_prefixes(places: &[PathBuf]) -> Result<Vec<UrlPrefix>> {
        let given = places.iter().filter(|place| is_prefix(place)).filter_map(|place| place.to_str());
        let variable = std::env::var(ALLOW_URLS_VARIABLE).unwrap_or_default();
        given.map(UrlPrefix::parse).chain(variable.split_whitespace().map(UrlPrefix::parse)).collect()
    }
}

/// The file's own path: absolute, links resolved. This may block where the storage does not answer, so it
/// does not run on a worker.
pub(crate) async fn canonical_path(path: &Path) -> std::io::Result<PathBuf> {
    if let Some(Ok(url)) = Url::of_path(path) {
        return Ok(url.to_string().into());
    }
    let asked = path.to_owned();
    unblock_at(path, move || asked.canonicalize()).await
}

/// The time of the last change tells a file from an earlier one that had its number; and what the file system says of
/// itself, from one of another file system that has the device's number now.
fn identity(path: &Path) -> Option<Identity> {
    let facts = std::fs::metadata(path).ok()?;
    let changed = facts.ctime().checked_mul(1_000_000_000)?.checked_add(facts.ctime_nsec())?;
    let node = match facts.is_file() {
        true => rustix::fs::statvfs(path).map_or(0, |system| system.f_fsid),
        false => facts.rdev(),
    };
    Some([facts.dev(), node, facts.ino(), changed.cast_unsigned()])
}

/// What a remote image is now, as far as its server tells. One of which it tells nothing is shared with no other disk.
async fn remote_identity(url: &Url, options: &RemoteOptions, asked: Instant) -> Option<Identity> {
    if is_nbd(url) {
        return None;
    }
    let Opened { storage, content } = vellum_remote::open_since(url, options, asked).await.ok()?;
    let content = content?;
    let hashed = |salt: u64| {
        let mut hasher = DefaultHasher::new();
        (salt, url.to_string(), &content).hash(&mut hasher);
        hasher.finish()
    };
    Some([hashed(0), hashed(1), storage.len(), u64::MAX])
}

/// Whether it names an export of an NBD server.
pub(crate) fn is_nbd(url: &Url) -> bool {
    url.scheme().is_nbd()
}

/// Whether a place that the user allows is the beginning of a URL.
fn is_prefix(place: &Path) -> bool {
    place.to_str().is_some_and(|text| text.contains("://") || text.starts_with("rbd:"))
}

/// Whether it is a name that QEMU, or another program, would open over a network or with a driver of its own.
fn is_url(name: &str) -> bool {
    let schemes = ["json:", "nbd:", "fd:", "rbd:", "ssh:", "iscsi:", "nfs:", "gluster:", "fat:"];
    name.contains("://") || schemes.iter().any(|scheme| name.starts_with(scheme))
}

/// Checks that a new image is not to get a name that means something else to QEMU: no script means a file of that name.
///
/// # Errors
/// `Unsupported` for one that does.
pub(crate) fn check_new_name(path: &Path) -> Result<()> {
    let name = path.display().to_string();
    let is_other = match Url::of_path(path) {
        Some(url) => url.map(|_| true)?,
        None => is_url(&name) && name.find(':') < name.find('/').or(Some(usize::MAX)),
    };
    match is_other {
        true => Err(Error::unsupported(format!(
            "{name}: only files and block devices can be created (the file of this name is ./{name})"
        ))),
        false => Ok(()),
    }
}

impl Opener for Host {
    fn canonical<'a>(&'a self, path: &'a Path) -> LocalFuture<'a, Result<PathBuf>> {
        Box::pin(async move {
            if let Some(url) = Url::of_path(path) {
                return Ok(url?.to_string().into());
            }
            canonical_path(path).await.map_err(|error| {
                let name = path.display().to_string();
                match error.kind() {
                    std::io::ErrorKind::NotFound if is_url(&name) => Error::unsupported(format!(
                        "{name}: this way of naming a disk is not supported, only files, block devices and URLs that \
                         begin with http, https, s3, nbd, nbds, nbd+unix, nbds+unix or rbd; nbdfuse or qemu-nbd can provide it as a file"
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
        if let Some(url) = Url::of_path(canonical) {
            self.options.asks_remote.store(true, Ordering::Release);
            return Box::pin(async move {
                let url = url?;
                if is_nbd(&url) && purpose == Purpose::Write {
                    return Ok(nbd::open(&url, &self.options.remote, false).await? as SharedStorage);
                }
                if purpose == Purpose::Write {
                    return Err(Error::new(
                        ErrorKind::ReadOnly,
                        format!(
                            "{}: an image at a URL cannot be written: make a clone of it",
                            canonical.display()
                        ),
                    ));
                }
                Ok(vellum_remote::open_since(&url, &self.options.remote, self.asked).await?.storage)
            });
        }
        let (writable, lock) = match purpose {
            Purpose::Write => (true, LockMode::Write),
            Purpose::Look => (false, LockMode::None),
            Purpose::Read if self.options.force_share => (false, LockMode::ForceShare),
            Purpose::Read | Purpose::Replay => (false, LockMode::Read),
        };
        // The path was checked, so exactly the file there must be opened: not the target of a link that was
        // created since.
        let is_wish = self.options.writes_direct && writable && !self.options.direct;
        let options = OpenOptions {
            writable,
            direct: self.options.direct || is_wish,
            never_flushed: self.options.never_flushed && writable,
            lock,
            without_links: true,
            ..OpenOptions::default()
        };
        Box::pin(async move {
            match File::open(canonical, options).await {
                Err(error) if is_wish && error.kind() == ErrorKind::Unsupported => {
                    Ok(File::open(canonical, options.direct(false)).await? as SharedStorage)
                }
                opened => Ok(opened? as SharedStorage),
            }
        })
    }

    fn stated_format(&self, canonical: &Path) -> Option<FormatKind> {
        // An export is a disk, and its guest may write anything to it.
        Url::of_path(canonical)?.ok().filter(is_nbd).map(|_| FormatKind::Raw)
    }

    fn identities(&self, paths: Vec<PathBuf>) -> LocalFuture<'_, Option<Vec<Identity>>> {
        // Each where calls for its own storage wait: one that does not answer takes no threads of another.
        let one = move |path: PathBuf| {
            Box::pin(async move {
                match Url::of_path(&path) {
                    Some(url) => {
                        self.options.asks_remote.store(true, Ordering::Release);
                        remote_identity(&url.ok()?, &self.options.remote, self.asked).await
                    }
                    None => unblock_at(&path.clone(), move || identity(&path)).await,
                }
            })
        };
        Box::pin(async move { join_all(paths.into_iter().map(one)).await.into_iter().collect() })
    }

    fn way(&self) -> u64 {
        let flags = u64::from(self.options.direct) | u64::from(self.options.force_share) << 1;
        // What is held for different times is not shared.
        flags | u64::try_from(self.options.remote.timeout.as_millis()).unwrap_or(u64::MAX >> 2) << 2
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

/// As [`Pool`]. Whoever opens an image sees whether it waits for a computation.
#[derive(Debug, Clone, Default)]
pub struct CountedPool(Arc<AtomicUsize>);

impl CountedPool {
    /// How many run, or are about to.
    pub fn running(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }
}

impl Offload for CountedPool {
    fn run(&self, job: Box<dyn FnOnce() + Send>) {
        struct Ends(Arc<AtomicUsize>);
        impl Drop for Ends {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::AcqRel);
            }
        }
        self.0.fetch_add(1, Ordering::AcqRel);
        let ends = Ends(self.0.clone());
        Pool.run(Box::new(move || {
            let _ends = ends;
            job();
        }));
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
