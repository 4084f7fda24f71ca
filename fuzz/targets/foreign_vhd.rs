//! An image of another program, damaged or made up: it is opened, mapped and read.

#![no_main]

use vellum_foreign::ForeignKind;

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::foreign(ForeignKind::Vhd, data));
