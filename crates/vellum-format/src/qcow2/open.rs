//! Opening: the header is checked, a dirty image repaired, tables brought into memory, and what they say bounded.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

use vellum_core::{
    Buffer, Clock, Context, Error, ErrorKind, Geometry, HostTally, ImageOffset, ImageSpan, Inline, Offload,
    Result, SharedDisk, SharedStorage, Tallied,
};

use super::check;
use super::commit::Commits;
use super::compressed::Decompressor;
use super::entry::Entries;
use super::header::Header;
use super::image::{L1, Qcow2, State};
use super::journal::{Journal, Overlaid, recover};
use super::layout::{COPIED, METADATA_PAGE, OFFSET_MASK, be64};
use super::pages::Pages;
use super::prepare::Prepare;
use super::refcount::Refcounts;
use super::snapshot::{self, SnapshotTable};
use crate::Prealloc;

/// The mapping may take this much memory unless told otherwise: enough for 256 GiB of 64 KiB clusters.
pub const MAPPING_BYTES_DEFAULT: u64 = 32 << 20;

/// The files of an image, and the disk below it.
pub struct Files {
    /// The image file.
    pub image: SharedStorage,
    /// The external data file, when the header says there is one.
    pub data_file: Option<SharedStorage>,
    /// What the disk reads as where the image has nothing.
    pub below: Option<SharedDisk>,
}

/// How an image is opened.
#[derive(Clone)]
pub struct OpenOptions {
    /// Nothing is written, not even a repair.
    pub read_only: bool,
    /// Open this internal snapshot (by id or name) instead of the active disk. Only for reading.
    pub snapshot: Option<String>,
    /// Memory for the mapping, in bytes.
    pub mapping_bytes_max: u64,
    /// Where decompression runs.
    pub offload: Arc<dyn Offload>,
    /// Counts what the image costs the host.
    pub tally: HostTally,
    /// What a journal's records are to be known by: a number that no guest knows. Drawn from the system when nothing is
    /// said; a simulation says it.
    pub journal_key: Option<u128>,
    /// Whether space is prepared ahead of need, when somebody calls [`Disk::tend`](vellum_core::Disk::tend). Where nothing
    /// is said, as the image says.
    pub prealloc: Prealloc,
    /// With it those who flush wait for one another a little, where that lets them share.
    pub clock: Option<Arc<dyn Clock>>,
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
        }
    }
}

impl Qcow2 {
    /// Opens the image whose header was read from `files.image`.
    ///
    /// # Errors
    /// `Corrupt` when the tables contradict the file or an image marked corrupt is opened for writing, `Invalid` when
    /// the data file is missing or the snapshot does not exist, and what the storage says.
    pub async fn open(header: Header, files: Files, options: OpenOptions) -> Result<Arc<Self>> {
        let name = files.image.name().to_owned();
        let context = || format!("can't open {name}");
        Self::open_inner(header, files, options).await.context(context)
    }

    async fn open_inner(mut header: Header, files: Files, options: OpenOptions) -> Result<Arc<Self>> {
        let read_only = options.read_only || options.snapshot.is_some() || files.image.limits().read_only;
        let image = Tallied::shared(files.image.clone(), options.tally.metadata.clone());
        if !read_only && header.is_corrupt() {
            return Err(Error::corrupt(
                "the image is marked corrupt and can only be read: open it read-only, or run `vellum check -r all`",
            ));
        }
        if header.needs_replay() {
            if read_only {
                return Err(header.replay_first(image.name()));
            }
            recover::recover(&header, &image).await.context(|| "the image was not closed")?;
            header = Header::read(&*image).await?;
        }
        if !read_only && header.is_dirty() {
            check::repair_dirty(&header, &image)
                .await
                .context(|| "the image was not closed and needs repair")?;
            header = Header::read(&*image).await?;
        }
        let home = Tallied::shared(files.image.clone(), options.tally.checkpoint.clone());
        let ahead = Tallied::shared(files.image.clone(), options.tally.prealloc.clone());
        let clock = options.clock.clone();
        let prealloc = match options.prealloc {
            // Nobody could tell after a crash that something is to be given back; nor is there need where data lies elsewhere.
            _ if read_only || header.version() < 3 || header.has_data_file() => Prealloc::Off,
            Prealloc::Auto => header.prealloc(),
            said => said,
        };
        let data = match (header.has_data_file(), files.data_file) {
            (true, Some(data_file)) => data_file,
            (true, None) => return Err(Error::invalid("its data file was not opened")),
            (false, _) => files.image,
        };
        let data = Tallied::shared(data, options.tally.data.clone());
        let table = match header.snapshot_count {
            0 => None,
            _ if read_only && options.snapshot.is_none() => None,
            _ => Some(snapshot::read_table(&header, &*image).await?),
        };
        let (l1_span, size) = match &options.snapshot {
            None => (header.l1_span(), header.size()),
            Some(wanted) => {
                let found = table.as_ref().and_then(|table| table.find(wanted));
                let found = found.ok_or_else(|| {
                    Error::new(ErrorKind::NotFound, format!("there is no snapshot named {wanted}"))
                })?;
                (found.l1, found.disk_size)
            }
        };
        let l1 = read_l1(&image, l1_span).await?;
        let entries = Entries::of(&header);
        let cluster = header.cluster_size();
        if size.div_ceil(header.l2_reach()) > l1.len() as u64 {
            return Err(Error::corrupt("the L1 table of the snapshot is too small for its disk"));
        }
        let refcounts = match read_only {
            true => None,
            false => Some(Mutex::new(read_refcounts(&header, &image, &l1, table.as_ref()).await?)),
        };
        let page_bytes = usize::try_from(METADATA_PAGE.min(cluster).bytes()).expect("a page is small");
        let pages_needed =
            (size.div_ceil(cluster.bytes()) * 8 * entries.words() as u64).div_ceil(page_bytes as u64);
        let pages_max = (options.mapping_bytes_max / page_bytes as u64).clamp(16, pages_needed.max(16));
        let pages = Pages::with_room_for(usize::try_from(pages_max).expect("bounded by memory"));
        let geometry = Geometry {
            size,
            block_size: data.limits().block_size,
            preferred_size: cluster,
            read_only,
            fast_zeroes: entries.has_zero_flag(),
        };
        let journal = match header.journal_bytes() {
            Some(bytes) if !read_only && header.version() >= 3 && !header.has_data_file() => {
                Some(Journal::new(bytes, options.journal_key))
            }
            _ => None,
        };
        let data: SharedStorage = match &journal {
            Some(journal) => Arc::new(Overlaid { image: data, full: journal.full.clone() }),
            None => data,
        };
        let decompressor = Decompressor::new(data.clone(), header.compression(), cluster, options.offload);
        Ok(Arc::new(Self {
            name: image.name().to_owned(),
            has_data_file: header.has_data_file(),
            header: Mutex::new(header),
            geometry,
            cluster,
            entries,
            metadata: image,
            home,
            data,
            below: files.below,
            l1: L1 { at: l1_span.start(), entries: l1, dirty: Mutex::default() },
            dirty_max: (pages.capacity() / 4).clamp(4, 1024),
            pages,
            page_bytes,
            loads: Default::default(),
            tables: Default::default(),
            refcount_loads: Default::default(),
            claims: Default::default(),
            epochs: Default::default(),
            refcounts,
            dirty: Mutex::default(),
            commits: Commits::new(clock),
            journal,
            prepare: Prepare::new(prealloc, ahead),
            decompressor,
            marked: Default::default(),
            is_marked: AtomicBool::new(false),
            growing: Default::default(),
            state: State::default(),
        }))
    }
}

async fn read_l1(image: &SharedStorage, span: ImageSpan) -> Result<Box<[AtomicU64]>> {
    let len = usize::try_from(span.len()).expect("at most 32 MiB");
    let bytes =
        image.read(span.start(), Buffer::for_overwrite(len)).await.context(|| "can't read the L1 table")?;
    // To QEMU an entry without an offset names no table, whatever its flag says; so it does here.
    let entry = |bytes| Some(be64(bytes, 0)).filter(|entry| *entry != COPIED).unwrap_or(0);
    Ok(bytes.slice().chunks_exact(8).map(|bytes| AtomicU64::new(entry(bytes))).collect())
}

async fn read_refcounts(
    header: &Header,
    image: &SharedStorage,
    l1: &[AtomicU64],
    snapshots: Option<&SnapshotTable>,
) -> Result<Refcounts> {
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
    for entry in l1 {
        let table = ImageOffset::new(entry.load(std::sync::atomic::Ordering::Relaxed) & OFFSET_MASK);
        if table.bytes() != 0 && header.cluster_size().aligns(table) {
            refcounts.note_metadata(table.span(header.cluster_size().bytes()));
        }
    }
    if let Some(table) = snapshots {
        refcounts.note_metadata(table.span);
        for snapshot in &table.snapshots {
            refcounts.note_metadata(snapshot.l1);
        }
    }
    if let Some(bitmaps) = header.bitmaps() {
        refcounts.note_metadata(bitmaps.span);
    }
    Ok(refcounts)
}
