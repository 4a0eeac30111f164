"""The CUDA driver layer and the process's allocator, over a libcuda made of nothing.

Builds ``tests/device/fake_cuda.c`` as the library that the driver layer opens, and
runs the scenarios of ``tests/device/test_cuda.c``, each in a process of its own.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from compilers import CC
from processes import ROOT, python, succeeded

from esper_alloc.torch_allocator.choices import ALLOWANCE
from esper_alloc.torch_allocator.sizes import parse_size

DEVICE_TESTS = ROOT / "tests" / "device"
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-DESPER_LOCK_ORDER", "-O0", "-g"]
FLAGS += ["-Wall", "-Wextra", "-Wshadow", "-Werror"]

pytestmark = pytest.mark.skipif(not CC, reason="needs a C compiler")


def compile_c(output: Path, sources: list[Path], *flags: str) -> Path:
    succeeded(*CC, *FLAGS, *flags, *sources, "-o", output, "-pthread", "-ldl")
    return output


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the test program and the fake libraries."""
    folder = tmp_path_factory.mktemp("cuda")
    library = ["-shared", "-fPIC", "-fvisibility=hidden"]
    fake = [DEVICE_TESTS / "fake_cuda.c"]
    compile_c(folder / "libfake.so", fake, *library)
    compile_c(folder / "libold.so", fake, *library, "-DFAKE_CUDA_OLD_GET")
    sources = [
        DEVICE_TESTS / "test_cuda.c",
        ROOT / "csrc" / "device" / "fd_server.c",
        *sorted((ROOT / "csrc" / "device" / "cuda").glob("*.c")),
        ROOT / "csrc" / "esper_alloc.c",
        *sorted((ROOT / "csrc" / "core").glob("*/*.c")),
        *sorted((ROOT / "csrc" / "sleep").glob("*.c")),
        *sorted((ROOT / "csrc" / "black_box").glob("*.c")),
    ]
    compile_c(folder / "test_cuda", sources)
    return folder


def ran(
    built: Path, scenario: str, library: str = "libfake.so", given: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """A scenario, which must succeed."""
    if "/" not in library and (built / library).exists():
        library = str(built / library)
    environment = {**os.environ, "ESPER_ALLOC_LIBCUDA": library, **environment}
    return succeeded(built / "test_cuda", scenario, env=environment, input=given, timeout=1200)


def run_scenario(built: Path, scenario: str, *how: str, **more: str) -> str:
    return ran(built, scenario, *how, **more).stdout.strip()


SCENARIOS = (
    "balance faults messages captures graphs event_wait streams threads fork allocator uses "
    "mark_cost blind unknown_stream peers sharing sharing_again"
)


@pytest.mark.parametrize("scenario", SCENARIOS.split())
def test_scenario(built: Path, scenario: str) -> None:
    run_scenario(built, scenario)


def test_blindness_is_said_once(built: Path) -> None:
    """Who allocates without a way to report record_stream hears of it, in one line."""
    # It allocates twice before record_stream is visible.
    (line,) = ran(built, "blind").stderr.splitlines()
    assert "record_stream" in line and "esper_alloc.pluggable_allocator()" in line
    assert ran(built, "uses").stderr == ""


OFF = 2**64 - 1  # ESPER_ALLOWANCE_OFF


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("", 128 << 20), ("128MiB", 128 << 20), ("1 GiB", 1 << 30), ("512M", 512 << 20),
        ("7 K", 7 << 10), ("2T", 2 << 40), ("0064KiB", 64 << 10), ("123456789", 123456789),
        ("0", 1), ("0 MiB", 1), ("9999999999999999999", 9999999999999999999),
        ("9999999999999999999T", OFF), ("off", OFF),
    ],
)  # fmt: skip
def test_allowance_from_environment(built: Path, given: str, found: int) -> None:
    """The core and Python read the same; the core's 0 is its default, and the most is off."""
    assert run_scenario(built, "allowance", given=f"{given}\n") == str(found)
    value = ALLOWANCE.in_environment({"ESPER_ALLOC_ALLOWANCE": given})
    size = parse_size(value)
    assert (value == "off") == (size is None)
    assert (OFF if size is None else min(size or 1, OFF)) == found


NO_SIZES = [
    "fast", "-1", "+1", "1.5GiB", "1  GiB", " 1", "1 ", "1 GiB ", "128MB", "128Mi", "128mib", "B", "iB", "M",
    "0x10", "1_000", "OFF", "Off", "none", "1e6", "1P", "10000000000000000000", "\u0661", "1\tK",
]  # fmt: skip


def test_what_is_no_allowance_is_named(built: Path) -> None:
    *refusals, last = run_scenario(
        built, "allowance", given="".join(f"{one}\n" for one in (*NO_SIZES, "1"))
    ).splitlines()
    assert last == "1"  # it tries again after an error
    assert refusals == [
        f"ESPER_ALLOC_ALLOWANCE={one} is not a size: use bytes, a size such as 128MiB, 1 GiB or 512M, "
        "or off"
        for one in NO_SIZES
    ]
    for one, refusal in zip(NO_SIZES, refusals):
        with pytest.raises(ValueError) as caught:
            ALLOWANCE.in_environment({"ESPER_ALLOC_ALLOWANCE": one})
        assert str(caught.value) == refusal


def test_segments_from_environment(built: Path) -> None:
    run_scenario(built, "segments", ESPER_ALLOC_SEGMENTS="big")


def test_segments_where_nccl_registers_them(built: Path) -> None:
    auto, classic, mapped = "0", "1", "2"
    for given, asked, found in (
        ("1", "", classic), ("TRUE", "", classic), ("0", "", auto), ("", "", auto), ("1", "mapped", mapped),
    ):  # fmt: skip
        run_scenario(
            built,
            "segments_chosen",
            TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=given,
            ESPER_ALLOC_SEGMENTS=asked,
            FAKE_SEGMENTS=found,
        )


def test_drivers_that_lack_something_optional(built: Path) -> None:
    run_scenario(built, "old", FAKE_CUDA_VERSION="11080")
    run_scenario(built, "old_get_proc_address", library="libold.so", FAKE_CUDA_VERSION="11080")
    run_scenario(built, "no_virtual_memory", FAKE_CUDA_NO_VMM="1")
    run_scenario(built, "no_virtual_memory", FAKE_CUDA_LACKS="cuMemSetAccess")


def test_pages_that_cannot_be_shared(built: Path) -> None:
    run_scenario(built, "no_sharing", FAKE_CUDA_KEEPS="1")
    run_scenario(built, "no_sharing", FAKE_CUDA_LACKS="cuMemExportToShareableHandle")


def test_refusals_say_why(built: Path) -> None:
    def refused(**kwargs: str) -> str:
        return run_scenario(built, "refused", **kwargs)

    assert "cuInit: CUDA_ERROR_NO_DEVICE" in refused(FAKE_CUDA_DEVICES="0")
    assert "has no cuMemAlloc" in refused(FAKE_CUDA_LACKS="cuMemAlloc")
    assert "has no cuStreamGetCaptureInfo" in refused(FAKE_CUDA_VERSION="11020")
    missing = refused(library="libno-such-driver.so.1")
    assert missing.startswith("no CUDA driver: libno-such-driver.so.1")
    assert "install the NVIDIA driver" in missing
    assert "older than CUDA 11.3" in refused(library="libm.so.6")


#: Another Python thread lets the host go, which is held back in a call that keeps the GIL.
HELD_BACK = """
import ctypes, os, sys, threading
import esper_alloc._core as core
sys.setswitchinterval(60)  # a thread keeps the GIL until it waits
calls = ctypes.PyDLL(core.__file__)  # and while it calls these
calls.esper_alloc_malloc.restype = ctypes.c_void_p
calls.esper_alloc_malloc.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
calls.esper_alloc_free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
calls.esper_alloc_record_use.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
fake = (ctypes.c_void_p * 12).in_dll(ctypes.CDLL(os.environ["ESPER_ALLOC_LIBCUDA"]), "fake")
make_stream = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(fake[7])
finish = ctypes.CFUNCTYPE(None, ctypes.c_int)(fake[11])
ctypes.CFUNCTYPE(None, ctypes.c_int)(fake[2])(0)  # a current context
home, reader = make_stream(0), make_stream(0)
calls.esper_alloc_set_record_stream_visible(1)
blocks = [calls.esper_alloc_malloc(1 << 26, 0, home) for _ in range(4)]
finish(0)
for block in blocks:
    calls.esper_alloc_record_use(block, reader)
    calls.esper_alloc_free(block, 0, 0, home)
happened, go = [], threading.Event()
def let_go():
    go.wait()
    happened.append("the other thread ran")
    finish(1)
other = threading.Thread(target=let_go)
other.start()
go.set()
assert calls.esper_alloc_malloc(1 << 26, 0, home) in blocks
happened.append("malloc returned")
other.join()
print(*happened, sep=", ")
"""


def test_the_host_waits_without_the_gil(built: Path) -> None:
    pytest.importorskip("esper_alloc._core")
    cuda, path = str(built / "libfake.so"), str(ROOT)
    environment = {**os.environ, "ESPER_ALLOC_LIBCUDA": cuda, "ESPER_ALLOC_ALLOWANCE": "0"}
    done = python("-c", HELD_BACK, env={**environment, "PYTHONPATH": path})
    assert done.stdout == "the other thread ran, malloc returned\n", done.stderr


def cuda_include() -> Path | None:
    """A folder with NVIDIA's own cuda.h and cudaTypedefs.h, if there is one."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    nvcc = shutil.which("nvcc")
    if nvcc:
        homes.append(str(Path(nvcc).resolve().parent.parent))
    for home in filter(None, homes):
        include = Path(home) / "include"
        if (include / "cudaTypedefs.h").exists() and (include / "cuda.h").exists():
            return include
    return None


def test_our_declarations_are_nvidias(tmp_path: Path) -> None:
    include = cuda_include()
    if include is None:
        pytest.skip("needs the CUDA toolkit's cuda.h")
    source = [DEVICE_TESTS / "cuda_abi.c"]
    ours = compile_c(tmp_path / "ours", source)
    theirs = compile_c(tmp_path / "theirs", source, "-DWITH_CUDA_H", f"-isystem{include}")
    said = [subprocess.check_output([str(program)], text=True) for program in (ours, theirs)]
    assert said[0] == said[1]
    constants = [line for line in said[0].splitlines() if "said to be" in line]
    assert len(constants) > 20
    for line in constants:
        value, claim = line.split(" = ")[1].split(", said to be ")
        assert value == claim, line
