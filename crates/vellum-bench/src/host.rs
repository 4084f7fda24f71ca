//! What the machine reports about itself and its processes: CPU time, the kernel, and what a directory lies
//! on.

use std::fs;
use std::ops::Sub;
use std::path::Path;

use vellum_core::{Context, Error, Result};

/// What was taken of the processors since they were started, in seconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Usage {
    /// By the server's process.
    pub(crate) server: f64,
    /// By this one.
    pub(crate) client: f64,
    /// By everybody.
    all: f64,
}

impl Usage {
    /// The kernel's current values.
    pub(crate) fn now(server: u32) -> Result<Self> {
        let text = fs::read_to_string("/proc/stat").context(|| "can't read /proc/stat")?;
        let all = busy_ticks(&text).ok_or_else(|| Error::corrupt("/proc/stat has another form"))?;
        Ok(Self { server: cpu_seconds(server)?, client: cpu_seconds(std::process::id())?, all: seconds(all) })
    }

    /// By neither the server nor the client; never less than nothing, as the three are read one after the
    /// other.
    pub(crate) fn others(&self) -> f64 {
        (self.all - self.server - self.client).max(0.0)
    }
}

impl Sub for Usage {
    type Output = Self;
    fn sub(self, earlier: Self) -> Self {
        Self {
            server: self.server - earlier.server,
            client: self.client - earlier.client,
            all: self.all - earlier.all,
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "ticks are far below 2^53")]
fn seconds(ticks: u64) -> f64 {
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

/// User and system time of a process with all its threads, those of the kernel that work for its ring
/// included.
pub(crate) fn cpu_seconds(pid: u32) -> Result<f64> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).context(|| format!("can't read {path}: has the server ended?"))?;
    let ticks = process_ticks(&text, 14).ok_or_else(|| Error::corrupt(format!("{path} has another form")))?;
    Ok(seconds(ticks))
}

/// The processor time of all programs that this one has started, and that have ended.
pub(crate) fn cpu_seconds_of_ended() -> Result<f64> {
    let path = "/proc/self/stat";
    let text = fs::read_to_string(path).context(|| format!("can't read {path}"))?;
    let ticks = process_ticks(&text, 16).ok_or_else(|| Error::corrupt(format!("{path} has another form")))?;
    Ok(seconds(ticks))
}

/// Two fields, counted from one: 14 and 15 are the process's own time, 16 and 17 its children's. The second
/// field is the name, in parentheses, and may hold anything.
fn process_ticks(stat: &str, first: usize) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ').skip(first - 3);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// user, nice, system, (idle, iowait,) irq, softirq. Time that the hypervisor took is not included.
fn busy_ticks(stat: &str) -> Option<u64> {
    let fields: Option<Vec<u64>> =
        stat.lines().next()?.split_whitespace().skip(1).map(|field| field.parse().ok()).collect();
    match fields?[..] {
        [user, nice, system, _, _, irq, softirq, ..] => Some(user + nice + system + irq + softirq),
        _ => None,
    }
}

/// The machine, for a report.
#[derive(Debug, Clone, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Machine {
    /// The kernel's release.
    pub(crate) kernel: String,
    /// Processors that may be used.
    pub(crate) processors: usize,
    /// What the images lie on.
    pub(crate) medium: String,
}

impl Machine {
    /// This machine, with images in `dir`.
    pub(crate) fn with(dir: &Path) -> Self {
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
        let medium = mount_of(&mounts, &dir)
            .map_or_else(|| "unknown".to_owned(), |(kind, source)| medium(&kind, &source));
        Self { kernel, processors: std::thread::available_parallelism().map_or(1, usize::from), medium }
    }
}

/// File system and source of the mount that holds the directory.
fn mount_of(mountinfo: &str, dir: &Path) -> Option<(String, String)> {
    let mounts = mountinfo.lines().filter_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let place = left.split(' ').nth(4)?;
        let mut right = right.split(' ');
        dir.starts_with(place).then_some((place.len(), right.next()?, right.next()?))
    });
    // The longest place is the nearest; of several mounts at one place the last one is on top.
    let (_, kind, source) = mounts.max_by_key(|(len, _, _)| *len)?;
    Some((kind.to_owned(), source.to_owned()))
}

fn medium(kind: &str, source: &str) -> String {
    match source.strip_prefix("/dev/") {
        Some(device) if device.starts_with("loop") => format!("{kind} on a loop device"),
        Some(device) => format!("{kind} on {device}"),
        None => kind.to_owned(),
    }
}

/// Memory of a process that is there, in bytes.
pub(crate) fn resident(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let text = fs::read_to_string(&path).context(|| format!("can't read {path}: has the server ended?"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| Error::corrupt(format!("{path} has another form")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_of_a_process_with_an_awkward_name() {
        let stat = "77 (a ) b) S 1 2 3 4 5 6 7 8 9 10 250 50 7 8 20 0 1 0";
        assert_eq!(process_ticks(stat, 14), Some(300));
        assert_eq!(process_ticks("77 (x", 14), None);
        assert!(cpu_seconds(std::process::id()).unwrap() >= 0.0);
    }

    #[test]
    fn idle_and_waiting_processors_are_not_busy() {
        assert_eq!(busy_ticks("cpu  100 20 30 4000 500 6 7 8 0 0\ncpu0 1"), Some(163));
        let usage = Usage::now(std::process::id()).unwrap();
        assert!(usage.all > 0.0);
    }

    #[test]
    fn the_nearest_mount_is_the_medium() {
        let mounts = "1 0 254:0 / / rw - ext4 /dev/vda rw\n\
                      2 1 0:5 / /dev/shm rw,relatime shared:2 - tmpfs tmpfs rw\n\
                      3 1 7:0 / /mnt rw - xfs /dev/loop3 rw";
        let of = |dir: &str| {
            mount_of(mounts, Path::new(dir)).map(|(kind, source)| medium(&kind, &source)).unwrap()
        };
        assert_eq!(of("/srv/me"), "ext4 on vda");
        assert_eq!(of("/dev/shm/x"), "tmpfs");
        assert_eq!(of("/mnt"), "xfs on a loop device");
    }
}
