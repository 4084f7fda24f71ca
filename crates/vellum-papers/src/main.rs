//! `vellum-papers`: figures of papers, reproduced on modelled drives in virtual time.
//!
//! ```text
//!   postmark ─┐                 ┌─ the engine itself (vellum-format)       ┐
//!   a trace ──┴─ requests ─▶ player ─ the order of operations of old drivers ├─▶ modelled drive ─▶ time, what reached the medium
//!
//!   commands   a paper each: which runs, its rows beside ours, its figures
//!     fvd      runs of the paper FVD        postmark, player, old_qcow2 (QEMU 0.12)
//!     selfie   runs of the paper Selfie     then (drivers of 2015), recent (what the drive remembers)
//!     fast16   runs of the paper on sync amplification, on the images of Selfie
//!     hvd      runs of the paper on two media: machines, and the tiers of an image
//!     cowcache runs of the paper on flash caching: its rival, its guests, the flash cache
//!     run      all of them ─▶ report: a table, a page, its data
//!       model  a hard disk, an SSD, a file on a host
//! ```
//!
//! Our side is the engine that serves disks, unchanged. The other side is our own model of a program that can
//! no longer be run; a win over it is a win over that model. So each figure is printed with the paper's
//! beside it, a miss as a miss, and under the name of the drive's model.

#![forbid(unsafe_code)]

mod commands;
mod cowcache;
mod fast16;
mod fvd;
mod hvd;
mod model;
mod old_qcow2;
mod player;
mod postmark;
mod recent;
mod report;
mod selfie;
mod then;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use vellum_lab::report::complain;

/// Make the figures of papers again on modelled drives in virtual time
///
/// Vellum is the engine that serves disks, unchanged. The programs that the papers compared with can no
/// longer be run, so they are modelled: an advantage over them is an advantage over those models. Each figure
/// is printed beside the paper's with their ratio: reproduced, better, worse or not comparable.
///
/// Results, and why some figures are missed: docs/performance/papers.md
#[derive(Parser)]
#[command(name = "vellum-papers", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(commands::run::Args),
}

fn main() -> ExitCode {
    let Command::Run(args) = Cli::parse().command;
    match commands::run::run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("vellum-papers run: {}", error.chain()));
            ExitCode::FAILURE
        }
    }
}
