//! `vellum-flash` with mistakes that a test can switch on (`sabotage::put_in`), for the tests that must find
//! them. While none is switched on this does what `vellum-flash` does.
//!
//! There is no source here. `build.rs` copies that of `vellum-flash`, applies the patches in `mistakes/` to
//! the copy, and this file takes it in.

#![forbid(unsafe_code)]
#![allow(
    warnings,
    reason = "lints look at the source in its own crate; a mistake may leave something unused"
)]

include!(concat!(env!("OUT_DIR"), "/src/root.rs"));
