//! The paper's rows beside ours.
//!
//! Where the paper gives a curve without numbers, *near linear* is three quarters of the threads, *far below 1* at most
//! 0.7, *about equal* within a tenth; such rows say whether ours runs as the paper says, and are not judged. Where no
//! unit embeds its entry, compressible and incompressible data are the same to the engine: then rows that compare the
//! two are not comparable. Why a row is worse is in `why`.

use super::{Copied, Guest, K, Rate, Seen, Today};
use crate::report::{Good, How, Row};
use crate::selfie::{Below, Drive, Image, Order, Overwrites, Recovered};
use Good::{High, Low, Near, Said, Within};
use Image::{Fvd, Host, Qcow2, Qed, Zoned};

/// Rows as they come; those whose figures were not made are left out.
#[derive(Default)]
struct Rows {
    rows: Vec<Row>,
    id: &'static str,
    place: &'static str,
}

impl Rows {
    /// What the next rows belong to.
    fn of(&mut self, id: &'static str, place: &'static str) -> &mut Self {
        (self.id, self.place) = (id, place);
        self
    }

    fn add(
        &mut self,
        what: &str,
        paper: &'static str,
        value: Option<f64>,
        unit: &str,
        good: impl Fn(f64) -> Good,
    ) -> &mut Self {
        if let Some(value) = value.filter(|value| value.is_finite()) {
            let here = format!("{value:.2}{unit}");
            self.push(what, How::Simulated, (paper, here), value, good(value));
        }
        self
    }

    /// A time against another one, in percent; judged by the factor of the times.
    fn time(
        &mut self,
        what: &str,
        (paper, paper_percent): (&'static str, f64),
        times: (Option<f64>, Option<f64>),
    ) -> &mut Self {
        if let (Some(one), Some(other)) = times {
            let factor = one / other;
            let here = format!("{:+.0} %", (factor - 1.0) * 100.0);
            self.push(what, How::Simulated, (paper, here), factor, Low(1.0 + paper_percent / 100.0));
        }
        self
    }

    fn push(&mut self, what: &str, how: How, texts: (&'static str, String), value: f64, good: Good) {
        let row = Row::judged(self.id, (self.place, what), how, texts, value, good).because(why(self.id));
        self.rows.push(row);
    }

    /// Writes and flushes of ours, and of today's QEMU: counts that no drive changes.
    fn calls(&mut self, what: &str, writes: (f64, f64), flushes: (f64, f64)) {
        let here = format!(
            "{:.2} ({:.2} for {:.2}; writes {:.2} for {:.2})",
            flushes.1 / flushes.0,
            flushes.1,
            flushes.0,
            writes.1,
            writes.0
        );
        self.push(what, How::Counted, ("-", here), flushes.1 / flushes.0, Said(true));
        self.not_judged(true, "not in the paper");
    }

    /// Takes the verdict of the last row back.
    fn not_judged(&mut self, is_so: bool, why: &str) {
        if let Some(row) = self.rows.pop() {
            self.rows.push(if is_so { row.not_judged(why) } else { row });
        }
    }
}

/// Why a row is worse, and what would change it; longer in docs/performance/papers.md.
fn why(id: &str) -> &'static str {
    match id {
        "S3" | "S10" | "S12" | "S15" | "S16" | "S18" | "S20" => {
            "our models of QCOW2 and FVD are faster than the paper's runs of them: HOST, which records nothing, does not \
             reach the paper's gain over them either"
        }
        "S4" => "zeros are written while the guest writes, 1 MiB at a time, so some flushes carry them",
        "S6" => "zeros are written while the guest writes",
        "S7" => "entries of distant units are in distant table pages, and each is checkpointed by itself",
        "S11" => "what does not pack costs less here than in the paper",
        "S13" => "units move, as in the paper, and where they move to is seldom in a row",
        "S19" => "the recorded PostMark's text is random: a block packs only at the end of a file",
        "S23" => "two open zones are read whole, 128 MiB; the image's own part is below the paper's",
        _ => "",
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
            .map(Rate::megabytes_per_second)
    };
    let peak = |image, below, request: usize| {
        all(image, below, Order::Sequential, request).map(Rate::megabytes_per_second).reduce(f64::max)
    };
    let in_order = |image, below, threads| at(image, below, Order::Sequential, 64 * K, threads);
    let small = |image, threads| in_order(image, Volume, threads);
    let thin = |image, threads| in_order(image, ThinVolume, threads);
    let file = |image, threads| in_order(image, File, threads);
    let random = |image, below, threads| at(image, below, Order::Random, 64 * K, threads);
    let growth = |image, below| ratio(in_order(image, below, most), in_order(image, below, 1));
    let best = [Volume, File].into_iter().flat_map(|below| {
        [Qcow2, Fvd, Qed].map(|other| ratio(in_order(Zoned, below, most), in_order(other, below, most)))
    });
    let best = best.flatten().reduce(f64::max);
    let mut rows = Rows::default();
    rows.of("S1", "abstract").add("zoned over the others, at best", "5", best, "", |_| High(5.0));
    let over = |other| ratio(small(Zoned, most), small(other, most));
    rows.of("S2", "conclusions")
        .add("zoned over QCOW2, all threads", "2 to 8", over(Qcow2), "", |_| Within(2.0, 8.0))
        .add("zoned over FVD, all threads", "2 to 8", over(Fvd), "", |_| Within(2.0, 8.0));
    rows.of("S4", "figure 5a")
        .add("64 KiB, 1 thread: HOST (fitted)", "6 MB/s", small(Host, 1), " MB/s", |_| Near(6.0))
        .add("  QCOW2", "3.5 MB/s", small(Qcow2, 1), " MB/s", |_| Near(3.5))
        .add("  FVD over HOST", "1", ratio(small(Fvd, 1), small(Host, 1)), "", |_| Near(1.0))
        .add("  zoned over HOST", "1", ratio(small(Zoned, 1), small(Host, 1)), "", |_| High(1.0))
        .add("  zoned over HOST, thin volume", "1", ratio(thin(Zoned, 1), thin(Host, 1)), "", |_| High(1.0))
        .add("  zoned over QCOW2", "1.7", ratio(small(Zoned, 1), small(Qcow2, 1)), "", |_| High(6.0 / 3.5));
    let now = today.megabytes_per_second;
    rows.add("  zoned over QEMU of today (log)", "-", ratio(small(Zoned, 1), now), "", |v| Said(v >= 1.0))
        .not_judged(now.is_some(), "not in the paper");
    let ours = all(Zoned, Volume, Order::Sequential, 64 * K).find(|rate| rate.fio.threads == 1);
    if let (Some((writes, flushes)), Some(ours)) = (today.calls_of_the_thread, ours) {
        let what = "  flushes for each, QEMU of today by zoned";
        rows.calls(what, (ours.reached.writes, writes), (ours.reached.flushes, flushes));
    }
    let linear = 0.75 * most as f64;
    rows.of("S5", "figure 5a")
        .add("zoned, all threads over one", "near linear", growth(Zoned, Volume), "", |v| Said(v >= linear))
        .add("  on a thin volume", "near linear", growth(Zoned, ThinVolume), "", |v| Said(v >= linear))
        .add("HOST, all threads over one", "little", growth(Host, Volume), "", |v| Said(v <= 2.0));
    let large = 4096 * K;
    rows.of("S6", "figure 5b, c")
        .add("zoned at its most, 4 MiB", "33 MB/s", peak(Zoned, Volume, large), " MB/s", |_| High(33.0))
        .add("  512 KiB", "33 MB/s", peak(Zoned, Volume, 512 * K), " MB/s", |_| High(33.0))
        .add("  4 MiB, thin volume", "33 MB/s", peak(Zoned, ThinVolume, large), " MB/s", |_| High(33.0))
        .add("HOST at its most, 4 MiB", "80 MB/s", peak(Host, Volume, large), " MB/s", |_| Near(80.0));
    let warm = |below| {
        let mut all = hdd().filter(|rate| rate.fio.is_warm && rate.stage.below == below);
        all.find(|rate| rate.fio.threads == most).map(Rate::megabytes_per_second)
    };
    let apart = |below, sequential| ratio(random(Zoned, below, most), sequential);
    let host = ratio(random(Host, Volume, 1), small(Host, 1));
    rows.of("S7", "figure 6")
        .add("zoned, random over sequential", "1", apart(Volume, small(Zoned, most)), "", |_| High(1.0))
        .add("  on a thin volume", "1", apart(ThinVolume, thin(Zoned, most)), "", |_| High(1.0))
        .add("  once its table is in memory", "1", ratio(warm(Volume), small(Zoned, most)), "", |_| High(1.0))
        .add("  the same, thin volume", "1", ratio(warm(ThinVolume), thin(Zoned, most)), "", |_| High(1.0))
        .add("HOST, random over sequential, one thread", "far below 1", host, "", |v| Said(v <= 0.7));
    let against = |one, other| ratio(file(one, most), other);
    rows.of("S8", "figure 7")
        .add("zoned, file over thin volume", "about 1", against(Zoned, thin(Zoned, most)), "", |v| {
            Said(v >= 0.9)
        })
        .add("  file over volume", "about 1", against(Zoned, small(Zoned, most)), "", |v| Said(v >= 0.9))
        .add("  the same, one thread", "about 1", ratio(file(Zoned, 1), small(Zoned, 1)), "", |v| {
            Said(v >= 0.9)
        })
        .add("QCOW2, file over volume", "far below 1", against(Qcow2, small(Qcow2, most)), "", |v| {
            Said(v <= 0.7)
        })
        .add("FVD, file over volume", "far below 1", against(Fvd, small(Fvd, most)), "", |v| Said(v <= 0.7))
        .add("  the same, one thread", "far below 1", ratio(file(Fvd, 1), small(Fvd, 1)), "", |v| {
            Said(v <= 0.7)
        })
        .add("zoned over FVD in a file", "far above 1", against(Zoned, file(Fvd, most)), "", |v| {
            Said(v >= 2.0)
        })
        .add("QED over QCOW2 in a file", "above 1", against(Qed, file(Qcow2, most)), "", |v| Said(v > 1.0))
        .add("zoned over QED in a file", "far above 1", against(Zoned, file(Qed, most)), "", |v| {
            Said(v >= 2.0)
        });
    rows.rows
}

/// LZ4 as the paper has it, bytes a second of what goes in.
const LZ4_RATE: f64 = 340e6;
const NOTHING_PACKED: &str = "zeros are written as fast as the guest writes, so no unit embedded its entry";

/// S9 to S14, and S3 as far as dd goes.
pub(super) fn copies(copies: &[Copied]) -> Vec<Row> {
    let mut rows = Rows::default();
    let is_cleared = |copy: &&Copied| matches!(copy.stage.below, Below::Cleared(_));
    let cleared = copies.iter().find(is_cleared).map_or(Below::Volume, |copy| copy.stage.below);
    for below in [cleared, Below::Volume, Below::ThinVolume] {
        let find = |image, packs| {
            // Who clears nothing ahead is the same on both volumes.
            let below = if image != Zoned && below == cleared { Below::Volume } else { below };
            copies
                .iter()
                .find(|copy| (copy.image, copy.stage.below, copy.stage.packs) == (image, below, packs))
        };
        let time = |image, packs| find(image, packs).map(|copy| copy.dd.seconds);
        let on = match below {
            Below::ThinVolume => ", thin volume",
            Below::Volume => ", two zones ready",
            _ => "",
        };
        let name = |what: &str| format!("{what}{on}");
        let read = |image| find(image, 100).map(|copy| copy.dd.read_seconds);
        let best = time(Zoned, 100);
        let packed = find(Zoned, 100).map_or(0, |copy| copy.dd.packed);
        rows.of("S9", "figure 8").add(
            &name("dd, read: zoned over HOST"),
            "about 1",
            ratio(read(Zoned), read(Host)),
            "",
            |v| Said(v <= 1.1),
        );
        rows.of("S10", "figure 8")
            .time(&name("dd, all packs: time against QCOW2"), ("-77 %", -77.0), (best, time(Qcow2, 100)))
            .time(&name("  against FVD"), ("-66 %", -66.0), (best, time(Fvd, 100)));
        rows.of("S11", "figure 8");
        rows.time(&name("dd, half packs: time added"), ("+75 %", 75.0), (time(Zoned, 50), best))
            .not_judged(packed == 0, NOTHING_PACKED);
        rows.time(&name("  nothing packs"), ("+153 %", 153.0), (time(Zoned, 0), best))
            .not_judged(packed == 0, NOTHING_PACKED);
        rows.of("S12", "figure 8")
            .time(
                &name("dd, nothing packs: time against QCOW2"),
                ("-43 %", -43.0),
                (time(Zoned, 0), time(Qcow2, 100)),
            )
            .time(&name("  against FVD"), ("-19 %", -19.0), (time(Zoned, 0), time(Fvd, 100)));
        let again = find(Zoned, 100).map(|copy| copy.dd);
        rows.of("S13", "§3.2");
        rows.time(
            &name("noise over what packs, against a new file"),
            ("about 0", 0.0),
            (again.map(|dd| dd.again_seconds), time(Zoned, 0)),
        )
        .not_judged(packed == 0, NOTHING_PACKED);
        if let Some(again) = again {
            let what = name("  reads for it");
            rows.push(
                &what,
                How::Counted,
                ("0", again.again_reads.to_string()),
                again.again_reads as f64,
                if again.again_reads == 0 { Within(0.0, 0.0) } else { Low(0.5) },
            );
            rows.not_judged(packed == 0, NOTHING_PACKED);
        }
        let lz4 = ratio((packed > 0).then_some(packed as f64 * 4096.0 / LZ4_RATE * 100.0), best);
        rows.of("S14", "§3.2").add(
            &name("dd, all packs: LZ4 at the paper's 340 MB/s"),
            "no change",
            lz4,
            " % of the time",
            |v| Said(v <= 3.0),
        );
        let factors = [Qcow2, Fvd].map(|other| ratio(time(other, 100), best)).into_iter().flatten();
        rows.of("S3", "conclusions").add(
            &name("dd: over QCOW2 and FVD, the lesser"),
            "1.5 to 4",
            factors.reduce(f64::min),
            "",
            |_| Within(1.5, 4.0),
        );
    }
    rows.rows
}

/// S16.
pub(super) fn tarballs(copies: &[Copied]) -> Vec<Row> {
    let mut rows = Rows::default();
    rows.of("S16", "table 1");
    for below in [Below::Volume, Below::ThinVolume] {
        let time = |image| {
            let copy = copies.iter().find(|copy| (copy.image, copy.stage.below) == (image, below));
            copy.map(|copy| copy.dd.seconds)
        };
        let on = if below == Below::Volume { "" } else { ", thin volume" };
        rows.time(
            &format!("copy of 77 MB: time against QCOW2{on}"),
            ("-64 %", -64.0),
            (time(Zoned), time(Qcow2)),
        )
        .time(&format!("  against FVD{on}"), ("-37 %", -37.0), (time(Zoned), time(Fvd)))
        .add(&format!("  over HOST{on}"), "5.6", ratio(time(Zoned), time(Host)), "", |_| Low(4.682 / 0.831));
    }
    rows.rows
}

const SMALL_POSTMARK: &str = "a twentieth of the paper's files and transactions, recorded on ext4";

/// S15 and S18 to S20.
pub(super) fn guests(seen: &[Seen], today: &Today, overwrites: Overwrites) -> Vec<Row> {
    let mut rows = Rows::default();
    let time = |guest, drive, below, image| {
        let is_it = |seen: &&Seen| {
            (seen.guest, seen.stage.drive, seen.stage.below, seen.image) == (guest, drive, below, image)
        };
        seen.iter().find(is_it).map(|seen| seen.played.seconds)
    };
    for below in [super::CLEARED, Below::Volume, Below::ThinVolume] {
        let on = match below {
            Below::ThinVolume => ", thin volume",
            Below::Volume => ", two zones ready",
            _ => "",
        };
        // Who clears nothing ahead is the same on both volumes.
        let below = |image| if image != Zoned && below == super::CLEARED { Below::Volume } else { below };
        for (guest, how) in [(Guest::Mkfs, ""), (Guest::MkfsInShort, " in requests of 256 KiB")] {
            let mkfs = |image| time(guest, Drive::Hdd, below(image), image);
            let what = format!("mkfs{how}: time against QCOW2{on}");
            rows.of("S15", "table 1")
                .time(&what, ("-87 %", -87.1), (mkfs(Zoned), mkfs(Qcow2)))
                .time(&format!("  against FVD{on}"), ("-72 %", -72.4), (mkfs(Zoned), mkfs(Fvd)))
                .add(&format!("  over HOST{on}"), "1.03", ratio(mkfs(Zoned), mkfs(Host)), "", |_| {
                    Low(4.062 / 3.961)
                });
        }
        for drive in [Drive::Hdd, Drive::Ssd] {
            let mail = |image| time(Guest::Postmark, drive, below(image), image);
            let over = |image| ratio(mail(image), mail(Zoned));
            let (id, place, qcow2, fvd, medium) = match drive {
                Drive::Hdd => ("S18", "figure 9a", ("2.6", 2.6), ("2.1", 2.1), ""),
                Drive::Ssd => ("S20", "figure 9b", ("1.4", 1.4), ("1.4", 1.4), " on the SSD"),
            };
            rows.of(id, place);
            for (what, paper, value) in [
                (format!("PostMark{medium}: over QCOW2{on}"), qcow2, over(Qcow2)),
                (format!("  over FVD{on}"), fvd, over(Fvd)),
            ] {
                rows.add(&what, paper.0, value, "", |_| High(paper.1))
                    .not_judged(value.is_some(), SMALL_POSTMARK);
            }
        }
    }
    let volume = |guest, image| time(guest, Drive::Hdd, Below::Volume, image);
    let counted = |guest| {
        let is_it = |seen: &&Seen| {
            (seen.guest, seen.stage.drive, seen.stage.below, seen.image)
                == (guest, Drive::Hdd, Below::Volume, Zoned)
        };
        seen.iter().find(is_it).map(|seen| seen.played)
    };
    for (id, place, what, now, calls, guest) in [
        (
            "S15",
            "table 1",
            "mkfs: over QEMU of today (log)",
            today.mkfs_seconds,
            today.calls_of_mkfs,
            Guest::Mkfs,
        ),
        (
            "S18",
            "figure 9a",
            "PostMark: over QEMU of today (log)",
            today.postmark_seconds,
            today.calls_of_postmark,
            Guest::Postmark,
        ),
    ] {
        rows.of(id, place)
            .add(what, "-", ratio(now, volume(guest, Zoned)), "", |v| Said(v >= 1.0))
            .not_judged(now.is_some(), "not in the paper");
        if let (Some(calls), Some(ours)) = (calls, counted(guest)) {
            let pair = |ours: u64, theirs: u64| (ours as f64, theirs as f64);
            let what = "  flushes, QEMU of today by zoned";
            rows.calls(what, pair(ours.writes, calls.writes), pair(ours.flushes, calls.flushes));
        }
    }
    let Overwrites { writes, again, units } = overwrites;
    let share = again as f64 / writes as f64 * 100.0;
    rows.of("S19", "§3.2").push(
        "PostMark: writes that are overwrites",
        How::Counted,
        ("2/3", format!("{share:.0} %")),
        share,
        Near(200.0 / 3.0),
    );
    let born = seen.iter().find(|seen| {
        (seen.guest, seen.stage.below, seen.image) == (Guest::Postmark, Below::ThinVolume, Zoned)
    });
    if let Some(born) = born {
        let not_born = 100.0 - born.played.packed as f64 / units as f64 * 100.0;
        let here = format!("{not_born:.0} %");
        rows.push(
            "  new units without an entry of their own",
            How::Counted,
            ("17 %", here),
            not_born,
            Low(17.0),
        );
    }
    rows.rows
}

/// S22 to S24. The paper's three ways need this many reads: one lead block for each unit, one metadata cluster for each
/// zone, one for eight. Ours has one way, which is compared with the paper's best.
pub(super) fn recovery(recovered: &Recovered) -> Vec<Row> {
    let leads = recovered.units;
    let (zones, eights) = (leads / 1024, leads / 8192);
    let Recovered { reads, mebibytes_read, mebibytes_of_zones, seconds, metadata_writes, .. } = *recovered;
    let gib = (leads * 64).div_ceil(1 << 20);
    let own = mebibytes_read - mebibytes_of_zones;
    let each = metadata_writes as f64 / leads as f64;
    let mut rows = Rows::default();
    rows.of("S22", "figure 10").push(
        "recovery of 128 GiB, a cluster for eight zones",
        How::Simulated,
        ("1.9 s", format!("{seconds:.2} s ({gib} GiB)")),
        seconds,
        Low(1.9),
    );
    let ways = format!("of the paper's three ways: {leads}, {zones}, {eights}");
    rows.of("S23", "figure 10").push(
        "  reads",
        How::Counted,
        ("256", format!("{reads} ({ways})")),
        reads as f64,
        Low(256.0),
    );
    rows.push(
        "  bytes",
        How::Counted,
        ("16 MiB", format!("{mebibytes_read:.1} MiB")),
        mebibytes_read,
        Low(16.0),
    );
    let what = "  bytes, without the open zones";
    rows.push(what, How::Counted, ("16 MiB", format!("{own:.1} MiB")), own, Low(16.0));
    rows.of("S24", "§1, §2.3").push(
        "metadata writes for a unit that packs",
        How::Counted,
        ("0", format!("0, {each:.4} later")),
        each,
        if each < 0.01 { Within(0.0, 0.01) } else { Low(0.001) },
    );
    rows.rows
}

/// Rows for which nothing is made.
pub(super) fn not_made() -> Vec<Row> {
    let build = "no build was recorded: 20 of its 22 minutes are the compiler's";
    vec![
        Row::not_made("S17", ("table 1", "makepkg of Linux, -j8: time against QCOW2"), "-30 %", build),
        Row::not_made("S17", ("table 1", "  against FVD"), "-37 %", build),
        Row::not_made(
            "S21",
            ("figure 9c, d", "host on Btrfs"),
            "worse",
            "no model of Btrfs, and the paper prints no value",
        ),
    ]
}
