"""The command line as a whole: help, version, exit codes, and what it imports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT, python

import esper_alloc
from esper_alloc.cli import main as cli


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "esper_alloc", *arguments, cwd=ROOT)


def test_version() -> None:
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"esper_alloc {esper_alloc.__version__}\n")


def test_help_names_every_command_and_the_exit_codes() -> None:
    done = command("--help")
    assert done.returncode == 0
    for name, summary in cli.COMMANDS.items():
        assert name in done.stdout
        assert summary.split()[0] in done.stdout
    for code in ("0  ", "1  ", "2  ", "130  ", "141  "):
        assert f"\n  {code}" in done.stdout


def test_the_installed_command_names_itself(tmp_path: Path) -> None:
    script = tmp_path / "esper-alloc"  # as pip writes it
    script.write_text("import sys\nfrom esper_alloc.__main__ import main\nsys.exit(main())\n")
    for arguments in (["--help"], *([name, "--help"] for name in cli.COMMANDS)):
        done = python(script, *arguments, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert done.stdout.startswith(f"usage: {' '.join(['esper-alloc', *arguments[:-1]])} ")
        assert "python -m esper_alloc" not in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["run", "--help"], ["doctor", "--help"], ["bench", "--help"]],
)
def test_help_imports_nothing_slow(arguments: list[str]) -> None:
    code = f"""
import atexit, sys
slow = {{"torch", "numpy", "matplotlib", "esper_alloc._core", "esper_alloc._torch"}}
atexit.register(lambda: print("imported", sorted(slow & set(sys.modules))))
from esper_alloc.__main__ import main
main({arguments!r})
"""
    done = python("-c", code, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "imported []", done.stderr


@pytest.mark.parametrize("arguments", [[], ["walk"], ["--no-such-option"], ["--vers"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert "usage: python -m esper_alloc" in done.stderr


def test_command_that_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "esper_alloc.cli.replay", None)
    assert cli.main(["replay", "x.pickle"]) == 1
    message = capsys.readouterr().err
    assert "esper_alloc replay: cannot be loaded" in message
    assert "python -m esper_alloc doctor" in message


@pytest.mark.parametrize("name", ["explain", "view"])
def test_without_numpy_one_line_says_so(name: str) -> None:
    code = "import sys; sys.modules['numpy'] = None\nfrom esper_alloc.cli.main import main\n"
    code += f"sys.exit(main([{name!r}, 'x']))"
    done = python("-c", code, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"esper_alloc {name}: needs numpy: python -m pip install numpy\n"


def test_in_a_clone_where_nothing_was_built_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("esper_alloc.cli.replay", "esper_alloc._build"):
        monkeypatch.setitem(sys.modules, name, None)
    assert cli.main(["replay", "x.pickle"]) == 1
    assert "this is the source folder of esper_alloc" in capsys.readouterr().err


@pytest.mark.parametrize(
    "page, file",
    [([], "docs/index.md"), (["uses"], "docs/uses.md"), (["../README.md#costs"], "README.md")],
)
def test_docs_prints_a_page(page: list[str], file: str) -> None:
    assert command("docs", *page).stdout == (ROOT / file).read_text()


def test_docs_names_the_pages_where_there_is_none_so_called() -> None:
    done = command("docs", "usage")
    assert done.returncode == 2
    assert "there is no page 'usage'; did you mean uses? There are: auditor" in done.stderr
    assert "no page 'record_use'; did you mean migrating?" in command("docs", "record_use").stderr
    assert "there is no page 'zzz'. There are: auditor" in command("docs", "zzz").stderr


def test_an_option_that_is_unknown_is_named() -> None:
    done = command("run", "--use", "automatic", "train.py")
    assert done.returncode == 2 and "--use is not understood: see" in done.stderr


def test_a_script_without_run_is_told_of_run() -> None:
    done = command("train.py")
    assert done.returncode == 2
    assert "did you mean `python -m esper_alloc run train.py`?" in done.stderr


@pytest.mark.parametrize("command", [["docs"], ["replay", "tests/traces/ppo.pickle.gz"]], ids=str)
def test_a_reader_that_has_ended_is_141_without_a_traceback(command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    how = {"capture_output": False, "stdout": writing, "stderr": subprocess.PIPE}
    done = python("-m", "esper_alloc", *command, cwd=ROOT, **how)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_interruption_is_130_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from esper_alloc.cli import doctor

    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert cli.main(["doctor"]) == 130
