//! What an image for containers is built from: the program, the libraries that it loads, and nothing else.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Plan, deb, make_executable, read, replace_dir, write};
use crate::shell::{output, root};

/// A directory for `docker build` or `podman build`: the Containerfile, and `rootfs`, which becomes the whole image.
pub(super) fn make(plan: &Plan, program: &Path) -> Result<PathBuf, String> {
    let dir = plan.out.join("container");
    replace_dir(&dir)?;
    write(&dir.join("Containerfile"), read(&root().join("packaging/Containerfile"))?)?;
    let rootfs = dir.join("rootfs");
    let installed = rootfs.join("usr/bin/vellum");
    write(&installed, read(program)?)?;
    make_executable(&installed)?;
    for library in libraries(program)? {
        let copy = rootfs.join(library.strip_prefix("/").unwrap_or(&library));
        write(&copy, read(&library)?)?;
        make_executable(&copy)?;
    }
    Ok(dir)
}

/// The libraries that the program loads, and their loader: paths of this system. A static program has none.
pub(super) fn libraries(program: &Path) -> Result<Vec<PathBuf>, String> {
    if deb::glibc_of(&read(program)?).is_none() {
        return Ok(Vec::new());
    }
    let listed = output(Command::new("ldd").arg(program))?;
    let paths = listed.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    Ok(paths.map(PathBuf::from).collect())
}
