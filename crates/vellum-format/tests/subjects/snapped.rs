//! A disk whose snapshots the explorer makes and deletes, beside its other requests: a discard of 64 KiB
//! stands for that instead.
//!
//! ```text
//!   the guest's disk                                   │ one unit more: the book, a sector for each snapshot
//!   drop64k@0   make one ► read it ► write down its sum│ durable: from now on it is there, and reads so
//!   drop64k@2   the newest: write down that it goes    │ durable: it is there and reads so, or is not there
//!   elsewhere   the oldest     ► delete ► write it down│ durable: it is not there
//!   where clones are made of each: mark it ► write down │ durable: it is there, and marked
//!               deleting it is refused ► release it     │
//! ```
//!
//! The content of a snapshot is fixed when it is read for the first time, whatever is in flight meanwhile;
//! where nothing is, that is the content of the disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vellum_core::{
    Buffer, Disk, Error, ErrorKind, Geometry, GuestOffset, GuestSpan, ImageOffset, LocalFuture,
    MemoryStorage, Result, SharedDisk, SharedStorage, WriteFlags, ZeroFlags,
};
use vellum_format::native::snapshots::{revert, snapshots};
use vellum_format::native::{Native, OpenOptions};
use vellum_sim::{ForwardDisk, Forwarding};

use crate::common::native::{look_native, opening};

/// The request that stands for one snapshot more, or for one less.
const ASKS: u64 = 64 << 10;
/// What the book takes of the disk, at its end: 128 snapshots.
pub(crate) const BOOK: u64 = 64 << 10;
const SECTOR: u64 = 512;
/// The book's entry for a snapshot.
const THERE: u8 = 1;
const GOES: u8 = 2;
const GONE: u8 = 3;
const CLONED: u8 = 4;

pub(crate) struct Snapped {
    disk: Arc<Native>,
    /// The runs that a sum is taken of: all of the disk, or where the guest writes.
    looked_at: Vec<GuestSpan>,
    newest: GuestOffset,
    /// The book is at the end of this many bytes: the disk may be larger.
    size: u64,
    /// Requests that have begun, and that have ended.
    begun: AtomicU64,
    ended: AtomicU64,
    names: AtomicU64,
    /// Clones are made of each snapshot.
    has_clones: bool,
}

impl Snapped {
    /// `newest`: where a discard deletes the newest one; `size`: where the book ends.
    pub(crate) fn shared(
        disk: Arc<Native>,
        looked_at: Vec<GuestSpan>,
        newest: GuestOffset,
        size: u64,
        has_clones: bool,
    ) -> SharedDisk {
        let [begun, ended, names] = Default::default();
        Forwarding::new(Self { disk, looked_at, newest, size, begun, ended, names, has_clones })
    }

    async fn ask(&self, at: GuestOffset) -> Result<()> {
        let all = self.disk.snapshots()?;
        if at == GuestOffset::ZERO {
            let newest = all.last().map_or(0, |newest| newest.id);
            let name = format!("{newest}, {}", self.names.fetch_add(1, Ordering::Relaxed));
            return self.make(&name).await;
        }
        let Some(one) = (if at == self.newest { all.last() } else { all.first() }) else { return Ok(()) };
        let sum = self.sum_of(one.id).await?;
        if self.has_clones && one.is_cloned {
            match self.disk.snapshot_delete(&one.id.to_string()).await {
                Err(error) if matches!(error.kind(), ErrorKind::Refused | ErrorKind::NotFound) => {}
                Err(error) => return Err(error),
                Ok(()) => {
                    return Err(Error::corrupt(format!("snapshot {} was deleted under its clones", one.id)));
                }
            }
            // It is there for now, and may be marked or not.
            self.write_down(one.id, THERE, sum).await?;
            match self.disk.snapshot_release(&one.id.to_string()).await {
                Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Locked) => {
                    return Err(error);
                }
                _ => {}
            }
        }
        self.write_down(one.id, GOES, sum).await?;
        match self.disk.snapshot_delete(&one.id.to_string()).await {
            Ok(()) => self.write_down(one.id, GONE, 0).await,
            // Another user deletes it, or reads it.
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Locked | ErrorKind::Refused) =>
            {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    async fn make(&self, name: &str) -> Result<()> {
        let counts = || (self.begun.load(Ordering::SeqCst), self.ended.load(Ordering::SeqCst));
        let before = counts();
        let id = self.disk.snapshot_create(name, 0).await?;
        let sum = self.sum_of(id).await?;
        let now = sum_of(&*self.disk, &self.looked_at).await?;
        if before.0 == before.1 && counts() == before && sum != now {
            return Err(Error::corrupt(format!("snapshot {id} is not what the disk is")));
        }
        self.write_down(id, THERE, sum).await?;
        if self.has_clones {
            match self.disk.snapshot_mark_cloned(&id.to_string()).await {
                Ok(_) => self.write_down(id, CLONED, sum).await?,
                // Another user deletes it.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The content of a snapshot; of one that is gone meanwhile, anything.
    async fn sum_of(&self, id: u32) -> Result<u32> {
        match self.disk.snapshot_open(id) {
            Ok(open) => sum_of(&*open, &self.looked_at).await,
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error),
        }
    }

    async fn write_down(&self, id: u32, what: u8, sum: u32) -> Result<()> {
        let at = book(self.size).start() + u64::from(id) * SECTOR;
        let mut bytes = [what; 512];
        bytes[4..8].copy_from_slice(&sum.to_be_bytes());
        self.disk.write(at, Buffer::copy_of(&bytes), WriteFlags::FUA).await
    }

    async fn change(&self, request: LocalFuture<'_, Result<()>>) -> Result<()> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        let result = request.await;
        self.ended.fetch_add(1, Ordering::SeqCst);
        result
    }
}

fn book(size: u64) -> GuestSpan {
    GuestOffset::new(size - BOOK).span(BOOK)
}

async fn sum_of(disk: &dyn Disk, looked_at: &[GuestSpan]) -> Result<u32> {
    // Of another size it is another disk.
    let mut sum = crc32c::crc32c(&disk.geometry().size.to_be_bytes());
    for span in looked_at {
        let bytes =
            disk.read(span.start(), Buffer::zeroed(usize::try_from(span.len()).expect("small"))).await?;
        sum = bytes.pieces().fold(sum, crc32c::crc32c_append);
    }
    Ok(sum)
}

/// Whether the snapshots of a closed image agree with the book.
pub(crate) async fn verify(
    image: &SharedStorage,
    below: Option<SharedDisk>,
    looked_at: &[GuestSpan],
    size: u64,
) -> Result<(), String> {
    let text = |error: Error| error.chain();
    let all = snapshots(image).await.map_err(text)?;
    let there: Vec<u32> = all.iter().map(|one| one.id).collect();
    let cloned: Vec<u32> = all.iter().filter(|one| one.is_cloned).map(|one| one.id).collect();
    let open = async |snapshot: Option<u32>| {
        let snapshot = snapshot.map(|id| id.to_string());
        let options = OpenOptions { snapshot, read_only: true, ..opening() };
        Native::open(image.clone(), below.clone(), options).await.map_err(text)
    };
    let disk = open(None).await?;
    let book = book(size);
    let bytes =
        disk.read(book.start(), Buffer::zeroed(usize::try_from(BOOK).expect("small"))).await.map_err(text)?;
    for (id, line) in (0..).zip(bytes.contiguous().slice().chunks(512)) {
        let is_there = there.contains(&id);
        let what = line[0];
        if what == CLONED && !cloned.contains(&id) {
            return Err(format!("snapshot {id} could be deleted under its clones"));
        }
        if (what == THERE && !is_there) || (what == GONE && is_there) {
            return Err(format!("snapshot {id} is {}", if is_there { "back" } else { "lost" }));
        }
        if !is_there {
            continue;
        }
        let sum = sum_of(&*open(Some(id)).await?, looked_at).await.map_err(text)?;
        if matches!(what, THERE | GOES | CLONED) && sum.to_be_bytes() != line[4..8] {
            return Err(format!("snapshot {id} has changed"));
        }
    }
    Ok(())
}

/// Reverts copies of a closed image to its oldest snapshot and to its newest: the disk becomes what the snapshot was.
pub(crate) async fn go_back(
    image: &SharedStorage,
    below: Option<SharedDisk>,
    looked_at: &[GuestSpan],
) -> Result<(), String> {
    let text = |error: Error| error.chain();
    // Of few images, by what their tables say: it takes much longer than all else.
    let tables = image.read(ImageOffset::ZERO, Buffer::zeroed(32 << 10)).await.map_err(text)?;
    if !crc32c::crc32c(&tables.to_vec()).is_multiple_of(64) {
        return Ok(());
    }
    let all = snapshots(image).await.map_err(text)?;
    let bytes = image.read(ImageOffset::ZERO, Buffer::zeroed(usize::try_from(image.len()).expect("small")));
    let bytes = bytes.await.map_err(text)?.to_vec();
    for one in all.first().into_iter().chain(all.last()) {
        let copy: SharedStorage = MemoryStorage::holding("image", &bytes);
        let id = one.id.to_string();
        let read_only = |snapshot| OpenOptions { snapshot, read_only: true, ..opening() };
        let open = async |snapshot| {
            Native::open(copy.clone(), below.clone(), read_only(snapshot)).await.map_err(text)
        };
        let seen = sum_of(&*open(Some(id.clone())).await?, looked_at).await.map_err(text)?;
        let options = OpenOptions { journal_key: Some(1), ..opening() };
        revert(copy.clone(), below.clone(), options, &id).await.map_err(text)?;
        if sum_of(&*open(None).await?, looked_at).await.map_err(text)? != seen {
            return Err(format!("the disk is not what snapshot {id} was, to which it was reverted"));
        }
        let (report, lines) = look_native(&copy).await.map_err(text)?;
        if !report.is_clean() {
            return Err(format!("reverted to snapshot {id}, the check says: {}", lines.join("; ")));
        }
    }
    Ok(())
}

impl ForwardDisk for Snapped {
    fn inner(&self) -> &dyn Disk {
        &*self.disk
    }

    fn geometry(&self) -> Geometry {
        let inner = self.disk.geometry();
        Geometry { size: self.size - BOOK, ..inner }
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.change(self.disk.write(at, data, flags)))
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.change(self.disk.write_zeroes(span, flags)))
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        match span.len() {
            ASKS => Box::pin(self.ask(span.start())),
            _ => Box::pin(self.change(self.disk.discard(span, flags))),
        }
    }
}
