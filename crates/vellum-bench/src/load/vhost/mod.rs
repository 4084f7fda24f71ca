//! A machine that puts load on any vhost-user-blk server: the front end's messages are those of the `vhost`
//! crate, the driver is our own.
//!
//! ```text
//!   each queue, a thread    asks ──► ring ──► server        as many under way as the load says, 4 KiB or 1 MiB each
//!                                ◄── ring ◄──               sleeps on the eventfd when nothing has come back
//! ```
//!
//! Like a guest's kernel it notifies the device when the device wants that, checks for more completions
//! before it sleeps, and splits a large request into pieces. Replies are checked: the status, and the tags of
//! all blocks that were read.

mod memory;
mod ring;

use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use vellum_core::{Context, Error, Result};
use vellum_lab::guest::filler;
use vhost::VhostBackend;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::pattern::{Ask, Asks, Load};
use super::workload::{BLOCK, tag};
use super::{Busy, Sample, Timing, keep_all_busy};
use memory::Memory;
use ring::{NEXT, RING_BYTES, Ring, SIZE, WRITE};

/// Of virtio-blk: it can flush; several queues. Of rings: event indexes, the version of the standard.
const FLUSH: u64 = 1 << 9;
const MULTIPLE_QUEUES: u64 = 1 << 12;
const EVENT_INDEX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;

const KIND_READ: u32 = 0;
const KIND_WRITE: u32 = 1;
const KIND_FLUSH: u32 = 4;
const SECTOR: u64 = 512;

/// The length of a contiguous piece of the guest's memory; a large request has several pieces.
const PIECE: usize = 64 << 10;
/// A header and a status of each request.
const SLOT_BYTES: u64 = 64;

/// A server that sends nothing for this long is stuck, in milliseconds.
const PATIENCE_MS: i32 = 30_000;

/// Puts the load on the server at this socket, whose disk has `size` bytes, and returns the measurement.
pub(crate) fn run(
    pid: u32,
    socket: &Path,
    size: u64,
    load: &Load,
    timing: Timing,
    seed: u64,
) -> Result<Sample> {
    let plan = Plan::of(load);
    let memory = Memory::new(plan.bytes)?;
    let mut front_end = connect(socket, &memory, load.queues)?;
    let mut clients = Vec::new();
    for index in 0..load.queues {
        let ring = start(&mut front_end, usize::from(index))?;
        clients.push(Client::new(&memory, ring, &plan, index, load.asks(size, index, seed)?)?);
    }
    let sample = keep_all_busy(clients, pid, load.len(), timing)?;
    for index in 0..load.queues {
        front_end.get_vring_base(usize::from(index)).map_err(refused("end a queue"))?;
    }
    Ok(sample)
}

fn refused<E: std::fmt::Display>(what: &'static str) -> impl FnOnce(E) -> Error {
    move |error| Error::invalid(format!("the server does not {what}: {error}"))
}

fn connect(socket: &Path, memory: &Memory, queues: u16) -> Result<Frontend> {
    let protocol = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
    let mut front_end = Frontend::connect(socket, u64::from(queues)).map_err(refused("take a front end"))?;
    front_end.set_owner().map_err(refused("take an owner"))?;
    let offered = front_end.get_features().map_err(refused("tell its features"))?;
    let needed = FLUSH | EVENT_INDEX | VERSION_1 | protocol;
    if offered & needed != needed {
        return Err(Error::unsupported(format!("the server offers the features {offered:#x}: too few")));
    }
    let told = front_end.get_protocol_features().map_err(refused("tell features of the protocol"))?;
    let taken = told & VhostUserProtocolFeatures::MQ;
    front_end.set_protocol_features(taken).map_err(refused("take features of the protocol"))?;
    let known = front_end.get_queue_num().map_err(refused("tell how many queues it has"))?;
    if known < u64::from(queues) {
        return Err(Error::unsupported(format!("the server has {known} queues")));
    }
    let features = needed | offered & MULTIPLE_QUEUES;
    front_end.set_features(features).map_err(refused("take the features"))?;
    front_end.set_mem_table(&memory.table()).map_err(refused("take the memory"))?;
    Ok(front_end)
}

fn start(front_end: &mut Frontend, index: usize) -> Result<Ring> {
    let ring = Ring::new(index as u64 * RING_BYTES)?;
    let mut tell = || {
        front_end.set_vring_num(index, SIZE)?;
        front_end.set_vring_base(index, 0)?;
        front_end.set_vring_addr(index, &ring.config())?;
        front_end.set_vring_call(index, &ring.call)?;
        front_end.set_vring_kick(index, &ring.kick)?;
        front_end.set_vring_enable(index, true)
    };
    tell().map_err(refused("start a queue"))?;
    Ok(ring)
}

/// The layout of memory: the rings of all queues, headers and statuses, data.
struct Plan {
    depth: u16,
    len: usize,
    /// Pieces of a request.
    pieces: u16,
    slots: u64,
    data: u64,
    bytes: usize,
}

impl Plan {
    fn of(load: &Load) -> Self {
        let pieces = u16::try_from(load.len().div_ceil(PIECE)).expect("a few pieces");
        assert!(load.depth * (pieces + 2) <= SIZE, "all requests find descriptors");
        let (slots, requests) = (u64::from(load.queues) * RING_BYTES, u64::from(load.queues * load.depth));
        let data = (slots + requests * SLOT_BYTES).next_multiple_of(BLOCK as u64);
        let bytes = usize::try_from(data).expect("a small number")
            + load.len() * usize::from(load.queues * load.depth);
        Self { depth: load.depth, len: load.len(), pieces, slots, data, bytes }
    }
}

/// A request's memory, and what is in it.
struct Slot {
    /// Its header; the status is 32 bytes behind it.
    header: u64,
    data: u64,
    /// What its descriptors are made for.
    kind: u32,
    ask: Ask,
    begun: Instant,
    busy: bool,
}

/// One queue with a load.
struct Client<'a> {
    memory: &'a Memory,
    ring: Ring,
    wait: Epoll,
    asks: Asks,
    len: usize,
    pieces: u16,
    slots: Vec<Slot>,
    idle: Vec<u16>,
}

impl<'a> Client<'a> {
    fn new(memory: &'a Memory, ring: Ring, plan: &Plan, queue: u16, asks: Asks) -> Result<Self> {
        let wait = Epoll::new().context(|| "can't make an epoll")?;
        // Edge-triggered: then the eventfd need not be read.
        let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, 0);
        let added = wait.ctl(ControlOperation::Add, ring.call.as_raw_fd(), event);
        added.context(|| "can't wait for an eventfd")?;
        let noise = filler(plan.len);
        let slot = |index: u16| {
            let number = u64::from(queue) * u64::from(plan.depth) + u64::from(index);
            let (header, data) = (plan.slots + number * SLOT_BYTES, plan.data + number * plan.len as u64);
            memory.put(data, &noise);
            Slot { header, data, kind: u32::MAX, ask: Ask::Flush, begun: Instant::now(), busy: false }
        };
        let slots = (0..plan.depth).map(slot).collect();
        let idle = (0..plan.depth).collect();
        Ok(Self { memory, ring, wait, asks, len: plan.len, pieces: plan.pieces, slots, idle })
    }

    /// Hangs a request up.
    fn put(&mut self, index: u16, ask: Ask, now: Instant) {
        let (kind, offset) = match ask {
            Ask::Read(offset) => (KIND_READ, offset),
            Ask::Write(offset) => (KIND_WRITE, offset),
            Ask::Flush => (KIND_FLUSH, 0),
        };
        let head = index * (self.pieces + 2);
        let slot = &mut self.slots[usize::from(index)];
        if slot.kind != kind {
            slot.kind = kind;
            let (header, data) = (slot.header, slot.data);
            self.describe(head, header, data, kind);
        }
        let slot = &mut self.slots[usize::from(index)];
        (slot.ask, slot.begun, slot.busy) = (ask, now, true);
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&(offset / SECTOR).to_le_bytes());
        self.memory.put(slot.header, &header);
        self.memory.put(slot.header + 32, &[0xEE]);
        if kind == KIND_WRITE {
            for at in (0..self.len as u64).step_by(BLOCK) {
                self.memory.put(slot.data + at, &tag(offset + at));
            }
        }
        self.ring.offer(self.memory, head);
    }

    /// Makes the descriptors of a slot those of a kind.
    fn describe(&self, head: u16, header: u64, data: u64, kind: u32) {
        let (ring, memory, status) = (&self.ring, self.memory, head + self.pieces + 1);
        ring.set_descriptor(memory, status, header + 32, 1, WRITE, 0);
        let first = if kind == KIND_FLUSH { status } else { head + 1 };
        ring.set_descriptor(memory, head, header, 16, NEXT, first);
        let len = u32::try_from(self.len.min(PIECE)).expect("a small number");
        let flags = if kind == KIND_READ { NEXT | WRITE } else { NEXT };
        for piece in 0..self.pieces {
            let (index, at) = (head + 1 + piece, data + u64::from(piece) * u64::from(len));
            ring.set_descriptor(memory, index, at, len, flags, index + 1);
        }
    }

    /// Checks a request that came back, and returns how long it took; `None` for a flush.
    fn finish(&mut self, head: u16, now: Instant) -> Result<Option<Duration>> {
        let index = head / (self.pieces + 2);
        let slot = self.slots.get_mut(usize::from(index)).filter(|slot| slot.busy);
        let slot = slot.ok_or_else(|| Error::corrupt("the server gave back what it was not given"))?;
        let [status] = self.memory.get(slot.header + 32);
        if status != 0 {
            return Err(Error::invalid(format!(
                "the server failed a request: {:?}, status {status}",
                slot.ask
            )));
        }
        if let Ask::Read(offset) = slot.ask {
            for at in (0..self.len as u64).step_by(BLOCK) {
                if self.memory.get(slot.data + at) != tag(offset + at) {
                    let place = offset + at;
                    return Err(Error::corrupt(format!("the server gave wrong bytes for {place:#x}")));
                }
            }
        }
        slot.busy = false;
        let took = (slot.ask != Ask::Flush).then(|| now - slot.begun);
        self.idle.push(index);
        Ok(took)
    }
}

impl Busy for Client<'_> {
    fn ask(&mut self) -> Result<()> {
        let now = Instant::now();
        while let Some(index) = self.idle.pop() {
            let ask = self.asks.next()?;
            self.put(index, ask, now);
        }
        self.ring.tell(self.memory)
    }

    fn hear(&mut self, ended: &mut dyn FnMut(Duration)) -> Result<()> {
        let mut heard = false;
        loop {
            let mut now = None;
            while let Some(head) = self.ring.take(self.memory) {
                heard = true;
                let now = *now.get_or_insert_with(Instant::now);
                if let Some(took) = self.finish(head, now)? {
                    ended(took);
                }
            }
            if heard {
                return Ok(());
            }
            if !self.ring.listen(self.memory) {
                let mut events = [EpollEvent::default()];
                match self.wait.wait(PATIENCE_MS, &mut events) {
                    Ok(0) => return Err(Error::invalid("the server does not answer any more")),
                    Err(error) if error.kind() != std::io::ErrorKind::Interrupted => {
                        return Err(Error::io(error, "can't wait for the server"));
                    }
                    _ => {}
                }
            }
        }
    }

    fn under_way(&self) -> usize {
        self.slots.len() - self.idle.len()
    }

    fn leave(self) -> Result<()> {
        Ok(())
    }
}
