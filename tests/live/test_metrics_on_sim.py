"""The figures of a process, for dashboards and loggers."""

import re
import sys
import types
from typing import Any

import pytest
from on_sim import Run, running

import esper_alloc
from esper_alloc.live.figures import FIGURES
from esper_alloc.live.metrics import PrometheusCollector

HEAD = """
import simulated
import esper_alloc, torch
from simulated import say
x = [torch.empty(1 << 20, device="cuda") for _ in range(3)]
del x[0]
"""
run = running(HEAD)

READ = """
found = {"metrics": esper_alloc.metrics(), "text": esper_alloc.prometheus_text()}
stats = torch.cuda.memory_stats()
found["stats"] = [stats["reserved_bytes.all.current"], stats["allocated_bytes.all.current"],
                  stats["allocated_bytes.all.peak"]]
found["memory"] = torch.cuda.mem_get_info()
say(**found)
"""


@pytest.mark.parametrize("allocator", ["esper_alloc", "native"])
def test_figures_are_pytorchs_and_ours(run: Run, allocator: str) -> None:
    found = run(READ, ESPER_SIMULATED_ALLOCATOR=allocator)
    figures = found["metrics"]
    assert list(figures) == list(FIGURES)
    names = ("reserved_bytes", "allocated_bytes", "allocated_peak_bytes")
    assert [figures[name] for name in names] == found["stats"]
    assert [figures["device_free_bytes"], figures["device_total_bytes"]] == found["memory"]
    assert (figures["mallocs"], figures["frees"], figures["out_of_memory"]) == (3, 1, 0)
    assert figures["allocated_bytes"] == 8 << 20 and figures["allocated_peak_bytes"] == 12 << 20
    assert figures["grown_bytes"] == figures["reserved_bytes"]
    text = found["text"]
    assert f"\nesper_alloc_enabled {int(allocator == 'esper_alloc')}.0\n" in text
    assert '\nesper_alloc_mallocs_total{device="0"} 3\n' in text
    assert f'\nesper_alloc_allocated_bytes{{device="0"}} {8 << 20}\n' in text
    line = re.compile(r'esper_alloc_[a-z_]+(\{device="\d+"\})? [-+.\de]+')
    kinds = {}
    for one in text.splitlines():
        if one.startswith("# TYPE "):
            _, _, name, kinds[name] = one.split()
        assert line.fullmatch(one) or re.fullmatch(r"# (HELP|TYPE) esper_alloc_\w+ .+", one)
    assert {name.endswith("_total") for name, kind in kinds.items() if kind == "counter"} == {True}
    assert not any(name.endswith("_total") for name, kind in kinds.items() if kind == "gauge")
    assert len(kinds) == len(FIGURES) + 1


def test_what_waits_is_counted(run: Run) -> None:
    code = """
side = torch.cuda.Stream()
simulated.work(side)
esper_alloc.record_use(x[0], side)
del x[0]
before = esper_alloc.metrics(0)["pending_bytes"]
simulated.time_passes()
torch.empty(1, device="cuda")
say(before, esper_alloc.metrics("cuda:0")["pending_bytes"])
"""
    assert run(code) == [4 << 20, 0]


def test_without_cuda_there_is_nothing() -> None:
    assert esper_alloc.metrics() == {}
    with pytest.raises(TypeError, match="device must be an index"):
        esper_alloc.metrics(True)
    text = esper_alloc.prometheus_text()
    assert text.splitlines()[2:] == ["esper_alloc_enabled 0.0"]


# Libraries that need not be there: stand-ins with the parts that are used.


class Family:
    def __init__(self, name: str, about: str, labels: list[str]) -> None:
        self.name, self.about, self.labels = name, about, labels
        self.samples: list[tuple[list[str], float]] = []

    def add_metric(self, labels: list[str], value: float) -> None:
        self.samples.append((labels, value))


class Counter(Family):
    pass


def test_prometheus_client_collects_the_same(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    core = types.ModuleType("prometheus_client.core")
    core.CounterMetricFamily, core.GaugeMetricFamily = Counter, Family  # type: ignore[attr-defined]
    package = types.ModuleType("prometheus_client")
    package.core = core  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "prometheus_client", package)
    monkeypatch.setitem(sys.modules, "prometheus_client.core", core)
    figures = {"allocated_bytes": 5.0, "mallocs": 7.0}
    monkeypatch.setattr("esper_alloc.live.metrics.used_devices", lambda: [0, 3])
    monkeypatch.setattr("esper_alloc.live.metrics.figures_of", lambda device: figures)
    found = {one.name: one for one in PrometheusCollector().collect()}
    assert found["esper_alloc_enabled"].samples == [([], 0.0)]
    assert found["esper_alloc_mallocs"].samples == [(["0"], 7.0), (["3"], 7.0)]
    assert isinstance(found["esper_alloc_mallocs"], Counter)
    assert not isinstance(found["esper_alloc_allocated_bytes"], Counter)
    assert found["esper_alloc_mallocs"].labels == ["device"]
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(ImportError):
        PrometheusCollector()


LIGHTNING = """
import importlib.util, sys, types
name = "lightning.pytorch" if "lightning" in OTHERS else "pytorch_lightning"
if importlib.util.find_spec(name.partition(".")[0]) is None:
    module = types.ModuleType(name)
    module.Callback = type("Callback", (), {})
    sys.modules[name] = module
    if "." in name:
        sys.modules["lightning"] = types.ModuleType("lightning")
        sys.modules["lightning"].pytorch = module
from esper_alloc.live.callbacks import lightning_callback
callback = lightning_callback()
class Logger:
    def log_metrics(self, figures, step):
        logged.append([figures, step])
logged = []
trainer = types.SimpleNamespace(log_every_n_steps=2, loggers=[Logger(), Logger()], global_step=0)
for trainer.global_step in (0, 1, 2, 2, 3):  # two batches are accumulated for step 2
    callback.on_train_batch_end(trainer, None, None, None, 0)
trainer.log_every_n_steps = 0
callback.on_train_batch_end(trainer, None, None, None, 0)
say(logged, isinstance(callback, sys.modules[name].Callback), esper_alloc.metrics())
"""


@pytest.mark.parametrize("library_name", ["lightning", "pytorch_lightning"])
def test_lightnings_loggers_get_the_figures(run: Run, library_name: str) -> None:
    logged, is_one, figures = run(f"OTHERS = {[library_name]!r}" + LIGHTNING)
    assert is_one and [step for _, step in logged] == [2, 2]
    assert logged[0][0] == {f"esper_alloc/{name}": value for name, value in figures.items()}


TRAINER = """
import importlib.util, sys, types
if importlib.util.find_spec("transformers") is None:
    sys.modules["transformers"] = types.ModuleType("transformers")
    sys.modules["transformers"].TrainerCallback = type("TrainerCallback", (), {})
from esper_alloc.live.callbacks import add_to_trainer
class Writer:
    def on_log(self, args, state, control, logs=None, **_):
        written.append(dict(logs))
written = []
trainer = types.SimpleNamespace(callback_handler=types.SimpleNamespace(callbacks=[Writer()]))
add_to_trainer(trainer)
for logs in ({"loss": 1.5}, {"eval_loss": 2.5}, None):  # evaluate() returns what it logs
    for callback in trainer.callback_handler.callbacks[: 2 if logs else 1]:
        callback.on_log(None, None, None, logs=logs, model=None)
say(written, esper_alloc.metrics())
"""


def test_what_a_trainer_logs_has_the_figures(run: Run) -> None:
    """Also for callbacks that were there before, as those that write to TensorBoard are."""
    written, figures = run(TRAINER)
    told = {f"esper_alloc/{name}": value for name, value in figures.items()}
    assert written == [{"loss": 1.5, **told}, {"eval_loss": 2.5}]


def test_without_cuda_nothing_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("pytorch_lightning")
    module.Callback = object
    monkeypatch.setitem(sys.modules, "pytorch_lightning", module)
    from esper_alloc.live.callbacks import lightning_callback

    class Logger:
        def log_metrics(self, figures: Any, step: int) -> None:
            raise AssertionError

    trainer = types.SimpleNamespace(log_every_n_steps=1, loggers=[Logger()], global_step=1)
    lightning_callback().on_train_batch_end(trainer, None, None, None, 0)


def test_without_the_libraries_the_import_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from esper_alloc.live import callbacks

    for name in ("lightning", "lightning.pytorch", "pytorch_lightning", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError):
        callbacks.lightning_callback()
    with pytest.raises(ImportError):
        callbacks.add_to_trainer(None)
