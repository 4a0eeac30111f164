"""Ten thousand random operations: every statistic is the sum over the snapshot, peaks
are the most that was seen, and what went in and out explains what is there."""

from __future__ import annotations

import random
from typing import Any

import torch
from ground import MiB, busy, bytes_of, let_pass, scenario
from snapshot import figures

OPERATIONS, QUIET_ONES, PHASE = 10_000, 2_500, 500
MOST_LIVE = 200 * MiB
#: Figures that only the program's own calls change, never the end of work on a stream.
EXACT = ("allocation", "allocated_bytes", "segment", "reserved_bytes")
#: As exact as long as there is one stream.
QUIET = ("active", "active_bytes", "requested_bytes")
CLASSES = ("all", "small_pool", "large_pool")


class Account:
    """What the figures of one device must be."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.most: dict[str, int] = {}
        self.base: dict[str, int] = {}
        self.reset_peaks()
        self.reset_flows()

    def read(self) -> dict[str, int]:
        return torch.cuda.memory_stats(self.device)

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
        self.most = {}
        self.look()

    def reset_flows(self) -> None:
        torch.cuda.reset_accumulated_memory_stats(self.device)
        self.base = {k: v for k, v in self.read().items() if k.endswith(".current")}

    def look(self) -> None:
        for key, value in self.read().items():
            if key.endswith(".current"):
                self.most[key] = max(self.most.get(key, 0), value)

    def wrong(self, quiet: bool) -> list[str]:
        """What does not add up. Nothing is at work on the device."""
        segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == self.device]
        every, found = self.read(), []
        for key, value in figures(segments).items():
            if every[key] != value:
                found.append(f"{key}: {every[key]}, in the snapshot {value}")
        for key, value in every.items():
            name, _, last = key.rpartition(".")
            if last != "current" or name.split(".")[0] not in (
                *EXACT,
                *QUIET,
                "inactive_split_bytes",
            ):
                continue
            if every[f"{name}.allocated"] - every[f"{name}.freed"] != value - self.base[key]:
                found.append(f"{name}: what came and went does not explain {value}")
            exact = name.split(".")[0] in (EXACT + QUIET if quiet else EXACT)
            peak, most = every[f"{name}.peak"], self.most[key]
            if peak != most if exact else peak < most:
                found.append(f"{name}: peak {peak}, seen {most}")
        return found


def read_elsewhere(x: torch.Tensor, stream: torch.cuda.Stream) -> None:
    if torch.cuda.get_allocator_backend() == "native":
        x.record_stream(stream)
    else:
        import esper_alloc

        esper_alloc.record_use(x, stream)


def run(devices: int) -> list[str]:
    dice = random.Random(2024)
    accounts = [Account(device) for device in range(devices)]
    streams = [[torch.cuda.Stream(device) for _ in range(3)] for device in range(devices)]
    live: list[torch.Tensor] = []
    found: list[str] = []
    for operation in range(OPERATIONS):
        quiet = operation < QUIET_ONES
        device = dice.randrange(devices)
        chance = dice.random()
        if chance < 0.5 and sum(x.numel() for x in live) < MOST_LIVE:
            size = int(2 ** dice.uniform(0, 24.5))
            with torch.cuda.stream(streams[device][0] if chance < 0.1 and not quiet else None):
                live.append(bytes_of(size, device))
        elif chance < 0.95 and live:
            x = live.pop(dice.randrange(len(live)))
            if not quiet and dice.random() < 0.4:
                read_elsewhere(x, streams[x.device.index][dice.randrange(1, 3)])
            del x
        elif chance < 0.955:
            torch.cuda.empty_cache()
        elif chance < 0.957:
            accounts[device].reset_flows()
        elif chance < 0.959:
            accounts[device].reset_peaks()
        if not quiet and operation % 125 == 0:
            busy(streams[device][1])
        for account in accounts:
            account.look()
        if operation % PHASE == PHASE - 1:
            let_pass()
            live.append(bytes_of(1, device))  # what is over is noticed
            for account in accounts:
                account.look()
                found += [f"device {account.device}: {line}" for line in account.wrong(quiet)]
                torch.cuda.empty_cache()
                account.reset_peaks()
    del live
    let_pass()
    return found[:10]


@scenario()
def statistics_of_random_operations() -> Any:
    return run(1)


@scenario("two_gpus")
def statistics_of_random_operations_on_two_devices() -> Any:
    return run(2)
