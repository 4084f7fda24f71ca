//! Front ends and guests that follow no rule: at worst they end their own queue or session.
//!
//! After every violation the same server serves a well-behaved machine, and the disk is unchanged.

#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]

#[path = "support/guest.rs"]
mod guest;
mod support;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use guest::{
    DATA, EVENT_IDX, FAR_DATA, FEATURES, FRONT_END, HOLE, INDIRECT, Machine, Memory, NEXT, Queue, Served,
    Shape, WRITE, header,
};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use support::disks::{RuledDisk, shared};
use vellum_core::Random;
use vellum_io::IoMode;
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserInflight};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const SIZE: u64 = 1 << 20;

/// A row of the table: its number, where, how long, flags, the next.
type Row = (u16, u64, u32, u16, u16);

fn scene() -> (Arc<RuledDisk>, Served, Memory) {
    let disk = RuledDisk::new(SIZE);
    let served = Served::new(shared(&disk), false, 2);
    (disk, served, Memory::new())
}

/// A machine that keeps to the rules is served.
#[track_caller]
fn assert_serves(served: &Served) {
    let memory = Memory::new();
    let mut machine = Machine::connect(served, &memory, FEATURES);
    for index in 0..2 {
        let mut queue = machine.start_queue(index, 16, 0);
        assert_eq!(queue.ask(IN, 0, &[], 512, Shape::Usual).status, 0);
    }
    machine.leave().expect("it left in good order");
}

/// The queue is served no more, and its front end is rung for that.
#[track_caller]
fn assert_broken(queue: &mut Queue<'_>) {
    for _ in 0..600 {
        if queue.err.read().is_ok() {
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("nobody rings for a broken queue");
}

#[test]
fn chains_that_make_no_sense_come_back_as_they_are() {
    let (disk, served, memory) = scene();
    for features in [FEATURES, FEATURES | EVENT_IDX] {
        let mut machine = Machine::connect(&served, &memory, features);
        let mut queue = machine.start_queue(0, 16, 0);
        memory.put(DATA, &header(OUT, 0));
        let cases: [&[Row]; 12] = [
            // A loop, of one and of several; and one that leaves the table.
            &[(0, DATA, 16, NEXT, 0)],
            &[(0, DATA, 16, NEXT, 1), (1, DATA, 512, NEXT, 2), (2, DATA, 512, NEXT, 1)],
            &[(0, DATA, 16, NEXT, 16)],
            &[(0, DATA, 16, NEXT, u16::MAX)],
            // No status, no header, a header that is not in memory, a status that is not.
            &[(0, DATA, 16, 0, 0)],
            &[(0, DATA, 16, WRITE, 0)],
            &[(0, HOLE, 16, NEXT, 1), (1, DATA + 64, 1, WRITE, 0)],
            &[(0, DATA, 16, NEXT, 1), (1, u64::MAX, 1, WRITE, 0)],
            // To be read behind what is to be written; more bytes than there are.
            &[(0, DATA + 64, 1, WRITE | NEXT, 1), (1, DATA, 16, 0, 0)],
            &[(0, DATA, u32::MAX, NEXT, 1), (1, DATA, u32::MAX, NEXT, 2), (2, DATA, 1, WRITE, 0)],
            // Tables that are not in memory, of no size, within themselves.
            &[(0, HOLE, 64, INDIRECT, 0)],
            &[(0, DATA, 17, INDIRECT, 0)],
        ];
        for case in cases {
            for &(index, at, len, flags, next) in case {
                queue.set_descriptor(index, at, len, flags, next);
            }
            queue.offer(0);
            queue.kick();
            assert_eq!(queue.take(), (0, 0), "{case:x?}");
        }
        // A table within a table, and one that is a loop.
        let table = DATA + 0x1000;
        for row in [Queue::descriptor(table, 16, INDIRECT, 0), Queue::descriptor(DATA, 16, NEXT, 0)] {
            memory.put(table, &row);
            queue.set_descriptor(0, table, 16, INDIRECT, 0);
            queue.offer(0);
            queue.kick();
            assert_eq!(queue.take(), (0, 0), "{row:x?}");
        }
        // A table of as many rows as there can be, each of a byte.
        let rows: Vec<u8> = (0..4096u16).flat_map(|row| Queue::descriptor(DATA, 1, NEXT, row + 1)).collect();
        memory.put(table, &rows);
        queue.set_descriptor(0, table, u32::try_from(rows.len()).expect("small"), INDIRECT, 0);
        queue.offer(0);
        queue.kick();
        assert_eq!(queue.take(), (0, 0));
        assert_eq!(queue.ask(IN, 0, &[], 512, Shape::Usual).status, 0, "it goes on");
        machine.leave().expect("it left in good order");
    }
    assert!(disk.take_seen().iter().all(|seen| seen.kind == support::disks::Kind::Read));
    assert_serves(&served);
}

#[test]
fn a_ring_that_makes_no_sense_is_broken_alone() {
    let (_, served, memory) = scene();
    let spoils: [fn(&mut Queue<'_>, &Memory); 3] = [
        // More is ready than the ring has room for.
        |queue, memory| memory.set_index(queue.avail + 2, 1000),
        // As above, backwards.
        |queue, memory| memory.set_index(queue.avail + 2, u16::MAX),
        // A head that is not in the table cannot be handed back.
        |queue, _| queue.offer(16),
    ];
    for spoil in spoils {
        let mut machine = Machine::connect(&served, &memory, FEATURES);
        let mut broken = machine.start_queue(0, 16, 0);
        let mut sound = machine.start_queue(1, 16, 0);
        spoil(&mut broken, &memory);
        broken.kick();
        assert_broken(&mut broken);
        assert_eq!(sound.ask(IN, 0, &[], 512, Shape::Usual).status, 0, "the other goes on");
        // Set up anew, it works again.
        machine.front_end.get_vring_base(0).expect("a base");
        let mut again = machine.start_queue(0, 16, 0);
        assert_eq!(again.ask(IN, 0, &[], 512, Shape::Usual).status, 0);
        machine.leave().expect("it left in good order");
    }
    assert_serves(&served);
}

/// A panic that is no disk's: outside of one, as far as the queue knows.
#[test]
fn a_queue_that_panics_ends_its_session_and_no_other() {
    let disk = RuledDisk::new(SIZE);
    disk.fail(|seen| {
        assert!(seen.kind != support::disks::Kind::Flush, "as planned");
        None
    });
    let (served, memory, other) = (Served::unchecked(shared(&disk), false, 2), Memory::new(), Memory::new());
    let mut machine = Machine::connect(&served, &memory, FEATURES);
    let mut sound = Machine::connect(&served, &other, FEATURES);
    let (mut queue, mut its) = (machine.start_queue(0, 16, 0), sound.start_queue(0, 16, 0));
    let placed = queue.place(FLUSH, 0, &[], 0, Shape::Usual);
    queue.hang(&placed.pieces);
    queue.kick();
    machine.wait_until_ended();
    assert_eq!(its.ask(IN, 0, &[], 512, Shape::Usual).status, 0, "on the same worker");
    sound.leave().expect("it left in good order");
    assert_serves(&served);
}

/// Reads and writes of it block from now on. Its flags are shared with the process it was given to.
fn make_blocking(bell: &EventFd) {
    // The same eventfd once more, as a type with safe functions.
    let own = pidfd_open(getpid(), PidfdFlags::empty()).expect("this process");
    let bell = pidfd_getfd(&own, bell.as_raw_fd(), PidfdGetfdFlags::empty()).expect("it is open");
    let flags = rustix::fs::fcntl_getfl(&bell).expect("its flags");
    rustix::fs::fcntl_setfl(&bell, flags - rustix::fs::OFlags::NONBLOCK).expect("they are shared");
}

/// An eventfd that is full and blocking: the front end can make it so at any time.
#[test]
fn a_bell_that_nobody_can_ring_keeps_no_worker() {
    let (_, served, memory) = scene();
    let mut machine = Machine::connect(&served, &memory, FEATURES);
    let mut queue = machine.start_queue(0, 16, 0);
    assert_eq!(queue.ask(IN, 0, &[], 512, Shape::Usual).status, 0);
    // It is full then. The notification of the answer may come in between, and must be taken before.
    while queue.call.write(u64::MAX - 1).is_err() {
        queue.wait_for_call(std::time::Duration::ZERO);
    }
    make_blocking(&queue.call);
    for sector in 0..600 {
        let placed = queue.place(IN, sector % 8, &[], 512, Shape::Usual);
        queue.hang(&placed.pieces);
        queue.kick();
        while queue.try_take().is_none() {
            std::thread::yield_now();
        }
        assert_eq!(memory.get(placed.status, 1), [0]);
    }
    // On the same workers.
    assert_serves(&served);
    machine.leave().expect("it left in good order");
}

/// How many there are of this kind of this process.
fn count_of(what: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{what}")).expect("it is there").count()
}

/// A front end that hands over one bell after the other, each of which would block a writer.
#[test]
fn bells_that_nobody_can_ring_leave_nothing_behind() {
    for mode in [IoMode::Auto, IoMode::Threads] {
        let served = Served::in_mode(mode, shared(&RuledDisk::new(SIZE)), 2);
        let memory = Memory::new();
        assert_serves(&served);
        let before = (count_of("fd"), count_of("task"));
        let mut machine = Machine::connect(&served, &memory, FEATURES);
        let mut queue = machine.start_queue(0, 16, 0);
        for round in 0..200 {
            let call = EventFd::new(0).expect("an eventfd");
            call.write(u64::MAX - 1).expect("it is full now");
            machine.front_end.set_vring_call(0, &call).expect("it is taken");
            make_blocking(&call);
            let placed = queue.place(IN, round % 8, &[], 512, Shape::Usual);
            queue.hang(&placed.pieces);
            queue.kick();
            while queue.try_take().is_none() {
                std::thread::yield_now();
            }
        }
        let few = |what: &str, now: usize, before: usize| {
            assert!(now <= before + 16, "{mode:?}: {now} {what}, of {before} before");
        };
        few("descriptors", count_of("fd"), before.0);
        few("threads", count_of("task"), before.1);
        drop(queue);
        machine.leave().expect("it left in good order");
        assert_serves(&served);
        few("descriptors", count_of("fd"), before.0);
        few("threads", count_of("task"), before.1);
    }
}

/// A socket serves one front end at a time.
#[test]
fn a_front_end_that_says_nothing_or_half_of_it_is_sent_away() {
    let (_, served, memory) = scene();
    let limit = Duration::from_secs(5);
    let get_features = [1u32, 1, 0].map(u32::to_ne_bytes).concat();
    for said in [&get_features[..0], &get_features[..11]] {
        let (mut socket, _handle, ended) = served.connect();
        socket.write_all(said).expect("it is heard");
        // It is disconnected by the clock, which does not move by itself.
        while !ended.is_finished() {
            served.clock.advance(limit);
            std::thread::yield_now();
        }
        let error = ended.join().expect("it does not panic").expect_err("it was sent away");
        assert!(error.chain().contains("a complete message"), "{}", error.chain());
        assert_eq!(socket.read(&mut [0; 8]).ok(), Some(0), "and hears it");
    }
    // A front end that has sent a message may be silent, but not in the middle of a message.
    let mut machine = Machine::connect(&served, &memory, FEATURES);
    served.clock.advance(limit * 100);
    let mut queue = machine.start_queue(0, 16, 0);
    assert_eq!(queue.ask(IN, 0, &[], 512, Shape::Usual).status, 0);
    let (mut socket, _handle, ended) = served.connect();
    socket.write_all(&get_features).expect("it is heard");
    socket.read_exact(&mut [0; 20]).expect("an answer");
    let set_features = [2u32, 1, 8, 0].map(u32::to_ne_bytes).concat();
    socket.write_all(&set_features).expect("all but four bytes are heard");
    while !ended.is_finished() {
        served.clock.advance(limit);
        std::thread::yield_now();
    }
    ended.join().expect("it does not panic").expect_err("it was sent away");
    drop(queue);
    machine.leave().expect("it left in good order");
    assert_serves(&served);
}

#[test]
fn a_queue_whose_memory_goes_stops_and_goes_on_when_it_is_back() {
    let (disk, served, memory) = scene();
    for features in [FEATURES, FEATURES | EVENT_IDX] {
        let mut machine = Machine::connect(&served, &memory, features);
        let mut queue = machine.start_queue(0, 16, 65_530);
        let near = memory.table()[0];
        for round in 0..4 {
            // What was taken is handed back first.
            disk.close_gate();
            disk.take_seen();
            let before = queue.next_avail;
            for sector in 0..2 {
                let placed = queue.place(IN, sector, &[], 512, Shape::Usual);
                queue.hang(&placed.pieces);
            }
            queue.kick_since(before);
            let mut begun = 0;
            while begun < 2 {
                // Each is listed once, and the two may begin separately.
                begun += disk.take_seen().len();
                std::thread::sleep(Duration::from_millis(1));
            }
            let opener = std::thread::spawn({
                let disk = disk.clone();
                move || {
                    std::thread::sleep(Duration::from_millis(20));
                    disk.open_gate();
                }
            });
            machine.front_end.remove_mem_region(&near).expect("it is there");
            opener.join().expect("it ends");
            assert!(queue.try_take().is_some() && queue.try_take().is_some(), "both are back");
            // Chains that arrive meanwhile wait for the memory.
            disk.take_seen();
            let placed = queue.place(IN, 2, &[], 512, Shape::Usual);
            queue.hang(&placed.pieces);
            queue.kick();
            std::thread::sleep(Duration::from_millis(10));
            assert_eq!(disk.take_seen(), []);
            machine.front_end.add_mem_region(&near).expect("it is not there");
            queue.take();
            assert_eq!(memory.get(placed.status, 1), [0], "round {round}");
            assert_eq!(queue.ask(IN, 0, &[], 512, Shape::Usual).status, 0, "round {round}");
            assert!(queue.err.read().is_err(), "it is not broken");
        }
        assert_eq!(machine.front_end.get_vring_base(0).expect("a base"), u32::from(queue.next_avail));
        machine.leave().expect("it left in good order");
    }
    assert_serves(&served);
}

#[test]
fn tables_of_memory_that_cannot_be_end_the_session() {
    let (_, served, memory) = scene();
    let good = memory.table();
    let directory = File::open("/").expect("a directory");
    let zeros = File::open("/dev/zero").expect("a device");
    let changes: [fn(&mut VhostUserMemoryRegionInfo); 8] = [
        |region| region.memory_size = HOLE + 0x1000,
        |region| region.mmap_offset = 0x1000,
        |region| region.mmap_offset = 1,
        |region| region.mmap_offset = u64::MAX - 0x1000,
        |region| region.guest_phys_addr = u64::MAX - 0x1000,
        |region| region.guest_phys_addr = FAR_DATA,
        |region| region.userspace_addr = u64::MAX - 0x1000,
        |region| region.memory_size = 1 << 60,
    ];
    let handles = [directory.as_raw_fd(), zeros.as_raw_fd()].map(|handle| {
        let mut table = good;
        table[0].mmap_handle = handle;
        table
    });
    let changed = changes.map(|change| {
        let mut table = good;
        change(&mut table[0]);
        table
    });
    for table in handles.into_iter().chain(changed) {
        let machine = Machine::connect(&served, &memory, FEATURES);
        machine.front_end.set_mem_table(&table).expect_err("it cannot be");
        machine.leave().expect_err("that ended it");
    }
    assert_serves(&served);
}

#[test]
fn queues_that_cannot_be_end_the_session() {
    let (_, served, memory) = scene();
    type Wrong = fn(&mut Machine<'_>, &Queue<'_>) -> Result<(), String>;
    let wrongs: [Wrong; 12] = [
        |machine, _| machine.front_end.set_vring_num(0, 0).map_err(|error| error.to_string()),
        |machine, _| machine.front_end.set_vring_num(0, 2048).map_err(|error| error.to_string()),
        |machine, _| machine.front_end.set_vring_num(0, 100).map_err(|error| error.to_string()),
        |machine, _| machine.front_end.set_vring_num(2, 16).map_err(|error| error.to_string()),
        |machine, queue| {
            machine.front_end.set_vring_kick(200, &queue.kick).map_err(|error| error.to_string())
        },
        |machine, _| machine.front_end.set_vring_enable(77, true).map_err(|error| error.to_string()),
        |machine, _| machine.front_end.get_vring_base(77).map(drop).map_err(|error| error.to_string()),
        // Rings that are nowhere, at the end of a region, and at no boundary.
        |machine, queue| {
            let mut config = queue.config();
            config.desc_table_addr = FRONT_END + HOLE;
            machine.front_end.set_vring_addr(0, &config).map_err(|error| error.to_string())
        },
        |machine, queue| {
            let mut config = queue.config();
            config.used_ring_addr = queue.used;
            machine.front_end.set_vring_addr(0, &config).map_err(|error| error.to_string())
        },
        |machine, queue| {
            let mut config = queue.config();
            config.avail_ring_addr = FRONT_END + HOLE - 2;
            machine.front_end.set_vring_num(0, 16).expect("a size");
            machine.front_end.set_vring_addr(0, &config).expect("there is memory");
            machine.front_end.set_vring_kick(0, &queue.kick).expect("it waits");
            machine.front_end.set_vring_enable(0, true).map_err(|error| error.to_string())
        },
        // Started without a size.
        |machine, queue| {
            machine.front_end.set_vring_addr(1, &queue.config()).expect("there is memory");
            machine.front_end.set_vring_kick(1, &queue.kick).expect("it waits");
            machine.front_end.set_vring_enable(1, true).map_err(|error| error.to_string())
        },
        |machine, _| machine.front_end.set_features(u64::MAX).map_err(|error| error.to_string()),
    ];
    for (number, wrong) in wrongs.into_iter().enumerate() {
        let mut machine = Machine::connect(&served, &memory, FEATURES);
        let queue = Queue::new(&memory, 0, 16, 0, false);
        wrong(&mut machine, &queue).expect_err("it cannot be");
        let ended = machine.leave();
        assert!(ended.is_err(), "number {number} went on");
    }
    assert_serves(&served);
}

#[test]
fn a_file_of_requests_in_flight_that_cannot_be_or_lies_harms_nobody() {
    let (disk, served, memory) = scene();
    for (queues, rows, in_file) in [(2, 16, 64), (300, 16, 0), (2, 2048, 0), (2, 16, u64::MAX)] {
        let mut machine = Machine::connect(&served, &memory, FEATURES);
        let (_, file) =
            machine.front_end.get_inflight_fd(&VhostUserInflight::new(0, 0, 2, 16)).expect("a file");
        let wrong = VhostUserInflight::new(1, in_file, queues, rows);
        machine.front_end.set_inflight_fd(&wrong, file.as_raw_fd()).expect_err("it cannot be");
        machine.leave().expect_err("that ended it");
    }
    // Everything in it is in flight, nothing of it was ever hung up; then it is noise.
    for seed in 0..20 {
        let mut machine = Machine::connect(&served, &memory, FEATURES);
        let wanted = VhostUserInflight::new(0, 0, 2, 16);
        let (kept, file) = machine.front_end.get_inflight_fd(&wanted).expect("a file");
        let mut bytes = vec![1; usize::try_from(kept.mmap_size).expect("small")];
        if seed > 0 {
            Random::from_seed(seed).fill(&mut bytes);
        }
        bytes[8..10].copy_from_slice(&1u16.to_le_bytes());
        file.write_all_at(&bytes, 0).expect("the file");
        machine.front_end.set_inflight_fd(&kept, file.as_raw_fd()).expect("it is used");
        let queue = machine.start_queue(0, 16, 0);
        queue.kick.write(1).expect("an eventfd");
        machine.front_end.get_vring_base(0).expect("a base");
        machine.leave().expect("it left in good order");
    }
    assert_eq!(disk.take_seen(), []);
    assert_serves(&served);
}

#[test]
fn a_queue_that_runs_is_not_changed_under_itself() {
    let (_, served, memory) = scene();
    for change in [
        |machine: &Machine<'_>| machine.front_end.set_vring_num(0, 32).is_err(),
        |machine: &Machine<'_>| machine.front_end.set_vring_base(0, 9).is_err(),
    ] {
        let mut machine = Machine::connect(&served, &memory, FEATURES);
        let mut queue = machine.start_queue(0, 16, 0);
        assert_eq!(queue.ask(IN, 0, &[], 512, Shape::Usual).status, 0);
        assert!(change(&machine));
        machine.leave().expect_err("that ended it");
    }
    assert_serves(&served);
}

/// Sends a message as bytes, with these descriptors.
fn send(socket: &UnixStream, request: u32, body: &[u8], files: &[&dyn AsRawFd]) {
    let message =
        [&request.to_le_bytes()[..], &1u32.to_le_bytes(), &(body.len() as u32).to_le_bytes(), body].concat();
    let files: Vec<_> = files.iter().map(|file| file.as_raw_fd()).collect();
    // One that has hung up already heard enough.
    let _ = socket.send_with_fds(&[&message[..]], &files);
}

#[test]
fn descriptors_that_are_wrong_missing_or_too_many_end_the_session() {
    const SET_MEM_TABLE: u32 = 5;
    const SET_VRING_KICK: u32 = 12;
    const SET_VRING_CALL: u32 = 13;
    let (_, served, _memory) = scene();
    let file = File::open("/dev/zero").expect("a device");
    let event = EventFd::new(0).expect("an eventfd");
    let (reader, _writer) = std::io::pipe().expect("a pipe");
    let index = |number: u64| number.to_le_bytes();
    let table = [&1u64.to_le_bytes()[..], &[0; 32]].concat();
    let cases: [(u32, Vec<u8>, Vec<&dyn AsRawFd>); 9] = [
        (SET_VRING_KICK, index(0).to_vec(), vec![&file]),
        (SET_VRING_KICK, index(0).to_vec(), vec![&reader]),
        (SET_VRING_KICK, index(0).to_vec(), vec![]),
        (SET_VRING_KICK, index(0x100).to_vec(), vec![]),
        (SET_VRING_KICK, index(0).to_vec(), vec![&event, &event]),
        (SET_VRING_CALL, index(0).to_vec(), vec![&file]),
        (SET_VRING_CALL, index(9).to_vec(), vec![&event]),
        (SET_MEM_TABLE, table.clone(), vec![]),
        (SET_MEM_TABLE, table, vec![&file, &file]),
    ];
    for (request, body, files) in cases {
        let (socket, handle, ended) = served.connect();
        send(&socket, request, &body, &files);
        ended.join().expect("no panic").expect_err("that ended it");
        drop(handle);
    }
    let before = std::fs::read_dir("/proc/self/fd").expect("our descriptors").count();
    for _ in 0..50 {
        let (socket, handle, ended) = served.connect();
        send(&socket, SET_MEM_TABLE, &[0; 4], &[&file, &event, &file]);
        ended.join().expect("no panic").expect_err("that ended it");
        drop((socket, handle));
    }
    let after = std::fs::read_dir("/proc/self/fd").expect("our descriptors").count();
    // Other tests have some of their own meanwhile.
    assert!(after <= before + 100, "descriptors are kept: {before} before, {after} after");
    assert_serves(&served);
}

#[test]
fn noise_on_the_socket_ends_the_session() {
    let (_, served, _memory) = scene();
    for seed in 0..200 {
        let mut random = Random::from_seed(seed);
        let (socket, handle, ended) = served.connect();
        for _ in 0..10 {
            let mut body = vec![0; random.index(80)];
            random.fill(&mut body);
            send(&socket, random.index(45) as u32, &body, &[]);
        }
        // A message that never comes whole.
        drop((&socket).write_all(&[1, 0, 0]));
        drop(socket);
        drop(ended.join().expect("no panic"));
        drop(handle);
    }
    assert_serves(&served);
}

#[test]
fn a_front_end_that_stops_in_the_middle_of_a_message_can_be_cut_off() {
    let (_, served, memory) = scene();
    let (socket, handle, ended) = served.connect();
    (&socket).write_all(&[1, 0, 0]).expect("it is sent");
    handle.end();
    handle.cut();
    drop(ended.join().expect("no panic"));
    // Without an own reading of anything it is the same.
    let machine = Machine::connect(&served, &memory, FEATURES);
    machine.end();
    machine.leave().expect("it ended in good order");
    assert_serves(&served);
}

#[test]
fn a_front_end_that_knows_no_features_of_the_protocol_is_served() {
    let (_, served, memory) = scene();
    let (socket, handle, ended) = served.connect();
    let front_end = Frontend::from_stream(socket, 2);
    front_end.set_hdr_flags(VhostUserHeaderFlag::empty());
    front_end.set_owner().expect("an owner");
    let offered = front_end.get_features().expect("features");
    front_end.set_features(offered & FEATURES & !(1 << 30)).expect("taken");
    front_end.set_mem_table(&memory.table()).expect("shared");
    let mut queue = Queue::new(&memory, 0, 16, 0, false);
    front_end.set_vring_num(0, 16).expect("a size");
    front_end.set_vring_base(0, 0).expect("a base");
    front_end.set_vring_addr(0, &queue.config()).expect("addresses");
    front_end.set_vring_call(0, &queue.call).expect("a call");
    // It has no word for "enabled": a kick is enough.
    front_end.set_vring_kick(0, &queue.kick).expect("a kick");
    assert_eq!(queue.ask(IN, 0, &[], 512, Shape::Usual).status, 0);
    drop(front_end);
    ended.join().expect("no panic").expect("it left in good order");
    drop(handle);
}

#[test]
fn a_guest_that_scribbles_over_its_rings_harms_nobody() {
    let scale: u64 = std::env::var("VELLUM_TEST_SCALE").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let (_, served, memory) = scene();
    for seed in 0..60 * scale {
        let mut random = Random::from_seed(seed);
        let features = if random.one_in(2) { FEATURES } else { FEATURES | EVENT_IDX };
        let mut machine = Machine::connect(&served, &memory, features);
        let queue = machine.start_queue(0, 16, 0);
        for _ in 0..200 {
            // Mostly small numbers, so that some of it makes sense.
            let at = match random.index(4) {
                0 => queue.table + random.index(256) as u64,
                1 => queue.avail + random.index(48) as u64,
                2 => queue.used + random.index(160) as u64,
                _ => DATA + random.index(512) as u64,
            };
            let byte = if random.one_in(2) { random.index(4) as u8 } else { random.index(256) as u8 };
            memory.mapped.write_obj(byte, GuestAddress(at)).expect("memory");
            if random.one_in(8) {
                queue.kick.write(1).expect("an eventfd");
            }
        }
        drop(machine.leave());
    }
    assert_serves(&served);
}

/// Touching memory that was truncated would end the program, and with it the disks of all others.
#[test]
fn memory_that_could_be_cut_off_is_refused_unless_it_is_allowed() {
    let (_, mut served, memory) = scene();
    let region = memory.table()[0];
    let unsealed = || {
        let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("unsealed", flags).expect("a memfd"));
        file.set_len(HOLE).expect("its length");
        file
    };
    for takes_unsealed in [false, true] {
        served.takes_unsealed = takes_unsealed;
        let machine = Machine::connect(&served, &memory, FEATURES);
        let file = unsealed();
        let mut table = region;
        table.mmap_handle = file.as_raw_fd();
        let taken = machine.front_end.set_mem_table(&[table]);
        assert_eq!(taken.is_ok(), takes_unsealed, "guest memory: {taken:?}");
    }
    served.takes_unsealed = false;
    let mut machine = Machine::connect(&served, &memory, FEATURES);
    let wanted = VhostUserInflight { num_queues: 2, queue_size: 16, ..Default::default() };
    let (kept, _) = machine.front_end.get_inflight_fd(&wanted).expect("a file");
    let file = unsealed();
    let taken = machine.front_end.set_inflight_fd(&kept, file.as_raw_fd());
    assert!(taken.is_err(), "requests in flight: {taken:?}");
    assert_serves(&served);
}
