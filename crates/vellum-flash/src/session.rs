//! Which flash cache holds writes of an image's disk, and what its clean blocks are still good for.
//!
//! A flash cache lies over the disk and outside of the image. What ties the two together is a *session*: the id of the
//! cache, and a number that the cache has drawn. Both stand in the image's header. The cache has the number in its row
//! for the disk, and believes its own blocks only where the image names it.
//!
//! ```text
//!   void ──── begin ────► holds writes ──── clear the mark ────► clean ──── a change without the cache ────► void
//!    ▲                      │     ▲                                │
//!    └────── forget ────────┘     └──────────── begin ─────────────┘
//! ```
//!
//! 1. *Holds writes*: the mark. The image may be behind its disk, so it is opened with this cache or not at all. An
//!    incompatible feature keeps other programs, and older ones, from it. Nothing but [`Sessions`] and
//!    `Format::forget_session` takes it away.
//! 2. *Clean*: the number counts, and what the cache has under it is what the disk has. The first change of an opening
//!    without the cache makes it void, durably and before anything else is changed. So does any other program: in qcow2
//!    by an autoclear bit, in the native format because each opening that changes the image draws a new generation.
//! 3. A step is durable when it returns, and a crash during it leaves the header before or after it. A new number and
//!    the mark come with one write.
//! 4. Raw images, version 2 of qcow2 and images whose data is a raw file have no place for any of this: another program
//!    could write them, and nothing would show it.

use std::fmt;
use std::str::FromStr;

use vellum_core::{Error, LocalFuture, Result};

/// Bytes of an id and of a number.
const ID_BYTES: usize = 16;

/// A type for sixteen random bytes, which are not all zero.
macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name([u8; ID_BYTES]);

        impl $name {
            /// With these bytes; `None` if they are all zero.
            pub fn new(bytes: [u8; ID_BYTES]) -> Option<Self> {
                bytes.iter().any(|byte| *byte != 0).then_some(Self(bytes))
            }

            /// Its bytes.
            pub fn bytes(self) -> [u8; ID_BYTES] {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self> {
                let number = u128::from_str_radix(text, 16).ok();
                let number = number.filter(|_| text.len() == 2 * ID_BYTES && !text.starts_with('+'));
                number.and_then(|number| Self::new(number.to_be_bytes())).ok_or_else(|| {
                    Error::invalid(format!(concat!("{:?} is no ", $what, ": it has 32 hexadecimal digits"), text))
                })
            }
        }
    };
}

random_id!(
    /// The id of a flash cache. It is random, and never zero.
    CacheId,
    "id of a flash cache"
);
random_id!(
    /// The number of a session. It is random, and never zero.
    SessionNumber,
    "number of a session"
);

/// How far a session counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionState {
    /// The image was changed without the cache: nothing that the cache has of it is good for anything.
    Void,
    /// The number counts, and the image is complete.
    Clean,
    /// The number counts, and the cache may hold writes that the image has not.
    HoldsWrites,
}

impl SessionState {
    /// Its name in the interfaces of programs.
    pub fn word(self) -> &'static str {
        match self {
            Self::Void => "void",
            Self::Clean => "clean",
            Self::HoldsWrites => "holds-writes",
        }
    }
}

/// The session that an image names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Session {
    /// Which cache.
    pub cache: CacheId,
    /// Its number.
    pub number: SessionNumber,
    /// How far it counts.
    pub state: SessionState,
}

impl Session {
    /// Whether its number counts.
    pub fn counts(&self) -> bool {
        self.state != SessionState::Void
    }

    /// Whether the cache may hold writes that the image has not.
    pub fn holds_writes(&self) -> bool {
        self.state == SessionState::HoldsWrites
    }
}

/// The session of an image that is open with its cache, so for a program that puts the cache over its disk.
///
/// No two calls overlap. A failure of one that has begun to write stops the image.
pub trait Sessions: Send + Sync {
    /// The session that the image names.
    fn session(&self) -> LocalFuture<'_, Option<Session>>;

    /// Names a new session of the cache that the image was opened with, and with `holds_writes` sets the mark, in one
    /// write of the header. It is durable when this returns. To be called before the first write of an opening, when
    /// the number is durable in the cache's row for the disk.
    ///
    /// # Errors
    /// `NoSpace` when the header has no room, `Corrupt` for an image that is marked corrupt, and the errors of the
    /// image.
    fn begin(&self, number: SessionNumber, holds_writes: bool) -> LocalFuture<'_, Result<()>>;

    /// Takes the mark away. What the disk has been written is made durable before that. The number goes on counting.
    /// To be called when the cache holds no write any more that the disk has not.
    ///
    /// # Errors
    /// Those of the image.
    fn clear_mark(&self) -> LocalFuture<'_, Result<()>>;

    /// Takes away mark and session, durably: nothing of the cache counts for this image any more. As for
    /// [`clear_mark`](Self::clear_mark), the cache holds no write that the disk has not.
    ///
    /// # Errors
    /// Those of the image.
    fn end(&self) -> LocalFuture<'_, Result<()>>;
}
