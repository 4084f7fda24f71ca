//! A drive that takes its time as a model computes and keeps little of what is written: for workloads of many
//! gigabytes.
//!
//! What is below `kept` is kept, for example metadata; what is behind it reads as one byte, for example zero. A drive that
//! remembers keeps what is behind it too, where it is anything but that byte, or another one for data that nobody reads. Nothing is recorded and nothing fails: for
//! crashes there is [`Drive`](vellum_sim::Drive).

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard};

use vellum_core::memory::SparseBytes;
use vellum_core::{
    Buffer, ImageOffset, ImageSpan, IoCounts, Limits, LocalFuture, Result, Storage, StorageRun, Zeroes, lock,
};
use vellum_sim::model::Medium;
use vellum_sim::{Operation, World};

use super::device::Device;

/// A drive that forgets. The module says what it keeps.
pub(crate) struct ForgetfulDrive {
    device: Arc<Device>,
    limits: Limits,
    kept: u64,
    /// Where it begins on the device, in bytes.
    at: u64,
    /// What is not kept reads as this.
    other: u8,
    /// One that remembers forgets blocks of this byte.
    forgotten: u8,
    remembers: bool,
    state: Mutex<State>,
}

/// What is remembered, is so by blocks of this size.
const BLOCK: u64 = BLOCK_LEN as u64;
const BLOCK_LEN: usize = 4096;

struct State {
    bytes: SparseBytes,
    /// Blocks behind `kept` that are anything but `other`.
    remembered: HashSet<u64>,
    len: u64,
}

impl ForgetfulDrive {
    /// A drive of `len` zeros that remembers what is written below `kept`.
    pub(crate) fn new(world: &World, medium: Medium, limits: Limits, len: u64, kept: u64) -> Arc<Self> {
        Self::on(Device::with(world, medium), limits, (len, kept), 0)
    }

    /// A part of a device that others have parts of too: from byte `at` on. Nothing keeps it from being longer than meant.
    pub(crate) fn part(device: Arc<Device>, at: u64, limits: Limits, (len, kept): (u64, u64)) -> Arc<Self> {
        let state = State { bytes: SparseBytes::default(), remembered: HashSet::new(), len };
        let state = Mutex::new(state);
        Arc::new(Self { device, limits, kept, at, other: 0, forgotten: 0, remembers: false, state })
    }

    /// The same on a device of any kind; what is not kept reads as `other`.
    pub(crate) fn on(device: Arc<Device>, limits: Limits, (len, kept): (u64, u64), other: u8) -> Arc<Self> {
        let state = State { bytes: SparseBytes::default(), remembered: HashSet::new(), len };
        Arc::new(Self {
            device,
            limits,
            kept,
            at: 0,
            other,
            forgotten: other,
            remembers: false,
            state: Mutex::new(state),
        })
    }

    /// The same, and it remembers. `kept` is a multiple of 4 KiB.
    pub(crate) fn remembering(
        device: Arc<Device>,
        limits: Limits,
        (len, kept): (u64, u64),
        other: u8,
    ) -> Arc<Self> {
        assert!(kept.is_multiple_of(BLOCK), "a block is kept as a whole, or is not");
        let state = State { bytes: SparseBytes::default(), remembered: HashSet::new(), len };
        let (forgotten, state) = (other, Mutex::new(state));
        Arc::new(Self { device, limits, kept, at: 0, other, forgotten, remembers: true, state })
    }

    /// One that begins empty, reads as zeros and remembers all but blocks of this byte, which nobody may read.
    pub(crate) fn forgetting(device: Arc<Device>, limits: Limits, forgotten: u8) -> Arc<Self> {
        let state = State { bytes: SparseBytes::default(), remembered: HashSet::new(), len: 0 };
        let state = Mutex::new(state);
        Arc::new(Self { device, limits, kept: 0, at: 0, other: 0, forgotten, remembers: true, state })
    }

    /// The requests so far.
    pub(crate) fn counts(&self) -> IoCounts {
        self.device.counts()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    async fn pass(&self, operation: Operation, span: ImageSpan) {
        let span = (span.start() + self.at).span(span.len());
        self.device.pass(operation, span).await;
    }

    /// The bytes of a run as they are remembered.
    fn recall(&self, state: &State, mut at: ImageOffset, mut bytes: &mut [u8]) {
        while !bytes.is_empty() {
            let block = at.bytes() / BLOCK;
            let len = usize::try_from((block + 1) * BLOCK - at.bytes()).expect("a block").min(bytes.len());
            let (part, rest) = bytes.split_at_mut(len);
            if at.bytes() < self.kept || state.remembered.contains(&block) {
                state.bytes.read(at, part);
            } else {
                part.fill(self.other);
            }
            (at, bytes) = (at + len as u64, rest);
        }
    }

    /// Remembers the bytes of a run.
    fn remember(&self, state: &mut State, mut at: ImageOffset, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let block = at.bytes() / BLOCK;
            let len = usize::try_from((block + 1) * BLOCK - at.bytes()).expect("a block").min(bytes.len());
            let (part, rest) = bytes.split_at(len);
            let is_kept = at.bytes() < self.kept;
            let is_whole = len as u64 == BLOCK;
            let is_other = is_all(part, self.forgotten);
            let is_as_before = self.forgotten == self.other && !state.remembered.contains(&block);
            if !is_kept && is_other && (is_whole || is_as_before) {
                if state.remembered.remove(&block) {
                    state.bytes.zero(ImageOffset::new(block * BLOCK).span(BLOCK));
                }
            } else {
                if !is_kept && state.remembered.insert(block) {
                    state.bytes.write(ImageOffset::new(block * BLOCK), &[self.other; BLOCK_LEN]);
                }
                state.bytes.write(at, part);
            }
            (at, bytes) = (at + len as u64, rest);
        }
    }

    /// The part of a run that is kept.
    fn kept(&self, span: ImageSpan) -> ImageSpan {
        span.intersect(ImageOffset::ZERO.span(self.kept))
    }
}

/// Whether all of these bytes are this one.
fn is_all(bytes: &[u8], byte: u8) -> bool {
    // Each equals the one before: a comparison of memory, which is far faster than byte by byte.
    bytes.split_first().is_none_or(|(first, rest)| *first == byte && *rest == bytes[..rest.len()])
}

impl Storage for ForgetfulDrive {
    fn name(&self) -> &'static str {
        "drive"
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn len(&self) -> u64 {
        self.lock().len
    }

    fn read(&self, at: ImageOffset, mut buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let span = at.span(buffer.len() as u64);
            self.pass(Operation::Read, span).await;
            if self.remembers {
                let state = self.lock();
                buffer.fill_with(|from, piece| self.recall(&state, at + from as u64, piece));
                drop(state);
                return Ok(buffer);
            }
            if self.kept(span).is_empty() {
                buffer.fill(self.other);
                return Ok(buffer);
            }
            let state = self.lock();
            buffer.fill_with(|from, piece| state.bytes.read(at + from as u64, piece));
            drop(state);
            Ok(buffer)
        })
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = at.span(data.len() as u64);
            self.pass(Operation::Write, span).await;
            let kept = usize::try_from(self.kept(span).len()).expect("no longer than the data");
            let data = data.owned();
            let mut state = self.lock();
            state.len = state.len.max(span.end().bytes());
            if self.remembers {
                let mut at = at;
                for piece in data.pieces() {
                    self.remember(&mut state, at, piece);
                    at += piece.len() as u64;
                }
                return Ok(());
            }
            let (mut at, mut left) = (at, kept);
            for piece in data.pieces() {
                let part = &piece[..piece.len().min(left)];
                state.bytes.write(at, part);
                at += part.len() as u64;
                left -= part.len();
            }
            Ok(())
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.pass(Operation::Flush, ImageOffset::ZERO.span(0)).await;
            Ok(())
        })
    }

    fn write_zeroes(&self, span: ImageSpan, _how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.pass(Operation::WriteZeroes, span).await;
            let mut state = self.lock();
            state.len = state.len.max(span.end().bytes());
            state.bytes.zero(self.kept(span));
            Ok(())
        })
    }

    /// What is kept reads as zero afterwards.
    fn discard(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.pass(Operation::Discard, span).await;
            self.lock().bytes.zero(self.kept(span));
            Ok(())
        })
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.pass(Operation::SetLen, ImageOffset::ZERO.span(len)).await;
            let mut state = self.lock();
            state.len = len;
            state.bytes.set_len(len.min(self.kept));
            Ok(())
        })
    }

    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.pass(Operation::Preallocate, span).await;
            let mut state = self.lock();
            state.len = state.len.max(span.end().bytes());
            Ok(())
        })
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        let span = span.intersect(ImageOffset::ZERO.span(self.len()));
        Box::pin(async move {
            Ok((!span.is_empty()).then_some(StorageRun { span, is_data: true }).into_iter().collect())
        })
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;

    use super::*;

    #[test]
    fn a_drive_that_remembers_keeps_what_is_not_its_byte() {
        let drive = ForgetfulDrive::remembering(Device::instant(), Limits::plain(), (1 << 20, 8192), 7);
        let write = |at: u64, bytes: &[u8]| {
            block_on(drive.write(ImageOffset::new(at), Buffer::copy_of(bytes))).unwrap();
        };
        let read = |at: u64, len: usize| {
            block_on(drive.read(ImageOffset::new(at), Buffer::zeroed(len))).unwrap().to_vec()
        };
        let remembered = || drive.lock().remembered.len();
        write(8000, &[1; 400]);
        assert_eq!(read(7999, 402), [&[0][..], &[1; 400], &[7]].concat());
        write(12_288, &[7; 8192]);
        assert_eq!((remembered(), read(12_288, 8192)), (1, vec![7; 8192]));
        write(13_000, &[7, 2]);
        write(13_000, &[7]);
        assert_eq!((remembered(), read(12_999, 3)), (2, vec![7, 7, 2]));
        write(12_288, &[7; 4096]);
        assert_eq!((remembered(), read(13_001, 1)), (1, vec![7]));
    }
}
