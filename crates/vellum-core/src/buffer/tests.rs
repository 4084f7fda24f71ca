//! Buffers of our own memory, of lent memory, and of both.

use super::*;

fn numbered(len: usize) -> Buffer {
    let bytes: Vec<u8> = (0..len).map(|i| u8::try_from(i % 251).unwrap()).collect();
    Buffer::copy_of(&bytes)
}

#[test]
fn cut_and_joined_is_the_same_buffer_in_one_piece() {
    let mut first = numbered(10_000);
    let whole = first.to_vec();
    let mut second = first.split_off(3_000);
    let third = second.split_off(2_000);
    assert_eq!((first.len(), second.len(), third.len()), (3_000, 2_000, 5_000));
    first.append(second);
    first.append(third);
    assert_eq!(first.piece_count(), 1);
    assert_eq!(first.slice(), whole);
}

#[test]
fn pieces_of_different_regions_read_as_one_run() {
    let mut buffer = numbered(100);
    buffer.append(Buffer::zeroed(50));
    buffer.append(numbered(30));
    assert_eq!((buffer.len(), buffer.piece_count()), (180, 3));
    buffer.copy_from(90, &[9; 70]);
    let mut out = [0; 72];
    buffer.copy_to(89, &mut out);
    assert_eq!(out[0], 89);
    assert!(out[1..71].iter().all(|byte| *byte == 9));
    assert_eq!(out[71], 10);
    let tail = buffer.split_off(120);
    assert_eq!(tail.to_vec().len(), 60);
    assert_eq!(buffer.contiguous().piece_count(), 1);
}

#[test]
fn a_cut_at_either_end_leaves_an_empty_buffer() {
    let mut buffer = numbered(64);
    assert!(buffer.split_off(64).is_empty());
    let all = buffer.split_off(0);
    assert!(buffer.is_empty());
    assert_eq!(all.len(), 64);
    assert_eq!(buffer.slice(), b"");
}

#[test]
fn zeroed_is_zero_even_when_recycled() {
    for _ in 0..3 {
        let mut buffer = Buffer::zeroed(8192);
        assert!(buffer.is_zero());
        buffer.fill(7);
        assert!(!buffer.is_zero());
    }
}

#[test]
fn alignment_is_known_piece_by_piece() {
    let mut buffer = Buffer::zeroed(8192);
    assert!(buffer.is_aligned_to(4096, 4096));
    let tail = buffer.split_off(512);
    assert!(tail.is_aligned_to(512, 512) && !tail.is_aligned_to(4096, 512));
    assert!(buffer.is_aligned_to(4096, 512) && !buffer.is_aligned_to(512, 4096));
}

#[test]
fn a_single_one_is_found_at_every_place() {
    for len in [1, 63, 64, 65, 200, 4096] {
        let mut bytes = vec![0; len];
        assert!(is_zero(&bytes));
        for at in [0, len / 2, len - 1] {
            bytes[at] = 1;
            assert!(!is_zero(&bytes), "length {len}, at {at}");
            bytes[at] = 0;
        }
    }
}

#[test]
fn buffers_may_be_freed_on_another_thread() {
    let mut buffer = numbered(4096);
    let tail = buffer.split_off(2048);
    std::thread::spawn(move || drop(tail)).join().unwrap();
    assert_eq!(buffer.len(), 2048);
}

/// Shared bytes that are numbered, and a loan of these runs of them.
fn lent(runs: &[(usize, usize)]) -> (Arc<SharedBytes>, Buffer) {
    let memory = SharedBytes::zeroed(16_384);
    memory.set(0, &numbered(16_384).to_vec());
    let buffer = memory.lend(runs);
    (memory, buffer)
}

#[test]
fn lent_bytes_are_copied_and_set_at_every_alignment() {
    for start in 4090..4106 {
        for len in [0, 1, 7, 8, 9, 15, 16, 17, 40] {
            let (memory, mut buffer) = lent(&[(start, len), (100, 3)]);
            let before = memory.get(0, 16_384);
            let expected = [&before[start..start + len], &before[100..103]].concat();
            assert_eq!(buffer.to_vec(), expected, "{len} from {start}");
            let other: Vec<u8> = (0..len + 3).map(|i| 200 + u8::try_from(i).unwrap()).collect();
            buffer.copy_from(0, &other);
            let mut after = before.clone();
            after[start..start + len].copy_from_slice(&other[..len]);
            after[100..103].copy_from_slice(&other[len..]);
            assert_eq!(memory.get(0, 16_384), after, "and nothing beside them: {len} from {start}");
            buffer.fill(0xEE);
            after[start..start + len].fill(0xEE);
            after[100..103].fill(0xEE);
            assert_eq!(memory.get(0, 16_384), after, "{len} from {start}");
        }
    }
}

#[test]
fn a_spare_buffer_has_the_same_lent_memory_and_other_memory_of_our_own() {
    let (memory, mut buffer) = lent(&[(0, 5000), (12_000, 10)]);
    buffer.append(Buffer::copy_of(&[7; 600]));
    let before = memory.get(5000, 1)[0];
    let mut spare = buffer.spare();
    assert_eq!((spare.len(), spare.lent_len()), (5610, 5010));
    spare.fill(0xAB);
    assert_eq!(buffer.to_vec(), [vec![0xAB; 5010], vec![7; 600]].concat());
    drop(buffer);
    spare.copy_from(4999, &[1, 2]);
    assert_eq!((memory.get(4998, 3), memory.get(12_000, 2)), (vec![0xAB, 1, before], vec![2, 0xAB]));
    assert!(Buffer::empty().spare().is_empty());
}

#[test]
fn lent_pieces_are_cut_and_joined_like_others() {
    let (memory, mut buffer) = lent(&[(0, 5000), (5000, 3000), (12_000, 10)]);
    assert_eq!((buffer.len(), buffer.piece_count(), buffer.lent_len()), (8010, 2, 8010));
    let mut tail = buffer.split_off(4096);
    assert!(buffer.is_aligned_to(4096, 4096) && !tail.is_aligned_to(4096, 512) && tail.is_aligned_to(32, 2));
    let mut head = numbered(512);
    head.append(buffer);
    head.append(tail.split_to(100));
    assert_eq!((head.piece_count(), head.lent_len(), head.is_lent()), (2, 4196, true));
    memory.set(4100, &[7; 4]);
    head.fill_with(|at, bytes| {
        let from = u8::try_from(at / 512).unwrap();
        bytes.fill(from);
    });
    assert_eq!(memory.get(0, 4196), [1; 4196]);
    assert_eq!(memory.get(4196, 1), [(4196 % 251) as u8]);
    assert_eq!(head.piece_lengths().collect::<Vec<_>>(), [512, 4196]);
}

#[test]
fn what_is_owned_does_not_change_any_more() {
    let (memory, buffer) = lent(&[(1, 100), (50, 100)]);
    let before = buffer.to_vec();
    let copies = [buffer.duplicate(), buffer.owned()];
    memory.set(0, &[0xFF; 200]);
    for copy in copies {
        assert!(!copy.is_lent());
        assert_eq!(copy.slice(), before);
    }
    let own = numbered(5000);
    let place = own.slice().as_ptr();
    assert_eq!(own.owned().contiguous().slice().as_ptr(), place, "what is ours stays where it is");
    assert!(!memory.lend(&[(0, 10)]).contiguous().is_lent());
}

#[test]
fn the_keeper_is_let_go_with_the_last_piece() {
    let (memory, mut buffer) = lent(&[(0, 4096), (8192, 4096)]);
    let tail = buffer.split_off(100);
    assert_eq!(Arc::strong_count(&memory), 2);
    drop(buffer);
    assert_eq!(Arc::strong_count(&memory), 2);
    drop(std::thread::spawn(move || tail.owned()).join().unwrap());
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
#[should_panic(expected = "never seen as a slice")]
fn there_is_no_slice_of_lent_memory() {
    lent(&[(0, 512)]).1.slice();
}

#[test]
#[should_panic(expected = "never seen as a slice")]
fn nor_are_there_its_pieces() {
    let mut buffer = numbered(512);
    buffer.append(lent(&[(0, 512)]).1);
    assert!(!buffer.is_zero(), "the first piece is seen");
    buffer.pieces().for_each(drop);
}

#[test]
#[should_panic(expected = "within the bytes")]
fn nothing_is_lent_that_is_not_there() {
    lent(&[(16_384, 1)]);
}
