//! The server's side: connections of the control socket, and what is done for each request.

use std::sync::Arc;
use std::time::Duration;

use futures_lite::future::or;
use serde_json::{Value, json};
use vellum_core::{Buffer, ByteStream, Error, ErrorKind, Result};
use vellum_export::nbd::Exports;
use vellum_export::{ConnectionSlots, Shutdown};
use vellum_io::{Listener, Stream, clock, spawn_local};
use vellum_layer::valve::Settings as Limits;

use super::lines::Lines;
use super::{Answer, REQUEST_BYTES_MAX, Request};
use crate::lookers::Lookers;
use crate::served::{Disks, Wish};
use crate::stats::Stats;

/// Connections at once. More wait in the socket's queue.
pub(crate) const CONNECTIONS_MAX: usize = 16;
/// A client that says nothing for so long is gone.
const IDLE_MAX: Duration = Duration::from_secs(60);
/// How long a client has for taking an answer.
const SENDING_MAX: Duration = Duration::from_secs(10);

/// What requests are about.
#[derive(Clone)]
pub(crate) struct Control {
    pub(crate) disks: Arc<Disks>,
    pub(crate) exports: Exports,
    pub(crate) shutdown: Shutdown,
    pub(crate) slots: ConnectionSlots,
    /// Who is told that a disk has become larger.
    pub(crate) lookers: Lookers,
}

impl Control {
    /// Lets clients in until it is dropped. Those that are in go on.
    pub(crate) async fn accept(self, listener: Listener) {
        loop {
            let slot = self.slots.take().await;
            match listener.accept().await {
                Ok(socket) => {
                    let control = self.clone();
                    let session = async move {
                        control.session(&socket.attach()).await;
                        drop(slot);
                    };
                    spawn_local(session).detach();
                }
                Err(error) if error.kind() == ErrorKind::NoSpace => tracing::warn!("{}", error.chain()),
                Err(error) => {
                    tracing::error!("nobody can control the server any more: {}", error.chain());
                    return;
                }
            }
        }
    }

    /// One connection. A request is never dropped half way; waiting for one, and sending an answer, is.
    async fn session(&self, stream: &Stream) {
        let mut lines = Lines::new(REQUEST_BYTES_MAX);
        loop {
            let ended = async {
                or(self.shutdown.requested(), clock().sleep(IDLE_MAX)).await;
                Ok(None)
            };
            let (answer, is_last) = match or(ended, lines.next(stream)).await {
                Ok(Some(line)) => (self.answer(&line).await, false),
                Ok(None) => return,
                Err(error) if error.kind() == ErrorKind::Invalid => (Answer::of_error(&error), true),
                Err(_) => return,
            };
            let mut text = serde_json::to_vec(&answer).expect("strings and numbers");
            text.push(b'\n');
            let sent = async { stream.write_all(Buffer::copy_of(&text)).await.is_ok() };
            let is_over = async {
                clock().sleep(SENDING_MAX).await;
                false
            };
            if !or(sent, is_over).await || is_last {
                return;
            }
        }
    }

    async fn answer(&self, line: &[u8]) -> Answer {
        let request = serde_json::from_slice::<Request>(line)
            .map_err(|error| Error::invalid(format!("this is no request: {error}")));
        let result = match request {
            Ok(request) => self.carry_out(&request).await,
            Err(error) => Err(error),
        };
        match result {
            Ok(value) => Answer::Return(value),
            Err(error) => Answer::of_error(&error),
        }
    }

    async fn carry_out(&self, request: &Request) -> Result<Value> {
        Ok(match request {
            Request::SnapshotCreate { disk, name } => {
                let id = self.disks.find(disk.as_deref())?.snapshot_create(name).await?;
                json!({ "id": id.to_string() })
            }
            Request::SnapshotList { disk } => {
                json!(self.disks.find(disk.as_deref())?.snapshot_list().await?)
            }
            Request::SnapshotDelete { disk, name } => {
                self.disks.find(disk.as_deref())?.snapshot_delete(name).await?;
                json!({})
            }
            Request::SnapshotRevert { disk, name } => {
                self.disks.find(disk.as_deref())?.snapshot_revert(name, &self.exports).await?;
                json!({})
            }
            Request::Pause { disk } => {
                self.disks.find(disk.as_deref())?.pause().await?;
                json!({ "state": "paused" })
            }
            Request::Resume { disk } => {
                let was_stopped = self.disks.find(disk.as_deref())?.resume();
                json!({ "state": "running", "was-paused": was_stopped })
            }
            Request::Resize { disk, size, grow_by } => {
                let wish = match (size, grow_by) {
                    (Some(size), None) => Wish::Size(*size),
                    (None, Some(more)) => Wish::More(*more),
                    _ => return Err(Error::invalid("one of size and grow-by is to be given")),
                };
                let resized = self.disks.find(disk.as_deref())?.resize(wish).await;
                // Also when it failed: it may have failed after the image had its new size.
                self.lookers.tell().await;
                let (before, size) = resized?;
                json!({ "virtual-size-before": before, "virtual-size": size })
            }
            Request::Limits { disk, set } => {
                let disk = self.disks.find(disk.as_deref())?;
                if let Some(set) = set {
                    let said = set.iter().map(|(name, number)| (name.as_str(), *number));
                    disk.limit(Limits::of(said)?);
                }
                json!({ "limits": disk.limits_said() })
            }
            Request::Stats {} => json!(Stats::of(&self.disks, &self.exports)),
        })
    }
}
