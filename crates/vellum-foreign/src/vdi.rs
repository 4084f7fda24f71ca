//! VDI, the format of VirtualBox.
//!
//! ```text
//!   0      text, signature at 64, version, type, offsets of map and data, sizes, UUIDs
//!   map    a 32-bit number for each block: its place among the blocks, or that it has none
//!   data   the blocks, usually of 1 MiB each
//! ```
//!
//! Left out: version 0, differencing images, and blocks with extra bytes in front of them.

use std::sync::Arc;

use vellum_core::{Error, LocalFuture, Result, SharedStorage, Storage};

use crate::bytes::{le32, le64, read_at};
use crate::layout::{Header, Layout, OpenLayout, Run, Where};
use crate::pages::Pages;
use crate::{Description, ForeignKind};

const VERSION: u32 = 0x0001_0001;
const SIGNATURE: u32 = 0xBEDA_107F;
/// The block was never written.
const NONE: u32 = 0xFFFF_FFFF;
/// It was discarded, and reads as zero.
const DISCARDED: u32 = 0xFFFF_FFFE;
const TYPE_STATIC: u32 = 2;
const TYPE_DIFFERENCING: u32 = 4;
/// Blocks have 4 KiB to 256 MiB.
const BLOCK_SHIFTS: std::ops::RangeInclusive<u32> = 12..=28;

#[derive(Clone)]
struct Vdi {
    map_at: u64,
    data_at: u64,
    block: u64,
    is_flat: bool,
}

pub(crate) async fn look(image: &dyn Storage) -> Result<Description> {
    let bytes = read_at(image, 0, 512).await?;
    let version = le32(&bytes, 68);
    if le32(&bytes, 64) != SIGNATURE {
        return Err(Error::corrupt("the signature is missing"));
    }
    if version != VERSION {
        return Err(Error::unsupported(format!("version {}.{}", version >> 16, version & 0xFFFF)));
    }
    let kind = le32(&bytes, 76);
    let is_zero = |at: usize| bytes[at..at + 16].iter().all(|byte| *byte == 0);
    if kind == TYPE_DIFFERENCING || !is_zero(424) || !is_zero(440) {
        return Err(Error::unsupported(
            "it is a differencing image, which refers to its parent by a UUID: merge it with `VBoxManage clonemedium`",
        ));
    }
    let (map_at, data_at) = (u64::from(le32(&bytes, 340)), u64::from(le32(&bytes, 344)));
    let (size, block) = (le64(&bytes, 368), le32(&bytes, 376));
    let (extra, blocks) = (le32(&bytes, 380), u64::from(le32(&bytes, 384)));
    if extra != 0 {
        return Err(Error::unsupported(format!("blocks with {extra} extra bytes")));
    }
    if !block.is_power_of_two() || !BLOCK_SHIFTS.contains(&block.trailing_zeros()) {
        return Err(Error::corrupt(format!("blocks of {block} bytes are not possible")));
    }
    let block = u64::from(block);
    if size.div_ceil(block) > blocks {
        return Err(Error::corrupt(format!(
            "the disk of {size} bytes does not fit {blocks} blocks of {block}"
        )));
    }
    if map_at < 400 || data_at < map_at + blocks * 4 || data_at % 512 != 0 {
        return Err(Error::corrupt(format!(
            "the map of {blocks} blocks at {map_at:#x} and the data at {data_at:#x} overlap"
        )));
    }
    let header = Vdi { map_at, data_at, block, is_flat: kind == TYPE_STATIC };
    Ok(Description { cluster_size: Some(block), ..Description::of(ForeignKind::Vdi, size, header) })
}

struct Blocks {
    header: Vdi,
    pages: Arc<Pages>,
}

impl Header for Vdi {
    fn open(&self, files: Vec<SharedStorage>) -> LocalFuture<'_, Result<OpenLayout>> {
        let pages = Pages::of(files);
        let layout = Blocks { header: self.clone(), pages: pages.clone() };
        Box::pin(std::future::ready(Ok(OpenLayout::over(pages, layout))))
    }
}

impl Layout for Blocks {
    fn find(&self, at: u64, _wanted: u64) -> LocalFuture<'_, Result<Run>> {
        Box::pin(async move {
            let Vdi { map_at, data_at, block, is_flat } = self.header;
            let within = at % block;
            let len = block - within;
            let place = match self.pages.le32(0, map_at + at / block * 4).await? {
                NONE => Where::Zero { allocated: false },
                DISCARDED => Where::Zero { allocated: true },
                entry => Where::Plain { file: 0, at: data_at + u64::from(entry) * block + within, is_flat },
            };
            Ok(Run { len, place })
        })
    }
}
