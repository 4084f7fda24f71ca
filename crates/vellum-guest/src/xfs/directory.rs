//! Directories: the short form in the inode, or blocks of entries, which the other forms have alike.

use vellum_core::{Error, Result};

use super::{Node, Xfs, form};
use crate::bytes::{be16, be32, be64};

/// Where the index of a directory begins, in bytes of the directory.
const INDEX_AT: u64 = 1 << 35;
/// Of a block that is the only one, and has a small index at its end; in versions 4 and 5.
const ONLY: [u32; 2] = [0x5844_3242, 0x5844_4233];
/// Of one among others.
const ONE: [u32; 2] = [0x5844_3244, 0x5844_4433];
const HEADER: [usize; 2] = [16, 64];
const UNUSED: u16 = 0xffff;

type Visit<'v> = dyn FnMut(&[u8], u64) -> bool + 'v;

pub(super) async fn entries(system: &Xfs<'_>, node: &Node, visit: &mut Visit<'_>) -> Result<()> {
    let damaged = || Error::corrupt(format!("inode {}: an entry of the directory is damaged", node.number));
    if node.inode.form() == form::LOCAL {
        return short(system, node.inode.fork(), visit).ok_or_else(damaged);
    }
    let (block, whole) = (system.block, system.directory_block);
    let end = node.facts.bytes.min(INDEX_AT).div_ceil(whole) * (whole / block);
    let mut extents = system.extents_of(node)?;
    // The blocks of the file system that make one of the directory may lie apart.
    let (mut bytes, mut next) = (Vec::new(), 0);
    while let Some(extent) = extents.next(system).await? {
        if extent.offset >= end {
            break;
        }
        if extent.offset != next && !bytes.is_empty() || !extent.is_written {
            return Err(damaged());
        }
        for (offset, number) in (extent.offset..end).zip(extent.block..extent.block + extent.count) {
            if bytes.is_empty() && !offset.is_multiple_of(whole / block) {
                return Err(damaged());
            }
            bytes.append(&mut system.block(number).await?);
            next = offset + 1;
            if bytes.len() as u64 == whole {
                if !of_block(system, &bytes, visit).ok_or_else(damaged)? {
                    return Ok(());
                }
                bytes.clear();
            }
        }
    }
    if bytes.is_empty() { Ok(()) } else { Err(damaged()) }
}

/// A directory in its inode: how many entries, how many long numbers, the parent, the entries.
fn short(system: &Xfs<'_>, fork: &[u8], visit: &mut Visit<'_>) -> Option<()> {
    let (count, is_long) = (*fork.first()?, *fork.get(1)? > 0);
    let number_len = if is_long { 8 } else { 4 };
    let mut rest = fork.get(2 + number_len..)?;
    for _ in 0..count {
        let name_len = usize::from(*rest.first()?);
        let name = rest.get(3..3 + name_len)?;
        let at = 3 + name_len + usize::from(system.has_file_types);
        let number = rest.get(at..at + number_len)?;
        let number = if is_long { be64(number, 0) } else { be32(number, 0).into() };
        if name_len == 0 {
            return None;
        }
        if !visit(name, number) {
            break;
        }
        rest = &rest[at + number_len..];
    }
    Some(())
}

/// The entries of a block. Whether to go on; nothing where it is damaged.
fn of_block(system: &Xfs<'_>, block: &[u8], visit: &mut Visit<'_>) -> Option<bool> {
    let version = usize::from(system.is_v5);
    let end = match be32(block, 0) {
        magic if magic == ONE[version] => block.len(),
        magic if magic == ONLY[version] => {
            let index = usize::try_from(be32(block, block.len() - 8)).ok()?.checked_mul(8)?;
            (block.len() - 8).checked_sub(index)?
        }
        _ => return None,
    };
    let mut at = HEADER[version];
    while at < end {
        let entry = block.get(at..end)?;
        if be16(entry, 0) == UNUSED {
            let len = usize::from(be16(entry, 2));
            // 64 KiB do not fit the field, and no block is all unused.
            if len < 8 || !len.is_multiple_of(8) || len > entry.len() {
                return None;
            }
            at += len;
            continue;
        }
        let name_len = usize::from(*entry.get(8)?);
        let len = (9 + name_len + usize::from(system.has_file_types) + 2).next_multiple_of(8);
        let name = entry.get(..len)?.get(9..9 + name_len)?;
        if name_len == 0 {
            return None;
        }
        if !matches!(name, b"." | b"..") && !visit(name, be64(entry, 0)) {
            return Some(false);
        }
        at += len;
    }
    Some(true)
}
