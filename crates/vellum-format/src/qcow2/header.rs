//! The header: read as untrusted bytes, checked once, then trusted.
//!
//! [`Header::parse`] is the only way in. It looks at every field that places or sizes something. After it no
//! table lies outside the limits, no allocation made from the header exceeds them, and no unknown
//! incompatible feature is left. It cannot see whether the tables are inside the file;
//! [`Header::check_against_len`] adds that.
//!
//! 1. An unknown incompatible feature is refused by its name if the image names it, otherwise by its number.
//! 2. Unknown extensions and compatible features are kept: a change to the header rewrites its first sector
//!    only, and in that sector only the fields that change.
//! 3. A header that is written ([`Header::first_sector`]) has no autoclear bit that this program does not
//!    know. Such a bit says that another program keeps something consistent with the disk, and a write by
//!    this program makes that out of date.
//! 4. Everything a header change touches lies in the first 512 bytes, so a header is old or new, never mixed.

mod extensions;
mod parse;

use vellum_core::pin::Pin;
use vellum_core::{BlockSize, Buffer, Context, Error, ImageOffset, ImageSpan, Result, Storage};
use vellum_luks::HEADER_LEN;

use super::journal::extension::{EXTENSION_LEN, Extension};
use super::layout::*;
use super::pin;
use crate::Prealloc;
use crate::handover::Handover;
use crate::session::{CacheId, Session, SessionState};
use crate::truth::reconcile;
use crate::wish::Wish;

use extensions::{Extensions, refuse_unknown_features};
use parse::Features;

/// The versions that are read and written.
pub(crate) const VERSIONS: [u32; 2] = [2, 3];

/// How compressed clusters are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Raw deflate, window of 4 KiB.
    Zlib,
    /// Zstandard.
    Zstd,
}

/// How guest data is encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encryption {
    /// AES in CBC mode, the old method, which is only read.
    Aes,
    /// LUKS.
    Luks,
}

/// The header's entry for persistent bitmaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BitmapDirectory {
    /// How many bitmaps there are.
    pub count: u32,
    /// The place of their directory.
    pub span: ImageSpan,
}

/// A header whose every field has been checked.
#[derive(Debug, Clone)]
pub struct Header {
    pub(crate) sector: [u8; 512],
    pub(crate) version: u32,
    pub(crate) cluster_size: BlockSize,
    pub(crate) size: u64,
    pub(crate) l1_entries: u32,
    pub(crate) l1_offset: ImageOffset,
    pub(crate) refcount_table: ImageSpan,
    pub(crate) refcount_order: u32,
    pub(crate) snapshot_count: u32,
    pub(crate) snapshots_offset: ImageOffset,
    /// Snapshots beyond the most that there may be: they are not counted, in a header that is read to be mended.
    pub(crate) overhanging_snapshots: u32,
    pub(crate) incompatible: u64,
    pub(crate) compatible: u64,
    pub(crate) autoclear: u64,
    pub(crate) compression: Compression,
    encryption: Option<Encryption>,
    pub(crate) backing_file: Option<String>,
    pub(crate) backing_format: Option<String>,
    pub(crate) data_file: Option<String>,
    pub(crate) bitmaps: Option<BitmapDirectory>,
    /// Where the body of the bitmaps' extension is in the first sector, if it is all there.
    bitmaps_at: Option<usize>,
    /// Where the LUKS header and the key material are.
    key_area: Option<ImageSpan>,
    /// The journal's extension, and the offset of its body in the first sector.
    pub(crate) journal: Option<(Extension, usize)>,
    misplaced_journal: Option<Extension>,
    pin: Option<Pin>,
    handover: Option<Handover>,
    session: Option<Session>,
}

impl Header {
    /// Reads and checks the header of an image. On a writable storage, what the first page reads as is on the
    /// medium, or will be after the next successful flush.
    pub async fn read(storage: &dyn Storage) -> Result<Self> {
        Self::read_with(storage, false).await
    }

    /// As above, for a repair: a number of snapshots that is too large is cut.
    pub(crate) async fn read_to_mend(storage: &dyn Storage) -> Result<Self> {
        Self::read_with(storage, true).await
    }

    async fn read_with(storage: &dyn Storage, mends: bool) -> Result<Self> {
        reconcile(storage, ImageOffset::ZERO.span(METADATA_PAGE.bytes())).await?;
        let len = storage.len();
        // Cluster 0 holds everything in the header; the first bytes say how long it is.
        let first = storage.read(ImageOffset::ZERO, Buffer::for_overwrite(512)).await?;
        let bits = be32(first.slice(), field::CLUSTER_BITS).clamp(CLUSTER_BITS_MIN, CLUSTER_BITS_MAX);
        let cluster = storage.read(ImageOffset::ZERO, Buffer::for_overwrite(1 << bits)).await?;
        let header = Self::parse_with(cluster.slice(), len, mends)
            .context(|| format!("{} is not usable", storage.name()))?;
        header.check_against_len(len).context(|| format!("{} is not usable", storage.name()))?;
        Ok(header)
    }

    /// Checks the bytes of cluster 0. `len` is the length of the file, for messages about missing bytes.
    pub fn parse(cluster: &[u8], len: u64) -> Result<Self> {
        Self::parse_with(cluster, len, false)
    }

    fn parse_with(cluster: &[u8], len: u64, mends: bool) -> Result<Self> {
        let (version, cluster_size) = parse::version(cluster, len)?;
        let cluster = &cluster[..cluster.len().min(1 << cluster_size.shift())];
        let Features { header_len, incompatible, compatible, autoclear, refcount_order } =
            Features::parse(cluster, version)?;
        let extensions_end = parse::extensions_end(cluster)?;
        let extensions = Extensions::parse(cluster, header_len, extensions_end)?;
        refuse_unknown_features(incompatible, &extensions.feature_names)?;
        let backing_file = parse::backing_file(cluster, extensions_end)?;
        let encryption = parse::encryption(cluster)?;
        let compression = parse::compression(cluster, header_len)?;
        let mut sector = [0; 512];
        sector.copy_from_slice(&cluster[..512]);
        let mut header = Self {
            sector,
            version,
            cluster_size,
            size: be64(cluster, field::SIZE),
            l1_entries: be32(cluster, field::L1_SIZE),
            l1_offset: ImageOffset::new(be64(cluster, field::L1_TABLE_OFFSET)),
            refcount_table: ImageOffset::ZERO.span(0),
            refcount_order,
            snapshot_count: be32(cluster, field::NB_SNAPSHOTS),
            snapshots_offset: ImageOffset::new(be64(cluster, field::SNAPSHOTS_OFFSET)),
            overhanging_snapshots: 0,
            incompatible,
            compatible,
            autoclear,
            compression,
            encryption,
            backing_file,
            backing_format: extensions.backing_format,
            data_file: extensions.data_file,
            bitmaps: None,
            bitmaps_at: extensions.bitmaps.as_ref().map(|(_, at)| *at).filter(|at| at + BITMAPS_LEN <= 512),
            key_area: None,
            journal: extensions.journal,
            misplaced_journal: extensions.misplaced_journal,
            pin: None,
            handover: Handover::parse(
                &extensions.handover.unwrap_or_default(),
                incompatible & incompatible::HANDOVER != 0,
            )?,
            session: Session::parse(
                // Version 2 has no bits that would say how far it counts.
                &extensions.session.filter(|_| version >= 3).unwrap_or_default(),
                autoclear & autoclear::SESSION != 0,
                incompatible & incompatible::HOLDS_WRITES != 0,
            )?,
        };
        header.pin = header.pin_of_backing_file(extensions.pin.as_deref())?;
        header.key_area = header.check_key_area(extensions.encryption.as_deref())?;
        header.check_features()?;
        header.refcount_table = header.check_refcount_table(
            be64(cluster, field::REFCOUNT_TABLE_OFFSET),
            be32(cluster, field::REFCOUNT_TABLE_CLUSTERS),
        )?;
        header.check_l1()?;
        header.check_snapshots(mends)?;
        header.bitmaps = header.check_bitmaps(extensions.bitmaps.as_ref().map(|(body, _)| &body[..]))?;
        Ok(header)
    }

    /// Refuses features that contradict a field, or that need an extension the image does not have.
    fn check_features(&self) -> Result<()> {
        if (self.compression != Compression::Zlib) != (self.incompatible & incompatible::COMPRESSION != 0) {
            return Err(Error::corrupt("the compression type and its feature bit contradict each other"));
        }
        if self.has_subclusters() && self.cluster_size.shift() < EXTENDED_CLUSTER_BITS_MIN {
            return Err(Error::corrupt("extended L2 entries need clusters of at least 16 KiB"));
        }
        if !self.has_data_file() && self.data_file_is_raw() {
            return Err(Error::corrupt("the raw external data bit is set on an image without a data file"));
        }
        if self.needs_replay() && self.journal.is_none() {
            return Err(Error::corrupt(
                "the image was written with a journal, but its header does not say where the \
             journal is",
            ));
        }
        if self.has_data_file() && self.data_file.is_none() {
            // The format makes the name optional, but without one there is nothing to open.
            return Err(Error::unsupported("the image keeps its data in another file but does not name it"));
        }
        Ok(())
    }

    /// Where the encryption header is, by its extension.
    fn check_key_area(&self, extension: Option<&[u8]>) -> Result<Option<ImageSpan>> {
        let body = match (extension, self.encryption) {
            (None, Some(Encryption::Luks)) => {
                return Err(Error::corrupt("the image is encrypted with LUKS, but has no encryption header"));
            }
            (Some(_), None | Some(Encryption::Aes)) => {
                return Err(Error::corrupt(
                    "there is an encryption header on an image that is not encrypted with LUKS",
                ));
            }
            (None, _) => return Ok(None),
            (Some(body), _) => body,
        };
        if body.len() != 16 {
            return Err(Error::corrupt("the entry for the encryption header does not have 16 bytes"));
        }
        let (offset, len) = (be64(body, 0), be64(body, 8));
        if len < HEADER_LEN as u64 || len > KEY_AREA_BYTES_MAX {
            return Err(Error::corrupt(format!("an encryption header of {len} bytes is impossible")));
        }
        self.table(offset, len, "encryption header").map(Some)
    }

    fn check_refcount_table(&self, offset: u64, clusters: u32) -> Result<ImageSpan> {
        let len = u64::from(clusters) << self.cluster_size.shift();
        if len == 0 {
            return Err(Error::corrupt("the image has no refcount table"));
        }
        if len > REFCOUNT_TABLE_BYTES_MAX.max(self.cluster_size.bytes()) {
            return Err(Error::corrupt(format!("a refcount table of {clusters} clusters is too large")));
        }
        self.table(offset, len, "refcount table")
    }

    fn check_l1(&self) -> Result<()> {
        if self.size > 1 << 62 {
            return Err(Error::corrupt(format!("a disk of {} bytes is too large", self.size)));
        }
        let len = u64::from(self.l1_entries) * 8;
        if len > L1_BYTES_MAX {
            return Err(Error::corrupt(format!("an L1 table of {} entries is too large", self.l1_entries)));
        }
        let needed = self.size.div_ceil(self.l2_reach());
        if u64::from(self.l1_entries) < needed {
            return Err(Error::corrupt(format!(
                "the L1 table has {} entries, a disk of {} bytes needs {needed}",
                self.l1_entries, self.size
            )));
        }
        if len > 0 {
            self.table(self.l1_offset.bytes(), len, "L1 table")?;
        }
        Ok(())
    }

    fn check_snapshots(&mut self, mends: bool) -> Result<()> {
        if self.snapshot_count > SNAPSHOTS_MAX {
            if !mends {
                return Err(Error::corrupt(format!(
                    "{} snapshots are too many: `vellum check -r all` discards those behind the first {SNAPSHOTS_MAX}",
                    self.snapshot_count
                )));
            }
            self.overhanging_snapshots = self.snapshot_count - SNAPSHOTS_MAX;
            self.snapshot_count = SNAPSHOTS_MAX;
        }
        if self.snapshot_count > 0 {
            // The table's length is known only after it is read; 40 bytes is the shortest entry.
            let len = u64::from(self.snapshot_count) * 40;
            self.table(self.snapshots_offset.bytes(), len, "snapshot table")?;
        }
        Ok(())
    }

    /// The pin in the extension. It belongs to the backing file that it names: a program that sets another one
    /// keeps the extension, as an unknown one, and has voided it.
    fn pin_of_backing_file(&self, extension: Option<&[u8]>) -> Result<Option<Pin>> {
        let (Some(body), Some(name)) = (extension, &self.backing_file) else { return Ok(None) };
        let (of, pin) = pin::decode(body)?;
        Ok(Some(pin).filter(|_| of == *name))
    }

    /// What proves that the backing file is the one that the image was made over, if the image records it.
    pub(crate) fn pin(&self) -> Option<&Pin> {
        self.pin.as_ref()
    }

    fn check_bitmaps(&self, extension: Option<&[u8]>) -> Result<Option<BitmapDirectory>> {
        let Some(bytes) = extension else { return Ok(None) };
        if bytes.len() < BITMAPS_LEN {
            return Err(Error::corrupt("the bitmaps extension is too short"));
        }
        if self.autoclear & autoclear::BITMAPS == 0 {
            return Ok(None); // left by a program that did not update them: they count for nothing
        }
        let (count, len, offset) = (be32(bytes, 0), be64(bytes, 8), be64(bytes, 16));
        if count == 0 || count > 65535 || len > u64::from(count) * BITMAP_ENTRY_BYTES_MAX {
            return Err(Error::corrupt("the bitmaps extension has impossible sizes"));
        }
        Ok(Some(BitmapDirectory { count, span: self.table(offset, len, "bitmap directory")? }))
    }

    /// A run of the image that a table may occupy: aligned, behind the header, within the limits.
    pub(crate) fn table(&self, offset: u64, len: u64, what: &str) -> Result<ImageSpan> {
        let span = ImageSpan::checked(ImageOffset::new(offset), len);
        match span {
            Some(span)
                if self.cluster_size.aligns(span.start()) && offset != 0 && span.end() <= IMAGE_END =>
            {
                Ok(span)
            }
            _ => Err(Error::corrupt(format!("the {what} cannot lie at {offset:#x} (length {len:#x})"))),
        }
    }

    /// Refuses an image whose tables are not all inside the file.
    pub fn check_against_len(&self, len: u64) -> Result<()> {
        let inside = |span: ImageSpan, what: &str| {
            if span.end().bytes() > len {
                return Err(Error::corrupt(format!(
                    "the file is {len} bytes long, but the {what} ends at {}: it was truncated",
                    span.end().bytes()
                )));
            }
            Ok(())
        };
        inside(self.refcount_table.start().span(8), "refcount table")?;
        inside(self.l1_span(), "L1 table")?;
        if let Some(bitmaps) = self.bitmaps {
            inside(bitmaps.span, "bitmap directory")?;
        }
        if let Some(keys) = self.key_area {
            inside(keys, "encryption header")?;
            if keys.overlaps(self.l1_span()) || keys.overlaps(self.refcount_table) {
                return Err(Error::corrupt("the encryption header overlaps another table"));
            }
        }
        if self.l1_span().overlaps(self.refcount_table) {
            return Err(Error::corrupt("the L1 table and the refcount table overlap"));
        }
        Ok(())
    }

    /// Bytes of the disk that one L2 table maps.
    pub(crate) fn l2_reach(&self) -> u64 {
        (self.cluster_size.bytes() / self.l2_entry_len()) << self.cluster_size.shift()
    }

    /// Bytes of an L2 entry: 8, or 16 with subclusters.
    pub(crate) fn l2_entry_len(&self) -> u64 {
        if self.has_subclusters() { 16 } else { 8 }
    }

    /// The place of the active L1 table.
    pub(crate) fn l1_span(&self) -> ImageSpan {
        if self.l1_entries == 0 {
            return ImageOffset::ZERO.span(0);
        }
        self.l1_offset.span(u64::from(self.l1_entries) * 8)
    }

    /// The size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The version: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The cluster size.
    pub fn cluster_size(&self) -> BlockSize {
        self.cluster_size
    }

    /// Bits of one refcount.
    pub fn refcount_bits(&self) -> u32 {
        1 << self.refcount_order
    }

    /// Whether L2 entries have subclusters (`extended_l2`).
    pub fn has_subclusters(&self) -> bool {
        self.incompatible & incompatible::EXTENDED_L2 != 0
    }

    /// Whether guest data lies in another file.
    pub fn has_data_file(&self) -> bool {
        self.incompatible & incompatible::DATA_FILE != 0
    }

    /// Whether the data file is a complete raw image on its own.
    pub fn data_file_is_raw(&self) -> bool {
        self.autoclear & autoclear::RAW_EXTERNAL != 0
    }

    /// Whether the last program that wrote the image did not close it, so that refcounts may be wrong.
    pub fn is_dirty(&self) -> bool {
        self.incompatible & incompatible::DIRTY != 0
    }

    /// Whether there are changes in a journal that must be replayed first.
    pub fn needs_replay(&self) -> bool {
        self.incompatible & incompatible::JOURNAL != 0
    }

    /// The error that says why such an image cannot be read as it is.
    pub(crate) fn replay_first(&self, name: &str) -> Error {
        Error::unsupported(format!(
            "the image was not closed, and its journal must be replayed first: run `vellum recover {name}`"
        ))
    }

    /// Whether the image is to have a journal, but another program has moved the extension to where it cannot
    /// be followed. [`set_journal`](super::set_journal) puts it back.
    pub fn has_misplaced_journal(&self) -> bool {
        self.misplaced_journal().is_some()
    }

    /// The extension in that place.
    pub(crate) fn misplaced_journal(&self) -> Option<Extension> {
        self.misplaced_journal.filter(|_| self.journal.is_none())
    }

    /// How large the journal is to be, in bytes. `None` without one.
    pub fn journal_bytes(&self) -> Option<u64> {
        self.journal.map(|(extension, _)| extension.wanted_bytes)
    }

    /// Whether space is prepared ahead of need while the image is written, if the image says so.
    pub fn prealloc(&self) -> Prealloc {
        self.journal.map_or(Prealloc::Auto, |(extension, _)| extension.prealloc)
    }

    /// Changes the place of the journal, in memory.
    pub(crate) fn set_journal(&mut self, extension: Extension) {
        let (_, at) = self.journal.expect("only an image with the extension has a journal");
        self.journal = Some((extension, at));
        self.sector[at..at + EXTENSION_LEN].copy_from_slice(&extension.encode());
    }

    /// Whether the image is marked corrupt, because damaged metadata was found.
    pub fn is_corrupt(&self) -> bool {
        self.incompatible & incompatible::CORRUPT != 0
    }

    /// What it asks of the program that serves it.
    pub(crate) fn wish(&self) -> Wish {
        Wish::of(self.compatible, compatible::COPY_ON_READ, compatible::PREFETCH)
    }

    /// Whether refcount updates may be postponed.
    pub fn has_lazy_refcounts(&self) -> bool {
        self.compatible & compatible::LAZY_REFCOUNTS != 0
    }

    /// How guest data is encrypted, if it is.
    pub fn encryption(&self) -> Option<Encryption> {
        self.encryption
    }

    /// Where the LUKS header and the key material are, if there are any.
    pub fn key_area(&self) -> Option<ImageSpan> {
        self.key_area
    }

    /// How compressed clusters are compressed.
    pub fn compression(&self) -> Compression {
        self.compression
    }

    /// The name of the backing file, as written in the image.
    pub fn backing_file(&self) -> Option<&str> {
        self.backing_file.as_deref()
    }

    /// The format of the backing file, if the image states it.
    pub fn backing_format(&self) -> Option<&str> {
        self.backing_format.as_deref()
    }

    /// The name of the external data file, as written in the image.
    pub fn data_file(&self) -> Option<&str> {
        self.data_file.as_deref()
    }

    /// The place of the persistent bitmaps, if there are any that count.
    pub fn bitmaps(&self) -> Option<BitmapDirectory> {
        self.bitmaps
    }

    /// What it records of a migration.
    pub fn handover(&self) -> Option<Handover> {
        self.handover
    }

    /// The session with a flash cache that it names.
    pub fn session(&self) -> Option<Session> {
        self.session
    }

    /// The autoclear bits whose meaning still holds after a change in an opening with this flash cache, or with none, in which
    /// bitmaps are kept up or not.
    pub(crate) fn kept_autoclear(&self, flash: Option<CacheId>, keeps_bitmaps: bool) -> u64 {
        let outlives = self.session.is_some_and(|session| session.survives_changes_of(flash));
        let session = if outlives { autoclear::SESSION } else { 0 };
        let bitmaps = if keeps_bitmaps && self.bitmaps.is_some() { autoclear::BITMAPS } else { 0 };
        self.autoclear & (autoclear::KEPT | session | bitmaps)
    }

    /// Changes the feature bits in memory.
    pub(crate) fn set_features(&mut self, incompatible: u64, autoclear: u64) {
        assert!(self.version >= 3, "version 2 has no feature bits");
        if let Some(session) = &mut self.session {
            session.state = match (autoclear & autoclear::SESSION, incompatible & incompatible::HOLDS_WRITES)
            {
                (0, _) => SessionState::Void,
                (_, 0) => SessionState::Clean,
                _ => SessionState::HoldsWrites,
            };
        }
        self.incompatible = incompatible;
        self.autoclear = autoclear;
        put64(&mut self.sector, field::INCOMPATIBLE, incompatible);
        put64(&mut self.sector, field::AUTOCLEAR, autoclear);
    }

    /// The session with a flash cache counts no more, in memory, nor does what other programs keep consistent with the
    /// disk: tables move.
    pub(crate) fn void_session(&mut self) {
        if self.version >= 3 {
            self.set_features(self.incompatible, self.kept_autoclear(None, true));
        }
    }

    /// Bitmaps count no more, in memory: the disk reads differently.
    pub(crate) fn void_bitmaps(&mut self) {
        if self.version >= 3 {
            self.set_features(self.incompatible, self.autoclear & !autoclear::BITMAPS);
        }
    }

    /// Changes the compatible features, in memory.
    pub(crate) fn set_compatible(&mut self, compatible: u64) {
        assert!(self.version >= 3, "version 2 has no feature bits");
        self.compatible = compatible;
        put64(&mut self.sector, field::COMPATIBLE, compatible);
    }

    /// Changes the width of refcounts, in memory.
    pub(crate) fn set_refcount_order(&mut self, order: u32) {
        assert!(self.version >= 3, "refcounts of version 2 have 16 bits");
        self.refcount_order = order;
        put32(&mut self.sector, field::REFCOUNT_ORDER, order);
    }

    /// Changes the size of the disk, in memory.
    pub(crate) fn set_size(&mut self, size: u64) {
        self.size = size;
        put64(&mut self.sector, field::SIZE, size);
    }

    /// Changes the number of entries of the L1 table, in memory.
    pub(crate) fn set_l1_entries(&mut self, entries: u32) {
        self.l1_entries = entries;
        put32(&mut self.sector, field::L1_SIZE, entries);
    }

    /// Changes the place of the active L1 table and the number of its entries, in memory.
    pub(crate) fn set_l1(&mut self, table: ImageSpan) {
        self.l1_offset = table.start();
        put64(&mut self.sector, field::L1_TABLE_OFFSET, table.start().bytes());
        self.set_l1_entries(u32::try_from(table.len() / 8).expect("an L1 table is at most 32 MiB"));
    }

    /// Changes the place of the snapshot table and the number of its entries, in memory.
    pub(crate) fn set_snapshots(&mut self, at: ImageOffset, count: usize) {
        self.snapshots_offset = at;
        self.overhanging_snapshots = 0;
        self.snapshot_count = u32::try_from(count).expect("at most 65536");
        put64(&mut self.sector, field::SNAPSHOTS_OFFSET, at.bytes());
        put32(&mut self.sector, field::NB_SNAPSHOTS, self.snapshot_count);
    }

    /// Changes the place of the refcount table, in memory.
    pub(crate) fn set_refcount_table(&mut self, table: ImageSpan) {
        self.refcount_table = table;
        let clusters = self.cluster_size.count_for(table.len());
        put64(&mut self.sector, field::REFCOUNT_TABLE_OFFSET, table.start().bytes());
        put32(
            &mut self.sector,
            field::REFCOUNT_TABLE_CLUSTERS,
            u32::try_from(clusters).expect("a refcount table is at most 8 MiB"),
        );
    }

    /// Where the body of the extension that names the bitmaps is in the first sector, if it is all there.
    pub(crate) fn bitmaps_at(&self) -> Option<usize> {
        self.bitmaps_at
    }

    /// Changes the place of the bitmaps, in memory, and whether they are valid. Their extension is in the first sector.
    pub(crate) fn set_bitmaps(&mut self, directory: Option<BitmapDirectory>) {
        let at = self.bitmaps_at.expect("the caller has seen to it");
        let (count, span) =
            directory.map_or((0, ImageOffset::ZERO.span(0)), |directory| (directory.count, directory.span));
        put32(&mut self.sector, at, count);
        put32(&mut self.sector, at + 4, 0);
        put64(&mut self.sector, at + 8, span.len());
        put64(&mut self.sector, at + 16, span.start().bytes());
        self.bitmaps = directory;
        let bit = if directory.is_some() { autoclear::BITMAPS } else { 0 };
        self.set_features(self.incompatible, self.autoclear & !autoclear::BITMAPS | bit);
    }

    /// Whether an autoclear bit is set that this program does not know.
    pub(crate) fn has_unknown_autoclear(&self) -> bool {
        self.version >= 3 && self.autoclear & !autoclear::KNOWN != 0
    }

    /// The first sector as it will be on the medium.
    pub(crate) fn first_sector(&self) -> Buffer {
        let mut sector = self.sector;
        if self.version >= 3 {
            put64(&mut sector, field::AUTOCLEAR, self.autoclear & autoclear::KNOWN);
        }
        Buffer::copy_of(&sector)
    }
}
