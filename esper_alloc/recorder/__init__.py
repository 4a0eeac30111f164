"""The black box: a bounded recording of what a program allocated, and its files."""

import os

#: The file that ``run --record`` names, and the process that it was named for.
RECORD, RECORD_PID = "ESPER_ALLOC_RECORD", "ESPER_ALLOC_RECORD_PID"


def of_this_process(record: str) -> str:
    """The file of this process: that of another rank or child has its number in its name."""
    stem, suffix = os.path.splitext(record)
    rank = os.environ.get("RANK", "")
    if rank.isdecimal():
        return f"{stem}-rank{rank}{suffix}"
    if os.environ.get(RECORD_PID, "") not in ("", str(os.getpid())):
        return f"{stem}-{os.getpid()}{suffix}"
    return record
