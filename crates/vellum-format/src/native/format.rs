//! The native format behind the interface that all formats have (`image.rs`).

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use vellum_core::pin::Pin;
use vellum_core::{
    BlockSize, Context, Disk, Error, ErrorKind, LocalFuture, Result, SharedDisk, SharedStorage, Storage,
};

use super::attach_fast::{attach_fast, detach_fast};
use super::check::check;
use super::detach::detach;
use super::geometry::Region;
use super::image::Native;
use super::open::{OpenOptions, finish, finish_interrupted};
use super::recover::recover;
use super::session::put_session;
use super::snapshots::still::is_half_reverted;
use super::superblock::{Base, Superblocks, VERSION};
use super::unfinished::Found;
use super::{resize, snapshots};
use crate::fast::{FastId, NamedFast, Tiers};
use crate::handover::{Handover, may_change};
use crate::image::{
    Fact, Files, Format, Head, NewBacking, OpenOptions as Options, Opened, Snapshot, SnapshotSupport,
    Snapshots, ready,
};
use crate::luks::{self, KeyArea, Unlock};
use crate::probe::FormatKind;
use crate::report::{CheckReport, JournalChange, Recovery, Repair};
use crate::session::{Session, Sessions, may_use};
use crate::wish::Wish;

/// The native format, as one of the formats.
pub(crate) struct NativeFormat;

/// Options that neither read nor write the guest's data.
fn alone() -> OpenOptions {
    OpenOptions { without_base: true, without_key: true, ..OpenOptions::default() }
}

fn opened(native: Arc<Native>) -> Opened {
    let sessions = native.is_tied().then(|| native.clone() as Arc<dyn Sessions>);
    let tier = native.has_fast().then(|| native.clone() as Arc<dyn Tiers>);
    Opened {
        disk: native.clone(),
        snapshots: Some(native.clone()),
        compressing: None,
        detaching: Some(native),
        sessions,
        bitmaps: None,
        views: None,
        tier,
        zeros: None,
    }
}

impl Format for NativeFormat {
    fn kind(&self) -> FormatKind {
        FormatKind::Native
    }

    fn versions(&self) -> &'static [u32] {
        &[VERSION]
    }

    fn snapshot_support(&self) -> SnapshotSupport {
        SnapshotSupport::Kept
    }

    fn read<'a>(&'a self, image: &'a dyn Storage) -> LocalFuture<'a, Result<Box<dyn Head>>> {
        Box::pin(async move { Ok(Box::new(Superblocks::read(image).await?) as Box<dyn Head>) })
    }

    fn recover<'a>(&'a self, image: &'a SharedStorage) -> LocalFuture<'a, Result<Recovery>> {
        Box::pin(async move {
            may_change_at_all(image).await?;
            recover(image).await
        })
    }

    fn replay<'a>(&'a self, image: &'a SharedStorage) -> LocalFuture<'a, Result<Recovery>> {
        Box::pin(recover(image))
    }

    fn check<'a>(
        &'a self,
        image: &'a SharedStorage,
        repair: Repair,
        say: &'a mut dyn FnMut(String),
    ) -> LocalFuture<'a, Result<Option<CheckReport>>> {
        Box::pin(async move {
            if repair == Repair::Nothing {
                let mut report = check(image, repair, say).await?;
                if interrupted_revert(image).await.unwrap_or_default() {
                    report.corruptions += 1;
                    say("ERROR a revert to a snapshot was interrupted: `vellum recover` finishes it"
                        .to_owned());
                }
                return Ok(Some(report));
            }
            changeable(image).await?;
            let finished = match Superblocks::read(&**image).await?.superblock.needs_replay() {
                true => Vec::new(), // `check` refuses it
                false => finish_what_is_sound(image, say).await?,
            };
            let mut report = check(image, repair, say).await?;
            report.corruptions_fixed += u64::from(finished.contains(&Found::RevertMark));
            Ok(Some(report))
        })
    }

    fn finish_interrupted<'a>(
        &'a self,
        image: &'a SharedStorage,
    ) -> LocalFuture<'a, Result<Vec<&'static str>>> {
        Box::pin(async move {
            let superblock = Superblocks::read(&**image).await?.superblock;
            if may_change(image.name(), superblock.handover).is_err() {
                return Ok(Vec::new()); // it is the other host's
            }
            if superblock.may_do_without_fast().is_err() && !interrupted_revert(image).await? {
                return Ok(Vec::new());
            }
            changeable(image).await?;
            Ok(finish_interrupted(image).await?.into_iter().map(Found::change).collect())
        })
    }

    fn finish<'a>(&'a self, image: &'a SharedStorage) -> LocalFuture<'a, Result<u64>> {
        Box::pin(async move {
            changeable(image).await?;
            finish(image).await
        })
    }

    fn resize<'a>(
        &'a self,
        image: &'a SharedStorage,
        size: u64,
        may_shrink: bool,
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            changeable(image).await?;
            resize::resize(image, size, may_shrink).await.map(drop)
        })
    }

    fn open_alone<'a>(
        &'a self,
        image: &'a SharedStorage,
    ) -> LocalFuture<'a, Result<(SharedDisk, Arc<dyn Snapshots>)>> {
        Box::pin(async move {
            let native = Native::open(image.clone(), None, alone()).await?;
            Ok((native.clone() as SharedDisk, native as Arc<dyn Snapshots>))
        })
    }

    fn revert<'a>(&'a self, image: &'a SharedStorage, wanted: &'a str) -> LocalFuture<'a, Result<()>> {
        Box::pin(snapshots::revert(image.clone(), None, alone(), wanted))
    }

    fn detach<'a>(
        &'a self,
        image: &'a SharedStorage,
        is_prepared: bool,
        stop: &'a AtomicBool,
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            changeable(image).await?;
            detach(image, is_prepared, stop).await
        })
    }

    fn set_backing<'a>(
        &'a self,
        image: &'a SharedStorage,
        backing: NewBacking<'a>,
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            changeable(image).await?;
            let context = || format!("can't give {} the backing image {}", image.name(), backing.name);
            set_backing(image, backing).await.context(context)
        })
    }

    fn set_handover<'a>(
        &'a self,
        image: &'a SharedStorage,
        handover: Option<Handover>,
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            may_use(image.name(), Superblocks::read(&**image).await?.superblock.session(), None)?;
            set_handover(image, handover).await
        })
    }

    fn set_pin<'a>(&'a self, image: &'a SharedStorage, pin: &'a Pin) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            may_change(image.name(), Superblocks::read(&**image).await?.superblock.handover)?;
            set_pin(image, pin).await
        })
    }

    fn forget_session<'a>(&'a self, image: &'a SharedStorage) -> LocalFuture<'a, Result<Option<Session>>> {
        Box::pin(async move {
            let context = || format!("can't take the session with a flash cache out of {}", image.name());
            let mut superblocks = Superblocks::read(&**image).await.context(context)?;
            let before = superblocks.superblock.session();
            put_session(&mut superblocks, &**image, None).await.context(context)?;
            Ok(before)
        })
    }

    fn attach_fast<'a>(
        &'a self,
        image: &'a SharedStorage,
        id: FastId,
        name: &'a str,
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            may_change_at_all(image).await?;
            attach_fast(image, id, name).await
        })
    }

    fn detach_fast<'a>(&'a self, image: &'a SharedStorage) -> LocalFuture<'a, Result<bool>> {
        Box::pin(async move {
            changeable(image).await?;
            detach_fast(image).await
        })
    }

    fn set_journal<'a>(
        &'a self,
        _image: &'a SharedStorage,
        name: &'a str,
        _wish: Option<Option<u64>>,
    ) -> LocalFuture<'a, Result<JournalChange>> {
        ready(Err(Error::unsupported(format!(
            "{name} is a vellum image: it has a journal whenever it needs one, of the size it was created with"
        ))))
    }
}

/// The regions of an image over a base are as large as the base: another one has its size.
async fn set_backing(image: &SharedStorage, backing: NewBacking<'_>) -> Result<()> {
    // Opening it finishes an interrupted change.
    let native = Native::open(image.clone(), None, alone()).await?;
    let shape = native.places.shape();
    let has_snapshots = shape.layout.has_table() && !native.snapshots()?.is_empty();
    let base_bytes = shape.base_bytes;
    native.close().await?;
    let Some(base_bytes) = base_bytes else {
        return Err(Error::unsupported(
            "a vellum image that was made without a backing image gets none: make a clone with `vellum create -b`",
        ));
    };
    if has_snapshots {
        return Err(Error::unsupported(
            "the image has snapshots, which also read from the backing image: delete them first",
        ));
    }
    if backing.size.is_some_and(|size| size != base_bytes) {
        return Err(Error::unsupported(format!(
            "the backing image of a vellum image is replaced by one of the same size, {base_bytes} bytes: make the image \
             independent with `vellum flatten`, or copy it with `vellum convert`"
        )));
    }
    let mut superblocks = Superblocks::read(&**image).await?;
    let base = Base { name: backing.name.to_owned(), format: backing.format.map(str::to_owned) };
    superblocks.superblock.set_base(base, backing.pin.cloned())?;
    superblocks.superblock.draw_generation(None);
    superblocks.write(&**image).await?;
    image.flush().await?; // commit point
    // The other copy: a damaged one is not replaced by one that names the old base.
    superblocks.write(&**image).await?;
    image.flush().await
}

async fn set_pin(image: &SharedStorage, pin: &Pin) -> Result<()> {
    let context = || format!("can't record in {} what proves its backing image", image.name());
    let mut superblocks = Superblocks::read(&**image).await.context(context)?;
    if superblocks.superblock.base().is_none() {
        return Err(Error::unsupported(format!("{} has no backing image", image.name())));
    }
    superblocks.superblock.set_pin(pin.clone());
    superblocks.write(&**image).await.context(context)?;
    image.flush().await.context(context) // commit point
}

/// Whether the disk is being reverted to a snapshot, which an opening for writing would finish.
async fn interrupted_revert(image: &SharedStorage) -> Result<bool> {
    is_half_reverted(image, &Superblocks::read(&**image).await?.superblock).await
}

/// As [`finish_interrupted`], before a repair: an image that cannot be opened is left for it.
async fn finish_what_is_sound(image: &SharedStorage, say: &mut dyn FnMut(String)) -> Result<Vec<Found>> {
    let finished = match finish_interrupted(image).await {
        Err(error) if error.kind() == ErrorKind::Corrupt => Vec::new(),
        finished => finished?,
    };
    finished.iter().for_each(|found| say(format!("{} was interrupted, and is finished now", found.change())));
    Ok(finished)
}

/// Checks that neither a migration nor a flash cache keeps the image from being changed.
async fn changeable(image: &SharedStorage) -> Result<()> {
    may_change_at_all(image).await?;
    let superblock = Superblocks::read(&**image).await?.superblock;
    superblock.may_do_without_fast().context(|| format!("{} can't be changed alone", image.name()))
}

/// As above, also where units are on the fast medium alone.
async fn may_change_at_all(image: &SharedStorage) -> Result<()> {
    let superblock = Superblocks::read(&**image).await?.superblock;
    may_change(image.name(), superblock.handover)?;
    may_use(image.name(), superblock.session(), None)
}

/// Both copies get it: an older copy would say that the image may be written, if the newer one were ever damaged.
async fn set_handover(image: &SharedStorage, handover: Option<Handover>) -> Result<()> {
    let context = || format!("can't record in {} that its disk migrates", image.name());
    let mut superblocks = Superblocks::read(&**image).await.context(context)?;
    if superblocks.superblock.needs_replay() {
        return Err(superblocks.superblock.replay_first(image.name())).context(context);
    }
    superblocks.superblock.handover = handover;
    for _ in 0..2 {
        superblocks.write(&**image).await.context(context)?;
        image.flush().await.context(context)?; // commit point, the first time
    }
    Ok(())
}

impl Head for Superblocks {
    fn kind(&self) -> FormatKind {
        FormatKind::Native
    }

    fn size(&self) -> u64 {
        self.superblock.size()
    }

    /// The mark goes with the journal, which `linear` without a base does not have.
    fn knows_whether_closed(&self) -> bool {
        !self.superblock.places().region(Region::Journal).is_empty()
    }

    fn backing(&self) -> Option<(&str, Option<&str>)> {
        let base = self.superblock.base()?;
        Some((&base.name, base.format.as_deref()))
    }

    fn pin(&self) -> Option<&Pin> {
        self.superblock.pin()
    }

    fn wish(&self) -> Wish {
        self.superblock.wish
    }

    fn handover(&self) -> Option<Handover> {
        self.superblock.handover
    }

    fn session(&self) -> Option<Session> {
        self.superblock.session()
    }

    fn has_place_for_session(&self) -> Result<()> {
        Ok(())
    }

    fn uuid(&self) -> Option<[u8; 16]> {
        Some(self.superblock.uuid())
    }

    fn fast(&self) -> Option<NamedFast> {
        self.superblock.fast()
    }

    fn was_left_open(&self) -> bool {
        self.superblock.needs_replay()
    }

    fn needs_replay(&self) -> bool {
        self.superblock.needs_replay()
    }

    fn cluster_size(&self) -> Option<u64> {
        self.superblock.places().shape().layout.unit().map(BlockSize::bytes)
    }

    fn is_encrypted(&self) -> bool {
        self.superblock.is_encrypted()
    }

    fn key_area(&self) -> Option<KeyArea> {
        self.superblock.key_area()
    }

    fn open<'a>(&'a self, files: Files, options: Options) -> LocalFuture<'a, Result<Opened>> {
        let area = self.superblock.key_area();
        let secrets = options.secrets;
        let offload = options.offload;
        let options = OpenOptions {
            offload: Some(offload.clone()),
            read_only: options.read_only,
            snapshot: options.snapshot,
            tally: options.tally,
            prealloc: options.prealloc,
            compaction: options.compaction,
            clock: options.clock,
            flash: options.flash,
            fills: options.fills,
            fast: options.fast,
            salvages: options.salvages,
            tables: options.tables,
            without_base: options.without_below,
            ..OpenOptions::default()
        };
        Box::pin(async move {
            let cipher = match area {
                None => None,
                Some(area) => {
                    let unlock = Unlock { secrets: &secrets, may_be_weak: false, offload: &offload };
                    Some(area.unlock(&files.image, &unlock).await?)
                }
            };
            let options = OpenOptions { cipher, ..options };
            Native::open(files.image, files.below, options).await.map(opened)
        })
    }

    fn snapshots<'a>(
        &'a self,
        _image: &'a SharedStorage,
        replayed: Option<&'a SharedStorage>,
    ) -> LocalFuture<'a, Result<Vec<Snapshot>>> {
        Box::pin(async move {
            // While an image is being written, some of its snapshots exist only in the writer's memory.
            let Some(image) = replayed else { return Ok(Vec::new()) };
            Ok(snapshots::snapshots(image).await?.into_iter().map(Snapshot::from).collect())
        })
    }

    fn facts<'a>(&'a self, image: &'a dyn Storage) -> LocalFuture<'a, Result<Vec<(&'static str, Fact)>>> {
        Box::pin(async move {
            let mut facts = facts(self);
            if let Some(area) = self.superblock.key_area() {
                let mut group = vec![("format", "luks".into())];
                group.extend(luks::facts(&area.header(image).await?));
                facts.push(("encrypt", Fact::Group(group)));
            }
            Ok(facts)
        })
    }
}

/// Facts that only images of the native format have.
fn facts(superblocks: &Superblocks) -> Vec<(&'static str, Fact)> {
    let superblock = &superblocks.superblock;
    let places = superblock.places();
    let shape = places.shape();
    let mut facts: Vec<(&'static str, Fact)> = vec![
        ("version", 1u64.into()),
        ("uuid", uuid(superblock.uuid()).into()),
        ("layout", shape.layout.name().into()),
        ("data-offset", places.data_offset().bytes().into()),
    ];
    if let Some(unit) = shape.layout.unit() {
        facts.push(("unit-size", unit.bytes().into()));
        if let Some(zone) = shape.zone() {
            facts.push(("zone-size", zone.bytes().into()));
            facts.push(("embed", superblock.embeds().into()));
        }
        facts.push(("size-max", places.size_limit().into()));
        if places.parts().next().is_some() {
            facts.push(("table-parts", (places.parts().count() as u64).into()));
        }
        facts.push(("snapshots", superblock.has_snapshots().into()));
    }
    if let Some(bytes) = shape.base_bytes {
        facts.push(("block-size", shape.block.bytes().into()));
        facts.push(("base-size", bytes.into()));
        facts.extend(superblock.wish.facts());
    }
    match places.region(Region::Journal).len() {
        0 => {}
        bytes => {
            let journal = vec![("size", bytes.into()), ("needs-recovery", superblock.needs_replay().into())];
            facts.push(("journal", Fact::Group(journal)));
        }
    }
    if superblocks.other_is_bad.is_some() {
        facts.push(("damaged-superblock", superblocks.slot.other().name().into()));
    }
    facts.extend(superblock.handover.map(|handover| ("migration", handover.into())));
    facts.extend(superblock.session().map(|session| ("flash", session.into())));
    facts.extend(superblock.fast().map(|fast| ("fast", fast_facts(fast))));
    facts
}

fn fast_facts(fast: NamedFast) -> Fact {
    let mut facts: Vec<(&'static str, Fact)> =
        vec![("id", fast.id.to_string().into()), ("name", fast.name.into())];
    facts.push(("counts", fast.counts.into()));
    if fast.is_needed {
        facts.push(("is-needed", true.into()));
    }
    Fact::Group(facts)
}

fn uuid(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

impl From<snapshots::Snapshot> for Snapshot {
    fn from(one: snapshots::Snapshot) -> Self {
        Self {
            id: one.id.to_string(),
            name: one.name,
            size: one.size,
            seconds: one.seconds,
            machine: None,
            is_cloned: one.is_cloned,
        }
    }
}

impl Snapshots for Native {
    fn list(&self) -> Result<Vec<Snapshot>> {
        Ok(self.snapshots()?.into_iter().map(Snapshot::from).collect())
    }

    fn create<'a>(&'a self, name: &'a str, now_seconds: u64) -> LocalFuture<'a, Result<u32>> {
        Box::pin(self.snapshot_create(name, now_seconds))
    }

    fn delete<'a>(&'a self, wanted: &'a str) -> LocalFuture<'a, Result<()>> {
        Box::pin(self.snapshot_delete(wanted))
    }

    fn rename<'a>(&'a self, wanted: &'a str, name: &'a str) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move { self.snapshot_rename(wanted, name).await.map(drop) })
    }

    fn mark_cloned<'a>(&'a self, wanted: &'a str) -> LocalFuture<'a, Result<Snapshot>> {
        Box::pin(async move { self.snapshot_mark_cloned(wanted).await.map(Snapshot::from) })
    }

    fn release<'a>(&'a self, wanted: &'a str) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move { self.snapshot_release(wanted).await.map(drop) })
    }

    fn named(&self, name: &str) -> Result<Option<u32>> {
        self.snapshot_named(name)
    }

    fn open(self: Arc<Self>, id: u32) -> Result<SharedDisk> {
        Ok(self.snapshot_open(id)?)
    }

    fn has_open(&self) -> bool {
        self.has_open_snapshots()
    }

    fn stop_deleting(&self) {
        Self::stop_deleting(self);
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use vellum_core::MemoryStorage;

    use super::*;
    use crate::native::{CreateOptions, create};

    /// Where there is no journal there is no mark: such an image is settled like a raw one when it is opened again.
    #[test]
    fn an_image_without_a_journal_does_not_know_whether_it_was_closed() {
        block_on(async {
            for has_table in [false, true] {
                let image = MemoryStorage::new("image");
                let options = CreateOptions { size: 1 << 20, has_table, ..CreateOptions::default() };
                create(&*image, &options).await.unwrap();
                let head = Superblocks::read(&*image).await.unwrap();
                assert_eq!(head.knows_whether_closed(), has_table);
            }
        });
    }
}
