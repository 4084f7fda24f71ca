//! Another size for the disk in an existing image.
//!
//! ```text
//!   larger, room in the L1 table      its new entries become zero       ── flush ──  header: entries, size   ── flush ──
//!   larger, no room, a longer disk    an L1 table, L2 tables with zeros, refcounts, all beside the old
//!   below, or space is reserved       ones (`shadow.rs`)                ── flush ──  header: L1, size        ── flush ──
//!   smaller                           as above: without what is behind the end
//! ```
//!
//! 1. The first sector of the header says how large the disk is. It is written once, when all that the new size needs is
//!    durable: a crash leaves the old size or the new one, with right refcounts and without a leak.
//! 2. What the last cluster held behind the old end is zero by then: where it lies, if nothing else names it, or in a copy, with
//!    tables beside the old ones. In an encrypted image that takes the key, unless there is nothing of its own. What a longer disk below has there is never seen: zeros are in its place, up to its end.
//! 3. What becomes smaller loses nothing that a snapshot has: it is named less often.
//! 4. What the L1 table names behind the end of the disk (a machine's state) is dropped when the disk grows.
//! 5. Space that is reserved is there before the switch. Its clusters are zeros with a place.
//! 6. A smaller disk keeps the entries of its L1 table as room, so that it grows again in the first way.
//! 7. The new tables of a smaller disk lie behind the old data at first, where the image was full. A second switch moves them
//!    down, so that the file ends with what is in use. It may fail: the disk is smaller by then.
//!
//! Bitmaps get the new size in the same step: what is added is marked in those that are enabled.
//!
//! Left out: data in another file.

use std::collections::BTreeSet;
use std::sync::Arc;

use vellum_core::{
    Buffer, Context, Disk, Error, GuestOffset, ImageOffset, Place, Result, SharedStorage, Storage, Zeroes,
};
use vellum_luks::{SECTOR, SectorCipher};

use super::entry::{ClusterState, Entries, Units};
use super::header::Header;
use super::journal_setting::make_room_for_bitmaps;
use super::layout::*;
use super::open::OpenOptions;
use super::shadow::{Edit, Flags, Shadow};
use super::snapshots::{checked, owned, put_l1};
use super::tree::{count_table, each_table, read_l1, read_table, table_of, tables_of};
use super::{Qcow2, bitmaps, encrypted};
use crate::hash::HashMap;
use crate::image::{Files, Growth, OpenOptions as Options, Reserve};

/// Enlarges the disk of a closed image. Returns the size before, in bytes.
///
/// # Errors
/// `Invalid` for a smaller size or one that is no multiple of 512, `Unsupported` when something else in the image must
/// change with the size, and errors of the storage.
pub async fn grow(image: &SharedStorage, size: u64) -> Result<u64> {
    grow_with(image, size, &Growth::default()).await
}

/// As above, over a longer disk below, or with space for what is added.
///
/// # Errors
/// As above, and `NoSpace` when there is too little to reserve.
pub async fn grow_with(image: &SharedStorage, size: u64, growth: &Growth) -> Result<u64> {
    grow_inner(image, size, growth).await.context(|| format!("can't resize {}", image.name()))
}

/// Makes the disk of a closed image smaller. Returns the size before, in bytes. What is behind the new end is lost.
///
/// # Errors
/// `Unsupported` when something else in the image must change with the size, and errors of the storage.
pub async fn shrink(image: &SharedStorage, size: u64) -> Result<u64> {
    shrink_inner(image, size).await.context(|| format!("can't resize {}", image.name()))
}

/// Refuses an image that cannot have another size.
fn refuse(header: &Header, name: &str) -> Result<()> {
    if header.needs_replay() {
        return Err(header.replay_first(name));
    }
    let refusals = [
        (header.is_dirty(), "the image was not closed: run `vellum recover` first"),
        (header.is_corrupt(), "the image is marked as corrupt: run `vellum check` first"),
        (header.has_data_file(), "its data is in an external data file, which would have to change as well"),
        (
            header.snapshot_count > 0 && header.version() < 3,
            "its snapshots (version 2) have no size of their own: `vellum amend -o compat=1.1` makes it version 3",
        ),
    ];
    match refusals.iter().find(|(is_so, _)| *is_so) {
        Some((_, why)) => Err(Error::unsupported(*why)),
        None => Ok(()),
    }
}

fn check_size(size: u64) -> Result<()> {
    match size.is_multiple_of(512) {
        true => Ok(()),
        false => Err(Error::invalid(format!("a disk of {size} bytes: the size must be a multiple of 512"))),
    }
}

async fn grow_inner(shared: &SharedStorage, size: u64, growth: &Growth) -> Result<u64> {
    let image: &dyn Storage = &**shared;
    let mut header = Header::read(image).await?;
    refuse(&header, image.name())?;
    let before = header.size();
    if size < before {
        return Err(Error::invalid(format!("the disk has {before} bytes, and {size} is smaller")));
    }
    check_size(size)?;
    let most = L1_BYTES_MAX / 8;
    let needed = size.div_ceil(header.l2_reach());
    if needed > most {
        let most = exact(most.saturating_mul(header.l2_reach()));
        return Err(Error::unsupported(format!(
            "this qcow2 image can grow to {most} at most; for more, copy it into one with larger clusters: \
             `vellum convert -O qcow2 -o cluster_size=2M OLD NEW`, and grow that"
        )));
    }
    let span = header.l1_span();
    let room = header.cluster_size().round_up(span.len()).min(L1_BYTES_MAX) / 8;
    let cipher = if size > before { cipher_for_end(shared, &header, growth).await? } else { None };
    let copies_end = clear_behind_end(shared, &header, cipher.as_ref(), size).await?;
    let shows_more = copies_end || growth.below > before && size > before;
    let reserves = growth.reserve != Reserve::Nothing && size > before;
    let has_bitmaps = header.bitmaps().is_some() && size > before;
    if needed > room || shows_more || reserves || has_bitmaps || names_behind(image, &header).await? {
        return Ok(switch_beside(shared, size, growth, cipher.as_ref()).await?.0);
    }
    if needed > u64::from(header.l1_entries) {
        let rest = span.end().span((room - u64::from(header.l1_entries)) * 8);
        image.write_zeroes(rest, Zeroes::Allocated).await?;
        image.flush().await?;
        header.set_l1_entries(u32::try_from(needed).expect("at most 4 Mi"));
    }
    header.set_size(size);
    image.write(ImageOffset::ZERO, header.first_sector()).await?;
    image.flush().await?; // commit point
    Ok(before)
}

/// Whether a larger disk would show what the L1 table names behind the end of this one: a machine's state, where another
/// program has reverted to a snapshot with one.
async fn names_behind(image: &dyn Storage, header: &Header) -> Result<bool> {
    let used = header.size().div_ceil(header.l2_reach()) * 8;
    let (_, behind) = header.l1_span().split_at(used);
    if behind.is_empty() {
        return Ok(false);
    }
    let len = usize::try_from(behind.len()).expect("at most 32 MiB");
    Ok(!image.read(behind.start(), Buffer::for_overwrite(len)).await?.is_zero())
}

async fn shrink_inner(image: &SharedStorage, size: u64) -> Result<u64> {
    check_size(size)?;
    let header = Header::read(&**image).await?;
    refuse(&header, image.name())?;
    let before = header.size();
    if size >= before {
        return Err(Error::invalid(format!("the disk has {before} bytes, and {size} is not smaller")));
    }
    let (_, placed) = switch_beside(image, size, &Growth::default(), None).await?;
    // What follows may fail: the disk is smaller.
    let _ = lower(image, &placed).await;
    // The bytes behind the end are not the disk's any more. A disk that grows looks again.
    if let Ok(header) = Header::read(&**image).await
        && header.encryption().is_none()
    {
        let _ = clear_behind_end(image, &header, None, header.cluster_size().round_up(size)).await;
    }
    Ok(before)
}

/// The disk gets another size with tables beside the old ones. Returns the size before, and the clusters of what was written.
async fn switch_beside(
    image: &SharedStorage,
    size: u64,
    growth: &Growth,
    cipher: Option<&Arc<SectorCipher>>,
) -> Result<(u64, BTreeSet<u64>)> {
    let mut header = checked(image).await?;
    if header.bitmaps().is_some() {
        header = make_room_for_bitmaps(&header, &**image).await?;
    }
    let before = header.size();
    let Growth { below, reserve, .. } = *growth;
    let zeros = before..below.min(size).max(before);
    let reserved = if reserve == Reserve::Nothing { 0..0 } else { before..size };
    if header.version() < 3 && !(zeros.is_empty() && reserved.is_empty()) {
        return Err(Error::unsupported(
            "version 2 cannot record zeros, neither over what a longer backing image has nor where space is reserved: \
             `vellum amend -o compat=1.1` makes it version 3",
        ));
    }
    if cluster_count(&header, &reserved) > RESERVED_CLUSTERS_MAX {
        let most = exact(RESERVED_CLUSTERS_MAX << header.cluster_size().shift());
        return Err(Error::unsupported(format!(
            "space for {most} at most is reserved at once: grow the disk in steps, or omit --preallocation"
        )));
    }
    let copies_end = size > before && clear_behind_end(image, &header, cipher, size).await?;
    let (reach, cluster, old) = (header.l2_reach(), header.cluster_size(), header.l1_span());
    let l1 = read_l1(image, old).await?;
    let mut shadow = Shadow::new(header.clone(), image).await?;
    if size < before {
        shadow.drop_idle_blocks();
    }
    // What is behind the end, before or after, is named less often.
    let end = before.min(size);
    let used = usize::try_from(end.div_ceil(reach)).expect("at most 4 Mi").min(l1.len());
    let (kept, dropped) = l1.split_at(used);
    let named = tables_of(dropped);
    let minus = &mut shadow.minus;
    each_table(&header, image, &named, |_, times, table| count_table(&header, table, times, minus).map(drop))
        .await?;
    named.iter().for_each(|(table, times)| shadow.unshare(*table, *times));
    // The table in which that end lies.
    let mut kept = kept.to_vec();
    let (mut cut, mut last) = (None, None);
    if let Some(table) = kept.last().and_then(|entry| table_of(*entry)).filter(|_| end % reach > 0) {
        let keeps = usize::try_from(cluster.count_for(end % reach)).expect("a table is short");
        let entry_len = usize::try_from(header.l2_entry_len()).expect("at most 16");
        let mut rest = read_table(&header, image, table).await?.to_vec();
        if copies_end {
            last = Some(copy_end(&mut shadow, image, cipher, before).await?);
        }
        // The cluster that is copied is named once less.
        let goes = if copies_end { keeps - 1 } else { keeps };
        rest[..goes * entry_len].fill(0);
        count_table(&header, &rest, 1, &mut shadow.minus)?;
        let is_edited = copies_end || !zeros.is_empty() || !reserved.is_empty();
        if is_edited || rest.iter().any(|byte| *byte != 0) {
            cut = Some((table, keeps));
            shadow.unshare(table, 1);
            *kept.last_mut().expect("it was looked at") = 0;
        }
    }
    let mut new = owned(&mut shadow, image, &kept).await?;
    let needed = usize::try_from(size.div_ceil(reach)).expect("at most 4 Mi");
    new.resize(needed.max(l1.len()), 0);
    // As far as tables change: the one in which the disk has ended, and those of what is added.
    let changes_from = usize::try_from(end / reach).expect("at most 4 Mi");
    for (slot, entry) in new.iter_mut().enumerate().skip(changes_from) {
        let first = slot as u64 * reach;
        let part = |run: &std::ops::Range<u64>| {
            run.start.max(first) - first..run.end.clamp(first, first + reach) - first
        };
        let (from, keeps) = match cut.take_if(|_| slot + 1 == used) {
            Some((table, keeps)) => (Some(table), keeps),
            None => (None, usize::MAX),
        };
        let (zeros, reserved) = (part(&zeros), part(&reserved));
        if from.is_none() && zeros.is_empty() && reserved.is_empty() {
            continue;
        }
        let places =
            shadow.reserve(cluster.round_up(reserved.start)..cluster.round_up(reserved.end), reserve).await?;
        let last = last.take().filter(|_| from.is_some());
        let edit = Edit { keeps, zeros, places, last, ..Edit::NONE };
        *entry = shadow.edit_table(from, Flags::ByCount, edit).await?.bytes() | COPIED;
    }
    shadow.drop_table(old);
    put_l1(&mut shadow, &new).await?;
    shadow.header.set_size(size);
    bitmaps::resize(&mut shadow, image, &header, size).await?;
    shadow.header.void_session();
    Ok((before, shadow.switch_and_tell().await?))
}

/// Moves tables in these clusters to free clusters in front of them, if there are any, and cuts off what is free behind.
async fn lower(image: &SharedStorage, placed: &BTreeSet<u64>) -> Result<()> {
    let header = Header::read(&**image).await?;
    let cluster = header.cluster_size();
    let mut shadow = Shadow::new(header.clone(), image).await?;
    shadow.drop_idle_blocks();
    if image.limits().fixed_len {
        return Ok(());
    }
    let Some(free) = shadow.first_free().await? else { return Ok(()) };
    let is_high = |at: ImageOffset| {
        let number = cluster.cluster_of(at).index();
        number > free && placed.contains(&number)
    };
    let old = header.l1_span();
    if !shadow.move_blocks(is_high) && !is_high(old.start()) {
        return Ok(());
    }
    let l1 = read_l1(image, old).await?;
    let mut moved = HashMap::default();
    for (table, times) in tables_of(&l1).into_iter().filter(|(table, times)| *times == 1 && is_high(*table)) {
        if shadow.count_after(table).await? == 1 {
            shadow.unshare(table, times);
            moved.insert(table, shadow.copy_table(table, Flags::ByCount).await?);
        }
    }
    let entry = |entry: &u64| {
        let copy = table_of(*entry).and_then(|table| moved.get(&table));
        copy.map_or(*entry, |copy| copy.bytes() | COPIED)
    };
    let new: Vec<u64> = l1.iter().map(entry).collect();
    if is_high(old.start()) || new != l1 {
        shadow.drop_table(old);
        put_l1(&mut shadow, &new).await?;
    }
    shadow.switch().await
}

/// Copies the cluster in which the disk ends, with zeros behind the end. Returns what its entry is to say.
async fn copy_end(
    shadow: &mut Shadow<'_>,
    image: &SharedStorage,
    cipher: Option<&Arc<SectorCipher>>,
    end: u64,
) -> Result<Units> {
    let (header, cluster) = (shadow.header.clone(), shadow.header.cluster_size());
    let (start, len) = (cluster.round_down(end), usize::try_from(cluster.bytes()).expect("at most 2 MiB"));
    let state = last_state(image, &header).await?;
    let (mut bytes, alloc, zero) = match state {
        Some(ClusterState::Plain(Units { host: Some(host), alloc, zero, .. })) => {
            let context = || format!("can't read the cluster at {host}");
            let mut bytes = image.read(host, Buffer::for_overwrite(len)).await.context(context)?.to_vec();
            if let Some(cipher) = cipher {
                cipher.decrypt(sector_of(host), &mut bytes);
            }
            (bytes, alloc, zero)
        }
        Some(ClusterState::Compressed(_)) => {
            let disk = as_larger(image, &header, cipher, start + cluster.bytes()).await?;
            let bytes = disk.read(GuestOffset::new(start), Buffer::for_overwrite(len)).await?;
            (bytes.to_vec(), Entries::of(&header).all(), 0)
        }
        _ => return Err(Error::corrupt("the last cluster of the disk has changed meanwhile")),
    };
    bytes[usize::try_from(end - start).expect("within a cluster")..].fill(0);
    let place = shadow.place(cluster.bytes()).await?;
    if let Some(cipher) = cipher {
        cipher.encrypt(sector_of(place.start()), &mut bytes);
    }
    shadow.write(place, bytes);
    Ok(Units { host: Some(place.start()), copied: true, alloc, zero })
}

/// What the entry of the cluster says in which the disk ends; nothing where it has no table.
async fn last_state(image: &SharedStorage, header: &Header) -> Result<Option<ClusterState>> {
    let (cluster, reach, kinds) = (header.cluster_size(), header.l2_reach(), Entries::of(header));
    let Some(last) = header.size().checked_sub(1) else { return Ok(None) };
    let slot = header.l1_offset + last / reach * 8;
    let entry = be64(image.read(slot, Buffer::for_overwrite(8)).await?.slice(), 0);
    let Some(table) = table_of(entry) else { return Ok(None) };
    let bytes = read_table(header, image, table).await?;
    let at =
        usize::try_from((last % reach) >> cluster.shift()).expect("a table is short") * kinds.words() * 8;
    let words = (be64(bytes.slice(), at), if kinds.words() == 2 { be64(bytes.slice(), at + 8) } else { 0 });
    kinds.decode(words).map(Some)
}

/// The disk as it would read if it had this size, without what is below.
async fn as_larger(
    image: &SharedStorage,
    header: &Header,
    cipher: Option<&Arc<SectorCipher>>,
    size: u64,
) -> Result<Arc<Qcow2>> {
    let mut larger = header.clone();
    larger.set_size(size);
    let files = Files { image: image.clone(), data_file: None, below: None };
    let options = OpenOptions { read_only: true, cipher: cipher.cloned(), ..OpenOptions::default() };
    Qcow2::open(larger, files, options).await
}

/// The number with which the sector that is stored there is encrypted.
fn sector_of(place: ImageOffset) -> u64 {
    place.bytes() / SECTOR as u64
}

/// The cipher of an encrypted image, where its last cluster has something behind the end of the disk. Zeros there can be written
/// only with it.
async fn cipher_for_end(
    image: &SharedStorage,
    header: &Header,
    growth: &Growth,
) -> Result<Option<Arc<SectorCipher>>> {
    let within = header.cluster_size().within(GuestOffset::new(header.size()));
    if header.encryption().is_none() || within == 0 {
        return Ok(None);
    }
    let has_bytes = match last_state(image, header).await? {
        None => false,
        Some(ClusterState::Compressed(_)) => true,
        Some(ClusterState::Plain(units)) => {
            let unit = within >> Entries::of(header).unit_size().shift();
            units.host.is_some() && units.alloc >> unit != 0
        }
    };
    if !has_bytes {
        return Ok(None);
    }
    if growth.secrets.is_empty() {
        return Err(Error::unsupported(
            "it is encrypted, and its last cluster is not whole: what is behind the end of the disk there can be made zero only \
             with its key: give the secret that opens it with `--secret id=NAME,file=FILE`",
        ));
    }
    let (secrets, offload) = (growth.secrets.clone(), growth.offload.clone());
    let options = Options { secrets, offload, ..Options::default() };
    encrypted::unlock(header, image, &options).await
}

/// Makes zero what the last cluster holds behind the end of the disk, as far as a disk of this size would show it. Other
/// programs, and older ones of ours, fill whole clusters from below when they write. Returns whether it is another's as well, or
/// compressed, and has to be copied for that.
async fn clear_behind_end(
    image: &SharedStorage,
    header: &Header,
    cipher: Option<&Arc<SectorCipher>>,
    size: u64,
) -> Result<bool> {
    let before = header.size();
    let end = header.cluster_size().round_up(before).min(size);
    // Without its cipher an encrypted image has nothing there.
    if end <= before || header.encryption().is_some() && cipher.is_none() {
        return Ok(false);
    }
    let behind = GuestOffset::new(before).span(end - before);
    let disk = as_larger(image, header, cipher, end).await?;
    let len = usize::try_from(behind.len()).expect("less than a cluster");
    let bytes = disk.read(behind.start(), Buffer::for_overwrite(len)).await?;
    if bytes.is_zero() {
        return Ok(false);
    }
    match last_state(image, header).await? {
        Some(ClusterState::Plain(units)) if units.copied => {}
        _ => return Ok(true),
    }
    for extent in disk.map(behind).await? {
        let Place::Data { at, .. } = extent.place else { continue };
        match cipher {
            None => image.write_zeroes(at.span(extent.span.len()), Zeroes::Allocated).await?,
            Some(cipher) => {
                let mut zeros = vec![0; usize::try_from(extent.span.len()).expect("less than a cluster")];
                cipher.encrypt(sector_of(at), &mut zeros);
                image.write(at, Buffer::copy_of(&zeros)).await?;
            }
        }
    }
    image.flush().await?;
    Ok(false)
}

/// The counts of this many clusters are held in memory, where space is reserved for them: 1 TiB in clusters of 64 KiB.
const RESERVED_CLUSTERS_MAX: u64 = 16 << 20;

fn cluster_count(header: &Header, run: &std::ops::Range<u64>) -> u64 {
    header.cluster_size().count_for(run.end - run.start)
}

/// A number of bytes in the largest unit that leaves no rest.
fn exact(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB")];
    let fits = |&&(shift, _): &&(u32, &str)| bytes > 0 && bytes.is_multiple_of(1 << shift);
    match units.iter().find(fits) {
        Some((shift, unit)) => format!("{} {unit}", bytes >> shift),
        None => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use vellum_core::{MemoryDisk, MemoryStorage, WriteFlags};

    use super::super::check::check;
    use super::super::create::{CreateOptions, create};
    use super::*;
    use crate::report::Repair;

    #[test]
    fn as_far_as_the_table_has_room_and_then_with_a_larger_table() {
        // One cluster of 4 KiB has 512 entries, each for 2 MiB.
        let options = CreateOptions { size: 3 << 20, cluster_size: 4096, ..CreateOptions::without_journal() };
        let storage = MemoryStorage::new("image");
        let shared: SharedStorage = storage.clone();
        block_on(create(&*storage, None, &options)).unwrap();
        for size in [3 << 20, 4 << 20, (4 << 20) + 512, 1 << 30, (1 << 30) + 512, 64 << 30] {
            let before = block_on(grow(&shared, size)).unwrap();
            assert!(before <= size);
            let header = block_on(Header::read(&*storage)).unwrap();
            assert_eq!((header.size(), u64::from(header.l1_entries)), (size, size.div_ceil(2 << 20)));
            assert!(block_on(check(&header, &shared, Repair::Nothing, &mut |_| {})).unwrap().is_clean());
        }
        for (size, why) in [(1 << 20, "smaller"), ((64 << 30) + 1, "multiple of 512")] {
            let error = block_on(grow(&shared, size)).unwrap_err().chain();
            assert!(error.contains(why), "{error}");
        }
    }

    /// The disk ends within a cluster, and the base goes on: what the base has there is never seen.
    #[test]
    fn what_lies_behind_the_old_end_reads_as_zero() {
        const CLUSTER: u64 = 64 << 10;
        const SIZE: u64 = 3 * CLUSTER + 512;
        for (extended_l2, spoiled) in [(false, false), (false, true), (true, false), (true, true)] {
            block_on(async {
                let backing = Some(("base".to_owned(), None));
                let options = CreateOptions { size: SIZE, extended_l2, backing, ..CreateOptions::default() };
                let storage = MemoryStorage::new("image");
                let shared: SharedStorage = storage.clone();
                create(&*storage, None, &options).await.unwrap();
                let base = MemoryDisk::holding(&vec![0xaa; 5 << 16]);
                let files = || Files { image: shared.clone(), data_file: None, below: Some(base.clone()) };
                let header = Header::read(&*storage).await.unwrap();
                let disk = Qcow2::open(header, files(), OpenOptions::default()).await.unwrap();
                let last = GuestOffset::new(SIZE - 512);
                disk.write(last, Buffer::copy_of(&[7; 512]), WriteFlags::default()).await.unwrap();
                let map = disk.map(last.span(512)).await.unwrap();
                let Place::Data { at, .. } = map[0].place else { panic!("{map:?}") };
                disk.close().await.unwrap();
                let behind = at + 512;
                let rest = Buffer::for_overwrite(512);
                assert!(storage.read(behind, rest).await.unwrap().is_zero(), "nothing of the base is copied");
                if spoiled {
                    storage.write(behind, Buffer::copy_of(&[9; 1024])).await.unwrap();
                }
                grow(&shared, SIZE + CLUSTER).await.unwrap();
                let header = Header::read(&*storage).await.unwrap();
                let alone = Files { image: shared.clone(), data_file: None, below: None };
                let disk = Qcow2::open(header, alone, OpenOptions::default()).await.unwrap();
                let old = disk.read(last, Buffer::for_overwrite(512)).await.unwrap();
                let new = Buffer::for_overwrite(64 << 10);
                let new = disk.read(GuestOffset::new(SIZE), new).await.unwrap();
                assert!(old.to_vec() == [7; 512] && new.is_zero(), "{extended_l2} {spoiled}");
            });
        }
    }
}
