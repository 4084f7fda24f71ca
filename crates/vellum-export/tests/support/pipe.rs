//! A connection in memory: two ends, bytes both ways, and a bound on the bytes in flight.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

use vellum_core::{Buffer, ByteStream, Error, ErrorKind, LocalFuture, Random, Result};

/// One end of a connection.
pub struct Pipe {
    incoming: Rc<RefCell<Lane>>,
    outgoing: Rc<RefCell<Lane>>,
    /// Cuts what a read brings into random pieces.
    cuts: RefCell<Option<Random>>,
}

#[derive(Default)]
struct Lane {
    bytes: VecDeque<u8>,
    capacity: usize,
    /// No more bytes will be put in.
    ended: bool,
    /// No bytes will be taken out any more.
    deaf: bool,
    /// The connection is lost.
    broken: bool,
    /// All bytes that ever went in.
    total: u64,
    /// How often a write began.
    writes: u64,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl Lane {
    fn wake(&mut self) {
        for waker in [self.reader.take(), self.writer.take()].into_iter().flatten() {
            waker.wake();
        }
    }
}

/// A connection that holds `capacity` bytes each way.
pub fn pipe(capacity: usize) -> (Pipe, Pipe) {
    let lane = || Rc::new(RefCell::new(Lane { capacity, ..Lane::default() }));
    let (one, other) = (lane(), lane());
    let end = |incoming: &Rc<RefCell<Lane>>, outgoing: &Rc<RefCell<Lane>>| Pipe {
        incoming: incoming.clone(),
        outgoing: outgoing.clone(),
        cuts: RefCell::new(None),
    };
    (end(&one, &other), end(&other, &one))
}

impl Pipe {
    /// From now on reads bring random amounts.
    pub fn cut_reads(&self, random: Random) {
        *self.cuts.borrow_mut() = Some(random);
    }

    /// How many bytes were ever sent to this end.
    pub fn total_sent_here(&self) -> u64 {
        self.incoming.borrow().total
    }

    /// How many writes the other end made.
    pub fn writes_here(&self) -> u64 {
        self.incoming.borrow().writes
    }

    /// How many bytes lie ready to be read at this end.
    pub fn waiting_here(&self) -> usize {
        self.incoming.borrow().bytes.len()
    }

    /// How many bytes from this end the other has not read.
    pub fn unread_there(&self) -> usize {
        self.outgoing.borrow().bytes.len()
    }

    /// Takes this many bytes, if they are there, and discards them.
    pub fn take_some(&self, count: usize) {
        let mut lane = self.incoming.borrow_mut();
        let count = count.min(lane.bytes.len());
        lane.bytes.drain(..count);
        lane.wake();
    }

    /// From now on everything fails, at both ends.
    pub fn break_down(&self) {
        for lane in [&self.incoming, &self.outgoing] {
            let mut lane = lane.borrow_mut();
            lane.broken = true;
            lane.wake();
        }
    }

    /// Says that no more bytes will come from this end, but still reads.
    pub fn end_writing(&self) {
        let mut lane = self.outgoing.borrow_mut();
        lane.ended = true;
        lane.wake();
    }
}

fn lost() -> Error {
    Error::new(ErrorKind::Io, "the connection is lost")
}

impl ByteStream for Pipe {
    fn read(&self, mut buffer: Buffer) -> LocalFuture<'_, Result<(Buffer, usize)>> {
        assert!(!buffer.is_empty(), "a read needs room");
        Box::pin(async move {
            let count = poll_fn(|context| {
                let mut lane = self.incoming.borrow_mut();
                if lane.broken {
                    return Poll::Ready(Err(lost()));
                }
                if lane.bytes.is_empty() {
                    if lane.ended || lane.deaf {
                        return Poll::Ready(Ok(0));
                    }
                    lane.reader = Some(context.waker().clone());
                    return Poll::Pending;
                }
                let mut count = buffer.len().min(lane.bytes.len());
                if let Some(random) = &mut *self.cuts.borrow_mut() {
                    let most = if random.one_in(3) { 3 } else { count };
                    count = random.index(count.min(most)) + 1;
                }
                let bytes: Vec<u8> = lane.bytes.drain(..count).collect();
                buffer.copy_from(0, &bytes);
                lane.wake();
                Poll::Ready(Ok(count))
            })
            .await?;
            Ok((buffer, count))
        })
    }

    fn write_all(&self, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.outgoing.borrow_mut().writes += 1;
            // Piece by piece, so that the harness holds no second copy of what a session sends.
            let mut sent = 0;
            poll_fn(|context| {
                let mut lane = self.outgoing.borrow_mut();
                if lane.broken {
                    return Poll::Ready(Err(lost()));
                }
                loop {
                    if lane.deaf || lane.ended {
                        return Poll::Ready(Err(Error::new(ErrorKind::Closed, "the peer is gone")));
                    }
                    if sent == data.len() {
                        return Poll::Ready(Ok(()));
                    }
                    let mut piece = [0; 4096];
                    let count = (lane.capacity - lane.bytes.len()).min(data.len() - sent).min(piece.len());
                    if count == 0 {
                        lane.writer = Some(context.waker().clone());
                        return Poll::Pending;
                    }
                    data.copy_to(sent, &mut piece[..count]);
                    lane.bytes.extend(&piece[..count]);
                    lane.total += count as u64;
                    lane.wake();
                    sent += count;
                }
            })
            .await
        })
    }

    fn sent(&self) -> Option<u64> {
        let lane = self.outgoing.borrow();
        Some(lane.total - lane.bytes.len() as u64)
    }

    fn is_deserted(&self) -> bool {
        self.incoming.borrow().ended && self.outgoing.borrow().deaf
    }

    fn shutdown(&self) {
        self.end_writing();
        let mut lane = self.incoming.borrow_mut();
        lane.deaf = true;
        lane.wake();
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        self.shutdown();
    }
}
