//! How many instructions a request takes in the engine, checked against bounds. A change that makes a request
//! dearer by a seventh fails here, however busy the machine is.
//!
//! `vellum-bench instructions` executes the requests on a disk in memory, under valgrind: N of them and then
//! 2 N. The bounds are the counts with the profile `ci` on x86-64 on 2026-11-24, plus 15 %. A change that
//! exceeds a bound for a good reason raises it; one that lowers a count lowers it.
//!
//! Work in the kernel is not in these counts; `vellum-bench engine` times that.

use std::fs;
use std::path::Path;
use std::process::Command;

const BENCH: &str = env!("CARGO_BIN_EXE_vellum-bench");

/// Which processor's features the C library and others look at differs between machines: the least that all
/// have.
const TUNABLES: &str = "glibc.cpu.hwcaps=-AVX2_Usable,-AVX2,-AVX512F,-AVX512VL,-ERMS,-FSRM,-AVX_Fast_Unaligned_Load,-Prefer_No_VZEROUPPER";

struct Bound {
    what: &'static str,
    /// N.
    operations: u64,
    /// What was counted for one.
    counted: u64,
}

const BOUNDS: [Bound; 7] = [
    Bound { what: "read-raw", operations: 8192, counted: 2_279 },
    Bound { what: "read-flash", operations: 8192, counted: 4_288 },
    Bound { what: "read-qcow2", operations: 8192, counted: 3_936 },
    Bound { what: "read-zoned", operations: 8192, counted: 4_130 },
    Bound { what: "overwrite-qcow2", operations: 8192, counted: 5_903 },
    Bound { what: "allocate-qcow2", operations: 4096, counted: 44_201 },
    Bound { what: "allocate-zoned", operations: 4096, counted: 47_762 },
];

/// Why nothing can be counted here.
fn reason_to_skip() -> Option<String> {
    if !cfg!(target_arch = "x86_64") {
        return Some("the bounds are for x86-64".to_owned());
    }
    // Without optimisation it is another program.
    if !Path::new(BENCH)
        .components()
        .any(|part| ["ci", "release"].iter().any(|name| part.as_os_str() == *name))
    {
        return Some("the bounds are for the profile ci".to_owned());
    }
    match Command::new("valgrind").arg("--version").output() {
        Ok(said) if said.status.success() => None,
        _ => Some("valgrind is not installed".to_owned()),
    }
}

/// All instructions of a run with this many requests.
fn count(dir: &Path, what: &str, operations: u64) -> u64 {
    let log = dir.join(format!("{what}-{operations}.log"));
    let output = Command::new("valgrind")
        .args(["--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"])
        .arg(format!("--log-file={}", log.display()))
        .arg(BENCH)
        .args(["instructions", what, &operations.to_string()])
        .env("GLIBC_TUNABLES", TUNABLES)
        .output()
        .expect("valgrind was there just now");
    let said = fs::read_to_string(&log).unwrap_or_default();
    assert!(output.status.success(), "{what}: {}\n{said}", String::from_utf8_lossy(&output.stderr));
    instructions_in(&said).unwrap_or_else(|| panic!("valgrind says it in another form: {said}"))
}

/// `==1== I   refs:      1,234`
fn instructions_in(said: &str) -> Option<u64> {
    let line = said.lines().find(|line| line.contains("refs:") && line.contains(" I "))?;
    line.rsplit(' ').next()?.replace(',', "").parse().ok()
}

#[test]
fn a_request_takes_no_more_instructions_than_it_did() {
    if let Some(reason) = reason_to_skip() {
        #[expect(clippy::print_stderr, reason = "a test says why it looked at nothing")]
        return eprintln!("skipped: {reason}");
    }
    let dir = std::env::temp_dir().join(format!("vellum-instructions-{}", std::process::id()));
    fs::create_dir_all(&dir).expect("a directory for logs");
    let mut told = String::new();
    let mut has_passed_one = false;
    for Bound { what, operations, counted } in BOUNDS {
        let once = count(&dir, what, operations);
        let twice = count(&dir, what, operations * 2);
        let each = twice.saturating_sub(once) / operations;
        let bound = counted * 115 / 100;
        let is_over = each > bound;
        has_passed_one |= is_over;
        // A workload that does nothing would pass any bound.
        assert!(each > counted / 4, "{what}: {each} instructions are too few: is the request still done?");
        let verdict = if is_over { "OVER" } else { "within" };
        told += &format!("{what}: {each} instructions for one request, {verdict} the bound of {bound}\n");
    }
    drop(fs::remove_dir_all(&dir));
    #[expect(clippy::print_stderr, reason = "for who raises or lowers a bound")]
    {
        eprint!("{told}");
    }
    assert!(
        !has_passed_one,
        "{told}Where they go: valgrind --tool=callgrind {BENCH} instructions WORKLOAD 8192, then callgrind_annotate \
         on the file it leaves, here and before the change.",
    );
}
