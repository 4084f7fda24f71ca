//! Images whose host holds some writes back, and trials on them: an older write that lands late.

#![allow(dead_code, reason = "each test file uses its part")]

use std::sync::{Arc, Mutex};

use event_listener::Event;
use futures_lite::future::{block_on, poll_once};
use vellum_core::{
    Buffer, Disk, Error, ErrorKind, GuestOffset, ImageOffset, LocalFuture, MemoryStorage, Result,
    SharedStorage, Storage, WriteFlags, ZeroFlags,
};
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2, create, recover};
use vellum_sim::{ForwardStorage, Forwarding};

/// A unit of a cluster with subclusters is 4 KiB long, so that zeros of a sector are written as data.
pub(crate) const CLUSTER: u64 = 128 << 10;

/// A storage that holds back sectors full of certain bytes, and what is written behind them with the same
/// write; and that has no space for those full of certain others.
pub(crate) struct Held {
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

    pub(crate) fn hold(&self, byte: u8) {
        self.bytes.lock().unwrap().push(byte);
    }

    pub(crate) fn refuse(&self, byte: Option<u8>) {
        *self.refused.lock().unwrap() = byte;
    }

    pub(crate) fn free(&self, byte: u8) {
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
pub(crate) struct Fixture {
    pub(crate) image: Arc<MemoryStorage>,
    data: Option<Arc<MemoryStorage>>,
    pub(crate) held: Arc<Forwarding<Held>>,
}

impl Fixture {
    pub(crate) fn new(options: CreateOptions) -> Self {
        let image = MemoryStorage::new("image");
        let data = options.data_file.is_some().then(|| MemoryStorage::new("data"));
        let shared = data.clone().map(|file| file as SharedStorage);
        block_on(create(&*image, shared.as_ref(), &options)).unwrap();
        let held = Held::over(data.clone().unwrap_or_else(|| image.clone()));
        Self { image, data, held }
    }

    pub(crate) fn open(&self) -> Arc<Qcow2> {
        self.open_with(OpenOptions::default())
    }

    pub(crate) fn open_with(&self, options: OpenOptions) -> Arc<Qcow2> {
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

pub(crate) fn all() -> Vec<CreateOptions> {
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

pub(crate) fn write(disk: &Qcow2, at: u64, bytes: Vec<u8>) -> LocalFuture<'_, Result<()>> {
    disk.write(GuestOffset::new(at), Buffer::copy_of(&bytes), WriteFlags::default())
}

pub(crate) fn zero(disk: &Qcow2, at: u64, len: u64, may_unmap: bool) {
    let flags = ZeroFlags { may_unmap, ..ZeroFlags::default() };
    block_on(disk.write_zeroes(GuestOffset::new(at).span(len), flags)).unwrap();
}

pub(crate) fn sector(disk: &Qcow2, at: u64) -> u8 {
    let read = block_on(disk.read(GuestOffset::new(at), Buffer::zeroed(512))).unwrap().to_vec();
    assert!(read.iter().all(|byte| *byte == read[0]), "a sector is whole");
    read[0]
}

/// What the sector of W reads as when everything has been answered.
pub(crate) fn read_again(options: &CreateOptions) -> u8 {
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
pub(crate) fn flushed_beside(options: &CreateOptions) -> Option<u8> {
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
