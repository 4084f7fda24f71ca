//! Images to be changed, and what may be in them afterwards.

#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, Error, GuestOffset, ImageOffset, LocalFuture, Place, Random, Result, SharedStorage,
    WriteFlags, ZeroFlags,
};
use vellum_format::FormatKind;
use vellum_format::image::Detaching as _;
use vellum_format::native::check::check;
use vellum_format::native::snapshots::{revert, snapshots};
use vellum_format::native::{Native, OpenOptions, Superblocks, create, recover, resize};
use vellum_format::report::Repair;
use vellum_sim::Content;
use vellum_sim::explore::{Care, Depth, Medium, Offline};

use crate::common::native::{NativeSetup, look_native, opening};
use crate::common::{base, scale};
use crate::device::Device;

/// Enough for a megabyte.
pub(crate) const DEVICE: u64 = (1 << 20) + (40 << 16);

/// Ends within unit 9.
pub(crate) const SMALL: u64 = 590_336;
const LARGE: u64 = 1 << 20;
/// More than any of these images; of those with several pages of table, too.
const LARGER: u64 = 192 << 20;
/// More than the shortest table has room for; more than that with one part has; and still more.
const PAST: u64 = (66 << 20) + 512;
const SECOND: u64 = 2 << 30;
const THIRD: u64 = 6 << 30;
const BLOCK: usize = 4096;

/// What a disk has: bytes at a few places, zeros elsewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Model {
    pub(crate) size: u64,
    base: Vec<u8>,
    blocks: BTreeMap<u64, Vec<u8>>,
}

impl Model {
    fn new(setup: &NativeSetup) -> Self {
        let size = setup.options.size;
        let mut base = setup.base.as_ref().map_or_else(Vec::new, |base| base.to_vec());
        base.truncate(usize::try_from(size).unwrap());
        Self { size, base, blocks: BTreeMap::new() }
    }

    /// The same disk with another size.
    pub(crate) fn resized(&self, size: u64) -> Self {
        let mut model = Self { size, ..self.clone() };
        model.base.truncate(usize::try_from(size).unwrap());
        model.blocks.retain(|at, _| *at < size);
        if let Some((at, bytes)) = model.blocks.iter_mut().next_back() {
            let left = usize::try_from(size - at).unwrap();
            if left < BLOCK {
                bytes[left..].fill(0);
            }
        }
        model
    }

    /// The bytes of a block, as far as the disk goes.
    fn block(&self, at: u64) -> Vec<u8> {
        let len = BLOCK.min(usize::try_from(self.size.saturating_sub(at)).unwrap());
        let mut bytes = match self.blocks.get(&at) {
            Some(bytes) => bytes.clone(),
            None => {
                let from = usize::try_from(at).unwrap().min(self.base.len());
                self.base[from..(from + BLOCK).min(self.base.len())].to_vec()
            }
        };
        bytes.resize(BLOCK, 0);
        bytes.truncate(len);
        bytes
    }

    /// Writes a block, to the disk and here.
    pub(crate) async fn write(&mut self, disk: &dyn Disk, block: u64, stamp: u8) -> Result<()> {
        let at = block * BLOCK as u64;
        let len = BLOCK.min(usize::try_from(self.size - at).unwrap());
        let mut bytes = vec![stamp; BLOCK];
        if stamp.is_multiple_of(3) {
            Random::from_seed(block).fill(&mut bytes); // it does not pack
        }
        bytes[len..].fill(0);
        disk.write(GuestOffset::new(at), Buffer::copy_of(&bytes[..len]), WriteFlags::default()).await?;
        self.blocks.insert(at, bytes);
        Ok(())
    }

    /// Where something is, in this model or beside it.
    fn places(&self) -> impl Iterator<Item = u64> {
        let near = |at: &u64| [at.saturating_sub(BLOCK as u64), *at, at + BLOCK as u64];
        let base = (0..self.base.len() as u64).step_by(5 * BLOCK);
        let end = self.size / BLOCK as u64 * BLOCK as u64;
        self.blocks.keys().flat_map(near).chain(base).chain(near(&end)).collect::<Vec<_>>().into_iter()
    }
}

async fn read(disk: &dyn Disk, at: u64) -> std::result::Result<Vec<u8>, String> {
    let len = BLOCK.min(usize::try_from(disk.geometry().size.saturating_sub(at)).unwrap());
    let read = disk.read(GuestOffset::new(at), Buffer::zeroed(len)).await;
    read.map(|bytes| bytes.to_vec()).map_err(|error| format!("{at} cannot be read: {}", error.chain()))
}

/// Which of these the disk is.
pub(crate) async fn which<'a>(
    disk: &dyn Disk,
    allowed: impl Iterator<Item = &'a Model> + Clone,
) -> std::result::Result<&'a Model, String> {
    let mut places: Vec<u64> = allowed.clone().flat_map(Model::places).collect();
    places.sort_unstable();
    places.dedup();
    let size = disk.geometry().size;
    let mut why = format!("no disk may have {size} bytes");
    let mut found = BTreeMap::new();
    for at in places.into_iter().filter(|at| *at < size) {
        found.insert(at, read(disk, at).await?);
    }
    for model in allowed.filter(|model| model.size == size) {
        match found.iter().find(|(at, bytes)| model.block(**at) != **bytes) {
            None => return Ok(model),
            Some((at, bytes)) => {
                let should = model.block(*at);
                let byte = bytes.iter().zip(&should).position(|(is, should)| is != should).unwrap_or(0);
                why = format!(
                    "of {size} bytes, at {} it is {}, not {}",
                    at + byte as u64,
                    bytes[byte],
                    should[byte]
                );
            }
        }
    }
    Err(why)
}

/// What is done.
#[derive(Debug, Clone)]
pub(crate) enum What {
    Revert(&'static str),
    Resize(u64),
    Delete(&'static str),
    Detach,
    /// With what takes long done while the disk is open.
    DetachAhead,
}

/// A change of an image.
pub(crate) struct Change {
    pub(crate) name: String,
    pub(crate) setup: NativeSetup,
    /// It lies on a device of this length, which has other bytes on it.
    device: Option<u64>,
    image: Content,
    what: What,
    pub(crate) before: Model,
    pub(crate) after: Model,
    /// What each snapshot has.
    taken: Vec<(&'static str, Model)>,
}

fn options() -> OpenOptions {
    OpenOptions { journal_key: Some(1), ..opening() }
}

/// What becomes of an image.
struct Work<'a> {
    image: SharedStorage,
    setup: &'a NativeSetup,
    model: Model,
    taken: Vec<(&'static str, Model)>,
}

impl Work<'_> {
    async fn open(&self) -> Arc<Native> {
        Native::open(self.image.clone(), self.setup.below(), options()).await.unwrap()
    }

    async fn write(&mut self, blocks: &[u64], stamp: u8) {
        let disk = self.open().await;
        for block in blocks {
            self.model.write(&*disk, *block, stamp).await.unwrap();
        }
        disk.close().await.unwrap();
    }

    async fn zero(&mut self, blocks: &[u64]) {
        let disk = self.open().await;
        for block in blocks {
            let span = GuestOffset::new(block * BLOCK as u64).span(BLOCK as u64);
            disk.write_zeroes(span, ZeroFlags::default()).await.unwrap();
            self.model.blocks.insert(span.start().bytes(), vec![0; BLOCK]);
        }
        disk.close().await.unwrap();
    }

    /// Writes what only the base has, as far as it is not zero.
    async fn fill(&mut self) {
        let disk = self.open().await;
        for at in (0..self.model.base.len() as u64).step_by(BLOCK) {
            let bytes = self.model.block(at);
            if !self.model.blocks.contains_key(&at) && bytes.iter().any(|byte| *byte != 0) {
                disk.write(GuestOffset::new(at), Buffer::copy_of(&bytes), WriteFlags::default())
                    .await
                    .unwrap();
            }
        }
        disk.close().await.unwrap();
    }

    /// Leaves bytes where a write of these blocks would have been lost: nothing says that they count. All are in
    /// one unit.
    async fn litter(&mut self, blocks: &[u64]) {
        const UNIT: u64 = 16;
        let disk = self.open().await;
        let unit = GuestOffset::new(blocks[0] / UNIT * UNIT * BLOCK as u64);
        let extents = disk.map(unit.span(UNIT * BLOCK as u64)).await.unwrap();
        disk.close().await.unwrap();
        let data = extents.iter().find_map(|extent| match extent.place {
            Place::Data { at, .. } => Some(at.bytes() - (extent.span.start() - unit)),
            _ => None,
        });
        let start = ImageOffset::new(data.expect("something in the unit is data"));
        for block in blocks {
            assert!(self.model.block(block * BLOCK as u64).iter().all(|byte| *byte == 0), "{block}");
            let at = start + block % UNIT * BLOCK as u64;
            self.image.write(at, Buffer::copy_of(&[0xEE; BLOCK])).await.unwrap();
        }
    }

    async fn take(&mut self, name: &'static str) {
        let disk = self.open().await;
        disk.snapshot_create(name, 0).await.unwrap();
        disk.close().await.unwrap();
        self.taken.push((name, self.model.clone()));
    }

    async fn resize(&mut self, size: u64) {
        resize(&self.image, size, true).await.unwrap();
        self.model = self.model.resized(size);
    }

    async fn revert(&mut self, name: &'static str) {
        revert(self.image.clone(), self.setup.below(), options(), name).await.unwrap();
        self.model = self.taken.iter().find(|(taken, _)| *taken == name).unwrap().1.clone();
    }
}

fn medium_of(device: Option<u64>, medium: SharedStorage) -> SharedStorage {
    if device.is_some() { Device::shared(medium) } else { medium }
}

impl Change {
    fn made(
        setup: NativeSetup,
        device: Option<u64>,
        what: What,
        prepare: impl AsyncFnOnce(&mut Work<'_>),
    ) -> Self {
        let mut bytes = vec![0; usize::try_from(device.unwrap_or(0)).unwrap()];
        Random::from_seed(9).fill(&mut bytes);
        let medium = Medium::new(Content::of(&bytes));
        let image = medium_of(device, medium.clone());
        let mut work =
            Work { image: image.clone(), setup: &setup, model: Model::new(&setup), taken: Vec::new() };
        block_on(async {
            create(&*image, &setup.create_options()).await.unwrap();
            prepare(&mut work).await;
        });
        let (before, mut taken) = (work.model, work.taken);
        let after = match what {
            What::Revert(name) => taken.iter().find(|(taken, _)| *taken == name).unwrap().1.clone(),
            What::Resize(size) => before.resized(size),
            What::Delete(_) | What::Detach | What::DetachAhead => before.clone(),
        };
        if let What::Delete(name) = what {
            taken.retain(|(taken, _)| *taken != name);
        }
        let name = format!("{}{}, {what:?}", setup.name, if device.is_some() { " on a device" } else { "" });
        Self { name, setup, device, image: medium.content(), what, before, after, taken }
    }

    /// A disk that is reverted from a small snapshot to a large one, or back.
    pub(crate) fn revert(setup: NativeSetup, to: &'static str, device: Option<u64>) -> Self {
        Self::made(setup, device, What::Revert(to), async |work| {
            work.write(&[0, 1, 17, 40, 144], 1).await;
            work.take("small").await;
            work.resize(LARGE).await;
            work.write(&[144, 151, 152, 200, 17], 2).await;
            work.take("large").await;
            work.write(&[3, 40, 200], 4).await;
            if to == "large" {
                work.revert("small").await;
            }
        })
    }

    /// As above, with several pages of table.
    pub(crate) fn revert_of_pages(setup: NativeSetup) -> Self {
        const PAGE: u64 = 64 << 20;
        Self::made(setup, None, What::Revert("first"), async |work| {
            let blocks: Vec<u64> =
                (0..3).flat_map(|page| [page * PAGE / 4096, page * PAGE / 4096 + 20]).collect();
            work.write(&blocks, 1).await;
            work.take("first").await;
            work.write(&[blocks[1], blocks[3], blocks[5], 40], 2).await;
            work.take("second").await;
            work.write(&[blocks[0], blocks[4], 60], 4).await;
        })
    }

    /// A disk that becomes larger, after it was shrunk: what was cut off may not come back. A snapshot sees
    /// its last unit.
    pub(crate) fn grow(setup: NativeSetup, device: Option<u64>) -> Self {
        Self::made(setup, device, What::Resize(LARGE), async |work| {
            work.write(&[0, 17, 144, 150, 151, 170], 1).await;
            work.resize(SMALL).await;
            if work.setup.options.has_table {
                work.write(&[18], 2).await;
                work.take("small").await;
            }
        })
    }

    /// A disk whose last unit a larger snapshot sees, too, with bytes behind the disk's end.
    pub(crate) fn grow_after_revert(setup: NativeSetup) -> Self {
        Self::made(setup, None, What::Resize(LARGE), async |work| {
            work.write(&[0, 144], 1).await;
            work.take("small").await;
            work.resize(LARGE).await;
            work.take("large").await;
            work.write(&[151], 2).await;
            work.take("written").await;
            work.revert("small").await;
        })
    }

    pub(crate) fn shrink(setup: NativeSetup, device: Option<u64>) -> Self {
        Self::made(setup, device, What::Resize(100_352), async |work| {
            work.write(&[0, 17, 24, 25, 30, 144], 1).await;
            work.write(&[24], 2).await;
        })
    }

    /// A disk that becomes larger than its table has room for. A snapshot sees its last unit.
    pub(crate) fn grow_past_the_table(setup: NativeSetup, device: Option<u64>) -> Self {
        Self::made(setup, device, What::Resize(PAST), async |work| {
            work.write(&[0, 17, 144], 1).await;
            work.take("small").await;
            work.write(&[17], 2).await;
        })
    }

    /// As above, where the part comes to lie on a device where data of the disk was.
    pub(crate) fn grow_into_freed_units(setup: NativeSetup) -> Self {
        Self::made(setup, Some((1 << 20) + (40 << 16)), What::Resize(PAST), async |work| {
            let units: Vec<u64> = (0..16).map(|unit| unit * 16).collect();
            work.write(&units, 1).await;
            // Nothing is written after that: closing would punch what is free.
            work.resize(9 << 16).await;
        })
    }

    /// The same once more, with something in the first part that a snapshot sees.
    pub(crate) fn grow_to_a_second_part(setup: NativeSetup, device: Option<u64>) -> Self {
        Self::made(setup, device, What::Resize(SECOND), async |work| {
            work.write(&[0, 17], 1).await;
            work.resize(PAST).await;
            work.write(&[40, PAST / 4096, 16_384], 2).await;
            work.take("one").await;
            work.write(&[40, 16_384], 4).await;
        })
    }

    /// A disk that is reverted from a small snapshot to one of which the table has a part, or back.
    pub(crate) fn revert_past_the_table(setup: NativeSetup, to: &'static str) -> Self {
        Self::made(setup, None, What::Revert(to), async |work| {
            work.write(&[0, 17, 144], 1).await;
            work.take("small").await;
            work.resize(PAST).await;
            work.write(&[17, 144, 16_384, PAST / 4096], 2).await;
            work.take("large").await;
            work.write(&[0, 16_384, 16_500], 4).await;
            if to == "large" {
                work.revert("small").await;
            }
        })
    }

    pub(crate) fn shrink_from_a_part(setup: NativeSetup) -> Self {
        Self::made(setup, None, What::Resize(100_352), async |work| {
            work.resize(PAST).await;
            work.write(&[0, 17, 24, 25, 30, 144, 16_384, PAST / 4096], 1).await;
            work.write(&[24], 2).await;
        })
    }

    /// More than any of its disks.
    fn larger(&self) -> u64 {
        if self.before.size.max(self.after.size) > LARGER { THIRD } else { LARGER }
    }

    pub(crate) fn delete(setup: NativeSetup, name: &'static str) -> Self {
        Self::made(setup, None, What::Delete(name), async |work| {
            work.write(&[0, 17, 40, 90], 1).await;
            work.take("first").await;
            work.write(&[17, 40], 2).await;
            work.take("second").await;
            work.write(&[0, 17], 4).await;
        })
    }

    /// A disk that lets go of its base. Some of it was zeroed, with and without space, before what the base has was
    /// written and after it; a part of the base is zero.
    pub(crate) fn detach(setup: NativeSetup, device: Option<u64>) -> Self {
        Self::detached(setup, device, What::Detach)
    }

    /// The same disk, while it is open.
    pub(crate) fn detach_ahead(setup: NativeSetup, device: Option<u64>) -> Self {
        Self::detached(setup, device, What::DetachAhead)
    }

    fn detached(mut setup: NativeSetup, device: Option<u64>, what: What) -> Self {
        let mut base = base();
        base[20 * BLOCK..30 * BLOCK].fill(0);
        base[33 * BLOCK..34 * BLOCK].fill(0);
        setup = setup.over(base, 16 << 10);
        Self::made(setup, device, what, async |work| {
            work.write(&[0, 17, 21, 22, 140], 1).await;
            work.zero(&[1, 17, 30, 31, 32]).await;
            work.fill().await;
            work.zero(&[2, 16, 22]).await;
            work.litter(&[20, 25, 30]).await;
        })
    }

    pub(crate) fn is_on_device(&self) -> bool {
        self.device.is_some()
    }

    /// Whether the image opens, and is closed again.
    pub(crate) async fn opens(&self, image: &SharedStorage) -> std::result::Result<(), String> {
        let disk = self.open(image).await?;
        which(&*disk, self.allowed(false)).await?;
        disk.close().await.map_err(|error| format!("it cannot be closed: {}", error.chain()))
    }

    /// What the disk may be.
    fn allowed(&self, is_done: bool) -> impl Iterator<Item = &Model> + Clone {
        [&self.before, &self.after].into_iter().skip(usize::from(is_done))
    }

    async fn open(&self, image: &SharedStorage) -> std::result::Result<Arc<Native>, String> {
        let text = |error: Error| format!("it cannot be opened: {}", error.chain());
        let has_base = Superblocks::read(&**image).await.map_err(text)?.superblock.base().is_some();
        let below = self.setup.below().filter(|_| has_base);
        Native::open(image.clone(), below, options()).await.map_err(text)
    }

    pub(crate) async fn perform(&self, image: &SharedStorage) -> Result<()> {
        match self.what {
            What::Revert(name) => revert(image.clone(), self.setup.below(), options(), name).await,
            What::Resize(size) => resize(image, size, true).await.map(drop),
            What::Detach => FormatKind::Native.format().detach(image, false, &AtomicBool::new(false)).await,
            What::DetachAhead => {
                let format = FormatKind::Native.format();
                let (stop, head) = (AtomicBool::new(false), format.read(&**image).await?);
                if head.backing().is_none() {
                    return format.detach(image, false, &stop).await;
                }
                let disk = Native::open(image.clone(), self.setup.below(), options()).await?;
                assert!(!disk.is_prepared());
                let prepared = disk.prepare(disk.mark(), &|| false).await;
                let is_prepared = disk.is_prepared();
                disk.close().await?;
                prepared?;
                assert!(is_prepared);
                format.detach(image, true, &stop).await
            }
            What::Delete(name) => {
                let disk = Native::open(image.clone(), self.setup.below(), options()).await?;
                let deleted = disk.snapshot_delete(name).await;
                disk.close().await?;
                match deleted {
                    // Begun and ended by an opening.
                    Err(error) if error.kind() == vellum_core::ErrorKind::NotFound => Ok(()),
                    result => result,
                }
            }
        }
    }

    /// Opens the image, which is one of these, writes to it, and looks at all there is.
    pub(crate) async fn look(
        &self,
        image: &SharedStorage,
        allowed: impl Iterator<Item = &Model> + Clone,
    ) -> std::result::Result<(), String> {
        let disk = self.open(image).await?;
        let mut model = which(&*disk, allowed).await?.clone();
        // It goes on working, and what is written now harms nothing.
        let last = (model.size - 1) / BLOCK as u64;
        for block in [0, 17, 5, last] {
            let written = model.write(&*disk, block, 7).await;
            match written {
                Err(error) if error.kind() == vellum_core::ErrorKind::NoSpace && self.device.is_some() => {}
                written => {
                    written.map_err(|error| format!("{block} cannot be written: {}", error.chain()))?
                }
            }
        }
        which(&*disk, [&model].into_iter()).await.map_err(|what| format!("after writes: {what}"))?;
        disk.close().await.map_err(|error| format!("it cannot be closed: {}", error.chain()))?;
        let (report, lines) = look_native(image).await.map_err(|error| error.chain())?;
        if !report.is_clean() {
            return Err(format!("the check says: {}", lines.join("; ")));
        }
        let listed = snapshots(image).await.map_err(|error| error.chain())?;
        for (name, model) in &self.taken {
            if !listed.iter().any(|snapshot| snapshot.name == *name) {
                return Err(format!("snapshot {name} is lost"));
            }
            let options = OpenOptions { snapshot: Some((*name).to_owned()), ..options() };
            let disk = Native::open(image.clone(), self.setup.below(), options).await;
            let disk = disk.map_err(|error| format!("snapshot {name}: {}", error.chain()))?;
            which(&*disk, [model].into_iter()).await.map_err(|what| format!("snapshot {name}: {what}"))?;
        }
        Ok(())
    }
}

impl Offline for Change {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn image(&self) -> Content {
        self.image.clone()
    }

    fn change(&self, image: SharedStorage) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move { self.perform(&medium_of(self.device, image)).await })
    }

    /// Opened; the same thing once more; made larger; recovered and repaired, then opened; recovered and finished, then opened
    /// read-only; reverted to something else, where there is something.
    fn ways(&self) -> usize {
        if self.taken.is_empty() { 5 } else { 6 }
    }

    fn go_on(&self, image: SharedStorage, way: usize) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let image = medium_of(self.device, image);
            match way {
                0 => Ok(()),
                1 => self.perform(&image).await,
                2 => resize(&image, self.larger(), false).await.map(drop),
                3 => match recover(&image).await {
                    Ok(_) => check(&image, Repair::All, &mut |_| {}).await.map(drop),
                    Err(error) => Err(error),
                },
                4 => {
                    recover(&image).await?;
                    let format = FormatKind::Native.format();
                    format.finish_interrupted(&image).await?;
                    assert!(format.finish_interrupted(&image).await?.is_empty(), "it is finished");
                    let below = self.setup.below();
                    let has_base = Superblocks::read(&*image).await?.superblock.base().is_some();
                    let options = OpenOptions { read_only: true, ..options() };
                    Native::open(image, below.filter(|_| has_base), options).await?.close().await
                }
                _ => revert(image, self.setup.below(), options(), self.taken[0].0).await,
            }
        })
    }

    fn judge(
        &self,
        image: SharedStorage,
        way: Option<usize>,
        is_done: bool,
    ) -> LocalFuture<'_, std::result::Result<(), String>> {
        Box::pin(async move {
            let image = medium_of(self.device, image);
            let larger: Vec<Model> =
                self.allowed(is_done).map(|model| model.resized(self.larger())).collect();
            let reverted = self.taken.first().map(|(_, model)| model);
            match way {
                None => self.look(&image, self.allowed(is_done).chain(&larger).chain(reverted)).await,
                Some(0 | 3 | 4) => self.look(&image, self.allowed(is_done)).await,
                Some(1) => self.look(&image, self.allowed(true)).await,
                Some(2) => self.look(&image, larger.iter()).await,
                Some(_) => self.look(&image, reverted.into_iter()).await,
            }?;
            if matches!(self.what, What::Detach) && (is_done || way == Some(1)) {
                let base = Superblocks::read(&*image).await.map_err(|error| error.chain())?.superblock;
                base.base().map_or(Ok(()), |base| Err(format!("it still has its base {}", base.name)))?;
            }
            Ok(())
        })
    }
}

/// Every crash, thinned out: all of it is for the long tests.
pub(crate) fn care() -> Care {
    let depth = Depth { subsets_of: 6, sampled: 6, tears_each: 2 };
    Care { depth, one_in: 1, nested_one_in: (24 / scale()).max(1) }
}

pub(crate) fn table() -> NativeSetup {
    NativeSetup::table("table", SMALL, 64 << 10)
}

pub(crate) fn zoned() -> NativeSetup {
    NativeSetup::zoned("zoned", SMALL, 64 << 10, 256 << 10)
}

pub(crate) fn of_size(mut setup: NativeSetup, size: u64) -> NativeSetup {
    setup.options.size = size;
    setup
}

/// Over a base; part of it lies behind what a smaller disk has.
pub(crate) fn over_a_base(mut setup: NativeSetup) -> NativeSetup {
    setup.name = match setup.name {
        "zoned" => "zoned over a base",
        "linear" => "linear over a base",
        _ => "table over a base",
    };
    setup.over(base(), 16 << 10)
}
