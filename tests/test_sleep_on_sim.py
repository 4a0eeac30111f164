"""Tags, sleep and wake through PyTorch, on the simulated device."""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
from on_sim import Run, build, running

HERE = Path(__file__).resolve().parent


HEAD = """
import json
import simulated
import torch
import esper_alloc
from simulated import say

MIB = 2**20


def on_device(values):
    return values.to("cuda")



def error_of(call, *arguments, **keywords):
    try:
        call(*arguments, **keywords)
    except Exception as error:
        return type(error).__name__ + ": " + str(error).splitlines()[0]
"""


run = running(HEAD, SIM_MAPS_PAGES="1")
run_classic = running(HEAD)


#: MemPools have mapped segments, too.
ALL_MAPPED = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def test_contents_come_back_to_the_same_addresses(run: Run) -> None:
    found = run("""
host = torch.arange(3 * MIB, dtype=torch.int32)
with esper_alloc.tag("weights"):
    x, small = on_device(host), on_device(host[:5])
other = on_device(host[:100])
before = simulated.mappings()
address = x.data_ptr()
result = esper_alloc.sleep("weights")
asleep = simulated.mappings()
readable = other.cpu().equal(host[:100])
stats = esper_alloc.tag_stats()
reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
woken = esper_alloc.wake("weights")
say(same=x.cpu().equal(host) and small.cpu().equal(host[:5]), moved=x.data_ptr() != address,
    readable=readable, before=before, asleep=asleep, after=simulated.mappings(), woken=woken,
    result=result, stats=stats, reserved=reserved, allocated=allocated,
    awake=esper_alloc.tag_stats()["weights"], valid=simulated.core_is_valid())
""")
    assert found["same"] and not found["moved"] and found["readable"] and found["valid"]
    assert found["asleep"] < found["before"] == found["after"]
    given_back, kept, stays = found["result"]
    assert kept == 12 * 2**20 + 512 and stays == []
    assert given_back == found["woken"] == found["stats"]["weights"]["sleeping_bytes"]
    assert found["stats"]["weights"]["asleep"] and not found["stats"][""]["asleep"]
    assert found["stats"]["weights"]["host_bytes"] == kept
    assert found["allocated"] > found["reserved"] == found["stats"][""]["reserved_bytes"]
    assert found["awake"]["sleeping_bytes"] == 0 and not found["awake"]["asleep"]


WORKSPACES = """
import ctypes
library = simulated.library
library.sim_workspace.restype = ctypes.c_size_t


def workspace():
    torch.cuda.current_blas_handle()  # PyTorch makes one if the stream has none
    return library.sim_workspace()


def allocated():
    return {name: figures["allocated_bytes"] for name, figures in esper_alloc.tag_stats().items()}

"""


def test_cublas_gets_another_workspace_while_the_tags_sleeps(run: Run) -> None:
    """The old one stays allocated for graphs, and wakes with the tag."""
    found = run(
        WORKSPACES
        + """
with esper_alloc.tag("engine"):
    first = workspace()
one_device = esper_alloc.sleep("engine", device=1)
same = workspace() == first
esper_alloc.sleep("engine")
second = workspace()
asleep = allocated()
esper_alloc.wake("engine")
esper_alloc.sleep("engine")
again = workspace()
side = torch.cuda.Stream()
with torch.cuda.stream(side), esper_alloc.tag("trainer"):
    third = workspace()
    esper_alloc.sleep("trainer")  # a malloc under its tag fails now
with torch.cuda.stream(side):
    fourth = workspace()
say(same=same, asleep=asleep, differ=len({first, second, third, fourth}), again=again == second,
    allocated=allocated(), valid=simulated.core_is_valid())
"""
    )
    size = found["asleep"]["engine"]
    assert found["same"] and found["again"] and found["valid"] and found["differ"] == 4
    assert size and found["asleep"] == {"": size, "engine": size}
    assert found["allocated"] == {"": 2 * size, "engine": size, "trainer": size}


def test_cublas_has_as_many_workspaces_after_many_sleeps(run: Run) -> None:
    found = run(
        WORKSPACES
        + """
for round in range(4):
    workspace()
    esper_alloc.sleep("")
    with esper_alloc.tag("a"):
        workspace()
        esper_alloc.sleep("a")  # without a tag it sleeps, too
    esper_alloc.wake("")
    with esper_alloc.tag("b"):
        workspace()
        esper_alloc.wake("a")
        esper_alloc.sleep("b")
    with esper_alloc.tag("a"):
        workspace()
        esper_alloc.wake("b")
    if round == 0:
        once = allocated()
say(once=once, allocated=allocated(), valid=simulated.core_is_valid())
"""
    )
    assert found["allocated"] == found["once"] and found["valid"]


def test_cublas_uses_no_workspace_that_sleeps(run: Run) -> None:
    """All sleeps, and one tag wakes."""
    found = run(
        WORKSPACES
        + """

with esper_alloc.tag("engine"):
    x = on_device(torch.ones(4))
before = workspace()
esper_alloc.sleep()
esper_alloc.wake("engine")
with esper_alloc.tag("engine"):
    woken = workspace()
esper_alloc.wake()
say(before=before, woken=woken, back=workspace())
"""
    )
    assert found["woken"] not in (0, found["before"]) and found["back"] == found["woken"]


def test_everything_may_sleep_and_wake_after_an_exception(run: Run) -> None:
    found = run("""
x = on_device(torch.arange(MIB))
try:
    with esper_alloc.asleep() as result:
        asleep = simulated.mappings()
        refused = error_of(on_device, torch.zeros(5))
        raise KeyError("mine")
except KeyError as error:
    seen = str(error)
kept = [esper_alloc.tag_stats()[""]["host_bytes"]]
esper_alloc.trim_sleep()
kept += [result.kept, esper_alloc.tag_stats()[""]["host_bytes"]]
say(asleep=asleep, refused=refused, seen=seen, kept=kept,
    same=x.cpu().equal(torch.arange(MIB)))
""")
    assert found["asleep"] == 0 and found["same"] and found["seen"] == "'mine'"
    assert found["kept"] == [8 * 2**20, 8 * 2**20, 0]
    assert "memory without a tag sleeps on device 0" in found["refused"]


def test_what_asleep_was_given_is_what_wakes(run: Run) -> None:
    """An iterator gives its tags once, and "cuda" may be another device at the end."""
    found = run("""
with esper_alloc.tag("weights"):
    x = on_device(torch.arange(MIB))
    y = torch.arange(MIB).to("cuda:1")
with esper_alloc.asleep(iter(["weights"]), device="cuda"):
    torch.cuda.set_device(1)
say(asleep=[esper_alloc.tag_stats(number)["weights"]["asleep"] for number in (0, 1)],
    same=x.cpu().equal(y.cpu()))
""")
    assert found == {"asleep": [False, False], "same": True}


def test_devices_sleep_together_and_wake_one_by_one(run: Run) -> None:
    """Before and after, each device copies from the other."""
    found = run("""
host = torch.arange(6 * MIB)
with esper_alloc.tag("weights"):
    here, there = host.to("cuda:0"), host.to("cuda:1")
def across():
    return all(x.to(other).cpu().equal(host) for x, other in ((here, 1), (there, 0)))
before = across()
result = esper_alloc.sleep("weights")
torch.cuda.empty_cache()
def asleep():
    return [esper_alloc.tag_stats(d)["weights"]["asleep"] for d in (0, 1)]
def reserved():
    return [torch.cuda.memory_reserved(d) for d in (0, 1)]
steps = [[asleep(), reserved()]]
with esper_alloc.tag("weights"):
    refused = error_of(torch.empty, 5, device="cuda:1")
esper_alloc.wake("weights", device=1)
steps.append([asleep(), reserved()])
one = there.cpu().equal(host)
woken = esper_alloc.wake()
steps.append([asleep(), reserved()])
say(before=before, after=across(), one=one, kept=result.kept, woken=woken, steps=steps,
    refused=refused, none=esper_alloc.sleep(device=1).stays + esper_alloc.sleep(device="cuda").stays,
    valid=simulated.core_is_valid())
""")
    size = 48 * 2**20
    assert found["before"] and found["one"] and found["after"] and found["valid"]
    assert found["kept"] == 2 * size and found["woken"] == size
    assert found["steps"] == [
        [[True, True], [0, 0]],
        [[True, False], [0, size]],
        [[False, False], [size, size]],
    ]
    assert "'weights' sleeps on device 1" in found["refused"]
    assert found["none"] == []


def test_tags_nest_and_can_be_entered_again(run: Run) -> None:
    found = run("""
weights = esper_alloc.tag("weights")
with weights:
    a = on_device(torch.ones(5))
    with esper_alloc.tag("kv"), weights:
        b = on_device(torch.ones(5))
    with esper_alloc.tag("kv"):
        c = on_device(torch.ones(5))
d = on_device(torch.ones(5))
say(stats={tag: one["allocated_bytes"] for tag, one in esper_alloc.tag_stats().items()})
""")
    assert found["stats"] == {"": 512, "weights": 1024, "kv": 512}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_have_tags_around_them_and_inside(run: Run, backend: str) -> None:
    found = run(f"""
import warnings

def make(n):
    return torch.empty(n, device="cuda")

def make_both(n):
    with esper_alloc.tag("inside"):
        y = make(n)
    return y, make(n)

whole = torch.compile(make, backend={backend!r}, fullgraph=True)
with esper_alloc.tag("around"):
    x = whole(MIB)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of a graph break
    both = torch.compile(make_both, backend={backend!r})
    kept = [both(MIB) for _ in range(2)]
    torch._dynamo.reset()
    refused = error_of(torch.compile(make_both, backend={backend!r}, fullgraph=True), MIB)

def make_asleep():
    with esper_alloc.tag("around"):
        whole(MIB)

esper_alloc.sleep("around")
asleep = error_of(make_asleep)
esper_alloc.wake("around")
say(stats={{tag: one["allocated_bytes"] for tag, one in esper_alloc.tag_stats().items()}},
    refused=refused, asleep=asleep)
""")
    assert found["stats"] == {"": 8 * 2**20, "around": 4 * 2**20, "inside": 8 * 2**20}
    assert found["refused"].startswith("Unsupported")
    assert "'around' sleeps on device 0" in found["asleep"]


def test_no_tags_and_memory_without_one_are_not_everything(run: Run) -> None:
    found = run("""
with esper_alloc.tag("weights"):
    x = on_device(torch.arange(MIB))
y = on_device(torch.arange(5))
def asleep():
    return [tag for tag, one in esper_alloc.tag_stats().items() if one["asleep"]]
steps = [esper_alloc.sleep([]).given_back, asleep()]
steps += [esper_alloc.sleep("").kept, asleep(), esper_alloc.wake(()), asleep()]
esper_alloc.wake("")
steps += [asleep(), esper_alloc.sleep(("weights", "")).kept, asleep()]
esper_alloc.wake(["", "weights"])
say(steps=steps, same=x.cpu().equal(torch.arange(MIB)) and y.cpu().equal(torch.arange(5)))
""")
    kept = 8 * 2**20 + 512
    assert found["steps"] == [0, [], 512, [""], 0, [""], [], kept, ["", "weights"]]
    assert found["same"]


def test_a_graph_whose_pool_sleeps_is_not_replayed(run: Run) -> None:
    """The simulated device captures nothing, so a MemPool stands for the graph's pool, and a
    replay that goes on is refused by PyTorch."""
    found = run("""
import gc
pool = torch.cuda.MemPool()
with esper_alloc.tag("rollout"), torch.cuda.use_mem_pool(pool):
    x = torch.empty(MIB, device="cuda")

class Graph(torch.cuda.CUDAGraph):
    def pool(self):
        return pool.id

graph = Graph()
said = [error_of(graph.replay)]
with esper_alloc.asleep("rollout") as result:
    said.append(error_of(graph.replay))
said.append(error_of(graph.replay))
never = error_of(torch.cuda.CUDAGraph().replay)
with esper_alloc.asleep():  # meanwhile the pool goes
    del x, pool
    gc.collect()
    torch.cuda.empty_cache()
say(said=said, stays=result.stays, reserved=torch.cuda.memory_reserved(),
    valid=simulated.core_is_valid(), never=never)
""", **ALL_MAPPED)  # fmt: skip
    before, asleep, after = found["said"]
    assert before.startswith("RuntimeError: ") and before == after == found["never"]
    assert asleep.startswith("RuntimeError: this CUDA graph cannot be replayed while 4194304 bytes")
    assert found["stays"] == [] and found["reserved"] == 0 and found["valid"]


def test_an_operator_on_memory_that_sleeps_is_told_with_automatic_uses(library: Path) -> None:
    code = """
esper_alloc.enable(uses="automatic")
side = torch.cuda.Stream()
del_me = torch.empty(5, device="cuda")
del del_me  # from now on operators are looked at
with esper_alloc.tag("weights"):
    x = torch.empty(MIB, device="cuda")
other = torch.empty(5, device="cuda")
with esper_alloc.asleep("weights"):
    other.view(-1)
    print("used", x.data_ptr(), other.data_ptr())
    x.view(-1)
    x.view(-1)
"""
    done = build.program(
        HEAD + code, {**os.environ, **build.environment(library), "SIM_MAPS_PAGES": "1"}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    _, asleep, awake = done.stdout.split()
    told = f"memory at {int(asleep):#x} is used while it sleeps: wake it first"
    assert done.stderr.count(told) == 1 and "RecordFunction" not in done.stderr
    assert f"{int(awake):#x}" not in done.stderr


def test_a_wake_without_memory_can_be_repeated(run: Run) -> None:
    found = run("""
with esper_alloc.tag("weights"):
    x = on_device(torch.ones(10 * MIB))
esper_alloc.sleep("weights")
y = on_device(torch.ones(10 * MIB))
refused = error_of(esper_alloc.wake, "weights")
del y
esper_alloc.wake("weights")
say(refused=refused, sum=float(x.cpu().sum()), valid=simulated.core_is_valid())
""", SIM_CAPACITY_MB="64")  # fmt: skip
    assert found["refused"].startswith("OutOfMemoryError: esper_alloc, waking memory: ")
    assert "Everything on this device still sleeps" in found["refused"] and found["valid"]
    assert found["sum"] == 10 * 2**20


def test_classic_segments_are_named(run_classic: Run) -> None:
    found = run_classic("""
x = on_device(torch.ones(10 * MIB))
result = esper_alloc.sleep()
esper_alloc.wake()
say(result=result, sum=float(x.cpu().sum()))
""")
    (stay,) = found["result"][2]
    assert stay[0] >= 40 * 2**20 and "ESPER_ALLOC_SEGMENTS=mapped" in stay[1]
    assert found["sum"] == 10 * 2**20


def test_bad_arguments_are_refused(run: Run) -> None:
    found = run("""
from esper_alloc.installation.pytorch import load_shim
x = on_device(torch.ones(5))
def entered(name):
    assert error_of(load_shim().push_tag, name) == error_of(esper_alloc.tag, name)
    esper_alloc.tag(name)
say(said=[error_of(esper_alloc.sleep, "nobody"), error_of(esper_alloc.sleep, keep="disk"),
          error_of(esper_alloc.wake, ["nobody"]), error_of(esper_alloc.sleep, device=7),
          error_of(entered, ""), error_of(entered, "x" * 64), error_of(entered, 5),
          error_of(esper_alloc.sleep, (5,)), error_of(esper_alloc.sleep, device=-1),
          error_of(esper_alloc.wake, device="cuda:-1"), error_of(entered, "a\\0b"),
          error_of(esper_alloc.sleep, "a\\0b")],
    no_names=[error_of(call, tags) for call in (esper_alloc.sleep, esper_alloc.wake)
              for tags in (5, b"weights", ["weights", None], [["weights"]])],
    asleep=[tag for tag, one in esper_alloc.tag_stats().items() if one["asleep"]],
    same=x.cpu().equal(torch.ones(5)))
""")
    said = found["said"]
    nobody = "ValueError: there is no tag 'nobody': no memory was ever allocated under it"
    assert said[0] == said[2] == nobody
    assert said[1] == "ValueError: keep='disk': use 'host' or 'nothing'"
    assert "ValueError: there is no CUDA device 7" in said[3]
    assert said[4].startswith("ValueError: a tag needs a name") and said[5] == said[4]
    assert said[6] == "TypeError: a tag is a str, not int"
    assert said[7] == "TypeError: tags=(5,): pass a name, or a list of names"
    assert said[8] == "ValueError: there is no CUDA device -1; this process sees 2"
    assert said[9] == ("ValueError: device='cuda:-1' is no CUDA device: pass 'cuda', 'cuda:0' or 0")
    zero = "ValueError: a tag cannot have a character 0 in it: leave it out"
    assert said[10] == said[11] == zero
    assert found["no_names"] == 2 * [
        f"TypeError: tags={tags!r}: pass a name, or a list of names"
        for tags in (5, b"weights", ["weights", None], [["weights"]])
    ]
    assert found["same"] and found["asleep"] == []


def test_a_forked_child_can_neither_sleep_nor_wake(run: Run) -> None:
    found = run("""
import importlib
import os
x = on_device(torch.arange(5))
esper_alloc.sleep()
read, write = os.pipe()
if os.fork() == 0:
    said = [error_of(esper_alloc.wake), error_of(esper_alloc.sleep)]
    os.write(write, json.dumps(said).encode())
    os._exit(0)
os.wait()
said = json.loads(os.read(read, 65536))
esper_alloc.wake()
say(said=said, same=x.cpu().equal(torch.arange(5)))
""")
    assert found["same"]
    assert all("forked" in words for words in found["said"])


def test_without_the_allocator_tags_do_nothing_and_sleep_refuses() -> None:
    import esper_alloc

    if esper_alloc.is_enabled():
        pytest.skip("this process runs on esper_alloc")
    with esper_alloc.tag("weights"):
        assert esper_alloc.tag_stats() == {}
    for name in ("", "x" * 64, "a\0b", 5, None):
        with pytest.raises((TypeError, ValueError), match="^a tag "):
            esper_alloc.tag(name)
    with pytest.raises(TypeError, match="process_groups=5: pass a list"):
        esper_alloc.asleep(process_groups=5)
    with pytest.raises(RuntimeError, match="enable"):
        esper_alloc.sleep()
    with pytest.raises(RuntimeError, match="enable"):
        esper_alloc.wake()
    esper_alloc.trim_sleep()


GROUPS = """
said = []


class Backend:  # c10d's, of PyTorch 2.12
    suspended = False

    def __init__(self, name):
        self.name = name

    def memory_stats(self):
        if self.name is None:  # as before the first collective
            raise RuntimeError("NCCL communicator not initialized.")
        figures = {"suspend": 1000, "persist": 24 * (self.name == "a"), "total": 1024}
        return {**figures, "suspended": int(self.suspended)}

    def suspend(self):
        assert not self.suspended
        self.suspended = True
        said.append(["suspend", self.name, esper_alloc.tag_stats()["t"]["asleep"]])

    def resume(self):
        assert self.suspended
        self.suspended = False
        said.append(["resume", self.name, esper_alloc.tag_stats()["t"]["asleep"]])


class Group:
    def __init__(self, backend):
        self.backend = backend

    def _get_backend(self, device):
        assert device == torch.device("cuda")
        return self.backend


groups = [Group(Backend("a")), Group(Backend("b"))]
with esper_alloc.tag("t"):
    x = on_device(torch.ones(MIB))
"""


def test_communicators_sleep_after_the_memory_and_wake_after_it(run: Run) -> None:
    found = run(f"""{GROUPS}
alone = esper_alloc.sleep("t")
esper_alloc.wake("t")
result = esper_alloc.sleep("t", process_groups=iter(groups))
esper_alloc.sleep("t", process_groups=groups)
esper_alloc.wake("t", process_groups=groups)
esper_alloc.wake("t", process_groups=groups)
unused = Group(Backend(None))
with esper_alloc.asleep("t", process_groups=iter([unused, *groups[1:], *groups[1:]])):
    pass
say(said=said, alone=alone, result=result)
""")
    once = [["suspend", "a", True], ["suspend", "b", True]]
    once += [["resume", "a", False], ["resume", "b", False]]
    assert found["said"] == once + [["suspend", "b", True], ["resume", "b", False]]
    assert found["result"][0] == found["alone"][0] + 2000
    assert found["alone"][2] == [] and found["result"][2] == [
        [24, "NCCL cannot suspend it: destroy_process_group() frees it"]
    ]


def test_communicators_that_cannot_be_suspended_are_refused(run: Run) -> None:
    found = run(f"""{GROUPS}
groups.append(Group(object()))  # of an older PyTorch
errors = [error_of(call, "t", process_groups=groups)
          for call in (esper_alloc.sleep, esper_alloc.wake)]
say(errors=errors, said=said, asleep=esper_alloc.tag_stats()["t"]["asleep"])
""")
    for error in found["errors"]:
        assert error.startswith("RuntimeError: process_groups needs PyTorch 2.12 with NCCL 2.29.7")
    assert found["said"] == [] and not found["asleep"]


def test_the_memory_savers_interface(run: Run) -> None:
    found = run("""
from esper_alloc.torch_allocator.memory_saver import torch_memory_saver as saver

with saver.region(tag="weights", enable_cpu_backup=True):
    x = on_device(torch.arange(MIB))
with saver.region(tag="kv"):
    y = on_device(torch.ones(MIB))
z = on_device(torch.ones(5))
before = simulated.mappings()
saver.pause("kv")
one = simulated.mappings()
saver.pause()
both, readable = simulated.mappings(), z.cpu().equal(torch.ones(5))
saver.resume("weights")
weights = x.cpu().equal(torch.arange(MIB))
saver.resume()
saver.pause("nobody")

def spill():
    with saver.region(enable_disk_backup=True):
        pass

def named(name):
    with saver.region(name):
        pass

say(before=before, one=one, both=both, after=simulated.mappings(), readable=readable,
    weights=weights, kv=float(y.cpu().sum()), refused=error_of(spill),
    long=error_of(named, "x" * 64), later=[error_of(saver.pause), error_of(saver.resume)],
    no_names=[error_of(call, tag) for call in (named, saver.pause, saver.resume)
              for tag in (5, ["kv"])], none=error_of(named, None))
""")
    assert found["both"] < found["one"] < found["before"] == found["after"]
    assert found["weights"] and found["readable"] and found["kv"] == 0
    assert found["refused"].startswith("NotImplementedError") and (
        "enable_disk_backup" in found["refused"]
    )
    assert found["long"].startswith("ValueError") and found["later"] == [None, None]
    assert found["no_names"] == 3 * [
        "TypeError: tag=5: pass a name",
        "TypeError: tag=['kv']: pass a name",
    ]
    assert found["none"] == "TypeError: tag=None: pass a name"


def test_the_memory_saver_takes_a_whole_program_as_slimes_trainers_ask(run: Run) -> None:
    code = """
from esper_alloc.torch_allocator.memory_saver import torch_memory_saver as saver

x = on_device(torch.arange(MIB))
with saver.region("kv"):
    y = on_device(torch.ones(MIB))
found = []
for step in range(3):
    saver.pause()
    asleep = simulated.mappings()
    with saver.disable():
        weights = on_device(torch.arange(MIB))
        found.append(weights.cpu().equal(torch.arange(MIB)))
        del weights
    given_back = simulated.mappings() == asleep
    saver.resume()
    found += [given_back, x.cpu().equal(torch.arange(MIB)), float(y.cpu().sum()) == 0]
say(found=found, asleep=asleep, awake=simulated.mappings(), impl=saver._impl)
"""
    found = run(code, TMS_INIT_ENABLE="1", TMS_INIT_ENABLE_CPU_BACKUP="1")
    assert all(found["found"]) and found["impl"] is None
    assert found["asleep"] == 0 < found["awake"]
    assert run(code)["asleep"] > 0


def test_a_framework_finds_the_memory_saver_where_it_imports_the_package(
    library: Path, tmp_path: Path
) -> None:
    package = tmp_path / "torch_memory_saver"
    package.mkdir()
    (package / "__init__.py").write_text("torch_memory_saver = configure_subprocess = None\n")
    # Then what SGLang calls.
    code = """
import torch_memory_saver

saver = torch_memory_saver.torch_memory_saver
if saver is None:
    say(saver=None)
    raise SystemExit
with torch_memory_saver.configure_subprocess():
    pass
with saver.region(tag="kv_cache", enable_cpu_backup=False):
    cache = on_device(torch.ones(MIB))
saver.pause(tag="kv_cache")
asleep = simulated.mappings()
saver.resume(tag="kv_cache")
say(saver=type(saver).__module__, enabled=saver.enabled, asleep=asleep,
    file=torch_memory_saver.__file__, cache=float(cache.cpu().sum()))
"""
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{HEAD}{code}"
    assert build.answer(library, code)["saver"] is None
    found = build.answer(library, code, ESPER_ALLOC_MEMORY_SAVER="1", SIM_MAPS_PAGES="1")
    assert found["saver"] == "esper_alloc.torch_allocator.memory_saver" and found["enabled"]
    assert found["asleep"] == 0 == found["cache"]
    assert found["file"] == str(package / "__init__.py")
    own = "import sys, types\nsys.modules['torch_memory_saver'] = types.ModuleType('made')\n"
    own += f"{HEAD}say(name=sys.modules['torch_memory_saver'].__name__)"
    assert build.answer(library, own, ESPER_ALLOC_MEMORY_SAVER="1") == {"name": "made"}


def test_the_memory_saver_keeps_before_it_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("esper_alloc.torch_allocator.memory_saver")
    slept: list[Any] = []
    monkeypatch.setattr(module, "sleep_or_warn", lambda names, keep: slept.append((names, keep)))
    saver = module.MemorySaver()
    saver._regions = {"a": {"drops": "nothing", "keeps": "host"}, "b": {"keeps too": "host"}}
    saver.pause()
    assert slept == [(["keeps", "keeps too"], "host"), (["drops"], "nothing")]


def test_what_stays_is_told_on_the_line_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = importlib.import_module("esper_alloc.torch_allocator.sleep")
    stays = sleep.SleepResult(0, 0, (sleep.Stay(5, "why"),))
    monkeypatch.setattr(sleep, "sleep", lambda *_: stays)
    saver = importlib.import_module("esper_alloc.torch_allocator.memory_saver").MemorySaver()
    saver._regions = {"a": {"keeps": "host"}}
    with pytest.warns(RuntimeWarning, match="5 bytes do not go to sleep: why") as told:
        saver.pause()
    assert told[0].filename == __file__


def test_the_memory_savers_graphs_have_a_tag(run: Run) -> None:
    found = run("""
from esper_alloc.torch_allocator.memory_saver import torch_memory_saver as saver
kept, given = [], []

class Capture:  # the simulated device captures nothing
    def __init__(self, *arguments, **keywords):
        given.extend([arguments, keywords])
    def __enter__(self):
        kept.append(on_device(torch.arange(MIB)))
    def __exit__(self, *exception):
        pass

torch.cuda.graph = Capture
with saver.cuda_graph("graph", pool=3, tag="graphs", enable_cpu_backup=True):
    pass
saver.pause("graphs")
paused = [tag for tag, one in esper_alloc.tag_stats().items() if one["asleep"]]
saver.resume("graphs")
say(given=given, paused=paused, same=kept[0].cpu().equal(torch.arange(MIB)))
""")
    names = {"pool": 3, "stream": None, "capture_error_mode": "global"}
    assert found["given"] == [["graph"], names]
    assert found["paused"] == ["graphs, keeps host"] and found["same"]


def test_snapshots_show_what_sleeps(run: Run) -> None:
    found = run("""
from esper_alloc.replay.snapshot import with_uses

with esper_alloc.tag("weights"):
    x, small = on_device(torch.ones(3 * MIB)), on_device(torch.ones(5))
other = on_device(torch.ones(5))

def look():
    plain = torch.cuda.memory._snapshot()
    for one in plain["segments"]:
        assert one["total_size"] == sum(block["size"] for block in one["blocks"])
        assert one["active_size"] <= one["total_size"]
    segments = with_uses(plain)["segments"]
    return {
        "total": sum(one["total_size"] for one in segments),
        "tagged": sum(one["total_size"] for one in segments if one.get("tag") == "weights"),
        "untold": sum("tag" not in one for one in segments),
        "asleep": sum(one.get("asleep_size", 0) for one in segments),
        "reserved": torch.cuda.memory_reserved(),
    }

before = look()
esper_alloc.sleep("weights")
asleep = look()
esper_alloc.wake("weights")
say(before=before, asleep=asleep, after=look())
""")
    before, asleep, after = found["before"], found["asleep"], found["after"]
    assert before["asleep"] == after["asleep"] == 0
    assert before["total"] == asleep["total"] == after["total"] == before["reserved"]
    assert asleep["asleep"] == asleep["tagged"] == before["tagged"] > 12 * 2**20
    assert asleep["reserved"] == asleep["total"] - asleep["asleep"]
    assert before["untold"] == asleep["untold"] > 0


def test_the_example_samples_memory_by_tag_while_it_sleeps(run: Run) -> None:
    example = HERE.parent / "examples" / "ppo_sleep.py"
    found = run(f"""
import importlib.util
spec = importlib.util.spec_from_file_location("ppo_sleep", {str(example)!r})
ppo_sleep = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ppo_sleep)
with esper_alloc.tag("trainer"):
    x = on_device(torch.ones(4 * MIB))
with esper_alloc.tag("engine"):
    y = on_device(torch.ones(2 * MIB))
samples = ppo_sleep.Samples(every=0)
with samples.taken():
    for _ in range(5):
        with esper_alloc.asleep("trainer"):
            samples.take()
        with esper_alloc.asleep("engine"):
            samples.take()
say(rows=samples.rows)
""")
    rows = found["rows"]
    assert len(rows) >= 10
    assert any(row["trainer"] == 0 and row["engine"] >= 8 for row in rows)
    assert any(row["engine"] == 0 and row["trainer"] >= 16 for row in rows)
    both = [row["trainer"] + row["engine"] + row["asleep"] for row in rows]
    assert max(both) >= 24 and both.count(max(both)) >= 9  # free pages go with the first sleep
