//! The requests to a drive: kinds of operations, and sets of kinds.

use std::fmt;
use std::ops::BitOr;
use std::time::Duration;

use vellum_core::ImageSpan;

/// A kind of operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operation {
    /// Bytes out.
    Read,
    /// Bytes in.
    Write,
    /// What returned before is durable.
    Flush,
    /// A run reads as zero.
    WriteZeroes,
    /// A run is no longer needed.
    Discard,
    /// Cut off or grown.
    SetLen,
    /// Space is set aside.
    Preallocate,
}

impl Operation {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Read,
        Self::Write,
        Self::Flush,
        Self::WriteZeroes,
        Self::Discard,
        Self::SetLen,
        Self::Preallocate,
    ];

    pub(crate) fn index(self) -> usize {
        Self::ALL.iter().position(|operation| *operation == self).expect("all are listed")
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::WriteZeroes => "write-zeroes",
            Self::Discard => "discard",
            Self::SetLen => "set-len",
            Self::Preallocate => "preallocate",
        })
    }
}

/// A set of kinds of operation: `Operation::Write | Operation::Flush`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operations(u8);

impl Operations {
    /// Every kind.
    pub const ALL: Self = Self(0x7F);
    /// Every kind but reads.
    pub const ALL_BUT_READS: Self = Self(0x7E);

    /// Whether the kind is in the set.
    pub fn contains(self, operation: Operation) -> bool {
        self.0 & (1 << operation.index()) != 0
    }
}

impl From<Operation> for Operations {
    fn from(operation: Operation) -> Self {
        Self(1 << operation.index())
    }
}

impl<T: Into<Self>> BitOr<T> for Operations {
    type Output = Self;
    fn bitor(self, other: T) -> Self {
        Self(self.0 | other.into().0)
    }
}

impl<T: Into<Operations>> BitOr<T> for Operation {
    type Output = Operations;
    fn bitor(self, other: T) -> Operations {
        Operations::from(self) | other
    }
}

/// One operation as the drive sees it when it is submitted.
#[derive(Debug, Clone)]
pub struct Request {
    /// Its kind.
    pub operation: Operation,
    /// The bytes it is about: none for a flush, the bytes that remain for `set_len`.
    pub span: ImageSpan,
    /// The virtual time.
    pub now: Duration,
    /// How many operations have been submitted before and not ended.
    pub in_flight: usize,
}
