"""Files that were made to crash whoever loads them, to fill the memory or to take for ever: each
ends in an error in words, within the limit, and can be interrupted."""

import gzip
import os
import pickle
import signal
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from histories import refusal
from processes import ROOT, python

from esper_alloc.replay import snapshot

DEEP = 2_000_000


def program(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        b"}(N" + b"\x85" * DEEP + b"Nu", b"}N" + b"\x85" * DEEP + b"Ns", b"N" + b"\x85" * DEEP,
        b"(" * DEEP + b"t" * DEEP, b"]" * DEEP + b"a" * (DEEP - 1),
        b"}" * DEEP + (b"Ns" * DEEP)[2:], b"N" + b"q\x00\x85h\x00\x86" * (DEEP // 4),
        b"]q\x00h\x00a",
    ],
    ids=["key", "key alone", "tuple", "marks", "list", "dict", "memo", "circle"],
)  # fmt: skip
def test_a_file_nested_two_million_deep_is_an_error_in_words(tmp_path, body, compressed):
    data = program(body)
    message = refusal(tmp_path / "deep", gzip.compress(data, 1) if compressed else data)
    assert message.startswith("not a memory snapshot: ") and "_dump_snapshot()" in message


@pytest.mark.parametrize("opcode", [b"\x8d", b"\x8e", b"\x96", b"\x95"])
@pytest.mark.parametrize("length", [1 << 60, (1 << 63) - 1, (1 << 64) - 1])
def test_a_length_beyond_the_file_is_an_error_in_words(tmp_path, opcode, length):
    body = opcode + struct.pack("<Q", length) + b"x"
    assert refusal(tmp_path / "length", program(body))


@pytest.mark.parametrize("opcode", [b"T", b"\x8b"])
def test_a_negative_length_is_an_error_in_words(tmp_path, opcode):
    body = opcode + struct.pack("<i", -5) + b"x"
    assert refusal(tmp_path / "length", program(body)).startswith("not a memory snapshot: ")


@pytest.mark.parametrize(
    "body", [b"Nr\xff\xff\xff\xff", b"Np99999999999\n", b"Np-1\n", b"h\x07", b"g-1\n", b"\x94"]
)
def test_a_memo_index_out_of_order_is_an_error_in_words(tmp_path, monkeypatch, body):
    """The memo is an array: an index can ask for many GiB."""
    monkeypatch.setattr(snapshot, "memory_limit", lambda: 1 << 30)
    assert refusal(tmp_path / "memo", program(body))


ENTRY = pickle.dumps({"action": "oom"}, protocol=2)[2:-1]

#: Small files. Each would take more than 150 MiB.
BOMBS = {
    "bytes": gzip.compress(program(b"B" + struct.pack("<I", 300 << 20)))
    + gzip.compress(bytes(1 << 20)) * 300,
    "dicts": gzip.compress(program(b"(" + b"}" * 4_000_000 + b"l"), 1),
    "memo": program(b"Nr" + struct.pack("<I", 1 << 27)),
    # A million times one entry: the process that replays it would need more than this one.
    "entries": gzip.compress(
        program(
            b"}(\x8c\x08segments]\x8c\x0ddevice_traces](("
            + ENTRY
            + b"r\0\1\0\0"
            + b"j\0\1\0\0" * 1_000_000
            + b"leu"
        ),
        1,
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_takes_no_more_than_the_limit(tmp_path, name):
    path = tmp_path / "bomb"
    path.write_bytes(BOMBS[name])
    code = """
        import resource, sys
        from esper_alloc.replay import snapshot
        snapshot.memory_limit = lambda: 120 << 20
        try:
            snapshot.load_snapshot(sys.argv[1])
        except snapshot.SnapshotError as error:
            print(error)
        status = open("/proc/self/status").read()  # getrusage() counts what came before exec()
        mine = int(status.partition("VmHWM:")[2].split()[0])
        print(max(mine, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) >> 10)
    """
    done = python("-c", textwrap.dedent(code), path, cwd=ROOT)
    said, peak = done.stdout.splitlines()
    assert said.startswith(f"{path}: loading it would take more than 0.1 GiB, three quarters of")
    assert "max_entries" in said
    assert int(peak) <= 150


def colliding(count: int) -> bytes:
    """A dict of integers with one hash: each insertion looks at all earlier ones."""
    pairs = []
    for factor in range(1, count + 1):
        number = pickle.encode_long(factor * sys.hash_info.modulus)
        pairs.append(b"\x8a" + bytes([len(number)]) + number + b"N")
    return program(b"}(" + b"".join(pairs) + b"u")


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def seconds_of_work(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=lambda one: one.name)
def test_a_file_that_takes_for_ever_ends_with_the_command(tmp_path, sent):
    path = tmp_path / "hash.pickle"
    path.write_bytes(colliding(400_000))  # minutes or more
    with subprocess.Popen(
        [sys.executable, "-m", "esper_alloc", "replay", str(path)],
        stderr=subprocess.PIPE, text=True, cwd=ROOT,
        # Tests that run in the background may have been started with this signal ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as command:  # fmt: skip
        children = Path(f"/proc/{command.pid}/task/{command.pid}/children")
        if not children.exists():
            command.kill()
            pytest.skip("this kernel does not tell of children")
        while not (readers := children.read_text().split()):
            time.sleep(0.01)
        [reader] = map(int, readers)
        while seconds_of_work(reader) < 0.5:
            time.sleep(0.01)
        command.send_signal(sent)
        _, said = command.communicate(timeout=600)
    assert command.returncode == (130 if sent == signal.SIGINT else -sent)
    assert said == ""
    while running(reader):
        time.sleep(0.01)
