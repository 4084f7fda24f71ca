//! Which format a file has, judged by its content.
//!
//! Probing is for reading only, because the guest of a raw disk can write any first bytes that it likes.
//! Unless the user names a format, the caller refuses to open an image read-write when probing finds no
//! format but raw (see `vellum-layer`).

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use vellum_core::{Buffer, Error, ErrorKind, ImageOffset, Result, Storage};
use vellum_foreign::ForeignKind;

use crate::foreign::{Foreign, foreign};
use crate::native::Slot;
use crate::native::superblock::MAGIC;

/// The formats this program knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FormatKind {
    /// The disk, byte for byte.
    Raw,
    /// QEMU's copy-on-write format.
    Qcow2,
    /// Vellum's own.
    Native,
    /// One of another program, which is only read.
    Foreign(ForeignKind),
    /// A disk that is encrypted as a whole, with a LUKS header in front.
    Luks,
}

impl FormatKind {
    /// The format that a file's name suggests, if any.
    pub fn of_name(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "raw" => Some(Self::Raw),
            "qcow2" => Some(Self::Qcow2),
            "vlm" => Some(Self::Native),
            _ => ForeignKind::of_name(path).map(Self::Foreign),
        }
    }

    /// Fails unless images of this format can be made and changed.
    ///
    /// # Errors
    /// `ReadOnly`, with the formats that can.
    pub fn check_is_written(self) -> Result<()> {
        match self {
            // A new LUKS image is refused where it would be made; an existing one is written.
            Self::Raw | Self::Qcow2 | Self::Native | Self::Luks => Ok(()),
            Self::Foreign(kind) => Err(Error::new(
                ErrorKind::ReadOnly,
                format!("{kind} images are only read: to make one, use raw, qcow2 or vellum as its format"),
            )),
        }
    }
}

impl fmt::Display for FormatKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
            Self::Native => "vellum",
            Self::Foreign(kind) => kind.qemu_name(),
            Self::Luks => "luks",
        })
    }
}

impl FromStr for FormatKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "raw" => Ok(Self::Raw),
            "qcow2" => Ok(Self::Qcow2),
            "vellum" => Ok(Self::Native),
            "luks" => Ok(Self::Luks),
            other => ForeignKind::named(other).map(Self::Foreign).ok_or_else(|| {
                let read: Vec<&str> = ForeignKind::ALL.map(ForeignKind::qemu_name).to_vec();
                Error::unsupported(format!(
                    "unknown format {other}: use raw, qcow2, vellum or luks, or, to read an image of another program, {}",
                    read.join(", ")
                ))
            }),
        }
    }
}

/// The format that a file's content suggests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Guess {
    /// A format that is read here.
    Known(FormatKind),
    /// One that is not.
    Foreign(Foreign),
}

/// Guesses the format by the file's content: raw when nothing else fits.
///
/// # Errors
/// The errors of reading.
pub async fn guess(storage: &dyn Storage) -> Result<Guess> {
    let first = storage.read(ImageOffset::ZERO, Buffer::for_overwrite(512)).await?;
    let first = first.slice();
    // These are checked first: the guest can write the end of such a file.
    if first.starts_with(b"QFI\xFB") && !first.starts_with(b"QFI\xFB\0\0\0\x01") {
        return Ok(Guess::Known(FormatKind::Qcow2));
    }
    if first.starts_with(&MAGIC) {
        return Ok(Guess::Known(FormatKind::Native));
    }
    if first.starts_with(b"LUKS\xBA\xBE\0\x01") || first.starts_with(b"LUKS\xBA\xBE\0\x02") {
        return Ok(Guess::Known(FormatKind::Luks));
    }
    // The first copy of the superblock may be damaged.
    let second = storage.read(Slot::B.offset(), Buffer::for_overwrite(MAGIC.len())).await?;
    if second.slice() == MAGIC {
        return Ok(Guess::Known(FormatKind::Native));
    }
    Ok(match foreign(storage).await? {
        None => Guess::Known(FormatKind::Raw),
        Some(Foreign { reader: Some(kind), .. }) => Guess::Known(FormatKind::Foreign(kind)),
        Some(foreign) => Guess::Foreign(foreign),
    })
}

/// As above, for callers that cannot use a format that is not read here.
///
/// # Errors
/// `Unsupported`, with its name and the way out, for such a format; the errors of reading.
pub async fn probe(storage: &dyn Storage) -> Result<FormatKind> {
    match guess(storage).await? {
        Guess::Known(kind) => Ok(kind),
        Guess::Foreign(foreign) => Err(foreign.refusal(storage.name())),
    }
}
