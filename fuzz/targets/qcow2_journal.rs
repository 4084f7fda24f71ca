//! Made-up records in the journal of an image that was not closed.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::qcow2_journal(data));
