//! The configuration file: where it is looked for, what wins over it, and what is said about mistakes.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::support::dir::Dir;
use super::support::noise;
use super::support::program::{Ran, finish, vellum, vellum_command};
use super::support::server::Server;
use super::{MIB, is_refusal, refused};

/// Runs the program with these variables.
fn vellum_in(environment: &[(&str, &str)], arguments: &[&str]) -> Ran {
    let mut command = vellum_command();
    command.args(arguments).envs(environment.iter().copied());
    finish(command, None)
}

/// A clone of a template in another directory; the path of the clone.
fn far_clone(dir: &Dir) -> String {
    for name in ["templates", "images"] {
        std::fs::create_dir(dir.join(name)).expect("a directory");
    }
    std::fs::write(dir.join("templates/base.raw"), noise(MIB, 1)).expect("a template");
    let clone = dir.text("images/clone.qcow2");
    let base = dir.text("templates/base.raw");
    vellum(&["create", "-q", "-b", &base, "-F", "raw", "--allow-dir", &dir.text("templates"), &clone])
        .answer();
    clone
}

#[test]
fn templates_of_the_file_need_no_option() {
    let dir = Dir::new("config");
    let clone = far_clone(&dir);
    let text = format!("allow-dirs = [{:?}, \"/nowhere/at/all\"]\n", dir.text("templates"));
    let (good, empty) = (dir.text("good.toml"), dir.text("empty.toml"));
    std::fs::write(&good, text).expect("a file");
    std::fs::write(&empty, "").expect("a file");
    // None of it is allowed unless it is said.
    refused(1, &["--allow-dir"], &["map", &clone]);
    vellum(&["map", &clone, "--config", &good]).answer();
    vellum(&["--config", &good, "map", &clone]).answer();
    vellum_in(&[("VELLUM_CONFIG", &good)], &["map", &clone]).answer();
    // The option wins over the variable.
    vellum_in(&[("VELLUM_CONFIG", &empty)], &["--config", &good, "map", &clone]).answer();
    let ran = vellum_in(&[("VELLUM_CONFIG", &good)], &["map", &clone, "--config", &empty]);
    is_refusal(&ran, 1, &["--allow-dir"], &["map"]);
    // Directories add up, from wherever they come.
    let other = dir.text("images");
    vellum(&["map", &clone, "--config", &good, "--allow-dir", &other]).answer();
    vellum_in(&[("VELLUM_ALLOW_DIRS", &other)], &["map", &clone, "--config", &good]).answer();
    // Each command that opens images knows them.
    let copy = dir.text("images/copy.raw");
    vellum(&["convert", "--config", &good, &clone, &copy]).answer();
    vellum(&["compare", "--config", &good, &clone, &copy]).answer();
    vellum(&["info", "--backing-chain", "--config", &good, &clone]).answer();
    vellum(&["resize", "--config", &good, &clone, "+1M"]).answer();
    let over = dir.text("images/over.qcow2");
    vellum(&["create", "--config", &good, "-b", "clone.qcow2", "-F", "qcow2", &over]).answer();
    Server::start(&[&clone, "--config", &good]).stop();
}

#[test]
fn a_value_of_the_file_counts_until_another_is_given() {
    let dir = Dir::new("config");
    let (image, file) = (dir.text("disk.qcow2"), dir.text("a.toml"));
    vellum(&["create", "-q", &image, "1M"]).answer();
    std::fs::write(&file, "log = \"info\"\n[serve]\nthreads = 1\nsocket-mode = \"0604\"\n").expect("a file");
    let mode = |socket: &Path| std::fs::metadata(socket).expect("a socket").permissions().mode() & 0o777;
    let server = Server::start(&[&image, "--config", &file]);
    assert_eq!(mode(&server.socket()), 0o604);
    let ran = server.stop();
    assert!(ran.err.contains("draining"), "it logs as the file says: {ran:?}");
    let server = Server::start(&[&image, "--config", &file, "--socket-mode", "0640", "--log", "error"]);
    assert_eq!(mode(&server.socket()), 0o640);
    let ran = server.stop();
    assert!(!ran.err.contains("draining"), "the command line wins: {ran:?}");
}

#[test]
fn the_log_is_that_of_the_option_then_of_the_variable_then_of_the_file() {
    let dir = Dir::new("config");
    let file = dir.text("a.toml");
    std::fs::write(&file, "log = \"error\"\n").expect("a file");
    let run = |variable, more: &[&str]| {
        let arguments = [&["create", "-o", "help", "--config", &file], more].concat();
        vellum_in(&[("VELLUM_LOG", variable)], &arguments)
    };
    // A variable that is not understood is named where it would count.
    assert!(run("loud", &[]).err.contains("VELLUM_LOG=loud"));
    assert_eq!(run("loud", &["--log", "warn"]).err, "");
    let ran = run("", &["--log", "loud"]);
    assert!(ran.code == 1 && ran.err.contains("--log") && ran.err.contains("vellum_export=debug"), "{ran:?}");
}

#[test]
fn mistakes_in_the_file_keep_every_command_from_running() {
    let dir = Dir::new("config");
    let file = dir.text("a.toml");
    let image = dir.text("disk.raw");
    for (text, words) in [
        (
            "log = \"warn\"\nthreads = 4\n",
            &["a.toml, line 2", "unknown key \"threads\"", "allow-dirs, log"][..],
        ),
        ("[serve]\n\nthread = 4\n", &["a.toml, line 3", "unknown key \"thread\"", "io,", "threads"]),
        ("[serve]\nthreads = 0\n", &["a.toml, line 2", "serve.threads", "0 is not in 1..=1024"]),
        ("[serve\n", &["a.toml, line 1"]),
        ("\u{1b}[2J = 1\n", &["a.toml, line 1"]),
    ] {
        std::fs::write(&file, text).expect("a file");
        let ran = vellum(&["create", "--config", &file, &image, "1M"]);
        assert_eq!((ran.code, ran.out.as_str(), ran.err.lines().count()), (1, "", 1), "{ran:?}");
        assert!(words.iter().all(|word| ran.err.contains(word)), "{ran:?}");
        assert!(!ran.err.contains('\u{1b}'), "{ran:?}");
        assert!(!Path::new(&image).exists());
    }
    let none = dir.text("none.toml");
    let ran = vellum(&["--config", &none, "create", &image, "1M"]);
    assert!(ran.code == 1 && ran.err.contains(&none) && ran.err.contains("--config"), "{ran:?}");
    let ran = vellum_in(&[("VELLUM_CONFIG", &none)], &["create", &image, "1M"]);
    assert!(ran.code == 1 && ran.err.contains(&none) && ran.err.contains("VELLUM_CONFIG"), "{ran:?}");
    let ran = vellum(&["--config", "/dev/zero", "create", &image, "1M"]);
    assert!(ran.code == 1 && ran.err.contains("/dev/zero"), "{ran:?}");
}
