//! A slow line to a server of this host: what passes is delayed, and limited to a number of bytes a second.
//!
//! ```text
//!   client ─► bytes as they come ─────────────────────────► server
//!          ◄─ latency, then its turn on the line, counted ◄─
//! ```
//!
//! 1. All connections share the line, as the programs of a host share theirs.
//! 2. What comes from the server is late by the latency, however much it is: a long answer waits for it once. A new connection
//!    waits for it once more, as the handshake of TCP would.
//! 3. Memory is bounded: each connection has at most [`WAITING_MAX`] pieces that wait.
//! 4. When the line is dropped, nobody else can connect. Connections end with their clients.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use vellum_core::{Context, Result};

/// What passes at once.
const PIECE_BYTES: usize = 16 << 10;
/// Pieces of a connection that wait for their time.
const WAITING_MAX: usize = 1024;

/// How fast a line is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Speed {
    /// What each answer is late.
    pub latency: Duration,
    /// From the server, for all connections together, in bytes a second.
    pub bytes_per_second: u64,
}

struct Shared {
    server: SocketAddr,
    speed: Speed,
    /// When the line is free again.
    free_at: Mutex<Instant>,
    came: AtomicU64,
    went: AtomicU64,
    ends: AtomicBool,
}

impl Shared {
    fn wait_for_turn(&self, bytes: usize) {
        let takes = Duration::from_secs_f64(bytes as f64 / self.speed.bytes_per_second as f64);
        let until = {
            let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
            *free_at = (*free_at).max(Instant::now()) + takes;
            *free_at
        };
        thread::sleep(until.saturating_duration_since(Instant::now()));
    }
}

/// A line, which is there until it is dropped.
pub struct Line {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Line {
    /// A line to this server, on a free port of this host.
    ///
    /// # Errors
    /// When there is no free port.
    pub fn to(server: SocketAddr, speed: Speed) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context(|| "can't listen on a port")?;
        let address = listener.local_addr().context(|| "can't find the port")?;
        let shared = Arc::new(Shared {
            server,
            speed,
            free_at: Mutex::new(Instant::now()),
            came: AtomicU64::new(0),
            went: AtomicU64::new(0),
            ends: AtomicBool::new(false),
        });
        let own = shared.clone();
        thread::spawn(move || {
            for client in listener.incoming() {
                if own.ends.load(Ordering::Acquire) {
                    return;
                }
                if let Ok(client) = client {
                    let own = own.clone();
                    thread::spawn(move || drop(pass(&own, client)));
                }
            }
        });
        Ok(Self { address, shared })
    }

    /// Where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Bytes that came from the server so far, headers of answers included.
    pub fn came(&self) -> u64 {
        self.shared.came.load(Ordering::Relaxed)
    }

    /// Bytes that went to the server so far.
    pub fn went(&self) -> u64 {
        self.shared.went.load(Ordering::Relaxed)
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Release);
        // Wakes the thread that accepts.
        drop(TcpStream::connect(self.address));
    }
}

fn pass(shared: &Arc<Shared>, mut client: TcpStream) -> io::Result<()> {
    thread::sleep(shared.speed.latency);
    let mut server = TcpStream::connect(shared.server)?;
    for stream in [&client, &server] {
        stream.set_nodelay(true)?;
    }
    let (mut from_client, mut to_server) = (client.try_clone()?, server.try_clone()?);
    let counts = shared.clone();
    thread::spawn(move || {
        let mut piece = vec![0; PIECE_BYTES];
        while let Ok(count @ 1..) = from_client.read(&mut piece) {
            counts.went.fetch_add(count as u64, Ordering::Relaxed);
            if to_server.write_all(&piece[..count]).is_err() {
                break;
            }
        }
        drop(to_server.shutdown(Shutdown::Write));
    });
    let (arrived, waiting) = sync_channel::<(Instant, Vec<u8>)>(WAITING_MAX);
    let latency = shared.speed.latency;
    thread::spawn(move || {
        let mut piece = vec![0; PIECE_BYTES];
        while let Ok(count @ 1..) = server.read(&mut piece) {
            if arrived.send((Instant::now() + latency, piece[..count].to_vec())).is_err() {
                break;
            }
        }
        drop(server.shutdown(Shutdown::Both));
    });
    for (due, bytes) in waiting {
        thread::sleep(due.saturating_duration_since(Instant::now()));
        shared.wait_for_turn(bytes.len());
        shared.came.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        client.write_all(&bytes)?;
    }
    client.shutdown(Shutdown::Both)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_passes_is_whole_counted_and_late() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let server = listener.local_addr().expect("bound");
        let echo = thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let mut bytes = Vec::new();
            stream.read_to_end(&mut bytes).expect("read");
            stream.write_all(&bytes).expect("written");
        });
        let speed = Speed { latency: Duration::from_millis(30), bytes_per_second: 1 << 20 };
        let line = Line::to(server, speed).expect("a line");
        let sent: Vec<u8> = (0..200_000u32).map(|number| number.to_le_bytes()[1]).collect();
        let began = Instant::now();
        let mut client = TcpStream::connect(line.address()).expect("connected");
        client.write_all(&sent).expect("written");
        client.shutdown(Shutdown::Write).expect("ended");
        let mut back = Vec::new();
        client.read_to_end(&mut back).expect("read");
        assert!(back == sent);
        assert_eq!((line.came(), line.went()), (200_000, 200_000));
        // Two latencies, and 190 ms on the line: no less than that, however busy the host is.
        assert!(began.elapsed() >= Duration::from_millis(240), "{:?}", began.elapsed());
        echo.join().expect("no panic");
    }
}
