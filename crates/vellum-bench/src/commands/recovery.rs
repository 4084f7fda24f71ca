//! `vellum-bench recovery`: how long it takes to open an image whose server was killed.
//!
//! ```text
//!   create, all mapped ► discard a sixteenth ► serve: writes to what was discarded, a flush after each ► SIGKILL
//!     ► out of the page cache ► `vellum recover`                the journal as full as one writer makes it: half of it
//!   writes, flushes, SIGKILL again ► out of the page cache ► `vellum serve`, until the first read is answered
//! ```
//!
//! The image is sparse: only its tables and the written data take space. The writes are scattered, so that
//! each record of the journal concerns other pages of the tables.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Instant, SystemTime};

use serde::Serialize;
use serde_json::Value;
use vellum_core::{Context, Error, Result};
use vellum_lab::cost::lab::{Desk, Lab};
use vellum_lab::guest::{Guest, Request};
use vellum_lab::programs;
use vellum_lab::report::{Output, Table, say_json};
use vellum_lab::server::{Cache, Running, Serving, Vellum};

use crate::host::Machine;
use crate::images::prepare;
use crate::report::short;

const CLUSTER_BYTES: u64 = 64 << 10;
const WRITE_BYTES: usize = 4096;
/// A record of one small write.
const RECORD_BYTES: u64 = 4096;
/// One part in this many of the disk is not mapped, and is spread over this many pieces.
const UNMAPPED_PART: u64 = 16;
const PIECES: u64 = 64;

/// Time opening an image with a full journal after its server was killed
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Size of the disk, a multiple of 64M; with --journal-size it replaces the usual cases
    #[arg(long, value_name = "SIZE", value_parser = super::parse_size, requires = "journal_size")]
    size: Option<u64>,
    /// Size of the disk's journal
    #[arg(long, value_name = "SIZE", value_parser = super::parse_size, requires = "size")]
    journal_size: Option<u64>,
    /// Directory for images and sockets. Default: the directory of this program
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// vellum program to measure. Default: the one beside this program
    #[arg(long, value_name = "PATH [ARGUMENT ...]", value_parser = Vellum::parse)]
    vellum: Option<Vellum>,
    /// Output format on stdout; with json, the table goes to stderr
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Output::Human)]
    output: Output,
}

/// Everything that was seen, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    unix_seconds: u64,
    machine: Machine,
    programs: Vec<String>,
    rows: Vec<Row>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row {
    size: u64,
    journal_bytes: u64,
    allocated_percent: f64,
    /// Writes, each with a flush, before each kill.
    flushed_writes: u64,
    records_replayed: u64,
    pages_written: u64,
    /// `vellum recover`, from its start to its end.
    recover_seconds: f64,
    /// `vellum serve`, from its start to the first answer, of an image that is not recovered.
    serve_seconds: f64,
    /// The same of the image when it had been closed.
    serve_clean_seconds: f64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let cases = match (args.size, args.journal_size) {
        (Some(size), Some(journal)) => vec![(size, journal)],
        _ => vec![(1 << 40, 64 << 20), (1 << 40, 1 << 20), (4 << 30, 1 << 20)],
    };
    if cases.iter().any(|(size, _)| *size == 0 || !size.is_multiple_of(64 << 20)) {
        return Err(Error::invalid("--size is a multiple of 64M"));
    }
    let lab = Lab::open(args.dir.as_ref(), args.vellum.as_ref())?;
    let table = Table::to(args.output);
    let machine = Machine::with(&lab.dir);
    table.say(&format!(
        "images on {}; Linux {}, {} processors; not in the page cache when they are opened",
        machine.medium, machine.kernel, machine.processors
    ));
    table.say(&lab.programs[0]);
    table.say("");
    table.say(&format!(
        "  {:>10} {:>9} {:>11} {:>8} {:>9} {:>7} {:>11} {:>13} {:>13}",
        "disk GiB",
        "mapped %",
        "journal KiB",
        "flushed",
        "replayed",
        "pages",
        "recover ms",
        "serve ms",
        "serve, closed"
    ));
    let mut rows = Vec::new();
    for (size, journal) in cases {
        let row = look(&lab, size, journal)?;
        table.say(&line(&row));
        rows.push(row);
    }
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        say_json(&Report { unix_seconds: now.as_secs(), machine, programs: lab.programs.clone(), rows });
    }
    Ok(())
}

/// The unmapped pieces, as places of clusters: number `index`, far from the one before.
fn scattered(size: u64, index: u64) -> u64 {
    let piece = size / UNMAPPED_PART / PIECES / CLUSTER_BYTES;
    // Odd, so that no place comes twice while the number of places is a power of two.
    let place = index * 7919 % (piece * PIECES);
    let (piece_index, within) = (place % PIECES, place / PIECES);
    (piece_index * piece * UNMAPPED_PART + within) * CLUSTER_BYTES
}

fn look(lab: &Lab, size: u64, journal_bytes: u64) -> Result<Row> {
    let desk = Desk::new(lab.dir.join("recovery"), "qcow2")?;
    let mut create = Command::new(&lab.vellum.path);
    create.args(["create", "-q", "-f", "qcow2", "-o"]);
    create.arg(format!("preallocation=metadata,journal=on,journal_size={journal_bytes}"));
    programs::run(create.arg(&desk.image).arg(size.to_string()))?;
    let serving = Serving {
        image: &desk.image,
        format: "qcow2",
        cache: Cache::Buffered,
        connections: 1,
        socket: &desk.socket,
    };
    let serve = || -> Result<(Running, Guest)> {
        let running = Running::start(&lab.vellum, &serving)?;
        let guest = Guest::connect(running.socket())?;
        Ok((running, guest))
    };
    let (running, mut guest) = serve()?;
    let piece = size / UNMAPPED_PART / PIECES;
    for index in 0..PIECES {
        let len = usize::try_from(piece).map_err(|_| Error::invalid("--size is too large"))?;
        guest.ask(Request::Discard { offset: index * piece * UNMAPPED_PART, len })?;
    }
    guest.leave()?;
    running.stop()?;
    // Half of the journal: from there on what is in it is checkpointed. Less what opening and verifying take.
    let half = journal_bytes / 2 / RECORD_BYTES;
    let flushed_writes = (half - half / 32).min(size / UNMAPPED_PART / CLUSTER_BYTES / 2);
    let mut next = 0;
    let mut fill_and_kill = || -> Result<()> {
        let (running, mut guest) = serve()?;
        for index in next..next + flushed_writes {
            guest.ask(Request::Write { offset: scattered(size, index), len: WRITE_BYTES })?;
            guest.ask(Request::Flush)?;
        }
        next += flushed_writes;
        running.kill()?;
        prepare(&desk.image, false)
    };
    fill_and_kill()?;
    let mut recover = Command::new(&lab.vellum.path);
    recover.args(["recover", "--output", "json"]).arg(&desk.image);
    let begun = Instant::now();
    let output = recover.output().context(|| "can't run vellum recover")?;
    let recover_seconds = begun.elapsed().as_secs_f64();
    let replayed = replayed(&output.stdout).ok_or_else(|| {
        Error::invalid(format!(
            "vellum recover replayed nothing: {}",
            String::from_utf8_lossy(&output.stderr)
        ))
    })?;
    fill_and_kill()?;
    let first_answer = || -> Result<f64> {
        let begun = Instant::now();
        let (running, mut guest) = serve()?;
        guest.read_a_block()?;
        let seconds = begun.elapsed().as_secs_f64();
        guest.leave()?;
        running.stop()?;
        Ok(seconds)
    };
    let serve_seconds = first_answer()?;
    prepare(&desk.image, false)?;
    let serve_clean_seconds = first_answer()?;
    #[expect(clippy::cast_precision_loss, reason = "clusters are far below 2^53")]
    let unmapped = (size / UNMAPPED_PART / CLUSTER_BYTES - flushed_writes) as f64;
    #[expect(clippy::cast_precision_loss, reason = "clusters are far below 2^53")]
    let allocated_percent = 100.0 - unmapped * 100.0 / (size / CLUSTER_BYTES) as f64;
    let (records_replayed, pages_written) = replayed;
    Ok(Row {
        size,
        journal_bytes,
        allocated_percent,
        flushed_writes,
        records_replayed,
        pages_written,
        recover_seconds,
        serve_seconds,
        serve_clean_seconds,
    })
}

/// How many records, and how many pages of tables.
fn replayed(answer: &[u8]) -> Option<(u64, u64)> {
    let answer: Value = serde_json::from_slice(answer).ok()?;
    let number = |place: &str| answer.pointer(place)?.as_u64();
    Some((number("/journal/records-replayed")?, number("/journal/pages-written")?))
}

fn line(row: &Row) -> String {
    let [recover, serve, clean] = [row.recover_seconds, row.serve_seconds, row.serve_clean_seconds]
        .map(|seconds| short(seconds * 1000.0));
    format!(
        "  {:>10} {:>9.1} {:>11} {:>8} {:>9} {:>7} {recover:>11} {serve:>13} {clean:>13}",
        row.size >> 30,
        row.allocated_percent,
        row.journal_bytes >> 10,
        row.flushed_writes,
        row.records_replayed,
        row.pages_written,
    )
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn places_are_different_and_all_in_what_was_discarded() {
        let size = 4 << 30;
        let piece = size / UNMAPPED_PART / PIECES;
        let places: HashSet<u64> = (0..1000).map(|index| scattered(size, index)).collect();
        assert_eq!(places.len(), 1000);
        assert!(places.iter().all(|at| at % (piece * UNMAPPED_PART) < piece && *at < size));
    }
}
