//! Third-party programs that check what a guest left.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::support::dir::Dir;
use crate::support::first_difference;
use crate::support::program::{Ran, path_text, run, succeed, vellum};

/// Programs for file systems are in directories that users other than root do not search.
fn place<'a>(name: &'a str, path: &'a mut PathBuf) -> &'a str {
    *path = Path::new("/usr/sbin").join(name);
    if path.is_file() { path_text(path) } else { name }
}

/// Runs such a program to success.
#[track_caller]
pub fn tool<S: AsRef<OsStr> + std::fmt::Debug>(name: &str, arguments: &[S]) -> String {
    succeed(place(name, &mut PathBuf::new()), arguments)
}

fn try_tool(name: &str, arguments: &[&str]) -> Ran {
    run(place(name, &mut PathBuf::new()), arguments)
}

/// The hash of a file, as text.
#[track_caller]
pub fn sha256(path: &Path) -> String {
    let line = tool("sha256sum", &[path]);
    line.split_whitespace().next().expect("a hash").to_owned()
}

/// Both programs find nothing wrong with the image.
#[track_caller]
pub fn assert_image_is_clean(image: &Path) {
    let ran = run("qemu-img", &["check", "-f", "qcow2", path_text(image)]);
    assert!(ran.code == 0 && ran.out.contains("No errors were found"), "{}\n{}", ran.out, ran.err);
    vellum(&["check", path_text(image)]).answer();
}

/// The files in a disk's ext4, as `debugfs` finds them in a copy.
pub struct Files {
    dir: Dir,
}

impl Files {
    /// The file system was unmounted in order, and nothing is wrong with it.
    #[track_caller]
    pub fn of_clean(image: &Path) -> Self {
        let raw = Self::copy_of(image);
        raw.assert_clean();
        raw.unpack()
    }

    /// The guest died: the journal is replayed, which must be all that is needed. (`-p` repairs only what a
    /// crash may leave; it fails at anything else.)
    #[track_caller]
    pub fn of_crashed(image: &Path) -> Self {
        let raw = Self::copy_of(image);
        let ran = try_tool("e2fsck", &["-f", "-p", &raw.text()]);
        assert!(ran.code <= 1, "e2fsck -f -p:\n{}\n{}", ran.out, ran.err);
        raw.assert_clean();
        raw.unpack()
    }

    #[track_caller]
    fn copy_of(image: &Path) -> Self {
        let files = Self { dir: Dir::new("found") };
        let raw = files.text();
        vellum(&["convert", "-q", "-f", "qcow2", "-O", "raw", path_text(image), &raw]).answer();
        succeed("qemu-img", &["compare", "-q", "-f", "qcow2", "-F", "raw", path_text(image), &raw]);
        files
    }

    fn text(&self) -> String {
        self.dir.text("disk.raw")
    }

    #[track_caller]
    fn assert_clean(&self) {
        let ran = try_tool("e2fsck", &["-f", "-n", &self.text()]);
        assert_eq!(ran.code, 0, "e2fsck -f -n:\n{}\n{}", ran.out, ran.err);
    }

    #[track_caller]
    fn unpack(self) -> Self {
        let request = format!("rdump /boot /data /etc /srv {}", self.dir.text(""));
        tool("debugfs", &["-R", &request, &self.text()]);
        self
    }

    /// Where the copy of a file is, that may be there.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name.trim_start_matches('/'))
    }

    pub fn has(&self, name: &str) -> bool {
        self.path(name).exists()
    }

    /// The file is there, with this content.
    #[track_caller]
    pub fn assert_is(&self, name: &str, content: &[u8]) {
        let found = std::fs::read(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(found.len(), content.len(), "the length of {name}");
        assert_eq!(first_difference(&found, content), None, "{name} differs");
    }
}
