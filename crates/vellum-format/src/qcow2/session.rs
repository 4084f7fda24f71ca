//! The session with a flash cache, in the header of an image that is open.
//!
//! ```text
//!   begin        extension: id, number; autoclear bit 47; incompatible bit 49 ── flush           commit point
//!   first change autoclear bit 47 stays if the image is open with this cache (`Header::kept_autoclear`)
//!   clear        all that the disk was written, durable ► header without bit 49 ── flush          commit point
//! ```
//!
//! 1. The extension lies behind that of the journal, so in the first sector, where another program has not moved it. Then
//!    one write covers it and its bits. Elsewhere the header changes in the hops of `journal_setting.rs`, which leave the
//!    old header or the new one.
//! 2. After a failure the header on the medium may be laid out in another way than the one in memory. So the image
//!    accepts no more changes.

use vellum_core::{Context, Error, ErrorKind, LocalFuture, Result, Storage};

use super::header::Header;
use super::image::Qcow2;
use super::journal_setting::{has_place_for_session, no_room_for_session, set_session};
use super::layout::incompatible;
use crate::engine::Commit as _;
use crate::session::{Session, SessionNumber, SessionState, Sessions, not_tied};
use crate::state::UnderWay;

impl Qcow2 {
    /// Whether it is open with a flash cache, and for writing, and has a place for a session.
    pub(super) fn is_tied(&self) -> bool {
        let has_place = self.header.read(|header| has_place_for_session(header).is_ok());
        self.flash.is_some() && !self.engine.geometry.read_only && has_place
    }

    async fn put_session(&self, session: Option<Session>) -> Result<()> {
        let context = || format!("{}: can't record the session with its flash cache", self.engine.name);
        self.engine.state.check_open()?;
        self.engine.state.check_stopped()?;
        if self.header.read(Header::is_corrupt) {
            return Err(Error::corrupt("the image is marked corrupt: run `vellum check -r all` first"))
                .context(context);
        }
        let under_way = UnderWay::begin(&self.engine.state, "a change of the header");
        let image: &dyn Storage = &*self.metadata;
        let changed =
            self.header.change_layout(async |header| set_session(header, image, session).await).await;
        under_way.end();
        let changed = changed.context(context).inspect_err(|error| {
            let why = error.clone().with_kind(ErrorKind::Poisoned);
            self.engine.state.stop(why.context("reopen the image"));
        });
        if changed? { Ok(()) } else { Err(no_room_for_session()).context(context) }
    }
}

impl Sessions for Qcow2 {
    fn session(&self) -> LocalFuture<'_, Option<Session>> {
        Box::pin(async move { self.header.read(Header::session) })
    }

    fn begin(&self, number: SessionNumber, holds_writes: bool) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let cache = self.flash.filter(|_| self.is_tied()).ok_or_else(|| not_tied(&self.engine.name))?;
            let state = if holds_writes { SessionState::HoldsWrites } else { SessionState::Clean };
            self.put_session(Some(Session { cache, number, state })).await
        })
    }

    fn clear_mark(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.make_durable().await?;
            self.change_header(|header| {
                header.set_features(header.incompatible & !incompatible::HOLDS_WRITES, header.autoclear);
            })
            .await?;
            self.flush_storage().await // commit point
        })
    }

    fn end(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.make_durable().await?;
            self.put_session(None).await
        })
    }
}
