//! Published templates: disks in a store, cut into chunks that templates and their versions share.
//!
//! docs/format/template-store.md has the layout and the rules; docs/design/0017-template-store.md the reasons.

pub mod chunk;
mod collect;
mod disk;
mod index;
mod lease;
mod name;
mod push;

pub use collect::{Collected, Collection};
pub use disk::{TemplateCounts, TemplateStorage};
pub use index::{CHUNK_SHIFTS, Digest, INDEX_BYTES_MAX, Index};
pub use name::{PublishedVersion, TemplateName, list, remove};
pub use push::{CHUNK_SHIFT_DEFAULT, Push, PushCounts, Pushed};
