//! The control socket: what a server can be asked while it serves.
//!
//! ```text
//!   {"command":"snapshot-create","name":"monday"}\n                         one request per line
//!                                  {"return":{"id":"7"}}\n                   one answer per line, in the order of the requests
//!                                  {"error":{"kind":"locked","message":"…"}}\n
//! ```
//!
//! `docs/control.md` is for who writes a client. A new command is a variant of [`Request`] and a line in `server.rs`.
//!
//! 1. A line is at most [`REQUEST_BYTES_MAX`] long; who sends a longer one hears so, and is cut off.
//! 2. What is no request is answered with an error, and the connection goes on.
//! 3. A request that was begun is carried out to its end, whether or not its client waits.
//! 4. Who may connect may do everything: the socket is its owner's alone.

pub mod client;
mod lines;
pub(crate) mod server;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use vellum_core::{Error, ErrorKind};
use vellum_format::native::snapshots::Snapshot;

pub use client::call;

/// The longest request, with the end of its line.
pub const REQUEST_BYTES_MAX: usize = 64 << 10;
/// The longest answer that a client takes.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// What a server can be asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Make a snapshot.
    SnapshotCreate {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// Its name.
        name: String,
    },
    /// Tell which snapshots there are.
    SnapshotList {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
    },
    /// Delete a snapshot. Answered when it is gone.
    SnapshotDelete {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// Its name or number.
        name: String,
    },
    /// Make the disk what a snapshot has. Nobody may be connected.
    SnapshotRevert {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// Its name or number.
        name: String,
    },
    /// Let no new requests go on. Answered when none is under way and what was answered is durable.
    Pause {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
    },
    /// Let requests go on.
    Resume {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
    },
    /// Make the disk larger. One of the sizes is given, in bytes. Answered when that is durable.
    #[serde(rename_all = "kebab-case")]
    Resize {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// What it is to have.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        size: Option<u64>,
        /// How much more it is to have.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        grow_by: Option<u64>,
    },
    /// Tell how requests are limited, and change that.
    Limits {
        /// The export of the disk; the only disk when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disk: Option<String>,
        /// All limits from now on, by their names; those before stay when not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        set: Option<BTreeMap<String, u64>>,
    },
    /// Tell what was counted, as the file of `--stats-json` does.
    Stats {},
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Answer {
    Return(serde_json::Value),
    Error { kind: String, message: String },
}

/// A snapshot, as it is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct SnapshotFacts {
    /// Its number.
    pub id: String,
    /// Its name.
    pub name: String,
    /// The size of the disk then, in bytes.
    pub virtual_size: u64,
    /// When it was made, in seconds since 1970.
    pub date_sec: u64,
}

impl From<Snapshot> for SnapshotFacts {
    fn from(snapshot: Snapshot) -> Self {
        let Snapshot { id, name, size, seconds } = snapshot;
        Self { id: id.to_string(), name, virtual_size: size, date_sec: seconds }
    }
}

/// The kinds of errors, by the words they have on the wire.
const KINDS: [(ErrorKind, &str); 11] = [
    (ErrorKind::Io, "io"),
    (ErrorKind::NoSpace, "no-space"),
    (ErrorKind::Corrupt, "corrupt"),
    (ErrorKind::Unsupported, "unsupported"),
    (ErrorKind::Invalid, "invalid"),
    (ErrorKind::ReadOnly, "read-only"),
    (ErrorKind::Locked, "locked"),
    (ErrorKind::NotFound, "not-found"),
    (ErrorKind::Refused, "refused"),
    (ErrorKind::Poisoned, "poisoned"),
    (ErrorKind::Closed, "closed"),
];

impl Answer {
    fn of_error(error: &Error) -> Self {
        let known = KINDS.iter().find(|(kind, _)| *kind == error.kind());
        Self::Error { kind: known.map_or("io", |(_, word)| word).to_owned(), message: error.chain() }
    }

    fn into_result(self) -> vellum_core::Result<serde_json::Value> {
        match self {
            Self::Return(value) => Ok(value),
            Self::Error { kind, message } => {
                let known = KINDS.iter().find(|(_, word)| *word == kind);
                Err(Error::new(known.map_or(ErrorKind::Io, |(kind, _)| *kind), message))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_as_they_are_written() {
        for (text, request) in [
            (r#"{"command":"snapshot-list"}"#, Request::SnapshotList { disk: None }),
            (
                r#"{"command":"snapshot-create","disk":"a","name":"b"}"#,
                Request::SnapshotCreate { disk: Some("a".to_owned()), name: "b".to_owned() },
            ),
            (r#"{"command":"stats"}"#, Request::Stats {}),
            (r#"{"command":"pause","disk":"a"}"#, Request::Pause { disk: Some("a".to_owned()) }),
            (r#"{"command":"resume"}"#, Request::Resume { disk: None }),
            (
                r#"{"command":"resize","grow-by":512}"#,
                Request::Resize { disk: None, size: None, grow_by: Some(512) },
            ),
        ] {
            assert_eq!(serde_json::from_str::<Request>(text).unwrap(), request);
            assert_eq!(serde_json::to_string(&request).unwrap(), text);
        }
        for text in [
            "",
            "{}",
            "[]",
            "null",
            r#"{"command":"explode"}"#,
            r#"{"command":"snapshot-create"}"#,
            r#"{"command":"snapshot-create","name":7}"#,
            r#"{"command":"snapshot-list","name":"more than it takes"}"#,
            r#"{"command":"stats","x":1}"#,
            r#"{"command":"resize","size":-1}"#,
            r#"{"command":"limits","set":{"iops-total":-1}}"#,
            r#"{"command":"limits","set":[]}"#,
            r#"{"command":"resize","size":"1G"}"#,
        ] {
            assert!(serde_json::from_str::<Request>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_error_comes_back_as_what_it_was() {
        for (kind, _) in KINDS {
            let error = Error::new(kind, "why").context("what");
            let text = serde_json::to_string(&Answer::of_error(&error)).unwrap();
            let back = serde_json::from_str::<Answer>(&text).unwrap().into_result().unwrap_err();
            assert_eq!((back.kind(), back.chain()), (kind, error.chain()));
        }
    }
}
