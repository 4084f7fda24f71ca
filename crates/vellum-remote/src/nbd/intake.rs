//! Bytes from a stream, taken in the pieces that the protocol has.

use vellum_core::{Buffer, ByteStream, Error, ErrorKind, Result};

/// What one read from the stream may bring, in bytes.
const STAGE_BYTES: usize = 256 << 10;

/// The receiving side of a connection.
pub(super) struct Intake<'a> {
    stream: &'a dyn ByteStream,
    stage: Buffer,
    /// The bytes of the stage that were received and not taken yet.
    start: usize,
    end: usize,
}

impl<'a> Intake<'a> {
    pub(super) fn new(stream: &'a dyn ByteStream) -> Self {
        Self { stream, stage: Buffer::zeroed(STAGE_BYTES), start: 0, end: 0 }
    }

    /// Whether nothing has come that was not taken.
    pub(super) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Waits until some bytes are there, and gives at most `len` of them to `take`.
    ///
    /// # Errors
    /// `Closed` when the stream has ended.
    pub(super) async fn some(&mut self, len: usize, take: impl FnOnce(&[u8])) -> Result<usize> {
        if self.start == self.end {
            let stage = std::mem::replace(&mut self.stage, Buffer::empty());
            let (stage, count) = self.stream.read(stage).await?;
            self.stage = stage;
            if count == 0 {
                return Err(Error::new(ErrorKind::Closed, "the server has closed the connection"));
            }
            (self.start, self.end) = (0, count);
        }
        let count = len.min(self.end - self.start);
        take(&self.stage.slice()[self.start..self.start + count]);
        self.start += count;
        Ok(count)
    }

    /// The next `N` bytes.
    pub(super) async fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        let mut done = 0;
        while done < N {
            let target = &mut bytes[done..];
            done += self.some(N - done, |part| target[..part.len()].copy_from_slice(part)).await?;
        }
        Ok(bytes)
    }

    pub(super) async fn half(&mut self) -> Result<u16> {
        self.take().await.map(u16::from_be_bytes)
    }

    pub(super) async fn word(&mut self) -> Result<u32> {
        self.take().await.map(u32::from_be_bytes)
    }

    pub(super) async fn long(&mut self) -> Result<u64> {
        self.take().await.map(u64::from_be_bytes)
    }

    /// The next `len` bytes, a number that the caller has bounded.
    pub(super) async fn bytes(&mut self, len: usize) -> Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            self.some(len - bytes.len(), |part| bytes.extend_from_slice(part)).await?;
        }
        Ok(bytes)
    }

    /// Drops the next `len` bytes.
    pub(super) async fn skip(&mut self, mut len: usize) -> Result<()> {
        while len > 0 {
            len -= self.some(len, |_| ()).await?;
        }
        Ok(())
    }
}
