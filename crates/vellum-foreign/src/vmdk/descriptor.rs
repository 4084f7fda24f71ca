//! The text that describes a VMDK.
//!
//! ```text
//!   # Disk DescriptorFile
//!   version=1
//!   CID=fffffffe
//!   parentCID=ffffffff                        or the CID of the parent
//!   createType="twoGbMaxExtentSparse"
//!   parentFileNameHint="base.vmdk"            with a parent only
//!   RW 4194304 SPARSE "disk-s001.vmdk"        an extent: access, sectors, kind, file, and where it begins there
//! ```

use vellum_core::{Error, Result};

use crate::bytes::NAME_BYTES_MAX;

/// The longest descriptor, in bytes.
pub(crate) const BYTES_MAX: u64 = 4 << 20;

const NO_PARENT: u32 = 0xFFFF_FFFF;

/// Raw devices of a host: what they refer to is no file beside the image.
const DEVICES: [&str; 5] =
    ["fullDevice", "partitionedDevice", "vmfsRaw", "vmfsRawDeviceMap", "vmfsPassthroughRawDeviceMap"];

/// What a descriptor says.
#[derive(Debug, Default)]
pub(crate) struct Descriptor {
    pub(crate) cid: Option<u32>,
    pub(crate) parent_cid: Option<u32>,
    pub(crate) create_type: Option<String>,
    parent_name: Option<String>,
    pub(crate) extents: Vec<ExtentLine>,
}

/// An extent as the descriptor has it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ExtentLine {
    pub(crate) sectors: u64,
    pub(crate) kind: ExtentKind,
    pub(crate) file: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExtentKind {
    /// It reads as zero.
    Zero,
    /// A run of the file, from this byte on.
    Flat { at: u64 },
    /// A file of grains.
    Sparse,
}

impl Descriptor {
    /// Reads the text; zeros may follow it.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self> {
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        let text = std::str::from_utf8(&bytes[..end])
            .map_err(|_| Error::unsupported("its descriptor is not UTF-8"))?;
        let mut found = Self::default();
        for line in text.lines().map(str::trim) {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let first = line.split_ascii_whitespace().next().unwrap_or_default();
            if matches!(first, "RW" | "RDONLY" | "NOACCESS") {
                found.extents.push(ExtentLine::parse(line)?);
                continue;
            }
            let Some((key, value)) = line.split_once('=') else { continue };
            let value = value.trim().trim_matches('"');
            match key.trim() {
                "CID" => found.cid = Some(hex(value)?),
                "parentCID" => found.parent_cid = Some(hex(value)?),
                "createType" => found.create_type = Some(value.to_owned()),
                "parentFileNameHint" => found.parent_name = Some(value.to_owned()),
                "encoding" if !is_known_encoding(value) => {
                    return Err(Error::unsupported(format!("a descriptor in the encoding {value:?}")));
                }
                _ => {}
            }
        }
        if let Some(kind) = found.create_type.as_ref().filter(|kind| DEVICES.contains(&kind.as_str())) {
            return Err(Error::unsupported(format!("a disk that is a raw device ({kind})")));
        }
        let has_parent = found.parent_cid.is_some_and(|cid| cid != NO_PARENT);
        let is_named = found.parent_name.as_ref().is_some_and(|name| !name.is_empty());
        if has_parent && !is_named {
            return Err(Error::corrupt("it has a parent without a name (parentFileNameHint)"));
        }
        if found.parent_name.as_ref().is_some_and(|name| name.len() as u64 > NAME_BYTES_MAX) {
            return Err(Error::corrupt("the name of its parent is too long"));
        }
        Ok(found)
    }

    /// The image below, and its format.
    pub(crate) fn parent(&self) -> Option<(String, Option<String>)> {
        self.parent_cid.filter(|cid| *cid != NO_PARENT)?;
        Some((self.parent_name.clone()?, Some("vmdk".to_owned())))
    }
}

/// Names in other encodings would lead to other files.
fn is_known_encoding(value: &str) -> bool {
    ["utf-8", "us-ascii", "windows-1252", "iso-8859-1"].contains(&value.to_ascii_lowercase().as_str())
}

fn hex(text: &str) -> Result<u32> {
    u32::from_str_radix(text, 16).map_err(|_| Error::corrupt(format!("{text:?} is no CID")))
}

impl ExtentLine {
    fn parse(line: &str) -> Result<Self> {
        let wrong =
            || Error::corrupt(format!("this is no extent: {:?}", line.chars().take(200).collect::<String>()));
        let (before, rest) = match line.split_once('"') {
            Some((before, rest)) => (before, Some(rest)),
            None => (line, None),
        };
        let mut words = before.split_ascii_whitespace();
        let (access, sectors, kind) = (words.next(), words.next(), words.next());
        if access == Some("NOACCESS") {
            return Err(Error::unsupported("an extent that may not be accessed"));
        }
        let sectors = sectors.and_then(|word| word.parse::<u64>().ok()).ok_or_else(wrong)?;
        let kind = kind.ok_or_else(wrong)?;
        if kind == "ZERO" {
            return Ok(Self { sectors, kind: ExtentKind::Zero, file: None });
        }
        let (name, behind) = rest.and_then(|rest| rest.split_once('"')).ok_or_else(wrong)?;
        if name.is_empty() || name.len() as u64 > NAME_BYTES_MAX {
            return Err(wrong());
        }
        let behind = behind.trim();
        let offset = match behind {
            "" => None,
            text => Some(
                text.split_ascii_whitespace()
                    .next()
                    .and_then(|word| word.parse::<u64>().ok())
                    .ok_or_else(wrong)?,
            ),
        };
        let kind = match (kind, offset) {
            // Raw disks of VMFS may leave the offset out.
            ("FLAT" | "VMFS", offset) => {
                let at = offset.unwrap_or(0).checked_mul(super::SECTOR).ok_or_else(wrong)?;
                ExtentKind::Flat { at }
            }
            ("SPARSE" | "VMFSSPARSE", _) => ExtentKind::Sparse,
            (other, _) => return Err(Error::unsupported(format!("an extent of the kind {other}"))),
        };
        Ok(Self { sectors, kind, file: Some(name.to_owned()) })
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::ErrorKind;

    use super::*;

    #[test]
    fn a_descriptor_is_read_line_by_line() {
        let text = "# Disk DescriptorFile\nversion=1\nCID=0123abcd\r\nparentCID=00000002\n\
                    createType=\"twoGbMaxExtentFlat\"\nparentFileNameHint=\"a base.vmdk\"\nencoding=\"UTF-8\"\n\
                    RW 100 FLAT \"a f001.vmdk\" 7\nRDONLY 3 ZERO\nRW 5 SPARSE \"b\"\nRW 6 VMFS \"c\"\n\
                    ddb.adapterType = \"ide\"\n\0\0junk";
        let found = Descriptor::parse(text.as_bytes()).unwrap();
        assert_eq!((found.cid, found.parent_cid), (Some(0x0123_ABCD), Some(2)));
        assert_eq!(found.parent(), Some(("a base.vmdk".to_owned(), Some("vmdk".to_owned()))));
        let line =
            |sectors, kind, file: Option<&str>| ExtentLine { sectors, kind, file: file.map(str::to_owned) };
        assert_eq!(
            found.extents,
            [
                line(100, ExtentKind::Flat { at: 7 * 512 }, Some("a f001.vmdk")),
                line(3, ExtentKind::Zero, None),
                line(5, ExtentKind::Sparse, Some("b")),
                line(6, ExtentKind::Flat { at: 0 }, Some("c")),
            ]
        );
    }

    #[test]
    fn what_a_descriptor_may_not_say_is_refused() {
        let long = format!("RW 1 FLAT \"{}\" 0", "n".repeat(1024));
        for (text, kind) in [
            ("RW x FLAT \"a\" 0", ErrorKind::Corrupt),
            ("RW 18446744073709551616 FLAT \"a\" 0", ErrorKind::Corrupt),
            ("RW 1 FLAT \"a\" 18446744073709551615", ErrorKind::Corrupt),
            ("RW 1 FLAT \"a\" -1", ErrorKind::Corrupt),
            ("RW 1 FLAT a 0", ErrorKind::Corrupt),
            ("RW 1 FLAT \"\" 0", ErrorKind::Corrupt),
            ("RW 1", ErrorKind::Corrupt),
            (&long, ErrorKind::Corrupt),
            ("RW 1 SESPARSE \"a\"", ErrorKind::Unsupported),
            ("NOACCESS 1 FLAT \"a\" 0", ErrorKind::Unsupported),
            ("createType=\"fullDevice\"", ErrorKind::Unsupported),
            ("encoding=\"Shift_JIS\"", ErrorKind::Unsupported),
            ("parentCID=1", ErrorKind::Corrupt),
            ("CID=xyz", ErrorKind::Corrupt),
            ("CID=1ffffffff", ErrorKind::Corrupt),
        ] {
            assert_eq!(Descriptor::parse(text.as_bytes()).expect_err(text).kind(), kind, "{text}");
        }
        assert!(Descriptor::parse(b"\xFF\xFE").is_err());
    }
}
