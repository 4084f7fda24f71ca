//! The extents of an inode: a list in it, or a B-tree whose root is in it. One at a time, in the order of the file.

use vellum_core::{Error, Result};

use super::Xfs;
use crate::bytes::{be16, be32, be64};

/// Of nodes and leaves, in versions 4 and 5.
const MAGIC: [u32; 2] = [0x424d_4150, 0x424d_4133];
const HEADER: [usize; 2] = [24, 72];
pub(super) const LEVELS_MAX: u16 = 9;
const EXTENT: usize = 16;

/// Blocks that follow each other.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    /// The first of them in the file.
    pub(super) offset: u64,
    /// And in the file system.
    pub(super) block: u64,
    pub(super) count: u64,
    /// They were written since they were allocated.
    pub(super) is_written: bool,
}

/// What is still to be looked at; the next one is the last.
enum Step {
    Extent(Extent),
    /// A block of the tree, and how many levels it is above the leaves.
    Tree {
        block: u64,
        level: u16,
    },
}

pub(super) struct Extents {
    steps: Vec<Step>,
}

fn extent(bytes: &[u8]) -> Extent {
    let (high, low) = (be64(bytes, 0), be64(bytes, 8));
    Extent {
        offset: high >> 9 & ((1 << 54) - 1),
        block: (high & 0x1ff) << 43 | low >> 21,
        count: low & ((1 << 21) - 1),
        is_written: high >> 63 == 0,
    }
}

impl Extents {
    /// Those of a list with this many.
    pub(super) fn of_list(fork: &[u8], count: u64) -> Option<Self> {
        let len = usize::try_from(count).ok()?.checked_mul(EXTENT)?;
        let list = fork.get(..len)?;
        Some(Self { steps: list.chunks_exact(EXTENT).rev().map(|one| Step::Extent(extent(one))).collect() })
    }

    /// Those of a tree with this root.
    pub(super) fn of_tree(fork: &[u8]) -> Option<Self> {
        let (level, count) = (be16(fork, 0), usize::from(be16(fork, 2)));
        let room = fork.len().checked_sub(4)? / 16;
        if !(1..=LEVELS_MAX).contains(&level) || count > room {
            return None;
        }
        let mut this = Self { steps: Vec::new() };
        this.add_pointers(&fork[4 + 8 * room..], count, level);
        Some(this)
    }

    fn add_pointers(&mut self, pointers: &[u8], count: usize, level: u16) {
        let pointers = pointers.chunks_exact(8).take(count).rev();
        self.steps.extend(pointers.map(|pointer| Step::Tree { block: be64(pointer, 0), level: level - 1 }));
    }

    pub(super) async fn next(&mut self, system: &Xfs<'_>) -> Result<Option<Extent>> {
        while let Some(step) = self.steps.pop() {
            match step {
                Step::Extent(extent) => return Ok(Some(extent)),
                Step::Tree { block, level } => {
                    let node = system.block(block).await?;
                    let (magic, header) =
                        (MAGIC[usize::from(system.is_v5)], HEADER[usize::from(system.is_v5)]);
                    let count = usize::from(be16(&node, 6));
                    let room = (node.len() - header) / 16;
                    if be32(&node, 0) != magic || be16(&node, 4) != level || count > room {
                        return Err(Error::corrupt(format!("block {block} of extents is damaged")));
                    }
                    match level {
                        0 => {
                            let extents = node[header..].chunks_exact(EXTENT).take(count).rev();
                            self.steps.extend(extents.map(|one| Step::Extent(extent(one))));
                        }
                        _ => self.add_pointers(&node[header + 8 * room..], count, level),
                    }
                }
            }
        }
        Ok(None)
    }
}
