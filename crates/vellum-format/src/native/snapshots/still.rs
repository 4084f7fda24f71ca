//! A snapshot as a read-only disk: its pages are looked up along its chain.
//!
//! In an image that is open read-write, each page is looked up when it is needed (`live.rs`). An image that
//! is open read-only does not change, so the places of all pages are found once.

use std::collections::BTreeSet;

use vellum_core::{Error, ErrorKind, ImageOffset, Result, SharedStorage};

use super::super::geometry::Places;
use super::super::superblock::Superblock;
use super::copies::Copies;
use super::list::{Entry, List};
use crate::hash::HashMap;

/// Where the pages of home lie that a snapshot sees.
pub(in crate::native) struct Still {
    /// The size of the disk at that time, in bytes.
    pub(in crate::native) size: u64,
    copies: HashMap<u64, ImageOffset>,
    ends_in_home: bool,
}

impl Still {
    /// The view of the snapshot of this number or name.
    pub(in crate::native) async fn read(
        image: &SharedStorage,
        superblock: &Superblock,
        wanted: &str,
    ) -> Result<Self> {
        if !superblock.has_snapshots() {
            return Err(Error::new(ErrorKind::NotFound, format!("there is no snapshot named {wanted}")));
        }
        let places: Places = superblock.places();
        let list = List::read(&**image, &places).await?;
        let Entry { id, size, .. } = *list.find(wanted)?;
        let ids: BTreeSet<u32> = list.entries.iter().map(|entry| entry.id).collect();
        let all = Copies::read(&**image, places, list.first_map_unit, &ids, false).await?;
        let (chain, ends_in_home) = list.chain(id)?;
        let mut copies = HashMap::default();
        for id in chain {
            for page in all.pages_of(id) {
                let at = all.copy(id, page).expect("as just found").start();
                copies.entry(page).or_insert(at);
            }
        }
        Ok(Self { size, copies, ends_in_home })
    }

    /// Where a page lies. `None` when it is zero.
    pub(in crate::native) fn place(&self, page: ImageOffset) -> Option<ImageOffset> {
        match self.copies.get(&page.bytes()) {
            Some(at) => Some(*at),
            None => self.ends_in_home.then_some(page),
        }
    }
}

/// Whether the revert of a closed image was interrupted after its mark.
pub(in crate::native) async fn is_half_reverted(
    image: &SharedStorage,
    superblock: &Superblock,
) -> Result<bool> {
    Ok(superblock.has_snapshots() && List::read(&**image, &superblock.places()).await?.reverts_to != 0)
}

/// Refuses to read a disk whose revert is not finished.
pub(in crate::native) async fn refuse_half_reverted(
    image: &SharedStorage,
    superblock: &Superblock,
) -> Result<()> {
    match is_half_reverted(image, superblock).await? {
        false => Ok(()),
        true => Err(Error::unsupported(format!(
            "a revert to a snapshot was interrupted: `vellum recover {}` finishes it",
            image.name()
        ))),
    }
}
