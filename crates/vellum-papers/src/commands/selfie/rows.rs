//! The paper's rows beside the measured ones.
//!
//! Where the paper gives a number, a figure of the models of other programs counts as met if it is within a
//! quarter of it, and one of ours only if it is at least as good. Where the paper gives a curve without
//! numbers: *near linear* is three quarters of the threads, *far below 1* at most 0.7, *about equal* within a
//! tenth. Where no unit embeds its entry, compressible and incompressible data are the same to the engine:
//! then rows that compare the two are missed in any case.

use super::super::Row;
use super::{Copied, Guest, K, Rate, Seen, Today};
use crate::selfie::{Below, Drive, Image, Order, Overwrites, Recovered};
use Image::{Fvd, Host, Qcow2, Qed, Zoned};

/// Rows as they come; those whose figures were not made are left out.
#[derive(Default)]
struct Rows(Vec<Row>);

impl Rows {
    fn add(
        &mut self,
        id: &'static str,
        what: &'static str,
        paper: &'static str,
        value: Option<f64>,
        unit: &str,
        is_met: impl Fn(f64) -> bool,
    ) {
        if let Some(value) = value.filter(|value| value.is_finite()) {
            self.0.push(Row { id, what, paper, ours: format!("{value:.2}{unit}"), is_met: is_met(value) });
        }
    }

    /// A time against another one, in percent; met when it is no more than the paper's.
    fn time(
        &mut self,
        id: &'static str,
        what: &'static str,
        paper: &'static str,
        times: (Option<f64>, Option<f64>),
        most: f64,
    ) {
        if let (Some(one), Some(other)) = times {
            let value = (one / other - 1.0) * 100.0;
            self.0.push(Row { id, what, paper, ours: format!("{value:+.0} %"), is_met: value <= most });
        }
    }
}

fn ratio(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    one.zip(other).map(|(one, other)| one / other)
}

/// S1, S2 and S4 to S8.
pub(super) fn rates(rates: &[Rate], today: &Today) -> Vec<Row> {
    use Below::{File, ThinVolume, Volume};
    let hdd = || rates.iter().filter(|rate| rate.stage.drive == Drive::Hdd);
    let most = hdd().map(|rate| rate.fio.threads).max().unwrap_or(1);
    let all = |image, below, order, request: usize| {
        hdd().filter(move |rate| {
            let is_work = (rate.fio.order, rate.fio.request) == (order, request)
                && !(rate.fio.is_again || rate.fio.is_warm);
            rate.image == image && (rate.stage.below, rate.stage.packs) == (below, 100) && is_work
        })
    };
    let at = |image, below, order, request: usize, threads| {
        all(image, below, order, request)
            .find(|rate| rate.fio.threads == threads)
            .map(|rate| rate.megabytes_per_second)
    };
    let peak = |image, below, request: usize| {
        all(image, below, Order::Sequential, request).map(|rate| rate.megabytes_per_second).reduce(f64::max)
    };
    let in_order = |image, below, threads| at(image, below, Order::Sequential, 64 * K, threads);
    let small = |image, threads| in_order(image, Volume, threads);
    let thin = |image, threads| in_order(image, ThinVolume, threads);
    let file = |image, threads| in_order(image, File, threads);
    let random = |image, below, threads| at(image, below, Order::Random, 64 * K, threads);
    let growth = |image, below| ratio(in_order(image, below, most), in_order(image, below, 1));
    let mut rows = Rows::default();
    let best = [Volume, File].into_iter().flat_map(|below| {
        [Qcow2, Fvd, Qed].map(|other| ratio(in_order(Zoned, below, most), in_order(other, below, most)))
    });
    let best = best.flatten().reduce(f64::max);
    rows.add("S1", "zoned over the others, at best", "5", best, "", |v| v >= 5.0);
    rows.add(
        "S2",
        "zoned over QCOW2, all threads",
        "2 to 8",
        ratio(small(Zoned, most), small(Qcow2, most)),
        "",
        |v| v >= 2.0,
    );
    rows.add(
        "S2",
        "zoned over FVD, all threads",
        "2 to 8",
        ratio(small(Zoned, most), small(Fvd, most)),
        "",
        |v| v >= 2.0,
    );
    rows.add("S4", "64 KiB, 1 thread: HOST (fitted)", "6 MB/s", small(Host, 1), " MB/s", |v| {
        (4.5..=7.5).contains(&v)
    });
    rows.add("S4", "  QCOW2", "3.5 MB/s", small(Qcow2, 1), " MB/s", |v| (2.6..=4.4).contains(&v));
    rows.add("S4", "  FVD over HOST", "1", ratio(small(Fvd, 1), small(Host, 1)), "", |v| v >= 0.9);
    rows.add("S4", "  zoned over HOST", "1", ratio(small(Zoned, 1), small(Host, 1)), "", |v| v >= 0.95);
    rows.add("S4", "  zoned over HOST, thin volume", "1", ratio(thin(Zoned, 1), thin(Host, 1)), "", |v| {
        v >= 0.95
    });
    rows.add("S4", "  zoned over QCOW2", "1.7", ratio(small(Zoned, 1), small(Qcow2, 1)), "", |v| v >= 1.7);
    let now = today.megabytes_per_second;
    rows.add("S4", "  zoned over QEMU of today (log)", "-", ratio(small(Zoned, 1), now), "", |v| v >= 1.7);
    let linear = 0.75 * most as f64;
    rows.add("S5", "zoned, all threads over one", "near linear", growth(Zoned, Volume), "", |v| v >= linear);
    rows.add("S5", "  on a thin volume", "near linear", growth(Zoned, ThinVolume), "", |v| v >= linear);
    rows.add("S5", "  in MB/s, against the most of S6", "33 MB/s", small(Zoned, most), " MB/s", |v| {
        v >= 33.0
    });
    rows.add("S5", "  the same, thin volume", "33 MB/s", thin(Zoned, most), " MB/s", |v| v >= 33.0);
    rows.add("S5", "HOST, all threads over one", "little", growth(Host, Volume), "", |v| v <= 2.0);
    let large = 4096 * K;
    rows.add("S6", "zoned at its most, 4 MiB", "33 MB/s", peak(Zoned, Volume, large), " MB/s", |v| v >= 33.0);
    rows.add("S6", "  512 KiB", "33 MB/s", peak(Zoned, Volume, 512 * K), " MB/s", |v| v >= 33.0);
    rows.add("S6", "  4 MiB, thin volume", "33 MB/s", peak(Zoned, ThinVolume, large), " MB/s", |v| v >= 33.0);
    rows.add("S6", "HOST at its most, 4 MiB", "80 MB/s", peak(Host, Volume, large), " MB/s", |v| {
        (60.0..=100.0).contains(&v)
    });
    rows.add(
        "S7",
        "zoned, random over sequential",
        "1",
        ratio(random(Zoned, Volume, most), small(Zoned, most)),
        "",
        |v| v >= 0.95,
    );
    rows.add(
        "S7",
        "  on a thin volume",
        "1",
        ratio(random(Zoned, ThinVolume, most), thin(Zoned, most)),
        "",
        |v| v >= 0.95,
    );
    let warm = |below| {
        let mut all = hdd().filter(|rate| rate.fio.is_warm && rate.stage.below == below);
        all.find(|rate| rate.fio.threads == most).map(|rate| rate.megabytes_per_second)
    };
    let again = ratio(warm(Volume), small(Zoned, most));
    rows.add("S7", "  once its table is in memory", "1", again, "", |v| v >= 0.95);
    let again = ratio(warm(ThinVolume), thin(Zoned, most));
    rows.add("S7", "  the same, thin volume", "1", again, "", |v| v >= 0.95);
    let far_below = |v: f64| v <= 0.7;
    let host = ratio(random(Host, Volume, 1), small(Host, 1));
    rows.add("S7", "HOST, random over sequential, one thread", "far below 1", host, "", far_below);
    let zoned = ratio(file(Zoned, most), thin(Zoned, most));
    rows.add("S8", "zoned, file over thin volume, all threads", "1", zoned, "", |v| v >= 0.9);
    let zoned = ratio(file(Zoned, most), small(Zoned, most));
    rows.add("S8", "  file over volume", "1", zoned, "", |v| v >= 0.9);
    let qcow2 = ratio(file(Qcow2, most), small(Qcow2, most));
    rows.add("S8", "QCOW2, file over volume, all threads", "far below 1", qcow2, "", far_below);
    let fvd = ratio(file(Fvd, most), small(Fvd, most));
    rows.add("S8", "FVD, file over volume, all threads", "far below 1", fvd, "", far_below);
    let qed = ratio(file(Qed, most), file(Qcow2, most));
    rows.add("S8", "QED over QCOW2 in a file, all threads", "above 1", qed, "", |v| v > 1.0);
    let qed = ratio(file(Zoned, most), file(Qed, most));
    rows.add("S8", "zoned over QED in a file, all threads", "far above 1", qed, "", |v| v >= 2.0);
    rows.0
}

/// LZ4 as the paper has it, bytes a second of what goes in.
const LZ4_RATE: f64 = 340e6;

/// S9 to S14, and S3 as far as dd goes.
pub(super) fn copies(copies: &[Copied]) -> Vec<Row> {
    let mut rows = Rows::default();
    for below in [Below::Volume, Below::ThinVolume] {
        let find = |image, packs| {
            copies
                .iter()
                .find(|copy| (copy.image, copy.stage.below, copy.stage.packs) == (image, below, packs))
        };
        let time = |image, packs| find(image, packs).map(|copy| copy.dd.seconds);
        let is_thin = below == Below::ThinVolume;
        let name = |thick, thin| if is_thin { thin } else { thick };
        let reads = ratio(
            find(Zoned, 100).map(|copy| copy.dd.read_seconds),
            find(Host, 100).map(|copy| copy.dd.read_seconds),
        );
        rows.add("S9", name("dd, read: zoned over HOST", "  thin volume"), "about 1", reads, "", |v| {
            v <= 1.1
        });
        let best = time(Zoned, 100);
        rows.time(
            "S10",
            name("dd, all packs: time against QCOW2", "  thin volume"),
            "-77 %",
            (best, time(Qcow2, 100)),
            -77.0,
        );
        rows.time("S10", "  against FVD", "-66 %", (best, time(Fvd, 100)), -66.0);
        let is_born = find(Zoned, 100).is_some_and(|copy| copy.dd.packed > 0);
        // Nothing is that little.
        let at_most = |percent: f64| if is_born { percent } else { f64::NEG_INFINITY };
        rows.time(
            "S11",
            name("dd, half packs: time added", "  thin volume"),
            "+75 %",
            (time(Zoned, 50), best),
            at_most(75.0),
        );
        rows.time("S11", "  nothing packs", "+153 %", (time(Zoned, 0), best), at_most(153.0));
        rows.time(
            "S12",
            name("dd, nothing packs: time against QCOW2", "  thin volume"),
            "-43 %",
            (time(Zoned, 0), time(Qcow2, 100)),
            -43.0,
        );
        rows.time("S12", "  against FVD", "-19 %", (time(Zoned, 0), time(Fvd, 100)), -19.0);
        let again = find(Zoned, 100).map(|copy| copy.dd);
        rows.time(
            "S13",
            name("noise over what packs, against a new file", "  thin volume"),
            "about 0",
            (again.map(|dd| dd.again_seconds), time(Zoned, 0)),
            at_most(10.0),
        );
        rows.add("S13", "  reads for it", "0", again.map(|dd| dd.again_reads as f64), "", |v| v < 1.0);
        let packed = again.map(|dd| dd.packed as f64).filter(|_| is_born);
        let lz4 = ratio(packed.map(|count| count * 4096.0 / LZ4_RATE * 100.0), best);
        rows.add(
            "S14",
            name("dd, all packs: LZ4 at the paper's 340 MB/s", "  thin volume: LZ4 at the paper's 340 MB/s"),
            "no change",
            lz4,
            " % of the time",
            |v| v <= 3.0,
        );
        let factors = [Qcow2, Fvd].map(|other| ratio(time(other, 100), best)).into_iter().flatten();
        rows.add(
            "S3",
            name("dd: over QCOW2 and FVD, the lesser", "  thin volume"),
            "1.5 to 4",
            factors.reduce(f64::min),
            "",
            |v| v >= 1.5,
        );
    }
    rows.0
}

/// S16.
pub(super) fn tarballs(copies: &[Copied]) -> Vec<Row> {
    let mut rows = Rows::default();
    for below in [Below::Volume, Below::ThinVolume] {
        let time = |image| {
            let copy = copies.iter().find(|copy| (copy.image, copy.stage.below) == (image, below));
            copy.map(|copy| copy.dd.seconds)
        };
        let name = if below == Below::Volume { "copy of 77 MB: time against QCOW2" } else { "  thin volume" };
        rows.time("S16", name, "-64 %", (time(Zoned), time(Qcow2)), -64.0);
        rows.time("S16", "  against FVD", "-37 %", (time(Zoned), time(Fvd)), -37.0);
        rows.add("S16", "  over HOST", "5.6", ratio(time(Zoned), time(Host)), "", |v| v <= 5.6);
    }
    rows.0
}

/// S15 and S18 to S20.
pub(super) fn guests(seen: &[Seen], today: &Today, overwrites: Option<Overwrites>) -> Vec<Row> {
    let mut rows = Rows::default();
    let time = |guest, drive, below, image| {
        let is_it = |seen: &&Seen| {
            (seen.guest, seen.stage.drive, seen.stage.below, seen.image) == (guest, drive, below, image)
        };
        seen.iter().find(is_it).map(|seen| seen.played.seconds)
    };
    for below in [Below::Volume, Below::ThinVolume] {
        let is_thin = below == Below::ThinVolume;
        let name = |thick, thin| if is_thin { thin } else { thick };
        let mkfs = |image| time(Guest::Mkfs, Drive::Hdd, below, image);
        let against = (mkfs(Zoned), mkfs(Qcow2));
        rows.time("S15", name("mkfs: time against QCOW2", "  thin volume"), "-87 %", against, -87.0);
        rows.time("S15", "  against FVD", "-72 %", (mkfs(Zoned), mkfs(Fvd)), -72.0);
        rows.add("S15", "  over HOST", "1.03", ratio(mkfs(Zoned), mkfs(Host)), "", |v| v <= 1.03);
        for drive in [Drive::Hdd, Drive::Ssd] {
            let mail = |image| time(Guest::Postmark, drive, below, image);
            let over = |image| ratio(mail(image), mail(Zoned));
            let (id, qcow2, fvd) = match drive {
                Drive::Hdd => ("S18", ("2.6", 2.6), ("2.1", 2.1)),
                Drive::Ssd => ("S20", ("1.4", 1.4), ("1.4", 1.4)),
            };
            let what = match drive {
                Drive::Hdd => name("PostMark: over QCOW2", "  thin volume"),
                Drive::Ssd => name("PostMark on the SSD: over QCOW2", "  thin volume"),
            };
            rows.add(id, what, qcow2.0, over(Qcow2), "", |v| v >= qcow2.1);
            rows.add(id, "  over FVD", fvd.0, over(Fvd), "", |v| v >= fvd.1);
        }
    }
    let volume = |guest, image| time(guest, Drive::Hdd, Below::Volume, image);
    let mkfs = ratio(today.mkfs_seconds, volume(Guest::Mkfs, Zoned));
    rows.add("S15", "mkfs: over QEMU of today (log)", "-", mkfs, "", |v| v >= 1.0);
    let mail = ratio(today.postmark_seconds, volume(Guest::Postmark, Zoned));
    rows.add("S18", "PostMark: over QEMU of today (log)", "-", mail, "", |v| v >= 1.0);
    if let Some(Overwrites { writes, again, units }) = overwrites {
        let share = again as f64 / writes as f64 * 100.0;
        rows.add("S19", "PostMark: writes that are overwrites", "2/3", Some(share), " %", |v| {
            (50.0..=83.0).contains(&v)
        });
        let born = seen.iter().find(|seen| {
            (seen.guest, seen.stage.below, seen.image) == (Guest::Postmark, Below::ThinVolume, Zoned)
        });
        let not_born = born.map(|seen| 100.0 - seen.played.packed as f64 / units as f64 * 100.0);
        rows.add("S19", "  new units that are not told by themselves", "17 %", not_born, " %", |v| v <= 17.0);
    }
    rows.0
}

/// S22 and S23. The paper's three ways need this many reads: one lead block for each unit, one metadata
/// cluster for each zone, one for eight.
pub(super) fn recovery(recovered: &Recovered) -> Vec<Row> {
    let leads = recovered.units;
    let (zones, eights) = (leads / 1024, leads / 8192);
    let Recovered { reads, mebibytes_read, mebibytes_of_zones, seconds, metadata_writes, .. } = *recovered;
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
    let own = mebibytes_read - mebibytes_of_zones;
    let each = metadata_writes as f64 / leads as f64;
    vec![
        row("S22", "recovery of 128 GiB, a cluster for eight zones", "1.9 s", took(), seconds <= 1.9),
        row("S22", "  a cluster for each zone", "11.6 s", took(), seconds <= 11.6),
        row("S22", "  no metadata clusters", "21 min", took(), seconds <= 1260.0),
        row("S23", "  reads", "256", counted, reads <= 256),
        row("S23", "  bytes", "16 MiB", mib, mebibytes_read <= 16.0),
        row("S23", "  bytes, but for young zones", "16 MiB", format!("{own:.1} MiB"), own <= 16.0),
        row(
            "S24",
            "metadata writes for a unit that packs",
            "0 at once",
            format!("{each:.4} later"),
            each < 0.01,
        ),
    ]
}
