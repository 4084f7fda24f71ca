//! `vellum client`: who uses a server over NBD, and sending one away.

use std::path::PathBuf;
use std::process::ExitCode;

use vellum_core::{Error, Result};
use vellum_daemon::control::{ClientRow, Request, call};
use vellum_daemon::{IoMode, disconnect_nbd_device, run as run_worker};

use super::Outcome;
use crate::args::OutputFormat;
use crate::output::{say, say_json};

/// List the NBD clients of a running server, or disconnect one
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(clap::Subcommand)]
enum Verb {
    /// List the clients: address, certificate subject and export
    List(ListArgs),
    /// Disconnect a client, or a block device of the kernel's nbd driver
    ///
    /// Requests in flight are completed but not answered. A device is disconnected from its server, whichever program that
    /// is; unmount it before.
    Disconnect(DisconnectArgs),
}

#[derive(clap::Args)]
struct ListArgs {
    /// Control socket of the server, as given to `vellum serve --control`
    #[arg(long, value_name = "PATH")]
    control: PathBuf,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
}

#[derive(clap::Args)]
struct DisconnectArgs {
    /// Control socket of the server, as given to `vellum serve --control`
    #[arg(long, value_name = "PATH", requires = "id", required_unless_present = "device")]
    control: Option<PathBuf>,
    /// ID of the client, as `vellum client list` shows it
    #[arg(value_name = "ID", requires = "control")]
    id: Option<u64>,
    /// The block device, such as /dev/nbd0
    #[arg(long, value_name = "DEVICE", conflicts_with_all = ["id", "control"])]
    device: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    match &args.verb {
        Verb::List(args) => list(args)?,
        Verb::Disconnect(DisconnectArgs { device: Some(device), .. }) => {
            disconnect_nbd_device(device)?;
            say(&format!("{} disconnected", device.display()));
        }
        Verb::Disconnect(DisconnectArgs { control: Some(control), id: Some(id), .. }) => {
            ask(control, &Request::ClientDisconnect { id: *id })?;
            say("Disconnected.");
        }
        Verb::Disconnect(_) => return Err(Error::invalid("use --control PATH ID or --device DEVICE").into()),
    }
    Ok(ExitCode::SUCCESS)
}

fn ask(control: &std::path::Path, request: &Request) -> Result<serde_json::Value> {
    run_worker(IoMode::Auto, async || call(control, request).await)?
}

fn list(args: &ListArgs) -> Result<()> {
    let answer = ask(&args.control, &Request::ClientList {})?;
    if let OutputFormat::Json = args.output {
        say_json(&answer);
        return Ok(());
    }
    let rows: Vec<ClientRow> = serde_json::from_value(answer)
        .map_err(|error| Error::invalid(format!("unexpected answer of the server: {error}")))?;
    say(&format!("{:>6}  {:<10} {:>8}  {:<24} {}", "ID", "STATE", "SECONDS", "EXPORT", "PEER"));
    for row in rows {
        let export = row.export.as_deref().unwrap_or("-").escape_debug().to_string();
        let subject = row.subject.map(|subject| format!(" ({subject})")).unwrap_or_default();
        say(&format!(
            "{:>6}  {:<10} {:>8}  {export:<24} {}{subject}",
            row.id, row.state, row.age_sec, row.peer
        ));
    }
    Ok(())
}
