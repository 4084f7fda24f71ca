"""Stories told through libnbd. Each prints "good" when all went as it should.

    python3 -c SCRIPT STORY URI [PID]
"""

import errno
import os
import signal
import sys

import nbd

MIB = 1 << 20


def connect(uri, structured=True, contexts=True):
    handle = nbd.NBD()
    handle.set_request_structured_replies(structured)
    handle.set_strict_mode(0)  # the server judges, not the library
    if contexts:
        handle.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
        handle.add_meta_context("qemu:allocation-depth")
    handle.connect_uri(uri)
    return handle


def refused(wanted, call, *arguments):
    try:
        call(*arguments)
    except nbd.Error as error:
        assert error.errnum in wanted, (call.__name__, arguments, error.errno, error.string)
        return
    raise AssertionError(f"{call.__name__}{arguments} is not refused")


def status(handle, at, length, context=nbd.CONTEXT_BASE_ALLOCATION, flags=0):
    """The runs of one context, all of them."""
    runs, end = [], at + length
    while at < end:
        answers = []

        def extent(name, offset, entries, error):
            if name == context:
                answers.append((offset, entries))

        handle.block_status(end - at, at, extent, flags)
        assert len(answers) == 1, answers
        offset, entries = answers[0]
        assert offset == at, (offset, at)
        for length_of_run, kind in zip(entries[0::2], entries[1::2]):
            assert length_of_run > 0
            runs.append((at, length_of_run, kind))
            at += length_of_run
    return runs


def chunks(handle, at, length, flags=0):
    """A structured read, as its chunks: (offset, bytes or None for a hole)."""
    seen = []

    def chunk(data, offset, kind, error):
        assert kind in (nbd.READ_DATA, nbd.READ_HOLE), kind
        seen.append((offset, bytes(data) if kind == nbd.READ_DATA else None, len(data)))

    data = bytes(handle.pread_structured(length, at, chunk, flags))
    assert sum(piece for _, _, piece in seen) == length, seen
    return data, seen


def commands(uri, kind):
    handle = connect(uri)
    block = handle.get_block_size(nbd.SIZE_MINIMUM)

    def odd(number):
        """The number itself, where the server takes any; else a multiple of what it takes."""
        return -(-number // block) * block

    assert handle.get_structured_replies_negotiated()
    assert handle.get_size() == 8 * MIB
    for can in ("flush", "fua", "trim", "zero", "fast_zero", "cache", "df", "multi_conn"):
        assert getattr(handle, f"can_{can}")(), can
    assert handle.can_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
    assert bytes(handle.pread(MIB, 0)) == b"\x11" * MIB

    # Writes at odd places; one with FUA.
    if block > 1:
        refused((errno.EINVAL,), handle.pwrite, b"\x22", 0)
        refused((errno.EINVAL,), handle.pread, block, 1)
    some, at = odd(70001), odd(99)
    handle.pwrite(b"\x22" * some, at)
    handle.pwrite(b"\x33" * 4096, MIB, nbd.CMD_FLAG_FUA)
    around = bytes(handle.pread(some + 2 * block, at - block))
    assert around == b"\x11" * block + b"\x22" * some + b"\x11" * block
    assert bytes(handle.pread(4096, MIB)) == b"\x33" * 4096
    handle.flush()

    # Zeros: with and without a hole, fast or not at all, with FUA.
    handle.zero(65536, 2 * MIB)
    handle.zero(65536, 2 * MIB + 65536, nbd.CMD_FLAG_NO_HOLE)
    part, border = odd(50), 2 * MIB + 3 * 65536
    handle.zero(2 * part, border - part, nbd.CMD_FLAG_FUA)
    try:
        handle.zero(65536, 2 * MIB + 4 * 65536, nbd.CMD_FLAG_FAST_ZERO)
        assert bytes(handle.pread(65536, 2 * MIB + 4 * 65536)) == bytes(65536)
    except nbd.Error as error:
        assert error.errnum == errno.ENOTSUP, error
        assert bytes(handle.pread(65536, 2 * MIB + 4 * 65536)) == b"\x11" * 65536
    assert bytes(handle.pread(2 * 65536, 2 * MIB)) == bytes(2 * 65536)
    around = bytes(handle.pread(4 * part, border - 2 * part))
    assert around == b"\x11" * part + bytes(2 * part) + b"\x11" * part

    # Block status agrees with the bytes: what is called zero is zero.
    for at, length, state in status(handle, 0, 8 * MIB):
        if state & nbd.STATE_ZERO:
            assert bytes(handle.pread(length, at)) == bytes(length), (at, length)
    # What had a place keeps it. Not so for a raw disk's file system, which calls space that was not written a hole.
    if kind == "Qcow2":
        no_hole = [state for _, _, state in status(handle, 2 * MIB + 65536, 65536)]
        assert no_hole == [nbd.STATE_ZERO], no_hole
    one = []
    handle.block_status(8 * MIB, 0, lambda name, offset, entries, error: one.append(len(entries)),
                        nbd.CMD_FLAG_REQ_ONE)
    assert one == [2, 2], one
    assert all(depth in (0, 1, 2) for _, _, depth in status(handle, 0, 8 * MIB, "qemu:allocation-depth"))

    # Structured reads; DF asks for one piece.
    data, _ = chunks(handle, 2 * MIB - 4096, 12 * 65536)
    assert data == bytes(handle.pread(12 * 65536, 2 * MIB - 4096))
    _, whole = chunks(handle, 2 * MIB - 4096, 65536, nbd.CMD_FLAG_DF)
    assert len(whole) == 1, whole

    # A trim says nothing of the bytes but that they are defined from then on, and touches nothing else.
    handle.trim(MIB, 4 * MIB)
    handle.trim(odd(1000), 6 * MIB + odd(1))
    first = bytes(handle.pread(MIB, 4 * MIB))
    handle.flush()
    assert first == bytes(handle.pread(MIB, 4 * MIB))
    assert bytes(handle.pread(MIB, 3 * MIB)) == b"\x11" * MIB
    assert bytes(handle.pread(MIB, 5 * MIB)) == b"\x11" * MIB

    handle.cache(MIB, 0)
    handle.pwrite(b"\x44" * MIB, 5 * MIB)
    assert bytes(handle.pread(MIB, 5 * MIB)) == b"\x44" * MIB

    # What no server may do.
    refused((errno.EINVAL,), handle.pread, 4096, 8 * MIB)
    refused((errno.EINVAL,), handle.pread, 2 * block, 8 * MIB - block)
    refused((errno.ENOSPC, errno.EINVAL), handle.pwrite, b"x" * 2 * block, 8 * MIB - block)
    refused((errno.ENOSPC, errno.EINVAL), handle.zero, 4096, 8 * MIB)
    refused((errno.EINVAL,), handle.trim, 4096, (1 << 63) - 4096)
    refused((errno.EINVAL,), handle.pread, 4096, 0, 1 << 14)
    assert bytes(handle.pread(4096, MIB + 65536)) in (b"\x11" * 4096, bytes(4096))

    # Sixty-four requests at once, answered in any order.
    waiting = []
    for index in range(64):
        buffer = nbd.Buffer.from_bytearray(bytearray([index]) * odd(3000))
        waiting.append(handle.aio_pwrite(buffer, 6 * MIB + 65536 + index * odd(3000)))
    while waiting:
        handle.poll(-1)
        waiting = [cookie for cookie in waiting if not handle.aio_command_completed(cookie)]
    for index in range(64):
        data = bytes(handle.pread(odd(3000), 6 * MIB + 65536 + index * odd(3000)))
        assert data == bytes([index]) * odd(3000)
    handle.flush()
    handle.shutdown()


def simple(uri):
    """A client that knows no structured replies."""
    handle = connect(uri, structured=False, contexts=False)
    block = handle.get_block_size(nbd.SIZE_MINIMUM)
    some, at = (5000, 7 * MIB + 77) if block == 1 else (5 * block, 7 * MIB + block)
    assert not handle.get_structured_replies_negotiated()
    assert not handle.can_df()
    handle.pwrite(b"\x66" * some, at)
    handle.flush()
    around = bytes(handle.pread(some + 2 * block, at - block))
    assert around == b"\x11" * block + b"\x66" * some + b"\x11" * block
    refused((errno.EINVAL,), handle.pread, 4096, 8 * MIB)
    assert bytes(handle.pread(MIB, 3 * MIB)) == b"\x11" * MIB
    handle.shutdown()


def read_only(uri):
    handle = connect(uri)
    assert handle.is_read_only()
    assert not handle.can_trim() and not handle.can_zero()
    refused((errno.EPERM,), handle.pwrite, b"x" * 512, 0)
    refused((errno.EPERM,), handle.zero, 512, 0)
    refused((errno.EPERM,), handle.trim, 512, 0)
    assert bytes(handle.pread(8 * MIB, 0)) == b"\x11" * (8 * MIB)
    handle.flush()
    handle.shutdown()


def multi_conn(uri, pid):
    """Writes on three connections, one flush on a fourth, and no more server."""
    writers = [connect(uri) for _ in range(3)]
    flusher = connect(uri)
    assert all(handle.can_multi_conn() for handle in writers)
    for index in range(32):
        writers[index % 3].pwrite(bytes([index + 1]) * 8192, index * 200 * 1024 + 4096)
    flusher.flush()
    os.kill(int(pid), signal.SIGKILL)


{"commands": commands, "simple": simple, "read_only": read_only, "multi_conn": multi_conn}[sys.argv[1]](*sys.argv[2:])
print("good")
