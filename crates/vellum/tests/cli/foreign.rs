//! Images of other programs, as `qemu-img` writes them: read as it reads them, by every command that reads.

use std::path::Path;

use serde_json::Value;

use super::support::dir::Dir;
use super::support::patchy;
use super::support::program::{qemu_io, run, succeed, vellum};
use super::support::server::Server;
use super::{MIB, refused};
use crate::requires;

/// Format, options, file name; whether `qemu-img` says which blocks have data.
const IMAGES: [(&str, &str, &str, bool); 16] = [
    ("vmdk", "subformat=monolithicSparse", "a.vmdk", true),
    ("vmdk", "subformat=monolithicFlat", "b.vmdk", false),
    ("vmdk", "subformat=twoGbMaxExtentSparse", "c.vmdk", true),
    ("vmdk", "subformat=twoGbMaxExtentFlat", "d.vmdk", false),
    ("vmdk", "subformat=streamOptimized", "e.vmdk", true),
    ("vmdk", "zeroed_grain=on", "f.vmdk", true),
    ("vdi", "", "a.vdi", true),
    ("vdi", "static=on", "b.vdi", false),
    ("vpc", "", "a.vhd", true),
    ("vpc", "subformat=fixed,force_size=on", "b.vhd", false),
    ("vpc", "subformat=dynamic,force_size=on", "c.vhd", true),
    ("vhdx", "", "a.vhdx", false),
    ("vhdx", "subformat=fixed,block_size=1M", "b.vhdx", false),
    ("qed", "cluster_size=4096", "a.qed", true),
    ("parallels", "", "a.hds", true),
    ("qcow", "", "a.qcow", true),
];

/// Makes one of them of the raw disk; not where `qemu-img` was built without it.
fn make(dir: &Dir, source: &str, format: &str, options: &str, name: &str) -> Option<String> {
    let image = dir.text(name);
    let options = if options.is_empty() { Vec::new() } else { vec!["-o", options] };
    let arguments = [&["convert", "-f", "raw", "-O", format], &options[..], &[source, &image]].concat();
    (run("qemu-img", &arguments).code == 0).then_some(image)
}

/// The runs of a map that read as zero, and those that do not, neighbours joined.
fn zeros(map: &Value) -> Vec<(u64, u64, bool)> {
    let mut runs: Vec<(u64, u64, bool)> = Vec::new();
    for row in map.as_array().expect("rows") {
        let number = |key: &str| row[key].as_u64().expect("a number");
        let (start, end) = (number("start"), number("start") + number("length"));
        // Where nothing is present QEMU does not always say that it is zero.
        let is_zero = row["zero"] == true || row["data"] == false;
        match runs.last_mut() {
            Some(last) if last.2 == is_zero => last.1 = end,
            _ => runs.push((start, end, is_zero)),
        }
    }
    runs
}

#[test]
fn images_of_other_programs_are_read_as_qemu_reads_them() {
    requires!("qemu-img");
    let dir = Dir::new("foreign");
    let source = dir.text("source.raw");
    let mut tried = 0;
    // The first is no multiple of any cluster.
    for (round, len) in [9 * MIB + 1536, 4 * MIB].into_iter().enumerate() {
        std::fs::write(&source, patchy(len, round as u64)).expect("a disk");
        for (format, options, name, is_mapped) in IMAGES {
            let Some(image) = make(&dir, &source, format, options, name) else { continue };
            tried += 1;
            let out = dir.text("out.raw");
            vellum(&["convert", "-O", "raw", &image, &out]).answer();
            let same = succeed("qemu-img", &["compare", "-f", format, "-F", "raw", &image, &out]);
            assert!(same.contains("identical"), "{name}: {same}");
            vellum(&["compare", &image, &source]).answer();
            let info = vellum(&["info", "--output", "json", &image]).json();
            let theirs = succeed("qemu-img", &["info", "-f", format, "--output", "json", &image]);
            let theirs: Value = serde_json::from_str(&theirs).expect("JSON");
            for key in ["format", "virtual-size"] {
                assert_eq!(info[key], theirs[key], "{name}: {key}");
            }
            if theirs["cluster-size"].as_u64().is_some_and(|size| size > 0) && info["cluster-size"].is_u64() {
                assert_eq!(info["cluster-size"], theirs["cluster-size"], "{name}");
            }
            let map = vellum(&["map", "--output", "json", &image]).json();
            if is_mapped {
                let theirs = succeed("qemu-img", &["map", "-f", format, "--output", "json", &image]);
                let theirs: Value = serde_json::from_str(&theirs).expect("JSON");
                assert_eq!(zeros(&map), zeros(&theirs), "{name}");
            }
            for row in map.as_array().expect("rows").iter().filter(|row| row["zero"] == true) {
                let number =
                    |key: &str| usize::try_from(row[key].as_u64().expect("a number")).expect("small");
                let (start, end) = (number("start").min(len), (number("start") + number("length")).min(len));
                let content = std::fs::read(&out).expect("the disk");
                assert!(content[start..end].iter().all(|byte| *byte == 0), "{name}: {row}");
            }
        }
    }
    assert!(tried >= 20, "{tried} images were tried");
}

#[test]
fn an_image_of_another_program_is_served_read_only_and_is_below_others() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("foreign");
    let source = dir.text("source.raw");
    let content = patchy(3 * MIB, 7);
    std::fs::write(&source, &content).expect("a disk");
    for (format, options, name) in [
        ("vmdk", "subformat=twoGbMaxExtentSparse", "a.vmdk"),
        ("vmdk", "subformat=streamOptimized", "b.vmdk"),
        ("vdi", "", "a.vdi"),
        ("vhdx", "", "a.vhdx"),
    ] {
        let Some(image) = make(&dir, &source, format, options, name) else { continue };
        let nbd = format!("unix:{}", dir.text("socket"));
        refused(1, &["only read", "read-only"], &["serve", &image, "--nbd", &nbd]);
        let server = Server::start(&["--read-only", &image]);
        succeed("qemu-img", &["compare", "-f", "raw", "-F", "raw", &source, &server.uri("")]);
        server.stop();
        for top in ["top.qcow2", "top.vlm"] {
            let overlay = dir.text(top);
            let _ = std::fs::remove_file(&overlay);
            vellum(&["create", "-q", "-b", name, "-F", format, &overlay]).answer();
            vellum(&["compare", &overlay, &source]).answer();
            let out = dir.text("flat.raw");
            vellum(&["convert", "-O", "raw", &overlay, &out]).answer();
            assert!(std::fs::read(&out).expect("the disk")[..content.len()] == content, "{top} over {name}");
        }
        if format != "vhdx" {
            qemu_io(&["-f", "qcow2", &dir.text("top.qcow2")], &["read 0 1M".to_owned()]);
        }
    }
}

/// Where an image has several files, an offset alone does not say where its data is.
#[test]
fn a_map_names_the_files_of_an_image_that_has_several() {
    let dir = Dir::new("foreign-parts");
    std::fs::write(dir.text("a.raw"), patchy(MIB, 1)).expect("a file");
    std::fs::write(dir.text("b.raw"), patchy(MIB, 2)).expect("a file");
    let image = dir.text("parts.vmdk");
    let extents = "RW 1024 FLAT \"a.raw\" 0\nRW 1024 FLAT \"b.raw\" 0\nRW 1024 FLAT \"a.raw\" 1024\n";
    std::fs::write(&image, format!("# Disk DescriptorFile\nCID=1\nparentCID=ffffffff\n{extents}"))
        .expect("a descriptor");
    let map = vellum(&["map", "--output", "json", &image]).json();
    let data = map.as_array().expect("rows").iter().filter(|row| row["data"] == true);
    for row in data.clone() {
        let number = |key: &str| row[key].as_u64().expect("a number");
        let (start, half) = (number("start"), MIB as u64 / 2);
        let (wanted, place) = [("a.raw", start), ("b.raw", start % half), ("a.raw", start % half + half)]
            [usize::try_from(start / half).expect("small")];
        assert!(row["filename"].as_str().expect("a name").ends_with(wanted), "{row}");
        assert_eq!(number("offset"), place, "{row}");
    }
    assert!(data.count() >= 3);
    let map = vellum(&["map", "--output", "json", "-f", "raw", &dir.text("a.raw")]).json();
    assert!(map[0]["filename"].is_null(), "one file needs no name: {map}");
    refused(1, &["its data in 2 other files", "vellum convert"], &["check", &image]);
}

/// Images that stand on others: what the image above says of the one below is found and checked.
#[test]
fn the_image_below_an_image_of_another_program_is_read() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("foreign");
    let source = dir.text("base.raw");
    std::fs::write(&source, patchy(2 * MIB, 9)).expect("a disk");
    for (format, base_format) in [("qed", "raw"), ("vmdk", "vmdk"), ("qcow", "raw")] {
        let base = dir.text(&format!("base.{base_format}"));
        if base_format != "raw" {
            succeed("qemu-img", &["convert", "-f", "raw", "-O", base_format, &source, &base]);
        }
        let top = dir.text(&format!("top.{format}"));
        let base_name = Path::new(&base).file_name().expect("a name").to_str().expect("text");
        succeed("qemu-img", &["create", "-q", "-f", format, "-b", base_name, "-F", base_format, &top]);
        qemu_io(&["-f", format, &top], &["write -P 7 100k 70k".to_owned(), "write -P 8 1M 4k".to_owned()]);
        let out = dir.text("out.raw");
        // What has no format of its own in the name of the image must be allowed, as with others.
        vellum(&["convert", "-f", format, "-O", "raw", &top, &out]).answer();
        succeed("qemu-img", &["compare", "-f", format, "-F", "raw", &top, &out]);
        if format == "vmdk" {
            qemu_io(&["-f", format, &base], &["write -P 9 0 4k".to_owned()]);
            refused(1, &["was written since", "CID"], &["convert", "-O", "raw", &top, &out]);
        }
    }
}

#[test]
fn an_extent_elsewhere_is_refused_unless_it_is_allowed() {
    requires!("qemu-img");
    let (dir, other) = (Dir::new("foreign"), Dir::new("foreign-other"));
    let secret = other.text("secret");
    std::fs::write(&secret, vec![7; 65_536]).expect("a file");
    let descriptor = |name: &str| {
        format!(
            "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"monolithicFlat\"\n\
             RW 128 FLAT \"{name}\" 0\n"
        )
    };
    let (image, out) = (dir.text("a.vmdk"), dir.text("out.raw"));
    std::fs::write(&image, descriptor(&secret)).expect("an image");
    refused(1, &["outside its own directory", "--allow-dir"], &["convert", "-O", "raw", &image, &out]);
    vellum(&["info", &image]).answer();
    let allow = other.path().to_str().expect("text");
    vellum(&["convert", "--allow-dir", allow, "-O", "raw", &image, &out]).answer();
    assert_eq!(std::fs::read(&out).expect("the disk"), vec![7; 65_536]);
    std::os::unix::fs::symlink(&secret, dir.text("link")).expect("a link");
    for name in ["link", "../x/../nothing", "json:{}", "http://localhost/x", "fat:/etc"] {
        std::fs::write(&image, descriptor(name)).expect("an image");
        let ran = vellum(&["convert", "-O", "raw", &image, &out]);
        assert_eq!(ran.code, 1, "{name}: {ran:?}");
    }
    // A descriptor whose name does not say what it is may be a guest's: it names nothing, not even beside itself.
    let guessed = dir.text("a.img");
    std::fs::write(dir.text("flat"), vec![7; 65_536]).expect("a file");
    std::fs::write(&guessed, descriptor("flat")).expect("an image");
    refused(1, &["only its content suggests", "-f vmdk"], &["convert", "-O", "raw", &guessed, &out]);
    vellum(&["convert", "-f", "vmdk", "-O", "raw", &guessed, &out]).answer();
}

#[test]
fn images_of_other_programs_are_not_made_or_changed() {
    requires!("qemu-img");
    let dir = Dir::new("foreign");
    let source = dir.text("source.raw");
    std::fs::write(&source, patchy(MIB, 3)).expect("a disk");
    let image = make(&dir, &source, "vdi", "", "a.vdi").expect("qemu-img has VDI");
    let before = std::fs::read(&image).expect("the image");
    refused(1, &["only read"], &["resize", &image, "+1M"]);
    refused(1, &["only read"], &["check", "-r", "all", &image]);
    refused(1, &["only read"], &["convert", "-f", "raw", "-O", "vmdk", &source, &dir.text("b.vmdk")]);
    refused(1, &["only read"], &["convert", "-f", "raw", &source, &dir.text("b.vdi")]);
    refused(1, &["only read"], &["create", "-f", "vpc", &dir.text("b.vhd"), "1M"]);
    vellum(&["check", &image]).answer();
    vellum(&["recover", &image]);
    assert!(std::fs::read(&image).expect("the image") == before, "it was changed");
    assert!(!Path::new(&dir.text("b.vdi")).exists());
}
