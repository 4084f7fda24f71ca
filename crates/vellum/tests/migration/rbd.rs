//! Images of a Ceph cluster, one that the test starts: snapshots as bases, and what fails with them.

use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::{Ran, finish, path_text, pid_of, vellum_command};
use super::support::server::Server;
use super::support::{first_difference, patchy, until};
use crate::requires;

const LEN: usize = 9 << 20;

/// A cluster of one monitor and one OSD, ended with the test.
struct Cluster {
    script: Child,
    dir: Dir,
}

impl Cluster {
    /// One whose port is taken before its monitor has it, or whose daemons do not find each other, is tried again.
    fn start() -> Self {
        let mut trials = (0..3).filter_map(|_| Self::try_start());
        trials.next().expect("a cluster starts")
    }

    fn try_start() -> Option<Self> {
        let dir = Dir::short();
        let port =
            TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tools/ceph-cluster.sh");
        let mut script = Command::new(script)
            .args([path_text(dir.path()), &port.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the script");
        let mut said = String::new();
        BufReader::new(script.stdout.take().expect("it was asked for")).read_line(&mut said).expect("a line");
        let cluster = Self { script, dir };
        (said == "ready\n").then_some(cluster)
    }

    fn config(&self) -> String {
        self.dir.text("ceph.conf")
    }

    #[track_caller]
    fn rbd(&self, arguments: &[&str]) {
        // It waits for a cluster that is away for ever.
        let ran = Command::new("timeout")
            .args(["120", "rbd"])
            .args(arguments)
            .env("CEPH_CONF", self.config())
            .output();
        let ran = ran.expect("it is installed");
        assert!(ran.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&ran.stderr));
    }

    fn vellum(&self, arguments: &[&str]) -> Ran {
        self.vellum_as("reader", arguments)
    }

    fn vellum_as(&self, user: &str, arguments: &[&str]) -> Ran {
        let mut command = vellum_command();
        command.args(arguments).env("CEPH_CONF", self.config()).env("CEPH_ARGS", format!("--id {user}"));
        finish(command, None)
    }

    fn serve(&self, arguments: &[&str]) -> Result<Server, Box<Ran>> {
        let config = self.config();
        Server::try_start_in(&[("CEPH_CONF", &config), ("CEPH_ARGS", "--id reader")], arguments)
    }

    fn osd(&self) -> Option<Pid> {
        let pid = std::fs::read_to_string(self.dir.join("osd.0.pid")).ok()?;
        Pid::from_raw(pid.trim().parse().ok()?)
    }

    /// Stops the OSD. When this returns none of its threads answers anything.
    fn stop_osd(&self) -> Stopped<'_> {
        let pid = self.osd().expect("its number");
        kill_process(pid, Signal::STOP).expect("it runs");
        let is_stopped = || {
            let mut tasks =
                std::fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero())).expect("it runs");
            tasks.all(|task| {
                let stat = std::fs::read_to_string(task.expect("an entry").path().join("stat"));
                // A thread may have just ended; the name before the state may hold anything.
                stat.map_or(true, |stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')))
            })
        };
        until("all of its threads are stopped", is_stopped);
        Stopped(self)
    }

    /// The keys of its users.
    fn keys(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.dir.join("keyring")).expect("the keyring");
        text.lines().filter_map(|line| line.trim().strip_prefix("key = ")).map(str::to_owned).collect()
    }
}

/// A cluster without its OSD, which goes on when this is dropped: also when a test fails meanwhile. What waits for it would
/// wait for ever.
struct Stopped<'a>(&'a Cluster);

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        if let Some(pid) = self.0.osd() {
            let _ = kill_process(pid, Signal::CONT);
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = kill_process(pid_of(&self.script), Signal::TERM);
        drop(self.script.wait());
    }
}

#[track_caller]
fn says_no(ran: &Ran, words: &[&str]) {
    assert_eq!((ran.code, ran.err.lines().count()), (1, 1), "{ran:?}");
    assert!(words.iter().all(|word| ran.err.contains(word)), "{words:?}: {}", ran.err);
}

#[test]
fn a_snapshot_of_a_ceph_cluster_is_a_base() {
    requires!("ceph-mon", "ceph-osd", "ceph-authtool", "monmaptool", "ceph", "rbd");
    let cluster = Cluster::start();
    let dir = Dir::new("rbd");
    let (raw, disk) = (dir.text("base.raw"), patchy(LEN, 1));
    std::fs::write(&raw, &disk).expect("a file");
    cluster.rbd(&["import", &raw, "disks/base"]);
    cluster.rbd(&["snap", "create", "disks/base@v1"]);
    let url = "rbd:disks/base@v1";
    let facts = cluster.vellum(&["info", "--output", "json", url]).json();
    assert_eq!(facts["virtual-size"], LEN as u64, "{facts}");

    // What proves nothing must be trusted: the image as it is now, and a snapshot that can be deleted.
    let image = dir.text("clone.qcow2");
    let create = |url: &str, more: &[&str]| {
        let arguments =
            [&["create", "-q", "-f", "qcow2", "-b", url, "-F", "raw"][..], more, &[&image]].concat();
        cluster.vellum(&arguments)
    };
    for unproven in ["rbd:disks/base", url] {
        says_no(&create(unproven, &[]), &[unproven, "--trust-base", "protected"]);
    }
    create("rbd:disks/base", &["--trust-base"]).answer();
    let pin =
        |image: &str| cluster.vellum(&["info", "--output", "json", image]).json()["backing-pin"][0].clone();
    assert_eq!(pin(&image)["kind"], "trusted");
    cluster.rbd(&["snap", "protect", "disks/base@v1"]);

    for format in ["qcow2", "vellum"] {
        let image = dir.text(&format!("pinned.{format}"));
        cluster.vellum(&["create", "-q", "-f", format, "-b", url, "-F", "raw", &image]).answer();
        assert_eq!(
            (&pin(&image)["kind"], &pin(&image)["length"]),
            (&"snapshot".into(), &(LEN as u64).into())
        );
        let refused = cluster.serve(&["-f", format, &image]).err().expect("it is refused");
        assert!(refused.err.contains(&format!("--allow-url {url}")), "{refused:?}");
        let served =
            cluster.serve(&["-f", format, "--allow-url", "rbd:disks/", &image]).expect("it is served");
        let mut guest = Client::connect(&served.peer(), "").expect("a connection");
        guest.write(1 << 20, &[9; 70_000], 0).expect("written");
        let mut now = disk.clone();
        now[1 << 20..(1 << 20) + 70_000].fill(9);
        // What is written to the image in the cluster is no part of its snapshot.
        cluster.rbd(&["bench", "--io-type", "write", "--io-total", "1M", "disks/base"]);
        assert_eq!(first_difference(&guest.read_all().expect("read"), &now), None, "{format}");
        guest.disconnect();
        let stats = served.stop_and_count();
        assert_eq!(stats["remote"][0]["url"], url, "{stats}");
        let stored = std::fs::read(&image).expect("the image");
        for key in cluster.keys() {
            assert!(!stored.windows(key.len()).any(|part| part == key.as_bytes()), "no key is in an image");
        }
    }

    // Reads are held while the cluster is away.
    let image = dir.text("pinned.qcow2");
    let served = cluster.serve(&["--allow-url", "rbd:disks/base", &image]).expect("it is served");
    let mut guest = Client::connect(&served.peer(), "").expect("a connection");
    let stopped = cluster.stop_osd();
    std::thread::scope(|scope| {
        // Dropped before the scope waits for its thread, whatever fails here.
        let stopped = stopped;
        let reading = scope.spawn(|| guest.read(4 << 20, 4096));
        std::thread::sleep(Duration::from_millis(300));
        assert!(!reading.is_finished(), "it is held");
        drop(stopped);
        assert_eq!(reading.join().expect("no panic").expect("in the end"), disk[4 << 20..(4 << 20) + 4096]);
    });
    guest.disconnect();
    served.stop();
    let patient = ["--allow-url", "rbd:disks/base", "--remote-timeout", "1", &image];
    let served = cluster.serve(&patient).expect("it is served");
    let mut guest = Client::connect(&served.peer(), "").expect("a connection");
    let stopped = cluster.stop_osd();
    assert!(guest.read(4 << 20, 4096).is_err(), "it is given up");
    assert_eq!(guest.read(1 << 20, 4096).expect("its own"), [9; 4096]);
    drop(stopped);
    until("it is tried again", || {
        guest.read(4 << 20, 4096).is_ok_and(|read| read == disk[4 << 20..(4 << 20) + 4096])
    });
    guest.disconnect();
    served.stop();

    // Another snapshot of the name is not the one that it was.
    cluster.rbd(&["snap", "unprotect", "disks/base@v1"]);
    cluster.rbd(&["snap", "rm", "disks/base@v1"]);
    let gone = cluster.serve(&["--allow-url", "rbd:disks", &image]).err().expect("it is gone");
    assert!(gone.err.contains(url) && gone.err.contains("No such file"), "{gone:?}");
    cluster.rbd(&["snap", "create", "disks/base@v1"]);
    cluster.rbd(&["snap", "protect", "disks/base@v1"]);
    let changed = cluster.serve(&["--allow-url", "rbd:disks", &image]).err().expect("it has changed");
    assert!(changed.err.contains("has changed: it was"), "{changed:?}");

    says_no(&cluster.vellum(&["info", "rbd:nothing/base"]), &["rbd:nothing/base", "pool nothing"]);
    says_no(&cluster.vellum(&["info", "rbd:disks/nothing"]), &["rbd:disks/nothing"]);
    says_no(&cluster.vellum_as("stranger", &["info", url]), &[url, "client.stranger"]);
    let socket = format!("unix:{}", dir.text("socket"));
    says_no(&cluster.vellum(&["serve", "--nbd", &socket, url]), &["cannot be written"]);
}

#[test]
fn a_missing_library_is_named_with_its_package() {
    let dir = Dir::new("rbd-absent");
    for name in ["librados.so.2", "librbd.so.1"] {
        std::fs::write(dir.join(name), "no library").expect("a file");
    }
    let mut command = vellum_command();
    command.args(["info", "rbd:disks/base@v1"]).env("LD_LIBRARY_PATH", PathBuf::from(dir.path()));
    says_no(&finish(command, None), &["rbd:disks/base@v1", "librbd1"]);
}

#[test]
fn options_with_keys_are_refused_and_not_repeated() {
    let mut command = vellum_command();
    command.args(["info", "rbd:disks/base:id=admin:key=AQBhunter2=="]);
    let ran = finish(command, None);
    says_no(&ran, &["CEPH_CONF", "CEPH_ARGS"]);
    assert!(!ran.err.contains("hunter2"), "{ran:?}");
}
