//! What the tests of all commands share: the programs, and numbers out of a report.

#![allow(dead_code, reason = "each test uses a part")]

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The program that is looked at lies beside the one that looks, where the whole workspace was built.
pub(crate) fn vellum() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_BIN_EXE_vellum-bench")).with_file_name("vellum");
    path.exists().then_some(path)
}

pub(crate) const NO_VELLUM: &str = "vellum is not built beside vellum-bench (cargo build -p vellum)";

#[expect(clippy::print_stderr, reason = "a test that is skipped says why")]
pub(crate) fn skipped(reason: &str) {
    eprintln!("skipped: {reason}");
}

pub(crate) fn is_installed(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

/// `vellum-bench COMMAND` with images in the directory of the tests: its report, and the table it printed.
pub(crate) fn report(command: &str, vellum: &Path, arguments: &[&str]) -> (Value, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_vellum-bench"))
        .arg(command)
        .args(["--output", "json", "--dir", env!("CARGO_TARGET_TMPDIR"), "--vellum"])
        .arg(vellum)
        .args(arguments)
        .output()
        .expect("vellum-bench runs");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{told}");
    (serde_json::from_slice(&output.stdout).expect("the report is JSON"), told)
}

pub(crate) fn number(value: &Value, place: &str) -> u64 {
    value.pointer(place).and_then(Value::as_u64).unwrap_or_else(|| panic!("no number {place} in {value}"))
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
pub(crate) fn per(count: u64, unit: u64) -> f64 {
    assert!(unit > 0, "the guest did something");
    count as f64 / unit as f64
}
