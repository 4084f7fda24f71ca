//! What a session promises its client, and what the client promised: announced in the handshake, and enforced
//! in the transmission from one and the same value.
//!
//! Source: NBD protocol, "Transmission flags", "Size constraints", `NBD_INFO_BLOCK_SIZE`.

use vellum_core::Geometry;

use super::limits::SessionLimits;
use super::status::Contexts;
use super::wire::{self, transmission_flag as flag};

/// How requests and replies look on the wire. Each is settled by an option, and the last takes precedence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Headers {
    /// One reply without parts (nothing negotiated).
    Simple,
    /// Replies in chunks (`NBD_OPT_STRUCTURED_REPLY`).
    Structured,
    /// Requests and chunks with 64-bit lengths (`NBD_OPT_EXTENDED_HEADERS`).
    Extended,
}

impl Headers {
    /// Whether replies may have parts.
    pub(super) fn have_chunks(self) -> bool {
        self > Self::Simple
    }
}

/// What holds between one client and one export, fixed when the handshake ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Terms {
    /// The size of the export, as it was announced. Requests are checked against its size when they arrive.
    pub(super) size: u64,
    pub(super) read_only: bool,
    pub(super) headers: Headers,
    /// Places and lengths of requests are multiples of this, if the client promised so; else it is 1.
    pub(super) block_min: u32,
    pub(super) block_preferred: u32,
    pub(super) payload_max: u32,
    /// The client may connect several times.
    pub(super) has_several: bool,
    pub(super) contexts: Contexts,
}

impl Terms {
    /// The terms for a disk of this geometry. `keeps_sizes`: the client requested `NBD_INFO_BLOCK_SIZE`, and
    /// thereby promised to respect the sizes in the answer.
    pub(super) fn new(
        geometry: &Geometry,
        read_only: bool,
        keeps_sizes: bool,
        limits: &SessionLimits,
    ) -> Self {
        let block = geometry.block_size.bytes().min(u64::from(wire::BLOCK_BYTES_MIN_MAX));
        // The last bytes of a disk of odd size must be reachable, so the smallest block divides the size.
        let divides_size = geometry.size & geometry.size.wrapping_neg();
        let block_min = match geometry.size {
            _ if !keeps_sizes => 1,
            0 => block,
            _ => block.min(divides_size),
        };
        let payload_max = limits.payload_bytes_max;
        let preferred_max = 1 << payload_max.ilog2();
        let preferred = geometry.preferred_size.bytes().max(block).max(512).min(preferred_max);
        Self {
            size: geometry.size,
            read_only: read_only || geometry.read_only,
            headers: Headers::Simple,
            block_min: u32::try_from(block_min).expect("at most 64 KiB"),
            block_preferred: u32::try_from(preferred).expect("at most the payload"),
            payload_max,
            has_several: !limits.is_only_client,
            contexts: Contexts::default(),
        }
    }

    /// The transmission flags. All that is announced works: every disk can flush, trim and write zeros,
    /// quickly or with the answer that it would not be quick; all connections share one disk, so a flush on
    /// one of them covers what was answered on any (see [`transmission`](super::transmission)).
    pub(super) fn flags(&self) -> u16 {
        let always = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | flag::SEND_CACHE;
        let by_place = if self.has_several { flag::CAN_MULTI_CONN } else { 0 };
        let by_access = match self.read_only {
            true => flag::READ_ONLY,
            false => flag::SEND_TRIM | flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO,
        };
        let by_replies = if self.headers.have_chunks() { flag::SEND_DF } else { 0 };
        always | by_place | by_access | by_replies
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::BlockSize;

    use super::*;

    fn geometry(size: u64, block: u64, preferred: u64) -> Geometry {
        let size_of = |bytes| BlockSize::from_bytes(bytes).expect("a power of two");
        Geometry {
            size,
            block_size: size_of(block),
            preferred_size: size_of(preferred),
            read_only: false,
            fast_zeroes: true,
        }
    }

    fn blocks(size: u64, block: u64, preferred: u64, keeps_sizes: bool) -> (u32, u32, u32) {
        let terms =
            Terms::new(&geometry(size, block, preferred), false, keeps_sizes, &SessionLimits::default());
        (terms.block_min, terms.block_preferred, terms.payload_max)
    }

    #[test]
    fn block_sizes_keep_the_rules_of_the_standard() {
        const MAX: u32 = 32 << 20;
        assert_eq!(blocks(1 << 30, 1, 4096, true), (1, 4096, MAX));
        assert_eq!(blocks(1 << 30, 4096, 65536, true), (4096, 65536, MAX));
        assert_eq!(blocks(1 << 30, 4096, 65536, false), (1, 65536, MAX), "nothing promised, nothing asked");
        assert_eq!(blocks(1 << 30, 1 << 20, 1 << 20, true), (65536, 1 << 20, MAX), "at most 64 KiB");
        assert_eq!(blocks((1 << 30) + 512, 4096, 4096, true), (512, 4096, MAX), "divides the size");
        assert_eq!(blocks(12345, 4096, 4096, true), (1, 4096, MAX), "divides an odd size");
        assert_eq!(blocks(0, 512, 512, true), (512, 512, MAX), "an empty disk");
        assert_eq!(blocks(1 << 30, 1, 1, true), (1, 512, MAX), "preferred is 512 or more");
        assert_eq!(blocks(1 << 40, 1, 1 << 30, true), (1, MAX, MAX), "preferred fits a payload");
        assert_eq!(blocks(u64::MAX, 4096, 4096, true), (1, 4096, MAX));
        assert_eq!(blocks(1 << 63, 4096, 4096, true), (4096, 4096, MAX));
    }

    #[test]
    fn flags_say_what_works() {
        let mut terms = Terms::new(&geometry(4096, 1, 4096), false, false, &SessionLimits::default());
        assert_eq!(terms.flags(), 0b1101_0110_1101);
        terms.headers = Headers::Structured;
        assert_eq!(terms.flags(), 0b1101_1110_1101);
        terms.read_only = true;
        assert_eq!(terms.flags(), 0b0101_1000_1111);
        terms.has_several = false;
        assert_eq!(terms.flags(), 0b0100_1000_1111);
    }

    #[test]
    fn either_side_can_make_an_export_read_only() {
        let limits = SessionLimits::default();
        let mut facts = geometry(4096, 1, 4096);
        assert!(!Terms::new(&facts, false, false, &limits).read_only);
        assert!(Terms::new(&facts, true, false, &limits).read_only);
        facts.read_only = true;
        assert!(Terms::new(&facts, false, false, &limits).read_only);
    }
}
