//! What guests do, and what was seen of it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::Serialize;
use vellum_core::{Context, Error, Result};
use vellum_lab::guest::{Guest, Request};
use vellum_lab::trace::Trace;

use super::stand::Counts;
use crate::load::fio::{self, Jobs};
use crate::load::latency::Latency;

/// Places of a recorded guest are folded into a small disk in pieces of this length.
const FOLD_BYTES: u64 = 128 << 10;

/// What a guest does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Case {
    Commit,
    CommitFour,
    Read,
    Mixed,
    Sqlite,
    Boot,
    Clones,
}

impl Case {
    /// Those of a disk of its own.
    pub(super) const OF_DISKS: [Self; 6] =
        [Self::Commit, Self::CommitFour, Self::Read, Self::Mixed, Self::Sqlite, Self::Boot];

    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Commit => "write+fsync",
            Self::CommitFour => "write+fsync, 4 jobs",
            Self::Read => "read",
            Self::Mixed => "mixed",
            Self::Sqlite => "sqlite",
            Self::Boot => "boot",
            Self::Clones => "clones",
        }
    }

    pub(super) fn says(self) -> &'static str {
        match self {
            Self::Commit => "fio: 4 KiB at random, a flush after each, 1 in flight; p99 of the flush",
            Self::CommitFour => "the same by 4 jobs at once",
            Self::Read => "fio: random reads of 4 KiB, 8 in flight",
            Self::Mixed => "fio: 70 % reads, a flush after 32 writes, 8 in flight",
            Self::Sqlite => {
                "a recorded SQLite under TPC-C-like load, one request at a time; flushes a second, p99 of the flush"
            }
            Self::Boot => {
                "a recorded boot of Debian, one request at a time, as fast as they are answered; p99 of all"
            }
            Self::Clones => "fio: random reads of clones of one template, one in flight each",
        }
    }
}

/// One turn.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Turn {
    /// Requests; of SQLite and of committing jobs, flushes.
    pub(super) operations: u64,
    pub(super) seconds: f64,
    pub(super) p99_us: f64,
    /// What the cache counted meanwhile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) flash: Option<Counts>,
}

impl Turn {
    pub(super) fn rate(&self) -> f64 {
        self.operations as f64 / self.seconds
    }
}

/// What lies ready for all turns.
pub(super) struct Loads {
    /// The part of the disk that guests use, in bytes.
    pub(super) part: u64,
    pub(super) window: Duration,
    sqlite: Vec<Request>,
    boot: Vec<Request>,
}

impl Loads {
    pub(super) fn new(part: u64, window: Duration) -> Result<Self> {
        let of = |name: &str| folded(&Trace::recorded(name)?, part).context(|| name.to_owned());
        Ok(Self { part, window, sqlite: of("sqlite_tpcc_like")?, boot: of("boot_debian12")? })
    }

    pub(super) fn run(&self, case: Case, doors: &[(PathBuf, String)], round: u32) -> Result<Turn> {
        let jobs = Jobs {
            doors: &doors
                .iter()
                .map(|(socket, export)| (socket.as_path(), export.as_str()))
                .collect::<Vec<_>>(),
            direction: "randwrite",
            depth: 1,
            fsync: None,
            part: self.part,
            window: self.window,
            seed: u64::from(round) + 1,
        };
        let door = jobs.doors[0];
        let seen = match case {
            Case::Commit => fio::run_jobs(&Jobs { fsync: Some(1), ..jobs })?,
            Case::CommitFour => fio::run_jobs(&Jobs { fsync: Some(1), doors: &[door; 4], ..jobs })?,
            Case::Read => fio::run_jobs(&Jobs { direction: "randread", depth: 8, ..jobs })?,
            Case::Mixed => fio::run_jobs(&Jobs { direction: "randrw", fsync: Some(32), depth: 8, ..jobs })?,
            Case::Clones => fio::run_jobs(&Jobs { direction: "randread", ..jobs })?,
            Case::Sqlite => return self.commit_like_sqlite(&doors[0], round),
            Case::Boot => return self.boot(&doors[0]),
        };
        let p99_us = match case {
            Case::Commit | Case::CommitFour => seen.flush_p99_us,
            _ => seen.p99_us,
        };
        Ok(Turn { operations: seen.operations, seconds: seen.seconds, p99_us, flash: None })
    }

    /// Each round begins elsewhere in the trace.
    fn commit_like_sqlite(&self, (socket, export): &(PathBuf, String), round: u32) -> Result<Turn> {
        let mut guest = Guest::connect_to(socket, export)?;
        let start = round as usize * 1_237 % self.sqlite.len();
        let (mut latency, mut flushes, began) = (Latency::default(), 0, Instant::now());
        for request in self.sqlite.iter().cycle().skip(start) {
            let asked = Instant::now();
            guest.ask(*request)?;
            if *request == Request::Flush {
                latency.note(u64::try_from(asked.elapsed().as_nanos()).unwrap_or(u64::MAX));
                flushes += 1;
                if began.elapsed() >= self.window {
                    break;
                }
            }
        }
        let seconds = began.elapsed().as_secs_f64();
        guest.leave()?;
        Ok(Turn { operations: flushes, seconds, p99_us: latency.percentile(99.0), flash: None })
    }

    /// All of it, whatever time that takes.
    fn boot(&self, (socket, export): &(PathBuf, String)) -> Result<Turn> {
        let mut guest = Guest::connect_to(socket, export)?;
        let (mut latency, began) = (Latency::default(), Instant::now());
        for request in &self.boot {
            let asked = Instant::now();
            guest.ask(*request)?;
            latency.note(u64::try_from(asked.elapsed().as_nanos()).unwrap_or(u64::MAX));
        }
        let (operations, seconds) = (self.boot.len() as u64, began.elapsed().as_secs_f64());
        guest.leave()?;
        Ok(Turn { operations, seconds, p99_us: latency.percentile(99.0), flash: None })
    }
}

/// The reads, writes and flushes of the recorded work, in a smaller disk: what lies together still does.
fn folded(trace: &Trace, part: u64) -> Result<Vec<Request>> {
    let work = trace.requests.iter().filter(|(phase, _)| phase.as_deref() == Some("w"));
    let mut pieces: Vec<u64> = Vec::new();
    let mut requests = Vec::new();
    for (_, request) in work {
        let (offset, len, is_read) = match *request {
            Request::Write { offset, len } | Request::WriteThrough { offset, len } => (offset, len, false),
            Request::Read { offset, len } => (offset, len, true),
            Request::Flush => {
                requests.push(Request::Flush);
                continue;
            }
            _ => continue,
        };
        let (mut at, end) = (offset, offset + len as u64);
        while at < end {
            let (piece, within) = (at / FOLD_BYTES, at % FOLD_BYTES);
            let index = pieces.iter().position(|known| *known == piece).unwrap_or_else(|| {
                pieces.push(piece);
                pieces.len() - 1
            });
            let next = end.min((piece + 1) * FOLD_BYTES);
            let len = usize::try_from(next - at).expect("a piece");
            let offset = index as u64 * FOLD_BYTES + within;
            requests.push(if is_read {
                Request::Read { offset, len }
            } else {
                Request::Write { offset, len }
            });
            at = next;
        }
    }
    let needs = pieces.len() as u64 * FOLD_BYTES;
    if needs > part {
        return Err(Error::invalid(format!(
            "--part is at least {} MiB for the recorded guests",
            needs.div_ceil(1 << 20)
        )));
    }
    if !requests.contains(&Request::Flush) {
        return Err(Error::invalid("the trace never flushes"));
    }
    Ok(requests)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorded_guest_fits_into_a_small_disk() {
        let trace = Trace::recorded("sqlite_tpcc_like").unwrap();
        let requests = folded(&trace, 1 << 30).unwrap();
        let flushes = requests.iter().filter(|request| **request == Request::Flush).count();
        assert_eq!(flushes, 1627);
        let bytes = |request: &Request| match request {
            Request::Write { len, .. } | Request::WriteThrough { len, .. } => *len,
            _ => 0,
        };
        let work = trace.requests.iter().filter(|(phase, _)| phase.as_deref() == Some("w"));
        assert_eq!(
            requests.iter().map(bytes).sum::<usize>(),
            work.map(|(_, request)| bytes(request)).sum::<usize>()
        );
        assert!(folded(&trace, 1 << 20).is_err());
    }
}
