//! `vellum flatten`: an image that no longer needs its backing image.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::json;
use vellum_daemon::control::{Request, call};
use vellum_daemon::flatten::{Flattened, flatten};
use vellum_daemon::{IoMode, run as run_worker};

use super::change::ChangeArgs;
use super::{Failure, Outcome};
use crate::output::human_bytes;
use crate::protocol::image_name;

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
    #[command(flatten)]
    change: ChangeArgs,
    /// Maximum number of reads in flight
    #[arg(short = 'm', long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=64))]
    parallel: u16,
    /// The image
    #[arg(value_name = "FILE", required_unless_present = "control", conflicts_with = "control", value_parser = image_name())]
    file: Option<PathBuf>,
    /// Control socket of the server that serves the image, as given to `vellum serve --control`
    #[arg(long, value_name = "PATH", conflicts_with_all = ["format", "direct", "data_file", "allow_dir", "allow_url", "RemoteArgs", "progress"])]
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
    let line = match &backing {
        Some(backing) => {
            format!("{name} no longer needs {backing}: {} copied", human_bytes(bytes_written))
        }
        None => format!("{name} has no backing image: nothing to do"),
    };
    let answer = json!({
        "filename": name.to_string(),
        "backing-filename": backing,
        "bytes-written": bytes_written,
    });
    args.change.answer(&answer, &[line]);
    Ok(ExitCode::SUCCESS)
}

/// The disk of a server.
fn served(args: &Args) -> Outcome {
    let control = args.control.as_ref().expect("one of the two is given");
    let request = Request::Flatten { disk: args.disk.clone() };
    let answer = run_worker(IoMode::Auto, async || call(control, &request).await)??;
    let copied = human_bytes(answer["bytes-written"].as_u64().unwrap_or_default());
    let name = answer["filename"].as_str().unwrap_or("the disk");
    let line = format!("{name} no longer needs a backing image: {copied} copied");
    args.change.answer(&answer, &[line]);
    Ok(ExitCode::SUCCESS)
}

async fn flattened(args: &Args, file: &Path) -> Result<Flattened, Failure> {
    let options = args.change.options()?;
    let parallel = usize::from(args.parallel);
    args.change.watched(async |stop, progress| flatten(file, &options, parallel, stop, progress).await).await
}
