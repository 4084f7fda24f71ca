//! What a server says of itself: where its disks are when it is ready, and what they have done when it ends.

use vellum_daemon::stats::DiskStats;
use vellum_daemon::{Address, ReadyDisk};

use crate::log::note;
use crate::output::human_bytes;

/// One line per export, with the URI that clients take.
pub(super) fn announce(scheme: &str, address: &Address, names: &[String]) {
    for name in names {
        let uri = match address {
            Address::Unix(path) => format!("{scheme}+unix:///{name}?socket={}", path.display()),
            Address::Tcp { .. } => format!("{scheme}://{address}/{name}"),
        };
        note(&format!("serving {uri}"));
    }
}

/// What is served there.
pub(super) fn introduction(disk: &ReadyDisk) -> String {
    let access = if disk.read_only { "read-only" } else { "writable" };
    format!("  {}: {}, {}, {access}", disk.image.display(), disk.format, human_bytes(disk.size))
}

pub(super) fn summary(disk: &DiskStats) -> String {
    let guest = &disk.guest;
    let host = [&disk.host.data, &disk.host.metadata, &disk.host.checkpoint, &disk.host.prealloc];
    format!(
        "{}: closed; guest: reads {}, writes {} ({}), flushes {}; host: writes {} ({}), flushes {}",
        disk.image,
        guest.reads,
        guest.writes,
        human_bytes(guest.bytes_written),
        guest.flushes,
        host.iter().map(|part| part.writes).sum::<u64>(),
        human_bytes(host.iter().map(|part| part.bytes_written).sum()),
        host.iter().map(|part| part.flushes).sum::<u64>()
    )
}
