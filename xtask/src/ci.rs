//! Everything a change must pass, cheap steps first; and the long version of the same.
//!
//! A step that fails does not keep the others from running: one run reports everything. The test runner's
//! last line is also the last line here.
//!
//! A machine that is too slow for all of it in an hour gets no fuzzing, or less of it, and no `deny`: what
//! they find does not depend on this one change, and a check that is cut off has checked nothing. What was
//! left out is said at the end.

use std::time::{Duration, Instant};

use crate::shell::{cargo, print_steps, run as run_command, step};
use crate::{Outcome, deny, fuzz, test, tidy};

/// The defaults of `soak`: minutes for each fuzz target, the part of the matrix, the scale of the random
/// tests.
const SOAK_MINUTES: u64 = 10;
const SOAK_PART: &str = "1/1";
const SOAK_SCALE: &str = "20";

/// After this time `ci` begins nothing that it can do without.
const ENOUGH: Duration = Duration::from_secs(60 * 60);

pub(crate) fn run() -> Outcome {
    let end = Instant::now() + ENOUGH;
    let mut failed = Failed::default();
    cheap_steps(&mut failed);
    let (report, tests) = test::everything(&test::Plan { filters: &[], profile: "ci", variables: &[] });
    failed.note("tests", tests);
    failed.note("fuzzing", fuzz::every_target(fuzz::Inputs::Fixed { end }));
    if Instant::now() < end {
        failed.note("deny", step("deny", deny::run));
    } else {
        eprintln!("skipped: deny, because the hour is over");
    }
    print_steps();
    fuzz::print_counts();
    report.print();
    failed.outcome()
}

/// `lint`: the steps of `ci` that run no tests. Worth its minutes before every commit.
pub(crate) fn lint() -> Outcome {
    let mut failed = Failed::default();
    cheap_steps(&mut failed);
    print_steps();
    failed.outcome()
}

fn cheap_steps(failed: &mut Failed) {
    failed.note("format", step("format", format));
    failed.note("tidy", step("tidy", tidy::run));
    failed.note("lints", step("lints", lints));
    failed.note("docs", step("docs", docs));
}

/// What makes tests by chance longer, and the crash explorer complete.
pub(crate) fn soak_variables() -> [(&'static str, &'static str); 2] {
    [("VELLUM_TEST_SCALE", SOAK_SCALE), ("VELLUM_EXPLORE", "all")]
}

/// `soak [MINUTES] [PART/PARTS]`.
pub(crate) fn soak(arguments: &[String]) -> Outcome {
    let (minutes, part) = soak_arguments(arguments)?;
    let variables: Vec<(&str, String)> = soak_variables()
        .into_iter()
        .chain([("VELLUM_FULL_MATRIX", part)])
        .map(|(name, value)| (name, value.to_owned()))
        .collect();
    let mut failed = Failed::default();
    let (report, tests) =
        test::everything(&test::Plan { filters: &[], profile: "soak", variables: &variables });
    failed.note("tests", tests);
    failed.note("fuzzing", fuzz::every_target(fuzz::Inputs::Seconds(minutes * 60)));
    print_steps();
    fuzz::print_counts();
    report.print();
    failed.outcome()
}

fn soak_arguments(arguments: &[String]) -> Result<(u64, &str), String> {
    let (mut minutes, mut part) = (SOAK_MINUTES, SOAK_PART);
    for argument in arguments {
        if let Some((number, parts)) = argument.split_once('/') {
            let is_part = match (number.parse::<u64>(), parts.parse::<u64>()) {
                (Ok(number), Ok(parts)) => (1..=parts).contains(&number),
                _ => false,
            };
            if !is_part {
                return Err(format!("{argument} is no part, such as 3/50"));
            }
            part = argument;
        } else {
            minutes = argument.parse().map_err(|_| format!("{argument} is no number of minutes"))?;
        }
    }
    Ok((minutes, part))
}

/// The fuzz targets are a workspace of their own.
fn format() -> Outcome {
    run_command(&mut cargo(&["fmt", "--all", "--check"]))?;
    run_command(&mut cargo(&["fmt", "--manifest-path", "fuzz/Cargo.toml", "--", "--check"]))
}

fn lints() -> Outcome {
    let mut command = cargo(&["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]);
    run_command(&mut command)?;
    // And without what can be left out.
    run_command(&mut cargo(&[
        "clippy",
        "-p",
        "vellum",
        "--no-default-features",
        "--locked",
        "--",
        "-D",
        "warnings",
    ]))
}

/// Including private items: the documents are for the developers of the crates, and so may link to them.
fn docs() -> Outcome {
    let mut command = cargo(&["doc", "--workspace", "--no-deps", "--document-private-items", "--locked"]);
    run_command(command.env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private_intra_doc_links"))
}

/// What went wrong, with its reason: the last line of a long output says it again.
#[derive(Default)]
struct Failed(Vec<String>);

impl Failed {
    fn note(&mut self, name: &'static str, outcome: Outcome) {
        if let Err(what) = outcome {
            eprintln!("{name}: {what}");
            let line = what.lines().next().unwrap_or_default();
            self.0.push(format!("{name} ({line})"));
        }
    }

    fn outcome(self) -> Outcome {
        if self.0.is_empty() { Ok(()) } else { Err(format!("failed: {}", self.0.join(", "))) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(words: &[&str]) -> Result<(u64, String), String> {
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        soak_arguments(&words).map(|(minutes, part)| (minutes, part.to_owned()))
    }

    #[test]
    fn a_soak_takes_minutes_and_a_part_of_the_matrix() {
        assert_eq!(arguments(&[]), Ok((10, "1/1".to_owned())));
        assert_eq!(arguments(&["3"]), Ok((3, "1/1".to_owned())));
        assert_eq!(arguments(&["2", "3/50"]), Ok((2, "3/50".to_owned())));
        for wrong in ["x", "0/4", "5/4", "1/", "-1"] {
            assert!(arguments(&[wrong]).is_err(), "{wrong}");
        }
    }
}
