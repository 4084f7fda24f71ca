//! An older write that lands where a unit was zeroed meanwhile, and is being filled again.
//!
//! ```text
//!   W writes in place ───────── held ─────────────────► lands, answered
//!          unit made zero, answered
//!                 N writes the unit again ─ its bytes are there ── held ────────────────► published, answered
//!                                                           Z zeros, sent after W's answer
//! ```
//!
//! What must hold: W was answered before Z was sent, so no read returns W's bytes once Z was answered, with a
//! crash or without one (contract 1 and 3). And a journal's check of N's bytes must not fail because of W:
//! what was flushed with them would be lost. With the seeded mistake each of the tests fails.

use std::sync::{Arc, Mutex};

use event_listener::Event;
use futures_lite::future::{block_on, poll_once};
use vellum_core::{
    Buffer, Disk, Error, ErrorKind, GuestOffset, HostTally, ImageOffset, LocalFuture, MemoryStorage, Result,
    SharedStorage, Storage, WriteFlags, ZeroFlags,
};
use vellum_format::qcow2::check::check;
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2, create, recover};
use vellum_format::report::Repair;
use vellum_format::sabotage::{Bug, put_in};
use vellum_sim::{ForwardStorage, Forwarding};

/// A unit of a cluster with subclusters is 4 KiB long, so that zeros of a sector are written as data.
const CLUSTER: u64 = 128 << 10;

/// A storage that holds back sectors full of certain bytes, and what is written behind them with the same
/// write; and that has no space for those full of certain others.
struct Held {
    inner: Arc<MemoryStorage>,
    bytes: Mutex<Vec<u8>>,
    refused: Mutex<Option<u8>>,
    freed: Event,
}

impl Held {
    fn over(inner: Arc<MemoryStorage>) -> Arc<Forwarding<Self>> {
        Forwarding::new(Self {
            inner,
            bytes: Mutex::default(),
            refused: Mutex::default(),
            freed: Event::new(),
        })
    }

    fn hold(&self, byte: u8) {
        self.bytes.lock().unwrap().push(byte);
    }

    fn refuse(&self, byte: Option<u8>) {
        *self.refused.lock().unwrap() = byte;
    }

    fn free(&self, byte: u8) {
        self.bytes.lock().unwrap().retain(|held| *held != byte);
        self.freed.notify(usize::MAX);
    }

    fn holds(&self, byte: u8) -> bool {
        self.bytes.lock().unwrap().contains(&byte)
    }
}

impl ForwardStorage for Held {
    fn inner(&self) -> &dyn Storage {
        &*self.inner
    }

    fn write(&self, at: ImageOffset, mut data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let bytes = data.to_vec();
            let refused = *self.refused.lock().unwrap();
            if bytes.chunks(512).any(|sector| sector.iter().all(|byte| Some(*byte) == refused)) {
                return Err(Error::new(ErrorKind::NoSpace, "the host is full"));
            }
            let is_held = |sector: &[u8]| sector.iter().all(|byte| *byte == sector[0] && self.holds(*byte));
            let held = bytes.chunks(512).position(is_held);
            let Some(landed) = held.map(|sector| sector * 512) else {
                return self.inner.write(at, data).await;
            };
            let byte = bytes[landed];
            if landed > 0 {
                self.inner.write(at, data.split_to(landed)).await?;
            }
            loop {
                let freed = self.freed.listen();
                if !self.holds(byte) {
                    return self.inner.write(at + landed as u64, data).await;
                }
                freed.await;
            }
        })
    }
}

/// The image, and the file of its guest data if that is another one.
struct Fixture {
    image: Arc<MemoryStorage>,
    data: Option<Arc<MemoryStorage>>,
    held: Arc<Forwarding<Held>>,
}

impl Fixture {
    fn new(options: CreateOptions) -> Self {
        let image = MemoryStorage::new("image");
        let data = options.data_file.is_some().then(|| MemoryStorage::new("data"));
        let shared = data.clone().map(|file| file as SharedStorage);
        block_on(create(&*image, shared.as_ref(), &options)).unwrap();
        let held = Held::over(data.clone().unwrap_or_else(|| image.clone()));
        Self { image, data, held }
    }

    fn open(&self) -> Arc<Qcow2> {
        self.open_with(OpenOptions::default())
    }

    fn open_with(&self, options: OpenOptions) -> Arc<Qcow2> {
        block_on(async {
            let header = Header::read(&*self.image).await.unwrap();
            let held: SharedStorage = self.held.clone();
            let files = match self.data {
                None => Files { image: held, data_file: None, below: None },
                Some(_) => Files { image: self.image.clone(), data_file: Some(held), below: None },
            };
            Qcow2::open(header, files, options).await.unwrap()
        })
    }
}

fn all() -> Vec<CreateOptions> {
    let plain = CreateOptions { size: 2 << 20, cluster_size: CLUSTER, ..CreateOptions::without_journal() };
    let extended = CreateOptions { extended_l2: true, ..plain.clone() };
    let journal = Some(256 << 10);
    vec![
        plain.clone(),
        extended.clone(),
        CreateOptions { journal, ..plain.clone() },
        CreateOptions { journal, ..extended },
        CreateOptions { data_file: Some("data".to_owned()), ..plain },
    ]
}

fn write(disk: &Qcow2, at: u64, bytes: Vec<u8>) -> LocalFuture<'_, Result<()>> {
    disk.write(GuestOffset::new(at), Buffer::copy_of(&bytes), WriteFlags::default())
}

fn zero(disk: &Qcow2, at: u64, len: u64, may_unmap: bool) {
    let flags = ZeroFlags { may_unmap, ..ZeroFlags::default() };
    block_on(disk.write_zeroes(GuestOffset::new(at).span(len), flags)).unwrap();
}

fn sector(disk: &Qcow2, at: u64) -> u8 {
    let read = block_on(disk.read(GuestOffset::new(at), Buffer::zeroed(512))).unwrap().to_vec();
    assert!(read.iter().all(|byte| *byte == read[0]), "a sector is whole");
    read[0]
}

/// What the sector of W reads as when everything has been answered.
fn read_again(options: &CreateOptions) -> u8 {
    let fixture = Fixture::new(options.clone());
    let disk = fixture.open();
    let cluster = usize::try_from(CLUSTER).unwrap();
    block_on(write(&disk, 0, vec![1; cluster])).unwrap();
    fixture.held.hold(2);
    let mut older = write(&disk, 0, vec![2; 512]);
    assert!(block_on(poll_once(&mut older)).is_none(), "it is on its way");
    zero(&disk, 0, CLUSTER, options.data_file.is_some());
    fixture.held.hold(4);
    let mut newer = write(&disk, 0, [vec![3; cluster], vec![4; 512]].concat());
    assert!(block_on(poll_once(&mut newer)).is_none(), "half of it is on its way, at most");
    fixture.held.free(2);
    block_on(older).unwrap();
    zero(&disk, 0, 512, false);
    fixture.held.free(4);
    block_on(newer).unwrap();
    assert_eq!((sector(&disk, 512), sector(&disk, CLUSTER)), (3, 4));
    sector(&disk, 0)
}

/// Whether what was flushed beside N is there after a kill. `None`: the image cannot be recovered.
fn flushed_beside(options: &CreateOptions) -> Option<u8> {
    let fixture = Fixture::new(options.clone());
    let disk = fixture.open();
    block_on(write(&disk, 0, vec![1; 8192])).unwrap();
    fixture.held.hold(2);
    let mut older = write(&disk, 0, vec![2; 512]);
    assert!(block_on(poll_once(&mut older)).is_none(), "it is on its way");
    zero(&disk, 0, CLUSTER, false);
    let mut newer = write(&disk, 0, vec![3; 512]);
    let answered = block_on(poll_once(&mut newer)).is_some();
    block_on(write(&disk, 7 * CLUSTER, vec![7; 512])).unwrap();
    block_on(disk.flush()).unwrap();
    fixture.held.free(2);
    block_on(older).unwrap();
    if !answered {
        block_on(newer).unwrap();
    }
    let left: SharedStorage = MemoryStorage::holding("image", &fixture.image.content().to_vec());
    block_on(async {
        recover(&left).await.ok()?;
        let header = Header::read(&*left).await.ok()?;
        let files = Files { image: left, data_file: None, below: None };
        let disk = Qcow2::open(header, files, OpenOptions::default()).await.ok()?;
        let read = disk.read(GuestOffset::new(7 * CLUSTER), Buffer::zeroed(512)).await.ok()?;
        Some(read.to_vec()[0])
    })
}

#[test]
fn what_was_overwritten_does_not_come_back() {
    for options in all() {
        let read = read_again(&options);
        assert!(read == 3 || read == 0, "{options:?}: the sector reads as {read}");
        put_in(Some(Bug::LateWritesMet));
        let read = read_again(&options);
        put_in(None);
        assert_eq!(read, 2, "{options:?}: the seeded mistake shows");
    }
}

/// Flushes of the host that a cluster costs which was zero and is written again, while a request for another
/// one hangs. `None`: it waits for that.
fn flushes_beside_a_hung_request(options: &CreateOptions, is_hung: bool) -> Option<u64> {
    let fixture = Fixture::new(options.clone());
    let tally = HostTally::default();
    let disk = fixture.open_with(OpenOptions { tally: tally.clone(), ..OpenOptions::default() });
    for cluster in [0, 1] {
        block_on(write(&disk, cluster * CLUSTER, vec![1; 8192])).unwrap();
    }
    block_on(disk.flush()).unwrap();
    fixture.held.hold(2);
    let mut hung = write(&disk, 5 * CLUSTER, vec![2; 8192]);
    if is_hung {
        assert!(block_on(poll_once(&mut hung)).is_none(), "it hangs");
    }
    zero(&disk, 0, CLUSTER, false);
    let flushes = || tally.data.counts().flushes + tally.metadata.counts().flushes;
    let before = flushes();
    let mut newer = write(&disk, 4096, vec![3; 512]);
    let answered = block_on(poll_once(&mut newer));
    let is_answered = answered.is_some();
    if let Some(result) = answered {
        result.unwrap();
        block_on(disk.flush()).unwrap();
        assert_eq!((sector(&disk, 0), sector(&disk, 4096)), (0, 3));
    }
    let after = flushes();
    fixture.held.free(2);
    block_on(hung).unwrap();
    if !is_answered {
        block_on(newer).unwrap();
    }
    assert_eq!((sector(&disk, 0), sector(&disk, 4096), sector(&disk, CLUSTER)), (0, 3, 1));
    block_on(disk.close()).unwrap();
    let shared: SharedStorage = fixture.image.clone();
    let header = block_on(Header::read(&*shared)).unwrap();
    let report = block_on(check(&header, &shared, Repair::Nothing, &mut |_| {})).unwrap();
    assert!(report.is_clean(), "{options:?}: {report:?}");
    is_answered.then_some(after - before)
}

#[test]
fn a_cluster_that_was_zero_is_written_while_a_request_for_another_hangs() {
    for options in all() {
        let alone = flushes_beside_a_hung_request(&options, false);
        let beside = flushes_beside_a_hung_request(&options, true);
        match options.data_file {
            None => assert!(beside.is_some() && beside <= alone, "{options:?}: {beside:?}, alone {alone:?}"),
            Some(_) => assert_eq!(beside, None, "there is no other place for it"),
        }
    }
}

#[test]
fn what_was_flushed_beside_it_is_there() {
    for options in all().into_iter().filter(|options| options.journal.is_some()) {
        assert_eq!(flushed_beside(&options), Some(7), "{options:?}");
        put_in(Some(Bug::LateWritesMet));
        let beside = flushed_beside(&options);
        put_in(None);
        assert_ne!(beside, Some(7), "{options:?}: the seeded mistake shows");
    }
}

/// A write that waits for a claim while a part of what it writes is made zero beside it, and then finds the
/// host full: it fails for lack of space, as one would that had not waited.
#[test]
fn a_write_beside_zeros_that_finds_the_host_full_says_so() {
    for options in all().into_iter().filter(|options| options.data_file.is_none()) {
        let fixture = Fixture::new(options.clone());
        let disk = fixture.open();
        block_on(write(&disk, CLUSTER, vec![1; 4096])).unwrap();
        fixture.held.hold(2);
        let mut before = write(&disk, CLUSTER - 512, vec![2; 512]);
        assert!(block_on(poll_once(&mut before)).is_none(), "it holds the claim");
        let both = usize::try_from(512 + 4096).unwrap();
        let mut late = write(&disk, CLUSTER - 512, vec![3; both]);
        assert!(block_on(poll_once(&mut late)).is_none(), "it waits for the claim");
        zero(&disk, CLUSTER, CLUSTER, false);
        fixture.held.refuse(Some(3));
        fixture.held.free(2);
        block_on(before).unwrap();
        assert_eq!(block_on(late).unwrap_err().kind(), ErrorKind::NoSpace, "{options:?}");
        fixture.held.refuse(None);
        block_on(write(&disk, CLUSTER - 512, vec![3; both])).unwrap();
        assert_eq!((sector(&disk, CLUSTER - 512), sector(&disk, CLUSTER)), (3, 3));
        block_on(disk.close()).unwrap();
    }
}
