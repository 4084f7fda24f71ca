//! A disk that knows only little at a time: one answer about a chain does not ask it without end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, Extent, Geometry, GuestOffset, GuestSpan, LocalFuture, MemoryDisk, Place, Result,
    SharedDisk, WriteFlags, ZeroFlags, map_merged,
};

const SECTOR: u64 = 512;

/// Zeros, of which it tells a sector at a time; and how often it was asked.
struct Little(SharedDisk, Arc<AtomicU64>);

impl Disk for Little {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.0.read(at, buffer)
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.0.write(at, data, flags)
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.0.flush()
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        self.0.write_zeroes(span, flags)
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.0.discard(span, flags)
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.1.fetch_add(1, Ordering::Relaxed);
        let (span, _) = span.split_at(SECTOR.min(span.len()));
        Box::pin(std::future::ready(Ok(vec![Extent { span, place: Place::Zero { allocated: false } }])))
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.0.close()
    }
}

#[test]
fn one_answer_asks_a_disk_that_knows_little_only_so_often() {
    let (sectors, asked) = (20_000, Arc::<AtomicU64>::default());
    let disk: SharedDisk = Arc::new(Little(MemoryDisk::new(sectors * SECTOR), asked.clone()));
    let end = GuestOffset::new(sectors * SECTOR);
    let (mut at, mut answers) = (GuestOffset::new(0), 0);
    while at < end {
        let before = asked.load(Ordering::Relaxed);
        let extents = block_on(map_merged(&disk, GuestSpan::between(at, end))).expect("a map");
        assert_eq!((extents.len(), extents[0].span.start()), (1, at));
        at = extents[0].span.end();
        answers += 1;
        let asked_now = asked.load(Ordering::Relaxed) - before;
        assert!(asked_now <= 4096, "{asked_now} for one answer");
    }
    assert_eq!((asked.load(Ordering::Relaxed), answers), (sectors, 5));
}
