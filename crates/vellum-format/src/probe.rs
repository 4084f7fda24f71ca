//! Which format a file has, by its first bytes.
//!
//! Guessing is for reading only. The guest of a raw disk can write any first bytes it likes, so what is opened for
//! writing without a format named by the user, and was not found to be something else than raw, is refused by the
//! caller (see `vellum-layer`).

use std::fmt;
use std::str::FromStr;

use vellum_core::{Buffer, Error, ImageOffset, Result, Storage};

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
}

impl fmt::Display for FormatKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
            Self::Native => "vellum",
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
            other => {
                Err(Error::unsupported(format!("format {other} is not known (raw, qcow2 and vellum are)")))
            }
        }
    }
}

/// Signatures of formats that other programs know and this one does not, so that such a file is not taken for raw.
const FOREIGN: [(&[u8], &str); 8] = [
    (b"QFI\xFB\0\0\0\x01", "qcow (version 1)"),
    (b"KDMV", "VMDK"),
    (b"# Disk DescriptorFile", "VMDK"),
    (b"vhdxfile", "VHDX"),
    (b"conectix", "VHD"),
    (b"QED\0", "QED"),
    (b"LUKS\xBA\xBE", "LUKS"),
    (b"WithoutFreeSpace", "Parallels"),
];

/// Guesses the format by the first bytes: raw when nothing else fits.
///
/// # Errors
/// `Unsupported`, with its name, when the file has a format that this program does not read.
pub async fn probe(storage: &dyn Storage) -> Result<FormatKind> {
    let first = storage.read(ImageOffset::ZERO, Buffer::for_overwrite(512)).await?;
    let first = first.slice();
    if let Some((_, name)) = FOREIGN.iter().find(|(magic, _)| first.starts_with(magic)) {
        return Err(Error::unsupported(format!(
            "{} looks like a {name} image, which is not supported (if it is a raw disk, say `-f raw`)",
            storage.name()
        )));
    }
    if first.starts_with(b"QFI\xFB") {
        return Ok(FormatKind::Qcow2);
    }
    if first.starts_with(&MAGIC) {
        return Ok(FormatKind::Native);
    }
    // The first copy of the superblock may be damaged.
    let second = storage.read(Slot::B.offset(), Buffer::for_overwrite(MAGIC.len())).await?;
    Ok(if second.slice() == MAGIC { FormatKind::Native } else { FormatKind::Raw })
}
