//! Limits on the requests of a disk, given when it is served and changed meanwhile.

use std::time::Instant;

use rustix::process::Signal;

use super::support::PATIENCE;
use super::support::client::{FLUSH, WRITE};
use super::support::dir::Dir;
use super::support::program::vellum;
use super::support::server::Server;
use super::{Controlled, made, told_of, until};

/// So many writes that do not wait for each other. How long it took until all were answered, in seconds.
fn write_many(served: &Controlled, count: u64, bytes: u32) -> f64 {
    let mut client = served.client("");
    let begun = Instant::now();
    for number in 0..count {
        let data = vec![7; bytes as usize];
        client.send(WRITE, 0, number * u64::from(bytes), bytes, &data).expect("sent");
    }
    for _ in 0..count {
        assert_eq!(client.answer().expect("an answer").error, 0);
    }
    begun.elapsed().as_secs_f64()
}

/// Only what must be so on any host: that it took at least as long as the limit makes it.
#[test]
fn no_more_goes_through_than_is_said() {
    let dir = Dir::new("control-limits");
    let image = made(&dir, "vellum", "", "64M");
    let served = Controlled::start(&["--limit", "iops-total=200", &image]);
    assert_eq!(served.json("limits", &[])["limits"]["iops-total"], 200);
    // Twenty-one begin at once.
    let seconds = write_many(&served, 121, 4096);
    assert!(seconds >= 0.5, "{seconds}");
    let set = served.json("limits", &["bps-write=8M,bps-write-max=16M,bps-write-max-length=1"]);
    let expected =
        serde_json::json!({"bps-write": 8 << 20, "bps-write-max": 16 << 20, "bps-write-max-length": 1});
    assert_eq!(set["limits"], expected);
    assert_eq!(served.told()["limits"], expected);
    // 16 MiB of burst, one that begins at the brim, and the rest at 8 MiB a second.
    let seconds = write_many(&served, 21, 1 << 20);
    assert!(seconds >= 0.5, "{seconds}");
    for (words, said) in
        [("iops-total cannot be combined", "iops-total=1,iops-read=1"), ("unknown limit", "speed=1")]
    {
        let ran = served.ask("limits", &[said]);
        assert!(ran.code == 1 && ran.err.contains(words), "{ran:?}");
    }
    assert_eq!(served.told()["limits"], expected, "nothing happened");
    assert!(served.ask("limits", &[]).answer().contains("bps-write 8 MiB/s"));
    assert_eq!(served.json("limits", &["--none"])["limits"], serde_json::json!({}));
    assert!(served.ask("limits", &[]).answer().contains("No limits are set"));
    served.server.stop();
    for (words, said) in [("no export \"x\"", "x:iops-total=1"), ("unknown limit", "iops=1")] {
        let ran = Server::try_start(&["--limit", said, &image]).err().expect("it is refused");
        assert!(ran.err.contains(words), "{ran:?}");
    }
}

#[test]
fn flushes_and_other_disks_pass_by_and_the_end_waits_for_nobody() {
    let dir = Dir::new("control-limits-past");
    let (slow, fast) = (made(&dir, "vellum", "", "4M"), made(&dir, "qcow2", "", "4M"));
    let slow_disk = format!("slow={slow}");
    let served = Controlled::start(&["--export", &slow_disk, "--limit", "slow:iops-write=1", &fast]);
    let mut client = served.client("slow");
    // Two begin in the first second; an hour would go by until all have.
    for number in 0..16u64 {
        client.send(WRITE, 0, number * 4096, 4096, &[1; 4096]).expect("sent");
    }
    let told = || served.json("stats", &[])["disks"].clone();
    let waits = || {
        told().as_array().expect("disks").iter().map(|disk| disk["limited"].as_u64().unwrap()).sum::<u64>()
    };
    until("some wait for their turn", || waits() > 0);
    let mut other = served.client("slow");
    other.flush().expect("it does not wait");
    assert_eq!(other.read(3 << 20, 1).expect("nor does a read"), [0]);
    let mut fast = served.client("");
    for at in 0..50 {
        fast.write(at * 4096, &[2; 4096], 0).expect("it is another disk");
    }
    // A pause does not wait for requests in line, and the end of the server waits for none at all.
    served.ask("pause", &["--disk", "slow"]).answer();
    client.send(FLUSH, 0, 0, 0, &[]).expect("sent");
    // What is still in the socket when the server is asked to end is not read any more.
    until("all have come", || {
        let guest = &told_of(&served, "slow")["guest"];
        (&guest["writes"], &guest["flushes"]) == (&16.into(), &2.into())
    });
    served.server.signal(Signal::TERM);
    let mut answers = 0;
    while client.answer().is_ok_and(|answer| answer.error == 0) {
        answers += 1;
    }
    assert_eq!(answers, 17, "all that was begun is answered");
    let ran = served.server.wait(PATIENCE);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(vellum(&["check", &slow]).code, 0);
}
