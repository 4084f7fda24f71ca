//! One error type for the whole engine: a kind for the program, a context for the person, a source for both.
//!
//! ```text
//!   vellum: can't open image disk.qcow2        ← context of the outermost error
//!     caused by: can't open backing image base.raw (depth 1)
//!     caused by: No such file or directory (os error 2)
//! ```
//!
//! 1. The *kind* is what code may match on; it does not change as an error gains context.
//! 2. The *context* says what was being done and to which file; where there is a remedy, it also says that.
//! 3. The *source* is never repeated in the context.
//!
//! Errors are cheap to clone, because one failed host flush fails many guest requests.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;

/// The result of anything that can fail in Vellum.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of a failure, which a program can act on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The host failed to read, write or flush.
    Io,
    /// There is no room left on the host.
    NoSpace,
    /// The image contradicts itself; nothing was assumed about what was meant.
    Corrupt,
    /// The image or the peer requires something that this program does not support.
    Unsupported,
    /// The request is invalid: past the end, misaligned, a bad option.
    Invalid,
    /// A write to something that was opened read-only.
    ReadOnly,
    /// Another program has the image open in a way that excludes this one.
    Locked,
    /// The requested file, image or peer does not exist.
    NotFound,
    /// A file or URL that an image refers to is not allowed.
    Refused,
    /// What an image was made over is not what it was.
    Changed,
    /// An earlier host flush failed, so nothing written since can be trusted: reopen and recover.
    Poisoned,
    /// The disk, connection or file was closed.
    Closed,
}

impl ErrorKind {
    /// The kind that an error of the operating system is.
    pub fn of_io(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                Self::NoSpace
            }
            io::ErrorKind::NotFound => Self::NotFound,
            io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => Self::ReadOnly,
            io::ErrorKind::InvalidInput => Self::Invalid,
            io::ErrorKind::Unsupported => Self::Unsupported,
            _ => Self::Io,
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Io => "input/output error",
            Self::NoSpace => "no space left",
            Self::Corrupt => "corrupt image",
            Self::Unsupported => "not supported",
            Self::Invalid => "invalid request",
            Self::ReadOnly => "read-only",
            Self::Locked => "in use",
            Self::NotFound => "not found",
            Self::Refused => "refused",
            Self::Changed => "changed",
            Self::Poisoned => "stopped after a failed flush",
            Self::Closed => "closed",
        })
    }
}

/// A failure: kind, context and source. The module describes the role of each.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

struct Inner {
    kind: ErrorKind,
    context: Cow<'static, str>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

impl Error {
    /// A failure that originates here.
    pub fn new(kind: ErrorKind, context: impl Into<Cow<'static, str>>) -> Self {
        Self(Arc::new(Inner { kind, context: context.into(), source: None }))
    }

    /// A failure of the operating system while doing what `context` says.
    pub fn io(source: io::Error, context: impl Into<Cow<'static, str>>) -> Self {
        let kind = ErrorKind::of_io(&source);
        Self(Arc::new(Inner { kind, context: context.into(), source: Some(Arc::new(source)) }))
    }

    /// The failure `errno` of the operating system while doing what `context` says.
    pub fn os(errno: i32, context: impl Into<Cow<'static, str>>) -> Self {
        Self::io(io::Error::from_raw_os_error(errno), context)
    }

    /// An image that contradicts itself.
    pub fn corrupt(context: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Corrupt, context)
    }

    /// A request that is wrong.
    pub fn invalid(context: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Invalid, context)
    }

    /// Something that this program does not support.
    pub fn unsupported(context: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Unsupported, context)
    }

    /// The same failure, seen from a caller: `context` says what was being done there.
    #[must_use]
    pub fn context(self, context: impl Into<Cow<'static, str>>) -> Self {
        let kind = self.kind();
        Self(Arc::new(Inner { kind, context: context.into(), source: Some(Arc::new(self)) }))
    }

    /// The same failure with another kind, for the rare caller that knows better.
    #[must_use]
    pub fn with_kind(self, kind: ErrorKind) -> Self {
        let inner = &*self.0;
        Self(Arc::new(Inner { kind, context: inner.context.clone(), source: inner.source.clone() }))
    }

    /// What a program may match on.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The error and all its causes in one line, outermost first.
    pub fn chain(&self) -> String {
        let mut line = self.to_string();
        let mut next = self.source();
        while let Some(cause) = next {
            line.push_str(": ");
            line.push_str(&cause.to_string());
            next = cause.source();
        }
        line
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.context)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind(), self.chain())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_ref().map(|source| &**source as &(dyn StdError + 'static))
    }
}

/// Adds what was being done to a failure on its way to the caller.
pub trait Context<T> {
    /// Wraps the error, if there is one; the closure runs only then.
    fn context<C: Into<Cow<'static, str>>>(self, context: impl FnOnce() -> C) -> Result<T>;
}

impl<T> Context<T> for Result<T> {
    fn context<C: Into<Cow<'static, str>>>(self, context: impl FnOnce() -> C) -> Result<T> {
        self.map_err(|error| error.context(context()))
    }
}

impl<T> Context<T> for io::Result<T> {
    fn context<C: Into<Cow<'static, str>>>(self, context: impl FnOnce() -> C) -> Result<T> {
        self.map_err(|error| Error::io(error, context()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_survives_context_and_the_chain_has_all_of_it() {
        let error = Error::os(28, "can't write cluster 7").context("can't convert a.raw");
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert_eq!(error.to_string(), "can't convert a.raw");
        assert!(error.chain().starts_with("can't convert a.raw: can't write cluster 7: No space left"));
    }
}
