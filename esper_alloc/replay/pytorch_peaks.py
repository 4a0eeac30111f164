"""The native allocator's own blocks, rebuilt from a history.

Entries say what was asked for. Native hands out whole blocks: it rounds the
size, takes the start of a free block, and splits off the rest only where its
rule allows. Free neighbours of one segment always merge, so the addresses of
the allocations and the bounds of the segments give every block's size. They
also show whether the entries fit into their segments at all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from .history import History, Settings, rounded
from .reader import ALLOC, COMPLETE, GROW, REQUEST, SHRINK

MIB = 1 << 20
SMALL_SIZE = MIB  # requests up to this come from the small pool
MIN_REST = 512  # the least that is split off in the small pool


@dataclass(frozen=True)
class NativePeaks:
    """Bytes of native's blocks at their most."""

    allocated: int
    active: int


def native_size(size: int, settings: Settings) -> int:
    """The size native looks for: a multiple of 512, or rounded up to one of the
    divisions of its power of two, where the recording had those set."""
    if settings.roundup and size > 512:
        exponent = size.bit_length() - 1
        step = min(max(exponent - 20, 0), 15)  # the options name 1 MiB to 32 GiB
        divisions = settings.roundup.get(1 << step, 0)
        if divisions > 1 and size > 512 * divisions:
            floor = 1 << exponent
            unit = max(floor // divisions, 1)
            return (size + unit - 1) // unit * unit
    return max(rounded(size), 512)


def splits(rest: int, size: int, settings: Settings) -> bool:
    """Whether native splits `rest` bytes off a block that serves `size`."""
    if size <= SMALL_SIZE or settings.expandable:
        return rest >= MIN_REST
    if settings.max_split_size is not None and size >= settings.max_split_size:
        return False
    return rest > SMALL_SIZE


def native_peaks(history: History) -> NativePeaks:
    """Raises SnapshotError where the entries do not fit into their segments."""
    blocks = _Blocks(history)
    peak_live, peak_active = blocks.live, blocks.active
    wanted: dict[int, int] = {}
    for number, (code, address, size, _) in enumerate(history.steps):
        if code == ALLOC:
            if size not in wanted:
                wanted[size] = native_size(size, history.settings)
            blocks.take(number, address, rounded(size), wanted[size])
            if blocks.live > peak_live:
                peak_live = blocks.live
            if blocks.active > peak_active:
                peak_active = blocks.active
        elif code == REQUEST:
            blocks.request(address)
        elif code == COMPLETE:
            blocks.give(address)
        elif code == GROW:
            blocks.grow(address, address + size, number in history.mapped_steps)
        elif code == SHRINK:
            blocks.shrink(number, address, address + size)
    return NativePeaks(peak_live, peak_active)


class _Blocks:
    """Used and free blocks; they tile the segments.

    used: start to end. free: start to end, and free_ends: end to start.
    asked: start of a used block to the bytes that were asked for, up to 512.
    pending: used blocks whose free was requested. live: bytes of used blocks
    that are not pending. active: bytes of all used blocks.
    Bounds of classic segments are walls: free blocks do not merge across them.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self.used: dict[int, int] = {}
        self.asked: dict[int, int] = {}
        self.pending: set[int] = set()
        self.guessed: set[int] = set()
        self.live = 0
        self.active = 0
        self.free: dict[int, int] = {}
        self.free_ends: dict[int, int] = {}
        self.walls: dict[int, int] = {}  # address: how many segments begin or end
        for one in history.start_ranges:
            self.grow(one.start, one.end, one.mapped)
        self.place_start_blocks()

    def place_start_blocks(self) -> None:
        """Sizes that the end no longer shows are guessed: too small a gap
        behind a block is a rest that was not split off it."""
        history = self.history
        starts = [one.start for one in history.start_ranges]
        rest = 0  # of the free block in which the last one was placed
        for index, block in enumerate(history.start):
            following = history.start[index + 1].address if index + 1 < len(history.start) else None
            address, size = block.address, history.sizes[block.slot]
            nearby = rest, starts[bisect_right(starts, address) - 1]
            free = self.find_free(address, nearby)
            wanted = block.block_size or native_size(size, history.settings)
            if free is None or address + wanted > free[1]:
                history.contradiction(
                    None,
                    f"{size} bytes at {address:#x}, in use when the recording began, "
                    "overlap other memory",
                )
            bound = free[1] if following is None else min(free[1], following)
            end = address + wanted
            if block.block_size is None:
                self.guessed.add(address)
                if end < bound and not splits(bound - end, wanted, history.settings):
                    end = bound
            self.use(free, address, end, rounded(size))
            rest = end
            if block.pending:
                self.request(address)

    # Segments.

    def grow(self, start: int, end: int, mapped: bool) -> None:
        if not mapped:
            for wall in (start, end):
                self.walls[wall] = self.walls.get(wall, 0) + 1
        self.add_free(start, end)

    def shrink(self, number: int, start: int, end: int) -> None:
        free = self.find_free(start)
        if free is None or end > free[1]:
            self.history.contradiction(
                number, f"the segment at {start:#x} goes while memory in it is in use"
            )
        self.cut_free(free, start, end)
        if number not in self.history.mapped_steps:
            for wall in (start, end):
                self.walls[wall] -= 1

    # Allocations.

    def take(self, number: int, address: int, asked: int, wanted: int) -> None:
        """Uses the block at an address; `wanted` is its size if it is split."""
        end = self.free.get(address)
        free = self.reveal(address) if end is None else (address, end)
        if free is None or address + asked > free[1]:
            self.history.contradiction(
                number,
                f"alloc of {asked} bytes (rounded up) at {address:#x} overlaps memory in use",
            )
        rest = free[1] - address - wanted
        whole = not splits(rest, wanted, self.history.settings)
        self.use(free, address, free[1] if whole else address + wanted, asked)

    def request(self, address: int) -> None:
        self.pending.add(address)
        self.live -= self.used[address] - address

    def give(self, address: int) -> None:
        end = self.used.pop(address)
        del self.asked[address]
        self.guessed.discard(address)
        self.pending.discard(address)
        self.active -= end - address
        self.add_free(address, end)

    # Their bytes.

    def use(self, free: tuple[int, int], start: int, end: int, asked: int) -> None:
        self.cut_free(free, start, end)
        self.used[start] = end
        self.asked[start] = asked
        self.live += end - start
        self.active += end - start

    def move_end(self, address: int, end: int) -> None:
        """A used block has another size than was thought."""
        change = end - self.used[address]
        self.used[address] = end
        self.active += change
        if address not in self.pending:
            self.live += change

    def add_free(self, start: int, end: int) -> None:
        """Merges with free neighbours of the same segment."""
        if start in self.free_ends and not self.walls.get(start):
            start = self.free_ends.pop(start)
        if end in self.free and not self.walls.get(end):
            after = self.free.pop(end)
            del self.free_ends[after]
            end = after
        self.free[start] = end
        self.free_ends[end] = start

    def cut_free(self, free: tuple[int, int], start: int, end: int) -> None:
        """Takes [start, end) out of a free block."""
        del self.free[free[0]], self.free_ends[free[1]]
        if free[0] < start:
            self.free[free[0]] = start
            self.free_ends[start] = free[0]
        if end < free[1]:
            self.free[end] = free[1]
            self.free_ends[free[1]] = end

    def find_free(self, address: int, nearby: Iterable[int] = ()) -> tuple[int, int] | None:
        """The free block around an address; searches unless it begins there, or `nearby`."""
        for one in (address, *nearby):
            if one <= address < self.free.get(one, one):
                return one, self.free[one]
        start = max((one for one in self.free if one < address), default=None)
        if start is not None and address < self.free[start]:
            return start, self.free[start]
        return None

    def reveal(self, address: int) -> tuple[int, int] | None:
        """The free block for an allocation that does not lie at the start of
        one: a neighbour has another size than was thought (a guess about the
        start, or the recording allocator splits by another rule). Rare, so it
        may search."""
        free = self.find_free(address)
        if free is not None:
            before = max((one for one in self.guessed if one < address), default=None)
            if (
                before is not None
                and self.used[before] == free[0]
                and not splits(address - free[0], self.asked[before], self.history.settings)
            ):
                self.cut_free(free, free[0], address)
                self.move_end(before, address)
                return address, free[1]
            return free
        before = max((one for one in self.used if one < address), default=None)
        if before is None or not before + self.asked[before] <= address < self.used[before]:
            return None
        end = self.used[before]
        self.move_end(before, address)
        self.add_free(address, end)
        return self.find_free(address)
