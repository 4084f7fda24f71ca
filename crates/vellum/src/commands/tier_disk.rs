//! The disk of a `vellum tier` command, closed or served, and what became of its units.

use std::cell::OnceCell;
use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::Value;
use vellum_core::Error;
use vellum_daemon::control::{Request, call};
use vellum_daemon::signals::Stop;
use vellum_daemon::tier::Watch;
use vellum_daemon::{ImageOptions, IoMode, run as run_worker};

use super::{Failure, if_locked};
use crate::args::{AllowArgs, OutputFormat};
use crate::output::{complain, human_bytes, say, say_json};
use crate::progress::{Progress, Wish};

/// The disk: a closed image, or one of a running server.
#[derive(clap::Args)]
pub(super) struct OfDisk {
    /// Control socket of the server that serves the disk, as given to `vellum serve --control`
    #[arg(long, value_name = "PATH", conflicts_with = "image")]
    pub(super) control: Option<PathBuf>,
    /// Export name of the disk; optional if the server has one disk
    #[arg(long, value_name = "EXPORT", requires = "control", conflicts_with = "image")]
    pub(super) disk: Option<String>,
    /// The image
    #[arg(value_name = "DISK", required_unless_present = "control")]
    pub(super) image: Option<PathBuf>,
}

/// A disk and its fast medium.
#[derive(clap::Args)]
pub(super) struct WithFast {
    /// The fast medium
    #[arg(long, value_name = "PATH", required_unless_present = "control", conflicts_with = "control")]
    fast: Option<PathBuf>,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    #[command(flatten)]
    allow: AllowArgs,
    #[command(flatten)]
    of: OfDisk,
}

impl WithFast {
    /// The server's answer, for a disk of a server.
    pub(super) fn ask(
        &self,
        request: impl FnOnce(Option<String>) -> Request,
    ) -> Result<Option<Value>, Failure> {
        let Some(control) = &self.of.control else { return Ok(None) };
        let request = request(self.of.disk.clone());
        Ok(Some(run_worker(IoMode::Auto, async || call(control, &request).await)??))
    }

    /// The image, its fast medium, and how it is opened.
    pub(super) fn closed(&self) -> (PathBuf, PathBuf, ImageOptions) {
        let image = self.of.image.clone().expect("an image or a socket is given");
        (image, self.fast.clone().expect("required with an image"), options_of(&self.allow))
    }

    /// Does long work with a bar on a terminal. A signal ends it between two pieces.
    pub(super) fn watched<T>(
        &self,
        work: impl AsyncFnOnce(Watch<'_>) -> Result<T, Error>,
    ) -> Result<T, Failure> {
        let wish = Wish { is_wanted: false, quiet: false, output: self.output };
        let done = run_worker(IoMode::Auto, async || {
            let stop = Stop::new()?;
            let bar = OnceCell::new();
            let progress = |size, done| bar.get_or_init(|| Progress::new(size, wish)).set(done);
            let done = work(Watch { stop: &stop.flag, progress: &progress }).await;
            bar.get().into_iter().for_each(Progress::end);
            done
        });
        done?.map_err(in_use)
    }

    pub(super) fn says_json(&self, answer: &Value) -> bool {
        let is_json = self.output == OutputFormat::Json;
        if is_json {
            say_json(answer);
        }
        is_json
    }
}

pub(super) fn in_use(error: Error) -> Failure {
    if_locked(error, "stop that server first, or ask it with --control PATH")
}

/// As above, of a command that no server takes.
pub(super) fn in_use_alone(error: Error) -> Failure {
    if_locked(error, "stop that server first")
}

pub(super) fn options_of(allow: &AllowArgs) -> ImageOptions {
    ImageOptions { allow_dirs: allow.places(), remote: allow.remote.usual(), ..ImageOptions::default() }
}

/// Complains of what could not be moved, and says how the command ends.
pub(super) fn code_for_moved(answer: &Value) -> ExitCode {
    code_for(
        answer,
        "could not be read, and are in the image as before",
        "nothing about them has changed, and the rest was moved: look whether the medium or the image fails, and move again",
    )
}

/// Complains of what could not be taken back, and says how the command ends.
pub(super) fn code_for_left(answer: &Value) -> ExitCode {
    code_for(
        answer,
        "are on the fast medium alone still, which does not give them",
        "what can be read of the disk is copied by `vellum convert --salvage --fast PATH`",
    )
}

fn code_for(answer: &Value, what: &str, remedy: &str) -> ExitCode {
    let bytes = answer["left-bytes"].as_u64().unwrap_or_default();
    let code = if answer["interrupted"] == true {
        complain(
            "vellum tier: interrupted: what is done stays done, and the rest is as before; run it again to continue",
        );
        ExitCode::from(INTERRUPTED)
    } else {
        ExitCode::FAILURE
    };
    if bytes == 0 {
        return if answer["interrupted"] == true { code } else { ExitCode::SUCCESS };
    }
    let why = answer["why"].as_str().map(|why| format!(" ({why})")).unwrap_or_default();
    complain(&format!("vellum tier: {bytes} bytes of the disk {what}{why}:"));
    let parts = answer["left"].as_array().map(Vec::as_slice).unwrap_or_default();
    let number = |part: &Value, at: usize| part[at].as_u64().unwrap_or_default();
    for part in parts {
        complain(&format!("  {} bytes at {}", number(part, 1), number(part, 0)));
    }
    if parts.iter().map(|part| number(part, 1)).sum::<u64>() < bytes {
        complain("  and more");
    }
    complain(remedy);
    code
}

const INTERRUPTED: u8 = 130;
const NO_ROOM: &str = "found no room: the medium is full, or the budget is spent";
const NO_BIT: &str =
    "lie behind the end that the disk had when it was attached: detach it and attach it again";

/// The subject and verb of a sentence on where units are, with their size.
pub(super) fn units_are(units: u64, bytes: &str) -> String {
    match units {
        1 => format!("1 unit ({bytes}) is"),
        _ => format!("{units} units ({bytes}) are"),
    }
}

/// What became of units that were to be moved.
pub(super) fn say_moved(answer: &Value) {
    let number = |field: &str| answer[field].as_u64().unwrap_or_default();
    let bytes = human_bytes(number("moved") * number("unit-size"));
    say(&format!("{} on the fast medium alone now", units_are(number("moved"), &bytes)));
    for (field, what) in [
        ("there", "were so already"),
        ("not-copied", "have no copy there"),
        ("zero", "are zero"),
        ("no-room", NO_ROOM),
        ("no-bit", NO_BIT),
        (
            "not-stored",
            "are read from the backing image, as a whole or in part, and stay there (`vellum flatten` copies it first)",
        ),
        ("written", "were written meanwhile"),
    ] {
        if number(field) > 0 {
            say(&format!("  {} {what}", number(field)));
        }
    }
}

/// What became of units that were to be taken back.
pub(super) fn say_demoted(answer: &Value) {
    let units = answer["demoted"].as_u64().unwrap_or_default();
    let what = if units == 1 { "unit is" } else { "units are" };
    say(&format!("{units} {what} read from the image again"));
}

/// What became of units that were to be promoted.
pub(super) fn say_units(answer: &Value) {
    let number = |field: &str| answer[field].as_u64().unwrap_or_default();
    let bytes = human_bytes(number("promoted") * number("unit-size"));
    say(&format!("{} on the fast medium now", units_are(number("promoted"), &bytes)));
    for (field, what) in [
        ("there", "were there already"),
        ("in-backing", "are read from the backing image: --copy promotes them, too"),
        ("zero", "are zero"),
        ("written", "were written meanwhile"),
        ("no-room", NO_ROOM),
        ("no-bit", NO_BIT),
    ] {
        if number(field) > 0 {
            say(&format!("  {} {what}", number(field)));
        }
    }
}
