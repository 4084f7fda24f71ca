//! The cases: a way × how the file is reached × a disk × a workload.

use vellum_lab::server::Cache;

use super::way::Way;
use crate::images::Image;
use crate::load::pattern::{Load, Pattern};

/// Which disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Disk {
    Mapped(Image),
    /// An image that is made for each turn, and has nothing in it.
    Fresh,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) way: Way,
    pub(super) cache: Cache,
    pub(super) disk: Disk,
    pub(super) load: Load,
}

/// Which workload runs on which disk.
const ASKED: [(Disk, Pattern); 8] = [
    (Disk::Mapped(Image::Qcow2), Pattern::Read),
    (Disk::Mapped(Image::Qcow2), Pattern::Overwrite),
    (Disk::Mapped(Image::Qcow2), Pattern::Sequential),
    (Disk::Mapped(Image::Qcow2), Pattern::Mixed),
    (Disk::Fresh, Pattern::Allocate),
    (Disk::Mapped(Image::Raw), Pattern::Read),
    (Disk::Mapped(Image::Raw), Pattern::Overwrite),
    (Disk::Mapped(Image::Raw), Pattern::Sequential),
];

impl Case {
    /// All of them, those of one group beside each other.
    pub(super) fn all() -> Vec<Self> {
        let mut cases = Vec::new();
        for way in Way::ALL {
            for cache in [Cache::Buffered, Cache::Direct] {
                for (disk, pattern) in ASKED {
                    let depths: &[u16] = match pattern {
                        Pattern::Sequential => &[4],
                        Pattern::Mixed => &[32],
                        _ => &[1, 32],
                    };
                    // A file has no queues.
                    let queues = if way == Way::Fuse { 1..=1 } else { 1..=2 };
                    for (&depth, queues) in
                        depths.iter().flat_map(|depth| queues.clone().map(move |queues| (depth, queues)))
                    {
                        cases.push(Self { way, cache, disk, load: Load { pattern, depth, queues } });
                    }
                }
            }
        }
        cases
    }

    /// Whether it is measured by default.
    pub(super) fn is_usual(&self) -> bool {
        let Load { pattern, depth, queues } = self.load;
        let is_raw = self.disk == Disk::Mapped(Image::Raw);
        match (self.way, self.cache) {
            (Way::Vhost, Cache::Buffered) if is_raw => pattern == Pattern::Read && depth == 32 && queues == 1,
            (Way::Vhost, Cache::Buffered) => match pattern {
                Pattern::Sequential | Pattern::Mixed => queues == 1,
                _ => depth == 32 || queues == 1,
            },
            (Way::Vhost, Cache::Direct) => {
                let is_random = !matches!(pattern, Pattern::Sequential | Pattern::Mixed);
                is_random && depth == 32 && (queues == 1 || pattern == Pattern::Read && !is_raw)
            }
            (Way::Fuse, Cache::Buffered) => {
                !is_raw && depth == 32 && matches!(pattern, Pattern::Read | Pattern::Overwrite)
            }
            (Way::Nbd, Cache::Buffered) => {
                let is_wanted = pattern == Pattern::Read || pattern == Pattern::Overwrite && !is_raw;
                is_wanted && depth == 32 && queues == 1
            }
            (Way::Fuse | Way::Nbd, Cache::Direct) => false,
        }
    }

    pub(super) fn group(&self) -> String {
        let cache = match self.cache {
            Cache::Buffered => "buffered",
            Cache::Direct => "direct",
        };
        format!("{}/{cache}/{}", self.way.id(), self.disk_id())
    }

    fn disk_id(&self) -> &'static str {
        match self.disk {
            Disk::Mapped(image) => image.id(),
            Disk::Fresh => "fresh",
        }
    }

    pub(super) fn id(&self) -> String {
        format!("{}/{}", self.group(), self.load.id())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_has_a_name_of_its_own() {
        let mut names: Vec<String> = Case::all().iter().map(Case::id).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(count, names.len());
        assert!(names.contains(&"vhost/direct/fresh/allocate-d32-q2".to_owned()));
        assert!(!names.contains(&"fuse/direct/qcow2/read-d1-q2".to_owned()), "a file has no queues");
        assert!(Case::all().iter().filter(|case| case.is_usual()).count() < 30, "they take three minutes");
    }
}
