//! Messages in the words of the program under whose name this one was called.
//!
//! ```text
//!   vellum serve: d.qcow2 …: allow it with `--allow-dir /d` or VELLUM_ALLOW_DIRS=/d
//!        │ called as qemu-nbd, which has no such option
//!        ▼
//!   qemu-nbd: d.qcow2 …: allow it with `vellum serve --allow-dir /d` or VELLUM_ALLOW_DIRS=/d
//! ```
//!
//! 1. An option that a message advises is one of the program that was called, of the command that was given to it, or is said to be
//!    of `vellum serve`, or of that command of ours.
//! 2. What is not advice is left as it is: what stands in a command of another program, and names of files. An option begins
//!    a word.

use std::borrow::Cow;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::getopt::{self, Named as _};
use crate::qemu_img::table::{COMMANDS, Command, Meaning};
use crate::{qemu_img, qemu_nbd};

/// Options of ours and what `qemu-nbd` calls them.
const OF_QEMU_NBD: &[(&str, &str)] = &[
    ("--tls-certificates DIR", "--object tls-creds-x509,id=ID,endpoint=client,dir=DIR --tls-creds ID"),
    ("--direct", "--cache=none"),
    ("--durable", "--cache=writethrough"),
    ("--secret id=", "--object secret,id="),
    ("--temporary", "--snapshot"),
];

/// Options of ours for images, and what the programs have in place of them.
const OF_IMAGES: &[(&str, &str)] = &[
    (
        "--tls-certificates DIR",
        "--object tls-creds-x509,id=ID,endpoint=client,dir=DIR with tls-creds=ID among the --image-opts",
    ),
    ("--tls-hostname NAME", "tls-hostname=NAME among the --image-opts"),
];

/// The commands of ours that command lines of `qemu-nbd` become: to serve, to list (`-L`), to disconnect (`-d`).
const OF_QEMU_NBD_LINES: &[&str] = &["serve", "export", "client"];

/// Ours, where `qemu-nbd` has an option of that name with another meaning.
const OTHER: &[&str] = &["--snapshot"];

/// The program as which this one was called.
#[derive(Clone, Copy)]
enum Program {
    QemuNbd,
    QemuImg(&'static Command),
}

/// It lists the exports of a server, as `vellum export list` does.
static LISTS: AtomicBool = AtomicBool::new(false);

/// Nothing, where that is `vellum`.
static CALLED_AS: OnceLock<Program> = OnceLock::new();

/// From now on messages are in the words of `qemu-nbd`.
pub(crate) fn as_qemu_nbd() {
    let _ = CALLED_AS.set(Program::QemuNbd);
}

/// And what it was asked for is this command of ours.
pub(crate) fn as_qemu_nbd_that_lists() {
    LISTS.store(true, Ordering::Relaxed);
}

/// From now on messages are in the words of `qemu-img`, of the command that became this one of ours.
pub(crate) fn as_qemu_command(ours: &str) {
    if let Some(command) = COMMANDS.iter().find(|command| command.ours == ours) {
        let _ = CALLED_AS.set(Program::QemuImg(command));
    }
}

/// Whether this was called as `qemu-img`, whose scripts read what commands print.
pub(crate) fn is_qemu_command() -> bool {
    matches!(CALLED_AS.get(), Some(Program::QemuImg(_)))
}

/// A message as it is said.
pub(crate) fn spoken(line: &str) -> Cow<'_, str> {
    match CALLED_AS.get() {
        None => Cow::Borrowed(line),
        Some(program) => program.says(line),
    }
}

impl Program {
    /// The command of ours.
    fn ours(self) -> &'static str {
        match self {
            Self::QemuNbd if LISTS.load(Ordering::Relaxed) => "export",
            Self::QemuNbd => "serve",
            Self::QemuImg(command) => command.ours,
        }
    }

    fn says(self, line: &str) -> Cow<'_, str> {
        let begins: &[&str] = match self {
            Self::QemuNbd => OF_QEMU_NBD_LINES,
            Self::QemuImg(command) => &[command.ours],
        };
        let rest = line.strip_prefix("vellum ");
        let rest = rest.and_then(|rest| begins.iter().find_map(|begin| rest.strip_prefix(begin)));
        let line = match (rest.and_then(|rest| rest.strip_prefix(": ")), self) {
            (None, _) => Cow::Borrowed(line),
            (Some(rest), Self::QemuNbd) => Cow::Owned(format!("{}: {rest}", qemu_nbd::NAME)),
            (Some(rest), Self::QemuImg(command)) => {
                Cow::Owned(format!("{}: {}: {rest}", qemu_img::NAME, command.name))
            }
        };
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
            at = end;
            if option.len() == 2
                || !matches!(before, None | Some(' ' | '`' | '('))
                || is_of_another(&line[..found])
            {
                said.push_str(option);
                continue;
            }
            match self.theirs(&line[found..], option) {
                Some((theirs, len)) => {
                    said.push_str(&theirs);
                    at = found + len;
                }
                None if self.ours() == "export" => said.extend(["vellum export list ", option]),
                None => said.extend(["vellum ", self.ours(), " ", option]),
            }
        }
        said.push_str(&line[at..]);
        Cow::Owned(said)
    }

    /// What the program calls the option of ours with which this text begins, and how much of the text that is; nothing, where it
    /// has none.
    fn theirs(self, text: &str, option: &str) -> Option<(Cow<'static, str>, usize)> {
        let is_for_image = match self {
            Self::QemuNbd => !LISTS.load(Ordering::Relaxed),
            Self::QemuImg(command) => command.options().any(|row| row.means == Meaning::Same("--object")),
        };
        if let Some((ours, theirs)) =
            OF_IMAGES.iter().find(|(ours, _)| is_for_image && text.starts_with(ours))
        {
            return Some(((*theirs).into(), ours.len()));
        }
        match self {
            Self::QemuNbd => {
                let ours = OF_QEMU_NBD.iter().find(|(ours, _)| {
                    text.starts_with(ours) && (ours.len() == option.len() || ours.contains(' '))
                });
                match ours {
                    Some((ours, theirs)) => Some(((*theirs).into(), ours.len())),
                    None => is_of_qemu_nbd(option).then(|| (option.to_owned().into(), option.len())),
                }
            }
            Self::QemuImg(command) => {
                let has = |means| command.options().find(|row| row.means == means);
                if text.starts_with("--secret id=") {
                    has(Meaning::Same("--object"))?;
                    return Some(("--object secret,id=".into(), "--secret id=".len()));
                }
                let theirs = match option {
                    "--direct" => {
                        has(Meaning::Cache)?;
                        "-t none".into()
                    }
                    _ => of_qemu_img(command, option)?,
                };
                Some((theirs, option.len()))
            }
        }
    }
}

/// The option of that command which does the same.
fn of_qemu_img(command: &Command, option: &str) -> Option<Cow<'static, str>> {
    let name = option.trim_start_matches('-');
    let means = |row: &Meaning| matches!(row, Meaning::Same(ours) if *ours == option);
    let is_called_so = command.options().any(|row| {
        let (first, further) = row.long();
        (first == name || further.contains(&name)) && (means(&row.means) || row.means == Meaning::Cache)
    });
    if is_called_so {
        return Some(option.to_owned().into());
    }
    command.options().find(|row| means(&row.means)).map(|row| row.name().into())
}

/// Whether what comes next stands in a command that is written out.
fn is_of_another(before: &str) -> bool {
    let is_quoted = before.matches('`').count() % 2 == 1;
    is_quoted && before.rsplit('`').next().is_some_and(|command| !command.trim().is_empty())
}

fn is_of_qemu_nbd(option: &str) -> bool {
    let (rows, name) = (qemu_nbd::table::rows(), option.trim_start_matches('-'));
    !OTHER.contains(&option) && getopt::long(&rows, name).is_ok_and(|row| row.long == name)
}

#[cfg(test)]
mod tests {
    use super::{COMMANDS, Program};

    fn in_words_of_qemu_img<'a>(name: &str, line: &'a str) -> std::borrow::Cow<'a, str> {
        let command = COMMANDS.iter().find(|command| command.name == name).expect("a command of qemu-img");
        Program::QemuImg(command).says(line)
    }

    #[test]
    fn advice_is_in_the_words_of_the_program() {
        for (ours, theirs) in [
            ("vellum serve: d.raw: no such file", "qemu-nbd: d.raw: no such file"),
            ("vellum export: can't list", "qemu-nbd: can't list"),
            ("vellum client: no server has it", "qemu-nbd: no server has it"),
            ("vellum exports: x", "vellum exports: x"),
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
                "the server wants TLS: use --tls-certificates DIR",
                "the server wants TLS: use --object tls-creds-x509,id=ID,endpoint=client,dir=DIR with tls-creds=ID among the --image-opts",
            ),
            (
                "or use --force-share to read it while it changes",
                "or use vellum serve --force-share to read it while it changes",
            ),
            ("run `vellum migrate run --force` first", "run `vellum migrate run --force` first"),
            ("/images/--direct/d.raw -- and more", "/images/--direct/d.raw -- and more"),
        ] {
            assert_eq!(Program::QemuNbd.says(ours), theirs);
        }
    }

    #[test]
    fn advice_is_in_the_words_of_the_command_that_was_given() {
        for (command, ours, theirs) in [
            ("info", "vellum info: d.raw: no such file", "qemu-img: info: d.raw: no such file"),
            ("info", "vellum serve: d.raw: no such file", "vellum serve: d.raw: no such file"),
            (
                "info",
                "or use --force-share to read it while it changes",
                "or use --force-share to read it while it changes",
            ),
            (
                "check",
                "allow it with `--allow-dir /d` or VELLUM_ALLOW_DIRS=/d",
                "allow it with `vellum check --allow-dir /d` or VELLUM_ALLOW_DIRS=/d",
            ),
            (
                "convert",
                "give the secret that opens it with `--secret id=NAME,file=FILE`",
                "give the secret that opens it with `--object secret,id=NAME,file=FILE`",
            ),
            (
                "bitmap",
                "give the secret that opens it with `--secret id=NAME,file=FILE`",
                "give the secret that opens it with `vellum bitmap --secret id=NAME,file=FILE`",
            ),
            ("convert", "use --direct", "use -t none"),
            (
                "info",
                "use --tls-hostname NAME, with a name that it is for",
                "use tls-hostname=NAME among the --image-opts, with a name that it is for",
            ),
            ("convert", "use --out-of-order, or --format and --rate", "use -W, or --format and --rate"),
            ("create", "`--unsafe-backing` does not open it", "`-u` does not open it"),
            ("rebase", "or --unsafe, or --trust-base", "or --unsafe, or vellum rebase --trust-base"),
            // Theirs is for something else.
            ("amend", "say so with `--force`", "say so with `vellum amend --force`"),
            (
                "resize",
                "if `vellum serve --control PATH` serves it, use `--control PATH` instead of the image",
                "if `vellum serve --control PATH` serves it, use `vellum resize --control PATH` instead of the image",
            ),
            ("resize", "data would be lost: use --shrink", "data would be lost: use --shrink"),
        ] {
            assert_eq!(in_words_of_qemu_img(command, ours), theirs);
        }
    }
}
