//! How a connection ended: there is a variant for everything that a client can do.

use std::fmt;

use vellum_core::Error;

/// How a connection ended.
#[derive(Debug, Clone)]
pub enum Ending {
    /// The client said goodbye, and every request of it was answered.
    Goodbye,
    /// The client disconnected between two requests without a goodbye. Every request of it was answered, if
    /// it still listened.
    Hangup,
    /// A shutdown or the removal of the export was requested; every request that was begun was answered.
    Drained,
    /// A shutdown was cut short; the requests that were begun have ended, but were not answered.
    Cut,
    /// The server refused the client: an unknown export, too many options, too slow a handshake.
    Refused(&'static str),
    /// The client broke the protocol.
    Violation(&'static str),
    /// The stream failed.
    Failed(Error),
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Goodbye => f.write_str("the client disconnected"),
            Self::Hangup => f.write_str("the client closed the connection"),
            Self::Drained => f.write_str("the server completed its requests and disconnected it"),
            Self::Cut => f.write_str("the server disconnected it"),
            Self::Refused(why) => write!(f, "the client was refused: {why}"),
            Self::Violation(why) => write!(f, "the client broke the protocol: {why}"),
            Self::Failed(error) => write!(f, "the connection failed: {}", error.chain()),
        }
    }
}
