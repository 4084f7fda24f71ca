//! Random clients against a model: thousands of random commands, many in flight on several connections, on a
//! disk that answers in random order. Each answer must be what the model says. A failure prints its seed.
//!
//! Requests that are in flight at the same time never touch the same bytes unless both only read: the result
//! of two such writes is not defined.

mod support;

use std::collections::BTreeMap;

use support::World;
use support::client::{Answer, Client, Wish};
use support::disks::{RuledDisk, shared};
use support::pipe::pipe;
use vellum_core::{MemoryDisk, Random, SharedDisk};
use vellum_export::nbd::SessionLimits;
use vellum_export::nbd::wire::{RequestHeader, command, command_flag as flag};

const SIZE: usize = 3 << 19;

struct UnderWay {
    header: RequestHeader,
    data: Vec<u8>,
}

struct Model {
    bytes: Vec<u8>,
    random: Random,
    under_way: BTreeMap<(usize, u64), UnderWay>,
    next_cookie: u64,
}

impl Model {
    fn conflicts(&self, offset: u64, len: u64, changes: bool) -> bool {
        self.under_way.values().any(|other| {
            let other_changes =
                matches!(other.header.command, command::WRITE | command::TRIM | command::WRITE_ZEROES);
            let other = &other.header;
            (changes || other_changes) && offset < other.offset + other.len && other.offset < offset + len
        })
    }

    /// A request that may run beside all others.
    fn next(&mut self, structured: bool, read_only: bool) -> Option<UnderWay> {
        let random = &mut self.random;
        let command = *random.pick(&[0, 0, 0, 0, 1, 1, 1, 3, 4, 5, 6, 6, 7]);
        let largest = *random.pick(&[1, 600, 5000, 70_000, 400_000]);
        let mut len = random.below(largest) + 1;
        let mut offset = random.below(SIZE as u64);
        if random.one_in(2) {
            (len, offset) = (len.next_multiple_of(512), offset & !511);
        }
        // Sometimes past the end.
        if !random.one_in(20) {
            len = len.min(SIZE as u64 - offset);
        }
        let mut flags = 0;
        if random.one_in(3) {
            flags = match command {
                command::READ if structured => flag::DF,
                command::WRITE | command::TRIM => flag::FUA,
                command::WRITE_ZEROES => flag::FUA | flag::NO_HOLE,
                command::BLOCK_STATUS => flag::REQ_ONE,
                _ => 0,
            };
        }
        if command == command::FLUSH {
            (offset, len) = (0, 0);
        }
        let changes = matches!(command, command::WRITE | command::TRIM | command::WRITE_ZEROES) && !read_only;
        if self.conflicts(offset, len, changes) {
            return None;
        }
        let mut data = vec![0; if command == command::WRITE { usize::try_from(len).unwrap() } else { 0 }];
        if self.random.one_in(4) {
            data.fill(0);
        } else {
            self.random.fill(&mut data);
        }
        self.next_cookie += 1;
        let header = RequestHeader { flags, command, cookie: self.next_cookie, offset, len };
        Some(UnderWay { header, data })
    }

    fn check(&mut self, asked: &UnderWay, answer: &Answer, structured: bool, read_only: bool) {
        let UnderWay { header, data } = asked;
        let changes = matches!(header.command, command::WRITE | command::TRIM | command::WRITE_ZEROES);
        let is_inside = header.offset + header.len <= SIZE as u64;
        let expected = match header.command {
            _ if changes && read_only => 1,
            command::BLOCK_STATUS if !structured => 22,
            command::WRITE | command::WRITE_ZEROES if !is_inside => 28,
            _ if !is_inside => 22,
            _ => 0,
        };
        assert_eq!(answer.error, expected, "{header:?}: {}", answer.message);
        if expected != 0 {
            return;
        }
        let start = usize::try_from(header.offset).unwrap();
        let range = start..start + usize::try_from(header.len).unwrap();
        match header.command {
            command::READ => assert!(answer.data == self.bytes[range], "{header:?}"),
            command::WRITE => self.bytes[range].copy_from_slice(data),
            command::TRIM | command::WRITE_ZEROES => self.bytes[range].fill(0),
            command::BLOCK_STATUS => {
                let mut at = start;
                for (len, status) in &answer.status[0].1 {
                    let run = at..at + usize::try_from(*len).unwrap();
                    if status & 2 != 0 {
                        assert!(self.bytes[run.clone()].iter().all(|byte| *byte == 0), "{header:?}");
                    }
                    at = run.end;
                }
            }
            _ => {}
        }
    }
}

/// `steps` random steps on `connections` connections.
fn play(
    disk: SharedDisk,
    seed: u64,
    connections: usize,
    steps: usize,
    limits: SessionLimits,
    read_only: bool,
) {
    let world = World::with(disk, read_only, limits);
    let mut random = Random::from_seed(seed);
    let mut model =
        Model { bytes: vec![0; SIZE], random: random.fork(), under_way: BTreeMap::new(), next_cookie: 0 };
    let mut clients: Vec<(Client, bool)> = Vec::new();
    world.run(async {
        for _ in 0..connections {
            let (asks_structured, extended) = (!random.one_in(3), random.one_in(3));
            let structured = asks_structured || extended;
            let (server, client) = pipe(usize::try_from(random.below(1 << 20)).unwrap() + 500_000);
            server.cut_reads(random.fork());
            world.serve(server).detach();
            let mut client = Client::new(client);
            client.begin(Wish { structured: asks_structured, extended, ..Wish::default() }).await;
            clients.push((client, structured));
        }
        for _ in 0..steps {
            let index = random.index(clients.len());
            let (client, structured) = &mut clients[index];
            // More often asking than waiting, so that there is always much in progress.
            if client.open() < 30 && !random.one_in(3) {
                let Some(asked) = model.next(*structured, read_only) else { continue };
                let room = client.stream.unread_there() + asked.data.len() + 32 < 500_000;
                if room {
                    client.request(asked.header, &asked.data).await;
                    model.under_way.insert((index, asked.header.cookie), asked);
                }
            } else if client.open() > 0 {
                receive(&mut model, index, client, *structured, read_only).await;
            }
        }
        for (index, (client, structured)) in clients.iter_mut().enumerate() {
            while client.open() > 0 {
                receive(&mut model, index, client, *structured, read_only).await;
            }
        }
        let (client, _) = &mut clients[0];
        for at in (0..SIZE).step_by(SIZE / 4) {
            let len = SIZE / 4;
            assert!(
                client.read(at as u64, len as u64).await == model.bytes[at..at + len],
                "the end, at {at}"
            );
        }
        clients.clear();
        while world.running() > 0 {
            futures_lite::future::yield_now().await;
        }
    });
    world.assert_nothing_is_left();
}

async fn receive(model: &mut Model, index: usize, client: &mut Client, structured: bool, read_only: bool) {
    let answer = client.answer().await.expect("the session goes on");
    let asked = model.under_way.remove(&(index, answer.cookie)).expect("it was asked");
    model.check(&asked, &answer, structured, read_only);
}

fn seeded(name: &str, seeds: std::ops::Range<u64>, run: impl Fn(u64)) {
    for seed in seeds {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(seed)));
        if let Err(panic) = result {
            #[allow(clippy::print_stderr, reason = "the seed is how the failure is found again")]
            {
                eprintln!("{name}: seed {seed}");
            }
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn random_clients_see_what_the_model_says() {
    seeded("random clients", 0..12, |seed| {
        let disk = RuledDisk::new(SIZE as u64);
        disk.answer_late(Random::from_seed(seed));
        play(shared(&disk), seed, 3, 1500, SessionLimits::default(), false);
    });
}

#[test]
fn random_clients_on_the_reference_disk() {
    seeded("reference disk", 100..103, |seed| {
        play(MemoryDisk::new(SIZE as u64), seed, 2, 600, SessionLimits::default(), false);
    });
}

#[test]
fn random_clients_with_hardly_any_memory() {
    seeded("hardly any memory", 200..206, |seed| {
        let disk = RuledDisk::new(SIZE as u64);
        disk.answer_late(Random::from_seed(seed));
        let limits = SessionLimits {
            requests_max: 3,
            memory_bytes_max: 512 << 10,
            payload_bytes_max: 512 << 10,
            receive_bytes: 4096,
            ..SessionLimits::default()
        };
        play(shared(&disk), seed, 2, 1000, limits, false);
    });
}

#[test]
fn random_clients_of_a_read_only_export() {
    seeded("read-only", 300..303, |seed| {
        play(shared(&RuledDisk::new(SIZE as u64)), seed, 2, 600, SessionLimits::default(), true);
    });
}
