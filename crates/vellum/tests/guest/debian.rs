//! What Debian provides for the guest: a kernel with its modules, and busybox.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// An unpacked kernel package, and the busybox that goes with it.
pub struct Debian {
    /// Has `boot/vmlinuz-*` and `lib/modules/*`.
    pub dir: PathBuf,
    /// `6.1.0-56-cloud-amd64` and the like.
    pub release: String,
    pub busybox: PathBuf,
}

impl Debian {
    /// What `VELLUM_GUEST_KERNEL_DIR` names, or what `cargo xtask packages` left beside the build; or what is
    /// missing.
    pub fn find() -> Result<Self, String> {
        Self::find_in("VELLUM_GUEST_KERNEL_DIR", "kernel")
    }

    /// As above, for a newer kernel, which has the driver for block devices that programs serve:
    /// `VELLUM_UBLK_KERNEL_DIR`.
    pub fn find_with_ublk() -> Result<Self, String> {
        let debian = Self::find_in("VELLUM_UBLK_KERNEL_DIR", "kernel-backports")?;
        let mut files = BTreeMap::new();
        find_modules(&debian.dir.join("lib/modules").join(&debian.release), &mut files);
        if files.contains_key("ublk_drv") {
            Ok(debian)
        } else {
            Err(format!("the kernel {} has no ublk_drv", debian.release))
        }
    }

    fn find_in(variable: &str, name: &str) -> Result<Self, String> {
        let chosen = std::env::var_os(variable).map(PathBuf::from);
        let beside = || Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("guest").join(name);
        let dir = chosen.unwrap_or_else(beside);
        let boot = std::fs::read_dir(dir.join("boot")).into_iter().flatten().flatten();
        let mut releases: Vec<String> = boot
            .filter_map(|entry| Some(entry.file_name().to_str()?.strip_prefix("vmlinuz-")?.to_owned()))
            .filter(|release| dir.join("lib/modules").join(release).is_dir())
            .collect();
        releases.sort();
        let release = releases.pop().ok_or_else(|| {
            format!("no kernel for a guest in {}; `cargo xtask packages` gets one", dir.display())
        })?;
        let places = [dir.join("bin/busybox"), "/bin/busybox".into(), "/usr/bin/busybox".into()];
        let busybox = places.into_iter().find(|path| stands_alone(path)).ok_or(
            "no static busybox for a guest (Debian's busybox-static); `cargo xtask packages` installs it",
        )?;
        Ok(Self { dir, release, busybox })
    }

    pub fn kernel(&self) -> PathBuf {
        self.dir.join("boot").join(format!("vmlinuz-{}", self.release))
    }

    /// The modules that these need, themselves included, each after those it depends on; what the kernel has
    /// built in is left out. Each with its file name and its bytes.
    pub fn modules(&self, wanted: &[&str]) -> Vec<(String, Vec<u8>)> {
        let root = self.dir.join("lib/modules").join(&self.release);
        let built_in =
            std::fs::read_to_string(root.join("modules.builtin")).expect("the list of what is built in");
        let built_in: Vec<String> = built_in.lines().map(|line| module_name(Path::new(line))).collect();
        let mut files = BTreeMap::new();
        find_modules(&root, &mut files);
        let mut loaded: Vec<(String, Vec<u8>)> = Vec::new();
        for name in wanted {
            load(name, &files, &built_in, &mut loaded);
        }
        loaded.into_iter().map(|(name, bytes)| (format!("{name}.ko"), bytes)).collect()
    }
}

/// Whether it is a program that needs no libraries: such a program names no loader.
fn stands_alone(path: &Path) -> bool {
    let loader = b"/ld-linux";
    std::fs::read(path).is_ok_and(|bytes| !bytes.windows(loader.len()).any(|window| window == loader))
}

/// The kernel treats `-` and `_` in the name of a module alike.
fn module_name(path: &Path) -> String {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.split('.').next().unwrap_or_default().replace('-', "_")
}

fn find_modules(dir: &Path, files: &mut BTreeMap<String, PathBuf>) {
    for entry in std::fs::read_dir(dir).expect("the directory of modules") {
        let path = entry.expect("an entry").path();
        if path.is_dir() && !path.is_symlink() {
            find_modules(&path, files);
        } else if path.to_str().is_some_and(|path| path.ends_with(".ko") || path.ends_with(".ko.xz")) {
            files.insert(module_name(&path), path);
        }
    }
}

fn load(
    name: &str,
    files: &BTreeMap<String, PathBuf>,
    built_in: &[String],
    loaded: &mut Vec<(String, Vec<u8>)>,
) {
    let is = |other: &String| other == name;
    if built_in.iter().any(is) || loaded.iter().any(|(other, _)| is(other)) {
        return;
    }
    let path = files.get(name).unwrap_or_else(|| panic!("the kernel has no module {name}"));
    let bytes = read_module(path);
    for needed in dependencies(&bytes) {
        load(&needed, files, built_in, loaded);
    }
    loaded.push((name.to_owned(), bytes));
}

fn read_module(path: &Path) -> Vec<u8> {
    if path.extension().is_some_and(|extension| extension == "xz") {
        let unpacked =
            Command::new("xz").args(["-d", "-c"]).arg(path).output().expect("xz, to unpack a module");
        assert!(
            unpacked.status.success(),
            "{}: {}",
            path.display(),
            String::from_utf8_lossy(&unpacked.stderr)
        );
        return unpacked.stdout;
    }
    std::fs::read(path).expect("a module")
}

/// The dependencies of a module: among the strings in it is one `depends=a,b`.
fn dependencies(module: &[u8]) -> Vec<String> {
    let key = b"\0depends=";
    let Some(at) = module.windows(key.len()).position(|window| window == key) else { return Vec::new() };
    let value = module[at + key.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    let value = String::from_utf8_lossy(value);
    value.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect()
}
