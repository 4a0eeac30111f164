"""The watched side of ``esper-alloc top``: a socket, and a thread that sleeps until somebody asks.

A request is a line of two numbers, ``SINCE SITE``. The answer is a line of JSON, and then, unless
SITE is 0 or nothing is recorded, what happened after SINCE in the form of a black box, with the
places from number SITE on (csrc/black_box/follow.h). The process keeps nothing for its watchers:
they do.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import warnings
from typing import Any

from .. import _core
from ..installation.callers import user_stacklevel
from .figures import figures_of, used_devices
from .sockets import PATIENCE, address, connect, make_folder, opened, sockets

_listener: socket.socket | None = None
_path = ""


def open_monitor() -> None:
    """Opens this process's socket, once; in a forked child anew. Warns if there can be none."""
    global _listener, _path
    if _listener is not None:
        return
    try:
        _listener, _path = _listen()
    except OSError as error:
        warnings.warn(
            f"`esper-alloc top` cannot watch this process: {error}. XDG_RUNTIME_DIR and TMPDIR "
            "name the folders that are tried.",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )
        return
    about = {"pid": os.getpid(), "begun": time.time_ns(), "esper_alloc": _core.__version__}
    threading.Thread(
        target=_serve, args=(_listener, about), name="esper_alloc monitor", daemon=True
    ).start()


def _listen() -> tuple[socket.socket, str]:
    path = make_folder()
    with opened(path) as folder:
        name = f"{os.getpid()}.sock"
        new = f"{os.getpid()}.new"  # a socket that does not listen yet looks stale
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new, dir_fd=folder)
            listener.bind(address(folder, new))
            os.chmod(new, 0o600, dir_fd=folder)
            listener.listen()
            os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            listener.close()
            raise
        for _, other in sockets(folder):
            if other != name:
                with contextlib.suppress(OSError):  # it is removed if its process has ended
                    connect(folder, other).close()
    return listener, os.path.join(path, name)


@atexit.register
def close_monitor() -> None:
    """Removes the socket."""
    global _listener
    if _listener is not None:
        with contextlib.suppress(OSError):
            os.unlink(_path)
        with contextlib.suppress(OSError):
            _listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        _listener.close()
        _listener = None


def _leave_to_parent() -> None:
    global _listener
    if _listener is not None:
        _listener.close()
        _listener = None


os.register_at_fork(after_in_child=_leave_to_parent)


def _serve(listener: socket.socket, about: dict[str, Any]) -> None:
    while listener.fileno() >= 0:
        try:
            connection, _ = listener.accept()
        except OSError:  # it was closed, or the process has no descriptor left
            time.sleep(1)
            continue
        # A watcher may ask for anything and go away at any moment, and the program may have changed
        # what it is asked about. The thread must live on.
        with connection, contextlib.suppress(Exception):
            connection.settimeout(PATIENCE)
            _answer(connection, about)


def _answer(connection: socket.socket, about: dict[str, Any]) -> None:
    request = re.fullmatch(rb"(\d{1,19}) (\d{1,7})\n", connection.recv(64))
    if request is None:
        return
    since, site = map(int, request.groups())
    recorded = _core.black_box_stats()[0]
    answer = {**about, "program": str(sys.argv[0]) if sys.argv else "", "recorded": recorded}
    answer["off"] = os.environ.get("ESPER_ALLOC_BLACK_BOX") == "off"
    try:
        answer["devices"] = {device: figures_of(device) for device in used_devices()}
    except Exception as error:  # of CUDA, or of PyTorch's figures
        answer["devices"], answer["error"] = {}, str(error)
    answer["seconds"] = time.monotonic()
    connection.sendall(json.dumps(answer).encode() + b"\n", socket.MSG_NOSIGNAL)
    if site and recorded:
        _core.black_box_follow(connection.fileno(), since, site)
