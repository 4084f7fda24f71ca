//! Opening: an image that was not closed is recovered, and what the table says is looked at before anything is written.

use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use roaring::RoaringBitmap;
use vellum_core::{
    BlockSize, Buffer, Clock, Context, Disk, Error, Extent, Geometry, GuestOffset, GuestSpan, HostTally,
    LocalFuture, Result, Room, SharedDisk, SharedStorage, Tallied, WriteFlags, ZeroFlags,
};

use super::geometry::{Places, Region};
use super::home::Home;
use super::image::{Commits, LINEAR_CELL, Native};
use super::recover::recover;
use super::room::whole_units;
use super::snapshots::{Still, View, Views, refuse_half_reverted};
use super::superblock::Superblocks;
use super::units::Units;
use super::zones::Zones;
use crate::journal::{Journal, Overlaid};
use crate::prealloc::{Need, Prealloc};
use crate::state::State;

/// How an image is opened.
#[derive(Clone, Default)]
pub struct OpenOptions {
    /// Nothing is written, not even a recovery.
    pub read_only: bool,
    /// Open this internal snapshot (by number or name) instead of the disk. Only for reading.
    pub snapshot: Option<String>,
    /// Open the image without its base: to deal with snapshots, not to read or write.
    pub without_base: bool,
    /// Counts what the image costs the host.
    pub tally: HostTally,
    /// What the journal's records are to be known by: a number that no guest knows. Drawn from the system when nothing is
    /// said; a simulation says it.
    pub journal_key: Option<u128>,
    /// Whether zones of a file are written with zeros ahead of need, when somebody tends the disk.
    pub prealloc: Prealloc,
    /// Zones of which little is used are emptied in quiet times, when somebody tends the disk.
    pub compaction: bool,
    /// With it those who flush wait for one another a little, where that lets them share.
    pub clock: Option<Arc<dyn Clock>>,
}

impl Native {
    /// Opens the image, over the disk that its superblock names as its base.
    ///
    /// # Errors
    /// `Unsupported` when it was not closed and is opened for reading, `Corrupt` when its tables contradict each other, and
    /// what the storage says.
    pub async fn open(
        image: SharedStorage,
        below: Option<SharedDisk>,
        options: OpenOptions,
    ) -> Result<Arc<Self>> {
        let name = image.name().to_owned();
        let context = || format!("can't open {name}");
        loop {
            let native =
                Self::open_inner(image.clone(), below.clone(), options.clone()).await.context(context)?;
            let (is_half_reverted, deleted) =
                native.views.as_ref().map_or((false, Vec::new()), Views::unfinished);
            if is_half_reverted {
                // Places and size may be others then.
                native.finish_revert().await.context(context)?;
                native.close().await.context(context)?;
                continue;
            }
            if !deleted.is_empty() {
                native.finish_deletes(&deleted).await.context(context)?;
            }
            return Ok(native);
        }
    }

    async fn open_inner(
        image: SharedStorage,
        below: Option<SharedDisk>,
        options: OpenOptions,
    ) -> Result<Arc<Self>> {
        let read_only = options.read_only || options.snapshot.is_some() || image.limits().read_only;
        let metadata = Tallied::shared(image.clone(), options.tally.metadata.clone());
        let mut superblocks = Superblocks::read(&*metadata).await?;
        if superblocks.superblock.needs_replay() {
            if read_only {
                return Err(superblocks.superblock.replay_first(image.name()));
            }
            recover(&metadata).await.context(|| "the image was not closed")?;
            superblocks = Superblocks::read(&*metadata).await?;
        }
        let superblock = &superblocks.superblock;
        if superblock.base().is_some() && below.is_none() && !options.without_base {
            return Err(Error::invalid("its base was not opened"));
        }
        let mut places = superblock.places();
        let has_snapshots = superblock.has_snapshots();
        if has_snapshots {
            refuse_partials(&metadata, &places).await?;
        }
        let view = match &options.snapshot {
            None if read_only && has_snapshots => {
                refuse_half_reverted(&metadata, superblock).await?;
                None
            }
            None => None,
            Some(wanted) => Some(Still::read(&metadata, superblock, wanted).await?),
        };
        if let Some(view) = &view {
            places = places.resized(view.size)?;
        }
        let shape = places.shape();
        let limits = image.limits();
        let geometry = Geometry {
            size: shape.size,
            block_size: limits.block_size,
            preferred_size: limits.physical_block.max(BlockSize::PAGE),
            read_only,
            fast_zeroes: limits.fast_zeroes,
        };
        let home = Home::new(places.home());
        let (units, views) = match shape.layout {
            super::geometry::Layout::Table(_) | super::geometry::Layout::Zoned { .. } if !read_only => {
                let views = Views::read(&metadata, &places, has_snapshots).await?;
                (Some(read_units(&home, &places, &metadata, &views).await?), Some(views))
            }
            _ => (None, None),
        };
        let has_journal = !read_only && !places.region(Region::Journal).is_empty();
        let journal = has_journal.then(|| Journal::new(options.journal_key));
        let under = Tallied::shared(image.clone(), options.tally.data.clone());
        let data: SharedStorage = match &journal {
            Some(journal) => Arc::new(Overlaid { image: under.clone(), full: journal.full.clone() }),
            None => under.clone(),
        };
        let cell = shape.layout.unit().unwrap_or(LINEAR_CELL);
        let embeds = superblock.embeds() && units.is_some() && journal.is_some();
        Ok(Arc::new(Self {
            name: image.name().to_owned(),
            geometry,
            places,
            superblocks: Arc::new(async_lock::Mutex::new(superblocks)),
            homeward: Tallied::shared(image.clone(), options.tally.checkpoint.clone()),
            compaction: (embeds && options.compaction).then(Default::default),
            zones_ahead: embeds.then(|| async_lock::Mutex::new(Need::new(options.prealloc, image.limits()))),
            written_bytes: AtomicU64::new(0),
            ahead: Tallied::shared(image, options.tally.prealloc.clone()),
            metadata,
            data,
            under,
            below,
            home,
            cell,
            claims: Default::default(),
            epochs: Default::default(),
            block_locks: std::array::from_fn(|_| Mutex::new(())),
            units,
            views,
            zones: embeds.then(Zones::default),
            view: view.map(View::Still),
            journal,
            beginning: Default::default(),
            open_bytes: AtomicU64::new(0),
            commits: Commits::new(options.clock.clone()),
            state: State::default(),
        }))
    }

    /// How often a write had to wait until a free unit was made zero.
    pub fn waits_for_units(&self) -> u64 {
        self.units.as_ref().map_or(0, Units::waits)
    }
}

/// Refuses units whose rest lies in another unit: this program makes none.
async fn refuse_partials(image: &SharedStorage, places: &Places) -> Result<()> {
    let region = places.region(Region::Partials);
    let len = usize::try_from(region.len()).expect("8 KiB");
    let bytes = image.read(region.start(), Buffer::for_overwrite(len)).await?;
    match vellum_core::is_zero(bytes.slice()) {
        true => Ok(()),
        false => Err(Error::unsupported("the image has partial units, which this program cannot read")),
    }
}

/// Whether a unit can be of this form: it has the block, and its zone has an entry.
pub(super) fn may_be_embedded(places: &Places, unit: u32, form: u32) -> bool {
    let blocks = places.shape().layout.unit().map_or(0, BlockSize::bytes) / BlockSize::PAGE.bytes();
    u64::from(form) <= blocks && places.zone_of(unit).is_some()
}

/// Which units are free, by what neither the table nor a snapshot names.
async fn read_units(home: &Home, places: &Places, image: &SharedStorage, views: &Views) -> Result<Units> {
    let table = places.region(Region::Table);
    let limits = image.limits();
    // On a device all units there can be; in a file also one that it has only in part.
    let last_in_part = if limits.fixed_len { 0 } else { places.unit(1).len() - 1 };
    let in_file = whole_units(places, image.len().saturating_add(last_in_part));
    let mut used = RoaringBitmap::new();
    // Units mostly lie in a row: each row is entered at once. An image of 1 TiB may have 16 million entries.
    let mut row = 1..1;
    let mut enter = |row: &mut Range<u32>, next: Range<u32>| {
        let row = std::mem::replace(row, next);
        if let Some(unit) = used.range(row.clone()).next() {
            return Err(Error::corrupt(format!(
                "two entries of the table name unit {unit}: run `vellum check`"
            )));
        }
        used.insert_range(row);
        Ok(())
    };
    let has_views = views.any();
    // The highest unit that is known to lie where one can.
    let mut highest = 0;
    let see = |at: vellum_core::ImageOffset, word: u64| {
        for (raw, number) in [(word >> 32, 0), (word & 0xFFFF_FFFF, 1)] {
            if raw == 0 {
                continue;
            }
            let (entry, form) = places.split_entry(u32::try_from(raw).expect("32 bits"));
            let index = (at - table.start()) / 4 + number;
            let is_possible = index < places.shape().units()
                && entry != 0
                && (entry <= highest || places.may_hold(entry, image.len(), limits.fixed_len))
                && (form == 0 || may_be_embedded(places, entry, form));
            if !is_possible {
                return Err(Error::corrupt(format!(
                    "entry {index} of the table names unit {entry}, which cannot be: run `vellum check`"
                )));
            }
            highest = highest.max(entry);
            if has_views && views.contradict(index, entry) {
                return Err(Error::corrupt(format!(
                    "entry {index} of the table names unit {entry}, which snapshots have for something else: run \
                     `vellum check`"
                )));
            }
            match entry == row.end {
                true => row.end += 1,
                false => enter(&mut row, entry..entry + 1)?,
            }
        }
        Ok(())
    };
    home.scan(&**image, table, see).await.context(|| "can't read the table")?;
    enter(&mut row, 1..1)?;
    used.extend(views.units());
    Ok(Units::new(&used, in_file, places.unit_max(), !limits.fixed_len && limits.grows_zeroed))
}

impl Disk for Native {
    fn geometry(&self) -> Geometry {
        self.geometry.clone()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.below.clone()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let span = self.check(GuestSpan::checked(at, buffer.len() as u64))?;
            self.read_span(span, buffer).await
        })
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = self.check_change(GuestSpan::checked(at, data.len() as u64))?;
            self.write_span(span, data).await?;
            if flags.fua { self.make_durable().await } else { Ok(()) }
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.state.check_open()?;
            if self.geometry.read_only { Ok(()) } else { self.make_durable().await }
        })
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = self.check_change(Some(span))?;
            self.zero_span(span, flags).await?;
            if flags.fua { self.make_durable().await } else { Ok(()) }
        })
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = self.check_change(Some(span))?;
            self.discard_span(span).await?;
            if flags.fua { self.make_durable().await } else { Ok(()) }
        })
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            let span = self.check(Some(span))?;
            self.map_span(span).await
        })
    }

    fn tend(&self, now: Duration) -> LocalFuture<'_, bool> {
        Box::pin(async move {
            let has_more = self.make_ready(now).await;
            self.compact_some(now).await || has_more
        })
    }

    fn room(&self) -> LocalFuture<'_, Result<Option<Room>>> {
        Box::pin(self.room_left())
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.close_image())
    }
}
