//! What disks do with the cache, and changes of that while they are served.

use serde_json::Value;

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::vellum;
use super::support::server::Server;
use super::support::{noise, until};
use super::{KINDS, alone, cache_stats, info, is_not_served, is_refused, is_sound, made_cache, same};

const SIZE: usize = 8 << 20;

fn raw_disk(dir: &Dir) -> (String, Vec<u8>) {
    let (path, bytes) = (dir.text("disk.raw"), noise(SIZE, 3));
    std::fs::write(&path, &bytes).expect("a disk");
    (path, bytes)
}

#[test]
fn write_back_is_refused_for_images_without_a_place_for_a_session() {
    let dir = Dir::new("flash-refused");
    let cache = made_cache(&dir, "32M");
    let (raw, _) = raw_disk(&dir);
    is_not_served(
        &[&raw, "-f", "raw", "--flash", &cache, "--flash-policy", "writeback"],
        &["disk.raw", "session"],
    );
    let old = dir.text("old.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", "-o", "compat=v2", &old, "16M"]).answer();
    is_not_served(&[&old, "--flash", &cache, "--flash-policy", "writeback"], &["old.qcow2", "version"]);
    // Without a policy that is asked for, what is read is cached.
    let server = Server::start(&[&raw, "-f", "raw", "--flash", &cache]);
    assert_eq!(server.stop_and_count()["disks"][0]["flash"]["policy"], "readonly");
    let image = dir.text("disk.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", &image, "16M"]).answer();
    let server = Server::start(&[&image, "--flash", &cache]);
    assert_eq!(server.stop_and_count()["disks"][0]["flash"]["policy"], "writeback");
}

#[test]
fn options_that_need_a_cache_say_so() {
    let dir = Dir::new("flash-options");
    let (raw, _) = raw_disk(&dir);
    for option in [&["--flash-policy", "readonly"][..], &["--flash-keep"], &["--flash-memory", "1G"]] {
        is_not_served(&[&[&raw, "-f", "raw"], option].concat(), &["--flash"]);
    }
    let cache = made_cache(&dir, "32M");
    is_not_served(&[&raw, "-f", "raw", "--flash", &cache, "--flash-policy", "write"], &["writeback"]);
    is_not_served(&[&raw, "-f", "raw", "--flash", &cache, "--flash-policy", "x:off"], &["\"x\""]);
}

/// Reads all, writes some, reads all; with each policy, in servers of their own.
#[test]
fn every_policy_reads_what_was_written() {
    for policy in ["readonly", "off", "writethrough", "writeback"] {
        let dir = Dir::new("flash-policy");
        let cache = made_cache(&dir, "32M");
        let is_raw = policy != "writeback";
        let (image, mut model) = if is_raw { raw_disk(&dir) } else { KINDS[2].make(&dir, SIZE) };
        let format = if is_raw { "raw" } else { "qcow2" };
        for round in 0..3u64 {
            let arguments = [&image, "-f", format, "--flash", &cache, "--flash-policy", policy];
            let server = Server::start(&arguments);
            let mut client = Client::connect(&server.peer(), "").expect("it is served");
            for _ in 0..2 {
                same(&client.read_all().expect("it is read"), &model, &format!("{policy}, round {round}"));
            }
            let (at, bytes) = (round << 20, noise(300_000, round));
            client.write(at, &bytes, 0).expect("it is written");
            let at = usize::try_from(at).expect("small");
            model[at..at + bytes.len()].copy_from_slice(&bytes);
            same(
                &client.read_all().expect("it is read"),
                &model,
                &format!("{policy}, round {round}, written"),
            );
            client.flush().expect("a flush");
            if policy == "readonly" || (policy == "writethrough" && round == 1) {
                // All of it is in the image at once.
                server.kill();
                assert!(std::fs::read(&image).expect("the disk") == model, "{policy}, round {round}");
                continue;
            }
            client.disconnect();
            let flash = server.stop_and_count()["disks"][0]["flash"].clone();
            assert_eq!(flash["policy"], policy, "{flash}");
            assert_eq!(flash["disk"]["hits"].as_u64() > Some(0), policy != "off", "{flash}");
        }
    }
}

#[test]
fn a_policy_is_changed_while_guests_write() {
    for kind in KINDS {
        let dir = Dir::new("flash-change");
        let cache = made_cache(&dir, "32M");
        let (image, mut model) = kind.make(&dir, SIZE);
        let place = Dir::short();
        let control = place.text("control");
        let server = Server::start(&[&image, "--flash", &cache, "--control", &control]);
        let ask = |rest: &[&str]| -> Value {
            vellum(&[&["flash", "policy", "--control", &control, "--output", "json"], rest].concat()).json()
        };
        assert_eq!(ask(&[])["policy"], "writeback");
        let mut client = Client::connect(&server.peer(), "").expect("it is served");
        for (round, policy) in [
            "off",
            "writeback",
            "writethrough",
            "readonly",
            "writethrough",
            "writeback",
            "off",
            "writethrough",
        ]
        .into_iter()
        .enumerate()
        {
            let bytes = noise(500_000, round as u64);
            let at = round * 700_000;
            client.write(at as u64, &bytes, 0).expect("it is written");
            model[at..at + bytes.len()].copy_from_slice(&bytes);
            let told = ask(&[policy]);
            assert_eq!((&told["policy"], &told["dirty-bytes"]), (&policy.into(), &0.into()), "{kind:?}");
            same(&client.read_all().expect("it is read"), &model, &format!("{kind:?}, {policy}"));
            // Whatever opens the image again keeps to it.
            vellum(&["export", "reopen", "--control", &control]).answer();
            assert_eq!(ask(&[])["policy"], policy, "{kind:?}");
        }
        client.flush().expect("a flush");
        client.disconnect();
        server.stop();
        is_sound(&image);
        same(&alone(&dir, &image), &model, &format!("{kind:?}, alone"));
    }
}

/// Images of every kind that are written through: never behind, warm after a clean end, and right after a kill.
#[test]
fn an_image_that_is_written_through_is_complete_and_its_cache_warm() {
    for kind in KINDS {
        let dir = Dir::new("flash-through");
        let cache = made_cache(&dir, "32M");
        let (image, mut model) = kind.make(&dir, SIZE);
        let start = || Server::start(&[&image, "--flash", &cache, "--flash-policy", "writethrough"]);
        let hits = |server: Server| {
            let flash = server.stop_and_count()["disks"][0]["flash"].clone();
            assert_eq!(&flash["policy"], "writethrough", "{flash}");
            flash["disk"]["hits"].as_u64().expect("a number")
        };
        let server = start();
        let mut client = Client::connect(&server.peer(), "").expect("it is served");
        let bytes = noise(1 << 20, 5);
        client.write(1 << 20, &bytes, 0).expect("it is written");
        model[1 << 20..2 << 20].copy_from_slice(&bytes);
        client.flush().expect("a flush");
        client.disconnect();
        assert_eq!(hits(server), 0, "{kind:?}: nothing was read");
        same(&alone(&dir, &image), &model, &format!("{kind:?}, alone"));

        let server = start();
        let mut client = Client::connect(&server.peer(), "").expect("it is served");
        same(&client.read_all().expect("it is read"), &model, &format!("{kind:?}, again"));
        client.write(0, &bytes, 0).expect("it is written");
        model[..1 << 20].copy_from_slice(&bytes);
        client.flush().expect("a flush");
        server.kill();
        assert_eq!(info(&cache)["written-regions"], 1, "{kind:?}");
        vellum(&["flash", "check", &cache]).answer();

        let server = start();
        let mut client = Client::connect(&server.peer(), "").expect("it is served");
        same(&client.read_all().expect("it is read"), &model, &format!("{kind:?}, after a kill"));
        client.write(3 << 20, &bytes, 0).expect("it is written");
        model[3 << 20..4 << 20].copy_from_slice(&bytes);
        client.disconnect();
        hits(server);
        let server = start();
        let mut client = Client::connect(&server.peer(), "").expect("it is served");
        same(&client.read_all().expect("it is read"), &model, &format!("{kind:?}, the last time"));
        client.disconnect();
        assert!(hits(server) > 0, "{kind:?}: a clean end keeps what is cached");
        is_sound(&image);
    }
}

/// With `--direct` the cache's file bypasses the page cache as images do, and everything is as without.
#[test]
fn a_cache_past_the_page_cache_keeps_what_is_written() {
    for policy in ["writeback", "writethrough"] {
        let dir = Dir::new("flash-direct");
        let cache = made_cache(&dir, "32M");
        let (image, mut model) = KINDS[2].make(&dir, SIZE);
        let start = || Server::start(&[&image, "--direct", "--flash", &cache, "--flash-policy", policy]);
        let server = start();
        // What is open of the cache, with the flags of Linux's O_DIRECT.
        let fds = format!("/proc/{}/fd", server.pid());
        let is_cache = |fd: &std::fs::DirEntry| {
            let of = |path: &std::path::Path| path.file_name().map(std::ffi::OsStr::to_owned);
            std::fs::read_link(fd.path()).is_ok_and(|path| of(&path) == of(cache.as_ref()))
        };
        let flags: Vec<u32> = std::fs::read_dir(&fds)
            .expect("its descriptors")
            .filter_map(|fd| fd.ok())
            .filter(|fd| is_cache(fd))
            .map(|fd| {
                let name = fd.file_name().into_string().expect("a number");
                let info = std::fs::read_to_string(format!("/proc/{}/fdinfo/{name}", server.pid()));
                let info = info.expect("its facts");
                let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).expect("flags");
                u32::from_str_radix(flags.trim(), 8).expect("octal")
            })
            .collect();
        let direct = rustix::fs::OFlags::DIRECT.bits();
        assert!(flags.iter().any(|flags| flags & direct != 0), "{flags:?}");
        let mut client = Client::connect(&server.peer(), "").expect("it is served");
        for number in 0..60usize {
            // Whole blocks, sectors, and parts of sectors; over each other.
            let (at, len) = [(number * 8192, 4096), (number * 5120, 1024), (number * 4099, 777)][number % 3];
            let bytes = noise(len, number as u64);
            client.write(at as u64, &bytes, 0).expect("it is written");
            model[at..at + len].copy_from_slice(&bytes);
        }
        client.flush().expect("a flush");
        same(&client.read_all().expect("it is read"), &model, policy);
        server.kill();
        vellum(&["flash", "check", &cache]).answer();
        let server = start();
        let mut client = Client::connect(&server.peer(), "").expect("it is served");
        same(&client.read_all().expect("it is read"), &model, &format!("{policy}, after a kill"));
        client.disconnect();
        server.stop();
        is_sound(&image);
        same(&alone(&dir, &image), &model, &format!("{policy}, alone"));
    }
}

/// Files that have no place for a session: what the file is when a server ends is how the next one knows what is cached of it.
#[test]
fn a_file_without_a_session_is_warm_after_a_clean_end_and_cold_after_another_writer() {
    for (format, policy) in
        [("raw", "writethrough"), ("raw", "readonly"), ("qcow2", "writethrough"), ("qcow2", "readonly")]
    {
        let dir = Dir::new("flash-files");
        let cache = made_cache(&dir, "32M");
        let (image, mut model) = match format {
            "raw" => raw_disk(&dir),
            _ => {
                let image = dir.text("old.qcow2");
                vellum(&["create", "-q", "-f", format, "-o", "compat=v2", &image, &SIZE.to_string()])
                    .answer();
                (image, vec![0; SIZE])
            }
        };
        let place = Dir::short();
        let control = place.text("control");
        let what = format!("{format}, {policy}");
        let start = || {
            let flash = ["--flash", &cache, "--flash-policy", policy, "--control", &control];
            Server::start(&[&[&image, "-f", format], &flash[..]].concat())
        };
        // How much of all that a client reads the cache had already. At the end it has at least 1 MiB.
        let read = |model: &[u8], round: &str| {
            let server = start();
            let mut client = Client::connect(&server.peer(), "").expect("it is served");
            same(&client.read_all().expect("it is read"), model, &format!("{what}, {round}"));
            let hits = || {
                let stats = vellum(&["stats", "--control", &control, "--output", "json"]).json();
                stats["disks"][0]["flash"]["disk"]["hits"].as_u64().expect("a number")
            };
            let first = hits();
            // What was read gets its place in the background, a little at a time.
            until("what is read is cached", || {
                let before = hits();
                same(&client.read_all().expect("it is read"), model, &format!("{what}, {round}, again"));
                hits() - before >= 256
            });
            (server, client, first)
        };
        let stop = |server: Server, client: Client| {
            client.disconnect();
            server.stop();
        };
        let bytes = noise(1 << 20, 5);
        let (server, mut client, hits) = if format == "raw" {
            read(&model, "new")
        } else {
            let server = start();
            let client = Client::connect(&server.peer(), "").expect("it is served");
            (server, client, 0)
        };
        assert_eq!(hits, 0, "{what}: nothing is cached yet");
        client.write(1 << 20, &bytes, 0).expect("it is written");
        model[1 << 20..2 << 20].copy_from_slice(&bytes);
        stop(server, client);

        let (server, client, _) = read(&model, "after a clean end");
        stop(server, client);
        let (server, client, hits) = read(&model, "again");
        assert!(hits >= 256, "{what}: {hits} blocks of a clean end");
        stop(server, client);

        // Another writer, and the time of the change is set back.
        let before = std::fs::metadata(&image).and_then(|facts| facts.modified()).expect("its time");
        let other = Server::start(&[&image, "-f", format]);
        let mut client = Client::connect(&other.peer(), "").expect("it is served");
        client.write(1 << 20, &bytes[..4096].repeat(2), 0).expect("it is written");
        model.copy_within(1 << 20..(1 << 20) + 4096, (1 << 20) + 4096);
        stop(other, client);
        std::fs::File::options()
            .write(true)
            .open(&image)
            .and_then(|file| file.set_modified(before))
            .expect("its time");
        let (server, mut client, hits) = read(&model, "after another writer");
        assert_eq!(hits, 0, "{what}: nobody knows what another has written");

        // A kill: nothing proves what the file has got of the writes.
        client.write(3 << 20, &bytes, 0).expect("it is written");
        model[3 << 20..4 << 20].copy_from_slice(&bytes);
        client.flush().expect("a flush");
        server.kill();
        let (server, client, hits) = read(&model, "after a kill");
        assert_eq!(hits, 0, "{what}: nothing counts after a kill");
        stop(server, client);
        if format == "qcow2" {
            is_sound(&image);
        }
    }
}

/// Once its region is recorded, a write that goes through costs flash one slot, and a flush nothing.
#[test]
fn writes_that_go_through_cost_flash_no_records_and_no_flushes() {
    let dir = Dir::new("flash-through-costs");
    let cache = made_cache(&dir, "64M");
    let (image, mut model) = KINDS[4].make(&dir, SIZE);
    let place = Dir::short();
    let control = place.text("control");
    let server =
        Server::start(&[&image, "--flash", &cache, "--flash-policy", "writethrough", "--control", &control]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    client.write(0, &[1; 4096], 0).expect("it is written");
    model[..4096].fill(1);
    let counts = || {
        let stats = vellum(&["stats", "--control", &control, "--output", "json"]).json();
        let own = &stats["disks"][0]["flash"]["disk"];
        let of = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{stats}"));
        (
            of(&stats["flash"]["records"]),
            of(&stats["flash"]["flushes"]),
            of(&own["write-bytes"]),
            of(&own["passed"]),
        )
    };
    let before = counts();
    for number in 0..40u64 {
        let at = (number * 37 % 500 + 2) * 4096;
        client.write(at, &noise(4096, number), 0).expect("it is written");
        client.flush().expect("a flush");
        let at = usize::try_from(at).expect("small");
        model[at..at + 4096].copy_from_slice(&noise(4096, number));
    }
    let after = counts();
    assert_eq!((after.0 - before.0, after.1 - before.1), (0, 0), "records, flushes");
    assert_eq!((after.2 - before.2, after.3), (40 * 4096, 0), "bytes of slots, blocks without one");
    same(&client.read_all().expect("it is read"), &model, "all of it");
    client.disconnect();
    server.stop();
    same(&alone(&dir, &image), &model, "alone");
}

#[test]
fn a_served_disk_is_drained_while_it_goes_on() {
    let dir = Dir::new("flash-drained");
    let cache = made_cache(&dir, "32M");
    let (image, _) = KINDS[0].make(&dir, SIZE);
    let place = Dir::short();
    let control = place.text("control");
    let server = Server::start(&[&image, "--flash", &cache, "--control", &control]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    client.write(0, &noise(1 << 20, 1), 0).expect("it is written");
    let told = vellum(&["flash", "drain", "--control", &control, "--output", "json"]).json();
    assert_eq!(told["dirty-bytes"], 0, "{told}");
    let stats = vellum(&["stats", "--control", &control, "--output", "json"]).json();
    assert_eq!(stats["flash"]["state"], "running", "{stats}");
    assert!(stats["flash"]["cached-bytes"].as_u64() >= Some(1 << 20), "{stats}");
    client.disconnect();
    server.stop();
    let server = Server::start(&[&image, "--control", &control]);
    is_refused(&vellum(&["flash", "drain", "--control", &control]), &["--flash"]);
    is_refused(&vellum(&["flash", "policy", "--control", &control, "off"]), &["--flash"]);
    server.stop();
}

/// A guest writes lone blocks all over its disk, more than the memory is for.
#[test]
fn the_memory_of_the_cache_has_a_bound() {
    let dir = Dir::new("flash-memory");
    let cache = made_cache(&dir, "64M");
    let image = dir.text("disk.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", &image, "1G"]).answer();
    is_not_served(&[&image, "--flash", &cache, "--flash-memory", "1M"], &["memory", "at least"]);
    let usual = info(&cache)["budget-used-bytes"].as_u64().expect("a number");
    let budget = (usual + 2000 * 104).to_string();
    let place = Dir::short();
    let control = place.text("control");
    let with = ["--flash-keep", "--flash-memory", &budget, "--control", &control];
    let server = Server::start(&[&[&image, "--flash", &cache][..], &with].concat());
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    let block = |n: u64| [u8::try_from(n % 251 + 1).expect("a byte"); 4096];
    for n in 0..6000 {
        client.write(n * 40 * 4096, &block(n), 0).expect("it is written");
        if n % 500 == 0 {
            client.flush().expect("a flush");
            let flash = cache_stats(&control);
            assert_eq!(flash["budget-bytes"].as_u64(), budget.parse().ok(), "{flash}");
            assert!(flash["budget-used-bytes"].as_u64() <= flash["budget-bytes"].as_u64(), "{flash}");
        }
    }
    client.flush().expect("a flush");
    for n in 0..6000 {
        assert_eq!(client.read(n * 40 * 4096, 4096).expect("it is read"), block(n), "block {n}");
    }
    drop(client);
    let stats = server.stop_and_count();
    assert!(stats["disks"][0]["flash"]["disk"]["written-home"].as_u64() >= Some(3000), "{stats}");
    let facts = info(&cache);
    assert!(facts["dirty-bytes"].as_u64() > Some(0), "{facts}");
    // With the least that it can be opened with, nothing is lost.
    let server = Server::start(&[&image, "--flash", &cache, "--flash-memory", &(usual + 1000).to_string()]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    for n in 0..6000 {
        assert_eq!(client.read(n * 40 * 4096, 4096).expect("it is read"), block(n), "block {n}");
    }
    drop(client);
    server.stop_and_count();
    is_sound(&image);
}

/// What a guest zeroes needs no place any more: the drive is told, and what is written there afterwards stays.
#[test]
fn places_that_become_free_are_discarded() {
    let dir = Dir::new("flash-discard");
    let cache = made_cache(&dir, "64M");
    let (image, mut model) = KINDS[1].make(&dir, SIZE);
    is_not_served(&[&image, "--flash", &cache, "--flash-discard", "maybe"], &["on or off"]);
    for (choice, is_on) in [("off", false), ("on", true)] {
        let place = Dir::short();
        let control = place.text("control");
        let with = ["--flash-discard", choice, "--control", &control];
        let server = Server::start(&[&[&image, "--flash", &cache][..], &with].concat());
        let mut client = Client::connect(&server.peer(), "").expect("it is served");
        for round in 0..3u64 {
            let bytes = noise(4 << 20, round);
            client.write(0, &bytes, 0).expect("it is written");
            client.flush().expect("a flush");
            client.zero(0, 4 << 20, 0).expect("zeros");
            client.flush().expect("a flush");
            let discarded = || cache_stats(&control)["discard-bytes"].as_u64().expect("a number");
            if is_on {
                until("places are discarded", || discarded() >= (round + 1) << 20);
            } else {
                assert_eq!(discarded(), 0);
            }
        }
        client.write(1 << 20, &noise(4 << 20, 9), 0).expect("it is written");
        client.flush().expect("a flush");
        model[..1 << 20].fill(0);
        model[1 << 20..5 << 20].copy_from_slice(&noise(4 << 20, 9));
        same(&client.read_all().expect("it is read"), &model, choice);
        drop(client);
        server.stop();
        vellum(&["flash", "check", &cache]).answer();
        same(&alone(&dir, &image), &model, choice);
    }
}

/// Two clients on two workers write at once: each has room in a record promised at the same time.
#[test]
fn two_clients_write_through_at_once() {
    for kind in [KINDS[0], KINDS[4]] {
        let dir = Dir::new("flash-two");
        let (image, _) = kind.make(&dir, 32 << 20);
        let cache = made_cache(&dir, "64M");
        let server =
            Server::start(&[&image, "--threads", "2", "--flash", &cache, "--flash-policy", "writethrough"]);
        std::thread::scope(|scope| {
            for half in 0..2u64 {
                let mut client = Client::connect(&server.peer(), "").expect("it is served");
                scope.spawn(move || {
                    for number in 0..1500u64 {
                        let at = (half << 24) + number * 7919 % 4096 * 4096;
                        client.write(at, &noise(4096, number % 64), 0).expect("written");
                    }
                    client.flush().expect("flushed");
                    for number in 1400..1500u64 {
                        let at = (half << 24) + number * 7919 % 4096 * 4096;
                        same(&client.read(at, 4096).expect("read"), &noise(4096, number % 64), "read again");
                    }
                    client.disconnect();
                });
            }
        });
        server.stop();
        is_sound(&image);
    }
}
