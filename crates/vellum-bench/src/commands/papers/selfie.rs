//! `vellum-bench papers selfie`: its Figures 5 to 8 and 10, each figure beside the paper's, met or missed.

use std::time::SystemTime;

use serde::Serialize;
use vellum_core::Result;

use super::{Row, on_all_processors, tell};
use crate::papers::selfie::{Below, Dd, Drive, Fio, Image, Order, Recovered, Stage, dd, fio, recovery};
use crate::report::{Output, Table, say_json};

/// Selfie, SYSTOR 2015: synchronous writers, dd with one sync, recovery (rows S4 to S13, S22 and S23)
///
/// Figures are simulated: they tell what an order of operations costs on a modelled drive, and nothing of this machine. The same
/// command says the same each time. The drive's model was fitted to one figure, HOST in row S4; all others are what comes of it.
#[derive(clap::Args)]
pub(super) struct Args {
    /// Requests of 64 KiB, 1 and 8 threads, an eighth of the bytes; recovery of 4 GiB
    #[arg(long)]
    quick: bool,
    /// On the model of the SSD, too
    #[arg(long)]
    ssd: bool,
    /// What goes to stdout: the table, or all figures as JSON (the table goes to stderr then)
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

/// Everything that was found, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    unix_seconds: u64,
    rates: Vec<Rate>,
    copies: Vec<Copied>,
    recovered: Vec<(Drive, Recovered)>,
    rows: Vec<Row>,
}

const K: usize = 1 << 10;

pub(super) fn run(args: &Args) -> Result<()> {
    let table = Table::to(args.output);
    let drives: &[Drive] = if args.ssd { &[Drive::Hdd, Drive::Ssd] } else { &[Drive::Hdd] };
    table.say(
        "simulated: HDD 7200 rpm (WD3200AAJS) and SSD SATA (840 EVO); MB/s of threads that write and flush",
    );
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
            table.say(&format!("{figure}, {drive:?}"));
            let jobs = jobs(stage, order, threads, args.quick);
            let seen = on_all_processors(&jobs, |(image, stage, work)| {
                let megabytes_per_second = fio(*image, *stage, *work)?;
                Ok(Rate { image: *image, stage: *stage, fio: *work, megabytes_per_second })
            })?;
            show(&seen, threads, table);
            rates.extend(seen);
        }
    }
    let bytes = if args.quick { 256 << 20 } else { 8_000_000_000 / (512 * K as u64) * (512 * K as u64) };
    let jobs: Vec<(Image, u32)> = [Image::Host, Image::Zoned, Image::Table, Image::Qcow2, Image::Fvd]
        .into_iter()
        .map(|image| (image, 100))
        .chain([(Image::Zoned, 50), (Image::Zoned, 0)])
        .collect();
    let copies = on_all_processors(&jobs, |(image, packs)| {
        let stage = Stage { drive: Drive::Hdd, below: Below::ThinVolume, packs: *packs };
        let dd = dd(*image, stage, bytes, *image == Image::Zoned && *packs == 100)?;
        Ok(Copied { image: *image, stage, dd })
    })?;
    table.say("");
    table.say(&format!(
        "Figure 8, dd of {} MB and one sync, on a thin volume, Hdd: seconds",
        bytes / 1_000_000
    ));
    for Copied { image, stage, dd } in &copies {
        let again = dd.again_seconds.map_or_else(String::new, |seconds| {
            format!("; noise over it {seconds:.1}, {} reads", dd.again_reads)
        });
        table.say(&format!("  {:<24} {:>3} % pack {:>8.1}{again}", image.name(), stage.packs, dd.seconds));
    }
    let bytes = if args.quick { 4 << 30 } else { 128 << 30 };
    let recovered = on_all_processors(drives, |drive| Ok((*drive, recovery(*drive, bytes)?)))?;
    table.say("");
    table.say(&format!("Figure 10, recovery of {} GiB, all of it packs", bytes >> 30));
    for (drive, Recovered { units, born, records, reads, mebibytes_read, seconds }) in &recovered {
        table.say(&format!(
            "  {drive:?}: {units} units, {born} told by their blocks alone, {records} records; {reads} reads, \
             {mebibytes_read:.1} MiB, {seconds:.2} s"
        ));
    }
    let mut rows = rate_rows(&rates);
    rows.extend(copy_rows(&copies));
    rows.extend(recovery_rows(&recovered[0].1));
    tell(&rows, table);
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        say_json(&Report { unix_seconds: now.as_secs(), rates, copies, recovered, rows });
    }
    Ok(())
}

/// QED needs a file.
fn takes_part(image: Image, below: Below) -> bool {
    image != Image::Qed || below == Below::File
}

fn jobs(stage: Stage, order: Order, threads: &[u64], is_quick: bool) -> Vec<(Image, Stage, Fio)> {
    let mut jobs = Vec::new();
    // On a volume whose zeros are written, a zoned image whose writers want more units than lie ready can stand still: dd, with
    // requests of 512 KiB, 32 at a time, did not end there. So larger requests are told of a thin volume alone.
    let is_small = is_quick || stage.below == Below::Volume;
    let requests: &[usize] = if is_small { &[64 * K] } else { &[64 * K, 512 * K, 4096 * K] };
    for request in requests {
        for image in Image::ALL.into_iter().filter(|image| takes_part(*image, stage.below)) {
            for threads in threads {
                // More than lies ready.
                let bytes = if is_quick { 32 << 20 } else { 256 << 20 };
                jobs.push((image, stage, Fio { threads: *threads, request: *request, order, bytes }));
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

fn rate_rows(rates: &[Rate]) -> Vec<Row> {
    let most = rates.iter().map(|rate| rate.fio.threads).max().unwrap_or(1);
    let at = |image, below, order, request: usize, threads| {
        let is_it = |rate: &&Rate| {
            let Rate { stage, fio, .. } = rate;
            rate.image == image
                && (stage.drive, stage.below) == (Drive::Hdd, below)
                && (fio.order, fio.request, fio.threads) == (order, request, threads)
        };
        rates.iter().find(is_it).map(|rate| rate.megabytes_per_second)
    };
    let small = |image, threads| at(image, Below::Volume, Order::Sequential, 64 * K, threads);
    let file = |image, threads| at(image, Below::File, Order::Sequential, 64 * K, threads);
    let random = |image, threads| at(image, Below::Volume, Order::Random, 64 * K, threads);
    let thin = |image, threads| at(image, Below::ThinVolume, Order::Sequential, 64 * K, threads);
    let thin_random = |image, threads| at(image, Below::ThinVolume, Order::Random, 64 * K, threads);
    let peak = |image, below, request: usize| {
        let of = |rate: &&Rate| {
            rate.image == image
                && (rate.stage.drive, rate.stage.below) == (Drive::Hdd, below)
                && (rate.fio.order, rate.fio.request) == (Order::Sequential, request)
        };
        rates.iter().filter(of).map(|rate| rate.megabytes_per_second).reduce(f64::max)
    };
    let ratio = |one: Option<f64>, other: Option<f64>| one.zip(other).map(|(one, other)| one / other);
    let mut rows = Vec::new();
    let mut row = |id, what, paper, value: Option<f64>, unit: &str, is_met: &dyn Fn(f64) -> bool| {
        if let Some(value) = value {
            rows.push(Row { id, what, paper, ours: format!("{value:.2}{unit}"), is_met: is_met(value) });
        }
    };
    use Image::{Fvd, Host, Qcow2, Qed, Zoned};
    row("S4", "64 KiB, 1 thread: HOST (fitted)", "6 MB/s", small(Host, 1), " MB/s", &|v| {
        (4.5..=7.5).contains(&v)
    });
    row("S4", "  QCOW2", "3.5 MB/s", small(Qcow2, 1), " MB/s", &|v| (2.6..=4.4).contains(&v));
    row("S4", "  FVD over HOST", "1", ratio(small(Fvd, 1), small(Host, 1)), "", &|v| v >= 0.9);
    row("S4", "  zoned over HOST", "1", ratio(small(Zoned, 1), small(Host, 1)), "", &|v| v >= 0.95);
    row("S4", "  zoned over QCOW2", "1.7", ratio(small(Zoned, 1), small(Qcow2, 1)), "", &|v| v >= 1.7);
    let linear = 0.75 * most as f64;
    let growth = |of: &dyn Fn(Image, u64) -> Option<f64>, image| ratio(of(image, most), of(image, 1));
    row("S5", "zoned, all threads over one", "near linear", growth(&small, Zoned), "", &|v| v >= linear);
    row("S5", "  on a thin volume", "near linear", growth(&thin, Zoned), "", &|v| v >= linear);
    row("S5", "HOST, all threads over one", "little", growth(&small, Host), "", &|v| v <= 2.0);
    row(
        "S2",
        "zoned over QCOW2, all threads",
        "2 to 8",
        ratio(small(Zoned, most), small(Qcow2, most)),
        "",
        &|v| v >= 2.0,
    );
    row(
        "S2",
        "zoned over FVD, all threads",
        "2 to 8",
        ratio(small(Zoned, most), small(Fvd, most)),
        "",
        &|v| v >= 2.0,
    );
    row(
        "S6",
        "zoned at its most, 4 MiB, thin volume",
        "33 MB/s",
        peak(Zoned, Below::ThinVolume, 4096 * K),
        " MB/s",
        &|v| v >= 33.0,
    );
    row("S6", "HOST at its most, 4 MiB", "80 MB/s", peak(Host, Below::ThinVolume, 4096 * K), " MB/s", &|v| {
        (64.0..=96.0).contains(&v)
    });
    row(
        "S7",
        "zoned, random over sequential",
        "1",
        ratio(random(Zoned, most), small(Zoned, most)),
        "",
        &|v| v >= 0.95,
    );
    row(
        "S7",
        "HOST, random over sequential, one thread",
        "far below 1",
        ratio(random(Host, 1), small(Host, 1)),
        "",
        &|v| v <= 0.7,
    );
    row(
        "S7",
        "  zoned, on a thin volume",
        "1",
        ratio(thin_random(Zoned, most), thin(Zoned, most)),
        "",
        &|v| v >= 0.95,
    );
    row(
        "S8",
        "zoned, file over thin volume, all threads",
        "1",
        ratio(file(Zoned, most), thin(Zoned, most)),
        "",
        &|v| v >= 0.9,
    );
    row(
        "S8",
        "QCOW2, file over volume, all threads",
        "far below 1",
        ratio(file(Qcow2, most), small(Qcow2, most)),
        "",
        &|v| v <= 0.7,
    );
    row(
        "S8",
        "FVD, file over volume, all threads",
        "far below 1",
        ratio(file(Fvd, most), small(Fvd, most)),
        "",
        &|v| v <= 0.7,
    );
    row(
        "S8",
        "QED over QCOW2 in a file, all threads",
        "above 1",
        ratio(file(Qed, most), file(Qcow2, most)),
        "",
        &|v| v > 1.0,
    );
    row(
        "S8",
        "zoned over QED in a file, all threads",
        "far above 1",
        ratio(file(Zoned, most), file(Qed, most)),
        "",
        &|v| v >= 2.0,
    );
    rows
}

fn copy_rows(copies: &[Copied]) -> Vec<Row> {
    let find = |image, packs| copies.iter().find(|copy| copy.image == image && copy.stage.packs == packs);
    let seconds = |image, packs| find(image, packs).map_or(f64::NAN, |copy| copy.dd.seconds);
    let more = |one: f64, other: f64| (one / other - 1.0) * 100.0;
    let (best, half, none) =
        (seconds(Image::Zoned, 100), seconds(Image::Zoned, 50), seconds(Image::Zoned, 0));
    let (qcow2, fvd) = (seconds(Image::Qcow2, 100), seconds(Image::Fvd, 100));
    let row = |id, what, paper, value: f64, most: f64| Row {
        id,
        what,
        paper,
        ours: format!("{value:+.0} %"),
        is_met: value <= most,
    };
    let mut rows = vec![
        row("S10", "dd, all packs: time against QCOW2", "-77 %", more(best, qcow2), -77.0),
        row("S10", "dd, all packs: time against FVD", "-66 %", more(best, fvd), -66.0),
        row("S11", "dd, half packs: time added", "+75 %", more(half, best), 75.0),
        row("S11", "dd, nothing packs: time added", "+153 %", more(none, best), 153.0),
        row("S12", "dd, nothing packs: time against QCOW2", "-43 %", more(none, qcow2), -43.0),
        row("S12", "dd, nothing packs: time against FVD", "-19 %", more(none, fvd), -19.0),
    ];
    if let Some((dd, again)) =
        find(Image::Zoned, 100).and_then(|copy| Some((copy.dd, copy.dd.again_seconds?)))
    {
        rows.push(row(
            "S13",
            "noise over what packs, against a new file",
            "about 0",
            more(again, none),
            10.0,
        ));
        let (ours, is_met) = (dd.again_reads.to_string(), dd.again_reads == 0);
        rows.push(Row { id: "S13", what: "  reads for it", paper: "0", ours, is_met });
    }
    rows
}

/// The paper's three ways need so many reads: one lead block each, one metadata cluster for a zone, one for eight.
fn recovery_rows(recovered: &Recovered) -> Vec<Row> {
    let leads = recovered.units;
    let (zones, eights) = (leads / 1024, leads / 8192);
    let Recovered { reads, mebibytes_read, seconds, .. } = *recovered;
    let gib = (leads * 64).div_ceil(1 << 20);
    let took = || format!("{seconds:.2} s ({gib} GiB here)");
    let row = |id, what, paper, ours, is_met| Row { id, what, paper, ours, is_met };
    let counted = format!("{reads} (leads {leads}, zones {zones}, eights {eights})");
    let mib = format!(
        "{mebibytes_read:.1} MiB (leads {}, zones {}, eights {})",
        leads >> 8,
        zones >> 4,
        eights >> 4
    );
    vec![
        row("S22", "recovery of 128 GiB, a cluster for eight zones", "1.9 s", took(), seconds <= 1.9),
        row("S22", "  a cluster for each zone", "11.6 s", took(), seconds <= 11.6),
        row("S22", "  no metadata clusters", "21 min", took(), seconds <= 1260.0),
        row("S23", "  reads", "256", counted, reads <= 256),
        row("S23", "  bytes", "16 MiB", mib, mebibytes_read <= 16.0),
    ]
}
