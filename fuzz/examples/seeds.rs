//! Writes the seeds: `seeds DIRECTORY`. What is committed under `fuzz/seeds` was made by this, with qemu-img present.
//! A seed whose name says what went wrong is an input that once found it.
//!
//! Images are of small clusters, because a fuzzer learns more from two kilobytes than from two hundred. Those of
//! qemu-img have what we do not write: compressed clusters, snapshots, bitmaps, names of features.

#![allow(clippy::print_stderr, reason = "it tells what it left out")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use futures_lite::future::block_on;
use vellum_core::{Buffer, Disk, GuestOffset, MemoryStorage, Random, SharedStorage, WriteFlags, ZeroFlags};
use vellum_format::FormatKind;
use vellum_format::image::BitmapChange;
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2, create};
use vellum_format::session::{CacheId, SessionNumber, Sessions};
use vellum_luks::{HEADER_LEN, Hash, Mode, NewHeader, Secret};

fn main() -> io::Result<()> {
    let root = PathBuf::from(env::args_os().nth(1).expect("seeds DIRECTORY"));
    let mut images = own_images();
    match qemu_images() {
        Ok(made) => images.extend(made),
        Err(error) => eprintln!("no seeds by qemu-img: {error}"),
    }
    for (name, image) in images {
        let header = [&image[..image.len().min(1024)], &[16]].concat();
        write(&root.join("qcow2_header"), &name, &header)?;
        write(&root.join("qcow2_open"), &name, &image)?;
    }
    for (index, program) in programs().into_iter().enumerate() {
        write(&root.join("qcow2_ops"), &format!("program-{index:02}"), &program)?;
    }
    for seed in 0..6 {
        let mut random = Random::from_seed(seed);
        let mut bytes = vec![0; 120];
        random.fill(&mut bytes);
        write(&root.join("qcow2_journal"), &format!("records-{seed}"), &bytes)?;
    }
    for seed in 0..16u8 {
        let poke = |at: u8| seed.wrapping_mul(53).wrapping_add(at.wrapping_mul(29));
        let mut bytes: Vec<u8> = (0..40).map(poke).collect();
        bytes[0] = seed % 8;
        write(&root.join("native_open"), &format!("pokes-{seed:02}"), &bytes)?;
    }
    for seals in [0, 7_u8] {
        // A row with a UUID, and an entry of it.
        let row = [&[0, 32, 8, 15][..], &[5; 16]].concat();
        let entry =
            [&[8, 32, 4, 20, 0, 0, 0, 0][..], &[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 3, 1]].concat();
        write(&root.join("fast_medium"), &format!("row-{seals}"), &[&[8, seals][..], &row, &entry].concat())?;
    }
    for which in 0..3_u8 {
        write(&root.join("guest_files"), &format!("sample-{which}"), &[which])?;
        // The size of a file, the depth of its extents, and a block of the journal.
        let pokes =
            [&[which, 0, 15, 4, 1, 0, 0, 0, 28, 6, 1, 3, 0][..], &[0, 168, 8, 3, 0, 0, 0, 9]].concat();
        write(&root.join("guest_files"), &format!("pokes-{which}"), &pokes)?;
    }
    for which in 3..5_u8 {
        write(&root.join("guest_files"), &format!("sample-{which}"), &[which])?;
        // The size of a directory, a root's levels, a block of extents, and the first record of the log.
        let pokes = [
            &[which, 0, 0x11, 0x3f, 0, 8][..],
            &[0, 0x12, 0xb0, 1, 0, 2],
            &[0, 0x1c, 0x07, 0, 9],
            &[0, 0xa0, 0x2b, 0, 2],
        ];
        write(&root.join("guest_files"), &format!("pokes-{which}"), &pokes.concat())?;
    }
    for which in 5..8_u8 {
        write(&root.join("guest_files"), &format!("sample-{which}"), &[which])?;
        // An operation's length and flags, a buffer's bitmap, and an inode's fields, in records at two places.
        let pokes = [
            &[which, 1, 0x00, 0x17, 0, 9][..],
            &[1, 0x02, 0x37, 1, 0, 4],
            &[1, 0x02, 0x60, 0, 0x81],
            &[1, 0xf2, 0x50, 3, 1, 2, 3, 4],
        ];
        write(&root.join("guest_files"), &format!("pokes-{which}"), &pokes.concat())?;
    }
    for sample in vellum_foreign::samples::samples() {
        let target = root.join(format!("foreign_{:?}", sample.kind).to_lowercase());
        let name = sample.name.replace([' ', ','], "-");
        if sample.image.len() < 8192 {
            write(&target, &format!("file-{name}"), &[&[0xFF], &sample.image[..]].concat())?;
        }
        for which in 0..3_u8 {
            let pokes = (0..which).flat_map(|poke| [poke * 37, 0, poke, 2, poke, 0]);
            write(
                &target,
                &format!("pokes-{which}"),
                &[which].into_iter().chain(pokes).collect::<Vec<u8>>(),
            )?;
        }
    }
    for sample in vellum_foreign::samples::refused() {
        let target = root.join(format!("foreign_{:?}", sample.kind).to_lowercase());
        if sample.image.len() < 32_768 {
            let name = sample.name.replace([' ', ','], "-");
            write(&target, &format!("file-{name}"), &[&[0xFF], &sample.image[..]].concat())?;
        }
    }
    // Both regions of a VHDX near 2^64.
    let region = |at: u8, start: u64, len: u32| {
        [&[at, 0, 3, 12][..], &start.to_le_bytes(), &len.to_le_bytes()].concat()
    };
    let regions = [region(32, u64::MAX << 21, 1 << 20), region(64, u64::MAX << 20, 0xFFF0_0000)].concat();
    write(&root.join("foreign_vhdx"), "regions-at-the-end", &[&[0], &regions[..]].concat())?;
    for (name, header) in luks_headers() {
        write(&root.join("luks_header"), name, &[&header[..], &[22]].concat())?;
    }
    for (name, input) in templates() {
        write(&root.join("template_store"), name, &input)?;
    }
    for (name, input) in vellum_flash::fuzz::seeds() {
        write(&root.join("flash_bytes"), name, &input)?;
    }
    for (name, talk) in handshakes() {
        write(&root.join("nbd_handshake"), name, &talk)?;
        // A session that has its own handshake (mode 0).
        write(&root.join("nbd_session"), &format!("talk-{name}"), &[&[0, 1], &talk[8..]].concat())?;
    }
    for (kind, is_extended) in [("request", false), ("extended", true)] {
        for (index, request) in requests(is_extended).into_iter().enumerate() {
            write(&root.join("nbd_request"), &format!("{kind}-{index}"), &[&request[..], &[12]].concat())?;
        }
    }
    for mode in [0, 1, 3, 4, 7, 15] {
        let said = [&[mode][..], &vellum_remote::nbd::fuzz::greeting_and_facts()].concat();
        write(&root.join("nbd_client"), &format!("handshake-{mode:02}"), &said)?;
    }
    for (mode, how) in [(0, [true, true]), (2, [false, true]), (58, [false, false])] {
        let said = [&[mode][..], &vellum_remote::nbd::fuzz::listing(how[0], how[1])].concat();
        write(&root.join("nbd_list"), &format!("listing-{mode:02}"), &said)?;
    }
    for (index, memory) in vellum_export::vhost::fuzz::seeds().into_iter().enumerate() {
        write(&root.join("vhost_request"), &format!("memory-{index}"), &memory)?;
    }
    for mode in [1, 3, 7, 1 | 8, 3 | 16, 3 | 128, 3 | 32 | 16, 3 | 64, 255] {
        let data: Vec<u8> = requests(false).concat();
        write(&root.join("nbd_session"), &format!("mode-{mode}"), &[&[mode, 5], &data[..]].concat())?;
        if mode & 2 != 0 {
            let data: Vec<u8> = requests(true).concat();
            let name = format!("extended-mode-{mode}");
            write(&root.join("nbd_session"), &name, &[&[mode, 128 | 5], &data[..]].concat())?;
        }
    }
    Ok(())
}

fn write(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    fs::write(dir.join(name), bytes)
}

/// Without the zeros at the end, which a file need not have to be read.
fn trimmed(mut image: Vec<u8>, unit: usize) -> Vec<u8> {
    while image.ends_with(&[0]) {
        image.pop();
    }
    image.resize(image.len().next_multiple_of(unit), 0);
    image
}

/// Headers of LUKS: of our own making, with keys in some slots.
fn luks_headers() -> Vec<(&'static str, [u8; HEADER_LEN])> {
    let mut random = Random::from_seed(1);
    let mut chance = |bytes: &mut [u8]| {
        random.fill(bytes);
        Ok(())
    };
    let mut headers = Vec::new();
    for (name, key_len, hash, slots) in
        [("aes-256", 64, "sha256", 1), ("aes-128", 32, "sha1", 3), ("all-slots", 64, "sha512", 8)]
    {
        let (mode, hash) = (Mode::named("xts-plain64").expect("known"), Hash::named(hash).expect("known"));
        let new = NewHeader { mode, key_len, hash, digest_iterations: 1000 };
        let (mut header, key) = new.make(&mut chance).expect("good options");
        let secret = Secret::new(b"secret".to_vec()).expect("short");
        for slot in 0..slots {
            header.fill_slot(slot, &key, &secret, 1000, &mut chance).expect("it is empty");
        }
        headers.push((name, header.encode()));
    }
    headers
}

fn own_images() -> Vec<(String, Vec<u8>)> {
    let small = CreateOptions { size: 40_000, cluster_size: 512, ..CreateOptions::without_journal() };
    let backing = Some(("base".to_owned(), Some("raw".to_owned())));
    let kinds = [
        ("empty", CreateOptions { size: 0, ..small.clone() }),
        ("plain", small.clone()),
        ("version-2", CreateOptions { version: 2, ..small.clone() }),
        ("refcounts-of-1-bit", CreateOptions { refcount_bits: 1, ..small.clone() }),
        ("refcounts-of-64-bits", CreateOptions { refcount_bits: 64, ..small.clone() }),
        ("over-a-base", CreateOptions { backing, ..small.clone() }),
        ("data-file", CreateOptions { data_file: Some("data".to_owned()), ..small.clone() }),
        ("subclusters", CreateOptions { cluster_size: 16_384, extended_l2: true, ..small }),
    ];
    let mut images: Vec<_> =
        kinds.iter().map(|(name, options)| ((*name).to_owned(), own_image(options, None))).collect();
    for (name, holds_writes) in [("session", false), ("session-behind", true)] {
        images.push((name.to_owned(), own_image(&kinds[1].1, Some(holds_writes))));
    }
    images.push(("bitmaps".to_owned(), own_bitmaps(&own_image(&kinds[1].1, None))));
    images
}

/// The image with bitmaps: one that is kept up, in which something is marked, and one that is not.
fn own_bitmaps(image: &[u8]) -> Vec<u8> {
    let storage = MemoryStorage::holding("image", image);
    let shared: SharedStorage = storage.clone();
    let bitmaps = FormatKind::Qcow2.format().closed_bitmaps().expect("qcow2 has bitmaps");
    block_on(async {
        for (name, granularity) in [("kept", 512), ("stopped", 4096)] {
            let add = BitmapChange::Add { granularity: Some(granularity) };
            bitmaps.change(&shared, name, &[add]).await.expect("added");
        }
        bitmaps.change(&shared, "stopped", &[BitmapChange::Disable]).await.expect("disabled");
        let header = Header::read(&*shared).await.expect("a header");
        let files = Files { image: shared.clone(), data_file: None, below: None };
        let disk = Qcow2::open(header, files, OpenOptions::default()).await.expect("opened");
        let write = disk.write(GuestOffset::new(9000), Buffer::copy_of(&[2; 1500]), WriteFlags::default());
        write.await.expect("written");
        disk.close().await.expect("closed");
    });
    trimmed(storage.content().to_vec(), 512)
}

/// With a session with a flash cache, which may hold writes, or without one.
fn own_image(options: &CreateOptions, session: Option<bool>) -> Vec<u8> {
    let image = MemoryStorage::new("image");
    let data_file: SharedStorage = MemoryStorage::new("data");
    let data_file = options.data_file.is_some().then_some(data_file);
    block_on(async {
        create(&*image, data_file.as_ref(), options).await.expect("created");
        let shared: SharedStorage = image.clone();
        let header = Header::read(&*shared).await.expect("a header");
        let files = Files { image: shared, data_file, below: None };
        let flash = CacheId::new([1; 16]).filter(|_| session.is_some());
        let disk = Qcow2::open(header, files, OpenOptions { flash, ..OpenOptions::default() }).await;
        let disk = disk.expect("opened");
        if let Some(holds_writes) = session {
            let number = SessionNumber::new([3; 16]).expect("not zero");
            disk.begin(number, holds_writes).await.expect("recorded");
        }
        if options.size > 0 {
            // Little data: what a fuzzer is to play with is the metadata.
            let write = disk.write(GuestOffset::new(700), Buffer::copy_of(&[1; 300]), WriteFlags::default());
            write.await.expect("written");
            let span = GuestOffset::new(33_000).span(1000);
            disk.write_zeroes(span, ZeroFlags::default()).await.expect("zeroed");
        }
        disk.close().await.expect("closed");
    });
    trimmed(image.content().to_vec(), 512)
}

/// Images with what only QEMU writes.
fn qemu_images() -> io::Result<Vec<(String, Vec<u8>)>> {
    let dir = env::temp_dir().join(format!("vellum-seeds-{}", std::process::id()));
    fs::create_dir_all(&dir)?;
    let run = |program: &str, arguments: &[&str]| {
        let status = Command::new(program)
            .args(arguments)
            .current_dir(&dir)
            .stdout(std::process::Stdio::null())
            .status()?;
        if status.success() {
            Ok(())
        } else {
            Err(io::Error::other(format!("{program} {arguments:?}: {status}")))
        }
    };
    // Text compresses; its clusters end up next to each other.
    let text: Vec<u8> =
        (0..12_000_u32).flat_map(|at| format!("{} ", at / 7).into_bytes()).take(12_000).collect();
    fs::write(dir.join("text"), &text)?;
    let mut images = Vec::new();
    let mut keep = |name: &str, unit| {
        images.push((format!("qemu-{name}"), trimmed(fs::read(dir.join("image"))?, unit)));
        io::Result::Ok(())
    };
    for (name, options, compress) in [
        ("deflate", "cluster_size=512", true),
        ("zstd", "cluster_size=2048,compression_type=zstd", true),
        ("version-2", "cluster_size=512,compat=0.10", false),
        ("lazy", "cluster_size=512,lazy_refcounts=on", false),
    ] {
        let compress: &[&str] = if compress { &["-c"] } else { &[] };
        let convert = ["convert", "-f", "raw", "-O", "qcow2", "-o", options];
        let arguments = [&convert[..], compress, &["text", "image"]].concat();
        run("qemu-img", &arguments)?;
        keep(name, 512)?;
    }
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", "image", "20k"])?;
    run("qemu-io", &["-c", "write -q 1k 2k", "image"])?;
    run("qemu-img", &["snapshot", "-c", "first", "image"])?;
    run("qemu-io", &["-c", "write -q 2k 3k", "image"])?;
    run("qemu-img", &["snapshot", "-c", "second", "image"])?;
    keep("snapshots", 512)?;
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", "image", "20k"])?;
    run("qemu-img", &["bitmap", "--add", "-g", "512", "image", "changes"])?;
    run("qemu-io", &["-c", "write -q 1k 1k", "image"])?;
    keep("bitmap", 512)?;
    fs::remove_dir_all(&dir)?;
    Ok(images)
}

/// Programs for `qcow2_ops`: shapes of all kinds, steps at random.
fn programs() -> Vec<Vec<u8>> {
    let mut random = Random::from_seed(1);
    let flags = [0, 0, 1, 2, 4, 8, 16, 16 | 32, 64, 64 | 2, 64 | 2 | 8, 64 | 16];
    let program = |flags: u8| {
        let [size_low, size_high] = 60_000_u16.to_le_bytes();
        let cluster = if flags & 2 == 0 { u8::try_from(random.below(8)).expect("small") } else { 5 };
        let mut program = vec![cluster, if flags & 1 == 0 { 4 } else { 0 }, flags, 1, size_low, size_high];
        let mut steps = vec![0; 80];
        random.fill(&mut steps);
        program.extend(steps);
        program
    };
    flags.into_iter().map(program).collect()
}

/// An index with and without its checksum, and chunks in both codecs.
fn templates() -> Vec<(&'static str, Vec<u8>)> {
    use vellum_remote::template::{Digest, Index, chunk};
    let chunks = [0_u32, 1, 5, 6, 9].map(|number| (number, Digest::of(&number.to_be_bytes())));
    let index = Index::build(10 << 16, 16, &chunks.into()).expect("it fits");
    let mut noise = vec![0; 600];
    Random::from_seed(1).fill(&mut noise);
    let chunk = |content: &[u8]| {
        let len = u32::try_from(content.len()).expect("small");
        [&[2][..], &len.to_be_bytes(), &chunk::encode(content)].concat()
    };
    vec![
        ("index", [&[0][..], &index].concat()),
        ("index-open", [&[1][..], &index[..index.len() - 32]].concat()),
        ("chunk-zstd", chunk(&[7; 5000])),
        ("chunk-as-it-is", chunk(&noise)),
    ]
}

/// Handshakes for `nbd_handshake`: how they are cut into pieces, the client's flags, options.
fn handshakes() -> Vec<(&'static str, Vec<u8>)> {
    let option = |number: u32, data: &[u8]| {
        let len = u32::try_from(data.len()).expect("short").to_be_bytes();
        [b"IHAVEOPT", &number.to_be_bytes()[..], &len, data].concat()
    };
    let talk_with = |last: u8, options: &[Vec<u8>]| {
        [&[255, 255, 255, 255, 255, 255, 255, last, 0, 0, 0, 3][..], &options.concat()].concat()
    };
    let talk = |options: &[Vec<u8>]| talk_with(255, options);
    let go = option(7, b"\0\0\0\0\0\x02\0\x03\0\x02");
    let context = option(10, b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation");
    vec![
        ("export-name", talk(&[option(1, b"")])),
        ("list", talk(&[option(3, b""), option(2, b"")])),
        ("info-go", talk(&[option(6, b"\0\0\0\0\0\0"), go.clone()])),
        ("structured", talk(&[option(8, b""), context.clone(), go.clone()])),
        ("extended", talk(&[option(8, b""), option(11, b""), option(8, b""), context, go.clone()])),
        ("contexts", talk(&[option(8, b""), option(9, b"\0\0\0\0\0\0\0\x02\0\0\0\x05base:\0\0\0\x05qemu:")])),
        (
            "tls-offered",
            talk_with(254, &[option(8, b""), option(5, b"x"), option(5, b""), option(5, b""), go.clone()]),
        ),
        (
            "tls-required",
            talk_with(253, &[option(8, b""), option(6, b""), option(5, b""), option(3, b""), go]),
        ),
        ("tls", talk(&[option(5, b""), option(11, b""), option(99, b"what?")])),
    ]
}

/// One request of each command, with payload where there is one.
fn requests(is_extended: bool) -> Vec<Vec<u8>> {
    let request = |flags: u16, command: u16, offset: u64, payload: &[u8], len: u32| {
        let has_payload = is_extended && !payload.is_empty();
        let flags = if has_payload { flags | 1 << 5 } else { flags };
        let magic: u32 = if is_extended { 0x21e4_1c71 } else { 0x2560_9513 };
        let len_bytes = u64::from(len).to_be_bytes();
        [
            &magic.to_be_bytes()[..],
            &flags.to_be_bytes(),
            &command.to_be_bytes(),
            &(0xC00C_1E00 | u64::from(command)).to_be_bytes(),
            &offset.to_be_bytes(),
            if is_extended { &len_bytes[..] } else { &len_bytes[4..] },
            payload,
        ]
        .concat()
    };
    vec![
        request(0, 1, 600, &[9; 100], 100),
        request(1, 1, 4096, &[8; 64], 64),
        request(0, 0, 0, &[], 8192),
        request(4, 0, 512, &[], 4096),
        request(0, 7, 0, &[], 16_384),
        request(8, 7, 100, &[], 1000),
        request(2, 6, 1024, &[], 3000),
        request(0, 4, 2048, &[], 2048),
        request(0, 3, 0, &[], 0),
        request(0, 5, 0, &[], 4096),
        request(0, 77, 0, &[], 0),
        request(0, 2, 0, &[], 0),
    ]
}
