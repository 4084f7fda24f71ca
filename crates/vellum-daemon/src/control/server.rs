//! The server's side: connections of the control socket, and the action for each request; `exports` has those
//! that add, remove and reopen.

use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_lite::future::or;
use serde_json::{Value, json};
use vellum_core::{Buffer, ByteStream, Disk as _, Error, ErrorKind, Result};
use vellum_export::nbd::{Clients, Exports};
use vellum_export::{ConnectionSlots, Shutdown};
use vellum_format::FormatKind;
use vellum_format::handover::Handover;
use vellum_format::qcow2::CreateOptions;
use vellum_io::{Listener, Stream, clock, spawn_local};
use vellum_layer::valve::RateLimits;

use super::lines::Lines;
use super::places::Places;
use super::{
    Answer, COMMANDS, ClientRow, JobAction, MigrateStep, PROTOCOL_VERSION, REQUEST_BYTES_MAX, Request,
};
use crate::backup::{BackedUp, Backup};
use crate::closed::refuse_own_name;
use crate::contained::{contained, in_rounds};
use crate::door::{Accepting, Door};
use crate::flash::policy_of;
use crate::keys::keys_of_new;
use crate::pins::{FileTimes, PinChange};
use crate::seats::Seats;
use crate::served::{Disks, JobWish, LiveCommit, LiveRebase, Wish, prefetch_limits};
use crate::size_watchers::SizeWatchers;
use crate::spec::ServeSpec;
use crate::tier::Ranges;
use crate::vhost::Devices;

/// A client that is silent for this long is disconnected.
const IDLE_MAX: Duration = Duration::from_secs(60);
/// How often to check whether a client that waits for an answer has left.
const GONE_EVERY: Duration = Duration::from_millis(200);
/// How long a client has for taking an answer.
const SENDING_MAX: Duration = Duration::from_secs(10);

/// What requests are about.
#[derive(Clone)]
pub(crate) struct Control {
    /// What the server was started with.
    pub(crate) spec: Rc<ServeSpec>,
    pub(crate) devices: Devices,
    pub(crate) disks: Arc<Disks>,
    pub(crate) exports: Exports,
    pub(crate) shutdown: Shutdown,
    pub(crate) slots: ConnectionSlots,
    pub(crate) places: Places,
    /// Of NBD.
    pub(crate) clients: Clients,
    pub(crate) seats: Seats,
    /// The front ends that are notified when a disk has grown.
    pub(crate) size_watchers: SizeWatchers,
    /// Where NBD clients come in.
    pub(crate) door: Door,
    pub(crate) accepting: Accepting,
}

impl Control {
    /// Admits clients until it is dropped. Those that are connected continue.
    pub(crate) async fn accept(self, listener: Listener) {
        in_rounds("the listener of the control socket", async || self.let_in(&listener).await).await;
    }

    /// The next one.
    async fn let_in(&self, listener: &Listener) -> ControlFlow<()> {
        let slot = self.slots.take().await;
        match listener.accept().await {
            Ok(socket) => {
                let control = self.clone();
                let session = async move {
                    let session = async {
                        control.session(&Rc::new(socket.attach())).await;
                        Ok(())
                    };
                    let _ = contained("a session on the control socket", session).await;
                    drop(slot);
                };
                spawn_local(session).detach();
            }
            Err(error) if error.kind() == ErrorKind::NoSpace => tracing::warn!("{}", error.chain()),
            Err(error) => {
                tracing::error!("the control socket has stopped working: {}", error.chain());
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    }

    /// One connection. A request is never dropped half way. Waiting for a request and sending an answer may
    /// be dropped, and so may waiting for the end of a command whose client has left.
    async fn session(&self, stream: &Rc<Stream>) {
        let mut lines = Lines::new(REQUEST_BYTES_MAX);
        loop {
            let ended = async {
                or(self.shutdown.requested(), clock().sleep(IDLE_MAX)).await;
                Ok(None)
            };
            let (answer, is_last) = match or(ended, lines.next(&**stream)).await {
                Ok(Some(line)) => match self.answer(&line, stream).await {
                    Some(answer) => (answer, false),
                    None => return,
                },
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

    /// The answer; `None` when the client has left.
    async fn answer(&self, line: &[u8], stream: &Rc<Stream>) -> Option<Answer> {
        let result = match Request::parse(line) {
            Ok(request) => match self.waits_for(&request) {
                Ok(None) => self.carry_out(&request, &|| false).await,
                Ok(Some(disk)) => self.attend(request, &disk, stream).await?,
                Err(error) => Err(error),
            },
            Err(error) => Err(error),
        };
        Some(match result {
            Ok(value) => Answer::Return(value),
            Err(error) => Answer::of_error(&error),
        })
    }

    /// The image whose storage, or whose requests, the command may have to wait for; `None` for a command
    /// that is answered at once.
    fn waits_for(&self, request: &Request) -> Result<Option<String>> {
        let disk = match request {
            Request::SnapshotCreate { disk, .. }
            | Request::SnapshotList { disk }
            | Request::SnapshotDelete { disk, .. }
            | Request::SnapshotHold { disk, .. }
            | Request::SnapshotRelease { disk, .. }
            | Request::SnapshotRename { disk, .. }
            | Request::SnapshotRevert { disk, .. }
            | Request::Pause { disk }
            | Request::Flatten { disk }
            | Request::Backup { disk, .. }
            | Request::Commit { disk, .. }
            | Request::Rebase { disk, .. }
            | Request::FlashPolicy { disk, .. }
            | Request::FlashDrain { disk }
            | Request::TierStatus { disk }
            | Request::TierPromote { disk, .. }
            | Request::TierMove { disk, .. }
            | Request::TierPin { disk, .. }
            | Request::TierTimes { disk, .. }
            | Request::Resize { disk, .. }
            | Request::MigrateStatus { disk }
            | Request::MigrateStep { disk, .. }
            | Request::ExportReopen { disk, .. } => disk.as_deref(),
            Request::SnapshotExternal { overlays } => {
                overlays.first().and_then(|overlay| overlay.disk.as_deref())
            }
            Request::ExportRemove { name, .. } => Some(name.as_str()),
            Request::ExportAdd { image, .. } => return Ok(Some(image.display().to_string())),
            Request::Resume { .. }
            | Request::Limits { .. }
            | Request::PrefetchStart { .. }
            | Request::PrefetchPause { .. }
            | Request::PrefetchStatus { .. }
            | Request::Trace { .. }
            | Request::Job { .. }
            | Request::ClientList {}
            | Request::ClientDisconnect { .. }
            | Request::Stats {}
            | Request::Hello {}
            | Request::ExportList {} => return Ok(None),
        };
        Ok(Some(self.disks.find(disk)?.path().display().to_string()))
    }

    /// Carries out a command that may take long, beside this connection. `None` if the client has left before
    /// its end. The command is then ended in good order, if that is what its client wants by leaving.
    async fn attend(&self, request: Request, disk: &str, stream: &Rc<Stream>) -> Option<Result<Value>> {
        let takes_it_away = matches!(request, Request::ExportRemove { .. });
        let (place, _attended) = match self.places.take(disk, takes_it_away) {
            Ok(taken) => taken,
            Err(error) => return Some(Err(error)),
        };
        let (control, client) = (self.clone(), stream.clone());
        let mut task = spawn_local(async move {
            let _place = place;
            contained("the command", control.carry_out(&request, &|| client.is_gone())).await
        });
        let gone = async {
            while !stream.is_gone() {
                clock().sleep(GONE_EVERY).await;
            }
            None
        };
        let ended = or(async { Some((&mut task).await) }, gone).await;
        if ended.is_none() {
            task.detach();
        }
        ended
    }

    /// `has_left`: the client does not wait for the answer any more.
    async fn carry_out(&self, request: &Request, has_left: &dyn Fn() -> bool) -> Result<Value> {
        Ok(match request {
            Request::SnapshotCreate { disk, name } => {
                refuse_own_name(name)?;
                let id = self.disks.find(disk.as_deref())?.snapshot_create(name).await?;
                json!({ "id": id })
            }
            Request::SnapshotList { disk } => {
                json!(self.disks.find(disk.as_deref())?.snapshot_list().await?)
            }
            Request::SnapshotDelete { disk, name } => {
                self.disks.find(disk.as_deref())?.snapshot_delete(name).await?;
                json!({})
            }
            Request::SnapshotHold { disk, name } => {
                json!(self.disks.find(disk.as_deref())?.snapshot_hold(name).await?)
            }
            Request::SnapshotRelease { disk, name, look_in } => {
                self.disks.find(disk.as_deref())?.snapshot_release(name, look_in).await?;
                json!({})
            }
            Request::SnapshotRename { disk, name, new_name } => {
                self.disks.find(disk.as_deref())?.snapshot_rename(name, new_name).await?;
                json!({})
            }
            Request::SnapshotRevert { disk, name } => {
                let bitmaps = self.disks.find(disk.as_deref())?.snapshot_revert(name, &self.exports).await?;
                json!({ "bitmaps-removed": bitmaps })
            }
            Request::SnapshotExternal { overlays } => self.snapshot_external(overlays).await?,
            Request::Pause { disk } => {
                self.disks.find(disk.as_deref())?.pause().await?;
                json!({ "state": "paused" })
            }
            Request::Resume { disk } => {
                let (was_stopped, was_held) = self.disks.find(disk.as_deref())?.resume();
                json!({ "state": "running", "was-paused": was_stopped, "was-held": was_held })
            }
            Request::Resize { disk, size, grow_by } => {
                let wish = match (size, grow_by) {
                    (Some(size), None) => Wish::Size(*size),
                    (None, Some(more)) => Wish::More(*more),
                    _ => return Err(Error::invalid("give either size or grow-by")),
                };
                let resized = self.disks.find(disk.as_deref())?.resize(wish).await;
                // Also when it failed: it may have failed after the image had its new size.
                self.size_watchers.notify().await;
                let (before, size) = resized?;
                json!({ "virtual-size-before": before, "virtual-size": size })
            }
            Request::Limits { disk, set } => {
                let disk = self.disks.find(disk.as_deref())?;
                if let Some(set) = set {
                    let said = set.iter().map(|(name, number)| (name.as_str(), *number));
                    disk.limit(RateLimits::of(said)?);
                }
                json!({ "limits": disk.rate_limits_said() })
            }
            Request::PrefetchStart { disk, limits } => {
                let disk = self.disks.find(disk.as_deref())?;
                let said = limits.as_ref().map(|limits| {
                    prefetch_limits(limits.iter().map(|(name, number)| (name.as_str(), *number)))
                });
                disk.prefetch(said.transpose()?, None).await?;
                json!(disk.hydration_stats())
            }
            Request::PrefetchPause { disk } => {
                let disk = self.disks.find(disk.as_deref())?;
                disk.pause_prefetch()?;
                json!(disk.hydration_stats())
            }
            Request::PrefetchStatus { disk } => {
                let stats = self.disks.find(disk.as_deref())?.hydration_stats();
                stats.map_or_else(|| json!({ "state": "none" }), |stats| json!(stats))
            }
            Request::Trace { disk } => {
                let disk = self.disks.find(disk.as_deref())?;
                let (runs, is_whole) = disk.read_order()?;
                let runs: Vec<[u64; 2]> = runs.iter().map(|run| [run.at, run.len]).collect();
                json!({ "virtual-size": disk.disk().geometry().size, "runs": runs, "whole": is_whole })
            }
            Request::Flatten { disk } => {
                let disk = self.disks.find(disk.as_deref())?;
                let bytes = disk.flatten().await?;
                json!({ "filename": disk.path(), "bytes-written": bytes })
            }
            Request::Backup {
                disk,
                bitmap,
                target,
                before,
                before_format,
                encryption,
                secrets,
                plain_text,
            } => {
                let format = before_format.as_ref().map(|name| name.parse::<FormatKind>()).transpose()?;
                let (secrets, encryption) =
                    keys_of_new(&self.spec.image.secrets, secrets, encryption.as_ref()).await?;
                let wish = Backup {
                    bitmap: bitmap.clone(),
                    target: target.clone(),
                    before: before.clone().zip(format),
                    options: CreateOptions { encryption, ..CreateOptions::default() },
                    is_plain_text: *plain_text,
                    secrets,
                    allow_dirs: Vec::new(),
                };
                if wish.before.is_some() != before.is_some() || !target.is_absolute() {
                    return Err(Error::invalid("give absolute paths, and before-format with before"));
                }
                let BackedUp { bytes_marked, bytes_copied } =
                    self.disks.find(disk.as_deref())?.backup(&wish, has_left).await?;
                json!({ "bytes-marked": bytes_marked, "bytes-copied": bytes_copied })
            }
            Request::Commit { disk, top, base, force, bytes_per_second_max } => {
                let wish = LiveCommit {
                    top: top.clone(),
                    base: base.clone(),
                    force: *force,
                    rate: *bytes_per_second_max,
                };
                json!(self.disks.find(disk.as_deref())?.commit(&wish).await?)
            }
            Request::Rebase { disk, base, format, bytes_per_second_max } => {
                let format = format.as_deref().map(str::parse).transpose()?;
                let wish = LiveRebase { base: base.clone(), format, rate: *bytes_per_second_max };
                json!(self.disks.find(disk.as_deref())?.rebase(&wish).await?)
            }
            Request::Job { disk, action, bytes_per_second_max } => {
                let wish = match action {
                    None => JobWish::Status,
                    Some(JobAction::Pause) => JobWish::Pause,
                    Some(JobAction::Resume) => JobWish::Resume,
                    Some(JobAction::Cancel) => JobWish::Cancel,
                    Some(JobAction::Limit) => JobWish::Limit(*bytes_per_second_max),
                };
                json!(self.disks.find(disk.as_deref())?.steer_job(wish)?)
            }
            Request::FlashPolicy { disk, set } => {
                let disk = self.disks.find(disk.as_deref())?;
                if let Some(set) = set {
                    disk.set_flash_policy(policy_of(set)?).await?;
                }
                json!(disk.flash_stats().await?)
            }
            Request::FlashDrain { disk } => {
                let disk = self.disks.find(disk.as_deref())?;
                disk.drain_flash().await?;
                json!(disk.flash_stats().await?)
            }
            Request::TierStatus { disk } => self.disks.find(disk.as_deref())?.tier_status().await?,
            Request::TierPromote { disk, ranges, copy, demote, paths } => {
                let disk = self.disks.find(disk.as_deref())?;
                let ranges = Ranges { ranges: ranges.clone(), copies_base: *copy };
                match (demote, paths.is_empty()) {
                    (true, true) => json!(disk.demote(&ranges).await?),
                    (true, false) => json!(disk.demote_files(paths).await?),
                    (false, true) => json!(disk.promote(&ranges).await?),
                    (false, false) => {
                        return Err(Error::invalid(
                            "paths are only for taking back: tier-pin promotes files",
                        ));
                    }
                }
            }
            Request::TierMove { disk, ranges, only_copied, paths } => {
                let disk = self.disks.find(disk.as_deref())?;
                let ranges = Ranges { ranges: ranges.clone(), copies_base: false };
                match paths.is_empty() {
                    true => json!(disk.move_away(&ranges, *only_copied).await?),
                    false => json!(disk.move_files(paths).await?),
                }
            }
            Request::TierPin { disk, add, remove } => {
                let change = PinChange { add: add.clone(), remove: remove.clone() };
                json!(self.disks.find(disk.as_deref())?.pin(&change).await?)
            }
            Request::TierTimes { disk, old_mtime, recent_atime, copy } => {
                let (old_mtime, recent_atime, copy) = (*old_mtime, *recent_atime, *copy);
                let times = FileTimes { old_mtime, recent_atime, copy };
                json!(self.disks.find(disk.as_deref())?.promote_by_times(times).await?)
            }
            Request::ClientList {} => {
                let clients = self.clients.list();
                json!(clients.iter().map(ClientRow::of).collect::<Vec<_>>())
            }
            Request::ClientDisconnect { id } => {
                if !self.clients.disconnect(*id) {
                    return Err(Error::new(ErrorKind::NotFound, format!("no client has the ID {id}")));
                }
                json!({})
            }
            Request::Stats {} => json!(self.disks.stats(&self.exports)),
            Request::Hello {} => json!({
                "program": "vellum",
                "version": env!("CARGO_PKG_VERSION"),
                "protocol": PROTOCOL_VERSION,
                "commands": COMMANDS[..],
            }),
            Request::ExportList {} => self.export_list(),
            Request::ExportAdd { .. } => self.export_add(request).await?,
            Request::ExportRemove { name, force, lose_unflushed } => {
                self.export_remove(name, *force, *lose_unflushed).await?
            }
            Request::MigrateStatus { disk } => {
                let disk = self.disks.find(disk.as_deref())?;
                let handover = disk.handover().await?;
                json!({
                    "image": disk.shown(),
                    "virtual-size": vellum_core::Disk::geometry(&*disk.disk()).size,
                    "state": handover.map_or("none", Handover::word),
                    "number": handover.map(|handover| handover.number().to_string()),
                    "written": disk.is_written_now().await,
                })
            }
            Request::MigrateStep { disk, step, number, receipt } => {
                let disk = self.disks.find(disk.as_deref())?;
                let number_read = number.parse()?;
                let Some(its) = step.as_step() else {
                    let seen = match step {
                        MigrateStep::Show => disk.ask_for(number_read, &self.exports).map(|()| None)?,
                        _ => disk.looks_for(number_read).await?,
                    };
                    return Ok(json!({ "image": disk.shown(), "seen": seen }));
                };
                if *step == MigrateStep::Seal && *receipt != Some(number_read.receipt()) {
                    let why = "the source is given up for good only when the target has taken over: give the receipt that \
                               `vellum migrate step accept` prints at the target (--receipt); it may be taken again";
                    return Err(Error::new(ErrorKind::Refused, why));
                }
                let done = disk.hand_over(its, number_read, &self.exports).await?;
                json!({
                    "image": disk.shown(),
                    "state": done.handover.map_or("none", Handover::word),
                    "number": number,
                    "receipt": (*step == MigrateStep::Accept).then(|| number_read.receipt()),
                    "held-us": u64::try_from(done.held.as_micros()).unwrap_or(u64::MAX),
                })
            }
            Request::ExportReopen { disk, lose_unflushed } => {
                let disk = self.disks.find(disk.as_deref())?;
                let reopened = disk.reopen(*lose_unflushed, &self.exports).await;
                disk.tell(&self.exports)?;
                self.size_watchers.notify().await;
                json!({ "state": "running", "may-miss-writes": reopened? })
            }
        })
    }
}
