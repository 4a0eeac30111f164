"""The bools that the calls take."""

from __future__ import annotations

import sys
from typing import Any


def checked_bool(name: str, value: Any) -> bool:
    """A bool of Python or NumPy, or a comparison of sizes that are traced, as a bool. Other values
    have a truth value, too, but that of "no" is True.

    Raises:
        TypeError: `value` is none of these.
    """
    kind, torch = type(value), sys.modules.get("torch")
    if (
        isinstance(value, bool)
        or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))
        or (torch is not None and isinstance(value, torch.SymBool))
    ):
        return bool(value)
    raise TypeError(f"{name} must be True or False, not {kind.__name__}")
