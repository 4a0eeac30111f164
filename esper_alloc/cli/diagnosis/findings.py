"""What is wrong, judged by the facts alone, with the remedy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ...installation.pytorch import difference, too_old
from ...torch_allocator.choices import ALL
from .facts import Facts, unknown
from .words import cuda_version

OLDEST_PYTHON = (3, 10)
OLDEST_DRIVER = 12000  # cuStreamGetId came with CUDA 12.0

# What the driver layer does without, and what follows. What it cannot do
# without makes the whole driver unavailable.
WITHOUT = {
    "cuStreamGetId": "streams other than the default one cannot be told apart, and are refused",
    "cuCtxRecordEvent": "allocators that hide record_stream (the bare CUDAPluggableAllocator) "
    "hold freed memory until the device is synchronised",
}
WITHOUT_OTHERS = "pages cannot be mapped, so segments are classic"


@dataclass(frozen=True)
class Finding:
    """Something that the user should know. `level` "problem": it stops
    esper_alloc from working here; "note": it does not."""

    level: Literal["problem", "note"]
    what: str
    remedy: str


def diagnose(facts: Facts) -> list[Finding]:
    """What is wrong, the problems first; each with its remedy."""
    findings = [
        *platform_findings(facts),
        *core_findings(facts),
        *torch_findings(facts),
        *environment_findings(facts),
    ]
    # The trial says least about the cause: heard only when nothing else speaks but the lack of a
    # GPU, which it does not mind.
    if not any(finding.level == "problem" for finding in findings):
        findings += trial_findings(facts)
    findings += driver_findings(facts)
    return sorted(findings, key=lambda finding: finding.level != "problem")


def problem(what: str, remedy: str) -> Finding:
    return Finding("problem", what, remedy)


def note(what: str, remedy: str) -> Finding:
    return Finding("note", what, remedy)


def rebuild(facts: Facts) -> str:
    """The command that builds everything again for what is here now."""
    if facts["package"]["source_directory"]:
        return "python setup.py build_ext --inplace --force"
    return (
        "in the source directory of esper_alloc: "
        "pip install --no-build-isolation --force-reinstall --no-deps ."
    )


def platform_findings(facts: Facts) -> list[Finding]:
    package = facts["package"]
    findings = []
    if package["system"] != "Linux":
        findings.append(
            problem(
                f"{package['system']} is not supported",
                "use Linux; on Windows, WSL 2 with an NVIDIA driver is a Linux",
            )
        )
    if tuple(package["python"][:2]) < OLDEST_PYTHON:
        findings.append(
            problem(
                f"Python {'.'.join(map(str, package['python']))} is too old",
                "use Python 3.10 or newer",
            )
        )
    return findings


def core_findings(facts: Facts) -> list[Finding]:
    core, package = facts["core"], facts["package"]
    if core["loaded"]:
        return []
    if package["source_directory"]:
        return [
            problem(
                f"this is a source directory whose core was not built ({core['error']})",
                f"{rebuild(facts)}, or `cd` elsewhere to use an installed one",
            )
        ]
    return [
        problem(
            f"the core (esper_alloc._core) cannot be loaded: {core['error']}",
            f"with a C compiler on PATH, {rebuild(facts)}",
        )
    ]


def torch_findings(facts: Facts) -> list[Finding]:
    torch, shim = facts["torch"], facts["shim"]
    if not torch["installed"]:
        return [
            problem(
                "PyTorch is not installed in this Python: only the core and `replay` work",
                f"pip install torch, then {rebuild(facts)}",
            )
        ]
    if torch["error"]:
        return [problem(f"torch cannot be imported: {torch['error']}", "fix that import first")]
    if torch["hip"]:
        return [
            problem(
                f"this PyTorch is built for ROCm {torch['hip']}: AMD GPUs are not supported",
                "use an NVIDIA GPU and a CUDA build of PyTorch",
            )
        ]
    if not torch["cuda"]:
        return [
            problem(
                f"this PyTorch ({torch['version']}) is built without CUDA: "
                "it has no GPU memory to allocate. The helpers and `replay` work",
                f"install a CUDA build of PyTorch (pytorch.org lists them), then {rebuild(facts)}",
            )
        ]
    if (old := too_old(torch["version"])) is not None:
        return [problem(old, f"install a newer PyTorch for CUDA, then {rebuild(facts)}")]
    if not shim["built"]:
        if facts["package"]["source_directory"] and not facts["core"]["loaded"]:
            return []  # one cause: nothing was built here, and the core's finding says so
        missing = [sentence.removeprefix("the PyTorch part: ") for sentence in shim["missing"]]
        why = "; ".join(missing) or shim["error"] or "it was built without PyTorch"
        return [
            problem(
                f"the extension for PyTorch (esper_alloc._torch) was not built: {why}",
                rebuild(facts),
            )
        ]
    differs = difference(shim["built_for"], torch["version"], torch["cuda"])
    if differs is not None:
        return [
            note(
                f"the extension {differs}: enable() uses PyTorch's pluggable allocator, without "
                "statistics, snapshots and automatic uses",
                rebuild(facts),
            )
        ]
    return [note(f"not built: {missing}", rebuild(facts)) for missing in shim["missing"]]


def driver_findings(facts: Facts) -> list[Finding]:
    driver, core = facts["driver"], facts["core"]
    if not core["loaded"]:
        return []  # said already
    if not driver["available"]:
        if facts["environment"].get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            return [problem("CUDA_VISIBLE_DEVICES hides every GPU", "unset CUDA_VISIBLE_DEVICES")]
        return [
            problem(
                f"no GPU can be used: {driver['error']}",
                "`nvidia-smi` must list the GPU: install NVIDIA's driver, or in Docker add "
                "--gpus all. `python -m esper_alloc replay FILE` needs no GPU",
            )
        ]
    findings = []
    version, built_for = driver["driver_version"], facts["torch"]["cuda"]
    if version is not None and version < OLDEST_DRIVER:
        findings.append(
            problem(
                f"the driver supports CUDA {cuda_version(version)} only",
                "install a driver for CUDA 12.0 or newer (525 or newer)",
            )
        )
    elif version is not None and built_for and version // 1000 < int(built_for.split(".")[0]):
        findings.append(
            problem(
                f"this torch needs a driver for CUDA {built_for}, "
                f"and the driver supports CUDA {cuda_version(version)}",
                "install a newer driver, or a PyTorch built for an older CUDA",
            )
        )
    if not driver["devices"]:
        findings.append(problem("the driver lists no GPU", "see what `nvidia-smi` says"))
    missing = sorted(name for name, there in driver["entry_points"].items() if not there)
    by_effect: dict[str, list[str]] = {}
    for name in missing:
        by_effect.setdefault(WITHOUT.get(name, WITHOUT_OTHERS), []).append(name)
    for effect, names in by_effect.items():
        findings.append(
            note(f"the driver lacks {', '.join(names)}: {effect}", "install a newer driver")
        )
    return findings


def environment_findings(facts: Facts) -> list[Finding]:
    environment, installed = facts["environment"], facts["installed"]
    findings = []
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        settings = environment.get(name, "").replace(" ", "")
        backend = re.search(r"backend:(\w+)", settings)
        if backend and backend[1] == "cudaMallocAsync":
            findings.append(
                problem(
                    f"{name} asks for PyTorch's cudaMallocAsync back end, and only one "
                    "allocator can be current",
                    f"remove backend:cudaMallocAsync from {name}",
                )
            )
    if environment.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1":
        findings.append(
            note(
                "PYTORCH_NO_CUDA_MEMORY_CACHING is set: memory comes straight from CUDA, "
                "and esper_alloc neither caches nor protects it",
                "unset PYTORCH_NO_CUDA_MEMORY_CACHING, unless a tool such as "
                "compute-sanitizer needs it",
            )
        )
    if environment.get("ESPER_ALLOC", "0") not in ("", "0", "1"):
        findings.append(
            problem(
                f"ESPER_ALLOC is {environment['ESPER_ALLOC']!r}, which is neither 0 nor 1",
                "set ESPER_ALLOC=1, or unset it",
            )
        )
    if environment.get("ESPER_ALLOC") == "0":
        findings.append(note("ESPER_ALLOC=0 turns enable() and `run` off", "unset ESPER_ALLOC"))
    for choice in ALL:
        value = environment.get(choice.variable, "")
        if value and not choice.accepts(value):
            findings.append(
                problem(
                    f"{choice.variable} is {value!r}",
                    f"set it to {choice.choices}; or unset it",
                )
            )
    for name in unknown(environment):
        known = "those that it has: python -m esper_alloc docs environment"
        findings.append(note(f"{name} is no variable of esper_alloc's", known))
    if "torch_memory_saver" in environment.get("LD_PRELOAD", ""):
        findings.append(
            note(
                "torch_memory_saver is preloaded: it intercepts cudaMalloc, which esper_alloc "
                "does not call, so pausing and resuming will not reach PyTorch's memory",
                "`run --memory-saver` lets the program pause with esper_alloc; else use one of the "
                "two: unset LD_PRELOAD, or ESPER_ALLOC=0",
            )
        )
    if "rmm" in installed:
        findings.append(
            note(
                "RMM is installed: a program that makes rmm_torch_allocator current "
                "cannot use esper_alloc as well",
                "nothing to do unless the program calls change_current_allocator",
            )
        )
    return findings


def trial_findings(facts: Facts) -> list[Finding]:
    trial = facts["trial"]
    if trial is None:
        return []
    if trial.get("error"):
        return [
            problem(
                f"enabling it in a new process failed: {trial['error']}",
                "do what it says, or look it up: python -m esper_alloc docs troubleshooting",
            )
        ]
    if trial.get("before") not in (None, "native"):
        return [
            problem(
                f"before anything was enabled, torch's allocator was {trial['before']!r}: "
                "something changes it when torch is imported",
                "look for it in sitecustomize, .pth files and LD_PRELOAD",
            )
        ]
    if trial.get("allocated") is False:
        return [
            problem(
                "memory on the first GPU did not keep what was written to it",
                "run `python -m esper_alloc doctor` again with CUDA_LAUNCH_BLOCKING=1, "
                "and report both outputs",
            )
        ]
    return []
