//! A disk and what it should hold. Every request is judged against the bytes in memory, as long as the image is known
//! to be sound; of one that is not, nothing is asked but that requests end.

use vellum_core::{
    Buffer, Error, GuestOffset, GuestSpan, Result, SharedDisk, WriteFlags, ZeroFlags, is_zero,
};

/// Larger disks are used without a model.
pub(crate) const MODEL_BYTES_MAX: u64 = 256 << 10;

/// What one request is.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Request {
    Write { seed: u8, fua: bool },
    Zero { may_unmap: bool, fua: bool },
    Discard,
    Read,
}

/// A disk under test.
pub(crate) struct Watched {
    pub(crate) disk: SharedDisk,
    /// What it reads as; none when it is too large or not to be trusted.
    pub(crate) model: Option<Vec<u8>>,
}

impl Watched {
    /// Begins with what the disk reads as now, if it is sound and can be read.
    pub(crate) async fn new(disk: SharedDisk, is_sound: bool) -> Self {
        let size = disk.geometry().size;
        let mut watched = Self { disk, model: None };
        if is_sound && size <= MODEL_BYTES_MAX {
            watched.model = watched.read(GuestOffset::ZERO.span(size)).await.ok();
        }
        watched
    }

    async fn read(&self, span: GuestSpan) -> Result<Vec<u8>> {
        let len = usize::try_from(span.len()).expect("a read is small");
        Ok(self.disk.read(span.start(), Buffer::for_overwrite(len)).await?.to_vec())
    }

    /// Does a request and judges what came of it.
    pub(crate) async fn request(&mut self, span: GuestSpan, request: Request) {
        let result = self.perform(span, request).await;
        let Some(model) = &mut self.model else { return };
        result.unwrap_or_else(|error| panic!("{request:?} of {span:?} on a sound image: {}", error.chain()));
        let range = at(span);
        let old = model[range.clone()].to_vec();
        match request {
            Request::Write { seed, .. } => model[range].copy_from_slice(&noise(seed, old.len())),
            Request::Zero { .. } => model[range].fill(0),
            Request::Discard => {
                let new = self.read(span).await.expect("what was discarded is read");
                let is_legal = |(new, old): (&u8, &u8)| *new == 0 || new == old;
                let is_usual = is_zero(&new) || new == old;
                assert!(
                    is_usual || new.iter().zip(&old).all(is_legal),
                    "a discard of {span:?} left other bytes"
                );
                self.model.as_mut().expect("as above")[at(span)].copy_from_slice(&new);
            }
            Request::Read => {
                let new = self.read(span).await.expect("a second read");
                assert!(new == old, "{span:?} reads as other bytes");
            }
        }
    }

    async fn perform(&self, span: GuestSpan, request: Request) -> Result<()> {
        let len = usize::try_from(span.len()).expect("a request is small");
        match request {
            Request::Write { seed, fua } => {
                let data = Buffer::copy_of(&noise(seed, len));
                self.disk.write(span.start(), data, WriteFlags { fua }).await
            }
            Request::Zero { may_unmap, fua } => {
                self.disk.write_zeroes(span, ZeroFlags { fua, may_unmap, fast_only: false }).await
            }
            Request::Discard => self.disk.discard(span, WriteFlags::default()).await,
            Request::Read => {
                self.disk.map(span).await?;
                self.disk.read(span.start(), Buffer::for_overwrite(len)).await.map(drop)
            }
        }
    }

    /// Flushes; a sound image must.
    pub(crate) async fn flush(&self) {
        self.judge(self.disk.flush().await, "flush");
    }

    /// Closes, and gives what the disk should read as when it is opened again.
    pub(crate) async fn close(self) -> Option<Vec<u8>> {
        self.compare().await;
        self.judge(self.disk.close().await, "close");
        self.model
    }

    /// All of it, against the model.
    pub(crate) async fn compare(&self) {
        if let Some(model) = &self.model {
            let all =
                self.read(GuestOffset::ZERO.span(model.len() as u64)).await.expect("a sound image is read");
            // Whole slices first: byte by byte is slow where every comparison is recorded.
            if all != *model {
                let wrong = all.iter().zip(model).position(|(is, should)| is != should);
                panic!("reads wrong from byte {wrong:?} on");
            }
        }
    }

    fn judge(&self, result: std::result::Result<(), Error>, what: &str) {
        if let (Err(error), Some(_)) = (result, &self.model) {
            panic!("{what} of a sound image: {}", error.chain());
        }
    }
}

fn at(span: GuestSpan) -> std::ops::Range<usize> {
    let usize = |offset: GuestOffset| usize::try_from(offset.bytes()).expect("a model is small");
    usize(span.start())..usize(span.end())
}

/// Bytes that differ from place to place; none is zero.
fn noise(seed: u8, len: usize) -> Vec<u8> {
    let mut period = [0; 253];
    for (at, byte) in period.iter_mut().enumerate() {
        *byte = seed.wrapping_add(u8::try_from(at).expect("below 253")) | 1;
    }
    let mut bytes = period.repeat(len.div_ceil(period.len()));
    bytes.truncate(len);
    bytes
}
