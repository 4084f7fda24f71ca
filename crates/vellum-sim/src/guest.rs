//! What a guest asked of a disk, as an oracle records it and an expectation judges by it.

use std::sync::Arc;

use vellum_core::{GuestOffset, GuestSpan};

use crate::mix::mix;
use crate::world::Position;

/// A guest's request to a disk, as far as an oracle needs it.
#[derive(Debug, Clone)]
pub enum GuestRequest {
    /// The bytes from an offset on are these.
    Write {
        /// Where the first byte goes.
        at: GuestOffset,
        /// The bytes.
        data: Arc<[u8]>,
        /// Durable when it returns.
        fua: bool,
    },
    /// The run reads as zero.
    WriteZeroes {
        /// The run.
        span: GuestSpan,
        /// Durable when it returns.
        fua: bool,
    },
    /// The run reads as zero or as before.
    Discard {
        /// The run.
        span: GuestSpan,
    },
    /// What has returned is durable.
    Flush,
}

impl GuestRequest {
    pub(crate) fn span(&self) -> GuestSpan {
        match self {
            Self::Write { at, data, .. } => at.span(data.len() as u64),
            Self::WriteZeroes { span, .. } | Self::Discard { span } => *span,
            Self::Flush => GuestOffset::ZERO.span(0),
        }
    }

    /// A number that stands for the place and the bytes of a write.
    pub(crate) fn digest(&self) -> u64 {
        let Self::Write { at, data, .. } = self else { return 0 };
        data.chunks(8).fold(mix(at.bytes(), data.len() as u64), |digest, chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            mix(digest, u64::from_le_bytes(word))
        })
    }

    pub(crate) fn is_fua(&self) -> bool {
        matches!(self, Self::Write { fua: true, .. } | Self::WriteZeroes { fua: true, .. })
    }
}

/// A change, as of some position.
#[derive(Debug, Clone)]
pub(crate) struct Fact {
    pub(crate) number: usize,
    pub(crate) request: GuestRequest,
    /// Stands for what a write writes.
    pub(crate) digest: u64,
    pub(crate) submitted: Position,
    /// When it returned.
    pub(crate) ended: Option<Position>,
    /// It is sure to be there, unless something later is.
    pub(crate) durable: bool,
    /// It may not have happened at all although it has ended: it failed, or a crash may have lost it.
    pub(crate) uncertain: bool,
}
