"""The black box: a bounded recording of what a program allocated, and its files."""

import os

#: The file that ``run --record`` names, and the process that it was named for.
RECORD, RECORD_PID = "ESPER_ALLOC_RECORD", "ESPER_ALLOC_RECORD_PID"


def of_this_process(record: str) -> str:
    """The file of this process: that of a rank or child has its number in its name, and that of a
    rank's child both."""
    stem, suffix = os.path.splitext(record)
    rank, named_for = os.environ.get("RANK", ""), os.environ.get(RECORD_PID, "")
    own = str(os.getpid())
    if rank.isdecimal():
        stem += f"-rank{rank}"
        if named_for.startswith("rank"):  # this one is a child of it
            stem += "" if named_for == f"rank{own}" else f"-{own}"
        os.environ[RECORD_PID] = f"rank{own}"
    elif named_for not in ("", own):
        stem += f"-{own}"
    return stem + suffix
