"""Marks and scopes in compiled functions: the numbers are right, whoever is late.

An operator reads a tensor on a stream of its own, late. Without a mark Inductor
writes something else into that buffer meanwhile, which the control shows.
"""

import textwrap

import pytest
from helper import run_python
from test_shim import ENABLE, TOGETHER

COMPILED = """
side = stream_beside()
side_late = main_late = 0.0
N = 1024

library = torch.library.Library("esper_test", "DEF")
library.define("read(Tensor x) -> Tensor")

def read(x):
    out = torch.empty_like(x)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        if side_late:
            torch.cuda._sleep(cycles(side_late))
        out.copy_(x)
    return out

library.impl("read", read, "CUDA")
torch.library.register_fake("esper_test::read", torch.empty_like, lib=library)

def run(function, *arguments):
    # The first call compiles, and loads kernels, which waits for the device.
    global side_late, main_late
    compiled = torch.compile(function, fullgraph=True)
    compiled(*arguments)
    torch.cuda.synchronize()
    torch._dynamo.config.error_on_recompile = True
    for side_late, main_late in ((0.05, 0.0), (0.0, 0.05), (0.0, 0.0), (0.05, 0.0)):
        if main_late:
            torch.cuda._sleep(cycles(main_late))
        results = compiled(*arguments)
        torch.cuda.synchronize()
        yield results
"""

PROGRAM = (
    COMPILED
    + """
def f(x):
    y = (x + 1).relu()
    r = torch.ops.esper_test.read(y)
    mark(y)
    z = y @ x  # y is not needed after this, and of the size that comes next
    z = z @ x
    return r, z @ x

x = torch.rand(N, N, device="cuda")
wrong = 0
with torch.set_grad_enabled(GRAD):
    for r, z in run(f, x):
        wrong += not torch.equal(r, (x + 1).relu())
"""
)


def on_gpu(*parts: str, **env: str) -> None:
    """Runs a scenario, put together from `parts`, in a fresh process."""
    code = "\n".join(textwrap.dedent(part) for part in parts)
    run_python(TOGETHER + ENABLE + code, env=env)


def test_without_a_mark_the_buffer_is_overwritten():
    on_gpu("GRAD = False; mark = lambda y: None", PROGRAM, "assert wrong >= 1, wrong")


@pytest.mark.parametrize(
    "mark",
    [
        "esper_alloc.record_use(y, side)",
        "esper_alloc.record_use([{'y': y}], side)",
        "y.record_use(side)",
        "esper_alloc.record_use(y, event=event)",
    ],
)
def test_a_marked_buffer_is_not(mark):
    on_gpu(
        f"""
        GRAD = False
        esper_alloc.install_tensor_method()
        event = torch.cuda.Event()
        event.record()
        mark = lambda y: {mark}
        """,
        PROGRAM,
        "assert wrong == 0, wrong",
    )


def test_a_scope_is_in_order_with_its_stream_on_both_sides():
    on_gpu(
        COMPILED,
        """
        def f(x):
            with esper_alloc.using(x, stream=side) as scope:
                y = x * 2 + 1
            return scope.take(y)

        compiled = torch.compile(f, fullgraph=True)
        third = stream_beside()
        with torch.no_grad():
            for value in range(8):
                x = torch.zeros(N, N, device="cuda")
                late = side if value % 2 else torch.cuda.current_stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(late):
                    torch.cuda._sleep(cycles(0.03))
                    x.fill_(value)  # nobody but the scope orders this
                y = compiled(x)
                del x
                over = torch.full((N, N), -1.0, device="cuda")
                # Whoever waits for the scope's stream finds its results.
                third.wait_stream(side)
                with torch.cuda.stream(third):
                    seen = y.clone()
                torch.cuda.synchronize()
                assert (y == 2 * value + 1).all() and (seen == y).all(), value
                assert (over == -1).all()
        """,
    )
