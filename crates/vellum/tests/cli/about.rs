//! What the program says about itself: its version, completions for shells, manual pages.

use super::support::dir::Dir;
use super::support::program::{finish, has, skipped, vellum, vellum_command};
use crate::refused;

/// The commands, as the help lists them.
fn commands() -> Vec<String> {
    let help = vellum(&["--help"]).answer();
    let list = help.split("Commands:\n").nth(1).expect("a list of commands");
    // Four blanks and more begin the second line of a description.
    let lines = list.lines().take_while(|line| !line.is_empty()).filter(|line| !line.starts_with("   "));
    let words = lines.filter_map(|line| line.split_whitespace().next());
    let commands: Vec<String> = words.filter(|word| *word != "help").map(str::to_owned).collect();
    assert!(commands.len() >= 20 && commands.contains(&"serve".to_owned()), "{commands:?}");
    commands
}

#[test]
fn the_version_has_the_commit_the_features_and_the_versions_of_formats() {
    let short = vellum(&["-V"]).answer();
    assert_eq!(short, concat!("vellum ", env!("CARGO_PKG_VERSION"), "\n"));
    let long = vellum(&["--version"]).answer();
    let lines: Vec<&str> = long.lines().collect();
    assert_eq!(lines[0], short.trim_end());
    let value = |index: usize, key: &str| {
        lines[index].strip_prefix(key).unwrap_or_else(|| panic!("no {key} in {long}"))
    };
    // Twelve digits and a day, or the words for a build that has none.
    let commit = value(1, "commit: ");
    let is_commit =
        commit.split(' ').next().is_some_and(|hash| hash.bytes().all(|byte| byte.is_ascii_hexdigit()));
    assert!(commit == "not recorded" || is_commit, "{commit}");
    assert!(["none", "ublk"].contains(&value(2, "features: ")), "{long}");
    assert_eq!(value(3, "formats: "), "raw, qcow2 (versions 2 and 3), vellum (version 1), luks (version 1)");
    assert_eq!(value(4, "read only: "), "vmdk, vdi, vpc, vhdx, qed, parallels, dmg, qcow");
    assert_eq!(lines.len(), 5);
}

#[test]
fn completions_know_every_command() {
    let commands = commands();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = vellum(&["completions", shell]).answer();
        let missing: Vec<&String> =
            commands.iter().filter(|command| !script.contains(command.as_str())).collect();
        assert!(missing.is_empty(), "{shell}: {missing:?}");
        assert!(script.contains("vhost-user-blk"), "{shell}");
    }
    let ran = vellum(&["completions", "tcsh"]);
    assert!(ran.code == 1 && ran.err.contains("bash") && ran.err.contains("zsh"), "{ran:?}");
    if !has("bash") {
        return skipped("bash is not installed");
    }
    let mut bash = std::process::Command::new("bash");
    let script = vellum(&["completions", "bash"]).answer();
    bash.args(["--norc", "-c"]).arg(
        "source /dev/stdin; COMP_WORDS=(vellum quick); COMP_CWORD=1; _vellum vellum quick vellum; echo \"${COMPREPLY[@]}\"",
    );
    assert_eq!(finish(bash, Some(&script)).answer().trim(), "quickstart");
}

#[test]
fn every_command_has_a_manual_page() {
    let dir = Dir::new("about");
    let pages = dir.text("pages/man1");
    vellum(&["man", &pages]).answer();
    let names = commands().into_iter().map(|command| format!("vellum-{command}.1"));
    for name in names.chain(["vellum.1".to_owned(), "vellum-snapshot-create.1".to_owned()]) {
        let page = dir.join("pages/man1").join(&name);
        let text = std::fs::read_to_string(&page).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(text.contains(".TH vellum") && text.contains(".SH SYNOPSIS"), "{name}: {text}");
        assert!(text.contains(concat!("vellum ", env!("CARGO_PKG_VERSION"))), "{name}: {text}");
        assert!(!text.contains("commit:"), "{name}");
    }
    let serve = std::fs::read_to_string(dir.join("pages/man1/vellum-serve.1")).expect("a page");
    assert!(serve.contains(r"\-\-vhost\-user\-blk") && serve.contains("SIGTERM"), "{serve}");
    let printed = vellum(&["man"]).answer();
    assert_eq!(printed, std::fs::read_to_string(dir.join("pages/man1/vellum.1")).expect("a page"));
    refused(1, &["can't create the directory"], &["man", "/proc/none"]);
}

#[test]
fn a_reader_of_completions_that_leaves_is_no_failure() {
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "\"$1\" completions bash | head -1", "sh"]).arg(vellum_command().get_program());
    let ran = finish(shell, None);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{ran:?}");
}
