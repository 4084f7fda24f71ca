//! Images of the native format, and a second opinion on each.
//!
//! ```text
//!   samples.rs     images of every kind; the other checker, which was written from the specification alone
//!   golden.rs      images that were made once and must open for ever
//!   golden_fast.rs a fast medium with its image, made once; another program reads it, too
//!   opinions.rs    both checkers over sound, random and broken images; both readers over their bytes
//! ```

#![allow(unreachable_pub, reason = "the modules of a test are its own")]

#[path = "../common/mod.rs"]
mod common;
mod golden;
mod golden_fast;
mod opinions;
mod samples;
