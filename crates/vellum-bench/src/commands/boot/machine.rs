//! The virtual machine: QEMU without hardware acceleration, its disk over NBD.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use vellum_core::{Context, Error, Result};

use super::system::{System, UP};

/// A guest that prints nothing for longer hangs.
const PATIENCE: Duration = Duration::from_secs(300);
/// How many lines of the console an error has.
const LAST_LINES: usize = 12;

/// QEMU, which does not outlive this.
struct Qemu(Child);

impl Drop for Qemu {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Boots the system from the disk at this socket, under this name. Returns the time from the start of QEMU until the guest says that it is up. The
/// machine is off then.
pub(crate) fn boot(system: &System, socket: &Path, export: &str) -> Result<Duration> {
    let log = socket.with_extension("qemu");
    let complaints = fs::File::create(&log).context(|| format!("can't make {}", log.display()))?;
    let disk = json!({ "driver": "nbd", "node-name": "disk", "discard": "unmap", "export": export,
        "server": { "type": "unix", "path": socket.to_string_lossy() } });
    let mut command = Command::new("qemu-system-x86_64");
    command
        .args(["-nodefaults", "-no-user-config", "-accel", "tcg", "-display", "none", "-serial", "stdio"])
        .args(["-m", "512", "-no-reboot", "-device", "virtio-blk-pci,drive=disk", "-blockdev"])
        .arg(disk.to_string())
        .arg("-kernel")
        .arg(&system.kernel)
        .arg("-initrd")
        .arg(&system.initramfs)
        .args([
            "-append",
            "root=/dev/vda rw console=ttyS0 panic=-1 nosoftlockup no_timer_check rcupdate.rcu_cpu_stall_suppress=1",
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(complaints);
    let began = Instant::now();
    let mut qemu = Qemu(command.spawn().context(|| "can't start qemu-system-x86_64")?);
    let console = qemu.0.stdout.take().expect("it was asked for");
    let (read, lines) = channel();
    thread::spawn(move || {
        for line in BufReader::new(console).split(b'\n').map_while(std::result::Result::ok) {
            drop(read.send((Instant::now(), String::from_utf8_lossy(&line).into_owned())));
        }
    });
    let (mut up, mut said) = (None, Vec::new());
    loop {
        match lines.recv_timeout(PATIENCE) {
            Ok((at, line)) => {
                if up.is_none() && line.contains(UP) {
                    up = Some(at);
                }
                said.push(line);
            }
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => return Err(Error::invalid("the guest hangs")),
        }
    }
    let status = qemu.0.wait().context(|| "can't ask for QEMU")?;
    let complains = said.iter().find(|line| line.contains("I/O error") || line.contains("EXT4-fs error"));
    match (up, complains) {
        (Some(up), None) if status.success() => Ok(up.saturating_duration_since(began)),
        _ => {
            let last = said[said.len().saturating_sub(LAST_LINES)..].join("\n");
            let complaints = fs::read_to_string(&log).unwrap_or_default();
            Err(Error::invalid(format!("the guest did not boot: QEMU: {status} {complaints}\n{last}")))
        }
    }
}
