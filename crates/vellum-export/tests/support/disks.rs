//! Disks that do what a test needs: wait, fail, answer out of order, have a map, count.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use event_listener::Event;
use futures_lite::future::yield_now;
use vellum_core::{
    BlockSize, Buffer, Disk, Error, ErrorKind, Extent, Geometry, GuestOffset, GuestSpan, ImageOffset,
    LocalFuture, Losses, MemoryStorage, Place, Random, Result, SharedDisk, Storage, WriteFlags, ZeroFlags,
    Zeroes,
};

/// What a request is, for the rules of a [`RuledDisk`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    Flush,
    Zero,
    Discard,
    Map,
}

/// One request that passed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    pub kind: Kind,
    pub at: u64,
    pub len: u64,
    pub fua: bool,
    pub zero: ZeroFlags,
}

type Failure = Box<dyn Fn(&Seen) -> Option<Error> + Send + Sync>;

/// A sparse disk in memory that records its requests and can be made to wait at its gate, answer late and
/// fail.
pub struct RuledDisk {
    pub geometry: Geometry,
    /// So many bytes were added behind the end.
    pub added: AtomicU64,
    storage: Arc<MemoryStorage>,
    seen: Mutex<Vec<Seen>>,
    failure: Mutex<Option<Failure>>,
    /// Requests wait while this is not zero.
    gate: AtomicUsize,
    opened: Event,
    /// Requests that are in flight.
    pub running: AtomicUsize,
    pub running_max: AtomicUsize,
    jitter: Mutex<Option<Random>>,
    /// Places of the map that are not those of the storage.
    places: Mutex<BTreeMap<u64, (u64, Place)>>,
    pub maps: AtomicU64,
    pub geometries: AtomicU64,
    /// Of writes that were answered.
    pub losses: Arc<Losses>,
}

impl RuledDisk {
    pub fn new(size: u64) -> Arc<Self> {
        Self::with(Geometry {
            size,
            block_size: BlockSize::from_shift(0),
            preferred_size: BlockSize::PAGE,
            read_only: false,
            fast_zeroes: true,
        })
    }

    pub fn with(geometry: Geometry) -> Arc<Self> {
        Arc::new(Self {
            geometry,
            added: AtomicU64::new(0),
            storage: MemoryStorage::new("ruled disk"),
            seen: Mutex::default(),
            failure: Mutex::default(),
            gate: AtomicUsize::new(0),
            opened: Event::new(),
            running: AtomicUsize::new(0),
            running_max: AtomicUsize::new(0),
            jitter: Mutex::default(),
            places: Mutex::default(),
            maps: AtomicU64::new(0),
            geometries: AtomicU64::new(0),
            losses: Arc::default(),
        })
    }

    /// The requests since the last call.
    pub fn take_seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.seen.lock().unwrap())
    }

    pub fn fail(&self, rule: impl Fn(&Seen) -> Option<Error> + Send + Sync + 'static) {
        *self.failure.lock().unwrap() = Some(Box::new(rule));
    }

    pub fn close_gate(&self) {
        self.gate.store(1, Ordering::Release);
    }

    pub fn open_gate(&self) {
        self.gate.store(0, Ordering::Release);
        self.opened.notify(usize::MAX);
    }

    /// Requests end in random order.
    pub fn answer_late(&self, random: Random) {
        *self.jitter.lock().unwrap() = Some(random);
    }

    /// From `at` on, `len` bytes are reported to be in this place, whatever they contain.
    pub fn say(&self, at: u64, len: u64, place: Place) {
        self.places.lock().unwrap().insert(at, (len, place));
    }

    pub fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let content = self.storage.content();
        let mut bytes = vec![0; len];
        content.read(ImageOffset::new(at), &mut bytes);
        bytes
    }

    async fn pass(&self, seen: Seen) -> Result<()> {
        let running = self.running.fetch_add(1, Ordering::AcqRel) + 1;
        self.running_max.fetch_max(running, Ordering::AcqRel);
        // A rule may panic.
        let failure =
            self.failure.lock().unwrap_or_else(PoisonError::into_inner).as_ref().and_then(|rule| rule(&seen));
        self.seen.lock().unwrap().push(seen);
        let yields = self.jitter.lock().unwrap().as_mut().map_or(0, |random| random.below(6));
        for _ in 0..yields {
            yield_now().await;
        }
        loop {
            let opened = self.opened.listen();
            if self.gate.load(Ordering::Acquire) == 0 {
                break;
            }
            opened.await;
        }
        self.running.fetch_sub(1, Ordering::AcqRel);
        failure.map_or(Ok(()), Err)
    }

    fn seen(kind: Kind, at: GuestOffset, len: u64) -> Seen {
        Seen { kind, at: at.bytes(), len, fua: false, zero: ZeroFlags::default() }
    }

    fn size(&self) -> u64 {
        self.geometry.size + self.added.load(Ordering::Acquire)
    }

    fn inside(&self, at: GuestOffset, len: u64) -> Result<()> {
        match GuestSpan::checked(at, len).filter(|span| span.end().bytes() <= self.size()) {
            Some(_) => Ok(()),
            None => Err(Error::invalid("past the end")),
        }
    }
}

impl Disk for RuledDisk {
    fn geometry(&self) -> Geometry {
        self.geometries.fetch_add(1, Ordering::AcqRel);
        Geometry { size: self.size(), ..self.geometry.clone() }
    }

    fn losses(&self) -> Option<Arc<Losses>> {
        Some(self.losses.clone())
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            self.inside(at, buffer.len() as u64)?;
            self.pass(Self::seen(Kind::Read, at, buffer.len() as u64)).await?;
            self.storage.read(ImageOffset::new(at.bytes()), buffer).await
        })
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.inside(at, data.len() as u64)?;
            let seen = Seen { fua: flags.fua, ..Self::seen(Kind::Write, at, data.len() as u64) };
            self.pass(seen).await?;
            self.storage.write(ImageOffset::new(at.bytes()), data).await
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.pass(Self::seen(Kind::Flush, GuestOffset::ZERO, 0)))
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.inside(span.start(), span.len())?;
            self.pass(Seen { zero: flags, ..Self::seen(Kind::Zero, span.start(), span.len()) }).await?;
            if flags.fast_only && !self.geometry.fast_zeroes {
                return Err(Error::new(ErrorKind::Unsupported, "zeros would be written one by one"));
            }
            let span = ImageOffset::new(span.start().bytes()).span(span.len());
            self.storage.write_zeroes(span, Zeroes::MayUnmap).await
        })
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.inside(span.start(), span.len())?;
            self.pass(Seen { fua: flags.fua, ..Self::seen(Kind::Discard, span.start(), span.len()) }).await?;
            self.storage.discard(ImageOffset::new(span.start().bytes()).span(span.len())).await
        })
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            self.maps.fetch_add(1, Ordering::AcqRel);
            self.inside(span.start(), span.len())?;
            self.pass(Self::seen(Kind::Map, span.start(), span.len())).await?;
            let said = self.places.lock().unwrap().clone();
            if !said.is_empty() {
                let said = said.iter().map(|(at, (len, place))| {
                    let said = GuestOffset::new(*at).span(*len);
                    Extent { span: said.intersect(span), place: place.clone() }
                });
                return Ok(said.filter(|extent| !extent.span.is_empty()).collect());
            }
            let image = ImageOffset::new(span.start().bytes()).span(span.len());
            let mut extents = Vec::new();
            let mut covered = span.start();
            for run in self.storage.runs(image).await? {
                let at = GuestOffset::new(run.span.start().bytes());
                let place = match run.is_data {
                    true => Place::Data { storage: self.storage.clone(), at: run.span.start() },
                    false => Place::Zero { allocated: false },
                };
                extents.push(Extent { span: at.span(run.span.len()), place });
                covered = GuestOffset::new(run.span.end().bytes());
            }
            if covered < span.end() {
                let span = GuestSpan::between(covered, span.end());
                extents.push(Extent { span, place: Place::Zero { allocated: false } });
            }
            Ok(extents)
        })
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// The same disk as a shared one.
pub fn shared(disk: &Arc<RuledDisk>) -> SharedDisk {
    disk.clone()
}
