//! Templates that are published in a store: what is there.

use vellum_core::Result;
pub use vellum_remote::template::PublishedVersion;
use vellum_remote::{Settings, Store};

/// The versions of all templates in the store at a URL: by name, then by age, oldest first.
///
/// # Errors
/// Those of the store.
pub async fn list(store: &str) -> Result<Vec<PublishedVersion>> {
    let store = Store::open(store, &Settings::from_env())?;
    vellum_remote::template::list(&store, None).await
}
