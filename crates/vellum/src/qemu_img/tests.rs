//! Command lines of both programs, the guide, and the options of the `qemu-img` that is installed.

use std::fmt::Write as _;
use std::path::Path;

use clap::CommandFactory as _;

use super::table::{COMMANDS, Meaning};
use super::*;

fn line(text: &str) -> Result<String, String> {
    let words: Vec<OsString> = text.split_whitespace().map(|word| word.trim_matches('\'').into()).collect();
    translate(&words).map(|request| match request {
        Request::Run(line) => {
            line.iter().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
        }
        Request::Say(text) => format!("says {}", text.lines().next().unwrap_or_default()),
    })
}

#[test]
fn command_lines_are_turned_into_ours() {
    for (theirs, ours) in [
        ("info a", "info -- a"),
        ("info --output=json -U a", "info --output=json --force-share -- a"),
        ("info a --output json --backing-chain", "info --output=json --backing-chain -- a"),
        ("-T x info a", "info -- a"),
        ("check -rall -fqcow2 a", "check --repair=all --format=qcow2 -- a"),
        ("create a 1G", "create --format=raw -- a 1G"),
        ("create -f qcow2 a 1G", "create --format=qcow2 --options=extended_l2=off -- a 1G"),
        (
            "create -qf qcow2 -o extended_l2=on,cluster_size=128k a 1G",
            "create --quiet --format=qcow2 --options=extended_l2=on,cluster_size=128k -- a 1G",
        ),
        (
            "create -f qcow2 -b b -F raw a",
            "create --format=qcow2 --backing=b --backing-format=raw --options=extended_l2=off -- a",
        ),
        ("convert a b", "convert --target-format=raw -- a b"),
        ("convert -O raw a b c", "convert --target-format=raw -- a b c"),
        ("resize --image-opts driver=qcow2,file.filename=a 1G", "resize --format=qcow2 -- a 1G"),
        ("resize --image-opts driver=raw,file.filename=nbd:a 1G", "resize --format=raw -- ./nbd:a 1G"),
        ("bitmap --add --image-opts driver=qcow2,file.filename=a b", "bitmap --add --format=qcow2 -- a b"),
        ("rebase -u -b '' a", "rebase --unsafe --backing= -- a"),
        (
            "convert -pO qcow2 -t none -T none -W -m 4 a b",
            "convert --progress --target-format=qcow2 --direct --out-of-order --parallel=4 --options=extended_l2=off -- a b",
        ),
        (
            "convert -c -O qcow2 -o compression_type=zstd a b",
            "convert --compress --target-format=qcow2 --options=compression_type=zstd --options=extended_l2=off -- a b",
        ),
        (
            "convert -n --target-is-zero -O raw a b",
            "convert --no-create --target-is-zero --target-format=raw -- a b",
        ),
        (
            "convert -B b -F raw -O qcow2 a c",
            "convert --backing=b --backing-format=raw --target-format=qcow2 --options=extended_l2=off -- a c",
        ),
        ("resize a -1G", "resize -- a -1G"),
        ("resize --shrink -f raw a +10G", "resize --shrink --format=raw -- a +10G"),
        ("rebase -b '' a", "rebase --backing= -- a"),
        ("rebase -u -b b -F qcow2 a", "rebase --unsafe --backing=b --backing-format=qcow2 -- a"),
        ("commit -d -t none a", "commit --direct -- a"),
        ("dd -O qcow2 bs=1M if=a of=b", "dd --target-format=qcow2 -- bs=1M if=a of=b"),
        ("snapshot -l a", "snapshot --list -- a"),
        ("snapshot a", "snapshot -- a"),
        ("snapshot -q -c s a", "snapshot --quiet --create=s -- a"),
        ("snapshot -a s a", "snapshot --apply=s -- a"),
        ("amend -q -p -o compat=v3 a", "amend --options=compat=v3 -- a"),
        (
            "amend --object secret,id=s,file=f --image-opts driver=qcow2,encrypt.key-secret=s,file.filename=a -o encrypt.state=inactive,\
             encrypt.keyslot=1",
            "amend --object=secret,id=s,file=f --options=encrypt.state=inactive,encrypt.keyslot=1 --format=qcow2 -- a",
        ),
        (
            "bitmap --add -g 4k --merge s -b c -F qcow2 --disable -f qcow2 a b",
            "bitmap --add --granularity=4k --merge=s --source-file=c --source-format=qcow2 --disable --format=qcow2 -- a b",
        ),
        ("bench -w -c 10 -t none a", "bench --write --count=10 --direct -- a"),
        ("measure --size 1G -O qcow2", "measure --size=1G --target-format=qcow2 --"),
        ("compare -s -- -a b", "compare --strict -- -a b"),
    ] {
        let ours = format!("vellum {ours}");
        assert_eq!(line(theirs).as_deref(), Ok(ours.as_str()), "{theirs}");
    }
    for (theirs, word) in [
        ("", "command"),
        ("frobnicate a", "frobnicate"),
        ("info --nonsense a", "--nonsense"),
        ("info -Z a", "-Z"),
        ("info --output", "value"),
        ("info --quiet=1 a", "quiet"),
        ("convert -t fast a b", "cache mode"),
        ("rebase -u -b b a", "-F"),
        ("commit --image-opts driver=qcow2,encrypt.key-secret=s,file.filename=a", "encrypted"),
        ("amend --image-opts -o compat=v3 driver=ssh,host=h", "ssh"),
        ("amend --force -o compat=v3 a", "--force"),
        ("bitmap --image-opts --add driver=qcow2 b", "file.filename"),
        ("commit -r 1M a", "-r"),
    ] {
        let error = line(theirs).expect_err(theirs);
        assert!(error.contains(word) && !error.contains('\n'), "{theirs}: {error}");
    }
    assert!(line("--version").unwrap().starts_with("says qemu-img version 10."));
    assert!(line("--help").unwrap().starts_with("says qemu-img"));
    assert!(line("convert --help").unwrap().starts_with("says Usage: qemu-img convert"));
}

#[test]
fn what_is_said_to_be_the_same_is_there() {
    let cli = crate::Cli::command();
    for command in COMMANDS.iter().filter(|command| !command.ours.is_empty()) {
        let ours = cli.find_subcommand(command.ours).expect(command.ours);
        for opt in command.options() {
            match opt.means {
                Meaning::Same(name) => {
                    let found = ours.get_arguments().find(|argument| {
                        argument.get_long().is_some_and(|long| name.strip_prefix("--") == Some(long))
                    });
                    let found = found.unwrap_or_else(|| panic!("vellum {} has no {name}", command.ours));
                    // A flag that counts each time it is given takes no values, though its action could.
                    let values = found.get_num_args();
                    let takes =
                        values.map_or(found.get_action().takes_values(), |range| range.takes_values());
                    assert_eq!(takes, opt.value, "vellum {} {name}", command.ours);
                }
                Meaning::Cache => {
                    let has = ours.get_arguments().any(|argument| argument.get_long() == Some("direct"));
                    assert!(has, "vellum {} has no --direct", command.ours);
                }
                Meaning::Aside | Meaning::Refused | Meaning::Own(_) => {
                    assert!(!opt.why.is_empty(), "{} {}", command.name, opt.shown())
                }
            }
        }
    }
}

/// The part of the guide that has a table for each command.
fn tables() -> String {
    let mut text = String::new();
    for command in COMMANDS {
        let verdict = if command.ours.is_empty() { "not there" } else { "there" };
        writeln!(text, "### {}\n\n{verdict}: {}\n", command.name, command.note).expect("to memory");
        writeln!(text, "| qemu-img {} | here | |\n|---|---|---|", command.name).expect("to memory");
        for opt in command.options() {
            let here = match opt.means {
                Meaning::Same(name) => format!("`{name}`"),
                Meaning::Cache => "`--direct`".to_owned(),
                Meaning::Aside => "accepted".to_owned(),
                Meaning::Own(shown) => shown.to_owned(),
                Meaning::Refused => "refused".to_owned(),
            };
            writeln!(text, "| `{}` | {here} | {} |", opt.shown().replace(", ", "`, `"), opt.why)
                .expect("to memory");
        }
        text.push('\n');
    }
    text
}

#[test]
fn the_guide_has_these_tables() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/qemu-img.md");
    let page = std::fs::read_to_string(&path).expect("the page of the guide");
    let begin = "<!-- tables -->\n\n";
    let end = "<!-- end of tables -->";
    let (before, rest) = page.split_once(begin).expect("where the tables begin");
    let (between, after) = rest.split_once(end).expect("where they end");
    if between != tables() && std::env::var("VELLUM_GUIDE").is_ok_and(|what| what == "write") {
        std::fs::write(&path, format!("{before}{begin}{}{end}{after}", tables()))
            .expect("the page is written");
        return;
    }
    assert_eq!(between, tables(), "VELLUM_GUIDE=write makes the tables of {} anew", path.display());
}

/// The options that the installed program says it has.
fn options_of_qemu(command: &str) -> Option<Vec<String>> {
    let output = std::process::Command::new("qemu-img").args([command, "--help"]).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut found = Vec::new();
    for line in text.lines().filter(|line| line.starts_with(' ') && line.trim_start().starts_with('-')) {
        for name in line.split([',', ' ']).filter(|word| word.starts_with('-')) {
            found.push(name.trim_end_matches(['|', ']', ')']).to_owned());
        }
    }
    Some(found)
}

#[test]
fn the_installed_program_has_no_other_options() {
    let mut count = 0;
    for command in COMMANDS {
        for name in options_of_qemu(command.name).into_iter().flatten() {
            let rows: Vec<&'static OptionRow> = command.options().collect();
            let is_known = match name.strip_prefix("--") {
                Some("help") | Some("progres") => true, // the latter as its help has it
                Some(long) => {
                    getopt::long(&rows, long).is_ok_and(|opt| opt.long == long || opt.also.contains(&long))
                }
                None => {
                    name == "-h"
                        || name.len() == 2 && getopt::short(&rows, char::from(name.as_bytes()[1])).is_some()
                }
            };
            assert!(is_known, "qemu-img {} has an option {name}", command.name);
            count += 1;
        }
    }
    assert!(count == 0 || count > 50, "{count} options of 15 commands");
}
