//! The memory of a guest, which is mapped here and lent to requests in place.
//!
//! ```text
//!   guest's addresses ──► runs of mapped memory ──► Buffer ──► the kernel, for the drive to read and write
//!                                                     └─ holds the mapping until the last of it is dropped
//! ```
//!
//! 1. Only memory that is mapped readable and writable is lent.
//! 2. Memory that was lent stays mapped until the buffer is gone, even if the front end has taken the memory
//!    back.
//! 3. If a file was truncated after it was mapped, the kernel reports that (EFAULT) and the request fails.
//!    Copies in this process raise SIGBUS, as any access does.

use std::ptr::NonNull;
use std::sync::Arc;

use smallvec::SmallVec;
use vellum_core::{Buffer, Error, Result};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// Memory of a guest, mapped readable and writable.
#[derive(Clone, Default)]
pub struct GuestRam {
    mapped: GuestMemoryMmap,
}

impl GuestRam {
    /// This memory, if all of it may be read and written.
    pub fn new(mapped: GuestMemoryMmap) -> Result<Arc<Self>> {
        const BOTH: i32 = libc::PROT_READ | libc::PROT_WRITE;
        if mapped.iter().any(|region| region.prot() & BOTH != BOTH) {
            return Err(Error::invalid("memory of a guest is not mapped for reading and writing"));
        }
        Ok(Arc::new(Self { mapped }))
    }

    /// The mapping itself, for callers that copy.
    pub fn mapped(&self) -> &GuestMemoryMmap {
        &self.mapped
    }

    /// Lends runs of it, in order: the guest's address and the length of each. `None` when some of them are
    /// not there.
    pub fn lend(self: &Arc<Self>, runs: impl IntoIterator<Item = (u64, usize)>) -> Option<Buffer> {
        let mut places: SmallVec<[(NonNull<u8>, usize); 4]> = SmallVec::new();
        for (at, len) in runs {
            // An address plus a length may overflow.
            at.checked_add(len as u64)?;
            for slice in self.mapped.get_slices(GuestAddress(at), len) {
                let slice = slice.ok()?;
                places.push((NonNull::new(slice.ptr_guard_mut().as_ptr())?, slice.len()));
            }
        }
        // SAFETY: the places are in regions that are mapped readable and writable, and are unmapped when the
        // last clone of them is dropped, of which the keeper has one. `vm-memory` makes no references to
        // guest memory; it lends raw pointers only, to code that is itself unsafe.
        Some(unsafe { Buffer::lent(places, self.clone()) })
    }
}

impl std::fmt::Debug for GuestRam {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GuestRam({} regions)", self.mapped.num_regions())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use vm_memory::{Bytes, FileOffset, GuestRegionMmap, MmapRegion};

    use super::*;

    const PAGE: usize = 4096;

    fn file(len: usize) -> File {
        let file = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        let file = File::from(file);
        file.set_len(len as u64).expect("its length");
        file
    }

    /// Two pages that follow each other for the guest, a hole, and one more.
    fn ram() -> Arc<GuestRam> {
        let mut mapped = GuestMemoryMmap::default();
        for at in [PAGE, 2 * PAGE, 4 * PAGE] {
            let region = MmapRegion::from_file(FileOffset::new(file(PAGE), 0), PAGE).expect("it is mapped");
            let region = GuestRegionMmap::new(region, GuestAddress(at as u64)).expect("it has an address");
            mapped = mapped.insert_region(Arc::new(region)).expect("there is room");
        }
        GuestRam::new(mapped).expect("it is for reading and writing")
    }

    #[test]
    fn what_is_lent_is_the_guests() {
        let ram = ram();
        let page = PAGE as u64;
        let mut buffer = ram.lend([(2 * page - 8, 16), (4 * page, 4)]).expect("it is there");
        assert_eq!((buffer.len(), buffer.lent_len()), (20, 20));
        buffer.copy_from(0, &[5; 20]);
        let mut seen = [0; 18];
        ram.mapped().read_slice(&mut seen, GuestAddress(2 * page - 9)).expect("it is there");
        assert_eq!(seen[..2], [0, 5]);
        assert_eq!(seen[16..], [5, 0]);
        ram.mapped().write_slice(&[9; 3], GuestAddress(4 * page)).expect("it is there");
        assert_eq!(buffer.to_vec()[15..], [5, 9, 9, 9, 5]);
    }

    #[test]
    fn nothing_is_lent_that_is_not_there() {
        let (ram, page) = (ram(), PAGE as u64);
        for (at, len) in
            [(0, 1), (page - 1, 2), (3 * page - 1, 2), (4 * page, PAGE + 1), (u64::MAX, 2), (u64::MAX, 1)]
        {
            assert!(ram.lend([(page, 1), (at, len)]).is_none(), "{len} bytes from {at:#x}");
        }
        assert_eq!(ram.lend([(0, 0)]).map(|buffer| buffer.len()), Some(0));
    }

    #[test]
    fn it_stays_mapped_as_long_as_it_is_lent() {
        let ram = ram();
        let mut buffer = ram.lend([(PAGE as u64, 2 * PAGE)]).expect("it is there");
        drop(ram);
        let tail = buffer.split_off(PAGE);
        drop(buffer);
        let mut tail = std::thread::spawn(move || tail).join().expect("a thread");
        tail.fill(7);
        assert_eq!(tail.to_vec(), [7; PAGE]);
    }

    #[test]
    fn memory_that_cannot_be_written_is_not_lent() {
        let region = MmapRegion::build(
            Some(FileOffset::new(file(PAGE), 0)),
            PAGE,
            libc::PROT_READ,
            libc::MAP_SHARED | libc::MAP_NORESERVE,
        );
        let region =
            GuestRegionMmap::new(region.expect("it is mapped"), GuestAddress(0)).expect("an address");
        let mapped = GuestMemoryMmap::default().insert_region(Arc::new(region)).expect("there is room");
        GuestRam::new(mapped).expect_err("it is for reading only");
    }
}
