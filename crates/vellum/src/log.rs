//! The log: lines on stderr, written by a thread of their own.
//!
//! ```text
//!   who has something to say ──try_send──► queue ──► thread ──write──► stderr
//!                                   full? the line is lost, and counted            cannot be written? the line is lost
//! ```
//!
//! 1. Nobody waits for a reader of stderr, and nobody ends because there is none: a terminal that is stopped, a pipe that nobody
//!    empties, a disk that is full cost lines of the log and nothing else.
//! 2. At the end of the program what is queued is written, as long as that goes on.
//! 3. What is logged is what `--log` says, else `VELLUM_LOG`, else the configuration file, else warnings.

use std::io::{self, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::output::{complain, printable};
use crate::spoken::spoken;

/// The environment variable that says what is logged.
const VARIABLE: &str = "VELLUM_LOG";

/// What is logged when nothing else is said.
const LEVEL_DEFAULT: &str = "warn";

/// Lines that wait to be written, at most.
const LINES_MAX: usize = 4096;
/// How long the end of the program waits for them.
const FAREWELL_MAX: Duration = Duration::from_secs(1);

/// A level, or a list of parts of the program with their levels; as it was given.
///
/// # Errors
/// A sentence, when it is neither.
pub(crate) fn parse(filter: &str) -> Result<String, String> {
    // A word that is no level would be the name of a module, and silence all others.
    let is_level = |word: &str| word.parse::<LevelFilter>().is_ok();
    let is_known =
        filter.split(',').all(|part| part.contains('=') || part.contains("vellum") || is_level(part));
    match filter.parse::<EnvFilter>() {
        Ok(_) if is_known => Ok(filter.to_owned()),
        _ => Err(format!(
            "invalid log level {filter:?}: use off, error, warn, info, debug or trace, or a list such as \
             warn,vellum_export=debug"
        )),
    }
}

/// Sends the log to stderr. A variable that cannot be understood is named, and does not silence the log. The other two have
/// been parsed.
pub(crate) fn start(option: Option<&str>, of_file: Option<&str>) {
    let variable = std::env::var_os(VARIABLE).filter(|filter| !filter.is_empty());
    let of_variable = || {
        let filter = variable.as_ref()?.to_string_lossy().into_owned();
        Some(parse(&filter).unwrap_or_else(|_| {
            complain(&format!(
                "vellum: {VARIABLE}={filter} is not valid, so {LEVEL_DEFAULT} is used: use off, error, warn, info, \
                 debug or trace, or a list such as warn,vellum_export=debug"
            ));
            LEVEL_DEFAULT.to_owned()
        }))
    };
    let filter = option.map(str::to_owned).or_else(of_variable).or_else(|| of_file.map(str::to_owned));
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter.as_deref().unwrap_or(LEVEL_DEFAULT)))
        .with_writer(|| Log)
        .log_internal_errors(false)
        .init();
}

/// What the thread is given.
enum Item {
    Line(Vec<u8>),
    /// Everything before has been written when this is answered.
    Mark(SyncSender<()>),
}

static QUEUE: OnceLock<Option<SyncSender<Item>>> = OnceLock::new();
static LOST: AtomicU64 = AtomicU64::new(0);

fn queue() -> Option<&'static SyncSender<Item>> {
    let begin = || {
        let (sender, receiver) = sync_channel(LINES_MAX);
        let thread = std::thread::Builder::new().name("vellum-log".to_owned()).spawn(move || keep(&receiver));
        thread.is_ok().then_some(sender)
    };
    QUEUE.get_or_init(begin).as_ref()
}

fn keep(items: &Receiver<Item>) {
    for item in items {
        match item {
            Item::Line(line) => drop(io::stderr().write_all(&line)),
            Item::Mark(done) => drop(done.send(())),
        }
        let lost = LOST.swap(0, Ordering::Relaxed);
        if lost > 0 {
            drop(writeln!(io::stderr(), "{lost} lines of the log were lost: stderr was not read in time"));
        }
    }
}

/// Where lines go.
pub(crate) struct Log;

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let line = match std::str::from_utf8(bytes) {
            Ok(line) => spoken(line).into_owned().into_bytes(),
            Err(_) => bytes.to_vec(),
        };
        let sent = queue().is_some_and(|queue| queue.try_send(Item::Line(line)).is_ok());
        if !sent {
            LOST.fetch_add(1, Ordering::Relaxed);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A line of a server, for who watches it.
pub(crate) fn note(line: &str) {
    drop(Log.write(format!("{}\n", printable(line)).as_bytes()));
}

/// Waits until what was said has been written, if that goes on.
pub(crate) fn finish() {
    let Some(Some(queue)) = QUEUE.get() else { return };
    let (done, written) = sync_channel(1);
    if queue.try_send(Item::Mark(done)).is_ok() {
        let _ = written.recv_timeout(FAREWELL_MAX);
    }
}
