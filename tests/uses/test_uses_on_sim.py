"""Marks and scopes of the shim on the simulated device: which streams memory waits for."""

import pytest
from on_sim import Run, running

HEAD = """
import simulated
import torch
import esper_alloc
from simulated import say

def empty(device=0):
    return torch.empty(3 << 20, dtype=torch.uint8, device=torch.device("cuda", device))


def streams_of(x, **names):
    "The names of the streams that x owes a use to."
    return sorted(
        name
        for entry in torch.cuda.memory._snapshot()["external_annotations"]
        for name, stream in names.items()
        if entry.get("name") == "esper_alloc.use"
        and int(entry["address"]) == x.data_ptr()
        and int(entry["stream"]) == stream.cuda_stream
    )


class Wrapper(torch.Tensor):
    "A tensor around one, which knows `knows` and no other operators."

    knows = ()

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        if func in cls.knows:
            return func(args[0].inner, *args[1:])
        return NotImplemented

"""


run = running(HEAD)


@pytest.mark.parametrize("current", [0, 1])
def test_take_is_for_the_device_that_reads(run: Run, current: int) -> None:
    """What was made on another device is read by that device's current stream."""
    found = run(f"""
side, there, here = torch.cuda.Stream(1), torch.cuda.Stream(1), torch.cuda.Stream(0)
torch.cuda.set_stream(there)
torch.cuda.set_stream(here)
torch.cuda.set_device({current})
with esper_alloc.using(stream=side) as scope:
    y = empty(1)
    simulated.work(side)
idle = there.record_event().query()
y = scope.take(y)
done = there.record_event()  # which waits for side
say(streams=streams_of(y, there=there), waits=[not idle, not done.query()])
""")
    assert found == {"streams": ["there"], "waits": [False, True]}


def test_without_a_stream_each_devices_current_one_is_meant(run: Run) -> None:
    found = run("""
here, there = torch.cuda.Stream(0), torch.cuda.Stream(1)
x, y = empty(0), empty(1)
torch.cuda.set_stream(there)
torch.cuda.set_stream(here)
esper_alloc.record_use([x, y])
say([streams_of(of, here=here, there=there) for of in (x, y)])
""")
    assert found == [[["here"], ["there"]]]


@pytest.mark.parametrize("given", ["a", "None"])
def test_take_from_another_stream_than_the_scopes(run: Run, given: str) -> None:
    """Also where the scope's is the one that was current anyway."""
    found = run(f"""
a, b = torch.cuda.Stream(), torch.cuda.Stream()
with torch.cuda.stream(a), esper_alloc.using(stream={given}) as scope:
    y = empty()
    simulated.work(a)
with torch.cuda.stream(b):
    idle = b.record_event().query()
    y = scope.take(y)
    done = b.record_event()
say(streams=streams_of(y, a=a, b=b), waits=[not idle, not done.query()])
""")
    assert found == {"streams": ["b"], "waits": [False, True]}


def test_take_inside_the_scope_is_refused(run: Run) -> None:
    """Unless another stream is current there, or the scope changed nothing."""
    found = run("""
a, b = torch.cuda.Stream(), torch.cuda.Stream()
with esper_alloc.using(stream=a) as scope:
    y = empty()
    try:
        scope.take(y)
        said = ""
    except RuntimeError as error:
        said = str(error)
    with torch.cuda.stream(b):
        scope.take(y)
with torch.cuda.stream(a), esper_alloc.using(stream=a) as scope:
    scope.take(y)
say(said=said, streams=streams_of(y, a=a, b=b))
""")
    assert "call it after the `with` block" in found["said"]
    assert found["streams"] == ["b"]


def test_take_on_the_scopes_own_stream_is_nothing(run: Run) -> None:
    found = run("""
a = torch.cuda.Stream()
with torch.cuda.stream(a):
    with esper_alloc.using() as scope:
        y = empty()
    y = scope.take(y)
say(streams=streams_of(y, a=a))
""")
    assert found == {"streams": []}


@pytest.mark.parametrize("how", ["side", "event=event"])
def test_a_wrapper_that_knows_record_stream_alone(run: Run, how: str) -> None:
    found = run(f"""
Wrapper.knows = (torch.ops.aten.record_stream.default,)
side = torch.cuda.Stream()
x = Wrapper(empty())
simulated.work(side)
event = torch.cuda.Event()
event.record(side)
with torch.no_grad():
    esper_alloc.record_use(x, {how})
address = x.inner.data_ptr()
del x
freed = [
    block["state"]
    for segment in torch.cuda.memory._snapshot()["segments"]
    for block in segment["blocks"]
    if block["address"] == address
]
say(freed=freed)
""")
    assert found == {"freed": ["active_pending_free"]}


def test_a_wrapper_that_knows_nothing_is_passed_over(run: Run) -> None:
    found = run("""
side, x = torch.cuda.Stream(), empty()
simulated.work(side)
with torch.no_grad():
    esper_alloc.record_use([Wrapper(empty()), x], side)
    with esper_alloc.using(Wrapper(empty()), stream=side):
        pass
say(streams=streams_of(x, side=side))
""")
    assert found == {"streams": ["side"]}


@pytest.mark.parametrize("pages", ["0", "1"])
def test_no_frames_are_kept_of_memory_that_is_gone(run: Run, pages: str) -> None:
    """Pages that came one after the other go as one stretch. The black box keeps code objects."""
    env = {"ESPER_ALLOC_BLACK_BOX": "off", **({"SIM_MAPS_PAGES": "1"} if pages == "1" else {})}
    found = run(
        """
import gc, weakref

record = torch.cuda.memory._record_memory_history
codes = []


def grow(i):
    space = {"torch": torch}
    code = "def f(n): return torch.empty(n, dtype=torch.uint8, device='cuda')"
    exec(compile(code, f"<grow {i}>", "exec"), space)
    codes.append(weakref.ref(space["f"].__code__))
    return space["f"]((6 + 2 * i) << 20)


record(context="all", stacks="python")
held = [grow(i) for i in range(3)]
del held
torch.cuda.empty_cache()
record(enabled=None)
record(context="all", stacks="python")
torch.empty(512, device="cuda")
record(enabled=None)
gc.collect()
say(kept=[i for i, code in enumerate(codes) if code() is not None])
""",
        **env,
    )
    assert found == {"kept": []}
