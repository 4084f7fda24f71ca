//! A device as its server has it open, and one of its queues.
//!
//! ```text
//!   next(tag, None)      FETCH_REQ               ─► the kernel has a request for this tag
//!   row(tag)             what it asks            ◄─ memory that the kernel shows
//!   take, give           the data of a write, of a read
//!   next(tag, answer)    COMMIT_AND_FETCH_REQ    ─► it was answered; and the next one, please
//!                                                ─► or there are no more: the device was stopped
//! ```

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use vellum_core::{Buffer, Context as _, Error, Result};

use super::abi::{self, IoCommand, IoDescriptor};
use crate::driver::op::{Command, Op, slices, slices_mut};
use crate::driver::submit;

/// How long the device's file may take to be there, and to have its owner, where `udev` makes it.
const PATIENCE: Duration = Duration::from_secs(5);

/// A device that was added, open for its server.
pub struct Device {
    file: Arc<OwnedFd>,
}

/// One queue of a device.
pub struct Queue {
    file: Arc<OwnedFd>,
    rows: Rows,
    number: u16,
}

/// A request, as the kernel shares it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// The operation, in the low byte, and its flags.
    pub op_flags: u32,
    /// How many sectors of 512 bytes.
    pub sectors: u32,
    /// The first of them.
    pub start: u64,
}

/// What a queue hears.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    /// There is a request.
    Request,
    /// There are no more.
    NoMore,
    /// The kernel had no memory for it; nothing was submitted, and the caller must submit it again.
    NotNow,
}

impl Device {
    /// Opens the device. Waits for its file, blocking the thread.
    ///
    /// # Errors
    /// Another has it open.
    pub fn open(number: u32) -> Result<Self> {
        let path = PathBuf::from(format!("/dev/ublkc{number}"));
        let begun = Instant::now();
        loop {
            match File::options().read(true).write(true).open(&path) {
                Ok(file) => return Ok(Self { file: Arc::new(file.into()) }),
                Err(error) => {
                    let is_early = matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EACCES));
                    if !is_early || begun.elapsed() > PATIENCE {
                        return Err(error).context(|| format!("can't open {}", path.display()));
                    }
                }
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// One of its queues, with requests of this many tags.
    pub fn queue(&self, number: u16, depth: u16) -> Result<Queue> {
        let rows = Rows::map(&self.file, number, depth)?;
        Ok(Queue { file: self.file.clone(), rows, number })
    }
}

impl Queue {
    /// Returns the result of the last request of this tag to the kernel, if there was one (a count of bytes,
    /// or an `errno` below zero), and waits for the next. Must run on a worker that has a ring, and always on
    /// the same one.
    ///
    /// # Errors
    /// The kernel does not understand, such as on a worker without a ring.
    pub async fn next(&self, tag: u16, answer: Option<i32>) -> Result<Told> {
        let code = if answer.is_some() { abi::COMMIT_AND_FETCH } else { abi::FETCH };
        let words = IoCommand { queue: self.number, tag, result: answer.unwrap_or(0), address: 0 }.bytes();
        let (result, _) = submit(Op::Command(Command { device: self.file.clone(), code, words })).await;
        match result {
            Ok(0) => Ok(Told::Request),
            Err(libc::ENODEV) => Ok(Told::NoMore),
            Err(libc::ENOMEM | libc::EAGAIN) => Ok(Told::NotNow),
            Ok(word) => Err(Error::unsupported(format!("a ublk queue received the unknown request {word}"))),
            Err(errno) => {
                Err(Error::os(errno, format!("can't fetch requests of ublk queue {}", self.number)))
            }
        }
    }

    /// The request of this tag.
    pub fn row(&self, tag: u16) -> Row {
        let IoDescriptor { op_flags, sectors, start, address: _ } = self.rows.get(tag);
        Row { op_flags, sectors, start }
    }

    /// The data of a write, of which there are `len` bytes.
    pub fn take(&self, tag: u16, len: usize) -> Result<Buffer> {
        let mut buffer = Buffer::for_overwrite(len);
        let mut done = 0;
        while done < len {
            let mut slices = slices_mut(&mut buffer, done, len - done);
            done += self.moved(rustix::io::preadv(&self.file, &mut slices, self.place(tag, done)))?;
        }
        Ok(buffer)
    }

    /// Hands over the data of a read.
    pub fn give(&self, tag: u16, data: &Buffer) -> Result<()> {
        let (len, mut done) = (data.len(), 0);
        while done < len {
            let slices = slices(data, done, len - done);
            done += self.moved(rustix::io::pwritev(&self.file, &slices, self.place(tag, done)))?;
        }
        Ok(())
    }

    fn moved(&self, result: Result<usize, Errno>) -> Result<usize> {
        let failed = |errno: Errno| {
            let context = format!("can't move the data of a request of ublk queue {}", self.number);
            Error::os(errno.raw_os_error(), context)
        };
        match result {
            Ok(0) => Err(failed(Errno::IO)),
            Err(Errno::INTR) => Ok(0),
            result => result.map_err(failed),
        }
    }

    /// Where in the device a byte of the request's data is.
    fn place(&self, tag: u16, done: usize) -> u64 {
        let (queue, tag) = (u64::from(self.number), u64::from(tag));
        abi::BUFFERS_AT + (queue << abi::QUEUE_SHIFT | tag << abi::TAG_SHIFT) + done as u64
    }
}

/// The memory in which the kernel shows a queue's requests.
struct Rows {
    start: NonNull<IoDescriptor>,
    len: usize,
    depth: u16,
}

// SAFETY: it is memory of the whole process, read by the holder of the value.
unsafe impl Send for Rows {}

impl Rows {
    fn map(file: &OwnedFd, queue: u16, depth: u16) -> Result<Self> {
        // SAFETY: it only queries a number.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).expect("pages have a size");
        let len = (usize::from(depth) * size_of::<IoDescriptor>()).next_multiple_of(page);
        let stride = (abi::DEPTH_MAX * size_of::<IoDescriptor>()).next_multiple_of(page);
        let at = i64::try_from(usize::from(queue) * stride).expect("a small number");
        let file = file.as_fd().as_raw_fd();
        // SAFETY: a new mapping, which the kernel places; nothing else is touched.
        let start = unsafe { libc::mmap(null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file, at) };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error())
                .context(|| format!("can't see the requests of ublk queue {queue}"));
        }
        let start = NonNull::new(start.cast()).expect("a mapping is not at zero");
        Ok(Self { start, len, depth })
    }

    fn get(&self, tag: u16) -> IoDescriptor {
        assert!(tag < self.depth, "tag {tag} of a queue of {}", self.depth);
        // SAFETY: the mapping has room for `depth` of them and lasts as long as `self`. The kernel writes a
        // row before it announces the request, and not again before the answer; a device that does otherwise
        // yields odd numbers, which are all legal.
        unsafe { self.start.add(usize::from(tag)).read_volatile() }
    }
}

impl Drop for Rows {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and there are no references into it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}
