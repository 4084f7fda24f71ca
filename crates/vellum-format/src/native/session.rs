//! The session with a flash cache, in the superblock of an image that is open.
//!
//! ```text
//!   begin         superblock: id, number, its generation, mark ── flush: commit point ► the other copy ── flush
//!   first change  generation + 1; the session's, too, if the image is open with this cache (`commit.rs`)
//!   no journal    first change without the cache: generation + 1 ── flush ► then the change
//!   clear         all that the disk was written, durable ► superblock without the mark ── flush: commit point ► the other
//! ```
//!
//! 1. Both copies get the session and the mark: an older copy would say that the image is complete, if the newer one were
//!    ever damaged. Both also lose the mark, so that the image does not go back to being refused.
//! 2. An image without a journal has no mark that it is in use, so older programs of ours draw no generation when they
//!    change it. An incompatible feature keeps them from it as long as a session counts.

use vellum_core::{Context, LocalFuture, Result, Storage};

use super::image::Native;
use super::superblock::Superblocks;
use crate::engine::Commit as _;
use crate::session::{Session, SessionNumber, SessionState, Sessions, not_tied};
use crate::state::UnderWay;

/// Names this session in both copies of the superblock, or none.
pub(super) async fn put_session(
    superblocks: &mut Superblocks,
    image: &dyn Storage,
    session: Option<Session>,
) -> Result<()> {
    superblocks.superblock.set_session(session);
    for _ in 0..2 {
        superblocks.write(image).await?;
        image.flush().await?; // commit point, the first time
    }
    Ok(())
}

impl Native {
    /// Whether it is open with a flash cache, and for writing.
    pub(super) fn is_tied(&self) -> bool {
        self.flash.is_some() && !self.engine.geometry.read_only
    }

    async fn change_session(&self, session: Option<Session>) -> Result<()> {
        let context = || format!("{}: can't record the session with its flash cache", self.engine.name);
        self.engine.state.check_open()?;
        self.engine.state.check_stopped()?;
        let under_way = UnderWay::begin(&self.engine.state, "a write of the superblock");
        let mut superblocks = self.superblocks.lock().await;
        let mut result = Ok(());
        for _ in 0..2 {
            let before = superblocks.clone();
            superblocks.superblock.set_session(session);
            result = superblocks.write(&*self.metadata).await.context(context);
            if result.is_err() {
                *superblocks = before; // the next write goes over the copy that may be torn
                break;
            }
            result = self.flush_storage().await; // commit point, the first time
            if result.is_err() {
                break;
            }
            self.in_use.note_voided();
        }
        drop(superblocks);
        under_way.end();
        result
    }

    /// Makes the session void before the first change of an image without a journal.
    pub(super) async fn void_session(&self) -> Result<()> {
        let _one = self.in_use.lock().await;
        if !self.in_use.voids() {
            return Ok(());
        }
        self.engine.state.check_stopped()?;
        let under_way = UnderWay::begin(&self.engine.state, "a write of the superblock");
        // The other copy, which the next write goes over, is needed until this one is durable.
        let mut superblocks = self.superblocks.lock().await;
        let before = superblocks.clone();
        superblocks.superblock.draw_generation(self.flash);
        let written = superblocks.write(&*self.metadata).await;
        if written.is_err() {
            *superblocks = before;
        }
        under_way.end();
        written
            .context(|| format!("{}: can't make the session with a flash cache void", self.engine.name))?;
        self.flush_storage().await?; // commit point: from here on the cache has nothing of this image
        drop(superblocks);
        self.in_use.note_voided();
        Ok(())
    }
}

impl Sessions for Native {
    fn session(&self) -> LocalFuture<'_, Option<Session>> {
        Box::pin(async move { self.superblocks.lock().await.superblock.session() })
    }

    fn begin(&self, number: SessionNumber, holds_writes: bool) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let cache = self.flash.filter(|_| self.is_tied()).ok_or_else(|| not_tied(&self.engine.name))?;
            let state = if holds_writes { SessionState::HoldsWrites } else { SessionState::Clean };
            self.change_session(Some(Session { cache, number, state })).await
        })
    }

    fn clear_mark(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.make_durable().await?;
            let named = self.superblocks.lock().await.superblock.session();
            match named.filter(Session::holds_writes) {
                Some(session) => {
                    self.change_session(Some(Session { state: SessionState::Clean, ..session })).await
                }
                None => Ok(()),
            }
        })
    }

    fn end(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.make_durable().await?;
            self.change_session(None).await
        })
    }
}
