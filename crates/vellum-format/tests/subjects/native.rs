//! Images of the native format.

use futures_lite::future::block_on;
use vellum_core::{GuestOffset, GuestSpan, LocalFuture, Random, Result, SharedDisk, SharedStorage};
use vellum_format::Prealloc;
use vellum_format::native::{Native, OpenOptions, create, resize};
use vellum_sim::Content;
use vellum_sim::explore::{Medium, Subject};

use super::device::Device;
use super::grown::{Grows, Seen};
use super::snapped::{self, BOOK, Snapped};
use crate::common::base;
use crate::common::native::{NativeSetup, look_native, opening};
use crate::common::tended::Tended;

/// Behind the base, over it, both in the unit in which it ends; a unit behind it, one over it, and that one
/// again.
const WHERE_THE_BASE_ENDS: [u64; 5] = [155_648, 131_072, 262_144, 65_536, 139_264];

/// Units of the first page of the table, and of the second: at both sides of where it begins.
const TWO_PAGES: [u64; 5] = [0, 64 << 20, (64 << 20) - (64 << 10), 64 << 10, 65 << 20];

/// Where the disk ended first, and where the guest sees it end; around where the second page of the table
/// begins, in a part of it.
const PAST_THE_TABLE: [u64; 5] = [9 << 16, 66 << 20, 64 << 20, 0, (64 << 20) - (64 << 10)];

/// Within a unit; within one behind the first page of the table, so that it gets a part; and so far that it
/// gets another.
const PAST_SIZES: [u64; 3] = [(9 << 16) + 512, (66 << 20) + 4608, 2 << 30];

/// Within a unit, within another, and behind the first page of the table.
const NEAR_SIZES: [u64; 4] = [(9 << 16) + 512, 14 << 16, (15 << 16) + 512, (66 << 20) + 512];

/// As above, but for the last.
const NEARBY: [u64; 3] = [NEAR_SIZES[0], NEAR_SIZES[1], NEAR_SIZES[2]];

/// Of a device: few units of which the last is there in part; more than anything takes by then.
const LENS: [u64; 5] = [len_of(0), len_of(4), len_of(18), len_of(32), len_of(46)];

const fn len_of(units: u64) -> u64 {
    (1 << 20) + (units << 16) + (32 << 10)
}

/// An image of the native format.
pub(crate) struct NativeSubject {
    setup: NativeSetup,
    below: Option<SharedDisk>,
    far: u64,
    /// It lies on a device of this length, which has other bytes on it.
    device: Option<u64>,
    /// On which zeros have to be written.
    writes_zeros: bool,
    /// Places are units, far from each other.
    is_by_units: bool,
    /// Where places are, if it is somewhere else.
    places: Option<[u64; 5]>,
    /// The places are the units, one after another.
    is_in_a_row: bool,
    /// A discard of 64 KiB stands for one snapshot more, or for one less.
    has_snapshots: bool,
    /// Each recovered image is also gone back to its oldest and newest snapshot.
    is_gone_back_to: bool,
    /// Clones are made of each of them.
    has_clones: bool,
    /// Units are made ready ahead of need, beside every request.
    is_tended: bool,
    /// The disk is tended, with quiet time between any two requests.
    has_quiet_times: bool,
    /// How far ahead zones are written with zeros.
    prealloc: Prealloc,
    /// Zones of which little is used are emptied.
    compaction: bool,
    /// The disk was this small when the image was made, and its table has parts since.
    made_with: Option<u64>,
    /// Each opening makes the disk larger, and finds its device larger.
    grows: Option<Grows>,
}

impl NativeSubject {
    fn new(setup: NativeSetup, far: u64) -> Self {
        let below = setup.below();
        Self {
            setup,
            below,
            far,
            device: None,
            writes_zeros: false,
            is_by_units: false,
            places: None,
            is_in_a_row: false,
            has_snapshots: false,
            is_gone_back_to: false,
            has_clones: false,
            is_tended: false,
            has_quiet_times: false,
            prealloc: Prealloc::Off,
            compaction: false,
            made_with: None,
            grows: None,
        }
    }

    pub(crate) fn linear() -> Self {
        Self::new(NativeSetup::linear("vellum, linear", 256 << 10), 96 << 10)
    }

    /// The base ends within the disk; everything near it is in few blocks.
    pub(crate) fn linear_over_a_base() -> Self {
        let setup = NativeSetup::linear("vellum, linear over a base", 256 << 10).over(base(), 16 << 10);
        Self::new(setup, 128 << 10)
    }

    pub(crate) fn linear_over_zeros() -> Self {
        let mut setup = NativeSetup::linear("vellum, linear over a base of zeros", 256 << 10)
            .over(vec![0; 128 << 10], 16 << 10);
        setup.options.base.as_mut().unwrap().zeros = vec![GuestOffset::ZERO.span(128 << 10)];
        Self::new(setup, 96 << 10)
    }

    pub(crate) fn table() -> Self {
        Self::new(NativeSetup::table("vellum, table", 1 << 20, 64 << 10), 512 << 10)
    }

    pub(crate) fn table_over_a_base() -> Self {
        let setup =
            NativeSetup::table("vellum, table over a base", 512 << 10, 64 << 10).over(base(), 16 << 10);
        Self::new(setup, 128 << 10)
    }

    pub(crate) fn table_over_a_base_in_large_blocks() -> Self {
        let setup = NativeSetup::table("vellum, table over a base, large blocks", 512 << 10, 64 << 10)
            .over(base(), 128 << 10);
        Self::new(setup, 128 << 10)
    }

    /// The table has two pages, and the last unit is incomplete. For programs with `drop64k`.
    pub(crate) fn two_pages() -> Self {
        let setup = NativeSetup::table("vellum, table of two pages", (66 << 20) + 512, 64 << 10);
        Self { places: Some(TWO_PAGES), ..Self::new(setup, 256 << 10) }
    }

    /// As above, where units hold their own entries.
    pub(crate) fn two_pages_of_zones() -> Self {
        let setup = NativeSetup::zoned("vellum, zoned, table of two pages", 66 << 20, 64 << 10, 256 << 10);
        Self { places: Some(TWO_PAGES), ..Self::new(setup, 256 << 10) }
    }

    /// The second page of the table lies in a part of it.
    pub(crate) fn grown() -> Self {
        let setup =
            NativeSetup::table("vellum, table with a part", 1 << 20, 64 << 10).with_the_shortest_table();
        Self::new(setup, 256 << 10).grown_to((66 << 20) + 512)
    }

    pub(crate) fn grown_on_a_device() -> Self {
        let setup = NativeSetup::table("vellum, table with a part, on a device", 1 << 20, 64 << 10);
        let subject = Self::new(setup.with_the_shortest_table(), 256 << 10);
        Self { device: Some((1 << 20) + (12 << 16)), ..subject }.grown_to((66 << 20) + 512)
    }

    /// All zones that are opened have their entries in the part, and units hold their own entries.
    pub(crate) fn grown_zones() -> Self {
        let setup = NativeSetup::zoned("vellum, zoned, table with a part", 1 << 20, 64 << 10, 128 << 10);
        Self::new(setup.with_the_shortest_table(), 256 << 10).grown_to(66 << 20)
    }

    fn grown_to(mut self, size: u64) -> Self {
        self.made_with = Some(std::mem::replace(&mut self.setup.options.size, size));
        Self { places: Some(TWO_PAGES), ..self }
    }

    fn growing(mut setup: NativeSetup, grows: Grows, places: [u64; 5]) -> Self {
        let made_with = Some(std::mem::replace(&mut setup.options.size, grows.seen()));
        Self { places: Some(places), made_with, grows: Some(grows), ..Self::new(setup, 256 << 10) }
    }

    /// Each opening enlarges the disk, on a device that has grown by then, and grows when it is full.
    pub(crate) fn growing_on_a_device() -> Self {
        let setup = NativeSetup::table("vellum, table, growing, on a device", PAST_SIZES[0], 64 << 10);
        let grows = Grows { sizes: &PAST_SIZES, lens: Some(&LENS) };
        Self::growing(setup.with_the_shortest_table(), grows, PAST_THE_TABLE)
    }

    /// In a file, with snapshots of each size.
    pub(crate) fn growing_with_snapshots() -> Self {
        let setup =
            NativeSetup::zoned("vellum, zoned, growing, with snapshots", NEAR_SIZES[0], 64 << 10, 128 << 10);
        let grows = Grows { sizes: &NEAR_SIZES, lens: None };
        let places = [0, 9 << 16, 4 << 16, 2 << 16, 1 << 16];
        Self { has_snapshots: true, ..Self::growing(setup.with_the_shortest_table(), grows, places) }
    }

    /// As above, on a device, over a base that ends within the disk.
    pub(crate) fn growing_over_a_base() -> Self {
        let setup =
            NativeSetup::table("vellum, table over a base, growing, on a device", NEAR_SIZES[0], 64 << 10);
        let grows = Grows { sizes: &NEARBY, lens: Some(&LENS) };
        let places = [0, 9 << 16, 131_072, 155_648, 12 << 16];
        Self { has_snapshots: true, ..Self::growing(setup.over(base(), 32 << 10), grows, places) }
    }

    /// The ring has room for dozens of records: for programs that go round it.
    pub(crate) fn larger_ring() -> Self {
        let setup = NativeSetup::table("vellum, table, larger ring", 512 << 10, 64 << 10);
        let mut setup = setup.over(base(), 32 << 10);
        setup.options.journal_bytes = Some(160 << 10);
        Self { is_by_units: true, ..Self::new(setup, 256 << 10) }
    }

    /// Whole units are released and taken again: for programs with `drop64k`.
    pub(crate) fn units() -> Self {
        let setup = NativeSetup::table("vellum, table, by units", 512 << 10, 64 << 10);
        Self { is_by_units: true, ..Self::new(setup, 256 << 10) }
    }

    pub(crate) fn units_over_a_base() -> Self {
        let setup = NativeSetup::table("vellum, table over a base, by units", 512 << 10, 64 << 10);
        Self { is_by_units: true, ..Self::new(setup.over(base(), 32 << 10), 256 << 10) }
    }

    /// As above, where there are fewer units than the disk has.
    pub(crate) fn units_on_a_device() -> Self {
        let setup = NativeSetup::table("vellum, table, by units, on a device", 512 << 10, 64 << 10);
        Self { is_by_units: true, device: Some((1 << 20) + (6 << 16)), ..Self::new(setup, 256 << 10) }
    }

    /// As above, with units made ready ahead of need.
    pub(crate) fn tended_units() -> Self {
        let setup = NativeSetup::table("vellum, table, by units, tended", 512 << 10, 64 << 10);
        Self { is_by_units: true, is_tended: true, ..Self::new(setup, 256 << 10) }
    }

    pub(crate) fn tended_units_on_a_device() -> Self {
        let setup = NativeSetup::table(
            "vellum, table over a base, by units, on a device, tended",
            512 << 10,
            64 << 10,
        );
        let device = Some((1 << 20) + (6 << 16));
        Self {
            is_by_units: true,
            is_tended: true,
            device,
            ..Self::new(setup.over(base(), 32 << 10), 256 << 10)
        }
    }

    /// Snapshots are made and deleted: for programs of one queue with `drop64k`.
    pub(crate) fn snapshots() -> Self {
        let setup = NativeSetup::table("vellum, table with snapshots", 512 << 10, 64 << 10);
        Self { is_by_units: true, has_snapshots: true, ..Self::new(setup, 256 << 10) }
    }

    /// As above, with clones of each snapshot.
    pub(crate) fn snapshots_with_clones() -> Self {
        let setup = NativeSetup::table("vellum, table with snapshots and clones", 512 << 10, 64 << 10);
        Self { is_by_units: true, has_snapshots: true, has_clones: true, ..Self::new(setup, 256 << 10) }
    }

    pub(crate) fn snapshots_over_a_base() -> Self {
        let setup = NativeSetup::table("vellum, table over a base with snapshots", 512 << 10, 64 << 10);
        Self { is_by_units: true, has_snapshots: true, ..Self::new(setup.over(base(), 32 << 10), 256 << 10) }
    }

    /// Units hold their own entries: for programs that begin with a flush of something, so that a zone is
    /// open.
    pub(crate) fn zoned() -> Self {
        let setup = NativeSetup::zoned("vellum, zoned", 512 << 10, 64 << 10, 1 << 20);
        Self { is_by_units: true, ..Self::new(setup, 256 << 10) }
    }

    /// A zone has two units.
    pub(crate) fn zoned_in_small_zones() -> Self {
        let setup = NativeSetup::zoned("vellum, zoned, small zones", 512 << 10, 64 << 10, 128 << 10);
        Self { is_by_units: true, ..Self::new(setup, 256 << 10) }
    }

    /// As above, on a device with other bytes on it, whose zeros cost nothing.
    pub(crate) fn zoned_on_a_device() -> Self {
        let setup = NativeSetup::zoned("vellum, zoned, on a device", 512 << 10, 64 << 10, 128 << 10);
        Self { is_by_units: true, device: Some((1 << 20) + (10 << 16)), ..Self::new(setup, 256 << 10) }
    }

    /// As above, where zeros have to be written: units that are filled from end to end are not made zero before,
    /// and such a write moves a unit that holds its own entry.
    pub(crate) fn zoned_on_an_old_device() -> Self {
        let setup = NativeSetup::zoned("vellum, zoned, on an old device", 512 << 10, 64 << 10, 128 << 10);
        Self {
            is_by_units: true,
            writes_zeros: true,
            device: Some((1 << 20) + (20 << 16)),
            ..Self::new(setup, 256 << 10)
        }
    }

    /// The base ends within a unit; behind it units hold their own entries.
    pub(crate) fn zoned_over_a_base() -> Self {
        let setup = NativeSetup::zoned("vellum, zoned over a base", 512 << 10, 64 << 10, 1 << 20);
        Self { places: Some(WHERE_THE_BASE_ENDS), ..Self::new(setup.over(base(), 32 << 10), 256 << 10) }
    }

    /// A base under all of the disk but the end: for writes one after another, whose checksums are too many for a record.
    pub(crate) fn zoned_in_bulk() -> Self {
        let setup = NativeSetup::zoned("vellum, zoned over a base, in bulk", 640 << 10, 64 << 10, 1 << 20);
        let base: Vec<u8> = (0..(9 << 16) - 8192).map(|at: u32| (at / 512).to_le_bytes()[0] | 1).collect();
        Self { is_in_a_row: true, ..Self::new(setup.over(base, 64 << 10), 256 << 10) }
    }

    /// Units over the base hold their own entries: two sub-blocks of a unit, two of its neighbour, and a unit behind the
    /// base.
    pub(crate) fn packed_over_a_base() -> Self {
        Self::packed_over("vellum, zoned, packed over a base", 64 << 10)
    }

    /// A bit says it all; there are no masks that count.
    pub(crate) fn packed_over_a_base_in_small_blocks() -> Self {
        Self::packed_over("vellum, zoned, packed over a base, small blocks", 4 << 10)
    }

    /// A bit is about two units.
    pub(crate) fn packed_over_a_base_in_large_blocks() -> Self {
        Self::packed_over("vellum, zoned, packed over a base, large blocks", 128 << 10)
    }

    /// Units that are filled from end to end are not made zero before: such a write moves a unit.
    pub(crate) fn packed_over_a_base_on_an_old_device() -> Self {
        let device = Some((1 << 20) + (20 << 16));
        let mut new = Self::packed_over("vellum, zoned, packed over a base, old device", 64 << 10);
        new.setup.options.zone_size = Some(128 << 10);
        Self { writes_zeros: true, device, ..new }
    }

    pub(crate) fn packed_over_a_base_in_quiet_times() -> Self {
        let new = Self::packed_over("vellum, zoned, packed over a base, quiet times", 32 << 10);
        Self { has_quiet_times: true, ..new }
    }

    /// The book is behind the base: the first write over the base after a snapshot is the first to keep its masks.
    pub(crate) fn packed_over_a_base_with_snapshots() -> Self {
        let new = Self::packed_over("vellum, zoned, packed over a base, snapshots", 64 << 10);
        Self { has_snapshots: true, is_gone_back_to: true, ..new }
    }

    /// On a device with zones of two units, which are emptied and opened again.
    pub(crate) fn packed_over_a_base_in_small_zones() -> Self {
        let device = Some((1 << 20) + (12 << 16));
        let mut new = Self::packed_over("vellum, zoned, packed over a base, small zones", 64 << 10);
        new.setup.options.zone_size = Some(128 << 10);
        Self { device, ..new }
    }

    fn packed_over(name: &'static str, block: u64) -> Self {
        let setup = NativeSetup::zoned(name, 640 << 10, 64 << 10, 256 << 10);
        let base: Vec<u8> = (0..(8 << 16) - 8192).map(|at: u32| (at / 512).to_le_bytes()[0] | 1).collect();
        let places = [0, 4096, 1 << 16, (1 << 16) + 8192, 8 << 16];
        Self { places: Some(places), ..Self::new(setup.over(base, block), 256 << 10) }
    }

    /// Zones are written with zeros ahead of need.
    pub(crate) fn zoned_prepared() -> Self {
        let setup = NativeSetup::zoned("vellum, zoned, prepared", 512 << 10, 64 << 10, 256 << 10);
        let prealloc = Prealloc::Fixed(128 << 10);
        Self { is_by_units: true, is_tended: true, prealloc, ..Self::new(setup, 256 << 10) }
    }

    /// Embedded entries are recorded in the table again and again.
    pub(crate) fn zoned_in_quiet_times() -> Self {
        let setup = NativeSetup::zoned("vellum, zoned, in quiet times", 512 << 10, 64 << 10, 256 << 10);
        Self { is_by_units: true, has_quiet_times: true, ..Self::new(setup, 256 << 10) }
    }

    /// As above, on a device, where zones of which little is used are emptied.
    pub(crate) fn zoned_compacted() -> Self {
        let setup = NativeSetup::zoned("vellum, zoned, compacted", 512 << 10, 64 << 10, 128 << 10);
        let device = Some((1 << 20) + (10 << 16));
        let compaction = true;
        Self { is_by_units: true, has_quiet_times: true, device, compaction, ..Self::new(setup, 256 << 10) }
    }

    /// Two pages of table, so that deleting one that has copies of both takes several steps.
    pub(crate) fn snapshots_of_two_pages() -> Self {
        let setup = NativeSetup::table("vellum, table of two pages with snapshots", 1040 << 16, 64 << 10);
        let places = [0, 1 << 16, 2 << 16, 1024 << 16, 1025 << 16];
        Self { places: Some(places), has_snapshots: true, ..Self::new(setup, 256 << 10) }
    }

    /// Snapshots, units that hold their own entries, zones that are emptied on a device, and entries that are
    /// recorded in quiet times.
    pub(crate) fn zoned_with_everything() -> Self {
        let setup = NativeSetup::zoned("vellum, zoned, with everything", 512 << 10, 64 << 10, 128 << 10);
        let device = Some((1 << 20) + (32 << 16));
        Self {
            is_by_units: true,
            has_snapshots: true,
            has_quiet_times: true,
            compaction: true,
            device,
            ..Self::new(setup, 256 << 10)
        }
    }

    /// The table has two pages, and the book is in the second: no snapshot has a copy of the first before the guest
    /// writes there.
    pub(crate) fn zoned_with_snapshots_of_two_pages() -> Self {
        let setup =
            NativeSetup::zoned("vellum, zoned with snapshots, two pages", 1040 << 16, 64 << 10, 1 << 20);
        let places = [0, 1 << 16, 2 << 16, 3 << 16, 1025 << 16];
        Self { places: Some(places), has_snapshots: true, ..Self::new(setup, 256 << 10) }
    }

    pub(crate) fn zoned_with_snapshots() -> Self {
        let setup = NativeSetup::zoned("vellum, zoned with snapshots", 512 << 10, 64 << 10, 1 << 20);
        Self { is_by_units: true, has_snapshots: true, ..Self::new(setup, 256 << 10) }
    }

    /// Nothing grows, nothing is zero by itself, no zeros are fast, and there are fewer units than the disk
    /// has.
    pub(crate) fn table_on_a_device() -> Self {
        let setup = NativeSetup::table("vellum, table over a base on a device", 512 << 10, 64 << 10)
            .over(base(), 16 << 10);
        Self { device: Some((1 << 20) + (7 << 16)), ..Self::new(setup, 128 << 10) }
    }

    /// The same, encrypted, under this name.
    pub(crate) fn encrypted(self, name: &'static str) -> Self {
        // The keys take a mebibyte.
        let device = self.device.map(|len| len + (1 << 20));
        Self { setup: self.setup.encrypted(name), device, ..self }
    }

    /// Whether all of the disk is soon read.
    pub(crate) fn is_small(&self) -> bool {
        self.setup.options.size < 16 << 20
    }

    pub(crate) fn is_on_a_device(&self) -> bool {
        self.device_len().is_some()
    }

    /// How much of a snapshot is checked.
    fn looked_at(&self) -> Vec<GuestSpan> {
        match self.is_small() {
            true => vec![GuestOffset::ZERO.span(self.setup.options.size - BOOK)],
            false => self.places().iter().map(|place| place.span(64 << 10)).collect(),
        }
    }

    /// How long the device is, at most.
    fn device_len(&self) -> Option<u64> {
        self.device.or(self.grows.and_then(|grows| grows.len_max()))
    }

    fn on_its_medium(&self, image: SharedStorage) -> SharedStorage {
        let has_fast_zeroes = self.setup.options.has_zones && !self.writes_zeros;
        if self.device_len().is_some() { Device::with(image, has_fast_zeroes) } else { image }
    }
}

impl Subject for NativeSubject {
    fn name(&self) -> String {
        self.setup.name.to_owned()
    }

    fn image(&self) -> Content {
        let device = self.device_len();
        if device.is_none() && self.made_with.is_none() {
            return self.setup.empty_image();
        }
        let mut bytes = vec![0; usize::try_from(device.unwrap_or(0)).unwrap()];
        Random::from_seed(9).fill(&mut bytes);
        let medium = Medium::new(Content::of(&bytes));
        let image = if device.is_some() { Device::shared(medium.clone()) } else { medium.clone() };
        let mut options = self.setup.create_options();
        options.size = self.made_with.unwrap_or(options.size);
        block_on(async {
            create(&*image, &options).await.unwrap();
            if self.made_with.is_some() && self.grows.is_none() {
                resize(&image, self.setup.options.size, false).await.unwrap();
            }
        });
        medium.content()
    }

    fn guest(&self) -> Content {
        let mut content = self.setup.content();
        if self.has_snapshots {
            content.set_len(self.setup.options.size - BOOK);
        }
        content
    }

    fn places(&self) -> Vec<GuestOffset> {
        if let Some(places) = self.places {
            return places.map(GuestOffset::new).to_vec();
        }
        if self.is_in_a_row {
            return (0..self.setup.options.size >> 16).map(|unit| GuestOffset::new(unit << 16)).collect();
        }
        if self.is_by_units {
            return [0, 1, 4, 2, 3].map(|unit| GuestOffset::new(unit << 16)).to_vec();
        }
        let far = self.far;
        [16_384, 32_768, far, far + 8192, 0, far + 4096, 49_152, far + 65_536].map(GuestOffset::new).to_vec()
    }

    /// Without a journal, an image does not show that it was not closed.
    fn reads_the_medium(&self) -> bool {
        let options = &self.setup.options;
        options.has_table || options.has_zones || options.base.is_some()
    }

    fn open(&self, image: SharedStorage) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move {
            let options = OpenOptions {
                journal_key: Some(1),
                prealloc: self.prealloc,
                compaction: self.compaction,
                ..opening()
            };
            let medium = match &self.grows {
                Some(grows) => grows.grow(&image, self.setup.options.has_zones).await?,
                None => self.on_its_medium(image),
            };
            let disk = Native::open(medium, self.below.clone(), options).await?;
            let size = self.setup.options.size;
            let disk: SharedDisk = match (self.has_snapshots, self.grows) {
                (true, _) => Snapped::shared(disk, self.looked_at(), self.places()[2], size, self.has_clones),
                (false, Some(_)) => Seen::of(disk, size),
                (false, None) => disk,
            };
            Ok(match (self.is_tended, self.has_quiet_times) {
                (_, true) => Tended::in_quiet_times(disk),
                (true, _) => Tended::shared(disk),
                _ => disk,
            })
        })
    }

    fn verify(&self, image: SharedStorage) -> LocalFuture<'_, Result<(), String>> {
        Box::pin(async move {
            let image = self.on_its_medium(image);
            let (report, lines) = look_native(&image).await.map_err(|error| error.chain())?;
            if self.has_snapshots {
                let size = self.setup.options.size;
                snapped::verify(&image, self.below.clone(), &self.looked_at(), size).await?;
                if self.is_gone_back_to {
                    snapped::go_back(&image, self.below.clone(), &self.looked_at()).await?;
                }
            }
            if let Some(grows) = &self.grows {
                grows.verify(&image, self.below.clone()).await?;
            }
            if report.is_clean() { Ok(()) } else { Err(format!("the check says: {}", lines.join("; "))) }
        })
    }
}
