//! A driver that keeps a vhost-user-blk server busy: ours, or another program's.
//!
//! `vhostbench SOCKET PID read|write|fill QUEUES DEPTH SECONDS SPAN_MIB` keeps DEPTH requests of 4 KiB in flight on each of
//! QUEUES queues, each with a thread of its own, within the first SPAN_MIB of the disk: random reads, random writes, or
//! writes to each block once, in an order without neighbours (`fill`, which ends when every block was written). It prints
//! requests per second, and what processor time each took the process PID.

#![allow(clippy::print_stdout, reason = "it prints its figures")]

#[path = "../tests/support/guest.rs"]
mod guest;

use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use guest::{EVENT_IDX, FEATURES, Memory, NEXT, Queue, WRITE, header};
use vellum_core::Random;
use vhost::VhostBackend;
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

const BLOCK: u64 = 4096;
/// An odd number: multiples of it meet every block of a power of two once.
const STRIDE: u64 = 0x9E37_79B1;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, pid, kind, queues, depth, seconds, span] = &arguments[..] else {
        println!("vhostbench SOCKET PID read|write|fill QUEUES DEPTH SECONDS SPAN_MIB");
        return;
    };
    let number = |text: &str| text.parse::<u64>().expect("a number");
    let (queues, depth) = (number(queues), u16::try_from(number(depth)).expect("a small number"));
    let (seconds, blocks) = (number(seconds), number(span) * (1 << 20) / BLOCK);
    assert!(blocks.is_power_of_two(), "the span is a power of two");

    let memory = Memory::new();
    let mut front_end = connect(socket, &memory);
    let mut rings: Vec<Queue<'_>> = (0..queues)
        .map(|index| start(&mut front_end, &memory, usize::try_from(index).expect("a small number")))
        .collect();
    let (begun, before) = (Instant::now(), processor_seconds(pid));
    let end = begun + Duration::from_secs(seconds);
    let done: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = rings
            .iter_mut()
            .enumerate()
            .map(|(index, ring)| {
                let load = Load { kind, blocks, first: index as u64, step: queues, depth, end };
                let memory = &memory;
                scope.spawn(move || load.run(ring, memory))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("it ends")).sum()
    });
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    let count = done as f64;
    let (took, spent) = (begun.elapsed().as_secs_f64(), processor_seconds(pid) - before);
    let kicks: usize = rings.iter().map(|ring| ring.kicks).sum();
    println!(
        "{kind:5} queues {queues} depth {depth:2}: {:8.0} requests/s, {:6.2} us of processor each, {kicks} kicks",
        count / took,
        spent * 1e6 / count
    );
    for index in 0..rings.len() {
        front_end.get_vring_base(index).expect("the queue stops");
    }
}

fn connect(socket: &str, memory: &Memory) -> Frontend {
    let mut front_end = Frontend::connect(socket, 256).expect("a server");
    front_end.set_owner().expect("an owner");
    let offered = front_end.get_features().expect("features");
    let protocol = front_end.get_protocol_features().expect("features of the protocol");
    front_end.set_protocol_features(protocol & VhostUserProtocolFeatures::MQ).expect("they are taken");
    front_end.set_features(offered & (FEATURES | EVENT_IDX)).expect("they are taken");
    front_end.set_mem_table(&memory.table()).expect("memory is shared");
    front_end
}

fn start<'a>(front_end: &mut Frontend, memory: &'a Memory, index: usize) -> Queue<'a> {
    let queue = Queue::new(memory, index, 128, 0, true);
    front_end.set_vring_num(index, queue.size).expect("a size");
    front_end.set_vring_base(index, 0).expect("a base");
    front_end.set_vring_addr(index, &queue.config()).expect("addresses");
    front_end.set_vring_call(index, &queue.call).expect("a call");
    front_end.set_vring_kick(index, &queue.kick).expect("a kick");
    front_end.set_vring_enable(index, true).expect("it is enabled");
    queue
}

/// So much processor time the process has had.
fn processor_seconds(pid: &str) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("the process runs");
    let fields = stat.rsplit_once(')').expect("a name").1;
    let ticks: u32 =
        fields.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<u32>().ok()).sum();
    f64::from(ticks) / 100.0
}

/// What one queue does.
struct Load<'a> {
    kind: &'a str,
    blocks: u64,
    /// Of a fill, its first block and how far to the next.
    first: u64,
    step: u64,
    depth: u16,
    end: Instant,
}

impl Load<'_> {
    fn run(&self, queue: &mut Queue<'_>, memory: &Memory) -> u64 {
        let is_read = self.kind == "read";
        let mut random = Random::from_seed(self.first);
        let mut filled = self.first;
        let mut next = || match self.kind {
            "fill" => {
                let block = filled;
                filled += self.step;
                (block < self.blocks).then(|| block.wrapping_mul(STRIDE) % self.blocks)
            }
            _ => Some(random.below(self.blocks)),
        };
        let wait = Epoll::new().expect("an epoll");
        let event = EpollEvent::new(EventSet::IN, 0);
        wait.ctl(ControlOperation::Add, queue.call.as_raw_fd(), event).expect("an eventfd");

        // Each slot has three descriptors, which stay.
        let places: Vec<u64> = (0..self.depth)
            .map(|slot| {
                let (head, data, status) = (memory.room(16), memory.room(8192), memory.room(16));
                let data = data.next_multiple_of(BLOCK);
                memory.put(data, &[u8::try_from(slot).expect("small") | 1; 4096]);
                queue.set_descriptor(3 * slot, head, 16, NEXT, 3 * slot + 1);
                let flags = if is_read { NEXT | WRITE } else { NEXT };
                queue.set_descriptor(3 * slot + 1, data, 4096, flags, 3 * slot + 2);
                queue.set_descriptor(3 * slot + 2, status, 1, WRITE, 0);
                head
            })
            .collect();
        let mut ask = |queue: &mut Queue<'_>, slot: u16| {
            let Some(block) = next() else { return false };
            memory.put(places[usize::from(slot)], &header(u32::from(!is_read), block * (BLOCK / 512)));
            queue.offer(3 * slot);
            true
        };
        let before = queue.next_avail;
        let mut running = (0..self.depth).filter(|slot| ask(queue, *slot)).count();
        queue.kick_since(before);
        let mut done = 0;
        while running > 0 {
            let before = queue.next_avail;
            let is_over = Instant::now() >= self.end;
            while let Some((head, _)) = queue.try_take() {
                done += 1;
                running -= 1;
                if !is_over && ask(queue, head / 3) {
                    running += 1;
                }
            }
            if queue.next_avail != before {
                queue.kick_since(before);
            }
            // Tell me of the next one, and look once more.
            memory.set_index(queue.avail + 4 + 2 * u64::from(queue.size), queue.next_used);
            std::sync::atomic::fence(Ordering::SeqCst);
            if running > 0 && memory.index(queue.used + 2) == queue.next_used {
                let mut events = [EpollEvent::default()];
                drop(wait.wait(1000, &mut events));
                drop(queue.call.read());
            }
        }
        done
    }
}
