//! qcow2's implementation of the interface that all formats have (`image.rs`).

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use vellum_core::pin::Pin;
use vellum_core::{BlockSize, Context, Error, ImageOffset, LocalFuture, Result, SharedStorage, Storage};
use vellum_luks::SectorCipher;

use super::amend::amend;
use super::bitmaps::track::Tracking;
use super::bitmaps::{self, Bitmap, Bits};
use super::check::{check, recover};
use super::detach::detach;
use super::header::{Compression, Encryption, Header, VERSIONS};
use super::journal_setting::{
    has_place_for_session, no_room_for_session, set_backing, set_handover, set_journal, set_pin, set_session,
};
use super::layout::{JOURNAL_BYTES_DEFAULT, METADATA_PAGE, autoclear};
use super::open::OpenOptions;
use super::views::Viewed;
use super::{Qcow2, encrypted, resize, snapshot, snapshots};
use crate::closed_bitmaps::{BitmapChange, ClosedBitmaps, OpenBitmaps};
use crate::handover::{Handover, may_change};
use crate::image::{
    Amend, ClosedSnapshots, Compressing, Fact, Files, Format, Growth, Head, Machine, NewBacking,
    OpenOptions as Options, Opened, Snapshot, SnapshotSupport, Views, Wanted, ZeroPlaces,
};
use crate::luks::{self, KeyArea};
use crate::prealloc::Prealloc;
use crate::probe::FormatKind;
use crate::report::{CheckReport, JournalChange, Recovery, Repair};
use crate::session::{Session, Sessions, may_use};
use crate::wish::Wish;

/// qcow2, as one of the formats.
pub(crate) struct Qcow2Format;

impl Format for Qcow2Format {
    fn kind(&self) -> FormatKind {
        FormatKind::Qcow2
    }

    fn versions(&self) -> &'static [u32] {
        &VERSIONS
    }

    fn snapshot_support(&self) -> SnapshotSupport {
        SnapshotSupport::Kept
    }

    fn read<'a>(&'a self, image: &'a dyn Storage) -> LocalFuture<'a, Result<Box<dyn Head>>> {
        Box::pin(async move { Ok(Box::new(Header::read(image).await?) as Box<dyn Head>) })
    }

    fn recover<'a>(&'a self, image: &'a SharedStorage) -> LocalFuture<'a, Result<Recovery>> {
        Box::pin(async move {
            changeable(image).await?;
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
            let header = match repair {
                Repair::All => Header::read_to_mend(&**image).await?,
                _ => Header::read(&**image).await?,
            };
            if repair != Repair::Nothing {
                may_change(image.name(), header.handover())?;
                may_use(image.name(), header.session(), None)?;
                void_session(header.clone(), image).await?;
            }
            check(&header, image, repair, say).await.map(Some)
        })
    }

    fn finish<'a>(&'a self, image: &'a SharedStorage) -> LocalFuture<'a, Result<u64>> {
        Box::pin(async move {
            let header = Header::read(&**image).await?;
            may_use(image.name(), header.session(), None)?;
            Ok(header.size())
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
            let before = Header::read(&**image).await?.size();
            match size < before {
                true if may_shrink => resize::shrink(image, size).await.map(drop),
                true => Err(Error::invalid(format!(
                    "the disk has {before} bytes, and data beyond {size} would be lost: use --shrink"
                ))),
                false => resize::grow(image, size).await.map(drop),
            }
        })
    }

    fn grow_with<'a>(
        &'a self,
        image: &'a SharedStorage,
        size: u64,
        growth: &'a Growth,
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            changeable(image).await?;
            resize::grow_with(image, size, growth).await.map(drop)
        })
    }

    fn hides_below<'a>(&'a self, image: &'a dyn Storage) -> LocalFuture<'a, Result<Option<BlockSize>>> {
        Box::pin(async move { Ok(Some(Header::read(image).await?.cluster_size())) })
    }

    fn amend<'a>(&'a self, image: &'a SharedStorage, wish: &'a Amend) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            changeable(image).await?;
            amend(image, wish).await
        })
    }

    fn closed_snapshots(&self) -> Option<&'static dyn ClosedSnapshots> {
        Some(&Qcow2Format)
    }

    fn closed_bitmaps(&self) -> Option<&'static dyn ClosedBitmaps> {
        Some(&Qcow2Format)
    }

    fn revert<'a>(&'a self, image: &'a SharedStorage, wanted: &'a str) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            changeable(image).await?;
            snapshots::revert(image, Wanted::IdOrName(wanted)).await
        })
    }

    fn detach<'a>(
        &'a self,
        image: &'a SharedStorage,
        _is_prepared: bool,
        _stop: &'a AtomicBool,
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            changeable(image).await?;
            detach(image).await
        })
    }

    fn set_backing<'a>(
        &'a self,
        image: &'a SharedStorage,
        backing: NewBacking<'a>,
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            changeable(image).await?;
            set_backing(image, backing).await
        })
    }

    fn set_handover<'a>(
        &'a self,
        image: &'a SharedStorage,
        handover: Option<Handover>,
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            may_use(image.name(), Header::read(&**image).await?.session(), None)?;
            set_handover(image, handover).await
        })
    }

    fn set_pin<'a>(&'a self, image: &'a SharedStorage, pin: &'a Pin) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            may_change(image.name(), Header::read(&**image).await?.handover())?;
            set_pin(image, pin).await
        })
    }

    fn forget_session<'a>(&'a self, image: &'a SharedStorage) -> LocalFuture<'a, Result<Option<Session>>> {
        Box::pin(async move {
            let context = || format!("can't take the session with a flash cache out of {}", image.name());
            let header = Header::read(&**image).await.context(context)?;
            match set_session(&header, &**image, None).await.context(context)? {
                Some(_) => Ok(header.session()),
                None => Err(no_room_for_session()).context(context),
            }
        })
    }

    fn set_journal<'a>(
        &'a self,
        image: &'a SharedStorage,
        _name: &'a str,
        setting: Option<Option<u64>>,
    ) -> LocalFuture<'a, Result<JournalChange>> {
        Box::pin(async move {
            changeable(image).await?;
            let wanted = match setting {
                Some(None) => {
                    Some(Header::read(&**image).await?.journal_bytes().unwrap_or(JOURNAL_BYTES_DEFAULT))
                }
                Some(bytes) => bytes,
                None => None,
            };
            set_journal(image, wanted).await
        })
    }
}

impl ClosedSnapshots for Qcow2Format {
    fn create<'a>(
        &'a self,
        image: &'a SharedStorage,
        name: &'a str,
        now: Duration,
        may_repeat: bool,
    ) -> LocalFuture<'a, Result<String>> {
        Box::pin(async move {
            changeable(image).await?;
            snapshots::create(image, name, now, may_repeat).await
        })
    }

    fn delete<'a>(&'a self, image: &'a SharedStorage, wanted: Wanted<'a>) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            changeable(image).await?;
            snapshots::delete(image, wanted).await
        })
    }

    fn rename<'a>(
        &'a self,
        image: &'a SharedStorage,
        wanted: Wanted<'a>,
        name: &'a str,
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            changeable(image).await?;
            snapshots::rename(image, wanted, name).await
        })
    }
}

impl ClosedBitmaps for Qcow2Format {
    fn list<'a>(&'a self, image: &'a dyn Storage) -> LocalFuture<'a, Result<Vec<Bitmap>>> {
        Box::pin(async move { bitmaps::list(&Header::read(image).await?, image).await })
    }

    fn load<'a>(&'a self, image: &'a dyn Storage, name: &'a str) -> LocalFuture<'a, Result<Bits>> {
        Box::pin(async move { bitmaps::load(&Header::read(image).await?, image, name).await })
    }

    fn change<'a>(
        &'a self,
        image: &'a SharedStorage,
        name: &'a str,
        changes: &'a [BitmapChange],
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            changeable(image).await?;
            bitmaps::change(image, name, changes).await
        })
    }
}

/// Checks that neither a migration nor a flash cache keeps the image from being changed.
async fn changeable(image: &SharedStorage) -> Result<()> {
    let header = Header::read(&**image).await?;
    may_change(image.name(), header.handover())?;
    may_use(image.name(), header.session(), None)
}

/// Makes the session of a closed image void, durably, before the disk may change.
async fn void_session(mut header: Header, image: &SharedStorage) -> Result<()> {
    if header.session().is_some_and(|session| session.counts()) {
        header.set_features(header.incompatible, header.autoclear & !autoclear::SESSION);
        image.write(ImageOffset::ZERO, header.first_sector()).await?;
        image.flush().await?;
    }
    Ok(())
}

impl Head for Header {
    fn kind(&self) -> FormatKind {
        FormatKind::Qcow2
    }

    fn size(&self) -> u64 {
        Self::size(self)
    }

    fn wish(&self) -> Wish {
        Self::wish(self)
    }

    fn backing(&self) -> Option<(&str, Option<&str>)> {
        self.backing_file().map(|name| (name, Self::backing_format(self)))
    }

    fn pin(&self) -> Option<&Pin> {
        Self::pin(self)
    }

    fn handover(&self) -> Option<Handover> {
        Self::handover(self)
    }

    fn session(&self) -> Option<Session> {
        Self::session(self)
    }

    fn has_place_for_session(&self) -> Result<()> {
        has_place_for_session(self)
    }

    fn data_file(&self) -> Option<&str> {
        Self::data_file(self).filter(|_| self.has_data_file())
    }

    fn was_left_open(&self) -> bool {
        self.is_dirty() || Self::needs_replay(self)
    }

    fn needs_replay(&self) -> bool {
        Self::needs_replay(self)
    }

    fn may_be_miscounted(&self, is_replayed: bool) -> bool {
        // After a replay the tables are as they were flushed. Version 2 has no dirty bit, so every image may
        // have been left open.
        !is_replayed || self.is_dirty() || self.is_corrupt()
    }

    fn shows_all_below(&self) -> bool {
        true
    }

    fn cluster_size(&self) -> Option<u64> {
        Some(Self::cluster_size(self).bytes())
    }

    fn is_encrypted(&self) -> bool {
        self.encryption().is_some()
    }

    fn key_area(&self) -> Option<KeyArea> {
        Self::key_area(self).map(|span| KeyArea { span })
    }

    /// At most one page for each cluster that is held.
    fn mapping_bytes(&self, held: Option<u64>) -> u64 {
        let cluster = Self::cluster_size(self);
        let entry = if self.has_subclusters() { 16 } else { 8 };
        let all = cluster.count_for(Self::size(self)).saturating_mul(entry);
        match held {
            Some(bytes) if !self.has_data_file() => {
                all.min(cluster.count_for(bytes).saturating_mul(METADATA_PAGE.min(cluster).bytes()))
            }
            _ => all,
        }
    }

    fn open<'a>(&'a self, files: Files, options: Options) -> LocalFuture<'a, Result<Opened>> {
        Box::pin(async move {
            let is_snapshot = options.snapshot.is_some();
            let may_write_nothing = options.read_only || is_snapshot;
            let cipher = encrypted::unlock(self, &files.image, &options).await?;
            let disk = Qcow2::open(self.clone(), files, with_cipher(options, cipher)).await?;
            let sessions = disk.is_tied().then(|| disk.clone() as Arc<dyn Sessions>);
            let compressing = (!may_write_nothing).then(|| disk.clone() as Arc<dyn Compressing>);
            let bitmaps = self.bitmaps().map(|_| disk.clone() as Arc<dyn OpenBitmaps>);
            let viewed = if is_snapshot { None } else { Viewed::of(&disk, self).await };
            let views = viewed.map(|viewed| Arc::new(viewed) as Arc<dyn Views>);
            let zeros = self.encryption().is_none().then(|| disk.clone() as Arc<dyn ZeroPlaces>);
            let (snapshots, detaching, tier) = (None, None, None);
            Ok(Opened { disk, snapshots, compressing, detaching, sessions, bitmaps, views, tier, zeros })
        })
    }

    fn snapshots<'a>(
        &'a self,
        image: &'a SharedStorage,
        _replayed: Option<&'a SharedStorage>,
    ) -> LocalFuture<'a, Result<Vec<Snapshot>>> {
        Box::pin(async move {
            let all = snapshot::list(self, &**image).await?;
            Ok(all.into_iter().map(Snapshot::from).collect())
        })
    }

    fn facts<'a>(&'a self, image: &'a dyn Storage) -> LocalFuture<'a, Result<Vec<(&'static str, Fact)>>> {
        Box::pin(async move {
            let bitmaps = bitmaps::list(self, image).await?;
            let mut facts = facts(self, luks_facts(self, image).await?);
            if !bitmaps.is_empty() {
                facts.push(("bitmaps", Fact::List(bitmaps.into_iter().map(Fact::from).collect())));
            }
            Ok(facts)
        })
    }

    fn losses<'a>(&'a self, image: &'a dyn Storage, name: &'a str) -> LocalFuture<'a, Vec<String>> {
        Box::pin(async move {
            let mut lines = Vec::new();
            let tracking = Tracking::load(self, image).await;
            if let Some(why) = tracking.as_ref().ok().and_then(Tracking::unusable) {
                lines.push(format!(
                    "{name} has persistent bitmaps that cannot be kept up, and the first write makes all of them invalid \
                     ({why}): a backup that relies on them must start over, and `vellum check -r leaks` frees their space \
                     (serve it with --read-only to keep them)"
                ));
            }
            for bitmap in bitmaps::list(self, image).await.unwrap_or_default() {
                if bitmap.is_in_use {
                    lines.push(format!(
                        "bitmap {} of {name} is inconsistent, because a program that changed the disk has not saved it: a \
                         backup that relies on it must start over",
                        bitmap.name
                    ));
                }
            }
            if self.has_misplaced_journal() {
                let is_back = Self::read(image).await.is_ok_and(|header| !header.has_misplaced_journal());
                lines.push(match is_back {
                    true => format!(
                        "another program rewrote the header of {name} and moved its journal's entry, which has been \
                         put back"
                    ),
                    false => format!(
                        "{name} is written without its journal: another program has moved the journal's entry, and \
                         the header has no room to put it back"
                    ),
                });
            }
            lines
        })
    }
}

fn with_cipher(options: Options, cipher: Option<Arc<SectorCipher>>) -> OpenOptions {
    OpenOptions {
        read_only: options.read_only,
        snapshot: options.snapshot,
        mapping_bytes_max: options.mapping_bytes_max,
        offload: options.offload,
        tally: options.tally,
        journal_key: None,
        prealloc: options.prealloc,
        clock: options.clock,
        flash: options.flash,
        fills: options.fills,
        tables: options.tables,
        growth: options.growth,
        cipher,
    }
}

/// The facts from the LUKS header, if there is one.
async fn luks_facts(header: &Header, image: &dyn Storage) -> Result<Vec<(&'static str, Fact)>> {
    match Head::key_area(header) {
        Some(area) => Ok(luks::facts(&area.header(image).await?)),
        None => Ok(Vec::new()),
    }
}

/// The properties that only qcow2 has, under the names that QEMU uses.
fn facts(header: &Header, luks: Vec<(&'static str, Fact)>) -> Vec<(&'static str, Fact)> {
    let is_new = header.version() >= 3;
    let is_zstd = header.compression() == Compression::Zstd;
    let mut facts: Vec<(&'static str, Fact)> = vec![
        ("compat", if is_new { "1.1" } else { "0.10" }.into()),
        ("compression-type", if is_zstd { "zstd" } else { "zlib" }.into()),
    ];
    if is_new {
        facts.push(("lazy-refcounts", header.has_lazy_refcounts().into()));
        facts.extend(header.wish().facts());
    }
    facts.push(("refcount-bits", u64::from(header.refcount_bits()).into()));
    if let Some(name) = Head::data_file(header) {
        facts.push(("data-file", name.into()));
        facts.push(("data-file-raw", header.data_file_is_raw().into()));
    }
    if is_new {
        facts.push(("corrupt", header.is_corrupt().into()));
        facts.push(("extended-l2", header.has_subclusters().into()));
    }
    if let Some(encryption) = header.encryption() {
        let format = match encryption {
            Encryption::Aes => "aes",
            Encryption::Luks => "luks",
        };
        let mut group = vec![("format", format.into())];
        group.extend(luks);
        facts.push(("encrypt", Fact::Group(group)));
    }
    if let Some(bytes) = header.journal_bytes() {
        let mut journal = vec![("size", bytes.into()), ("needs-recovery", header.needs_replay().into())];
        if header.prealloc() != Prealloc::Auto {
            journal.push(("prealloc", header.prealloc().to_string().into()));
        }
        facts.push(("journal", Fact::Group(journal)));
    } else if header.has_misplaced_journal() {
        let journal =
            vec![("size", 0u64.into()), ("needs-recovery", false.into()), ("misplaced", true.into())];
        facts.push(("journal", Fact::Group(journal)));
    }
    facts.extend(header.handover().map(|handover| ("migration", handover.into())));
    facts.extend(header.session().map(|session| ("flash", session.into())));
    facts
}

impl From<Bitmap> for Fact {
    fn from(bitmap: Bitmap) -> Self {
        let flags = [("in-use", bitmap.is_in_use), ("auto", bitmap.is_auto)];
        let flags = flags.into_iter().filter(|(_, is_set)| *is_set).map(|(name, _)| name.into());
        Self::Group(vec![
            ("name", bitmap.name.into()),
            ("granularity", bitmap.granularity.into()),
            ("flags", Self::List(flags.collect())),
        ])
    }
}

impl From<snapshot::Snapshot> for Snapshot {
    fn from(one: snapshot::Snapshot) -> Self {
        Self {
            id: one.id,
            name: one.name,
            size: one.disk_size,
            seconds: u64::from(one.date_seconds),
            machine: Some(Machine {
                state_bytes: one.vm_state_size,
                nanoseconds: one.date_nanoseconds,
                clock_nanoseconds: one.vm_clock_nanoseconds,
                icount: one.icount,
            }),
            is_cloned: false,
        }
    }
}
