//! What one event does to a medium: sectors are replaced, or the length changes.
//!
//! ```text
//!   a write of 700 bytes at 3800        page 0          page 1
//!                                    ├───────┬─┬─┤   ├─┬─────────┤
//!   sectors                          │       │6│7│   │0│         │      patches: (page 0, sectors 7),
//!                                    └───────┴─┴─┘   └─┴─────────┘               (page 1, sector 0)
//! ```
//!
//! 1. A change consists of whole sectors, because that is what a medium writes. Where a request covers a
//!    sector only in part, the rest of it is what was visible when the request took effect.
//! 2. A page that is replaced as a whole is shared with the content it is put in, never copied.
//! 3. Sectors (or pages, where the drive promises more) are counted in the order of their addresses; a torn
//!    change keeps some of them.

use std::fmt;
use std::sync::Arc;

use vellum_core::{BlockSize, Buffer, ImageOffset, ImageSpan};

use crate::content::{Content, PAGE_BYTES, Page, SECTOR_BYTES, WHOLE_PAGE, page_of, to_usize, within_page};
use crate::mix::mix;

/// The unit in which a drive writes all or nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Granule {
    /// 512 bytes, which every drive keeps.
    #[default]
    Sector,
    /// 4096 bytes, for a host that promises it.
    Page,
}

/// Which units of a change reached the medium, counted from its lowest address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Torn {
    /// The first units, this many.
    First(u64),
    /// All but the first units, this many.
    AllBut(u64),
    /// Those whose bit is set; of the first 64 units.
    These(u64),
    /// Each with an even chance, drawn from the seed.
    Scattered(u64),
}

impl Torn {
    /// Which of this many units are kept, as a number: bit by bit for up to 64. Tears with the same number
    /// keep the same units.
    pub(crate) fn kept_of(&self, units: u64) -> u64 {
        if units <= 64 {
            return (0..units).filter(|unit| self.keeps(*unit)).fold(0, |kept, unit| kept | 1 << unit);
        }
        match self {
            Self::First(count) => mix(1, *count),
            Self::AllBut(count) => mix(2, *count),
            Self::These(bits) => mix(3, *bits),
            Self::Scattered(seed) => mix(4, *seed),
        }
    }

    fn keeps(&self, unit: u64) -> bool {
        match self {
            Self::First(count) => unit < *count,
            Self::AllBut(count) => unit >= *count,
            Self::These(bits) => unit < 64 && bits & (1 << unit) != 0,
            Self::Scattered(seed) => mix(*seed, unit) & 1 == 1,
        }
    }
}

/// What an event does to the medium.
#[derive(Clone)]
pub(crate) enum Change {
    Nothing,
    Sectors(Patches),
    /// Longer, if it is not already.
    Grow(u64),
    /// This length: truncated or extended.
    Length(u64),
}

impl Change {
    pub(crate) fn apply(&self, content: &mut Content) {
        match self {
            Self::Nothing => {}
            Self::Sectors(patches) => patches.apply(content),
            Self::Grow(len) => content.grow(*len),
            Self::Length(len) => {
                content.set_len_unsealed(*len);
                // What is past the new end is lost, even if the content grows again.
                content.seal();
            }
        }
    }

    pub(crate) fn settled(&self, visible: &Content) -> Self {
        match self {
            Self::Sectors(patches) => Self::Sectors(patches.settled(visible)),
            other => other.clone(),
        }
    }

    /// The part that reached the medium. What cannot be torn is there or not, as the first unit is.
    pub(crate) fn torn(&self, torn: &Torn, granule: Granule) -> Self {
        match self {
            Self::Sectors(patches) => Self::Sectors(patches.torn(torn, granule)),
            other if torn.keeps(0) => other.clone(),
            _ => Self::Nothing,
        }
    }

    /// How many units it can be torn into.
    pub(crate) fn units(&self, granule: Granule) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Sectors(patches) => patches.units(granule),
            Self::Grow(_) | Self::Length(_) => 1,
        }
    }

    pub(crate) fn digest(&self) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Sectors(patches) => patches.patches.iter().fold(1, |digest, patch| {
                let bytes = patch.page.as_ref().map_or(0, |page| page.digest());
                mix(mix(digest, bytes), mix(patch.first, patch.count << 8 | u64::from(patch.sectors)))
            }),
            Self::Grow(len) => mix(2, *len),
            Self::Length(len) => mix(3, *len),
        }
    }
}

impl fmt::Debug for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("nothing"),
            Self::Sectors(patches) => write!(f, "{} sectors", patches.units(Granule::Sector)),
            Self::Grow(len) => write!(f, "grow to {len:#x}"),
            Self::Length(len) => write!(f, "length {len:#x}"),
        }
    }
}

/// New values for some sectors of one page, or zeros for a run of whole pages.
#[derive(Clone)]
struct Patch {
    first: u64,
    /// More than one only for zeros.
    count: u64,
    sectors: u8,
    /// `None` for zeros.
    page: Option<Arc<Page>>,
}

/// New values for a run of sectors.
#[derive(Clone)]
pub(crate) struct Patches {
    patches: Arc<[Patch]>,
    /// The requested bytes. Sectors at its ends may have bytes outside it, which are not determined yet.
    span: ImageSpan,
}

impl Patches {
    pub(crate) fn write(at: ImageOffset, data: &Buffer) -> Self {
        let span = at.span(data.len() as u64);
        let patch_of = |piece: ImageSpan| {
            let mut page = Page::zeroed();
            data.copy_to(to_usize(piece.start() - at), &mut page.bytes_mut()[within_page(piece)]);
            Patch { first: page_of(piece), count: 1, sectors: sectors_of(piece), page: Some(Arc::new(page)) }
        };
        Self { patches: BlockSize::PAGE.pieces_of(span).map(patch_of).collect(), span }
    }

    pub(crate) fn zeroes(span: ImageSpan) -> Self {
        let mut patches = Vec::new();
        let mut rest = span;
        while !rest.is_empty() {
            let to_page_end = PAGE_BYTES as u64 - BlockSize::PAGE.within(rest.start());
            let whole = BlockSize::PAGE.round_down(rest.len());
            let (now, later) = match to_page_end == PAGE_BYTES as u64 && whole > 0 {
                true => rest.split_at(whole),
                false => rest.split_at(to_page_end),
            };
            let ragged = BlockSize::SECTOR.widen(now) != now;
            patches.push(Patch {
                first: page_of(now),
                count: now.len().div_ceil(PAGE_BYTES as u64),
                sectors: if now.len() >= PAGE_BYTES as u64 { WHOLE_PAGE } else { sectors_of(now) },
                // A sector that is zeroed in part will get bytes when it is settled.
                page: ragged.then(|| Arc::new(Page::zeroed())),
            });
            rest = later;
        }
        Self { patches: patches.into(), span }
    }

    /// Whole pages, each as `content` has it.
    pub(crate) fn page_of(content: &Content, index: u64) -> Self {
        let span = BlockSize::PAGE.span_of(vellum_core::ImageCluster::new(index));
        let page = content.page(index).cloned();
        Self { patches: [Patch { first: index, count: 1, sectors: WHOLE_PAGE, page }].into(), span }
    }

    pub(crate) fn span(&self) -> ImageSpan {
        self.span
    }

    /// With the bytes of half-covered sectors taken from `visible`: what the medium is really given.
    fn settled(&self, visible: &Content) -> Self {
        let wide = BlockSize::SECTOR.widen(self.span);
        if wide == self.span || self.span.is_empty() {
            return self.clone();
        }
        let mut patches = self.patches.to_vec();
        for edge in [
            ImageSpan::between(wide.start(), self.span.start()),
            ImageSpan::between(self.span.end(), wide.end()),
        ] {
            if edge.is_empty() {
                continue;
            }
            let index = page_of(edge);
            let patch = patches
                .iter_mut()
                .find(|patch| patch.first == index)
                .expect("an edge lies in a page that the change touches");
            let page = patch.page.get_or_insert_with(|| Arc::new(Page::zeroed()));
            visible.read(edge.start(), &mut Arc::make_mut(page).bytes_mut()[within_page(edge)]);
        }
        Self { patches: patches.into(), span: wide }
    }

    fn apply(&self, content: &mut Content) {
        for patch in &*self.patches {
            if patch.count > 1 {
                content.forget(patch.first..patch.first + patch.count);
            } else {
                put(content, patch.first, patch.sectors, patch.page.as_ref());
            }
        }
    }

    pub(crate) fn apply_torn(&self, torn: &Torn, granule: Granule, content: &mut Content) {
        self.each_torn(torn, granule, |index, sectors, page| put(content, index, sectors, page));
    }

    fn torn(&self, torn: &Torn, granule: Granule) -> Self {
        let mut patches = Vec::new();
        self.each_torn(torn, granule, |first, sectors, page| {
            patches.push(Patch { first, count: 1, sectors, page: page.cloned() });
        });
        Self { patches: patches.into(), span: self.span }
    }

    /// Calls `keep` for each page of which some sectors are kept.
    fn each_torn(&self, torn: &Torn, granule: Granule, mut keep: impl FnMut(u64, u8, Option<&Arc<Page>>)) {
        let mut unit = 0;
        for patch in &*self.patches {
            for index in patch.first..patch.first + patch.count {
                let mut kept = 0;
                match granule {
                    Granule::Page => {
                        kept = if torn.keeps(unit) { patch.sectors } else { 0 };
                        unit += 1;
                    }
                    Granule::Sector => {
                        for bit in bits(patch.sectors) {
                            kept |= if torn.keeps(unit) { bit } else { 0 };
                            unit += 1;
                        }
                    }
                }
                if kept != 0 {
                    keep(index, kept, patch.page.as_ref());
                }
            }
        }
    }

    fn units(&self, granule: Granule) -> u64 {
        let units_of = |patch: &Patch| match granule {
            Granule::Page => patch.count,
            Granule::Sector => patch.count * u64::from(patch.sectors.count_ones()),
        };
        self.patches.iter().map(units_of).sum()
    }
}

/// Puts some sectors of a page in place.
fn put(content: &mut Content, index: u64, sectors: u8, page: Option<&Arc<Page>>) {
    if sectors == WHOLE_PAGE {
        content.set_page(index, page.cloned());
        return;
    }
    if page.is_none() && content.page(index).is_none() {
        return;
    }
    let target = content.page_mut(index).bytes_mut();
    for (sector, bit) in (0..).zip(bits(WHOLE_PAGE)) {
        if sectors & bit != 0 {
            let range = sector * SECTOR_BYTES..(sector + 1) * SECTOR_BYTES;
            match page {
                Some(page) => target[range.clone()].copy_from_slice(&page.bytes()[range]),
                None => target[range].fill(0),
            }
        }
    }
}

/// The bits that are set, lowest first.
fn bits(sectors: u8) -> impl Iterator<Item = u8> {
    (0..8).map(|bit| 1 << bit).filter(move |bit| sectors & bit != 0)
}

/// The sectors of its page that a run touches which does not leave it.
fn sectors_of(piece: ImageSpan) -> u8 {
    let range = within_page(piece);
    let first = range.start / SECTOR_BYTES;
    let end = range.end.div_ceil(SECTOR_BYTES);
    (first..end).fold(0, |sectors, sector| sectors | 1 << sector)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(bytes: u64) -> ImageOffset {
        ImageOffset::new(bytes)
    }

    /// Each row: the run, and how many sectors it touches.
    #[test]
    fn a_change_is_made_of_the_sectors_it_touches() {
        let base = Content::of(&[1; 20_000]);
        for (start, len, sectors) in
            [(0, 512, 1), (3_800, 700, 2), (511, 2, 2), (0, 8_192, 16), (100, 12_288, 25), (4_000, 0, 0)]
        {
            let data = Buffer::copy_of(&vec![7; to_usize(len)]);
            for (value, change) in [
                (7, Change::Sectors(Patches::write(at(start), &data))),
                (0, Change::Sectors(Patches::zeroes(at(start).span(len)))),
            ] {
                assert_eq!(change.units(Granule::Sector), sectors, "{start} {len}");
                let mut content = base.clone();
                change.settled(&base).apply(&mut content);
                let mut expected = vec![1; 20_000];
                expected[to_usize(start)..to_usize(start + len)].fill(value);
                assert!(content.to_vec() == expected, "{start} {len} {value}");
            }
        }
    }

    #[test]
    fn a_torn_change_keeps_whole_sectors_of_its_own() {
        let base = Content::of(&[1; 16_384]);
        let change = Patches::write(at(1_024), &Buffer::copy_of(&[7; 6_144]));
        for (torn, kept) in [
            (Torn::First(1), vec![2]),
            (Torn::AllBut(10), vec![12, 13]),
            (Torn::These(0b1000_0001), vec![2, 9]),
            (Torn::First(0), vec![]),
        ] {
            let mut content = base.clone();
            change.apply_torn(&torn, Granule::Sector, &mut content);
            for (sector, bytes) in content.to_vec().chunks(512).enumerate() {
                let value = if kept.contains(&sector) { 7 } else { 1 };
                assert_eq!(bytes, [value; 512], "{torn:?} sector {sector}");
            }
            let mut same = base.clone();
            change.torn(&torn, Granule::Sector).apply(&mut same);
            assert_eq!(same, content);
        }
        let mut content = base.clone();
        change.apply_torn(&Torn::AllBut(1), Granule::Page, &mut content);
        assert_eq!(content.to_vec()[4_096..7_168], [7; 3_072], "the second page only");
        assert_eq!(content.to_vec()[..4_096], [1; 4_096]);
    }
}
