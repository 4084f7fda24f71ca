//! A guest's partitions and file system, damaged or made up: its files are looked for.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::guest_files(data));
