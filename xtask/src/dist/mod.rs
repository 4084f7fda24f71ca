//! `cargo xtask dist`: what users install, in one directory.
//!
//! ```text
//!   release build ──► strip ──► vellum-VERSION-TARGET
//!                        │ it writes its manual pages and completions itself
//!                        ├────► vellum_VERSION_ARCH.deb      tree.rs, deb.rs
//!                        └────► container/                   container.rs: a Containerfile and all that it copies
//!   Cargo.lock ─────────────► vellum-VERSION.cdx.json        sbom.rs
//!   all of them ────────────► SHA256SUMS
//! ```
//!
//! 1. The same tree, toolchain and directory give the same bytes. Times are `SOURCE_DATE_EPOCH`, or those of the commit; owners
//!    are root; the paths of the machine are taken out of the program.
//! 2. Only what a Debian system has is called, and nothing is downloaded but the crates.
//! 3. `--binary` packages a program that was built otherwise: the tests package theirs.

mod container;
mod deb;
mod sbom;
#[cfg(test)]
mod tests;
mod tree;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Outcome;
use crate::shell::{cargo, has, output, root, run as run_command, target_dir};

/// What is packaged, and how.
struct Plan {
    /// The program; a copy of it is stripped.
    binary: PathBuf,
    /// Where everything goes. What is there of an earlier run is replaced.
    out: PathBuf,
    /// The version of the program.
    version: String,
    /// All times, in seconds since 1970.
    epoch: String,
    /// How the package is compressed, as `dpkg-deb -Z` names it.
    compression: &'static str,
}

/// The target for static programs, and the C compilers that build for it. Some crates contain C.
fn musl() -> Option<String> {
    let target = format!("{}-unknown-linux-musl", std::env::consts::ARCH);
    let sysroot = output(Command::new("rustc").args(["--print", "sysroot"])).ok()?;
    let has_target = Path::new(&sysroot).join("lib/rustlib").join(&target).join("lib").is_dir();
    let compilers = [format!("{}-linux-musl-gcc", std::env::consts::ARCH), "musl-gcc".to_owned()];
    let has_compiler = compilers.iter().any(|name| has(name));
    (has_target && has_compiler).then_some(target)
}

pub(crate) fn run(arguments: &[String]) -> Outcome {
    let (mut binary, mut out) = (None, target_dir().join("dist"));
    let mut rest = arguments.iter();
    while let Some(option) = rest.next() {
        let value = rest.next().ok_or_else(|| format!("{option} takes a value"))?;
        match option.as_str() {
            "--binary" => binary = Some(PathBuf::from(value)),
            "--out" => out = PathBuf::from(value),
            _ => return Err(format!("{option} is not an option; there are --binary FILE and --out DIR")),
        }
    }
    let binary = match binary {
        Some(binary) => binary,
        None => build()?,
    };
    let plan = Plan { binary, out, version: version()?, epoch: epoch(), compression: "xz" };
    let made = make(&plan)?;
    if made.deb.is_none() {
        println!("no Debian package: dpkg-deb is not installed");
    }
    for path in made.files().into_iter().chain([&made.container]) {
        println!("{}", path.display());
    }
    Ok(())
}

/// What was made.
struct Made {
    program: PathBuf,
    sbom: PathBuf,
    /// None where `dpkg-deb` is not installed.
    deb: Option<PathBuf>,
    sums: PathBuf,
    /// A directory.
    container: PathBuf,
}

impl Made {
    fn files(&self) -> Vec<&PathBuf> {
        [&self.program, &self.sbom].into_iter().chain(&self.deb).chain([&self.sums]).collect()
    }
}

/// Makes everything.
fn make(plan: &Plan) -> Result<Made, String> {
    let out = &plan.out;
    replace_dir(out)?;
    let program = stripped(plan)?;
    let sbom = out.join(format!("vellum-{}.cdx.json", plan.version));
    write(&sbom, sbom::of_vellum(&plan.version, &plan.epoch)?)?;
    let deb = if has("dpkg-deb") { Some(deb::make(plan, &program, &sbom)?) } else { None };
    let container = container::make(plan, &program)?;
    let made = Made { program, sbom, deb, sums: out.join("SHA256SUMS"), container };
    let summed = made.files().into_iter().filter(|path| **path != made.sums);
    let names: Vec<_> = summed.filter_map(|path| path.file_name()).collect();
    write(&made.sums, output(Command::new("sha256sum").args(names).current_dir(out))? + "\n")?;
    Ok(made)
}

/// The release build; says which.
fn build() -> Result<PathBuf, String> {
    let mut command = cargo(&["build", "--release", "--locked", "-p", "vellum"]);
    let mut dir = target_dir();
    match musl() {
        Some(target) => {
            println!("building a static program, for {target}");
            command.args(["--target", &target]);
            dir.push(target);
        }
        None => println!(
            "building for this system's C library: the target {}-unknown-linux-musl or musl-gcc is not installed",
            std::env::consts::ARCH
        ),
    }
    // Panics name source files: by their place in the tree, and not by that of the machine.
    let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    let mut flags: Vec<String> = flags.split_whitespace().map(str::to_owned).collect();
    flags.push(format!("--remap-path-prefix={}=.", root().display()));
    let home = std::env::var("CARGO_HOME").or_else(|_| std::env::var("HOME").map(|home| home + "/.cargo"));
    flags.extend(home.map(|home| format!("--remap-path-prefix={home}=cargo")));
    run_command(command.env_remove("RUSTFLAGS").env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f")))?;
    Ok(dir.join("release/vellum"))
}

/// A copy without what only debuggers read.
fn stripped(plan: &Plan) -> Result<PathBuf, String> {
    let bytes = read(&plan.binary)?;
    let library = if deb::glibc_of(&bytes).is_some() { "gnu" } else { "musl" };
    let arch = std::env::consts::ARCH;
    let program = plan.out.join(format!("vellum-{}-{arch}-linux-{library}", plan.version));
    write(&program, bytes)?;
    make_executable(&program)?;
    output(Command::new("strip").arg(&program))?;
    Ok(program)
}

fn version() -> Result<String, String> {
    let id = output(&mut cargo(&["pkgid", "-p", "vellum", "--locked", "--offline"]))?;
    let version = id.rsplit(['#', '@']).next().unwrap_or_default();
    Ok(version.to_owned())
}

/// What the environment says, else the time of the commit; in a tarball without either, that of the changelog.
fn epoch() -> String {
    if let Ok(epoch) = std::env::var("SOURCE_DATE_EPOCH") {
        return epoch;
    }
    let of_commit = output(Command::new("git").args(["log", "-1", "--format=%ct"]).current_dir(root()));
    let of_file = || output(Command::new("date").args(["+%s", "-r", "CHANGELOG.md"]).current_dir(root()));
    of_commit.or_else(|_| of_file()).unwrap_or_else(|_| "0".to_owned())
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error| format!("can't read {}: {error}", path.display()))
}

/// Writes a file that everybody may read, with the directories above it.
fn write(path: &Path, bytes: impl AsRef<[u8]>) -> Outcome {
    let fail = |error: std::io::Error| format!("can't write {}: {error}", path.display());
    fs::create_dir_all(path.parent().expect("a file is in a directory")).map_err(fail)?;
    fs::write(path, bytes).map_err(fail)?;
    set_mode(path, 0o644)
}

fn make_executable(path: &Path) -> Outcome {
    set_mode(path, 0o755)
}

fn set_mode(path: &Path, mode: u32) -> Outcome {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .map_err(|error| format!("can't set the mode of {}: {error}", path.display()))
}

fn replace_dir(dir: &Path) -> Outcome {
    let fail = |error: std::io::Error| format!("can't empty {}: {error}", dir.display());
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(fail(error)),
        _ => {}
    }
    fs::create_dir_all(dir).map_err(fail)
}
