//! Fuzzing with libFuzzer on the stable compiler.
//!
//! cargo-fuzz wants a nightly compiler for its sanitizers. They find memory errors, which code without
//! `unsafe` does not have; panics are found by coverage, and the flags for that are stable.
//!
//! ```text
//!   fuzz/targets/NAME.rs      one target each            fuzz/seeds/NAME/       where it begins; committed
//!   fuzz/corpus/NAME/         what it found interesting  fuzz/artifacts/NAME/   what it found wrong
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Instant;

use crate::Outcome;
use crate::shell::{Stream, cargo, has, output, root, run as run_command, run_and_listen, step, target_dir};

/// A target, what its inputs may take, and how many of them `ci` tries: about 15 seconds' worth on one core.
struct Target {
    name: &'static str,
    input_bytes_max: u32,
    ci_inputs: u64,
}

const TARGETS: [Target; 26] = [
    Target { name: "qcow2_open", input_bytes_max: 96 << 10, ci_inputs: 16_000 },
    Target { name: "qcow2_ops", input_bytes_max: 512, ci_inputs: 4_000 },
    Target { name: "qcow2_journal", input_bytes_max: 1024, ci_inputs: 16_000 },
    Target { name: "qcow2_header", input_bytes_max: 4096, ci_inputs: 250_000 },
    Target { name: "native_open", input_bytes_max: 1024, ci_inputs: 4_000 },
    Target { name: "foreign_vmdk", input_bytes_max: 8192, ci_inputs: 40_000 },
    Target { name: "foreign_vdi", input_bytes_max: 1024, ci_inputs: 40_000 },
    Target { name: "foreign_vhd", input_bytes_max: 1024, ci_inputs: 40_000 },
    Target { name: "foreign_vhdx", input_bytes_max: 1024, ci_inputs: 2_000 },
    Target { name: "foreign_qed", input_bytes_max: 1024, ci_inputs: 40_000 },
    Target { name: "foreign_parallels", input_bytes_max: 1024, ci_inputs: 40_000 },
    Target { name: "foreign_dmg", input_bytes_max: 8192, ci_inputs: 40_000 },
    Target { name: "foreign_qcow1", input_bytes_max: 1024, ci_inputs: 40_000 },
    Target { name: "luks_header", input_bytes_max: 4096, ci_inputs: 500_000 },
    Target { name: "fast_medium", input_bytes_max: 4096, ci_inputs: 20_000 },
    Target { name: "guest_files", input_bytes_max: 4096, ci_inputs: 40_000 },
    Target { name: "flash_bytes", input_bytes_max: 4096, ci_inputs: 1_000_000 },
    Target { name: "delta_file", input_bytes_max: 4096, ci_inputs: 1_000_000 },
    Target { name: "boot_trace", input_bytes_max: 4096, ci_inputs: 2_000_000 },
    Target { name: "template_store", input_bytes_max: 4096, ci_inputs: 250_000 },
    Target { name: "nbd_session", input_bytes_max: 4096, ci_inputs: 250_000 },
    Target { name: "nbd_handshake", input_bytes_max: 4096, ci_inputs: 700_000 },
    Target { name: "nbd_request", input_bytes_max: 64, ci_inputs: 12_000_000 },
    Target { name: "nbd_client", input_bytes_max: 8192, ci_inputs: 100_000 },
    Target { name: "nbd_list", input_bytes_max: 4096, ci_inputs: 500_000 },
    Target { name: "vhost_request", input_bytes_max: 4096, ci_inputs: 1_000_000 },
];

/// What ends a fixed number of inputs on a machine that is far too slow for it.
const FIXED_SECONDS_MAX: u64 = 60;

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

/// Which inputs are tried.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Inputs {
    /// The same each time, on every machine: as many as the table says, from the seeds alone, drawn from the
    /// same number. What a change has to pass depends neither on luck nor on speed. No target begins after
    /// this moment.
    Fixed { end: Instant },
    /// New inputs for this long, starting from the corpus: to find what is not known yet.
    Seconds(u64),
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
        [] => every_target(Inputs::Seconds(60)),
        ["seeds"] => write_seeds(),
        [seconds] if seconds.parse::<u64>().is_ok() => {
            every_target(Inputs::Seconds(seconds.parse().expect("as just seen")))
        }
        [name, ref rest @ ..] => {
            let target = find(name)?;
            let programs = build()?;
            match *rest {
                [] => fuzz(target, &programs, Inputs::Seconds(60)),
                [seconds] if seconds.parse::<u64>().is_ok() => {
                    fuzz(target, &programs, Inputs::Seconds(seconds.parse().expect("as just seen")))
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

/// Each target; all of them run, whatever the first finds.
pub(crate) fn every_target(inputs: Inputs) -> Outcome {
    if !has("c++") && !has("g++") && !has("clang++") {
        eprintln!("skipped: fuzzing, because libFuzzer is built with a C++ compiler and there is none");
        return Ok(());
    }
    let is_over = || matches!(inputs, Inputs::Fixed { end } if Instant::now() >= end);
    if is_over() {
        eprintln!("skipped: fuzzing, because the hour is over");
        return Ok(());
    }
    let programs = build()?;
    let mut failed = Vec::new();
    for target in &TARGETS {
        if is_over() {
            eprintln!("skipped: fuzz {}, because the hour is over", target.name);
            continue;
        }
        if let Err(error) = step(&format!("fuzz {}", target.name), || fuzz(target, &programs, inputs)) {
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

/// Builds every target; where they are. With a target platform named, build scripts and macros go without
/// coverage.
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
    // A limit for what hangs, far above what any input takes on a busy machine.
    command.args(["-rss_limit_mb=512", "-timeout=60"]);
    command
}

fn fuzz(target: &Target, programs: &Path, inputs: Inputs) -> Outcome {
    let mut command = begin(target, programs);
    command.args(["-print_final_stats=1", "-verbosity=0"]);
    let corpus = match inputs {
        Inputs::Fixed { .. } => {
            // What was found before, here, is not found everywhere: this begins without it. Nor may it depend
            // on the order of a directory, or on when it is read again.
            command.args(["-seed=1", "-reload=0"]);
            command.arg(format!("-runs={}", target.ci_inputs));
            command.arg(format!("-max_total_time={FIXED_SECONDS_MAX}"));
            command.arg(format!("-seed_inputs={}", seeds(target)?));
            let corpus = target_dir().join("fuzz").join("ci-corpus").join(target.name);
            drop(fs::remove_dir_all(&corpus));
            corpus
        }
        Inputs::Seconds(seconds) => {
            command.arg(format!("-max_total_time={seconds}"));
            workspace().join("corpus").join(target.name)
        }
    };
    fs::create_dir_all(&corpus).map_err(|error| format!("{}: {error}", corpus.display()))?;
    command.arg(&corpus);
    let is_fixed = matches!(inputs, Inputs::Fixed { .. });
    if !is_fixed {
        command.arg(workspace().join("seeds").join(target.name));
    }
    let mut counts = Counts { target: target.name, inputs: 0, corpus: 0 };
    let outcome = run_and_listen(&mut command, Stream::Errors, |line| counts.read(line));
    counts.corpus = fs::read_dir(&corpus).map_or(0, Iterator::count);
    if outcome.is_ok() && is_fixed && counts.inputs < target.ci_inputs {
        eprintln!("{}: {FIXED_SECONDS_MAX} s ended it before {} inputs", target.name, target.ci_inputs);
    }
    COUNTS.lock().expect("nobody panics with it").push(counts);
    outcome.map_err(|error| {
        format!(
            "{error}\nhint: the input is in fuzz/artifacts/{name}; `cargo xtask fuzz {name} FILE` runs it again",
            name = target.name
        )
    })
}

/// The committed seeds of a target in the order of their names, as libFuzzer wants a list. It runs in fuzz/.
fn seeds(target: &Target) -> Result<String, String> {
    let dir = workspace().join("seeds").join(target.name);
    let fail = |error: std::io::Error| format!("{}: {error}", dir.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(&dir).map_err(fail)? {
        names.push(entry.map_err(fail)?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    let paths: Vec<String> = names.iter().map(|name| format!("seeds/{}/{name}", target.name)).collect();
    Ok(paths.join(","))
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
