//! Which operations may run on a disk beside those in progress: one book per disk, for all commands and for
//! its end.
//!
//! ```text
//!   Serving ── its last name is removed, or the server ends ──► Ending ──► Closing ──► Closed
//!      │  ▲                                                       │ sessions, names and the step that was begun have ended
//!      ▼  │ done                                                  ▼
//!    a step: pause, resize, reopen, revert, hand over           nothing begins any more
//! ```
//!
//! 1. One step runs at a time, and a second one is refused instead of waiting: it would begin after another
//!    command has resumed the requests.
//! 2. A disk that ends begins nothing more. Steps that were begun are waited for; only then is it closed,
//!    once.
//! 3. A name is removed once, and remains the disk's until its sessions have ended. Removing the last name
//!    ends the disk.
//! 4. While a disk is restored from a snapshot no client is connected: it gets no new name, and none may be
//!    in the process of being removed.
//! 5. A disk whose step was interrupted is unusable until it is opened again.

use vellum_core::Result;

/// A step that excludes other steps while it is in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Pause,
    Resize,
    Reopen,
    Revert,
    Snapshot,
    Overlay,
    Commit,
    Rebase,
    Detach,
    Pin,
    HandOver,
    Flash,
    Backup,
}

impl Step {
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Pause => "it is being paused; try again when that is done",
            Self::Resize => "it is being resized; try again when that is done",
            Self::Reopen => "it is being reopened; try again when that is done",
            Self::Pin => "what proves its backing image is being recorded; try again when that is done",
            Self::Backup => "a backup of it is being made; try again when that is done",
            Self::Detach => "it is being detached from its backing image; try again when that is done",
            Self::Flash => "its use of the flash cache is being changed; try again when that is done",
            Self::HandOver => "a step of its migration is in progress; try again when that is done",
            Self::Overlay => "a new image is being put on top of it; try again when that is done",
            Self::Commit | Self::Rebase => {
                "its chain is being changed (`vellum job status`); `vellum job cancel` ends that"
            }
            Self::Snapshot => "its snapshots are being changed; try again when that is done",
            Self::Revert => "it is being reverted to a snapshot; try again when that is done",
        }
    }
}

/// How far a disk is from its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Serving,
    /// No new client is admitted; sessions and requests end.
    Ending,
    Closing,
    Closed,
}

/// Why something may not be begun.
type Why = &'static str;

const IS_REMOVED: Why = "it is being removed";
const WAS_CUT_OFF: Why = "a change of it was interrupted; it stays out of service until `vellum export reopen` \
 recovers it";

struct Name {
    text: String,
    /// It is being removed.
    is_going: bool,
}

/// The book of a disk.
pub(super) struct Life {
    stage: Stage,
    /// The name whose removal ends it.
    last: Option<String>,
    /// A task is ending it.
    is_ended: bool,
    step: Option<Step>,
    is_cut_off: bool,
    names: Vec<Name>,
    /// What its closing said.
    closed: Option<Result<()>>,
}

impl Life {
    /// Of a disk that is served under these names.
    pub(super) fn new(names: impl Iterator<Item = String>) -> Self {
        let names = names.map(|text| Name { text, is_going: false }).collect();
        let stage = Stage::Serving;
        Self { stage, last: None, is_ended: false, step: None, is_cut_off: false, names, closed: None }
    }

    pub(super) fn stage(&self) -> Stage {
        self.stage
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.names.iter().map(|name| name.text.clone()).collect()
    }

    /// The names that clients may come in with: of those that are being removed none.
    pub(super) fn offered(&self) -> Vec<String> {
        let stay = self.names.iter().filter(|name| !name.is_going);
        stay.map(|name| name.text.clone()).collect()
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.names.iter().any(|its| its.text == name)
    }

    /// Whether it may be used for what is no step, such as a new snapshot.
    pub(super) fn may_be_used(&self) -> Result<(), Why> {
        match self.stage {
            Stage::Serving if self.is_cut_off => Err(WAS_CUT_OFF),
            Stage::Serving => Ok(()),
            Stage::Ending | Stage::Closing | Stage::Closed => Err(IS_REMOVED),
        }
    }

    pub(super) fn begin(&mut self, step: Step) -> Result<(), Why> {
        if let Some(other) = self.step {
            return Err(other.words());
        }
        // This is the way out.
        if step != Step::Reopen || self.stage != Stage::Serving {
            self.may_be_used()?;
        }
        if step == Step::Revert && self.names.iter().any(|name| name.is_going) {
            return Err("an export of it is being removed; try again when that is done");
        }
        self.step = Some(step);
        Ok(())
    }

    pub(super) fn step_is_over(&mut self) {
        self.step = None;
    }

    pub(super) fn set_cut_off(&mut self, is_so: bool) {
        self.is_cut_off = is_so;
    }

    pub(super) fn is_cut_off(&self) -> bool {
        self.is_cut_off
    }

    /// One more name, which no export has.
    pub(super) fn add(&mut self, name: &str) -> Result<(), Why> {
        self.may_be_used()?;
        if self.has(name) {
            return Err("an export of this name is being removed; try again when that is done");
        }
        if self.step == Some(Step::Revert) {
            return Err(Step::Revert.words());
        }
        self.names.push(Name { text: name.to_owned(), is_going: false });
        Ok(())
    }

    /// One of its names is to be removed. Returns whether that is the last one; if so, the disk ends.
    pub(super) fn take(&mut self, name: &str) -> Result<bool, Why> {
        if self.stage != Stage::Serving {
            return Err(IS_REMOVED);
        }
        let its = self.names.iter_mut().find(|its| its.text == name);
        match its {
            Some(its) if !its.is_going => its.is_going = true,
            _ => return Err(IS_REMOVED),
        }
        let is_last = self.names.iter().all(|its| its.is_going);
        if is_last {
            self.stage = Stage::Ending;
            self.last = Some(name.to_owned());
        }
        Ok(is_last)
    }

    /// It does not go after all.
    pub(super) fn give_back(&mut self, name: &str) {
        if self.is_ended {
            return self.is_gone(name);
        }
        if self.last.as_deref() == Some(name) {
            (self.stage, self.last) = (Stage::Serving, None);
        }
        self.names.iter_mut().filter(|its| its.text == name).for_each(|its| its.is_going = false);
    }

    /// The name is not in use any more.
    pub(super) fn is_gone(&mut self, name: &str) {
        self.names.retain(|its| its.text != name);
    }

    /// Ends the disk. True for exactly one caller, which must carry it out.
    pub(super) fn end(&mut self) -> bool {
        if self.stage == Stage::Serving {
            self.stage = Stage::Ending;
        }
        !std::mem::replace(&mut self.is_ended, true)
    }

    /// It ends, and nothing that was begun is in progress: it is being closed from here on.
    pub(super) fn close(&mut self) -> bool {
        let is_free = self.step.is_none() && !self.names.iter().any(|name| name.is_going);
        if is_free {
            self.stage = Stage::Closing;
        }
        is_free
    }

    pub(super) fn set_closed(&mut self, said: Result<()>) {
        self.stage = Stage::Closed;
        self.closed = Some(said);
    }

    /// The result of closing it, once there is one.
    pub(super) fn closed(&self) -> Option<Result<()>> {
        self.closed.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEPS: [Step; 7] =
        [Step::Pause, Step::Resize, Step::Reopen, Step::Revert, Step::Detach, Step::Pin, Step::HandOver];

    /// The operations on a disk with the names `a` and `b`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Act {
        Step(Step),
        Use,
        Add(&'static str),
        Remove(&'static str),
        End,
    }

    use Act::{Add, End, Remove, Use};

    fn begin(life: &mut Life, act: Act) -> Result<(), Why> {
        match act {
            Act::Step(step) => life.begin(step),
            Use => life.may_be_used(),
            Add(name) => life.add(name),
            Remove(name) => life.take(name).map(drop),
            End => {
                life.end();
                Ok(())
            }
        }
    }

    fn life() -> Life {
        Life::new(["a", "b"].map(str::to_owned).into_iter())
    }

    fn all() -> Vec<Act> {
        let rest = [Use, Add("c"), Add("a"), Remove("a"), Remove("b"), End];
        STEPS.map(Act::Step).into_iter().chain(rest).collect()
    }

    /// For each pair: whether the second may begin while the first is in progress.
    #[test]
    fn what_may_begin_beside_what() {
        for first in all().into_iter().filter(|first| *first != Add("a")) {
            for second in all() {
                let mut life = life();
                begin(&mut life, first).unwrap_or_else(|why| panic!("{first:?}: {why}"));
                let may = match (first, second) {
                    // It has that name, also while the name is going.
                    (_, Add("a")) | (Add("c"), Add("c")) => false,
                    (_, End) => true,
                    (End, _) => false,
                    (Act::Step(_), Act::Step(_)) => false,
                    (Act::Step(Step::Revert), Add(_)) => false,
                    (Remove(_), Act::Step(Step::Revert)) => false,
                    (Remove(one), Remove(other)) => one != other,
                    _ => true,
                };
                assert_eq!(begin(&mut life, second).is_ok(), may, "{second:?} during {first:?}");
            }
        }
        for second in all() {
            let mut life = life();
            assert_eq!((life.take("a"), life.take("b")), (Ok(false), Ok(true)));
            assert_eq!(begin(&mut life, second).is_ok(), second == End, "{second:?} when no name is left");
            life.give_back("b");
            let may = !matches!(second, Add("a") | Remove("a") | Act::Step(Step::Revert)) || second == End;
            if second != End {
                assert_eq!(begin(&mut life, second).is_ok(), may, "{second:?}: one stays");
            }
        }
    }

    #[test]
    fn a_disk_is_closed_once_when_all_that_was_begun_has_ended() {
        for step in STEPS {
            let mut life = life();
            life.begin(step).expect("nothing is under way");
            life.take("a").expect("it is there");
            assert!(life.end() && !life.end(), "one sees to it");
            life.is_gone("b");
            assert!(!life.close(), "a step and a name are under way");
            life.step_is_over();
            assert!(!life.close(), "a name is");
            // Whether it was removed; false if the removal was interrupted.
            if step == Step::Pause {
                life.is_gone("a")
            } else {
                life.give_back("a")
            }
            assert!(life.close() && life.closed().is_none() && life.names().is_empty());
            assert!(life.begin(step).is_err() && life.may_be_used().is_err());
            life.set_closed(Ok(()));
            assert!(life.closed().is_some() && life.stage() == Stage::Closed);
        }
    }

    #[test]
    fn a_disk_whose_step_was_cut_off_is_opened_again_first() {
        let mut life = life();
        life.set_cut_off(true);
        for act in all() {
            let may = matches!(act, Act::Step(Step::Reopen) | Remove(_) | End);
            let mut life = self::life();
            life.set_cut_off(true);
            assert_eq!(begin(&mut life, act).is_ok(), may, "{act:?}");
        }
        life.begin(Step::Reopen).expect("the way out");
        life.set_cut_off(false);
        life.step_is_over();
        life.may_be_used().expect("it is well");
    }
}
