"""``python -m esper_alloc doctor``: what is here, and what is wrong with it.

Three steps, so that each can be tested alone: `gather` collects facts and
judges nothing, `diagnose` turns facts into findings and touches nothing,
`render` writes both down. Gathering never fails: what cannot be found out is
itself a fact.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

OLDEST_PYTHON = (3, 10)
OLDEST_DRIVER = 12000  # cuStreamGetId came with CUDA 12.0

ENVIRONMENT = (
    "ESPER_ALLOC",
    "ESPER_ALLOC_REUSE",
    "ESPER_ALLOC_SEGMENTS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUPY_GPU_MEMORY_LIMIT",
    "NUMBA_CUDA_MEMORY_MANAGER",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "LD_PRELOAD",
    "PYTHONPATH",
)

# What the driver layer does without, and what follows. What it cannot do
# without makes the whole driver unavailable.
WITHOUT = {
    "cuStreamGetId": "streams other than the default one cannot be told apart, and are refused",
    "cuCtxRecordEvent": "allocators that hide record_stream (the bare CUDAPluggableAllocator) "
    "hold freed memory until the device is synchronised",
}
WITHOUT_OTHERS = "pages cannot be mapped, so segments are classic"

# What ESPER_ALLOC_SEGMENTS may say.
SEGMENTS = ("classic", "mapped")

# Packages that bring an allocator of their own to the GPU.
OTHER_ALLOCATORS = ("rmm", "cupy", "torch_memory_saver")

# Run in a process of its own: enabling cannot be undone, and a crash of the
# driver should not be one of the doctor.
TRIAL = """
import json, sys
result = {"enabled": False, "before": None, "backend": None, "allocated": None, "error": None}
try:
    import torch
    result["before"] = torch.cuda.get_allocator_backend()
    import esper_alloc
    esper_alloc.enable()
    result["enabled"] = esper_alloc.is_enabled()
    result["backend"] = torch.cuda.get_allocator_backend()
    if torch.cuda.is_available():
        x = torch.full((1 << 18,), 7.0, device="cuda")
        result["allocated"] = bool(x.sum().item() == 7 * (1 << 18))
except BaseException as error:
    result["error"] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(result))
"""
TRIAL_SECONDS = 180

Facts = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """Something that the user should know. `level` "problem": it stops
    esper_alloc from working here; "note": it does not."""

    level: Literal["problem", "note"]
    what: str
    remedy: str


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="say what esper_alloc found on this machine and what is wrong",
        description="Says what esper_alloc found on this machine, which of its paths will be "
        "used, and what is wrong, with the remedy. Imports torch and, where there is a GPU, "
        "allocates 1 MiB on it in a process of its own.",
        epilog="Exit code 0: esper_alloc works here; 1: something stops it.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    facts = gather()
    findings = diagnose(facts)
    if args.json:
        print(
            json.dumps({**facts, "findings": [asdict(finding) for finding in findings]}, indent=2)
        )
    else:
        print(render(facts, findings))
    return 1 if any(finding.level == "problem" for finding in findings) else 0


# ---------------------------------------------------------------------------
# Facts
# ---------------------------------------------------------------------------


def gather() -> Facts:
    """Everything `diagnose` looks at, as plain containers and scalars."""
    core = gather_core()
    torch = gather_torch()
    shim = gather_shim()
    return {
        "package": gather_package(),
        "core": core,
        "torch": torch,
        "shim": shim,
        "driver": gather_driver(core),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "installed": [name for name in OTHER_ALLOCATORS if importlib.util.find_spec(name)],
        "trial": run_trial() if torch["cuda"] and shim["built"] else None,
    }


def gather_package() -> Facts:
    import esper_alloc

    location = Path(__file__).resolve().parent
    return {
        "version": esper_alloc.__version__,
        "location": str(location),
        "source_directory": (location.parent / "csrc").is_dir(),
        "python": list(sys.version_info[:3]),
        "executable": sys.executable,
        "system": platform.system(),
        "machine": platform.machine(),
        "release": platform.release(),
    }


def gather_core() -> Facts:
    """The C core: whether it loads and how it was built."""
    try:
        core = importlib.import_module("esper_alloc._core")
        return {"loaded": True, "error": None, "build": dict(core.build_info())}
    except Exception as error:
        return {"loaded": False, "error": describe(error), "build": None}


def gather_driver(core: Facts) -> Facts:
    """What the core's CUDA layer says of driver and GPUs."""
    nothing: Facts = {"available": False, "driver_version": None, "entry_points": {}, "devices": []}
    if not core["loaded"]:
        return {**nothing, "error": "the core is not there to ask"}
    try:
        return dict(importlib.import_module("esper_alloc._core").driver_report())
    except Exception as error:
        return {**nothing, "error": describe(error)}


def gather_torch() -> Facts:
    facts: Facts = {
        "installed": importlib.util.find_spec("torch") is not None,
        "version": None,
        "cuda": None,
        "hip": None,
        "error": None,
    }
    if facts["installed"]:
        try:
            import torch

            facts["version"] = str(torch.__version__)
            facts["cuda"] = torch.version.cuda
            facts["hip"] = torch.version.hip
        except Exception as error:
            facts["error"] = describe(error)
    return facts


def gather_shim() -> Facts:
    """What the build wrote down about the extension for torch."""
    try:
        build = importlib.import_module("esper_alloc._build")
    except Exception as error:
        return {
            "built": False,
            "torch": None,
            "cuda": None,
            "kernels": False,
            "missing": [],
            "error": describe(error),
        }
    return {
        "built": bool(build.HAS_SHIM),
        "torch": build.TORCH_VERSION,
        "cuda": build.CUDA_VERSION,
        "kernels": bool(build.HAS_KERNELS),
        "missing": as_sentences(build.WHAT_IS_MISSING),
        "error": None,
    }


def run_trial() -> Facts:
    """Enables esper_alloc and allocates on the first GPU, in a new process."""
    environment = {**os.environ, "ESPER_ALLOC": "0"}
    search_path = [str(Path(__file__).resolve().parent.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, search_path))
    try:
        done = subprocess.run(
            [sys.executable, "-c", TRIAL],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TRIAL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {TRIAL_SECONDS} s"}
    except OSError as error:
        return {"error": describe(error)}
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        last_words = (done.stderr.strip() or "no output").splitlines()[-1]
        return {"error": f"the process ended with exit code {done.returncode}: {last_words}"}


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def as_sentences(value: Any) -> list[str]:
    if not value:
        return []
    return [value] if isinstance(value, str) else [str(entry) for entry in value]


# ---------------------------------------------------------------------------
# Findings
# ---------------------------------------------------------------------------


def diagnose(facts: Facts) -> list[Finding]:
    """What is wrong, the problems first; each with its remedy."""
    findings = [
        *platform_findings(facts),
        *core_findings(facts),
        *torch_findings(facts),
        *driver_findings(facts),
        *environment_findings(facts),
    ]
    # The trial says least about the cause: heard only when nothing else speaks.
    if not any(finding.level == "problem" for finding in findings):
        findings += trial_findings(facts)
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


def minor(version: str) -> str:
    """ "2.11" of "2.11.0+cu130"."""
    return ".".join(version.split("+")[0].split(".")[:2])


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
        return [problem(f"torch cannot be imported: {torch['error']}", "mend that first")]
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
                "it has no GPU memory to allocate",
                f"install a CUDA build of PyTorch (pytorch.org lists them), then {rebuild(facts)}",
            )
        ]
    if not shim["built"]:
        missing = [sentence.removeprefix("the PyTorch part: ") for sentence in shim["missing"]]
        why = "; ".join(missing) or shim["error"] or "it was built without PyTorch"
        return [
            problem(
                f"the extension for PyTorch (esper_alloc._torch) was not built: {why}",
                rebuild(facts),
            )
        ]
    if shim["torch"] and minor(shim["torch"]) != minor(torch["version"]):
        return [
            problem(
                f"the extension was built for torch {minor(shim['torch'])}, "
                f"but this is torch {torch['version']}",
                rebuild(facts),
            )
        ]
    if shim["cuda"] and shim["cuda"].split(".")[0] != torch["cuda"].split(".")[0]:
        return [
            problem(
                f"the extension was built for CUDA {shim['cuda']}, "
                f"but this torch is built for CUDA {torch['cuda']}",
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
                "--gpus all. `python -m esper_alloc replay` needs no GPU",
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
                    f"take backend:cudaMallocAsync out of {name}",
                )
            )
    if environment.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
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
    if environment.get("ESPER_ALLOC_REUSE", "gate") not in ("gate", "grow", "auto"):
        findings.append(
            problem(
                f"ESPER_ALLOC_REUSE is {environment['ESPER_ALLOC_REUSE']!r}",
                "set it to gate, grow or auto, or unset it",
            )
        )
    if environment.get("ESPER_ALLOC_SEGMENTS", "classic") not in ("", *SEGMENTS):
        findings.append(
            problem(
                f"ESPER_ALLOC_SEGMENTS is {environment['ESPER_ALLOC_SEGMENTS']!r}",
                "set it to classic or mapped, or unset it",
            )
        )
    if "torch_memory_saver" in environment.get("LD_PRELOAD", ""):
        findings.append(
            note(
                "torch_memory_saver is preloaded: it intercepts cudaMalloc, which esper_alloc "
                "does not call, so pausing and resuming will not reach PyTorch's memory",
                "use one of the two: unset LD_PRELOAD, or ESPER_ALLOC=0",
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
                "docs/troubleshooting.md goes by error message",
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


def cuda_version(number: int) -> str:
    """ "12.4" of 12040."""
    return f"{number // 1000}.{number % 1000 // 10}"


# ---------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------


def render(facts: Facts, findings: list[Finding]) -> str:
    lines = [f"{label + ':':<14}{value}" for label, value in fact_lines(facts)]
    for finding in findings:
        mark = "PROBLEM" if finding.level == "problem" else "note"
        lines += ["", f"{mark}: {finding.what}", f"  remedy: {finding.remedy}"]
    problems = sum(finding.level == "problem" for finding in findings)
    if problems:
        lines += ["", f"esper_alloc cannot work here: {problems} problem(s)"]
    else:
        lines += ["", "esper_alloc works here"]
    return "\n".join(lines)


def fact_lines(facts: Facts) -> list[tuple[str, str]]:
    package, core, torch, shim = (facts[key] for key in ("package", "core", "torch", "shim"))
    lines = [
        ("esper_alloc", f"{package['version']}, {package['location']}"),
        ("python", f"{'.'.join(map(str, package['python']))}, {package['executable']}"),
        ("platform", f"{package['system']} {package['release']} {package['machine']}"),
        ("core", "loaded" + build_text(core["build"]) if core["loaded"] else core["error"]),
        ("torch", torch_text(torch)),
        ("extension", shim_text(shim)),
        *driver_lines(facts["driver"]),
        *[("path", path) for path in paths(facts)],
    ]
    lines += [("environment", f"{name}={value}") for name, value in facts["environment"].items()]
    if facts["installed"]:
        lines.append(("also here", ", ".join(facts["installed"])))
    if facts["trial"] is not None:
        lines.append(("trial", trial_text(facts["trial"])))
    return lines


def build_text(build: Facts) -> str:
    details = [f"{key.replace('_', ' ')} {value}" for key, value in build.items() if value]
    return f" ({', '.join(details)})" if details else ""


def torch_text(torch: Facts) -> str:
    if not torch["installed"]:
        return "not installed"
    if torch["error"]:
        return str(torch["error"])
    if torch["hip"]:
        return f"{torch['version']}, for ROCm {torch['hip']}"
    return f"{torch['version']}, " + (
        f"for CUDA {torch['cuda']}" if torch["cuda"] else "without CUDA"
    )


def shim_text(shim: Facts) -> str:
    if not shim["built"]:
        return "not built"
    kernels = ", with kernels" if shim["kernels"] else ""
    return f"built for torch {shim['torch']}, CUDA {shim['cuda']}{kernels}"


def driver_lines(driver: Facts) -> list[tuple[str, str]]:
    if not driver["available"]:
        return [("driver", str(driver["error"]))]
    version = driver["driver_version"]
    lines = [("driver", f"supports CUDA {cuda_version(version)}" if version else "there")]
    for device in driver["devices"]:
        major, minor_ = device["compute_capability"]
        virtual = "has" if device["virtual_memory"] else "lacks"
        lines.append(
            (
                f"GPU {device['index']}",
                f"{device['name']}, {device['total_bytes'] / 2**30:.1f} GiB, compute capability "
                f"{major}.{minor_}, {virtual} virtual memory management",
            )
        )
    points = driver["entry_points"]
    there = sum(map(bool, points.values()))
    lines.append(("entry points", f"{there} of {len(points)} found"))
    return lines


def paths(facts: Facts) -> list[str]:
    """Which of its ways esper_alloc takes here, in words."""
    if not facts["core"]["loaded"]:
        return ["none"]
    chosen = ["replay on the simulated device"]
    if not facts["driver"]["available"]:
        return chosen
    if facts["torch"]["cuda"]:
        if facts["shim"]["built"]:
            chosen.append("PyTorch through the extension (enable, allocator, run)")
        chosen.append("PyTorch through function pointers (pluggable_allocator)")
    chosen.append(f"segments: {segments_chosen(facts)}")
    reuse = facts["environment"].get("ESPER_ALLOC_REUSE", "gate")
    chosen.append(f"reuse order: {reuse}")
    return chosen


def segments_chosen(facts: Facts) -> str:
    """The kind of segments, and who asked for another one than there would be."""
    kind, because = segments_wanted(facts["environment"])
    if kind == "mapped" and all(one["virtual_memory"] for one in facts["driver"]["devices"]):
        return "mapped (pages where they are needed, in reserved addresses)"
    return f"classic (one driver allocation each){because if kind == 'classic' else ''}"


def segments_wanted(environment: dict[str, str]) -> tuple[str, str]:
    """The kind that the environment asks for, and why in words. As the core has it: what is
    said of the kind counts more than what concerns one kind only."""
    # PyTorch reads both, in this order, and forgets of the first what the second leaves out;
    # but expandable_segments stays.
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    settings = [environment[name].replace(" ", "") for name in names if environment.get(name)]
    given = re.findall(r"expandable_segments:(True|False)", ",".join(settings))
    if given:
        kind = "mapped" if given[-1] == "True" else "classic"
        return kind, f", as expandable_segments:{given[-1]} asks for"
    wanted = environment.get("ESPER_ALLOC_SEGMENTS")
    if wanted:
        return wanted, f", as ESPER_ALLOC_SEGMENTS={wanted} asks for"
    for option in ("max_split_size_mb", "garbage_collection_threshold"):
        if re.search(rf"{option}:[0-9.]*[1-9]", settings[-1] if settings else ""):
            return (
                "classic",
                f", which {option} concerns; expandable_segments:True: mapped all the same",
            )
    registers = environment.get("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "")
    if registers[:1] in tuple("1yYtT"):
        return "classic", ", as TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK needs"
    return "mapped", ""


def trial_text(trial: Facts) -> str:
    if trial.get("error"):
        return str(trial["error"])
    if trial.get("allocated") is None:
        return "enabled; no GPU to allocate on"
    return "enabled, and 1 MiB on the first GPU kept what was written to it"
