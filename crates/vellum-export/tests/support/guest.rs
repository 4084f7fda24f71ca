//! A virtual machine as a vhost-user-blk back end sees it: memory in two files, rings, eventfds, and a driver
//! that puts any chain into the ring. The front end's messages are those of the `vhost` crate; the driver is
//! our own.
//!
//! ```text
//!   0x0000_0000   rings: one page run for each queue      first file
//!   0x0010_0000   data, handed out from the start on
//!   0x0080_0000   (nothing)
//!   0x0100_0000   more data                               second file, from its second page on
//! ```

#![allow(dead_code, unreachable_pub, reason = "each test file uses its own part")]
#![allow(clippy::cast_possible_truncation, reason = "lengths of tests are small")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vellum_core::{CheckedDisk, Clock, LocalFuture, Result, SharedDisk};
use vellum_export::nbd::{Export, Exports};
use vellum_export::vhost::{Device, Heard, Host, MakeQueue, Reconnects, Session, SessionHandle};
use vellum_io::{IoMode, Workers, WorkersConfig, WorkersHandle};
use vhost::VhostBackend;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures, VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub const DATA: u64 = 0x10_0000;
pub const HOLE: u64 = 0x80_0000;
pub const FAR_DATA: u64 = 0x100_0000;
const FAR_LEN: u64 = 0x40_0000;
/// What the front end adds to the guest's addresses.
pub const FRONT_END: u64 = 1 << 40;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// The features that most tests take.
pub const FEATURES: u64 = 1 << 9 | 1 << 12 | 1 << 28 | 1 << 30 | 1 << 32;
pub const EVENT_IDX: u64 = 1 << 29;

/// Nothing here takes this long.
const PATIENCE: Duration = Duration::from_secs(60);

/// A server with one disk, and the workers it runs on.
pub struct Served {
    workers: Workers,
    pub exports: Exports,
    pub reconnects: Reconnects,
    queues: u16,
    /// Memory that can be truncated is accepted.
    pub takes_unsealed: bool,
    /// The clock of the sessions. It stands still unless a test moves it.
    pub clock: Arc<Hand>,
    heard: Heard,
}

/// A clock that is moved by hand.
#[derive(Default)]
pub struct Hand(AtomicU64);

impl Hand {
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_nanos() as u64, Ordering::SeqCst);
    }
}

impl Clock for Hand {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::SeqCst))
    }

    fn sleep(&self, _wait: Duration) -> LocalFuture<'static, ()> {
        unreachable!("a session asks for the time only")
    }
}

struct OnWorkers(WorkersHandle);

impl Host for OnWorkers {
    fn spawn(&self, queue: u32, make: MakeQueue) {
        drop(self.0.spawn(queue as usize % self.0.count(), make));
    }

    fn readable(&self, descriptor: &Arc<std::os::fd::OwnedFd>) -> LocalFuture<'static, Result<()>> {
        let descriptor = descriptor.clone();
        Box::pin(async move { vellum_io::readable(&descriptor).await })
    }

    fn ring(&self, eventfd: &Arc<std::os::fd::OwnedFd>) {
        vellum_io::ring(eventfd);
    }
}

impl Served {
    pub fn new(disk: SharedDisk, read_only: bool, queues: u16) -> Self {
        Self::unchecked(CheckedDisk::new(disk), read_only, queues)
    }

    /// With workers of this mode.
    pub fn in_mode(mode: IoMode, disk: SharedDisk, queues: u16) -> Self {
        Self::on(mode, CheckedDisk::new(disk), false, queues)
    }

    /// With a disk whose panics are not caught.
    pub fn unchecked(disk: SharedDisk, read_only: bool, queues: u16) -> Self {
        Self::on(IoMode::Auto, disk, read_only, queues)
    }

    fn on(mode: IoMode, disk: SharedDisk, read_only: bool, queues: u16) -> Self {
        let workers = Workers::start(WorkersConfig { threads: 2, mode, ..WorkersConfig::default() })
            .expect("workers can be started");
        let exports = Exports::new();
        let export =
            Export { name: "disk".to_owned(), description: String::new(), disk, read_only, marks: None };
        exports.add(export).expect("the name is free");
        Self {
            workers,
            exports,
            queues,
            takes_unsealed: false,
            reconnects: Reconnects::durable(),
            clock: Arc::default(),
            heard: Heard::default(),
        }
    }

    /// A front end's end of a connection that is served, how to end it, and how it ended.
    pub fn connect(&self) -> (UnixStream, SessionHandle, std::thread::JoinHandle<Result<()>>) {
        let (ours, theirs) = UnixStream::pair().expect("two sockets");
        let (session, handle) = Session::new(theirs).expect("a session");
        let host = Arc::new(OnWorkers(self.workers.handle()));
        let device = Device {
            exports: self.exports.clone(),
            name: "disk".to_owned(),
            serial: "a serial number that is too long".to_owned(),
            queues: self.queues,
            takes_unsealed: self.takes_unsealed,
            reconnects: self.reconnects.clone(),
            clock: self.clock.clone(),
            heard: self.heard.clone(),
        };
        let thread = std::thread::spawn(move || session.serve(&device, host));
        (ours, handle, thread)
    }
}

/// The memory of a machine. It outlives its connections.
pub struct Memory {
    pub files: [File; 2],
    pub mapped: GuestMemoryMmap,
    next: AtomicU64,
}

impl Memory {
    pub fn new() -> Self {
        let file = |len: u64| {
            let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
            let file = File::from(rustix::fs::memfd_create("guest", flags).expect("a memfd"));
            file.set_len(len).expect("its length");
            rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK).expect("a seal");
            file
        };
        let files = [file(HOLE), file(FAR_LEN + 0x1000)];
        let map = |file: &File, at: u64, in_file: u64, len: u64| {
            let offset = FileOffset::new(file.try_clone().expect("a descriptor"), in_file);
            let mapping = MmapRegion::from_file(offset, len as usize).expect("it is mapped");
            GuestRegionMmap::new(mapping, GuestAddress(at)).expect("a region")
        };
        let regions = vec![map(&files[0], 0, 0, HOLE), map(&files[1], FAR_DATA, 0x1000, FAR_LEN)];
        let mapped = GuestMemoryMmap::from_regions(regions).expect("they do not overlap");
        Self { files, mapped, next: AtomicU64::new(DATA) }
    }

    pub fn table(&self) -> [VhostUserMemoryRegionInfo; 2] {
        let region = |file: &File, at: u64, in_file: u64, len: u64| VhostUserMemoryRegionInfo {
            guest_phys_addr: at,
            memory_size: len,
            userspace_addr: at + FRONT_END,
            mmap_offset: in_file,
            mmap_handle: file.as_raw_fd(),
        };
        [region(&self.files[0], 0, 0, HOLE), region(&self.files[1], FAR_DATA, 0x1000, FAR_LEN)]
    }

    /// Room for this many bytes, which is handed out once.
    pub fn room(&self, len: usize) -> u64 {
        let len = (len as u64).next_multiple_of(16);
        let at = self.next.fetch_add(len, Ordering::Relaxed);
        assert!(at + len <= HOLE, "the data fits");
        at
    }

    /// All room is free again.
    pub fn forget(&self) {
        self.next.store(DATA, Ordering::Relaxed);
    }

    pub fn put(&self, at: u64, bytes: &[u8]) {
        self.mapped.write_slice(bytes, GuestAddress(at)).expect("memory");
    }

    pub fn get(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.mapped.read_slice(&mut bytes, GuestAddress(at)).expect("memory");
        bytes
    }

    pub fn index(&self, at: u64) -> u16 {
        u16::from_le(self.mapped.load(GuestAddress(at), Ordering::SeqCst).expect("memory"))
    }

    pub fn set_index(&self, at: u64, value: u16) {
        self.mapped.store(value.to_le(), GuestAddress(at), Ordering::SeqCst).expect("memory");
    }
}

/// A machine that is connected.
pub struct Machine<'a> {
    pub memory: &'a Memory,
    pub front_end: Frontend,
    /// Of a session that runs here.
    session: Option<(SessionHandle, std::thread::JoinHandle<Result<()>>)>,
    pub features: u64,
}

impl<'a> Machine<'a> {
    /// Connects and agrees on features; no queue runs.
    pub fn connect(served: &Served, memory: &'a Memory, features: u64) -> Self {
        let (socket, handle, ended) = served.connect();
        Self { session: Some((handle, ended)), ..Self::over(socket, memory, features) }
    }

    /// As above, over a socket of any server.
    pub fn over(socket: UnixStream, memory: &'a Memory, features: u64) -> Self {
        let mut front_end = Frontend::from_stream(socket, 256);
        front_end.set_owner().expect("an owner");
        let offered = front_end.get_features().expect("features");
        let taken = features & offered;
        assert_ne!(taken & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits(), 0, "the protocol has features");
        let protocol = front_end.get_protocol_features().expect("features of the protocol");
        let wanted = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::BACKEND_REQ;
        assert!(protocol.contains(wanted), "{protocol:?}");
        front_end.set_protocol_features(wanted).expect("they are taken");
        front_end.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        front_end.set_features(taken).expect("they are taken");
        front_end.set_mem_table(&memory.table()).expect("memory is shared");
        Self { memory, front_end, session: None, features: taken }
    }

    /// How the server's session ends when the front end disconnects.
    pub fn leave(self) -> Result<()> {
        let Self { front_end, session, .. } = self;
        drop(front_end);
        let (_handle, ended) = session.expect("the session runs here");
        ended.join().expect("the session does not panic")
    }

    /// The server ends the session, though the front end is there.
    #[track_caller]
    pub fn wait_until_ended(&mut self) {
        #[allow(clippy::disallowed_methods, reason = "a test must not hang; other crates include this file")]
        let begun = Instant::now();
        let (_handle, thread) = self.session.take().expect("the session runs here");
        while !thread.is_finished() {
            assert!(begun.elapsed() < PATIENCE, "the session goes on");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Makes the server check the size of its disk.
    pub fn notify_resize(&self) {
        self.session.as_ref().expect("the session runs here").0.notify_resize();
    }

    /// The server ends it.
    pub fn end(&self) {
        self.session.as_ref().expect("the session runs here").0.end();
    }

    pub fn config(&mut self, offset: u32, len: usize) -> Vec<u8> {
        let got = self.front_end.get_config(
            offset,
            u32::try_from(len).expect("small"),
            VhostUserConfigFlags::WRITABLE,
            &vec![0; len],
        );
        got.expect("the configuration").1
    }

    /// Sets a queue up at its place in memory, from this base on, and starts it.
    pub fn start_queue(&mut self, index: usize, size: u16, base: u16) -> Queue<'a> {
        let queue = Queue::new(self.memory, index, size, base, self.features & EVENT_IDX != 0);
        self.start(&queue, base);
        queue
    }

    /// Tells the back end of a queue, and starts it.
    pub fn start(&mut self, queue: &Queue<'_>, base: u16) {
        self.try_start(queue, base).expect("it starts");
    }

    /// As above, where it may be refused.
    pub fn try_start(&mut self, queue: &Queue<'_>, base: u16) -> vhost::Result<()> {
        let index = queue.number;
        self.front_end.set_vring_num(index, queue.size)?;
        self.front_end.set_vring_base(index, base)?;
        self.front_end.set_vring_addr(index, &queue.config())?;
        self.front_end.set_vring_kick(index, &queue.kick)?;
        self.front_end.set_vring_call(index, &queue.call)?;
        self.front_end.set_vring_err(index, &queue.err)?;
        self.front_end.set_vring_enable(index, true)
    }
}

/// The driver's side of one queue.
pub struct Queue<'a> {
    memory: &'a Memory,
    number: usize,
    pub size: u16,
    pub table: u64,
    pub avail: u64,
    pub used: u64,
    pub kick: EventFd,
    pub call: EventFd,
    pub err: EventFd,
    /// Descriptors that are free.
    free: Vec<u16>,
    /// Those of each chain that is hung up, by its head.
    hung: std::collections::BTreeMap<u16, Vec<u16>>,
    pub next_avail: u16,
    pub next_used: u16,
    has_event_idx: bool,
    pub kicks: usize,
}

/// One descriptor: where, how long, for the device to write.
pub type Piece = (u64, u32, bool);

impl<'a> Queue<'a> {
    /// A queue whose rings are empty, at a position.
    pub fn new(memory: &'a Memory, number: usize, size: u16, base: u16, has_event_idx: bool) -> Self {
        let table = number as u64 * 0x1_0000;
        let (avail, used) = (table + 0x8000, table + 0xA000);
        let event = || EventFd::new(EFD_NONBLOCK).expect("an eventfd");
        memory.put(table, &vec![0; 0x1_0000]);
        memory.set_index(avail + 2, base);
        memory.set_index(used + 2, base);
        Self {
            memory,
            number,
            size,
            table,
            avail,
            used,
            kick: event(),
            call: event(),
            err: event(),
            free: (0..size).rev().collect(),
            hung: std::collections::BTreeMap::new(),
            next_avail: base,
            next_used: base,
            has_event_idx,
            kicks: 0,
        }
    }

    pub fn config(&self) -> VringConfigData {
        VringConfigData {
            queue_max_size: self.size,
            queue_size: self.size,
            flags: 0,
            desc_table_addr: self.table + FRONT_END,
            used_ring_addr: self.used + FRONT_END,
            avail_ring_addr: self.avail + FRONT_END,
            log_addr: None,
        }
    }

    pub fn descriptor(at: u64, len: u32, flags: u16, next: u16) -> Vec<u8> {
        [&at.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat()
    }

    /// Writes a descriptor into the table.
    pub fn set_descriptor(&self, index: u16, at: u64, len: u32, flags: u16, next: u16) {
        self.memory.put(self.table + u64::from(index) * 16, &Self::descriptor(at, len, flags, next));
    }

    fn rows(pieces: &[Piece], index_of: impl Fn(usize) -> u16) -> Vec<(u16, Vec<u8>)> {
        let row = |(number, &(at, len, is_writable)): (usize, &Piece)| {
            let flags = if is_writable { WRITE } else { 0 };
            let (flags, next) = match number + 1 < pieces.len() {
                true => (flags | NEXT, index_of(number + 1)),
                false => (flags, 0),
            };
            (index_of(number), Self::descriptor(at, len, flags, next))
        };
        pieces.iter().enumerate().map(row).collect()
    }

    /// Puts a chain into the ring without notifying the back end.
    pub fn hang(&mut self, pieces: &[Piece]) -> u16 {
        let taken: Vec<u16> = pieces.iter().map(|_| self.free.pop().expect("a free descriptor")).collect();
        for (index, row) in Self::rows(pieces, |number| taken[number]) {
            self.memory.put(self.table + u64::from(index) * 16, &row);
        }
        let head = taken[0];
        self.hung.insert(head, taken);
        self.offer(head);
        head
    }

    /// As above, with a table of its own.
    pub fn hang_indirect(&mut self, pieces: &[Piece]) -> u16 {
        let rows = Self::rows(pieces, |number| u16::try_from(number).expect("few"));
        let table: Vec<u8> = rows.into_iter().flat_map(|(_, row)| row).collect();
        let at = self.memory.room(table.len());
        self.memory.put(at, &table);
        let head = self.free.pop().expect("a free descriptor");
        self.set_descriptor(head, at, u32::try_from(table.len()).expect("small"), INDIRECT, 0);
        self.hung.insert(head, vec![head]);
        self.offer(head);
        head
    }

    /// Puts a head into the avail ring.
    pub fn offer(&mut self, head: u16) {
        let slot = u64::from(self.next_avail % self.size);
        self.memory.set_index(self.avail + 4 + 2 * slot, head);
        self.next_avail = self.next_avail.wrapping_add(1);
        self.memory.set_index(self.avail + 2, self.next_avail);
    }

    /// Notifies the back end of everything since `before`, if it wants that.
    pub fn kick_since(&mut self, before: u16) {
        std::sync::atomic::fence(Ordering::SeqCst);
        let wanted = match self.has_event_idx {
            true => {
                let event = self.memory.index(self.used + 4 + 8 * u64::from(self.size));
                let (new, old) = (self.next_avail, before);
                new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
            }
            false => self.memory.index(self.used) & 1 == 0,
        };
        if wanted {
            self.kicks += 1;
            self.kick.write(1).expect("an eventfd");
        }
    }

    /// Notifies, whatever the back end wants.
    pub fn kick(&mut self) {
        self.kicks += 1;
        self.kick.write(1).expect("an eventfd");
    }

    /// The next chain that came back, if one has: its head and the length.
    pub fn try_take(&mut self) -> Option<(u16, u32)> {
        if self.memory.index(self.used + 2) == self.next_used {
            return None;
        }
        let slot = u64::from(self.next_used % self.size);
        let row = self.memory.get(self.used + 4 + 8 * slot, 8);
        self.next_used = self.next_used.wrapping_add(1);
        let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four"));
        let head = u16::try_from(number(&row[..4])).expect("a head");
        self.free.extend(self.hung.remove(&head).unwrap_or_default());
        Some((head, number(&row[4..])))
    }

    /// Waits for the next chain that comes back, and for the notification of it.
    #[track_caller]
    pub fn take(&mut self) -> (u16, u32) {
        #[allow(clippy::disallowed_methods, reason = "a test must not hang; other crates include this file")]
        let begun = Instant::now();
        loop {
            if self.has_event_idx {
                // From the next one on.
                self.memory.set_index(self.avail + 4 + 2 * u64::from(self.size), self.next_used);
                std::sync::atomic::fence(Ordering::SeqCst);
            }
            if let Some(taken) = self.try_take() {
                return taken;
            }
            assert!(begun.elapsed() < PATIENCE, "nothing comes back");
            self.wait_for_call(Duration::from_secs(1));
        }
    }

    /// Waits until the guest is notified, at most this long. Returns whether it was.
    pub fn wait_for_call(&self, patience: Duration) -> bool {
        #[allow(clippy::disallowed_methods, reason = "a test must not hang; other crates include this file")]
        let begun = Instant::now();
        loop {
            if self.call.read().is_ok() {
                return true;
            }
            if begun.elapsed() > patience {
                return false;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

/// What a request came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub status: u8,
    pub data: Vec<u8>,
    pub written: u32,
}

/// How a request is cut into descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    Usual,
    /// Each part in pieces of this many bytes.
    Pieces(usize),
    /// In a table of its own.
    Indirect,
}

pub fn header(kind: u32, sector: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
}

/// A request's memory: where it has what.
pub struct Placed {
    pub pieces: Vec<Piece>,
    pub data: u64,
    pub status: u64,
}

impl Queue<'_> {
    /// Puts a request into memory.
    pub fn place(&self, kind: u32, sector: u64, out: &[u8], in_len: usize, shape: Shape) -> Placed {
        let head = header(kind, sector);
        let (header_at, out_at) = (self.memory.room(16), self.memory.room(out.len()));
        let (data, status) = (self.memory.room(in_len), self.memory.room(1));
        self.memory.put(header_at, &head);
        self.memory.put(out_at, out);
        self.memory.put(status, &[0xEE]);
        let mut pieces = Vec::new();
        let mut add = |at: u64, len: usize, is_writable: bool| {
            let step = match shape {
                Shape::Pieces(step) => step,
                _ => len.max(1),
            };
            for start in (0..len).step_by(step) {
                let part = u32::try_from(step.min(len - start)).expect("small");
                pieces.push((at + start as u64, part, is_writable));
            }
        };
        add(header_at, 16, false);
        add(out_at, out.len(), false);
        add(data, in_len, true);
        add(status, 1, true);
        Placed { pieces, data, status }
    }

    /// Asks for something and waits for the answer.
    #[track_caller]
    pub fn ask(&mut self, kind: u32, sector: u64, out: &[u8], in_len: usize, shape: Shape) -> Answer {
        let placed = self.place(kind, sector, out, in_len, shape);
        let before = self.next_avail;
        let head = match shape {
            Shape::Indirect => self.hang_indirect(&placed.pieces),
            _ => self.hang(&placed.pieces),
        };
        self.kick_since(before);
        let (taken, written) = self.take();
        assert_eq!(taken, head, "the chain that was hung up comes back");
        let status = self.memory.get(placed.status, 1)[0];
        Answer { status, data: self.memory.get(placed.data, in_len), written }
    }
}
