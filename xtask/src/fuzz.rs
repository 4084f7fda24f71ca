//! Fuzzing with libFuzzer on the stable compiler.
//!
//! cargo-fuzz wants a nightly one for the sake of its sanitizers. They find errors of memory, which code without
//! `unsafe` does not have; what finds panics is the coverage, and the flags for that are stable.
//!
//! ```text
//!   fuzz/targets/NAME.rs      one target each            fuzz/seeds/NAME/       where it begins; committed
//!   fuzz/corpus/NAME/         what it found interesting  fuzz/artifacts/NAME/   what it found wrong
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use crate::Outcome;
use crate::shell::{Stream, cargo, has, output, root, run as run_command, run_and_listen, step, target_dir};

/// A target and what its inputs may take.
struct Target {
    name: &'static str,
    input_bytes_max: u32,
}

const TARGETS: [Target; 8] = [
    Target { name: "qcow2_open", input_bytes_max: 96 << 10 },
    Target { name: "qcow2_ops", input_bytes_max: 512 },
    Target { name: "qcow2_journal", input_bytes_max: 1024 },
    Target { name: "qcow2_header", input_bytes_max: 4096 },
    Target { name: "native_open", input_bytes_max: 1024 },
    Target { name: "nbd_session", input_bytes_max: 4096 },
    Target { name: "nbd_handshake", input_bytes_max: 4096 },
    Target { name: "nbd_request", input_bytes_max: 64 },
];

/// What makes libFuzzer see which way an input went.
const COVERAGE: [&str; 6] = [
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];

/// What one run of a target came to.
struct Counts {
    target: &'static str,
    /// Inputs that were tried.
    inputs: u64,
    /// Inputs that are kept, because each went a way of its own.
    corpus: usize,
}

static COUNTS: Mutex<Vec<Counts>> = Mutex::new(Vec::new());

impl Counts {
    /// libFuzzer prints `stat::number_of_executed_units: N` when it ends.
    fn read(&mut self, line: &str) {
        let number = line.strip_prefix("stat::number_of_executed_units:");
        self.inputs = number.and_then(|number| number.trim().parse().ok()).unwrap_or(self.inputs);
    }
}

/// Where the random choices begin.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    /// With the same number each time: what a change has to pass does not depend on luck.
    Same,
    /// Anywhere: to find what is not known yet.
    New,
}

/// What was fuzzed so far.
pub(crate) fn print_counts() {
    for Counts { target, inputs, corpus } in &*COUNTS.lock().expect("nobody panics with it") {
        eprintln!("fuzz {target:19} {inputs:>12} inputs, {corpus} kept");
    }
}

pub(crate) fn run(arguments: &[String]) -> Outcome {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [] => every_target(60, Start::New),
        ["seeds"] => write_seeds(),
        [seconds] if seconds.parse::<u64>().is_ok() => {
            every_target(seconds.parse().expect("as just seen"), Start::New)
        }
        [name, ref rest @ ..] => {
            let target = find(name)?;
            let programs = build()?;
            match *rest {
                [] => fuzz(target, &programs, 60, Start::New),
                [seconds] if seconds.parse::<u64>().is_ok() => {
                    fuzz(target, &programs, seconds.parse().expect("as just seen"), Start::New)
                }
                ["--", ref own @ ..] => run_command(begin(target, &programs).args(own)),
                // The target runs in fuzz/, the files are named from where its caller is.
                ref files => {
                    let files: Result<Vec<PathBuf>, _> = files.iter().map(std::path::absolute).collect();
                    run_command(begin(target, &programs).args(files.map_err(|error| error.to_string())?))
                }
            }
        }
    }
}

/// Each target for so long; all of them run, whatever the first finds.
pub(crate) fn every_target(seconds: u64, start: Start) -> Outcome {
    if !has("c++") && !has("g++") && !has("clang++") {
        eprintln!("skipped: fuzzing, because libFuzzer is built with a C++ compiler and there is none");
        return Ok(());
    }
    let programs = build()?;
    let mut failed = Vec::new();
    for target in &TARGETS {
        if let Err(error) = step(&format!("fuzz {}", target.name), || fuzz(target, &programs, seconds, start))
        {
            eprintln!("{error}");
            failed.push(target.name);
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("found something: {}", failed.join(", "))) }
}

fn find(name: &str) -> Result<&'static Target, String> {
    let names = || TARGETS.map(|target| target.name).join(", ");
    TARGETS
        .iter()
        .find(|target| target.name == name)
        .ok_or_else(|| format!("no target {name}: there are {}", names()))
}

fn workspace() -> PathBuf {
    root().join("fuzz")
}

/// Builds every target; where they are. With a target platform named, build scripts and macros go without coverage.
fn build() -> Result<PathBuf, String> {
    let host = output(Command::new("rustc").arg("-vV"))?;
    let host =
        host.lines().find_map(|line| line.strip_prefix("host: ")).ok_or("rustc does not say its host")?;
    let target_dir = target_dir().join("fuzz");
    let mut command = cargo(&["build", "--release", "--locked", "--bins", "--target", host]);
    command.arg("--target-dir").arg(&target_dir).current_dir(workspace());
    command.env("CARGO_ENCODED_RUSTFLAGS", COVERAGE.join("\x1f"));
    run_command(&mut command).map_err(|error| {
        format!("{error}\nhint: when a dependency changed, `cargo update --workspace` in fuzz/ brings its lock file after")
    })?;
    Ok(target_dir.join(host).join("release"))
}

/// The program of a target, with the limits that every input is held to.
fn begin(target: &Target, programs: &Path) -> Command {
    let artifacts = workspace().join("artifacts").join(target.name);
    drop(fs::create_dir_all(&artifacts));
    let mut command = Command::new(programs.join(target.name));
    command.current_dir(workspace());
    command.arg(format!("-artifact_prefix={}/", artifacts.display()));
    command.arg(format!("-max_len={}", target.input_bytes_max));
    command.args(["-rss_limit_mb=512", "-timeout=20"]);
    command
}

fn fuzz(target: &Target, programs: &Path, seconds: u64, start: Start) -> Outcome {
    let corpus = workspace().join("corpus").join(target.name);
    fs::create_dir_all(&corpus).map_err(|error| format!("{}: {error}", corpus.display()))?;
    let mut command = begin(target, programs);
    command.args([&format!("-max_total_time={seconds}"), "-print_final_stats=1", "-verbosity=0"]);
    if start == Start::Same {
        command.arg("-seed=1");
    }
    command.arg(&corpus).arg(workspace().join("seeds").join(target.name));
    let mut counts = Counts { target: target.name, inputs: 0, corpus: 0 };
    let outcome = run_and_listen(&mut command, Stream::Errors, |line| counts.read(line));
    counts.corpus = fs::read_dir(&corpus).map_or(0, Iterator::count);
    COUNTS.lock().expect("nobody panics with it").push(counts);
    outcome.map_err(|error| {
        format!(
            "{error}\nhint: the input is in fuzz/artifacts/{name}; `cargo xtask fuzz {name} FILE` runs it again",
            name = target.name
        )
    })
}

fn write_seeds() -> Outcome {
    let mut command = cargo(&["run", "--release", "--locked", "--example", "seeds", "--target-dir"]);
    command.arg(target_dir().join("fuzz")).arg("--").arg(workspace().join("seeds")).current_dir(workspace());
    run_command(&mut command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_inputs_is_read() {
        let mut counts = Counts { target: "x", inputs: 0, corpus: 0 };
        for line in ["#2 INITED", "stat::number_of_executed_units: 1234", "stat::peak_rss_mb: 60"] {
            counts.read(line);
        }
        assert_eq!(counts.inputs, 1234);
    }

    #[test]
    fn every_target_has_its_file_and_its_seeds() {
        let mut files: Vec<String> = fs::read_dir(workspace().join("targets"))
            .expect("the directory is there")
            .map(|entry| entry.expect("it can be read").file_name().to_string_lossy().into_owned())
            .collect();
        files.sort();
        let mut names = TARGETS.map(|target| format!("{}.rs", target.name));
        names.sort();
        assert_eq!(files, names);
        for target in TARGETS {
            let seeds = fs::read_dir(workspace().join("seeds").join(target.name)).map_or(0, Iterator::count);
            assert!(seeds > 0, "{} has no seeds", target.name);
        }
    }
}
