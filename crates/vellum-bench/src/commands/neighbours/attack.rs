//! What a client can do to a server: one case for each kind, and the threads that do it.
//!
//! ```text
//!   storm       requests of one kind, always as many under way as the case says, on one or more connections
//!   not taken   large reads whose replies are not read        half sent   write requests without their payload
//!   strangers   sockets that say nothing                      machine     a virtual machine on a vhost-user-blk queue
//! ```
//!
//! A server may defend itself by disconnecting: the client connects again, as a hostile one would, at most a
//! hundred times a second. The other clients of the server are measured, so nothing is checked here except
//! the framing of replies.

use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use vellum_core::{Error, Result};
use vellum_export::nbd::wire::{
    CHUNK_HEADER_BYTES, CHUNK_MAGIC, EXTENDED_CHUNK_MAGIC, EXTENDED_HEADER_BYTES, RequestHeader, chunk,
    command,
};
use vellum_lab::session::{Dialect, Session, be};

/// How often a waiting client checks whether the case is over.
const GLANCE: Duration = Duration::from_millis(100);
/// Before a client that was thrown out connects again.
const PAUSE: Duration = Duration::from_millis(10);
/// What the compact form of a request can ask of a map at once, and a whole number of blocks.
const COMPACT_BYTES: u64 = 0xffff_0000;
const LARGE_BYTES: u64 = 32 << 20;

/// The disk that the attacker may use, beside the victim's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    /// qcow2 of 4 TiB in which nothing was written.
    EmptyQcow2,
    /// The same case in the native format.
    EmptyNative,
    /// A small qcow2 disk that is full of data.
    Full,
    /// As above, on a host file whose reads and writes do not come to an end.
    Hung,
}

/// What a storm asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ask {
    /// The map of the whole disk.
    WholeMap,
    /// The map, one compact request after the other, as `nbdinfo --map` sends them.
    CompactMap,
    /// Zeroes, or a discard, of the whole disk.
    WholeZeroes,
    WholeDiscard,
    /// 4 KiB somewhere, or 32 MiB.
    SmallRead,
    LargeRead,
    /// 4 KiB somewhere and a flush, in turn.
    WriteAndFlush,
}

/// What an attacker does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Quiet,
    Storm { ask: Ask, depth: usize, connections: usize },
    NotTaken { connections: usize },
    HalfSent { connections: usize },
    Strangers { sockets: usize },
    Machine { depth: u16 },
}

/// A case: a row of the table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Attack {
    /// A short name, for choosing it.
    pub(super) id: &'static str,
    pub(super) target: Target,
    pub(super) kind: Kind,
}

impl Attack {
    /// All of them, the quiet one first.
    pub(super) fn all() -> Vec<Self> {
        use Ask::*;
        let storm = |ask, depth, connections| Kind::Storm { ask, depth, connections };
        let of = |id, target, kind| Self { id, target, kind };
        vec![
            of("quiet", Target::Full, Kind::Quiet),
            of("map-qcow2-1", Target::EmptyQcow2, storm(WholeMap, 1, 1)),
            of("map-qcow2-32", Target::EmptyQcow2, storm(WholeMap, 32, 1)),
            of("map-qcow2-4x32", Target::EmptyQcow2, storm(WholeMap, 32, 4)),
            of("map-native-1", Target::EmptyNative, storm(WholeMap, 1, 1)),
            of("map-native-4x32", Target::EmptyNative, storm(WholeMap, 32, 4)),
            of("map-compact", Target::EmptyQcow2, storm(CompactMap, 1, 1)),
            of("zeroes-qcow2-120", Target::EmptyQcow2, storm(WholeZeroes, 120, 1)),
            of("zeroes-native-120", Target::EmptyNative, storm(WholeZeroes, 120, 1)),
            of("discard-qcow2-120", Target::EmptyQcow2, storm(WholeDiscard, 120, 1)),
            of("discard-native-120", Target::EmptyNative, storm(WholeDiscard, 120, 1)),
            of("discard-full-120", Target::Full, storm(WholeDiscard, 120, 1)),
            of("reads-4k-4x32", Target::Full, storm(SmallRead, 32, 4)),
            of("reads-32m-2x4", Target::Full, storm(LargeRead, 4, 2)),
            of("write-flush-32", Target::Full, storm(WriteAndFlush, 32, 1)),
            of("not-taken-100", Target::Full, Kind::NotTaken { connections: 100 }),
            of("half-sent-100", Target::Full, Kind::HalfSent { connections: 100 }),
            of("strangers-200", Target::Full, Kind::Strangers { sockets: 200 }),
            of("machine-read-32", Target::Full, Kind::Machine { depth: 32 }),
            of("hung-reads-2x64", Target::Hung, storm(SmallRead, 64, 2)),
            of("hung-discards-2x64", Target::Hung, storm(WholeDiscard, 64, 2)),
            of("hung-maps-2x64", Target::Hung, storm(WholeMap, 64, 2)),
        ]
    }
}

/// One client of a case, until `is_over`.
pub(super) fn client(kind: Kind, socket: &Path, export: &str, seed: u64, is_over: &AtomicBool) {
    let ends = || is_over.load(Ordering::Relaxed);
    while !ends() {
        let thrown_out = match kind {
            Kind::Storm { ask, depth, .. } => storm(ask, depth, socket, export, seed, is_over),
            Kind::NotTaken { .. } => stall(socket, export, command::READ, &[], is_over),
            Kind::HalfSent { .. } => stall(socket, export, command::WRITE, &[0], is_over),
            Kind::Strangers { .. } => be_silent(socket, is_over),
            Kind::Quiet | Kind::Machine { .. } => return,
        };
        if thrown_out.is_err() && !ends() {
            thread::sleep(PAUSE);
        }
    }
}

fn storm(ask: Ask, depth: usize, socket: &Path, export: &str, seed: u64, is_over: &AtomicBool) -> Result<()> {
    let dialect = if ask == Ask::CompactMap { Dialect::Mapping } else { Dialect::Extended };
    let mut session = Session::open_speaking(socket, export, dialect)?;
    session.wait_at_most(GLANCE)?;
    let size = session.size;
    let mut asks = Asks { ask, size, count: seed.wrapping_mul(0x9E37_79B9_7F4A_7C15), at: 0 };
    let payload = vec![0xa5; 4096];
    let mut wanted = depth;
    let mut replies = Replies { is_extended: dialect == Dialect::Extended, bytes: Vec::new(), skip: 0 };
    let mut inbox = vec![0; 256 << 10];
    while !is_over.load(Ordering::Relaxed) {
        for _ in 0..std::mem::take(&mut wanted) {
            let header = asks.next();
            let bytes = match dialect {
                Dialect::Extended => header.encode_extended().to_vec(),
                _ => header.encode().to_vec(),
            };
            send(&mut session, &bytes, is_over)?;
            if header.command == command::WRITE {
                send(&mut session, &payload, is_over)?;
            }
        }
        match session.stream().read(&mut inbox) {
            Ok(0) => return Err(Error::invalid("the server hung up")),
            Ok(count) => wanted = replies.take(&inbox[..count])?,
            Err(error) if is_patience(&error) => {}
            Err(error) => return Err(Error::io(error, "can't read from the server")),
        }
    }
    Ok(())
}

fn is_patience(error: &std::io::Error) -> bool {
    matches!(error.kind(), IoErrorKind::WouldBlock | IoErrorKind::TimedOut)
}

/// Writes all of it, however long the server takes no more.
fn send(session: &mut Session, mut bytes: &[u8], is_over: &AtomicBool) -> Result<()> {
    while !bytes.is_empty() && !is_over.load(Ordering::Relaxed) {
        match session.stream().write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if is_patience(&error) => {}
            Err(error) => return Err(Error::io(error, "can't write to the server")),
        }
    }
    Ok(())
}

/// Requests of a storm, one after the other.
struct Asks {
    ask: Ask,
    size: u64,
    count: u64,
    at: u64,
}

impl Asks {
    fn next(&mut self) -> RequestHeader {
        self.count = self.count.wrapping_add(1);
        let places = (self.size / LARGE_BYTES).max(1);
        let somewhere = self.count.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let (command, offset, len) = match self.ask {
            Ask::WholeMap => (command::BLOCK_STATUS, 0, self.size),
            Ask::CompactMap => {
                let offset = self.at;
                let len = COMPACT_BYTES.min(self.size - offset);
                self.at = if offset + len == self.size { 0 } else { offset + len };
                (command::BLOCK_STATUS, offset, len)
            }
            Ask::WholeZeroes => (command::WRITE_ZEROES, 0, self.size),
            Ask::WholeDiscard => (command::TRIM, 0, self.size),
            Ask::SmallRead => (command::READ, somewhere % (self.size / 4096) * 4096, 4096),
            Ask::LargeRead => (command::READ, somewhere % places * LARGE_BYTES, LARGE_BYTES.min(self.size)),
            Ask::WriteAndFlush if self.count.is_multiple_of(2) => (command::FLUSH, 0, 0),
            Ask::WriteAndFlush => (command::WRITE, somewhere % (self.size / 4096) * 4096, 4096),
        };
        RequestHeader { flags: 0, command, cookie: self.count, offset, len }
    }
}

/// Replies, of which only the framing is checked.
struct Replies {
    is_extended: bool,
    /// A header that has come in part.
    bytes: Vec<u8>,
    /// Bytes of a payload that are still to come.
    skip: u64,
}

impl Replies {
    /// How many requests these bytes end.
    fn take(&mut self, mut bytes: &[u8]) -> Result<usize> {
        let header_bytes = if self.is_extended { EXTENDED_HEADER_BYTES } else { CHUNK_HEADER_BYTES };
        let mut ended = 0;
        while !bytes.is_empty() {
            let skipped = usize::try_from(self.skip).unwrap_or(usize::MAX).min(bytes.len());
            self.skip -= skipped as u64;
            bytes = &bytes[skipped..];
            let part = (header_bytes - self.bytes.len()).min(bytes.len());
            self.bytes.extend_from_slice(&bytes[..part]);
            bytes = &bytes[part..];
            if self.bytes.len() < header_bytes {
                continue;
            }
            let header = std::mem::take(&mut self.bytes);
            let magic = u32::from_be_bytes(be(&header, 0));
            if magic != if self.is_extended { EXTENDED_CHUNK_MAGIC } else { CHUNK_MAGIC } {
                return Err(Error::corrupt(format!("a reply with the magic {magic:#x}")));
            }
            self.skip = match self.is_extended {
                true => u64::from_be_bytes(be(&header, 24)),
                false => u64::from(u32::from_be_bytes(be(&header, 16))),
            };
            ended += usize::from(u16::from_be_bytes(be(&header, 4)) & chunk::FLAG_DONE != 0);
        }
        Ok(ended)
    }
}

/// Asks for much, sends a part of what belongs to it, takes nothing, and waits.
fn stall(socket: &Path, export: &str, command: u16, part: &[u8], is_over: &AtomicBool) -> Result<()> {
    let mut session = Session::open_export(socket, export, false)?;
    session.wait_at_most(GLANCE)?;
    let len = LARGE_BYTES.min(session.size);
    let header = RequestHeader { flags: 0, command, cookie: 1, offset: 0, len };
    send(&mut session, &[&header.encode()[..], part].concat(), is_over)?;
    wait_for_the_end(session.stream(), is_over)
}

fn be_silent(socket: &Path, is_over: &AtomicBool) -> Result<()> {
    let connected = UnixStream::connect(socket).map_err(|error| Error::io(error, "can't connect"))?;
    wait_for_the_end(&connected, is_over)
}

/// Until the case is over or the server has hung up; nothing that comes is taken.
fn wait_for_the_end(stream: &UnixStream, is_over: &AtomicBool) -> Result<()> {
    let mut gone = [rustix::event::PollFd::new(stream, rustix::event::PollFlags::RDHUP)];
    let glance = rustix::event::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    while !is_over.load(Ordering::Relaxed) {
        match rustix::event::poll(&mut gone, Some(&glance)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Err(Error::invalid("the server hung up")),
            Err(error) => return Err(Error::io(error.into(), "can't wait for the server")),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_counted_however_they_are_cut() {
        let mut header = [0; EXTENDED_HEADER_BYTES];
        header[..4].copy_from_slice(&EXTENDED_CHUNK_MAGIC.to_be_bytes());
        header[24..].copy_from_slice(&5u64.to_be_bytes());
        let part = [&header[..], &[7; 5]].concat();
        header[4..6].copy_from_slice(&chunk::FLAG_DONE.to_be_bytes());
        let last = [&header[..], &[7; 5]].concat();
        let all = [&part[..], &last, &last].concat();
        for cut in 1..all.len() {
            let mut replies = Replies { is_extended: true, bytes: Vec::new(), skip: 0 };
            let ended: usize =
                all.chunks(cut).map(|bytes| replies.take(bytes).expect("it is well formed")).sum();
            assert_eq!(ended, 2, "cut at each {cut}");
        }
        let mut replies = Replies { is_extended: false, bytes: Vec::new(), skip: 0 };
        assert!(replies.take(&all).is_err());
    }

    #[test]
    fn maps_are_asked_to_the_end_and_again() {
        let mut asks = Asks { ask: Ask::CompactMap, size: COMPACT_BYTES + 5, count: 0, at: 0 };
        let got: Vec<_> = (0..3).map(|_| asks.next()).map(|ask| (ask.offset, ask.len)).collect();
        assert_eq!(got, [(0, COMPACT_BYTES), (COMPACT_BYTES, 5), (0, COMPACT_BYTES)]);
    }
}
