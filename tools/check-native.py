#!/usr/bin/env python3
"""Checks a closed image of Vellum's native format, by the text of docs/format/native.md alone.

    check-native.py IMAGE…                     the numbered invariants; a line for each thing found
    check-native.py --sha256 IMAGE [BASE]      the SHA-256 of the disk's bytes; BASE is the base as a raw file
    check-native.py --snapshot NAME --sha256 IMAGE [BASE]      the same of a snapshot
    check-native.py --secret FILE …            FILE has the secret of an encrypted image, all of it

Of several images the last line for each is `IMAGE: CODE`.

It shares nothing with the program but the text, so that each keeps the other and the text honest. Standard library only,
but for AES, of which nothing is needed where the image is not encrypted: the package cryptography has it.

Exit codes, as `vellum check` has them: 0 nothing is wrong, 1 it cannot be checked, 2 corrupt, 3 space is lost.
"""

import hashlib
import os
import struct
import sys
import weakref

PAGE = 4096
PIECE = 1 << 18
HOME = 0xFFFFFFFF
MAP, PART = -1, -2  # what a unit of copies is used for, and one that has a part of the table
REGIONS = ("bitmap", "masks", "table", "partials", "snapshot list", "zone table", "journal")
KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


class Refused(Exception):
    """The image cannot be checked."""


def need(holds, why):
    if not holds:
        raise Refused(why)


def crc32c_table():
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


CRC_TABLE = crc32c_table()


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def be32(data, at=0):
    return int.from_bytes(data[at:at + 4], "big")


def be64(data, at=0):
    return int.from_bytes(data[at:at + 8], "big")


def count(size, of):
    """How many of `of` bytes cover `size` bytes."""
    return -(-size // of)


class File:
    def __init__(self, path):
        self.fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.fd)
        self.size = os.lseek(self.fd, 0, os.SEEK_END)
        self.is_device = not os.path.isfile(path)

    def read(self, at, size):
        """What is behind the end reads as zero."""
        data = os.pread(self.fd, size, at) if at < self.size else b""
        while len(data) < size and at + len(data) < self.size:
            data += os.pread(self.fd, size - len(data), at + len(data))
        return data + bytes(size - len(data))

    def next_data(self, at):
        """The first place from `at` on that may be something else than a hole."""
        if at >= self.size or self.is_device:
            return at
        try:
            return os.lseek(self.fd, at, os.SEEK_DATA)
        except OSError:
            return self.size

    def data(self, start, end):
        """The bytes of a run that are not all zero: places and bytes."""
        at = start
        while at < end:
            at = self.next_data(at)
            if at >= min(end, self.size):
                return
            stop = min(end, at - at % PIECE + PIECE)
            piece = self.read(at, stop - at)
            if piece.count(0) != len(piece):
                yield at, piece
            at = stop


class Superblock:
    def __init__(self, page):
        self.page = page
        self.sequence = be64(page, 16)
        self.features = be64(page, 40)
        self.version = be32(page, 12)
        self.layout = be32(page, 56)
        self.block_shift, self.unit_shift = page[60], page[61]
        self.size, self.base_size = be64(page, 64), be64(page, 72)
        self.region = [struct.unpack_from(">QQ", page, 80 + 16 * index) for index in range(6)]
        zones = struct.unpack_from(">QQ", page, 224) if self.layout == 2 else (0, 0)
        self.region.insert(5, zones)
        self.zone_shift = page[62]
        self.data_offset = be64(page, 176)
        self.has_parts = bool(self.features >> 5 & 1)
        state, zero, number = struct.unpack_from(">II16s", page, 1560)
        need(state <= 5 and zero == 0 and (state == 0) == (number == bytes(16)), "impossible state of a migration")
        need(bool(self.features >> 7 & 1) == (state in (1, 3, 4, 5)), "bit 7 and the migration contradict each other")
        cache, number, its_generation = struct.unpack_from(">16s16sQ", page, 2112)
        need((cache == bytes(16)) == (number == bytes(16)), "a session with half a name")
        named = number != bytes(16)
        need(named or its_generation == 0, "the generation of no session")
        self.session_counts = named and its_generation == be64(page, 184)
        need(self.session_counts or not self.features >> 8 & 1, "a mark of a flash cache, and no session that counts")
        self.is_encrypted = bool(self.features >> 10 & 1)
        self.keys = struct.unpack_from(">QQ", page, 2728) if self.is_encrypted else (0, 0)
        need(self.is_encrypted == (self.keys[1] > 0), "an encrypted image without keys")
        need(not self.is_encrypted or self.layout != 2 or page[63] & 1, "embedded entries of an encrypted image")
        self.fast = (0, 0)
        if be64(page, 48) >> 2 & 1 and not self.is_encrypted:
            *self.fast, medium, _, _, length = struct.unpack_from(">QQ16s16sQI", page, 2152)
            need(medium != bytes(16), "a fast medium without an id")
            need(self.fast[1] > 0 and length <= 511, "a fast medium without bits of units, or with an impossible name")
        self.has_moved = bool(self.features >> 11 & 1)
        need(self.fast[1] > 0 or not self.has_moved, "units on a fast medium alone, and no fast medium")
        parts = [struct.unpack_from(">QQQ", page, 1296 + 32 * index) for index in range(8)]
        self.parts = parts if self.has_parts else []
        self.generation = be64(page, 184)
        self.key = page[192:208]
        self.name_length, self.format_length = be32(page, 216), be32(page, 220)

    @staticmethod
    def is_good(page):
        return page[:8] == b"VELLUMv1" and crc32c(page[:8] + bytes(4) + page[12:]) == be32(page, 8)

    @classmethod
    def choose(cls, file):
        """The copy that counts, and the name of a copy that is not readable."""
        pages = {"A": file.read(0, PAGE), "B": file.read(PAGE, PAGE)}
        need(any(page[:8] == b"VELLUMv1" for page in pages.values()), "no image of this format")
        good = {name: cls(page) for name, page in pages.items() if cls.is_good(page)}
        need(good, "neither copy of the superblock is good")
        bad = [name for name in pages if name not in good]
        if len(good) == 2 and good["A"].sequence == good["B"].sequence:
            need(pages["A"] == pages["B"], "both copies say that they are the newest, and differ")
        return max(good.values(), key=lambda copy: copy.sequence), bad

    def text(self, length, at, most, what):
        need(length <= most, f"the {what} is too long")
        data = self.page[at:at + length]
        need(b"\0" not in data, f"the {what} is no text")
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise Refused(f"the {what} is no text") from None

    def check(self, file):
        need(self.version == 1, "the version is not known")
        need(self.features >> 13 == 0, "there are unknown incompatible features")
        need(self.layout in (0, 1, 2), "the layout is not known")
        self.needs_replay, self.is_table, self.has_base, self.has_snapshots = (
            bool(self.features >> bit & 1) for bit in range(4))
        self.has_clones = bool(self.features >> 6 & 1)
        self.is_zoned = self.layout == 2
        need(self.is_table == (self.layout != 0), "layout and features contradict each other")
        need(self.is_zoned == bool(self.features >> 4 & 1), "layout and features contradict each other")
        if self.is_zoned:
            need(17 <= self.zone_shift <= 26, "impossible zones")
            need(1 <= self.zone_shift - self.unit_shift <= 10, "impossible zones")
        need(16 <= self.unit_shift <= 21 if self.is_table else self.unit_shift == 0, "impossible units")
        need(12 <= self.block_shift <= 20, "impossible blocks")
        need(self.size % 512 == 0 and self.size <= (1 << 56) - TIB, "impossible size")
        if self.has_base:
            need(self.text(self.name_length, 256, 1023, "base's name"), "the base has no name")
            self.text(self.format_length, 1280, 15, "base's format")
            need(self.base_size <= min(self.size, 64 * TIB), "impossible size of the base")
            self.check_pin()
        else:
            need((self.base_size, self.name_length, self.format_length) == (0, 0, 0), "a base that is none")
        need((self.key != bytes(16)) == self.needs_replay, "key and feature contradict each other")
        packs = self.needs_replay and self.is_zoned and self.has_base and not self.page[63] & 1
        need(packs or not self.features >> 12 & 1, "packed blocks over a base, where there can be none")
        need(self.sequence not in (0, 2**64 - 1) and self.generation != 2**64 - 1, "impossible sequence")
        need(self.is_table or not self.has_snapshots, "snapshots of a linear image")
        need(self.has_snapshots or not self.has_clones, "clones of snapshots, and no snapshots")
        while self.parts and self.parts[-1] == (0, 0, 0):
            self.parts.pop()
        need(bool(self.parts) == self.has_parts, "parts of the table that are none")
        self.check_regions()
        self.check_fast()
        self.check_parts()
        end = max([self.data_offset] + [self.whole(part)[1] for part in self.parts])
        if not self.is_table and file.is_device:
            end += self.size
        need(file.size >= end, "the file was cut off")

    def check_fast(self):
        if self.fast[1] > 0:
            self.text(be32(self.page, 2208), 2216, 511, "name of the fast medium")

    def check_pin(self):
        text = self.text(be32(self.page, 1600), 1608, 504, "pin of the base")
        for line in text.split("\n") if text else []:
            kind, length, value = (line.split(" ") + [""])[:3]
            need(kind in ("etag", "version", "index", "file", "snapshot", "moved", "trusted"), "the pin of the base is none")
            need(length.isdigit() and str(int(length)) == length and int(length) < 2**64, "the pin of the base is none")
            need((value == "") == (kind == "trusted") and len(value) <= 256, "the pin of the base is none")
            need(line == f"{kind} {length} {value}".rstrip(), "the pin of the base is none")
            need(all("!" <= character <= "~" for character in value), "the pin of the base is none")

    def check_regions(self):
        """Invariant 1."""
        self.unit = 1 << self.unit_shift if self.is_table else 0
        self.block = 1 << self.block_shift
        base = self.base_size if self.has_base else 0
        self.blocks, self.sub_blocks = count(base, self.block), count(base, PAGE)
        self.units = count(self.size, self.unit) if self.is_table else 0
        bounds = [
            (count(self.blocks, 8), 256 * MIB if self.has_base else 0),
            (count(self.sub_blocks, 4), 4 * GIB if self.has_base else 0),
            (self.units * 4, 256 * MIB if self.is_table else 0),
            (8 * KIB, 8 * KIB) if self.is_table else (0, 0),
            (512 * KIB, 512 * KIB) if self.is_table else (0, 0),
            (4 * KIB, 64 * MIB) if self.is_zoned else (0, 0),
            (64 * KIB, 64 * MIB) if self.is_table or self.has_base else (0, 0),
        ]
        need(self.data_offset % MIB == 0 and MIB <= self.data_offset <= 8 * GIB, "impossible data_offset")
        seen = []
        # Bits of units on a fast medium: they come before the journal.
        bounds.insert(6, (0, 8 * MIB + PAGE if self.is_table else 0))
        regions = list(self.region)
        regions.insert(6, tuple(self.fast))
        names = REGIONS[:6] + ("fast units",) + REGIONS[6:]
        for name, (start, length), (least, most) in zip(names, regions, bounds):
            least = count(least, PAGE) * PAGE
            further = {"table": 1, "zone table": 2}.get(name)
            total = length + sum(part[further] for part in self.parts if further)
            need(least <= total <= most and length % PAGE == 0, f"the {name} has an impossible length")
            if length == 0:
                continue
            end = start + length
            need(start % PAGE == 0 and 2 * PAGE <= start and end <= self.data_offset, f"the {name} cannot lie there")
            need(all(end <= other[0] or other[1] <= start for other in seen), f"the {name} overlaps another region")
            need(name != "journal" or all(other[1] <= start for other in seen), "the journal is not the last")
            seen.append((start, end))
        start, length = self.keys
        if length:
            end = start + length
            need(start % PAGE == 0 and length % PAGE == 0 and length <= 16 * MIB, "the keys cannot lie there")
            need(2 * PAGE <= start and end <= self.data_offset, "the keys cannot lie there")
            need(all(end <= other[0] or other[1] <= start for other in seen), "the keys overlap another region")
            journal = self.region[6]
            need(journal[1] == 0 or start >= sum(journal), "the keys do not lie behind the journal")
        counts_alone = self.session_counts and self.region[6][1] == 0
        need(bool(self.features >> 9 & 1) == counts_alone, "bit 9 and the session contradict each other")
        self.bitmap, self.masks, self.table, self.partials, self.list, self.zones, self.journal = self.region
        self.tables = [self.table] + [(at, table) for at, table, _ in self.parts]
        self.zone_tables = [self.zones] + [(at + table, zones) for at, table, zones in self.parts]

    def whole(self, part):
        """Where a part begins and its last unit ends."""
        at, table, zones = part
        return at, at + count(table + zones, self.unit) * self.unit

    def check_parts(self):
        """Invariant 8, but for the units."""
        seen = []
        for part in self.parts:
            at, table, zones = part
            need(self.is_table and table and table % PAGE == 0 and zones % PAGE == 0, "a part of impossible length")
            start, end = self.whole(part)
            need(start >= self.data_offset and (start - self.data_offset) % self.unit == 0, "a part cannot lie there")
            need(end <= 1 << 56, "a part cannot lie there")
            most = (1 << 27) - 1 if self.is_zoned else (1 << 32) - 2
            need((end - self.data_offset) // self.unit <= most, "a part cannot lie there")
            need(all(end <= other[0] or other[1] <= start for other in seen), "a part overlaps another one")
            seen.append((start, end))

    def units_of_parts(self):
        for part in self.parts:
            start, end = self.whole(part)
            yield from range((start - self.data_offset) // self.unit + 1, (end - self.data_offset) // self.unit + 1)

    @staticmethod
    def place_in(spans, at):
        """The place of a byte of something that lies in several spans."""
        for start, length in spans:
            if at < length:
                return start + at
            at -= length
        raise Refused("a table has no such entry")

    @staticmethod
    def index_in(spans, at):
        """Which byte of it lies there, if any."""
        before = 0
        for start, length in spans:
            if start <= at < start + length:
                return before + at - start
            before += length
        return None

    def split(self, entry):
        """The stored unit of an entry, and its form."""
        return (entry & (1 << 27) - 1, entry >> 27) if self.is_zoned else (entry, 0)

    @property
    def moved(self):
        """The entry of a unit that only the fast medium has."""
        return (1 << 27) - 1 if self.is_zoned else (1 << 32) - 1

    def zone_of(self, unit):
        """The zone of a stored unit, if it has an entry."""
        zone = unit - 1 >> self.zone_shift - self.unit_shift
        return zone if zone < sum(length for _, length in self.zone_tables) // 256 else None


def lz4(data, size):
    """One LZ4 block."""
    out, at = bytearray(), 0

    def length(start):
        nonlocal at
        if start < 15:
            return start
        while True:
            need(at < len(data), "a packed block ends too early")
            byte = data[at]
            at, start = at + 1, start + byte
            if byte < 255:
                return start

    while at < len(data):
        token = data[at]
        at += 1
        literals = length(token >> 4)
        need(at + literals <= len(data), "a packed block ends too early")
        out += data[at:at + literals]
        at += literals
        if at == len(data):
            break
        need(at + 2 <= len(data), "a packed block ends too early")
        back = int.from_bytes(data[at:at + 2], "little")
        at += 2
        need(0 < back <= len(out), "a packed block names what is not there")
        for _ in range(length(token & 15) + 4):
            out.append(out[-back])
        need(len(out) <= size, "a packed block is too long")
    need(len(out) == size, "a packed block is too short")
    return bytes(out)


def aes_xts(key, number, data):
    """Decrypts one sector."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    decryptor = Cipher(algorithms.AES(key), modes.XTS(number.to_bytes(16, "little"))).decryptor()
    return decryptor.update(data) + decryptor.finalize()


class Keys:
    """Invariant 9. The LUKS header of an encrypted image, by the LUKS1 specification."""

    STRIPES = 4000

    def __init__(self, file, region):
        self.file, (self.at, length) = file, region
        header = self.header = file.read(self.at, 592)
        need(header[:8] == b"LUKS\xba\xbe\0\1", "there is no LUKS header")
        cipher, mode, self.hash = (self.text(at) for at in (8, 40, 72))
        need(cipher == "aes" and mode in ("xts-plain64", "xts-plain"), "a cipher that is not known")
        need(self.hash in ("sha1", "sha224", "sha256", "sha384", "sha512"), "a hash that is not known")
        self.key_length = be32(header, 108)
        need(self.key_length in (32, 64), "a key of impossible length")
        need(all("!" <= one <= "~" for one in self.text(168, 40)), "a UUID that is no text")
        need(0 < be32(header, 164) <= 100_000_000, "impossible iterations of the digest")
        self.slots, places = [], []
        size = count(self.key_length * self.STRIPES, 512)
        for index in range(8):
            at = 208 + 48 * index
            state, iterations = struct.unpack_from(">II", header, at)
            material, stripes = struct.unpack_from(">II", header, at + 40)
            need(state in (0x00AC71F3, 0x0000DEAD), "a slot in an impossible state")
            need(stripes == self.STRIPES, "a slot with other stripes")
            need(material >= 2 and material + size <= be32(header, 104), "a slot without a place")
            need(all(abs(material - other) >= size for other in places), "two slots in one place")
            places.append(material)
            if state == 0x00AC71F3:
                need(0 < iterations <= 100_000_000, "impossible iterations of a slot")
                need(material * 512 + self.key_length * self.STRIPES <= length, "a slot that is cut off")
                self.slots.append((iterations, header[at + 8:at + 40], material))

    def text(self, at, length=32):
        data = self.header[at:at + length]
        return data.split(b"\0")[0].decode("ascii", "replace")

    def diffuse(self, block):
        size = hashlib.new(self.hash).digest_size
        parts = (block[at:at + size] for at in range(0, len(block), size))
        return b"".join(
            hashlib.new(self.hash, index.to_bytes(4, "big") + part).digest()[:len(part)]
            for index, part in enumerate(parts))

    def key(self, secret):
        length = self.key_length
        for iterations, salt, material in self.slots:
            derived = hashlib.pbkdf2_hmac(self.hash, secret, salt, iterations, length)
            stored = self.file.read(self.at + 512 * material, length * self.STRIPES)
            stripes = b"".join(
                aes_xts(derived, at // 512, stored[at:at + 512]) for at in range(0, len(stored), 512))
            key = bytes(length)
            for at in range(0, len(stripes), length):
                if at > 0:
                    key = self.diffuse(key)
                key = bytes(one ^ other for one, other in zip(key, stripes[at:at + length]))
            salt, iterations = self.header[132:164], be32(self.header, 164)
            if hashlib.pbkdf2_hmac(self.hash, key, salt, iterations, 20) == self.header[112:132]:
                return key
        raise Refused("the secret opens no slot")


class Check:
    def __init__(self, file, superblock):
        self.file, self.sb = file, superblock
        self.corruptions = self.leaks = 0
        self.names = {}  # unit: what it is used for; the first one that was seen

    def corrupt(self, line):
        self.corruptions += 1
        if self.corruptions <= 1000:
            print("ERROR", line)

    def leak(self, line):
        self.leaks += 1
        if self.leaks <= 1000:
            print("Leaked", line)

    def run(self):
        if self.sb.is_encrypted:
            try:
                Keys(self.file, self.sb.keys)
            except Refused as error:
                self.corrupt(f"9: keys: {error}")
        self.bits_past_the_base(self.sb.bitmap, self.sb.blocks, "bitmap")
        self.bits_past_the_base(self.sb.masks, self.sb.sub_blocks * 2, "masks")
        self.mask_values()
        if self.sb.is_table:
            self.home_table()
            self.snapshots()
            self.map_units()
            self.partial_units()

    def bits_past_the_base(self, region, bits, name):
        """Invariant 4, second half."""
        start, length = region
        for at, data in self.file.data(start + bits // 8, start + length):
            if at == start + bits // 8:
                data = bytes([data[0] >> bits % 8]) + data[1:]
            if any(data):
                self.corrupt(f"4: {name}: something past the end of the base, near {at:#x}")

    def mask_values(self):
        """Invariant 4, first half."""
        start, length = self.sb.masks
        for at, data in self.file.data(start, start + length):
            for index, byte in enumerate(data):
                if byte & byte >> 1 & 0x55:
                    for sub in range(4 * (at + index - start), 4 * (at + index - start) + 4):
                        if byte >> 2 * (sub % 4) & 3 == 3 and sub < self.sb.sub_blocks and not self.has_block(sub):
                            self.corrupt(f"4: sub-block {sub} has a mask of 3")

    def has_block(self, sub):
        block = sub * PAGE // self.sb.block
        return self.file.read(self.sb.bitmap[0] + block // 8, 1)[0] >> block % 8 & 1 == 1

    def place(self, unit):
        return self.sb.data_offset + (unit - 1) * self.sb.unit

    def is_inside(self, unit):
        """Invariant 3."""
        if not 0 < unit < self.sb.moved:
            return False
        if self.file.is_device:
            return self.place(unit) + self.sb.unit <= self.file.size
        return self.place(unit) < self.file.size

    def use(self, unit, purpose, view):
        """Invariants 2 and 3."""
        if not self.is_inside(unit):
            self.corrupt(f"3: {view}: unit {unit} cannot be there")
        elif self.names.setdefault(unit, purpose) != purpose:
            self.corrupt(f"2: {view}: unit {unit} is used for two things")

    def entries(self, data, first, view):
        for index, entry in enumerate(struct.unpack(f">{len(data) // 4}I", data)):
            if entry == 0:
                continue
            unit, form = self.sb.split(entry)
            if entry == self.sb.moved and self.sb.has_moved and view == "home":
                self.moved_unit(first + index)
            elif form and not (unit and form <= self.sb.unit // PAGE and self.sb.zone_of(unit) is not None):
                self.corrupt(f"3: {view}: unit {first + index} of the disk lies in unit {unit}, which has no form {form}")
            else:
                self.use(unit, first + index, view)

    def moved_unit(self, unit):
        """Invariant 10."""
        start, length = self.sb.fast
        if unit // 8 + 8 >= length or not self.file.read(start + 8 + unit // 8, 1)[0] >> unit % 8 & 1:
            self.corrupt(f"10: unit {unit} of the disk is on the fast medium alone, and its bit is not set")

    def home_table(self):
        for unit in self.sb.units_of_parts():
            self.use(unit, PART, "parts of the table")
        for start, length in self.sb.tables:
            for at, data in self.file.data(start, start + length):
                first = self.sb.index_in(self.sb.tables, at) // 4
                inside = 4 * max(self.sb.units - first, 0)
                self.entries(data[:inside], first, "home")
                if any(data[inside:]):
                    self.corrupt(f"4: table: an entry past the end of the disk, near {at:#x}")

    def snapshots(self):
        """Invariant 6."""
        data = self.file.read(*self.sb.list)
        last = data[4095 * 128:]
        self.first_map_unit, relies, next_id, reverts_to = (be32(last, at) for at in (0, 4, 8, 12))
        self.ids = {}
        room = sum(length for _, length in self.sb.tables) // 4 * self.sb.unit
        for index in range(4095):
            entry = data[128 * index:128 * index + 128]
            number, follows, size = be32(entry), be32(entry, 4), be64(entry, 8)
            if number == 0:
                continue
            try:
                entry[64:].split(b"\0")[0].decode()
                is_text = True
            except UnicodeDecodeError:
                is_text = False
            is_known = number in self.ids
            self.ids[number] = follows
            flags = be32(entry, 32)
            if flags & 3 == 3 or flags & 2 and not self.sb.has_clones:
                self.corrupt(f"6: entry {index} of the snapshot list, id {number}, has impossible flags")
            if is_known or number >= max(next_id, 1) or size % 512 or size > room or not is_text:
                self.corrupt(f"6: entry {index} of the snapshot list, id {number}, is impossible")
        if not self.sb.has_snapshots and (self.ids or self.first_map_unit):
            self.corrupt("6: there are snapshots, and the superblock says that there never were")
        for what, number in (("relies on home", relies), ("is reverted to", reverts_to)):
            if number and number not in self.ids:
                self.corrupt(f"6: snapshot {number} {what}, and does not exist")
        for number, follows in self.ids.items():
            if (follows == HOME) != (number == relies):
                self.corrupt(f"6: snapshot {number} and the last entry do not agree on who relies on home")
        good = {0, HOME}
        for number in self.ids:
            path, at = [], number
            while at not in good and at in self.ids and at not in path:
                path.append(at)
                at = self.ids[at]
            if at not in good:
                self.corrupt(f"6: the chain of snapshot {number} does not end")
            good.update(path)

    def map_units(self):
        """Invariant 7."""
        slots = min(self.sb.unit // PAGE - 1, (PAGE - 16) // 16)
        unit, seen, copies = self.first_map_unit, set(), set()
        while unit:
            if unit in seen or unit >= 1 << 32 or not self.is_inside(unit):
                self.corrupt(f"7: the chain of map units comes to unit {unit}")
                return
            seen.add(unit)
            self.use(unit, MAP, "map units")
            index = self.file.read(self.place(unit), PAGE)
            if index[:8] != b"VELLUMmu":
                self.corrupt(f"7: map unit {unit} has no magic number")
                return
            for slot in range(slots):
                number, page = be32(index, 16 + 16 * slot), be64(index, 24 + 16 * slot)
                if number == 0:
                    continue
                if number not in self.ids:
                    self.leak(f"7: a copy in map unit {unit} for snapshot {number}, which does not exist")
                elif page % PAGE or not any(start <= page < start + length for start, length in self.sb.region[:2] + self.sb.tables):
                    self.corrupt(f"7: a copy for snapshot {number} of {page:#x}, which is no page of a view")
                else:
                    if (number, page) in copies:
                        self.corrupt(f"7: two copies for snapshot {number} of page {page:#x}")
                    copies.add((number, page))
                    first = self.sb.index_in(self.sb.tables, page)
                    if first is not None:
                        copy = self.file.read(self.place(unit) + PAGE * (slot + 1), PAGE)
                        self.entries(copy, first // 4, f"snapshot {number}")
            unit = be64(index, 8)

    def partial_units(self):
        """Invariant 5, and the end of 2."""
        slots = {}
        for slot in range(64):
            data = self.file.read(self.sb.partials[0] + 128 * slot, 128)
            unit, under = be32(data), be32(data, 4)
            if unit == 0:
                continue
            bits = int.from_bytes(data[8:72], "little")
            is_possible = under not in (0, unit) and self.is_inside(unit) and self.is_inside(under)
            if not is_possible or unit in slots or bits >> self.sb.unit // PAGE:
                self.corrupt(f"5: partial slot {slot} (unit {unit} over {under}) is impossible")
            else:
                slots[unit] = under
        for unit in slots:
            at, steps = slots[unit], 0
            while at in slots and at != unit and steps < 64:
                at, steps = slots[at], steps + 1
            if at == unit:
                self.corrupt(f"5: partial unit {unit} lies under itself")
        alive = {unit for unit in slots if unit in self.names}
        while more := {slots[unit] for unit in alive if slots[unit] in slots} - alive:
            alive |= more
        for unit, under in slots.items():
            if unit not in alive:
                self.leak(f"5: nothing names partial unit {unit}")
            elif MAP in (self.names.get(unit), self.names.get(under)):
                self.corrupt(f"2: partial unit {unit} over {under}: one of them holds copies")


class View:
    """The pages of home as a snapshot sees them."""

    def __init__(self, file, superblock, name):
        self.file, data = file, file.read(*superblock.list)
        follows, found, self.size = {}, None, 0
        for entry in (data[128 * index:128 * index + 128] for index in range(4095)):
            number = be32(entry)
            if number:
                follows[number] = be32(entry, 4)
                if not be32(entry, 32) & 1 and entry[64:].split(b"\0")[0] == name.encode():
                    found, self.size = number, be64(entry, 8)
        need(found, f"there is no snapshot {name}")
        copies, unit = {}, be32(data, 4095 * 128)
        while unit:
            at = superblock.data_offset + (unit - 1) * superblock.unit
            index = file.read(at, PAGE)
            for slot in range(min(superblock.unit // PAGE - 1, (PAGE - 16) // 16)):
                key = be32(index, 16 + 16 * slot), be64(index, 24 + 16 * slot)
                copies[key] = at + PAGE * (slot + 1)
            unit = be64(index, 8)
        self.places = {}
        while found not in (0, HOME):
            for (number, page), place in copies.items():
                if number == found:
                    self.places.setdefault(page, place)
            found = follows[found]
        self.ends_in_home = found == HOME

    def read(self, at, size):
        """Bytes of one page."""
        page = at // PAGE * PAGE
        if page in self.places:
            return self.file.read(self.places[page] + at - page, size)
        return self.file.read(at, size) if self.ends_in_home else bytes(size)


class Disk:
    """The disk's bytes, as home (or what a snapshot sees of it) and the data area have them."""

    def __init__(self, file, superblock, base, snapshot=None, secret=None):
        self.file, self.sb, self.base = file, superblock, base
        self.key = None
        if superblock.is_encrypted:
            need(secret is not None, "the image is encrypted: --secret FILE")
            self.key = Keys(file, superblock.keys).key(secret)
        self.home = View(file, superblock, snapshot) if snapshot else file
        self.size = self.home.size if snapshot else superblock.size

    def origin(self, at):
        """Who has the 4 KiB from `at` on."""
        sub = at // PAGE
        if sub >= self.sb.sub_blocks:
            return "image"
        block = at // self.sb.block
        if self.home.read(self.sb.bitmap[0] + block // 8, 1)[0] >> block % 8 & 1:
            return "image"
        mask = self.home.read(self.sb.masks[0] + sub // 4, 1)[0] >> 2 * (sub % 4) & 3
        need(mask != 3, "a mask of 3")
        return ("base", "image", "zero")[mask]

    def entry(self, unit):
        return be32(self.home.read(self.sb.place_in(self.sb.tables, 4 * unit), 4))

    def image(self, at, size):
        if not self.sb.is_table:
            return self.stored(self.sb.data_offset + at, size)
        entry = self.sb.place_in(self.sb.tables, 4 * (at // self.sb.unit))
        number, form = self.sb.split(be32(self.home.read(entry, 4)))
        if number == 0:
            return bytes(size)
        need(number != self.sb.moved, "a unit of the disk is on the fast medium alone")
        if form and at % self.sb.unit // PAGE == form - 1:
            return self.packed(at, number, form - 1)[at % PAGE:][:size]
        place, within = self.sb.data_offset + (number - 1) * self.sb.unit, at % self.sb.unit
        parts = {}
        for slot in range(64):
            data = self.file.read(self.sb.partials[0] + 128 * slot, 128)
            parts[be32(data)] = (be32(data, 4), data[8:72])
        while number in parts:
            under, bits = parts[number]
            if bits[within // PAGE // 8] >> within // PAGE % 8 & 1:
                break
            number = under
            place = self.sb.data_offset + (number - 1) * self.sb.unit
        return self.stored(place + within, size)

    def stored(self, at, size):
        """Whole sectors of guest data that lie there."""
        data = self.file.read(at, size)
        if self.key is None:
            return data
        sectors = [(at // 512 + index, data[512 * index:512 * index + 512]) for index in range(size // 512)]
        return b"".join(
            sector if sector == bytes(512) else aes_xts(self.key, number, sector) for number, sector in sectors)

    def packed(self, at, number, index):
        """The 4 KiB of a packed block."""
        block = self.file.read(self.sb.data_offset + (number - 1) * self.sb.unit + index * PAGE, PAGE)
        zone = self.sb.zone_of(number)
        need(zone is not None, "a packed block in a unit of no zone")
        tag = self.file.read(self.sb.place_in(self.sb.zone_tables, 256 * zone + 8), 8)  # of all views
        need(tag != bytes(8) and block[:8] == tag, "a packed block of another time")
        whose = (be32(block, 8), be32(block, 12), block[16], block[17])
        need(whose == (at // self.sb.unit, number, index, 0), "a packed block is another one's")
        need(crc32c(block[:20] + bytes(4) + block[24:]) == be32(block, 20), "a packed block is not whole")
        return lz4(block[24:24 + int.from_bytes(block[18:20], "big")], PAGE)

    def below(self, at, size):
        need(self.base is not None, "the disk lies over a base: say which raw file it is")
        known = max(0, min(size, self.sb.base_size - at))
        return self.base.read(at, known) + bytes(size - known)

    def sha256(self):
        digest = hashlib.sha256()
        for at in range(0, self.size, PAGE):
            size = min(PAGE, self.size - at)
            origin = self.origin(at)
            if origin == "zero":
                digest.update(bytes(size))
            else:
                digest.update(self.below(at, size) if origin == "base" else self.image(at, size))
        return digest.hexdigest()


def examine(path):
    """Checks one image; gives the exit code."""
    file = File(path)
    superblock, bad = open_closed(file)
    for name in bad:
        print(f"superblock {name} is not readable; the other one counts")
    check = Check(file, superblock)
    check.run()
    print(f"{check.corruptions} corruptions, {check.leaks} leaks")
    return 2 if check.corruptions else 3 if check.leaks else 0


def open_closed(file):
    superblock, bad = Superblock.choose(file)
    superblock.check(file)
    need(not superblock.needs_replay, "the image was not closed: its journal must be replayed first")
    return superblock, bad


def attempt(work, *arguments):
    try:
        return work(*arguments)
    except (Refused, OSError) as error:
        print(f"cannot be checked: {error}", file=sys.stderr)
        return 1


def print_hash(snapshot, secret, image, base=None):
    file = File(image)
    superblock, _ = open_closed(file)
    print(Disk(file, superblock, File(base) if base else None, snapshot, secret).sha256())
    return 0


def main(arguments):
    snapshot = secret = None
    if arguments[:1] == ["--secret"] and len(arguments) > 1:
        with open(arguments[1], "rb") as file:
            secret, arguments = file.read(), arguments[2:]
    if arguments[:1] == ["--snapshot"] and len(arguments) > 1:
        snapshot, arguments = arguments[1], arguments[2:]
    if arguments[:1] == ["--sha256"] and len(arguments) in (2, 3):
        return attempt(print_hash, snapshot, secret, *arguments[1:])
    if not arguments or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 1
    codes = []
    for path in arguments:
        codes.append(attempt(examine, path))
        if len(arguments) > 1:
            print(f"{path}: {codes[-1]}", flush=True)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
