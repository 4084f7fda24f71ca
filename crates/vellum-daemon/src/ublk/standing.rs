//! A device that exists already under the wanted number, and what becomes of it.
//!
//! ```text
//!   look   nothing ─────────────────────────────────────────────► the device is added
//!          another's, or one that is served: refused
//!          left by a dead server of ours ──► clear ─────────────► the device is added
//!          waiting for a server of this disk ──► take_over ─────► goes on
//! ```
//!
//! 1. The examination changes nothing, so that all devices of a server can be examined before one is changed.
//! 2. A device that waits is taken over only by a server of the same image that keeps its devices.
//! 3. For the device of a server that has exited the wait is longer than for that of a live one: the kernel
//!    may take its time to notice.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use futures_lite::future::or;
use vellum_core::{Error, ErrorKind, Result};
use vellum_export::ublk::{Facts, REQUEST_BYTES_MAX};
use vellum_io::ublk::{Device, Shape, State};
use vellum_io::{clock, unblock};

use super::{FREE_WITHIN, Handle, LOOKED_EVERY, path_of};

/// What is written at our devices: in the upper bits which program, in the lower ones which disk.
const MARK: u64 = 0x564C << MARK_SHIFT;
const MARK_SHIFT: u32 = 48;

/// How long to wait when the server is known to have exited. A kernel that has none of its commands left to
/// cancel notices its death with a timer, after 30 seconds. Also the time after which the wait is logged.
const LET_GO_WITHIN: Duration = Duration::from_secs(60);
const SAID_AFTER: Duration = Duration::from_secs(1);

/// Why a number is not free.
const STILL_USED: &str = "a previous device with this number is still in use, for example by a mounted file system; \
 end that use, or choose another number";

/// The mark of a device that shows this image: the file, under this path, and which snapshot in it. What
/// changes when a file system is mounted again, or a drive found again, is no part of it.
pub(super) async fn mark_of(image: &Path, snapshot: Option<&str>) -> u64 {
    let (image, snapshot) = (image.to_owned(), snapshot.map(str::to_owned));
    let (path, file) = unblock(move || {
        let file = image.metadata().ok().filter(|facts| !facts.file_type().is_block_device());
        let path = match file {
            Some(_) => image.canonicalize(),
            None => std::path::absolute(&image),
        };
        (path.unwrap_or(image), file.map_or(0, |facts| facts.ino()))
    })
    .await;
    let path = path.as_os_str().as_bytes();
    let snapshot = snapshot.as_deref().map_or(&b""[..], str::as_bytes);
    let words: [&[u8]; 4] = [path, &[0], snapshot, &file.to_le_bytes()];
    // FNV-1a: it is the same in every build, and there is nothing to gain from another image with the same
    // sum.
    let sum = words.into_iter().flatten().fold(0xCBF2_9CE4_8422_2325, |sum: u64, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3)
    });
    MARK | sum >> (u64::BITS - MARK_SHIFT)
}

/// What is there under a number.
#[derive(Clone, Copy)]
pub(super) enum Found {
    /// Nothing.
    Nothing,
    /// What a dead server of ours left, which is to be removed.
    Left,
    /// A device that is to be taken over: its shape, its last server, and its size in sectors.
    Waiting { shape: Shape, pid: i32, sectors: u64 },
}

fn used(number: u32, who: &str) -> Error {
    Error::new(ErrorKind::Locked, format!("can't create {}: {who}", path_of(number).display()))
}

/// Examines the device under this number without changing anything. A server that was killed a moment ago may
/// still be exiting. A device that waits for the next server of this disk is taken over by one that keeps its
/// devices, if it agrees with the facts.
pub(super) async fn look(
    control: &Handle,
    number: u32,
    mark: u64,
    keeps: bool,
    facts: &Facts,
) -> Result<Found> {
    let mut leaving = Leaving::begin();
    while let Some(standing) = control.call(move |control| control.look(number)).await? {
        if standing.mark >> MARK_SHIFT != MARK >> MARK_SHIFT {
            return Err(used(number, "another program has a ublk device with this number"));
        }
        match standing.state {
            State::Live => {
                if !leaving.goes_on(number, standing.pid).await {
                    return Err(used(
                        number,
                        &format!("process {} serves a disk under this number", standing.pid),
                    ));
                }
            }
            State::Dead => return Ok(Found::Left),
            State::Waiting if standing.mark != mark => {
                return Err(used(number, "the device with this number was kept for another image"));
            }
            State::Waiting if !keeps => return Ok(Found::Left),
            State::Waiting => {
                let (sectors, read_only) = control.call(move |control| control.size(number)).await?;
                // The disk may have been enlarged by a server whose kernel could not be notified.
                if sectors > facts.sectors
                    || read_only != facts.read_only
                    || standing.shape.request_bytes_max > REQUEST_BYTES_MAX
                {
                    return Err(used(
                        number,
                        "the device that was kept under this number does not match this disk; start without --ublk-keep to remove it",
                    ));
                }
                return Ok(Found::Waiting { shape: standing.shape, pid: standing.pid, sectors });
            }
        }
    }
    Ok(Found::Nothing)
}

/// Removes what a dead server of ours left under this number.
pub(super) async fn clear(control: &Handle, number: u32) -> Result<()> {
    let mut leaving = Leaving::begin();
    // It is open in no other process, neither one that is about to start it nor one that is exiting.
    while let Err(error) = unblock(move || Device::open(number)).await {
        if error.kind() == ErrorKind::NotFound {
            return Err(used(number, STILL_USED));
        }
        let standing = control.call(move |control| control.look(number)).await?;
        let Some(standing) = standing else { return Ok(()) };
        if !leaving.goes_on(number, standing.pid).await {
            return Err(error.context(format!("can't create {}", path_of(number).display())));
        }
    }
    tracing::info!(
        "{} was left behind by a server that has exited, and is removed",
        path_of(number).display()
    );
    control.call(move |control| control.stop(number)).await?;
    match remove(control, number, FREE_WITHIN).await {
        Some(removed) => removed,
        None => Err(used(number, STILL_USED)),
    }
}

/// Removes a device; `None` when it is still in use, and the kernel waits for that. Then `control` waits too.
pub(super) async fn remove(control: &Handle, number: u32, within: Duration) -> Option<Result<()>> {
    let removed = async { Some(control.call(move |control| control.remove(number)).await) };
    let patience = async {
        clock().sleep(within).await;
        None
    };
    or(removed, patience).await
}

/// Takes over a device that waits. Its last server may still be on its way out.
pub(super) async fn take_over(control: &Handle, number: u32, pid: i32) -> Result<()> {
    let mut leaving = Leaving::begin();
    while !control.call(move |control| control.take_over(number)).await? {
        if !leaving.goes_on(number, pid).await {
            return Err(used(number, "another process has it open"));
        }
    }
    tracing::info!("{} was kept by its last server, and is served again", path_of(number).display());
    Ok(())
}

/// The wait for a device's last server to exit.
struct Leaving {
    begun: Duration,
    is_said: bool,
}

impl Leaving {
    fn begin() -> Self {
        Self { begun: clock().now(), is_said: false }
    }

    /// Waits a moment. False when that makes no sense any more: it lives, or the kernel takes too long.
    async fn goes_on(&mut self, number: u32, pid: i32) -> bool {
        let waited = clock().now() - self.begun;
        // Where process ids start anew, as in a container, it may have had our own; and this process serves
        // nothing yet at this point.
        let has_gone =
            pid > 0 && (pid.cast_unsigned() == std::process::id() || !unblock(move || is_alive(pid)).await);
        if waited > if has_gone { LET_GO_WITHIN } else { FREE_WITHIN } {
            return false;
        }
        if has_gone && waited > SAID_AFTER && !self.is_said {
            self.is_said = true;
            let path = path_of(number);
            tracing::warn!(
                "process {pid}, which served {}, has exited, but the kernel has not released the device yet; this may take half a minute",
                path.display()
            );
        }
        clock().sleep(LOOKED_EVERY).await;
        true
    }
}

/// Whether there is such a process, and it has not ended. A zombie has ended.
fn is_alive(pid: i32) -> bool {
    // `PID (NAME) STATE ...`, and the name may be anything.
    let Ok(facts) = std::fs::read(format!("/proc/{pid}/stat")) else { return false };
    let name_end = facts.iter().rposition(|byte| *byte == b')');
    let state = name_end.and_then(|at| facts.get(at + 2));
    !matches!(state, Some(b'Z' | b'X'))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_that_nobody_has_waited_for_has_ended() {
        let pid = |number: u32| i32::try_from(number).expect("a process");
        assert!(is_alive(pid(std::process::id())));
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("it starts");
        let number = pid(child.id());
        assert!(is_alive(number));
        child.kill().expect("it is killed");
        while is_alive(number) {
            std::thread::yield_now();
        }
        child.wait().expect("it has ended");
        assert!(!is_alive(number) && !is_alive(-1));
    }
}
