"""Python code in fresh processes: the allocator is chosen once per process."""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Seconds after which a process is taken to hang: ten times what any takes beside a dozen others.
#: Whoever rents the GPU may know better.
HANG_S = float(os.environ.get("ESPER_TEST_HANG_S", "") or 1200.0)

#: Variables that would choose or tune an allocator behind a test's back.
FOREIGN = (
    "ESPER_ALLOC", "ESPER_ALLOC_ALLOWANCE", "ESPER_ALLOC_SEGMENTS", "ESPER_ALLOC_USES",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUDA_LAUNCH_BLOCKING",
)  # fmt: skip


#: Beginnings of the variables that a forked child can be given: nothing has read them when torch
#: and esper_alloc have been imported. All but ESPER_ALLOC, which enables at the import.
READ_LATE = (
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES", "ESPER_", "SIM_"),
    "PYTEST_CURRENT_TEST",
    *("OUT_FOLDER", "SEGMENT_ACTION", "CUBLAS_WORKSPACE_CONFIG", "NCCL_", "TORCH_NCCL_"),
    *("TORCHINDUCTOR_CACHE_DIR", "TMPDIR", "FILE", "RANK", "LOCAL_RANK"),
)


def environment(env: Mapping[str, str] | None) -> dict[str, str]:
    """This process's, without allocator settings, and `env`."""
    full = {key: value for key, value in os.environ.items() if key not in FOREIGN}
    if any((ROOT / "esper_alloc").glob("_core*.so")):  # built in place; else installed
        full["PYTHONPATH"] = os.pathsep.join(
            part for part in (str(ROOT), full.get("PYTHONPATH", "")) if part
        )
    # A pool of compiling processes costs more than the small functions of the tests.
    full.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Where many processes run, a thread for each core slows small operations on the CPU.
    full.setdefault("OMP_NUM_THREADS", "4")
    # The programs are too small to be held back by themselves: the default allowance would let each
    # grow. Tests of the default say so.
    full["ESPER_ALLOC_ALLOWANCE"] = "0"
    full.update(env or {})
    return full


class Nursery:
    """Runs code in forked children of one process that has imported torch: nursery.py."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("nursery.py"))],
            env=environment(None) if env is None else env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        atexit.register(self.close)

    def run(
        self, code: str, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """As subprocess.run() of `python -c code`; raises TimeoutExpired as it does. After
        another exception it runs nothing more."""
        assert self._process.stdin and self._process.stdout
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "stdout"), Path(folder, "stderr")
            request = {"code": code, "env": dict(env), "stdout": str(out), "stderr": str(err)}
            self._process.stdin.write(json.dumps({**request, "timeout": timeout}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, f"the nursery ended with {self._process.wait()}"
            printed = [
                one.read_text(errors="replace") if one.exists() else "" for one in (out, err)
            ]
        code_of_exit = json.loads(answer)
        if code_of_exit is None:
            raise subprocess.TimeoutExpired("python -c", timeout, *printed)
        return subprocess.CompletedProcess(["python", "-c"], code_of_exit, *printed)

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def kill(self) -> None:
        """What it would still answer is no answer to the next request."""
        self._process.kill()
        self.close()


#: Those that are running nothing, by what they had in their environment when they started.
_idle: dict[frozenset[tuple[str, str]], list[Nursery]] = {}


def in_nursery(
    code: str, env: Mapping[str, str], timeout: float = HANG_S
) -> subprocess.CompletedProcess[str]:
    """Runs code in a nursery whose torch was imported with this environment. For any thread."""
    early = frozenset(
        (name, value)
        for name, value in env.items()
        if name == "ESPER_ALLOC" or not name.startswith(READ_LATE)
    )
    idle = _idle.setdefault(early, [])
    try:
        mine = idle.pop()
    except IndexError:
        mine = Nursery(dict(early))
    try:
        done = mine.run(code, env, timeout)
    except subprocess.TimeoutExpired:
        idle.append(mine)
        raise
    except BaseException:
        mine.kill()
        raise
    idle.append(mine)
    return done


def nursery_is_wanted() -> bool:
    return os.environ.get("ESPER_TEST_NURSERY", "") not in ("", "0")


def run_python(code: str, *, env: Mapping[str, str] | None = None) -> str:
    """Runs `code` in a Python process of its own and returns what it printed: see run_fresh().

    With ESPER_TEST_NURSERY=1 that is a forked child of a process which imported torch.
    """
    if not nursery_is_wanted():
        return run_fresh("-c", code, env=env)
    return printed_by(lambda: in_nursery(code, environment(env)))


def text(output: bytes | str | None) -> str:
    """The end of what a process printed until it was stopped."""
    return (output.decode(errors="replace") if isinstance(output, bytes) else output or "")[-5000:]


def run_fresh(*arguments: str, env: Mapping[str, str] | None = None) -> str:
    """Runs a fresh Python with these arguments and returns what it printed.

    `env` is added to the environment, from which allocator settings have been
    taken out. A failing process fails the test, with the end of its output.
    """
    full = environment(env)
    return printed_by(
        lambda: subprocess.run(
            [sys.executable, *arguments], env=full, capture_output=True, text=True, timeout=HANG_S
        )
    )


def printed_by(run: Callable[[], subprocess.CompletedProcess[str]]) -> str:
    """What a process printed; a failing one fails the test."""
    try:
        done = run()
    except subprocess.TimeoutExpired as error:
        raise AssertionError(
            f"no end within {HANG_S:.0f} s (a hang?)\n{text(error.stdout)}{text(error.stderr)}"
        ) from error
    assert done.returncode == 0, (
        f"exit status {done.returncode}\n--- stdout\n{done.stdout[-3000:]}"
        f"\n--- stderr\n{done.stderr[-5000:]}"
    )
    return done.stdout
