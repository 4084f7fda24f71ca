//! The driver's side of one queue: a split ring with event indexes.
//!
//! ```text
//!   +0       descriptors    128 of 16 bytes: address, length, flags, next
//!   +0x1000  available      flags, index, 128 heads, when the driver wants a notification
//!   +0x2000  used           flags, index, 128 of head and length, when the device wants a notification
//! ```

use std::sync::atomic::{Ordering, fence};

use vellum_core::{Context, Result};
use vhost::VringConfigData;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::memory::{FRONT_END, Memory};

/// Descriptors of a queue.
pub(super) const SIZE: u16 = 128;
/// How much memory its rings take.
pub(super) const RING_BYTES: u64 = 0x3000;

pub(super) const NEXT: u16 = 1;
pub(super) const WRITE: u16 = 2;

pub(super) struct Ring {
    descriptors: u64,
    available: u64,
    used: u64,
    /// Notifies the device.
    pub(super) kick: EventFd,
    /// Notifies the driver.
    pub(super) call: EventFd,
    next_available: u16,
    /// The value of `next_available` at the last notification of the device.
    told: u16,
    next_used: u16,
}

impl Ring {
    pub(super) fn new(at: u64) -> Result<Self> {
        let event = || EventFd::new(EFD_NONBLOCK).context(|| "can't make an eventfd");
        Ok(Self {
            descriptors: at,
            available: at + 0x1000,
            used: at + 0x2000,
            kick: event()?,
            call: event()?,
            next_available: 0,
            told: 0,
            next_used: 0,
        })
    }

    /// The ring's parameters for the server.
    pub(super) fn config(&self) -> VringConfigData {
        VringConfigData {
            queue_max_size: SIZE,
            queue_size: SIZE,
            flags: 0,
            desc_table_addr: self.descriptors + FRONT_END,
            used_ring_addr: self.used + FRONT_END,
            avail_ring_addr: self.available + FRONT_END,
            log_addr: None,
        }
    }

    pub(super) fn set_descriptor(
        &self,
        memory: &Memory,
        index: u16,
        at: u64,
        len: u32,
        flags: u16,
        next: u16,
    ) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&at.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        memory.put(self.descriptors + u64::from(index) * 16, &bytes);
    }

    /// Makes a chain available without notifying the device.
    pub(super) fn offer(&mut self, memory: &Memory, head: u16) {
        memory.set_index(self.available + 4 + 2 * u64::from(self.next_available % SIZE), head);
        self.next_available = self.next_available.wrapping_add(1);
        memory.set_index(self.available + 2, self.next_available);
    }

    /// Notifies the device of everything that was made available, if it wants that.
    pub(super) fn tell(&mut self, memory: &Memory) -> Result<()> {
        if self.told == self.next_available {
            return Ok(());
        }
        fence(Ordering::SeqCst);
        let event = memory.index(self.used + 4 + 8 * u64::from(SIZE));
        let (new, old) = (self.next_available, self.told);
        self.told = new;
        if new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old) {
            self.kick.write(1).context(|| "can't ring for the server")?;
        }
        Ok(())
    }

    /// The head of the next chain that came back, if one has.
    pub(super) fn take(&mut self, memory: &Memory) -> Option<u16> {
        if memory.index(self.used + 2) == self.next_used {
            return None;
        }
        let row = memory.get(self.used + 4 + 8 * u64::from(self.next_used % SIZE));
        self.next_used = self.next_used.wrapping_add(1);
        u16::try_from(u32::from_le_bytes(row)).ok().or(Some(u16::MAX))
    }

    /// Requests a notification for the next chain that comes back, and returns whether one has come back
    /// already.
    pub(super) fn listen(&self, memory: &Memory) -> bool {
        memory.set_index(self.available + 4 + 2 * u64::from(SIZE), self.next_used);
        fence(Ordering::SeqCst);
        memory.index(self.used + 2) != self.next_used
    }
}
