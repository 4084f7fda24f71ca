//! Small images of every format, made by hand, for tests and for fuzzing. Each has blocks that are stored, zero,
//! and absent, not in order, and a disk that ends within a block.

use std::io::Write as _;

use crate::ForeignKind;

/// An image and what its disk reads as over nothing.
pub struct Sample {
    /// What it shows.
    pub name: &'static str,
    /// Its format.
    pub kind: ForeignKind,
    /// The image file.
    pub image: Vec<u8>,
    /// The other files, as [`parts`](crate::Description::parts) names them.
    pub parts: Vec<(String, Vec<u8>)>,
    /// The content of the disk.
    pub disk: Vec<u8>,
}

/// All of them.
pub fn samples() -> Vec<Sample> {
    vec![
        vdi(),
        qed(),
        parallels(),
        qcow1(),
        vhd(),
        vhd_fixed(),
        vmdk_sparse(),
        vmdk_stream(),
        vmdk_parts(),
        vhdx(false),
        vhdx(true),
        dmg(),
    ]
}

/// Images that are to be refused when they are opened: from each, a reader that trusts it reads zeros that nobody wrote, or
/// works for hours.
pub fn refused() -> Vec<Sample> {
    let mut refused = damaged_dmgs();
    refused.extend([qed_with_a_shared_table(), vmdk_in_many_files(), vhdx_with_a_region_at_the_end()]);
    refused
}

/// Makes the checksums of a VHDX true again after it was changed: its headers, region tables and the first log entry.
pub fn seal_vhdx(image: &mut [u8]) {
    let log_entry = 1 << 20;
    let entry_len =
        image.get(log_entry + 8..log_entry + 12).map_or(0, |len| crate::bytes::le32(len, 0) as usize);
    for (at, len) in [
        (0x1_0000, 4096),
        (0x2_0000, 4096),
        (0x3_0000, 0x1_0000),
        (0x4_0000, 0x1_0000),
        (log_entry, entry_len),
    ] {
        let Some(part) = image.get_mut(at..at.saturating_add(len)).filter(|part| part.len() >= 8) else {
            continue;
        };
        part[4..8].fill(0);
        let sum = crc32c::crc32c(part);
        part[4..8].copy_from_slice(&sum.to_le_bytes());
    }
}

/// Bytes that are never zero.
fn noise(seed: u8, len: usize) -> Vec<u8> {
    let mut state = u32::from(seed) * 2 + 1;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        u8::try_from(state >> 24).expect("eight bits") | 1
    };
    (0..len).map(|_| next()).collect()
}

/// Writes bytes into a file, which grows for it.
fn put(file: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    if file.len() < at + bytes.len() {
        file.resize(at + bytes.len(), 0);
    }
    file[at..at + bytes.len()].copy_from_slice(bytes);
}

fn le<const N: usize>(file: &mut Vec<u8>, fields: [(usize, u32); N]) {
    for (at, value) in fields {
        put(file, at, &value.to_le_bytes());
    }
}

/// The blocks of a disk: those with a seed are stored, the others zero.
fn disk_of(block: usize, seeds: &[Option<u8>], len: usize) -> Vec<u8> {
    let mut disk: Vec<u8> = Vec::new();
    for seed in seeds {
        disk.extend(seed.map_or(vec![0; block], |seed| noise(seed, block)));
    }
    disk.truncate(len);
    disk
}

fn vdi() -> Sample {
    let disk = disk_of(4096, &[Some(1), None, None, Some(4), Some(5)], 4 * 4096 + 512);
    let mut image = b"<<< a disk >>>\n".to_vec();
    le(&mut image, [(64, 0xBEDA_107F), (68, 0x1_0001), (72, 400), (76, 1), (340, 512), (344, 1024)]);
    le(&mut image, [(360, 512), (368, 4 * 4096 + 512), (376, 4096), (384, 5), (388, 3)]);
    le(&mut image, [(512, 1), (516, u32::MAX), (520, u32::MAX - 1), (524, 0), (528, 2)]);
    for (place, seed) in [(0, 4), (1, 1), (2, 5)] {
        put(&mut image, 1024 + place * 4096, &noise(seed, 4096));
    }
    Sample { name: "vdi", kind: ForeignKind::Vdi, image, parts: Vec::new(), disk }
}

fn qed() -> Sample {
    let disk = disk_of(4096, &[Some(1), None, None, Some(4)], 3 * 4096 + 512);
    let mut image = b"QED\0".to_vec();
    le(&mut image, [(4, 4096), (8, 1), (12, 1), (40, 4096), (48, 3 * 4096 + 512)]);
    le(&mut image, [(4096, 8192), (8192, 5 * 4096), (8200, 0), (8208, 1), (8216, 3 * 4096)]);
    put(&mut image, 5 * 4096, &noise(1, 4096));
    put(&mut image, 3 * 4096, &noise(4, 4096));
    Sample { name: "qed", kind: ForeignKind::Qed, image, parts: Vec::new(), disk }
}

fn parallels() -> Sample {
    let disk = disk_of(4096, &[Some(1), None, Some(3)], 2 * 4096 + 512);
    let mut image = b"WithouFreSpacExt".to_vec();
    le(&mut image, [(16, 2), (20, 16), (24, 1), (28, 8), (32, 3), (36, 17), (48, 8)]);
    le(&mut image, [(64, 2), (68, 0), (72, 1)]);
    put(&mut image, 2 * 4096, &noise(1, 4096));
    put(&mut image, 4096, &noise(3, 4096));
    Sample { name: "parallels", kind: ForeignKind::Parallels, image, parts: Vec::new(), disk }
}

fn qcow1() -> Sample {
    let block = 512;
    let mut disk = disk_of(block, &[Some(1), None, Some(3), None, Some(5)], 5 * block);
    disk[4 * block..].fill(7);
    let mut image = b"QFI\xFB\0\0\0\x01".to_vec();
    put(&mut image, 24, &(5_u64 * 512).to_be_bytes());
    put(&mut image, 32, &[9, 6]);
    put(&mut image, 40, &48_u64.to_be_bytes());
    put(&mut image, 48, &512_u64.to_be_bytes());
    let mut writer = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::best());
    writer.write_all(&disk[4 * block..]).expect("memory");
    let packed = writer.finish().expect("memory");
    let compressed = 1 << 63 | (packed.len() as u64) << 54 | 2200;
    for (index, entry) in [(0, 1024), (2, 1536), (4, compressed)] {
        put(&mut image, 512 + index * 8, &u64::to_be_bytes(entry));
    }
    put(&mut image, 1024, &noise(1, block));
    put(&mut image, 1536, &noise(3, block));
    put(&mut image, 2200, &packed);
    Sample { name: "qcow", kind: ForeignKind::Qcow1, image, parts: Vec::new(), disk }
}

fn vhd_footer(kind: u32, size: u64, header_at: u64) -> Vec<u8> {
    let mut footer = b"conectix".to_vec();
    put(&mut footer, 16, &header_at.to_be_bytes());
    put(&mut footer, 28, b"qem2");
    put(&mut footer, 48, &size.to_be_bytes());
    put(&mut footer, 60, &kind.to_be_bytes());
    footer.resize(512, 0);
    let sum = footer.iter().map(|byte| u32::from(*byte)).sum::<u32>();
    put(&mut footer, 64, &(!sum).to_be_bytes());
    footer
}

fn vhd() -> Sample {
    let size = 2 * 4096 + 512;
    let mut disk = disk_of(4096, &[Some(1), None, Some(3)], size);
    // Sectors that were never written, though something lies in their place.
    disk[512..1536].fill(0);
    let footer = vhd_footer(3, size as u64, 512);
    let mut image = footer.clone();
    put(&mut image, 512, b"cxsparse");
    put(&mut image, 512 + 16, &1536_u64.to_be_bytes());
    put(&mut image, 512 + 28, &3_u32.to_be_bytes());
    put(&mut image, 512 + 32, &4096_u32.to_be_bytes());
    for (index, sector) in [13_u32, u32::MAX, 4].into_iter().enumerate() {
        put(&mut image, 1536 + index * 4, &sector.to_be_bytes());
    }
    put(&mut image, 13 * 512, &[0b1001_1111]);
    put(&mut image, 14 * 512, &noise(1, 4096));
    put(&mut image, 4 * 512, &[0xFF]);
    put(&mut image, 5 * 512, &noise(3, 4096));
    image.extend(footer);
    Sample { name: "vhd, dynamic", kind: ForeignKind::Vhd, image, parts: Vec::new(), disk }
}

fn vhd_fixed() -> Sample {
    let disk = noise(9, 2560);
    let mut image = disk.clone();
    image.extend(vhd_footer(2, 2560, u64::MAX));
    Sample { name: "vhd, fixed", kind: ForeignKind::Vhd, image, parts: Vec::new(), disk }
}

/// The header of a sparse extent, with grains of 4 KiB and tables of 4 entries.
fn vmdk_header(flags: u32, sectors: u32, directory: u64) -> Vec<u8> {
    let mut header = b"KDMV".to_vec();
    le(&mut header, [(4, 1), (8, flags), (12, sectors), (20, 8), (44, 4)]);
    put(&mut header, 56, &directory.to_le_bytes());
    header.resize(512, 0);
    header
}

const DESCRIPTOR: &str = "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=ffffffff\n";

fn vmdk_sparse() -> Sample {
    let disk = disk_of(4096, &[Some(1), None, None, None, Some(5), None], 5 * 4096 + 512);
    let mut image = vmdk_header(4, 41, 3);
    le(&mut image, [(28, 1), (36, 2)]);
    let text = format!("{DESCRIPTOR}createType=\"monolithicSparse\"\nRW 41 SPARSE \"x.vmdk\"\n");
    put(&mut image, 512, text.as_bytes());
    le(&mut image, [(1536, 4), (1540, 5), (2048, 16), (2052, 0), (2056, 1), (2060, 0), (2560, 8), (2564, 1)]);
    put(&mut image, 16 * 512, &noise(1, 4096));
    put(&mut image, 8 * 512, &noise(5, 4096));
    Sample { name: "vmdk, monolithic", kind: ForeignKind::Vmdk, image, parts: Vec::new(), disk }
}

fn vmdk_stream() -> Sample {
    let mut disk = disk_of(4096, &[Some(1), None, None, None, Some(5)], 4 * 4096 + 512);
    disk[..4096].fill(9);
    let flags = 1 << 16 | 1 << 17;
    let mut image = vmdk_header(flags, 33, u64::MAX);
    put(&mut image, 77, &1_u16.to_le_bytes());
    let mut at = 512;
    let mut grains = [0_u32; 8];
    for (index, sector) in [(0, 0_u64), (4, 32)] {
        let end = disk.len().min((index + 1) * 4096);
        let mut writer = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::best());
        writer.write_all(&disk[index * 4096..end]).expect("memory");
        let packed = writer.finish().expect("memory");
        grains[index] = u32::try_from(at / 512).expect("small");
        put(&mut image, at, &sector.to_le_bytes());
        put(&mut image, at + 8, &u32::try_from(packed.len()).expect("small").to_le_bytes());
        put(&mut image, at + 12, &packed);
        at = image.len().next_multiple_of(512);
    }
    let number = |at: usize| u32::try_from(at / 512).expect("small");
    for (index, grain) in grains.into_iter().enumerate() {
        le(&mut image, [(at + index / 4 * 512 + index % 4 * 4, grain)]);
    }
    let directory = at + 1024;
    le(&mut image, [(directory, number(at)), (directory + 4, number(at + 512))]);
    image.resize(directory + 512, 0);
    le(&mut image, [(directory + 512, 1), (directory + 524, 3)]);
    image.resize(directory + 1024, 0);
    let mut footer = vmdk_header(flags, 33, u64::from(number(directory)));
    put(&mut footer, 77, &1_u16.to_le_bytes());
    image.extend(footer);
    image.resize(image.len() + 512, 0);
    Sample { name: "vmdk, stream-optimised", kind: ForeignKind::Vmdk, image, parts: Vec::new(), disk }
}

fn vmdk_parts() -> Sample {
    let sparse = vmdk_sparse();
    let flat = noise(8, 4096);
    let mut disk = flat[512..2560].to_vec();
    disk.extend(&sparse.disk);
    disk.extend([0; 1024]);
    let image = format!(
        "{DESCRIPTOR}createType=\"custom\"\n\nRW 4 FLAT \"a-f001.vmdk\" 1\nRW 41 SPARSE \"a-s002.vmdk\"\nRW 2 ZERO\n"
    );
    let parts = vec![("a-f001.vmdk".to_owned(), flat), ("a-s002.vmdk".to_owned(), sparse.image)];
    Sample { name: "vmdk, in parts", kind: ForeignKind::Vmdk, image: image.into_bytes(), parts, disk }
}

/// Blocks of 1 MiB. With a log, only that says where the first one is.
fn vhdx(has_log: bool) -> Sample {
    const MIB: usize = 1 << 20;
    let size = 2 * MIB + 512;
    let disk = disk_of(MIB, &[Some(1), None, Some(3)], size);
    let hex = |text: &str| -> Vec<u8> {
        let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
        digits
            .chunks(2)
            .map(|pair| u8::from_str_radix(str::from_utf8(pair).expect("digits"), 16).expect("hex"))
            .collect()
    };
    let mut image = b"vhdxfile".to_vec();
    for (at, number) in [(0x1_0000, 1), (0x2_0000, 2)] {
        put(&mut image, at, b"head");
        le(&mut image, [(at + 8, number), (at + 66, 1), (at + 68, 1 << 20), (at + 72, 1 << 20)]);
        if has_log {
            put(&mut image, at + 48, &[7; 16]);
        }
    }
    let table = hex("66 77 C2 2D 23 F6 00 42 9D 64 11 5E 9B FD 4A 08");
    let metadata = hex("06 A2 7C 8B 90 47 9A 4B B8 FE 57 5F 05 0F 88 6E");
    for at in [0x3_0000, 0x4_0000] {
        put(&mut image, at, b"regi");
        le(&mut image, [(at + 8, 2), (at + 32, 3 << 20), (at + 40, 1 << 20), (at + 44, 1)]);
        put(&mut image, at + 16, &table);
        le(&mut image, [(at + 64, 2 << 20), (at + 72, 1 << 20), (at + 76, 1)]);
        put(&mut image, at + 48, &metadata);
    }
    let at = 2 * MIB;
    put(&mut image, at, b"metadata");
    le(&mut image, [(at + 10, 3)]);
    let items = [
        ("37 67 A1 CA 36 FA 43 4D B3 B6 33 F0 AA 44 E7 6B", 8, 0_u64, 1_u64 << 20),
        ("24 42 A5 2F 1B CD 76 48 B2 11 5D BE D8 3B F4 B8", 8, 8, size as u64),
        ("1D BF 41 81 6F A9 09 47 BA 47 F2 33 A8 FA AB 5F", 4, 16, 512),
    ];
    for (index, (id, len, offset, value)) in items.into_iter().enumerate() {
        let entry = at + 32 + index * 32;
        put(&mut image, entry, &hex(id));
        let place = u32::try_from(0x1_0000 + offset).expect("small");
        le(&mut image, [(entry + 16, place), (entry + 20, len), (entry + 24, 4)]);
        put(&mut image, at + 0x1_0000 + usize::try_from(offset).expect("small"), &value.to_le_bytes());
    }
    let entries = [5_u64 << 20 | 6, 2, 4 << 20 | 6];
    let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
    match has_log {
        false => put(&mut image, 3 * MIB, &bytes),
        true => {
            let log = MIB;
            put(&mut image, log, b"loge");
            le(&mut image, [(log + 8, 8192), (log + 12, 0), (log + 16, 5), (log + 24, 2)]);
            put(&mut image, log + 32, &[7; 16]);
            le(&mut image, [(log + 48, 6 << 20), (log + 56, 6 << 20)]);
            let mut sector = bytes;
            sector.resize(4096, 0);
            for (at, id) in [(log + 64, b"zero"), (log + 96, b"desc")] {
                put(&mut image, at, id);
                le(&mut image, [(at + 16, 3 << 20), (at + 24, 5)]);
            }
            put(&mut image, log + 72, &(4096_u64 * 2).to_le_bytes());
            put(&mut image, log + 104, &sector[..8]);
            put(&mut image, log + 4096, &sector);
            put(&mut image, log + 4096, b"data");
            le(&mut image, [(log + 4100, 0), (log + 8188, 5)]);
            // What the log is to cover.
            put(&mut image, 3 * MIB, &[0xFF; 8192]);
        }
    }
    put(&mut image, 5 * MIB, &noise(1, MIB));
    put(&mut image, 4 * MIB, &noise(3, MIB));
    seal_vhdx(&mut image);
    let name = if has_log { "vhdx, not closed" } else { "vhdx" };
    Sample { name, kind: ForeignKind::Vhdx, image, parts: Vec::new(), disk }
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let mut bits = [0; 4];
        bits[1..=three.len()].copy_from_slice(three);
        let bits = u32::from_be_bytes(bits);
        for digit in 0..4 {
            let is_padding = digit > three.len();
            let index = (bits >> (18 - 6 * digit) & 63) as usize;
            text.push(if is_padding { '=' } else { char::from(DIGITS[index]) });
        }
    }
    text
}

/// An entry of a table of chunks: kind, first sector, sectors, place, bytes.
type DmgChunk = (u32, u64, u64, u64, u64);

fn dmg() -> Sample {
    dmg_with("dmg", |_| {}, |list| list)
}

/// The lists of these lost a table, or a part of one.
fn damaged_dmgs() -> Vec<Sample> {
    let same = |_: &mut Vec<DmgChunk>| {};
    let whole = |list: String| list;
    vec![
        dmg_with("dmg, a tag", same, |list| list.replacen("<data>", "<Data>", 1)),
        dmg_with("dmg, no base64", same, |list| list.replacen("AAAA", "A-AA", 1)),
        dmg_with("dmg, no table", same, |list| list.replacen("<data>\nb", "<data>\nc", 1)),
        dmg_with("dmg, no list", same, |_| "<plist></plist>".to_owned()),
        dmg_with("dmg, an end between", |chunks| chunks[2] = (u32::MAX, 3, 0, 0, 0), whole),
        dmg_with("dmg, a comment", |chunks| chunks[2].0 = 0x7FFF_FFFE, whole),
        dmg_with("dmg, the first is missing", |chunks| chunks.retain(|chunk| chunk.1 != 0), whole),
        dmg_with("dmg, the last is missing", |chunks| chunks.retain(|chunk| chunk.1 != 4), whole),
        dmg_with("dmg, zeros twice", |chunks| chunks[2].2 = 2, whole),
    ]
}

/// The image whose chunks and whose list are changed like this.
fn dmg_with(
    name: &'static str,
    change: impl Fn(&mut Vec<DmgChunk>),
    list: impl Fn(String) -> String,
) -> Sample {
    let mut disk = disk_of(512, &[Some(1), None, Some(3), None, None, Some(6)], 6 * 512);
    disk[512..1024].fill(5);
    disk[2048..2560].fill(6);
    let mut zlib = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::best());
    zlib.write_all(&disk[512..1536]).expect("memory");
    let mut bz = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::best());
    bz.write_all(&disk[2048..3072]).expect("memory");
    let (zlib, bz) = (zlib.finish().expect("memory"), bz.finish().expect("memory"));
    let mut image = disk[..512].to_vec();
    let mut table = b"mish\0\0\0\x01".to_vec();
    table.resize(204, 0);
    let mut chunks: Vec<DmgChunk> = Vec::new();
    for (kind, first, count, bytes) in
        [(1_u32, 0_u64, 1_u64, &disk[..512]), (0x8000_0005, 1, 2, &zlib), (0x8000_0006, 4, 2, &bz)]
    {
        let at = if first == 0 { 0 } else { image.len() };
        put(&mut image, at, bytes);
        chunks.push((kind, first, count, at as u64, bytes.len() as u64));
    }
    chunks.insert(2, (2, 3, 1, 0, 0));
    chunks.push((u32::MAX, 6, 0, 0, 0));
    change(&mut chunks);
    put(&mut table, 200, &u32::try_from(chunks.len()).expect("small").to_be_bytes());
    for (kind, first, count, at, len) in chunks {
        table.extend(kind.to_be_bytes());
        table.extend([0; 4]);
        for number in [first, count, at, len] {
            table.extend(number.to_be_bytes());
        }
    }
    let list = list(format!(
        "<plist><key>blkx</key><array><data>\n{}\n</data></array><key>plst</key><array><data>AAAA</data></array></plist>",
        base64(&table)
    ));
    let list_at = image.len() as u64;
    image.extend(list.as_bytes());
    let mut trailer = b"koly\0\0\0\x04\0\0\x02\0".to_vec();
    put(&mut trailer, 60, &1_u32.to_be_bytes());
    put(&mut trailer, 216, &list_at.to_be_bytes());
    put(&mut trailer, 224, &(list.len() as u64).to_be_bytes());
    put(&mut trailer, 492, &6_u64.to_be_bytes());
    trailer.resize(512, 0);
    image.extend(trailer);
    Sample { name, kind: ForeignKind::Dmg, image, parts: Vec::new(), disk }
}

/// A disk of gigabytes, all of which one table of 4 KiB describes.
fn qed_with_a_shared_table() -> Sample {
    let mut sample = Sample { name: "qed, a shared table", disk: Vec::new(), ..qed() };
    put(&mut sample.image, 48, &(512_u64 * 512 * 4096).to_le_bytes());
    for entry in 0..512 {
        le(&mut sample.image, [(4096 + entry * 8, 8192)]);
    }
    sample
}

fn vmdk_in_many_files() -> Sample {
    let mut image = format!("{DESCRIPTOR}createType=\"custom\"\n");
    for index in 0..600 {
        image.push_str(&format!("RW 1 FLAT \"f{index}\" 0\n"));
    }
    let (name, image) = ("vmdk, in many files", image.into_bytes());
    Sample { name, kind: ForeignKind::Vmdk, image, parts: Vec::new(), disk: Vec::new() }
}

/// One region begins near 2^64, and the other would end past it.
fn vhdx_with_a_region_at_the_end() -> Sample {
    let mut sample = Sample { name: "vhdx, a region at the end", disk: Vec::new(), ..vhdx(false) };
    for table in [0x3_0000, 0x4_0000] {
        for (at, start, len) in [(32, u64::MAX << 21, 1_u32 << 20), (64, u64::MAX << 20, 0xFFF0_0000)] {
            put(&mut sample.image, table + at, &start.to_le_bytes());
            put(&mut sample.image, table + at + 8, &len.to_le_bytes());
        }
    }
    seal_vhdx(&mut sample.image);
    sample
}
