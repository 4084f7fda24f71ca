//! `vellum serve`: serve disks until told to stop.

mod disk;
mod notes;
mod process;
mod remote;
mod tls;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::ValueEnum;
use vellum_core::{Error, Result, UrlPrefix};
use vellum_daemon::spec::{parse_address, parse_nbd};
use vellum_daemon::{
    Address, BootTrace, ExportSpec, FlashPolicy, FlashSpec, FormatKind, FuseSpec, GrowHook, HydrationSpec,
    ImageOptions, IoMode, NbdDeviceSpec, NbdSpec, NotifySocket, PassedSocket, PassedTo, Prealloc,
    PrefetchLimits, RateLimits, ServeSpec, SessionLimits, SocketRights, UblkSpec, VhostSpec, serve,
};

use self::disk::DiskArgs;
use self::notes::{announce, introduction, summary};
use self::process::ProcessArgs;
use self::remote::RemoteArgs;
use self::tls::TlsArgs;
use super::flash::policy::parse_policy;
use super::limits::limits_of;
use super::prefetch::prefetch_limits_of;
use super::trace::read_trace;
use super::{Outcome, or_share};
use crate::args::{AllowArgs, ChunkCacheArgs, parse_format, parse_prealloc, parse_size, parse_url_prefix};
use crate::log::note;
use crate::names::{Named, named_part};
use crate::secrets::SecretArgs;

/// A time that does not pass.
const FOREVER: Duration = Duration::from_secs(100 * 366 * 86_400);

/// NBD clients of a server without a limit, and those of one that names none.
const CONNECTIONS_MAX: usize = 16 << 10;
const CONNECTIONS_DEFAULT: usize = 128;

/// The headings of the options in the help.
const NBD: &str = "NBD";
const OTHERS: &str = "Virtual machines, files and block devices";
const IMAGES: &str = "Images";
const PERFORMANCE: &str = "Performance";
const HYDRATION: &str = "Copying from backing images";
const FLASH: &str = "Flash cache";
const WRITES: &str = "Durability, space and limits";
const CONTROL: &str = "Control, sockets and statistics";

/// Serve disks over NBD, vhost-user-blk, FUSE and ublk until SIGTERM or Ctrl-C
///
/// On SIGTERM or Ctrl-C the server finishes the requests in flight, closes the images and exits. SIGHUP
/// reloads the certificates, SIGUSR1 prints the state to stderr. If the server is killed, flushed data is
/// safe, and the next server recovers the images.
///
/// At least one of --nbd, --vhost-user-blk, --fuse, --ublk and --nbd-device is needed, unless a service manager passes
/// sockets.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Image to serve under the default export name (the empty name)
    #[arg(value_name = "IMAGE", required_unless_present = "export")]
    image: Option<PathBuf>,
    /// Serve NBD at unix:PATH or tcp:HOST:PORT; may be given several times
    ///
    /// Without NAME= all exports are offered there. With NAME= only that export is offered; repeat the option
    /// with the same address for further ones. Sockets passed by a service manager (systemd socket
    /// activation) replace this option and offer all exports.
    #[arg(long, value_name = "[NAME=]ADDRESS", value_parser = parse_nbd, help_heading = NBD)]
    nbd: Vec<NbdSpec>,
    /// Also offer the snapshots of writable vellum images as read-only NBD exports
    ///
    /// The export of a snapshot is @NAME, or EXPORT@NAME. Its reads count towards the limits of the disk.
    #[arg(long, help_heading = NBD)]
    export_snapshots: bool,
    #[command(flatten)]
    tls: TlsArgs,
    /// Serve IMAGE or the export NAME over vhost-user-blk at this Unix socket
    ///
    /// May be given several times.
    #[arg(long, value_name = "[NAME=]PATH", value_parser = parse_vhost, help_heading = OTHERS)]
    vhost_user_blk: Vec<VhostSpec>,
    /// Accept guest memory that is not sealed with F_SEAL_SHRINK
    ///
    /// Any process that shares such memory can crash the server, with all of its disks, by truncating the
    /// memory's file.
    #[arg(long, requires = "vhost_user_blk", help_heading = OTHERS)]
    vhost_unsealed_memory: bool,
    /// Number of queues of each vhost-user-blk and ublk device, 1 to 256. Default: one per thread
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256), help_heading = OTHERS)]
    queues: Option<u16>,
    /// Mount the disk as the file FILE (FUSE); may be given several times
    ///
    /// FILE must be empty or absent. If Vellum created it, it is removed at exit. NAME= selects the export if
    /// there are several.
    #[arg(long, value_name = "[NAME=]FILE", value_parser = parse_fuse, help_heading = OTHERS)]
    fuse: Vec<FuseSpec>,
    /// Create the block device /dev/ublkbN for the disk; auto takes the first free N
    ///
    /// Needs the ublk driver of the kernel. NAME= selects the export if there are several. May be given
    /// several times.
    #[arg(long, value_name = "[NAME=]N|auto", value_parser = parse_ublk, help_heading = OTHERS)]
    ublk: Vec<UblkSpec>,
    /// Show the disk as the block device DEVICE of the kernel's nbd driver, such as /dev/nbd0
    ///
    /// NAME= selects the export if there are several. May be given several times. The device is disconnected
    /// at exit; unmount it before. `vellum client disconnect --device DEVICE` disconnects it too.
    #[arg(long, value_name = "[NAME=]DEVICE", value_parser = parse_nbd_device, help_heading = OTHERS)]
    nbd_device: Vec<NbdDeviceSpec>,
    /// Keep the block devices when the server exits or is killed
    ///
    /// Their requests wait for the next server that is started with the same N. Each write is durable before
    /// it is acknowledged. The N must be given, not auto.
    #[arg(long, requires = "ublk", help_heading = OTHERS)]
    ublk_keep: bool,
    /// Serve IMAGE under the export name NAME; may be given several times
    #[arg(long, value_name = "NAME=IMAGE", value_parser = parse_export, help_heading = IMAGES)]
    export: Vec<(String, PathBuf)>,
    /// Format of the images: raw, qcow2, vellum, or one that is only read (vmdk, vdi, vpc, vhdx, qed, parallels, dmg, qcow). Default: detected
    ///
    /// A raw disk is writable only with -f raw, because its guest could make it look like another format.
    #[arg(short, long, value_name = "FMT", value_parser = parse_format, help_heading = IMAGES)]
    format: Option<FormatKind>,
    /// How to access the images. Default: io_uring if it works, otherwise threads
    #[arg(long, value_enum, value_name = "HOW", help_heading = PERFORMANCE)]
    io: Option<Io>,
    /// Busy-poll for up to this many microseconds before sleeping, while that pays off; 0: never
    ///
    /// A busy disk answers sooner, at the price of CPU time. With io_uring only.
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=10_000), help_heading = PERFORMANCE)]
    poll: u32,
    /// Bypass the page cache (O_DIRECT), with the images and with the flash cache
    #[arg(long, help_heading = PERFORMANCE)]
    direct: bool,
    /// Serve read-only
    #[arg(short, long, help_heading = IMAGES)]
    read_only: bool,
    /// With --read-only: serve the image even if another program has it open for writing
    #[arg(short = 'U', long, requires = "read_only", help_heading = IMAGES)]
    force_share: bool,
    /// Serve this internal snapshot, given by ID or name; implies --read-only
    #[arg(short = 'l', long, value_name = "SNAPSHOT", help_heading = IMAGES)]
    snapshot: Option<String>,
    /// Write zeros ahead of a growing image while idle, so that flushes cost less
    ///
    /// The distance is a size from 64k to 64G, adaptive (about one second's worth of writes) or off. Default:
    /// as set in the image, otherwise adaptive on ext4 and XFS and off elsewhere. For an image of the native
    /// format on a device that cannot zero its space itself, a size is how much of it is kept zero, made so when
    /// the guest is quiet (default: two zones).
    #[arg(long, value_name = "HOW", value_parser = parse_prealloc, help_heading = PERFORMANCE)]
    prealloc: Option<Prealloc>,
    /// Maximum memory for the qcow2 mapping tables of each disk and its backing images
    ///
    /// A number of bytes, or with k, M or G. 1M holds the mapping of 8 GiB in clusters of 64 KiB (in QEMU:
    /// l2-cache-size). Default: the whole mapping, up to 32M for each image and 128M for each disk. With --flash, what
    /// does not fit is read from the flash cache, by sectors.
    #[arg(long, value_name = "BYTES", value_parser = parse_size, help_heading = PERFORMANCE)]
    l2_cache_size: Option<u64>,
    /// Do not compact fragmented vellum images while idle (layout=zoned)
    ///
    /// Compaction moves the data out of the least used zones, so that these zones can be written as a whole
    /// again.
    #[arg(long, help_heading = PERFORMANCE)]
    no_compact: bool,
    /// Copy what guests read from the backing image into the image
    ///
    /// A block that was read once is read from the image from then on. This costs no flush and no metadata of its own. With
    /// =EXPORT, for this export only; may be given several times. An image created with `-o copy_on_read=on` asks for it
    /// itself.
    #[arg(long, value_name = "EXPORT", num_args = 0..=1, require_equals = true, default_missing_value = "", help_heading = HYDRATION)]
    copy_on_read: Vec<String>,
    /// Copy everything from the backing image into the image, in the background, and detach the image then
    ///
    /// Guests come first. Once the image has everything it no longer refers to its backing image, unless it has snapshots. See
    /// `vellum prefetch` for what it does. With =EXPORT, for this export only; may be given several times.
    #[arg(long, value_name = "EXPORT", num_args = 0..=1, require_equals = true, default_missing_value = "", help_heading = HYDRATION)]
    prefetch: Vec<String>,
    /// Copy nothing from the backing image, even if the image asks for it (`-o copy_on_read` and `-o prefetch`)
    #[arg(long, conflicts_with_all = ["copy_on_read", "prefetch"], help_heading = HYDRATION)]
    no_copies: bool,
    /// Limit prefetching, as in base-max=50M,image-max=20M (bytes per second)
    ///
    /// base is what is read from the backing image, image is what is written. -max is never exceeded. Less than -min (default
    /// 1M) means that something else needs the disk or the network: then prefetching pauses.
    #[arg(long, value_name = "NAME=N,…", value_parser = prefetch_limits_of, help_heading = HYDRATION)]
    prefetch_limit: Option<PrefetchLimits>,
    /// Prefetch in the order of this boot trace first
    ///
    /// `vellum trace record` makes it.
    #[arg(long, value_name = "FILE", help_heading = HYDRATION)]
    prefetch_trace: Option<PathBuf>,
    /// Record in which order the backing images are read, for `vellum trace record`
    #[arg(long, help_heading = HYDRATION)]
    record_trace: bool,
    /// Keep blocks of the images in this flash cache, a file or block device on a fast local drive
    ///
    /// `vellum flash create` makes it. One server at a time has it, for all of its disks.
    #[arg(long, value_name = "PATH", help_heading = FLASH)]
    flash: Option<PathBuf>,
    /// How disks use the flash cache: writeback, writethrough, readonly or off
    ///
    /// writeback: writes and flushes go to the cache, and home to the image later; until then the image can only be used
    /// with its cache. writethrough: writes go to the cache and the image at the same time, and the image is always complete.
    /// readonly: writes go to the image, and what is read is cached. Default: writeback for qcow2 (version 3) and vellum
    /// images, readonly for others. EXPORT: selects the disk. May be given several times.
    #[arg(long, value_name = "[EXPORT:]POLICY", value_parser = parse_flash_policy, requires = "flash", help_heading = FLASH)]
    flash_policy: Vec<ExportPolicy>,
    /// The most memory that the flash cache takes, such as 2G
    ///
    /// When it is reached, blocks that images have too are given up, those without neighbours first; then writes wait until
    /// others are home. Default: 16 bytes for each 4 KiB that the cache can hold, and what it takes when it is empty.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "flash", help_heading = FLASH)]
    flash_memory: Option<u64>,
    /// Tell the drive of the flash cache which places have become free: on or off
    ///
    /// In large pieces, in the background. Default: on for a block device. A file would lose the space that is reserved for
    /// it.
    #[arg(long, value_name = "on|off", value_parser = parse_switch, requires = "flash", help_heading = FLASH)]
    flash_discard: Option<bool>,
    /// At exit, leave in the flash cache what the images do not have yet
    ///
    /// The server ends sooner, and the images can only be used with this cache. By default the images are completed.
    #[arg(long, requires = "flash", help_heading = FLASH)]
    flash_keep: bool,
    /// Read from copies on this fast medium, a file or block device on an SSD
    ///
    /// Images that are attached to it (`vellum tier attach`) use it, and others do not. One server at a time has it, for
    /// all of its disks. Without it, an attached disk is served from its image, and the first write makes its copies void.
    #[arg(long, value_name = "PATH", help_heading = FLASH)]
    fast: Option<PathBuf>,
    /// Copy what guests read often to the fast medium
    ///
    /// The heat of a unit is how much was read of it since it was written last, and fades. Units are copied while guests are at
    /// work, a few at a time, within the budget of the disk. Cold ones that were copied for their heat make room. What is still
    /// only in a backing image is not copied.
    #[arg(long, value_name = "on|off", value_parser = parse_switch, requires = "fast", help_heading = FLASH)]
    tier_heat: Option<bool>,
    /// Run this command when the device of a vellum image is nearly full
    ///
    /// The image needs layout=zoned or table. The command is run without a shell; {device}, {size} (the new size
    /// in bytes) and {more} (the bytes to add) are replaced, as in "lvextend -L {size}b {device}".
    #[arg(long, value_name = "CMD", help_heading = WRITES)]
    grow_hook: Option<GrowHook>,
    /// Make each write durable before it is acknowledged
    ///
    /// Writes that arrive together share a flush. A virtual machine that stayed connected while a server was
    /// killed can then continue with the next server and misses nothing. Without this option, the next server
    /// refuses such a virtual machine until it is reset.
    #[arg(long, help_heading = WRITES)]
    durable: bool,
    /// What to do with a request when the host has no space
    #[arg(long, value_enum, value_name = "HOW", default_value = "fail", help_heading = WRITES)]
    on_full: OnFull,
    /// Exit unless every image can be opened. Default: serve those that can
    #[arg(long, help_heading = IMAGES)]
    require_all: bool,
    /// Mode of Unix sockets for NBD and vhost-user-blk, such as 0660. Default: as the umask says
    #[arg(long, value_name = "MODE", value_parser = parse_mode, help_heading = CONTROL)]
    socket_mode: Option<u32>,
    /// Group of these sockets, by name or number. Default: the process's group
    #[arg(long, value_name = "GROUP", help_heading = CONTROL)]
    socket_group: Option<String>,
    /// Number of worker threads, 1 to 1024. Default: one per core
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = PERFORMANCE)]
    threads: Option<u16>,
    /// Maximum number of NBD clients. Default: 128, or 16 per export if that is more
    ///
    /// If there are several exports, the clients of one can use at most half of it.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = NBD)]
    max_connections: Option<u32>,
    /// Accept at most N NBD connections at a time; the next ones wait until one has ended
    ///
    /// With 1, no client is told that it may connect several times. 0 is no such limit.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16), help_heading = NBD)]
    shared: Option<u16>,
    /// Exit when the last NBD client that used an export has disconnected
    #[arg(long, help_heading = NBD)]
    exit_when_unused: bool,
    /// Disconnect NBD clients that have not chosen an export after this many seconds; 0: never
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(..=86_400), help_heading = NBD)]
    handshake_seconds: u32,
    /// Maximum memory for the data in flight of all NBD clients, plus 1 MiB per client
    ///
    /// A client that neither sends nor accepts a byte for a minute in the middle of a request is
    /// disconnected.
    #[arg(long, value_name = "BYTES", default_value = "512M", value_parser = parse_size, help_heading = NBD)]
    memory: u64,
    /// Seconds that requests in flight have to finish after SIGTERM
    ///
    /// After that, the remaining clients are disconnected, and closing the disks may take as long again. If a
    /// disk cannot be closed by then, the log names it, and the exit code is 1.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, help_heading = CONTROL)]
    drain_seconds: u64,
    /// Limit the requests of a disk, as in iops-total=1000,bps-write=50M
    ///
    /// iops is requests per second, bps is bytes per second. The names are iops- or bps- followed by total,
    /// read or write, each also with -max and -max-length for bursts, and iops-size; see `vellum help limits`.
    /// EXPORT: selects the disk. Default: all disks. May be given several times.
    #[arg(long, value_name = "[EXPORT:]NAME=N,…", value_parser = parse_limits, help_heading = WRITES)]
    limit: Vec<ExportLimits>,
    /// Write statistics to PATH as JSON every second and at exit
    #[arg(long, value_name = "PATH", help_heading = CONTROL)]
    stats_json: Option<PathBuf>,
    /// Serve Prometheus metrics over HTTP, as /metrics at unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "ADDRESS", value_parser = parse_address, help_heading = CONTROL)]
    metrics: Option<Address>,
    /// Listen for commands such as `vellum stats` on this Unix socket
    ///
    /// Only its owner can connect.
    #[arg(long, value_name = "PATH", help_heading = CONTROL)]
    control: Option<PathBuf>,
    /// Also allow backing and data files in DIR; may be given several times
    ///
    /// By default, an image may only refer to files in its own directory.
    #[arg(long, value_name = "DIR", help_heading = IMAGES)]
    allow_dir: Vec<PathBuf>,
    /// Also allow backing images at URLs that begin with PREFIX; may be given several times
    ///
    /// For example https://host/templates/ or s3://bucket/. By default, an image must not refer to a URL.
    #[arg(long, value_name = "PREFIX", value_parser = parse_url_prefix, help_heading = IMAGES)]
    allow_url: Vec<UrlPrefix>,
    /// Take a backing image at a URL for fixed although its server does not prove it
    ///
    /// Needed where a web server gives no strong ETag. If the backing image does change, the disk is a mixture.
    #[arg(long, help_heading = IMAGES)]
    trust_base: bool,
    #[command(flatten)]
    remote: RemoteArgs,
    /// Allow writing to FILE as the data file of an image. Default: read-only
    ///
    /// May be given several times.
    #[arg(long, value_name = "FILE", help_heading = IMAGES)]
    data_file: Vec<PathBuf>,
    /// Print nothing but warnings and errors
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten, next_help_heading = IMAGES)]
    chunk_cache: ChunkCacheArgs,
    #[command(flatten)]
    secrets: SecretArgs,
    #[command(flatten)]
    disk: DiskArgs,
    #[command(flatten)]
    process: ProcessArgs,
}

/// What becomes of a request that finds no space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OnFull {
    /// Fail the request with ENOSPC
    Fail,
    /// Hold the request until there is space or the server exits
    Hold,
}

/// I/O interface of the host. Default: io_uring if it works, otherwise threads
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Io {
    /// io_uring; fail if it does not work
    Uring,
    /// A pool of threads with blocking I/O
    Threads,
}

fn parse_mode(text: &str) -> Result<u32> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| *mode <= 0o777)
        .ok_or_else(|| Error::invalid(format!("invalid mode {text:?}: use three octal digits, such as 660")))
}

pub(super) fn parse_export(text: &str) -> Result<(String, PathBuf)> {
    let (name, path) = text
        .split_once('=')
        .filter(|(_, path)| !path.is_empty())
        .ok_or_else(|| Error::invalid(format!("invalid export {text:?}: use NAME=IMAGE")))?;
    Ok((name.to_owned(), PathBuf::from(path)))
}

/// The export and the path of `[NAME=]PATH`. A name has no slash; a path with `=` in it is told by one.
fn parse_place(text: &str, kind: &str, form: &str) -> Result<(Option<String>, PathBuf)> {
    let (export, path) = match text.split_once('=') {
        Some((name, path)) if !name.contains('/') => (Some(name.to_owned()), path),
        _ => (None, text),
    };
    if path.is_empty() {
        return Err(Error::invalid(format!("{text:?} does not name a {kind}: use {form} or NAME={form}")));
    }
    Ok((export, PathBuf::from(path)))
}

/// What `--limit` says, and of which export.
#[derive(Debug, Clone)]
struct ExportLimits {
    export: Option<String>,
    limits: RateLimits,
}

fn parse_limits(text: &str) -> Result<ExportLimits> {
    // A limit has no colon in it.
    let (export, list) = match text.rsplit_once(':') {
        Some((export, list)) => (Some(export.to_owned()), list),
        None => (None, text),
    };
    Ok(ExportLimits { export, limits: limits_of(list)? })
}

/// The limits that an export has; the last that was said counts.
fn limits_for(all: &[ExportLimits], name: &str) -> RateLimits {
    let is_it = |one: &&ExportLimits| one.export.as_deref().is_none_or(|export| export == name);
    all.iter().rfind(is_it).map_or_else(RateLimits::default, |one| one.limits.clone())
}

/// What `--flash-policy` says, and of which export.
#[derive(Debug, Clone)]
struct ExportPolicy {
    export: Option<String>,
    policy: FlashPolicy,
}

fn parse_switch(text: &str) -> Result<bool> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(Error::invalid(format!("{text:?}: use on or off"))),
    }
}

fn parse_flash_policy(text: &str) -> Result<ExportPolicy> {
    // A policy has no colon in it.
    let (export, policy) = match text.rsplit_once(':') {
        Some((export, policy)) => (Some(export.to_owned()), policy),
        None => (None, text),
    };
    Ok(ExportPolicy { export, policy: parse_policy(policy)? })
}

/// The policy that an export has: one that names it counts, else the last that names none.
fn policy_for(all: &[ExportPolicy], name: Option<&str>) -> Option<FlashPolicy> {
    let own = all.iter().rfind(|one| one.export.is_some() && one.export.as_deref() == name);
    own.or_else(|| all.iter().rfind(|one| one.export.is_none())).map(|one| one.policy)
}

fn parse_vhost(text: &str) -> Result<VhostSpec> {
    let (export, path) = parse_place(text, "socket", "PATH")?;
    Ok(VhostSpec { export, path, queues: None, takes_unsealed: false })
}

fn parse_fuse(text: &str) -> Result<FuseSpec> {
    let (export, path) = parse_place(text, "file", "FILE")?;
    Ok(FuseSpec { export, path })
}

fn parse_nbd_device(text: &str) -> Result<NbdDeviceSpec> {
    let (export, path) = parse_place(text, "block device", "DEVICE")?;
    Ok(NbdDeviceSpec { export, path })
}

fn parse_ublk(text: &str) -> Result<UblkSpec> {
    let (export, number) = match text.split_once('=') {
        Some((name, number)) => (Some(name.to_owned()), number),
        None => (None, text),
    };
    let number = match number {
        "auto" => None,
        number => Some(number.parse().map_err(|_| {
            Error::invalid(format!("invalid block device {text:?}: use N for /dev/ublkbN, auto, or NAME=N"))
        })?),
    };
    Ok(UblkSpec { export, number, queues: None, keeps: false })
}

/// The sockets that a service manager passed. Without any there must be another place to serve at.
fn passed_sockets(args: &Args) -> Result<Vec<PassedSocket>> {
    let passed_to = PassedTo::from_environment();
    let passed = passed_to.sockets()?;
    if !passed.is_empty() && !args.nbd.is_empty() {
        return Err(Error::invalid(
            "sockets were passed to this program (LISTEN_FDS) and replace --nbd: omit --nbd",
        ));
    }
    let serves_others = !args.fuse.is_empty()
        || !args.vhost_user_blk.is_empty()
        || !args.ublk.is_empty()
        || !args.nbd_device.is_empty();
    if passed.is_empty() && args.nbd.is_empty() && !serves_others {
        let others = match passed_to.for_whom() {
            Some(pid) => format!(
                " (LISTEN_FDS is for process {}, and this is {}: start it with `exec`)",
                pid.display(),
                std::process::id()
            ),
            None => String::new(),
        };
        return Err(Error::invalid(format!(
            "there is nowhere to serve the disk: use --nbd unix:PATH or tcp:HOST:PORT, --vhost-user-blk PATH, \
             --fuse FILE, --ublk N or --nbd-device DEVICE{others}",
        )));
    }
    Ok(passed)
}

/// Whether an option of exports is for this one: it is for all of them without a name.
fn is_for(names: &[String], name: &str) -> bool {
    names.iter().any(|its| its.is_empty() || its == name)
}

/// How disks get what only their backing images have, where nothing else is said of one.
fn hydration_of(args: &Args) -> Result<HydrationSpec> {
    let read = |file: &PathBuf| {
        let trace = read_trace(file)?;
        Ok::<_, Error>(BootTrace { file: file.clone(), runs: trace.runs.into() })
    };
    let trace = args.prefetch_trace.as_ref().map(read).transpose()?;
    if args.prefetch.is_empty()
        && (trace.is_some() || args.prefetch_limit.is_some())
        && args.control.is_none()
    {
        return Err(Error::invalid("--prefetch-trace and --prefetch-limit need --prefetch"));
    }
    Ok(HydrationSpec {
        copy_on_read: args.copy_on_read.iter().any(String::is_empty),
        prefetch: args.prefetch.iter().any(String::is_empty),
        limits: args.prefetch_limit.unwrap_or_default(),
        trace,
        keeps_order: args.record_trace,
        ignores_wish: args.no_copies,
    })
}

/// What one client may take.
fn session_limits(args: &Args) -> SessionLimits {
    let handshake_time = match args.handshake_seconds {
        0 => FOREVER,
        seconds => Duration::from_secs(seconds.into()),
    };
    SessionLimits { handshake_time, is_only_client: args.shared == Some(1), ..SessionLimits::default() }
}

/// How many NBD clients may be there: as many as are accepted at once, if that is more than the default.
fn connections_max(args: &Args) -> Option<usize> {
    let most = args.max_connections.map(|most| usize::try_from(most).expect("32 bits"));
    most.or(match args.shared {
        None => None,
        Some(0) => Some(CONNECTIONS_MAX),
        Some(shared) => Some(CONNECTIONS_DEFAULT.max(shared.into())),
    })
}

pub(crate) fn run(mut args: Args) -> Outcome {
    let becoming = match args.process.begin()? {
        Ok(becoming) => becoming,
        Err(code) => return Ok(code),
    };
    let passed = passed_sockets(&args)?;
    if args.queues.is_some() && args.vhost_user_blk.is_empty() && args.ublk.is_empty() {
        return Err(Error::invalid("--queues needs --vhost-user-blk or --ublk").into());
    }
    if args.ublk_keep && args.ublk.iter().any(|spec| spec.number.is_none()) {
        return Err(Error::invalid(
            "--ublk-keep needs the number of each device instead of auto: the next server finds the device by it",
        )
        .into());
    }
    if args.disk.salvage && !args.read_only && args.fast.is_none() {
        let why = "--salvage needs --read-only, or --fast with the medium whose tables are damaged";
        return Err(Error::invalid(why).into());
    }
    let tls = args.tls.files(!args.nbd.is_empty() || !passed.is_empty())?;
    if args.exit_when_unused && args.nbd.is_empty() && args.nbd_device.is_empty() && passed.is_empty() {
        return Err(Error::invalid(
            "--exit-when-unused is about NBD clients and needs --nbd or --nbd-device",
        )
        .into());
    }
    let named =
        args.image.as_ref().map(|image| named_part(image, args.format, args.disk.image_opts, parse_size));
    let (named, part) = named.transpose()?.unzip();
    let part = args.disk.part(part.flatten())?;
    let sparse = args.disk.sparse()?;
    let format = named.as_ref().map_or(args.format, |named| named.format);
    let must_be_encrypted = named.as_ref().and_then(Named::must_be_encrypted);
    let remote = args.remote.of(named.as_ref(), &args.secrets)?;
    args.image = named.map(|named| named.path);
    let mut image = ImageOptions {
        format,
        read_only: args.read_only || args.snapshot.is_some(),
        force_share: args.force_share,
        salvages: args.disk.salvage,
        direct: args.direct,
        snapshot: args.snapshot.clone(),
        without_backing: false,
        prealloc: args.prealloc.unwrap_or_default(),
        compaction: !args.no_compact,
        mapping_bytes_max: args.l2_cache_size,
        pin_base: false,
        tap: None,
        wished_tap: None,
        allow_dirs: AllowArgs {
            allow_dir: args.allow_dir.clone(),
            allow_url: args.allow_url.clone(),
            ..AllowArgs::default()
        }
        .places(),
        trust_base: args.trust_base,
        remote,
        data_files: args.data_file.clone(),
        chunk_cache: args.chunk_cache.choice(),
        secrets: args.secrets.read()?,
        must_be_encrypted,
        ..ImageOptions::default()
    };
    let hydration = hydration_of(&args)?;
    let temporary = match &args.image {
        Some(path) => args.disk.temporary(path, &image)?,
        None => None,
    };
    let only = args.export.len() + usize::from(args.image.is_some()) == 1 && !image.secrets.is_empty();
    let must_be_encrypted =
        disk::must_be_encrypted(image.must_be_encrypted.take(), temporary.is_some(), only);
    if let Some(temporary) = &temporary {
        image.format = Some(FormatKind::Qcow2);
        image.allow_dirs.push(temporary.below.clone());
        args.image = Some(temporary.path.clone());
    }
    let (export_name, description) = (args.disk.export_name.clone(), args.disk.description.clone());
    let default = args.image.clone().map(|path| (export_name.clone().unwrap_or_default(), path));
    let exports = default.into_iter().chain(args.export.clone()).map(|(name, path)| ExportSpec {
        rate_limits: limits_for(&args.limit, &name),
        flash_policy: policy_for(&args.flash_policy, Some(&name)),
        bitmaps: if args.image.as_ref() == Some(&path) { args.disk.bitmaps.clone() } else { Vec::new() },
        hydration: HydrationSpec {
            copy_on_read: is_for(&args.copy_on_read, &name),
            prefetch: is_for(&args.prefetch, &name),
            ..hydration.clone()
        },
        description: match &description {
            Some(text) if args.image.as_ref() == Some(&path) => text.clone(),
            _ => path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
        },
        image: ImageOptions {
            must_be_encrypted: must_be_encrypted.filter(|_| only || args.image.as_ref() == Some(&path)),
            ..image.clone()
        },
        name,
        path,
    });
    let exports: Vec<ExportSpec> = exports.collect();
    let is_unknown = |name: &String| !exports.iter().any(|export| export.name == *name);
    if let Some(name) = args.limit.iter().filter_map(|one| one.export.as_ref()).find(|name| is_unknown(name))
    {
        return Err(Error::invalid(format!("--limit: there is no export {name:?}")).into());
    }
    let mut policies = args.flash_policy.iter().filter_map(|one| one.export.as_ref());
    if let Some(name) = policies.find(|name| is_unknown(name)) {
        return Err(Error::invalid(format!("--flash-policy: there is no export {name:?}")).into());
    }
    for (option, names) in [("--copy-on-read", &args.copy_on_read), ("--prefetch", &args.prefetch)] {
        if let Some(name) = names.iter().find(|name| !name.is_empty() && is_unknown(name)) {
            return Err(Error::invalid(format!("{option}: there is no export {name:?}")).into());
        }
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let spec = ServeSpec {
        exports,
        hydration,
        nbd: args.nbd.clone(),
        export_snapshots: args.export_snapshots,
        passed,
        tls,
        vhost: args
            .vhost_user_blk
            .iter()
            .map(|spec| VhostSpec {
                queues: args.queues,
                takes_unsealed: args.vhost_unsealed_memory,
                ..spec.clone()
            })
            .collect(),
        fuse: args.fuse.clone(),
        nbd_devices: args.nbd_device.clone(),
        ublk: args
            .ublk
            .iter()
            .map(|spec| UblkSpec { queues: args.queues, keeps: args.ublk_keep, ..spec.clone() })
            .collect(),
        threads: args.threads.map_or(cores, usize::from),
        mode: match args.io {
            None => IoMode::Auto,
            Some(Io::Uring) => IoMode::Uring,
            Some(Io::Threads) => IoMode::Threads,
        },
        poll_max: Duration::from_micros(args.poll.into()),
        connections_max: connections_max(&args),
        memory_bytes: usize::try_from(args.memory).unwrap_or(usize::MAX),
        session_limits: session_limits(&args),
        sparse,
        part,
        connections_at_once: args.shared.filter(|most| *most > 0).map(usize::from),
        ends_with_clients: args.exit_when_unused,
        drain_time: Duration::from_secs(args.drain_seconds),
        fast: args.fast.clone(),
        tier_heat: args.tier_heat.unwrap_or(false),
        flash: args.flash.clone().map(|path| FlashSpec {
            path,
            keeps_dirty: args.flash_keep,
            memory_bytes_max: args.flash_memory,
            discards: args.flash_discard,
            direct: args.direct,
        }),
        flash_policy: policy_for(&args.flash_policy, None),
        grow_hook: args.grow_hook.clone(),
        image: image.clone(),
        queues: args.queues,
        durable: args.durable,
        hold_when_full: args.on_full == OnFull::Hold,
        require_all: args.require_all,
        rights: SocketRights {
            mode: args.socket_mode,
            group: args.socket_group.as_deref().map(SocketRights::group_of).transpose()?,
        },
        metrics: args.metrics.clone(),
        tell: note,
        stats_path: args.stats_json.clone(),
        control_path: args.control.clone(),
        notify: std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()).map(NotifySocket::new),
    };
    let quiet = args.quiet;
    let vhost = args.vhost_user_blk.clone();
    let scheme = if args.tls.is_used() { "nbds" } else { "nbd" };
    let control = args.control.clone();
    let files: Vec<PathBuf> = args.fuse.iter().map(|fuse| fuse.path.clone()).collect();
    let can_share = image.read_only && !image.force_share;
    let report = serve(spec, move |ready| {
        if !quiet {
            for spec in vhost {
                note(&format!("serving vhost-user-blk {}", spec.path.display()));
            }
            for (address, names) in ready.addresses {
                announce(scheme, address, names);
            }
            for file in files {
                note(&format!("serving {}", file.display()));
            }
            for block in ready.blocks {
                note(&format!("serving {}", block.display()));
            }
            for disk in ready.disks {
                note(&introduction(disk));
            }
            if let Some(path) = control {
                note(&format!("listening for commands at {}", path.display()));
            }
            note("ready; to stop, press Ctrl-C or send SIGTERM");
        }
        drop(temporary);
        becoming.settle()
    });
    let report = report.map_err(|error| if can_share { or_share(error) } else { error.into() })?;
    if !quiet {
        for disk in &report.stats.disks {
            note(&summary(disk));
        }
    }
    Ok(ExitCode::SUCCESS)
}
