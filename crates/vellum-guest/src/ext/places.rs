//! The blocks of an inode: a tree of extents, or the older indirect blocks. One run at a time, in no memory to speak of.

use vellum_core::{Error, Result};

use super::{Ext, Inode, flag};
use crate::bytes::{le16, le32};

const EXTENTS_MAGIC: u16 = 0xf30a;
const DEPTH_MAX: u16 = 5;
/// The entries of an inode that name blocks themselves.
const DIRECT: usize = 12;

/// Blocks that follow each other.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    /// The first of them in the file.
    pub(super) logical: u64,
    /// And in the file system.
    pub(super) physical: u64,
    pub(super) count: u64,
    /// They were written since they were allocated.
    pub(super) is_written: bool,
}

/// What is still to be looked at; the next one is the last.
enum Step {
    Run(Run),
    /// A block of the tree of extents, so deep.
    Tree {
        block: u64,
        depth: u16,
    },
    /// A block with numbers of blocks, for as many levels; the first one's place in the file.
    Indirect {
        block: u64,
        levels: u32,
        logical: u64,
    },
}

pub(super) struct Runs {
    steps: Vec<Step>,
}

/// The blocks of a directory or a link.
pub(super) struct BlocksOf {
    runs: Runs,
    run: Option<Run>,
    /// How many the file has.
    end: u64,
}

impl Runs {
    pub(super) async fn next(&mut self, system: &Ext<'_>) -> Result<Option<Run>> {
        while let Some(step) = self.steps.pop() {
            match step {
                Step::Run(run) => return Ok(Some(run)),
                Step::Tree { block, depth } => {
                    let node = system.block(block).await?;
                    self.add_tree(&node, Some(depth))?;
                }
                Step::Indirect { block, levels, logical } => {
                    let node = system.block(block).await?;
                    self.add_indirect(&node, levels, logical, system.block / 4);
                }
            }
        }
        Ok(None)
    }

    fn add_tree(&mut self, node: &[u8], wanted: Option<u16>) -> Result<()> {
        let (count, depth) = (usize::from(le16(node, 2)), le16(node, 6));
        let is_sound = le16(node, 0) == EXTENTS_MAGIC
            && wanted.map_or(depth <= DEPTH_MAX, |wanted| depth == wanted)
            && 12 * (count + 1) <= node.len();
        if !is_sound {
            return Err(Error::corrupt("a block of extents is damaged"));
        }
        for entry in node[12..12 * (count + 1)].chunks_exact(12).rev() {
            let high = |at| u64::from(le16(entry, at)) << 32;
            self.steps.push(match depth {
                0 => {
                    let len = u64::from(le16(entry, 4));
                    let is_written = len <= 32768;
                    Step::Run(Run {
                        logical: le32(entry, 0).into(),
                        physical: u64::from(le32(entry, 8)) | high(6),
                        count: if is_written { len } else { len - 32768 },
                        is_written,
                    })
                }
                _ => Step::Tree { block: u64::from(le32(entry, 4)) | high(8), depth: depth - 1 },
            });
        }
        Ok(())
    }

    fn add_indirect(&mut self, node: &[u8], levels: u32, logical: u64, of_block: u64) {
        let step = of_block.pow(levels - 1);
        let numbers = node.chunks_exact(4).enumerate().rev();
        self.steps.extend(numbers.filter_map(|(index, number)| {
            let block = u64::from(le32(number, 0));
            let logical = logical + index as u64 * step;
            match levels {
                _ if block == 0 => None,
                1 => Some(Step::Run(Run { logical, physical: block, count: 1, is_written: true })),
                _ => Some(Step::Indirect { block, levels: levels - 1, logical }),
            }
        }));
    }
}

impl BlocksOf {
    /// The next block in the file system, and its number in the file.
    pub(super) async fn next(&mut self, system: &Ext<'_>) -> Result<Option<(u64, u64)>> {
        loop {
            if let Some(run) = &mut self.run
                && run.count > 0
            {
                let block = (run.physical, run.logical);
                (run.physical, run.logical, run.count) = (run.physical + 1, run.logical + 1, run.count - 1);
                // What the tree has behind the end does not count.
                if block.1 >= self.end {
                    continue;
                }
                return Ok(Some(block));
            }
            match self.runs.next(system).await? {
                None => return Ok(None),
                Some(run) => self.run = (run.is_written && run.logical < self.end).then_some(run),
            }
        }
    }
}

impl Ext<'_> {
    pub(super) async fn runs_of(&self, inode: &Inode) -> Result<Runs> {
        let mut runs = Runs { steps: Vec::new() };
        let root = inode.root();
        if inode.flags() & flag::EXTENTS != 0 {
            runs.add_tree(root, None)?;
            return Ok(runs);
        }
        let of_block = self.block / 4;
        let mut logical = DIRECT as u64;
        let mut indirect = Vec::new();
        for levels in 1..=3 {
            let block = u64::from(le32(root, 48 + 4 * (levels as usize - 1)));
            if block != 0 {
                indirect.push(Step::Indirect { block, levels, logical });
            }
            logical += of_block.pow(levels);
        }
        runs.steps.extend(indirect.into_iter().rev());
        let direct = root.chunks_exact(4).take(DIRECT).enumerate().rev();
        runs.steps.extend(direct.filter_map(|(index, number)| {
            let (logical, physical) = (index as u64, u64::from(le32(number, 0)));
            (physical != 0).then_some(Step::Run(Run { logical, physical, count: 1, is_written: true }))
        }));
        Ok(runs)
    }

    pub(super) async fn blocks_of(&self, inode: &Inode) -> Result<BlocksOf> {
        let runs = self.runs_of(inode).await?;
        Ok(BlocksOf { runs, run: None, end: inode.size().div_ceil(self.block) })
    }
}
