//! Overwriting guest data in place, as far as recovery allows it.

use vellum_core::{Buffer, ImageOffset, ImageSpan, Result, SharedStorage};

use super::{Journal, Overwrite, unchanging};

impl Journal {
    /// Overwrites bytes of the disk in place. `commit` makes durable what was published before.
    pub(crate) async fn write_in_place(
        &self,
        storage: &SharedStorage,
        at: ImageOffset,
        data: Buffer,
        commit: impl AsyncFn() -> Result<()>,
    ) -> Result<()> {
        if !self.must_wait(at.span(data.len() as u64)) {
            return storage.write(at, data).await;
        }
        // Boxed, so that the future of most overwrites, which need not wait, is small.
        Box::pin(self.write_carefully(storage, at, data, commit)).await
    }

    /// Overwrites bytes that recovery may still look at.
    async fn write_carefully(
        &self,
        storage: &SharedStorage,
        at: ImageOffset,
        data: Buffer,
        commit: impl AsyncFn() -> Result<()>,
    ) -> Result<()> {
        // From here on a record may hold the checksum of these bytes, so they must not change.
        let mut data = unchanging(data);
        loop {
            match self.overwrite(at, &data) {
                Overwrite::Now => return storage.write(at, data).await,
                Overwrite::Replacing(replacing) => {
                    let written = storage.write(at, data).await;
                    replacing.ended(written.is_ok());
                    return written;
                }
                Overwrite::Taken(rest) => {
                    let mut here = at;
                    for part in rest {
                        drop(data.split_to(usize::try_from(part.start() - here).expect("within the buffer")));
                        let bytes = data.split_to(usize::try_from(part.len()).expect("within the buffer"));
                        storage.write(part.start(), bytes).await?;
                        here = part.end();
                    }
                    return Ok(());
                }
                Overwrite::Later => self.make_way(at.span(data.len() as u64), &commit).await?,
            }
        }
    }

    /// Waits until recovery no longer needs anything in these bytes.
    pub(crate) async fn make_way(&self, span: ImageSpan, commit: impl AsyncFn() -> Result<()>) -> Result<()> {
        while self.must_wait(span) {
            self.request_record();
            if self.full.has(span) {
                self.request_checkpoint();
            }
            commit().await?;
        }
        Ok(())
    }
}
