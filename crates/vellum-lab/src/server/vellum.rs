//! Vellum, or several builds of it side by side.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use vellum_core::{Context, Error, Result};

use super::{Cache, Server, Serving, first_line_of};

/// A build of Vellum.
#[derive(Debug, Clone)]
pub struct Vellum {
    /// What to call it.
    pub label: String,
    /// The program.
    pub path: PathBuf,
    /// More arguments for `vellum serve`.
    pub arguments: Vec<OsString>,
}

impl Vellum {
    /// The program beside this one. Under `cargo run` it is built first, so that what is measured is what is
    /// there to read.
    pub fn beside_me() -> Result<Self> {
        let me = std::env::current_exe().context(|| "can't find this program")?;
        if let Some(cargo) = std::env::var_os("CARGO") {
            // A profile's programs are in a directory of its name; only that of `dev` has another name.
            let profile = me.parent().and_then(Path::file_name).filter(|name| *name != "debug");
            let mut build = Command::new(cargo);
            build.args(["build", "--quiet", "--package", "vellum", "--profile"]);
            build.arg(profile.unwrap_or("dev".as_ref()));
            let built = build.status().context(|| format!("can't run {build:?}"))?;
            if !built.success() {
                return Err(Error::invalid(format!("{build:?} failed")));
            }
        }
        let path = me.with_file_name("vellum");
        if !path.exists() {
            return Err(Error::invalid(format!(
                "there is no {}: build it (cargo build --release -p vellum), or say --vellum PATH",
                path.display()
            )));
        }
        Ok(Self { label: "vellum".to_owned(), path, arguments: Vec::new() })
    }

    /// `[LABEL=]PATH [ARGUMENT …]`.
    pub fn parse(text: &str) -> Result<Self> {
        let mut words = text.split_whitespace();
        let first = words.next().ok_or_else(|| Error::invalid("say [LABEL=]PATH [ARGUMENT …]"))?;
        let (label, path) = first.split_once('=').unwrap_or(("vellum", first));
        let arguments = words.map(OsString::from).collect();
        Ok(Self { label: label.to_owned(), path: PathBuf::from(path), arguments })
    }
}

impl Server for Vellum {
    fn name(&self) -> String {
        self.label.clone()
    }

    fn version(&self) -> Result<String> {
        first_line_of(Command::new(&self.path).arg("--version"))
    }

    fn command(&self, serving: &Serving<'_>) -> Result<Command> {
        let mut nbd = OsString::from("unix:");
        nbd.push(serving.socket);
        let mut command = Command::new(&self.path);
        command.args(["serve", "--quiet", "--format", serving.format]);
        command.args((serving.cache == Cache::Direct).then_some("--direct"));
        command.args(&self.arguments).arg("--nbd").arg(nbd).arg(serving.image);
        Ok(command)
    }
}
