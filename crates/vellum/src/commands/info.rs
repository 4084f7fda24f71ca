//! `vellum info`: what an image is.

use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::{Map, Value, json};
use vellum_core::pin::Proof;
use vellum_daemon::inspect::{ImageFacts, inspect};
use vellum_daemon::{Fact, IoMode, Machine, Session, Snapshot, run as run_worker};

use super::{Outcome, or_share};
use crate::args::{OutputFormat, ReadArgs};
use crate::output::{human_bytes, printable, say, say_json};

/// Show an image's format, sizes, backing file and snapshots
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    read: ReadArgs,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// Also describe the backing images
    #[arg(long)]
    backing_chain: bool,
    /// The image
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let (file, options) = args.read.open(&args.file)?;
    let look = async || inspect(&file, &options, args.backing_chain).await;
    let images = run_worker(IoMode::Auto, look)?.map_err(or_share)?;
    match args.output {
        OutputFormat::Human => {
            let texts: Vec<String> = images.iter().map(human).collect();
            say(texts.join("\n\n").trim_end());
        }
        OutputFormat::Json if args.backing_chain => {
            say_json(&images.iter().map(image_json).collect::<Vec<_>>())
        }
        OutputFormat::Json => say_json(&image_json(&images[0])),
    }
    Ok(ExitCode::SUCCESS)
}

fn name_of(image: &ImageFacts) -> String {
    image.path.display().to_string()
}

/// Whether there is more to say of it than its sizes.
fn has_more(image: &ImageFacts) -> bool {
    !image.specifics.is_empty() || image.cluster_size().is_some()
}

/// What one format has and others have not.
fn specifics(image: &ImageFacts) -> impl Iterator<Item = (&'static str, Value)> {
    image.specifics.iter().map(|(name, fact)| (*name, fact_json(fact)))
}

fn fact_json(fact: &Fact) -> Value {
    match fact {
        Fact::Text(text) => json!(text),
        Fact::Number(number) => json!(number),
        Fact::Flag(flag) => json!(flag),
        Fact::Group(facts) => {
            let facts = facts.iter().map(|(name, fact)| ((*name).to_owned(), fact_json(fact)));
            Value::Object(facts.collect())
        }
        Fact::List(facts) => facts.iter().map(fact_json).collect(),
    }
}

fn actual_size(image: &ImageFacts) -> String {
    image.actual_size.map_or_else(|| "unavailable".to_owned(), human_bytes)
}

fn human(image: &ImageFacts) -> String {
    let sized = |bytes: u64| format!("{} ({bytes} bytes)", human_bytes(bytes));
    let mut lines = vec![
        format!("image: {}", printable(&name_of(image))),
        format!("file format: {}", image.format_name()),
    ];
    lines.extend(
        image.snapshot.as_ref().map(|key| format!("read as snapshot: {}", printable(&key.to_string()))),
    );
    lines.extend([
        format!("virtual size: {}", image.virtual_size.map_or_else(|| "unknown".to_owned(), sized)),
        format!("disk size: {}", actual_size(image)),
    ]);
    if image.is_encrypted() {
        lines.push("encrypted: yes".to_owned());
    }
    if let Some(foreign) = image.foreign() {
        lines.push(format!(
            "not readable by Vellum: convert it with `{}`",
            printable(&foreign.conversion(&name_of(image)))
        ));
    } else if has_more(image) {
        if image.is_dirty() {
            lines.push("cleanly shut down: no".to_owned());
        }
        lines.extend(image.cluster_size().map(|bytes| format!("cluster_size: {bytes}")));
        if let (Some((name, _)), Some(full)) = (image.backing(), image.full_backing()) {
            let actual = if full == name { String::new() } else { format!(" (actual path: {full})") };
            lines.push(printable(&format!("backing file: {name}{actual}")).into_owned());
        }
        if let Some(format) = image.backing_format() {
            lines.push(printable(&format!("backing file format: {format}")).into_owned());
        }
        lines.extend(
            image.pin().iter().flat_map(|pin| pin.proofs()).map(|proof| format!("backing file pin: {proof}")),
        );
        if !image.snapshots.is_empty() {
            lines.push("Snapshot list:".to_owned());
            lines.extend(list_lines(&image.snapshots));
        }
        lines.extend(
            behind(image)
                .map(|session| format!("behind its disk: flash cache {} holds writes", session.cache)),
        );
        if !image.specifics.is_empty() {
            lines.push("Format specific information:".to_owned());
        }
        for (name, value) in specifics(image) {
            let value = match (name, &value) {
                ("journal", journal) => journal_line(journal, image),
                ("bitmaps", Value::Array(all)) => all.iter().map(bitmap_text).collect::<Vec<_>>().join(", "),
                ("flash", flash) => flash_line(flash),
                ("fast", fast) => fast_line(fast),
                ("encrypt", encryption) => encryption_text(encryption),
                ("slots", slots) => format!("in use: {}", slots_in_use(slots)),
                (_, Value::String(text)) => printable(text).into_owned(),
                _ => value.to_string(),
            };
            lines.push(format!("    {}: {value}", name.replace('-', " ")));
        }
    }
    lines.push("Child node '/file':".to_owned());
    lines.push(format!("    filename: {}", printable(&name_of(image))));
    lines.push("    protocol type: file".to_owned());
    lines.push(format!("    file length: {}", sized(in_sectors(image.file_len))));
    lines.push(format!("    disk size: {}", actual_size(image)));
    lines.join("\n")
}

/// The length of a file as a disk.
fn in_sectors(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(512).unwrap_or(bytes)
}

fn image_json(image: &ImageFacts) -> Value {
    let mut file = json!({
        "children": [],
        "virtual-size": in_sectors(image.file_len),
        "filename": name_of(image),
        "format": "file",
        "format-specific": { "type": "file", "data": {} },
        "dirty-flag": false,
    });
    if let Some(bytes) = image.actual_size {
        file["actual-size"] = json!(bytes);
    }
    let mut info = json!({
        "children": [{ "name": "file", "info": file }],
        "filename": name_of(image),
        "format": image.format_name(),
        "dirty-flag": image.is_dirty(),
    });
    if let Some(bytes) = image.actual_size {
        info["actual-size"] = json!(bytes);
    }
    if let Some(key) = &image.snapshot {
        info["snapshot"] = json!({ "name": key.name, "id": key.id.to_string() });
    }
    if let Some(bytes) = image.virtual_size {
        info["virtual-size"] = json!(bytes);
    }
    if image.is_encrypted() {
        info["encrypted"] = json!(true);
    }
    if image.foreign().is_some() {
        info["format-specific"] = json!({ "type": image.format_name(), "data": { "readable": false } });
        return info;
    }
    if !has_more(image) {
        return info;
    }
    if let Some(bytes) = image.cluster_size() {
        info["cluster-size"] = json!(bytes);
    }
    let data: Map<String, Value> = specifics(image).map(|(name, value)| (name.to_owned(), value)).collect();
    if !data.is_empty() {
        info["format-specific"] = json!({ "type": image.format_name(), "data": data });
    }
    if let Some((name, _)) = image.backing() {
        info["backing-filename"] = json!(name);
        info["full-backing-filename"] = json!(image.full_backing());
    }
    if let Some(format) = image.backing_format() {
        info["backing-filename-format"] = json!(format);
    }
    if let Some(pin) = image.pin() {
        info["backing-pin"] = pin.proofs().iter().map(proof_json).collect();
    }
    if !image.snapshots.is_empty() {
        info["snapshots"] = image.snapshots.iter().map(snapshot_json).collect();
    }
    info
}

fn proof_json(proof: &Proof) -> Value {
    json!({ "kind": proof.kind().name(), "length": proof.len(), "value": proof.value() })
}

/// What there is to tell of the journal.
fn journal_line(journal: &Value, image: &ImageFacts) -> String {
    let (size, name) = (human_bytes(journal["size"].as_u64().unwrap_or(0)), name_of(image));
    let is = |what: &str| journal[what] == json!(true);
    match journal["prealloc"].as_str() {
        _ if image.is_being_written => format!("{size}, in use by the program that writes the image"),
        _ if is("misplaced") => {
            format!("not used because another program rewrote the header: run `vellum journal enable {name}`")
        }
        _ if is("needs-recovery") && behind(image).is_some() => format!("{size}, must be replayed"),
        _ if is("needs-recovery") => format!("{size}, must be replayed: run `vellum recover {name}`"),
        Some(prealloc) => format!("{size}, prealloc={prealloc}"),
        None => size,
    }
}

/// How guest data is encrypted: the cipher, and which key slots are in use.
fn encryption_text(encryption: &Value) -> String {
    let text = |name: &str| encryption[name].as_str().unwrap_or_default().to_owned();
    match encryption["slots"].is_array() {
        true => format!(
            "{} ({}-{}-{}, key slots in use: {})",
            text("format"),
            text("cipher-alg"),
            text("cipher-mode"),
            text("ivgen-alg"),
            slots_in_use(&encryption["slots"])
        ),
        false => text("format"),
    }
}

fn slots_in_use(slots: &Value) -> String {
    let slots = slots.as_array().into_iter().flatten().enumerate();
    let used = slots.filter(|(_, slot)| slot["active"] == json!(true));
    // Version 2 lists only those that there are.
    let used = used.map(|(index, slot)| slot["id"].as_u64().unwrap_or(index as u64).to_string());
    used.collect::<Vec<_>>().join(", ")
}

/// The session whose cache holds writes that the image has not.
fn behind(image: &ImageFacts) -> Option<Session> {
    image.head.as_ref()?.session().filter(Session::holds_writes)
}

/// What there is to tell of a session.
fn flash_line(flash: &Value) -> String {
    let text = |name: &str| flash[name].as_str().unwrap_or_default();
    let state = match text("state") {
        "void" => "void: the image was changed without the cache",
        "clean" => "the image is complete",
        _ => "the cache holds writes that the image has not",
    };
    format!("cache {}, session {}; {state}", text("cache"), text("number"))
}

/// What there is to tell of a fast medium.
fn fast_line(fast: &Value) -> String {
    let name = printable(fast["name"].as_str().unwrap_or_default()).into_owned();
    let counts = if fast["counts"] == true { "its copies count" } else { "no copy there counts" };
    format!("{name} (id {}); {counts}", fast["id"].as_str().unwrap_or_default())
}

fn bitmap_text(bitmap: &Value) -> String {
    let has = |flag: &str| bitmap["flags"].as_array().is_some_and(|flags| flags.contains(&json!(flag)));
    let state = match () {
        () if has("in-use") => ", inconsistent",
        () if !has("auto") => ", disabled",
        () => "",
    };
    let name = printable(bitmap["name"].as_str().unwrap_or_default());
    format!("{name} (granularity {}{state})", human_bytes(bitmap["granularity"].as_u64().unwrap_or(0)))
}

/// What stands behind a snapshot that cannot be deleted.
pub(crate) const HELD: &str = "  held by clones";

fn snapshot_json(snapshot: &Snapshot) -> Value {
    let mut value = json!({ "id": snapshot.id, "name": snapshot.name, "date-sec": snapshot.seconds });
    if snapshot.is_cloned {
        value["held-by-clones"] = json!(true);
    }
    match &snapshot.machine {
        None => value["virtual-size"] = json!(snapshot.size),
        Some(machine) => machine_json(machine, &mut value),
    }
    value
}

/// Adds what a snapshot has of a machine, under the names that QEMU uses.
pub(crate) fn machine_json(machine: &Machine, value: &mut Value) {
    value["vm-state-size"] = json!(machine.state_bytes);
    value["date-nsec"] = json!(machine.nanoseconds);
    value["vm-clock-sec"] = json!(machine.clock_nanoseconds / 1_000_000_000);
    value["vm-clock-nsec"] = json!(machine.clock_nanoseconds % 1_000_000_000);
    if let Some(icount) = machine.icount {
        value["icount"] = json!(icount);
    }
}

/// The lines of a list of snapshots, of which there is one; those of qcow2 images as `qemu-img` has them.
pub(crate) fn list_lines(snapshots: &[Snapshot]) -> Vec<String> {
    let heading = match snapshots.first().and_then(|first| first.machine.as_ref()) {
        Some(_) => machine_row("ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT"),
        None => format!("{:<7} {:<24} {:>10} {:>19}", "ID", "NAME", "DISK SIZE", "DATE"),
    };
    [heading].into_iter().chain(snapshots.iter().map(snapshot_line)).collect()
}

fn snapshot_line(snapshot: &Snapshot) -> String {
    let (name, date) = (printable(&snapshot.name), date(snapshot.seconds));
    match &snapshot.machine {
        Some(machine) => machine_line(snapshot, machine),
        None => {
            let (size, held) = (human_bytes(snapshot.size), if snapshot.is_cloned { HELD } else { "" });
            format!("{:<7} {name:<24} {size:>10} {date:>19}{held}", snapshot.id)
        }
    }
}

fn machine_row(id: &str, tag: &str, size: &str, date: &str, clock: &str, icount: &str) -> String {
    format!("{id:<7} {tag:<16} {size:>8} {date:>19} {clock:>15} {icount:>10}")
}

fn machine_line(snapshot: &Snapshot, machine: &Machine) -> String {
    let clock = clock_text(machine);
    let icount = machine.icount.map_or_else(|| "--".to_owned(), |count| count.to_string());
    let (id, name) = (printable(&snapshot.id), printable(&snapshot.name));
    machine_row(&id, &name, &human_bytes(machine.state_bytes), &date(snapshot.seconds), &clock, &icount)
}

/// How long the guest had run.
pub(crate) fn clock_text(machine: &Machine) -> String {
    let millis = machine.clock_nanoseconds / 1_000_000;
    let (hours, minutes, seconds) = (millis / 3_600_000, millis / 60_000 % 60, millis / 1000 % 60);
    format!("{hours:04}:{minutes:02}:{seconds:02}.{:03}", millis % 1000)
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
