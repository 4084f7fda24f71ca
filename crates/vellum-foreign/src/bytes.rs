//! Fields of headers, and reading runs of a file that must be there.

use vellum_core::{Buffer, Error, ImageOffset, Result, Storage};

/// The longest name of another file, in bytes, as in QEMU.
pub(crate) const NAME_BYTES_MAX: u64 = 1023;

/// A run of a file, read as a whole. The caller has bounded its length.
pub(crate) async fn read_at(file: &dyn Storage, at: u64, len: u64) -> Result<Vec<u8>> {
    match at.checked_add(len) {
        Some(end) if end <= file.len() => {}
        _ => return Err(beyond(file, at, len)),
    }
    let len = usize::try_from(len).map_err(|_| beyond(file, at, len))?;
    Ok(file.read(ImageOffset::new(at), Buffer::for_overwrite(len)).await?.to_vec())
}

/// As above; what the file does not have reads as zero.
pub(crate) async fn read_padded(file: &dyn Storage, at: u64, len: usize) -> Result<Vec<u8>> {
    let there = usize::try_from(file.len().saturating_sub(at)).unwrap_or(usize::MAX).min(len);
    let mut bytes = read_at(file, at, there as u64).await?;
    bytes.resize(len, 0);
    Ok(bytes)
}

/// The error for a run that the file does not have.
pub(crate) fn beyond(file: &dyn Storage, at: u64, len: u64) -> Error {
    Error::corrupt(format!(
        "{}: the image refers to {len} bytes at {at:#x}, but the file has only {} bytes: it is damaged or was \
         not copied as a whole",
        file.name(),
        file.len()
    ))
}

/// The name of another file that is stored in a header. An empty one is none, as in QEMU.
pub(crate) async fn name_at(file: &dyn Storage, at: u64, len: u64) -> Result<Option<String>> {
    if len > NAME_BYTES_MAX {
        return Err(Error::corrupt(format!("the name of its backing image has {len} bytes")));
    }
    let bytes = read_at(file, at, len).await?;
    let name = String::from_utf8(bytes);
    let name = name.map_err(|_| Error::unsupported("the name of its backing image is not UTF-8"))?;
    Ok(Some(name).filter(|name| !name.is_empty()))
}

/// A field of a header. The caller has read it as a whole.
pub(crate) fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("as many bytes")
}

pub(crate) fn le16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(field(bytes, at))
}

pub(crate) fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(field(bytes, at))
}

pub(crate) fn le64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(field(bytes, at))
}

pub(crate) fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(field(bytes, at))
}

pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(field(bytes, at))
}

pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(field(bytes, at))
}
