//! How many requests per second one core serves, without a network and without a medium.
//!
//! `nbdbench` plays a client that keeps 32 requests in flight over a connection that is a function call: as
//! soon as replies are sent, the next requests can be read. What remains is the cost of the session itself
//! and of copying 4 KiB.
//!
//! `nbdbench serve SOCKET [null]` serves a disk in memory (or one that moves no bytes) on a Unix socket, for
//! `fio --ioengine=nbd` and comparisons with other servers.

#![allow(clippy::print_stdout, reason = "it prints its figures")]

#[path = "../tests/support/socket.rs"]
#[allow(dead_code, unreachable_pub, reason = "the tests' server, of which this uses a part")]
mod socket;

use std::cell::{Cell, RefCell};
use std::future::{poll_fn, ready};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use async_executor::LocalExecutor;
use async_io::{Async, block_on};
use vellum_core::{
    BlockSize, Buffer, ByteStream, Clock, Disk, Extent, Geometry, GuestOffset, GuestSpan, LocalFuture, Place,
    Result, WriteFlags, ZeroFlags,
};
use vellum_export::Shutdown;
use vellum_export::nbd::wire::{REQUEST_HEADER_BYTES, RequestHeader, command};
use vellum_export::nbd::{Ending, Export, Exports, SessionLimits, serve_connection};

const SIZE: usize = 64 << 20;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("serve") => serve(&arguments[1], arguments.get(2).is_some_and(|word| word == "null")),
        _ => measure(),
    }
}

fn measure() {
    println!("{:<34} {:>12} {:>10}", "one core, depth 32", "requests/s", "ns each");
    for (name, command, len, structured, late) in [
        ("read 4 KiB", command::READ, 4096, false, false),
        ("read 4 KiB, structured", command::READ, 4096, true, false),
        ("read 4 KiB, disk answers later", command::READ, 4096, true, true),
        ("write 4 KiB", command::WRITE, 4096, false, false),
        ("write 4 KiB, disk answers later", command::WRITE, 4096, false, true),
        ("read 64 KiB, structured", command::READ, 65536, true, false),
        ("write 64 KiB", command::WRITE, 65536, false, false),
        ("write 1 MiB", command::WRITE, 1 << 20, false, false),
        ("flush", command::FLUSH, 0, false, false),
    ] {
        for (kind, moves) in [("", true), (", null disk", false)] {
            let disk = Arc::new(FlatDisk::new(moves, late));
            let count = if len > 4096 { 20_000_000_000 / len } else { 4_000_000 };
            let each = run(disk, command, len, structured, count);
            println!("{:<34} {:>12.0} {:>10.0}", format!("{name}{kind}"), 1e9 / each, each);
        }
    }
}

/// Nanoseconds for each of `count` requests.
fn run(disk: Arc<FlatDisk>, command: u16, len: u64, structured: bool, count: u64) -> f64 {
    let exports = Exports::new();
    let export =
        Export { name: String::new(), description: String::new(), disk, read_only: false, marks: None };
    exports.add(export).expect("the first export");
    let mut opening = b"\0\0\0\x03".to_vec();
    if structured {
        opening.extend_from_slice(b"IHAVEOPT\0\0\0\x08\0\0\0\0");
    }
    opening.extend_from_slice(b"IHAVEOPT\0\0\0\x01\0\0\0\0");
    let stream = Loop::new(opening, command, len, structured, count);
    #[expect(clippy::disallowed_methods, reason = "it measures")]
    let begun = Instant::now();
    let ending = futures_lite::future::block_on(serve_connection(
        &stream,
        &exports,
        &NoTime,
        &SessionLimits::default(),
        &Shutdown::new(),
    ));
    assert!(matches!(ending, Ending::Goodbye), "{ending:?}");
    begun.elapsed().as_secs_f64() * 1e9 / count as f64
}

struct NoTime;

impl Clock for NoTime {
    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn sleep(&self, _wait: Duration) -> LocalFuture<'static, ()> {
        Box::pin(std::future::pending())
    }
}

/// A client that keeps 32 requests in flight.
struct Loop {
    /// 32 requests at different places, as they are sent.
    batch: Vec<u8>,
    request_bytes: usize,
    reply_bytes: usize,
    /// Bytes that may be read now, as a run of the batch repeated forever.
    opening: RefCell<Vec<u8>>,
    at: Cell<usize>,
    credit: Cell<usize>,
    left: Cell<u64>,
    /// Reply bytes that do not yet make a whole reply.
    replied: Cell<usize>,
    has_begun: Cell<bool>,
}

impl Loop {
    fn new(opening: Vec<u8>, command: u16, len: u64, structured: bool, count: u64) -> Self {
        let payload = if command == command::WRITE { usize::try_from(len).expect("small") } else { 0 };
        let mut batch = Vec::new();
        for cookie in 0..32 {
            let places = (SIZE as u64).checked_div(len).unwrap_or(1);
            let offset = (cookie * 7919 % places) * len;
            let header = RequestHeader { flags: 0, command, cookie, offset, len };
            batch.extend_from_slice(&header.encode());
            batch.resize(batch.len() + payload, 0x5A);
        }
        let data = if command == command::READ { usize::try_from(len).expect("small") } else { 0 };
        Self {
            batch,
            request_bytes: REQUEST_HEADER_BYTES + payload,
            reply_bytes: data + if structured && data > 0 { 28 } else { 16 },
            opening: RefCell::new(opening),
            at: Cell::new(0),
            credit: Cell::new(0),
            left: Cell::new(count),
            replied: Cell::new(0),
            has_begun: Cell::new(false),
        }
    }

    /// The client may send this many more requests.
    fn allow(&self, requests: u64) {
        let requests = requests.min(self.left.get());
        self.left.set(self.left.get() - requests);
        let requests = usize::try_from(requests).expect("at most 32");
        self.credit.set(self.credit.get() + requests * self.request_bytes);
    }
}

impl ByteStream for Loop {
    fn read(&self, mut buffer: Buffer) -> LocalFuture<'_, Result<(Buffer, usize)>> {
        let opening = std::mem::take(&mut *self.opening.borrow_mut());
        if !opening.is_empty() {
            buffer.copy_from(0, &opening);
            return Box::pin(ready(Ok((buffer, opening.len()))));
        }
        let mut count = 0;
        if self.credit.get() == 0 && self.left.get() == 0 {
            let header = RequestHeader { flags: 0, command: command::DISC, cookie: 0, offset: 0, len: 0 };
            buffer.copy_from(0, &header.encode());
            return Box::pin(ready(Ok((buffer, REQUEST_HEADER_BYTES))));
        }
        while self.credit.get() > 0 && count < buffer.len() {
            let at = self.at.get();
            let part = (self.batch.len() - at).min(self.credit.get()).min(buffer.len() - count);
            buffer.copy_from(count, &self.batch[at..at + part]);
            self.at.set((at + part) % self.batch.len());
            self.credit.set(self.credit.get() - part);
            count += part;
        }
        if count > 0 {
            return Box::pin(ready(Ok((buffer, count))));
        }
        let mut buffer = Some(buffer);
        Box::pin(async move {
            // The session asks again when it has sent something, which is when there is more.
            poll_fn(|context| match self.credit.get() > 0 || self.left.get() == 0 {
                true => Poll::Ready(()),
                false => {
                    context.waker().wake_by_ref();
                    Poll::Pending
                }
            })
            .await;
            self.read(buffer.take().expect("polled once")).await
        })
    }

    fn write_all(&self, data: Buffer) -> LocalFuture<'_, Result<()>> {
        if self.has_begun.get() {
            let replied = self.replied.get() + data.len();
            self.replied.set(replied % self.reply_bytes);
            self.allow((replied / self.reply_bytes) as u64);
        } else if self.opening.borrow().is_empty() && data.len() == 10 {
            self.has_begun.set(true);
            self.allow(32);
        }
        Box::pin(ready(Ok(())))
    }

    fn shutdown(&self) {}
}

/// A disk that is a vector, or only says so.
struct FlatDisk {
    bytes: Mutex<Vec<u8>>,
    moves: bool,
    /// Every request waits for one turn of the executor.
    late: bool,
}

impl FlatDisk {
    fn new(moves: bool, late: bool) -> Self {
        Self { bytes: Mutex::new(vec![0x5A; if moves { SIZE } else { 0 }]), moves, late }
    }

    async fn turn(&self) {
        if self.late {
            futures_lite::future::yield_now().await;
        }
    }
}

impl Disk for FlatDisk {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: SIZE as u64,
            block_size: BlockSize::from_shift(0),
            preferred_size: BlockSize::PAGE,
            read_only: false,
            fast_zeroes: true,
        }
    }

    fn read(&self, at: GuestOffset, mut buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            self.turn().await;
            if self.moves {
                let at = usize::try_from(at.bytes()).expect("inside");
                let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
                let len = buffer.len();
                buffer.copy_from(0, &bytes[at..at + len]);
            } else {
                // Not a hole.
                buffer.copy_from(0, &[1]);
            }
            Ok(buffer)
        })
    }

    fn write(&self, at: GuestOffset, data: Buffer, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.turn().await;
            if self.moves {
                let at = usize::try_from(at.bytes()).expect("inside");
                let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
                data.copy_to(0, &mut bytes[at..at + data.len()]);
            }
            Ok(())
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(ready(Ok(())))
    }

    fn write_zeroes(&self, _span: GuestSpan, _flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(ready(Ok(())))
    }

    fn discard(&self, _span: GuestSpan, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(ready(Ok(())))
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(ready(Ok(vec![Extent { span, place: Place::Compressed { from: None } }])))
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(ready(Ok(())))
    }
}

/// Serves forever, all connections on this thread.
fn serve(path: &str, null: bool) {
    let exports = Exports::new();
    let disk = Arc::new(FlatDisk::new(!null, false));
    let export =
        Export { name: String::new(), description: String::new(), disk, read_only: false, marks: None };
    exports.add(export).expect("the first export");
    let _ = std::fs::remove_file(path);
    let listener = std::os::unix::net::UnixListener::bind(path).expect("a socket");
    let (clock, limits, shutdown) =
        (socket::SystemClock::default(), SessionLimits::default(), Shutdown::new());
    let executor = LocalExecutor::new();
    block_on(executor.run(async {
        let listener = Async::new(listener).expect("a socket that does not block");
        loop {
            let (stream, _) = listener.accept().await.expect("a client");
            let (exports, clock, limits, shutdown) = (&exports, &clock, &limits, &shutdown);
            executor
                .spawn(async move {
                    let stream = socket::Socket::new(stream);
                    serve_connection(&stream, exports, clock, limits, shutdown).await
                })
                .detach();
        }
    }));
}
