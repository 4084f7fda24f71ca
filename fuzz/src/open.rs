//! Any bytes as an image. Everything a user may do with it is done, in an order that needs no decisions from the input:
//! so a seed is simply an image, and a crash is a file that can be given to `vellum check`.

use futures_lite::future::block_on;
use vellum_core::{GuestOffset, GuestSpan, MemoryStorage};
use vellum_format::qcow2::{Header, OpenOptions, snapshot};
use vellum_format::report::Repair;
use vellum_format::session::{SessionNumber, Sessions};

use crate::Image;
use crate::watched::{Request, Watched};

/// Longer inputs are not looked at.
const INPUT_BYTES_MAX: usize = 96 << 10;

/// A request covers no more.
const REQUEST_BYTES_MAX: u64 = 24_000;

/// The target.
pub fn qcow2_open(data: &[u8]) {
    if data.len() <= INPUT_BYTES_MAX {
        crate::bounded(|| block_on(use_all(data)));
    }
}

fn image(data: &[u8]) -> Image {
    Image {
        storage: MemoryStorage::holding("image", data),
        data_file: MemoryStorage::new("data file"),
        has_base: data.len().is_multiple_of(2),
    }
}

async fn use_all(data: &[u8]) {
    let fresh = image(data);
    let is_sound = fresh.check(Repair::Nothing).await.is_ok_and(|(report, _)| report.is_clean());
    look(&fresh).await;
    repair(data, Repair::Leaks).await;
    repair(data, Repair::All).await;
    change(data, is_sound).await;
}

/// What may be done to an image that is open for reading, and to its snapshots.
async fn look(image: &Image) {
    let mut wanted = vec![None];
    if let Ok(header) = Header::read(&*image.storage).await
        && let Ok(snapshots) = snapshot::list(&header, &*image.storage).await
    {
        wanted.extend(snapshots.into_iter().take(2).map(|snapshot| Some(snapshot.id)));
    }
    for snapshot in wanted {
        let options = OpenOptions { read_only: true, snapshot, ..OpenOptions::default() };
        let Ok(disk) = image.open(options).await else { continue };
        let mut watched = Watched { disk, model: None };
        for span in places(watched.disk.geometry().size) {
            watched.request(span, Request::Read).await;
        }
        let _ = watched.disk.map(GuestOffset::ZERO.span(watched.disk.geometry().size)).await;
        watched.close().await;
    }
}

async fn repair(data: &[u8], repair: Repair) {
    let image = image(data);
    let Ok((report, _)) = image.check(repair).await else { return };
    let (again, lines) = image.check(Repair::Nothing).await.expect("what was repaired can be checked");
    let found =
        |report: &vellum_format::report::CheckReport| (report.check_errors, report.corruptions, report.leaks);
    assert_eq!(found(&again), found(&report), "a repair tells what it leaves: {lines:#?}");
}

/// Changes of every kind in a few places, then a second opening that must find them.
async fn change(data: &[u8], is_sound: bool) {
    let image = image(data);
    let Ok(disk) = image.open(OpenOptions::default()).await else { return };
    let session = SessionNumber::new([2; 16]).expect("not zero");
    let is_tied = disk.begin(session, true).await.is_ok();
    if is_tied {
        let header = Header::read(&*image.storage).await.expect("a header that was just written");
        let found = header.session().filter(|found| found.holds_writes());
        assert_eq!(found.map(|found| found.number), Some(session), "it is recorded");
    }
    let mut watched = Watched::new(disk.clone(), is_sound).await;
    for (index, span) in places(watched.disk.geometry().size).into_iter().enumerate() {
        let (seed, first) = (u8::try_from(index).expect("few"), span.split_at(span.len() / 3).0);
        watched.request(first, Request::Write { seed, fua: index == 1 }).await;
        watched.request(span, Request::Zero { may_unmap: index % 2 == 0, fua: false }).await;
        watched.request(first, Request::Discard).await;
        watched.request(span.split_at(span.len() / 2).1, Request::Write { seed, fua: false }).await;
        watched.flush().await;
    }
    let is_watched = watched.model.is_some();
    if is_tied {
        let _ = disk.clear_mark().await;
    }
    let model = watched.close().await;
    let after = image.check(Repair::Nothing).await;
    if !is_watched {
        return;
    }
    let (report, lines) = after.expect("a sound image stays one");
    // A write ends the validity of bitmaps, and so what they occupy is nobody's; a repair takes it back.
    let is_kept = report.leaks == 0 || has_bitmaps(data);
    let is_sound = report.check_errors == 0 && crate::corruptions_but_flags(&report, &lines) == 0 && is_kept;
    assert!(is_sound, "unsound after being used: {lines:#?}");
    let disk = image.open(OpenOptions { read_only: true, ..OpenOptions::default() }).await;
    let disk = disk.unwrap_or_else(|error| panic!("not opened again: {}", error.chain()));
    Watched { disk, model }.close().await;
}

/// Whether an image of version 3 says that its bitmaps are valid: bit 0 of the autoclear features.
fn has_bitmaps(data: &[u8]) -> bool {
    data.get(..96).is_some_and(|header| header[7] == 3 && header[95] & 1 != 0)
}

/// Where requests go: both ends and the middle, at odd places.
fn places(size: u64) -> Vec<GuestSpan> {
    let len = size.min(REQUEST_BYTES_MAX);
    let last = size - len;
    let mut starts = vec![0, last / 2 / 512 * 512, (last * 2 / 3).min(last), last];
    starts.dedup();
    starts.into_iter().map(|start| GuestOffset::new(start).span(len)).collect()
}
