//! Guests of the paper, as requests: random writes, random mixes with a share of allocating writes, OLTP, traces.
//!
//! ```text
//!   random   FIO's: whole sizes, aligned to the size, or shifted by half of it; it never flushes
//!   mix      4 KiB, writes and reads; a write goes to a cluster that none has, or to one of those that have
//!   oltp     a round: writes of the database (2 or 8 KiB), reads of what was written, 256 KiB of log, a flush
//! ```
//!
//! The paper's OLTP guest is Filebench's, whose requests to the disk were not recorded, so this is a generator of our
//! own with its parameters: sizes of requests and of a log write (`oltp.f`), and the share of allocating writes that
//! the paper's table prints. What it does not print was fitted on its row of OLTP2-1 with 1 MiB (C20), and the other
//! three rows follow from that: writes of the database for one of the log (on the data that the rival wrote to flash),
//! the size of the database and the reads (on the rival's reads of metadata). One flush a round is what the row's
//! metadata writes come to.

use std::collections::HashSet;

use vellum_core::Random;
use vellum_lab::guest::Request;

use super::{CLUSTER_BYTES, DISK_BYTES};

/// Writes of the database in a hundred rounds of OLTP, where nothing else is said.
pub(crate) const OLTP_WRITES_OF_100: u64 = 500;
/// Reads in a round.
pub(crate) const OLTP_READS: u64 = 24;
/// What its log writes at a time, and how long the log is, before it begins again.
pub(crate) const LOG_WRITE_BYTES: u64 = 256 << 10;
const LOG_BYTES: u64 = 10 << 20;
/// The database: as far as 8 MiB of tables reach with room to spare.
const DATABASE_BYTES: u64 = 56 << 30;
/// The database begins behind the log.
const DATABASE_AT: u64 = 1 << 30;

/// What is to be asked of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Guest {
    /// Writes at random places of the whole disk.
    Random { bytes: u64, is_aligned: bool },
    /// Writes and reads of 4 KiB; so many of three are writes, and so many of a hundred of these allocate.
    Mix { writes_of_three: u64, allocating_percent: u64 },
    /// Rounds of OLTP with this size of request; so many of a thousand writes allocate, and a hundred rounds have so
    /// many writes of the database.
    Oltp { bytes: u64, allocating_permille: u64, writes_of_100: u64 },
}

/// Writes and reads of so many rounds of OLTP.
pub(crate) fn oltp_requests(rounds: u64, writes_of_100: u64) -> u64 {
    rounds * (OLTP_READS + 1) + rounds * writes_of_100 / 100
}

impl Guest {
    /// Its requests: writes and reads so many (rounds of OLTP are not begun that would be more), and flushes beside them.
    pub(crate) fn requests(self, count: u64, seed: u64) -> Box<dyn Iterator<Item = Request>> {
        let random = Random::from_seed(seed);
        let take = usize::try_from(count).expect("a count of requests");
        match self {
            Self::Random { bytes, is_aligned } => {
                Box::new(RandomWrites { random, bytes, is_aligned }.take(take))
            }
            Self::Mix { writes_of_three, allocating_percent } => {
                let places = Places::new(0, DISK_BYTES);
                Box::new(Mix { random, places, writes_of_three, allocating_percent }.take(take))
            }
            Self::Oltp { bytes, allocating_permille, writes_of_100 } => {
                let places = Places::new(DATABASE_AT, DATABASE_BYTES);
                let mut oltp = Oltp { random, places, bytes, allocating_permille, writes_of_100, log: 0 };
                let rounds =
                    (0..).take_while(move |rounds| oltp_requests(rounds + 1, writes_of_100) <= count);
                Box::new(rounds.flat_map(move |number| oltp.round(number)))
            }
        }
    }
}

fn length(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a request is short")
}

struct RandomWrites {
    random: Random,
    bytes: u64,
    is_aligned: bool,
}

impl Iterator for RandomWrites {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        let (bytes, len) = (self.bytes, length(self.bytes));
        let shift = if self.is_aligned { 0 } else { bytes / 2 };
        let offset = self.random.below(DISK_BYTES / bytes - 1) * bytes + shift;
        Some(Request::Write { offset, len })
    }
}

/// Clusters that have been written, and others.
struct Places {
    at: u64,
    clusters: u64,
    written: Vec<u64>,
    is_written: HashSet<u64>,
}

impl Places {
    fn new(at: u64, bytes: u64) -> Self {
        Self { at, clusters: bytes / CLUSTER_BYTES, written: Vec::new(), is_written: HashSet::new() }
    }

    /// One that has not been written until now; one that has, where there is no other.
    fn fresh(&mut self, random: &mut Random) -> u64 {
        for _ in 0..64 {
            let cluster = random.below(self.clusters);
            if self.is_written.insert(cluster) {
                self.written.push(cluster);
                return cluster;
            }
        }
        self.written[random.index(self.written.len())]
    }

    /// A place for a request of this size, allocating or not.
    fn place(&mut self, random: &mut Random, bytes: u64, is_fresh: bool) -> u64 {
        let cluster = match is_fresh || self.written.is_empty() {
            true => self.fresh(random),
            false => self.written[random.index(self.written.len())],
        };
        self.at + cluster * CLUSTER_BYTES + random.below(CLUSTER_BYTES / bytes) * bytes
    }
}

struct Mix {
    random: Random,
    places: Places,
    writes_of_three: u64,
    allocating_percent: u64,
}

impl Iterator for Mix {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        let bytes = 4096;
        if self.random.below(3) >= self.writes_of_three {
            let offset = self.random.below(DISK_BYTES / bytes) * bytes;
            return Some(Request::Read { offset, len: length(bytes) });
        }
        let is_fresh = self.random.below(100) < self.allocating_percent;
        let offset = self.places.place(&mut self.random, bytes, is_fresh);
        Some(Request::Write { offset, len: length(bytes) })
    }
}

struct Oltp {
    random: Random,
    places: Places,
    bytes: u64,
    allocating_permille: u64,
    writes_of_100: u64,
    log: u64,
}

impl Oltp {
    fn round(&mut self, number: u64) -> Vec<Request> {
        // The log's write is one of the writes of which so many allocate, and does not.
        let of_100 = self.writes_of_100;
        let permille = self.allocating_permille * (of_100 + 100) / of_100;
        let bytes = self.bytes;
        let mut round = Vec::new();
        for _ in number * of_100 / 100..(number + 1) * of_100 / 100 {
            let is_fresh = self.random.below(1000) < permille;
            let offset = self.places.place(&mut self.random, bytes, is_fresh);
            round.push(Request::Write { offset, len: length(bytes) });
        }
        for _ in 0..OLTP_READS {
            let offset = self.places.place(&mut self.random, bytes, false);
            round.push(Request::Read { offset, len: length(bytes) });
        }
        round.push(Request::Write { offset: self.log, len: length(LOG_WRITE_BYTES) });
        self.log = (self.log + LOG_WRITE_BYTES) % LOG_BYTES;
        round.push(Request::Flush);
        round
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written_clusters(requests: &[Request]) -> (usize, usize) {
        let mut seen = HashSet::new();
        let mut counts = (0, 0);
        for request in requests {
            if let Request::Write { offset, .. } = request {
                counts.0 += 1;
                counts.1 += usize::from(seen.insert(offset / CLUSTER_BYTES));
            }
        }
        counts
    }

    #[test]
    fn a_mix_has_its_shares() {
        let requests: Vec<_> =
            Guest::Mix { writes_of_three: 2, allocating_percent: 40 }.requests(30_000, 1).collect();
        let (writes, allocating) = written_clusters(&requests);
        assert!((19_500..20_500).contains(&writes), "{writes}");
        assert!((39..=41).contains(&(allocating * 100 / writes)), "{allocating} of {writes}");
    }

    #[test]
    fn oltp_allocates_as_often_as_the_table_says_and_stays_in_its_database() {
        let guest = Guest::Oltp { bytes: 2048, allocating_permille: 731, writes_of_100: 500 };
        let requests: Vec<_> = guest.requests(60_000, 1).collect();
        let (writes, allocating) = written_clusters(&requests);
        assert_eq!(writes, 12_000);
        // The log's clusters count once more.
        assert!((715..750).contains(&(allocating * 1000 / writes)), "{allocating} of {writes}");
        assert_eq!(requests.iter().filter(|request| **request == Request::Flush).count(), 2000);
        let again: Vec<_> = guest.requests(60_000, 1).collect();
        assert_eq!(requests, again);
        let guest = Guest::Oltp { bytes: 8192, allocating_permille: 745, writes_of_100: 696 };
        let requests: Vec<_> = guest.requests(oltp_requests(1000, 696), 1).collect();
        let (writes, allocating) = written_clusters(&requests);
        assert_eq!((writes, requests.iter().filter(|one| **one == Request::Flush).count()), (7960, 1000));
        assert!((730..760).contains(&(allocating * 1000 / writes)), "{allocating} of {writes}");
    }

    #[test]
    fn an_unaligned_write_spans_two_clusters() {
        let requests = Guest::Random { bytes: CLUSTER_BYTES, is_aligned: false }.requests(1000, 1);
        for request in requests {
            let Request::Write { offset, len } = request else { panic!("a write") };
            assert_eq!((offset % CLUSTER_BYTES, len), (CLUSTER_BYTES / 2, 65_536));
        }
    }
}
