//! `vellum-papers selfie`: Figures 5 to 10 and two thirds of Table 1 of the paper, each figure beside
//! the paper's, met or missed.

mod rows;

use std::path::PathBuf;
use std::time::SystemTime;

use serde::Serialize;
use vellum_core::Result;
use vellum_lab::cost::lab::Lab;
use vellum_lab::report::{Output, Table, say_json};
use vellum_lab::server::Vellum;

use super::{Row, on_all_processors, tell};
use crate::fvd::todays_log;
use crate::selfie::{
    Below, Dd, Drive, Fio, Image, Order, Overwrites, Played, Recorded, Recovered, Stage, dd, fio, play,
    recovery, replayed_log, requests,
};

/// Selfie, SYSTOR 2015 (rows S1 to S24)
///
/// Synchronous writers, dd, mkfs, copy, PostMark and recovery. Times are simulated: they show what an order
/// of operations costs on a modelled drive, and do not depend on this machine. Every run gives the same
/// output. The model was fitted to one number, HOST in row S4; all others follow from it.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Quick run: requests of 64 KiB, 1 and 8 threads, 1/8 of the bytes, recovery of 4 GiB
    #[arg(long)]
    quick: bool,
    /// Also model figures 5 to 7 on an SSD
    #[arg(long)]
    ssd: bool,
    /// Directory of recorded traces (rows S15 and S18 to S20)
    ///
    /// The files are mkfs_ext4_8g.csv.xz and postmark_selfie_small.csv.xz.
    #[arg(long, value_name = "DIR")]
    traces: Option<PathBuf>,
    /// Directory for QEMU's image, whose calls are replayed. Default: this program's
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// A vellum; it is not looked at
    #[arg(long, value_name = "PATH [ARGUMENT ...]", value_parser = Vellum::parse, hide = true)]
    vellum: Option<Vellum>,
    /// Output format on stdout; with json, the table goes to stderr
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Output::Human)]
    output: Output,
}

/// What a group of threads reached.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Rate {
    image: Image,
    stage: Stage,
    fio: Fio,
    megabytes_per_second: f64,
}

#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Copied {
    image: Image,
    stage: Stage,
    dd: Dd,
}

/// Recorded guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Guest {
    Mkfs,
    Postmark,
}

#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Seen {
    guest: Guest,
    image: Image,
    stage: Stage,
    played: Played,
}

/// The requests of QEMU's qcow2 to its host today, its calls one after the other on the modelled HDD.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Today {
    programs: Vec<String>,
    /// One thread, requests of 64 KiB.
    megabytes_per_second: Option<f64>,
    mkfs_seconds: Option<f64>,
    postmark_seconds: Option<f64>,
}

/// Everything that was found, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    unix_seconds: u64,
    rates: Vec<Rate>,
    copies: Vec<Copied>,
    guests: Vec<Seen>,
    overwrites: Option<Overwrites>,
    today: Today,
    recovered: Vec<(Drive, Recovered)>,
    rows: Vec<Row>,
}

const K: usize = 1 << 10;
/// The images that are compared where an image is a volume.
const ON_VOLUMES: [Image; 5] = [Image::Host, Image::Zoned, Image::Table, Image::Qcow2, Image::Fvd];
/// The paper's tarball.
const TARBALL: u64 = 77_000_000;

pub(crate) fn run(args: &Args) -> Result<()> {
    let table = Table::to(args.output);
    table.say("simulated: HDD 7200 rpm (WD3200AAJS) and SSD SATA (840 EVO)");
    let mut rates = figures(args, table)?;
    rates.extend(mixed(args, table)?);
    let bytes = if args.quick { 256 << 20 } else { 8_000_000_000 / (512 * K as u64) * (512 * K as u64) };
    let copies = copied(bytes, table)?;
    let tarballs = tarball(table)?;
    let guests = recorded(args, table)?;
    let today = match of_today(args, &guests.0) {
        Ok(today) => today,
        Err(error) => {
            table.say(&format!("skipped: QEMU of today: {}", error.chain()));
            Today::default()
        }
    };
    show_today(&today, table);
    let bytes = if args.quick { 4 << 30 } else { 128 << 30 };
    let recovered =
        on_all_processors(&[Drive::Hdd, Drive::Ssd], |drive| Ok((*drive, recovery(*drive, bytes)?)))?;
    table.say("");
    table.say(&format!("Figure 10, recovery of {} GiB, all of it packs", bytes >> 30));
    for (drive, Recovered { units, embedded_units, records, reads, mebibytes_read, seconds, .. }) in
        &recovered
    {
        table.say(&format!(
            "  {drive:?}: {units} units, {embedded_units} known from their blocks alone, {records} records; {reads} reads, \
             {mebibytes_read:.1} MiB, {seconds:.2} s"
        ));
    }
    let (seen, overwrites) = guests;
    let mut rows = rows::rates(&rates, &today);
    rows.extend(rows::copies(&copies));
    rows.extend(rows::tarballs(&tarballs));
    rows.extend(rows::guests(&seen, &today, overwrites));
    rows.extend(rows::recovery(&recovered[0].1));
    tell(&rows, table);
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let copies = copies.into_iter().chain(tarballs).collect();
        let unix_seconds = now.as_secs();
        say_json(&Report { unix_seconds, rates, copies, guests: seen, overwrites, today, recovered, rows });
    }
    Ok(())
}

/// Figures 5 to 7.
fn figures(args: &Args, table: Table) -> Result<Vec<Rate>> {
    let drives: &[Drive] = if args.ssd { &[Drive::Hdd, Drive::Ssd] } else { &[Drive::Hdd] };
    let threads: &[u64] = if args.quick { &[1, 8] } else { &[1, 2, 4, 8, 16] };
    let mut rates = Vec::new();
    for drive in drives {
        for (figure, below, order) in [
            ("Figure 5, on a volume, sequential", Below::Volume, Order::Sequential),
            ("Figure 6, on a volume, random", Below::Volume, Order::Random),
            ("Figure 7, in a growing file, sequential", Below::File, Order::Sequential),
            ("Figure 5 on a thin volume, sequential", Below::ThinVolume, Order::Sequential),
            ("Figure 6 on a thin volume, random", Below::ThinVolume, Order::Random),
        ] {
            let stage = Stage { drive: *drive, below, packs: 100 };
            table.say("");
            table.say(&format!("{figure}, {drive:?}: MB/s of threads that write and flush"));
            let seen = measured(&jobs(stage, order, threads, args.quick))?;
            show(&seen, threads, table);
            rates.extend(seen);
            if order == Order::Random && *drive == Drive::Hdd {
                let warm = [1, threads[threads.len() - 1]].map(|threads| {
                    let (request, bytes) = (64 * K, bytes(args.quick));
                    (
                        Image::Zoned,
                        stage,
                        Fio { threads, request, order, bytes, is_again: false, is_warm: true },
                    )
                });
                let warm = measured(&warm)?;
                table.say(&format!(
                    "  vellum zoned, 64 KiB, all of its table read before: {:.1} and {:.1}",
                    warm[0].megabytes_per_second, warm[1].megabytes_per_second
                ));
                rates.extend(warm);
            }
        }
    }
    Ok(rates)
}

type Job = (Image, Stage, Fio);

fn measured(jobs: &[Job]) -> Result<Vec<Rate>> {
    on_all_processors(jobs, |(image, stage, work)| {
        let megabytes_per_second = fio(*image, *stage, *work)?;
        Ok(Rate { image: *image, stage: *stage, fio: *work, megabytes_per_second })
    })
}

/// QED needs a file.
fn takes_part(image: Image, below: Below) -> bool {
    image != Image::Qed || below == Below::File
}

/// More than lies ready.
fn bytes(is_quick: bool) -> u64 {
    if is_quick { 32 << 20 } else { 256 << 20 }
}

fn jobs(stage: Stage, order: Order, threads: &[u64], is_quick: bool) -> Vec<Job> {
    let requests: &[usize] = if is_quick { &[64 * K] } else { &[64 * K, 512 * K, 4096 * K] };
    let mut jobs = Vec::new();
    for request in requests {
        for image in Image::ALL.into_iter().filter(|image| takes_part(*image, stage.below)) {
            for threads in threads {
                let work = Fio {
                    threads: *threads,
                    request: *request,
                    order,
                    bytes: bytes(is_quick),
                    is_again: false,
                    is_warm: false,
                };
                jobs.push((image, stage, work));
            }
        }
    }
    jobs
}

fn show(rates: &[Rate], threads: &[u64], table: Table) {
    let head: String = threads.iter().map(|threads| format!("{threads:>9}")).collect();
    table.say(&format!("  {:<24} {:>8}  threads:{head}", "", "request"));
    for line in rates.chunks(threads.len()) {
        let values: String = line.iter().map(|rate| format!("{:>9.1}", rate.megabytes_per_second)).collect();
        let Rate { image, fio, .. } = line[0];
        table.say(&format!("  {:<24} {:>4} KiB          {values}", image.name(), fio.request / K));
    }
}

/// What packs and what does not, and noise over what packs (the paper's Z overwritten by N).
const MIXES: [(&str, u32, bool); 4] = [
    ("all packs", 100, false),
    ("half packs", 50, false),
    ("nothing packs", 0, false),
    ("noise over what packs", 0, true),
];

fn mixed(args: &Args, table: Table) -> Result<Vec<Rate>> {
    let most = if args.quick { 8 } else { 16 };
    let columns: Vec<(Below, u64)> = [Below::Volume, Below::ThinVolume, Below::File]
        .into_iter()
        .flat_map(|below| [(below, 1), (below, most)])
        .collect();
    let mut jobs = Vec::new();
    for (_, packs, is_again) in MIXES {
        for (below, threads) in &columns {
            let stage = Stage { drive: Drive::Hdd, below: *below, packs };
            let bytes = bytes(args.quick) / 2;
            let order = Order::Sequential;
            jobs.push((
                Image::Zoned,
                stage,
                Fio { threads: *threads, request: 64 * K, order, bytes, is_again, is_warm: false },
            ));
        }
    }
    let rates = measured(&jobs)?;
    table.say("");
    table.say("vellum zoned by what is written, sequential, 64 KiB, Hdd: MB/s");
    let names: String = ["volume", "thin volume", "file"].map(|name| format!("{name:>18}")).concat();
    table.say(&format!("  {:<24}{names}", ""));
    let threads = format!("{:>9}{most:>9}", 1).repeat(3);
    table.say(&format!("  {:<24}{threads}", "threads"));
    for ((name, ..), line) in MIXES.iter().zip(rates.chunks(columns.len())) {
        let values: String = line.iter().map(|rate| format!("{:>9.1}", rate.megabytes_per_second)).collect();
        table.say(&format!("  {name:<24}{values}"));
    }
    Ok(rates)
}

/// Figure 8.
fn copied(bytes: u64, table: Table) -> Result<Vec<Copied>> {
    let jobs: Vec<(Image, Below, u32)> = [Below::Volume, Below::ThinVolume]
        .into_iter()
        .flat_map(|below| {
            let all = ON_VOLUMES.map(|image| (image, below, 100));
            all.into_iter().chain([(Image::Zoned, below, 50), (Image::Zoned, below, 0)])
        })
        .collect();
    let copies = copy(&jobs, bytes)?;
    table.say("");
    table.say(&format!("Figure 8, dd of {} MB and one sync, Hdd: seconds", bytes / 1_000_000));
    show_copies(&copies, table);
    Ok(copies)
}

fn copy(jobs: &[(Image, Below, u32)], bytes: u64) -> Result<Vec<Copied>> {
    on_all_processors(jobs, |(image, below, packs)| {
        let stage = Stage { drive: Drive::Hdd, below: *below, packs: *packs };
        Ok(Copied { image: *image, stage, dd: dd(*image, stage, bytes)? })
    })
}

fn show_copies(copies: &[Copied], table: Table) {
    table.say(&format!("  {:<43} {:>8} {:>8} {:>12}", "", "write", "read", "noise over"));
    for Copied { image, stage, dd } in copies {
        table.say(&format!(
            "  {:<24} {:<10?} {:>3} % pack {:>8.2} {:>8.2} {:>12.2}",
            image.name(),
            stage.below,
            stage.packs,
            dd.seconds,
            dd.read_seconds,
            dd.again_seconds
        ));
    }
}

/// Table 1, the copy: what does not pack, and a sync.
fn tarball(table: Table) -> Result<Vec<Copied>> {
    let jobs: Vec<_> = [Below::Volume, Below::ThinVolume]
        .into_iter()
        .flat_map(|below| ON_VOLUMES.map(|image| (image, below, 0)))
        .collect();
    let copies = copy(&jobs, TARBALL)?;
    table.say("");
    table.say("Table 1, a copy of 77 MB that do not pack, and a sync, Hdd: seconds");
    show_copies(&copies, table);
    Ok(copies)
}

/// Table 1, mkfs, and Figure 9: as far as there are traces.
fn recorded(args: &Args, table: Table) -> Result<(Vec<Seen>, Option<Overwrites>)> {
    let Some(dir) = &args.traces else {
        table.say("skipped: mkfs and PostMark: no --traces");
        return Ok((Vec::new(), None));
    };
    let (mkfs, postmark) = (Recorded::mkfs(dir)?, Recorded::postmark(dir)?);
    let of = |guest| if guest == Guest::Mkfs { &mkfs } else { &postmark };
    let mut jobs = Vec::new();
    for (guest, drive) in
        [(Guest::Mkfs, Drive::Hdd), (Guest::Postmark, Drive::Hdd), (Guest::Postmark, Drive::Ssd)]
    {
        for below in [Below::Volume, Below::ThinVolume] {
            jobs.extend(ON_VOLUMES.map(|image| (guest, image, Stage { drive, below, packs: 100 })));
        }
    }
    let seen = on_all_processors(&jobs, |(guest, image, stage)| {
        let played = play(*image, *stage, of(*guest))?;
        Ok(Seen { guest: *guest, image: *image, stage: *stage, played })
    })?;
    table.say("");
    table.say("Table 1 (mkfs) and Figure 9 (PostMark, a twentieth of the paper's), recorded on ext4: seconds, and what reached the drive");
    table.say(&format!("  {:<50} {:>8} {:>8} {:>8} {:>8}", "", "seconds", "writes", "flushes", "packed"));
    for Seen { guest, image, stage, played } in &seen {
        let what = format!("{guest:?}, {:?}, {:?}", stage.drive, stage.below);
        let Played { seconds, writes, flushes, packed } = played;
        table.say(&format!(
            "  {what:<28}{:<22} {seconds:>8.2} {writes:>8} {flushes:>8} {packed:>8}",
            image.name()
        ));
    }
    Ok((seen, Some(postmark.overwrites())))
}

/// QEMU's qcow2 as it is now: the requests of one thread of Figure 5, and the recorded guests.
fn of_today(args: &Args, seen: &[Seen]) -> Result<Today> {
    let lab = Lab::open(args.dir.as_ref(), args.vellum.as_ref())?;
    let stage = Stage { drive: Drive::Hdd, below: Below::Volume, packs: 100 };
    let replay = |requests| replayed_log(stage, &todays_log(&lab, requests)?);
    let order = Order::Sequential;
    let work = Fio { threads: 1, request: 64 * K, order, bytes: 32 << 20, is_again: false, is_warm: false };
    let mut today = Today {
        programs: lab.programs.clone(),
        megabytes_per_second: Some(work.bytes as f64 / replay(requests(work))? / 1e6),
        ..Today::default()
    };
    if let Some(dir) = args.traces.as_ref().filter(|_| !seen.is_empty()) {
        today.mkfs_seconds = Some(replay(Recorded::mkfs(dir)?.counted)?);
        // Earlier calls are in the log too: they are subtracted.
        let Recorded { before, counted, .. } = Recorded::postmark(dir)?;
        let first = replay(before.clone())?;
        today.postmark_seconds = Some(replay([before, counted].concat())? - first);
    }
    Ok(today)
}

fn show_today(today: &Today, table: Table) {
    let Some(rate) = today.megabytes_per_second else { return };
    table.say("");
    table.say(&format!(
        "QEMU's qcow2 of today, its calls one at a time on the HDD ({})",
        today.programs.join(", ")
    ));
    table.say(&format!("  64 KiB and a flush, one thread: {rate:.1} MB/s"));
    let seconds =
        |seconds: Option<f64>| seconds.map_or_else(|| "-".to_owned(), |seconds| format!("{seconds:.2} s"));
    table.say(&format!(
        "  mkfs: {}; PostMark: {}",
        seconds(today.mkfs_seconds),
        seconds(today.postmark_seconds)
    ));
}
