//! Which cases there are: image × page cache or not × connections × workload.

use vellum_lab::server::Cache;

use crate::images::Image;
use crate::load::workload::{Operation, Order, Workload};
use crate::report::Figures;

/// What is measured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Case {
    pub(super) image: Image,
    pub(super) cache: Cache,
    pub(super) connections: usize,
    pub(super) workload: Workload,
}

impl Case {
    /// Its name, for choosing it.
    pub(super) fn id(&self) -> String {
        let cache = match self.cache {
            Cache::Buffered => "buffered",
            Cache::Direct => "direct",
        };
        format!("{}/{cache}/c{}/{}", self.image.id(), self.connections, self.workload.id())
    }

    /// What cases whose images take turns have in common.
    pub(super) fn group(&self) -> String {
        let cache = match self.cache {
            Cache::Buffered => "page cache",
            Cache::Direct => "O_DIRECT",
        };
        let connections = if self.connections == 1 { "connection" } else { "connections" };
        format!("{}; {cache}; {} {connections}", self.workload.title(), self.connections)
    }

    /// What is looked at.
    pub(super) fn figures(&self) -> Figures {
        if self.workload.is_about_latency() {
            Figures::Latency
        } else if self.workload.order == Order::Sequential {
            Figures::Throughput
        } else {
            Figures::Rate
        }
    }
}

const WORKLOADS: [Workload; 6] = {
    const fn random(operation: Operation, depth: usize) -> Workload {
        Workload { operation, order: Order::Random, len: 4 << 10, depth }
    }
    const fn sequential(operation: Operation) -> Workload {
        Workload { operation, order: Order::Sequential, len: 1 << 20, depth: 4 }
    }
    [
        random(Operation::Read, 32),
        random(Operation::Write, 32),
        sequential(Operation::Read),
        sequential(Operation::Write),
        random(Operation::Read, 1),
        random(Operation::Write, 1),
    ]
};

/// How many clients there are.
const CONNECTIONS: [usize; 2] = [1, 4];

/// All cases, in the order of the table: those of a group stand together.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for cache in [Cache::Buffered, Cache::Direct] {
        for connections in CONNECTIONS {
            for workload in WORKLOADS {
                for image in Image::ALL {
                    let allocates = image == Image::Overlay && workload.operation == Operation::Write;
                    let crowd_at_depth_one = connections > 1 && workload.is_about_latency();
                    if !allocates && !crowd_at_depth_one {
                        cases.push(Case { image, cache, connections, workload });
                    }
                }
            }
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_have_names_of_their_own_and_none_allocates() {
        let ids: Vec<String> = cases().iter().map(Case::id).collect();
        let mut unique = ids.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(ids.len(), unique.len());
        assert_eq!(ids[0], "raw/buffered/c1/rand-read-4k-d32");
        assert!(!ids.iter().any(|id| id.starts_with("overlay") && id.contains("write")));
        assert!(!ids.iter().any(|id| id.contains("c4") && id.ends_with("-d1")));
        let cases = cases();
        let groups: Vec<String> =
            cases.chunk_by(|a, b| a.group() == b.group()).map(|g| g[0].group()).collect();
        assert!(groups.iter().all(|group| groups.iter().filter(|other| *other == group).count() == 1));
    }
}
