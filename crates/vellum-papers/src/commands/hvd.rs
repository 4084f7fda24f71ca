//! `vellum-papers run hvd`: rows H1 to H10 of the paper, and its future work.

use serde::Serialize;
use vellum_core::Result;
use vellum_lab::report::Table;

use super::{Options, on_all_processors};
use crate::hvd::{Job, Load, Place, Run, alone, run};
use crate::report::{Figure, Good, How, Made, Row, Series, Shape};

const SETTING: &str = "Simulated: HDD Barracuda and SSD 2008 (one request at a time, blocks that are erased), the engine's \
    layout=table over a template, 1 to 8 machines on a host of two processors. The guests' requests are models of our own, \
    and page caches are left out. Fitted: the SSD's latency on H1, reads of a transaction on the 130 transactions a second \
    of one machine on the hard disk. All else follows.";

/// How many machines are run.
const MACHINES: [usize; 4] = [1, 2, 4, 8];
/// Writes in a hundred requests of figure 8.
const MIXES: [u64; 7] = [0, 20, 30, 40, 60, 80, 100];
const MICRO: [(&str, Load); 4] = [
    ("sequential read", Load::SequentialRead),
    ("random read", Load::RandomRead),
    ("sequential write", Load::SequentialWrite),
    ("random write", Load::RandomWrite),
];
const REAL: [(&str, &str, Load); 4] = [
    ("hvd-4", "Figure 4: booting, time", Load::Boot),
    ("hvd-5", "Figure 5: OLTP, response time", Load::Oltp),
    ("hvd-6", "Figure 6: decompression, time", Load::Decompress),
    ("hvd-7", "Figure 7: writing, time", Load::Write),
];
/// Without --full a load is the whole one divided by this.
const PARTS: u64 = 10;

/// Everything that was found, for programs.
#[derive(Serialize)]
struct Report {
    raw: Vec<Alone>,
    runs: Vec<Run>,
}

/// Requests a second of a drive alone.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Alone {
    load: Load,
    hdd: f64,
    ssd: f64,
}

impl Alone {
    fn ratio(&self) -> f64 {
        self.ssd / self.hdd
    }
}

pub(crate) fn make(options: &Options, table: Table) -> Result<Made> {
    table.say(SETTING);
    let part = if options.is_full { 1 } else { PARTS };
    let raw = on_all_processors(&MICRO, |(_, load)| {
        Ok(Alone { load: *load, hdd: alone(false, *load, part)?, ssd: alone(true, *load, part)? })
    })?;
    let job = |place, load, machines| Job { place, load, machines, part };
    let mut jobs = Vec::new();
    for place in Place::ALL {
        for (_, _, load) in REAL {
            jobs.extend(MACHINES.map(|machines| job(place, load, machines)));
        }
        jobs.extend(MIXES.map(|writes| job(place, Load::Mix(writes), 8)));
        jobs.extend(MICRO.map(|(_, load)| job(place, load, 1)));
        jobs.extend([1, 2].map(|passes| job(place, Load::Again(passes), 1)));
    }
    // The longest first.
    jobs.sort_by_key(|job| std::cmp::Reverse(job.machines));
    let runs = on_all_processors(&jobs, |job| run(*job))?;
    table.say("");
    table.say(&format!("  {:<22} {:<20} {:>8} {:>10} {:>12}", "", "", "machines", "seconds", "response ms"));
    for Run { job, seconds, response_ms, .. } in &runs {
        let load = format!("{:?}", job.load);
        table.say(&format!(
            "  {load:<22} {:<20} {:>8} {seconds:>10.3} {response_ms:>12.3}",
            job.place.name(),
            job.machines
        ));
    }
    let made = Numbers { raw, runs };
    let rows = made.rows(options.is_full);
    let figures = made.figures();
    Ok(Made {
        name: "hvd",
        title: "SSD-HDD-Hybrid Virtual Disk in Consolidated Environments",
        venue: "Euro-Par workshops 2009",
        setting: SETTING.to_owned(),
        rows,
        figures,
        runs: serde_json::to_value(Report { raw: made.raw, runs: made.runs }).expect("numbers and strings"),
    })
}

struct Numbers {
    raw: Vec<Alone>,
    runs: Vec<Run>,
}

impl Numbers {
    fn find(&self, place: Place, load: Load, machines: usize) -> &Run {
        let is_it = |run: &&Run| (run.job.place, run.job.load, run.job.machines) == (place, load, machines);
        self.runs.iter().find(is_it).expect("it was run")
    }

    /// How long it took there; a response where the paper has that.
    fn time(&self, place: Place, load: Load, machines: usize) -> f64 {
        let run = self.find(place, load, machines);
        if load == Load::Oltp { run.response_ms } else { run.seconds }
    }

    /// The time there, where it is 1 on the hard disk.
    fn normal(&self, place: Place, load: Load, machines: usize) -> f64 {
        self.time(place, load, machines) / self.time(Place::Hdd, load, machines)
    }

    fn rows(&self, is_full: bool) -> Vec<Row> {
        let mut rows = self.raw_rows();
        rows.extend(self.micro_rows());
        rows.extend(self.real_rows());
        rows.extend(self.gains());
        if !is_full {
            let scaled = |row: Row| match row.how {
                How::Counted => row,
                How::Simulated => row.not_judged("a tenth of the requests; --full makes all"),
            };
            rows = rows.into_iter().map(scaled).collect();
        }
        rows
    }

    fn raw_rows(&self) -> Vec<Row> {
        let said = |number: usize, what: &'static str| {
            let ratio = self.raw[number].ratio();
            Row::judged(
                "H1",
                ("figure 2", what),
                How::Simulated,
                ("HDD better", format!("{ratio:.2}x")),
                ratio,
                Good::Said(ratio < 1.0),
            )
        };
        let reads = self.raw[1].ratio();
        let fitted = Row::judged(
            "H1",
            ("figure 2", "drives alone, SSD over HDD: random read"),
            How::Simulated,
            ("16x", format!("{reads:.1}x")),
            reads,
            Good::Near(16.0),
        );
        vec![
            Row { note: "the SSD's latency is fitted to this row".to_owned(), ..fitted },
            said(0, "  sequential read"),
            said(2, "  sequential write"),
            said(3, "  random write"),
        ]
    }

    fn micro_rows(&self) -> Vec<Row> {
        let speed = |place, load| 1.0 / self.normal(place, load, 1);
        let three = |load| Place::ALL.map(|place| speed(place, load));
        let shown = |[_, ssd, hybrid, tiered]: [f64; 4]| {
            format!("SSD {ssd:.2}x, ours {hybrid:.2}x, fast medium {tiered:.2}x")
        };
        let said = |id, what: &'static str, paper: &'static str, speeds: [f64; 4], holds: bool| {
            Row::judged(
                id,
                ("figure 3", what),
                How::Simulated,
                (paper, shown(speeds)),
                1.0,
                Good::Said(holds),
            )
        };
        let reads = three(Load::SequentialRead);
        let writes = three(Load::SequentialWrite);
        let random = three(Load::RandomWrite);
        let is_near = |value: f64| (value - 1.0).abs() < 0.1;
        vec![
            said(
                "H2",
                "one guest, over HDD: sequential read",
                "SSD, HVD above",
                reads,
                reads[1] > 1.0 && reads[2] > 1.0,
            ),
            said(
                "H3",
                "  sequential write",
                "HVD as HDD, SSD less",
                writes,
                is_near(writes[2]) && writes[1] < 0.9,
            ),
            said(
                "H3",
                "  random write",
                "HDD a little above SSD",
                random,
                random[1] < 1.0 && is_near(random[2]),
            ),
        ]
    }

    fn real_rows(&self) -> Vec<Row> {
        let less = |place, load, machines| 1.0 - self.normal(place, load, machines);
        let percent = |less: f64| format!("{:+.0} %", -100.0 * less);
        let range = |places: &[Place], load| -> String {
            let one = |place: &Place| {
                let all = MACHINES.map(|machines| percent(less(*place, load, machines)));
                format!("{}: {}", place.name(), all.join(", "))
            };
            places.iter().map(one).collect::<Vec<_>>().join("; ")
        };
        let boots = MACHINES.map(|machines| less(Place::Hybrid, Load::Boot, machines));
        let mut rows = vec![Row::judged(
            "H4",
            ("figure 4", "1, 2, 4, 8 machines boot, time against HDD"),
            How::Simulated,
            ("not considerable", range(&[Place::Hybrid], Load::Boot)),
            1.0,
            Good::Said(boots.iter().all(|less| (0.0..0.25).contains(less))),
        )];
        for (place, what) in [
            (Place::Ssd, "OLTP, response against HDD: all on SSD"),
            (Place::Hybrid, "  template on SSD"),
            (Place::Tiered, "  with a fast medium"),
        ] {
            for machines in [1, 8] {
                let value = 1.0 / self.normal(place, Load::Oltp, machines);
                let what = format!("{what}, {machines} machine{}", if machines > 1 { "s" } else { "" });
                rows.push(Row::judged(
                    "H5",
                    ("figure 5", what),
                    How::Simulated,
                    ("-30 to -60 %", percent(less(place, Load::Oltp, machines))),
                    value,
                    Good::Within(1.0 / 0.7, 1.0 / 0.4),
                ));
            }
        }
        let [hdd, ssd, hybrid, tiered] = Place::ALL.map(|place| self.time(place, Load::Decompress, 8));
        rows.push(Row::judged(
            "H6",
            ("figure 6", "8 machines decompress: the SSD alone, and the order"),
            How::Simulated,
            ("SSD slower, HVD best", range(&[Place::Ssd, Place::Hybrid, Place::Tiered], Load::Decompress)),
            1.0,
            Good::Said(ssd > hdd && hybrid < hdd && tiered < hdd),
        ));
        let slower = |machines| self.normal(Place::Ssd, Load::Write, machines) > 1.0;
        rows.push(Row::judged(
            "H7",
            ("figure 7", "1, 2, 4, 8 machines write, time against HDD"),
            How::Simulated,
            ("SSD slower from 2", range(&[Place::Ssd, Place::Hybrid], Load::Write)),
            1.0,
            Good::Said([2, 4, 8].into_iter().all(slower)),
        ));
        let above = |writes: u64| {
            self.time(Place::Ssd, Load::Mix(writes), 8) / self.time(Place::Hybrid, Load::Mix(writes), 8)
        };
        let all = MIXES.map(|writes| format!("{writes} %: {:.2}x", above(writes)));
        rows.push(Row::judged(
            "H8",
            ("figure 8", "8 machines, ours over all on SSD, by writes"),
            How::Simulated,
            ("above from 30 %", all.join(", ")),
            1.0,
            Good::Said(MIXES.into_iter().filter(|writes| *writes > 30).all(|writes| above(writes) > 1.0)),
        ));
        rows
    }

    fn gains(&self) -> Vec<Row> {
        let gain = |place, load, machines| 1.0 / self.normal(place, load, machines);
        let mut rows = Vec::new();
        for (what, load) in [("OLTP", Load::Oltp), ("decompression", Load::Decompress)] {
            for place in [Place::Hybrid, Place::Tiered] {
                let value = gain(place, load, 8);
                let shown = format!("{:+.0} %", (value - 1.0) * 100.0);
                rows.push(Row::judged(
                    "H9",
                    ("§1", format!("{what}, 8 machines, over HDD: {}", place.name())),
                    How::Simulated,
                    ("over +40 %", shown),
                    value,
                    Good::High(1.4),
                ));
            }
        }
        let guests = |place| {
            let of_place = self.runs.iter().filter(|run| run.job.place == place);
            of_place.map(Run::guest_bytes_on_ssd).sum::<u64>()
        };
        let on_hdd: u64 =
            self.runs.iter().filter(|run| run.job.place == Place::Hybrid).map(|run| run.hdd.writes).sum();
        rows.push(Row::exact(
            "H10",
            ("§2.2", "bytes of guests written to the SSD: template on SSD"),
            ("0", format!("{} (HDD: {on_hdd} writes)", guests(Place::Hybrid))),
            (0, guests(Place::Hybrid)),
        ));
        rows.push(Row::exact(
            "H10",
            ("§2.2", "  with a fast medium, beside promotions"),
            ("0", guests(Place::Tiered).to_string()),
            (0, guests(Place::Tiered)),
        ));
        let again = |place, passes| self.find(place, Load::Again(passes), 1).response_ms;
        let (first, second) = (again(Place::Tiered, 1), again(Place::Tiered, 2));
        let ssd = again(Place::Ssd, 2);
        rows.push(Row::judged(
            "H11",
            ("§4", "future work: written once, read twice, over the SSD's pass"),
            How::Simulated,
            ("not built", format!("first {:.2}x, second {:.2}x", ssd / first, ssd / second)),
            1.0,
            Good::Said(second < ssd * 1.1),
        ));
        rows
    }

    fn figures(&self) -> Vec<Figure> {
        let series = |name: &str, values: Vec<Option<f64>>| Series {
            name: name.to_owned(),
            is_of_the_paper: false,
            values,
        };
        let micro = MICRO.iter().map(|(name, _)| (*name).to_owned()).collect::<Vec<_>>();
        let bars = |file: &str, title: &str, series| Figure {
            file: file.to_owned(),
            title: title.to_owned(),
            shape: Shape::Bars,
            x_name: "operation",
            y_name: "throughput, HDD is 1",
            places: micro.clone(),
            series,
        };
        let of_paper = Series {
            name: "SSD, in the paper".to_owned(),
            is_of_the_paper: true,
            values: vec![None, Some(16.0), None, None],
        };
        let raw = self.raw.iter().map(|alone| Some(alone.ratio())).collect();
        let mut figures = vec![bars("hvd-2", "Figure 2: drives alone", vec![series("SSD", raw), of_paper])];
        let places = |value: &dyn Fn(Place) -> Vec<Option<f64>>| -> Vec<Series> {
            Place::ALL.into_iter().map(|place| series(place.name(), value(place))).collect()
        };
        let speeds = |place| MICRO.map(|(_, load)| Some(1.0 / self.normal(place, load, 1))).to_vec();
        figures.push(bars("hvd-3", "Figure 3: one guest", places(&speeds)));
        for (file, title, load) in REAL {
            let value = |place| MACHINES.map(|machines| Some(self.normal(place, load, machines))).to_vec();
            figures.push(Figure {
                file: file.to_owned(),
                title: title.to_owned(),
                shape: Shape::Lines,
                x_name: "machines",
                y_name: "time, HDD is 1",
                places: MACHINES.map(|machines| machines.to_string()).to_vec(),
                series: places(&value),
            });
        }
        let value = |place| MIXES.map(|writes| Some(self.time(place, Load::Mix(writes), 8))).to_vec();
        figures.push(Figure {
            file: "hvd-8".to_owned(),
            title: "Figure 8: 8 machines, reads and writes mixed, time".to_owned(),
            shape: Shape::Lines,
            x_name: "writes in 100",
            y_name: "seconds",
            places: MIXES.map(|writes| writes.to_string()).to_vec(),
            series: places(&value),
        });
        figures
    }
}
