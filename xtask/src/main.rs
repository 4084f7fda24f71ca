//! The project's own chores, one command each: `cargo xtask help`.
//!
//! ```text
//!   test       packages ► build ► tests ► doc tests ► what was skipped, and why
//!   ci         format, tidy, lints, docs ► test ► so many inputs of each fuzz target       what `.ci/run` runs
//!   soak       the same tests, longer and over everything ► longer fuzzing ► counts
//! ```
//!
//! There are no dependencies here, so that it is built in seconds on a fresh machine. Whatever is absent on the machine
//! is named and gone around; only what is wrong with the project is a failure.

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "it talks to whoever called it")]

mod apt;
mod ci;
mod explore;
mod fuzz;
mod kernel;
mod packages;
mod qemu;
mod remarks;
mod shell;
mod test;
mod tidy;

use std::process::ExitCode;

const HELP: &str = "\
cargo xtask COMMAND

  test [FILTER…]                 build everything and run the tests, or those whose names contain a FILTER
  ci                             everything a change must pass: format, lints, docs, tidy, tests, fuzzing
  soak [MINUTES] [PART/PARTS]    the long ones: random tests 20 times as long, the full matrix or a part of it, such
                                 as 3/50, and MINUTES (10) of each fuzz target
  explore [WORD…]                only the crash explorer's part of a soak, for the kinds of image whose tests' names
                                 contain a WORD, such as journal; at the end, what it comes to in all
  fuzz [TARGET] [SECONDS]        fuzz one target, or each, for a minute or SECONDS
  fuzz TARGET FILE…              run these inputs once: reproduce a crash
  fuzz TARGET -- ARGUMENT…       libFuzzer's own arguments, such as -minimize_crash=1 -runs=100000 FILE
  fuzz seeds                     write fuzz/seeds anew
  tidy                           the habits no lint can check
  packages                       the Debian packages the tests want: list them; as root, install what is missing
";

/// What a command came to: `Err` has a sentence about what failed.
type Outcome = Result<(), String>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (command, rest) = match arguments.split_first() {
        Some((command, rest)) => (command.as_str(), rest),
        None => ("help", &[][..]),
    };
    let outcome = match command {
        "test" => test::run(rest),
        "ci" => ci::run(),
        "soak" => ci::soak(rest),
        "explore" => explore::run(rest),
        "fuzz" => fuzz::run(rest),
        "tidy" => tidy::run(),
        "packages" => packages::run(),
        "help" | "--help" | "-h" => {
            print!("{HELP}");
            Ok(())
        }
        other => Err(format!("there is no command {other}; these there are:\n\n{HELP}")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            eprintln!("xtask {command}: {what}");
            ExitCode::FAILURE
        }
    }
}
