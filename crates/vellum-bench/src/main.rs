//! `vellum-bench`: what Vellum does and what it costs, beside other programs, in one run.
//!
//! ```text
//!   commands   an experiment each: which cases, in which order, compared how
//!     load     what a client asks, and what it sees: workloads, the generator, fio as the other opinion
//!     images   the disks that are served
//!     host     what the machine says: CPU time, the medium, the kernel
//!     report   samples become medians and ratios, lines of a table
//! ```
//!
//! The crate `vellum-lab` starts and stops the servers, and counts what they ask of the host.
//!
//! Times on a busy machine are unreliable. So whatever can be counted is counted (`sync-amplification`,
//! `replay-traces`). Where time is the point, programs take turns, each round gives one ratio per pair, and
//! the median of the rounds is reported; beside each rate is the CPU time of the server per operation, which
//! suffers least from other load.

#![forbid(unsafe_code)]

mod commands;
mod host;
mod images;
mod load;
mod report;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use vellum_lab::report::complain;

/// Measure Vellum and compare it with other programs
#[derive(Parser)]
#[command(name = "vellum-bench", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Boot(commands::boot::Args),
    Chains(commands::chains::Args),
    Chores(commands::chores::Args),
    Encryption(commands::encryption::Args),
    Engine(commands::engine::Args),
    Exports(commands::exports::Args),
    Flash(commands::flash::Args),
    FlashHits(commands::flash_hits::Args),
    FlashRecovery(commands::flash_recovery::Args),
    FreeCopies(commands::free_copies::Args),
    Growing(commands::growing::Args),
    #[command(hide = true)]
    Instructions(commands::instructions::Args),
    Migrate(commands::migrate::Args),
    Nbd(commands::nbd::Args),
    Neighbours(commands::neighbours::Args),
    Prefetch(commands::prefetch::Args),
    Push(commands::push::Args),
    QemuImg(commands::closed_images::Args),
    Recovery(commands::recovery::Args),
    ReplayTraces(commands::replay_traces::Args),
    SlowFlush(commands::slow_flush::Args),
    Snapshots(commands::snapshots::Args),
    SyncAmplification(commands::sync_amplification::Args),
    Tier(commands::tier::Args),
    Writers(commands::writers::Args),
}

fn main() -> ExitCode {
    let (name, result) = match Cli::parse().command {
        Command::Boot(args) => ("boot", commands::boot::run(&args)),
        Command::Chains(args) => ("chains", commands::chains::run(&args)),
        Command::Chores(args) => ("chores", commands::chores::run(&args)),
        Command::Encryption(args) => ("encryption", commands::encryption::run(&args)),
        Command::Engine(args) => ("engine", commands::engine::run(&args)),
        Command::Exports(args) => ("exports", commands::exports::run(&args)),
        Command::Flash(args) => ("flash", commands::flash::run(&args)),
        Command::FlashHits(args) => ("flash-hits", commands::flash_hits::run(&args)),
        Command::FlashRecovery(args) => ("flash-recovery", commands::flash_recovery::run(&args)),
        Command::FreeCopies(args) => ("free-copies", commands::free_copies::run(&args)),
        Command::Growing(args) => ("growing", commands::growing::run(&args)),
        Command::Instructions(args) => ("instructions", commands::instructions::run(&args)),
        Command::Nbd(args) => ("nbd", commands::nbd::run(&args)),
        Command::Neighbours(args) => ("neighbours", commands::neighbours::run(&args)),
        Command::Migrate(args) => ("migrate", commands::migrate::run(&args)),
        Command::Prefetch(args) => ("prefetch", commands::prefetch::run(&args)),
        Command::Push(args) => ("push", commands::push::run(&args)),
        Command::QemuImg(args) => ("qemu-img", commands::closed_images::run(&args)),
        Command::Recovery(args) => ("recovery", commands::recovery::run(&args)),
        Command::ReplayTraces(args) => ("replay-traces", commands::replay_traces::run(&args)),
        Command::SlowFlush(args) => ("slow-flush", commands::slow_flush::run(&args)),
        Command::Snapshots(args) => ("snapshots", commands::snapshots::run(&args)),
        Command::SyncAmplification(args) => ("sync-amplification", commands::sync_amplification::run(&args)),
        Command::Tier(args) => ("tier", commands::tier::run(&args)),
        Command::Writers(args) => ("writers", commands::writers::run(&args)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("vellum-bench {name}: {}", error.chain()));
            ExitCode::FAILURE
        }
    }
}
