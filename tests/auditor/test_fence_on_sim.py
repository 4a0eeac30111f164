"""audit(fence=True) on the simulated device: what is freed is unmapped, and an access to it faults
and is named. No kernel runs there: accesses are copies and fills of the CUDA runtime."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from on_sim import Run, build, running

HEAD = """
import ctypes
import simulated
import torch
import esper_alloc
from esper_alloc import _torch
from simulated import say

main, side = torch.cuda.current_stream(), torch.cuda.Stream()
SIZE = 1 << 20
PAGE = 2 << 20
runtime = ctypes.CDLL(None)
runtime.cudaMemsetAsync.argtypes = [
    ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
]


def block(size=SIZE):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def write(address, size=1):
    "What a stray kernel does, which PyTorch does not see."
    runtime.cudaMemsetAsync(address, 7, size, None)


def settle():
    "What was enqueued is over, and the allocator finds that."
    simulated.time_passes()
    torch.cuda.synchronize()
    x = block(512)
    del x


def fault_of(run):
    "What AuditError says of a part of a program."
    try:
        with esper_alloc.audit(fence=True) as report:
            run()
    except esper_alloc.AuditError as error:
        assert error.fault is report.fault and str(error) == error.fault.text()
        return error
    return None
"""


run = running(HEAD, SIM_MAPS_PAGES="1")
run_classic = running(HEAD)


def test_a_stray_write_after_the_free_faults_and_the_memory_is_named(run: Run) -> None:
    found = run("""
def use():
    x = block()
    at = x.data_ptr()
    del x
    return at


def program():
    at = use()
    settle()
    for _ in range(3):
        block()
    write(at)
    torch.cuda.synchronize()


error = fault_of(program)
last = error.fault.freed
mine = [one for one in last if one.freed.frames[0].function == "use"]
say(cause=str(error.__cause__).splitlines()[0], suspects=len(error.fault.suspects),
    functions=[one.allocated.frames[1].function for one in mine], size=mine[0].size,
    ago=mine[0].frees_ago, order=[one.frees_ago for one in last], text=str(error))
""")
    assert "illegal memory access" in found["cause"]
    assert found["functions"] == ["use"] and found["size"] == 1 << 20
    assert found["ago"] == 4 and found["order"] == [0, 1, 2, 3, 4]
    assert found["suspects"] == 0
    assert "an access faulted" in found["text"] and "4 frees and " in found["text"]


def test_a_stray_read_and_an_overrun_fault_too(run: Run) -> None:
    for stray in (
        "torch.cuda.cudart(); runtime.cudaMemcpyAsync(ctypes.c_void_p(host.data_ptr()), "
        "ctypes.c_void_p(at), ctypes.c_size_t(4), 2, None)",
        "write(y.data_ptr() + SIZE)",
    ):
        found = run(f"""
host = torch.empty(4)
y = None

def program():
    global y
    x = block()
    at = x.data_ptr()
    y = block()
    del x
    settle()
    {stray}


say(fault=fault_of(program) is not None)
""")
        assert found == {"fault": True}


def test_an_operator_on_freed_memory_is_a_suspect_before_cuda_knows(run: Run) -> None:
    found = run("""
class Borrowed:
    "Memory that nothing keeps, as by another library."
    def __init__(self, address):
        self.__cuda_array_interface__ = {
            "shape": (SIZE,), "typestr": "|u1", "data": (address, False), "version": 3,
        }


def program():
    x = block()
    y = torch.as_tensor(Borrowed(x.data_ptr()), device="cuda")
    z = block()
    del x
    settle()
    z.copy_(y)


error = fault_of(program)
[[finding, freed]] = error.fault.suspects
say(kind=finding.kind, line=finding.place.frames[0].function, operator=finding.later.operator,
    freed=finding.freed.frames[0].function, same=freed.address == finding.address,
    text=error.fault.text(), found=[f.kind for f in error.findings])
""")
    text = found.pop("text")
    assert found == {
        "kind": "used-after-free", "line": "program", "operator": "aten::copy_",
        "freed": "program", "same": True, "found": ["used-after-free"],
    }  # fmt: skip
    assert "Suspects, the likeliest first" in text and "used after it was freed" in text


def test_a_fault_on_another_device_is_found_at_the_end(run: Run) -> None:
    found = run("""
def program():
    with torch.cuda.device(1):
        x = block()
        at = x.data_ptr()
        del x
        settle()
        write(at)


error = fault_of(program)
say(fault=error is not None, device=error.fault.freed[-1].home.device)
""")
    assert found == {"fault": True, "device": 1}


@pytest.mark.parametrize("uses, count", [("marked", 1), ("automatic", 0)])
def test_unordered_work_before_the_free_is_a_suspect(run: Run, uses: str, count: int) -> None:
    """Automatic uses keep the memory until that work is over, so it is none then."""
    found = run(
        f"esper_alloc.enable(uses={uses!r})"
        """
def later():
    x = block()
    y = block()
    at = x.data_ptr()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y.copy_(x)
    del x
    settle()
    write(at)


block(512)
error = fault_of(later)
say(suspects=[[f.kind, f.freed.frames[0].function, freed is not None]
              for f, freed in error.fault.suspects])
"""
    )
    assert found["suspects"] == [["freed-in-use", "later", True]] * count


def test_memory_with_a_fence_is_not_shared_and_still_goes(run: Run) -> None:
    found = run("""
with esper_alloc.audit(fence=True):
    x = block()
    try:
        x.untyped_storage()._share_cuda_()
    except RuntimeError as error:
        said = str(error).splitlines()[0]
    del x
    settle()
say(said=said, mappings=simulated.mappings())
""")
    assert found["said"].startswith("memory with a fence cannot be shared with another process: ")
    assert found["mappings"] == 0


def test_an_address_from_elsewhere_is_looked_up(run: Run) -> None:
    found = run("""
with esper_alloc.audit(fence=True) as report:
    x = block()
    at = x.data_ptr()
    live = report.freed_at(at)
    del x
    found = report.freed_at(at + 100)
say(live=live, address=found.address == at, beyond=report.freed_at(at + SIZE),
    text=str(found), fault=report.fault)
""")
    assert found["live"] is None and found["beyond"] is None and found["fault"] is None
    assert found["address"] and "the last free" in found["text"]


def test_the_records_of_frees_are_bounded(run: Run) -> None:
    found = run(
        """
with esper_alloc.audit(fence=True) as report:
    x = block(512)
    first = x.data_ptr()
    del x
    for _ in range((1 << 16) - 1):
        block(512)
    kept = report.freed_at(first) is not None
    block(512)
    gone = report.freed_at(first) is None
say(kept=kept, gone=gone, most=len(_torch.audit_freed(1 << 20, False)))
""",
        SIM_CAPACITY_MB="4096",
    )
    assert found == {"kept": True, "gone": True, "most": 1 << 16}


@pytest.mark.parametrize(
    "env, said",
    [
        ({"ESPER_SIMULATED_ALLOCATOR": "native"}, "on esper_alloc's memory only"),
        ({}, "cannot map pages"),
    ],
)
def test_where_there_can_be_no_fence_it_says_so(
    run_classic: Run, env: dict[str, str], said: str
) -> None:
    code = """
before = block()
try:
    esper_alloc.audit(fence=True).__enter__()
except RuntimeError as error:
    say(said=str(error), running=_torch.audit_state()[0])
block()
"""
    found = run_classic(code, **env)
    assert said in found["said"] and not found["running"]


def test_the_command_tells_of_the_fault_at_its_end(library: Path, tmp_path: Path) -> None:
    script = tmp_path / "stray.py"
    script.write_text(
        HEAD
        + """
def use():
    x = block()
    at = x.data_ptr()
    del x
    return at

at = use()
settle()
write(at)
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", "import simulated, runpy, sys; sys.argv[0] = 'esper_alloc'; "
         "from esper_alloc.cli.main import main; sys.exit(main(sys.argv[1:]))",
         "audit", "--fence", "--json", str(script)],
        env={**os.environ, **build.environment(library), "SIM_MAPS_PAGES": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    said = json.loads(done.stderr[done.stderr.index("{") :])
    assert "illegal memory access" in said["fault"]["error"]
    functions = [one["freed"]["frames"][0]["function"] for one in said["fault"]["freed"]]
    assert functions == ["settle", "use"]
