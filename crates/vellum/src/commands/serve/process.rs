//! The process of a server: in the background, with its number in a file, and with the rights of another user.
//!
//! ```text
//!   vellum serve --fork …                          the same command line again, in a session of its own
//!     │ starts ──────────────────────────────────►   opens the images, binds the sockets
//!     │ passes on what it says on stderr  ◄──────    …
//!     │ reads stdout  ◄──────────────────────────    "ready": clients can connect, the file is written, rights are dropped
//!     ▼ exits with 0                                 stdout and stderr are closed; it serves
//! ```
//!
//! 1. The program that was started ends well only once clients can connect. If the server ends before that, it ends with
//!    the code of the server, after what the server said.
//! 2. The file with the process's number is locked as long as the server lives, so two servers never share one.
//! 3. Rights are dropped last: what needs them has been done by then.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use vellum_core::{Context, Error, ErrorKind, Result};
use vellum_daemon::{Identity, Output, close_output, identity_of, leave_session, lock_pid_file};

use super::CONTROL;
use crate::log;
use crate::output::{pass_on, say};

/// Set for the server that a `--fork` has started, to the process that started it.
const VARIABLE: &str = "VELLUM_FORKED";

/// What the server says once clients can connect.
const READY: &str = "ready";

/// Of what a server says before it is ready, this much is passed on at once.
const PIECE_BYTES: usize = 4096;

/// How the process of a server lives
#[derive(Debug, clap::Args)]
pub(crate) struct ProcessArgs {
    /// Serve in the background, and exit once clients can connect
    ///
    /// Nothing is printed from then on, unless --fork-verbose is given.
    #[arg(long, help_heading = CONTROL)]
    fork: bool,
    /// With --fork: go on writing the log to stderr
    #[arg(long, requires = "fork", help_heading = CONTROL)]
    fork_verbose: bool,
    /// Write the server's process ID to FILE once clients can connect
    ///
    /// The server locks the file as long as it lives, and leaves it there.
    #[arg(long, value_name = "FILE", help_heading = CONTROL)]
    pid_file: Option<PathBuf>,
    /// Once the images and the sockets are open, run as this user, by name or number
    ///
    /// With the groups of the user, unless --group names one. What is opened later, such as images that are added, is opened
    /// with the rights of the user. Needs root.
    #[arg(long, value_name = "USER", conflicts_with_all = ["fuse", "ublk", "nbd_device"], help_heading = CONTROL)]
    user: Option<String>,
    /// As --user, for the group, and with no other group
    #[arg(long, value_name = "GROUP", conflicts_with_all = ["fuse", "ublk", "nbd_device"], help_heading = CONTROL)]
    group: Option<String>,
}

/// What is left to do when the server is ready.
pub(super) struct Ready {
    identity: Identity,
    pid_file: Option<PathBuf>,
    is_forked: bool,
    keeps_stderr: bool,
}

impl ProcessArgs {
    /// Begins: either this process is the server, or the server has been started and this is the exit code.
    pub(super) fn begin(&self) -> Result<Result<Ready, ExitCode>> {
        let identity = identity_of(self.user.as_deref(), self.group.as_deref())?;
        // A program that the server starts has the variable, too, and another parent.
        let parent = std::os::unix::process::parent_id().to_string();
        let is_forked = self.fork && std::env::var_os(VARIABLE).is_some_and(|by| by == *parent);
        if self.fork && !is_forked {
            return self.start().map(Err);
        }
        if is_forked {
            leave_session()?;
        }
        Ok(Ok(Ready {
            identity,
            pid_file: self.pid_file.clone(),
            is_forked,
            keeps_stderr: self.fork_verbose,
        }))
    }

    /// Starts the server, and waits until it is ready or has ended.
    fn start(&self) -> Result<ExitCode> {
        if std::env::var_os("LISTEN_FDS").is_some() {
            return Err(Error::invalid(
                "sockets were passed to this program (LISTEN_FDS), which are not passed on: omit --fork; a service manager \
                 needs none",
            ));
        }
        let mut words = std::env::args_os();
        let name = words.next().unwrap_or_else(|| OsString::from("vellum"));
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0(name)
            .args(words)
            .env(VARIABLE, std::process::id().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        // A pipe would outlive this process, and whoever waits for its end would wait for the server.
        command.stderr(if self.fork_verbose { Stdio::inherit() } else { Stdio::piped() });
        let mut server = command.spawn().context(|| "can't start the server")?;
        let (stdout, stderr) = (server.stdout.take(), server.stderr.take());
        let relay = stderr.map(|mut stderr| {
            std::thread::spawn(move || {
                let mut piece = [0; PIECE_BYTES];
                while let Ok(count @ 1..) = stderr.read(&mut piece) {
                    pass_on(&piece[..count]);
                }
            })
        });
        let mut line = String::new();
        let read = stdout.map(|stdout| BufReader::new(stdout).read_line(&mut line));
        if read.is_some_and(|read| read.is_ok()) && line.trim_end() == READY {
            // It has closed its end of the other pipe by now.
            relay.into_iter().for_each(|relay| drop(relay.join()));
            return Ok(ExitCode::SUCCESS);
        }
        let status = server.wait().context(|| "can't wait for the server")?;
        relay.into_iter().for_each(|relay| drop(relay.join()));
        match status.code().and_then(|code| u8::try_from(code).ok()) {
            Some(0) | None => Err(Error::new(
                ErrorKind::Io,
                format!("the server ended before clients could connect ({status})"),
            )),
            Some(code) => Ok(ExitCode::from(code)),
        }
    }
}

impl Ready {
    /// Clients can connect.
    pub(super) fn settle(self) -> Result<()> {
        // It is locked until the process ends.
        std::mem::forget(self.pid_file.map(write_pid).transpose()?);
        self.identity.assume()?;
        if self.is_forked {
            log::finish();
            // Before the word: who reads it takes the other stream for closed.
            if !self.keeps_stderr {
                close_output(Output::Stderr)?;
            }
            say(READY);
            close_output(Output::Stdout)?;
        }
        Ok(())
    }
}

/// Writes the number of this process into a file that no other server has.
fn write_pid(path: PathBuf) -> Result<File> {
    let context = || format!("can't write {}", path.display());
    let mut file =
        OpenOptions::new().create(true).truncate(false).write(true).open(&path).context(context)?;
    lock_pid_file(&file).map_err(|error| {
        let why = format!(
            "{} belongs to another server: give another --pid-file, or end that server",
            path.display()
        );
        error.context(why)
    })?;
    file.set_len(0).context(context)?;
    file.write_all(format!("{}\n", std::process::id()).as_bytes()).context(context)?;
    Ok(file)
}
