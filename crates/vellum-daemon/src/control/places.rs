//! Limits on the commands that wait for disks, so that a disk that hangs takes neither the control socket nor
//! memory from the others.
//!
//! ```text
//!   connection ── command that may have to wait for a disk ──► place, until the command has ended
//!                                                         └──► counted as attended, until its client has gone
//! ```
//!
//! 1. A disk has at most [`PER_DISK_MAX`] commands in progress, and in addition one that removes it. The next
//!    command is refused at once.
//! 2. At most [`ATTENDED_MAX`] commands have a waiting client. That is fewer than there are connections, so
//!    commands that complete at once are always possible.
//! 3. A command whose client has left continues, and no longer counts as attended. At most [`ALL_MAX`] are in
//!    progress, attended or not.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use vellum_core::{Error, ErrorKind, Result};

/// Connections at once. More wait in the socket's queue.
pub(crate) const CONNECTIONS_MAX: usize = 16;
/// About one disk.
const PER_DISK_MAX: usize = 4;
/// With a client that waits for the answer.
const ATTENDED_MAX: usize = CONNECTIONS_MAX - 4;
/// Altogether.
const ALL_MAX: usize = 64;

/// The commands in progress. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Places(Rc<RefCell<Counts>>);

#[derive(Default)]
struct Counts {
    of: BTreeMap<String, usize>,
    attended: usize,
    all: usize,
}

/// A command in progress, until dropped.
pub(super) struct Place {
    places: Places,
    disk: String,
}

/// A client that waits for its command, until dropped.
pub(super) struct Attended(Places);

impl Places {
    /// Begins a command about this disk.
    ///
    /// # Errors
    /// `Locked` when there are enough of them.
    pub(super) fn take(&self, disk: &str, takes_it_away: bool) -> Result<(Place, Attended)> {
        let mut counts = self.0.borrow_mut();
        let (its, most) =
            (counts.of.get(disk).copied().unwrap_or(0), PER_DISK_MAX + usize::from(takes_it_away));
        let (who, many) = match () {
            () if its >= most => (disk, its),
            () if counts.attended >= ATTENDED_MAX => ("the server", counts.attended),
            () if counts.all >= ALL_MAX => ("the server", counts.all),
            () => {
                *counts.of.entry(disk.to_owned()).or_default() += 1;
                counts.attended += 1;
                counts.all += 1;
                let place = Place { places: self.clone(), disk: disk.to_owned() };
                return Ok((place, Attended(self.clone())));
            }
        };
        let why = format!(
            "busy: {who} already has {many} commands running; try again when one has ended (`vellum stats` shows \
             disks that hang or are paused)"
        );
        Err(Error::new(ErrorKind::Locked, why))
    }

    /// How many commands are in progress.
    pub(crate) fn under_way(&self) -> usize {
        self.0.borrow().all
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.places.0.borrow_mut();
        counts.all -= 1;
        if let Some(its) = counts.of.get_mut(&self.disk) {
            *its -= 1;
            if *its == 0 {
                counts.of.remove(&self.disk);
            }
        }
    }
}

impl Drop for Attended {
    fn drop(&mut self) {
        self.0.0.borrow_mut().attended -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(places: &Places, disk: &str, takes_it_away: bool) -> String {
        let refused = places.take(disk, takes_it_away).map(drop).expect_err("it is busy");
        assert_eq!(refused.kind(), ErrorKind::Locked);
        refused.chain()
    }

    #[test]
    fn a_disk_that_hangs_has_a_few_commands_and_the_others_theirs() {
        let places = Places::default();
        let mut hung: Vec<_> = (0..PER_DISK_MAX).map(|_| places.take("a", false).expect("room")).collect();
        assert!(refusal(&places, "a", false).starts_with("busy: a already has 4 commands running"));
        let away = places.take("a", true).expect("it can be taken away");
        assert!(refusal(&places, "a", true).starts_with("busy: a already has 5 commands running"));
        let other = places.take("b", false).expect("another disk");
        drop((hung.pop(), away, other));
        let again = places.take("a", false).expect("one has ended");
        drop((hung, again));
        assert!(places.under_way() == 0 && places.0.borrow().of.is_empty());
    }

    #[test]
    fn commands_whose_clients_have_gone_leave_room_for_those_that_wait() {
        let places = Places::default();
        let waiting: Vec<_> =
            (0..ATTENDED_MAX).map(|disk| places.take(&disk.to_string(), false).expect("room")).collect();
        assert!(refusal(&places, "one more", false).starts_with("busy: the server already has 12 commands"));
        let mut abandoned: Vec<Place> = waiting.into_iter().map(|(place, _gone)| place).collect();
        for disk in ATTENDED_MAX..ALL_MAX {
            abandoned.push(places.take(&disk.to_string(), false).expect("room").0);
        }
        assert!(refusal(&places, "one more", false).starts_with("busy: the server already has 64 commands"));
        drop(abandoned);
        assert_eq!(places.under_way(), 0);
    }
}
