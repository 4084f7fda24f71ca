//! The NBD client against our own server, in the simulator: the contract of storages, lost connections, servers
//! that stall, change and refuse.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use vellum_core::contract::{StorageFixture, storage};
use vellum_core::{
    Buffer, ByteStream, Disk, Error, ErrorKind, Extent, Geometry, GuestOffset, GuestSpan, ImageOffset,
    LocalFuture, MemoryDisk, MemoryStorage, Result, SharedDisk, SharedStorage, Storage as _, WriteFlags,
    ZeroFlags, join_all,
};
use vellum_export::Shutdown;
use vellum_export::nbd::{Export, Exports, SessionLimits, serve_connection};
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2, create};
use vellum_remote::nbd::{ClientOptions, Dial, NbdStorage, prepare};
use vellum_sim::{SimStream, Spawner, StreamOptions, World, stream_pair};

/// A server that clients of one world connect to.
struct Server {
    world: Rc<World>,
    exports: RefCell<Exports>,
    /// Connections are refused.
    is_away: Cell<bool>,
    /// Connections are accepted and nothing answers.
    is_mute: Cell<bool>,
    connections: Cell<u32>,
    shutdown: RefCell<Shutdown>,
    mutes: RefCell<Vec<SimStream>>,
    options: StreamOptions,
}

impl Server {
    fn new(world: &Rc<World>, options: StreamOptions) -> Rc<Self> {
        Rc::new(Self {
            world: world.clone(),
            exports: RefCell::new(Exports::new()),
            is_away: Cell::new(false),
            is_mute: Cell::new(false),
            connections: Cell::new(0),
            shutdown: RefCell::new(Shutdown::new()),
            mutes: RefCell::default(),
            options,
        })
    }

    /// Serves this disk, and nothing else, to those who connect from now on.
    fn serve(&self, disk: &SharedDisk) {
        let exports = Exports::new();
        exports
            .add(Export {
                name: "disk".into(),
                description: String::new(),
                disk: disk.clone(),
                read_only: false,
                marks: None,
            })
            .unwrap();
        *self.exports.borrow_mut() = exports;
    }

    /// Ends all connections.
    fn cut(&self) {
        self.shutdown.replace(Shutdown::new()).cut();
        self.mutes.borrow_mut().clear();
    }
}

struct Dialer(Rc<Server>);

impl Dial for Dialer {
    fn dial(&self) -> LocalFuture<'_, Result<Box<dyn ByteStream>>> {
        Box::pin(async move {
            let server = &self.0;
            if server.is_away.get() {
                return Err(Error::new(ErrorKind::Closed, "connection refused"));
            }
            server.connections.set(server.connections.get() + 1);
            let (ours, theirs) = stream_pair(&server.world, &server.options);
            if server.is_mute.get() {
                server.mutes.borrow_mut().push(theirs);
                return Ok(Box::new(ours) as Box<dyn ByteStream>);
            }
            let (exports, shutdown) = (server.exports.borrow().clone(), server.shutdown.borrow().clone());
            let clock = server.world.clock();
            server.world.spawn(async move {
                serve_connection(&theirs, &exports, &*clock, &SessionLimits::default(), &shutdown).await;
            });
            Ok(Box::new(ours) as Box<dyn ByteStream>)
        })
    }
}

async fn open(server: &Rc<Server>, options: ClientOptions) -> Result<Arc<NbdStorage>> {
    let (opening, client) = prepare("nbd://sim/disk".into(), "disk".into(), options);
    let (dialer, clock) = (Dialer(server.clone()), server.world.clock());
    spawn(&server.world.spawner(), async move { client.run(&dialer, &*clock).await });
    opening.opened().await
}

fn spawn(spawner: &Spawner, future: impl Future<Output = ()> + 'static) {
    drop(spawner.spawn(future));
}

fn writing() -> ClientOptions {
    ClientOptions { read_only: false, ..ClientOptions::default() }
}

async fn read(storage: &NbdStorage, at: u64, len: usize) -> Result<Vec<u8>> {
    storage.read(ImageOffset::new(at), Buffer::for_overwrite(len)).await.map(|buffer| buffer.to_vec())
}

async fn fill(disk: &SharedDisk, at: u64, bytes: &[u8]) {
    disk.write(GuestOffset::new(at), Buffer::copy_of(bytes), WriteFlags::default()).await.unwrap();
}

/// A disk that knows where it is zero.
async fn qcow2(size: u64) -> SharedDisk {
    let image: SharedStorage = MemoryStorage::new("image");
    create(&*image, None, &CreateOptions { size, ..CreateOptions::without_journal() }).await.unwrap();
    let header = Header::read(&*image).await.unwrap();
    Qcow2::open(header, Files { image, data_file: None, below: None }, OpenOptions::default()).await.unwrap()
}

/// Storages are exports of disks in memory.
struct Remote {
    server: Rc<Server>,
}

impl StorageFixture for Remote {
    fn fresh(&self, len: u64) -> LocalFuture<'_, Result<SharedStorage>> {
        Box::pin(async move {
            self.server.serve(&(MemoryDisk::new(len) as SharedDisk));
            Ok(open(&self.server, writing()).await? as SharedStorage)
        })
    }

    fn reopen(&self) -> LocalFuture<'_, Result<SharedStorage>> {
        Box::pin(async move { Ok(open(&self.server, writing()).await? as SharedStorage) })
    }
}

#[test]
fn an_export_is_a_storage() {
    let whole = StreamOptions::default();
    let late = Duration::ZERO..=Duration::from_millis(3);
    let pieces = StreamOptions { capacity: 3000, fragment: true, delay: late };
    for (seed, options) in [(1, whole), (2, pieces)] {
        let world = Rc::new(World::shuffled(seed));
        let server = Server::new(&world, options);
        world.run(storage(&Remote { server }));
    }
}

#[test]
fn zeros_of_the_export_are_known_without_reading_them() {
    let world = Rc::new(World::new(1));
    let server = Server::new(&world, StreamOptions::default());
    world.run(async {
        let disk = qcow2(8 << 20).await;
        fill(&disk, 1 << 20, &[7; 65_536]).await;
        server.serve(&disk);
        let storage = open(&server, ClientOptions::default()).await.unwrap();
        let runs = storage.runs(ImageOffset::ZERO.span(16 << 20)).await.unwrap();
        let facts: Vec<(u64, bool)> = runs.iter().map(|run| (run.span.len(), run.is_data)).collect();
        assert_eq!(facts, [(1 << 20, false), (65_536, true), ((7 << 20) - 65_536, false)]);
        assert_eq!(read(&storage, (1 << 20) - 1, 3).await.unwrap(), [0, 7, 7]);
        let error = storage.write(ImageOffset::ZERO, Buffer::zeroed(1)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ReadOnly);
    });
}

#[test]
fn reads_are_held_while_the_server_is_away_and_answered_when_it_is_back() {
    for seed in 0..20 {
        let world = Rc::new(World::shuffled(seed));
        let late = Duration::ZERO..=Duration::from_millis(40);
        let server = Server::new(&world, StreamOptions { capacity: 5000, fragment: true, delay: late });
        world.run(async {
            let disk: SharedDisk = MemoryDisk::new(1 << 20);
            let bytes: Vec<u8> = (0..1_u32 << 20).map(|at| u8::try_from(at / 7 % 251).unwrap()).collect();
            fill(&disk, 0, &bytes).await;
            server.serve(&disk);
            let storage = open(&server, ClientOptions::default()).await.unwrap();
            let troubles = async {
                for _ in 0..4 {
                    world.sleep(Duration::from_millis(100)).await;
                    server.is_away.set(true);
                    server.cut();
                    world.sleep(Duration::from_secs(60)).await;
                    server.is_away.set(false);
                    world.sleep(Duration::from_secs(10)).await;
                }
            };
            let reads = async {
                for round in 0..16 {
                    let parts = (0..8_u64).map(|part| {
                        let storage = &storage;
                        Box::pin(async move { read(storage, part * 131_072 + round, 50_000).await })
                    });
                    for (part, answer) in join_all(parts).await.into_iter().enumerate() {
                        let start = part * 131_072 + usize::try_from(round).unwrap();
                        assert!(answer.unwrap() == bytes[start..start + 50_000], "seed {seed}");
                    }
                    world.sleep(Duration::from_millis(700)).await;
                }
            };
            futures_lite::future::zip(troubles, reads).await;
            assert!(server.connections.get() > 2, "seed {seed}: it was connected to again");
        });
    }
}

#[test]
fn a_read_fails_after_the_stated_time_and_not_before() {
    let world = Rc::new(World::new(3));
    let server = Server::new(&world, StreamOptions::default());
    world.run(async {
        server.serve(&(MemoryDisk::new(1 << 20) as SharedDisk));
        let patience = ClientOptions::default().patience;
        let storage = open(&server, ClientOptions::default()).await.unwrap();
        server.is_away.set(true);
        server.cut();
        let begun = world.now();
        let error = read(&storage, 0, 512).await.unwrap_err();
        let took = world.now() - begun;
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(error.chain().contains("not been reachable for 90 seconds"), "{}", error.chain());
        assert!(took >= patience && took < patience + Duration::from_secs(2), "{took:?}");
        // The next ones need not wait as long: the server has been away for all that time.
        let begun = world.now();
        read(&storage, 0, 512).await.unwrap_err();
        assert!(world.now() - begun < Duration::from_secs(2));
        server.is_away.set(false);
        world.sleep(Duration::from_secs(10)).await;
        read(&storage, 0, 512).await.unwrap();
    });
}

/// A disk that answers no read, or as many as are allowed.
struct Silent(SharedDisk, Arc<AtomicU32>);

impl Disk for Silent {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        let allowed = self.1.load(Ordering::Relaxed);
        if allowed == 0 {
            return Box::pin(std::future::pending());
        }
        self.1.store(allowed - 1, Ordering::Relaxed);
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
        self.0.map(span)
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.0.close()
    }
}

/// A handshake is no answer: the time of a read goes on over connections that bring nothing else.
#[test]
fn a_read_fails_also_where_the_server_greets_and_never_answers() {
    let world = Rc::new(World::new(5));
    let server = Server::new(&world, StreamOptions::default());
    world.run(async {
        server.serve(&(Arc::new(Silent(MemoryDisk::new(1 << 20), Arc::default())) as SharedDisk));
        let ClientOptions { patience, stall, .. } = ClientOptions::default();
        let storage = open(&server, ClientOptions::default()).await.unwrap();
        let begun = world.now();
        let error = read(&storage, 0, 512).await.unwrap_err();
        let took = world.now() - begun;
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(error.chain().contains("not answered in 90 seconds"), "{}", error.chain());
        assert!(took >= patience && took < patience + 3 * stall, "{took:?}");
        assert!(server.connections.get() > 2, "{}", server.connections.get());
    });
}

/// One read of many is answered on each connection: none of them is given up, though the last takes longer than one may.
#[test]
fn a_server_that_answers_little_is_waited_for() {
    let world = Rc::new(World::new(6));
    let server = Server::new(&world, StreamOptions::default());
    world.run(async {
        let (disk, allowed): (SharedDisk, Arc<AtomicU32>) = (MemoryDisk::new(1 << 20), Arc::default());
        fill(&disk, 0, &[7; 4096]).await;
        server.serve(&(Arc::new(Silent(disk, allowed.clone())) as SharedDisk));
        let ClientOptions { patience, .. } = ClientOptions::default();
        let storage = open(&server, ClientOptions::default()).await.unwrap();
        let begun = world.now();
        let allow = async {
            let mut seen = 0;
            loop {
                if server.connections.get() != seen {
                    seen = server.connections.get();
                    allowed.store(1, Ordering::Relaxed);
                }
                world.sleep(Duration::from_millis(50)).await;
            }
        };
        let reads = async {
            join_all((0..8_u64).map(|part| {
                let storage = &storage;
                Box::pin(async move { read(storage, part * 512, 512).await })
            }))
            .await
        };
        let answers = futures_lite::future::or(reads, allow).await;
        for answer in answers {
            assert_eq!(answer.unwrap(), [7; 512]);
        }
        assert!(world.now() - begun > patience && server.connections.get() >= 8);
    });
}

#[test]
fn a_server_that_stalls_is_left_and_asked_again() {
    let world = Rc::new(World::new(4));
    let server = Server::new(&world, StreamOptions::default());
    world.run(async {
        let disk: SharedDisk = MemoryDisk::new(1 << 20);
        fill(&disk, 0, &[9; 512]).await;
        server.serve(&disk);
        server.is_mute.set(true);
        let error = open(&server, ClientOptions::default()).await.err().unwrap();
        assert!(error.chain().contains("no handshake within 15 seconds"), "{}", error.chain());
        server.is_mute.set(false);
        let storage = open(&server, ClientOptions::default()).await.unwrap();
        server.is_mute.set(true);
        server.cut();
        let back = async {
            world.sleep(Duration::from_secs(50)).await;
            server.is_mute.set(false);
        };
        let (answer, ()) = futures_lite::future::zip(read(&storage, 0, 512), back).await;
        assert_eq!(answer.unwrap(), [9; 512]);
    });
}

#[test]
fn another_export_is_never_read_as_if_it_were_the_first() {
    let world = Rc::new(World::new(5));
    let server = Server::new(&world, StreamOptions::default());
    world.run(async {
        server.serve(&(MemoryDisk::new(1 << 20) as SharedDisk));
        let storage = open(&server, ClientOptions::default()).await.unwrap();
        server.serve(&(MemoryDisk::new(2 << 20) as SharedDisk));
        server.cut();
        let error = read(&storage, 0, 512).await.unwrap_err();
        assert!(error.chain().contains("the export has changed"), "{}", error.chain());
    });
}

#[test]
fn what_was_written_and_not_flushed_is_not_taken_as_stored_after_a_lost_connection() {
    let world = Rc::new(World::new(6));
    let server = Server::new(&world, StreamOptions::default());
    world.run(async {
        let disk: SharedDisk = MemoryDisk::new(1 << 20);
        server.serve(&disk);
        let storage = open(&server, writing()).await.unwrap();
        storage.write(ImageOffset::ZERO, Buffer::copy_of(&[1; 512])).await.unwrap();
        storage.flush().await.unwrap();
        server.cut();
        world.sleep(Duration::from_secs(1)).await;
        storage.write(ImageOffset::ZERO, Buffer::copy_of(&[2; 512])).await.expect("all was flushed before");
        server.cut();
        world.sleep(Duration::from_secs(1)).await;
        for error in [storage.flush().await, storage.write(ImageOffset::ZERO, Buffer::zeroed(512)).await] {
            assert_eq!(error.unwrap_err().kind(), ErrorKind::Poisoned);
        }
        assert_eq!(read(&storage, 0, 512).await.unwrap(), [2; 512], "reads go on");
        drop(storage);
        let storage = open(&server, writing()).await.unwrap();
        storage.write(ImageOffset::ZERO, Buffer::copy_of(&[3; 512])).await.unwrap();
        storage.flush().await.unwrap();
    });
}

#[test]
fn an_export_that_does_not_exist_is_named() {
    let world = Rc::new(World::new(7));
    let server = Server::new(&world, StreamOptions::default());
    world.run(async {
        let error = open(&server, ClientOptions::default()).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.chain().contains("nbd://sim/disk"), "{}", error.chain());
        assert!(error.chain().contains("no export 'disk'"), "{}", error.chain());
        server.is_away.set(true);
        let error = open(&server, ClientOptions::default()).await.err().unwrap();
        assert!(error.chain().contains("connection refused"), "{}", error.chain());
    });
}
