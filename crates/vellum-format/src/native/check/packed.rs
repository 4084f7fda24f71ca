//! Packed blocks: each is read, and must agree with the table about its unit.
//!
//! A block that cannot be decoded here would fail a guest's read, so the check reads every one. These are 4
//! KiB for each unit that was written first with such a block and not overwritten there since. They are read
//! in the order of their places, which suits most drives best.

use vellum_core::{Buffer, ImageOffset, LocalFuture, Result, join_all};

use super::super::embed::{BLOCK_LEN, Identity, unpack};
use super::super::geometry::{SUB_BLOCK, TAG_WORD};
use super::Walk;
use crate::bytes::be64;

/// At most this many are read at once.
const READS_AT_ONCE: usize = 64;

/// A block that a table names. Sorted by place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Named {
    pub(super) unit: u32,
    pub(super) block: u8,
    /// The unit of the disk.
    pub(super) index: u32,
}

impl Walk<'_> {
    /// Checks all packed blocks.
    pub(super) async fn packed_blocks(&mut self) -> Result<()> {
        let mut all = std::mem::take(&mut self.packed);
        all.sort_unstable();
        all.dedup(); // home and a snapshot may name the same block
        let mut zone_and_tag = None;
        for some in all.chunks(READS_AT_ONCE) {
            let mut identities = Vec::with_capacity(some.len());
            for named in some {
                let (zone, _) = self.places.zone_of(named.unit).expect("looked at before it was noted");
                let tag = match zone_and_tag {
                    Some((same, tag)) if same == zone => tag,
                    _ => {
                        let span = self.places.zone_word(zone, TAG_WORD).span(8);
                        let Some(word) = self.read(span, "the table of zones").await else { continue };
                        be64(&word, 0)
                    }
                };
                zone_and_tag = Some((zone, tag));
                let Named { unit, block, index } = *named;
                identities.push(Identity { tag, guest_unit: index, image_unit: unit, block });
            }
            let reads = identities.iter().map(|identity| {
                let at = self.place_of(identity);
                Box::pin(self.image.read(at, Buffer::for_overwrite(BLOCK_LEN))) as LocalFuture<'_, _>
            });
            let read: Vec<Result<Buffer>> = join_all(reads.collect::<Vec<_>>()).await;
            for (identity, bytes) in identities.into_iter().zip(read) {
                match bytes {
                    Err(error) => self.unreadable("a packed block", &error),
                    Ok(bytes) => self.look_at(identity, bytes),
                }
            }
        }
        Ok(())
    }

    fn place_of(&self, identity: &Identity) -> ImageOffset {
        self.places.unit(identity.image_unit).start() + u64::from(identity.block) * SUB_BLOCK.bytes()
    }

    fn look_at(&mut self, identity: Identity, bytes: Buffer) {
        if let Err(error) = unpack(bytes.contiguous().slice(), identity) {
            let at = self.place_of(&identity).bytes();
            let unit = self.places.shape().layout.unit().map_or(0, |unit| unit.bytes());
            let guest = u64::from(identity.guest_unit) * unit + u64::from(identity.block) * SUB_BLOCK.bytes();
            self.error(|| {
                format!(
                    "the packed block at {at:#x} is damaged ({}): the guest gets an error for the 4 KiB at \
                     {guest:#x} until it rewrites them",
                    error.chain()
                )
            });
        }
    }
}
