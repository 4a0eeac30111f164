"""Building and installing: the core alone, and the PyTorch part for several torches.

The builds for other torches download them, so they run where ``CI=true`` or
``ESPER_ALLOC_TEST_TORCHES=1`` asks for them.
"""

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
from compilers import CC
from processes import ROOT, succeeded

TORCHES = "true" in os.environ.get("CI", "") or os.environ.get("ESPER_ALLOC_TEST_TORCHES") == "1"
HAS_TORCH = importlib.util.find_spec("torch") is not None


def run(*command: object, cwd: Path = ROOT, **environment: str) -> str:
    """Runs a command that must succeed; returns all of its output."""
    env = {**os.environ, "PYTHONPATH": "", "MAX_JOBS": "2", **environment}
    together = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "capture_output": False}
    return succeeded(*command, cwd=cwd, env=env, **together).stdout


@pytest.fixture(scope="session")
def installed_core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which setup.py has built the package, without the PyTorch part."""
    folder = tmp_path_factory.mktemp("core")
    source = folder / "source"
    ignore = shutil.ignore_patterns(
        ".git", ".venv*", "build", "*.so", "__pycache__", "_build.py", ".*cache", "*.pickle*"
    )
    shutil.copytree(ROOT, source, ignore=ignore)
    run(
        sys.executable, "setup.py", "--quiet", "build", "--build-lib", folder / "installed",
        cwd=source, ESPER_ALLOC_SHIM="0",
    )  # fmt: skip
    return folder / "installed"


def failed(*command: object, **environment: str) -> list[str]:
    """The lines that a command complains in, which must fail."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr.splitlines()


def built_anew(folder: Path, source: Path, **environment: str) -> bool:
    """Builds the core in `source`; whether setup.py found that necessary."""
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("_core.*.so")}
    run(sys.executable, "setup.py", "--quiet", "build", "--build-lib", folder,
        cwd=source, ESPER_ALLOC_SHIM="0", **environment)  # fmt: skip
    return before != {file: file.stat().st_mtime_ns for file in folder.rglob("_core.*.so")}


def python_there(installed: Path, program: str) -> str:
    """The output of a program that imports what was built, away from the sources."""
    return run(sys.executable, "-c", program, cwd=installed.parent, PYTHONPATH=str(installed))


@pytest.mark.slow
def test_core_imports_without_torch_and_without_a_gpu(installed_core: Path) -> None:
    program = """
import sys
sys.modules["torch"] = None  # importing it fails
import esper_alloc
from esper_alloc import _build, _core
assert _core.__version__ == esper_alloc.__version__ == _core.build_info()["version"]
assert _build.BUILT_FOR == {} and not _build.HAS_KERNELS
report = _core.driver_report()
assert report["available"] == (report["error"] is None)
assert report["entry_points"].keys() >= {"cuInit", "cuStreamGetId", "cuMemMap"}
print(esper_alloc.__file__)
print(_build.WHAT_IS_MISSING)
"""
    where, missing = python_there(installed_core, program).splitlines()
    assert Path(where).is_relative_to(installed_core)
    assert "ESPER_ALLOC_SHIM=0" in missing


@pytest.mark.slow
def test_c_extensions_find_headers_and_symbols(installed_core: Path, tmp_path: Path) -> None:
    if not CC:
        pytest.skip("needs a C compiler")
    program = "import esper_alloc; print(esper_alloc.get_include(), esper_alloc.library_path())"
    include, library = python_there(installed_core, program).split()
    assert Path(include).is_relative_to(installed_core)
    source = tmp_path / "user.c"
    source.write_text(
        "#include <esper_alloc.h>\n#include <python/capi.h>\n#include <device/device.h>\n"
        "int main(void) { return esper_alloc_malloc(0, 0, 0) || esper_alloc_base(0, 0); }\n"
    )
    run(*CC, source, f"-I{include}", library, f"-Wl,-rpath,{Path(library).parent}",
        "-Wl,--unresolved-symbols=ignore-in-shared-libs", "-o", tmp_path / "user")  # fmt: skip
    exported = run("nm", "-D", "--defined-only", library)
    names = {line.split()[-1] for line in exported.splitlines()}
    assert {"esper_alloc_malloc", "esper_alloc_free", "esper_alloc_record_use"} <= names
    foreign = {n for n in names if not n.startswith("esper_") and n != "PyInit__core"}
    assert not foreign, f"exported, though nobody's business: {foreign}"


@pytest.mark.slow
def test_the_typed_package_is_complete(installed_core: Path) -> None:
    there = {
        str(path.relative_to(installed_core))
        for path in installed_core.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    wanted = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "esper_alloc").rglob("*.py*")
        if path.suffix in (".py", ".pyi") and path.name != "_build.py"
    }
    assets = (ROOT / "esper_alloc" / "view" / "assets").iterdir()
    wanted |= {str(path.relative_to(ROOT)) for path in assets}
    wanted |= {"esper_alloc/py.typed", "esper_alloc/_build.py"}
    wanted |= {"esper_alloc/include/esper_alloc.h", "esper_alloc/include/python/capi.h"}
    wanted |= {"esper_alloc/docs/uses.md", "esper_alloc/docs/README.md"}
    assert wanted <= there, f"not installed: {sorted(wanted - there)}"


needs_mypy = pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy")


@pytest.mark.slow
@needs_mypy
def test_the_package_is_typed() -> None:
    run(sys.executable, "-m", "mypy", "esper_alloc")


@pytest.mark.slow
@needs_mypy
@pytest.mark.parametrize("module", ["_core", "_torch", "_kernels"])
def test_stubs_match_the_module(module: str, tmp_path: Path) -> None:
    first = ""
    if module != "_core":
        from esper_alloc import _build

        if not (HAS_TORCH and {"_torch": _build.BUILT_FOR, "_kernels": _build.HAS_KERNELS}[module]):
            pytest.skip("the extension for torch is not built")
        first = "import torch"  # loads the libraries that the extension needs
    # Checking torch itself takes ten times as long as all the rest.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    program = f"""
{first}
import sys
from mypy import stubtest
sys.argv[1:] = ["--mypy-config-file", "{tmp_path}/mypy.ini", "esper_alloc.{module}"]
sys.exit(stubtest.main())
"""
    assert "no issues" in run(sys.executable, "-c", program, PYTHONPATH=str(ROOT))


@pytest.mark.slow
def test_what_an_earlier_build_left_is_not_packed(installed_core: Path) -> None:
    """One folder may see builds with and without torch, and for several torches."""
    source = installed_core.parent / "source"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    stale = [installed_core / "esper_alloc" / f"{name}{suffix}" for name in ("_torch", "_kernels")]
    for file in stale:
        file.write_bytes(b"of an earlier build")
    assert not built_anew(installed_core, source)
    assert not any(file.exists() for file in stale)
    assert built_anew(installed_core, source, ESPER_ALLOC_DEBUG="1")  # the sources are the same
    assert built_anew(installed_core, source)
    assert not built_anew(installed_core, source)


@pytest.mark.parametrize(
    "change, system",
    [
        ("sys.platform, sys.modules['fcntl'] = 'win32', None", "win32"),
        ("sys.platform = 'darwin'", "darwin"),
    ],
)
def test_where_it_cannot_be_built_one_line_says_so(change: str, system: str) -> None:
    program = f"""
import runpy, sys
import setuptools.command.build_ext
{change}
runpy.run_path("setup.py")
"""
    (line,) = failed(sys.executable, "-c", program)
    assert f"not supported (this Python is one for {system})" in line


def test_an_old_setuptools_is_named_whatever_it_lacks(tmp_path: Path) -> None:
    package = tmp_path / "setuptools"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '65.5.0'\n")
    (said,) = failed(sys.executable, "setup.py", "--version", PYTHONPATH=str(tmp_path))
    assert "this is 65.5.0: run `pip install 'setuptools>=77,<82'`" in said


WITHOUT_TORCH = """
import importlib.util, runpy, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find_spec(name, *rest)
sys.argv = ["setup.py", "--quiet", *sys.argv[1:]]
runpy.run_path("setup.py", run_name="__main__")
"""


def test_installing_without_torch_fails_with_the_command(tmp_path: Path) -> None:
    """pip's isolated builds see no torch, and pip shows nothing of a build that succeeds."""
    command = [sys.executable, "-c", WITHOUT_TORCH, "build", f"--build-base={tmp_path}"]
    *_, said = failed(*command)
    assert list(tmp_path.rglob("*.o")) == []
    assert "un `pip install --no-build-isolation .`" in said
    assert "build with ESPER_ALLOC_SHIM=0" in said
    # The metadata and the sources can be had without.
    command[3:] = ["egg_info", f"--egg-base={tmp_path}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


#: An isolated build: torch is in the environment, and cannot be imported. Nothing is compiled.
ISOLATED = """
import sysconfig
from setuptools.command.build_ext import build_ext
folder, sys.argv = sys.argv[1], [sys.argv[0], *sys.argv[2:]]
find_path = sysconfig.get_path
sysconfig.get_path = lambda name, *a: folder if name.endswith("lib") else find_path(name, *a)
build_ext.run = lambda self: print([one.name for one in self.extensions])
"""


def torch_in(folder: Path, version: str, cuda: str | None) -> None:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "version.py").write_text(
        f"from typing import Optional\n__version__ = {version!r}\ncuda: Optional[str] = {cuda!r}\n"
        "hip: Optional[str] = None\n"
    )


def isolated_build(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    first, _, rest = WITHOUT_TORCH.partition("sys.argv = ")
    program = f"{first}{ISOLATED}sys.argv = {rest}"
    command = [sys.executable, "-c", program, tmp_path / "site", "build_ext"]
    return subprocess.run(
        [*map(str, command), f"--build-lib={tmp_path}/lib", f"--build-temp={tmp_path}/temp"],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("version", "cuda", "words"),
    [
        ("2.11.0+cu130", "13.0", "a build in isolation does not see torch 2.11.0+cu130"),
        ("2.10.2+cu128", "12.8", "it needs torch 2.11 or newer, and this is torch 2.10.2+cu128"),
        ("2.10.2+cpu", None, "it needs torch 2.11 or newer, and this is torch 2.10.2+cpu"),
    ],
)
def test_an_isolated_build_looks_at_the_torch_that_it_does_not_see(
    tmp_path: Path, version: str, cuda: str | None, words: str
) -> None:
    torch_in(tmp_path / "site", version, cuda)
    done = isolated_build(tmp_path)
    assert done.returncode == 1 and not (tmp_path / "lib").exists()
    last = done.stderr.splitlines()[-1]
    assert words in last and "`pip install --no-build-isolation .`" in last


def test_beside_a_cpu_build_of_torch_the_rest_installs_and_says_what_works(tmp_path: Path) -> None:
    torch_in(tmp_path / "site", "2.11.0+cpu", None)
    done = isolated_build(tmp_path)
    assert (done.returncode, done.stdout) == (0, "['esper_alloc._core']\n"), done.stderr
    *_, missing, works = done.stderr.splitlines()
    assert "not built: the PyTorch part: torch 2.11.0+cpu is built without CUDA" in missing
    assert "the helpers and `replay` work" in works
    assert "is built without CUDA" in (tmp_path / "lib/esper_alloc/_build.py").read_text()
    # Who insists on it is told.
    done = isolated_build(tmp_path, ESPER_ALLOC_SHIM="1")
    assert done.returncode == 1 and "is built without CUDA" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("inplace", [False, True])
def test_a_torch_that_is_too_old_stops_the_build_before_a_file_is_compiled(
    tmp_path: Path, inplace: bool
) -> None:
    for name, text in {
        "__init__.py": "from . import version\n__version__ = '2.10.0+cu128'\n",
        "version.py": "cuda, hip = '12.8', None\n",
        "utils/__init__.py": "",
        "utils/cpp_extension.py": "",
    }.items():
        file = tmp_path / "torch" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    command = [sys.executable, "setup.py", "--quiet", "build_ext", f"--build-temp={tmp_path}/temp"]
    command += ["--inplace" if inplace else f"--build-lib={tmp_path}/lib"]
    *_, last = failed(*command, PYTHONPATH=str(tmp_path))
    assert not (tmp_path / "temp").exists()
    assert "needs torch 2.11 or newer, and this is torch 2.10.0+cu128" in last


def test_a_build_that_fails_says_why_in_its_last_line(tmp_path: Path) -> None:
    """And begins no more files than are compiled at a time."""
    compiler = tmp_path / "broken-cc"
    compiler.write_text(
        f"#!/bin/sh\necho begun >> {tmp_path}/begun\n"
        "echo 'some.c: In function f:' >&2\necho 'some.c:3:1: error: no such thing' >&2\n"
        "echo 'some.c:3:1: note: much more' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    command = [sys.executable, "setup.py", "--quiet", "build", f"--build-base={tmp_path}"]
    environment = {"ESPER_ALLOC_SHIM": "0", "CC": str(compiler), "MAX_JOBS": "2"}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: some.c:3:1: error: no such thing"
    assert "Package would be ignored" not in done.stdout + done.stderr
    assert len((tmp_path / "begun").read_text().splitlines()) < 10


@pytest.fixture
def torch_build(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("torch_build")


def test_where_there_is_no_torch_the_command_installs_it(
    torch_build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    monkeypatch.setattr(torch_build, "torch_outside", lambda: None)
    build = torch_build.find()
    assert not build.possible and "Install torch" in build.missing[0]
    assert "pip install --no-build-isolation ." in build.missing[0]


def test_headers_of_another_major_version_are_refused(torch_build: Any, tmp_path: Path) -> None:
    (tmp_path / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  12080\n")
    assert torch_build.cuda_version_of(tmp_path) == "12.8"
    assert torch_build.cuda_version_of(tmp_path / "nowhere") is None
    assert torch_build._cuda_include_dirs("99.0") == []
    assert torch_build._headers_command("13.0").startswith("pip install")
    assert "-cu12==12.8.*" in torch_build._headers_command("12.8")


# ---- the kernels -----------------------------------------------------------

TORCH_GPUS = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
NVCC_GPUS = {"75", "80", "86", "87", "89", "90", "100", "103", "110", "120", "121"}


@pytest.mark.parametrize(
    "listed, torch, nvcc, wanted",
    [
        # The lowest of each major version runs on all of it; PTX for what comes later.
        ("", TORCH_GPUS, NVCC_GPUS, "sm_75 sm_80 sm_90 sm_100 sm_120 compute_120"),
        ("", ["sm_90", "sm_120"], {"90", "100"}, "sm_90 compute_90"),
        ("", ["sm_80", "sm_86"], {"86"}, "sm_86 compute_86"),
        # The GPU whose PTX it is has code of its own too.
        ("", ["sm_80", "sm_89"], {"80", "89"}, "sm_80 sm_89 compute_89"),
        ("9.0", TORCH_GPUS, NVCC_GPUS, "sm_90"),
        ("8.0;9.0+PTX", TORCH_GPUS, NVCC_GPUS, "sm_80 sm_90 compute_90"),
        ("8.6 8.9, 12.0+PTX", TORCH_GPUS, NVCC_GPUS, "sm_86 sm_89 sm_120 compute_120"),
        ("9.0a", TORCH_GPUS, NVCC_GPUS, "sm_90a"),
        ("Ampere;Hopper", TORCH_GPUS, NVCC_GPUS, "sm_80 sm_86 compute_86 sm_90 compute_90"),
    ],
)
def test_kernels_are_compiled_for(
    listed: str, torch: list[str], nvcc: set[str], wanted: str, torch_build: Any
) -> None:
    flags = torch_build.architecture_flags(listed, torch, nvcc)
    assert [flag.rpartition("code=")[2] for flag in flags] == wanted.split()
    assert all(flag.startswith("-gencode=arch=compute_") for flag in flags)


@pytest.mark.parametrize(
    "listed, torch, nvcc, words",
    [
        ("ninety", TORCH_GPUS, NVCC_GPUS, "'ninety' is no version such as 9.0"),
        ("9.0;13.0", TORCH_GPUS, NVCC_GPUS, "this nvcc does not know sm_130"),
        ("", ["sm_50"], NVCC_GPUS, "compiles for none of the GPUs"),
        ("", TORCH_GPUS, set(), "compiles for none of the GPUs"),
    ],
)
def test_kernels_cannot_be_compiled_for(
    listed: str, torch: list[str], nvcc: set[str], words: str, torch_build: Any
) -> None:
    with pytest.raises(ValueError, match=words):
        torch_build.architecture_flags(listed, torch, nvcc)


def fake_nvcc(folder: Path, release: str) -> Path:
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    return nvcc


@pytest.mark.parametrize("release, said", [(None, ""), ("11.8", "is of CUDA 11.8")])
def test_without_a_fitting_nvcc_the_rest_is_built(
    release: str | None,
    said: str,
    tmp_path: Path,
    torch_build: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [str(fake_nvcc(tmp_path, release))] if release else []
    monkeypatch.setattr(torch_build, "_nvcc_candidates", lambda: found)
    build = torch_build.TorchBuild(torch_version="2.11", cuda_version="13.0")
    torch_build.find_nvcc(build, TORCH_GPUS)
    assert build.possible and not build.kernels_possible
    (sentence,) = build.kernels_missing
    assert said in sentence
    for words in ("the kernels: ", "nvcc of CUDA 13", 'pip install "nvidia-cuda-nvcc==13.0.*"',
                  "run `pip install --no-build-isolation .` again"):  # fmt: skip
        assert words in sentence
    twelve = torch_build.TorchBuild(torch_version="2.11", cuda_version="12.6")
    torch_build.find_nvcc(twelve, TORCH_GPUS)
    assert "nvidia-cuda-nvcc" not in twelve.kernels_missing[0]  # PyPI's has no nvcc


def test_the_nvcc_of_torchs_own_version_comes_first(
    tmp_path: Path, torch_build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases = ("12.8", "13.1", "13.0")
    found = [str(fake_nvcc(tmp_path / release, release)) for release in releases]
    monkeypatch.setattr(torch_build, "_nvcc_candidates", lambda: found)
    monkeypatch.setattr(torch_build, "nvcc_architectures", lambda nvcc: NVCC_GPUS)
    build = torch_build.TorchBuild(torch_version="2.11", cuda_version="13.0")
    torch_build.find_nvcc(build, TORCH_GPUS)
    assert build.kernels_possible and build.nvcc == found[2]


needs_extension = pytest.mark.skipif(
    not (HAS_TORCH and importlib.import_module("esper_alloc._build").BUILT_FOR),
    reason="the extension for torch is not built",
)


@needs_extension
def test_a_build_without_kernels_says_so(tmp_path: Path) -> None:
    program = """
import os, runpy, sys
import setuptools
setuptools.setup = lambda **k: print([e.name for e in k["ext_modules"]])
found = runpy.run_path("setup.py")
print(found["FOUND"].kernels_missing)
"""
    said = run(sys.executable, "-c", program, ESPER_ALLOC_KERNELS="0")
    assert "'esper_alloc._torch'" in said and "'esper_alloc._kernels'" not in said
    assert "the kernels: left out by ESPER_ALLOC_KERNELS=0" in said


def in_setup(program: str, *arguments: object, **environment: str) -> str:
    """What a program prints that has the names of setup.py, and its command."""
    begin = """
import pathlib, runpy, sys, threading, time
sys.path.insert(0, "tools")
import setuptools
setuptools.setup = lambda **k: None
found = runpy.run_path("setup.py", run_name="setup")
command = found["BuildExtensions"](setuptools.Distribution())
"""
    return run(sys.executable, "-c", begin + program, *arguments, **environment)


@needs_extension
def test_an_nvcc_that_fails_leaves_the_rest(tmp_path: Path) -> None:
    """It refuses the C++ compiler, say: no kernels, and a sentence that says why."""
    program = """
build = found["FOUND"]
build.nvcc, build.kernels_missing = "false", []
command.build_temp, command.build_lib, command.given_up = sys.argv[1], sys.argv[1], []
command.force = True
command.build_extension(found["kernels_extension"](build))
assert command.given_up == ["esper_alloc._kernels"] and not build.kernels_possible
print(build.kernels_missing)
"""
    said = in_setup(program, tmp_path)
    assert "the kernels: false could not compile csrc/kernels/" in said
    assert "CXX=... names another C++ compiler" in said


@needs_extension
def test_kernels_are_compiled_again_where_something_differs(tmp_path: Path) -> None:
    """Another torch does not concern them: nvcc is what takes longest."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text('#!/bin/sh\nfor last; do :; done\necho "$last" >> "$0.log"\n: > "$last"\n')
    nvcc.chmod(0o755)
    program = """
command.build_temp, command.force = sys.argv[1], False
log = pathlib.Path(sys.argv[1], "nvcc.log")
def count(change):
    log.write_text("")
    change()
    objects = command.compile_kernels(found["kernels_extension"](build).depends)
    assert len(objects) == len(found["sources"]("kernels/*.cu")) > 1
    return len(log.read_text().split()) / len(objects)
build = found["FOUND"]
build.nvcc, build.kernels_missing = sys.argv[1] + "/nvcc", []
print(count(lambda: None), end=" ")
print(count(lambda: setattr(build, "torch_version", "2.99")), end=" ")
print(count(lambda: build.nvcc_flags.append("-lineinfo")), end=" ")
(gather,) = pathlib.Path(sys.argv[1]).rglob("gather.cu.o")
print(count(gather.unlink))
"""
    said = in_setup(program, tmp_path).split()
    assert said[-4:-1] == ["1.0", "0.0", "1.0"] and 0 < float(said[-1]) < 1


def test_sources_that_are_as_before_are_not_compiled_again(tmp_path: Path) -> None:
    program = """
command.build_temp = sys.argv[1]
def written(*files):
    [path] = map(pathlib.Path, command.as_one_file("one", list(files)))
    return path.stat().st_mtime_ns, path.read_text()
before = written("torch/a/x.cpp", "torch/b/y.cpp")
assert before[1].split()[2:] == ["#include", '"torch/a/x.cpp"', "#include", '"torch/b/y.cpp"']
time.sleep(0.05)
assert written("torch/a/x.cpp", "torch/b/y.cpp") == before
assert written("torch/a/x.cpp") != before
"""
    in_setup(program, tmp_path)


def test_a_build_waits_for_another_in_its_folder(tmp_path: Path) -> None:
    program = """
folder, order = pathlib.Path(sys.argv[1], "temp"), []
def second():
    with found["alone_in"](folder):
        order.append("second")
with found["alone_in"](folder):
    other = threading.Thread(target=second)
    other.start()
    time.sleep(0.2)
    order.append("first")
other.join()
folder = found["ROOT"] / "build"
def third():
    with found["alone_in"](folder):
        order.append("third")
command.build_all = lambda: (threading.Thread(target=third).start(), time.sleep(0.2), order.append("built"))
command.run()
while len(order) < 4:
    time.sleep(0.01)
print(order)
"""
    said = in_setup(program, tmp_path, ESPER_ALLOC_SHIM="0")
    assert said.splitlines()[-1] == str(["first", "second", "built", "third"])


@needs_extension
def test_kernels_are_built_where_they_can_be(torch_build: Any) -> None:
    """Without this, a mistake in a kernel would only make everything slower."""
    build = importlib.import_module("esper_alloc._build")
    if os.environ.get("ESPER_ALLOC_KERNELS") != "0":
        assert torch_build.find().kernels_possible == build.HAS_KERNELS, build.WHAT_IS_MISSING


def test_the_kernels_load_beside_torch() -> None:
    if not (HAS_TORCH and importlib.import_module("esper_alloc._build").HAS_KERNELS):
        pytest.skip("the kernels are not built")
    import torch

    from esper_alloc.helpers import kernels

    assert kernels.load().built_for() == ".".join(torch.__version__.split(".")[:2])
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA error: "):
            kernels.load().runs_on(0)


# ---- the PyTorch part ------------------------------------------------------


def environment_with(requirement: str, folder: Path) -> Path:
    """The Python of a new environment with a torch, and what building needs."""
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        requirement, "setuptools>=77", "numpy", "pytest")  # fmt: skip
    return python


def built_for(requirement: str, folder: Path) -> tuple[Path | str, Path]:
    """A Python with that torch, and the package built for it.

    Where it is the torch of this Python, both are here already: `make test` and
    whoever runs the tests have built in place, by the same setup.py.
    """
    if HAS_TORCH and requirement == f"torch=={torch_version(sys.executable)}":
        run(sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", ESPER_ALLOC_SHIM="1")
        return sys.executable, ROOT
    python = environment_with(requirement, folder / "environment")
    cuda = run(python, "-c", "import torch; print(torch.version.cuda)").split()[-1]
    assert cuda != "None", f"{requirement} is a torch without CUDA: nothing was tested"
    run(python, "setup.py", "--quiet", "build", "--build-base", folder / "build",
        "--build-lib", folder / "installed", ESPER_ALLOC_SHIM="1", TORCH_CUDA_ARCH_LIST="9.0")  # fmt: skip
    return python, folder / "installed"


#: Rows of the conformance suite, on the simulated device: those that versions differ in.
ROWS = """
import sys, tempfile
from pathlib import Path
tests = Path(sys.argv[1])
sys.path[:0] = [str(tests / "shim"), str(tests / "gpu" / "conformance")]
import build, driver, ground
groups = ["pools", "figures", "snapshot", "history", "memory", "methods", "shortage"]
with tempfile.TemporaryDirectory() as folder:
    env = build.environment(build.build(Path(folder)))
    answers = driver.run_all(groups, env, workers=2)
count = 0
for group, one in ground.every_scenario():
    if group in groups and "gpu" not in one.needs:
        wrong = driver.judge(answers[group, "native"], answers[group, "esper_alloc"], one.name)
        assert wrong is None, (group, one.name, wrong)
        count += 1
print(count, "rows")
"""


@pytest.mark.slow
@pytest.mark.skipif(not TORCHES, reason="downloads torch; runs with CI=true")
@pytest.mark.parametrize("requirement", ["torch==2.11.0", "torch"])
def test_shim_builds_for(requirement: str, tmp_path: Path) -> None:
    """The PyTorch part compiles, loads and answers as PyTorch's own allocator does: for
    the oldest torch, and the newest on PyPI."""
    try:
        python, installed = built_for(requirement, tmp_path)
        program = """
import torch, esper_alloc
from esper_alloc import _build, _torch
minor = ".".join(torch.__version__.split(".")[:2])
assert torch.version.cuda is not None, "a torch without CUDA: nothing was tested"
assert _build.BUILT_FOR == {minor: torch.version.cuda} and _torch.built_for() == minor
esper_alloc.allocator()
print("loaded for", torch.__version__)
"""
        said = run(python, "-c", program, cwd=tmp_path, PYTHONPATH=str(installed))
        assert "loaded for " + requirement.partition("==")[2] in said
        if installed != ROOT:  # else test_conformance_on_sim.py has them
            said = run(python, "-c", ROWS, ROOT / "tests", cwd=tmp_path, PYTHONPATH=str(installed))
            assert int(said.split()[-2]) > 70, said
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)  # gigabytes


def torch_version(python: str) -> str:
    program = "import torch; print(torch.__version__.split('+')[0])"
    return run(python, "-c", program).split()[-1]


@pytest.mark.slow
def test_quick_leaves_out_what_is_slow() -> None:
    command = (sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider")

    def collected(*options: str) -> set[str]:
        said = run(*command, "tests/test_core.py", *options)
        return {line for line in said.splitlines() if line.startswith("tests/test_core.py::")}

    everything, slow = collected(), collected("-m", "slow")
    assert any("[tsan-test_threads]" in name for name in slow)
    assert collected("--quick") == everything - slow
