"""Where mapped segments answer otherwise than PyTorch's own allocator, and why.

Its classic segments are compared with ours of that kind, row by row. Mapped ones answer
the same but in the rows below, and there they must answer otherwise.
"""

from typing import Any

import driver

Answers = dict[tuple[str, str], dict[str, Any]]

#: They are as large as what is asked for, so other memory is reserved, requests retry
#: less often, and blocks are elsewhere; ...
OTHER_SIZES = {
    "memory-sizes_as_asked_and_as_handed_out", "memory-freed_memory_serves_the_next_of_its_size",
    "figures-every_figure_after_each_step", "figures-peaks_and_resets", "figures-short_forms",
    "figures-accelerator_functions", "figures-summary",
    "figures-pending_memory_is_active_and_not_allocated", "snapshot-states_of_blocks",
    "shortage-within_a_fraction", "shortage-cached_memory_goes_back_first",
    "shortage-observers_are_told_the_segment", "hooks-the_profilers_totals",
    "devices-figures_of_each_device", "devices-snapshots_of_both", "uncached-0-nothing_is_cached",
    "roundup-figures_of_some_sizes", "roundup-list-figures_of_some_sizes",
    "fraction-figures_of_some_sizes", "segment_size-figures_of_some_sizes",
    "max_split-oversize_blocks", "non_split-oversize_blocks",
}  # fmt: skip
#: ... and their pages come and go as segment_map and segment_unmap.
OTHER_ACTIONS = {
    "snapshot-viewers", "history-what_happens_in_order", "history-keys_of_entries",
    "history-addresses_and_streams", "history-frames_of_each_action",
    "history-which_entries_have_frames", "history-starting_again_keeps_or_clears",
    "history-actions_that_are_left_out", "history-a_use_that_is_over_later",
}  # fmt: skip

OTHERWISE = OTHER_SIZES | OTHER_ACTIONS
#: Other sizes, in versions of PyTorch that have the option at all: else native
#: answers None.
OPTIONAL = {"settings-growth_is_rejected"}
#: Sizes of blocks are the same all the same, however the options round them.
ROUNDED = "figures_of_some_sizes"
OF_BLOCKS = ("allocation.", "allocated_bytes.", "requested_bytes.")


def blocks_of(row: dict[str, Any]) -> list[Any]:
    """What an answer of figures says of blocks alone."""
    figures = [one if isinstance(one, dict) else one[1] for one in row["answer"]]
    return [
        {key: one[key] for key in one if key.startswith(OF_BLOCKS) and ".all." in key}
        for one in figures
    ]


def judge(answers: Answers, mapped: Answers, group: str, name: str) -> str | None:
    """What is wrong with a row of esper_alloc with mapped segments, `mapped`, beside
    native's; None: nothing. "skipped": it ran nowhere."""
    native = answers[group, "native"]
    wrong = driver.judge(native, mapped[group, "esper_alloc"], name)
    row = f"{group}-{name}"
    if wrong == "skipped" or any(
        "" in one or "failed" in one[name] for one in (native, mapped[group, "esper_alloc"])
    ):
        return wrong
    if name == ROUNDED and wrong is not None:
        lines = driver.difference(
            blocks_of(native[name]), blocks_of(mapped[group, "esper_alloc"][name])
        )
        return "\n".join(lines[:40]) or None
    if row in OTHERWISE or (row in OPTIONAL and native[name]["answer"][0] is None):
        return None if wrong is not None else "the same now: take it off the list"
    return wrong
