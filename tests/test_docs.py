"""The documents say what the code does, as far as a machine can tell."""

import ast
import importlib
import importlib.machinery
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from functools import cache
from pathlib import Path

import pytest
from documents import blocks, project_files
from processes import ROOT, output_of, python

DOCUMENTS = sorted(
    [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
    + list((ROOT / "docs").glob("*.md"))
)
SOURCES = ("csrc", "esper_alloc")
SOURCE_ENDINGS = {".c", ".h", ".cpp", ".py", ".cu", ".cuh"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(text: str) -> str:
    """`text` without fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def python_text(path: Path) -> str:
    """A Python file, its constants put into the f-strings that name them."""
    text = path.read_text()
    for name, value in re.findall(r'^(_?[A-Z_]+) = "([^"]*)"$', text, re.M):
        text = text.replace("{" + name + "}", value)
    return text


def source_text() -> str:
    """All sources, neighbouring string literals joined to the texts they make."""
    text = "\n".join(
        python_text(path) if path.suffix == ".py" else path.read_text()
        for folder in SOURCES
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in SOURCE_ENDINGS
    )
    text = text.replace('\\"', "'")
    return re.sub(r'"\s*f?"', "", text).replace("'", '"')


# --- links -----------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(path.read_text()), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", one.lower()).strip().replace(" ", "-") for one in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_resolve(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{name_of(path)} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{name_of(path)} links to {target}"


def test_index_lists_every_document() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    for path in DOCUMENTS:
        if path.name != "index.md":
            assert f"{path.name})" in index, f"docs/index.md does not list {name_of(path)}"


def test_the_package_names_pages_as_docs_prints_them() -> None:
    """Who installed it has no folder docs/."""
    text = "".join(path.read_text() for path in (ROOT / "esper_alloc").rglob("*.py"))
    assert re.findall(r"docs/[\w-]+\.md", text) == []
    named = set(re.findall(r"`docs ([\w-]+)|esper_alloc docs ([\w-]+)", text))
    assert len(named) > 5
    for one in named:
        assert (ROOT / "docs" / f"{''.join(one)}.md").is_file(), one


# --- code ------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_python_blocks_are_python(path: Path) -> None:
    for block in blocks(path, "python"):
        ast.parse(block)


def test_c_blocks_compile(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    found = [block for path in DOCUMENTS for block in blocks(path, "c")]
    assert found
    for block in found:
        source = tmp_path / "block.c"
        source.write_text(block)
        subprocess.run(
            [compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
            + [f"-I{ROOT / 'csrc'}", str(source)],
            check=True,
        )


def test_readme_example_is_the_example_file() -> None:
    """All but the question whether there is a GPU."""
    example = (ROOT / "examples" / "side_stream.py").read_text()
    body = example.split('"""', 2)[2].lstrip("\n")
    shown = re.sub(r"^if not torch.cuda.is_available.*\n .*\n\n", "", body, flags=re.M)
    assert shown != body
    assert blocks(ROOT / "README.md", "python") == [shown]


def test_readme_example_runs() -> None:
    torch = pytest.importorskip("torch")
    done = python(ROOT / "examples" / "side_stream.py", env={**os.environ, "PYTHONPATH": str(ROOT)})
    if torch.cuda.is_available():
        assert (done.returncode, done.stdout) == (0, "8388608.0\n"), done.stderr
    else:
        assert done.returncode == 1
        assert done.stderr.endswith("this example needs an NVIDIA GPU\n"), done.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_public_names_exist(path: Path) -> None:
    package = importlib.import_module("esper_alloc")
    for name in re.findall(r"\besper_alloc\.([a-z_]+)\b(?!\.(?:h|c|py)\b)", path.read_text()):
        if name in ("h", "c"):  # esper_alloc.h, esper_alloc.c
            continue
        place = ROOT / "esper_alloc" / name
        there = hasattr(package, name) or place.is_dir() or place.with_suffix(".py").exists()
        in_data = f'"esper_alloc.{name}"' in source_text()
        assert there or in_data, f"{name_of(path)} speaks of esper_alloc.{name}"


def documented_commands() -> list[str]:
    found = set()
    for path in DOCUMENTS:
        asked = r"(?:python -m esper_alloc|(?:`|\$ |^)esper-alloc) ([^`\n]+)"
        for command in re.findall(asked, path.read_text(), flags=re.M):
            found.add(re.sub(r"\s*(#.*|\.\.\.)$", "", command).rstrip(" ,.:;)|"))
    return sorted(found)


@pytest.mark.parametrize("command", documented_commands())
def test_documented_commands_exist(command: str) -> None:
    """Each command is there and knows the options that stand before its files."""
    name, *rest = shlex.split(command)
    if name.startswith("-"):
        assert name in ("--help", "--version")
        return
    said = output_of("-m", "esper_alloc", name, "--help", cwd=ROOT)
    for word in rest:
        if name in ("run", "audit") and not word.startswith("-"):
            break  # the rest belongs to the program
        if word.startswith("-"):
            assert re.search(rf"(?<![\w-]){re.escape(word)}\b", said), f"{name} {word}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_documented_make_targets_exist(path: Path) -> None:
    text = path.read_text()
    commands = re.findall(r"`(make [^`\n]+)`", text) + re.findall(r"^(make .+)$", text, re.M)
    for command in commands:
        words = command.split("#")[0].split()[1:]
        folder = ""
        if words[0] == "-C":
            _, folder, *words = words
        makefile = (ROOT / folder / "Makefile").read_text()
        for target in words:
            if "=" not in target:
                assert re.search(rf"^{target}\b.*:", makefile, re.M), f"{name_of(path)}: {command}"


@cache
def all_text() -> str:
    """The sources, the tests and the tools: all but what was built."""
    places = [ROOT / folder for folder in (*SOURCES, "tests", "tools", "benchmarks", ".ci")]
    places += [ROOT / name for name in ("setup.py", "Makefile")]
    return source_text() + "".join(
        file.read_text(errors="ignore")
        for place in places
        for file in ([place] if place.is_file() else place.rglob("*"))
        if file.is_file()
        and file.name != Path(__file__).name
        and file.suffix not in (".so", ".pyc")
        and "build" not in file.relative_to(ROOT).parts
    )


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_documented_switches_of_the_environment_exist(path: Path) -> None:
    for name in set(re.findall(r"\bESPER_[A-Z_]+\b", path.read_text())):
        assert name in all_text(), f"{name_of(path)} speaks of {name}"


#: How Python and C ask for a variable. A program of the tests that another one starts is not asked
#: to name those that only the two of them know.
ASKED = re.compile(
    r'''(?:environ(?:ment)?(?:\.get\(|\.setdefault\(|\.pop\(|\[)|getenv\(|number_in\()"([A-Z][A-Z0-9_]+)"'''
    r"""|"([A-Z][A-Z0-9_]+)" (?:not )?in os\.environ"""
)


def variables_in_code() -> set[str]:
    from esper_alloc.cli.diagnosis.facts import ENVIRONMENT
    from esper_alloc.torch_allocator.choices import ALL

    found = {*ENVIRONMENT, *(choice.variable for choice in ALL)}
    places = [*(ROOT / folder for folder in (*SOURCES, "tools", "tests", "benchmarks"))]
    files = [file for place in places for file in place.rglob("*") if file.is_file()]
    for file in [ROOT / "setup.py", *files]:
        if file.suffix not in ("", *SOURCE_ENDINGS) or "build" in file.relative_to(ROOT).parts:
            continue
        names = {one or other for one, other in ASKED.findall(file.read_text(errors="ignore"))}
        ours = file.relative_to(ROOT).parts[0] not in ("tests", "benchmarks")
        found |= {name for name in names if ours or name.startswith("ESPER_")}
    return found - {"PATH"}


def test_the_page_of_variables_lists_each() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    listed = set(re.findall(r"`([A-Z][A-Z0-9_]+)(?:=\d)?`", page))
    assert variables_in_code() - listed == set()
    assert listed - set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", all_text())) == set()


# --- rules and messages ----------------------------------------------------


def test_rules_are_those_of_the_code() -> None:
    header = (ROOT / "csrc" / "core" / "base" / "rules.h").read_text()
    in_code = re.findall(r'R\((\w+), "(\w+)"', header)
    in_document = re.findall(
        r"^\| `(\w+)` \((\w+)\) \|", (ROOT / "docs" / "rules.md").read_text(), re.M
    )
    assert in_code
    assert in_document == in_code


def test_rule_switches_stand_under_their_rule() -> None:
    sections = re.split(r"^## Rule (\d+):", (ROOT / "docs" / "rules.md").read_text(), flags=re.M)
    assert sections[1::2] == [str(number) for number in range(1, 13)]
    for number, section in zip(sections[1::2], sections[2::2]):
        for _, label in re.findall(r"^\| `(\w+)` \((\w+)\) \|", section, re.M):
            assert re.fullmatch(rf"{number}[a-z]?", label), label


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    """Each entry under "Messages" quotes a message of the code; `...` stands for what varies."""
    messages = (ROOT / "docs" / "troubleshooting.md").read_text().split("\n## Messages\n")[1]
    code = re.sub(r"\s+", " ", source_text())
    headings = re.findall(r"^### (.*)$", messages, re.M)
    assert len(headings) >= 5
    for heading in headings:
        assert re.fullmatch("`[^`]+`", heading), heading
        for fragment in heading.strip("`").replace("'", '"').split("..."):
            assert fragment.strip() in code, heading


# --- decency ---------------------------------------------------------------

# Places of one machine, which mean nothing on another.
PRIVATE_PLACES = re.compile(r"(?<![\w.])/(?:work|root|home|Users)/\w")


def test_no_file_mentions_the_machine_it_was_written_on() -> None:
    for path in project_files():
        if path == Path(__file__) or path.suffix in (".gz", ".png", ".pickle"):
            continue
        found = PRIVATE_PLACES.search(path.read_text(errors="ignore"))
        assert found is None, f"{name_of(path)}: {found and found.group()}"


# --- the script for a machine with a GPU -----------------------------------


@pytest.fixture
def gpu_script(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    loader = importlib.machinery.SourceFileLoader("gpu_script", str(ROOT / "tools" / "gpu"))
    script = types.ModuleType(loader.name)
    script.__file__ = loader.path
    monkeypatch.setitem(sys.modules, loader.name, script)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(script)
    return script


def test_the_gpu_script_runs_what_there_is(gpu_script: types.ModuleType) -> None:
    """Its parts name test files that exist, and every benchmark is among them; every GPU
    test is in one of the suites."""
    parts = gpu_script.parts(Path("results"))
    assert len({part.name for part in parts}) == len(parts)
    assert all(part.limit < 600 for part in parts)
    words = {word for part in parts for word in part.command}
    named = {word.removeprefix("--ignore=") for word in words if re.search(r"test_\w+\.py$", word)}
    assert named and all((ROOT / name).is_file() for name in named)
    benchmarks = [part.command[2] for part in parts if part.command[1] == "benchmarks/run.py"]
    listed = output_of(ROOT / "benchmarks" / "run.py", "--list")
    assert {line.split()[0] for line in listed.splitlines()} == set(benchmarks)
    suites = [part for part in parts if part.name.startswith("suite-")]
    alone = {
        word for part in suites if "tests/gpu" not in part.command for word in part.command
    }  # fmt: skip
    together = next(part for part in suites if part.name == "suite-together")
    left_out = {
        word.partition("=")[2]
        for word in together.command
        if word.startswith(("--ignore=", "--deselect="))
    }
    assert left_out and left_out <= alone
