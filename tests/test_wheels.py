"""What tools/wheels puts into a wheel. The command itself downloads every torch, and is run by
hand; tests/torch_allocator/test_enabling.py has the choice at import."""

import importlib.machinery
import importlib.util
import runpy
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    loader = importlib.machinery.SourceFileLoader("wheels", str(TOOLS / "wheels"))
    spec = importlib.util.spec_from_loader("wheels", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def built(folder: Path, torch: str, cuda: str, kernels: bool = True) -> Path:
    """What setup.py leaves of a build for one torch, as far as it matters."""
    folder.mkdir()
    for name in ("_core", "_torch", "_kernels")[: 3 if kernels else 2]:
        (folder / f"{name}.cpython-312-x86_64-linux-gnu.so").write_text(f"{name} for {torch}")
    (folder / "_build.py").write_text(
        f"BUILT_FOR: dict[str, str] = {{{torch!r}: {cuda!r}}}\n"
        f"HAS_KERNELS: bool = {kernels}\nWHAT_IS_MISSING: list[str] = []\n"
    )
    return folder


def test_each_torch_has_a_folder_and_the_facts_name_all(wheels: ModuleType, tmp_path: Path) -> None:
    parts = {
        "2.11": built(tmp_path / "a", "2.11", "13.0"),
        "2.15": built(tmp_path / "b", "2.15", "13.2"),
    }
    package = tmp_path / "esper_alloc"
    package.mkdir()
    nothing = "BUILT_FOR: dict[str, str] = {}\nHAS_KERNELS: bool = False\n"
    (package / "_build.py").write_text(nothing)
    wheels.merge(package, parts)
    facts = runpy.run_path(str(package / "_build.py"))
    assert facts["BUILT_FOR"] == {"2.11": "13.0", "2.15": "13.2"}
    assert facts["HAS_KERNELS"] and facts["WHAT_IS_MISSING"] == []
    found = {
        str(file.relative_to(package)).partition(".")[0]: file.read_text()
        for file in package.rglob("*.so")
    }
    assert found == {
        f"torch_{folder}/{module}": f"{module} for {torch}"
        for folder, torch in (("2_11", "2.11"), ("2_15", "2.15"))
        for module in ("_torch", "_kernels")
    }


@pytest.mark.parametrize("torch, kernels", [("2.12", True), ("2.11", False)])
def test_a_build_that_is_not_what_was_asked_for_is_refused(
    wheels: ModuleType, tmp_path: Path, torch: str, kernels: bool
) -> None:
    package = tmp_path / "esper_alloc"
    package.mkdir()
    part = built(tmp_path / "a", torch, "13.0", kernels)
    with pytest.raises(wheels.Failed, match=r"the build for torch 2\.11 is one for"):
        wheels.merge(package, {"2.11": part})


def test_a_wheel_of_another_index_says_so_in_its_version(
    wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def archive(*command: object) -> None:
        (tmp_path / "esper_alloc").mkdir()
        (tmp_path / "esper_alloc" / "__init__.py").write_text('__version__ = "1.2"\n')
        shutil.make_archive(str(command[3]).removesuffix(".tar"), "tar", tmp_path, "esper_alloc")

    monkeypatch.setattr(wheels, "run", archive)
    wheels.export_sources(tmp_path / "to" / "sources", "cu126")
    init = tmp_path / "to" / "sources" / "esper_alloc" / "__init__.py"
    assert init.read_text() == '__version__ = "1.2+cu126"\n'
    wheels.check_cuda({"2.11": "12.6"}, "cu126")
    with pytest.raises(wheels.Failed, match=r"torch 2\.11 .* is for CUDA 13\.0, not cu126"):
        wheels.check_cuda({"2.11": "13.0"}, "cu126")


def test_sums_are_those_of_the_files(wheels: ModuleType, tmp_path: Path) -> None:
    for name in ("b-1.tar.gz", "a-1.whl", "SHA256SUMS"):
        (tmp_path / name).write_text(name)
    wheels.write_sums(tmp_path)
    done = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=tmp_path, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"a-1.whl: OK\nb-1.tar.gz: OK\n")


@pytest.mark.skipif(
    not shutil.which("cc") or not shutil.which("readelf"), reason="needs a C compiler and readelf"
)
@pytest.mark.parametrize(
    "place, soname, flags, fine",
    [
        ("esper_alloc", "libother.so", [], True),
        ("esper_alloc", "libcudart.so.13", [], False),
        ("esper_alloc", "libother.so", ["-Wl,-rpath,/opt/python/lib"], False),
        ("esper_alloc.libs", "libother.so", [], False),
    ],
)
def test_libraries_of_others_are_noticed(
    wheels: ModuleType, tmp_path: Path, place: str, soname: str, flags: list[str], fine: bool
) -> None:
    def compile_library(target: Path, *words: str) -> None:
        command = ["cc", "-shared", "-fPIC", "-x", "c", "/dev/null", "-x", "none", *words]
        subprocess.run([*command, "-Wl,--no-as-needed", "-o", target], check=True)

    other, ours = tmp_path / "other.so", tmp_path / "_core.so"
    compile_library(other, f"-Wl,-soname,{soname}")
    compile_library(ours, *flags, "-Wl,--no-as-needed", str(other))
    wheel = tmp_path / "esper_alloc-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(ours, f"{place}/_core.so")
    if fine:
        wheels.check_libraries(wheel, tmp_path / "content")
    else:
        with pytest.raises(wheels.Failed, match=r"_core\.so must not be in"):
            wheels.check_libraries(wheel, tmp_path / "content")
