"""The gather kernel, run on the CPU, gives what PyTorch's operations give, to the bit.

gather.cu is compiled by the C++ compiler with a header that runs a kernel's threads
one after another (tests/kernels/cuda_on_cpu.h). What only a GPU shows is in
tests/gpu/test_gather_gpu.py.
"""

import ctypes

import pytest
from kernels_on_cpu import KERNELS, compiled, replaced

torch = pytest.importorskip("torch")

from esper_alloc.helpers.gather.compiled import constants, describe  # noqa: E402
from esper_alloc.helpers.gather.plain import PlainGather  # noqa: E402
from esper_alloc.helpers.gather.plan import mix, split_sizes  # noqa: E402
from esper_alloc.helpers.gather.transform import ImageTransform, is_channels_last  # noqa: E402


class Divisor(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("by", "multiplier", "shift")]


class Column(ctypes.Structure):
    _fields_ = [
        ("source", ctypes.c_void_p), ("constants", ctypes.c_void_p), ("row_bytes", ctypes.c_int64),
        ("row_units", Divisor), ("unit_bytes", ctypes.c_uint32), ("first_block", ctypes.c_uint32),
        ("flip_threshold", ctypes.c_uint32), ("crop", ctypes.c_int32), ("channels", Divisor),
        ("height", Divisor), ("width", Divisor), ("kind", ctypes.c_uint8),
        ("source_type", ctypes.c_uint8), ("result_type", ctypes.c_uint8),
        ("source_last", ctypes.c_uint8), ("result_last", ctypes.c_uint8),
    ]  # fmt: skip


class Batch(ctypes.Structure):
    _fields_ = [
        ("order", ctypes.c_void_p), ("start", ctypes.c_int64), ("offset", ctypes.c_int64),
        ("seed", ctypes.c_uint64), ("environments", ctypes.c_uint32), ("size", ctypes.c_uint32),
        ("larger", ctypes.c_uint32), ("columns", ctypes.c_uint32), ("rows", ctypes.c_uint32),
        ("by_size", Divisor), ("by_larger_size", Divisor),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    """gather.cu as a shared library for the CPU."""
    text = replaced(
        r"gather<<<blocks, kThreads, shared_bytes, stream>>>\(p\);\s*return cudaGetLastError\(\);",
        "return run_on_cpu(gather<decltype(p)>, blocks, kThreads, p);",
        (KERNELS / "gather.cu").read_text(),
        times=2,
    )
    text = replaced(r"extern __shared__ float table\[\];", "static float table[8 * 256];", text)
    text = replaced(
        r"cudaMemcpyAsync\((.*?),\s+cudaMemcpyHostToDevice, stream\)", r"copy_on_cpu(\1)", text
    )
    folder = tmp_path_factory.mktemp("kernel")
    loaded = compiled("gather", "cuda_on_cpu.h", text, folder, "-ffp-contract=off")
    loaded.esper_divisor_of.restype = Divisor
    loaded.esper_gather_remote_bytes.restype = ctypes.c_size_t
    return loaded


def run_kernel(library, columns, transforms, order, offset, seed, start, sizes):
    """What the kernel writes for each environment: tuples of tensors."""
    kept, described = [], (Column * len(columns))()
    asked = [how or ImageTransform() for how in transforms]
    for at, (column, how) in enumerate(zip(columns, transforms)):
        found = describe(column, how, sum(sizes))
        assert found is not None
        values = constants(column, how)
        kept.append(values)
        one = described[at]
        one.source = column.data_ptr()
        one.constants = None if values is None else values.data_ptr()
        one.row_bytes = column[0].numel() * column.element_size()
        for name in ("row_units", "channels", "height", "width"):
            setattr(one, name, library.esper_divisor_of(ctypes.c_uint32(getattr(found, name))))
        for name in ("unit_bytes", "flip_threshold", "crop", "kind", "source_type", "result_type",
                     "source_last"):  # fmt: skip
            setattr(one, name, getattr(found, name))
        one.result_last = asked[at].memory_format(column) == torch.channels_last

    def memory_for(size, column, how):
        dtype, layout = how.result_dtype(column.dtype), how.memory_format(column)
        memory = torch.empty((size, *column.shape[1:]), dtype=dtype, memory_format=layout)
        return memory.fill_(77)  # what is not written, or written twice over, is seen

    results = [tuple(memory_for(size, *one) for one in zip(columns, asked)) for size in sizes]
    addresses = (ctypes.c_void_p * (len(sizes) * len(columns)))(
        *(x.data_ptr() for row in results for x in row)
    )
    batch = Batch(
        order=None if order is None else order.data_ptr(),
        start=start,
        offset=offset,
        seed=mix(seed),
        environments=len(sizes),
        size=sizes[-1],
        larger=sum(size > sizes[-1] for size in sizes),
        columns=len(columns),
    )
    bytes_ = library.esper_gather_remote_bytes(len(columns), len(sizes))
    remote, staging = ((ctypes.c_char * max(1, bytes_))() for _ in range(2))
    before = library.launches_so_far()
    status = library.esper_gather_launch(
        ctypes.byref(batch), described, addresses, remote if bytes_ else None,
        staging if bytes_ else None, None,
    )  # fmt: skip
    assert status == 0
    assert library.launches_so_far() == before + 1
    return results, bytes_


def compare(library, columns, transforms, *, shuffle=True, sizes=(5, 5, 4), start=2, seed=3):
    """The kernel's results equal the operations', to the bit and in layout."""
    count = len(columns[0])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)) if shuffle else None
    offset = 0 if shuffle else 1
    plain = PlainGather(columns, transforms)
    plain.start(order, offset, seed)
    expected, _ = plain.gather(start, sizes, None)
    got, bytes_ = run_kernel(library, columns, transforms, order, offset, seed, start, list(sizes))
    for want_row, got_row in zip(expected, got):
        for want, have in zip(want_row, got_row):
            assert want.shape == have.shape and want.dtype == have.dtype
            assert want.stride() == have.stride()
            assert torch.equal(want.flatten().view(torch.uint8), have.flatten().view(torch.uint8))
    return bytes_


def numbers(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    return torch.randint(0, 120, shape, generator=generator).to(dtype)


def as_format(x, last):
    return x.contiguous(memory_format=torch.channels_last) if last else x


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "int64", "uint8", "bool", "float16", "complex64"]
)
@pytest.mark.parametrize("row", [(), (1,), (3,), (17,), (4, 8), (3, 6, 6), (2, 32, 32)])
def test_rows_are_copied(library, dtype, row) -> None:
    columns = (numbers((40, *row), getattr(torch, dtype)), numbers((40,), torch.int64))
    compare(library, columns, (None, None))
    compare(library, columns, (None, None), shuffle=False)


def test_rows_of_views_are_copied(library) -> None:
    """The data's address decides how much can be moved at once."""
    base = numbers((1 + 40 * 16,), torch.uint8)
    for skipped in (0, 1):
        compare(library, (base[skipped : skipped + 640].view(40, 16),), (None,))


@pytest.mark.parametrize("sizes", [(1,), (7,), (3, 3, 3), (4, 3, 3), (1, 1), (2, 2, 1)])
def test_environments_of_different_sizes(library, sizes) -> None:
    columns = (numbers((40, 3, 8, 8), torch.float32), numbers((40,), torch.int64))
    compare(library, columns, (None, None), sizes=sizes)


def test_64_environments_fit_into_the_parameters(library) -> None:
    columns = (numbers((300, 3, 4, 4), torch.float32), numbers((300,), torch.int64))
    assert compare(library, columns, (None, None), sizes=split_sizes(257, 64)) == 0
    assert compare(library, columns, (None, None), sizes=split_sizes(128, 128)) == 0


def test_more_go_through_device_memory(library) -> None:
    columns = (numbers((300, 5), torch.float32), numbers((300,), torch.int64))
    assert compare(library, columns, (None, None), sizes=split_sizes(258, 129)) > 0
    many = tuple(numbers((40, k + 1), torch.float32) for k in range(9))
    assert compare(library, many, (None,) * 9) > 0


MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@pytest.mark.parametrize("source", ["uint8", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("result", [None, "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("normalised", [False, True])
def test_values_are_converted(library, source, result, normalised) -> None:
    dtype = None if result is None else getattr(torch, result)
    how = ImageTransform(
        dtype=dtype, mean=MEAN if normalised else None, std=STD if normalised else None
    )
    for size in (8, 5):  # rows that fill units, and some that do not
        columns = (
            numbers((40, 3, size, size), getattr(torch, source)),
            numbers((40,), torch.int64),
        )
        compare(library, columns, (how, None))


@pytest.mark.parametrize("result", ["float32", "float16"])
@pytest.mark.parametrize("crop, flip", [(0, 0.5), (0, 1.0), (4, 0.0), (2, 0.5), (40, 0.3)])
@pytest.mark.parametrize("from_last", [False, True])
@pytest.mark.parametrize("to_last", [False, True])
def test_images_are_moved(library, result, crop, flip, from_last, to_last) -> None:
    how = ImageTransform(
        dtype=getattr(torch, result),
        mean=MEAN,
        std=STD,
        crop=crop,
        flip=flip,
        channels_last=to_last,
    )
    for shape in ((3, 8, 8), (3, 5, 7)):
        images = as_format(numbers((40, *shape), torch.uint8), from_last)
        assert is_channels_last(images) == from_last
        compare(library, (images, numbers((40,), torch.int64)), (how, None))
        compare(library, (images,), (how,), shuffle=False, seed=2**63 + 5)


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("to_last", [None, False, True])
def test_images_are_moved_and_keep_their_values(library, dtype, to_last) -> None:
    images = numbers((40, 3, 6, 4), getattr(torch, dtype))
    compare(library, (images,), (ImageTransform(crop=1, flip=0.5, channels_last=to_last),))
    compare(library, (images,), (ImageTransform(channels_last=to_last),))
    compare(library, (as_format(images, True),), (ImageTransform(channels_last=to_last),))


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("shape", [(12,), (12, 5), (12, 2, 2, 3)])
def test_many_channels_and_other_shapes(library, dtype, shape) -> None:
    """More channels than are kept in shared memory, and rows that are no images."""
    how = ImageTransform(mean=[i / 20 for i in range(12)], std=[1 + i for i in range(12)])
    compare(library, (numbers((40, *shape), getattr(torch, dtype)),), (how,))


def test_conversion_of_what_is_no_image(library) -> None:
    for row in ((), (17,), (16,), (4, 8)):
        column = numbers((40, *row), torch.uint8)
        compare(library, (column,), (ImageTransform(dtype=torch.float16),))


def test_division_is_exact(library) -> None:
    generator = torch.Generator().manual_seed(0)
    divisors = [1, 2, 3, 7, 768, 3072, (1 << 30) - 1, 1 << 30, (1 << 31) - 1]
    divisors += torch.randint(1, 1 << 31, (200,), generator=generator).tolist()
    for by in divisors:
        d = library.esper_divisor_of(ctypes.c_uint32(by))
        around = [0, 1, by - 1, by, by + 1, 5 * by - 1, 5 * by, (1 << 31) - 1]
        for x in around + torch.randint(0, 1 << 31, (50,), generator=generator).tolist():
            if x < 1 << 31:
                high = (x * d.multiplier) >> 32
                assert high + x < 1 << 32
                assert (high + x) >> d.shift == x // by, (x, by)


def test_what_the_kernel_leaves_to_pytorch() -> None:
    images = numbers((4, 3, 8, 8), torch.float64)
    assert describe(images, ImageTransform(crop=1), 4) is None  # moves of other types
    assert describe(torch.empty(4, 0), None, 4) is None
    assert describe(torch.empty(0, 3), None, 4) is None
    assert describe(torch.empty(1, 1 << 20, dtype=torch.uint8), None, 1 << 20) is None
    assert describe(torch.empty(1, 1 << 20, dtype=torch.uint8), None, 1 << 10) is not None
