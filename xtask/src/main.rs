//! The project's own chores, one command each: `cargo xtask help`.
//!
//! ```text
//!   test       packages ► build ► tests ► doc tests ► what was skipped, and why
//!   ci         format, tidy, lints, deny, docs ► test ► N inputs of each fuzz target       what `.ci/run` runs
//!   soak       the same tests, longer and over everything ► longer fuzzing ► counts
//!   dist       release build ► program, Debian package, container directory, bill of materials
//! ```
//!
//! There are no dependencies here (its tests have one), so that it is built in seconds on a fresh machine. Anything that is absent
//! on the machine is named and skipped; only a fault of the project is a failure.

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "it talks to whoever called it")]

mod apt;
mod ci;
mod deny;
mod dist;
mod explore;
mod fuzz;
mod kernel;
mod mistakes;
mod packages;
mod qemu;
mod remarks;
mod shell;
mod test;
mod tidy;

use std::process::ExitCode;

const HELP: &str = "\
cargo xtask COMMAND

  test [FILTER...]               build everything and run all tests, or those whose names contain a FILTER
  ci                             run everything a change must pass: format, tidy, lints, dependencies, docs, tests,
                                 fuzzing
  lint                           run the steps of ci that run no tests: format, tidy, lints, docs
  soak [MINUTES] [PART/PARTS]    run the random tests 20 times as long and the full test matrix, or a part of it
                                 such as 3/50, and fuzz each target for MINUTES (default 10)
  explore [WORD...]              run only the crash explorer's part of a soak, for image kinds whose test names
                                 contain a WORD, such as journal; print the totals at the end
  fuzz [TARGET] [SECONDS]        fuzz one target, or all of them, for SECONDS each (default 60)
  fuzz TARGET FILE...            run these inputs once, for example to reproduce a crash
  fuzz TARGET -- ARGUMENT...     pass arguments to libFuzzer, such as -minimize_crash=1 -runs=100000 FILE
  fuzz seeds                     regenerate fuzz/seeds
  dist [--binary FILE] [--out DIR]
                                 make what users install, in target/dist or DIR, from a release build or FILE: a stripped
                                 program, a Debian package, a directory for a container image, a bill of materials
  deny                           check licences, versions and origins of the dependencies with cargo-deny
  tidy                           check the rules of the house that no lint can check
  mistakes edit [flash]          write the source of the formats, or of the flash cache, with its seeded mistakes to
                                 target/mistakes/src, to be edited; what no longer fits is reported, and put in by hand
  mistakes record [flash]        make the patches of crates/vellum-seeded, or vellum-flash-seeded, anew from that source
  packages                       list the Debian packages that the tests need; as root, install the missing ones
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
        "lint" => ci::lint(),
        "soak" => ci::soak(rest),
        "explore" => explore::run(rest),
        "fuzz" => fuzz::run(rest),
        "deny" => deny::run(),
        "dist" => dist::run(rest),
        "tidy" => tidy::run(),
        "mistakes" => mistakes::run(rest),
        "packages" => packages::run(),
        "help" | "--help" | "-h" => {
            print!("{HELP}");
            Ok(())
        }
        other => Err(format!("unknown command {other}\n\n{HELP}")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            eprintln!("xtask {command}: {what}");
            ExitCode::FAILURE
        }
    }
}
