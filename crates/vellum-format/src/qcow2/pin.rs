//! The extension that says what proves the content of the backing file.
//!
//! ```text
//!   type "VLPN" │ length │ length of the name (4 bytes) │ name of the backing file │ the pin, text of `vellum_core::pin`
//! ```
//!
//! Programs that do not know an extension keep it. So the name is in it: when QEMU gives the image another backing
//! file, the names differ, and the pin is void. The header changes as for the journal (`journal_setting.rs`): a crash leaves the
//! old header or the new one.

use vellum_core::pin::Pin;
use vellum_core::{Error, Result};

use super::layout::{BACKING_NAME_MAX, be32};

/// The body of the extension.
pub(super) fn encode(name: &str, pin: &Pin) -> Vec<u8> {
    let len = u32::try_from(name.len()).expect("a name from a header");
    let mut body = len.to_be_bytes().to_vec();
    body.extend_from_slice(name.as_bytes());
    body.extend_from_slice(pin.to_string().as_bytes());
    body
}

/// The name of the backing file that the extension is about, and its pin.
///
/// # Errors
/// `Corrupt` when it is not one.
pub(super) fn decode(body: &[u8]) -> Result<(String, Pin)> {
    let wrong = || Error::corrupt("the pin of the backing file is not one");
    let len = if body.len() < 4 { return Err(wrong()) } else { be32(body, 0) };
    let text = &body[4..];
    let (name, pin) = text
        .split_at_checked(len as usize)
        .filter(|_| len <= BACKING_NAME_MAX && text.len() - len as usize <= Pin::BYTES_MAX)
        .ok_or_else(wrong)?;
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).map_err(|_| wrong());
    Ok((text(name)?, Pin::parse(&text(pin)?)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_read_as_it_was_written_and_others_are_refused() {
        let pin = Pin::parse("etag 5 \"a\"").unwrap();
        let body = encode("http://host/t.raw", &pin);
        assert_eq!(decode(&body).unwrap(), ("http://host/t.raw".to_owned(), pin));
        for len in 0..body.len() - 3 {
            assert!(decode(&body[..len]).is_err(), "{len} bytes");
        }
        let mut long = body;
        long[..4].copy_from_slice(&u32::MAX.to_be_bytes());
        assert!(decode(&long).is_err());
        assert!(
            decode(&[&[0, 0, 0, 1, 0xff][..], b"trusted 5"].concat()).is_err(),
            "a name that is not UTF-8"
        );
    }
}
