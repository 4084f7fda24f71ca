//! How long a front end may occupy its socket without sending anything.
//!
//! A socket serves one front end at a time, so a stranger that connects and is silent, or stops in the middle
//! of a message, would lock the virtual machine out forever. It has [`SAY_SOMETHING`] for its first message,
//! and as long for the rest of every message that it has begun. Front ends send theirs at once, in one piece.
//! Between messages they may be silent without limit.
//!
//! Messages are looked at before they are read: one is read when all of it is there, so that no thread waits
//! in the middle of one.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::io::ioctl_fionread;
use rustix::net::{RecvFlags, recv};

/// How long it takes at most to say something, once it is one's turn.
pub(super) const SAY_SOMETHING: Duration = Duration::from_secs(5);
/// The header of a message: its kind, flags, and the length of what comes behind it.
const HEADER_BYTES: usize = 12;
/// A longer one is refused, and need not be waited for.
const BODY_BYTES_MAX: usize = 4096;

/// What of the next message is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum There {
    Nothing,
    Part,
    /// The whole message; or the end, or a beginning that is refused however it continues.
    All,
}

/// Peeks at the bytes that have arrived.
pub(super) fn look(socket: &UnixStream) -> There {
    let mut header = [0; HEADER_BYTES];
    let count = match recv(socket, &mut header, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((0, _)) => return There::All,
        Ok((count, _)) => count,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return There::Nothing,
        // Reading it returns the error.
        Err(_) => return There::All,
    };
    let [.., len] = header.as_chunks::<4>().0 else { return There::All };
    #[expect(clippy::host_endian_bytes, reason = "both are on one host, and the protocol says so")]
    let body = usize::try_from(u32::from_ne_bytes(*len)).unwrap_or(usize::MAX);
    let has_come =
        ioctl_fionread(socket).map_or(usize::MAX, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    match count == HEADER_BYTES && (body > BODY_BYTES_MAX || has_come >= HEADER_BYTES + body) {
        true => There::All,
        false => There::Part,
    }
}

/// How long it is still waited for.
pub(super) struct Patience {
    /// Since when it owes something.
    owes_since: Option<Duration>,
}

impl Patience {
    /// It has connected, and owes its first message.
    pub(super) fn new(now: Duration) -> Self {
        Self { owes_since: Some(now) }
    }

    /// So much of a message is there. False when it has taken too long.
    pub(super) fn goes_on(&mut self, there: There, now: Duration) -> bool {
        match (there, self.owes_since) {
            (There::All, _) => self.owes_since = None,
            (There::Part, None) => self.owes_since = Some(now),
            (_, Some(since)) => return now.saturating_sub(since) < SAY_SOMETHING,
            (There::Nothing, None) => {}
        }
        true
    }

    /// Whether time matters.
    pub(super) fn is_short(&self) -> bool {
        self.owes_since.is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn a_message_is_there_when_all_of_it_is() {
        let (mut front, mut back) = UnixStream::pair().expect("sockets");
        assert_eq!(look(&back), There::Nothing);
        let message: Vec<u8> = [2, 1, 8].map(u32::to_ne_bytes).concat();
        for piece in [&message[..5], &message[5..], &[0; 7]] {
            front.write_all(piece).expect("sent");
            assert_eq!(look(&back), There::Part);
        }
        front.write_all(&[0]).expect("sent");
        assert_eq!(look(&back), There::All);
        back.read_exact(&mut [0; 20]).expect("nothing of it was taken");
        front.write_all(&[2, 1, 4097].map(u32::to_ne_bytes).concat()).expect("sent");
        assert_eq!(look(&back), There::All, "it is too long, and refused at once");
        drop(front);
        back.read_exact(&mut [0; 12]).expect("the header");
        assert_eq!(look(&back), There::All, "the end");
    }

    #[test]
    fn only_who_owes_something_is_sent_away() {
        let at = Duration::from_secs;
        let mut patience = Patience::new(at(10));
        assert!(patience.goes_on(There::Nothing, at(14)) && patience.is_short());
        assert!(!patience.goes_on(There::Nothing, at(15)));
        assert!(!patience.goes_on(There::Part, at(15)), "a byte now and then is no message");
        assert!(patience.goes_on(There::All, at(15)) && !patience.is_short());
        assert!(patience.goes_on(There::Nothing, at(1000)));
        assert!(patience.goes_on(There::Part, at(1000)) && patience.is_short());
        assert!(patience.goes_on(There::Part, at(1004)));
        assert!(!patience.goes_on(There::Part, at(1005)));
    }
}
