//! Trials on an image without a journal: changes that free clusters, stopped half way while other threads
//! continue. A trial returns what is wrong afterwards.

#![allow(dead_code, reason = "each test file uses its part")]

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, GuestOffset, ImageOffset, ImageSpan, LocalFuture, MemoryStorage, Random, Result,
    SharedStorage, Storage, WriteFlags, Zeroes,
};
use vellum_format::perturb;
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2, create};
use vellum_sim::{ForwardStorage, Forwarding};

const CLUSTER: u64 = 4096;
const BYTES: usize = 4096;
/// How long a stopped thread waits for what only a wrong engine does.
const A_MOMENT: Duration = Duration::from_millis(300);
/// How long everybody waits for what must come.
const LONG: Duration = Duration::from_secs(30);

/// A file in memory whose next flush, and whose writes of some byte, can be held up, and whose punches are
/// watched.
struct Watched {
    inner: Arc<MemoryStorage>,
    flush: Mutex<Option<Hold>>,
    write: Mutex<Option<(u8, Hold)>>,
    watches_punches: bool,
    /// Punches of clusters that the medium names.
    bad_punches: AtomicU64,
}

/// Announces its arrival, and waits for a signal to continue, at most this long.
struct Hold(Sender<()>, Receiver<()>, Duration);

impl Hold {
    fn wait(self) {
        let _ = self.0.send(());
        let _ = self.1.recv_timeout(self.2);
    }
}

/// What is held, and the two ends by which a test sees and frees it.
fn hold(at_most: Duration) -> (Hold, Receiver<()>, Sender<()>) {
    let ((here, is_here), (go, may_go)) = (channel(), channel());
    (Hold(here, may_go, at_most), is_here, go)
}

impl Watched {
    fn new(content: &[u8], watches_punches: bool) -> Arc<Forwarding<Self>> {
        Forwarding::new(Self {
            inner: MemoryStorage::holding("image", content),
            flush: Mutex::default(),
            write: Mutex::default(),
            watches_punches,
            bad_punches: AtomicU64::new(0),
        })
    }

    /// What is left when the process is killed now.
    fn killed(&self) -> Vec<u8> {
        self.inner.content().to_vec()
    }
}

impl ForwardStorage for Watched {
    fn inner(&self) -> &dyn Storage {
        &*self.inner
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        let mut held = self.write.lock().unwrap();
        let is_it = held.as_ref().is_some_and(|(byte, _)| data.to_vec().iter().all(|here| here == byte));
        let held = if is_it { held.take() } else { None };
        Box::pin(async move {
            if let Some((_, hold)) = held {
                hold.wait();
            }
            self.inner.write(at, data).await
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let held = self.flush.lock().unwrap().take();
            if let Some(hold) = held {
                hold.wait();
            }
            std::thread::yield_now();
            self.inner.flush().await
        })
    }

    fn write_zeroes(&self, span: ImageSpan, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        if self.watches_punches && names(&self.killed(), span) {
            self.bad_punches.fetch_add(1, Ordering::Relaxed);
        }
        self.inner.write_zeroes(span, how)
    }
}

fn word(bytes: &[u8], at: u64) -> u64 {
    let at = usize::try_from(at).unwrap();
    bytes.get(at..at + 8).map_or(0, |word| u64::from_be_bytes(word.try_into().unwrap()))
}

fn place(entry: u64) -> u64 {
    entry & 0x00FF_FFFF_FFFF_FE00
}

/// Whether the tables of the image name a cluster of the run as guest data.
fn names(image: &[u8], span: ImageSpan) -> bool {
    let l1_entries = word(image, 32) & 0xFFFF_FFFF;
    let entries = (0..l1_entries).map(|index| place(word(image, word(image, 40) + index * 8)));
    let tables = entries.filter(|table| *table != 0);
    let data = tables.flat_map(|table| (0..CLUSTER / 8).map(move |index| word(image, table + index * 8)));
    data.map(place).any(|at| at != 0 && (span.start().bytes()..span.end().bytes()).contains(&at))
}

fn options(version: u32) -> CreateOptions {
    CreateOptions { size: 1 << 20, cluster_size: CLUSTER, version, ..CreateOptions::without_journal() }
}

fn new_image(version: u32) -> Vec<u8> {
    let image = MemoryStorage::new("image");
    block_on(create(&*image, None, &options(version))).unwrap();
    image.content().to_vec()
}

fn open(image: SharedStorage) -> Arc<Qcow2> {
    block_on(async {
        let header = Header::read(&*image).await.unwrap();
        let files = Files { image, data_file: None, below: None };
        Qcow2::open(header, files, OpenOptions::default()).await.unwrap()
    })
}

fn write(disk: &Qcow2, cluster: u64, byte: u8) {
    let at = GuestOffset::new(cluster * CLUSTER);
    block_on(disk.write(at, Buffer::copy_of(&[byte; BYTES]), WriteFlags::default())).unwrap();
}

fn flush(disk: &Qcow2) {
    block_on(disk.flush()).unwrap();
}

fn discard(disk: &Qcow2, cluster: u64) {
    let span = GuestOffset::new(cluster * CLUSTER).span(CLUSTER);
    block_on(disk.discard(span, WriteFlags::default())).unwrap();
}

fn read(disk: &Qcow2, cluster: u64) -> std::result::Result<Vec<u8>, String> {
    let read = block_on(disk.read(GuestOffset::new(cluster * CLUSTER), Buffer::zeroed(BYTES)));
    read.map(|bytes| bytes.to_vec()).map_err(|error| error.chain())
}

/// Opens what is left after a kill.
fn after(image: &[u8]) -> Arc<Qcow2> {
    open(MemoryStorage::holding("image", image))
}

const A: u64 = 0;
const B: u64 = 1;
/// Has a place from the beginning, so that writing there changes no mapping, and makes a flush due.
const OTHER: u64 = 9;

/// While one thread does `freeing`, and stands in the middle of it, this one flushes; the flush of the host
/// ends when the other has. Returns the disk and what it lies on.
fn flush_beside(
    content: &[u8],
    freeing: impl FnOnce(&Qcow2) + Send,
) -> (Arc<Forwarding<Watched>>, Arc<Qcow2>) {
    let image = Watched::new(content, false);
    let disk = open(image.clone());
    write(&disk, OTHER, b'O');
    flush(&disk);
    let (in_change, is_in_change, end_change) = hold(A_MOMENT);
    let (in_flush, is_in_flush, end_flush) = hold(LONG);
    std::thread::scope(|scope| {
        let freer = &disk;
        scope.spawn(move || {
            let mut hold = Some(in_change);
            perturb::do_in_a_change(Some(Box::new(move || hold.take().into_iter().for_each(Hold::wait))));
            freeing(freer);
            let _ = end_flush.send(());
        });
        is_in_change.recv_timeout(LONG).unwrap();
        write(&disk, OTHER, b'P');
        *image.flush.lock().unwrap() = Some(in_flush);
        scope.spawn(move || {
            // The flush has taken up what it takes up.
            let _ = is_in_flush.recv_timeout(LONG);
            let _ = end_change.send(());
        });
        flush(&disk);
    });
    (image, disk)
}

/// Block A is being discarded, B is written, the process is killed: A must not read as B.
pub(crate) fn foreign_bytes(version: u32) -> std::result::Result<(), String> {
    let (image, disk) = {
        let mut content = Vec::new();
        prepared(version, &mut content, |disk| write(disk, A, b'A'));
        flush_beside(&content, |disk| discard(disk, A))
    };
    write(&disk, B, b'B');
    let left = read(&after(&image.killed()), A)?;
    match left == [b'A'; BYTES] || left == [0; BYTES] {
        true => Ok(()),
        false => Err(format!("block A reads as {:?}…", &left[..4])),
    }
}

/// A closed image in which something was done.
fn prepared(version: u32, content: &mut Vec<u8>, act: impl FnOnce(&Qcow2)) {
    let storage = MemoryStorage::holding("image", &new_image(version));
    let disk = open(storage.clone());
    act(&disk);
    write(&disk, OTHER, b'O');
    block_on(disk.close()).unwrap();
    *content = storage.content().to_vec();
}

/// A part of a compressed cluster is written; the rest of it was there before, and must be after a kill.
pub(crate) fn compressed_data() -> std::result::Result<(), String> {
    let mut content = Vec::new();
    prepared(3, &mut content, |disk| write(disk, A, b'A'));
    // Block A as another program would have compressed it, where it lies.
    let entry = place(word(&content, word(&content, 40)));
    let at = place(word(&content, entry));
    let mut packer = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::default());
    packer.write_all(&[b'A'; BYTES]).unwrap();
    let packed = packer.finish().unwrap();
    let put = |content: &mut Vec<u8>, at: u64, bytes: &[u8]| {
        let at = usize::try_from(at).unwrap();
        content[at..at + bytes.len()].copy_from_slice(bytes);
    };
    put(&mut content, at, &[0; BYTES]);
    put(&mut content, at, &packed);
    put(&mut content, entry, &(1u64 << 62 | at).to_be_bytes());
    let (image, disk) = flush_beside(&content, |disk| {
        let part = Buffer::copy_of(&[b'a'; 512]);
        block_on(disk.write(GuestOffset::ZERO, part, WriteFlags::default())).unwrap();
    });
    write(&disk, OTHER, b'Q'); // before a change, what was freed is given back
    let left = read(&after(&image.killed()), A)?;
    match left[512..] == [b'A'; BYTES - 512] {
        true => Ok(()),
        false => Err("the rest of a compressed cluster is lost".to_owned()),
    }
}

/// No crash: a request that looked block A up before its cluster was freed writes there when the cluster is
/// B's.
pub(crate) fn late_write() -> std::result::Result<(), String> {
    let mut content = Vec::new();
    prepared(3, &mut content, |disk| write(disk, A, b'A'));
    let image = Watched::new(&content, false);
    let disk = open(image.clone());
    write(&disk, OTHER, b'O');
    flush(&disk);
    let (in_change, is_in_change, end_change) = hold(A_MOMENT);
    let (in_write, is_in_write, end_write) = hold(LONG);
    std::thread::scope(|scope| {
        let disk = &*disk;
        let freer = scope.spawn(move || {
            let mut hold = Some(in_change);
            perturb::do_in_a_change(Some(Box::new(move || hold.take().into_iter().for_each(Hold::wait))));
            discard(disk, A);
        });
        is_in_change.recv_timeout(LONG).unwrap();
        write(disk, OTHER, b'P');
        flush(disk);
        *image.write.lock().unwrap() = Some((b'L', in_write));
        let late = scope.spawn(move || write(disk, A, b'L'));
        is_in_write.recv_timeout(LONG).unwrap();
        let _ = end_change.send(());
        freer.join().unwrap();
        flush(disk);
        write(disk, B, b'B');
        flush(disk);
        let _ = end_write.send(());
        late.join().unwrap();
    });
    let left = read(&disk, B)?;
    match left == [b'B'; BYTES] {
        true => Ok(()),
        false => Err(format!("block B was flushed, and reads as {:?}…", &left[..4])),
    }
}

/// Threads write, free and flush, and each is held up at locks and in the middle of changes, as the seed
/// says. No cluster is punched that the medium names. Each thread calls `begin` first.
pub(crate) fn yielding_threads(version: u32, seed: u64, begin: fn()) -> std::result::Result<(), String> {
    let image = Watched::new(&new_image(version), true);
    let disk = open(image.clone());
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let disk = &*disk;
            scope.spawn(move || {
                let mut random = Random::from_seed(seed * 4 + thread);
                begin();
                perturb::begin(seed, thread);
                for round in 0..300 {
                    let cluster = thread * 64 + random.below(8);
                    match random.below(3) {
                        0 => discard(disk, cluster),
                        1 => flush(disk),
                        _ => write(disk, cluster, u8::try_from(round % 200 + 1).unwrap()),
                    }
                }
            });
        }
    });
    match image.bad_punches.load(Ordering::Relaxed) {
        0 => Ok(()),
        bad => Err(format!("{bad} punches of clusters that are still named")),
    }
}
