//! The "copied" flags of the active tables, compared with the refcounts.
//!
//! Each table is read once, however often it is named. A table with a wrong flag is written once.

use std::collections::BTreeMap;

use futures_lite::future::yield_now;
use vellum_core::{Buffer, ImageOffset, Result, Storage};

use super::super::entry::{ClusterState, Entries};
use super::super::header::Header;
use super::super::hole::Hole;
use super::super::layout::{COPIED, OFFSET_MASK, be64, put64};
use super::{PIECE_BYTES, TABLES_AT_ONCE, Walked, read_clusters, to_usize};
use crate::work;

/// A table entry whose "copied" flag is wrong.
pub(super) struct WrongFlag {
    pub(super) at: ImageOffset,
    pub(super) old: u64,
    pub(super) refcount: u64,
    pub(super) is_table: bool,
}

/// Visits all flags and reports each wrong one once. Returns how many are wrong. As with `qemu-img check`,
/// those of an L2 table count as often as the table is named. With `repair` the flags are corrected.
pub(super) async fn visit(
    header: &Header,
    image: &dyn Storage,
    walked: &Walked,
    repair: bool,
    on_wrong: &mut dyn FnMut(&WrongFlag),
) -> Result<u64> {
    let span = header.l1_span();
    if span.end().bytes() > image.len() {
        return Ok(0);
    }
    let mut flags = Flags { header, image, walked, repair, on_wrong };
    let mut wrong = 0;
    let mut tables: BTreeMap<ImageOffset, u64> = BTreeMap::new();
    let mut rest = span;
    while !rest.is_empty() {
        let (now, later) = rest.split_at(PIECE_BYTES);
        let l1 = image.read(now.start(), Buffer::for_overwrite(to_usize(now.len()))).await?;
        let mut part = Part::new(now.start(), l1.slice());
        for at in (0..l1.len()).step_by(8) {
            let entry = be64(l1.slice(), at);
            let table = ImageOffset::new(entry & OFFSET_MASK);
            if table.bytes() != 0 && header.cluster_size().aligns(table) && table.bytes() < image.len() {
                *tables.entry(table).or_insert(0) += 1;
                flags.look(&mut part, at, entry, table, true);
            }
        }
        wrong += flags.done(part).await?;
        rest = later;
    }
    let mut hole = Hole::default();
    let mut some = Vec::new();
    let cluster = header.cluster_size().bytes();
    for (table, times) in tables {
        if !hole.covers(image, table.span(cluster)).await {
            some.push((table, times));
        }
        if some.len() == TABLES_AT_ONCE {
            wrong += flags.tables(std::mem::take(&mut some)).await?;
        }
    }
    wrong += flags.tables(some).await?;
    Ok(wrong)
}

/// A table, or a part of one: its place and bytes, and the right bytes between the first and the last wrong
/// entry.
struct Part<'a> {
    at: ImageOffset,
    bytes: &'a [u8],
    right: Vec<u8>,
    wrong: u64,
    first: usize,
    end: usize,
}

impl<'a> Part<'a> {
    fn new(at: ImageOffset, bytes: &'a [u8]) -> Self {
        Self { at, bytes, right: Vec::new(), wrong: 0, first: 0, end: 0 }
    }
}

struct Flags<'a> {
    header: &'a Header,
    image: &'a dyn Storage,
    walked: &'a Walked,
    repair: bool,
    on_wrong: &'a mut dyn FnMut(&WrongFlag),
}

impl Flags<'_> {
    /// Looks at the entry in these bytes, which names this place.
    fn look(&mut self, part: &mut Part<'_>, at: usize, old: u64, host: ImageOffset, is_table: bool) {
        let refcount = self.walked.refcount(self.header.cluster_size().cluster_of(host).index());
        let new = match refcount {
            0 | 1 if self.walked.hidden => old, // there may be more references
            1 => old | COPIED,
            _ => old & !COPIED,
        };
        let place = part.at + at as u64;
        if old == new || self.repair && self.walked.is_contested(self.header, place) {
            return;
        }
        (self.on_wrong)(&WrongFlag { at: place, old, refcount, is_table });
        if part.wrong == 0 {
            part.first = at;
            part.right = part.bytes.to_vec();
        }
        put64(&mut part.right, at, new);
        part.wrong += 1;
        part.end = at + 8;
    }

    /// Writes the wrong entries if they are to be repaired. Returns how many there are.
    async fn done(&self, part: Part<'_>) -> Result<u64> {
        if self.repair && part.wrong > 0 {
            let bytes = Buffer::copy_of(&part.right[part.first..part.end]);
            self.image.write(part.at + part.first as u64, bytes).await?;
        }
        Ok(part.wrong)
    }

    /// Looks at L2 tables, with the number of times that each is named.
    async fn tables(&mut self, some: Vec<(ImageOffset, u64)>) -> Result<u64> {
        let entries = Entries::of(self.header);
        let mut wrong = 0;
        let read = read_clusters(self.image, self.header, some.iter().map(|(table, _)| *table)).await?;
        for ((table, times), l2) in some.into_iter().zip(read) {
            let l2 = match l2 {
                Ok(l2) => l2,
                // The walk has read it: with flags that nobody has looked at, the repair is not done.
                Err(error) if self.repair && !self.walked.hidden => return Err(error),
                Err(_) => continue,
            };
            let len = entries.words() * 8;
            let mut part = Part::new(table, l2.slice());
            work::note(l2.len() / 8);
            for (i, words) in l2.slice().chunks_exact(len).enumerate() {
                let pair = (be64(words, 0), if len == 16 { be64(words, 8) } else { 0 });
                let Ok(ClusterState::Plain(units)) = entries.decode(pair) else { continue };
                let in_file =
                    |host: &ImageOffset| !self.header.has_data_file() && host.bytes() < self.image.len();
                if let Some(host) = units.host.filter(in_file) {
                    self.look(&mut part, i * len, pair.0, host, false);
                }
            }
            wrong += self.done(part).await? * times;
            yield_now().await;
        }
        Ok(wrong)
    }
}
