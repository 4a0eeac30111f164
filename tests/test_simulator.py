"""The simulator of the examples: its physics, and its commands."""

import importlib.util
import math
import os
import sys

import pytest
from processes import ROOT, output_of

torch = pytest.importorskip("torch")

EXAMPLE = ROOT / "examples" / "simulator.py"

pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="comes with a source checkout")


@pytest.fixture(scope="module")
def simulator():
    spec = importlib.util.spec_from_file_location("simulator", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pixel(simulator, direction: list[float], at: list[float]) -> float:
    """The formula for one pixel, in plain Python."""
    path = math.sqrt(sum(x * x for x in at))
    out = [x / path for x in at]
    amplitude = 1.0
    for d, b in zip(out, direction):
        phase = math.pi * (d - b) / simulator.WAVELENGTH * simulator.CELL
        amplitude *= math.sin(simulator.CELLS * phase) / math.sin(phase)
    cosine = sum(d * b for d, b in zip(out, direction))
    return amplitude**2 * (simulator.DISTANCE / path) ** 3 * 0.5 * (1 + cosine**2)


@pytest.mark.parametrize("angles", [(0.013, -0.021), (0.2, 0.1)])
def test_an_image_is_what_the_formula_says(simulator, angles) -> None:
    run = simulator.Simulator(16, "cpu", torch.float64, "eager")
    image = run(torch.tensor(angles, dtype=torch.float64))
    direction = run.direction(torch.tensor(angles, dtype=torch.float64)).tolist()
    assert math.isclose(sum(x * x for x in direction), 1.0)
    for row in range(16):
        for column in range(16):
            at = run.image.pixels[row, column].tolist()
            assert math.isclose(
                float(image[row, column]),
                pixel(simulator, direction, at),
                rel_tol=1e-6,
                abs_tol=1e-9,
            )


@pytest.mark.parametrize("more", [[], ["--unwrapped"]])
def test_the_example_runs(more) -> None:
    how = "--size 32 --device cpu --mode eager".split()
    said = output_of(EXAMPLE, *how, *more, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert said.count("brightest at") == 6
    assert ("copied 0 outputs" in said) == (not more)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_example_says_so(simulator, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--device", "cuda"])
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU for --device cuda"):
        simulator.main()
