"""Doing something once a module has been imported."""

import importlib
import sys
from pathlib import Path

from pytest import MonkeyPatch

from esper_alloc.installation.import_watch import when_imported


def test_all_that_wait_are_told_in_their_order(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    (tmp_path / "awaited_module.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    told: list[tuple[str, int]] = []
    when_imported("awaited_module", lambda module: told.append(("first", module.value)))
    when_imported("awaited_module", lambda module: told.append(("second", module.value)))
    assert told == []
    importlib.import_module("awaited_module")
    assert told == [("first", 7), ("second", 7)]
    assert sys.meta_path == before
    when_imported("awaited_module", lambda module: told.append(("now", module.value)))
    assert told[-1] == ("now", 7)
    del sys.modules["awaited_module"]


def test_a_finder_of_before_python_3_4_is_passed_over(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    class Old:
        def find_module(self, name: str, path: object = None) -> None:
            return None

    (tmp_path / "other_awaited_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [Old(), *sys.meta_path])
    told: list[str] = []
    when_imported("other_awaited_module", lambda module: told.append(module.__name__))
    importlib.import_module("other_awaited_module")
    assert told == ["other_awaited_module"]
    del sys.modules["other_awaited_module"]
