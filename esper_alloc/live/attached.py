"""The watching side of ``esper-alloc top``: reads from a process's socket what is new, and keeps
which memory is live, from which lines."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from .. import _core
from ..recorder.words import printable
from ..view.places import NO_STACK, category_of, line_of
from .figures import FIGURES
from .sockets import connect, folders, opened, sockets

#: How long an event may come after its time (csrc/black_box/follow.h).
AGAIN_NS = 10**9

_HEADER, _SECTION = struct.Struct("<8s2I7Q64s"), struct.Struct("<4sIQ")
_LIVE, _LANE = struct.Struct("<QQQII"), struct.Struct("<i4xQQQq")
_ALLOC = 1  # csrc/black_box/format.h
_NONSENSE = (ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error)
_MOST_BYTES, _MOST_SITES, _MOST_LINE = 2 << 30, 1 << 18, 1 << 20


class EndedError(Exception):
    """The process has ended, or never was; the message is a sentence."""


class AnswerError(Exception):
    """The process does not answer, or what it answers makes no sense; the message is a sentence."""


class SilentError(AnswerError):
    """The process does not answer in time; it may later."""


@dataclass
class Device:
    """Figures by name (figures.py), and live bytes by category and by line, with the number of
    blocks."""

    figures: dict[str, float]
    categories: Counter[str] = field(default_factory=Counter)
    lines: Counter[str] = field(default_factory=Counter)
    blocks: Counter[str] = field(default_factory=Counter)


@dataclass
class Reading:
    """What a process said. seconds: when, by a clock of its own. without: why there are no lines;
    "": there are."""

    pid: int
    program: str
    version: str
    seconds: float
    devices: dict[int, Device]
    without: str


def watchable() -> list[int]:
    """The processes of this user that can be attached to, without asking them."""
    found: dict[int, None] = {}
    wrong = ""
    for folder in folders():
        try:
            with opened(folder) as number:
                for pid, name in sockets(number):
                    try:
                        connect(number, name).close()
                    except ConnectionRefusedError:  # it has ended, and was removed
                        continue
                    except OSError:
                        pass  # attaching to it says why
                    found[pid] = None
        except FileNotFoundError:
            continue
        except OSError as error:  # of a folder that perhaps somebody else made
            wrong = str(error)
    if wrong and not found:
        raise AnswerError(wrong)
    return sorted(found)


class Attached:
    """One process. What it has told is kept here, and not there."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._begun: Any = None
        self._forget()

    def _forget(self) -> None:
        self._since = 0
        self._sites: list[tuple[str, str]] = [("other", NO_STACK)]  # category and line
        self._live: list[tuple[int, int, int, int]] = []  # address, size, lane, site
        self._lanes: list[int] = []  # devices

    def read(self, lines: bool = True) -> Reading:
        """Asks once. lines: with memory by line and category.

        Raises:
            EndedError, AnswerError
        """
        try:
            for _ in range(3):
                try:
                    answer, late = self._ask(lines)
                except (EOFError, ConnectionError):  # has it ended?
                    self._forget()
                    continue
                if not late:
                    return self._reading(answer, lines)
        except TimeoutError:
            raise SilentError(f"process {self.pid} does not answer") from None
        except OSError as error:
            raise AnswerError(f"process {self.pid}: {error}") from None
        except _NONSENSE as error:
            raise AnswerError(
                f"process {self.pid}: its answer cannot be understood: {printable(error)}"
            ) from None
        raise AnswerError(f"process {self.pid} does not finish its answers")

    def _ask(self, lines: bool) -> tuple[dict[str, Any], bool]:
        """The answer, and whether it has to be asked again for all."""
        for folder in folders():
            with contextlib.ExitStack() as stack:
                try:
                    number = stack.enter_context(opened(folder))
                    connection = stack.enter_context(connect(number, f"{self.pid}.sock"))
                except (FileNotFoundError, ConnectionRefusedError):
                    continue
                connection.sendall(b"%d %d\n" % (self._since, len(self._sites) if lines else 0))
                stream = stack.enter_context(connection.makefile("rb"))
                answer = _answer(stream)
                if self._begun not in (None, answer["begun"]):  # it is another process
                    self._begun = None
                    self._forget()
                    return answer, True
                self._begun = answer["begun"]
                return answer, bool(lines and answer["recorded"] and self._follow(stream))
        raise EndedError(f"process {self.pid} has ended, or cannot be watched")

    def _follow(self, stream: BinaryIO) -> bool:
        """Takes in what is new; whether it has to be asked for as a whole."""
        header = _exactly(stream, _HEADER.size)
        _, _, _, begin, begin_ns, end, end_ns, _, _, _, why = _HEADER.unpack(header)
        live = self._live if why.startswith(b"since\0") else []
        sections, left, late = [header], _MOST_BYTES, False
        while True:
            head = _exactly(stream, _SECTION.size)
            name, count, size = _SECTION.unpack(head)
            left -= size
            if left < 0:
                raise ValueError("it is too long")
            body = _exactly(stream, size + -size % 8)
            if name == b"END ":
                break
            late |= name == b"LATE"
            if name == b"SITE":
                self._add_sites(body, count)
            elif name == b"LANE":
                self._lanes = [one[0] for one in _LANE.iter_unpack(body)]
            if name in (b"LANE", b"LIVE", b"EVNT"):
                sections += [head, body]
        if late:
            self._since = 0
            return True
        # A free of memory that was live before has no event here. So the file gets what was.
        sites = len(self._sites) - 1
        sections += [_SECTION.pack(b"SITE", sites, 4 * sites), bytes(4 * (sites + sites % 2))]
        sections += [_SECTION.pack(b"LIVE", len(live), _LIVE.size * len(live))]
        sections += [_LIVE.pack(one[0], one[1], self._since, *one[2:]) for one in live]
        sections += [_SECTION.pack(b"END ", 0, 0)]
        found = _core.black_box_read(b"".join(sections))
        kinds, partners = found["kind"], memoryview(found["partner"]).cast("q")
        alive = [at for at, one in enumerate(partners) if one < 0 and kinds[at] == _ALLOC]
        columns = [_column(found, key, code) for key, code in _COLUMNS]
        self._live = list(zip(*([column[at] for at in alive] for column in columns)))
        # Some events come late, so the last ones are asked for again.
        self._since = max(0, end - (end - begin) * AGAIN_NS // max(1, end_ns - begin_ns))
        return False

    def _add_sites(self, body: bytes, count: int) -> None:
        at = 0
        if len(self._sites) + count > _MOST_SITES:
            raise ValueError("it has too many places")
        for _ in range(count):
            (length,) = struct.unpack_from("<I", body, at)
            at += 4
            frames = body[at : at + length].decode(errors="replace").split("\n")
            at += length
            self._sites.append((category_of(frames), printable(line_of(frames))))

    def _reading(self, answer: dict[str, Any], lines: bool) -> Reading:
        devices = {
            int(number): Device({name: _number(found[name]) for name in FIGURES if name in found})
            for number, found in answer["devices"].items()
        }
        without = ""
        if answer["off"]:
            without = "its black box is off"
        elif not answer["recorded"]:
            without = "it has allocated nothing on esper_alloc yet"
        elif lines:
            self._count(devices)
        return Reading(
            self.pid,
            printable(answer["program"]),
            printable(answer["esper_alloc"]),
            _number(answer["seconds"]),
            devices,
            without,
        )

    def _count(self, devices: dict[int, Device]) -> None:
        by_place: Counter[tuple[int, int]] = Counter()
        blocks: Counter[tuple[int, int]] = Counter()
        for _, size, lane, site in self._live:
            by_place[lane, site] += size
            blocks[lane, site] += 1
        for (lane, site), size in by_place.items():
            category, line = self._sites[site]
            device = devices.setdefault(self._lanes[lane], Device({}))
            device.categories[category] += size
            device.lines[line] += size
            device.blocks[line] += blocks[lane, site]


_COLUMNS = (("address", "Q"), ("size", "Q"), ("lane", "H"), ("site", "I"))


def _column(found: dict[str, Any], key: str, code: Any) -> Any:
    return memoryview(found[key]).cast(code)


def _answer(stream: BinaryIO) -> dict[str, Any]:
    line = stream.readline(_MOST_LINE)
    if not line.endswith(b"\n"):
        raise ValueError("it is too long") if len(line) == _MOST_LINE else EOFError
    answer = json.loads(line)
    if not isinstance(answer, dict) or not isinstance(answer["devices"], dict):
        raise ValueError("it has another form")
    return answer


def _exactly(stream: BinaryIO, size: int) -> bytes:
    """In pieces, so that a size that is not true takes no memory."""
    pieces = []
    while size:
        piece = stream.read(min(size, 1 << 20))
        if not piece:
            raise EOFError
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError("it has something else than a number")
    return value
