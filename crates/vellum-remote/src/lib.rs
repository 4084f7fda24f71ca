//! Object stores, published templates, and a local cache of what was fetched. The only part of the engine that
//! knows tokio.
//!
//! ```text
//!   runtime.rs      threads of its own for everything that waits for a network
//!   settings.rs     what the environment says about stores        credentials.rs   files and programs with secrets
//!   store.rs        s3://BUCKET/PREFIX, file:///DIR: get, put, list, delete, with a deadline each
//!   silence.rs      how long what brings bytes is waited for: limits are on silence
//!   base/           images at URLs as storages that can be read: fetching, patience, reading ahead
//!   base/rbd/       images of Ceph clusters, through Ceph's own library: all `unsafe` of the crate
//!   template/       published templates: name, index, chunk, push, collect, and the leases that keep them apart
//!   cache.rs        chunks and blocks that were fetched, in a directory of this host
//!   nbd/            an export of an NBD server as a storage, without tokio
//! ```
//!
//! 1. No worker of a disk ever waits here: every future may be polled by any executor, and the work is done on
//!    the threads of `runtime.rs`.
//! 2. Nothing that a store sends is trusted: lengths are bounded before anything is allocated, and contents are
//!    compared with digests.
//! 3. Credentials come from the environment, from files and from programs. They are in no image, log or error.
//! 4. The clock is that of the host, except where times of objects are compared: these are all the store's.

#![deny(unsafe_code)]

pub mod base;
pub mod cache;
mod credentials;
pub mod nbd;
pub mod runtime;
pub mod settings;
mod silence;
pub mod store;
pub mod template;

pub use base::{
    FetchCounts, Opened, REMOTE_TIMEOUT_DEFAULT, RemoteOptions, fetch_counts, open, open_since,
    wait_for_closed,
};
pub use cache::ChunkCache;
pub use credentials::end_programs;
pub use settings::Settings;
pub use store::{ObjectFacts, Put, Store, StoreCounts};

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::{Duration, SystemTime};

    use crate::{Settings, Store};

    /// A store in a directory that is removed with it.
    pub(crate) struct Directory(pub(crate) PathBuf);

    impl Directory {
        pub(crate) fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("vellum-remote-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).expect("makes a directory");
            Self(path)
        }

        pub(crate) fn store(&self) -> Store {
            Store::open(&format!("file://{}", self.0.display()), &Settings::default()).expect("it exists")
        }

        /// Makes an object older.
        pub(crate) fn age(&self, key: &str, by: Duration) {
            let file = std::fs::File::options().append(true).open(self.0.join(key)).expect("it exists");
            file.set_modified(SystemTime::now() - by).expect("its time can be set");
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            drop(std::fs::remove_dir_all(&self.0));
        }
    }
}
