//! The property list of a dmg: only the tables of chunks in it are wanted.
//!
//! Every `<data>` whose content begins like a table is one. Nothing else in the text matters, so it is not parsed
//! as XML.

use vellum_core::{Error, Result};

const TABLE: &[u8] = b"mish";
const BEGIN: &[u8] = b"<data>";
const END: &[u8] = b"</data>";

/// The tables of chunks, in order.
pub(super) fn tables(text: &[u8]) -> impl Iterator<Item = Result<Vec<u8>>> + '_ {
    let mut rest = text;
    let contents = std::iter::from_fn(move || {
        let begin = find(rest, BEGIN)? + BEGIN.len();
        let content = &rest[begin..];
        let Some(len) = find(content, END) else {
            rest = &[];
            return Some(Err(Error::corrupt("the property list ends within a table")));
        };
        rest = &content[len..];
        Some(Ok(&content[..len]))
    });
    contents.filter_map(|content| match content.map(decode) {
        // Other content is none of ours, whatever it is.
        Ok(None) => None,
        Ok(Some(bytes)) => bytes.starts_with(TABLE).then_some(Ok(bytes)),
        Err(error) => Some(Err(error)),
    })
}

fn find(text: &[u8], wanted: &[u8]) -> Option<usize> {
    text.windows(wanted.len()).position(|window| window == wanted)
}

/// Base64 with white space anywhere; `None` where it is something else.
fn decode(text: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count, mut padding) = (0_u32, 0, 0);
    for byte in text.iter().copied().filter(|byte| !byte.is_ascii_whitespace()) {
        let value = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            b'=' if padding < 2 => {
                padding += 1;
                continue;
            }
            _ => return None,
        };
        if padding > 0 {
            return None;
        }
        bits = bits << 6 | u32::from(value);
        count += 1;
        if count == 4 {
            bytes.extend_from_slice(&bits.to_be_bytes()[1..]);
            (bits, count) = (0, 0);
        }
    }
    match count {
        0 => {}
        2 => bytes.extend_from_slice(&(bits << 12).to_be_bytes()[1..2]),
        3 => bytes.extend_from_slice(&(bits << 6).to_be_bytes()[1..3]),
        _ => return None,
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64() {
        for (text, bytes) in [
            ("", &b""[..]),
            ("Zg==", b"f"),
            ("Zm8=", b"fo"),
            ("Zm9v", b"foo"),
            ("Zm9v\n\tYmFy", b"foobar"),
            ("Zm9vYg", b"foob"),
            ("//+/", &[0xFF, 0xFF, 0xBF]),
        ] {
            assert_eq!(decode(text.as_bytes()).as_deref(), Some(bytes), "{text}");
        }
        for text in ["Z", "Zg=a", "Zg===", "Z-==", "Zm9vY"] {
            assert_eq!(decode(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn only_tables_are_found() {
        let text = b"<key>a</key><data>bWlzaDE=</data><data>not ours!</data><data>\n\tbWlzaDI=\n</data>";
        let found: Result<Vec<_>> = tables(text).collect();
        assert_eq!(found.unwrap(), [b"mish1", b"mish2"]);
        assert!(tables(b"<data>bWlzaDE=").any(|table| table.is_err()));
    }
}
