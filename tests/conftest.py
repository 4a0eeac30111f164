"""What --quick leaves out, how many processes the tests are spread over by `make test`, a
file each, and what several of them need."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compilers import CC

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    pass
else:  # the machine may be slow, or busy
    slow = [HealthCheck.too_slow]
    settings.register_profile("patient", deadline=None, suppress_health_check=slow)
    settings.load_profile("patient")

sys.path.insert(0, str(Path(__file__).resolve().parent / "shim"))  # the simulated device

#: Files that take minutes. They come first, so that no process is left with one at the end.
LONGEST = ("test_core", "test_build", "test_style", "test_benchmarks", "test_conformance_on_sim")
#: Their tests take seconds for each case, so --quick takes the first case of each test.
FIRST_CASES = {
    *("test_audit", "test_docstrings", "test_enabling", "test_fd_server", "test_planted_on_sim"),
    *("test_pools", "test_stream_programs_on_sim", "test_top_on_sim", "test_view"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="leave out the tests marked slow; fewer cases, random programs and failing calls",
    )


def is_slow(item: pytest.Item) -> bool:
    case = getattr(item, "callspec", None) if item.path.stem in FIRST_CASES else None
    return bool(item.get_closest_marker("slow") or (case and any(case.indices.values())))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("quick"):
        slow = [item for item in items if is_slow(item)]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not is_slow(item)]
    items.sort(key=lambda item: item.path.stem not in LONGEST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One for each core; one alone where there is a GPU, which many tests want for
    themselves (tools/gpu knows which do not)."""
    try:
        import torch
    except ImportError:
        return len(os.sched_getaffinity(0))
    return 1 if torch.cuda.is_available() else len(os.sched_getaffinity(0))


@pytest.fixture(scope="session")
def _driver_folder(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    try:
        ctypes.CDLL("libcuda.so.1")
        return None
    except OSError:
        pass
    if not CC:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    name = "libcuda.so.1"
    command = [*CC, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-x", "c", "-", "-o"]
    without_gpu = "int cuInit(unsigned flags) { (void)flags; return 100; }\n"
    subprocess.run([*command, str(folder / name)], input=without_gpu, text=True, check=True)
    return folder


@pytest.fixture
def driver(_driver_folder: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes find a CUDA driver, so that enable() makes esper_alloc the allocator. On a
    machine without one it is a library that finds no GPU."""
    if _driver_folder is not None:
        before = [os.environ["LD_LIBRARY_PATH"]] if "LD_LIBRARY_PATH" in os.environ else []
        monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join([str(_driver_folder), *before]))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a process preloads to have the simulated device: shim/simulated.py."""
    import esper_alloc

    try:
        esper_alloc.allocator()
    except esper_alloc.UnavailableError as error:
        pytest.skip(str(error))
    import build

    return build.build(tmp_path_factory.mktemp("simulated"))
