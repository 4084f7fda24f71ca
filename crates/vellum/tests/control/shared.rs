//! Clones of one template in one server: the template is opened once, whichever clones come and go.

use super::Controlled;
use super::support::dir::Dir;
use super::support::noise;
use super::support::program::vellum;

const LEN: usize = 3 << 20;

/// A chain of two for a template, and clones of it.
fn cloned(dir: &Dir, clones: &[String]) -> [String; 2] {
    let (base, template) = (dir.text("base.raw"), dir.text("template.qcow2"));
    std::fs::write(&base, noise(LEN, 5)).expect("a base");
    vellum(&["clone", "-q", &base, &template]).answer();
    vellum(&["check", &template]).answer();
    let names: Vec<&str> = clones.iter().map(String::as_str).collect();
    vellum(&[&["clone", "-q", &template], &names[..]].concat()).answer();
    [base, template]
}

#[test]
fn clones_in_one_server_share_their_template() {
    let dir = Dir::new("shared");
    let clones: Vec<String> =
        (0..8).map(|index| dir.text(&format!("{index}.{}", ["qcow2", "vlm"][index % 2]))).collect();
    let [base, template] = cloned(&dir, &clones);
    let exports: Vec<String> =
        clones.iter().enumerate().map(|(index, path)| format!("{index}={path}")).collect();
    let mut arguments = Vec::new();
    exports[..6].iter().for_each(|export| arguments.extend(["--export", export]));
    let served = Controlled::start(&arguments);
    let times = || (served.server.times_open(&base), served.server.times_open(&template));
    assert_eq!(times(), (1, 1), "for six clones");
    let remove = |name: &str| {
        vellum(&["export", "remove", "--control", &served.socket, name]).answer();
    };
    let add = |index: usize| {
        vellum(&["export", "add", "--control", &served.socket, &exports[index]]).answer();
    };
    let bytes = noise(LEN, 5);
    let reads_all = |index: usize, first: u8| {
        let mut client = served.client(&index.to_string());
        let read = client.read(0, u32::try_from(LEN).expect("short")).expect("it is read");
        assert!(read[..4096].iter().all(|byte| *byte == first) && read[4096..] == bytes[4096..], "{index}");
        client.disconnect();
    };
    for index in 0..6 {
        let byte = u8::try_from(index + 1).expect("few");
        served.client(&index.to_string()).write(0, &[byte; 4096], 0).expect("its own");
    }
    for index in 0..6 {
        reads_all(index, u8::try_from(index + 1).expect("few"));
    }
    // The disk that opened the template goes; others come.
    remove("0");
    add(6);
    served.client("6").write(0, &[7; 4096], 0).expect("its own");
    reads_all(5, 6);
    reads_all(6, 7);
    assert_eq!(times(), (1, 1));
    vellum(&["export", "reopen", "--control", &served.socket, "1"]).answer();
    reads_all(1, 2);
    assert_eq!(times(), (1, 1), "opened again");

    // The last one lets it go; then it may be opened for writing.
    (1..=6).for_each(|index| remove(&index.to_string()));
    assert_eq!(times(), (0, 0));
    vellum(&["check", "-r", "all", &template]).answer();
    add(0);
    let first = served.client("0").read(0, 8192).expect("it is read");
    assert!(first[..4096] == [1; 4096] && first[4096..] == bytes[4096..8192]);
    assert_eq!(served.server.stop().code, 0);
    for path in clones.iter().chain([&template]) {
        vellum(&["check", path]).answer();
    }
}

#[test]
fn a_template_that_was_replaced_is_read_by_new_disks_only() {
    let dir = Dir::new("replaced");
    let clones: Vec<String> = (0..2).map(|index| dir.text(&format!("{index}.qcow2"))).collect();
    let [base, _] = cloned(&dir, &clones);
    let served = Controlled::start(&["--export", &format!("old={}", clones[0])]);
    let draft = dir.text("draft");
    std::fs::write(&draft, noise(LEN, 6)).expect("another base");
    std::fs::rename(&draft, &base).expect("in the same directory");
    vellum(&["export", "add", "--control", &served.socket, &format!("new={}", clones[1])]).answer();
    let read = |name: &str| served.client(name).read(0, 4096).expect("it is read");
    assert_eq!((read("old"), read("new")), (noise(4096, 5), noise(4096, 6)));
}
