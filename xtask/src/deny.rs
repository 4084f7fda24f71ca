//! Licences, versions and origins of the dependencies, by cargo-deny. The rules are in `deny.toml`.
//!
//! cargo-deny is taken from the path; where it is absent, it is built once into `target/tools`. Without a
//! registry to get it from this step is skipped, and so are known vulnerabilities where their database cannot
//! be fetched: neither is a fault of the project.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Outcome;
use crate::shell::{cargo, has, output, root, run as run_command, target_dir};

/// The version that is built where none is installed.
const PACKAGE: &str = "cargo-deny@0.20.2";

/// How it is built.
const QUICKLY_BUILT: [(&str, &str); 4] =
    [("OPT_LEVEL", "0"), ("LTO", "off"), ("CODEGEN_UNITS", "16"), ("DEBUG", "false")];

/// What needs nothing but the tree and the registry.
const ALWAYS: [&str; 3] = ["bans", "licenses", "sources"];

pub(crate) fn run() -> Outcome {
    let program = match program() {
        Ok(program) => program,
        Err(why) => {
            eprintln!("skipped: cargo-deny is not installed, and cannot be built: {why}");
            return Ok(());
        }
    };
    run_command(deny(&program, "check").args(ALWAYS))?;
    match output(deny(&program, "fetch").arg("db")) {
        Ok(_) => run_command(deny(&program, "check").args(["--disable-fetch", "advisories"])),
        Err(why) => {
            let reason = why.lines().last().unwrap_or_default();
            eprintln!("skipped: known vulnerabilities: their database cannot be fetched: {reason}");
            Ok(())
        }
    }
}

fn deny(program: &Path, command: &str) -> Command {
    let mut deny = Command::new(program);
    deny.args(["--locked", "--log-level", "warn", command]).current_dir(root());
    deny
}

/// Where cargo-deny is.
fn program() -> Result<PathBuf, String> {
    if has("cargo-deny") {
        return Ok("cargo-deny".into());
    }
    let tools = target_dir().join("tools");
    let built = tools.join("bin/cargo-deny");
    if !built.is_file() {
        let mut install = cargo(&["install", "--locked", "--quiet", PACKAGE, "--root"]);
        // It runs for a second, and is built for longer than that: so not optimised.
        for (setting, value) in QUICKLY_BUILT {
            install.env(format!("CARGO_PROFILE_RELEASE_{setting}"), value);
        }
        run_command(install.arg(&tools).arg("--target-dir").arg(tools.join("build")))?;
        // What it was built from is 300 MB, and is not needed again.
        std::fs::remove_dir_all(tools.join("build"))
            .map_err(|error| format!("{}: {error}", tools.display()))?;
    }
    Ok(built)
}
