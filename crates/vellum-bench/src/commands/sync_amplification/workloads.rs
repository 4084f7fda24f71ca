//! What the synchronous guest does: a number of operations, each of some writes or discards with flushes after them.
//!
//! ```text
//!   fill, when places are to be mapped already │ 64 operations │ the operations that count
//! ```
//!
//! Places are clusters of 64 KiB. Those of a random order are all different, so that each write of an append is the first one
//! of its cluster.

use vellum_core::Random;

use crate::load::guest::Request;

/// The unit in which QEMU's and our qcow2 give out space.
const CLUSTER_BYTES: u64 = 64 << 10;
/// What an L2 table of qcow2 maps.
const L2_TABLE_REACH: u64 = 512 << 20;
/// The part of a disk that random places lie in: what two L2 tables of qcow2 map.
const RANDOM_REACH: u64 = 2 * L2_TABLE_REACH;
/// The size of a disk whose workload does not need more.
const DISK_BYTES: u64 = 4 << 30;
/// The size of a full base, and so of the overlay's disk.
pub(super) const BASE_BYTES: u64 = 128 << 20;

/// Operations after which a new image is at work as an older one is.
pub(super) const WARM_UP: usize = 64;

const SEED: u64 = 1;

/// What each operation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A write to a new cluster, anywhere.
    AppendRandom,
    /// A write behind the last one.
    AppendSequential,
    /// A write to a new cluster and the same again, with a flush after each.
    AppendOverwrite,
    /// A write to the next L2 table's part of the disk.
    FirstTouch,
    /// A discard of a mapped cluster, and a write to it.
    Reallocate,
    /// A write to a mapped cluster.
    InPlace,
}

/// A workload.
#[derive(Debug, Clone, Copy)]
pub(super) struct Workload {
    /// A short name, for choosing it.
    pub(super) id: &'static str,
    /// The name in a table.
    pub(super) title: &'static str,
    kind: Kind,
    /// Bytes of one write.
    len: usize,
    /// Whether the image is an overlay on a full base.
    pub(super) on_base: bool,
}

const fn workload(id: &'static str, title: &'static str, kind: Kind, kib: usize, on_base: bool) -> Workload {
    Workload { id, title, kind, len: kib << 10, on_base }
}

/// All of them, in the order of the table.
pub(super) const WORKLOADS: [Workload; 13] = [
    workload("append-rand-4k", "4 KiB to new clusters, anywhere", Kind::AppendRandom, 4, false),
    workload("append-rand-64k", "64 KiB to new clusters, anywhere", Kind::AppendRandom, 64, false),
    workload("append-seq-4k", "4 KiB behind the last, 16 to a cluster", Kind::AppendSequential, 4, false),
    workload("append-seq-64k", "64 KiB behind the last", Kind::AppendSequential, 64, false),
    workload(
        "append-overwrite-4k",
        "4 KiB to new clusters, flush, the same place again, flush",
        Kind::AppendOverwrite,
        4,
        false,
    ),
    workload(
        "append-overwrite-64k",
        "64 KiB to new clusters, flush, the same place again, flush",
        Kind::AppendOverwrite,
        64,
        false,
    ),
    workload("first-touch-4k", "4 KiB, each 512 MiB behind the last", Kind::FirstTouch, 4, false),
    workload("reallocate-4k", "discard of a 64 KiB cluster, 4 KiB to it", Kind::Reallocate, 4, false),
    workload("overwrite-4k", "4 KiB to mapped clusters", Kind::InPlace, 4, false),
    workload(
        "base-append-rand-4k",
        "full base: 4 KiB to new clusters, anywhere",
        Kind::AppendRandom,
        4,
        true,
    ),
    workload(
        "base-append-rand-64k",
        "full base: 64 KiB to new clusters, anywhere",
        Kind::AppendRandom,
        64,
        true,
    ),
    workload(
        "base-append-seq-4k",
        "full base: 4 KiB behind the last, 16 to a cluster",
        Kind::AppendSequential,
        4,
        true,
    ),
    workload(
        "base-append-overwrite-4k",
        "full base: 4 KiB to new clusters, flush, the same place again, flush",
        Kind::AppendOverwrite,
        4,
        true,
    ),
];

/// What is asked, in order.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    /// The size of the disk.
    pub(super) disk_bytes: u64,
    /// All that does not count: the fill and the first operations.
    pub(super) before: Vec<Request>,
    /// What counts.
    pub(super) counted: Vec<Request>,
}

impl Workload {
    /// The requests of so many operations that count, after the warm-up.
    pub(super) fn plan(&self, count: usize) -> Plan {
        let operations = WARM_UP + count;
        let reach = match (self.kind, self.on_base) {
            (_, true) => BASE_BYTES,
            // Mapped beforehand, and no more than is needed.
            (Kind::Reallocate | Kind::InPlace, _) => operations as u64 * CLUSTER_BYTES,
            _ => RANDOM_REACH,
        };
        let disk_bytes = match (self.kind, self.on_base) {
            (_, true) => BASE_BYTES,
            (Kind::FirstTouch, _) => operations as u64 * L2_TABLE_REACH,
            _ => DISK_BYTES,
        };
        let mut random = Random::from_seed(SEED);
        let clusters = distinct(reach / CLUSTER_BYTES, operations, &mut random);
        let mut before = Vec::new();
        if matches!(self.kind, Kind::Reallocate | Kind::InPlace) {
            let cluster_bytes = usize::try_from(CLUSTER_BYTES).expect("small");
            let fill = |index| Request::Write { offset: index as u64 * CLUSTER_BYTES, len: cluster_bytes };
            before.extend((0..operations).map(fill));
            before.push(Request::Flush);
        }
        let mut counted = Vec::new();
        for (index, cluster) in clusters.into_iter().enumerate() {
            let requests = if index < WARM_UP { &mut before } else { &mut counted };
            self.operation(index, cluster, &mut random, requests);
        }
        Plan { disk_bytes, before, counted }
    }

    fn operation(&self, index: usize, cluster: u64, random: &mut Random, requests: &mut Vec<Request>) {
        let (len, index) = (self.len, index as u64);
        // A small write lies anywhere in its cluster.
        let within = random.below(CLUSTER_BYTES / len as u64) * len as u64;
        let offset = match self.kind {
            Kind::AppendSequential => index * len as u64,
            Kind::FirstTouch => index * L2_TABLE_REACH + within,
            _ => cluster * CLUSTER_BYTES + within,
        };
        if self.kind == Kind::Reallocate {
            let len = usize::try_from(CLUSTER_BYTES).expect("small");
            requests.push(Request::Discard { offset: cluster * CLUSTER_BYTES, len });
        }
        requests.extend([Request::Write { offset, len }, Request::Flush]);
        if self.kind == Kind::AppendOverwrite {
            requests.extend([Request::Write { offset, len }, Request::Flush]);
        }
    }
}

/// `count` different numbers below `end`, in any order.
fn distinct(end: u64, count: usize, random: &mut Random) -> Vec<u64> {
    let mut numbers: Vec<u64> = (0..end).collect();
    assert!(numbers.len() >= count, "the disk is large enough for the workload");
    for index in 0..count {
        let other = index + random.index(numbers.len() - index);
        numbers.swap(index, other);
    }
    numbers.truncate(count);
    numbers
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn writes(requests: &[Request]) -> Vec<(u64, usize)> {
        let write = |request: &Request| match *request {
            Request::Write { offset, len } => Some((offset, len)),
            _ => None,
        };
        requests.iter().filter_map(write).collect()
    }

    #[test]
    fn plans_stay_in_the_disk_and_end_with_a_flush() {
        for workload in WORKLOADS {
            let plan = workload.plan(32);
            for (offset, len) in writes(&plan.before).into_iter().chain(writes(&plan.counted)) {
                assert!(offset + len as u64 <= plan.disk_bytes, "{}", workload.id);
            }
            assert_eq!(plan.before.last(), Some(&Request::Flush), "{}", workload.id);
            assert_eq!(plan.counted.last(), Some(&Request::Flush), "{}", workload.id);
            let flushes = plan.counted.iter().filter(|request| **request == Request::Flush).count();
            let per_operation = if workload.kind == Kind::AppendOverwrite { 2 } else { 1 };
            assert_eq!((flushes, writes(&plan.counted).len()), (32 * per_operation, 32 * per_operation));
        }
    }

    #[test]
    fn appends_go_to_new_clusters_and_overwrites_to_mapped_ones() {
        for workload in WORKLOADS {
            let plan = workload.plan(200);
            let cluster = |(offset, _): (u64, usize)| offset / CLUSTER_BYTES;
            let mut seen: HashSet<u64> = writes(&plan.before).into_iter().map(cluster).collect();
            let new = writes(&plan.counted).into_iter().filter(|write| seen.insert(cluster(*write))).count();
            let expected = match workload.kind {
                Kind::AppendRandom | Kind::FirstTouch | Kind::AppendOverwrite => 200,
                Kind::AppendSequential => {
                    200 / (64 / (workload.len >> 10)) + usize::from(workload.len == 4096)
                }
                Kind::Reallocate | Kind::InPlace => 0,
            };
            // 64 writes of 4 KiB end with a cluster, and 200 more with half of one.
            assert_eq!(new, expected, "{}", workload.id);
        }
    }
}
