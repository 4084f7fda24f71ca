//! A delta that comes from anywhere.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_layer::delta::fuzz_delta(data));
