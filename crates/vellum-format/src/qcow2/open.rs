//! Opening: the header is checked, a dirty image is repaired, and the tables are read into memory, with
//! bounds on what they claim.
//!
//! The work is in proportion to the bytes of the tables that exist. What a header merely claims is recorded
//! as runs: a table in a hole costs nothing, however many snapshots name it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use vellum_core::{
    BlockSize, Buffer, Clock, Context, Error, ErrorKind, Geometry, HostTally, ImageOffset, ImageSpan, Inline,
    Offload, Result, SharedDisk, SharedStorage, Storage, Tallied,
};

use vellum_luks::SectorCipher;

use super::bitmaps::track::Tracking;
use super::check;
use super::compressed::Decompressor;
use super::encrypted;
use super::entry::Entries;
use super::header::{Encryption, Header};
use super::header_state::HeaderState;
use super::image::Qcow2;
use super::journal::{Journal, Overlaid};
use super::journal_setting;
use super::layout::{COPIED, L1_RESERVED, METADATA_PAGE, OFFSET_MASK, be64};
use super::mapping::{L1, Mapping};
use super::pages::Pages;
use super::prepare::Prepare;
use super::refcount::Refcounts;
use super::snapshot::{self, SnapshotTable};
use crate::Prealloc;
use crate::engine::Engine;
use crate::handover::may_change;
use crate::hash::HashSet;
use crate::image::{CachedTables, FileGrowth, Files, MAPPING_BYTES_DEFAULT};
use crate::journal::record::{BYTES_MAX, BYTES_MIN};
use crate::luks::{GuestCipher, OldCipher, Unwritten};
use crate::session::{CacheId, may_use};
use crate::state::lock;
use crate::truth::settle;

/// What a page in memory takes beside its bytes, which counts where pages are sectors.
const SECTOR_COST: u64 = 192;

/// How an image is opened.
#[derive(Clone)]
pub struct OpenOptions {
    /// Nothing is written, not even a repair.
    pub read_only: bool,
    /// Opens this internal snapshot (by id or name) instead of the active disk. Read-only.
    pub snapshot: Option<String>,
    /// Memory for the mapping, in bytes, at most.
    pub mapping_bytes_max: u64,
    /// Where decompression runs.
    pub offload: Arc<dyn Offload>,
    /// Counts what the image costs the host.
    pub tally: HostTally,
    /// The key of a journal's records, a number that no guest knows. With `None` it is drawn from the system;
    /// a simulation sets it.
    pub journal_key: Option<u128>,
    /// Whether space is prepared ahead of need by calls of [`Disk::tend`](vellum_core::Disk::tend). `Auto`
    /// does what the image says.
    pub prealloc: Prealloc,
    /// With a clock, flushes wait briefly for one another where that lets them share a commit.
    pub clock: Option<Arc<dyn Clock>>,
    /// What the data of an encrypted image is encrypted with.
    pub cipher: Option<Arc<SectorCipher>>,
    /// The flash cache that the caller puts over the disk.
    pub flash: Option<CacheId>,
    /// From where a block that is written in part is completed; what the image has below, when not given. Both read as
    /// the same: a cache does not keep what is read from here.
    pub fills: Option<SharedDisk>,
    /// From where tables are read, where a cache keeps them; from the image, when not given.
    pub tables: Option<CachedTables>,
    /// How the file grows.
    pub growth: FileGrowth,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            snapshot: None,
            mapping_bytes_max: MAPPING_BYTES_DEFAULT,
            offload: Arc::new(Inline),
            tally: HostTally::default(),
            journal_key: None,
            prealloc: Prealloc::default(),
            clock: None,
            cipher: None,
            flash: None,
            fills: None,
            tables: None,
            growth: FileGrowth::Usual,
        }
    }
}

impl Qcow2 {
    /// Opens the image whose header was read from `files.image`.
    ///
    /// # Errors
    /// `Corrupt` when the tables contradict the file or an image marked corrupt is opened for writing,
    /// `Invalid` when the data file is missing or the snapshot does not exist, and errors of the storage.
    pub async fn open(header: Header, files: Files, options: OpenOptions) -> Result<Arc<Self>> {
        let name = files.image.name().to_owned();
        let context = || format!("can't open {name}");
        Self::open_inner(header, files, options).await.context(context)
    }

    async fn open_inner(header: Header, files: Files, options: OpenOptions) -> Result<Arc<Self>> {
        let read_only = options.read_only || options.snapshot.is_some() || files.image.limits().read_only;
        let image = Tallied::shared(files.image.clone(), options.tally.metadata.clone());
        may_use(image.name(), header.session(), options.flash)?;
        let header = recover_or_repair(header, &image, read_only).await?;
        let checkpoint_storage = Tallied::shared(files.image.clone(), options.tally.checkpoint.clone());
        let ahead = Tallied::shared(files.image.clone(), options.tally.prealloc.clone());
        let prealloc = prealloc(&header, options.prealloc, read_only);
        let data = match (header.has_data_file(), files.data_file) {
            (true, Some(data_file)) => data_file,
            (true, None) => return Err(Error::invalid("its data file was not opened")),
            (false, _) => files.image,
        };
        let data = Tallied::shared(data, options.tally.data.clone());
        let lookups = options.tables.as_ref().map(|tables| tables.lookups.clone());
        let tables = match options.tables {
            Some(tables) => Tallied::shared(tables.storage, options.tally.metadata.clone()),
            None => image.clone(),
        };
        let Tables { l1, size, refcounts } =
            Tables::read(&header, &tables, options.snapshot.as_deref(), read_only).await?;
        encrypted::check(&header, size, options.cipher.is_some())?;
        let tracking = match &refcounts {
            Some(refcounts) => tracking(&header, &*image, refcounts).await?,
            None => Tracking::default(),
        };
        let (cipher, old_cipher) = match header.encryption() {
            None => (None, None),
            Some(Encryption::Aes) => {
                (None, options.cipher.map(|cipher| OldCipher::new(cipher, options.offload.clone())))
            }
            Some(Encryption::Luks) => (options.cipher, None),
        };
        let encrypted =
            cipher.map(|cipher| GuestCipher::new(cipher, Unwritten::Random, options.offload.clone()));
        let (cluster, entries) = (header.cluster_size(), Entries::of(&header));
        let block = data.limits().block_size;
        let geometry = Geometry {
            size,
            block_size: if encrypted.is_some() { block.max(BlockSize::SECTOR) } else { block },
            preferred_size: cluster,
            read_only,
            fast_zeroes: entries.has_zero_flag(),
        };
        let journal = journal(&header, options.journal_key, read_only);
        let data: SharedStorage = match &journal {
            Some(journal) => Arc::new(Overlaid { image: data, full: journal.common.full.clone() }),
            None => data,
        };
        let plain =
            encrypted.as_ref().map_or_else(|| data.clone(), |encrypted| encrypted.plain(data.clone()));
        let decompressor = Decompressor::new(data.clone(), header.compression(), cluster, options.offload);
        Ok(Arc::new(Self {
            engine: Engine::new(image.name().to_owned(), geometry, options.clock),
            has_data_file: header.has_data_file(),
            header: HeaderState::new(header),
            cluster,
            entries,
            metadata: image,
            tables,
            checkpoint_storage,
            data,
            plain,
            encrypted,
            old_cipher,
            fills: options.fills.or_else(|| files.below.clone()),
            below: files.below,
            mapping: mapping(cluster, entries, l1, size, options.mapping_bytes_max, lookups),
            refcount_loads: Default::default(),
            late: Default::default(),
            refcounts,
            gate: RwLock::new(()),
            quarantine: Default::default(),
            journal,
            prepare: Prepare::new(prealloc, ahead),
            decompressor,
            growing: Default::default(),
            growth: options.growth,
            space_end: AtomicU64::new(0),
            contradiction: Default::default(),
            tracking,
            flash: options.flash,
        }))
    }
}

/// Replays the journal or repairs refcounts where an image was not closed, and puts a misplaced journal back.
/// Returns the header as it is then. Of an image that is only read nothing is changed.
pub(super) async fn recover_or_repair(
    mut header: Header,
    image: &SharedStorage,
    read_only: bool,
) -> Result<Header> {
    if !read_only {
        may_change(image.name(), header.handover())?;
    }
    if !read_only && header.is_corrupt() {
        return Err(Error::corrupt(
            "the image is marked corrupt and can only be read: open it read-only, or run `vellum check -r all`",
        ));
    }
    if header.needs_replay() {
        if read_only {
            return Err(header.replay_first(image.name()));
        }
        check::recover(image).await.context(|| "the image was not closed")?;
        header = Header::read(&**image).await?;
    }
    if !read_only && header.version() < 3 {
        settle(&**image).await?; // it has no bit that says whether it was closed
    }
    if !read_only && header.is_dirty() {
        check::repair_dirty(&header, image).await.context(|| "the image was not closed and needs repair")?;
        header = Header::read(&**image).await?;
    }
    if let Some(misplaced) = header.misplaced_journal().filter(|_| !read_only && !header.has_data_file()) {
        // Another program rewrote the header and moved the journal's extension to where it cannot be
        // followed. The image is open nowhere else. If the extension no longer fits in the first sector,
        // the image is written without a journal.
        let wanted = misplaced.wanted_bytes.clamp(BYTES_MIN, BYTES_MAX);
        match journal_setting::set_journal(image, Some(wanted)).await {
            Err(error) if error.kind() != ErrorKind::NoSpace => return Err(error),
            _ => header = Header::read(&**image).await?,
        }
    }
    Ok(header)
}

/// The bitmaps that must be kept up. None is, if one of them claims a place that other metadata has: what is marked would
/// destroy it.
async fn tracking(header: &Header, image: &dyn Storage, refcounts: &Mutex<Refcounts>) -> Result<Tracking> {
    let tracking = Tracking::load(header, image).await?;
    let mut refcounts = lock(refcounts);
    for span in tracking.metadata() {
        let mut clusters = header.cluster_size().clusters_in(span);
        if clusters.any(|cluster| refcounts.is_metadata(header.cluster_size().start_of(cluster))) {
            let at = span.start();
            return Ok(Tracking::unusable_because(format!("a bitmap lies at {at}, where other metadata is")));
        }
        refcounts.note_metadata(span);
    }
    Ok(tracking)
}

/// Whether space is prepared ahead of need, if the caller asks for `asked`.
fn prealloc(header: &Header, asked: Prealloc, read_only: bool) -> Prealloc {
    match asked {
        // After a crash nothing would show that space must be given back. And there is no need when guest
        // data is in another file.
        _ if read_only || header.version() < 3 || header.has_data_file() => Prealloc::Off,
        Prealloc::Auto => header.prealloc(),
        said => said,
    }
}

fn journal(header: &Header, key: Option<u128>, read_only: bool) -> Option<Journal> {
    match header.journal_bytes() {
        Some(bytes) if !read_only && header.version() >= 3 && !header.has_data_file() => {
            Some(Journal::new(bytes, key))
        }
        _ => None,
    }
}

/// The mapping of a disk of `size` bytes, with memory for at most `bytes_max` of it. Where a cache keeps the tables, and not all
/// of them fit, it is held by sectors: what is read anew is near, and entries that are far apart are all that is held.
fn mapping(
    cluster: BlockSize,
    entries: Entries,
    l1: L1,
    size: u64,
    bytes_max: u64,
    lookups: Option<Arc<AtomicU64>>,
) -> Mapping {
    let all = size.div_ceil(cluster.bytes()) * 8 * entries.words() as u64;
    let (page, cost) = match lookups.is_some() && all > bytes_max {
        true => (BlockSize::SECTOR, BlockSize::SECTOR.bytes() + SECTOR_COST),
        false => (METADATA_PAGE, METADATA_PAGE.min(cluster).bytes()),
    };
    let page_bytes = page.min(cluster).bytes();
    let pages_max = (bytes_max / cost).clamp(16, all.div_ceil(page_bytes).max(16));
    let pages = Pages::with_room_for(usize::try_from(pages_max).expect("bounded by memory"));
    let pages = match lookups {
        Some(lookups) => pages.counted(lookups),
        None => pages,
    };
    Mapping::new(cluster, entries, usize::try_from(page_bytes).expect("a page is small"), l1, pages)
}

/// What is read of the tables when an image is opened.
struct Tables {
    l1: L1,
    /// The size of the disk or of the snapshot.
    size: u64,
    /// `None` if the image is only read.
    refcounts: Option<Mutex<Refcounts>>,
}

impl Tables {
    /// Reads the tables of the disk, or of the snapshot `wanted`.
    async fn read(
        header: &Header,
        image: &SharedStorage,
        wanted: Option<&str>,
        read_only: bool,
    ) -> Result<Self> {
        let snapshots = match header.snapshot_count {
            0 => None,
            _ if read_only && wanted.is_none() => None,
            _ => Some(snapshot::read_table(header, &**image).await?),
        };
        let (l1_span, size) = match wanted {
            None => (header.l1_span(), header.size()),
            Some(wanted) => {
                let found = snapshots.as_ref().and_then(|table| table.find(wanted));
                let found = found.ok_or_else(|| {
                    Error::new(ErrorKind::NotFound, format!("there is no snapshot named {wanted}"))
                })?;
                (found.l1, found.disk_size)
            }
        };
        let l1 = read_l1(image, l1_span).await?;
        if size.div_ceil(header.l2_reach()) > l1.len() as u64 {
            return Err(Error::corrupt("the L1 table of the snapshot is too small for its disk"));
        }
        let (refcounts, misnamed) = match read_only {
            true => (None, HashSet::default()),
            false => {
                let (refcounts, misnamed) = read_refcounts(header, image, &l1, snapshots.as_ref()).await?;
                (Some(Mutex::new(refcounts)), misnamed)
            }
        };
        Ok(Self { l1: L1 { at: l1_span.start(), entries: l1, misnamed }, size, refcounts })
    }
}

async fn read_l1(image: &SharedStorage, span: ImageSpan) -> Result<Box<[AtomicU64]>> {
    let len = usize::try_from(span.len()).expect("at most 32 MiB");
    let bytes =
        image.read(span.start(), Buffer::for_overwrite(len)).await.context(|| "can't read the L1 table")?;
    // For QEMU an entry without an offset names no table, whatever its other bits say, and reserved bits have
    // no meaning. The same holds here.
    let entry = |bytes| Some(be64(bytes, 0) & !L1_RESERVED).filter(|entry| *entry != COPIED).unwrap_or(0);
    Ok(bytes.slice().chunks_exact(8).map(|bytes| AtomicU64::new(entry(bytes))).collect())
}

/// Reads the refcounts. Also returns which entries of the L1 table name something other than an L2 table.
async fn read_refcounts(
    header: &Header,
    image: &SharedStorage,
    l1: &[AtomicU64],
    snapshots: Option<&SnapshotTable>,
) -> Result<(Refcounts, HashSet<usize>)> {
    let span = header.refcount_table;
    let len = usize::try_from(span.len()).expect("at most 8 MiB");
    let table = image
        .read(span.start(), Buffer::for_overwrite(len))
        .await
        .context(|| "can't read the refcount table")?;
    let limits = image.limits();
    let mut refcounts =
        Refcounts::new(header, table.slice(), image.len(), !limits.fixed_len, limits.grows_zeroed);
    refcounts.check_table()?;
    refcounts.note_metadata(header.l1_span());
    if let Some(table) = snapshots {
        refcounts.note_metadata(table.span);
        for snapshot in &table.snapshots {
            refcounts.note_metadata(snapshot.l1);
        }
    }
    if let Some(bitmaps) = header.bitmaps() {
        refcounts.note_metadata(bitmaps.span);
    }
    if let Some(keys) = header.key_area() {
        refcounts.note_metadata(keys);
    }
    let tables: Vec<(usize, ImageOffset)> = l1
        .iter()
        .enumerate()
        .map(|(index, entry)| (index, ImageOffset::new(entry.load(Ordering::Relaxed) & OFFSET_MASK)))
        .filter(|(_, table)| table.bytes() != 0 && header.cluster_size().aligns(*table))
        .collect();
    // By now every table that is not an L2 table is known.
    let is_misnamed = |(_, table): &&(usize, ImageOffset)| refcounts.is_metadata(*table);
    let misnamed = tables.iter().filter(is_misnamed).map(|(index, _)| *index).collect();
    for (_, table) in tables {
        refcounts.note_metadata(table.span(header.cluster_size().bytes()));
    }
    Ok((refcounts, misnamed))
}
