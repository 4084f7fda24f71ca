//! `cargo xtask explore [WORD…]`: the crash explorer's part of a soak alone, over all programs of three
//! steps, with a sum.
//!
//! Each test prints `explored SUBJECT: 656 programs, …`: numbers with their names. These are added up.

use std::collections::BTreeMap;

use crate::Outcome;
use crate::ci::soak_variables;
use crate::remarks::EXPLORED;
use crate::shell::{Stream, cargo, run_and_listen};

/// What is counted, as the explorer words it, and how the sum is shown.
const COUNTED: [&str; 7] =
    ["programs", "crashes", "states", "judged", "nested", "seen by others", "violations"];
/// The time of processors, in seconds.
const SECONDS: &str = "s of a core";

/// The sum of what was said.
#[derive(Default)]
struct Total(BTreeMap<&'static str, f64>);

impl Total {
    /// Adds what a line says; one that says nothing of this kind adds nothing.
    fn add(&mut self, line: &str) {
        let Some((_, said)) = line.split_once(EXPLORED) else { return };
        for part in said.split([',', ';', ':']) {
            let Some((number, what)) = part.trim().split_once(' ') else { continue };
            let known = COUNTED.into_iter().chain([SECONDS]).find(|known| *known == what);
            if let (Some(what), Ok(number)) = (known, number.parse::<f64>()) {
                *self.0.entry(what).or_default() += number;
            }
        }
    }

    fn show(&self) -> String {
        let of = |what: &str| self.0.get(what).copied().unwrap_or_default();
        let counts: Vec<String> = COUNTED.map(|what| format!("{:.0} {what}", of(what))).to_vec();
        let seconds = of(SECONDS);
        let rate = of("states") / seconds.max(0.1);
        format!(
            "explored in all: {}; {seconds:.1} {SECONDS}, {rate:.0} states per second\n(a leak is a violation)",
            counts.join(", ")
        )
    }
}

pub(crate) fn run(words: &[String]) -> Outcome {
    let mut total = Total::default();
    let mut command = cargo(&["test", "--profile", "ci", "--locked", "--test", "explore", "--test", "tiers"]);
    command.args(["-p", "vellum-format", "-p", "vellum-flash"]);
    // One subject after the other: each takes all cores.
    command.args(["--", "--nocapture", "--test-threads=1"]).args(words);
    command.envs(soak_variables());
    let outcome = run_and_listen(&mut command, Stream::Errors, |line| total.add(line));
    eprintln!("\n{}", total.show());
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_subjects_say_is_added_up() {
        let mut total = Total::default();
        for line in [
            "test journal ... explored qcow2, 4 KiB clusters: 3 programs, 5 crashes, 100 states, 150 judged, 7 nested, \
             2 seen by others, 0 violations; 0.5 s of a core, 200 states per second",
            "explored raw: 1 programs, 1 crashes, 50 states, 50 judged, 0 nested, 0 seen by others, 1 violations; 0.5 s \
             of a core, 100 states per second",
            "test result: ok. 2 passed; 0 failed",
        ] {
            total.add(line);
        }
        let shown = total.show();
        let expected = "explored in all: 4 programs, 6 crashes, 150 states, 200 judged, 7 nested, 2 seen by others, \
                        1 violations; 1.0 s of a core, 150 states per second";
        assert_eq!(shown.lines().next(), Some(expected));
    }
}
