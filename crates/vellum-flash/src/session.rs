//! What ties an image to the cache is the formats' side; it has its story there.

pub use vellum_format::session::{CacheId, Session, SessionNumber, SessionState, Sessions};
