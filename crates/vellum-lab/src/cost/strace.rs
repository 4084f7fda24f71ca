//! `strace` as a witness: parses its lines and finds the writes and flushes of files in a directory.
//!
//! ```text
//!   2704  1795264691.045133 fallocate(5</d/q.qcow2>, FALLOC_FL_ZERO_RANGE, 327680, 65536) = 0
//!   2704  1795264691.045323 pwrite64(5</d/q.qcow2>, ""..., 4096, 327680 <unfinished ...>
//!   2705  1795264691.045400 fdatasync(5</d/q.qcow2>) = 0
//!   2704  1795264691.045682 <... pwrite64 resumed>) = 4096
//! ```
//!
//! A call counts at the moment it began, with its result; a call that failed did nothing and does not count.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use vellum_core::{Context, Error, Result};

use super::Counts;

/// How long the end of a trace may take to come after that of the process.
const PATIENCE: Duration = Duration::from_secs(120);

/// What is looked at.
const CALLS: &str = "trace=pread64,preadv,preadv2,pwrite64,pwritev,pwritev2,fdatasync,fsync,fallocate";

/// The same command, traced: its process is the program itself, so that signals reach it.
pub fn watched(command: &Command, log: &Path) -> Command {
    let mut strace = Command::new("strace");
    strace.args(["-D", "-f", "-q", "-y", "-s", "0", "-ttt", "-e", CALLS, "-e", "signal=none", "-o"]).arg(log);
    strace.arg("--").arg(command.get_program()).args(command.get_args());
    strace
}

/// The same command, with this delay before each flush. Nothing else is traced, and nothing else is slowed
/// down except by the check for that.
pub fn held(command: &Command, delay: Duration, log: &Path) -> Command {
    let mut strace = Command::new("strace");
    strace.args(["-D", "-f", "--seccomp-bpf", "-q", "-e", "trace=fdatasync,fsync", "-e", "signal=none"]);
    if !delay.is_zero() {
        strace.arg("-e").arg(format!("inject=fdatasync,fsync:delay_enter={}", delay.as_micros()));
    }
    strace.arg("-o").arg(log).arg("--").arg(command.get_program()).args(command.get_args());
    strace
}

/// A call that succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// When it began, in microseconds since 1970.
    pub begun_us: u64,
    /// What it counts as.
    pub counts: Counts,
    /// What it read.
    pub bytes_read: u64,
    /// Where, if it reads or writes.
    pub offset: u64,
}

/// The trace of a process that has ended, or is about to.
pub fn read(log: &Path, pid: u32) -> Result<String> {
    let begun = Instant::now();
    loop {
        let text = fs::read_to_string(log).context(|| format!("can't read {}", log.display()))?;
        if has_ended(&text, pid) {
            return Ok(text);
        }
        if begun.elapsed() > PATIENCE {
            return Err(Error::corrupt(format!("{} does not come to an end", log.display())));
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Calls that began after `from_us`, and no later than `to_us`.
pub fn sum(calls: &[Call], from_us: u64, to_us: u64) -> Counts {
    let mut sum = Counts::default();
    for call in calls.iter().filter(|call| call.begun_us > from_us && call.begun_us <= to_us) {
        sum += call.counts;
    }
    sum
}

/// What calls read that began after `from_us`, and no later than `to_us`.
pub fn bytes_read(calls: &[Call], from_us: u64, to_us: u64) -> u64 {
    let within = calls.iter().filter(|call| call.begun_us > from_us && call.begun_us <= to_us);
    within.map(|call| call.bytes_read).sum()
}

/// A line's process and the rest of it.
fn split(line: &str) -> Option<(u32, &str)> {
    let (pid, rest) = line.split_once(' ')?;
    Some((pid.parse().ok()?, rest.trim_start()))
}

/// Whether the trace records the end of the process.
fn has_ended(text: &str, pid: u32) -> bool {
    let ends = |rest: &str| rest.contains(" +++ exited with") || rest.contains(" +++ killed by");
    text.lines().rev().filter_map(split).any(|(of, rest)| of == pid && ends(rest))
}

/// The calls to one file, or to files in a directory.
pub fn parse(text: &str, place: &Path) -> Result<Vec<Call>> {
    let mut calls = Vec::new();
    // The call that each thread has begun: one at most.
    let mut unfinished: HashMap<u32, (u64, &str)> = HashMap::new();
    for line in text.lines() {
        let strange = || Error::corrupt(format!("strace says {line:?}, which is not understood"));
        let (pid, rest) = split(line).ok_or_else(strange)?;
        let (time, said) = rest.split_once(' ').ok_or_else(strange)?;
        let time = microseconds(time).ok_or_else(strange)?;
        if said.starts_with("+++ ") || said.starts_with("--- ") {
            continue;
        }
        let (begun_us, call, result) = if let Some(call) = said.strip_suffix(" <unfinished ...>") {
            unfinished.insert(pid, (time, call));
            continue;
        } else if said.starts_with("<... ") {
            let (begun, call) = unfinished.remove(&pid).ok_or_else(strange)?;
            let (_, result) = said.split_once("resumed>").ok_or_else(strange)?;
            (begun, call, result)
        } else {
            (time, said, said)
        };
        let (_, result) = result.rsplit_once(" = ").ok_or_else(strange)?;
        if is_at(place, call)
            && let Ok(result) = result.split(' ').next().unwrap_or_default().parse::<u64>()
        {
            let bytes_read = if call.starts_with("pread") { result } else { 0 };
            calls.push(Call {
                begun_us,
                counts: counts_of(call, result),
                bytes_read,
                offset: offset_of(call),
            });
        }
    }
    calls.sort_by_key(|call| call.begun_us);
    Ok(calls)
}

/// `1795264691.045133`.
fn microseconds(time: &str) -> Option<u64> {
    let (seconds, micros) = time.split_once('.')?;
    let micros = (micros.len() == 6).then_some(micros)?;
    Some(seconds.parse::<u64>().ok()? * 1_000_000 + micros.parse::<u64>().ok()?)
}

/// Whether the first argument, `5</d/q.qcow2>`, is that file or one of that directory.
fn is_at(place: &Path, call: &str) -> bool {
    let Some((before, named)) = call.split_once('<') else {
        return false;
    };
    let Some(place) = place.to_str() else {
        return false;
    };
    before.contains('(') && named.strip_prefix(place).is_some_and(|rest| rest.starts_with(['/', '>']))
}

/// The last argument of a call that reads or writes: `pwrite64(5</d/q.qcow2>, ""..., 4096, 327680`. `preadv2`
/// and `pwritev2` have flags behind it.
fn offset_of(call: &str) -> u64 {
    let arguments = call.rsplit_once(") = ").map_or(call, |(arguments, _)| arguments);
    let is_flagged = call.starts_with("preadv2(") || call.starts_with("pwritev2(");
    let last = arguments.rsplit(", ").nth(usize::from(is_flagged));
    last.and_then(|offset| offset.trim_end_matches(')').parse().ok()).unwrap_or_default()
}

fn counts_of(call: &str, result: u64) -> Counts {
    let name = call.split('(').next().unwrap_or_default();
    match name {
        "fdatasync" | "fsync" => Counts { flushes: 1, ..Counts::default() },
        "pwrite64" | "pwritev" | "pwritev2" => {
            Counts { writes: 1, bytes_written: result, ..Counts::default() }
        }
        "fallocate" if call.contains("PUNCH_HOLE") || call.contains("ZERO_RANGE") => {
            Counts { holes: 1, ..Counts::default() }
        }
        _ => Counts::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "\
10  1700000000.000100 pwrite64(5</d/q.qcow2>, \"\"..., 65536, 131072) = 65536
10  1700000000.000200 fdatasync(5</d/q.qcow2>) = 0
11  1700000000.000300 fallocate(5</d/q.qcow2>, FALLOC_FL_ZERO_RANGE, 327680, 65536) = 0
11  1700000000.000310 fallocate(5</d/q.qcow2>, 0, 0, 65536) = 0
11  1700000000.000320 fallocate(5</d/q.qcow2>, FALLOC_FL_KEEP_SIZE|FALLOC_FL_PUNCH_HOLE, 0, 9) = -1 EOPNOTSUPP (Not supported)
10  1700000000.000400 pwritev(5</d/q.qcow2>, [{iov_base=\"\"..., iov_len=4096}], 1, 0 <unfinished ...>
11  1700000000.000500 fdatasync(5</d/q.qcow2> <unfinished ...>
10  1700000001.000600 <... pwritev resumed>) = 4096
11  1700000001.000700 <... fdatasync resumed>) = 0
10  1700000001.000800 pwrite64(6</d2/log>, \"\"..., 10, 0) = 10
10  1700000001.000900 fsync(7</d/base.raw>) = 0
10  1700000001.000950 pread64(7</d/base.raw>, \"\"..., 4096, 0) = 512
10  1700000001.000960 preadv(5</d/q.qcow2>, [], 1, 0) = 7
10  1700000001.001000 pwritev(8<anon_inode:[eventfd]>, [], 0, 0) = 0
10  1700000001.001100 --- SIGTERM {si_signo=SIGTERM, si_code=SI_USER, si_pid=9, si_uid=0} ---
11  1700000001.001200 +++ exited with 0 +++
";

    #[test]
    fn calls_count_when_they_began_and_only_in_the_directory() {
        let calls = parse(TRACE, Path::new("/d")).unwrap();
        let all = sum(&calls, 0, u64::MAX);
        assert_eq!(all, Counts { flushes: 3, writes: 2, bytes_written: 65536 + 4096, holes: 1 });
        let second = 1_700_000_000_000_000;
        let early = sum(&calls, second + 100, second + 500);
        let expected = Counts { flushes: 2, writes: 1, bytes_written: 4096, holes: 1 };
        assert_eq!(early, expected, "the bounds are open below and closed above");
        assert_eq!(sum(&calls, second + 500, u64::MAX), Counts { flushes: 1, ..Counts::default() });
    }

    #[test]
    fn places_are_those_of_the_calls() {
        let calls = parse(TRACE, Path::new("/d")).unwrap();
        let offsets: Vec<u64> =
            calls.iter().filter(|call| call.counts.writes > 0).map(|call| call.offset).collect();
        assert_eq!(offsets, [131_072, 0]);
        assert_eq!(offset_of("pwritev2(5</d/x>, [{iov_base=\"\"..., iov_len=9}], 1, 4096, 0) = 9"), 4096);
        assert_eq!(offset_of("pread64(5</d/x>, \"\"..., 65536, 327680"), 327_680);
    }

    #[test]
    fn what_was_read_of_one_file() {
        let of =
            |place: &str, from_us| bytes_read(&parse(TRACE, Path::new(place)).unwrap(), from_us, u64::MAX);
        assert_eq!([of("/d/base.raw", 0), of("/d", 0), of("/d/base", 0)], [512, 519, 0]);
        assert_eq!(of("/d", 1_700_000_001_000_950), 7);
    }

    #[test]
    fn the_end_of_a_trace_is_that_of_the_process_not_of_a_thread() {
        assert!(has_ended(TRACE, 11) && !has_ended(TRACE, 10) && !has_ended(TRACE, 1));
        assert!(has_ended("10 1700000000.000100 +++ killed by SIGKILL +++", 10));
    }

    #[test]
    fn lines_that_are_not_understood_are_an_error() {
        for line in [
            "strace: Process 7 attached",
            "10  1700000000.0001 fsync(5</d/x>) = 0",
            "10  1700000000.000100 <... pwritev resumed>) = 4096",
            "10  1700000000.000100 fsync(5</d/x>)",
        ] {
            let error = parse(line, Path::new("/d")).unwrap_err();
            assert!(error.to_string().contains("not understood"), "{line}: {error}");
        }
    }
}
