//! One file for each experiment. An experiment chooses cases, lets programs take turns at each, and reports.

pub(crate) mod nbd;

use vellum_core::{Error, Result};

/// A number of bytes: digits, and perhaps K, M or G.
pub(crate) fn parse_size(text: &str) -> Result<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" => Some(0),
        "k" | "K" => Some(10),
        "m" | "M" => Some(20),
        "g" | "G" => Some(30),
        _ => None,
    };
    let size =
        digits.parse::<u64>().ok().zip(shift).and_then(|(number, shift)| number.checked_mul(1 << shift));
    size.ok_or_else(|| {
        Error::invalid(format!("{text:?} is no size: say a number of bytes, or with K, M or G"))
    })
}
