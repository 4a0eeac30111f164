"""The marker ``esper_audit`` for pytest: a marked test fails if its audit finds something."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

MARKER = (
    "esper_audit(**arguments of esper_alloc.audit): fail the test if the audit finds unordered "
    "uses of GPU memory"
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


# The older kind of wrapper, because every pytest in an environment with esper_alloc loads this.
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    marker = item.get_closest_marker("esper_audit")
    if marker is None:
        yield
        return
    if marker.args:
        raise pytest.fail.Exception(
            "esper_audit takes what esper_alloc.audit() takes, by name: "
            '@pytest.mark.esper_audit(mode="raise")',
            pytrace=False,
        )
    from .auditing import audit, is_running

    auditing = audit(**marker.kwargs)
    if is_running():  # around all of pytest, as by the command: its report has what is found here
        yield
        return
    report = auditing.__enter__()
    outcome = yield
    kind, error, trace = outcome.excinfo or (None, None, None)
    try:
        auditing.__exit__(kind, error, trace)
    except Exception as found:  # in mode "raise", or explains the test's own error
        outcome.force_exception(found)
    if outcome.excinfo is not None:
        return
    if report.findings:
        outcome.force_exception(pytest.fail.Exception(report.text(), pytrace=False))
    elif not report.used_cuda:
        item.warn(pytest.PytestWarning("esper_audit: no CUDA was used, so nothing was audited"))
