//! The plan of a write to one cluster. It is made here from the cluster's state alone. `write.rs` carries it
//! out, step by step as `engine/write.rs` asks.
//!
//! ```text
//!             guest's bytes                     a write of part of a cluster that is not there yet:
//!     ┌──────┬─────────────┬──────┐             the rest of every unit it touches is filled from where
//!     │ fill │    guest    │ fill │             those bytes are now, so that the unit is whole when it
//!     └──────┴─────────────┴──────┘             is published. Units it does not touch stay as they are.
//!     unit 3 unit 4 …      unit 7
//! ```
//!
//! | the cluster now | the bytes go | published |
//! |---|---|---|
//! | own place, touched units allocated | in place | nothing |
//! | own place, some touched units are not | in place, with fill | those units |
//! | no place | a fresh cluster, with fill | place and units |
//! | place shared with a snapshot | a fresh cluster, with all its units | place and units; the old is freed |
//! | compressed | a fresh cluster, with all its bytes | place, all units; the old is freed |

use smallvec::SmallVec;
use vellum_core::{ImageOffset, ImageSpan};

use super::entry::{ClusterState, Entries, Units};

/// The source of bytes that a write puts into a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// The guest's request.
    Guest,
    /// Zeros.
    Zero,
    /// The disk below, at the guest's own offset.
    Below,
    /// The same place in this cluster of the data storage.
    Host(ImageOffset),
    /// The same place in the cluster that is compressed here.
    Compressed(ImageSpan),
}

/// Bytes `start..end` of the cluster, to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) source: Source,
}

/// The cluster of the image that takes the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    /// The place it has. Nothing is published.
    InPlace(ImageOffset),
    /// The place it has. Units are published.
    Own(ImageOffset),
    /// A fresh cluster.
    Fresh,
}

/// The plan of a write to one cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) target: Target,
    /// Ascending, without overlap; bytes between them are not written.
    pub(crate) segments: SmallVec<[Segment; 3]>,
    /// Units that must be claimed before the plan may be carried out.
    pub(crate) claim: u32,
    /// Units that are allocated when the plan has been carried out.
    pub(crate) publish: u32,
}

/// Plans a write of bytes `start..end` of a cluster in this state. `identity` is the cluster's only possible
/// place when guest data is in a separate file.
pub(crate) fn plan_write(
    entries: Entries,
    state: ClusterState,
    (start, end): (u64, u64),
    identity: Option<ImageOffset>,
    has_below: bool,
) -> Plan {
    let cluster = entries.unit_size().bytes() * u64::from(entries.units());
    debug_assert!(start < end && end <= cluster);
    let touched = entries.touched(start, end);
    let guest = Segment { start, end, source: Source::Guest };
    let mut segments: SmallVec<[Segment; 3]> = SmallVec::new();
    let units = match state {
        ClusterState::Compressed(packed) => {
            let source = Source::Compressed(packed);
            segments.push(Segment { start: 0, end: start, source });
            segments.push(guest);
            segments.push(Segment { start: end, end: cluster, source });
            segments.retain(|segment| segment.start < segment.end);
            return Plan { target: Target::Fresh, segments, claim: entries.all(), publish: entries.all() };
        }
        ClusterState::Plain(units) => units,
    };
    if units.writable_in_place(touched) {
        let host = units.host.expect("allocated units have a place");
        segments.push(guest);
        return Plan { target: Target::InPlace(host), segments, claim: 0, publish: 0 };
    }
    let is_shared = units.host.is_some() && !units.copied;
    let target = match (units.host, identity) {
        (Some(host), _) if units.copied => Target::Own(host),
        (_, Some(place)) => Target::Own(place),
        _ => Target::Fresh,
    };
    // The bytes around the guest's that must be written with them.
    let size = entries.unit_size();
    let fill = |from: u64, to: u64, segments: &mut SmallVec<[Segment; 3]>| {
        let mut at = from;
        while at < to {
            let unit_end = size.round_down(at) + size.bytes();
            let bit = 1u32 << (at >> size.shift());
            let stop = unit_end.min(to);
            let source = unit_source(units, bit, is_shared, touched & bit != 0, has_below);
            if let Some(source) = source {
                match segments.last_mut() {
                    Some(last) if last.end == at && last.source == source => last.end = stop,
                    _ => segments.push(Segment { start: at, end: stop, source }),
                }
            }
            at = stop;
        }
    };
    fill(0, start, &mut segments);
    segments.push(guest);
    fill(end, cluster, &mut segments);
    let (claim, publish) =
        if is_shared { (entries.all(), touched | units.alloc) } else { (touched, touched) };
    Plan { target, segments, claim, publish }
}

/// The source of a byte outside the guest's run. `None` when it stays as it is.
fn unit_source(units: Units, bit: u32, is_shared: bool, is_touched: bool, has_below: bool) -> Option<Source> {
    if units.alloc & bit != 0 {
        // The bytes are at the old place: either they stay there, or they move with the rest.
        return units.host.filter(|_| is_shared).map(Source::Host);
    }
    if !is_touched {
        return None; // the unit continues to read as before
    }
    if units.zero & bit != 0 || !has_below { Some(Source::Zero) } else { Some(Source::Below) }
}

/// The state of the cluster when the plan's bytes are at `host`.
pub(crate) fn published(old: ClusterState, publish: u32, host: ImageOffset) -> ClusterState {
    let (alloc, zero) = match old {
        ClusterState::Compressed(_) => (0, 0),
        ClusterState::Plain(units) => (units.alloc, units.zero),
    };
    ClusterState::Plain(Units {
        host: Some(host),
        copied: true,
        alloc: alloc | publish,
        zero: zero & !publish,
    })
}

#[cfg(test)]
mod tests {
    use super::super::header::Header;
    use super::*;
    use crate::qcow2::create::{CreateOptions, header_for_tests};

    fn entries(extended: bool) -> Entries {
        let header: Header =
            header_for_tests(CreateOptions { extended_l2: extended, ..CreateOptions::without_journal() });
        Entries::of(&header)
    }

    const HOST: ImageOffset = ImageOffset::new(0x50_0000);

    fn units(host: bool, copied: bool, alloc: u32, zero: u32) -> ClusterState {
        ClusterState::Plain(Units { host: host.then_some(HOST), copied, alloc, zero })
    }

    /// A plan as text: target, then `start-end source` in KiB, then the units.
    fn draw(plan: &Plan) -> String {
        let mut text = match plan.target {
            Target::InPlace(_) => "in place".to_owned(),
            Target::Own(_) => "own".to_owned(),
            Target::Fresh => "fresh".to_owned(),
        };
        for segment in &plan.segments {
            let source = match segment.source {
                Source::Guest => "guest",
                Source::Zero => "zero",
                Source::Below => "below",
                Source::Host(_) => "old",
                Source::Compressed(_) => "unpacked",
            };
            text += &format!(" {}-{} {source}", segment.start / 1024, segment.end / 1024);
        }
        text + &format!(" claim {:x} publish {:x}", plan.claim, plan.publish)
    }

    #[test]
    fn standard_clusters() {
        let packed = ClusterState::Compressed(HOST.span(1000));
        let table = [
            (units(true, true, 1, 0), false, "in place 8-12 guest claim 0 publish 0"),
            (units(false, false, 0, 0), false, "fresh 0-8 zero 8-12 guest 12-64 zero claim 1 publish 1"),
            (units(false, false, 0, 0), true, "fresh 0-8 below 8-12 guest 12-64 below claim 1 publish 1"),
            (units(false, false, 0, 1), true, "fresh 0-8 zero 8-12 guest 12-64 zero claim 1 publish 1"),
            (units(true, true, 0, 1), true, "own 0-8 zero 8-12 guest 12-64 zero claim 1 publish 1"),
            (units(true, false, 1, 0), true, "fresh 0-8 old 8-12 guest 12-64 old claim 1 publish 1"),
            (units(true, false, 0, 1), true, "fresh 0-8 zero 8-12 guest 12-64 zero claim 1 publish 1"),
            (packed, true, "fresh 0-8 unpacked 8-12 guest 12-64 unpacked claim 1 publish 1"),
        ];
        for (state, has_below, expected) in table {
            let plan = plan_write(entries(false), state, (8192, 12_288), None, has_below);
            assert_eq!(draw(&plan), expected, "{state:?} below: {has_below}");
        }
        let whole = plan_write(entries(false), packed, (0, 65_536), None, true);
        assert_eq!(draw(&whole), "fresh 0-64 guest claim 1 publish 1");
    }

    #[test]
    fn clusters_with_subclusters_of_two_kib() {
        let table = [
            // Bytes 5 KiB to 9 KiB touch units 2, 3 and 4.
            (units(false, false, 0, 0), true, "fresh 4-5 below 5-9 guest 9-10 below claim 1c publish 1c"),
            (units(true, true, 0b1_1100, 0), true, "in place 5-9 guest claim 0 publish 0"),
            (units(true, true, 0b0_0100, 0), true, "own 5-9 guest 9-10 below claim 1c publish 1c"),
            (units(true, true, 0b1_0000, 0b100), true, "own 4-5 zero 5-9 guest claim 1c publish 1c"),
            (
                units(true, false, 0b11_0011, 0b1100),
                true,
                "fresh 0-4 old 4-5 zero 5-9 guest 9-12 old claim ffffffff publish 3f",
            ),
        ];
        for (state, has_below, expected) in table {
            let plan = plan_write(entries(true), state, (5 * 1024, 9 * 1024), None, has_below);
            assert_eq!(draw(&plan), expected, "{state:?}");
        }
    }

    #[test]
    fn with_a_data_file_the_place_is_given() {
        let plan = plan_write(entries(false), units(false, false, 0, 0), (0, 4096), Some(HOST), false);
        assert_eq!(draw(&plan), "own 0-4 guest 4-64 zero claim 1 publish 1");
        assert_eq!(plan.target, Target::Own(HOST));
    }

    #[test]
    fn publishing_keeps_what_other_writers_published() {
        let state = published(units(true, true, 0b1, 0b1100), 0b110, HOST);
        assert_eq!(state, units(true, true, 0b111, 0b1000));
        assert_eq!(published(ClusterState::Compressed(HOST.span(9)), 1, HOST), units(true, true, 1, 0));
    }
}
