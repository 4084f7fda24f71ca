//! Vellum as a library: copy-on-write disks for a program of one's own.
//!
//! # First: what stays on its thread, and must be polled to its end
//!
//! 1. **Futures are `!Send`.** The future of a [`Disk`] or an [`Image`] belongs to the worker that first
//!    polls it, and uses that worker's io_uring or threads. A worker is a thread inside [`run`]. Elsewhere a
//!    request panics.
//! 2. **A future that was polled must be polled to its end.** A disk may refuse writes after a future was
//!    dropped half way. So do not use `select!` or a timeout on a request: start it with [`spawn_local`],
//!    keep the task, and wait for something else meanwhile.
//! 3. **[`Image::close`] must be called**, with no other request running. An image that is dropped without
//!    it is in the state after a crash: flushed data is safe, and the next opening recovers the rest.
//! 4. **Only a flush makes writes durable.**
//!
//! [`blocking::Disk`] and [`threaded::Disk`] take the first three off the caller: they keep the image on a
//! thread of its own, are `Send + Sync`, and finish what was started. The first has ordinary functions, the
//! second has `async` ones for any executor, such as tokio.
//!
//! # A clone of a template
//!
//! ```
//! use vellum_disk::{Buffer, GuestOffset, Image, IoMode, Result, WriteFlags, run};
//!
//! # fn main() -> Result<()> {
//! # let dir = std::env::temp_dir().join(format!("vellum-disk-front-{}", std::process::id()));
//! # std::fs::create_dir_all(&dir).expect("a directory");
//! # let (template, clone) = (dir.join("template.raw"), dir.join("clone.qcow2"));
//! # std::fs::write(&template, vec![7; 1 << 20]).expect("a template");
//! run(IoMode::Auto, async || {
//!     let image = Image::clone_of(&template, &clone).await?;
//!     let hello = Buffer::copy_of(b"hello");
//!     image.disk().write(GuestOffset::new(4096), hello, WriteFlags::default()).await?;
//!     image.disk().flush().await?;
//!     image.close().await
//! })??;
//! # std::fs::remove_dir_all(&dir).expect("the directory was just made");
//! # Ok(())
//! # }
//! ```
//!
//! `Image::open(path)` opens an image of any format together with its backing chain. The same in a program
//! without `async`:
//!
//! ```
//! # fn main() -> vellum_disk::Result<()> {
//! # let dir = std::env::temp_dir().join(format!("vellum-disk-blocking-{}", std::process::id()));
//! # std::fs::create_dir_all(&dir).expect("a directory");
//! # let path = dir.join("new.vlm");
//! use vellum_disk::{Image, blocking::Disk};
//!
//! let disk = Disk::start(move || async move { Image::create(&path, 1 << 30).await })?;
//! disk.write_at(4096, b"hello")?;
//! disk.flush()?;
//! disk.close()?;
//! # std::fs::remove_dir_all(&dir).expect("the directory was just made");
//! # Ok(())
//! # }
//! ```
//!
//! # Where things are
//!
//! In reading order: [`Image`] (open, map, snapshots, close), [`OpenOptions`] and [`NewImage`] (the choices
//! when one is opened or created), [`Disk`] (the requests, with their contract), [`threaded`] and
//! [`blocking`], [`nbd`] (serving), [`closed`] (checking, resizing and reverting images that are not open),
//! [`Storage`] (backends of one's own: [`OpenOptions::open_in`], [`NewImage::create_in`]).
//!
//! The directory `examples/` has a program for each: `clone_template`, `serve_nbd`, `walk_map`, `snapshot`
//! and `custom_storage`. They take no arguments and work in a temporary directory.
//!
//! The library never prints. What it logs goes to the crate `tracing`. Linux only.

#![forbid(unsafe_code)]

pub mod blocking;
mod create;
mod image;
pub mod nbd;
mod only;
pub mod threaded;

pub use create::NewImage;
pub use image::{Image, OpenOptions};
pub use vellum_core::storage::{Limits as StorageLimits, StorageRun, Zeroes};
pub use vellum_core::{
    BlockSize, Buffer, Disk, Error, ErrorKind, Extent, Geometry, GuestOffset, GuestSpan, ImageOffset,
    ImageSpan, LocalFuture, MemoryStorage, MergedExtent, Place, Result, SharedDisk, SharedStorage, Storage,
    WriteFlags, ZeroFlags,
};
pub use vellum_daemon::closed;
pub use vellum_format::image::Snapshot;
pub use vellum_format::native::CreateOptions as NativeOptions;
pub use vellum_format::qcow2::CreateOptions as Qcow2Options;
pub use vellum_format::{ForeignKind, FormatKind};
pub use vellum_io::{IoMode, Task, run, spawn_local};

/// The example of the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
