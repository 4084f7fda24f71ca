//! Waiting for descriptors that this crate does not otherwise use: a guest's doorbell, a control socket of
//! another library.
//!
//! The descriptor is kept open until the wait has ended, even if the future is dropped.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use vellum_core::{Error, Result};

use crate::driver::op::{Op, Readiness};
use crate::driver::{submit, why_given_up};

/// Waits, on a worker, until the descriptor can be read without blocking, or will never have anything to
/// read. Another reader may be faster: a caller that must not block makes the descriptor non-blocking.
pub async fn readable(descriptor: &Arc<OwnedFd>) -> Result<()> {
    until(descriptor, Readiness::Read).await
}

/// Waits, on a worker, until the descriptor can be written without waiting, or never will be.
pub async fn writable(descriptor: &Arc<OwnedFd>) -> Result<()> {
    until(descriptor, Readiness::Write).await
}

async fn until(descriptor: &Arc<OwnedFd>, readiness: Readiness) -> Result<()> {
    loop {
        let (result, _) = submit(Op::Await(descriptor.clone(), readiness)).await;
        match result {
            Ok(_) => return Ok(()),
            Err(libc::EINTR | libc::EAGAIN) => {}
            Err(errno) => {
                return Err(Error::os(errno, format!("can't wait for a descriptor{}", why_given_up())));
            }
        }
    }
}
