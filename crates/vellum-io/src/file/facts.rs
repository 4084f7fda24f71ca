//! The properties of a file that matter for its use: its type, its length, its transfer units, and the drive
//! below.
//!
//! The kernel reports most of them for the file itself; those of the drive under a file system are in sysfs,
//! by device number:
//!
//! ```text
//!   /sys/dev/block/253:1/queue/…            a whole drive
//!   /sys/dev/block/253:2/../queue/…         a partition: its drive's directory is the parent
//! ```
//!
//! For a property that cannot be determined the safer answer is assumed. In particular the physical block is
//! never less than 4 KiB: drives that report 512 bytes mostly write 4 KiB internally, and the page cache
//! writes whole pages anyway.

use std::fs;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{AtFlags, FallocateFlags, FileType, FsWord, SeekFrom, Stat, StatxFlags};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use vellum_core::pin::{Proof, ProofKind};
use vellum_core::{BlockSize, Error, Limits, Result};

use super::direct::Direct;
use super::handle::Storage;
use super::{Kind, OpenOptions, retry};
use crate::blocking::Backend;

/// The largest block that transfers past the page cache may ask for: the gate keeps larger ones apart no
/// more.
const DIRECT_BLOCK_MAX: u64 = 1 << 16;

/// What is known of an open file.
pub(super) struct Facts {
    pub(super) kind: Kind,
    pub(super) len: u64,
    pub(super) limits: Limits,
    pub(super) direct: Option<Direct>,
    pub(super) proof: Option<Proof>,
}

/// Refuses what is no image: everything but regular files and block devices.
pub(super) fn check_type(facts: &Stat, name: &str) -> Result<FileType> {
    let kind = FileType::from_raw_mode(facts.st_mode);
    let what = match kind {
        FileType::RegularFile | FileType::BlockDevice => return Ok(kind),
        FileType::Directory => "a directory",
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
        FileType::CharacterDevice => "a character device",
        _ => "something else",
    };
    Err(Error::unsupported(format!("can't open {name}: it is {what}, not a regular file or block device")))
}

/// Finds out all about an open file.
pub(super) fn find(file: &OwnedFd, stat: &Stat, options: &OpenOptions, name: &str) -> Result<Facts> {
    match check_type(stat, name)? {
        FileType::BlockDevice => of_device(file, stat, options, name),
        _ => of_file(file, stat, options, name),
    }
}

/// What an open file is stored on.
pub(super) fn storage_of(file: &OwnedFd, stat: &Stat) -> Storage {
    let device = match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => stat.st_rdev,
        _ => stat.st_dev,
    };
    let mut byte = [0];
    let read = preadv2(file, &mut [IoSliceMut::new(&mut byte)], 0, ReadWriteFlags::NOWAIT);
    let makes_wait = matches!(read, Err(Errno::OPNOTSUPP | Errno::NOSYS));
    Storage { backend: Backend::Device(device), makes_wait }
}

fn of_file(file: &OwnedFd, stat: &Stat, options: &OpenOptions, name: &str) -> Result<Facts> {
    let direct = if options.direct { Some(direct_file(file, name)?) } else { None };
    let len = len_of(stat);
    let punches = options.writable && can_punch(file, len);
    let physical = Queue::of(stat.st_dev).number("physical_block_size");
    let limits = Limits {
        block_size: direct.as_ref().map_or(BlockSize::from_shift(0), |direct| direct.block),
        physical_block: physical_block(physical),
        fixed_len: false,
        read_only: !options.writable,
        grows_zeroed: true,
        fast_zeroes: punches,
        discards: punches,
        prefers_written: options.writable && journals_blocks(file),
    };
    Ok(Facts { kind: Kind::Regular, len, limits, direct, proof: proof(stat, len) })
}

/// The length of a regular file.
pub(super) fn len_of(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

/// The file's number tells it from another one in its place, and the time of the last change of its bytes from
/// what it held before.
pub(super) fn proof(stat: &Stat, len: u64) -> Option<Proof> {
    let nanoseconds = i128::from(stat.st_mtime) * 1_000_000_000 + i128::from(stat.st_mtime_nsec);
    Proof::new(ProofKind::File, len, format!("{}@{nanoseconds}", stat.st_ino)).ok()
}

/// When anything of the file was changed last, in nanoseconds: its bytes, its length, its names, its other times.
pub(super) fn changed_at(stat: &Stat) -> i128 {
    i128::from(stat.st_ctime) * 1_000_000_000 + i128::from(stat.st_ctime_nsec)
}

fn of_device(file: &OwnedFd, stat: &Stat, options: &OpenOptions, name: &str) -> Result<Facts> {
    let failed = |errno: Errno| Error::io(errno.into(), format!("can't find out the size of {name}"));
    let sector = rustix::fs::ioctl_blksszget(file).map_err(failed)?;
    let sector = BlockSize::from_bytes(u64::from(sector)).unwrap_or(BlockSize::PAGE);
    let physical = rustix::fs::ioctl_blkpbszget(file).ok().map(u64::from);
    // The end of a device is where its size ends.
    let len = rustix::fs::seek(file, SeekFrom::End(0)).map_err(failed)?;
    let queue = Queue::of(stat.st_rdev);
    let zeroes = queue.number("write_zeroes_max_bytes").unwrap_or(0) > 0;
    let discards = queue.number("discard_max_bytes").unwrap_or(0) > 0;
    let direct = options.direct.then(|| Direct { block: sector, memory: usize_of(sector) });
    let limits = Limits {
        block_size: direct.as_ref().map_or(BlockSize::from_shift(0), |direct| direct.block),
        physical_block: physical_block(physical),
        fixed_len: true,
        read_only: !options.writable,
        grows_zeroed: false,
        fast_zeroes: options.writable && zeroes,
        discards: options.writable && discards && (zeroes || options.trim),
        prefers_written: false,
    };
    Ok(Facts { kind: Kind::Block { sector }, len, limits, direct, proof: None })
}

fn physical_block(known: Option<u64>) -> BlockSize {
    known.and_then(BlockSize::from_bytes).unwrap_or(BlockSize::PAGE).max(BlockSize::PAGE)
}

fn usize_of(block: BlockSize) -> usize {
    usize::try_from(block.bytes()).expect("blocks are small")
}

/// The alignment that the file system requires of O_DIRECT transfers. Kernels before 6.1 do not report it; a
/// page always suffices.
fn direct_file(file: &OwnedFd, name: &str) -> Result<Direct> {
    let unsupported = |why: &str| Error::unsupported(format!("can't open {name} for direct I/O: {why}"));
    let known = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    let (offset, memory) = match known {
        Ok(known) if known.stx_mask & StatxFlags::DIOALIGN.bits() != 0 => {
            (u64::from(known.stx_dio_offset_align), u64::from(known.stx_dio_mem_align))
        }
        _ => (BlockSize::PAGE.bytes(), BlockSize::PAGE.bytes()),
    };
    if offset == 0 {
        return Err(unsupported("its file system does not support it for this file"));
    }
    let block = BlockSize::from_bytes(offset).filter(|block| block.bytes() <= DIRECT_BLOCK_MAX);
    let block = block.ok_or_else(|| unsupported(&format!("it requires blocks of {offset} bytes")))?;
    let memory = BlockSize::from_bytes(memory).filter(|block| block.bytes() <= BlockSize::PAGE.bytes());
    let memory = memory.ok_or_else(|| unsupported("it requires an unusual memory alignment"))?;
    // Units smaller than a sector are useless: a crash leaves each sector either old or new. And a transfer
    // that is continued after some blocks must also find the memory aligned there.
    Ok(Direct { block: block.max(memory).max(BlockSize::SECTOR), memory: usize_of(memory) })
}

/// Whether the file system can free a part of a file: tested on a page far behind the end, where there is no
/// data.
fn can_punch(file: &OwnedFd, len: u64) -> bool {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let beyond = BlockSize::PAGE.round_up(len.saturating_add(1 << 30));
    match retry(|| rustix::fs::fallocate(file.as_fd(), mode, beyond, BlockSize::PAGE.bytes())) {
        Ok(()) => true,
        // Behind the largest possible file: that proves nothing about the ability.
        Err(Errno::FBIG | Errno::INVAL) => true,
        Err(_) => false,
    }
}

/// The file system type of ext2, ext3 and ext4 in `statfs`.
const EXT: FsWord = 0xEF53;
/// And of XFS.
const XFS: FsWord = 0x5846_5342;

/// Whether the file system overwrites bytes in place, and writes its own journal when blocks are new. True
/// only for file systems that are known to.
fn journals_blocks(file: &OwnedFd) -> bool {
    let kind = retry(|| rustix::fs::fstatfs(file)).map(|facts| facts.f_type);
    kind.is_ok_and(|kind| [EXT, XFS].contains(&kind))
}

/// The directory of facts about a drive.
struct Queue(Option<PathBuf>);

impl Queue {
    fn of(device: u64) -> Self {
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let drive = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        let places = [drive.join("queue"), drive.join("../queue")];
        Self(places.into_iter().find(|place| place.is_dir()))
    }

    fn number(&self, name: &str) -> Option<u64> {
        let text = fs::read_to_string(self.0.as_ref()?.join(name)).ok()?;
        text.trim().parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_physical_block_is_at_least_a_page() {
        assert_eq!(physical_block(None).bytes(), 4096);
        assert_eq!(physical_block(Some(512)).bytes(), 4096);
        assert_eq!(physical_block(Some(16_384)).bytes(), 16_384);
        assert_eq!(physical_block(Some(0)).bytes(), 4096);
    }
}
