//! `vellum export`: which disks a server serves, changed while it serves others.

mod offered;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::Value;
use vellum_core::{Context, Error, Result, Url};
use vellum_daemon::control::{Request, call};
use vellum_daemon::flash::word_of;
use vellum_daemon::spec::parse_address;
use vellum_daemon::{Address, FlashPolicy, FormatKind, IoMode, RateLimits, run as run_worker};

use super::Outcome;
use super::flash::policy::parse_policy;
use super::limits::limits_of;
use crate::args::{OutputFormat, parse_format};
use crate::output::{human_bytes, printable, say, say_json, table};

/// List, add, remove and reopen the disks of a running server
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    List(List),
    Add(Box<Add>),
    Remove(Remove),
    Reopen(Reopen),
}

/// Which server.
#[derive(clap::Args)]
struct At {
    /// Control socket of the server, as given to `vellum serve --control`
    #[arg(long, value_name = "PATH")]
    control: PathBuf,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
}

/// List the exports of a server
///
/// With --control, of a server of Vellum, with the state of their disks. With --nbd, what any NBD server tells its clients, in the lines of
/// `qemu-nbd --list`.
#[derive(clap::Args)]
struct List {
    /// Control socket of the server, as given to `vellum serve --control`
    #[arg(long, value_name = "PATH", required_unless_present = "nbd", conflicts_with = "nbd")]
    control: Option<PathBuf>,
    /// Address of an NBD server: unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "ADDRESS", value_parser = parse_address)]
    nbd: Option<Address>,
    /// Use TLS, with ca-cert.pem in DIR, and with client-cert.pem and client-key.pem if they exist
    #[arg(long, value_name = "DIR", requires = "nbd")]
    tls_certificates: Option<PathBuf>,
    /// Name that the server's certificate must be for. Default: the host of --nbd; at a Unix socket, any
    #[arg(long, value_name = "NAME", requires = "tls_certificates")]
    tls_hostname: Option<String>,
    /// Accept any server
    #[arg(long, requires = "tls_certificates", conflicts_with = "tls_hostname")]
    tls_unverified: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
}

/// Serve another image
///
/// The image is served with the options that the server was started with: NBD sockets, --direct, --durable,
/// --allow-dir and so on.
#[derive(clap::Args)]
struct Add {
    #[command(flatten)]
    at: At,
    /// Name of the export, and the image
    #[arg(value_name = "NAME=IMAGE", value_parser = super::serve::parse_export)]
    export: (String, PathBuf),
    /// Format of the image: raw, qcow2 or vellum. Default: the server's -f
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// Refuse writes
    #[arg(short, long)]
    read_only: bool,
    /// Also serve the disk over vhost-user-blk at this Unix socket
    #[arg(long, value_name = "PATH")]
    vhost_user_blk: Option<PathBuf>,
    /// Also serve the disk over NBD at unix:PATH or tcp:HOST:PORT, with no other export
    ///
    /// NBD sockets of the server that offer all exports offer this one too.
    #[arg(long, value_name = "ADDRESS", value_parser = parse_address)]
    nbd: Option<Address>,
    /// Limits of the disk, such as iops-total=1000,bps-write=50M; see `vellum limits`
    #[arg(long, value_name = "NAME=N,…", value_parser = limits_of)]
    limit: Option<RateLimits>,
    /// How the disk uses the flash cache of the server: writeback, writethrough, readonly or off
    ///
    /// Default: the server's --flash-policy.
    #[arg(long, value_name = "POLICY", value_parser = parse_policy)]
    flash_policy: Option<FlashPolicy>,
}

/// Stop serving an export and close its image
#[derive(clap::Args)]
struct Remove {
    #[command(flatten)]
    at: At,
    /// Remove the export even if clients are connected; they are disconnected
    ///
    /// Their requests in flight are answered first.
    #[arg(long)]
    force: bool,
    /// Continue even if the host has no space for unflushed writes; they are lost
    #[arg(long)]
    lose_unflushed: bool,
    /// Name of the export
    name: String,
}

/// Close the image of a disk and open it again, for example after a failed flush
///
/// Clients stay connected, and their requests wait meanwhile. All flushed data is kept. Writes that were not
/// flushed may be missing, which the next flush of each client reports by failing once.
#[derive(clap::Args)]
struct Reopen {
    #[command(flatten)]
    at: At,
    /// Continue even if the host has no space for unflushed writes; they are lost
    #[arg(long)]
    lose_unflushed: bool,
    /// Name of the export; optional if the server has one disk
    name: Option<String>,
}

impl At {
    fn ask(&self, request: &Request) -> Result<Value> {
        run_worker(IoMode::Auto, async || call(&self.control, request).await)?
    }

    fn show(&self, answer: &Value, human: impl FnOnce(&Value)) {
        match self.output {
            OutputFormat::Json => say_json(answer),
            OutputFormat::Human => human(answer),
        }
    }
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).context(|| format!("can't resolve the path {}", path.display()))
}

fn address_text(address: &Address) -> Result<String> {
    Ok(match address {
        Address::Unix(path) => format!("unix:{}", absolute(path)?.display()),
        tcp => format!("tcp:{tcp}"),
    })
}

pub(crate) fn run(args: &Args) -> Outcome {
    match &args.what {
        What::List(list) => match (&list.nbd, &list.control) {
            (Some(address), _) => offered::list(list, address)?,
            (None, Some(control)) => {
                let at = At { control: control.clone(), output: list.output };
                let answer = at.ask(&Request::ExportList {})?;
                at.show(&answer, |answer| show(answer.as_array().map_or(&[], Vec::as_slice)));
            }
            (None, None) => unreachable!("one of them is required"),
        },
        What::Add(add) => {
            let Add {
                at,
                export: (name, image),
                format,
                read_only,
                vhost_user_blk,
                nbd,
                limit,
                flash_policy,
            } = &**add;
            if name.contains('@') {
                return Err(
                    Error::invalid(format!("{name:?}: the name of an export must not contain @")).into()
                );
            }
            let request = Request::ExportAdd {
                name: name.clone(),
                image: match image.to_str().is_some_and(|text| Url::parse(text).is_some()) {
                    true => image.clone(),
                    false => absolute(image)?,
                },
                format: format.map(|format| format.to_string()),
                read_only: read_only.then_some(true),
                vhost_user_blk: vhost_user_blk.as_deref().map(absolute).transpose()?,
                nbd: nbd.as_ref().map(address_text).transpose()?,
                limits: limit.as_ref().map(|limits| limits.said().into_iter().collect()),
                flash_policy: flash_policy.map(|policy| word_of(policy).to_owned()),
            };
            let answer = at.ask(&request)?;
            at.show(&answer, |_| say("Added; the disk is being served."));
        }
        What::Remove(Remove { at, force, lose_unflushed, name }) => {
            let (force, lose_unflushed) = (*force, *lose_unflushed);
            let answer = at.ask(&Request::ExportRemove { name: name.clone(), force, lose_unflushed })?;
            at.show(&answer, |answer| {
                say(if answer["closed"] == true {
                    "Removed; the image is closed."
                } else {
                    "Removed; the image is served under another name."
                });
            });
        }
        What::Reopen(Reopen { at, lose_unflushed, name }) => {
            let lose_unflushed = *lose_unflushed;
            let answer = at.ask(&Request::ExportReopen { disk: name.clone(), lose_unflushed })?;
            at.show(&answer, |answer| {
                say(if answer["may-miss-writes"] == true {
                    "Reopened. Writes that were acknowledged but not flushed may be missing: the next flush of each \
                     client fails once."
                } else {
                    "Reopened."
                });
            });
        }
    }
    Ok(ExitCode::SUCCESS)
}

const HEADINGS: [&str; 6] = ["NAME", "IMAGE", "STATE", "ACCESS", "SIZE", "CLIENTS"];

fn show(exports: &[Value]) {
    table(HEADINGS, 4, exports.iter().map(row)).iter().for_each(|line| say(line));
}

fn row(export: &Value) -> [String; HEADINGS.len()] {
    let text = |name: &str| printable(export[name].as_str().unwrap_or_default()).into_owned();
    let number = |name: &str| export[name].as_u64().unwrap_or_default();
    [
        if text("name").is_empty() { "(default)".to_owned() } else { text("name") },
        text("image"),
        text("state"),
        if export["read-only"] == true { "read-only" } else { "writable" }.to_owned(),
        human_bytes(number("virtual-size")),
        number("connections").to_string(),
    ]
}
