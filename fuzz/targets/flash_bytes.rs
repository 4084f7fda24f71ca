//! What is on flash: superblock, slices and records.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_flash::fuzz::flash_bytes(data));
