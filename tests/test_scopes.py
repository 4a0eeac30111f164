"""Scopes that are left and were not entered: an error in words, and nothing has changed."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import esper_alloc  # noqa: E402
from esper_alloc.helpers.cudagraph_outputs import wrapper  # noqa: E402


def batch_scope() -> Any:
    data = torch.arange(8)
    iterator = esper_alloc.GatherBatchIterator(
        data, data, batch_size_per_env=2, n_envs=2, env_devices=["cpu", "cpu"], seed=0
    )
    return next(iter(iterator)).for_stream(0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: esper_alloc.tag("weights"), lambda: esper_alloc.using(torch.ones(3)),
        esper_alloc.asleep, esper_alloc.capturing, esper_alloc.audit, batch_scope,
        esper_alloc.cudagraph_outputs,
    ],
    ids=["tag", "using", "asleep", "capturing", "audit", "for_stream", "cudagraph_outputs"],
)  # fmt: skip
def test_a_scope_that_was_not_entered(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapper, "_graphs_are_possible", lambda: True)
    monkeypatch.setenv("ESPER_ALLOC", "0")  # asleep() can be entered then
    scope = make()
    with pytest.raises(RuntimeError, match="is left, but was not entered"):
        scope.__exit__(None, None, None)
    if not isinstance(scope, (esper_alloc.audit, esper_alloc.cudagraph_outputs)):
        with scope:
            pass
        with pytest.raises(RuntimeError, match="is left, but was not entered"):
            scope.__exit__(None, None, None)
