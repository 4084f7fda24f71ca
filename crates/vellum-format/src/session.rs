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
//!    [`Format::forget_session`](crate::image::Format::forget_session) takes it away.
//! 2. *Clean*: the number counts, and what the cache has under it is what the disk has. The first change of an opening
//!    without the cache makes it void, durably and before anything else is changed. So does any other program: in qcow2
//!    by an autoclear bit, in the native format because each opening that changes the image draws a new generation.
//! 3. A step is durable when it returns, and a crash during it leaves the header before or after it. A new number and
//!    the mark come with one write.
//! 4. Raw images, version 2 of qcow2 and images whose data is a raw file have no place for any of this: another program
//!    could write them, and nothing would show it.

use std::fmt;
use std::str::FromStr;

use vellum_core::{Error, ErrorKind, LocalFuture, Result};

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
    /// Bytes that its id and number take in a header.
    pub(crate) const BYTES: usize = 2 * ID_BYTES;

    /// Whether its number counts.
    pub fn counts(&self) -> bool {
        self.state != SessionState::Void
    }

    /// Whether the cache may hold writes that the image has not.
    pub fn holds_writes(&self) -> bool {
        self.state == SessionState::HoldsWrites
    }

    /// Whether it survives a change of the image in an opening with this cache. What the mark says is never lost.
    pub(crate) fn survives_changes_of(&self, flash: Option<CacheId>) -> bool {
        self.holds_writes() || (self.counts() && flash == Some(self.cache))
    }

    /// From its bytes in a header. All zero is none.
    ///
    /// # Errors
    /// `Corrupt` when they contradict themselves: there is an id without a number, a number without an id, or a mark
    /// without a number that counts.
    pub(crate) fn parse(bytes: &[u8; Self::BYTES], counts: bool, is_marked: bool) -> Result<Option<Self>> {
        let (cache, number) = bytes.split_first_chunk::<ID_BYTES>().expect("32 bytes");
        let named = (CacheId::new(*cache), SessionNumber::new(number.try_into().expect("16 bytes")));
        let state = match (counts, is_marked) {
            (true, true) => SessionState::HoldsWrites,
            (true, false) => SessionState::Clean,
            (false, false) => SessionState::Void,
            (false, true) => {
                return Err(Error::corrupt("a flash cache holds writes, and no session says which"));
            }
        };
        match named {
            (Some(cache), Some(number)) => Ok(Some(Self { cache, number, state })),
            (None, None) if !is_marked => Ok(None),
            _ => Err(Error::corrupt("what it records of a flash cache contradicts itself")),
        }
    }

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..ID_BYTES].copy_from_slice(&self.cache.0);
        bytes[ID_BYTES..].copy_from_slice(&self.number.0);
        bytes
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

/// The error of beginning a session of an image that is not open for writing with a cache, or has no place for one.
pub(crate) fn not_tied(name: &str) -> Error {
    Error::invalid(format!("{name} is not open for writing with a flash cache"))
}

/// Checks that an image called `name` may be opened or changed by a program that has the cache `flash`, or none.
///
/// # Errors
/// `Refused`, with the reason and what can be done.
pub fn may_use(name: &str, session: Option<Session>, flash: Option<CacheId>) -> Result<()> {
    let Some(Session { cache, .. }) = session.filter(|one| one.holds_writes() && flash != Some(one.cache))
    else {
        return Ok(());
    };
    let remedy = format!(
        "complete the image with `vellum flash recover --full CACHE {name}`, where CACHE is the path of the cache that has this \
         id, or give these writes up with `vellum flash forget {name}`"
    );
    let why = match flash {
        None => format!(
            "{name} is behind its disk: the flash cache {cache} holds writes of it. Use it with that cache, {remedy}"
        ),
        Some(other) => format!(
            "{name} is behind its disk: the flash cache {cache} holds writes of it, and this is the cache {other}. Use it \
             with the other cache, {remedy}"
        ),
    };
    Err(Error::new(ErrorKind::Refused, why))
}

/// Checks that no cache holds writes of an open image called `name`, for a change that needs all of its disk in it.
///
/// # Errors
/// `Refused`, with what can be done.
pub fn must_be_drained(name: &str, session: Option<Session>) -> Result<()> {
    match session.filter(Session::holds_writes) {
        None => Ok(()),
        Some(Session { cache, .. }) => Err(Error::new(
            ErrorKind::Refused,
            format!(
                "the flash cache {cache} may hold writes of {name}: drain it first with `vellum flash drain CACHE {name}`, or \
                 with --control where it is served"
            ),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(state: SessionState) -> Session {
        Session { cache: CacheId::new([3; 16]).unwrap(), number: SessionNumber::new([9; 16]).unwrap(), state }
    }

    #[test]
    fn what_is_recorded_is_read_again() {
        for state in [SessionState::Void, SessionState::Clean, SessionState::HoldsWrites] {
            let session = session(state);
            let bytes = session.encode();
            assert_eq!(
                Session::parse(&bytes, session.counts(), session.holds_writes()).unwrap(),
                Some(session)
            );
        }
        let bytes = session(SessionState::Clean).encode();
        Session::parse(&bytes, false, true).expect_err("a mark without a number that counts");
        for half in [0..16, 16..32] {
            let mut wrong = bytes;
            wrong[half].fill(0);
            Session::parse(&wrong, true, false).expect_err("one without the other");
        }
        assert_eq!(Session::parse(&[0; 32], true, false).unwrap(), None);
        Session::parse(&[0; 32], true, true).expect_err("a mark of no cache");
    }

    #[test]
    fn only_its_own_cache_opens_an_image_that_is_behind() {
        let (own, other) = (CacheId::new([3; 16]), CacheId::new([4; 16]));
        for (state, opens) in [
            (SessionState::Void, [true; 3]),
            (SessionState::Clean, [true; 3]),
            (SessionState::HoldsWrites, [false, true, false]),
        ] {
            let named = Some(session(state));
            assert_eq!(
                [None, own, other].map(|flash| may_use("i", named, flash).is_ok()),
                opens,
                "{state:?}"
            );
        }
        let error =
            may_use("disk.qcow2", Some(session(SessionState::HoldsWrites)), None).unwrap_err().chain();
        for part in [
            "disk.qcow2",
            &"03".repeat(16),
            "recover --full CACHE disk.qcow2",
            "vellum flash forget disk.qcow2",
        ] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_change_without_the_cache_makes_the_number_void_but_never_the_mark() {
        let (own, other) = (CacheId::new([3; 16]), CacheId::new([4; 16]));
        let outlives = |state| [None, own, other].map(|flash| session(state).survives_changes_of(flash));
        assert_eq!(outlives(SessionState::Void), [false; 3]);
        assert_eq!(outlives(SessionState::Clean), [false, true, false]);
        assert_eq!(outlives(SessionState::HoldsWrites), [true; 3]);
    }

    #[test]
    fn ids_have_thirty_two_digits() {
        let text = "00ff0000000000000000000000000001";
        assert_eq!(text.parse::<CacheId>().unwrap().to_string(), text);
        for wrong in ["", "0", "00000000000000000000000000000000", "+0ff0000000000000000000000000001", "zz"] {
            wrong.parse::<SessionNumber>().unwrap_err();
        }
    }
}
