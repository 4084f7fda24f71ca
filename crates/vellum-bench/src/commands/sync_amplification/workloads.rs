//! What the synchronous guest does: a number of operations, each of some writes or discards followed by
//! flushes.
//!
//! ```text
//!   fill, when places are to be mapped already ► close, snapshot │ 64 operations │ those that count, of 1 or 4 guests
//! ```
//!
//! Offsets are clusters of 64 KiB. Those in random order are all different, so that each write of an append
//! is the first one to its cluster. The data is noise, which no format can compress, except where a name ends
//! with `same`: one byte repeated.

use vellum_core::Random;
use vellum_lab::cost::lab::Plan;
use vellum_lab::guest::{Bytes, Request};
use vellum_lab::subjects::{self, Subject};

/// The unit in which QEMU's and our qcow2 give out space.
const CLUSTER_BYTES: u64 = 64 << 10;
/// What an L2 table of qcow2 maps.
const L2_TABLE_REACH: u64 = 512 << 20;
/// The part of a disk with the random places: what two L2 tables of qcow2 map.
const RANDOM_REACH: u64 = 2 * L2_TABLE_REACH;
/// The size of a disk whose workload does not need more.
const DISK_BYTES: u64 = 16 << 30;
/// The size of a full base.
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
    /// A write to a mapped cluster, the only one of its MiB.
    InPlaceApart,
}

/// The content of the image where it has no data of its own yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Below {
    /// Zeroes.
    Nothing,
    /// A full raw image.
    Base,
    /// The same; what is written lies behind its end.
    BeforeBase,
    /// A raw image of that size without data, prepared as a template.
    Zeros,
    /// The same clusters, shared with an internal snapshot.
    Snapshot,
}

/// A workload.
#[derive(Debug, Clone, Copy)]
pub(super) struct Workload {
    /// A short name, for choosing it.
    pub(super) id: &'static str,
    /// The name in a table.
    pub(super) title: &'static str,
    kind: Kind,
    /// Bytes of one write, and what they are.
    len: usize,
    bytes: Bytes,
    pub(super) below: Below,
    /// How many guests share the operations that count.
    pub(super) guests: usize,
    /// Whether a quick run has it.
    pub(super) quick: bool,
}

const fn workload(id: &'static str, title: &'static str, kind: Kind, kib: usize) -> Workload {
    let (len, bytes, below) = (kib << 10, Bytes::Noise, Below::Nothing);
    Workload { id, title, kind, len, bytes, below, guests: 1, quick: false }
}

impl Workload {
    const fn quick(self) -> Self {
        Self { quick: true, ..self }
    }

    const fn over(self, below: Below) -> Self {
        Self { below, ..self }
    }

    /// One byte again and again; else it is noise.
    const fn same(self) -> Self {
        Self { bytes: Bytes::Same, ..self }
    }

    const fn guests(self, guests: usize) -> Self {
        Self { guests, ..self }
    }
}

use Below::{Base, BeforeBase, Snapshot, Zeros};
use Kind::{AppendOverwrite, AppendRandom, AppendSequential, FirstTouch, InPlace, InPlaceApart, Reallocate};

/// All of them, in the order of the table.
pub(super) const WORKLOADS: [Workload; 28] = [
    workload("append-rand-4k", "4 KiB to new clusters, anywhere", AppendRandom, 4).quick(),
    workload("append-rand-64k", "64 KiB to new clusters, anywhere", AppendRandom, 64),
    workload("append-seq-4k", "4 KiB behind the last, 16 to a cluster", AppendSequential, 4).quick(),
    workload("append-seq-64k", "64 KiB behind the last", AppendSequential, 64),
    workload(
        "append-rand-4k-same",
        "one byte again and again: 4 KiB to new clusters, anywhere",
        AppendRandom,
        4,
    )
    .same()
    .quick(),
    workload("append-rand-64k-same", "one byte again and again: 64 KiB to new clusters", AppendRandom, 64)
        .same()
        .quick(),
    workload("append-seq-4k-same", "one byte again and again: 4 KiB behind the last", AppendSequential, 4)
        .same()
        .quick(),
    workload("append-seq-64k-same", "one byte again and again: 64 KiB behind the last", AppendSequential, 64)
        .same()
        .quick(),
    workload(
        "append-overwrite-4k-same",
        "one byte again and again: 4 KiB to new clusters, each place twice",
        AppendOverwrite,
        4,
    )
    .same(),
    workload("append-overwrite-4k", "4 KiB to new clusters, each place twice", AppendOverwrite, 4),
    workload("append-overwrite-64k", "64 KiB to new clusters, each place twice", AppendOverwrite, 64),
    workload("first-touch-4k", "4 KiB, each 512 MiB behind the last", FirstTouch, 4),
    workload("reallocate-4k", "discard of a 64 KiB cluster, 4 KiB to it", Reallocate, 4),
    workload("overwrite-4k", "4 KiB to mapped clusters", InPlace, 4).quick(),
    workload("base-append-rand-4k", "full base: 4 KiB to new clusters, anywhere", AppendRandom, 4)
        .over(Base)
        .quick(),
    workload("base-append-rand-64k", "full base: 64 KiB to new clusters", AppendRandom, 64).over(Base),
    workload("base-append-seq-4k", "full base: 4 KiB behind the last", AppendSequential, 4).over(Base),
    workload("base-append-seq-64k", "full base: 64 KiB behind the last", AppendSequential, 64).over(Base),
    workload("base-append-overwrite-4k", "full base: 4 KiB, each place twice", AppendOverwrite, 4).over(Base),
    workload("base-append-overwrite-64k", "full base: 64 KiB, each place twice", AppendOverwrite, 64)
        .over(Base),
    workload("base-reallocate-4k", "full base: discard of a cluster, 4 KiB to it", Reallocate, 4).over(Base),
    workload("behind-base-4k", "4 KiB behind the end of a full base, anywhere", AppendRandom, 4)
        .over(BeforeBase)
        .quick(),
    workload("base-zeros-4k", "4 KiB over a base of zeros, prepared, anywhere", AppendRandom, 4)
        .over(Zeros)
        .quick(),
    workload("snapshot-4k", "4 KiB to clusters that a snapshot shares", InPlace, 4).over(Snapshot),
    workload("snapshot-64k", "64 KiB to clusters that a snapshot shares", InPlace, 64).over(Snapshot),
    workload("snapshot-apart-4k", "4 KiB to each MiB, in clusters a snapshot shares", InPlaceApart, 4)
        .over(Snapshot)
        .quick(),
    workload("flushers-append-4k", "4 guests: 4 KiB to new clusters, anywhere", AppendRandom, 4)
        .guests(4)
        .quick(),
    workload("flushers-overwrite-4k", "4 guests: 4 KiB to mapped clusters", InPlace, 4).guests(4),
];

impl Workload {
    /// Whether the image is over another.
    pub(super) fn has_base(&self) -> bool {
        matches!(self.below, Base | BeforeBase | Zeros)
    }

    /// Whether it is one for this format.
    pub(super) fn suits(&self, subject: &Subject) -> bool {
        match self.below {
            Below::Nothing => subject.base != subjects::Base::Always,
            Base | BeforeBase | Zeros => subject.base != subjects::Base::Never,
            Snapshot => subject.base != subjects::Base::Always && subject.keeps_snapshots(),
        }
    }

    /// The requests of this many operations that count, after the warm-up.
    pub(super) fn plan(&self, count: usize) -> Plan {
        let operations = WARM_UP + count;
        let is_mapped = matches!(self.kind, Reallocate | InPlace | InPlaceApart);
        let reach = match self.below {
            // Mapped beforehand, and no more than is needed.
            _ if is_mapped => operations as u64 * CLUSTER_BYTES,
            Base | Zeros => BASE_BYTES,
            _ => RANDOM_REACH,
        };
        let disk_bytes = match self.kind {
            FirstTouch => DISK_BYTES.max(operations as u64 * L2_TABLE_REACH),
            _ => DISK_BYTES,
        };
        let mut random = Random::from_seed(SEED);
        let clusters = distinct(reach / CLUSTER_BYTES, operations, &mut random);
        let mut fill = Vec::new();
        if is_mapped {
            let len = usize::try_from(CLUSTER_BYTES).expect("small");
            let write = |index| Request::Write { offset: index as u64 * self.stride(), len };
            fill.extend((0..operations).map(write));
            fill.push(Request::Flush);
        }
        let mut warm_up = Vec::new();
        let mut counted = vec![Vec::new(); self.guests];
        for (index, cluster) in clusters.into_iter().enumerate() {
            let requests = if index < WARM_UP { &mut warm_up } else { &mut counted[index % self.guests] };
            self.operation(index, cluster, &mut random, requests);
        }
        Plan { disk_bytes, bytes: self.bytes, fill, warm_up, counted }
    }

    /// The distance between mapped clusters.
    fn stride(&self) -> u64 {
        if self.kind == InPlaceApart { 1 << 20 } else { CLUSTER_BYTES }
    }

    fn operation(&self, index: usize, cluster: u64, random: &mut Random, requests: &mut Vec<Request>) {
        let (len, index) = (self.len, index as u64);
        // A small write may be anywhere in its cluster.
        let within = random.below(CLUSTER_BYTES / len as u64) * len as u64;
        let offset = match self.kind {
            AppendSequential => index * len as u64,
            FirstTouch => index * L2_TABLE_REACH + within,
            _ if self.below == BeforeBase => BASE_BYTES + cluster * CLUSTER_BYTES + within,
            _ => cluster * self.stride() + within,
        };
        if self.kind == Reallocate {
            let len = usize::try_from(CLUSTER_BYTES).expect("small");
            requests.push(Request::Discard { offset: cluster * CLUSTER_BYTES, len });
        }
        requests.extend([Request::Write { offset, len }, Request::Flush]);
        if self.kind == AppendOverwrite {
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
    fn plans_stay_in_the_disk_and_each_guest_ends_with_a_flush() {
        for workload in WORKLOADS {
            let plan = workload.plan(32);
            assert_eq!(plan.counted.len(), workload.guests, "{}", workload.id);
            let (mut flushes, mut counted) = (0, 0);
            let before = plan.fill.last().is_none_or(|last| *last == Request::Flush);
            assert!(before && plan.warm_up.last() == Some(&Request::Flush), "{}", workload.id);
            for requests in &plan.counted {
                assert_eq!(requests.last(), Some(&Request::Flush), "{}", workload.id);
                flushes += requests.iter().filter(|request| **request == Request::Flush).count();
                counted += writes(requests).len();
            }
            for requests in [&plan.fill, &plan.warm_up].into_iter().chain(&plan.counted) {
                for (offset, len) in writes(requests) {
                    assert!(offset + len as u64 <= plan.disk_bytes, "{}", workload.id);
                }
            }
            let per_operation = if workload.kind == AppendOverwrite { 2 } else { 1 };
            assert_eq!((flushes, counted), (32 * per_operation, 32 * per_operation), "{}", workload.id);
        }
    }

    #[test]
    fn appends_go_to_new_clusters_and_overwrites_to_mapped_ones() {
        for workload in WORKLOADS {
            let plan = workload.plan(200);
            let cluster = |(offset, _): (u64, usize)| offset / CLUSTER_BYTES;
            let before = writes(&plan.fill).into_iter().chain(writes(&plan.warm_up));
            let mut seen: HashSet<u64> = before.map(cluster).collect();
            let counted = plan.counted.iter().flat_map(|requests| writes(requests));
            let new = counted.filter(|write| seen.insert(cluster(*write))).count();
            let expected = match workload.kind {
                AppendRandom | FirstTouch | AppendOverwrite => 200,
                // 64 writes of 4 KiB end with a cluster, and 200 more with half of one.
                AppendSequential => 200 / (64 / (workload.len >> 10)) + usize::from(workload.len == 4096),
                Reallocate | InPlace | InPlaceApart => 0,
            };
            assert_eq!(new, expected, "{}", workload.id);
        }
    }

    #[test]
    fn names_are_different_and_tell_what_is_written() {
        let names: HashSet<&str> = WORKLOADS.iter().map(|workload| workload.id).collect();
        assert_eq!(names.len(), WORKLOADS.len());
        for workload in WORKLOADS {
            assert_eq!(workload.bytes == Bytes::Same, workload.id.ends_with("-same"), "{}", workload.id);
        }
    }
}
