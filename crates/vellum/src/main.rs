//! The command line: arguments in, one call into the library, answers out.
//!
//! Data goes to stdout, everything else to stderr. A failure is one line, with its causes and, where there is one, the
//! remedy; exit codes are those of `qemu-img`. One file in `commands/` for each command; its `Args` are its help.

#![forbid(unsafe_code)]

mod args;
mod commands;
mod config;
mod getopt;
mod key_values;
mod log;
mod names;
mod objects;
mod output;
mod progress;
mod protocol;
mod qemu_img;
mod qemu_nbd;
mod secrets;
mod spoken;
mod version;

use std::ffi::{OsStr, OsString};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// How long the end waits for connections that close.
const CLOSING_TIME: std::time::Duration = std::time::Duration::from_secs(5);

/// What the environment says; the last part of the help.
const ENVIRONMENT: &str = "Environment:
  VELLUM_ALLOW_DIRS  like --allow-dir for all commands: directories, separated by colons
  VELLUM_ALLOW_URLS  like --allow-url for all commands: beginnings of URLs, separated by spaces
  VELLUM_CHUNK_CACHE, VELLUM_CHUNK_CACHE_SIZE
                     like --chunk-cache and --chunk-cache-size for all commands that read templates in stores
  VELLUM_CONFIG      like --config
  VELLUM_LOG         like --log";

/// Create, clone, check, convert and serve virtual disks (raw, qcow2, vellum)
#[derive(Parser)]
#[command(name = "vellum", version, long_version = version::long(), max_term_width = 100, after_help = ENVIRONMENT)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Read the configuration from FILE instead of /etc/vellum/vellum.toml
    #[arg(long, global = true, value_name = "FILE", help_heading = "Global options")]
    config: Option<PathBuf>,
    /// Log level on stderr: off, error, warn (default), info, debug or trace; or levels for modules, such as warn,vellum_export=debug
    #[arg(long, global = true, value_name = "LEVEL", value_parser = log::parse, help_heading = "Global options")]
    log: Option<String>,
}

#[derive(Subcommand)]
enum Command {
    Create(commands::create::Args),
    Clone(commands::clone::Args),
    Info(commands::info::Args),
    Map(commands::map::Args),
    Check(commands::check::Args),
    Convert(commands::convert::Args),
    Compare(commands::compare::Args),
    Diff(commands::delta::DiffArgs),
    Apply(commands::delta::ApplyArgs),
    Measure(commands::measure::Args),
    Dd(commands::dd::Args),
    Bench(commands::bench::Args),
    Amend(commands::amend::Args),
    Bitmap(commands::bitmap::Args),
    Backup(commands::backup::Args),
    Recover(commands::recover::Args),
    Journal(commands::journal::Args),
    Key(commands::key::Args),
    Resize(commands::resize::Args),
    Flatten(commands::flatten::Args),
    Rebase(commands::rebase::Args),
    Commit(commands::commit::Args),
    Job(commands::job::Args),
    Flash(commands::flash::Args),
    Tier(commands::tier::Args),
    Snapshot(commands::snapshot::Args),
    Serve(Box<commands::serve::Args>),
    Stats(commands::stats::Args),
    Pause(commands::pause::Args),
    Resume(commands::pause::ResumeArgs),
    Limits(commands::limits::Args),
    Prefetch(commands::prefetch::Args),
    Trace(commands::trace::Args),
    Client(commands::client::Args),
    Export(commands::export::Args),
    Migrate(commands::migrate::Args),
    Template(commands::template::Args),
    Quickstart(commands::quickstart::Args),
    Completions(commands::completions::Args),
    Man(commands::man::Args),
}

/// Prints help, or what is wrong with the arguments.
fn print_usage(error: &clap::Error) -> ExitCode {
    if error.use_stderr() {
        // Where that cannot be written there is nowhere left to say so.
        drop(error.print());
        // As with qemu-img: 2 would be an answer, that an image is corrupt or could not be opened.
        return ExitCode::FAILURE;
    }
    output::say_piece(&match std::io::stdout().is_terminal() {
        true => error.render().ansi().to_string(),
        false => error.render().to_string(),
    });
    output::settle("help", true, ExitCode::SUCCESS)
}

fn main() -> ExitCode {
    progress::survive_requests();
    let code = carry_out();
    vellum_daemon::end_programs();
    vellum_daemon::wait_for_closed(CLOSING_TIME);
    log::finish();
    code
}

/// The words of the command line. Under the name of another program they are in its words.
fn words() -> Result<Vec<OsString>, ExitCode> {
    let words: Vec<OsString> = std::env::args_os().collect();
    let name = words.first().and_then(|path| Path::new(path).file_name()).map(OsStr::to_owned);
    let translated = match name.as_deref().and_then(OsStr::to_str) {
        Some(qemu_img::NAME) => qemu_img::translate(&words[1..]).map_err(|why| vec![why]),
        Some(qemu_nbd::NAME) => {
            spoken::as_qemu_nbd();
            qemu_nbd::translate(&words[1..])
        }
        _ => return Ok(words),
    };
    protocol::as_other_program();
    match translated {
        Ok(qemu_img::Request::Run(words)) => {
            // Of qemu-nbd it is known already.
            if words.get(1).is_some_and(|ours| ours == "export") {
                spoken::as_qemu_nbd_that_lists();
            }
            words.get(1).and_then(|ours| ours.to_str()).into_iter().for_each(spoken::as_qemu_command);
            Ok(words)
        }
        Ok(qemu_img::Request::Say(text)) => {
            output::say(&text);
            Err(output::settle("help", true, ExitCode::SUCCESS))
        }
        Err(lines) => {
            let name = name.unwrap_or_default();
            lines.iter().for_each(|line| output::complain(&format!("{}: {line}", name.display())));
            Err(ExitCode::FAILURE)
        }
    }
}

/// The command line, with what the configuration file adds to it.
fn read_command_line() -> Result<Cli, ExitCode> {
    let usage = |error: clap::Error| print_usage(&error);
    let words = words()?;
    let cli = Cli::try_parse_from(&words).map_err(usage)?;
    let mut config = config::load(cli.config.as_deref(), &Cli::command()).map_err(|error| {
        output::complain(&format!("vellum: {}", error.chain()));
        ExitCode::FAILURE
    })?;
    log::start(cli.log.as_deref(), config.log.as_deref());
    config.publish_dirs();
    if !config.has_defaults() {
        return Ok(cli);
    }
    let matches = config.apply(Cli::command()).try_get_matches_from(&words).map_err(usage)?;
    Cli::from_arg_matches(&matches).map_err(usage)
}

fn carry_out() -> ExitCode {
    let cli = match read_command_line() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let (name, result) = match cli.command {
        Command::Create(args) => ("create", commands::create::run(args)),
        Command::Clone(args) => ("clone", commands::clone::run(&args)),
        Command::Info(args) => ("info", commands::info::run(&args)),
        Command::Map(args) => ("map", commands::map::run(&args)),
        Command::Check(args) => ("check", commands::check::run(&args)),
        Command::Convert(args) => ("convert", commands::convert::run(args)),
        Command::Compare(args) => ("compare", commands::compare::run(&args)),
        Command::Diff(args) => ("diff", commands::delta::run_diff(&args)),
        Command::Apply(args) => ("apply", commands::delta::run_apply(&args)),
        Command::Measure(args) => ("measure", commands::measure::run(&args)),
        Command::Dd(args) => ("dd", commands::dd::run(&args)),
        Command::Bench(args) => ("bench", commands::bench::run(&args)),
        Command::Amend(args) => ("amend", commands::amend::run(&args)),
        Command::Backup(args) => ("backup", commands::backup::run(&args)),
        Command::Bitmap(args) => ("bitmap", commands::bitmap::run(&args)),
        Command::Recover(args) => ("recover", commands::recover::run(&args)),
        Command::Key(args) => ("key", commands::key::run(&args)),
        Command::Journal(args) => ("journal", commands::journal::run(&args)),
        Command::Resize(args) => ("resize", commands::resize::run(&args)),
        Command::Flash(args) => ("flash", commands::flash::run(&args)),
        Command::Tier(args) => ("tier", commands::tier::run(&args)),
        Command::Flatten(args) => ("flatten", commands::flatten::run(&args)),
        Command::Commit(args) => ("commit", commands::commit::run(&args)),
        Command::Job(args) => ("job", commands::job::run(&args)),
        Command::Rebase(args) => ("rebase", commands::rebase::run(&args)),
        Command::Snapshot(args) => ("snapshot", commands::snapshot::run(&args)),
        Command::Serve(args) => ("serve", commands::serve::run(*args)),
        Command::Stats(args) => ("stats", commands::stats::run(&args)),
        Command::Pause(args) => ("pause", commands::pause::run(&args)),
        Command::Resume(args) => ("resume", commands::pause::resume(&args)),
        Command::Prefetch(args) => ("prefetch", commands::prefetch::run(&args)),
        Command::Trace(args) => ("trace", commands::trace::run(&args)),
        Command::Client(args) => ("client", commands::client::run(&args)),
        Command::Limits(args) => ("limits", commands::limits::run(&args)),
        Command::Export(args) => ("export", commands::export::run(&args)),
        Command::Migrate(args) => ("migrate", commands::migrate::run(&args)),
        Command::Template(args) => ("template", commands::template::run(&args)),
        Command::Quickstart(args) => ("quickstart", commands::quickstart::run(&args)),
        Command::Completions(args) => ("completions", commands::completions::run(&args, Cli::command())),
        Command::Man(args) => ("man", commands::man::run(&args, Cli::command())),
    };
    let is_success = result.is_ok();
    let code = result.unwrap_or_else(|failure| {
        log::note(&format!("vellum {name}: {}", failure.line()));
        ExitCode::from(failure.code)
    });
    output::settle(name, is_success, code)
}
