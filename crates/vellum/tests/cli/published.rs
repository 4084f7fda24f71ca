//! Templates in a store, here a directory: pushed, listed, pulled, removed, collected; killed on the way. And in a
//! bucket of a real server, where Python has moto.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime};

use rustix::process::{Signal, kill_process};

use vellum_web::{Fault, Server as Web};

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::{Ran, finish, path_text, pid_of, run, skipped, vellum, vellum_command};
use super::support::server::Server;
use super::support::{first_difference, noise, patchy, until};
use super::{MIB, is_refusal, refused};

/// A store, and a URL in it.
fn store(dir: &Dir) -> (String, impl Fn(&str) -> String) {
    std::fs::create_dir(dir.join("store")).expect("makes it");
    let url = format!("file://{}", dir.text("store"));
    (url.clone(), move |name| format!("{url}/{name}"))
}

fn objects(below: &Path) -> usize {
    let entries = std::fs::read_dir(below).into_iter().flatten().map(|entry| entry.expect("an entry").path());
    // A name with `#` is an object that is being written.
    entries
        .map(|path| match path.is_dir() {
            true => objects(&path),
            false => usize::from(!path_text(&path).contains('#') && !path.ends_with("CACHEDIR.TAG")),
        })
        .sum()
}

fn same(one: &str, other: &str) {
    vellum(&["compare", one, other]).answer();
}

#[test]
fn a_template_goes_into_a_store_and_comes_out_in_any_format() {
    let dir = Dir::new("published");
    let (store, url) = store(&dir);
    let (raw, image) = (dir.text("t.raw"), dir.text("t.qcow2"));
    std::fs::write(&raw, patchy(9 * MIB + 512, 1)).expect("a disk");
    vellum(&["convert", "-O", "qcow2", &raw, &image]).answer();
    let pushed = vellum(&["template", "push", "--output", "json", &image, &url("debian:1")]).json();
    assert!(pushed["is-new"] == true && pushed["uploaded-chunks"] == pushed["chunks"], "{pushed}");
    // One chunk is another in the next version.
    let mut bytes = std::fs::read(&raw).expect("reads");
    bytes[MIB..MIB + 10].copy_from_slice(&noise(10, 2));
    std::fs::write(dir.join("t2.raw"), bytes).expect("writes");
    let pushed =
        vellum(&["template", "push", "--output", "json", &dir.text("t2.raw"), &url("debian:2")]).json();
    assert_eq!(pushed["uploaded-chunks"], 1, "{pushed}");
    let said = vellum(&["template", "push", &image, &url("debian:1")]).answer();
    assert!(said.contains("was published already: debian:1"), "{said}");
    refused(1, &["versions are never replaced"], &["template", "push", &image, &url("debian:2")]);
    let listed = vellum(&["template", "list", "--output", "json", &store]).json();
    let names: Vec<_> = listed.as_array().expect("rows").iter().map(|row| row["version"].clone()).collect();
    assert_eq!(names, ["1", "2"], "{listed}");
    let cache = dir.text("cache");
    for (name, target, source) in [("debian:1", "1.qcow2", "t.raw"), ("debian", "2.vlm", "t2.raw")] {
        let target = dir.text(target);
        let pulled =
            vellum(&["template", "pull", "--output", "json", "--chunk-cache", &cache, &url(name), &target])
                .json();
        assert!(pulled["fetched-chunks"].as_u64() > Some(0), "{pulled}");
        same(&target, &dir.text(source));
    }
    // All that the second version shares with the first came from the cache; and now all of it does.
    let target = dir.text("3.raw");
    let pulled =
        vellum(&["template", "pull", "--output", "json", "--chunk-cache", &cache, &url("debian:2"), &target]);
    let pulled = pulled.json();
    assert!(pulled["fetched-chunks"] == 0 && pulled["cached-chunks"].as_u64() > Some(0), "{pulled}");
    same(&target, &dir.text("t2.raw"));
}

#[test]
fn what_no_version_needs_is_collected() {
    let dir = Dir::new("published-gc");
    let (store, url) = store(&dir);
    std::fs::write(dir.join("a.raw"), noise(2 * MIB, 1)).expect("a disk");
    std::fs::write(dir.join("b.raw"), noise(3 * MIB, 2)).expect("a disk");
    vellum(&["template", "push", "-q", &dir.text("a.raw"), &url("a:1")]).answer();
    vellum(&["template", "push", "-q", &dir.text("b.raw"), &url("b:1")]).answer();
    let gc = |more: &[&str]| vellum(&[&["template", "gc", "--output", "json", &store], more].concat()).json();
    assert_eq!(gc(&["--grace", "0"])["deleted-chunks"], 0);
    vellum(&["template", "remove", &url("b:1")]).answer();
    refused(1, &["has no template b:1"], &["template", "remove", &url("b:1")]);
    refused(1, &["say which version"], &["template", "remove", &url("a")]);
    assert_eq!(gc(&[])["young-chunks"], 12, "a day of grace");
    assert_eq!(gc(&["--grace", "0", "--dry-run"])["deleted-chunks"], 12);
    assert_eq!(objects(&dir.join("store/chunks")), 8 + 12);
    assert_eq!(gc(&["--grace", "0"])["deleted-chunks"], 12);
    assert_eq!(objects(&dir.join("store/chunks")), 8);
    vellum(&["template", "pull", "-q", &url("a:1"), &dir.text("out.raw")]).answer();
    same(&dir.text("out.raw"), &dir.text("a.raw"));
    refused(1, &["is not published"], &["template", "pull", &url("b:1"), &dir.text("out2.raw")]);
    refused(1, &["has no template b"], &["template", "pull", &url("b"), &dir.text("out2.raw")]);
}

#[test]
fn a_push_that_was_killed_or_interrupted_is_continued() {
    let dir = Dir::new("published-kill");
    let (store, url) = store(&dir);
    let image = dir.text("t.raw");
    std::fs::write(&image, noise(64 * MIB, 1)).expect("a disk");
    let chunks = dir.join("store/chunks");
    for signal in [Signal::KILL, Signal::INT] {
        let before = objects(&chunks);
        let mut child = vellum_command()
            .args(["template", "push", "--chunk-size", "64k", &image, &url("debian:1")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("our program");
        until("chunks are there", || objects(&chunks) > before + 20);
        kill_process(pid_of(&child), signal).expect("it is ours");
        let status = child.wait().expect("it ends");
        assert_eq!(status.code(), (signal == Signal::INT).then_some(130), "{status}");
        assert_eq!(objects(&dir.join("store/index")), 0, "nothing is published");
    }
    let there = objects(&chunks) as u64;
    let pushed =
        vellum(&["template", "push", "--chunk-size", "64k", "--output", "json", &image, &url("debian:1")])
            .json();
    assert_eq!(pushed["chunks"], 1024);
    assert_eq!(pushed["uploaded-chunks"], 1024 - there, "{pushed}");
    // The one that was killed left its lease; the one that was interrupted gave it back.
    assert_eq!(objects(&dir.join("store/leases")), 1);
    refused(1, &["its lease lapses at"], &["template", "gc", &store]);
    // Long after that, what the one that was killed has left is collected, and nothing of others.
    let day = SystemTime::now() - Duration::from_secs(86_400);
    let leases = dir.join("store/leases");
    let [left, foreign] = ["store/chunks/00/left#1", "store/left#1"].map(|name| dir.join(name));
    std::fs::create_dir_all(dir.join("store/chunks/00")).expect("a part");
    let lease = std::fs::read_dir(&leases).expect("leases").next().expect("one").expect("one").path();
    for file in [&left, &foreign, &lease] {
        let opened = std::fs::File::options().create(true).append(true).open(file).expect("a file");
        opened.set_modified(day).expect("old");
    }
    vellum(&["template", "gc", &store]).answer();
    assert_eq!((left.exists(), foreign.exists(), lease.exists()), (false, true, false));
    vellum(&["template", "pull", "-q", &url("debian:1"), &dir.text("out.raw")]).answer();
    same(&dir.text("out.raw"), &image);
}

#[test]
fn what_names_no_store_is_refused() {
    let dir = Dir::new("published-words");
    let image = dir.text("t.raw");
    std::fs::write(&image, noise(MIB, 1)).expect("a disk");
    let push = |url: &str, words: &[&str]| drop(refused(1, words, &["template", "push", &image, url]));
    push("debian", &["names no template"]);
    push("s3://key:secret@bucket/debian", &["credentials stand in the environment"]);
    push("http://host/debian", &["neither s3:// nor file://"]);
    push(&format!("file://{}/debian", dir.text("none")), &["create it first"]);
    push(&format!("file://{}/-x:.y", dir.text("none")), &["cannot name a template"]);
    let usage = vellum(&["template", "push", "--chunk-size", "100k", &image, "x"]);
    assert!(usage.code == 1 && usage.err.contains("power of two"), "{usage:?}");
}

/// Credentials for a store of ours, and where it is.
fn store_of(web: &Web) -> [(&'static str, String); 4] {
    [
        ("AWS_ENDPOINT_URL", web.url("")),
        ("AWS_REGION", "x".to_owned()),
        ("AWS_ACCESS_KEY_ID", "key".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "hush".to_owned()),
    ]
}

#[test]
fn a_published_template_is_the_base_of_clones_and_a_host_fetches_it_once() {
    let (web, dir) = (Web::start(), Dir::new("published-base"));
    let variables = store_of(&web);
    let variables = variables.each_ref().map(|(name, value)| (*name, value.as_str()));
    let run = |arguments: &[&str]| {
        let mut command = vellum_command();
        finish(
            {
                command.args(arguments).envs(variables);
                command
            },
            None,
        )
    };
    let (raw, cache) = (dir.text("t.raw"), dir.text("cache"));
    let bytes = patchy(6 * MIB, 5);
    std::fs::write(&raw, &bytes).expect("a disk");
    let url = "s3://bucket/t/debian:1";
    let pushed = run(&["template", "push", "--output", "json", &raw, url]).json();
    let chunks = pushed["uploaded-chunks"].as_u64().expect("a number");
    // Two clones, served one after the other by processes of their own.
    for (turn, format) in ["qcow2", "vellum"].into_iter().enumerate() {
        let image = dir.text(&format!("clone.{format}"));
        let made = run(&["create", "-q", "-f", format, "-b", url, "-F", "raw", &image]);
        assert_eq!(made.code, 0, "{made:?}");
        let pin = run(&["info", "--output", "json", &image]).json()["backing-pin"][0].clone();
        assert!(pin["kind"] == "index" && pin["value"] == pushed["digest"], "{pin}");
        let arguments = ["-f", format, "--allow-url", "s3://bucket/t/", "--chunk-cache", &cache, &image];
        let served = Server::try_start_in(&variables, &arguments).unwrap_or_else(|ran| panic!("{ran:?}"));
        let mut guest = Client::connect(&served.peer(), "").expect("a connection");
        assert_eq!(first_difference(&guest.read_all().expect("read"), &bytes), None, "{format}");
        guest.write(MIB as u64, &[9; 5000], 0).expect("written");
        guest.disconnect();
        until("the cache has all chunks", || objects(Path::new(&cache)) as u64 == chunks);
        let stats = served.stop_and_count();
        let remote = &stats["remote"][0];
        let expected = if turn == 0 { (chunks, 0) } else { (0, chunks) };
        assert_eq!(
            (remote["requests"].as_u64(), remote["cached"].as_u64()),
            (Some(expected.0), Some(expected.1))
        );
        assert_eq!(remote["fetched-bytes"] == 0, turn > 0, "{remote}");
    }
    // Without the cache, and with a store that lies or has lost a chunk: an error, and the clone stays sound.
    std::fs::remove_dir_all(&cache).expect("it may be deleted at any time");
    let image = dir.text("clone.qcow2");
    let serve = || {
        let arguments = ["--allow-url", "s3://bucket/", "--remote-timeout", "2", &image];
        Server::try_start_in(&variables, &arguments).unwrap_or_else(|ran| panic!("{ran:?}"))
    };
    let served = serve();
    let mut guest = Client::connect(&served.peer(), "").expect("a connection");
    for fault in [Fault::OtherBytes, Fault::Short, Fault::Stall] {
        web.always(fault.clone());
        assert!(guest.read(0, 3 << 20).is_err(), "{fault:?}");
        web.always(Fault::None);
        web.release();
    }
    assert_eq!(guest.read(0, 4096).expect("it is well again"), bytes[..4096]);
    web.next(&[Fault::Status(503), Fault::Reset, Fault::OtherBytes]);
    assert_eq!(guest.read(5 << 20, 4096).expect("tried again"), bytes[5 << 20..(5 << 20) + 4096]);
    guest.disconnect();
    served.stop();
    let lost: Vec<String> = web.paths().into_iter().filter(|path| path.contains("/chunks/")).collect();
    assert!(lost.iter().all(|path| web.delete(path)));
    let served = serve();
    let mut guest = Client::connect(&served.peer(), "").expect("a connection");
    assert!(guest.read(0, 3 << 20).is_err(), "its chunks are gone");
    guest.disconnect();
    assert_eq!(served.stop().code, 0);
    let convert = ["convert", "--allow-url", "s3://bucket/", "-O", "raw", &image, &dir.text("out.raw")];
    is_refusal(&run(&convert), 1, &["debian:1", "is missing in the store", "vellum template push"], &convert);
    // The image above is not marked as corrupt, and the remedy helps.
    let again = run(&["template", "push", "--output", "json", &raw, url]).json();
    assert_eq!(again["uploaded-chunks"], chunks, "{again}");
    run(&convert).answer();
    // Another content under the same name is not this base.
    std::fs::write(dir.join("other.raw"), patchy(6 * MIB, 6)).expect("a disk");
    run(&["template", "remove", url]).answer();
    run(&["template", "push", "-q", &dir.text("other.raw"), url]).answer();
    is_refusal(&run(&convert), 1, &["has changed"], &convert);
}

#[test]
fn what_waits_for_a_store_ends_at_once_when_it_is_asked_to() {
    let (web, dir) = (Web::start(), Dir::new("published-ends"));
    let variables = store_of(&web);
    let variables = variables.each_ref().map(|(name, value)| (*name, value.as_str()));
    let command = |arguments: &[&str]| {
        let mut command = vellum_command();
        command.args(arguments).envs(variables);
        command
    };
    let (raw, image, url) = (dir.text("t.raw"), dir.text("clone.qcow2"), "s3://bucket/t/debian:1");
    std::fs::write(&raw, noise(MIB, 9)).expect("a disk");
    finish(command(&["template", "push", "-q", &raw, url]), None).answer();
    finish(command(&["create", "-q", "-f", "qcow2", "-b", url, "-F", "raw", &image]), None).answer();
    let socket = Dir::short();
    let address = format!("unix:{}", socket.text("nbd"));
    let patient = ["--allow-url", "s3://bucket/t/", "--remote-timeout", "3600"];
    let serve: &[&str] = &["serve", "--nbd", &address, &image];
    let convert: &[&str] = &["convert", "-O", "raw", &image, &dir.text("copy.raw")];
    let flatten: &[&str] = &["flatten", &image];
    for (command_line, code) in [(serve, 0), (convert, 130), (flatten, 130)] {
        web.always(Fault::Stall);
        let before = web.counts().reads;
        let mut command = command(&[command_line, &patient].concat());
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("our own program");
        let mut child = Killed(child);
        until("it waits for the index of the template", || web.counts().reads > before);
        kill_process(pid_of(&child.0), Signal::INT).expect("it runs");
        // It would wait for an hour.
        until("it ends", || child.0.try_wait().expect("a child").is_some());
        let status = child.0.wait().expect("it has ended");
        assert_eq!(status.code(), Some(code), "{command_line:?}: {status}");
        web.always(Fault::None);
        web.release();
    }
    finish(command(&["check", &image]), None).answer();
}

/// A process that does not outlive this.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[test]
fn credentials_that_expire_are_fetched_anew() {
    let (web, dir) = (Web::start(), Dir::new("published-keys"));
    let (config, keys, image) = (dir.text("config"), dir.text("keys"), dir.text("clone.qcow2"));
    let print = |key: &str| {
        let printed = format!(r#"{{"Version":1,"AccessKeyId":"{key}","SecretAccessKey":"hush"}}"#);
        std::fs::write(&keys, printed).expect("writes");
    };
    let url = web.url("");
    std::fs::write(
        &config,
        format!("[default]\nregion = x\nendpoint_url = {url}\ncredential_process = cat {keys}\n"),
    )
    .expect("writes");
    let none = dir.text("none");
    let variables = [("AWS_CONFIG_FILE", config.as_str()), ("AWS_SHARED_CREDENTIALS_FILE", none.as_str())];
    let run = |arguments: &[&str]| {
        let mut command = vellum_command();
        command.args(arguments).envs(variables);
        finish(command, None)
    };
    let (raw, bytes) = (dir.text("t.raw"), noise(2 * MIB, 8));
    std::fs::write(&raw, &bytes).expect("a disk");
    print("ONE");
    web.require_key(Some("ONE"));
    run(&["template", "push", "-q", &raw, "s3://bucket/t/debian:1"]).answer();
    run(&["create", "-q", "-f", "qcow2", "-b", "s3://bucket/t/debian:1", "-F", "raw", &image]).answer();
    let arguments = ["--allow-url", "s3://bucket/t/", &image];
    let served = Server::try_start_in(&variables, &arguments).unwrap_or_else(|ran| panic!("{ran:?}"));
    let mut guest = Client::connect(&served.peer(), "").expect("a connection");
    assert_eq!(guest.read(0, 4096).expect("read"), bytes[..4096]);
    web.require_key(Some("TWO"));
    print("TWO");
    assert_eq!(guest.read(MIB as u64, 4096).expect("with the new key"), bytes[MIB..MIB + 4096]);
    // No key is right any more.
    web.require_key(Some("THREE"));
    assert!(guest.read(MIB as u64 + (MIB as u64) / 2, 4096).is_err());
    guest.disconnect();
    served.stop();
    let push = ["template", "push", &raw, "s3://bucket/t/debian:2"];
    let denied = run(&push);
    is_refusal(&denied, 1, &["s3://bucket/t/leases/", "check AWS_ACCESS_KEY_ID"], &push);
    assert!(!denied.err.contains("hush"), "{denied:?}");
}

#[test]
fn blocks_of_a_web_server_are_fetched_once_by_a_host() {
    let (web, dir) = (Web::start(), Dir::new("published-blocks"));
    let bytes = noise(3 * MIB, 7);
    web.put("/base.raw", bytes.clone());
    let (url, image, cache) = (web.url("/base.raw"), dir.text("clone.qcow2"), dir.text("cache"));
    vellum(&["create", "-q", "-f", "qcow2", "-b", &url, "-F", "raw", &image]).answer();
    let read_all = |bytes: &[u8]| {
        let served = Server::start(&["--allow-url", &url, "--chunk-cache", &cache, &image]);
        let mut guest = Client::connect(&served.peer(), "").expect("a connection");
        assert_eq!(first_difference(&guest.read_all().expect("read"), bytes), None);
        guest.disconnect();
        until("the cache has all blocks", || objects(Path::new(&cache)) == bytes.len() / (64 << 10));
        served.stop_and_count()["remote"][0].clone()
    };
    let first = read_all(&bytes);
    assert_eq!(first["fetched-bytes"].as_u64(), Some(bytes.len() as u64), "{first}");
    let second = read_all(&bytes);
    assert!(second["fetched-bytes"] == 0 && second["cached"] == 48, "{second}");
}

/// A server of moto, which ends with this.
struct Moto {
    child: Child,
    endpoint: String,
}

impl Moto {
    /// Where Python has it: in the environment that `cargo xtask packages` makes, or anywhere in the path.
    fn start(dir: &Dir) -> Option<Self> {
        let own = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../moto/bin/moto_server");
        let program = if own.exists() { path_text(&own).to_owned() } else { "moto_server".to_owned() };
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("it is bound").port();
        drop(listener);
        let log = std::fs::File::create(dir.join("moto.log")).expect("a log");
        let child = Command::new(program)
            .args(["-H", "127.0.0.1", "-p", &port.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .ok()?;
        let moto = Self {
            child,
            endpoint: format!("http://{}", std::net::SocketAddr::from(([127, 0, 0, 1], port))),
        };
        until("moto listens", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
        Some(moto)
    }

    fn vellum(&self, secret: &str, arguments: &[&str]) -> Ran {
        let mut command = vellum_command();
        command.args(arguments).env("AWS_ENDPOINT_URL", &self.endpoint).env("AWS_REGION", "us-east-1");
        command.env("AWS_ACCESS_KEY_ID", "key").env("AWS_SECRET_ACCESS_KEY", secret);
        finish(command, None)
    }
}

impl Drop for Moto {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

#[test]
fn a_bucket_of_a_real_server_is_a_store() {
    let dir = Dir::new("published-moto");
    let Some(moto) = Moto::start(&dir) else {
        return skipped("there is no moto_server; `cargo xtask packages` gets one");
    };
    let bucket = ["-sf", "-X", "PUT", &format!("{}/images", moto.endpoint)].map(str::to_owned);
    if run("curl", &bucket).code != 0 {
        return skipped("curl cannot make a bucket");
    }
    let image = dir.text("t.raw");
    let bytes = patchy(5 * MIB, 1);
    std::fs::write(&image, &bytes).expect("a disk");
    let url = "s3://images/templates/debian:1";
    let vellum_s3 = |arguments: &[&str]| moto.vellum("hush", arguments);
    let pushed = vellum_s3(&["template", "push", "--output", "json", &image, url]).json();
    assert_eq!(pushed["is-new"], true, "{pushed}");
    let again = vellum_s3(&["template", "push", "--output", "json", &image, url]).json();
    assert!(again["is-new"] == false && again["uploaded-chunks"] == 0, "{again}");
    std::fs::write(dir.join("other.raw"), noise(MIB, 3)).expect("a disk");
    let other = ["template", "push", &dir.text("other.raw"), url];
    is_refusal(&vellum_s3(&other), 1, &["versions are never replaced"], &other);
    let listed = vellum_s3(&["template", "list", "--output", "json", "s3://images/templates"]).json();
    assert_eq!(listed[0]["version"], "1", "{listed}");
    vellum_s3(&["template", "pull", "-q", url, &dir.text("out.raw")]).answer();
    same(&dir.text("out.raw"), &image);
    // The chunks of the push that was refused are needed by no version.
    let gc = ["template", "gc", "--grace", "0", "--output", "json", "s3://images/templates"];
    let collected = vellum_s3(&gc).json();
    assert_eq!(collected["deleted-chunks"], 4, "{collected}");
    vellum_s3(&["template", "pull", "-q", "s3://images/templates/debian", &dir.text("out2.raw")]).answer();
    same(&dir.text("out2.raw"), &image);
    // A bucket that is not there, and a server that is not there.
    let missing = ["template", "push", &image, "s3://none/debian:1"];
    is_refusal(&vellum_s3(&missing), 1, &["NoSuchBucket"], &missing);
    let mut away = vellum_command();
    let nowhere = format!("http://{}", std::net::SocketAddr::from(([127, 0, 0, 1], 9)));
    away.args(["template", "list", "s3://images/templates"]).env("AWS_ENDPOINT_URL", nowhere);
    away.env("AWS_ACCESS_KEY_ID", "key")
        .env("AWS_SECRET_ACCESS_KEY", "hush")
        .env("VELLUM_STORE_TIMEOUT", "2");
    let ran = finish(away, None);
    assert!(ran.code == 1 && ran.err.contains("s3://images/templates/index"), "{ran:?}");
    assert!(!ran.err.contains("hush"), "{ran:?}");
}
