"""What a clone says that hides an installed package."""

import os
import shutil
from pathlib import Path

import pytest
from processes import python

import esper_alloc


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    shutil.copytree(
        Path(esper_alloc.__file__).parent,
        tmp_path / "clone" / "esper_alloc",
        ignore=shutil.ignore_patterns("*.so", "__pycache__", "_build.py", "include"),
    )
    (tmp_path / "clone" / "setup.py").touch()
    return tmp_path / "clone"


def said_in(folder: Path, site: Path) -> str:
    program = "import esper_alloc; print(esper_alloc.__version__)"
    env = {**os.environ, "PYTHONPATH": str(site), "ESPER_ALLOC": ""}
    done = python("-c", program, cwd=folder, env=env, check=True)
    assert done.stdout == f"{esper_alloc.__version__}\n"
    return done.stderr


def test_a_clone_that_hides_an_installed_package_says_so(clone: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    assert said_in(clone, site) == ""  # it hides nothing
    shutil.copytree(clone / "esper_alloc", site / "esper_alloc")
    (site / "esper_alloc" / "_build.py").touch()
    warning, *_ = said_in(clone, site).splitlines()
    assert (
        f"RuntimeWarning: the source folder of esper_alloc, {clone}, where nothing was" in warning
    )
    assert f"hides the one that is installed in {site}: start Python, and keep" in warning
    assert said_in(tmp_path, site) == ""
    (clone / "esper_alloc" / "_build.py").touch()  # who builds in a clone means it
    assert said_in(clone, site) == ""
