//! A connection to a peer: bytes in, bytes out, in order. Sessions are written against it, so that they run on a
//! socket and in the simulator alike.

use crate::{Buffer, LocalFuture, Result};

/// One end of a connection, used on one worker. Reading and writing may go on at the same time; two reads or two
/// writes at once may not.
pub trait ByteStream {
    /// Waits for bytes and puts as many as have come, at least one, at the front of the buffer. Gives the buffer back
    /// with their number; zero says that the peer will send no more. The buffer must not be empty.
    ///
    /// Dropping the future may lose bytes that had come.
    fn read(&self, buffer: Buffer) -> LocalFuture<'_, Result<(Buffer, usize)>>;

    /// Sends all bytes of the buffer, in order, piece by piece.
    fn write_all(&self, data: Buffer) -> LocalFuture<'_, Result<()>>;

    /// Says the last word of the protocol that the stream speaks, if it has one, before [`ByteStream::shutdown`].
    fn say_farewell(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Tells the peer that no more bytes will come, and wakes a waiting `read` with zero. Never fails: a connection
    /// that is gone is shut down.
    fn shutdown(&self);
}
