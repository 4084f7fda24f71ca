//! Changes that take more than one step, and what happens when one is interrupted by a crash, an error, or a
//! full host.
//!
//! An interrupted change always leaves one of the states of [`ROWS`], or a state that needs nothing more.
//! Every read-write opening looks for these states in this order, finishes what it finds, and looks again. A
//! program that changes a closed image opens it first for the same effect ([`finish`](super::finish)).
//!
//! | change | its steps; ► is a flush | interrupted, it leaves |
//! |---|---|---|
//! | create | regions zero ► both superblocks ► | no image, or a whole one |
//! | request of a guest | journal ► | [`Found::Journal`] |
//! | snapshot | the feature bit ► one transaction ► | nothing, or the journal |
//! | revert | space for all of it; mark ► pages ► size ► no mark ► | [`Found::RevertMark`] |
//! | grow | last unit unshared ► zeros behind it ► superblock ► | the old size; nothing behind it counts |
//! | grow past the table | also a part, in free units ► superblock ► | the old size: its units are free |
//! | shrink | superblock ► mark ► table, masks, bits cleared behind the end ► no mark ► | [`Found::BehindTheEnd`], or an empty journal and that |
//! | detach | zeros in place ► superblock without base ► the other copy ► | the base, or nothing |
//! | delete | flag ► copies, in steps; entry ► | [`Found::DeleteFlag`] |
//! | compaction | units of the zone leave, each in one transaction | nothing: each step is whole |
//! | close | checkpoint ► superblock ► the file truncated | the journal, or a file that is too long |
//! | recovery | result ► checkpoint ► superblock ► | the journal, as before |
//!
//! 1. Behind the end of the disk, and of the base, home is zero once an image has been opened read-write. So
//!    truncated data never comes back when the disk grows.
//! 2. A change that is past its commit point needs no more space. It cannot fail for lack of it, and neither
//!    can the opening that continues it.

use vellum_core::{Buffer, Context, ImageSpan, Result, SharedStorage, Storage, Zeroes};

use super::geometry::{Places, Region};
use super::superblock::Superblocks;
use crate::journal::ledger::random_key;

/// This many bytes are read at once.
const PIECE_BYTES: u64 = 1 << 20;

/// A state on the medium that no closed image is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// The superblock has a key: the journal is in use.
    Journal,
    /// Entries of the table behind the end of the disk, bits or masks behind that of the base.
    BehindTheEnd,
    /// The last entry of the list names a snapshot that the disk is being reverted to.
    RevertMark,
    /// A snapshot has the flag that it is being deleted.
    DeleteFlag,
}

/// What a read-write opening does about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// The journal is replayed.
    Replay,
    /// The space behind the end is cleared.
    Clear,
    /// The pages become what the snapshot sees, then the size is set, then the mark is removed.
    Revert,
    /// The copies are passed on or freed, then the entry is freed.
    Delete,
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// The state on the medium.
    pub found: Found,
    /// What is done about it.
    pub then: Then,
    /// Whether an image in this state can be opened read-only: its content does not change when the change is
    /// finished.
    pub can_be_read: bool,
}

/// The states, in the order in which they are looked for. When one is looked for, those before it are known
/// to be absent.
pub const ROWS: [Row; 4] = [
    Row { found: Found::Journal, then: Then::Replay, can_be_read: false },
    Row { found: Found::BehindTheEnd, then: Then::Clear, can_be_read: true },
    Row { found: Found::RevertMark, then: Then::Revert, can_be_read: false },
    Row { found: Found::DeleteFlag, then: Then::Delete, can_be_read: true },
];

impl Found {
    /// The change that was interrupted, in words.
    pub fn change(self) -> &'static str {
        match self {
            Self::Journal => "an opening",
            Self::BehindTheEnd => "a resize",
            Self::RevertMark => "a revert to a snapshot",
            Self::DeleteFlag => "the deletion of a snapshot",
        }
    }

    /// What a read-write opening does about it.
    pub fn then(self) -> Then {
        ROWS.iter().find(|row| row.found == self).expect("each state has a row").then
    }
}

/// Where the part of a region that counts ends: the byte, and the mask of the bits in that byte that still
/// count.
fn end_of(places: &Places, region: Region) -> (u64, u8) {
    let shape = places.shape();
    let bits = match region {
        Region::Bitmap => shape.blocks(),
        Region::Masks => shape.sub_blocks() * 2,
        _ => shape.units() * 32,
    };
    let counting = u8::try_from((1u32 << (bits % 8)) - 1).expect("below a byte");
    (bits / 8, counting)
}

/// The part of a region that does not count, in pieces, because the table has parts.
fn rests(places: &Places, region: Region) -> Vec<ImageSpan> {
    let (mut counts, _) = end_of(places, region);
    let spans: Vec<ImageSpan> = match region {
        Region::Table => places.table().collect(),
        _ => vec![places.region(region)],
    };
    let rest = |span: ImageSpan| {
        let (inside, rest) = span.split_at(counts.min(span.len()));
        counts -= inside.len();
        rest
    };
    spans.into_iter().map(rest).filter(|rest| !rest.is_empty()).collect()
}

/// Calls `see` with each piece of these regions that does not count and is not zero, and with the bits of its
/// first byte that do count. Stops when `see` returns true.
async fn behind_the_end(
    storage: &dyn Storage,
    places: &Places,
    regions: &[Region],
    mut see: impl AsyncFnMut(ImageSpan, u8) -> Result<bool>,
) -> Result<()> {
    for region in regions {
        // A part begins with a whole byte.
        let (counts, counting) = end_of(places, *region);
        let start = places.region(*region).start() + counts;
        for mut rest in rests(places, *region) {
            while !rest.is_empty() {
                let Some(run) = storage.runs(rest).await?.first().copied().filter(|run| !run.span.is_empty())
                else {
                    break; // behind the end of a file there is nothing
                };
                let now = if run.is_data { run.span.split_at(PIECE_BYTES).0 } else { run.span };
                (_, rest) = rest.split_at(now.len());
                if !run.is_data {
                    continue;
                }
                let len = usize::try_from(now.len()).expect("a piece");
                let mut bytes = storage.read(now.start(), Buffer::for_overwrite(len)).await?.to_vec();
                let counting = if now.start() == start { counting } else { 0 };
                bytes[0] &= !counting;
                if !vellum_core::is_zero(&bytes) && see(now, counting).await? {
                    return Ok(());
                }
            }
        }
    }
    Ok(())
}

/// Whether bits or masks are set behind the end of the base.
pub(super) async fn base_goes_on(storage: &dyn Storage, places: &Places) -> Result<bool> {
    let mut goes_on = false;
    let found = behind_the_end(storage, places, &[Region::Bitmap, Region::Masks], async |_, _| {
        goes_on = true;
        Ok(true)
    });
    found.await.context(|| "can't read the data beyond the end of the base")?;
    Ok(goes_on)
}

/// Makes home zero behind the end of the disk and of the base. The image is closed. This may be interrupted
/// and started again. `key` replaces a random key of the journal, for tests.
pub(super) async fn clear_behind_the_end(image: &SharedStorage, key: Option<u128>) -> Result<()> {
    let mut superblocks = Superblocks::read(&**image).await?;
    let places = superblocks.superblock.places();
    while_in_use(image, &mut superblocks, key, async || zero_behind_the_end(image, &places).await).await
}

/// Changes metadata of a closed image. Meanwhile the superblock says that the image is in use.
///
/// If the flush of such a change fails, the page cache may show bytes that are on no medium. The next opening
/// must not trust them. Else truncated data could come back later, for instance. An image without a journal has
/// no mark.
///
/// # Errors
/// Those of the storage and of the change. The image is marked then, and the next opening recovers it.
pub(super) async fn while_in_use(
    image: &SharedStorage,
    superblocks: &mut Superblocks,
    key: Option<u128>,
    change: impl AsyncFnOnce() -> Result<()>,
) -> Result<()> {
    let has_mark = !superblocks.superblock.places().region(Region::Journal).is_empty();
    if has_mark {
        superblocks.superblock.draw_generation(None);
        // Random, as ever: what the guest has written may lie in the ring, and must not pass for a record.
        superblocks.superblock.key = Some(key.map_or_else(random_key, Ok)?);
        superblocks.write(&**image).await?;
        image.flush().await?;
    } else if superblocks.superblock.session().is_some_and(|session| session.counts()) {
        superblocks.superblock.draw_generation(None);
        superblocks.write(&**image).await?;
        image.flush().await?;
    }
    change().await?;
    image.flush().await?;
    if has_mark {
        superblocks.superblock.key = None;
        superblocks.write(&**image).await?;
        image.flush().await?;
    }
    Ok(())
}

/// As [`clear_behind_the_end`], in an image that is in use.
async fn zero_behind_the_end(image: &SharedStorage, places: &Places) -> Result<()> {
    let regions = [Region::Bitmap, Region::Masks, Region::Table];
    let cleared = behind_the_end(&**image, places, &regions, async |run, counting| {
        let (first, rest) = run.split_at(u64::from(counting != 0));
        if counting != 0 {
            let byte = image.read(first.start(), Buffer::for_overwrite(1)).await?.slice()[0];
            image.write(first.start(), Buffer::copy_of(&[byte & counting])).await?;
        }
        if !rest.is_empty() {
            image.write_zeroes(rest, Zeroes::MayUnmap).await?;
        }
        Ok(false)
    });
    cleared.await.context(|| "can't clear the data beyond the end of the disk")
}
