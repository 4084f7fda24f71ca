//! Which requests are sent to which engine.

/// The engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Engine {
    /// qcow2 with a journal.
    Qcow2,
    /// The native format, units in zones.
    Zoned,
    /// The crate, on a plain qcow2.
    Imago,
}

impl Engine {
    pub(super) const ALL: [Self; 3] = [Self::Qcow2, Self::Zoned, Self::Imago];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Qcow2 => "vellum, qcow2 journaled",
            Self::Zoned => "vellum, zoned",
            Self::Imago => "imago, qcow2",
        }
    }
}

/// What is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pattern {
    /// 4 KiB anywhere in a mapped disk are read.
    Read,
    /// 4 KiB anywhere in a mapped disk are written.
    Overwrite,
    /// 4 KiB are written, each to 64 KiB that were never written.
    Allocate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) pattern: Pattern,
    /// A flush follows after this many writes.
    pub(super) flush_every: Option<u64>,
    /// Past the page cache.
    pub(super) is_direct: bool,
}

/// As often as the mixed load of `vellum-bench exports`.
const FLUSH_EVERY: Option<u64> = Some(32);

impl Case {
    pub(super) const ALL: [Self; 7] = [
        Self { pattern: Pattern::Read, flush_every: None, is_direct: false },
        Self { pattern: Pattern::Read, flush_every: None, is_direct: true },
        Self { pattern: Pattern::Overwrite, flush_every: FLUSH_EVERY, is_direct: false },
        Self { pattern: Pattern::Allocate, flush_every: FLUSH_EVERY, is_direct: false },
        Self { pattern: Pattern::Allocate, flush_every: FLUSH_EVERY, is_direct: true },
        Self { pattern: Pattern::Allocate, flush_every: None, is_direct: false },
        Self { pattern: Pattern::Allocate, flush_every: None, is_direct: true },
    ];

    pub(super) fn id(&self) -> String {
        let cache = if self.is_direct { "direct" } else { "buffered" };
        let pattern = match self.pattern {
            Pattern::Read => "read",
            Pattern::Overwrite => "overwrite",
            Pattern::Allocate => "allocate",
        };
        match self.flush_every {
            Some(writes) => format!("{cache}/{pattern}-flush-{writes}"),
            None => format!("{cache}/{pattern}"),
        }
    }

    /// How many requests are measured when this many were requested: cases with the fastest requests use
    /// more.
    pub(super) fn operations(&self, asked: u64) -> u64 {
        if self.pattern == Pattern::Read && !self.is_direct { asked * 8 } else { asked }
    }

    /// Whether the disk is made anew for each turn.
    pub(super) fn is_fresh(&self) -> bool {
        self.pattern == Pattern::Allocate
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_case_has_a_name_of_its_own() {
        let names: HashSet<String> = Case::ALL.iter().map(Case::id).collect();
        assert_eq!(names.len(), Case::ALL.len());
        assert!(names.contains("direct/allocate-flush-32"));
    }
}
