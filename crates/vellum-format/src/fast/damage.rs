//! What is wrong with an open fast medium, for people, and what it is refused for.

use vellum_core::{Error, ErrorKind, Result};

use super::cut::AFTER_A_CUT;
use super::layout::SLOT_BYTES;
use super::medium::FastMedium;
use crate::state::lock;

impl FastMedium {
    /// What of its tables cannot be read, and may be needed, and whether it was cut off; for people.
    pub fn damage(&self) -> Option<String> {
        let state = lock(&self.state);
        let cut_off = u64::from(self.layout.slots) - self.room / SLOT_BYTES;
        let entries = state.blind.len().saturating_sub(cut_off);
        let damaged = match (state.bad_rows.len(), entries) {
            (0, 0) => None,
            (rows, entries) => Some(format!(
                "{rows} rows and {entries} entries of its tables are damaged: what they say cannot be read, and their places stay taken"
            )),
        };
        let cut = self.cut_off().map(|cut| format!("{cut}: what was behind that is lost"));
        let all: Vec<String> = cut.into_iter().chain(damaged).collect();
        (!all.is_empty()).then(|| format!("{}: {}", self.name(), all.join(". ")))
    }

    /// That not all of it is there, where that is so; for people.
    pub(crate) fn cut_off(&self) -> Option<String> {
        let is_whole = self.len >= self.layout.total_bytes();
        (!is_whole).then(|| format!("it was cut off, and ends at {} bytes", self.len))
    }

    /// Whether all of its tables was read, so that it can get something.
    ///
    /// # Errors
    /// `Refused`, with what is to be done, where sectors of them cannot be read, or it was cut off.
    pub fn check_tables(&self) -> Result<()> {
        let state = lock(&self.state);
        if state.blind.is_empty() && state.bad_rows.is_empty() {
            return Ok(());
        }
        let why = match u64::from(self.layout.slots) * SLOT_BYTES > self.room {
            true => "it was cut off",
            false => "a part of its tables is damaged or cannot be read",
        };
        Err(Error::new(
            ErrorKind::Refused,
            format!(
                "{}: {why}: nothing is copied to it, and no disk is attached to it or taken from it. What it has is read: bring it home \
                 (`vellum tier move --back --all --fast PATH IMAGE`), then detach the image, without --fast (`vellum tier detach \
                 IMAGE`), and use another medium",
                self.name()
            ),
        ))
    }

    /// Nothing is brought home from a medium that was cut off while it was open: who lets the rest go has to know that it is lost, at
    /// any length.
    ///
    /// # Errors
    /// `Changed`, with what is to be done instead, and those of the storage.
    pub(crate) async fn check_not_cut(&self) -> Result<()> {
        let looked = self.look().await;
        let Some(cut) = self.was_cut() else { return looked };
        let why = format!(
            "{} was cut off while it was in use ({}): nothing is brought home from it here. {AFTER_A_CUT}",
            self.name(),
            cut.chain()
        );
        Err(Error::new(ErrorKind::Changed, why))
    }
}
