//! Snapshots inside an image, as their owner meets them.

use super::support::dir::Dir;
use super::support::patchy;
use super::support::program::vellum;
use super::{MIB, check_says, refused, same};

#[test]
fn snapshots_come_and_go() {
    for layout in ["layout=table", "layout=zoned,zone_size=1M"] {
        story(layout);
    }
}

fn story(layout: &str) {
    let dir = Dir::new("native-snapshots");
    let base = patchy(3 * MIB, 3);
    std::fs::write(dir.join("base.raw"), &base).expect("a base");
    let image = dir.text("disk.vlm");
    let base_name = dir.text("base.raw");
    vellum(&["create", "-f", "vellum", "-o", layout, "-b", &base_name, "-F", "raw", &image]).answer();
    let listed = |image: &str| vellum(&["snapshot", "list", "--output", "json", image]).json();
    assert_eq!(listed(&image), serde_json::json!([]));
    vellum(&["snapshot", "create", &image, "empty"]).answer();
    // Another disk goes over it, with its base as it was.
    let mut other = base.clone();
    other[MIB..MIB + 300_000].fill(7);
    std::fs::write(dir.join("other.raw"), &other).expect("a disk");
    let other_name = dir.text("other.raw");
    vellum(&["convert", "-n", "-f", "raw", "-O", "vellum", &other_name, &image]).answer();
    same(&image, &other_name);
    let made = vellum(&["snapshot", "create", "--output", "json", &image, "full"]).json();
    assert!(made["id"] == "2" && made["created"] == "full", "{made}");
    refused(&["name"], &["snapshot", "create", &image, "full"]);
    check_says(&image, 0);
    let all = listed(&image);
    assert!(
        all[0]["name"] == "empty" && all[1]["name"] == "full" && all[1]["virtual-size"] == 3 * MIB,
        "{all}"
    );
    let info = vellum(&["info", "--output", "json", &image]).json();
    assert_eq!(info["snapshots"], all, "{info}");
    let text = vellum(&["info", &image]).answer();
    assert!(text.contains("Snapshot list:") && text.contains("empty"), "{text}");
    // Each reads as the disk did, by name and by id.
    for (wanted, model) in [("empty", &base_name), ("1", &base_name), ("full", &other_name)] {
        let ran = vellum(&["compare", "-l", wanted, &image, model]);
        assert_eq!(ran.code, 0, "{wanted}: {ran:?}");
        let copy = dir.text("copy.raw");
        vellum(&["convert", "-l", wanted, "-O", "raw", &image, &copy]).answer();
        same(&copy, model);
        vellum(&["map", "--snapshot", wanted, "--output", "json", &image]).json();
    }
    // Another name, and the first one again.
    vellum(&["snapshot", "rename", &image, "full", "all of it"]).answer();
    assert_eq!((&listed(&image)[1]["name"], &listed(&image)[1]["id"]), (&"all of it".into(), &"2".into()));
    refused(&["empty"], &["snapshot", "rename", &image, "2", "empty"]);
    vellum(&["snapshot", "rename", &image, "2", "full"]).answer();
    check_says(&image, 0);
    // Back, and forth again.
    vellum(&["snapshot", "revert", &image, "empty"]).answer();
    same(&image, &base_name);
    check_says(&image, 0);
    vellum(&["snapshot", "revert", &image, "full"]).answer();
    same(&image, &other_name);
    vellum(&["snapshot", "delete", &image, "empty"]).answer();
    check_says(&image, 0);
    refused(&["there is no snapshot named empty"], &["snapshot", "delete", &image, "empty"]);
    refused(&["there is no snapshot named empty"], &["convert", "-l", "empty", "-O", "raw", &image, "x"]);
    assert_eq!(vellum(&["compare", "-l", "full", &image, &other_name]).code, 0);
    vellum(&["resize", "-q", &image, "5M"]).answer();
    let kept = dir.text("kept.raw");
    vellum(&["convert", "-l", "full", "-O", "raw", &image, &kept]).answer();
    same(&kept, &other_name);
    let len = |name: &str| std::fs::metadata(name).expect("it is there").len();
    assert_eq!(len(&kept), len(&other_name), "its size is kept");
    vellum(&["snapshot", "revert", &image, "full"]).answer();
    assert_eq!(
        vellum(&["info", "--output", "json", &image]).json()["virtual-size"],
        len(&other_name),
        "the size, too"
    );
    same(&image, &other_name);
    vellum(&["snapshot", "delete", &image, "full"]).answer();
    same(&image, &other_name);
    check_says(&image, 0);
}

#[test]
fn who_has_none_says_so() {
    let dir = Dir::new("native-no-snapshots");
    let (linear, qcow2, raw) = (dir.text("linear.vlm"), dir.text("disk.qcow2"), dir.text("disk.raw"));
    vellum(&["create", "-f", "vellum", "-o", "layout=linear", &linear, "1M"]).answer();
    vellum(&["create", "-f", "qcow2", &qcow2, "1M"]).answer();
    vellum(&["create", "-f", "raw", &raw, "1M"]).answer();
    refused(&["layout=table"], &["snapshot", "create", &linear, "one"]);
    assert_eq!(vellum(&["snapshot", "list", "--output", "json", &linear]).json(), serde_json::json!([]));
    assert_eq!(vellum(&["snapshot", "list", "--output", "json", &qcow2]).json(), serde_json::json!([]));
    for verb in ["delete", "revert"] {
        refused(&["there is no snapshot named one"], &["snapshot", verb, &qcow2, "one"]);
    }
    for verb in ["create", "delete", "revert"] {
        refused(&["a raw image has no snapshots"], &["snapshot", verb, "-f", "raw", &raw, "one"]);
    }
    refused(&["a raw image has no snapshots"], &["snapshot", "list", "-f", "raw", &raw]);
}
