//! `vellum quickstart`: the whole story in a few seconds, on a machine with nothing but Rust.
//!
//! ```text
//!   template ► clone ► serve ► a client writes and flushes ► kill -9 ► recover ► every flushed byte is compared
//!          └─► the same clone without a journal ► serve ► the same client: what a durable write costs the host then
//! ```
//!
//! Each step is what a user would do, with the same program: the server is another process of it, and it is really killed.

mod client;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;
use vellum_core::{Buffer, Context, Error, GuestOffset, Random, Result, lock};
use vellum_daemon::{
    CreateTarget, FormatKind, ImageOptions, IoMode, Preallocation, Qcow2Options, create_qcow2, create_raw,
    open_image, run as run_worker,
};

use self::client::{Client, FUA};
use super::Outcome;
use crate::output::{human_bytes, say};

/// Demonstrate Vellum: clone a template, serve it, write, kill the server, recover
///
/// The demonstration uses a temporary directory and removes it at the end.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Work in DIR, and keep the files
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Seconds to write before the server is killed, 1 to 600
    ///
    /// This is done twice, with and without a journal.
    #[arg(long, value_name = "SECONDS", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,
}

const DISK_BYTES: u64 = 1 << 30;
const BLOCK: u64 = 4096;
/// How long the first durable write may take before the demonstration gives up.
const FIRST_WRITE: Duration = Duration::from_secs(60);

/// A block's versions: those below `flushed` may be gone, `flushed` and later ones up to `submitted` may be there.
#[derive(Debug, Clone, Copy, Default)]
struct Versions {
    flushed: u64,
    submitted: u64,
}

/// What the client did.
#[derive(Debug, Default)]
struct Journal {
    blocks: BTreeMap<u64, Versions>,
    writes: u64,
    flushes: u64,
    elapsed: Duration,
}

type SharedJournal = Arc<Mutex<Journal>>;

/// The directory of the tour; removed at the end unless it is to be kept.
struct Place {
    dir: PathBuf,
    keep: bool,
}

impl Place {
    fn new(keep: Option<&Path>) -> Result<Self> {
        let dir = keep.map_or_else(
            || std::env::temp_dir().join(format!("vellum-quickstart-{}", std::process::id())),
            Path::to_owned,
        );
        std::fs::create_dir_all(&dir).context(|| format!("can't create {}", dir.display()))?;
        Ok(Self { dir, keep: keep.is_some() })
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !self.keep {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }
}

/// A server process, killed at the latest when it is dropped.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    let place = Place::new(args.keep.as_deref())?;
    let (template, clone) = (place.file("template.raw"), place.file("clone.qcow2"));
    let (socket, stats) = (place.file("nbd.sock"), place.file("stats.json"));
    let mut rows: Vec<(&str, String)> = Vec::new();

    let kind = make_template(&template)?;
    let fingerprint = fingerprint(&template)?;
    rows.push(("template", format!("{}, {kind}", human_bytes(DISK_BYTES))));

    let begin = Instant::now();
    make_clone(&clone, true)?;
    let took = begin.elapsed();
    let size = std::fs::metadata(&clone).context(|| "can't stat the clone")?.len();
    rows.push(("clone", format!("created in {:.1} ms, {}", took.as_secs_f64() * 1000.0, human_bytes(size))));

    let server = start_server(&clone, &socket, &stats)?;
    let journal = SharedJournal::default();
    write_until_killed(server, &socket, &journal, Duration::from_secs(args.seconds))?;
    {
        let journal = lock(&journal);
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        let rate = journal.flushes as f64 / journal.elapsed.as_secs_f64();
        rows.push((
            "client",
            format!("{} writes of 4 KiB, each made durable: {rate:.0} a second", journal.writes),
        ));
    }
    let journal_cost = host_cost(&stats);
    rows.push(("server", "killed with SIGKILL in the middle of a write".to_owned()));

    // Measured by itself, so that neither is in the other's way.
    let (plain, plain_stats) = (place.file("plain.qcow2"), place.file("plain.json"));
    make_clone(&plain, false)?;
    let server = start_server(&plain, &socket, &plain_stats)?;
    write_until_killed(server, &socket, &SharedJournal::default(), Duration::from_secs(args.seconds))?;
    rows.extend(journal_cost.map(|cost| ("host", format!("per durable write: {cost}"))));
    let cost = host_cost(&plain_stats);
    rows.extend(cost.map(|cost| ("no journal", format!("the same clone with -o journal=off: {cost}"))));

    let begin = Instant::now();
    let recovered = recover(&clone)?;
    rows.push(("recovery", format!("{:.0} ms: {recovered}", begin.elapsed().as_secs_f64() * 1000.0)));

    let checked = verify(&clone, &socket, &lock(&journal))?;
    rows.push(("flushed bytes", format!("all present: {checked} blocks compared, 0 lost")));
    if fingerprint != self::fingerprint(&template)? {
        return Err(Error::corrupt("the template has changed").into());
    }
    rows.push(("template", "unchanged, byte for byte".to_owned()));

    for (name, text) in &rows {
        say(&format!("  {name:<14} {text}"));
    }
    say("What to try next:");
    say("  vellum create -f qcow2 -b template.raw -F raw clone.qcow2");
    say("  vellum serve clone.qcow2 --nbd unix:/tmp/clone.sock --stats-json stats.json");
    say("  qemu-system-x86_64 … -drive file=nbd+unix:///?socket=/tmp/clone.sock,if=virtio,format=raw");
    say("  vellum info clone.qcow2; vellum map clone.qcow2; vellum check clone.qcow2");
    if let Some(dir) = &args.keep {
        say(&format!("The images of this tour are in {}.", dir.display()));
    }
    Ok(ExitCode::SUCCESS)
}

/// A raw disk with a real file system on it, or with a pattern where no `mkfs.ext4` is.
fn make_template(path: &Path) -> Result<&'static str> {
    run_worker(IoMode::Auto, async || create_raw(path, DISK_BYTES, Preallocation::Off).await)??;
    let sbin = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let made = Command::new("mkfs.ext4")
        .env("PATH", sbin)
        .args(["-q", "-F", "-L", "vellum"])
        .arg(path)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if made.is_ok_and(|status| status.success()) {
        return Ok("an ext4 file system");
    }
    run_worker(IoMode::Auto, async || {
        let options = ImageOptions { format: Some(FormatKind::Raw), ..ImageOptions::default() };
        let chain = open_image(path, &options).await?;
        for block in (0..DISK_BYTES / BLOCK).step_by(64) {
            let data = Buffer::copy_of(&content(block, 0));
            chain.disk().write(GuestOffset::new(block * BLOCK), data, Default::default()).await?;
        }
        chain.close().await
    })??;
    Ok("filled with a pattern (mkfs.ext4 is not installed)")
}

/// Makes a clone, as `vellum create` does.
fn make_clone(path: &Path, has_journal: bool) -> Result<()> {
    let target = CreateTarget {
        path: path.to_owned(),
        size: None,
        backing: Some(("template.raw".to_owned(), FormatKind::Raw)),
        trust_backing: false,
        allow_dirs: Vec::new(),
        remote: Default::default(),
        trust_base: false,
        secrets: Default::default(),
        stands_on_encrypted: Default::default(),
        never_flushed: false,
    };
    run_worker(IoMode::Auto, async || {
        let options = if has_journal { Qcow2Options::default() } else { Qcow2Options::without_journal() };
        create_qcow2(&target, Qcow2Options { extended_l2: true, ..options }).await
    })?
    .map(drop)
}

/// A number that changes when any byte of the file does, as good as surely.
fn fingerprint(path: &Path) -> Result<u64> {
    run_worker(IoMode::Auto, async || {
        let options = ImageOptions { format: Some(FormatKind::Raw), ..ImageOptions::reading() };
        let chain = open_image(path, &options).await?;
        let mut sum = 0u64;
        for piece in vellum_core::BlockSize::from_shift(20).pieces_of(GuestOffset::ZERO.span(DISK_BYTES)) {
            let len = usize::try_from(piece.len()).expect("a mebibyte");
            let data = chain.disk().read(piece.start(), Buffer::for_overwrite(len)).await?.contiguous();
            for word in data.slice().as_chunks::<8>().0 {
                sum = (sum ^ u64::from_le_bytes(*word)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
            }
        }
        Ok(sum)
    })?
}

/// The bytes of a block's version.
fn content(block: u64, version: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(BLOCK).expect("small")];
    Random::from_seed(block << 20 ^ version).fill(&mut bytes);
    bytes
}

fn start_server(image: &Path, socket: &Path, stats: &Path) -> Result<Server> {
    let program = std::env::current_exe().context(|| "can't find this program")?;
    let mut child = Command::new(program)
        .arg("serve")
        .arg(image)
        .arg("--nbd")
        .arg(format!("unix:{}", socket.display()))
        .arg("--stats-json")
        .arg(stats)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context(|| "can't start the server")?;
    let stderr = child.stderr.take().expect("it was piped");
    let server = Server(child);
    let mut said = String::new();
    for line in BufReader::new(stderr).lines().map_while(Result::ok) {
        if line.starts_with("serving ") {
            return Ok(server);
        }
        said.push_str(&line);
    }
    Err(Error::invalid(format!("the server did not start: {said}")))
}

/// Has a client write synchronously for a while, then kills the server under it.
fn write_until_killed(
    mut server: Server,
    socket: &Path,
    journal: &SharedJournal,
    time: Duration,
) -> Result<()> {
    let mut client = Client::connect(socket).context(|| "can't connect to the server")?;
    if client.size != DISK_BYTES {
        return Err(Error::corrupt(format!(
            "the server offers {} bytes instead of {DISK_BYTES}",
            client.size
        )));
    }
    let shared = journal.clone();
    let writer = std::thread::spawn(move || write_on(&mut client, &shared));
    let begun = Instant::now();
    std::thread::sleep(time);
    // On a host that is busy with others the first durable write may take longer than that.
    while lock(journal).flushes == 0 && !writer.is_finished() && begun.elapsed() < FIRST_WRITE {
        std::thread::sleep(Duration::from_millis(5));
    }
    let elapsed = begun.elapsed();
    server.0.kill().context(|| "can't kill the server")?;
    server.0.wait().context(|| "can't wait for the server")?;
    let ended = writer.join().expect("the client does not panic");
    lock(journal).elapsed = elapsed;
    match lock(journal).flushes {
        0 => Err(Error::io(ended, "no write of the client succeeded")),
        _ => Ok(()), // it ended because the server is gone, as it should
    }
}

/// Writes blocks at random, each made durable by FUA or by a flush, until the server is gone; gives the error by which
/// that was noticed.
fn write_on(client: &mut Client, journal: &SharedJournal) -> std::io::Error {
    let mut random = Random::from_seed(1);
    loop {
        // Some places again and again, others once.
        let block = match random.one_in(3) {
            true => random.below(64),
            false => random.below(DISK_BYTES / BLOCK),
        };
        let version = {
            let mut journal = lock(journal);
            let versions = journal.blocks.entry(block).or_default();
            versions.submitted += 1;
            versions.submitted
        };
        let with_fua = random.one_in(2);
        let flags = if with_fua { FUA } else { 0 };
        let written = client.write(block * BLOCK, &content(block, version), flags);
        let durable = written.and_then(|()| if with_fua { Ok(()) } else { client.flush() });
        if let Err(error) = durable {
            return error;
        }
        let mut journal = lock(journal);
        journal.writes += 1;
        journal.flushes += 1;
        journal.blocks.entry(block).or_default().flushed = version;
    }
}

/// What a durable write cost the host, from the server's own count of a moment before it was killed.
fn host_cost(stats: &Path) -> Option<String> {
    let text = std::fs::read_to_string(stats).ok()?;
    let stats: Value = serde_json::from_str(&text).ok()?;
    let disk = &stats["disks"][0];
    let sum = |name: &str| -> u64 {
        let of = |part: &str| disk["host"][part][name].as_u64().unwrap_or(0);
        ["data", "metadata", "checkpoint", "prealloc"].map(of).iter().sum()
    };
    #[expect(clippy::cast_precision_loss, reason = "averages for people")]
    let per = |count: u64, writes: u64| count as f64 / writes.max(1) as f64;
    let writes = disk["guest"]["writes"].as_u64()?;
    Some(format!(
        "{:.2} flushes, {:.2} writes, {:.1} KiB",
        per(sum("flushes"), writes),
        per(sum("writes"), writes),
        per(sum("bytes-written"), writes) / 1024.0
    ))
}

fn recover(image: &Path) -> Result<String> {
    let program = std::env::current_exe().context(|| "can't find this program")?;
    let output =
        Command::new(program).arg("recover").arg(image).output().context(|| "can't run `vellum recover`")?;
    if !output.status.success() {
        return Err(Error::corrupt(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let what = said.split_once(" was ").map_or(said.as_str(), |(_, what)| what);
    Ok(what.trim_start_matches("recovered: ").to_owned())
}

/// Serves the image again and compares every block that was ever written with what may be there.
fn verify(image: &Path, socket: &Path, journal: &Journal) -> Result<u64> {
    let server = start_server(image, socket, &image.with_extension("stats"))?;
    let mut client = Client::connect(socket).context(|| "can't connect to the server")?;
    let mut bytes = vec![0; usize::try_from(BLOCK).expect("small")];
    let mut checked = 0;
    for (block, versions) in journal.blocks.iter().filter(|(_, versions)| versions.flushed > 0) {
        client.read(block * BLOCK, &mut bytes).context(|| format!("can't read block {block}"))?;
        let admissible: Vec<Vec<u8>> =
            (versions.flushed..=versions.submitted).map(|version| content(*block, version)).collect();
        // The write that was under way may have arrived in part, sector by sector.
        let sound = bytes.chunks(512).enumerate().all(|(sector, found)| {
            admissible.iter().any(|version| found == &version[sector * 512..(sector + 1) * 512])
        });
        if !sound {
            return Err(Error::corrupt(format!("block {block} is not what was flushed")));
        }
        checked += 1;
    }
    drop(server);
    Ok(checked)
}
