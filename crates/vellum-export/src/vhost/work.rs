//! One request, from its chain to the status in the guest's memory.
//!
//! ```text
//!   chain ──of──► Job ──run──► the disk ──► data and status in the guest's memory ──► Done, for the used ring
//! ```
//!
//! 1. A chain that has room for a status gets one, once, before it is handed back.
//! 2. The data stays where the guest has it, and is lent to the disk in place: a format that must know what
//!    it writes takes the copy itself. Ranges to discard or zero are copied before they are parsed.
//! 3. The length handed back counts the bytes that were written from the first one on, without a gap (VIRTIO
//!    1.2, 2.7.8.2).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vellum_core::{ErrorKind, Result, SharedDisk, WriteFlags, ZeroFlags};

use super::chain::{Chain, HEADER_BYTES, Link, Malformed};
use super::config::Facts;
use super::memory::Memory;
use super::request::{ID_BYTES, Request, Status};
use crate::slices::in_slices;

/// What all requests of one front end share.
pub(super) struct Target {
    pub(super) disk: SharedDisk,
    pub(super) facts: Facts,
    /// What the guest gets for a serial number.
    pub(super) id: [u8; ID_BYTES],
    /// Every write is durable when it is answered.
    pub(super) is_writethrough: AtomicBool,
}

/// A request that is about to run.
pub(super) struct Job {
    head: u16,
    request: Result<Request, Status>,
    chain: Chain,
    memory: Arc<Memory>,
}

/// A request that was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Done {
    /// Its first descriptor.
    pub(super) head: u16,
    /// For the used ring.
    pub(super) written: u32,
    /// As in [`Job::weight`].
    pub(super) weight: usize,
}

impl Job {
    /// Reads a chain from the guest's memory.
    pub(super) fn of(
        head: u16,
        links: impl Iterator<Item = Link>,
        memory: &Arc<Memory>,
        target: &Target,
    ) -> Result<Self, Malformed> {
        let chain = Chain::gather(links)?;
        let mut header = [0; HEADER_BYTES];
        memory.read_into(&chain.header, &mut header).ok_or(Malformed("its header is not in memory"))?;
        if !memory.has(&chain.status) {
            return Err(Malformed("its status is not in memory"));
        }
        let terms = &target.facts.terms();
        let request = Request::parse(&header, chain.data_out.len(), chain.data_in.len(), terms);
        Ok(Self { head, request, chain, memory: memory.clone() })
    }

    /// Its first descriptor.
    pub(super) fn head(&self) -> u16 {
        self.head
    }

    /// About how much of our memory it holds while it runs: at most this much, because nothing is held for
    /// data that stays where it is lent.
    pub(super) fn weight(&self) -> usize {
        let data = match self.request {
            Ok(Request::Read { .. }) => self.chain.data_in.len(),
            Ok(Request::Write { .. }) => self.chain.data_out.len(),
            _ => 0,
        };
        data + 4096
    }

    /// Whether a poll of it may take a while: ranges may be long, and many.
    pub(super) fn is_long(&self) -> bool {
        matches!(self.request, Ok(Request::Discard | Request::WriteZeroes))
    }

    /// Executes it and writes the status.
    pub(super) async fn run(self, target: Arc<Target>) -> Done {
        let done = match self.request {
            Ok(request) => self.perform(request, &target).await,
            Err(status) => Err(status),
        };
        let (status, filled) = match done {
            Ok(filled) => (Status::Ok, filled),
            Err(status) => (status, 0),
        };
        let told = self.memory.write(&self.chain.status, std::iter::once(&[status.byte()][..]));
        debug_assert!(told.is_some(), "there was memory for the status, and a mapping does not change");
        let is_without_gap = filled == self.chain.data_in.len();
        let written =
            u32::try_from(filled).expect("a request is far below 4 GiB") + u32::from(is_without_gap);
        Done { head: self.head, written, weight: self.weight() }
    }

    /// Returns how many bytes of the data it filled.
    async fn perform(&self, request: Request, target: &Target) -> Result<usize, Status> {
        let (disk, chain) = (&target.disk, &self.chain);
        let fua = target.is_writethrough.load(Ordering::Relaxed);
        match request {
            Request::Read { at } => {
                let len = chain.data_in.len();
                let room = self.memory.lend(&chain.data_in).ok_or(Status::IoError)?;
                let filled = disk.read(at, room).await.map_err(status_of)?;
                assert!(filled.lent_len() == len, "a read fills the memory that it got");
                Ok(len)
            }
            Request::Write { at } => {
                let data = self.memory.lend(&chain.data_out).ok_or(Status::IoError)?;
                disk.write(at, data, WriteFlags { fua }).await.map_err(status_of)?;
                Ok(0)
            }
            Request::Flush => {
                disk.flush().await.map_err(status_of)?;
                Ok(0)
            }
            Request::GetId => {
                let id = std::iter::once(&target.id[..]);
                self.memory.write(&chain.data_in, id).ok_or(Status::IoError)?;
                Ok(ID_BYTES)
            }
            Request::Discard | Request::WriteZeroes => {
                let rows = self.memory.read(&chain.data_out).ok_or(Status::IoError)?;
                for range in request.parse_ranges(rows.slice(), &target.facts.terms())? {
                    let flags = ZeroFlags { fua, may_unmap: range.may_unmap, fast_only: false };
                    let act = |slice| match request {
                        Request::Discard => disk.discard(slice, WriteFlags { fua }),
                        _ => disk.write_zeroes(slice, flags),
                    };
                    in_slices(range.span, act, || Ok(())).await.map_err(status_of)?;
                }
                Ok(0)
            }
        }
    }
}

/// The guest gets the status; the log gets the cause.
#[expect(clippy::needless_pass_by_value, reason = "it is what `map_err` gives")]
fn status_of(error: vellum_core::Error) -> Status {
    tracing::debug!("a request over vhost-user-blk failed: {}", error.chain());
    match error.kind() {
        ErrorKind::Unsupported => Status::Unsupported,
        _ => Status::IoError,
    }
}
