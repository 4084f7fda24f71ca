//! Superblocks: what is written reads back, and no field is trusted.

use vellum_core::ErrorKind;

use super::*;

const MIB: u64 = 1 << 20;

type Poke = Box<dyn Fn(&mut [u8])>;

fn sample(is_table: bool, with_base: bool) -> Superblock {
    let shape = Shape {
        size: 1 << 30,
        layout: if is_table { Layout::Table(BlockSize::from_shift(20)) } else { Layout::Linear },
        block: BlockSize::from_shift(16),
        base_bytes: with_base.then_some(1 << 29),
    };
    let places = Places::plan(shape, if is_table || with_base { MIB } else { 0 }).unwrap();
    let base = Base { name: "base.raw".to_owned(), format: Some("raw".to_owned()) };
    Superblock::new(places, with_base.then_some(base), [9; 16]).unwrap()
}

fn bytes(superblock: &Superblock) -> Vec<u8> {
    superblock.encode().to_vec()
}

fn seal(page: &mut [u8]) {
    put32(page, field::CRC, 0);
    let crc = crc32c::crc32c(page);
    put32(page, field::CRC, crc);
}

#[test]
fn what_is_written_reads_back() {
    for (is_table, with_base) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut superblock = sample(is_table, with_base);
        if is_table || with_base {
            superblock.key = Some(77);
            superblock.generation = 3;
        }
        if is_table {
            superblock.has_snapshots = true;
        }
        let page = bytes(&superblock);
        let found = Superblock::parse(&page).unwrap();
        assert!(bytes(&found) == page, "{is_table} {with_base}");
        assert_eq!(found.places(), superblock.places());
        assert_eq!(found.base(), superblock.base());
        assert_eq!((found.key, found.generation), (superblock.key, superblock.generation));
        assert_eq!(found.has_snapshots, is_table);
        assert_eq!(found.uuid(), [9; 16]);
    }
}

/// An earlier program would find the entry of a packed block over the base, and not that the image has the block.
#[test]
fn an_earlier_program_refuses_packed_blocks_over_a_base_until_the_image_is_closed() {
    const KNOWN_BEFORE: u64 = (1 << 12) - 1;
    let size = BlockSize::from_shift;
    let layout = Layout::Zoned { unit: size(16), zone: size(23) };
    let shape = |base_bytes| Shape { size: 1 << 30, layout, block: size(16), base_bytes };
    let made = |base_bytes: Option<u64>| {
        let base = Base { name: "base.raw".to_owned(), format: None };
        Superblock::new(Places::plan(shape(base_bytes), MIB).unwrap(), base_bytes.map(|_| base), [9; 16])
            .unwrap()
    };
    let is_refused = |superblock: &Superblock| {
        let page = bytes(superblock);
        assert!(bytes(&Superblock::parse(&page).unwrap()) == page);
        be64(&page, field::INCOMPATIBLE) & !KNOWN_BEFORE != 0
    };
    for (base_bytes, embeds, key, expected) in [
        (Some(1 << 29), true, Some(1), true),
        (Some(1 << 29), true, None, false),
        (Some(1 << 29), false, Some(1), false),
        (None, true, Some(1), false),
    ] {
        let mut superblock = made(base_bytes);
        (superblock.embeds, superblock.key) = (embeds, key);
        assert_eq!(is_refused(&superblock), expected, "{base_bytes:?} {embeds} {key:?}");
        let mut page = bytes(&superblock);
        let features = be64(&page, field::INCOMPATIBLE) ^ 1 << 12;
        put64(&mut page, field::INCOMPATIBLE, features);
        seal(&mut page);
        // Without the bit it may be an image that an earlier program has left.
        assert_eq!(Superblock::parse(&page).is_ok(), expected, "the other way round");
    }
}

#[test]
fn every_bit_counts() {
    let page = bytes(&sample(true, true));
    for bit in 0..page.len() * 8 {
        let mut page = page.clone();
        page[bit / 8] ^= 1 << (bit % 8);
        assert!(Superblock::parse(&page).is_err(), "bit {bit}");
    }
    assert!(Superblock::parse(&page[..4095]).is_err());
}

#[test]
fn what_is_not_known_is_kept() {
    let mut page = bytes(&sample(true, true));
    put64(&mut page, field::COMPATIBLE, 1 << 63);
    page[2000] = 7;
    seal(&mut page);
    let mut found = Superblock::parse(&page).unwrap();
    found.sequence += 1;
    let next = bytes(&found);
    assert_eq!((be64(&next, field::COMPATIBLE), next[2000]), (1 << 63, 7));
}

#[test]
fn the_pin_of_the_base_is_kept_and_goes_with_the_base() {
    let mut superblock = sample(true, true);
    assert!(superblock.pin().is_none());
    for text in ["etag 5 \"a-longer-one\"\ntrusted 7", "file 9 1@2"] {
        superblock.set_pin(Pin::parse(text).unwrap());
        superblock = Superblock::parse(&bytes(&superblock)).unwrap();
        assert_eq!(superblock.pin().map(ToString::to_string).as_deref(), Some(text));
    }
    superblock.detach().unwrap();
    let page = bytes(&superblock);
    assert!(Superblock::parse(&page).unwrap().pin().is_none());
    assert!(page[field::PIN_LEN..field::PIN + Pin::BYTES_MAX].iter().all(|byte| *byte == 0));
}

#[test]
fn a_session_counts_until_a_generation_is_drawn_without_its_cache() {
    let cache = |byte| CacheId::new([byte; 16]).unwrap();
    let number = crate::session::SessionNumber::new([9; 16]).unwrap();
    let again = |superblock: &Superblock| Superblock::parse(&bytes(superblock)).unwrap();
    for (is_table, with_base) in [(false, false), (false, true), (true, false)] {
        let has_journal = is_table || with_base;
        for state in [SessionState::Clean, SessionState::HoldsWrites] {
            let named = Session { cache: cache(1), number, state };
            let mut superblock = sample(is_table, with_base);
            superblock.set_session(Some(named));
            superblock = again(&superblock);
            assert_eq!(superblock.session(), Some(named));
            // An older program of ours refuses the image, or makes the session void by its mark.
            let features = be64(&bytes(&superblock), field::INCOMPATIBLE);
            let is_refused = features & (incompatible::HOLDS_WRITES | incompatible::SESSION) != 0;
            assert_eq!(is_refused, !has_journal || state == SessionState::HoldsWrites);
            let mut older = superblock.clone();
            older.generation += 1;
            let found = Superblock::parse(&older.encode().to_vec());
            match (has_journal, state) {
                (true, SessionState::Clean) => {
                    assert_eq!(found.unwrap().session().map(|one| one.state), Some(SessionState::Void));
                }
                _ => drop(found), // it does not come to that
            }
            superblock.draw_generation(Some(cache(1)));
            superblock = again(&superblock);
            assert_eq!(superblock.session(), Some(named), "with its cache");
            superblock.draw_generation(None);
            superblock = again(&superblock);
            let left = if state == SessionState::Clean { SessionState::Void } else { state };
            assert_eq!(superblock.session().map(|one| one.state), Some(left), "without it");
            superblock.draw_generation(None);
            superblock.draw_generation(Some(cache(1)));
            superblock = again(&superblock);
            assert_eq!(superblock.session().map(|one| one.state), Some(left), "what is void stays void");
            superblock.set_session(None);
            let page = bytes(&again(&superblock));
            assert!(page[field::SESSION..field::SESSION + 40].iter().all(|byte| *byte == 0));
        }
    }
}

#[test]
fn impossible_fields_are_refused_although_the_crc_is_right() {
    let region = |index: usize| field::REGIONS + 16 * index;
    let cases: Vec<(&str, ErrorKind, Poke)> = vec![
        ("version 2", ErrorKind::Unsupported, Box::new(|page| put32(page, field::VERSION, 2))),
        ("incompatible bit 40", ErrorKind::Unsupported, Box::new(|page| page[field::INCOMPATIBLE + 2] = 1)),
        ("zones of 2^0", ErrorKind::Corrupt, Box::new(|page| put32(page, field::LAYOUT, 2))),
        (
            "feature bit",
            ErrorKind::Corrupt,
            Box::new(|page| {
                put32(page, field::LAYOUT, 2);
                page[field::ZONE_SHIFT] = 26;
            }),
        ),
        ("feature bit", ErrorKind::Corrupt, Box::new(|page| page[field::INCOMPATIBLE + 7] |= 1 << 4)),
        ("layout 3", ErrorKind::Unsupported, Box::new(|page| put32(page, field::LAYOUT, 3))),
        ("2^0", ErrorKind::Corrupt, Box::new(|page| page[field::UNIT_SHIFT] = 0)),
        ("2^22", ErrorKind::Corrupt, Box::new(|page| page[field::UNIT_SHIFT] = 22)),
        ("blocks of 2^11", ErrorKind::Corrupt, Box::new(|page| page[field::BLOCK_SHIFT] = 11)),
        ("blocks of 2^255", ErrorKind::Corrupt, Box::new(|page| page[field::BLOCK_SHIFT] = 255)),
        ("contradict", ErrorKind::Corrupt, Box::new(|page| page[field::INCOMPATIBLE + 7] &= !2)),
        ("no base", ErrorKind::Corrupt, Box::new(|page| page[field::INCOMPATIBLE + 7] &= !4)),
        ("multiple of 512", ErrorKind::Corrupt, Box::new(|page| put64(page, field::SIZE, 1 << 30 | 1))),
        ("too large", ErrorKind::Corrupt, Box::new(|page| put64(page, field::SIZE, 1 << 63))),
        ("larger units", ErrorKind::Corrupt, Box::new(|page| put64(page, field::SIZE, 1 << 50))),
        (
            "visible part of the base",
            ErrorKind::Corrupt,
            Box::new(|page| put64(page, field::BASE_BYTES, 1 << 31)),
        ),
        ("bitmap cannot lie", ErrorKind::Corrupt, Box::new(move |page| put64(page, region(0), 4096))),
        ("bitmap cannot lie", ErrorKind::Corrupt, Box::new(move |page| put64(page, region(0), u64::MAX))),
        ("bitmap cannot lie", ErrorKind::Corrupt, Box::new(move |page| put64(page, region(0), 8193))),
        ("bitmap and its parts are", ErrorKind::Corrupt, Box::new(move |page| put64(page, region(0) + 8, 0))),
        (
            "bitmap and its parts are",
            ErrorKind::Corrupt,
            Box::new(move |page| put64(page, region(0) + 8, 1 << 40)),
        ),
        (
            "masks and its parts are",
            ErrorKind::Corrupt,
            Box::new(move |page| put64(page, region(1) + 8, 4096)),
        ),
        ("overlap", ErrorKind::Corrupt, Box::new(move |page| put64(page, region(2), 8192))),
        ("table and its parts are", ErrorKind::Corrupt, Box::new(move |page| put64(page, region(2) + 8, 0))),
        (
            "list and its parts are",
            ErrorKind::Corrupt,
            Box::new(move |page| put64(page, region(4) + 8, 4096)),
        ),
        (
            "journal and its parts are",
            ErrorKind::Corrupt,
            Box::new(move |page| put64(page, region(5) + 8, 128 << 20)),
        ),
        (
            "journal and its parts are",
            ErrorKind::Corrupt,
            Box::new(move |page| put64(page, region(5) + 8, 4096)),
        ),
        ("journal cannot lie", ErrorKind::Corrupt, Box::new(move |page| put64(page, region(5), 1 << 30))),
        ("data cannot begin", ErrorKind::Corrupt, Box::new(|page| put64(page, field::DATA_OFFSET, 4096))),
        ("data cannot begin", ErrorKind::Corrupt, Box::new(|page| put64(page, field::DATA_OFFSET, 0))),
        ("data cannot begin", ErrorKind::Corrupt, Box::new(|page| put64(page, field::DATA_OFFSET, 1 << 60))),
        ("has a key", ErrorKind::Corrupt, Box::new(|page| page[field::KEY] = 1)),
        ("has no key", ErrorKind::Corrupt, Box::new(|page| page[field::INCOMPATIBLE + 7] |= 1)),
        ("sequence", ErrorKind::Corrupt, Box::new(|page| put64(page, field::SEQUENCE, 0))),
        ("generation", ErrorKind::Corrupt, Box::new(|page| put64(page, field::GENERATION, u64::MAX))),
        ("505 bytes", ErrorKind::Corrupt, Box::new(|page| put32(page, field::PIN_LEN, 505))),
        ("pin of the base", ErrorKind::Corrupt, Box::new(|page| put32(page, field::PIN_LEN, 9))),
        (
            "pin of the base",
            ErrorKind::Corrupt,
            Box::new(|page| {
                put32(page, field::PIN_LEN, 9);
                page[field::PIN..field::PIN + 9].copy_from_slice(b"etag 5 \xFFx");
            }),
        ),
        ("1024 bytes", ErrorKind::Corrupt, Box::new(|page| put32(page, field::NAME_LEN, 1024))),
        ("without a name", ErrorKind::Corrupt, Box::new(|page| put32(page, field::NAME_LEN, 0))),
        ("not valid text", ErrorKind::Corrupt, Box::new(|page| page[field::NAME] = 0xFF)),
        ("not valid text", ErrorKind::Corrupt, Box::new(|page| put32(page, field::NAME_LEN, 9))),
        ("16 bytes", ErrorKind::Corrupt, Box::new(|page| put32(page, field::FORMAT_LEN, 16))),
        ("a flash cache", ErrorKind::Corrupt, Box::new(|page| page[field::INCOMPATIBLE + 6] |= 1)),
        ("a flash cache", ErrorKind::Corrupt, Box::new(|page| page[field::INCOMPATIBLE + 6] |= 2)),
        ("a flash cache", ErrorKind::Corrupt, Box::new(|page| page[field::SESSION] = 1)),
        ("a flash cache", ErrorKind::Corrupt, Box::new(|page| page[field::SESSION + 31] = 1)),
    ];
    for (why, kind, poke) in cases {
        let mut page = bytes(&sample(true, true));
        poke(&mut page);
        seal(&mut page);
        let error = Superblock::parse(&page).expect_err(why);
        assert!(error.chain().contains(why), "{why}: {}", error.chain());
        assert_eq!(error.kind(), kind, "{why}: {}", error.chain());
    }
}

#[test]
fn the_newer_good_copy_counts() {
    let page = |sequence| {
        let mut superblock = sample(true, true);
        superblock.sequence = sequence;
        bytes(&superblock)
    };
    let both = |a: &[u8], b: &[u8]| Superblocks::choose(&[a, b].concat());
    let bad = |mut page: Vec<u8>| {
        page[300] ^= 1;
        page
    };
    let of = |found: Result<Superblocks>| {
        let found = found.unwrap();
        (found.slot, found.superblock.sequence, found.other_is_bad.is_some())
    };
    assert_eq!(of(both(&page(4), &page(5))), (Slot::B, 5, false));
    assert_eq!(of(both(&page(6), &page(5))), (Slot::A, 6, false));
    assert_eq!(of(both(&bad(page(6)), &page(5))), (Slot::B, 5, true));
    assert_eq!(of(both(&page(4), &bad(page(5)))), (Slot::A, 4, true));
    assert_eq!(of(both(&page(4), &[0; 4096])), (Slot::A, 4, true));
    assert_eq!(of(both(&[0; 4096], &page(4))), (Slot::B, 4, true));
    assert_eq!(both(&bad(page(4)), &bad(page(5))).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(both(&[0; 4096], &[0; 4096]).unwrap_err().kind(), ErrorKind::Invalid);
    // The older copy is not used when the newer one asks for something unsupported.
    let mut newer = page(9);
    put32(&mut newer, field::VERSION, 2);
    seal(&mut newer);
    assert_eq!(both(&page(8), &newer).unwrap_err().kind(), ErrorKind::Unsupported);
    let mut twin = page(9);
    twin[field::UUID] ^= 1;
    seal(&mut twin);
    assert_eq!(both(&page(9), &twin).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(of(both(&page(9), &page(9))), (Slot::A, 9, false));
}

#[test]
fn copies_are_written_in_turns() {
    use futures_lite::future::block_on;
    let storage = vellum_core::MemoryStorage::new("image");
    let superblock = sample(true, false);
    block_on(storage.set_len(superblock.places().data_offset().bytes())).unwrap();
    block_on(storage.write(Slot::A.offset(), superblock.encode())).unwrap();
    let mut copies = block_on(Superblocks::read(&*storage)).unwrap();
    for (slot, sequence) in [(Slot::B, 2), (Slot::A, 3), (Slot::B, 4)] {
        copies.superblock.generation += 1;
        block_on(copies.write(&*storage)).unwrap();
        let found = block_on(Superblocks::read(&*storage)).unwrap();
        assert_eq!((found.slot, found.superblock.sequence), (slot, sequence));
        assert!(bytes(&found.superblock) == bytes(&copies.superblock), "sequence {sequence}");
    }
}

#[test]
fn a_file_that_was_cut_off_is_refused() {
    let superblock = sample(true, false);
    let len = usize::try_from(superblock.places().data_offset().bytes()).unwrap();
    let mut image = vec![0; len];
    image[..4096].copy_from_slice(&bytes(&superblock));
    let read = |bytes: &[u8]| {
        let storage = vellum_core::MemoryStorage::holding("image", bytes);
        futures_lite::future::block_on(Superblocks::read(&*storage))
    };
    assert!(read(&image).is_ok());
    assert!(read(&image[..len - 1]).unwrap_err().chain().contains("truncated"));
}
