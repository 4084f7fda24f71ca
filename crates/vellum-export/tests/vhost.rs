//! vhost-user-blk from the other side: a front end and a driver that follow the rules.

#[path = "support/guest.rs"]
mod guest;
mod support;

use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use guest::{Answer, EVENT_IDX, FEATURES, HOLE, Machine, Memory, Queue, Served, Shape};
use support::disks::{Kind, RuledDisk, shared};
use vellum_core::{BlockSize, Error, ErrorKind, Geometry, Random};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserInflight};

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;

const SIZE: u64 = 4 << 20;

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Random::from_seed(seed).fill(&mut bytes);
    bytes
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

fn ok(written: u32) -> Answer {
    Answer { status: OK, data: Vec::new(), written }
}

/// A disk, its server, and a machine's memory.
fn scene(queues: u16) -> (Arc<RuledDisk>, Served, Memory) {
    let disk = RuledDisk::new(SIZE);
    let served = Served::new(shared(&disk), false, queues);
    (disk, served, Memory::new())
}

#[test]
fn what_is_written_is_read_however_it_is_cut() {
    let (disk, served, memory) = scene(1);
    let mut machine = Machine::connect(&served, &memory, FEATURES);
    let mut queue = machine.start_queue(0, 128, 0);
    let shapes = [Shape::Usual, Shape::Indirect, Shape::Pieces(512), Shape::Pieces(700), Shape::Pieces(7)];
    for (seed, shape) in shapes.into_iter().enumerate() {
        for (sector, sectors) in [(0, 1), (1, 1), (9, 3), (8191, 1), (100, 8)] {
            memory.forget();
            let len = match shape {
                Shape::Pieces(7) => 512, // as many pieces as the ring has room for
                _ => sectors * 512,
            };
            let data = noise(len, seed as u64 * 100 + sector);
            let put = queue.ask(OUT, sector, &data, 0, shape);
            assert_eq!(put, ok(1), "{shape:?} at {sector}");
            assert_eq!(disk.bytes(sector * 512, len), data, "{shape:?} at {sector}");
            let got = queue.ask(IN, sector, &[], len, shape);
            let written = u32::try_from(len + 1).expect("small");
            assert_eq!(got, Answer { status: OK, data, written }, "{shape:?} at {sector}");
        }
    }
    machine.leave().expect("it left in good order");
}

#[test]
fn each_kind_of_request_reaches_the_disk() {
    let (disk, served, memory) = scene(1);
    let mut machine = Machine::connect(&served, &memory, FEATURES | 1 << 13 | 1 << 14);
    let mut queue = machine.start_queue(0, 64, 0);
    let seen = |answer: Answer| {
        assert_eq!(answer.status, OK);
        let seen = disk.take_seen();
        seen.into_iter().map(|seen| (seen.kind, seen.at, seen.len, seen.zero.may_unmap)).collect::<Vec<_>>()
    };
    assert_eq!(seen(queue.ask(FLUSH, 0, &[], 0, Shape::Usual)), [(Kind::Flush, 0, 0, false)]);
    let one = range(8, 16, 0);
    assert_eq!(seen(queue.ask(DISCARD, 0, &one, 0, Shape::Usual)), [(Kind::Discard, 4096, 8192, false)]);
    let two = [range(0, 1, 1), range(8000, 192, 0)].concat();
    assert_eq!(
        seen(queue.ask(WRITE_ZEROES, 0, &two, 0, Shape::Pieces(5))),
        [(Kind::Zero, 0, 512, true), (Kind::Zero, 8000 * 512, 192 * 512, false)]
    );
    let id = queue.ask(GET_ID, 0, &[], 20, Shape::Usual);
    assert_eq!((id.status, id.written, &id.data[..]), (OK, 21, &b"a serial number that"[..]));
    machine.leave().expect("it left in good order");
}

#[test]
fn what_is_wrong_is_refused_and_reaches_no_disk() {
    let (disk, served, memory) = scene(1);
    let mut machine = Machine::connect(&served, &memory, FEATURES);
    let mut queue = machine.start_queue(0, 64, 0);
    let end = SIZE / 512;
    let refused = [
        (IN, end, vec![], 512, IO_ERROR),
        (IN, end - 1, vec![], 1024, IO_ERROR),
        (IN, u64::MAX, vec![], 512, IO_ERROR),
        (IN, 0, vec![], 100, IO_ERROR),
        (OUT, end, vec![1; 512], 0, IO_ERROR),
        (OUT, 0, vec![1; 511], 0, IO_ERROR),
        (DISCARD, 0, range(end, 1, 0), 0, IO_ERROR),
        (DISCARD, 0, range(0, 1, 1), 0, UNSUPPORTED),
        (DISCARD, 0, vec![0; 15], 0, IO_ERROR),
        (WRITE_ZEROES, 0, range(0, u32::MAX, 0), 0, IO_ERROR),
        (WRITE_ZEROES, 0, range(0, 1, 6), 0, UNSUPPORTED),
        (GET_ID, 0, vec![], 4, IO_ERROR),
        (2, 0, vec![0; 64], 64, UNSUPPORTED),
        (99, 0, vec![], 0, UNSUPPORTED),
    ];
    for (kind, sector, out, in_len, status) in refused {
        let answer = queue.ask(kind, sector, &out, in_len, Shape::Usual);
        assert_eq!(answer.status, status, "{kind} at {sector}");
        // Of data that was not filled nothing counts; where there is none to fill, the status does.
        assert_eq!(answer.written, u32::from(in_len == 0), "{kind} at {sector}");
    }
    assert_eq!(disk.take_seen(), []);
    machine.leave().expect("it left in good order");
}

#[test]
fn a_front_end_is_told_that_its_disk_is_larger() {
    let (disk, served, memory) = scene(1);
    let mut machine = Machine::connect(&served, &memory, FEATURES);
    let mut queue = machine.start_queue(0, 64, 0);
    let (mut hears, speaks) = UnixStream::pair().expect("sockets");
    hears.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket");
    let read = |queue: &mut Queue<'_>, sector| queue.ask(IN, sector, &[], 512, Shape::Usual).status;
    let end = SIZE / 512;
    let capacity = |machine: &mut Machine<'_>| machine.config(0, 8);
    // There is no way to notify the front end yet: a query shows the new size, and requests may go there from
    // then on.
    disk.added.store(512, Ordering::Release);
    machine.notify_resize();
    assert_eq!(capacity(&mut machine), (end + 1).to_le_bytes());
    assert_eq!((read(&mut queue, end), read(&mut queue, end + 1)), (OK, IO_ERROR));
    machine.front_end.set_backend_request_fd(&speaks).expect("a way back");
    drop(speaks);
    // The first is announced as soon as there is a way, the third although the size was queried in between.
    for more in [512u64, 1024, 4096] {
        disk.added.store(more, Ordering::Release);
        if more > 1024 {
            assert_eq!(capacity(&mut machine), (end + more / 512).to_le_bytes());
        }
        if more > 512 {
            machine.notify_resize();
        }
        let mut told = [0; 12];
        hears.read_exact(&mut told).expect("it is told");
        assert_eq!(
            told.map(u32::from),
            [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
            "the configuration has changed"
        );
        let sectors = end + more / 512;
        assert_eq!((read(&mut queue, sectors - 1), read(&mut queue, sectors)), (OK, IO_ERROR));
        assert_eq!(capacity(&mut machine), sectors.to_le_bytes());
    }
    machine.notify_resize();
    hears.set_read_timeout(Some(Duration::from_millis(50))).expect("a socket");
    hears.read_exact(&mut [0]).expect_err("nothing has changed");
    machine.leave().expect("it left in good order");
}

#[test]
fn a_disk_that_fails_is_told_of_and_the_next_request_works() {
    let (disk, served, memory) = scene(1);
    let mut machine = Machine::connect(&served, &memory, FEATURES | 1 << 13);
    let mut queue = machine.start_queue(0, 64, 0);
    disk.fail(|seen| match seen.at {
        0 => Some(Error::new(ErrorKind::NoSpace, "on purpose")),
        512 => Some(Error::new(ErrorKind::Unsupported, "on purpose")),
        _ => None,
    });
    assert_eq!(queue.ask(OUT, 0, &[1; 512], 0, Shape::Usual).status, IO_ERROR);
    assert_eq!(queue.ask(IN, 0, &[], 512, Shape::Usual).written, 0);
    assert_eq!(queue.ask(DISCARD, 0, &range(1, 1, 0), 0, Shape::Usual).status, UNSUPPORTED);
    assert_eq!(queue.ask(OUT, 2, &[1; 512], 0, Shape::Usual), ok(1));
    machine.leave().expect("it left in good order");
}

#[test]
fn a_disk_for_reading_is_not_written() {
    let disk = RuledDisk::new(SIZE);
    let served = Served::new(shared(&disk), true, 1);
    let memory = Memory::new();
    let mut machine = Machine::connect(&served, &memory, u64::MAX);
    assert_eq!(machine.features & (1 << 5 | 1 << 13 | 1 << 14), 1 << 5);
    let mut queue = machine.start_queue(0, 64, 0);
    assert_eq!(queue.ask(OUT, 0, &[1; 512], 0, Shape::Usual).status, IO_ERROR);
    assert_eq!(queue.ask(DISCARD, 0, &range(0, 1, 0), 0, Shape::Usual).status, UNSUPPORTED);
    assert_eq!(queue.ask(IN, 0, &[], 512, Shape::Usual).status, OK);
    assert_eq!(queue.ask(FLUSH, 0, &[], 0, Shape::Usual).status, OK);
    machine.leave().expect("it left in good order");
}

#[test]
fn the_configuration_is_that_of_the_disk() {
    let geometry = Geometry {
        size: SIZE + 100,
        block_size: BlockSize::from_shift(9),
        preferred_size: BlockSize::from_shift(16),
        read_only: false,
        fast_zeroes: true,
    };
    let served = Served::new(shared(&RuledDisk::with(geometry)), false, 3);
    let memory = Memory::new();
    let mut machine = Machine::connect(&served, &memory, FEATURES);
    assert_eq!(machine.front_end.get_queue_num().expect("a number"), 3);
    assert_eq!(machine.config(0, 8), (SIZE / 512).to_le_bytes());
    assert_eq!(machine.config(20, 4), 512u32.to_le_bytes());
    assert_eq!(machine.config(34, 2), 3u16.to_le_bytes());
    assert_eq!(machine.config(60, 36), [0; 36]);
    let flags = VhostUserConfigFlags::WRITABLE;
    machine.front_end.set_config(0, flags, &[1; 8]).expect_err("the size is not the guest's to say");
    machine.leave().expect_err("that ends it");
}

#[test]
fn who_cannot_flush_or_may_have_switched_the_write_cache_off_has_every_write_durable() {
    const FLUSH_OFFERED: u64 = 1 << 9;
    const SWITCH: u64 = 1 << 11;
    let (disk, served, memory) = scene(1);
    let is_durable = |queue: &mut Queue<'_>| {
        assert_eq!(queue.ask(OUT, 0, &[1; 512], 0, Shape::Usual).status, OK);
        disk.take_seen().iter().all(|seen| seen.fua)
    };
    let mut machine = Machine::connect(&served, &memory, u64::MAX);
    assert_eq!(machine.features & (FLUSH_OFFERED | SWITCH), FLUSH_OFFERED, "the switch is not offered");
    let mut queue = machine.start_queue(0, 64, 0);
    assert!(!is_durable(&mut queue));
    machine.leave().expect("it left in good order");

    let mut machine = Machine::connect(&served, &memory, FEATURES & !FLUSH_OFFERED);
    let mut queue = machine.start_queue(0, 64, 0);
    assert!(is_durable(&mut queue), "it knows nothing of flushing");
    machine.leave().expect("it left in good order");

    // A guest that took the switch from an earlier server.
    for taken in [FEATURES | SWITCH, FEATURES & !FLUSH_OFFERED | SWITCH] {
        let mut machine = Machine::connect(&served, &memory, FEATURES);
        machine.front_end.set_features(taken).expect("it was offered before");
        let mut queue = machine.start_queue(0, 64, 0);
        assert!(is_durable(&mut queue), "it may have turned it before");
        for writeback in [1, 0] {
            let flags = VhostUserConfigFlags::WRITABLE;
            machine.front_end.set_config(32, flags, &[writeback]).expect("it may be turned");
            assert_eq!(machine.config(32, 1), [0]);
            assert!(is_durable(&mut queue), "and is never believed");
        }
        machine.leave().expect("it left in good order");
    }
}

#[test]
fn requests_end_in_any_order_on_every_queue() {
    for features in [FEATURES, FEATURES | EVENT_IDX] {
        let (disk, served, memory) = scene(4);
        disk.answer_late(Random::from_seed(5));
        let mut machine = Machine::connect(&served, &memory, features);
        let bases = [0, 7, 65_530, 40_000];
        let mut queues: Vec<_> = (0..4).map(|index| machine.start_queue(index, 32, bases[index])).collect();
        let mut random = Random::from_seed(6);
        for round in 0..40 * support_scale() {
            memory.forget();
            let mut asked = Vec::new();
            for (index, queue) in queues.iter_mut().enumerate() {
                let before = queue.next_avail;
                let mut mine = std::collections::BTreeMap::new();
                for number in 0..=random.index(9) as u64 {
                    // Each queue has a part of the disk to itself, each request of a round a sector.
                    let sector = index as u64 * 2000 + number;
                    let data = noise(512, round as u64 * 100 + sector);
                    let placed = queue.place(OUT, sector, &data, 0, Shape::Usual);
                    mine.insert(queue.hang(&placed.pieces), (sector, data, placed.status));
                }
                queue.kick_since(before);
                asked.push(mine);
            }
            for (queue, mut mine) in queues.iter_mut().zip(asked) {
                while !mine.is_empty() {
                    let (head, written) = queue.take();
                    let (sector, data, status) =
                        mine.remove(&head).expect("it was asked, and comes back once");
                    assert_eq!((written, memory.get(status, 1)[0]), (1, OK));
                    assert_eq!(disk.bytes(sector * 512, 512), data);
                }
            }
        }
        let kicks: usize = queues.iter().map(|queue| queue.kicks).sum();
        assert!(kicks > 0, "somebody rang");
        machine.leave().expect("it left in good order");
    }
}

fn support_scale() -> usize {
    std::env::var("VELLUM_TEST_SCALE").ok().and_then(|scale| scale.parse().ok()).unwrap_or(1)
}

#[test]
fn a_stopped_queue_hands_back_all_it_took_and_says_where_it_is() {
    let (disk, served, memory) = scene(1);
    let mut machine = Machine::connect(&served, &memory, FEATURES);
    let mut queue = machine.start_queue(0, 64, 65_535);
    assert_eq!(queue.ask(OUT, 0, &[1; 512], 0, Shape::Usual).status, OK);
    disk.close_gate();
    for sector in 0..5 {
        let placed = queue.place(OUT, sector, &[9; 512], 0, Shape::Usual);
        queue.hang(&placed.pieces);
    }
    queue.kick();
    let mut begun = 0;
    while begun < 5 {
        begun += disk.take_seen().len();
        std::thread::sleep(Duration::from_millis(1));
    }
    let opener = std::thread::spawn({
        let disk = disk.clone();
        move || {
            std::thread::sleep(Duration::from_millis(50));
            disk.open_gate();
        }
    });
    // It waits for the five, which are the last that were hung up before it.
    assert_eq!(machine.front_end.get_vring_base(0).expect("a base"), 5);
    opener.join().expect("it ends");
    for _ in 0..5 {
        queue.try_take().expect("it has come back");
    }
    // Nothing runs any more, and continues from there.
    let placed = queue.place(OUT, 70, &[7; 512], 0, Shape::Usual);
    queue.hang(&placed.pieces);
    queue.kick();
    assert!(!queue.wait_for_call(Duration::from_millis(50)) || queue.try_take().is_none());
    disk.take_seen();
    machine.start(&queue, 5);
    queue.take();
    assert_eq!(disk.bytes(70 * 512, 512), [7; 512]);
    machine.leave().expect("it left in good order");
}

#[test]
fn a_machine_goes_on_with_the_next_server() {
    let disk = RuledDisk::new(SIZE);
    let memory = Memory::new();
    let mut kept: Option<Queue<'_>> = None;
    for round in 0..4u8 {
        let served = Served::new(shared(&disk), false, 1);
        let mut machine = Machine::connect(&served, &memory, FEATURES);
        let mut queue = match kept.take() {
            Some(queue) => {
                // The front end knows nothing but what was handed back, and needs no more.
                let base = memory.index(queue.used + 2);
                machine.start(&queue, base);
                queue
            }
            None => machine.start_queue(0, 64, 0),
        };
        memory.forget();
        let hung: Vec<_> = (0..8)
            .map(|sector| {
                let placed = queue.place(OUT, sector, &[round; 512], 0, Shape::Usual);
                (queue.hang(&placed.pieces), placed.status)
            })
            .collect();
        queue.kick();
        // Some are taken by now and some are not.
        match round {
            0 | 2 => machine.end(),
            _ => drop(queue.take()),
        }
        machine.leave().expect("it ended in good order");
        let taken = memory.index(queue.used + 2);
        let served = Served::new(shared(&disk), false, 1);
        let mut machine = Machine::connect(&served, &memory, FEATURES);
        machine.start(&queue, taken);
        while queue.next_used != queue.next_avail {
            queue.take();
        }
        for (_, status) in hung {
            assert_eq!(memory.get(status, 1), [OK]);
        }
        assert_eq!(disk.bytes(0, 8 * 512), vec![round; 8 * 512]);
        machine.leave().expect("it left in good order");
        kept = Some(queue);
    }
}

#[test]
fn memory_comes_and_goes_while_a_queue_runs() {
    let (_, served, memory) = scene(1);
    let mut machine = Machine::connect(&served, &memory, FEATURES);
    let mut queue = machine.start_queue(0, 64, 0);
    let far = memory.table()[1];
    let read_far = |queue: &mut Queue<'_>| {
        let placed = queue.place(IN, 0, &[], 512, Shape::Usual);
        let mut pieces = placed.pieces;
        pieces[1].0 = far.guest_phys_addr + 512;
        queue.hang(&pieces);
        queue.kick();
        queue.take();
        memory.get(placed.status, 1)[0]
    };
    assert_eq!(read_far(&mut queue), OK);
    machine.front_end.remove_mem_region(&far).expect("it is there");
    assert_eq!(read_far(&mut queue), IO_ERROR);
    machine.front_end.add_mem_region(&far).expect("it is not there");
    assert_eq!(read_far(&mut queue), OK);
    machine.leave().expect("it left in good order");
}

#[test]
fn memory_is_not_gone_before_the_requests_that_use_it_have_ended() {
    let (disk, served, memory) = scene(1);
    let mut machine = Machine::connect(&served, &memory, FEATURES);
    let mut queue = machine.start_queue(0, 64, 0);
    let data = noise(512, 1);
    assert_eq!(queue.ask(OUT, 3, &data, 0, Shape::Usual), ok(1));
    disk.close_gate();
    disk.take_seen();
    let far = memory.table()[1];
    let (room, source) = (far.guest_phys_addr + 512, far.guest_phys_addr + 4096);
    memory.put(source, &noise(512, 2));
    let read = queue.place(IN, 3, &[], 512, Shape::Usual);
    let write = queue.place(OUT, 4, &[0; 512], 0, Shape::Usual);
    for (placed, at) in [(read, room), (write, source)] {
        let mut pieces = placed.pieces;
        pieces[1].0 = at;
        queue.hang(&pieces);
    }
    queue.kick();
    let mut seen = Vec::new();
    for _ in 0..20_000 {
        seen.extend(disk.take_seen());
        if seen.len() == 2 {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(seen.len(), 2, "both wait at the gate");
    let gone = std::thread::scope(|scope| {
        let removed = scope.spawn(|| {
            machine.front_end.remove_mem_region(&far).expect("it is there");
            // What is written there from now on must not matter.
            let seen = (memory.get(room, 512), disk.bytes(4 * 512, 512));
            memory.put(source, &noise(512, 9));
            seen
        });
        // Time enough for a notification that comes too early.
        std::thread::sleep(Duration::from_millis(50));
        disk.open_gate();
        removed.join().expect("it was told")
    });
    assert_eq!(gone, (data, noise(512, 2)), "they had ended when it was told");
    queue.take();
    queue.take();
    assert_eq!(queue.ask(OUT, 5, &noise(512, 3), 0, Shape::Usual), ok(1), "the queue goes on");
    machine.leave().expect("it left in good order");
}

#[test]
fn a_guest_may_give_the_same_memory_twice_and_change_it_under_way() {
    let (disk, served, memory) = scene(1);
    let mut machine = Machine::connect(&served, &memory, FEATURES);
    let mut queue = machine.start_queue(0, 64, 0);
    let data = noise(1024, 3);
    assert_eq!(queue.ask(OUT, 0, &data, 0, Shape::Usual), ok(1));
    for (kind, first, second) in [(IN, 0u64, 0u64), (IN, 0, 256), (IN, 256, 0), (OUT, 0, 0), (OUT, 0, 100)] {
        let (out, in_len) = if kind == OUT { (noise(1024, 4), 0) } else { (vec![], 1024) };
        let placed = queue.place(kind, 0, &out, in_len, Shape::Pieces(512));
        let mut pieces = placed.pieces;
        let at = pieces[1].0;
        (pieces[1].0, pieces[2].0) = (at + first, at + second);
        queue.hang(&pieces);
        queue.kick();
        queue.take();
        assert_eq!(memory.get(placed.status, 1), [OK], "{kind}, {first} and {second}");
        // The later piece is filled last.
        match kind {
            IN => assert_eq!(memory.get(at + second, 512), data[512..]),
            _ => {
                let second = usize::try_from(second).expect("small");
                assert_eq!(disk.bytes(0, 1024), [&out[..512], &out[second..second + 512]].concat());
            }
        }
    }
    machine.leave().expect("it left in good order");
}

#[test]
fn data_that_is_not_in_memory_fails_its_request_alone() {
    let (disk, served, memory) = scene(1);
    let mut machine = Machine::connect(&served, &memory, FEATURES);
    let mut queue = machine.start_queue(0, 64, 0);
    for kind in [IN, OUT, DISCARD, GET_ID] {
        for at in [HOLE - 1, HOLE, u64::MAX - 511, u64::MAX] {
            let (out, in_len) = if matches!(kind, OUT | DISCARD) { (vec![0; 512], 0) } else { (vec![], 512) };
            let placed = queue.place(kind, 0, &out, in_len, Shape::Usual);
            let mut pieces = placed.pieces;
            pieces[1].0 = at;
            queue.hang(&pieces);
            queue.kick();
            queue.take();
            assert_eq!(memory.get(placed.status, 1), [IO_ERROR], "{kind} at {at:#x}");
        }
    }
    assert_eq!(disk.take_seen(), []);
    assert_eq!(queue.ask(IN, 0, &[], 512, Shape::Usual).status, OK);
    machine.leave().expect("it left in good order");
}

#[test]
fn what_a_killed_server_left_is_done_by_the_next_in_order() {
    let (disk, served, memory) = scene(2);
    let mut machine = Machine::connect(&served, &memory, FEATURES);
    let wanted = VhostUserInflight::new(0, 0, 2, 64);
    let (kept, file) = machine.front_end.get_inflight_fd(&wanted).expect("a file");
    machine.front_end.set_inflight_fd(&kept, file.as_raw_fd()).expect("it is used");
    let mut queue = machine.start_queue(1, 64, 65_533);
    assert_eq!(queue.ask(OUT, 0, &[1; 512], 0, Shape::Usual).status, OK);

    // Of six the second and the fourth are answered, the others wait when the server is killed.
    disk.close_gate();
    disk.take_seen();
    let placed: Vec<_> = (0..6u64)
        .map(|number| match number {
            1 | 3 => queue.place(GET_ID, 0, &[], 20, Shape::Usual),
            _ => queue.place(OUT, 100 - number, &[7; 512], 0, Shape::Usual),
        })
        .collect();
    let heads: Vec<_> = placed.iter().map(|placed| queue.hang(&placed.pieces)).collect();
    queue.kick();
    assert_eq!([queue.take().0, queue.take().0], [heads[1], heads[3]]);
    let mut asked = Vec::new();
    while asked.len() < 4 {
        asked.extend(disk.take_seen());
        std::thread::sleep(Duration::from_millis(1));
    }
    // All that is left of it is in memory.
    let mut book = vec![0; usize::try_from(kept.mmap_size).expect("small")];
    file.read_exact_at(&mut book, 0).expect("the file");
    let then = memory.get(0, usize::try_from(HOLE).expect("small"));
    disk.open_gate();
    machine.leave().expect("it left");
    memory.put(0, &then);
    file.write_all_at(&book, 0).expect("the file");
    disk.take_seen();

    // A front end knows how many came back, no more.
    let mut machine = Machine::connect(&served, &memory, FEATURES);
    machine.front_end.set_inflight_fd(&kept, file.as_raw_fd()).expect("it is used");
    let base = memory.index(queue.used + 2);
    disk.close_gate();
    machine.start(&queue, base);
    let mut seen = Vec::new();
    while seen.len() < 4 {
        seen.extend(disk.take_seen());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(seen, asked, "in the order in which they were asked");
    // Were this one killed, too, the order would be the same.
    let mut now = vec![0; book.len()];
    file.read_exact_at(&mut now, 0).expect("the file");
    assert_eq!(now, book);
    disk.open_gate();
    let mut again: Vec<_> = (0..4).map(|_| queue.take().0).collect();
    again.sort_unstable();
    let mut left = [heads[0], heads[2], heads[4], heads[5]];
    left.sort_unstable();
    assert_eq!(again, left);
    for placed in &placed {
        assert_eq!(memory.get(placed.status, 1), [OK]);
    }
    assert_eq!(queue.ask(IN, 100, &[], 512, Shape::Usual).data, [7; 512], "and it goes on");
    assert_eq!(machine.front_end.get_vring_base(1).expect("a base"), u32::from(queue.next_avail));
    machine.leave().expect("it left in good order");
}

#[test]
fn a_guest_hears_once_that_writes_were_lost_also_when_its_front_end_comes_again() {
    let (disk, served, memory) = scene(2);
    let flush = |queue: &mut Queue<'_>| queue.ask(FLUSH, 0, &[], 0, Shape::Usual).status;
    let mut machine = Machine::connect(&served, &memory, FEATURES);
    let (mut one, mut other) = (machine.start_queue(0, 16, 0), machine.start_queue(1, 16, 0));
    assert_eq!((flush(&mut one), flush(&mut other)), (OK, OK));
    disk.losses.grow();
    assert_eq!(one.ask(OUT, 0, &[1; 512], 0, Shape::Usual), ok(1), "a write promises nothing");
    assert_eq!((flush(&mut other), flush(&mut one)), (IO_ERROR, OK), "one guest has both");
    disk.losses.grow();
    machine.leave().expect("it left in good order");
    // The loss may be reported elsewhere meanwhile.
    let elsewhere = disk.losses.witness();
    futures_lite::future::block_on(elsewhere.promise(std::future::ready(Ok(())))).expect_err("a loss");
    memory.forget();
    let mut machine = Machine::connect(&served, &memory, FEATURES);
    let mut queue = machine.start_queue(0, 16, 0);
    assert_eq!((flush(&mut queue), flush(&mut queue)), (IO_ERROR, OK));
    machine.leave().expect("it left in good order");
}
