//! The pin of an image: what proves that the images below it still have the content that it was made over.
//!
//! ```text
//!   etag 2147483648 "9b2cf535f27731c974343645a3985328"      one line for each image below, from the top down:
//!   file 1073741824 131077-1764042000000000000              kind, length in bytes, value
//! ```
//!
//! An image that has taken copies of bytes of its base, or only some of the base's bytes, would be a mixture over
//! any other base. So it records the pin before the first byte is used, and an opening that finds another
//! content fails.
//!
//! 1. A pin is text of at most [`Pin::BYTES_MAX`] bytes, and [`Pin::parse`] is the only way in. A value is
//!    printable ASCII of at most [`Proof::VALUE_MAX`] bytes, so that it can be printed, and stored in a header.
//! 2. Two pins agree when they have equally many proofs, and each pair agrees: kind, length and value are equal.
//!    A base that the user trusts ([`ProofKind::Trusted`]) only needs the same length.
//! 3. A value is never secret: it is printed.

use std::fmt;

use crate::{Error, Result};

/// What a proof rests on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ProofKind {
    /// A strong entity tag of HTTP.
    Etag,
    /// The version of an object in a store.
    Version,
    /// The digest of a template's index.
    Index,
    /// The number of a local file and the time of its last change.
    File,
    /// A protected snapshot of a Ceph cluster: cluster, pool, image and number.
    Snapshot,
    /// An image that a migration has moved away from, which never changes again: the number of the migration.
    Moved,
    /// Only the user's word that the content never changes.
    Trusted,
}

impl ProofKind {
    const ALL: [Self; 7] =
        [Self::Etag, Self::Version, Self::Index, Self::File, Self::Snapshot, Self::Moved, Self::Trusted];

    /// Its name in a header and in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Etag => "etag",
            Self::Version => "version",
            Self::Index => "index",
            Self::File => "file",
            Self::Snapshot => "snapshot",
            Self::Moved => "moved",
            Self::Trusted => "trusted",
        }
    }
}

/// What proves the content of one image.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Proof {
    kind: ProofKind,
    len: u64,
    value: String,
}

impl Proof {
    /// Longest value, in bytes.
    pub const VALUE_MAX: usize = 256;

    /// A proof for content of `len` bytes.
    ///
    /// # Errors
    /// `Unsupported` for a value that is too long or not printable ASCII without spaces.
    pub fn new(kind: ProofKind, len: u64, value: impl Into<String>) -> Result<Self> {
        let value = value.into();
        let is_empty_as_it_must = value.is_empty() == (kind == ProofKind::Trusted);
        if value.len() > Self::VALUE_MAX
            || !is_empty_as_it_must
            || !value.bytes().all(|byte| byte.is_ascii_graphic())
        {
            return Err(Error::unsupported(format!(
                "{} {value:?} cannot be recorded in an image: at most {} printable characters without spaces can",
                kind.name(),
                Self::VALUE_MAX
            )));
        }
        Ok(Self { kind, len, value })
    }

    /// The user's word for content of `len` bytes.
    pub fn trusted(len: u64) -> Self {
        Self { kind: ProofKind::Trusted, len, value: String::new() }
    }

    /// What it rests on.
    pub fn kind(&self) -> ProofKind {
        self.kind
    }

    /// The length of the content, in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the content has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The tag, version, digest or identity.
    pub fn value(&self) -> &str {
        &self.value
    }

    /// Whether `now` is the same content, as far as this proof can tell.
    pub fn agrees(&self, now: &Self) -> bool {
        match self.kind {
            ProofKind::Trusted => self.len == now.len,
            _ => self == now,
        }
    }

    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let (name, len, value) = (words.next()?, words.next()?, words.next().unwrap_or(""));
        let kind = ProofKind::ALL.into_iter().find(|kind| kind.name() == name)?;
        let has_digits_alone = !len.is_empty() && len.bytes().all(|byte| byte.is_ascii_digit());
        let len = len.parse().ok().filter(|_| has_digits_alone && words.next().is_none())?;
        Self::new(kind, len, value).ok().filter(|proof| proof.to_string() == line)
    }
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.name(), self.len)?;
        if !self.value.is_empty() {
            write!(f, " {}", self.value)?;
        }
        Ok(())
    }
}

/// What proves the content of all images below another, from the top down. There is at least one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Pin {
    proofs: Vec<Proof>,
}

impl Pin {
    /// Longest text of a pin, in bytes.
    pub const BYTES_MAX: usize = 504;

    /// A pin of these proofs.
    ///
    /// # Errors
    /// `Unsupported` when there is none, or when they take more than [`BYTES_MAX`](Self::BYTES_MAX).
    pub fn new(proofs: Vec<Proof>) -> Result<Self> {
        let pin = Self { proofs };
        let bytes = pin.to_string().len();
        if pin.proofs.is_empty() || bytes > Self::BYTES_MAX {
            return Err(Error::unsupported(format!(
                "what proves the content of the {} images below takes {bytes} bytes, and an image has room for {}: \
                 flatten some of them first",
                pin.proofs.len(),
                Self::BYTES_MAX
            )));
        }
        Ok(pin)
    }

    /// The pin that a header has.
    ///
    /// # Errors
    /// `Corrupt` for anything that [`Display`](fmt::Display) does not write.
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = || Error::corrupt("the pin of the base is not one");
        if text.len() > Self::BYTES_MAX {
            return Err(wrong());
        }
        let proofs: Option<Vec<Proof>> = text.split('\n').map(Proof::parse).collect();
        Ok(Self { proofs: proofs.ok_or_else(wrong)? })
    }

    /// The proofs, from the top down.
    pub fn proofs(&self) -> &[Proof] {
        &self.proofs
    }

    /// The first image, from the top down, that is not what it was: its number, and what is there instead, if
    /// anything is. `None` when the pins agree.
    pub fn difference<'a>(&'a self, now: &'a [Proof]) -> Option<(usize, Option<&'a Proof>)> {
        let differs = |index: &usize| match (self.proofs.get(*index), now.get(*index)) {
            (Some(was), Some(is)) => !was.agrees(is),
            _ => true,
        };
        let index = (0..self.proofs.len().max(now.len())).find(differs)?;
        Some((index, now.get(index)))
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, proof) in self.proofs.iter().enumerate() {
            let before = if index == 0 { "" } else { "\n" };
            write!(f, "{before}{proof}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_nothing_else() {
        for text in [
            "etag 5 \"a\"",
            "version 0 x",
            "trusted 9",
            "snapshot 5 a/1/b@4",
            "moved 5 0123456789abcdef0123456789abcdef",
            "etag 5 \"a\"\nfile 6 7-8",
            "index 1 sha256:00",
        ] {
            assert_eq!(Pin::parse(text).unwrap().to_string(), text);
        }
        let long = format!("etag 5 {}", "x".repeat(257));
        let many = ["etag 5 abcdefghijklmnopqrstuvwxyz"; 20].join("\n");
        for text in [
            "",
            "etag",
            "etag 5",
            "etag 5 ",
            "etag 5 a b",
            "etag +5 a",
            "etag 05 a",
            "tag 5 a",
            "trusted 9 x",
            "trusted 9 ",
            "etag 5 a\n",
            "\netag 5 a",
            "etag 18446744073709551616 a",
            "etag 5 \u{e9}",
            "etag 5 \u{1b}[2J",
            &long,
            &many,
        ] {
            assert_eq!(Pin::parse(text).unwrap_err().kind(), crate::ErrorKind::Corrupt, "{text:?}");
        }
        assert!(Proof::new(ProofKind::Etag, 5, "").is_err());
        assert!(Pin::new(Vec::new()).is_err());
        let proof = Proof::new(ProofKind::Etag, 5, "x".repeat(250)).unwrap();
        assert!(Pin::new(vec![proof.clone()]).is_ok());
        assert!(Pin::new(vec![proof.clone(), proof]).is_err());
    }

    #[test]
    fn pins_agree_only_when_each_image_is_what_it_was() {
        let proofs = |text: &str| Pin::parse(text).unwrap().proofs().to_vec();
        for (pinned, now, differs_at) in [
            ("etag 5 a", "etag 5 a", None),
            ("etag 5 a", "etag 5 b", Some(0)),
            ("etag 5 a", "etag 6 a", Some(0)),
            ("etag 5 a", "version 5 a", Some(0)),
            ("etag 5 a", "trusted 5", Some(0)),
            ("trusted 5", "etag 5 z", None),
            ("trusted 5", "etag 6 z", Some(0)),
            ("etag 5 a\nfile 6 b", "etag 5 a\nfile 6 b", None),
            ("etag 5 a\nfile 6 b", "etag 5 a\nfile 6 c", Some(1)),
            ("etag 5 a\nfile 6 b", "etag 5 a", Some(1)),
            ("etag 5 a", "etag 5 a\nfile 6 b", Some(1)),
        ] {
            let (pin, now) = (Pin::parse(pinned).unwrap(), proofs(now));
            assert_eq!(pin.difference(&now).map(|(index, _)| index), differs_at, "{pinned:?} {now:?}");
        }
        assert_eq!(Pin::parse("etag 5 a").unwrap().difference(&[]), Some((0, None)));
    }
}
