//! Descriptor chains as a guest builds them: lists of ranges of its memory. Nothing in them is trusted.
//!
//! ```text
//!   readable   │ header, 16 bytes │ data of a write ……… │        wherever one descriptor ends and the next begins
//!   writable   │ data of a read …………………… │ status, 1 byte │
//! ```
//!
//! 1. A chain that was gathered has an end: a chain with a loop, or one that leaves the table, is refused.
//! 2. How the bytes are divided into descriptors means nothing (VIRTIO 1.2, 2.7.4.1).
//! 3. Addresses are only numbers here; `memory` says whether there is memory behind them.

use smallvec::SmallVec;

/// The bytes of a request's header: what, reserved, where.
pub(super) const HEADER_BYTES: usize = 16;

/// The largest number of ranges that one chain may have, over both its halves. The limit that guests are
/// given is far lower.
pub(super) const LINKS_MAX: usize = 1026;

/// The most bytes of one chain (VIRTIO 1.2, 2.7.5.2).
const BYTES_MAX: usize = u32::MAX as usize;

/// One descriptor.
#[derive(Debug, Clone, Copy)]
pub(super) struct Link {
    pub(super) at: u64,
    pub(super) len: u32,
    /// For the device to write; else for it to read.
    pub(super) is_writable: bool,
    /// Another one follows, or should.
    pub(super) has_next: bool,
}

/// A run of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) at: u64,
    pub(super) len: usize,
}

/// Runs of guest memory that are read or written as one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Segments {
    runs: SmallVec<[Segment; 4]>,
    len: usize,
}

/// A chain that cannot be answered, because it does not even say where; and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Malformed(pub(super) &'static str);

/// A chain in its parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chain {
    /// Where the header is; [`HEADER_BYTES`] long.
    pub(super) header: Segments,
    /// What the guest gives.
    pub(super) data_out: Segments,
    /// The part that the device fills.
    pub(super) data_in: Segments,
    /// Where the status byte goes.
    pub(super) status: Segments,
}

impl Segments {
    fn push(&mut self, at: u64, len: usize) {
        if len > 0 {
            self.len += len;
            self.runs.push(Segment { at, len });
        }
    }

    /// The number of bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The runs in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = Segment> + '_ {
        self.runs.iter().copied()
    }

    /// Cuts in two: `self` keeps the first `at` bytes, the rest is returned.
    fn split_off(&mut self, at: usize) -> Self {
        assert!(at <= self.len, "segments are cut inside");
        let mut tail = Self { runs: SmallVec::new(), len: self.len - at };
        let mut before = 0;
        let mut kept = 0;
        for run in &mut self.runs {
            let end = before + run.len;
            if end <= at {
                kept += 1;
            } else if before < at {
                let part = at - before;
                // An address that passes the end of all addresses is refused with the memory it is not in.
                tail.runs.push(Segment { at: run.at.wrapping_add(part as u64), len: run.len - part });
                run.len = part;
                kept += 1;
            } else {
                tail.runs.push(*run);
            }
            before = end;
        }
        self.runs.truncate(kept);
        self.len = at;
        tail
    }
}

impl Chain {
    /// Gathers the descriptors of one chain.
    pub(super) fn gather(links: impl Iterator<Item = Link>) -> Result<Self, Malformed> {
        let (mut readable, mut writable) = (Segments::default(), Segments::default());
        let mut is_cut = true;
        for (number, link) in links.enumerate() {
            if number == LINKS_MAX {
                return Err(Malformed("it has too many descriptors"));
            }
            is_cut = link.has_next;
            let len = usize::try_from(link.len).expect("32 bits");
            if readable.len + writable.len + len > BYTES_MAX {
                return Err(Malformed("it has too many bytes"));
            }
            if link.is_writable {
                writable.push(link.at, len);
            } else if writable.len > 0 {
                return Err(Malformed("it has a readable descriptor after a writable one"));
            } else {
                readable.push(link.at, len);
            }
        }
        if is_cut {
            return Err(Malformed("it does not end"));
        }
        if readable.len < HEADER_BYTES {
            return Err(Malformed("it has no room for a header"));
        }
        let Some(before_status) = writable.len.checked_sub(1) else {
            return Err(Malformed("it has no room for a status"));
        };
        let data_out = readable.split_off(HEADER_BYTES);
        let status = writable.split_off(before_status);
        Ok(Self { header: readable, data_out, data_in: writable, status })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn links(list: &[(u64, u32, bool)]) -> impl Iterator<Item = Link> {
        let last = list.len().wrapping_sub(1);
        list.iter().enumerate().map(move |(index, &(at, len, is_writable))| Link {
            at,
            len,
            is_writable,
            has_next: index != last,
        })
    }

    fn runs(segments: &Segments) -> Vec<(u64, usize)> {
        segments.iter().map(|run| (run.at, run.len)).collect()
    }

    #[test]
    fn where_descriptors_end_means_nothing() {
        let usual =
            Chain::gather(links(&[(0, 16, false), (100, 512, true), (700, 1, true)])).expect("a chain");
        assert_eq!(runs(&usual.header), [(0, 16)]);
        assert_eq!((usual.data_out.len(), runs(&usual.data_in)), (0, vec![(100, 512)]));
        assert_eq!(runs(&usual.status), [(700, 1)]);

        let odd = Chain::gather(links(&[
            (0, 7, false),
            (50, 0, false),
            (60, 20, false),
            (100, 500, false),
            (900, 0, true),
            (1000, 3, true),
        ]));
        let odd = odd.expect("a chain");
        assert_eq!(runs(&odd.header), [(0, 7), (60, 9)]);
        assert_eq!(runs(&odd.data_out), [(69, 11), (100, 500)]);
        assert_eq!((runs(&odd.data_in), runs(&odd.status)), (vec![(1000, 2)], vec![(1002, 1)]));
    }

    #[test]
    fn what_cannot_be_answered_is_refused() {
        let refused = |list: &[(u64, u32, bool)]| Chain::gather(links(list)).expect_err("refused").0;
        assert_eq!(refused(&[]), "it does not end");
        assert_eq!(refused(&[(0, 15, false), (20, 1, true)]), "it has no room for a header");
        assert_eq!(refused(&[(0, 16, false), (20, 0, true)]), "it has no room for a status");
        let mixed = [(0, 16, false), (20, 1, true), (30, 1, false)];
        assert_eq!(refused(&mixed), "it has a readable descriptor after a writable one");
        assert_eq!(refused(&[(0, 1, false); LINKS_MAX + 1]), "it has too many descriptors");
        let huge = [(0, u32::MAX, false), (0, 1, true)];
        assert_eq!(refused(&huge), "it has too many bytes");
        let endless = Link { at: 0, len: 16, is_writable: false, has_next: true };
        let cut = Chain::gather([endless; 3].into_iter()).expect_err("a loop was cut");
        assert_eq!(cut.0, "it does not end");
    }
}
