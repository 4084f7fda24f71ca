//! Opening. An image that was not closed is recovered first, and the table is checked before anything is
//! written.

use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use roaring::RoaringBitmap;
use vellum_core::{
    BlockSize, Buffer, Clock, Context, Disk, Error, Extent, Filled, Filling, Geometry, GuestOffset,
    GuestSpan, HostTally, LocalFuture, Offload, Result, Room, SharedDisk, SharedStorage, Tallied, WriteFlags,
    ZeroFlags,
};
use vellum_luks::SectorCipher;

use super::encryption_state::Encryption;
use super::geometry::{Layout, Places, Region};
use super::home_pages::HomePages;
use super::image::{LINEAR_CELL, Native, View};
use super::in_use::InUse;
use super::recover::recover;
use super::room::whole_units;
use super::snapshots::still::{Still, refuse_half_reverted};
use super::snapshots::views::Views;
use super::superblock::{Superblock, Superblocks};
use super::tier_over::New;
use super::unfinished::{self, Found, Then};
use super::units::Units;
use super::zone_state::Zones;
use crate::engine::{Close as _, Commit as _, Engine};
use crate::fast::FastMedium;
use crate::image::CachedTables;
use crate::journal::{Journal, Overlaid};
use crate::prealloc::{Need, Prealloc};
use crate::session::{CacheId, may_use};

/// How an image is opened.
#[derive(Clone, Default)]
pub struct OpenOptions {
    /// Write nothing, and recover nothing.
    pub read_only: bool,
    /// Open this internal snapshot (by number or name) instead of the disk, read-only.
    pub snapshot: Option<String>,
    /// Open the image without its base, to manage snapshots, not to read or write.
    pub without_base: bool,
    /// What the data of an encrypted image is encrypted with.
    pub cipher: Option<Arc<SectorCipher>>,
    /// Open an encrypted image without that, to manage snapshots or its size, not to read or write.
    pub without_key: bool,
    /// Where long work of the cipher is done; on this thread, when not given.
    pub offload: Option<Arc<dyn Offload>>,
    /// Counts what the image costs the host.
    pub tally: HostTally,
    /// The key of the journal's records, a number that no guest knows. Without one here the operating system
    /// supplies it; a simulation passes its own.
    pub journal_key: Option<u128>,
    /// Whether zones of a file are filled with zeros ahead of need, while the caller tends the disk; on a device whose
    /// zeros are written: how much of it is kept zero, made so in quiet times, if a size is given.
    pub prealloc: Prealloc,
    /// Whether sparsely used zones are emptied in quiet times, while the caller tends the disk.
    pub compaction: bool,
    /// With a clock, flushes wait for one another briefly, where that lets them share.
    pub clock: Option<Arc<dyn Clock>>,
    /// The flash cache that the caller puts over the disk.
    pub flash: Option<CacheId>,
    /// From where a block that is written in part is completed; what the image has below, when not given. Both read as
    /// the same: a cache does not keep what is read from here.
    pub fills: Option<SharedDisk>,
    /// The fast medium that may have copies of units. Where the image names another one or none, it is not used.
    pub fast: Option<Arc<FastMedium>>,
    /// Units that only the fast medium has, and that it has not, are read errors. An image that is only read is opened without
    /// its medium, too, and with one that does not belong to it.
    pub salvages: bool,
    /// From where tables are read, where a cache keeps them; from the image, when not given.
    pub tables: Option<CachedTables>,
}

impl Native {
    /// Opens the image, over the disk that its superblock names as its base.
    ///
    /// # Errors
    /// `Unsupported` when the image was not closed and is opened read-only, `Corrupt` when its tables
    /// contradict each other, and the errors of the storage.
    pub async fn open(
        image: SharedStorage,
        below: Option<SharedDisk>,
        options: OpenOptions,
    ) -> Result<Arc<Self>> {
        let name = image.name().to_owned();
        let context = || format!("can't open {name}");
        // One round for each kind of change that can have been interrupted, and one more.
        for _ in 0..=unfinished::ROWS.len() {
            let opened = Self::open_inner(image.clone(), below.clone(), options.clone()).await;
            let (native, found) = match opened.context(context)? {
                Opened::Whole(native) => {
                    return native.with_fast(options.fast.as_ref(), options.salvages).await.context(context);
                }
                Opened::Unfinished(native, found) => (native, found),
            };
            let metadata = Tallied::shared(image.clone(), options.tally.metadata.clone());
            let goes_on = native.clone();
            match Self::finish_found(&metadata, found, native, options.journal_key).await.context(context)? {
                // The places and the size may have changed, and there may be more to finish.
                Then::Replay | Then::Clear | Then::Revert => {}
                Then::Delete => {
                    let native = goes_on.expect("found in an image that was opened");
                    return native.with_fast(options.fast.as_ref(), options.salvages).await.context(context);
                }
            }
        }
        Err(Error::corrupt("an unfinished change cannot be completed: run `vellum check`").context(context()))
    }

    /// Finishes what the opening has found. If the image was opened, it is closed afterwards, except after a
    /// deletion.
    async fn finish_found(
        metadata: &SharedStorage,
        found: Found,
        native: Option<Arc<Self>>,
        key: Option<u128>,
    ) -> Result<Then> {
        match (found.then(), native) {
            (Then::Replay, _) => {
                recover(metadata).await.context(|| "the image was not closed")?;
            }
            (Then::Clear, _) => unfinished::clear_behind_the_end(metadata, key).await?,
            (Then::Revert, Some(native)) => {
                native.finish_revert().await?;
                native.close().await?;
            }
            (Then::Delete, Some(native)) => native.finish_deletes().await?,
            (Then::Revert | Then::Delete, None) => unreachable!("found in an image that was opened"),
        }
        Ok(found.then())
    }

    async fn open_inner(
        image: SharedStorage,
        below: Option<SharedDisk>,
        options: OpenOptions,
    ) -> Result<Opened> {
        let read_only = options.read_only || options.snapshot.is_some() || image.limits().read_only;
        let metadata = Tallied::shared(image.clone(), options.tally.metadata.clone());
        let superblocks = Superblocks::read(&*metadata).await?;
        let superblock = &superblocks.superblock;
        may_use(image.name(), superblock.session(), options.flash)?;
        if options.fast.is_none() && !(options.salvages && read_only) {
            superblock.may_do_without_fast()?;
        }
        if !read_only {
            crate::handover::may_change(image.name(), superblock.handover)?;
        }
        let outlives = superblock.session().is_none_or(|session| session.survives_changes_of(options.flash));
        if superblock.needs_replay() {
            return match read_only {
                true => Err(superblock.replay_first(image.name())),
                false => Ok(Opened::Unfinished(None, Found::Journal)),
            };
        }
        if superblock.base().is_some() && below.is_none() && !options.without_base {
            return Err(Error::invalid("its base was not opened"));
        }
        let wanted = options.snapshot.as_deref();
        let (places, view) = read_places(&metadata, superblock, wanted, read_only).await?;
        let home = HomePages::new(places.homes());
        let tables = match options.tables {
            Some(tables) => Tallied::shared(tables.storage, options.tally.metadata.clone()),
            None => metadata.clone(),
        };
        let space = Space::read(&tables, superblock, &places, &home, read_only).await?;
        let Some(Space { units, views }) = space else {
            return Ok(Opened::Unfinished(None, Found::BehindTheEnd));
        };
        if let (Some(units), Prealloc::Fixed(bytes)) = (&units, options.prealloc) {
            let unit = places.shape().layout.unit().expect("only a table has units");
            units.keep_ready(unit.count_for(bytes));
        }
        let found = views.as_ref().and_then(Views::unfinished);
        let under = Tallied::shared(image.clone(), options.tally.data.clone());
        let (journal, data) = journal(&places, &under, options.journal_key, read_only);
        let encryption =
            Encryption::of(superblock, &data, options.cipher, options.without_key, options.offload)?;
        let voids_alone = journal.is_none() && !read_only && !outlives;
        let embeds = superblock.embeds() && units.is_some() && journal.is_some();
        let native = Arc::new(Self {
            engine: Engine::new(
                image.name().to_owned(),
                geometry(&image, superblock, &places, read_only),
                options.clock,
            ),
            superblocks: Arc::new(async_lock::Mutex::new(superblocks)),
            checkpoint_storage: Tallied::shared(image.clone(), options.tally.checkpoint.clone()),
            ahead: Tallied::shared(image.clone(), options.tally.prealloc.clone()),
            metadata,
            tables,
            data,
            encryption,
            under,
            fills: options.fills.or_else(|| below.clone()),
            below,
            home,
            cell: places.shape().layout.unit().unwrap_or(LINEAR_CELL),
            places,
            block_locks: std::array::from_fn(|_| Mutex::new(())),
            units,
            views,
            open_views: Default::default(),
            zones: embeds.then(|| zones(&image, options.prealloc, options.compaction)),
            view: view.map(View::Still),
            journal,
            in_use: InUse::new(voids_alone),
            flash: options.flash,
            tier: OnceLock::new(),
            tier_trouble: OnceLock::new(),
            missing: OnceLock::new(),
            filled: Default::default(),
            ready_alone: AtomicU64::new(u64::MAX),
            open_bytes: AtomicU64::new(0),
        });
        if !read_only && native.journal.is_none() {
            // Nothing says whether the writers before this one had everything flushed, so the first flush goes through.
            native.engine.commits.note_change();
        }
        Ok(match found {
            None => Opened::Whole(native),
            Some(found) => Opened::Unfinished(Some(native), found),
        })
    }

    /// How often a write had to wait for a free unit to be made zero.
    pub fn waits_for_units(&self) -> u64 {
        self.units.as_ref().map_or(0, Units::waits)
    }
}

/// Finishes what interrupted changes have left in a closed image, and says what they were. An image without any is only
/// read.
///
/// # Errors
/// As for opening it read-write.
pub async fn finish_interrupted(image: &SharedStorage) -> Result<Vec<Found>> {
    let options = OpenOptions { without_base: true, without_key: true, ..OpenOptions::default() };
    let context = || format!("can't finish an interrupted change of {}", image.name());
    let mut all = Vec::new();
    for _ in 0..=unfinished::ROWS.len() {
        let opened = Native::open_inner(image.clone(), None, options.clone()).await.context(context)?;
        let Opened::Unfinished(native, found) = opened else { return Ok(all) };
        all.push(found);
        let deleting = native.clone().filter(|_| found.then() == Then::Delete);
        Native::finish_found(image, found, native, None).await.context(context)?;
        if let Some(native) = deleting {
            native.close().await.context(context)?;
        }
    }
    Err(Error::corrupt("an unfinished change cannot be completed: run `vellum check`").context(context()))
}

/// Finishes an interrupted change of a closed image. Returns the size of its disk, which may have changed.
///
/// # Errors
/// As for opening it read-write.
pub async fn finish(image: &SharedStorage) -> Result<u64> {
    let options = OpenOptions { without_base: true, without_key: true, ..OpenOptions::default() };
    let native = Native::open(image.clone(), None, options).await?;
    native.close().await?;
    Ok(Superblocks::read(&**image).await?.superblock.size())
}

/// Reads the snapshot `wanted`, if one is. The places are those of its disk, or of the image's own.
async fn read_places(
    image: &SharedStorage,
    superblock: &Superblock,
    wanted: Option<&str>,
    read_only: bool,
) -> Result<(Places, Option<Still>)> {
    let places = superblock.places();
    let has_snapshots = superblock.has_snapshots();
    if has_snapshots {
        refuse_partials(image, &places).await?;
    }
    let Some(wanted) = wanted else {
        if read_only && has_snapshots {
            refuse_half_reverted(image, superblock).await?;
        }
        return Ok((places, None));
    };
    let view = Still::read(image, superblock, wanted).await?;
    Ok((places.resized(view.size)?, Some(view)))
}

fn geometry(image: &SharedStorage, superblock: &Superblock, places: &Places, read_only: bool) -> Geometry {
    let limits = image.limits();
    let block = limits.block_size;
    Geometry {
        size: places.shape().size,
        block_size: if superblock.is_encrypted() { block.max(BlockSize::SECTOR) } else { block },
        preferred_size: limits.physical_block.max(BlockSize::PAGE),
        read_only,
        fast_zeroes: limits.fast_zeroes,
    }
}

/// The journal, if the image is written and has one, and the storage of guest data, which is read through it.
fn journal(
    places: &Places,
    under: &SharedStorage,
    key: Option<u128>,
    read_only: bool,
) -> (Option<Journal>, SharedStorage) {
    if read_only || places.region(Region::Journal).is_empty() {
        return (None, under.clone());
    }
    let journal = Journal::new(key);
    let data = Arc::new(Overlaid { image: under.clone(), full: journal.full.clone() });
    (Some(journal), data)
}

fn zones(image: &SharedStorage, prealloc: Prealloc, compaction: bool) -> Zones {
    Zones::new(Need::new(prealloc, image.limits()), compaction.then(Default::default))
}

/// Refuses an image with partial units. This program makes none.
async fn refuse_partials(image: &SharedStorage, places: &Places) -> Result<()> {
    let region = places.region(Region::Partials);
    let len = usize::try_from(region.len()).expect("8 KiB");
    let bytes = image.read(region.start(), Buffer::for_overwrite(len)).await?;
    match vellum_core::is_zero(bytes.slice()) {
        true => Ok(()),
        false => Err(Error::unsupported("the image has partial units, which this program cannot read")),
    }
}

/// Whether a unit can have this form: it has that block, and its zone has an entry.
pub(super) fn may_be_embedded(places: &Places, unit: u32, form: u32) -> bool {
    let blocks = places.shape().layout.unit().map_or(0, BlockSize::bytes) / BlockSize::PAGE.bytes();
    u64::from(form) <= blocks && places.zone_of(unit).is_some()
}

/// An image as opening finds it.
enum Opened {
    Whole(Arc<Native>),
    /// A change of the image was interrupted.
    Unfinished(Option<Arc<Native>>, Found),
}

/// What a writer keeps in memory of an image with a table. Both are `None` for a linear image, and for one
/// that is only read.
#[derive(Default)]
struct Space {
    units: Option<Units>,
    views: Option<Views>,
}

impl Space {
    /// `None` when tables have entries past the end of the disk.
    async fn read(
        image: &SharedStorage,
        superblock: &Superblock,
        places: &Places,
        home: &HomePages,
        read_only: bool,
    ) -> Result<Option<Self>> {
        if read_only {
            return Ok(Some(Self::default()));
        }
        if unfinished::base_goes_on(&**image, places).await? {
            return Ok(None);
        }
        match places.shape().layout {
            Layout::Table(_) | Layout::Zoned { .. } => {
                let views = Views::read(image, places, superblock.has_snapshots()).await?;
                let has_moved = superblock.has_moved;
                let units = read_units(home, places, image, &views, has_moved).await?;
                Ok(units.map(|units| Self { units: Some(units), views: Some(views) }))
            }
            _ => Ok(Some(Self::default())),
        }
    }
}

/// Finds the free units: those that neither the table nor a snapshot names. `None` when the table has entries
/// past the end of the disk.
async fn read_units(
    home: &HomePages,
    places: &Places,
    image: &SharedStorage,
    views: &Views,
    has_moved: bool,
) -> Result<Option<Units>> {
    // A disk that is being reverted may already have entries of the snapshot, whose disk may be larger.
    let reverted = views.reverted_size();
    let units = places.shape().units().max(reverted.map_or(0, |size| places.units_of(size)));
    let mut goes_on = false;
    let limits = image.limits();
    // On a device: the units that fit. In a file: also a last unit that lies only partly inside it.
    let last_in_part = if limits.fixed_len { 0 } else { places.unit(1).len() - 1 };
    let in_file = whole_units(places, image.len().saturating_add(last_in_part));
    let mut used: RoaringBitmap = places.units_of_parts().collect();
    // Units mostly lie in a row, and a row is entered at once: an image of 1 TiB may have 16 million entries.
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
    // The highest unit that is known to lie where a unit can lie.
    let mut highest = 0;
    let see = |at: vellum_core::ImageOffset, word: u64| {
        let first = places.entry_at(at).expect("the table is looked through");
        for (raw, number) in [(word >> 32, 0), (word & 0xFFFF_FFFF, 1)] {
            if raw == 0 {
                continue;
            }
            let (entry, form) = places.split_entry(u32::try_from(raw).expect("32 bits"));
            let index = first + number;
            if has_moved && entry == places.moved_number() && form == 0 && index < units {
                continue; // it has no unit here
            }
            if index >= units && reverted.is_none() {
                goes_on = true;
                continue;
            }
            let is_possible = index < units
                && entry != 0
                && (entry <= highest || places.may_hold(entry, image.len(), limits.fixed_len))
                && !places.is_of_part(entry)
                && (form == 0 || may_be_embedded(places, entry, form));
            if !is_possible {
                return Err(Error::corrupt(format!(
                    "entry {index} of the table names unit {entry}, which is impossible: run `vellum check`"
                )));
            }
            highest = highest.max(entry);
            if has_views && views.contradict(index, entry) {
                return Err(Error::corrupt(format!(
                    "entry {index} of the table names unit {entry}, which snapshots use for something else: run \
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
    home.scan(&**image, places.table(), see).await.context(|| "can't read the table")?;
    enter(&mut row, 1..1)?;
    if goes_on {
        return Ok(None);
    }
    used.extend(views.units());
    Ok(Some(Units::new(&used, in_file, places.unit_max(), !limits.fixed_len && limits.grows_zeroed)))
}

impl Disk for Native {
    fn geometry(&self) -> Geometry {
        self.engine.geometry.clone()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.below.clone()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let span = self.engine.check(GuestSpan::checked(at, buffer.len() as u64))?;
            // Boxed, so that the future of a read without a tier is small.
            match self.tier.get() {
                None => self.read_span(span, buffer).await,
                Some(tier) => Box::pin(self.read_tiered(tier, span, buffer)).await,
            }
        })
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = self.engine.check_change(GuestSpan::checked(at, data.len() as u64))?;
            self.give_back_if_due().await?;
            let unpromoted = match self.tier.get() {
                None => None,
                Some(tier) => Some(Box::pin(self.before_change(tier, span, New::Data(&data))).await?),
            };
            self.write_any(span, data).await?;
            drop(unpromoted);
            if flags.fua { self.make_durable().await } else { Ok(()) }
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.engine.state.check_open()?;
            if self.engine.geometry.read_only { Ok(()) } else { self.make_durable().await }
        })
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = self.engine.check_change(Some(span))?;
            self.give_back_if_due().await?;
            let unpromoted = match self.tier.get() {
                None => None,
                Some(tier) => Some(Box::pin(self.before_change(tier, span, New::Zeros)).await?),
            };
            self.zero_any(span, flags).await?;
            drop(unpromoted);
            if flags.fua { self.make_durable().await } else { Ok(()) }
        })
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = self.engine.check_change(Some(span))?;
            self.give_back_if_due().await?;
            let unpromoted = match self.tier.get() {
                None => None,
                Some(tier) => Some(Box::pin(self.before_change(tier, span, New::Zeros)).await?),
            };
            self.discard_span(span).await?;
            drop(unpromoted);
            if flags.fua { self.make_durable().await } else { Ok(()) }
        })
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            let span = self.engine.check(Some(span))?;
            self.map_span(span).await
        })
    }

    fn filling(&self) -> Option<Filling> {
        self.takes_copies()
    }

    fn fill(&self, at: GuestOffset, data: Buffer) -> LocalFuture<'_, Result<Filled>> {
        Box::pin(async move {
            let span = self.engine.check_change(GuestSpan::checked(at, data.len() as u64))?;
            self.fill_span(span, data).await
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
        Box::pin(async move {
            let closed = self.close_image().await;
            self.let_go_of_fast();
            closed
        })
    }
}
