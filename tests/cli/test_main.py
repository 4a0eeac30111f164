"""The command line as a whole: help, version, exit codes, and what it imports."""

import os
import shutil
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


@pytest.mark.parametrize(
    "arguments, said",
    [([], ""), (["walk"], ""), (["--no-such-option"], ""), (["--vers"], ""),
     (["run", "--use", "automatic", "train.py"], "--use is not understood: see"),
     (["train.py"], "did you mean `python -m esper_alloc run train.py`?")],
)  # fmt: skip
def test_wrong_usage_is_exit_code_2(arguments: list[str], said: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert "usage: python -m esper_alloc" in done.stderr and said in done.stderr


@pytest.mark.parametrize(
    "missing, why",
    [("cli.replay", "python -m esper_alloc doctor"), ("_build", "this is the source folder of")],
)
def test_command_that_cannot_be_loaded(
    missing: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("cli.replay", missing):  # without _build nothing was built in a clone
        monkeypatch.setitem(sys.modules, f"esper_alloc.{name}", None)
    assert cli.main(["replay", "x.pickle"]) == 1
    message = capsys.readouterr().err
    assert "esper_alloc replay: cannot be loaded" in message and why in message


@pytest.mark.parametrize("name", ["explain", "view"])
def test_without_numpy_one_line_says_so(name: str) -> None:
    code = "import sys; sys.modules['numpy'] = None\nfrom esper_alloc.cli.main import main\n"
    code += f"sys.exit(main([{name!r}, 'x']))"
    done = python("-c", code, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"esper_alloc {name}: needs numpy: python -m pip install numpy\n"


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


@pytest.mark.parametrize(
    "command", [["docs", "uses"], ["replay", "tests/traces/ppo.pickle.gz"]], ids=str
)
def test_a_reader_that_has_ended_or_a_full_disk_is_no_traceback(command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    full = "the output cannot be written: No space left on device"
    for output, code, said in (
        (writing, 141, ""),
        (os.open("/dev/full", os.O_WRONLY), 1, f"esper_alloc {command[0]}: {full}\n"),
    ):
        how = {"capture_output": False, "stdout": output, "stderr": subprocess.PIPE}
        done = python("-m", "esper_alloc", *command, cwd=ROOT, **how)
        os.close(output)
        assert (done.returncode, done.stderr) == (code, said)


def test_what_the_output_cannot_encode_is_escaped(tmp_path: Path) -> None:
    file = shutil.copyfile(ROOT / "examples/traces/fsdp_like.pickle.gz", tmp_path / "\xe9.gz")
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = python("-m", "esper_alloc", "replay", file, cwd=ROOT, env=env)
    assert f"{tmp_path}/\\xe9.gz, device 0" in done.stdout


def test_interruption_is_130_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from esper_alloc.cli import doctor

    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert cli.main(["doctor"]) == 130
