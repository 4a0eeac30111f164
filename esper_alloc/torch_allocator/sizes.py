"""Sizes of memory, as a user writes them."""

from __future__ import annotations

import re

_SIZE = re.compile(r"([0-9]{1,19})(?: ?([KMGT])(?:iB)?)?")


def parse_size(text: str) -> int | None:
    """Bytes: ``"134217728"``, ``"128MiB"``, ``"128 MiB"`` and ``"128M"`` are the same. The units
    are K, M, G and T, each 1024 times the one before. None: it is not a size. More than 19 digits
    are not one either.

    csrc/esper_alloc.c reads the same sizes.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        return None
    number, unit = found.groups()
    return int(number) << (10 * ("KMGT".index(unit) + 1) if unit else 0)
