"""One finding for each wait, mark, copy or reference that is missing."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .findings import FREES, Finding, line_of, mark_for, parse


def by_cause(found: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], Finding]]:
    """What ``_torch.audit_findings()`` has, the most harmful first: for each cause which ones it
    explains, and the finding. The first of them leads it.

    The compiled half says which would not have come if a stream had waited just before the later
    access of another. Besides, the same lines have the same cause, whoever called them, and so has
    memory that one mark at one line would have protected.
    """
    all_of_them = [parse(one) for one in found]
    first_at: dict[Hashable, int] = {}
    first = [first_at.setdefault(_lines(one) or i, i) for i, one in enumerate(all_of_them)]
    alone = {first[i] for i, one in enumerate(found) if one["stands_alone"]}
    root = list(range(len(found)))
    for i, one in enumerate(found):
        if first[i] != i:
            root[i] = root[first[i]]
            continue
        cause = first[one["cause"]]
        # One that sometimes comes without its cause may still lack a wait earlier in the function.
        if i not in alone or _is_in_same_function(all_of_them[i], all_of_them[cause]):
            root[i] = root[cause]
    groups: dict[int, list[int]] = {}
    for i in range(len(found)):
        groups.setdefault(root[i], []).append(i)
    merged: dict[Hashable, list[int]] = {}
    for members in groups.values():
        marks = {mark_for(all_of_them[i]) for i in members}
        mark = marks.pop() if len(marks) == 1 else None
        merged.setdefault(mark or members[0], []).extend(members)
    said = [(sorted(one), _merge([all_of_them[i] for i in sorted(one)])) for one in merged.values()]
    return sorted(said, key=lambda one: (one[1].is_likely, -one[1].count, one[0][0]))


def _merge(findings: list[Finding]) -> Finding:
    leader, *also = findings
    return replace(leader, count=sum(one.count for one in findings), also=tuple(also))


def _is_in_same_function(one: Finding, other: Finding) -> bool:
    functions = [
        {(frame.file, frame.function) for frame in f.place.frames[:1]} for f in (one, other)
    ]
    return bool(functions[0]) and functions[0] == functions[1]


def _lines(finding: Finding) -> Hashable:
    """What those have in common that one missing thing explains. None: a line is unknown."""
    other: Hashable
    if finding.kind in FREES:
        places = [finding.earlier.place, finding.freed]
        other = finding.earlier.stream, finding.home, line_of(finding.marked)
    elif finding.kind == "stale-output":
        places, other = [finding.earlier.place], finding.address
    elif finding.later is not None and finding.freed is None:
        places = [finding.earlier.place, finding.later.place]
        other = finding.earlier.stream, finding.later.stream
    else:
        places, other = [finding.allocated, finding.freed], None
    lines = [line_of(place) for place in places]
    return None if None in lines else (finding.kind, *lines, other)
