//! NBD servers whose exports are larger than anything, and that describe them in pieces as small as can be: what is asked of them is bounded,
//! and a signal ends a command that is at it.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rustix::process::{Signal, kill_process};

use super::support::dir::Dir;
use super::support::program::{PATIENCE, pid_of, vellum, vellum_command, wait};
use super::support::until;

/// Bytes of an export: no server may say more.
const LEN: u64 = i64::MAX as u64 + 1 - 512;

/// How a server describes its export.
#[derive(Clone, Copy)]
struct Describes {
    /// How long it is.
    len: u64,
    /// Answers in pieces of this many bytes, and never beyond what was asked about.
    piece: u64,
    /// Each other piece is data; else all of it is zero.
    alternates: bool,
}

/// A server, and how often it was asked what is stored.
struct Endless {
    url: String,
    asked: Arc<AtomicU64>,
    _dir: Dir,
}

impl Endless {
    fn new(how: Describes) -> Self {
        let dir = Dir::short();
        let socket = dir.text("nbd");
        let listener = UnixListener::bind(&socket).expect("a socket");
        let asked = Arc::new(AtomicU64::new(0));
        let count = asked.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let count = count.clone();
                std::thread::spawn(move || drop(serve(stream, how, &count)));
            }
        });
        Self { url: format!("nbd+unix:///x?socket={socket}"), asked, _dir: dir }
    }

    fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }
}

fn reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let len = u32::try_from(data.len()).expect("short").to_be_bytes();
    let magic = 0x0003_e889_0455_65a9_u64.to_be_bytes();
    [&magic[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len, data].concat()
}

fn serve(mut stream: UnixStream, how: Describes, asked: &AtomicU64) -> std::io::Result<()> {
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    stream.read_exact(&mut [0; 4])?;
    loop {
        let mut head = [0; 16];
        stream.read_exact(&mut head)?;
        let [option, len] =
            [8, 12].map(|at| u32::from_be_bytes(head[at..at + 4].try_into().expect("four bytes")));
        stream.read_exact(&mut vec![0; len as usize])?;
        match option {
            8 => stream.write_all(&reply(8, 1, &[]))?,
            10 => {
                let context = [&1_u32.to_be_bytes()[..], b"base:allocation"].concat();
                stream.write_all(&[reply(10, 4, &context), reply(10, 1, &[])].concat())?;
            }
            7 => {
                // Read-only, with the flags that say so.
                let facts = [&[0, 0][..], &how.len.to_be_bytes(), &[0, 3]].concat();
                stream.write_all(&[reply(7, 3, &facts), reply(7, 1, &[])].concat())?;
                break;
            }
            other => stream.write_all(&reply(other, (1 << 31) + 1, &[]))?,
        }
    }
    loop {
        let mut request = [0; 28];
        stream.read_exact(&mut request)?;
        let at = u64::from_be_bytes(request[16..24].try_into().expect("eight bytes"));
        let len = u32::from_be_bytes(request[24..].try_into().expect("four bytes"));
        let chunk = |kind: u16, data: &[u8]| {
            let len = u32::try_from(data.len()).expect("short").to_be_bytes();
            let head = [&0x668e_33ef_u32.to_be_bytes()[..], &1_u16.to_be_bytes(), &kind.to_be_bytes()];
            [&head.concat()[..], &request[8..16], &len, data].concat()
        };
        let answer = match request[7] {
            // A hole.
            0 => chunk(2, &[&at.to_be_bytes()[..], &len.to_be_bytes()].concat()),
            7 => {
                asked.fetch_add(1, Ordering::Relaxed);
                let run = u64::from(len).min(how.piece - at % how.piece);
                let is_data = how.alternates && (at / how.piece) % 2 == 1;
                let run = u32::try_from(run).expect("as long as a request").to_be_bytes();
                let status = if is_data { 0_u32 } else { 3 };
                chunk(5, &[&1_u32.to_be_bytes()[..], &run, &status.to_be_bytes()].concat())
            }
            _ => return Ok(()),
        };
        stream.write_all(&answer)?;
    }
}

/// As many answers as a command takes.
const ANSWERS_MAX: u64 = 64 << 10;

/// All of it is zero; and it is in pieces of a sector.
const ZEROS: Describes = Describes { len: LEN, piece: 1 << 40, alternates: false };
const SECTORS: Describes = Describes { len: LEN, piece: 512, alternates: true };

#[test]
fn info_asks_so_often_and_says_that_it_does_not_know() {
    let server = Endless::new(ZEROS);
    let info = vellum(&["info", "--output", "json", &server.url]);
    assert!(info.err.contains("is not known") && info.err.contains("asked 65536 times"), "{info:?}");
    let info = info.json();
    assert_eq!((&info["virtual-size"], info.get("actual-size")), (&LEN.into(), None), "{info}");
    assert_eq!(server.asked(), ANSWERS_MAX);
    let server = Endless::new(SECTORS);
    let text = vellum(&["info", &server.url]).answer();
    assert!(text.contains("disk size: unavailable\n"), "{text}");
    assert_eq!(server.asked(), ANSWERS_MAX);
}

#[test]
fn a_map_ends_where_the_server_does_not() {
    for (how, command) in [
        (ZEROS, &["map", "--output", "json"][..]),
        (Describes { piece: 1, ..ZEROS }, &["map"]),
        (Describes { len: 1 << 40, ..SECTORS }, &["measure", "-O", "vellum"]),
    ] {
        let server = Endless::new(how);
        let ran = vellum(&[command, &[&server.url]].concat());
        assert!(ran.code == 1 && ran.out.is_empty(), "{ran:?}");
        assert!(ran.err.contains("asked 65536 times") && ran.err.contains(&server.url), "{ran:?}");
        assert_eq!(server.asked(), ANSWERS_MAX, "{command:?}");
        // A part of it is mapped.
        let part = vellum(&["map", "--output", "json", "-s", "1G", "-l", "4k", &server.url]).json();
        let runs = part.as_array().expect("a list").iter();
        assert_eq!(runs.map(|run| run["length"].as_u64().expect("bytes")).sum::<u64>(), 4096);
    }
}

/// A command that has no bound of its own, and one that has: a signal ends both while they ask.
#[test]
fn a_signal_ends_what_would_go_on_asking() {
    let server = Endless::new(Describes { alternates: false, ..SECTORS });
    let other = Endless::new(Describes { alternates: false, ..SECTORS });
    for command in
        [&["compare", "-f", "raw", "-F", "raw", &server.url, &other.url][..], &["map", &server.url]]
    {
        let before = server.asked();
        let begun = Instant::now();
        let child = vellum_command().args(command).stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let child = child.expect("our own program can be started");
        until("it asks", || server.asked() > before + 100);
        kill_process(pid_of(&child), Signal::INT).expect("it runs");
        let ran = wait(child, begun, PATIENCE).expect("it ends");
        assert_ne!(ran.code, 0, "{ran:?}");
    }
}
