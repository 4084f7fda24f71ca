//! The header extension that says where the journal is.
//!
//! ```text
//!   version │ prealloc │ wanted bytes │ run: start, length │ generation │ key │ crc    64 bytes, in sector 0
//! ```

use vellum_core::{Error, ImageOffset, ImageSpan, Result};

use crate::Prealloc;
use crate::bytes::{be32, be64, put32, put64};
use crate::journal::record::{BYTES_MAX, be128, put128};

/// The contents of the header extension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extension {
    /// How large the journal is to be while the image is written, in bytes.
    pub(crate) wanted_bytes: u64,
    /// The place of the journal. It has a meaning only while the feature bit is set.
    pub(crate) run: ImageSpan,
    /// The generation of the last opening that wrote.
    pub(crate) generation: u64,
    /// The key that all its records have, and nothing else has.
    pub(crate) key: u128,
    /// Whether space is prepared ahead of need while the image is written.
    pub(crate) prealloc: Prealloc,
}

/// Bytes of the extension's body.
pub(crate) const EXTENSION_LEN: usize = 64;
const EXTENSION_VERSION: u32 = 1;

impl Extension {
    pub(crate) fn encode(&self) -> [u8; EXTENSION_LEN] {
        let mut bytes = [0; EXTENSION_LEN];
        put32(&mut bytes, 0, EXTENSION_VERSION);
        put32(&mut bytes, 4, self.prealloc.encode());
        put64(&mut bytes, 8, self.wanted_bytes);
        put64(&mut bytes, 16, self.run.start().bytes());
        put64(&mut bytes, 24, self.run.len());
        put64(&mut bytes, 32, self.generation);
        put128(&mut bytes, 40, self.key);
        let crc = crc32c::crc32c(&bytes);
        put32(&mut bytes, 56, crc);
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        let mut copy: [u8; EXTENSION_LEN] = bytes
            .get(..EXTENSION_LEN)
            .and_then(|bytes| bytes.try_into().ok())
            .ok_or_else(|| Error::corrupt("the journal extension is too short"))?;
        if be32(&copy, 0) != EXTENSION_VERSION {
            return Err(Error::unsupported(format!(
                "journal version {} is not supported (1 is)",
                be32(&copy, 0)
            )));
        }
        put32(&mut copy, 56, 0);
        if crc32c::crc32c(&copy) != be32(bytes, 56) {
            return Err(Error::corrupt("the journal extension is damaged"));
        }
        let run = ImageSpan::checked(ImageOffset::new(be64(&copy, 16)), be64(&copy, 24))
            .filter(|run| run.len() <= BYTES_MAX && run.end().bytes() <= 1 << 56)
            .ok_or_else(|| Error::corrupt("the journal cannot lie where its extension says"))?;
        Ok(Self {
            wanted_bytes: be64(&copy, 8),
            run,
            generation: be64(&copy, 32),
            key: be128(&copy, 40),
            prealloc: Prealloc::decode(be32(&copy, 4)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_extension_reads_as_it_was_written() {
        let run = ImageOffset::new(1 << 20).span(1 << 20);
        let prealloc = Prealloc::Fixed(5 << 20);
        let extension = Extension { wanted_bytes: 1 << 20, run, generation: 7, key: 5, prealloc };
        assert_eq!(Extension::decode(&extension.encode()).unwrap(), extension);
        let mut bytes = extension.encode();
        bytes[20] ^= 1;
        assert!(Extension::decode(&bytes).is_err());
        assert!(Extension::decode(&bytes[..56]).is_err());
    }
}
