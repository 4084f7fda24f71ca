//! Disks on slow storage: what was begun goes to its end, also when the command no longer waits for it.

use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::AtomicBool;

use event_listener::Event;
use vellum_core::{
    Buffer, GuestOffset, ImageOffset, ImageSpan, Limits, LocalFuture, MemoryStorage, SharedStorage, Storage,
    StorageRun, WriteFlags, Zeroes,
};
use vellum_format::{FormatKind, native, qcow2};
use vellum_io::{IoMode, Workers, WorkersConfig, spawn_local};
use vellum_layer::{ChainOptions, Opener, Purpose};

use super::*;

const SIZE: u64 = 4 << 20;

/// A storage whose flushes do not end while it is slow, and fail when there have been some.
struct Slow {
    inner: Arc<MemoryStorage>,
    /// How many flushes do not fail.
    flushes_left: AtomicUsize,
    is_slow: AtomicBool,
    waiting: AtomicUsize,
    changed: Event,
}

impl Slow {
    fn new() -> Arc<Self> {
        let inner = MemoryStorage::new("image");
        Arc::new(Self {
            inner,
            flushes_left: AtomicUsize::new(usize::MAX),
            is_slow: AtomicBool::default(),
            waiting: AtomicUsize::default(),
            changed: Event::new(),
        })
    }

    fn set_slow(&self, is_slow: bool) {
        self.is_slow.store(is_slow, Ordering::SeqCst);
        self.changed.notify(usize::MAX);
    }

    /// How many flushes wait.
    fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }
}

impl Storage for Slow {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.inner.read(at, buffer)
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        self.inner.write(at, data)
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            loop {
                let changed = self.changed.listen();
                if !self.is_slow.load(Ordering::SeqCst) {
                    break;
                }
                changed.await;
            }
            self.waiting.fetch_sub(1, Ordering::SeqCst);
            match self
                .flushes_left
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1))
            {
                Ok(_) => self.inner.flush().await,
                Err(_) => Err(Error::new(ErrorKind::Io, "this flush fails")),
            }
        })
    }

    fn write_zeroes(&self, span: ImageSpan, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        self.inner.write_zeroes(span, how)
    }

    fn discard(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.inner.discard(span)
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        self.inner.set_len(len)
    }

    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.inner.preallocate(span)
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        self.inner.runs(span)
    }
}

/// Opens the one storage there is.
struct One(SharedStorage);

impl Opener for One {
    fn canonical<'a>(&'a self, path: &'a Path) -> LocalFuture<'a, Result<PathBuf>> {
        Box::pin(std::future::ready(Ok(path.to_owned())))
    }

    fn open<'a>(&'a self, _: &'a Path, _: &'a Path, _: Purpose) -> LocalFuture<'a, Result<SharedStorage>> {
        Box::pin(std::future::ready(Ok(self.0.clone())))
    }
}

/// A server of such a disk that waits 250 ms where a real one waits [`PATIENCE`]: longer than a thread that tends
/// the disk may be kept from its processor.
struct Server {
    storage: Arc<Slow>,
    exports: Exports,
    disks: Arc<Disks>,
    workers: WorkersHandle,
}

impl Server {
    fn new(storage: Arc<Slow>, workers: WorkersHandle) -> Rc<Self> {
        let exports = Exports::new();
        let disks = Disks::new(Self::how(), exports.clone(), workers.clone());
        Rc::new(Self { storage, exports, disks, workers })
    }

    fn how() -> How {
        let (is_steered, patience) = (true, Duration::from_millis(250));
        How {
            grow_hook: None,
            is_steered,
            is_durable: false,
            holds_when_full: false,
            sparse: Default::default(),
            part: None,
            patience,
            templates: Arc::default(),
            copy_memory: Arc::default(),
            filler_turns: Default::default(),
            flash: None,
            warms: false,
            fast: None,
        }
    }

    /// As `export add` does.
    async fn add(&self, number: usize) -> Arc<Served> {
        let path = Path::new("/image");
        let opener = One(self.storage.clone());
        let chain = Chain::open(&opener, path, &ChainOptions::default()).await.expect("it opens");
        let export = ExportSpec {
            name: "disk".to_owned(),
            path: path.to_owned(),
            image: ImageOptions::default(),
            description: String::new(),
            rate_limits: Default::default(),
            hydration: Default::default(),
            flash_policy: None,
            bitmaps: Vec::new(),
        };
        let group = Group { canonical: path.to_owned(), exports: vec![export] };
        let how = Arc::new(Self::how());
        let served =
            Served::of(number, &group, how, self.workers.clone(), chain).await.expect("it is served");
        self.disks.admit(&served, &group.exports).expect("its name is free");
        served
    }

    /// As `export remove` does.
    async fn remove(&self) -> Result<()> {
        let served = self.disks.find(Some("disk"))?;
        let removing = served.begin_removing("disk")?;
        served.has_room_for_what_was_answered().await?;
        served.open_for_good();
        removing.end_export(&self.exports).await;
        removing.is_gone();
        self.disks.end_one(&served).await
    }
}

async fn write(served: &Served, at: u64, byte: u8) {
    let data = Buffer::copy_of(&[byte; 4096]);
    let written = served.disk().write(GuestOffset::new(at), data, WriteFlags::default()).await;
    written.unwrap_or_else(|error| panic!("{}", error.chain()));
}

async fn read(served: &Served, at: u64) -> Vec<u8> {
    served.disk().read(GuestOffset::new(at), Buffer::zeroed(4096)).await.expect("read").to_vec()
}

/// Waits until that is so, for a minute at most.
async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..60_000 {
        if is_so() {
            return;
        }
        clock().sleep(Duration::from_millis(1)).await;
    }
    panic!("it does not come to it that {what}");
}

/// A flush that hangs keeps neither the command that reopens the disk nor the disk's requests waiting.
#[test]
fn a_disk_whose_flush_hangs_is_not_reopened_and_goes_on() {
    let mode = IoMode::Threads;
    let workers =
        Workers::start(WorkersConfig { threads: 1, mode, ..WorkersConfig::default() }).expect("a worker");
    let handle = workers.handle();
    let done = vellum_io::run(mode, async || {
        let storage = Slow::new();
        let options = qcow2::CreateOptions { size: SIZE, journal: Some(64 << 10), ..Default::default() };
        qcow2::create(&*storage, None, &options).await.expect("a new image");
        let server = Server::new(storage.clone(), handle);
        let served = server.add(0).await;
        write(&served, 0, 7).await;
        storage.set_slow(true);
        let refused = served.reopen(false, &Exports::new()).await.expect_err("its flush hangs");
        assert_eq!(refused.kind(), ErrorKind::Locked, "{}", refused.chain());
        assert!(refused.chain().to_string().contains("has not answered a flush"), "{}", refused.chain());
        write(&served, 4096, 8).await;
        assert_eq!(read(&served, 0).await, vec![7; 4096]);
        assert_eq!(served.state().0, "running", "the disk goes on");
        storage.set_slow(false);
        until("the flush ends", || storage.waiting() == 0).await;
        served.disk().flush().await.unwrap_or_else(|error| panic!("nothing was lost: {}", error.chain()));
        server.remove().await.unwrap_or_else(|error| panic!("{}", error.chain()));
    });
    done.expect("a worker");
    workers.join();
}

/// A change of snapshots closes the image, and cannot open it again when flushes fail. Requests fail then, and the state says why.
#[test]
fn a_disk_that_a_failed_change_has_closed_says_so() {
    let mode = IoMode::Threads;
    let workers = Workers::start(WorkersConfig { threads: 1, mode, ..WorkersConfig::default() });
    let workers = workers.expect("a worker");
    let handle = workers.handle();
    let done = vellum_io::run(mode, async || {
        let mut closed = 0;
        for flushes in 0..12 {
            let storage = Slow::new();
            let options = qcow2::CreateOptions { size: SIZE, ..Default::default() };
            qcow2::create(&*storage, None, &options).await.expect("a new image");
            let server = Server::new(storage.clone(), handle.clone());
            let served = server.add(0).await;
            write(&served, 0, 7).await;
            storage.flushes_left.store(flushes, Ordering::SeqCst);
            let made = served.snapshot_create("one").await;
            let buffer = Buffer::for_overwrite(4096);
            let read = served.disk().read(GuestOffset::ZERO, buffer).await;
            if read.as_ref().is_err_and(|error| error.kind() == ErrorKind::Closed) {
                assert!(made.is_err());
                assert_eq!(served.state().0, "closed", "after {flushes} flushes");
                closed += 1;
            }
            storage.flushes_left.store(usize::MAX, Ordering::SeqCst);
            let _ = server.remove().await;
        }
        assert!(closed > 0, "no failed flush leaves it closed");
    });
    done.expect("a worker");
    workers.join();
}

/// The flush before a removal takes longer than the removal waits for it. The removal goes on, and waits again where it closes the
/// image. The flush is not cut off: the disk is not stopped, and no write is lost.
#[test]
fn a_flush_that_takes_long_goes_to_its_end_beside_the_removal() {
    for format in ["qcow2", "qcow2 with a journal", "native"] {
        let mode = IoMode::Threads;
        let config = WorkersConfig { threads: 1, mode, ..WorkersConfig::default() };
        let workers = Workers::start(config).expect("a worker");
        let handle = workers.handle();
        let done = vellum_io::run(mode, async || {
            let storage = Slow::new();
            let journal = (format == "qcow2 with a journal").then_some(64 << 10);
            let made = match format {
                "native" => {
                    let options = native::CreateOptions { size: SIZE, has_table: true, ..Default::default() };
                    native::create(&*storage, &options).await.map(drop)
                }
                _ => {
                    let options = qcow2::CreateOptions { size: SIZE, journal, ..Default::default() };
                    qcow2::create(&*storage, None, &options).await.map(drop)
                }
            };
            made.expect("a new image");
            let server = Server::new(storage.clone(), handle);
            let served = server.add(0).await;
            write(&served, 0, 7).await;
            storage.set_slow(true);
            served.has_room_for_what_was_answered().await.expect("whether there is room is not known yet");
            assert!(storage.waiting() > 0, "{format}: the flush goes on");
            write(&served, 4096, 8).await;
            assert_eq!(served.state().0, "running", "{format}: the disk goes on");

            let its = server.clone();
            let removal = spawn_local(async move { its.remove().await });
            until("it is not found any more", || server.disks.find(Some("disk")).is_err()).await;
            assert!(!removal.is_finished() && storage.waiting() > 0, "{format}: it waits for the flush");
            storage.set_slow(false);
            removal.await.unwrap_or_else(|error| panic!("{format}: {}", error.chain()));
            assert_eq!(storage.waiting(), 0);
            drop(served);

            let served = server.add(1).await;
            assert!(!served.may_miss_writes().await, "{format}: it was closed well");
            assert_eq!((read(&served, 0).await, read(&served, 4096).await), (vec![7; 4096], vec![8; 4096]));
            write(&served, 8192, 9).await;
            server.remove().await.unwrap_or_else(|error| panic!("{format}, again: {}", error.chain()));
        });
        done.expect("a worker");
        workers.join();
    }
}

/// A step of a migration failed, and left the image without a disk, not closed, and perhaps doubtful: the next step, or a reopening,
/// recovers it and opens it for writing. Nothing else could: this server has the file.
#[test]
fn a_step_that_failed_is_no_end() {
    let mode = IoMode::Threads;
    for (format, is_doubtful) in [FormatKind::Qcow2, FormatKind::Native]
        .into_iter()
        .flat_map(|format| [(format, false), (format, true)])
    {
        let config = WorkersConfig { threads: 1, mode, ..WorkersConfig::default() };
        let workers = Workers::start(config).expect("a worker");
        let handle = workers.handle();
        let done = vellum_io::run(mode, async || {
            let name = format!("vellum-failed-step-{format}-{is_doubtful}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            let file =
                vellum_io::File::create_new(&path, vellum_io::OpenOptions::writing()).await.expect("a file");
            let made = match format {
                FormatKind::Native => {
                    let options = native::CreateOptions { size: SIZE, has_table: true, ..Default::default() };
                    native::create(&*file, &options).await.map(drop)
                }
                _ => {
                    let options =
                        qcow2::CreateOptions { size: SIZE, journal: Some(64 << 10), ..Default::default() };
                    qcow2::create(&*file, None, &options).await.map(drop)
                }
            };
            made.expect("a new image");
            drop(file);
            let image = ImageOptions { format: Some(format), ..ImageOptions::default() };
            let chain = crate::image::open_over(None, &path, &image).await.expect("it opens");
            let export = ExportSpec {
                name: "disk".to_owned(),
                path: path.clone(),
                image,
                description: String::new(),
                rate_limits: Default::default(),
                hydration: Default::default(),
                flash_policy: None,
                bitmaps: Vec::new(),
            };
            let exports = Exports::new();
            let group = Group { canonical: path.clone(), exports: vec![export] };
            let how = Arc::new(Server::how());
            let served = Served::of(0, &group, how, handle, chain).await.expect("it is served");
            write(&served, 0, 7).await;
            served.disk().flush().await.expect("flushed");
            served.tend_no_more().await;
            {
                let (mut chain, hold) = (served.chain.write().await, served.valve.hold().await);
                served.release_files(&hold, &mut chain).await.expect("the file is free");
            }
            if is_doubtful {
                served.is_barred.store(true, Ordering::Release);
                served.reopen(false, &exports).await.unwrap_or_else(|error| panic!("{}", error.chain()));
            } else {
                let number = vellum_format::handover::MoveNumber::new([7; 16]).expect("a number");
                let restored = served.hand_over(vellum_layer::migrate::Step::Restore, number, &exports).await;
                restored.unwrap_or_else(|error| panic!("{format}: {}", error.chain()));
            }
            assert!(!served.is_barred() && served.is_written_now().await, "{format}");
            assert_eq!(read(&served, 0).await, vec![7; 4096], "{format}: what was flushed is there");
            write(&served, 4096, 8).await;
            served.end(&exports).await.unwrap_or_else(|error| panic!("{}", error.chain()));
            std::fs::remove_file(&path).expect("the image");
        });
        done.expect("a worker");
        workers.join();
    }
}
