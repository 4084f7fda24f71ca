//! The NBD client, whose server says whatever the input holds; every request is answered, and the client ends.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_remote::nbd::fuzz::fuzz_client(data));
