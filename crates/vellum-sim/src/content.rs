//! What a medium holds: bytes that are cheap to copy, to change a little, to compare and to distinguish.
//!
//! ```text
//!   Content { len }
//!      │
//!     node ── node ── node            16 children each; as high as the last page needs
//!      │        └──────┐
//!     page   page     page            4 KiB, 8 sectors; a missing page is a hole and reads as zero
//! ```
//!
//! A crash explorer builds hundreds of thousands of contents that differ in a handful of sectors, so this is
//! a persistent tree: a copy is one reference, and a change copies only the nodes on its way down.
//!
//! 1. A page or node that is shared with another content is never changed, only replaced.
//! 2. Bytes past `len` are zero, except while a crash image is being assembled (then they are cut off).
//! 3. Two contents with the same length and bytes are equal and have the same digest, whichever of their
//!    zeros are holes.
//! 4. Pages and nodes remember their digests, so the digest of a changed copy costs only what was changed.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use vellum_core::{BlockSize, ImageCluster, ImageOffset, ImageSpan, StorageRun, is_zero};

use crate::mix::{digest_of, mix};

/// The size of a page.
pub(crate) const PAGE_BYTES: usize = 4096;
/// The unit in which a medium is old or new.
pub(crate) const SECTOR_BYTES: usize = 512;
/// All sectors of a page, one bit each.
pub(crate) const WHOLE_PAGE: u8 = u8::MAX;

const FANOUT_SHIFT: u32 = 4;
const FANOUT: usize = 1 << FANOUT_SHIFT;

/// A digest that is computed on first use. Zero means "not yet"; where the digest is zero, as for a page of
/// zeros, all ones stand for it.
#[derive(Default)]
struct Remembered(AtomicU64);

impl Remembered {
    fn get_or(&self, work_out: impl FnOnce() -> u64) -> u64 {
        match self.0.load(Relaxed) {
            0 => {
                let digest = work_out();
                self.0.store(if digest == 0 { u64::MAX } else { digest }, Relaxed);
                digest
            }
            u64::MAX => 0,
            digest => digest,
        }
    }

    fn forget(&mut self) {
        *self.0.get_mut() = 0;
    }
}

/// 4 KiB of a medium.
pub(crate) struct Page {
    bytes: [u8; PAGE_BYTES],
    digest: Remembered,
}

impl Page {
    pub(crate) fn zeroed() -> Self {
        Self { bytes: [0; PAGE_BYTES], digest: Remembered::default() }
    }

    pub(crate) fn bytes(&self) -> &[u8; PAGE_BYTES] {
        &self.bytes
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8; PAGE_BYTES] {
        self.digest.forget();
        &mut self.bytes
    }

    fn same(one: Option<&Arc<Self>>, other: Option<&Arc<Self>>) -> bool {
        match (one, other) {
            (None, None) => true,
            (Some(one), Some(other)) => Arc::ptr_eq(one, other) || one.bytes == other.bytes,
            (Some(page), None) | (None, Some(page)) => is_zero(&page.bytes),
        }
    }

    /// Zero for a page of zeros, so that it counts as much as a hole.
    pub(crate) fn digest(&self) -> u64 {
        self.digest.get_or(|| if is_zero(&self.bytes) { 0 } else { digest_of(&self.bytes) })
    }
}

impl Clone for Page {
    fn clone(&self) -> Self {
        Self { bytes: self.bytes, digest: Remembered::default() }
    }
}

/// 16 neighbours: pages at the bottom, nodes above.
#[derive(Clone)]
enum Children {
    Pages([Option<Arc<Page>>; FANOUT]),
    Nodes([Option<Arc<Node>>; FANOUT]),
}

struct Node {
    children: Children,
    digest: Remembered,
}

impl Clone for Node {
    fn clone(&self) -> Self {
        Self { children: self.children.clone(), digest: Remembered::default() }
    }
}

impl Node {
    fn empty(height: u32) -> Self {
        let children = match height {
            1 => Children::Pages([const { None }; FANOUT]),
            _ => Children::Nodes([const { None }; FANOUT]),
        };
        Self { children, digest: Remembered::default() }
    }

    fn is_empty(&self) -> bool {
        match &self.children {
            Children::Pages(pages) => pages.iter().all(Option::is_none),
            Children::Nodes(nodes) => nodes.iter().all(Option::is_none),
        }
    }

    /// The sum over all pages, so that it does not depend on how high the tree is. `first` is the index of
    /// the node's first page; a node never changes its place.
    fn digest(&self, first: u64, height: u32) -> u64 {
        self.digest.get_or(|| match &self.children {
            Children::Pages(pages) => (first..)
                .zip(pages)
                .filter_map(|(index, page)| Some((index, page.as_ref()?.digest())))
                .filter(|(_, digest)| *digest != 0)
                .fold(0, |sum, (index, digest)| sum.wrapping_add(mix(digest, index))),
            Children::Nodes(nodes) => (0u64..)
                .zip(nodes)
                .filter_map(|(slot, node)| Some((slot, node.as_ref()?)))
                .fold(0, |sum, (slot, node)| {
                    sum.wrapping_add(node.digest(first + slot * pages_below(height - 1), height - 1))
                }),
        })
    }

    /// Collects the pages that differ, given the index of the first page below and the height of both nodes.
    /// Parts that two contents share are skipped.
    fn differing(
        one: Option<&Arc<Self>>,
        other: Option<&Arc<Self>>,
        first: u64,
        height: u32,
        pages: &mut Vec<u64>,
    ) {
        let (node, counterpart) = match (one, other) {
            (None, None) => return,
            (Some(one), Some(other)) if Arc::ptr_eq(one, other) => return,
            (Some(one), other) => (one, other),
            (None, Some(other)) => (other, None),
        };
        match &node.children {
            Children::Pages(children) => {
                for (slot, page) in children.iter().enumerate() {
                    let other = counterpart.and_then(|node| match &node.children {
                        Children::Pages(pages) => pages[slot].as_ref(),
                        Children::Nodes(_) => None,
                    });
                    if !Page::same(page.as_ref(), other) {
                        pages.push(first + slot as u64);
                    }
                }
            }
            Children::Nodes(children) => {
                for (slot, child) in children.iter().enumerate() {
                    let other = counterpart.and_then(|node| match &node.children {
                        Children::Nodes(nodes) => nodes[slot].as_ref(),
                        Children::Pages(_) => None,
                    });
                    let first = first + slot as u64 * pages_below(height - 1);
                    Self::differing(child.as_ref(), other, first, height - 1, pages);
                }
            }
        }
    }
}

/// How many pages a node of this height spans. A tree over all of 2^64 bytes is thirteen nodes high.
const fn pages_below(height: u32) -> u64 {
    1 << (FANOUT_SHIFT * height)
}

fn slot(page: u64, height: u32) -> usize {
    to_usize((page >> (FANOUT_SHIFT * (height - 1))) & (FANOUT as u64 - 1))
}

pub(crate) fn to_usize(number: u64) -> usize {
    usize::try_from(number).expect("it fits the address space")
}

/// Sparse bytes of a certain length. See the module.
#[derive(Clone, Default)]
pub struct Content {
    len: u64,
    /// Zero for a tree without a node.
    height: u32,
    root: Option<Arc<Node>>,
}

impl Content {
    /// `len` bytes of zero.
    pub fn zeroed(len: u64) -> Self {
        Self { len, height: 0, root: None }
    }

    /// A copy of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        let mut content = Self::default();
        content.write(ImageOffset::ZERO, bytes);
        content
    }

    /// The length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Cuts off at `len` or grows with zeros.
    pub fn set_len(&mut self, len: u64) {
        let old = std::mem::replace(&mut self.len, len);
        if len < old {
            self.seal();
        }
    }

    /// Fills the slice with the bytes from `at` on; zeros past the end.
    pub fn read(&self, at: ImageOffset, bytes: &mut [u8]) {
        let mut rest = bytes;
        for piece in BlockSize::PAGE.pieces_of(at.span(rest.len() as u64)) {
            let (now, later) = rest.split_at_mut(to_usize(piece.len()));
            match self.page(page_of(piece)) {
                Some(page) => now.copy_from_slice(&page.bytes[within_page(piece)]),
                None => now.fill(0),
            }
            rest = later;
        }
    }

    /// Whether it has these bytes from `at` on; zeros past the end.
    pub(crate) fn holds(&self, at: ImageOffset, bytes: &[u8]) -> bool {
        let mut rest = bytes;
        BlockSize::PAGE.pieces_of(at.span(rest.len() as u64)).all(|piece| {
            let (now, later) = rest.split_at(to_usize(piece.len()));
            rest = later;
            self.page(page_of(piece)).map_or(is_zero(now), |page| page.bytes[within_page(piece)] == *now)
        })
    }

    /// Writes the slice from `at` on, growing as needed.
    pub fn write(&mut self, at: ImageOffset, bytes: &[u8]) {
        let mut rest = bytes;
        for piece in BlockSize::PAGE.pieces_of(at.span(rest.len() as u64)) {
            let (now, later) = rest.split_at(to_usize(piece.len()));
            self.page_mut(page_of(piece)).bytes_mut()[within_page(piece)].copy_from_slice(now);
            rest = later;
        }
        if !bytes.is_empty() {
            self.grow(at.bytes() + bytes.len() as u64);
        }
    }

    /// Makes the run read as zero, growing as needed; whole pages of it become holes.
    pub fn zero(&mut self, span: ImageSpan) {
        if !span.is_empty() {
            self.clear(span);
            self.grow(span.end().bytes());
        }
    }

    /// A number that differs where the bytes or the length differ, except with a probability of one in 2^64.
    pub fn digest(&self) -> u64 {
        let pages = self.root.as_ref().map_or(0, |root| root.digest(0, self.height));
        mix(pages, self.len)
    }

    /// All bytes in one vector; for tests and small contents.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; to_usize(self.len)];
        self.read(ImageOffset::ZERO, &mut bytes);
        bytes
    }

    /// Writes all bytes out, zeros included: to a file, so that another program can look at it.
    pub fn write_to(&self, out: &mut impl io::Write) -> io::Result<()> {
        let all = ImageOffset::ZERO.span(self.len);
        for piece in BlockSize::PAGE.pieces_of(all) {
            let bytes = self.page(page_of(piece)).map_or(&[0; PAGE_BYTES], |page| &page.bytes);
            out.write_all(&bytes[..to_usize(piece.len())])?;
        }
        Ok(())
    }

    /// The runs of pages and of holes in the span, as far as the content goes.
    pub fn runs(&self, span: ImageSpan) -> Vec<StorageRun> {
        let span = span.intersect(ImageOffset::ZERO.span(self.len.max(span.start().bytes())));
        let mut runs: Vec<StorageRun> = Vec::new();
        let mut at = span.start();
        while at < span.end() {
            let page = BlockSize::PAGE.cluster_of(at).index();
            let is_data = self.page(page).is_some();
            let mut next = page + 1;
            if !is_data {
                next = self.next_page(next).unwrap_or(u64::MAX >> BlockSize::PAGE.shift());
            }
            let end = BlockSize::PAGE.start_of(ImageCluster::new(next)).min(span.end());
            match runs.last_mut() {
                Some(last) if last.is_data == is_data => {
                    last.span = ImageSpan::between(last.span.start(), end);
                }
                _ => runs.push(StorageRun { span: ImageSpan::between(at, end), is_data }),
            }
            at = end;
        }
        runs
    }

    /// The pages that exist, with the offset of each: what a sparse copy needs.
    pub fn pages(&self) -> impl Iterator<Item = (ImageOffset, &[u8])> {
        let mut from = 0;
        std::iter::from_fn(move || {
            let index = self.next_page(from)?;
            from = index + 1;
            let at = BlockSize::PAGE.start_of(ImageCluster::new(index));
            Some((at, &self.page(index)?.bytes[..]))
        })
    }

    /// The pages that differ between the two, in order.
    pub(crate) fn pages_that_differ(&self, other: &Self) -> Vec<u64> {
        let (mut one, mut other) = (self.clone(), other.clone());
        let height = one.height.max(other.height);
        one.raise(height);
        other.raise(height);
        let mut pages = Vec::new();
        Node::differing(one.root.as_ref(), other.root.as_ref(), 0, height, &mut pages);
        pages
    }

    pub(crate) fn grow(&mut self, len: u64) {
        self.len = self.len.max(len);
    }

    /// Sets the length and leaves what is past it: the caller seals the content when everything is in place.
    pub(crate) fn set_len_unsealed(&mut self, len: u64) {
        self.len = len;
    }

    /// Clears what is past the end (invariant 2).
    pub(crate) fn seal(&mut self) {
        let end = BlockSize::PAGE.start_of(ImageCluster::new(BlockSize::PAGE.count_for(self.len)));
        let tail = ImageSpan::between(ImageOffset::new(self.len), end);
        if !tail.is_empty()
            && let Some(page) = self.page(page_of(tail))
            && !is_zero(&page.bytes[within_page(tail)])
        {
            self.page_mut(page_of(tail)).bytes_mut()[within_page(tail)].fill(0);
        }
        self.forget(end.bytes() >> BlockSize::PAGE.shift()..u64::MAX >> BlockSize::PAGE.shift());
    }

    /// Makes the run read as zero without touching the length.
    fn clear(&mut self, span: ImageSpan) {
        let whole = BlockSize::PAGE.narrow(span);
        let head = BlockSize::PAGE.pieces_of(span).next();
        let last_page = BlockSize::PAGE.round_down(span.end().bytes());
        let tail = span.split_at(last_page.saturating_sub(span.start().bytes())).1;
        for piece in head.into_iter().chain([tail]) {
            let in_part = !piece.is_empty() && piece.len() < PAGE_BYTES as u64;
            if in_part && self.page(page_of(piece)).is_some() {
                self.page_mut(page_of(piece)).bytes_mut()[within_page(piece)].fill(0);
            }
        }
        self.forget(whole.start().bytes() / PAGE_BYTES as u64..whole.end().bytes() / PAGE_BYTES as u64);
    }

    pub(crate) fn page(&self, index: u64) -> Option<&Arc<Page>> {
        if index >= self.pages_max() {
            return None;
        }
        let mut node = self.root.as_deref()?;
        let mut height = self.height;
        loop {
            match &node.children {
                Children::Pages(pages) => return pages[slot(index, 1)].as_ref(),
                Children::Nodes(nodes) => node = nodes[slot(index, height)].as_deref()?,
            }
            height -= 1;
        }
    }

    /// Puts a page in place; `None` makes a hole.
    pub(crate) fn set_page(&mut self, index: u64, page: Option<Arc<Page>>) {
        match page {
            Some(page) => *self.slot_mut(index) = Some(page),
            None => self.forget(index..index + 1),
        }
    }

    /// The page, made or copied if need be, so that it can be changed.
    pub(crate) fn page_mut(&mut self, index: u64) -> &mut Page {
        Arc::make_mut(self.slot_mut(index).get_or_insert_with(|| Arc::new(Page::zeroed())))
    }

    fn pages_max(&self) -> u64 {
        if self.height == 0 { 0 } else { pages_below(self.height) }
    }

    fn raise(&mut self, height: u32) {
        while self.height < height {
            self.height += 1;
            if self.height == 1 {
                continue;
            }
            if let Some(root) = self.root.take() {
                let mut above = Node::empty(self.height);
                if let Children::Nodes(nodes) = &mut above.children {
                    nodes[0] = Some(root);
                }
                self.root = Some(Arc::new(above));
            }
        }
    }

    fn slot_mut(&mut self, index: u64) -> &mut Option<Arc<Page>> {
        while index >= self.pages_max() {
            self.raise(self.height + 1);
        }
        let mut height = self.height;
        let mut place = &mut self.root;
        loop {
            let node = Arc::make_mut(place.get_or_insert_with(|| Arc::new(Node::empty(height))));
            node.digest.forget();
            match &mut node.children {
                Children::Pages(pages) => return &mut pages[slot(index, 1)],
                Children::Nodes(nodes) => place = &mut nodes[slot(index, height)],
            }
            height -= 1;
        }
    }

    /// Makes holes of the pages.
    pub(crate) fn forget(&mut self, pages: Range<u64>) {
        let height = self.height;
        let pages = pages.start..pages.end.min(self.pages_max());
        if !pages.is_empty() && self.next_page(pages.start).is_some_and(|page| page < pages.end) {
            Self::forget_below(&mut self.root, height, &pages);
        }
    }

    /// `pages` counts from the first page of the node.
    fn forget_below(place: &mut Option<Arc<Node>>, height: u32, pages: &Range<u64>) {
        let Some(node) = place else { return };
        if pages.start == 0 && pages.end >= pages_below(height) {
            *place = None;
            return;
        }
        let node = Arc::make_mut(node);
        node.digest.forget();
        match &mut node.children {
            Children::Pages(slots) => slots[to_usize(pages.start)..to_usize(pages.end)].fill(None),
            Children::Nodes(slots) => {
                let each = pages_below(height - 1);
                for (start, slot) in (0u64..).step_by(to_usize(each)).zip(slots) {
                    let part = pages.start.max(start)..pages.end.min(start + each);
                    if part.start < part.end {
                        Self::forget_below(slot, height - 1, &(part.start - start..part.end - start));
                    }
                }
            }
        }
        if node.is_empty() {
            *place = None;
        }
    }

    /// The first page that exists, from `from` on.
    fn next_page(&self, from: u64) -> Option<u64> {
        fn search(node: &Node, height: u32, from: u64) -> Option<u64> {
            match &node.children {
                Children::Pages(pages) => (from..)
                    .zip(&pages[to_usize(from)..])
                    .find_map(|(index, page)| page.is_some().then_some(index)),
                Children::Nodes(nodes) => {
                    let each = pages_below(height - 1);
                    (from / each..).zip(&nodes[to_usize(from / each)..]).find_map(|(slot, node)| {
                        let start = slot * each;
                        let found = search(node.as_deref()?, height - 1, from.saturating_sub(start))?;
                        Some(start + found)
                    })
                }
            }
        }
        if from >= self.pages_max() {
            return None;
        }
        search(self.root.as_deref()?, self.height, from)
    }
}

impl PartialEq for Content {
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len && self.pages_that_differ(other).is_empty()
    }
}

impl Eq for Content {}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Content({} bytes, digest {:016x})", self.len, self.digest())
    }
}

/// The page of a run that does not leave it.
pub(crate) fn page_of(piece: ImageSpan) -> u64 {
    BlockSize::PAGE.cluster_of(piece.start()).index()
}

/// The position within its page of a run that does not leave the page.
pub(crate) fn within_page(piece: ImageSpan) -> Range<usize> {
    let start = to_usize(BlockSize::PAGE.within(piece.start()));
    start..start + to_usize(piece.len())
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;

    #[test]
    fn it_is_what_a_vector_would_be() {
        let mut random = Random::from_seed(11);
        for (reach, steps) in [(5_000, 400), (300_000, 400), (6 << 20, 60)] {
            let mut content = Content::default();
            let mut model: Vec<u8> = Vec::new();
            let mut copies = Vec::new();
            for _ in 0..steps {
                let at = random.index(reach);
                let len = random.index(20_000.min(reach));
                let span = ImageOffset::new(at as u64).span(len as u64);
                match random.below(8) {
                    0..=3 => {
                        let mut bytes = vec![0; len];
                        random.fill(&mut bytes);
                        content.write(span.start(), &bytes);
                        if len > 0 {
                            model.resize(model.len().max(at + len), 0);
                            model[at..at + len].copy_from_slice(&bytes);
                        }
                    }
                    4 | 5 => {
                        content.zero(span);
                        if len > 0 {
                            model.resize(model.len().max(at + len), 0);
                            model[at..at + len].fill(0);
                        }
                    }
                    6 => {
                        content.set_len(at as u64);
                        model.resize(at, 0);
                    }
                    _ => copies.push((content.clone(), model.clone())),
                }
                assert_eq!(content.len(), model.len() as u64);
            }
            copies.push((content, model));
            for (content, model) in copies {
                assert!(content.to_vec() == model, "a copy stays what it was");
                let again = Content::of(&model);
                assert!(content == again);
                assert_eq!(content.digest(), again.digest(), "the digest is that of the bytes");
                let mut file = Vec::new();
                content.write_to(&mut file).unwrap();
                assert!(file == model);
                let whole = ImageOffset::ZERO.span(model.len() as u64 + 99_999);
                let mut at = ImageOffset::ZERO;
                for run in content.runs(whole) {
                    assert_eq!(run.span.start(), at);
                    at = run.span.end();
                    let bytes = &model[to_usize(run.span.start().bytes())..to_usize(at.bytes())];
                    assert!(run.is_data || is_zero(bytes));
                }
                assert_eq!(at.bytes(), model.len() as u64);
            }
        }
    }

    #[test]
    fn a_different_byte_place_or_length_is_a_different_content() {
        let base = Content::of(&[7; 10_000]);
        let mut digests = vec![base.digest()];
        for at in [0, 511, 512, 4096, 9_999] {
            let mut other = base.clone();
            other.write(ImageOffset::new(at), &[8]);
            assert_ne!(other, base);
            digests.push(other.digest());
        }
        let mut longer = base.clone();
        longer.set_len(10_001);
        assert_ne!(longer, base);
        digests.push(longer.digest());
        digests.sort_unstable();
        digests.dedup();
        assert_eq!(digests.len(), 7);
    }

    #[test]
    fn the_far_end_of_a_huge_content_costs_a_handful_of_nodes() {
        let mut content = Content::zeroed(1 << 62);
        content.write(ImageOffset::new((1 << 62) - 3), &[1, 2, 3]);
        content.write(ImageOffset::new(5), &[9]);
        let runs = content.runs(ImageOffset::ZERO.span(1 << 62));
        assert_eq!(runs.iter().map(|run| run.is_data).collect::<Vec<_>>(), [true, false, true]);
        assert_eq!(content.pages().count(), 2);
        content.zero(ImageOffset::ZERO.span(1 << 62));
        assert_eq!(content, Content::zeroed(1 << 62));
    }
}
