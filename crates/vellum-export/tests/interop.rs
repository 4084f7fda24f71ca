//! Third-party clients on a real socket: libnbd (nbdinfo, nbdcopy, Python), QEMU (qemu-img, qemu-io), nbdkit,
//! fio. A test whose program is not installed says so and passes.

mod support;

use std::fs;
use std::process::{Command, Output};
use std::sync::Arc;

use support::disks::{RuledDisk, shared};
use support::socket::Server;
use vellum_core::{BlockSize, CheckedDisk, Geometry, Random};
use vellum_export::nbd::{Export, Exports};

const SIZE: u64 = 64 << 20;

/// Whether the program is there; if not, the reason why the test is skipped.
macro_rules! requires {
    ($program:expr) => {
        let found = std::env::var_os("PATH")
            .is_some_and(|path| std::env::split_paths(&path).any(|place| place.join($program).is_file()));
        if !found {
            return skipped(&format!("{} is not installed", $program));
        }
    };
}

#[allow(clippy::print_stderr, reason = "a test that is skipped says why")]
fn skipped(reason: &str) {
    eprintln!("skipped: {reason}");
}

struct Fixture {
    server: Server,
    disk: Arc<RuledDisk>,
    checked: Arc<CheckedDisk>,
}

fn fixture() -> Fixture {
    let disk = RuledDisk::new(SIZE);
    let checked = CheckedDisk::new(shared(&disk));
    let exports = Exports::new();
    for (name, description, read_only) in
        [("", "the default", false), ("ro", "nobody writes here", true), ("ä ö", "", false)]
    {
        let (name, description) = (name.to_owned(), description.to_owned());
        exports
            .add(Export { name, description, disk: checked.clone(), read_only, marks: None })
            .expect("a free name");
    }
    Fixture { server: Server::start(&exports), disk, checked }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.checked.abandoned(), 0, "every disk request was polled to its end");
        }
    }
}

fn output(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// Runs to success, and returns what it printed.
fn run(program: &str, arguments: &[&str]) -> String {
    let output = output(Command::new(program).args(arguments));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {}\n{text}\n{complaint}", output.status);
    text
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Random::from_seed(seed).fill(&mut bytes);
    bytes
}

/// An image with data here and there.
fn sparse_image(path: &std::path::Path) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(SIZE).unwrap()];
    for (seed, at) in (1..).zip([0, 5 << 20, (17 << 20) + 12_345, (64 << 20) - 300_000]) {
        let data = noise(300_000, seed);
        bytes[at..at + data.len()].copy_from_slice(&data);
    }
    fs::write(path, &bytes).expect("a file for the image");
    bytes
}

#[test]
fn nbdinfo_sees_what_is_offered() {
    requires!("nbdinfo");
    let fixture = fixture();
    let uri = fixture.server.uri("");
    let text = run("nbdinfo", &[&uri]);
    for line in [
        "protocol: newstyle-fixed without TLS",
        "export-size: 67108864 (64M)",
        "description: the default",
        "base:allocation",
        "qemu:allocation-depth",
        "is_read_only: false",
        "can_cache: true",
        "can_df: true",
        "can_fast_zero: true",
        "can_flush: true",
        "can_fua: true",
        "can_multi_conn: true",
        "can_trim: true",
        "can_zero: true",
        "block_size_minimum: 1",
        "block_size_preferred: 4096",
        "block_size_maximum: 33554432",
    ] {
        assert!(text.contains(line), "{line} in\n{text}");
    }
    let json = run("nbdinfo", &["--json", &uri]);
    for field in ["\"structured\": true", "\"export-size\": 67108864", "\"can_multi_conn\": true"] {
        assert!(json.contains(field), "{field} in\n{json}");
    }
    let list = run("nbdinfo", &["--list", &uri]);
    for name in ["export=\"\"", "export=\"ro\"", "export=\"ä ö\"", "nobody writes here"] {
        assert!(list.contains(name), "{name} in\n{list}");
    }
    assert_eq!(run("nbdinfo", &["--size", &uri]).trim(), "67108864");
    run("nbdinfo", &["--is", "readonly", &fixture.server.uri("ro")]);
    let refused = output(Command::new("nbdinfo").arg(fixture.server.uri("nobody")));
    assert!(!refused.status.success());
}

#[test]
fn nbdinfo_maps_the_holes() {
    requires!("nbdinfo");
    requires!("qemu-io");
    let fixture = fixture();
    run("qemu-io", &["-f", "raw", "-c", "write 1M 64k", "-c", "write 3M 1M", &fixture.server.uri("")]);
    let map = run("nbdinfo", &["--map", &fixture.server.uri("")]);
    let words: Vec<Vec<&str>> = map.lines().map(|line| line.split_whitespace().take(3).collect()).collect();
    let expected = [
        ["0", "1048576", "3"],
        ["1048576", "65536", "0"],
        ["1114112", "2031616", "3"],
        ["3145728", "1048576", "0"],
        ["4194304", "62914560", "3"],
    ];
    assert_eq!(words, expected, "{map}");
    let totals = run("nbdinfo", &["--map=qemu:allocation-depth", "--totals", &fixture.server.uri("")]);
    assert!(totals.contains("67108864"), "{totals}");
}

#[test]
fn nbdcopy_both_ways_on_several_connections() {
    requires!("nbdcopy");
    let fixture = fixture();
    let (image, copy) = (fixture.server.directory().join("image"), fixture.server.directory().join("copy"));
    let bytes = sparse_image(&image);
    let (image, copy) = (image.display().to_string(), copy.display().to_string());
    let uri = fixture.server.uri("");
    run("nbdcopy", &["--flush", "--connections=4", "--threads=4", "--requests=64", &image, &uri]);
    assert!(fixture.disk.bytes(0, bytes.len()) == bytes, "what was copied in");
    assert!(fixture.server.served() >= 4, "multi-conn was used: {} connections", fixture.server.served());
    run("nbdcopy", &["--connections=4", &uri, &copy]);
    assert!(fs::read(&copy).expect("the copy") == bytes, "what was copied out");
    // And from one export to another, both ends here.
    let other = self::fixture();
    run("nbdcopy", &[&uri, &other.server.uri("")]);
    assert!(other.disk.bytes(0, bytes.len()) == bytes);
}

#[test]
fn qemu_img_converts_compares_and_maps() {
    requires!("qemu-img");
    let fixture = fixture();
    let image = fixture.server.directory().join("image");
    let bytes = sparse_image(&image);
    let image = image.display().to_string();
    let uri = fixture.server.uri("");
    run("qemu-img", &["convert", "-n", "-m", "16", "-W", "-f", "raw", "-O", "raw", &image, &uri]);
    assert!(fixture.disk.bytes(0, bytes.len()) == bytes, "what was converted in");
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &image, &uri]);
    let info = run("qemu-img", &["info", "--output=json", "-f", "raw", &uri]);
    assert!(info.contains("\"virtual-size\": 67108864"), "{info}");
    let map = run("qemu-img", &["map", "--output=json", "-f", "raw", &uri]);
    assert!(map.contains("\"data\": true") && map.contains("\"data\": false"), "{map}");
    let qcow = fixture.server.directory().join("copy.qcow2").display().to_string();
    run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &fixture.server.uri("ro"), &qcow]);
    run("qemu-img", &["compare", "-f", "qcow2", "-F", "raw", &qcow, &image]);
    let refused = output(Command::new("qemu-img").args(["info", &fixture.server.uri("nobody")]));
    assert!(!refused.status.success());
}

#[test]
fn qemu_io_reads_writes_zeroes_and_discards() {
    requires!("qemu-io");
    let fixture = fixture();
    let uri = fixture.server.uri("");
    let script = [
        "write -P 0x11 0 1M",
        "write -f -P 0x22 123 4567",
        "read -P 0x11 0 123",
        "read -P 0x22 123 4567",
        "write -z -u 64k 64k",
        "read -P 0 64k 64k",
        "write -z -n 128k 64k",
        "write -z 200001 3",
        "read -P 0 128k 64k",
        "discard 512k 64k",
        "read -P 0 512k 64k",
        "flush",
        "aio_write -P 0x33 2M 4M",
        "aio_write -P 0x44 8M 4M",
        "aio_flush",
        "read -P 0x33 2M 4M",
        "read -P 0x44 8M 4M",
        "write -P 0x55 67108352 512",
        "read -P 0x55 67108352 512",
        "read -P 0 16M 32M",
    ];
    let mut arguments = vec!["-f", "raw"];
    arguments.extend(script.iter().flat_map(|line| ["-c", line]));
    arguments.push(&uri);
    let text = run("qemu-io", &arguments);
    assert!(!text.contains("failed") && !text.contains("error"), "{text}");
    let refused =
        output(Command::new("qemu-io").args(["-f", "raw", "-c", "write 0 512", &fixture.server.uri("ro")]));
    assert!(!refused.status.success(), "read-only");
}

#[test]
fn a_script_of_libnbd_checks_flags_and_replies() {
    let knows_nbd = |python: &&str| {
        let tried = Command::new(python).args(["-c", "import nbd"]).output();
        tried.is_ok_and(|output| output.status.success())
    };
    let Some(python) = ["python3", "/usr/bin/python3"].into_iter().find(knows_nbd) else {
        return skipped("no python3 with libnbd is installed");
    };
    let fixture = fixture();
    let script = r#"
import errno, nbd
h = nbd.NBD()
h.add_meta_context("base:allocation")
h.add_meta_context("qemu:allocation-depth")
h.set_request_structured_replies(True)
h.set_strict_mode(0)
h.connect_uri(URI)
assert h.get_structured_replies_negotiated()
assert h.get_size() == 64 << 20
assert h.can_meta_context("base:allocation") and h.can_meta_context("qemu:allocation-depth")
assert not h.can_meta_context("base:nonsense")
for can in [h.can_df, h.can_cache, h.can_fast_zero, h.can_flush, h.can_fua, h.can_multi_conn, h.can_trim, h.can_zero]:
    assert can(), can
assert not h.is_read_only() and not h.is_rotational()
assert h.get_block_size(nbd.SIZE_MAXIMUM) == 32 << 20

h.pwrite(b"x" * 1000, 4000, nbd.CMD_FLAG_FUA)
assert h.pread(1000, 4000) == b"x" * 1000
assert h.pread(65536, 0, nbd.CMD_FLAG_DF)[4000:5000] == b"x" * 1000
h.cache(1 << 20, 0)
h.flush()
h.flush(0)

# A read that is partly holes comes in chunks; with DF in one.
chunks = []
def chunk(data, offset, status, error):
    chunks.append((offset, len(data), status))
h.pwrite(b"y" * 65536, 1 << 20)
h.pread_structured(4 << 20, 0, chunk)
kinds = {status for _, _, status in chunks}
assert kinds == {nbd.READ_DATA, nbd.READ_HOLE}, chunks
chunks.clear()
h.pread_structured(4 << 20, 0, chunk, nbd.CMD_FLAG_DF)
assert chunks == [(0, 4 << 20, nbd.READ_DATA)], chunks

h.zero(65536, 1 << 20, nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_FUA)
h.zero(4096, 8192, nbd.CMD_FLAG_NO_HOLE)
assert h.pread(65536, 1 << 20) == bytes(65536)
h.trim(65536, 0, nbd.CMD_FLAG_FUA)

entries = {}
def extent(context, offset, e, error):
    entries[context] = e
h.block_status(64 << 20, 0, extent)
assert set(entries) == {"base:allocation", "qemu:allocation-depth"}, entries
assert sum(entries["base:allocation"][0::2]) == 64 << 20
h.block_status(64 << 20, 0, extent, nbd.CMD_FLAG_REQ_ONE)
assert len(entries["base:allocation"]) == 2

def refused(number, call, *args):
    try:
        call(*args)
    except nbd.Error as error:
        assert error.errnum == number, (error, error.errnum, number)
    else:
        raise AssertionError("nothing was refused")
refused(errno.EINVAL, h.pread, 512, 64 << 20)
refused(errno.ENOSPC, h.pwrite, b"z" * 512, 64 << 20)
refused(errno.ENOSPC, h.zero, 512, (64 << 20) - 256)
refused(errno.EINVAL, h.trim, 512, (64 << 20) - 256)
refused(errno.EINVAL, h.flush, nbd.CMD_FLAG_DF)
assert h.pread(512, (64 << 20) - 512) == bytes(512)

# Many at once, in any order.
cookies = [h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray([i]) * 4096), i * 4096) for i in range(64)]
while h.aio_in_flight() > 0:
    h.poll(-1)
for cookie in cookies:
    assert h.aio_command_completed(cookie)
for i in range(64):
    assert h.pread(1, i * 4096 + 4095) == bytes([i])
h.shutdown()

r = nbd.NBD()
r.set_strict_mode(0)
r.set_request_structured_replies(False)
r.connect_uri(URI_RO)
assert r.is_read_only() and not r.can_df() and not r.can_trim()
refused(errno.EPERM, r.pwrite, b"z" * 512, 0)
refused(errno.EPERM, r.trim, 512, 0)
assert r.pread(1, 4096 + 4095) == bytes([1])
r.shutdown()

# The handshake by hand.
o = nbd.NBD()
o.set_opt_mode(True)
o.connect_uri(URI)
names = []
assert o.opt_list(lambda name, description: names.append((name, description))) == 3
assert names[0] == ("", "the default"), names
o.set_export_name("nobody")
try:
    o.opt_info()
    raise AssertionError("nobody was found")
except nbd.Error as error:
    assert error.errnum == errno.ENOENT, error
o.set_export_name("ro")
o.set_full_info(True)
o.opt_info()
assert o.get_export_description() == "nobody writes here"
assert o.get_canonical_export_name() == "ro"
o.opt_abort()
"#;
    let script = script
        .replace("URI_RO", &format!("{:?}", fixture.server.uri("ro")))
        .replace("(URI)", &format!("({:?})", fixture.server.uri("")));
    let path = fixture.server.directory().join("script.py");
    fs::write(&path, script).expect("a file for the script");
    run(python, &[&path.display().to_string()]);
}

/// A disk of 4 KiB blocks and one of an odd size, as clients that promise to keep to sizes see them.
#[test]
fn clients_keep_to_the_sizes_they_are_told() {
    requires!("qemu-io");
    requires!("nbdcopy");
    let of = |size, block| {
        let geometry = Geometry { size, block_size: block, ..RuledDisk::new(0).geometry.clone() };
        RuledDisk::with(geometry)
    };
    let (coarse, odd) = (of(8 << 20, BlockSize::PAGE), of((1 << 20) + 13, BlockSize::SECTOR));
    let exports = Exports::new();
    for (name, disk) in [("coarse", &coarse), ("odd", &odd)] {
        let (name, disk) = (name.to_owned(), shared(disk));
        exports
            .add(Export { name, description: String::new(), disk, read_only: false, marks: None })
            .expect("a free name");
    }
    let server = Server::start(&exports);
    let script = ["-c", "write -P 7 4000 200", "-c", "read -P 7 4000 200", "-c", "read -P 0 4200 1000"];
    let uri = server.uri("coarse");
    run("qemu-io", &[&["-f", "raw"], &script[..], &[&uri]].concat());
    let seen = coarse.take_seen();
    assert!(!seen.is_empty() && seen.iter().all(|seen| seen.at % 4096 == 0 && seen.len % 4096 == 0));
    assert_eq!(coarse.bytes(3999, 202), [&[0][..], &[7; 200], &[0]].concat());

    let image = server.directory().join("odd");
    let bytes = noise((1 << 20) + 13, 3);
    fs::write(&image, &bytes).expect("a file for the image");
    let (image, uri) = (image.display().to_string(), server.uri("odd"));
    run("nbdcopy", &[&image, &uri]);
    let copy = server.directory().join("copy").display().to_string();
    run("nbdcopy", &[&uri, &copy]);
    assert!(fs::read(&copy).expect("the copy") == bytes);
}

#[test]
fn nbdkit_passes_everything_through() {
    requires!("nbdkit");
    requires!("nbdcopy");
    let fixture = fixture();
    let image = fixture.server.directory().join("image");
    let bytes = sparse_image(&image);
    let socket = format!("socket={}", fixture.server.socket().display());
    let copy = fixture.server.directory().join("copy").display().to_string();
    let shell = format!(
        "nbdcopy --flush '{}' \"$uri\" && nbdcopy \"$uri\" '{copy}' && nbdinfo --map \"$uri\" && nbdinfo \"$uri\"",
        image.display()
    );
    let text = run("nbdkit", &["-U", "-", "nbd", &socket, "shared=true", "--run", &shell]);
    assert!(text.contains("can_fast_zero: true") && text.contains("can_multi_conn: true"), "{text}");
    assert!(fixture.disk.bytes(0, bytes.len()) == bytes, "what went through nbdkit to us");
    assert!(fs::read(&copy).expect("the copy") == bytes, "what came back through it");
}

#[test]
fn nbdkit_sends_odd_sizes() {
    requires!("nbdkit");
    requires!("nbdcopy");
    // The filter cuts every request into pieces of sizes that no drive would like.
    let fixture = fixture();
    let image = fixture.server.directory().join("image");
    let bytes = sparse_image(&image);
    let socket = format!("socket={}", fixture.server.socket().display());
    let shell = format!("nbdcopy --flush --synchronous '{}' \"$uri\"", image.display());
    let arguments = [
        "-U",
        "-",
        "--filter=blocksize",
        "nbd",
        &socket,
        "minblock=1",
        "maxdata=4097",
        "maxlen=70001",
        "--run",
        &shell,
    ];
    run("nbdkit", &arguments);
    assert!(fixture.disk.bytes(0, bytes.len()) == bytes);
}

#[test]
fn fio_verifies_what_it_wrote() {
    requires!("fio");
    let engines = output(Command::new("fio").arg("--enghelp"));
    if !String::from_utf8_lossy(&engines.stdout).contains("nbd") {
        return skipped("this fio has no engine for NBD");
    }
    let fixture = fixture();
    let uri = fixture.server.uri("");
    for (mode, block) in [("randwrite", "4k"), ("write", "64k"), ("randwrite", "512-128k")] {
        let text = run(
            "fio",
            &[
                "--name=verify",
                "--ioengine=nbd",
                &format!("--uri={uri}"),
                &format!("--rw={mode}"),
                &format!(
                    "--bsrange={}",
                    if block.contains('-') { block.to_owned() } else { format!("{block}-{block}") }
                ),
                "--size=16m",
                "--iodepth=32",
                "--verify=crc32c",
                "--verify_fatal=1",
                "--verify_state_save=0", // it would be left in the tree
                "--do_verify=1",
                "--fsync=64",
            ],
        );
        assert!(text.contains("err= 0"), "{text}");
    }
}
