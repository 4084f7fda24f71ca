//! What guests do in a turn, and which images take part.

use vellum_lab::guest::Bytes;
use vellum_lab::subjects::{Base, Journal, NATIVE, Subject, qemu, vellum};

/// What others are compared with, by name.
pub(super) const RAW: &str = "vellum raw";
pub(super) const QEMU: &str = "qemu qcow2";
pub(super) const ZONED: &str = "vellum zoned";

/// The default participants, and all participants.
pub(super) const SUBJECTS: [Subject; 6] = [
    vellum(RAW, "raw", "", Base::Never, Journal::Off),
    vellum("vellum table", NATIVE, "layout=table", Base::Never, Journal::Off),
    vellum(ZONED, NATIVE, "layout=zoned", Base::Never, Journal::Off),
    vellum("vellum zoned embed=off", NATIVE, "layout=zoned,embed=off", Base::Never, Journal::Off),
    vellum("vellum qcow2 journaled", "qcow2", "", Base::Never, Journal::On),
    qemu(QEMU, "qcow2", "", Base::Never),
];
pub(super) const MORE_SUBJECTS: [Subject; 2] = [
    vellum("vellum linear", NATIVE, "layout=linear", Base::Never, Journal::Off),
    qemu("qemu raw", "raw", "", Base::Never),
];

/// Units of all formats here that have any.
pub(super) const UNIT: usize = 64 << 10;

/// Where a write goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Behind the last one, where nothing was.
    New,
    /// To a unit of its own that was never written: each allocates.
    Apart,
    /// Where something was before.
    Overwrite,
}

/// How many units of a hundred pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mix {
    Noise,
    Half,
    Same,
}

impl Mix {
    /// What is written at this place.
    pub(super) fn bytes(self, offset: u64) -> Bytes {
        match self {
            Self::Noise => Bytes::Noise,
            Self::Half if (offset / UNIT as u64).is_multiple_of(2) => Bytes::Noise,
            Self::Half | Self::Same => Bytes::Same,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Noise => "noise",
            Self::Half => "half",
            Self::Same => "same",
        }
    }
}

/// What guests do in a turn.
#[derive(Debug, Clone, Copy)]
pub(super) struct Case {
    pub(super) place: Place,
    /// Each write is flushed, not only the last one.
    pub(super) is_flushed: bool,
    pub(super) len: usize,
    pub(super) guests: usize,
    pub(super) mix: Mix,
}

impl Case {
    pub(super) fn id(&self) -> String {
        let what = match self.place {
            Place::New => "new",
            Place::Apart => "apart",
            Place::Overwrite => "overwrite",
        };
        let how = if self.is_flushed { "sync" } else { "async" };
        format!("{what}-{}k-{how}-{}-{}", self.len >> 10, self.guests, self.mix.name())
    }

    /// Writes of each guest in a turn: some hundredths of a second.
    pub(super) fn operations(&self) -> usize {
        let all = match (self.is_flushed, self.len) {
            (true, _) => 32,
            (false, 4096) => 1024,
            (false, _) => 256,
        };
        (all / self.guests).max(16)
    }

    /// From one write to the next.
    pub(super) fn step(&self) -> u64 {
        match self.place {
            Place::Apart => UNIT as u64,
            Place::New | Place::Overwrite => self.len as u64,
        }
    }

    pub(super) fn is_mapped(&self) -> bool {
        self.place == Place::Overwrite
    }

    /// Units that get a first write, for each write.
    pub(super) fn units_per_write(&self) -> f64 {
        match self.place {
            Place::Overwrite => 0.0,
            Place::Apart => 1.0,
            Place::New => self.len as f64 / UNIT as f64,
        }
    }
}

/// All cases; those that allocate come first.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let places = [(Place::New, 64 << 10), (Place::Apart, 4 << 10), (Place::New, 4 << 10)];
    let mapped = [4 << 10, 64 << 10].map(|len| (Place::Overwrite, len));
    for (place, len) in places.into_iter().chain(mapped) {
        for is_flushed in [true, false] {
            for mix in [Mix::Noise, Mix::Half, Mix::Same] {
                cases.extend([1, 4, 16].map(|guests| Case { place, is_flushed, len, guests, mix }));
            }
        }
    }
    cases
}

/// Whether a case is measured by default: it allocates, and the share of compressible data is between the
/// extremes.
pub(super) fn is_usual(case: &Case) -> bool {
    !case.is_mapped() && (case.mix != Mix::Half || case.guests == 4)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn cases_have_names_of_their_own_and_what_they_are_compared_with_takes_part() {
        let names: HashSet<String> = cases().iter().map(Case::id).collect();
        assert_eq!((names.len(), cases().iter().filter(|case| is_usual(case)).count()), (90, 42));
        for name in [RAW, QEMU, ZONED] {
            assert_eq!(SUBJECTS.iter().filter(|subject| subject.name == name).count(), 1, "{name}");
        }
        for case in cases() {
            assert!(case.operations() as u64 * case.step() <= 64 << 20, "{}", case.id());
        }
    }

    #[test]
    fn half_is_every_other_unit() {
        let same = (0..64).filter(|block| Mix::Half.bytes(block * 4096) == Bytes::Same).count();
        assert_eq!(same, 32);
        assert_eq!(Mix::Half.bytes(UNIT as u64 + 5), Bytes::Same);
    }
}
