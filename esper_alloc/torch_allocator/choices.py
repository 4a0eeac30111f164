"""What a user chooses by name: as an argument of ``enable()``, an option of ``run`` or a
variable of the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple


class Choice(NamedTuple):
    """One thing to choose."""

    argument: str
    variable: str
    names: tuple[str, ...]  # the first is the default
    refusal: str  # what is said of any other name, before the names

    def check(self, name: Any, source: str) -> None:
        """Raises ValueError unless it is one of the names; `source` says who gave it."""
        if name not in self.names:
            *others, last = self.names
            names = f"{', '.join(others)} or {last}"
            raise ValueError(f"{source} {self.refusal} {names}")

    def given(self, argument: str | None) -> str | None:
        """The name that the argument gives, after a check. None: it gives none."""
        if argument is not None:
            self.check(argument, f"{self.argument}={argument!r}")
        return argument

    def in_environment(self, environment: Mapping[str, str] = os.environ) -> str:
        """The name that the variable gives, after a check, or the default."""
        value = environment.get(self.variable) or self.names[0]
        self.check(value, f"{self.variable}={value}")
        return value


REUSE = Choice("reuse", "ESPER_ALLOC_REUSE", ("auto", "gate", "grow"), "is not a reuse order: use")
SEGMENTS = Choice(
    "segments",
    "ESPER_ALLOC_SEGMENTS",
    ("auto", "mapped", "classic"),
    "is not a kind of segments: use",
)
USES = Choice(
    "uses",
    "ESPER_ALLOC_USES",
    ("marked", "automatic"),
    "is not a kind of uses: use",
)
ALL = (REUSE, SEGMENTS, USES)
