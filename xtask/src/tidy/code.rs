//! Rules for Rust.

use super::{Complaint, complaint};

/// Where `unsafe` may stand: files, or whole directories. Why each one is sound, the `// SAFETY:` above it
/// says; that it says something, the lint `undocumented_unsafe_blocks` sees to.
const UNSAFE: [&str; 5] = [
    // Aligned memory, parts of which are written before all of it is; and memory that others change
    // meanwhile.
    "crates/vellum-core/src/buffer/",
    // What the kernel is given to read and write, and calls that have no safe form.
    "crates/vellum-io/src/",
    // The functions of Ceph's library.
    "crates/vellum-remote/src/base/rbd/library.rs",
    // A second process, a signal, a limit: things a test does to its own process.
    "crates/vellum-io/tests/",
    // An allocator that counts.
    "crates/vellum-export/tests/pressure.rs",
];

/// Crates with `unsafe`; every other says that it has none.
const CRATES_WITH_UNSAFE: [&str; 3] = ["vellum-core", "vellum-io", "vellum-remote"];

/// Half of this is a good length; a file longer than this is not read. One that has to be longer says why in
/// its head: `//! Long because …`.
const LINES_MAX: usize = 800;
const LONG: &str = "//! Long because ";

pub(super) fn check(path: &str, text: &str) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    if !text.starts_with("//!") {
        complaints.push(complaint(1, "the file does not say what it is for: begin with `//!`"));
    }
    let lines = text.lines().count();
    if lines > LINES_MAX && !text.lines().any(|line| line.starts_with(LONG)) {
        complaints.push(complaint(0, format!("{lines} lines: split it, or say why not (`{LONG}…`)")));
    }
    if !UNSAFE.iter().any(|place| path.starts_with(place)) {
        let with_unsafe = text.lines().enumerate().filter(|(_, line)| has_unsafe(line));
        complaints.extend(with_unsafe.map(|(index, _)| {
            complaint(index + 1, "`unsafe` has no place here (xtask/src/tidy/code.rs says where it has)")
        }));
    }
    complaints.extend(text.lines().enumerate().filter(|(_, line)| has_run_of_spaces(line)).map(
        |(index, _)| {
            complaint(
                index + 1,
                "a message with a run of spaces: a line of it that goes on ends with a backslash",
            )
        },
    ));
    let is_root = path.ends_with("src/lib.rs") || path.ends_with("src/main.rs");
    let may = CRATES_WITH_UNSAFE.iter().any(|name| path.starts_with(&format!("crates/{name}/")));
    if is_root && !may && !path.starts_with("fuzz/") && !text.contains("#![forbid(unsafe_code)]") {
        complaints.push(complaint(0, "a crate without `unsafe` says so: `#![forbid(unsafe_code)]`"));
    }
    complaints
}

/// Whether lines of a message were joined with the spaces that began them. Columns of a table have fewer, or capitals or fields.
fn has_run_of_spaces(line: &str) -> bool {
    const RUN: &str = "         ";
    let ends_a_word =
        |before: &str| before.ends_with(|last: char| last.is_ascii_lowercase() || ",.;:".contains(last));
    let goes_on = |after: &str| {
        after
            .trim_start_matches(' ')
            .starts_with(|first: char| first.is_ascii_lowercase() || "`(".contains(first))
    };
    let is_text = |before: &str| {
        before.contains('"') && !before.trim_start().starts_with("//") && !before.ends_with("\\n")
    };
    line.match_indices(RUN).any(|(at, run)| {
        let (before, after) = (&line[..at], &line[at + run.len()..]);
        is_text(before) && ends_a_word(before) && goes_on(after)
    })
}

/// Whether there is unsafe code in a line, not just the word in a comment or in the name of a lint.
fn has_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    let mut words = code.split(|letter: char| !letter.is_alphanumeric() && !"_{(\"".contains(letter));
    let is_begin = |word: &str| ["{", "fn", "impl", "extern", "trait"].contains(&word);
    while let Some(word) = words.next() {
        if word.trim_start_matches(['{', '(']) == "unsafe" && words.next().is_some_and(is_begin) {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: &str = concat!("un", "safe { x }");

    fn whats(path: &str, text: &str) -> Vec<usize> {
        check(path, text).iter().map(|complaint| complaint.line).collect()
    }

    #[test]
    fn a_file_begins_with_its_story() {
        assert_eq!(whats("a.rs", "use std;\n"), [1]);
        assert_eq!(whats("a.rs", "//! Story.\n"), [0; 0]);
    }

    #[test]
    fn a_long_file_says_why() {
        let long = "x\n".repeat(LINES_MAX);
        assert_eq!(whats("a.rs", &format!("//! Story.\n{long}")), [0]);
        assert_eq!(whats("a.rs", &format!("//! Story.\n{LONG}it is.\n{long}")), [0; 0]);
    }

    #[test]
    fn unsafe_stays_in_its_places() {
        let text = format!("//! Story.\nlet y = {BLOCK};\n");
        assert_eq!(whats("crates/vellum/src/a.rs", &text), [2]);
        assert_eq!(whats("crates/vellum-io/src/a.rs", &text), [0; 0]);
        assert_eq!(whats("crates/vellum/src/lib.rs", "//! Story.\n"), [0]);
        assert_eq!(whats("crates/vellum-io/src/lib.rs", "//! Story.\n"), [0; 0]);
    }

    #[test]
    fn a_message_has_no_runs_of_spaces() {
        let run = " ".repeat(9);
        for text in [format!("    \"it is full, and{run}stays so\""), format!("f(\"first:{run}`cmd`\")")] {
            assert_eq!(whats("a.rs", &format!("//! Story.\n{text}\n")), [2], "{text}");
        }
        for text in [
            format!("    let x = 1;{run}// said"),
            format!("    \"idle{run}{{}} %\""),
            format!("    // \"said{run}so\""),
            format!("    \"NAME{run}STATE\""),
            "    \"a   b\"".to_owned(),
        ] {
            assert_eq!(whats("a.rs", &format!("//! Story.\n{text}\n")), [0; 0], "{text}");
        }
    }

    #[test]
    fn the_word_alone_is_not_code() {
        for code in [
            BLOCK,
            concat!("un", "safe fn f() {}"),
            concat!("pub un", "safe impl A for B {}"),
            &format!("({BLOCK})"),
        ] {
            assert!(has_unsafe(code), "{code}");
        }
        for other in
            ["#![forbid(unsafe_code)]", "// unsafe { x }", "an unsafe thing", "let unsafe_thing = 1;"]
        {
            assert!(!has_unsafe(other), "{other}");
        }
    }
}
