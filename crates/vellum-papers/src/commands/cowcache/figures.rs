//! The paper's figures and tables again, with both sides.

use vellum_core::Result;
use vellum_flash::{Replacement, hits};
use vellum_lab::guest::Request;
use vellum_lab::trace::Trace;

use super::speeds::{ALLOCATING, MEMORY_MIB as FIGURE_9_MIB, Speed};
use super::{MEMORY_MIB, Pair, Replayed, Runs};
use crate::cowcache::BLOCK_BYTES;
use crate::report::{Figure, Series, Shape};

/// Sizes of the caches of the figure of replacements, in percent of what a trace touches.
const PERCENT: [u64; 5] = [1, 5, 10, 20, 40];

fn series(name: &str, is_of_the_paper: bool, values: Vec<Option<f64>>) -> Series {
    Series { name: name.to_owned(), is_of_the_paper, values }
}

pub(super) fn figures(runs: &Runs) -> Result<Vec<Figure>> {
    let mut figures =
        vec![writes(&runs.random), network(&runs.random), hit_ratios(runs), tables(runs), oltp(runs)];
    if !runs.traces.is_empty() {
        figures.push(traced(
            "cowcache-14",
            "Figure 14, no snapshot: flash writes, flash with room for all",
            &runs.traces,
            true,
        ));
        figures.push(traced(
            "cowcache-15",
            "Figure 15: flash writes and network traffic by the size of flash",
            &runs.traces,
            false,
        ));
    }
    figures.extend(speeds(runs));
    figures.push(replacement()?);
    Ok(figures)
}

fn place(pair: &Pair) -> String {
    use crate::cowcache::guest::Guest;
    match pair.guest {
        Guest::Random { bytes, is_aligned: true } if bytes == 64 << 10 => "64-a".to_owned(),
        Guest::Random { bytes, is_aligned: false } => format!("{}-u", bytes >> 10),
        Guest::Random { bytes, .. } => (bytes >> 10).to_string(),
        Guest::Oltp { bytes, .. } => format!("OLTP{}-{}", bytes >> 10, pair.memory_mib),
        Guest::Mix { .. } => "mix".to_owned(),
    }
}

/// KiB for each request.
fn each(pair: &Pair, bytes: u64) -> Option<f64> {
    Some(bytes as f64 / 1024.0 / pair.requests as f64)
}

fn writes(all: &[Pair]) -> Figure {
    let of = |name: &str, value: &dyn Fn(&Pair) -> u64| {
        series(name, false, all.iter().map(|pair| each(pair, value(pair))).collect())
    };
    Figure {
        file: "cowcache-10b".to_owned(),
        title: "Figure 10b: flash writes of a random write, write-back, 128 MiB for tables".to_owned(),
        shape: Shape::Bars,
        x_name: "write, KiB",
        y_name: "KiB to flash",
        places: all.iter().map(place).collect(),
        series: vec![
            of("flash cache", &|pair| pair.ours.flash()),
            of("TRDC, modelled", &|pair| pair.rival.flash()),
        ],
    }
}

fn network(all: &[Pair]) -> Figure {
    let of = |name: &str, value: &dyn Fn(&Pair) -> u64| {
        series(name, false, all.iter().map(|pair| each(pair, value(pair))).collect())
    };
    Figure {
        file: "cowcache-10b-network".to_owned(),
        title: "Figure 10b: network traffic of a random write before anything goes home, write-back"
            .to_owned(),
        shape: Shape::Bars,
        x_name: "write, KiB",
        y_name: "KiB over the network",
        places: all.iter().map(place).collect(),
        series: vec![
            of("flash cache", &|pair| pair.ours.network()),
            of("TRDC, modelled", &|pair| pair.rival.network()),
        ],
    }
}

fn hit_ratios(runs: &Runs) -> Figure {
    let rival = runs.by_memory.iter().map(|(_, counted)| Some(100.0 * counted.hit_ratio())).collect();
    let ours = runs.ours_by_memory.iter().map(|(_, counted)| Some(100.0 * counted.hit_ratio())).collect();
    Figure {
        file: "cowcache-table-1-hits".to_owned(),
        title: "Table 1: lookups of tables that were in memory, random 64 KiB writes".to_owned(),
        shape: Shape::Lines,
        x_name: "memory for tables, MiB",
        y_name: "hits, percent",
        places: MEMORY_MIB.iter().map(u64::to_string).collect(),
        series: vec![
            series("TRDC, modelled", false, rival),
            series("flash cache, writethrough", false, ours),
            series("TRDC, paper", true, [33.6, 74.7, 83.1, 91.6, 100.0].map(Some).into()),
            series("COWC, paper", true, [75.1, 83.0, 90.4, 96.6, 100.0].map(Some).into()),
        ],
    }
}

fn tables(runs: &Runs) -> Figure {
    let gib = |bytes: u64| Some(bytes as f64 / (1u64 << 30) as f64);
    let rival = |value: &dyn Fn(u64, u64) -> u64| -> Vec<Option<f64>> {
        runs.by_memory
            .iter()
            .map(|(_, counted)| gib(value(counted.flash_metadata, counted.flash_metadata_read)))
            .collect()
    };
    let ours = runs.random[4].ours.flash_metadata;
    let through = runs.ours_by_memory.iter().map(|(_, counted)| gib(counted.flash_metadata)).collect();
    Figure {
        file: "cowcache-table-1-metadata".to_owned(),
        title: "Table 1: metadata to and from flash, random 64 KiB writes".to_owned(),
        shape: Shape::Lines,
        x_name: "memory for tables, MiB",
        y_name: "GiB",
        places: MEMORY_MIB.iter().map(u64::to_string).collect(),
        series: vec![
            series("TRDC written, modelled", false, rival(&|written, _| written)),
            series("TRDC read, modelled", false, rival(&|_, read| read)),
            series("flash cache written, write-back", false, MEMORY_MIB.iter().map(|_| gib(ours)).collect()),
            series("flash cache written, writethrough", false, through),
            series("TRDC written, paper", true, [61.15, 46.61, 31.95, 18.08, 4.95].map(Some).into()),
            series("TRDC read, paper", true, [119.64, 45.66, 30.39, 15.13, 0.0].map(Some).into()),
            series("COWC written, paper", true, [0.47; 5].map(Some).into()),
        ],
    }
}

/// Figures 9 to 13: how much faster it is, with write-back.
fn speeds(runs: &Runs) -> Vec<Figure> {
    let all = &runs.speeds.back;
    let of = |speeds: &[Speed], value: &dyn Fn((f64, f64, f64)) -> f64| -> Vec<Option<f64>> {
        speeds.iter().map(|speed| Some(value(speed.gain()))).collect()
    };
    let banded = |speeds: &[Speed], name: &str| {
        [
            series(name, false, of(speeds, &|(gain, ..)| gain)),
            series(&format!("{name}, least"), false, of(speeds, &|(_, least, _)| least)),
            series(&format!("{name}, most"), false, of(speeds, &|(.., most)| most)),
        ]
    };
    let figure = |file: &str, title: &str, x_name, places: Vec<String>, series: Vec<Series>| Figure {
        file: file.to_owned(),
        title: format!("{title}: times as fast as TRDC, simulated, write-back"),
        shape: Shape::Bars,
        x_name,
        y_name: "times",
        places,
        series,
    };
    let text = |values: &[u64]| values.iter().map(u64::to_string).collect::<Vec<_>>();
    let paper = |values: &[Option<f64>]| series("paper", true, values.to_vec());
    let mut nine: Vec<Series> = banded(&all.by_memory, "flash cache").into();
    nine.push(paper(&[Some(2.757), None, Some(1.02)]));
    let mut ten: Vec<Series> = banded(&all.random, "flash cache").into();
    ten.push(paper(&[Some(4.4), None, None, None, Some(1.0), None]));
    let mut eleven: Vec<Series> = banded(&all.mixed[0], "writes to reads 2:1").into();
    eleven.extend(banded(&all.mixed[1], "1:2"));
    eleven.push(paper(&[Some(3.4), None, Some(1.8)]));
    let mut thirteen: Vec<Series> = banded(&all.applications, "flash cache").into();
    thirteen.push(paper(&[Some(1.786), Some(1.245), Some(1.233)]));
    let twelve: Vec<Series> = banded(&all.oltp, "flash cache").into();
    vec![
        figure(
            "cowcache-9",
            "Figure 9, random 64 KiB writes",
            "memory for tables, MiB",
            text(&FIGURE_9_MIB),
            nine,
        ),
        figure(
            "cowcache-10a",
            "Figure 10a, random writes",
            "write, KiB",
            runs.random.iter().map(place).collect(),
            ten,
        ),
        figure("cowcache-11", "Figure 11, 4 KiB", "writes that allocate, percent", text(&ALLOCATING), eleven),
        figure("cowcache-12", "Figure 12, OLTP", "guest", runs.oltp.iter().map(place).collect(), twelve),
        figure("cowcache-13", "Figure 13, applications", "guest", applications(runs), thirteen),
        Figure {
            file: "cowcache-13-writes".to_owned(),
            title: "Figure 13: flash writes saved against TRDC, write-back".to_owned(),
            shape: Shape::Bars,
            x_name: "guest",
            y_name: "percent less",
            places: applications(runs),
            series: vec![
                series(
                    "flash cache",
                    false,
                    runs.applications.iter().map(|one| Some(one.flash_less())).collect(),
                ),
                series("COWC, paper", true, [22.5, 27.1, 35.2].map(Some).into()),
            ],
        },
    ]
}

fn applications(runs: &Runs) -> Vec<String> {
    runs.applications.iter().map(|one| one.trace.clone()).collect()
}

fn oltp(runs: &Runs) -> Figure {
    let less = runs.oltp.iter().map(|pair| Some(100.0 * (1.0 - 1.0 / pair.gain()))).collect();
    Figure {
        file: "cowcache-table-2".to_owned(),
        title: "Table 2: flash writes saved against TRDC, OLTP".to_owned(),
        shape: Shape::Bars,
        x_name: "guest",
        y_name: "percent less",
        places: runs.oltp.iter().map(place).collect(),
        series: vec![
            series("flash cache", false, less),
            series("COWC, paper", true, [77.2, 75.4, 78.5, 70.0].map(Some).into()),
        ],
    }
}

fn traced(file: &str, title: &str, all: &[Replayed], has_room: bool) -> Figure {
    let shown: Vec<&Replayed> = all.iter().filter(|one| one.percent.is_none() == has_room).collect();
    let name = |one: &&Replayed| match one.percent {
        None => one.trace.clone(),
        Some(percent) => format!("{} {percent} %", one.trace),
    };
    let values = |value: &dyn Fn(&Replayed) -> f64| shown.iter().map(|one| Some(value(one))).collect();
    let mut series = vec![series("flash writes", false, values(&Replayed::flash_less))];
    if !has_room {
        series.push(Series {
            name: "network traffic".to_owned(),
            is_of_the_paper: false,
            values: values(&Replayed::network_less),
        });
    }
    Figure {
        file: file.to_owned(),
        title: title.to_owned(),
        shape: Shape::Bars,
        x_name: "trace",
        y_name: "percent less than TRDC",
        places: shown.iter().map(name).collect(),
        series,
    }
}

/// Hit ratios of each replacement on a recorded guest.
fn replacement() -> Result<Figure> {
    let trace = Trace::recorded("sqlite_tpcc_like")?;
    let mut uses = Vec::new();
    for (_, request) in &trace.requests {
        let (offset, len, is_write) = match *request {
            Request::Read { offset, len } => (offset, len, false),
            Request::Write { offset, len } | Request::WriteThrough { offset, len } => (offset, len, true),
            _ => continue,
        };
        uses.extend(
            (offset / BLOCK_BYTES..(offset + len as u64).div_ceil(BLOCK_BYTES))
                .map(|block| (block, is_write)),
        );
    }
    let mut blocks: Vec<u64> = uses.iter().map(|(block, _)| *block).collect();
    blocks.sort_unstable();
    blocks.dedup();
    let ratio = |kind: Replacement, percent: u64| {
        let slots = u32::try_from((blocks.len() as u64 * percent).div_ceil(100)).unwrap_or(u32::MAX);
        let counts = hits(kind, slots.max(1), uses.iter().copied());
        100.0 * (counts.read_hits + counts.write_hits) as f64 / uses.len() as f64
    };
    let all = Replacement::ALL.map(|kind| {
        series(kind.name(), false, PERCENT.iter().map(|percent| Some(ratio(kind, *percent))).collect())
    });
    Ok(Figure {
        file: "cowcache-replacement".to_owned(),
        title: "Uses of blocks that were cached, SQLite with TPC-C-like transactions".to_owned(),
        shape: Shape::Lines,
        x_name: "cache, percent of what is touched",
        y_name: "hits, percent",
        places: PERCENT.iter().map(u64::to_string).collect(),
        series: all.into(),
    })
}
