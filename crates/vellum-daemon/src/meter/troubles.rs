//! Failures, counted by kind, with the time of the last log line. Nothing here waits or writes.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use vellum_core::{Error, ErrorKind};

use super::{Request, SAID_EVERY};

/// What went wrong last.
#[derive(Debug, Clone)]
pub(crate) struct LastError {
    pub(crate) request: Request,
    pub(crate) kind: ErrorKind,
    pub(crate) message: String,
    /// In seconds since 1970.
    pub(crate) seconds: u64,
}

/// All that went wrong with a disk.
#[derive(Default)]
pub(super) struct Troubles {
    kinds: Vec<Trouble>,
    pub(super) last: Option<LastError>,
}

struct Trouble {
    kind: ErrorKind,
    count: u64,
    /// Those that the log does not have.
    left_out: u64,
    said_at: Duration,
}

impl Troubles {
    /// One more. If it should be logged, the number of suppressed ones since the last.
    pub(super) fn add(&mut self, request: Request, error: &Error, now: Duration) -> Option<u64> {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        self.last = Some(LastError { request, kind: error.kind(), message: error.chain(), seconds });
        let Some(trouble) = self.kinds.iter_mut().find(|trouble| trouble.kind == error.kind()) else {
            self.kinds.push(Trouble { kind: error.kind(), count: 1, left_out: 0, said_at: now });
            return Some(0);
        };
        trouble.count += 1;
        if now.saturating_sub(trouble.said_at) < SAID_EVERY {
            trouble.left_out += 1;
            return None;
        }
        trouble.said_at = now;
        Some(std::mem::take(&mut trouble.left_out))
    }

    /// The suppressed ones that should be logged by now.
    pub(super) fn left_out(&mut self, now: Duration) -> Vec<(ErrorKind, u64)> {
        let due = self
            .kinds
            .iter_mut()
            .filter(|trouble| trouble.left_out > 0 && now.saturating_sub(trouble.said_at) >= SAID_EVERY);
        due.map(|trouble| {
            trouble.said_at = now;
            (trouble.kind, std::mem::take(&mut trouble.left_out))
        })
        .collect()
    }

    pub(super) fn counts(&self) -> Vec<(ErrorKind, u64)> {
        self.kinds.iter().map(|trouble| (trouble.kind, trouble.count)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Kind;
    use super::*;

    #[test]
    fn a_kind_is_said_once_in_a_while_with_what_was_left_out() {
        let mut troubles = Troubles::default();
        let request = Request { kind: Kind::Write, at: 0, len: 512 };
        let (io, space) = (Error::new(ErrorKind::Io, "bad"), Error::new(ErrorKind::NoSpace, "full"));
        let at = Duration::from_secs;
        assert_eq!(troubles.add(request, &io, at(100)), Some(0));
        assert_eq!(troubles.add(request, &io, at(101)), None);
        assert_eq!(troubles.add(request, &space, at(101)), Some(0), "another kind");
        assert_eq!(troubles.add(request, &io, at(102)), None);
        assert!(troubles.left_out(at(103)).is_empty(), "not yet");
        assert_eq!(troubles.left_out(at(160)), [(ErrorKind::Io, 2)]);
        assert!(troubles.left_out(at(300)).is_empty(), "it was said");
        assert_eq!(troubles.add(request, &io, at(300)), Some(0));
        assert_eq!(troubles.add(request, &io, at(301)), None);
        assert_eq!(troubles.add(request, &io, at(360)), Some(1));
        assert_eq!(troubles.counts(), [(ErrorKind::Io, 6), (ErrorKind::NoSpace, 1)]);
        assert_eq!(troubles.last.expect("one").kind, ErrorKind::Io);
    }
}
