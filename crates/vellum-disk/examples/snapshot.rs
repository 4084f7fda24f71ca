//! A snapshot inside a native image: taken while the disk is in use, listed, read beside the disk, and read
//! once more when the image is closed. Without `async`: the image is on a thread of its own.

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use vellum_disk::{Buffer, GuestOffset, Image, Result, blocking::Disk};

pub(crate) fn main() -> Result<()> {
    let dir = std::env::temp_dir().join(format!("vellum-snapshot-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a temporary directory");
    let path = dir.join("disk.vlm");

    let new = path.clone();
    let disk = Disk::start(move || Image::create(new, 64 << 20))?;
    disk.write_at(0, b"before")?;
    let id = disk.with(async |image| image.take_snapshot("monday").await)??;
    println!("took snapshot {id}, named monday");
    disk.write_at(0, b"after!")?;

    // What needs more than one call runs on the disk's thread, with the image.
    let (names, then) = disk.with(async |image| {
        let names: Vec<String> = image.snapshots().await?.into_iter().map(|one| one.name).collect();
        let snapshot = image.open_snapshot("monday")?;
        let then = snapshot.read(GuestOffset::ZERO, Buffer::for_overwrite(6)).await?.to_vec();
        snapshot.close().await?;
        Ok::<_, vellum_disk::Error>((names, then))
    })??;
    let mut now = [0; 6];
    disk.read_at(0, &mut now)?;
    disk.close()?;
    assert_eq!((&then[..], &now), (&b"before"[..], b"after!"), "a snapshot never changes");
    println!("snapshots: {}", names.join(", "));
    println!("monday has {:?}, the disk {:?}", String::from_utf8_lossy(&then), String::from_utf8_lossy(&now));

    let closed = path.clone();
    let disk = Disk::start(move || Image::options().snapshot("monday").open(closed))?;
    disk.read_at(0, &mut now)?;
    disk.close()?;
    assert_eq!(&now, b"before", "it outlives the closing of the image");
    println!("opened alone, monday still has {:?}", String::from_utf8_lossy(&now));
    std::fs::remove_dir_all(&dir).expect("the directory of the example");
    Ok(())
}
