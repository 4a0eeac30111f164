"""The nursery of the GPU tests: a forked child runs code as a fresh `python -c` does."""

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
    import atexit, os, sys
    def double(x): return helper(2 * x)
    def helper(x): return x
    print(__name__, sys.argv, double(21), sys.modules["__main__"].double is double)
    atexit.register(print, "beside", file=sys.stderr)
    print(sorted(name for name in globals() if not name.startswith("__")))
    """
    status, out, err = run(nursery, code)
    assert (status, err) == (0, "beside\n")
    assert out == "__main__ ['-c'] 42 True\n['atexit', 'double', 'helper', 'os', 'sys']\n"


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


@pytest.mark.parametrize(
    ("code", "status"),
    [("import sys; sys.exit(3)", 3), ("import os; os._exit(4)", 4), ("import os; os.abort()", -6)],
)
def test_how_it_ends_is_told(nursery: helper.Nursery, code: str, status: int) -> None:
    assert run(nursery, code)[0] == status


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
