//! `cargo xtask test`: packages ► build ► tests ► doc tests ► what was skipped ► the runner's summary.
//!
//! The tests are run by cargo-nextest where it is installed, which gives every test its own process and ends
//! what hangs; else by `cargo test`. The summary is the runner's own, remembered, and printed at the very
//! end.

use std::fs;
use std::process::Command;

use crate::kernel::KERNELS;
use crate::remarks::{self, EXPLORED, Remark, SKIPPED};
use crate::shell::{Stream, cargo, output, run as run_command, run_and_listen, step, target_dir};
use crate::{Outcome, packages};

/// How long, and over how much.
pub(crate) struct Plan<'a> {
    /// Only tests whose names contain one of these; all, if there are none.
    pub(crate) filters: &'a [String],
    /// The profile of `.config/nextest.toml`.
    pub(crate) profile: &'a str,
    /// The environment variables that the tests get.
    pub(crate) variables: &'a [(&'a str, String)],
}

/// What the runner came to, for the end of everything.
#[derive(Default)]
pub(crate) struct Report {
    summary: Vec<String>,
    skips: Vec<Remark>,
    explored: Vec<Remark>,
}

impl Report {
    /// Says what was skipped, and then what the runner said last.
    pub(crate) fn print(&self) {
        eprintln!();
        for Remark { what, test } in &self.explored {
            eprintln!("{test}: {what}");
        }
        eprint!("{}", remarks::show_skips(&self.skips));
        for line in &self.summary {
            eprintln!("{line}");
        }
    }
}

pub(crate) fn run(filters: &[String]) -> Outcome {
    let (report, outcome) = everything(&Plan { filters, profile: "ci", variables: &[] });
    report.print();
    outcome
}

/// Each step, whatever the one before came to, unless there is nothing to run.
pub(crate) fn everything(plan: &Plan<'_>) -> (Report, Outcome) {
    let mut report = Report::default();
    drop(step("packages", || {
        packages::get();
        Ok(())
    }));
    let nextest = output(&mut cargo(&["nextest", "--version"])).is_ok();
    if !nextest {
        eprintln!(
            "cargo-nextest is not installed; `cargo test` does it too, with one process for many tests"
        );
    }
    let built = step("build", || {
        let command: &[&str] = if nextest {
            &["nextest", "run", "--no-run", "--cargo-profile", "ci"]
        } else {
            &["test", "--no-run", "--profile", "ci"]
        };
        run_command(cargo(command).args(["--workspace", "--locked"]))
    });
    if built.is_err() {
        return (report, built);
    }
    let tests =
        step("tests", || if nextest { by_nextest(plan, &mut report) } else { by_cargo(plan, &mut report) });
    // Filters are the runner's, and name tests of its own.
    let doc_tests = if plan.filters.is_empty() {
        step("doc tests", || {
            run_command(&mut cargo(&[
                "test",
                "--doc",
                "--workspace",
                "--locked",
                "--profile",
                "ci",
                "--quiet",
            ]))
        })
    } else {
        Ok(())
    };
    (report, tests.and(doc_tests))
}

fn by_nextest(plan: &Plan<'_>, report: &mut Report) -> Outcome {
    let junit = target_dir().join("nextest").join(plan.profile).join("junit.xml");
    drop(fs::remove_file(&junit)); // an old report would be about other tests
    let mut command = cargo(&["nextest", "run", "--cargo-profile", "ci", "--workspace", "--locked"]);
    command.args(["--color", "never", "--show-progress", "none", "--profile", plan.profile]);
    command.args(plan.filters);
    let mut is_summary = false;
    let outcome = run_and_listen(prepare(&mut command, plan), Stream::Errors, |line| {
        is_summary |= line.trim_start().starts_with("Summary [");
        if is_summary {
            report.summary.push(line.to_owned());
        }
    });
    if let Ok(text) = fs::read_to_string(&junit) {
        report.skips = remarks::from_junit(&text, SKIPPED);
        report.explored = remarks::from_junit(&text, EXPLORED);
    }
    outcome
}

fn by_cargo(plan: &Plan<'_>, report: &mut Report) -> Outcome {
    let mut command =
        cargo(&["test", "--workspace", "--lib", "--bins", "--tests", "--locked", "--profile", "ci"]);
    command.args(["--no-fail-fast", "--", "--show-output"]).args(plan.filters);
    let mut lines = Vec::new();
    let outcome =
        run_and_listen(prepare(&mut command, plan), Stream::Output, |line| lines.push(line.to_owned()));
    report.skips = remarks::from_libtest(&lines, SKIPPED);
    report.explored = remarks::from_libtest(&lines, EXPLORED);
    report.summary = vec![add_up(&lines)];
    outcome
}

fn prepare<'a>(command: &'a mut Command, plan: &Plan<'_>) -> &'a mut Command {
    for kernel in KERNELS {
        if let Some(dir) = kernel.dir() {
            command.env(kernel.variable, dir);
        }
    }
    for (name, value) in plan.variables {
        command.env(name, value);
    }
    command
}

/// `cargo test` has a result for each program. This is one for all.
fn add_up(lines: &[String]) -> String {
    let results: Vec<&str> = lines.iter().filter_map(|line| line.strip_prefix("test result: ")).collect();
    let count = |of: &str| -> u64 {
        let of_one = |result: &&str| {
            let words: Vec<&str> = result.split([' ', ';', '.']).filter(|word| !word.is_empty()).collect();
            words.windows(2).find(|pair| pair[1] == of).and_then(|pair| pair[0].parse::<u64>().ok())
        };
        results.iter().filter_map(of_one).sum()
    };
    let (passed, failed) = (count("passed"), count("failed"));
    format!(
        "Summary: {} tests run: {passed} passed, {failed} failed, {} ignored",
        passed + failed,
        count("ignored")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_several_programs_add_up() {
        let lines = [
            "test a ... ok",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s",
            "test result: FAILED. 10 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s",
        ];
        let lines = lines.map(str::to_owned);
        assert_eq!(add_up(&lines), "Summary: 15 tests run: 13 passed, 2 failed, 1 ignored");
    }
}
