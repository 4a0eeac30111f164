"""A stream that waits for another one before memory is allocated there, and is the first to use it,
through PyTorch on the simulated device: tests/episodes/rule_2.c has the same in C, on a GPU as well."""

from pathlib import Path
from typing import Any

import pytest
from on_sim import build

CODE = """
import json
import os

import simulated
import torch

import esper_alloc

BYTES = 32 << 20
USES = os.environ["USES"]
esper_alloc.enable(uses=USES)
main = torch.cuda.current_stream()
reader, comm = torch.cuda.Stream(), torch.cuda.Stream()


def touch(x, stream, writes):
    with torch.cuda.stream(stream):
        x.detach()  # an operator looks
    simulated.reach(stream, x.data_ptr(), x.nbytes, writes)


def protect(x, stream, how):
    if how == "record_stream":
        x.record_stream(stream)
    elif how in ("record_use", "until_free"):
        with torch.set_grad_enabled(how == "until_free"):
            esper_alloc.record_use(x, stream)


def made(owner, user):
    with torch.cuda.stream(owner):
        x = torch.empty(BYTES, dtype=torch.uint8, device="cuda")
    simulated.own(user, x.data_ptr(), x.nbytes)  # all earlier accesses come before its future
    touch(x, user, True)
    return x


def failures(how, memory):
    before = simulated.failures()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    owner = reader if how == "own" else main
    blocks = [made(owner, owner) for _ in range(1 if memory == "short" else 6)]
    if memory == "short":
        limit = torch.cuda.memory_reserved() + BYTES // 2
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    reader.wait_stream(main)
    for x in blocks:
        touch(x, reader, False)
        protect(x, reader, how)
    while blocks:
        x = blocks.pop()
        simulated.disown(x.data_ptr())
        del x
    comm.wait_stream(main)
    x = made(main, comm)
    protect(x, comm, how)
    main.wait_stream(comm)
    simulated.disown(x.data_ptr())
    del x
    torch.cuda.set_per_process_memory_fraction(1.0)
    return simulated.failures() - before


ways = ["record_use", "until_free", "record_stream"] if USES == "marked" else []
cases = [(how, memory) for how in [*ways, "nothing"] for memory in ("short", "plenty")]
print(json.dumps({" ".join(case): failures(*case) for case in [*cases, ("own", "short")]}))
"""


def found(library: Path, uses: str, **env: str) -> dict[str, int]:
    answer: Any = build.answer(library, CODE, USES=uses, SIM_HAS_ORACLE="1", **env)
    return dict(answer)


@pytest.mark.parametrize("allowance", ["1", str(128 << 20), "off"])
@pytest.mark.parametrize("env", [{}, {"SIM_MAPS_PAGES": "1"}], ids=["classic", "mapped"])
@pytest.mark.parametrize("uses", ["marked", "automatic"])
def test_what_the_writer_gets_is_over_for_all(
    library: Path, uses: str, allowance: str, env: dict[str, str]
) -> None:
    answer = found(library, uses, ESPER_ALLOC_ALLOWANCE=allowance, **env)
    controls = {case for case in answer if case.startswith("nothing") and uses == "marked"}
    assert {case for case, count in answer.items() if count} == controls
    assert len(answer) > len(controls) > 0 or uses == "automatic"
