//! `vellum bench`: how fast is a disk on this host?

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use serde_json::json;
use vellum_core::{Error, ErrorKind, Result};
use vellum_daemon::bench::{Load, bench};
use vellum_daemon::signals::Stop;
use vellum_daemon::{ImageOptions, IoMode, open_image, run as run_worker};

use super::{Failure, Outcome, or_share, with_code};
use crate::args::{OutputFormat, ReadArgs, parse_size};
use crate::output::{say, say_json};

/// Send requests to a disk, one after another in several lanes, and print how long they took
///
/// Reads by default. With -w the disk is overwritten.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    read: ReadArgs,
    /// Number of requests
    #[arg(short, long, value_name = "N", default_value_t = 75_000)]
    count: u64,
    /// Number of requests in flight
    #[arg(short, long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    depth: u32,
    /// Size of a request
    #[arg(short = 's', long, value_name = "SIZE", value_parser = parse_request_size, default_value = "4k")]
    buffer_size: u64,
    /// Offset of the first request
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size, default_value = "0")]
    offset: u64,
    /// How far a request begins behind the one before. Default: the size of a request
    #[arg(short = 'S', long, value_name = "SIZE", value_parser = parse_size)]
    step_size: Option<u64>,
    /// Write instead of reading; what is on the disk is lost
    #[arg(short, long)]
    write: bool,
    /// With -w: the byte that is written
    #[arg(long, value_name = "BYTE", default_value_t = 0, requires = "write")]
    pattern: u8,
    /// With -w: flush after this many requests
    #[arg(long, value_name = "N", requires = "write", value_parser = clap::value_parser!(u64).range(1..))]
    flush_interval: Option<u64>,
    /// Do not wait for the requests in flight before a flush
    #[arg(long, requires = "flush_interval")]
    no_drain: bool,
    /// Bypass the page cache (O_DIRECT)
    #[arg(long)]
    direct: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// The image
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// A request has at most 1 GiB, and as many as are in flight must fit memory.
fn parse_request_size(text: &str) -> Result<u64> {
    match parse_size(text)? {
        bytes @ 1..=0x4000_0000 => Ok(bytes),
        _ => Err(Error::invalid(format!("invalid size {text:?}: a request has 1 byte to 1G"))),
    }
}

impl Args {
    fn load(&self) -> Result<Load> {
        let flush_every = self.flush_interval;
        if let Some(every) = flush_every.filter(|every| *every < u64::from(self.depth)) {
            return Err(Error::invalid(format!(
                "--flush-interval {every} must not be less than the {} requests in flight (-d)",
                self.depth
            )));
        }
        let in_flight = self.buffer_size.saturating_mul(u64::from(self.depth));
        if in_flight > 4 << 30 {
            return Err(Error::invalid(format!(
                "{in_flight} bytes in flight: use a smaller -d or -s, at most 4G together"
            )));
        }
        Ok(Load {
            count: self.count,
            depth: usize::try_from(self.depth).expect("small"),
            bytes: usize::try_from(self.buffer_size).expect("at most 1 GiB"),
            start: self.offset,
            step: self.step_size.unwrap_or(self.buffer_size),
            pattern: self.write.then_some(self.pattern),
            flush_every,
            drains: !self.no_drain,
        })
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    let load = args.load()?;
    let took = run_worker(IoMode::Auto, async || send(args, load).await)??;
    let seconds = took.as_secs_f64();
    match args.output {
        OutputFormat::Json => say_json(&json!({
            "requests": load.count,
            "bytes": load.count.saturating_mul(load.bytes as u64),
            "seconds": seconds,
        })),
        OutputFormat::Human if !args.quiet => say(&format!("Run completed in {seconds:.3} seconds.")),
        OutputFormat::Human => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// What is about to be done.
fn announce(args: &Args, load: &Load) {
    if args.output == OutputFormat::Json || args.quiet {
        return;
    }
    let kind = if args.write { "write" } else { "read" };
    say(&format!(
        "Sending {} {kind} requests, {} bytes each, {} in parallel (starting at offset {}, step size {})",
        load.count, load.bytes, load.depth, load.start, load.step
    ));
    if let Some(every) = load.flush_every {
        say(&format!("Sending flush every {every} requests"));
    }
}

async fn send(args: &Args, load: Load) -> Result<Duration, Failure> {
    let (file, reading) = args.read.open(&args.file)?;
    let options = ImageOptions {
        read_only: !args.write,
        force_share: args.read.force_share,
        direct: args.direct,
        may_be_weak: !args.write,
        ..reading
    };
    let stop = Stop::new()?;
    let image = open_image(&file, &options).await;
    let image = if args.write { image? } else { image.map_err(or_share)? };
    if load.bytes as u64 <= image.disk().geometry().size {
        announce(args, &load);
    }
    let took = bench(image.disk(), load, &stop.flag).await;
    let closed = image.close().await;
    let took = took.map_err(|error| match error.kind() {
        ErrorKind::Closed if stop.is_requested() => with_code(130)(error.context("interrupted")),
        _ => error.into(),
    })?;
    closed?;
    Ok(took)
}
