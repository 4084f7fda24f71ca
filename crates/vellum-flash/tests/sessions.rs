//! Whose blocks they are: an old cache, a copy of an image, an image that another program wrote, and openings that
//! are cut off between the row and the image.
//! Long because each test is a story of one image and its copies, over one header that fails in many ways.

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
use vellum_sim::{ForwardDisk, Forwarding};

/// An image: its bytes, and what its header says.
#[derive(Clone)]
struct Image {
    home: Arc<MemoryDisk>,
    header: Arc<Header>,
}

struct Header {
    cache: CacheId,
    session: Mutex<Option<Session>>,
    /// Beginnings are cut off: the image does not get the number.
    is_cut_off: Mutex<bool>,
    /// Beginnings fail when the file has got the number, and what is open has not. What the file has.
    fails_late: Mutex<bool>,
    in_file: Mutex<Option<Session>>,
    /// What a power cut leaves: the last that was flushed.
    durable: Mutex<Option<Session>>,
    /// Done in the middle of a beginning.
    meanwhile: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// Before and after each change of the header: what it said, and what was on flash.
    moments: Mutex<Vec<(Option<Session>, Flash)>>,
    watched: Mutex<Option<Flash>>,
}

impl Header {
    fn of(session: Option<Session>) -> Arc<Self> {
        let cache = CacheId::new(common::ID).unwrap();
        Arc::new(Self {
            cache,
            session: Mutex::new(session),
            is_cut_off: Mutex::default(),
            fails_late: Mutex::default(),
            in_file: Mutex::default(),
            durable: Mutex::new(session),
            meanwhile: Mutex::default(),
            moments: Mutex::default(),
            watched: Mutex::default(),
        })
    }

    fn now(&self) -> Option<Session> {
        *self.session.lock().unwrap()
    }

    fn set(&self, session: Option<Session>) {
        let note = || {
            if let Some(flash) = &*self.watched.lock().unwrap() {
                self.moments.lock().unwrap().push((self.now(), flash.copied()));
            }
        };
        note();
        *self.session.lock().unwrap() = session;
        *self.durable.lock().unwrap() = session;
        note();
    }
}

impl Sessions for Header {
    fn session(&self) -> LocalFuture<'_, Option<Session>> {
        Box::pin(async { *self.session.lock().unwrap() })
    }

    fn begin(&self, number: SessionNumber, holds_writes: bool) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            if *self.is_cut_off.lock().unwrap() {
                return Err(Error::new(ErrorKind::Io, "cut off"));
            }
            if let Some(act) = self.meanwhile.lock().unwrap().take() {
                act();
            }
            let state = if holds_writes { SessionState::HoldsWrites } else { SessionState::Clean };
            let session = Session { cache: self.cache, number, state };
            if *self.fails_late.lock().unwrap() {
                // The image is stopped then: only the first attempt reaches the file.
                self.in_file.lock().unwrap().get_or_insert(session);
                return Err(Error::new(ErrorKind::Io, "the flush after it"));
            }
            self.set(Some(session));
            Ok(())
        })
    }

    fn clear_mark(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async {
            let session = self.now().expect("it has one");
            self.set(Some(Session { state: SessionState::Clean, ..session }));
            Ok(())
        })
    }

    fn end(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async {
            self.set(None);
            Ok(())
        })
    }
}

impl Image {
    fn new(value: u8) -> Self {
        Self { home: MemoryDisk::holding(&[value; 64 << 10]), header: Header::of(None) }
    }

    /// What is left when nothing more is written.
    fn copied(&self) -> Self {
        let size = usize::try_from(self.home.geometry().size).unwrap();
        let bytes =
            block_on(self.home.reopened().read(GuestOffset::ZERO, Buffer::zeroed(size))).unwrap().to_vec();
        Self { home: MemoryDisk::holding(&bytes), header: Header::of(self.header.now()) }
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
        self.open_with(cache, FlashPolicy::WriteBack).await
    }

    async fn open_with(&self, cache: &Arc<FlashCache>, policy: FlashPolicy) -> Result<Arc<FlashDisk>> {
        self.open_so(cache, policy, [9; 16]).await
    }

    /// The file has these digits.
    async fn open_as(&self, cache: &Arc<FlashCache>, disk: [u8; 16]) -> Result<Arc<FlashDisk>> {
        self.open_so(cache, FlashPolicy::WriteBack, disk).await
    }

    async fn open_so(
        &self,
        cache: &Arc<FlashCache>,
        policy: FlashPolicy,
        disk: [u8; 16],
    ) -> Result<Arc<FlashDisk>> {
        let options = DiskOptions {
            disk,
            home: self.home.reopened(),
            sessions: Some(self.header.clone()),
            policy,
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
            disk.drain().await.expect_err("nothing goes home under a number that the image does not get");
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
fn a_copy_is_refused_also_when_all_that_was_written_since_lies_in_place() {
    block_on(async {
        let (flash, image) = (Flash::new(), Image::new(1));
        let cache = flash.open().await;
        let disk = image.open(&cache).await.unwrap();
        write(&disk, 2).await.unwrap();
        // A record after that of the first block: from now on this one is written in place.
        let other = Buffer::copy_of(&[9; 4096]);
        disk.write(GuestOffset::new(8192), other, WriteFlags::default()).await.unwrap();
        disk.flush().await.unwrap();
        let (image, copy, cache) = (image.copied(), image.copied(), flash.open().await);
        let disk = image.open(&cache).await.unwrap();
        let before = disk.counts().slot_writes;
        write(&disk, 3).await.unwrap();
        assert_eq!(disk.counts().slot_writes - before, 4096);
        let (image, cache) = (image.copied(), flash.open().await);
        assert_eq!(kind(copy.open(&cache).await), Some(ErrorKind::Refused));
        assert_eq!(read(&image.open(&cache).await.unwrap()).await, 3);
    });
}

#[test]
fn a_copy_that_is_opened_while_the_image_begins_changes_nothing() {
    block_on(async {
        let (flash, image) = (Flash::new(), Image::new(1));
        let cache = flash.open().await;
        let disk = image.open(&cache).await.unwrap();
        write(&disk, 2).await.unwrap();
        closed(&disk, true).await;
        let (copy, cache) = (image.copied(), flash.open().await);
        let disk = image.open(&cache).await.unwrap();
        let opened = Arc::new(Mutex::new(None));
        let (at, its, there) = (opened.clone(), copy.copied(), cache.clone());
        *image.header.meanwhile.lock().unwrap() =
            Some(Box::new(move || *at.lock().unwrap() = Some(kind(block_on(its.open(&there))))));
        write(&disk, 3).await.unwrap();
        assert_eq!(*opened.lock().unwrap(), Some(Some(ErrorKind::Locked)));
        let (image, cache) = (image.copied(), flash.open().await);
        assert_eq!(kind(copy.open(&cache).await), Some(ErrorKind::Refused));
        assert_eq!(read(&image.open(&cache).await.unwrap()).await, 3);
    });
}

#[test]
fn a_beginning_that_failed_late_is_tried_again_with_the_same_number() {
    block_on(async {
        let (flash, image) = (Flash::new(), Image::new(1));
        let cache = flash.open().await;
        let disk = image.open(&cache).await.unwrap();
        write(&disk, 2).await.unwrap();
        closed(&disk, true).await;
        for is_reopened in [false, true] {
            let flash = flash.copied();
            let (cache, image) = (flash.open().await, image.copied());
            let disk = image.open(&cache).await.unwrap();
            *image.header.fails_late.lock().unwrap() = true;
            for value in 3..6 {
                write(&disk, value).await.expect_err("it cannot begin");
            }
            disk.drain().await.expect_err("nor go home");
            let in_file = image.header.in_file.lock().unwrap().expect("it has the first number");
            let restarted = Image { header: Header::of(Some(in_file)), ..image.copied() };
            let cache = if is_reopened {
                disk.close().await.expect_err("it is not complete");
                cache
            } else {
                flash.open().await
            };
            let disk = restarted.open(&cache).await.unwrap();
            assert_eq!(read(&disk).await, 2, "what was flushed before");
            write(&disk, 7).await.unwrap();
            assert_ne!(restarted.header.now().unwrap().number, in_file.number, "a number of its own");
            closed(&disk, false).await;
        }
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

fn kind(opened: Result<Arc<FlashDisk>>) -> Option<ErrorKind> {
    opened.err().map(|error| error.kind())
}

async fn closed(disk: &FlashDisk, keeps: bool) {
    disk.keep_at_close(keeps);
    disk.close().await.unwrap();
}

#[test]
fn a_copy_that_lacks_writes_is_refused_when_they_have_gone_home_to_the_image() {
    block_on(async {
        // The copy is made while the image is in use, or closed and kept; the image is then closed in all ways.
        for (is_kept, keeps_again) in [(false, false), (false, true), (true, false), (true, true)] {
            let (flash, image) = (Flash::new(), Image::new(1));
            let cache = flash.open().await;
            let mut disk = image.open(&cache).await.unwrap();
            write(&disk, 2).await.unwrap();
            if is_kept {
                closed(&disk, true).await;
            }
            let copy = image.copied();
            assert!(copy.is_marked());
            if is_kept {
                disk = image.open(&cache).await.unwrap();
            }
            // Nothing is written in this opening.
            disk.drain().await.unwrap();
            closed(&disk, keeps_again).await;
            let reopened = flash.open().await;
            for cache in [cache, reopened] {
                let error = copy.copied().open(&cache).await.err().expect("its writes went elsewhere");
                assert_eq!(error.kind(), ErrorKind::Refused);
                assert!(error.to_string().contains("older copy"), "{error}");
                let disk = image.copied().open(&cache).await.unwrap();
                assert_eq!(read(&disk).await, 2, "{is_kept} {keeps_again}");
            }
        }
    });
}

#[test]
fn what_goes_home_without_a_write_goes_under_a_number_of_this_opening() {
    block_on(async {
        let (flash, image) = (Flash::new(), Image::new(1));
        let cache = flash.open().await;
        let disk = image.open(&cache).await.unwrap();
        write(&disk, 2).await.unwrap();
        closed(&disk, true).await;
        let copy = image.copied();
        let disk = image.open(&cache).await.unwrap();
        for seconds in [1, 100, 200] {
            cache.tend(std::time::Duration::from_secs(seconds)).await;
        }
        assert_eq!(disk.dirty_blocks(), 0, "the background has written");
        cache.flush().await.unwrap();
        // Killed, not closed.
        let (image, cache) = (image.copied(), flash.open().await);
        assert_eq!(kind(copy.open(&cache).await), Some(ErrorKind::Refused));
        assert_eq!(read(&image.open(&cache).await.unwrap()).await, 2);
    });
}

#[test]
fn a_close_that_is_cut_off_anywhere_leaves_an_image_that_its_cache_opens() {
    block_on(async {
        for keeps in [false, true] {
            let (flash, image) = (Flash::new(), Image::new(1));
            let cache = flash.open().await;
            let disk = image.open(&cache).await.unwrap();
            write(&disk, 2).await.unwrap();
            let copy = image.copied();
            *image.header.watched.lock().unwrap() = Some(Flash(Mutex::new(flash.0.lock().unwrap().clone())));
            closed(&disk, keeps).await;
            let moments = std::mem::take(&mut *image.header.moments.lock().unwrap());
            assert_eq!(moments.len(), if keeps { 2 } else { 4 }, "a number; and the mark");
            let homes = image.copied().home;
            for (index, (session, then)) in moments.into_iter().enumerate() {
                let image = Image { home: homes.clone(), header: Header::of(session) }.copied();
                if index >= 2 {
                    // The mark is taken away when no copy counts any more.
                    let cache = then.copied().open().await;
                    assert_eq!(kind(copy.copied().open(&cache).await), Some(ErrorKind::Refused), "{index}");
                }
                let cache = then.open().await;
                let disk = image.open(&cache).await.unwrap();
                assert_eq!(read(&disk).await, 2, "{keeps} {index}");
                closed(&disk, false).await;
                assert!(!image.is_marked());
                let home = image.home.reopened();
                let found = home.read(GuestOffset::ZERO, Buffer::zeroed(1)).await.unwrap().to_vec();
                assert_eq!(found, [2], "{keeps} {index}");
                assert_eq!(
                    kind(copy.copied().open(&cache).await),
                    Some(ErrorKind::Refused),
                    "{keeps} {index}"
                );
            }
        }
    });
}

#[test]
fn a_copy_of_a_closed_image_has_nothing_of_what_was_written_since() {
    block_on(async {
        for policy in [FlashPolicy::WriteBack, FlashPolicy::WriteThrough, FlashPolicy::ReadOnly] {
            let (flash, image) = (Flash::new(), Image::new(1));
            let cache = flash.open().await;
            let disk = image.open(&cache).await.unwrap();
            write(&disk, 2).await.unwrap();
            closed(&disk, false).await;
            let copy = image.copied();
            let disk = image.open_with(&cache, policy).await.unwrap();
            write(&disk, 3).await.unwrap();
            assert_eq!(read(&disk).await, 3);
            cache.tend(std::time::Duration::from_secs(1)).await;
            cache.flush().await.unwrap();
            let killed = flash.copied();
            closed(&disk, false).await;
            drop(disk);
            for flash in [killed, flash] {
                let (copy, cache) = (copy.copied(), flash.open().await);
                let disk = copy.open(&cache).await.unwrap();
                assert_eq!(read(&disk).await, 2, "{policy:?}");
                write(&disk, 4).await.unwrap();
                closed(&disk, false).await;
            }
        }
    });
}

#[test]
fn a_copy_from_write_back_is_refused_when_the_image_has_left_it() {
    block_on(async {
        let (flash, image) = (Flash::new(), Image::new(1));
        let cache = flash.open().await;
        let disk = image.open(&cache).await.unwrap();
        write(&disk, 2).await.unwrap();
        let copy = image.copied();
        disk.set_policy(FlashPolicy::ReadOnly).await.unwrap();
        let then = flash.copied();
        write(&disk, 3).await.unwrap();
        closed(&disk, false).await;
        for flash in [then, flash] {
            assert_eq!(kind(copy.copied().open(&flash.open().await).await), Some(ErrorKind::Refused));
        }
    });
}

#[test]
fn an_image_that_is_written_through_is_never_marked_and_warm_after_a_clean_end() {
    block_on(async {
        let (flash, image) = (Flash::new(), Image::new(1));
        let cache = flash.open().await;
        let disk = image.open_with(&cache, FlashPolicy::WriteThrough).await.unwrap();
        write(&disk, 2).await.unwrap();
        assert!(!image.is_marked() && image.header.now().is_some_and(|session| session.counts()));
        let (killed, copy) = (flash.copied(), image.copied());
        disk.close().await.unwrap();
        assert!(!image.is_marked());
        // A copy from while it was in use has nothing of the cache.
        let opened = copy.copied().open_with(&flash.open().await, FlashPolicy::WriteThrough).await.unwrap();
        assert_eq!((read(&opened).await, opened.counts().hits), (2, 0));
        drop(opened);
        let opened = image.copied().open_with(&flash.open().await, FlashPolicy::WriteThrough).await.unwrap();
        assert_eq!((read(&opened).await, opened.counts().hits), (2, 1), "warm");
        // After a kill the region is void, and the image has it all.
        let opened = copy.open_with(&killed.open().await, FlashPolicy::WriteThrough).await.unwrap();
        assert_eq!((read(&opened).await, opened.counts().hits), (2, 0));
    });
}

#[test]
fn what_another_program_wrote_is_not_hidden_by_a_cache_that_was_written_through() {
    block_on(async {
        let (flash, image) = (Flash::new(), Image::new(1));
        let cache = flash.open().await;
        let disk = image.open_with(&cache, FlashPolicy::WriteThrough).await.unwrap();
        write(&disk, 2).await.unwrap();
        disk.settle().await.unwrap();
        let killed = flash.copied();
        disk.close().await.unwrap();
        for flash in [flash, killed] {
            let image = image.copied();
            image.written_elsewhere(3).await;
            let disk = image.open_with(&flash.open().await, FlashPolicy::WriteThrough).await.unwrap();
            assert_eq!(read(&disk).await, 3);
        }
    });
}

#[test]
fn between_write_back_and_writethrough_the_mark_comes_and_goes() {
    block_on(async {
        let (flash, image) = (Flash::new(), Image::new(1));
        let cache = flash.open().await;
        let disk = image.open(&cache).await.unwrap();
        for value in 2..6 {
            write(&disk, value).await.unwrap();
            assert!(image.is_marked());
            disk.set_policy(FlashPolicy::WriteThrough).await.unwrap();
            assert!(!image.is_marked());
            assert_eq!(read(&disk).await, value);
            write(&disk, value + 100).await.unwrap();
            assert!(!image.is_marked());
            disk.set_policy(FlashPolicy::WriteBack).await.unwrap();
            assert_eq!((read(&disk).await, disk.counts().misses), (value + 100, 0));
            let killed = image.copied().open(&flash.copied().open().await).await.unwrap();
            assert_eq!((read(&killed).await, killed.counts().hits), (value + 100, 1));
        }
        disk.close().await.unwrap();
    });
}

/// Counts the flushes that reach it.
struct Flushed {
    disk: Arc<MemoryDisk>,
    flushes: AtomicU64,
}

impl ForwardDisk for Flushed {
    fn inner(&self) -> &dyn Disk {
        &*self.disk
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        self.disk.flush()
    }
}

#[test]
fn what_went_past_the_cache_is_durable_before_a_flush_is_one_of_flash_alone() {
    block_on(async {
        let (flash, image) = (Flash::new(), Image::new(1));
        let cache = flash.open().await;
        let home = Forwarding::new(Flushed { disk: image.home.reopened(), flushes: AtomicU64::new(0) });
        let options = DiskOptions {
            disk: [9; 16],
            home: home.clone(),
            sessions: Some(image.header.clone()),
            policy: FlashPolicy::ReadOnly,
            trusts_home: false,
        };
        let disk = cache.open_disk(options).await.unwrap();
        disk.write(GuestOffset::ZERO, Buffer::copy_of(&[2; 4096]), WriteFlags::default()).await.unwrap();
        let flushes = || home.flushes.load(Ordering::Relaxed);
        let before = flushes();
        disk.set_policy(FlashPolicy::WriteBack).await.unwrap();
        assert_eq!(flushes() - before, 1);
        let before = flushes();
        write(&disk, 3).await.unwrap();
        assert_eq!(flushes() - before, 0);
        disk.close().await.unwrap();
    });
}

#[test]
fn of_two_disks_with_the_same_digits_only_the_one_whose_session_is_named_is_forgotten() {
    block_on(async {
        let (flash, lost, live) = (Flash::new(), Image::new(1), Image::new(1));
        let cache = flash.open().await;
        for (image, value) in [(&lost, 2), (&live, 3)] {
            let disk = image.open(&cache).await.unwrap();
            write(&disk, value).await.unwrap();
            closed(&disk, true).await;
        }
        let cache = flash.open().await;
        let error = cache.forget([9; 16]).await.expect_err("which one?");
        assert_eq!(error.kind(), ErrorKind::Invalid);
        let session = lost.header.now().unwrap().number;
        assert!(error.to_string().contains(&session.to_string()), "{error}");
        assert_eq!(cache.facts().dirty_blocks, 2, "nothing is forgotten");
        assert!(cache.forget(session.bytes()).await.unwrap());
        let cache = flash.open().await;
        assert_eq!(cache.facts().dirty_blocks, 1);
        assert_eq!(read(&live.copied().open(&cache).await.unwrap()).await, 3);
    });
}

/// A program was killed after the number had been written to the image, and before it was flushed. The next one reads it from
/// the page cache.
#[test]
fn a_number_that_was_never_flushed_is_durable_before_its_row_is_decided() {
    block_on(async {
        let (flash, image, other) = (Flash::new(), Image::new(1), Image::new(7));
        let cache = flash.open().await;
        let disk = image.open(&cache).await.unwrap();
        write(&disk, 2).await.unwrap();
        closed(&disk, true).await;
        cache.close().await.unwrap();

        let (image, cache) = (image.copied(), flash.open().await);
        *image.header.fails_late.lock().unwrap() = true;
        let disk = image.open(&cache).await.unwrap();
        write(&disk, 3).await.expect_err("it is cut off in its beginning");
        drop((disk, cache));
        *image.header.fails_late.lock().unwrap() = false;
        let written = *image.header.in_file.lock().unwrap();
        assert!(written.is_some());
        *image.header.session.lock().unwrap() = written;

        let cache = flash.open().await;
        let disk = image.open(&cache).await.unwrap();
        let beside = other.open_as(&cache, [8; 16]).await.unwrap();
        write(&beside, 8).await.unwrap();
        assert_eq!(read(&disk).await, 2);
        drop((disk, beside, cache));
        // A power cut.
        let durable = *image.header.durable.lock().unwrap();
        let (after, cache) = (image.copied(), flash.open().await);
        *after.header.session.lock().unwrap() = durable;
        let disk = after.open(&cache).await.expect("the cache has its writes");
        assert_eq!(read(&disk).await, 2);
    });
}

/// The original and a copy of it, both complete, in either order.
#[test]
fn a_complete_copy_is_opened_beside_its_original() {
    for copy_first in [false, true] {
        block_on(async {
            let (flash, image) = (Flash::new(), Image::new(1));
            let cache = flash.open().await;
            let disk = image.open(&cache).await.unwrap();
            write(&disk, 2).await.unwrap();
            closed(&disk, false).await;
            let (one, other) = (image.copied(), image.copied());
            let (first, second) = if copy_first { (&other, &one) } else { (&one, &other) };
            let disk = first.open(&cache).await.unwrap();
            let beside = second.open(&cache).await.expect("nothing of the cache is its own");
            assert_eq!((read(&disk).await, read(&beside).await), (2, 2));
            write(&beside, 3).await.unwrap();
            write(&disk, 4).await.unwrap();
            assert_eq!((read(&disk).await, read(&beside).await), (4, 3));
            closed(&beside, true).await;
            closed(&disk, true).await;
            cache.close().await.unwrap();
            let (first, second, cache) = (first.copied(), second.copied(), flash.open().await);
            let (disk, beside) = (first.open(&cache).await.unwrap(), second.open(&cache).await.unwrap());
            assert_eq!((read(&disk).await, read(&beside).await), (4, 3));
            closed(&beside, false).await;
            closed(&disk, false).await;
            for (image, value) in [(first, 4), (second, 3)] {
                let found = image.copied().home.read(GuestOffset::ZERO, Buffer::zeroed(1)).await.unwrap();
                assert_eq!(found.to_vec(), [value]);
            }
        });
    }
}

/// All of it went home before the kill, but the image is still marked. Another image has taken the digits of its file.
#[test]
fn a_marked_image_is_opened_also_when_another_has_its_digits() {
    block_on(async {
        let (flash, image) = (Flash::new(), Image::new(1));
        let cache = flash.open().await;
        let disk = image.open(&cache).await.unwrap();
        write(&disk, 2).await.unwrap();
        disk.drain().await.unwrap();
        disk.flush().await.unwrap();
        drop((disk, cache));
        let (image, cache) = (image.copied(), flash.open().await);
        assert!(image.is_marked());
        let other = Image::new(5);
        let beside = other.open(&cache).await.unwrap();
        write(&beside, 6).await.unwrap();
        let disk = image.open(&cache).await.expect("the cache knows that it lacks nothing");
        assert_eq!((read(&disk).await, read(&beside).await), (2, 6));
        closed(&disk, false).await;
        assert!(!image.is_marked());
    });
}

#[test]
fn an_image_that_lacks_nothing_is_not_marked_by_a_close_that_keeps() {
    for policy in [FlashPolicy::WriteBack, FlashPolicy::ReadOnly, FlashPolicy::Off] {
        block_on(async {
            let (flash, image) = (Flash::new(), Image::new(1));
            let cache = flash.open().await;
            let disk = image.open(&cache).await.unwrap();
            write(&disk, 2).await.unwrap();
            closed(&disk, true).await;
            assert!(image.is_marked());
            let image = image.copied();
            let disk = image.open_with(&cache, policy).await.unwrap();
            if policy == FlashPolicy::WriteBack {
                disk.drain().await.unwrap();
            } else {
                write(&disk, 3).await.unwrap();
            }
            closed(&disk, true).await;
            assert!(!image.is_marked(), "{policy:?}");
        });
    }
}
