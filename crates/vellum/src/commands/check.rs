//! `vellum check`: what an image claims, compared; and repaired.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::ValueEnum;
use serde_json::json;
use vellum_core::Error;
use vellum_daemon::closed::{Checked, MovedFound, check};
use vellum_daemon::{CheckReport, FormatKind, IoMode, Repair, Session, run as run_worker};

use super::{Outcome, or_share, with_code};
use crate::args::{OutputFormat, ReadArgs};
use crate::output::{complain, say, say_json};

/// Check the metadata of an image for errors, and repair them with -r
///
/// Exit codes: 0 no errors, 1 the check failed, 2 the image is corrupt, 3 clusters are leaked (space is
/// wasted, data is not affected), 63 images of this format have nothing to check.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    read: ReadArgs,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// Repair errors of this kind
    #[arg(short, long, value_enum, value_name = "WHAT")]
    repair: Option<What>,
    /// The fast medium of the image: also look there for what it alone has (`vellum tier move`)
    ///
    /// What is lost is listed, and counts as an error of the image.
    #[arg(long, value_name = "PATH", conflicts_with = "repair")]
    fast: Option<PathBuf>,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// The image
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// What is repaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// Leaked clusters only
    Leaks,
    /// Everything that can be repaired
    All,
}

const CANNOT_CHECK: u8 = 1;
const CORRUPT: u8 = 2;
const LEAKS: u8 = 3;
const NOTHING_TO_CHECK: u8 = 63;

pub(crate) fn run(args: &Args) -> Outcome {
    let repair = match args.repair {
        None => Repair::Nothing,
        Some(What::Leaks) => Repair::Leaks,
        Some(What::All) => Repair::All,
    };
    let (file, options) = args.read.open(&args.file).map_err(with_code(1))?;
    let result =
        run_worker(IoMode::Auto, async || check(&file, &options, args.fast.as_deref(), repair).await)?;
    let Checked { format, report, lines, session, moved } =
        result.map_err(with_code(CANNOT_CHECK)).map_err(|failure| match args.repair {
            None => or_share(failure),
            Some(_) => failure,
        })?;
    let Some(report) = report else {
        let error = Error::unsupported(format!(
            "{} is a {format} image, which has no metadata to check",
            args.file.display()
        ));
        return Err(with_code(NOTHING_TO_CHECK)(error));
    };
    match args.output {
        OutputFormat::Json => {
            let mut answer = answer(args, format, &report);
            if let Some(session) = session.filter(Session::holds_writes) {
                answer["behind-flash-cache"] = json!(session.cache.to_string());
            }
            if let Some(MovedFound { units, unit_bytes, lost_bytes }) = moved {
                answer["moved-units"] = json!(units);
                answer["moved-bytes"] = json!(units * unit_bytes);
                if let Some(lost) = lost_bytes {
                    answer["lost-units"] = json!(lost.div_ceil(unit_bytes));
                    answer["lost-bytes"] = json!(lost);
                }
            }
            say_json(&answer);
        }
        OutputFormat::Human => {
            for line in &lines {
                complain(line);
            }
            if !args.quiet {
                summarise(&report);
            }
        }
    }
    Ok(ExitCode::from(match &report {
        report if report.check_errors > 0 => CANNOT_CHECK,
        report if report.corruptions > 0 => CORRUPT,
        report if report.leaks > 0 => LEAKS,
        _ => 0,
    }))
}

fn answer(args: &Args, format: FormatKind, report: &CheckReport) -> serde_json::Value {
    let mut answer = json!({
        "filename": args.file.display().to_string(),
        "format": format.to_string(),
        "check-errors": report.check_errors,
        "image-end-offset": report.image_end_offset,
        "total-clusters": report.total_clusters,
    });
    // As with qemu-img, what is zero is left out.
    for (name, value) in [
        ("corruptions", report.corruptions),
        ("leaks", report.leaks),
        ("corruptions-fixed", report.corruptions_fixed),
        ("leaks-fixed", report.leaks_fixed),
        ("allocated-clusters", report.allocated_clusters),
        ("fragmented-clusters", report.fragmented_clusters),
        ("compressed-clusters", report.compressed_clusters),
    ] {
        if value > 0 {
            answer[name] = json!(value);
        }
    }
    answer
}

fn summarise(report: &CheckReport) {
    if report.corruptions_fixed > 0 || report.leaks_fixed > 0 {
        say("The following inconsistencies were found and repaired:\n");
        say(&format!("    {} leaked clusters", report.leaks_fixed));
        say(&format!("    {} corruptions\n", report.corruptions_fixed));
        say("Double checking the fixed image now...");
    }
    if report.is_clean() {
        say("No errors were found on the image.");
    }
    if report.corruptions > 0 {
        say(&format!(
            "\n{} errors were found on the image.\nData may be corrupted, or further writes to the image may corrupt it.",
            report.corruptions
        ));
    }
    if report.leaks > 0 {
        say(&format!(
            "\n{} leaked clusters were found on the image.\nThis means waste of disk space, but no harm to data.",
            report.leaks
        ));
    }
    if report.check_errors > 0 {
        say(&format!("\n{} internal errors have occurred during the check.", report.check_errors));
    }
    if report.total_clusters > 0 && report.allocated_clusters > 0 {
        let share = |part: u64, whole: u64| {
            #[expect(clippy::cast_precision_loss, reason = "four digits are shown")]
            let share = part as f64 * 100.0 / whole as f64;
            share
        };
        say(&format!(
            "{}/{} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters",
            report.allocated_clusters,
            report.total_clusters,
            share(report.allocated_clusters, report.total_clusters),
            share(report.fragmented_clusters, report.allocated_clusters),
            share(report.compressed_clusters, report.allocated_clusters)
        ));
    }
    say(&format!("Image end offset: {}", report.image_end_offset));
}
