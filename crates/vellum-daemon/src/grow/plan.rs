//! When a device should be enlarged, by how much, and how often the hook is called for that. Pure.

use std::time::Duration;

use vellum_core::Room;

const MIB: u64 = 1 << 20;
/// The margin is this part of the device, within these bounds, in bytes.
const MARGIN_PART: u64 = 16;
const MARGIN_MIN: u64 = 16 * MIB;
const MARGIN_MAX: u64 = 2048 * MIB;
/// So is the requested growth, which is then rounded up to the unit of volume managers.
const MORE_PART: u64 = 8;
const MORE_MIN: u64 = 64 * MIB;
const MORE_MAX: u64 = 16_384 * MIB;
const MORE_UNIT: u64 = 4 * MIB;
/// Between two calls of the hook, at least; doubled for each that did not help, up to the most.
const BETWEEN: Duration = Duration::from_secs(1);
const BETWEEN_MAX: Duration = Duration::from_secs(60);

/// What a device needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Need {
    /// Less than the margin is left, and more will be needed.
    pub(super) is_low: bool,
    /// So many bytes can be stored until less than twice the margin is left.
    pub(super) until_near: i64,
    /// It should be this many bytes larger.
    pub(super) more: u64,
}

impl Need {
    pub(super) fn of(room: &Room) -> Self {
        let margin = (room.len / MARGIN_PART).clamp(MARGIN_MIN, MARGIN_MAX);
        let step = (room.len / MORE_PART).clamp(MORE_MIN, MORE_MAX);
        // Beyond the space for the whole disk only snapshots need more, and whether they will cannot be
        // known.
        let more = match room.len_for_all.saturating_sub(room.len) {
            0 => step,
            missing => step.min(missing),
        };
        Self {
            is_low: room.free < margin && room.len < room.len_for_all,
            until_near: i64::try_from(room.free).unwrap_or(i64::MAX)
                - 2 * i64::try_from(margin).expect("it is bounded"),
            more: more.max(room.step).next_multiple_of(MORE_UNIT),
        }
    }
}

/// How often a hook is called.
#[derive(Debug, Default)]
pub(super) struct Calls {
    not_before: Duration,
    /// How many in a row did not help.
    in_vain: u32,
}

impl Calls {
    pub(super) fn may_begin(&self, now: Duration) -> bool {
        now >= self.not_before
    }

    pub(super) fn helped_last(&self) -> bool {
        self.in_vain == 0
    }

    pub(super) fn ended(&mut self, now: Duration, helped: bool) {
        self.in_vain = if helped { 0 } else { self.in_vain + 1 };
        self.not_before = now + (BETWEEN * (1 << self.in_vain.min(6))).min(BETWEEN_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_devices_need() {
        let gib = 1024 * MIB;
        // Length, free space and the space for the whole disk, in MiB: whether it is low or near, and how
        // many MiB are requested.
        for (len, free, all, wanted) in [
            (4096, 4000, 1_048_576, (false, false, 512)),
            (4096, 500, 1_048_576, (false, true, 512)),
            (4096, 255, 1_048_576, (true, true, 512)),
            (4096, 0, 4100, (true, true, 4)),
            (4096, 0, 4096, (false, true, 512)),
            (48, 20, 1024, (false, true, 64)),
            (48, 15, 1024, (true, true, 64)),
            (1_048_576, 2047, 9_000_000, (true, true, 16_384)),
            (10, 0, 20, (true, true, 12)),
        ] {
            let room =
                Room { len: len * MIB, free: free * MIB, step: MIB, len_for_all: all * MIB, refused: 0 };
            let need = Need::of(&room);
            assert_eq!((need.is_low, need.until_near < 0, need.more / MIB), wanted, "{len} {free} {all}");
        }
        let room = Room { len: gib, free: 0, step: 100 * MIB, len_for_all: gib + MIB, refused: 0 };
        assert_eq!(Need::of(&room).more, 100 * MIB, "one unit at least");
    }

    #[test]
    fn what_helps_is_called_again_soon_and_what_does_not_later_and_later() {
        let mut calls = Calls::default();
        let (mut now, mut waits) = (Duration::from_secs(5), Vec::new());
        assert!(calls.may_begin(now));
        for helped in [true, false, false, false, false, false, false, false, true] {
            calls.ended(now, helped);
            assert_eq!(calls.helped_last(), helped);
            let begun = now;
            while !calls.may_begin(now) {
                now += Duration::from_millis(100);
            }
            waits.push((now - begun).as_secs());
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60, 1]);
    }
}
