"""The findings of docs/real-programs.md, each in a few lines that a reader can run."""

from pathlib import Path

import pytest
from helper import ROOT, environment
from processes import output_of

RUN = ("-m", "esper_alloc", "run")
UNDER = {"native": (), "esper_alloc": RUN, "automatic": (*RUN, "--uses", "automatic")}


def said(program: str, under: str, folder: Path) -> list[str]:
    path = ROOT / "benchmarks" / "stacks" / "minimal" / f"{program}.py"
    return output_of(*UNDER[under], path, env=environment(None), cwd=folder).split()


@pytest.mark.parametrize("under", UNDER)
def test_a_loader_that_does_not_wait_needs_automatic_uses(under: str, tmp_path: Path) -> None:
    assert (said("prefetch_without_wait", under, tmp_path)[0] == "0") == (under == "automatic")


@pytest.mark.parametrize("under", UNDER)
def test_a_copy_that_does_not_wait_for_the_filling_is_lost(under: str, tmp_path: Path) -> None:
    words = said("fill_without_wait", under, tmp_path)
    assert int(words[4]) > 0 and int(words[-1]) == 0, words
