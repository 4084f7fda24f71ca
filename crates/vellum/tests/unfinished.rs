//! A conversion that cannot be finished leaves nothing behind that somebody could take for the whole disk, or says so.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn vellum(arguments: &[&str], directory: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vellum")).args(arguments).current_dir(directory).output().unwrap()
}

/// A directory with a source whose second half cannot be read: an entry of its L1 table is damaged.
fn directory(name: &str) -> PathBuf {
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir(&directory).unwrap();
    let made = vellum(&["create", "-f", "qcow2", "-o", "cluster_size=4k", "source.qcow2", "4M"], &directory);
    assert!(made.status.success(), "{made:?}");
    let source = directory.join("source.qcow2");
    let mut bytes = std::fs::read(&source).unwrap();
    let l1 = usize::try_from(u64::from_be_bytes(bytes[40..48].try_into().unwrap())).unwrap();
    // Each table maps 2 MiB. No table lies between two clusters.
    bytes[l1 + 8..l1 + 16].copy_from_slice(&0x8000_0000_0000_0200u64.to_be_bytes());
    std::fs::write(&source, bytes).unwrap();
    directory
}

fn convert(directory: &Path, more: &[&str]) -> String {
    let arguments = [&["convert"], more, &["source.qcow2", "target"]].concat();
    let output = vellum(&arguments, directory);
    assert!(!output.status.success(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_new_file_is_removed() {
    for format in ["raw", "qcow2"] {
        let directory = directory(&format!("new-{format}"));
        let said = convert(&directory, &["-O", format]);
        assert!(!directory.join("target").exists(), "{said}");
        assert!(said.contains("removed"), "{said}");
    }
}

#[test]
fn a_file_that_was_there_is_emptied() {
    for format in ["raw", "qcow2"] {
        let directory = directory(&format!("old-{format}"));
        std::fs::write(directory.join("target"), vec![7; 100_000]).unwrap();
        let said = convert(&directory, &["-O", format]);
        assert_eq!(std::fs::metadata(directory.join("target")).unwrap().len(), 0, "{said}");
        assert!(said.contains("target was emptied"), "{said}");
    }
}

#[test]
fn a_target_that_was_given_is_left_and_named() {
    let directory = directory("given");
    std::fs::write(directory.join("target"), vec![7; 4 << 20]).unwrap();
    let said = convert(&directory, &["-n", "-O", "raw"]);
    assert_eq!(std::fs::metadata(directory.join("target")).unwrap().len(), 4 << 20);
    assert!(said.contains("target holds a copy that is not whole"), "{said}");
}
