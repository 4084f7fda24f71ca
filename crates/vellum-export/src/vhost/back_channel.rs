//! Notifies a front end that its guest's disk has grown, without having been asked.
//!
//! ```text
//!   front end ── SET_BACKEND_REQ_FD, with a socket ──► session        that socket is the back channel
//!   session   ── CONFIG_CHANGE_MSG ──► front end ── GET_CONFIG ──► session, and the guest is interrupted
//! ```
//!
//! The `vhost` crate owns the socket and does not know this message. So a message is looked at before the
//! crate reads it: peeking at it delivers its descriptors, and they are delivered again with the message.
//!
//! 1. No answer is requested: during the wait for it, the front end's query of the configuration space would
//!    not be read.
//! 2. A front end that does not read gets no further notifications, and no thread waits for it.
//!
//! Source: the vhost-user protocol of QEMU's documentation, "Backend message types".

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};
use vhost::vhost_user::message::FrontendReq;

use super::keep_from_children;

/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`.
const CONFIG_CHANGE: u32 = 2;
/// The version of the protocol; no other flag is set.
const FLAGS: u32 = 1;
const HEADER_BYTES: usize = 12;

/// The back channel to a front end, on which it gets messages that it has not asked for.
#[derive(Debug)]
pub(super) struct BackChannel(OwnedFd);

impl BackChannel {
    /// The socket that comes with the message that is next to be read, if it is the one that brings it.
    pub(super) fn peek(socket: &UnixStream) -> Option<Self> {
        let mut header = [0; HEADER_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(socket, &mut [IoSliceMut::new(&mut header)], &mut ancillary, flags).ok()?;
        let mut sent = None;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                sent = descriptors.last().or(sent);
            }
        }
        #[expect(clippy::host_endian_bytes, reason = "both are on one host, and the protocol says so")]
        let request = u32::from_ne_bytes(*header.first_chunk().expect("12 bytes"));
        let is_it = received.bytes == HEADER_BYTES && request == u32::from(FrontendReq::SET_BACKEND_REQ_FD);
        let sent = sent.filter(|_| is_it)?;
        keep_from_children(sent.as_fd()).ok()?;
        Some(Self(sent))
    }

    /// Announces that the configuration space has changed.
    pub(super) fn notify_config_change(&self) {
        let message = [CONFIG_CHANGE, FLAGS, 0].map(u32::to_ne_bytes);
        if let Err(error) = send(&self.0, message.as_flattened(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            tracing::warn!("can't notify a vhost-user front end that its disk has grown: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsRawFd;

    use vmm_sys_util::sock_ctrl_msg::ScmSocket;

    use super::*;

    fn message(request: u32) -> [u8; HEADER_BYTES] {
        let words = [request, FLAGS, 0].map(u32::to_ne_bytes);
        *words.as_flattened().first_chunk().expect("12 bytes")
    }

    #[test]
    fn the_socket_is_taken_and_the_message_stays() {
        let (front, back) = UnixStream::pair().expect("sockets");
        assert!(BackChannel::peek(&back).is_none(), "nothing has come, and nobody waits");
        let (mut hears, speaks) = UnixStream::pair().expect("sockets");
        let bytes = message(FrontendReq::SET_BACKEND_REQ_FD.into());
        front.send_with_fd(&bytes[..], speaks.as_raw_fd()).expect("sent");
        let channel = BackChannel::peek(&back).expect("it is the one");
        channel.notify_config_change();
        let mut told = [0; HEADER_BYTES];
        hears.read_exact(&mut told).expect("told");
        assert_eq!(told, message(CONFIG_CHANGE));
        let mut read = [0; HEADER_BYTES];
        (&back).read_exact(&mut read).expect("it is still there");
        assert_eq!(read, bytes);
        drop(hears);
        drop(speaks);
        channel.notify_config_change(); // there is no reader
        let bytes = message(FrontendReq::SET_VRING_KICK.into());
        front.send_with_fd(&bytes[..], front.as_raw_fd()).expect("sent");
        assert!(BackChannel::peek(&back).is_none(), "another message");
    }

    #[test]
    fn who_does_not_read_keeps_nobody_waiting() {
        let (_silent, back) = UnixStream::pair().expect("sockets");
        let channel = BackChannel(back.into());
        (0..100_000).for_each(|_| channel.notify_config_change());
    }
}
