//! The bitmap and the masks, which say whether the image or the base has the bytes.

use vellum_core::{ImageOffset, Result};

use super::super::geometry::Region;
use super::{CUT_OFF, Change, Walk};

impl Walk<'_> {
    /// Bits past the end of the base.
    pub(super) async fn bitmap(&mut self) -> Result<()> {
        let blocks = self.places.shape().blocks();
        self.past_the_end(Region::Bitmap, blocks, 1, "bits of blocks").await
    }

    /// Masks past the end of the base, and the undefined value.
    pub(super) async fn masks(&mut self) -> Result<()> {
        let sub_blocks = self.places.shape().sub_blocks();
        self.past_the_end(Region::Masks, sub_blocks, 2, "masks of sub-blocks").await?;
        let span = self.places.region(Region::Masks);
        let start = span.start();
        let mut bits = None;
        let mut at = start;
        while let Some((place, bytes)) = self.next_bytes(Region::Masks, span, &mut at).await? {
            for (index, byte) in bytes.iter().enumerate() {
                if byte & byte >> 1 & 0x55 == 0 {
                    continue;
                }
                let first = ((place - start) + index as u64) * 4;
                for sub_block in (first..first + 4).filter(|sub| *sub < sub_blocks) {
                    let is_corrupt = byte >> (2 * (sub_block % 4)) & 3 == 3;
                    if is_corrupt && !self.has_bit(sub_block, &mut bits).await {
                        self.error(|| {
                            format!(
                                "masks: sub-block {sub_block} has the value 3, so the source of its data is \
                             unknown"
                            )
                        });
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether the block of the sub-block has its bit. `page` is the last page of the bitmap that was read.
    async fn has_bit(&mut self, sub_block: u64, page: &mut Option<(u64, Vec<u8>)>) -> bool {
        let block = sub_block >> (self.places.shape().block.shift() - 12);
        let wanted = block / 8 / 4096;
        if page.as_ref().is_none_or(|(index, _)| *index != wanted) {
            let span = (self.places.region(Region::Bitmap).start() + wanted * 4096).span(4096);
            *page = self.read(span, "bitmap").await.map(|bytes| (wanted, bytes));
        }
        let byte = usize::try_from(block / 8 % 4096).expect("below a page");
        // An unreadable page was already counted as an error.
        page.as_ref().is_none_or(|(_, bytes)| bytes[byte] >> (block % 8) & 1 == 1)
    }

    /// Finds bits past the first `count` items of `width` bits each.
    async fn past_the_end(&mut self, region: Region, count: u64, width: u64, what: &str) -> Result<()> {
        let span = self.places.region(region);
        let end = span.start() + count * width / 8;
        let kept = u8::try_from((1u32 << (count * width % 8)) - 1).expect("below a byte");
        let mut at = end.min(span.end());
        while let Some((place, bytes)) = self.next_bytes(region, span, &mut at).await? {
            let mut first = 0;
            if place == end && kept != 0 {
                first = 1;
                if bytes[0] & !kept != 0 {
                    self.error(|| {
                        format!("{}: {what} past the end of the base are set: {CUT_OFF}", region.name())
                    });
                    self.fix(false, Change::Byte(place, bytes[0] & kept));
                }
            }
            if bytes[first..].iter().any(|byte| *byte != 0) {
                let rest: ImageOffset = place + first as u64;
                self.error_to_zero(rest.span((bytes.len() - first) as u64), || {
                    format!(
                        "{}: {what} past the end of the base are set, at {:#x}: {CUT_OFF}",
                        region.name(),
                        rest.bytes()
                    )
                });
            }
        }
        Ok(())
    }
}
