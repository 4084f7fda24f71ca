//! Making an image: the smallest set of clusters that is a valid, empty disk.
//!
//! ```text
//!   ┌────────┬────────────────┬─────────────────┬──────────┬ ─ ─ ─ ─ ─ ─ ─ ─ ─ ┬ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ┐
//!   │ header │ refcount table │ refcount blocks │ L1 table │ keys (encrypted) │ L2 tables, data (preallocated) │
//!   └────────┴────────────────┴─────────────────┴──────────┴ ─ ─ ─ ─ ─ ─ ─ ─ ─ ┴ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ┘
//!   written last, after everything else is durable: a crash leaves no incomplete image that looks complete
//! ```

use std::sync::Arc;

use vellum_core::{BlockSize, Buffer, Context, Error, ImageOffset, Result, SharedStorage, Storage, Zeroes};

use super::header::Compression;
#[cfg(test)]
use super::header::Header;
use super::journal::extension::Extension;
use super::layout::*;
use super::refcount;
use crate::Prealloc;
use crate::journal::record::{BYTES_MAX, BYTES_MIN};
use crate::luks::NewKeys;
use crate::wish::Wish;

/// The name of the feature that makes other programs refuse an image whose journal must be replayed.
pub(crate) const JOURNAL_FEATURE: &str = "vellum journal needs replay";

/// How much of a new disk is allocated from the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Preallocation {
    /// Nothing: clusters are allocated when they are written.
    #[default]
    Off,
    /// The mapping; the host allocates when data is written.
    Metadata,
    /// The mapping, and the host reserves space.
    Falloc,
    /// The mapping, and zeros are written.
    Full,
}

/// The properties of a new image. The default is what `vellum create` makes: an image with a journal. That
/// needs version 3, clusters of at least 4 KiB and no data file; other images are made from
/// [`CreateOptions::without_journal`].
#[derive(Debug, Clone)]
pub struct CreateOptions {
    /// The size of the disk in bytes. It is rounded up to a sector, because QEMU rounds the size in the
    /// header down.
    pub size: u64,
    /// 2 or 3. (`compat=0.10` and `compat=1.1`.)
    pub version: u32,
    /// A power of two from 512 bytes to 2 MiB.
    pub cluster_size: u64,
    /// A power of two from 1 to 64.
    pub refcount_bits: u32,
    /// Whether clusters have subclusters.
    pub extended_l2: bool,
    /// Whether other programs may postpone refcount updates.
    pub lazy_refcounts: bool,
    /// How compressed clusters will be compressed.
    pub compression: Compression,
    /// The backing file's name, as it will be written in the image, and its format.
    pub backing: Option<(String, Option<String>)>,
    /// The external data file's name, as it will be written in the image.
    pub data_file: Option<String>,
    /// Whether the data file is to be a complete raw image on its own. The whole mapping is then made at
    /// once, so that writes to the raw file by other programs can be seen through the image.
    pub data_file_raw: bool,
    /// What is allocated from the beginning.
    pub preallocation: Preallocation,
    /// How large the journal is to be while the image is written, in bytes. `None` without one.
    pub journal: Option<u64>,
    /// Whether space is to be prepared ahead of need while the image is written. It is stored beside the
    /// journal's size, so it can be set only for an image with a journal.
    pub prealloc: Prealloc,
    /// What the image asks of the program that serves it. Needs version 3 and a backing file.
    pub wish: Wish,
    /// The keys with which guest data is to be encrypted.
    pub encryption: Option<Arc<NewKeys>>,
}

impl CreateOptions {
    /// For an image that is written as QEMU writes it, without a journal.
    #[must_use]
    pub fn without_journal() -> Self {
        Self { journal: None, ..Self::default() }
    }
}

impl Default for CreateOptions {
    fn default() -> Self {
        Self {
            size: 0,
            version: 3,
            cluster_size: 65536,
            refcount_bits: 16,
            extended_l2: false,
            lazy_refcounts: false,
            compression: Compression::Zlib,
            backing: None,
            data_file: None,
            data_file_raw: false,
            preallocation: Preallocation::Off,
            journal: Some(JOURNAL_BYTES_DEFAULT),
            prealloc: Prealloc::default(),
            wish: Wish::default(),
            encryption: None,
        }
    }
}

impl CreateOptions {
    /// The options that `create` really uses: the size in whole sectors, and what one option implies for
    /// another.
    #[must_use]
    pub fn settled(&self) -> Self {
        let mut settled = self.clone();
        settled.size = BlockSize::SECTOR.round_up(self.size.min(SIZE_MAX + 1));
        if self.data_file_raw && self.preallocation == Preallocation::Off {
            settled.preallocation = Preallocation::Metadata;
        }
        settled
    }
}

/// The largest size of a disk, in bytes.
const SIZE_MAX: u64 = 1 << 62;

/// The places of the parts of a new image, in clusters.
pub(super) struct Plan {
    cluster: BlockSize,
    refcount_order: u32,
    table: u64,
    blocks: u64,
    l1_entries: u64,
    l1: u64,
    keys: u64,
    l2: u64,
    data: u64,
}

impl Plan {
    pub(super) fn new(options: &CreateOptions) -> Result<Self> {
        let cluster = check(options)?;
        let entry_len = if options.extended_l2 { 16 } else { 8 };
        let per_table = cluster.bytes() / entry_len;
        let guest_clusters = cluster.count_for(options.size);
        let l1_entries = guest_clusters.div_ceil(per_table);
        if l1_entries * 8 > L1_BYTES_MAX {
            return Err(Error::invalid(format!(
                "a disk of {} bytes needs larger clusters than {}",
                options.size, options.cluster_size
            )));
        }
        let is_mapped = options.preallocation != Preallocation::Off;
        let mut plan = Self {
            cluster,
            refcount_order: options.refcount_bits.trailing_zeros(),
            table: 1,
            blocks: 1,
            l1_entries,
            l1: cluster.count_for(l1_entries * 8),
            keys: options.encryption.as_ref().map_or(0, |keys| cluster.count_for(keys.len())),
            l2: if is_mapped { l1_entries } else { 0 },
            data: if is_mapped && options.data_file.is_none() { guest_clusters } else { 0 },
        };
        // The blocks count themselves and the table, so their number is found by trying.
        loop {
            let blocks = plan.end().div_ceil(plan.per_block());
            let table = cluster.count_for(blocks * 8);
            if (blocks, table) == (plan.blocks, plan.table) {
                break;
            }
            (plan.blocks, plan.table) = (blocks.max(plan.blocks), table.max(plan.table));
        }
        if plan.table << cluster.shift() > REFCOUNT_TABLE_BYTES_MAX.max(cluster.bytes()) {
            return Err(Error::invalid(
                "a disk of this size cannot be preallocated with clusters this small",
            ));
        }
        Ok(plan)
    }

    fn per_block(&self) -> u64 {
        (self.cluster.bytes() * 8) >> self.refcount_order
    }

    fn blocks_at(&self) -> u64 {
        1 + self.table
    }

    fn l1_at(&self) -> u64 {
        self.blocks_at() + self.blocks
    }

    fn keys_at(&self) -> u64 {
        self.l1_at() + self.l1
    }

    fn l2_at(&self) -> u64 {
        self.keys_at() + self.keys
    }

    fn data_at(&self) -> u64 {
        self.l2_at() + self.l2
    }

    fn end(&self) -> u64 {
        self.data_at() + self.data
    }

    fn offset(&self, cluster: u64) -> ImageOffset {
        ImageOffset::new(cluster << self.cluster.shift())
    }
}

/// Checks the options and returns the cluster size.
fn check(options: &CreateOptions) -> Result<BlockSize> {
    let bits = CLUSTER_BITS_MIN..=CLUSTER_BITS_MAX;
    let cluster = BlockSize::from_bytes(options.cluster_size)
        .filter(|size| bits.contains(&size.shift()))
        .ok_or_else(|| Error::invalid("cluster_size must be a power of two from 512 to 2M"))?;
    if !options.refcount_bits.is_power_of_two() || options.refcount_bits > 64 {
        return Err(Error::invalid("refcount_bits must be a power of two from 1 to 64"));
    }
    if options.version == 2 {
        let needs = [
            (options.refcount_bits != 16, "refcount_bits other than 16"),
            (options.extended_l2, "extended_l2"),
            (options.lazy_refcounts, "lazy_refcounts"),
            (options.compression != Compression::Zlib, "compression_type other than zlib"),
            (options.data_file.is_some(), "data_file"),
            (options.journal.is_some(), "journal"),
        ];
        if let Some((_, what)) = needs.iter().find(|(needed, _)| *needed) {
            return Err(Error::invalid(format!("{what} needs compat=1.1 (version 3)")));
        }
    } else if options.version != 3 {
        return Err(Error::invalid(format!("version {} is not supported (2 and 3 are)", options.version)));
    }
    if options.extended_l2 && cluster.shift() < EXTENDED_CLUSTER_BITS_MIN {
        return Err(Error::invalid("extended_l2 needs clusters of at least 16K"));
    }
    if options.journal.is_some() && options.data_file.is_some() {
        return Err(Error::invalid("journal and data_file cannot be combined yet: omit one of them"));
    }
    if !options.wish.is_none() && options.backing.is_none() {
        return Err(Error::invalid(Wish::NEEDS_BACKING));
    }
    if !options.wish.is_none() && options.journal.is_none() {
        return Err(Error::invalid(
            "copy_on_read and prefetch need the journal: add journal=on, or omit them",
        ));
    }
    if options.prealloc != Prealloc::Auto && options.journal.is_none() {
        return Err(Error::invalid(
            "prealloc is stored with the journal: add journal=on, or use `vellum serve --prealloc`",
        ));
    }
    if let Some(bytes) = options.journal.filter(|bytes| !(BYTES_MIN..=BYTES_MAX).contains(bytes)) {
        return Err(Error::invalid(format!(
            "a journal of {bytes} bytes: its size must be {BYTES_MIN} to {BYTES_MAX} bytes"
        )));
    }
    if options.data_file_raw && options.data_file.is_none() {
        return Err(Error::invalid("data_file_raw needs data_file"));
    }
    if options.data_file_raw && options.backing.is_some() {
        return Err(Error::invalid(
            "data_file_raw cannot be combined with a backing file: the raw data file would have to hold its data too",
        ));
    }
    if options.backing.is_some()
        && matches!(options.preallocation, Preallocation::Falloc | Preallocation::Full)
    {
        return Err(Error::invalid("preallocation=falloc and full would hide the backing file"));
    }
    if options.backing.is_some() && options.preallocation == Preallocation::Metadata && !options.extended_l2 {
        return Err(Error::invalid("preallocation=metadata over a backing file needs extended_l2=on"));
    }
    if options.encryption.is_some() && options.preallocation != Preallocation::Off {
        return Err(Error::invalid(
            "preallocation cannot be combined with encryption: allocated space that was never written would read as \
             random bytes",
        ));
    }
    if options.encryption.is_some() && options.data_file_raw {
        return Err(Error::invalid(
            "data_file_raw cannot be combined with encryption: the raw file would be neither",
        ));
    }
    if options.size > SIZE_MAX {
        return Err(Error::invalid("the disk is too large"));
    }
    Ok(cluster)
}

/// Makes an image in `storage`, and replaces whatever it holds. The data file, if there is one, is passed
/// open.
///
/// # Errors
/// `Invalid` for options that contradict each other, `NoSpace` when a device is too small, and errors of the
/// storages.
pub async fn create(
    storage: &dyn Storage,
    data_file: Option<&SharedStorage>,
    options: &CreateOptions,
) -> Result<()> {
    create_with(storage, data_file, options, async || Ok(())).await
}

/// As above. `before_data` is awaited when everything but the data file and the header is written, before the data file changes: what
/// is refused, and what there is no room for, leaves that file as it was.
///
/// # Errors
/// As above, and those of `before_data`.
pub async fn create_with(
    storage: &dyn Storage,
    data_file: Option<&SharedStorage>,
    options: &CreateOptions,
    before_data: impl AsyncFnOnce() -> Result<()>,
) -> Result<()> {
    let options = options.settled();
    let plan = Plan::new(&options)?;
    let header = encode_header(&options, &plan)?;
    let context = || format!("can't create {}", storage.name());
    fill(storage, (data_file, before_data), &options, &plan, header).await.context(context)
}

async fn fill(
    storage: &dyn Storage,
    (data_file, before_data): (Option<&SharedStorage>, impl AsyncFnOnce() -> Result<()>),
    options: &CreateOptions,
    plan: &Plan,
    header: Vec<u8>,
) -> Result<()> {
    let cluster = plan.cluster.bytes();
    let end = plan.end() * cluster;
    if !storage.limits().fixed_len {
        storage.set_len(0).await?;
        storage.set_len(end).await?;
    } else {
        if end > storage.len() {
            let needs = format!("the device is too small: an empty image of this disk needs {end} bytes");
            return Err(Error::new(vellum_core::ErrorKind::NoSpace, needs));
        }
        // A device keeps its old bytes. Where no metadata is written below, they must not be mistaken for
        // metadata.
        storage.write_zeroes(ImageOffset::ZERO.span(plan.data_at() * cluster), Zeroes::MayUnmap).await?;
    }
    let mut table = vec![0; to_usize(plan.table * cluster)];
    for block in 0..plan.blocks {
        let at = plan.offset(plan.blocks_at() + block);
        put64(&mut table, to_usize(block * 8), at.bytes());
        let mut counts = vec![0; to_usize(cluster)];
        let first = block * plan.per_block();
        for index in 0..plan.per_block().min(plan.end().saturating_sub(first)) {
            refcount::write(&mut counts, plan.refcount_order, index, 1);
        }
        storage.write(at, Buffer::copy_of(&counts)).await?;
    }
    storage.write(plan.offset(1), Buffer::copy_of(&table)).await?;

    let mut l1 = vec![0; to_usize(plan.l1_entries * 8)];
    for index in 0..plan.l2 {
        let at = plan.offset(plan.l2_at() + index);
        put64(&mut l1, to_usize(index * 8), at.bytes() | COPIED);
        storage.write(at, Buffer::copy_of(&l2_table(options, plan, index))).await?;
    }
    storage.write(plan.offset(plan.l1_at()), Buffer::copy_of(&l1)).await?;

    for (at, bytes) in options.encryption.iter().flat_map(|keys| keys.parts()) {
        storage.write(plan.offset(plan.keys_at()) + at, Buffer::copy_of(&bytes)).await?;
    }
    if let Some(data_file) = data_file {
        before_data().await?;
        empty_data_file(&**data_file, options).await?;
        preallocate(&**data_file, ImageOffset::ZERO, options.size, options.preallocation).await?;
        data_file.flush().await?;
    } else {
        preallocate(storage, plan.offset(plan.data_at()), plan.data * cluster, options.preallocation).await?;
    }
    storage.flush().await?;
    storage.write(ImageOffset::ZERO, Buffer::copy_of(&header)).await?;
    storage.flush().await // commit point: from now on it is an image
}

/// Empties a data file, so that nothing of its old contents is seen through the new disk.
async fn empty_data_file(file: &dyn Storage, options: &CreateOptions) -> Result<()> {
    let context = || format!("can't use {} as the data file", file.name());
    if !file.limits().fixed_len {
        file.set_len(0).await.context(context)?;
        return file.set_len(options.size).await.context(context);
    }
    if file.len() < options.size {
        let needs = format!("it has {} bytes, and the disk needs {}", file.len(), options.size);
        return Err(Error::new(vellum_core::ErrorKind::NoSpace, needs).context(context()));
    }
    match options.preallocation {
        // A disk without a mapping reads as zero whatever lies here, until a part of a cluster is written.
        Preallocation::Off => {
            file.write_zeroes(ImageOffset::ZERO.span(options.size), Zeroes::MayUnmap).await.context(context)
        }
        _ => Ok(()), // zeros are written below
    }
}

async fn preallocate(storage: &dyn Storage, at: ImageOffset, len: u64, how: Preallocation) -> Result<()> {
    match how {
        Preallocation::Off => Ok(()),
        // On a device the old bytes would shine through the mapping.
        Preallocation::Metadata if storage.limits().fixed_len => {
            storage.write_zeroes(at.span(len), Zeroes::MayUnmap).await
        }
        Preallocation::Metadata => Ok(()),
        Preallocation::Falloc if storage.limits().fixed_len => {
            storage.write_zeroes(at.span(len), Zeroes::Allocated).await
        }
        Preallocation::Falloc => storage.preallocate(at.span(len)).await,
        Preallocation::Full => {
            for span in BlockSize::from_shift(20).pieces_of(at.span(len)) {
                storage.write(span.start(), Buffer::zeroed(to_usize(span.len()))).await?;
            }
            Ok(())
        }
    }
}

/// One L2 table of a preallocated image. Its clusters follow one another.
fn l2_table(options: &CreateOptions, plan: &Plan, index: u64) -> Vec<u8> {
    let cluster = plan.cluster.bytes();
    let entry_len = if options.extended_l2 { 16 } else { 8 };
    let per_table = cluster / entry_len;
    let mut table = vec![0; to_usize(cluster)];
    let guest_clusters = plan.cluster.count_for(options.size);
    for entry in 0..per_table.min(guest_clusters - index * per_table) {
        let guest = index * per_table + entry;
        let place = match options.data_file {
            Some(_) => guest * cluster,
            None => plan.offset(plan.data_at() + guest).bytes(),
        };
        let at = to_usize(entry * entry_len);
        put64(&mut table, at, place | COPIED);
        if options.extended_l2 {
            // Over a backing file the subclusters have a place but no bytes yet.
            let allocated = if options.backing.is_some() { 0 } else { u64::from(u32::MAX) };
            put64(&mut table, at + 8, allocated);
        }
    }
    table
}

fn encode_header(options: &CreateOptions, plan: &Plan) -> Result<Vec<u8>> {
    let header_len = if options.version == 2 { V2_HEADER_LEN } else { V3_HEADER_LEN };
    let mut bytes = vec![0; header_len];
    put32(&mut bytes, field::MAGIC, MAGIC);
    put32(&mut bytes, field::VERSION, options.version);
    put32(&mut bytes, field::CLUSTER_BITS, plan.cluster.shift());
    put64(&mut bytes, field::SIZE, options.size);
    put32(&mut bytes, field::L1_SIZE, u32::try_from(plan.l1_entries).expect("at most 4 Mi"));
    put64(&mut bytes, field::L1_TABLE_OFFSET, plan.offset(plan.l1_at()).bytes());
    put64(&mut bytes, field::REFCOUNT_TABLE_OFFSET, plan.offset(1).bytes());
    put32(&mut bytes, field::REFCOUNT_TABLE_CLUSTERS, u32::try_from(plan.table).expect("at most 8 MiB"));
    if options.version >= 3 {
        let mut incompatible = 0;
        for (is_set, bit) in [
            (options.data_file.is_some(), incompatible::DATA_FILE),
            (options.compression != Compression::Zlib, incompatible::COMPRESSION),
            (options.extended_l2, incompatible::EXTENDED_L2),
        ] {
            incompatible |= if is_set { bit } else { 0 };
        }
        put64(&mut bytes, field::INCOMPATIBLE, incompatible);
        let lazy = if options.lazy_refcounts { compatible::LAZY_REFCOUNTS } else { 0 };
        let wished = options.wish.bits(compatible::COPY_ON_READ, compatible::PREFETCH);
        put64(&mut bytes, field::COMPATIBLE, lazy | wished);
        put64(&mut bytes, field::AUTOCLEAR, if options.data_file_raw { autoclear::RAW_EXTERNAL } else { 0 });
        put32(&mut bytes, field::REFCOUNT_ORDER, plan.refcount_order);
        put32(&mut bytes, field::HEADER_LENGTH, u32::try_from(header_len).expect("small"));
        bytes[field::COMPRESSION_TYPE] = u8::from(options.compression == Compression::Zstd);
    }
    if let Some(wanted_bytes) = options.journal {
        // The first extension, so that it is in the first sector, which changes as a whole.
        let run = ImageOffset::ZERO.span(0);
        let extension = Extension { wanted_bytes, run, generation: 0, key: 0, prealloc: options.prealloc };
        put_extension(&mut bytes, extension::JOURNAL, &extension.encode());
    }
    if let Some(keys) = &options.encryption {
        put32(&mut bytes, field::CRYPT_METHOD, CRYPT_LUKS);
        let mut place = [0; 16];
        put64(&mut place, 0, plan.offset(plan.keys_at()).bytes());
        put64(&mut place, 8, keys.len());
        put_extension(&mut bytes, extension::ENCRYPTION, &place);
    }
    if let Some((_, Some(format))) = &options.backing {
        put_extension(&mut bytes, extension::BACKING_FORMAT, format.as_bytes());
    }
    if let Some(name) = &options.data_file {
        put_extension(&mut bytes, extension::DATA_FILE, name.as_bytes());
    }
    let name = options.backing.as_ref().map_or("", |(name, _)| name);
    let cluster = to_usize(plan.cluster.bytes());
    let names = feature_names(options.journal.is_some());
    // If there is no room for all names, the journal's is the one that a user will need.
    let journal_name = &names[names.len() - if options.journal.is_some() { FEATURE_NAME_LEN } else { 0 }..];
    let room = cluster.saturating_sub(bytes.len() + 8 + 8 + name.len());
    let fitting = [&names, journal_name].into_iter().find(|names| !names.is_empty() && names.len() <= room);
    if let Some(names) = fitting.filter(|_| options.version >= 3) {
        put_extension(&mut bytes, extension::FEATURE_NAMES, names);
    }
    put_extension(&mut bytes, extension::END, b"");
    if !name.is_empty() {
        if name.len() > BACKING_NAME_MAX as usize {
            return Err(Error::invalid(format!(
                "the backing file name is longer than {BACKING_NAME_MAX} bytes"
            )));
        }
        let at = bytes.len() as u64;
        put64(&mut bytes, field::BACKING_FILE_OFFSET, at);
        put32(&mut bytes, field::BACKING_FILE_SIZE, u32::try_from(name.len()).expect("short"));
        bytes.extend_from_slice(name.as_bytes());
    }
    if bytes.len() > cluster {
        return Err(Error::invalid(format!("the file names do not fit a first cluster of {cluster} bytes")));
    }
    bytes.resize(cluster, 0);
    Ok(bytes)
}

pub(crate) fn put_extension(bytes: &mut Vec<u8>, kind: u32, body: &[u8]) {
    bytes.extend_from_slice(&kind.to_be_bytes());
    bytes.extend_from_slice(&u32::try_from(body.len()).expect("short").to_be_bytes());
    bytes.extend_from_slice(body);
    bytes.resize(bytes.len().next_multiple_of(8), 0);
}

/// The table by which other programs can name a feature that they do not know.
fn feature_names(with_journal: bool) -> Vec<u8> {
    let names: [(u8, u8, &str); 9] = [
        (0, 0, "dirty bit"),
        (0, 1, "corrupt bit"),
        (0, 2, "external data file"),
        (0, 3, "compression type"),
        (0, 4, "extended L2 entries"),
        (1, 0, "lazy refcounts"),
        (2, 0, "bitmaps"),
        (2, 1, "raw external data"),
        (0, JOURNAL_BIT, JOURNAL_FEATURE),
    ];
    let names = &names[..names.len() - usize::from(!with_journal)];
    let mut table = vec![0; names.len() * FEATURE_NAME_LEN];
    for (row, (kind, bit, name)) in table.chunks_exact_mut(FEATURE_NAME_LEN).zip(names) {
        row[0] = *kind;
        row[1] = *bit;
        row[2..2 + name.len()].copy_from_slice(name.as_bytes());
    }
    table
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).expect("it fits memory")
}

/// The header that such an image would have. For tests of tables.
#[cfg(test)]
pub(crate) fn header_for_tests(options: CreateOptions) -> Header {
    let options = CreateOptions { size: 1 << 30, ..options };
    let plan = Plan::new(&options).expect("good options");
    let bytes = encode_header(&options, &plan).expect("good options");
    Header::parse(&bytes, plan.end() << plan.cluster.shift()).expect("a header of our own")
}
