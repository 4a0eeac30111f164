"""Tags, and memory that sleeps: the GPU's memory is given away, and comes back at the same
addresses."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..installation.callers import user_stacklevel
from ..installation.devices import check_device_name, device_index
from ..installation.pytorch import load_shim, untyped
from .enabling import is_enabled, why_off

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["SleepResult", "Stay", "asleep", "sleep", "tag", "tag_stats", "trim_sleep", "wake"]

_NCCL_STAYS = "NCCL cannot suspend it: destroy_process_group() frees it"
Keep = Literal["host", "nothing"]
Tags = str | Sequence[str] | None


class Stay(NamedTuple):
    """Device memory that did not go to sleep.

    Attributes:
        bytes: how much.
        reason: a sentence: why, and how to avoid it.
    """

    bytes: int
    reason: str


class SleepResult(NamedTuple):
    """What a sleep did.

    Attributes:
        given_back: bytes of device memory that went back to the driver.
        kept: bytes copied to the host.
        stays: what could not go, as :class:`Stay` with `bytes` and `reason`. Empty:
            everything went.

    Example::

        result = esper_alloc.sleep("weights")
        for stay in result.stays:
            print(f"{stay.bytes} bytes stay: {stay.reason}")
    """

    given_back: int
    kept: int
    stays: tuple[Stay, ...]


class tag:  # a context manager, like torch.no_grad
    """``with tag("weights"):`` labels what this thread allocates on CUDA devices inside.

    Tags nest, and the innermost counts. What backward allocates on PyTorch's own threads has no
    tag. Does nothing while PyTorch does not run on esper_alloc. An object may be entered more
    than once.

    Args:
        name: 1 to 63 bytes of UTF-8, none of them 0; a process may have 255 names.

    Raises:
        ValueError, TypeError: the name is not such a string.

    Example::

        with esper_alloc.tag("weights"):
            weights = torch.empty(1 << 20, device="cuda")
        esper_alloc.sleep("weights")
    """

    def __init__(self, name: str) -> None:
        _check_tag(name)
        self.name = name
        self._pushed: list[bool] = []

    def __enter__(self) -> tag:
        running = is_enabled()
        if running:
            load_shim().push_tag(self.name)
        self._pushed.append(running)
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._pushed:
            raise RuntimeError(f"tag({self.name!r}) is left, but was not entered")
        if self._pushed.pop():
            load_shim().pop_tag()


def sleep(
    tags: Tags = None,
    keep: Keep = "host",
    *,
    device: torch.device | str | int | None = None,
    process_groups: Iterable[ProcessGroup] = (),
) -> SleepResult:
    """Gives the device memory of `tags` back to the driver, and keeps its addresses.

    Waits for everything that was enqueued before. Until :func:`wake`, tensors in that memory must
    not be used, graphs that use it must not be replayed, and nothing is allocated under these
    tags; freeing is allowed. What cannot go stays usable and is named in the result: all memory,
    where :func:`enable` did nothing. On each device one thread at a time puts memory to sleep or
    wakes it.

    Args:
        tags: a name, or several; ``""`` is memory without a tag. None: all memory.
        keep: ``"host"`` copies live bytes to pinned host memory. ``"nothing"`` drops them: the
            memory wakes full of zeros.
        device: None: all devices.
        process_groups: of torch.distributed, whose NCCL communicators are suspended afterwards:
            they cannot be used until :func:`wake`, and their buffers go back to the driver. All
            ranks of a group must do it, for several groups in the same order. A communicator that
            sleeps already is left as it is.

    Raises:
        ValueError: no thread ever used such a tag, there is no such `keep`, or this process has no
            such CUDA device.
        TypeError: `tags` is neither a string nor an iterable of strings, `device` is neither
            index, name nor torch.device, or `process_groups` is no iterable of process groups.
        RuntimeError: PyTorch does not run on esper_alloc; a capture is going on; there is not
            enough host memory; or a process group has no communicator that can be suspended, which
            takes PyTorch 2.12 with NCCL 2.29.7. After an error nothing more sleeps than before, on
            any device, and no contents are lost; but memory sleeps where it is NCCL that fails to
            suspend.

    Example::

        esper_alloc.sleep("weights", keep="nothing")  # for others to use the GPU
        esper_alloc.wake("weights")
    """
    if keep not in ("host", "nothing"):
        raise ValueError(f"keep={keep!r}: use 'host' or 'nothing'")
    groups = _groups(process_groups)
    if (why := why_off()) is not None:
        _names(tags)
        check_device_name(device)
        return SleepResult(0, 0, _everything_stays(why))
    shim = _shim_that_runs("sleep")
    awake = _communicators(groups, suspended=False)
    _watch_replays()
    given_back, kept, stays = shim.sleep(_names(tags), keep == "host", _index(device))
    for communicator in awake:
        figures = communicator.memory_stats()
        communicator.suspend()
        given_back += figures["suspend"]
        stays += ((figures["persist"], _NCCL_STAYS),)
    return SleepResult(given_back, kept, tuple(Stay(*stay) for stay in stays if stay[0]))


def wake(
    tags: Tags = None,
    *,
    device: torch.device | str | int | None = None,
    process_groups: Iterable[ProcessGroup] = (),
) -> int:
    """Brings the memory of `tags` back, at the same addresses and with its contents.

    Returns the bytes of device memory that came back. Afterwards every stream may use it. Tags
    that are awake are left as they are. Waits for a
    sleep in another thread to end.

    Args:
        tags: as for :func:`sleep`.
        device: None: all devices.
        process_groups: whose communicators are resumed afterwards, by all ranks and in the same
            order.

    Raises:
        ValueError, TypeError: as for :func:`sleep`.
        torch.OutOfMemoryError: the device has not enough memory now.
        RuntimeError: PyTorch does not run on esper_alloc, the driver refused something, or a
            process group has no communicator that can be suspended.

    After an error everything on that device still sleeps, and the call can be repeated. If there
    are several devices, those with lower numbers are awake then; and all memory is, where it is
    NCCL that fails to resume.

    Example::

        esper_alloc.sleep()
        given = esper_alloc.wake()  # bytes
    """
    groups = _groups(process_groups)
    if why_off() is not None:
        _names(tags)
        check_device_name(device)
        return 0
    shim = _shim_that_runs("wake")
    asleep = _communicators(groups, suspended=True)
    woken = int(shim.wake(_names(tags), _index(device)))
    for communicator in asleep:
        communicator.resume()
    return woken


class asleep(contextlib.ContextDecorator):
    """``with asleep("weights") as result:`` puts memory to sleep, and wakes it at the end, also
    after an exception. The arguments and errors are those of :func:`sleep` and :func:`wake`: where
    it is NCCL that fails to suspend at the beginning, the memory sleeps until :func:`wake`.

    Example::

        with esper_alloc.asleep("weights"):
            generate()
    """

    def __init__(
        self,
        tags: Tags = None,
        keep: Keep = "host",
        *,
        device: torch.device | str | int | None = None,
        process_groups: Iterable[ProcessGroup] = (),
    ) -> None:
        self._names = _names(tags)  # an iterator gives them once
        self._process_groups = _groups(process_groups)
        self._keep: Keep = keep
        self._device = device
        self._slept: list[int | None] = []

    def __enter__(self) -> SleepResult:
        groups = self._process_groups
        result = sleep(self._names, self._keep, device=self._device, process_groups=groups)
        # "cuda" may mean another one later.
        any_device = self._device is None or not is_enabled()
        self._slept.append(None if any_device else device_index(self._device))
        return result

    def __exit__(self, *exception: object) -> None:
        if not self._slept:
            raise RuntimeError("asleep() is left, but was not entered")
        wake(self._names, device=self._slept.pop(), process_groups=self._process_groups)


def trim_sleep() -> None:
    """Gives back the pinned host memory that is kept for the next sleep. The next sleep is
    slower then, because it has to pin memory again.

    Example::

        with esper_alloc.asleep():
            generate()
        esper_alloc.trim_sleep()  # that was the last time
    """
    if is_enabled():
        load_shim().trim_sleep()


def tag_stats(device: torch.device | str | int | None = None) -> dict[str, dict[str, Any]]:
    """Figures of the tags with memory on a device (None: the current one), by name; ``""`` is
    memory without a tag. In bytes, but ``asleep``, which is a bool:

    - ``asleep``: nothing is allocated under the tag;
    - ``allocated_bytes``: live, whether it sleeps or not;
    - ``reserved_bytes``: of device memory, free memory included;
    - ``sleeping_bytes``: of device memory that waking needs;
    - ``host_bytes``: of pinned host memory, which keeps contents or stays for the next sleep.

    Empty while PyTorch does not run on esper_alloc, or has not used CUDA.

    Raises:
        ValueError: this process has no such CUDA device. Before CUDA is used only the name is
            checked.
        TypeError: `device` is neither index, name nor torch.device.

    Example::

        for name, figures in esper_alloc.tag_stats().items():
            print(name or "without a tag", figures["reserved_bytes"] >> 20, "MiB")
    """
    if not is_enabled() or not untyped(sys.modules["torch"]).cuda.is_initialized():
        check_device_name(device)
        return {}
    return {one.pop("tag"): one for one in load_shim().tag_stats(device_index(device))}


def _shim_that_runs(doing: str) -> Any:
    if not is_enabled():
        raise RuntimeError(
            f"esper_alloc.{doing}() needs PyTorch to run on esper_alloc: call "
            f"esper_alloc.enable() before CUDA is used"
        )
    return load_shim()


def _check_tag(name: str) -> None:
    """Raises what push_tag() would, which is only called on esper_alloc."""
    if not isinstance(name, str):
        raise TypeError(f"a tag is a str, not {type(name).__name__}")
    if "\0" in name:
        raise ValueError("a tag cannot have a character 0 in it: leave it out")
    if not 1 <= len(name.encode()) <= 63:
        raise ValueError("a tag needs a name of 1 to 63 bytes")


def _groups(groups: Iterable[ProcessGroup]) -> tuple[ProcessGroup, ...]:
    """What a user gave as process_groups. Raises TypeError."""
    found = tuple(groups) if isinstance(groups, Iterable) else None
    if found is None or not all(hasattr(one, "_get_backend") for one in found):
        raise TypeError(f"process_groups={groups!r}: pass a list of torch.distributed's groups")
    return found


def _communicators(groups: Iterable[ProcessGroup], suspended: bool) -> list[Any]:
    """c10d's back ends of these groups whose communicators are suspended, or are not; each once,
    because a device mesh may stand for the default group."""
    import torch

    cuda = torch.device("cuda")
    found = list(dict.fromkeys(untyped(group)._get_backend(cuda) for group in groups))
    if not all(hasattr(one, "suspend") for one in found):
        raise RuntimeError(
            f"process_groups needs PyTorch 2.12 with NCCL 2.29.7, and this is {torch.__version__}: "
            f"leave it out; then NCCL's buffers stay until destroy_process_group()"
        )
    return [one for one in found if _is_suspended(one) is suspended]


def _is_suspended(backend: Any) -> bool | None:
    """None: NCCL makes the communicator with the first collective, and it has no memory yet."""
    try:
        return bool(backend.memory_stats()["suspended"])
    except RuntimeError as error:
        if "communicator not initialized" in str(error):
            return None
        raise


def _everything_stays(why: str) -> tuple[Stay, ...]:
    """What a sleep says that could do nothing."""
    torch = untyped(sys.modules.get("torch"))
    if torch is None or not torch.cuda.is_initialized():
        return ()
    size = sum(map(torch.cuda.memory_reserved, range(torch.cuda.device_count())))
    return (Stay(size, f"esper_alloc is off: {why}"),) if size else ()


def names_of(tags: str | Iterable[str]) -> tuple[str, ...]:
    """A name or several, as a user gave them.

    Raises:
        TypeError: `tags` is neither a string nor an iterable of strings.
    """
    if isinstance(tags, str):
        return (tags,)
    names = tuple(tags) if isinstance(tags, Iterable) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise TypeError(f"tags={tags!r}: pass a name, or a list of names")
    return names


def sleep_or_warn(tags: Tags, keep: Keep) -> None:
    """:func:`sleep` for frameworks, which look at no result: warns of what stays."""
    for stay in sleep(tags, keep).stays:
        warnings.warn(
            f"esper_alloc: {stay.bytes} bytes do not go to sleep: {stay.reason}",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )


def _names(tags: Tags) -> tuple[str, ...] | None:
    return None if tags is None else names_of(tags)


def _index(device: torch.device | str | int | None) -> int:
    """The device's index; -1 means all devices."""
    return -1 if device is None else device_index(device)


@functools.cache
def _watch_replays() -> None:
    """From the first sleep on a graph whose private pool sleeps is not replayed: its kernels
    would touch addresses without memory."""
    import torch

    graph = untyped(torch.cuda.CUDAGraph)
    replay = graph.replay
    pool_asleep = load_shim().pool_asleep

    @functools.wraps(replay)
    def replay_awake(self: Any) -> None:
        try:
            sleeping = pool_asleep(self.pool())
        except RuntimeError:  # it was not captured, as replay says
            sleeping = 0
        if sleeping:
            raise RuntimeError(
                f"this CUDA graph cannot be replayed while {sleeping} bytes of its private pool "
                f"sleep: call esper_alloc.wake() first"
            )
        replay(self)

    graph.replay = replay_awake
