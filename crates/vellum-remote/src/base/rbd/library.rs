//! Ceph's libraries, loaded when the first image of a cluster is opened. All `unsafe` of this crate is here.
//!
//! ```text
//!   Library      the functions of librados.so.2 and librbd.so.1
//!   Cluster      one connection, shared by the images of this process
//!   Image        one snapshot, or image, open for reading only
//!   Flight       one read: its memory belongs to the library until it calls `landed`
//! ```
//!
//! 1. The memory of a read is owned by its [`Flight`], and that by the library from the call of `rbd_aio_read` on until it
//!    calls back, also when nobody waits for the read any more. So no time limit leaves memory to a library that writes.
//! 2. A flight holds its image, and an image its cluster: nothing is closed under a read.
//! 3. Opening and closing wait for the network: the first is done on a thread of its own by the caller, the second by what
//!    is dropped here.
//! 4. The libraries are never unloaded: threads of theirs may run.
//! 5. No key passes through here: the library reads them from the files that its configuration names.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use libloading::Library as Loaded;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use vellum_core::{Error, Result, lock};

/// A handle of the library.
type Handle = NonNull<c_void>;
type Pointer = *mut c_void;
type Callback = unsafe extern "C" fn(Pointer, Pointer);

/// Declares the functions that are used, and how they are found.
macro_rules! functions {
    ($($library:ident { $($name:ident($($argument:ty),*) $(-> $value:ty)?;)* })*) => {
        struct Library {
            $($($name: unsafe extern "C" fn($($argument),*) $(-> $value)?,)*)*
        }

        impl Library {
            /// The functions of the libraries, which are not unloaded.
            fn find($($library: &'static Loaded),*) -> std::result::Result<Self, libloading::Error> {
                $($(
                    // SAFETY: the type is that of the function in rados/librados.h and rbd/librbd.h, which does not
                    // change while the number of the library (2, 1) is the same.
                    let $name = *unsafe {
                        $library.get::<unsafe extern "C" fn($($argument),*) $(-> $value)?>(
                            concat!(stringify!($name), "\0").as_bytes(),
                        )
                    }?;
                )*)*
                Ok(Self { $($($name,)*)* })
            }
        }
    };
}

functions! {
    rados {
        rados_create(*mut Pointer, *const c_char) -> c_int;
        rados_conf_read_file(Pointer, *const c_char) -> c_int;
        rados_conf_parse_env(Pointer, *const c_char) -> c_int;
        rados_conf_set(Pointer, *const c_char, *const c_char) -> c_int;
        rados_connect(Pointer) -> c_int;
        rados_shutdown(Pointer);
        rados_cluster_fsid(Pointer, *mut c_char, usize) -> c_int;
        rados_ioctx_create(Pointer, *const c_char, *mut Pointer) -> c_int;
        rados_ioctx_set_namespace(Pointer, *const c_char);
        rados_ioctx_get_id(Pointer) -> i64;
        rados_ioctx_destroy(Pointer);
    }
    rbd {
        rbd_open_read_only(Pointer, *const c_char, *mut Pointer, *const c_char) -> c_int;
        rbd_close(Pointer) -> c_int;
        rbd_get_size(Pointer, *mut u64) -> c_int;
        rbd_get_id(Pointer, *mut c_char, usize) -> c_int;
        rbd_snap_get_id(Pointer, *const c_char, *mut u64) -> c_int;
        rbd_snap_is_protected(Pointer, *const c_char, *mut c_int) -> c_int;
        rbd_aio_create_completion(Pointer, Callback, *mut Pointer) -> c_int;
        rbd_aio_read(Pointer, u64, usize, *mut c_char, Pointer) -> c_int;
        rbd_aio_get_return_value(Pointer) -> isize;
        rbd_aio_release(Pointer);
    }
}

impl Library {
    /// Loads the libraries, unless they are.
    fn get() -> Result<&'static Self> {
        static LIBRARY: OnceLock<Library> = OnceLock::new();
        static LOADING: Mutex<()> = Mutex::new(());
        let _alone = lock(&LOADING);
        if let Some(library) = LIBRARY.get() {
            return Ok(library);
        }
        let load = |name: &str| {
            // SAFETY: initialising Ceph's libraries has no requirements; nothing of them is unloaded (rule 4).
            let loaded = unsafe { Loaded::new(name) };
            loaded.map(|loaded| &*Box::leak(Box::new(loaded))).map_err(|error| absent(&error))
        };
        let (rados, rbd) = (load("librados.so.2")?, load("librbd.so.1")?);
        let found = Self::find(rados, rbd).map_err(|error| absent(&error))?;
        Ok(LIBRARY.get_or_init(|| found))
    }
}

fn absent(error: &libloading::Error) -> Error {
    Error::unsupported(format!(
        "images of Ceph clusters need Ceph's library librbd.so.1: install it (Debian's package is librbd1): {error}"
    ))
}

/// Fails for a negative answer, which is an error number.
fn checked(answer: c_int, what: &str) -> Result<()> {
    match answer {
        0.. => Ok(()),
        number => Err(failed(number, what)),
    }
}

/// The error with this negative number.
pub(super) fn failed(number: c_int, what: &str) -> Error {
    Error::io(std::io::Error::from_raw_os_error(number.saturating_neg()), what.to_owned())
}

fn text(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::invalid("a name has a zero byte"))
}

fn read_text(bytes: &[u8]) -> String {
    CStr::from_bytes_until_nul(bytes).unwrap_or_default().to_string_lossy().into_owned()
}

fn handle(pointer: Pointer, what: &str) -> Result<Handle> {
    NonNull::new(pointer).ok_or_else(|| Error::io(std::io::ErrorKind::Other.into(), what.to_owned()))
}

/// How a cluster is connected to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Login {
    /// The user, without `client.`.
    pub(super) user: String,
    /// Connecting takes at most this long.
    pub(super) connect: Duration,
    /// The cluster has this long for an operation.
    pub(super) operation: Duration,
}

/// A connection to a cluster.
pub(super) struct Cluster {
    library: &'static Library,
    rados: Handle,
    fsid: String,
}

// SAFETY: librados and librbd lock what their handles lead to ("thread-safe" in their headers).
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

impl Cluster {
    /// Connects to the cluster of the configuration (`CEPH_CONF`, else `/etc/ceph/ceph.conf` and Ceph's other places).
    /// Waits for the network.
    pub(super) fn connect(login: &Login) -> Result<Self> {
        let library = Library::get()?;
        let user = text(&login.user)?;
        let mut rados = std::ptr::null_mut();
        // SAFETY: the arguments are a place for the handle and a text that ends with zero.
        let answer = unsafe { (library.rados_create)(&raw mut rados, user.as_ptr()) };
        checked(answer, "can't use Ceph's library")?;
        let rados = handle(rados, "Ceph's library gave no connection")?;
        let mut cluster = Self { library, rados, fsid: String::new() };
        // SAFETY: a handle that was just made; without a path, the library takes the usual files.
        let answer = unsafe { (library.rados_conf_read_file)(rados.as_ptr(), std::ptr::null()) };
        checked(
            answer,
            "can't read Ceph's configuration: CEPH_CONF names it, otherwise it is /etc/ceph/ceph.conf",
        )?;
        // SAFETY: as above; without a name, the library takes CEPH_ARGS.
        let answer = unsafe { (library.rados_conf_parse_env)(rados.as_ptr(), std::ptr::null()) };
        checked(answer, "can't use what CEPH_ARGS says")?;
        let seconds = |time: Duration| time.as_secs().max(1).to_string();
        for (name, value) in [
            ("client_mount_timeout", seconds(login.connect)),
            ("rados_mon_op_timeout", seconds(login.connect)),
            ("rados_osd_op_timeout", seconds(login.operation)),
        ] {
            let (name, value) = (text(name)?, text(&value)?);
            // SAFETY: a handle that is not connected yet, and two texts that end with zero.
            let answer = unsafe { (library.rados_conf_set)(rados.as_ptr(), name.as_ptr(), value.as_ptr()) };
            checked(answer, "can't set a time limit of Ceph's library")?;
        }
        // SAFETY: a handle that is configured and not connected.
        let answer = unsafe { (library.rados_connect)(rados.as_ptr()) };
        checked(answer, &format!("can't connect to the Ceph cluster as client.{}", login.user))?;
        let mut fsid = [0_u8; 64];
        // SAFETY: the handle is connected; the library writes at most the number of bytes that is passed to it.
        let answer =
            unsafe { (library.rados_cluster_fsid)(rados.as_ptr(), fsid.as_mut_ptr().cast(), fsid.len() - 1) };
        checked(answer, "the cluster does not say which one it is")?;
        cluster.fsid = read_text(&fsid);
        Ok(cluster)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let (library, rados) = (self.library, SendPointer(self.rados));
        closing(move || {
            let SendPointer(rados) = { rados };
            // SAFETY: the handle is dropped once, after the images, which hold the cluster.
            unsafe { (library.rados_shutdown)(rados.as_ptr()) }
        });
    }
}

/// A handle on its way to the thread that closes it.
struct SendPointer(Handle);

// SAFETY: the handles of these libraries may be used on any thread.
unsafe impl Send for SendPointer {}

/// What is open: its name, as `rbd` takes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) pool: String,
    pub(super) namespace: Option<String>,
    pub(super) image: String,
    pub(super) snapshot: Option<String>,
}

/// What the cluster says of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ImageFacts {
    /// In bytes.
    pub(super) size: u64,
    /// Which one it is: cluster, pool, image, and the number of the snapshot; without a snapshot there is none.
    pub(super) snapshot: Option<String>,
    /// The snapshot cannot be deleted.
    pub(super) is_protected: bool,
}

/// An image that is open for reading.
pub(super) struct Image {
    cluster: Arc<Cluster>,
    pool: Handle,
    rbd: Handle,
}

// SAFETY: as for `Cluster`.
unsafe impl Send for Image {}
// SAFETY: as for `Cluster`.
unsafe impl Sync for Image {}

/// A pool that is open, until an image takes it.
struct Pool<'a>(&'a Library, Handle);

impl Drop for Pool<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle is used by nothing else: what takes it forgets this.
        unsafe { (self.0.rados_ioctx_destroy)(self.1.as_ptr()) }
    }
}

impl Image {
    /// Opens an image. Waits for the network.
    pub(super) fn open(cluster: &Arc<Cluster>, place: &Place) -> Result<(Self, ImageFacts)> {
        let library = cluster.library;
        let pool_name = text(&place.pool)?;
        let mut pointer = std::ptr::null_mut();
        // SAFETY: the cluster is connected; a text that ends with zero, and a place for the handle.
        let answer = unsafe {
            (library.rados_ioctx_create)(cluster.rados.as_ptr(), pool_name.as_ptr(), &raw mut pointer)
        };
        checked(answer, &format!("can't open the pool {}", place.pool))?;
        let pool = Pool(library, handle(pointer, "Ceph's library gave no pool")?);
        if let Some(namespace) = &place.namespace {
            let namespace = text(namespace)?;
            // SAFETY: the pool is open, and the text ends with zero; the library copies it.
            unsafe { (library.rados_ioctx_set_namespace)(pool.1.as_ptr(), namespace.as_ptr()) }
        }
        let image_name = text(&place.image)?;
        let snapshot = place.snapshot.as_deref().map(text).transpose()?;
        let snapshot_pointer = snapshot.as_ref().map_or(std::ptr::null(), |name| name.as_ptr());
        let mut pointer = std::ptr::null_mut();
        // SAFETY: the pool is open; texts that end with zero (none for no snapshot), and a place for the handle.
        let answer = unsafe {
            (library.rbd_open_read_only)(
                pool.1.as_ptr(),
                image_name.as_ptr(),
                &raw mut pointer,
                snapshot_pointer,
            )
        };
        checked(answer, "can't open the image")?;
        let rbd = handle(pointer, "Ceph's library gave no image")?;
        let image = Self { cluster: cluster.clone(), pool: pool.1, rbd };
        std::mem::forget(pool);
        let facts = image.facts(snapshot.as_deref())?;
        Ok((image, facts))
    }

    fn facts(&self, snapshot: Option<&CStr>) -> Result<ImageFacts> {
        let library = self.cluster.library;
        let mut size = 0;
        // SAFETY: the image is open, and the place is for a number of 64 bits.
        let answer = unsafe { (library.rbd_get_size)(self.rbd.as_ptr(), &raw mut size) };
        checked(answer, "it does not say its size")?;
        let mut facts = ImageFacts { size, snapshot: None, is_protected: false };
        let Some(name) = snapshot else { return Ok(facts) };
        let (mut id, mut number, mut protected) = ([0_u8; 256], 0_u64, 0);
        // SAFETY: the image is open; the library writes at most the number of bytes that is passed to it.
        let answer = unsafe { (library.rbd_get_id)(self.rbd.as_ptr(), id.as_mut_ptr().cast(), id.len() - 1) };
        checked(answer, "it does not say which image it is")?;
        // SAFETY: the image is open; a text that ends with zero, and a place for a number of 64 bits.
        let answer = unsafe { (library.rbd_snap_get_id)(self.rbd.as_ptr(), name.as_ptr(), &raw mut number) };
        checked(answer, "can't find the snapshot")?;
        // SAFETY: as above; the place is for an int.
        let answer =
            unsafe { (library.rbd_snap_is_protected)(self.rbd.as_ptr(), name.as_ptr(), &raw mut protected) };
        checked(answer, "can't find out whether the snapshot is protected")?;
        // SAFETY: the pool is open.
        let pool = unsafe { (library.rados_ioctx_get_id)(self.pool.as_ptr()) };
        facts.snapshot = Some(format!("{}/{pool}/{}@{number}", self.cluster.fsid, read_text(&id)));
        facts.is_protected = protected != 0;
        Ok(facts)
    }

    /// Begins to read this many bytes at an offset. What comes is their bytes, or a negative error number; the permit is
    /// given back when the library has answered.
    pub(super) fn read(
        self: &Arc<Self>,
        at: u64,
        len: usize,
        permit: OwnedSemaphorePermit,
    ) -> Result<oneshot::Receiver<Result<Bytes, c_int>>> {
        let library = self.cluster.library;
        let (answer, answered) = oneshot::channel();
        let flight = Box::new(Flight { bytes: vec![0; len], answer, image: self.clone(), _permit: permit });
        let flight = Box::into_raw(flight);
        let mut completion = std::ptr::null_mut();
        // SAFETY: the flight lives until `landed` takes it, or it is taken back below.
        let made = unsafe { (library.rbd_aio_create_completion)(flight.cast(), landed, &raw mut completion) };
        if made < 0 || completion.is_null() {
            // SAFETY: the library has not taken it, so it is still ours.
            drop(unsafe { Box::from_raw(flight) });
            return Err(failed(made.min(-1), "can't begin to read"));
        }
        // SAFETY: nothing else uses the flight before the library is called.
        let memory = unsafe { (*flight).bytes.as_mut_ptr() };
        // SAFETY: the memory has `len` bytes, does not move, and lives until the library calls `landed` (rule 1); the image
        // is open, because the flight holds it.
        let begun = unsafe { (library.rbd_aio_read)(self.rbd.as_ptr(), at, len, memory.cast(), completion) };
        if begun < 0 {
            // SAFETY: nothing was begun, so the library does not call back, and both are still ours.
            unsafe {
                (library.rbd_aio_release)(completion);
                drop(Box::from_raw(flight));
            }
            return Err(failed(begun, "can't begin to read"));
        }
        Ok(answered)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let (cluster, rbd, pool) = (self.cluster.clone(), SendPointer(self.rbd), SendPointer(self.pool));
        closing(move || {
            let (SendPointer(rbd), SendPointer(pool)) = ({ rbd }, { pool });
            // SAFETY: no read is under way, because each holds the image; the image is closed once, before its pool, and
            // both before the cluster, which is held until here.
            unsafe {
                (cluster.library.rbd_close)(rbd.as_ptr());
                (cluster.library.rados_ioctx_destroy)(pool.as_ptr());
            }
        });
    }
}

/// A read that is under way.
struct Flight {
    bytes: Vec<u8>,
    answer: oneshot::Sender<Result<Bytes, c_int>>,
    image: Arc<Image>,
    _permit: OwnedSemaphorePermit,
}

/// The library has answered a read. Runs on a thread of the library, and must not wait.
unsafe extern "C" fn landed(completion: Pointer, flight: Pointer) {
    // SAFETY: it is the flight that was given with this completion, and the library calls back once.
    let flight = unsafe { Box::from_raw(flight.cast::<Flight>()) };
    let Flight { mut bytes, answer, image, _permit } = *flight;
    let library = image.cluster.library;
    // SAFETY: the completion is done, and ours to release.
    let value = unsafe {
        let value = (library.rbd_aio_get_return_value)(completion);
        (library.rbd_aio_release)(completion);
        value
    };
    let result = match usize::try_from(value) {
        Ok(len) => {
            bytes.truncate(len);
            Ok(Bytes::from(bytes))
        }
        Err(_) => Err(c_int::try_from(value).unwrap_or(c_int::MIN)),
    };
    // Nobody may wait for it any more.
    drop(answer.send(result));
}

/// How many things are being closed.
static CLOSING: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// Closes something on a thread of its own.
fn closing(close: impl FnOnce() + Send + 'static) {
    let end = || {
        *lock(&CLOSING.0) -= 1;
        CLOSING.1.notify_all();
    };
    *lock(&CLOSING.0) += 1;
    let thread = std::thread::Builder::new().name("vellum-rbd-close".into()).spawn(move || {
        close();
        end();
    });
    if thread.is_err() {
        // It stays open until the process ends.
        end();
    }
}

/// Waits until what was dropped is closed, or this long: for the end of a program, before which the library's
/// threads should be gone.
pub(super) fn wait_for_closed(limit: Duration) {
    let begun = Instant::now();
    let mut left = lock(&CLOSING.0);
    while *left > 0 {
        let Some(rest) = limit.checked_sub(begun.elapsed()) else { return };
        left = CLOSING.1.wait_timeout(left, rest).unwrap_or_else(std::sync::PoisonError::into_inner).0;
    }
}
