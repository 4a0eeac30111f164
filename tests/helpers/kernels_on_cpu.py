"""Kernels as shared libraries for the CPU, by the headers of tests/kernels."""

import ctypes
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from compilers import CXX
from processes import ROOT, succeeded

KERNELS = ROOT / "csrc" / "kernels"
sys.path.insert(0, str(ROOT / "tools"))

import torch_build  # noqa: E402


def replaced(pattern: str, by: str, text: str, times: int = 1) -> str:
    """The text with a pattern replaced that stands in it so often."""
    text, count = re.subn(pattern, by, text, flags=re.S)
    assert count == times, pattern
    return text


def compiled(name: str, header: str, text: str, folder: Path, *flags: str) -> Any:
    """The library of a changed kernel's text, behind one of the headers."""
    torch = pytest.importorskip("torch")
    include = torch_build._cuda_include_dirs(torch.version.cuda) if torch.version.cuda else []
    if not CXX or not any((one / "cuda_fp16.h").is_file() for one in include):
        pytest.skip("needs a C++ compiler and CUDA's headers")
    (folder / f"{name}.cpp").write_text(f'#include "{header}"\n{text}')
    # Misaligned accesses fault on a GPU.
    command = [*CXX, "-std=c++17", "-O1", "-shared", "-fPIC", "-w", *flags]
    command += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
    command += [f"-I{ROOT / 'tests' / 'kernels'}", f"-I{KERNELS}"]
    command += [word for one in include for word in ("-isystem", str(one))]
    succeeded(*command, folder / f"{name}.cpp", "-o", folder / f"{name}.so")
    return ctypes.CDLL(str(folder / f"{name}.so"))
