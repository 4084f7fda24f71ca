//! The Debian packages that the tests want, and one of Python. For root, missing ones are installed; for other users their names
//! are printed.
//!
//! Nothing here is a failure: a test whose program is absent says so and passes. So this only reports.

use std::process::Command;

use crate::kernel::KERNELS;
use crate::shell::{has, output, root_is_running, run as run_command, target_dir};
use crate::{Outcome, apt, qemu};

/// What a test calls, where Debian has it, and what for.
struct Want {
    what: Need,
    package: &'static str,
    purpose: &'static str,
}

enum Need {
    Program(&'static str),
    /// A module of Python.
    Python(&'static str),
}

use Need::{Program, Python};

const WANTS: [Want; 30] = [
    want(Program("qemu-img"), "qemu-utils", "the other opinion on images: check, compare, convert"),
    want(Program("qemu-io"), "qemu-utils", "writes what is read here, and reads what is written here"),
    want(Program("qemu-system-x86_64"), "qemu-system-x86", "boots a guest from a served clone"),
    want(Program("nbdinfo"), "libnbd-bin", "NBD: asks what a server offers"),
    want(Program("nbdcopy"), "libnbd-bin", "NBD: copies with several connections"),
    want(Python("nbd"), "python3-libnbd", "NBD: a client that can be told each step"),
    want(Program("nbdkit"), "nbdkit", "NBD: its plugin is one more client"),
    want(Program("fio"), "fio", "NBD: load that verifies what it reads"),
    want(Program("mkfs.ext4"), "e2fsprogs", "the root file system of the guest"),
    want(Program("debugfs"), "e2fsprogs", "reads what the guest wrote without mounting it"),
    want(Program("mkfs.xfs"), "xfsprogs", "a second file system to put images on"),
    want(Program("xfs_db"), "xfsprogs", "says where a guest's files are"),
    want(Program("btrfs"), "btrfs-progs", "a third one, on a disk that is served as a file"),
    want(Python("sqlite3"), "libpython3-stdlib", "a database on such a file system"),
    want(Python("cryptography"), "python3-cryptography", "AES for the other checker of encrypted images"),
    want(Program("cryptsetup"), "cryptsetup-bin", "makes volumes of LUKS version 2"),
    want(Program("busybox"), "busybox-static", "the programs of the guest"),
    want(Program("cpio"), "cpio", "packs the guest's first file system"),
    want(Program("xz"), "xz-utils", "unpacks modules of the guest's kernel"),
    want(Program("strace"), "strace", "sees which system calls are made"),
    want(Program("valgrind"), "valgrind", "counts the instructions of a request"),
    want(Program("losetup"), "mount", "block devices over files"),
    want(Program("setpriv"), "util-linux", "tests of the locks as another user"),
    want(Program("curl"), "curl", "makes a bucket in an object store"),
    want(Program("ceph-mon"), "ceph-mon", "Ceph: a cluster has a monitor"),
    want(Program("ceph-osd"), "ceph-osd", "Ceph: and a place for objects"),
    want(Program("monmaptool"), "ceph-base", "Ceph: what the monitor starts with"),
    want(Program("ceph"), "ceph-common", "Ceph: users and pools"),
    want(Program("rbd"), "ceph-common", "Ceph: makes images and snapshots"),
    want(Program("c++"), "g++", "builds libFuzzer"),
];

const fn want(what: Need, package: &'static str, purpose: &'static str) -> Want {
    Want { what, package, purpose }
}

impl Want {
    fn name(&self) -> &'static str {
        match self.what {
            Program(name) | Python(name) => name,
        }
    }

    fn is_there(&self) -> bool {
        match self.what {
            Program(name) => has(name),
            Python(module) => {
                // The one of Debian has the packages of Debian, whichever comes first in the path.
                let import = format!("import {module}");
                let knows = |python| output(Command::new(python).args(["-c", &import])).is_ok();
                knows("python3") || knows("/usr/bin/python3")
            }
        }
    }
}

/// Lists what is wanted and what of it is there, and gets the rest.
pub(crate) fn run() -> Outcome {
    for want in &WANTS {
        let there = if want.is_there() { " " } else { "-" };
        println!("{there} {:20} {:16} {}", want.name(), want.package, want.purpose);
    }
    get();
    Ok(())
}

/// Installs what is missing, as far as possible, and reports what it does.
pub(crate) fn get() {
    let missing: Vec<&Want> = WANTS.iter().filter(|want| !want.is_there()).collect();
    if !missing.is_empty() {
        for want in &missing {
            eprintln!("packages: {} is missing, from {}: {}", want.name(), want.package, want.purpose);
        }
        let mut names: Vec<&str> = missing.iter().map(|want| want.package).collect();
        names.sort_unstable();
        names.dedup();
        install(&names);
    }
    if let Err(reason) = get_moto() {
        eprintln!(
            "packages: no moto, an object store of Python: {reason}; tests with a real one are skipped"
        );
    }
    for kernel in KERNELS {
        if let Err(reason) = kernel.get() {
            eprintln!("packages: no kernel for the guest that {}: {reason}", kernel.purpose);
        }
    }
}

/// moto is an object store that knows conditions. Debian does not have it, so it gets an environment of its own.
fn get_moto() -> Outcome {
    let place = target_dir().join("moto");
    if place.join("bin/moto_server").exists() {
        return Ok(());
    }
    eprintln!("packages: installing moto into {}", place.display());
    run_command(Command::new("python3").args(["-m", "venv"]).arg(&place))?;
    run_command(Command::new(place.join("bin/pip")).args(["install", "-q", "moto[server,s3]==5.2.5"]))
}

fn install(names: &[&str]) {
    if !has("apt-get") {
        eprintln!("packages: this is not Debian; the tests that want these programs are skipped");
        return;
    }
    if !root_is_running() {
        eprintln!("packages: root would install them: apt-get install {}", names.join(" "));
        return;
    }
    eprintln!("packages: installing {}", names.join(" "));
    if let Err(reason) = run_command(&mut apt::get(&["update"])) {
        eprintln!("packages: {reason}; going on with the lists there are");
    }
    // Programs of one QEMU have to be of one version, which may need care. They do not hold up the others.
    let (of_qemu, others): (Vec<&str>, Vec<&str>) = names.iter().partition(|name| name.starts_with("qemu-"));
    let outcomes = [
        if others.is_empty() { Ok(()) } else { apt::install(&others) },
        if of_qemu.is_empty() { Ok(()) } else { qemu::install() },
    ];
    for reason in outcomes.into_iter().filter_map(Result::err) {
        eprintln!("packages: {reason}; the tests that want them are skipped");
    }
}
