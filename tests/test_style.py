"""Formatters and checkers have nothing to say. What they are told stands in
pyproject.toml, .clang-format and .clang-tidy; which versions, in tools/environment.py."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from documents import project_files
from processes import ROOT, succeeded

C_ENDINGS = (".c", ".h", ".cpp", ".cu", ".cuh")
JOBS = 2
#: The shim swallows some exceptions, because C or a destructor is the caller. It does not need some
#: results of release(), because the core has the pointer already.
IN_THE_SHIM = "-bugprone-empty-catch,-bugprone-unused-return-value"


def pinned(name: str) -> str:
    """The version that tools/environment.py installs."""
    text = (ROOT / "tools" / "environment.py").read_text()
    [version] = re.findall(rf'"{name}==([\d.]+)"', text)
    return version


def tool(name: str) -> str:
    """The tool of this environment, or of the PATH, in the pinned version. Another version
    would find other things."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    why = f"{name} {pinned(name)} is not installed"
    if found is not None:
        said = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
        if re.search(rf"\b{re.escape(pinned(name))}\b", said):
            return found
        why = f"{why}, but {said.strip() or 'another'}"
    if os.environ.get("CI") == "true":
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


def silent(*command: str | Path) -> None:
    succeeded(*command, cwd=ROOT)


def sources(endings: tuple[str, ...], folder: str = ".") -> list[str]:
    """Files that belong to the project, by git."""
    files = (path for path in project_files(folder) if path.name.endswith(endings))
    found = [str(path.relative_to(ROOT)) for path in files]
    assert len(found) > 20
    return found


def test_python_is_formatted() -> None:
    silent(tool("ruff"), "format", "--check", ".")


def test_python_has_no_findings() -> None:
    silent(tool("ruff"), "check", ".")


def test_c_and_cuda_are_formatted() -> None:
    silent(tool("clang-format"), "--dry-run", "-Werror", *sources(C_ENDINGS))


def test_lines_of_c_and_cuda_fit() -> None:
    # clang-format leaves comments as they are.
    long = [
        f"{name}:{number} has {len(line)} columns"
        for name in sources(C_ENDINGS)
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        if len(line) > 100
    ]
    assert not long, "at most 100:\n" + "\n".join(long)


def tidied(files: Sequence[str], *flags: str) -> str:
    """What clang-tidy says of the files."""
    tidy = tool("clang-tidy")

    def findings(file: str) -> str:
        command = [tidy, "--quiet", "--config-file=.clang-tidy", file]
        command += [f"--checks={IN_THE_SHIM}"] if file.endswith("/shim.cpp") else []
        command += ["--", *flags, "-Icsrc"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=3600)
        return done.stdout + done.stderr if done.returncode else ""

    assert files
    with ThreadPoolExecutor(JOBS) as pool:
        return "".join(pool.map(findings, files))


PYTHON_HEADERS = f"-isystem{sysconfig.get_paths()['include']}"


@pytest.mark.slow
def test_c_has_no_findings() -> None:
    files = sources((".c",), "csrc")
    assert tidied(files, "-std=c11", "-D_GNU_SOURCE", '-DESPER_VERSION=""', PYTHON_HEADERS) == ""


def with_whole_paths(file: str) -> str:
    """The text of a source, which may now stand anywhere."""

    def whole(found: re.Match[str]) -> str:
        return f'#include "{(ROOT / file).parent / found[1]}"'

    return re.sub(r'^#include "([^"]+)"', whole, (ROOT / file).read_text(), flags=re.M)


@pytest.mark.slow
def test_cpp_has_no_findings(tmp_path: Path) -> None:
    """Of all files that setup.py compiles as one: most of the time goes to torch's headers. Not
    included, because the analyzer passes over what is."""
    from torch.utils.cpp_extension import include_paths

    shim, kernels = tmp_path / "shim.cpp", tmp_path / "kernels.cpp"
    for path in (shim, kernels):
        path.write_text("#include <Python.h>\n")
    for file in sources((".cpp",), "csrc"):
        with (kernels if file.startswith("csrc/kernels/") else shim).open("a") as together:
            together.write(f"// {file}\n{with_whole_paths(file)}")
    folders = [f"-isystem{folder}" for folder in include_paths("cuda")]
    flags = ("-std=c++20", *folders, PYTHON_HEADERS)
    assert tidied([str(shim), str(kernels)], *flags) == ""


@pytest.mark.slow
def test_users_see_the_types_that_they_pass() -> None:
    silent(tool("mypy"), "--strict", "tests/types/user.py")


@pytest.mark.slow
def test_users_of_pyright_see_them_too() -> None:
    silent(tool("basedpyright"), "--pythonpath", sys.executable)


def test_a_finding_is_found(tmp_path: Path) -> None:
    """The checks are on: each tool names a fault."""
    tidy, ruff, form = tool("clang-tidy"), tool("ruff"), tool("clang-format")
    (tmp_path / "faulty.c").write_text("int f(int a)\n{\n  return a == a ? 1/0 : 0;\n}\n")
    (tmp_path / "faulty.py").write_text("import os\n")
    config = ROOT / ".clang-tidy"
    for command, said in (
        ([tidy, f"--config-file={config}", tmp_path / "faulty.c", "--"], "[clang-analyzer-core.DivideZero"),
        ([form, f"--style=file:{ROOT / '.clang-format'}", "--dry-run", "-Werror", tmp_path / "faulty.c"], "clang-formatted"),
        ([ruff, "check", f"--config={ROOT / 'pyproject.toml'}", tmp_path / "faulty.py"], "F401"),
    ):  # fmt: skip
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert done.returncode != 0 and said in done.stdout + done.stderr
