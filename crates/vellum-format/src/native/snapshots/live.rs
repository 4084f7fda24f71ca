//! A snapshot as a read-only disk, beside the disk itself while that is written.
//!
//! ```text
//!   page   a copy along the chain ► where it lies: it stays as long as the snapshot
//!          none ► home's page, as it is in memory: a copy is kept before it changes
//! ```
//!
//! 1. What a snapshot sees of a page never changes, so a page that was looked up once stays in memory.
//! 2. Copies and home are looked at under the lock of the copies, under which a copy is entered before the
//!    page changes.
//! 3. A snapshot that is open is not deleted. So none of the units and copies that it sees becomes free. A
//!    copy of a younger snapshot that is deleted is passed on.
//! 4. A write that was in flight when the snapshot was made may be in it or not. The first read waits for
//!    such writes and makes them durable, so that no reader sees both states.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use vellum_core::{Buffer, Error, ErrorKind, Geometry, ImageOffset, ImageSpan, Result};

use super::super::home_pages::{HomePages, Missing};
use super::super::image::{Live, Native, View};
use super::super::in_use::InUse;
use super::page_of;
use crate::engine::{Commit as _, Engine};
use crate::state::lock;

/// Where a page was found.
enum Found {
    Copy(ImageSpan),
    Home(Vec<u8>),
    /// In home, which must load it first.
    NotInMemory,
    /// Nowhere, so it is zero.
    Zero,
}

impl Native {
    /// The snapshot of this id as a read-only disk of its own, while this disk may be written. The snapshot
    /// cannot be deleted while the returned disk exists.
    ///
    /// # Errors
    /// `NotFound` when there is none, `Closed` when this disk is closed, and as [`Native::snapshots`].
    pub fn snapshot_open(self: &Arc<Self>, id: u32) -> Result<Arc<Self>> {
        self.engine.state.check_open()?;
        let views = self.views()?;
        let list = lock(&views.list);
        let entry = list.get(id).filter(|entry| !entry.is_being_deleted);
        let missing =
            || Error::new(ErrorKind::NotFound, format!("{}: there is no snapshot {id}", self.engine.name));
        let (name, size) = entry.map(|entry| (entry.name.clone(), entry.size)).ok_or_else(missing)?;
        let mut open = lock(&self.open_views);
        if let Some(disk) = open.get(&id).and_then(std::sync::Weak::upgrade) {
            return Ok(disk);
        }
        let places = self.places.resized(size)?;
        let settled = async_lock::OnceCell::new();
        let live = Live { disk: self.clone(), id, is_line: list.is_line(), settled };
        let disk = Arc::new(Self {
            engine: Engine::new(
                format!("{}, snapshot {name}", self.engine.name),
                Geometry { size: places.shape().size, read_only: true, ..self.engine.geometry.clone() },
                None,
            ),
            places,
            superblocks: self.superblocks.clone(),
            metadata: self.metadata.clone(),
            tables: self.tables.clone(),
            checkpoint_storage: self.checkpoint_storage.clone(),
            ahead: self.ahead.clone(),
            data: self.data.clone(),
            encryption: self.encryption.clone(),
            under: self.under.clone(),
            below: self.below.clone(),
            fills: None,
            home: HomePages::new(places.homes()),
            cell: self.cell,
            block_locks: std::array::from_fn(|_| Default::default()),
            units: None,
            views: None,
            open_views: Default::default(),
            zones: None,
            view: Some(View::Live(live)),
            journal: None,
            in_use: InUse::new(false),
            flash: None,
            tier: OnceLock::new(),
            tier_trouble: OnceLock::new(),
            missing: OnceLock::new(),
            filled: Default::default(),
            ready_alone: AtomicU64::new(u64::MAX),
            open_bytes: AtomicU64::new(0),
        });
        open.insert(id, Arc::downgrade(&disk));
        Ok(disk)
    }

    /// The id of the snapshot of this name, if there is one. Cheaper than a list of all snapshots.
    ///
    /// # Errors
    /// As [`Native::snapshots`].
    pub fn snapshot_named(&self, name: &str) -> Result<Option<u32>> {
        let list = lock(&self.views()?.list);
        let found = list.entries.iter().find(|entry| entry.name == name && !entry.is_being_deleted);
        Ok(found.map(|entry| entry.id))
    }

    /// Whether any snapshot is open beside the disk.
    pub fn has_open_snapshots(&self) -> bool {
        lock(&self.open_views).values().any(|disk| disk.strong_count() > 0)
    }

    /// Whether the snapshot is open beside the disk.
    pub(super) fn is_open_beside(&self, id: u32) -> bool {
        let mut open = lock(&self.open_views);
        open.retain(|_, disk| disk.strong_count() > 0);
        open.contains_key(&id)
    }

    /// Waits for the writes that were in flight when the newest snapshot was made, and makes them durable.
    async fn settle(&self) -> Result<()> {
        let stamp = self.views()?.stamp.load(Ordering::Acquire);
        if stamp > 0 {
            self.engine.epochs.until_passed(stamp - 1).await;
        }
        self.commit().await
    }

    fn find_page(&self, id: u32, page: u64, is_line: bool) -> Result<Found> {
        let views = self.views.as_ref().expect("a snapshot of it is open");
        let held = lock(&views.copies);
        let is_of_zones = self.places.is_in_zone_table(ImageOffset::new(page));
        let (copy, ends_in_home) = match is_line {
            // All views share the zone table: what a snapshot needs of it does not change.
            _ if is_of_zones => (None, true),
            true => (held.copies.first_from(id, page), true),
            false => {
                let (chain, ends_in_home) = lock(&views.list).chain(id)?;
                (chain.iter().find_map(|id| held.copies.copy(*id, page)), ends_in_home)
            }
        };
        Ok(match (copy, ends_in_home) {
            (Some(copy), _) => Found::Copy(copy),
            (None, false) => Found::Zero,
            (None, true) => self.home.bytes(ImageOffset::new(page)).map_or(Found::NotInMemory, Found::Home),
        })
    }
}

impl Live {
    /// The bytes of a page of home, as the snapshot sees it.
    pub(in crate::native) async fn page(&self, word: ImageOffset) -> Result<Vec<u8>> {
        self.settled.get_or_try_init(|| self.disk.settle()).await?;
        let page = page_of(word);
        loop {
            match self.disk.find_page(self.id, page, self.is_line)? {
                Found::Home(bytes) => return Ok(bytes),
                Found::Zero => return Ok(vec![0; 4096]),
                Found::Copy(copy) => {
                    let bytes = self.disk.metadata.read(copy.start(), Buffer::for_overwrite(4096)).await?;
                    return Ok(bytes.to_vec());
                }
                Found::NotInMemory => {
                    let missing = Missing(ImageOffset::new(page));
                    self.disk.home.load(&*self.disk.metadata, missing, Some).await?;
                }
            }
        }
    }
}
