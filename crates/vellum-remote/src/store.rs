//! A store of objects: names and bytes, in a bucket of an S3-compatible service or in a directory.
//!
//! ```text
//!   s3://BUCKET/PREFIX      a bucket; where, and with which credentials, stands in the environment (settings.rs)
//!   file:///DIR             a directory that exists, such as one on NFS: an object is a file in it
//! ```
//!
//! 1. Any executor may poll the futures; the work is done on the runtime's threads.
//! 2. A read ends when nothing has arrived for the deadline of the settings (`silence.rs`); a link may be as slow as it
//!    is. Each other request ends within the deadline, retries included. What is worth retrying is retried with growing,
//!    random pauses.
//! 3. An object that was put is there whole or not at all, and it is durable when `put` returns. When the answer to an
//!    upload is lost, the store is asked whether it has the object before it is uploaded again.
//! 4. No object is read beyond the length that the caller allows.
//! 5. At most [`REQUESTS_MAX`] requests of one opened store are under way at once. One that does not answer takes no
//!    places of another.
//! 6. Errors name the object by its URL and say what to do about credentials (`store/answers.rs`). They have of a server's
//!    answer the code and the message, cut to a bound, and no header or secret.
//! 7. No request follows a redirect (`store/client.rs`): it has credentials with it.
//! 8. A request that is denied is tried once more with credentials that are fetched anew: they expire.

mod answers;
mod client;

use std::fmt;
use std::path::{Path as FsPath, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};
use std::{fs, io};

use bytes::Bytes;
use futures_util::future::TryFutureExt as _;
use futures_util::stream::BoxStream;
use futures_util::{StreamExt, TryStreamExt};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutPayload};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use vellum_core::{Context, Error, ErrorKind, Result};

use crate::base::ground::Real;
use crate::base::plan::pause;
use crate::credentials::Profile;
use crate::runtime::{blocking, job};
use crate::settings::Settings;
use crate::silence::{Failure, Ground as _, Heard, Parts, Patience, SILENCE_MAX};

pub(crate) use answers::{explain, is_denied, sent_away};
use answers::{kind_of, may_pass};
pub(crate) use client::{Client, bucket_store};

/// Bytes of an upload a second that are enough for it to end in time.
const UPLOAD_PACE_MIN: u64 = 32 << 10;

/// Requests to one store that are under way at once. More wait, within their deadline.
const REQUESTS_MAX: usize = 256;

/// A store, or the part of one under a prefix. Clones are the same store.
#[derive(Clone)]
pub struct Store(Arc<Inner>);

struct Inner {
    objects: Arc<dyn ObjectStore>,
    /// The same, which tries nothing again.
    uploads: Arc<dyn ObjectStore>,
    prefix: Path,
    url: String,
    /// Where it is, if it is a directory of this host.
    directory: Option<PathBuf>,
    deadline: Duration,
    /// What changes the deadline, if anything does.
    deadline_option: Option<&'static str>,
    profile: Option<Arc<Profile>>,
    under_way: Arc<Semaphore>,
    counts: Counters,
}

#[derive(Default)]
struct Counters {
    requests: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
}

/// What was asked of a store since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreCounts {
    /// Requests, retries not counted.
    pub requests: u64,
    /// Bytes of objects that were read.
    pub bytes_read: u64,
    /// Bytes of objects that were written.
    pub bytes_written: u64,
}

/// What a store knows of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectFacts {
    /// Its name below the store's prefix.
    pub key: String,
    /// Its length in bytes.
    pub len: u64,
    /// When it was written, by the clock of the store.
    pub modified: SystemTime,
}

/// The directories of a store that hold its objects.
const OWN: [&str; 3] = ["chunks", "index", "leases"];

/// `object_store` writes an object under its name, `#` and a number, and renames it; lists leave such names out.
fn forget_staged_in(directory: &FsPath, age: Duration) -> io::Result<()> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let kind = entry.file_type()?;
        let name = entry.file_name();
        let is_staged = name.to_str().and_then(|name| name.rsplit_once('#')).is_some_and(|(_, number)| {
            !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
        });
        if kind.is_dir() {
            forget_staged_in(&entry.path(), age)?;
        } else if kind.is_file()
            && is_staged
            && entry.metadata()?.modified()?.elapsed().is_ok_and(|its| its >= age)
        {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Whether a `put` may replace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    /// What was there is replaced.
    Replace,
    /// What was there is replaced by the same: the name stands for the content.
    OfContent,
    /// An object that is there stays.
    IfAbsent,
}

impl Store {
    /// Opens the store at a URL. No request is made yet.
    ///
    /// # Errors
    /// `Invalid` for a URL that names no store, `NotFound` for a directory or profile that does not exist.
    pub fn open(url: &str, settings: &Settings) -> Result<Self> {
        let location = Location::parse(url)?;
        let deadline = settings.deadline()?;
        type Objects = Arc<dyn ObjectStore>;
        let (objects, uploads, profile, prefix): (Objects, Objects, _, _) = match &location {
            Location::Bucket { bucket, prefix } => {
                let profile = match settings.get("AWS_ACCESS_KEY_ID") {
                    Some(_) => None,
                    None => Profile::find(settings)?.map(Arc::new),
                };
                let client = |client| {
                    bucket_store(bucket, settings, profile.clone(), client)
                        .context(|| format!("can't open the store {url}"))
                };
                let (reads, uploads) = (client(Client::Patient(deadline))?, client(Client::Once)?);
                (Arc::new(reads), Arc::new(uploads), profile, path_of(prefix)?)
            }
            Location::Directory(directory) => {
                let store = LocalFileSystem::new_with_prefix(directory).map_err(|error| {
                    let kind = kind_of(&error);
                    Error::new(
                        kind,
                        format!("{directory} is no directory that can be opened; create it first"),
                    )
                })?;
                let store = Arc::new(store.with_fsync(true));
                (store.clone(), store, None, Path::default())
            }
        };
        let directory = match &location {
            Location::Directory(directory) => Some(PathBuf::from(directory)),
            _ => None,
        };
        let url = url.trim_end_matches('/').to_owned();
        Ok(Self(Arc::new(Inner {
            objects,
            uploads,
            prefix,
            url,
            directory,
            deadline,
            deadline_option: settings.deadline_option(),
            profile,
            under_way: Arc::new(Semaphore::new(REQUESTS_MAX)),
            counts: Counters::default(),
        })))
    }

    /// Its URL, without credentials.
    pub fn url(&self) -> &str {
        &self.0.url
    }

    /// How long one request may take, or an object that is read may bring nothing.
    pub fn deadline(&self) -> Duration {
        self.0.deadline
    }

    /// What was asked of it until now.
    pub fn counts(&self) -> StoreCounts {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters { requests, bytes_read, bytes_written } = &self.0.counts;
        StoreCounts {
            requests: load(requests),
            bytes_read: load(bytes_read),
            bytes_written: load(bytes_written),
        }
    }

    /// The whole object. An object longer than `len_max` bytes is not read.
    ///
    /// # Errors
    /// `NotFound` when it does not exist, `Corrupt` when it is longer, `Io` when nothing of it arrives for the deadline.
    pub async fn get(&self, key: &str, len_max: u64) -> Result<Bytes> {
        let (store, key) = (self.clone(), key.to_owned());
        let read = job(async move {
            let ground = Real::new()?;
            let heard = Heard::at(ground.now());
            let patience = Patience {
                ground: &ground,
                timeout: store.0.deadline,
                heard: &heard,
                heard_any: &Heard::default(),
                failure: &Mutex::default(),
                repeated: &AtomicU64::new(0),
            };
            patience.whole(|| store.parts(&key, len_max)).await.map_err(|failure| match failure {
                Failure::Final(error) => error,
                Failure::Passing(error) => store.given_up(error),
            })
        });
        read?.await
    }

    /// The bytes of an object as they arrive.
    pub(crate) fn parts(&self, key: &str, len_max: u64) -> Parts {
        let (store, key) = (self.clone(), key.to_owned());
        let opened = async move {
            let path = store.path(&key).map_err(Failure::Final)?;
            store.0.counts.requests.fetch_add(1, Ordering::Relaxed);
            let turn =
                store.0.under_way.clone().acquire_owned().await.expect("the semaphore is never closed");
            let answer = match store.0.objects.get(&path).await {
                Err(error) if store.0.renews_after(&error).await => store.0.objects.get(&path).await,
                answer => answer,
            };
            let answer = answer.map_err(|error| store.failure(&key, &error))?;
            let len = answer.meta.size;
            let body = Body { store, key, len_max, len, left: len, parts: answer.into_stream(), _turn: turn };
            if len > len_max {
                return Err(Failure::Final(body.too_long()));
            }
            Ok(futures_util::stream::try_unfold(body, async |mut body: Body| {
                Ok(body.next().await?.map(|part| (part, body)))
            }))
        };
        Box::pin(opened.try_flatten_stream())
    }

    fn failure(&self, key: &str, error: &object_store::Error) -> Failure {
        let why = explain(error).context(format!("can't read {}", self.url_of(key)));
        // What a file system refuses, it refuses again.
        if self.0.directory.is_none() && may_pass(error) {
            Failure::Passing(why)
        } else {
            Failure::Final(why)
        }
    }

    /// Why a read has failed of which nothing has arrived for the deadline.
    pub(crate) fn given_up(&self, last: Error) -> Error {
        last.context(self.silent())
    }

    fn silent(&self) -> String {
        let option = self.0.deadline_option.map_or_else(String::new, |option| format!(" ({option})"));
        format!(
            "the store did not answer within {} s{option}; check the network and AWS_ENDPOINT_URL",
            self.0.deadline.as_secs()
        )
    }

    /// What the store knows of an object; nothing when it does not exist.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn head(&self, key: &str) -> Result<Option<ObjectFacts>> {
        let path = self.path(key)?;
        let found = self
            .request("look at", key, move |store| {
                let path = path.clone();
                async move { store.objects.head(&path).await }
            })
            .await;
        match found {
            Ok(meta) => Ok(Some(self.facts(meta))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes an object. False when it is there already and was to stay. It takes no longer than the deadline and what a link
    /// of [`UPLOAD_PACE_MIN`] needs.
    ///
    /// # Errors
    /// `NoSpace` when the store is full, `Refused` when it denies the request.
    pub async fn put(&self, key: &str, bytes: Bytes, how: Put) -> Result<bool> {
        let path = self.path(key)?;
        let len = bytes.len() as u64;
        let on_the_way = Duration::from_secs(len / UPLOAD_PACE_MIN);
        let all_tries = self.0.deadline + on_the_way;
        let one_try = match self.0.directory {
            Some(_) => all_tries,
            None => SILENCE_MAX.min(self.0.deadline / 2) + on_the_way,
        };
        let is_new = self
            .request_within(all_tries, "write", key, move |store| {
                let (path, bytes) = (path.clone(), bytes.clone());
                async move { store.upload(&path, &bytes, how, (one_try, all_tries)).await }
            })
            .await?;
        if is_new {
            self.0.counts.bytes_written.fetch_add(len, Ordering::Relaxed);
        }
        Ok(is_new)
    }

    /// The objects below a name, in no particular order. Reads at most `count_max` of them; false when there
    /// are more.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn list(&self, below: &str, count_max: usize) -> Result<(Vec<ObjectFacts>, bool)> {
        let path = self.path(below)?;
        let found = self
            .request("list", below, move |store| {
                let path = path.clone();
                repeated(store, move |store| {
                    let path = path.clone();
                    async move {
                        let mut found = Vec::new();
                        let mut listing = store.objects.list(Some(&path));
                        while let Some(meta) = listing.next().await {
                            found.push(meta?);
                            if found.len() > count_max {
                                break;
                            }
                        }
                        Ok(found)
                    }
                })
            })
            .await?;
        let is_all = found.len() <= count_max;
        Ok((found.into_iter().take(count_max).map(|meta| self.facts(meta)).collect(), is_all))
    }

    /// Deletes objects. An object that does not exist is no error.
    ///
    /// # Errors
    /// The first failure. The other objects may be deleted or not.
    pub async fn delete(&self, keys: &[String]) -> Result<()> {
        let Some(first) = keys.first() else { return Ok(()) };
        let paths = keys.iter().map(|key| self.path(key)).collect::<Result<Vec<_>>>()?;
        self.request("delete", first, move |store| {
            let paths = paths.clone();
            repeated(store, move |store| {
                let paths = paths.clone();
                async move {
                    let paths = futures_util::stream::iter(paths.into_iter().map(Ok)).boxed();
                    let mut deleted = store.objects.delete_stream(paths);
                    while let Some(one) = deleted.next().await {
                        match one {
                            Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
                            Err(error) => return Err(error),
                        }
                    }
                    Ok(())
                }
            })
        })
        .await
    }

    /// Deletes what writers that were killed have left of objects in a directory, if it is at least this old.
    ///
    /// # Errors
    /// Those of the directory.
    pub(crate) async fn forget_staged(&self, age: Duration) -> Result<()> {
        let Some(directory) = self.0.directory.clone() else { return Ok(()) };
        let context = format!("can't clean up {}", directory.display());
        let work = move || OWN.iter().try_for_each(|own| forget_staged_in(&directory.join(own), age));
        blocking(work)?.await.context(|| context)
    }

    /// The URL of an object, for messages.
    pub fn url_of(&self, key: &str) -> String {
        format!("{}/{key}", self.0.url)
    }

    fn path(&self, key: &str) -> Result<Path> {
        let path = path_of(key)?;
        Ok(Path::from_iter(self.0.prefix.parts().chain(path.parts())))
    }

    fn facts(&self, meta: object_store::ObjectMeta) -> ObjectFacts {
        let full = meta.location.as_ref();
        let below = full.strip_prefix(self.0.prefix.as_ref()).unwrap_or(full);
        ObjectFacts {
            key: below.trim_start_matches('/').to_owned(),
            len: meta.size,
            modified: meta.last_modified.into(),
        }
    }

    /// Does a request on the runtime, within the deadline, and once more if it was denied.
    async fn request<T, F>(
        &self,
        what: &'static str,
        key: &str,
        ask: impl Fn(Arc<Inner>) -> F + Send + Sync + 'static,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = object_store::Result<T>> + Send,
    {
        self.request_within(self.0.deadline, what, key, ask).await
    }

    async fn request_within<T, F>(
        &self,
        deadline: Duration,
        what: &'static str,
        key: &str,
        ask: impl Fn(Arc<Inner>) -> F + Send + Sync + 'static,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = object_store::Result<T>> + Send,
    {
        self.0.counts.requests.fetch_add(1, Ordering::Relaxed);
        let inner = self.0.clone();
        let answer = job(async move {
            tokio::time::timeout(deadline, async {
                let _turn = inner.under_way.acquire().await.expect("the semaphore is never closed");
                match ask(inner.clone()).await {
                    Err(error) if inner.renews_after(&error).await => ask(inner.clone()).await,
                    answer => answer,
                }
            })
            .await
        })?
        .await;
        let context = || format!("can't {what} {}", self.url_of(key));
        match answer {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => Err(explain(&error)).context(context),
            Err(_) => Err(Error::new(ErrorKind::Io, self.silent())).context(context),
        }
    }
}

/// Asks again, within the deadline, where an answer has begun and its body breaks off: the client repeats only a request that had
/// no answer.
async fn repeated<T, F>(inner: Arc<Inner>, ask: impl Fn(Arc<Inner>) -> F + Send) -> object_store::Result<T>
where
    F: Future<Output = object_store::Result<T>> + Send,
{
    let began = Instant::now();
    let mut tries = 0;
    loop {
        let error = match ask(inner.clone()).await {
            Err(error) if inner.directory.is_none() && may_pass(&error) => error,
            answer => return answer,
        };
        let pause = pause(tries, fastrand::u64(..));
        if began.elapsed() + pause >= inner.deadline {
            return Err(error);
        }
        tokio::time::sleep(pause).await;
        tries += 1;
    }
}

impl Inner {
    /// Whether other credentials may help: they expire.
    async fn renews_after(&self, error: &object_store::Error) -> bool {
        match &self.profile {
            Some(profile) if is_denied(error) => {
                profile.forget().await;
                true
            }
            _ => false,
        }
    }

    /// Uploads an object until the store says that it has it, or that it will not. `one_try` and `all_tries` are how long
    /// these may take.
    async fn upload(
        &self,
        path: &Path,
        bytes: &Bytes,
        how: Put,
        (one_try, all_tries): (Duration, Duration),
    ) -> object_store::Result<bool> {
        let mode = || match how {
            Put::Replace | Put::OfContent => PutMode::Overwrite,
            Put::IfAbsent => PutMode::Create,
        };
        let began = Instant::now();
        // An answer was lost, so the object may be there.
        let mut is_doubtful = false;
        let mut tries = 0;
        loop {
            let put = self.uploads.put_opts(path, PutPayload::from_bytes(bytes.clone()), mode().into());
            let (error, may_be_there) = match tokio::time::timeout(one_try, put).await {
                Ok(Ok(_)) => return Ok(true),
                Ok(Err(object_store::Error::AlreadyExists { .. })) => {
                    return Ok(is_doubtful && self.has(path, bytes, true).await?);
                }
                Ok(Err(error)) => {
                    let is_clear = self.directory.is_some() || kind_of(&error) == ErrorKind::NoSpace;
                    let may_be_there = !is_clear && may_pass(&error);
                    (error, may_be_there)
                }
                Err(_) => {
                    let source = format!("no answer within {} s", one_try.as_secs()).into();
                    (object_store::Error::Generic { store: "S3", source }, true)
                }
            };
            let pause = pause(tries, fastrand::u64(..));
            if !may_be_there || began.elapsed() + pause >= all_tries {
                return Err(error);
            }
            is_doubtful = true;
            tokio::time::sleep(pause).await;
            tries += 1;
            // What is replaced without regard to what it is may be an earlier one.
            if how != Put::Replace && self.has(path, bytes, how == Put::IfAbsent).await? {
                return Ok(true);
            }
        }
    }

    /// Whether the store has an object of this length, and of this content if that is to be compared.
    async fn has(&self, path: &Path, bytes: &Bytes, compares: bool) -> object_store::Result<bool> {
        let found = match self.objects.head(path).await {
            Err(object_store::Error::NotFound { .. }) => return Ok(false),
            found => found?,
        };
        if found.size != bytes.len() as u64 || !compares {
            return Ok(found.size == bytes.len() as u64);
        }
        Ok(self.objects.get(path).await?.bytes().await? == *bytes)
    }
}

/// The body of an answer, which takes a place of the store until its end.
struct Body {
    store: Store,
    key: String,
    len_max: u64,
    len: u64,
    /// Bytes of it that have not come yet.
    left: u64,
    parts: BoxStream<'static, object_store::Result<Bytes>>,
    _turn: OwnedSemaphorePermit,
}

impl Body {
    /// Its next bytes; `None` after its end.
    async fn next(&mut self) -> std::result::Result<Option<Bytes>, Failure> {
        let next = self.parts.try_next().await.map_err(|error| self.store.failure(&self.key, &error))?;
        match next {
            Some(part) => {
                self.left = match self.left.checked_sub(part.len() as u64) {
                    Some(left) => left,
                    None => return Err(Failure::Final(self.too_long())),
                };
                self.store.0.counts.bytes_read.fetch_add(part.len() as u64, Ordering::Relaxed);
                Ok(Some(part))
            }
            None if self.left > 0 => {
                let url = self.store.url_of(&self.key);
                let why = format!("{url}: only {} of its {} bytes came", self.len - self.left, self.len);
                Err(Failure::Passing(Error::new(ErrorKind::Io, why)))
            }
            None => Ok(None),
        }
    }

    fn too_long(&self) -> Error {
        let url = self.store.url_of(&self.key);
        Error::corrupt(format!("{url} is longer than the {} bytes it may have", self.len_max))
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Store").field(&self.0.url).finish()
    }
}

/// Where a store is.
#[derive(Debug, PartialEq, Eq)]
enum Location {
    Bucket { bucket: String, prefix: String },
    Directory(String),
}

impl Location {
    fn parse(url: &str) -> Result<Self> {
        let bad = |why: &str| Error::invalid(format!("{url:?} is not the URL of a store: {why}"));
        if url.chars().any(char::is_control) {
            return Err(bad("it contains control characters"));
        }
        if let Some(rest) = url.strip_prefix("s3://") {
            if rest.contains(['?', '#', '@']) {
                return Err(bad(
                    "`?`, `#` and `@` have no place in it; credentials stand in the environment",
                ));
            }
            let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
            if bucket.is_empty() {
                return Err(bad("it names no bucket; write s3://BUCKET/PREFIX"));
            }
            return Ok(Self::Bucket { bucket: bucket.into(), prefix: prefix.trim_matches('/').into() });
        }
        match url.strip_prefix("file://") {
            Some(directory) if directory.starts_with('/') => Ok(Self::Directory(directory.into())),
            Some(_) => Err(bad("write file:///DIR, with three slashes")),
            None => Err(bad("it begins with neither s3:// nor file://")),
        }
    }
}

fn path_of(key: &str) -> Result<Path> {
    Path::parse(key).map_err(|error| Error::invalid(format!("{key:?} cannot name an object: {error}")))
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;

    use super::*;

    #[test]
    fn urls_name_a_bucket_or_a_directory() {
        let bucket =
            |bucket: &str, prefix: &str| Location::Bucket { bucket: bucket.into(), prefix: prefix.into() };
        assert_eq!(Location::parse("s3://b").expect("a bucket"), bucket("b", ""));
        assert_eq!(Location::parse("s3://b/a/c/").expect("a prefix"), bucket("b", "a/c"));
        assert_eq!(Location::parse("file:///srv/x").expect("a path"), Location::Directory("/srv/x".into()));
        for bad in ["", "s3://", "s3:///x", "file://x", "http://x/y", "s3://k:s@b", "s3://b/x?y", "s3://b\n"]
        {
            assert_eq!(Location::parse(bad).expect_err(bad).kind(), ErrorKind::Invalid, "{bad}");
        }
    }

    #[test]
    fn a_directory_is_a_store() {
        let directory = crate::tests::Directory::new("store");
        let store = directory.store();
        block_on(async {
            assert!(store.put("a/b", Bytes::from_static(b"one"), Put::IfAbsent).await.expect("writes"));
            assert!(!store.put("a/b", Bytes::from_static(b"two"), Put::IfAbsent).await.expect("is there"));
            assert_eq!(store.get("a/b", 3).await.expect("reads"), "one");
            assert_eq!(store.get("a/b", 2).await.expect_err("too long").kind(), ErrorKind::Corrupt);
            assert!(store.put("a/b", Bytes::from_static(b"two"), Put::Replace).await.expect("writes"));
            assert_eq!(store.get("a/b", 3).await.expect("reads"), "two");
            assert_eq!(store.head("a/b").await.expect("looks").expect("is there").len, 3);
            assert_eq!(store.head("a/x").await.expect("looks"), None);
            assert!(store.put("a/c", Bytes::new(), Put::Replace).await.expect("writes"));
            let (mut found, is_all) = store.list("a", 10).await.expect("lists");
            found.sort_by(|one, other| one.key.cmp(&other.key));
            assert_eq!(found.iter().map(|facts| facts.key.as_str()).collect::<Vec<_>>(), ["a/b", "a/c"]);
            assert!(is_all);
            assert!(!store.list("a", 1).await.expect("lists").1, "there are more");
            store.delete(&["a/b".into(), "a/x".into()]).await.expect("deletes");
            assert_eq!(store.get("a/b", 3).await.expect_err("gone").kind(), ErrorKind::NotFound);
            for bad in ["../x", "a//b", "a/../b"] {
                assert_eq!(store.get(bad, 3).await.expect_err(bad).kind(), ErrorKind::Invalid, "{bad}");
            }
        });
        let counts = store.counts();
        assert_eq!((counts.bytes_read, counts.bytes_written), (6, 6));
    }

    #[test]
    fn a_store_that_does_not_answer_takes_no_places_of_another() {
        let directory = crate::tests::Directory::new("places");
        let (stalled, healthy) = (directory.store(), directory.store());
        // As many requests as ever are under way. The first of them has taken its place when the last one has been made.
        let never = |_: Arc<Inner>| std::future::pending::<object_store::Result<()>>();
        let mut waiting: Vec<_> =
            (0..REQUESTS_MAX).map(|_| Box::pin(stalled.request("read", "x", never))).collect();
        block_on(async {
            for one in &mut waiting {
                assert!(futures_lite::future::poll_once(one).await.is_none());
            }
        });
        while stalled.0.under_way.available_permits() > 0 {
            std::thread::yield_now();
        }
        block_on(async {
            assert!(healthy.put("a", Bytes::from_static(b"one"), Put::Replace).await.expect("writes"));
            assert_eq!(healthy.get("a", 3).await.expect("reads"), "one");
        });
    }

    #[test]
    fn a_directory_that_is_not_there_is_not_made() {
        let error = Store::open("file:///nonexistent/x", &Settings::default()).expect_err("is not there");
        assert!(error.chain().contains("create it first"), "{}", error.chain());
    }
}
