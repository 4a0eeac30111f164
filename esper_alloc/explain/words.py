"""An explanation in words, and for machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..recorder.words import mib, printable
from ..replay.reader import DEFAULT_POOL
from . import causes
from .changes import Tried
from .explanation import Explanation, largest_lines
from .job import Job


def _peak(size: int) -> str:
    return f"{size / 2**30:.2f} GiB ({size:,} bytes)"


def _line(job: Job, line: int) -> str:
    return printable(job.lines[line])


def _stream(handle: int) -> str:
    return f"stream {handle:#x}" if handle else "the default stream"


def _users(job: Job) -> str:
    """The streams for which freed memory waited, those first for which most did."""
    streams = sorted(job.waited_for, key=lambda one: -job.waited_for[one])
    return ", ".join(map(_stream, streams[:3])) or "other streams"


def cause_in_words(found: Explanation, kind: str) -> str:
    job, room = found.job, found.job.room
    free, largest = causes.free_of_pool(job)
    if kind in ("leak", "growth"):
        lines = causes.leaking_lines(job)
        if kind == "growth":
            lines = [one for one in causes.growing_lines(job) if one not in lines]
        held = job.held_by_line()
        return {
            "leak": "memory grows step after step, as in a list or cache that is never emptied: ",
            "growth": "memory grows, as in a list or cache that is never emptied, or weights that "
            "are being loaded: ",
        }[kind] + "; ".join(f"{_line(job, one)} keeps {mib(int(held[one]))}" for one in lines)
    kept = int(job.sizes[causes.kept_by_forward(job)].sum())
    return {
        "pending": f"memory that was freed was still in use on {_users(job)}, and other memory was "
        "reserved in its place",
        "fragmentation": f"fragmentation: {mib(free)} are free, but in pieces of at most "
        f"{mib(largest)}",
        "streams": f"{mib(causes.free_of_other_streams(job))} are free, but of other streams",
        "pool": f"other pools keep {mib(sum(causes.kept_by_pools(job).values()))} that are free",
        "fraction": f"the memory fraction: this process may reserve {mib(room.limit or 0)} of "
        f"{mib(room.total)}",
        "others": f"other processes, libraries and CUDA itself hold {mib(room.taken or 0)} of "
        f"{mib(room.total)}",
        "lengths": "sizes grow: this line has asked for various sizes, and "
        f"{mib(job.request.size)} is the largest",
        "large": f"this request alone is large: {mib(job.request.size)} of the "
        f"{mib(room.capacity)} that this process can have",
        "activations": f"forward keeps {mib(kept)}, as for backward",
        "returned": f"the program keeps what forward returned: {mib(kept)}",
        "need": "the program needs more than the device has for it"
        + (
            f": {mib(found.enough.peak)} of {mib(found.job.room.capacity)} so far"
            if found.enough.passes
            else ""
        ),
    }[kind]


_CHANGES = {
    "free_each": "free what {lines} made before it makes the next",
    "uses_end": "memory in use on other streams is over when it is freed: mark uses at their end, "
    "or wait for those streams",
    "allowance": "the host is held back while more than {size} wait for other streams: "
    'enable(allowance="128MiB")',
    "segments": 'esper_alloc with {segments} segments: enable(segments="{segments}")',
    "release_pool": "drop pool {pool} when its memory is free",
    "fraction": "a memory fraction of {fraction:.2f} at least",
    "others": "other processes, libraries and CUDA itself hold {size} less at least",
    "checkpoint": "activation checkpointing, so that of what {lines} makes one tensor at a time is "
    "kept",
    "batch": "a batch of {percent}% at most, which scales {size} and the request",
    "absent": "without what {lines} made: freed before, or offloaded",
    "empty_cache": "torch.cuda.empty_cache() before {lines}",
}


def change_in_words(job: Job, one: Tried) -> str:
    lines = ", ".join(_line(job, line) for line in one.what.get("lines", ()))
    size, share = mib(one.what.get("bytes", 0)), one.what.get("percent", 0) / 100
    if one.kind == "batch" and not one.what["bytes"]:
        return f"if this request were {mib(int(job.request.size * share))} at most"
    return _CHANGES[one.kind].format_map(
        {**one.what, "lines": lines, "size": size, "fraction": share}
    )


def _device(job: Job) -> Iterator[tuple[str, int, str]]:
    """Rows of what the device had then."""
    room, live = job.room, int(job.sizes[job.live].sum())
    yield "this process could reserve", room.capacity, ""
    yield "live", live, ""
    pending = int(job.sizes[job.pending].sum())
    if pending:
        yield "freed, in use on other streams", pending, _users(job)
    gaps = job.gaps.get(DEFAULT_POOL, [])
    yield "free in segments", sum(gaps), f"largest piece {mib(max(gaps, default=0))}"
    elsewhere = causes.free_of_other_streams(job)
    if elsewhere:
        yield "of these, of other streams", elsewhere, ""
    yield "not reserved", max(room.capacity - job.reserved, 0), ""
    for pool, size in causes.kept_by_pools(job).items():
        yield f"free in pool {pool}", size, ""
    if room.taken:
        yield "other processes, libraries and CUDA itself", room.taken, ""


def in_words(found: Explanation, everything: bool = False) -> str:
    """Paragraphs; the first line is the request, the second its first cause, or that the replay
    shows none."""
    job, request = found.job, found.job.request
    out = [
        f"{job.path}, device {job.device}: {mib(request.size)} were asked for on "
        f"{_stream(request.stream)} at {_line(job, request.line)}",
    ]
    if found.as_it_was.passes:
        out.append(
            "Replayed as it was, the request is served: the recording does not show its cause."
        )
    told = [one for number, one in enumerate(found.causes) if number == 0 or one != "need"]
    heads = ["Also" if number or found.as_it_was.passes else "Cause" for number in range(len(told))]
    out += [f"{head}: {cause_in_words(found, one)}" for head, one in zip(heads, told)]
    if job.lost_beginning:
        out.append("The recording's beginning is missing: it starts from what was live then.")
    out += ["", "Memory then:"]
    out += [f"  {mib(size):>14}  {name}{note and ', '}{note}" for name, size, note in _device(job)]
    out += ["", "Lines that held most:"]
    for line, size, count in largest_lines(job):
        out.append(f"  {mib(size):>14}  {_line(job, line)}, {count:,} blocks")
    out += ["", *_changes(found, everything)]
    return "\n".join(out)


def _changes(found: Explanation, everything: bool) -> Iterator[str]:
    job = found.job
    if found.as_it_was.passes and job.by_us:
        yield "No change can be tried."
        return
    if found.as_it_was.early:
        yield "The replay fails earlier than the program: the device had more memory before."
    if found.helps:
        yield "Replayed with one of these changes, it is served. Memory reserved at most by then:"
        for one in found.helps:
            yield f"  {_peak(one.outcome.peak):>32}  {change_in_words(job, one)}"
        yield "What the program asks for afterwards is not in the recording, and may take more."
    else:
        yield "None of the changes that were replayed lets it through."
    useless = [one for one in found.tried if not one.outcome.passes]
    if everything and useless:
        yield "These do not help:"
        for one in useless:
            yield f"  {change_in_words(job, one)}"


def as_json(found: Explanation) -> dict[str, Any]:
    """Bytes. Text is as it is in the file."""
    job, room = found.job, found.job.room

    def told(one: Tried) -> dict[str, Any]:
        what = dict(one.what)
        if "lines" in what:
            what["lines"] = [job.lines[line] for line in what["lines"]]
        return {
            "kind": one.kind,
            **what,
            "helps": one.outcome.passes,
            "peak_reserved": one.outcome.peak or None,
            "words": change_in_words(job, one),
        }

    return {
        "file": job.path,
        "device": job.device,
        "request": {
            "bytes": job.request.size,
            "stream": job.request.stream,
            "line": job.lines[job.request.line],
            "stack": list(job.request.stack),
        },
        "causes": [{"kind": one, "words": cause_in_words(found, one)} for one in found.causes],
        "memory": {
            "capacity": room.capacity,
            "total": room.total,
            "taken": room.taken,
            "limit": room.limit,
            "reserved": job.reserved,
            "live": int(job.sizes[job.live].sum()),
            "pending": int(job.sizes[job.pending].sum()),
            "free_in_segments": sum(job.gaps.get(DEFAULT_POOL, [])),
            "free_in_other_pools": sum(causes.kept_by_pools(job).values()),
            "largest_free": causes.free_of_pool(job)[1],
        },
        "lines": [
            {"line": job.lines[line], "bytes": size, "blocks": count}
            for line, size, count in largest_lines(job)
        ],
        "changes": [told(one) for one in found.tried],
        "served_as_it_was": found.as_it_was.passes,
        "peak_with_enough_memory": found.enough.peak or None,
        "lost_beginning": job.lost_beginning,
    }
