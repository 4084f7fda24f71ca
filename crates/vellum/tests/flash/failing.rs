//! Flash that fails while disks are served.

use rustix::process::Signal;

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::loops::Failing;
use super::support::program::vellum;
use super::support::server::Server;
use super::support::{PATIENCE, noise, until};
use super::{KINDS, alone, cache_stats, is_refused, made_cache, same};

/// A failed flush of flash ends changes, and no reads. The disk stays open: closed, it could not be opened again.
#[test]
fn a_failed_flush_of_flash_ends_changes_and_no_reads() {
    for kind in [KINDS[0], KINDS[4]] {
        let Some(device) = Failing::new() else { return };
        let (dir, place) = (Dir::new("flash-failing"), Dir::short());
        let (image, mut model) = kind.make(&dir, 32 << 20);
        vellum(&["flash", "create", "-q", "--force", &device.path]).answer();
        let control = place.text("control");
        let served = Server::start(&[&image, "--flash", &device.path, "--control", &control]);
        let mut client = Client::connect(&served.peer(), "").expect("it is served");
        client.write(0, &noise(1 << 20, 1), 0).expect("written");
        client.flush().expect("durable");
        model[..1 << 20].copy_from_slice(&noise(1 << 20, 1));

        device.fail();
        // Not all of it has room, and what makes room begins with a commit.
        client.write(8 << 20, &noise(1 << 20, 3), 0).expect_err("it cannot be written");
        client.flush().expect_err("a flush of flash has failed");
        client.write(0, &[1; 512], 0).expect_err("it refuses writes");
        let said = served.says("a flush of flash failed");
        let line = said.lines().find(|line| line.contains("a flush of flash failed")).expect("it is there");
        assert!(line.contains("until the server is started again"), "{said}");
        assert!(!line.contains("export reopen"), "{said}");
        let reopened = vellum(&["export", "reopen", "--control", &control]);
        is_refused(&reopened, &[&image, &device.path, "nothing was changed", "the server is started again"]);
        same(&client.read(0, 1 << 20).expect("reads go on"), &model[..1 << 20], "what was flushed");

        device.succeed();
        client.write(0, &[1; 512], 0).expect_err("that there is room again does not revive it");
        client.disconnect();
        served.signal(Signal::TERM);
        let ran = served.wait(PATIENCE);
        assert!(ran.code == 1 && ran.err.contains(&image), "{ran:?}");
        // What was flushed is there; what was not may be.
        let served = Server::start(&[&image, "--flash", &device.path]);
        let mut client = Client::connect(&served.peer(), "").expect("it is served");
        same(&client.read(0, 1 << 20).expect("read"), &model[..1 << 20], "after a restart");
        client.write(8 << 20, &noise(1 << 20, 4), 0).expect("it takes writes again");
        client.flush().expect("durable");
        model[8 << 20..9 << 20].copy_from_slice(&noise(1 << 20, 4));
        client.disconnect();
        served.stop();
        same(&alone(&dir, &image), &model, "alone");
    }
}

/// A program that is not the server makes the file of the cache shorter, and slots are written behind the cut since.
#[test]
fn a_cache_that_is_cut_sends_no_zeros_home() {
    let dir = Dir::new("flash-cut");
    let cache = made_cache(&dir, "64M");
    let (image, model) = KINDS[1].make(&dir, 16 << 20);
    let place = Dir::short();
    let control = place.text("control");
    let served = Server::start(&[&image, "--flash", &cache, "--control", &control]);
    let mut client = Client::connect(&served.peer(), "").expect("it is served");
    client.write(0, &noise(4 << 20, 1), 0).expect("written");
    client.flush().expect("durable");
    let file = std::fs::OpenOptions::new().write(true).open(&cache).expect("the cache");
    // The slots come after the map.
    file.set_len(2 << 20).expect("it is cut");
    // These go behind the cut, and the file is as long as before but for its end.
    let _ = client.write(8 << 20, &noise(4 << 20, 2), 0);
    let _ = client.flush();
    let drained = vellum(&["flash", "drain", "--control", &control]);
    assert_ne!(drained.code, 0, "{drained:?}");
    served.says("cut");
    client.write(0, &[1; 512], 0).expect_err("it refuses writes");
    client.read(0, 1 << 20).expect_err("what the cache alone has is gone");
    assert!(cache_stats(&control)["last-error"].as_str().is_some_and(|why| why.contains("cut")));
    client.disconnect();
    served.signal(Signal::TERM);
    let ran = served.wait(PATIENCE);
    assert_eq!(ran.code, 1, "{ran:?}");
    // The image is behind, and as it was.
    is_refused(&vellum(&["convert", "-O", "raw", &image, &dir.text("out.raw")]), &["disk.", "cache"]);
    vellum(&["flash", "forget", &image]).answer();
    same(&alone(&dir, &image), &model, "the image without what was cut off");
}

/// A cache was cut, and its last slot was written before a server that was killed noticed: it is as long as its slots. The next server
/// knows it by the end that is never written.
#[test]
fn a_cache_that_was_cut_and_has_grown_again_is_not_opened() {
    let dir = Dir::new("flash-grown");
    let cache = made_cache(&dir, "64M");
    let (image, model) = KINDS[1].make(&dir, 16 << 20);
    let served = Server::start(&[&image, "--flash", &cache, "--flash-keep"]);
    let mut client = Client::connect(&served.peer(), "").expect("it is served");
    client.write(0, &noise(4 << 20, 1), 0).expect("written");
    client.flush().expect("durable");
    client.disconnect();
    served.stop();
    let file = std::fs::OpenOptions::new().write(true).open(&cache).expect("the cache");
    let len = file.metadata().expect("its length").len();
    file.set_len(2 << 20).expect("it is cut");
    file.set_len(len - 4096).expect("it has grown again");
    let place = Dir::short();
    let socket = format!("unix:{}", place.text("s"));
    let serve = vellum(&["serve", "--nbd", &socket, "--flash", &cache, &image]);
    is_refused(&serve, &["cache", "was cut off", "flash forget"]);
    vellum(&["flash", "forget", &image]).answer();
    same(&alone(&dir, &image), &model, "the image without what was cut off");
    // One that was made and never used has nothing to lose.
    vellum(&["flash", "create", "-q", "--force", &cache, "64M"]).answer();
    Server::start(&[&image, "--flash", &cache]).stop();
}

/// The file of the cache is removed: what it has would be gone when the server ends.
#[test]
fn a_cache_without_a_name_completes_its_images() {
    let dir = Dir::new("flash-gone");
    let cache = made_cache(&dir, "64M");
    let (image, mut model) = KINDS[1].make(&dir, 16 << 20);
    let served = Server::start(&[&image, "--flash", &cache, "--flash-keep"]);
    let mut client = Client::connect(&served.peer(), "").expect("it is served");
    client.write(0, &noise(1 << 20, 1), 0).expect("written");
    client.flush().expect("durable");
    model[..1 << 20].copy_from_slice(&noise(1 << 20, 1));
    std::fs::remove_file(&cache).expect("it was there");
    served.says("is gone");
    client.write(4 << 20, &noise(1 << 20, 2), 0).expect("it goes on");
    model[4 << 20..5 << 20].copy_from_slice(&noise(1 << 20, 2));
    client.disconnect();
    served.stop();
    same(&alone(&dir, &image), &model, "alone");
}

/// A disk that is written through goes on without the drive of the cache, whatever is done with it, also where the failure is
/// met in the middle of that.
#[test]
fn a_disk_that_is_written_through_survives_its_cache_in_every_step() {
    let steps: [&[&str]; 4] = [
        &["flash", "policy", "off"],
        &["flash", "policy", "readonly"],
        &["export", "reopen"],
        &["resize", "", "+1M"],
    ];
    for (number, step) in steps.into_iter().enumerate() {
        for is_known in [false, true] {
            let kind = KINDS[[0, 4, 1, 2][number]];
            let what = format!("{kind:?}, {step:?}, known before: {is_known}");
            let Some(device) = Failing::new() else { return };
            let (dir, place) = (Dir::new("flash-failing-step"), Dir::short());
            let (image, mut model) = kind.make(&dir, 8 << 20);
            vellum(&["flash", "create", "-q", "--force", &device.path]).answer();
            let control = place.text("control");
            let policy = ["--flash-policy", "writethrough"];
            let served = Server::start(
                &[&[&image, "--flash", &device.path, "--control", &control], &policy[..]].concat(),
            );
            let mut client = Client::connect(&served.peer(), "").expect("it is served");
            let mut write = |client: &mut Client, at: usize, seed: u64| {
                client.write(at as u64, &noise(65536, seed), 0).expect("written");
                client.flush().expect("durable");
                model[at..at + 65536].copy_from_slice(&noise(65536, seed));
            };
            write(&mut client, 0, 1);
            device.fail();
            if is_known {
                // What is settled and what is drained is committed.
                vellum(&["flash", "drain", "--control", &control]);
            }
            write(&mut client, 1 << 20, 2);
            let step: Vec<&str> = step.iter().copied().filter(|word| !word.is_empty()).collect();
            let done = match step[0] {
                "resize" => vellum(&["resize", "--control", &control, "+1M"]),
                _ => vellum(&[&step[..2], &["--control", &control], &step[2..]].concat()),
            };
            assert_eq!(done.code, 0, "{what}: {done:?}");
            write(&mut client, 2 << 20, 3);
            vellum(&["export", "reopen", "--control", &control]).answer();
            write(&mut client, 0, 4);
            same(&client.read(0, 8 << 20).expect("read"), &model, &what);
            client.disconnect();
            device.succeed();
            served.signal(Signal::TERM);
            let ran = served.wait(PATIENCE);
            assert!(!ran.err.contains("not closed"), "{what}: {ran:?}");
            // Nothing that the cache has counts.
            let served = Server::start(&[&[&image, "--flash", &device.path], &policy[..]].concat());
            let mut client = Client::connect(&served.peer(), "").expect("it is served");
            same(&client.read(0, 8 << 20).expect("read"), &model, &format!("{what}: with the cache again"));
            client.disconnect();
            served.stop();
            same(&alone(&dir, &image)[..8 << 20], &model, &format!("{what}: alone"));
        }
    }
}

/// A disk of which only what is read is cached refuses writes when the drive of the cache has failed, until it leaves the cache.
#[test]
fn a_disk_that_is_only_read_through_the_cache_can_leave_it_when_it_has_failed() {
    for kind in [KINDS[0], KINDS[4]] {
        let Some(device) = Failing::new() else { return };
        let (dir, place) = (Dir::new("flash-failing-readonly"), Dir::short());
        let (image, _) = kind.make(&dir, 8 << 20);
        vellum(&["flash", "create", "-q", "--force", &device.path]).answer();
        let control = place.text("control");
        let policy = ["--flash-policy", "readonly", "--control", &control];
        let served = Server::start(&[&[&image, "--flash", &device.path], &policy[..]].concat());
        let mut client = Client::connect(&served.peer(), "").expect("it is served");
        let mut model = noise(8 << 20, 1);
        client.write(0, &model, 0).expect("written");
        client.flush().expect("durable");
        device.fail();
        // What is read gets its places, with records that need a flush.
        until("the cache has failed", || {
            same(&client.read(0, 8 << 20).expect("reads go on"), &model, "read");
            cache_stats(&control)["state"] == "failed"
        });
        client.write(0, &noise(65536, 2), 0).expect_err("it refuses writes");
        vellum(&["flash", "policy", "--control", &control, "off"]).answer();
        client.write(1 << 20, &noise(65536, 3), 0).expect("it goes on");
        client.flush().expect("durable");
        model[1 << 20..(1 << 20) + 65536].copy_from_slice(&noise(65536, 3));
        same(&client.read(0, 8 << 20).expect("read"), &model, &format!("{kind:?}"));
        client.disconnect();
        device.succeed();
        served.signal(Signal::TERM);
        served.wait(PATIENCE);
        same(&alone(&dir, &image), &model, &format!("{kind:?}, alone"));
    }
}
