"""Runs every group under both allocators, in fresh processes, several at a time."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
ALLOCATORS = ("native", "esper_alloc")
#: Variables that would choose or tune an allocator behind a scenario's back.
FOREIGN = (
    "ESPER_ALLOC", "ESPER_ALLOC_SEGMENTS", "ESPER_ALLOC_USES", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUDA_LAUNCH_BLOCKING",
)  # fmt: skip

sys.path.insert(0, str(HERE))
import ground  # noqa: E402

Run = Callable[[Sequence[str], Mapping[str, str]], "subprocess.CompletedProcess[str]"]


def run_fresh(arguments: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200)


def script(arguments: Sequence[str]) -> str:
    """What `python` with these arguments would run, for a Python that runs already."""
    return (
        f"import runpy, sys\nsys.argv = {list(arguments)!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )


def answers_of(
    group: str, allocator: str, env: Mapping[str, str], run: Run = run_fresh
) -> dict[str, Any]:
    """What the group's scenarios answer, each {"answer"|"failed"|"skipped": ...}."""
    full = {key: value for key, value in os.environ.items() if key not in FOREIGN}
    # What `env` names comes first: it may have another build.
    full["PYTHONPATH"] = os.pathsep.join(
        [str(HERE), *env.get("PYTHONPATH", "").split(os.pathsep), str(ROOT)]
    )
    full.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    full.update({key: value for key, value in env.items() if key != "PYTHONPATH"})
    full.update(ground.GROUPS[group][1])
    try:
        done = run([str(HERE / "ground.py"), group, allocator], full)
    except subprocess.TimeoutExpired as error:
        return {"": {"failed": f"{group} under {allocator}: no end after 1200 s\n{error.stderr}"}}
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    if done.returncode != 0 or not lines:
        printed = done.stdout[-2000:] + done.stderr[-4000:]
        return {"": {"failed": f"{group} under {allocator}: exit {done.returncode}\n{printed}"}}
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("ANSWERS "))
    return found


def run_all(
    groups: Iterable[str],
    env: Mapping[str, str] | None = None,
    workers: int = 12,
    allocators: Iterable[str] = ALLOCATORS,
    run: Run = run_fresh,
) -> dict[tuple[str, str], dict[str, Any]]:
    """{(group, allocator): answers_of()}."""
    jobs = [(group, allocator) for allocator in allocators for group in groups]
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(lambda job: answers_of(*job, env or {}, run), jobs)
        return dict(zip(jobs, found))


def difference(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two answers differ, as lines."""
    if isinstance(a, dict) and isinstance(b, dict):
        lines = [f"{path}.{key}: only under native" for key in a if key not in b]
        lines += [f"{path}.{key}: only under esper_alloc" for key in b if key not in a]
        for key in a:
            if key in b:
                lines += difference(a[key], b[key], f"{path}.{key}")
        return lines
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [
            line for i, (x, y) in enumerate(zip(a, b)) for line in difference(x, y, f"{path}[{i}]")
        ]
    return [] if a == b else [f"{path or 'answer'}: native {a!r}, esper_alloc {b!r}"]


def judge(native: dict[str, Any], ours: dict[str, Any], name: str) -> str | None:
    """What is wrong with a scenario, or None. "skipped": it ran nowhere."""
    for answers in (native, ours):
        if "" in answers:
            return str(answers[""]["failed"])
    if native[name].get("skipped"):
        return "skipped"
    for allocator, answers in zip(ALLOCATORS, (native, ours)):
        if "failed" in answers[name]:
            return f"under {allocator}:\n{answers[name]['failed']}"
    lines = difference(native[name]["answer"], ours[name]["answer"])
    return "\n".join(lines[:40]) or None
