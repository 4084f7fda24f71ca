//! What is limited, and to how much: the names that users of QEMU and libvirt know.
//!
//! ```text
//!   iops-total=1000,bps-write=50M,bps-write-max=200M,bps-write-max-length=10,iops-size=64k
//! ```
//!
//! Zero, the default, is no limit. As in QEMU, a total limit excludes read and write limits of the same kind.

use vellum_core::{Error, Result};

use super::bucket::{Rate, Units};

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Requests of both directions.
    IopsTotal,
    /// Reads.
    IopsRead,
    /// Writes, zeros and discards.
    IopsWrite,
    /// Bytes of both directions.
    BpsTotal,
    /// Bytes read.
    BpsRead,
    /// Bytes written.
    BpsWrite,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::IopsTotal, Self::IopsRead, Self::IopsWrite, Self::BpsTotal, Self::BpsRead, Self::BpsWrite];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::IopsTotal => "iops-total",
            Self::IopsRead => "iops-read",
            Self::IopsWrite => "iops-write",
            Self::BpsTotal => "bps-total",
            Self::BpsRead => "bps-read",
            Self::BpsWrite => "bps-write",
        }
    }

    fn index(self) -> usize {
        Self::ALL.iter().position(|kind| *kind == self).expect("it is one of them")
    }

    fn counts_bytes(self) -> bool {
        matches!(self, Self::BpsTotal | Self::BpsRead | Self::BpsWrite)
    }
}

/// Which way a request goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

impl Direction {
    /// What its requests count for.
    pub(super) fn kinds(self) -> [Kind; 4] {
        match self {
            Self::Read => [Kind::IopsTotal, Kind::IopsRead, Kind::BpsTotal, Kind::BpsRead],
            Self::Write => [Kind::IopsTotal, Kind::IopsWrite, Kind::BpsTotal, Kind::BpsWrite],
        }
    }
}

/// The rate limits of a disk, as data.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RateLimits {
    rates: [Option<Rate>; 6],
    /// A request of more bytes than this counts as several; zero switches that off.
    iops_size: Option<u64>,
}

impl RateLimits {
    /// The limits that these names and numbers say. Those of bytes are in bytes, those of lengths in seconds.
    ///
    /// # Errors
    /// `Invalid` for an unknown or repeated name, and for limits that contradict each other.
    pub fn of<'a>(said: impl IntoIterator<Item = (&'a str, u64)>) -> Result<Self> {
        let mut limits = Self::default();
        let mut bursts: [(Option<u64>, Option<u64>); 6] = Default::default();
        let mut seen = Vec::new();
        for (name, number) in said {
            if seen.contains(&name) {
                return Err(Error::invalid(format!("{name} is given twice")));
            }
            seen.push(name);
            let number = Some(number).filter(|number| *number > 0);
            if name == "iops-size" {
                limits.iops_size = number;
                continue;
            }
            let by_name = |name: &str| Kind::ALL.iter().position(|kind| kind.name() == name);
            if let Some(kind) = by_name(name) {
                limits.rates[kind] = number.map(Rate::of);
            } else if let Some(kind) = name.strip_suffix("-max").and_then(by_name) {
                bursts[kind].0 = number;
            } else if let Some(kind) = name.strip_suffix("-max-length").and_then(by_name) {
                bursts[kind].1 = number;
            } else {
                return Err(Error::invalid(format!(
                    "unknown limit {name:?}: use {}, each also with -max or -max-length appended, or iops-size",
                    Kind::ALL.map(Kind::name).join(", ")
                )));
            }
        }
        for (kind, (max, length)) in Kind::ALL.into_iter().zip(bursts) {
            limits.set_burst(kind, max, length)?;
        }
        limits.check()
    }

    fn set_burst(&mut self, kind: Kind, max: Option<u64>, length: Option<u64>) -> Result<()> {
        let name = kind.name();
        match (&mut self.rates[kind.index()], max, length) {
            (_, None, None) => Ok(()),
            (None, _, _) => {
                Err(Error::invalid(format!("{name}-max is for bursts above {name}, which must be given too")))
            }
            (Some(_), None, Some(_)) => Err(Error::invalid(format!(
                "{name}-max-length is how long {name}-max may last, which must be given too"
            ))),
            (Some(rate), Some(max), _) if max < rate.average => Err(Error::invalid(format!(
                "{name}-max is {max}, less than {name}, which is {}",
                rate.average
            ))),
            (Some(rate), Some(max), length) => {
                (rate.max, rate.max_length) = (Some(max), length.unwrap_or(1));
                Ok(())
            }
        }
    }

    fn check(self) -> Result<Self> {
        let is_said = |kind: Kind| self.rate(kind).is_some();
        for (total, read, write) in [
            (Kind::IopsTotal, Kind::IopsRead, Kind::IopsWrite),
            (Kind::BpsTotal, Kind::BpsRead, Kind::BpsWrite),
        ] {
            if is_said(total) && (is_said(read) || is_said(write)) {
                let (total, read, write) = (total.name(), read.name(), write.name());
                return Err(Error::invalid(format!("{total} cannot be combined with {read} or {write}")));
            }
        }
        Ok(self)
    }

    /// How much of this may go through; nothing where that is not limited.
    pub fn rate(&self, kind: Kind) -> Option<Rate> {
        self.rates[kind.index()]
    }

    /// Whether nothing is limited.
    pub fn are_none(&self) -> bool {
        self.rates.iter().all(Option::is_none)
    }

    /// The names and numbers that say them.
    pub fn said(&self) -> Vec<(String, u64)> {
        let mut said = Vec::new();
        for kind in Kind::ALL {
            let Some(rate) = self.rate(kind) else { continue };
            said.push((kind.name().to_owned(), rate.average));
            if let Some(max) = rate.max {
                said.push((format!("{}-max", kind.name()), max));
                said.push((format!("{}-max-length", kind.name()), rate.max_length));
            }
        }
        said.extend(self.iops_size.map(|size| ("iops-size".to_owned(), size)));
        said
    }

    /// How much a request that moves this many bytes counts; `None` where it does not count.
    pub(super) fn units(&self, kind: Kind, bytes: u64) -> Option<Units> {
        match (kind.counts_bytes(), self.iops_size) {
            (true, _) => (bytes > 0).then(|| Units::whole(bytes)),
            (false, Some(size)) => Some(Units { number: bytes.max(size), of: size }),
            (false, None) => Some(Units::whole(1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_what_was_meant() {
        let said = [
            ("iops-total", 1000),
            ("bps-write", 50 << 20),
            ("bps-write-max", 200 << 20),
            ("bps-write-max-length", 10),
            ("iops-size", 65_536),
        ];
        let limits = RateLimits::of(said).expect("they go together");
        let rate = Rate { average: 50 << 20, max: Some(200 << 20), max_length: 10 };
        assert_eq!(limits.rate(Kind::BpsWrite), Some(rate));
        assert_eq!(limits.rate(Kind::IopsTotal), Some(Rate::of(1000)));
        let told = limits.said();
        assert_eq!(told.iter().map(|(name, number)| (&name[..], *number)).collect::<Vec<_>>(), said);
        assert_eq!(limits.units(Kind::IopsTotal, 4096), Some(Units { number: 65_536, of: 65_536 }));
        assert_eq!(limits.units(Kind::BpsWrite, 0), None);
        let none = RateLimits::of([("iops-total", 0), ("bps-read", 0)]).expect("zero is no limit");
        assert!(none.are_none() && none.said().is_empty());
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        for (said, why) in [
            (&[("iops", 1)][..], "unknown limit"),
            (&[("iops-total-min", 1)], "unknown limit"),
            (&[("bps-read", 1), ("bps-read", 1)], "twice"),
            (&[("iops-total", 1), ("iops-write", 1)], "iops-total cannot be combined"),
            (&[("bps-total", 1), ("bps-read", 1)], "bps-total cannot be combined"),
            (&[("bps-read-max", 1)], "must be given too"),
            (&[("bps-read", 1), ("bps-read-max-length", 2)], "must be given too"),
            (&[("bps-read", 10), ("bps-read-max", 9)], "less than"),
        ] {
            let error = RateLimits::of(said.iter().copied()).expect_err("it is refused");
            assert!(error.chain().contains(why), "{said:?}: {}", error.chain());
        }
    }
}
