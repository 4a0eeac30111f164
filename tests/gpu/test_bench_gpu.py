"""``python -m esper_alloc bench`` on a GPU: every figure from every allocator."""

import json

from helper import run_fresh

from esper_alloc.cli import bench


def test_bench_measures_everything() -> None:
    printed = run_fresh("-m", "esper_alloc", "bench", "--rounds", "1", "--small", "--json")
    found = json.loads(printed)
    assert set(found["medians"]) == set(bench.ALLOCATORS)
    for figures in found["medians"].values():
        assert set(figures) == {figure.key for figure in bench.FIGURES}
        # Tiny weights may fit into what was reserved before.
        assert all(value > 0 for key, value in figures.items() if key != "pipeline_mib")
        assert figures["lengths_reserved_mib"] >= figures["lengths_allocated_mib"]
