//! The NBD handshake, fed in pieces.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_export::nbd::fuzz::fuzz_handshake(data));
