//! The order of a migration: which step is next, by what the headers of both images say.
//!
//! ```text
//!                                            goal: forward                     goal: back
//!   source ╲ target     awaiting N     arrived N     void N         awaiting N    arrived N    void N
//!   writable            fix            both!         refused        void          both!        done
//!   moved N             fix, accept    accept, seal  refused        void          refused      void, restore
//!   gone N              refused        done          refused        refused       refused      refused
//!   moved, gone M       refused        refused       refused        void          refused      refused
//! ```
//!
//! 1. The table is asked before each step, also after a crash: it needs no memory but the two headers.
//! 2. *Fix*: the source is paused and flushed, closed, and its header says `moved N`, durably. Then *accept*: the
//!    target's header says `arrived N`, durably, and its writes pass. Until the first, the source is the writer; from
//!    the second on, the target is; in between nothing is.
//!    *Seal* is what remains to be done: the source says `gone N`. From then on no other image that awaits under the same
//!    number, such as a copy of the target, can take the disk back.
//! 3. *Void* before *restore*: a target that is void never accepts, so its source may be written again. A target that
//!    has arrived may have been written, and nothing takes it back.
//! 4. Nothing is copied into the target before the source is fixed: it is not open for writing until it accepts.
//! 5. A mark that was found, and not made, may be one that was written and never flushed, by a server that was killed
//!    in between. So *accept* follows a *fix*, *seal* an *accept*, and *restore* a *void*, that this run of the command
//!    has taken itself: a step that is repeated writes and flushes the mark again.
//! 6. A target that has arrived, and whose server does not write it, accepts again: its mark may not be durable, or it
//!    could not be opened. For the same reasons a source that has been taken back, and is not written, is restored again.
//! 7. *Both!* is what no order of the steps leads to: the images are not those of one migration.

use vellum_core::{Error, ErrorKind, Result};
use vellum_format::handover::{Handover, MoveNumber};

/// Where a migration is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// The disk is written in the target.
    Forward,
    /// The disk is written in the source, as before.
    Back,
}

/// What is to be done next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The source is marked as moved under the target's number.
    Fix,
    /// The target is marked as arrived.
    Accept,
    /// The target is given up.
    Void,
    /// The mark is removed from the source.
    Restore,
    /// The source is marked as gone: nothing takes the disk back.
    Seal,
    /// Nothing.
    Done,
}

/// Which of the two images is written by its server, if its header allows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// The source.
    pub source: bool,
    /// The target.
    pub target: bool,
}

impl Written {
    /// Both.
    pub const BOTH: Self = Self { source: true, target: true };
}

/// Which image a step changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The one that the disk moves away from.
    Source,
    /// The one that it moves to.
    Target,
}

impl Step {
    /// What the step writes, and to which image, in the migration with this number.
    pub fn writes(self, number: MoveNumber) -> Option<(Side, Option<Handover>)> {
        match self {
            Self::Fix => Some((Side::Source, Some(Handover::Moved(number)))),
            Self::Accept => Some((Side::Target, Some(Handover::Arrived(number)))),
            Self::Void => Some((Side::Target, Some(Handover::Void(number)))),
            Self::Restore => Some((Side::Source, None)),
            Self::Seal => Some((Side::Source, Some(Handover::Gone(number)))),
            Self::Done => None,
        }
    }

    /// Checks that an image that says `now` may take the step of the migration with this number. A step that was
    /// done already may be repeated.
    ///
    /// # Errors
    /// `Refused`, with the reason.
    pub fn check(self, now: Option<Handover>, number: MoveNumber) -> Result<()> {
        let may = match (self, now) {
            (Self::Fix, None | Some(Handover::Arrived(_))) => true,
            (Self::Fix | Self::Restore | Self::Seal, Some(Handover::Moved(its))) => its == number,
            (Self::Seal, Some(Handover::Gone(its))) => its == number,
            (Self::Accept, Some(Handover::Awaiting(its) | Handover::Arrived(its))) => its == number,
            (Self::Void, Some(Handover::Awaiting(its) | Handover::Void(its))) => its == number,
            // It was restored already.
            (Self::Restore, None) => true,
            (Self::Done, _) => true,
            _ => false,
        };
        if may {
            return Ok(());
        }
        let what = match self {
            Self::Fix => "be fixed as the source of",
            Self::Accept => "take over the disk of",
            Self::Void => "be given up as the target of",
            Self::Restore => "be taken back after",
            Self::Seal => "be given up for good as the source of",
            Self::Done => unreachable!("nothing is always possible"),
        };
        Err(Error::new(ErrorKind::Refused, format!("it cannot {what} migration {number}: {}", state(now))))
    }
}

fn state(handover: Option<Handover>) -> String {
    match handover {
        None => "it takes part in no migration".to_owned(),
        Some(Handover::Awaiting(number)) => format!("it awaits the disk of migration {number}"),
        Some(Handover::Arrived(number)) => format!("it took over the disk in migration {number}"),
        Some(Handover::Moved(number)) => format!("it has moved in migration {number}"),
        Some(Handover::Void(number)) => format!("it was given up in migration {number}"),
        Some(Handover::Gone(number)) => format!("it has moved for good in migration {number}"),
    }
}

/// The next step, by what the two headers say, and which of the images their servers write. `last`: the step that was taken
/// just before, by the same caller.
///
/// # Errors
/// `Refused` where the goal can no longer be reached, or the images do not belong together, and `Corrupt` where both
/// could be written.
pub fn next(
    source: Option<Handover>,
    target: Option<Handover>,
    written: Written,
    goal: Goal,
    last: Option<Step>,
) -> Result<Step> {
    use Handover::{Arrived, Awaiting, Gone, Moved, Void};
    let refuse = |why: &str| {
        let (source, target) = (state(source), state(target));
        let text = format!("{why} (of the source: {source}; of the target: {target})");
        Err(Error::new(ErrorKind::Refused, text))
    };
    let number = match target {
        Some(Awaiting(number) | Arrived(number) | Void(number)) => number,
        None | Some(Moved(_) | Gone(_)) => {
            return refuse("the second image is not the target of a migration");
        }
    };
    let is_ours = match source {
        Some(Moved(its) | Gone(its)) => Some(its == number),
        None | Some(Arrived(_)) => None,
        Some(Awaiting(_) | Void(_)) => return refuse("the first image is not the source of a migration"),
    };
    let is_gone = matches!(source, Some(Gone(_)));
    match (is_ours, target, goal) {
        (Some(true), Some(Awaiting(_) | Void(_)), _) if is_gone => refuse(
            "the disk was taken over by another copy of this target; if there is none, copy it from the source with \
                 `vellum convert`",
        ),
        (None, Some(Awaiting(_)), Goal::Forward) => Ok(Step::Fix),
        (Some(true), Some(Awaiting(_)), Goal::Forward) if last == Some(Step::Fix) => Ok(Step::Accept),
        (Some(true), Some(Awaiting(_)), Goal::Forward) => Ok(Step::Fix),
        (Some(true), Some(Arrived(_)), Goal::Forward) if last == Some(Step::Accept) && !written.target => {
            refuse("the target has taken over, and its server does not write it")
        }
        (Some(true), Some(Arrived(_)), Goal::Forward) if is_gone && written.target => Ok(Step::Done),
        (Some(true), Some(Arrived(_)), Goal::Forward) if last == Some(Step::Accept) => Ok(Step::Seal),
        (Some(true), Some(Arrived(_)), Goal::Forward) => Ok(Step::Accept),
        (_, Some(Awaiting(_)), Goal::Back) => Ok(Step::Void),
        (Some(true), Some(Void(_)), Goal::Back) if last == Some(Step::Void) => Ok(Step::Restore),
        (Some(true), Some(Void(_)), Goal::Back) => Ok(Step::Void),
        // Its mark may not be durable. A server that was started to read it writes nothing in any case.
        (None, Some(Void(_)), Goal::Back) if !written.source && last != Some(Step::Restore) => {
            Ok(Step::Restore)
        }
        (None, Some(Void(_)), Goal::Back) => Ok(Step::Done),
        (None, Some(Arrived(_)), _) => Err(Error::corrupt(
            "both images could be written: they are not the two of one migration, one was replaced by a copy, or the source was \
             taken back although the target had taken over. Write only one of them from now on. If the source has not been \
             written since, `vellum migrate step fix` at the source, with the target's number, makes the target the writer \
             again; if it has, what the target has not copied is lost to it: copy what is needed from the target, and delete it",
        )),
        (Some(true), Some(Arrived(_)), Goal::Back) => {
            refuse("the target has taken over and may have been written: migrate it back instead")
        }
        (Some(false), ..) => refuse("the source has moved to another target"),
        (Some(true), ..) => refuse(
            "the target was given up, and nothing is written: take the disk back with `vellum migrate abort`, and create \
             another target",
        ),
        _ => refuse("the target was given up: create another one"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_the_one_at_the_head_of_this_file() {
        use Goal::{Back, Forward};
        use Handover::{Arrived, Awaiting, Gone, Moved, Void};
        let number = |byte| MoveNumber::new([byte; 16]).unwrap();
        let (n, m) = (number(1), number(2));
        let targets = [Awaiting(n), Arrived(n), Void(n)];
        let rows = [
            (
                None,
                [Ok(Step::Fix), Err("both"), Err("given up"), Ok(Step::Void), Err("both"), Ok(Step::Done)],
            ),
            (
                Some(Moved(n)),
                [
                    Ok(Step::Fix),
                    Ok(Step::Accept),
                    Err("given up"),
                    Ok(Step::Void),
                    Err("taken over"),
                    Ok(Step::Void),
                ],
            ),
            (
                Some(Gone(n)),
                [
                    Err("another copy"),
                    Ok(Step::Done),
                    Err("another copy"),
                    Err("another copy"),
                    Err("taken over"),
                    Err("another copy"),
                ],
            ),
            (
                Some(Moved(m)),
                [
                    Err("another"),
                    Err("another"),
                    Err("another"),
                    Ok(Step::Void),
                    Err("another"),
                    Err("another"),
                ],
            ),
        ];
        for (source, expected) in rows {
            let cells = [Forward, Back].into_iter().flat_map(|goal| targets.map(|target| (goal, target)));
            for ((goal, target), expected) in cells.zip(expected) {
                match (next(source, Some(target), Written::BOTH, goal, None), expected) {
                    (Ok(step), Ok(expected)) => {
                        assert_eq!(step, expected);
                        // What the table orders, the image that takes the step allows.
                        if let Some((side, _)) = step.writes(n) {
                            let now = if side == Side::Source { source } else { Some(target) };
                            step.check(now, n).unwrap();
                            let after = step.writes(n).unwrap().1;
                            step.check(after, n).expect("a step may be repeated");
                        }
                    }
                    (Err(error), Err(words)) => assert!(error.chain().contains(words), "{}", error.chain()),
                    (found, expected) => {
                        panic!("{source:?} {target:?} {goal:?}: {found:?}, not {expected:?}")
                    }
                }
            }
        }
        // Each step, once the one before it was taken.
        let after =
            |target, goal, last| next(Some(Moved(n)), Some(target), Written::BOTH, goal, Some(last)).unwrap();
        assert_eq!(after(Awaiting(n), Forward, Step::Fix), Step::Accept);
        assert_eq!(after(Awaiting(n), Forward, Step::Void), Step::Fix);
        assert_eq!(after(Arrived(n), Forward, Step::Accept), Step::Seal);
        assert_eq!(after(Void(n), Back, Step::Void), Step::Restore);
        assert_eq!(after(Void(n), Back, Step::Fix), Step::Void);
        let both = |source, target| next(source, target, Written::BOTH, Forward, None);
        assert_eq!(both(Some(Arrived(m)), Some(Awaiting(n))).unwrap(), Step::Fix);
        both(Some(Awaiting(m)), Some(Awaiting(n))).unwrap_err();
        both(None, None).unwrap_err();
        // A target that is not written accepts again, once, and before the source is given up.
        for source in [Moved(n), Gone(n)] {
            let written = Written { source: false, target: false };
            let again = |last| next(Some(source), Some(Arrived(n)), written, Forward, last);
            assert_eq!(again(None).unwrap(), Step::Accept);
            again(Some(Step::Accept)).unwrap_err();
        }
        // A source that is not written is taken back again, once.
        let written = Written { source: false, target: false };
        assert_eq!(next(None, Some(Void(n)), written, Back, None).unwrap(), Step::Restore);
        assert_eq!(next(None, Some(Void(n)), written, Back, Some(Step::Restore)).unwrap(), Step::Done);
        Step::Accept.check(Some(Void(n)), n).unwrap_err();
        Step::Restore.check(Some(Gone(n)), n).unwrap_err();
        Step::Fix.check(Some(Gone(n)), n).unwrap_err();
        Step::Accept.check(Some(Awaiting(m)), n).unwrap_err();
        Step::Void.check(Some(Arrived(n)), n).unwrap_err();
        Step::Fix.check(Some(Awaiting(n)), n).unwrap_err();
    }
}
