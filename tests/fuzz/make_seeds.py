"""Writes pickles for the fuzzer to start from: ``python make_seeds.py FOLDER``.

Snapshots in miniature, in every protocol, and what lies close to the limits.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

DEPTH_LIMIT = 100


def miniature() -> dict[str, Any]:
    """As PyTorch builds it: entries share their frames."""
    frames = [{"name": "step", "filename": "train.py", "line": 12}]
    entry = {"action": "alloc", "addr": 1 << 34, "size": 512, "stream": 0, "frames": frames}
    block = {"address": 1 << 34, "size": 512, "state": "active_allocated", "frames": frames}
    return {
        "segments": [{"address": 1 << 34, "segment_pool_id": (0, 0), "blocks": [block]}],
        "device_traces": [[entry, {**entry, "action": "free_requested"}], []],
        "allocator_settings": {"max_split_size": -1, "expandable_segments": False},
    }


def nested(levels: int) -> list[Any]:
    value: Any = []
    for level in range(levels - 1):
        value = ([value], (value,), {"deeper": value})[level % 3]
    return [value]


def circle() -> list[Any]:
    value: list[Any] = [1]
    value.append({"up": value})
    return value


def seeds() -> dict[str, bytes]:
    found = {}
    values = {
        "miniature": miniature(),
        "deepest": nested(DEPTH_LIMIT - 1),
        "too_deep": nested(DEPTH_LIMIT),
        "circle": circle(),
        "key": {((1,) * 10, "x", None): 1.5},
        "scalars": [None, True, 7, 300, -1, 1 << 40, 1 << 2100, 0.5, "text", "\u00e9" * 300],
        "batches": [list(range(1001)), dict.fromkeys(range(20), ())],
    }
    for name, value in values.items():
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            found[f"{name}_{protocol}"] = pickle.dumps(value, protocol=protocol)
    found["bytes_4"] = pickle.dumps([b"short", b"long" * 100], protocol=4)
    wraps = (b"\x85", b"2\x86", b"q\x00(h\x00t", b"q\x00]h\x00a", b"q\x00}Nh\x00s")
    for number, wrap in enumerate(wraps):
        found[f"wrap_{number}"] = b"\x80\x04N" + wrap * 99 + b"."
    # A pair of a pair and so on: of 2 ** levels values and one tuple fewer.
    for levels in (8, 9):
        found[f"pairs_{levels}"] = b"\x80\x04}N" + b"2\x86" * levels + b"Ns."
    # A memo that begins at 1 counts one entry, so that the next one counted replaces it.
    found["memo_from_1"] = b"\x80\x04Nq\x01" + b"\x85" * 99 + b"\x94h\x01\x85."
    found["memo_too_deep"] = b"\x80\x04Nq\x01" + b"\x85" * 100 + b"\x94h\x01\x85."
    found["marks"] = b"\x80\x04](((NtNt(}((NtNuNte."
    found["refused"] = b"\x80\x04cos\nsystem\n."
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in seeds().items():
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
