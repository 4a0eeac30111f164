"""Builds the extension modules; everything else stands in pyproject.toml.

    esper_alloc._core    always: the allocator's core and its drivers
    esper_alloc._torch   where torch with CUDA can be imported: the PyTorch part
    esper_alloc._kernels where nvcc is there besides: the kernels of the helpers

Environment:
    ESPER_ALLOC_SHIM=0          leave the PyTorch part out; =1: fail without it, as
                                installing does unless the torch is a CPU build
    ESPER_ALLOC_KERNELS=0       leave the kernels out; =1: fail without them
    TORCH_CUDA_ARCH_LIST=9.0    the GPUs to compile kernels for, as PyTorch has it
    ESPER_ALLOC_DEBUG=1         no optimisation, asserts on
    ESPER_ALLOC_SANITIZE=NAMES  for example address,undefined or thread
    ESPER_ALLOC_RULE_SWITCHES=1 the lifetime rules can be switched off, for tests
    MAX_JOBS=N                  compile N files at a time (the number of CPUs)
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import setuptools

if not sys.platform.startswith("linux"):
    raise SystemExit(
        "esper_alloc runs on Linux with NVIDIA GPUs; Windows, macOS and others are not supported "
        f"(this Python is one for {sys.platform})"
    )

# Without build isolation nobody compares with what pyproject.toml requires, and
# older ones stop at its licence with a page of words.
if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(
        f"esper_alloc is built with setuptools 77 or newer, and this is {setuptools.__version__}: "
        "run `pip install 'setuptools>=77,<82'`, then the same command again"
    )

# Older ones do not have all of these.
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, ExecError
from setuptools.modified import newer_group

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import torch_build  # noqa: E402

DEBUG = os.environ.get("ESPER_ALLOC_DEBUG", "0") == "1"
SANITIZE = os.environ.get("ESPER_ALLOC_SANITIZE", "")
RULE_SWITCHES = os.environ.get("ESPER_ALLOC_RULE_SWITCHES", "0") == "1"
SHIM = os.environ.get("ESPER_ALLOC_SHIM", "")
KERNELS = os.environ.get("ESPER_ALLOC_KERNELS", "")

WITHOUT_THE_PYTORCH_PART = (
    "without the PyTorch part the helpers and `replay` work, and record_use() acts as "
    "record_stream; enable(), run, sleep() and the auditor do not work"
)

#: The shim's folders, from the lowest layer to the highest. In this order a call to a higher one
#: does not compile, unless its header is included, which tests/test_layers.py forbids.
SHIM_FOLDERS = (
    "base", "automatic", "ipc", "start", "debugging", "reporting", "memory", "uses", "auditor",
    "allocator",
)  # fmt: skip

# What C and C++ users compile against, as esper_alloc.get_include() serves it.
PUBLIC_HEADERS = (
    "esper_alloc.h",
    "esper_report.h",
    "esper_sleep.h",
    "device/device.h",
    "python/capi.h",
)


def sources(*patterns: str) -> list[str]:
    """Files below csrc, relative to here as setuptools wants them, in a fixed order."""
    found = {path for pattern in patterns for path in (ROOT / "csrc").glob(pattern)}
    return sorted(str(path.relative_to(ROOT)) for path in found)


def common_flags() -> list[str]:
    flags = ["-Wall", "-Wextra", "-Wformat=2", "-fvisibility=hidden", "-fno-semantic-interposition"]
    flags += ["-O0", "-g", "-UNDEBUG"] if DEBUG else ["-O3", "-g1"]
    if SANITIZE:
        flags += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer"]
    return flags


def whole_program_flags() -> list[str]:
    """The core is many small files whose functions are worth inlining into each other."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    trial = [*compiler, "-flto=auto", "-x", "c", "-", "-shared", "-fPIC", "-o", os.devnull]
    if DEBUG or SANITIZE or not shutil.which(compiler[0]):
        return []
    works = subprocess.run(trial, input=b"int one(void) { return 1; }\n", capture_output=True)
    return ["-flto=auto"] if works.returncode == 0 else []


def link_flags() -> list[str]:
    return [f"-fsanitize={SANITIZE}"] if SANITIZE else []


def core_extension(headers_version: str | None) -> Extension:
    macros: list[tuple[str, str | None]] = [("_GNU_SOURCE", "1")]
    if RULE_SWITCHES:
        macros.append(("ESPER_RULE_SWITCHES", None))
    if DEBUG or SANITIZE:
        macros.append(("ESPER_LOCK_ORDER", None))
    if SANITIZE:
        macros.append(("ESPER_BUILD_SANITIZE", f'"{SANITIZE}"'))
    if headers_version:
        macros.append(("ESPER_BUILD_CUDA_HEADERS", f'"{headers_version}"'))
    folders = ("", "audit/", "black_box/", "core/*/", "sleep/", "device/", "device/*/", "python/")
    return Extension(
        "esper_alloc._core",
        sources(*(f"{folder}*.c" for folder in (*folders, "replay/"))),
        depends=sources(*(f"{folder}*.h" for folder in (*folders, "replay/"))),
        define_macros=macros,
        extra_compile_args=["-std=c11", "-Wshadow", *common_flags(), *whole_program_flags()],
        extra_link_args=[*link_flags(), *whole_program_flags()],
        libraries=["pthread", "dl"],
    )


def torch_extension(
    build: torch_build.TorchBuild, name: str, files: list[str], depends: list[str]
) -> Extension:
    """An extension in C++ that includes torch's headers."""
    # The headers of torch and CUDA are not ours to warn about. No -std: torch's
    # own build command knows which its headers need. No CUDA library: libtorch
    # brings the one it was built for.
    system = [flag for folder in build.include_dirs for flag in ("-isystem", folder)]
    return Extension(
        name,
        files,
        depends=depends,
        extra_compile_args=[*common_flags(), *system, "-iquote", "."],  # see as_one_file()
        extra_link_args=link_flags(),
        library_dirs=build.library_dirs,
        libraries=["c10", "c10_cuda", "torch", "torch_cpu", "torch_cuda", "torch_python"],
        language="c++",
    )


def shim_extension(build: torch_build.TorchBuild) -> Extension:
    files = [file for folder in SHIM_FOLDERS for file in sources(f"torch/{folder}/*.cpp")]
    files += sources("python/*.cpp")
    depends = sources("*.h", "torch/*/*.h")
    depends += ["csrc/audit/audit.h", "csrc/python/audit_capi.h", "csrc/python/capi.h"]
    return torch_extension(build, "esper_alloc._torch", files, depends)


def kernels_extension(build: torch_build.TorchBuild) -> Extension:
    """C++ that registers operators, linked with what nvcc makes of kernels/*.cu."""
    files, depends = (
        sources("kernels/*.cpp"),
        sources("kernels/*.h", "kernels/*.cuh", "kernels/*.cu"),
    )
    return torch_extension(build, "esper_alloc._kernels", files, depends)


def nvcc_command(build: torch_build.TorchBuild) -> list[str]:
    """Compiles one .cu file. No -std: these files include nothing of torch's."""
    compiler = os.environ.get("CXX", "").split()
    flags = ["-O0", "-g"] if DEBUG else ["-O3"]
    flags += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
    flags += ["-ccbin", compiler[0]] if len(compiler) == 1 else []
    return [str(build.nvcc), *build.nvcc_flags, *flags]


def decide() -> tuple[list[Extension], list[Extension], torch_build.TorchBuild]:
    """The extensions without and with torch, and what was found for the latter."""
    if SHIM == "0":
        found = torch_build.TorchBuild(missing=["the PyTorch part: left out by ESPER_ALLOC_SHIM=0"])
    else:
        found = torch_build.find()
    if not sources("torch/*/*.cpp"):
        found.missing.append("the PyTorch part: its sources are not in this tree")
    if SHIM == "1" and not found.possible:
        raise SystemExit(
            "esper_alloc: ESPER_ALLOC_SHIM=1, but missing: " + "; ".join(found.missing)
        )
    if KERNELS == "0":
        found.kernels_missing = ["the kernels: left out by ESPER_ALLOC_KERNELS=0"]
    elif found.possible and not sources("kernels/*.cu"):
        found.kernels_missing = ["the kernels: their sources are not in this tree"]
    if KERNELS == "1" and not found.kernels_possible:
        missing = "; ".join([*found.missing, *found.kernels_missing])
        raise SystemExit(f"esper_alloc: ESPER_ALLOC_KERNELS=1, but missing: {missing}")
    with_torch = [shim_extension(found)] if found.possible else []
    if found.kernels_possible:
        with_torch.append(kernels_extension(found))
    return [core_extension(found.headers_version)], with_torch, found


CORE, WITH_TORCH, FOUND = decide()


def write_build_facts(package: Path) -> None:
    """esper_alloc/_build.py: what the loader compares with the torch it finds."""
    facts = {
        # The minor version of torch: its version of CUDA. A wheel has several.
        "BUILT_FOR": {FOUND.torch_version: FOUND.cuda_version} if WITH_TORCH else {},
        "HAS_KERNELS": FOUND.kernels_possible,
        "WHAT_IS_MISSING": [*FOUND.missing, *FOUND.kernels_missing],
    }
    types = ("dict[str, str]", "bool", "list[str]")
    lines = ['"""Written by setup.py: what this installation was built for."""', ""]
    lines += [f"{name}: {kind} = {value!r}" for (name, value), kind in zip(facts.items(), types)]
    (package / "_build.py").write_text("\n".join(lines) + "\n", encoding="utf-8")


def copy_headers(package: Path) -> None:
    for header in PUBLIC_HEADERS:
        target = package / "include" / header
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / "csrc" / header, target)


def copy_documents(package: Path) -> None:
    """What `python -m esper_alloc docs` prints."""
    (package / "docs").mkdir(exist_ok=True)
    for file in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        shutil.copy(file, package / "docs")


def parallel_jobs() -> int:
    return int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)


def first_error(output: str) -> str:
    """The line of a compiler's output that says what is wrong."""
    lines = [line for line in output.splitlines() if line.strip()]
    return next((line.strip() for line in lines if "error" in line), lines[-1] if lines else "")


def spawn(command: list[str], **_: Any) -> None:
    """Runs a compiler. What it says first is the last line of a build that fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise ExecError(f"{command[0]} does not run: {error}") from error
    sys.stderr.write(done.stdout + done.stderr)
    if done.returncode != 0:
        said = first_error(done.stdout + done.stderr)
        raise ExecError(said or f"{command[0]} ended with exit code {done.returncode}")


def compile_in_parallel(compiler: Any) -> None:
    """Makes the compiler take several files at a time. After an error it begins no further one."""
    one_by_one = compiler.compile

    def compile_all(files: list[str], *args: Any, **kwargs: Any) -> list[str]:
        with ThreadPoolExecutor(parallel_jobs()) as pool:
            jobs = [pool.submit(one_by_one, [file], *args, **kwargs) for file in files]
            try:
                return [objectfile for job in jobs for objectfile in job.result()]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    compiler.compile = compile_all
    compiler.spawn = spawn


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Waits for another build of the extensions in this folder: two at once would link what is half
    written. Not every file system has locks; without one a build goes on."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"esper_alloc: waiting for another build in {folder}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


class BuildExtensions(build_ext):
    """Builds the core plainly and the PyTorch part the way torch wants it."""

    def run(self) -> None:
        installs = self.editable_mode or not self.inplace
        unexpected = not FOUND.possible and not FOUND.cpu_only
        if SHIM == "" and (FOUND.too_old or (unexpected and installs)):
            # pip shows no output of builds that succeed: half of the package would be missing
            # and nobody told.
            raise SystemExit(
                f"esper_alloc: {'; '.join(FOUND.missing)}. For the helpers and `replay` alone, "
                "build with ESPER_ALLOC_SHIM=0 in the environment"
            )
        # Wherever objects go, extensions that are built in place go to one folder.
        with alone_in(ROOT / "build"):
            self.build_all()

    def build_all(self) -> None:
        self.given_up: list[str] = []
        self.notice_other_circumstances()
        built = {extension.name for extension in WITH_TORCH}
        for name in {"esper_alloc._torch", "esper_alloc._kernels"} - built:
            # One of an earlier build would be packed.
            Path(self.get_ext_fullpath(name)).unlink(missing_ok=True)
        super().run()
        for name in self.given_up:  # in place, too
            Path(self.get_ext_fullpath(name)).unlink(missing_ok=True)
        package = (ROOT if self.inplace else Path(self.build_lib)) / "esper_alloc"
        package.mkdir(parents=True, exist_ok=True)
        write_build_facts(package)
        if not self.inplace:  # in place, csrc and docs are found where they are
            copy_headers(package)
            copy_documents(package)
        for sentence in [*FOUND.missing, *FOUND.kernels_missing]:
            print(f"esper_alloc: not built: {sentence}", file=sys.stderr)
        if not FOUND.possible:
            print(f"esper_alloc: {WITHOUT_THE_PYTORCH_PART}", file=sys.stderr)

    def notice_other_circumstances(self) -> None:
        """Build again after a change of torch or of the flags, not of the sources alone."""
        stamp = Path(self.build_temp) / "built_for.txt"
        lines = [str(FOUND)]
        lines += [f"{e.name} {e.define_macros} {e.extra_compile_args}" for e in self.extensions]
        text = "\n".join(lines)
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != text:
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.write_text(text, encoding="utf-8")
        for extension in self.extensions:
            extension.depends.append(str(stamp))

    def build_extensions(self) -> None:
        everything = self.extensions
        compile_in_parallel(self.compiler)
        try:
            self.extensions = [e for e in everything if e.name == "esper_alloc._core"]
            version = self.distribution.get_version()
            self.extensions[0].define_macros.append(("ESPER_VERSION", f'"{version}"'))
            build_ext.build_extensions(self)
            self.extensions = [e for e in everything if e.name != "esper_alloc._core"]
            self.parallel = parallel_jobs() > 1  # each of them is one file
            if self.extensions:
                self.build_torch_extensions()
        finally:
            self.extensions = [e for e in everything if e.name not in self.given_up]

    def build_torch_extensions(self) -> None:
        build_ext.build_extensions(self)

    def build_extension(self, extension: Extension) -> None:
        if extension.name != "esper_alloc._core":
            extension.depends += extension.sources
            extension.sources = self.as_one_file(extension.name, extension.sources)
        if extension.name == "esper_alloc._kernels":
            try:
                extension.extra_objects = self.compile_kernels(extension.depends)
            except CompileError as error:
                if KERNELS == "1":
                    raise
                # Most often an nvcc that refuses the C++ compiler. All else works.
                FOUND.kernels_missing.append(
                    f"the kernels: {error} (CXX=... names another C++ compiler)"
                )
                self.given_up.append(extension.name)
                Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)
                return
        build_ext.build_extension(self, extension)

    def as_one_file(self, name: str, files: list[str]) -> list[str]:
        """A file that includes all of these: torch's headers take most of the time of compiling,
        so they are read once."""
        target = Path(self.build_temp) / f"{name}.cpp"
        target.parent.mkdir(parents=True, exist_ok=True)
        text = "#include <Python.h>\n" + "".join(f'#include "{file}"\n' for file in files)
        if not target.is_file() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")  # else nothing is compiled again
        return [str(target)]

    def compile_kernels(self, depends: list[str]) -> list[str]:
        """Object files of csrc/kernels/*.cu, those that are up to date left alone: they do not
        depend on torch, but on how they are compiled."""
        files = sources("kernels/*.cu")
        headers = [file for file in depends if file.endswith((".h", ".cuh"))]
        folder = Path(self.build_temp) / "csrc" / "kernels"
        folder.mkdir(parents=True, exist_ok=True)

        def compile_one(file: str) -> str:
            target = folder / (Path(file).stem + ".cu.o")
            command = [*nvcc_command(FOUND), "-c", file, "-o", str(target)]
            how, made_by = shlex.join(command), target.with_suffix(".txt")
            same = made_by.is_file() and made_by.read_text(encoding="utf-8") == how
            if self.force or not same or newer_group([file, *headers], str(target)):
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
                sys.stderr.write(done.stdout + done.stderr)
                if done.returncode != 0:
                    target.unlink(missing_ok=True)
                    said = first_error(done.stdout + done.stderr)
                    raise CompileError(f"{FOUND.nvcc} could not compile {file}: {said}")
                made_by.write_text(how, encoding="utf-8")
            return str(target)

        with ThreadPoolExecutor(max(parallel_jobs() - 1, 1)) as pool:  # beside the shim
            return list(pool.map(compile_one, files))


def command() -> type[build_ext]:
    if not WITH_TORCH:
        return BuildExtensions
    from torch.utils.cpp_extension import BuildExtension

    class BuildWithTorch(BuildExtensions, BuildExtension):
        """BuildExtension adds the C++ standard and the ABI that torch's headers need."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.update(use_ninja=False, no_python_abi_suffix=False)
            BuildExtension.__init__(self, *args, **kwargs)

        def build_torch_extensions(self) -> None:
            BuildExtension.build_extensions(self)

    return BuildWithTorch


setup(ext_modules=CORE + WITH_TORCH, cmdclass={"build_ext": command()})
