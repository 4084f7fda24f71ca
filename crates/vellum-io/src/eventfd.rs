//! Adding one to a foreign eventfd, whose owner may have filled it and made it blocking.
//!
//! ```text
//!   ring(fd) ── io_submit: read nothing of an empty file, and say so at fd ──▶ eventfd_signal in the kernel
//! ```
//!
//! Whether a write to an eventfd blocks is decided by a flag that both sides share, so the other side can
//! change it between any check and the write. `RWF_NOWAIT` is refused for eventfds, and io_uring checks the
//! same flag twice. The kernel's own notifications never block: they stop at the highest number. Of the ways
//! to cause one, Linux AIO is the one that needs nothing per eventfd. It costs half a microsecond more than a
//! write.
//!
//! 1. A notification is complete when the call returns: nothing is in flight, and nothing holds the
//!    descriptor.
//! 2. Each thread that notifies has a context of its own, so threads do not wait for one another.
//!
//! Left out: on hosts without Linux AIO, or that have used up `fs.aio-max-nr`, a front end that clears
//! `O_NONBLOCK` between two of our system calls can make a worker block there. Nothing else can.

use std::cell::OnceCell;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;

use rustix::fs::{MemfdFlags, OFlags, fcntl_getfl, fcntl_setfl, memfd_create, readlink};

/// `IOCB_CMD_PREAD`.
const READ: u16 = 0;
/// `IOCB_FLAG_RESFD`.
const TELL_EVENTFD: u32 = 1;
/// How many completions are thrown away at once.
const THROWN_AWAY: usize = 64;

thread_local! {
    static RINGER: OnceCell<Option<Ringer>> = const { OnceCell::new() };
}

/// Adds one to an eventfd, or leaves it unchanged when it is full. Never blocks, whatever the other holders
/// of the eventfd do.
pub fn ring(eventfd: impl AsFd) {
    let eventfd = eventfd.as_fd();
    let is_rung = RINGER.with(|ringer| {
        let ringer = ringer.get_or_init(Ringer::new).as_ref();
        ringer.is_some_and(|ringer| ringer.ring(eventfd))
    });
    if !is_rung {
        write(eventfd);
    }
}

/// Where the kernel has no better way, or refused it: the reader of the eventfd must not wait forever.
fn write(eventfd: BorrowedFd<'_>) {
    let link = readlink(format!("/proc/self/fd/{}", eventfd.as_raw_fd()), Vec::new());
    if link.is_ok_and(|link| link.as_bytes() != b"anon_inode:[eventfd]") {
        return; // this is a regular file or the like: not ours to write
    }
    if let Ok(flags) = fcntl_getfl(eventfd)
        && (flags.contains(OFlags::NONBLOCK) || fcntl_setfl(eventfd, flags | OFlags::NONBLOCK).is_ok())
    {
        #[expect(clippy::host_endian_bytes, reason = "an eventfd takes a number of the host")]
        let one = 1u64.to_ne_bytes();
        // A full counter already says everything.
        let _ = rustix::io::write(eventfd, &one);
    }
}

/// A context of Linux AIO, and an empty file.
struct Ringer {
    context: libc::c_ulong,
    empty: OwnedFd,
}

/// `struct iocb`; what is between `data` and `opcode` are two words in the host's order, zero both.
#[repr(C)]
#[derive(Default)]
struct Request {
    data: u64,
    key_and_flags: u64,
    opcode: u16,
    priority: i16,
    descriptor: u32,
    buffer: u64,
    len: u64,
    at: i64,
    reserved: u64,
    flags: u32,
    eventfd: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Completion([u64; 4]);

impl Ringer {
    fn new() -> Option<Self> {
        // A host may require the file to be marked as not executable; old kernels do not know the flag.
        let made = |flags| memfd_create("vellum-bells", flags | MemfdFlags::CLOEXEC);
        let empty = made(MemfdFlags::NOEXEC_SEAL).or_else(|_| made(MemfdFlags::empty())).ok()?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes one number there.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut context) };
        (made == 0).then_some(Self { context, empty })
    }

    /// False when the kernel did not, for now or because the host forbids it.
    fn ring(&self, eventfd: BorrowedFd<'_>) -> bool {
        let mut rung = self.submit(eventfd);
        if rung == Err(libc::EAGAIN) {
            // It keeps completions until they are fetched, and has room for a few dozen.
            self.throw_away();
            rung = self.submit(eventfd);
        }
        rung.is_ok()
    }

    fn submit(&self, eventfd: BorrowedFd<'_>) -> Result<(), i32> {
        let number = |descriptor: i32| u32::try_from(descriptor).expect("descriptors are not negative");
        let mut request = Request {
            opcode: READ,
            descriptor: number(self.empty.as_raw_fd()),
            flags: TELL_EVENTFD,
            eventfd: number(eventfd.as_raw_fd()),
            ..Request::default()
        };
        let mut requests = [&raw mut request];
        // SAFETY: the kernel reads one pointer, and reads and writes the request behind it, before the call
        // returns; the request names no memory, and its descriptors are open.
        let begun = unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1, requests.as_mut_ptr()) };
        if begun == 1 {
            Ok(())
        } else {
            Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
        }
    }

    fn throw_away(&self) {
        let mut completions = [Completion([0; 4]); THROWN_AWAY];
        let most = i64::try_from(THROWN_AWAY).expect("a small number");
        loop {
            let into = completions.as_mut_ptr();
            let no_time = null_mut::<libc::timespec>();
            // SAFETY: the kernel writes at most as many completions as there is room for, and does not wait
            // for more before it returns.
            let got = unsafe { libc::syscall(libc::SYS_io_getevents, self.context, 0, most, into, no_time) };
            if got < most {
                return;
            }
        }
    }
}

impl Drop for Ringer {
    fn drop(&mut self) {
        // SAFETY: the context is ours, and not used any more.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

#[cfg(test)]
#[expect(clippy::host_endian_bytes, reason = "an eventfd takes a number of the host")]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn made(count: u32) -> OwnedFd {
        eventfd(count, EventfdFlags::CLOEXEC).expect("an eventfd")
    }

    fn count(eventfd: &OwnedFd) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(eventfd, &mut count).expect("it was rung");
        u64::from_ne_bytes(count)
    }

    #[test]
    fn each_ring_counts_once_however_many_there_are() {
        let eventfd = made(0);
        for rings in [1, 3, 1000] {
            (0..rings).for_each(|_| ring(&eventfd));
            assert_eq!(count(&eventfd), rings);
        }
        write(eventfd.as_fd());
        assert_eq!(count(&eventfd), 1, "without the kernel's help, too");
    }

    #[test]
    fn one_that_is_full_and_blocking_makes_no_thread_wait() {
        let eventfd = made(0);
        rustix::io::write(&eventfd, &(u64::MAX - 1).to_ne_bytes()).expect("it is full now");
        (0..1000).for_each(|_| ring(&eventfd));
        let flags = fcntl_getfl(&eventfd).expect("its flags");
        assert!(!flags.contains(OFlags::NONBLOCK), "it was left as it was");
        write(eventfd.as_fd());
        assert!(count(&eventfd) >= u64::MAX - 1);
    }

    /// As where a host lets contexts be made, and does not let them be used.
    #[test]
    fn where_the_kernel_does_not_help_it_is_written() {
        std::thread::spawn(|| {
            let mut ringer = Ringer::new().expect("a context");
            // SAFETY: it is ours, and nothing in it is in flight.
            unsafe { libc::syscall(libc::SYS_io_destroy, ringer.context) };
            ringer.context = 0;
            RINGER.with(|cell| assert!(cell.set(Some(ringer)).is_ok(), "nothing was rung in this thread"));
            let eventfd = made(0);
            ring(&eventfd);
            assert_eq!(count(&eventfd), 1);
        })
        .join()
        .expect("it was rung");
    }

    #[test]
    fn what_is_no_eventfd_is_left_alone() {
        let file = memfd_create("none", MemfdFlags::CLOEXEC).expect("a file");
        ring(&file);
        assert_eq!(rustix::fs::fstat(&file).expect("its facts").st_size, 0);
    }
}
