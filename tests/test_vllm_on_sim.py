"""vLLM's sleep mode over esper_alloc, on the simulated device. vLLM is not needed: a stand-in has
the names that the plug-in looks for, and calls what vLLM's GPU worker calls. Where vLLM is
installed, its own worker and executor are tried, too."""

from __future__ import annotations

import functools
import inspect
import json
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from on_sim import Run, build

from esper_alloc.torch_allocator import vllm_sleep

HERE = Path(__file__).resolve().parent

DEVICE_ALLOCATOR = """
DEFERRABLE_TAGS = ("weights", "kv_cache")


def get_mem_allocator_instance():
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance()
"""
CUMEM = """
cumem_available = False


class CuMemAllocator:
    instance = None
    default_tag = "default"

    @staticmethod
    def get_instance():
        raise AssertionError("vLLM's own allocator is asked")

    def use_memory_pool(self, tag=None): ...
    def cudagraph_pool(self): ...
    def sleep(self, offload_tags=None): ...
    def discard(self, tags): ...
    def wake_up(self, tags=None): ...
    def get_current_usage(self): ...
    def release_pools(self): ...
    def close(self): ...
"""
BACKENDS = """
class CuMemBackend:
    @classmethod
    def is_supported(cls):
        return True

    def suspend(self, level=1):
        from vllm.device_allocator import get_mem_allocator_instance

        kept = ("runtime", "cudagraph") + (("weights",) if level == 1 else ())
        get_mem_allocator_instance().sleep(offload_tags=kept)


class SleepModeBackendFactory:
    backends = {}

    @classmethod
    def register_backend(cls, name, module_path, class_name):
        if name in cls.backends:
            raise ValueError(f"{name} is registered already")
        cls.backends[name] = module_path, class_name

    @classmethod
    def create_backend(cls, name):
        import importlib

        module, backend = cls.backends[name]
        backend = getattr(importlib.import_module(module), backend)
        if not backend.is_supported():
            raise ValueError(f"{name} is not supported")
        return backend()


SleepModeBackendFactory.register_backend("cumem", __name__, "CuMemBackend")
"""
WORKER = """
import simulated
import torch
import esper_alloc
from esper_alloc.torch_allocator.vllm_sleep import register
from simulated import say
from vllm.device_allocator import get_mem_allocator_instance

MIB = 2**20
register()
register()  # in each process, perhaps more than once
from vllm.device_allocator import cumem

allocator = get_mem_allocator_instance()
assert cumem.cumem_available and allocator.get_current_usage() == 0
host = torch.arange(3 * MIB, dtype=torch.int32)
with allocator.use_memory_pool(tag="weights"):
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:20")  # as vLLM's worker does
    weights = host.to("cuda")
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:17592186044415")
with allocator.use_memory_pool(tag="runtime"):
    table = host[:100].to("cuda")
    with allocator.use_memory_pool(tag="kv_cache"):
        cache = torch.ones(MIB).to("cuda")
with allocator.cudagraph_pool() as pool, allocator.cudagraph_pool() as again:
    graph = host[:200].to("cuda")
outside = host[:100].to("cuda")


def look():
    stats = esper_alloc.tag_stats()
    return {name[len("vLLM's "):]: one["asleep"] for name, one in stats.items() if "vLLM's " in name}

"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    folder = tmp_path / "vllm" / "device_allocator"
    folder.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text(DEVICE_ALLOCATOR)
    (folder / "cumem.py").write_text(CUMEM)
    (folder / "sleep_mode_backend.py").write_text(BACKENDS)
    return tmp_path


@pytest.fixture
def run_classic(library: Path, stand_in: Path) -> Run:
    begin = f"import sys\nsys.path.insert(0, {str(stand_in)!r})\n{WORKER}"
    return lambda code, **env: build.answer(library, begin + code, **env)


@pytest.fixture
def run(run_classic: Run) -> Run:
    return functools.partial(run_classic, SIM_MAPS_PAGES="1")


def test_level_1_keeps_weights_and_drops_the_cache(run: Run) -> None:
    found = run("""
used = allocator.get_current_usage()
before = simulated.mappings()
allocator.sleep(offload_tags=("weights", "runtime", "cudagraph"))
asleep, mapped = look(), simulated.mappings()
readable = outside.cpu().equal(host[:100])
allocator.wake_up(["weights"])
partly = look()
allocator.wake_up(["kv_cache"])
say(used=used, before=before, mapped=mapped, asleep=asleep, readable=readable, partly=partly,
    after=look(), weights=weights.cpu().equal(host), table=table.cpu().equal(host[:100]),
    graph=graph.cpu().equal(host[:200]), cache=float(cache.cpu().sum()), pools=[pool, again])
""")
    tags = ("weights", "runtime", "kv_cache", "cudagraph")
    assert found["used"] >= 16 * 2**20
    assert 0 < found["mapped"] < found["before"]
    assert found["asleep"] == dict.fromkeys(tags, True) and found["readable"]
    # What vLLM does not wake by itself wakes with whatever wakes first.
    assert found["partly"] == {**dict.fromkeys(tags, False), "kv_cache": True}
    assert found["after"] == dict.fromkeys(tags, False)
    assert found["weights"] and found["table"] and found["graph"] and found["cache"] == 0
    assert found["pools"][0] == found["pools"][1]


def test_level_2_drops_weights_and_a_tag_can_be_dropped_alone(run: Run) -> None:
    found = run("""
allocator.discard(("kv_cache", "nobody's"))
one = look()
allocator.sleep(offload_tags=("runtime", "cudagraph"))
asleep = look()
allocator.wake_up()
allocator.release_pools()
say(one=one, asleep=asleep, after=look(), weights=float(weights.cpu().sum()),
    table=table.cpu().equal(host[:100]))
""")
    assert [tag for tag, asleep in found["one"].items() if asleep] == ["kv_cache"]
    assert all(found["asleep"].values()) and not any(found["after"].values())
    assert found["weights"] == 0 and found["table"]


def test_a_trainers_tag_of_the_same_name_is_another_one(run: Run) -> None:
    found = run("""
with esper_alloc.tag("weights"):
    trained = host.to("cuda")
used = allocator.get_current_usage()
allocator.sleep(())
say(asleep=esper_alloc.tag_stats()["weights"]["asleep"], used=used, size=trained.nbytes,
    trained=trained.cpu().equal(host))
""")
    assert not found["asleep"] and found["trained"]
    assert found["used"] < 2 * found["size"]  # the weights of vLLM, but not these


def test_a_name_may_stand_alone_and_what_is_no_name_is_refused(run: Run) -> None:
    found = run("""
allocator.sleep("weights")
allocator.wake_up("weights and kv_cache")  # no tag, although tags' names are in it
other = look()
allocator.wake_up("weights")
one = look()


def error_of(call):
    try:
        call(5)
    except TypeError as error:
        return str(error)


say(other=other, one=one, refused=[error_of(call) for call in (
    allocator.sleep, allocator.discard, allocator.wake_up)], after=look())
""")
    assert found["other"]["weights"] and found["other"]["kv_cache"]
    assert not found["one"]["weights"] and found["one"]["kv_cache"]
    assert found["refused"] == 3 * ["tags=5: pass a name, or a list of names"]
    assert found["after"] == found["one"]


@pytest.mark.parametrize("name", ["cumem", "esper_alloc"])
def test_both_names_of_the_backend_use_esper_alloc(name: str, run: Run) -> None:
    found = run(f"""
from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

backend = SleepModeBackendFactory.create_backend({name!r})
backend.suspend()
asleep, mapped = look(), simulated.mappings()
allocator.wake_up()
say(asleep=asleep, mapped=mapped, weights=weights.cpu().equal(host), after=simulated.mappings())
""")
    assert all(found["asleep"].values()) and found["mapped"] < found["after"]
    assert found["weights"]


def test_what_stays_is_told(run_classic: Run) -> None:
    found = run_classic("""
import warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    allocator.sleep("weights")
say(said=[str(one.message) for one in seen])
""")
    assert any("do not go to sleep" in one and "classic" in one for one in found["said"])


# --- registering ----------------------------------------------------------------


NAME = "vllm.device_allocator.cumem"


def made(source: str, name: str = NAME) -> types.ModuleType:
    module = types.ModuleType(name)
    exec(source, vars(module))
    return module


def test_nothing_changes_where_esper_alloc_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    module = made(CUMEM)
    theirs = module.CuMemAllocator
    monkeypatch.setitem(sys.modules, NAME, module)
    monkeypatch.setattr(vllm_sleep, "is_enabled", lambda: False)
    vllm_sleep.register()
    assert module.CuMemAllocator is theirs and not module.cumem_available
    monkeypatch.setattr(vllm_sleep, "is_enabled", lambda: True)
    vllm_sleep.register()
    assert module.CuMemAllocator is vllm_sleep.SleepAllocator and module.cumem_available


INHERITED = """
class Newer:
    def hibernate(self): ...


CuMemAllocator = type("CuMemAllocator", (CuMemAllocator, Newer), {})
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (CUMEM + "    def hibernate(self): ...\n", "its allocator has hibernate"),
        (CUMEM + INHERITED, "its allocator has hibernate"),
        (CUMEM + "    instance = 5\n", "in use already"),
        ("cumem_available = False", "it has no vllm.device_allocator.cumem.CuMemAllocator"),
    ],
)
def test_a_vllm_that_is_not_known_keeps_its_own(
    source: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = made(source)
    theirs = getattr(module, "CuMemAllocator", None)
    monkeypatch.setitem(sys.modules, NAME, module)
    monkeypatch.setattr(vllm_sleep, "is_enabled", lambda: True)
    with pytest.warns(RuntimeWarning, match=said):
        vllm_sleep.register()
    assert getattr(module, "CuMemAllocator", None) is theirs and not module.cumem_available


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's factory of backends."""
    name = "vllm.device_allocator.sleep_mode_backend"
    module = made(BACKENDS, name)
    monkeypatch.setitem(sys.modules, name, module)
    return module.SleepModeBackendFactory


def test_the_backends_name_is_refused_where_esper_alloc_does_not_serve(
    factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, NAME, made(CUMEM))
    vllm_sleep.register()
    vllm_sleep.register()
    with (
        pytest.warns(RuntimeWarning, match="does not run on it; start vLLM with"),
        pytest.raises(ValueError, match="not supported"),
    ):
        factory.create_backend("esper_alloc")
    monkeypatch.setitem(sys.modules, NAME, made(CUMEM + "    instance = 5\n"))
    monkeypatch.setattr(vllm_sleep, "is_enabled", lambda: True)
    with pytest.warns(RuntimeWarning, match="in use already"):
        vllm_sleep.register()
    with pytest.raises(ValueError, match="not supported"):
        factory.create_backend("esper_alloc")


def test_a_vllm_without_backends_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.sleep_mode_backend", None)
    module = made(CUMEM)
    monkeypatch.setitem(sys.modules, NAME, module)
    monkeypatch.setattr(vllm_sleep, "is_enabled", lambda: True)
    vllm_sleep.register()
    assert module.CuMemAllocator is vllm_sleep.SleepAllocator


def test_arguments_have_vllms_names() -> None:
    theirs = made(CUMEM).CuMemAllocator
    for name in ("use_memory_pool", "sleep", "discard", "wake_up"):
        ours, expected = (
            {
                one.name: one.default
                for one in inspect.signature(getattr(of, name)).parameters.values()
            }
            for of in (vllm_sleep.SleepAllocator, theirs)
        )
        assert ours == expected


def test_the_entry_point_is_there() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
    (target,) = project["project"]["entry-points"]["vllm.general_plugins"].values()
    module, name = target.split(":")
    assert getattr(sys.modules[module], name) is vllm_sleep.register


# --- vLLM itself ------------------------------------------------------------------

FOLLOWED = "0.33."
VLLM = """
import os, sys

# Of the driver's functions the simulated device has those that PyTorch and esper_alloc call.
sys.setdlopenflags(os.RTLD_LAZY)
sys.modules["b12x"] = None  # kernels that are not needed, and want packages that may be missing
import inspect, json
import simulated
import torch
import esper_alloc
import vllm.platforms
from vllm.platforms import cuda

vllm.platforms._current_platform = cuda.CudaPlatform()  # NVML would have found a GPU
from vllm.device_allocator import cumem
from vllm.engine.arg_utils import EngineArgs

theirs = cumem.CuMemAllocator
arguments = EngineArgs(
    model=sys.argv[1], skip_tokenizer_init=True, enable_sleep_mode=True,
    sleep_mode_offload_cudagraph=True,
)  # loads the plug-ins
config = arguments.create_engine_config()

from vllm.compilation.cudagraph_pool import capture_pool
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerWrapperBase

MIB = 2**20
host = torch.arange(MIB, dtype=torch.float32)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(host.clone())
        self.register_buffer("table", host[:100].clone())


class Runner:  # in place of the one that needs kernels
    def load_model(self, load_dummy_weights):
        self.model = Model().to("cuda")

    def get_model(self):
        return self.model

    def get_draft_model(self):
        return None

    def initialize_kv_cache(self, kv_cache_config, kv_cache_allocation_context):
        self.blocks = host[:200].to("cuda")
        with kv_cache_allocation_context:
            self.cache = torch.ones(MIB).to("cuda")

    def shutdown(self):
        del self.model, self.blocks, self.cache


worker = Worker(config, 0, 0, "file://" + sys.argv[1] + "/store", True)
worker.device, worker.model_runner = torch.device("cuda:0"), Runner()
executor = UniProcExecutor.__new__(UniProcExecutor)
executor.sleeping_tags, executor.driver_worker = set(), WorkerWrapperBase()
executor.driver_worker.worker = worker

worker.load_model()
worker.initialize_from_config(KVCacheConfig(4, [], []))
workspace.init_workspace_manager(
    worker.device, 1, 1, lambda: worker._maybe_get_memory_pool_context("workspace")
)
(scratch,) = workspace.current_workspace_manager().get_simultaneous(((MIB,), torch.uint8))
with capture_pool(None, config):
    graph = host[:300].to("cuda")


def look():
    stats = esper_alloc.tag_stats()
    asleep = sorted(name[len("vLLM's "):] for name, one in stats.items() if name and one["asleep"])
    return [asleep, simulated.mappings()]


def intact():
    runner = worker.model_runner
    kept = {"weights": (runner.model.weight, MIB), "table": (runner.model.table, 100),
            "blocks": (runner.blocks, 200), "graph": (graph, 300)}
    return {name: one.detach().cpu().equal(host[:n]) for name, (one, n) in kept.items()}


def names(of):
    public = (name for name in vars(of) if not name.startswith("_"))
    return {name: [(one.name, str(one.default)) for one in inspect.signature(call).parameters.values()]
            for name in public if callable(call := getattr(of, name))}


said = {"used": cumem.CuMemAllocator.__module__, "names": names(theirs), "awake": look()}
executor.sleep(1)
said["level 1"] = look()
executor.wake_up(["weights"])
said["weights"] = look() + [intact()]
executor.wake_up(["kv_cache"])
said["kv_cache"] = look() + [float(worker.model_runner.cache.cpu().sum())]
executor.discard(("kv_cache",))
said["discarded"] = look()
executor.sleep(2)
said["level 2"] = look()
executor.wake_up()
said["woken"] = look() + [intact()]
try:
    worker.load_model()
except AssertionError as error:
    said["second"] = str(error)
worker.shutdown()
del scratch, graph
workspace.reset_workspace_manager()
worker.load_model()  # asserts that nothing is left of the first
print(json.dumps(said))
"""
MODEL = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 64, "ffn_dim": 128,
    "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 128,
    "max_position_embeddings": 64, "word_embed_proj_dim": 64, "torch_dtype": "float16",
}  # fmt: skip


@pytest.mark.slow
def test_vllms_own_worker_sleeps_and_wakes(library: Path, tmp_path: Path) -> None:
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        pytest.skip("vLLM is not installed")
    if not version.startswith(FOLLOWED):
        pytest.skip(f"the test knows the inside of vLLM {FOLLOWED}*; this is {version}")
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    # The package may be built in place, so that no entry points of it are known.
    installed = tmp_path / "esper_alloc-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: esper_alloc\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nesper_alloc = esper_alloc.torch_allocator.vllm_sleep:register\n"
    )
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nsys.argv[1:] = sys.path[:1]\n{VLLM}"
    env = {"HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    found = build.answer(library, code, SIM_MAPS_PAGES="1", **env)
    assert found["used"] == vllm_sleep.__name__
    stand_in = made(CUMEM).CuMemAllocator
    for name, parameters in found["names"].items():
        expected = inspect.signature(getattr(stand_in, name)).parameters.values()
        assert parameters == [[one.name, str(one.default)] for one in expected], name

    every = ["cudagraph", "kv_cache", "runtime", "weights", "workspace"]
    fine = dict.fromkeys(("weights", "table", "blocks", "graph"), True)
    mapped = found["awake"][1]
    assert found["awake"] == [[], mapped] and mapped >= len(every)
    assert found["level 1"] == [every, 0]
    assert found["weights"] == [["kv_cache"], found["discarded"][1], fine]
    assert found["kv_cache"] == [[], mapped, 0]
    assert found["discarded"][0] == ["kv_cache"] and found["discarded"][1] < mapped
    assert found["level 2"] == [every, 0]
    # The worker itself keeps buffers, which the table is.
    assert found["woken"] == [[], mapped, {**fine, "weights": False}]
    assert "one instance per process" in found["second"]
