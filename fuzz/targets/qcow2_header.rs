//! The header, its extensions and the snapshot table, by themselves: thousands of times faster than whole images.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::qcow2_header(data));
