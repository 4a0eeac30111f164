"""A process that has imported torch and esper_alloc, and forks one child for each piece of code that
it is given: see helper.Nursery. A child chooses its allocator and starts CUDA as a fresh process
does, because CUDA is not touched here.

A line of JSON on standard input asks: {"code", "env", "stdout", "stderr", "timeout"}. The answer is
a line with the child's exit status, or null where it was stopped.
"""

import ctypes
import faulthandler
import gc
import json
import os
import select
import signal
import sys
import time


def wait_for(child: int, timeout: float) -> int | None:
    """The exit status of a child; None: it did not end in time, and was killed. So it is when
    nobody is left who asks."""
    asking = select.poll()
    asking.register(0, 0)  # no event but that the other end is closed
    end = time.monotonic() + timeout
    pause = 0.001
    while time.monotonic() < end and not asking.poll(0):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
    try:
        os.kill(child, signal.SIGUSR2)  # where it hangs, to its standard error: see become()
        time.sleep(1)
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    os.waitpid(child, 0)
    return None


def end_with(parent: int) -> None:
    """A test run that is killed leaves nothing behind that keeps the GPU busy."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def become(request: dict[str, object], parent: int) -> None:
    """Makes this process what a fresh `python -c` would be."""
    os.setpgid(0, 0)
    end_with(parent)
    for name, number in (
        ("/dev/null", 0),
        (str(request["stdout"]), 1),
        (str(request["stderr"]), 2),
    ):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if number else os.O_RDONLY
        file = os.open(name, flags, 0o600)
        os.dup2(file, number)
        os.close(file)
    environment = request["env"]
    assert isinstance(environment, dict)
    faulthandler.register(signal.SIGUSR2, file=2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c"]


def serve() -> str | None:
    """In a child: the code to run. None: there is nothing more to do."""
    import torch  # noqa: F401

    import esper_alloc  # noqa: F401

    gc.freeze()  # else each collection in a child looks through all of torch
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        nursery = os.getpid()
        child = os.fork()
        if child == 0:
            answers.close()
            become(request, nursery)
            return str(request["code"])
        try:
            os.setpgid(child, child)  # whoever comes first
        except (ProcessLookupError, PermissionError):
            pass
        answers.write(json.dumps(wait_for(child, request["timeout"])) + "\n")
        answers.flush()
    return None


def run(code: str) -> None:
    """Runs the program, all other names of this module gone. Without a file, so that what it spawns
    does not run this one. Where it ends by itself, PyTorch's modules are not taken apart, which
    would take most of a short program's time."""
    import atexit
    import os
    import sys
    import threading

    program, space = compile(code, "<string>", "exec", dont_inherit=True), globals()
    for name in [*(one for one in space if not one.startswith("__")), "__file__", "__doc__"]:
        del space[name]
    space["__spec__"] = space["__doc__"] = None
    status = 0
    try:
        exec(program, space)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 255)


if (code := serve()) is not None:
    run(code)
