"""Automatic uses on the simulated device: which streams memory waits for that nobody marked.

There are no kernels, so the operators here copy, fill with zeros, or only look."""

from pathlib import Path

import pytest
from on_sim import Run, build, running

HEAD = """
import simulated
import torch
import esper_alloc
from esper_alloc import _torch
from simulated import say

esper_alloc.enable(uses="automatic")
MIB = 1 << 20


def empty(device=0, mib=3):
    return torch.empty(mib * MIB, dtype=torch.uint8, device=torch.device("cuda", device))


def uses_of(x, **names):
    "The names of the streams that x owes a use to; `all` stands for all of a device."
    if not isinstance(x, int):
        x = x.untyped_storage().data_ptr()
    names = {stream.cuda_stream: name for name, stream in names.items()}
    return sorted(
        names.get(int(entry["stream"]), "all")
        for entry in torch.cuda.memory._snapshot()["external_annotations"]
        if entry.get("name") == "esper_alloc.use" and int(entry["address"]) == x
    )


def begin():
    "Two streams, which the allocator has noticed."
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    del_me = empty()
    del del_me
    assert _torch.is_observing()
    return a, b

"""


run = running(HEAD)


def test_each_stream_that_an_operator_runs_on_is_noted(run: Run) -> None:
    found = run("""
a, b = begin()
x, host = empty(), torch.empty(3 * MIB, dtype=torch.uint8)
x.zero_()
at_home = uses_of(x, a=a, b=b)
with torch.cuda.stream(a):
    host.copy_(x)          # to the host
    x.copy_(host)          # from it
after_a = uses_of(x, a=a, b=b)
with torch.cuda.stream(b):
    x.zero_()              # in place
    y = empty(mib=32)      # a result: it belongs to b
    y[: 3 * MIB].copy_(x)
say(at_home=at_home, a=after_a, b=uses_of(x, a=a, b=b), y=uses_of(y, a=a, b=b))
""")
    assert found == {"at_home": [], "a": ["a"], "b": ["a", "b"], "y": []}


def test_marked_is_the_default_and_can_be_had_back(run: Run) -> None:
    found = run("""
a, b = begin()
x = empty()
esper_alloc.enable(uses="marked")
with torch.cuda.stream(a):
    x.zero_()
    _torch.note_uses([x])
marked = uses_of(x, a=a)
esper_alloc.enable(uses="automatic")
del_me = empty()
del del_me
with torch.cuda.stream(a):
    x.zero_()
say(marked=marked, automatic="a" in uses_of(x, a=a))
""")
    assert found == {"marked": [], "automatic": True}


@pytest.mark.parametrize(
    "call, parts",
    [
        ("torch._foreach_zero_([x, y])", "x, y"), ("torch._foreach_copy_([x], [y])", "x, y"),
        ("coo.detach()", "i, y"), ("csr.detach()", "i, j, y"), ("nested.detach()", "y"),
        ("torch.nn.Parameter(x, requires_grad=False).zero_()", "x"), ("Wrapper(x).zero_()", "x"),
        ("x[5:6].view(1, 1).zero_()", "x"), ("in_inference(x)", "x"), ("in_thread(x, a)", "x"),
        ("torch.func.vmap(lambda t: t.clone())(x.view(2, -1))", "x"),
        ("torch.ops.aten.index(x, [i])", "x, i"),
    ],
)  # fmt: skip
def test_whatever_an_operator_takes(run: Run, call: str, parts: str) -> None:
    found = run(f"""
from wrapper import Wrapper, in_inference, in_thread

a, b = begin()
x, y, i = empty(), empty(), torch.empty(1, 2, dtype=torch.int64, device="cuda")
j = torch.empty(2, dtype=torch.int64, device="cuda")
aten, size = torch.ops.aten, torch.tensor([[2]])
coo = aten._sparse_coo_tensor_with_dims_and_tensors(
    1, 0, [9], i, y[:2], layout=torch.sparse_coo, device=x.device, dtype=x.dtype
)
csr = aten._sparse_compressed_tensor_unsafe(
    i[0], j, y[:2], [1, 9], layout=torch.sparse_csr, device=x.device, dtype=x.dtype
)
nested = torch._nested_view_from_buffer(y, size, size, size[0])
assert not any(map(uses_of, (x, y, i, j)))
with torch.cuda.stream(a):
    try:
        {call}
    except RuntimeError:
        pass  # a kernel that cannot run: what it uses was noted before
say(found=[uses_of(part, a=a) for part in ({parts},)])
""")
    assert found["found"] == [["a"]] * len(parts.split(","))


def test_backward_is_seen_on_the_stream_of_forward(run: Run) -> None:
    """Autograd's threads run each operator of backward on the stream of its forward."""
    found = run("""
class Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        return kept.clone()

a, b = begin()
x = torch.empty(3 * MIB // 4, device="cuda", requires_grad=True)
kept, grad = torch.empty_like(x.detach()), torch.empty_like(x.detach())
with torch.cuda.stream(a):
    y = Keep.apply(x)
before = uses_of(kept, a=a, b=b)
with torch.cuda.stream(b):
    y.backward(grad)
say(before=before, after=uses_of(kept, a=a, b=b))
""")
    assert found == {"before": [], "after": ["a"]}


def test_the_device_of_the_tensor_decides_the_stream(run: Run) -> None:
    found = run("""
a, b = begin()
there = torch.cuda.Stream(1)
x, y = empty(0), empty(1)
torch.cuda.set_stream(there)
torch.cuda.set_device(0)
x.zero_()
y.zero_()
y.copy_(x)
say(x=uses_of(x, there=there), y=uses_of(y, there=there))
""")
    assert found == {"x": [], "y": ["there"]}


REUSED = """
def is_reused(address, mib=3):
    "Whether one of the next mallocs of the size gets the address."
    keep.extend(empty(mib=mib) for _ in range(16))
    return address in [one.data_ptr() for one in keep]

def say_when_reused(address):
    early = is_reused(address)
    simulated.time_passes()
    say(early=early, late=is_reused(address))

keep = []
"""

run_reused = running(HEAD + REUSED)


@pytest.mark.parametrize(
    "drop", ["x.untyped_storage().resize_(0)", "x.set_(empty())", "x.data = empty()", "del x"]
)
def test_memory_that_goes_while_a_copy_runs(run_reused: Run, drop: str) -> None:
    found = run_reused(f"""
a, b = begin()
x, host = empty(), torch.empty(3 * MIB, dtype=torch.uint8)
address = x.data_ptr()
with torch.cuda.stream(a):
    simulated.work(a)
    host.copy_(x, non_blocking=True)
{drop}
say_when_reused(address)
""")
    assert found == {"early": False, "late": True}


def test_a_storage_that_grows_is_copied_on_the_current_stream(run_reused: Run) -> None:
    found = run_reused("""
from torch._subclasses.fake_tensor import FakeTensorMode

a, b = begin()
x = empty()
address = x.data_ptr()
with torch.cuda.stream(a):
    simulated.work(a)
    with FakeTensorMode():  # a program's own mode changes nothing
        x.untyped_storage().resize_(6 * MIB)
assert x.data_ptr() != address
say_when_reused(address)
""")
    assert found == {"early": False, "late": True}


def test_arguments_of_scripted_functions_are_seen(run: Run) -> None:
    found = run("""
# As if all its work were one fused kernel.
from typing import Dict, List, Tuple

def scripted(kind):
    return torch.jit.CompilationUnit(f"def f(x: {kind}) -> int:\\n    return 1\\n").f

a, b = begin()
x, in_tuple, in_dict, in_both = (empty() for _ in range(4))
with torch.cuda.stream(a):
    scripted("Tensor")(x)
    scripted("Tuple[int, Tensor]")((1, in_tuple))
    scripted("Dict[str, Tensor]")({"x": in_dict})
    scripted("List[Tuple[Tensor, Dict[int, Tensor]]]")([(x, {1: in_both})])
say(uses=[uses_of(one, a=a, b=b) for one in (x, in_tuple, in_dict, in_both)])
""")
    assert found == {"uses": [["a"]] * 4}


def test_a_fork_while_another_thread_begins_to_run_operators(library: Path, tmp_path: Path) -> None:
    found = build.forked_while_a_lock_is_held(
        library,
        tmp_path,
        HEAD,
        """
stream, x = torch.cuda.Stream(), empty()
with torch.cuda.stream(stream):
    torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(512))
assert _torch.is_observing()
say(status=fork_while_a_lock_is_held())
""",
    )
    assert found == {"status": 0}


# Beginning to observe


def test_a_program_on_one_stream_has_no_callback(run: Run) -> None:
    found = run("""
for _ in range(3):
    x = empty()
    x.zero_()
    del x
say(observing=_torch.is_observing())
""")
    assert found == {"observing": False}


@pytest.mark.parametrize(
    "begin",
    [
        "torch.cuda.Stream(); del y",
        "far = empty(1); torch.cuda.Stream(1); del y",
        "torch.Stream('cuda'); del y",
        "torch.cuda.Stream(); torch._C._cuda_cudaCachingAllocator_raw_delete(raw)",
        "torch.cuda.set_stream(torch.cuda.Stream()); z = empty()",
        "torch.cuda.ExternalStream(torch._C._cuda_getCurrentRawStream(0))",
        "torch.cuda.get_stream_from_external(4096, 0)",
        "torch._C._cuda_cudaCachingAllocator_raw_alloc(512, 2)",
    ],
)
def test_the_first_other_stream_begins_it(run: Run, begin: str) -> None:
    """What was live by then may have been used on the stream already."""
    found = run(f"""
x, y = empty(), empty()
raw = torch._C._cuda_cudaCachingAllocator_raw_alloc(512, 0)
before = _torch.is_observing()
{begin}
after = _torch.is_observing()
torch.cuda.set_stream(torch.cuda.default_stream())
later = empty()  # on its own stream: a loan would owe a use by all
say(before=before, after=after, x=sorted(set(uses_of(x))), later=uses_of(later))
""")
    assert found == {"before": False, "after": True, "x": ["all"], "later": []}


def test_streams_of_a_device_without_memory_begin_nothing(run: Run) -> None:
    """Until it has memory, and something is freed."""
    found = run(
        """
x, y, z = empty(), empty(), empty()
torch.cuda.Stream(1)
del x
before = _torch.is_observing()
far = empty(1)
allocated = _torch.is_observing()
del y
say(before=before, allocated=allocated, freed=_torch.is_observing(), z=uses_of(z))
""",
        ESPER_ALLOC_USES="automatic",
    )
    assert found == {"before": False, "allocated": False, "freed": True, "z": ["all", "all"]}


def test_memory_from_before_automatic_uses_counts(run: Run) -> None:
    found = run("""
esper_alloc.enable(uses="marked")
far, y = empty(1), empty()
esper_alloc.enable(uses="automatic")
torch.cuda.Stream(1)
del y
say(observing=_torch.is_observing())
""")
    assert found == {"observing": True}


def test_work_before_the_callback_is_protected(run_reused: Run) -> None:
    """A stream is made, works, and only then memory is freed."""
    found = run_reused("""
x, host = empty(), torch.empty(3 * MIB, dtype=torch.uint8)
address = x.data_ptr()
a = torch.cuda.Stream()
with torch.cuda.stream(a):
    simulated.work(a)
    host.copy_(x, non_blocking=True)
assert not _torch.is_observing()
del x
early = is_reused(address)
simulated.time_passes()
say(early=early, late=is_reused(address))
""")
    assert found == {"early": False, "late": True}


# What is said


def test_touch_and_notes_from_python(run: Run) -> None:
    found = run("""
a, b = begin()
x, y, z = empty(), empty(), empty()
esper_alloc.touch({"k": [x, (y, None)]}, a)
with torch.cuda.stream(b):
    esper_alloc.touch(x)
    _torch.note_uses([z, 3, None, "s", (z.view(1, -1),)])
esper_alloc.touch(torch.ones(1))
for wrong in (lambda: esper_alloc.touch(3), lambda: esper_alloc.touch(x, 3)):
    try:
        wrong()
    except TypeError:
        continue
    raise AssertionError("no error")
say(x=uses_of(x, a=a, b=b), y=uses_of(y, a=a, b=b), z=uses_of(z, a=a, b=b))
""")
    assert found == {"x": ["a", "b"], "y": ["a"], "z": ["b"]}


def test_a_stream_of_anothers_making(run: Run) -> None:
    """One that may be destroyed: it is recorded on no later than it is seen again."""
    found = run("""
a, b = begin()
other = torch.cuda.ExternalStream(a.cuda_stream)
x = empty()
with torch.cuda.stream(other):
    x.zero_()
    x.zero_()
say(x=uses_of(x, other=other))
""")
    assert found == {"x": ["other"]}
