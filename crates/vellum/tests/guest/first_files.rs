//! What a guest's kernel has at first, where the guest serves disks to itself: our program is among it.

use std::path::{Path, PathBuf};

use super::cpio::Archive;
use super::debian::Debian;
use super::support::dir::Dir;
use super::support::program::{has, path_text, succeed};

/// What is needed of the host's programs in the guest.
const PROGRAMS: [&str; 2] = [env!("CARGO_BIN_EXE_vellum"), "/usr/sbin/mke2fs"];

/// An archive with busybox, our program and another with their libraries, these modules, and the story.
pub fn first_files(debian: &Debian, dir: &Dir, init: &[u8], modules: &[&str]) -> PathBuf {
    let mut archive = Archive::default();
    let mut dirs = vec!["bin".to_owned(), "dev".to_owned(), "modules".to_owned()];
    let mut files: Vec<(String, Vec<u8>)> = Vec::new();
    let read =
        |path: &Path| std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    for program in PROGRAMS {
        let name = Path::new(program).file_name().and_then(|name| name.to_str()).expect("a name");
        files.push((format!("bin/{name}"), read(&stripped(dir, program, name))));
        // A line is `NAME => PATH (ADDRESS)`, or the loader's path alone.
        for library in succeed("ldd", &[program]).split_whitespace().filter(|word| word.starts_with('/')) {
            files.push((library.trim_start_matches('/').to_owned(), read(Path::new(library))));
        }
    }
    files.sort();
    files.dedup_by(|one, other| one.0 == other.0);
    for (name, _) in &files {
        let parents = Path::new(name).ancestors().skip(1).filter_map(Path::to_str);
        dirs.extend(parents.filter(|parent| !parent.is_empty()).map(str::to_owned));
    }
    dirs.sort();
    dirs.dedup();
    for dir in &dirs {
        archive.directory(dir);
    }
    archive.character_device("dev/console", 5, 1);
    archive.program("bin/busybox", &read(&debian.busybox));
    archive.program("init", init);
    for (name, bytes) in &files {
        archive.program(name, bytes);
    }
    let mut order = String::new();
    for (name, bytes) in debian.modules(modules) {
        archive.program(&format!("modules/{name}"), &bytes);
        order += &format!("{name}\n");
    }
    archive.program("modules/order", order.as_bytes());
    let path = dir.join("first.cpio");
    std::fs::write(&path, archive.finish()).expect("the kernel's first files");
    path
}

/// The program without debug information, if that can be stripped: it is most of it.
fn stripped(dir: &Dir, program: &str, name: &str) -> PathBuf {
    if !has("strip") {
        return program.into();
    }
    let small = dir.join(name);
    succeed("strip", &["-o", path_text(&small), program]);
    small
}
