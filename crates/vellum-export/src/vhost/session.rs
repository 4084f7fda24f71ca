//! One front end, from its connection to its end: its messages about memory and queues, and the queues that
//! run.
//!
//! ```text
//!   a thread of its own      messages, one by one, read and answered by the `vhost` crate        blocks; waits for queues
//!   workers                  one future for each queue that runs (`queue`)                       never block
//! ```
//!
//! A queue runs while it has an address, a kick and is enabled; a message that takes one of them away first
//! stops the queue, which waits for everything that it took.
//!
//! 1. Nothing outlives the session: the next front end, or the same one again, sends everything anew.
//! 2. When the session has ended, however it did, every request that was taken has been answered into the
//!    guest's memory.
//! 3. An invalid message ends the session without having changed anything.
//! 4. A queue whose rings leave the memory stops while they are still there, and continues when they are
//!    back: a front end that moves a region's borders removes the region and adds it again, while the guest
//!    runs.
//! 5. A queue that panics ends its session, and no other.
//! 6. A front end that sends nothing, or half of a message, is disconnected when its time is over
//!    (`patience`).
//! 7. A front end that continues after a server that was killed is served only if nothing that was
//!    acknowledged to it is missing (`reconnects`).

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use arc_swap::ArcSwap;
use futures_lite::FutureExt as _;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{SealFlags, fcntl_get_seals};
use rustix::io::Errno;
use vellum_core::{Clock, Context, Error, ErrorKind, Result, Witness, lock, witnessed};
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVirtioFeatures, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    BackendReqHandler, Error as Refusal, GpuBackend, Result as Answer, VhostUserBackendReqHandlerMut,
};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueT};

use super::back_channel::BackChannel;
use super::bell::Bell;
use super::config::{CONFIG_BYTES_MAX, Facts, OFFERED_BEFORE, WRITEBACK_AT, has, is_writethrough};
use super::inflight::Book;
use super::memory::{Memory, REGIONS_MAX, Region};
use super::patience::{self, Patience, SAY_SOMETHING, There};
use super::queue::{Line, Ring};
use super::request::ID_BYTES;
use super::work::Target;
use super::{Device, Host, QUEUES_MAX, Reconnects};
use crate::shutdown::Shutdown;

/// How often to check whether a front end that owes a message has sent it.
const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// The longest ring.
const QUEUE_SIZE_MAX: u32 = 1024;

const PROTOCOL: VhostUserProtocolFeatures = VhostUserProtocolFeatures::MQ
    .union(VhostUserProtocolFeatures::REPLY_ACK)
    .union(VhostUserProtocolFeatures::CONFIG)
    .union(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    .union(VhostUserProtocolFeatures::INFLIGHT_SHMFD)
    .union(VhostUserProtocolFeatures::BACKEND_REQ);

/// A front end that has connected and is not served yet.
pub struct Session {
    socket: UnixStream,
    stop: Arc<OwnedFd>,
    resized: Arc<OwnedFd>,
}

/// Ends a session from outside, from any thread, or makes it check the size of its disk.
pub struct SessionHandle {
    socket: UnixStream,
    stop: Arc<OwnedFd>,
    resized: Arc<OwnedFd>,
}

/// What a session does next.
enum Next {
    Message,
    Resized,
    Stop,
    Silence,
}

/// Rings an eventfd.
fn ring(eventfd: &OwnedFd) {
    #[expect(clippy::host_endian_bytes, reason = "an eventfd takes a number of the host")]
    let one = 1u64.to_ne_bytes();
    let _ = rustix::io::write(eventfd, &one);
}

impl SessionHandle {
    /// No more messages are read, queues hand back what they took, and only then the front end sees that it
    /// is alone. It may find out from the rings what was done and what was not.
    pub fn end(&self) {
        ring(&self.stop);
    }

    /// The disk may have grown: if so, the front end is notified.
    pub fn notify_resize(&self) {
        ring(&self.resized);
    }

    /// As above, for a front end that stopped in the middle of a message.
    pub fn cut(&self) {
        self.end();
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }
}

impl Session {
    /// A session over this socket, and what ends it.
    ///
    /// # Errors
    /// When the host has no descriptors left.
    pub fn new(socket: UnixStream) -> Result<(Self, SessionHandle)> {
        let context = || "can't serve a vhost-user front end";
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let bell =
            || Ok::<_, Error>(Arc::new(eventfd(0, flags).map_err(std::io::Error::from).context(context)?));
        let (stop, resized) = (bell()?, bell()?);
        let there = socket.try_clone().context(context)?;
        let handle = SessionHandle { socket: there, stop: stop.clone(), resized: resized.clone() };
        Ok((Self { socket, stop, resized }, handle))
    }

    /// Serves the front end on the calling thread, until it goes or the session is ended.
    ///
    /// # Errors
    /// `NotFound` when there is no such export now; otherwise what the front end did wrong. It is for the
    /// log.
    pub fn serve(self, device: &Device, host: Arc<dyn Host>) -> Result<()> {
        let context = || format!("export {:?}", device.name);
        // It counts as a session of the export, so that the disk is not removed meanwhile.
        let attached = device.exports.attach(&device.name);
        let attached = attached
            .ok_or_else(|| Error::new(ErrorKind::NotFound, "there is no such export"))
            .context(context)?;
        let export = attached.export();
        let facts = Facts::new(&export.disk.geometry(), export.read_only, device.queues);
        let mut id = [0; ID_BYTES];
        let serial = device.serial.as_bytes();
        let len = serial.len().min(ID_BYTES);
        id[..len].copy_from_slice(&serial[..len]);
        let witness = device.heard.of(&*export.disk);
        let disk = witnessed(export.disk.clone(), witness);
        let target = Target { disk, facts, id, is_writethrough: AtomicBool::new(false) };
        let front_end = FrontEnd::new(target, device, host, self.stop.clone(), witness.cloned());
        let front_end = Arc::new(Mutex::new(front_end));
        let mut handler =
            BackendReqHandler::from_stream(self.socket.try_clone().context(context)?, front_end.clone());
        // Also when this thread panics: a queue may run only while it can be stopped.
        let _stopped = StopsQueues(front_end.clone());
        let mut patience = Patience::new(device.clock.now());
        let ended = loop {
            match self.next(&mut patience, &*device.clock) {
                Next::Stop => break Ok(()),
                Next::Silence => {
                    let seconds = SAY_SOMETHING.as_secs();
                    break Err(Error::new(
                        ErrorKind::Closed,
                        format!(
                            "it has not sent a complete message for {seconds} s, and others wait for the socket"
                        ),
                    ));
                }
                Next::Resized => {
                    let _ = rustix::io::read(&self.resized, &mut [0; 8]);
                    lock(&front_end).announce_size();
                    continue;
                }
                Next::Message => {}
            }
            if let Some(back_channel) = BackChannel::peek(&self.socket) {
                lock(&front_end).set_back_channel(back_channel);
            }
            match handler.handle_request() {
                Ok(()) => {}
                Err(Refusal::Disconnected | Refusal::SocketBroken(_)) => break Ok(()),
                Err(refusal) => {
                    let why = lock(&front_end).turned_away.take();
                    break Err(why.unwrap_or_else(|| Error::invalid(refusal.to_string())));
                }
            }
        };
        lock(&front_end).stop_all();
        // Only now: what the front end finds in the rings is all that will ever be there.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        ended.context(context)
    }

    /// Waits for the next message, or what comes before it.
    fn next(&self, patience: &mut Patience, clock: &dyn Clock) -> Next {
        let mut waiting = [&self.stop, &self.resized].map(|bell| PollFd::new(bell, PollFlags::IN)).to_vec();
        waiting.push(PollFd::new(&self.socket, PollFlags::IN));
        loop {
            let there = patience::look(&self.socket);
            if !patience.goes_on(there, clock.now()) {
                return Next::Silence;
            }
            let time = match there {
                There::All => Some(Timespec::default()),
                _ => patience.is_short().then_some(LOOK_EVERY),
            };
            // Half a message would wake it again and again.
            let bells = if there == There::Part { 2 } else { 3 };
            match poll(&mut waiting[..bells], time.as_ref()) {
                Err(Errno::INTR) => {}
                // Without a way to wait the next message does.
                Err(_) => return Next::Message,
                Ok(_) if !waiting[0].revents().is_empty() => return Next::Stop,
                Ok(_) if !waiting[1].revents().is_empty() => return Next::Resized,
                Ok(_) if there == There::All => return Next::Message,
                Ok(_) => {}
            }
        }
    }
}

/// Stops the queues of a front end, however its session ends.
struct StopsQueues(Arc<Mutex<FrontEnd>>);

impl Drop for StopsQueues {
    fn drop(&mut self) {
        lock(&self.0).stop_all();
    }
}

/// What one front end has sent.
struct FrontEnd {
    target: Arc<Target>,
    host: Arc<dyn Host>,
    /// Ends the session.
    stop: Arc<OwnedFd>,
    /// The features that it acknowledged; none before that message.
    taken: u64,
    memory: Arc<ArcSwap<Memory>>,
    /// Where it keeps what is in flight.
    book: Option<Arc<Book>>,
    rings: Vec<RingState>,
    /// The back channel, if it has sent one.
    back_channel: Option<BackChannel>,
    /// The size that was last announced to it, in sectors.
    announced: u64,
    /// Whether files that can be truncated are accepted.
    takes_unsealed: bool,
    /// Which front ends that were connected before may continue.
    reconnects: Reconnects,
    /// What its guest has seen of lost writes.
    witness: Option<Arc<Witness>>,
    /// This one has been found to be one of them, or to be new.
    may_resume: bool,
    /// Why it may not.
    turned_away: Option<Error>,
}

/// The messages about one queue.
#[derive(Default)]
struct RingState {
    size: u16,
    /// Descriptor table, used ring, avail ring; for the guest.
    places: Option<(u64, u64, u64)>,
    /// Where it continues.
    base: u16,
    kick: Option<Bell>,
    call: Arc<Line>,
    err: Arc<Line>,
    is_enabled: bool,
    running: Option<Running>,
}

/// A queue that runs, and how to end that.
struct Running {
    stop: Shutdown,
    ended: mpsc::Receiver<u16>,
}

impl RingState {
    /// Waits until everything that was taken has been handed back.
    fn stop(&mut self) {
        if let Some(running) = self.running.take() {
            running.stop.drain();
            // A queue that broke its rules leaves the base as it was, and so does a worker that has ended
            // before it.
            self.base = running.ended.recv().unwrap_or(self.base);
        }
    }
}

/// Refuses a message, and logs the reason.
fn refused(error: &Error) -> Refusal {
    tracing::debug!("a vhost-user message is refused: {}", error.chain());
    Refusal::InvalidParam
}

impl FrontEnd {
    fn new(
        target: Target,
        device: &Device,
        host: Arc<dyn Host>,
        stop: Arc<OwnedFd>,
        witness: Option<Arc<Witness>>,
    ) -> Self {
        let (queues, takes_unsealed) = (device.queues, device.takes_unsealed);
        let rings = std::iter::repeat_with(RingState::default).take(usize::from(queues)).collect();
        let memory = Arc::new(ArcSwap::from_pointee(Memory::default()));
        let announced = target.facts.terms().sectors;
        Self {
            target: Arc::new(target),
            host,
            stop,
            taken: 0,
            memory,
            book: None,
            rings,
            back_channel: None,
            announced,
            takes_unsealed,
            reconnects: device.reconnects.clone(),
            witness,
            may_resume: false,
            turned_away: None,
        }
    }

    /// Notifies it if the disk's size differs from the one last announced. It does not matter that the front
    /// end has queried the size meanwhile: its guest may not have.
    fn announce_size(&mut self) {
        let sectors = self.target.facts.update_size(&self.target.disk.geometry());
        if let Some(back_channel) = &self.back_channel
            && sectors != self.announced
        {
            back_channel.notify_config_change();
            self.announced = sectors;
        }
    }

    /// From now on it can be notified; a change that came earlier is announced now.
    fn set_back_channel(&mut self, back_channel: BackChannel) {
        self.back_channel = Some(back_channel);
        self.announce_size();
    }

    fn ring(&mut self, index: u32) -> Answer<&mut RingState> {
        let index = usize::try_from(index).expect("32 bits");
        self.rings.get_mut(index).ok_or(Refusal::InvalidParam)
    }

    fn stop_all(&mut self) {
        // All are stopped before any of them is waited for.
        self.rings.iter().filter_map(|ring| ring.running.as_ref()).for_each(|running| running.stop.drain());
        self.rings.iter_mut().for_each(RingState::stop);
    }

    /// Refuses a file that could become shorter while it is mapped: access behind its end would end the
    /// program, and all its disks.
    fn check_sealed(&self, file: &File) -> Answer<()> {
        let is_sealed = fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if is_sealed || self.takes_unsealed {
            return Ok(());
        }
        let why = "a front end shares memory that it could truncate while it is in use; share a memfd sealed with \
         F_SEAL_SHRINK (QEMU: memory-backend-memfd, sealed unless seal=off), or allow it with \
         --vhost-unsealed-memory";
        tracing::warn!("{why}");
        Err(refused(&Error::new(ErrorKind::Refused, why)))
    }

    /// Starts the queue if it has all it needs.
    fn start(&mut self, index: u32) -> Answer<()> {
        let may_run_at_once =
            !has(self.taken, VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits().trailing_zeros());
        let event_idx = has(self.taken, VIRTIO_RING_F_EVENT_IDX);
        let (memory, target, host) = (self.memory.clone(), self.target.clone(), self.host.clone());
        let book = self.book.clone();
        let ring = self.ring(index)?;
        let (Some(kick), Some(places), None) = (&ring.kick, ring.places, &ring.running) else {
            return Ok(());
        };
        if !(ring.is_enabled || may_run_at_once) {
            return Ok(());
        }
        let (kick, lines) = (kick.clone(), (ring.call.clone(), ring.err.clone()));
        let mut queue = ring.queue(places, event_idx, &memory.load())?;
        self.check_may_resume(queue.next_used())?;
        let kept = match book {
            Some(book) => {
                Some(book.open(index, queue.size(), queue.next_used()).ok_or(Refusal::InvalidParam)?)
            }
            None => None,
        };
        if let Some((_, left)) = &kept
            && !left.is_empty()
        {
            // The front end knows only how many came back. The rest was taken before what comes next.
            let left = u16::try_from(left.len()).expect("as many as the ring is long, at most");
            queue.set_next_avail(queue.next_used().wrapping_add(left));
        }
        let ring = self.ring(index)?;
        let (stop, (sender, ended)) = (Shutdown::new(), mpsc::channel());
        ring.running = Some(Running { stop: stop.clone(), ended });
        let (there, end) = (host.clone(), self.stop.clone());
        host.spawn(
            index,
            Box::new(move || {
                Box::pin(async move {
                    let served = Ring::new(queue, memory, target, lines, kept).serve(kick, stop, there);
                    match AssertUnwindSafe(served).catch_unwind().await {
                        // The thread that stopped the queue waits for this.
                        Ok(base) => drop(sender.send(base)),
                        // What a disk does is caught there; this is for the queue's own rules.
                        Err(_) => {
                            tracing::error!(
                                queue = index,
                                "a queue failed with an internal error; its session is closed"
                            );
                            self::ring(&end);
                        }
                    }
                })
            }),
        );
        Ok(())
    }

    /// Checks, once, whether it may continue where it was.
    fn check_may_resume(&mut self, used: u16) -> Answer<()> {
        if !self.may_resume
            && let Err(error) = self.reconnects.look(self.book.as_ref(), used, self.witness.as_ref())
        {
            self.turned_away = Some(error);
            return Err(Refusal::InvalidOperation("it was connected to a server that was killed"));
        }
        self.may_resume = true;
        Ok(())
    }

    fn change_memory(&mut self, memory: Result<Memory>) -> Answer<()> {
        let memory = Arc::new(memory.map_err(|error| refused(&error))?);
        // Requests are handed back while their ring is still there; and where memory is removed, before the
        // front end gets its answer: requests may use the memory until they end.
        let stays = memory.has_all_of(&self.memory.load());
        let mut leaving: Vec<_> =
            self.rings.iter_mut().filter(|ring| !stays || !ring.is_in(&memory)).collect();
        leaving.iter().filter_map(|ring| ring.running.as_ref()).for_each(|running| running.stop.drain());
        leaving.iter_mut().for_each(|ring| ring.stop());
        drop(leaving);
        self.memory.store(memory.clone());
        for index in 0..self.rings.len() {
            if self.rings[index].is_in(&memory) {
                self.start(u32::try_from(index).expect("few queues"))?;
            }
        }
        Ok(())
    }
}

fn refused_queue(error: virtio_queue::Error) -> Refusal {
    refused(&Error::invalid(error.to_string()))
}

impl RingState {
    /// Whether the front end has described its rings, and they are inside this memory.
    fn is_in(&self, memory: &Memory) -> bool {
        let Some(places) = self.places.filter(|_| self.size > 0) else { return false };
        self.laid_out(places).is_ok_and(|queue| queue.is_valid(memory.mapped()))
    }

    /// The queue as the front end has described it, wherever it began.
    fn laid_out(&self, (table, used, avail): (u64, u64, u64)) -> Answer<Queue> {
        let refuse = refused_queue;
        let size = u16::try_from(QUEUE_SIZE_MAX).expect("a small number");
        let mut queue = Queue::new(size).map_err(refuse)?;
        queue.try_set_size(self.size).map_err(refuse)?;
        queue.try_set_desc_table_address(vm_memory::GuestAddress(table)).map_err(refuse)?;
        queue.try_set_avail_ring_address(vm_memory::GuestAddress(avail)).map_err(refuse)?;
        queue.try_set_used_ring_address(vm_memory::GuestAddress(used)).map_err(refuse)?;
        queue.set_ready(true);
        Ok(queue)
    }

    /// As above, for a queue that is to continue.
    fn queue(&self, places: (u64, u64, u64), event_idx: bool, memory: &Memory) -> Answer<Queue> {
        let mut queue = self.laid_out(places)?;
        queue.set_event_idx(event_idx);
        if !queue.is_valid(memory.mapped()) {
            return Err(refused(&Error::invalid("a ring is not in memory")));
        }
        queue.set_next_avail(self.base);
        // What was handed back before is recorded in the guest's memory alone.
        let used = queue.used_idx(memory.mapped(), Ordering::Acquire).map_err(refused_queue)?;
        queue.set_next_used(used.0);
        Ok(queue)
    }
}

fn bell(file: Option<File>) -> Answer<Option<Bell>> {
    file.map(Bell::new).transpose().map_err(|error| refused(&error))
}

impl VhostUserBackendReqHandlerMut for FrontEnd {
    fn set_owner(&mut self) -> Answer<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Answer<()> {
        self.stop_all();
        // Otherwise they would continue with the next change of memory.
        self.rings.iter_mut().for_each(|ring| ring.is_enabled = false);
        Ok(())
    }

    fn reset_device(&mut self) -> Answer<()> {
        Err(Refusal::InvalidOperation("resetting the device is not supported"))
    }

    fn get_features(&mut self) -> Answer<u64> {
        Ok(self.target.facts.features() | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits())
    }

    fn set_features(&mut self, features: u64) -> Answer<()> {
        if features & !(self.get_features()? | OFFERED_BEFORE) != 0 {
            return Err(Refusal::FeatureMismatch);
        }
        self.taken = features;
        self.target.is_writethrough.store(is_writethrough(features), Ordering::Relaxed);
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Answer<VhostUserProtocolFeatures> {
        Ok(PROTOCOL)
    }

    fn set_protocol_features(&mut self, features: u64) -> Answer<()> {
        if features & !PROTOCOL.bits() != 0 { Err(Refusal::FeatureMismatch) } else { Ok(()) }
    }

    fn get_queue_num(&mut self) -> Answer<u64> {
        Ok(self.rings.len() as u64)
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Answer<Option<Vec<u64>>> {
        let regions = regions.iter().map(|region| Region {
            guest: region.guest_phys_addr,
            front_end: region.user_addr,
            len: region.memory_size,
            in_file: region.mmap_offset,
        });
        for file in &files {
            self.check_sealed(file)?;
        }
        self.change_memory(Memory::map(regions.zip(files)))?;
        Ok(None)
    }

    fn get_max_mem_slots(&mut self) -> Answer<u64> {
        Ok(REGIONS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Answer<Option<u64>> {
        self.check_sealed(&file)?;
        let memory = self.memory.load().with(single(region), file);
        self.change_memory(memory)?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Answer<()> {
        let memory = self.memory.load().without(single(region));
        self.change_memory(memory)
    }

    fn set_vring_num(&mut self, index: u32, size: u32) -> Answer<()> {
        let ring = self.ring(index)?;
        if size > QUEUE_SIZE_MAX || !size.is_power_of_two() || ring.running.is_some() {
            return Err(Refusal::InvalidParam);
        }
        ring.size = u16::try_from(size).expect("a small number");
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Answer<()> {
        if !flags.is_empty() {
            return Err(Refusal::InvalidParam);
        }
        let memory = self.memory.load();
        let place = |address| memory.guest_address(address).ok_or(Refusal::InvalidParam);
        let places = (place(descriptor)?, place(used)?, place(available)?);
        let ring = self.ring(index)?;
        if ring.places == Some(places) {
            return Ok(());
        }
        ring.stop();
        ring.places = Some(places);
        self.start(index)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Answer<()> {
        let ring = self.ring(index)?;
        if ring.running.is_some() {
            return Err(Refusal::InvalidParam);
        }
        ring.base = u16::try_from(base).map_err(|_| Refusal::InvalidParam)?;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Answer<VhostUserVringState> {
        let ring = self.ring(index)?;
        ring.stop();
        // It takes a new kick to continue.
        ring.kick = None;
        ring.call.replace(None);
        Ok(VhostUserVringState::new(index, u32::from(ring.base)))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Answer<()> {
        let index = u32::from(index);
        let ring = self.ring(index)?;
        // Without one we would have to look all the time.
        let kick = bell(fd)?.ok_or(Refusal::InvalidParam)?;
        ring.stop();
        ring.kick = Some(kick);
        self.start(index)
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Answer<()> {
        let host = self.host.clone();
        let ring = self.ring(u32::from(index))?;
        ring.call.replace(bell(fd)?);
        // At once: the guest may be waiting for a notification that had no eventfd to go to.
        let (call, there) = (ring.call.clone(), host.clone());
        host.spawn(
            u32::from(index),
            Box::new(move || {
                call.ring(&*there);
                Box::pin(std::future::ready(()))
            }),
        );
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Answer<()> {
        let ring = self.ring(u32::from(index))?;
        ring.err.replace(bell(fd)?);
        Ok(())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Answer<()> {
        let ring = self.ring(index)?;
        ring.is_enabled = enable;
        if !enable {
            ring.stop();
        }
        self.start(index)
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Answer<Vec<u8>> {
        // It may have become larger before anybody could say so.
        self.target.facts.update_size(&self.target.disk.geometry());
        let space = self.target.facts.space();
        let start = usize::try_from(offset).expect("32 bits");
        let end = start.checked_add(usize::try_from(size).expect("32 bits"));
        let part = end.filter(|end| *end <= CONFIG_BYTES_MAX).and_then(|end| space.get(start..end));
        part.map(<[u8]>::to_vec).ok_or(Refusal::InvalidParam)
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _flags: VhostUserConfigFlags) -> Answer<()> {
        match (usize::try_from(offset), bytes) {
            // A guest that has this switch is served write-through in either position.
            (Ok(WRITEBACK_AT), [_]) => Ok(()),
            _ => Err(Refusal::InvalidParam),
        }
    }

    fn set_gpu_socket(&mut self, _gpu: GpuBackend) -> Answer<()> {
        Err(Refusal::InvalidOperation("this is a disk"))
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Answer<File> {
        Err(Refusal::InvalidOperation("shared objects are not supported"))
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Answer<(VhostUserInflight, File)> {
        let (queues, rows) = book_size(wanted)?;
        let (file, len) = Book::create(queues, rows).map_err(|error| refused(&error))?;
        Ok((VhostUserInflight::new(len, 0, queues, rows), file))
    }

    fn set_inflight_fd(&mut self, kept: &VhostUserInflight, file: File) -> Answer<()> {
        let (queues, rows) = book_size(kept)?;
        if self.rings.iter().any(|ring| ring.running.is_some()) {
            return Err(Refusal::InvalidOperation("queues run"));
        }
        self.check_sealed(&file)?;
        let book = Book::map(file, kept.mmap_offset, queues, rows).map_err(|error| refused(&error))?;
        self.book = Some(book);
        self.may_resume = false;
        Ok(())
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Answer<Option<File>> {
        Err(Refusal::InvalidOperation("migration of the device state is not supported"))
    }

    fn check_device_state(&mut self) -> Answer<()> {
        Err(Refusal::InvalidOperation("migration of the device state is not supported"))
    }

    fn get_shmem_config(&mut self) -> Answer<VhostUserShMemConfig> {
        Err(Refusal::InvalidOperation("shared memory regions are not supported"))
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Answer<()> {
        Err(Refusal::InvalidOperation("dirty-page logging is not supported"))
    }
}

/// For how many queues of what length a book is, within what there can be.
fn book_size(inflight: &VhostUserInflight) -> Answer<(u16, u16)> {
    let is_right = inflight.num_queues <= QUEUES_MAX && u32::from(inflight.queue_size) <= QUEUE_SIZE_MAX;
    if is_right { Ok((inflight.num_queues, inflight.queue_size)) } else { Err(Refusal::InvalidParam) }
}

fn single(region: &VhostUserSingleMemoryRegion) -> Region {
    Region {
        guest: region.guest_phys_addr,
        front_end: region.user_addr,
        len: region.memory_size,
        in_file: region.mmap_offset,
    }
}
