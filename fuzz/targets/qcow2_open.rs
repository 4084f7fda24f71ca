//! Any bytes as a qcow2 image, used in every way there is.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::qcow2_open(data));
