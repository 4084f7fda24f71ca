//! What the fuzz target does with its bytes: they are a guest's memory, rings, chains and requests.
//!
//! ```text
//!   input   │ mode │ turns │ what memory begins with ………………………………………… │
//!   memory  0x000 descriptors │ 0x100 avail ring │ 0x200 used ring │ 0x300 the rest │ … 0x4000   then a hole, then a page
//! ```
//!
//! 1. No panic, and no access outside the two mappings (that would end the process).
//! 2. The disk sees only what lies within it ([`CheckedDisk`] holds the contract).
//! 3. Whatever was taken has been handed back when nothing runs any more.

use std::fs::File;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Waker};

use arc_swap::ArcSwap;
use rustix::fs::{MemfdFlags, memfd_create};
use vellum_core::{CheckedDisk, Disk, MemoryDisk};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

use super::config::Facts;
use super::memory::{Memory, Region};
use super::queue::{Line, Ring};
use super::request::ID_BYTES;
use super::work::Target;

const QUEUE_SIZE: u16 = 16;
const MEMORY_BYTES: usize = 0x4000;
const FAR: u64 = 0x8000;
const FAR_BYTES: u64 = 0x1000;
const DISK_BYTES: u64 = 64 << 10;

/// Serves a queue whose memory begins with the input.
pub fn fuzz_request(data: &[u8]) {
    let [mode, turns, image @ ..] = data else { return };
    let memory = memory();
    let mut bytes = vec![0; MEMORY_BYTES];
    let len = image.len().min(MEMORY_BYTES);
    bytes[..len].copy_from_slice(&image[..len]);
    memory.mapped().write_slice(&bytes, GuestAddress(0)).expect("there is memory");

    let disk = CheckedDisk::new(MemoryDisk::new(DISK_BYTES));
    let facts = Facts::new(&disk.geometry(), mode & 1 != 0, 1);
    let is_writethrough = AtomicBool::new(mode & 2 != 0);
    let target = Arc::new(Target { disk, facts, id: *b"twenty bytes of name", is_writethrough });
    const { assert!(ID_BYTES == 20) };
    let mut queue = Queue::new(QUEUE_SIZE).expect("a power of two");
    queue.try_set_desc_table_address(GuestAddress(0)).expect("it is aligned");
    queue.try_set_avail_ring_address(GuestAddress(0x100)).expect("it is aligned");
    queue.try_set_used_ring_address(GuestAddress(0x200)).expect("it is aligned");
    queue.set_event_idx(mode & 4 != 0);
    queue.set_ready(true);
    let memory = Arc::new(ArcSwap::new(memory.clone()));
    let lines = (Arc::new(Line::default()), Arc::new(Line::default()));
    let mut ring = Ring::new(queue, memory, target, lines, None);
    let context = Context::from_waker(Waker::noop());
    for _ in 0..=*turns % 4 {
        ring.try_turn(&context);
    }
}

/// The memory of every guest that there will be.
fn memory() -> &'static Arc<Memory> {
    static MEMORY: OnceLock<Arc<Memory>> = OnceLock::new();
    MEMORY.get_or_init(|| {
        let file = |len: u64| {
            let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd"));
            file.set_len(len).expect("its length");
            file
        };
        let region = |guest: u64, len: u64| Region { guest, front_end: guest, len, in_file: 0 };
        let near = (region(0, MEMORY_BYTES as u64), file(MEMORY_BYTES as u64));
        let far = (region(FAR, FAR_BYTES), file(FAR_BYTES));
        Arc::new(Memory::map([near, far]).expect("it is mapped"))
    })
}

/// Requests that keep to the rules, to begin with: memory as a driver leaves it that has hung up these.
pub fn seeds() -> Vec<Vec<u8>> {
    let requests: [(u32, u64, usize, usize); 8] = [
        (0, 3, 0, 512),
        (0, 127, 0, 1024),
        (1, 8, 1024, 0),
        (4, 0, 0, 0),
        (8, 0, 0, 20),
        (11, 0, 16, 0),
        (13, 0, 32, 0),
        (2, 0, 8, 8),
    ];
    let mut seeds: Vec<Vec<u8>> = requests.iter().map(|request| image(&[*request], 0)).collect();
    seeds.push(image(&requests[2..6], 4));
    seeds.push(image(&requests[5..], 3));
    seeds
}

fn image(requests: &[(u32, u64, usize, usize)], mode: u8) -> Vec<u8> {
    let mut bytes = vec![0; 0x300];
    let put = |bytes: &mut Vec<u8>, at: usize, row: &[u8]| bytes[at..at + row.len()].copy_from_slice(row);
    let mut index = 0u16;
    for (number, &(kind, sector, out_len, in_len)) in requests.iter().enumerate() {
        let head = index;
        let at = bytes.len();
        bytes.extend([&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat());
        // Runs for those that have some: a few sectors at the start.
        let run = [&1u64.to_le_bytes()[..], &2u32.to_le_bytes(), &[0; 4]].concat();
        bytes.extend(run.iter().cycle().take(out_len));
        let filled_at = bytes.len();
        bytes.resize(filled_at + in_len + 1, 0);
        let rows = [(at, 16 + out_len, 1u16), (filled_at, in_len + 1, 2)];
        for (place, len, flags) in rows {
            index += 1;
            let row = [
                &(place as u64).to_le_bytes()[..],
                &u32::try_from(len).expect("small").to_le_bytes(),
                &flags.to_le_bytes(),
                &index.to_le_bytes(),
            ];
            put(&mut bytes, usize::from(index - 1) * 16, &row.concat());
        }
        put(&mut bytes, 0x104 + 2 * number, &head.to_le_bytes());
    }
    let count = u16::try_from(requests.len()).expect("few");
    put(&mut bytes, 0x102, &count.to_le_bytes());
    [&[mode, 1][..], &bytes].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    // One test, because there is one memory.
    #[test]
    fn seeds_are_answered_and_noise_does_no_harm() {
        for seed in seeds() {
            fuzz_request(&seed);
            let memory = memory().mapped();
            let hung: u16 = memory.read_obj(GuestAddress(0x102)).expect("memory");
            let taken: u16 = memory.read_obj(GuestAddress(0x202)).expect("memory");
            assert_eq!(hung, taken);
        }
        for seed in 0..2000 {
            let mut random = vellum_core::Random::from_seed(seed);
            let all = seeds();
            let mut input = all[random.index(all.len())].clone();
            for _ in 0..random.index(20) {
                let at = random.index(input.len());
                input[at] = u8::try_from(random.index(256)).expect("a byte");
            }
            fuzz_request(&input);
        }
    }
}
