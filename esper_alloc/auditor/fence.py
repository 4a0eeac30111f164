"""What an audit with a fence says of an access that faulted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .findings import Finding, Place, Stream, parse, parse_place

#: How many of the last frees are told, and how many suspects of those that are looked at.
LAST, SUSPECTS, LOOKED_AT = 8, 8, 1000


@dataclass(frozen=True)
class Freed:
    """Memory that was freed behind a fence.

    Attributes:
        address, size: in bytes.
        home: the stream that it was allocated on.
        allocated, freed: where.
        frees_ago: how many frees came after this one.
        seconds: since the free.
        in_use: a use by another stream that nothing ordered before the free, or None.
    """

    address: int
    size: int
    home: Stream
    allocated: Place
    freed: Place
    frees_ago: int
    seconds: float
    in_use: Finding | None

    def __str__(self) -> str:
        return (
            f"{self.address:#x} to {self.address + self.size:#x}, allocated at {self.allocated} on "
            f"{self.home}, freed at {self.freed}, {self.when}"
        )

    @property
    def when(self) -> str:
        frees = f"{self.frees_ago} free{'s' if self.frees_ago != 1 else ''}"
        return f"{frees} and {self.seconds:.3f} s ago" if self.frees_ago else "the last free"


@dataclass(frozen=True)
class Fault:
    """The device refused an access: the memory is not there, or not there any more.

    CUDA does not say which access that was. What is likeliest comes first.

    Attributes:
        error: what CUDA said.
        suspects: operators that were called with freed memory, and then memory that was in use
            when it was freed, the latest free first; with its free (None: it was long ago).
        freed: what was freed last, the latest first.
        addresses_came_round: all addresses for fences had been used, so memory was handed out at
            old addresses again.
    """

    error: str
    suspects: tuple[tuple[Finding, Freed | None], ...]
    freed: tuple[Freed, ...]
    addresses_came_round: bool

    def text(self) -> str:
        """Several lines, without an end of line."""
        lines = [
            f"esper_alloc audit: an access faulted ({self.error})",
            "It was to memory after its free, behind the end of an allocation, or to an address "
            "that never was memory.",
        ]
        if self.suspects:
            lines.append("Suspects, the likeliest first:")
        for number, (finding, freed) in enumerate(self.suspects, 1):
            lines.append(f"{number}. {finding.text()}")
            if freed is not None:
                lines.append(f"    freed {freed.when}" if freed.frees_ago else "    the last free")
        if not self.suspects:
            lines.append(
                "No operator was seen that touches freed memory, and no use that was not over at "
                "the free. So it was work that is launched beside PyTorch's operators, a CUDA "
                "graph, or an access behind the end."
            )
        if self.freed:
            lines.append("Freed last:")
        lines += [f"    {freed}" for freed in self.freed]
        if self.addresses_came_round:
            lines.append(
                "The addresses have come round, so memory that was freed long ago may be in use "
                "again, and not fault."
            )
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "error": self.error,
            "suspects": [
                {"finding": finding.as_dict(), "freed": asdict(freed) if freed else None}
                for finding, freed in self.suspects
            ],
            "freed": [asdict(freed) for freed in self.freed],
            "addresses_came_round": self.addresses_came_round,
        }


def parse_freed(found: Mapping[str, Any] | None) -> Freed | None:
    """One of ``_torch.audit_freed()``, or what ``_torch.audit_freed_at()`` says."""
    if found is None:
        return None
    places = {name: parse_place(found[name]) for name in ("allocated", "freed")}
    in_use = parse(found["in_use"]) if found["in_use"] else None
    return Freed(**{**found, **places, "home": Stream(*found["home"]), "in_use": in_use})


def fault_in(error: BaseException | None, findings: Sequence[Finding] = ()) -> BaseException | None:
    """CUDA's error that an access faulted, or that a copy named memory that is not there: this
    one, or one that led to it. The latter can mean other things too, so it counts only if an
    operator among the findings was called with freed memory."""
    says = ["illegal memory access"]
    if any(finding.kind == "used-after-free" for finding in findings):
        says.append("CUDA error: invalid argument")
    while error is not None and not any(one in str(error) for one in says):
        error = error.__cause__ or error.__context__
    return error


def explain(compiled: Any, error: BaseException, findings: Sequence[Finding]) -> Fault:
    """What is known after the audit has ended. The device works no more."""
    suspects = [
        (finding, parse_freed(compiled.audit_freed_at(finding.address)))
        for finding in findings
        if finding.kind == "used-after-free"
    ]
    lines = set()
    for freed in _last(compiled, LOOKED_AT, True):
        finding = freed.in_use
        if finding is not None and (finding.place, finding.earlier.place) not in lines:
            lines.add((finding.place, finding.earlier.place))
            suspects.append((finding, freed))
    return Fault(
        error=str(error).strip().splitlines()[0],
        suspects=tuple(suspects[:SUSPECTS]),
        freed=_last(compiled, LAST, False),
        addresses_came_round=compiled.audit_fence_rounds() > 0,
    )


def _last(compiled: Any, most: int, only_in_use: bool) -> tuple[Freed, ...]:
    found = (parse_freed(one) for one in compiled.audit_freed(most, only_in_use))
    return tuple(freed for freed in found if freed is not None)
