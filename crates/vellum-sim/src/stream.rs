//! Two ends of a connection in one world, so that a session can be run against its client without a socket.
//!
//! ```text
//!   end A ──▶ [ bytes on their way, at most `capacity`, each with its time of arrival ] ──▶ end B
//!         ◀── [                         the same the other way                        ] ◀──
//! ```
//!
//! 1. Bytes arrive in order, none lost, unless the connection is reset.
//! 2. A writer waits while `capacity` bytes are in transit or have not been read.
//! 3. With fragmenting, a read returns any number of the bytes that have arrived, at least one; the seed
//!    decides.
//! 4. [`shutdown`](ByteStream::shutdown), or dropping an end, lets the peer read what was sent and then the
//!    end; what the peer writes then fails. [`reset`](SimStream::reset) loses what is in transit, and both
//!    ends fail.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::ops::RangeInclusive;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use vellum_core::{Buffer, ByteStream, Error, LocalFuture, Random, Result, lock};

use crate::alarm::Sleep;
use crate::delay::random_between;
use crate::world::{Core, World};

/// What a connection is like.
#[derive(Debug, Clone)]
pub struct StreamOptions {
    /// How many bytes may be on their way in one direction.
    pub capacity: usize,
    /// Reads give random parts of what has come.
    pub fragment: bool,
    /// How long bytes are on their way.
    pub delay: RangeInclusive<Duration>,
}

impl Default for StreamOptions {
    /// 64 KiB, whole and at once.
    fn default() -> Self {
        Self { capacity: 64 << 10, fragment: false, delay: Duration::ZERO..=Duration::ZERO }
    }
}

/// A connection and its two ends.
pub fn stream_pair(world: &World, options: &StreamOptions) -> (SimStream, SimStream) {
    let (one, other) = (Arc::<Mutex<Pipe>>::default(), Arc::<Mutex<Pipe>>::default());
    let end = |incoming: &Arc<Mutex<Pipe>>, outgoing: &Arc<Mutex<Pipe>>| SimStream {
        core: world.core().clone(),
        options: options.clone(),
        random: Mutex::new(world.random()),
        incoming: incoming.clone(),
        outgoing: outgoing.clone(),
    };
    (end(&one, &other), end(&other, &one))
}

/// One end of a connection.
pub struct SimStream {
    core: Arc<Core>,
    options: StreamOptions,
    random: Mutex<Random>,
    incoming: Arc<Mutex<Pipe>>,
    outgoing: Arc<Mutex<Pipe>>,
}

/// One direction.
#[derive(Default)]
struct Pipe {
    /// What was sent together, when it arrives, and how much of it has been read.
    packets: VecDeque<Packet>,
    bytes: usize,
    last_arrival: Duration,
    /// The writer will send no more.
    ended: bool,
    /// The reader will read no more.
    refused: bool,
    reset: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

struct Packet {
    arrival: Duration,
    bytes: Vec<u8>,
    read: usize,
}

impl Pipe {
    fn arrived(&self, now: Duration) -> usize {
        let arrived = self.packets.iter().take_while(|packet| packet.arrival <= now);
        arrived.map(|packet| packet.bytes.len() - packet.read).sum()
    }

    fn take(&mut self, count: usize, buffer: &mut Buffer) {
        let mut done = 0;
        while done < count {
            let packet = self.packets.front_mut().expect("so much has arrived");
            let part = (packet.bytes.len() - packet.read).min(count - done);
            buffer.copy_from(done, &packet.bytes[packet.read..packet.read + part]);
            packet.read += part;
            done += part;
            if packet.read == packet.bytes.len() {
                self.packets.pop_front();
            }
        }
        self.bytes -= count;
    }
}

fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}

fn was_reset() -> Error {
    Error::io(io::ErrorKind::ConnectionReset.into(), "the connection was reset")
}

impl SimStream {
    /// Breaks the connection: what is on its way is lost, and both ends fail from now on.
    pub fn reset(&self) {
        for pipe in [&self.incoming, &self.outgoing] {
            let wakers = {
                let mut pipe = lock(pipe);
                pipe.reset = true;
                pipe.packets.clear();
                pipe.bytes = 0;
                [pipe.reader.take(), pipe.writer.take()]
            };
            wakers.into_iter().for_each(wake);
        }
    }

    fn poll_read(
        &self,
        context: &mut Context<'_>,
        buffer: &mut Buffer,
        arrival: &mut Option<Sleep>,
    ) -> Poll<Result<usize>> {
        let now = self.core.now();
        let mut pipe = lock(&self.incoming);
        if pipe.reset {
            return Poll::Ready(Err(was_reset()));
        }
        let mut count = pipe.arrived(now).min(buffer.len());
        if count > 0 {
            if self.options.fragment {
                count = 1 + lock(&self.random).index(count);
            }
            pipe.take(count, buffer);
            let writer = pipe.writer.take();
            drop(pipe);
            wake(writer);
            return Poll::Ready(Ok(count));
        }
        if pipe.refused || (pipe.ended && pipe.packets.is_empty()) {
            return Poll::Ready(Ok(0));
        }
        pipe.reader = Some(context.waker().clone());
        let next = pipe.packets.front().map(|packet| packet.arrival);
        drop(pipe);
        *arrival = next.map(|arrival| Sleep::until(self.core.clone(), arrival));
        if let Some(sleep) = arrival {
            let _pending = Pin::new(sleep).poll(context);
        }
        Poll::Pending
    }

    /// Sends the first bytes, as many as there is room for.
    fn poll_write(&self, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let now = self.core.now();
        let mut pipe = lock(&self.outgoing);
        if pipe.reset {
            return Poll::Ready(Err(was_reset()));
        }
        if pipe.refused || pipe.ended {
            let error = io::ErrorKind::BrokenPipe.into();
            return Poll::Ready(Err(Error::io(error, "the connection was shut down")));
        }
        let count = bytes.len().min(self.options.capacity - pipe.bytes);
        if count == 0 && !bytes.is_empty() {
            pipe.writer = Some(context.waker().clone());
            return Poll::Pending;
        }
        let delay = random_between(&self.options.delay, &mut lock(&self.random));
        let arrival = pipe.last_arrival.max(now + delay);
        pipe.last_arrival = arrival;
        pipe.bytes += count;
        pipe.packets.push_back(Packet { arrival, bytes: bytes[..count].to_vec(), read: 0 });
        let reader = pipe.reader.take();
        drop(pipe);
        wake(reader);
        Poll::Ready(Ok(count))
    }
}

impl ByteStream for SimStream {
    fn read(&self, mut buffer: Buffer) -> LocalFuture<'_, Result<(Buffer, usize)>> {
        Box::pin(async move {
            assert!(!buffer.is_empty(), "a read has room for a byte");
            let mut arrival = None;
            let count = poll_fn(|context| self.poll_read(context, &mut buffer, &mut arrival)).await?;
            self.core.note(count as u64);
            Ok((buffer, count))
        })
    }

    fn write_all(&self, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            for piece in data.pieces() {
                let mut rest = piece;
                while !rest.is_empty() {
                    let sent = poll_fn(|context| self.poll_write(context, rest)).await?;
                    rest = &rest[sent..];
                }
            }
            Ok(())
        })
    }

    fn shutdown(&self) {
        for pipe in [&self.outgoing, &self.incoming] {
            let wakers = {
                let mut locked = lock(pipe);
                if Arc::ptr_eq(pipe, &self.outgoing) {
                    locked.ended = true;
                } else {
                    locked.refused = true;
                }
                [locked.reader.take(), locked.writer.take()]
            };
            wakers.into_iter().for_each(wake);
        }
    }
}

impl Drop for SimStream {
    fn drop(&mut self) {
        self.shutdown();
    }
}
