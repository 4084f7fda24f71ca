//! An image of our own making under random requests, with its metadata changed behind its back.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::qcow2_ops(data));
