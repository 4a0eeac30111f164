"""Where the sockets of watched processes are: one for each, ``PID.sock``, in a folder of the user's
own."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator

#: Seconds that either side waits for the other.
PATIENCE = 10.0


def folders() -> list[str]:
    """The folders, the preferred one first."""
    places = [os.environ.get("XDG_RUNTIME_DIR") or "", tempfile.gettempdir()]
    return [os.path.join(place, f"esper_alloc-{os.getuid()}") for place in places if place]


@contextlib.contextmanager
def opened(folder: str) -> Iterator[int]:
    """A folder, by its descriptor: names in it may be longer than addresses of sockets can be.

    Raises:
        OSError: there is none, or somebody else could put sockets there; the message says so.
    """
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        about = os.fstat(number)
        if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
            raise PermissionError(
                f"{folder} belongs to user {about.st_uid} and has the mode "
                f"{stat.S_IMODE(about.st_mode):o}, but must be yours, with the mode 700: remove it"
            )
        yield number
    finally:
        os.close(number)


def make_folder() -> str:
    """The first folder that can be had. Raises OSError."""
    failed: OSError | None = None
    for folder in folders():
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            with opened(folder):
                return folder
        except OSError as error:
            failed = failed or error
    raise failed or FileNotFoundError("there is no folder for temporary files: set TMPDIR")


def address(folder: int, name: str) -> str:
    return f"/proc/self/fd/{folder}/{name}"


def connect(folder: int, name: str) -> socket.socket:
    """A connection to a process of the same user.

    Raises:
        OSError: there is none. A socket whose process has ended is removed.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(PATIENCE)
    try:
        connection.connect(address(folder, name))
        owner = struct.unpack(
            "iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )[1]
        if owner != os.getuid():
            raise PermissionError(f"the process belongs to user {owner}")
    except BaseException as error:
        connection.close()
        if isinstance(error, ConnectionRefusedError):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
        raise
    return connection


def sockets(folder: int) -> Iterator[tuple[int, str]]:
    """The process and the name of each socket."""
    for name in sorted(os.listdir(folder)):
        if (match := re.fullmatch(r"(\d{1,10})\.sock", name)) is not None:
            yield int(match[1]), name
