"""What an audit found, for people and for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Frame:
    """A line of Python that was running: the innermost one of a function's call."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{_shown(self.file)}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Place:
    """Where something happened.

    `frames` are the user's, the innermost first; of code without any, the innermost of all.
    With `in_backward` they are those of the forward operator.
    """

    frames: tuple[Frame, ...]
    in_backward: bool = False

    def __str__(self) -> str:
        if not self.frames:
            return "an unknown place"
        return f"{self.frames[0]}, in its backward" if self.in_backward else str(self.frames[0])


@dataclass(frozen=True)
class Stream:
    """`handle` is ``torch.cuda.Stream.cuda_stream``; 0: the default stream."""

    device: int
    handle: int

    def __str__(self) -> str:
        which = f"stream {self.handle:#x}" if self.handle else "the default stream"
        return f"{which} of device {self.device}"


@dataclass(frozen=True)
class Access:
    """One of two accesses that nothing orders.

    `tensor` has dtype and shape, as in ``"float32 [128, 64]"``; empty: unknown. With
    `is_allocation` the stream allocated the memory there; its earlier work may still use what
    the memory was before.
    """

    place: Place
    operator: str
    tensor: str
    stream: Stream
    writes: bool
    is_allocation: bool

    def __str__(self) -> str:
        if self.is_allocation:
            return f"allocated on {self.stream}, at {self.place}"
        how = "written" if self.writes else "read"
        by = f" by {self.operator}" if self.operator else ""
        return f"{how}{by} on {self.stream}, at {self.place}"


#: What each kind of finding is called.
TITLES = {
    "freed-in-use": "freed while another stream may still use it",
    "marked-early": "marked before the last use on that stream",
    "read-early": "read before it is written",
    "write-early": "written while it may still be in use",
    "stale-output": "output of a CUDA graph, read after a later replay's was handed out",
    "used-after-free": "used after it was freed",
}


#: Kinds that are about the free of memory in use.
FREES = ("freed-in-use", "marked-early")


@dataclass(frozen=True)
class Finding:
    """Memory that is used in two ways that nothing orders: a wait, a mark, a copy or a reference
    is missing.

    Attributes:
        kind: a key of :data:`TITLES`.
        count: how often it happened, `also` included; all else is of the first time.
        address, size: of the memory, in bytes; size 0: unknown.
        allocated: where, and `home` on which stream (None: before the audit, or in a graph).
        earlier: the access that nothing orders before `later`.
        later: what is not ordered after it. Of memory that was freed: the first access to
            memory that its stream was given afterwards, or None.
        freed, marked: where, or None.
        also: what else the same missing thing explains, each with its own count.

    Of the kind ``"used-after-free"``, `earlier` says nothing.
    """

    kind: str
    count: int
    address: int
    size: int
    allocated: Place
    home: Stream | None
    earlier: Access
    later: Access | None
    freed: Place | None
    marked: Place | None
    also: tuple[Finding, ...] = ()

    @property
    def place(self) -> Place:
        """The place to look at first: where memory is freed, marked or used too early."""
        if self.kind == "freed-in-use":
            chosen = self.freed
        elif self.kind == "marked-early":
            chosen = self.marked
        else:
            chosen = self.later.place if self.later else None
        return chosen or self.earlier.place

    @property
    def tensor(self) -> str:
        """Dtype and shape, of the access that is known best."""
        return self.earlier.tensor or (self.later.tensor if self.later else "")

    @property
    def certainty(self) -> str:
        """How sure the surest of it is, with the reason, and how often if not always."""
        surest = min((one._certainty for one in (self, *self.also)), key=_is_likely)
        likely = sum(one.count for one in self.also if _is_likely(one._certainty))
        if _is_likely(self._certainty):
            likely += self.count - sum(one.count for one in self.also)
        if 0 < likely < self.count:
            said = f"certain {self.count - likely} of {self.count} times"
            return surest.replace("certain", said, 1) + "; else likely"
        return surest

    @property
    def is_likely(self) -> bool:
        """Whether all of it is only likely."""
        return _is_likely(self.certainty)

    @property
    def _certainty(self) -> str:
        if self.kind == "used-after-free":
            return "certain: the operator was called after the free"
        if self.kind == "stale-output":
            return "certain: a view like it was handed out for a later replay"
        if self.kind == "write-early" and self.earlier.is_allocation:
            return "likely: it does harm if the memory was in use before its allocation"
        if self.kind in FREES and self.later is None:
            return "likely: it does harm if the stream's next work gets this memory"
        return "certain: nothing in the program orders the two"

    @property
    def missing(self) -> str:
        """What would mend it, and where."""
        used, home = self.earlier, self.home
        if self.also and (everywhere := self._missing_everywhere):
            return everywhere
        if self.kind in FREES:
            mark = f"record_use(x, s) or x.record_stream(s) after {used.place}"
            before = self.freed or self.place
            return f"{mark}, s being {used.stream}; or {home} waits for it before {before}"
        if self.kind == "used-after-free":
            return f"a reference to the tensor until after {self.place}"
        if self.kind == "stale-output":
            return f"a copy (clone) of the view before the replay at {used.place}"
        assert self.later is not None
        return (
            f"{self.later.stream} must wait for {used.stream} after {used.place} and before "
            f"{self.later.place}"
        )

    @property
    def _missing_everywhere(self) -> str:
        """What mends all of several places."""
        mark = mark_for(self)
        if mark is not None and all(mark_for(one) == mark for one in self.also):
            if self.kind == "marked-early":
                return f"x.record_stream(s), which lasts until the free, at {self.marked}"
            return (
                f"x.record_stream(s) for what is allocated at {self.allocated}, s being "
                f"{self.earlier.stream}"
            )
        if self.later is None or self.kind not in (*FREES, "read-early", "write-early"):
            return ""
        mark = ", or each must be marked after its use" if self.kind in FREES else ""
        before = f"before {self.later.place}{mark}"
        return f"{self.later.stream} must wait for {self.earlier.stream} {before}"

    def _others(self) -> list[str]:
        """Where else the same is missing."""
        all_of_them = (self, *self.also)
        frames = {
            "also at": [one.place.frames[:1] for one in all_of_them],
            "also called from": [one.place.frames[1:] for one in all_of_them],
            "the other access also at": [one.earlier.place.frames[:1] for one in all_of_them],
        }
        return [f"{how} {said}" for how, places in frames.items() if (said := _other_lines(places))]

    def text(self) -> str:
        """Several lines, without an end of line."""
        what = ", ".join(part for part in (self.tensor, _bytes(self.size)) if part)
        times = f", {self.count} times" if self.count > 1 else ""
        places = len({one.place.frames[:1] for one in (self, *self.also)})
        times += f" at {places} places" if places > 1 else ""
        lines = [f"{TITLES[self.kind]}{times}: {self.place}", f"missing: {self.missing}"]
        home = f" on {self.home}" if self.home else ""
        lines.append(f"{what or 'memory'}, allocated at {self.allocated}{home}")
        if not self.earlier.is_allocation and self.kind != "used-after-free":
            lines.append(str(self.earlier))
        for said, place in (("marked", self.marked), ("freed", self.freed)):
            if place is not None:
                lines.append(f"{said} at {place}")
        if self.later is not None:
            is_next = self.kind in FREES
            following = "memory of that stream is next " if is_next else ""
            lines.append(f"{following}{self.later}")
        lines.append(f"sure: {self.certainty}")
        lines += [f"called from {frame}" for frame in self.place.frames[1:]]
        lines += self._others()
        return "\n    ".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: all attributes, and what the properties say."""
        said = {name: getattr(self, name) for name in ("tensor", "certainty", "missing")}
        also = [one.as_dict() for one in self.also]
        return {**asdict(self), **said, "place": asdict(self.place), "also": also}


def line_of(place: Place | None) -> Hashable:
    """None: unknown."""
    return (place.frames[0], place.in_backward) if place and place.frames else None


def mark_for(finding: Finding) -> Hashable:
    """What findings have in common that one mark would mend. None: no mark would, or nobody knows
    where."""
    at = {"freed-in-use": finding.allocated, "marked-early": finding.marked}.get(finding.kind)
    line = line_of(at)
    return line and (finding.kind, line, finding.earlier.stream)


def _is_likely(certainty: str) -> bool:
    return certainty.startswith("likely")


def parse(found: Mapping[str, Any]) -> Finding:
    """One of ``_torch.audit_findings()``."""
    later = found["later"]
    return Finding(
        kind=found["kind"],
        count=found["count"],
        address=found["address"],
        size=found["size"],
        allocated=parse_place(found["allocated"]),
        home=Stream(*found["home"]) if found["home"] else None,
        earlier=_access(found["earlier"]),
        later=_access(later) if later else None,
        freed=parse_place(found["freed"]) if _is_about_free(found) else None,
        marked=parse_place(found["marked"]) if found["kind"] == "marked-early" else None,
    )


def text_of(findings: Sequence[Finding], complete: bool = True) -> str:
    """All of them, numbered."""
    parts = [f"{i}. {finding.text()}" for i, finding in enumerate(findings, 1)]
    number = len(findings)
    head = f"esper_alloc audit: {number} finding{'s' if number != 1 else ''}"
    if not complete:
        head += " (host memory ran out, so some may be missing)"
    return "\n".join([head, *parts])


def json_of(
    findings: Sequence[Finding],
    complete: bool = True,
    used_cuda: bool = True,
    fault: Mapping[str, Any] | None = None,
) -> str:
    """An object with the list `findings`, the flags and, if there is one, the `fault`."""
    said: dict[str, Any] = {"complete": complete, "used_cuda": used_cuda}
    said["findings"] = [finding.as_dict() for finding in findings]
    if fault is not None:
        said["fault"] = fault
    return json.dumps(said, indent=2)


def _is_about_free(found: Mapping[str, Any]) -> bool:
    return found["kind"] in ("freed-in-use", "marked-early", "used-after-free")


def parse_place(said: tuple[bool, Sequence[tuple[str, int, str]]]) -> Place:
    """A place of ``_torch``'s."""
    return Place(tuple(Frame(*frame) for frame in said[1]), said[0])


def _access(said: Mapping[str, Any]) -> Access:
    return Access(
        place=parse_place(said["site"]),
        operator=said["operator"],
        tensor=said["tensor"],
        stream=Stream(*said["stream"]),
        writes=said["writes"],
        is_allocation=said["is_allocation"],
    )


def _other_lines(places: Sequence[tuple[Frame, ...]]) -> str:
    """Frames that the first one does not have, those of a function together."""
    functions: dict[tuple[str, str], set[int]] = {}
    for frame in (frame for frames in places[1:] for frame in frames if frame not in places[0]):
        functions.setdefault((frame.file, frame.function), set()).add(frame.line)
    return "; ".join(
        f"{_shown(file)}:{', '.join(map(str, sorted(lines)))} in {function}"
        for (file, function), lines in functions.items()
    )


def _bytes(size: int) -> str:
    if size < 1 << 20:
        return f"{size} bytes" if size else ""
    return f"{size / (1 << 20):.1f} MiB"


def _shown(file: str) -> str:
    """Relative to the current folder, where that is shorter."""
    try:
        relative = os.path.relpath(file)
    except (OSError, ValueError):
        return file
    return relative if len(relative) < len(file) else file
