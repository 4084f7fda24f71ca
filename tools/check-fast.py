#!/usr/bin/env python3
"""Checks a fast medium with a closed image that is attached to it, by the text of docs/format/fast.md and native.md alone.

    check-fast.py MEDIUM                      superblock, rows and entries
    check-fast.py MEDIUM IMAGE [BASE]         and each unit that the medium has of the image: its slots have what the disk
                                              reads as; BASE is the base as a raw file

It shares nothing with the program but the text. What reads images is check-native.py beside it. Standard library only.

Exit codes: 0 nothing is wrong, 1 it cannot be checked, 2 corrupt.
"""

import importlib.util
import os
import struct
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
SPEC = importlib.util.spec_from_file_location("check_native", os.path.join(HERE, "check-native.py"))
native = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(native)
be32, be64, crc32c, need = native.be32, native.be64, native.crc32c, native.need

PAGE, SLOT = 4096, 64 << 10
ROWS_AT, ROW, ROWS = 8192, 512, 1024
ENTRIES_AT, ENTRY = ROWS_AT + ROW * ROWS, 32


class Medium:
    def __init__(self, path):
        self.file = native.File(path)
        self.lines = []
        pages = [self.file.read(at, PAGE) for at in (0, PAGE)]
        good = [page for page in pages if self.is_super(page)]
        need(good, "it is no fast medium")
        if len(good) == 1 or pages[0] != pages[1]:
            self.lines.append("the two superblocks are not equal, or one is damaged")
        good.sort(key=lambda page: be64(page, 44) if be64(page, 16) & 1 else 1 << 64)
        version, features, self.id, self.slots = struct.unpack_from(">IQ16sI", good[0], 12)
        need(version == 1 and features in (0, 1), "its version or features are not known")
        cut_at = struct.unpack_from(">Q", good[0], 44)[0]
        need(features or not cut_at, "an impossible superblock")
        need(self.id != bytes(16) and 1 <= self.slots <= 1 << 28 and not any(good[0][52:]), "an impossible superblock")
        entries = ENTRY * self.slots
        self.slots_at = -(-(ENTRIES_AT + entries) // SLOT) * SLOT
        end = self.slots_at + SLOT * self.slots
        end = min(end, cut_at) if features else end
        need(self.slots_at <= end <= self.file.size, "the medium was cut off")
        whole = (end - self.slots_at) // SLOT
        self.rows = [self.row(number) for number in range(ROWS)]
        ids = [row["uuid"] for row in self.rows if row]
        if len(set(ids)) < len(ids):
            self.lines.append("two rows have the same UUID")
        self.parts = {}
        for at, data in self.file.data(ENTRIES_AT, ENTRIES_AT + -(-entries // PAGE) * PAGE):
            for within in range(0, len(data), ENTRY):
                slot = (at + within - ENTRIES_AT) // ENTRY
                if slot < whole:
                    self.entry(slot, data[within:within + ENTRY])

    @staticmethod
    def is_super(page):
        return page[:8] == b"VELLUMh1" and crc32c(page[:8] + bytes(4) + page[12:]) == be32(page, 8)

    def row(self, number):
        data = self.file.read(ROWS_AT + ROW * number, ROW)
        if not any(data):
            return None
        if crc32c(number.to_bytes(4, "big") + data[4:]) != be32(data):
            self.lines.append(f"row {number} is damaged, and is none")
            return None
        flags, uuid, previous, newest, budget, length = struct.unpack_from(">I16s16s16sQI", data, 4)
        zeros = data[68 + min(length, 255):328] + data[336:]
        if flags > 3 or uuid == bytes(16) or length > 255 or any(zeros):
            self.lines.append(f"row {number} has something impossible")
        counts = {newest} if flags & 1 else {newest, previous}
        return {"uuid": uuid, "counts": counts - {bytes(16)}, "budget": budget, "last": be64(data, 328), "used": 0, "needed": flags >> 1}

    def entry(self, slot, data):
        if not any(data):
            return
        crc, number, part, unit, sequence, reason = struct.unpack_from(">IHHQQB", data)
        row = self.rows[number] if number < ROWS else None
        if row is None or crc32c(slot.to_bytes(4, "big") + data[4:] + row["uuid"]) != crc:
            return  # none
        if sequence in (0, 2**64 - 1) or reason not in (1, 2, 3, 4) or any(data[25:]):
            self.lines.append(f"the entry of slot {slot} has something impossible")
        promotion = self.parts.setdefault((number, unit), {}).setdefault(sequence, {})
        if part in promotion:
            self.lines.append(f"two slots have part {part} of unit {unit} of row {number}")
        promotion[part] = slot
        if len(self.parts[number, unit]) > 1:
            self.lines.append(f"two promotions of unit {unit} of row {number}")

    def unit(self, number, unit, most, parts):
        """The slots of a unit, if the medium has it."""
        promotions = self.parts.get((number, unit), {})
        newest = max(promotions, default=0)
        slots = promotions.get(newest, {})
        is_there = 0 < newest <= most and sorted(slots) == list(range(parts))
        return [slots[part] for part in range(parts)] if is_there else None


def disk_bytes(disk, at, size):
    data = b""
    for at in range(at, at + size, PAGE):
        piece = min(PAGE, max(0, disk.size - at))
        origin = disk.origin(at) if piece else "zero"
        if origin != "zero":
            data += disk.below(at, piece) if origin == "base" else disk.image(at, piece)
        data += bytes(PAGE - piece if origin != "zero" else PAGE)
    return data


def check_image(medium, path, base):
    file = native.File(path)
    superblock, _ = native.open_closed(file)
    page, (start, length) = superblock.page, superblock.fast
    need(length > 0 and page[2168:2184] == medium.id, "the image is not attached to this medium")
    number, generation = page[2184:2200], be64(page, 2200)
    uuid = page[24:40]
    rows = [index for index, row in enumerate(medium.rows) if row and row["uuid"] == uuid]
    need(rows, "the medium has no row for the image")
    row, most = medium.rows[rows[0]], be64(file.read(start, 8))
    counts = generation == superblock.generation and number in row["counts"] and row["last"] >= most
    if superblock.has_moved and not (counts and row["needed"]):
        medium.lines.append("units are on the medium alone, and it is not of this state of the image, or may forget them")
    if not counts:
        print("no unit of the image counts")
        return
    disk = native.Disk(file, superblock, native.File(base) if base else None)
    parts, found, lost, moved = superblock.unit // SLOT, 0, 0, 0
    for unit in range(min(superblock.units, 8 * (length - 8))):
        if not file.read(start + 8 + unit // 8, 1)[0] >> unit % 8 & 1:
            continue
        slots = medium.unit(rows[0], unit, most, parts)
        is_moved = superblock.has_moved and disk.entry(unit) == superblock.moved
        if is_moved and slots is None:
            medium.lines.append(f"unit {unit} is on the medium alone, and not there")
        moved += is_moved
        if slots is None:
            lost += 1
            continue
        found += 1
        if is_moved:
            continue
        copy = b"".join(medium.file.read(medium.slots_at + SLOT * slot, SLOT) for slot in slots)
        if copy != disk_bytes(disk, unit * superblock.unit, superblock.unit):
            medium.lines.append(f"unit {unit} is not what the disk reads as")
    if found * superblock.unit > row["budget"]:
        medium.lines.append("the disk has more than its budget")
    print(f"{found} units on the medium, {lost} with a bit and nothing there, {moved} there alone")


def examine(path, image=None, base=None):
    medium = Medium(path)
    if image:
        check_image(medium, image, base)
    print("\n".join(medium.lines + [f"{len(medium.lines)} corruptions"]))
    return 2 if medium.lines else 0


def main(arguments):
    if len(arguments) not in (1, 2, 3) or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 1
    return native.attempt(examine, *arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
