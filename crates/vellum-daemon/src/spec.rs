//! The description of a server, as data: what it serves, where, and how. `serve` runs it.
//!
//! The callbacks that report readiness and the end are here too.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use vellum_core::{Error, Result};
use vellum_export::nbd::SessionLimits;
use vellum_export::vhost::QUEUES_MAX;
use vellum_flash::FlashPolicy;
use vellum_format::FormatKind;
use vellum_io::{Address, IoMode, PassedSocket, Signal};
use vellum_layer::SparseMode;
use vellum_layer::hydrate::{PrefetchLimits, Run};
use vellum_layer::valve::RateLimits;

use crate::flash::FlashSpec;
use crate::grow::GrowHook;
use crate::image::ImageOptions;
use crate::notify::NotifySocket;
use crate::rights::SocketRights;
use crate::stats::Stats;
use crate::tls::TlsFiles;
use crate::window::Part;

/// A disk to be served, and under which name.
#[derive(Debug, Clone)]
pub struct ExportSpec {
    /// The export's name; empty for the default.
    pub name: String,
    /// The image.
    pub path: PathBuf,
    /// How it is opened.
    pub image: ImageOptions,
    /// A description for clients that list the exports.
    pub description: String,
    /// How its requests are limited. Of several exports of one image those of the first count.
    pub rate_limits: RateLimits,
    /// How it gets what only the images below it have.
    pub hydration: HydrationSpec,
    /// What it does with the flash cache of the server. By default write-back where its image has a place for a session,
    /// and otherwise only what is read is cached.
    pub flash_policy: Option<FlashPolicy>,
    /// Dirty bitmaps that its image must have, and be able to offer to NBD clients. It is not served without them.
    pub bitmaps: Vec<String>,
}

/// How a disk gets what only the images below it have.
#[derive(Debug, Clone, Default)]
pub struct HydrationSpec {
    /// Blocks that guests read are copied into the image.
    pub copy_on_read: bool,
    /// Everything is copied ahead of need, and then the image is detached from those below.
    pub prefetch: bool,
    /// How fast.
    pub limits: PrefetchLimits,
    /// What comes first, in this order.
    pub trace: Option<BootTrace>,
    /// The order in which blocks are read first from below is recorded.
    pub keeps_order: bool,
    /// What the image itself asks for is not heeded.
    pub ignores_wish: bool,
}

/// What a guest that boots reads first.
#[derive(Debug, Clone)]
pub struct BootTrace {
    /// The file that it is from.
    pub file: PathBuf,
    /// In this order.
    pub runs: Arc<[Run]>,
}

impl HydrationSpec {
    /// Whether there is anything to do.
    pub(crate) fn is_wanted(&self) -> bool {
        self.copy_on_read || self.prefetch || self.keeps_order
    }
}

/// What a server is to do.
#[derive(Debug, Clone)]
pub struct ServeSpec {
    /// What is served.
    pub exports: Vec<ExportSpec>,
    /// How images are opened that are added later.
    pub image: ImageOptions,
    /// How those get what only the images below them have.
    pub hydration: HydrationSpec,
    /// How many queues a front end may use of those.
    pub queues: Option<u16>,
    /// Where NBD clients are waited for.
    pub nbd: Vec<NbdSpec>,
    /// Snapshots of the disks are exported to NBD clients too.
    pub export_snapshots: bool,
    /// Further sockets for NBD clients, opened by a service manager.
    pub passed: Vec<PassedSocket>,
    /// Where the certificates are, when NBD clients may, or must, talk TLS.
    pub tls: Option<TlsFiles>,
    /// Where front ends of vhost-user-blk are waited for.
    pub vhost: Vec<VhostSpec>,
    /// Files that show the disks.
    pub fuse: Vec<FuseSpec>,
    /// Block devices of this kernel that show the disks.
    pub ublk: Vec<UblkSpec>,
    /// Block devices of the kernel's nbd driver that show the disks.
    pub nbd_devices: Vec<NbdDeviceSpec>,
    /// Workers.
    pub threads: usize,
    /// How they reach the kernel.
    pub mode: IoMode,
    /// How long a worker busy-polls before it sleeps; zero means never.
    pub poll_max: Duration,
    /// The limit on NBD clients over all sockets; the default is 128 or 16 for each export, whichever is
    /// more.
    pub connections_max: Option<usize>,
    /// What the payloads of all clients of NBD may take in memory, beyond 1 MiB for each of them.
    pub memory_bytes: usize,
    /// What one connection may take.
    pub session_limits: SessionLimits,
    /// How long a drain may take before connections are cut.
    pub drain_time: Duration,
    /// The flash cache over the disks.
    pub flash: Option<FlashSpec>,
    /// A fast medium that may have copies of units of the disks' images.
    pub fast: Option<PathBuf>,
    /// What guests read often comes to it.
    pub tier_heat: bool,
    /// What disks do with the flash cache that are added later.
    pub flash_policy: Option<FlashPolicy>,
    /// Makes a device larger that becomes full.
    pub grow_hook: Option<GrowHook>,
    /// Each write is durable when it is answered: clients of a server that was killed miss nothing.
    pub durable: bool,
    /// Requests that find no space wait for some instead of failing.
    pub hold_when_full: bool,
    /// What becomes of discards, and of zeros that are written.
    pub sparse: SparseMode,
    /// The part of each disk that guests see; all of it by default.
    pub part: Option<Part>,
    /// At most this many NBD connections are accepted at once; the next ones wait until one has ended.
    pub connections_at_once: Option<usize>,
    /// It ends when the last NBD client that had an export has left.
    pub ends_with_clients: bool,
    /// Nothing is served unless every image can be opened.
    pub require_all: bool,
    /// What the files of sockets get.
    pub rights: SocketRights,
    /// Where statistics are written, once a second and at the end.
    pub stats_path: Option<PathBuf>,
    /// The control socket: a Unix socket for its owner alone.
    pub control_path: Option<PathBuf>,
    /// Where Prometheus finds what was counted.
    pub metrics: Option<Address>,
    /// The service manager that is notified when clients can connect, and when no more are admitted.
    pub notify: Option<NotifySocket>,
    /// Prints a line that was requested by a signal.
    pub tell: fn(&str),
}

/// Where NBD clients are waited for, and what they see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdSpec {
    /// This export, with others that are named for the same address; all exports by default.
    pub export: Option<String>,
    /// The address.
    pub address: Address,
}

/// A block device of the kernel's nbd driver that is to show a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdDeviceSpec {
    /// The export's name; nothing where there is one disk only.
    pub export: Option<String>,
    /// The device, such as `/dev/nbd0`.
    pub path: PathBuf,
}

/// A block device that is to show a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UblkSpec {
    /// The export's name; nothing where there is one disk only.
    pub export: Option<String>,
    /// The N of `/dev/ublkbN`; by default the first free number.
    pub number: Option<u32>,
    /// How many queues it has; by default one for each worker. The kernel makes no more than it has
    /// processors.
    pub queues: Option<u16>,
    /// It outlives a server that is killed, and waits for the next. Each write is durable when it is
    /// answered.
    pub keeps: bool,
}

/// A socket for virtual machines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VhostSpec {
    /// The export; by default the default one or the only one.
    pub export: Option<String>,
    /// Where the socket is.
    pub path: PathBuf,
    /// How many queues a front end may use; by default as many as there are workers, up to the largest
    /// possible number.
    pub queues: Option<u16>,
    /// Accepts memory that the front end could truncate while it is in use, which ends the server.
    pub takes_unsealed: bool,
}

impl VhostSpec {
    /// The requested name, and the export that it belongs to: for a snapshot's, the part before the @.
    pub(crate) fn export<'a>(&self, specs: &'a [ExportSpec]) -> Result<(String, &'a ExportSpec)> {
        let wanted = match (&self.export, specs) {
            (Some(name), _) => name.as_str(),
            (None, [only]) => only.name.as_str(),
            (None, _) => "",
        };
        let is_it = |spec: &&ExportSpec| {
            wanted
                .strip_prefix(spec.name.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('@'))
        };
        // An export whose name looks like a snapshot's takes precedence.
        let exact = specs.iter().find(|spec| spec.name == wanted);
        let Some(spec) = exact.or_else(|| specs.iter().find(is_it)) else {
            let context = match &self.export {
                Some(name) => format!("there is no export {name:?}"),
                None => "there are several disks; select one with NAME=PATH".to_owned(),
            };
            return Err(Error::invalid(format!("{}: {context}", self.path.display())));
        };
        Ok((wanted.to_owned(), spec))
    }

    pub(crate) fn queues(&self, workers: usize) -> Result<u16> {
        let queues = self.queues.unwrap_or_else(|| queues_of(workers));
        if queues == 0 || queues > QUEUES_MAX {
            return Err(Error::invalid(format!("a disk has 1 to {QUEUES_MAX} queues, not {queues}")));
        }
        Ok(queues)
    }
}

/// The default number of queues of a disk.
fn queues_of(workers: usize) -> u16 {
    u16::try_from(workers).map_or(QUEUES_MAX, |workers| workers.min(QUEUES_MAX))
}

/// A file that is to show a disk.
#[derive(Debug, Clone)]
pub struct FuseSpec {
    /// The export's name; nothing where there is one disk only.
    pub export: Option<String>,
    /// The file: an empty one, or one that is not there.
    pub path: PathBuf,
}

/// What a server that is ready has found out.
#[derive(Debug, Clone, Copy)]
pub struct Ready<'a> {
    /// The addresses of NBD, as they are bound, and the exports that are shown there.
    pub addresses: &'a [(Address, Vec<String>)],
    /// The block devices.
    pub blocks: &'a [PathBuf],
    /// The disks that are open, in the order in which they were named.
    pub disks: &'a [ReadyDisk],
}

/// A disk of a server that is ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadyDisk {
    /// The image.
    pub image: PathBuf,
    /// The format of the image.
    pub format: FormatKind,
    /// The size of the disk in bytes.
    pub size: u64,
    /// Whether writes are refused.
    pub read_only: bool,
}

/// The outcome of a server that ended in good order.
#[derive(Debug, Clone)]
pub struct Report {
    /// What was counted, taken after everything was closed.
    pub stats: Stats,
    /// The signal that ended it; `None` if its files were unmounted, or its block devices removed, and there
    /// was nothing else to serve, or if it was to end with its last client.
    pub signal: Option<Signal>,
}

/// The address in `text`, and the export in front of it: `[NAME=]ADDRESS`.
///
/// # Errors
/// `Invalid`, with the forms.
pub fn parse_nbd(text: &str) -> Result<NbdSpec> {
    let named = match text.split_once('=') {
        Some((name, address)) if !text.starts_with("unix:") && !text.starts_with("tcp:") => {
            Some((name.to_owned(), address))
        }
        _ => None,
    };
    let (export, address) = named.map_or((None, text), |(name, address)| (Some(name), address));
    Ok(NbdSpec { export, address: parse_address(address)? })
}

/// The address that `text` means: `unix:PATH` or `tcp:HOST:PORT`.
///
/// # Errors
/// `Invalid`, with the two forms.
pub fn parse_address(text: &str) -> Result<Address> {
    if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
        return Ok(Address::unix(path));
    }
    let tcp = text.strip_prefix("tcp:").and_then(|rest| rest.rsplit_once(':'));
    if let Some((host, port)) = tcp
        && let Ok(port) = port.parse()
    {
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        return Ok(Address::tcp(if host.is_empty() { "localhost" } else { host }, port));
    }
    Err(Error::invalid(format!("invalid address {text:?}: use unix:PATH or tcp:HOST:PORT")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_as_many_queues_as_workers_and_no_more_than_can_be() {
        for (workers, queues) in [(1, 1), (256, 256), (257, 256), (1 << 16, 256), (usize::MAX, 256)] {
            assert_eq!(queues_of(workers), queues, "{workers} workers");
        }
    }
}
