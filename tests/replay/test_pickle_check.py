"""What the check of a pickle's bytes makes of nesting: how deep values may be,
and that no trick of the pickle's stack and memo leads past it."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from histories import Recorder, snapshot_of
from hypothesis import example, given, settings, strategies as st

from esper_alloc import _core
from esper_alloc.replay import snapshot
from esper_alloc.replay.snapshot import SnapshotError, load_snapshot

ROOT = Path(__file__).resolve().parents[2]
TRACES = sorted(ROOT.glob("examples/traces/*.gz")) + sorted(ROOT.glob("tests/traces/*.gz"))
PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
LIMIT = 100

TOO_DEEP = f"nests containers more than {LIMIT} deep"
CIRCULAR = "changes a container that already is part of another, or of itself"
HUGE_KEY = "uses a tuple with more than 1000 values as a key"
DAMAGED = "cannot follow what comes before it"


def small_snapshot() -> dict[str, Any]:
    recorder = Recorder()
    recorder.free(recorder.alloc(1000))
    return snapshot_of(recorder)


def program(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


def refusal(data: bytes) -> str:
    with pytest.raises(ValueError) as caught:
        _core.check_pickle(data)
    return str(caught.value)


def nested(kind: type, levels: int) -> Any:
    value: Any = kind()
    for _ in range(levels - 1):
        value = {"key": value} if kind is dict else kind([value])
    return value


def depth(root: Any) -> int:
    """Levels of containers, without recursion; fails for what contains itself."""
    depths: dict[int, int] = {}
    entered: set[int] = set()
    todo = [(root, False)]
    while todo:
        value, left = todo.pop()
        if not isinstance(value, (tuple, list, dict)) or id(value) in depths:
            continue
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
        if left:
            depths[id(value)] = 1 + max((depths.get(id(part), 0) for part in parts), default=0)
        else:
            assert id(value) not in entered, "it contains itself"
            entered.add(id(value))
            todo.append((value, True))
            todo += [(part, False) for part in parts]
    return depths.get(id(root), 0)


# ---- the file that ended the process -------------------------------------------------


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        b"}(N" + b"\x85" * 2_000_000 + b"Nu",
        b"}N" + b"\x85" * 2_000_000 + b"Ns",
        b"N" + b"\x85" * 2_000_000,
        b"(" * 2_000_000 + b"t" * 2_000_000,
        b"]" * 2_000_000 + b"a" * 1_999_999,
        b"N" + b"q\x00\x85h\x00\x86" * 500_000,
    ],
    ids=["key", "key alone", "tuple", "marks", "list", "memo"],
)
def test_a_file_nested_two_million_deep_is_an_error_in_words(tmp_path, body, compressed):
    path = tmp_path / "deep"
    data = program(body)
    path.write_bytes(gzip.compress(data) if compressed else data)
    with pytest.raises(SnapshotError, match=TOO_DEEP) as caught:
        load_snapshot(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: refused: byte ")
    assert "_dump_snapshot()" in message and "\n" not in message


def test_the_command_says_it_too(tmp_path):
    path = tmp_path / "deep.pickle"
    path.write_bytes(gzip.compress(program(b"}(N" + b"\x85" * 2_000_000 + b"Nu")))
    assert path.stat().st_size < 2048
    done = subprocess.run(
        [sys.executable, "-m", "esper_alloc", "replay", str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"esper_alloc replay: {path}: refused: byte ")
    assert TOO_DEEP in done.stderr and done.stderr.count("\n") == 1


# ---- the limit ------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", [tuple, list, dict])
def test_the_limit_is_exact(kind, protocol):
    value = nested(kind, LIMIT)
    assert depth(value) == LIMIT
    assert snapshot._unpickled(pickle.dumps(value, protocol=protocol)) == value
    with pytest.raises(SnapshotError, match=TOO_DEEP):
        snapshot._unpickled(pickle.dumps(nested(kind, LIMIT + 1), protocol=protocol))


@pytest.mark.parametrize(
    "wrap",
    [
        b"\x85",
        b"N\x86",
        b"NN\x87",
        b"q\x00]h\x00a",
        b"q\x00](h\x00Ne",
        b"q\x00}Nh\x00s",
        b"q\x00}(NNKxh\x00u",
        b"q\x00(h\x00t",
        b"q\x00(Nh\x00l",
        b"q\x00(Nh\x00d",
        b"r\x00\x00\x00\x00(j\x00\x00\x00\x00t",
        b"p0\n(g0\nt",
        b"2\x86",
    ],
)
def test_every_way_to_wrap_a_value_counts(wrap):
    _core.check_pickle(program(b"N" + wrap * LIMIT))
    pickle.loads(program(b"N" + wrap * LIMIT))
    assert TOO_DEEP in refusal(program(b"N" + wrap * (LIMIT + 1)))


@pytest.mark.parametrize("detour", [b"\x940h\x00", b"q\x000h\x00", b"p0\n0g0\n", b"20", b"(1"])
def test_a_detour_through_memo_and_stack_hides_no_depth(detour):
    deep = b"N" + b"\x85" * LIMIT + detour
    _core.check_pickle(program(deep))
    assert TOO_DEEP in refusal(program(deep + b"\x85"))


def test_a_key_counts_as_much_as_a_value():
    _core.check_pickle(program(b"}N" + b"\x85" * (LIMIT - 1) + b"Ns"))
    assert TOO_DEEP in refusal(program(b"}N" + b"\x85" * LIMIT + b"Ns"))


def test_what_is_left_on_the_stack_counts_though_it_is_not_returned():
    """The loader builds it, and frees it."""
    assert TOO_DEEP in refusal(program(b"N" + b"\x85" * (LIMIT + 1) + b"0N"))


# ---- circles --------------------------------------------------------------------------


def circles() -> list[Any]:
    alone: list[Any] = []
    alone.append(alone)
    table: dict[str, Any] = {}
    table["self"] = table
    around: list[Any] = [{}]
    around[0]["up"] = (around,)
    in_tuple: Any = ([],)
    in_tuple[0].append(in_tuple)
    many: list[Any] = list(range(3000))
    many.append(many)
    return [alone, table, around, in_tuple, many]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", circles(), ids=["list", "dict", "both", "tuple", "batches"])
def test_what_contains_itself_is_refused(value, protocol):
    with pytest.raises(SnapshotError, match=CIRCULAR):
        snapshot._unpickled(pickle.dumps(value, protocol=protocol))


@pytest.mark.parametrize(
    "body",
    [
        b"]2a",  # into itself
        b"]q\x00]h\x00ah\x00Na",  # after another list took it
        b"}q\x00\x85h\x00NNs",  # after a tuple took it
        b"]q\x00(h\x00lh\x00(Ne",
        b"]q\x00(Nh\x00dh\x00(Ne",
        b"]q\x00}Nh\x00sh\x00(Ne",
    ],
)
def test_a_container_that_another_holds_may_not_change(body):
    pickle.loads(program(body))
    assert CIRCULAR in refusal(program(body))


def test_a_container_may_grow_while_only_the_stack_and_the_memo_have_it():
    data = program(b"]q\x002h\x00NaNa0(NNe" + b"0h\x00Na")
    assert _core.check_pickle(data) and pickle.loads(data) == [None] * 5


# ---- keys -----------------------------------------------------------------------------


def test_a_key_that_takes_for_ever_to_hash_is_refused():
    twice = b"2\x86"  # a pair of the value and itself
    assert HUGE_KEY in refusal(program(b"}N" + twice * 60 + b"Ns"))
    assert HUGE_KEY in refusal(program(b"}(N" + twice * 60 + b"Nu"))
    assert HUGE_KEY in refusal(program(b"(N" + twice * 60 + b"Nd"))
    _core.check_pickle(program(b"N" + twice * 60))  # as a value it may be so large


def test_a_key_has_at_most_a_thousand_values():
    for value in (tuple(range(999)), ((1,) * 499, (2,) * 498)):  # and each tuple is one
        assert snapshot._unpickled(pickle.dumps({value: 1})) == {value: 1}
        with pytest.raises(SnapshotError, match=HUGE_KEY):
            snapshot._unpickled(pickle.dumps({(*value, 3): 1}))


# ---- the stack and the memo -----------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"(", b"0", b"1", b"2", b"(2", b"t", b"l", b"d", b"e", b"u", b"\x94", b"(\x94"),
        *(b"a", b"Na", b"N(a", b"](Na", b"s", b"}Ns", b"}(NNs", b"}N(Ns", b"\x85", b"N(\x85"),
        *(b"N\x86", b"NN\x87", b"(Nd", b"}(Nu", b"NNa", b")Na", b"}Na", b"}(Ne", b"]NNs", b"NNNs"),
        *(b"]K\x00NNu", b"](K\x00Nu", b"h\x00", b"j\x00\x00\x00\x00", b"g0\n", b"(e", b"(u"),
        *(b"]((Ne", b"}((NNu"),
        *(b"Ng\n", b"Nq\x00g-0\n", b"Nq\x00h\x01", b"Nq\x01h\x00", b"q\x00", b"N(q\x00", b"N("),
    ],
)
def test_what_takes_what_is_not_there_is_refused(body):
    message = refusal(program(body))
    assert message.startswith("not a memory snapshot: byte ") and DAMAGED in message


def test_a_memo_counts_its_entries_as_the_loader_does():
    """An index that was left out makes the next one that is counted a used one."""
    data = program(b"Nq\x01]\x94h\x01Na0h\x01")
    assert pickle.loads(data) == [None]
    assert _core.check_pickle(data)


def test_the_check_stops_at_its_limit():
    data = program(b"(" + b"N" * 1_000_000 + b"l")
    whole = _core.check_pickle(data)
    assert whole > 8_000_000
    assert _core.check_pickle(data, whole) == whole
    assert 2_000_000 < _core.check_pickle(data, 2_000_000) < 2_000_100


SNIPPETS = [
    *(b"N", b"K\x01", b"]", b"}", b")", b"(", b"\x85", b"\x86", b"\x87", b"t", b"l", b"d"),
    *(b"a", b"e", b"s", b"u", b"0", b"1", b"2", b"\x94", b"q\x00", b"q\x01", b"q\x02", b"h\x00"),
    *(b"h\x01", b"h\x02", b"g0\n", b"p1\n", b"r" + struct.pack("<I", 1), b"\x8c\x01x", b"I7\n"),
    *(b"N\x85\x85", b"]Na", b"(NNt", b"}NNs", b"h\x00\x85", b"h\x00h\x00a", b"2\x86", b"2a"),
    *(b"\x85" * 30, b"h\x00" + b"\x85" * 50 + b"q\x00", b"]h\x00aq\x00"),
]


def admitted(data: bytes) -> bool:
    try:
        return _core.check_pickle(data) > 0
    except ValueError:
        return False


@settings(max_examples=1000, deadline=None)
@given(pieces=st.lists(st.sampled_from(SNIPPETS), max_size=60))
@example(pieces=[b"N", b"\x85" * 30, b"\x85" * 30, b"\x85" * 30, b"\x85" * 10])
@example(pieces=[b"]", b"q\x00", b"h\x00", b"a"])
def test_what_is_admitted_is_as_shallow_as_promised(pieces):
    """The loader itself builds what is admitted, and its depth is counted afterwards."""
    body = b""
    for piece in pieces:
        if admitted(program(body + piece + b"N")):
            body += piece
    data = program(body if admitted(program(body)) else body + b"N")
    unpickler = pickle.Unpickler(io.BytesIO(data))
    try:
        value = unpickler.load()
    except TypeError as error:  # a list as a key: no matter of the check
        assert "unhashable" in str(error)
        return
    for built in (value, *unpickler.memo.copy().values()):
        assert depth(built) <= LIMIT


# ---- what must be admitted ------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=40)
)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | inner.map(lambda shared: [shared, (shared,), {"again": shared}])
        | st.dictionaries(
            st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner, max_size=4
        )
    ),
    max_leaves=40,
)


def has_bytes(value: Any) -> bool:
    if isinstance(value, dict):
        return any(has_bytes(part) for pair in value.items() for part in pair)
    return isinstance(value, bytes) or (
        isinstance(value, (list, tuple)) and any(map(has_bytes, value))
    )


@given(value=PLAIN, protocol=st.sampled_from(PROTOCOLS))
def test_all_plain_data_is_admitted(value, protocol):
    if protocol < 3 and has_bytes(value):
        return  # these protocols write bytes as a call
    assert depth(value) <= LIMIT
    assert snapshot._unpickled(pickle.dumps(value, protocol=protocol)) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_large_containers_are_written_in_batches_and_admitted(protocol):
    shared = [{"name": "f", "line": 3}] * 10
    value = {
        "list": [shared for _ in range(5000)],
        "dict": {number: shared for number in range(5000)},
        "tuple": tuple(range(5000)),
    }
    assert snapshot._unpickled(pickle.dumps(value, protocol=protocol)) == value


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_recorded_snapshots_are_admitted(path):
    data = gzip.decompress(path.read_bytes())
    assert _core.check_pickle(data) >= len(data)
    value = pickle.loads(data)
    assert depth(value) < 20
    for protocol in PROTOCOLS if len(data) < 1_000_000 else ():
        again = pickle.dumps(value, protocol=protocol)
        assert _core.check_pickle(again) >= len(again)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_snapshot_that_python_s_own_pickler_writes_is_admitted(protocol):
    """Not the C one: some programs use it, and it frames otherwise."""
    value = small_snapshot()
    assert snapshot._unpickled(pickle._dumps(value, protocol=protocol)) == value
