"""Builds and loads measuring loops in C++ (pair.cpp and others beside it), for the torch
that is installed."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shlex
import subprocess
import sysconfig
import tempfile
from hashlib import sha256
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent
HEADERS = [
    FOLDER / "loops.h",
    *(
        FOLDER.parent / "csrc" / name
        for name in ("python/capi.h", "esper_alloc.h", "esper_report.h", "esper_sleep.h")
    ),
]


def load(name: str = "pair") -> ModuleType:
    """The compiled loops of NAME.cpp, the module NAME_loops; compiled on first use for
    this source, Python and torch.

    Raises RuntimeError with the compiler's output when they do not compile.
    """
    import torch

    torch.cuda.is_available()  # loads the libraries that the module links to
    source = FOLDER / f"{name}.cpp"
    sources = b"".join(path.read_bytes() for path in (source, *HEADERS))
    key = sha256(
        sources + f"{torch.__version__} {sysconfig.get_config_var('SOABI')}".encode()
    ).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"esper_alloc-loops-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to somebody else; remove it")
    built = folder / f"{name}_loops-{key}.so"
    if not built.exists():
        compile_to(built, source)
    loader = importlib.machinery.ExtensionFileLoader(f"{name}_loops", str(built))
    spec = importlib.util.spec_from_file_location(f"{name}_loops", built, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def compile_to(built: Path, source: Path) -> None:
    """Compiles the loops; the file appears whole or not at all."""
    import torch
    from torch.utils import cpp_extension

    compiler = shlex.split(os.environ.get("CXX") or "g++")
    # Newer torch needs C++20; older headers compile as C++20 too.
    command = [*compiler, "-O2", "-fPIC", "-shared", "-std=c++20", "-pthread"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    for include in cpp_extension.include_paths(device_type="cuda"):
        command += ["-isystem", include]
    command += ["-I", sysconfig.get_paths()["include"], str(source)]
    libraries = cpp_extension.library_paths(device_type="cuda")
    for library in libraries:
        command += [f"-L{library}", f"-Wl,-rpath,{library}"]
    # libcudart comes in through libc10_cuda: the very one that torch uses.
    scratch = built.with_name(f"{built.name}.{os.getpid()}")
    command += ["-o", str(scratch), "-lc10", "-lc10_cuda"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
    scratch.replace(built)
