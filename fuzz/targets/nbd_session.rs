//! A whole NBD session over a small disk in memory; every request is answered exactly once.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_export::nbd::fuzz::fuzz_session(data));
