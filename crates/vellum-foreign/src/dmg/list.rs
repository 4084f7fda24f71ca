//! The property list of a dmg: only the tables of chunks in it are wanted.
//!
//! ```text
//!   <key>blkx</key><array> … <data>a table</data> … <data>a table</data> … </array>    each must be one
//!   <key>plst</key><array> … <data>something</data> … </array>                         others may be
//! ```
//!
//! Every `<data>` whose content begins like a table is one. Nothing else in the text matters, so it is not parsed
//! as XML.
//!
//! 1. The content of every `<data>` is base64, or the list is damaged.
//! 2. Under `blkx` there are tables only. A list without that key may have them anywhere, as in QEMU.

use vellum_core::{Error, Result};

const TABLE: &[u8] = b"mish";
const BEGIN: &[u8] = b"<data>";
const END: &[u8] = b"</data>";
const TABLES: &[u8] = b"<key>blkx</key>";
const TABLES_END: &[u8] = b"</array>";

/// The tables of chunks, in order.
pub(super) fn tables(text: &[u8]) -> impl Iterator<Item = Result<Vec<u8>>> + '_ {
    let tables_only = match find(text, TABLES) {
        Some(at) => at..at + find(&text[at..], TABLES_END).unwrap_or(text.len() - at),
        None => 0..0,
    };
    let mut at = 0;
    let contents = std::iter::from_fn(move || {
        let begin = at + find(&text[at..], BEGIN)? + BEGIN.len();
        let content = &text[begin..];
        let Some(len) = find(content, END) else {
            at = text.len();
            return Some(Err(Error::corrupt("the property list ends within a table")));
        };
        at = begin + len;
        Some(Ok((&content[..len], tables_only.contains(&begin))))
    });
    contents.filter_map(|found| {
        let table = found.and_then(|(content, must_be_one)| {
            let bytes = decode(content)
                .ok_or_else(|| Error::corrupt("the property list is damaged: data in it is not base64"))?;
            match bytes.starts_with(TABLE) {
                true => Ok(Some(bytes)),
                false if must_be_one => Err(Error::corrupt(
                    "the property list is damaged: a table of chunks does not begin as one",
                )),
                false => Ok(None),
            }
        });
        table.transpose()
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
        let found = |text: &[u8]| tables(text).collect::<Result<Vec<_>>>();
        let text = b"<key>a</key><data>bWlzaDE=</data><data>b3RoZXI=</data><data>\n\tbWlzaDI=\n</data>";
        assert_eq!(found(text).unwrap(), [b"mish1", b"mish2"]);
        let text = b"<key>plst</key><array><data>b3RoZXI=</data></array>\
            <key>blkx</key><array><data>bWlzaDE=</data></array><data>b3RoZXI=</data>";
        assert_eq!(found(text).unwrap(), [b"mish1"]);
        for damaged in [
            &b"<data>bWlzaDE="[..],
            b"<data>bWlzaDE=</data><data>not base64!</data>",
            b"<key>blkx</key><array><data>bWlzaDE=</data><data>b3RoZXI=</data></array>",
            b"<key>blkx</key><array><data>bWlzaDE=</data><data>b3RoZXI=</data>",
        ] {
            assert!(found(damaged).is_err(), "{}", String::from_utf8_lossy(damaged));
        }
    }
}
