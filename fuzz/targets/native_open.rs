//! Pokes into an image of the native format, which is then used in every way there is.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::native_open(data));
