"""A diffraction simulator in two compiled functions, the second fed by the first.

    python examples/simulator.py [--size 512] [--device cuda] [--dtype float64]
                                 [--mode eager|default|reduce-overhead] [--unwrapped]

A small cubic crystal in a monochromatic beam throws spots on a flat detector.
One compiled function computes the direction of the beam from two angles, and
another the image, from that direction at every pixel. With CUDA graphs
(`--mode reduce-overhead`) the direction lives in memory that the next compiled
call may overwrite: without `cudagraph_outputs` (`--unwrapped`) PyTorch refuses.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch

from esper_alloc import cudagraph_outputs

WAVELENGTH = 1.0  # angstrom
CELL = 40.0  # edge of the cubic unit cell, angstrom
CELLS = 5  # unit cells along each edge of the crystal
DISTANCE = 0.1  # crystal to detector, metre
DETECTOR = 0.1  # edge of the square detector, metre


def beam_direction(angles: torch.Tensor) -> torch.Tensor:
    """The unit vector [3] of a beam along z, tilted by angles [2] about y and x, in radians."""
    about_y, about_x = angles[0], angles[1]
    x = torch.sin(about_y) * torch.cos(about_x)
    y = torch.sin(about_x)
    z = torch.cos(about_y) * torch.cos(about_x)
    return torch.stack((x, y, z))


def lattice_factor(order: torch.Tensor) -> torch.Tensor:
    """sin(pi N h) / sin(pi h): the amplitude of N scatterers in a row, N at whole h."""
    phase = math.pi * (order - torch.round(order))
    at_peak = torch.sin(phase).abs() < 1e-5
    divisor = torch.where(at_peak, torch.ones_like(phase), torch.sin(phase))
    return torch.where(at_peak, torch.full_like(phase, CELLS), torch.sin(CELLS * phase) / divisor)


def diffraction_image(direction: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    """The image [S, F] of a beam of `direction` [3] on pixels at [S, F, 3], in metres.

    A pixel's value is |amplitude of the lattice|^2, times the solid angle that
    the pixel covers, relative to one on the axis, times the polarisation factor
    (1 + cos^2 2theta) / 2 of an unpolarised beam.
    """
    slow, fast, _ = pixels.shape
    everywhere = direction.unsqueeze(0).unsqueeze(0).expand(slow, fast, -1)
    incident = everywhere.reshape(-1, 3).contiguous()
    position = pixels.reshape(-1, 3)
    path = position.norm(dim=1, keepdim=True)
    diffracted = position / path
    scattering = (diffracted - incident) / WAVELENGTH  # per angstrom
    orders = scattering * CELL  # Miller indices: the cell's axes are x, y and z
    amplitude = lattice_factor(orders).prod(dim=1)
    solid_angle = (DISTANCE / path[:, 0]) ** 3
    cosine = (diffracted * incident).sum(dim=1)
    polarisation = 0.5 * (1.0 + cosine * cosine)
    return (amplitude * amplitude * solid_angle * polarisation).reshape(slow, fast)


def detector(size: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Where its size x size pixels are, [size, size, 3], the beam's axis in the middle."""
    edge = (torch.arange(size, device=device, dtype=dtype) + 0.5) * (DETECTOR / size)
    along = edge - DETECTOR / 2
    y, x = torch.meshgrid(along, along, indexing="ij")
    return torch.stack((x, y, torch.full_like(x, DISTANCE)), dim=-1)


class Detector(torch.nn.Module):
    """Its pixels are a buffer: CUDA graphs read them where they are, without a copy."""

    def __init__(self, size: int, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("pixels", detector(size, device, dtype))

    def forward(self, direction: torch.Tensor) -> torch.Tensor:
        return diffraction_image(direction, self.pixels)


class Simulator:
    """Images of one detector for any direction of the beam.

    `mode`: "eager", or a mode of torch.compile.
    """

    def __init__(self, size: int, device: str, dtype: torch.dtype, mode: str) -> None:
        self.direction: Callable[..., torch.Tensor] = beam_direction
        self.image: Callable[..., torch.Tensor] = Detector(size, device, dtype)
        if mode != "eager":
            self.direction = torch.compile(self.direction, mode=mode, dynamic=False)
            self.image = torch.compile(self.image, mode=mode, dynamic=False)

    def __call__(self, angles: torch.Tensor) -> torch.Tensor:
        """One step: the direction goes from one compiled function to the next."""
        return self.image(self.direction(angles))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--size", type=int, default=512, help="pixels along each edge")
    parser.add_argument("--device", default=default)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    modes = ("eager", "default", "reduce-overhead")
    parser.add_argument("--mode", choices=modes, default=modes[2 if default == "cuda" else 0])
    parser.add_argument("--unwrapped", action="store_true", help="without cudagraph_outputs")
    options = parser.parse_args()
    if options.size < 1:
        parser.error("--size must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this example needs an NVIDIA GPU for --device cuda")

    dtype = getattr(torch, options.dtype)
    simulator = Simulator(options.size, options.device, dtype, options.mode)
    step = simulator if options.unwrapped else cudagraph_outputs(simulator)
    images = []
    for turn in range(6):
        tilt = torch.tensor([0.01 * turn, -0.005 * turn], device=options.device, dtype=dtype)
        images.append(step(tilt))  # kept: none is overwritten by the next
    for turn, image in enumerate(images):
        row, column = divmod(int(image.argmax()), options.size)
        print(f"image {turn}: sum {image.sum().item():.6g}, brightest at {row}, {column}")
    if not options.unwrapped:
        print(f"copied {step.counts.clones} outputs, {step.counts.bytes} bytes")


if __name__ == "__main__":
    main()
