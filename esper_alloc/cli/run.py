"""``python -m esper_alloc run``: an unmodified program on esper_alloc.

The program is not run inside this process but in place of it: the interpreter
is executed again with the program's own command line, so that ``sys.argv``,
``__main__``, tracebacks, signals, the process id and the exit code are those
of a direct run because it *is* one. What differs is the environment: a
directory in front of ``PYTHONPATH`` makes each Python that inherits it enable
esper_alloc as soon as torch is imported (see _startup/sitecustomize.py).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..installation.pytorch import difference, hidden_cuda, too_old
from ..recorder import RECORD, RECORD_PID
from ..torch_allocator.choices import (
    ALL,
    ALLOWANCE,
    BLACK_BOX,
    MEMORY_SAVER,
    MONITOR,
    SEGMENTS,
    USES,
    Choice,
    Size,
)
from ..torch_allocator.enabling import SWITCHED_OFF, is_switched_off, wrong_switch
from .complaint import complain
from .diagnosis.facts import Facts, gather_shim
from .program import add_program, program_of

STARTUP = Path(__file__).resolve().parents[1] / "_startup"

DESCRIPTION = """\
Runs SCRIPT, or with -m a module, with ARGS, on esper_alloc, together with the
Python processes that it starts: subprocesses, multiprocessing and DataLoader
workers, torchrun's workers, those of a Ray cluster that it starts itself.
Options of this command come before SCRIPT.

`run` reaches a process through its environment (PYTHONPATH, ESPER_ALLOC). It does
not reach one that is started with another environment, or with python -I, -E or
-S. Set ESPER_ALLOC=0 in a child's environment to leave that child alone, and in that
of `run` to run the program as python does.
"""

KEEPS_ITS_OWN = "PyTorch keeps its own allocator"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "run",
        help="run a Python script or module, unmodified, on esper_alloc",
        description=DESCRIPTION,
        epilog="The exit code, or the signal that ends it, is that of the program.\n"
        "1: esper_alloc cannot work with this PyTorch; nothing was run. 2: wrong usage.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s [--allowance SIZE|off] [--segments KIND] [--uses HOW] "
        "[--black-box SIZE|off] [--monitor] [--record FILE] [--memory-saver] "
        "(SCRIPT | -m MODULE) [ARGS...]",
    )
    parser.add_argument(
        "--allowance",
        metavar="SIZE|off",
        type=size_of(ALLOWANCE),
        help="how much of a stream's free memory may wait for other streams' work; beyond that "
        f"the host waits for it, before memory grows (default: {ALLOWANCE.default}): bytes, a "
        "size such as 128MiB, 1 GiB or 512M, or off; the same as ESPER_ALLOC_ALLOWANCE",
    )
    parser.add_argument(
        "--segments",
        choices=SEGMENTS.names,
        help="where memory comes from: reserved addresses with pages where they are needed "
        "(mapped), one driver allocation for each segment (classic), or, by default, mapped where "
        "the driver can and no option of PyTorch's asks for classic ones (auto); the same as "
        "ESPER_ALLOC_SEGMENTS",
    )
    parser.add_argument(
        "--uses",
        choices=USES.names,
        help="how uses on other streams become known: the program marks them (marked, the "
        "default), or every operator of PyTorch's is seen (automatic); the same as "
        "ESPER_ALLOC_USES",
    )
    parser.add_argument(
        "--black-box",
        metavar="SIZE|off",
        type=size_of(BLACK_BOX),
        help="the host memory in which the latest events are recorded (default: "
        f"{BLACK_BOX.default}), or off; the same as ESPER_ALLOC_BLACK_BOX",
    )
    parser.add_argument(
        "--monitor",
        action="store_const",
        const="1",
        help="let the command `top` watch the program; the same as ESPER_ALLOC_MONITOR=1",
    )
    parser.add_argument(
        "--record",
        metavar="FILE",
        help="write the black box to FILE at the end of the program, at SIGUSR2 and at a fatal "
        "signal; other ranks and children have their number in the name of theirs",
    )
    parser.add_argument(
        "--memory-saver",
        action="store_const",
        const="1",
        help="let the program find esper_alloc's sleep where it imports torch_memory_saver; the "
        "same as ESPER_ALLOC_MEMORY_SAVER=1",
    )
    add_program(
        parser,
        "file, directory or zip file, or a Python command on PATH such as torchrun; - for stdin",
    )
    parser.set_defaults(run=run)


def size_of(choice: Size) -> Callable[[str], str]:
    """The type of an option that is a size."""

    def size(text: str) -> str:
        if not choice.accepts(text):
            raise argparse.ArgumentTypeError(f"{text!r} {choice.refusal} {choice.choices}")
        return text

    return size


def interpreter_options(orig_argv: Sequence[str], argv: Sequence[str]) -> list[str]:
    """The options of the interpreter itself, such as ``-u`` or ``-X dev``.

    `orig_argv` is the whole command line, `argv` is sys.argv. Empty unless
    the command line is that of ``python -m esper_alloc`` or of its script.
    """
    options = list(orig_argv[1 : len(orig_argv) - len(argv) + 1])
    if options and os.path.basename(options[-1]) == "esper-alloc":
        return options[:-1]
    if options and options[-1] == "esper_alloc":
        options.pop()
        flag = options.pop() if options else ""
    elif options and options[-1].endswith("esper_alloc"):
        flag = options.pop().removesuffix("esper_alloc")
    else:
        return []
    if not (flag.startswith("-") and flag.endswith("m")):
        return []
    if flag != "-m":  # -um and the like
        options.append(flag[:-1])
    return options


def child_environment(
    environment: Mapping[str, str], chosen: Mapping[Choice, str | None]
) -> dict[str, str]:
    """`environment` changed so that Pythons that inherit it use esper_alloc."""
    child = dict(environment)
    startup = str(STARTUP)
    inherited = child.get("PYTHONPATH")
    if not inherited:
        child["PYTHONPATH"] = startup
    elif startup not in inherited.split(os.pathsep):
        child["PYTHONPATH"] = startup + os.pathsep + inherited
    child["ESPER_ALLOC"] = "1"
    for choice, value in chosen.items():
        if value is not None:
            child[choice.variable] = value
    return child


def importing(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` changed so that the program can import esper_alloc from a clone, too."""
    clone = Path(__file__).parents[2]
    paths = [path for path in (environment.get("PYTHONPATH"),) if path]
    if (clone / "setup.py").exists():
        paths.append(str(clone))
    return {**environment, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}


def installed_torch() -> str | None:
    """The version of the torch that a program would import, without importing
    it, which takes seconds: "2.11.0+cu130". None: there is none, or nobody
    says which."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def mismatch(torch: str | None, shim: Facts, uses: str | None) -> str | None:
    """Why esper_alloc cannot serve this torch; None when it can, or when there
    is no GPU memory to serve. Marked uses can be had without the PyTorch part that fits,
    and enable() warns then."""
    _, _, variant = (torch or "").partition("+")
    if torch is None or variant.startswith("cpu"):
        return None
    if variant.startswith("rocm"):
        return f"torch {torch} is built for AMD GPUs, which are not supported"
    if (old := too_old(torch)) is not None:
        return old
    if importlib.util.find_spec("esper_alloc._build") is None:
        return "this is its source folder, where nothing was built: `cd` elsewhere, or `make setup`"
    if not shim["built"]:
        return f"it was installed without its PyTorch part, and this is torch {torch}"
    differs = difference(shim["built_for"], torch, None)
    if differs is not None and uses == "automatic":
        return f"it {differs}, where uses cannot be automatic"
    return None


def no_cuda(torch: str | None) -> str | None:
    """Why there is no CUDA memory here, whatever the program does; None where there may be."""
    if torch is not None and torch.endswith("+cpu"):
        return f"torch {torch} is built without CUDA"
    hidden = hidden_cuda()
    return None if hidden is None else hidden.why


def refusal() -> str | None:
    """Why this interpreter cannot reach a program, or must not; None when it can."""
    if (wrong := wrong_switch()) is not None:
        return wrong
    if sys.flags.ignore_environment or sys.flags.no_site:
        return (
            "python -I, -E and -S hide the environment that `run` works through: "
            "start it without them, or call esper_alloc.enable() in the program"
        )
    if os.pathsep in str(STARTUP):
        return f"{STARTUP} contains {os.pathsep!r}, which PYTHONPATH cannot express: move it"
    return None


def unwritable(record: str | None, black_box: str | None) -> str | None:
    """Why nothing could be recorded into a file; None when it can be."""
    if record is None:
        return None
    if (black_box or os.environ.get(BLACK_BOX.variable)) == "off":
        return f"--record needs the black box, which {BLACK_BOX.variable} or --black-box turns off"
    folder = os.path.dirname(os.path.abspath(record))
    no_file = os.path.exists(record) and not os.path.isfile(record)  # a folder, a device
    if no_file or record.endswith(".py") or not os.access(folder, os.W_OK):
        return f"--record {record}: no file can be written there"
    return None


def run(args: argparse.Namespace) -> int:
    """Replaces this process by the program; returns only when refusing to."""
    if is_switched_off():
        nothing = "" if args.record is None else f", and nothing is recorded into {args.record}"
        complain("run", f"{SWITCHED_OFF}: {KEEPS_ITS_OWN}{nothing}", 0)
        return execute(args, importing(os.environ))
    problem = refusal() or unwritable(args.record, args.black_box)
    if problem is not None:
        return complain("run", problem, 2)
    chosen = {ALLOWANCE: args.allowance, SEGMENTS: args.segments, USES: args.uses}
    chosen |= {BLACK_BOX: args.black_box, MONITOR: args.monitor, MEMORY_SAVER: args.memory_saver}
    environment = child_environment(os.environ, chosen)
    if args.record is not None:
        environment[RECORD] = os.path.abspath(args.record)
        environment[RECORD_PID] = str(os.getpid())  # this process becomes the program
    try:
        for choice in ALL:
            choice.in_environment(environment)
    except ValueError as error:
        return complain("run", error, 2)
    torch = installed_torch()
    problem = mismatch(torch, gather_shim(), environment.get(USES.variable))
    if problem is not None:
        return complain("run", f"{problem}; `python -m esper_alloc doctor` has the remedy", 1)
    missing = no_cuda(torch)
    if missing is not None:
        nothing = "" if args.record is None else f", and nothing is recorded into {args.record}"
        complain("run", f"{missing}: {KEEPS_ITS_OWN}{nothing}", 0)
    return execute(args, environment)


def is_program(path: str) -> bool:
    """Whether Python would run it: vLLM's sources, say, have a folder with the command's name."""
    if os.path.isdir(path):
        path = os.path.join(path, "__main__.py")
    return os.path.exists(path)


def is_python(command: str) -> bool:
    """Whether a command is a Python script, by its first line, or by the second where pip and uv
    write one for the shell first."""
    try:
        with open(command, "rb") as file:
            first, second = file.readline(300), file.readline(300)
    except OSError:  # sudo, which may only be executed
        return False
    return first.startswith(b"#!") and (b"python" in first or second.startswith(b"'''exec'"))


def execute(args: argparse.Namespace, environment: dict[str, str]) -> int:
    """Becomes the program."""
    command = [sys.executable, *interpreter_options(sys.orig_argv, sys.argv)]
    program, arguments = program_of(args)
    if not args.is_module and not is_program(program):
        # Perhaps a script of pip's, such as vllm: it stands beside this Python.
        places = (os.path.dirname(sys.executable), environment.get("PATH", ""))
        found = shutil.which(program, path=os.pathsep.join(places))
        if found is not None and not is_python(found):
            return complain(
                "run",
                f"{found} is no Python command: start it without `run`, and write "
                "`python -m esper_alloc run` in place of `python` where it starts Python",
                2,
            )
        program = found or program
    command += ["-m", program] if args.is_module else [program]
    command += arguments
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it is where it was closed
            stream.flush()
    os.execve(sys.executable, command, environment)
