//! Entry points for fuzzers: the pure parsers, and a whole session on a small disk in memory. The input alone
//! decides everything; there is no I/O, no time and no thread.
//!
//! ```text
//!   fuzz_session   │ mode │ seed │ what the client sends …
//!     mode  1 the handshake is made for it   2 … with structured replies and block status   4 read-only
//!           8 it keeps to block sizes   16 reads bring random pieces   32 the peer stops listening
//!          64 a drain comes at some time   128 the disk answers late and out of order
//!     seed  128 the handshake that is made for it chooses extended headers
//! ```
//!
//! A session must not panic, must not stop without having ended, must leave no disk request half done, and
//! must answer every request exactly once. The last is counted from outside: requests by a second reading of
//! the input, replies by a second reading of the output.

use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use futures_lite::future::yield_now;
use vellum_core::{
    Buffer, ByteStream, CheckedDisk, Clock, Disk, Error, ErrorKind, Extent, Geometry, GuestOffset, GuestSpan,
    LocalFuture, MemoryDisk, Random, Result, SharedDisk, WriteFlags, ZeroFlags,
};

use super::exports::{Export, Exports};
use super::handshake::{Handshake, Step, TlsStage};
use super::limits::SessionLimits;
use super::request::check;
use super::session::serve_connection;
use super::status::{Contexts, MetaContext};
use super::terms::{Headers, Terms};
use super::wire::{self, RequestHeader, chunk, command, command_flag, info, option};
use crate::shutdown::Shutdown;

/// The disk's size: small, so that offsets that mean something are easily found.
const DISK_BYTES: u64 = 16 << 10;

/// More input than this is ignored, which bounds the output.
const INPUT_BYTES_MAX: usize = 16 << 10;

/// A handshake, fed in pieces as long as each byte says.
pub fn fuzz_handshake(data: &[u8]) {
    let exports = exports(MemoryDisk::new(DISK_BYTES), false);
    let limits = SessionLimits::default();
    let mut out = Vec::new();
    let (pieces, mut rest) = data.split_at(data.len().min(8));
    // What the pieces say besides: 255, as most seeds have it, is no TLS.
    let stage = match pieces.last() {
        Some(254) => TlsStage::Offered,
        Some(253) => TlsStage::Required,
        _ => TlsStage::Absent,
    };
    let mut handshake = Handshake::new(&exports, &limits, stage);
    let mut pieces = pieces.iter().cycle();
    while !rest.is_empty() {
        let len = pieces.next().map_or(1, |byte| usize::from(*byte) + 1).min(rest.len());
        let (taken, step) = handshake.feed(&rest[..len], &mut out);
        assert!(taken > 0 && taken <= len, "a handshake that goes on takes bytes");
        assert!(out.len() <= limits.reply_bytes_max + (16 << 10), "one answer at a time, and bounded");
        out.clear();
        match step {
            Step::More => rest = &rest[taken..],
            // The same bytes might have arrived inside TLS.
            Step::StartTls => {
                assert_ne!(stage, TlsStage::Absent);
                handshake = handshake.inside_tls();
                rest = &rest[taken..];
            }
            Step::Enter(_) | Step::End(_) => return,
        }
    }
}

/// One request header: a request that passes must be inside the export.
pub fn fuzz_request(data: &[u8]) {
    let is_extended = data.starts_with(&wire::EXTENDED_REQUEST_MAGIC.to_be_bytes());
    let (header, rest) = if is_extended {
        let Some((bytes, rest)) = data.split_first_chunk() else { return };
        let Some(header) = RequestHeader::parse_extended(bytes) else { return };
        assert!(header.encode_extended() == *bytes, "a header survives");
        (header, rest)
    } else {
        let Some((bytes, rest)) = data.split_first_chunk() else { return };
        let Some(header) = RequestHeader::parse(bytes) else { return };
        assert!(header.encode() == *bytes, "a header survives");
        (header, rest)
    };
    let mode = rest.first().copied().unwrap_or_default();
    let disk = MemoryDisk::new(DISK_BYTES);
    let terms = Terms::new(&disk.geometry(), mode & 1 != 0, mode & 2 != 0, &SessionLimits::default());
    let mut contexts = Contexts::default();
    if mode & 4 != 0 {
        contexts.select(MetaContext::Allocation);
    }
    let headers = match mode & 8 {
        _ if is_extended => Headers::Extended,
        0 => Headers::Simple,
        _ => Headers::Structured,
    };
    let terms = Terms { headers, contexts, ..terms };
    if let Err(refusal) = check(&header, &terms, DISK_BYTES) {
        let says_payload = is_extended && header.flags & command_flag::PAYLOAD_LEN != 0;
        let has_payload = header.command == command::WRITE || says_payload;
        assert_eq!(refusal.payload, if has_payload { header.len } else { 0 });
    }
}

/// A whole session.
pub fn fuzz_session(data: &[u8]) {
    let [mode, seed, data @ ..] = data else { return };
    let has = |bit: u8| mode & bit != 0;
    let data = &data[..data.len().min(INPUT_BYTES_MAX)];
    let mut random = Random::from_seed(u64::from(*seed));

    let disk: SharedDisk = MemoryDisk::over(DISK_BYTES, Some(MemoryDisk::new(DISK_BYTES / 2)));
    let late = has(128).then(|| Mutex::new(random.fork()));
    let disk = CheckedDisk::new(Arc::new(LateDisk { inner: disk, late }));
    let exports = exports(disk.clone(), has(4));
    let headers = match (has(2), seed & 128 != 0) {
        (false, _) => Headers::Simple,
        (true, false) => Headers::Structured,
        (true, true) => Headers::Extended,
    };
    let prefix = if has(1) { opening(headers, has(8)) } else { Vec::new() };
    let stream = ScriptedStream {
        input: [&prefix, data].concat(),
        at: Cell::new(0),
        output: RefCell::default(),
        deaf_after: if has(32) { 1 + random.index(4096) } else { usize::MAX },
        random: RefCell::new(random.fork()),
        in_pieces: has(16),
        reads: Cell::new(0),
        shutdown: Shutdown::new(),
        drain_after: if has(64) { random.below(8) } else { u64::MAX },
    };
    let limits = SessionLimits {
        requests_max: if has(128) { 5 } else { 128 },
        payload_bytes_max: 64 << 10,
        memory_bytes_max: 128 << 10,
        receive_bytes: 4096,
        ..SessionLimits::default()
    };
    run(serve_connection(&stream, &exports, &NoTime, &limits, &stream.shutdown));

    assert_eq!(disk.abandoned(), 0, "every disk request was polled to its end");
    assert_eq!(exports.sessions(""), Some(0), "the export was let go");
    let came_whole = has(1) && has(2) && !has(32) && !has(64);
    if came_whole {
        let output = stream.output.into_inner();
        assert_eq!(replies(&output, headers), requests(data, headers), "each request is answered once");
    }
}

fn exports(disk: SharedDisk, read_only: bool) -> Exports {
    let exports = Exports::new();
    let export =
        Export { name: String::new(), description: "fuzzed".to_owned(), disk, read_only, marks: None };
    exports.add(export).expect("the first export");
    exports
}

/// A handshake for inputs that should reach the transmission at once.
fn opening(headers: Headers, sizes: bool) -> Vec<u8> {
    let put = |bytes: &mut Vec<u8>, option: u32, data: &[u8]| {
        bytes.extend_from_slice(&wire::OPTION_MAGIC.to_be_bytes());
        bytes.extend_from_slice(&option.to_be_bytes());
        bytes.extend_from_slice(&u32::try_from(data.len()).expect("short").to_be_bytes());
        bytes.extend_from_slice(data);
    };
    let mut bytes = 3_u32.to_be_bytes().to_vec();
    match headers {
        Headers::Simple => {}
        Headers::Structured => put(&mut bytes, option::STRUCTURED_REPLY, &[]),
        Headers::Extended => put(&mut bytes, option::EXTENDED_HEADERS, &[]),
    }
    if headers.have_chunks() {
        put(&mut bytes, option::SET_META_CONTEXT, b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation");
    }
    let facts: &[u16] = if sizes { &[info::BLOCK_SIZE] } else { &[] };
    let mut data = vec![0; 4];
    data.extend_from_slice(&u16::try_from(facts.len()).expect("short").to_be_bytes());
    data.extend(facts.iter().flat_map(|fact| fact.to_be_bytes()));
    put(&mut bytes, option::GO, &data);
    bytes
}

/// How many requests the input holds that must be answered.
fn requests(mut input: &[u8], headers: Headers) -> usize {
    let is_extended = headers == Headers::Extended;
    let mut count = 0;
    loop {
        let header = if is_extended {
            let Some((bytes, rest)) = input.split_first_chunk() else { break };
            input = rest;
            RequestHeader::parse_extended(bytes)
        } else {
            let Some((bytes, rest)) = input.split_first_chunk() else { break };
            input = rest;
            RequestHeader::parse(bytes)
        };
        let Some(header) = header else { break };
        let is_write = header.command == command::WRITE;
        let says_payload = is_extended && header.flags & command_flag::PAYLOAD_LEN != 0;
        if header.command == command::DISC {
            break;
        }
        count += 1;
        if is_write || says_payload {
            if header.len > u64::from(wire::PAYLOAD_BYTES_DEFAULT) {
                break;
            }
            match usize::try_from(header.len).ok().and_then(|len| input.get(len..)) {
                Some(rest) => input = rest,
                None => return count - 1,
            }
        }
    }
    count
}

/// How many replies the output holds, behind its handshake. Panics when it is not well formed.
fn replies(mut output: &[u8], headers: Headers) -> usize {
    fn take<'a>(output: &mut &'a [u8], len: usize) -> &'a [u8] {
        let (now, rest) = output.split_at_checked(len).expect("the output ends with a whole reply");
        *output = rest;
        now
    }
    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
    }
    take(&mut output, wire::GREETING_BYTES);
    loop {
        let header = take(&mut output, 20);
        assert_eq!(header[..8], wire::OPTION_REPLY_MAGIC.to_be_bytes());
        take(&mut output, u32_at(header, 16) as usize);
        if (u32_at(header, 8), u32_at(header, 12)) == (option::GO, wire::option_reply::ACK) {
            break;
        }
    }
    let mut count = 0;
    while !output.is_empty() {
        if headers == Headers::Extended {
            let header = take(&mut output, wire::EXTENDED_HEADER_BYTES);
            assert_eq!((u32_at(header, 0), u32_at(header, 24)), (wire::EXTENDED_CHUNK_MAGIC, 0));
            take(&mut output, u32_at(header, 28) as usize);
            count += usize::from(header[5] == 1);
            assert!(header[4..6] == [0, 0] || header[4..6] == chunk::FLAG_DONE.to_be_bytes());
        } else if u32_at(output, 0) == wire::SIMPLE_REPLY_MAGIC {
            take(&mut output, wire::SIMPLE_REPLY_BYTES);
            count += 1;
        } else {
            let header = take(&mut output, wire::CHUNK_HEADER_BYTES);
            assert_eq!(u32_at(header, 0), wire::CHUNK_MAGIC);
            take(&mut output, u32_at(header, 16) as usize);
            count += usize::from(header[5] == 1);
            assert!(header[4..6] == [0, 0] || header[4..6] == chunk::FLAG_DONE.to_be_bytes());
        }
    }
    count
}

/// Polls to the end. A future that waits without having registered its waker waits forever.
fn run<T>(future: impl Future<Output = T>) -> T {
    struct Flag(AtomicBool);
    impl Wake for Flag {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Release);
        }
    }
    let flag = Arc::new(Flag(AtomicBool::new(false)));
    let waker = Waker::from(flag.clone());
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        assert!(flag.0.swap(false, Ordering::AcqRel), "the session waits for nothing");
    }
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

/// A peer that sends what was written down, and keeps what it is sent.
struct ScriptedStream {
    input: Vec<u8>,
    at: Cell<usize>,
    output: RefCell<Vec<u8>>,
    /// After this many bytes the stream is gone.
    deaf_after: usize,
    random: RefCell<Random>,
    in_pieces: bool,
    reads: Cell<u64>,
    shutdown: Shutdown,
    /// After this many reads a drain is requested.
    drain_after: u64,
}

impl ScriptedStream {
    async fn dawdle(&self) {
        let times = if self.in_pieces { self.random.borrow_mut().below(4) } else { 0 };
        for _ in 0..times {
            yield_now().await;
        }
    }
}

impl ByteStream for ScriptedStream {
    fn read(&self, mut buffer: Buffer) -> LocalFuture<'_, Result<(Buffer, usize)>> {
        Box::pin(async move {
            self.dawdle().await;
            self.reads.set(self.reads.get() + 1);
            if self.reads.get() > self.drain_after {
                self.shutdown.drain();
            }
            let rest = &self.input[self.at.get()..];
            let mut count = rest.len().min(buffer.len());
            if self.in_pieces && count > 0 {
                count = self.random.borrow_mut().index(count.min(100)) + 1;
            }
            buffer.copy_from(0, &rest[..count]);
            self.at.set(self.at.get() + count);
            Ok((buffer, count))
        })
    }

    fn write_all(&self, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.dawdle().await;
            let mut output = self.output.borrow_mut();
            output.extend(data.pieces().flatten());
            if output.len() > self.deaf_after {
                return Err(Error::new(ErrorKind::Closed, "the peer is gone"));
            }
            Ok(())
        })
    }

    fn shutdown(&self) {}
}

/// A disk whose answers may come late and out of order.
struct LateDisk {
    inner: SharedDisk,
    late: Option<Mutex<Random>>,
}

impl LateDisk {
    fn later<'a, T: 'a>(&self, future: LocalFuture<'a, Result<T>>) -> LocalFuture<'a, Result<T>> {
        let Some(random) = &self.late else { return future };
        let times = random.lock().map_or(0, |mut random| random.below(8));
        Box::pin(async move {
            for _ in 0..times {
                yield_now().await;
            }
            future.await
        })
    }
}

impl Disk for LateDisk {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.inner.below()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.later(self.inner.read(at, buffer))
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.later(self.inner.write(at, data, flags))
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.later(self.inner.flush())
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        self.later(self.inner.write_zeroes(span, flags))
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.later(self.inner.discard(span, flags))
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.later(self.inner.map(span))
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.close()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests that are mostly valid, as a fuzzer that knows the structure would make them.
    fn requests_at_random(random: &mut Random, is_extended: bool) -> Vec<u8> {
        let mut bytes = Vec::new();
        for _ in 0..random.below(60) {
            let command = u16::try_from(random.below(9)).expect("small");
            let longest = *random.pick(&[2, 512, 20_000, 80_000]);
            let mut header = RequestHeader {
                flags: if random.one_in(4) { 1 << random.below(7) } else { 0 },
                command: if command == 2 && !random.one_in(10) { 0 } else { command },
                cookie: random.any(),
                offset: random.below(DISK_BYTES + 100),
                len: random.below(longest),
            };
            let mut has_payload = header.command == command::WRITE;
            if is_extended {
                if has_payload && !random.one_in(5) {
                    header.flags |= command_flag::PAYLOAD_LEN;
                }
                has_payload |= header.flags & command_flag::PAYLOAD_LEN != 0;
                bytes.extend(header.encode_extended());
            } else {
                bytes.extend(header.encode());
            }
            if has_payload {
                bytes.extend((0..header.len).map(|_| 7));
            }
        }
        if random.one_in(4) && !bytes.is_empty() {
            let at = random.index(bytes.len());
            bytes[at] ^= 1 << random.below(8);
        }
        bytes
    }

    #[test]
    fn sessions_made_of_requests_that_mostly_make_sense() {
        let mut random = Random::from_seed(2);
        for mode in 0..=255 {
            for _ in 0..12 {
                let seed = random.below(256).try_into().expect("a byte");
                let data = requests_at_random(&mut random, seed & 128 != 0 && mode & 2 != 0);
                fuzz_session(&[&[mode, seed], &data[..]].concat());
            }
        }
    }

    #[test]
    fn sessions_and_parsers_made_of_noise() {
        let mut random = Random::from_seed(3);
        for _ in 0..4000 {
            let mut data = vec![0; random.index(300)];
            random.fill(&mut data);
            fuzz_session(&data);
            fuzz_handshake(&data);
            fuzz_request(&data);
            let talk =
                [&data[..data.len().min(8)], b"\0\0\0\x03IHAVEOPT\0\0\0\x07\0\0\0\x06", &data[..]].concat();
            fuzz_handshake(&talk);
            let header = [&wire::REQUEST_MAGIC.to_be_bytes(), &[0, 0, 0, 1], &data[..]].concat();
            fuzz_request(&header);
            let header = [&wire::EXTENDED_REQUEST_MAGIC.to_be_bytes(), &[0, 32, 0, 1], &data[..]].concat();
            fuzz_request(&header);
        }
    }

    #[test]
    fn the_judge_counts_as_the_protocol_does() {
        let header = |command, len| RequestHeader { flags: 0, command, cookie: 1, offset: 0, len }.encode();
        let compact = |bytes: &[u8]| requests(bytes, Headers::Structured);
        assert_eq!(compact(&[header(0, 5), header(3, 0)].concat()), 2);
        assert_eq!(compact(&[&header(1, 3)[..], b"abc", &header(9, 0)].concat()), 2);
        assert_eq!(compact(&[&header(1, 4)[..], b"abc"].concat()), 0, "half a write");
        assert_eq!(compact(&[header(2, 0), header(0, 5)].concat()), 0);
        assert_eq!(compact(&[&header(0, 5)[..], b"nonsense, long enough for a header"].concat()), 1);
        let long = |command, flags, len| {
            RequestHeader { flags, command, cookie: 1, offset: 0, len }.encode_extended()
        };
        let extended = |bytes: &[u8]| requests(bytes, Headers::Extended);
        assert_eq!(extended(&[&long(7, 32, 3)[..], b"abc", &long(6, 0, 1 << 40)].concat()), 2);
        assert_eq!(extended(&[&long(1, 0, 3)[..], b"abc", &long(6, 0, 1 << 40)].concat()), 2);
        assert_eq!(extended(&[&long(0, 32, 4)[..], b"abc"].concat()), 0, "half a payload");
    }
}
