//! One file for each experiment. An experiment chooses cases, lets programs take turns at each, and reports.

pub(crate) mod boot;
pub(crate) mod chains;
pub(crate) mod chores;
pub(crate) mod closed_images;
pub(crate) mod encryption;
pub(crate) mod engine;
pub(crate) mod exports;
pub(crate) mod flash;
pub(crate) mod flash_hits;
pub(crate) mod flash_recovery;
pub(crate) mod free_copies;
pub(crate) mod growing;
pub(crate) mod instructions;
pub(crate) mod migrate;
pub(crate) mod nbd;
pub(crate) mod neighbours;
pub(crate) mod prefetch;
pub(crate) mod push;
pub(crate) mod recovery;
pub(crate) mod replay_traces;
pub(crate) mod slow_flush;
pub(crate) mod snapshots;
pub(crate) mod sync_amplification;
pub(crate) mod tier;
pub(crate) mod writers;

use vellum_core::{Error, Result};

/// A number of bytes: digits, and perhaps K, M, G or T.
pub(crate) fn parse_size(text: &str) -> Result<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" => Some(0),
        "k" | "K" => Some(10),
        "m" | "M" => Some(20),
        "g" | "G" => Some(30),
        "t" | "T" => Some(40),
        _ => None,
    };
    let size =
        digits.parse::<u64>().ok().zip(shift).and_then(|(number, shift)| number.checked_mul(1 << shift));
    size.ok_or_else(|| {
        Error::invalid(format!("{text:?} is no size: say a number of bytes, or with K, M, G or T"))
    })
}
