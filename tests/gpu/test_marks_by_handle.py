"""Marks from C code that knows a stream's handle alone, in threads without a context."""

from scenario import run_program

TRIES = 10


def test_marks_by_handle_protect_from_any_thread() -> None:
    found = run_program("marks_by_handle", str(TRIES))
    assert found["tries"] == 2 * TRIES
    assert found["refused"] == 0
    assert found["wrong"] == 0
    assert found["reused"] >= 0.9 * found["tries"], "the memory never served again"
    assert found["contexts"] == 0, "a mark left a context behind in its thread"
