//! `vellum-papers run selfie`: figures 5 to 10 and two thirds of Table 1 of the paper: rows S1 to S24.

mod rows;

use serde::Serialize;
use vellum_core::{Error, Result};
use vellum_lab::cost::lab::Lab;
use vellum_lab::guest::Request;
use vellum_lab::report::Table;

use super::{Options, on_all_processors};
use crate::fvd::todays_log;
use crate::report::{Figure, Made, Series, Shape};
use crate::selfie::{
    Below, Dd, Drive, Fio, Image, Order, Overwrites, Played, Reached, Recorded, Recovered, Stage, dd, fio,
    play, recovery, replayed_log, requests,
};

/// What a group of threads reached.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Rate {
    image: Image,
    stage: Stage,
    fio: Fio,
    #[serde(flatten)]
    reached: Reached,
}

impl Rate {
    fn megabytes_per_second(&self) -> f64 {
        self.reached.megabytes_per_second
    }
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
    /// In requests as long as those of the paper's seem to have been.
    MkfsInShort,
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
    /// For each request of that thread.
    calls_of_the_thread: Option<(f64, f64)>,
    calls_of_mkfs: Option<Calls>,
    calls_of_postmark: Option<Calls>,
}

/// What it asks of its host.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Calls {
    writes: u64,
    flushes: u64,
}

impl Calls {
    fn of(log: &[Request]) -> Self {
        let count = |is_it: fn(&&Request) -> bool| log.iter().filter(is_it).count() as u64;
        Self {
            writes: count(|request| matches!(request, Request::Write { .. })),
            flushes: count(|request| matches!(request, Request::Flush)),
        }
    }

    fn beyond(self, earlier: Self) -> Self {
        let more = |all: u64, before: u64| all.saturating_sub(before);
        Self { writes: more(self.writes, earlier.writes), flushes: more(self.flushes, earlier.flushes) }
    }
}

/// Everything that was found, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    rates: Vec<Rate>,
    copies: Vec<Copied>,
    guests: Vec<Seen>,
    overwrites: Overwrites,
    today: Today,
    recovered: Vec<(Drive, Recovered)>,
}

const K: usize = 1 << 10;
/// The images that are compared where an image is a volume.
const ON_VOLUMES: [Image; 5] = [Image::Host, Image::Zoned, Image::Table, Image::Qcow2, Image::Fvd];
/// The paper's tarball.
const TARBALL: u64 = 77_000_000;

const SETTING: &str = "Simulated: HDD 7200 rpm (WD3200AAJS) and SSD SATA (840 EVO). The engine with layout=zoned, \
    layout=table and raw, against models of QCOW2, FVD and QED as the paper describes them. The model was fitted to one \
    number, HOST in row S4; all others follow from it.";

pub(crate) fn make(options: &Options, table: Table) -> Result<Made> {
    table.say(SETTING);
    let is_quick = !options.is_full;
    let bytes = if is_quick { 256 << 20 } else { 8_000_000_000 / (512 * K as u64) * (512 * K as u64) };
    let copies = copied(bytes, table)?;
    let by_zones = by_ready_zones(bytes, &copies, table)?;
    let tarballs = tarball(table)?;
    let (guests, overwrites) = recorded(table)?;
    let mut rates = figures_5_to_7(options, table)?;
    rates.extend(mixed(is_quick, table)?);
    let today = match of_today(options) {
        Ok(today) => today,
        Err(error) => {
            table.say(&format!("skipped: QEMU of today: {}", error.chain()));
            Today::default()
        }
    };
    show_today(&today, table);
    let bytes = if is_quick { 4 << 30 } else { 128 << 30 };
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
    // What the scale changes is judged on the paper's own only.
    let scaled = |rows: Vec<_>, why: &str| -> Vec<_> {
        let not_judged = |row: crate::report::Row| if is_quick { row.not_judged(why) } else { row };
        rows.into_iter().map(not_judged).collect()
    };
    let mut rows =
        scaled(rows::rates(&rates, &today), "made with up to 8 threads and 32 MiB; --full makes the paper's");
    rows.extend(scaled(rows::copies(&copies), "made with 256 MiB; --full makes the paper's 8 GB"));
    rows.extend(rows::tarballs(&tarballs));
    rows.extend(rows::guests(&guests, &today, overwrites));
    rows.extend(scaled(rows::recovery(&recovered[0].1), "made with 4 GiB; --full makes the paper's 128"));
    rows.extend(rows::not_made());
    rows.sort_by_key(|row| row.id[1..].parse::<u32>().unwrap_or(u32::MAX));
    let mut figures = drawn(&rates, &copies, &guests);
    figures.push(zones_drawn(&by_zones, &copies));
    let copies = copies.into_iter().chain(tarballs).chain(by_zones).collect();
    let report = Report { rates, copies, guests, overwrites, today, recovered };
    Ok(Made {
        name: "selfie",
        title: "Selfie: Co-locating Metadata and Data to Enable Fast Virtual Block Devices",
        venue: "SYSTOR 2015",
        setting: SETTING.to_owned(),
        rows,
        figures,
        runs: serde_json::to_value(report).expect("numbers and strings"),
    })
}

/// Figures 5 to 7.
fn figures_5_to_7(options: &Options, table: Table) -> Result<Vec<Rate>> {
    let is_quick = !options.is_full;
    let drives: &[Drive] = if is_quick { &[Drive::Hdd] } else { &[Drive::Hdd, Drive::Ssd] };
    let threads: &[u64] = if is_quick { &[1, 8] } else { &[1, 2, 4, 8, 16] };
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
            let seen = measured(&jobs(stage, order, threads, is_quick))?;
            show(&seen, threads, table);
            rates.extend(seen);
            if order == Order::Random && *drive == Drive::Hdd {
                let warm = [1, threads[threads.len() - 1]].map(|threads| {
                    let (request, bytes) = (64 * K, bytes(is_quick));
                    (
                        Image::Zoned,
                        stage,
                        Fio { threads, request, order, bytes, is_again: false, is_warm: true },
                    )
                });
                let warm = measured(&warm)?;
                table.say(&format!(
                    "  vellum zoned, 64 KiB, all of its table read before: {:.1} and {:.1}",
                    warm[0].megabytes_per_second(),
                    warm[1].megabytes_per_second()
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
        Ok(Rate { image: *image, stage: *stage, fio: *work, reached: fio(*image, *stage, *work)? })
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
        let values: String =
            line.iter().map(|rate| format!("{:>9.1}", rate.megabytes_per_second())).collect();
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

fn mixed(is_quick: bool, table: Table) -> Result<Vec<Rate>> {
    let most = if is_quick { 8 } else { 16 };
    let columns: Vec<(Below, u64)> = [Below::Volume, Below::ThinVolume, Below::File]
        .into_iter()
        .flat_map(|below| [(below, 1), (below, most)])
        .collect();
    let mut jobs = Vec::new();
    for (_, packs, is_again) in MIXES {
        for (below, threads) in &columns {
            let stage = Stage { drive: Drive::Hdd, below: *below, packs };
            let bytes = bytes(is_quick) / 2;
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
    let show = |name: &str, of: &dyn Fn(&Rate) -> String, line: &[Rate]| {
        let values: String = line.iter().map(|rate| format!("{:>9}", of(rate))).collect();
        table.say(&format!("  {name:<24}{values}"));
    };
    for ((name, ..), line) in MIXES.iter().zip(rates.chunks(columns.len())) {
        show(name, &|rate| format!("{:.1}", rate.megabytes_per_second()), line);
    }
    let writes: fn(&Rate) -> f64 = |rate| rate.reached.writes;
    let flushes: fn(&Rate) -> f64 = |rate| rate.reached.flushes;
    for (what, of) in [("writes", writes), ("flushes", flushes)] {
        table.say(&format!("  {what} of the drive for each of a thread's"));
        for ((name, ..), line) in MIXES.iter().zip(rates.chunks(columns.len())) {
            show(name, &|rate| format!("{:.2}", of(rate)), line);
        }
    }
    Ok(rates)
}

/// As many zones as this much fills, with some to spare.
fn zones_for(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(64 << 20)).expect("gigabytes") + 4
}

/// Figure 8.
fn copied(bytes: u64, table: Table) -> Result<Vec<Copied>> {
    let cleared = Below::Cleared(zones_for(bytes));
    let jobs: Vec<(Image, Below, u32)> = [Below::Volume, Below::ThinVolume]
        .into_iter()
        .flat_map(|below| ON_VOLUMES.map(|image| (image, below, 100)))
        .chain([(Image::Zoned, cleared, 100)])
        .chain(
            [cleared, Below::Volume, Below::ThinVolume]
                .into_iter()
                .flat_map(|below| [50, 0].map(|packs| (Image::Zoned, below, packs))),
        )
        .collect();
    let copies = copy(&jobs, bytes)?;
    table.say("");
    table.say(&format!("Figure 8, dd of {} MB and one sync, Hdd: seconds", bytes / 1_000_000));
    show_copies(&copies, table);
    Ok(copies)
}

/// Figure 8, where a part of the zones is ready.
fn by_ready_zones(bytes: u64, copies: &[Copied], table: Table) -> Result<Vec<Copied>> {
    let all = zones_for(bytes);
    let parts = [all / 8, all / 4, all / 2, all / 4 * 3];
    let jobs = parts.map(|zones| (Image::Zoned, Below::Cleared(zones), 100));
    let some = copy(&jobs, bytes)?;
    table.say("");
    table.say("The same dd of what packs, by zones that are ready when it begins: seconds");
    let two = copies.iter().find(|copy| is_our_dd(copy, Below::Volume));
    let most = copies.iter().find(|copy| is_our_dd(copy, Below::Cleared(all)));
    for copy in two.into_iter().chain(&some).chain(most) {
        table.say(&format!("  {:>4} zones {:>8.2}", ready_zones(copy), copy.dd.seconds));
    }
    Ok(some)
}

fn is_our_dd(copy: &Copied, below: Below) -> bool {
    (copy.image, copy.stage.below, copy.stage.packs) == (Image::Zoned, below, 100)
}

/// How many zones are ready before it.
fn ready_zones(copy: &Copied) -> u32 {
    match copy.stage.below {
        Below::Cleared(zones) => zones,
        _ => 2,
    }
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
            "  {:<24} {:<12} {:>3} % pack {:>8.2} {:>8.2} {:>12.2}",
            image.name(),
            format!("{:?}", stage.below),
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

/// Table 1 has mkfs on HOST in 3.96 s: 388 MB at most, on a drive of 98 MB/s. QCOW2 takes 27.6 s more, and 18.2 ms for each
/// request of `dd`, which are 277 s more than HOST for 8 GB in requests of 512 KiB. So it had about 1,517 requests, of 256 KB.
const MKFS_REQUEST: usize = 256 * K;
/// More than the recorded guests fill.
const CLEARED: Below = Below::Cleared(16);

/// Table 1, mkfs, and Figure 9.
fn recorded(table: Table) -> Result<(Vec<Seen>, Overwrites)> {
    let (mkfs, short, postmark) =
        (Recorded::mkfs()?, Recorded::mkfs_in(MKFS_REQUEST)?, Recorded::postmark()?);
    let of = |guest| match guest {
        Guest::Mkfs => &mkfs,
        Guest::MkfsInShort => &short,
        Guest::Postmark => &postmark,
    };
    let mut jobs = Vec::new();
    for (guest, drive) in [
        (Guest::Mkfs, Drive::Hdd),
        (Guest::MkfsInShort, Drive::Hdd),
        (Guest::Postmark, Drive::Hdd),
        (Guest::Postmark, Drive::Ssd),
    ] {
        for below in [Below::Volume, Below::ThinVolume] {
            jobs.extend(ON_VOLUMES.map(|image| (guest, image, Stage { drive, below, packs: 100 })));
        }
        jobs.push((guest, Image::Zoned, Stage { drive, below: CLEARED, packs: 100 }));
    }
    let seen = on_all_processors(&jobs, |(guest, image, stage)| {
        let played = play(*image, *stage, of(*guest))?;
        Ok(Seen { guest: *guest, image: *image, stage: *stage, played })
    })?;
    table.say("");
    table.say("Table 1 (mkfs) and Figure 9 (PostMark, a twentieth of the paper's), recorded on ext4: seconds, and what reached the drive");
    table.say(&format!("  {:<52} {:>8} {:>8} {:>8} {:>8}", "", "seconds", "writes", "flushes", "packed"));
    for Seen { guest, image, stage, played } in &seen {
        let what = format!("{guest:?}, {:?}, {:?}", stage.drive, stage.below);
        let Played { seconds, writes, flushes, packed } = played;
        table.say(&format!(
            "  {what:<30}{:<22} {seconds:>8.2} {writes:>8} {flushes:>8} {packed:>8}",
            image.name()
        ));
    }
    Ok((seen, postmark.overwrites()))
}

/// QEMU's qcow2 as it is now: the requests of one thread of Figure 5, and the recorded guests.
fn of_today(options: &Options) -> Result<Today> {
    let lab = Lab::open(options.dir.as_ref(), options.vellum.as_ref())?;
    let stage = Stage { drive: Drive::Hdd, below: Below::Volume, packs: 100 };
    let replay = |requests: Vec<Request>| {
        let log = todays_log(&lab, requests)?;
        Ok::<_, Error>((replayed_log(stage, &log)?, Calls::of(&log)))
    };
    let order = Order::Sequential;
    let work = Fio { threads: 1, request: 64 * K, order, bytes: 32 << 20, is_again: false, is_warm: false };
    // Earlier calls are in the log too: they are subtracted.
    let Recorded { before, counted, .. } = Recorded::postmark()?;
    let (first, first_calls) = replay(before.clone())?;
    let (thread, thread_calls) = replay(requests(work))?;
    let (mkfs, mkfs_calls) = replay(Recorded::mkfs()?.counted)?;
    let (postmark, postmark_calls) = replay([before, counted].concat())?;
    let each = |calls: u64| calls as f64 / (work.bytes / work.request as u64) as f64;
    Ok(Today {
        programs: lab.programs.clone(),
        megabytes_per_second: Some(work.bytes as f64 / thread / 1e6),
        mkfs_seconds: Some(mkfs),
        postmark_seconds: Some(postmark - first),
        calls_of_the_thread: Some((each(thread_calls.writes), each(thread_calls.flushes))),
        calls_of_mkfs: Some(mkfs_calls),
        calls_of_postmark: Some(postmark_calls.beyond(first_calls)),
    })
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
    if let (Some((writes, flushes)), Some(mkfs), Some(postmark)) =
        (today.calls_of_the_thread, today.calls_of_mkfs, today.calls_of_postmark)
    {
        table.say(&format!(
            "  writes and flushes: {writes:.2} and {flushes:.2} for each of the thread's; mkfs: {} and {}; PostMark: {} and {}",
            mkfs.writes, mkfs.flushes, postmark.writes, postmark.flushes
        ));
    }
}

/// The paper's figures with our series: 5 and 6 at each size of request, 7, 8, and 9a and b.
fn drawn(rates: &[Rate], copies: &[Copied], guests: &[Seen]) -> Vec<Figure> {
    let mut figures = Vec::new();
    let mut sizes: Vec<usize> = rates.iter().map(|rate| rate.fio.request).collect();
    sizes.sort_unstable();
    sizes.dedup();
    for (number, what, below, order) in [
        ("5", "on a volume, sequential", Below::Volume, Order::Sequential),
        ("6", "on a volume, random", Below::Volume, Order::Random),
        ("7", "in a growing file, sequential", Below::File, Order::Sequential),
    ] {
        for request in &sizes {
            figures.push(threads_drawn(rates, (number, what), (below, order, *request)));
        }
    }
    figures.push(copies_drawn(copies));
    figures.extend([Drive::Hdd, Drive::Ssd].map(|drive| mail_drawn(guests, drive)));
    figures
}

fn threads_drawn(
    rates: &[Rate],
    (number, what): (&str, &str),
    (below, order, request): (Below, Order, usize),
) -> Figure {
    let fits = |rate: &&Rate| {
        let is_plain = !(rate.fio.is_again || rate.fio.is_warm) && rate.stage.packs == 100;
        is_plain
            && (rate.stage.drive, rate.stage.below) == (Drive::Hdd, below)
            && (rate.fio.order, rate.fio.request) == (order, request)
    };
    let mut threads: Vec<u64> = rates.iter().filter(fits).map(|rate| rate.fio.threads).collect();
    threads.sort_unstable();
    threads.dedup();
    let value = |image, threads| {
        let is_it = |rate: &&Rate| rate.image == image && rate.fio.threads == threads;
        rates.iter().filter(fits).find(is_it).map(Rate::megabytes_per_second)
    };
    let ours = Image::ALL.into_iter().filter(|image| takes_part(*image, below)).map(|image| Series {
        name: image.name().to_owned(),
        is_of_the_paper: false,
        values: threads.iter().map(|threads| value(image, *threads)).collect(),
    });
    let printed = |name: &str, value: f64| Series {
        name: format!("{name}, as the paper prints it"),
        is_of_the_paper: true,
        values: threads.iter().map(|threads| (*threads == 1).then_some(value)).collect(),
    };
    let mut series: Vec<Series> = ours.collect();
    if (number, request) == ("5", 64 * K) {
        series.extend([printed("QCOW2", 3.5), printed("Selfie, FVD, HOST", 6.0)]);
    }
    Figure {
        file: format!("selfie-{number}-{}k", request / K),
        title: format!("Figure {number}, {what}, writes of {} KiB and flushes, HDD", request / K),
        shape: Shape::Lines,
        x_name: "threads",
        y_name: "MB/s",
        places: threads.iter().map(u64::to_string).collect(),
        series,
    }
}

/// The time of dd by how many zones were ready.
fn zones_drawn(some: &[Copied], copies: &[Copied]) -> Figure {
    let ours = |copy: &&Copied| copy.image == Image::Zoned && copy.stage.packs == 100;
    let on_volumes = |copy: &&Copied| copy.stage.below != Below::ThinVolume;
    let mut all: Vec<&Copied> = copies.iter().chain(some).filter(ours).filter(on_volumes).collect();
    all.sort_by_key(|copy| ready_zones(copy));
    let of = |image| {
        let is_it = |copy: &&Copied| (copy.image, copy.stage.below) == (image, Below::Volume);
        copies.iter().find(is_it).map(|copy| copy.dd.seconds)
    };
    let flat = |image: Image, name: &str| Series {
        name: name.to_owned(),
        is_of_the_paper: false,
        values: all.iter().map(|_| of(image)).collect(),
    };
    Figure {
        file: "selfie-8-zones".to_owned(),
        title: "Figure 8 by zones that are ready: dd of what packs, and one sync, HDD".to_owned(),
        shape: Shape::Lines,
        x_name: "zones of 64 MiB that are ready when dd begins",
        y_name: "seconds",
        places: all.iter().map(|copy| ready_zones(copy).to_string()).collect(),
        series: vec![
            Series {
                name: Image::Zoned.name().to_owned(),
                is_of_the_paper: false,
                values: all.iter().map(|copy| Some(copy.dd.seconds)).collect(),
            },
            flat(Image::Host, Image::Host.name()),
            flat(Image::Qcow2, Image::Qcow2.name()),
            flat(Image::Fvd, Image::Fvd.name()),
        ],
    }
}

fn copies_drawn(copies: &[Copied]) -> Figure {
    let is_cleared = |copy: &&Copied| matches!(copy.stage.below, Below::Cleared(_));
    let cleared = copies.iter().find(is_cleared).map_or(Below::Volume, |copy| copy.stage.below);
    let ways = [cleared, Below::Volume, Below::ThinVolume];
    let time = |image, below, packs| {
        // Who clears nothing ahead is the same on both volumes.
        let below = if image != Image::Zoned && below == cleared { Below::Volume } else { below };
        let is_it =
            |copy: &&Copied| (copy.image, copy.stage.below, copy.stage.packs) == (image, below, packs);
        copies.iter().find(is_it).map(|copy| copy.dd.seconds)
    };
    let all = ON_VOLUMES.map(|image| (image, 100, image.name().to_owned()));
    let zoned = [50, 0].map(|packs| (Image::Zoned, packs, format!("vellum zoned, {packs} % pack")));
    let mut series: Vec<Series> = all
        .into_iter()
        .chain(zoned)
        .map(|(image, packs, name)| Series {
            name,
            is_of_the_paper: false,
            values: ways
                .map(|below| Some(time(image, below, packs)? / time(Image::Qcow2, below, 100)?))
                .to_vec(),
        })
        .collect();
    series.push(Series {
        name: "Selfie, as the paper prints it".to_owned(),
        is_of_the_paper: true,
        values: vec![Some(0.23), None, None],
    });
    Figure {
        file: "selfie-8".to_owned(),
        title: "Figure 8, dd and one sync: time, QCOW2 = 1, HDD".to_owned(),
        shape: Shape::Bars,
        x_name: "the image is on",
        y_name: "time by QCOW2's",
        places: vec!["a volume, cleared ahead".to_owned(), "a volume".to_owned(), "a thin volume".to_owned()],
        series,
    }
}

fn mail_drawn(guests: &[Seen], drive: Drive) -> Figure {
    let ways = [Below::Volume, Below::ThinVolume];
    let time = |image, below| {
        let is_it = |seen: &&Seen| {
            (seen.guest, seen.image) == (Guest::Postmark, image)
                && (seen.stage.drive, seen.stage.below) == (drive, below)
        };
        guests.iter().find(is_it).map(|seen| seen.played.seconds)
    };
    let mut series: Vec<Series> = ON_VOLUMES
        .map(|image| Series {
            name: image.name().to_owned(),
            is_of_the_paper: false,
            values: ways.map(|below| Some(time(Image::Qcow2, below)? / time(image, below)?)).to_vec(),
        })
        .to_vec();
    let (letter, printed, medium) = if drive == Drive::Hdd { ("a", 2.6, "HDD") } else { ("b", 1.4, "SSD") };
    series.push(Series {
        name: "Selfie, as the paper prints it".to_owned(),
        is_of_the_paper: true,
        values: vec![Some(printed), None],
    });
    Figure {
        file: format!("selfie-9{letter}"),
        title: format!(
            "Figure 9{letter}, PostMark (a twentieth of the paper's, recorded): speed, QCOW2 = 1, {medium}"
        ),
        shape: Shape::Bars,
        x_name: "the image is on",
        y_name: "times QCOW2",
        places: vec!["a volume".to_owned(), "a thin volume".to_owned()],
        series,
    }
}
