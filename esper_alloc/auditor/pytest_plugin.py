"""The marker ``esper_audit`` for pytest: a marked test fails if its audit finds something."""

from __future__ import annotations

from collections.abc import Generator

import pytest

MARKER = (
    "esper_audit: fail the test if esper_alloc.audit() finds unordered uses of GPU memory in it"
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    if item.get_closest_marker("esper_audit") is None:
        return (yield)
    from .auditing import audit

    with audit() as report:
        result = yield
    if report.findings:
        pytest.fail(report.text(), pytrace=False)
    return result
