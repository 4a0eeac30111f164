"""What `make demo` shows without a GPU."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import on_sim  # noqa: F401
import pytest
from processes import ROOT


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("demo")


@pytest.mark.slow
def test_a_mark_is_shown_at_work(
    library: Path, demo: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without an allowance every layer takes new memory, with one three serve in turn."""
    picture = tmp_path / "demo.png"
    demo.show_a_mark(False, picture)
    out = capfd.readouterr().out
    assert "12 layers' weights of 64 MiB, used on another stream, on the simulated device" in out
    reserved = {line.split()[1]: line.split()[2] for line in out.splitlines() if "reserved" in line}
    assert reserved == {"off": "768", "128MiB": "192"}
    if importlib.util.find_spec("matplotlib"):
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_it_trains_where_there_is_no_gpu(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(demo, "show_a_mark", lambda gpu: ran.append(("mark", str(gpu))))
    monkeypatch.setattr(demo, "run", lambda *arguments: ran.append(arguments))
    demo.main()
    assert ran[0] == ("mark", "False") and ran[-1] == ("examples/train_gpt2.py",)
    assert ran[1][:3] == ("-m", "esper_alloc", "replay")
