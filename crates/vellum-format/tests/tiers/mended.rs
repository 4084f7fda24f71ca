//! What once lost units that only the fast medium has: copies of the image, other disks of the medium, damage, failing writes.

use std::sync::Arc;

use vellum_core::{Buffer, Disk, ErrorKind, GuestOffset, ImageOffset, Random, SharedStorage, Storage as _};
use vellum_format::fast::{FastMedium, Promotion, Reason, Tiers};

use vellum_format::native::{Native, OpenOptions, recover};
use vellum_sim::{Drive, DriveOptions, Effect, Fault, Operation};

use crate::moved::{is_refused, move_away, moved, open_with, promotion_of};
use crate::trials::{Both, Trial, UNIT, UNITS, chain, ensure, promote, put, reads};

/// Where a medium has its rows and its entries.
const ROWS_AT: u64 = 8 << 10;
const ENTRIES_AT: u64 = 520 << 10;
/// Both copies of the superblock of an image.
const SUPERBLOCKS: [u64; 2] = [0, 4096];

async fn medium_of(fast: &Arc<Drive>) -> Result<Arc<FastMedium>, String> {
    FastMedium::open(fast.clone(), Random::from_seed(77)).await.map_err(chain)
}

async fn open_in(
    image: &Arc<Drive>,
    medium: &Arc<FastMedium>,
    read_only: bool,
) -> Result<Arc<Native>, String> {
    let fast = Some(medium.clone());
    let options = OpenOptions { journal_key: Some(1), fast, read_only, ..OpenOptions::default() };
    Native::open(image.clone(), None, options).await.map_err(chain)
}

/// Another disk takes all of the medium that it can get.
async fn fill(both: &Both, medium: &Arc<FastMedium>) -> Trial {
    let image = both.another(medium).await?;
    let disk = open_in(&image, medium, false).await?;
    for unit in 0..UNITS {
        put(&disk, unit, 9).await?;
    }
    let ranges = vec![GuestOffset::ZERO.span(UNITS * UNIT)];
    let promotion = Promotion { ranges, reason: Reason::Asked, copies_base: false };
    disk.promote(promotion).await.map_err(chain)?;
    disk.close().await.map_err(chain)
}

/// A copy was made while the disk was in use, and units were moved after that. It is opened, and another disk promotes.
#[test]
fn a_copy_of_the_image_gives_nothing_of_the_row_away() {
    for (read_only, writes) in [(true, false), (false, false), (false, true)] {
        let both = Both::new();
        let trial = both.world.run(async {
            moved(&both).await?;
            let disk = both.open(2).await?;
            put(&disk, 3, 4).await?;
            promote(&disk, 2).await?;
            move_away(&disk, 1).await?;
            let copy = both.copy_of(&both.image);
            promote(&disk, 3).await?;
            move_away(&disk, 3).await?;
            disk.close().await.map_err(chain)?;
            drop(disk);
            let medium = medium_of(&both.fast).await?;
            let storage: SharedStorage = copy.clone();
            recover(&storage).await.map_err(chain)?;
            drop(storage);
            let disk = open_in(&copy, &medium, read_only).await?;
            reads(&disk, 0, 1, "in the copy").await?;
            if writes {
                // Its moved unit comes back, and the slots are still the original's.
                put(&disk, 1, 7).await?;
            }
            fill(&both, &medium).await?;
            disk.close().await.map_err(chain)?;
            drop((disk, medium));
            let disk = both.open(3).await?;
            for (unit, value) in [(0, 1), (1, 1), (2, 1), (3, 4)] {
                reads(&disk, unit, value, "in the image itself").await?;
            }
            disk.close().await.map_err(chain)
        });
        assert_eq!(trial, Ok(()), "read-only {read_only}, writes {writes}");
    }
}

/// A copy was made between a promotion and the first move of the same opening.
#[test]
fn a_copy_from_a_session_of_promotions_does_not_count_after_a_move() {
    let both = Both::new();
    let trial = both.world.run(async {
        let disk = both.open(1).await?;
        put(&disk, 0, 1).await?;
        promote(&disk, 0).await?;
        let copy = both.copy_of(&both.image);
        move_away(&disk, 0).await?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        let disk = open_with(&both, &copy, Some(&both.fast), false).await.map_err(chain)?;
        ensure(disk.facts().trouble.is_some(), "the copy counts")?;
        put(&disk, 0, 2).await?;
        is_refused("promoted", disk.promote(promotion_of(1)).await, ErrorKind::Refused)?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        let medium = medium_of(&both.fast).await?;
        is_refused("forgotten", medium.forget([7; 16], false).await, ErrorKind::Refused)?;
        fill(&both, &medium).await?;
        drop(medium);
        reads(&*both.open(3).await?, 0, 1, "in the image itself").await
    });
    assert_eq!(trial, Ok(()));
}

/// A write of the superblock fails although it arrives, the session is begun again, and that is cut off.
#[test]
fn a_session_that_was_begun_in_vain_has_the_number_that_the_image_may_have() {
    for (which, effect) in [(0, Effect::All), (0, Effect::None), (1, Effect::All), (1, Effect::None)] {
        let both = Both::new();
        let trial = both.world.run(async {
            moved(&both).await?;
            let disk = both.open(2).await?;
            put(&disk, 3, 4).await?;
            let within = Some(ImageOffset::ZERO.span(8192));
            both.image.faults().add(Fault { effect, within, ..Fault::nth(Operation::Write, which) });
            is_refused("promoted", disk.promote(promotion_of(3)).await, ErrorKind::Io)?;
            // The next time fails too: this is where a power cut may be.
            both.image.faults().add(Fault { within, ..Fault::nth(Operation::Write, 0) });
            is_refused("promoted", disk.promote(promotion_of(3)).await, ErrorKind::Io)?;
            let (image, fast) = (both.copy_of(&both.image), both.copy_of(&both.fast));
            let cut = open_with(&both, &image, Some(&fast), false).await.map_err(chain)?;
            reads(&cut, 0, 1, "after a cut").await?;
            drop(cut);
            // And then it works.
            promote(&disk, 3).await?;
            move_away(&disk, 3).await?;
            disk.close().await.map_err(chain)?;
            drop(disk);
            reads(&*both.open(3).await?, 3, 4, "moved").await
        });
        assert_eq!(trial, Ok(()), "write {which}, {effect:?}");
    }
}

/// One copy of the superblock is damaged after a session was begun, or after the first move.
#[test]
fn either_copy_of_the_superblock_is_enough() {
    for moves_before in [false, true] {
        for slot in SUPERBLOCKS {
            let both = Both::new();
            let trial = both.world.run(async {
                let disk = match moves_before {
                    true => {
                        moved(&both).await?;
                        both.open(2).await?
                    }
                    false => {
                        let disk = both.open(1).await?;
                        for unit in 0..3 {
                            put(&disk, unit, 1).await?;
                        }
                        promote(&disk, 1).await?;
                        disk
                    }
                };
                promote(&disk, 2).await?;
                if !moves_before {
                    move_away(&disk, 1).await?;
                }
                let mut content = both.image.content();
                content.write(ImageOffset::new(slot), &[0x5A; 512]);
                let image = Drive::from_content(&both.world, content, DriveOptions::default());
                let fast = both.copy_of(&both.fast);
                let cut = open_with(&both, &image, Some(&fast), false).await.map_err(chain)?;
                for unit in 0..3 {
                    reads(&cut, unit, 1, "by the other copy").await?;
                }
                drop(cut);
                disk.close().await.map_err(chain)
            });
            assert_eq!(trial, Ok(()), "moved before: {moves_before}, copy at {slot}");
        }
    }
}

/// The second of the two copies is not written when the first unit is moved. The next move writes both.
#[test]
fn a_move_that_is_tried_again_says_in_both_copies_that_the_medium_is_needed() {
    let both = Both::new();
    let trial = both.world.run(async {
        let disk = both.open(1).await?;
        put(&disk, 0, 1).await?;
        promote(&disk, 0).await?;
        // The session of the move has one write of the superblock.
        let within = Some(ImageOffset::ZERO.span(8192));
        both.image.faults().add(Fault { within, ..Fault::nth(Operation::Write, 2) });
        is_refused("moved", disk.move_away(&[GuestOffset::ZERO.span(UNIT)]).await, ErrorKind::Io)?;
        move_away(&disk, 0).await?;
        for slot in SUPERBLOCKS {
            let mut content = both.image.content();
            content.write(ImageOffset::new(slot), &[0x5A; 512]);
            let image = Drive::from_content(&both.world, content, DriveOptions::default());
            is_refused("opened alone", open_with(&both, &image, None, true).await, ErrorKind::Refused)?;
        }
        disk.close().await.map_err(chain)
    });
    assert_eq!(trial, Ok(()));
}

/// The medium is cut off while it is open. It does not grow again, so what was cut off is no zeros.
#[test]
fn a_medium_that_was_cut_off_is_not_written() {
    let both = Both::new();
    let trial = both.world.run(async {
        moved(&both).await?;
        let disk = both.open(2).await?;
        let len = both.fast.len();
        both.fast.set_len(600 << 10).await.map_err(chain)?;
        ensure(disk.promote(promotion_of(2)).await.is_err(), "it was promoted")?;
        ensure(disk.facts().trouble.is_some(), "the medium has failed")?;
        ensure(both.fast.len() == 600 << 10, "it has grown again")?;
        both.fast.set_len(len).await.map_err(chain)?;
        let unit = Buffer::for_overwrite(64 << 10);
        is_refused("longer again", disk.read(GuestOffset::ZERO, unit).await, ErrorKind::Io)?;
        disk.close().await.map_err(chain)
    });
    assert_eq!(trial, Ok(()));
}

/// A sector of the medium's tables is damaged for a while, and another disk would promote meanwhile.
#[test]
fn what_a_damaged_sector_said_is_not_given_away() {
    for at in [ROWS_AT, ENTRIES_AT] {
        let both = Both::new();
        let trial = both.world.run(async {
            moved(&both).await?;
            let mut content = both.fast.content();
            let mut sector = [0; 512];
            content.read(ImageOffset::new(at), &mut sector);
            let mut damaged = sector;
            damaged[40] ^= 1;
            damaged[8] ^= 1;
            content.write(ImageOffset::new(at), &damaged);
            let fast = Drive::from_content(&both.world, content, DriveOptions::default());
            let medium = medium_of(&fast).await?;
            ensure(medium.damage().is_some(), "nobody is told")?;
            let filled = fill(&both, &medium).await;
            let is_refused = filled.is_err_and(|error| error.contains("a part of its tables is damaged"));
            ensure(is_refused, "a medium of which not all is known got something")?;
            drop(medium);
            // The sector is what it was, but for entries of the other disk.
            let storage: SharedStorage = fast.clone();
            let now = storage.read(ImageOffset::new(at), Buffer::zeroed(512)).await.map_err(chain)?.to_vec();
            let mended: Vec<u8> = (0..512)
                .map(|index| if now[index] == damaged[index] { sector[index] } else { now[index] })
                .collect();
            storage.write(ImageOffset::new(at), Buffer::copy_of(&mended)).await.map_err(chain)?;
            let disk = open_with(&both, &both.image, Some(&fast), false).await.map_err(chain)?;
            for unit in 0..3 {
                reads(&disk, unit, 1, "when it can be read again").await?;
            }
            disk.close().await.map_err(chain)
        });
        assert_eq!(trial, Ok(()), "the sector at {at}");
    }
}
