//! What changes the image of a disk while the cache holds writes of it: snapshots, resizing, detaching.

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::vellum;
use super::support::server::Server;
use super::support::{noise, until};
use super::{KINDS, alone, is_sound, made_cache, same};

const SIZE: usize = 8 << 20;

/// A server with a cache and a control socket.
struct Steered {
    server: Server,
    control: String,
    _place: Dir,
}

impl Steered {
    fn start(image: &str, cache: &str) -> Self {
        let place = Dir::short();
        let control = place.text("control");
        let server = Server::start(&[image, "--flash", cache, "--control", &control]);
        Self { server, control, _place: place }
    }

    fn client(&self) -> Client {
        Client::connect(&self.server.peer(), "").expect("it is served")
    }

    #[track_caller]
    fn ask(&self, command: &[&str], rest: &[&str]) -> String {
        vellum(&[command, &["--control", &self.control], rest].concat()).answer()
    }
}

fn write(client: &mut Client, model: &mut [u8], at: usize, seed: u64) {
    let bytes = noise(400_000, seed);
    client.write(at as u64, &bytes, 0).expect("it is written");
    model[at..at + bytes.len()].copy_from_slice(&bytes);
}

#[test]
fn a_snapshot_has_what_was_only_in_the_cache() {
    for kind in [KINDS[3], KINDS[4]] {
        let dir = Dir::new("flash-snapshot");
        let cache = made_cache(&dir, "32M");
        let (image, mut model) = kind.make(&dir, SIZE);
        let served = Steered::start(&image, &cache);
        let mut client = served.client();
        write(&mut client, &mut model, 1_000_000, 1);
        served.ask(&["snapshot", "create"], &["monday"]);
        let then = model.clone();
        write(&mut client, &mut model, 1_200_000, 2);
        write(&mut client, &mut model, 5_000_000, 3);
        same(&client.read_all().expect("it is read"), &model, &format!("{kind:?}"));
        client.disconnect();
        until("it is let go", || {
            vellum(&["snapshot", "revert", "--control", &served.control, "monday"]).code == 0
        });
        let mut client = served.client();
        same(&client.read_all().expect("it is read"), &then, &format!("{kind:?}, reverted"));
        let mut model = then.clone();
        write(&mut client, &mut model, 2_000_000, 4);
        client.disconnect();
        served.server.stop();
        is_sound(&image);
        same(&alone(&dir, &image), &model, &format!("{kind:?}, alone"));
    }
}

/// As docs/guide/backup.md says: paused, copied with any program, resumed.
#[test]
fn a_copy_of_a_paused_disk_is_complete() {
    for kind in KINDS {
        let dir = Dir::new("flash-pause");
        let cache = made_cache(&dir, "32M");
        let (image, mut model) = kind.make(&dir, SIZE);
        let served = Steered::start(&image, &cache);
        let mut client = served.client();
        write(&mut client, &mut model, 1_000_000, 1);
        client.zero(3_000_000 / 4096 * 4096, 1 << 20, 0).expect("zeros");
        let zeros = 3_000_000 / 4096 * 4096;
        model[zeros..zeros + (1 << 20)].fill(0);
        client.flush().expect("a flush");
        served.ask(&["pause"], &[]);
        let bytes = std::fs::read(&image).expect("the image");
        let refused = vellum(&["flash", "policy", "--control", &served.control, "off"]);
        assert!(refused.code == 1 && refused.err.contains("resume"), "{refused:?}");
        let copy = image.replace("disk", "copy");
        assert_ne!(copy, image);
        std::fs::write(&copy, &bytes).expect("a copy");
        // The background finds nothing to write there, however long the pause takes.
        let stats: serde_json::Value =
            serde_json::from_str(&served.ask(&["stats"], &["--output", "json"])).expect("JSON");
        let flash = &stats["disks"][0]["flash"];
        assert_eq!(flash["dirty-bytes"], 0, "{kind:?}: {flash}");
        assert!(std::fs::read(&image).expect("the image") == bytes, "{kind:?}: it changed");
        served.ask(&["resume"], &[]);
        let then = model.clone();
        write(&mut client, &mut model, 5_000_000, 2);
        client.disconnect();
        served.server.stop();
        vellum(&["recover", &copy]).answer();
        same(&alone(&dir, &copy), &then, &format!("{kind:?}, the copy"));
        same(&alone(&dir, &image), &model, &format!("{kind:?}, the disk"));
    }
}

#[test]
fn a_disk_grows_while_the_cache_holds_writes() {
    for kind in KINDS {
        let dir = Dir::new("flash-grows");
        let cache = made_cache(&dir, "32M");
        let (image, mut model) = kind.make(&dir, SIZE);
        let served = Steered::start(&image, &cache);
        let mut client = served.client();
        write(&mut client, &mut model, SIZE - 400_000, 1);
        served.ask(&["resize"], &["+4M"]);
        client.disconnect();
        let mut client = served.client();
        model.resize(SIZE + (4 << 20), 0);
        same(&client.read_all().expect("it is read"), &model, &format!("{kind:?}"));
        write(&mut client, &mut model, SIZE + (1 << 20), 2);
        client.disconnect();
        served.server.stop();
        is_sound(&image);
        same(&alone(&dir, &image), &model, &format!("{kind:?}, alone"));
    }
}

#[test]
fn a_disk_is_detached_from_its_base_and_has_all_of_it() {
    for kind in KINDS.into_iter().filter(|kind| kind.has_base) {
        let dir = Dir::new("flash-flatten");
        let cache = made_cache(&dir, "32M");
        let (image, mut model) = kind.make(&dir, SIZE);
        let served = Steered::start(&image, &cache);
        let mut client = served.client();
        write(&mut client, &mut model, 1_000_000, 1);
        client.zero(3_000_000, 700_000, 0).expect("it is zeroed");
        model[3_000_000..3_700_000].fill(0);
        served.ask(&["flatten"], &[]);
        write(&mut client, &mut model, 1_200_000, 2);
        same(&client.read_all().expect("it is read"), &model, &format!("{kind:?}"));
        client.disconnect();
        served.server.stop();
        std::fs::remove_file(dir.join("base.raw")).expect("nobody needs it");
        is_sound(&image);
        same(&alone(&dir, &image), &model, &format!("{kind:?}, alone"));
    }
}

#[test]
fn a_reopened_disk_has_everything() {
    let dir = Dir::new("flash-reopen");
    let cache = made_cache(&dir, "32M");
    let (image, mut model) = KINDS[2].make(&dir, SIZE);
    let served = Steered::start(&image, &cache);
    let mut client = served.client();
    write(&mut client, &mut model, 1_000_000, 1);
    served.ask(&["export", "reopen"], &[]);
    same(&client.read_all().expect("it is read"), &model, "reopened");
    write(&mut client, &mut model, 2_000_000, 2);
    client.disconnect();
    served.server.stop();
    same(&alone(&dir, &image), &model, "alone");
}
