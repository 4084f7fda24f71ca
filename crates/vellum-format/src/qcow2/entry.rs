//! L2 entries: two words that say where a cluster's bytes are, and the one type in which the rest of the code
//! sees them.
//!
//! ```text
//!   standard, 64 bits:    63 copied  62 compressed  55…9 offset  0 zero
//!   extended, 128 bits:   63 copied  62 compressed  55…9 offset │ 31…0 zero │ 31…0 alloc
//! ```
//!
//! A cluster is divided into *units*: 32 subclusters with extended entries, one unit otherwise. Each unit is
//! in one of three states, which is all that reading and writing need to know:
//!
//! | alloc | zero | the unit's bytes |
//! |:-:|:-:|---|
//! | 1 | 0 | at `host` + its place in the cluster |
//! | 0 | 1 | zeros (space may be reserved at `host`) |
//! | 0 | 0 | in the disk below |
//!
//! 1. `alloc` and `zero` share no bit; `alloc` is empty without `host`.
//! 2. A standard entry cannot express "host but not allocated", and [`Entries::encode`] is never called with
//!    it.

use vellum_core::{BlockSize, Error, GuestCluster, ImageOffset, ImageSpan, Result};

use super::header::Header;
use super::layout::{COMPRESSED, COPIED, L2_RESERVED, OFFSET_MASK, SUBCLUSTERS, ZERO};

/// The state of a cluster of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClusterState {
    /// The whole cluster is stored compressed in these bytes of the image. The length is an upper bound.
    Compressed(ImageSpan),
    /// Any other cluster.
    Plain(Units),
}

/// The units of a cluster; see the head of this module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Units {
    /// The cluster of the image that is reserved for it.
    pub(crate) host: Option<ImageOffset>,
    /// `host` has a refcount of exactly one, so it may be written in place.
    pub(crate) copied: bool,
    /// Units whose bytes are at `host`.
    pub(crate) alloc: u32,
    /// Units that read as zero.
    pub(crate) zero: u32,
}

/// The two words of an entry. The second is zero where entries have 64 bits.
pub(crate) type Words = (u64, u64);

/// How the entries of one image are read and written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entries {
    cluster: BlockSize,
    extended: bool,
    zero_flag: bool,
    /// Guest data is in another file, at the guest's own offsets.
    data_file: bool,
}

impl Entries {
    pub(crate) fn of(header: &Header) -> Self {
        Self {
            cluster: header.cluster_size(),
            extended: header.has_subclusters(),
            zero_flag: header.version() >= 3,
            data_file: header.has_data_file(),
        }
    }

    /// Units in a cluster: 1 or 32.
    pub(crate) fn units(self) -> u32 {
        if self.extended { SUBCLUSTERS } else { 1 }
    }

    /// 64-bit words of an entry: 1 or 2.
    pub(crate) fn words(self) -> usize {
        if self.extended { 2 } else { 1 }
    }

    /// The size of a unit.
    pub(crate) fn unit_size(self) -> BlockSize {
        BlockSize::from_shift(self.cluster.shift() - self.units().trailing_zeros())
    }

    /// The mask of all units.
    pub(crate) fn all(self) -> u32 {
        if self.extended { u32::MAX } else { 1 }
    }

    /// The mask of the units that bytes `start..end` of a cluster touch.
    pub(crate) fn touched(self, start: u64, end: u64) -> u32 {
        if start >= end {
            return 0;
        }
        let shift = self.unit_size().shift();
        mask(start >> shift, ((end - 1) >> shift) + 1)
    }

    /// The mask of the units that are wholly within bytes `start..end` of a cluster.
    pub(crate) fn covered(self, start: u64, end: u64) -> u32 {
        let size = self.unit_size();
        let (first, end) = (size.round_up(start) >> size.shift(), end >> size.shift());
        if first >= end { 0 } else { mask(first, end) }
    }

    /// Whether zeros can be recorded in an entry (version 3).
    pub(crate) fn has_zero_flag(self) -> bool {
        self.zero_flag
    }

    /// Bits that should be zero in this entry. They do not change its meaning.
    pub(crate) fn reserved(self, (word, _): Words) -> u64 {
        word & if word & COMPRESSED != 0 { COPIED } else { L2_RESERVED }
    }

    /// An entry that cannot be read because its place is invalid, without that place, if no unit has its
    /// bytes there.
    pub(crate) fn without_place(self, (word, bitmap): Words) -> Option<u64> {
        #[expect(clippy::cast_possible_truncation, reason = "the lower half is wanted")]
        let has_bytes = match self.extended {
            true => bitmap as u32 != 0,
            false => !self.zero_flag || word & ZERO == 0,
        };
        let is_other = word & COMPRESSED != 0 || has_bytes;
        (!is_other).then(|| word & !(OFFSET_MASK | COPIED) & !self.reserved((word, bitmap)))
    }

    /// Reads an entry. Fails when it contradicts the format; reserved bits are ignored.
    pub(crate) fn decode(self, (word, bitmap): Words) -> Result<ClusterState> {
        if word & COMPRESSED != 0 {
            if self.data_file || bitmap != 0 {
                return Err(Error::corrupt(format!(
                    "the L2 entry {word:#x} of a compressed cluster is impossible"
                )));
            }
            let offset_bits = 62 - (self.cluster.shift() - 8);
            let at = ImageOffset::new(word & ((1 << offset_bits) - 1));
            let sectors = (word & (COMPRESSED - 1)) >> offset_bits;
            let len = (sectors + 1) * 512 - at.bytes() % 512;
            return Ok(ClusterState::Compressed(at.span(len)));
        }
        let offset = word & OFFSET_MASK;
        if offset & (self.cluster.bytes() - 1) != 0 {
            return Err(Error::corrupt(format!("the L2 entry {word:#x} points between two clusters")));
        }
        // With an external data file, offset 0 is a valid place. The "copied" flag says that it is meant.
        let host = (offset != 0 || (self.data_file && word & COPIED != 0)).then(|| ImageOffset::new(offset));
        let copied = host.is_some() && (word & COPIED != 0 || self.data_file);
        if self.extended {
            #[expect(clippy::cast_possible_truncation, reason = "the two halves of the word are wanted")]
            let (zero, alloc) = ((bitmap >> 32) as u32, bitmap as u32);
            if alloc & zero != 0 || (host.is_none() && alloc != 0) {
                return Err(Error::corrupt(format!("the subcluster bitmap {bitmap:#x} contradicts itself")));
            }
            return Ok(ClusterState::Plain(Units { host, copied, alloc, zero }));
        }
        let is_zero = self.zero_flag && word & ZERO != 0;
        let (alloc, zero) = match (is_zero, host) {
            (true, _) => (0, 1),
            (false, Some(_)) => (1, 0),
            (false, None) => (0, 0),
        };
        Ok(ClusterState::Plain(Units { host, copied, alloc, zero }))
    }

    /// The entry of a cluster that lies behind the one of this entry, all of both in use; `None` where that says too little.
    pub(crate) fn next_to(self, (word, bitmap): Words) -> Option<Words> {
        let place = word & OFFSET_MASK;
        let has_bytes = word & COMPRESSED == 0 && !(self.zero_flag && word & ZERO != 0) && place != 0;
        let is_simple =
            has_bytes && !self.extended && !self.data_file && place & (self.cluster.bytes() - 1) == 0;
        let next = place + self.cluster.bytes();
        (is_simple && next & !OFFSET_MASK == 0).then_some((word & !OFFSET_MASK | next, bitmap))
    }

    /// A data file holds each cluster at the guest's own offset. An entry that says otherwise gives two guest
    /// clusters one place, and no refcount shows that.
    pub(crate) fn check_place(self, cluster: GuestCluster, state: ClusterState) -> Result<()> {
        let guest = self.cluster.start_of(cluster).bytes();
        match state {
            ClusterState::Plain(Units { host: Some(host), .. })
                if self.data_file && host.bytes() != guest =>
            {
                Err(Error::corrupt(format!(
                    "offset {guest:#x} of the disk is mapped to {host} of the data file"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Writes an entry for a cluster whose compressed bytes are these.
    pub(crate) fn encode_compressed(self, span: ImageSpan) -> Result<Words> {
        let offset_bits = 62 - (self.cluster.shift() - 8);
        let last = span.end().bytes() - 1;
        if last >> offset_bits != 0 {
            return Err(Error::new(
                vellum_core::ErrorKind::NoSpace,
                format!("compressed data cannot be stored at {}, so far into the image", span.start()),
            ));
        }
        let sectors = last / 512 - span.start().bytes() / 512;
        assert!(
            sectors < 1 << (self.cluster.shift() - 8),
            "compressed data is smaller than a cluster: {span:?}"
        );
        Ok((COMPRESSED | sectors << offset_bits | span.start().bytes(), 0))
    }

    /// Writes an entry for a cluster that is not compressed.
    pub(crate) fn encode(self, units: Units) -> Words {
        assert!(units.alloc & units.zero == 0, "a unit is allocated or zero, not both: {units:?}");
        assert!(units.alloc == 0 || units.host.is_some(), "allocated units have a place: {units:?}");
        let offset = units.host.map_or(0, ImageOffset::bytes);
        assert!(offset & !OFFSET_MASK == 0, "an image offset has 56 bits: {units:?}");
        let copied = if units.host.is_some() && units.copied { COPIED } else { 0 };
        if self.extended {
            return (offset | copied, u64::from(units.zero) << 32 | u64::from(units.alloc));
        }
        assert!(units.zero == 0 || self.zero_flag, "version 2 has no zero clusters");
        assert!(
            units.host.is_none() || units.alloc | units.zero == 1,
            "a standard entry with a place is allocated or zero: {units:?}"
        );
        (offset | copied | if units.zero == 1 { ZERO } else { 0 }, 0)
    }
}

impl Units {
    /// Whether all units of the mask can be written where they are.
    pub(crate) fn writable_in_place(self, mask: u32) -> bool {
        self.copied && self.alloc & mask == mask
    }
}

/// Bits `first..end`.
pub(crate) fn mask(first: u64, end: u64) -> u32 {
    let below = |bit: u64| if bit >= 32 { u32::MAX } else { (1 << bit) - 1 };
    below(end) & !below(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(extended: bool) -> Entries {
        Entries { cluster: BlockSize::from_shift(16), extended, zero_flag: true, data_file: false }
    }

    fn plain(host: u64, copied: bool, alloc: u32, zero: u32) -> ClusterState {
        let host = (host != 0).then(|| ImageOffset::new(host));
        ClusterState::Plain(Units { host, copied, alloc, zero })
    }

    #[test]
    fn standard_entries() {
        let table = [
            (0, plain(0, false, 0, 0)),
            (1, plain(0, false, 0, 1)),
            (0x5_0000 | COPIED, plain(0x5_0000, true, 1, 0)),
            (0x5_0000, plain(0x5_0000, false, 1, 0)),
            (0x5_0001 | COPIED, plain(0x5_0000, true, 0, 1)),
        ];
        for (word, state) in table {
            assert_eq!(entries(false).decode((word, 0)).unwrap(), state, "{word:#x}");
            let ClusterState::Plain(units) = state else { unreachable!() };
            assert_eq!(entries(false).encode(units), (word, 0));
        }
    }

    #[test]
    fn extended_entries() {
        let state = plain(0x5_0000, true, 0x0000_00FF, 0xFF00_0000);
        let words = (0x5_0000 | COPIED, 0xFF00_0000_0000_00FF);
        assert_eq!(entries(true).decode(words).unwrap(), state);
        let ClusterState::Plain(units) = state else { unreachable!() };
        assert_eq!(entries(true).encode(units), words);
        assert!(entries(true).decode((0x5_0000, 0x1_0000_0001)).is_err(), "allocated and zero at once");
        assert!(entries(true).decode((0, 1)).is_err(), "allocated nowhere");
    }

    #[test]
    fn compressed_entries_end_at_a_sector() {
        // 64 KiB clusters: 54 bits of offset, 8 bits of sectors.
        let word = COMPRESSED | 3 << 54 | 0x1234;
        let span = ImageOffset::new(0x1234).span(4 * 512 - 0x34);
        assert_eq!(entries(false).decode((word, 0)).unwrap(), ClusterState::Compressed(span));
        assert_eq!(entries(false).encode_compressed(span).unwrap(), (word, 0));
        for (at, len) in [(0x1_0000, 1), (0x1_01ff, 1), (0x1_01ff, 2), (0x1_ffff, 65_535)] {
            let span = ImageOffset::new(at).span(len);
            let words = entries(true).encode_compressed(span).unwrap();
            let ClusterState::Compressed(read) = entries(true).decode(words).unwrap() else {
                panic!("{words:x?}")
            };
            assert!(
                read.start() == span.start() && (0..512).contains(&(read.end() - span.end())),
                "{read:?}"
            );
        }
        assert!(entries(false).encode_compressed(ImageOffset::new((1 << 54) - 1).span(2)).is_err());
        // The flag has no meaning there, and other programs ignore it.
        assert_eq!(entries(false).decode((word | COPIED, 0)).unwrap(), ClusterState::Compressed(span));
        assert_eq!(entries(false).reserved((word | COPIED, 0)), COPIED);
    }

    #[test]
    fn reserved_bits_are_reported_and_ignored() {
        for bit in [1 << 61, 1 << 56, 1 << 8, 1 << 1] {
            let word = 0x5_0000 | COPIED;
            assert_eq!(entries(false).reserved((word | bit, 0)), bit);
            assert_eq!(entries(false).decode((word | bit, 0)).unwrap(), plain(0x5_0000, true, 1, 0));
        }
        assert_eq!(entries(false).reserved((0x5_0001 | COPIED, 0)), 0);
    }

    #[test]
    fn an_entry_and_the_next_one_name_neighbours() {
        let standard = entries(false);
        let last = OFFSET_MASK & !0xffff;
        for word in [0x5_0000, 0x5_0000 | COPIED, 0x5_0000 | COPIED | 1 << 57, last - 0x1_0000] {
            let next = standard.next_to((word, 0)).expect("it is simple");
            let [Ok(ClusterState::Plain(one)), Ok(ClusterState::Plain(two))] =
                [(word, 0), next].map(|words| standard.decode(words))
            else {
                panic!("{word:#x}")
            };
            assert_eq!(two.host, one.host.map(|host| host + 0x1_0000), "{word:#x}");
            assert_eq!(Units { host: one.host, ..two }, one, "{word:#x}");
        }
        for word in [0, 1, COPIED, 0x5_0001 | COPIED, COMPRESSED | 0x1234, 0x5_0200 | COPIED, last | COPIED] {
            assert_eq!(standard.next_to((word, 0)), None, "{word:#x}");
        }
        assert_eq!(entries(true).next_to((0x5_0000 | COPIED, u64::from(u32::MAX))), None);
        assert_eq!(Entries { data_file: true, ..standard }.next_to((0x5_0000 | COPIED, 0)), None);
    }

    #[test]
    fn an_unaligned_place_is_corrupt() {
        assert!(entries(false).decode((0x5_0200 | COPIED, 0)).is_err());
    }

    #[test]
    fn masks_of_touched_and_covered_units() {
        let e = entries(true); // units of 2 KiB
        assert_eq!(e.touched(0, 1), 0b1);
        assert_eq!(e.touched(2047, 2049), 0b11);
        assert_eq!(e.touched(0, 65536), u32::MAX);
        assert_eq!(e.touched(5, 5), 0);
        assert_eq!(e.covered(1, 6144), 0b110);
        assert_eq!(e.covered(1, 2049), 0);
        assert_eq!(entries(false).touched(60_000, 65_536), 1);
        assert_eq!(entries(false).covered(0, 65_535), 0);
        assert_eq!(entries(false).covered(0, 65_536), 1);
    }
}
