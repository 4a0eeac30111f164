"""What is here: collected, and not judged.

Gathering never fails: what cannot be found out is itself a fact.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...torch_allocator.choices import ALL

ENVIRONMENT = (
    "ESPER_ALLOC",
    *(choice.variable for choice in ALL),
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

# Those of builds, tests, and what `run` tells the program.
NOT_SHOWN = tuple(
    f"ESPER_ALLOC_{name}"
    for name in (
        "SHIM", "KERNELS", "DEBUG", "SANITIZE", "RULE_SWITCHES", "LIBCUDA", "RECORD", "RECORD_PID",
        "TEST_TORCHES",
    )
)  # fmt: skip

# Packages that bring an allocator of their own to the GPU.
OTHER_ALLOCATORS = ("rmm", "cupy", "torch_memory_saver")

# Run in a process of its own: enabling cannot be undone, and a crash of the
# driver should not be one of the doctor.
TRIAL = """
import json, sys
result = {"loads": False, "before": None, "backend": None, "allocated": None, "error": None}
try:
    import torch
    result["before"] = torch.cuda.get_allocator_backend()
    import esper_alloc
    from esper_alloc.installation.pytorch import OtherTorchError
    try:
        esper_alloc.allocator()
    except OtherTorchError:
        esper_alloc.pluggable_allocator()
    result["loads"] = True
    esper_alloc.enable()
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

PACKAGE = Path(__file__).resolve().parents[2]


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
        "environment": {
            name: os.environ[name]
            for name in (*ENVIRONMENT, *sorted(unknown(os.environ)))
            if name in os.environ
        },
        "installed": [name for name in OTHER_ALLOCATORS if importlib.util.find_spec(name)],
        "trial": run_trial() if torch["cuda"] and shim["built"] else None,
    }


def unknown(environment: Iterable[str]) -> list[str]:
    """Variables that look like esper_alloc's, and are not."""
    known = (*ENVIRONMENT, *NOT_SHOWN)
    return [name for name in environment if name.startswith("ESPER_ALLOC_") and name not in known]


def gather_package() -> Facts:
    import esper_alloc

    return {
        "version": esper_alloc.__version__,
        "location": str(PACKAGE),
        "source_directory": (PACKAGE.parent / "csrc").is_dir(),
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
            "built_for": {},
            "kernels": False,
            "missing": [],
            "error": describe(error),
        }
    return {
        "built": bool(build.BUILT_FOR),
        "built_for": dict(build.BUILT_FOR),
        "kernels": bool(build.HAS_KERNELS),
        "missing": as_sentences(build.WHAT_IS_MISSING),
        "error": None,
    }


def run_trial() -> Facts:
    """Enables esper_alloc and allocates on the first GPU, in a new process."""
    environment = {**os.environ, "ESPER_ALLOC": ""}  # 0 would turn enable() off
    search_path = [str(PACKAGE.parent), environment.get("PYTHONPATH", "")]
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
