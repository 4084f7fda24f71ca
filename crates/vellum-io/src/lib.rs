//! The real world, one core at a time: files, block devices, sockets, timers and signals for futures that
//! stay on the thread they began on.
//!
//! ```text
//!   Workers ─── worker 0 ─────────── worker 1 ─────────── …        one thread each; tasks never move
//!                 │ executor           │ executor                  async-executor's LocalExecutor
//!                 │ timers             │ timers
//!                 │ driver             │ driver                    io_uring, or threads where there is none
//!                 └──── File, Listener, Signals: shared by all ──┘
//! ```
//!
//! [`run`] makes the current thread a worker (a command-line tool needs no more); [`Workers`] start several.
//! On a worker [`spawn_local`] starts tasks, [`clock`] gives the time, and [`File`], [`Listener`] and
//! [`Stream`] do everything else. No code above this crate knows which driver is in use.
//!
//! 1. Memory that the kernel uses is owned by the operation until it has ended, whichever futures are
//!    dropped. Memory that a guest lent for it (`GuestRam`) stays mapped that long.
//! 2. When a worker has ended, none of its I/O is in flight.
//! 3. Only [`unblock`] and the drivers block, and neither blocks a worker that has tasks to run.
//! 4. Storage that does not answer delays its own requests, and those of no other storage.
//!
//! In reading order: `worker` (the loop), `workers`, `driver` (operations, their slots, the two drivers),
//! `file`, `ram`, `socket`, `ready`, `eventfd`, `signal`, `process`, `ublk`, `nbd_device`; and below them `timer`, `blocking`,
//! `wakeup`, `oneshot`.

#![cfg(target_os = "linux")]

mod blocking;
mod driver;
mod eventfd;
mod file;
mod nbd_device;
mod oneshot;
mod process;
mod ram;
mod ready;
mod signal;
mod socket;
mod timer;
#[cfg(feature = "ublk")]
pub mod ublk;
mod wakeup;
mod worker;
mod workers;

pub use blocking::{unblock, unblock_at};
pub use driver::IoMode;
pub use eventfd::ring;
pub use file::{Draft, File, LockMode, OpenOptions};
pub use nbd_device::{NbdDevice, NbdShape};
pub use oneshot::{Receiver as OneshotReceiver, Sender as OneshotSender, oneshot};
pub use process::{Identity, Output, close_output, leave_session, lock_pid_file};
pub use ram::GuestRam;
pub use ready::{readable, writable};
pub use signal::{Signal, Signals};
pub use socket::{Address, Listener, PassedSocket, PassedTo, Socket, Stream, connect};
pub use worker::{Task, clock, io_mode, run, spawn_local, worker_index};
pub use workers::{Spawned, Workers, WorkersConfig, WorkersHandle};
