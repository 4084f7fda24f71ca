//! Images of the native format.

use futures_lite::future::block_on;
use vellum_core::{GuestOffset, LocalFuture, Random, Result, SharedDisk, SharedStorage};
use vellum_format::Prealloc;
use vellum_format::native::{Native, OpenOptions, create};
use vellum_sim::Content;
use vellum_sim::explore::{Medium, Subject};

use super::device::Device;
use super::snapped::{self, Snapped};
use crate::common::base;
use crate::common::native::{NativeSetup, look_native};
use crate::common::tended::Tended;

/// Behind the base, over it, both in the unit in which it ends; a unit behind it, one over it, and that one again.
const WHERE_THE_BASE_ENDS: [u64; 5] = [155_648, 131_072, 262_144, 65_536, 139_264];

/// An image of the native format.
pub(crate) struct NativeSubject {
    setup: NativeSetup,
    below: Option<SharedDisk>,
    far: u64,
    /// It lies on a device of this length, which has other bytes on it.
    device: Option<u64>,
    /// Places are units, far from each other.
    is_by_units: bool,
    /// Where places are, if it is somewhere else.
    places: Option<[u64; 5]>,
    /// A discard of 64 KiB asks for a snapshot, or for one less.
    has_snapshots: bool,
    /// Units are made ready ahead of need, beside every request.
    is_tended: bool,
    /// Somebody tends it, and between any two requests lies a quiet time.
    has_quiet_times: bool,
    /// How far ahead zones are written with zeros.
    prealloc: Prealloc,
    /// Zones of which little is used are emptied.
    compaction: bool,
}

impl NativeSubject {
    fn new(setup: NativeSetup, far: u64) -> Self {
        let below = setup.below();
        Self {
            setup,
            below,
            far,
            device: None,
            is_by_units: false,
            places: None,
            has_snapshots: false,
            is_tended: false,
            has_quiet_times: false,
            prealloc: Prealloc::Off,
            compaction: false,
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

    /// Whole units are let go and taken again: for programs with `drop64k`.
    pub(crate) fn units() -> Self {
        let setup = NativeSetup::table("vellum, table, by units", 512 << 10, 64 << 10);
        Self { is_by_units: true, ..Self::new(setup, 256 << 10) }
    }

    pub(crate) fn units_over_a_base() -> Self {
        let setup = NativeSetup::table("vellum, table over a base, by units", 512 << 10, 64 << 10);
        Self { is_by_units: true, ..Self::new(setup.over(base(), 32 << 10), 256 << 10) }
    }

    /// The same where there are fewer units than the disk has.
    pub(crate) fn units_on_a_device() -> Self {
        let setup = NativeSetup::table("vellum, table, by units, on a device", 512 << 10, 64 << 10);
        Self { is_by_units: true, device: Some((1 << 20) + (6 << 16)), ..Self::new(setup, 256 << 10) }
    }

    /// The same, with units made ready ahead of need.
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

    pub(crate) fn snapshots_over_a_base() -> Self {
        let setup = NativeSetup::table("vellum, table over a base with snapshots", 512 << 10, 64 << 10);
        Self { is_by_units: true, has_snapshots: true, ..Self::new(setup.over(base(), 32 << 10), 256 << 10) }
    }

    /// Units hold their own entries: for programs that begin with a flush of something, so that a zone is open.
    pub(crate) fn zoned() -> Self {
        let setup = NativeSetup::zoned("vellum, zoned", 512 << 10, 64 << 10, 1 << 20);
        Self { is_by_units: true, ..Self::new(setup, 256 << 10) }
    }

    /// A zone has two units.
    pub(crate) fn zoned_in_small_zones() -> Self {
        let setup = NativeSetup::zoned("vellum, zoned, small zones", 512 << 10, 64 << 10, 128 << 10);
        Self { is_by_units: true, ..Self::new(setup, 256 << 10) }
    }

    /// The same on a device with other bytes on it, whose zeros cost nothing.
    pub(crate) fn zoned_on_a_device() -> Self {
        let setup = NativeSetup::zoned("vellum, zoned, on a device", 512 << 10, 64 << 10, 128 << 10);
        Self { is_by_units: true, device: Some((1 << 20) + (10 << 16)), ..Self::new(setup, 256 << 10) }
    }

    /// The base ends within a unit; behind it units hold their own entries.
    pub(crate) fn zoned_over_a_base() -> Self {
        let setup = NativeSetup::zoned("vellum, zoned over a base", 512 << 10, 64 << 10, 1 << 20);
        Self { places: Some(WHERE_THE_BASE_ENDS), ..Self::new(setup.over(base(), 32 << 10), 256 << 10) }
    }

    /// Zones are written with zeros ahead of need.
    pub(crate) fn zoned_prepared() -> Self {
        let setup = NativeSetup::zoned("vellum, zoned, prepared", 512 << 10, 64 << 10, 256 << 10);
        let prealloc = Prealloc::Fixed(128 << 10);
        Self { is_by_units: true, is_tended: true, prealloc, ..Self::new(setup, 256 << 10) }
    }

    /// What was born is told to the table again and again.
    pub(crate) fn zoned_in_quiet_times() -> Self {
        let setup = NativeSetup::zoned("vellum, zoned, in quiet times", 512 << 10, 64 << 10, 256 << 10);
        Self { is_by_units: true, has_quiet_times: true, ..Self::new(setup, 256 << 10) }
    }

    /// The same on a device, where zones of which little is used are emptied.
    pub(crate) fn zoned_compacted() -> Self {
        let setup = NativeSetup::zoned("vellum, zoned, compacted", 512 << 10, 64 << 10, 128 << 10);
        let device = Some((1 << 20) + (10 << 16));
        let compaction = true;
        Self { is_by_units: true, has_quiet_times: true, device, compaction, ..Self::new(setup, 256 << 10) }
    }

    pub(crate) fn zoned_with_snapshots() -> Self {
        let setup = NativeSetup::zoned("vellum, zoned with snapshots", 512 << 10, 64 << 10, 1 << 20);
        Self { is_by_units: true, has_snapshots: true, ..Self::new(setup, 256 << 10) }
    }

    /// Nothing grows, nothing is zero by itself, no zeros are fast, and there are fewer units than the disk has.
    pub(crate) fn table_on_a_device() -> Self {
        let setup = NativeSetup::table("vellum, table over a base on a device", 512 << 10, 64 << 10)
            .over(base(), 16 << 10);
        Self { device: Some((1 << 20) + (7 << 16)), ..Self::new(setup, 128 << 10) }
    }

    fn on_its_medium(&self, image: SharedStorage) -> SharedStorage {
        if self.device.is_some() { Device::with(image, self.setup.options.has_zones) } else { image }
    }
}

impl Subject for NativeSubject {
    fn name(&self) -> String {
        self.setup.name.to_owned()
    }

    fn image(&self) -> Content {
        let Some(len) = self.device else { return self.setup.empty_image() };
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        Random::from_seed(9).fill(&mut bytes);
        let medium = Medium::new(Content::of(&bytes));
        block_on(create(&*Device::shared(medium.clone()), &self.setup.create_options())).unwrap();
        medium.content()
    }

    fn guest(&self) -> Content {
        self.setup.content()
    }

    fn places(&self) -> Vec<GuestOffset> {
        if let Some(places) = self.places {
            return places.map(GuestOffset::new).to_vec();
        }
        if self.is_by_units {
            return [0, 1, 4, 2, 3].map(|unit| GuestOffset::new(unit << 16)).to_vec();
        }
        let far = self.far;
        [16_384, 32_768, far, far + 8192, 0, far + 4096, 49_152, far + 65_536].map(GuestOffset::new).to_vec()
    }

    fn open(&self, image: SharedStorage) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move {
            let options = OpenOptions {
                journal_key: Some(1),
                prealloc: self.prealloc,
                compaction: self.compaction,
                ..OpenOptions::default()
            };
            let disk = Native::open(self.on_its_medium(image), self.below.clone(), options).await?;
            let disk = if self.has_snapshots { Snapped::shared(disk) } else { disk };
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
                snapped::verify(&image, self.below.clone()).await?;
            }
            if report.is_clean() { Ok(()) } else { Err(format!("the check says: {}", lines.join("; "))) }
        })
    }
}
