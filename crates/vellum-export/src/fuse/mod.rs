//! FUSE: the disk as one file of the host, for `losetup`, `mount` and every program that opens files.
//!
//! ```text
//!   kernel ──► fuser's threads ──► lane 0 ──► worker ──► Disk         file: what a request means, and what stat tells
//!     ▲          (file)            lane 1 ──► worker ──► Disk         lane: the bounded queue in between
//!     └───────────── replies, from the worker, as they end            work, seek: a request at the disk
//! ```
//!
//! The mount point is a regular file, and so is the root of the file system (`point`): there is no directory, and nothing
//! is looked up. What is mounted where is known by `mounts`. A thread of fuser takes a request from the kernel, copies what is to be written and puts it into its
//! lane; it waits for no disk. A worker that runs [`DiskFile::serve`] begins it and answers it whenever it ends, so many are under way.
//!
//! 1. **Nothing is cached by the kernel** (`FOPEN_DIRECT_IO`): every read and write of a program is one of the disk. So
//!    the file, NBD clients and whatever else serves the disk see the same bytes, memory holds no second copy of them,
//!    and a server that is killed takes along nothing that a program was told is synced. The price: no read-ahead, and no
//!    shared `mmap` (private ones work). The file system that is mounted from it has its own cache.
//! 2. **Writes run side by side** (`FOPEN_PARALLEL_DIRECT_WRITES`), asynchronous ones as many as the kernel lets into its
//!    background (`FUSE_ASYNC_DIO`). `fsync` does not: the kernel holds the file for it, one at a time.
//! 3. **Durable** is what `fsync` answered, or a write through a descriptor with `O_DSYNC` (contract 1 of the disk).
//!    Closing a file that was written flushes the disk, too.
//! 4. **The size is the disk's.** Nothing makes the file longer or shorter; a write that passes the end is cut off there.
//! 5. What a program makes the server hold is bounded by the lanes: [`REQUESTS_MAX`] and [`MEMORY_BYTES_MAX`] each.
//! 6. After [`DiskFile::drain`] nothing is begun; what was begun is answered.
//!
//! Source: `include/uapi/linux/fuse.h`; `fs/fuse/file.c` of Linux for what is locked when.

mod file;
mod lane;
mod mounts;
mod point;
mod seek;
mod work;

pub use file::{DiskFile, Facts, Owner};
pub use lane::{MEMORY_BYTES_MAX, REQUESTS_MAX};
pub use point::{Mounted, Point, Taken, Teller};

/// Lets this thread, and those that it starts, allocate memory without waiting for a file system to write back: that may
/// be one that is mounted from a file of this server, and would wait for this server. Takes
/// `CAP_SYS_RESOURCE` and Linux 5.6; without them nothing changes.
pub fn allocate_without_write_back() {
    if let Err(error) = rustix::process::configure_io_flusher_behavior(true) {
        tracing::debug!("can't become an I/O flusher: {error}");
    }
}
