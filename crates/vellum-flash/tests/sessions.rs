//! Whose blocks they are: an old cache, a copy of an image, an image that another program wrote, and openings that
//! are cut off between the row and the image.

mod common;
use vellum_flash as flash;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use common::cache_on;
use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, Error, ErrorKind, GuestOffset, Limits, LocalFuture, MemoryDisk, MemoryStorage, Result,
    SharedStorage, WriteFlags,
};
use vellum_flash::session::{CacheId, Session, SessionNumber, SessionState, Sessions};
use vellum_flash::{DiskOptions, FlashCache, FlashDisk, FlashPolicy};

/// An image: its bytes, and what its header says.
#[derive(Clone)]
struct Image {
    home: Arc<MemoryDisk>,
    header: Arc<Header>,
}

struct Header {
    cache: CacheId,
    session: Mutex<Option<Session>>,
    /// The next beginning is cut off: the image does not get the number.
    is_cut_off: Mutex<bool>,
}

impl Sessions for Header {
    fn session(&self) -> LocalFuture<'_, Option<Session>> {
        Box::pin(async { *self.session.lock().unwrap() })
    }

    fn begin(&self, number: SessionNumber, holds_writes: bool) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            if std::mem::take(&mut *self.is_cut_off.lock().unwrap()) {
                return Err(Error::new(ErrorKind::Io, "cut off"));
            }
            let state = if holds_writes { SessionState::HoldsWrites } else { SessionState::Clean };
            *self.session.lock().unwrap() = Some(Session { cache: self.cache, number, state });
            Ok(())
        })
    }

    fn clear_mark(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async {
            let mut session = self.session.lock().unwrap();
            session.as_mut().expect("it has one").state = SessionState::Clean;
            Ok(())
        })
    }

    fn end(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async {
            *self.session.lock().unwrap() = None;
            Ok(())
        })
    }
}

impl Image {
    fn new(value: u8) -> Self {
        let header = Header {
            cache: CacheId::new(common::ID).unwrap(),
            session: Mutex::default(),
            is_cut_off: Mutex::default(),
        };
        Self { home: MemoryDisk::holding(&[value; 64 << 10]), header: Arc::new(header) }
    }

    /// What is left when nothing more is written.
    fn copied(&self) -> Self {
        let session = *self.header.session.lock().unwrap();
        let header =
            Header { cache: self.header.cache, session: Mutex::new(session), is_cut_off: Mutex::default() };
        let size = usize::try_from(self.home.geometry().size).unwrap();
        let bytes =
            block_on(self.home.reopened().read(GuestOffset::ZERO, Buffer::zeroed(size))).unwrap().to_vec();
        Self { home: MemoryDisk::holding(&bytes), header: Arc::new(header) }
    }

    /// Another program writes it.
    async fn written_elsewhere(&self, value: u8) {
        let data = Buffer::copy_of(&[value; 4096]);
        self.home.write(GuestOffset::ZERO, data, WriteFlags::default()).await.unwrap();
        if let Some(session) = &mut *self.header.session.lock().unwrap() {
            session.state = SessionState::Void;
        }
    }

    fn is_marked(&self) -> bool {
        self.header.session.lock().unwrap().is_some_and(|session| session.holds_writes())
    }

    async fn open(&self, cache: &Arc<FlashCache>) -> Result<Arc<FlashDisk>> {
        let options = DiskOptions {
            disk: [9; 16],
            home: self.home.clone(),
            sessions: Some(self.header.clone()),
            policy: FlashPolicy::WriteBack,
            trusts_home: false,
        };
        cache.open_disk(options).await
    }
}

/// Flash whose content outlives its caches.
struct Flash(Mutex<Arc<MemoryStorage>>);

/// Each opening draws other numbers.
static OPENINGS: AtomicU64 = AtomicU64::new(1);

impl Flash {
    fn new() -> Self {
        Self(Mutex::new(MemoryStorage::new("flash")))
    }

    /// As after a kill: what was written is there.
    async fn open(&self) -> Arc<FlashCache> {
        let again = MemoryStorage::with("flash", Limits::plain(), self.0.lock().unwrap().content());
        *self.0.lock().unwrap() = again.clone();
        let storage: SharedStorage = again;
        cache_on(&storage, 64, OPENINGS.fetch_add(1, Ordering::Relaxed)).await.unwrap()
    }

    fn copied(&self) -> Self {
        Self(Mutex::new(MemoryStorage::with("flash", Limits::plain(), self.0.lock().unwrap().content())))
    }
}

async fn write(disk: &FlashDisk, value: u8) -> Result<()> {
    disk.write(GuestOffset::ZERO, Buffer::copy_of(&[value; 4096]), WriteFlags::default()).await?;
    disk.flush().await
}

async fn read(disk: &FlashDisk) -> u8 {
    let found = disk.read(GuestOffset::ZERO, Buffer::zeroed(4096)).await.unwrap().to_vec();
    assert!(found.iter().all(|byte| *byte == found[0]));
    found[0]
}

#[test]
fn a_kept_disk_is_found_again_and_a_drained_one_is_not_marked() {
    block_on(async {
        let (flash, image) = (Flash::new(), Image::new(1));
        let cache = flash.open().await;
        let disk = image.open(&cache).await.unwrap();
        assert!(!image.is_marked(), "nothing was written");
        write(&disk, 2).await.unwrap();
        assert!(image.is_marked());
        disk.keep_at_close(true);
        disk.close().await.unwrap();
        cache.close().await.unwrap();
        assert!(image.is_marked());

        let (image, cache) = (image.copied(), flash.open().await);
        let disk = image.open(&cache).await.unwrap();
        assert_eq!(read(&disk).await, 2);
        disk.close().await.unwrap();
        assert!(!image.is_marked());
        let image = image.copied();
        let found = image.home.read(GuestOffset::ZERO, Buffer::zeroed(1)).await.unwrap().to_vec();
        assert_eq!(found, [2], "home has it");
        let disk = image.open(&cache).await.unwrap();
        assert_eq!(read(&disk).await, 2);
        assert!(disk.counts().hits > 0, "and flash has it still");
    });
}

#[test]
fn what_another_program_wrote_is_never_hidden_by_an_old_cache() {
    block_on(async {
        let (flash, image) = (Flash::new(), Image::new(1));
        let cache = flash.open().await;
        let disk = image.open(&cache).await.unwrap();
        write(&disk, 2).await.unwrap();
        let old = flash.copied();
        disk.close().await.unwrap();
        let image = image.copied();
        image.written_elsewhere(3).await;
        // The cache that knows that it was drained, and one that was put back and holds dirty blocks.
        for flash in [flash, old] {
            let (image, cache) = (image.copied(), flash.open().await);
            let disk = image.open(&cache).await.unwrap();
            assert_eq!(read(&disk).await, 3);
            write(&disk, 4).await.unwrap();
            disk.close().await.unwrap();
        }
    });
}

#[test]
fn openings_that_are_cut_off_do_not_push_out_the_number_that_the_image_names() {
    block_on(async {
        let (flash, image) = (Flash::new(), Image::new(1));
        let cache = flash.open().await;
        let disk = image.open(&cache).await.unwrap();
        write(&disk, 2).await.unwrap();
        let mut image = image.copied();
        for _ in 0..3 {
            let cache = flash.open().await;
            let disk = image.open(&cache).await.unwrap();
            assert_eq!(read(&disk).await, 2);
            *image.header.is_cut_off.lock().unwrap() = true;
            write(&disk, 9).await.unwrap_err();
            // What the background says of the disk meanwhile must not count for the number that did not reach the image.
            let second = GuestOffset::new(4096);
            disk.read(second, Buffer::zeroed(4096)).await.unwrap();
            for seconds in [1, 100, 200] {
                cache.tend(std::time::Duration::from_secs(seconds)).await;
            }
            disk.drain().await.unwrap();
            cache.flush().await.unwrap();
            image = image.copied();
        }
        let cache = flash.open().await;
        let disk = image.open(&cache).await.unwrap();
        assert_eq!(read(&disk).await, 2);
        write(&disk, 5).await.unwrap();
        let (image, cache) = (image.copied(), flash.open().await);
        assert_eq!(read(&image.open(&cache).await.unwrap()).await, 5);
    });
}

#[test]
fn of_two_copies_of_an_image_the_cache_has_the_writes_of_one() {
    block_on(async {
        let (flash, image) = (Flash::new(), Image::new(1));
        let cache = flash.open().await;
        let disk = image.open(&cache).await.unwrap();
        write(&disk, 2).await.unwrap();
        let (image, copy, cache) = (image.copied(), image.copied(), flash.open().await);
        let disk = image.open(&cache).await.unwrap();
        let kind = |opened: Result<Arc<FlashDisk>>| opened.err().map(|error| error.kind());
        assert_eq!(kind(copy.open(&cache).await), Some(ErrorKind::Locked));
        write(&disk, 3).await.unwrap();
        disk.close().await.unwrap();
        assert_eq!(
            kind(copy.open(&cache).await),
            Some(ErrorKind::Refused),
            "its writes are not known any more"
        );
        // A copy that is not marked is served what it has.
        let clean = Image::new(7);
        *clean.header.session.lock().unwrap() = copy
            .header
            .session
            .lock()
            .unwrap()
            .map(|session| Session { state: SessionState::Clean, ..session });
        assert_eq!(read(&clean.open(&cache).await.unwrap()).await, 7);
    });
}

#[test]
fn a_marked_image_is_refused_by_a_cache_that_does_not_know_it() {
    block_on(async {
        let (flash, image) = (Flash::new(), Image::new(1));
        let cache = flash.open().await;
        let disk = image.open(&cache).await.unwrap();
        write(&disk, 2).await.unwrap();
        // Made anew, with the same id.
        let (image, cache) = (image.copied(), Flash::new().open().await);
        let error = image.open(&cache).await.err().expect("its writes are elsewhere");
        assert_eq!(error.kind(), ErrorKind::Refused);
        assert!(error.to_string().contains("vellum flash forget"), "{error}");
    });
}

#[test]
fn a_disk_that_is_forgotten_is_dirty_no_more() {
    block_on(async {
        let (flash, image) = (Flash::new(), Image::new(1));
        let cache = flash.open().await;
        let disk = image.open(&cache).await.unwrap();
        write(&disk, 2).await.unwrap();
        assert_eq!(cache.forget([9; 16]).await.unwrap_err().kind(), ErrorKind::Locked);
        let cache = flash.open().await;
        assert_eq!(cache.facts().dirty_blocks, 1);
        assert!(cache.forget([9; 16]).await.unwrap());
        let cache = flash.open().await;
        assert_eq!((cache.facts().dirty_blocks, cache.rows().len()), (0, 0));
        assert!(!cache.forget([9; 16]).await.unwrap());
    });
}
