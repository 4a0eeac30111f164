"""Outputs of CUDA graphs under torch.compile(mode="reduce-overhead").

Usage: graph_outputs.py ALLOCATOR SCENARIO

bare        compiled functions that feed each other, without cudagraph_outputs
values      what cudagraph_outputs returns, copies, and leaves alone
gradients   what is differentiated through it
graphed     torch.cuda.make_graphed_callables, which PyTorch keeps no account of

Reports what was found; an error of the scenario as {"error": its text}.
"""

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from device import OURS, report, use_allocator

from esper_alloc import CloneCounts, cudagraph_outputs

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from simulator import Simulator, beam_direction, diffraction_image

SIZE = 64
TURNS = 12


def compiled(function: Any) -> Any:
    return torch.compile(function, mode="reduce-overhead", dynamic=False)


def tilt(turn: int) -> torch.Tensor:
    return torch.tensor([0.002 * turn, -0.001 * turn], dtype=torch.float64, device="cuda")


def recordings() -> int:
    """How many graphs PyTorch has recorded and keeps."""
    from torch._inductor import cudagraph_trees

    manager = cudagraph_trees.get_manager(0, create_if_none_exists=False)
    waiting = [node for nodes in manager.roots.values() for node in nodes]
    count = 0
    while waiting:
        node = waiting.pop()
        count += 1
        waiting += [child for nodes in node.children.values() for child in nodes]
    return count


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=1e-7, atol=1e-9 * float(wanted.abs().max()))


def bare() -> dict[str, Any]:
    """The images are right, or PyTorch refuses: the text is what it says."""
    simulator = Simulator(SIZE, "cuda", torch.float64, "reduce-overhead")
    images = [simulator(tilt(turn)) for turn in range(TURNS)]
    eager = Simulator(SIZE, "cuda", torch.float64, "eager")
    return {"right": [close(image, eager(tilt(turn))) for turn, image in enumerate(images)]}


def values() -> dict[str, Any]:
    found: dict[str, Any] = {}
    eager = Simulator(SIZE, "cuda", torch.float64, "eager")
    expected = [eager(tilt(turn)) for turn in range(TURNS)]

    # A step of two compiled functions, of which a module: only the image is copied.
    step = cudagraph_outputs(Simulator(SIZE, "cuda", torch.float64, "reduce-overhead"))
    images = [step(tilt(turn)) for turn in range(TURNS)]
    found["images"] = all(map(close, images, expected))
    found["image clones"] = step.counts.clones == TURNS
    found["image bytes"] = step.counts.bytes == TURNS * 8 * SIZE * SIZE
    found["all steps marked"] = step.counts.marked == step.counts.steps == TURNS
    recorded = recordings()
    found["graphs are recorded"] = recorded > 0
    images += [step(tilt(turn)) for turn in range(TURNS)]
    found["images again"] = all(map(close, images, expected * 2))
    found["nothing is recorded anew"] = recordings() == recorded

    # Each function wrapped: a direction computed once, for many images.
    pixels = eager.image.pixels
    direction = cudagraph_outputs(compiled(beam_direction))
    image_of = cudagraph_outputs(compiled(diffraction_image))
    beams = [direction(tilt(turn)) for turn in range(TURNS)]
    images = [image_of(beam, pixels) for _ in range(2) for beam in beams]
    found["each wrapped"] = all(map(close, images, expected * 2))
    found["direction bytes"] = direction.counts.bytes == TURNS * 24

    # Containers, aliases, and what is no tensor.
    weight = torch.ones(4, device="cuda")

    @cudagraph_outputs
    @compiled
    def mixed(x: torch.Tensor, number: int) -> dict[str, Any]:
        y = x * 2
        return {"all": y, "rest": [y[1:3], (x, number, None)], "sum": y.sum(), "weight": weight}

    kept = []
    for turn in range(TURNS):
        x = torch.full((4,), float(turn), device="cuda")
        kept.append((x, mixed(x, 7)))
    found["containers"] = all(
        one["all"].tolist() == [2.0 * turn] * 4
        and one["rest"][0].tolist() == [2.0 * turn] * 2
        and one["sum"].item() == 8.0 * turn
        and one["rest"][1][1:] == (7, None)
        for turn, (_, one) in enumerate(kept)
    )
    found["inputs are not copied"] = all(
        one["rest"][1][0].data_ptr() == x.data_ptr() for x, one in kept
    )
    found["constants are not copied"] = all(
        one["weight"].data_ptr() == weight.data_ptr() for _, one in kept
    )

    # An unwrapped function's output goes into a wrapped one, and is held on to.
    produce = compiled(lambda x: x + 1)
    consume = cudagraph_outputs(compiled(lambda x: x * 3))
    held = produce(torch.ones(5, device="cuda"))
    results = [consume(held) for _ in range(5)]
    found["held outputs live"] = held.tolist() == [2.0] * 5
    found["held outputs are read"] = all(one.tolist() == [6.0] * 5 for one in results)
    return found


def gradients() -> dict[str, Any]:
    found: dict[str, Any] = {}
    # gradcheck runs backward twice over one forward, which donated buffers forbid.
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.sin() * y).exp()

    def leaf(value: float) -> torch.Tensor:
        return torch.full((2, 3), value, dtype=torch.float64, device="cuda", requires_grad=True)

    step = cudagraph_outputs(compiled(function))

    # Several forwards, then their backward: nothing may be invalidated between them.
    for _ in range(3):
        ours, eager = [leaf(0.3), leaf(0.7)], [leaf(0.3), leaf(0.7)]
        (step(*ours) + step(*reversed(ours))).sum().backward()
        (function(*eager) + function(*reversed(eager))).sum().backward()
        found["two forwards"] = all(close(a.grad, b.grad) for a, b in zip(ours, eager))

    # Gradients that are kept while others are computed.
    kept, expected = [], []
    for turn in range(TURNS):
        x, y = leaf(0.1 * turn), leaf(0.5)
        kept += torch.autograd.grad(step(x, y).sum(), [x, y])
        expected += torch.autograd.grad(function(x, y).sum(), [x, y])
    found["kept gradients"] = all(map(close, kept, expected))
    found["gradients were copied"] = step.counts.gradient_clones >= 2 * TURNS

    # Training a module, gradients accumulated over two batches.
    torch.manual_seed(0)
    layers = (torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    eager_model = torch.nn.Sequential(*layers).double().cuda()
    model = copy.deepcopy(eager_model)
    forward = cudagraph_outputs(compiled(model))
    generator = torch.Generator(device="cuda").manual_seed(1)
    losses: dict[str, list[float]] = {"eager": [], "ours": []}
    recorded = 0
    for number in range(8):
        batches = [
            torch.randn(4, 8, dtype=torch.float64, device="cuda", generator=generator)
            for _ in range(2)
        ]
        for name, run, parameters in (
            ("eager", eager_model, list(eager_model.parameters())),
            ("ours", forward, list(model.parameters())),
        ):
            for batch in batches:
                loss = (run(batch) - batch.sum(1, keepdim=True)).square().mean()
                loss.backward()
                losses[name].append(loss.item())
            del loss
            with torch.no_grad():
                for parameter in parameters:
                    parameter.sub_(0.05 * parameter.grad)
                    parameter.grad = None
        if number == 4:
            recorded = recordings()
    found["training"] = all(
        abs(a - b) < 1e-9 for a, b in zip(losses["eager"], losses["ours"], strict=True)
    )
    found["training records nothing anew"] = recordings() == recorded
    found["training steps are marked"] = forward.counts.marked >= forward.counts.steps // 2

    # Last, as it holds results all the while: PyTorch then records for each run.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = [
            torch.rand(2, dtype=torch.float64, device="cuda", requires_grad=True) for _ in range(2)
        ]
        checked = cudagraph_outputs(compiled(function))
        found["gradcheck"] = torch.autograd.gradcheck(checked, small, check_undefined_grad=False)
    return found


def graphed() -> dict[str, Any]:
    layer = torch.nn.Linear(4, 4).cuda().requires_grad_(False)
    weight = layer.weight.clone()
    bias = layer.bias.clone()
    sample = torch.randn(2, 4, device="cuda")
    run = cudagraph_outputs(torch.cuda.make_graphed_callables(layer, (sample,)), clone="all")
    inputs = [torch.randn(2, 4, device="cuda") for _ in range(4)]
    results = [run(x) for x in inputs]
    wanted = [torch.nn.functional.linear(x, weight, bias) for x in inputs]
    found = {
        "values": all(torch.allclose(a, b, atol=1e-5) for a, b in zip(results, wanted)),
        "clones": run.counts == CloneCounts(4, run.counts.marked, 4, 4 * 32),
    }

    # Gradients: accumulated, and kept.
    class Layer(torch.nn.Module):  # a module, which make_graphed_callables changes in place
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    eager = Layer().cuda()
    trained = copy.deepcopy(eager)
    step = cudagraph_outputs(torch.cuda.make_graphed_callables(trained, (sample,)), clone="all")
    for x in inputs:
        step(x).square().sum().backward()
        eager(x).square().sum().backward()
    found["accumulated gradients"] = all(
        torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-4)
        for a, b in zip(trained.parameters(), eager.parameters(), strict=True)
    )
    kept = [torch.autograd.grad(step(x).sum(), trained.inner.weight)[0] for x in inputs]
    wanted = [torch.autograd.grad(eager(x).sum(), eager.inner.weight)[0] for x in inputs]
    found["kept gradients"] = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(kept, wanted))
    return found


SCENARIOS = {"bare": bare, "values": values, "gradients": gradients, "graphed": graphed}


def main(allocator: str, scenario: str) -> None:
    use_allocator(allocator)
    try:
        if scenario in ("values", "bare"):
            with torch.no_grad():
                found = SCENARIOS[scenario]()
        else:
            found = SCENARIOS[scenario]()
    except (RuntimeError, NotImplementedError) as error:
        if allocator != OURS and scenario != "bare":
            raise
        found = {"error": str(error)}
    report(**found)


if __name__ == "__main__":
    main(*sys.argv[1:])
