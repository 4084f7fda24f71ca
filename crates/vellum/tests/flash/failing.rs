//! Flash that fails while disks are served.

use rustix::process::Signal;

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::loops::Failing;
use super::support::program::vellum;
use super::support::server::Server;
use super::support::{PATIENCE, noise};
use super::{KINDS, alone, is_refused, same};

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
