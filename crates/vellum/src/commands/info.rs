//! `vellum info`: what an image is.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::{Map, Value, json};
use vellum_core::{BlockSize, Context, Error, Result, SharedStorage};
use vellum_daemon::image::open_file;
use vellum_daemon::{Host, ImageOptions};
use vellum_format::FormatKind;
use vellum_format::native::snapshots::{Snapshot as NativeSnapshot, snapshots as native_snapshots};
use vellum_format::native::{Region, Superblocks};
use vellum_format::qcow2::snapshot::list;
use vellum_format::qcow2::{Compression, Header, Snapshot};
use vellum_io::{IoMode, run as run_worker};
use vellum_layer::Gate;
use vellum_layer::chain::DEPTH_MAX;

use super::Outcome;
use crate::args::{OutputFormat, ReadArgs, prealloc_text};
use crate::output::{human_bytes, say, say_json};

/// Tell what an image is
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    read: ReadArgs,
    /// How the answer is printed
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// Tell of the backing images too
    #[arg(long)]
    backing_chain: bool,
    /// The image
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// What there is to tell of one image.
struct Facts {
    path: PathBuf,
    format: FormatKind,
    storage: SharedStorage,
    /// Space the file takes, in bytes.
    actual_size: u64,
    virtual_size: u64,
    header: Option<Header>,
    /// Of the native format, with what became of its other copy.
    native: Option<Superblocks>,
    snapshots: Vec<Snapshot>,
    native_snapshots: Vec<NativeSnapshot>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let images = run_worker(IoMode::Auto, async || gather(args).await)??;
    match args.output {
        OutputFormat::Human => {
            let texts: Vec<String> = images.iter().map(Facts::human).collect();
            say(texts.join("\n\n").trim_end());
        }
        OutputFormat::Json if args.backing_chain => {
            say_json(&images.iter().map(Facts::json).collect::<Vec<_>>())
        }
        OutputFormat::Json => say_json(&images[0].json()),
    }
    Ok(ExitCode::SUCCESS)
}

async fn gather(args: &Args) -> Result<Vec<Facts>> {
    let mut options = args.read.options();
    let gate = Host::gate(&args.read.allow_dir)?;
    let mut images: Vec<Facts> = Vec::new();
    let mut next = Some(args.file.clone());
    while let Some(path) = next.take() {
        let facts = Facts::of(&path, &options).await.context(|| match images.len() {
            0 => format!("can't open {}", path.display()),
            depth => format!("can't open backing image {} (depth {depth})", path.display()),
        })?;
        if let (true, Some(backing)) = (args.backing_chain, facts.backing()) {
            let path = Gate::resolve(&facts.path, backing)?;
            let canonical =
                |path: &Path| path.canonicalize().context(|| format!("can't open {}", path.display()));
            gate.check(&canonical(&facts.path)?, &canonical(&path)?)?;
            if images.iter().any(|image| canonical(&image.path).ok() == canonical(&path).ok())
                || canonical(&facts.path)? == canonical(&path)?
            {
                return Err(Error::corrupt(format!(
                    "the backing chain is a loop: {} comes again",
                    path.display()
                )));
            }
            if images.len() >= DEPTH_MAX {
                return Err(Error::unsupported(format!(
                    "the backing chain is longer than {DEPTH_MAX} images"
                )));
            }
            options.format = facts.backing_format().map(str::parse).transpose()?;
            next = Some(path);
        }
        images.push(facts);
    }
    Ok(images)
}

impl Facts {
    async fn of(path: &Path, options: &ImageOptions) -> Result<Self> {
        let (storage, format) = open_file(path, options).await?;
        let metadata = std::fs::metadata(path).context(|| format!("can't look at {}", path.display()))?;
        let header = match format {
            FormatKind::Qcow2 => Some(Header::read(&*storage).await?),
            FormatKind::Raw | FormatKind::Native => None,
        };
        let native = match format {
            FormatKind::Native => Some(Superblocks::read(&*storage).await?),
            FormatKind::Raw | FormatKind::Qcow2 => None,
        };
        let snapshots = match &header {
            Some(header) => list(header, &*storage).await?,
            None => Vec::new(),
        };
        // What a journal has is not looked at.
        let native_snapshots = match &native {
            Some(native) if !native.superblock.needs_replay() => native_snapshots(&storage).await?,
            _ => Vec::new(),
        };
        Ok(Self {
            path: path.to_owned(),
            format,
            actual_size: metadata.blocks() * 512,
            virtual_size: match (&header, &native) {
                (Some(header), _) => header.size(),
                (None, Some(native)) => native.superblock.size(),
                (None, None) => storage.len(),
            },
            storage,
            header,
            native,
            snapshots,
            native_snapshots,
        })
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn backing(&self) -> Option<&str> {
        match &self.native {
            Some(native) => native.superblock.base().map(|base| base.name.as_str()),
            None => self.header.as_ref()?.backing_file(),
        }
    }

    fn backing_format(&self) -> Option<&str> {
        match &self.native {
            Some(native) => native.superblock.base()?.format.as_deref(),
            None => self.header.as_ref()?.backing_format(),
        }
    }

    fn is_dirty(&self) -> bool {
        let native = self.native.as_ref().is_some_and(|native| native.superblock.needs_replay());
        native || self.header.as_ref().is_some_and(was_left_open)
    }

    /// What one format has and others have not, under the names QEMU gives it where QEMU has it.
    fn specifics(&self) -> Vec<(String, Value)> {
        match (&self.header, &self.native) {
            (Some(header), _) => specifics(header),
            (None, Some(native)) => native_specifics(native),
            (None, None) => Vec::new(),
        }
    }

    /// What is allocated at once.
    fn cluster_size(&self) -> Option<u64> {
        match (&self.header, &self.native) {
            (Some(header), _) => Some(header.cluster_size().bytes()),
            (None, Some(native)) => native.superblock.places().shape().layout.unit().map(BlockSize::bytes),
            (None, None) => None,
        }
    }

    /// The backing image's name as this program will look for it.
    fn full_backing(&self) -> Option<String> {
        let name = self.backing()?;
        Some(match Gate::resolve(&self.path, name) {
            Ok(path) => path.strip_prefix("./").unwrap_or(&path).display().to_string(),
            Err(_) => name.to_owned(),
        })
    }

    fn human(&self) -> String {
        let sized = |bytes: u64| format!("{} ({bytes} bytes)", human_bytes(bytes));
        let mut lines = vec![
            format!("image: {}", self.name()),
            format!("file format: {}", self.format),
            format!("virtual size: {}", sized(self.virtual_size)),
            format!("disk size: {}", human_bytes(self.actual_size)),
        ];
        if self.format != FormatKind::Raw {
            if self.is_dirty() {
                lines.push("cleanly shut down: no".to_owned());
            }
            lines.extend(self.cluster_size().map(|bytes| format!("cluster_size: {bytes}")));
            if let (Some(name), Some(full)) = (self.backing(), self.full_backing()) {
                let actual = if full == name { String::new() } else { format!(" (actual path: {full})") };
                lines.push(format!("backing file: {name}{actual}"));
            }
            if let Some(format) = self.backing_format() {
                lines.push(format!("backing file format: {format}"));
            }
            if !self.snapshots.is_empty() {
                lines.push("Snapshot list:".to_owned());
                lines.push(snapshot_row("ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT"));
                lines.extend(self.snapshots.iter().map(snapshot_line));
            }
            if !self.native_snapshots.is_empty() {
                lines.push("Snapshot list:".to_owned());
                lines.push(format!("{:<7} {:<24} {:>10} {:>19}", "ID", "NAME", "DISK SIZE", "DATE"));
                lines.extend(self.native_snapshots.iter().map(|one| {
                    let (size, date) = (human_bytes(one.size), date(one.seconds));
                    format!("{:<7} {:<24} {size:>10} {date:>19}", one.id, one.name)
                }));
            }
            lines.push("Format specific information:".to_owned());
            for (name, value) in self.specifics() {
                let value = match (name.as_str(), value.as_str(), &self.header) {
                    ("journal", _, Some(header)) => journal_line(header, &self.name()),
                    ("journal", _, None) => native_journal_line(&value, &self.name()),
                    (_, Some(text), _) => text.to_owned(),
                    _ => value.to_string(),
                };
                lines.push(format!("    {}: {value}", name.replace('-', " ")));
            }
        }
        lines.push("Child node '/file':".to_owned());
        lines.push(format!("    filename: {}", self.name()));
        lines.push("    protocol type: file".to_owned());
        lines.push(format!("    file length: {}", sized(self.storage.len())));
        lines.push(format!("    disk size: {}", human_bytes(self.actual_size)));
        lines.join("\n")
    }

    fn json(&self) -> Value {
        let file = json!({
            "children": [],
            "virtual-size": self.storage.len(),
            "filename": self.name(),
            "format": "file",
            "actual-size": self.actual_size,
            "format-specific": { "type": "file", "data": {} },
            "dirty-flag": false,
        });
        let mut info = json!({
            "children": [{ "name": "file", "info": file }],
            "virtual-size": self.virtual_size,
            "filename": self.name(),
            "format": self.format.to_string(),
            "actual-size": self.actual_size,
            "dirty-flag": self.is_dirty(),
        });
        if self.format == FormatKind::Raw {
            return info;
        }
        if let Some(bytes) = self.cluster_size() {
            info["cluster-size"] = json!(bytes);
        }
        let data: Map<String, Value> = self.specifics().into_iter().collect();
        info["format-specific"] = json!({ "type": self.format.to_string(), "data": data });
        if let Some(name) = self.backing() {
            info["backing-filename"] = json!(name);
            info["full-backing-filename"] = json!(self.full_backing());
        }
        if let Some(format) = self.backing_format() {
            info["backing-filename-format"] = json!(format);
        }
        if !self.snapshots.is_empty() {
            info["snapshots"] = self.snapshots.iter().map(snapshot_json).collect();
        }
        if !self.native_snapshots.is_empty() {
            let json = |one: &NativeSnapshot| json!({ "id": one.id.to_string(), "name": one.name, "virtual-size": one.size, "date-sec": one.seconds });
            info["snapshots"] = self.native_snapshots.iter().map(json).collect();
        }
        info
    }
}

/// Whether who wrote the image last did not close it.
fn was_left_open(header: &Header) -> bool {
    header.is_dirty() || header.needs_replay()
}

/// What there is to tell of the journal.
fn journal_line(header: &Header, name: &str) -> String {
    match header.journal_bytes() {
        Some(bytes) if header.needs_replay() => {
            format!("{}, must be replayed: run `vellum recover {name}`", human_bytes(bytes))
        }
        Some(bytes) => match prealloc_text(header.prealloc()) {
            Some(prealloc) => format!("{}, prealloc={prealloc}", human_bytes(bytes)),
            None => human_bytes(bytes),
        },
        None => format!(
            "not used, as another program has rewritten the header: `vellum journal enable {name}` puts it right"
        ),
    }
}

/// What only qcow2 has, under the names QEMU gives it.
fn specifics(header: &Header) -> Vec<(String, Value)> {
    let mut facts = vec![("compat", json!(if header.version() == 2 { "0.10" } else { "1.1" }))];
    facts.push((
        "compression-type",
        json!(if header.compression() == Compression::Zstd { "zstd" } else { "zlib" }),
    ));
    if header.version() >= 3 {
        facts.push(("lazy-refcounts", json!(header.has_lazy_refcounts())));
    }
    facts.push(("refcount-bits", json!(header.refcount_bits())));
    if let Some(name) = header.data_file().filter(|_| header.has_data_file()) {
        facts.push(("data-file", json!(name)));
        facts.push(("data-file-raw", json!(header.data_file_is_raw())));
    }
    if header.version() >= 3 {
        facts.push(("corrupt", json!(header.is_corrupt())));
        facts.push(("extended-l2", json!(header.has_subclusters())));
    }
    if let Some(bytes) = header.journal_bytes() {
        let mut journal = json!({ "size": bytes, "needs-recovery": header.needs_replay() });
        if let Some(prealloc) = prealloc_text(header.prealloc()) {
            journal["prealloc"] = json!(prealloc);
        }
        facts.push(("journal", journal));
    } else if header.has_misplaced_journal() {
        facts.push(("journal", json!({ "size": 0, "needs-recovery": false, "misplaced": true })));
    }
    facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// What only images of the native format have.
fn native_specifics(superblocks: &Superblocks) -> Vec<(String, Value)> {
    let superblock = &superblocks.superblock;
    let places = superblock.places();
    let shape = places.shape();
    let mut facts = vec![
        ("version", json!(1)),
        ("uuid", json!(uuid(superblock.uuid()))),
        ("layout", json!(shape.layout.name())),
        ("data-offset", json!(places.data_offset().bytes())),
    ];
    if let Some(unit) = shape.layout.unit() {
        facts.push(("unit-size", json!(unit.bytes())));
        if let Some(zone) = shape.zone() {
            facts.push(("zone-size", json!(zone.bytes())));
            facts.push(("embed", json!(superblock.embeds())));
        }
        facts.push(("size-max", json!(places.size_max())));
        facts.push(("snapshots", json!(superblock.has_snapshots())));
    }
    if let Some(bytes) = shape.base_bytes {
        facts.push(("block-size", json!(shape.block.bytes())));
        facts.push(("base-size", json!(bytes)));
    }
    match places.region(Region::Journal).len() {
        0 => {}
        bytes => {
            facts.push(("journal", json!({ "size": bytes, "needs-recovery": superblock.needs_replay() })));
        }
    }
    if superblocks.other_is_bad.is_some() {
        facts.push(("damaged-superblock", json!(superblocks.slot.other().name())));
    }
    facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// What there is to tell of the journal of an image of the native format.
fn native_journal_line(journal: &Value, name: &str) -> String {
    let size = human_bytes(journal["size"].as_u64().unwrap_or(0));
    match journal["needs-recovery"] == json!(true) {
        true => format!("{size}, must be replayed: run `vellum recover {name}`"),
        false => size,
    }
}

fn uuid(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

fn snapshot_json(snapshot: &Snapshot) -> Value {
    let mut value = json!({
        "id": snapshot.id,
        "name": snapshot.name,
        "vm-state-size": snapshot.vm_state_size,
        "date-sec": snapshot.date_seconds,
        "date-nsec": snapshot.date_nanoseconds,
        "vm-clock-sec": snapshot.vm_clock_nanoseconds / 1_000_000_000,
        "vm-clock-nsec": snapshot.vm_clock_nanoseconds % 1_000_000_000,
    });
    if let Some(icount) = snapshot.icount {
        value["icount"] = json!(icount);
    }
    value
}

fn snapshot_row(id: &str, tag: &str, size: &str, date: &str, clock: &str, icount: &str) -> String {
    format!("{id:<7} {tag:<16} {size:>8} {date:>19} {clock:>15} {icount:>10}")
}

fn snapshot_line(snapshot: &Snapshot) -> String {
    let millis = snapshot.vm_clock_nanoseconds / 1_000_000;
    let (hours, minutes, seconds) = (millis / 3_600_000, millis / 60_000 % 60, millis / 1000 % 60);
    let clock = format!("{hours:04}:{minutes:02}:{seconds:02}.{:03}", millis % 1000);
    let icount = snapshot.icount.map_or_else(|| "--".to_owned(), |count| count.to_string());
    let date = date(u64::from(snapshot.date_seconds));
    snapshot_row(&snapshot.id, &snapshot.name, &human_bytes(snapshot.vm_state_size), &date, &clock, &icount)
}

/// A moment in UTC: the calendar of the Gregorian rules, by Howard Hinnant's days algorithm.
pub(crate) fn date(seconds: u64) -> String {
    let days = i64::try_from(seconds / 86_400).expect("48 bits") + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}")
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn dates() {
        assert_eq!(date(0), "1970-01-01 00:00:00");
        assert_eq!(date(1_795_252_236), "2026-11-21 09:10:36");
        assert_eq!(date(951_782_400), "2000-02-29 00:00:00");
    }
}
