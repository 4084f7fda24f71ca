//! The command line: arguments in, one call into the library, answers out.
//!
//! Data goes to stdout, everything else to stderr. A failure is one line, with its causes and, where there is one, the
//! remedy; exit codes are those of `qemu-img`. One file in `commands/` for each command; its `Args` are its help.

#![forbid(unsafe_code)]

mod args;
mod commands;
mod output;
mod progress;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Copy-on-write disks for virtual machines: create, clone, check, convert and serve images (raw, qcow2, vellum)
#[derive(Parser)]
#[command(name = "vellum", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Create(commands::create::Args),
    Info(commands::info::Args),
    Map(commands::map::Args),
    Check(commands::check::Args),
    Convert(commands::convert::Args),
    Compare(commands::compare::Args),
    Recover(commands::recover::Args),
    Journal(commands::journal::Args),
    Resize(commands::resize::Args),
    Snapshot(commands::snapshot::Args),
    Serve(commands::serve::Args),
    Stats(commands::stats::Args),
    Pause(commands::pause::Args),
    Resume(commands::pause::ResumeArgs),
    Limits(commands::limits::Args),
    Template(commands::template::Args),
    Quickstart(commands::quickstart::Args),
}

fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_env("VELLUM_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let is_failure = error.use_stderr();
            // Help that nobody reads is no failure.
            drop(error.print());
            // As with qemu-img: 2 would be an answer, that an image is corrupt or could not be opened.
            return if is_failure { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    let (name, result) = match cli.command {
        Command::Create(args) => ("create", commands::create::run(args)),
        Command::Info(args) => ("info", commands::info::run(&args)),
        Command::Map(args) => ("map", commands::map::run(&args)),
        Command::Check(args) => ("check", commands::check::run(&args)),
        Command::Convert(args) => ("convert", commands::convert::run(args)),
        Command::Compare(args) => ("compare", commands::compare::run(&args)),
        Command::Recover(args) => ("recover", commands::recover::run(&args)),
        Command::Journal(args) => ("journal", commands::journal::run(&args)),
        Command::Resize(args) => ("resize", commands::resize::run(&args)),
        Command::Snapshot(args) => ("snapshot", commands::snapshot::run(&args)),
        Command::Serve(args) => ("serve", commands::serve::run(args)),
        Command::Stats(args) => ("stats", commands::stats::run(&args)),
        Command::Pause(args) => ("pause", commands::pause::run(&args)),
        Command::Resume(args) => ("resume", commands::pause::resume(&args)),
        Command::Limits(args) => ("limits", commands::limits::run(&args)),
        Command::Template(args) => ("template", commands::template::run(&args)),
        Command::Quickstart(args) => ("quickstart", commands::quickstart::run(&args)),
    };
    result.unwrap_or_else(|failure| {
        output::complain(&format!("vellum {name}: {}", failure.error.chain()));
        ExitCode::from(failure.code)
    })
}
