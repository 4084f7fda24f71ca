//! What recovery makes of the packed blocks in the units of an open zone, as data.
//!
//! [`ROWS`] has the decision for each case. Recovery looks at one fact after the other ([`Facts::next`]), from
//! left to right, and only at those that the row has: units with a bit are not even read.

/// The bit of a unit in its zone: whether the unit is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bit {
    Set,
    Clear,
}

/// The packed block that the unit has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Block {
    /// No block of the unit is whole and has this zone's tag and this place.
    None,
    /// It names a unit behind the end of the disk.
    BehindTheEnd,
    /// It names a unit of the disk.
    OfTheDisk,
}

/// What the replayed table says of the unit of the disk that the block names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    Empty,
    /// It names the block.
    SameBlock,
    /// It has the unit that the block is in, and does not name the block.
    SameUnit,
    OtherUnit,
}

/// A fact that a decision depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fact {
    Bit,
    Block,
    Entry,
}

/// Some of the facts of a case. In a row, a fact that is `None` makes no difference. Otherwise it is not known
/// yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) bit: Option<Bit>,
    pub(super) block: Option<Block>,
    pub(super) entry: Option<Entry>,
}

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    /// The block counts: its entry is added to the table, and its sub-block is the image's.
    BlockCounts,
    /// Both count: the entry stays, and the block's sub-block is the image's.
    BothCount,
    /// The table stays as it is. Where it does not name the unit, the unit is free.
    TableCounts,
}

/// One row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) when: Facts,
    pub(super) then: Then,
}

const fn row(bit: Bit, block: Option<Block>, entry: Option<Entry>, then: Then) -> Row {
    Row { when: Facts { bit: Some(bit), block, entry }, then }
}

/// The cases.
pub(super) const ROWS: [Row; 7] = [
    // It was released, or its write failed, or the table has had its entry since.
    row(Bit::Set, None, None, Then::TableCounts),
    // Nothing was written there, or it has not arrived: no flush covered it.
    row(Bit::Clear, Some(Block::None), None, Then::TableCounts),
    // The disk has become smaller.
    row(Bit::Clear, Some(Block::BehindTheEnd), None, Then::TableCounts),
    row(Bit::Clear, Some(Block::OfTheDisk), Some(Entry::Empty), Then::BlockCounts),
    // A word of its neighbour recorded the entry, or a recovery was interrupted: the mask may have been left behind.
    row(Bit::Clear, Some(Block::OfTheDisk), Some(Entry::SameBlock), Then::BothCount),
    // The table says that the block is a plain one now.
    row(Bit::Clear, Some(Block::OfTheDisk), Some(Entry::SameUnit), Then::TableCounts),
    // What came in between was not durable.
    row(Bit::Clear, Some(Block::OfTheDisk), Some(Entry::OtherUnit), Then::TableCounts),
];

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
            (Fact::Bit, row.when.bit.is_some() && self.bit.is_none()),
            (Fact::Block, row.when.block.is_some() && self.block.is_none()),
            (Fact::Entry, row.when.entry.is_some() && self.entry.is_none()),
        ];
        let first = unknown.into_iter().find(|(_, is_unknown)| *is_unknown);
        first.map_or(Next::Do(row.then), |(fact, _)| Next::LookAt(fact))
    }

    /// Whether no fact of one is different in the other.
    fn agrees_with(self, other: Self) -> bool {
        fn agree<T: PartialEq>(one: Option<T>, other: Option<T>) -> bool {
            one.is_none() || other.is_none() || one == other
        }
        agree(self.bit, other.bit) && agree(self.block, other.block) && agree(self.entry, other.entry)
    }
}

impl Bit {
    /// Whether the blocks of such a unit are read.
    pub(super) fn is_scanned(self) -> bool {
        Facts { bit: Some(self), ..Facts::default() }.next() == Next::LookAt(Fact::Block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cases() -> Vec<(Bit, Block, Entry)> {
        let mut cases = Vec::new();
        for bit in [Bit::Set, Bit::Clear] {
            for block in [Block::None, Block::BehindTheEnd, Block::OfTheDisk] {
                cases.extend(
                    [Entry::Empty, Entry::SameBlock, Entry::SameUnit, Entry::OtherUnit]
                        .map(|entry| (bit, block, entry)),
                );
            }
        }
        cases
    }

    /// The decision, in words instead of rows.
    fn decision(case: (Bit, Block, Entry)) -> Then {
        match case {
            (Bit::Clear, Block::OfTheDisk, Entry::Empty) => Then::BlockCounts,
            (Bit::Clear, Block::OfTheDisk, Entry::SameBlock) => Then::BothCount,
            _ => Then::TableCounts,
        }
    }

    #[test]
    fn each_case_has_one_row_and_each_row_has_a_case() {
        let mut used = Vec::new();
        for (bit, block, entry) in cases() {
            let all = Facts { bit: Some(bit), block: Some(block), entry: Some(entry) };
            let mut rows = ROWS.iter().filter(|row| row.when.agrees_with(all));
            let row = rows.next().expect("a row");
            assert_eq!(rows.next(), None, "{all:?}");
            assert_eq!(row.then, decision((bit, block, entry)), "{all:?}");
            used.push(*row);
        }
        assert_eq!(used.len(), 24);
        assert!(ROWS.iter().all(|row| used.contains(row)), "no row is superfluous");
    }

    #[test]
    fn facts_are_looked_at_in_order_and_only_where_they_matter() {
        for (bit, block, entry) in cases() {
            let mut facts = Facts::default();
            let mut looked_at = 0;
            let then = loop {
                match facts.next() {
                    Next::LookAt(fact) => {
                        assert!(fact as usize >= looked_at, "{facts:?}: {fact:?}");
                        looked_at = fact as usize + 1;
                        match fact {
                            Fact::Bit => facts.bit = Some(bit),
                            Fact::Block => facts.block = Some(block),
                            Fact::Entry => facts.entry = Some(entry),
                        }
                    }
                    Next::Do(then) => break then,
                }
            };
            assert_eq!(then, decision((bit, block, entry)), "{facts:?}");
            assert!(ROWS.contains(&Row { when: facts, then }), "no more was looked at: {facts:?}");
        }
        assert!(Bit::Clear.is_scanned() && !Bit::Set.is_scanned(), "what is recorded is not read");
    }
}
