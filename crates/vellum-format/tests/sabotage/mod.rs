//! Bugs on purpose, put between the engine and its host, or between the guest and the engine: what a mistake
//! in the order of metadata looks like from outside. The explorer must find each of them.

use std::collections::VecDeque;
use std::sync::Mutex;

use vellum_core::{
    Buffer, Disk, GuestOffset, GuestSpan, ImageOffset, ImageSpan, LocalFuture, Result, SharedDisk,
    SharedStorage, Storage, WriteFlags, ZeroFlags, Zeroes,
};
use vellum_sim::explore::Subject;
use vellum_sim::{Content, ForwardDisk, ForwardStorage, Forwarding};

/// What a write of the image is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Header,
    RefcountTable,
    Refcounts,
    L1,
    L2,
    Data,
}

/// One bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bug {
    /// A flush is left out when this was the last thing written before it.
    NoFlushAfter(Kind),
    /// No flush is ever passed on.
    NoFlush,
    /// A failed flush is taken for a good one.
    FlushErrorIgnored,
    /// A write is answered and not done.
    Lost(Kind),
    /// A write is done after the flush that should cover it.
    Late(Kind),
    /// The last sector of a longer write is not written.
    Short(Kind),
    /// Space that is to read as zero is left as it was.
    NoPunch,
    /// As above, and it is punched only after the next flush.
    LatePunch,
    /// The end of the file is truncated one cluster too early.
    CutTooShort,
    /// The guest's request to be durable is forgotten.
    FuaIgnored,
    /// Every second flush of the guest is answered and not done.
    FlushSkipped,
    /// A guest's write is done after the request that follows it.
    WriteAnsweredEarly,
    /// A discard reaches a sector too far.
    DiscardTooLong,
    /// A write that begins within a sector clears the bytes before it.
    EdgeNotMerged,
    /// A write of zeros is taken for a discard that does nothing.
    ZeroesIgnored,
    /// Closing does not write what is still in memory.
    CloseForgets,
}

/// A subject with a bug in it.
pub(crate) struct Sabotaged<S> {
    pub(crate) inner: S,
    pub(crate) bug: Bug,
}

impl<S: Subject> Subject for Sabotaged<S> {
    fn name(&self) -> String {
        format!("{} with {:?}", self.inner.name(), self.bug)
    }

    fn image(&self) -> Content {
        self.inner.image()
    }

    fn guest(&self) -> Content {
        self.inner.guest()
    }

    fn places(&self) -> Vec<GuestOffset> {
        self.inner.places()
    }

    fn open(&self, image: SharedStorage) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move {
            let storage =
                Forwarding::new(BadStorage { inner: image, bug: self.bug, state: Mutex::default() });
            let inner = self.inner.open(storage).await?;
            Ok(Forwarding::new(BadDisk { inner, bug: self.bug, state: Mutex::default() }) as SharedDisk)
        })
    }

    fn verify(&self, image: SharedStorage) -> LocalFuture<'_, std::result::Result<(), String>> {
        self.inner.verify(image)
    }
}

struct BadStorage {
    inner: SharedStorage,
    bug: Bug,
    state: Mutex<StorageState>,
}

#[derive(Default)]
struct StorageState {
    last: Option<Kind>,
    held: VecDeque<Held>,
}

enum Held {
    Write(ImageOffset, Buffer),
    Zeroes(ImageSpan, Zeroes),
}

impl BadStorage {
    async fn words(&self, at: u64, count: usize) -> Result<Vec<u64>> {
        let bytes = self.inner.read(ImageOffset::new(at), Buffer::zeroed(count * 8)).await?;
        Ok(bytes.slice().chunks_exact(8).map(|word| u64::from_be_bytes(word.try_into().unwrap())).collect())
    }

    /// What is at a place, according to the image by now.
    async fn kind(&self, at: ImageOffset) -> Result<Kind> {
        let header = self.words(0, 8).await?;
        let cluster = 1u64 << (header[2] & 0xFFFF_FFFF);
        let (l1, table) = (header[5], header[6]);
        let l1_len = header[4] & 0xFFFF_FFFF;
        let is_in = |start: u64, len: u64| start <= at.bytes() && at.bytes() < start + len;
        if is_in(0, cluster) {
            return Ok(Kind::Header);
        }
        if is_in(l1, l1_len * 8) {
            return Ok(Kind::L1);
        }
        if is_in(table, cluster) {
            return Ok(Kind::RefcountTable);
        }
        for block in self.words(table, usize::try_from(cluster / 8).unwrap()).await? {
            if block != 0 && is_in(block, cluster) {
                return Ok(Kind::Refcounts);
            }
        }
        for entry in self.words(l1, usize::try_from(l1_len).unwrap()).await? {
            let place = entry & 0x00FF_FFFF_FFFF_FE00;
            if place != 0 && is_in(place, cluster) {
                return Ok(Kind::L2);
            }
        }
        Ok(Kind::Data)
    }

    async fn release_held(&self) -> Result<()> {
        let held = std::mem::take(&mut self.state.lock().unwrap().held);
        for held in held {
            match held {
                Held::Write(at, data) => self.inner.write(at, data).await?,
                Held::Zeroes(span, how) => self.inner.write_zeroes(span, how).await?,
            }
        }
        Ok(())
    }
}

impl ForwardStorage for BadStorage {
    fn inner(&self) -> &dyn Storage {
        &*self.inner
    }

    fn write(&self, at: ImageOffset, mut data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let kind = self.kind(at).await?;
            self.state.lock().unwrap().last = Some(kind);
            match self.bug {
                Bug::Lost(lost) if lost == kind => return Ok(()),
                Bug::Late(late) if late == kind => {
                    self.state.lock().unwrap().held.push_back(Held::Write(at, data));
                    return Ok(());
                }
                Bug::Short(short) if short == kind && data.len() > 512 => {
                    data = data.split_to(data.len() - 512)
                }
                _ => {}
            }
            self.inner.write(at, data).await
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let last = self.state.lock().unwrap().last;
            let skip = match self.bug {
                Bug::NoFlush => true,
                Bug::NoFlushAfter(kind) => last == Some(kind),
                _ => false,
            };
            if skip {
                return Ok(());
            }
            let flushed = self.inner.flush().await;
            self.release_held().await?;
            if self.bug == Bug::FlushErrorIgnored { Ok(()) } else { flushed }
        })
    }

    fn write_zeroes(&self, span: ImageSpan, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        match self.bug {
            Bug::NoPunch => Box::pin(async { Ok(()) }),
            Bug::LatePunch => {
                self.state.lock().unwrap().held.push_back(Held::Zeroes(span, how));
                Box::pin(async { Ok(()) })
            }
            _ => self.inner.write_zeroes(span, how),
        }
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        let is_cut = self.bug == Bug::CutTooShort && len < self.inner.len();
        self.inner.set_len(if is_cut { len - 4096 } else { len })
    }
}

struct BadDisk {
    inner: SharedDisk,
    bug: Bug,
    state: Mutex<DiskState>,
}

#[derive(Default)]
struct DiskState {
    held: Option<(GuestOffset, Buffer, WriteFlags)>,
    flushes: u64,
}

impl BadDisk {
    async fn release_held(&self) -> Result<()> {
        let held = self.state.lock().unwrap().held.take();
        match held {
            Some((at, data, flags)) => self.inner.write(at, data, flags).await,
            None => Ok(()),
        }
    }
}

impl ForwardDisk for BadDisk {
    fn inner(&self) -> &dyn Disk {
        &*self.inner
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let fua = flags.fua && self.bug != Bug::FuaIgnored;
            let flags = WriteFlags { fua };
            match self.bug {
                Bug::WriteAnsweredEarly => {
                    self.release_held().await?;
                    self.state.lock().unwrap().held = Some((at, data, flags));
                    Ok(())
                }
                Bug::EdgeNotMerged => {
                    let edge = at.bytes() % 512;
                    let start = GuestOffset::new(at.bytes() - edge);
                    let mut whole = Buffer::zeroed(usize::try_from(edge).unwrap());
                    whole.append(data);
                    self.inner.write(start, whole, flags).await
                }
                _ => self.inner.write(at, data, flags).await,
            }
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let number = {
                let mut state = self.state.lock().unwrap();
                state.flushes += 1;
                state.flushes
            };
            if self.bug == Bug::FlushSkipped && number % 2 == 0 {
                return Ok(());
            }
            let flushed = self.inner.flush().await;
            self.release_held().await?;
            flushed
        })
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        if self.bug == Bug::ZeroesIgnored {
            return Box::pin(async { Ok(()) });
        }
        self.inner.write_zeroes(span, flags)
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        let more = if self.bug == Bug::DiscardTooLong { 4096 } else { 0 };
        let end = GuestOffset::new((span.end().bytes() + more).min(self.geometry().size));
        self.inner.discard(GuestSpan::between(span.start(), end), flags)
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        if self.bug == Bug::CloseForgets {
            return Box::pin(async { Ok(()) });
        }
        Box::pin(async move {
            self.release_held().await?;
            self.inner.close().await
        })
    }
}
