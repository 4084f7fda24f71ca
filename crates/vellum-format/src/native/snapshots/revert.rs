//! The disk becomes again what a snapshot sees. Nobody else uses the image meanwhile.
//!
//! ```text
//!   mark ── commit ──► each page that differs: kept, as ever ► its words ──► commit ► size in the superblock ── flush ► no mark
//! ```
//!
//! What the snapshots see does not change, so a crash leaves the mark, and the next opening that writes goes on.

use std::collections::BTreeSet;

use vellum_core::{Buffer, Context, Disk, Error, ImageOffset, Result, SharedDisk, SharedStorage};

use super::super::geometry::{Bits, SNAPSHOTS};
use super::super::image::Native;
use super::super::open::OpenOptions;
use super::Views;
use super::list::HOME;
use crate::bytes::be64;
use crate::state::lock;

/// So many words change in one step.
const WORDS_AT_ONCE: usize = 16;

/// Makes the disk of a closed image what the snapshot of this number or name sees. The snapshots stay.
///
/// # Errors
/// `NotFound` when there is no such snapshot, and as opening the image.
pub async fn revert(
    image: SharedStorage,
    below: Option<SharedDisk>,
    options: OpenOptions,
    wanted: &str,
) -> Result<()> {
    let name = image.name().to_owned();
    let native = Native::open(image, below, options).await?;
    let done = native.begin_revert(wanted).await;
    let done = match done {
        Ok(()) => native.finish_revert().await,
        Err(error) => Err(error),
    };
    let closed = native.close().await;
    done.and(closed).context(|| format!("{name}: can't go back to snapshot {wanted}"))
}

impl Native {
    async fn begin_revert(&self, wanted: &str) -> Result<()> {
        let views = self.views()?;
        let id = lock(&views.list).find(wanted)?.id;
        self.mark_revert(views, id).await
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
        self.commits.note_change();
        self.commit().await
    }

    pub(in crate::native) async fn finish_revert(&self) -> Result<()> {
        let views = self.views()?;
        let (id, size, chain) = {
            let list = lock(&views.list);
            let id = list.reverts_to;
            let entry = list.get(id).ok_or_else(|| Error::corrupt("the disk is reverted to no snapshot"))?;
            let (chain, ends_in_home) = list.chain(id)?;
            debug_assert!(ends_in_home || entry.next != HOME);
            (id, entry.size, chain)
        };
        self.begin_journal().await?;
        let pages: BTreeSet<u64> = {
            let held = lock(&views.copies);
            chain.iter().flat_map(|id| held.copies.pages_of(*id)).collect()
        };
        for page in pages {
            let copy = {
                let held = lock(&views.copies);
                chain.iter().find_map(|id| held.copies.copy(*id, page))
            };
            let copy = copy.expect("one of the chain has it");
            let bytes = self.metadata.read(copy.start(), Buffer::for_overwrite(4096)).await?;
            self.put_page(views, page, bytes.slice())
                .await
                .context(|| format!("page {page:#x} of snapshot {id}"))?;
        }
        self.commit().await?;
        if size != self.geometry.size {
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
            let mut rounds = 0;
            let _gate = loop {
                let given = self.units().given();
                match self.enter_changing(24 * WORDS_AT_ONCE as u64, || vec![start]).await {
                    Err(error) if error.kind() == vellum_core::ErrorKind::NoSpace => {
                        if !self.space_again(&mut rounds, given, 1).await? {
                            return Err(error);
                        }
                    }
                    result => break result?,
                }
            };
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
