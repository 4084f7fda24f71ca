//! `vellum flatten`: clones that need their template no more.

use std::process::Stdio;
use std::time::Duration;

use super::refused;
use super::support::dir::Dir;
use super::support::program::{vellum, vellum_command};
use super::support::server::Server;
use super::support::{noise, patchy};

const LEN: usize = 9 << 20;

/// A base with holes and data, and an image over it that has nothing.
fn template(dir: &Dir) -> String {
    let (base, template) = (dir.text("base.raw"), dir.text("template.qcow2"));
    std::fs::write(&base, patchy(LEN, 7)).expect("a base");
    vellum(&["clone", "-q", &base, &template]).answer();
    template
}

/// The formats and layouts of a clone.
const KINDS: [&[&str]; 9] = [
    &["-f", "qcow2"],
    &["-f", "qcow2", "-o", "journal=off"],
    &["-f", "qcow2", "-o", "cluster_size=2M"],
    &["-f", "qcow2", "-o", "cluster_size=1k,extended_l2=off"],
    &["-f", "qcow2", "-o", "compat=0.10,extended_l2=off,journal=off"],
    &["-f", "vellum"],
    &["-f", "vellum", "-o", "layout=table"],
    &["-f", "vellum", "-o", "layout=linear"],
    &["-f", "vellum", "-o", "layout=linear,block_size=1M"],
];

/// A clone in which a guest has written, zeroed and discarded. Returns what its disk reads as.
pub(super) fn used_clone(template: &str, kind: &[&str], clone: &str, seed: u64) -> Vec<u8> {
    vellum(&[&["clone", "-q", "--size", "11M"], kind, &[template, clone]].concat()).answer();
    let served = Server::start(&["-f", kind[1], clone]);
    let mut guest = super::support::client::Client::connect(&served.peer(), "").expect("a connection");
    guest.write(1 << 20, &noise(70_000, seed), 0).expect("written");
    guest.write(0x40_3000, &noise(512, seed + 1), 0).expect("written");
    guest.zero(3 << 20, 100_000, 0).expect("zeroed");
    guest.trim(6 << 20, 1 << 20).expect("discarded");
    guest.write((10 << 20) + 512, &[9; 1024], 0).expect("written behind the template");
    guest.flush().expect("flushed");
    let disk = guest.read_all().expect("read");
    guest.disconnect();
    assert_eq!(served.stop().code, 0);
    disk
}

fn reads_as(image: &str, format: &str, disk: &[u8]) {
    let served = Server::start(&["-f", format, "--read-only", image]);
    let read = super::support::client::Client::connect(&served.peer(), "").expect("a connection").read_all();
    assert_eq!(super::support::first_difference(&read.expect("read"), disk), None, "{image}");
    assert_eq!(served.stop().code, 0);
}

#[test]
fn a_clone_reads_the_same_without_its_template() {
    let dir = Dir::new("flatten");
    let template = template(&dir);
    let alone = Dir::new("alone");
    for (index, kind) in KINDS.iter().enumerate() {
        let clone = dir.text(&format!("{index}.{}", kind[1]));
        let disk = used_clone(&template, kind, &clone, 10 * index as u64);
        let said = vellum(&["flatten", "-f", kind[1], "--output", "json", &clone]).json();
        assert_eq!(said["backing-filename"], "template.qcow2", "{kind:?}: {said}");
        let written = said["bytes-written"].as_u64().expect("a number");
        assert!((1 << 20..11 << 20).contains(&written), "{kind:?}: zeros are not copied: {said}");
        // Where there is no template.
        let moved = alone.text(&format!("{index}"));
        std::fs::rename(&clone, &moved).expect("moved");
        reads_as(&moved, kind[1], &disk);
        let info = vellum(&["info", "-f", kind[1], "--output", "json", &moved]).json();
        assert!(info.get("backing-filename").is_none(), "{info}");
        assert!(info.get("backing-filename-format").is_none(), "{info}");
        vellum(&["check", "-f", kind[1], &moved]).answer();
        let again = vellum(&["flatten", "-f", kind[1], &moved]).answer();
        assert!(again.contains("nothing to do"), "{again}");
        // It goes on being a disk.
        let served = Server::start(&["-f", kind[1], &moved]);
        let mut guest = super::support::client::Client::connect(&served.peer(), "").expect("a connection");
        guest.write(3 << 20, &[5; 4096], 0).expect("written");
        guest.zero(1 << 20, 8192, 0).expect("zeroed");
        guest.flush().expect("flushed");
        assert_eq!(guest.read(3 << 20, 8192).expect("read"), [[5; 4096], [0; 4096]].concat());
        guest.disconnect();
        assert_eq!(served.stop().code, 0);
        vellum(&["check", "-f", kind[1], &moved]).answer();
    }
}

#[test]
fn what_cannot_be_flattened_stays_as_it_is() {
    let dir = Dir::new("unflattened");
    let template = template(&dir);
    let clone = dir.text("clone.vlm");
    vellum(&["clone", "-q", &template, &clone]).answer();
    vellum(&["snapshot", "create", &clone, "then"]).answer();
    let before = std::fs::read(&clone).expect("an image");
    refused(1, &["clone.vlm", "has snapshots"], &["flatten", &clone]);
    assert!(std::fs::read(&clone).expect("an image") == before);
    vellum(&["snapshot", "delete", &clone, "then"]).answer();
    let served = Server::start(&[&clone]);
    refused(1, &["clone.vlm", "in use"], &["flatten", &clone]);
    assert_eq!(served.stop().code, 0);
    std::fs::rename(&template, dir.text("elsewhere")).expect("moved");
    refused(1, &["template.qcow2 (depth 1)"], &["flatten", &clone]);
    std::fs::rename(dir.text("elsewhere"), &template).expect("moved back");
    vellum(&["flatten", "-q", &clone]).answer();
}

/// Killed at any moment, it leaves an image that reads the same; the next run ends it.
#[test]
fn what_a_kill_interrupts_goes_on() {
    let dir = Dir::new("killed");
    let base = dir.text("base.raw");
    std::fs::write(&base, noise(64 << 20, 3)).expect("a base");
    for (format, name) in [("qcow2", "clone.qcow2"), ("vellum", "clone.vlm")] {
        let clone = dir.text(name);
        vellum(&["clone", "-q", "-F", "raw", &base, &clone]).answer();
        let mut interrupted = 0;
        for wait_ms in [1, 5, 10, 20, 30, 40, 60, 80, 120, 200] {
            let mut command = vellum_command();
            command.args(["flatten", &clone]).stdout(Stdio::null()).stderr(Stdio::null());
            let mut child = command.spawn().expect("our own program");
            std::thread::sleep(Duration::from_millis(wait_ms));
            child.kill().expect("it was started");
            interrupted += usize::from(!child.wait().expect("it ends").success());
            vellum(&["compare", "-q", "-f", format, "-F", "raw", &clone, &base]).answer();
        }
        assert!(interrupted > 0);
        vellum(&["flatten", "-q", &clone]).answer();
        vellum(&["compare", "-q", "-f", format, "-F", "raw", &clone, &base]).answer();
        vellum(&["check", &clone]).answer();
        let info = vellum(&["info", "--output", "json", &clone]).json();
        assert!(info.get("backing-filename").is_none(), "{info}");
    }
}
