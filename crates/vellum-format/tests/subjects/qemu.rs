//! QEMU's changes of an image, and its verdict on one.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use vellum_sim::Content;

/// A file that is removed when it is no longer needed.
struct Scratch(PathBuf);

impl Scratch {
    fn new(kind: &str) -> Self {
        static FILES: AtomicU32 = AtomicU32::new(0);
        let name = format!("explored-{}-{}.{kind}", std::process::id(), FILES.fetch_add(1, Relaxed));
        Self(Path::new(env!("CARGO_TARGET_TMPDIR")).join(name))
    }

    fn holding(kind: &str, content: &Content) -> std::io::Result<Self> {
        let new = Self::new(kind);
        content.write_to(&mut File::create(&new.0)?)?;
        Ok(new)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Runs a program; nothing when it is not there.
fn run(program: &str, arguments: &[&str], file: &Path) -> Option<Output> {
    match Command::new(program).args(arguments).arg(file).output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        outcome => Some(outcome.unwrap_or_else(|error| panic!("{program}: {error}"))),
    }
}

/// The image after QEMU has written to it and made two snapshots, and what the guest sees of it. Clusters and
/// tables are shared with both, with one, and with none.
#[allow(clippy::print_stderr, reason = "that is where a test says what it leaves out")]
pub(crate) fn with_snapshots(empty: &Content, far: u64) -> Option<(Content, Content)> {
    let image = Scratch::holding("qcow2", empty).unwrap();
    let steps = [
        ("qemu-io", vec![format!("write -P 1 16384 24576"), format!("write -P 2 {far} 16384")]),
        ("qemu-img", vec!["one".to_owned()]),
        ("qemu-io", vec![format!("write -P 3 32768 4096")]),
        ("qemu-img", vec!["two".to_owned()]),
        ("qemu-io", vec![format!("write -P 4 20480 4096")]),
    ];
    for (program, words) in &steps {
        let mut arguments = match *program {
            "qemu-io" => vec!["-f", "qcow2"],
            _ => vec!["snapshot"],
        };
        arguments.extend(words.iter().flat_map(|word| ["-c", word.as_str()]));
        let Some(output) = run(program, &arguments, &image.0) else {
            eprintln!("skipped: {program} is not here, so there is nobody to make snapshots");
            return None;
        };
        assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    }
    let raw = Scratch::new("raw");
    let arguments = ["convert", "-f", "qcow2", "-O", "raw", image.0.to_str().unwrap()];
    let converted = run("qemu-img", &arguments, &raw.0).expect("it was there just now");
    assert!(converted.status.success(), "{converted:?}");
    let read = |file: &Scratch| Content::of(&std::fs::read(&file.0).unwrap());
    Some((read(&image), read(&raw)))
}

/// QEMU's verdict on an image, where QEMU is installed: whether it is sound, and whether it reads as the
/// guest sees it.
pub(crate) fn check(
    image: &Content,
    guest: &Content,
    may_leak: bool,
    secret: Option<&str>,
) -> Result<(), String> {
    let file = Scratch::holding("qcow2", image).map_err(|error| error.to_string())?;
    let object = format!("secret,id=s,data={}", secret.unwrap_or("none"));
    let encrypted = format!("driver=qcow2,file.filename={},encrypt.key-secret=s", file.0.display());
    let output = match secret {
        None => run("qemu-img", &["check", "-f", "qcow2"], &file.0),
        Some(_) => run("qemu-img", &["check", "--object", &object, "--image-opts"], Path::new(&encrypted)),
    };
    let Some(output) = output else { return Ok(()) };
    match output.status.code() {
        Some(0) => {}
        Some(3) if may_leak => {}
        code => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            return Err(format!("qemu-img check ends with {code:?}: {text}"));
        }
    }
    let raw = Scratch::holding("raw", guest).map_err(|error| error.to_string())?;
    if secret.is_some() {
        let raw = format!("driver=raw,file.filename={}", raw.0.display());
        let arguments = ["compare", "--object", &object, "--image-opts", &encrypted];
        return match run("qemu-img", &arguments, Path::new(&raw)) {
            Some(output) if !output.status.success() => {
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                Err(format!(
                    "qemu-img reads something else: {text}{}",
                    String::from_utf8_lossy(&output.stderr)
                ))
            }
            _ => Ok(()),
        };
    }
    let both = format!("blkverify:{}:{}", raw.0.display(), file.0.display());
    let read = format!("read 0 {}", guest.len());
    match run("qemu-io", &["-r", "-c", &read], Path::new(&both)) {
        Some(output) if !output.status.success() || !output.stderr.is_empty() => {
            Err(format!("qemu-io reads something else: {}", String::from_utf8_lossy(&output.stderr)))
        }
        _ => Ok(()),
    }
}
