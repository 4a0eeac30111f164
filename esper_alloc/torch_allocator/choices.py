"""What a user chooses: as an argument of ``enable()``, an option of ``run`` or a variable of the
environment."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .sizes import parse_size


@dataclass(frozen=True)
class Choice(ABC):
    """One thing to choose. What is chosen is a string, as the variable has it."""

    argument: str
    variable: str
    default: str
    refusal: str  # what is said of anything else, before the choices

    @property
    @abstractmethod
    def choices(self) -> str:
        """What there is to choose, in words."""

    @abstractmethod
    def accepts(self, value: str) -> bool:
        """Whether it is one of the choices."""

    def same(self, one: str, other: str) -> bool:
        """Whether two accepted values mean the same."""
        return one == other

    def given(self, argument: Any) -> str:
        """What an argument chooses. Raises ValueError."""
        if not isinstance(argument, str):
            raise self._refusal(f"{self.argument}={argument!r}")
        return self._checked(argument, f"{self.argument}={argument!r}")

    def in_environment(self, environment: Mapping[str, str] = os.environ) -> str:
        """What the variable chooses, or the default. Raises ValueError."""
        value = environment.get(self.variable) or self.default
        return self._checked(value, f"{self.variable}={value}")

    def _checked(self, value: str, source: str) -> str:
        if not self.accepts(value):
            raise self._refusal(source)
        return value

    def _refusal(self, source: str) -> ValueError:
        return ValueError(f"{source} {self.refusal} {self.choices}")


@dataclass(frozen=True)
class Name(Choice):
    """A name out of a list."""

    others: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.default, *self.others)

    @property
    def choices(self) -> str:
        *others, last = self.names
        return f"{', '.join(others)} or {last}"

    def accepts(self, value: str) -> bool:
        return value in self.names


@dataclass(frozen=True)
class Size(Choice):
    """Bytes, or off."""

    @property
    def choices(self) -> str:
        return "bytes, a size such as 128MiB, 1 GiB or 512M, or off"

    def accepts(self, value: str) -> bool:
        return value == "off" or parse_size(value) is not None

    def same(self, one: str, other: str) -> bool:
        return parse_size(one) == parse_size(other)  # None: off

    def given(self, argument: Any) -> str:
        if argument is None:
            return "off"
        if isinstance(argument, int) and not isinstance(argument, bool):
            return self._checked(str(argument), f"{self.argument}={argument}")
        return super().given(argument)


@dataclass(frozen=True)
class Switch(Choice):
    """On or off."""

    @property
    def choices(self) -> str:
        return f"1 or 0 in {self.variable}, True or False in Python"

    def accepts(self, value: str) -> bool:
        return value in ("0", "1")

    def given(self, argument: Any) -> str:
        if not isinstance(argument, bool):
            raise self._refusal(f"{self.argument}={argument!r}")
        return str(int(argument))


ALLOWANCE = Size("allowance", "ESPER_ALLOC_ALLOWANCE", "128MiB", "is not a size: use")
SEGMENTS = Name(
    "segments",
    "ESPER_ALLOC_SEGMENTS",
    "auto",
    "is not a kind of segments: use",
    ("mapped", "classic"),
)
BLACK_BOX = Size("black_box", "ESPER_ALLOC_BLACK_BOX", "64MiB", "is not a size: use")
USES = Name("uses", "ESPER_ALLOC_USES", "marked", "is not a kind of uses: use", ("automatic",))
MONITOR = Switch("monitor", "ESPER_ALLOC_MONITOR", "0", "is neither on nor off: use")
MEMORY_SAVER = Switch("memory_saver", "ESPER_ALLOC_MEMORY_SAVER", "0", "is neither on nor off: use")
ALL: tuple[Choice, ...] = (ALLOWANCE, BLACK_BOX, MEMORY_SAVER, MONITOR, SEGMENTS, USES)


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
    words."""
    kind, by = segments_asked_for(environment)
    if kind != "auto":
        return kind, f", as {by} asks for"
    registers = environment.get("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "")
    if registers[:1] in tuple("1yYtT"):
        return "classic", ", as TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK needs"
    return "mapped", ""


def _settings(environment: Mapping[str, str]) -> list[str]:
    """PyTorch's options. It reads both variables, in this order."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return [environment[name].replace(" ", "") for name in names if environment.get(name)]
