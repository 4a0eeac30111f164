"""Which findings are one, from what the compiled half returns."""

from typing import Any

from esper_alloc.auditor.causes import by_cause

MAIN, SIDE = (0, 0), (0, 0x70)


def at(line: int, function: str = "f", caller: int = 99) -> Any:
    if not line:
        return (False, [])
    return (False, [("/jobs/train.py", line, function), ("/jobs/train.py", caller, "main")])


def access(site: Any, stream: tuple[int, int], **other: Any) -> dict[str, Any]:
    return {
        "site": site, "operator": "aten::mm", "tensor": "float32 [2]", "stream": stream,
        "writes": False, "is_allocation": False, **other,
    }  # fmt: skip


def race(first: Any, second: Any, cause: int, alone: bool = True, **other: Any) -> dict[str, Any]:
    return {
        "kind": "read-early", "count": 1, "address": 4096, "size": 24, "allocated": at(1),
        "home": MAIN, "earlier": access(first, MAIN), "later": access(second, SIDE),
        "freed": at(0), "marked": at(0), "cause": cause, "stands_alone": alone, **other,
    }  # fmt: skip


def free(used: Any, freed: Any, cause: int, allocated: Any, **other: Any) -> dict[str, Any]:
    return race(
        used, at(0), cause, kind="freed-in-use", allocated=allocated, freed=freed,
        earlier=access(used, SIDE), later=None, **other,
    )  # fmt: skip


def groups(*found: dict[str, Any]) -> list[list[int]]:
    return [members for members, _ in by_cause(found)]


def test_what_a_missing_wait_explains_is_one() -> None:
    found = [race(at(1), at(5), 0), race(at(2), at(6), 0, False), race(at(3), at(7), 2)]
    assert groups(*found) == [[0, 1], [2]]
    [(_, one), _] = by_cause(found)
    assert one.count == 2 and one.place.frames[0].line == 5
    assert [other.place.frames[0].line for other in one.also] == [6]


def test_what_also_comes_without_its_cause_is_apart_in_another_function() -> None:
    first = race(at(1), at(5, "f"), 0)
    assert groups(first, race(at(2), at(6, "f"), 0, True)) == [[0, 1]]
    assert groups(first, race(at(2), at(60, "g"), 0, False)) == [[0, 1]]
    assert groups(first, race(at(2), at(60, "g"), 0, True)) == [[0], [1]]
    # And what that one explains goes with it.
    third = race(at(3), at(61, "g"), 1, False)
    assert groups(first, race(at(2), at(60, "g"), 0, True), third) == [[1, 2], [0]]


def test_the_same_lines_are_one_whoever_called_them() -> None:
    found = [race(at(1, caller=8), at(5, caller=9), 0), race(at(1, caller=80), at(5, caller=90), 1)]
    assert groups(*found) == [[0, 1]]
    [(_, one)] = by_cause(found)
    text = one.text()
    assert "2 times: /jobs/train.py:5 in f\n" in text
    assert "    also called from /jobs/train.py:90 in main" in text
    other = race(at(1), at(5), 1, later=access(at(5), (0, 0x90)))
    assert groups(found[0], other) == [[0], [1]]  # another stream
    assert groups(found[0], race(at(2), at(5), 1)) == [[0], [1]]
    assert groups(race(at(0), at(5), 0), race(at(0), at(5), 1)) == [[0], [1]]  # an unknown line


def test_one_mark_explains_what_is_allocated_at_one_line() -> None:
    made = at(1)
    found = [free(at(5), at(6), 0, made), free(at(7), at(8), 1, made)]
    assert groups(*found) == [[0, 1]]
    [(_, one)] = by_cause(found)
    assert one.missing.startswith("x.record_stream(s) for what is allocated at /jobs/train.py:1 ")
    assert groups(found[0], free(at(7), at(8), 1, at(2))) == [[0], [1]]
    assert groups(free(at(5), at(6), 0, at(0)), free(at(7), at(8), 1, at(0))) == [[0], [1]]
    # A wait explains the second and the third one, and no mark does.
    rest = [free(at(7), at(8), 1, made), free(at(9), at(10), 1, at(2), stands_alone=False)]
    assert groups(found[0], *rest) == [[1, 2], [0]]


def test_what_is_used_after_one_free_is_one() -> None:
    kind = "used-after-free"
    found = [race(at(0), at(line), i, kind=kind, freed=at(3)) for i, line in enumerate((5, 6))]
    assert groups(*found) == [[0, 1]]
    assert groups(found[0], race(at(0), at(6), 1, kind=kind, freed=at(4))) == [[0], [1]]


def test_one_copy_explains_what_reads_the_same_output() -> None:
    found = [race(at(3), at(line), i, kind="stale-output") for i, line in enumerate((5, 6))]
    assert groups(*found) == [[0, 1]]
    assert groups(found[0], {**found[1], "address": 8192}) == [[0], [1]]


def test_the_most_harmful_comes_first() -> None:
    likely = access(at(1), MAIN, is_allocation=True)
    found = [
        race(at(1), at(5), 0, kind="write-early", earlier=likely, count=9),
        race(at(2), at(6), 1),
        race(at(3), at(7), 2, count=5),
    ]
    assert groups(*found) == [[2], [1], [0]]
    # A group is as sure as the surest of it, and says how much of it is.
    found += [race(at(4), at(8), 0, False)]
    assert groups(*found) == [[0, 3], [2], [1]]
    first, *rest = [one.certainty.split(":")[0] for _, one in by_cause(found)]
    assert first == "certain 1 of 10 times" and rest == ["certain", "certain"]
