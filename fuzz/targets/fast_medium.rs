//! A fast medium, damaged or made up.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::fast_medium(data));
