"""When the black box is written: at a call, when memory runs out, at a signal, at the end."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import tempfile

from .. import _core
from . import RECORD, of_this_process


def black_box(path: str | os.PathLike[str]) -> None:
    """Writes what was allocated, freed and used so far, and from which lines, to a file.

    The black box keeps the latest events, in 64 MiB of host memory unless ``enable(black_box=...)``
    says otherwise, and all that is live, however old. ``python -m esper_alloc view FILE`` shows
    it, and ``python -m esper_alloc docs black-box`` says more. A file of that name is replaced.

    Raises:
        RuntimeError: esper_alloc has allocated nothing yet, or its black box is off.
        OSError: the file cannot be written; an earlier one is as it was.

    Example::

        esper_alloc.black_box("step.box")
    """
    recording, *_ = _core.black_box_stats()
    if not recording:
        raise RuntimeError(
            "there is nothing to write: no CUDA memory was allocated on esper_alloc yet, or its "
            "black box is off (black_box=None, or ESPER_ALLOC_BLACK_BOX=off)"
        )
    _core.black_box_write(path, "asked for", _about())


def write_by_itself() -> None:
    """Names the files that are written when memory runs out, and as ``run --record`` asks."""
    with contextlib.suppress(OSError):  # there may be no folder for temporary files
        _core.black_box_at_oom(oom_file())
    record = os.environ.get(RECORD)
    if record:
        record = of_this_process(record)
        try:
            _core.black_box_at_signals(record)
        except OSError as error:
            _say_unwritten(record, error)
        else:
            atexit.register(_at_exit, record)


def oom_file() -> str:
    """One for each user and rank, so that files do not pile up."""
    rank = os.environ.get("LOCAL_RANK", "0")
    rank = rank if rank.isdecimal() else "0"
    return os.path.join(tempfile.gettempdir(), f"esper_alloc-oom-{os.getuid()}-{rank}.box")


def _about() -> str:
    torch = sys.modules.get("torch")
    about = {
        "esper_alloc": _core.__version__,
        "torch": getattr(torch, "__version__", None),
        "python": sys.version.split()[0],
        "program": sys.argv[0] if sys.argv else "",
    }
    return json.dumps(about, default=str)


def _at_exit(record: str) -> None:
    if not _core.black_box_stats()[0]:
        return
    try:
        _core.black_box_write(record, "exit", _about())
        _core.black_box_at_signals("")  # what fails from now on has nothing to add
    except OSError as error:
        _say_unwritten(record, error)


def _say_unwritten(record: str, error: OSError) -> None:
    if sys.stderr is not None:  # it is where it was closed, and print() would take stdout
        print(f"esper_alloc: {record} cannot be written: {error.strerror}", file=sys.stderr)
