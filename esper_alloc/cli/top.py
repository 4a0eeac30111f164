"""``python -m esper_alloc top``: the memory of a running program, once a second."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ..live.attached import (
    AnswerError,
    Attached,
    Device,
    EndedError,
    Reading,
    SilentError,
    watchable,
)
from ..live.sockets import folders
from .complaint import complain

INTERVAL = 1.0
HOW = "start it with `run --monitor`, enable(monitor=True) or ESPER_ALLOC_MONITOR=1"


def add_parser(subparsers: Any) -> None:
    """Adds ``top`` to the command line."""
    parser = subparsers.add_parser(
        "top",
        help="watch the memory of a running program",
        description="Shows once a second, for each device, the memory of a running program: how "
        "much is reserved, live and pending, how fast it allocates, how long the host was held "
        "back, and which lines of code hold it. The program must be the same user's: " + HOW + ".",
        epilog="Without PID: the only program there is, or a list. In colours with rich. "
        "Ctrl-C ends it. Exit codes: 0; 1 nothing can be watched; 2 wrong usage, or several "
        "programs. Bytes, seconds; live bytes by line are those asked for, not rounded up.",
    )
    parser.add_argument("pid", metavar="PID", nargs="?", type=int, help="the program's process")
    parser.add_argument("--once", action="store_true", help="print one reading, and end")
    parser.add_argument("--json", action="store_true", help="as --once, as a JSON object")
    parser.add_argument(
        "--lines", metavar="N", type=int, default=15, help="how many lines of code (default: 15)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    try:
        pid = args.pid
        if pid is None:
            found = watchable()
            if not found:
                return complain("top", f"no program of yours can be watched: {HOW}", 1)
            if len(found) > 1:
                print("\n".join(map(_listed, found)))
                return complain("top", "there are several programs: name one, as in `top PID`", 2)
            (pid,) = found
        attached = Attached(pid)
        reading = attached.read()
    except EndedError:
        where = " or ".join(folders())
        return complain(
            "top", f"process {args.pid} cannot be watched: {HOW} (no socket in {where})", 1
        )
    except AnswerError as error:
        return complain("top", error, 1)
    if args.json:
        print(json.dumps(as_json(reading, args.lines)))
    elif args.once:
        print(as_text(tables(reading, None, args.lines)))
    else:
        return _watch(attached, reading, args.lines)
    return 0


def _listed(pid: int) -> str:
    try:
        reading = Attached(pid).read(lines=False)
    except (AnswerError, EndedError) as error:
        return f"{pid:>8}  ({error})"
    held = sum(one.figures.get("reserved_bytes", 0) for one in reading.devices.values())
    return f"{pid:>8}  {size(held):>10}  {reading.program}"


def _watch(attached: Attached, reading: Reading, lines: int) -> int:
    show, close = _screen()
    before = None
    try:
        while True:
            show(tables(reading, before, lines))
            time.sleep(INTERVAL)
            try:
                before, reading = reading, attached.read()
            except SilentError as error:  # another thread has the interpreter's lock, say
                show([Table(f"{error}; it is asked again")])
    except EndedError:
        close()
        print(f"process {attached.pid} has ended")
    except AnswerError as error:
        close()
        return complain("top", error, 1)
    except KeyboardInterrupt:
        close()
    return 0


# What is shown


class Table(NamedTuple):
    """Rows of words; the last column is to the left."""

    title: str
    head: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()


def tables(reading: Reading, before: Reading | None, lines: int) -> list[Table]:
    """A reading for people; rates and changes where there is an earlier one."""
    shown = [Table(f"process {reading.pid}: {reading.program}")]
    for number, device in sorted(reading.devices.items()):
        old = before.devices.get(number) if before else None
        span = reading.seconds - before.seconds if before else 0.0
        title = f"device {number}"
        shown.append(Table(title, ("now", "a second", ""), list(_figures(device, old, span))))
        if device.lines:
            shown += _places(device, old, lines)
    if not reading.devices:
        shown.append(Table("it has not used CUDA yet"))
    if reading.without:
        shown.append(Table(f"no lines of code: {reading.without}"))
    return shown


def size(value: float, sign: str = "") -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:{sign}.{0 if unit == 'B' else 1}f} {unit}"


def count(value: float) -> str:
    return f"{value:,.0f}"


def seconds(value: float) -> str:
    return f"{value:.3f} s"


#: Name, unit, whether its rate is shown, words.
_ROWS: tuple[tuple[str, Callable[[float], str], bool, str], ...] = (
    ("device_total_bytes", size, False, "memory of the device"),
    ("others", size, False, "of it taken by others, and by CUDA itself"),
    ("reserved_bytes", size, False, "reserved"),
    ("allocated_bytes", size, False, "live"),
    ("allocated_peak_bytes", size, False, "live, peak"),
    ("pending_bytes", size, False, "pending"),
    ("grown_bytes", size, True, "taken from the driver in all"),
    ("mallocs", count, True, "mallocs"),
    ("frees", count, True, "frees"),
    ("held_back", count, True, "times that the host was held back"),
    ("held_back_seconds", seconds, True, "that the host was held back"),
    ("out_of_memory", count, True, "times out of memory"),
)


def _figures(device: Device, old: Device | None, span: float) -> Iterator[tuple[str, ...]]:
    have = dict(device.figures)
    if "device_free_bytes" in have:
        used = have["device_total_bytes"] - have["device_free_bytes"]
        have["others"] = max(0, used - have["reserved_bytes"])
    for name, unit, rated, words in _ROWS:
        if name in have:
            change = have[name] - old.figures[name] if rated and old and name in old.figures else 0
            yield unit(have[name]), unit(change / span) if change else "", words


def _places(device: Device, old: Device | None, lines: int) -> list[Table]:
    def row(name: str, held: Counter[str], before: Counter[str] | None) -> tuple[str, str]:
        change = held[name] - before[name] if before is not None else 0
        return size(held[name]), size(change, "+") if change else ""

    lately = (old.categories, old.lines) if old else (None, None)
    categories = [
        (*row(name, device.categories, lately[0]), name)
        for name, _ in device.categories.most_common()
    ]
    places = [
        (*row(name, device.lines, lately[1]), count(device.blocks[name]), name)
        for name, _ in device.lines.most_common(lines)
    ]
    return [
        Table("", ("live", "change", "category"), categories),
        Table("", ("live", "change", "blocks", "line of code"), places),
    ]


def as_json(reading: Reading, lines: int) -> dict[str, Any]:
    """A reading for programs."""
    return {
        "pid": reading.pid,
        "program": reading.program,
        "esper_alloc": reading.version,
        "no_lines": reading.without or None,
        "devices": [
            {
                "device": number,
                **device.figures,
                "categories": dict(device.categories.most_common()),
                "lines": [
                    {"line": name, "bytes": held, "blocks": device.blocks[name]}
                    for name, held in device.lines.most_common(lines)
                ],
            }
            for number, device in sorted(reading.devices.items())
        ],
    }


def as_text(shown: list[Table]) -> str:
    """Tables without rich."""
    said = []
    for table in shown:
        rows = [table.head, *table.rows]
        widths = [max(map(len, column)) for column in zip(*rows)]
        said += [table.title] if table.title else [""]
        for *words, last in rows if table.head else ():
            cells = [word.rjust(width) for word, width in zip(words, widths)]
            said.append("  ".join(["", *cells, last]).rstrip())
    return "\n".join(said)


def _screen() -> tuple[Callable[[list[Table]], object], Callable[[], object]]:
    """What shows tables, and what ends that."""
    try:
        names = ("box", "console", "live", "table", "text")
        box, console, live, table, text = (importlib.import_module(f"rich.{one}") for one in names)
    except ImportError:
        return lambda shown: print(as_text(shown), end="\n\n", flush=True), lambda: None

    def drawn(one: Table) -> Any:
        title = text.Text(one.title, style="bold")  # no markup: names come from the program
        if not one.head:
            return title
        grid = table.Table(title=title, title_justify="left", box=box.SIMPLE)
        for head in one.head[:-1]:
            grid.add_column(head, justify="right", no_wrap=True)
        grid.add_column(one.head[-1])
        for row in one.rows:
            grid.add_row(*map(text.Text, row))
        return grid

    screen = live.Live(auto_refresh=False, screen=sys.stdout.isatty())
    screen.start()
    return lambda shown: screen.update(console.Group(*map(drawn, shown)), refresh=True), screen.stop
