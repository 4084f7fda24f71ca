//! The kernel's nbd driver: a block device whose requests go to an NBD server, through a socket.
//!
//! ```text
//!   /dev/nbdN   NbdDevice::open ► run, on a thread of its own: sockets, size, flags ► the device is there ► its end
//!                                 is_connected, write_back, disconnect: from other threads, meanwhile
//! ```
//!
//! 1. The sockets are past the handshake: the kernel sends requests and expects simple replies, and nothing else.
//! 2. The driver wants a device to be described, and run, by one thread. Who comes second is refused.
//! 3. Every request to the driver carries a number, never an address. So nothing here is shared with the kernel.
//!
//! Left out: the driver's netlink interface, which other programs may use for the same devices, and with which a device
//! can wait for another server.
//!
//! Source: `include/uapi/linux/nbd.h` and `drivers/block/nbd.c` of Linux.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use vellum_core::{Context, Error, ErrorKind, Result, lock};

/// The driver's number among block devices.
const MAJOR: u32 = 43;

/// Requests of the driver: `_IO(0xab, N)`.
const SET_SOCK: u16 = 0xab00;
const SET_BLKSIZE: u16 = 0xab01;
const DO_IT: u16 = 0xab03;
const CLEAR_SOCK: u16 = 0xab04;
const SET_SIZE_BLOCKS: u16 = 0xab07;
const DISCONNECT: u16 = 0xab08;
const SET_TIMEOUT: u16 = 0xab09;
const SET_FLAGS: u16 = 0xab0a;

/// A block device of the driver.
#[derive(Debug)]
pub struct NbdDevice {
    /// Open until the device has lost its server: the driver keeps it for that server as long as anybody has it open.
    file: Mutex<Option<Arc<File>>>,
    path: PathBuf,
    /// Its directory in `/sys`, by number: the path may be a link.
    facts: PathBuf,
}

/// What a device is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NbdShape {
    /// Blocks that requests have whole: a power of two from 512 to the size of a page.
    pub block_bytes: u32,
    /// The size of the device, in blocks.
    pub blocks: u64,
    /// Transmission flags, as the server has sent them.
    pub flags: u16,
}

impl NbdDevice {
    /// Opens the device at `path`.
    ///
    /// # Errors
    /// `NotFound` when there is none, `Invalid` when it belongs to another driver.
    pub fn open(path: &Path) -> Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(|error| {
            let is_missing = error.kind() == io::ErrorKind::NotFound;
            let hint = if is_missing { " (is the driver loaded? `modprobe nbd`)" } else { "" };
            Error::io(error, format!("can't open the block device {}{hint}", path.display()))
        })?;
        let kind = file.metadata().context(|| format!("can't look at {}", path.display()))?;
        let (major, minor) = (libc::major(kind.rdev()), libc::minor(kind.rdev()));
        if !kind.file_type().is_block_device() || major != MAJOR {
            return Err(Error::invalid(format!(
                "{} is no block device of the kernel's nbd driver; use /dev/nbd0, /dev/nbd1, …",
                path.display()
            )));
        }
        let facts = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        Ok(Self { file: Mutex::new(Some(Arc::new(file))), path: path.to_owned(), facts })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it has a server, of this program or another.
    pub fn is_connected(&self) -> bool {
        self.facts.join("pid").exists()
    }

    /// The process that serves it.
    pub fn served_by(&self) -> Option<u32> {
        std::fs::read_to_string(self.facts.join("pid")).ok()?.trim().parse().ok()
    }

    /// Gives the device these connections, and returns when it was disconnected. Blocks until then.
    ///
    /// # Errors
    /// `Locked` when it has a server already.
    pub fn run(&self, sockets: Vec<OwnedFd>, shape: NbdShape) -> Result<()> {
        let context = || format!("can't connect {}", self.path.display());
        if self.is_connected() {
            return Err(self.in_use());
        }
        for (index, socket) in sockets.iter().enumerate() {
            let taken = self.ask(SET_SOCK, number_of(socket.as_raw_fd()));
            if let Err(error) = taken {
                if index > 0 {
                    drop(self.ask(CLEAR_SOCK, 0));
                }
                let busy = matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EINVAL));
                return Err(if busy { self.in_use() } else { Error::io(error, context()) });
            }
        }
        // The kernel has them as well now, and nobody else should.
        drop(sockets);
        let blocks = usize::try_from(shape.blocks).map_err(|_| Error::invalid("the disk is too large"))?;
        let described = self
            .ask(SET_BLKSIZE, shape.block_bytes as usize)
            .and_then(|()| self.ask(SET_SIZE_BLOCKS, blocks))
            .and_then(|()| self.ask(SET_FLAGS, usize::from(shape.flags)))
            // The server is this program: a request that takes long is no reason to give it up.
            .and_then(|()| self.ask(SET_TIMEOUT, 0));
        let ended = described.and_then(|()| self.ask(DO_IT, 0));
        drop(self.ask(CLEAR_SOCK, 0));
        *lock(&self.file) = None;
        ended.context(context)
    }

    fn in_use(&self) -> Error {
        let by = self.served_by().map(|pid| format!(" by process {pid}")).unwrap_or_default();
        Error::new(ErrorKind::Locked, format!("{} is connected already{by}", self.path.display()))
    }

    /// Has the kernel write what it has cached of the device, and flush it.
    ///
    /// # Errors
    /// When a write or the flush failed, now or before.
    pub fn write_back(&self) -> Result<()> {
        let context = || format!("can't write back what is cached of {}", self.path.display());
        self.file().and_then(|file| file.sync_all()).context(context)
    }

    /// Takes the connections from it. Requests that come later fail.
    ///
    /// # Errors
    /// `Invalid` when it has no server.
    pub fn disconnect(&self) -> Result<()> {
        if !self.is_connected() {
            return Err(Error::invalid(format!("{} is not connected", self.path.display())));
        }
        // Some kernels end a device only when its sockets are cleared as well.
        let asked = self.ask(DISCONNECT, 0);
        let cleared = self.ask(CLEAR_SOCK, 0);
        asked.and(cleared).context(|| format!("can't disconnect {}", self.path.display()))
    }

    fn file(&self) -> io::Result<Arc<File>> {
        lock(&self.file).clone().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOTCONN))
    }

    fn ask(&self, request: u16, number: usize) -> io::Result<()> {
        let file = self.file()?;
        // SAFETY: the descriptor is open, and is one of the nbd driver, whose requests take a number and no address.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::Ioctl::from(request), number) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

fn number_of(descriptor: RawFd) -> usize {
    usize::try_from(descriptor).expect("an open descriptor is not negative")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_device_of_the_driver_is_refused() {
        let missing = NbdDevice::open(Path::new("/dev/nbd-of-nobody")).expect_err("there is none");
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        assert!(missing.chain().contains("modprobe nbd"), "{}", missing.chain());
        let other = NbdDevice::open(Path::new("/dev/null")).expect_err("it is of another driver");
        assert_eq!(other.kind(), ErrorKind::Invalid);
        assert!(other.chain().contains("/dev/null"), "{}", other.chain());
    }
}
