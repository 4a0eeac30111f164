"""audit(poison=True) on the simulated device, where device memory is host memory: what is freed is
filled, and what is written after that is found. Fills and copies run at once there, so when they
run is tried on a GPU only."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "shim"))

torch = pytest.importorskip("torch")
if torch.version.cuda is None or torch.cuda.is_available():
    pytest.skip("needs a torch with CUDA, and no GPU", allow_module_level=True)

import build  # noqa: E402

HEAD = """
import ctypes, json
import simulated
import torch
import esper_alloc
from esper_alloc import _torch

main, side = torch.cuda.current_stream(), torch.cuda.Stream()
SIZE = 1 << 20


def block(size=SIZE):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def bytes_at(address, size=SIZE):
    return set(ctypes.string_at(address, size))


def write(address, value=7, size=1):
    ctypes.memset(address, value, size)


def clear(x):
    x.copy_(torch.zeros(x.shape, dtype=torch.uint8))
    return x


def say(**answer):
    print(json.dumps(answer))
"""


def run(library: Path, code: str, **env: str) -> Any:
    return build.answer(library, HEAD + code, **{"ESPER_ALLOC_SEGMENTS": "classic", **env})


def test_freed_memory_is_filled_and_handed_out_as_it_is(library: Path) -> None:
    found = run(
        library,
        """
with esper_alloc.audit(poison=True) as report:
    x = clear(block())
    at = x.data_ptr()
    before = bytes_at(at)
    del x
    after = bytes_at(at)
    x = block()
    same, contents = x.data_ptr() == at, bytes_at(at)
    clear(x)
    mine = bytes_at(at)
say(before=[*before], after=[*after], same=same, contents=[*contents], mine=[*mine],
    found=report.text())
""",
    )
    assert found == {
        "before": [0], "after": [255], "same": True, "contents": [255], "mine": [0],
        "found": "esper_alloc audit: 0 findings",
    }  # fmt: skip


SEARCHES = """
from esper_alloc.auditor import auditing

asked = []


@ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ubyte,
    ctypes.POINTER(ctypes.c_ulonglong), ctypes.c_void_p,
)
def search(memory, size, byte, least, stream):
    "What the kernel does."
    asked.append(size)
    data, poison = ctypes.string_at(memory, size), bytes([byte]) * 16
    written = [at for at in range(0, size, 16) if data[at:at + 16] != poison]
    least[0] = min([least[0], *written])
    return FAILS


if FAILS is not None:
    auditing._search_kernel = lambda: ctypes.cast(search, ctypes.c_void_p).value
"""


@pytest.mark.parametrize("fails", [0, 209, None])  # 209: no code for this GPU; None: no kernel
def test_a_late_write_is_found_with_its_history(library: Path, fails: int | None) -> None:
    found = run(
        library,
        SEARCHES.replace("FAILS", str(fails))
        + """
def use():
    x = clear(block())
    at = x.data_ptr()
    del x
    return at

with esper_alloc.audit(poison=True) as report:
    at = use()
    write(at + SIZE - 5)
    y = block()
    again = block()
[finding] = report.findings
say(
    kind=finding.kind, offset=finding.address - at, size=finding.size,
    allocated=finding.allocated.frames[1].function, freed=finding.place.frames[0].function,
    handed_out=finding.later.place.frames[1].function, text=finding.text(), asked=asked,
)
""",
    )
    text = found.pop("text")
    assert found.pop("asked") == ([] if fails is None else [1 << 20])
    assert found == {
        "kind": "late-write", "offset": (1 << 20) - 5, "size": 1 << 20, "allocated": "use",
        "freed": "use", "handed_out": "<module>",
    }  # fmt: skip
    assert text.startswith("written after it was freed")
    assert "found when it was handed out again" in text


def test_a_piece_is_checked_when_it_is_handed_out(library: Path) -> None:
    found = run(
        library,
        """
with esper_alloc.audit(poison=True) as report:
    x = block(4 * SIZE)
    at = x.data_ptr()
    del x
    write(at + 3 * SIZE)
    first = block(2 * SIZE)
    early = len(report.findings)
    second = block(2 * SIZE)
say(pieces=[first.data_ptr() - at, second.data_ptr() - at], early=early,
    late=[f.address - at for f in report.findings])
""",
    )
    assert found == {"pieces": [0, 2 << 20], "early": 0, "late": [3 << 20]}


def test_random_frees_and_late_writes(library: Path) -> None:
    """The GPU's program: every late write is found when its memory is handed out, and nobody else's
    bytes change."""
    found = run(
        library,
        f"""
import sys

sys.path[:0] = {[str(TESTS / "gpu" / "programs"), str(TESTS / "gpu")]!r}


class Driver:
    "What strays() asks of CUDA's driver. The simulated device's memory is the host's."

    def cuMemsetD8_v2(self, address, value, size):
        ctypes.memset(address.value, value.value, size.value)
        return 0

    def cuMemcpyDtoH_v2(self, buffer, address, size):
        ctypes.memmove(buffer, address.value, size.value)
        return 0


import audit

ctypes.CDLL = lambda name: Driver()
audit.strays()
""",
    )
    assert found["expected"] > 20
    assert found == {**found, "found": found["expected"], "wrong": 0, "kinds": ["late-write"]}


def test_marked_memory_is_filled_too(library: Path) -> None:
    found = run(
        library,
        """
with esper_alloc.audit(poison=True) as report:
    x = clear(block())
    at = x.data_ptr()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x.clone()
    x.record_stream(side)
    del x
    marked = bytes_at(at)
    x = clear(block())
    where = x.data_ptr()
    esper_alloc.touch(x, side)
    del x
    touched = bytes_at(where)
    simulated.time_passes()
    torch.cuda.synchronize()
say(marked=[*marked], touched=[*touched], found=report.text())
""",
    )
    assert found["marked"] == [255] and found["touched"] == [255]
    assert found["found"] == "esper_alloc audit: 0 findings"


def test_a_stream_that_an_operator_used_comes_before_the_fill(library: Path) -> None:
    """With automatic uses: then the stream of the fill has the memory as well, behind it."""
    found = run(
        library,
        """
def users(address):
    return [
        int(entry["stream"])
        for entry in torch.cuda.memory._snapshot()["external_annotations"]
        if entry.get("name") == "esper_alloc.use" and int(entry["address"]) == address
    ]

answers = {}
for uses in ("marked", "automatic"):
    esper_alloc.enable(uses=uses)
    del_me = block()
    del del_me
    with esper_alloc.audit(poison=True):
        x = clear(block())
        at = x.data_ptr()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            simulated.work(side)
            y = x.clone()
        del x
        answers[uses] = [one == side.cuda_stream for one in users(at)]
        simulated.time_passes()
        torch.cuda.synchronize()
say(**answers)
""",
    )
    assert found["marked"] == [] and sorted(found["automatic"]) == [False, True]


def test_memory_that_went_back_to_the_driver_is_not_taken_for_poison(library: Path) -> None:
    found = run(
        library,
        """
with esper_alloc.audit(poison=True) as report:
    x = block(32 * SIZE)
    at = x.data_ptr()
    del x
    torch.cuda.empty_cache()
    x = block(32 * SIZE)
    same = x.data_ptr() == at
say(same=same, found=report.text())
""",
    )
    assert found == {"same": True, "found": "esper_alloc audit: 0 findings"}


def test_nothing_is_filled_afterwards(library: Path) -> None:
    found = run(
        library,
        """
with esper_alloc.audit(poison=True) as report:
    pass
x = clear(block())
at = x.data_ptr()
del x
say(contents=[*bytes_at(at)])
""",
    )
    assert found["contents"] == [0]


@pytest.mark.parametrize(
    "env, said",
    [
        ({"ESPER_SIMULATED_ALLOCATOR": "native"}, "on esper_alloc's memory only"),
        ({"ESPER_ALLOC_SEGMENTS": "auto"}, "needs classic segments"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "needs classic segments"),
    ],
)
def test_where_memory_cannot_be_poisoned_it_says_so(
    library: Path, env: dict[str, str], said: str
) -> None:
    found = run(
        library,
        """
try:
    esper_alloc.audit(poison=True).__enter__()
except RuntimeError as error:
    say(said=str(error), running=_torch.audit_state()[0])
""",
        **env,
    )
    assert said in found["said"] and not found["running"]


def test_a_mark_of_its_own_stream_does_not_keep_memory(library: Path) -> None:
    found = run(
        library,
        """
with esper_alloc.audit(poison=True) as report:
    x = clear(block())
    x.record_stream(main)
    at = x.data_ptr()
    del x
    y = block()
    say(same=y.data_ptr() == at, contents=[*bytes_at(y.data_ptr())], found=report.text())
""",
    )
    assert found == {
        "same": True, "contents": [255], "found": "esper_alloc audit: 0 findings",
    }  # fmt: skip
