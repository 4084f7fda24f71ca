//! A connection to a peer: bytes in, bytes out, in order. Sessions are written against it, so that they run
//! on a socket and in the simulator alike.

use crate::{Buffer, LocalFuture, Result};

/// One end of a connection, used on one worker. A read and a write may be in progress at the same time; two
/// reads or two writes may not.
pub trait ByteStream {
    /// Waits for bytes and puts those that have arrived, at least one, at the front of the buffer. Returns
    /// the buffer and their number; zero means that the peer will send no more. The buffer must not be empty.
    ///
    /// Dropping the future may lose bytes that had arrived.
    fn read(&self, buffer: Buffer) -> LocalFuture<'_, Result<(Buffer, usize)>>;

    /// Sends all bytes of the buffer, in order, piece by piece.
    fn write_all(&self, data: Buffer) -> LocalFuture<'_, Result<()>>;

    /// Sends the closing message of the stream's protocol, if there is one, before [`ByteStream::shutdown`].
    fn send_close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// How many bytes the peer's side has taken so far, even while a `write_all` is in progress; `None` where
    /// that is unknown.
    fn sent(&self) -> Option<u64> {
        None
    }

    /// Whether the peer is known to be gone, so that what is sent will not be read. Returns at once.
    fn is_deserted(&self) -> bool {
        false
    }

    /// Tells the peer that no more bytes will come, and wakes a waiting `read` with zero. Never fails: a
    /// connection that is gone counts as shut down.
    fn shutdown(&self);
}
