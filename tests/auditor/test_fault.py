"""What an access that faulted is said to be, from what the compiled half returns."""

import json
from types import SimpleNamespace
from typing import Any

from test_findings import access, at, finding

from esper_alloc.auditor.fence import SUSPECTS, Fault, explain, fault_in
from esper_alloc.auditor.findings import json_of

ERROR = RuntimeError("CUDA error: an illegal memory access was encountered\nmore")


def freed(number: int, frees: int, use: Any = None) -> dict[str, Any]:
    return {
        "address": number << 21, "size": 4096, "home": (0, 0), "allocated": at(1),
        "freed": at(number), "frees_ago": frees - number, "seconds": 0.25, "in_use": use,
    }  # fmt: skip


def use(line: int, free: int) -> dict[str, Any]:
    return {
        "kind": "freed-in-use", "count": 1, "address": 4096, "size": 24, "allocated": at(1),
        "home": (0, 0), "earlier": access(line, 0x70), "later": None, "freed": at(free),
        "marked": at(4),
    }  # fmt: skip


def explained(frees: list[dict[str, Any]], findings: Any = (), rounds: int = 0) -> Fault:
    """`frees`: the latest first."""
    by_address = {one["address"]: one for one in frees}
    compiled = SimpleNamespace(
        audit_freed=lambda most, only: [one for one in frees if one["in_use"] or not only][:most],
        audit_freed_at=by_address.get,
        audit_fence_rounds=lambda: rounds,
    )
    return explain(compiled, ERROR, findings)


def test_calls_with_freed_memory_come_first_then_the_latest_free() -> None:
    frees = [freed(4, 4, use(20, 4)), freed(3, 4, use(10, 3)), freed(2, 4)]
    called = finding("used-after-free", address=2 << 21)
    other = finding("read-early")
    fault = explained(frees, [other, called])
    assert [one.place.frames[0].line for one, _ in fault.suspects] == [9, 4, 3]
    assert [one.frees_ago if one else None for _, one in fault.suspects] == [2, 0, 1]
    assert fault.error == "CUDA error: an illegal memory access was encountered"
    said = fault.text()
    assert said.index("1. used after it was freed, 3 times: /jobs/train.py:9") < said.index(
        "2. freed while"
    )
    assert (
        "\n    freed 2 frees and 0.250 s ago" in said
        and ", 1 free and 0.250 s ago" in said
        and "No operator" not in said
    )


def test_frees_at_one_line_are_one_suspect() -> None:
    frees = [freed(n, 100, use(10, 3)) for n in range(100, 50, -1)] + [freed(9, 100, use(11, 5))]
    fault = explained(frees)
    assert [one.place.frames[0].line for one, _ in fault.suspects] == [3, 5]
    many = explained([freed(n, 100, use(10, n)) for n in range(100, 50, -1)])
    assert len(many.suspects) == SUSPECTS


def test_without_suspects_it_says_what_that_means() -> None:
    fault = explained([freed(2, 2), freed(1, 2)], rounds=1)
    assert not fault.suspects
    said = fault.text()
    assert "No operator was seen" in said and "The addresses have come round" in said
    assert "0x400000 to 0x401000, allocated at /jobs/train.py:1 in f1" in said
    assert "come round" not in explained([]).text()


def test_json_has_the_fault() -> None:
    fault = explained([freed(1, 1, use(10, 3))])
    said = json.loads(json_of([], fault=fault.as_dict()))["fault"]
    assert said["error"] == fault.error and len(said["suspects"]) == 1
    assert said["suspects"][0]["finding"]["kind"] == "freed-in-use"
    assert said["freed"][0]["address"] == 1 << 21
    assert "fault" not in json.loads(json_of([]))


def test_the_error_may_have_led_to_another() -> None:
    try:
        try:
            raise ERROR
        except RuntimeError as error:
            raise KeyError("step") from error
    except KeyError as error:
        assert fault_in(error) is ERROR
    assert fault_in(ValueError("no")) is None and fault_in(None) is None


def test_a_copy_of_freed_memory_is_refused_at_the_call() -> None:
    refused = RuntimeError("CUDA error: invalid argument\nmore")
    called = finding("used-after-free", address=2 << 21)
    assert fault_in(refused, [finding("read-early"), called]) is refused
    # Without such an operator, it is somebody's own mistake.
    assert fault_in(refused, [finding("read-early")]) is None and fault_in(refused) is None
