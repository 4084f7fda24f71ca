//! Plays a guest's requests: many writes at a time, reads one after another, like a program of one thread
//! over a page cache.
//!
//! A write ends in its own time; a read and a flush are waited for, a flush also for everything that came
//! before it. The old QEMU is one main loop: it begins a request, or ends one, and does nothing else until
//! the metadata for that is on the disk.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

use vellum_core::{Buffer, GuestOffset, Result, SharedDisk, SharedStorage, WriteFlags};
use vellum_lab::guest::Request;
use vellum_sim::{Handle, World};

use crate::old_qcow2::{Allocation, OldQcow2, Step};

/// The engine under test.
pub(super) enum Engine {
    /// A disk, which does many things at a time.
    Disk(SharedDisk),
    /// The old QEMU, over its image.
    Old(Box<OldQcow2>, SharedStorage),
}

/// A request that is in flight.
struct Flight {
    moved: Handle<Result<()>>,
    is_read: bool,
    allocation: Option<Allocation>,
    /// What is left of the request behind this part.
    rest: Option<Part>,
}

/// A read or a write that has to be begun.
#[derive(Debug, Clone, Copy)]
struct Part {
    is_read: bool,
    offset: u64,
    len: usize,
}

/// The guest's side.
pub(super) struct Player<'a> {
    pub(super) world: &'a World,
    pub(super) engine: &'a Engine,
    /// How many writes the guest has in flight at most.
    pub(super) depth: usize,
    flights: Vec<Flight>,
    /// Parts that wait for others to be linked.
    waiting: VecDeque<Part>,
}

impl<'a> Player<'a> {
    pub(super) fn new(world: &'a World, engine: &'a Engine, depth: usize) -> Self {
        Self { world, engine, depth, flights: Vec::new(), waiting: VecDeque::new() }
    }

    /// Sends all of it; requests that have not ended then continue.
    pub(super) async fn ask(&mut self, requests: &[Request]) -> Result<()> {
        for request in requests {
            match *request {
                Request::Write { offset, len } | Request::WriteThrough { offset, len } => {
                    while self.under_way() >= self.depth {
                        self.step().await?;
                    }
                    self.begin(Part { is_read: false, offset, len }).await?;
                }
                Request::Read { offset, len } => {
                    self.begin(Part { is_read: true, offset, len }).await?;
                    while self.flights.iter().any(|flight| flight.is_read)
                        || self.waiting.iter().any(|part| part.is_read)
                    {
                        self.step().await?;
                    }
                }
                Request::Flush => self.flush().await?,
                // None of these reaches the disk in the workloads here.
                Request::Zero { .. } | Request::Discard { .. } => {}
            }
        }
        Ok(())
    }

    fn under_way(&self) -> usize {
        self.flights.len() + self.waiting.len()
    }

    /// Waits for the last answer.
    pub(super) async fn drain(&mut self) -> Result<()> {
        while self.under_way() > 0 {
            self.step().await?;
        }
        Ok(())
    }

    async fn flush(&mut self) -> Result<()> {
        self.drain().await?;
        match self.engine {
            Engine::Disk(disk) => disk.flush().await,
            Engine::Old(_, storage) => storage.flush().await,
        }
    }

    async fn begin(&mut self, part: Part) -> Result<()> {
        let Part { is_read, offset, len } = part;
        match self.engine {
            Engine::Disk(disk) => {
                let disk = disk.clone();
                let at = GuestOffset::new(offset);
                let moved = self.world.spawn(async move {
                    match is_read {
                        true => disk.read(at, Buffer::zeroed(len)).await.map(drop),
                        false => disk.write(at, Buffer::zeroed(len), WriteFlags::default()).await,
                    }
                });
                self.flights.push(Flight { moved, is_read, allocation: None, rest: None });
            }
            Engine::Old(qcow2, storage) => {
                let (moved, now, allocation) = match qcow2.begin(is_read, offset, len as u64).await? {
                    Step::Wait => {
                        self.waiting.push_back(part);
                        return Ok(());
                    }
                    Step::Nothing { len } => (self.world.spawn(async { Ok(()) }), len, None),
                    Step::Move { at, len, allocation } => {
                        let storage = storage.clone();
                        let moved = self.world.spawn(async move {
                            match is_read {
                                true => storage.read(at, Buffer::zeroed(len)).await.map(drop),
                                false => storage.write(at, Buffer::zeroed(len)).await,
                            }
                        });
                        (moved, len, allocation)
                    }
                };
                let rest = Part { is_read, offset: offset + now as u64, len: len - now };
                let rest = (rest.len > 0).then_some(rest);
                self.flights.push(Flight { moved, is_read, allocation, rest });
            }
        }
        Ok(())
    }

    /// Waits until something has ended, and does what follows from that.
    async fn step(&mut self) -> Result<()> {
        let (index, moved) = poll_fn(|context| {
            let ready = self.flights.iter_mut().enumerate().find_map(|(index, flight)| {
                match Pin::new(&mut flight.moved).poll(context) {
                    Poll::Ready(moved) => Some((index, moved)),
                    Poll::Pending => None,
                }
            });
            ready.map_or(Poll::Pending, Poll::Ready)
        })
        .await;
        moved?;
        let Flight { allocation, rest, .. } = self.flights.remove(index);
        if let (Some(allocation), Engine::Old(qcow2, _)) = (allocation, self.engine) {
            qcow2.link(allocation).await?;
        }
        if let Some(rest) = rest {
            self.begin(rest).await?;
        }
        // The waiting requests are tried again, in their order.
        for _ in 0..self.waiting.len() {
            let part = self.waiting.pop_front().expect("counted");
            self.begin(part).await?;
        }
        Ok(())
    }
}
