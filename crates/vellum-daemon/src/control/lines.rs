//! Lines of a byte stream, with a length limit that the reader chose.

use vellum_core::{Buffer, ByteStream, Error, Result};

/// How much is read at once.
const READ_BYTES: usize = 4096;

/// What has come and was not taken yet.
pub(super) struct Lines {
    line_bytes_max: usize,
    gathered: Vec<u8>,
    /// So much of it has no end of a line.
    looked_at: usize,
}

impl Lines {
    pub(super) fn new(line_bytes_max: usize) -> Self {
        Self { line_bytes_max, gathered: Vec::new(), looked_at: 0 }
    }

    /// The next line, without its end; nothing when the peer has ended. Dropping the future may lose bytes.
    ///
    /// # Errors
    /// `Invalid` for a line that is too long, `Closed` for one that is incomplete.
    pub(super) async fn next(&mut self, stream: &impl ByteStream) -> Result<Option<Vec<u8>>> {
        loop {
            let end = self.gathered[self.looked_at..].iter().position(|byte| *byte == b'\n');
            if let Some(end) = end.map(|end| end + self.looked_at).filter(|end| *end < self.line_bytes_max) {
                let rest = self.gathered.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.gathered, rest);
                line.truncate(end);
                self.looked_at = 0;
                return Ok(Some(line));
            }
            self.looked_at = self.gathered.len();
            if self.looked_at >= self.line_bytes_max {
                return Err(Error::invalid(format!(
                    "a request line may have at most {} bytes",
                    self.line_bytes_max
                )));
            }
            let (buffer, count) = stream.read(Buffer::for_overwrite(READ_BYTES)).await?;
            match (count, self.gathered.is_empty()) {
                (0, true) => return Ok(None),
                (0, false) => {
                    return Err(Error::new(
                        vellum_core::ErrorKind::Closed,
                        "the last line does not end with a newline",
                    ));
                }
                (count, _) => self.gathered.extend_from_slice(&buffer.slice()[..count]),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use futures_lite::future::block_on;
    use vellum_core::{ErrorKind, LocalFuture};

    use super::*;

    /// Bytes that come in these pieces.
    struct Pieces(RefCell<Vec<Vec<u8>>>);

    impl ByteStream for Pieces {
        fn read(&self, mut buffer: Buffer) -> LocalFuture<'_, Result<(Buffer, usize)>> {
            let mut pieces = self.0.borrow_mut();
            let piece = if pieces.is_empty() { Vec::new() } else { pieces.remove(0) };
            buffer.copy_from(0, &piece);
            Box::pin(std::future::ready(Ok((buffer, piece.len()))))
        }

        fn write_all(&self, _data: Buffer) -> LocalFuture<'_, Result<()>> {
            unreachable!("nothing is written")
        }

        fn shutdown(&self) {}
    }

    fn lines(bytes: &[u8], piece: usize, most: usize) -> (Vec<String>, Option<ErrorKind>) {
        let stream = Pieces(RefCell::new(bytes.chunks(piece).map(<[u8]>::to_vec).collect()));
        let mut lines = Lines::new(most);
        let mut found = Vec::new();
        loop {
            match block_on(lines.next(&stream)) {
                Ok(Some(line)) => found.push(String::from_utf8(line).unwrap()),
                Ok(None) => return (found, None),
                Err(error) => return (found, Some(error.kind())),
            }
        }
    }

    #[test]
    fn lines_come_whole_however_they_are_cut() {
        for piece in [1, 2, 3, 5, 100] {
            assert_eq!(
                lines(b"one\n\ntwo\n", piece, 10),
                (vec!["one".into(), "".into(), "two".into()], None)
            );
            assert_eq!(lines(b"one\ntw", piece, 10), (vec!["one".into()], Some(ErrorKind::Closed)));
            assert_eq!(lines(b"123456789\n", piece, 10), (vec!["123456789".into()], None));
            assert_eq!(lines(b"a\n1234567890\n", piece, 10), (vec!["a".into()], Some(ErrorKind::Invalid)));
            assert_eq!(lines(&[b'x'; 50], piece, 10), (vec![], Some(ErrorKind::Invalid)));
        }
    }
}
