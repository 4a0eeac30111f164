"""Sets up what `make demo` and `make test` run in, and prints that Python.

    python tools/environment.py         # for make demo and make test
    python tools/environment.py docs    # for make docs, which needs no torch

The active Python serves when it has a torch for CUDA that is new enough: as it
is when nothing else is missing (then no network is needed), else through a
virtual environment that sees its packages and adds the missing ones. Without
such a torch the environment gets one of its own, and in CI (CI=true) it always
does: the versions below are then the ones that are tested. Nothing is ever
installed into the active Python. The extensions are built in place, and again
whenever the Python or the torch is another one. Two that run at once take turns.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
DOCS_ENVIRONMENT = ROOT / ".venv-docs"
STAMP = ROOT / "build" / "built_for.json"

OLDEST_TORCH = (2, 11)
TORCH = "torch==2.11.0"  # the one to install; PyPI's Linux wheels are for CUDA

# What the tests and the demonstration import: (module, what pip installs).
# setuptools reads the licence of pyproject.toml from 77 on; torch 2.11 wants one
# below 82.
NEEDED = {
    "setuptools": "setuptools>=77,<82",
    "pytest": "pytest>=8",
    "xdist": "pytest-xdist>=3.7",
    "hypothesis": "hypothesis>=6",
    "numpy": "numpy",
}
# What more of them can do with these; only in an environment of our own.
OPTIONAL = {
    "matplotlib": "matplotlib",
    "tqdm": "tqdm",
    "torchvision": "torchvision==0.26.0",  # of the torch above: a newer one brings its own torch
    # tests/test_style.py runs these, and other versions find other things. basedpyright is
    # pyright in a package that does not load its interpreter from elsewhere.
    "mypy": "mypy==2.4.1",
    "basedpyright": "basedpyright==1.40.2",
    "ruff": "ruff==0.17.6",
    "clang_format": "clang-format==23.1.5",
    "clang_tidy": "clang-tidy==23.1.4",
    # tests/test_site.py builds the documents as a site.
    "material": "mkdocs-material==9.8.2",
    "mkdocstrings": "mkdocstrings-python==2.0.11",
}
# What `make docs` needs; ruff formats signatures.
DOCS = {name: OPTIONAL[name] for name in ("material", "mkdocstrings", "ruff")}

PROBE = """
import importlib.util, json, os, site, sys, sysconfig
found = {"version": sys.version_info[:2], "torch": None, "cuda": None, "modules": {}}
for name in sys.argv[1:]:
    found["modules"][name] = importlib.util.find_spec(name) is not None
try:
    import setuptools
    found["modules"]["setuptools"] = int(setuptools.__version__.split(".")[0]) >= 77
except Exception:
    found["modules"]["setuptools"] = False
try:
    import torch
    found["torch"], found["cuda"] = torch.__version__, torch.version.cuda
except Exception:
    pass
folders = [*site.getsitepackages()]
if site.ENABLE_USER_SITE:
    folders.append(site.getusersitepackages())
found["folders"] = folders
include = sysconfig.get_path("include")
found["headers"] = include if os.path.exists(os.path.join(include, "Python.h")) else None
print(json.dumps(found))
"""


def say(text: str) -> None:
    print(f"esper_alloc: {text}", file=sys.stderr, flush=True)


def fail(text: str) -> NoReturn:
    say(text)
    raise SystemExit(1)


def probe(python: str) -> dict[str, Any]:
    """What a Python has."""
    done = subprocess.run(
        [python, "-c", PROBE, *NEEDED, *OPTIONAL], capture_output=True, text=True, cwd="/"
    )
    if done.returncode != 0:
        fail(f"{python} does not run:\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def torch_serves(found: dict[str, Any]) -> bool:
    if found["torch"] is None or found["cuda"] is None:
        return False
    version = tuple(int(part) for part in found["torch"].split("+")[0].split(".")[:2])
    return version >= OLDEST_TORCH


def missing_from(found: dict[str, Any]) -> list[str]:
    return [what for module, what in NEEDED.items() if not found["modules"][module]]


def make_environment(folders: list[str], place: Path = ENVIRONMENT) -> str:
    """A virtual environment; it sees the packages in `folders` too."""
    python = place / "bin" / "python"
    if not python.exists() or probe(str(python))["version"] != list(sys.version_info[:2]):
        say(f"making a virtual environment in {place.relative_to(ROOT)}/")
        try:
            venv.create(place, with_pip=True, clear=True, symlinks=True)
        except (subprocess.CalledProcessError, OSError, ModuleNotFoundError) as error:
            fail(
                f"{sys.executable} cannot make a virtual environment ({error}); on Debian and "
                f"Ubuntu `apt-get install python3-venv` adds what it needs"
            )
    # Through a .pth file: `--system-site-packages` would mean the base Python's
    # packages, which are not the active ones when a virtual environment is active.
    packages = place / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    pth = packages / "site-packages" / "active_python.pth"
    if folders:
        lines = [f"import site; site.addsitedir({folder!r})" for folder in folders]
        pth.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        pth.unlink(missing_ok=True)
    return str(python)


def install(python: str, what: list[str], instead: str) -> None:
    """`instead` says in what case there would have been nothing to install."""
    say("installing " + ", ".join(what))
    options = ["--quiet", "--disable-pip-version-check", "--require-virtualenv"]
    command = [python, "-m", "pip", *options, "install", *what]
    done = subprocess.run(command, stdout=sys.stderr, cwd="/")
    if done.returncode != 0:
        fail(
            f"pip could not install {', '.join(what)} (see above). With {instead} in the active "
            "Python no download is needed"
        )


def choose_python() -> str:
    """The Python to use, with all that is needed installed."""
    active = probe(sys.executable)
    if torch_serves(active) and not os.environ.get("CI"):
        missing = missing_from(active)
        if not missing:
            say(f"using {sys.executable} with torch {active['torch']}")
            return sys.executable
        python = make_environment(active["folders"])
        missing = missing_from(probe(python))
    else:
        if torch_serves(active):
            reason = "CI is set"
        elif active["torch"]:
            reason = (
                f"torch {active['torch']} (CUDA {active['cuda']}) is there, but not one for CUDA "
                f"from {'.'.join(map(str, OLDEST_TORCH))} on"
            )
        else:
            reason = "no torch is there"
        say(f"{sys.executable}: {reason}; using an environment with its own {TORCH}")
        python = make_environment([])
        found = probe(python)
        missing = missing_from(found)
        missing += [what for name, what in OPTIONAL.items() if not found["modules"][name]]
        if not torch_serves(found):
            missing.append(TORCH)
    if missing:
        alternative = f"a torch {TORCH[7:]} or newer for CUDA, pytest, hypothesis, numpy and "
        install(python, missing, alternative + "setuptools>=77")
    found = probe(python)
    if missing_from(found) or not torch_serves(found):
        fail(f"{python} still lacks {', '.join(missing_from(found)) or 'a torch for CUDA'}")
    say(f"using {python} with torch {found['torch']}")
    return python


def docs_python() -> str:
    """A Python that can build the site: nothing of the project's is imported for that."""
    if all(probe(sys.executable)["modules"][module] for module in DOCS):
        return sys.executable
    python = make_environment([], DOCS_ENVIRONMENT)
    found = probe(python)
    missing = [what for module, what in DOCS.items() if not found["modules"][module]]
    if missing:
        install(python, missing, " and ".join(DOCS.values()))
    return python


def build(python: str) -> None:
    """Builds the extensions in place, anew when they were built for something else."""
    found = probe(python)
    if found["headers"] is None:
        fail(
            f"{python} has no Python.h to build extension modules with; on Debian and Ubuntu "
            "`apt-get install python3-dev` adds it"
        )
    wanted = {key: found[key] for key in ("version", "torch", "cuda")}
    try:
        same = json.loads(STAMP.read_text(encoding="utf-8")) == wanted
    except (OSError, ValueError):
        same = False
    say("building the extensions" + ("" if same else " (some minutes)"))
    command = [python, "setup.py", "--quiet", "build_ext", "--inplace"]
    STAMP.parent.mkdir(exist_ok=True)
    log = STAMP.parent / "build.log"
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            command + ([] if same else ["--force"]), cwd=ROOT, stdout=output, stderr=output
        )
    text = log.read_text(encoding="utf-8")
    if done.returncode != 0:
        sys.stderr.write(text[-8000:])
        fail(f"the build failed; all of its output is in {log.relative_to(ROOT)}")
    for line in text.splitlines():
        if line.startswith("esper_alloc:") or "warning:" in line:
            print(line, file=sys.stderr)
    STAMP.write_text(json.dumps(wanted), encoding="utf-8")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Waits for another one that sets up this clone: it may be making the same environment."""
    lock = ROOT / "build" / "setup.lock"
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another one that sets up this folder")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    with alone():
        if sys.argv[1:] == ["docs"]:
            print(docs_python())
            return
        python = choose_python()
        build(python)
        print(python)


if __name__ == "__main__":
    main()
