//! The only place that prints, but for the log (`log`).
//!
//! Whoever reads what is printed may go away, and a disk may be full. Neither ends the work, nor a server:
//!
//! 1. What cannot be printed never makes a panic, and never keeps a command from what it was asked to do.
//! 2. A reader that has gone (`| head`) is no failure: the exit code is that of the work.
//! 3. An answer that could not be written for another reason is a failure, named on stderr, and not mistaken for a failure
//!    of the work ([`settle`]).
//! 4. What goes to stderr is lost where stderr cannot be written; there is nowhere left to say so.

use std::borrow::Cow;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;
use std::sync::Mutex;

use serde::Serialize;
use vellum_core::lock;

use crate::spoken::spoken;

/// Why stdout takes no more. Nothing else is written to it then.
static STDOUT_FAILED: Mutex<Option<io::Error>> = Mutex::new(None);

/// A line of an answer.
pub(crate) fn say(line: &str) {
    write_out(&format!("{line}\n"));
}

/// A piece of a line of an answer, shown at once.
pub(crate) fn say_piece(piece: &str) {
    write_out(piece);
}

fn write_out(text: &str) {
    let mut failed = lock(&STDOUT_FAILED);
    if failed.is_some() {
        return;
    }
    let mut stdout = io::stdout().lock();
    if let Err(error) = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        *failed = Some(error);
    }
}

/// What another process of this program has said on its stderr, as it is.
pub(crate) fn pass_on(bytes: &[u8]) {
    drop(io::stderr().lock().write_all(bytes));
}

/// A line that is no answer: what went wrong, what is being done. It stays one line whatever names it has from outside.
pub(crate) fn complain(line: &str) {
    // One write for all of it, so that lines of several programs do not mix.
    drop(io::stderr().lock().write_all(format!("{}\n", printable(&spoken(line))).as_bytes()));
}

/// The exit code of a command that ended with `code`, once it is known whether its answer was written.
pub(crate) fn settle(name: &str, is_success: bool, code: ExitCode) -> ExitCode {
    let failed = lock(&STDOUT_FAILED).take();
    match failed {
        None => code,
        Some(error) if error.kind() == ErrorKind::BrokenPipe => code,
        Some(error) => {
            let work = if is_success { ": the command itself succeeded" } else { "" };
            complain(&format!(
                "vellum {name}: the answer could not be written to standard output ({error}){work}"
            ));
            if is_success { ExitCode::FAILURE } else { code }
        }
    }
}

/// Text from an image, as it may be shown on a terminal: control characters are written as escapes.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    if !text.chars().any(char::is_control) {
        return Cow::Borrowed(text);
    }
    let escaped =
        text.chars().map(|c| if c.is_control() { c.escape_default().to_string() } else { c.to_string() });
    Cow::Owned(escaped.collect())
}

/// An answer as JSON, laid out as `qemu-img` lays it out.
pub(crate) fn say_json(value: &impl Serialize) {
    let formatter = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    let mut text = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut text, formatter);
    value.serialize(&mut serializer).expect("what is answered can be written as JSON");
    say(&String::from_utf8(text).expect("JSON is text"));
}

/// The same on one line, among other lines of JSON.
pub(crate) fn say_json_line(value: &impl Serialize) {
    say(&serde_json::to_string(value).expect("what is answered can be written as JSON"));
}

/// The lines of a table, the headings first. The first `texts` columns are aligned on the left, the others on the right.
pub(crate) fn table<const N: usize>(
    headings: [&str; N],
    texts: usize,
    rows: impl Iterator<Item = [String; N]>,
) -> Vec<String> {
    let rows: Vec<_> = std::iter::once(headings.map(str::to_owned)).chain(rows).collect();
    let widths: [usize; N] =
        std::array::from_fn(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0));
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(widths).enumerate().map(|(column, (cell, width))| match column < texts {
            true => format!("{cell:<width$}"),
            false => format!("{cell:>width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// A number of bytes for people: three digits and a binary unit.
pub(crate) fn human_bytes(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
    let mut number = bytes as f64;
    let mut unit = 0;
    while number >= 999.5 && unit + 1 < units.len() {
        number /= 1024.0;
        unit += 1;
    }
    let digits = if number >= 99.95 || unit == 0 {
        0
    } else if number >= 9.995 {
        1
    } else {
        2
    };
    let text = format!("{number:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} {}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        for (text, shown) in
            [("monday", "monday"), ("a\nb", "a\\nb"), ("\u{1b}[2Jé", "\\u{1b}[2Jé"), ("\u{9b}", "\\u{9b}")]
        {
            assert_eq!(printable(text), shown);
        }
    }

    #[test]
    fn tables_are_aligned() {
        let rows = [["a", "running", "1"], ["longer", "hung", "1000"]].map(|row| row.map(str::to_owned));
        let lines = table(["IMAGE", "STATE", "N"], 2, rows.into_iter());
        assert_eq!(lines, ["IMAGE   STATE       N", "a       running     1", "longer  hung     1000"]);
        assert_eq!(table(["NAME", "N"], 1, std::iter::empty()), ["NAME  N"]);
    }

    #[test]
    fn bytes_for_people() {
        for (bytes, text) in [
            (0, "0 B"),
            (512, "512 B"),
            (4096, "4 KiB"),
            (331_776, "324 KiB"),
            (1 << 20, "1 MiB"),
            (1_572_864, "1.5 MiB"),
            (10_737_418_240, "10 GiB"),
            (1023 << 10, "1 MiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(human_bytes(bytes), text, "{bytes}");
        }
    }
}
