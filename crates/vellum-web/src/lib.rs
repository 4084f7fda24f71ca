//! A web and object server for tests and figures, which fails as it is asked to.
//!
//! ```text
//!   GET, HEAD     objects; Range, If-Match, strong entity tags       http.rs  one request and its answer
//!   PUT, DELETE   If-None-Match: *, multipart uploads                s3.rs    what S3 adds: listing, uploads, bulk deletion
//!   faults        one for each of the next reads, or for all; for uploads, after the object is stored
//!   a model       latency of each answer, bandwidth of all together
//! ```
//!
//! One thread accepts, and each connection has a thread. That is simple, and enough for tests: a stalled answer holds up
//! its own connection only.
//!
//! 1. Faults concern reads of objects, uploads to paths that are named, or other requests by their method, so that a script counts requests that a test can
//!    foresee.
//! 2. Nothing is checked of a signature but that it is there, and whose it is.
//! 3. The server ends when its last handle is dropped; connections that stall then end, too.

#![forbid(unsafe_code)]

mod http;
mod message;
mod s3;

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// What goes wrong with one read of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// This status, with a short text.
    Status(u16),
    /// The answer begins this much later.
    Late(Duration),
    /// No answer, until the server ends or [`Server::release`] is called.
    Stall,
    /// Half of the body, then nothing, as above.
    StallHalfway,
    /// The connection is reset before the answer.
    Reset,
    /// The connection is closed after half of the body.
    Short,
    /// As many bytes, but others.
    OtherBytes,
    /// Another entity tag, and no attention to `If-Match`.
    OtherTag,
    /// The range is ignored: the whole object, status 200.
    Whole,
    /// A `Content-Range` that is not the one that was asked for.
    OtherRange,
    /// A redirect to this URL.
    Redirect(String),
    /// The answer says that its body is encoded in this way.
    Encoded(&'static str),
}

/// How fast the server is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Speed {
    /// Before each answer.
    pub latency: Duration,
    /// Of all bodies together, in bytes a second; as fast as it can when zero.
    pub bytes_per_second: u64,
}

/// What was asked of the server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// All requests.
    pub requests: u64,
    /// Of these, reads of objects.
    pub reads: u64,
    /// Bytes of bodies that were sent.
    pub bytes_sent: u64,
    /// Bytes of objects that were stored.
    pub bytes_stored: u64,
}

/// A request, as it came in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// The method.
    pub method: String,
    /// The path, decoded, without the query.
    pub path: String,
    /// The first and the last byte of the range, if one was asked for.
    pub range: Option<(u64, u64)>,
    /// The condition.
    pub if_match: Option<String>,
}

#[derive(Clone)]
enum Content {
    Memory(Arc<Vec<u8>>),
    File(Arc<File>, u64),
}

#[derive(Clone)]
struct Object {
    content: Content,
    /// With its quotes; empty for none.
    tag: String,
    stored: Instant,
    /// Of a server that keeps versions.
    version: Option<String>,
}

impl Object {
    fn new(bytes: Vec<u8>) -> Self {
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        let tag = format!("\"{:016x}-{:x}\"", hasher.finish(), bytes.len());
        Self { content: Content::Memory(Arc::new(bytes)), tag, stored: Instant::now(), version: None }
    }

    fn len(&self) -> u64 {
        match &self.content {
            Content::Memory(bytes) => bytes.len() as u64,
            Content::File(_, len) => *len,
        }
    }

    fn read(&self, at: u64, len: u64) -> io::Result<Vec<u8>> {
        let start = usize::try_from(at).expect("tests have 64 bits");
        let count = usize::try_from(len).expect("tests have 64 bits");
        match &self.content {
            Content::Memory(bytes) => Ok(bytes[start..start + count].to_vec()),
            Content::File(file, _) => {
                let mut bytes = vec![0; count];
                std::os::unix::fs::FileExt::read_exact_at(&**file, &mut bytes, at)?;
                Ok(bytes)
            }
        }
    }
}

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Object>,
    /// All versions of all objects, by path and version, of a server that keeps them.
    versions: Option<BTreeMap<(String, String), Object>>,
    uploads: BTreeMap<String, BTreeMap<u32, Vec<u8>>>,
    next: VecDeque<Fault>,
    always: Option<Fault>,
    /// For requests with this method that are neither reads of objects nor uploads.
    others_next: Vec<(&'static str, Fault)>,
    /// For uploads to paths that contain this.
    uploads_next: Vec<(String, Fault)>,
    log: Vec<Asked>,
    key: Option<String>,
    speed: Speed,
    /// When the line is free again.
    free_at: Option<Instant>,
    uploads_begun: u64,
}

impl State {
    fn store(&mut self, path: &str, mut object: Object) {
        if let Some(versions) = &mut self.versions {
            let version = format!("version.{}", versions.len() + 1);
            object.version = Some(version.clone());
            versions.insert((path.to_owned(), version), object.clone());
        }
        self.objects.insert(path.to_owned(), object);
    }
}

struct Shared {
    address: SocketAddr,
    state: Mutex<State>,
    ends: AtomicBool,
    is_down: AtomicBool,
    releases: AtomicU64,
    requests: AtomicU64,
    reads: AtomicU64,
    bytes_sent: AtomicU64,
    bytes_stored: AtomicU64,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the server ends, goes down, or stalled requests are released.
    fn stall(&self) {
        let before = self.releases.load(Ordering::Acquire);
        while !self.is_closed() && self.releases.load(Ordering::Acquire) == before {
            thread::sleep(Duration::from_millis(2));
        }
    }

    fn is_closed(&self) -> bool {
        self.ends.load(Ordering::Acquire) || self.is_down.load(Ordering::Acquire)
    }

    fn fault(&self) -> Fault {
        let mut state = self.state();
        state.next.pop_front().or_else(|| state.always.clone()).unwrap_or(Fault::None)
    }

    fn fault_of_upload(&self, path: &str) -> Fault {
        let mut state = self.state();
        let place = state.uploads_next.iter().position(|(part, _)| path.contains(part.as_str()));
        place.map_or(Fault::None, |place| state.uploads_next.remove(place).1)
    }

    fn fault_of_other(&self, method: &str) -> Fault {
        let mut state = self.state();
        let place = state.others_next.iter().position(|(its, _)| *its == method);
        place.map_or(Fault::None, |place| state.others_next.remove(place).1)
    }

    /// When so many bytes have gone over the line that all answers share.
    fn take_line(&self, len: u64) {
        let until = {
            let mut state = self.state();
            if state.speed.bytes_per_second == 0 {
                return;
            }
            let takes = Duration::from_secs_f64(len as f64 / state.speed.bytes_per_second as f64);
            let until = state.free_at.map_or_else(Instant::now, |at| at.max(Instant::now())) + takes;
            state.free_at = Some(until);
            until
        };
        thread::sleep(until.saturating_duration_since(Instant::now()));
    }
}

/// A server, on a port of this host. Clones are the same server.
#[derive(Clone)]
pub struct Server(Arc<Handle>);

struct Handle(Arc<Shared>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.ends.store(true, Ordering::Release);
        // Wakes the thread that accepts.
        drop(TcpStream::connect(self.0.address));
    }
}

impl Default for Server {
    fn default() -> Self {
        Self::start()
    }
}

impl Server {
    /// Starts a server on a free port.
    ///
    /// # Panics
    /// When there is none.
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let shared = Arc::new(Shared {
            address,
            state: Mutex::default(),
            ends: AtomicBool::new(false),
            is_down: AtomicBool::new(false),
            releases: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            bytes_sent: AtomicU64::new(0),
            bytes_stored: AtomicU64::new(0),
        });
        let accepting = shared.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                if accepting.ends.load(Ordering::Acquire) {
                    return;
                }
                let (Ok(stream), false) = (stream, accepting.is_down.load(Ordering::Acquire)) else {
                    continue;
                };
                let shared = accepting.clone();
                thread::spawn(move || http::serve(&shared, stream));
            }
        });
        Self(Arc::new(Handle(shared)))
    }

    fn shared(&self) -> &Shared {
        &self.0.0
    }

    /// Host and port.
    pub fn address(&self) -> SocketAddr {
        self.shared().address
    }

    /// The URL of a path that begins with a slash.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address())
    }

    /// Puts an object there; what was there is replaced, and has another entity tag unless the bytes are equal.
    pub fn put(&self, path: &str, bytes: Vec<u8>) {
        self.shared().state().store(path, Object::new(bytes));
    }

    /// From now on it keeps a version of each object that is put there, as a bucket of S3 may: `version.1`, `version.2` and
    /// so on, over all objects.
    pub fn keep_versions(&self) {
        self.shared().state().versions.get_or_insert_default();
    }

    /// Puts a file there. It must not change meanwhile.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn put_file(&self, path: &str, file: &Path) -> io::Result<()> {
        let opened = File::open(file)?;
        let len = opened.metadata()?.len();
        let tag = format!(
            "\"{:x}-{len:x}\"",
            opened.metadata()?.modified()?.elapsed().map_or(0, |age| age.as_nanos())
        );
        let content = Content::File(Arc::new(opened), len);
        self.shared()
            .state()
            .objects
            .insert(path.to_owned(), Object { content, tag, stored: Instant::now(), version: None });
        Ok(())
    }

    /// Puts all files of a directory below a path.
    ///
    /// # Errors
    /// When one cannot be opened.
    pub fn put_files(&self, below: &str, directory: &Path) -> io::Result<()> {
        for entry in std::fs::read_dir(directory)? {
            let file: PathBuf = entry?.path();
            if let Some(name) = file.file_name().and_then(|name| name.to_str()).filter(|_| file.is_file()) {
                self.put_file(&format!("{below}/{name}"), &file)?;
            }
        }
        Ok(())
    }

    /// Gives an object this entity tag, as it stands in the header: weak, or none at all when it is empty.
    ///
    /// # Panics
    /// When there is no such object.
    pub fn set_tag(&self, path: &str, tag: &str) {
        self.shared().state().objects.get_mut(path).expect("the object is there").tag = tag.to_owned();
    }

    /// The bytes of an object.
    pub fn get(&self, path: &str) -> Option<Vec<u8>> {
        let object = self.shared().state().objects.get(path).cloned()?;
        object.read(0, object.len()).ok()
    }

    /// Removes an object. Whether there was one.
    pub fn delete(&self, path: &str) -> bool {
        self.shared().state().objects.remove(path).is_some()
    }

    /// The paths of all objects.
    pub fn paths(&self) -> Vec<String> {
        self.shared().state().objects.keys().cloned().collect()
    }

    /// What goes wrong with the next reads, one each.
    pub fn next(&self, faults: &[Fault]) {
        self.shared().state().next.extend(faults.iter().cloned());
    }

    /// What goes wrong with the next uploads to paths that contain this, one each, after the object is stored.
    pub fn next_uploads(&self, part_of_path: &str, faults: &[Fault]) {
        let faults = faults.iter().map(|fault| (part_of_path.to_owned(), fault.clone()));
        self.shared().state().uploads_next.extend(faults);
    }

    /// What goes wrong with the next requests of this method that are neither reads of objects nor uploads, such as listings
    /// (`GET`), one each.
    pub fn next_others(&self, method: &'static str, faults: &[Fault]) {
        self.shared().state().others_next.extend(faults.iter().map(|fault| (method, fault.clone())));
    }

    /// What goes wrong with each read for which nothing else was said.
    pub fn always(&self, fault: Fault) {
        self.shared().state().always = Some(fault).filter(|fault| *fault != Fault::None);
    }

    /// Lets stalled requests end: their connections are closed.
    pub fn release(&self) {
        self.shared().releases.fetch_add(1, Ordering::AcqRel);
    }

    /// While it is down, connections are closed at once.
    pub fn set_down(&self, is_down: bool) {
        self.shared().is_down.store(is_down, Ordering::Release);
    }

    /// Requests must be signed by this key; the others are denied. The signature itself is not checked.
    pub fn require_key(&self, key: Option<&str>) {
        self.shared().state().key = key.map(str::to_owned);
    }

    /// Makes it as fast as this.
    pub fn set_speed(&self, speed: Speed) {
        self.shared().state().speed = speed;
    }

    /// What was asked so far.
    pub fn counts(&self) -> Counts {
        let shared = self.shared();
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            requests: load(&shared.requests),
            reads: load(&shared.reads),
            bytes_sent: load(&shared.bytes_sent),
            bytes_stored: load(&shared.bytes_stored),
        }
    }

    /// Each request so far, in the order in which they came.
    pub fn log(&self) -> Vec<Asked> {
        self.shared().state().log.clone()
    }
}
