//! How a worker reaches the kernel: through its ring or through threads.
//!
//! A ring is refused in more places than one would think: containers whose seccomp profile lacks
//! `io_uring_setup` (EPERM, or ENOSYS), `kernel.io_uring_disabled`, old kernels, locked-memory limits on
//! kernels that still count rings against them (ENOMEM). In all of these cases threads do the work, unless
//! the user insisted on the ring.

use io_uring::{IoUring, Probe, opcode};
use vellum_core::{Error, ErrorKind, Result};

/// How a worker reaches the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IoMode {
    /// A ring where the host provides one, threads otherwise.
    #[default]
    Auto,
    /// io_uring, or an error with the reason.
    Uring,
    /// A pool of threads that make blocking system calls.
    Threads,
}

/// Why there is no ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoRing {
    /// `io_uring_setup` failed with this `errno`.
    Setup(i32),
    /// The kernel has rings, but is too old for this.
    Lacks(&'static str),
}

/// What to do without a ring: continue with threads (`None`) or fail.
pub(crate) fn without_ring(mode: IoMode, reason: NoRing) -> Option<Error> {
    let refused = match reason {
        NoRing::Lacks(_) => true,
        NoRing::Setup(errno) => {
            matches!(errno, libc::ENOSYS | libc::EPERM | libc::EACCES | libc::ENOMEM | libc::EINVAL)
        }
    };
    if mode != IoMode::Uring && refused {
        return None;
    }
    Some(no_ring(reason))
}

/// The error where a ring is required.
pub(crate) fn no_ring(reason: NoRing) -> Error {
    match reason {
        NoRing::Lacks(what) => Error::new(
            ErrorKind::Unsupported,
            format!(
                "can't use io_uring: the kernel is too old for it ({what} is missing); use threads instead"
            ),
        ),
        NoRing::Setup(errno) => {
            let why = match errno {
                libc::EPERM | libc::EACCES => {
                    "; the sysctl kernel.io_uring_disabled or a seccomp filter (as containers have) forbids it"
                }
                libc::ENOSYS => "; the kernel is built without it, or a seccomp filter hides it",
                libc::ENOMEM => "; the limit on locked memory (ulimit -l) is too low for this kernel",
                libc::EMFILE | libc::ENFILE => "; the limit on open files (ulimit -n) is reached",
                _ => "",
            };
            Error::os(errno, format!("can't use io_uring{why}")).with_kind(ErrorKind::Unsupported)
        }
    }
}

/// Whether the ring supports everything that the driver needs.
pub(crate) fn check_abilities(ring: &IoUring) -> Result<(), NoRing> {
    let features = ring.params();
    let needed = [
        (features.is_feature_nodrop(), "IORING_FEAT_NODROP"),
        (features.is_feature_submit_stable(), "IORING_FEAT_SUBMIT_STABLE"),
        (features.is_feature_fast_poll(), "IORING_FEAT_FAST_POLL"),
        (features.is_feature_ext_arg(), "IORING_FEAT_EXT_ARG"),
    ];
    if let Some((_, what)) = needed.into_iter().find(|(has, _)| !has) {
        return Err(NoRing::Lacks(what));
    }
    let mut probe = Probe::new();
    let probed = ring.submitter().register_probe(&mut probe);
    probed.map_err(|_| NoRing::Lacks("IORING_REGISTER_PROBE"))?;
    let needed = [
        (opcode::Read::CODE, "read"),
        (opcode::Write::CODE, "write"),
        (opcode::Readv::CODE, "readv"),
        (opcode::Writev::CODE, "writev"),
        (opcode::Fsync::CODE, "fsync"),
        (opcode::Fallocate::CODE, "fallocate"),
        (opcode::Recv::CODE, "recv"),
        (opcode::Send::CODE, "send"),
        (opcode::RecvMsg::CODE, "recvmsg"),
        (opcode::SendMsg::CODE, "sendmsg"),
        (opcode::Accept::CODE, "accept"),
        (opcode::PollAdd::CODE, "poll"),
        (opcode::AsyncCancel::CODE, "cancel"),
    ];
    match needed.into_iter().find(|(code, _)| !probe.is_supported(*code)) {
        Some((_, what)) => Err(NoRing::Lacks(what)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_goes_on_with_threads_where_a_ring_is_refused() {
        for errno in [libc::ENOSYS, libc::EPERM, libc::EACCES, libc::ENOMEM] {
            assert!(without_ring(IoMode::Auto, NoRing::Setup(errno)).is_none(), "errno {errno}");
        }
        assert!(without_ring(IoMode::Auto, NoRing::Lacks("fallocate")).is_none());
    }

    #[test]
    fn auto_does_not_hide_a_shortage() {
        let error = without_ring(IoMode::Auto, NoRing::Setup(libc::EMFILE)).expect("a failure");
        assert!(error.to_string().contains("ulimit -n"));
    }

    #[test]
    fn an_explicit_ring_fails_with_the_likely_cause() {
        let error = without_ring(IoMode::Uring, NoRing::Setup(libc::EPERM)).expect("a failure");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("kernel.io_uring_disabled"));
        assert!(error.to_string().contains("seccomp"));
        let error = without_ring(IoMode::Uring, NoRing::Lacks("fallocate")).expect("a failure");
        assert!(error.to_string().contains("too old"));
    }
}
