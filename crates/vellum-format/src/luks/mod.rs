//! LUKS: raw images of it as one of the formats, and what images with LUKS inside share with them.
//!
//! ```text
//!   raw image        header │ key material │ payload: the disk, sector 0 of the cipher is its first     also version 2, for reading
//!   in qcow2         header │ key material, in clusters that a header extension names
//!                    data clusters anywhere: a sector of the cipher is a sector of the image file
//!   native image     superblocks │ … │ header │ key material │ data: as in qcow2, but a sector of zeros is zero
//!
//!   KeyArea ── unlock, with the user's secrets ──► SectorCipher ──► Ciphered: a storage that decrypts
//!      │                                              └───► GuestCipher: what an open image with LUKS inside has
//!      └────── change.rs: keys are added and removed           sector_parts.rs: changes of parts of sectors
//! ```
//!
//! 1. Without a secret an image can be described, checked and repaired; nothing of that needs its key.
//! 2. What was encrypted in a mode that is not written any more is read where the caller allows it, and never
//!    written.

mod area;
mod change;
mod ciphered;
mod create;
mod facts;
mod format;
mod guest_cipher;
mod new;
mod sector_parts;
mod two;

pub use area::KeyArea;
pub(crate) use area::{Unlock, refuse_weak, refuse_without_secret};
pub use change::{KeyChange, KeysChanged, change_keys};
pub(crate) use ciphered::{Ciphered, Unwritten};
pub use create::{create, header_bytes};
pub(crate) use facts::facts;
pub(crate) use format::LuksFormat;
pub(crate) use guest_cipher::{GuestCipher, OldCipher};
pub use new::{NewKeys, system_chance};
pub(crate) use sector_parts::WholeSectors;
pub use vellum_luks::cost::{TIME_DEFAULT, iterations_for};
pub use vellum_luks::{Chance, Hash, Header, Mode, NewHeader, SLOTS, Secret, Secrets};
