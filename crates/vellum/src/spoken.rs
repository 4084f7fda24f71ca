//! Messages in the words of the program under whose name this one was called.
//!
//! ```text
//!   vellum serve: d.qcow2 …: allow it with `--allow-dir /d` or VELLUM_ALLOW_DIRS=/d
//!        │ called as qemu-nbd, which has no such option
//!        ▼
//!   qemu-nbd: d.qcow2 …: allow it with `vellum serve --allow-dir /d` or VELLUM_ALLOW_DIRS=/d
//! ```
//!
//! 1. An option that a message advises is one of the program that was called, or is said to be of `vellum serve`.
//! 2. What is not advice is left as it is: what stands in a command of another program, and names of files. An option begins
//!    a word.
//!
//! Left out: `qemu-img`, whose commands have the options of ours under the same names, but for a few.

use std::borrow::Cow;
use std::sync::OnceLock;

use crate::getopt;
use crate::qemu_nbd;

/// Options of ours and what `qemu-nbd` calls them.
const THEIRS: &[(&str, &str)] = &[
    ("--direct", "--cache=none"),
    ("--durable", "--cache=writethrough"),
    ("--secret id=", "--object secret,id="),
    ("--temporary", "--snapshot"),
];

/// Ours, where `qemu-nbd` has an option of that name with another meaning.
const OTHER: &[&str] = &["--snapshot"];

/// Whether this program was called as `qemu-nbd`.
static IS_QEMU_NBD: OnceLock<()> = OnceLock::new();

/// From now on messages are in the words of `qemu-nbd`.
pub(crate) fn as_qemu_nbd() {
    let _ = IS_QEMU_NBD.set(());
}

/// A message as it is said.
pub(crate) fn spoken(line: &str) -> Cow<'_, str> {
    match IS_QEMU_NBD.get() {
        None => Cow::Borrowed(line),
        Some(()) => in_words_of_qemu_nbd(line),
    }
}

fn in_words_of_qemu_nbd(line: &str) -> Cow<'_, str> {
    let rest = line.strip_prefix("vellum serve: ");
    let line = rest.map_or(Cow::Borrowed(line), |rest| Cow::Owned(format!("{}: {rest}", qemu_nbd::NAME)));
    if !line.contains("--") {
        return line;
    }
    let (mut said, mut at) = (String::new(), 0);
    while let Some(found) = line[at..].find("--").map(|found| at + found) {
        said.push_str(&line[at..found]);
        let end = line[found + 2..]
            .find(|c: char| !c.is_ascii_lowercase() && c != '-')
            .map_or(line.len(), |len| found + 2 + len);
        let (option, before) = (&line[found..end], line[..found].chars().next_back());
        let theirs = THEIRS.iter().find(|(ours, _)| {
            line[found..].starts_with(ours) && (ours.len() == option.len() || ours.contains(' '))
        });
        at = end;
        match theirs {
            _ if option.len() == 2 || !matches!(before, None | Some(' ' | '`' | '(')) => {
                said.push_str(option)
            }
            _ if is_of_another(&line[..found]) => said.push_str(option),
            Some((ours, theirs)) => {
                said.push_str(theirs);
                at = found + ours.len();
            }
            None if is_theirs(option) => said.push_str(option),
            None => said.extend(["vellum serve ", option]),
        }
    }
    said.push_str(&line[at..]);
    Cow::Owned(said)
}

/// Whether what comes next stands in a command that is written out.
fn is_of_another(before: &str) -> bool {
    let is_quoted = before.matches('`').count() % 2 == 1;
    is_quoted && before.rsplit('`').next().is_some_and(|command| !command.trim().is_empty())
}

fn is_theirs(option: &str) -> bool {
    let (rows, name) = (qemu_nbd::table::rows(), option.trim_start_matches('-'));
    !OTHER.contains(&option) && getopt::long(&rows, name).is_ok_and(|row| row.long == name)
}

#[cfg(test)]
mod tests {
    use super::in_words_of_qemu_nbd;

    #[test]
    fn advice_is_in_the_words_of_the_program() {
        for (ours, theirs) in [
            ("vellum serve: d.raw: no such file", "qemu-nbd: d.raw: no such file"),
            (
                "allow it with `--allow-dir /d` or VELLUM_ALLOW_DIRS=/d",
                "allow it with `vellum serve --allow-dir /d` or VELLUM_ALLOW_DIRS=/d",
            ),
            (
                "give the secret that opens it with `--secret id=NAME,file=FILE`",
                "give the secret that opens it with `--object secret,id=NAME,file=FILE`",
            ),
            ("With --durable no write is lost", "With --cache=writethrough no write is lost"),
            ("serve it with `--snapshot NAME`", "serve it with `vellum serve --snapshot NAME`"),
            ("use --read-only to keep them", "use --read-only to keep them"),
            (
                "or use --force-share to read it while it changes",
                "or use vellum serve --force-share to read it while it changes",
            ),
            ("run `vellum migrate run --force` first", "run `vellum migrate run --force` first"),
            ("/images/--direct/d.raw -- and more", "/images/--direct/d.raw -- and more"),
        ] {
            assert_eq!(in_words_of_qemu_nbd(ours), theirs);
        }
    }
}
