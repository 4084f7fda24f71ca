//! Small images of the native format, opened and checked afterwards.

use std::sync::Arc;

use vellum_core::{MemoryDisk, Result, SharedDisk, SharedStorage};
use vellum_format::native::check::check;
use vellum_format::native::{CreateOptions, Native, NewBase, OpenOptions, create};
use vellum_format::report::{CheckReport, Repair};
use vellum_sim::{Content, Drive, DriveOptions, World};

use super::sim::Setup;
use super::{SIZE, base, keys};

/// One kind of image under test.
#[derive(Clone)]
pub(crate) struct NativeSetup {
    pub(crate) name: &'static str,
    pub(crate) options: CreateOptions,
    /// What the base has.
    pub(crate) base: Option<Arc<Vec<u8>>>,
}

/// A base of these bytes, of which nothing is known to be zero.
fn over(bytes: &[u8]) -> NewBase {
    NewBase { name: "base".to_owned(), size: bytes.len() as u64, ..NewBase::default() }
}

impl NativeSetup {
    pub(crate) fn linear(name: &'static str, size: u64) -> Self {
        Self { name, options: CreateOptions { size, ..CreateOptions::default() }, base: None }
    }

    pub(crate) fn table(name: &'static str, size: u64, unit: u64) -> Self {
        let options = CreateOptions {
            size,
            has_table: true,
            unit_size: Some(unit),
            journal_bytes: Some(64 << 10),
            ..CreateOptions::default()
        };
        Self { name, options, base: None }
    }

    /// Units are taken from zones of this many bytes.
    pub(crate) fn zoned(name: &'static str, size: u64, unit: u64, zone: u64) -> Self {
        let mut setup = Self::table(name, size, unit);
        (setup.options.has_zones, setup.options.zone_size) = (true, Some(zone));
        setup
    }

    /// The table has one page, and room for no more: for disks of at most 64 MiB, where units have 64 KiB.
    pub(crate) fn with_the_shortest_table(mut self) -> Self {
        let zones = match self.options.zone_size {
            Some(zone) => ((2 * self.options.size.div_ceil(zone) + 8) * 256).next_multiple_of(4096),
            None => 0,
        };
        // Superblocks, table, partial units, list of snapshots.
        self.options.journal_bytes = Some((1 << 20) - (8192 + 4096 + 8192 + 524_288) - zones);
        self
    }

    pub(crate) fn over(mut self, bytes: Vec<u8>, block: u64) -> Self {
        self.options.base = Some(over(&bytes));
        self.options.block_size = Some(block);
        self.options.journal_bytes = Some(64 << 10);
        self.base = Some(Arc::new(bytes));
        self
    }

    /// The same image, encrypted, under this name.
    pub(crate) fn encrypted(mut self, name: &'static str) -> Self {
        self.name = name;
        self.options.encryption = Some(keys().0.clone());
        self
    }

    /// What the empty disk reads as.
    pub(crate) fn content(&self) -> Content {
        // Zeros take no memory.
        let mut content = Content::of(self.base.as_ref().map_or(&[], |base| base.as_slice()));
        content.set_len(self.options.size);
        content
    }

    /// The image as it is made, with nothing in it.
    pub(crate) fn empty_image(&self) -> Content {
        let world = World::new(0);
        let drive = Drive::new(&world, DriveOptions::default());
        world.run(create(&*drive, &self.create_options())).unwrap();
        drive.content()
    }

    /// With nothing left to chance.
    pub(crate) fn create_options(&self) -> CreateOptions {
        CreateOptions { uuid: Some([7; 16]), ..self.options.clone() }
    }

    /// As above, for a disk of this size. Where the base is larger, its end is not seen.
    pub(crate) fn create_options_of(&self, size: u64) -> CreateOptions {
        let mut options = CreateOptions { size, ..self.create_options() };
        if let Some(base) = &mut options.base {
            base.size = base.size.min(size);
        }
        options
    }

    pub(crate) fn below(&self) -> Option<SharedDisk> {
        self.base.as_ref().map(|base| MemoryDisk::holding(base) as SharedDisk)
    }

    pub(crate) async fn open(&self, drive: &Arc<Drive>) -> Result<Arc<Native>> {
        let image: SharedStorage = drive.clone();
        let options = OpenOptions { journal_key: Some(1), ..opening() };
        Native::open(image, self.below(), options).await
    }
}

impl Setup for NativeSetup {
    fn name(&self) -> &'static str {
        self.name
    }

    fn base(&self) -> Vec<u8> {
        self.base.as_ref().map(|base| base.to_vec()).unwrap_or_default()
    }

    fn content(&self) -> Content {
        self.content()
    }

    fn empty_image(&self) -> Content {
        self.empty_image()
    }

    async fn create(&self, drive: &Drive, size: u64) -> Result<()> {
        create(drive, &self.create_options_of(size)).await.map(drop)
    }

    async fn open(&self, drive: &Arc<Drive>) -> Result<SharedDisk> {
        Ok(self.open(drive).await?)
    }

    async fn look(&self, image: &SharedStorage) -> Result<(CheckReport, Vec<String>)> {
        look_native(image).await
    }
}

/// With the key of images that are encrypted.
pub(crate) fn opening() -> OpenOptions {
    OpenOptions { cipher: Some(keys().1.clone()), ..OpenOptions::default() }
}

pub(crate) fn encrypted_setups() -> Vec<NativeSetup> {
    let k = |kib: u64| kib << 10;
    vec![
        NativeSetup::linear("", SIZE).encrypted("encrypted, linear"),
        NativeSetup::linear("", SIZE).over(base(), k(16)).encrypted("encrypted, linear over a base"),
        NativeSetup::table("", SIZE, k(64)).encrypted("encrypted, table"),
        NativeSetup::table("", SIZE, k(64)).over(base(), k(16)).encrypted("encrypted, table over a base"),
        NativeSetup::zoned("", SIZE, k(64), k(1024)).encrypted("encrypted, zoned"),
        NativeSetup::zoned("", SIZE, k(64), k(1024))
            .over(base(), k(16))
            .encrypted("encrypted, zoned over a base"),
    ]
}

pub(crate) fn native_setups() -> Vec<NativeSetup> {
    let k = |kib: u64| kib << 10;
    vec![
        NativeSetup::linear("linear", SIZE),
        NativeSetup::linear("linear over a base", SIZE).over(base(), k(16)),
        NativeSetup::linear("linear over a base, small blocks", SIZE).over(base(), k(4)),
        NativeSetup::table("table", SIZE, k(64)),
        NativeSetup::table("table over a base", SIZE, k(64)).over(base(), k(16)),
        NativeSetup::table("table over a base, large blocks", SIZE, k(64)).over(base(), k(128)),
        NativeSetup::zoned("zoned", SIZE, k(64), k(1024)),
        NativeSetup::zoned("zoned over a base", SIZE, k(64), k(1024)).over(base(), k(16)),
    ]
}

/// Looks at an image from outside.
pub(crate) async fn look_native(image: &SharedStorage) -> Result<(CheckReport, Vec<String>)> {
    let mut lines = Vec::new();
    let report = check(image, Repair::Nothing, &mut |line| lines.push(line)).await?;
    Ok((report, lines))
}
