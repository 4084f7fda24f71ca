//! Indexes and chunks of templates in stores.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::template_store(data));
