//! A directory that is removed at the end of the test.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// A directory, removed with all that is in it when dropped.
pub struct Dir(PathBuf);

impl Dir {
    /// On the file system that the program was built on, which is a real one, or in `VELLUM_TEST_DIR`.
    pub fn new(name: &str) -> Self {
        let chosen = std::env::var_os("VELLUM_TEST_DIR").map(PathBuf::from);
        Self::within(chosen.as_deref().unwrap_or(Path::new(env!("CARGO_TARGET_TMPDIR"))), name)
    }

    /// With a path short enough for the name of a socket.
    pub fn short() -> Self {
        Self::within(&std::env::temp_dir(), "vellum")
    }

    pub fn within(parent: &Path, name: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let path = parent.join(format!("{name}-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed)));
        drop(std::fs::remove_dir_all(&path));
        std::fs::create_dir_all(&path).expect("a directory for the test");
        Self(path.canonicalize().expect("it is there"))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The path of a file in it, as text.
    pub fn text(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("a path that is text").to_owned()
    }

    /// The names of what is in it, sorted.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).expect("the directory");
        let mut names: Vec<String> = entries
            .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}
