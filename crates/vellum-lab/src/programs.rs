//! Programs that run to their end, such as those that make images, and the directory where images are made.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use vellum_core::{Context, Error, Result};

/// Runs a program that makes an image; what it complains of is the error.
pub fn run(command: &mut Command) -> Result<()> {
    match complaint(command)? {
        None => Ok(()),
        Some(said) => Err(Error::invalid(format!("{command:?} failed: {said}"))),
    }
}

/// As above; the answer is its complaint, verbatim.
pub fn complaint(command: &mut Command) -> Result<Option<String>> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .context(|| format!("can't run {}", command.get_program().display()))?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Ok((!output.status.success()).then_some(said))
}

/// Where images are made: the given directory, or beside this program.
pub fn dir_or_beside_me(said: Option<&PathBuf>) -> Result<PathBuf> {
    if let Some(dir) = said {
        return Ok(dir.clone());
    }
    let me = std::env::current_exe().context(|| "can't find this program")?;
    Ok(me.parent().expect("a program lies in a directory").to_owned())
}
