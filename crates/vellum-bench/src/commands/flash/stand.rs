//! Where a program serves a guest's disk from a slow backend: the programs below it, and what its cache has counted.
//!
//! ```text
//!   vellum         NBD ◄─ vellum serve (with --flash or without) ◄─ file ◄─ nbdfuse ◄─ nbdkit, delay ◄─ image
//!   qemu-nbd       NBD ◄─ qemu-nbd ◄──────────────────────────── NBD ◄─ nbdkit, delay ◄─ image
//!   nbdkit cache   NBD ◄─ nbdkit, cache, delay ◄─ raw disk
//! ```
//!
//! 1. Each has a copy of its own of what is behind the delay.
//! 2. nbdkit's delay filter delays reads and writes. It does not delay flushes, so those of a guest are cheaper for who
//!    passes them on than over a line.
//! 3. The file that nbdfuse shows is read and written past the page cache (`--direct`). Without that it would be a cache in
//!    memory, which no other program here has.
//! 4. nbdfuse shows a file that cannot grow. So images are full, and have no journal: no write allocates.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Serialize;
use serde_json::Value;
use vellum_core::{Context, Error, Result};
use vellum_lab::cost::lab::Lab;
use vellum_lab::programs;
use vellum_lab::server::Running;

/// Whose disk it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Way {
    Cached,
    Plain,
    Qemu,
    NbdkitCache,
}

impl Way {
    pub(super) const ALL: [Self; 4] = [Self::Cached, Self::Plain, Self::Qemu, Self::NbdkitCache];

    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Cached => "vellum --flash",
            Self::Plain => "vellum",
            Self::Qemu => "qemu-nbd",
            Self::NbdkitCache => "nbdkit cache",
        }
    }
}

/// Blocks and bytes that a cache has counted since it was opened.
#[derive(Debug, Clone, Copy, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Counts {
    /// Blocks.
    pub(super) hits: u64,
    pub(super) misses: u64,
    /// Bytes written to flash: for writes of guests, to keep what was read, records, slices of the map.
    pub(super) write_bytes: u64,
    pub(super) admit_bytes: u64,
    pub(super) record_bytes: u64,
    pub(super) slice_bytes: u64,
    /// Blocks that went home.
    pub(super) written_home: u64,
    /// Of flash.
    pub(super) flushes: u64,
    pub(super) guest_bytes_written: u64,
    pub(super) guest_flushes: u64,
}

impl Counts {
    pub(super) fn flash_bytes(&self) -> u64 {
        self.write_bytes + self.admit_bytes + self.record_bytes + self.slice_bytes
    }

    pub(super) fn since(&self, before: &Self) -> Self {
        Self {
            hits: self.hits - before.hits,
            misses: self.misses - before.misses,
            write_bytes: self.write_bytes - before.write_bytes,
            admit_bytes: self.admit_bytes - before.admit_bytes,
            record_bytes: self.record_bytes - before.record_bytes,
            slice_bytes: self.slice_bytes - before.slice_bytes,
            written_home: self.written_home - before.written_home,
            flushes: self.flushes - before.flushes,
            guest_bytes_written: self.guest_bytes_written - before.guest_bytes_written,
            guest_flushes: self.guest_flushes - before.guest_flushes,
        }
    }

    /// From `vellum stats`, over all disks.
    fn read(stats: &Value) -> Self {
        let disks = stats["disks"].as_array().map(Vec::as_slice).unwrap_or_default();
        let sum = |place: &str| disks.iter().filter_map(|disk| disk.pointer(place)?.as_u64()).sum::<u64>();
        // Disks that share an image below share its counts.
        let most = |name: &str| {
            let of = |disk: &Value| disk.pointer(&format!("/flash/below/{name}"))?.as_u64();
            disks.iter().filter_map(of).max().unwrap_or_default()
        };
        let both = |name: &str| sum(&format!("/flash/disk/{name}")) + most(name);
        let cache = |name: &str| stats["flash"][name].as_u64().unwrap_or_default();
        Self {
            hits: both("hits"),
            // What an image does not have is looked for below it.
            misses: sum("/flash/disk/misses").saturating_sub(most("hits")),
            write_bytes: both("write-bytes"),
            admit_bytes: both("admit-bytes"),
            record_bytes: cache("record-bytes"),
            slice_bytes: cache("slice-bytes"),
            written_home: both("written-home"),
            flushes: cache("flushes"),
            guest_bytes_written: sum("/guest/bytes-written"),
            guest_flushes: sum("/guest/flushes"),
        }
    }
}

/// The programs of one disk, or of the clones of a template. The server is the first, and ends first.
pub(super) struct Stand {
    pub(super) way: Way,
    pub(super) delay_ms: u64,
    /// Where guests come in, and to which export.
    pub(super) doors: Vec<(PathBuf, String)>,
    control: Option<PathBuf>,
    /// Everything of it lies there.
    pub(super) dir: PathBuf,
    vellum: PathBuf,
    running: Vec<Running>,
}

impl Stand {
    /// Serves a copy of the disk. `full` is a qcow2 of `raw` with all clusters mapped.
    pub(super) fn of_disk(lab: &Lab, way: Way, delay_ms: u64, disk: &Disk<'_>, name: &str) -> Result<Self> {
        let place = Place::new(lab, name)?;
        let mut stand = Self::new(lab, way, delay_ms, &place);
        let own = place.path("home");
        let from = if way == Way::NbdkitCache { disk.raw } else { disk.full };
        fs::copy(from, &own).context(|| format!("can't copy {}", from.display()))?;
        let front = place.path("front");
        stand.doors.push((front.clone(), String::new()));
        if way == Way::NbdkitCache {
            let mut cache = nbdkit(&front, &["cache", "delay"], &own, delay_ms);
            cache.args(["cache=writeback", "cache-on-read=true"]).env("TMPDIR", &place.dir);
            stand.running.push(serve(cache, &front)?);
            return Ok(stand);
        }
        let back = place.path("back");
        let backend = serve(nbdkit(&back, &["delay"], &own, delay_ms), &back)?;
        if way == Way::Qemu {
            stand.running.push(serve(qemu_nbd(&front, "qcow2", &uri(&back)), &front)?);
        } else {
            let (file, shown) = show(place.path("file"), &back)?;
            let command = place.vellum(lab, way, disk.flash_bytes)?;
            let mut command = stand.steered(command, &place);
            command.args(["--format", "qcow2"]).arg(&file);
            stand.running.push(serve(command, &front)?);
            stand.running.push(shown);
        }
        stand.running.push(backend);
        Ok(stand)
    }

    /// Serves clones of a template that is behind the delay. They are on the local drive.
    pub(super) fn of_clones(
        lab: &Lab,
        way: Way,
        delay_ms: u64,
        disk: &Disk<'_>,
        clones: usize,
    ) -> Result<Self> {
        let place = Place::new(lab, &format!("clones-{}-{delay_ms}", way.title()))?;
        let mut stand = Self::new(lab, way, delay_ms, &place);
        let (back, front) = (place.path("back"), place.path("front"));
        let backend = serve(nbdkit(&back, &["delay"], disk.raw, delay_ms), &back)?;
        let clone = |number: usize| place.path(&format!("clone-{number}"));
        if way == Way::Qemu {
            for number in 0..clones {
                let mut create = Command::new("qemu-img");
                create
                    .args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &uri(&back)])
                    .arg(clone(number));
                programs::run(&mut create)?;
                let front = place.path(&format!("front-{number}"));
                let image = clone(number).display().to_string();
                stand.running.push(serve(qemu_nbd(&front, "qcow2", &image), &front)?);
                stand.doors.push((front, String::new()));
            }
        } else {
            let (file, shown) = show(place.path("file"), &back)?;
            let mut command = stand.steered(place.vellum(lab, way, disk.flash_bytes)?, &place);
            command.arg("--allow-dir").arg(&place.dir);
            for number in 0..clones {
                let mut create = Command::new(&lab.vellum.path);
                create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(&file);
                programs::run(create.arg(clone(number)))?;
                command.arg("--export").arg(format!("c{number}={}", clone(number).display()));
                stand.doors.push((front.clone(), format!("c{number}")));
            }
            stand.running.push(serve(command, &front)?);
            stand.running.push(shown);
        }
        stand.running.push(backend);
        Ok(stand)
    }

    fn new(lab: &Lab, way: Way, delay_ms: u64, place: &Place) -> Self {
        let (doors, running, control) = (Vec::new(), Vec::new(), None);
        let (dir, vellum) = (place.dir.clone(), lab.vellum.path.clone());
        Self { way, delay_ms, doors, control, dir, vellum, running }
    }

    fn steered(&mut self, mut command: Command, place: &Place) -> Command {
        if self.way == Way::Cached {
            let control = place.path("control");
            command.arg("--control").arg(&control);
            self.control = Some(control);
        }
        command
    }

    /// What the cache has counted, where there is one that counts.
    pub(super) fn counts(&self) -> Result<Option<Counts>> {
        let Some(control) = &self.control else { return Ok(None) };
        let mut command = Command::new(&self.vellum);
        command.args(["stats", "--output", "json", "--control"]).arg(control).stdin(Stdio::null());
        let output = command.output().context(|| format!("can't run {command:?}"))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(Error::invalid(format!("{command:?} failed: {said}")));
        }
        let stats: Value = serde_json::from_slice(&output.stdout)
            .map_err(|error| Error::corrupt(format!("{command:?} has another form: {error}")))?;
        Ok(Some(Counts::read(&stats)))
    }

    /// Ends all programs in order; a cache writes home what home lacks.
    pub(super) fn stop(self) -> Result<()> {
        let mut running = self.running.into_iter();
        running.next().map_or(Ok(()), Running::stop)?;
        running.for_each(drop);
        Ok(())
    }
}

/// What is served, and how large the cache is.
pub(super) struct Disk<'a> {
    pub(super) raw: &'a Path,
    pub(super) full: &'a Path,
    pub(super) flash_bytes: u64,
}

/// The directory of a stand.
struct Place {
    dir: PathBuf,
}

impl Place {
    fn new(lab: &Lab, name: &str) -> Result<Self> {
        let dir = lab.dir.join(name.replace(' ', "-"));
        fs::create_dir(&dir).context(|| format!("can't make {}", dir.display()))?;
        Ok(Self { dir })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// `vellum serve`, with a new cache or without.
    fn vellum(&self, lab: &Lab, way: Way, flash_bytes: u64) -> Result<Command> {
        let mut command = Command::new(&lab.vellum.path);
        command
            .args(["serve", "-q", "--direct", "--nbd"])
            .arg(format!("unix:{}", self.path("front").display()));
        command.args(&lab.vellum.arguments);
        if way == Way::Cached {
            let flash = self.path("flash");
            let mut create = Command::new(&lab.vellum.path);
            create.args(["flash", "create", "-q"]).arg(&flash).arg(flash_bytes.to_string());
            programs::run(&mut create)?;
            command.arg("--flash").arg(flash);
        }
        Ok(command)
    }
}

fn uri(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", socket.display())
}

fn serve(command: Command, socket: &Path) -> Result<Running> {
    Running::start_until(command, socket, || std::os::unix::net::UnixStream::connect(socket).is_ok())
}

pub(in crate::commands) fn nbdkit(socket: &Path, filters: &[&str], file: &Path, delay_ms: u64) -> Command {
    let mut command = Command::new("nbdkit");
    command.args(["--foreground", "--exit-with-parent", "--threads", "64", "--unix"]).arg(socket);
    command.args(filters.iter().map(|filter| format!("--filter={filter}"))).arg("file").arg(file);
    command.arg(format!("rdelay={delay_ms}ms")).arg(format!("wdelay={delay_ms}ms"));
    command
}

fn qemu_nbd(socket: &Path, format: &str, image: &str) -> Command {
    let mut command = Command::new("qemu-nbd");
    command.args(["--persistent", "--shared=16", "--cache=none", "--aio=io_uring", "--format", format]);
    command.arg("--socket").arg(socket).arg(image);
    command
}

/// The export as this file.
pub(in crate::commands) fn show(file: PathBuf, back: &Path) -> Result<(PathBuf, Running)> {
    fs::File::create(&file).context(|| format!("can't make {}", file.display()))?;
    let mut command = Command::new("nbdfuse");
    command.arg(&file).arg(uri(back));
    let is_there = || fs::metadata(&file).is_ok_and(|facts| facts.len() > 0);
    let running = Running::start_until(command, &file, is_there)?;
    Ok((file, running))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_clones_share_is_counted_once() {
        let disk = json!({
            "flash": {
                "disk": { "hits": 1, "misses": 6, "write-bytes": 4096 },
                "below": { "hits": 10, "misses": 2, "admit-bytes": 8192 }
            },
            "guest": { "bytes-written": 4096, "flushes": 2 }
        });
        let stats = json!({ "disks": [disk, disk], "flash": { "flushes": 3, "record-bytes": 512, "slice-bytes": 4096 } });
        let counts = Counts::read(&stats);
        assert_eq!((counts.hits, counts.misses), (12, 2));
        assert_eq!((counts.guest_flushes, counts.flushes), (4, 3));
        assert_eq!(counts.flash_bytes(), 2 * 4096 + 8192 + 512 + 4096);
        assert_eq!(counts.since(&counts).flash_bytes(), 0);
    }
}
