"""What may be done to samples while they are gathered: `ImageTransform`.

Here it is stated in PyTorch's own operations, which work on every device; the
CUDA kernel does the same to the bit. What is random comes from a hash of
(seed, epoch, sample), so it depends neither on the device, nor on the batch that
a sample is in, nor on what was drawn before.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...installation.bools import checked_bool
from ...installation.pytorch import need_torch
from .plan import GAMMA, check_integer, mix

if TYPE_CHECKING:
    import torch

__all__ = ["CropAndFlip", "ImageTransform", "PreparedTransform", "crop_and_flip"]

# Of the 64 bits that a sample's hash has: 21 choose the top of its window, 21 the
# left, 22 whether it is flipped.
WINDOW_BITS = 21
FLIP_BITS = 22
#: The largest crop that WINDOW_BITS serve with an even choice, within a thousandth.
MAX_CROP = 1000


@dataclass(frozen=True)
class ImageTransform:
    """What happens to each sample on the way into its batch, in this order.

    1. ``crop``: a window of the image's own size, at a random place of the image
       with `crop` pixels of zeros around it.
    2. ``flip``: left and right exchanged, with this probability.
    3. ``mean``, ``std``: (x - mean[c]) / std[c] for channel c, dimension 1, in
       float32, each operation rounded; of uint8 x / 255 comes first. So zeros
       around an image become -mean / std: black.
    4. ``dtype``: converted, rounding to nearest even.
    5. ``channels_last``: the batch's memory format.

    Attributes:
        dtype: torch.float32, float16 or bfloat16; None: float32 for uint8 that is
            normalised, otherwise the source's. A conversion alone keeps values: 0 to 255
            of uint8.
        mean, std: a value for each channel, both or neither.
        crop: pixels, 0 to 1000.
        flip: 0 to 1; applied as round(flip * 2^22) / 2^22.
        channels_last: True, False, or None: as the source is.

    Raises:
        ValueError, TypeError: an attribute is out of its range.

    Example::

        augment = esper_alloc.ImageTransform(
            mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25), crop=4, flip=0.5
        )
        batches = esper_alloc.GatherBatchIterator(
            images, labels, batch_size_per_env=4, n_envs=1, env_devices=["cuda"], seed=1,
            transform=augment,
        )
    """

    dtype: torch.dtype | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop: int = 0
    flip: float = 0.0
    channels_last: bool | None = None

    def __post_init__(self) -> None:
        torch = need_torch()  # or an error that says what to install
        allowed = (None, torch.float32, torch.float16, torch.bfloat16)
        if self.channels_last is not None:
            last = checked_bool("channels_last", self.channels_last)
            object.__setattr__(self, "channels_last", last)
        if self.dtype not in allowed:
            raise TypeError(f"dtype must be float32, float16 or bfloat16 (got {self.dtype})")
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std must be given together")
        for name in ("mean", "std"):
            values = getattr(self, name)
            if values is not None:
                object.__setattr__(self, name, _floats(name, values))
        if self.mean is not None and self.std is not None:
            if len(self.mean) != len(self.std):
                raise ValueError(f"mean has {len(self.mean)} channels and std has {len(self.std)}")
            most, least = (
                getattr(torch.finfo(torch.float32), x) for x in ("max", "smallest_normal")
            )
            if not all(abs(value) <= most for value in self.mean):
                raise ValueError(f"mean must be finite as float32 (got {self.mean})")
            if not all(least <= value <= most for value in self.std):
                raise ValueError(
                    f"std must be finite, above 0 and a normal float32 (got {self.std})"
                )
        object.__setattr__(self, "crop", check_integer("crop", self.crop))
        if not 0 <= self.crop <= MAX_CROP:
            raise ValueError(f"crop must be from 0 to {MAX_CROP} (got {self.crop})")
        flip: object = self.flip
        if not isinstance(flip, numbers.Real):
            raise TypeError(f"flip must be a number (got {flip!r})")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip must be a probability, from 0 to 1 (got {self.flip})")

    @property
    def flip_threshold(self) -> int:
        """How many of the 2^22 values of a hash's last bits flip the image."""
        return round(self.flip * (1 << FLIP_BITS))

    def check(self, source: torch.Tensor, name: str) -> None:
        """Raises unless this transform can be applied to samples of `source`.

        Raises:
            ValueError: it has another shape; TypeError: another dtype.
        """
        import torch

        shape = tuple(source.shape)
        if (self.crop or self.flip or self.channels_last is not None) and source.dim() != 4:
            raise ValueError(
                f"{name}: crop, flip and channels_last need images of shape [N, C, H, W] "
                f"(got {shape})"
            )
        if self.mean is not None and (source.dim() < 2 or shape[1] != len(self.mean)):
            raise ValueError(
                f"{name}: mean and std have {len(self.mean)} channels, but dimension 1 of "
                f"shape {shape} has another size"
            )
        convertible = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
        if (self.mean is not None or self.dtype is not None) and source.dtype not in convertible:
            raise TypeError(
                f"{name}: only uint8, float16, bfloat16 and float32 can be normalised or "
                f"converted (got {source.dtype})"
            )

    def result_dtype(self, source: torch.dtype) -> torch.dtype:
        """What dtype samples of dtype `source` get."""
        import torch

        if self.dtype is not None:
            return self.dtype
        return torch.float32 if self.mean is not None and source == torch.uint8 else source

    def memory_format(self, source: torch.Tensor) -> torch.memory_format:
        """The memory format of batches of samples of `source`."""
        import torch

        last = self.channels_last
        if last is None:
            last = is_channels_last(source)
        return torch.channels_last if last else torch.contiguous_format

    def table(self) -> torch.Tensor | None:
        """[C, 256] float32 on the CPU: what each byte of uint8 becomes before the
        conversion; None without mean and std."""
        import torch

        if self.mean is None or self.std is None:
            return None
        # Whatever torch's default type and device are.
        with torch.device("cpu"):
            values = torch.arange(256, dtype=torch.float32).div(255)
            mean = torch.tensor(self.mean, dtype=torch.float32)
            std = torch.tensor(self.std, dtype=torch.float32)
        return values.sub(mean[:, None]).div(std[:, None])

    def on(self, device: torch.device) -> PreparedTransform:
        """This transform in PyTorch's operations, its constants on `device`."""
        return PreparedTransform(self, device)


class PreparedTransform:
    """A transform and its constants on one device."""

    def __init__(self, transform: ImageTransform, device: torch.device) -> None:
        import torch

        self.transform = transform
        self._table = self._mean = self._std = None
        table = transform.table()
        if table is not None:
            self._table = table.to(device)
            self._mean = torch.tensor(transform.mean, dtype=torch.float32, device=device)
            self._std = torch.tensor(transform.std, dtype=torch.float32, device=device)

    def __call__(self, rows: torch.Tensor, samples: torch.Tensor, seed: int) -> torch.Tensor:
        """Treats gathered rows.

        Args:
            rows: [n, ...] as they are in the data set.
            samples: [n] int64 on the same device, their numbers in the data set.
            seed: of the epoch, see `epoch_seed`.

        Returns:
            [n, ...], perhaps `rows` itself.
        """
        how = self.transform
        dtype = how.result_dtype(rows.dtype)
        if how.crop or how.flip_threshold:
            drawn = crop_and_flip(samples, seed, how.crop, how.flip_threshold)
            rows = _windows(rows, drawn, how.crop)
        if self._table is not None:
            rows = self._normalised(rows)
        return rows.to(dtype)

    def _normalised(self, rows: torch.Tensor) -> torch.Tensor:
        import torch

        assert self._table is not None and self._mean is not None and self._std is not None
        one_a_channel = (1, -1, *(1,) * (rows.dim() - 2))
        if rows.dtype == torch.uint8:
            channel = torch.arange(len(self._table), device=rows.device).view(one_a_channel)
            return self._table[channel, rows.long()]
        mean, std = self._mean.view(one_a_channel), self._std.view(one_a_channel)
        return rows.float().sub(mean).div(std)


@dataclass(frozen=True)
class CropAndFlip:
    """What was drawn for n samples: top, left [n] int64, 0 to 2 * crop; flip [n] bool."""

    top: torch.Tensor
    left: torch.Tensor
    flip: torch.Tensor


def crop_and_flip(samples: torch.Tensor, seed: int, crop: int, flip_threshold: int) -> CropAndFlip:
    """Draws the window and the side of samples.

    With h = mix(mix(seed) + (sample + 1) * GAMMA) modulo 2^64:
    top = (h mod 2^21) * (2 crop + 1) >> 21, left likewise from the next 21 bits, and
    flipped is who has (h >> 42) < flip_threshold.

    Args:
        samples: [n] int64, their numbers in the data set, on any device.
        seed: the epoch's.
    """
    hashed = _mix((samples + 1) * _signed(GAMMA) + _signed(mix(seed)))
    mask, places = (1 << WINDOW_BITS) - 1, 2 * crop + 1
    top = ((hashed & mask) * places) >> WINDOW_BITS
    left = ((_shifted(hashed, WINDOW_BITS) & mask) * places) >> WINDOW_BITS
    return CropAndFlip(top, left, _shifted(hashed, 2 * WINDOW_BITS) < flip_threshold)


def _floats(name: str, values: Any) -> tuple[float, ...]:
    """Tensors and lists are as good; kept as floats, which compare and hash."""
    try:
        if not isinstance(values, (str, bytes)):
            return tuple(float(value) for value in values)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor's
        pass
    raise TypeError(f"{name} must have a number for each channel (got {values!r})")


def is_channels_last(x: torch.Tensor) -> bool:
    """Are images laid out [N, H, W, C], and not [N, C, H, W] at the same time?"""
    import torch

    return (
        x.dim() == 4
        and x.is_contiguous(memory_format=torch.channels_last)
        and not x.is_contiguous()
    )


def _windows(images: torch.Tensor, drawn: CropAndFlip, crop: int) -> torch.Tensor:
    """[n, C, H, W]: of each image its window, flipped or not."""
    import torch

    count, channels, height, width = images.shape
    padded = torch.nn.functional.pad(images, (crop,) * 4)
    device = images.device
    column = torch.arange(width, device=device).expand(count, width)
    column = torch.where(drawn.flip[:, None], width - 1 - column, column)
    column = (column + drawn.left[:, None])[:, None, None, :]
    row = (torch.arange(height, device=device) + drawn.top[:, None])[:, None, :, None]
    image = torch.arange(count, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    return padded[image, channel, row, column]


# Arithmetic modulo 2^64 in int64, which wraps around.


def _signed(x: int) -> int:
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits of the unsigned value."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """`mix` of every element."""
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)
