//! `vellum-bench boot`: a Debian guest boots over a template in an object store at the end of a slow line.
//!
//! ```text
//!   in each round      local file ─┬─ copied first ─┬─ template: cold, second on the host, next host with the trace
//!                                  │                └─ object: the same three
//!   each boot          a new clone ► serve ► QEMU ► "guest: up" ► off ► stop: counts
//! ```
//!
//! A template is published in chunks (`vellum template push`); an object is the raw disk as one object, fetched in blocks of 64
//! KiB. *Cold* begins with an empty `--chunk-cache` and records the boot trace. *Second* is another clone with the cache that the
//! cold boot left. *Traced* has an empty cache again and prefetches in the order of the trace.
//!
//! Bytes are counted, by Vellum and by the line. What a boot reads is what its trace has: each byte of the base once. In units
//! of the fetch that is each unit once. Ratios of times are of one round, in which all ways had a turn.

pub(crate) mod machine;
pub(crate) mod stores;
pub(crate) mod system;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use serde_json::Value;
use vellum_core::{Context, Error, ErrorKind, Result};
use vellum_lab::cost::lab::Lab;
use vellum_lab::line::Speed;
use vellum_lab::programs;
use vellum_lab::report::{Output, Table, complain, say_json};
use vellum_lab::server::{Running, Vellum, first_line_of};

use super::parse_size;
use crate::host::Machine;
use crate::images::prepare;
use crate::report::{median, spread_percent};
use stores::{BUCKET, Store};
use system::System;

/// What is fetched of an object at least.
const BLOCK_BYTES: u64 = 64 << 10;

/// Boot a Debian guest over a template in a slow object store, and count what is fetched
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of rounds; each way has a turn in each
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// What each answer of a store is late, in milliseconds
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 20)]
    latency: u64,
    /// Bytes a second from each store
    #[arg(long, value_name = "SIZE", default_value = "16M", value_parser = parse_size)]
    rate: u64,
    /// Size of a chunk of the published template
    #[arg(long, value_name = "SIZE", default_value = "256K", value_parser = parse_size)]
    chunk_size: u64,
    /// Run only the ways whose names contain TEXT, and those that they need; may be given several times
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Directory with the guest's disk.raw, vmlinuz and initrd.img, which are made if they are not there (root, mmdebstrap).
    /// Default: boot-system in the directory of this program
    #[arg(long, value_name = "DIR")]
    system: Option<PathBuf>,
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

/// How the guest comes to its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Way {
    Local,
    Copied,
    TemplateCold,
    TemplateSecond,
    TemplateTraced,
    ObjectCold,
    ObjectSecond,
    ObjectTraced,
}

impl Way {
    /// Each turn: ways that need what the one before left.
    const TURNS: [&'static [Self]; 6] = [
        &[Self::Local],
        &[Self::Copied],
        &[Self::TemplateCold, Self::TemplateSecond],
        &[Self::TemplateTraced],
        &[Self::ObjectCold, Self::ObjectSecond],
        &[Self::ObjectTraced],
    ];

    fn title(self) -> &'static str {
        match self {
            Self::Local => "local file",
            Self::Copied => "copied first",
            Self::TemplateCold => "template, cold",
            Self::TemplateSecond => "template, second on the host",
            Self::TemplateTraced => "template, next host, traced",
            Self::ObjectCold => "object, cold",
            Self::ObjectSecond => "object, second on the host",
            Self::ObjectTraced => "object, next host, traced",
        }
    }

    fn is_template(self) -> bool {
        matches!(self, Self::TemplateCold | Self::TemplateSecond | Self::TemplateTraced)
    }

    fn is_remote(self) -> bool {
        !matches!(self, Self::Local | Self::Copied)
    }

    fn is_cold(self) -> bool {
        matches!(self, Self::TemplateCold | Self::ObjectCold)
    }

    fn is_second(self) -> bool {
        matches!(self, Self::TemplateSecond | Self::ObjectSecond)
    }

    fn is_traced(self) -> bool {
        matches!(self, Self::TemplateTraced | Self::ObjectTraced)
    }

    fn kind(self) -> &'static str {
        if self.is_template() { "template" } else { "object" }
    }
}

/// One boot.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Boot {
    /// Until the guest was up, with the copying where it was copied first.
    seconds: f64,
    /// What the guest asked for, in bytes.
    guest_bytes: u64,
    /// What was read of the base, in bytes.
    base_bytes: u64,
    requests: u64,
    /// From the store, by Vellum's count: of a template compressed chunks, without the index.
    fetched_bytes: u64,
    /// What the line counted from before the clone was made until the server had ended, headers and index included.
    line_bytes: u64,
    cached: u64,
    ahead_used: u64,
    ahead_wasted: u64,
    /// Each byte of the base that was read, once; from the boot trace.
    #[serde(skip_serializing_if = "Option::is_none")]
    distinct_bytes: Option<u64>,
    /// Each unit of the fetch that has such a byte.
    #[serde(skip_serializing_if = "Option::is_none")]
    distinct_units: Option<u64>,
    /// Units among them that the cold boot before did not read: of a second boot on the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    new_units: Option<u64>,
    unit_bytes: u64,
    /// Units that came from the store.
    fetched_units: u64,
}

impl Boot {
    /// Fetched in units of the fetch, for what was read in the same units.
    fn ratio_of_units(&self) -> Option<f64> {
        Some(self.fetched_units as f64 / self.distinct_units.filter(|units| *units > 0)? as f64)
    }

    /// Bytes of the disk that were fetched, for each that was read.
    fn plain_ratio(&self) -> Option<f64> {
        let bytes = self.fetched_units * self.unit_bytes;
        Some(bytes as f64 / self.distinct_bytes.filter(|bytes| *bytes > 0)? as f64)
    }
}

/// All boots of a way.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row {
    way: Way,
    boots: Vec<Boot>,
}

/// Everything that was seen, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    unix_seconds: u64,
    machine: Machine,
    programs: Vec<String>,
    stores: [&'static str; 2],
    latency_ms: u64,
    bytes_per_second: u64,
    rows: Vec<Row>,
}

/// The stores, and what is the same in all rounds.
struct Stage<'a> {
    lab: &'a Lab,
    system: System,
    published: Store,
    plain: Store,
    chunk_size: u64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if let Err(error) = first_line_of(Command::new("qemu-system-x86_64").arg("--version")) {
        complain(&format!("skipped: {}", error.chain()));
        return Ok(());
    }
    if args.rate == 0 {
        return Err(Error::invalid("--rate is a number of bytes above 0"));
    }
    let table = Table::to(args.output);
    let beside = || programs::dir_or_beside_me(args.dir.as_ref()).map(|dir| dir.join("boot-system"));
    let system = match System::get(&args.system.clone().map_or_else(beside, Ok)?, complain) {
        Ok(system) => system,
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            complain(&format!("skipped: no system to boot: {}", error.chain()));
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    let lab = Lab::open(args.dir.as_ref(), args.vellum.as_ref())?;
    let machine = Machine::with(&lab.dir);
    let speed = Speed { latency: Duration::from_millis(args.latency), bytes_per_second: args.rate };
    let published = Store::moto_or_own(&lab.dir, speed)?;
    let plain = Store::own(speed)?;
    table.say(&format!(
        "Debian under QEMU's TCG; line: {} ms, {} MiB/s; template in {}, object in {}; {} rounds; Linux {}, {} processors",
        args.latency,
        args.rate >> 20,
        published.name,
        plain.name,
        args.rounds,
        machine.kernel,
        machine.processors
    ));
    lab.programs.iter().for_each(|program| table.say(program));
    let stage = Stage { lab: &lab, system, published, plain, chunk_size: args.chunk_size };
    stage.publish()?;
    let wanted = |way: &Way| args.only.is_empty() || args.only.iter().any(|text| way.title().contains(text));
    let mut rows: Vec<Row> = Vec::new();
    for round in 0..args.rounds as usize {
        // The first round leaves the traces.
        let order = (0..Way::TURNS.len()).map(|turn| (turn + round) % Way::TURNS.len());
        for way in order.flat_map(|turn| Way::TURNS[turn]) {
            let leaves = Way::TURNS.iter().flat_map(|turn| *turn).any(|other| {
                wanted(other) && other.kind() == way.kind() && other.is_remote() && way.is_cold()
            });
            if !wanted(way) && !leaves {
                continue;
            }
            let boot = stage.boot(*way).context(|| way.title())?;
            complain(&format!("round {}: {}: {:.1} s", round + 1, way.title(), boot.seconds));
            match rows.iter_mut().find(|row| row.way == *way) {
                Some(row) => row.boots.push(boot),
                None => rows.push(Row { way: *way, boots: vec![boot] }),
            }
        }
    }
    lines(&rows).iter().for_each(|line| table.say(line));
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        say_json(&Report {
            unix_seconds: now.as_secs(),
            machine,
            programs: lab.programs.clone(),
            stores: [stage.published.name, stage.plain.name],
            latency_ms: args.latency,
            bytes_per_second: args.rate,
            rows,
        });
    }
    Ok(())
}

impl Stage<'_> {
    fn template_url(&self) -> String {
        format!("s3://{BUCKET}/templates/debian:1")
    }

    fn object_url(&self) -> String {
        format!("s3://{BUCKET}/debian.raw")
    }

    fn publish(&self) -> Result<()> {
        let mut push = Command::new(&self.lab.vellum.path);
        push.args(["template", "push", "-q", "-f", "raw", "--chunk-size", &self.chunk_size.to_string()]);
        push.arg(&self.system.disk).arg(self.template_url());
        self.published.environment_near(&mut push);
        programs::run(&mut push)?;
        self.plain.put_file("debian.raw", &self.system.disk)
    }

    /// One boot, from a new clone to the end of its server.
    fn boot(&self, way: Way) -> Result<Boot> {
        let dir = self.lab.dir.join("boot");
        drop(fs::remove_dir_all(&dir));
        fs::create_dir(&dir).context(|| format!("can't make {}", dir.display()))?;
        let store = if way.is_template() || way == Way::Copied { &self.published } else { &self.plain };
        let cache = self.lab.dir.join(format!("cache-{}", way.kind()));
        if way.is_cold() || way.is_traced() {
            drop(fs::remove_dir_all(&cache));
        }
        let before = store.line.came();
        let began = Instant::now();
        let base = match way {
            Way::Local => {
                prepare(&self.system.disk, false)?;
                self.system.disk.to_string_lossy().into_owned()
            }
            Way::Copied => self.pull(&dir.join("copy.raw"))?,
            way if way.is_template() => self.template_url(),
            _ => self.object_url(),
        };
        let copying = if way == Way::Copied { began.elapsed() } else { Duration::ZERO };
        let image = dir.join("clone.qcow2");
        let mut create = Command::new(&self.lab.vellum.path);
        create.args(["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw"]).arg(&image);
        store.environment(&mut create);
        programs::run(&mut create)?;
        let trace = self.lab.dir.join(format!("{}.trace", way.kind()));
        let [socket, control, figures] = ["nbd.sock", "control", "stats.json"].map(|name| dir.join(name));
        let mut serve = Command::new(&self.lab.vellum.path);
        serve.args(["serve", "-q", "--allow-url", &format!("s3://{BUCKET}/"), "--record-trace", "--nbd"]);
        serve.arg(format!("unix:{}", socket.display())).arg("--control").arg(&control);
        serve.arg("--stats-json").arg(&figures).args(&self.lab.vellum.arguments);
        if let Some(above) = self.system.disk.parent().filter(|_| !way.is_remote()) {
            serve.arg("--allow-dir").arg(above);
        }
        if way.is_remote() {
            serve.arg("--chunk-cache").arg(&cache);
        }
        if way.is_traced() {
            serve.args(["--prefetch", "--prefetch-trace"]).arg(&trace);
        }
        serve.arg(&image);
        store.environment(&mut serve);
        let serves = || std::os::unix::net::UnixStream::connect(&socket).is_ok();
        let server = Running::start_until(serve, &socket, serves)?;
        let booting = machine::boot(&self.system, &socket, "")?;
        let recorded = if way.is_cold() { trace.clone() } else { dir.join("trace") };
        let mut record = Command::new(&self.lab.vellum.path);
        programs::run(record.args(["trace", "record", "--control"]).arg(&control).arg(&recorded))?;
        server.stop()?;
        let unit = if way.is_template() { self.chunk_size } else { BLOCK_BYTES };
        let mut boot = read_counts(&figures, unit, way.is_template())?;
        boot.seconds = (copying + booting).as_secs_f64();
        boot.line_bytes = store.line.came() - before;
        if !way.is_traced() {
            // Beside a prefetcher the trace lacks what it was quicker with.
            let (bytes, units) = distinct(&recorded, unit)?;
            (boot.distinct_bytes, boot.distinct_units) = (Some(bytes), Some(units.len() as u64));
            if way.is_second() {
                boot.new_units = Some(units.difference(&distinct(&trace, unit)?.1).count() as u64);
            }
        }
        drop(fs::remove_dir_all(&dir));
        Ok(boot)
    }

    fn pull(&self, to: &Path) -> Result<String> {
        let mut pull = Command::new(&self.lab.vellum.path);
        pull.args(["template", "pull", "-q", &self.template_url()]).arg(to);
        self.published.environment(&mut pull);
        programs::run(&mut pull)?;
        Ok(to.to_string_lossy().into_owned())
    }
}

fn read_counts(figures: &Path, unit_bytes: u64, is_template: bool) -> Result<Boot> {
    let text = fs::read_to_string(figures).context(|| format!("can't read {}", figures.display()))?;
    let stats: Value = serde_json::from_str(&text)
        .map_err(|error| Error::corrupt(format!("{}: {error}", figures.display())))?;
    let number = |pointer: &str| stats.pointer(pointer).and_then(Value::as_u64).unwrap_or(0);
    let (requests, fetched_bytes) = (number("/remote/0/requests"), number("/remote/0/fetched-bytes"));
    Ok(Boot {
        seconds: 0.0,
        guest_bytes: number("/disks/0/guest/bytes-read"),
        base_bytes: number("/disks/0/below/data/bytes-read"),
        requests,
        fetched_bytes,
        line_bytes: 0,
        cached: number("/remote/0/cached"),
        ahead_used: number("/remote/0/ahead-used"),
        ahead_wasted: number("/remote/0/ahead-wasted"),
        distinct_bytes: None,
        distinct_units: None,
        new_units: None,
        unit_bytes,
        fetched_units: if is_template { requests } else { fetched_bytes.div_ceil(unit_bytes) },
    })
}

/// The bytes in the runs of a trace, which do not overlap, and the units of this size that have any.
fn distinct(trace: &Path, unit: u64) -> Result<(u64, BTreeSet<u64>)> {
    let text = fs::read_to_string(trace).context(|| format!("can't read {}", trace.display()))?;
    let runs = text.lines().filter_map(|line| {
        let (at, len) = line.split_once(' ')?;
        Some((at.parse::<u64>().ok()?, len.parse::<u64>().ok()?))
    });
    let (mut bytes, mut units) = (0, BTreeSet::new());
    for (at, len) in runs {
        bytes += len;
        units.extend(at / unit..(at + len).div_ceil(unit));
    }
    Ok((bytes, units))
}

fn lines(rows: &[Row]) -> Vec<String> {
    let head = format!(
        "{:<29} {:>7} {:>12} {:>10} {:>9} {:>9} {:>9} {:>7} {:>7} {:>7} {:>5}",
        "way",
        "s",
        "of local",
        "MiB read",
        "MiB line",
        "requests",
        "MiB units",
        "units",
        "plain",
        "wasted",
        "new"
    );
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let local = rows.iter().find(|row| row.way == Way::Local);
    let line = |row: &Row| {
        let of = |figure: &dyn Fn(&Boot) -> f64| median(row.boots.iter().map(figure));
        let ratio = |figure: fn(&Boot) -> Option<f64>| match row
            .boots
            .iter()
            .filter_map(figure)
            .collect::<Vec<_>>()
        {
            ratios if ratios.is_empty() || !row.way.is_remote() => "-".to_owned(),
            ratios => format!("{:.3}", median(ratios)),
        };
        let times: Vec<f64> = local
            .into_iter()
            .flat_map(|local| row.boots.iter().zip(&local.boots))
            .map(|(boot, local)| boot.seconds / local.seconds)
            .collect();
        let times = match times.is_empty() {
            true => "-".to_owned(),
            false => format!("{:.2} ±{:.0}%", median(times.clone()), spread_percent(times)),
        };
        let news: Vec<_> =
            row.boots.iter().filter_map(|boot| boot.new_units).map(|units| units as f64).collect();
        let news = if news.is_empty() { "-".to_owned() } else { format!("{:.0}", median(news)) };
        format!(
            "{:<29} {:>7.1} {:>12} {:>10.1} {:>9.1} {:>9.0} {:>9.1} {:>7} {:>7} {:>7.0} {:>5}",
            row.way.title(),
            of(&|boot| boot.seconds),
            times,
            of(&|boot| mib(boot.distinct_bytes.unwrap_or(boot.base_bytes))),
            of(&|boot| mib(boot.line_bytes)),
            of(&|boot| boot.requests as f64),
            of(&|boot| mib(boot.fetched_units * boot.unit_bytes)),
            ratio(Boot::ratio_of_units),
            ratio(Boot::plain_ratio),
            of(&|boot| boot.ahead_wasted as f64),
            news
        )
    };
    let foot = "MiB read: each byte of the base once (traced: with what is prefetched); MiB line: all that the store sent; units: \
                fetched of what was read, both in units of the fetch; plain: bytes of the disk fetched for each that was read; new: units that a second \
                boot read and the cold one had not";
    std::iter::once(head).chain(rows.iter().map(line)).chain([foot.to_owned()]).collect()
}
