"""device=: which CUDA device it names, and what names none."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import build  # noqa: E402
from esper_alloc.installation.devices import device_index  # noqa: E402


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices, of which the second is current."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.usefixtures("two_devices")
def test_a_device_has_several_names() -> None:
    for current in (None, "cuda", torch.device("cuda")):
        assert device_index(current) == 1
    for first in (0, "cuda:0", torch.device("cuda", 0)):
        assert device_index(first) == 0


BAD = [
    *[(kind, TypeError, "device must be an index, a name such as") for kind in (True, 1.5, b"cuda",
     [0])],
    *[(name, ValueError, "is no CUDA device: pass 'cuda', 'cuda:0' or 0") for name in ("cpu", "gpu",
     "1", "", "cuda:-1", torch.device("cpu"), torch.device("meta", 0))],
    *[(one, ValueError, "there is no CUDA device -?[0-9]+; this process sees 2") for one in (2, -1,
     "cuda:2", torch.device("cuda", 7))],
]  # fmt: skip


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("device, error, words", BAD, ids=lambda value: str(value)[:20])
def test_what_names_no_device_is_refused(device: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        device_index(device)


@pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available(),
    reason="needs a torch with CUDA, and no GPU",
)
def test_every_call_refuses_it(library: Path) -> None:
    found = build.answer(
        library,
        """
import simulated
import torch
import esper_alloc
from simulated import say

x = torch.ones(5).to("cuda")


def error_of(call, device):
    try:
        call(device)
    except Exception as error:
        return type(error).__name__ + ": " + str(error)
    return "it was taken"


said = {error_of(call, device) for device in (1.5, "gpu", 2) for call in (
    esper_alloc.memory_stats, esper_alloc.metrics, esper_alloc.tag_stats,
    lambda device: esper_alloc.capturing(device).__enter__(),
    lambda device: esper_alloc.asleep(device=device).__enter__(),
    lambda device: esper_alloc.sleep(device=device), lambda device: esper_alloc.wake(device=device),
)}
asleep = [tag for tag, one in esper_alloc.tag_stats().items() if one["asleep"]]
say(sorted(said), asleep)
""",
        SIM_MAPS_PAGES="1",
    )
    assert found == [
        [
            "TypeError: device must be an index, a name such as 'cuda:0' or a torch.device, not 1.5 (float)",
            "ValueError: device='gpu' is no CUDA device: pass 'cuda', 'cuda:0' or 0",
            "ValueError: there is no CUDA device 2; this process sees 2",
        ],
        [],
    ]
