//! The memory of a machine that a server maps: one file, rings first, then the buffers of requests.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU16, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use vellum_core::{Context, Error, Result};
use vhost::VhostUserMemoryRegionInfo;
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

/// The offset of the front end's addresses from the guest's, so that one cannot be mistaken for the other.
pub(super) const FRONT_END: u64 = 1 << 40;

/// Guest addresses begin at zero and are places in the file.
pub(super) struct Memory {
    file: File,
    mapped: MmapRegion,
}

fn place(at: u64) -> usize {
    usize::try_from(at).expect("an address of this process")
}

impl Memory {
    pub(super) fn new(bytes: usize) -> Result<Self> {
        let file =
            memfd_create("vellum-bench", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map(File::from);
        let file = file.map_err(std::io::Error::from).context(|| "can't make memory to share")?;
        file.set_len(bytes as u64).context(|| "can't have as much memory to share")?;
        fcntl_add_seals(&file, SealFlags::SHRINK)
            .map_err(std::io::Error::from)
            .context(|| "can't seal memory to share")?;
        let shared = file.try_clone().context(|| "can't share memory")?;
        let mapped = MmapRegion::from_file(FileOffset::new(shared, 0), bytes)
            .map_err(|error| Error::invalid(format!("can't map memory: {error}")))?;
        Ok(Self { file, mapped })
    }

    /// The memory table for the server.
    pub(super) fn table(&self) -> [VhostUserMemoryRegionInfo; 1] {
        [VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: self.mapped.size() as u64,
            userspace_addr: FRONT_END,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        }]
    }

    pub(super) fn put(&self, at: u64, bytes: &[u8]) {
        self.mapped.get_slice(place(at), bytes.len()).expect("it lies in the memory").copy_from(bytes);
    }

    pub(super) fn get<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.mapped.get_slice(place(at), N).expect("it lies in the memory").copy_to(&mut bytes);
        bytes
    }

    fn word(&self, at: u64) -> &AtomicU16 {
        self.mapped.get_atomic_ref(place(at)).expect("it lies in the memory")
    }

    /// An index of a ring.
    pub(super) fn index(&self, at: u64) -> u16 {
        u16::from_le(self.word(at).load(Ordering::Acquire))
    }

    /// A reader that sees this value also sees what was written before it.
    pub(super) fn set_index(&self, at: u64, value: u16) {
        self.word(at).store(value.to_le(), Ordering::Release);
    }
}
