"""The conformance suite of tests/gpu, as far as it needs no kernel: PyTorch's own
allocator and esper_alloc, both on the simulated device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "shim"), str(HERE / "gpu" / "conformance")]

torch = pytest.importorskip("torch")
if torch.version.cuda is None or torch.cuda.is_available():
    pytest.skip("needs a torch with CUDA, and no GPU", allow_module_level=True)

import build  # noqa: E402
import driver  # noqa: E402
import ground  # noqa: E402

import esper_alloc  # noqa: E402

Answers = dict[tuple[str, str], dict[str, Any]]


#: What mapped segments answer otherwise: they are as large as what is asked for, so
#: other memory is reserved, requests retry less often, and blocks are elsewhere; ...
OTHER_SIZES = {
    "memory-sizes_as_asked_and_as_handed_out",
    "memory-freed_memory_serves_the_next_of_its_size",
    "figures-every_figure_after_each_step",
    "figures-peaks_and_resets",
    "figures-short_forms",
    "figures-accelerator_functions",
    "figures-summary",
    "figures-pending_memory_is_active_and_not_allocated",
    "snapshot-states_of_blocks",
    "shortage-within_a_fraction",
    "shortage-cached_memory_goes_back_first",
    "hooks-the_profilers_totals",
    "devices-figures_of_each_device",
    "devices-snapshots_of_both",
    "pools-pools_nest",
    "pools-a_pool_without_splitting",
    "uncached-0-nothing_is_cached",
    "max_split-figures_of_some_sizes",
    "max_split-oversize_blocks",
    "non_split-figures_of_some_sizes",
    "non_split-oversize_blocks",
    "roundup-figures_of_some_sizes",
    "roundup-list-figures_of_some_sizes",
    "fraction-figures_of_some_sizes",
    "segment_size-figures_of_some_sizes",
    "collect-the_longest_unused_go_back",
    "collect-nothing_goes_while_what_there_is_serves",
    "collect-what_is_below_the_threshold_stays",
    "collect-run-time-the_longest_unused_go_back",
    "collect-run-time-nothing_goes_while_what_there_is_serves",
    "collect-run-time-what_is_below_the_threshold_stays",
    "collect-run-time-without_a_fraction_all_stays",
}
#: ... and their pages come and go as segment_map and segment_unmap.
OTHER_ACTIONS = {
    "snapshot-viewers",
    "history-what_happens_in_order",
    "history-keys_of_entries",
    "history-addresses_and_streams",
    "history-frames_of_each_action",
    "history-which_entries_have_frames",
    "history-starting_again_keeps_or_clears",
    "history-actions_that_are_left_out",
    "history-a_use_that_is_over_later",
    "pools-the_trace_names_the_pool",
}

#: A wholly free classic segment moves to the stream that wants it; pages of a mapped one
#: are lent, and what a stream frees that is named by a bare handle counts as active until
#: that stream shows itself again.
LENT = {"memory-raw_alloc_and_delete"}
OTHERWISE = OTHER_SIZES | OTHER_ACTIONS | LENT
#: Other sizes, in versions of PyTorch that have the option at all.
OPTIONAL = {"collect-run-time-growth_is_rejected"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        esper_alloc.allocator()
    except esper_alloc.UnavailableError as error:
        pytest.skip(str(error))
    return build.build(tmp_path_factory.mktemp("simulated"))


@pytest.fixture(scope="module")
def answers(library: Path) -> Answers:
    return driver.run_all(ground.GROUPS, build.environment(library), workers=4)


@pytest.fixture(scope="module")
def mapped_answers(library: Path) -> Answers:
    """Of esper_alloc on a device that maps pages."""
    env = {**build.environment(library), "SIM_MAPS_PAGES": "1"}
    return driver.run_all(ground.GROUPS, env, workers=4, allocators=["esper_alloc"])


def rows() -> list[Any]:
    return [
        pytest.param(group, one.name, id=f"{group}-{one.name}")
        for group, one in ground.every_scenario()
        if "gpu" not in one.needs
    ]


@pytest.mark.parametrize(("group", "name"), rows())
def test_the_answer_is_natives(answers: Answers, group: str, name: str) -> None:
    wrong = driver.judge(answers[group, "native"], answers[group, "esper_alloc"], name)
    assert wrong is None, wrong


@pytest.mark.parametrize(("group", "name"), rows())
def test_the_answer_is_natives_with_mapped_segments_too(
    answers: Answers, mapped_answers: Answers, group: str, name: str
) -> None:
    wrong = driver.judge(answers[group, "native"], mapped_answers[group, "esper_alloc"], name)
    row = f"{group}-{name}"
    known = row in OPTIONAL and answers[group, "native"][name]["answer"][0] is None
    if row in OTHERWISE or known:
        assert wrong is not None and wrong != "skipped", "the same now: take it off the list"
    else:
        assert wrong is None, wrong


def test_what_is_collected_is_natives_where_the_device_is_large(library: Path) -> None:
    """There the usual segment is little beside what the threshold asks for."""
    env = {**build.environment(library), "SIM_CAPACITY_MB": "16384"}
    found = driver.run_all(["collect"], env, workers=2)
    native, ours = found["collect", "native"], found["collect", "esper_alloc"]
    for name in native:
        wrong = driver.judge(native, ours, name)
        assert wrong is None, (name, wrong)


def test_the_lists_name_rows() -> None:
    assert OTHERWISE <= {str(row.id) for row in rows()}
