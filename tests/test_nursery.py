"""The nursery of the GPU tests: a forked child runs code as a fresh `python -c` does."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu"))
import helper
import scenario


@pytest.fixture(scope="module")
def nursery() -> Iterator[helper.Nursery]:
    made = helper.Nursery()
    yield made
    made.close()


def run(
    nursery: helper.Nursery, code: str, timeout: float = 600.0, **env: str
) -> tuple[int, str, str]:
    done = nursery.run(textwrap.dedent(code), helper.environment(env), timeout)
    return done.returncode, done.stdout, done.stderr


def test_code_is_the_main_module(nursery: helper.Nursery) -> None:
    code = """
    import sys, os
    def double(x): return helper(2 * x)
    def helper(x): return x
    print(__name__, sys.argv, double(21), sys.modules["__main__"].double is double)
    print("beside", file=sys.stderr)
    print(sorted(name for name in globals() if not name.startswith("__")))
    """
    status, out, err = run(nursery, code)
    assert (status, err) == (0, "beside\n")
    assert out == "__main__ ['-c'] 42 True\n['double', 'helper', 'os', 'sys']\n"


def test_children_do_not_see_each_other(nursery: helper.Nursery) -> None:
    first = run(
        nursery,
        "import os; import builtins; builtins.left = 1; os.environ['LEFT'] = '1'; print(os.getpid())",
    )
    second = run(
        nursery, "import os; print(os.getpid(), 'LEFT' in os.environ, 'left' in dir(__builtins__))"
    )
    assert first[0] == second[0] == 0
    pid, *rest = second[1].split()
    assert pid != first[1].strip() and rest == ["False", "False"]


def test_torch_is_there_and_cuda_untouched(nursery: helper.Nursery) -> None:
    code = """
    import sys
    there = "torch" in sys.modules
    import torch, esper_alloc
    print(there, torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork(), esper_alloc.is_enabled())
    print(torch.ones(1 << 20).sum().item())
    """
    assert run(nursery, code) == (0, "True False False False\n1048576.0\n", "")


@pytest.mark.parametrize(
    ("code", "status"),
    [("import sys; sys.exit(3)", 3), ("import os; os._exit(4)", 4), ("import os; os.abort()", -6)],
)
def test_how_it_ends_is_told(nursery: helper.Nursery, code: str, status: int) -> None:
    assert run(nursery, code)[0] == status


def test_an_exception_is_printed(nursery: helper.Nursery) -> None:
    status, out, err = run(nursery, "print('so far')\nraise ValueError('what is wrong')")
    assert status == 1 and out == "so far\n"
    assert err.startswith("Traceback") and err.endswith("ValueError: what is wrong\n")


def test_what_runs_at_exit_runs(nursery: helper.Nursery) -> None:
    assert run(nursery, "import atexit; atexit.register(print, 'at exit')") == (0, "at exit\n", "")


@pytest.mark.slow
def test_a_hang_is_ended_with_its_children(nursery: helper.Nursery) -> None:
    code = """
    import subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    def hang(): time.sleep(600)
    hang()
    """
    with pytest.raises(helper.subprocess.TimeoutExpired) as caught:
        run(nursery, code, timeout=10)
    assert "in hang" in str(caught.value.stderr)
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(int(caught.value.output), 0)
            helper.subprocess.run(["sleep", "0.05"])
    assert run(nursery, "print(1)") == (0, "1\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["the one who asks", "the nursery"])
def test_nothing_outlives_a_run_that_is_killed(whom: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    child = f"""
    import os, time
    alive = os.open({str(pipe)!r}, os.O_WRONLY)
    os.write(alive, b"%d" % os.getpid())
    time.sleep(600)
    os.write(alive, b"outlived")
    """
    asking = f"""
    import sys
    sys.path.insert(0, {str(Path(helper.__file__).parent)!r})
    import helper
    nursery = helper.Nursery()
    print(nursery._process.pid, flush=True)
    nursery.run({textwrap.dedent(child)!r}, helper.environment(None), 600)
    """
    process = helper.subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(asking)], text=True, stdout=helper.subprocess.PIPE
    )
    assert process.stdout
    with process.stdout:
        pids = {"the one who asks": process.pid, "the nursery": int(process.stdout.readline())}
    with pipe.open("rb", buffering=0) as alive:
        pids["the child"] = int(alive.read(20))
        try:
            os.kill(pids[whom], signal.SIGKILL)
            assert alive.read(20) == b""  # the other end is closed: the child has ended
        finally:
            for pid in pids.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def test_environment_and_spawned_processes(nursery: helper.Nursery, tmp_path: Path) -> None:
    script = tmp_path / "module_with_work.py"
    script.write_text("def work(x): return 2 * x\n")
    code = f"""
    import multiprocessing, os, sys
    sys.path.insert(0, {str(tmp_path)!r})
    from module_with_work import work
    if __name__ == "__main__":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(os.environ["OUT_FOLDER"], pool.map(work, [1, 2]))
    """
    assert run(nursery, code, OUT_FOLDER="here") == (0, "here [2, 4]\n", "")


@pytest.mark.slow
def test_an_interrupted_run_does_not_answer_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    idle: dict[frozenset[tuple[str, str]], list[helper.Nursery]] = {}
    monkeypatch.setattr(helper, "_idle", idle)
    env = helper.environment(None)
    first = helper.in_nursery("print(1)", env)
    ((mine,),) = idle.values()

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            helper.in_nursery("import time; time.sleep(5); raise SystemExit(7)", env)
    finally:
        signal.signal(signal.SIGALRM, before)
    again = helper.in_nursery("print(2)", env)
    assert (first.stdout, again.returncode, again.stdout) == ("1\n", 0, "2\n")
    ((another,),) = idle.values()
    assert another is not mine
    another.close()


def test_one_serves_whoever_needs_the_same_import(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted:
        def __init__(self, env: dict[str, str]) -> None:
            made.append(env)

        def run(self, code: str, env: object, timeout: float) -> None:
            if code == "busy":
                helper.in_nursery("", {})

    made: list[dict[str, str]] = []
    monkeypatch.setattr(helper, "Nursery", Counted)
    monkeypatch.setattr(helper, "_idle", {})
    late = {"ESPER_ALLOC_SEGMENTS": "classic", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    late |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_CACHE_DIR": "x"}
    for env, count in (
        ({}, 1), ({"OUT_FOLDER": "x"}, 1), (late, 1), ({"ESPER_ALLOC": "1"}, 2),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, 3), ({"ESPER_ALLOC": "1", **late}, 3),
    ):  # fmt: skip
        helper.in_nursery("", env)
        assert len(made) == count, env
    helper.in_nursery("busy", {})  # meanwhile another is made
    assert len(made) == 4


def test_it_is_used_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    monkeypatch.setattr(helper, "in_nursery", lambda code, env: used.append(code) or DONE)
    monkeypatch.setattr(helper.subprocess, "run", lambda *how, **more: DONE)
    DONE = helper.subprocess.CompletedProcess([], 0, "printed", "")
    for wanted, env, count in (
        ("", None, 0), ("0", None, 0), ("1", None, 1), ("1", {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, 2),
        ("1", {"PYTORCH_CUDA_ALLOC_CONF": ""}, 3),
    ):  # fmt: skip
        monkeypatch.setenv("ESPER_TEST_NURSERY", wanted)
        assert helper.run_python("pass", env=env) == "printed"
        assert len(used) == count


def test_what_failed_is_not_run_again() -> None:
    ran: list[int] = []

    @scenario.once
    def half(number: int) -> int:
        ran.append(number)
        assert number % 2 == 0, f"{number} is odd"
        return number // 2

    assert half(4) == half(4) == 2
    for _ in range(2):
        with pytest.raises(AssertionError, match="3 is odd"):
            half(3)
    assert ran == [4, 3]
