//! Which files an image may name.
//!
//! An image can come from anywhere, and its header can name any file as its backing or data file. So a reference is
//! opened only when the file lies in the directory of the image that names it, or in a directory that the user allowed.
//! Links are followed before the question is asked: where the file *is* counts, not what it is called.
//!
//! 1. A reference that is not a plain file name (`json:…`, `nbd:…`, `http://…`) is refused whatever it says.
//! 2. What the user names on the command line is not a reference and is not asked about.

use std::path::{Path, PathBuf};

use vellum_core::{Error, ErrorKind, Result};

/// The environment variable that allows directories, separated by colons.
pub const ALLOW_DIRS_VARIABLE: &str = "VELLUM_ALLOW_DIRS";

/// Directories from which references may be opened, besides each image's own.
#[derive(Debug, Clone, Default)]
pub struct Gate {
    allowed: Vec<PathBuf>,
}

impl Gate {
    /// Allows these directories and what is below them. They must be canonical: absolute, without links.
    pub fn allowing(canonical_dirs: Vec<PathBuf>) -> Self {
        Self { allowed: canonical_dirs }
    }

    /// The path that a name in an image means, before links are followed: relative names start at the directory of the
    /// image.
    ///
    /// # Errors
    /// `Refused` for a name that is not a plain file name.
    pub fn resolve(image: &Path, name: &str) -> Result<PathBuf> {
        let plain = name.strip_prefix("file:").unwrap_or(name);
        let before_slash = plain.split('/').next().unwrap_or_default();
        if before_slash.contains(':') || plain.is_empty() || plain.contains('\0') {
            return Err(Error::new(
                ErrorKind::Refused,
                format!("{} refers to {name:?}, which is not a plain file name", image.display()),
            ));
        }
        let dir = image.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Ok(dir.join(plain))
    }

    /// Asks whether `image` may refer to `target`; both canonical.
    ///
    /// # Errors
    /// `Refused`, with the way to allow it.
    pub fn check(&self, image: &Path, target: &Path) -> Result<()> {
        let own = image.parent();
        let is_inside = own.is_some_and(|dir| target.starts_with(dir))
            || self.allowed.iter().any(|dir| target.starts_with(dir));
        if is_inside {
            return Ok(());
        }
        let dir = target.parent().unwrap_or(target);
        Err(Error::new(
            ErrorKind::Refused,
            format!(
                "{} refers to {}, outside its own directory: allow it with `--allow-dir {}` or {ALLOW_DIRS_VARIABLE}",
                image.display(),
                target.display(),
                dir.display()
            ),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_not_files_are_refused() {
        let image = Path::new("/images/a.qcow2");
        for name in [
            "json:{\"driver\":\"file\"}",
            "nbd:localhost:10809",
            "http://host/x",
            "fat:rw:/etc",
            "",
            "nbd+unix:///?s=x",
        ] {
            assert_eq!(Gate::resolve(image, name).unwrap_err().kind(), ErrorKind::Refused, "{name}");
        }
        for (name, path) in [
            ("base.raw", "/images/base.raw"),
            ("../base.raw", "/images/../base.raw"),
            ("/other/base.raw", "/other/base.raw"),
            ("file:base.raw", "/images/base.raw"),
            ("./od:d.raw", "/images/./od:d.raw"),
        ] {
            assert_eq!(Gate::resolve(image, name).unwrap(), Path::new(path));
        }
        assert_eq!(Gate::resolve(Path::new("a.qcow2"), "b").unwrap(), Path::new("./b"));
    }

    #[test]
    fn a_reference_stays_in_the_directory_of_the_image_or_an_allowed_one() {
        let gate = Gate::allowing(vec![PathBuf::from("/templates")]);
        let image = Path::new("/images/a/a.qcow2");
        for target in ["/images/a/base.raw", "/images/a/sub/base.raw", "/templates/x/base.raw"] {
            gate.check(image, Path::new(target)).unwrap();
        }
        for target in ["/images/base.raw", "/etc/shadow", "/images/ab/base.raw", "/templates2/base.raw"] {
            let error = gate.check(image, Path::new(target)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Refused);
            assert!(error.to_string().contains("--allow-dir"), "{error}");
        }
    }
}
