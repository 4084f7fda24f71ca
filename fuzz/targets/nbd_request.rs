//! One NBD request header: what passes the door lies inside the export.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_export::nbd::fuzz::fuzz_request(data));
