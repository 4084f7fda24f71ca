//! What the fuzz targets of image formats do with their bytes. (Those of exports are in
//! `vellum-export/src/nbd/fuzz.rs` and `vellum-export/src/vhost/fuzz.rs`, that of the flash cache in
//! `vellum-flash/src/fuzz.rs`.)
//!
//! ```text
//!   qcow2_header   bytes are the first part of a file      header, names, snapshot table
//!   qcow2_open     bytes are a file                        check, repair, open, read, map, write, close, again
//!   qcow2_ops      bytes are a program                     our own image, requests, pokes into closed metadata
//!   qcow2_journal  bytes are records                       an image that was not closed, recovered, used, checked
//!   native_open    bytes are pokes                         our own image of the native format, then as qcow2_open
//!   foreign_KIND   bytes are pokes, or a file           an image of another program: opened, mapped, read
//!   fast_medium    bytes are pokes                        a fast medium: opened, a row made and taken away
//!   guest_files    bytes are pokes, or a disk            what a guest has on its disk: files are looked for
//!   luks_header    bytes are the first part of a file      a LUKS header, alone and as an image
//!   template_store bytes are an index or a chunk           what a template in a store may claim
//! ```
//!
//! Rules for every input:
//!
//! 1. No panic, no end of memory ([`MEMORY_MAX`]), no end of time (libFuzzer's `-timeout`).
//! 2. What the check calls clean works: requests succeed, read back, and leave an image that is clean again.
//! 3. A repair that claims success leaves nothing to repair.

#![forbid(unsafe_code)]

mod bytes;
mod fast;
mod foreign;
mod guest;
mod header;
mod journal;
mod luks;
mod native;
mod open;
mod ops;
mod template;
mod watched;

pub use fast::fast_medium;
pub use foreign::foreign;
pub use guest::guest_files;
pub use header::qcow2_header;
pub use journal::qcow2_journal;
pub use luks::luks_header;
pub use native::native_open;
pub use open::qcow2_open;
pub use ops::qcow2_ops;
pub use template::template_store;

use peak_alloc::PeakAlloc;
use vellum_core::{MemoryDisk, Result, SharedDisk, SharedStorage};
use vellum_format::qcow2::check::check;
use vellum_format::qcow2::{Files, Header, OpenOptions, Qcow2};
use vellum_format::report::{CheckReport, Repair};
use vellum_format::session::CacheId;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// What records are known by: an input leads to the same bytes each time.
const KEY: u128 = 1;

/// What one input may take besides itself.
pub const MEMORY_MAX: usize = 96 << 20;

/// Runs `work` and measures it.
fn bounded(work: impl FnOnce()) {
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    work();
    let used = MEMORY.peak_usage().saturating_sub(before);
    assert!(used <= MEMORY_MAX, "{} MiB of memory", used >> 20);
}

/// The disk below, where one is wanted: no byte of it is zero, and it is shorter than most disks above it.
fn base() -> SharedDisk {
    let bytes: Vec<u8> = (0..20_000_u32).map(|at| u8::try_from(at % 251 + 1).expect("small")).collect();
    MemoryDisk::holding(&bytes)
}

/// The files of an image.
#[derive(Clone)]
struct Image {
    storage: SharedStorage,
    data_file: SharedStorage,
    has_base: bool,
}

impl Image {
    async fn open(&self, options: OpenOptions) -> Result<std::sync::Arc<Qcow2>> {
        let header = Header::read(&*self.storage).await?;
        let files = Files {
            image: self.storage.clone(),
            data_file: header.has_data_file().then(|| self.data_file.clone()),
            below: self.has_base.then(base),
        };
        let cipher = header.encryption().map(|_| luks::cipher());
        // With the cache that it names, or another one: without it an image that is behind would stay closed.
        let flash = header.session().map(|session| session.cache).or(CacheId::new([1; 16]));
        Qcow2::open(header, files, OpenOptions { journal_key: Some(KEY), cipher, flash, ..options }).await
    }

    async fn check(&self, repair: Repair) -> Result<(CheckReport, Vec<String>)> {
        let header = Header::read(&*self.storage).await?;
        let mut lines = Vec::new();
        let report = check(&header, &self.storage, repair, &mut |line| lines.push(line)).await?;
        Ok((report, lines))
    }
}

/// How many corruptions are something else than a missing "copied" flag. Two guest clusters in one place are damage that
/// a repair turns into sharing. When one of them moves away, the other is alone and does not say so, with QEMU as with
/// us: the next write copies once more than it must, and nothing is lost.
fn corruptions_but_flags(report: &CheckReport, lines: &[String]) -> u64 {
    let is_missing = |line: &&String| line.starts_with("ERROR OFLAG_COPIED") && line.ends_with("refcount=1");
    report.corruptions - lines.iter().filter(is_missing).count() as u64
}
