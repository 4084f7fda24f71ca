//! Loop devices and small file systems on them, where they are available.

use std::path::PathBuf;

use super::dir::Dir;
use super::noise;
use super::program::{has, is_root, run, skipped, succeed};

/// A loop device over a file of its own.
pub struct LoopDevice {
    pub path: PathBuf,
    dir: Dir,
}

impl LoopDevice {
    /// A device of `len` bytes that moves blocks of `block` bytes; prints the reason if none is available.
    pub fn new(len: u64, block: u32) -> Option<Self> {
        if !is_root() {
            skipped("loop devices are root's");
            return None;
        }
        let dir = Dir::new("loop");
        std::fs::File::create(dir.join("backing"))
            .and_then(|file| file.set_len(len))
            .expect("a file for the device");
        let ran = run("losetup", &["--show", "-f", "-b", &block.to_string(), &dir.text("backing")]);
        if ran.code != 0 {
            skipped(&format!("no loop device: {}", ran.err.trim()));
            return None;
        }
        Some(Self { path: ran.out.trim().into(), dir })
    }

    pub fn text(&self) -> String {
        self.path.display().to_string()
    }

    /// The file below.
    pub fn backing(&self) -> PathBuf {
        self.dir.join("backing")
    }

    /// Sets the length, as a volume manager would.
    #[track_caller]
    pub fn grow(&self, len: u64) {
        let file = std::fs::File::options().write(true).open(self.backing()).expect("the file below");
        file.set_len(len).expect("room for it");
        succeed("losetup", &["-c", &self.text()]);
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        drop(run("losetup", &["-d", &self.text()]));
    }
}

/// A device whose flushes fail on request: below is a file system that is full then.
pub struct Failing {
    pub path: String,
    /// The cache of a device is dropped when it is closed for the last time; that of a file is not.
    _open: std::fs::File,
    mount: Mount,
}

impl Failing {
    /// A device of 32 MiB, of which 20 can be written: a cache on it may have all of a small disk.
    pub fn new() -> Option<Self> {
        if !is_root() || !has("losetup") {
            skipped("loop devices are root's");
            return None;
        }
        let mount = Mount::tmpfs(20 << 20)?;
        let backing = mount.dir.text("backing");
        std::fs::File::create(&backing).and_then(|file| file.set_len(32 << 20)).expect("a sparse file");
        let ran = run("losetup", &["--show", "-f", &backing]);
        if ran.code != 0 {
            skipped("no loop device");
            return None;
        }
        let path = ran.out.trim().to_owned();
        let open = std::fs::File::open(&path).expect("the device");
        Some(Self { path, _open: open, mount })
    }

    /// From now on flushes fail that have something to write.
    pub fn fail(&self) {
        drop(std::fs::write(self.mount.dir.join("ballast"), noise(24 << 20, 2)));
    }

    /// What the medium really has.
    pub fn backing(&self) -> PathBuf {
        self.mount.dir.join("backing")
    }

    /// They succeed again.
    pub fn succeed(&self) {
        std::fs::remove_file(self.mount.dir.join("ballast")).expect("the ballast");
    }
}

impl Drop for Failing {
    fn drop(&mut self) {
        drop(run("losetup", &["-d", &self.path]));
    }
}

/// A file system of its own, mounted.
pub struct Mount {
    pub dir: Dir,
    /// Detached after it is unmounted.
    device: Option<LoopDevice>,
}

impl Mount {
    /// A tmpfs of `len` bytes.
    pub fn tmpfs(len: u64) -> Option<Self> {
        if !is_root() {
            skipped("mounting is root's");
            return None;
        }
        let dir = Dir::new("mount");
        let ran = run("mount", &["-t", "tmpfs", "-o", &format!("size={len}"), "tmpfs", &dir.text("")]);
        if ran.code != 0 {
            skipped(&format!("no tmpfs: {}", ran.err.trim()));
            return None;
        }
        Some(Self { dir, device: None })
    }

    /// An ext4 on this device.
    pub fn ext4_on(device: &str) -> Option<Self> {
        let dir = Dir::new("mount");
        let made = run("mkfs.ext4", &["-q", "-O", "^has_journal", "-m", "0", device]);
        let ran = if made.code == 0 { run("mount", &[device, &dir.text("")]) } else { made };
        if ran.code != 0 {
            skipped(&format!("no ext4: {}", ran.err.trim()));
            return None;
        }
        Some(Self { dir, device: None })
    }

    /// An ext4 on a loop device of `len` bytes.
    pub fn ext4(len: u64) -> Option<Self> {
        let device = LoopDevice::new(len, 512)?;
        let mut mount = Self::ext4_on(&device.text())?;
        mount.device = Some(device);
        Some(mount)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // A mount with open files is left alone.
        drop(run("umount", &["-l", &self.dir.text("")]));
    }
}
