"""The lines whose marks last until the free: what is recorded, and when."""

from __future__ import annotations

import types
import warnings

import pytest

import esper_alloc
from esper_alloc.torch_allocator import lasting_marks


@pytest.fixture(autouse=True)
def off_afterwards():
    yield
    with warnings.catch_warnings():
        esper_alloc.warn_about_marks()  # forgets the lines
        esper_alloc.warn_about_marks(False)


def mark(reasons: str) -> None:
    lasting_marks.note(reasons)


def test_a_line_warns_once_and_is_counted_by_its_reasons():
    esper_alloc.warn_about_marks()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for reasons in ("a", "b", "a"):
            mark(reasons)
    (warning,) = seen
    assert warning.filename == __file__
    assert str(warning.message) == "this mark lasts until the memory is freed: a"
    title, *lines = lasting_marks.lines()
    assert title == "marks that last until the free:"
    assert [line.partition(" (")[2] for line in lines] == ["2 marks): a", "1 mark): b"]
    assert all(__file__ in line for line in lines)


def test_turning_it_on_forgets_and_turning_it_off_does_not():
    esper_alloc.warn_about_marks()
    with pytest.warns(RuntimeWarning):
        mark("a")
    esper_alloc.warn_about_marks(False)
    assert not lasting_marks.is_on()
    assert len(list(lasting_marks.lines())) == 2
    esper_alloc.warn_about_marks()
    assert lasting_marks.is_on()
    assert list(lasting_marks.lines()) == []


def test_the_report_lists_the_lines(monkeypatch):
    from esper_alloc.torch_allocator import stats

    torch = pytest.importorskip("torch")
    core = types.SimpleNamespace(gates=lambda device: [], pending=lambda device: [])
    monkeypatch.setattr(stats, "_core", core)
    monkeypatch.setattr(stats, "_is_running", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "until the free" not in esper_alloc.report()
    esper_alloc.warn_about_marks()
    with pytest.warns(RuntimeWarning):
        mark("somebody holds it")
    assert "(1 mark): somebody holds it\n" in esper_alloc.report()


def test_without_the_shim_the_marks_in_python_are_noted(monkeypatch):
    torch = pytest.importorskip("torch")
    from esper_alloc.uses import use

    monkeypatch.setattr(use, "_record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(use, "_mark_through_library", lambda tensor, stream: True)
    stream = torch.Stream(stream_id=3, device_index=0, device_type=1)
    use._mark_cuda(torch.ones(3), stream, None, True)
    assert list(lasting_marks.lines()) == []
    esper_alloc.warn_about_marks()
    with torch.no_grad():
        use._mark_cuda(torch.ones(3), stream, None, True)
    assert list(lasting_marks.lines()) == []
    with pytest.warns(RuntimeWarning, match="the PyTorch part"):
        use._mark_cuda(torch.ones(3), stream, None, True)
