//! The expandable image of Parallels (`.hds`, `.hdd` files), version 2.
//!
//! ```text
//!   0    signature, version, geometry, size, number of blocks      64 bytes, all little endian
//!   64   a 32-bit number for each block: 0 is none, else where it begins
//! ```
//!
//! The older signature counts places in sectors, the newer one in blocks.
//!
//! Left out: the extension with dirty bitmaps, which says nothing about content, and the bundle around the
//! file (`DiskDescriptor.xml`), which is where snapshots are.

use std::sync::Arc;

use vellum_core::{Error, LocalFuture, Result, SharedStorage, Storage};

use crate::bytes::{le32, le64, read_at};
use crate::layout::{Header, Layout, OpenLayout, Run, Where};
use crate::pages::Pages;
use crate::{Description, ForeignKind};

const SECTOR: u64 = 512;
const HEADER_BYTES: u64 = 64;
/// Written while the image is in use.
const IN_USE: u32 = 0x746F_6E59;
const BLOCK_SECTORS_MAX: u32 = 1 << 21;

#[derive(Clone)]
struct Parallels {
    block: u64,
    /// What an entry counts, in bytes.
    unit: u64,
}

pub(crate) async fn look(image: &dyn Storage) -> Result<Description> {
    let bytes = read_at(image, 0, HEADER_BYTES).await?;
    let (version, tracks, blocks) = (le32(&bytes, 16), le32(&bytes, 28), u64::from(le32(&bytes, 32)));
    if version != 2 {
        return Err(Error::unsupported(format!("version {version}")));
    }
    if tracks == 0 || tracks > BLOCK_SECTORS_MAX {
        return Err(Error::corrupt(format!("blocks of {tracks} sectors are not possible")));
    }
    let block = u64::from(tracks) * SECTOR;
    let (unit, sectors) = match &bytes[..16] {
        b"WithoutFreeSpace" => (SECTOR, u64::from(le32(&bytes, 36))),
        b"WithouFreSpacExt" => (block, le64(&bytes, 36)),
        _ => return Err(Error::corrupt("the signature is missing")),
    };
    let size = sectors.checked_mul(SECTOR).filter(|size| size.div_ceil(block) <= blocks);
    let size = size.ok_or_else(|| {
        Error::corrupt(format!("the disk of {sectors} sectors does not fit {blocks} blocks of {tracks}"))
    })?;
    let was_left_open = le32(&bytes, 44) == IN_USE;
    let description = Description::of(ForeignKind::Parallels, size, Parallels { block, unit });
    Ok(Description { cluster_size: Some(block), was_left_open, ..description })
}

struct Blocks {
    header: Parallels,
    pages: Arc<Pages>,
}

impl Header for Parallels {
    fn open(&self, files: Vec<SharedStorage>) -> LocalFuture<'_, Result<OpenLayout>> {
        let pages = Pages::of(files);
        let layout = Blocks { header: self.clone(), pages: pages.clone() };
        Box::pin(std::future::ready(Ok(OpenLayout::over(pages, layout))))
    }
}

impl Layout for Blocks {
    fn find(&self, at: u64, _wanted: u64) -> LocalFuture<'_, Result<Run>> {
        Box::pin(async move {
            let Parallels { block, unit } = self.header;
            let within = at % block;
            let entry = self.pages.le32(0, HEADER_BYTES + at / block * 4).await?;
            let place = match entry {
                0 => Where::Below,
                entry => Where::Plain { file: 0, at: u64::from(entry) * unit + within, is_flat: false },
            };
            Ok(Run { len: block - within, place })
        })
    }
}
