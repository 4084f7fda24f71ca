//! Published templates: disks in a store, cut into chunks that templates and their versions share.

mod name;

pub use name::{PublishedVersion, TemplateName, list};
