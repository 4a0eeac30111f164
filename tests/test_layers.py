"""Calls and includes in csrc go down only.

Folders are layers: a file may call and include what stands in its own folder or in a
lower one. The devices are the lowest layer, the core's folders follow, then sleep, which
knows the core by a few headers, the black box, the replay, the auditor's engine and the shim's folders, then all else. The core knows no driver, only
what every driver offers, ``device.h``, and no driver knows another. The engine knows none
of these, and the shim knows the core by its public headers alone. Within all of csrc no
files call or include each other in a circle. Headers of the core declare what the source
beside them defines.

The calls of C files are read from the symbols of compiled objects, so this needs a C
compiler and ``nm``. The C++ files include PyTorch's headers, and compiling each of them takes
minutes. So their includes are checked, a header counting as one with its source, and that who
calls a function includes its header.
"""

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from circles import circle
from compilers import CC
from processes import ROOT, succeeded

PYTHON_HEADERS = Path(sysconfig.get_path("include"))
PUBLIC = ("esper_alloc.h", "esper_report.h", "esper_sleep.h")
#: By these the sleep beside the core reaches it. It uses no block itself.
PAGE_CALLS = (
    *("base/call.h", "base/error.h", "base/tag.h"),
    *("order/capturing.h", "order/device.h", "order/host_wait.h", "order/record.h"),
    *("memory/asleep.h", "memory/choose.h", "memory/waking.h"),
    *("memory/failure.h", "memory/peers.h", "requests/drain.h", "requests/release.h"),
)
#: The core's folders, from the lowest to the highest. Each has a README that says so.
CORE = ("base", "stats", "order", "blocks", "pools", "memory", "requests", "api")
#: The shim's folders, likewise.
TORCH = (
    "base", "automatic", "ipc", "start", "debugging", "reporting", "memory", "uses", "auditor",
    "allocator",
)  # fmt: skip
FOLDERS = {"core": CORE, "torch": TORCH}
#: All folders that are layers, from the lowest to the highest.
LAYERS = (
    "device", *(f"core/{folder}" for folder in CORE), "sleep", "black_box", "replay", "audit",
    *(f"torch/{folder}" for folder in TORCH),
)  # fmt: skip
#: By the first two the shim reaches the core and the engine in another module. The last one has
#: inline functions only.
FROM_PYTHON = ("python/capi.h", "python/audit_capi.h", "python/gil.h")
#: The C++ files of the PyTorch module.
SHIM = ("torch/", "python/")
#: The shim's own namespaces.
NAMESPACES = "esper|auditing|sites|fence"
#: A function that is declared or defined outside of classes, and one that is called.
DECLARED = r"^(?!using |return )(?:\[\[\w+\]\] )?\w[\w:<>,*& ]*[ *&](\w+)\("
CALLED = rf"(?<![.>:\w])(?:(?:{NAMESPACES})::)*(\w+)\("
#: Where the drivers stand, each in a folder of its own.
DRIVERS = ("device/cuda", "device/sim")

#: (from, to) -> the names that the one takes from the other.
Edges = Mapping[tuple[str, str], set[str]]

pytestmark = pytest.mark.skipif(
    not CC or shutil.which("nm") is None, reason="needs a C compiler and nm"
)


def symbols(object_file: Path) -> tuple[set[str], set[str]]:
    """The names that an object defines for others, and those that it takes from others.
    What C++ defines in a header is weak in many objects, and belongs to none."""
    lines = succeeded("nm", "--extern-only", object_file).stdout.splitlines()
    defined = {line.split()[-1] for line in lines if line.split()[-2] not in "UuVvWw"}
    return defined, {line.split()[-1] for line in lines if line.split()[-2] == "U"}


def compile_all(csrc: Path, sources: Iterable[Path], folder: Path) -> dict[str, Path]:
    """The objects of C files, by the name of their source."""

    def compile_one(source: Path) -> tuple[str, Path]:
        name = str(source.relative_to(csrc))
        object_file = folder / (name.replace("/", "_") + ".o")
        # Without optimisation: no call is inlined away.
        command = [*CC, "-std=gnu11", "-D_GNU_SOURCE", "-O0", f"-I{PYTHON_HEADERS}"]
        command += ['-DESPER_VERSION=""']
        subprocess.run([*command, "-c", str(source), "-o", str(object_file)], check=True)
        return name, object_file

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(pool.map(compile_one, sources))


def calls(objects: Mapping[str, Path]) -> Edges:
    """Which file calls which, by the symbols of their objects."""
    known = {name: symbols(object_file) for name, object_file in objects.items()}
    home = {symbol: name for name, (defined, _) in known.items() for symbol in defined}
    edges: dict[tuple[str, str], set[str]] = {}
    for name, (_, taken) in known.items():
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


def units(edges: Edges, folders: tuple[str, ...]) -> Edges:
    """The edges within these folders, a header and the source beside it taken as one."""
    joined: dict[tuple[str, str], set[str]] = {}
    for (start, end), names in edges.items():
        pair = (start.rpartition(".")[0], end.rpartition(".")[0])
        if pair[0] != pair[1] and all(name.startswith(folders) for name in pair):
            joined.setdefault(pair, set()).update(names)
    return joined


def hidden_calls(csrc: Path) -> list[str]:
    """A line for each function of the shim that a source calls without a header that declares it.
    By names: those of functions differ."""

    def text_of(path: Path) -> str:
        return re.sub(r'//.*|"(\\.|[^"\\])*"', "", path.read_text())

    def reached(name: str, known: set[str]) -> set[str]:
        for start, end in edges:
            if start == name and end not in known:
                known.add(end)
                reached(end, known)
        return known

    edges = includes(csrc).keys()
    files = [path for path in sorted((csrc / "torch").rglob("*")) if path.suffix in {".h", ".cpp"}]
    homes: dict[str, set[str]] = {}
    for path in files:
        for function in re.findall(DECLARED, text_of(path), re.M):
            homes.setdefault(function, set()).add(str(path.relative_to(csrc)))
    found = []
    for path in [path for path in files if path.suffix == ".cpp"]:
        name = str(path.relative_to(csrc))
        seen = reached(name, {name})
        for function in sorted(set(re.findall(CALLED, text_of(path)))):
            if function in homes and not homes[function] & seen:
                found.append(f"{name} calls {function} of {', '.join(sorted(homes[function]))}")
    return found


def declared_elsewhere(csrc: Path, defined: Mapping[str, set[str]]) -> list[str]:
    """A line for each function of the core that another header than its source's declares."""
    public = "".join((csrc / name).read_text() for name in PUBLIC if (csrc / name).is_file())
    found = []
    for header in sorted((csrc / "core").rglob("*.h")):
        text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.S)
        # A declaration begins its line; a function that the header defines is static.
        for line in re.findall(r"^(?!static|typedef|#|\s)[^;{}]*\([^{}]*?\)[^;{}]*;", text, re.M):
            name = re.search(r"(\w+)\s*\(", line)
            homes = [source for source, names in defined.items() if name and name[1] in names]
            beside = str(header.relative_to(csrc).with_suffix(".c"))
            if name and homes and homes != [beside] and name[1] not in public:
                found.append(f"{header.relative_to(csrc)} declares {name[1]} of {homes[0]}")
    return found


def folder_in(name: str, folders: Iterable[str]) -> str | None:
    """The one of the folders that the file stands in, at any depth."""
    return next((folder for folder in folders if name.startswith(f"{folder}/")), None)


def layer(name: str) -> int:
    """The public headers are below all layers; what stands in none of them, above."""
    if name in PUBLIC:
        return -1
    if name in FROM_PYTHON:
        return LAYERS.index("audit")
    folder = folder_in(name, LAYERS)
    return LAYERS.index(folder) if folder else len(LAYERS)


def knows_too_much(start: str, end: str) -> bool:
    """Whether the core knows more of a device than ``device.h``, or a driver another; or the
    engine or the shim the inside of what is below them."""
    if folder_in(start, ["core"]):
        return bool(folder_in(end, ["device"])) and end != "device/device.h"
    if folder_in(start, ["sleep"]):
        core = folder_in(end, ["core"]) and end.endswith(".h")
        return bool(core and end.removeprefix("core/") not in PAGE_CALLS)
    if folder_in(start, ["audit", "torch"]):
        return bool(folder_in(end, ["device", "core", "sleep", "replay"]))
    mine, other = folder_in(start, DRIVERS), folder_in(end, DRIVERS)
    return bool(mine and other and mine != other)


def edges_up(edges: Edges) -> list[str]:
    """A line for each edge from a lower layer to a higher one, and for each to what must not
    be known there."""
    return [
        f"{start} -> {end}: {', '.join(sorted(names))}"
        for (start, end), names in sorted(edges.items())
        if layer(end) > layer(start) or knows_too_much(start, end)
    ]


def c_sources(csrc: Path) -> list[Path]:
    """Every C file; those of the Python modules where Python's headers are installed."""
    found = sorted(csrc.rglob("*.c"))
    if (PYTHON_HEADERS / "Python.h").is_file():
        return found
    return [source for source in found if source.parent.name != "python"]


@pytest.fixture(scope="module")
def all_objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    csrc = ROOT / "csrc"
    return compile_all(csrc, c_sources(csrc), tmp_path_factory.mktemp("objects"))


@pytest.fixture(scope="module")
def all_calls(all_objects: dict[str, Path]) -> Edges:
    return calls(all_objects)


@pytest.mark.parametrize("part", FOLDERS)
def test_every_folder_is_a_layer_and_says_so(part: str) -> None:
    top = ROOT / "csrc" / part
    assert {path.name for path in top.iterdir() if path.is_dir()} == set(FOLDERS[part])
    assert list(top.glob("[!.]*.[ch]*")) == []
    listed = re.findall(r"^\| \[(\w+)\]", (top / "README.md").read_text(), re.M)
    assert listed == list(reversed(FOLDERS[part]))
    for folder in FOLDERS[part]:
        assert (top / folder / "README.md").is_file(), folder


@pytest.mark.parametrize(
    "readme", sorted((ROOT / "csrc").rglob("README.md")), ids=lambda path: path.parent.name
)
def test_a_readmes_table_names_every_file(readme: Path) -> None:
    text = readme.read_text()
    if "| file |" not in text:
        return
    named = set(re.findall(r"`([\w./*]+)`", text))
    for path in readme.parent.rglob("*"):
        nearest = next(folder for folder in path.parents if (folder / "README.md").is_file())
        if nearest != readme.parent or path.suffix not in (".c", ".h", ".cpp", ".cu"):
            continue
        name = path.relative_to(readme.parent)
        ways = {str(name.with_suffix(end)) for end in (path.suffix, ".*", ".c", ".cpp", ".cu")}
        assert ways & named, name


def test_every_driver_stands_in_a_folder() -> None:
    folders = {path.name for path in (ROOT / "csrc" / "device").iterdir() if path.is_dir()}
    assert {f"device/{folder}" for folder in folders} == set(DRIVERS)


@pytest.mark.slow
def test_no_call_goes_up(all_calls: Edges) -> None:
    assert edges_up(all_calls) == []


def test_no_include_goes_up() -> None:
    assert edges_up(includes(ROOT / "csrc")) == []


def test_no_file_is_too_long() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for ending in ("c", "h", "cpp", "cu")
        for path in (ROOT / "csrc").rglob(f"*.{ending}")
    }
    assert len(lengths) > 200
    assert [one for one, n in lengths.items() if n > (500 if "/core/" in one else 600)] == []


@pytest.mark.slow
def test_no_files_call_each_other_in_a_circle(all_calls: Edges) -> None:
    assert circle(all_calls) == []


def test_no_files_include_each_other_in_a_circle() -> None:
    assert circle(includes(ROOT / "csrc")) == []


def test_the_lower_folders_of_the_shim_are_compiled_first() -> None:
    [said] = re.findall(r"^SHIM_FOLDERS = \((.*?)\)", (ROOT / "setup.py").read_text(), re.M | re.S)
    assert tuple(re.findall(r"\w+", said)) == TORCH


def test_no_files_of_the_shim_include_each_others_headers_in_a_circle() -> None:
    """A source is above each header that it includes, and above that header's source."""
    found = units(includes(ROOT / "csrc"), SHIM)
    assert ("torch/allocator/allocator", "torch/start/the_core") in found
    assert circle(found) == []


def test_sources_of_the_shim_include_what_they_call() -> None:
    """They are compiled as one file, in which each sees those before it."""
    assert hidden_calls(ROOT / "csrc") == []


@pytest.mark.slow
def test_headers_of_the_core_declare_what_stands_beside_them(all_objects: dict[str, Path]) -> None:
    defined = {name: symbols(object_file)[0] for name, object_file in all_objects.items()}
    assert declared_elsewhere(ROOT / "csrc", defined) == []


def test_an_edge_that_is_put_in_is_named(tmp_path: Path) -> None:
    base, api = tmp_path / "core" / "base", tmp_path / "core" / "api"
    base.mkdir(parents=True)
    api.mkdir()
    (api / "top.h").write_text("int top(void);\n")
    (api / "top.c").write_text('#include "../base/low.h"\nint top(void) { return low(); }\n')
    (base / "low.h").write_text("int low(void);\n")
    (base / "low.c").write_text('#include "../api/top.h"\nint low(void) { return top(); }\n')
    found = calls(compile_all(tmp_path, c_sources(tmp_path), tmp_path))
    assert edges_up(found) == ["core/base/low.c -> core/api/top.c: top"]
    assert edges_up(includes(tmp_path)) == ["core/base/low.c -> core/api/top.h: #include"]
    assert circle(found) == ["core/api/top.c", "core/base/low.c", "core/api/top.c"]


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("device/sim/low.c", "core/base/high.h"),
        ("device/fd_server.c", "core/base/high.h"),
        ("device/sim/low.c", "device/cuda/other.h"),
        ("core/api/low.c", "device/sim/sim.h"),
        ("core/api/low.c", "sleep/high.h"),
        ("sleep/low.c", "core/blocks/block.h"),
        ("replay/low.c", "python/high.h"),
        ("replay/low.c", "audit/audit.h"),
        ("audit/low.c", "device/device.h"),
        ("torch/base/low.cpp", "torch/start/the_core.h"),
        ("torch/memory/low.h", "torch/allocator/allocator.h"),
        ("torch/allocator/low.cpp", "python/other.h"),
        ("torch/start/low.cpp", "core/base/config.h"),
    ],
)
def test_an_include_out_of_a_layer_is_named(start: str, end: str, tmp_path: Path) -> None:
    for name in (start, end):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / end).write_text("int other(void);\n")
    up = os.path.relpath(tmp_path / end, (tmp_path / start).parent)
    (tmp_path / start).write_text(f'#include "{up}"\n')
    assert edges_up(includes(tmp_path)) == [f"{start} -> {end}: #include"]


def test_a_call_without_an_include_is_named(shim: Path) -> None:
    assert hidden_calls(shim) == []
    (shim / "torch/start/options.cpp").write_text("int options() { return allocator(); }\n")
    home = "torch/allocator/allocator"
    assert hidden_calls(shim) == [
        f"torch/start/options.cpp calls allocator of {home}.cpp, {home}.h"
    ]


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    """A shim made up, whose options call the allocator that calls them."""
    for name, include, text in (
        ("torch/allocator/allocator.h", "", "int allocator();"),
        ("torch/allocator/allocator.cpp", "../start/options.h", "int allocator() { return options(); }"),
        ("torch/start/options.h", "", "int options();"),
        ("torch/start/options.cpp", "../allocator/allocator.h", "int options() { return allocator(); }"),
        ("python/_torch.cpp", "../torch/allocator/allocator.h", "int module = allocator();"),
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((f'#include "{include}"\n' if include else "") + text + "\n")
    return tmp_path


def test_a_circle_through_headers_is_named(shim: Path) -> None:
    assert circle(includes(shim)) == []  # no two files include each other
    found = units(includes(shim), SHIM)
    allocator, options = "torch/allocator/allocator", "torch/start/options"
    assert circle(found) == [allocator, options, allocator]
    assert edges_up(includes(shim)) == [f"{options}.cpp -> {allocator}.h: #include"]
    (shim / f"{options}.cpp").write_text("int options() { return 0; }\n")
    assert circle(units(includes(shim), SHIM)) == []
    assert edges_up(includes(shim)) == []


def test_a_declaration_in_another_header_is_named(tmp_path: Path) -> None:
    order = tmp_path / "core" / "order"
    order.mkdir(parents=True)
    (order / "stream.h").write_text(
        "/* About streams(); */\nint stream(int a,\n           int b);\n"
        "struct retired *retire(void);\nstatic inline int near(void)\n{\n  return far();\n}\n"
    )
    (order / "stream.c").write_text(
        '#include "stream.h"\nint stream(int a, int b) { return a + b; }\n'
    )
    (order / "retire.c").write_text(
        '#include "stream.h"\nstruct retired *retire(void) { return 0; }\n'
    )
    defined = {"core/order/stream.c": {"stream"}, "core/order/retire.c": {"retire"}}
    assert declared_elsewhere(tmp_path, defined) == [
        "core/order/stream.h declares retire of core/order/retire.c"
    ]
