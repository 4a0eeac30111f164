"""What a build of the PyTorch part needs, and whether it is here.

Used by setup.py. The PyTorch part (`esper_alloc._torch`) is built where a torch
for CUDA can be imported, with a C++ compiler and the headers of the same major
version of CUDA; nvcc is not needed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import site
import sys
from dataclasses import dataclass, field
from pathlib import Path

_INSTALL = "pip install --no-build-isolation ."

# Of these, cuda_runtime_api.h includes the second.
_NEEDED_HEADERS = ("cuda_runtime_api.h", "crt/host_defines.h")


@dataclass
class TorchBuild:
    """The build's answer. `missing` is empty when the PyTorch part can be built."""

    missing: list[str] = field(default_factory=list)  # sentences with the remedy
    torch_version: str | None = None  # "2.11", what the extension is built for
    cuda_version: str | None = None  # "13.0", torch's
    headers_version: str | None = None  # "13.0", of the CUDA headers used
    include_dirs: list[str] = field(default_factory=list)  # torch's, then CUDA's
    library_dirs: list[str] = field(default_factory=list)

    @property
    def possible(self) -> bool:
        return not self.missing


def find() -> TorchBuild:
    """Looks for torch, a C++ compiler and CUDA headers. Imports torch if it is there."""
    build = TorchBuild()
    if importlib.util.find_spec("torch") is None:
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
    if build.cuda_version is None:
        build.missing.append(
            f"the PyTorch part: torch {torch.__version__} is built without CUDA. Install a torch "
            f"with CUDA (https://pytorch.org/get-started), then run `{_INSTALL}` again"
        )
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
    return build


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
