//! Waiting for descriptors that this crate knows nothing of: a guest's doorbell, a control socket of another library.
//!
//! The descriptor is kept open until the wait has ended, whoever drops the future.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use vellum_core::{Error, Result};

use crate::driver::op::{Op, Readiness};
use crate::driver::submit;

/// Waits, on a worker, until the descriptor can be read without waiting, or never will have anything to read. By then
/// another may have read it: whoever must not wait makes it non-blocking.
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
            Err(errno) => return Err(Error::os(errno, "can't wait for a descriptor")),
        }
    }
}
