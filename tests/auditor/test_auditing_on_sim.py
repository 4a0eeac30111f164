"""esper_alloc.audit() on the simulated device: modes, reports, what is seen and what is not."""

import functools
from pathlib import Path

import pytest
from on_sim import Run, build, running

HEAD = """
import gc, json, threading, warnings
import simulated
import torch
import esper_alloc
from esper_alloc import _torch
from simulated import say

main, side = torch.cuda.current_stream(), torch.cuda.Stream()
N = 1 << 16


def empty():
    return torch.empty(N, device="cuda")


def race():
    "Reads on the side stream what the main stream has just written."
    x = empty().zero_()
    with torch.cuda.stream(side):
        y = x.clone()
    torch.cuda.synchronize()


def kinds(report):
    return [finding.kind for finding in report.findings]
"""

run = running(HEAD)


@pytest.fixture(params=["esper_alloc", "native"])
def run_on_each(run: Run, request: pytest.FixtureRequest) -> Run:
    return functools.partial(run, ESPER_SIMULATED_ALLOCATOR=request.param)


def test_raise_comes_from_near_the_line(run_on_each: Run) -> None:
    found = run_on_each("""
try:
    with esper_alloc.audit(mode="raise"):
        race()
        reached = 1
        for _ in range(100000):
            pass
        reached = 2
except esper_alloc.AuditError as error:
    said, kind = str(error), error.findings[0].kind
with esper_alloc.audit() as report:
    race()
say(said=said, kind=kind, again=kinds(report), early="reached" not in globals() or reached < 2)
""")
    assert found["kind"] == "read-early" and "1 finding" in found["said"]
    assert found["again"] == ["read-early"]
    assert found["early"]


def test_memory_for_another_stream_is_that_streams(run: Run) -> None:
    found = run("""
with esper_alloc.audit() as report:
    address = torch.cuda.caching_allocator_alloc(4 * N, stream=side)
    with torch.cuda.stream(side):
        storage = torch._C._construct_storage_from_data_pointer(
            address, torch.device("cuda", 0), 4 * N)
        torch.empty(0, device="cuda").set_(storage).zero_()
    torch.cuda.synchronize()
    torch.cuda.caching_allocator_delete(address)
say(kinds=kinds(report))
""")
    assert found == {"kinds": []}


def test_raise_does_not_keep_the_audit_from_ending(run: Run) -> None:
    """The last statement is no call, so Python looks for what is pending where __exit__ begins."""
    found = run("""
x, y = empty(), empty()
try:
    with esper_alloc.audit(mode="raise"):
        y.zero_()
        torch.cuda.set_stream(side)
        x[:] = y
except esper_alloc.AuditError as error:
    kind = error.findings[0].kind
torch.cuda.set_stream(main)
say(kind=kind, running=_torch.audit_state()[0])
""")
    assert found == {"kind": "read-early", "running": False}


def test_an_error_is_pickled_with_its_findings(run: Run) -> None:
    found = run("""
import pickle
with esper_alloc.audit() as report:
    race()
error = pickle.loads(pickle.dumps(esper_alloc.AuditError(report.findings)))
say(kinds=[one.kind for one in error.findings], same=error.findings == report.findings)
""")
    assert found == {"kinds": ["read-early"], "same": True}


def test_what_looks_at_no_contents_reads_nothing(run_on_each: Run) -> None:
    found = run_on_each("""
library = torch.library.Library("esper_audited", "FRAGMENT")
library.define("blur_like(Tensor(a!) out, Tensor x) -> ()")
library.impl("blur_like", lambda out, x: None, "CUDA")
answers = {}
for name, look in {
    "data": lambda p, x: setattr(p, "data", x),
    "atleast": lambda p, x: torch.atleast_3d(x),
    "meshgrid": lambda p, x: torch.meshgrid(x, x, indexing="ij"),
    "split": lambda p, x: torch.unsafe_split(x, 2),
    "operator": lambda p, x: torch.ops.esper_audited.blur_like(p, x),
}.items():
    with esper_alloc.audit() as report:
        p, x = empty(), empty()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            x.zero_()
        look(p, x)
        main.wait_stream(side)
        torch.cuda.synchronize()
    answers[name] = kinds(report)
say(**answers)
""")
    assert found.pop("operator") == ["read-early"]  # a name that ends as PyTorch's says nothing
    assert found == {name: [] for name in ("data", "atleast", "meshgrid", "split")}


def test_a_mark_that_came_early_is_mended_before_the_free(run: Run) -> None:
    found = run("""
def early():
    x = empty().zero_()
    side.wait_stream(main)
    esper_alloc.record_use(x, side)
    with torch.cuda.stream(side):
        x.clone()
    del x
    empty().zero_()
with torch.no_grad(), esper_alloc.audit() as report:  # marks end at the call
    early()
    torch.cuda.synchronize()
(one,) = report.findings
say(kind=one.kind, missing=one.missing, freed=str(one.freed))
""")
    assert found["kind"] == "marked-early"
    assert found["missing"].endswith(f"waits for it before {found['freed']}")


def test_warn_warns_once_for_each(run: Run) -> None:
    found = run("""
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with esper_alloc.audit(mode="warn") as report:
        race()
        for _ in range(3):
            race()
        x = empty().zero_()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = x.clone()
        del x
say(
    warned=[str(w.message).splitlines()[0] for w in caught],
    category=sorted({w.category.__name__ for w in caught}),
    kinds=kinds(report),
)
""")
    assert len(found["warned"]) == 2  # race() is called at two lines
    assert found["category"] == ["AuditWarning"]
    assert found["kinds"] == ["read-early", "freed-in-use"]


def test_one_missing_wait_is_one_finding(run: Run) -> None:
    """Also for a stream that only waits for the one that should have waited."""
    found = run("""
third = torch.cuda.Stream()

def step(x, y):
    x.zero_()
    y.zero_()
    with torch.cuda.stream(side):
        x.clone()
        y.clone()
    third.wait_stream(side)
    with torch.cuda.stream(third):
        x.clone()

x, y = empty(), empty()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with esper_alloc.audit(mode="warn") as report:
        for _ in range(3):
            step(x, y)
            torch.cuda.synchronize()
(one,) = report.findings
first = one.place.frames[0].line
say(
    warned=len(caught), count=one.count, counts=[other.count for other in one.also],
    lines=[other.place.frames[0].line - first for other in one.also],
    text=one.text().splitlines(), first=str(one.place),
    json=len(json.loads(report.json())["findings"][0]["also"]), missing=one.missing,
)
""")
    assert found["warned"] == 1
    assert (found["count"], found["counts"], found["lines"]) == (9, [3, 3], [1, 4])
    assert found["json"] == 2
    assert found["missing"].endswith(
        f"must wait for the default stream of device 0 before {found['first']}"
    )
    head, second, *_, also, other = found["text"]
    assert head.startswith("read before it is written, 9 times at 3 places: <string>:")
    assert second == f"    missing: {found['missing']}"
    assert also.startswith("    also at <string>:") and ", " in also and also.endswith(" in step")
    assert other.startswith("    the other access also at <string>:")


def test_a_warning_names_the_line_that_runs(run: Run) -> None:
    """Soon after the read, in the same function; or the end of the `with`, at the outermost level."""
    found = run("""
import sys

def read():
    here = sys._getframe()
    x = empty().zero_()
    with torch.cuda.stream(side):
        y = x.clone()
    for _ in range(100000):
        pass
    lines.extend([here.f_code.co_firstlineno, here.f_lineno])

def call():
    read()

lines = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with esper_alloc.audit(mode="warn") as report:
        call()
        torch.cuda.synchronize()
        x = empty().zero_()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = x.clone()
        del x
first, last = caught
say(first=first.filename, inside=lines[0] < first.lineno <= lines[1], last=last.filename)
""")
    assert found == {"first": "<string>", "inside": True, "last": "<string>"}


def test_an_error_of_the_program_stays_what_it_is(run: Run) -> None:
    found = run("""
try:
    with esper_alloc.audit() as report:
        race()
        raise KeyError("mine")
except KeyError as error:
    say(error=str(error), kinds=kinds(report), running=_torch.audit_state()[0])
""")
    assert found == {"error": "'mine'", "kinds": ["read-early"], "running": False}


def test_one_audit_at_a_time(run: Run) -> None:
    found = run("""
with esper_alloc.audit() as report:
    try:
        with esper_alloc.audit():
            pass
    except RuntimeError as error:
        said = str(error)
    race()
wrong = []
for given in ({"mode": "loud"}, {"fence": "no"}):
    try:
        esper_alloc.audit(**given)
    except (TypeError, ValueError) as error:
        wrong.append(str(error))
say(said=said, kinds=kinds(report), wrong=wrong)
""")
    assert "an audit is running in this process already" in found["said"]
    assert found["wrong"] == [
        "mode='loud': there are 'raise', 'warn', 'collect'", "fence must be True or False, not str",
    ]  # fmt: skip
    assert found["kinds"] == ["read-early"]


def test_what_was_before_counts_as_over_and_nothing_is_observed_afterwards(
    run_on_each: Run,
) -> None:
    found = run_on_each("""
x, z = empty().zero_(), empty().zero_()
with torch.cuda.stream(side):
    y = x.clone()
with esper_alloc.audit() as report:
    with torch.cuda.stream(side):
        y = x.clone()
    early = kinds(report)
    del x  # its stream is known
    w = empty().zero_()
    late = kinds(report)
    main.wait_stream(side)
race()
say(early=early, late=late, afterwards=kinds(report), count=_torch.audit_state()[2])
""")
    late = ["freed-in-use"]
    assert found == {"early": [], "late": late, "afterwards": late, "count": 1}


def test_threads_share_what_the_host_has_waited_for(run_on_each: Run) -> None:
    found = run_on_each("""
def fill(x):
    with torch.cuda.stream(side):
        x.zero_()

with esper_alloc.audit() as report:
    for waits in (True, False):
        x = empty()
        side.wait_stream(main)
        thread = threading.Thread(target=fill, args=(x,))
        thread.start()
        thread.join()
        if waits:
            side.synchronize()
        x.clone()
        torch.cuda.synchronize()
[finding] = report.findings
say(kind=finding.kind, frame=finding.earlier.place.frames[0].function)
""")
    assert found == {"kind": "read-early", "frame": "fill"}


def test_a_finding_says_what_the_memory_is(run: Run) -> None:
    found = run("""
with esper_alloc.audit() as report:
    x = torch.empty(4, 1 << 14, dtype=torch.float16, device="cuda").zero_()
    with torch.cuda.stream(side):
        y = x[1].clone()
    torch.cuda.synchronize()
[finding] = report.findings
say(
    tensor=finding.later.tensor, size=finding.size, home=finding.home.handle,
    stream=finding.later.stream.handle == side.cuda_stream, text=report.text(),
    json=json.loads(report.json())["findings"][0]["kind"], operator=finding.later.operator,
)
""")
    assert found["tensor"] == "float16 [16384]"
    assert found["size"] >= 4 * (1 << 14) * 2
    assert found["home"] == 0 and found["stream"]
    assert found["json"] == "read-early" and found["operator"] == "aten::clone"
    assert "float16" in found["text"]


#: What orders the main stream after the side stream's read of x, or protects x.
ORDERS = (
    "main.wait_stream(side)",
    "side.record_event().wait()",
    "side.record_event().wait(main)",
    "main.wait_event(side.record_event())",
    "e = torch.Event('cuda'); e.record(side); e.wait(main)",
    "side.synchronize()",
    "side.record_event().synchronize()",
    "torch.cuda.synchronize()",
    "with torch.cuda.stream(side): x.cpu()",  # waits on the host
    "simulated.time_passes(); assert side.query()",
    "e = side.record_event(); simulated.time_passes(); assert e.query()",
    "x.record_stream(side)",
    "esper_alloc.record_use(x, side)",
    "esper_alloc.touch(x, side)",
    "kept.append(x)",
    "kept.append(x.view(2, -1)[1])",
)


def test_it_is_silent_on_whatever_orders(run_on_each: Run) -> None:
    found = run_on_each(f"""
answers = {{}}
kept = []
for order in ["pass", *{ORDERS!r}]:
    with esper_alloc.audit() as report:
        for _ in range(3):
            x = empty().zero_()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                y = x.clone()
            exec(order)
            del x
            w = empty().zero_()
            main.wait_stream(side)
            kept.clear()
    answers[order] = kinds(report)
say(**answers)
""")
    assert found.pop("pass") == ["freed-in-use"]
    assert len(found) == len(ORDERS)
    assert {order: kinds for order, kinds in found.items() if kinds} == {}


@pytest.mark.parametrize(
    "asked", ["side.query()", "before.query()", "other.query()", "side.record_event().query()"]
)
def test_a_query_that_says_nothing_orders_nothing(run: Run, asked: str) -> None:
    """Not done yet, another stream, or an event from before the read."""
    found = run(f"""
other = torch.cuda.Stream()
with esper_alloc.audit() as report:
    x = empty().zero_()
    side.wait_stream(main)
    before = side.record_event()
    with torch.cuda.stream(side):
        y = x.clone()
    if "side" in {asked!r}:
        simulated.work(side)
    else:
        simulated.time_passes()
    answer = {asked}
    del x
    w = empty().zero_()
    early = kinds(report)
    main.wait_stream(side)
say(answer=answer, kinds=early)
""")
    assert found == {"answer": "side" not in asked, "kinds": ["freed-in-use"]}


def test_a_kernel_beside_the_operators_reads_its_arguments(run: Run) -> None:
    found = run("""
with esper_alloc.audit() as report:
    x = empty().zero_()
    with torch.cuda.stream(side):
        _torch.audit_launch([(x, 3), "name"])
    torch.cuda.synchronize()
[finding] = report.findings
say(kind=finding.kind, operator=finding.later.operator)
""")
    assert found == {"kind": "read-early", "operator": "a compiled kernel"}


@pytest.mark.parametrize(
    "call, kind",
    [
        ("torch._foreach_zero_([x])", "write-early"),
        ("torch.zeros(N, out=x)", "write-early"),
        ("coo.clone()", "read-early"),
        ("nested.clone()", "read-early"),
        ("Wrapper(x).zero_()", "write-early"),
        ("in_inference(x)", "write-early"),
        ("in_thread(x, side)", "write-early"),
        ("torch.func.vmap(lambda t: t.clone())(x.view(2, -1))", "read-early"),
    ],
)
def test_whatever_an_operator_takes(run: Run, call: str, kind: str) -> None:
    found = run(f"""
from wrapper import Wrapper, in_inference, in_thread

size, i = torch.tensor([[2]]), torch.empty(1, 2, dtype=torch.int64, device="cuda")
with esper_alloc.audit() as report:
    x = empty()
    coo = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        1, 0, [9], i, x[:2], layout=torch.sparse_coo, device=x.device, dtype=x.dtype
    )
    nested = torch._nested_view_from_buffer(x, size, size, size[0])
    x.zero_()
    before = kinds(report)
    with torch.cuda.stream(side):
        try:
            {call}
        except RuntimeError:
            pass  # a kernel that cannot run: what it uses was seen before
    torch.cuda.synchronize()
say(before=before, kinds=kinds(report))
""")
    assert found == {"before": [], "kinds": [kind]}


def test_each_device_has_its_streams(run_on_each: Run) -> None:
    found = run_on_each("""
answers = []
for waits in (0, 1):
    with esper_alloc.audit() as report:
        x = torch.empty(N, device="cuda:1").zero_()
        there = torch.cuda.Stream(1)
        torch.cuda.synchronize(waits)
        with torch.cuda.stream(there):
            x.clone()
        torch.cuda.synchronize(1)
    answers.append([(f.kind, f.home.device, f.later.stream.device) for f in report.findings])
say(other=answers[0], own=answers[1])
""")
    assert found == {"other": [["read-early", 1, 1]], "own": []}


def test_its_memory_is_bounded(run_on_each: Run) -> None:
    found = run_on_each("""
with esper_alloc.audit() as report:
    for turn in range(3000):
        x = empty().zero_()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = x.clone()
        main.wait_stream(side)
        if turn == 300:
            early = _torch.audit_state()[3]
    late = _torch.audit_state()[3]
say(early=early, late=late)
""")
    assert found["late"] <= found["early"] * 1.1


def test_shapes_that_never_repeat_are_forgotten_but_not_those_of_findings(run: Run) -> None:
    found = run("""
def read_early(x):
    with torch.cuda.stream(side):
        x.clone()

long = torch.empty(1 << 15, dtype=torch.uint8, device="cuda")
with esper_alloc.audit() as report:
    x, y = empty()[:7], empty()[:9]
    x.zero_()
    y.zero_()
    read_early(x)
    for i in range(1, (1 << 14) + 100):  # more shapes than are kept
        long[-i:].zero_()
    read_early(y)
(found,) = [f for f in report.findings if f.kind == "read-early"]
say(tensors=[[f.earlier.tensor, f.later.tensor] for f in (found, *found.also)])
""")
    assert found["tensors"] == [["float32 [7]", "float32 [7]"], ["", "float32 [9]"]]


def test_the_tracer_that_was_there_goes_on(run: Run) -> None:
    found = run("""
import torch.cuda._gpu_trace as trace

seen = []
torch._C._activate_gpu_trace()
trace.register_callback_for_event_record(lambda event, stream: seen.append(event))
main.record_event()
before = len(seen)
with esper_alloc.audit() as report:
    race()
    main.record_event()
during = len(seen)
main.record_event()
say(before=before, during=during - before, after=len(seen) - during, kinds=kinds(report))
""")
    assert found == {"before": 1, "during": 1, "after": 1, "kinds": ["read-early"]}


def test_asking_for_the_state_may_free_tensors(run: Run) -> None:
    found = run("""
class Cycle:
    pass


def garbage():
    one = Cycle()
    one.itself, one.memory = one, empty()


ask = _torch.audit_state
gc.disable()
with esper_alloc.audit() as report:
    tuples = [tuple([i, 1, 2, 3]) for i in range(5000)]  # so that none is left over for the answer
    garbage()
    lists = [[] for _ in range(3000)]  # the next object makes garbage be collected
    gc.enable()
    state = ask()
say(running=state[0])
""")
    assert found == {"running": True}


def test_a_forked_child_is_not_audited(run: Run) -> None:
    found = run("""
import os

with esper_alloc.audit() as report:
    race()
    child = os.fork()
    if child == 0:
        torch.xlogy(torch.ones(3), torch.ones(3))
        os._exit(_torch.audit_state()[0] or len(report.findings))
    status = os.waitpid(child, 0)[1]
say(status=status, kinds=kinds(report))
""")
    assert found == {"status": 0, "kinds": ["read-early"]}


def test_a_subinterpreter_that_was_made_changes_nothing(run: Run) -> None:
    """PyGILState_Check() answers yes on every thread from then on."""
    found = run("""
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters

interpreters.destroy(interpreters.create())
torch.cuda.empty_cache()  # calls the allocator without the GIL
with esper_alloc.audit() as report:
    race()
torch.cuda.empty_cache()
say(kinds=kinds(report))
""")
    assert found == {"kinds": ["read-early"]}


def test_a_fork_while_another_thread_begins_to_run_operators(library: Path, tmp_path: Path) -> None:
    found = build.forked_while_a_lock_is_held(
        library,
        tmp_path,
        HEAD,
        """
with esper_alloc.audit() as report:
    status = fork_while_a_lock_is_held()
say(status=status)
""",
    )
    assert found == {"status": 0}


def test_what_pytorch_does_for_itself_is_ignored_calls_within_calls_too(run_on_each: Run) -> None:
    found = run_on_each("""
with esper_alloc.audit(mode="collect") as within:
    _torch.audit_leave_to_pytorch(True)
    _torch.audit_leave_to_pytorch(True)
    race()
    _torch.audit_leave_to_pytorch(False)
    race()
    _torch.audit_leave_to_pytorch(False)
with esper_alloc.audit(mode="collect") as after:
    race()
say(within=kinds(within), after=kinds(after))
""")
    assert found == {"within": [], "after": ["read-early"]}
