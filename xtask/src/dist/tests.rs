//! The package is installed in a clean root, used there, and removed.
//!
//! What is packaged is the program of the same build as this test. Where there is none, or no dpkg, or the user is not root,
//! the test is skipped as far as it needs them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Plan, container, make, read, replace_dir, tree, version, write};
use crate::shell::{has, output, root_is_running, target_dir};

const EPOCH: &str = "1700000000";

/// The program that lies beside this test.
fn program() -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    let program = own.parent()?.parent()?.join("vellum");
    program.is_file().then_some(program)
}

fn skipped(reason: &str) {
    eprintln!("skipped: {reason}");
}

/// A directory that goes with the test.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Self {
        let dir = target_dir().join("tmp").join(format!("dist-{}", std::process::id()));
        replace_dir(&dir).expect("a directory");
        Self(dir)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

/// The files below, by their paths from there.
fn names(dir: &Path) -> BTreeSet<String> {
    let files = tree::files_below(dir).expect("files");
    let relative = |path: &Path| path.strip_prefix(dir).expect("it is below").display().to_string();
    files.iter().map(|(path, _)| relative(path)).collect()
}

/// Runs the program of this root as if nothing else existed.
fn in_root(root: &Path, arguments: &[&str]) -> String {
    output(Command::new("chroot").arg(root).arg("/usr/bin/vellum").args(arguments)).expect("it runs there")
}

#[test]
fn the_package_is_installed_used_and_removed_with_nothing_left() {
    for tool in ["dpkg", "dpkg-deb", "strip", "gzip", "sha256sum", "ldd", "chroot"] {
        if !has(tool) {
            return skipped(&format!("{tool} is not installed"));
        }
    }
    let Some(binary) = program() else { return skipped("vellum was not built beside this test") };
    let dir = Dir::new();
    let plan = |name: &str| Plan {
        binary: binary.clone(),
        out: dir.0.join(name),
        version: version().expect("a version"),
        epoch: EPOCH.to_owned(),
        compression: "none",
    };
    let made = make(&plan("one")).expect("everything is made");
    let deb = made.deb.as_ref().expect("dpkg-deb is there");
    assert_eq!(read(&made.program).expect("a program")[..4], *b"\x7fELF");
    let checked =
        output(Command::new("sha256sum").args(["--check", "SHA256SUMS"]).current_dir(&plan("one").out));
    assert_eq!(checked.expect("they are right").lines().count(), 3);
    bill_is_whole(&made.sbom);

    // The same again is the same.
    let again = make(&plan("two")).expect("everything is made");
    for (one, other) in made.files().into_iter().zip(again.files()) {
        assert!(read(one) == read(other), "{} differs when it is made again", one.display());
    }
    fs::remove_dir_all(plan("two").out).expect("it is there");

    let unpacked = dir.0.join("unpacked");
    output(Command::new("dpkg-deb").arg("-x").args([deb, &unpacked])).expect("it can be unpacked");
    let files = names(&unpacked);
    for name in [
        "usr/bin/vellum",
        "usr/lib/systemd/system/vellum@.service",
        "usr/share/man/man1/vellum.1.gz",
        "usr/share/man/man1/vellum-serve.1.gz",
        "usr/share/bash-completion/completions/vellum",
        "usr/share/zsh/vendor-completions/_vellum",
        "usr/share/fish/vendor_completions.d/vellum.fish",
        "usr/share/doc/vellum/copyright",
        "usr/share/doc/vellum/changelog.gz",
        "usr/share/doc/vellum/vellum.cdx.json",
        "etc/vellum/vellum.toml",
    ] {
        assert!(files.contains(name), "the package has no {name}: {files:?}");
    }
    let control = output(Command::new("dpkg-deb").arg("-f").arg(deb)).expect("fields");
    assert!(control.contains(&format!("Version: {}", plan("one").version)), "{control}");
    let version = output(Command::new(unpacked.join("usr/bin/vellum")).arg("--version")).expect("it runs");
    assert!(version.starts_with("vellum ") && version.contains("commit: "), "{version}");

    if !root_is_running() || output(Command::new("chroot").args(["/", "true"])).is_err() {
        return skipped("only root can install a package in a root of its own");
    }
    container_runs(&made.container);
    let root = dir.0.join("root");
    for part in ["info", "updates", "triggers"] {
        fs::create_dir_all(root.join("var/lib/dpkg").join(part)).expect("a clean root");
    }
    write(&root.join("var/lib/dpkg/status"), "").expect("a clean root");
    let log = dir.0.join("dpkg.log");
    let dpkg = |arguments: &[&str]| {
        let mut command = Command::new("dpkg");
        command.arg(format!("--root={}", root.display())).arg(format!("--log={}", log.display()));
        // The libraries are not packages there; scripts find an empty root. A slim system leaves documents out.
        command.args(["--force-depends", "--force-script-chrootless", "--path-include=/*"]).args(arguments);
        output(command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")).expect("dpkg does it")
    };
    dpkg(&["--install", deb.to_str().expect("text")]);
    let of_dpkg = |name: &String| !name.starts_with("var/lib/dpkg/");
    let installed: BTreeSet<String> = names(&root).into_iter().filter(of_dpkg).collect();
    assert_eq!(installed, files);
    // It runs from there, with its libraries and with its configuration file.
    let libraries = container::libraries(&made.program).expect("libraries");
    for library in &libraries {
        let copy = root.join(library.strip_prefix("/").expect("absolute"));
        write(&copy, read(library).expect("a library")).expect("a copy");
        super::make_executable(&copy).expect("a mode");
    }
    assert_eq!(in_root(&root, &["--version"]), version);
    in_root(&root, &["create", "-q", "/disk.qcow2", "1M"]);
    assert!(in_root(&root, &["info", "/disk.qcow2"]).contains("qcow2"));
    fs::remove_file(root.join("disk.qcow2")).expect("an image");
    for library in &libraries {
        fs::remove_file(root.join(library.strip_prefix("/").expect("absolute"))).expect("a copy");
    }
    dpkg(&["--remove", "vellum"]);
    let left: Vec<String> = names(&root).into_iter().filter(of_dpkg).collect();
    assert_eq!(left, ["etc/vellum/vellum.toml"], "configuration stays until it is purged");
    dpkg(&["--purge", "vellum"]);
    let left: Vec<String> = names(&root).into_iter().filter(of_dpkg).collect();
    assert!(left.is_empty(), "{left:?}");
    for gone in ["etc/vellum", "usr/share/doc/vellum", "usr/bin"] {
        assert!(!root.join(gone).exists(), "{gone} is left");
    }
}

/// The root of the container image is all that the program needs.
fn container_runs(container: &Path) {
    let file = fs::read_to_string(container.join("Containerfile")).expect("a Containerfile");
    assert!(file.contains("FROM scratch") && file.contains("COPY rootfs/ /"), "{file}");
    assert!(in_root(&container.join("rootfs"), &["--version"]).starts_with("vellum "));
}

/// The bill is JSON, and each crate has what a reader of bills looks for.
fn bill_is_whole(sbom: &Path) {
    let bill: serde_json::Value = serde_json::from_slice(&read(sbom).expect("a bill")).expect("JSON");
    assert_eq!((&bill["bomFormat"], &bill["specVersion"]), (&"CycloneDX".into(), &"1.5".into()));
    assert_eq!(bill["metadata"]["timestamp"], "2023-11-14T22:13:20Z");
    assert_eq!(bill["metadata"]["component"]["name"], "vellum");
    let crates = bill["components"].as_array().expect("a list");
    assert!(crates.len() > 50, "{} crates", crates.len());
    let text = |one: &serde_json::Value, key: &str| one[key].as_str().unwrap_or_default().to_owned();
    for one in crates {
        assert_eq!(text(one, "purl"), format!("pkg:cargo/{}@{}", text(one, "name"), text(one, "version")));
        assert!(
            one["licenses"][0]["expression"].as_str().is_some_and(|licence| !licence.is_empty()),
            "{one}"
        );
        let is_ours = text(one, "name").starts_with("vellum-");
        assert!(is_ours || one["hashes"][0]["content"].as_str().is_some_and(|sum| sum.len() == 64), "{one}");
    }
    let known: BTreeSet<String> = crates.iter().map(|one| text(one, "bom-ref")).collect();
    for row in bill["dependencies"].as_array().expect("a list") {
        let below = row["dependsOn"].as_array().expect("a list");
        assert!(below.iter().all(|one| known.contains(one.as_str().expect("text"))), "{row}");
    }
}
