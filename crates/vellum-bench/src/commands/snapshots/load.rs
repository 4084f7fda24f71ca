//! The load during which snapshots are made: fio, where it has an NBD engine, else guests of our own.
//!
//! Half of the requests are reads and half are writes, of 4 KiB, at random offsets in the allocated part; a
//! flush follows each 32 of them.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;
use vellum_core::{Context, Error, Random, Result};
use vellum_lab::guest::{Guest, Request};

use crate::load::latency::Latency;

const BLOCK: usize = 4096;
/// Requests in flight at once: of fio's one connection, and of guests that wait for each answer.
const DEPTH: u64 = 8;
const FLUSH_EVERY: u64 = 32;

/// What guests saw.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Seen {
    /// Requests, flushes among them.
    pub(super) requests: u64,
    /// Of writes.
    pub(super) median_us: f64,
    /// Of flushes.
    pub(super) flush_median_ms: f64,
    /// As above, of the one that took longest.
    pub(super) flush_slowest_ms: f64,
    /// Of whatever took longest: a read, a write or a flush.
    pub(super) slowest_ms: f64,
}

/// Whether there is an fio that speaks NBD.
pub(super) fn has_fio() -> bool {
    let output = Command::new("fio").arg("--enghelp").output();
    output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("nbd"))
}

/// Puts the load on the server for this long, and does something else meanwhile.
pub(super) fn beside<T>(
    socket: &Path,
    bytes: u64,
    span: Duration,
    has_fio: bool,
    work: impl FnOnce() -> Result<T>,
) -> Result<(Seen, T)> {
    if has_fio {
        let fio = start_fio(socket, bytes, span)?;
        thread::sleep(Duration::from_millis(500)); // it begins with preparations of its own
        let value = work();
        let seen = end_fio(fio);
        return Ok((seen?, value?));
    }
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let guests: Vec<_> = (0..DEPTH)
            .map(|seed| {
                scope.spawn({
                    let is_over = &is_over;
                    move || guest(socket, bytes, seed, is_over)
                })
            })
            .collect();
        let begun = Instant::now();
        let value = work();
        thread::sleep(span.saturating_sub(begun.elapsed()));
        is_over.store(true, Ordering::Relaxed);
        let mut all = Times::default();
        for guest in guests {
            let its = guest.join().expect("a guest does not panic")?;
            all.reads.add(&its.reads);
            all.writes.add(&its.writes);
            all.flushes.add(&its.flushes);
            all.requests += its.requests;
        }
        let slowest = [&all.reads, &all.writes, &all.flushes].map(|times| times.percentile(100.0) / 1000.0);
        let seen = Seen {
            requests: all.requests,
            median_us: all.writes.percentile(50.0),
            flush_median_ms: all.flushes.percentile(50.0) / 1000.0,
            flush_slowest_ms: slowest[2],
            slowest_ms: slowest.into_iter().fold(0.0, f64::max),
        };
        Ok((seen, value?))
    })
}

fn start_fio(socket: &Path, bytes: u64, span: Duration) -> Result<Child> {
    Command::new("fio")
        .args(["--name=load", "--ioengine=nbd", "--output-format=json", "--time_based", "--norandommap"])
        .args(["--rw=randrw", "--randseed=1"])
        .arg(format!("--uri=nbd+unix:///?socket={}", socket.display()))
        .arg(format!("--bs={BLOCK}"))
        .arg(format!("--iodepth={DEPTH}"))
        .arg(format!("--fsync={FLUSH_EVERY}"))
        .arg(format!("--size={bytes}"))
        .arg(format!("--runtime={}", span.as_secs().max(1)))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context(|| "can't run fio")
}

fn end_fio(fio: Child) -> Result<Seen> {
    let output = fio.wait_with_output().context(|| "can't wait for fio")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(Error::invalid(format!("fio failed: {said}")));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let json = text.find('{').map_or("", |at| &text[at..]);
    let report: Value = serde_json::from_str(json)
        .map_err(|error| Error::corrupt(format!("can't read fio's report: {error}")))?;
    seen_of(&report).ok_or_else(|| Error::corrupt("fio's report lacks what is wanted"))
}

fn seen_of(report: &Value) -> Option<Seen> {
    let job = report.get("jobs")?.get(0)?;
    let count = |side: &str| job.get(side)?.get("total_ios")?.as_u64();
    let slowest = ["/read/clat_ns/max", "/write/clat_ns/max", "/sync/lat_ns/max"];
    let slowest = slowest.iter().map(|place| job.pointer(place)?.as_f64());
    let slowest_ns = slowest.collect::<Option<Vec<f64>>>()?.into_iter().fold(0.0, f64::max);
    // On a drive that is busy with others there may be no flush in the time, and then no median.
    let flush_median_ns = match count("sync")? {
        0 => 0.0,
        _ => job.pointer("/sync/lat_ns/percentile/50.000000")?.as_f64()?,
    };
    Some(Seen {
        requests: count("read")? + count("write")? + count("sync")?,
        median_us: job.pointer("/write/clat_ns/percentile/50.000000")?.as_f64()? / 1000.0,
        flush_median_ms: flush_median_ns / 1e6,
        flush_slowest_ms: job.pointer("/sync/lat_ns/max")?.as_f64()? / 1e6,
        slowest_ms: slowest_ns / 1e6,
    })
}

/// The times of one guest's requests.
#[derive(Default)]
struct Times {
    reads: Latency,
    writes: Latency,
    flushes: Latency,
    requests: u64,
}

fn guest(socket: &Path, bytes: u64, seed: u64, is_over: &AtomicBool) -> Result<Times> {
    let mut guest = Guest::connect(socket)?;
    let mut random = Random::from_seed(seed);
    let mut times = Times::default();
    while !is_over.load(Ordering::Relaxed) {
        let offset = random.below(bytes / BLOCK as u64) * BLOCK as u64;
        let request = match (times.requests % FLUSH_EVERY, random.one_in(2)) {
            (0, _) => Request::Flush,
            (_, true) => Request::Read { offset, len: BLOCK },
            (_, false) => Request::Write { offset, len: BLOCK },
        };
        let begun = Instant::now();
        guest.ask(request)?;
        let took = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let kind = match request {
            Request::Write { .. } => &mut times.writes,
            Request::Flush => &mut times.flushes,
            _ => &mut times.reads,
        };
        kind.note(took);
        times.requests += 1;
    }
    guest.leave()?;
    Ok(times)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_fio_says_is_read() {
        let side = |most: u64| json!({ "total_ios": 10, "clat_ns": { "max": most, "percentile": { "50.000000": 7000 } } });
        let job = json!({ "read": side(3_000_000), "write": side(2_000_000),
            "sync": { "total_ios": 2, "lat_ns": { "max": 9_000_000, "percentile": { "50.000000": 4_000_000 } } } });
        let seen = seen_of(&json!({ "jobs": [job] })).unwrap();
        assert!(
            seen.requests == 22
                && seen.median_us == 7.0
                && seen.slowest_ms == 9.0
                && seen.flush_median_ms == 4.0,
            "{seen:?}"
        );
        assert!(seen_of(&json!({ "jobs": [] })).is_none());
    }
}
