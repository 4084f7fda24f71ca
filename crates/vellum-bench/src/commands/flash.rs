//! `vellum-bench flash`: what a flash cache brings in front of a slow backend, beside programs without one.
//!
//! ```text
//!   for each delay    in each round, for each case    vellum --flash │ vellum │ qemu-nbd │ nbdkit cache    in turns
//!                                                     clones of one template: the first three
//!                                                     a guest that boots, twice    (boots.rs)
//!   course            a new cache: boot ► again ► commits ► mixed ► idle      hit ratio and flash writes, as a plot
//! ```
//!
//! The backend is an NBD server that answers late (`stand.rs`). Before the first round, everybody reads the part of the disk
//! that guests use once, so that a cache has what it keeps. Each round gives one ratio for each other program. Backend and cache
//! are on the same local drive, so a flash write costs what a write of the backend costs, without the delay.
//!
//! nbdkit's cache is not durable by itself: it is a file without a name, gone with the process. With `cache=writeback` a
//! flush writes what is new to the backend first, and that is what a guest can rely on.

mod boots;
mod cases;
mod course;
pub(super) mod stand;

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use vellum_core::{Context, Error, Result};
use vellum_lab::cost::lab::Lab;
use vellum_lab::guest::{Guest, Request};
use vellum_lab::programs;
use vellum_lab::report::{Output, Table, complain, say_json};
use vellum_lab::server::{Vellum, first_line_of};

use super::boot::system::System;
use super::parse_size;
use crate::host::Machine;
use crate::images::{prepare, write_raw};
use crate::report::{median, short, spread_percent};
use cases::{Case, Loads, Turn};
use course::Course;
use stand::{Counts, Disk, Stand, Way};

/// The part is read in pieces of this length before the first round.
const PIECE: usize = 256 << 10;
/// How often it is read, if a cache does not have all of it.
const PASSES: usize = 12;
/// After so much a cache gets time for what it keeps: it is in bounded memory until then.
const AT_ONCE: u64 = 4 << 20;
const SETTLES_IN: Duration = Duration::from_millis(60);

/// Compare a disk on a slow backend with and without a flash cache, and plot the course of the cache
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What each answer of the backend to a read or write is late, in milliseconds; may be given several times
    #[arg(long, value_name = "MILLISECONDS", default_values_t = [1, 10], value_parser = clap::value_parser!(u64).range(1..=1000))]
    delay: Vec<u64>,
    /// Size of the disk, in whole MiB
    #[arg(long, value_name = "SIZE", default_value = "128M", value_parser = parse_size)]
    size: u64,
    /// The part of the disk that guests use, in whole MiB
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = parse_size)]
    part: u64,
    /// Size of the flash cache
    #[arg(long, value_name = "SIZE", default_value = "128M", value_parser = parse_size)]
    flash: u64,
    /// Clones of one template
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=16))]
    clones: u8,
    /// Seconds of each turn
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    seconds: f64,
    /// Seconds of each phase of the plotted course
    #[arg(long, value_name = "SECONDS", default_value_t = 12.0)]
    course_seconds: f64,
    /// Number of rounds; each program has a turn at each case in each
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Number of rounds in which a Debian guest boots over each program, twice
    #[arg(long, value_name = "N", default_value_t = 0)]
    guest_rounds: u32,
    /// Directory with the guest's disk.raw, vmlinuz and initrd.img, which are made if they are not there (root, mmdebstrap).
    /// Default: boot-system in the directory of this program
    #[arg(long, value_name = "DIR")]
    system: Option<PathBuf>,
    /// Run only the cases whose names contain TEXT; may be given several times. The guest's is `guest`
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Write the plot of the course there
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Directory for images, caches and sockets. Default: the directory of this program
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// vellum program to measure. Default: the one beside this program
    #[arg(long, value_name = "PATH [ARGUMENT ...]", value_parser = Vellum::parse)]
    vellum: Option<Vellum>,
    /// Output format on stdout; with json, the table goes to stderr
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Output::Human)]
    output: Output,
}

/// A program at a case.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row {
    delay_ms: u64,
    case: Case,
    way: Way,
    turns: Vec<Turn>,
}

/// Everything that was seen, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    unix_seconds: u64,
    machine: Machine,
    programs: Vec<String>,
    rows: Vec<Row>,
    guests: Vec<boots::Row>,
    course: Option<Course>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let whole = |bytes: u64| bytes > 0 && bytes.is_multiple_of(1 << 20);
    if !whole(args.size) || !whole(args.part) || args.part > args.size {
        return Err(Error::invalid("--size and --part are in whole MiB, and the part is within the disk"));
    }
    let seconds = |seconds: f64, option: &str| {
        let time = Duration::try_from_secs_f64(seconds).ok().filter(|time| !time.is_zero());
        time.ok_or_else(|| Error::invalid(format!("{option} is a number above 0")))
    };
    let window = seconds(args.seconds, "--seconds")?;
    let long = seconds(args.course_seconds, "--course-seconds")?;
    let mut programs = Vec::new();
    for program in ["nbdkit", "nbdfuse", "fio"] {
        match first_line_of(Command::new(program).arg("--version")) {
            Ok(version) => programs.push(version),
            Err(error) => {
                complain(&format!("skipped: {}", error.chain()));
                return Ok(());
            }
        }
    }
    let lab = Lab::open(args.dir.as_ref(), args.vellum.as_ref())?;
    programs.splice(0..0, lab.programs.iter().cloned());
    let machine = Machine::with(&lab.dir);
    let table = Table::to(args.output);
    table.say(&format!(
        "disk of {} MiB behind NBD that is late, guests use {} MiB; flash cache of {} MiB; {} rounds of {} s; Linux {}, {} \
         processors, {}",
        args.size >> 20,
        args.part >> 20,
        args.flash >> 20,
        args.rounds,
        args.seconds,
        machine.kernel,
        machine.processors,
        machine.medium
    ));
    programs.iter().for_each(|program| table.say(program));
    if let Some(reason) = &lab.no_qemu {
        table.say(&format!("skipped: {}: {reason}", Way::Qemu.title()));
    }
    let (raw, full) = (lab.dir.join("disk.raw"), lab.dir.join("disk.qcow2"));
    write_raw(&raw, args.size).context(|| format!("can't write {}", raw.display()))?;
    let mut convert = Command::new(&lab.vellum.path);
    programs::run(
        convert.args(["convert", "-q", "-f", "raw", "-O", "qcow2", "-o", "journal=off"]).arg(&raw).arg(&full),
    )?;
    prepare(&full, false)?;
    prepare(&raw, false)?;
    let disk = Disk { raw: &raw, full: &full, flash_bytes: args.flash };
    let loads = Loads::new(args.part, window)?;
    let system = system(args)?;
    let (mut rows, mut guests) = (Vec::new(), Vec::new());
    for delay_ms in &args.delay {
        let context = || format!("{delay_ms} ms");
        let seen = measure(&lab, args, &disk, &loads, *delay_ms).context(context)?;
        lines(&seen).iter().for_each(|line| table.say(line));
        rows.extend(seen);
        if let Some(system) = &system {
            let ways: Vec<Way> = ways(&lab).collect();
            let seen = boots::measure(&lab, &ways, system, args.flash, *delay_ms, args.guest_rounds);
            let seen = seen.context(context)?;
            boots::lines(&seen).iter().for_each(|line| table.say(line));
            guests.extend(seen);
        }
    }
    if rows.is_empty() && guests.is_empty() {
        return Err(Error::invalid("--only names no case; that of the guest needs --guest-rounds"));
    }
    let course = match &args.svg {
        None => None,
        Some(file) => {
            let delay_ms = args.delay.iter().copied().max().unwrap_or(1);
            let stand = Stand::of_disk(&lab, Way::Cached, delay_ms, &disk, "course")?;
            let course = Course::run(&stand, &Loads::new(args.part, long)?)?;
            stand.stop()?;
            table.say(&format!("a new cache, {delay_ms} ms:"));
            course.lines().iter().for_each(|line| table.say(line));
            fs::write(file, course.svg()).context(|| format!("can't write {}", file.display()))?;
            Some(course)
        }
    };
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        say_json(&Report { unix_seconds: now.as_secs(), machine, programs, rows, guests, course });
    }
    Ok(())
}

/// What boots, if guests do.
fn system(args: &Args) -> Result<Option<System>> {
    if args.guest_rounds == 0
        || !(args.only.is_empty() || args.only.iter().any(|text| "guest".contains(text)))
    {
        return Ok(None);
    }
    let beside = || programs::dir_or_beside_me(args.dir.as_ref()).map(|dir| dir.join("boot-system"));
    let there = first_line_of(Command::new("qemu-system-x86_64").arg("--version"));
    match there.and_then(|_| System::get(&args.system.clone().map_or_else(beside, Ok)?, complain)) {
        Ok(system) => Ok(Some(system)),
        Err(error) => {
            complain(&format!("skipped: no guest boots: {}", error.chain()));
            Ok(None)
        }
    }
}

fn ways(lab: &Lab) -> impl Iterator<Item = Way> {
    Way::ALL.into_iter().filter(|way| *way != Way::Qemu || lab.no_qemu.is_none())
}

/// All programs at all cases, behind this delay.
fn measure(lab: &Lab, args: &Args, disk: &Disk<'_>, loads: &Loads, delay_ms: u64) -> Result<Vec<Row>> {
    let wanted =
        |case: Case| args.only.is_empty() || args.only.iter().any(|text| case.title().contains(text));
    let mut stands: Vec<(Vec<Case>, Stand)> = Vec::new();
    let of_disks: Vec<Case> = Case::OF_DISKS.into_iter().filter(|case| wanted(*case)).collect();
    for way in ways(lab).filter(|_| !of_disks.is_empty()) {
        let stand = Stand::of_disk(lab, way, delay_ms, disk, &format!("{}-{delay_ms}", way.title()))?;
        stands.push((of_disks.clone(), stand));
    }
    for way in ways(lab).filter(|way| *way != Way::NbdkitCache && wanted(Case::Clones)) {
        let stand = Stand::of_clones(lab, way, delay_ms, disk, args.clones.into())?;
        stands.push((vec![Case::Clones], stand));
    }
    for (_, stand) in &stands {
        warm(stand, args.part)?;
    }
    let mut rows: Vec<Row> = Vec::new();
    for round in 0..args.rounds {
        for case in Case::OF_DISKS.into_iter().chain([Case::Clones]) {
            let doing: Vec<&Stand> =
                stands.iter().filter(|(cases, _)| cases.contains(&case)).map(|(_, stand)| stand).collect();
            for turn in 0..doing.len() {
                let stand = doing[(round as usize + turn) % doing.len()];
                let before = stand.counts()?;
                let mut turn = loads
                    .run(case, &stand.doors, round)
                    .context(|| format!("{}, {}", case.title(), stand.way.title()))?;
                turn.flash = stand.counts()?.zip(before).map(|(after, before)| after.since(&before));
                let is_it = |row: &&mut Row| row.case == case && row.way == stand.way;
                match rows.iter_mut().find(is_it) {
                    Some(row) => row.turns.push(turn),
                    None => {
                        rows.push(Row { delay_ms: stand.delay_ms, case, way: stand.way, turns: vec![turn] })
                    }
                }
            }
        }
    }
    stands.into_iter().try_for_each(|(_, stand)| stand.stop())?;
    Ok(rows)
}

/// Reads the guests' part; a cache gets what it keeps in the background, and is asked again for what it refused.
fn warm(stand: &Stand, part: u64) -> Result<()> {
    let began = Instant::now();
    let (socket, export) = &stand.doors[0];
    let mut guest = Guest::connect_to(socket, export)?;
    for _ in 0..if stand.way == Way::Cached { PASSES } else { 1 } {
        let before = stand.counts()?;
        for offset in (0..part).step_by(PIECE) {
            guest.ask(Request::Read { offset, len: PIECE })?;
            if stand.way == Way::Cached && (offset + PIECE as u64).is_multiple_of(AT_ONCE) {
                std::thread::sleep(SETTLES_IN);
            }
        }
        let missed = stand.counts()?.zip(before).map(|(after, before)| after.misses - before.misses);
        if missed == Some(0) {
            break;
        }
    }
    guest.leave()?;
    complain(&format!(
        "{} ms, {}: read once in {:.1} s",
        stand.delay_ms,
        stand.way.title(),
        began.elapsed().as_secs_f64()
    ));
    Ok(())
}

fn lines(rows: &[Row]) -> Vec<String> {
    let mut lines = Vec::new();
    for case in Case::OF_DISKS.into_iter().chain([Case::Clones]) {
        let of_case: Vec<&Row> = rows.iter().filter(|row| row.case == case).collect();
        // In the order of the programs, whoever had the first turn.
        let sorted = Way::ALL.iter().filter_map(|way| of_case.iter().find(|row| row.way == *way));
        for row in sorted {
            if row.way == Way::Cached {
                lines.push(format!("{} ms, {}: {}", row.delay_ms, case.title(), case.says()));
            }
            let rates = || row.turns.iter().map(Turn::rate);
            let mut line = format!(
                "  {:<15} {:>9}/s ±{:<3.0}% p99 {:>7} ms",
                row.way.title(),
                short(median(rates())),
                spread_percent(rates()),
                short(median(row.turns.iter().map(|turn| turn.p99_us / 1000.0)))
            );
            let ours = of_case.iter().find(|other| other.way == Way::Cached);
            if let Some(ours) = ours.filter(|ours| ours.way != row.way) {
                let ratio = |(ours, theirs): (&Turn, &Turn)| ours.rate() / theirs.rate();
                let ratios: Vec<f64> = ours.turns.iter().zip(&row.turns).map(ratio).collect();
                let (least, most) = ratios.iter().fold((f64::INFINITY, 0.0_f64), |(least, most), ratio| {
                    (least.min(*ratio), most.max(*ratio))
                });
                line += &format!(
                    "   with the cache {}x ({} to {})",
                    short(median(ratios)),
                    short(least),
                    short(most)
                );
            }
            let seen: Vec<&Counts> = row.turns.iter().filter_map(|turn| turn.flash.as_ref()).collect();
            line += &told(&seen);
            lines.push(line);
        }
    }
    lines
}

/// What the cache counted in all turns.
fn told(seen: &[&Counts]) -> String {
    let sum = |of: fn(&Counts) -> u64| seen.iter().map(|counts| of(counts)).sum::<u64>();
    let per = |count: u64, unit: u64| count as f64 / unit as f64;
    let mut text = String::new();
    let (written, flushed) = (sum(|counts| counts.guest_bytes_written), sum(|counts| counts.guest_flushes));
    if written > 0 && flushed > 0 {
        text += &format!(
            "   {:.2} flash bytes a guest byte, {:.2} flushes a flush",
            per(sum(Counts::flash_bytes), written),
            per(sum(|counts| counts.flushes), flushed)
        );
    }
    let (hits, misses) = (sum(|counts| counts.hits), sum(|counts| counts.misses));
    if hits + misses > 0 {
        text += &format!("   hits {:.4}", per(hits, hits + misses));
    }
    text
}
