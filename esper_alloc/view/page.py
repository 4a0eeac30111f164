"""The HTML file: facts, numbers, the script and its library in one."""

from __future__ import annotations

import base64
import contextlib
import errno
import html
import json
import os
import stat
import zlib
from importlib import resources

from ..recorder.reading import BlackBox
from .content import Content


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def make_page(recording: BlackBox) -> str:
    """The whole file. Nothing in it is loaded from elsewhere, which its policy forbids."""
    content = Content(recording)
    numbers = zlib.compress(b"".join(content.columns.parts), 1)
    # No text of the recording can end the element.
    facts = json.dumps(content.facts, ensure_ascii=True).replace("<", "\\u003c")
    parts = {
        "TITLE": html.escape(os.path.basename(recording.path)),
        "STYLE": _asset("uPlot.min.css") + _asset("view.css"),
        "LICENCE": html.escape(_asset("uPlot-LICENSE.txt")).replace("--", "- -"),
        "LIBRARY": _asset("uPlot.iife.min.js"),
        "SCRIPT": _asset("view.js"),
        "FACTS": facts,
        "NUMBERS": base64.b64encode(numbers).decode("ascii"),
    }
    before, *rest = _asset("page.html").split("@@")
    return before + "".join(parts.get(one, one) for one in rest)


def write_page(recording: BlackBox, path: str | os.PathLike[str]) -> int:
    """Makes the file, or replaces it; returns its bytes. Raises OSError, also where it would
    replace a link or a device."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            why = "a link, a folder or a device is there: name a file"
            raise FileExistsError(errno.EEXIST, why, path)
    text = make_page(recording).encode(errors="replace")
    part = f"{os.fspath(path)}.part{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW  # the folder may be anybody's
    try:
        with open(os.open(part, flags, 0o600), "wb") as file:
            file.write(text)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    return len(text)
