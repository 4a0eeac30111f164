"""audit(fence=True) on a GPU: stray accesses fault at once and are named; correct programs end."""

import pytest
from scenario import run_program


@pytest.mark.parametrize(
    "stray, suspects",
    [
        ("read", [["used-after-free", "read"]]), ("write", [["used-after-free", "write"]]),
        ("copied", [["used-after-free", "copied"]]), ("beside", []), ("overrun", []),
    ],
)  # fmt: skip
def test_a_stray_access_faults_and_is_named(stray: str, suspects: list[list[str]]) -> None:
    found = run_program("fence", stray)
    says = "invalid argument" if stray == "copied" else "illegal memory access"
    assert found["fault"] and says in found["fault"]
    assert found["suspects"] == suspects, found["text"]
    if stray in ("read", "write", "copied", "beside"):
        assert "freed" in found["freed"], found["text"]


def test_an_unordered_read_from_before_the_free_is_found_and_does_not_fault() -> None:
    found = run_program("fence", "unordered")
    assert found["fault"] is None and found["kinds"] == ["freed-in-use"], found


def test_a_correct_program_with_many_frees_does_not_fault() -> None:
    found = run_program("fence", "correct")
    assert found["fault"] is None and found["findings"] == 0, found["text"]
    assert found["wrong"] == 0
    assert found["addresses"] > 800  # every one is new
