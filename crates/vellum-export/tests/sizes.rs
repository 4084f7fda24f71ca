//! A disk that grows or shrinks while clients are connected: which size each client sees, and where requests
//! end.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use support::World;
use support::client::{Client, Wish};
use vellum_core::{
    Buffer, Disk, Error, Extent, Geometry, GuestOffset, GuestSpan, LocalFuture, MemoryDisk, Result,
    SharedDisk, WriteFlags, ZeroFlags,
};
use vellum_export::nbd::wire::option;

const OLD: u64 = 1 << 20;
const NEW: u64 = 3 << 20;

/// A disk of changing size, in front of one that is large enough.
struct Resized {
    inner: SharedDisk,
    size: AtomicU64,
}

impl Resized {
    fn new() -> Arc<Self> {
        Arc::new(Self { inner: MemoryDisk::new(NEW), size: AtomicU64::new(OLD) })
    }

    fn inside<'a, T: 'a>(
        &self,
        span: GuestSpan,
        future: LocalFuture<'a, Result<T>>,
    ) -> LocalFuture<'a, Result<T>> {
        match span.end().bytes() <= self.size.load(Ordering::Acquire) {
            true => future,
            false => Box::pin(async { Err(Error::invalid("past the end")) }),
        }
    }
}

impl Disk for Resized {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.size.load(Ordering::Acquire), ..self.inner.geometry() }
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.inside(at.span(buffer.len() as u64), self.inner.read(at, buffer))
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.inside(at.span(data.len() as u64), self.inner.write(at, data, flags))
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.flush()
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        self.inside(span, self.inner.write_zeroes(span, flags))
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.inside(span, self.inner.discard(span, flags))
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.inside(span, self.inner.map(span))
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.close()
    }
}

async fn can_reach(client: &mut Client, end: u64) {
    assert_eq!(client.write(0, end - 512, &[7; 512]).await.error, 0);
    assert_eq!(client.read(end - 512, 512).await, [7; 512]);
    for (command, errno) in [(0, 22), (4, 22), (5, 22), (6, 28), (7, 22)] {
        assert_eq!(client.ask(command, 0, end - 512, 513).await.error, errno, "command {command} past {end}");
        assert_eq!(client.ask(command, 0, end - 512, 512).await.error, 0, "command {command} up to {end}");
    }
    assert_eq!(client.write(0, end, &[7; 512]).await.error, 28);
}

#[test]
fn who_asks_sees_the_size_of_now_and_who_is_connected_may_use_it() {
    let disk = Resized::new();
    let world = World::new(disk.clone());
    world.run(async {
        let (mut old, _session) = world.connect();
        let told = old.begin(Wish::default()).await;
        assert_eq!(told.size, OLD);
        can_reach(&mut old, OLD).await;
        // One that has asked, and has not chosen yet.
        let (mut choosing, _session) = world.connect();
        choosing.greet().await;
        let asked = choosing.inform(option::INFO, "", &[]).await.expect("it is there");
        assert_eq!(asked.size, OLD);

        disk.size.store(NEW, Ordering::Release);
        let asked = choosing.inform(option::INFO, "", &[]).await.expect("it is there");
        assert_eq!(asked.size, NEW);
        let told = choosing.inform(option::GO, "", &[]).await.expect("it is there");
        assert_eq!(told.size, NEW);
        for extended in [false, true] {
            let (mut new, _session) = world.connect();
            assert_eq!(new.begin(Wish { extended, ..Wish::default() }).await.size, NEW);
            can_reach(&mut new, NEW).await;
        }
        can_reach(&mut old, NEW).await;

        disk.size.store(OLD, Ordering::Release);
        can_reach(&mut old, OLD).await;
        let (mut new, _session) = world.connect();
        assert_eq!(new.begin(Wish::default()).await.size, OLD);
    });
}
