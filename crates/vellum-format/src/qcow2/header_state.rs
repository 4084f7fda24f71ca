//! The header of an open image, and whether it says that the image is being written.
//!
//! 1. The header in memory is the one that was written last. It is durable after the next flush.
//! 2. Two changes never overlap: each is made to what the one before it left.
//! 3. The image is marked once in an opening, before its first change. Until that has succeeded, each caller
//!    tries again.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use vellum_core::{Context, ImageOffset, Result, Storage};

use super::header::Header;
use crate::state::lock;

pub(crate) struct HeaderState {
    header: Mutex<Header>,
    /// Held while the header is changed.
    changes: async_lock::Mutex<()>,
    /// Whether the image is marked. Held while it is being marked.
    mark: async_lock::Mutex<bool>,
    /// The same, for those that do not wait.
    is_marked: AtomicBool,
}

impl HeaderState {
    pub(crate) fn new(header: Header) -> Self {
        let (changes, mark) = Default::default();
        Self { header: Mutex::new(header), changes, mark, is_marked: AtomicBool::new(false) }
    }

    /// A fact of the header.
    pub(crate) fn read<T>(&self, fact: impl FnOnce(&Header) -> T) -> T {
        fact(&lock(&self.header))
    }

    /// Writes a changed header. The header in memory changes when the write has succeeded. The change is not
    /// durable before the next flush.
    pub(crate) async fn change(
        &self,
        image: &dyn Storage,
        name: &str,
        change: impl FnOnce(&mut Header),
    ) -> Result<()> {
        let _changing = self.changes.lock().await;
        let mut new = lock(&self.header).clone();
        change(&mut new);
        let sector = new.first_sector();
        image.write(ImageOffset::ZERO, sector).await.context(|| format!("{name}: can't write the header"))?;
        *lock(&self.header) = new;
        Ok(())
    }

    /// Lays the header out anew, in steps. `change` gets the header, and returns it as it is then, or nothing if there was
    /// no room. Returns whether there was. If it fails, what the medium has is not known, and the caller sees to it that
    /// nothing is written there any more.
    pub(crate) async fn change_layout(
        &self,
        change: impl AsyncFnOnce(&Header) -> Result<Option<Header>>,
    ) -> Result<bool> {
        let _changing = self.changes.lock().await;
        let old = lock(&self.header).clone();
        let Some(new) = change(&old).await? else { return Ok(false) };
        *lock(&self.header) = new;
        Ok(true)
    }

    /// Whether the image is marked.
    pub(crate) fn is_marked(&self) -> bool {
        self.is_marked.load(Ordering::Acquire)
    }

    /// As [`HeaderState::is_marked`]. Waits while the image is being marked.
    pub(crate) async fn was_marked(&self) -> bool {
        *self.mark.lock().await
    }

    /// Marks the image with what the caller does, unless that was done before.
    pub(crate) async fn mark_once(&self, mark: impl AsyncFnOnce() -> Result<()>) -> Result<()> {
        let mut is_marked = self.mark.lock().await;
        if *is_marked {
            return Ok(());
        }
        mark().await?;
        *is_marked = true;
        self.is_marked.store(true, Ordering::Release);
        Ok(())
    }
}
