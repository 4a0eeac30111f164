"""Pickles that were written when the package was flat still load."""

from __future__ import annotations

import importlib
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import esper_alloc
from esper_alloc.former_modules import _MOVED

ROOT = Path(__file__).resolve().parents[1]
NAMES = [(former, name) for former, names in _MOVED.items() for name in names]


@pytest.mark.parametrize("former, name", NAMES, ids=lambda one: str(one))
def test_a_class_is_found_by_its_former_module(former: str, name: str) -> None:
    pytest.importorskip("torch")
    found = pickle.loads(f"cesper_alloc.{former}\n{name}\n.".encode())
    now = importlib.import_module(f"esper_alloc.{_MOVED[former][name]}")
    assert found is getattr(now, name)
    assert getattr(esper_alloc, name, found) is found


def test_every_public_class_is_among_them() -> None:
    pytest.importorskip("torch")
    public = {
        name for name in esper_alloc.__all__ if isinstance(getattr(esper_alloc, name), type)
    } - {"using"}  # holds streams, which cannot be pickled
    assert public <= {name for _, name in NAMES}


def test_objects_keep_their_state() -> None:
    torch = pytest.importorskip("torch")
    transform = esper_alloc.ImageTransform(crop=2, flip=0.5)
    normalizer = esper_alloc.RunningMeanStd(3)
    normalizer.update(torch.arange(12.0).reshape(4, 3))
    for value, former in ((transform, "gather_transform"), (normalizer, "normalize")):
        written = pickle.dumps(value, protocol=2)
        now = type(value).__module__.encode()
        flat = written.replace(b"c" + now + b"\n", b"cesper_alloc." + former.encode() + b"\n")
        assert flat != written
        loaded = pickle.load(io.BytesIO(flat))
        assert type(loaded) is type(value)
        if value is transform:
            assert loaded == transform
        else:
            assert torch.equal(loaded.mean, normalizer.mean) and int(loaded.count) == 4


def test_other_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="attribute 'plan_epoch'"):
        pickle.loads(b"cesper_alloc.gather\nplan_epoch\n.")


def test_nothing_is_loaded_before_it_is_asked_for() -> None:
    program = """
import inspect, sys
import esper_alloc
inspect.getmodule(len)  # looks into every module
assert "esper_alloc.normalize" in sys.modules
assert not {"torch", "esper_alloc.helpers.normalize"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
