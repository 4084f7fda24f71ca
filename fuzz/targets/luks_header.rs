//! Any bytes as a LUKS header.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::luks_header(data));
