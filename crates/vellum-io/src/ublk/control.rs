//! The control device: which devices exist, and operations on them.
//!
//! Its commands may wait for queues to be ready or for requests to end, so each call blocks its thread. Call
//! them with [`unblock`](crate::unblock).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use io_uring::types::Fd;
use io_uring::{IoUring, cqueue, opcode, squeue};
use vellum_core::{Error, ErrorKind, Result};

use super::abi::{self, ControlCommand, DeviceInfo, PARAMETERS_LEN, Parameters};
use crate::driver::{NoRing, no_ring};

const PATH: &str = "/dev/ublk-control";

/// What to use where there is no ublk.
const INSTEAD: &str = "use --fuse FILE or --nbd unix:PATH instead";

/// The kernel's control device, open.
pub struct Control {
    device: File,
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    features: u64,
    /// An entry was left in the ring that points to freed memory: the ring is not used any more.
    is_broken: bool,
}

/// How many queues a device has, and how much they hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Queues. The kernel takes no more than there are processors.
    pub queues: u16,
    /// Requests of a queue that may be in flight.
    pub depth: u16,
    /// The most bytes of one request.
    pub request_bytes_max: u32,
}

/// What the kernel reports to its users about a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Params {
    /// The size, in sectors of 512 bytes.
    pub sectors: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// Each write is durable when it is answered; the kernel need not flush.
    pub write_through: bool,
    /// The physical block, as a power of two.
    pub physical_shift: u8,
    /// What is best, as a power of two.
    pub best_shift: u8,
    /// The most bytes of one read or write.
    pub request_bytes_max: u32,
    /// Discards are best in multiples of this many bytes.
    pub discard_granularity: u32,
    /// The most sectors of one discard; zero when there are none.
    pub range_sectors_max: u32,
    /// The most sectors of one write-zeroes; zero when there are none.
    pub zeroes_sectors_max: u32,
}

/// The kernel's description of an existing device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// What it does.
    pub state: State,
    /// What its server wrote at it when it was added.
    pub mark: u64,
    /// The process that serves it, or did.
    pub pid: i32,
    /// Its queues.
    pub shape: Shape,
}

/// What a device does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// There is no block device: not yet, or not any more.
    Dead,
    /// It is served.
    Live,
    /// Its server has exited, and its requests wait for another.
    Waiting,
}

impl Control {
    /// Opens the control device.
    ///
    /// # Errors
    /// `Unsupported` where the kernel has no driver or an old one, or provides no ring; each error says what
    /// to do.
    pub fn open() -> Result<Self> {
        let device = File::options().read(true).write(true).open(PATH).map_err(|error| not_open(&error))?;
        let ring = IoUring::builder().dontfork().build(4).map_err(|error| {
            no_ring(NoRing::Setup(error.raw_os_error().unwrap_or(libc::EIO)))
                .context("can't create a ublk device")
        })?;
        let mut control = Self { device, ring, features: 0, is_broken: false };
        let mut features = 0_u64;
        let command = Self::to(0).with(&mut features);
        let asked = control.call(abi::GET_FEATURES, command);
        let needed = abi::FEATURE_CODES | abi::FEATURE_USER_COPY;
        if asked.is_err() || features & needed != needed {
            return Err(Error::unsupported(format!(
                "can't create a ublk device: the ublk driver of this kernel is too old (Linux 6.5 or later is \
                 needed); {INSTEAD}"
            )));
        }
        control.features = features;
        Ok(control)
    }

    /// Whether the size of a device can change while it is started.
    pub fn can_resize(&self) -> bool {
        self.features & abi::FEATURE_UPDATE_SIZE != 0
    }

    /// Adds a device with this number, or the first free one, and marks it. Returns its number and its shape,
    /// which may be less than requested. One that `keeps` outlives its server, and waits for the next.
    ///
    /// # Errors
    /// `Locked` when there is a device with this number.
    pub fn add(&mut self, number: Option<u32>, shape: Shape, mark: u64, keeps: bool) -> Result<(u32, Shape)> {
        let wanted = number.unwrap_or(u32::MAX);
        let keeping = if keeps { abi::FEATURE_RECOVERY | abi::FEATURE_REISSUE } else { 0 };
        let mut info = DeviceInfo {
            queues: shape.queues,
            depth: shape.depth,
            request_bytes_max: shape.request_bytes_max,
            number: wanted,
            flags: abi::FEATURE_CODES | abi::FEATURE_USER_COPY | keeping,
            mark,
            ..DeviceInfo::default()
        };
        let command = Self::to(wanted).with(&mut info);
        self.call(abi::ADD, command).map_err(|errno| match errno {
            libc::EEXIST => Error::new(
                ErrorKind::Locked,
                format!("can't create /dev/ublkb{wanted}: a ublk device with this number exists, or a removed one \
                 is still in use"),
            ),
            libc::EPERM | libc::EACCES => {
                Error::os(errno, "can't create a ublk device: root (CAP_SYS_ADMIN) is required")
            }
            errno => Error::os(errno, "can't create a ublk device"),
        })?;
        Ok((info.number, Shape::from(&info)))
    }

    /// Sets the parameters of the device, which has not been started yet.
    pub fn describe(&mut self, number: u32, params: &Params) -> Result<()> {
        let has_ranges = params.range_sectors_max > 0;
        let read_only = if params.read_only { abi::ATTRIBUTE_READ_ONLY } else { 0 };
        let cache = match params.write_through {
            true => 0,
            false => abi::ATTRIBUTE_VOLATILE_CACHE | abi::ATTRIBUTE_FUA,
        };
        let mut parameters = Parameters {
            len: PARAMETERS_LEN,
            types: abi::TYPE_BASIC | if has_ranges { abi::TYPE_DISCARD } else { 0 },
            attributes: cache | read_only,
            logical_shift: 9,
            physical_shift: params.physical_shift,
            best_shift: params.best_shift,
            least_shift: params.physical_shift,
            sectors_max: params.request_bytes_max / 512,
            sectors: params.sectors,
            discard_granularity: params.discard_granularity,
            discard_sectors_max: params.range_sectors_max,
            zeroes_sectors_max: params.zeroes_sectors_max,
            discard_segments_max: u16::from(has_ranges),
            ..Parameters::default()
        };
        let command = Self::to(number).with(&mut parameters);
        self.call(abi::SET_PARAMETERS, command).map_err(|errno| doing(errno, "describe", number))
    }

    /// Makes the block device. Waits until all queues fetch requests, and while the kernel looks for
    /// partitions.
    pub fn start(&mut self, number: u32) -> Result<()> {
        let command = ControlCommand { data: u64::from(std::process::id()), ..Self::to(number) };
        self.call(abi::START, command).map_err(|errno| doing(errno, "start", number))
    }

    /// Stops the block device. Waits until its requests have ended; then the fetches of its queues are
    /// aborted.
    pub fn stop(&mut self, number: u32) -> Result<()> {
        self.call(abi::STOP, Self::to(number)).map_err(|errno| doing(errno, "stop", number))
    }

    /// Removes the device. Its number is free as soon as the device is no longer open anywhere.
    pub fn remove(&mut self, number: u32) -> Result<()> {
        let removed = match self.call(abi::DELETE_LATER, Self::to(number)) {
            // Linux before 6.9 waits until then.
            Err(libc::EOPNOTSUPP) => self.call(abi::DELETE, Self::to(number)),
            removed => removed,
        };
        removed.map_err(|errno| doing(errno, "remove", number))
    }

    /// The size of a device in sectors, and whether it is for reading.
    pub fn size(&mut self, number: u32) -> Result<(u64, bool)> {
        let len = u32::try_from(size_of::<Parameters>()).expect("small");
        let mut parameters = Parameters { len, ..Parameters::default() };
        let command = Self::to(number).with(&mut parameters);
        self.call(abi::GET_PARAMETERS, command).map_err(|errno| doing(errno, "look at", number))?;
        Ok((parameters.sectors, parameters.attributes & abi::ATTRIBUTE_READ_ONLY != 0))
    }

    /// Takes a device over that waits: then it can be opened, and its queues ask anew. False while its last
    /// server still has it open, which may be for a moment after its death.
    pub fn take_over(&mut self, number: u32) -> Result<bool> {
        match self.call(abi::START_RECOVERY, Self::to(number)) {
            Err(libc::EBUSY) => Ok(false),
            // None of its queues was ready when its last server ended.
            Err(libc::EINVAL) => Err(Error::os(
                libc::EINVAL,
                format!(
                    "can't take over the ublk device {number}: its last server ended during an earlier takeover, \
                     and this kernel does not allow another; a server without --ublk-keep, or `ublk del -n \
                     {number}`, removes it, and its waiting requests fail"
                ),
            )),
            taken => taken.map(|()| true).map_err(|errno| doing(errno, "take over", number)),
        }
    }

    /// Hands the waiting requests to the new queues. Waits until all of them fetch.
    pub fn go_on(&mut self, number: u32) -> Result<()> {
        let command = ControlCommand { data: u64::from(std::process::id()), ..Self::to(number) };
        self.call(abi::END_RECOVERY, command).map_err(|errno| doing(errno, "resume", number))
    }

    /// Tells the kernel that the device is larger now.
    pub fn resize(&mut self, number: u32, sectors: u64) -> Result<()> {
        let command = ControlCommand { data: sectors, ..Self::to(number) };
        self.call(abi::UPDATE_SIZE, command).map_err(|errno| doing(errno, "resize", number))
    }

    /// What there is to know of the device with this number; `None` when there is none.
    pub fn look(&mut self, number: u32) -> Result<Option<Standing>> {
        let mut info = DeviceInfo::default();
        let command = Self::to(number).with(&mut info);
        match self.call(abi::GET_INFO, command) {
            Err(libc::ENODEV) => Ok(None),
            Err(errno) => Err(doing(errno, "look at", number)),
            Ok(()) => {
                let state = match info.state {
                    abi::STATE_DEAD => State::Dead,
                    abi::STATE_LIVE => State::Live,
                    _ => State::Waiting,
                };
                Ok(Some(Standing { state, mark: info.mark, pid: info.pid, shape: Shape::from(&info) }))
            }
        }
    }

    fn to(number: u32) -> ControlCommand {
        ControlCommand { number, queue: u16::MAX, ..ControlCommand::default() }
    }

    /// Performs a command and waits for its end; fails with its `errno`.
    fn call(&mut self, code: u32, command: ControlCommand) -> Result<(), i32> {
        let entry = opcode::UringCmd80::new(Fd(self.device.as_raw_fd()), code).cmd(command.bytes()).build();
        if self.is_broken {
            return Err(libc::EIO);
        }
        // SAFETY: what the command points to belongs to the caller, which waits here until the command has
        // ended; if the command never begins, the ring is not entered again.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| libc::EBUSY)?;
        loop {
            let waited = self.ring.submit_and_wait(1);
            if let Some(completion) = self.ring.completion().next() {
                return match completion.result() {
                    0.. => Ok(()),
                    errno => Err(-errno),
                };
            }
            match waited {
                // The kernel has it, and will answer; what it uses must stay until then.
                _ if self.ring.submission().is_empty() => {}
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    self.is_broken = true;
                    return Err(error.raw_os_error().unwrap_or(libc::EIO));
                }
                _ => {}
            }
        }
    }
}

impl From<&DeviceInfo> for Shape {
    fn from(info: &DeviceInfo) -> Self {
        let DeviceInfo { queues, depth, request_bytes_max, .. } = *info;
        Self { queues, depth, request_bytes_max }
    }
}

impl ControlCommand {
    /// With a structure that the kernel reads, writes, or both.
    fn with<T>(self, structure: &mut T) -> Self {
        let len = u16::try_from(size_of::<T>()).expect("a small structure");
        Self { len, address: (&raw mut *structure).expose_provenance() as u64, ..self }
    }
}

fn not_open(error: &io::Error) -> Error {
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    match errno {
        libc::ENOENT | libc::ENODEV | libc::ENXIO => Error::unsupported(format!(
            "can't create a ublk device: there is no {PATH}, so this kernel has no ublk driver; load it with \
             `modprobe ublk_drv` (Linux 6.5 or later, built with CONFIG_BLK_DEV_UBLK), or {INSTEAD}"
        )),
        libc::EACCES | libc::EPERM => Error::os(
            errno,
            format!("can't create a ublk device: {PATH} requires root (CAP_SYS_ADMIN); or {INSTEAD}"),
        ),
        errno => Error::os(errno, format!("can't open {PATH}")),
    }
}

fn doing(errno: i32, what: &str, number: u32) -> Error {
    Error::os(errno, format!("can't {what} the ublk device {number}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_control_device_that_does_not_open_says_what_to_do() {
        let said = |errno| not_open(&io::Error::from_raw_os_error(errno));
        let absent = said(libc::ENOENT);
        assert_eq!(absent.kind(), ErrorKind::Unsupported);
        for word in [PATH, "modprobe ublk_drv", "6.5", "--fuse", "--nbd"] {
            assert!(absent.to_string().contains(word), "{word}: {absent}");
        }
        assert!(said(libc::EACCES).to_string().contains("CAP_SYS_ADMIN"));
        assert!(said(libc::EMFILE).to_string().contains(PATH));
    }
}
