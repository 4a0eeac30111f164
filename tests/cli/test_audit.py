"""``python -m esper_alloc audit``: the program runs as it would, and its exit code says what was
found. On the simulated device, with PyTorch's own allocator."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from on_sim import build
from processes import python

from esper_alloc.cli.main import main

TESTS = Path(__file__).resolve().parents[1]


RACE = """
import sys
import torch
main, side = torch.cuda.current_stream(), torch.cuda.Stream()
x = torch.empty(1 << 16, device="cuda").zero_()
with torch.cuda.stream(side):
    y = x.clone()
torch.cuda.synchronize()
"""
CORRECT = RACE.replace("with torch", "side.wait_stream(main)\nwith torch")


#: Audits a program.
Audit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def audit(library: Path, tmp_path: Path) -> Audit:
    """`python -m esper_alloc audit` with these options, for a program that is written, if any, and
    its arguments. Forked: in a process that has imported torch already, for what does not depend on
    that."""

    def run(
        program: str | None, *arguments: str, options: tuple[str, ...] = (),
        folder: Path = tmp_path, forked: bool = False,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        if program is not None:
            (folder / "job.py").write_text(program)
        script = () if program is None or "-m" in options else ("job.py",)
        command = ["audit", *options, *script, *arguments]
        env = {**os.environ, **build.environment(library)}
        if not forked:
            return python("-m", "esper_alloc", *command, env=env, cwd=folder)
        begin = f"import os, sys; os.chdir({str(folder)!r}); sys.path[0] = {str(folder)!r}"
        call = f"from esper_alloc.cli.main import main; sys.exit(main({command!r}))"
        return build.program(f"{begin}; {call}", env)

    return run


NOTHING_TO_AUDIT = (
    "esper_alloc audit: the program did not use CUDA, so there was nothing to audit\n"
)


@pytest.mark.parametrize(
    "options, printed, said",
    [
        ((), "[]\n", "1 finding"),
        (("-m", "job", "a"), "['a']\n", "1 finding"),
        (("--mode", "raise"), "", "AuditError"),
    ],
)
def test_what_is_found_is_said_and_the_exit_code_is_1(
    audit: Audit, options: tuple[str, ...], printed: str, said: str
) -> None:
    done = audit(RACE + "print(sys.argv[1:])\n", options=options, forked=True)
    assert (done.returncode, done.stdout) == (1, printed)
    assert said in done.stderr and "job.py:7 in <module>" in done.stderr


def test_a_correct_program_ends_as_always(audit: Audit, tmp_path: Path) -> None:
    done = audit(CORRECT + "print(sys.argv, __name__, sys.path[0])\n", "a", "-b")
    assert (done.returncode, done.stderr) == (0, "esper_alloc audit: 0 findings\n")
    assert done.stdout == f"['job.py', 'a', '-b'] __main__ {tmp_path}\n"


@pytest.mark.slow
def test_modules_are_found_as_python_finds_them(library: Path, tmp_path: Path) -> None:
    real, extra = tmp_path / "real", tmp_path / "extra"
    for folder in (real, extra):
        folder.mkdir()
        (folder / f"in_{folder.name}.py").touch()
    (real / "script.py").write_text("import in_real\n")
    (tmp_path / "link.py").symlink_to(real / "script.py")
    at = ("-m", "esper_alloc", "audit", "link.py")
    env = {**os.environ, **build.environment(library)}
    assert python(*at, env=env, cwd=tmp_path).stderr == NOTHING_TO_AUDIT
    if sys.version_info < (3, 11):
        return
    (real / "script.py").write_text(f"import in_extra, sys\nassert {str(real)!r} not in sys.path\n")
    env["PYTHONPATH"] = f"{extra}{os.pathsep}{env.get('PYTHONPATH') or TESTS.parent}"
    env["PYTHONSAFEPATH"] = "1"
    assert python(*at, env=env, cwd=tmp_path).stderr == NOTHING_TO_AUDIT


def test_annotations_are_what_the_program_says(audit: Audit) -> None:
    done = audit("def f(x: int): pass\nprint(f.__annotations__)\n")
    assert done.stdout == "{'x': <class 'int'>}\n"


def test_a_program_without_cuda_had_nothing_to_audit(audit: Audit) -> None:
    done = audit("import torch\n", forked=True)
    assert (done.returncode, done.stderr) == (1, NOTHING_TO_AUDIT)
    done = audit("import torch\n", options=("--json",), forked=True)
    assert done.returncode == 1
    assert json.loads(done.stderr) == {"complete": False, "used_cuda": False, "findings": []}
    done = audit("raise ValueError('early')\n", forked=True)
    assert done.returncode == 1
    assert "ValueError: early\n" in done.stderr and done.stderr.endswith(NOTHING_TO_AUDIT)
    done = audit("import torch, sys\nsys.exit(5)\n", options=("--json",), forked=True)
    assert done.returncode == 5


@pytest.mark.parametrize(
    "end, code, said",
    [
        ("sys.exit(7)", 7, ""),
        ("sys.exit('bye')", 1, "bye"),
        ("sys.exit()", 1, ""),
        ("raise KeyError('mine')", 1, 'job.py", line'),
        ("raise KeyboardInterrupt", 130, ""),
    ],
)
def test_the_programs_end_is_kept(audit: Audit, end: str, code: int, said: str) -> None:
    done = audit(RACE + end)
    assert done.returncode == code
    assert said in done.stderr and "1 finding" in done.stderr
    assert "runpy" not in done.stderr


def test_a_correct_program_keeps_its_exit_code(audit: Audit) -> None:
    assert audit(CORRECT + "sys.exit(7)", forked=True).returncode == 7


def test_json_to_a_file(audit: Audit, tmp_path: Path) -> None:
    done = audit(RACE, options=("--json", "--output", "found.json"), forked=True)
    assert (done.returncode, done.stderr) == (1, "")
    [finding] = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert finding["kind"] == "read-early"
    assert finding["place"]["frames"][0]["line"] == 7


def test_an_error_has_the_frames_of_the_program_wherever_it_lies(
    audit: Audit, tmp_path: Path
) -> None:
    folder = tmp_path / "runpython"
    folder.mkdir()
    done = audit("def fail():\n    raise KeyError('mine')\nfail()\n", folder=folder)
    assert done.returncode == 1
    assert [line.split(", in ")[1] for line in done.stderr.splitlines() if ", in " in line] == [
        "<module>", "fail",
    ]  # fmt: skip


MOVES = """
import atexit, inspect, os, pickle, sys
class Mine: pass
def source(): return 1
os.chdir(os.path.dirname(os.getcwd()))
print(os.path.isabs(__file__), os.path.exists(__file__), inspect.getsource(source).strip())
print(sys.argv, isinstance(pickle.loads(pickle.dumps(Mine())), Mine))
atexit.register(lambda: print(type(pickle.loads(pickle.dumps(Mine()))).__name__))
sys.excepthook = lambda kind, error, trace: print("hook", kind.__name__)
raise KeyError
"""


def test_a_program_that_changes_its_directory_runs_as_it_does_alone(
    audit: Audit, tmp_path: Path
) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    ours = audit(MOVES, "--", "a", options=("--json", "--output", "out.json"), folder=folder)
    alone = python("job.py", "--", "a", cwd=folder)
    assert (ours.stdout, ours.stderr) == (alone.stdout, alone.stderr) and alone.stdout
    assert ours.returncode == alone.returncode == 1
    assert json.loads((folder / "out.json").read_text())["findings"] == []


def test_a_syntax_error_is_shown_as_python_shows_it(audit: Audit) -> None:
    done = audit("x = (\n")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].endswith('job.py", line 1')
    shown = done.stderr.removesuffix(NOTHING_TO_AUDIT)
    assert "SyntaxError" in shown.splitlines()[-1]


@pytest.mark.parametrize(
    "program, said",
    [
        (("-m", "none.such"), "none.such"),
        (("none.py",), "there is no file none.py"),
        (("folder",), "can't find '__main__' module in 'folder'"),
    ],
)
def test_what_cannot_be_run(
    audit: Audit, tmp_path: Path, program: tuple[str, ...], said: str
) -> None:
    (tmp_path / "folder").mkdir()
    done = audit(None, *program, forked=True)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("esper_alloc audit: ") and said in line


def test_a_script_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read everything
    assert main(["audit", __file__]) == 2
    assert capsys.readouterr().err == f"esper_alloc audit: {__file__} cannot be read by this user\n"


def test_a_report_whose_folder_has_gone_is_printed(audit: Audit, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    end = "import shutil\nshutil.rmtree('gone')\n"
    done = audit(RACE + end, options=("--output", "gone/found"), forked=True)
    why = f"esper_alloc audit: --output {tmp_path}/gone/found: No such file or directory\n"
    assert done.returncode == 1 and done.stderr.startswith(why) and "1 finding" in done.stderr


def test_a_report_into_a_pipe_is_whole(audit: Audit, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as cat:
        audit(RACE, options=("--output", "pipe"), forked=True)
        assert b"1 finding" in cat.communicate()[0]


@pytest.mark.parametrize("name", ["audit", "run"])
def test_only_the_program_has_to_be_named(name: str) -> None:
    done = python("-m", "esper_alloc", name)
    assert done.returncode == 2
    assert done.stderr.endswith("error: the following arguments are required: SCRIPT\n")


@pytest.mark.parametrize(
    "options", [("--output", "none/found.json"), ("--output", "job.py"), ("--mode", "loud")]
)
def test_wrong_usage(audit: Audit, options: tuple[str, ...]) -> None:
    done = audit("print('ran')", options=options, forked=True)
    assert done.returncode == 2 and done.stdout == ""
    assert options[0] in done.stderr or "found.json" in done.stderr


@pytest.mark.parametrize("options", [("--fence",), ()])
def test_a_bad_value_of_the_environment_is_wrong_usage(
    audit: Audit, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPER_ALLOC_SEGMENTS", "fast")
    done = audit("print('ran')", options=options, forked=True)
    assert (done.returncode, done.stdout) == (2, "")
    why = "ESPER_ALLOC_SEGMENTS=fast is not a kind of segments: use auto, mapped or classic"
    assert done.stderr == f"esper_alloc audit: {why}\n"


def test_without_a_driver_it_says_so(audit: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = audit("print('ran')", forked=True)
    assert (done.returncode, done.stdout) == (1, "ran\n")
    why = "CUDA_VISIBLE_DEVICES hides every GPU"
    assert done.stderr == f"{NOTHING_TO_AUDIT}{why}: unset it\n"
    done = audit("print('ran')", options=("--fence",), forked=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"esper_alloc audit: --fence needs esper_alloc, and {why}\n"


@pytest.mark.slow
def test_a_forked_child_says_nothing_and_keeps_its_exit_code(audit: Audit) -> None:
    fork = """
import os
child = os.fork()
if child == 0:
    sys.exit(0)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = audit(RACE + fork)
    assert (done.returncode, done.stdout) == (1, "child 0\n")
    assert done.stderr.count("esper_alloc audit:") == done.stderr.count("1 finding") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        "threading.Thread(target=work).start()",
        "pool = concurrent.futures.ThreadPoolExecutor(1); pool.submit(work)",
    ],
)
def test_threads_of_the_program_are_audited_to_their_end(audit: Audit, start: str) -> None:
    program = f"""
import concurrent.futures, sys, threading, time
import torch
side, main, file = torch.cuda.Stream(), threading.main_thread(), __file__
def is_running():
    frame = sys._current_frames()[main.ident]
    while frame and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame is not None
def work():
    while is_running():
        time.sleep(0.01)
    time.sleep(0.3)  # for the command to end too early, if it does
    x = torch.empty(1 << 16, device="cuda").zero_()
    with torch.cuda.stream(side):
        y = x.clone()
    torch.cuda.synchronize()
{start}
"""
    done = audit(program)
    assert done.returncode == 1 and "1 finding" in done.stderr
