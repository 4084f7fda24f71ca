//! A disk of which snapshots are made and deleted by who explores it: a discard of 64 KiB asks for that instead.

use std::sync::Arc;

use vellum_core::{
    Buffer, Disk, Extent, Geometry, GuestOffset, GuestSpan, LocalFuture, Result, SharedDisk, SharedStorage,
    WriteFlags, ZeroFlags,
};
use vellum_format::native::snapshots::snapshots;
use vellum_format::native::{Native, OpenOptions};

/// What asks for a snapshot, or for one less.
const ASKS: u64 = 64 << 10;

/// The disk. Each snapshot is called after what the disk had then: so that it can be held against it.
pub(crate) struct Snapped(Arc<Native>);

impl Snapped {
    pub(crate) fn shared(inner: Arc<Native>) -> SharedDisk {
        Arc::new(Self(inner))
    }

    /// At the beginning of the disk one is made; elsewhere the oldest one is deleted.
    async fn ask(&self, at: GuestOffset) -> Result<()> {
        let all = self.0.snapshots()?;
        if at != GuestOffset::ZERO {
            return match all.first() {
                Some(oldest) => self.0.snapshot_delete(&oldest.id.to_string()).await,
                None => Ok(()),
            };
        }
        // What is not flushed may be lost by the crash that leaves a snapshot that nobody was told of.
        self.0.flush().await?;
        let name = format!("{:08x} {}", sum(&*self.0).await?, all.last().map_or(0, |newest| newest.id));
        self.0.snapshot_create(&name, 0).await.map(drop)
    }
}

async fn sum(disk: &dyn Disk) -> Result<u32> {
    let len = usize::try_from(disk.geometry().size).expect("a small disk");
    let bytes = disk.read(GuestOffset::ZERO, Buffer::zeroed(len)).await?;
    Ok(bytes.pieces().fold(0, crc32c::crc32c_append))
}

/// Whether each snapshot of a closed image has what it is called after.
pub(crate) async fn verify(image: &SharedStorage, below: Option<SharedDisk>) -> Result<(), String> {
    let all = snapshots(image).await.map_err(|error| error.chain())?;
    for snapshot in all {
        let options = OpenOptions { snapshot: Some(snapshot.id.to_string()), ..OpenOptions::default() };
        let disk = Native::open(image.clone(), below.clone(), options).await;
        let disk = disk.map_err(|error| format!("snapshot {}: {}", snapshot.id, error.chain()))?;
        let sum =
            sum(&*disk).await.map_err(|error| format!("snapshot {}: {}", snapshot.id, error.chain()))?;
        if !snapshot.name.starts_with(&format!("{sum:08x} ")) {
            return Err(format!("snapshot {} ({}) has changed: {sum:08x}", snapshot.id, snapshot.name));
        }
    }
    Ok(())
}

impl Disk for Snapped {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.0.below()
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
        match span.len() {
            ASKS => Box::pin(self.ask(span.start())),
            _ => self.0.discard(span, flags),
        }
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.0.map(span)
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.0.close()
    }
}
