"""A stream that waits for another one before memory is allocated there, and is the first to use it:
right under PyTorch's own allocator, and so here. The allocator must make no stream wait, since this
one would not."""

from __future__ import annotations

from typing import Any

import pytest
from scenario import once, run_program

TRIES = 10
ALLOWANCES = ["0", "128MiB"]
MARKED = [
    *(
        f"{how}-{memory}"
        for how in ("record_use", "until_free", "record_stream")
        for memory in ("short", "plenty", "captured")
    ),
    "own-short",
]
AUTOMATIC = ["nothing-short", "nothing-plenty", "nothing-captured", "own-short"]
#: The same programs where nothing protects what they read.
CONTROLS = ["nothing-short", "nothing-plenty", "nothing-captured"]


@once
def found(uses: str, cases: tuple[str, ...], allowance: str, segments: str) -> dict[str, Any]:
    env = {"ESPER_ALLOC_ALLOWANCE": allowance, "ESPER_ALLOC_SEGMENTS": segments}
    return run_program("wait_then_allocate", uses, str(TRIES), *cases, env=env)


@pytest.mark.parametrize("segments", ["classic", "mapped"])
@pytest.mark.parametrize("allowance", ALLOWANCES)
@pytest.mark.parametrize(
    "uses, case",
    [*(("marked", one) for one in MARKED), *(("automatic", one) for one in AUTOMATIC)],
)
def test_readers_see_the_old_values(uses: str, case: str, allowance: str, segments: str) -> None:
    cases = tuple(MARKED if uses == "marked" else AUTOMATIC)
    answer = found(uses, cases, allowance, segments)[case]
    assert answer["tries"] == TRIES
    assert answer["wrong"] == 0, answer
    if case.endswith("short"):  # there is no other memory, and only the host may wait
        assert answer["waited"] == TRIES


@pytest.mark.parametrize("case", CONTROLS)
def test_without_protection_they_do_not(case: str) -> None:
    """In classic segments: pages of mapped ones may move away under the reader."""
    answer = found("marked", tuple(CONTROLS), "0", "classic")[case]
    assert answer["wrong"] > TRIES / 2, answer
