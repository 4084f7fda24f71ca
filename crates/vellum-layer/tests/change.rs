//! A chain that grows, or is restored from a snapshot, while each file operation of the change fails in turn:
//! every answered write stays, and the disk continues, unless a flush has failed.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vellum_core::{
    Buffer, ErrorKind, GuestOffset, LocalFuture, Result, SharedDisk, SharedStorage, Storage, WriteFlags,
};
use vellum_format::{FormatKind, native, qcow2};
use vellum_layer::{Chain, ChainOptions, Opener, Purpose};
use vellum_sim::{Drive, DriveOptions, Fault, Operation, Operations, Repeat, World};

const SIZE: u64 = 1 << 20;
const BLOCK: usize = 4096;
/// In bytes, as the model has it.
const GROWN: usize = 2 << 20;
const FORMATS: [&str; 6] = ["raw", "qcow2", "qcow2 journal", "linear", "table", "zoned"];

/// There is one file.
struct One(Arc<Drive>);

impl Opener for One {
    fn canonical<'a>(&'a self, path: &'a Path) -> LocalFuture<'a, Result<PathBuf>> {
        Box::pin(std::future::ready(Ok(path.to_owned())))
    }

    fn open<'a>(&'a self, _: &'a Path, _: &'a Path, _: Purpose) -> LocalFuture<'a, Result<SharedStorage>> {
        Box::pin(std::future::ready(Ok(self.0.clone() as SharedStorage)))
    }
}

async fn made(world: &World, format: &str) -> (Arc<Drive>, Chain) {
    let drive = Drive::new(world, DriveOptions::default());
    let linear = native::CreateOptions { size: SIZE, ..Default::default() };
    let table = native::CreateOptions {
        has_table: true,
        unit_size: Some(64 << 10),
        journal_bytes: Some(64 << 10),
        ..linear.clone()
    };
    let made = match format {
        "raw" => drive.set_len(SIZE).await,
        "linear" => native::create(&*drive, &linear).await.map(drop),
        "table" => native::create(&*drive, &table).await.map(drop),
        "zoned" => {
            let zoned = native::CreateOptions { has_zones: true, zone_size: Some(128 << 10), ..table };
            native::create(&*drive, &zoned).await.map(drop)
        }
        _ => {
            let journal = format.ends_with("journal").then_some(64 << 10);
            let options = qcow2::CreateOptions { size: SIZE, journal, ..Default::default() };
            qcow2::create(&*drive, None, &options).await.map(drop)
        }
    };
    made.expect("a new image");
    let options =
        ChainOptions { format: (format == "raw").then_some(FormatKind::Raw), ..ChainOptions::default() };
    let chain = Chain::open(&One(drive.clone()), Path::new("/image"), &options).await.expect("it opens");
    (drive, chain)
}

async fn write(disk: &SharedDisk, model: &mut [u8], block: u64, byte: u8) -> Result<()> {
    let at = usize::try_from(block).expect("small") * BLOCK;
    let data = [byte; BLOCK];
    disk.write(GuestOffset::new(at as u64), Buffer::copy_of(&data), WriteFlags::default()).await?;
    model[at..at + data.len()].copy_from_slice(&data);
    Ok(())
}

#[track_caller]
fn is_as(bytes: &[u8], model: &[u8], when: &str) {
    assert_eq!(bytes.iter().zip(model).position(|(is, should)| is != should), None, "{when}");
}

async fn all(disk: &SharedDisk) -> Vec<u8> {
    let size = usize::try_from(disk.geometry().size).expect("small");
    disk.read(GuestOffset::ZERO, Buffer::zeroed(size)).await.expect("it can be read").to_vec()
}

/// Grows a disk that has been written, with this failure; returns whether the failure was met.
async fn grow_and_fail(world: &World, format: &str, fault: Fault) -> bool {
    let when = format!("{format}: {fault:?}");
    let (drive, mut chain) = made(world, format).await;
    let mut model = vec![0; GROWN];
    for block in 0..40 {
        let byte = u8::try_from(block).expect("small") + 1;
        write(chain.disk(), &mut model, block * 37 % 256, byte).await.expect("written");
        if block == 20 {
            chain
                .disk()
                .discard(GuestOffset::ZERO.span(SIZE / 4), WriteFlags::default())
                .await
                .expect("gone");
            model = all(chain.disk()).await;
            model.resize(GROWN, 0);
        }
    }
    // What a flush leaves for the next one is done: else the first fault would be met by a flush, and stop
    // the image.
    for _ in 0..4 {
        chain.disk().flush().await.expect("flushed");
    }
    let repeat = fault.repeat;
    drive.faults().add(fault);
    let grown = chain.grow(2 * SIZE).await;
    drive.faults().clear();
    let is_met = drive.faults().hits() > 0;
    if drive.is_poisoned() {
        grown.expect_err(&when);
        let written = write(chain.disk(), &mut model, 3, 200).await;
        let flushed = chain.disk().flush().await;
        assert!(written.is_err() || flushed.is_err(), "{when}: nobody knows what the file has");
        chain.grow(2 * SIZE).await.expect_err(&when);
        assert!(chain.gone().is_none() || chain.close().await.is_err(), "{when}: it ends in good order");
        return true;
    }
    assert!(is_met || grown.is_ok(), "{when}: {grown:?}");
    if let Some(why) = chain.gone().cloned() {
        assert_eq!(repeat, Repeat::ForEver, "{when}: {}", why.chain());
        assert_eq!(why.kind(), ErrorKind::NoSpace, "{when}: {}", why.chain());
        let refused = chain.disk().read(GuestOffset::ZERO, Buffer::zeroed(1)).await;
        assert_eq!(refused.expect_err(&when).kind(), ErrorKind::Closed);
        // Also where it is as large already.
        chain.grow(2 * SIZE).await.expect(&when);
    }
    let size = chain.disk().geometry().size;
    assert!(size == 2 * SIZE || (grown.is_err() && size == SIZE), "{when}: {size}");
    is_as(&all(chain.disk()).await, &model, &when);
    for block in 0..20 {
        write(chain.disk(), &mut model, block * 11 % 256, 100).await.expect(&when);
    }
    chain.disk().flush().await.expect(&when);
    chain.grow(2 * SIZE).await.expect(&when);
    write(chain.disk(), &mut model, 511, 101).await.expect(&when);
    is_as(&all(chain.disk()).await, &model, &when);
    chain.close().await.expect(&when);
    let options =
        ChainOptions { format: (format == "raw").then_some(FormatKind::Raw), ..ChainOptions::default() };
    let again = Chain::open(&One(drive), Path::new("/image"), &options).await.expect(&when);
    is_as(&all(again.disk()).await, &model, &when);
    is_met
}

#[test]
fn a_disk_goes_on_when_growing_fails_and_not_after_a_failed_flush() {
    let no_space = Operation::Write | Operation::WriteZeroes | Operation::SetLen;
    let others = Operation::Read | Operation::Write | Operation::WriteZeroes | Operation::SetLen;
    let sweeps: [(Operations, ErrorKind, Repeat); 5] = [
        (others, ErrorKind::Io, Repeat::Once),
        (no_space, ErrorKind::NoSpace, Repeat::Once),
        (no_space, ErrorKind::NoSpace, Repeat::ForEver),
        (Operation::Flush.into(), ErrorKind::Io, Repeat::Once),
        (Operation::Flush.into(), ErrorKind::NoSpace, Repeat::Once),
    ];
    for format in FORMATS {
        for (operations, error, repeat) in sweeps {
            let mut met = 0;
            for number in 0.. {
                let fault = Fault { repeat, error, ..Fault::nth(operations, number) };
                let world = World::new(number);
                if !world.run(grow_and_fail(&world, format, fault)) {
                    break;
                }
                met += 1;
            }
            assert!(met > 0, "{format}: nothing of {operations:?} was met");
        }
    }
}

/// Restores a snapshot with this failure; returns whether the failure was met.
async fn revert_and_fail(world: &World, format: &str, fault: Fault) -> bool {
    let when = format!("{format}: {fault:?}");
    let (drive, mut chain) = made(world, format).await;
    let mut model = vec![0; GROWN / 2];
    for block in 0..20 {
        write(chain.disk(), &mut model, block * 37 % 256, 1).await.expect("written");
    }
    let then = model.clone();
    chain.top().opened.snapshots.as_ref().expect("native").create("then", 0).await.expect("made");
    for block in 0..20 {
        write(chain.disk(), &mut model, block * 53 % 256, 2).await.expect("written");
    }
    for _ in 0..4 {
        chain.disk().flush().await.expect("flushed");
    }
    let repeat = fault.repeat;
    drive.faults().add(fault);
    let reverted = chain.revert("then").await;
    drive.faults().clear();
    let is_met = drive.faults().hits() > 0;
    if drive.is_poisoned() {
        reverted.expect_err(&when);
        return true;
    }
    assert!(is_met || reverted.is_ok(), "{when}: {reverted:?}");
    if let Some(why) = chain.gone().cloned() {
        assert_eq!(repeat, Repeat::ForEver, "{when}: {}", why.chain());
        // Any request opens it again.
        chain.grow(SIZE).await.expect(&when);
    }
    let now = all(chain.disk()).await;
    assert!(
        now == then || (reverted.is_err() && now == model),
        "{when}: it is neither the one nor the other"
    );
    let mut model = now;
    for block in 0..20 {
        write(chain.disk(), &mut model, block * 11 % 256, 100).await.expect(&when);
    }
    chain.disk().flush().await.expect(&when);
    chain.revert("then").await.expect(&when);
    is_as(&all(chain.disk()).await, &then, &when);
    chain.close().await.expect(&when);
    is_met
}

#[test]
fn a_disk_goes_on_when_a_revert_fails() {
    let others = Operation::Read | Operation::Write | Operation::WriteZeroes | Operation::SetLen;
    let no_space = Operation::Preallocate | Operation::SetLen;
    for format in ["table", "zoned"] {
        for (operations, error, repeat) in [
            (others, ErrorKind::Io, Repeat::Once),
            (others, ErrorKind::NoSpace, Repeat::Once),
            (no_space, ErrorKind::NoSpace, Repeat::ForEver),
            (Operation::Flush.into(), ErrorKind::Io, Repeat::Once),
        ] {
            for number in 0.. {
                let fault = Fault { repeat, error, ..Fault::nth(operations, number) };
                let world = World::new(number);
                if !world.run(revert_and_fail(&world, format, fault)) {
                    break;
                }
            }
        }
    }
}
