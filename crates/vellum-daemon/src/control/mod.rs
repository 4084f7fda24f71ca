//! The control socket: requests to a server while it serves.
//!
//! ```text
//!   {"command":"snapshot-create","name":"monday"}\n                         one request per line
//!                                  {"return":{"id":"7"}}\n                   one answer per line, in the order of the requests
//!                                  {"error":{"kind":"locked","message":"…"}}\n
//! ```
//!
//! `docs/control.md` describes the protocol for authors of clients. A new command is a variant of [`Request`]
//! and a line in `server.rs`.
//!
//! 1. A line is at most [`REQUEST_BYTES_MAX`] long. A client that sends a longer one gets an error and is
//!    disconnected.
//! 2. An invalid request is answered with an error, and the connection continues.
//! 3. A request that was begun is carried out to its end, whether or not its client waits. A client that has
//!    left holds no connection.
//! 4. A disk that hangs blocks only a few commands, and leaves the connections to the others (`places`).
//! 5. A client that can connect may do everything: only the owner of the socket can.

pub mod client;
mod exports;
mod lines;
pub(crate) mod places;
pub(crate) mod server;
mod wishes;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vellum_core::{Error, ErrorKind};
use vellum_export::nbd::{ClientFacts, Stage};
use vellum_format::image::{Machine, Snapshot};
use vellum_layer::migrate;

use crate::pins::Pin;

pub use client::{call, call_in_turn, call_within, watch_job};
pub use wishes::{EncryptionWish, SecretFile};

/// The longest request, with the end of its line.
pub const REQUEST_BYTES_MAX: usize = 64 << 10;
/// The longest answer that a client takes.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// The commands of a server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Make a snapshot.
    SnapshotCreate {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// Its name.
        name: String,
    },
    /// Tell which snapshots there are.
    SnapshotList {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
    },
    /// Delete a snapshot. Answered when it is gone.
    SnapshotDelete {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// Its name or number.
        name: String,
    },
    /// Record that clones stand on a snapshot: it cannot be deleted until it is released. Answered when that is
    /// durable, with what a clone must know.
    SnapshotHold {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// Its name or number.
        name: String,
    },
    /// Release a snapshot on which no clone stands any more.
    #[serde(rename_all = "kebab-case")]
    SnapshotRelease {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// Its name or number.
        name: String,
        /// Where clones are looked for besides the image's directory: absolute paths.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        look_in: Vec<PathBuf>,
    },
    /// Give a snapshot another name.
    #[serde(rename_all = "kebab-case")]
    SnapshotRename {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// Its name or number.
        name: String,
        /// Its name from then on.
        new_name: String,
    },
    /// Restore the disk from a snapshot. No client may be connected.
    SnapshotRevert {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// Its name or number.
        name: String,
    },
    /// Put a new image on top of each of these disks, at one moment: what is written from then on goes there. Answered when
    /// requests continue.
    SnapshotExternal {
        /// Each disk once.
        overlays: Vec<NewOverlay>,
    },
    /// Begin to write what images of a disk have into one below them. Answered when it has begun; `job` says how far it is.
    #[serde(rename_all = "kebab-case")]
    Commit {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// The uppermost image whose contents are written, by its absolute path; the one on top when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        top: Option<PathBuf>,
        /// The image that gets them, by its absolute path; the one directly below when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        base: Option<PathBuf>,
        /// Even if other images stand on what becomes useless.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        force: bool,
        /// So many bytes of data a second, at most.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bytes_per_second_max: Option<u64>,
    },
    /// Begin to give the image of a disk another backing image. Answered when it has begun; `job` says how far it is.
    #[serde(rename_all = "kebab-case")]
    Rebase {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// The new backing image, by its absolute path.
        base: PathBuf,
        /// Its format; detected when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        format: Option<String>,
        /// So many bytes a second are read and compared, at most.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bytes_per_second_max: Option<u64>,
    },
    /// Tell how far the work on the chain of a disk is, and steer it. Answered at once.
    #[serde(rename_all = "kebab-case")]
    Job {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// What is to be done; only to tell when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        action: Option<JobAction>,
        /// For `limit`: bytes of data a second, at most; no limit when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bytes_per_second_max: Option<u64>,
    },
    /// Stop admitting requests. Answered when none is in flight and everything that was answered is durable.
    Pause {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
    },
    /// Let requests continue.
    Resume {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
    },
    /// Make the disk larger. One of the sizes is given, in bytes. Answered when that is durable.
    #[serde(rename_all = "kebab-case")]
    Resize {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// What it is to have.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        size: Option<u64>,
        /// How much more it is to have.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        grow_by: Option<u64>,
    },
    /// Tell how requests are limited, and change that.
    Limits {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// All limits from now on, by their names; those before stay when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        set: Option<BTreeMap<String, u64>>,
    },
    /// Copy ahead of need what only the images below a disk have, or continue.
    PrefetchStart {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// All limits from now on, by their names, in bytes a second; those before stay when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limits: Option<BTreeMap<String, u64>>,
    },
    /// Stop that until it is started again.
    PrefetchPause {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
    },
    /// Tell how far it is.
    PrefetchStatus {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
    },
    /// Tell in which order guests have read first what only the images below a disk have.
    Trace {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
    },
    /// Copy all of it as fast as possible, and detach the disk. Answered when that is done.
    Flatten {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
    },
    /// Tell what a disk does with the flash cache, and change that. Answered when it is so.
    FlashPolicy {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// `writeback`, `writethrough`, `readonly` or `off`; as before when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        set: Option<String>,
    },
    /// Write home what only the flash cache has of a disk. Answered when all is home that was written before.
    FlashDrain {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
    },
    /// Tell what a disk has on its fast medium.
    TierStatus {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
    },
    /// Copy ranges of a disk to its fast medium, or with `demote` take them back. Answered when that is done.
    TierPromote {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// Offset and length of each, in bytes; all of the disk when there are none.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        ranges: Vec<(u64, u64)>,
        /// Also what is read from the backing image.
        #[serde(default)]
        copy: bool,
        /// Take them back instead.
        #[serde(default)]
        demote: bool,
        /// To be taken back instead of ranges: the files at these paths in the guest.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        paths: Vec<Pin>,
    },
    /// Copy ranges of a disk to its fast medium, unless they are there, and free their space in the image. `tier-promote` with
    /// `demote` brings them back. Answered when that is done.
    #[serde(rename_all = "kebab-case")]
    TierMove {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// Offset and length of each, in bytes; all of the disk when there are none.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        ranges: Vec<(u64, u64)>,
        /// Of the ranges only what is there already.
        #[serde(default)]
        only_copied: bool,
        /// Instead of ranges: the files at these paths in the guest.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        paths: Vec<Pin>,
    },
    /// Change the pins of a disk, look up where their files are, and make its fast medium have them. Without a change,
    /// only look them up again. Answered when that is done.
    TierPin {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// New pins, or the same paths anew.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        add: Vec<Pin>,
        /// Paths that are pinned no more.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        remove: Vec<String>,
    },
    /// Copy the files of a disk that were written long ago and read lately to its fast medium. Answered when that is done.
    TierTimes {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// Not written for this many days.
        #[serde(rename = "old-mtime")]
        old_mtime: u32,
        /// Read within this many days.
        #[serde(rename = "recent-atime")]
        recent_atime: u32,
        /// Also what is read from the backing image.
        #[serde(default)]
        copy: bool,
    },
    /// Tell which clients of NBD there are.
    ClientList {},
    /// Send a client away: nothing more is read from it or sent to it.
    ClientDisconnect {
        /// Its number, as the list has it.
        id: u64,
    },
    /// Tell what was counted, as the file of `--stats-json` does.
    Stats {},
    /// Report the version, and the available commands.
    Hello {},
    /// Tell which exports there are.
    ExportList {},
    /// Serve one more image, or an image under one more name. The defaults are the options that the server
    /// was started with.
    #[serde(rename_all = "kebab-case")]
    ExportAdd {
        /// Its name; empty for the default export.
        name: String,
        /// The image, by its absolute path.
        image: PathBuf,
        /// Its format.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        format: Option<String>,
        /// Refuse writes.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        read_only: Option<bool>,
        /// A socket for virtual machines, by its absolute path.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        vhost_user_blk: Option<PathBuf>,
        /// A socket for NBD clients that see this export alone: `unix:` with an absolute path, or
        /// `tcp:HOST:PORT`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        nbd: Option<String>,
        /// How its requests are limited.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limits: Option<BTreeMap<String, u64>>,
        /// What it does with the flash cache of the server.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        flash_policy: Option<String>,
    },
    /// Serve an export no longer; the image is closed when that was its last name. Answered when it is.
    #[serde(rename_all = "kebab-case")]
    ExportRemove {
        /// Its name.
        name: String,
        /// Even if clients are connected: the requests that they have begun are answered, then they are
        /// disconnected.
        #[serde(default)]
        force: bool,
        /// Also when there is no room on the host for what was answered and not flushed: that is lost then.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        lose_unflushed: bool,
    },
    /// Tell what the image of a disk records of a migration.
    MigrateStatus {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
    },
    /// Make a backup. Answered when it is durable.
    #[serde(rename_all = "kebab-case")]
    Backup {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// The bitmap that says what has changed.
        bitmap: String,
        /// The new image: an absolute path.
        target: PathBuf,
        /// The backup before, an absolute path, of which only what has changed since is copied.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        before: Option<PathBuf>,
        /// Its format.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        before_format: Option<String>,
        /// How the new image is to be encrypted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        encryption: Option<EncryptionWish>,
        /// Secrets of the new image and of the backup before, besides those of the server.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        secrets: Vec<SecretFile>,
        /// The disk is encrypted, and the new image is not to be.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        plain_text: bool,
    },
    /// Take a step of a migration. Answered when it is durable.
    MigrateStep {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// Which.
        step: MigrateStep,
        /// The number of the migration.
        number: String,
        /// What the target said when it had taken over: for `seal`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        receipt: Option<String>,
    },
    /// Close the image of a disk, and open it again, which recovers it.
    #[serde(rename_all = "kebab-case")]
    ExportReopen {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// Also when there is no room on the host for what was answered and not flushed: that is lost then.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        lose_unflushed: bool,
    },
}

/// What is to be done with the work on the chain of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum JobAction {
    /// It stops for a while.
    Pause,
    /// It goes on.
    Resume,
    /// It stops for good.
    Cancel,
    /// It goes so fast, at most.
    Limit,
}

/// An image that is to go on top of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewOverlay {
    /// The export of the disk; the only disk when not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// Its file, by its absolute path. There is none of this name.
    pub image: PathBuf,
    /// Its format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
}

/// A step of a migration, as `vellum_layer::migrate` orders them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MigrateStep {
    /// The source is written no more.
    Fix,
    /// The target is written from now on.
    Accept,
    /// The target is given up.
    Void,
    /// The source is written again.
    Restore,
    /// The source is given up for good: the target has taken over.
    Seal,
    /// Not a step: the source's export shows the number, a challenge, to clients that connect, until its next step.
    Show,
    /// Not a step: the target looks for the challenge where it reads from.
    Look,
}

impl MigrateStep {
    /// The step of the migration, if it is one.
    pub(crate) fn as_step(self) -> Option<migrate::Step> {
        match self {
            Self::Fix => Some(migrate::Step::Fix),
            Self::Accept => Some(migrate::Step::Accept),
            Self::Void => Some(migrate::Step::Void),
            Self::Restore => Some(migrate::Step::Restore),
            Self::Seal => Some(migrate::Step::Seal),
            Self::Show | Self::Look => None,
        }
    }
}

/// The version of the protocol. It changes when an existing field changes its meaning.
pub const PROTOCOL_VERSION: u32 = 1;

/// All commands, by their names.
pub const COMMANDS: [&str; 38] = [
    "hello",
    "stats",
    "pause",
    "resume",
    "resize",
    "limits",
    "prefetch-start",
    "prefetch-pause",
    "prefetch-status",
    "trace",
    "flatten",
    "backup",
    "commit",
    "rebase",
    "job",
    "flash-policy",
    "flash-drain",
    "tier-status",
    "tier-promote",
    "tier-move",
    "tier-pin",
    "tier-times",
    "snapshot-create",
    "snapshot-list",
    "snapshot-delete",
    "snapshot-hold",
    "snapshot-release",
    "snapshot-rename",
    "snapshot-revert",
    "snapshot-external",
    "client-list",
    "client-disconnect",
    "export-list",
    "export-add",
    "export-remove",
    "export-reopen",
    "migrate-status",
    "migrate-step",
];

impl Request {
    /// Reads a line.
    fn parse(line: &[u8]) -> vellum_core::Result<Self> {
        let value: serde_json::Value = serde_json::from_slice(line)
            .map_err(|error| Error::invalid(format!("a request must be one line of JSON: {error}")))?;
        let known = || format!("known: {}", COMMANDS.join(", "));
        let Some(command) = value.get("command").and_then(|command| command.as_str()).map(str::to_owned)
        else {
            return Err(Error::invalid(format!(
                "a request must be an object with a \"command\"; {}",
                known()
            )));
        };
        if !COMMANDS.contains(&command.as_str()) {
            return Err(Error::unsupported(format!("unknown command {command:?}; {}", known())));
        }
        serde_json::from_value(value).map_err(|error| Error::invalid(format!("{command}: {error}")))
    }
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Answer {
    Return(serde_json::Value),
    Error { kind: String, message: String },
}

/// A snapshot, as it is listed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct SnapshotFacts {
    /// Its number.
    pub id: String,
    /// Its name.
    pub name: String,
    /// The size of the disk then, in bytes.
    pub virtual_size: u64,
    /// When it was made, in seconds since 1970.
    pub date_sec: u64,
    /// Clones stand on it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub held_by_clones: bool,
    /// What it has of a machine, in formats that have a place for it.
    #[serde(default, flatten, skip_serializing_if = "Option::is_none")]
    pub machine: Option<MachineFacts>,
}

/// What a snapshot has of a machine, under the names that QEMU uses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MachineFacts {
    /// Bytes of its state; 0 when only the disk was kept.
    pub vm_state_size: u64,
    /// The fraction of a second of the time at which it was made, in nanoseconds.
    pub date_nsec: u32,
    /// How long the guest had run, in whole seconds.
    pub vm_clock_sec: u64,
    /// The rest of that, in nanoseconds.
    pub vm_clock_nsec: u64,
    /// Instructions that the guest had executed, if they were counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub icount: Option<u64>,
}

impl From<Machine> for MachineFacts {
    fn from(machine: Machine) -> Self {
        Self {
            vm_state_size: machine.state_bytes,
            date_nsec: machine.nanoseconds,
            vm_clock_sec: machine.clock_nanoseconds / 1_000_000_000,
            vm_clock_nsec: machine.clock_nanoseconds % 1_000_000_000,
            icount: machine.icount,
        }
    }
}

impl From<MachineFacts> for Machine {
    fn from(facts: MachineFacts) -> Self {
        Self {
            state_bytes: facts.vm_state_size,
            nanoseconds: facts.date_nsec,
            clock_nanoseconds: facts
                .vm_clock_sec
                .saturating_mul(1_000_000_000)
                .saturating_add(facts.vm_clock_nsec),
            icount: facts.icount,
        }
    }
}

/// A snapshot on which clones may be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct HeldSnapshot {
    /// The image, by its absolute path.
    pub image: PathBuf,
    /// Its number.
    pub id: String,
    /// Its name.
    pub name: String,
    /// The size of the disk then, in bytes.
    pub virtual_size: u64,
}

impl From<Snapshot> for SnapshotFacts {
    fn from(snapshot: Snapshot) -> Self {
        let Snapshot { id, name, size, seconds, is_cloned, machine } = snapshot;
        let machine = machine.map(MachineFacts::from);
        Self { id, name, virtual_size: size, date_sec: seconds, held_by_clones: is_cloned, machine }
    }
}

/// A client, as it is listed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ClientRow {
    /// Its number, which no other client of the server has had.
    pub id: u64,
    /// Where it comes from.
    pub peer: String,
    /// The subject of its certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
    /// What it has chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export: Option<String>,
    /// `handshake`, `served`, or `lingering`: it is gone, and its requests have not ended.
    pub state: String,
    /// How long it has been there.
    pub age_sec: u64,
}

impl ClientRow {
    fn of(facts: &ClientFacts) -> Self {
        let state = match facts.stage {
            Stage::Lobby => "handshake",
            Stage::Seated => "served",
            Stage::Lingering => "lingering",
        };
        Self {
            id: facts.id,
            peer: facts.peer.clone(),
            subject: facts.subject.clone(),
            export: facts.export.clone(),
            state: state.to_owned(),
            age_sec: facts.age.as_secs(),
        }
    }
}

/// The kinds of errors, by the words they have on the wire.
const KINDS: [(ErrorKind, &str); 12] = [
    (ErrorKind::Io, "io"),
    (ErrorKind::NoSpace, "no-space"),
    (ErrorKind::Corrupt, "corrupt"),
    (ErrorKind::Unsupported, "unsupported"),
    (ErrorKind::Invalid, "invalid"),
    (ErrorKind::ReadOnly, "read-only"),
    (ErrorKind::Locked, "locked"),
    (ErrorKind::NotFound, "not-found"),
    (ErrorKind::Refused, "refused"),
    (ErrorKind::Changed, "changed"),
    (ErrorKind::Poisoned, "poisoned"),
    (ErrorKind::Closed, "closed"),
];

/// The word of a kind of error.
pub(crate) fn word_of(kind: ErrorKind) -> &'static str {
    KINDS.iter().find(|(its, _)| *its == kind).map_or("io", |(_, word)| word)
}

impl Answer {
    fn of_error(error: &Error) -> Self {
        Self::Error { kind: word_of(error.kind()).to_owned(), message: error.chain() }
    }

    fn into_result(self) -> vellum_core::Result<serde_json::Value> {
        match self {
            Self::Return(value) => Ok(value),
            Self::Error { kind, message } => {
                let known = KINDS.iter().find(|(_, word)| *word == kind);
                Err(Error::new(known.map_or(ErrorKind::Io, |(kind, _)| *kind), message))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_as_they_are_written() {
        for (text, request) in [
            (r#"{"command":"snapshot-list"}"#, Request::SnapshotList { disk: None }),
            (
                r#"{"command":"snapshot-create","disk":"a","name":"b"}"#,
                Request::SnapshotCreate { disk: Some("a".to_owned()), name: "b".to_owned() },
            ),
            (r#"{"command":"stats"}"#, Request::Stats {}),
            (r#"{"command":"client-list"}"#, Request::ClientList {}),
            (r#"{"command":"client-disconnect","id":7}"#, Request::ClientDisconnect { id: 7 }),
            (r#"{"command":"pause","disk":"a"}"#, Request::Pause { disk: Some("a".to_owned()) }),
            (r#"{"command":"resume"}"#, Request::Resume { disk: None }),
            (
                r#"{"command":"resize","grow-by":512}"#,
                Request::Resize { disk: None, size: None, grow_by: Some(512) },
            ),
        ] {
            assert_eq!(serde_json::from_str::<Request>(text).unwrap(), request);
            assert_eq!(serde_json::to_string(&request).unwrap(), text);
        }
        for text in [
            "",
            "{}",
            "[]",
            "null",
            r#"{"command":"explode"}"#,
            r#"{"command":"snapshot-create"}"#,
            r#"{"command":"snapshot-create","name":7}"#,
            r#"{"command":"snapshot-list","name":"more than it takes"}"#,
            r#"{"command":"stats","x":1}"#,
            r#"{"command":"resize","size":-1}"#,
            r#"{"command":"limits","set":{"iops-total":-1}}"#,
            r#"{"command":"limits","set":[]}"#,
            r#"{"command":"resize","size":"1G"}"#,
        ] {
            assert!(serde_json::from_str::<Request>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_no_request_is_answered_in_plain_words() {
        for (line, kind, words) in [
            ("explode", ErrorKind::Invalid, "one line of JSON"),
            ("[]", ErrorKind::Invalid, "an object with a \"command\""),
            (
                r#"{"command":"explode"}"#,
                ErrorKind::Unsupported,
                "unknown command \"explode\"; known: hello, ",
            ),
            (r#"{"command":"snapshot-create"}"#, ErrorKind::Invalid, "snapshot-create: missing field `name`"),
            (r#"{"command":"stats","x":1}"#, ErrorKind::Invalid, "stats: unknown field `x`"),
        ] {
            let error = Request::parse(line.as_bytes()).expect_err(line);
            assert_eq!(error.kind(), kind, "{line}");
            assert!(error.chain().contains(words), "{line}: {}", error.chain());
        }
        for command in COMMANDS {
            let error = Request::parse(format!("{{\"command\":{command:?}}}").as_bytes()).err();
            assert!(error.is_none_or(|error| error.chain().contains("missing field")), "{command}");
        }
    }

    #[test]
    fn an_error_comes_back_as_what_it_was() {
        for (kind, _) in KINDS {
            let error = Error::new(kind, "why").context("what");
            let text = serde_json::to_string(&Answer::of_error(&error)).unwrap();
            let back = serde_json::from_str::<Answer>(&text).unwrap().into_result().unwrap_err();
            assert_eq!((back.kind(), back.chain()), (kind, error.chain()));
        }
    }
}
