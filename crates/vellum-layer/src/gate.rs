//! Which files and URLs an image may refer to.
//!
//! An image can come from anywhere, its header can name any file as its backing or data file, and the guest
//! of a raw disk can write a header of its own. So a reference is followed only if a trusted source allows
//! it:
//!
//! | the image | its backing file, its data file for reading | its data file for writing |
//! |---|---|---|
//! | a file whose format is declared | in its own directory, and where the user allows | where the user allows it, or names it |
//! | a file whose format is guessed | where the user allows | the same |
//! | a block device | where the user allows | the same |
//!
//! 1. A format is *declared* when the user states it, when the image above states it, or when the file's name
//!    agrees with the file's content ([`Trust::of`]). A name that disagrees is refused: the file was written
//!    by the guest or by accident.
//! 2. A directory of devices holds the disks of many users, so a device's own directory allows nothing.
//! 3. A header never decides which file is written: not even one beside the image, because it may be another
//!    user's disk.
//! 4. Links are resolved before the check: what counts is where the file *is*, not its name.
//! 5. A URL in a file's header is followed only where the user allows a prefix of it ([`UrlPrefix`]). An image that is at
//!    a URL may also refer to URLs in its own directory, and never to a local file.
//! 6. Any other reference that is not a plain file name (`json:…`, `fat:…`) is always refused.
//! 7. What the user names on the command line is not a reference, and is not checked.

use std::path::{Path, PathBuf};

use vellum_core::{Context, Error, ErrorKind, Result, Url, UrlPrefix};
use vellum_format::FormatKind;

/// The environment variable that allows directories, separated by colons.
pub const ALLOW_DIRS_VARIABLE: &str = "VELLUM_ALLOW_DIRS";

/// The environment variable that allows prefixes of URLs, separated by spaces.
pub const ALLOW_URLS_VARIABLE: &str = "VELLUM_ALLOW_URLS";

/// Whether a trusted source states which format an image has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// The user, the image above, or its name.
    Declared,
    /// No: the format was derived from the file's content.
    Guessed(FormatKind),
}

impl Trust {
    /// Of a file that was probed as this format, and whose format was not stated. `names` are all the names
    /// by which it is known.
    ///
    /// # Errors
    /// `Refused` when a name suggests another format.
    pub fn of(names: &[&Path], guessed: FormatKind) -> Result<Self> {
        let said = |name: &&Path| Some((name.display().to_string(), FormatKind::of_name(name)?));
        let said: Vec<(String, FormatKind)> = names.iter().filter_map(said).collect();
        let Some((name, format)) = said.iter().find(|(_, format)| *format != guessed) else {
            return Ok(if said.is_empty() { Self::Guessed(guessed) } else { Self::Declared });
        };
        let why = match (format, guessed) {
            (FormatKind::Raw, _) => format!(
                "{name} is expected to be a raw disk but begins like a {guessed} image, which its guest may have \
                 written: use `-f raw` if it is a raw disk, or `-f {guessed}` if it is a {guessed} image"
            ),
            (_, FormatKind::Raw) => format!(
                "{name} is expected to be a {format} image but does not begin like one: it is damaged, or, if it is \
                 a raw disk, use `-f raw`"
            ),
            _ => format!(
                "{name} is expected to be a {format} image but begins like a {guessed} image: use `-f {guessed}` if \
                 it is one"
            ),
        };
        Err(Error::new(ErrorKind::Refused, why))
    }
}

/// An image that names another file.
#[derive(Debug, Clone, Copy)]
pub struct Referrer<'a> {
    /// Where it is: absolute, links followed.
    pub canonical: &'a Path,
    /// It is a block device.
    pub is_device: bool,
    /// The source that states its format.
    pub trust: Trust,
}

/// What the user allows, besides what the table above does.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Gate {
    dirs: Vec<PathBuf>,
    urls: Vec<UrlPrefix>,
    data_files: Vec<PathBuf>,
}

impl Gate {
    /// Allows these directories and what is below them. They must be canonical: absolute, without links.
    pub fn allowing(canonical_dirs: Vec<PathBuf>) -> Self {
        Self { dirs: canonical_dirs, ..Self::default() }
    }

    /// Also allows the URLs that begin like this.
    #[must_use]
    pub fn with_urls(self, urls: Vec<UrlPrefix>) -> Self {
        Self { urls, ..self }
    }

    /// Also allows these data files to be read and written. They must be canonical.
    #[must_use]
    pub fn with_data_files(self, canonical_files: Vec<PathBuf>) -> Self {
        Self { data_files: canonical_files, ..self }
    }

    /// The path that a name in an image means, before links are followed: relative names start at the
    /// directory of the image. A URL is a path in its one spelling.
    ///
    /// # Errors
    /// `Refused` for a name that is neither a plain file name nor a URL.
    pub fn resolve(image: &Path, name: &str) -> Result<PathBuf> {
        if let Some(image) = Url::of_path(image) {
            return Ok(image?.join(name)?.to_string().into());
        }
        if let Some(url) = Url::parse(name) {
            return Ok(url.context(|| format!("{} refers to a URL", image.display()))?.to_string().into());
        }
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

    fn allows(&self, target: &Path) -> bool {
        self.dirs.iter().any(|dir| target.starts_with(dir))
    }

    /// Asks whether an image may read `target`, which is canonical.
    ///
    /// # Errors
    /// `Refused`, with the way to allow it.
    pub fn check(&self, image: Referrer<'_>, target: &Path) -> Result<()> {
        let Referrer { canonical, is_device, trust } = image;
        if let Some(url) = Url::of_path(target) {
            return self.check_url(image, &url?);
        }
        let is_beside = canonical.parent().is_some_and(|dir| target.starts_with(dir));
        if self.allows(target) || is_beside && !is_device && trust == Trust::Declared {
            return Ok(());
        }
        let (name, to) = (canonical.display(), target.display());
        let why = match trust {
            _ if is_device => format!(
                "{name} refers to {to}, and references from a block device must be allowed explicitly"
            ),
            Trust::Guessed(format) if is_beside => format!(
                "{name} refers to {to}, but only its content suggests that it is a {format} image: use `-f \
                 {format}` if it is one, or"
            ),
            _ => format!("{name} refers to {to}, outside its own directory:"),
        };
        let colon = if is_device { ":" } else { "" };
        Err(refused(format!("{why}{colon} allow it with {}", allow_dir(target))))
    }

    fn check_url(&self, image: Referrer<'_>, target: &Url) -> Result<()> {
        if self.urls.iter().any(|prefix| prefix.allows(target)) {
            return Ok(());
        }
        let is_beside = matches!(Url::of_path(image.canonical), Some(Ok(image)) if image.is_beside(target));
        if is_beside && image.trust == Trust::Declared {
            return Ok(());
        }
        Err(refused(format!(
            "{} refers to {target}, and references to URLs must be allowed explicitly: allow it with `--allow-url \
             {target}` or {ALLOW_URLS_VARIABLE}={target}, or with a prefix that ends at a slash",
            image.canonical.display()
        )))
    }

    /// Asks whether an image may have `target`, which is canonical, as its data file.
    ///
    /// # Errors
    /// `Refused`, with the way to allow it.
    pub fn check_data_file(&self, image: Referrer<'_>, target: &Path, is_written: bool) -> Result<()> {
        if self.data_files.iter().any(|file| file == target) {
            return Ok(());
        }
        if is_written && Url::of_path(target).is_some() {
            let (name, to) = (image.canonical.display(), target.display());
            return Err(refused(format!("{name} keeps its data at {to}, and a URL cannot be written")));
        }
        if !is_written || self.allows(target) {
            return self.check(image, target);
        }
        let (name, to) = (image.canonical.display(), target.display());
        Err(refused(format!(
            "{name} keeps its data in {to}, and a header alone must not decide which file is written: if that is \
             the data file of this image, use `--data-file {to}`, or allow its directory with {}",
            allow_dir(target)
        )))
    }
}

fn refused(why: String) -> Error {
    Error::new(ErrorKind::Refused, why)
}

fn allow_dir(target: &Path) -> String {
    let dir = target.parent().unwrap_or(target).display();
    format!("`--allow-dir {dir}` or {ALLOW_DIRS_VARIABLE}={dir}")
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
            "http:host/x",
            "fat:rw:/etc",
            "",
            "http://host/a/../b",
            "http://user:password@host/b",
            "ssh://host/b",
        ] {
            assert_eq!(Gate::resolve(image, name).unwrap_err().kind(), ErrorKind::Refused, "{name}");
        }
        for (name, path) in [
            ("base.raw", "/images/base.raw"),
            ("../base.raw", "/images/../base.raw"),
            ("/other/base.raw", "/other/base.raw"),
            ("file:base.raw", "/images/base.raw"),
            ("./od:d.raw", "/images/./od:d.raw"),
            ("HTTP://Host:80/b", "http://host/b"),
        ] {
            assert_eq!(Gate::resolve(image, name).unwrap(), Path::new(path));
        }
        assert_eq!(Gate::resolve(Path::new("a.qcow2"), "b").unwrap(), Path::new("./b"));
        let at_url = Path::new("http://host/d/a.qcow2");
        assert_eq!(Gate::resolve(at_url, "/etc/shadow").unwrap(), Path::new("http://host/etc/shadow"));
        for name in ["file:/etc/shadow", "../b", "json:{}"] {
            assert_eq!(Gate::resolve(at_url, name).unwrap_err().kind(), ErrorKind::Refused, "{name}");
        }
    }

    #[test]
    fn a_url_is_followed_only_where_the_user_allows_it_or_beside_an_image_at_a_url() {
        let allowed = |prefix: &str| Gate::default().with_urls(vec![UrlPrefix::parse(prefix).unwrap()]);
        let target = Path::new("http://host/t/base.raw");
        let file = image("/images/a.qcow2");
        is_refused(
            Gate::default().check(file, target),
            &["--allow-url http://host/t/base.raw", "VELLUM_ALLOW_URLS="],
        );
        is_refused(Gate::allowing(vec![PathBuf::from("/")]).check(file, target), &["--allow-url"]);
        is_refused(allowed("http://host.evil.example/").check(file, target), &["--allow-url"]);
        allowed("http://host/t/").check(file, target).unwrap();
        allowed("http://host/t/")
            .check(Referrer { trust: Trust::Guessed(FormatKind::Qcow2), ..file }, target)
            .unwrap();
        let beside = image("http://host/t/a.qcow2");
        Gate::default().check(beside, target).unwrap();
        is_refused(Gate::default().check(image("http://host/u/a.qcow2"), target), &["--allow-url"]);
        is_refused(Gate::default().check(beside, Path::new("/etc/shadow")), &["outside"]);
        is_refused(allowed("http://host/").check_data_file(file, target, true), &["cannot be written"]);
    }

    fn image(path: &str) -> Referrer<'_> {
        Referrer { canonical: Path::new(path), is_device: false, trust: Trust::Declared }
    }

    #[track_caller]
    fn is_refused(asked: Result<()>, words: &[&str]) {
        let error = asked.expect_err("it is refused");
        assert_eq!(error.kind(), ErrorKind::Refused);
        for word in words {
            assert!(error.to_string().contains(word), "{word:?} is not in: {error}");
        }
    }

    #[test]
    fn a_reference_stays_in_the_directory_of_the_image_or_an_allowed_one() {
        let gate = Gate::allowing(vec![PathBuf::from("/templates")]);
        let image = image("/images/a/a.qcow2");
        for target in ["/images/a/base.raw", "/images/a/sub/base.raw", "/templates/x/base.raw"] {
            gate.check(image, Path::new(target)).unwrap();
        }
        for target in ["/images/base.raw", "/etc/shadow", "/images/ab/base.raw", "/templates2/base.raw"] {
            is_refused(gate.check(image, Path::new(target)), &["--allow-dir", "outside"]);
        }
    }

    #[test]
    fn the_directory_of_a_device_or_of_an_image_whose_format_is_guessed_allows_nothing() {
        let gate = Gate::allowing(vec![PathBuf::from("/templates")]);
        let device = Referrer { is_device: true, ..image("/dev/loop0") };
        is_refused(gate.check(device, Path::new("/dev/loop1")), &["device", "--allow-dir /dev`"]);
        let guessed = Referrer { trust: Trust::Guessed(FormatKind::Qcow2), ..image("/images/disk.img") };
        is_refused(gate.check(guessed, Path::new("/images/base.raw")), &["-f qcow2", "--allow-dir /images"]);
        is_refused(gate.check(guessed, Path::new("/etc/shadow")), &["outside"]);
        for image in [device, guessed] {
            gate.check(image, Path::new("/templates/base.raw")).unwrap();
        }
    }

    #[test]
    fn a_data_file_is_written_only_when_the_user_names_it_or_its_directory() {
        let gate = Gate::allowing(vec![PathBuf::from("/data")]);
        let (image, beside) = (image("/images/a.qcow2"), Path::new("/images/a.data"));
        gate.check_data_file(image, beside, false).unwrap();
        is_refused(
            gate.check_data_file(image, beside, true),
            &["--data-file /images/a.data", "--allow-dir /images"],
        );
        gate.check_data_file(image, Path::new("/data/a"), true).unwrap();
        let named = gate.with_data_files(vec![beside.to_owned()]);
        named.check_data_file(image, beside, true).unwrap();
        let device = Referrer { is_device: true, ..image };
        named.check_data_file(device, beside, true).unwrap();
        is_refused(named.check_data_file(image, Path::new("/images/b.data"), true), &["--data-file"]);
        is_refused(named.check(image, Path::new("/etc/shadow")), &["outside"]);
    }

    #[test]
    fn a_format_is_declared_by_a_name_that_agrees_and_refused_where_one_does_not() {
        use FormatKind::{Native, Qcow2, Raw};
        let trust = |names: &[&str], guessed| {
            let names: Vec<&Path> = names.iter().map(Path::new).collect();
            Trust::of(&names, guessed).map_err(|error| error.to_string())
        };
        for (name, guessed) in [("a.qcow2", Qcow2), ("A.QCOW2", Qcow2), ("a.vlm", Native), ("a.raw", Raw)] {
            assert_eq!(trust(&[name], guessed), Ok(Trust::Declared), "{name}");
        }
        for name in ["disk.img", "disk", "disk.bin", "raw", ".qcow2"] {
            assert_eq!(trust(&[name], Qcow2), Ok(Trust::Guessed(Qcow2)), "{name}");
        }
        assert_eq!(trust(&["/dev/vg/web", "/dev/dm-3"], Qcow2), Ok(Trust::Guessed(Qcow2)));
        assert_eq!(trust(&["link", "/images/a.qcow2"], Qcow2), Ok(Trust::Declared));
        for (names, guessed, words) in [
            (&["guest.raw"][..], Qcow2, ["-f raw", "-f qcow2"]),
            (&["guest.raw"], Native, ["-f raw", "-f vellum"]),
            (&["link.qcow2", "/images/guest.raw"], Qcow2, ["/images/guest.raw", "-f raw"]),
            (&["a.qcow2"], Raw, ["damaged", "-f raw"]),
            (&["a.vlm"], Qcow2, ["a vellum image", "-f qcow2"]),
        ] {
            let why = trust(names, guessed).expect_err("it is refused");
            assert!(words.iter().all(|word| why.contains(word)), "{why}");
        }
    }
}
