//! The list of a template's zeros.

use super::support::dir::Dir;
use super::support::noise;
use super::support::program::vellum;
use super::{MIB, check_says, refused, same};

/// A template of 8 MiB with data in its third MiB, as raw and as qcow2.
fn template(dir: &Dir) -> [(String, &'static str); 2] {
    let mut bytes = vec![0; 8 * MIB];
    bytes[2 * MIB..3 * MIB].copy_from_slice(&noise(MIB, 1));
    std::fs::write(dir.join("t.raw"), bytes).expect("a template");
    vellum(&["convert", "-f", "raw", "-O", "qcow2", &dir.text("t.raw"), &dir.text("t.qcow2")]).answer();
    [(dir.text("t.raw"), "raw"), (dir.text("t.qcow2"), "qcow2")]
}

fn clone_of(template: &str, format: &str, image: &str) -> (serde_json::Value, String) {
    let ran = vellum(&["create", "-f", "vellum", "-b", template, "-F", format, "--output", "json", image]);
    let said = ran.err.clone();
    (ran.json(), said)
}

#[test]
fn a_template_is_prepared_once_for_all_that_stand_on_it() {
    let dir = Dir::new("native-template");
    let image = dir.text("clone.vlm");
    for (template, format) in template(&dir) {
        let (made, said) = clone_of(&template, format, &image);
        assert!(made["template-zero-bytes"].is_null() && said.is_empty(), "{made} {said}");
        let prepared = vellum(&["template", "prepare", &template, "--output", "json"]).json();
        assert_eq!(
            (&prepared["zero-bytes"], &prepared["runs"]),
            (&(7 * MIB).into(), &2.into()),
            "{prepared}"
        );
        let (made, said) = clone_of(&template, format, &image);
        assert!(made["template-zero-bytes"] == 7 * MIB && said.is_empty(), "{made} {said}");
        same(&image, &template);
        check_says(&image, 0);
        // Behind the presets the template is not read.
        let rows = vellum(&["map", "--output", "json", &image]).json();
        let deep: u64 = rows
            .as_array()
            .expect("rows")
            .iter()
            .filter(|row| row["depth"] == 1)
            .filter_map(|row| row["length"].as_u64())
            .sum();
        assert_eq!(deep, MIB as u64, "{rows}");
    }
}

#[test]
fn a_list_that_does_not_fit_is_told_and_not_used() {
    let dir = Dir::new("native-list");
    let image = dir.text("clone.vlm");
    let [(template, format), _] = template(&dir);
    vellum(&["template", "prepare", "-q", &template]).answer();
    let list = dir.join("t.raw.vzero");
    let good = std::fs::read(&list).expect("the list");
    let damaged = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        bytes
    };
    for (why, bytes) in [
        ("CRC32C", damaged(70)),
        ("magic", damaged(0)),
        ("length that it states", good[..good.len() - 1].to_vec()),
        ("version", damaged(15)),
        ("magic", Vec::new()),
    ] {
        std::fs::write(&list, bytes).expect("damage");
        let (made, said) = clone_of(&template, format, &image);
        assert!(made["template-zero-bytes"].is_null(), "{why}: {made}");
        assert!(said.contains("is not used") && said.contains(why), "{why}: {said}");
        same(&image, &template);
    }
    // The template has changed, and where it was zero it is not.
    std::fs::write(&list, &good).expect("the list again");
    let mut bytes = std::fs::read(&template).expect("the template");
    bytes[5 * MIB] = 7;
    std::fs::write(&template, bytes).expect("a change");
    let (made, said) = clone_of(&template, format, &image);
    assert!(made["template-zero-bytes"].is_null() && said.contains("changed since"), "{made} {said}");
    same(&image, &template);
}

#[test]
fn the_files_below_a_template_count_too() {
    let dir = Dir::new("native-below");
    let [(base, _), _] = template(&dir);
    let (above, image) = (dir.text("above.qcow2"), dir.text("clone.vlm"));
    vellum(&["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &above]).answer();
    vellum(&["template", "prepare", "-q", &above]).answer();
    assert_eq!(clone_of(&above, "qcow2", &image).0["template-zero-bytes"], 7 * MIB);
    let bytes = std::fs::read(&base).expect("the base");
    std::fs::write(&base, bytes).expect("the same bytes, later");
    let (made, said) = clone_of(&above, "qcow2", &image);
    assert!(made["template-zero-bytes"].is_null() && said.contains("changed since"), "{made} {said}");
    refused(&["not there"], &["template", "prepare", &dir.text("not there")]);
}
