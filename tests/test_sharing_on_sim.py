"""CUDA tensors shared through PyTorch, on the simulated device, which both sides of a
handle have in one process here: what is opened is mapped once more."""

from on_sim import Run, running

HEAD = """
import simulated
import torch
from simulated import say

MIB = 2**20


def on_device(values):
    return values.to("cuda")


def opened(shared):
    storage = torch.UntypedStorage._new_shared_cuda(*shared)
    return torch.empty(0, dtype=torch.int32, device="cuda").set_(storage)



def error_of(call, *arguments):
    try:
        call(*arguments)
    except RuntimeError as error:
        return str(error).splitlines()[0]
"""


run = running(HEAD, SIM_MAPS_PAGES="1")
run_classic = running(HEAD)


def test_both_have_the_same_memory(run: Run) -> None:
    found = run("""
host = torch.arange(3 * MIB, dtype=torch.int32)
on_device(host[: 2 * MIB])  # is freed at once, so x begins on its page
x = on_device(host)
before = simulated.mappings()
shared = x.untyped_storage()._share_cuda_()
y = opened(shared)
same = y.cpu()[: host.numel()].equal(host)
y[5:6].copy_(torch.tensor([-7], dtype=torch.int32))
seen, elsewhere = int(x[5:6].cpu()), y.data_ptr() != x.data_ptr()
more = simulated.mappings() - before
del y
say(same=same, seen=seen, elsewhere=elsewhere, more=more,
    after=simulated.mappings() - before, names=simulated.names(), valid=simulated.core_is_valid())
""")
    assert found["same"] and found["seen"] == -7 and found["elsewhere"] and found["valid"]
    assert found["more"] == found["names"] >= 2
    assert found["after"] == 0


def test_thousands_of_small_tensors_share_their_pages(run: Run) -> None:
    found = run("""
kept = [on_device(torch.full((5,), i, dtype=torch.int32)) for i in range(3000)]
before = simulated.mappings()
shared = [x.untyped_storage()._share_cuda_() for x in kept]
handles = {each[1] for each in shared}
there = [opened(each) for each in shared]
wrong = sum(int(y.cpu()[0]) != i for i, y in enumerate(there))
more = simulated.mappings() - before
del there[:-1]
left = simulated.mappings() - before
last = int(there[0].cpu()[0])
del there
say(handles=len(handles), wrong=wrong, more=more, left=left, last=last,
    after=simulated.mappings() - before)
""")
    assert found["wrong"] == 0 and found["last"] == 2999
    assert found["handles"] == found["more"] <= 2
    assert found["left"] == 1 and found["after"] == 0


def test_what_was_shared_goes_back_when_nothing_of_it_is_live(run: Run) -> None:
    found = run("""
x, y = (on_device(torch.arange(6 * MIB, dtype=torch.int32)) for _ in range(2))
shared = x.untyped_storage()._share_cuda_()
there = opened(shared)
# As torch.multiprocessing counts: the memory stays live until the other side is done.
del x
torch.cuda.empty_cache()
kept = simulated.names()
there = None
torch.cuda.ipc_collect()
torch.cuda.empty_cache()
say(kept=kept, names=simulated.names(), reserved=torch.cuda.memory_reserved() // MIB,
    refused=error_of(opened, shared))
""")
    assert found["kept"] > 0
    assert found["names"] == 0
    assert found["reserved"] <= 32  # of y
    assert "this CUDA tensor cannot be opened here" in found["refused"]


CLOSED = """
x = on_device(torch.zeros(48 * MIB, dtype=torch.uint8))
there = opened(x.untyped_storage()._share_cuda_())
del x
there = None
"""


def test_closed_memory_is_collected_before_memory_grows(run: Run) -> None:
    found = run(f"""
{CLOSED}
y = torch.empty(48 * MIB, dtype=torch.uint8, device="cuda")
say(reserved=torch.cuda.memory_reserved() // MIB)
""")
    assert found == {"reserved": 48}


def test_closed_memory_makes_room_for_more(run: Run) -> None:
    found = run(f"""
total = torch.cuda.mem_get_info()[1]
torch.cuda.set_per_process_memory_fraction(100 * MIB / total)
{CLOSED}
y = torch.empty(90 * MIB, dtype=torch.uint8, device="cuda")
say(reserved=torch.cuda.memory_reserved() // MIB)
""")
    assert found["reserved"] <= 100


def test_closed_memory_sleeps(run: Run) -> None:
    found = run(f"""
{CLOSED}
torch.cuda.ipc_collect()
import esper_alloc
result = esper_alloc.sleep()
say(given_back=result.given_back // MIB, stays=len(result.stays))
""")
    assert found == {"given_back": 48, "stays": 0}


def test_other_handles_are_refused_in_words(run: Run) -> None:
    found = run("""
x = on_device(torch.arange(6 * MIB, dtype=torch.int32))
shared = list(x.untyped_storage()._share_cuda_())
said = []
for handle in (shared[1].replace(b"esper_alloc 1", b"esper_alloc 2"), shared[1][:-1],
               shared[1][:14] + b"q" + shared[1][15:], shared[1][:15], b"native"):
    shared[1] = handle
    said.append(error_of(opened, shared))
say(said=said)
""")
    version, cut, kind, nothing, native = found["said"]
    for said in (version, native):
        assert "was shared by a process that does not run on esper_alloc" in said
    for said in (cut, kind, nothing):
        assert "in a way that this one cannot read" in said


def test_pages_that_cannot_be_shared_say_so(run: Run) -> None:
    found = run("""
x = on_device(torch.arange(6 * MIB, dtype=torch.int32))
said = error_of(x.untyped_storage()._share_cuda_)
del x
torch.cuda.empty_cache()
say(said=said, reserved=torch.cuda.memory_reserved())
""", SIM_KEEPS_PAGES="1")  # fmt: skip
    assert "CUDA cannot share this memory with another process: " in found["said"]
    assert "ESPER_ALLOC_SEGMENTS=classic" in found["said"]
    assert found["reserved"] == 0


def test_classic_segments_are_shared_as_before(run_classic: Run) -> None:
    found = run_classic("""
x = on_device(torch.arange(6 * MIB, dtype=torch.int32))
y = opened(x.untyped_storage()._share_cuda_())
count = simulated.opened_handles()
same = y.data_ptr() == x.data_ptr()
del y
say(count=count, after=simulated.opened_handles(), same=same, names=simulated.names())
""")
    assert found == {"count": 1, "after": 0, "same": True, "names": 0}
