//! `vellum trace`: in which order a guest that boots reads its disk.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::json;
use vellum_core::{Context, Error, ErrorKind, Result};
use vellum_daemon::control::{Request, call};
use vellum_daemon::{IoMode, Run, TRACE_BYTES_MAX, Trace, run as run_worker};

use super::Outcome;
use crate::args::OutputFormat;
use crate::log::note;
use crate::output::{human_bytes, say, say_json, table};

/// Record or show a boot trace: the order in which a guest reads its backing images
///
/// A trace that was recorded while one clone of a template booted makes the next one boot faster: `vellum serve
/// --prefetch --prefetch-trace FILE` copies in this order.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(clap::Subcommand)]
enum Verb {
    /// Save what the disk has read from its backing images so far, in the order of the first reads
    ///
    /// The server must have been started with --record-trace. What was prefetched before a guest asked for it is not in the
    /// trace, so record without --prefetch.
    Record(RecordArgs),
    /// Show a trace
    Show(ShowArgs),
}

#[derive(clap::Args)]
struct RecordArgs {
    /// Control socket of the server, as given to `vellum serve --control`
    #[arg(long, value_name = "PATH")]
    control: PathBuf,
    /// Export name of the disk; optional if the server has one disk
    #[arg(long, value_name = "EXPORT")]
    disk: Option<String>,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// The trace; an existing file is replaced
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

#[derive(clap::Args)]
struct ShowArgs {
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// The trace
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub(crate) fn run(args: &Args) -> Outcome {
    match &args.verb {
        Verb::Record(args) => record(args)?,
        Verb::Show(args) => show(args)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads a trace.
///
/// # Errors
/// When the file cannot be read, or is no trace. What is not a regular file is not read: a pipe may never end.
pub(super) fn read_trace(path: &Path) -> Result<Trace> {
    let mut bytes = Vec::new();
    if path.metadata().is_ok_and(|facts| !facts.is_file()) {
        let path = path.display();
        return Err(Error::invalid(format!("{path} is not a regular file: name the file of a boot trace")));
    }
    let read = File::open(path).and_then(|file| file.take(TRACE_BYTES_MAX + 1).read_to_end(&mut bytes));
    read.context(|| format!("can't read the boot trace {}", path.display()))?;
    Trace::decode(&bytes)
        .context(|| format!("{}: can't be used; record another with `vellum trace record`", path.display()))
}

fn record(args: &RecordArgs) -> Result<()> {
    let request = Request::Trace { disk: args.disk.clone() };
    let answer = run_worker(IoMode::Auto, async || call(&args.control, &request).await)??;
    let unexpected = || Error::new(ErrorKind::Io, "unexpected answer of the server");
    let runs: Vec<[u64; 2]> = serde_json::from_value(answer["runs"].clone()).map_err(|_| unexpected())?;
    let runs = runs.into_iter().map(|[at, len]| Run { at, len }).collect();
    let disk_size = answer["virtual-size"].as_u64().ok_or_else(unexpected)?;
    let trace = Trace { disk_size, runs };
    write(&args.file, &trace.encode())?;
    if answer["whole"] == false {
        note("the trace is full: what was read after that is not in it");
    }
    let bytes: u64 = trace.runs.iter().map(|run| run.len).sum();
    match args.output {
        OutputFormat::Json => say_json(&json!({
            "filename": args.file.display().to_string(),
            "runs": trace.runs.len(),
            "bytes": bytes,
            "whole": answer["whole"],
        })),
        OutputFormat::Human => {
            let (file, runs) = (args.file.display(), trace.runs.len());
            say(&format!("{file}: {runs} runs, {} read from backing images", human_bytes(bytes)));
        }
    }
    Ok(())
}

/// A reader of the file sees the trace before, or this one.
fn write(path: &Path, text: &str) -> Result<()> {
    let context = || format!("can't write the boot trace {}", path.display());
    let name = path
        .file_name()
        .ok_or_else(|| Error::invalid(format!("{}: this is not the name of a file", context())))?;
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".vellum-{}", std::process::id()));
    let temporary = path.with_file_name(hidden);
    let written = File::create_new(&temporary).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)
    });
    if matches!(&written, Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists) {
        let _ = std::fs::remove_file(&temporary);
    }
    written.context(context)
}

fn show(args: &ShowArgs) -> Result<()> {
    let trace = read_trace(&args.file)?;
    let bytes: u64 = trace.runs.iter().map(|run| run.len).sum();
    match args.output {
        OutputFormat::Json => {
            let runs: Vec<_> =
                trace.runs.iter().map(|run| json!({ "start": run.at, "length": run.len })).collect();
            say_json(&json!({ "virtual-size": trace.disk_size, "bytes": bytes, "runs": runs }));
        }
        OutputFormat::Human => {
            say(&format!(
                "disk: {}, read: {} in {} runs",
                human_bytes(trace.disk_size),
                human_bytes(bytes),
                trace.runs.len()
            ));
            let rows = trace.runs.iter().map(|run| [run.at.to_string(), run.len.to_string()]);
            table(["START", "LENGTH"], 0, rows).iter().for_each(|line| say(line));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_a_regular_file() {
        let refused = read_trace(Path::new("/dev/null")).expect_err("it is a device");
        assert!(refused.to_string().contains("is not a regular file"), "{refused}");
    }
}
