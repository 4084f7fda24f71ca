//! Requests of one kind to an open disk, as many and as fast as asked for: what a disk of this host can do.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use vellum_core::{
    Buffer, Context, Error, ErrorKind, GuestOffset, LocalFuture, Result, SharedDisk, WriteFlags,
};
use vellum_io::clock;

/// What is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// How many requests.
    pub count: u64,
    /// How many at once, at least one.
    pub depth: usize,
    /// Bytes of each.
    pub bytes: usize,
    /// Where the first begins.
    pub start: u64,
    /// How far the next begins from the one before. At the end of the disk it goes on at its start.
    pub step: u64,
    /// Write this byte, instead of reading.
    pub pattern: Option<u8>,
    /// Flush after this many requests.
    pub flush_every: Option<u64>,
    /// A flush is begun only when the requests before it have ended, and the next request only after the flush.
    pub drains: bool,
}

/// Sends the requests. Returns how long they took.
///
/// # Errors
/// `Invalid` when a request is larger than the disk, `Closed` when it was stopped, and what the requests say.
pub async fn bench(disk: &SharedDisk, load: Load, stop: &AtomicBool) -> Result<Duration> {
    let size = disk.geometry().size;
    if load.bytes == 0 || load.bytes as u64 > size {
        return Err(Error::invalid(format!(
            "a request of {} bytes does not fit a disk of {size} bytes",
            load.bytes
        )));
    }
    let clock = clock();
    let begun = clock.now();
    let mut at = load.start % size;
    let mut running: FuturesUnordered<LocalFuture<'_, Result<()>>> = FuturesUnordered::new();
    let mut first_error = None;
    let mut sent = 0;
    while sent < load.count && first_error.is_none() {
        if stop.load(Ordering::Relaxed) {
            first_error = Some(Error::new(ErrorKind::Closed, "stopped by a signal"));
            break;
        }
        // A request never goes beyond the end.
        if at + load.bytes as u64 > size {
            at = 0;
        }
        running.push(request(disk, GuestOffset::new(at), load));
        at = (at + load.step) % size;
        sent += 1;
        if load.flush_every.is_some_and(|every| sent % every == 0) {
            match load.drains {
                true => {
                    first_error = finish(&mut running, 0).await.or(first_error);
                    first_error = disk.flush().await.err().or(first_error);
                }
                false => running.push(disk.flush()),
            }
        }
        first_error = finish(&mut running, load.depth.max(1) - 1).await.or(first_error);
    }
    first_error = finish(&mut running, 0).await.or(first_error);
    let took = clock.now().saturating_sub(begun);
    match first_error {
        None => Ok(took),
        Some(error) => Err(error),
    }
}

fn request(disk: &SharedDisk, at: GuestOffset, load: Load) -> LocalFuture<'_, Result<()>> {
    let context = move || {
        format!(
            "can't {} {} bytes at {at}",
            if load.pattern.is_some() { "write" } else { "read" },
            load.bytes
        )
    };
    match load.pattern {
        None => Box::pin(async move {
            disk.read(at, Buffer::for_overwrite(load.bytes)).await.context(context).map(drop)
        }),
        Some(pattern) => Box::pin(async move {
            let mut data = Buffer::for_overwrite(load.bytes);
            data.fill(pattern);
            disk.write(at, data, WriteFlags::default()).await.context(context)
        }),
    }
}

/// Waits until no more than `left` are running. The first error of those that end.
async fn finish(running: &mut FuturesUnordered<LocalFuture<'_, Result<()>>>, left: usize) -> Option<Error> {
    let mut first = None;
    while running.len() > left {
        let Some(result) = running.next().await else { break };
        first = first.or(result.err());
    }
    first
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use vellum_core::{CheckedDisk, MemoryDisk};

    use super::*;

    const LOAD: Load = Load {
        count: 100,
        depth: 7,
        bytes: 4096,
        start: 0,
        step: 4096,
        pattern: None,
        flush_every: None,
        drains: true,
    };

    #[test]
    fn as_many_requests_are_sent_as_were_asked_for() {
        let stop = AtomicBool::new(false);
        for (load, [reads, writes, flushes]) in [
            (LOAD, [100, 0, 0]),
            (Load { pattern: Some(7), ..LOAD }, [0, 100, 0]),
            (Load { pattern: Some(7), flush_every: Some(10), ..LOAD }, [0, 100, 10]),
            (Load { pattern: Some(7), flush_every: Some(7), drains: false, ..LOAD }, [0, 100, 14]),
            (Load { count: 0, ..LOAD }, [0, 0, 0]),
        ] {
            let disk = CheckedDisk::new(MemoryDisk::new((64 << 10) + 100));
            let shared: SharedDisk = disk.clone();
            block_on(bench(&shared, load, &stop)).unwrap();
            let counts = disk.counts();
            assert_eq!([counts.reads, counts.writes, counts.flushes], [reads, writes, flushes], "{load:?}");
        }
        let disk: SharedDisk = MemoryDisk::new(4095);
        assert!(block_on(bench(&disk, LOAD, &stop)).is_err());
    }
}
