"""What else runs while the host is held back, and what shows it, on the simulated device."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from on_sim import build
from processes import output_of

#: A call that is held back is let go by another Python thread, or ends in vain after 20 s.
PROGRAM = """
import ctypes, json, os, threading, time
import simulated
import torch

x = torch.ones(5).to("cuda")
with_gil = ctypes.PyDLL(os.environ["ESPER_SIMULATED"])

def let_go():
    while not simulated.library.sim_is_held():
        time.sleep(0.001)
    simulated.library.sim_let_go()

def held_back(call):
    other = threading.Thread(target=let_go)
    other.start()
    went = call()
    other.join()
    return went

calls = [with_gil.core_hold_back, simulated.library.core_hold_back]
calls += [simulated.library.core_hold_back_elsewhere, calls[0]]  # a thread without Python, too
print(json.dumps([held_back(call) for call in calls]))
simulated.library.core_hold_back_at_the_end()
"""


def test_other_python_threads_go_on(library: Path) -> None:
    done = output_of("-c", PROGRAM, env={**os.environ, **build.environment(library)})
    found, at_the_end = done.splitlines()
    assert json.loads(found) == [1, 1, 1, 1]
    assert at_the_end == "let go at the end: 1"


@pytest.mark.parametrize(("given", "found"), [("", 128 << 20), ("1048576", 1 << 20), ("off", None)])
def test_a_snapshot_has_the_allowance(library: Path, given: str, found: Any) -> None:
    assert build.answer(
        library,
        """
import json
import simulated
import torch
from esper_alloc.replay.snapshot import with_uses

x = torch.ones(5).to("cuda")
settings = with_uses(torch.cuda.memory._snapshot())["allocator_settings"]
print(json.dumps([settings["esper_alloc_allowance"], "max_split_size" in settings]))
""",
        ESPER_ALLOC_ALLOWANCE=given,
    ) == [found, True]
