//! Which of two images a disk is written in, while it moves from one to the other.
//!
//! A migration has two images: the source, which the disk moves away from, and the target, which it moves to. Each
//! records in its own header how far it is, with the number of the move. At most one of the two can be opened for
//! writing, whatever crashes in between. `vellum-layer/migrate.rs` has the order of the steps; this is what a header
//! says, and what it forbids.
//!
//! ```text
//!   target   created ─► awaiting N ── accept ──► arrived N      written from here on
//!                          │
//!                          └──────── void ─────► void N         never written
//!   source   written ── fix ──► moved N ── seal ──► gone N      never written
//!              ▲                   │                            unless the target is void:
//!              └───── restore ─────┘
//! ```
//!
//! 1. An image that is awaiting, moved, gone or void is not opened for writing, and nothing changes it but the steps of
//!    the migration. An incompatible feature keeps other programs, and older ones, from it.
//! 2. A step is durable when it returns, and a crash during it leaves the state before or after it.
//! 3. The number is the target's, made when the target is created. A source that has moved under a number has moved
//!    to that target and to no other.

use std::fmt;
use std::str::FromStr;

use vellum_core::{Error, ErrorKind, Result};

/// The number of a move. It is random, and never zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct MoveNumber([u8; 16]);

impl MoveNumber {
    /// The number with these bytes; `None` if they are all zero.
    pub fn new(bytes: [u8; 16]) -> Option<Self> {
        bytes.iter().any(|byte| *byte != 0).then_some(Self(bytes))
    }

    /// A new one.
    ///
    /// # Errors
    /// `Io` when the system provides no random numbers.
    #[expect(clippy::disallowed_methods, reason = "no other migration may have the number")]
    pub fn random() -> Result<Self> {
        let mut bytes = [0; 16];
        let filled = getrandom::fill(&mut bytes).map_err(|error| {
            Error::new(
                ErrorKind::Io,
                format!("the system provides no random numbers for a migration: {error}"),
            )
        });
        filled.and_then(|()| Self::new(bytes).ok_or_else(|| Error::invalid("the random number is zero")))
    }

    /// What the target's server says once the target has taken over, and the source is asked for before it is given up
    /// for good. It guards against a step that is taken too early by mistake, and is no secret.
    pub fn receipt(self) -> String {
        // FNV-1a, behind a word of its own: nobody has it who has not asked.
        let mix = |hash: u32, byte: &u8| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
        let hash = b"arrived".iter().chain(&self.0).fold(0x811c_9dc5, mix);
        format!("{hash:08x}")
    }

    pub(crate) fn bytes(self) -> [u8; 16] {
        self.0
    }
}

impl fmt::Display for MoveNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for MoveNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for MoveNumber {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let number =
            u128::from_str_radix(text, 16).ok().filter(|_| text.len() == 32 && !text.starts_with('+'));
        number.and_then(|number| Self::new(number.to_be_bytes())).ok_or_else(|| {
            Error::invalid(format!("{text:?} is no number of a migration: it has 32 hexadecimal digits"))
        })
    }
}

/// What an image records of the migration that it takes part in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handover {
    /// A target, before the source has moved.
    Awaiting(MoveNumber),
    /// A target that has taken over: an image like any other.
    Arrived(MoveNumber),
    /// A source whose disk is now that of the target with this number.
    Moved(MoveNumber),
    /// A target that was given up.
    Void(MoveNumber),
    /// A source whose target has taken over: nothing takes the disk back.
    Gone(MoveNumber),
}

impl Handover {
    const ALL: [fn(MoveNumber) -> Self; 5] =
        [Self::Awaiting, Self::Arrived, Self::Moved, Self::Void, Self::Gone];

    /// Bytes that it takes in a header: a state, zeros, the number.
    pub(crate) const BYTES: usize = 24;

    /// Whether the image may be written.
    pub fn allows_writing(self) -> bool {
        matches!(self, Self::Arrived(_))
    }

    /// The number of the move.
    pub fn number(self) -> MoveNumber {
        match self {
            Self::Awaiting(number)
            | Self::Arrived(number)
            | Self::Moved(number)
            | Self::Void(number)
            | Self::Gone(number) => number,
        }
    }

    /// Its name in the interfaces of programs.
    pub fn word(self) -> &'static str {
        match self {
            Self::Awaiting(_) => "awaiting",
            Self::Arrived(_) => "arrived",
            Self::Moved(_) => "moved",
            Self::Void(_) => "void",
            Self::Gone(_) => "gone",
        }
    }

    /// From its name and the digits of its number.
    ///
    /// # Errors
    /// `Invalid` when they are none.
    pub fn of_words(word: &str, number: &str) -> Result<Self> {
        let number = number.parse()?;
        let found = Self::ALL.into_iter().map(|of| of(number)).find(|handover| handover.word() == word);
        found.ok_or_else(|| Error::invalid(format!("{word:?} is no state of a migration")))
    }

    /// From its bytes in a header. `forbids_writing`: the feature bit is set.
    ///
    /// # Errors
    /// `Corrupt` when they contradict themselves or the bit.
    pub(crate) fn parse(bytes: &[u8; Self::BYTES], forbids_writing: bool) -> Result<Option<Self>> {
        let (state, rest) = bytes.split_first_chunk::<4>().expect("24 bytes");
        let (zeros, number) = rest.split_first_chunk::<4>().expect("20 bytes");
        let number = MoveNumber::new(number.try_into().expect("16 bytes"));
        let found = match (u32::from_be_bytes(*state), number) {
            (0, None) => None,
            (1, Some(number)) => Some(Self::Awaiting(number)),
            (2, Some(number)) => Some(Self::Arrived(number)),
            (3, Some(number)) => Some(Self::Moved(number)),
            (4, Some(number)) => Some(Self::Void(number)),
            (5, Some(number)) => Some(Self::Gone(number)),
            _ => return Err(Error::corrupt("what it records of a migration contradicts itself")),
        };
        let should_forbid = found.is_some_and(|handover| !handover.allows_writing());
        if *zeros != [0; 4] || should_forbid != forbids_writing {
            return Err(Error::corrupt("what it records of a migration contradicts its feature bit"));
        }
        Ok(found)
    }

    pub(crate) fn encode(handover: Option<Self>) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        if let Some(handover) = handover {
            let state: u32 = match handover {
                Self::Awaiting(_) => 1,
                Self::Arrived(_) => 2,
                Self::Moved(_) => 3,
                Self::Void(_) => 4,
                Self::Gone(_) => 5,
            };
            bytes[..4].copy_from_slice(&state.to_be_bytes());
            bytes[8..].copy_from_slice(&handover.number().bytes());
        }
        bytes
    }
}

/// Checks that an image called `name` may be changed.
///
/// # Errors
/// `Refused`, with the reason and what can be done.
pub fn may_change(name: &str, handover: Option<Handover>) -> Result<()> {
    let why = match handover {
        None | Some(Handover::Arrived(_)) => return Ok(()),
        Some(Handover::Moved(number)) => format!(
            "{name} has moved (migration {number}): its disk is written on the target host, and this image never \
             again. Read it with -r, copy it with `vellum convert`, or take the disk back with `vellum migrate abort`"
        ),
        Some(Handover::Awaiting(number)) => format!(
            "{name} awaits its disk (migration {number}): it is written once the source has moved, and only read \
             until then. Finish with `vellum migrate run`, or give it up with `vellum migrate abort`"
        ),
        Some(Handover::Gone(number)) => format!(
            "{name} has moved for good (migration {number}): its disk is written on the target host. Read it with -r, or \
             copy it with `vellum convert`"
        ),
        Some(Handover::Void(number)) => format!(
            "{name} was given up (migration {number}): its disk stays on the source host. Finish with `vellum migrate \
             abort`, then delete this image"
        ),
    };
    Err(Error::new(ErrorKind::Refused, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number() -> MoveNumber {
        MoveNumber::new([7; 16]).unwrap()
    }

    #[test]
    fn what_is_recorded_is_read_again() {
        let all = Handover::ALL.map(|of| of(number()));
        for handover in all.into_iter().map(Some).chain([None]) {
            let bytes = Handover::encode(handover);
            let forbids = handover.is_some_and(|handover| !handover.allows_writing());
            assert_eq!(Handover::parse(&bytes, forbids).unwrap(), handover);
            Handover::parse(&bytes, !forbids).unwrap_err();
            if let Some(handover) = handover {
                let said = handover.number().to_string();
                assert_eq!(Handover::of_words(handover.word(), &said).unwrap(), handover);
            }
            assert_eq!(may_change("x", handover).is_err(), forbids);
            for at in 0..8 {
                let mut wrong = bytes;
                wrong[at] ^= 0x40;
                Handover::parse(&wrong, forbids).unwrap_err();
            }
        }
        let mut without_number = [0; Handover::BYTES];
        without_number[3] = 3;
        Handover::parse(&without_number, true).unwrap_err();
    }

    #[test]
    fn numbers_have_thirty_two_digits() {
        let text = "00ff0000000000000000000000000001";
        assert_eq!(text.parse::<MoveNumber>().unwrap().to_string(), text);
        for wrong in ["", "0", "00000000000000000000000000000000", "+0ff0000000000000000000000000001", "zz"] {
            wrong.parse::<MoveNumber>().unwrap_err();
        }
    }
}
