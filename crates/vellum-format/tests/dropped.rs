//! A write that is dropped while it waits for space, beside another one that needs a part of the same cell.
//!
//! ```text
//!   A  claims the end of one cell and the start of the next ─ allocates both ─ the file grows ── dropped
//!   B             claims another part of the next cell ─ waits for A's allocation ──────────────► answered
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use event_listener::Event;
use futures_lite::future::{block_on, poll_once};
use vellum_core::{
    Buffer, ErrorKind, GuestOffset, LocalFuture, MemoryStorage, Result, SharedDisk, SharedStorage, Storage,
    WriteFlags,
};
use vellum_format::native::{self, Native};
use vellum_format::qcow2::{self, Files, Header, Qcow2};
use vellum_sim::{ForwardStorage, Forwarding};

const SIZE: u64 = 64 << 20;
const KIB: u64 = 1 << 10;

/// A storage that can be kept from growing.
struct Kept {
    inner: Arc<MemoryStorage>,
    is_kept: AtomicBool,
    freed: Event,
}

impl Kept {
    fn keep(&self, is_kept: bool) {
        self.is_kept.store(is_kept, Ordering::SeqCst);
        self.freed.notify(usize::MAX);
    }
}

impl ForwardStorage for Kept {
    fn inner(&self) -> &dyn Storage {
        &*self.inner
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            loop {
                let freed = self.freed.listen();
                if !self.is_kept.load(Ordering::SeqCst) {
                    return self.inner.set_len(len).await;
                }
                freed.await;
            }
        })
    }
}

fn write(disk: &SharedDisk, at: u64, byte: u8) -> LocalFuture<'_, Result<()>> {
    let data = Buffer::copy_of(&vec![byte; 8192]);
    disk.write(GuestOffset::new(at), data, WriteFlags::default())
}

/// What B is answered.
fn beside_a_dropped_write(disk: &SharedDisk, storage: &Kept, cell: u64) -> Result<()> {
    block_on(write(disk, 0, 1)).unwrap();
    storage.keep(true);
    let waits = (1..SIZE / cell - 1).find_map(|number| {
        let end = number * cell;
        let mut dropped = write(disk, end - 4096, 2);
        block_on(poll_once(&mut dropped)).is_none().then_some((end, dropped))
    });
    let (end, dropped) = waits.expect("the file must grow at some time");
    let mut beside = write(disk, end + 32 * KIB, 3);
    assert!(block_on(poll_once(&mut beside)).is_none(), "the file does not grow");
    drop(dropped);
    storage.keep(false);
    block_on(poll_once(&mut beside)).expect("it waits for nobody")?;
    let read = block_on(disk.read(GuestOffset::new(end + 32 * KIB), Buffer::zeroed(512))).unwrap();
    assert!(read.to_vec().iter().all(|byte| *byte == 3));
    Ok(())
}

fn kept() -> Arc<Forwarding<Kept>> {
    let inner = MemoryStorage::new("image");
    Forwarding::new(Kept { inner, is_kept: AtomicBool::new(false), freed: Event::new() })
}

#[test]
fn qcow2_writes_beside_a_dropped_one() {
    let options = qcow2::CreateOptions {
        size: SIZE,
        cluster_size: 128 * KIB,
        extended_l2: true,
        ..qcow2::CreateOptions::without_journal()
    };
    let storage = kept();
    let image: SharedStorage = storage.clone();
    let disk = block_on(async {
        qcow2::create(&*image, None, &options).await.unwrap();
        let header = Header::read(&*image).await.unwrap();
        let files = Files { image, data_file: None, below: None };
        Qcow2::open(header, files, qcow2::OpenOptions::default()).await.unwrap() as SharedDisk
    });
    beside_a_dropped_write(&disk, &storage, 128 * KIB).unwrap();
}

#[test]
fn a_native_image_that_stops_says_so_beside_a_dropped_write() {
    let options = native::CreateOptions {
        size: SIZE,
        has_table: true,
        unit_size: Some(64 * KIB),
        ..native::CreateOptions::default()
    };
    let storage = kept();
    let image: SharedStorage = storage.clone();
    let disk = block_on(async {
        native::create(&*image, &options).await.unwrap();
        Native::open(image, None, native::OpenOptions::default()).await.unwrap() as SharedDisk
    });
    let error = beside_a_dropped_write(&disk, &storage, 64 * KIB).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Poisoned);
}
