//! Numbers in bytes that were checked to be long enough: what is past their end reads as zero.

/// A number of `N` bytes there.
fn at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut number = [0; N];
    if let Some(found) = bytes.get(at..).and_then(|rest| rest.get(..N)) {
        number.copy_from_slice(found);
    }
    number
}

pub(crate) fn le16(bytes: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes(at(bytes, offset))
}

pub(crate) fn le32(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(at(bytes, offset))
}

pub(crate) fn le64(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(at(bytes, offset))
}

pub(crate) fn be16(bytes: &[u8], offset: usize) -> u16 {
    u16::from_be_bytes(at(bytes, offset))
}

pub(crate) fn be32(bytes: &[u8], offset: usize) -> u32 {
    u32::from_be_bytes(at(bytes, offset))
}

pub(crate) fn be64(bytes: &[u8], offset: usize) -> u64 {
    u64::from_be_bytes(at(bytes, offset))
}
