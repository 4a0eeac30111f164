"""The findings of docs/real-programs.md, each in a few lines that a reader can run."""

import pytest
from helper import ROOT, environment
from processes import output_of

RUN = ("-m", "esper_alloc", "run")
UNDER = {"native": (), "esper_alloc": RUN, "automatic": (*RUN, "--uses", "automatic")}


def said(program: str, under: str) -> list[str]:
    path = ROOT / "benchmarks" / "stacks" / "minimal" / f"{program}.py"
    return output_of(*UNDER[under], path, env=environment(None)).replace(",", "").split()


@pytest.mark.parametrize("under", UNDER)
def test_a_loader_that_does_not_wait_needs_automatic_uses(under: str) -> None:
    wrong = int(said("prefetch_without_wait", under)[0])
    assert (wrong == 0) == (under == "automatic"), wrong


@pytest.mark.parametrize("under", UNDER)
def test_a_copy_that_does_not_wait_for_the_filling_is_lost(under: str) -> None:
    words = said("fill_without_wait", under)
    assert int(words[4]) > 0 and int(words[-1]) == 0, words
