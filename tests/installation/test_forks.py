"""Forks while another thread imports the package, or uses one of its functions first."""

import os
import textwrap
from pathlib import Path

import pytest
from processes import ROOT, python

#: The import of `slow` takes until the main thread forks, and some time.
BEGIN = """
import os, signal, sys, threading, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == slow:
            began.set()
            time.sleep(1)

def child_after_fork(use):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        use()
        os._exit(0)
    return os.waitpid(child, 0)[1]

began = threading.Event()
sys.meta_path.insert(0, Slow())
"""


def run(program: str, folder: Path) -> str:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "ESPER_ALLOC": ""}
    # Python 3.12 and newer warn of a fork beside other threads.
    env["PYTHONWARNINGS"] = "ignore::DeprecationWarning"
    done = python("-c", BEGIN + textwrap.dedent(program), env=env)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slow", "first", "use"),
    [
        ("esper_alloc.uses.use", "import esper_alloc", "esper_alloc.record_use"),
        ("esper_alloc.helpers.gather.plan", "import esper_alloc",
         "esper_alloc.GatherBatchIterator"),
        ("esper_alloc.auditor", "", "__import__('esper_alloc').audit"),
        ("torch", "import esper_alloc", "esper_alloc.is_enabled() or __import__('torch').x"),
    ],
)  # fmt: skip
def test_a_child_can_use_what_another_thread_was_importing(
    tmp_path: Path, slow: str, first: str, use: str
) -> None:
    if slow.startswith("esper_alloc.") and slow != "esper_alloc.auditor":
        pytest.importorskip("torch")
    else:
        (tmp_path / "torch.py").write_text("x = 1\n")
    program = f"""
        slow = {slow!r}
        {first}
        use = lambda: {use}
        thread = threading.Thread(target=use)
        thread.start()
        began.wait()
        print(child_after_fork(use))
        thread.join()
        """
    assert run(program, tmp_path) == "0\n"


def test_a_fork_inside_an_import_that_the_other_thread_waits_for_does_not_hang(
    tmp_path: Path,
) -> None:
    (tmp_path / "torch.py").write_text(
        "import __main__\n"
        "thread = __main__.threading.Thread(target=__main__.first_use)\n"
        "thread.start()\n"
        "__main__.began.wait()\n"
        "status = __main__.child_after_fork(lambda: None)\n"
        "cuda, __version__ = None, '2.11'\n"
    )
    program = """
        slow = "esper_alloc.uses.use"
        import esper_alloc
        signal.alarm(120)

        def first_use():
            try:
                esper_alloc.record_use
            except Exception:
                pass  # this torch is none
        import torch
        print(torch.status)
        """
    assert run(program, tmp_path) == "0\n"


def test_a_thread_may_fork_in_the_midst_of_its_own_import(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import __main__\nstatus = __main__.child_after_fork(lambda: None)\n"
    )
    program = """
        slow = None
        import esper_alloc, torch
        print(torch.status)
        """
    assert run(program, tmp_path) == "0\n"


def test_locks_of_the_helpers_are_free_in_a_child() -> None:
    pytest.importorskip("torch")
    from esper_alloc.helpers.cudagraph_outputs import wrapper
    from esper_alloc.helpers.gather import resident

    with resident._residents_lock, wrapper._steps._lock:  # another thread's, as it were
        wrapper._steps._open += 1
        child = os.fork()
        if child == 0:
            free = resident._residents_lock.acquire(blocking=False)
            free = free and wrapper._steps._lock.acquire(blocking=False)
            os._exit(0 if free and wrapper._steps._open == 0 else 1)
        wrapper._steps._open -= 1
    assert os.waitpid(child, 0)[1] == 0
