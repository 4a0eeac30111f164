"""The marker esper_audit: a marked test fails for what is found in it, others do not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from on_sim import build

TESTS = Path(__file__).resolve().parents[1]

CODE = """
import esper_alloc, pytest, torch


def race():
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.empty(1 << 16, device="cuda").zero_()
    with torch.cuda.stream(side):
        y = x.clone()
    torch.cuda.synchronize()


@pytest.mark.esper_audit
def test_marked():
    race()


def test_not_marked():
    race()


@pytest.mark.esper_audit
def test_correct():
    torch.empty(1 << 16, device="cuda").zero_()


@pytest.mark.esper_audit
def test_fails_itself():
    race()
    assert 1 == 2


@pytest.mark.esper_audit(mode="raise")
def test_raises():
    with pytest.raises(esper_alloc.AuditError):
        race()


@pytest.mark.esper_audit(mode="raise")
def test_own_error_stays():
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.empty(1 << 16, device="cuda").zero_()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x.clone()
    del x  # found when the audit ends
    assert 3 == 4


@pytest.mark.esper_audit("raise")
def test_given_by_position():
    pass


@pytest.mark.esper_audit(mode="loud")
def test_given_a_wrong_mode():
    pass
"""


def test_a_marked_test_fails_for_what_is_found(library: Path, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(CODE)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p"]
    command += ["esper_alloc.auditor.pytest_plugin", "--strict-markers", "-rA", "-v", "test_it.py"]
    env = {**os.environ, **build.environment(library), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=1200
    )
    said = done.stdout
    assert "6 failed, 2 passed" in said, said + done.stderr
    wrong = ("test_given_by_position", "test_given_a_wrong_mode")
    for name in ("test_marked", "test_fails_itself", "test_raises", *wrong):
        assert f"FAILED test_it.py::{name}" in said
    assert "read before it is written" in said and "test_it.py:9 in race" in said
    assert "assert 1 == 2" in said and "test_own_error_stays - assert 3 == 4" in said
    assert '@pytest.mark.esper_audit(mode="raise")' in said and "loud" in said


def test_it_is_installed_for_pytest() -> None:
    text = (TESTS.parent / "pyproject.toml").read_text()
    entry = 'esper_alloc = "esper_alloc.auditor.pytest_plugin"'
    assert f"[project.entry-points.pytest11]\n{entry}\n" in text


@pytest.mark.slow
@pytest.mark.parametrize("audit, warned", [([], True), (["esper_alloc", "audit", "-m"], False)])
def test_where_nothing_is_audited(audit: list[str], warned: bool, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n\n@pytest.mark.esper_audit\ndef test_nothing():\n    pass\n"
    )
    command = [sys.executable, "-m", *audit, "pytest", "-p", "no:cacheprovider", "-p"]
    command += ["esper_alloc.auditor.pytest_plugin", "test_it.py"]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""}
    said = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True).stdout
    assert "1 passed" in said, said
    assert ("no CUDA was used, so nothing was audited" in said) == warned
