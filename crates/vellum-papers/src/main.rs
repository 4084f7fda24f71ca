//! `vellum-papers`: figures of papers, reproduced on modelled drives in virtual time.
//!
//! ```text
//!   postmark ─┐                 ┌─ the engine itself (vellum-format)       ┐
//!   a trace ──┴─ requests ─▶ player ─ the order of operations of old drivers ├─▶ modelled drive ─▶ time, what reached the medium
//!
//!   commands   a paper each: which runs, and its rows beside ours
//!     fvd      runs of the paper FVD        postmark, player, old_qcow2 (QEMU 0.12)
//!     selfie   runs of the paper Selfie     then (drivers of 2015), recent (what the drive remembers)
//!       model  a hard disk, an SSD, a file on a host
//! ```
//!
//! Our side is the engine that serves disks, unchanged. The other side is our own model of a program that can
//! no longer be run; a win over it is a win over that model. So each figure is printed with the paper's
//! beside it, a miss as a miss, and under the name of the drive's model.

#![forbid(unsafe_code)]

mod commands;
mod fvd;
mod model;
mod old_qcow2;
mod player;
mod postmark;
mod recent;
mod selfie;
mod then;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use vellum_lab::report::complain;

/// Reproduce figures of two papers on modelled drives in virtual time
///
/// Vellum is the engine that serves disks, unchanged. The programs that the papers compared with can no
/// longer be run, so they are modelled: an advantage over them is an advantage over those models. Each figure
/// is printed beside the paper's, met or missed.
///
/// Results, and why some figures are missed: docs/performance/papers.md
#[derive(Parser)]
#[command(name = "vellum-papers", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    paper: Paper,
}

#[derive(Subcommand)]
enum Paper {
    Fvd(commands::fvd::Args),
    Selfie(commands::selfie::Args),
}

fn main() -> ExitCode {
    let (name, result) = match Cli::parse().paper {
        Paper::Fvd(args) => ("fvd", commands::fvd::run(&args)),
        Paper::Selfie(args) => ("selfie", commands::selfie::run(&args)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("vellum-papers {name}: {}", error.chain()));
            ExitCode::FAILURE
        }
    }
}
