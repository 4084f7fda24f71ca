//! The only place that prints.

use serde::Serialize;

/// A line of an answer.
#[expect(clippy::print_stdout, reason = "answers go to stdout, and only here")]
pub(crate) fn say(line: &str) {
    println!("{line}");
}

/// A line that is no answer: what went wrong, what is being done.
#[expect(clippy::print_stderr, reason = "everything that is no answer goes to stderr, and only here")]
pub(crate) fn complain(line: &str) {
    eprintln!("{line}");
}

/// An answer as JSON, laid out as `qemu-img` lays it out.
pub(crate) fn say_json(value: &impl Serialize) {
    let formatter = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    let mut text = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut text, formatter);
    value.serialize(&mut serializer).expect("what is answered can be written as JSON");
    say(&String::from_utf8(text).expect("JSON is text"));
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
