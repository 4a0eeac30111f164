"""The marker ``esper_audit`` for pytest: a marked test fails if its audit finds something."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

MARKER = "esper_audit: fail the test if esper_alloc.audit() finds unordered uses of GPU memory"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


# The older kind of wrapper, because every pytest in an environment with esper_alloc loads this.
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    if item.get_closest_marker("esper_audit") is None:
        yield
        return
    from .auditing import audit

    with audit() as report:
        outcome = yield
    if outcome.excinfo is None and report.findings:
        outcome.force_exception(pytest.fail.Exception(report.text(), pytrace=False))
