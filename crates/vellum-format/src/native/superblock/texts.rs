//! Texts in a superblock: the base's name and format, its pin; and how any is read and written.

use vellum_core::pin::Pin;
use vellum_core::{Error, Result};

use super::{Base, FORMAT_MAX, NAME_MAX, field};
use crate::bytes::{be32, put32};

pub(super) fn base(page: &[u8]) -> Result<Base> {
    let name = text(page, field::NAME_LEN, field::NAME, NAME_MAX, "name of the base")?;
    if name.is_empty() {
        return Err(Error::corrupt("there is a base without a name"));
    }
    let format = text(page, field::FORMAT_LEN, field::FORMAT, FORMAT_MAX, "format of the base")?;
    Ok(Base { name, format: Some(format).filter(|format| !format.is_empty()) })
}

pub(super) fn pin(page: &[u8]) -> Result<Option<Pin>> {
    let text = text(page, field::PIN_LEN, field::PIN, Pin::BYTES_MAX, "pin of the base")?;
    if text.is_empty() { Ok(None) } else { Pin::parse(&text).map(Some) }
}

pub(super) fn text(page: &[u8], len_at: usize, at: usize, max: usize, what: &str) -> Result<String> {
    let len = be32(page, len_at) as usize;
    if len > max {
        return Err(Error::corrupt(format!("the {what} has {len} bytes, at most {max} are possible")));
    }
    match String::from_utf8(page[at..at + len].to_vec()) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => Err(Error::corrupt(format!("the {what} is not valid text"))),
    }
}

pub(super) fn put_text(bytes: &mut [u8], len_at: usize, at: usize, text: &str) {
    put32(bytes, len_at, u32::try_from(text.len()).expect("checked when it came in"));
    bytes[at..at + text.len()].copy_from_slice(text.as_bytes());
}
