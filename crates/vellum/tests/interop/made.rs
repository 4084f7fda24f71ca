//! Images from `vellum create`, as QEMU sees them: the size of the disk, and the files that hold its data.

use std::path::Path;

use super::requires;
use super::support::dir::Dir;
use super::support::program::{run, vellum, vellum_command};

/// QEMU's report on an image.
fn qemu_info(image: &str) -> serde_json::Value {
    run("qemu-img", &["info", "--output=json", image]).json()
}

/// The output of a program that is run in some directory.
fn run_in(dir: &Path, program: &str, arguments: &[&str]) -> (bool, String) {
    let ran = std::process::Command::new(program).args(arguments).current_dir(dir).output().expect("it runs");
    let text = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
    (ran.status.success(), text)
}

/// QEMU rounds the size in a header down to sectors: the end of an odd disk would not be there.
#[test]
fn a_disk_of_an_odd_size_is_as_large_to_qemu_as_to_vellum() {
    requires!("qemu-img");
    let dir = Dir::new("made");
    let (image, data) = (dir.text("image.qcow2"), dir.text("data"));
    let data = format!("data_file={data},journal=off");
    for (size, rounded) in [("1000000", 1_000_448), ("511", 512), ("1", 512), ("512", 512), ("0", 0)] {
        for options in ["journal=on", "journal=off,compat=0.10", "extended_l2=on", &data] {
            vellum(&["create", "-q", "-f", "qcow2", "-o", options, &image, size]).answer();
            let ours = vellum(&["info", "--output", "json", &image]).json();
            assert_eq!(ours["virtual-size"], rounded, "{options} {size}");
            assert_eq!(qemu_info(&image)["virtual-size"], rounded, "{options} {size}: to QEMU");
        }
        vellum(&["create", "-q", "-f", "raw", &image, size]).answer();
        assert_eq!(std::fs::metadata(&image).expect("a file").len(), rounded, "raw {size}");
    }
}

#[test]
fn a_new_disk_has_nothing_of_what_its_data_file_held() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("made");
    let (image, data) = (dir.text("image.qcow2"), dir.text("data"));
    for extra in ["", ",preallocation=metadata", ",data_file_raw=on", ",preallocation=falloc"] {
        std::fs::write(&data, vec![3; 1 << 20]).expect("an old file");
        let options = format!("data_file={data},journal=off{extra}");
        vellum(&["create", "-q", "-f", "qcow2", "-o", &options, &image, "512k"]).answer();
        assert_eq!(std::fs::metadata(&data).expect("the data file").len(), 512 << 10, "{extra}");
        run("qemu-io", &["-c", "read -P 0 0 512k", &image]).answer();
        let same = vellum(&["compare", "-F", "raw", &image, &data]);
        assert_eq!(same.code, 0, "{extra}: {same:?}");
    }
}

/// A raw data file is one that others write as a raw disk. What they write must be seen through the image.
#[test]
fn what_is_written_to_a_raw_data_file_is_the_disks() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("made");
    let (image, data) = (dir.text("image.qcow2"), dir.text("data"));
    for extra in ["", ",extended_l2=on"] {
        let options = format!("data_file={data},data_file_raw=on,journal=off{extra}");
        let made = vellum(&["create", "-f", "qcow2", "-o", &options, &image, "2M"]).answer();
        assert!(made.contains("preallocation=metadata"), "{made}");
        run("qemu-io", &["-f", "raw", "-c", "write -P 7 64k 64k", &data]).answer();
        run("qemu-io", &["-c", "read -P 7 64k 64k", &image]).answer();
        assert_eq!(vellum(&["compare", "-F", "raw", &image, &data]).code, 0, "{extra}");
        assert_eq!(run("qemu-img", &["check", &image]).code, 0, "{extra}");
    }
}

/// A relative name would mean the image's directory to one of the programs, and the current directory to the
/// other.
#[test]
fn a_data_file_is_found_by_both_wherever_they_are_run() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("made");
    std::fs::create_dir(dir.join("images")).expect("a directory");
    let create =
        ["create", "-q", "-f", "qcow2", "-o", "data_file=data,journal=off", "images/image.qcow2", "1M"];
    let made = vellum_command().args(create).current_dir(dir.path()).status().expect("it runs");
    assert!(made.success());
    assert!(dir.join("images/data").exists(), "it is made beside the image");
    for (from, image) in
        [(dir.path(), "images/image.qcow2"), (&dir.join("images"), "image.qcow2"), (Path::new("/"), "")]
    {
        let full = dir.text("images/image.qcow2");
        let image = if image.is_empty() { &full } else { image };
        let (is_good, said) = run_in(from, "qemu-io", &["-c", "read -P 0 0 64k", image]);
        assert!(is_good, "from {}: {said}", from.display());
        let ran = vellum_command().args(["map", image]).current_dir(from).output().expect("it runs");
        assert!(ran.status.success(), "from {}: {ran:?}", from.display());
    }
}

#[test]
fn an_image_is_not_taken_for_a_new_disks_data_file() {
    requires!("qemu-img");
    let dir = Dir::new("made");
    let (image, other) = (dir.text("image.qcow2"), dir.text("other"));
    for format in ["qcow2", "vellum", "vmdk"] {
        let maker = if format == "vmdk" {
            run("qemu-img", &["create", "-q", "-f", format, &other, "1M"])
        } else {
            vellum(&["create", "-q", "-f", format, &other, "1M"])
        };
        maker.answer();
        let before = std::fs::read(&other).expect("the other image");
        let options = format!("data_file={other},journal=off");
        let ran = vellum(&["create", "-f", "qcow2", "-o", &options, &image, "1M"]);
        assert!(
            ran.code == 1 && ran.err.to_lowercase().contains(format) && ran.err.contains("delete it"),
            "{ran:?}"
        );
        assert!(std::fs::read(&other).expect("the other image") == before, "{format}: it was touched");
        std::fs::remove_file(&other).expect("it is there");
    }
    assert_eq!(dir.names(), Vec::<String>::new());
}

#[test]
fn a_size_is_said_once() {
    let dir = Dir::new("made");
    for format in ["qcow2", "raw"] {
        let ran = vellum(&["create", "-f", format, "-o", "size=1M", &dir.text("image.qcow2"), "2M"]);
        assert!(ran.code == 1 && ran.err.contains("two sizes"), "{ran:?}");
        assert_eq!(dir.names(), Vec::<String>::new());
    }
    vellum(&["create", "-q", "-f", "qcow2", "-o", "size=1M", &dir.text("image.qcow2")]).answer();
}
