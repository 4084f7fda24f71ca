//! `vellum-papers run fast16`: rows A1 to A16 of the paper.

use serde::Serialize;
use vellum_core::Result;
use vellum_lab::report::Table;

use super::{Options, on_all_processors};
use crate::fast16::{IMAGES, Load, Run, run};
use crate::report::{Figure, Good, How, Made, Row, Series, Shape};
use crate::selfie::{Below, Drive, Image};

const SETTING: &str = "Counted and simulated: HDD 7200 rpm and SSD SATA, bare and under ext4's own commits. The engine's \
    qcow2 with a journal, and raw, against a model of QCOW2 as the paper Selfie describes it, which leaves out refcounts. \
    The guest's file system is left out in the appends: each is 64 KiB and a flush.";

/// Everything that was found, for programs.
#[derive(Serialize)]
struct Report {
    runs: Vec<Run>,
}

pub(crate) fn make(_options: &Options, table: Table) -> Result<Made> {
    table.say(SETTING);
    let mut jobs = Vec::new();
    for load in [Load::Append, Load::Again, Load::Varmail] {
        for drive in [Drive::Hdd, Drive::Ssd] {
            for below in [Below::ThinVolume, Below::File] {
                jobs.extend(IMAGES.map(|image| (load, image, below, drive)));
            }
        }
    }
    let runs = on_all_processors(&jobs, |(load, image, below, drive)| run(*load, *image, *below, *drive))?;
    table.say("");
    table.say(&format!("  {:<48} {:>9} {:>9} {:>9}", "", "seconds", "flushes", "per one"));
    for run in &runs {
        let what =
            format!("{:?}, {:?}, {:?}, {}", run.load, run.stage.drive, run.stage.below, run.image.name());
        table.say(&format!(
            "  {what:<48} {:>9.3} {:>9} {:>9.2}",
            run.played.seconds,
            run.played.flushes,
            run.flushes()
        ));
    }
    let rows = rows(&runs);
    let figures = vec![figure(&runs)];
    Ok(Made {
        name: "fast16",
        title: "Mitigating Sync Amplification for Copy-on-write Virtual Disk",
        venue: "FAST 2016",
        setting: SETTING.to_owned(),
        rows,
        figures,
        runs: serde_json::to_value(Report { runs }).expect("numbers and strings"),
    })
}

fn find(runs: &[Run], load: Load, image: Image, below: Below, drive: Drive) -> Option<&Run> {
    let is_it =
        |run: &&Run| (run.load, run.image, run.stage.below, run.stage.drive) == (load, image, below, drive);
    runs.iter().find(is_it)
}

fn rows(runs: &[Run]) -> Vec<Row> {
    let flushes =
        |load, image, below| find(runs, load, image, below, Drive::Hdd).map_or(f64::NAN, Run::flushes);
    let seconds = |load, image, drive| {
        find(runs, load, image, Below::File, drive).map_or(f64::NAN, |run| run.played.seconds)
    };
    let count = |value: f64| format!("{value:.2}");
    let counted = |id, place, what, paper, value: f64, good| {
        Row::judged(id, (place, what), How::Counted, (paper, count(value)), value, good)
    };
    let then = flushes(Load::Append, Image::Qcow2, Below::File);
    let ours = flushes(Load::Append, Image::Journal, Below::ThinVolume);
    let grown = flushes(Load::Append, Image::RawFile, Below::File);
    let kept = flushes(Load::Again, Image::RawFile, Below::File);
    let prepared = flushes(Load::Append, Image::Journal, Below::File);
    let varmail =
        seconds(Load::Varmail, Image::RawFile, Drive::Hdd) / seconds(Load::Varmail, Image::Qcow2, Drive::Hdd);
    let gain = |load, drive| seconds(load, Image::Qcow2, drive) / seconds(load, Image::Journal, drive);
    let append = |drive| format!("{:+.0} %", (gain(Load::Append, drive) - 1.0) * 100.0);
    let many = "several machines on one drive are not played";
    let bars = "the paper prints no value";
    let other = |what: &'static str, id, place, paper, why| Row::not_made(id, (place, what), paper, why);
    let overlay = "appends, not overwrites of an overlay: the model of QCOW2 has no base";
    vec![
        counted(
            "A1",
            "figure 2",
            "QCOW2 of then in a file, flushes of the drive",
            "over 3",
            then,
            Good::High(3.0),
        )
        .because("the model of QCOW2 leaves out refcounts"),
        other("VMDK, the same", "A1", "figure 2", "over 4", "VMDK is not written here"),
        counted("A2", "§3", "ours, flushes of the image for one", "1", ours, Good::Near(1.0)),
        counted("A3", "§3.3", "raw in a file that grows, flushes of the drive", "2", grown, Good::Near(2.0)),
        counted("A3", "§3.3", "  that does not grow", "1", kept, Good::Near(1.0)),
        counted("A3", "§3.3", "  ours, space prepared ahead", "1", prepared, Good::Low(1.0)).because(
            "space is prepared in idle moments, and these appends leave none: the first writes of what is not yet \
             prepared change the file system's metadata; the paper preallocates 1 MB in the guest's way",
        ),
        Row::judged(
            "A4",
            ("§1", "varmail, QCOW2 of then against raw, both in files, HDD"),
            How::Simulated,
            ("half", count(varmail)),
            varmail,
            Good::Near(0.5),
        )
        .not_judged("another workload: varmail's parameters, 16 threads, recorded"),
        other("SSD, random writes without cache flushes", "A5", "§1", "+76 %", "not played"),
        other("sequential writes beside fdatasync every 10 ms", "A6", "§1", "-54.5 %", "not played"),
        other(
            "crash tests, 400 of them",
            "A7",
            "§4",
            "all consistent",
            "the crash explorer judges many more states than that: docs/design/0004-crash-explorer.md",
        ),
        Row::judged(
            "A8",
            ("figure 5", "append, ours over QCOW2 of then, in a file, HDD"),
            How::Simulated,
            ("+200 %", append(Drive::Hdd)),
            gain(Load::Append, Drive::Hdd),
            Good::High(3.0),
        )
        .not_judged(overlay),
        Row::judged(
            "A8",
            ("figure 5", "  SSD"),
            How::Simulated,
            ("+100 %", append(Drive::Ssd)),
            gain(Load::Append, Drive::Ssd),
            Good::High(2.0),
        )
        .not_judged(overlay),
        other("each optimisation by itself", "A9", "figure 5, 6", "bars", bars),
        other("varmail beside random writes, HDD", "A10", "figure 6", "+110 %", many),
        other("varmail beside sequential writes, SSD", "A11", "figure 6", "+50 %", many),
        other("TPCC beside random writes, latency", "A12", "figure 7", "-40 %", many),
        other("four machines, HDD: varmail, TPCC", "A13", "figure 8", "+50 %, +34 %", many),
        other("four machines, SSD: varmail, TPCC", "A14", "figure 8", "+30 %, +20 %", many),
        other("fileserver, webserver", "A15", "figure 8", "similar", bars),
        other("clusters of 1 MB, direct writes", "A16", "figure 9", "-50 %", "not played"),
    ]
}

/// Figure 2: flushes of the drive for one of the guest.
fn figure(runs: &[Run]) -> Figure {
    let columns = [
        ("append, volume", Load::Append, Below::ThinVolume),
        ("append, file", Load::Append, Below::File),
        ("again, file", Load::Again, Below::File),
        ("varmail, file", Load::Varmail, Below::File),
    ];
    let ours = IMAGES.map(|image| Series {
        name: image.name().to_owned(),
        is_of_the_paper: false,
        values: columns
            .iter()
            .map(|(_, load, below)| find(runs, *load, image, *below, Drive::Hdd).map(Run::flushes))
            .collect(),
    });
    let paper = Series {
        name: "QCOW2, more than, in the paper".to_owned(),
        is_of_the_paper: true,
        values: vec![None, Some(3.0), None, None],
    };
    Figure {
        file: "fast16-2".to_owned(),
        title: "Figure 2: flushes of the drive for one of the guest, HDD".to_owned(),
        shape: Shape::Bars,
        x_name: "guest",
        y_name: "flushes",
        places: columns.iter().map(|(name, ..)| (*name).to_owned()).collect(),
        series: ours.into_iter().chain([paper]).collect(),
    }
}
