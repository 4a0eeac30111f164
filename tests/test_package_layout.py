"""The package's folders: imports go down only, no modules import each other in a circle,
and each folder says what it is for.

Imports are read from the sources, those inside functions and those for type checkers
included, so that none can hide.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from circles import circle
from processes import ROOT

PACKAGE = ROOT / "esper_alloc"
LONGEST = 600  # lines of a file

#: What each folder may import from the others. Compiled modules are anybody's.
MAY_IMPORT: dict[str, set[str]] = {
    "installation": set(),
    "recorder": set(),
    "view": {"recorder"},
    "live": {"installation", "view", "recorder"},
    "torch_allocator": {"installation", "recorder", "live"},
    "uses": {"installation", "torch_allocator"},
    "auditor": {"installation", "torch_allocator"},
    "helpers": {"installation", "uses"},
    "replay": {"recorder"},
    "explain": {"replay", "view", "recorder"},
    "cli": {"installation", "recorder", "torch_allocator", "uses", "auditor", "helpers", "replay",
            "view", "live", "explain", "esper_alloc"},
}  # fmt: skip
#: The modules beside the folders: the public names, and ``python -m esper_alloc``.
TOP = {
    "__init__": {
        *("installation", "recorder", "live", "torch_allocator", "uses", "auditor", "helpers"),
    },
    "__main__": {"cli"},
    "mypy_plugin": set(),
}
COMPILED = {"_core", "_torch", "_kernels", "_build"}


@dataclass(frozen=True)
class Import:
    """One module of the package imports another; names are relative to the package."""

    by: str
    of: str
    line: int
    kind: str  # "at import", "in a function" or "for types"

    def __str__(self) -> str:
        return f"{self.by}:{self.line} imports {self.of} ({self.kind})"


def modules(package: Path) -> dict[str, Path]:
    """Every module by its name below the package; a folder by its own, the package by ""."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if parts[0] in COMPILED or parts[0] == "_startup":
            continue
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imported_by_name(node: ast.AST) -> str:
    """The module that a call import_module("module") names, or nothing."""
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("import_module"):
        return ""
    first = node.args[0] if node.args else None
    return str(first.value) if isinstance(first, ast.Constant) else ""


def statements(tree: ast.AST, kind: str = "at import") -> Iterator[tuple[ast.AST, str]]:
    """All import statements, each with when it runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) or imported_by_name(node):
            yield node, kind
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from statements(node, "in a function")
        elif isinstance(node, ast.If) and is_for_types(node):
            for inner in node.body:
                yield from statements(ast.Module([inner], []), "for types")
            for inner in node.orelse:
                yield from statements(ast.Module([inner], []), kind)
        else:
            yield from statements(node, kind)


def imports(package: Path) -> list[Import]:
    """What the modules of a package import of each other."""
    known = modules(package)
    found = []
    for name, path in known.items():
        inside = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node, kind in statements(ast.parse(path.read_text(encoding="utf-8"))):
            for target in targets(node, inside, package.name, known):
                if target != name:
                    found.append(Import(name, target, node.lineno, kind))
    return found


def targets(node: ast.AST, inside: str, package: str, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that one statement names."""
    if isinstance(node, ast.Import):
        for one in node.names:
            if one.name.split(".")[0] == package:
                yield one.name.partition(".")[2]
        return
    if isinstance(node, ast.Call):
        above, _, name = imported_by_name(node).partition(".")
        if above == package and name and name in known:
            yield name
        return
    assert isinstance(node, ast.ImportFrom)
    if node.level:
        above = inside.split(".") if inside else []
        above = above[: len(above) - node.level + 1]
        base = ".".join([*above, *([node.module] if node.module else [])])
    elif node.module and node.module.split(".")[0] == package:
        base = node.module.partition(".")[2]
    else:
        return
    for one in node.names:
        longer = f"{base}.{one.name}" if base else one.name
        yield longer if longer in known or longer in COMPILED else base


def circle_of(found: list[Import]) -> list[str]:
    """Modules that import each other, in order, but for types alone."""
    return circle((one.by, one.of) for one in found if one.kind != "for types")


def upward(found: list[Import]) -> list[str]:
    """The imports that a folder may not make, those for types included."""
    wrong = []
    for one in found:
        by, of = one.by.split(".")[0], one.of.split(".")[0]
        if by == of or of in COMPILED:
            continue
        allowed = MAY_IMPORT[by] if by in MAY_IMPORT else TOP[by or "__init__"]
        if (of or "esper_alloc") not in allowed:
            wrong.append(str(one))
    return wrong


def without_purpose(package: Path) -> list[str]:
    """The folders whose ``__init__`` does not say what they are for."""
    wrong = []
    for path in sorted(one for one in package.rglob("*") if one.is_dir()):
        if not any(path.glob("*.py")) or path.name == "_startup":
            continue
        init = path / "__init__.py"
        text = (
            ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) if init.exists() else ""
        )
        if not text:
            wrong.append(str(path.relative_to(package)))
    return wrong


# --- this package ------------------------------------------------------------


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle_of(imports(PACKAGE)) == []


def test_imports_go_down_only() -> None:
    assert upward(imports(PACKAGE)) == []


def test_each_folder_says_what_it_is_for_and_has_its_place_in_the_order() -> None:
    assert without_purpose(PACKAGE) == []
    folders = {
        name.split(".")[0] for name, path in modules(PACKAGE).items() if path.parent != PACKAGE
    }
    assert folders == set(MAY_IMPORT)


def test_no_file_is_long() -> None:
    lengths = {
        name: len(path.read_text(encoding="utf-8").splitlines())
        for name, path in modules(PACKAGE).items()
    }
    assert len(lengths) > 50
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


# --- the check itself --------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package made up, with one fault of each kind."""
    sources = {
        "__init__.py": '"""A package."""\nfrom .uses import mark\n',
        "__main__.py": "from made_up.cli import main\n",
        "uses/__init__.py": '"""Marks."""\n',
        "uses/mark.py": "def f():\n    from . import trace\n",
        "uses/trace.py": "from made_up.uses.mark import f\n",
        "helpers/__init__.py": "",
        "uses/by_name.py": "import importlib\ndef f():\n"
        "    importlib.import_module('made_up.cli.main')\n",
        "helpers/gather.py": "from ..torch_allocator.enable import on\nfrom ..uses.mark import f\n",
        "torch_allocator/__init__.py": '"""Enabling."""\n',
        "torch_allocator/enable.py": "from .. import _core\n",
        "replay/__init__.py": '"""Replays."""\n',
        "replay/plot.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        "    from ..helpers.gather import x\n",
        "cli/__init__.py": '"""The command line."""\n',
        "cli/main.py": "import made_up.replay.plot, made_up\n",
    }
    root = tmp_path / "made_up"
    for name, text in sources.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_circle_is_named_even_where_a_function_hides_it(package: Path) -> None:
    assert circle_of(imports(package)) == ["uses.mark", "uses.trace", "uses.mark"]
    (package / "uses" / "mark.py").write_text("def f():\n    pass\n")
    assert circle_of(imports(package)) == []


def test_an_import_that_goes_up_is_named(package: Path) -> None:
    assert upward(imports(package)) == [
        "helpers.gather:1 imports torch_allocator.enable (at import)",
        "replay.plot:3 imports helpers.gather (for types)",
        "uses.by_name:3 imports cli.main (in a function)",
    ]


def test_a_folder_without_purpose_is_named(package: Path) -> None:
    assert without_purpose(package) == ["helpers"]
    (package / "replay" / "__init__.py").unlink()
    assert without_purpose(package) == ["helpers", "replay"]
