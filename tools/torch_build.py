"""What a build of the PyTorch part and of the kernels needs, and whether it is here.

Used by setup.py. The PyTorch part (`esper_alloc._torch`) is built where a torch
for CUDA can be imported, with a C++ compiler and the headers of the same major
version of CUDA. The kernels of the helpers (`esper_alloc._kernels`) need an nvcc
of that major version besides.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from environment import OLDEST_TORCH

_INSTALL = "pip install --no-build-isolation ."

# Of these, cuda_runtime_api.h includes the second.
_NEEDED_HEADERS = ("cuda_runtime_api.h", "crt/host_defines.h")


@dataclass
class TorchBuild:
    """The build's answer. `missing` is empty when the PyTorch part can be built."""

    missing: list[str] = field(default_factory=list)  # sentences with the remedy
    cpu_only: bool = False  # the torch that is here has no CUDA: nobody expects the PyTorch part
    too_old: str | None = None  # a sentence: the torch that is needed, and the one that is here
    torch_version: str | None = None  # "2.11", what the extension is built for
    cuda_version: str | None = None  # "13.0", torch's
    headers_version: str | None = None  # "13.0", of the CUDA headers used
    include_dirs: list[str] = field(default_factory=list)  # torch's, then CUDA's
    library_dirs: list[str] = field(default_factory=list)
    # What only the kernels want; meaningless unless the build is possible.
    kernels_missing: list[str] = field(default_factory=list)  # sentences with the remedy
    nvcc: str | None = None  # the compiler
    nvcc_flags: list[str] = field(default_factory=list)  # the GPUs to compile for

    @property
    def possible(self) -> bool:
        return not self.missing

    @property
    def kernels_possible(self) -> bool:
        return self.possible and self.nvcc is not None and not self.kernels_missing


def find() -> TorchBuild:
    """Looks for torch, a C++ compiler and CUDA headers. Imports torch if it is there."""
    build = TorchBuild()
    if importlib.util.find_spec("torch") is None:
        outside = torch_outside()
        if outside is not None:
            _judge(build, *outside)
        if outside is not None and outside[1] is not None and not build.too_old:
            build.missing.append(
                f"the PyTorch part: a build in isolation does not see torch {outside[0]}, which is "
                f"here. Run `{_INSTALL}`"
            )
        if outside is not None:
            return build
        build.missing.append(
            "the PyTorch part: no torch can be imported by the Python that builds "
            f"({sys.executable}). Install torch, then run `{_INSTALL}` in that environment "
            "(without --no-build-isolation a build does not see the torch you have)"
        )
        return build
    import torch
    from torch.utils import cpp_extension

    build.torch_version = ".".join(torch.__version__.split(".")[:2])
    build.cuda_version = torch.version.cuda
    if getattr(torch.version, "hip", None):
        build.missing.append(
            f"the PyTorch part: torch {torch.__version__} is built for ROCm, which esper_alloc "
            "does not support"
        )
        return build
    _judge(build, torch.__version__, build.cuda_version)
    if build.missing or build.cuda_version is None:
        return build
    if not _cxx_compiler():
        build.missing.append(
            "the PyTorch part: there is no C++ compiler. Install one "
            f"(`apt-get install g++`, `dnf install gcc-c++`), then run `{_INSTALL}` again"
        )
    cuda = _cuda_include_dirs(build.cuda_version)
    if cuda:
        build.headers_version = cuda_version_of(cuda[0])
    else:
        build.missing.append(
            f"the PyTorch part: there are no headers of CUDA {_major(build.cuda_version)} "
            f"({' and '.join(_NEEDED_HEADERS)}). Install the CUDA toolkit "
            f"{_major(build.cuda_version)}.x and set CUDA_HOME, or run "
            f"`{_headers_command(build.cuda_version)}`; then run `{_INSTALL}` again"
        )
    build.include_dirs = [*cpp_extension.include_paths(), *map(str, cuda)]
    build.library_dirs = cpp_extension.library_paths()
    find_nvcc(build, torch._C._cuda_getArchFlags().split())
    return build


def _judge(build: TorchBuild, version: str, cuda: str | None) -> None:
    """Notes what the torch's version alone says."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and tuple(map(int, numbers.groups())) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        build.too_old = (
            f"the PyTorch part: it needs torch {oldest} or newer, and this is torch {version}. "
            f"Run `pip install 'torch>={oldest}'`, then `{_INSTALL}` again"
        )
        build.missing.append(build.too_old)
    elif cuda is None:
        build.cpu_only = True
        build.missing.append(
            f"the PyTorch part: torch {version} is built without CUDA. Install a torch "
            f"with CUDA (https://pytorch.org/get-started), then run `{_INSTALL}` again"
        )


def torch_outside() -> tuple[str, str | None] | None:
    """Version and CUDA version of the torch that an isolated build does not see: it hides the
    environment's packages. None: there is no torch, or it does not say."""
    for folder in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        try:
            text = Path(folder, "torch", "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        version = re.search(r"^__version__ *(?::[^=]*)?= *'([^']*)'", text, re.M)
        cuda = re.search(r"^cuda *(?::[^=]*)?= *(?:'([^']*)'|None)", text, re.M)
        rocm = re.search(r"^hip *(?::[^=]*)?= *'", text, re.M)
        if version and cuda and not rocm:
            return version[1], cuda[1]
    return None


def find_nvcc(build: TorchBuild, torch_architectures: list[str]) -> None:
    """Looks for an nvcc that fits torch, and for the GPUs that both compile for."""
    assert build.cuda_version is not None
    versions = {nvcc: nvcc_version(nvcc) for nvcc in _nvcc_candidates()}
    major = _major(build.cuda_version)
    fitting = [nvcc for nvcc, version in versions.items() if version and _major(version) == major]
    fitting.sort(key=lambda nvcc: versions[nvcc] != build.cuda_version)
    if not fitting:
        others = [f"{nvcc} is of CUDA {version}" for nvcc, version in versions.items() if version]
        build.kernels_missing.append(
            f"the kernels: there is no nvcc of CUDA {major}"
            + (f" ({', '.join(others)})" if others else "")
            + ". The helpers then use PyTorch's own operations. Install the CUDA toolkit "
            f"{major}.x and set CUDA_HOME{_or_from_pypi(build.cuda_version)}; then run "
            f"`{_INSTALL}` again"
        )
        return
    try:
        build.nvcc_flags = architecture_flags(
            os.environ.get("TORCH_CUDA_ARCH_LIST", ""),
            torch_architectures,
            nvcc_architectures(fitting[0]),
        )
    except ValueError as error:
        build.kernels_missing.append(f"the kernels: {error}")
        return
    build.nvcc = fitting[0]


def nvcc_version(nvcc: str) -> str | None:
    """'13.0', as a compiler says; None if it does not run."""
    found = re.search(r"release (\d+\.\d+)", _output(nvcc, "--version"))
    return found.group(1) if found else None


def nvcc_architectures(nvcc: str) -> set[str]:
    """What a compiler can compile for: {"80", "90", ...}."""
    return set(re.findall(r"compute_(\d+\w?)", _output(nvcc, "--list-gpu-arch")))


# PyTorch's names for generations, as TORCH_CUDA_ARCH_LIST may have them.
_GENERATIONS = {
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;12.0+PTX",
}


def architecture_flags(listed: str, torch: list[str], nvcc: set[str]) -> list[str]:
    """nvcc's flags for the GPUs to compile for.

    `listed` is TORCH_CUDA_ARCH_LIST. Without it: what `torch` ("sm_80", ...) is
    built for and `nvcc` ("80", ...) knows, the lowest of each major version,
    whose code runs on all GPUs of that version; and PTX of the highest, for GPUs
    that are newer than both.

    Raises:
        ValueError: nothing to compile for; says why.
    """
    if listed.strip():
        for name, meaning in _GENERATIONS.items():
            listed = re.sub(rf"\b{name}\b(?!\+PTX)", meaning, listed)
        wanted = [entry for entry in re.split(r"[\s;,]+", listed) if entry]
        odd = [entry for entry in wanted if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", entry)]
        if odd:
            raise ValueError(
                f"TORCH_CUDA_ARCH_LIST: {odd[0]!r} is no version such as 9.0 or 9.0+PTX"
            )
        codes = {entry.partition("+")[0].replace(".", ""): "+PTX" in entry for entry in wanted}
        unknown = [code for code in codes if code.rstrip("af") not in nvcc]
        if unknown:
            raise ValueError(f"TORCH_CUDA_ARCH_LIST: this nvcc does not know sm_{unknown[0]}")
    else:
        numbers = sorted(int(one[3:]) for one in torch if re.fullmatch(r"sm_\d+", one))
        both = [number for number in numbers if str(number) in nvcc]
        lowest = {number // 10: number for number in reversed(both)}
        codes = {str(number): number == max(both) for number in sorted(lowest.values())}
        if both and str(max(both)) not in codes:
            codes[str(max(both))] = True
    if not codes:
        raise ValueError("this nvcc compiles for none of the GPUs that this torch is built for")
    flags = []
    for code, with_ptx in codes.items():
        flags.append(f"-gencode=arch=compute_{code},code=sm_{code}")
        if with_ptx:
            flags.append(f"-gencode=arch=compute_{code},code=compute_{code}")
    return flags


def cuda_version_of(include: Path) -> str | None:
    """'13.0', as the headers in a folder say; None without them."""
    header = include / "cuda_runtime_api.h"
    if not header.is_file():
        return None
    text = header.read_text(encoding="utf-8", errors="replace")
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    if not found:
        return None
    number = int(found.group(1))
    return f"{number // 1000}.{number % 1000 // 10}"


def _major(version: str) -> str:
    return version.split(".")[0]


def _headers_command(cuda: str) -> str:
    """What installs the headers that torch's own CUDA wheels leave out."""
    if int(_major(cuda)) >= 13:
        names = ["nvidia-cuda-runtime", "nvidia-cuda-crt"]
    else:
        suffix = f"-cu{_major(cuda)}"
        names = ["nvidia-cuda-runtime" + suffix, "nvidia-cuda-nvcc" + suffix]
    return "pip install " + " ".join(f'"{name}=={cuda}.*"' for name in names)


def _or_from_pypi(cuda: str) -> str:
    """What installs an nvcc without a toolkit. The wheels of CUDA 12 have no nvcc."""
    if int(_major(cuda)) < 13:
        return ""
    names = ["nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl"]
    return ", or run `pip install " + " ".join(f'"{name}=={cuda}.*"' for name in names) + "`"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _nvcc_candidates() -> list[str]:
    """Compilers that are there: those that the user names first."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    found = [Path(home) / "bin" / "nvcc" for home in homes if home]
    on_path = shutil.which("nvcc")
    found += [Path(on_path)] if on_path else []
    found.append(Path("/usr/local/cuda/bin/nvcc"))
    for packages in [*sys.path, *site.getsitepackages(), site.getusersitepackages()]:
        found += Path(packages).glob("nvidia/*/bin/nvcc")
    seen = {path.resolve(): str(path) for path in reversed(found) if path.is_file()}
    return [path for path in map(str, found) if path in seen.values()]


def _cxx_compiler() -> str | None:
    named = os.environ.get("CXX", "").split()
    return shutil.which(named[0]) if named else shutil.which("c++") or shutil.which("g++")


def _include_candidates() -> list[Path]:
    """Folders that may hold CUDA headers: toolkits, then NVIDIA's wheels."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    nvcc = shutil.which("nvcc")
    if nvcc:
        homes.append(str(Path(nvcc).resolve().parent.parent))
    homes.append("/usr/local/cuda")
    folders = [Path(home) / "include" for home in homes if home]
    for home in filter(None, homes):
        folders += Path(home).glob("targets/*/include")
    for packages in [*sys.path, *site.getsitepackages(), site.getusersitepackages()]:
        folders += Path(packages).glob("nvidia/*/include")
    seen: dict[Path, Path] = {}
    for folder in folders:
        if folder.is_dir():
            seen.setdefault(folder.resolve(), folder)
    return list(seen)


def _cuda_include_dirs(cuda: str) -> list[Path]:
    """Folders with CUDA's headers, the runtime's first; empty when they are not complete.

    One folder of torch's own minor version is best, another of its major version
    will do. The wheels spread libraries over several folders: those follow.
    """
    folders = _include_candidates()
    versions = {folder: cuda_version_of(folder) for folder in folders}
    fitting = [f for f in folders if versions[f] and _major(versions[f] or "") == _major(cuda)]
    fitting.sort(key=lambda f: (not (f / _NEEDED_HEADERS[1]).is_file(), versions[f] != cuda))
    others = [f for f in folders if versions[f] is None and "nvidia" in f.parts]
    chosen = fitting + others
    complete = fitting and all(any((f / h).is_file() for f in chosen) for h in _NEEDED_HEADERS)
    return chosen if complete else []
