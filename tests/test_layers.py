"""Calls and includes in csrc go down only.

The core's folders are layers: a file may call and include what stands in its own
folder or in a lower one. Within all of csrc no files call each other in a circle.
The calls are read from the symbols of compiled objects, so this needs a C compiler
and ``nm``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CC = os.environ.get("CC", "cc")
PYTHON_HEADERS = Path(sysconfig.get_path("include"))
#: The core's folders, from the lowest to the highest. Each has a README that says so.
LAYERS = ("base", "stats", "order", "blocks", "pools", "memory", "requests", "api")

#: (from, to) -> the names that the one takes from the other.
Edges = Mapping[tuple[str, str], set[str]]

pytestmark = pytest.mark.skipif(
    shutil.which(CC) is None or shutil.which("nm") is None, reason="needs a C compiler and nm"
)


def symbols(object_file: Path) -> tuple[set[str], set[str]]:
    """The names that an object defines for others, and those that it takes from others."""
    lines = subprocess.run(
        ["nm", "--extern-only", str(object_file)], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    defined = {line.split()[-1] for line in lines if line.split()[-2] not in "Uw"}
    return defined, {line.split()[-1] for line in lines if line.split()[-2] == "U"}


def calls(csrc: Path, sources: Iterable[Path], folder: Path) -> Edges:
    """Which file calls which, by the symbols of their objects."""

    def compile_one(source: Path) -> tuple[str, set[str], set[str]]:
        name = str(source.relative_to(csrc))
        object_file = folder / (name.replace("/", "_") + ".o")
        # Without optimisation: no call is inlined away.
        command = [CC, "-std=gnu11", "-D_GNU_SOURCE", "-O0", f"-I{PYTHON_HEADERS}"]
        command += ['-DESPER_VERSION=""']
        subprocess.run([*command, "-c", str(source), "-o", str(object_file)], check=True)
        return name, *symbols(object_file)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    home = {symbol: name for name, defined, _ in objects for symbol in defined}
    edges: dict[tuple[str, str], set[str]] = {}
    for name, _, taken in objects:
        for symbol in taken:
            if home.get(symbol, name) != name:
                edges.setdefault((name, home[symbol]), set()).add(symbol)
    return edges


def includes(csrc: Path) -> Edges:
    """Which file includes which."""
    edges: dict[tuple[str, str], set[str]] = {}
    for file in sorted(csrc.rglob("*")):
        if file.suffix not in {".c", ".h", ".cpp", ".cu", ".cuh"}:
            continue
        for name in re.findall(r'^#include "([^"]+)"', file.read_text(), re.M):
            target = (file.parent / name).resolve()
            if target.is_relative_to(csrc):
                pair = (str(file.relative_to(csrc)), str(target.relative_to(csrc)))
                edges.setdefault(pair, set()).add("#include")
    return edges


def layer(name: str) -> int | None:
    parts = name.split("/")
    return LAYERS.index(parts[1]) if parts[0] == "core" and len(parts) == 3 else None


def edges_up(edges: Edges) -> list[str]:
    """A line for each edge from a lower layer of the core to a higher one, and from the
    core to what is not the core's."""
    found = []
    for (start, end), names in sorted(edges.items()):
        low, high = layer(start), layer(end)
        outside = high is None and end not in {"esper_alloc.h", "device/device.h"}
        if low is not None and (outside or (high is not None and high > low)):
            found.append(f"{start} -> {end}: {', '.join(sorted(names))}")
    return found


def circle(edges: Edges) -> list[str]:
    """Files that reach each other, in order; empty: there are none."""
    reached: dict[str, list[str]] = {}
    for start, end in edges:
        reached.setdefault(start, []).append(end)
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for end in sorted(reached.get(name, [])):
            if found := visit(end, [*path, name]):
                return found
        done.add(name)
        return []

    for name in sorted(reached):
        if found := visit(name, []):
            return found
    return []


def c_sources(csrc: Path) -> list[Path]:
    """Every C file; those of the Python modules where Python's headers are installed."""
    found = sorted(csrc.rglob("*.c"))
    if (PYTHON_HEADERS / "Python.h").is_file():
        return found
    return [source for source in found if source.parent.name != "python"]


@pytest.fixture(scope="module")
def all_calls(tmp_path_factory: pytest.TempPathFactory) -> Edges:
    csrc = ROOT / "csrc"
    return calls(csrc, c_sources(csrc), tmp_path_factory.mktemp("objects"))


def test_every_folder_of_the_core_is_a_layer_and_says_so() -> None:
    folders = {path.name for path in (ROOT / "csrc" / "core").iterdir() if path.is_dir()}
    assert folders == set(LAYERS)
    for folder in LAYERS:
        assert (ROOT / "csrc" / "core" / folder / "README.md").is_file(), folder


def test_no_call_of_the_core_goes_up(all_calls: Edges) -> None:
    assert edges_up(all_calls) == []


def test_no_include_of_the_core_goes_up() -> None:
    assert edges_up(includes(ROOT / "csrc")) == []


def test_no_files_call_each_other_in_a_circle(all_calls: Edges) -> None:
    assert circle(all_calls) == []


def test_no_files_include_each_other_in_a_circle() -> None:
    assert circle(includes(ROOT / "csrc")) == []


def test_an_edge_that_is_put_in_is_named(tmp_path: Path) -> None:
    base, api = tmp_path / "core" / "base", tmp_path / "core" / "api"
    base.mkdir(parents=True)
    api.mkdir()
    (api / "top.h").write_text("int top(void);\n")
    (api / "top.c").write_text('#include "../base/low.h"\nint top(void) { return low(); }\n')
    (base / "low.h").write_text("int low(void);\n")
    (base / "low.c").write_text('#include "../api/top.h"\nint low(void) { return top(); }\n')
    found = calls(tmp_path, c_sources(tmp_path), tmp_path)
    assert edges_up(found) == ["core/base/low.c -> core/api/top.c: top"]
    assert edges_up(includes(tmp_path)) == ["core/base/low.c -> core/api/top.h: #include"]
    assert circle(found) == ["core/api/top.c", "core/base/low.c", "core/api/top.c"]
