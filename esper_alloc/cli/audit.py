"""``python -m esper_alloc audit``: a program under the auditor.

The program runs in this process, as ``python SCRIPT`` would run it; processes that it starts are
not audited. What it finds is printed to the standard error output when the program has ended.
"""

from __future__ import annotations

import argparse
import builtins
import importlib.util
import os
import runpy
import sys
import threading
import zipfile
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from .complaint import complain
from .program import add_program, program_of

DESCRIPTION = """\
Runs SCRIPT, or with -m a module, with ARGS, and finds accesses to GPU memory that
nothing orders: memory that is freed while another stream still uses it, marks before
the last use, reads and writes that come too early, outputs of CUDA graphs that are
read too late. The program keeps its allocator: PyTorch's own, or the one that it
enables itself. ESPER_ALLOC=1 in the environment enables esper_alloc.

Options of this command come before SCRIPT. Processes that the program starts are not
audited: under torchrun, start each one with `torchrun ... -m esper_alloc audit SCRIPT`.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "audit",
        help="run a Python script or module, and find unordered uses of GPU memory",
        description=DESCRIPTION,
        epilog="The exit code is the program's; 1 if that is 0 and something was found, or the\n"
        "program did not use CUDA, so that nothing was audited. 2: wrong usage.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s [--mode MODE] [--fence] [--json] [--output FILE] "
        "(SCRIPT | -m MODULE) [ARGS...]",
    )
    parser.add_argument(
        "--mode",
        choices=("collect", "warn", "raise"),
        default="collect",
        help="say everything at the end (collect, the default), warn as soon as something is "
        "found, or raise an exception in the program (raise)",
    )
    parser.add_argument(
        "--fence",
        action="store_true",
        help="also unmap memory after its free, so that a later access faults and is named; "
        "enables esper_alloc",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--output", metavar="FILE", help="write the findings to FILE, not to standard error"
    )
    add_program(parser, "file, directory or zip file")
    parser.set_defaults(run=run)


def _exit_code(error: SystemExit) -> int:
    """As the interpreter has it."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    if sys.stderr is not None:
        print(error.code, file=sys.stderr)
    return 1


def _run_program(start: Callable[[], Any]) -> tuple[int, Any]:
    """The program's exit code, and what keeps its variables alive."""
    try:
        return 0, start()
    except SystemExit as error:
        return _exit_code(error), error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        entry = error.__traceback__
        # Without the frames of this command and of runpy.
        while entry is not None and _is_ours(entry):
            entry = entry.tb_next
        if entry is None and isinstance(error, ImportError):  # there is no such program
            return complain("audit", error, 2), error
        error.__traceback__ = entry
        sys.excepthook(type(error), error, entry)  # the program may have set one
        return 1, error


def _is_ours(entry: Any) -> bool:
    file = entry.tb_frame.f_code.co_filename
    return file == __file__ or os.path.basename(file) in ("runpy.py", "<frozen runpy>")


def _starter(program: str, arguments: list[str], is_module: bool) -> Callable[[], Any]:
    """What runs the program. sys.argv and sys.path are as it expects them."""
    sys.argv = [program, *arguments]

    def look_first(folder: str) -> None:
        if not getattr(sys.flags, "safe_path", False):  # newer than Python 3.10
            sys.path[0] = folder

    if is_module:
        look_first(os.getcwd())
        return lambda: runpy.run_module(program, run_name="__main__", alter_sys=True)
    path = os.path.abspath(program)  # the program may change its directory
    if os.path.isfile(path):
        look_first(os.path.dirname(os.path.realpath(path)))
        if not _is_packed(path):
            return lambda: _run_source(path)
    return lambda: runpy.run_path(program, run_name="__main__")


def _is_packed(path: str) -> bool:
    """Whether a file is a zip file, or compiled."""
    with open(path, "rb") as file:
        magic = file.read(len(importlib.util.MAGIC_NUMBER))
    return magic == importlib.util.MAGIC_NUMBER or zipfile.is_zipfile(path)


def _run_source(path: str) -> Any:
    """As runpy would, but the module stays what it is until the process ends: what the program
    leaves to be done then may look for it."""
    main = ModuleType("__main__")
    vars(main).update(
        __file__=path, __loader__=SourceFileLoader("__main__", path), __builtins__=builtins
    )
    sys.modules["__main__"] = main
    with open(path, "rb") as file:
        # dont_inherit: without what this file imports from __future__.
        exec(compile(file.read(), path, "exec", dont_inherit=True), vars(main))
    return main


def _join_threads() -> None:
    """Waits for the program's threads, as the interpreter does when a program ends."""
    # Idle threads of concurrent.futures end only when they are told to.
    for tell in reversed(getattr(threading, "_threading_atexits", ())):
        tell()
    me = threading.current_thread()
    while others := [one for one in threading.enumerate() if one is not me and not one.daemon]:
        for thread in others:
            thread.join()


def _write(said: str, output: str | None) -> None:
    if output is not None:
        try:
            with open(output, "w", encoding="utf-8") as file:
                file.write(said + "\n")
            return
        except OSError as error:  # the program may have removed its folder
            complain("audit", _unwritten(output, error), 1)
    if sys.stderr is not None:
        print(said, file=sys.stderr)


def _unwritten(output: str, error: OSError) -> str:
    return f"--output {output}: {error.strerror or error}"


def run(args: argparse.Namespace) -> int:
    """Runs the program; returns the exit code."""
    from ..auditor.auditing import audit
    from ..installation.pytorch import hidden_cuda
    from ..torch_allocator.choices import ALL
    from ..torch_allocator.enabling import enable

    program, arguments = program_of(args)
    if not args.is_module and not os.path.exists(program):
        return complain("audit", f"there is no file {program}", 2)
    if not args.is_module and not os.access(program, os.R_OK):
        return complain("audit", f"{program} cannot be read by this user", 2)
    hidden = hidden_cuda()
    if args.fence and hidden is not None:
        return complain("audit", f"--fence needs esper_alloc, and {hidden.why}", 1)
    if args.output is not None:
        args.output = os.path.abspath(args.output)  # the program may change its directory
        if args.output.endswith(".py"):
            return complain("audit", f"--output {args.output} is a program: name another file", 2)
        try:
            if not Path(args.output).is_fifo():  # its reader would take this for the end
                open(args.output, "a").close()  # what is in it stays until the end
        except OSError as error:
            return complain("audit", _unwritten(args.output, error), 2)
    try:
        for choice in ALL:
            choice.in_environment(os.environ)
        if args.fence:
            enable()
        auditing = audit(mode=args.mode, fence=args.fence)
        report = auditing.__enter__()
    except (RuntimeError, ValueError) as error:
        # 2: a bad value in the environment
        return complain("audit", error, 2 if isinstance(error, ValueError) else 1)
    process, code, kept = os.getpid(), 0, None
    try:
        code, kept = _run_program(_starter(program, arguments, args.is_module))
        if os.getpid() == process:
            _join_threads()
    finally:
        # A child that the program forked comes here too. It is not audited.
        if os.getpid() == process:
            auditing.stop(kept if isinstance(kept, BaseException) else None)
            del kept
            if args.json or args.output or report.findings or report.fault:
                _write(report.json() if args.json else report.text(), args.output)
            elif code == 0 or (code != 2 and not report.used_cuda):
                _write(report.text(), None)
                if not report.used_cuda and hidden is not None:
                    _write(str(hidden), None)
    if os.getpid() != process:
        return code
    return code or int(bool(report.findings or report.fault or not report.used_cuda))
