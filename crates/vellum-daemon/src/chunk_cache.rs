//! Where what is fetched from stores and servers is kept on this host: what the user says, on the command line or in
//! the environment.

use std::path::PathBuf;
use std::sync::Arc;

use vellum_core::{Error, Result};
use vellum_remote::ChunkCache;
use vellum_remote::cache::CACHE_BYTES_DEFAULT;

/// A directory of this host for what was fetched, and how much of it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheChoice {
    /// Where it is.
    pub dir: PathBuf,
    /// About how many bytes it has at most.
    pub bytes_max: u64,
}

/// The variable that names the directory, for all commands.
const CACHE_VARIABLE: &str = "VELLUM_CHUNK_CACHE";

/// The variable for the bound, in bytes or with a suffix.
const CACHE_SIZE_VARIABLE: &str = "VELLUM_CHUNK_CACHE_SIZE";

impl CacheChoice {
    /// What the environment says.
    ///
    /// # Errors
    /// `Invalid` for a bound that is no number of bytes.
    pub(crate) fn from_env() -> Result<Option<Self>> {
        let Some(dir) = std::env::var_os(CACHE_VARIABLE).filter(|dir| !dir.is_empty()) else {
            return Ok(None);
        };
        let bytes_max = match std::env::var(CACHE_SIZE_VARIABLE) {
            Ok(text) => parse_bytes(&text).ok_or_else(|| {
                Error::invalid(format!(
                    "{CACHE_SIZE_VARIABLE} is {text:?}: use a number with M, G or T, for example 20G"
                ))
            })?,
            Err(_) => CACHE_BYTES_DEFAULT,
        };
        Ok(Some(Self { dir: dir.into(), bytes_max }))
    }

    /// Opens it, or finds it open in this process. Nothing when the directory does not answer.
    ///
    /// # Errors
    /// Those of the directory, and of a bound that is too small.
    pub(crate) async fn open(&self) -> Result<Option<Arc<ChunkCache>>> {
        ChunkCache::shared(&self.dir, self.bytes_max).await
    }
}

/// A whole number, perhaps with a suffix that is a power of 1024.
fn parse_bytes(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KIB" => 10,
        "M" | "MIB" => 20,
        "G" | "GIB" => 30,
        "T" | "TIB" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_is_a_number_with_a_suffix() {
        let cases =
            [("67108864", 64 << 20), ("64M", 64 << 20), ("10g", 10 << 30), ("2TiB", 2 << 40), ("5B", 5)];
        for (text, bytes) in cases {
            assert_eq!(parse_bytes(text), Some(bytes), "{text}");
        }
        for bad in ["", "M", "-1", "1.5G", "10X", "99999999999G"] {
            assert_eq!(parse_bytes(bad), None, "{bad}");
        }
    }
}
