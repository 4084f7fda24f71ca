//! The extensions behind the fields of the header: those that this program knows, and the names that an image
//! has for its features.

use vellum_core::{Error, ErrorKind, ImageOffset, Result};

use crate::Prealloc;
use crate::handover::Handover;
use crate::qcow2::journal::extension::{EXTENSION_LEN, Extension};
use crate::qcow2::layout::*;
use crate::session::Session;

/// What the extensions say that this program knows.
#[derive(Default)]
pub(super) struct Extensions {
    pub(super) backing_format: Option<String>,
    pub(super) data_file: Option<String>,
    /// The body, and its offset in the cluster.
    pub(super) bitmaps: Option<(Vec<u8>, usize)>,
    pub(super) encryption: Option<Vec<u8>>,
    pub(super) feature_names: Vec<u8>,
    pub(super) journal: Option<(Extension, usize)>,
    pub(super) misplaced_journal: Option<Extension>,
    pub(super) pin: Option<Vec<u8>>,
    pub(super) handover: Option<[u8; Handover::BYTES]>,
    pub(super) session: Option<[u8; Session::BYTES]>,
}

impl Extensions {
    /// Reads the extensions in `start..end` of the first cluster.
    pub(super) fn parse(cluster: &[u8], start: usize, end: usize) -> Result<Self> {
        let mut found = Self::default();
        let mut at = start;
        while at + 8 <= end {
            let (kind, len) = (be32(cluster, at), be32(cluster, at + 4) as usize);
            if kind == extension::END {
                break;
            }
            at += 8;
            let body = at
                .checked_add(len)
                .filter(|body_end| *body_end <= end)
                .map(|body_end| &cluster[at..body_end])
                .ok_or_else(|| {
                    Error::corrupt(format!("header extension {kind:#x} is longer than its room"))
                })?;
            match kind {
                extension::BACKING_FORMAT => found.backing_format = Some(text(body, "backing format")?),
                extension::DATA_FILE => found.data_file = Some(text(body, "data file name")?),
                extension::BITMAPS => found.bitmaps = Some((body.to_vec(), at)),
                extension::ENCRYPTION => found.encryption = Some(body.to_vec()),
                extension::FEATURE_NAMES => found.feature_names = body.to_vec(),
                extension::PIN => found.pin = Some(body.to_vec()),
                extension::HANDOVER => {
                    let body = body.try_into().map_err(|_| {
                        Error::corrupt(format!("what it records of a migration takes {len} bytes, not 24"))
                    })?;
                    found.handover = Some(body);
                }
                extension::SESSION => {
                    let body = body.try_into().map_err(|_| {
                        Error::corrupt(format!("what it records of a flash cache takes {len} bytes, not 32"))
                    })?;
                    found.session = Some(body);
                }
                // It changes together with the feature bit, so it counts only where one write covers both.
                extension::JOURNAL if at + EXTENSION_LEN <= 512 => {
                    found.journal = Some((Extension::decode(body)?, at));
                }
                extension::JOURNAL => {
                    let unknown = Extension {
                        wanted_bytes: JOURNAL_BYTES_DEFAULT,
                        run: ImageOffset::ZERO.span(0),
                        generation: 0,
                        key: 0,
                        prealloc: Prealloc::Auto,
                    };
                    found.misplaced_journal = Some(Extension::decode(body).unwrap_or(unknown));
                }
                _ => {} // kept, because header changes leave it in place
            }
            at += len.next_multiple_of(8);
        }
        Ok(found)
    }
}

/// Text as the header has it: up to the first zero byte.
pub(super) fn text(bytes: &[u8], what: &str) -> Result<String> {
    let bytes = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8(bytes.to_vec()).map_err(|_| Error::corrupt(format!("the {what} is not UTF-8")))
}

/// Refuses incompatible features that this program does not know, by the names that the image has for them.
pub(super) fn refuse_unknown_features(bits: u64, names: &[u8]) -> Result<()> {
    let unknown = bits & !incompatible::KNOWN;
    if unknown == 0 {
        return Ok(());
    }
    let name_of = |bit: u32| {
        names
            .chunks_exact(FEATURE_NAME_LEN)
            .find(|row| row[0] == 0 && u32::from(row[1]) == bit)
            .and_then(|row| text(&row[2..], "feature name").ok())
            .filter(|name| !name.is_empty())
            .unwrap_or_else(|| format!("unknown incompatible feature, bit {bit}"))
    };
    let list: Vec<String> = (0..64).filter(|bit| unknown >> bit & 1 == 1).map(name_of).collect();
    Err(Error::new(
        ErrorKind::Unsupported,
        format!("the image needs features that this program does not support: {}", list.join(", ")),
    ))
}
