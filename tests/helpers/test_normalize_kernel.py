"""The normalisers' kernels, run on the CPU, give what PyTorch's operations give.

normalize.cu is compiled by the C++ compiler with a header that runs a kernel's
threads as fibers (tests/kernels/fibers_on_cpu.h). What only a GPU shows is in
tests/gpu/test_normalize_gpu.py.
"""

import ctypes
import math
import re
import statistics
from typing import Any

import pytest
from kernels_on_cpu import KERNELS, compiled, replaced

torch = pytest.importorskip("torch")

from esper_alloc.helpers.normalize import moments  # noqa: E402

FEW_ROWS = 64  # instead of 2048: the largest batch without a barrier of the grid
TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


class State(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("moments", "mean", "variance", "count")]
    _fields_ += [("features", ctypes.c_int64)]


class Batch(ctypes.Structure):
    _fields_ = [
        ("values", ctypes.c_void_p), ("type", ctypes.c_int), ("rows", ctypes.c_int64),
        ("mask", ctypes.c_void_p), ("weights", ctypes.c_void_p), ("mask_each", ctypes.c_int),
        ("weights_each", ctypes.c_int),
    ]  # fmt: skip


class Rule(ctypes.Structure):
    _fields_ = [(name, ctypes.c_double) for name in ("momentum", "warm_up", "epsilon", "clip")]
    _fields_ += [("scaling", ctypes.c_int), ("inverse", ctypes.c_int)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """normalize.cu as a shared library for the CPU."""
    text = (KERNELS / "normalize.cu").read_text()
    text = replaced(r"#include <cooperative_groups.h>\n", "", text)
    text = replaced(r"kFewRows = 2048;", f"kFewRows = {FEW_ROWS};", text)
    text = replaced(r"kThreads = 256;", "kThreads = 128;", text)  # quicker here
    text = replaced(
        r"__shared__ double shared\[[^;]*\];",
        "double *const shared = &fibers::shared_at<double>(0);",
        text,
    )
    text = re.sub(
        r"__shared__ Line lines\[[^;]*\];",
        "Line *const lines = &fibers::shared_at<Line>(40000);",
        text,
    )
    for launch in (r"chosen\.update<<<grid\.blocks", r"chosen\.apply<<<blocks"):
        kernel, _, blocks = launch.replace("\\", "").partition("<<<")
        text = replaced(
            rf"{launch}, kThreads, 0, stream>>>\(job\);",
            f"fibers::launch({kernel}, {blocks}, kThreads, job, false);",
            text,
        )
    text = replaced(
        r"cudaLaunchCooperativeKernel\(.*?arguments, 0, stream\);",
        "fibers::launch(chosen.update, grid.blocks, kThreads, job, true);",
        text,
    )
    text = replaced(r"void \*arguments\[\] = \{&job\};", "", text)
    # torch has loaded the functions that the header defines anew; its own come first.
    folder = tmp_path_factory.mktemp("kernel")
    loaded = compiled("normalize", "fibers_on_cpu.h", text, folder, "-Wl,-Bsymbolic")
    loaded.esper_normalizer_scratch.restype = ctypes.c_size_t
    return loaded


def pointer(tensor: Any) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Device:
    """The operators' interface over the library."""

    def __init__(self, library: ctypes.CDLL, features: int) -> None:
        self.library = library
        start = torch.arange(features, dtype=torch.float64)
        self.moments = torch.stack([start * 0.1 - 1, 1 + start * 0.01, torch.full_like(start, 10)])
        self.mean, self.variance = self.moments[0].float(), self.moments[1].float()
        self.count = torch.tensor(5)

    def state(self) -> list[Any]:
        return [self.moments, self.mean, self.variance, self.count]

    def arguments(self, x: Any, mask: Any, weights: Any, rule: Rule) -> tuple[Any, Any, Any]:
        features = self.mean.numel()
        state = State(*(one.data_ptr() for one in self.state()), features)
        batch = Batch(x.data_ptr(), TYPES[x.dtype], x.shape[0], pointer(mask), pointer(weights))
        batch.mask_each = mask is not None and mask.dim() == 2
        batch.weights_each = weights is not None and weights.dim() == 2
        return ctypes.byref(state), ctypes.byref(batch), ctypes.byref(rule)

    def update(self, x: Any, mask: Any, weights: Any, rule: Rule, out: Any) -> None:
        given = self.arguments(x, mask, weights, rule)
        size = self.library.esper_normalizer_scratch(*given[:2])
        scratch = torch.full((size + 1,), math.nan, dtype=torch.float64)
        scratch[size] = 12345.0
        error = self.library.esper_normalizer_update(
            *given,
            ctypes.c_void_p(pointer(out)),
            ctypes.c_void_p(scratch.data_ptr() if size else None),
            None,
        )
        assert error == 0 and float(scratch[size]) == 12345.0

    def apply(self, x: Any, rule: Rule, out: Any) -> None:
        given = self.arguments(x, None, None, rule)
        error = self.library.esper_normalizer_apply(*given, ctypes.c_void_p(out.data_ptr()), None)
        assert error == 0


def result_like(x: Any) -> Any:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.full(x.shape, -77.0, dtype=dtype)


def assert_same_state(device: Device, plain: list[Any]) -> None:
    torch.testing.assert_close(device.moments, plain[0], rtol=1e-11, atol=1e-12)
    assert torch.equal(device.mean, device.moments[0].float())
    assert torch.equal(device.variance, device.moments[1].float())
    assert torch.equal(device.count, plain[3])


def check(
    library: ctypes.CDLL,
    x: Any,
    mask: Any = None,
    weights: Any = None,
    momentum: float = -1.0,
    scaling: int = moments.CENTERED,
    with_result: bool = True,
) -> None:
    device = Device(library, x.shape[1])
    plain = [tensor.clone() for tensor in device.state()]
    rule = Rule(momentum, 0.0, 1e-4, 3.0, scaling, 0)
    out = result_like(x) if with_result else None
    device.update(x, mask, weights, rule, out)
    moments.normalizer_update_(*plain, x, mask, weights, momentum, 0.0)
    assert_same_state(device, plain)
    wanted = moments.normalizer_apply(*plain[:3], x, 0.0, 1e-4, 3.0, scaling, False)
    if out is not None:
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
    for inverse in (False, True):
        rule.inverse = inverse
        again = result_like(x)
        device.apply(x, rule, again)
        wanted = moments.normalizer_apply(*plain[:3], x, 0.0, 1e-4, 3.0, scaling, inverse)
        torch.testing.assert_close(again, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


SHAPES = [(1, 1), (2, 3), (FEW_ROWS, 64), (FEW_ROWS, 200), (99, 12), (70, 1), (3000, 8), (2500, 5),
          (300, 130), (600, 500)]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(library: ctypes.CDLL, shape: tuple[int, int]) -> None:
    before = library.launches_so_far(), library.cooperative_launches_so_far()
    check(library, torch.randn(shape) * 2 + 3)
    launches = library.launches_so_far() - before[0]
    cooperative = library.cooperative_launches_so_far() - before[1]
    assert launches == 3  # one for the update and its result, one for each apply
    if shape[0] <= FEW_ROWS or shape[1] == 500:  # more column groups than processors
        assert cooperative == 0
    elif shape[0] >= 2500:
        assert cooperative == 1


@pytest.mark.parametrize("dtype", list(TYPES), ids=str)
@pytest.mark.parametrize("shape", [(50, 8), (2100, 7)], ids=str)
def test_types(library: ctypes.CDLL, dtype: Any, shape: tuple[int, int]) -> None:
    check(library, (torch.randn(shape) * 2 + 3).to(dtype))


@pytest.mark.parametrize("masked", ["none", "rows", "each"])
@pytest.mark.parametrize("weighted", ["none", "rows", "each"])
@pytest.mark.parametrize("shape", [(60, 9), (2100, 6)], ids=str)
def test_holes_masks_and_weights(
    library: ctypes.CDLL, shape: tuple[int, int], masked: str, weighted: str
) -> None:
    x = torch.randn(shape) * 4 - 7
    x[torch.rand(shape) < 0.1] = math.nan
    x[torch.rand(shape) < 0.1] = -math.inf
    x[torch.rand(shape[0]) < 0.1] = math.nan
    sizes = {"rows": shape[:1], "each": shape}
    mask = torch.rand(sizes[masked]) < 0.6 if masked != "none" else None
    weights = (torch.rand(sizes[weighted]) * 3 - 0.5).double() if weighted != "none" else None
    check(library, x, mask, weights)


@pytest.mark.parametrize("weighted", [False, True])
def test_values_whose_squares_are_infinite_do_not_count(
    library: ctypes.CDLL, weighted: bool
) -> None:
    x = torch.randn(60, 3, dtype=torch.float64)
    x[5, 1], x[7] = 1e200, -1e155
    weights = torch.rand(60, dtype=torch.float64) + 0.5 if weighted else None
    check(library, x, None, weights)
    device = Device(library, 3)
    device.update(x, None, weights, Rule(-1.0, 0.0, 1e-4, 3.0, moments.CENTERED, 0), None)
    assert bool(torch.isfinite(device.moments).all()) and int(device.count) == 5 + 59


@pytest.mark.parametrize("scaling", [moments.CENTERED, moments.SCALED, moments.SAMPLE])
@pytest.mark.parametrize("momentum", [-1.0, 0.9])
def test_rules(library: ctypes.CDLL, scaling: int, momentum: float) -> None:
    for rows in (10, 2100):
        check(library, torch.randn(rows, 4), momentum=momentum, scaling=scaling)
        check(library, torch.randn(rows, 4), momentum=momentum, with_result=False)


@pytest.mark.parametrize("rows", [FEW_ROWS, 2500])
def test_offsets_and_outliers(library: ctypes.CDLL, rows: int) -> None:
    """Deviations are summed about one of the numbers, be it far from all others."""
    x = torch.randn(rows, 8, dtype=torch.float64) + torch.logspace(0, 8, 8, dtype=torch.float64)
    for far in (None, 0, rows // 2, rows - 1):
        if far is not None:
            x[far] = 1e9
        device = Device(library, 8)
        device.moments[2] = 0.0  # nothing is known before
        device.update(x, None, None, Rule(-1.0, 0.0, 1e-4, 3.0, moments.CENTERED, 0), None)
        columns = x.t().tolist()
        means = [statistics.mean(one) for one in columns]
        variances = [statistics.pvariance(one) for one in columns]  # in exact fractions
        exact = torch.tensor([means, variances], dtype=torch.float64)
        torch.testing.assert_close(device.moments[:2], exact, rtol=1e-11, atol=0.0)


def test_weights_of_every_size(library: ctypes.CDLL) -> None:
    """Light numbers far away must not take the precision of heavy ones."""
    x = torch.randn(2500, 4, dtype=torch.float64) + 1000
    weights = torch.ones(2500, dtype=torch.float64)
    x[::7] += 1e8
    weights[::7] = 1e-30
    check(library, x, None, weights)


def test_unaligned_values(library: ctypes.CDLL) -> None:
    check(library, torch.randn(1 + 40 * 8)[1:].view(40, 8))


def test_what_the_user_wrote_is_believed(library: ctypes.CDLL) -> None:
    device = Device(library, 4)
    device.mean.fill_(5.0)
    device.variance.fill_(4.0)
    plain = [tensor.clone() for tensor in device.state()]
    x, out = torch.randn(40, 4), torch.zeros(40, 4)
    rule = Rule(-1.0, 0.0, 0.0, 10.0, moments.CENTERED, 0)
    device.apply(x, rule, out)
    torch.testing.assert_close(out, (x - 5) / 2)
    device.update(x, None, None, rule, None)
    moments.normalizer_update_(*plain, x, None, None, -1.0, 0.0)
    assert_same_state(device, plain)


def test_empty_batches(library: ctypes.CDLL) -> None:
    before = library.launches_so_far()
    for shape in ((0, 4), (4, 0)):
        device = Device(library, shape[1])
        state = [tensor.clone() for tensor in device.state()]
        x = torch.zeros(shape)
        device.update(x, None, None, Rule(-1.0, 0.0, 1e-4, 10.0, 0, 0), None)
        device.apply(x, Rule(-1.0, 0.0, 1e-4, 10.0, 0, 0), x.clone())
        assert all(torch.equal(a, b) for a, b in zip(device.state(), state, strict=True))
    assert library.launches_so_far() == before
