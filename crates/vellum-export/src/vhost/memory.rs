//! The memory of a guest, as its front end shares it: files that are mapped here, and their addresses in the
//! guest.
//!
//! ```text
//!   front end's address ──(rings only)──► guest's address ──► a mapped file, or nothing: then it is an error
//! ```
//!
//! 1. No reference to these bytes is ever made, because the guest changes them at any time. They are lent to
//!    a request in place (`GuestRam`), or copied once; only the copy counts, even if the guest changes the
//!    original later.
//! 2. A mapping lives as long as any request that uses it. The front end is notified that memory is gone only
//!    when no request uses it any more (`session`): whatever it then does with the file cannot reach a disk.
//! 3. A file must be as long as what is mapped of it. (Truncating one later fails requests whose data the
//!    kernel moves, and raises SIGBUS where data is copied here, which ends the program: clients that may
//!    connect are trusted not to do that.)

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use vellum_core::{Buffer, Context, Error, Result};
use vellum_io::GuestRam;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemory, GuestMemoryMmap, GuestRegionMmap, MmapRegion, Permissions,
};

use super::chain::Segments;
use super::keep_from_children;

/// How many files a front end may share.
pub(super) const REGIONS_MAX: usize = 64;

/// How much of our addresses one front end may take: 16 TiB of the 128 TiB that x86-64 has. Files may be
/// sparse, so their lengths bound nothing.
const MAPPED_BYTES_MAX: u64 = 16 << 40;

/// One run of guest memory, as the front end describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Region {
    /// Where it is for the guest.
    pub(super) guest: u64,
    /// Where it is for the front end.
    pub(super) front_end: u64,
    pub(super) len: u64,
    /// Where it is in its file.
    pub(super) in_file: u64,
}

/// A region, and which file it is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mapped {
    region: Region,
    device: u64,
    inode: u64,
}

/// All of it at one time.
#[derive(Clone, Default)]
pub(super) struct Memory {
    ram: Arc<GuestRam>,
    regions: Vec<Mapped>,
}

impl Memory {
    /// Maps all regions, each with its file.
    pub(super) fn map(regions: impl IntoIterator<Item = (Region, File)>) -> Result<Self> {
        let mut memory = Self::default();
        for (region, file) in regions {
            memory = memory.with(region, file)?;
        }
        Ok(memory)
    }

    /// The same memory with one region more.
    pub(super) fn with(&self, region: Region, file: File) -> Result<Self> {
        keep_from_children(&file)?;
        let refuse =
            |why: &str| Error::invalid(format!("can't map {:#x} bytes of memory: {why}", region.len));
        if self.regions.len() == REGIONS_MAX {
            return Err(refuse("there are too many regions"));
        }
        let sum = self.regions.iter().try_fold(region.len, |sum, other| sum.checked_add(other.region.len));
        if sum.is_none_or(|sum| sum > MAPPED_BYTES_MAX) {
            return Err(refuse("with it, the front end would share more than 16 TiB"));
        }
        let facts = file.metadata().context(|| "can't stat a file of guest memory")?;
        let end = region.in_file.checked_add(region.len);
        if !facts.is_file() || region.len == 0 || end.is_none_or(|end| end > facts.len()) {
            return Err(refuse("its file is too short or not a regular file"));
        }
        let front_end_fits = region.front_end.checked_add(region.len).is_some();
        let (Ok(len), true) = (usize::try_from(region.len), front_end_fits) else {
            return Err(refuse("it exceeds the address space"));
        };
        let mapping = MmapRegion::from_file(FileOffset::new(file, region.in_file), len)
            .map_err(|error| refuse(&error.to_string()))?;
        let mapped = GuestRegionMmap::new(mapping, GuestAddress(region.guest))
            .ok_or_else(|| refuse("it exceeds the address space"))?;
        let mapped =
            self.mapped().insert_region(Arc::new(mapped)).map_err(|error| refuse(&error.to_string()))?;
        let mut regions = self.regions.clone();
        regions.push(Mapped { region, device: facts.dev(), inode: facts.ino() });
        Ok(Self { ram: GuestRam::new(mapped)?, regions })
    }

    /// The same memory without this region.
    pub(super) fn without(&self, region: Region) -> Result<Self> {
        let is_it = |Mapped { region: other, .. }: &Mapped| {
            (other.guest, other.front_end, other.len) == (region.guest, region.front_end, region.len)
        };
        let mut regions = self.regions.clone();
        let before = regions.len();
        regions.retain(|other| !is_it(other));
        match self.mapped().remove_region(GuestAddress(region.guest), region.len) {
            Ok((mapped, _)) if regions.len() + 1 == before => {
                Ok(Self { ram: GuestRam::new(mapped)?, regions })
            }
            _ => Err(Error::invalid("there is no such region of memory")),
        }
    }

    /// Whether every region of the other is still there.
    pub(super) fn has_all_of(&self, other: &Self) -> bool {
        other.regions.iter().all(|mapped| self.regions.contains(mapped))
    }

    /// The guest's address of an address of the front end.
    pub(super) fn guest_address(&self, front_end: u64) -> Option<u64> {
        let within = |region: &&Region| {
            front_end.checked_sub(region.front_end).is_some_and(|offset| offset < region.len)
        };
        let region = self.regions.iter().map(|mapped| &mapped.region).find(within)?;
        region.guest.checked_add(front_end - region.front_end)
    }

    /// The files that are mapped.
    #[cfg(test)]
    pub(super) fn files(&self) -> impl Iterator<Item = &File> {
        use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
        self.mapped().iter().map(|region| region.file_offset().expect("it has one").file())
    }

    /// What the queues' crate works on.
    pub(super) fn mapped(&self) -> &GuestMemoryMmap {
        self.ram.mapped()
    }

    /// Whether all of the segments is memory.
    pub(super) fn has(&self, segments: &Segments) -> bool {
        let is_there = |at, len| self.mapped().check_range(GuestAddress(at), len, Permissions::ReadWrite);
        segments.iter().all(|run| is_there(run.at, run.len))
    }

    /// Lends the guest's bytes in place. `None` when some are not there.
    pub(super) fn lend(&self, segments: &Segments) -> Option<Buffer> {
        self.ram.lend(segments.iter().map(|run| (run.at, run.len)))
    }

    /// Copies the guest's bytes out. `None` when some are not there.
    pub(super) fn read(&self, segments: &Segments) -> Option<Buffer> {
        let mut buffer = Buffer::for_overwrite(segments.len());
        self.read_into(segments, buffer.slice_mut())?;
        Some(buffer)
    }

    /// Copies the guest's bytes out, of which there are as many as here.
    pub(super) fn read_into(&self, segments: &Segments, bytes: &mut [u8]) -> Option<()> {
        assert_eq!(bytes.len(), segments.len(), "room for all of them");
        let mut rest = bytes;
        for run in segments.iter() {
            let (now, later) = rest.split_at_mut(run.len);
            self.mapped().read_slice(now, GuestAddress(run.at)).ok()?;
            rest = later;
        }
        Some(())
    }

    /// Copies bytes to the guest. `None` when there is no memory for some of them.
    pub(super) fn write<'a>(
        &self,
        segments: &Segments,
        pieces: impl Iterator<Item = &'a [u8]>,
    ) -> Option<()> {
        let mut runs = segments.iter();
        let mut run = runs.next();
        for piece in pieces {
            let mut rest = piece;
            while !rest.is_empty() {
                let room = run.as_mut()?;
                let (now, later) = rest.split_at(rest.len().min(room.len));
                self.mapped().write_slice(now, GuestAddress(room.at)).ok()?;
                rest = later;
                room.len -= now.len();
                match room.len {
                    0 => run = runs.next(),
                    _ => room.at = room.at.checked_add(now.len() as u64)?,
                }
            }
        }
        Some(())
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&self.regions).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::super::chain::{Chain, Link};
    use super::*;

    fn file(len: u64) -> File {
        let file = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        let file = File::from(file);
        file.set_len(len).expect("its length");
        file
    }

    fn region(guest: u64, len: u64, in_file: u64) -> Region {
        Region { guest, front_end: guest + (1 << 40), len, in_file }
    }

    /// Data of a request in these runs.
    fn segments(runs: &[(u64, u32)]) -> Segments {
        let header = Link { at: 0, len: 16, is_writable: false, has_next: true };
        let data = runs.iter().map(|&(at, len)| Link { at, len, ..header });
        let status = Link { at: 0, len: 1, is_writable: true, has_next: false };
        let chain = Chain::gather(std::iter::once(header).chain(data).chain(std::iter::once(status)));
        chain.expect("a chain").data_out
    }

    #[test]
    fn bytes_cross_from_region_to_region_and_stop_at_holes() {
        let memory = Memory::map([
            (region(0x1000, 0x1000, 0x1000), file(0x2000)),
            (region(0x2000, 0x1000, 0), file(0x1000)),
            (region(0x4000, 0x1000, 0), file(0x1000)),
        ]);
        let memory = memory.expect("it is mapped");
        let across = segments(&[(0x1ffd, 5), (0x4000, 3)]);
        let bytes = [1, 2, 3, 4, 5, 6, 7, 8];
        assert!(memory.has(&across));
        memory.write(&across, [&bytes[..2], &bytes[2..]].into_iter()).expect("there is memory");
        assert_eq!(memory.read(&across).expect("there is memory").to_vec(), bytes);
        for hole in
            [(0x2fff, 2), (0x3000, 1), (0xfff, 1), (0xfff, 4), (0x5000, 1), (u64::MAX, 1), (u64::MAX, 2)]
        {
            let hole = segments(&[hole]);
            assert!(!memory.has(&hole) && memory.read(&hole).is_none(), "{hole:?}");
            assert!(memory.write(&hole, std::iter::once(&[0; 4][..])).is_none(), "{hole:?}");
        }
        assert_eq!(memory.guest_address((1 << 40) + 0x1fff), Some(0x1fff));
        assert_eq!(memory.guest_address((1 << 40) + 0x3000), None);
        assert_eq!(memory.guest_address(0x1000), None);

        let less = memory.without(region(0x4000, 0x1000, 0)).expect("it is there");
        assert!(memory.has(&across) && !less.has(&across));
        less.without(region(0x4000, 0x1000, 0)).expect_err("it is gone");
        less.without(region(0x2000, 0x800, 0)).expect_err("it is longer");
    }

    #[test]
    fn a_table_that_cannot_be_is_refused() {
        let refused = |regions: &[Region], len: u64| {
            Memory::map(regions.iter().map(|region| (*region, file(len)))).expect_err("refused").to_string()
        };
        let short = refused(&[region(0, 0x2000, 0)], 0x1fff);
        assert!(short.ends_with("its file is too short or not a regular file"), "{short}");
        refused(&[region(0, 0x1000, 0x1001)], 0x2000);
        refused(&[region(0, 0x1000, 1)], 0x2000); // not at a page
        refused(&[region(0, 0x1000, u64::MAX)], 0x2000);
        refused(&[region(0, 0, 0)], 0x2000);
        refused(&[region(0, 0x2000, 0), region(0x1000, 0x1000, 0)], 0x2000);
        refused(&[Region { guest: u64::MAX - 1, front_end: 0, len: 0x1000, in_file: 0 }], 0x1000);
        refused(&[Region { guest: 0, front_end: u64::MAX - 1, len: 0x1000, in_file: 0 }], 0x1000);
        let too_much = "with it, the front end would share more than 16 TiB";
        let sparse = |lens: &[u64]| {
            let regions =
                lens.iter().zip(0..).map(|(len, number)| (region(number << 45, *len, 0), file(*len)));
            Memory::map(regions).expect_err("refused").to_string()
        };
        for lens in [&[MAPPED_BYTES_MAX + 0x1000][..], &[0x1000, MAPPED_BYTES_MAX], &[0x1000, 1 << 62]] {
            let much = sparse(lens);
            assert!(much.ends_with(too_much), "{lens:x?}: {much}");
        }
        let endless = Region { guest: 0, front_end: 0, len: u64::MAX, in_file: 0 };
        let some = Memory::map([(region(0, 0x1000, 0), file(0x1000))]).expect("it is mapped");
        let endless = some.with(endless, file(0x1000)).expect_err("refused").to_string();
        assert!(endless.ends_with(too_much), "{endless}");
        let directory = File::open("/").expect("a directory");
        Memory::map([(region(0, 0x1000, 0), directory)]).expect_err("no file");
        let read_only = File::open("/proc/self/exe").expect("a file");
        Memory::map([(region(0, 0x1000, 0), read_only)]).expect_err("it cannot be written");
        let many = |count: u64| Memory::map((0..count).map(|at| (region(at << 12, 0x1000, 0), file(0x1000))));
        many(REGIONS_MAX as u64).expect("so many");
        many(REGIONS_MAX as u64 + 1).expect_err("too many");
    }
}
