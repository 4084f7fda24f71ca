//! How far long work is, as it is shown.
//!
//! ```text
//!   a terminal watches      a bar on stderr, wanted or not
//!   -p into a pipe          "    (12.00/100%)\r" on stdout, as qemu-img prints it
//!   -p --output json        {"progress":12.0,"bytes":…,"total":…} on stdout, one line each
//!   SIGUSR1                 "    (12.00/100%)" on stderr, at any time; it never ends the program
//! ```

use std::cell::Cell;
use std::io::IsTerminal;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use signal_hook::consts::SIGUSR1;
use vellum_daemon::signals::ProgressRequests;

use crate::args::OutputFormat;
use crate::output::{complain, say, say_piece};

/// Hundredths of a percent that go by before another line is printed.
const STEP: u64 = 100;
const ALL: u64 = 100 * 100;

/// From now on SIGUSR1, which asks how far the work is, does not end the program; work that knows answers.
pub(crate) fn survive_requests() {
    // It fails for signals that nobody may catch, and this is none.
    drop(signal_hook::flag::register(SIGUSR1, Arc::new(AtomicBool::new(false))));
}

/// What the arguments say of progress.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wish {
    /// `-p`.
    pub(crate) is_wanted: bool,
    pub(crate) quiet: bool,
    pub(crate) output: OutputFormat,
}

/// How far the work is, shown as it goes on.
pub(crate) struct Progress {
    state: Rc<State>,
    _requests: Option<ProgressRequests>,
}

struct State {
    total: u64,
    done: Cell<u64>,
    /// What was printed last.
    printed: Cell<u64>,
    shown: Shown,
}

enum Shown {
    Nowhere,
    Bar(ProgressBar),
    Lines,
    Json,
}

impl Progress {
    /// For `total` bytes of work. Must be called on a worker.
    pub(crate) fn new(total: u64, wish: Wish) -> Self {
        let style = "{wide_bar} {binary_bytes:>10} of {binary_total_bytes} ({percent} %) {binary_bytes_per_sec} {eta}";
        Self::styled(total, wish, style)
    }

    /// For `total` things to be done. Must be called on a worker.
    pub(crate) fn of_items(total: u64, wish: Wish) -> Self {
        Self::styled(total, wish, "{wide_bar} {pos:>10} of {len} ({percent} %) {per_sec} {eta}")
    }

    fn styled(total: u64, wish: Wish, style: &str) -> Self {
        let is_json = wish.output == OutputFormat::Json;
        let is_watched =
            std::io::stderr().is_terminal() && (!wish.is_wanted || std::io::stdout().is_terminal());
        let shown = match wish {
            Wish { quiet: true, .. } => Shown::Nowhere,
            Wish { is_wanted: true, .. } if is_json => Shown::Json,
            _ if is_watched => Shown::Bar(bar(total, style)),
            Wish { is_wanted: true, .. } => Shown::Lines,
            _ => Shown::Nowhere,
        };
        let state = Rc::new(State { total, done: Cell::new(0), printed: Cell::new(0), shown });
        state.print(0);
        let asked = state.clone();
        Self { _requests: ProgressRequests::new(move || asked.complain()).ok(), state }
    }

    pub(crate) fn set(&self, bytes: u64) {
        self.state.done.set(bytes);
        match &self.state.shown {
            Shown::Bar(bar) => bar.set_position(bytes),
            _ => self.state.print_if_due(),
        }
    }

    pub(crate) fn end(&self) {
        match &self.state.shown {
            Shown::Bar(bar) => bar.finish_and_clear(),
            Shown::Lines => say(""),
            Shown::Json | Shown::Nowhere => {}
        }
    }
}

fn bar(total: u64, style: &str) -> ProgressBar {
    let bar = ProgressBar::new(total);
    bar.set_style(ProgressStyle::with_template(style).expect("a good template"));
    bar
}

impl State {
    /// How much is done, in hundredths of a percent.
    fn part(&self) -> u64 {
        let part = u128::from(self.done.get()) * u128::from(ALL) / u128::from(self.total.max(1));
        if self.total == 0 { ALL } else { u64::try_from(part).unwrap_or(ALL).min(ALL) }
    }

    fn print_if_due(&self) {
        let (part, printed) = (self.part(), self.printed.get());
        if part >= printed + STEP || part == ALL && printed < ALL {
            self.print(part);
        }
    }

    fn print(&self, part: u64) {
        self.printed.set(part);
        match self.shown {
            Shown::Lines => say_piece(&format!("    ({}/100%)\r", percent(part))),
            Shown::Json => {
                #[expect(clippy::cast_precision_loss, reason = "at most 100")]
                let percent = part as f64 / 100.0;
                say(&json!({ "progress": percent, "bytes": self.done.get(), "total": self.total })
                    .to_string());
            }
            Shown::Bar(_) | Shown::Nowhere => {}
        }
    }

    /// Says how far the work is, on stderr.
    fn complain(&self) {
        let line = format!("    ({}/100%)", percent(self.part()));
        match &self.shown {
            Shown::Bar(bar) => bar.suspend(|| complain(&line)),
            _ => complain(&line),
        }
    }
}

/// Hundredths of a percent, as a number with two digits behind its point.
fn percent(part: u64) -> String {
    format!("{}.{:02}", part / 100, part % 100)
}
