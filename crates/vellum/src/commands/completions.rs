//! `vellum completions`: what a shell needs to complete the command line.

use std::process::ExitCode;

use clap::Command;
use clap_complete::{Shell, generate};

use super::Outcome;
use crate::output::say_piece;

/// Print a completion script for a shell
///
/// For bash: `vellum completions bash > ~/.local/share/bash-completion/completions/vellum`. For zsh, save the script as
/// _vellum in a directory of $fpath; for fish, as ~/.config/fish/completions/vellum.fish.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The shell
    #[arg(value_name = "SHELL", value_enum)]
    shell: Shell,
}

pub(crate) fn run(args: &Args, mut command: Command) -> Outcome {
    let mut script = Vec::new();
    generate(args.shell, &mut command, "vellum", &mut script);
    say_piece(&String::from_utf8_lossy(&script));
    Ok(ExitCode::SUCCESS)
}
