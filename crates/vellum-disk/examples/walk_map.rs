//! The map of a chain of three images: which of them holds which bytes of the disk.

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::path::Path;

use vellum_disk::{
    Buffer, GuestOffset, GuestSpan, Image, IoMode, MergedExtent, Place, Result, WriteFlags, run,
};

pub(crate) fn main() -> Result<()> {
    let dir = std::env::temp_dir().join(format!("vellum-walk-map-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a temporary directory");
    run(IoMode::Auto, async || {
        let (base, middle, top) = (dir.join("base.qcow2"), dir.join("middle.qcow2"), dir.join("top.qcow2"));
        let image = Image::create(&base, 1 << 20).await?;
        write(image, 0, 256 << 10).await?;
        let image = Image::clone_of(&base, &middle).await?;
        write(image, 128 << 10, 64 << 10).await?;
        let image = Image::clone_of(&middle, &top).await?;
        write(image, 512 << 10, 64 << 10).await?;

        let image = Image::options().read_only().open(&top).await?;
        let extents = walk(&image).await?;
        for MergedExtent { span, place, depth } in &extents {
            let (start, end) = (span.start().bytes() >> 10, span.end().bytes() >> 10);
            match place {
                Place::Data { at, .. } => {
                    let name = image.files().nth(*depth).and_then(Path::file_name).unwrap_or_default();
                    println!("{start:4} to {end:4} KiB: in {} at offset {at}", name.display());
                }
                Place::Compressed { .. } => {
                    println!("{start:4} to {end:4} KiB: compressed, at depth {depth}")
                }
                Place::Zero { .. } | Place::Below => println!("{start:4} to {end:4} KiB: zeros"),
            }
        }
        image.close().await?;
        let depths = extents.iter().filter(|extent| matches!(extent.place, Place::Data { .. }));
        assert_eq!(depths.map(|extent| extent.depth).collect::<Vec<_>>(), [2, 1, 2, 0]);
        Ok(())
    })??;
    std::fs::remove_dir_all(&dir).expect("the directory of the example");
    Ok(())
}

/// Writes something there, and closes the image.
async fn write(image: Image, at: u64, len: usize) -> Result<()> {
    let mut data = Buffer::zeroed(len);
    data.fill(7);
    image.disk().write(GuestOffset::new(at), data, WriteFlags::default()).await?;
    image.close().await
}

/// All extents of the disk. An answer may stop early, so that its size is bounded: the next one begins there.
async fn walk(image: &Image) -> Result<Vec<MergedExtent>> {
    let mut extents = Vec::new();
    let mut rest = GuestOffset::ZERO.span(image.size());
    while !rest.is_empty() {
        let answer = image.map(rest).await?;
        let reached = answer.last().map_or(rest.end(), |last| last.span.end());
        rest = GuestSpan::between(reached, rest.end());
        extents.extend(answer);
    }
    Ok(extents)
}
