//! Running programs: the command is printed first, and how long it took afterwards.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::Outcome;

/// The root of the tree.
pub(crate) fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("xtask lies in the tree").to_owned()
}

/// Where cargo puts what it builds.
pub(crate) fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir), // `join` keeps a path that is absolute
        None => root().join("target"),
    }
}

/// A command of the same cargo that runs this, in the root of the tree.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(root());
    command
}

/// Says what is run, runs it with its output on the terminal, and fails as it does.
pub(crate) fn run(command: &mut Command) -> Outcome {
    eprintln!("$ {}", show(command));
    let status = command.status().map_err(|error| format!("{}: {error}", name(command)))?;
    if status.success() { Ok(()) } else { Err(format!("`{}` failed: {status}", show(command))) }
}

/// One of the two that a program writes to.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Stream {
    Output,
    Errors,
}

/// As above, while one of the streams is read line by line.
pub(crate) fn run_and_listen(command: &mut Command, stream: Stream, mut listen: impl FnMut(&str)) -> Outcome {
    eprintln!("$ {}", show(command));
    let fail = |command: &Command, error: std::io::Error| format!("{}: {error}", name(command));
    match stream {
        Stream::Output => command.stdout(Stdio::piped()),
        Stream::Errors => command.stderr(Stdio::piped()),
    };
    let mut child = command.spawn().map_err(|error| fail(command, error))?;
    let pipe: Box<dyn Read> = match stream {
        Stream::Output => Box::new(child.stdout.take().expect("it was asked for")),
        Stream::Errors => Box::new(child.stderr.take().expect("it was asked for")),
    };
    // What a program prints need not be UTF-8.
    for line in BufReader::new(pipe).split(b'\n') {
        let line = line.map_err(|error| fail(command, error))?;
        let line = String::from_utf8_lossy(&line);
        eprintln!("{line}");
        listen(&line);
    }
    let status = child.wait().map_err(|error| fail(command, error))?;
    if status.success() { Ok(()) } else { Err(format!("`{}` failed: {status}", show(command))) }
}

/// What a program prints, when it succeeds.
pub(crate) fn output(command: &mut Command) -> Result<String, String> {
    let output =
        command.stdin(Stdio::null()).output().map_err(|error| format!("{}: {error}", name(command)))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(format!("`{}` failed: {}", show(command), text(&output.stderr)))
    }
}

/// Whether a program is installed.
pub(crate) fn has(program: &str) -> bool {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    // The administrator's programs are also wanted, whichever user runs this.
    let also = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&paths).chain(also).any(|dir| dir.join(program).is_file())
}

/// Whether root runs this.
pub(crate) fn root_is_running() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|facts| facts.uid() == 0)
}

/// A step that was run: what it was, how long it took, whether it went well.
struct Step {
    name: String,
    time: Duration,
    well: bool,
}

static STEPS: Mutex<Vec<Step>> = Mutex::new(Vec::new());

/// Runs a step, and says at its end how long it took.
pub(crate) fn step(name: &str, work: impl FnOnce() -> Outcome) -> Outcome {
    eprintln!("\n── {name}");
    let start = Instant::now();
    let outcome = work();
    let time = start.elapsed();
    let well = outcome.is_ok();
    eprintln!("── {name}: {} in {}", if well { "done" } else { "FAILED" }, show_time(time));
    STEPS.lock().expect("nobody panics with it").push(Step { name: name.to_owned(), time, well });
    outcome
}

/// All steps so far, with their times.
pub(crate) fn print_steps() {
    eprintln!("\n── steps");
    for Step { name, time, well } in &*STEPS.lock().expect("nobody panics with it") {
        eprintln!("{name:24} {:>12}{}", show_time(*time), if *well { "" } else { "  FAILED" });
    }
}

/// A time as a person says it.
pub(crate) fn show_time(time: Duration) -> String {
    let seconds = time.as_secs();
    if seconds < 2 {
        return format!("{} ms", time.as_millis());
    }
    if seconds < 120 { format!("{seconds} s") } else { format!("{} min {} s", seconds / 60, seconds % 60) }
}

fn name(command: &Command) -> String {
    command.get_program().to_string_lossy().into_owned()
}

/// The command as one could type it; the path of the program itself is of no interest.
fn show(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let program = program.file_name().unwrap_or(command.get_program()).to_string_lossy();
    let words = command.get_args().map(|argument| argument.to_string_lossy());
    [program].into_iter().chain(words).collect::<Vec<_>>().join(" ")
}
