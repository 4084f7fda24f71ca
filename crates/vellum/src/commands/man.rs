//! `vellum man`: the manual pages, made from the help.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Command;
use clap::builder::Resettable;
use clap_mangen::Man;
use vellum_core::{Context, Result};

use super::Outcome;
use crate::output::say_piece;

/// Write the manual pages: one for `vellum` and one for each command
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directory for the pages: vellum.1, vellum-create.1 and so on; created if it does not exist. Default: print the page of
    /// `vellum`
    #[arg(value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub(crate) fn run(args: &Args, command: Command) -> Outcome {
    // The commit is no part of the manual: pages of two builds of one version are the same.
    let mut command = command.disable_help_subcommand(true).long_version(Resettable::Reset);
    command.build();
    match &args.dir {
        Some(dir) => {
            std::fs::create_dir_all(dir)
                .context(|| format!("can't create the directory {}", dir.display()))?;
            write_all(&command, dir)?;
        }
        None => say_piece(&String::from_utf8_lossy(&page(&command)?)),
    }
    Ok(ExitCode::SUCCESS)
}

fn write_all(command: &Command, dir: &Path) -> Result<()> {
    let path = dir.join(format!("{}.1", name(command)));
    std::fs::write(&path, page(command)?).context(|| format!("can't write {}", path.display()))?;
    command.get_subcommands().filter(|sub| !sub.is_hide_set()).try_for_each(|sub| write_all(sub, dir))
}

fn name(command: &Command) -> &str {
    command.get_display_name().unwrap_or_else(|| command.get_name())
}

fn page(command: &Command) -> Result<Vec<u8>> {
    let man =
        Man::new(command.clone()).source(concat!("vellum ", env!("CARGO_PKG_VERSION"))).manual("Vellum");
    let mut text = Vec::new();
    man.render(&mut text).context(|| format!("can't generate the manual page of {}", name(command)))?;
    Ok(text)
}
