//! `vellum-format` with mistakes that a test can switch on (`sabotage::put_in`), for the tests that must find
//! them. While none is switched on this does what `vellum-format` does.
//!
//! There is no source here. `build.rs` copies that of `vellum-format`, applies the patches in `mistakes/` to
//! the copy, and this file takes it in. So the engine is read without conditions that never hold, and the
//! mistakes stand in a place of their own. CONTRIBUTING.md says how one is added.

#![forbid(unsafe_code)]
#![allow(
    warnings,
    reason = "lints look at the source in its own crate; a mistake may leave something unused"
)]

include!(concat!(env!("OUT_DIR"), "/src/root.rs"));
