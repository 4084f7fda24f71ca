//! Secrets and keys in memory: zero when they are dropped, and never shown.

use std::fmt;
use std::io::Read;

use vellum_core::{Error, Result};
use zeroize::Zeroizing;

/// A longer secret is refused, as by cryptsetup.
pub const SECRET_LEN_MAX: usize = 8 << 20;

/// Bytes that are read of a secret first.
const READ_AT_ONCE: usize = 4096;

/// What opens a key slot: a passphrase, or the bytes of a key file.
#[derive(Clone)]
pub struct Secret(Zeroizing<Vec<u8>>);

impl Secret {
    /// Takes the bytes as they are: a line break at the end is part of them.
    ///
    /// # Errors
    /// `Invalid` when there are none, or more than [`SECRET_LEN_MAX`].
    pub fn new(bytes: Vec<u8>) -> Result<Self> {
        let bytes = Zeroizing::new(bytes);
        if bytes.is_empty() {
            return Err(Error::invalid("the secret is empty"));
        }
        if bytes.len() > SECRET_LEN_MAX {
            return Err(Error::invalid(format!("the secret is longer than {SECRET_LEN_MAX} bytes")));
        }
        Ok(Self(bytes))
    }

    /// Reads all that there is, such as of a file.
    ///
    /// # Errors
    /// Those of reading, and of [`new`](Self::new).
    pub fn read(mut from: impl Read) -> Result<Self> {
        let mut bytes = Zeroizing::new(vec![0; READ_AT_ONCE]);
        let mut len = 0;
        loop {
            if len == bytes.len() {
                // Grown by hand, so that the old memory is made zero too.
                let mut larger = Zeroizing::new(vec![0; 2 * len]);
                larger[..len].copy_from_slice(&bytes);
                bytes = larger;
            }
            match from.read(&mut bytes[len..]) {
                Ok(0) => break,
                Ok(some) => len += some,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::io(error, "can't read the secret")),
            }
            if len > SECRET_LEN_MAX {
                return Err(Error::invalid(format!("the secret is longer than {SECRET_LEN_MAX} bytes")));
            }
        }
        bytes.truncate(len); // what is cut off is zero
        Self::new(std::mem::take(&mut *bytes))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Whether it ends with a line break, which an editor or `echo` may have added.
    pub fn ends_with_newline(&self) -> bool {
        self.0.last() == Some(&b'\n')
    }

    /// The same without a line break at its end.
    #[must_use]
    pub fn without_newline(&self) -> Self {
        let len = self.0.len() - usize::from(self.ends_with_newline() && self.0.len() > 1);
        Self(Zeroizing::new(self.0[..len].to_vec()))
    }

    /// The bytes that this is the base64 text of. White space does not count.
    ///
    /// # Errors
    /// `Invalid` when it is no such text. The message has nothing of it.
    pub fn from_base64(&self) -> Result<Self> {
        let mut bytes =
            decode_base64(&self.0).ok_or_else(|| Error::invalid("the secret is not valid base64"))?;
        Self::new(std::mem::take(&mut *bytes))
    }
}

/// The bytes that this is the base64 text of. White space does not count. `None` when it is no such text.
pub(crate) fn decode_base64(text: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let mut text = Zeroizing::new(text.to_vec());
    text.retain(|byte| !byte.is_ascii_whitespace());
    let data = text.iter().rposition(|byte| *byte != b'=').map_or(0, |last| last + 1);
    if !text.len().is_multiple_of(4) || text.len() - data > 2 {
        return None;
    }
    let mut bytes = Zeroizing::new(Vec::with_capacity(data));
    for group in text[..data].chunks(4) {
        let mut bits = 0_u32;
        for byte in group {
            let six = match byte {
                b'A'..=b'Z' => byte - b'A',
                b'a'..=b'z' => byte - b'a' + 26,
                b'0'..=b'9' => byte - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => return None,
            };
            bits = bits << 6 | u32::from(six);
        }
        bits <<= 6 * (4 - group.len());
        bytes.extend_from_slice(&bits.to_be_bytes()[1..group.len()]);
    }
    Some(bytes)
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// The secrets that a user has given, each with the name by which it is meant.
#[derive(Debug, Clone, Default)]
pub struct Secrets {
    all: Vec<(String, Secret)>,
    /// The name of the one that a copy is encrypted with, which is made of what the others open.
    of_copy: Option<String>,
}

impl Secrets {
    /// Adds one.
    ///
    /// # Errors
    /// `Invalid` when there is one of this name already, or the name is empty.
    pub fn add(&mut self, name: &str, secret: Secret) -> Result<()> {
        if name.is_empty() {
            return Err(Error::invalid("a secret needs a name: id=NAME"));
        }
        if self.named(name).is_some() {
            return Err(Error::invalid(format!("there are two secrets named {name:?}")));
        }
        self.all.push((name.to_owned(), secret));
        Ok(())
    }

    /// The one of this name.
    pub fn named(&self, name: &str) -> Option<&Secret> {
        self.all.iter().find(|(known, _)| known == name).map(|(_, secret)| secret)
    }

    /// The others.
    #[must_use]
    pub fn without(&self, name: &str) -> Self {
        Self { all: self.all.iter().filter(|(known, _)| known != name).cloned().collect(), ..Self::default() }
    }

    /// All of them, in the order in which they were given.
    pub fn all(&self) -> impl Iterator<Item = &Secret> {
        self.all.iter().map(|(_, secret)| secret)
    }

    /// The same, of which the one of this name is for the copy.
    #[must_use]
    pub fn with_copy(&self, name: Option<&str>) -> Self {
        Self { of_copy: name.map(str::to_owned), ..self.clone() }
    }

    /// The only one, for what cannot tell whether it is the right one. That of the copy does not count beside another.
    pub fn only(&self) -> Option<&Secret> {
        if let [(_, secret)] = &self.all[..] {
            return Some(secret);
        }
        let mut others = self.all.iter().filter(|(name, _)| self.of_copy.as_ref() != Some(name));
        match (others.next(), others.next()) {
            (Some((_, secret)), None) => Some(secret),
            _ => None,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }
}

/// A source of random bytes that nobody can guess: fills what it is given.
pub type Chance<'a> = dyn FnMut(&mut [u8]) -> Result<()> + 'a;

/// The key of the data, which all slots hold.
#[derive(Clone)]
pub struct MasterKey(Zeroizing<Vec<u8>>);

impl MasterKey {
    pub(crate) fn new(bytes: Zeroizing<Vec<u8>>) -> Self {
        Self(bytes)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for MasterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MasterKey(…)")
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "patterns of small numbers")]
mod tests {
    use super::*;

    #[test]
    fn base64_of_a_secret() {
        for (text, bytes) in [
            ("Zg==", &b"f"[..]),
            ("Zm8=", b"fo"),
            ("Zm9v", b"foo"),
            ("Zm9v\nYmFy\n", b"foobar"),
            ("+/+/", &[0xFB, 0xFF, 0xBF]),
        ] {
            let secret = Secret::new(text.into()).unwrap();
            assert_eq!(secret.from_base64().unwrap().bytes(), bytes, "{text}");
        }
        for text in ["Z", "Zg=", "Zg", "Zm9v!", "====", "Z===", "Zm=v", " "] {
            let error = Secret::new(text.into()).unwrap().from_base64().expect_err(text).to_string();
            assert!(!error.contains("Zm"), "{error}");
        }
    }

    #[test]
    fn nothing_shows_a_secret() {
        let secret = Secret::new(b"hunter2\n".to_vec()).unwrap();
        assert_eq!(format!("{secret:?}"), "Secret(…)");
        assert!(secret.ends_with_newline());
        assert_eq!(secret.without_newline().bytes(), b"hunter2");
        assert!(Secret::new(Vec::new()).is_err());
        assert!(Secret::new(vec![1; SECRET_LEN_MAX + 1]).is_err());
    }

    #[test]
    fn a_secret_is_read_to_its_end() {
        for len in [1, 4095, 4096, 4097, 100_000] {
            let bytes: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
            assert_eq!(Secret::read(&bytes[..]).unwrap().bytes(), bytes);
        }
        assert!(Secret::read(&[][..]).is_err());
        assert!(Secret::read(std::io::repeat(1)).unwrap_err().to_string().contains("longer"));
    }

    #[test]
    fn secrets_have_names_of_their_own() {
        let mut secrets = Secrets::default();
        let secret = |text: &str| Secret::new(text.into()).unwrap();
        secrets.add("a", secret("1")).unwrap();
        secrets.add("b", secret("2")).unwrap();
        assert!(secrets.add("a", secret("3")).is_err() && secrets.add("", secret("3")).is_err());
        assert_eq!(secrets.named("a").unwrap().bytes(), b"1");
        assert!(secrets.named("c").is_none());
        assert!(secrets.only().is_none());
        assert_eq!(secrets.with_copy(Some("a")).only().unwrap().bytes(), b"2");
        assert_eq!(secrets.without("b").with_copy(Some("a")).only().unwrap().bytes(), b"1");
        assert!(!format!("{secrets:?}").contains('1'));
    }
}
