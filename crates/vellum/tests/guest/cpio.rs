//! The archive that a kernel unpacks before it has a disk: `cpio`'s format "newc", written into memory.
//!
//! An entry is a header of hexadecimal digits, a name and a body; name and body each end at a multiple of
//! four bytes.

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// An archive that grows.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    pub fn directory(&mut self, name: &str) {
        self.entry(name, DIRECTORY, (0, 0), &[]);
    }

    pub fn program(&mut self, name: &str, body: &[u8]) {
        self.entry(name, PROGRAM, (0, 0), body);
    }

    pub fn character_device(&mut self, name: &str, major: u32, minor: u32) {
        self.entry(name, CHARACTER_DEVICE, (major, minor), &[]);
    }

    /// The bytes of the whole archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, (major, minor): (u32, u32), body: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(body.len()).expect("a small file");
        let name_size = u32::try_from(name.len()).expect("short") + 1;
        let (owner, group, links, time, on_device, checksum) = (0, 0, 1, 0, 0, 0);
        self.bytes.extend(b"070701");
        for field in [
            self.entries,
            mode,
            owner,
            group,
            links,
            time,
            size,
            on_device,
            on_device,
            major,
            minor,
            name_size,
            checksum,
        ] {
            self.bytes.extend(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(body);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}
