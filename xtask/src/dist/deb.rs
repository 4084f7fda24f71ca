//! The Debian package: the tree, and what `dpkg` wants to know, built by `dpkg-deb`.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Plan, make_executable, read, replace_dir, set_mode, tree, write};
use crate::shell::{output, root};

/// Configuration that an upgrade keeps as the administrator left it.
const CONFFILES: &str = "/etc/vellum/vellum.toml\n";

const SCRIPTS: [&str; 3] = ["postinst", "prerm", "postrm"];

pub(super) fn make(plan: &Plan, program: &Path, sbom: &Path) -> Result<PathBuf, String> {
    let stage = plan.out.join("stage");
    replace_dir(&stage)?;
    tree::lay_out(program, sbom, &stage)?;
    let bytes: u64 = tree::files_below(&stage)?.iter().map(|(_, len)| len.next_multiple_of(4096)).sum();
    let arch = architecture();
    let control = stage.join("DEBIAN");
    let depends = depends(&read(program)?);
    write(
        &control.join("control"),
        format!(
            "Package: vellum\nVersion: {}\nArchitecture: {arch}\nMaintainer: The Vellum developers <vellum@localhost>\n\
             Section: admin\nPriority: optional\nInstalled-Size: {}\n{depends}\
             Description: copy-on-write disks for virtual machines\n \
             Vellum creates, clones, checks, converts and serves disk images (raw, qcow2 and a\n \
             native format) over NBD and vhost-user-blk, as files and as block devices.\n",
            plan.version,
            bytes / 1024,
        ),
    )?;
    write(&control.join("conffiles"), CONFFILES)?;
    for name in SCRIPTS {
        let script = control.join(name);
        write(&script, read(&root().join("packaging/deb").join(name))?)?;
        make_executable(&script)?;
    }
    set_mode(&control, 0o755)?;
    let deb = plan.out.join(format!("vellum_{}_{arch}.deb", plan.version));
    let mut build = Command::new("dpkg-deb");
    build.args(["--root-owner-group", &format!("-Z{}", plan.compression), "--build"]).args([&stage, &deb]);
    output(build.env("SOURCE_DATE_EPOCH", &plan.epoch))?;
    std::fs::remove_dir_all(&stage).map_err(|error| format!("{}: {error}", stage.display()))?;
    Ok(deb)
}

/// What Debian calls this processor.
fn architecture() -> String {
    let own = || match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    output(Command::new("dpkg").arg("--print-architecture")).unwrap_or_else(|_| own().to_owned())
}

/// The field for the libraries that the program loads, if it loads any.
fn depends(program: &[u8]) -> String {
    let Some((major, minor)) = glibc_of(program) else { return String::new() };
    let libgcc = if contains(program, b"libgcc_s.so.1") { ", libgcc-s1" } else { "" };
    format!("Depends: libc6 (>= {major}.{minor}){libgcc}\n")
}

/// The newest version of the C library that a program names; none if it is static.
pub(super) fn glibc_of(program: &[u8]) -> Option<(u32, u32)> {
    const NAME: &[u8] = b"GLIBC_";
    let at = program.windows(NAME.len()).enumerate().filter(|(_, window)| *window == NAME);
    let versions = at.filter_map(|(at, _)| {
        let rest = &program[at + NAME.len()..];
        let end = rest.iter().position(|byte| !byte.is_ascii_digit() && *byte != b'.')?;
        let mut numbers = std::str::from_utf8(&rest[..end]).ok()?.split('.').map(str::parse);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    });
    versions.max()
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}
