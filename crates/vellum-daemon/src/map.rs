//! The map of a disk: which part of it is stored in which image of its chain, and at which offset.

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use vellum_core::{GuestOffset, GuestSpan, MergedExtent, Place, Result, SharedStorage, map_merged};
use vellum_format::FormatKind;
use vellum_layer::Chain;

use crate::image::{ImageOptions, open_image};

/// One extent, with the names that `qemu-img map --output=json` uses.
#[derive(Debug, Clone, Serialize)]
pub struct MapRow {
    /// Where it begins in the disk.
    pub start: u64,
    /// How many bytes it has.
    pub length: u64,
    /// The image that has it: 0 is the top one.
    pub depth: usize,
    /// Whether an image of the chain records anything about it.
    pub present: bool,
    /// Whether it reads as zero.
    pub zero: bool,
    /// Whether it has bytes in a file.
    pub data: bool,
    /// Whether these are compressed.
    pub compressed: bool,
    /// Whether a fast medium alone has them, or should have them.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub moved: bool,
    /// Whether they are lost: a fast medium alone should have them, and has not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub lost: bool,
    /// Where it begins in the file, if it has a place of its own there: also zeros for which space is kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// The file that has it: its name as it was requested, or as it is in the image above.
    #[serde(skip)]
    pub file: Option<Arc<str>>,
    /// The same, where the image has its data in several files, so that the offset alone does not say which.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filename: Option<String>,
}

/// Maps the disk of an image from `start` on, `len_max` bytes at most, or its snapshot that the options name.
/// Must be called on a worker.
///
/// # Errors
/// Those of [`open_image`], and the errors of reading the mapping.
pub async fn map(
    path: &Path,
    options: &ImageOptions,
    start: u64,
    len_max: Option<u64>,
) -> Result<Vec<MapRow>> {
    let chain = open_image(path, options).await?;
    let size = chain.disk().geometry().size;
    let start = start.min(size);
    let len = len_max.unwrap_or(u64::MAX).min(size - start);
    let mut rest = GuestOffset::new(start).span(len);
    let (mut rows, mut names) = (Vec::new(), Names::default());
    let lost = match chain.tier() {
        // Also what its medium has and does not give.
        Some(tier) if options.salvages && options.fast.is_some() => tier.look_for_lost().await?.1,
        Some(tier) => tier.missing(),
        None => Vec::new(),
    };
    while !rest.is_empty() {
        for extent in map_merged(chain.disk(), rest).await? {
            rest = GuestSpan::between(extent.span.end(), rest.end());
            for part in at_the_end_of_its_disk(&chain, extent) {
                for (part, is_lost) in cut_at(&lost, part) {
                    for (part, kept_at) in cut_at_places(&chain, part).await? {
                        let row = row(&chain, part, &mut names);
                        push(&mut rows, MapRow { offset: kept_at.or(row.offset), lost: is_lost, ..row });
                    }
                }
            }
        }
    }
    chain.close().await?;
    Ok(rows)
}

/// Cuts an extent where the disk that answered ends. No image has anything behind that, and as with
/// `qemu-img` the part belongs to the longer disk above.
fn at_the_end_of_its_disk(chain: &Chain, extent: MergedExtent) -> impl Iterator<Item = MergedExtent> {
    let size = chain.member(extent.depth).opened.disk.geometry().size;
    let (inside, outside) = extent.span.split_at(size.saturating_sub(extent.span.start().bytes()));
    let behind = MergedExtent { span: outside, place: Place::Below, depth: extent.depth.saturating_sub(1) };
    [MergedExtent { span: inside, ..extent }, behind].into_iter().filter(|part| !part.span.is_empty())
}

/// Cuts an extent of the top image where a part of it is lost that only its fast medium had, and where that ends.
fn cut_at(lost: &[GuestSpan], extent: MergedExtent) -> Vec<(MergedExtent, bool)> {
    if extent.depth > 0 || !matches!(extent.place, Place::Compressed { .. }) || lost.is_empty() {
        return vec![(extent, false)];
    }
    let (mut parts, mut rest) = (Vec::new(), extent.span);
    let first = lost.partition_point(|lost| lost.end() <= rest.start());
    let mut add = |span: GuestSpan, is_lost| {
        if !span.is_empty() {
            parts.push((MergedExtent { span, ..extent.clone() }, is_lost));
        }
    };
    for span in
        lost[first..].iter().map(|span| span.intersect(extent.span)).take_while(|span| !span.is_empty())
    {
        add(GuestSpan::between(rest.start(), span.start()), false);
        add(span, true);
        rest = GuestSpan::between(span.end(), rest.end());
    }
    add(rest, false);
    parts
}

/// Cuts zeros where their places begin and end, and says where each part lies.
async fn cut_at_places(chain: &Chain, extent: MergedExtent) -> Result<Vec<(MergedExtent, Option<u64>)>> {
    let zeros = chain.member(extent.depth).opened.zeros.as_ref();
    let Some(zeros) = zeros.filter(|_| matches!(extent.place, Place::Zero { allocated: true })) else {
        return Ok(vec![(extent, None)]);
    };
    let (mut parts, mut rest) = (Vec::new(), extent.span);
    let mut add = |span: GuestSpan, at| {
        if !span.is_empty() {
            parts.push((MergedExtent { span, ..extent.clone() }, at));
        }
    };
    for (span, at) in zeros.zero_places(extent.span).await? {
        add(GuestSpan::between(rest.start(), span.start()), None);
        add(span, Some(at.bytes()));
        rest = GuestSpan::between(span.end(), rest.end());
    }
    add(rest, None);
    Ok(parts)
}

fn row(chain: &Chain, extent: MergedExtent, names: &mut Names) -> MapRow {
    let (start, length) = (extent.span.start().bytes(), extent.span.len());
    let plain = MapRow {
        start,
        length,
        depth: extent.depth,
        present: true,
        zero: false,
        data: true,
        compressed: false,
        moved: false,
        lost: false,
        offset: None,
        file: None,
        filename: None,
    };
    match extent.place {
        // As in qemu-img: a program that reads the file there finds other bytes.
        Place::Data { .. } if chain.member(extent.depth).head.is_encrypted() => plain,
        Place::Data { storage, at } => {
            let file = names.of(chain, extent.depth, storage);
            let filename = (!chain.member(extent.depth).parts.is_empty()).then(|| file.to_string());
            MapRow { offset: Some(at.bytes()), file: Some(file), filename, ..plain }
        }
        Place::Compressed { from: None } if chain.member(extent.depth).head.fast().is_some() => {
            MapRow { moved: true, ..plain }
        }
        Place::Compressed { .. } => MapRow { compressed: true, ..plain },
        // What no image of the chain has is not present; zeros that an image recorded are.
        Place::Below => MapRow { present: false, zero: true, data: false, ..plain },
        Place::Zero { .. } => {
            // A hole of a raw disk lies where it would have its bytes.
            let is_raw = chain.member(extent.depth).head.kind() == FormatKind::Raw;
            MapRow { zero: true, data: false, offset: is_raw.then_some(start), ..plain }
        }
    }
}

/// The name that was asked for last, and of what: there may be millions of extents, and there are few files.
#[derive(Default)]
struct Names(Option<(usize, SharedStorage, Arc<str>)>);

impl Names {
    fn of(&mut self, chain: &Chain, depth: usize, storage: SharedStorage) -> Arc<str> {
        match &self.0 {
            Some((same, file, name)) if *same == depth && Arc::ptr_eq(file, &storage) => name.clone(),
            _ => {
                let name: Arc<str> = name(chain, depth, &storage).into();
                self.0 = Some((depth, storage, name.clone()));
                name
            }
        }
    }
}

/// The name of the file as it was requested, or as it is in the image above.
fn name(chain: &Chain, depth: usize, storage: &SharedStorage) -> String {
    let member = chain.member(depth);
    match &member.data_file {
        Some((path, file)) if file.name() == storage.name() || Arc::ptr_eq(file, storage) => {
            path.display().to_string()
        }
        _ if !member.parts.is_empty() => {
            let part = member.parts.iter().find(|(_, file)| file.name() == storage.name());
            part.map_or(&member.path, |(path, _)| path).display().to_string()
        }
        _ => member.path.strip_prefix("./").unwrap_or(&member.path).display().to_string(),
    }
}

/// Adds a row, or extends the last one where both are one extent.
fn push(rows: &mut Vec<MapRow>, next: MapRow) {
    if let Some(last) = rows.last_mut() {
        let facts = |row: &MapRow| {
            let MapRow { depth, present, zero, data, compressed, moved, lost, .. } = row;
            (*depth, *present, *zero, *data, *compressed, *moved, *lost)
        };
        let same = facts(last) == facts(&next);
        let follows = match (last.offset, next.offset) {
            (Some(at), Some(next)) => at + last.length == next,
            (None, None) => true,
            _ => false,
        };
        if same && follows && last.file == next.file && last.start + last.length == next.start {
            last.length += next.length;
            return;
        }
    }
    rows.push(next);
}
