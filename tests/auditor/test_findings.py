"""What findings say, from what the compiled half returns."""

import json
from typing import Any

import pytest

from esper_alloc.auditor.findings import TITLES, Finding, json_of, parse, text_of

UNKNOWN: tuple[bool, list[tuple[str, int, str]]] = (False, [])


def at(line: int, *callers: int, backward: bool = False) -> Any:
    frames = [("/jobs/train.py", one, f"f{one}") for one in (line, *callers)]
    return (backward, frames)


def access(line: int, handle: int, **other: Any) -> dict[str, Any]:
    return {
        "site": at(line), "operator": "aten::mm", "tensor": "float32 [2, 3]",
        "stream": (0, handle), "writes": False, "is_allocation": False, **other,
    }  # fmt: skip


def finding(kind: str, **other: Any) -> Finding:
    return parse(
        {
            "kind": kind, "count": 3, "address": 4096, "size": 24, "allocated": at(1),
            "home": (0, 0), "earlier": access(2, 0x70), "later": access(9, 0), "freed": at(3, 30),
            "marked": at(4), **other,
        }
    )  # fmt: skip


def test_a_free_names_all_that_belongs_to_it() -> None:
    said = finding("freed-in-use").text()
    assert said.splitlines() == [
        "freed while another stream may still use it, 3 times: /jobs/train.py:3 in f3",
        "    missing: record_use(x, s) or x.record_stream(s) after /jobs/train.py:2 in f2, s being "
        "stream 0x70 of device 0; or the default stream of device 0 waits for it before "
        "/jobs/train.py:3 in f3",
        "    float32 [2, 3], 24 bytes, allocated at /jobs/train.py:1 in f1 on the default stream "
        "of device 0",
        "    read by aten::mm on stream 0x70 of device 0, at /jobs/train.py:2 in f2",
        "    freed at /jobs/train.py:3 in f3",
        "    memory of that stream is next read by aten::mm on the default stream of device 0, "
        "at /jobs/train.py:9 in f9",
        "    sure: certain: nothing in the program orders the two",
        "    called from /jobs/train.py:30 in f30",
    ]


@pytest.mark.parametrize(
    "kind, line",
    [
        ("freed-in-use", 3), ("marked-early", 4), ("read-early", 9), ("write-early", 9),
        ("stale-output", 9), ("used-after-free", 9),
    ],
)  # fmt: skip
def test_each_kind_has_its_line(kind: str, line: int) -> None:
    one = finding(kind)
    assert one.place.frames[0].line == line
    assert one.text().startswith(TITLES[kind])
    assert f"/jobs/train.py:{line}" in one.text().splitlines()[0]
    assert one.missing in one.text() and one.certainty in one.text()


def test_a_use_after_the_free_names_the_use_and_the_free() -> None:
    said = finding("used-after-free", count=1).text().splitlines()
    assert said[0] == "used after it was freed: /jobs/train.py:9 in f9"
    assert said[3:5] == [
        "    freed at /jobs/train.py:3 in f3",
        "    read by aten::mm on the default stream of device 0, at /jobs/train.py:9 in f9",
    ]


def test_every_kind_has_a_title() -> None:
    assert set(TITLES) == {
        "freed-in-use", "marked-early", "read-early", "write-early", "stale-output",
        "used-after-free",
    }  # fmt: skip


def test_what_is_unknown_is_said_to_be() -> None:
    one = finding("freed-in-use", home=None, later=None, size=0, freed=UNKNOWN, count=1)
    assert one.home is None and one.later is None
    assert "freed at an unknown place" in one.text()
    assert one.certainty.startswith("likely")
    assert "times" not in one.text()


def test_backward_is_named_by_its_forward() -> None:
    one = finding("read-early", later=access(9, 0, site=at(9, backward=True)))
    assert "/jobs/train.py:9 in f9, in its backward" in one.text()


def test_memory_that_was_only_allocated() -> None:
    one = finding("write-early", earlier=access(2, 0, is_allocation=True, tensor=""))
    assert one.certainty.startswith("likely")
    assert one.tensor == "float32 [2, 3]"


def test_json_has_all_of_it() -> None:
    one = finding("freed-in-use")
    said = json.loads(json_of([one], complete=False))
    assert said["complete"] is False
    [same] = said["findings"]
    assert same["kind"] == "freed-in-use" and same["count"] == 3
    assert same["place"]["frames"][0] == {"file": "/jobs/train.py", "line": 3, "function": "f3"}
    assert same["earlier"]["stream"] == {"device": 0, "handle": 0x70}
    assert same["missing"] == one.missing and same["certainty"] == one.certainty


def test_the_text_counts_them() -> None:
    assert text_of([]) == "esper_alloc audit: 0 findings"
    said = text_of([finding("read-early"), finding("write-early")], complete=False)
    assert said.startswith("esper_alloc audit: 2 findings (host memory ran out")
    assert "\n1. read before" in said and "\n2. written while" in said
