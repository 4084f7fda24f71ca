//! The NBD client that lists the exports of a server, which says whatever the input holds.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_remote::nbd::fuzz::fuzz_list(data));
