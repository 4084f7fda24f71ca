//! The images that the commands work on.
//!
//! The tables of a full image in no order are those of one in order, with the entries of each L2 table permuted: every
//! cluster is named once, so refcounts stay right, and no two neighbours lie beside each other.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use vellum_core::{Context, Random, Result};
use vellum_lab::programs;

use super::cases::Case;
use crate::images::settle;

/// Runs of data have this many bytes, and so have two thirds of holes behind each of them.
const RUN: u64 = 4 << 20;
const CLUSTER: u64 = 64 << 10;

/// Makes everything that is only read.
pub(super) fn make(dir: &Path, size: u64, compressed: u64, full: u64) -> Result<()> {
    let qemu =
        |line: &str| programs::run(Command::new("qemu-img").args(line.split_whitespace()).current_dir(dir));
    let raw = |name: &str, size| write(&dir.join(name), size).context(|| format!("can't write {name}"));
    raw("disk.raw", size)?;
    raw("small.raw", compressed)?;
    qemu("convert -f raw -O raw disk.raw again.raw")?;
    qemu("convert -f raw -O qcow2 disk.raw disk.qcow2")?;
    // The same disk, but for a few places.
    copy(dir, "disk.qcow2", "other.qcow2")?;
    // In a directory of their own, where no image is below them: who commits looks for others beside it.
    fs::create_dir(dir.join("kept")).context(|| "can't make a directory")?;
    for (over, under) in [("over-under.qcow2", "under.qcow2"), ("over-disk.qcow2", "disk.qcow2")] {
        copy(dir, "disk.qcow2", "under.qcow2")?;
        qemu(&format!("create -q -f qcow2 -b {under} -F qcow2 {over}"))?;
        change(dir, over, size, 4)?;
        let kept = dir.join("kept").join(over);
        fs::rename(dir.join(over), kept).context(|| format!("can't keep {over}"))?;
    }
    change(dir, "other.qcow2", size, 16)?;
    qemu(&format!("create -q -f qcow2 -o preallocation=metadata full.qcow2 {full}"))?;
    copy(dir, "full.qcow2", "mixed.qcow2")?;
    mix(&dir.join("mixed.qcow2")).context(|| "can't mix mixed.qcow2")?;
    for name in
        ["disk.raw", "small.raw", "again.raw", "disk.qcow2", "other.qcow2", "full.qcow2", "mixed.qcow2"]
    {
        settle(&dir.join(name))?;
    }
    Ok(())
}

/// Copies what a way of the case changes, and removes what another one has made.
pub(super) fn prepare(dir: &Path, case: &Case) -> Result<()> {
    clear(dir, case);
    for (from, to) in case.copies {
        copy(dir, from, to)?;
        settle(&dir.join(to))?;
    }
    Ok(())
}

/// A copy with the same holes: a full image is nearly all holes.
fn copy(dir: &Path, from: &str, to: &str) -> Result<()> {
    programs::run(Command::new("cp").args(["--sparse=always", from, to]).current_dir(dir))
}

/// Removes what the ways of the case have made.
pub(super) fn clear(dir: &Path, case: &Case) {
    let made = case.makes.iter().chain(case.copies.iter().map(|(_, to)| to));
    made.for_each(|name| drop(fs::remove_file(dir.join(name))));
}

/// A disk of which a third is data. A half of each sector compresses.
fn write(path: &Path, size: u64) -> io::Result<()> {
    let mut file = File::create(path)?;
    let mut random = Random::from_seed(size);
    let mut run = vec![0; usize::try_from(RUN).expect("4 MiB")];
    for (number, at) in (0_u64..).zip((0..size).step_by(usize::try_from(3 * RUN).expect("12 MiB"))) {
        for (index, sector) in (0_u64..).zip(run.chunks_exact_mut(512)) {
            let (noise, text) = sector.split_at_mut(256);
            random.fill(noise);
            let line = format!("record {:012} ", number * 8192 + index);
            text.iter_mut().zip(line.bytes().cycle()).for_each(|(byte, letter)| *byte = letter);
        }
        file.seek(SeekFrom::Start(at))?;
        file.write_all(&run)?;
    }
    file.set_len(size)
}

/// Overwrites one run in `one_of`.
fn change(dir: &Path, image: &str, size: u64, one_of: u64) -> Result<()> {
    let step = usize::try_from(3 * RUN * one_of).expect("small");
    let mut command = Command::new("qemu-io");
    command.args(["-f", "qcow2"]);
    for at in (0..size).step_by(step) {
        command.arg("-c").arg(format!("write -P 7 {} {}", at + RUN / 2, RUN));
    }
    programs::run(command.arg(image).current_dir(dir))
}

/// Permutes the entries of each L2 table.
fn mix(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let mut header = [0; 104];
    file.read_exact_at(&mut header, 0)?;
    let word =
        |bytes: &[u8], at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let entries = u32::from_be_bytes(header[36..40].try_into().expect("four bytes"));
    if header[..4] != *b"QFI\xfb" || header[20..24] != [0, 0, 0, 16] {
        return Err(io::Error::other("it is no qcow2 image with clusters of 64 KiB"));
    }
    let mut l1 = vec![0; entries as usize * 8];
    file.read_exact_at(&mut l1, word(&header, 40))?;
    let mut random = Random::from_seed(1);
    let mut table = vec![0; usize::try_from(CLUSTER).expect("64 KiB")];
    for entry in l1.chunks_exact(8) {
        let at = word(entry, 0) & 0x00ff_ffff_ffff_fe00;
        if at == 0 {
            continue;
        }
        file.read_exact_at(&mut table, at)?;
        let mut words: Vec<u64> = table.chunks_exact(8).map(|entry| word(entry, 0)).collect();
        let used = words.iter().take_while(|word| **word != 0).count();
        for index in (1..used).rev() {
            words.swap(index, random.index(index + 1));
        }
        table
            .chunks_exact_mut(8)
            .zip(&words)
            .for_each(|(entry, word)| entry.copy_from_slice(&word.to_be_bytes()));
        file.write_all_at(&table, at)?;
    }
    file.sync_all()
}
