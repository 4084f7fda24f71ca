//! Lines of a table, and JSON for programs. The only place that prints.

use serde::Serialize;

/// What goes to stdout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// A table
    Human,
    /// JSON with all samples
    Json,
}

/// Where lines of the table go.
#[derive(Debug, Clone, Copy)]
pub struct Table(Output);

impl Table {
    /// To stdout, when nothing else goes there.
    pub fn to(output: Output) -> Self {
        Self(output)
    }

    /// A line of the table.
    pub fn say(self, line: &str) {
        match self.0 {
            Output::Human => say(line),
            Output::Json => complain(line),
        }
    }
}

#[expect(clippy::print_stdout, reason = "answers go to stdout, and only here")]
fn say(line: &str) {
    println!("{line}");
}

/// A line that is no answer.
#[expect(clippy::print_stderr, reason = "everything that is no answer goes to stderr, and only here")]
pub fn complain(line: &str) {
    eprintln!("{line}");
}

/// Everything that was seen.
pub fn say_json(report: &impl Serialize) {
    say(&serde_json::to_string_pretty(report).expect("numbers and strings"));
}

/// Why some were left out, each reason once.
pub fn tell_skipped<'a>(skipped: impl Iterator<Item = (&'a str, &'a str)>, table: Table) {
    let mut told: Vec<(&str, &str)> = Vec::new();
    for (subject, reason) in skipped {
        if !told.contains(&(subject, reason)) {
            table.say(&format!("skipped: {subject}: {reason}"));
            told.push((subject, reason));
        }
    }
}
