//! A drive that takes its time as a model computes and keeps little of what is written: for workloads of many
//! gigabytes.
//!
//! What is below `kept` is kept, for example metadata; what is behind it reads as zero. Nothing is recorded
//! and nothing fails: for crashes there is [`Drive`](vellum_sim::Drive).

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
    /// What is not kept reads as this.
    other: u8,
    state: Mutex<State>,
}

struct State {
    bytes: SparseBytes,
    len: u64,
}

impl ForgetfulDrive {
    /// A drive of `len` zeros that remembers what is written below `kept`.
    pub(crate) fn new(world: &World, medium: Medium, limits: Limits, len: u64, kept: u64) -> Arc<Self> {
        Self::on(Device::with(world, medium), limits, (len, kept), 0)
    }

    /// The same on a device of any kind; what is not kept reads as `other`.
    pub(crate) fn on(device: Arc<Device>, limits: Limits, (len, kept): (u64, u64), other: u8) -> Arc<Self> {
        let state = Mutex::new(State { bytes: SparseBytes::default(), len });
        Arc::new(Self { device, limits, kept, other, state })
    }

    /// The requests so far.
    pub(crate) fn counts(&self) -> IoCounts {
        self.device.counts()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    async fn pass(&self, operation: Operation, span: ImageSpan) {
        self.device.pass(operation, span).await;
    }

    /// The part of a run that is kept.
    fn kept(&self, span: ImageSpan) -> ImageSpan {
        span.intersect(ImageOffset::ZERO.span(self.kept))
    }
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
