//! What the commands share that change an image and those below it while no server has them: flatten, rebase, commit.

use std::cell::OnceCell;
use std::path::PathBuf;

use serde_json::Value;
use vellum_core::{ErrorKind, Result};
use vellum_daemon::signals::Stop;
use vellum_daemon::{FormatKind, ImageOptions};

use super::{Failure, with_code};
use crate::args::{AllowArgs, OutputFormat, parse_format};
use crate::output::{say, say_json, say_json_line};
use crate::progress::{Progress, Wish};
use crate::secrets::SecretArgs;
use vellum_daemon::control::SecretFile;

/// How the images are opened, and what is printed
#[derive(clap::Args)]
pub(crate) struct ChangeArgs {
    /// Format of the image: qcow2 or vellum. Default: detected from the file
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// Bypass the page cache (O_DIRECT)
    #[arg(long)]
    direct: bool,
    /// Allow writing to FILE as the data file of the image that is written
    #[arg(long, value_name = "FILE")]
    data_file: Vec<PathBuf>,
    /// Show progress
    ///
    /// A terminal always shows a progress bar. Elsewhere, -p prints lines as qemu-img does, or lines of JSON
    /// with --output json. SIGUSR1 prints the progress once, with or without -p.
    #[arg(short, long)]
    progress: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    #[command(flatten)]
    pub(crate) allow: AllowArgs,
    #[command(flatten)]
    secrets: SecretArgs,
}

impl ChangeArgs {
    /// How the images are opened.
    pub(crate) fn options(&self) -> Result<ImageOptions> {
        Ok(ImageOptions {
            secrets: self.secrets.read()?,
            format: self.format,
            direct: self.direct,
            allow_dirs: self.allow.places(),
            remote: self.allow.remote.usual(),
            data_files: self.data_file.clone(),
            ..ImageOptions::default()
        })
    }

    /// Where the secrets are, for a server to read them.
    pub(crate) fn secret_files(&self) -> Result<Vec<SecretFile>> {
        self.secrets.files()
    }

    /// Does the work with a progress bar. A signal ends it, with what can be done then.
    pub(crate) async fn watched<T>(
        &self,
        work: impl AsyncFnOnce(&mut Stop, &dyn Fn(u64, u64)) -> Result<T>,
    ) -> Result<T, Failure> {
        self.watched_until("interrupted; run it again to continue", work).await
    }

    /// As above, with what it means that it was interrupted.
    pub(crate) async fn watched_until<T>(
        &self,
        interrupted: &'static str,
        work: impl AsyncFnOnce(&mut Stop, &dyn Fn(u64, u64)) -> Result<T>,
    ) -> Result<T, Failure> {
        let mut stop = Stop::new()?;
        let wish = Wish { is_wanted: self.progress, quiet: self.quiet, output: self.output };
        let bar = OnceCell::new();
        let progress = |size, done| bar.get_or_init(|| Progress::new(size, wish)).set(done);
        let done = work(&mut stop, &progress).await;
        bar.get().into_iter().for_each(Progress::end);
        done.map_err(|error| match error.kind() {
            ErrorKind::Closed if stop.is_requested() => with_code(130)(error.context(interrupted)),
            _ => error.into(),
        })
    }

    /// Prints the answer: as JSON, or these lines.
    pub(crate) fn answer(&self, answer: &Value, lines: &[String]) {
        match self.output {
            // Among lines of JSON the answer is one of them.
            OutputFormat::Json if self.progress => say_json_line(answer),
            OutputFormat::Json => say_json(answer),
            OutputFormat::Human if self.quiet => {}
            OutputFormat::Human => lines.iter().for_each(|line| say(line)),
        }
    }

    /// Whether nothing but errors is printed.
    pub(crate) fn is_quiet(&self) -> bool {
        self.quiet
    }
}
