//! How a clone names the snapshot that it stands on.
//!
//! ```text
//!   name      images/web.vlm@monday#7        the image, as any backing file is named; the snapshot's name; its id
//!   format    vellum-snapshot
//! ```
//!
//! 1. The format decides, not the name: a file whose name has an `@` is meant whenever another format is recorded.
//! 2. The last `#` and the last `@` before it divide the name. Names of snapshots that have an `@` cannot be
//!    stored, so the division is unique whatever the file is called.
//! 3. The id is never used again, so a snapshot that was deleted and made again under the same name is not
//!    mistaken for the one that the clone stands on.
//! 4. No other program knows the format, so none reads such a clone as if the file itself were below it.

use std::fmt;

use vellum_core::{Error, Result};

/// The recorded format of a backing image that is a snapshot.
pub const SNAPSHOT_FORMAT: &str = "vellum-snapshot";

/// A snapshot of an image file, as the image below a clone.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SnapshotBase {
    /// The name of the image file.
    pub file: String,
    /// Which of its snapshots.
    pub snapshot: SnapshotKey,
}

/// A snapshot of an image.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SnapshotKey {
    /// Its name.
    pub name: String,
    /// Its number.
    pub id: u32,
}

impl SnapshotBase {
    /// The name for the header of a clone.
    ///
    /// # Errors
    /// `Invalid` when the snapshot's name has an `@`.
    pub fn encode(&self) -> Result<String> {
        let SnapshotKey { name, id } = &self.snapshot;
        match name.contains('@') {
            false => Ok(format!("{}@{name}#{id}", self.file)),
            true => Err(Error::invalid(format!(
                "clones of snapshot {name:?} cannot be made, because its name contains an \"@\": make a snapshot with \
                 another name"
            ))),
        }
    }

    /// Reads the name that a header has beside [`SNAPSHOT_FORMAT`].
    ///
    /// # Errors
    /// `Corrupt` when it is none.
    pub fn parse(text: &str) -> Result<Self> {
        let parsed = || {
            let (rest, id) = text.rsplit_once('#')?;
            let (file, name) = rest.rsplit_once('@')?;
            let is_number = id.bytes().all(|byte| byte.is_ascii_digit()) && !id.starts_with('0');
            let id: u32 = id.parse().ok().filter(|_| is_number)?;
            let snapshot = SnapshotKey { name: name.to_owned(), id };
            (!file.is_empty() && !name.is_empty()).then(|| Self { file: file.to_owned(), snapshot })
        };
        parsed().ok_or_else(|| {
            Error::corrupt(format!("the backing image {text:?} is not the name of a snapshot, FILE@NAME#ID"))
        })
    }
}

impl fmt::Display for SnapshotKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (ID {})", self.name, self.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_as_it_was_written() {
        for (file, name, id) in [
            ("web.vlm", "monday", 7),
            ("/images/a@b.vlm", "x", 1),
            ("a#3@b#4.vlm", "n#5", 4_000_000_000),
            ("./od:d.vlm", "a b/c", 12),
        ] {
            let snapshot = SnapshotKey { name: name.to_owned(), id };
            let base = SnapshotBase { file: file.to_owned(), snapshot };
            assert_eq!(SnapshotBase::parse(&base.encode().unwrap()).unwrap(), base);
        }
        let snapshot = SnapshotKey { name: "a@b".to_owned(), id: 1 };
        assert!(SnapshotBase { file: "web.vlm".to_owned(), snapshot }.encode().is_err());
    }

    #[test]
    fn what_is_no_such_name_is_refused() {
        for text in [
            "",
            "web.vlm",
            "web.vlm@monday",
            "web.vlm#7",
            "@monday#7",
            "web.vlm@#7",
            "web.vlm@monday#",
            "web.vlm@monday#x",
            "web.vlm@monday#07",
            "web.vlm@monday#+7",
            "web.vlm@monday#5000000000",
            "web.vlm@monday#7 ",
        ] {
            assert!(SnapshotBase::parse(text).is_err(), "{text:?}");
        }
    }
}
