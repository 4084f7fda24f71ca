//! A journal is added to images and removed, with a crash at every moment: the header is the old or the new
//! one, with all its fields.

use std::collections::HashSet;
use std::sync::Arc;

use vellum_core::pin::Pin;
use vellum_core::{
    Buffer, Disk, ErrorKind, ImageOffset, MemoryDisk, Random, SharedDisk, SharedStorage, Storage,
};
use vellum_format::FormatKind;
use vellum_format::image::NewBacking;
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2, create, set_journal};
use vellum_format::session::{CacheId, Session, SessionNumber, SessionState, Sessions};
use vellum_sim::{Content, CrashKind, Drive, DriveOptions, World};

const JOURNAL: u32 = 0x564C_4A31;
const PADDING: u32 = 0x564C_5044;
const NAMES: u32 = 0x6803_F857;
const BACKING_FORMAT: u32 = 0xE279_2ACA;
const FOREIGN: u32 = 0x1234_5678;
const ROW: usize = 48;
const FIELDS: usize = 112;
const WANTED: u64 = 128 << 10;

/// The content of a first cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Said {
    fields: Vec<u8>,
    extensions: Vec<(u32, Vec<u8>)>,
    name: Vec<u8>,
}

fn be(bytes: &[u8], at: usize, len: usize) -> usize {
    bytes[at..at + len].iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte))
}

impl Said {
    fn of(cluster: &[u8]) -> Self {
        let (name_at, name_len) = (be(cluster, 8, 8), be(cluster, 16, 4));
        let mut said = Self {
            fields: cluster[..FIELDS].to_vec(),
            extensions: Vec::new(),
            name: cluster[name_at..name_at + name_len].to_vec(),
        };
        said.fields[8..16].fill(0);
        let mut at = FIELDS;
        while be(cluster, at, 4) != 0 {
            let (kind, len) = (u32::try_from(be(cluster, at, 4)).unwrap(), be(cluster, at + 4, 4));
            said.extensions.push((kind, cluster[at + 8..at + 8 + len].to_vec()));
            at += 8 + len.next_multiple_of(8);
        }
        said
    }

    fn cluster(&self, len: usize) -> Vec<u8> {
        let mut bytes = self.fields.clone();
        for (kind, body) in self.extensions.iter().chain([&(0, Vec::new())]) {
            bytes.extend(kind.to_be_bytes());
            bytes.extend(u32::try_from(body.len()).unwrap().to_be_bytes());
            bytes.extend(body);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
        if !self.name.is_empty() {
            let at = bytes.len() as u64;
            bytes[8..16].copy_from_slice(&at.to_be_bytes());
            bytes.extend(&self.name);
        }
        assert!(bytes.len() <= len, "a header that fits");
        bytes.resize(len, 0);
        bytes
    }

    /// Without what is ours.
    fn of_others(mut self) -> Self {
        self.extensions.retain(|(kind, _)| ![JOURNAL, PADDING].contains(kind));
        for (_, body) in self.extensions.iter_mut().filter(|(kind, _)| *kind == NAMES) {
            *body = body.chunks(ROW).filter(|row| row[..2] != [0, 47]).flatten().copied().collect();
        }
        self.extensions.retain(|(kind, body)| *kind != NAMES || !body.is_empty());
        self
    }
}

/// An image as QEMU makes it, with an unknown extension of `foreign` bytes.
fn image(cluster: u64, name: &str, foreign: usize, with_names: bool) -> (Content, Said) {
    let world = World::new(0);
    let drive = Drive::new(&world, DriveOptions::default());
    let options = CreateOptions { size: 1 << 20, cluster_size: cluster, ..CreateOptions::without_journal() };
    world.run(create(&*drive, None, &options)).unwrap();
    let mut bytes = drive.content().to_vec();
    let len = usize::try_from(cluster).unwrap();
    let mut said = Said::of(&bytes[..len]);
    said.extensions.retain(|(kind, _)| *kind == NAMES && with_names);
    if !name.is_empty() {
        said.extensions.insert(0, (BACKING_FORMAT, b"raw".to_vec()));
        said.name = name.as_bytes().to_vec();
        said.fields[16..20].copy_from_slice(&u32::try_from(name.len()).unwrap().to_be_bytes());
    }
    if foreign > 0 {
        let mut body = vec![0; foreign];
        Random::from_seed(7).fill(&mut body);
        said.extensions.push((FOREIGN, body));
    }
    bytes[..len].copy_from_slice(&said.cluster(len));
    (Content::of(&bytes), said)
}

fn first_cluster(content: &Content, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(len).unwrap()];
    content.read(ImageOffset::ZERO, &mut bytes);
    bytes
}

/// Changes the journal of `before` with a crash at every moment; gives what is there without one.
fn crashed(name: &str, before: &Content, cluster: u64, wanted: Option<u64>, states: &mut usize) -> Content {
    let old = Said::of(&first_cluster(before, cluster)).of_others();
    let had = journal_of(before);
    let world = World::new(0);
    let drive = Drive::from_content(&world, before.clone(), DriveOptions::default());
    let shared: SharedStorage = drive.clone();
    let change = world.run(set_journal(&shared, wanted)).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!((change.before, change.after, change.names_cut), (had, wanted, false), "{name}");
    let after = drive.content();
    assert_eq!(Said::of(&first_cluster(&after, cluster)).of_others(), old, "{name}");
    assert_eq!(journal_of(&after), wanted, "{name}");

    let log = drive.log();
    let mut seen = HashSet::new();
    for position in log.crash_positions() {
        for kind in [CrashKind::PowerCut, CrashKind::ProcessKill, CrashKind::FailedFlush] {
            let point = log.crash(kind, position);
            let whole = point.subsets().into_iter().flatten().map(|(_, image)| image);
            let torn = (0..point.pending().len()).flat_map(|index| point.tears(index, u64::MAX));
            for image in whole.chain(point.corners()).chain(torn) {
                if !seen.insert(image.digest()) {
                    continue;
                }
                *states += 1;
                let said = Said::of(&first_cluster(&image, cluster)).of_others();
                assert_eq!(said, old, "{name}, {kind:?} at {position}");
                let journal = journal_of(&image);
                assert!(journal == had || journal == wanted, "{name}, {kind:?} at {position}: {journal:?}");
                // Doing it again has the same result.
                let world = World::new(0);
                let drive = Drive::from_content(&world, image, DriveOptions::default());
                let shared: SharedStorage = drive.clone();
                world.run(set_journal(&shared, wanted)).unwrap();
                let again = Said::of(&first_cluster(&drive.content(), cluster));
                assert_eq!(
                    again,
                    Said::of(&first_cluster(&after, cluster)),
                    "{name}, {kind:?} at {position}"
                );
            }
        }
    }
    after
}

fn journal_of(image: &Content) -> Option<u64> {
    let world = World::new(0);
    let drive = Drive::from_content(&world, image.clone(), DriveOptions::default());
    world.run(Header::read(&*drive)).expect("a header that can be read").journal_bytes()
}

#[test]
fn a_crash_leaves_the_old_header_or_the_new_one() {
    let long = "d/".repeat(500) + "base";
    let mut states = 0;
    for (cluster, name, foreign, with_names) in [
        (65_536, "", 0, true),
        (65_536, "base.raw", 0, true),
        (65_536, &long, 0, true),
        (65_536, "base.raw", 3000, true),
        (4096, "base.raw", 100, true),
        (4096, "base.raw", 1000, false),
        (2048, "a name of a few sectors", 24, true),
        (512, "", 0, false),
        (512, "base.raw", 24, false),
    ] {
        let about = format!("{cluster}, {} of name, {foreign} of others, {with_names}", name.len());
        let (before, _) = image(cluster, name, foreign, with_names);
        let with = crashed(&about, &before, cluster, Some(WANTED), &mut states);
        let other = crashed(&about, &with, cluster, Some(2 * WANTED), &mut states);
        let without = crashed(&about, &other, cluster, None, &mut states);
        assert_eq!(without.to_vec(), before.to_vec(), "{about}: byte for byte as it was");
    }
    assert!(states >= 100, "{states}");
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    // In the first: names of features that are not in use go. In the others nothing can.
    for (cluster, name, foreign, with_names, code) in [
        (512, String::new(), 0, true, None),
        (1024, "a".repeat(300), 0, true, Some(ErrorKind::NoSpace)),
        (512, "a".repeat(300), 0, false, Some(ErrorKind::NoSpace)),
        (2048, "a".repeat(1000), 300, true, Some(ErrorKind::NoSpace)),
        (4096, String::new(), 3800, false, Some(ErrorKind::NoSpace)),
    ] {
        let (before, said) = image(cluster, &name, foreign, with_names);
        let world = World::new(0);
        let drive = Drive::from_content(&world, before.clone(), DriveOptions::default());
        let shared: SharedStorage = drive.clone();
        let result = world.run(set_journal(&shared, Some(WANTED)));
        match (result, code) {
            (Ok(change), None) => {
                assert!(change.names_cut);
                let now = Said::of(&first_cluster(&drive.content(), cluster)).of_others();
                assert_eq!((now.name, now.extensions.len()), (said.name, said.extensions.len() - 1));
                assert_eq!(journal_of(&drive.content()), Some(WANTED));
            }
            (Err(error), Some(kind)) => {
                assert_eq!(error.kind(), kind, "{}", error.chain());
                assert_eq!(drive.content().to_vec(), before.to_vec());
            }
            (result, _) => panic!("{cluster}, {}: {result:?}", name.len()),
        }
    }
}

#[test]
fn a_setting_that_another_program_moved_is_put_back() {
    let (before, _) = image(65_536, "base.raw", 0, true);
    let with = changed(&before, Some(WANTED)).expect("a journal");
    // As QEMU writes a header: what it knows first.
    let mut bytes = with.to_vec();
    let mut said = Said::of(&bytes[..65_536]);
    said.extensions.rotate_left(1);
    bytes[..65_536].copy_from_slice(&said.cluster(65_536));
    let moved = Content::of(&bytes);
    let world = World::new(0);
    let drive = Drive::from_content(&world, moved.clone(), DriveOptions::default());
    let header = world.run(Header::read(&*drive)).unwrap();
    assert!(header.has_misplaced_journal() && header.journal_bytes().is_none());
    let back = changed(&moved, Some(WANTED)).expect("a journal");
    assert_eq!(back.to_vec(), with.to_vec());
    let without = changed(&moved, None).expect("no journal");
    assert_eq!(without.to_vec(), before.to_vec());
}

#[test]
fn impossible_settings_are_refused() {
    let (good, _) = image(65_536, "", 0, true);
    for bytes in [0, (64 << 10) - 1, (64 << 20) + 1] {
        assert_eq!(changed(&good, Some(bytes)).err(), Some(ErrorKind::Invalid));
    }
    let poked = |at: u64, bytes: &[u8]| {
        let mut bad = good.clone();
        bad.write(ImageOffset::new(at), bytes);
        bad
    };
    assert_eq!(changed(&poked(79, &[2]), Some(WANTED)).err(), Some(ErrorKind::Corrupt));
    let world = World::new(0);
    let drive: Arc<Drive> = Drive::new(&world, DriveOptions::default());
    let old = CreateOptions { size: 1 << 20, version: 2, ..CreateOptions::without_journal() };
    world.run(create(&*drive, None, &old)).unwrap();
    assert_eq!(changed(&drive.content(), Some(WANTED)).err(), Some(ErrorKind::Invalid));
    assert_eq!(changed(&drive.content(), None).expect("nothing to do").to_vec(), drive.content().to_vec());
    world.run(drive.write(ImageOffset::ZERO, Buffer::zeroed(4))).unwrap();
    assert!(changed(&drive.content(), None).is_err());
}

fn changed(image: &Content, wanted: Option<u64>) -> Result<Content, ErrorKind> {
    let world = World::new(0);
    let drive = Drive::from_content(&world, image.clone(), DriveOptions::default());
    let shared: SharedStorage = drive.clone();
    world.run(set_journal(&shared, wanted)).map_err(|error| error.kind())?;
    Ok(drive.content())
}

const SESSION: u32 = 0x564C_4653;

/// What the header says without our session, its bits and its name.
fn without_session(image: &Content, cluster: u64) -> Said {
    let mut said = Said::of(&first_cluster(image, cluster));
    said.extensions.retain(|(kind, _)| ![SESSION, PADDING].contains(kind));
    for (_, body) in said.extensions.iter_mut().filter(|(kind, _)| *kind == NAMES) {
        *body = body.chunks(ROW).filter(|row| row[..2] != [0, 49]).flatten().copied().collect();
    }
    said.extensions.retain(|(kind, body)| *kind != NAMES || !body.is_empty());
    said.fields[73] &= !2; // incompatible bit 49
    said.fields[90] &= !0x80; // autoclear bit 47
    said
}

fn session_of(image: &Content) -> Option<Session> {
    let world = World::new(0);
    let drive = Drive::from_content(&world, image.clone(), DriveOptions::default());
    world.run(Header::read(&*drive)).expect("a header that can be read").session()
}

/// The session is begun, begun again, and taken out, with a crash at every moment.
#[test]
fn a_session_changes_nothing_else_of_a_header() {
    let long = "d/".repeat(500) + "base";
    let mut states = 0;
    for (cluster, name, foreign, with_names, journal) in [
        (65_536, "", 0, true, false),
        (65_536, "base.raw", 0, true, true),
        (65_536, &long, 3000, true, true),
        (4096, "base.raw", 100, true, true),
        (4096, "base.raw", 1000, false, false),
        (2048, "a name of a few sectors", 24, true, true),
        (512, "", 0, false, true),
        (512, "base.raw", 24, false, false),
    ] {
        let about = format!("{cluster}, {} of name, {foreign} of others, {journal}", name.len());
        let (mut before, _) = image(cluster, name, foreign, with_names);
        if journal {
            before = changed(&before, Some(WANTED)).expect("a journal");
        }
        let old = without_session(&before, cluster);
        let flash = CacheId::new([1; 16]);
        let number = |byte| SessionNumber::new([byte; 16]).unwrap();
        let named = |byte, state| Some(Session { cache: flash.unwrap(), number: number(byte), state });
        let world = World::new(0);
        let drive = Drive::from_content(&world, before.clone(), DriveOptions::default());
        let shared: SharedStorage = drive.clone();
        let mut steps = vec![(world.position(), [None, named(2, SessionState::HoldsWrites)])];
        world.run(async {
            let header = Header::read(&*shared).await.unwrap();
            let below = (!name.is_empty()).then(|| MemoryDisk::holding(&[3; 4096]) as SharedDisk);
            let files = Files { image: shared.clone(), data_file: None, below };
            let options = OpenOptions { flash, journal_key: Some(1), ..OpenOptions::default() };
            let disk = Qcow2::open(header, files, options).await.unwrap();
            disk.begin(number(2), true).await.unwrap_or_else(|error| panic!("{about}: {}", error.chain()));
            steps.push((
                world.position(),
                [named(2, SessionState::HoldsWrites), named(3, SessionState::Clean)],
            ));
            disk.begin(number(3), false).await.unwrap();
            disk.close().await.unwrap();
            steps.push((world.position(), [named(3, SessionState::Clean), None]));
            FormatKind::Qcow2.format().forget_session(&shared).await.unwrap();
        });
        assert_eq!(drive.content().to_vec(), before.to_vec(), "{about}: byte for byte as it was");
        let log = drive.log();
        let mut seen = HashSet::new();
        for position in log.crash_positions() {
            let (begins, may) = steps.iter().take_while(|(begins, _)| *begins <= position).last().unwrap();
            for kind in [CrashKind::PowerCut, CrashKind::ProcessKill, CrashKind::FailedFlush] {
                let point = log.crash(kind, position);
                let whole = point.subsets().into_iter().flatten().map(|(_, image)| image);
                let torn = (0..point.pending().len()).flat_map(|index| point.tears(index, u64::MAX));
                for image in whole.chain(point.corners()).chain(torn) {
                    if seen.insert((*begins, image.digest())) {
                        states += 1;
                        assert_eq!(without_session(&image, cluster), old, "{about}, {kind:?} at {position}");
                        let found = session_of(&image);
                        assert!(may.contains(&found), "{about}, {kind:?} at {position}: {found:?}");
                    }
                }
            }
        }
    }
    assert!(states >= 100, "{states}");
}

const PIN: u32 = 0x564C_504E;

/// The pin that the header has, and what other programs have in it.
fn pin_of(image: &Content, cluster: u64) -> (Option<String>, Said) {
    let world = World::new(0);
    let drive = Drive::from_content(&world, image.clone(), DriveOptions::default());
    let head = world.run(FormatKind::Qcow2.format().read(&*drive)).expect("a header that can be read");
    let mut said = Said::of(&first_cluster(image, cluster)).of_others();
    said.extensions.retain(|(kind, _)| *kind != PIN);
    (head.pin().map(ToString::to_string), said)
}

/// Records a pin with a crash at every moment; gives what is there without one.
fn pinned(name: &str, before: &Content, cluster: u64, text: &str, states: &mut usize) -> Content {
    let (had, old) = pin_of(before, cluster);
    let pin = Pin::parse(text).unwrap();
    let world = World::new(0);
    let drive = Drive::from_content(&world, before.clone(), DriveOptions::default());
    let shared: SharedStorage = drive.clone();
    world.run(FormatKind::Qcow2.format().set_pin(&shared, &pin)).unwrap();
    let after = drive.content();
    assert_eq!(pin_of(&after, cluster), (Some(text.to_owned()), old.clone()), "{name}");
    let log = drive.log();
    let mut seen = HashSet::new();
    for position in log.crash_positions() {
        let point = log.crash(CrashKind::PowerCut, position);
        let whole = point.subsets().into_iter().flatten().map(|(_, image)| image);
        let torn = (0..point.pending().len()).flat_map(|index| point.tears(index, u64::MAX));
        for image in whole.chain(point.corners()).chain(torn).filter(|image| seen.insert(image.digest())) {
            *states += 1;
            let (now, said) = pin_of(&image, cluster);
            assert_eq!(said, old, "{name}, at {position}");
            assert!(now == had || now.as_deref() == Some(text), "{name}, at {position}: {now:?}");
        }
    }
    after
}

#[test]
fn a_crash_leaves_the_old_pin_or_the_new_one() {
    let mut states = 0;
    for (cluster, foreign, journal) in [(65_536, 0, None), (65_536, 3000, Some(WANTED)), (4096, 100, None)] {
        let about = format!("{cluster}, {foreign} of others, journal {journal:?}");
        let (mut before, _) = image(cluster, "http://host/base.raw", foreign, true);
        if journal.is_some() {
            before = changed(&before, journal).unwrap();
        }
        let first = pinned(&about, &before, cluster, "etag 5 \"first\"", &mut states);
        let longer = format!("version 500000 {}\ntrusted 7", "v".repeat(200));
        let second = pinned(&about, &first, cluster, &longer, &mut states);
        assert_eq!(journal_of(&second), journal);
        // Another program gives it another backing file, and keeps the extension.
        let mut bytes = second.to_vec();
        let len = usize::try_from(cluster).unwrap();
        let mut said = Said::of(&bytes[..len]);
        said.name[7] = b'H';
        bytes[..len].copy_from_slice(&said.cluster(len));
        assert_eq!(pin_of(&Content::of(&bytes), cluster).0, None, "the pin is of another file");
    }
    assert!(states >= 30, "{states}");
}

#[test]
fn a_pin_without_a_backing_file_or_without_room_is_refused_and_changes_nothing() {
    let pin = Pin::parse("etag 5 \"x\"").unwrap();
    let long = "a".repeat(300);
    for (cluster, name, kind) in [(65_536, "", ErrorKind::Unsupported), (512, &*long, ErrorKind::NoSpace)] {
        let (before, _) = image(cluster, name, 0, false);
        let world = World::new(0);
        let drive = Drive::from_content(&world, before.clone(), DriveOptions::default());
        let shared: SharedStorage = drive.clone();
        let refused = world.run(FormatKind::Qcow2.format().set_pin(&shared, &pin));
        assert_eq!(refused.expect_err("refused").kind(), kind);
        assert_eq!(drive.content().to_vec(), before.to_vec());
    }
}

/// The backing file's name and format, and what else the header says.
fn backing_of(image: &Content, cluster: u64) -> (Option<(String, String)>, Option<String>, Said) {
    let world = World::new(0);
    let drive = Drive::from_content(&world, image.clone(), DriveOptions::default());
    let head = world.run(FormatKind::Qcow2.format().read(&*drive)).expect("a header that can be read");
    let backing = head.backing().map(|(name, format)| (name.to_owned(), format.unwrap_or("").to_owned()));
    let mut said = Said::of(&first_cluster(image, cluster)).of_others();
    said.extensions.retain(|(kind, _)| ![PIN, BACKING_FORMAT].contains(kind));
    said.name.clear();
    said.fields[16..20].fill(0); // the length of the name
    (backing, head.pin().map(ToString::to_string), said)
}

#[test]
fn a_crash_leaves_the_old_backing_file_or_the_new_one() {
    let mut states = 0;
    let long = "d/".repeat(500) + "base.raw";
    let pin = Pin::parse("etag 5 \"first\"").unwrap();
    for (cluster, foreign, journal) in [(65_536, 0, None), (65_536, 3000, Some(WANTED)), (4096, 100, None)] {
        let (mut before, _) = image(cluster, "", foreign, true);
        if journal.is_some() {
            before = changed(&before, journal).unwrap();
        }
        let steps: [(&str, &str, Option<&Pin>); 6] = [
            ("base.raw", "raw", None),
            (&long, "qcow2", None),
            ("http://host/base.raw", "raw", Some(&pin)),
            ("a.vlm", "vellum", None),
            (&long, "raw", Some(&pin)),
            ("b", "", None),
        ];
        for (name, format, pin) in steps {
            let about =
                format!("{cluster}, {foreign} of others, journal {journal:?}, {} of name", name.len());
            let (old, old_pin, said) = backing_of(&before, cluster);
            let world = World::new(0);
            let drive = Drive::from_content(&world, before.clone(), DriveOptions::default());
            let shared: SharedStorage = drive.clone();
            let backing =
                NewBacking { name, format: (!format.is_empty()).then_some(format), size: None, pin };
            world.run(FormatKind::Qcow2.format().set_backing(&shared, backing)).expect(&about);
            let after = drive.content();
            let new = Some((name.to_owned(), format.to_owned()));
            let new_pin = pin.map(ToString::to_string);
            assert_eq!(backing_of(&after, cluster), (new.clone(), new_pin.clone(), said.clone()), "{about}");
            assert_eq!(journal_of(&after), journal, "{about}");
            let log = drive.log();
            let mut seen = HashSet::new();
            for position in log.crash_positions() {
                let point = log.crash(CrashKind::PowerCut, position);
                let whole = point.subsets().into_iter().flatten().map(|(_, image)| image);
                let torn = (0..point.pending().len()).flat_map(|index| point.tears(index, u64::MAX));
                for image in
                    whole.chain(point.corners()).chain(torn).filter(|image| seen.insert(image.digest()))
                {
                    states += 1;
                    let (now, pin, others) = backing_of(&image, cluster);
                    assert_eq!(others, said, "{about}, at {position}");
                    let is_old = (&now, &pin) == (&old, &old_pin);
                    assert!(is_old || (&now, &pin) == (&new, &new_pin), "{about}, at {position}: {now:?}");
                }
            }
            before = after;
        }
    }
    assert!(states >= 60, "{states}");
}

/// Headers that have no checksum: refused, or changed into one that can be read.
#[test]
fn damaged_headers_are_refused_or_stay_headers() {
    let scale = std::env::var("VELLUM_TEST_SCALE").ok().and_then(|scale| scale.parse().ok()).unwrap_or(1);
    let mut accepted = 0;
    for seed in 0..2000 * scale {
        let mut random = Random::from_seed(seed);
        let cluster = *random.pick(&[512, 4096, 65_536]);
        let name = if random.one_in(2) { "base.raw" } else { "" };
        let (good, _) = image(cluster, name, 24, cluster > 512);
        let mut image = if random.one_in(2) { changed(&good, Some(WANTED)).unwrap() } else { good };
        for _ in 0..1 + random.below(3) {
            let reach = *random.pick(&[112, 200, 700]);
            let at = random.below(cluster.min(reach));
            let byte = *random.pick(&[0, 1, 8, 47, 72, 112, 255, u8::try_from(seed % 256).unwrap()]);
            image.write(ImageOffset::new(at), &[byte]);
        }
        for wanted in [Some(2 * WANTED), None] {
            if let Ok(next) = changed(&image, wanted) {
                assert_eq!(journal_of(&next), wanted, "seed {seed}");
                image = next;
                accepted += 1;
            }
        }
    }
    assert!(accepted > 500, "{accepted}");
}
