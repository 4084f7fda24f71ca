//! Images at URLs: clones of them, what changes and fails below a disk, and what is refused.

use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use vellum_web::{Fault, Server as Web, Speed};

use super::refused;
use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::{Ran, finish, pid_of, vellum, vellum_command};
use super::support::server::Server;
use super::support::{first_difference, patchy, until};

const LEN: usize = 5 << 20;

/// A copy takes many seconds.
const SLOW: Speed = Speed { latency: Duration::from_millis(50), bytes_per_second: 512 << 10 };

/// A web server with a template.
fn web(seed: u64) -> (Web, Vec<u8>, String) {
    let (web, bytes) = (Web::start(), patchy(LEN, seed));
    web.put("/t/base.raw", bytes.clone());
    let url = web.url("/t/base.raw");
    (web, bytes, url)
}

/// A clone of what is at the URL. What the command said on stderr.
#[track_caller]
fn clone(url: &str, format: &str, image: &str) -> String {
    let made = vellum(&["create", "-q", "-f", format, "-b", url, "-F", "raw", image]);
    assert_eq!(made.code, 0, "{made:?}");
    made.err
}

#[test]
fn a_clone_of_a_template_at_a_url_is_served_where_the_user_allows_it() {
    let (web, mut disk, url) = web(1);
    let dir = Dir::new("remote");
    for format in ["qcow2", "vellum"] {
        let image = dir.text(&format!("clone.{format}"));
        let said = clone(&url, format, &image);
        assert!(
            said.contains("will need a further option") && said.contains(&format!("--allow-url {url}")),
            "{said}"
        );
        let tag = vellum(&["info", "--output", "json", &image]).json()["backing-pin"][0].clone();
        assert_eq!((tag["kind"].as_str(), tag["length"].as_u64()), (Some("etag"), Some(LEN as u64)));
        let text = vellum(&["info", &image]).answer();
        assert!(text.contains(&format!("backing file pin: etag {LEN} \"")), "{text}");

        let refused = Server::try_start(&["-f", format, &image]).err().expect("it is refused");
        assert!(
            refused.err.contains("--allow-url") && refused.err.contains("VELLUM_ALLOW_URLS="),
            "{refused:?}"
        );
        for other in [web.url("/t/base"), web.url("/u/"), "http://127.0.0.1.evil.example/".to_owned()] {
            let refused =
                Server::try_start(&["-f", format, "--allow-url", &other, &image]).err().expect("refused");
            assert!(refused.err.contains("--allow-url"), "{other}: {refused:?}");
        }

        let served = Server::start(&["-f", format, "--allow-url", &web.url("/t/"), &image]);
        let mut guest = Client::connect(&served.peer(), "").expect("a connection");
        guest.write(1 << 20, &[9; 70_000], 0).expect("written");
        guest.flush().expect("flushed");
        let mut now = disk.clone();
        now[1 << 20..(1 << 20) + 70_000].fill(9);
        assert_eq!(first_difference(&guest.read_all().expect("read"), &now), None, "{format}");
        guest.disconnect();
        let stats = served.stop_and_count();
        assert_eq!(stats["remote"][0]["url"], url, "{stats}");
        assert!(stats["remote"][0]["fetched-bytes"].as_u64().expect("a number") >= 4 << 20, "{stats}");
        let (copy, allow) = (dir.text("copy.raw"), web.url("/"));
        vellum(&["convert", "-f", format, "--allow-url", &allow, "-O", "raw", &image, &copy]).answer();
        assert_eq!(first_difference(&std::fs::read(&copy).expect("a copy"), &now), None, "{format}");
    }
    // The environment allows as well.
    disk.truncate(0);
    let mut command = vellum_command();
    command
        .args(["map", &dir.text("clone.qcow2")])
        .env("VELLUM_ALLOW_URLS", format!("s3://other/ {}", web.url("/t/")));
    finish(command, None).answer();
}

#[test]
fn clones_over_a_trusted_base_share_what_is_fetched() {
    let dir = Dir::new("remote-many");
    let (web, disk, url) = web(9);
    web.set_tag("/t/base.raw", "W/\"weak\"");
    let images: Vec<String> = (0..10).map(|number| dir.text(&format!("{number}.qcow2"))).collect();
    for image in &images {
        let arguments = ["create", "-q", "-f", "qcow2", "--trust-base", "-b", &url, "-F", "raw", image];
        assert_eq!(vellum(&arguments).code, 0);
    }
    let before = web.counts();
    let exports: Vec<String> =
        images.iter().enumerate().map(|(number, image)| format!("--export=c{number}={image}")).collect();
    let allow = web.url("/");
    let mut arguments = vec!["--allow-url", &allow];
    arguments.extend(exports.iter().map(String::as_str));
    let served = Server::start(&arguments);
    for number in 0..images.len() {
        let mut guest = Client::connect(&served.peer(), &format!("c{number}")).expect("a connection");
        assert_eq!(guest.read(1 << 20, 4096).expect("read"), disk[1 << 20..(1 << 20) + 4096]);
        guest.disconnect();
    }
    served.stop();
    let fetched = web.counts().bytes_sent - before.bytes_sent;
    assert!(fetched < 4 << 16, "{fetched} bytes were fetched for one block that ten disks read");
}

#[test]
fn a_template_that_changed_is_an_error_and_never_a_mixture() {
    let dir = Dir::new("remote-changed");
    for format in ["qcow2", "vellum"] {
        let (web, disk, url) = web(2);
        let (image, allow) = (dir.text(&format!("clone.{format}")), web.url("/"));
        clone(&url, format, &image);
        let served = Server::start(&["-f", format, "--allow-url", &allow, &image]);
        let mut guest = Client::connect(&served.peer(), "").expect("a connection");
        assert_eq!(guest.read(0, 4096).expect("read"), disk[..4096]);
        guest.write(4 << 20, &[7; 4096], 0).expect("written");
        web.put("/t/base.raw", patchy(LEN, 3));
        assert!(guest.read(3 << 20, 4096).is_err(), "other bytes are never given");
        assert_eq!(guest.read(4 << 20, 4096).expect("its own"), [7; 4096]);
        guest.disconnect();
        served.stop();
        let refused =
            Server::try_start(&["-f", format, "--allow-url", &allow, &image]).err().expect("refused");
        for words in [&*url, "has changed: it was", "and is", "make a new image"] {
            assert!(refused.err.contains(words), "{words}: {refused:?}");
        }
        // The same bytes are back.
        web.put("/t/base.raw", disk.clone());
        let served = Server::start(&["-f", format, "--allow-url", &allow, &image]);
        let mut guest = Client::connect(&served.peer(), "").expect("a connection");
        assert_eq!(guest.read(3 << 20, 4096).expect("read"), disk[3 << 20..(3 << 20) + 4096]);
        guest.disconnect();
        served.stop();
        web.delete("/t/base.raw");
        let gone =
            Server::try_start(&["-f", format, "--allow-url", &allow, &image]).err().expect("it is gone");
        assert!(gone.err.contains("no such file") && gone.err.contains(&url), "{gone:?}");
    }
}

#[test]
fn requests_are_held_while_the_server_is_away_and_fail_after_the_limit() {
    let (web, disk, url) = web(4);
    let dir = Dir::new("remote-away");
    let (image, allow) = (dir.text("clone.qcow2"), web.url("/"));
    clone(&url, "qcow2", &image);
    let served = Server::start(&["--allow-url", &allow, &image]);
    let mut guest = Client::connect(&served.peer(), "").expect("a connection");
    web.next(&[Fault::Status(503), Fault::Reset, Fault::Short, Fault::Status(429)]);
    assert_eq!(guest.read(1 << 20, 4096).expect("in the end"), disk[1 << 20..(1 << 20) + 4096]);
    web.set_down(true);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| guest.read(3 << 20, 4096));
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert!(!reading.is_finished(), "it is held");
        web.set_down(false);
        assert_eq!(reading.join().expect("no panic").expect("in the end"), disk[3 << 20..(3 << 20) + 4096]);
    });
    guest.disconnect();
    served.stop();

    let served = Server::start(&["--allow-url", &allow, "--remote-timeout", "1", &image]);
    let mut guest = Client::connect(&served.peer(), "").expect("a connection");
    web.always(Fault::Stall);
    assert!(guest.read(1 << 20, 4096).is_err(), "it is given up");
    web.always(Fault::None);
    web.release();
    until("it is tried again", || {
        guest.read(1 << 20, 4096).is_ok_and(|read| read == disk[1 << 20..(1 << 20) + 4096])
    });
    guest.disconnect();
    served.stop();
}

#[test]
fn a_copy_that_waits_for_a_server_ends_at_once_with_ctrl_c() {
    let (web, _, url) = web(12);
    let dir = Dir::new("remote-ctrl-c");
    let (image, allow, copy) = (dir.text("clone.qcow2"), web.url("/"), dir.text("copy.raw"));
    clone(&url, "qcow2", &image);
    let convert: &[&str] = &["convert", "--allow-url", &allow, "-O", "raw", &image, &copy];
    let compare: &[&str] = &["compare", "--allow-url", &allow, "-F", "raw", &image, &dir.text("other.raw")];
    std::fs::write(dir.join("other.raw"), vec![1; LEN]).expect("a disk");
    for command_line in [convert, compare] {
        web.set_speed(SLOW);
        let before = web.log().len();
        let mut command = vellum_command();
        command.args(command_line).stderr(Stdio::null()).stdout(Stdio::null());
        let mut command = command.spawn().expect("our program");
        // It has opened its images by then, and reads.
        until("it reads", || web.log().len() > before + 3);
        web.always(Fault::Stall);
        std::thread::sleep(Duration::from_millis(500));
        let begun = Instant::now();
        kill_process(pid_of(&command), Signal::INT).expect("it runs");
        let code = command.wait().expect("it ends").code();
        assert!(
            code == Some(130) && begun.elapsed() < Duration::from_secs(10),
            "{code:?} {:?}",
            begun.elapsed()
        );
        web.always(Fault::None);
        web.release();
    }
}

#[test]
fn all_that_open_remote_images_wait_as_long_as_they_are_told() {
    let (web, _, url) = web(13);
    let dir = Dir::new("remote-patience");
    let (image, allow, other) = (dir.text("clone.qcow2"), web.url("/"), dir.text("other.raw"));
    clone(&url, "qcow2", &image);
    std::fs::write(&other, vec![1; LEN]).expect("a disk");
    let patient = ["--allow-url", &allow, "--remote-timeout", "1"];
    let convert: &[&str] = &["convert", "-O", "raw", &image, &dir.text("copy.raw")];
    let compare: &[&str] = &["compare", "-F", "raw", &image, &other];
    let flatten: &[&str] = &["flatten", &image];
    for command_line in [convert, compare, flatten] {
        // The base is found when it is opened, and is silent from then on.
        web.next(&[Fault::None]);
        web.always(Fault::Stall);
        let ran = vellum(&[command_line, &patient].concat());
        assert!(ran.code != 0 && ran.err.contains("no answer for 1 s (--remote-timeout)"), "{ran:?}");
        web.always(Fault::None);
        web.release();
    }
    // These only look what is there.
    let resize: &[&str] = &["resize", "-q", &image, "6M"];
    let second: &[&str] = &["clone", "-q", "-F", "qcow2", &image, &dir.text("second.qcow2")];
    let third: &[&str] =
        &["create", "-q", "-f", "qcow2", "-b", "clone.qcow2", "-F", "qcow2", &dir.text("third.qcow2")];
    for command_line in [resize, second, third] {
        let ran = vellum(&[command_line, &patient].concat());
        assert_eq!(ran.code, 0, "{ran:?}");
    }
}

#[test]
fn a_lying_server_gives_nothing() {
    let (web, disk, url) = web(5);
    let dir = Dir::new("remote-lies");
    let (image, allow) = (dir.text("clone.qcow2"), web.url("/"));
    clone(&url, "qcow2", &image);
    let served = Server::start(&["--allow-url", &allow, &image]);
    let mut guest = Client::connect(&served.peer(), "").expect("a connection");
    let elsewhere = Web::start();
    elsewhere.put("/t/base.raw", vec![6; LEN]);
    let faults = [
        Fault::OtherTag,
        Fault::Whole,
        Fault::OtherRange,
        Fault::Redirect(elsewhere.url("/t/base.raw")),
        Fault::Encoded("gzip"),
        Fault::Status(403),
    ];
    for fault in faults {
        // With each answer: a single one may go to another request of the server, such as a repeated one.
        web.always(fault.clone());
        assert!(guest.read(3 << 20, 4096).is_err(), "{fault:?}");
    }
    web.always(Fault::None);
    assert_eq!(elsewhere.counts().requests, 0, "a redirect to another host is not followed");
    assert_eq!(guest.read(3 << 20, 4096).expect("read"), disk[3 << 20..(3 << 20) + 4096]);
    guest.disconnect();
    served.stop();
}

#[test]
fn a_server_that_proves_nothing_must_be_trusted() {
    let (web, disk, url) = web(6);
    let dir = Dir::new("remote-trust");
    let (image, allow) = (dir.text("clone.qcow2"), web.url("/"));
    for tag in ["W/\"weak\"", ""] {
        web.set_tag("/t/base.raw", tag);
        refused(1, &["--trust-base", &url], &["create", "-f", "qcow2", "-b", &url, "-F", "raw", &image]);
        let trusting = ["create", "-q", "-f", "qcow2", "--trust-base", "-b", &url, "-F", "raw", &image];
        assert_eq!(vellum(&trusting).code, 0);
        let text = vellum(&["info", &image]).answer();
        assert!(text.contains(&format!("backing file pin: trusted {LEN}")), "{text}");
        let served = Server::start(&["--allow-url", &allow, &image]);
        let mut guest = Client::connect(&served.peer(), "").expect("a connection");
        assert_eq!(first_difference(&guest.read_all().expect("read"), &disk), None);
        guest.disconnect();
        served.stop();
    }
    web.put("/t/base.raw", vec![1; LEN / 2]);
    web.set_tag("/t/base.raw", "");
    let shorter = Server::try_start(&["--allow-url", &allow, &image]).err().expect("refused");
    assert!(shorter.err.contains("has changed"), "{shorter:?}");
}

#[test]
fn names_that_cannot_be_are_refused_before_anything_is_asked() {
    let (web, _, url) = web(7);
    let dir = Dir::new("remote-names");
    let image = dir.text("clone.qcow2");
    let create = |name: &str, words: &[&str]| {
        let arguments = ["create", "-f", "qcow2", "-b", name, "-F", "raw", &image];
        let ran: Ran = refused(1, words, &arguments);
        assert!(!ran.err.contains("hunter2"), "{ran:?}");
        assert!(!dir.join("clone.qcow2").exists());
    };
    let with_user = url.replace("http://", "http://user:hunter2@");
    create(&with_user, &["credentials", "environment"]);
    create(&format!("{url}?X-Amz-Signature=hunter2"), &["credentials", "environment"]);
    create(&web.url("/t/../base.raw"), &["`..`"]);
    create("rbd:pool/image", &["rbd:pool/image"]);
    create("ftp://host/x", &["ftp://host/x"]);
    assert_eq!(web.counts().requests, 0);
    create(&web.url("/t/gone.raw"), &["no such file"]);
    web.next(&[Fault::Whole]);
    create(&url, &["instead of a range"]);
    let ran = refused(1, &["credentials"], &["info", &with_user]);
    assert!(!ran.err.contains("hunter2"), "{ran:?}");
    refused(
        1,
        &["cannot be written"],
        &["serve", "--nbd", &format!("unix:{}", dir.text("socket")), "-f", "raw", &url],
    );
}

#[test]
fn an_image_at_a_url_is_described_mapped_and_converted() {
    let web = Web::start();
    let dir = Dir::new("remote-reading");
    let (raw, image) = (dir.text("disk.raw"), dir.text("disk.qcow2"));
    let bytes = patchy(LEN, 8);
    std::fs::write(&raw, &bytes).expect("a disk");
    vellum(&["convert", "-f", "raw", "-O", "qcow2", &raw, &image]).answer();
    web.put_files("/i", dir.path()).expect("files");
    let url = web.url("/i/disk.qcow2");
    let info = vellum(&["info", "--output", "json", &url]).json();
    assert_eq!((info["format"].as_str(), info["virtual-size"].as_u64()), (Some("qcow2"), Some(LEN as u64)));
    assert!(vellum(&["map", "--output", "json", &url]).json().as_array().is_some_and(|map| map.len() > 2));
    vellum(&["check", &url]).answer();
    let copy = dir.text("copy.raw");
    vellum(&["convert", "-O", "raw", &url, &copy]).answer();
    assert_eq!(first_difference(&std::fs::read(&copy).expect("a copy"), &bytes), None);
    vellum(&["compare", &url, &raw]).answer();
    let served = Server::start(&["--read-only", &url]);
    let mut guest = Client::connect(&served.peer(), "").expect("a connection");
    assert_eq!(first_difference(&guest.read_all().expect("read"), &bytes), None);
    guest.disconnect();
    served.stop();
    // A chain of URLs needs no permission where all are in one directory; a clone of it is pinned to each.
    let over = dir.text("over.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", "-b", "disk.qcow2", "-F", "qcow2", &over]).answer();
    web.put("/i/over.qcow2", std::fs::read(&over).expect("it"));
    let clone = dir.text("clone.vlm");
    let made =
        vellum(&["create", "-q", "-f", "vellum", "-b", &web.url("/i/over.qcow2"), "-F", "qcow2", &clone]);
    assert_eq!(made.code, 0, "{made:?}");
    let pins = vellum(&["info", "--output", "json", &clone]).json()["backing-pin"].clone();
    assert_eq!(pins.as_array().map(Vec::len), Some(2), "{pins}");
    let allow = web.url("/i/");
    let arguments = ["convert", "--allow-url", &allow, "-O", "raw", &clone, &copy];
    vellum(&arguments).answer();
    assert_eq!(first_difference(&std::fs::read(&copy).expect("a copy"), &bytes), None);
    let mut changed = web.get("/i/disk.qcow2").expect("it is there");
    let last = changed.len() - 1;
    changed[last] ^= 1;
    web.put("/i/disk.qcow2", changed);
    refused(1, &["disk.qcow2 has changed"], &arguments);
}

#[test]
fn an_object_of_a_store_is_a_base() {
    let (web, bytes) = (Web::start(), patchy(LEN, 9));
    web.put("/bucket/t/base.raw", bytes.clone());
    web.require_key(Some("KEYID"));
    let dir = Dir::new("remote-s3");
    let image = dir.text("clone.qcow2");
    let endpoint = web.url("");
    let run = |key: &str, arguments: &[&str]| {
        let mut command = vellum_command();
        command.args(arguments).env("AWS_ENDPOINT_URL", &endpoint).env("AWS_REGION", "x");
        command.env("AWS_ACCESS_KEY_ID", key).env("AWS_SECRET_ACCESS_KEY", "hunter2");
        let ran = finish(command, None);
        assert!(!ran.err.contains("hunter2") && !ran.out.contains("hunter2"), "{ran:?}");
        ran
    };
    let create = ["create", "-q", "-f", "qcow2", "-b", "s3://bucket/t/base.raw", "-F", "raw", &image];
    let denied = run("OTHER", &create);
    assert!(denied.code == 1 && denied.err.contains("AWS_ACCESS_KEY_ID"), "{denied:?}");
    let made = run("KEYID", &create);
    assert_eq!(made.code, 0, "{made:?}");
    let copy = dir.text("copy.raw");
    let convert = ["convert", "--allow-url", "s3://bucket/t/", "-O", "raw", &image, &copy];
    run("KEYID", &convert).answer();
    assert_eq!(first_difference(&std::fs::read(&copy).expect("a copy"), &bytes), None);
    // A redirect is followed with credentials neither when the base is opened nor when it is read.
    let elsewhere = Web::start();
    let redirect = Fault::Redirect(elsewhere.url("/bucket/t/base.raw"));
    web.next_others("HEAD", std::slice::from_ref(&redirect));
    let opened = run("KEYID", &convert);
    web.always(redirect);
    let read = run("KEYID", &convert);
    web.always(Fault::None);
    let host = elsewhere.address().to_string();
    for ran in [opened, read] {
        assert!(ran.code == 1 && ran.err.contains(&host) && ran.err.contains("AWS_REGION"), "{ran:?}");
    }
    assert_eq!(elsewhere.counts().requests, 0);
    web.put("/bucket/t/base.raw", patchy(LEN, 10));
    let changed = run("KEYID", &convert);
    assert!(changed.code == 1 && changed.err.contains("has changed"), "{changed:?}");
    assert!(!std::fs::read(&image).expect("the image").windows(7).any(|seven| seven == b"hunter2"));
}

/// However the one ends who asked for credentials, the program that was to print them ends with it, and what that has started.
#[test]
fn a_program_for_credentials_ends_with_whoever_asked() {
    let (web, dir) = (Web::start(), Dir::new("remote-program"));
    web.put("/bucket/base.raw", vec![1; LEN]);
    let (config, pids) = (dir.text("config"), dir.text("pids"));
    let program = format!("(sleep 1000 & echo $$ $! > {pids}; wait)");
    std::fs::write(&config, format!("[default]\nregion = x\ncredential_process = {program}\n"))
        .expect("a file");
    for signal in [Signal::TERM, Signal::INT, Signal::KILL] {
        drop(std::fs::remove_file(&pids));
        let mut command = vellum_command();
        command.args(["info", "s3://bucket/base.raw"]).env("AWS_ENDPOINT_URL", web.url(""));
        command.env("AWS_CONFIG_FILE", &config).env("AWS_SHARED_CREDENTIALS_FILE", dir.text("none"));
        let mut asking = command.stderr(Stdio::null()).stdout(Stdio::null()).spawn().expect("our program");
        let said = || std::fs::read_to_string(&pids).unwrap_or_default();
        until("the program runs", || said().ends_with('\n'));
        kill_process(pid_of(&asking), signal).expect("it runs");
        asking.wait().expect("it ends");
        for pid in said().split_whitespace() {
            let state = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            // One whose end its new parent has not looked at yet has ended all the same.
            until("it has ended", || state().is_empty() || state().contains(") Z "));
        }
    }
}

#[test]
fn a_version_of_an_object_is_a_base_that_never_changes() {
    let (web, dir) = (Web::start(), Dir::new("remote-s3-version"));
    let (image, copy, endpoint) = (dir.text("clone.qcow2"), dir.text("copy.raw"), web.url(""));
    let run = |arguments: &[&str]| {
        let mut command = vellum_command();
        command.args(arguments).env("AWS_ENDPOINT_URL", &endpoint).env("AWS_REGION", "x");
        command.env("AWS_ACCESS_KEY_ID", "key").env("AWS_SECRET_ACCESS_KEY", "hush");
        finish(command, None)
    };
    let create = |url: &str| run(&["create", "-q", "-f", "qcow2", "-b", url, "-F", "raw", &image]);
    let versioned = "s3://bucket/base.raw?versionId=version.1";
    web.put("/bucket/base.raw", patchy(LEN, 14));
    let refused = create(versioned);
    assert!(refused.code == 1 && refused.err.contains("it keeps no versions"), "{refused:?}");
    web.keep_versions();
    let bytes = patchy(LEN, 15);
    web.put("/bucket/base.raw", bytes.clone());
    web.put("/bucket/base.raw", patchy(LEN, 16));
    // Not even an entity tag is needed.
    web.set_tag("/bucket/base.raw", "");
    let refused = create("s3://bucket/base.raw");
    assert!(refused.code == 1 && refused.err.contains("the version of an object in a store"), "{refused:?}");
    assert_eq!(create(versioned).code, 0);
    let pin = run(&["info", "--output", "json", &image]).json()["backing-pin"][0].clone();
    assert_eq!((pin["kind"].as_str(), pin["value"].as_str()), (Some("version"), Some("version.1")));
    let convert = ["convert", "--allow-url", "s3://bucket/", "-O", "raw", &image, &copy];
    run(&convert).answer();
    assert_eq!(first_difference(&std::fs::read(&copy).expect("a copy"), &bytes), None);
    // It stays what it is when the object is replaced, and deleted.
    web.put("/bucket/base.raw", vec![1; 4096]);
    web.delete("/bucket/base.raw");
    run(&convert).answer();
    assert_eq!(first_difference(&std::fs::read(&copy).expect("a copy"), &bytes), None);
    let missing = create("s3://bucket/base.raw?versionId=version.9");
    assert!(missing.code == 1 && missing.err.contains("version.9"), "{missing:?}");
}

#[test]
fn an_image_that_copies_from_a_file_is_pinned_to_it() {
    let dir = Dir::new("remote-file-pin");
    let (base, image) = (dir.text("base.raw"), dir.text("clone.qcow2"));
    std::fs::write(&base, patchy(LEN, 11)).expect("a base");
    vellum(&["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", &image]).answer();
    assert_eq!(Server::start(&[&image]).stop().code, 0);
    assert!(!vellum(&["info", &image]).answer().contains("backing file pin"), "nothing is copied");
    assert_eq!(Server::start(&["--copy-on-read", &image]).stop().code, 0);
    let text = vellum(&["info", &image]).answer();
    assert!(text.contains(&format!("backing file pin: file {LEN} ")), "{text}");
    assert_eq!(Server::start(&["--copy-on-read", &image]).stop().code, 0, "it is the same file");
    std::fs::write(&base, patchy(LEN, 12)).expect("another base");
    let changed = Server::try_start(&[&image]).err().expect("it is refused");
    assert!(changed.err.contains("has changed: it was"), "{changed:?}");
}
