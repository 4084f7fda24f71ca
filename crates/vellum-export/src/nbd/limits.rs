//! What one client may use: time, memory, requests. The server chooses the numbers; every resource that a
//! peer can make a session hold is bounded by one of them.
//!
//! ```text
//!   handshake      4 KiB receive buffer + an option (option_bytes_max) + an answer (reply_bytes_max), the last two
//!                  perhaps doubled while they grow and are sent
//!   transmission   receive_bytes + memory_bytes_max (payloads, read buffers, replies not yet sent)
//!                  + less than 1 KiB for each of requests_max
//! ```
//!
//! With the defaults that is at most 700 KiB in the handshake and 32.4 MiB in the transmission; an idle
//! client holds 256 KiB. TLS adds 450 KiB: its inbox, a record, and replies while they are sealed and sent.
//! The memory that the disk needs to execute a request is the disk's own.

use std::time::Duration;

use vellum_core::{Error, Result};

use super::wire;

/// What one client may take. The defaults suit a server that faces many.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionLimits {
    /// How long the handshake may take as a whole.
    pub handshake_time: Duration,
    /// How many options a client may send. `qemu-nbd --list` sends two for each export.
    pub options_max: u32,
    /// The longest option that is read; a longer one is refused, and its data discarded.
    pub option_bytes_max: u32,
    /// All bytes a client may send before it has chosen an export.
    pub handshake_bytes_max: u64,
    /// The longest reply to one option. A list of exports that is longer ends with `NBD_REP_ERR_TOO_BIG`.
    pub reply_bytes_max: usize,
    /// Requests that run or whose replies are not yet sent.
    pub requests_max: usize,
    /// The largest payload of one request, advertised to clients: 1 MiB or more, unless disks are smaller.
    pub payload_bytes_max: u32,
    /// Memory for payloads, both ways, of requests that run or whose replies are not yet sent.
    pub memory_bytes_max: usize,
    /// Only one client is admitted at a time, so the server does not say that a client may connect several times.
    pub is_only_client: bool,
    /// The receive buffer: how many requests one host read can bring.
    pub receive_bytes: usize,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self {
            handshake_time: Duration::from_secs(10),
            options_max: 8192,
            option_bytes_max: 64 << 10,
            handshake_bytes_max: 4 << 20,
            reply_bytes_max: 256 << 10,
            requests_max: 128,
            payload_bytes_max: wire::PAYLOAD_BYTES_DEFAULT,
            memory_bytes_max: 32 << 20,
            is_only_client: false,
            receive_bytes: 256 << 10,
        }
    }
}

impl SessionLimits {
    /// Checks whether a session can work with these numbers; the error names the one with which it cannot.
    pub fn check(&self) -> Result<()> {
        let least = |what: &str, given: usize, least: usize| match given >= least {
            true => Ok(()),
            false => Err(Error::invalid(format!("{what} is {given}, but at least {least} is needed"))),
        };
        // `NBD_OPT_GO` with the longest name and every fact must fit, and so must the answer to it.
        least("option_bytes_max", self.option_bytes_max as usize, wire::STRING_BYTES_MAX + 64)?;
        least("reply_bytes_max", self.reply_bytes_max, 4 * wire::STRING_BYTES_MAX)?;
        least("requests_max", self.requests_max, 1)?;
        // The preferred block size is at least 512 and a payload holds one ("Size constraints"); clients may
        // read 65,536 bytes without fragments (`NBD_CMD_READ`).
        least("payload_bytes_max", self.payload_bytes_max as usize, 64 << 10)?;
        least("memory_bytes_max", self.memory_bytes_max, memory_of(u64::from(self.payload_bytes_max)))?;
        least("receive_bytes", self.receive_bytes, 4096)
    }
}

/// The memory a buffer of `len` bytes takes: pages, and powers of two up to 2 MiB ([`vellum_core::Buffer`]).
pub(super) fn memory_of(len: u64) -> usize {
    let len = usize::try_from(len).expect("a payload fits the address space");
    match len.max(1).next_multiple_of(4096) {
        pages if pages <= 2 << 20 => pages.next_power_of_two(),
        pages => pages,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_work() {
        SessionLimits::default().check().expect("the defaults are legal");
    }

    #[test]
    fn numbers_that_cannot_work_are_refused_by_name() {
        let small = SessionLimits { memory_bytes_max: 1 << 20, ..SessionLimits::default() };
        let error = small.check().expect_err("a payload would never fit");
        assert_eq!(error.to_string(), "memory_bytes_max is 1048576, but at least 33554432 is needed");
        SessionLimits { payload_bytes_max: 1 << 20, ..small }.check().expect("now it fits");
        SessionLimits { requests_max: 0, ..SessionLimits::default() }.check().expect_err("nothing could run");
    }

    #[test]
    fn a_buffer_takes_what_it_is_charged() {
        let pairs = [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192), (9000, 16384), (513 << 10, 1 << 20)];
        for (len, memory) in pairs {
            assert_eq!(memory_of(len), memory, "{len} bytes");
        }
        assert_eq!(memory_of((3 << 20) + 1), (3 << 20) + 4096);
    }
}
