//! Changes of an encrypted disk that begin or end within a sector.
//!
//! The rest of the sector is read, and all of it is written. No other change is in flight meanwhile, so that no bytes are
//! lost that another one has put there: the only lock that is held while guest data is moved. All who change whole sectors
//! share it. A guest does not ask for such changes, because the disk says that its blocks are sectors.

use vellum_core::{BlockSize, Buffer, Context, GuestOffset, GuestSpan, Result};

use super::guest_cipher::GuestCipher;

fn is_whole(span: GuestSpan) -> bool {
    BlockSize::SECTOR.aligns(span.start()) && BlockSize::SECTOR.aligns(span.end())
}

/// A disk of whole sectors.
pub(crate) trait WholeSectors {
    /// Its name in messages.
    fn name_of_disk(&self) -> &str;

    /// Reads a run of whole sectors, as the guest sees them.
    async fn read_whole(&self, span: GuestSpan, buffer: Buffer) -> Result<Buffer>;

    /// Writes a run of whole sectors.
    async fn write_whole(&self, span: GuestSpan, data: Buffer) -> Result<()>;

    /// Writes a run of an encrypted disk.
    async fn write_encrypted(&self, cipher: &GuestCipher, span: GuestSpan, data: Buffer) -> Result<()> {
        if is_whole(span) {
            let _shared = cipher.parts.shared().await;
            return self.write_whole(span, data).await;
        }
        let _alone = cipher.parts.alone().await;
        self.write_parts(span, data).await
    }

    /// Writes what begins or ends within a sector. Nothing else is in flight.
    async fn write_parts(&self, span: GuestSpan, data: Buffer) -> Result<()> {
        let start = BlockSize::SECTOR.round_down(span.start().bytes());
        let end = BlockSize::SECTOR.round_up(span.end().bytes());
        let whole = GuestOffset::new(start).span(end - start);
        let len = usize::try_from(whole.len()).expect("a request fits memory");
        let context = || format!("{}: can't read the rest of a sector", self.name_of_disk());
        let mut bytes =
            self.read_whole(whole, Buffer::for_overwrite(len)).await.context(context)?.contiguous();
        let skip = usize::try_from(span.start().bytes() - start).expect("within a sector");
        data.copy_to(0, &mut bytes.slice_mut()[skip..skip + data.len()]);
        self.write_whole(whole, bytes).await
    }

    /// Makes a run of an encrypted disk zero: parts of sectors by writing them, and what is between by `zero`.
    async fn zero_encrypted(
        &self,
        cipher: &GuestCipher,
        span: GuestSpan,
        zero: impl AsyncFnOnce(GuestSpan) -> Result<()>,
    ) -> Result<()> {
        if is_whole(span) {
            let _shared = cipher.parts.shared().await;
            return zero(span).await;
        }
        let _alone = cipher.parts.alone().await;
        let start = GuestOffset::new(BlockSize::SECTOR.round_up(span.start().bytes()));
        let end = GuestOffset::new(BlockSize::SECTOR.round_down(span.end().bytes()));
        let write = async |from: GuestOffset, to: GuestOffset| {
            let part = GuestSpan::between(from, to);
            let zeros = Buffer::zeroed(usize::try_from(part.len()).expect("two sectors at most"));
            self.write_parts(part, zeros).await
        };
        if start >= end {
            return write(span.start(), span.end()).await;
        }
        if span.start() < start {
            write(span.start(), start).await?;
        }
        if end < span.end() {
            write(end, span.end()).await?;
        }
        zero(GuestSpan::between(start, end)).await
    }
}
