"""The devices that batches are gathered on, and their streams and events."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ...installation.pytorch import untyped
from .plan import canonical_device, check_integer, device_index

with suppress(ImportError):
    import torch


def check_environments(
    batch_size_per_env: int, n_envs: int, env_devices: Sequence[str | torch.device]
) -> tuple[str, ...]:
    """The names of the environments' devices.

    Raises:
        ValueError, TypeError: the three do not fit together, or one is of the wrong
            kind.
    """
    batch_size_per_env = check_integer("batch_size_per_env", batch_size_per_env)
    n_envs = check_integer("n_envs", n_envs)
    if batch_size_per_env < 1:
        raise ValueError(f"batch_size_per_env must be >= 1 (got {batch_size_per_env})")
    if n_envs < 1:
        raise ValueError(f"n_envs must be >= 1 (got {n_envs})")
    if isinstance(env_devices, str) or not isinstance(env_devices, Sequence):
        raise TypeError("env_devices must be a list with a device for each environment")
    if len(env_devices) != n_envs:
        raise ValueError(f"env_devices has {len(env_devices)} entries for n_envs = {n_envs}")
    return tuple(device_name("env_devices", device) for device in env_devices)


def device_name(argument: str, device: str | torch.device) -> str:
    """The name of a device that was given as `argument`.

    Raises:
        TypeError: it is neither name nor torch.device.
        ValueError: it is not cpu, cuda or cuda:N.
    """
    if not isinstance(device, (str, torch.device)):
        raise TypeError(
            f'{argument} takes names such as "cuda:0" and torch.devices, not {device!r} '
            f"({type(device).__name__})"
        )
    name = str(device)
    canonical_device(name)
    return name


def check_device_exists(name: str) -> None:
    """Raises ValueError unless this process has the device."""
    if name == "cpu":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device_index(name) >= count:
        raise ValueError(f"env_devices names {name}, but PyTorch finds {count} CUDA devices")


def raw_stream(index: int | None) -> int:
    """The current stream of a device, as CUDA's handle."""
    handle: int = untyped(torch._C)._cuda_getCurrentRawStream(index)
    return handle


def new_event() -> torch.cuda.Event:
    event: torch.cuda.Event = untyped(torch.cuda).Event()
    return event
