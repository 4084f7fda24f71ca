//! The paper's table 2, and what its columns say of the guest.
//!
//! The guest wrote `W` requests of `m` bytes on average, of which a share `a` allocated. Its cache wrote `W m`; the rival wrote
//! `2 (64 KiB − b)` more for each that allocated, `b` bytes of blocks of the database. So the two columns of data and the
//! share give `W` and `m`, and `m` gives how many writes of the database there were for one of the log.

use super::{Job, MIB};
use crate::cowcache::guest::{Guest, LOG_WRITE_BYTES, oltp_requests};
use crate::cowcache::trdc::Policy;
use crate::cowcache::{BLOCK_BYTES, CLUSTER_BYTES};

/// A row of it. Bytes are in GB.
pub(super) struct Printed {
    pub(super) id: &'static str,
    pub(super) name: &'static str,
    pub(super) bytes: u64,
    pub(super) memory_mib: u64,
    pub(super) allocating_permille: u64,
    /// Of TRDC.
    pub(super) hits_percent: f64,
    pub(super) metadata_read: f64,
    pub(super) metadata_written: f64,
    pub(super) data: f64,
    /// Of COWCache.
    pub(super) its_data: f64,
    /// Percent of all that was written to flash.
    pub(super) saved_percent: f64,
}

const fn row(
    (id, name): (&'static str, &'static str),
    (bytes, memory_mib, allocating_permille): (u64, u64, u64),
    [hits_percent, metadata_read, metadata_written, data, its_data, saved_percent]: [f64; 6],
) -> Printed {
    Printed {
        id,
        name,
        bytes,
        memory_mib,
        allocating_permille,
        hits_percent,
        metadata_read,
        metadata_written,
        data,
        its_data,
        saved_percent,
    }
}

pub(super) const PRINTED: [Printed; 4] = [
    row(("C20", "OLTP2-1"), (2048, 1, 731), [39.8, 87.46, 21.9, 38.75, 13.66, 77.2]),
    row(("C21", "OLTP2-8"), (2048, 8, 688), [100.0, 0.0, 23.84, 46.48, 17.08, 75.4]),
    row(("C22", "OLTP8-1"), (8192, 1, 745), [31.4, 90.05, 20.97, 41.31, 13.19, 78.5]),
    row(("C23", "OLTP8-8"), (8192, 8, 699), [100.0, 0.0, 21.5, 48.13, 20.75, 70.0]),
];

impl Printed {
    /// What flash holds of a write of the database.
    fn block_bytes(&self) -> u64 {
        self.bytes.max(BLOCK_BYTES)
    }

    /// Writes of the database for a hundred of the log, from the row's own columns.
    pub(super) fn writes_of_100(&self) -> u64 {
        let more = 2 * (CLUSTER_BYTES - self.block_bytes());
        let allocating = (self.data - self.its_data) / more as f64;
        let mean = self.its_data / (allocating * 1000.0 / self.allocating_permille as f64);
        let (log, block) = (LOG_WRITE_BYTES as f64, self.block_bytes() as f64);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a few hundred")]
        let writes = (100.0 * (log - mean) / (mean - block)).round() as u64;
        writes
    }

    /// The rival's run with this mix: as much data of the guest as the row has, or 500 rounds.
    pub(super) fn job(&self, writes_of_100: u64, is_full: bool) -> Job {
        let Self { bytes, memory_mib, allocating_permille, .. } = *self;
        let hundred_rounds = writes_of_100 * self.block_bytes() + 100 * LOG_WRITE_BYTES;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "some gigabytes")]
        let all = (self.its_data * 1024.0) as u64 * MIB;
        let rounds = if is_full { all * 100 / hundred_rounds } else { 500 };
        let guest = Guest::Oltp { bytes, allocating_permille, writes_of_100 };
        let requests = oltp_requests(rounds, writes_of_100);
        Job { guest, requests, memory_mib, every: None, policy: Policy::WriteBack, is_ours: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_columns_give_the_mix_of_writes() {
        // OLTP2-1: 13.66 of 25.09 GB and 731 of 1000 are 48,904 bytes a write; (262,144 - 48,904) / (48,904 - 4,096) is 4.76.
        assert_eq!(PRINTED.map(|row| row.writes_of_100()), [476, 473, 696, 383]);
    }

    #[test]
    fn a_mix_gives_the_columns_again() {
        for row in PRINTED {
            let of_100 = row.writes_of_100() as f64;
            let bytes = of_100 * row.block_bytes() as f64 + 100.0 * LOG_WRITE_BYTES as f64;
            let allocating = (of_100 + 100.0) * row.allocating_permille as f64 / 1000.0;
            let fills = allocating * (2 * (CLUSTER_BYTES - row.block_bytes())) as f64;
            let data = row.its_data * (bytes + fills) / bytes;
            assert!((data / row.data - 1.0).abs() < 0.002, "{}: {data} of {}", row.name, row.data);
        }
    }
}
