"""What a user chooses by name: as an argument of ``enable()``, an option of ``run`` or a
variable of the environment."""

from __future__ import annotations

import os
import re
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


def segments_asked_for(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The kind of segments that was asked for by name, and by what; "auto": none was. PyTorch's
    option counts more than our variable."""
    given = re.findall(r"expandable_segments:(True|False)", ",".join(_settings(environment)))
    if given:
        return "mapped" if given[-1] == "True" else "classic", f"expandable_segments:{given[-1]}"
    name = environment.get(SEGMENTS.variable) or "auto"
    return name, f"{SEGMENTS.variable}={name}"


def segments_wanted(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The kind there will be where the driver can map memory, "mapped" or "classic", and why in
    words. As the core has it: what is said of the kind counts more than what concerns one kind
    only."""
    kind, by = segments_asked_for(environment)
    if kind != "auto":
        return kind, f", as {by} asks for"
    settings = _settings(environment)
    for option in ("max_split_size_mb", "garbage_collection_threshold"):
        if re.search(rf"{option}:[0-9.]*[1-9]", settings[-1] if settings else ""):
            return (
                "classic",
                f", which {option} concerns; expandable_segments:True: mapped all the same",
            )
    registers = environment.get("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "")
    if registers[:1] in tuple("1yYtT"):
        return "classic", ", as TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK needs"
    return "mapped", ""


def _settings(environment: Mapping[str, str]) -> list[str]:
    """PyTorch's options. It reads both variables, in this order, and forgets of the first what the
    second leaves out; but expandable_segments stays."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return [environment[name].replace(" ", "") for name in names if environment.get(name)]
