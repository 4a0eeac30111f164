"""Programs for a GPU name only what PyTorch has: their first run there is too late to learn
otherwise."""

import pytest
from processes import ROOT, output_of

pytest.importorskip("torch")

#: Prints what is missing. In a process of its own, because other tests import more of PyTorch.
LOOK = """
import ast, importlib, sys
from pathlib import Path
from types import ModuleType

import torch


def of_torch(name):
    return name is not None and name.split(".")[0] == "torch"


def look(path):
    tree, known = ast.parse(path.read_text()), {"torch": torch}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if of_torch(one.name):
                    module = importlib.import_module(one.name)
                    known[one.asname or "torch"] = module if one.asname else torch
        elif isinstance(node, ast.ImportFrom) and of_torch(node.module):
            module = importlib.import_module(node.module)
            for one in node.names:
                if not hasattr(module, one.name):
                    importlib.import_module(f"{node.module}.{one.name}")
                known[one.asname or one.name] = getattr(module, one.name)
    for node in ast.walk(tree):
        names, root = [], node
        while isinstance(root, ast.Attribute):
            names.insert(0, root.attr)
            root = root.value
        found = known.get(root.id) if names and isinstance(root, ast.Name) else None
        while names and isinstance(found, ModuleType):
            if not hasattr(found, names[0]):
                print(f"{path.name}:{node.lineno}: {found.__name__}.{names[0]}")
            found = getattr(found, names.pop(0), None)


for path in sys.argv[1:]:
    look(Path(path))
"""


@pytest.mark.slow  # imports PyTorch for each folder
@pytest.mark.parametrize("folder", ["tests/gpu/programs", "benchmarks", "examples"])
def test_programs_name_what_pytorch_has(folder: str) -> None:
    paths = sorted(map(str, (ROOT / folder).glob("*.py")))
    assert output_of("-c", LOOK, *paths) == ""
