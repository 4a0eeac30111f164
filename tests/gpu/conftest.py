"""GPU tests: skipped where there is no GPU, failed there when ESPER_REQUIRE_GPU=1."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def missing() -> str | None:
    """Why GPU tests cannot run here, or None."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    return None


@pytest.fixture(autouse=True, scope="session")
def gpu() -> None:
    """Every test in this folder needs a GPU."""
    reason = missing()
    if reason is None:
        return
    if os.environ.get("ESPER_REQUIRE_GPU", "") not in ("", "0"):
        pytest.fail(f"ESPER_REQUIRE_GPU is set, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> Callable[[str], set[Any]]:
    """chosen(name): the values of that parameter in this file's tests that will run.

    What is found once for all tests need not be found for those that nobody asked for.
    """
    here = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and hasattr(item, "callspec")
    ]
    return lambda name: {params[name] for params in here if name in params}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked two_gpus need two; with fewer they fail when ESPER_REQUIRE_GPUS=2. Where ranks
    may share one, they do with ESPER_ONE_GPU=1."""
    marker = item.get_closest_marker("two_gpus")
    if marker is None or missing() is not None:
        return
    import torch

    count = torch.cuda.device_count()
    share = marker.kwargs.get("may_share") and os.environ.get("ESPER_ONE_GPU") == "1"
    if count >= 2 or share:
        return
    if os.environ.get("ESPER_REQUIRE_GPUS", "") == "2":
        pytest.fail(f"ESPER_REQUIRE_GPUS=2 is set, but there is {count} GPU", pytrace=False)
    pytest.skip("needs two GPUs")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes what became of each test to the file ESPER_TEST_LOG as it ends.

    GPU time is short: a run that was cut off still says which tests failed, and why.
    """
    log = os.environ.get("ESPER_TEST_LOG", "")
    if not log or os.environ.get("PYTEST_XDIST_WORKER"):  # the controller writes for all
        return
    if report.when == "call" or report.outcome != "passed":
        with Path(log).open("a") as file:
            file.write(f"{report.outcome} {report.duration:.1f} s {report.nodeid}\n")
            if report.failed:
                file.write(f"{report.longreprtext}\n\n")
