"""The findings of docs/real-programs.md, each in a few lines that a reader can run."""

import subprocess
import sys

import pytest
from scenario import PROGRAMS

AUTOMATIC = ("-m", "esper_alloc", "run", "--uses", "automatic")
MARKED = AUTOMATIC[:3]


def said(program: str, *under: str) -> str:
    command = [sys.executable, *under, str(PROGRAMS / f"{program}.py")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("under", [(), MARKED], ids=["native", "esper_alloc"])
def test_a_loader_that_does_not_wait_overwrites_what_is_read(under: tuple[str, ...]) -> None:
    wrong, *rest = said("prefetch_without_wait", *under).split()
    assert int(wrong) > 0 and rest == ["of", "20", "sums", "are", "wrong"]


def test_with_automatic_uses_it_does_not() -> None:
    assert said("prefetch_without_wait", *AUTOMATIC) == "0 of 20 sums are wrong\n"


@pytest.mark.parametrize("under", [(), AUTOMATIC], ids=["native", "automatic"])
def test_a_copy_that_does_not_wait_for_the_filling_is_lost(under: tuple[str, ...]) -> None:
    words = said("fill_without_wait", *under).replace(",", "").split()
    assert int(words[4]) > 0 and int(words[-1]) == 0, words
