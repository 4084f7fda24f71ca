//! What recovery does about what a crash left in the journal, as data.
//!
//! [`ROWS`] has the decision for each case. Recovery looks at one fact after the other ([`Facts::next`]), from
//! left to right, and only at those that the row has: most of them cost reads. When it has left out the newest
//! record, the record before becomes the newest, and the table is consulted once more.
//!
//! All records but the newest were flushed before the next one was written, together with everything that
//! they count on. So when one of them is not whole, the medium has lost flushed data. The newest record was
//! perhaps never acknowledged. It is left out when anything that it counts on has not arrived. What it counts
//! on: the sectors that it has checks of and, in the native format, the packed blocks that its words name.

/// A record, and the checks that it has of guest data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Checked {
    /// There is no such record.
    NoRecord,
    /// All checks hold.
    Good,
    /// At least one check fails.
    Bad,
}

/// The records from the newest one's tail up to it. It needs all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FromTail {
    /// All of them were found.
    Complete,
    /// At least one was not.
    Missing,
}

/// The packed blocks that the newest record names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Named {
    /// All of them are there.
    There,
    /// At least one did not arrive.
    Lost,
}

/// A fact that a decision depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fact {
    Newest,
    FromTail,
    Named,
    Before,
}

/// Some of the facts of a case. In a row, a fact that is `None` makes no difference. Otherwise it is not known
/// yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Facts {
    /// The newest record that was found.
    pub(super) newest: Option<Checked>,
    pub(super) from_tail: Option<FromTail>,
    pub(super) named: Option<Named>,
    /// The record before the newest.
    pub(super) before: Option<Checked>,
}

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    /// Nothing was committed, so nothing is replayed.
    ReplayNothing,
    /// The newest record is the last durable state: all records that it needs are replayed.
    Replay,
    /// The newest record is made void. The one before becomes the newest.
    LeaveOut,
    /// The image is refused: the medium lost a record that had been flushed.
    RefuseLostRecord,
    /// The image is refused: the medium lost data that had been flushed. Nothing is written, because the newest
    /// record is the evidence that the one before is not the last.
    RefuseLostData,
}

/// One row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) when: Facts,
    pub(super) then: Then,
}

const fn row(
    newest: Checked,
    from_tail: Option<FromTail>,
    named: Option<Named>,
    before: Option<Checked>,
    then: Then,
) -> Row {
    Row { when: Facts { newest: Some(newest), from_tail, named, before }, then }
}

/// The cases: newest record, records that it needs, packed blocks that it names, record before.
pub(super) const ROWS: [Row; 9] = {
    use Checked::{Bad, Good, NoRecord};
    use FromTail::{Complete, Missing};
    use Named::{Lost, There};
    use Then::{LeaveOut, RefuseLostData, RefuseLostRecord, Replay, ReplayNothing};
    [
        row(NoRecord, None, None, None, ReplayNothing),
        row(Good, Some(Missing), None, None, RefuseLostRecord),
        row(Good, Some(Complete), Some(There), None, Replay),
        row(Good, Some(Complete), Some(Lost), Some(NoRecord), LeaveOut),
        row(Good, Some(Complete), Some(Lost), Some(Good), LeaveOut),
        row(Good, Some(Complete), Some(Lost), Some(Bad), RefuseLostData),
        row(Bad, None, None, Some(NoRecord), LeaveOut),
        row(Bad, None, None, Some(Good), LeaveOut),
        row(Bad, None, None, Some(Bad), RefuseLostData),
    ]
};

/// What recovery does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    LookAt(Fact),
    Do(Then),
}

impl Facts {
    /// The next step when these facts are known.
    pub(super) fn next(self) -> Next {
        let row = ROWS.iter().find(|row| row.when.agrees_with(self)).expect("each case has a row");
        let unknown = [
            (Fact::Newest, row.when.newest.is_some() && self.newest.is_none()),
            (Fact::FromTail, row.when.from_tail.is_some() && self.from_tail.is_none()),
            (Fact::Named, row.when.named.is_some() && self.named.is_none()),
            (Fact::Before, row.when.before.is_some() && self.before.is_none()),
        ];
        let first = unknown.into_iter().find(|(_, is_unknown)| *is_unknown);
        first.map_or(Next::Do(row.then), |(fact, _)| Next::LookAt(fact))
    }

    /// Whether no fact of one is different in the other.
    fn agrees_with(self, other: Self) -> bool {
        fn agree<T: PartialEq>(one: Option<T>, other: Option<T>) -> bool {
            one.is_none() || other.is_none() || one == other
        }
        agree(self.newest, other.newest)
            && agree(self.from_tail, other.from_tail)
            && agree(self.named, other.named)
            && agree(self.before, other.before)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const CHECKED: [Checked; 3] = [Checked::NoRecord, Checked::Good, Checked::Bad];

    /// All cases that a medium can show: before no record there is none.
    pub(in crate::journal) fn cases() -> impl Iterator<Item = (Checked, FromTail, Named, Checked)> {
        let from_tail = || [FromTail::Complete, FromTail::Missing].into_iter();
        let named = || [Named::There, Named::Lost].into_iter();
        CHECKED
            .into_iter()
            .flat_map(move |newest| from_tail().map(move |from_tail| (newest, from_tail)))
            .flat_map(move |(newest, from_tail)| named().map(move |named| (newest, from_tail, named)))
            .flat_map(|(newest, from_tail, named)| CHECKED.map(|before| (newest, from_tail, named, before)))
            .filter(|(newest, _, _, before)| *newest != Checked::NoRecord || *before == Checked::NoRecord)
    }

    /// The decision, in words instead of rows.
    fn decision(newest: Checked, from_tail: FromTail, named: Named, before: Checked) -> Then {
        let is_whole = newest == Checked::Good && named == Named::There;
        if newest == Checked::NoRecord {
            Then::ReplayNothing
        } else if newest == Checked::Good && from_tail == FromTail::Missing {
            Then::RefuseLostRecord
        } else if is_whole {
            Then::Replay
        } else if before == Checked::Bad {
            Then::RefuseLostData
        } else {
            Then::LeaveOut
        }
    }

    #[test]
    fn each_case_has_one_row_and_each_row_has_a_case() {
        let mut used = Vec::new();
        for (newest, from_tail, named, before) in cases() {
            let all = Facts {
                newest: Some(newest),
                from_tail: Some(from_tail),
                named: Some(named),
                before: Some(before),
            };
            let mut rows = ROWS.iter().filter(|row| row.when.agrees_with(all));
            let row = rows.next().expect("a row");
            assert_eq!(rows.next(), None, "{all:?}");
            assert_eq!(row.then, decision(newest, from_tail, named, before), "{all:?}");
            used.push(*row);
        }
        assert_eq!(used.len(), 28);
        assert!(ROWS.iter().all(|row| used.contains(row)), "no row is superfluous");
    }

    #[test]
    fn facts_are_looked_at_in_order_and_only_where_they_matter() {
        for (newest, from_tail, named, before) in cases() {
            let mut facts = Facts::default();
            let mut looked_at = 0;
            let then = loop {
                match facts.next() {
                    Next::LookAt(fact) => {
                        assert!(fact as usize >= looked_at, "{facts:?}: {fact:?}");
                        looked_at = fact as usize + 1;
                        match fact {
                            Fact::Newest => facts.newest = Some(newest),
                            Fact::FromTail => facts.from_tail = Some(from_tail),
                            Fact::Named => facts.named = Some(named),
                            Fact::Before => facts.before = Some(before),
                        }
                    }
                    Next::Do(then) => break then,
                }
            };
            assert_eq!(then, decision(newest, from_tail, named, before), "{facts:?}");
            assert!(ROWS.contains(&Row { when: facts, then }), "no more was looked at: {facts:?}");
        }
    }
}
