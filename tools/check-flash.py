#!/usr/bin/env python3
"""Checks a flash cache that no program has open, by the text of docs/format/flash.md alone. Nothing is written.

    check-flash.py CACHE…           what recovery would find; a line for each thing that is wrong
    check-flash.py --list CACHE     the same, and then each row, written region, run of zeros and block

Of several caches the last line for each is `CACHE: CODE`. A line that begins with "note:" is what a crash may leave.

It shares nothing with the program but the text, so that each keeps the other and the text honest. Standard library only.

Exit codes: 0 nothing is wrong, 1 it is no flash cache that can be read, 2 it contradicts itself, and recovery has to refuse it.
"""

import os
import struct
import sys

BLOCK = 4096
SECTOR = 512
PLACE = 90112
PAYLOAD_MAX = 90048
PART_SLOTS = 4096
ROWS_MAX = 1022
PAIRS_MAX = 2048
WORDS_MAX = 512
REGION = 1 << 14
WORD = 64 * REGION
FEATURES = 15
BLOCKS = 1 << 48
MASK64 = (1 << 64) - 1


class Refused(Exception):
    """It is no flash cache that can be read."""


class Wrong(Exception):
    """The cache contradicts itself."""


def table():
    found = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        found.append(value)
    return found


TABLE = table()


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def has_good_crc(data, at):
    """Whether the CRC of all bytes, with the field itself as zero, is what the field says."""
    return crc32c(data[:at] + bytes(4) + data[at + 4:]) == struct.unpack_from(">I", data, at)[0]


def rotate_left(value, bits):
    return (value << bits | value >> (64 - bits)) & MASK64


def part_of(secret, parts, key):
    group = key & ~15
    m = group ^ secret
    for _ in range(2):
        m = (m ^ m >> 30) * 0xBF58476D1CE4E5B9 & MASK64
        m = (m ^ m >> 27) * 0x94D049BB133111EB & MASK64 ^ rotate_left(secret, 32)
    m ^= m >> 31
    return (m >> 32) * parts >> 32


def good_key(key):
    return key >> 48 < ROWS_MAX


def good_run(key, blocks):
    return good_key(key) and 0 < blocks <= BLOCKS - (key & BLOCKS - 1)


def good_word(key, bits):
    return good_key(key) and key % WORD == 0 and bits != 0


class Zeros:
    """Runs of blocks that are zero: the key of the first, how many, whether home may give up their space."""

    def __init__(self):
        self.runs = []

    def has(self, key, blocks=1):
        return any(first < key + blocks and key < first + count for first, count, _ in self.runs)

    def remove(self, key, blocks):
        left = []
        for first, count, frees in self.runs:
            end = first + count
            if end <= key or key + blocks <= first:
                left.append((first, count, frees))
                continue
            if first < key:
                left.append((first, key - first, frees))
            if key + blocks < end:
                left.append((key + blocks, end - key - blocks, frees))
        self.runs = left

    def add(self, key, blocks, frees):
        self.remove(key, blocks)
        self.runs.append((key, blocks, frees))

    def joined(self):
        """The runs in order, neighbours of one disk that say the same as one."""
        found = []
        for first, count, frees in sorted(self.runs):
            if found:
                before, long, same = found[-1]
                if before + long == first and same == frees and before >> 48 == first >> 48:
                    found[-1] = (before, long + count, frees)
                    continue
            found.append((first, count, frees))
        return found


def read_row(data):
    number, has_record, zero, disk, named, newest = struct.unpack(">HB5s16s16s16s", data)
    if number >= ROWS_MAX or has_record > 1 or any(zero):
        raise ValueError("a row")
    return number, (has_record, disk, named, newest)


def read_items(data, count, slots):
    """The items of a record; an error where there are none."""
    items, at = [], 0
    for _ in range(count):
        kind = data[at]
        if kind == 1:
            flags, sectors, zero, slot, key = struct.unpack_from(">BBBIQ", data, at + 1)
            if flags > 5 or sectors == 0 or zero or slot >= slots or not good_key(key):
                raise ValueError("a put")
            at += 16
            crcs = None
            if flags & 6:
                crcs = struct.unpack_from(f">{1 if flags & 4 else bin(sectors).count('1')}I", data, at)
                at += 4 * len(crcs)
            items.append(("put", key, slot, sectors, flags & 1, crcs))
        elif kind == 2:
            zero, key = struct.unpack_from(">7sQ", data, at + 1)
            if any(zero) or not good_key(key):
                raise ValueError("a drop")
            at += 16
            items.append(("drop", key))
        elif kind in (10, 11):
            flags, blocks, slot, key = struct.unpack_from(">BHIQ", data, at + 1)
            if not 2 <= blocks <= 16 - key % 16 or not good_key(key):
                raise ValueError("several blocks")
            if flags & ~5 or slot + blocks > slots if kind == 10 else flags or slot:
                raise ValueError("puts or drops")
            at += 16
            for n in range(blocks):
                items.append(("put", key + n, slot + n, 255, flags & 1, None) if kind == 10 else ("drop", key + n))
            if flags & 4:
                items.append(("checked", slot, blocks, *struct.unpack_from(">I", data, at)))
                at += 4
        elif kind == 3:
            frees, zero, key, blocks = struct.unpack_from(">B6sQQ", data, at + 1)
            if frees > 1 or any(zero) or not good_run(key, blocks):
                raise ValueError("a zero")
            at += 24
            items.append(("zero", key, blocks, frees))
        elif kind == 4:
            zero, key, blocks = struct.unpack_from(">7sQQ", data, at + 1)
            if any(zero) or not good_run(key, blocks):
                raise ValueError("an unzero")
            at += 24
            items.append(("unzero", key, blocks))
        elif kind == 5:
            if any(data[at + 1:at + 8]) or at + 64 > len(data):
                raise ValueError("a row")
            items.append(("row", *read_row(data[at + 8:at + 64])))
            at += 64
        elif kind == 6:
            zero, number = struct.unpack_from(">5sH", data, at + 1)
            if any(zero) or number >= ROWS_MAX:
                raise ValueError("no row")
            at += 8
            items.append(("no row", number))
        elif kind in (7, 8, 9):
            zero, key, bits = struct.unpack_from(">7sQQ", data, at + 1)
            if any(zero) or not good_word(key, bits):
                raise ValueError("a word of regions")
            at += 24
            items.append((("written", "settled", "void")[kind - 7], key, bits))
        else:
            raise ValueError("a kind")
    if any(data[at:]):
        raise ValueError("the end")
    kinds = [item[0] in ("put", "drop", "checked") for item in items]
    keys = [item[1] for item in items if item[0] in ("put", "drop")]
    if kinds != sorted(kinds) or len(keys) != len(set(keys)):
        raise ValueError("the order")
    return items


class Cache:
    def __init__(self, path):
        self.path = path
        self.file = open(path, "rb")
        self.len = self.file.seek(0, os.SEEK_END)
        self.notes = []
        self.superblock()
        self.rows, self.words, self.zeros, self.blocks = {}, {}, Zeros(), {}
        self.read_ring()
        self.verify_newest()
        self.read_slices()
        self.replay()
        self.judge()

    def read(self, at, count):
        self.file.seek(at)
        data = self.file.read(count)
        if len(data) < count:
            raise Refused(f"it ends at {at + len(data)}, in the middle of something")
        return data

    def superblock(self):
        for at in (0, BLOCK):
            if at + BLOCK > self.len:
                break
            data = self.read(at, BLOCK)
            if data[:8] == b"VELLUMF0" and has_good_crc(data, 8):
                break
            self.notes.append(f"the superblock at {at} is not good")
        else:
            raise Refused("it has no superblock")
        if self.len < 2 * BLOCK:
            raise Refused("it has no superblock")
        version, features, self.id, self.secret, self.slots, self.parts, self.ring_len, place = struct.unpack_from(
            ">IQ16sQIIQQ", data, 12)
        if version != 1 or features & ~FEATURES:
            raise Refused(f"version {version}, features {features:#x}")
        self.features = features
        good = (self.slots and self.parts == -(-self.slots // PART_SLOTS) and place == PLACE
                and self.ring_len % BLOCK == 0 and 128 << 10 <= self.ring_len <= 64 << 20)
        if not good:
            raise Wrong("the superblock contradicts itself")
        self.slices_at = 2 * BLOCK + (self.slots * BLOCK if features & 2 else 0)
        self.ring_at = self.slices_at + 2 * (self.parts + 1) * PLACE
        self.slots_at = 2 * BLOCK if features & 2 else self.ring_at + self.ring_len
        end = max(self.slots_at + self.slots * BLOCK, self.ring_at + self.ring_len)
        if end > self.len:
            raise Wrong(f"it should have {end} bytes, and has {self.len}")

    def record_at(self, ring, at):
        head = ring[at:at + 64]
        if head[:8] != b"VELLUMF1" or head[8:24] != self.id:
            return None
        sequence, durable, tail, length, count = struct.unpack_from(">QQQII", head, 24)
        if length == 0 or length % BLOCK or at + length > self.ring_len or any(head[60:64]):
            return None
        data = ring[at:at + length]
        if not has_good_crc(data, 56):
            return None
        if length > self.ring_len // 8:
            raise Wrong(f"record {sequence} is longer than an eighth of the ring")
        if not 1 <= tail <= sequence or durable != sequence - 1:
            raise Wrong(f"record {sequence} says durable {durable}, tail {tail}")
        try:
            items = read_items(data[64:], count, self.slots)
        except (ValueError, struct.error, IndexError) as error:
            raise Wrong(f"record {sequence} at {self.ring_at + at}: {error} is not good") from error
        return sequence, tail, items, length

    def read_ring(self):
        ring = self.read(self.ring_at, self.ring_len)
        self.records, end = {}, 0
        for at in range(0, self.ring_len, BLOCK):
            found = self.record_at(ring, at)
            if found:
                sequence, tail, items, length = found
                if at < end:
                    raise Wrong(f"record {sequence} overlaps the one before it")
                end = at + length
                if sequence in self.records:
                    raise Wrong(f"there are two records {sequence}")
                self.records[sequence] = (tail, items)
        self.newest = max(self.records, default=0)

    def holds(self, sequence):
        """Whether what a record checks is in its slots."""
        for item in self.records[sequence][1]:
            if item[0] == "checked":
                _, slot, blocks, crc = item
                if crc32c(self.read(self.slots_at + slot * BLOCK, blocks * BLOCK)) != crc:
                    return False
            if item[0] == "put" and item[5] is not None:
                _, key, slot, sectors, _, crcs = item
                data = self.read(self.slots_at + slot * BLOCK, BLOCK)
                named = [data[n * SECTOR:(n + 1) * SECTOR] for n in range(8) if sectors >> n & 1]
                checked = [b"".join(named)] if len(crcs) == 1 else named
                if any(crc32c(part) != crc for part, crc in zip(checked, crcs)):
                    return False
        return True

    def verify_newest(self):
        if self.newest and not self.holds(self.newest):
            self.notes.append(f"record {self.newest} was never acknowledged: a sector of it is not there")
            del self.records[self.newest]
            before = self.newest - 1
            if before and (before not in self.records or not self.holds(before)):
                raise Wrong(f"record {before} does not hold either: flushed data is lost")
            self.newest = before
        self.tail = self.records[self.newest][0] if self.newest else 1
        for sequence in range(self.tail, self.newest + 1):
            if sequence not in self.records:
                raise Wrong(f"record {sequence} is missing: {self.tail} to {self.newest} are needed")

    def slice(self, number):
        found, claims = [], []
        for place in range(2):
            data = self.read(self.slices_at + (2 * number + place) * PLACE, PLACE)
            magic, _, its, id_, as_of, length, zero = struct.unpack_from(">8sII16sQI20s", data)
            claims.append("unwritten" if not any(data[:64]) else "foreign")
            if magic == b"VELLUMF2" and its == number and id_ == self.id and length <= PAYLOAD_MAX and not any(zero):
                claims[-1] = as_of
                if has_good_crc(data[:64 + length], 8):
                    found.append((as_of, place, data[64:64 + length]))
        if not found:
            raise Wrong(f"slice {number} has no good place")
        as_of, place, payload = max(found, key=lambda one: one[0])
        if as_of > self.newest:
            raise Wrong(f"slice {number} is of record {as_of}, the newest is {self.newest}")
        other, voids = claims[1 - place], self.features & 8
        if isinstance(other, int):
            was_durable = other > self.newest or self.newest - other >= 2 if voids else other < self.tail
            is_damaged = other > as_of and was_durable
        else:
            is_damaged = voids and (other == "foreign" or as_of > 0)
        if is_damaged:
            raise Wrong(f"place {1 - place} of slice {number} is damaged")
        return as_of, payload

    def read_slices(self):
        self.as_of = []
        for number in range(self.parts + 1):
            as_of, payload = self.slice(number)
            self.as_of.append(as_of)
            try:
                if number:
                    self.read_part(number - 1, payload)
                elif payload:
                    self.read_ledger(payload)
            except (ValueError, struct.error) as error:
                raise Wrong(f"slice {number}: {error} is not good") from error

    def read_ledger(self, payload):
        words, count = struct.unpack_from(">HH", payload)
        pairs = payload[4 + 56 * count:]
        good = (count <= ROWS_MAX and words <= WORDS_MAX and len(payload) >= 4 + 56 * count + 16 * words
                and len(pairs) % 16 == 0 and len(pairs) // 16 <= PAIRS_MAX)
        if not good:
            raise ValueError("the length of the ledger")
        runs = pairs[16 * words:]
        for key, bits in struct.iter_unpack(">QQ", pairs[:16 * words]):
            if not good_word(key, bits) or key in self.words:
                raise ValueError("a word of regions")
            self.words[key] = bits
        for at in range(4, 4 + 56 * count, 56):
            number, row = read_row(payload[at:at + 56])
            if number in self.rows:
                raise ValueError(f"row {number}, which is there twice,")
            self.rows[number] = row
        for key, twice in struct.iter_unpack(">QQ", runs):
            if not good_run(key, twice >> 1) or self.zeros.has(key, twice >> 1):
                raise ValueError("a run")
            self.zeros.add(key, twice >> 1, twice & 1)

    def read_part(self, part, payload):
        at, groups = 0, set()
        while at < len(payload):
            key, present, dirty, odd, segment = struct.unpack_from(">QHHHH", payload, at)
            at += 16
            good = (key % 16 == 0 and good_key(key) and present and not (dirty | odd) & ~present
                    and part_of(self.secret, self.parts, key) == part and key not in groups)
            if not good:
                raise ValueError(f"the group {key:#x}")
            groups.add(key)
            for n in range(16):
                if present >> n & 1:
                    if odd >> n & 1:
                        slot, sectors = struct.unpack_from(">IB", payload, at)
                        at += 5
                    else:
                        slot, sectors = segment << 16 | struct.unpack_from(">H", payload, at)[0], 255
                        at += 2
                    if slot >= self.slots or not sectors:
                        raise ValueError(f"block {key + n:#x}")
                    self.blocks[key + n] = (slot, sectors, dirty >> n & 1)

    def replay(self):
        for sequence in range(self.tail, self.newest + 1):
            for item in self.records[sequence][1]:
                self.apply(sequence, *item)

    def is_new(self, sequence, key):
        return self.as_of[part_of(self.secret, self.parts, key) + 1] < sequence

    def drop_run(self, sequence, key, blocks):
        for block in [block for block in self.blocks if key <= block < key + blocks]:
            if self.is_new(sequence, block):
                del self.blocks[block]

    def apply(self, sequence, kind, *what):
        ledger_is_new = self.as_of[0] < sequence
        if kind in ("put", "drop"):
            key = what[0]
            if self.is_new(sequence, key):
                self.blocks.pop(key, None)
                if kind == "put":
                    self.blocks[key] = what[1:4]
        elif kind == "zero":
            key, blocks, frees = what
            self.drop_run(sequence, key, blocks)
            if ledger_is_new:
                self.zeros.add(key, blocks, frees)
        elif kind == "unzero" and ledger_is_new:
            self.zeros.remove(*what)
        elif kind == "row" and ledger_is_new:
            self.rows[what[0]] = what[1]
        elif kind == "no row":
            number = what[0]
            self.drop_run(sequence, number << 48, BLOCKS)
            if ledger_is_new:
                self.rows.pop(number, None)
                self.words = {key: bits for key, bits in self.words.items() if key >> 48 != number}
                self.zeros.remove(number << 48, BLOCKS)
        elif kind in ("written", "settled", "void"):
            key, bits = what
            if kind == "void":
                for n in range(64):
                    if bits >> n & 1:
                        self.drop_run(sequence, key + n * REGION, REGION)
            if ledger_is_new:
                left = self.words.get(key, 0)
                left = left | bits if kind == "written" else left & ~bits
                self.words.pop(key, None)
                if left:
                    self.words[key] = left

    def is_written(self, key):
        return self.words.get(key // WORD * WORD, 0) >> key % WORD // REGION & 1

    def judge(self):
        """What must hold afterwards."""
        slots = {}
        for key, (slot, _, dirty) in sorted(self.blocks.items()):
            name = f"block {key & BLOCKS - 1} of row {key >> 48}"
            if slot in slots:
                raise Wrong(f"slot {slot} has two blocks: {slots[slot]} and {name}")
            slots[slot] = name
            if key >> 48 not in self.rows:
                raise Wrong(f"{name} has a slot, but no row")
            if dirty and self.is_written(key):
                raise Wrong(f"{name} is dirty, and its region is being written")
        for key in self.words:
            if key >> 48 not in self.rows:
                raise Wrong(f"regions are of row {key >> 48}, which is not there")
        for first, count, _ in self.zeros.runs:
            if first >> 48 not in self.rows:
                raise Wrong(f"a run of zeros is of row {first >> 48}, which is not there")
        runs = self.zeros.joined()
        if len(runs) + len(self.words) > PAIRS_MAX:
            raise Wrong(f"{len(runs)} runs of zeros, {len(self.words)} words of regions")
        at = 0
        for key in sorted(self.blocks):
            while at < len(runs) and runs[at][0] + runs[at][1] <= key:
                at += 1
            if at < len(runs) and runs[at][0] <= key:
                raise Wrong(f"block {key & BLOCKS - 1} of row {key >> 48} has a slot, and is in a run of zeros")

    def say(self):
        dirty = sum(entry[2] for entry in self.blocks.values())
        print(f"{self.slots} slots, {len(self.blocks)} blocks, {dirty} dirty, {len(self.zeros.joined())} runs, "
              f"{len(self.rows)} rows, record {self.newest}")
        void = sum(1 for key in self.blocks if self.is_written(key))
        if self.words:
            regions = sum(bin(bits).count("1") for bits in self.words.values())
            print(f"note: {regions} regions are being written: their {void} blocks are void at the next opening")

    def list(self):
        for number, (has_record, disk, named, newest) in sorted(self.rows.items()):
            print(f"row {number} {disk.hex()} {named.hex()} {newest.hex()} {has_record}")
        for key, bits in sorted(self.words.items()):
            print(f"written {key >> 48} {key & BLOCKS - 1} {bits:016x}")
        for first, count, frees in self.zeros.joined():
            print(f"zero {first >> 48} {first & BLOCKS - 1} {count} {frees}")
        for key, (slot, sectors, dirty) in sorted(self.blocks.items()):
            print(f"block {key >> 48} {key & BLOCKS - 1} {slot} {sectors:02x} {dirty}")


def check(path, lists):
    try:
        cache = Cache(path)
    except Refused as why:
        print(why)
        return 1
    except Wrong as why:
        print(why)
        return 2
    except OSError as error:
        print(f"{path}: {error.strerror}")
        return 1
    for note in cache.notes:
        print(f"note: {note}")
    cache.say()
    if lists:
        cache.list()
    return 0


def main(arguments):
    lists = "--list" in arguments
    paths = [argument for argument in arguments if argument != "--list"]
    if not paths or any(path.startswith("-") for path in paths):
        print(__doc__, file=sys.stderr)
        return 1
    codes = []
    for path in paths:
        codes.append(check(path, lists))
        if len(paths) > 1:
            print(f"{path}: {codes[-1]}")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
