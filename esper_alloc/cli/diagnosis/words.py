"""Facts and findings in words, as the doctor prints them."""

from __future__ import annotations

from ...installation.pytorch import difference
from ...torch_allocator.choices import ALLOWANCE, USES, segments_wanted
from .facts import Facts


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
    torches = ", ".join(f"{torch} (CUDA {cuda})" for torch, cuda in shim["built_for"].items())
    return f"built for torch {torches}{kernels}"


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
    if not facts["driver"]["available"]:
        return ["none: without a GPU only replay, view, explain and the helpers work"]
    chosen = ["replay, which needs no GPU"]
    torch, shim = facts["torch"], facts["shim"]
    if torch["cuda"]:
        pointers = "pluggable_allocator"
        if shim["built"] and difference(shim["built_for"], torch["version"], torch["cuda"]):
            pointers = f"enable, run, {pointers}"
        elif shim["built"]:
            chosen.append("PyTorch through the extension (enable, allocator, run)")
        chosen.append(f"PyTorch through function pointers ({pointers})")
    chosen.append(f"segments: {segments_chosen(facts)}")
    for choice in (ALLOWANCE, USES):
        value = facts["environment"].get(choice.variable) or choice.default
        chosen.append(f"{choice.argument}: {value}")
    return chosen


def segments_chosen(facts: Facts) -> str:
    """The kind of segments, and who asked for another one than there would be."""
    kind, because = segments_wanted(facts["environment"])
    if kind == "mapped" and all(one["virtual_memory"] for one in facts["driver"]["devices"]):
        return "mapped (pages where they are needed, in reserved addresses)"
    return f"classic (one driver allocation each){because if kind == 'classic' else ''}"


def trial_text(trial: Facts) -> str:
    if trial.get("error"):
        return str(trial["error"])
    if trial.get("allocated") is None:
        return "it loads; there is no GPU to allocate on"
    return "enabled, and 1 MiB on the first GPU kept what was written to it"


def cuda_version(number: int) -> str:
    """ "12.4" of 12040."""
    return f"{number // 1000}.{number % 1000 // 10}"
