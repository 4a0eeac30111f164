"""The allocator's core and its drivers, without PyTorch."""

from collections.abc import Sequence
from os import PathLike
from typing import Any, Final, Literal, TypedDict, type_check_only

from typing_extensions import Buffer

@type_check_only
class Device(TypedDict):
    index: int
    name: str
    total_bytes: int
    virtual_memory: bool
    compute_capability: tuple[int, int]

@type_check_only
class DriverReport(TypedDict):
    available: bool
    error: str | None
    library: str
    driver_version: int | None
    entry_points: dict[str, bool]
    devices: list[Device]

@type_check_only
class BuildInfo(TypedDict):
    version: str
    compiler: str
    cuda_headers: str | None
    asserts: bool
    rule_switches: bool
    sanitize: str | None
    capi_version: int

@type_check_only
class ReplayResult(TypedDict):
    operations: int
    nanoseconds: float
    device_calls: dict[str, int]
    peak_allocated: int
    peak_active: int
    peak_reserved: int
    segments: int
    curve: bytes

@type_check_only
class Use(TypedDict):
    stream_device: int
    stream: int
    number: int
    at_free: bool
    until_free: bool
    held: bool

@type_check_only
class PendingBlock(TypedDict):
    address: int
    size: int
    live: bool
    stream: int
    uses: list[Use]

__version__: Final[str]
capi: Final[object]
audit: Final[object]
COUNTERS: Final[tuple[str, ...]]

def driver_report() -> DriverReport: ...
def build_info() -> BuildInfo: ...
def addresses() -> dict[str, int]: ...
def counters(device: int, /) -> dict[str, int]: ...
def memory_info(device: int, /) -> tuple[int, int]: ...
def pending(device: int, /) -> list[PendingBlock]: ...
def driver_calls() -> dict[str, int]: ...
def replay(
    operations: Buffer,
    *,
    start: int,
    slots: int,
    streams: int,
    uses: int,
    pools: Sequence[tuple[int, int]],
    segments: Literal["classic", "mapped", "auto"],
    device: Literal["sim", "cuda"],
    total: int = 0,
    taken: int = 0,
    limit: int = 0,
    allowance: int = -1,
    timed: bool = True,
) -> ReplayResult: ...
def black_box_write(path: str | PathLike[str], why: str, info: str, /) -> None: ...
def black_box_at_oom(path: str | PathLike[str], /) -> None: ...
def black_box_at_signals(path: str | PathLike[str], /) -> None: ...
def black_box_stats() -> tuple[bool, int, int, int]: ...
def black_box_follow(socket: int, since: int, first_site: int, /) -> None: ...
def black_box_read(file: bytes, /) -> dict[str, Any]: ...
