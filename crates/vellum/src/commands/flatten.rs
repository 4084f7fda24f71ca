//! `vellum flatten`: an image that no longer needs its backing image.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::json;
use vellum_core::ErrorKind;
use vellum_daemon::control::{Request, call};
use vellum_daemon::flatten::{Flattened, flatten};
use vellum_daemon::signals::Stop;
use vellum_daemon::{FormatKind, ImageOptions, IoMode, run as run_worker};

use super::{Failure, Outcome, with_code};
use crate::args::{AllowArgs, OutputFormat, parse_format};
use crate::output::{human_bytes, say, say_json, say_json_line};
use crate::progress::{Progress, Wish};
use crate::secrets::SecretArgs;

/// Make an image independent of its backing image
///
/// Everything that the disk still reads from the images below is copied into the image. Then the reference to the
/// backing image is removed. Ranges that read as zero take no space. The disk does not change, and a crash at any
/// moment loses nothing: if the command is interrupted, run it again, and it continues. An image with snapshots is
/// refused, because they also read from the backing image.
///
/// With --control the disk of a running server is flattened while it is served. If the command is interrupted, the server
/// carries on.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the image: qcow2 or vellum. Default: detected from the file
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// Maximum number of reads in flight
    #[arg(short = 'm', long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=64))]
    parallel: u16,
    /// Bypass the page cache (O_DIRECT)
    #[arg(long)]
    direct: bool,
    /// Allow writing to FILE as the data file of the image
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
    allow: AllowArgs,
    #[command(flatten)]
    secrets: SecretArgs,
    /// The image
    #[arg(value_name = "FILE", required_unless_present = "control", conflicts_with = "control")]
    file: Option<PathBuf>,
    /// Control socket of the server that serves the image, as given to `vellum serve --control`
    #[arg(long, value_name = "PATH", conflicts_with_all = ["format", "direct", "data_file", "allow_dir", "allow_url", "remote_timeout", "progress"])]
    control: Option<PathBuf>,
    /// Export name of the disk; optional if the server has one disk
    #[arg(long, value_name = "EXPORT", requires = "control")]
    disk: Option<String>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let Some(file) = &args.file else { return served(args) };
    let Flattened { backing, bytes_written } =
        run_worker(IoMode::Auto, async || flattened(args, file).await)??;
    let name = file.display();
    let backing = backing.map(|path| path.display().to_string());
    match args.output {
        OutputFormat::Json => {
            let answer = json!({
                "filename": name.to_string(),
                "backing-filename": backing,
                "bytes-written": bytes_written,
            });
            // Among lines of JSON the answer is one of them.
            if args.progress { say_json_line(&answer) } else { say_json(&answer) }
        }
        OutputFormat::Human if args.quiet => {}
        OutputFormat::Human => say(&match backing {
            Some(backing) => {
                format!("{name} no longer needs {backing}: {} copied", human_bytes(bytes_written))
            }
            None => format!("{name} has no backing image: nothing to do"),
        }),
    }
    Ok(ExitCode::SUCCESS)
}

/// The disk of a server.
fn served(args: &Args) -> Outcome {
    let control = args.control.as_ref().expect("one of the two is given");
    let request = Request::Flatten { disk: args.disk.clone() };
    let answer = run_worker(IoMode::Auto, async || call(control, &request).await)??;
    match args.output {
        OutputFormat::Json => say_json(&answer),
        OutputFormat::Human if args.quiet => {}
        OutputFormat::Human => {
            let copied = human_bytes(answer["bytes-written"].as_u64().unwrap_or_default());
            let name = answer["filename"].as_str().unwrap_or("the disk");
            say(&format!("{name} no longer needs a backing image: {copied} copied"));
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn flattened(args: &Args, file: &Path) -> Result<Flattened, Failure> {
    let options = ImageOptions {
        secrets: args.secrets.read()?,
        format: args.format,
        direct: args.direct,
        allow_dirs: args.allow.places(),
        remote_timeout: args.allow.remote_timeout,
        data_files: args.data_file.clone(),
        ..ImageOptions::default()
    };
    let mut stop = Stop::new()?;
    let wish = Wish { is_wanted: args.progress, quiet: args.quiet, output: args.output };
    let bar = OnceCell::new();
    let progress = |size, done| bar.get_or_init(|| Progress::new(size, wish)).set(done);
    let done = flatten(file, &options, usize::from(args.parallel), &mut stop, &progress).await;
    bar.get().into_iter().for_each(Progress::end);
    done.map_err(|error| match error.kind() {
        ErrorKind::Closed => with_code(130)(error.context("interrupted; run it again to continue")),
        _ => error.into(),
    })
}
