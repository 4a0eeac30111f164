"""tools/environment.py: what it installs, and where."""

import sys
from subprocess import PIPE, Popen

import pytest
from processes import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import environment

SERVES = {"version": list(sys.version_info[:2]), "torch": "2.11.0+cu130", "cuda": "13.0",
          "modules": dict.fromkeys([*environment.NEEDED, *environment.OPTIONAL], True),
          "folders": ["/active"], "headers": "/include"}  # fmt: skip


@pytest.fixture
def made(monkeypatch):
    """The environments that were asked for, by the folders of packages that they see."""
    asked = []

    def make(folders, place=environment.ENVIRONMENT):
        asked.append(folders)
        return "own"

    monkeypatch.setattr(environment, "make_environment", make)
    monkeypatch.setattr(environment, "probe", lambda python: SERVES)
    return asked


def test_an_active_python_that_has_all_serves(monkeypatch, made):
    monkeypatch.delenv("CI", raising=False)
    assert environment.choose_python() == sys.executable
    assert made == []


def test_ci_has_an_environment_of_its_own(monkeypatch, made):
    monkeypatch.setenv("CI", "true")
    assert environment.choose_python() == "own"
    assert made == [[]]


def test_nothing_is_installed_outside_an_environment(monkeypatch, capfd):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SystemExit):
        environment.install(sys._base_executable, ["esper-alloc-is-not-there"], "it")
    assert "Could not find an activated virtualenv" in capfd.readouterr().err


def test_two_setups_of_one_folder_take_turns():
    program = "import environment as e\nwith e.alone(): print('in', flush=True); input()"
    run = {"cwd": ROOT / "tools", "stdin": PIPE, "stdout": PIPE, "stderr": PIPE, "text": True}
    with Popen([sys.executable, "-c", program], **run) as first:
        assert first.stdout.readline() == "in\n"
        with Popen([sys.executable, "-c", program], **run) as second:
            assert "waiting for another" in second.stderr.readline()
            first.communicate("\n")
            assert second.stdout.readline() == "in\n"
            second.communicate("\n")
    assert (first.returncode, second.returncode) == (0, 0)
