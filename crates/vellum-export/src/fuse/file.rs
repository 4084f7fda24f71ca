//! The file: what the kernel's requests mean for a disk, and what `stat` reports.
//!
//! Everything here runs on fuser's threads and waits for nothing but room in a lane. A request that needs the
//! disk becomes an [`Operation`]; every other request is answered at once.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenAccMode, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyLseek, ReplyOpen,
    ReplyStatfs, ReplyWrite, Request, TimeOrNow,
};
use vellum_core::{Buffer, Error, ErrorKind, GuestOffset, GuestSpan, Result, SharedDisk, Witness, lock};

use super::lane::{Answer, Job, Lane};
use super::seek::Target;
use super::work::{Behind, Handle, Operation, Outcome};

/// The longest read or write that the kernel sends unless its administrator has changed the limit.
const PAYLOAD_BYTES_MAX: u32 = 1 << 20;

/// Asynchronous requests that the kernel lets us have at a time.
const BACKGROUND_MAX: u16 = 256;

/// How long the kernel may cache the attributes that `stat` returned. Times and space change; a change of the
/// size is announced (`SizeNotifier`).
const FACTS_LAST: Duration = Duration::from_secs(1);

/// The I/O size that `stat` recommends to programs (`st_blksize`).
const BLOCK_BYTES: u32 = 4096;

thread_local! {
    /// The lane of this thread of fuser.
    static LANE: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Whose the file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// The permission bits.
    pub mode: u16,
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// The attributes of a file besides its bytes.
pub struct Facts {
    /// The file is read-only, even if the disk would accept writes.
    pub read_only: bool,
    /// Whose it is at first.
    pub owner: Owner,
    /// The space of the disk on the host, where that is known. Must be cheap: every `stat` calls it.
    pub allocated: Box<dyn Fn() -> Option<u64> + Send + Sync>,
}

/// A disk as a file: for fuser on one side, for workers on the other.
#[derive(Clone)]
pub struct DiskFile(Arc<Inner>);

struct Inner {
    behind: Behind,
    lanes: Vec<Lane<Reply>>,
    next_lane: AtomicUsize,
    facts: Facts,
    owner: Mutex<Owner>,
    handles: Mutex<Handles>,
    since: SystemTime,
    /// Nanoseconds from `since` to the last write.
    written: AtomicU64,
}

/// Open descriptors, and what each has seen of lost writes. The number 0 is for descriptors that cannot miss
/// any.
#[derive(Default)]
struct Handles {
    last: u64,
    witnesses: HashMap<u64, Arc<Witness>>,
}

/// How a request of the kernel is answered that needs the disk.
pub(super) enum Reply {
    Read(ReplyData),
    Write(ReplyWrite),
    Plain(ReplyEmpty),
    Seek(ReplyLseek),
}

impl DiskFile {
    /// A file that is not mounted yet, with this many lanes. Each lane needs a worker that runs
    /// [`DiskFile::serve`].
    pub fn new(disk: SharedDisk, facts: Facts, lanes: usize) -> Self {
        assert!(lanes > 0, "somebody must do the work");
        #[expect(clippy::disallowed_methods, reason = "a file has times of day, which decide nothing here")]
        let since = SystemTime::now();
        Self(Arc::new(Inner {
            behind: Behind::new(disk),
            lanes: (0..lanes).map(|_| Lane::new()).collect(),
            next_lane: AtomicUsize::new(0),
            owner: Mutex::new(facts.owner),
            facts,
            handles: Mutex::default(),
            since,
            written: AtomicU64::new(0),
        }))
    }

    /// How many lanes there are.
    pub fn lanes(&self) -> usize {
        self.0.lanes.len()
    }

    /// Does what comes in on this lane, until [`DiskFile::close`].
    pub async fn serve(&self, lane: usize) {
        self.0.lanes[lane].serve(&self.0.behind).await;
    }

    /// Begins nothing more: requests fail from now on as they will when the server is gone.
    pub fn drain(&self) {
        self.0.lanes.iter().for_each(Lane::drain);
    }

    /// Whether every request that was begun is answered.
    pub fn is_idle(&self) -> bool {
        self.0.lanes.iter().all(Lane::is_idle)
    }

    /// Lets the lanes end once everything is answered.
    pub fn close(&self) {
        self.0.lanes.iter().for_each(Lane::close);
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.0.facts.read_only
    }
}

impl Inner {
    fn size(&self) -> u64 {
        self.behind.disk.geometry().size
    }

    fn owner(&self) -> MutexGuard<'_, Owner> {
        lock(&self.owner)
    }

    fn handles(&self) -> MutexGuard<'_, Handles> {
        lock(&self.handles)
    }

    fn open(&self) -> FileHandle {
        let Some(losses) = self.behind.disk.losses() else { return FileHandle(0) };
        let mut handles = self.handles();
        handles.last += 1;
        let number = handles.last;
        handles.witnesses.insert(number, losses.witness());
        FileHandle(number)
    }

    fn handle(&self, handle: FileHandle) -> Handle {
        if handle.0 == 0 { None } else { self.handles().witnesses.get(&handle.0).cloned() }
    }

    fn attributes(&self) -> FileAttr {
        let (size, owner) = (self.size(), *self.owner());
        let written = self.since + Duration::from_nanos(self.written.load(Ordering::Relaxed));
        FileAttr {
            ino: INodeNo::ROOT,
            size,
            blocks: (self.facts.allocated)().unwrap_or(size).div_ceil(512),
            atime: self.since,
            mtime: written,
            ctime: written,
            crtime: UNIX_EPOCH,
            kind: FileType::RegularFile,
            perm: owner.mode,
            nlink: 1,
            uid: owner.uid,
            gid: owner.gid,
            rdev: 0,
            blksize: BLOCK_BYTES,
            flags: 0,
        }
    }

    /// The part of a request that is inside the disk.
    fn inside(&self, at: u64, len: u64) -> GuestSpan {
        let size = self.size();
        let at = at.min(size);
        GuestOffset::new(at).span(len.min(size - at))
    }

    fn is_writing(&self) {
        let since = self.since.elapsed().unwrap_or_default();
        self.written.store(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn begin(&self, operation: Operation, answer: Reply) {
        let index = LANE.get().unwrap_or_else(|| {
            let index = self.next_lane.fetch_add(1, Ordering::Relaxed) % self.lanes.len();
            LANE.set(Some(index));
            index
        });
        if let Err(job) = self.lanes[index].put(Job { operation, answer }) {
            job.answer.answer(Err(Error::new(ErrorKind::Closed, "the server is shutting down")));
        }
    }
}

impl Filesystem for DiskFile {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        let nearest = |result: Result<u32, u32>| result.unwrap_or_else(|nearest| nearest);
        nearest(config.set_max_write(PAYLOAD_BYTES_MAX));
        // An old kernel does them one after the other.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        let _ = config.set_max_background(BACKGROUND_MAX);
        Ok(())
    }

    fn getattr(&self, _: &Request, _: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&FACTS_LAST, &self.0.attributes());
    }

    fn setattr(
        &self,
        _: &Request,
        _: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        // "The underlying filesystem does not support extending a file beyond its current size", says
        // ftruncate(2).
        if size.is_some_and(|size| size != self.0.size()) {
            return reply.error(Errno::EPERM);
        }
        {
            let mut owner = self.0.owner();
            owner.mode = mode.map_or(owner.mode, |mode| u16::try_from(mode & 0o777).expect("nine bits"));
            owner.uid = uid.unwrap_or(owner.uid);
            owner.gid = gid.unwrap_or(owner.gid);
        }
        // Times that are set are taken and forgotten, as for a device.
        reply.attr(&FACTS_LAST, &self.0.attributes());
    }

    fn open(&self, _: &Request, _: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let reads_only = flags.acc_mode() == OpenAccMode::O_RDONLY;
        if self.0.facts.read_only && !reads_only {
            return reply.error(Errno::EROFS);
        }
        let mut how = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        how.set(FopenFlags::FOPEN_NOFLUSH, reads_only);
        reply.opened(self.0.open(), how);
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.0.handles().witnesses.remove(&handle.0);
        reply.ok();
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let span = self.0.inside(offset, u64::from(size));
        if span.is_empty() {
            return reply.data(&[]);
        }
        self.0.begin(Operation::Read { span }, Reply::Read(reply));
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        _: fuser::WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if self.0.facts.read_only {
            return reply.error(Errno::EROFS);
        }
        let span = self.0.inside(offset, data.len() as u64);
        if span.is_empty() {
            // As a device: what fits is written, and where nothing does there is no space.
            return if data.is_empty() { reply.written(0) } else { reply.error(Errno::ENOSPC) };
        }
        self.0.is_writing();
        let len = usize::try_from(span.len()).expect("no longer than the data");
        let data = Buffer::copy_of(&data[..len]);
        let synced = (flags.0 & libc::O_DSYNC != 0).then(|| self.0.handle(handle));
        self.0.begin(Operation::Write { at: span.start(), data, synced }, Reply::Write(reply));
    }

    fn flush(&self, _: &Request, _: INodeNo, handle: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        self.0.begin(Operation::Close(self.0.handle(handle)), Reply::Plain(reply));
    }

    fn fsync(&self, _: &Request, _: INodeNo, handle: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        self.0.begin(Operation::Sync(self.0.handle(handle)), Reply::Plain(reply));
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        if self.0.facts.read_only {
            return reply.error(Errno::EROFS);
        }
        match zeros_of(mode, offset, length, self.0.size()) {
            Ok(may_unmap) => {
                self.0.is_writing();
                let span = self.0.inside(offset, length);
                self.0.begin(Operation::Zero { span, may_unmap }, Reply::Plain(reply));
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn lseek(&self, _: &Request, _: INodeNo, _: FileHandle, offset: i64, whence: i32, reply: ReplyLseek) {
        let target = match whence {
            libc::SEEK_DATA => Target::Data,
            libc::SEEK_HOLE => Target::Hole,
            // The kernel does the others itself.
            _ => return reply.error(Errno::EINVAL),
        };
        let Ok(at) = u64::try_from(offset) else { return reply.error(Errno::ENXIO) };
        self.0.begin(Operation::Seek { at: GuestOffset::new(at), target }, Reply::Seek(reply));
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let size = self.0.size();
        let free = size.saturating_sub((self.0.facts.allocated)().unwrap_or(size));
        let blocks = |bytes: u64| bytes / u64::from(BLOCK_BYTES);
        reply.statfs(blocks(size), blocks(free), blocks(free), 1, 0, BLOCK_BYTES, 255, BLOCK_BYTES);
    }
}

/// Whether the zeros that `fallocate` requests may free space; an error if it requests anything else.
fn zeros_of(mode: i32, offset: u64, length: u64, size: u64) -> Result<bool, Errno> {
    let keeps_size = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
    let may_unmap = match mode & !libc::FALLOC_FL_KEEP_SIZE {
        libc::FALLOC_FL_PUNCH_HOLE => true,
        libc::FALLOC_FL_ZERO_RANGE => false,
        // Space set aside for later writes: nothing that a disk could promise for all of its layers.
        _ => return Err(Errno::EOPNOTSUPP),
    };
    let is_inside = offset.checked_add(length).is_some_and(|end| end <= size);
    if !keeps_size && !is_inside { Err(Errno::EFBIG) } else { Ok(may_unmap) }
}

impl Answer for Reply {
    fn answer(self, result: Result<Outcome>) {
        let error = match result {
            Ok(outcome) => return self.succeeded(outcome),
            Err(error) => error,
        };
        let errno = errno_of(error.kind());
        tracing::debug!(error = error.chain(), errno = errno.code(), "a request of a file failed");
        self.failed(errno);
    }
}

impl Reply {
    fn succeeded(self, outcome: Outcome) {
        match (self, outcome) {
            (Self::Read(reply), Outcome::Bytes(bytes)) => reply.data(bytes.contiguous().slice()),
            (Self::Write(reply), Outcome::Written(len)) => {
                reply.written(u32::try_from(len).expect("no longer than a request"));
            }
            (Self::Plain(reply), Outcome::Done) => reply.ok(),
            (Self::Seek(reply), Outcome::Found(Some(at))) => match i64::try_from(at.bytes()) {
                Ok(at) => reply.offset(at),
                Err(_) => reply.error(Errno::EOVERFLOW),
            },
            (Self::Seek(reply), Outcome::Found(None)) => reply.error(Errno::ENXIO),
            (reply, outcome) => {
                debug_assert!(false, "{outcome:?} answers another request");
                reply.failed(Errno::EIO);
            }
        }
    }

    fn failed(self, errno: Errno) {
        match self {
            Self::Read(reply) => reply.error(errno),
            Self::Write(reply) => reply.error(errno),
            Self::Plain(reply) => reply.error(errno),
            Self::Seek(reply) => reply.error(errno),
        }
    }
}

/// The errno that a program gets.
fn errno_of(kind: ErrorKind) -> Errno {
    match kind {
        ErrorKind::NoSpace => Errno::ENOSPC,
        ErrorKind::ReadOnly => Errno::EROFS,
        ErrorKind::Invalid => Errno::EINVAL,
        ErrorKind::Unsupported => Errno::EOPNOTSUPP,
        ErrorKind::Closed => Errno::ENOTCONN,
        _ => Errno::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_zeros_are_allocated() {
        const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE;
        assert_eq!(zeros_of(PUNCH, 0, 10, 100), Ok(true));
        assert_eq!(zeros_of(PUNCH, 90, 1000, 100), Ok(true), "what lies outside is no part of the file");
        assert_eq!(zeros_of(ZERO, 0, 100, 100), Ok(false));
        assert_eq!(zeros_of(ZERO | libc::FALLOC_FL_KEEP_SIZE, 90, u64::MAX, 100), Ok(false));
        assert_eq!(zeros_of(ZERO, 90, 11, 100), Err(Errno::EFBIG));
        assert_eq!(zeros_of(ZERO, 1, u64::MAX, 100), Err(Errno::EFBIG));
        assert_eq!(zeros_of(0, 0, 10, 100), Err(Errno::EOPNOTSUPP));
        assert_eq!(zeros_of(libc::FALLOC_FL_COLLAPSE_RANGE, 0, 10, 100), Err(Errno::EOPNOTSUPP));
    }

    #[test]
    fn programs_learn_what_they_can_act_on() {
        assert_eq!(errno_of(ErrorKind::NoSpace), Errno::ENOSPC);
        assert_eq!(errno_of(ErrorKind::ReadOnly), Errno::EROFS);
        assert_eq!(errno_of(ErrorKind::Poisoned), Errno::EIO);
        assert_eq!(errno_of(ErrorKind::NotFound), Errno::EIO, "the file is there");
    }
}
