//! Formats of other programs, recognised by their signatures, so that such a file is never taken for a raw
//! disk. Most are read (`vellum-foreign`); the others are refused by name.
//!
//! ```text
//!   the first 2 KiB        qcow 1, VMDK, VHDX, dynamic VHD, QED, VDI, Parallels, LUKS 3 and later, cloop, Bochs
//!   the last KiB           fixed VHD (whose footer is all it has), dmg
//! ```
//!
//! 1. Every format that `qemu-img` recognises by its signature is here.
//! 2. The content of a file that is not read is used only for a message: an impossible size is left out.

use vellum_core::{Buffer, Error, ImageOffset, Result, Storage};
use vellum_foreign::ForeignKind;

/// A format of another program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Foreign {
    /// Its common name.
    pub name: &'static str,
    /// Its name in `qemu-img`.
    pub qemu_name: &'static str,
    /// The size of the disk in bytes, where the header simply contains it.
    pub virtual_size: Option<u64>,
    /// What reads it, if anything does here.
    pub reader: Option<ForeignKind>,
}

impl Foreign {
    /// The error that the file cannot be read, with the ways out.
    pub fn refusal(&self, file: &str) -> Error {
        Error::unsupported(format!(
            "{file} looks like a {} image, a format that Vellum cannot read: convert it with `{}`, or, if it is a \
             raw disk, use `-f raw`",
            self.name,
            self.conversion(file)
        ))
    }

    /// The command that converts it to an image that Vellum can read.
    pub fn conversion(&self, file: &str) -> String {
        if self.qemu_name == "luks" {
            // qemu-img does not read it either.
            return format!(
                "cryptsetup open {file} NAME && vellum convert -f raw -O qcow2 /dev/mapper/NAME COPY.qcow2"
            );
        }
        let stem = file
            .rsplit_once('.')
            .map(|(stem, _)| stem)
            .filter(|stem| !stem.is_empty() && !stem.ends_with('/'));
        let stem = stem.filter(|stem| !file[stem.len()..].contains('/')).unwrap_or(file);
        format!("qemu-img convert -f {} -O qcow2 {file} {stem}.qcow2", self.qemu_name)
    }
}

/// How many bytes are inspected, at the beginning and at the end.
const HEAD: usize = 2048;
const TAIL: usize = 1024;

/// How one format is recognised.
struct Kind {
    name: &'static str,
    qemu_name: &'static str,
    reader: Option<ForeignKind>,
    is_it: fn(&Ends) -> bool,
    size: fn(&Ends) -> Option<u64>,
}

/// The two ends of a file.
struct Ends {
    /// What is behind the end of a short file reads as zero here.
    head: Vec<u8>,
    tail: Vec<u8>,
}

const KINDS: [Kind; 12] = [
    Kind {
        name: "qcow (version 1)",
        qemu_name: "qcow",
        reader: Some(ForeignKind::Qcow1),
        is_it: |ends| ends.head.starts_with(b"QFI\xFB\0\0\0\x01"),
        size: |ends| Some(ends.be64(24)),
    },
    Kind {
        name: "VMDK",
        qemu_name: "vmdk",
        reader: Some(ForeignKind::Vmdk),
        is_it: |ends| {
            ends.head.starts_with(b"KDMV") || ends.head.starts_with(b"COWD") || is_vmdk_text(&ends.head)
        },
        size: |ends| ends.head.starts_with(b"KDMV").then(|| ends.le64(12).checked_mul(512)).flatten(),
    },
    Kind {
        name: "VHDX",
        qemu_name: "vhdx",
        reader: Some(ForeignKind::Vhdx),
        is_it: |ends| ends.head.starts_with(b"vhdxfile"),
        size: |_| None,
    },
    Kind {
        name: "VHD",
        qemu_name: "vpc",
        reader: Some(ForeignKind::Vhd),
        is_it: |ends| ends.vhd_footer().is_some(),
        size: |ends| ends.vhd_footer().and_then(vhd_size),
    },
    Kind {
        name: "QED",
        qemu_name: "qed",
        reader: Some(ForeignKind::Qed),
        is_it: |ends| ends.head.starts_with(b"QED\0"),
        size: |ends| Some(ends.le64(48)),
    },
    Kind {
        name: "VDI",
        qemu_name: "vdi",
        reader: Some(ForeignKind::Vdi),
        is_it: |ends| ends.head[64..68] == [0x7F, 0x10, 0xDA, 0xBE],
        size: |ends| Some(ends.le64(368)),
    },
    Kind {
        name: "Parallels",
        qemu_name: "parallels",
        reader: Some(ForeignKind::Parallels),
        is_it: |ends| {
            let magic = &ends.head[..16];
            (magic == b"WithoutFreeSpace" || magic == b"WithouFreSpacExt") && ends.le32(16) == 2
        },
        // The older signature is followed by a size of 32 bits.
        size: |ends| match &ends.head[..16] {
            b"WithoutFreeSpace" => Some(u64::from(ends.le32(36)) * 512),
            _ => ends.le64(36).checked_mul(512),
        },
    },
    Kind {
        // Versions 1 and 2 are read here (`luks/`).
        name: "LUKS",
        qemu_name: "luks",
        reader: None,
        is_it: |ends| ends.head.starts_with(b"LUKS\xBA\xBE"),
        size: |_| None,
    },
    Kind {
        name: "cloop",
        qemu_name: "cloop",
        reader: None,
        is_it: |ends| ends.head.starts_with(b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop "),
        size: |ends| Some(u64::from(ends.be32(128)) * u64::from(ends.be32(132))),
    },
    Kind {
        name: "Bochs",
        qemu_name: "bochs",
        reader: None,
        is_it: |ends| {
            ends.head.starts_with(b"Bochs Virtual HD Image") && ends.head[32..].starts_with(b"Redolog")
        },
        size: |ends| match ends.le32(64) {
            0x0001_0000 => Some(ends.le64(84)),
            _ => Some(ends.le64(88)),
        },
    },
    Kind {
        name: "dmg",
        qemu_name: "dmg",
        reader: Some(ForeignKind::Dmg),
        is_it: |ends| ends.koly().is_some(),
        size: |ends| be64(ends.koly()?, 492).checked_mul(512),
    },
    Kind {
        name: "VMDK (seSparse)",
        qemu_name: "vmdk",
        reader: None,
        is_it: |ends| ends.head.starts_with(&0xCAFE_BABE_u64.to_le_bytes()) && ends.le64(8) == 0x2_0000_0001,
        size: |ends| ends.le64(16).checked_mul(512),
    },
];

/// The foreign format that a file has, if any. The file has none of the formats that are read here.
///
/// # Errors
/// The errors of reading.
pub(crate) async fn foreign(storage: &dyn Storage) -> Result<Option<Foreign>> {
    let ends = Ends::read(storage).await?;
    let kind = KINDS.iter().find(|kind| (kind.is_it)(&ends));
    Ok(kind.map(|Kind { name, qemu_name, reader, size, .. }| {
        let virtual_size = size(&ends).filter(|bytes| i64::try_from(*bytes).is_ok());
        Foreign { name, qemu_name, virtual_size, reader: *reader }
    }))
}

impl Ends {
    async fn read(storage: &dyn Storage) -> Result<Self> {
        let len = storage.len();
        let head = storage.read(ImageOffset::ZERO, Buffer::for_overwrite(HEAD)).await?.to_vec();
        let tail_len = usize::try_from(len).unwrap_or(usize::MAX).min(TAIL);
        let at = ImageOffset::new(len - tail_len as u64);
        let tail = storage.read(at, Buffer::for_overwrite(tail_len)).await?.to_vec();
        Ok(Self { head, tail })
    }

    fn le32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.head[at..at + 4].try_into().expect("four bytes"))
    }

    fn be32(&self, at: usize) -> u32 {
        self.le32(at).swap_bytes()
    }

    fn le64(&self, at: usize) -> u64 {
        be64(&self.head, at).swap_bytes()
    }

    fn be64(&self, at: usize) -> u64 {
        be64(&self.head, at)
    }

    /// The footer of a VHD: a dynamic one has a copy in front, a fixed one nothing else. Old ones lack their
    /// last byte.
    fn vhd_footer(&self) -> Option<&[u8]> {
        let at_end = [512, 511].map(|len| self.tail.len().checked_sub(len).map(|at| &self.tail[at..]));
        let mut places = at_end.into_iter().flatten().chain([&self.head[..512]]);
        places.find(|footer| footer.starts_with(b"conectix"))
    }

    /// The trailer of a dmg; something shorter than a sector may follow it.
    fn koly(&self) -> Option<&[u8]> {
        let last = self.tail.len().checked_sub(512)?;
        let from = last.saturating_sub(511);
        // A version must follow, and its own length.
        let is_it = |at: &usize| self.tail[*at..].starts_with(b"koly\0\0\0\x04\0\0\x02\0");
        (from..=last).rev().find(is_it).map(|at| &self.tail[at..at + 512])
    }
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// The size that a VHD's footer records. Virtual PC and programs like it count in cylinders, heads and
/// sectors; others write the true size, and so do all programs where the geometry is at its limit.
fn vhd_size(footer: &[u8]) -> Option<u64> {
    const COUNTS_BYTES: [&[u8]; 5] = [b"win ", b"qem2", b"d2v ", b"tap\0", b"CTXS"];
    let sectors = u64::from(u16::from_be_bytes([footer[56], footer[57]]))
        * u64::from(footer[58])
        * u64::from(footer[59]);
    let is_at_its_end = sectors >= 65_535 * 16 * 255;
    match COUNTS_BYTES.contains(&&footer[28..32]) || is_at_its_end {
        true => Some(be64(footer, 48)),
        false => Some(sectors * 512),
    }
}

/// Whether it is the text that describes a VMDK: comments and empty lines, then its version.
fn is_vmdk_text(head: &[u8]) -> bool {
    if head.starts_with(b"# Disk DescriptorFile") {
        return true;
    }
    let lines = head.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    let mut lines = lines.skip_while(|line| line.is_empty() || line.starts_with(b"#"));
    let first = lines.next().unwrap_or_default();
    [&b"version=1"[..], b"version=2", b"version=3"].contains(&first)
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use vellum_core::{ErrorKind, MemoryStorage};

    use super::*;
    use crate::{FormatKind, probe};

    /// A file of `len` bytes with these bytes in it.
    fn file(len: usize, parts: &[(usize, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0; len];
        for (at, part) in parts {
            bytes[*at..*at + part.len()].copy_from_slice(part);
        }
        bytes
    }

    fn found(bytes: &[u8]) -> Option<Foreign> {
        block_on(foreign(&*MemoryStorage::holding("some.dir/disk.x", bytes))).expect("memory can be read")
    }

    #[test]
    fn no_format_that_others_know_is_taken_for_raw() {
        let koly = b"koly\0\0\0\x04\0\0\x02\0";
        let cloop = b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0 && mount -r -t iso9660 /dev/cloop $1\n";
        let mib = 1 << 20;
        let size_le = (mib as u64).to_le_bytes();
        for (qemu_name, size, bytes) in [
            ("qcow", Some(mib), file(9000, &[(0, b"QFI\xFB\0\0\0\x01"), (24, &(mib as u64).to_be_bytes())])),
            ("vmdk", Some(mib), file(9000, &[(0, b"KDMV"), (12, &2048_u64.to_le_bytes())])),
            ("vmdk", None, file(9000, &[(0, b"COWD")])),
            ("vmdk", None, b"# Disk DescriptorFile\nversion=1\n".to_vec()),
            ("vmdk", None, b"# a comment\n\n  version=3\nCID=1\n".to_vec()),
            ("vhdx", None, file(9000, &[(0, b"vhdxfile")])),
            (
                "vpc",
                Some(mib),
                file(9000, &[(0, b"conectix"), (28, b"win "), (48, &(mib as u64).to_be_bytes())]),
            ),
            (
                "vpc",
                Some(mib),
                file(
                    mib + 512,
                    &[(mib, b"conectix"), (mib + 28, b"qem2"), (mib + 48, &(mib as u64).to_be_bytes())],
                ),
            ),
            (
                "vpc",
                Some(4 * 17 * 306 * 512),
                file(mib + 511, &[(mib, b"conectix"), (mib + 56, &[1, 50, 4, 17])]),
            ),
            ("qed", Some(mib), file(9000, &[(0, b"QED\0"), (48, &size_le)])),
            ("vdi", Some(mib), file(9000, &[(64, &[0x7F, 0x10, 0xDA, 0xBE]), (368, &size_le)])),
            (
                "parallels",
                Some(mib),
                file(9000, &[(0, b"WithouFreSpacExt\x02"), (36, &2048_u64.to_le_bytes())]),
            ),
            ("parallels", Some(mib), file(9000, &[(0, b"WithoutFreeSpace\x02"), (36, &[0, 8, 0, 0, 9])])),
            ("luks", None, file(9000, &[(0, b"LUKS\xBA\xBE\0\x03")])),
            ("cloop", Some(3 << 16), file(9000, &[(0, cloop), (128, &[0, 1, 0, 0, 0, 0, 0, 3])])),
            (
                "bochs",
                Some(mib),
                file(9000, &[(0, b"Bochs Virtual HD Image"), (32, b"Redolog"), (66, &[2]), (88, &size_le)]),
            ),
            ("dmg", Some(mib), file(9000, &[(9000 - 512, koly), (9000 - 512 + 498, &[8])])),
            ("dmg", None, file(9000, &[(9000 - 700, koly), (9000 - 700 + 492, &[0xFF])])),
            (
                "vmdk",
                Some(mib),
                file(
                    9000,
                    &[(0, &[0xBE, 0xBA, 0xFE, 0xCA]), (8, &[1, 0, 0, 0, 2]), (16, &2048_u64.to_le_bytes())],
                ),
            ),
        ] {
            let one = found(&bytes).unwrap_or_else(|| panic!("{qemu_name} is taken for raw"));
            assert_eq!(
                (one.qemu_name, one.virtual_size),
                (qemu_name, size.map(|size| size as u64)),
                "{one:?}"
            );
            let probed = block_on(probe(&*MemoryStorage::holding("x.y/disk.x", &bytes)));
            if let Some(kind) = one.reader {
                assert_eq!(probed.expect("it is read"), FormatKind::Foreign(kind));
                continue;
            }
            let error = probed.expect_err("it is refused");
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            let way_out = match qemu_name {
                "luks" => "cryptsetup open x.y/disk.x".to_owned(),
                _ => format!("qemu-img convert -f {qemu_name} -O qcow2 x.y/disk.x x.y/disk.qcow2"),
            };
            assert!(error.to_string().contains(&way_out) && error.to_string().contains("-f raw"), "{error}");
        }
    }

    #[test]
    fn raw_disks_are_raw() {
        for bytes in [
            vec![],
            vec![7],
            file(511, &[]),
            file(1024, &[(0, b"koly")]),
            file(9000, &[(8000, b"conectix")]),
            file(9000, &[(0, b"#!/bin/sh\nversion=1 of a script\n")]),
            file(9000, &[(0, b"LUKS"), (64, &[0x7F])]),
        ] {
            assert_eq!(found(&bytes), None);
            let kind = block_on(probe(&*MemoryStorage::holding("disk", &bytes))).expect("it is read");
            assert_eq!(kind, FormatKind::Raw);
        }
    }
}
