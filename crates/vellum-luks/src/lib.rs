//! LUKS: the header of version 1, its key slots, and the cipher of the sectors behind it; version 2 for reading. No
//! input or output.
//!
//! ```text
//!   secret ─► PBKDF2 ─► slot's key ─► key material, decrypted ─► merged ─► master key ─► SectorCipher
//!             salt, iterations                4000 stripes                      │
//!             of the slot                                                  digest in the header: the right one?
//! ```
//!
//! [`Header`] is the 592 bytes, parsed as untrusted. [`Header::open_slot`] and [`Header::fill_slot`] turn a
//! [`Secret`] and a slot's key material into the [`MasterKey`], and back. [`SectorCipher`] encrypts and decrypts
//! sectors in place. [`luks2`] has the header of version 2. [`cost`] decides how many iterations a slot gets. The caller reads and writes the bytes, passes
//! chance and time in, and runs what takes long somewhere else.
//!
//! 1. Nothing that is read is believed before it is checked: sizes, places, iterations.
//! 2. Secrets and keys are in memory that is made zero when it is dropped, and no message, and no `Debug`, shows
//!    them.
//! 3. Only AES is here, with the modes that images of QEMU and cryptsetup have. Images in modes without XTS can only
//!    be read: see [`Mode::is_for_writing`].
//!
//! Left out: writing LUKS version 2, other ciphers than AES, RIPEMD-160 and Whirlpool, detached headers.

#![forbid(unsafe_code)]

pub mod cost;
mod derive;
mod header;
mod kdf;
pub mod luks2;
mod secret;
mod sector;
mod slot;

pub use derive::Kdf;
pub use header::{HEADER_LEN, Header, MAGIC, NewHeader, SLOTS, material_len};
pub use kdf::Hash;
pub use secret::{Chance, MasterKey, SECRET_LEN_MAX, Secret, Secrets};
pub use sector::{IvRule, Mode, SectorCipher};

/// Bytes of a sector: what one initial vector is for, and the unit of places in the header.
pub const SECTOR: usize = 512;
