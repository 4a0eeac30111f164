"""The doctor: each sickness, injected as facts, has its finding and remedy."""

import copy
import json
import re
import sys
from typing import Any

import pytest
from processes import ROOT, python
from pytest import CaptureFixture, MonkeyPatch

from esper_alloc.cli import doctor
from esper_alloc.cli.diagnosis import facts as gathering, words

HEALTHY: dict[str, Any] = {
    "package": {"version": "0.1.0", "location": "/site-packages/esper_alloc",
     "source_directory": False, "python": [3, 12, 1], "executable": "/usr/bin/python3",
     "system": "Linux", "machine": "x86_64", "release": "6.8"},
    "core": {"loaded": True, "error": None, "build": {"version": "0.1.0", "compiler": "gcc 13"}},
    "torch": {"installed": True, "version": "2.11.0+cu130", "cuda": "13.0", "hip": None,
     "error": None},
    "shim": {"built": True, "built_for": {"2.11": "13.0", "2.15": "13.2"}, "kernels": True,
     "missing": [], "error": None},
    "driver": {"available": True, "error": None, "driver_version": 13000,
     "entry_points": {"cuStreamGetId": True, "cuStreamIsCapturing": True},
     "devices": [{"index": 0, "name": "NVIDIA H200", "total_bytes": 150 << 30,
                  "virtual_memory": True, "compute_capability": (9, 0)}]},
    "environment": {},
    "installed": [],
    "trial": {"loads": True, "before": "native", "backend": "native", "allocated": True,
     "error": None},
}  # fmt: skip


def facts_with(**changes: Any) -> dict[str, Any]:
    """HEALTHY with `section__key=value` or `section=value` replaced."""
    facts = copy.deepcopy(HEALTHY)
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            facts[section][key] = value
        else:
            facts[section] = value
    return facts


def test_healthy_machine_has_no_findings() -> None:
    assert doctor.diagnose(HEALTHY) == []
    text = doctor.render(HEALTHY, [])
    assert text.endswith("esper_alloc works here")
    for said in ("NVIDIA H200", "150.0 GiB", "2.11.0+cu130", "CUDA 13.0", "through the extension"):
        assert said in text


def test_a_clone_without_a_build_has_one_problem() -> None:
    core = {"loaded": False, "error": "ModuleNotFoundError: no core", "build": None}
    facts = facts_with(core=core, package__source_directory=True, shim__built=False)
    [finding] = doctor.diagnose(facts)
    assert "a source directory whose core was not built" in finding.what


def test_variables_that_are_set_to_nothing_count_as_unset() -> None:
    ours = [name for name in gathering.ENVIRONMENT if name.startswith("ESPER_ALLOC")]
    empty = dict.fromkeys(ours, "")
    facts = facts_with(environment=empty)
    assert doctor.diagnose(facts) == []
    assert words.paths(facts) == words.paths(facts_with(environment={}))
    assert "allowance: 128MiB" in words.paths(facts)


#: Changes, what the finding says, what the remedy says.
SICK = [
    ({"package__system": "Windows"}, "Windows is not supported", "Linux"),
    ({"package__system": "Darwin"}, "Darwin is not supported", "Linux"),
    ({"package__python": [3, 9, 18]}, "Python 3.9.18 is too old", "3.10"),
    ({"core": {"loaded": False, "error": "ImportError: no file", "build": None}},
     "the core (esper_alloc._core) cannot be loaded: ImportError: no file",
     "pip install --no-build-isolation"),
    ({"torch__installed": False, "torch__cuda": None}, "PyTorch is not installed",
     "pip install torch"),
    ({"torch__error": "OSError: libcudart.so.13", "torch__cuda": None},
     "torch cannot be imported: OSError: libcudart.so.13", "fix that import first"),
    ({"torch__hip": "6.4", "torch__cuda": None}, "AMD GPUs are not supported", "NVIDIA GPU"),
    ({"torch__cuda": None}, "is built without CUDA", "CUDA build of PyTorch"),
    ({"shim__built": False, "shim__missing": ["the PyTorch part: no compiler"]},
     "was not built: no compiler", "pip install --no-build-isolation"),
    ({"driver__available": False, "driver__error": "libcuda.so.1 cannot be loaded"},
     "no GPU can be used: libcuda.so.1 cannot be loaded", "nvidia-smi"),
    ({"driver__available": False, "environment": {"CUDA_VISIBLE_DEVICES": ""}},
     "CUDA_VISIBLE_DEVICES hides every GPU", "unset CUDA_VISIBLE_DEVICES"),
    ({"driver__driver_version": 11080}, "supports CUDA 11.8 only", "525 or newer"),
    ({"driver__driver_version": 12040}, "needs a driver for CUDA 13.0", "newer driver"),
    ({"driver__devices": []}, "lists no GPU", "nvidia-smi"),
    ({"environment": {"PYTORCH_CUDA_ALLOC_CONF": "backend: cudaMallocAsync"}},
     "PYTORCH_CUDA_ALLOC_CONF asks for PyTorch's cudaMallocAsync back end",
     "remove backend:cudaMallocAsync from PYTORCH_CUDA_ALLOC_CONF"),
    ({"environment": {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,backend:cudaMallocAsync"}},
     "PYTORCH_ALLOC_CONF asks for PyTorch's cudaMallocAsync back end",
     "remove backend:cudaMallocAsync from PYTORCH_ALLOC_CONF"),
    ({"environment": {"ESPER_ALLOC": "yes"}}, "ESPER_ALLOC is 'yes'", "ESPER_ALLOC=1"),
    ({"environment": {"ESPER_ALLOC_ALLOWANCE": "fast"}}, "ESPER_ALLOC_ALLOWANCE is 'fast'",
     "set it to bytes, a size such as 128MiB, 1 GiB or 512M, or off; or unset it"),
    ({"environment": {"ESPER_ALLOC_SEGMENTS": "big"}}, "ESPER_ALLOC_SEGMENTS is 'big'",
     "auto, mapped or classic"),
    ({"environment": {"ESPER_ALLOC_USES": "some"}}, "ESPER_ALLOC_USES is 'some'",
     "marked or automatic"),
    ({"trial__error": "RuntimeError: words"},
     "enabling it in a new process failed: RuntimeError: words", "docs troubleshooting"),
    ({"trial__before": "pluggable"}, "torch's allocator was 'pluggable'", "sitecustomize"),
    ({"trial__allocated": False}, "did not keep what was written", "report"),
]  # fmt: skip


@pytest.mark.parametrize("changes, what, remedy", SICK, ids=[entry[1] for entry in SICK])
def test_each_problem_is_found_and_has_a_remedy(
    changes: dict[str, Any], what: str, remedy: str
) -> None:
    facts = facts_with(**changes)
    problems = [finding for finding in doctor.diagnose(facts) if finding.level == "problem"]
    assert len(problems) == 1, problems
    assert what in problems[0].what
    assert remedy in problems[0].remedy
    text = doctor.render(facts, problems)
    assert f"PROBLEM: {problems[0].what}\n  remedy: {problems[0].remedy}" in text
    assert text.endswith("esper_alloc cannot work here: 1 problem")


WORTH_A_NOTE = [
    ({"torch__version": "2.12.1"},
     "the extension was built for torch 2.11, 2.15, and this is torch 2.12.1: enable() uses"),
    ({"torch__cuda": "12.8"},
     "built for a torch with CUDA 13.0, and torch 2.11.0+cu130 has CUDA 12.8: enable() uses"),
    ({"shim__missing": ["the kernels: nvcc was not found"]}, "not built: the kernels"),
    ({"driver__entry_points": {"cuStreamGetId": True, "cuCtxRecordEvent": False}},
     "the driver lacks cuCtxRecordEvent: allocators that hide record_stream"),
    ({"driver__entry_points": {"cuMemMap": False, "cuMemCreate": False}},
     "the driver lacks cuMemCreate, cuMemMap: pages cannot be mapped"),
    ({"environment": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}}, "neither caches nor protects it"),
    ({"environment": {"LD_PRELOAD": "/x/torch_memory_saver_hook_mode_preload.so"}},
     "torch_memory_saver is preloaded"),
    ({"installed": ["rmm"]}, "RMM is installed"),
    ({"environment": {"ESPER_ALLOC_USE": "automatic"}}, "ESPER_ALLOC_USE is no variable"),
]  # fmt: skip


@pytest.mark.parametrize("changes, what", WORTH_A_NOTE, ids=[entry[1] for entry in WORTH_A_NOTE])
def test_notes_do_not_make_it_a_problem(changes: dict[str, Any], what: str) -> None:
    facts = facts_with(**changes)
    findings = doctor.diagnose(facts)
    assert [finding.level for finding in findings] == ["note"]
    assert what in findings[0].what
    assert doctor.render(facts, findings).endswith("esper_alloc works here")


def test_every_documented_variable_is_known() -> None:
    documented = set(re.findall(r"ESPER_ALLOC_\w+", (ROOT / "docs/environment.md").read_text()))
    assert len(documented) > 10 and gathering.unknown(documented) == []


def test_the_native_backend_may_be_named() -> None:
    facts = facts_with(environment={"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,backend:native"})
    assert doctor.diagnose(facts) == []


def test_what_stops_the_trial_is_told_without_a_gpu() -> None:
    """The lack of a GPU is not all that is wrong: options that PyTorch refuses, for one."""
    trial = {"loads": False, "error": "ValueError: Unrecognized key 'garbage' in allocator config"}
    facts = facts_with(driver__available=False, driver__error="no libcuda", trial=trial)
    found = [one.what for one in doctor.diagnose(facts)]
    assert len(found) == 2 and "'garbage'" in found[0] and "no GPU can be used" in found[1]


def test_bad_options_of_pytorch_are_a_finding_here(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "garbage:1")
    facts = doctor.gather()
    if facts["trial"] is None:
        pytest.skip("the extension for torch is not built")
    assert any("garbage" in one.what for one in doctor.diagnose(facts))


def test_a_torch_that_is_too_old_is_a_problem_with_both_versions() -> None:
    (found,) = doctor.diagnose(facts_with(torch__version="2.10.0+cu130", trial=None))
    assert found.level == "problem"
    assert found.what == "esper_alloc needs torch 2.11 or newer, and this is torch 2.10.0+cu130"


def test_no_gpu_leaves_replay() -> None:
    facts = facts_with(driver__available=False, driver__error="no libcuda", trial=None)
    assert words.paths(facts) == [
        "none: without a GPU only replay, view, explain and the helpers work"
    ]


def test_without_a_gpu_it_says_that_it_loads() -> None:
    trial = {"loads": True, "before": "native", "backend": "native", "allocated": None}
    facts = facts_with(driver__available=False, driver__error="no libcuda", trial=trial)
    text = doctor.render(facts, doctor.diagnose(facts))
    assert text.endswith("esper_alloc loads here, but there is no GPU to allocate on: 1 problem")
    assert "trial:        it loads; there is no GPU to allocate on" in text


def test_another_torch_goes_through_function_pointers() -> None:
    text = doctor.render(facts_with(torch__version="2.14.1"), [])
    assert "through the extension" not in text
    assert "through function pointers (enable, run, pluggable_allocator)" in text
    assert "built for torch 2.11 (CUDA 13.0), 2.15 (CUDA 13.2), with kernels" in text


def test_source_directory_gets_the_command_for_it() -> None:
    facts = facts_with(
        package__source_directory=True,
        core={"loaded": False, "error": "ImportError", "build": None},
    )
    first = doctor.diagnose(facts)[0]
    assert "source directory" in first.what
    assert first.remedy.startswith("python setup.py build_ext --inplace")


def test_problems_come_before_notes() -> None:
    facts = facts_with(installed=["rmm"], torch__cuda=None)
    assert [finding.level for finding in doctor.diagnose(facts)] == ["problem", "note"]


def test_newer_driver_than_torch_is_fine() -> None:
    facts = facts_with(
        torch__cuda="12.8", shim__built_for={"2.11": "12.6"}, driver__driver_version=13020
    )
    assert doctor.diagnose(facts) == []


@pytest.mark.parametrize("sick", [False, True])
@pytest.mark.parametrize("as_json", [False, True])
def test_exit_code_and_output(
    monkeypatch: MonkeyPatch, capsys: CaptureFixture[str], sick: bool, as_json: bool
) -> None:
    from esper_alloc.__main__ import main

    facts = facts_with(torch__hip="6.4", torch__cuda=None) if sick else HEALTHY
    monkeypatch.setattr(doctor, "gather", lambda: facts)
    assert main(["doctor", *["--json"] * as_json]) == int(sick)
    output = capsys.readouterr().out
    if as_json:
        report = json.loads(output)
        assert report["torch"]["hip"] == ("6.4" if sick else None)
        assert [finding["level"] for finding in report["findings"]] == ["problem"] * sick
    else:
        assert ("PROBLEM: " in output) == sick


# --- gathering -------------------------------------------------------------


@pytest.mark.slow
def test_what_the_command_gathers_has_the_shape_that_is_diagnosed() -> None:
    done = python("-m", "esper_alloc", "doctor", "--json", cwd=ROOT)
    facts = json.loads(done.stdout)
    problems = [one for one in facts.pop("findings") if one["level"] == "problem"]
    assert (done.returncode, done.stderr) == (int(bool(problems)), "")
    assert all(one["remedy"] for one in problems)
    assert facts.keys() == HEALTHY.keys()
    for section in ("package", "core", "torch", "shim", "driver"):
        assert facts[section].keys() >= HEALTHY[section].keys(), section
    for device in facts["driver"]["devices"]:
        assert device.keys() >= HEALTHY["driver"]["devices"][0].keys()
    findings = doctor.diagnose(facts)
    doctor.render(facts, findings)
    if facts["trial"] is not None and facts["trial"].get("error") is None:
        assert facts["trial"]["loads"] is True
        assert facts["trial"]["before"] == "native"


def test_gathering_survives_a_broken_core_build_and_driver(monkeypatch: MonkeyPatch) -> None:
    for name in ("esper_alloc._core", "esper_alloc._build"):
        monkeypatch.setitem(sys.modules, name, None)
    core, shim = gathering.gather_core(), gathering.gather_shim()
    assert (core["loaded"], shim["built"]) == (False, False)
    assert "_core" in core["error"]
    assert "_build" in shim["error"]
    assert gathering.gather_driver(core)["available"] is False

    class Core:
        @staticmethod
        def driver_report() -> None:
            raise OSError("sick driver")

    monkeypatch.setitem(sys.modules, "esper_alloc._core", Core)
    assert gathering.gather_driver({"loaded": True})["error"] == "OSError: sick driver"


@pytest.mark.parametrize(
    "code, error",
    [
        ("raise SystemExit(3)", "exit code 3: no output"),
        ("import sys; sys.exit('last words')", "exit code 1: last words"),
        ("import os; os.abort()", "exit code -6"),
        ("import time; time.sleep(60)", "no answer within"),
    ],
)
def test_a_trial_that_ends_badly_is_a_fact(monkeypatch: MonkeyPatch, code: str, error: str) -> None:
    monkeypatch.setattr(gathering, "TRIAL", code)
    monkeypatch.setattr(gathering, "TRIAL_SECONDS", 1 if "sleep" in code else 600)
    assert error in gathering.run_trial()["error"]


def test_a_trial_that_ends_well(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "TRIAL", "print('chatter'); print('{\"loads\": true}')")
    assert gathering.run_trial() == {"loads": True}


OURS, FIRST, LAST = "ESPER_ALLOC_SEGMENTS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
HOOK = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
ROUNDUP = {LAST: "roundup_power2_divisions:4"}


@pytest.mark.parametrize(
    ("environment", "kind"),
    [
        ({}, "mapped"),
        ({OURS: "classic"}, "classic"),
        ({HOOK: "1"}, "classic"),
        ({HOOK: "0"}, "mapped"),
        ({HOOK: "1", OURS: "mapped"}, "mapped"),
        ({LAST: "expandable_segments:False"}, "classic"),
        ({FIRST: "max_split_size_mb:128,garbage_collection_threshold:0.8"}, "mapped"),
        ({FIRST: "expandable_segments:False", **ROUNDUP}, "classic"),
        ({FIRST: "expandable_segments:False", LAST: "expandable_segments:True"}, "mapped"),
    ],
)
def test_the_kind_of_segments(environment: dict[str, str], kind: str) -> None:
    facts = copy.deepcopy(HEALTHY)
    facts["environment"].update(environment)
    chosen = words.segments_chosen(facts)
    assert chosen.startswith(kind)
    # Where it is not what there would be otherwise, the one who asked is named.
    [(name, value), *_] = [*environment.items(), ("", "")]
    asked = value.partition(":")[0] if ":" in value else name
    assert kind == "mapped" or asked in chosen
