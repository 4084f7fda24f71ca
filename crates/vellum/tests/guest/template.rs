//! The template: an ext4 root made from Debian's packages and a little data of ours, and a clone of it.

use std::path::{Path, PathBuf};

use crate::debian::Debian;
use crate::support::dir::Dir;
use crate::support::noise;
use crate::support::program::{path_text, vellum};
use crate::tools::{sha256, tool};

const SIZE: &str = "320M";

/// A template, a clone of it, and what the machine needs besides.
pub struct Template {
    _dir: Dir,
    pub kernel: PathBuf,
    pub release: String,
    pub first_files: PathBuf,
    pub clone: PathBuf,
    pub noise: Vec<u8>,
    pub rewritten: Vec<u8>,
    image: PathBuf,
    hash: String,
}

impl Template {
    /// Makes all of it: the template in this format, the clone in qcow2.
    pub fn new(debian: &Debian, format: &str) -> Self {
        let dir = Dir::new("guest");
        let (noise, rewritten) = (noise(3 << 20, 1), noise(2 << 20, 2));
        make_root(debian, &dir.join("root"), &noise, &rewritten);
        let raw = dir.text("root.ext4");
        tool("mke2fs", &["-q", "-t", "ext4", "-d", &dir.text("root"), &raw, SIZE]);
        std::fs::remove_dir_all(dir.join("root")).expect("the root directory");

        let (image, clone) = (dir.join("template"), dir.join("clone.qcow2"));
        vellum(&["convert", "-q", "-f", "raw", "-O", format, &raw, path_text(&image)]).answer();
        std::fs::remove_file(&raw).expect("the raw file system");
        vellum(&["create", "-q", "-f", "qcow2", "-b", "template", "-F", format, path_text(&clone)]).answer();

        let first_files = dir.join("first.cpio");
        std::fs::write(&first_files, first_archive(debian)).expect("the kernel's first files");
        Self {
            kernel: debian.kernel(),
            release: debian.release.clone(),
            first_files,
            clone,
            noise,
            rewritten,
            hash: sha256(&image),
            image,
            _dir: dir,
        }
    }

    /// The template is byte for byte what it was.
    #[track_caller]
    pub fn assert_untouched(&self) {
        assert_eq!(sha256(&self.image), self.hash, "the template has changed");
    }
}

fn make_root(debian: &Debian, root: &Path, noise: &[u8], rewritten: &[u8]) {
    for dir in ["bin", "boot", "sbin", "etc", "srv", "data", "dev", "proc", "sys"] {
        std::fs::create_dir_all(root.join(dir)).expect("a directory of the root");
    }
    tool("cp", &["-R", path_text(&debian.dir.join("lib")), path_text(root)]);
    std::fs::copy(debian.kernel(), root.join("boot").join(debian.kernel().file_name().expect("a name")))
        .expect("the kernel");
    std::fs::copy(&debian.busybox, root.join("bin/busybox")).expect("busybox");
    put_program(&root.join("sbin/init"), include_str!("init.sh"));
    let put = |name: &str, bytes: &[u8]| std::fs::write(root.join(name), bytes).expect("a file of the root");
    put("etc/motd", b"This is the template.\n");
    put("srv/noise", noise);
    put("srv/rewritten", rewritten);
    put("srv/deleted", &crate::support::noise(8 << 20, 3));
}

fn put_program(path: &Path, text: &str) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(path, text).expect("a program of the root");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).expect("it was made here");
}

/// What the kernel has before it has a disk: busybox, the modules for the disk, and the program that loads
/// them.
fn first_archive(debian: &Debian) -> Vec<u8> {
    let mut archive = crate::cpio::Archive::default();
    for dir in ["bin", "dev", "modules", "sysroot"] {
        archive.directory(dir);
    }
    archive.character_device("dev/console", 5, 1);
    archive.program("bin/busybox", &std::fs::read(&debian.busybox).expect("busybox"));
    archive.program("init", include_bytes!("first.sh"));
    let mut order = String::new();
    for (name, bytes) in debian.modules(&["virtio_pci", "virtio_blk", "ext4"]) {
        archive.program(&format!("modules/{name}"), &bytes);
        order += &format!("{name}\n");
    }
    archive.program("modules/order", order.as_bytes());
    archive.finish()
}
