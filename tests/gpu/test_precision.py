"""Memory serves again when its last use is over, not when the stream is idle.

Measured by the benchmark's own function: 64 MiB are read on another stream for
2 ms, marked, 50 ms of unrelated work are queued there, the tensor is dropped,
and the next allocation of that size comes at once.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from helper import ROOT, run_python
from scenario import NATIVE, OURS


def measure(allocator: str, protection: str) -> dict[str, Any]:
    code = (
        "import json, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
        "import marks\n"
        f"print(json.dumps(marks.precision({allocator!r}, {protection!r})))\n"
    )
    printed = run_python(code, env={"CUDA_DEVICE_MAX_CONNECTIONS": "32"})
    return json.loads(printed.strip().splitlines()[-1])


@pytest.mark.parametrize("protection", ["record_use", "using"])
def test_a_mark_ends_the_wait_at_the_last_read(protection: str) -> None:
    found = measure(OURS, protection)
    assert found["wrong"] == 0
    assert found["reused"] == found["tries"]
    assert found["grown_mib"] == 0
    # The host waited for the read (2 ms) and not for the unrelated work (50 ms).
    assert found["beside_work"] >= 0.9 * found["tries"]
    assert found["gpu_wait_ms"] < 15


@pytest.mark.parametrize("allocator", [OURS, NATIVE])
def test_record_stream_waits_for_the_unrelated_work(allocator: str) -> None:
    found = measure(allocator, "record_stream")
    assert found["wrong"] == 0
    assert found["reused"] == 0
    assert found["serves_again_ms"] > 25
