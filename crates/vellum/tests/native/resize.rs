//! Larger and smaller disks.

use super::support::dir::Dir;
use super::support::patchy;
use super::support::program::{has, run, vellum};
use super::{MIB, check_says, refused, same};

#[test]
fn disks_of_every_format_grow() {
    let dir = Dir::new("native-resize");
    let mut model = patchy(2 * MIB, 7);
    std::fs::write(dir.join("source.raw"), &model).expect("a source");
    model.resize(5 * MIB, 0);
    std::fs::write(dir.join("model.raw"), &model).expect("a model");
    for (format, options) in [
        ("raw", None),
        ("qcow2", None),
        ("qcow2", Some("cluster_size=4k")),
        ("vellum", None),
        ("vellum", Some("layout=table")),
    ] {
        let image = dir.text("disk");
        let options: Vec<&str> = options.into_iter().flat_map(|list| ["-o", list]).collect();
        let source = dir.text("source.raw");
        let arguments = [&["convert", "-f", "raw", "-O", format], &options[..], &[&source, &image]].concat();
        vellum(&arguments).answer();
        let answer = vellum(&["resize", "-f", format, "--output", "json", &image, "+3M"]).json();
        assert!(answer["virtual-size-before"] == 2 * MIB && answer["virtual-size"] == 5 * MIB, "{answer}");
        same(&image, &dir.text("model.raw"));
        if format == "vellum" {
            check_says(&image, 0);
        }
        if format == "qcow2" {
            assert_eq!(vellum(&["check", &image]).code, 0);
            if has("qemu-img") {
                assert_eq!(run("qemu-img", &["check", &image]).code, 0);
            }
        }
        refused(&["--shrink"], &["resize", "-f", format, &image, "1M"]);
        vellum(&["resize", "-q", "-f", format, "--shrink", &image, "1M"]).answer();
        vellum(&["resize", "-q", "-f", format, &image, "5M"]).answer();
        let mut cut = model[..MIB].to_vec();
        cut.resize(5 * MIB, 0);
        std::fs::write(dir.join("cut.raw"), &cut).expect("a model");
        same(&image, &dir.text("cut.raw"));
        if format == "qcow2" && has("qemu-img") {
            assert_eq!(run("qemu-img", &["check", &image]).code, 0);
        }
    }
    for layout in ["zoned", "table"] {
        let (image, options) = (dir.text("large"), format!("layout={layout}"));
        vellum(&["create", "-q", "-f", "vellum", "-o", &options, &image, "300G"]).answer();
        vellum(&["resize", "-q", &image, "1T"]).answer();
        refused(&["larger units"], &["resize", &image, "100T"]);
        check_says(&image, 0);
    }
    // One that was made small grows as far as its units allow.
    for (layout, size, bytes, parts) in [("zoned", "4T", 1u64 << 42, 2), ("table", "64T", 1 << 46, 1)] {
        let (image, options) = (dir.text("outgrown"), format!("layout={layout}"));
        vellum(&["create", "-q", "-f", "vellum", "-o", &options, &image, "1G"]).answer();
        for size in ["20G", size] {
            vellum(&["resize", "-q", &image, size]).answer();
            check_says(&image, 0);
        }
        vellum(&["snapshot", "create", &image, "large"]).answer();
        check_says(&image, 0);
        let facts = vellum(&["info", "--output", "json", &image]).json();
        assert_eq!(facts["virtual-size"], bytes);
        let data = &facts["format-specific"]["data"];
        assert!(data["table-parts"] == parts && data["size-max"] == bytes, "{facts}");
    }
    refused(&["-f raw"], &["resize", &dir.text("source.raw"), "5M"]);
    refused(&["size"], &["resize", "-f", "raw", &dir.text("source.raw"), "much"]);
}

/// A disk that has snapshots keeps its size; once they are deleted it does not.
#[test]
fn a_disk_that_had_snapshots_can_be_shrunk() {
    let dir = Dir::new("native-shrink");
    let model = patchy(4 * MIB, 3);
    std::fs::write(dir.join("source.raw"), &model).expect("a source");
    for layout in ["table", "zoned"] {
        let image = dir.text("disk.vlm");
        let options = format!("layout={layout},unit_size=64k");
        let source = dir.text("source.raw");
        vellum(&["convert", "-q", "-f", "raw", "-O", "vellum", "-o", &options, &source, &image]).answer();
        for name in ["one", "two"] {
            vellum(&["snapshot", "create", &image, name]).answer();
        }
        refused(&["delete them first"], &["resize", "--shrink", &image, "1M"]);
        for name in ["one", "two"] {
            vellum(&["snapshot", "delete", &image, name]).answer();
        }
        vellum(&["resize", "-q", "--shrink", &image, "1M"]).answer();
        check_says(&image, 0);
        vellum(&["resize", "-q", &image, "5M"]).answer();
        check_says(&image, 0);
        let mut cut = model[..MIB].to_vec();
        cut.resize(5 * MIB, 0);
        std::fs::write(dir.join("cut.raw"), &cut).expect("a model");
        same(&image, &dir.text("cut.raw"));
        vellum(&["snapshot", "create", &image, "three"]).answer();
        check_says(&image, 0);
        std::fs::remove_file(&image).expect("removed");
    }
}

#[test]
fn what_a_longer_backing_image_has_behind_the_end_does_not_show() {
    let dir = Dir::new("native-resize-base");
    let base = dir.text("base.raw");
    std::fs::write(&base, vec![7; 2 * MIB]).expect("a base");
    for format in ["qcow2", "vellum"] {
        let name = if format == "qcow2" { "disk.qcow2" } else { "disk.vlm" };
        let (image, raw) = (dir.text(name), dir.text("read.raw"));
        vellum(&["create", "-f", format, "-b", &base, "-F", "raw", &image, "1M"]).answer();
        let mut model = vec![7; MIB];
        vellum(&["resize", &image, "3M"]).answer();
        model.resize(3 * MIB, 0);
        vellum(&["convert", "-O", "raw", &image, &raw]).answer();
        assert!(std::fs::read(&raw).expect("the disk") == model, "{format}");
    }
    // As long as the disk, it has nothing to show.
    let image = dir.text("as-long.qcow2");
    vellum(&["create", "-f", "qcow2", "-b", &base, "-F", "raw", &image]).answer();
    vellum(&["resize", &image, "3M"]).answer();
    std::fs::write(dir.join("model.raw"), [vec![7; 2 * MIB], vec![0; MIB]].concat()).expect("a model");
    same(&image, &dir.text("model.raw"));
}
