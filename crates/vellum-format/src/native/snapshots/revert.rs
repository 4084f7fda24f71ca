//! Reverting the disk to a snapshot. Nothing else uses the image meanwhile.
//!
//! ```text
//!   each page that differs: kept; the host has space for it ── commit ──► mark ── commit ──► its words
//!                                           ──► commit ► size in the superblock ── flush ► no mark
//! ```
//!
//! 1. What the snapshots see does not change. So a crash leaves the mark, and the next read-write opening
//!    continues.
//! 2. Everything for which a revert needs space comes before the mark. So a full host leaves the disk as it
//!    was, and never an image that can be neither finished nor opened.
//! 3. The mark is the commit point: from then on the disk is reverted, by this opening or the next.

use std::collections::BTreeMap;

use vellum_core::{Buffer, Context, Disk, Error, ImageOffset, Result, SharedDisk, SharedStorage};

use super::super::geometry::{Bits, SNAPSHOTS};
use super::super::image::Native;
use super::super::open::OpenOptions;
use super::Views;
use crate::bytes::be64;
use crate::engine::Commit as _;
use crate::state::lock;

/// At most this many words change in one step.
const WORDS_AT_ONCE: usize = 16;

/// Makes the disk of a closed image what the snapshot of this number or name sees. The snapshots stay.
///
/// # Errors
/// `NotFound` when there is no such snapshot, and as for opening the image.
pub async fn revert(
    image: SharedStorage,
    below: Option<SharedDisk>,
    options: OpenOptions,
    wanted: &str,
) -> Result<()> {
    let name = image.name().to_owned();
    let context = || format!("{name}: can't revert to snapshot {wanted}");
    let native = Native::open(image.clone(), below.clone(), options.clone()).await?;
    let begun = native.begin_revert(wanted).await;
    let is_begun = begun.is_ok();
    let done = match begun {
        Ok(()) => native.finish_revert().await,
        Err(error) => Err(error),
    };
    let closed = native.close().await;
    match done.and(closed) {
        // The mark is durable, so an opening continues the revert. After a failed flush it is not tried: this
        // storage fails all further flushes.
        Err(error) if is_begun => {
            image.flush().await.context(|| error.chain()).context(context)?;
            let native = Native::open(image, below, options).await.context(context)?;
            native.close().await.context(context)
        }
        result => result.context(context),
    }
}

impl Native {
    async fn begin_revert(&self, wanted: &str) -> Result<()> {
        let views = self.views()?;
        let id = lock(&views.list).find_for_change(wanted)?.id;
        self.begin_journal().await?;
        for (page, at) in self.pages_of_revert(views, id)? {
            let start = ImageOffset::new(page);
            let bytes = self.metadata.read(at, Buffer::for_overwrite(4096)).await?;
            self.find(|| self.home.get(Bits { word: start, shift: 0, width: 1 })).await?;
            if self.home.bytes(start).is_none_or(|is| is != bytes.slice()) {
                drop(self.enter_page(start).await?);
            }
        }
        self.engine.commits.note_change();
        self.commit().await?;
        self.mark_revert(views, id).await // commit point
    }

    /// The pages of home of which a snapshot's view has a copy, and where these copies lie.
    fn pages_of_revert(&self, views: &Views, id: u32) -> Result<BTreeMap<u64, ImageOffset>> {
        let (chain, _) = lock(&views.list).chain(id)?;
        let held = lock(&views.copies);
        let mut pages = BTreeMap::new();
        for id in chain {
            for page in held.copies.pages_of(id) {
                let copy = held.copies.copy(id, page).expect("as just found");
                pages.entry(page).or_insert(copy.start());
            }
        }
        Ok(pages)
    }

    /// Enters the open transaction with a change of a page of home. The page is kept, and the host has space
    /// for it.
    async fn enter_page(&self, start: ImageOffset) -> Result<std::sync::RwLockReadGuard<'_, ()>> {
        let mut rounds = 0;
        loop {
            let given = self.units().given();
            let entered = match self.reserve(&[start]).await {
                Ok(()) => self.enter_changing(24 * WORDS_AT_ONCE as u64, || vec![start]).await,
                Err(error) => Err(error),
            };
            match entered {
                Err(error) if error.kind() == vellum_core::ErrorKind::NoSpace => {
                    if !self.space_again(&mut rounds, given, 1).await? {
                        return Err(error);
                    }
                }
                result => return result,
            }
        }
    }

    async fn mark_revert(&self, views: &Views, id: u32) -> Result<()> {
        self.begin_journal().await?;
        self.load_entry(SNAPSHOTS - 1).await?;
        {
            let _gate = self.enter_transaction(24).await?;
            let mut list = lock(&views.list);
            list.reverts_to = id;
            self.put_last(&list);
        }
        self.engine.commits.note_change();
        self.commit().await
    }

    pub(in crate::native) async fn finish_revert(&self) -> Result<()> {
        let views = self.views()?;
        let (id, size) = {
            let list = lock(&views.list);
            let id = list.reverts_to;
            let entry = list.get(id).ok_or_else(|| Error::corrupt("the disk is reverted to no snapshot"))?;
            (id, entry.size)
        };
        self.begin_journal().await?;
        for (page, at) in self.pages_of_revert(views, id)? {
            let bytes = self.metadata.read(at, Buffer::for_overwrite(4096)).await?;
            self.put_page(views, page, bytes.slice())
                .await
                .context(|| format!("page {page:#x} of snapshot {id}"))?;
        }
        self.commit().await?;
        if size != self.engine.geometry.size {
            let mut superblocks = self.superblocks.lock().await;
            superblocks.superblock.places = self.places.resized(size)?;
            superblocks.write(&*self.metadata).await?;
            self.flush_storage().await?;
        }
        self.mark_revert(views, 0).await
    }

    async fn put_page(&self, views: &Views, page: u64, bytes: &[u8]) -> Result<()> {
        let start = ImageOffset::new(page);
        self.find(|| self.home.get(Bits { word: start, shift: 0, width: 1 })).await?;
        let is_table = { lock(&views.copies).copies.is_of_table(page) };
        let words: Vec<(ImageOffset, u64)> =
            (0..512).map(|word| (start + word as u64 * 8, be64(bytes, word * 8))).collect();
        for words in words.chunks(WORDS_AT_ONCE) {
            let is_same = |(at, value): &(ImageOffset, u64)| {
                self.home.get(Bits { word: *at, shift: 0, width: 32 }) == Ok(value & 0xFFFF_FFFF)
                    && self.home.get(Bits { word: *at, shift: 32, width: 32 }) == Ok(value >> 32)
            };
            if words.iter().all(is_same) {
                continue;
            }
            let _gate = self.enter_page(start).await?;
            for (at, value) in words {
                if is_table {
                    for shift in [32, 0] {
                        let unit = u32::try_from(value >> shift & 0xFFFF_FFFF).expect("32 bits");
                        self.put_entry(Bits { word: *at, shift, width: 32 }, unit);
                    }
                } else {
                    self.home.change(*at, |_| *value);
                }
            }
        }
        Ok(())
    }
}
