//! A guest's memory with its rings: no request leaves the disk, and nothing the memory.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_export::vhost::fuzz::fuzz_request(data));
