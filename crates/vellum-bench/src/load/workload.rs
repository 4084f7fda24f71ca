//! What a client requests: which operation, of which size, where, and how many at a time.
//!
//! Every 4 KiB block of a disk begins with a *tag* derived from its offset, both in the images that are
//! served and in everything that is written. So each reply to a read can be checked for the price of one
//! comparison, and a server that is fast because it answers wrongly is detected.

use vellum_core::Random;

/// The unit that carries a tag.
pub(crate) const BLOCK: usize = 4096;

/// What is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Read.
    Read,
    /// Write what is there already.
    Write,
}

/// Where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Anywhere, each place as likely as any other.
    Random,
    /// One after the other, and from the start again. Each connection has its own part of the disk.
    Sequential,
}

/// A client's behaviour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Workload {
    /// What is asked.
    pub(crate) operation: Operation,
    /// Where.
    pub(crate) order: Order,
    /// Bytes of one request, a multiple of [`BLOCK`].
    pub(crate) len: usize,
    /// Requests in flight on each connection.
    pub(crate) depth: usize,
}

impl Workload {
    /// A short name, for choosing it.
    pub(crate) fn id(&self) -> String {
        let operation = match self.operation {
            Operation::Read => "read",
            Operation::Write => "write",
        };
        let order = match self.order {
            Order::Random => "rand",
            Order::Sequential => "seq",
        };
        format!("{order}-{operation}-{}k-d{}", self.len >> 10, self.depth)
    }

    /// The name in a table.
    pub(crate) fn title(&self) -> String {
        let operation = match self.operation {
            Operation::Read => "read",
            Operation::Write => "write",
        };
        let order = match self.order {
            Order::Random => "random",
            Order::Sequential => "sequential",
        };
        let len = if self.len >= 1 << 20 {
            format!("{} MiB", self.len >> 20)
        } else {
            format!("{} KiB", self.len >> 10)
        };
        format!("{order} {operation} {len}, depth {}", self.depth)
    }

    /// Whether the latency of one operation is measured, not the rate.
    pub(crate) fn is_about_latency(&self) -> bool {
        self.depth == 1
    }
}

/// The places of one connection's requests.
pub(crate) struct Places {
    order: Order,
    len: u64,
    first: u64,
    count: u64,
    next: u64,
    random: Random,
}

impl Places {
    /// For connection `index` of `connections` to a disk of `size` bytes.
    pub(crate) fn new(workload: &Workload, size: u64, index: usize, connections: usize, seed: u64) -> Self {
        let len = workload.len as u64;
        let all = size / len;
        let (first, count) = match workload.order {
            Order::Random => (0, all),
            Order::Sequential => {
                let share = all / connections as u64;
                (share * index as u64, share)
            }
        };
        assert!(count > 0, "the disk is large enough for the workload");
        let random = Random::from_seed(seed.wrapping_mul(1000).wrapping_add(index as u64));
        Self { order: workload.order, len, first, count, next: 0, random }
    }

    /// Where the next request goes.
    pub(crate) fn next(&mut self) -> u64 {
        let place = match self.order {
            Order::Random => self.random.below(self.count),
            Order::Sequential => {
                let place = self.next;
                self.next = (place + 1) % self.count;
                place
            }
        };
        (self.first + place) * self.len
    }
}

/// How the block at `offset` begins. Never zero.
pub(crate) fn tag(offset: u64) -> [u8; 8] {
    (offset ^ 0x5645_4C4C_554D_2121).to_be_bytes()
}

/// Writes the tags of a run that begins at `offset`.
pub(crate) fn stamp(bytes: &mut [u8], offset: u64) {
    for (index, block) in bytes.chunks_mut(BLOCK).enumerate() {
        block[..8].copy_from_slice(&tag(offset + (index * BLOCK) as u64));
    }
}

#[cfg(test)]
mod tests {
    use vellum_lab::guest::filler;

    use super::*;

    const SEQUENTIAL: Workload =
        Workload { operation: Operation::Read, order: Order::Sequential, len: 1 << 20, depth: 4 };

    #[test]
    fn connections_that_go_in_sequence_have_parts_of_their_own() {
        let places = |index| {
            let mut places = Places::new(&SEQUENTIAL, 9 << 20, index, 4, 7);
            [places.next() >> 20, places.next() >> 20, places.next() >> 20]
        };
        assert_eq!(places(0), [0, 1, 0]);
        assert_eq!(places(3), [6, 7, 6]);
    }

    #[test]
    fn random_places_are_aligned_inside_and_the_same_for_every_server() {
        let workload = Workload { order: Order::Random, len: BLOCK, ..SEQUENTIAL };
        let places = |seed| {
            let mut places = Places::new(&workload, 1 << 20, 0, 1, seed);
            (0..1000).map(|_| places.next()).collect::<Vec<_>>()
        };
        assert!(places(3).iter().all(|at| at % 4096 == 0 && *at < 1 << 20));
        assert_eq!(places(3), places(3));
        assert_ne!(places(3), places(4));
    }

    #[test]
    fn each_block_has_its_tag() {
        let mut bytes = filler(3 * BLOCK);
        stamp(&mut bytes, 8192);
        assert_eq!(bytes[BLOCK..BLOCK + 8], tag(8192 + 4096));
        assert_ne!(tag(0), [0; 8]);
        assert_eq!(SEQUENTIAL.id(), "seq-read-1024k-d4");
        assert_eq!(SEQUENTIAL.title(), "sequential read 1 MiB, depth 4");
    }
}
