//! What the commit of a journal is made of and knows no image: for an engine that keeps a journal of its own on
//! another medium.
//!
//! | type | what it is |
//! |---|---|
//! | [`GroupCommit`] | flushes that arrive while a commit is under way share the next one |
//! | [`Ring`] | the places of records: they go round and round in a run of fixed length |
//! | [`Epochs`] | when something that was freed has no users left |
//!
//! None of them does I/O. What a record says, when one is due, and what is freed is the engine's.

pub use crate::engine::group_commit::GroupCommit;
pub use crate::epochs::{Epochs, Inside};
pub use crate::journal::ring::Ring;
