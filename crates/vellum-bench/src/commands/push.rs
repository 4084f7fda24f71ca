//! `vellum-bench push`: publishing a disk and its next version: what is stored, what is uploaded, and what a push that was killed
//! does again.
//!
//! ```text
//!   files of this host ─► ext4, version 1 ─► some files get the content of others ─► version 2
//!
//!   a store     push 1 ► push 2                               for each size of a chunk
//!   another     push 1, killed -9 half-way ► push 1 again     with the first of these sizes
//! ```
//!
//! The store is a directory, so bytes are those of its files. Version 2 is the same file system, in which files were replaced
//! with `debugfs`, as an upgrade of packages would replace them: their blocks are freed and others are taken. Each new content
//! is that of a file of this host that version 1 does not have, so it compresses as such files do.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use serde_json::Value;
use vellum_core::{Context, Error, Result};
use vellum_lab::cost::lab::Lab;
use vellum_lab::programs;
use vellum_lab::report::{Output, Table, complain, say_json};
use vellum_lab::server::{Vellum, first_line_of};

use super::parse_size;
use crate::host::Machine;

/// Larger files are left out: a single one could be the whole disk.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// How often to look at a store that is being filled.
const EVERY: Duration = Duration::from_millis(5);

/// Publish a disk and its next version, and count what is stored and uploaded
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Size of the disk
    #[arg(long, value_name = "SIZE", default_value = "2G", value_parser = parse_size)]
    size: u64,
    /// Bytes of files in version 1; there must be more in the directory
    #[arg(long, value_name = "SIZE", default_value = "1600M", value_parser = parse_size)]
    content: u64,
    /// Bytes of files that version 2 replaces
    #[arg(long, value_name = "SIZE", default_value = "200M", value_parser = parse_size)]
    changed: u64,
    /// Directory whose files are the content
    #[arg(long, value_name = "DIR", default_value = "/usr")]
    from: PathBuf,
    /// Size of a chunk; may be given several times
    #[arg(long, value_name = "SIZE", default_values = ["256K"], value_parser = parse_size)]
    chunk_size: Vec<u64>,
    /// Directory for images and stores. Default: the directory of this program
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// vellum program to measure. Default: the one beside this program
    #[arg(long, value_name = "PATH [ARGUMENT ...]", value_parser = Vellum::parse)]
    vellum: Option<Vellum>,
    /// Output format on stdout; with json, the table goes to stderr
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Output::Human)]
    output: Output,
}

/// One push.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Pushed {
    seconds: f64,
    chunks: u64,
    uploaded_chunks: u64,
    uploaded_bytes: u64,
    index_bytes: u64,
    /// What the store has after it, in bytes.
    stored_bytes: u64,
}

/// Both versions in chunks of one size.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row {
    chunk_bytes: u64,
    first: Pushed,
    next: Pushed,
}

/// A push that was killed, and the same again.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Resumed {
    chunk_bytes: u64,
    killed_after_seconds: f64,
    /// Whole chunks in the store when it was dead.
    stored_chunks: u64,
    stored_bytes: u64,
    again: Pushed,
}

/// Everything that was seen, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    unix_seconds: u64,
    machine: Machine,
    programs: Vec<String>,
    disk_bytes: u64,
    content_bytes: u64,
    changed_bytes: u64,
    changed_files: usize,
    rows: Vec<Row>,
    resumed: Resumed,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    for (program, version) in [("mke2fs", "-V"), ("debugfs", "-V")] {
        if let Err(error) = first_line_of(Command::new(program).arg(version)) {
            complain(&format!("skipped: {}", error.chain()));
            return Ok(());
        }
    }
    let lab = Lab::open(args.dir.as_ref(), args.vellum.as_ref())?;
    let machine = Machine::with(&lab.dir);
    let table = Table::to(args.output);
    let disks = Disks::make(&lab.dir, args)?;
    table.say(&format!(
        "a disk of {} MiB with {} MiB of files of {}; next version: {} of them replaced, {} MiB; store: a directory on {}; Linux \
         {}, {} processors",
        args.size >> 20,
        args.content >> 20,
        args.from.display(),
        disks.changed_files,
        disks.changed_bytes >> 20,
        machine.medium,
        machine.kernel,
        machine.processors
    ));
    lab.programs.iter().take(1).for_each(|program| table.say(program));
    table.say(&format!(
        "{:>9} {:>8} {:>11} {:>8} {:>13} {:>12} {:>9} {:>8}",
        "KiB/chunk", "chunks", "MiB stored", "s", "chunks, next", "MiB, next", "KiB index", "s, next"
    ));
    let mut rows = Vec::new();
    for chunk_bytes in &args.chunk_size {
        let store = Store::new(&lab, "store", *chunk_bytes)?;
        let first = store.push(&disks.first, 1)?;
        let row = Row { chunk_bytes: *chunk_bytes, first, next: store.push(&disks.next, 2)? };
        table.say(&line(&row));
        rows.push(row);
    }
    let resumed =
        Store::new(&lab, "killed", args.chunk_size[0])?.kill_and_push(&disks.first, &rows[0].first)?;
    table.say(&format!(
        "killed -9 after {:.1} s with {} of {} chunks in the store ({:.0} MiB); again: {} chunks, {:.0} MiB uploaded in {:.1} s",
        resumed.killed_after_seconds,
        resumed.stored_chunks,
        resumed.again.chunks,
        mib(resumed.stored_bytes),
        resumed.again.uploaded_chunks,
        mib(resumed.again.uploaded_bytes),
        resumed.again.seconds
    ));
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        say_json(&Report {
            unix_seconds: now.as_secs(),
            machine,
            programs: lab.programs.clone(),
            disk_bytes: args.size,
            content_bytes: args.content,
            changed_bytes: disks.changed_bytes,
            changed_files: disks.changed_files,
            rows,
            resumed,
        });
    }
    Ok(())
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn line(row: &Row) -> String {
    format!(
        "{:>9} {:>8} {:>11.0} {:>8.1} {:>13} {:>12.1} {:>9.0} {:>8.1}",
        row.chunk_bytes >> 10,
        row.first.chunks,
        mib(row.first.stored_bytes),
        row.first.seconds,
        row.next.uploaded_chunks,
        mib(row.next.uploaded_bytes),
        row.first.index_bytes as f64 / 1024.0,
        row.next.seconds
    )
}

/// The two versions.
struct Disks {
    first: PathBuf,
    next: PathBuf,
    changed_files: usize,
    changed_bytes: u64,
}

/// A file, and its length.
type Found = (PathBuf, u64);

impl Disks {
    fn make(dir: &Path, args: &Args) -> Result<Self> {
        let mut found = Vec::new();
        walk(&args.from, &mut found, args.content + args.changed)
            .context(|| format!("can't read {}", args.from.display()))?;
        let mut sum = 0;
        let inside = found.iter().take_while(|(_, len)| {
            sum += len;
            sum <= args.content
        });
        let (inside, others) = found.split_at(inside.count());
        if others.iter().map(|(_, len)| len).sum::<u64>() < args.changed {
            return Err(Error::invalid(format!(
                "{} has too few files: give another directory with --from, or a smaller --content",
                args.from.display()
            )));
        }
        let (first, next) = (dir.join("1.raw"), dir.join("2.raw"));
        let root = dir.join("root");
        for (file, _) in inside {
            let to = root.join(file.strip_prefix(&args.from).unwrap_or(file));
            let above = to.parent().unwrap_or(&root);
            fs::create_dir_all(above).context(|| format!("can't make {}", above.display()))?;
            fs::copy(file, &to).context(|| format!("can't copy {}", file.display()))?;
        }
        let blank = fs::File::create(&first).and_then(|file| file.set_len(args.size));
        blank.context(|| format!("can't make {}", first.display()))?;
        programs::run(Command::new("mke2fs").args(["-q", "-F", "-t", "ext4", "-d"]).arg(&root).arg(&first))?;
        drop(fs::remove_dir_all(&root));
        programs::run(Command::new("cp").arg("--sparse=always").arg(&first).arg(&next))?;
        let (changed_files, changed_bytes) = replace(dir, &next, args, inside, others)?;
        Ok(Self { first, next, changed_files, changed_bytes })
    }
}

/// Gives files of a file system, spread over all of them, the content of others. How many, and how many bytes.
fn replace(dir: &Path, disk: &Path, args: &Args, inside: &[Found], others: &[Found]) -> Result<(usize, u64)> {
    let each = usize::try_from((args.content / args.changed.max(1)).max(1)).unwrap_or(usize::MAX);
    let mut script = String::new();
    let (mut files, mut bytes) = (0, 0);
    for ((old, _), (new, len)) in inside.iter().step_by(each).zip(others) {
        let name = old.strip_prefix(&args.from).unwrap_or(old);
        let (above, name) =
            (name.parent().and_then(Path::to_str), name.file_name().and_then(|name| name.to_str()));
        let (Some(above), Some(name), Some(new)) = (above, name, new.to_str()) else { continue };
        if bytes + len > args.changed {
            break;
        }
        // `write` takes a name in the current directory.
        script += &format!("cd \"/{above}\"\nrm \"{name}\"\nwrite \"{new}\" \"{name}\"\n");
        (files, bytes) = (files + 1, bytes + len);
    }
    let commands = dir.join("debugfs");
    let written = fs::File::create(&commands).and_then(|mut file| file.write_all(script.as_bytes()));
    written.context(|| format!("can't write {}", commands.display()))?;
    programs::run(Command::new("debugfs").args(["-w", "-f"]).arg(&commands).arg(disk).stdout(Stdio::null()))?;
    Ok((files, bytes))
}

/// Plain files below a directory, in the order of their names, until there are enough bytes of them.
fn walk(dir: &Path, found: &mut Vec<Found>, enough: u64) -> std::io::Result<()> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    paths.sort();
    for path in paths {
        if found.iter().map(|(_, len)| len).sum::<u64>() > enough {
            return Ok(());
        }
        let Ok(facts) = path.symlink_metadata() else { continue };
        // A name with a quotation mark would end debugfs's argument.
        let is_plain = path.to_str().is_some_and(|path| !path.contains(['"', '\n']));
        if facts.is_dir() {
            walk(&path, found, enough)?;
        } else if facts.is_file() && is_plain && (1..=FILE_BYTES_MAX).contains(&facts.len()) {
            found.push((path, facts.len()));
        }
    }
    Ok(())
}

/// A directory that is a store.
struct Store<'a> {
    lab: &'a Lab,
    dir: PathBuf,
    chunk_bytes: u64,
}

impl<'a> Store<'a> {
    /// An empty one.
    fn new(lab: &'a Lab, name: &str, chunk_bytes: u64) -> Result<Self> {
        let dir = lab.dir.join(name);
        drop(fs::remove_dir_all(&dir));
        fs::create_dir(&dir).context(|| format!("can't make {}", dir.display()))?;
        Ok(Self { lab, dir, chunk_bytes })
    }

    fn command(&self, disk: &Path, version: u32) -> Command {
        let mut push = Command::new(&self.lab.vellum.path);
        push.args(["template", "push", "-q", "-f", "raw", "--output", "json", "--chunk-size"]);
        push.arg(self.chunk_bytes.to_string()).arg(disk);
        push.arg(format!("file://{}/disk:{version}", self.dir.display()));
        push
    }

    fn push(&self, disk: &Path, version: u32) -> Result<Pushed> {
        let (mut push, began) = (self.command(disk, version), Instant::now());
        let output = push.stdin(Stdio::null()).output().context(|| format!("can't run {push:?}"))?;
        let seconds = began.elapsed().as_secs_f64();
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(Error::invalid(format!("{push:?} failed: {said}")));
        }
        let answer: Value = serde_json::from_slice(&output.stdout)
            .map_err(|error| Error::corrupt(format!("{push:?} has another form: {error}")))?;
        let number = |name: &str| answer[name].as_u64().unwrap_or(0);
        Ok(Pushed {
            seconds,
            chunks: number("chunks"),
            uploaded_chunks: number("uploaded-chunks"),
            uploaded_bytes: number("uploaded-bytes"),
            index_bytes: number("index-size"),
            stored_bytes: self.content().1,
        })
    }

    /// Whole chunks, and the bytes of all objects.
    fn content(&self) -> (u64, u64) {
        fn sum(dir: &Path, chunks: &mut u64, bytes: &mut u64) {
            for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    sum(&path, chunks, bytes);
                // A name with `#` is an object that is being written.
                } else if !entry.file_name().to_string_lossy().contains('#') {
                    *chunks += u64::from(path.components().any(|part| part.as_os_str() == "chunks"));
                    *bytes += entry.metadata().map_or(0, |facts| facts.len());
                }
            }
        }
        let (mut chunks, mut bytes) = (0, 0);
        sum(&self.dir, &mut chunks, &mut bytes);
        (chunks, bytes)
    }

    fn kill_and_push(&self, disk: &Path, whole: &Pushed) -> Result<Resumed> {
        let (mut push, began) = (self.command(disk, 1), Instant::now());
        let mut child = push
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .context(|| format!("can't run {push:?}"))?;
        let is_half = || self.content().0 >= whole.chunks / 2;
        while !is_half() && matches!(child.try_wait(), Ok(None)) {
            thread::sleep(EVERY);
        }
        drop(child.kill());
        child.wait().context(|| "can't ask for the push")?;
        let killed_after_seconds = began.elapsed().as_secs_f64();
        let (stored_chunks, stored_bytes) = self.content();
        let again = self.push(disk, 1)?;
        Ok(Resumed {
            chunk_bytes: self.chunk_bytes,
            killed_after_seconds,
            stored_chunks,
            stored_bytes,
            again,
        })
    }
}
