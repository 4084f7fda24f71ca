//! `vellum clone`: many images over one template.

use std::process::Stdio;
use std::time::{Duration, Instant};

use super::refused;
use super::support::dir::Dir;
use super::support::loops::Mount;
use super::support::noise;
use super::support::program::{vellum, vellum_command};

/// A raw template of noise.
fn template(dir: &Dir) -> String {
    let template = dir.text("template.raw");
    std::fs::write(&template, noise(3 << 20, 5)).expect("a template");
    template
}

#[test]
fn clones_read_as_their_template() {
    let dir = Dir::new("clones");
    let template = template(&dir);
    let said = vellum(&["clone", &template, &dir.text("one.qcow2")]).answer();
    assert!(said.starts_with("Created ") && said.contains("qcow2") && said.contains("3 MiB"), "{said}");
    let names = [dir.text("two.qcow2"), dir.text("three.vlm"), dir.text("four")];
    let [two, three, four] = &names;
    let said = vellum(&["clone", "--output", "json", &template, two, three, four]).json();
    assert_eq!(said["virtual-size"], 3 << 20, "{said}");
    for (index, (name, format)) in names.iter().zip(["qcow2", "vellum", "qcow2"]).enumerate() {
        assert_eq!(said["clones"][index]["filename"], **name, "{said}");
        assert_eq!(said["clones"][index]["format"], format, "{said}");
        let info = vellum(&["info", "--output", "json", name]).json();
        assert_eq!(info["format"], format, "{info}");
        // In the same directory, so both can be moved.
        assert_eq!(info["backing-filename"], "template.raw", "{info}");
        vellum(&["compare", "-f", format, "-F", "raw", name, &template]).answer();
        vellum(&["check", name]).answer();
    }
    // Over a clone, larger.
    let larger = dir.text("larger.qcow2");
    vellum(&["clone", "-q", "--size", "1G", two, &larger]).answer();
    assert_eq!(vellum(&["info", "--output", "json", &larger]).json()["virtual-size"], 1 << 30);
    // Sizes are whole sectors, and a colon in a name is no protocol.
    let (odd, colon) = (dir.text("odd.vlm"), dir.text("win:10.qcow2"));
    let said = vellum(&["clone", "--output", "json", "--size", "1000", &template, &odd]).json();
    assert_eq!(said["virtual-size"], 1024, "{said}");
    vellum(&["clone", "-q", &template, &colon]).answer();
    vellum(&["clone", "-q", &colon, &dir.text("over.qcow2")]).answer();
    vellum(&["compare", "-f", "qcow2", "-F", "raw", &dir.text("over.qcow2"), &template]).answer();
    assert_eq!(dir.names().len(), 9, "no drafts: {:?}", dir.names());
}

#[test]
fn what_cannot_be_cloned_leaves_nothing() {
    let dir = Dir::new("unclonable");
    let (template, new, old) = (template(&dir), dir.text("new.qcow2"), dir.text("old.qcow2"));
    std::fs::write(&old, "somebody's disk").expect("a file");
    std::os::unix::fs::symlink("nowhere", dir.text("link.qcow2")).expect("a link");
    // What a guest wrote must not be taken for an image because of a link's name.
    let link = dir.text("image.qcow2");
    std::os::unix::fs::symlink("template.raw", &link).expect("a link");
    let before = dir.names();
    refused(1, &["image.qcow2", "template.raw", "-F"], &["clone", &link, &new]);
    refused(1, &["old.qcow2", "exists already"], &["clone", &template, &new, &old]);
    refused(1, &["link.qcow2", "exists already"], &["clone", &template, &new, &dir.text("link.qcow2")]);
    refused(1, &["new.qcow2", "twice"], &["clone", &template, &new, &new]);
    let same = dir.text("./new.qcow2");
    refused(1, &["new.qcow2", "twice"], &["clone", &template, &new, &same]);
    refused(1, &["raw", "qcow2 or vellum"], &["clone", &template, &new, &dir.text("x.raw")]);
    refused(1, &["absent.raw"], &["clone", &dir.text("absent.raw"), &new]);
    refused(1, &["old", "-F raw"], &["clone", &dir.text("old"), &new]);
    refused(1, &["data file"], &["clone", "-o", "data_file=x", &template, &new]);
    refused(1, &["backing_file"], &["clone", "-o", "backing_file=x", &template, &new]);
    refused(1, &["unit_size"], &["clone", "-o", "unit_size=64k", &template, &new]);
    assert_eq!(dir.names(), before);
    assert_eq!(std::fs::read(&old).expect("the file"), b"somebody's disk");
}

#[test]
fn the_clones_that_were_made_stay_when_another_fails() {
    let dir = Dir::new("half-cloned");
    let template = template(&dir);
    let (good, bad) = (dir.text("good.qcow2"), dir.text("absent/bad.qcow2"));
    let ran = vellum(&["clone", "--output", "json", &template, &good, &bad]);
    assert_eq!(ran.code, 1, "{ran:?}");
    for word in ["1 of 2 clones were created", "bad.qcow2"] {
        assert!(ran.err.contains(word), "{ran:?}");
    }
    let said: serde_json::Value = serde_json::from_str(&ran.out).expect("what was made");
    assert_eq!(said["clones"].as_array().map(Vec::len), Some(1), "{said}");
    assert_eq!(said["clones"][0]["filename"], *good, "{said}");
    vellum(&["compare", "-f", "qcow2", "-F", "raw", &good, &template]).answer();
    assert_eq!(dir.names(), ["good.qcow2", "template.raw"]);
}

/// Whether every name that is no draft is a whole clone.
#[track_caller]
fn all_are_whole(dir: &Dir, template: &str) -> usize {
    let names = dir.names().into_iter().filter(|name| !name.starts_with('.') && !name.ends_with(".raw"));
    let names: Vec<String> = names.collect();
    let allow = std::path::Path::new(template).parent().and_then(|dir| dir.to_str()).expect("a directory");
    for name in &names {
        let clone = dir.text(name);
        vellum(&["check", &clone]).answer();
        vellum(&["compare", "--allow-dir", allow, "-f", "qcow2", "-F", "raw", &clone, template]).answer();
    }
    names.len()
}

#[test]
fn a_full_host_leaves_whole_clones_and_no_drafts() {
    let Some(mount) = Mount::tmpfs(4 << 20) else { return };
    let dir = Dir::new("clones-room");
    let template = template(&dir);
    let names: Vec<String> = (0..200).map(|index| mount.dir.text(&format!("{index}.qcow2"))).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let ran = vellum(&[&["clone", "--allow-dir", &dir.text("."), &template], &names[..]].concat());
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("space") && ran.err.contains("of 200 clones were created"), "{ran:?}");
    let whole = all_are_whole(&mount.dir, &template);
    assert!(ran.err.contains(&format!("{whole} of 200")), "{whole} are there: {}", ran.err);
    assert!(mount.dir.names().iter().all(|name| !name.starts_with('.')), "{:?}", mount.dir.names());
}

#[test]
fn what_a_kill_leaves_is_whole_or_a_draft_that_the_next_run_removes() {
    let dir = Dir::new("clones-kill");
    let template = template(&dir);
    let names: Vec<String> = (0..2000).map(|index| dir.text(&format!("{index}.qcow2"))).collect();
    let mut command = vellum_command();
    command.args(["clone", &template]).args(&names).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().expect("our own program");
    let begun = Instant::now();
    while dir.names().len() < 40 {
        assert!(begun.elapsed() < Duration::from_secs(60), "nothing is cloned");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    let whole = all_are_whole(&dir, &template);
    assert!((1..2000).contains(&whole), "{whole} of 2000");
    let missing: Vec<&str> = names
        .iter()
        .map(String::as_str)
        .filter(|name| !std::path::Path::new(name).exists())
        .take(40)
        .collect();
    vellum(&[&["clone", "-q", &template], &missing[..]].concat()).answer();
    assert!(dir.names().iter().all(|name| !name.starts_with('.')), "{:?}", dir.names());
    assert_eq!(all_are_whole(&dir, &template), whole + missing.len());
}
