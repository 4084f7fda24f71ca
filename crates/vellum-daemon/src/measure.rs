//! How large an image will be that a disk is converted into.
//!
//! Data is what the map of the source does not call zero: its content is not read. So an image whose zeros are stored
//! as data is measured as larger than its copy will be.

use vellum_core::{Error, GuestOffset, GuestSpan, Place, Result, SharedDisk, map_merged};
use vellum_format::image::Fact;
use vellum_format::measure::ImageSizes;
use vellum_format::{FormatKind, native, qcow2};
use vellum_layer::Chain;

/// Into what.
#[derive(Debug, Clone)]
pub enum MeasuredFormat {
    /// A raw image.
    Raw,
    /// A raw LUKS image, and the number of bytes before its data.
    Luks(u64),
    /// A qcow2 image with these options.
    Qcow2(Box<qcow2::CreateOptions>),
    /// An image of the native format with these options.
    Native(native::CreateOptions),
}

/// The sizes of the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measured {
    /// With the data that there is, in bytes.
    pub required: u64,
    /// With data everywhere, in bytes.
    pub fully_allocated: u64,
    /// What copies of the persistent bitmaps of the source take besides, in bytes. `None` where source or target cannot
    /// have any.
    pub bitmaps: Option<u64>,
}

/// Measures an image for a disk of this size, which is that of the source if there is one.
///
/// # Errors
/// `Invalid` for options that contradict each other, and the errors of the source.
pub async fn measure(size: u64, source: Option<&Chain>, format: MeasuredFormat) -> Result<Measured> {
    let (sizes, cluster) = match format {
        MeasuredFormat::Raw | MeasuredFormat::Luks(_) => {
            let before = if let MeasuredFormat::Luks(before) = format { before } else { 0 };
            let bytes = size.checked_next_multiple_of(512).and_then(|bytes| bytes.checked_add(before));
            let bytes = bytes.ok_or_else(|| Error::invalid("the size is too large"))?;
            return Ok(Measured { required: bytes, fully_allocated: bytes, bitmaps: None });
        }
        MeasuredFormat::Qcow2(options) => {
            let options = qcow2::CreateOptions { size, ..*options };
            (options.sizes()?, (options.version >= 3).then_some(options.cluster_size))
        }
        MeasuredFormat::Native(options) => (native::CreateOptions { size, ..options }.sizes()?, None),
    };
    let data = match source {
        Some(source) => data_bytes(source.disk(), &sizes).await?,
        None => 0,
    };
    let bitmaps = match (source, cluster) {
        (Some(source), Some(cluster)) => bitmap_bytes(source, cluster).await?,
        _ => None,
    };
    Ok(Measured { required: sizes.required(data), fully_allocated: sizes.full(), bitmaps })
}

/// The bytes of all blocks in which there is data.
async fn data_bytes(disk: &SharedDisk, sizes: &ImageSizes) -> Result<u64> {
    let (unit, end) = (sizes.unit(), disk.geometry().size);
    let (mut at, mut counted, mut data) = (0, 0, 0);
    while at < end {
        let rest = GuestSpan::between(GuestOffset::new(at), GuestOffset::new(end));
        for extent in map_merged(disk, rest).await? {
            at = extent.span.end().bytes();
            if matches!(extent.place, Place::Data { .. } | Place::Compressed { .. }) {
                let first = unit.round_down(extent.span.start().bytes()).max(counted);
                counted = unit.round_up(at).max(counted);
                data += counted - first;
            }
        }
    }
    Ok(data)
}

/// The bytes that the bitmaps of the image on top take in clusters of this size. `None` if its format has none.
async fn bitmap_bytes(source: &Chain, cluster: u64) -> Result<Option<u64>> {
    let top = source.top();
    let (FormatKind::Qcow2, false) = (top.head.kind(), top.is_snapshot) else { return Ok(None) };
    let facts = top.head.facts(&*top.storage).await?;
    let is_old = facts
        .iter()
        .any(|(name, fact)| *name == "compat" && matches!(fact, Fact::Text(text) if text == "0.10"));
    if is_old {
        return Ok(None);
    }
    let size = source.disk().geometry().size;
    let (mut bytes, mut directory) = (0u64, 0u64);
    let all = facts.into_iter().filter(|(name, _)| *name == "bitmaps");
    let all = all.filter_map(|(_, fact)| if let Fact::List(all) = fact { Some(all) } else { None }).flatten();
    for bitmap in all {
        let Fact::Group(bitmap) = bitmap else { continue };
        let (mut granularity, mut name_len, mut is_in_use) = (65_536, 0, false);
        for (name, fact) in bitmap {
            match (name, fact) {
                ("granularity", Fact::Number(number)) => granularity = number.max(1),
                ("name", Fact::Text(text)) => name_len = text.len() as u64,
                ("flags", Fact::List(flags)) => {
                    is_in_use = flags.iter().any(|flag| matches!(flag, Fact::Text(text) if text == "in-use"));
                }
                _ => {}
            }
        }
        if is_in_use {
            continue; // its content is lost, so it is not copied
        }
        let clusters = size.div_ceil(granularity).div_ceil(8).div_ceil(cluster);
        let table = (clusters * 8).next_multiple_of(cluster);
        bytes = bytes.saturating_add(clusters.saturating_mul(cluster)).saturating_add(table);
        directory += (24 + name_len).next_multiple_of(8);
    }
    Ok(Some(bytes.saturating_add(directory.next_multiple_of(cluster))))
}
