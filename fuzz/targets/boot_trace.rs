//! A boot trace that comes from anywhere.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_layer::hydrate::trace::fuzz_trace(data));
