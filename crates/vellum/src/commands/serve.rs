//! `vellum serve`: serve disks until told to stop.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::ValueEnum;
use vellum_core::{Error, Result};
use vellum_daemon::serve::parse_address;
use vellum_daemon::stats::DiskStats;
use vellum_daemon::{
    ExportSpec, FuseSpec, GrowHook, ImageOptions, Limits, NotifySocket, ServeSpec, Tls, TlsPolicy, UblkSpec,
    VhostSpec, serve,
};
use vellum_format::{FormatKind, Prealloc};
use vellum_io::{Address, IoMode, PassedSocket, PassedTo};

use super::Outcome;
use super::limits::limits_of;
use crate::args::{parse_format, parse_prealloc};
use crate::output::{complain, human_bytes};

/// Serve disks over NBD and vhost-user-blk, as files and as block devices, until SIGTERM or Ctrl-C
///
/// On either, requests that were begun are answered and the images closed; after that they are plain images again. A
/// server that is killed loses nothing that was flushed. Snapshots inside an image of the native format that is served for
/// writing are exports, too, for reading: @NAME, or EXPORT@NAME.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The image to serve under the default export name
    #[arg(value_name = "IMAGE", required_unless_present = "export")]
    image: Option<PathBuf>,
    /// Serve NBD at unix:PATH or tcp:HOST:PORT; may be given several times. Sockets that a service manager passes (systemd's
    /// socket activation) take its place
    #[arg(long, value_name = "ADDRESS", value_parser = parse_address)]
    nbd: Vec<Address>,
    /// Serve NBD in TLS, with server-cert.pem and server-key.pem of DIR
    #[arg(long, value_name = "DIR")]
    tls_certificates: Option<PathBuf>,
    /// Whether clients may do without TLS
    #[arg(long, value_enum, value_name = "HOW", default_value = "require", requires = "tls_certificates")]
    tls: TlsMode,
    /// Let only those clients in that have a certificate by an authority in ca-cert.pem of the same DIR; nor those that
    /// ca-crl.pem lists, if it is there
    #[arg(long, requires = "tls_certificates")]
    tls_verify_peer: bool,
    /// Serve IMAGE, or the export NAME, to virtual machines at this Unix socket; may be given several times
    #[arg(long, value_name = "[NAME=]PATH", value_parser = parse_vhost)]
    vhost_user_blk: Vec<VhostSpec>,
    /// Queues that a virtual machine, or the kernel with --ublk, may use for each disk; as many as there are threads, when
    /// not given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    queues: Option<u16>,
    /// Show the disk as FILE, by FUSE: an empty file, or one that is not there and is made for as long. NAME= says which
    /// export, where there are several; may be given several times
    #[arg(long, value_name = "[NAME=]FILE", value_parser = parse_fuse)]
    fuse: Vec<FuseSpec>,
    /// Show the disk as the block device /dev/ublkbN, or the first that is free (auto), by the kernel's ublk driver. NAME= says
    /// which export, where there are several; may be given several times
    #[arg(long, value_name = "[NAME=]N|auto", value_parser = parse_ublk)]
    ublk: Vec<UblkSpec>,
    /// The block devices outlive a server that ends or is killed: their requests wait for the next one, which is told the same
    /// N and takes them over. Each write is durable when it is answered
    #[arg(long, requires = "ublk")]
    ublk_keep: bool,
    /// Serve IMAGE under NAME too; may be given several times
    #[arg(long, value_name = "NAME=IMAGE", value_parser = parse_export)]
    export: Vec<(String, PathBuf)>,
    /// Format of the images; a raw disk is written only when it is said to be raw
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// How the host's I/O is done; io_uring where it works, when not given
    #[arg(long, value_enum, value_name = "HOW")]
    io: Option<Io>,
    /// Before a thread sleeps it looks for news, for up to so many microseconds, if some came as fast the last time: a busy disk
    /// answers sooner, at the price of a processor. With io_uring only
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=10_000))]
    poll: u32,
    /// Transfers go past the page cache (O_DIRECT)
    #[arg(long)]
    direct: bool,
    /// Refuse writes
    #[arg(short, long)]
    read_only: bool,
    /// With --read-only: serve the image even while another program writes it
    #[arg(short = 'U', long, requires = "read_only")]
    force_share: bool,
    /// Serve this internal snapshot, by id or name; implies --read-only
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Write zeros this far ahead of where an image grows, in idle time, so that flushes there cost less: a size from 64k
    /// to 1G, adaptive (about a second's worth) or off. When not given, as the image says, else adaptive on ext4 and XFS
    #[arg(long, value_name = "HOW", value_parser = parse_prealloc)]
    prealloc: Option<Prealloc>,
    /// Move no data in quiet times. Otherwise, where a device of the native format (zoned) is in fragments, the zones of which
    /// least is used are emptied, so that they can be used whole again
    #[arg(long)]
    no_compact: bool,
    /// Run this command when the device of an image with layout=table becomes full: words, no shell; {device}, {size} (the
    /// bytes it should have) and {more} (how many more that is) stand for themselves, as in "lvextend -L {size}b {device}"
    #[arg(long, value_name = "CMD")]
    grow_hook: Option<GrowHook>,
    /// Worker threads; one per core when not given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Connections at once
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    max_connections: u32,
    /// Seconds that requests under way have to end after SIGTERM before connections are cut
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    drain_seconds: u64,
    /// Let no more through than this, as in "iops-total=1000,bps-write=50M": iops- or bps-, total or read or write; each with
    /// -max and -max-length (seconds) behind it, for bursts; iops-size. EXPORT: says which disk, else all
    #[arg(long, value_name = "[EXPORT:]NAME=N,…", value_parser = parse_limits)]
    limit: Vec<ExportLimits>,
    /// Write statistics to PATH as JSON, once a second and at the end
    #[arg(long, value_name = "PATH")]
    stats_json: Option<PathBuf>,
    /// Listen at this Unix socket for what can be asked of the server while it serves: `vellum snapshot --control PATH`. Its owner
    /// alone may connect
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// Also open backing and data files in DIR, besides each image's own directory
    #[arg(long, value_name = "DIR")]
    allow_dir: Vec<PathBuf>,
    /// Say nothing
    #[arg(short, long)]
    quiet: bool,
}

/// Whether clients may do without TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TlsMode {
    /// Nothing is answered before TLS
    Require,
    /// Who asks for it gets it
    On,
}

/// How the host's I/O is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Io {
    /// io_uring, or an error
    Uring,
    /// A pool of threads
    Threads,
}

fn parse_export(text: &str) -> Result<(String, PathBuf)> {
    let (name, path) = text
        .split_once('=')
        .filter(|(_, path)| !path.is_empty())
        .ok_or_else(|| Error::invalid(format!("{text:?} is no export: say NAME=IMAGE")))?;
    Ok((name.to_owned(), PathBuf::from(path)))
}

/// The export and the path of `[NAME=]PATH`. A name has no slash; a path with `=` in it is told by one.
fn parse_place(text: &str, kind: &str, form: &str) -> Result<(Option<String>, PathBuf)> {
    let (export, path) = match text.split_once('=') {
        Some((name, path)) if !name.contains('/') => (Some(name.to_owned()), path),
        _ => (None, text),
    };
    if path.is_empty() {
        return Err(Error::invalid(format!("{text:?} names no {kind}: say {form} or NAME={form}")));
    }
    Ok((export, PathBuf::from(path)))
}

/// What `--limit` says, and of which export.
#[derive(Debug, Clone)]
struct ExportLimits {
    export: Option<String>,
    limits: Limits,
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
fn limits_for(all: &[ExportLimits], name: &str) -> Limits {
    let is_it = |one: &&ExportLimits| one.export.as_deref().is_none_or(|export| export == name);
    all.iter().rfind(is_it).map_or_else(Limits::default, |one| one.limits.clone())
}

fn parse_vhost(text: &str) -> Result<VhostSpec> {
    let (export, path) = parse_place(text, "socket", "PATH")?;
    Ok(VhostSpec { export, path, queues: None })
}

fn parse_fuse(text: &str) -> Result<FuseSpec> {
    let (export, path) = parse_place(text, "file", "FILE")?;
    Ok(FuseSpec { export, path })
}

fn parse_ublk(text: &str) -> Result<UblkSpec> {
    let (export, number) = match text.split_once('=') {
        Some((name, number)) => (Some(name.to_owned()), number),
        None => (None, text),
    };
    let number = match number {
        "auto" => None,
        number => Some(number.parse().map_err(|_| {
            Error::invalid(format!("{text:?} is no block device: say N for /dev/ublkbN, auto, or NAME=N"))
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
            "sockets were passed to this program (LISTEN_FDS); they take the place of --nbd, which must not be given then",
        ));
    }
    let serves_others = !args.fuse.is_empty() || !args.vhost_user_blk.is_empty() || !args.ublk.is_empty();
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
            "there is no place to serve at: say --nbd unix:PATH or tcp:HOST:PORT, --vhost-user-blk PATH, --fuse FILE or --ublk N{others}",
        )));
    }
    Ok(passed)
}

fn tls_policy(args: &Args, speaks_nbd: bool) -> Result<TlsPolicy> {
    let Some(directory) = &args.tls_certificates else { return Ok(TlsPolicy::Off) };
    if !speaks_nbd {
        return Err(Error::invalid("--tls-certificates is for NBD, and there is no --nbd"));
    }
    if args.tls_verify_peer && args.tls == TlsMode::On {
        return Err(Error::invalid(
            "--tls-verify-peer keeps nobody out with --tls on, which lets clients do without TLS",
        ));
    }
    let tls = Tls::from_directory(directory, args.tls_verify_peer)?;
    Ok(match args.tls {
        TlsMode::Require => TlsPolicy::Required(tls),
        TlsMode::On => TlsPolicy::Offered(tls),
    })
}

pub(crate) fn run(args: Args) -> Outcome {
    let passed = passed_sockets(&args)?;
    if args.queues.is_some() && args.vhost_user_blk.is_empty() && args.ublk.is_empty() {
        return Err(
            Error::invalid("--queues is for --vhost-user-blk and --ublk, and there is neither").into()
        );
    }
    if args.ublk_keep && args.ublk.iter().any(|spec| spec.number.is_none()) {
        return Err(Error::invalid(
            "--ublk-keep wants the number of each device, by which the next server finds it, and not auto",
        )
        .into());
    }
    let tls = tls_policy(&args, !args.nbd.is_empty() || !passed.is_empty())?;
    let image = ImageOptions {
        format: args.format,
        read_only: args.read_only || args.snapshot.is_some(),
        force_share: args.force_share,
        direct: args.direct,
        snapshot: args.snapshot.clone(),
        without_backing: false,
        prealloc: args.prealloc.unwrap_or_default(),
        compaction: !args.no_compact,
        allow_dirs: args.allow_dir.clone(),
    };
    let default = args.image.clone().map(|path| (String::new(), path));
    let exports = default.into_iter().chain(args.export.clone()).map(|(name, path)| ExportSpec {
        limits: limits_for(&args.limit, &name),
        description: path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
        name,
        path,
        image: image.clone(),
    });
    let exports: Vec<ExportSpec> = exports.collect();
    let is_unknown = |name: &String| !exports.iter().any(|export| export.name == *name);
    if let Some(name) = args.limit.iter().filter_map(|one| one.export.as_ref()).find(|name| is_unknown(name))
    {
        return Err(Error::invalid(format!("--limit: there is no export {name:?}")).into());
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let spec = ServeSpec {
        exports,
        nbd: args.nbd.clone(),
        passed,
        tls,
        vhost: args
            .vhost_user_blk
            .iter()
            .map(|spec| VhostSpec { queues: args.queues, ..spec.clone() })
            .collect(),
        fuse: args.fuse.clone(),
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
        connections_max: usize::try_from(args.max_connections).expect("32 bits"),
        limits: Default::default(),
        drain_time: Duration::from_secs(args.drain_seconds),
        grow_hook: args.grow_hook.clone(),
        stats_path: args.stats_json.clone(),
        control_path: args.control.clone(),
        notify: std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()).map(NotifySocket::new),
    };
    let quiet = args.quiet;
    let names: Vec<String> = spec.exports.iter().map(|export| export.name.clone()).collect();
    let vhost = args.vhost_user_blk.clone();
    let scheme = if args.tls_certificates.is_some() { "nbds" } else { "nbd" };
    let files: Vec<PathBuf> = args.fuse.iter().map(|fuse| fuse.path.clone()).collect();
    let report = serve(spec, move |ready| {
        if !quiet {
            for spec in vhost {
                complain(&format!("serving vhost-user-blk {}", spec.path.display()));
            }
            for address in ready.addresses {
                announce(scheme, address, &names);
            }
            for file in files {
                complain(&format!("serving {}", file.display()));
            }
            for block in ready.blocks {
                complain(&format!("serving {}", block.display()));
            }
        }
    })?;
    if !quiet {
        for disk in &report.stats.disks {
            complain(&summary(disk));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// One line per export, with the URI that clients take.
fn announce(scheme: &str, address: &Address, names: &[String]) {
    for name in names {
        let uri = match address {
            Address::Unix(path) => format!("{scheme}+unix:///{name}?socket={}", path.display()),
            Address::Tcp { .. } => format!("{scheme}://{address}/{name}"),
        };
        complain(&format!("serving {uri}"));
    }
}

fn summary(disk: &DiskStats) -> String {
    let guest = &disk.guest;
    let host = [&disk.host.data, &disk.host.metadata, &disk.host.checkpoint, &disk.host.prealloc];
    format!(
        "{}: closed; guest: {} reads, {} writes ({}), {} flushes; host: {} writes ({}), {} flushes",
        disk.image,
        guest.reads,
        guest.writes,
        human_bytes(guest.bytes_written),
        guest.flushes,
        host.iter().map(|part| part.writes).sum::<u64>(),
        human_bytes(host.iter().map(|part| part.bytes_written).sum()),
        host.iter().map(|part| part.flushes).sum::<u64>()
    )
}
