//! The load: one thread per connection keeps its requests in flight, and one thread watches the clock.
//!
//! ```text
//!   warm up │◄──────────── the window ────────────►│ come to an end
//!           operations and CPU time are read here  and here
//! ```
//!
//! The counts are the operations that ended in the window and the CPU time of the server in it, both read at
//! the same two moments. The client's own CPU time is reported too, because it runs on the same machine.

pub(crate) mod connection;
pub(crate) mod fio;
pub(crate) mod latency;
pub(crate) mod pattern;
pub(crate) mod vhost;
pub(crate) mod workload;

use std::path::Path;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use vellum_core::{Error, Result};
use vellum_lab::session::Session;

use crate::host::{Usage, cpu_seconds};
use connection::Client;
use latency::Latency;
use workload::{Places, Workload};

/// How long a load lasts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timing {
    /// Before anything counts.
    pub(crate) warm_up: Duration,
    /// What counts.
    pub(crate) window: Duration,
}

/// How clients reach a server, and in which dialect.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target<'a> {
    /// The server's process.
    pub(crate) pid: u32,
    /// Its socket.
    pub(crate) socket: &'a Path,
    /// Clients at once.
    pub(crate) connections: usize,
    /// Ask for structured replies, as libnbd and QEMU do and the kernel does not.
    pub(crate) structured: bool,
}

/// A window in which nothing has ended is extended by at most this long.
const LONGER_MAX: Duration = Duration::from_secs(20);

/// What was seen in one window.
#[derive(Debug, Clone, Copy, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Sample {
    /// Operations that ended.
    pub(crate) operations: u64,
    /// Bytes they moved.
    pub(crate) bytes: u64,
    /// The length of the window.
    pub(crate) seconds: f64,
    /// What the server's process took of the processors, its threads in the kernel included.
    pub(crate) server_cpu_seconds: f64,
    /// The same of the client.
    pub(crate) client_cpu_seconds: f64,
    /// What everybody else took.
    pub(crate) others_cpu_seconds: f64,
    /// The median time of an operation.
    pub(crate) latency_us_median: f64,
    /// What 99 of 100 operations did not exceed.
    pub(crate) latency_us_p99: f64,
}

const WARMING_UP: u8 = 0;
const MEASURING: u8 = 1;
const ENDING: u8 = 2;

/// A client that keeps requests in flight on a thread of its own: a connection, or a queue.
trait Busy: Send {
    /// Sends requests until as many are in flight as there should be.
    fn ask(&mut self) -> Result<()>;
    /// Waits for replies, and calls `ended` with the time each request took.
    fn hear(&mut self, ended: &mut dyn FnMut(Duration)) -> Result<()>;
    /// How many requests are in flight.
    fn under_way(&self) -> usize;
    /// Goes, when none is.
    fn leave(self) -> Result<()>;
}

/// Puts the load on the server and returns the measurement. The same seed requests the same offsets.
pub(crate) fn run(target: Target<'_>, workload: &Workload, timing: Timing, seed: u64) -> Result<Sample> {
    run_within(target, workload, timing, seed, u64::MAX)
}

/// As above, in a part at the start of the disk, of this length in bytes.
pub(crate) fn run_within(
    target: Target<'_>,
    workload: &Workload,
    timing: Timing,
    seed: u64,
    part: u64,
) -> Result<Sample> {
    let mut clients = Vec::new();
    for index in 0..target.connections {
        let session = Session::open(target.socket, target.structured)?;
        let places = Places::new(workload, session.size.min(part), index, target.connections, seed);
        clients.push(Client::new(session, *workload, places));
    }
    keep_all_busy(clients, target.pid, workload.len, timing)
}

/// Lets each of them run on its own thread, and watches the clock. Every request moves `len` bytes.
fn keep_all_busy<C: Busy>(clients: Vec<C>, pid: u32, len: usize, timing: Timing) -> Result<Sample> {
    let phase = AtomicU8::new(WARMING_UP);
    let counters: Vec<AtomicU64> = clients.iter().map(|_| AtomicU64::new(0)).collect();
    let total = || counters.iter().map(|counter| counter.load(Ordering::Relaxed)).sum::<u64>();
    thread::scope(|scope| {
        let threads: Vec<_> = clients
            .into_iter()
            .zip(&counters)
            .map(|(client, counter)| scope.spawn(|| keep_busy(client, &phase, counter)))
            .collect();
        thread::sleep(timing.warm_up);
        let (begun, usage, before) = (Instant::now(), Usage::now(pid), total());
        phase.store(MEASURING, Ordering::Relaxed);
        thread::sleep(timing.window);
        // Where others keep the drive busy one operation may take longer than a short window.
        while total() == before && begun.elapsed() < timing.window + LONGER_MAX {
            thread::sleep(Duration::from_millis(5));
        }
        let (used, after, elapsed) = (Usage::now(pid), total(), begun.elapsed());
        phase.store(ENDING, Ordering::Relaxed);
        let mut latency = Latency::default();
        for thread in threads {
            latency.add(&thread.join().expect("a client does not panic")?);
        }
        let operations = after - before;
        if operations == 0 {
            return Err(Error::invalid("no operation ended in the window, nor long after it"));
        }
        let used = used? - usage?;
        Ok(Sample {
            operations,
            bytes: operations * len as u64,
            seconds: elapsed.as_secs_f64(),
            server_cpu_seconds: used.server,
            client_cpu_seconds: used.client,
            others_cpu_seconds: used.others(),
            latency_us_median: latency.percentile(50.0),
            latency_us_p99: latency.percentile(99.0),
        })
    })
}

/// One of them, until the end.
fn keep_busy(mut client: impl Busy, phase: &AtomicU8, counter: &AtomicU64) -> Result<Latency> {
    let mut latency = Latency::default();
    let mut seen = WARMING_UP;
    let mut count = 0;
    loop {
        let now = phase.load(Ordering::Relaxed);
        if now == ENDING {
            break;
        }
        if now != seen {
            latency.clear();
            seen = now;
        }
        client.ask()?;
        client.hear(&mut |time| {
            latency.note(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
            count += 1;
        })?;
        counter.store(count, Ordering::Relaxed);
    }
    while client.under_way() > 0 {
        client.hear(&mut |_| {})?;
    }
    client.leave()?;
    Ok(latency)
}

/// Reads the whole disk once, and checks every block: whether the server serves the right data.
#[cfg(test)]
pub(crate) fn verify(socket: &Path, structured: bool) -> Result<()> {
    use workload::{Operation, Order};
    let session = Session::open(socket, structured)?;
    let workload = Workload { operation: Operation::Read, order: Order::Sequential, len: 1 << 20, depth: 4 };
    let requests = session.size / (1 << 20);
    let places = Places::new(&workload, session.size, 0, 1, 0);
    let mut client = Client::new(session, workload, places);
    let mut done = 0;
    while done < requests {
        client.ask()?;
        client.hear(&mut |_| done += 1)?;
    }
    while client.under_way() > 0 {
        client.hear(&mut |_| {})?;
    }
    client.leave()
}

/// What a load outside this program took of the processors while `work` ran, per second of it.
pub(crate) fn server_cpu_of<T>(pid: u32, work: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    let before = cpu_seconds(pid)?;
    let value = work()?;
    Ok((value, cpu_seconds(pid)? - before))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::mpsc;

    use vellum_core::{Buffer, Disk, GuestOffset, MemoryDisk, SharedDisk, WriteFlags};
    use vellum_export::nbd::{Export, Exports, SessionLimits, serve_connection};
    use vellum_export::{ConnectionSlots, Shutdown};
    use vellum_io::{Address, IoMode, Listener, clock, spawn_local};
    use vellum_lab::guest::filler;

    use super::workload::{BLOCK, Operation, Order, stamp};
    use super::*;

    const SIZE: usize = 4 << 20;

    /// A server in this process, whose disk has right bytes but at the places in `wrong`.
    fn serve(name: &str, wrong: &'static [u64]) -> PathBuf {
        let path = std::env::temp_dir().join(format!("vellum-bench-{name}-{}.sock", std::process::id()));
        let (ready, is_ready) = mpsc::channel();
        let address = path.clone();
        thread::spawn(move || {
            let served = vellum_io::run(IoMode::Auto, async || {
                let disk = MemoryDisk::new(SIZE as u64);
                let mut bytes = filler(SIZE);
                stamp(&mut bytes, 0);
                for at in wrong {
                    bytes[usize::try_from(*at).unwrap()] ^= 1;
                }
                disk.write(GuestOffset::ZERO, Buffer::copy_of(&bytes), WriteFlags::default()).await.unwrap();
                let exports = Exports::new();
                let disk: SharedDisk = disk;
                let export = Export {
                    name: String::new(),
                    description: String::new(),
                    disk,
                    read_only: false,
                    marks: None,
                };
                exports.add(export).unwrap();
                let listener = Listener::bind(&Address::unix(&address)).await.unwrap();
                ready.send(()).unwrap();
                let slots = ConnectionSlots::new(8);
                loop {
                    let socket = listener.accept().await.unwrap();
                    let (exports, slot) = (exports.clone(), slots.take().await);
                    let session = async move {
                        let stream = socket.attach();
                        serve_connection(
                            &stream,
                            &exports,
                            &*clock(),
                            &SessionLimits::default(),
                            &Shutdown::new(),
                        )
                        .await;
                        drop(slot);
                    };
                    spawn_local(session).detach();
                }
            });
            served.unwrap();
        });
        is_ready.recv().unwrap();
        path
    }

    fn sample(socket: &Path, workload: Workload, structured: bool) -> Result<Sample> {
        let target = Target { pid: std::process::id(), socket, connections: 2, structured };
        let timing = Timing { warm_up: Duration::from_millis(20), window: Duration::from_millis(100) };
        run(target, &workload, timing, 1)
    }

    #[test]
    fn every_workload_runs_in_both_dialects_and_writes_what_it_reads() {
        let socket = serve("right", &[]);
        for structured in [true, false] {
            for (operation, order, len, depth) in [
                (Operation::Read, Order::Random, BLOCK, 32),
                (Operation::Write, Order::Random, BLOCK, 32),
                (Operation::Read, Order::Sequential, 1 << 20, 4),
                (Operation::Write, Order::Sequential, 1 << 20, 4),
                (Operation::Read, Order::Random, BLOCK, 1),
            ] {
                let workload = Workload { operation, order, len, depth };
                let sample = sample(&socket, workload, structured).unwrap();
                assert!(sample.operations > 0 && sample.seconds >= 0.1, "{workload:?}: {sample:?}");
                assert!(sample.latency_us_median > 0.0 && sample.latency_us_p99 >= sample.latency_us_median);
            }
            verify(&socket, structured).unwrap();
        }
    }

    #[test]
    fn a_server_that_gives_wrong_bytes_is_found_out() {
        let socket = serve("wrong", &[(3 << 20) + 8192]);
        let error = verify(&socket, true).unwrap_err();
        assert_eq!(error.to_string(), "the server gave wrong bytes for 0x302000");
    }
}
