"""The allocator's core and its drivers, without PyTorch."""

from typing import Final, TypedDict

class Device(TypedDict):
    index: int
    name: str
    total_bytes: int
    virtual_memory: bool
    compute_capability: tuple[int, int]

class DriverReport(TypedDict):
    available: bool
    error: str | None
    library: str
    driver_version: int | None
    entry_points: dict[str, bool]
    devices: list[Device]

class BuildInfo(TypedDict):
    version: str
    compiler: str
    cuda_headers: str | None
    asserts: bool
    rule_switches: bool
    sanitize: str | None
    capi_version: int

__version__: Final[str]
capi: Final[object]

def driver_report() -> DriverReport: ...
def build_info() -> BuildInfo: ...
def addresses() -> dict[str, int]: ...
def counters(device: int, /) -> dict[str, int]: ...
def driver_calls() -> dict[str, int]: ...
