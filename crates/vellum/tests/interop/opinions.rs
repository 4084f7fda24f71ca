//! The reports of QEMU's tools and ours on one image, side by side.

use serde_json::Value;

use crate::image::{Image, content};
use crate::support::first_difference;
use crate::support::program::{path_text, qemu_dump, run, succeed, vellum};

/// Both programs read the same, and report the same about the image.
pub fn both_agree(image: &Image) {
    reads_equal(image);
    snapshots_are_unchanged(image);
    checks_agree(image);
    infos_agree(image);
    maps_agree(image);
}

/// `vellum convert` produces what must be there.
fn reads_equal(image: &Image) {
    let raw = image.dir.join("converted.raw");
    vellum(&["convert", "-O", "raw", image.text(), path_text(&raw)]).answer();
    let difference = first_difference(&content(&raw), &image.model);
    assert_eq!(difference, None, "{}: vellum convert", image.config);
    std::fs::remove_file(raw).expect("the copy");
}

/// The snapshots read as when they were made, in both programs.
pub fn snapshots_are_unchanged(image: &Image) {
    for (name, model) in &image.snapshots {
        let raw = image.dir.join("snapshot.raw");
        vellum(&["convert", "-l", name, "-O", "raw", image.text(), path_text(&raw)]).answer();
        let difference = first_difference(&content(&raw), model);
        assert_eq!(difference, None, "{}: vellum convert -l {name}", image.config);
        std::fs::remove_file(raw).expect("the copy");
        let theirs = qemu_dump(&image.path, "qcow2", Some(name));
        assert_eq!(first_difference(&theirs, model), None, "{}: snapshot {name} in QEMU", image.config);
    }
}

/// QEMU finds nothing wrong, and reads what must be there.
pub fn qemu_is_content(image: &Image, when: &str) {
    let ran = run("qemu-img", &["check", "-f", "qcow2", image.text()]);
    let config = image.config;
    let is_clean = ran.code == 0 && ran.out.contains("No errors were found");
    assert!(is_clean, "{config}, {when}: {}{}", ran.out, ran.err);
    let dump = qemu_dump(&image.path, "qcow2", None);
    assert_eq!(first_difference(&dump, &image.model), None, "{config}, {when}: QEMU reads something else");
    let info = succeed("qemu-img", &["info", "-f", "qcow2", image.text()]);
    assert!(!info.contains("cleanly shut down: no"), "{config}, {when}: {info}");
}

fn checks_agree(image: &Image) {
    let arguments = ["check", "-f", "qcow2", "--output", "json", image.text()];
    let theirs = run("qemu-img", &arguments).json();
    let ours = vellum(&arguments).json();
    assert_eq!(ours, theirs, "{}: check", image.config);
}

fn infos_agree(image: &Image) {
    let arguments = ["info", "-f", "qcow2", "--output", "json", image.text()];
    let theirs = run("qemu-img", &arguments).json();
    let mut ours = vellum(&arguments).json();
    take_journal(image, &mut ours);
    assert_eq!(ours, theirs, "{}: info", image.config);
    let arguments = ["info", "-f", "qcow2", "--backing-chain", "--output", "json", image.text()];
    let theirs = run("qemu-img", &arguments).json();
    let mut ours = vellum(&arguments).json();
    take_journal(image, &mut ours[0]);
    assert_eq!(ours, theirs, "{}: info --backing-chain", image.config);
}

/// Removes from our answer what QEMU does not know: a journal, closed, where there is to be one.
fn take_journal(image: &Image, info: &mut Value) {
    let data = info["format-specific"]["data"].as_object_mut().expect("what qcow2 has");
    let journal = data.remove("journal").unwrap_or_default();
    let wanted = if image.config.journal { Value::Bool(false) } else { Value::Null };
    assert_eq!(journal["needs-recovery"], wanted, "{}: {journal}", image.config);
}

/// One row of a map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    start: u64,
    end: u64,
    depth: u64,
    present: bool,
    zero: bool,
    data: bool,
    compressed: bool,
    offset: Option<u64>,
}

impl Row {
    fn of(value: &Value) -> Self {
        let number = |name: &str| value[name].as_u64().unwrap_or_else(|| panic!("{name} in {value}"));
        let is = |name: &str| value[name].as_bool().unwrap_or_else(|| panic!("{name} in {value}"));
        Self {
            start: number("start"),
            end: number("start") + number("length"),
            depth: number("depth"),
            present: is("present"),
            zero: is("zero"),
            data: is("data"),
            compressed: is("compressed"),
            offset: value.get("offset").map(|offset| offset.as_u64().expect("an offset")),
        }
    }

    /// Its report on its bytes from `start` on.
    fn from(&self, start: u64) -> Self {
        let offset = self.offset.map(|offset| offset + (start - self.start));
        Self { start, end: 0, offset, ..self.clone() }
    }
}

fn rows(map: &Value) -> Vec<Row> {
    map.as_array().expect("a list").iter().map(Row::of).collect()
}

/// The maps agree on every byte, however they are cut.
fn maps_agree(image: &Image) {
    let arguments = ["map", "-f", "qcow2", "--output", "json", image.text()];
    let theirs = rows(&run("qemu-img", &arguments).json());
    let ours = rows(&vellum(&arguments).json());
    let size = image.model.len() as u64;
    let mut at = 0;
    let (mut left, mut right) = (ours.iter().peekable(), theirs.iter().peekable());
    while at < size {
        let (Some(one), Some(other)) = (left.peek(), right.peek()) else {
            panic!("{}: a map ends at {at:#x} of {size:#x}", image.config);
        };
        let end = one.end.min(other.end);
        let (ours, theirs) = (one.from(at), other.from(at));
        let bytes = &image.model[to_usize(at)..to_usize(end)];
        let agree = means_the_same(&ours, &theirs, bytes);
        assert!(agree, "{}: map\nours   {ours:?}\ntheirs {theirs:?}", image.config);
        at = end;
        left.next_if(|row| row.end == at);
        right.next_if(|row| row.end == at);
    }
    assert!(left.next().is_none() && right.next().is_none(), "{}: a map passes the end", image.config);
}

/// Two legitimate differences. Vellum does not report the place of a qcow2 cluster that reads as zero and
/// keeps its place. QEMU also queries the file system, and reports data as zero that is in a hole of the
/// image's own file; there it must be.
fn means_the_same(ours: &Row, theirs: &Row, bytes: &[u8]) -> bool {
    let keeps_place = ours.zero && ours.offset.is_none();
    let is_hole = theirs.data && theirs.zero && ours.data && vellum_core::is_zero(bytes);
    let theirs = Row {
        offset: theirs.offset.filter(|_| !keeps_place),
        zero: theirs.zero && !is_hole,
        ..theirs.clone()
    };
    *ours == theirs && (!ours.zero || vellum_core::is_zero(bytes))
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).expect("within the model")
}
