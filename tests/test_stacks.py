"""The programs over other libraries, and what is made of their figures."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
FILES = sorted((BENCHMARKS / "stacks").glob("*.py"))
NAMES = [path.stem for path in FILES]
pytest.importorskip("torch")


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for path in BENCHMARKS.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return import_module("stacks")


# --- the programs ----------------------------------------------------------------


def test_every_program_is_run_and_documented(stacks: Any) -> None:
    assert sorted(stacks.PROGRAMS) == NAMES == sorted(part.name for part in stacks.STACKS.parts)
    page = (ROOT / "docs" / "real-programs.md").read_text()
    wanted = (BENCHMARKS / "stacks" / "requirements.txt").read_text().replace("-", "_")
    for name, program in stacks.PROGRAMS.items():
        assert f"| `{name}` |" in page
        for need in program.needs:
            assert f"\n{need.replace('.', '_')}" in wanted or f" {need}==" in wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_programs_repeat_on_the_cpu(name: str, stacks: Any) -> None:
    missing = [
        one for one in stacks.PROGRAMS[name].needs if not import_module("common").installed(one)
    ]
    if missing:
        pytest.skip(f"the package {missing[0]} is not installed")
    command = [sys.executable, str(BENCHMARKS / "stacks.py"), name]
    command += "--device cpu --small --steps 4".split()
    said = [subprocess.run(command, capture_output=True, text=True, timeout=1200) for _ in range(2)]
    steps = [[line for line in one.stdout.splitlines() if line[:5] == "step "] for one in said]
    assert len(steps[0]) == 4, said[0].stderr[-2000:]
    assert len({line.partition(": ")[2] for line in steps[0]}) > 1
    assert steps[0] == steps[1]


def test_outputs_are_told_bit_for_bit(stacks: Any) -> None:
    torch = import_module("torch")
    ones = torch.ones(3, dtype=torch.bfloat16)
    other = ones.clone()
    other[1] = 1.0078125
    assert stacks.text_of(ones) == stacks.text_of(ones.clone()) != stacks.text_of(other)
    assert stacks.text_of(torch.tensor(0.1)) == "0.10000000149011612"
    assert stacks.text_of([[1, 2]]) == "[[1, 2]]"


# --- their figures ---------------------------------------------------------------

ABOUT = {"gpu": "a GPU", "driver": "1", "torch": "2", "libraries": {"torch-geometric": "2.8"}}
DEAD = {"machine": ABOUT, "failed": 1, "why": "AcceleratorError: device-side assert"}


def fine(mib: float, *outputs: str) -> dict[str, Any]:
    return {"machine": ABOUT, "failed": 0, "step_ms": mib / 10, "peak_reserved_mib": mib,
            "outputs": list(outputs)}  # fmt: skip


def geometric(stacks: Any, wrong: str = "b") -> list[dict[str, Any]]:
    """Two rounds of PyTorch Geometric's loader, which PyTorch's allocator does not survive."""
    one = {
        stacks.NATIVE: DEAD, stacks.EXPANDABLE: fine(900.0, "a", "c"), stacks.OURS: DEAD,
        stacks.AUTOMATIC: fine(400.0, "a", wrong), stacks.CONTROL: fine(800.0, "a", "b"),
    }  # fmt: skip
    return [{**one, stacks.AUDIT: {**DEAD, "findings": 5, "told": ["freed-in-use"]}}, one]


def rows(stacks: Any, rounds: list[dict[str, Any]], path: Path) -> dict[Any, Any]:
    common, part = import_module("common"), stacks.STACKS.parts[0]
    made = common.Results("stacks", path)
    made.describe(ABOUT)
    assert part.name == "pyg_prefetch"
    for row in part.rows(rounds, common.Options()):
        made.add(row, rounds)
    made.write()
    return {(row["name"], row["peer_name"]): row for row in made.rows}


def test_rows_judge_automatic_uses_by_the_control(stacks: Any, tmp_path: Path) -> None:
    found = rows(stacks, geometric(stacks), tmp_path / "stacks.json")
    ours = found["pyg_prefetch: runs that fail", stacks.NATIVE]
    assert (ours["ours"], ours["peer"], ours["met"]) == (1, 1, True)
    assert ours["cases"][stacks.NATIVE]["why"] == DEAD["why"]
    title = "pyg_prefetch, automatic uses"
    assert found[f"{title}: runs that fail", stacks.NATIVE]["met"]
    assert found[f"{title}: peak reserved", stacks.CONTROL]["ratio"] == 0.5
    assert (f"{title}: peak reserved", stacks.NATIVE) not in found
    again = stacks.AGAIN.format(stacks.CONTROL)
    differ = found[f"{title}: outputs that differ", again]
    assert (differ["ours"], differ["peer"], differ["met"]) == (0, 0, True)
    audit = found["pyg_prefetch: findings", "nothing"]
    assert (audit["ours"], audit["told"], audit["rounds"]) == (5, ["freed-in-use"], 1)
    found = rows(stacks, geometric(stacks, wrong="x"), tmp_path / "stacks.json")
    differ = found[f"{title}: outputs that differ", again]
    assert (differ["ours"], differ["met"]) == (1, False)


def test_ours_may_not_die_where_native_lives(stacks: Any, tmp_path: Path) -> None:
    one = {stacks.NATIVE: fine(500.0, "a"), stacks.OURS: DEAD, stacks.AUTOMATIC: DEAD}
    found = rows(stacks, [one, one], tmp_path / "stacks.json")
    assert [row["met"] for row in found.values()] == [False, False]


def test_in_one_round_other_segments_are_native_again(stacks: Any, tmp_path: Path) -> None:
    one = {stacks.NATIVE: fine(500.0, "a"), stacks.EXPANDABLE: fine(1.0, "a"),
           stacks.OURS: fine(400.0, "x")}  # fmt: skip
    found = rows(stacks, [one], tmp_path / "stacks.json")
    differ = found["pyg_prefetch: outputs that differ", stacks.EXPANDABLE]
    assert (differ["ours"], differ["peer"], differ["met"]) == (1, 0, False)


def test_outputs_differ_no_more_than_natives_own(stacks: Any) -> None:
    native, ours = ({case: fine(1.0, *of) for case, of in zip(("native", "ours"), outputs)}
                    for outputs in (("ab", "ab"), ("ax", "xy")))  # fmt: skip
    assert stacks.differing([native, ours], "native", "native") == [1]
    assert stacks.differing([native, ours], "ours", "native") == [0, 2]
    assert stacks.differing([{"ours": fine(1.0, "a")}], "ours", "native") == []


FAILS = ("stacks", "pyg_prefetch: runs that fail", "native")


def test_the_table_has_what_was_measured(
    stacks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = import_module("readme")
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    assert stacks.table(readme.find) == ""
    cut = {stacks.EXPANDABLE: fine(1.0, "a", "c")}  # ended early: nothing to set beside
    rows(stacks, [*geometric(stacks), cut, cut], tmp_path / "stacks.json")
    head, line, row, blank, last = stacks.table(readme.find).splitlines()
    assert head.count("|") == line.count("|") == row.count("|") == 11 and blank == ""
    assert row == (
        "| PyTorch Geometric, `PrefetchLoader` | fails in 2 of 2 | 900; 90 | fails in 2 of 2 "
        f"| 400; 40 | 800; 80 | 0 (0) | 5 | 2 | {readme.find(*FAILS)['run']['commit']} |"
    )
    assert last == "a GPU, torch 2."
