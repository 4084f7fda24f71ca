//! What is explored, and the name of one state of it.

use std::fmt;
use std::str::FromStr;

use super::program::Program;
use crate::crash::CrashKind;
use crate::world::Position;

/// A program and how it is run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// What the guest does.
    pub program: Program,
    /// With several queues: the order of turns, and the duration of operations.
    pub seed: u64,
    /// The flush, counted from the first after opening, that fails.
    pub fail_flush: Option<u64>,
    /// The write, counted from the first after opening, that fails, with some of its sectors changed.
    pub fail_write: Option<u64>,
    /// Some writes take a hundred times as long as others, so that what was decided long ago comes late. Only
    /// where there are several queues.
    pub stalls: bool,
    /// Only crashes in the last step and afterwards: the rest is covered by shorter programs.
    pub last_step_only: bool,
}

impl Plan {
    /// The whole of a program.
    pub fn whole(program: Program) -> Self {
        Self { program, seed: 0, fail_flush: None, fail_write: None, stalls: false, last_step_only: false }
    }

    /// The last step of a program.
    pub fn last_step(program: Program) -> Self {
        Self { last_step_only: true, ..Self::whole(program) }
    }
}

/// The name of one state, from which the same image can be made again.
///
/// ```text
///   qcow2 4k; w4k@0 flush; seed 0; fail 2; power cut; position 37; state 113; nested 12, 3
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// Which subject.
    pub subject: String,
    /// What was run.
    pub plan: Plan,
    /// The kind of crash.
    pub kind: CrashKind,
    /// Where it was.
    pub position: Position,
    /// Which of the images it can leave.
    pub state: usize,
    /// Where the recovery crashed, and which of the images that leaves.
    pub nested: Option<(Position, usize)>,
}

/// A state that is not what it may be.
#[derive(Debug, Clone)]
pub struct Failure {
    /// Its name.
    pub case: Case,
    /// What is wrong.
    pub what: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n    case: {}", self.what, self.case)
    }
}

const KINDS: [(CrashKind, &str); 3] = [
    (CrashKind::PowerCut, "power cut"),
    (CrashKind::ProcessKill, "process kill"),
    (CrashKind::FailedFlush, "failed flush"),
];

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { subject, plan, kind, position, state, nested } = self;
        let kind = KINDS.iter().find(|(known, _)| known == kind).expect("all are listed").1;
        write!(f, "{subject}; {}; seed {}; ", plan.program, plan.seed)?;
        if let Some(number) = plan.fail_flush {
            write!(f, "fail {number}; ")?;
        }
        if let Some(number) = plan.fail_write {
            write!(f, "fail write {number}; ")?;
        }
        if plan.stalls {
            write!(f, "stalls; ")?;
        }
        write!(f, "{kind}; position {}; state {state}", position.0)?;
        match nested {
            Some((at, number)) => write!(f, "; nested {}, {number}", at.0),
            None => Ok(()),
        }
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(';').map(str::trim).peekable();
        let mut part = |what: &str| parts.next().ok_or_else(|| format!("the case ends where {what} belongs"));
        let number = |text: &str, word: &str| -> Result<u64, String> {
            let rest = text.strip_prefix(word).map(str::trim);
            rest.and_then(|rest| rest.parse().ok())
                .ok_or_else(|| format!("{text}: `{word} NUMBER` belongs here"))
        };
        let subject = part("the subject")?.to_owned();
        let program = part("the program")?.parse()?;
        let seed = number(part("the seed")?, "seed")?;
        let mut kind = part("the kind of crash")?;
        let mut fail_flush = None;
        let mut fail_write = None;
        while kind.starts_with("fail ") {
            match kind.starts_with("fail write ") {
                true => fail_write = Some(number(kind, "fail write")?),
                false => fail_flush = Some(number(kind, "fail")?),
            }
            kind = part("the kind of crash")?;
        }
        let stalls = kind == "stalls";
        if stalls {
            kind = part("the kind of crash")?;
        }
        let kind = KINDS
            .iter()
            .find(|(_, name)| *name == kind)
            .ok_or_else(|| format!("{kind} is no kind of crash"))?;
        let position = Position(number(part("the position")?, "position")?);
        let state = number(part("the state")?, "state")?;
        let nested = match parts.next() {
            None => None,
            Some(text) => {
                let (at, state) = text.split_once(',').ok_or("nested has two numbers")?;
                Some((
                    Position(number(at, "nested")?),
                    usize::try_from(number(state.trim(), "")?).expect("small"),
                ))
            }
        };
        let plan = Plan { program, seed, fail_flush, fail_write, stalls, last_step_only: false };
        let state = usize::try_from(state).map_err(|error| error.to_string())?;
        Ok(Self { subject, plan, kind: kind.0, position, state, nested })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_its_text() {
        for text in [
            "qcow2 4k; w4k@0 flush; seed 0; power cut; position 37; state 113",
            "x; long@0 zfua@1; seed 0; fail write 3; process kill; position 4; state 2",
            "x; w4k@0 | flush; seed 3; stalls; power cut; position 9; state 0",
            "x; w4k@0 | flush; seed 7; fail 2; failed flush; position 1; state 0; nested 12, 3",
        ] {
            let case: Case = text.parse().unwrap();
            assert_eq!(case.to_string(), text);
        }
        assert!("x; w4k@0".parse::<Case>().is_err());
    }
}
