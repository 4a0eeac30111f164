"""The streams and events that the calls take."""

from __future__ import annotations

import sys
from typing import Any


def is_cpu_stream(stream: Any) -> bool:
    """torch.cpu.Stream stands in for a stream and does nothing."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(stream, torch.cpu.Stream)


def check_stream(stream: Any) -> None:
    if stream is None or is_cpu_stream(stream):
        return
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(stream, torch.Stream):
        hint = ": wrap a handle in torch.cuda.ExternalStream" if isinstance(stream, int) else ""
        found = type(stream).__name__
        raise TypeError(f"stream must be a torch.cuda.Stream or None, not {found}{hint}")


def check_event(event: Any) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(event, torch.Event):
        raise TypeError(f"event must be a torch.cuda.Event or None, not {type(event).__name__}")
    if isinstance(event, torch.cuda.Event) and not event.cuda_event:
        raise ValueError(
            "event was not recorded yet: call event.record(stream) right after "
            "the last read, then pass it"
        )
