//! Storages and disks that forward to another one, except for the methods that a test overrides.
//!
//! ```
//! use std::sync::atomic::{AtomicU64, Ordering};
//! use vellum_core::{Buffer, ImageOffset, LocalFuture, MemoryStorage, Result, SharedStorage, Storage};
//! use vellum_sim::{ForwardStorage, Forwarding};
//!
//! /// Counts reads.
//! struct Counting(SharedStorage, AtomicU64);
//!
//! impl ForwardStorage for Counting {
//!     fn inner(&self) -> &dyn Storage {
//!         &*self.0
//!     }
//!
//!     fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
//!         self.1.fetch_add(1, Ordering::Relaxed);
//!         self.inner().read(at, buffer)
//!     }
//! }
//!
//! let counting = Forwarding::new(Counting(MemoryStorage::new("image"), AtomicU64::new(0)));
//! let storage: SharedStorage = counting.clone();
//! # drop(storage.read(ImageOffset::ZERO, Buffer::zeroed(512)));
//! assert_eq!(counting.1.load(Ordering::Relaxed), 1);
//! ```
//!
//! A method with a default that is made of other methods ([`Disk::flush_change`]) is not forwarded: it calls
//! those methods as they are overridden.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use vellum_core::{
    Buffer, Disk, Extent, Filled, Filling, Geometry, GuestOffset, GuestSpan, ImageOffset, ImageSpan, Limits,
    LocalFuture, Losses, Result, Room, SharedDisk, Storage, StorageRun, WriteFlags, ZeroFlags, Zeroes,
};

/// Makes a [`ForwardStorage`] a [`Storage`], and a [`ForwardDisk`] a [`Disk`]. It has the fields and methods
/// of what it contains.
pub struct Forwarding<T>(T);

impl<T> Forwarding<T> {
    /// Ready to be shared.
    pub fn new(inner: T) -> Arc<Self> {
        Arc::new(Self(inner))
    }
}

impl<T> Deref for Forwarding<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// Declares the trait whose methods forward by default, and implements the seam for what has that trait.
macro_rules! forward {
    (
        $(#[$attribute:meta])*
        $forward:ident to $seam:ident:
        $(fn $method:ident($($argument:ident: $type:ty),*) -> $result:ty;)*
    ) => {
        $(#[$attribute])*
        pub trait $forward: Send + Sync {
            #[doc = concat!("The [`", stringify!($seam), "`] that methods forward to by default.")]
            fn inner(&self) -> &dyn $seam;

            $(
                #[doc = concat!("[`", stringify!($seam), "::", stringify!($method), "`]")]
                fn $method(&self $(, $argument: $type)*) -> $result {
                    self.inner().$method($($argument),*)
                }
            )*
        }

        impl<T: $forward> $seam for Forwarding<T> {
            $(
                fn $method(&self $(, $argument: $type)*) -> $result {
                    self.0.$method($($argument),*)
                }
            )*
        }
    };
}

forward! {
    /// The methods of a [`Storage`]. Those that are not overridden are the inner storage's.
    ForwardStorage to Storage:
    fn name() -> &str;
    fn limits() -> &Limits;
    fn len() -> u64;
    fn look_at_len() -> LocalFuture<'_, Result<u64>>;
    fn read(at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>>;
    fn write(at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>>;
    fn flush() -> LocalFuture<'_, Result<()>>;
    fn reconcile(span: ImageSpan) -> LocalFuture<'_, Result<bool>>;
    fn write_zeroes(span: ImageSpan, how: Zeroes) -> LocalFuture<'_, Result<()>>;
    fn discard(span: ImageSpan) -> LocalFuture<'_, Result<()>>;
    fn set_len(len: u64) -> LocalFuture<'_, Result<()>>;
    fn preallocate(span: ImageSpan) -> LocalFuture<'_, Result<()>>;
    fn runs(span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>>;
}

forward! {
    /// The methods of a [`Disk`]. Those that are not overridden are the inner disk's.
    ForwardDisk to Disk:
    fn geometry() -> Geometry;
    fn below() -> Option<SharedDisk>;
    fn read(at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>>;
    fn write(at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>>;
    fn flush() -> LocalFuture<'_, Result<()>>;
    fn write_zeroes(span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>>;
    fn discard(span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>>;
    fn map(span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>>;
    fn tend(now: Duration) -> LocalFuture<'_, bool>;
    fn filling() -> Option<Filling>;
    fn fill(at: GuestOffset, data: Buffer) -> LocalFuture<'_, Result<Filled>>;
    fn room() -> LocalFuture<'_, Result<Option<Room>>>;
    fn losses() -> Option<Arc<Losses>>;
    fn close() -> LocalFuture<'_, Result<()>>;
}
