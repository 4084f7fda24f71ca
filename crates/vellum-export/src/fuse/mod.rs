//! FUSE: the disk as one file on the host, for `losetup`, `mount` and every program that opens files.
//!
//! ```text
//!   kernel ──► fuser's threads ──► lane 0 ──► worker ──► Disk       file: requests in terms of the disk; stat
//!     ▲          (file)            lane 1 ──► worker ──► Disk       lane: the bounded queue in between
//!     └───────────── replies, from the worker, as they end          work, seek: a request at the disk
//! ```
//!
//! The mount point is a regular file, and so is the root of the file system (`point`): there is no directory,
//! and there are no lookups. `mounts` finds out what is mounted at a path. One of fuser's threads takes a
//! request from the kernel, copies the data of a write and puts the request into its lane; it never waits for
//! the disk. A worker that runs [`DiskFile::serve`] begins the request and answers it when it completes, so
//! that many are in flight.
//!
//! 1. **Nothing is cached by the kernel** (`FOPEN_DIRECT_IO`): every read and write of a program becomes one
//!    of the disk. Therefore the file, NBD clients and all other exports of the disk see the same bytes,
//!    memory holds no second copy of them, and a server that is killed loses nothing that a program has
//!    successfully synced. The price: no read-ahead, and no shared `mmap` (private ones work). A file system
//!    that is mounted from the file has its own cache.
//! 2. **Writes run concurrently** (`FOPEN_PARALLEL_DIRECT_WRITES`), and as many asynchronous ones as the
//!    kernel admits to its background (`FUSE_ASYNC_DIO`). `fsync` does not: the kernel locks the file for it,
//!    one at a time.
//! 3. **Durable** means that `fsync` has succeeded, or a write through a descriptor with `O_DSYNC` (contract
//!    1 of the disk). Closing a file that was written also flushes the disk.
//! 4. **The size is the disk's.** The file cannot be extended or truncated; a write that passes the end is
//!    cut short there.
//! 5. The memory that programs can make the server hold is bounded by the lanes: [`REQUESTS_MAX`] and
//!    [`MEMORY_BYTES_MAX`] for each.
//! 6. After [`DiskFile::drain`] no request is begun; those in flight are answered.
//!
//! Source: `include/uapi/linux/fuse.h`; `fs/fuse/file.c` of Linux for the locking.

mod file;
mod lane;
mod mounts;
mod point;
mod seek;
mod work;

pub use file::{DiskFile, Facts, Owner};
pub use lane::{MEMORY_BYTES_MAX, REQUESTS_MAX};
pub use point::{Mounted, Point, SizeNotifier, Taken};

/// Lets this thread, and those that it starts, allocate memory without waiting for a file system to write
/// back: that may be one that is mounted from a file of this server, and would wait for this server. Takes
/// `CAP_SYS_RESOURCE` and Linux 5.6; without them nothing changes.
pub fn allocate_without_write_back() {
    if let Err(error) = rustix::process::configure_io_flusher_behavior(true) {
        tracing::debug!("can't set PR_SET_IO_FLUSHER: {error}");
    }
}
