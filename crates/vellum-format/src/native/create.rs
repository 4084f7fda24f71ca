//! Creating an image: regions that read as zero, preset bits, and last the superblocks.
//!
//! ```text
//!   1  length, or zeros over the regions of a device       no image is recognised there yet
//!   2  bits of blocks that are zero in the base; the keys of an encrypted image
//!   3  flush
//!   4  both superblocks, flush                              commit point
//! ```
//!
//! A fresh image has no other page of home: a hole reads as zero and means zero.

use std::sync::Arc;

use vellum_core::{
    BlockSize, Buffer, Context, Error, ErrorKind, GuestSpan, ImageOffset, Result, Storage, Zeroes,
};

use super::geometry::{JOURNAL_BYTES_MAX, JOURNAL_BYTES_MIN, Layout, Places, Region, Shape, TABLE_BYTES_MAX};
use super::superblock::{Base, Slot, Superblock};
use crate::luks::NewKeys;
use crate::measure::ImageSizes;
use crate::wish::Wish;

/// The default size of a journal, in bytes.
pub const JOURNAL_BYTES_DEFAULT: u64 = 16 << 20;
/// The default where units may hold their own entries: less goes through the journal, and a recovery reads
/// all of it.
pub const JOURNAL_BYTES_ZONED: u64 = 8 << 20;
/// The default size that one bit of the bitmap covers, in bytes.
pub const BLOCK_BYTES_DEFAULT: u64 = 64 << 10;
/// The default size of a unit, in bytes.
pub const UNIT_BYTES_DEFAULT: u64 = 1 << 20;
/// The default size of a unit where there are zones, in bytes.
pub const ZONED_UNIT_BYTES_DEFAULT: u64 = 64 << 10;
/// In a file, tables are made for a disk that is this many times as large, within their limits.
const ROOM_TIMES: u64 = 4;
/// Smaller disks have more room than that anyway, because the data begins at a mebibyte.
const ROOM_FROM: u64 = 1 << 30;
/// The largest unit, in bytes.
const UNIT_BYTES_MAX: u64 = 2 << 20;
/// The largest default size of a zone, in bytes.
pub const ZONE_BYTES_DEFAULT: u64 = 64 << 20;

/// The base of a new image.
#[derive(Debug, Clone, Default)]
pub struct NewBase {
    /// Its name, as the image will record it.
    pub name: String,
    /// Its format.
    pub format: Option<String>,
    /// The size of its disk, in bytes.
    pub size: u64,
    /// Where it is known to read as zero: in order, with neighbours merged. Blocks inside these runs are
    /// never read from the base, and a first write there costs no metadata.
    pub zeros: Vec<GuestSpan>,
}

/// The properties of a new image. An option that is not set has a default.
#[derive(Debug, Clone, Default)]
pub struct CreateOptions {
    /// The size of the disk in bytes: a multiple of 512.
    pub size: u64,
    /// Whether guest data lies in units that a table maps. Otherwise it is stored in order.
    pub has_table: bool,
    /// Whether units are taken from zones. Requires `has_table`.
    pub has_zones: bool,
    /// The size of a zone in bytes: a power of two from 128 KiB to 64 MiB, 2 to 1024 units.
    pub zone_size: Option<u64>,
    /// Whether units of zones may hold their own entries. The default is yes, but not with encryption.
    pub embed: Option<bool>,
    /// The size of a unit in bytes: a power of two from 64 KiB to 2 MiB.
    pub unit_size: Option<u64>,
    /// The size that one bit of the base bitmap covers, in bytes: a power of two from 4 KiB to 1 MiB.
    pub block_size: Option<u64>,
    /// The size of the journal in bytes: 64 KiB to 64 MiB.
    pub journal_bytes: Option<u64>,
    /// The base, if there is to be one.
    pub base: Option<NewBase>,
    /// What the image asks of the program that serves it. Needs a base.
    pub wish: Wish,
    /// Whether a device is zeroed first.
    pub zero_device: bool,
    /// The keys with which guest data is to be encrypted.
    pub encryption: Option<Arc<NewKeys>>,
    /// The image's own UUID. Random by default.
    pub uuid: Option<[u8; 16]>,
}

impl CreateOptions {
    /// The default size of a unit, which is larger where the table would be too long otherwise.
    fn best_unit_bytes(&self) -> u64 {
        let least = if self.has_zones { ZONED_UNIT_BYTES_DEFAULT } else { UNIT_BYTES_DEFAULT };
        let entries_max = TABLE_BYTES_MAX / 4;
        (self.size.div_ceil(entries_max)).next_power_of_two().clamp(least, UNIT_BYTES_MAX)
    }

    /// The sizes of an image with these options, once it holds data.
    ///
    /// # Errors
    /// `Invalid` for options that contradict each other.
    pub fn sizes(&self) -> Result<ImageSizes> {
        let places = self.places(true)?;
        let unit = match places.shape().layout {
            Layout::Linear => BlockSize::PAGE,
            Layout::Table(unit) | Layout::Zoned { unit, .. } => unit,
        };
        let metadata = places.data_offset().bytes();
        Ok(ImageSizes { metadata, unit, disk: unit.round_up(self.size), is_full: false })
    }

    /// Checks the options, and returns the places of the image. In a file its tables have room for a disk
    /// four times as large; the unused rest is a hole.
    fn places(&self, in_file: bool) -> Result<Places> {
        let size_of = |name: &str, bytes: u64, shifts: std::ops::RangeInclusive<u32>, range: &str| {
            let size = BlockSize::from_bytes(bytes).filter(|size| shifts.contains(&size.shift()));
            size.ok_or_else(|| Error::invalid(format!("{name} must be a power of two from {range}")))
        };
        let contradictions = [
            (
                self.unit_size.is_some() && !self.has_table,
                "unit_size: a linear image has no units; add layout=table, or omit it",
            ),
            (self.has_zones && !self.has_table, "zones need a table"),
            (
                (self.zone_size.is_some() || self.embed.is_some()) && !self.has_zones,
                "zone_size and embed need layout=zoned",
            ),
            (
                self.block_size.is_some() && self.base.is_none(),
                "block_size: an image without a backing image has no bitmap; name one with -b, or omit it",
            ),
            (!self.wish.is_none() && self.base.is_none(), Wish::NEEDS_BACKING),
            (
                self.encryption.is_some() && self.embed == Some(true),
                "embed=on cannot be combined with encryption: how well a block of the disk can be compressed would be \
                 readable, and a recovery without the key must read what the block holds; omit it",
            ),
            (
                self.journal_bytes.is_some() && self.base.is_none() && !self.has_table,
                "journal_size: without a backing image or layout=table there is nothing to record; omit it",
            ),
            (
                self.zero_device && self.has_table,
                "zeroed=on: units are zeroed before they are used anyway; omit it",
            ),
        ];
        if let Some((_, why)) = contradictions.iter().find(|(is_so, _)| *is_so) {
            return Err(Error::invalid(*why));
        }
        let unit_bytes = self.unit_size.unwrap_or_else(|| self.best_unit_bytes());
        let unit = size_of("unit_size", unit_bytes, 16..=21, "64k to 2M")?;
        let zone =
            size_of("zone_size", self.zone_size.unwrap_or(ZONE_BYTES_DEFAULT), 17..=26, "128k to 64M")?;
        let block =
            size_of("block_size", self.block_size.unwrap_or(BLOCK_BYTES_DEFAULT), 12..=20, "4k to 1M")?;
        let shape = Shape {
            size: self.size,
            layout: match (self.has_table, self.has_zones) {
                (_, true) => Layout::Zoned { unit, zone },
                (true, false) => Layout::Table(unit),
                (false, false) => Layout::Linear,
            },
            block,
            base_bytes: self.base.as_ref().map(|base| base.size.min(self.size)),
        };
        let journal = match self.journal_bytes {
            Some(bytes) => bytes,
            None if shape.zone().is_some() => JOURNAL_BYTES_ZONED,
            None if shape.needs_journal() => JOURNAL_BYTES_DEFAULT,
            None => 0,
        };
        let can_be =
            (JOURNAL_BYTES_MIN..=JOURNAL_BYTES_MAX).contains(&journal) && journal.is_multiple_of(4096);
        if shape.needs_journal() && !can_be {
            return Err(Error::invalid(format!(
                "a journal of {journal} bytes: its size must be 64k to 64M, a multiple of 4k"
            )));
        }
        let times = if in_file && self.size >= ROOM_FROM { ROOM_TIMES } else { 1 };
        let room = self.size.saturating_mul(times);
        let keys = self.encryption.as_ref().map_or(0, |keys| keys.len());
        Places::plan_with_keys(shape, journal, room, keys)
    }
}

/// Creates an image in `storage`, replacing its content.
///
/// # Errors
/// `Invalid` for options that contradict each other, `NoSpace` when a device is too small, and the errors of
/// the storage.
pub async fn create(storage: &dyn Storage, options: &CreateOptions) -> Result<Superblock> {
    let places = options.places(!storage.limits().fixed_len)?;
    let base =
        options.base.as_ref().map(|base| Base { name: base.name.clone(), format: base.format.clone() });
    let mut superblock = Superblock::new(places, base, options.uuid.map_or_else(random_uuid, Ok)?)?;
    superblock.embeds &= options.embed.unwrap_or(true);
    superblock.wish = options.wish;
    let context = || format!("can't create {}", storage.name());
    make_room(storage, options, &places).await.context(context)?;
    let keys = options.encryption.iter().flat_map(|keys| keys.parts());
    for (at, bytes) in keys {
        let place = places.region(Region::Keys).start() + at;
        storage.write(place, Buffer::copy_of(&bytes)).await.context(context)?;
    }
    if let Some(base) = &options.base {
        preset(storage, &places, &base.zeros).await.context(context)?;
    }
    publish(storage, superblock).await.context(context)
}

/// Makes everything but the bits, all of which reads as zero.
async fn make_room(storage: &dyn Storage, options: &CreateOptions, places: &Places) -> Result<()> {
    let data = places.data_offset();
    let end = match places.shape().layout {
        Layout::Linear => data + options.size,
        Layout::Table(_) | Layout::Zoned { .. } => data,
    };
    if !storage.limits().fixed_len {
        if options.zero_device {
            return Err(Error::invalid(
                "zeroed=on is for block devices: a new file reads as zero anyway; omit it",
            ));
        }
        storage.set_len(0).await?;
        return storage.set_len(end.bytes()).await;
    }
    if end.bytes() > storage.len() {
        let remedy = match places.shape().layout {
            Layout::Linear => "; with layout=table the disk may be larger than its device",
            Layout::Table(_) | Layout::Zoned { .. } => {
                " for its tables (a smaller journal_size or larger units need less)"
            }
        };
        let (has, needs) = (storage.len(), end.bytes());
        let needs = format!(
            "the device is too small: it has {has} bytes, and this image needs {needs} bytes{remedy}"
        );
        return Err(Error::new(ErrorKind::NoSpace, needs));
    }
    if end > data {
        // Otherwise the old content would be read as the guest's.
        if !options.zero_device {
            return Err(Error::invalid(
                "a linear image on a block device needs the device zeroed first: use -o zeroed=on, or layout=table",
            ));
        }
        storage.write_zeroes(data.span(end - data), Zeroes::MayUnmap).await?;
    }
    storage.write_zeroes(ImageOffset::ZERO.span(data.bytes()), Zeroes::MayUnmap).await
}

/// Sets the bits of the blocks that the base has only zeros in.
async fn preset(storage: &dyn Storage, places: &Places, zeros: &[GuestSpan]) -> Result<()> {
    const PAGE: u64 = 4096;
    let shape = places.shape();
    let bitmap = places.region(Region::Bitmap);
    let mut page: Option<(u64, Vec<u8>)> = None;
    for run in zeros {
        let first = shape.block.count_for(run.start().bytes());
        // The base reads as zero behind its end, so its last block needs only the part that the base has.
        let end = match run.end().bytes() >= shape.base_bytes.unwrap_or(0) {
            true => shape.blocks(),
            false => run.end().bytes() >> shape.block.shift(),
        };
        for block in first..end {
            let at = block / 8;
            if page.as_ref().is_none_or(|(index, _)| *index != at / PAGE) {
                write_page(storage, bitmap.start(), page.take()).await?;
                page = Some((at / PAGE, vec![0; 4096]));
            }
            let (_, bytes) = page.as_mut().expect("just put there");
            bytes[usize::try_from(at % PAGE).expect("below a page")] |= 1 << (block % 8);
        }
    }
    write_page(storage, bitmap.start(), page).await
}

async fn write_page(storage: &dyn Storage, start: ImageOffset, page: Option<(u64, Vec<u8>)>) -> Result<()> {
    match page {
        Some((index, bytes)) => storage.write(start + index * 4096, Buffer::copy_of(&bytes)).await,
        None => Ok(()),
    }
}

async fn publish(storage: &dyn Storage, mut superblock: Superblock) -> Result<Superblock> {
    storage.flush().await?;
    storage.write(Slot::A.offset(), superblock.encode()).await?;
    superblock.sequence += 1;
    storage.write(Slot::B.offset(), superblock.encode()).await?;
    storage.flush().await?; // commit point: now it is an image
    Ok(superblock)
}

#[expect(clippy::disallowed_methods, reason = "no two images may have the same name; a caller can pass one")]
fn random_uuid() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| {
        Error::new(
            ErrorKind::Io,
            format!("the system provides no random numbers for the image's UUID: {error}"),
        )
    })?;
    // Version 4, variant 1, as RFC 9562 has it.
    bytes[6] = bytes[6] & 0x0F | 0x40;
    bytes[8] = bytes[8] & 0x3F | 0x80;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use vellum_core::memory::SparseBytes;
    use vellum_core::{GuestOffset, Limits, MemoryStorage};

    use super::super::superblock::Superblocks;
    use super::*;

    fn base(size: u64) -> Option<NewBase> {
        Some(NewBase { name: "base".to_owned(), size, ..NewBase::default() })
    }

    #[test]
    fn a_new_image_reads_as_it_was_asked_for() {
        let size = 1 << 30;
        for options in [
            CreateOptions { size, ..CreateOptions::default() },
            CreateOptions { size, base: base(1 << 20), block_size: Some(4096), ..CreateOptions::default() },
            CreateOptions { size, has_table: true, unit_size: Some(65_536), ..CreateOptions::default() },
            CreateOptions { size, has_table: true, base: base(2 << 30), ..CreateOptions::default() },
        ] {
            let storage = MemoryStorage::holding("old", &[7; 9000]);
            let made = block_on(create(&*storage, &options)).unwrap();
            let found = block_on(Superblocks::read(&*storage)).unwrap();
            assert_eq!(found.superblock.places(), made.places(), "{options:?}");
            assert_eq!((found.slot, found.superblock.sequence), (Slot::B, 2));
            assert_eq!(found.superblock.base().is_some(), options.base.is_some());
            assert!(found.superblock.places().shape().base_bytes.unwrap_or(0) <= size);
            let linear = if options.has_table { 0 } else { size };
            assert_eq!(storage.len(), made.places().data_offset().bytes() + linear);
        }
    }

    #[test]
    fn senseless_combinations_are_refused_with_the_reason() {
        let options = CreateOptions { size: 1 << 20, ..CreateOptions::default() };
        for (why, options) in [
            ("before they are used", CreateOptions { has_table: true, zero_device: true, ..options.clone() }),
            ("is for block devices", CreateOptions { zero_device: true, ..options.clone() }),
            ("has no units", CreateOptions { unit_size: Some(65_536), ..options.clone() }),
            ("has no bitmap", CreateOptions { block_size: Some(65_536), ..options.clone() }),
            ("nothing to record", CreateOptions { journal_bytes: Some(1 << 20), ..options.clone() }),
            ("64k to 2M", CreateOptions { unit_size: Some(4 << 20), has_table: true, ..options.clone() }),
            ("64k to 2M", CreateOptions { unit_size: Some(65_537), has_table: true, ..options.clone() }),
            ("4k to 1M", CreateOptions { block_size: Some(2 << 20), base: base(1), ..options.clone() }),
            ("64k to 64M", CreateOptions { journal_bytes: Some(0), has_table: true, ..options.clone() }),
            (
                "multiple of 4k",
                CreateOptions { journal_bytes: Some(65_537), has_table: true, ..options.clone() },
            ),
            ("multiple of 512", CreateOptions { size: 1000, ..options.clone() }),
            (
                "1 to 1023",
                CreateOptions {
                    base: Some(NewBase { name: "n".repeat(1024), ..NewBase::default() }),
                    ..options.clone()
                },
            ),
        ] {
            let storage = MemoryStorage::holding("old", &[7; 9000]);
            let error = block_on(create(&*storage, &options)).unwrap_err();
            assert!(error.chain().contains(why), "{why}: {}", error.chain());
            assert_eq!(storage.content().to_vec(), [7; 9000], "nothing was touched: {why}");
        }
    }

    #[test]
    fn blocks_that_are_zero_in_the_base_are_preset() {
        let at = GuestOffset::new;
        let kib = 1024;
        // Blocks of 64 KiB; the base ends 4 KiB into block 10.
        for (zeros, want) in [
            (vec![], vec![]),
            (vec![at(0).span(64 * kib)], vec![0]),
            (vec![at(4 * kib).span(64 * kib)], vec![]),
            (vec![at(4 * kib).span(128 * kib)], vec![1]),
            (vec![at(64 * kib).span(128 * kib), at(256 * kib).span(64 * kib)], vec![1, 2, 4]),
            (vec![at(576 * kib).span(68 * kib)], vec![9, 10]),
            (vec![at(644 * kib - 4096).span(4096)], vec![10]),
        ] {
            let options = CreateOptions {
                size: 1 << 20,
                base: Some(NewBase { zeros, ..base(644 * kib).unwrap() }),
                ..CreateOptions::default()
            };
            let storage = MemoryStorage::new("new");
            let places = block_on(create(&*storage, &options)).unwrap().places();
            let mut bitmap = [0; 4096];
            storage.content().read(places.region(Region::Bitmap).start(), &mut bitmap);
            let set: Vec<usize> = (0..4096 * 8).filter(|bit| bitmap[bit / 8] >> (bit % 8) & 1 == 1).collect();
            assert_eq!(set, want);
        }
    }

    #[test]
    fn what_a_device_held_before_is_never_read() {
        let device = |len: usize| {
            let mut content = SparseBytes::default();
            content.write(ImageOffset::ZERO, &vec![7; len]);
            let limits = Limits { fixed_len: true, grows_zeroed: false, ..Limits::plain() };
            MemoryStorage::with("device", limits, content)
        };
        let linear = CreateOptions { size: 1 << 20, ..CreateOptions::default() };
        let old = device(2 << 20);
        let error = block_on(create(&*old, &linear)).unwrap_err();
        assert!(error.chain().contains("zeroed=on"), "{}", error.chain());
        let zeroing = CreateOptions { zero_device: true, ..linear };
        let places = block_on(create(&*old, &zeroing)).unwrap().places();
        let bytes = old.content().to_vec();
        assert!(bytes[8192..].iter().all(|byte| *byte == 0), "home and data read as zero");
        assert_eq!(places.data_offset().bytes(), 1 << 20);
        let error = block_on(create(&*device(1 << 20), &zeroing)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert!(error.chain().contains("needs 2097152 bytes; with layout=table"), "{}", error.chain());
        let table = CreateOptions { size: 1 << 40, has_table: true, ..CreateOptions::default() };
        block_on(create(&*device(32 << 20), &table)).unwrap();
        let error = block_on(create(&*device(8 << 20), &table)).unwrap_err();
        assert!(error.chain().contains("a smaller journal_size"), "{}", error.chain());
    }
}
