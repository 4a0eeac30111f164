"""Making esper_alloc PyTorch's CUDA allocator, and finding out why it cannot be."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import warnings
from collections.abc import Callable
from types import EllipsisType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

from ..installation.bools import checked_bool
from ..installation.callers import user_stacklevel
from ..installation.files import library_path
from ..installation.pytorch import (
    REINSTALL,
    NoCudaError,
    OtherTorchError,
    UnavailableError,
    check_cuda,
    load_shim,
    need_torch,
    untyped,
)
from . import automatic_uses
from .choices import (
    ALL,
    ALLOWANCE,
    BLACK_BOX,
    MONITOR,
    SEGMENTS,
    USES,
    Choice,
    segments_asked_for,
)

if TYPE_CHECKING:
    from torch.cuda.memory import CUDAPluggableAllocator, _CUDAAllocator

_VARIABLE = "ESPER_ALLOC"
SWITCHED_OFF = f"{_VARIABLE}=0 turns it off"
_NOT_AUTOMATIC = (
    "uses cannot be automatic on pluggable_allocator(), which PyTorch tells "
    "too little: use esper_alloc.enable() in place of it."
)
_OPTIONS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


#: What modules above this one do once esper_alloc is PyTorch's allocator.
once_enabled: list[Callable[[], None]] = []

#: Why enable() did nothing, in half a sentence; None: it did what it is for, or was not called.
_declined: str | None = None


def why_off() -> str | None:
    """Why esper_alloc stays off although the program asked for it, in half a sentence; None where
    nothing of that kind is known."""
    why = SWITCHED_OFF if is_switched_off() else _declined
    return None if why is None or is_enabled() else why


def is_switched_off() -> bool:
    """Whether the environment turns :func:`enable` off."""
    return os.environ.get(_VARIABLE) == "0"


def wrong_switch() -> str | None:
    """What is wrong with the switch in the environment; None: nothing."""
    value = os.environ.get(_VARIABLE, "")
    if value in ("", "0", "1"):
        return None
    return f"{_VARIABLE}={value} is neither 0 nor 1: set one of them, or unset it"


def _check_environment() -> None:
    """Raises for what the core would refuse, which without a GPU it is never asked."""
    for choice in ALL:
        choice.in_environment()


def _check_backend(torch: ModuleType) -> None:
    """Raises if PyTorch was told to use its other allocator."""
    if torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        return
    names = [name for name in _OPTIONS if "cudaMallocAsync" in os.environ.get(name, "")]
    variables = " and ".join(names) or "the allocator options"
    raise UnavailableError(
        f"PyTorch was started with its cudaMallocAsync back end, and only one allocator "
        f"can be current: remove backend:cudaMallocAsync from {variables}."
    )


def _check_no_other(torch: ModuleType) -> None:
    """Raises if the program has made an allocator of another library PyTorch's current one."""
    backend = torch.cuda.get_allocator_backend()
    if backend in ("native", "cudaMallocAsync"):
        return
    name = _name_of_current(torch)
    raise UnavailableError(
        f"PyTorch has another allocator already, {name or f'whose back end is {backend!r}'}, and "
        f"only one can be current: call esper_alloc.enable() in place of "
        f"change_current_allocator(), or set {_VARIABLE}=0 to keep the other one."
    )


def _name_of_current(torch: ModuleType) -> str | None:
    """Where the current allocator is to be found, such as
    ``rmm.allocators.torch.rmm_torch_allocator``."""
    kind = torch.cuda.memory._CUDAAllocator
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            # By type(): isinstance() would wake up objects that stand for others.
            if issubclass(type(value), kind) and is_current(value):
                return f"{module.__name__}.{name}"
    return None


@functools.cache
def allocator() -> _CUDAAllocator:
    """The allocator, for ``torch.cuda.memory.change_current_allocator()``.

    Each call returns the same object. The swap must come before CUDA
    initialises; :func:`enable` does it and says so.

    Raises:
        UnavailableError: esper_alloc cannot serve this torch, or PyTorch was
            started with ``backend:cudaMallocAsync``.
        ValueError: a variable of the environment has a value that nobody knows.

    Example::

        torch.cuda.memory.change_current_allocator(esper_alloc.allocator())
    """
    _check_environment()
    shim = load_shim()
    _check_backend(need_torch())
    from torch.cuda.memory import _CUDAAllocator

    if USES.in_environment() == "automatic":
        shim.automatic_uses(True)
        automatic_uses.install(shim)
    return _CUDAAllocator(shim.allocator())


@functools.cache
def pluggable_allocator() -> CUDAPluggableAllocator:
    """The core behind ``torch.cuda.memory.CUDAPluggableAllocator``.

    It needs no part that was built for this torch, so it works with any
    version. PyTorch's pluggable allocators have no statistics, snapshots or
    ``torch.cuda.OutOfMemoryError``; :func:`allocator` has.

    Raises:
        ValueError: a variable of the environment has a value that nobody knows.
        RuntimeError: ``ESPER_ALLOC_USES`` asks for automatic uses, which it cannot have.

    Example::

        torch.cuda.memory.change_current_allocator(esper_alloc.pluggable_allocator())
    """
    _check_environment()
    if USES.in_environment() == "automatic":
        raise RuntimeError(_NOT_AUTOMATIC)
    need_torch()
    from torch.cuda.memory import CUDAPluggableAllocator

    path = library_path()
    pluggable = CUDAPluggableAllocator(path, "esper_alloc_malloc", "esper_alloc_free")
    library = ctypes.CDLL(path)
    hooks = untyped(pluggable).allocator()

    def address(name: str) -> int:
        value = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        assert value is not None, name
        return value

    hooks.set_init_fn(address("esper_alloc_init"))
    hooks.set_reset_fn(address("esper_alloc_reset"))
    hooks.set_memory_fraction_fn(address("esper_alloc_set_memory_fraction"))
    hooks.set_base_alloc_fn(address("esper_alloc_base"))
    hooks.set_record_stream_fn(address("esper_alloc_record_stream"))
    library.esper_alloc_set_record_stream_visible(1)
    return pluggable


def is_current(candidate: Any) -> bool:
    import torch

    return torch._C._cuda_getAllocator() is candidate.allocator()


def is_enabled() -> bool:
    """Whether PyTorch allocates CUDA memory through esper_alloc. Where :func:`enable` did
    nothing, it does not.

    Example::

        print("esper_alloc" if esper_alloc.is_enabled() else "PyTorch's own allocator")
    """
    if "torch" not in sys.modules:
        return False
    shim = sys.modules.get("esper_alloc._torch")
    if shim is not None and shim.is_current():
        return True
    return _is_pluggable()


def _is_pluggable() -> bool:
    """Whether PyTorch allocates through :func:`pluggable_allocator`. Asking must not make one."""
    return pluggable_allocator.cache_info().currsize != 0 and is_current(pluggable_allocator())


def enable(
    *,
    uses: Literal["marked", "automatic"] | None = None,
    allowance: int | str | EllipsisType | None = ...,
    segments: Literal["auto", "mapped", "classic"] | None = None,
    black_box: int | str | EllipsisType | None = ...,
    monitor: bool | None = None,
    required: bool = False,
) -> None:
    """Makes esper_alloc PyTorch's CUDA allocator, for the rest of the process.

    Where there is no CUDA, it does nothing and warns once: with a CPU build of PyTorch, without
    NVIDIA's driver, or where ``CUDA_VISIBLE_DEVICES`` hides every GPU. It does nothing under
    ``ESPER_ALLOC=0`` either. PyTorch keeps its own allocator then: marks act as
    ``record_stream``, figures are 0, and :func:`sleep` gives nothing back.

    Args:
        uses: how the allocator learns that another stream uses memory. ``"marked"``:
            the program says so, by ``record_use``, ``using`` or ``record_stream``.
            ``"automatic"``: every operator of PyTorch's is seen too, so that nothing has
            to be marked. May be changed by a later call.
        allowance: how much of a stream's free memory may wait for other streams' work. Beyond
            that the host waits for it, before memory grows. Bytes, or a string: bytes,
            or a number with the unit K, M, G or T, with or without ``iB`` and a space, such as
            ``"128MiB"``, ``"1 GiB"`` or ``"512M"``. 0: the host is held back whenever more than
            two blocks wait. None or ``"off"``: it never is.
        segments: where memory comes from. ``"mapped"``: pages at reserved addresses.
            ``"classic"``: one allocation of the driver for each segment. ``"auto"``: mapped
            where the driver supports it, else classic.
        black_box: the host memory in which the latest events are recorded, as a size like
            `allowance`. None or ``"off"``: nothing is.
        monitor: let ``python -m esper_alloc top``, run by the same user, watch this process. A
            later call may turn it on, and does so in a forked child.
        required: raise in place of the warning where there is no CUDA. ``ESPER_ALLOC=0`` still
            turns everything off.

    If the installed parts were not built for this torch, :func:`pluggable_allocator` serves
    it, and a warning says so.

    An argument that is left out is taken from the environment (``ESPER_ALLOC_USES``,
    ``ESPER_ALLOC_ALLOWANCE``, ``ESPER_ALLOC_SEGMENTS``, ``ESPER_ALLOC_BLACK_BOX``,
    ``ESPER_ALLOC_MONITOR``). The defaults are ``"marked"``, ``"128MiB"``, ``"auto"``, ``"64MiB"``
    and False. Arguments that are given become
    part of the environment, so that child processes have them too. So does
    ``NCCL_P2P_DIRECT_DISABLE=1``, if segments may be mapped and the variable is not set.

    ``python -m esper_alloc docs uses`` says more, as do ``docs automatic``,
    ``docs black-box`` and ``docs limits``.

    Raises:
        ValueError: there is no such choice, or it is not a size; or an environment variable, or
            an option of PyTorch, has an unknown value; or PyTorch's option
            ``expandable_segments`` asks for other segments than the argument. The message names
            it.
        TypeError: `required` is not a bool.
        RuntimeError: CUDA is initialised already; or esper_alloc is enabled with another
            allowance, kind of segments or black box, or through :func:`pluggable_allocator`, which
            cannot have automatic uses.
        UnavailableError: esper_alloc cannot serve this torch, or not with automatic uses; or
            PyTorch was started with ``backend:cudaMallocAsync``, or has another allocator
            already, which the message names; or there is no CUDA, and it is `required`.

    After an error nothing has changed.

    Example::

        esper_alloc.enable(uses="automatic", allowance="256MiB")
    """
    required = checked_bool("required", required)
    chosen: dict[Choice, str] = {}
    if allowance is not ...:
        chosen[ALLOWANCE] = ALLOWANCE.given(allowance)
    if black_box is not ...:
        chosen[BLACK_BOX] = BLACK_BOX.given(black_box)
    if segments is not None:
        chosen[SEGMENTS] = SEGMENTS.given(segments)
    given_uses = None if uses is None else USES.given(uses)
    given_monitor = None if monitor is None else MONITOR.given(monitor)
    if not is_enabled() and _stays_off(required):
        return
    _check_options(chosen.get(SEGMENTS))
    wanted_uses = given_uses or USES.in_environment()
    first = not is_enabled()
    if not first:
        for choice, value in chosen.items():
            if not choice.same(value, choice.in_environment()):
                raise RuntimeError(
                    f"esper_alloc is enabled already, with {choice.argument}="
                    f"{choice.in_environment()!r}: give {choice.argument} to the first "
                    f"call of esper_alloc.enable(), or set {choice.variable}."
                )
        if given_uses == "automatic" and _is_pluggable():
            load_shim()  # raises what stands in the way, if it is another torch
            raise RuntimeError(_NOT_AUTOMATIC)
    else:
        _swap(wanted_uses == "automatic")
    _set_monitor(given_monitor)
    if not first and (given_uses is None or _is_pluggable()):
        return
    if given_uses is not None:
        chosen[USES] = given_uses
    os.environ.update({choice.variable: value for choice, value in chosen.items()})
    if first:
        from ..recorder.writing import write_by_itself

        write_by_itself()
    if segments_asked_for()[0] != "classic":
        # NCCL would let the GPUs of one process reach into each other's tensors. But pages are open
        # to another GPU only after PyTorch has asked for it, and NCCL does not ask PyTorch.
        os.environ.setdefault("NCCL_P2P_DIRECT_DISABLE", "1")
    if _is_pluggable():
        return
    if first:
        for call in once_enabled:
            call()
    compiled = load_shim()
    compiled.automatic_uses(wanted_uses == "automatic")
    if wanted_uses == "automatic":
        automatic_uses.install(compiled)


def _set_monitor(chosen: str | None) -> None:
    if chosen is not None:
        os.environ[MONITOR.variable] = chosen
    elif MONITOR.in_environment() == "0":
        return
    from ..live.monitor import close_monitor, open_monitor

    (open_monitor if MONITOR.in_environment() == "1" else close_monitor)()


def _stays_off(required: bool) -> bool:
    """Whether there is nothing to enable. Warns once where there is no CUDA."""
    global _declined
    if (wrong := wrong_switch()) is not None:
        raise ValueError(wrong)
    if is_switched_off():
        return True
    _check_environment()
    try:
        check_cuda(need_torch())
    except NoCudaError as error:
        if required:
            raise
        if _declined is None:
            warnings.warn(
                f"esper_alloc does nothing here: {error.why}. PyTorch keeps its own allocator; "
                f"marks and helpers work with it.",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )
        _declined = error.why
        return True
    return False


def _check_options(segments: str | None) -> None:
    """Raises if PyTorch's options ask for another kind of segments than the argument: they count
    more."""
    kind, by = segments_asked_for()
    if segments not in (None, "auto") and segments != kind and by.startswith("expandable"):
        raise ValueError(
            f"segments={segments!r} contradicts {by} in PYTORCH_CUDA_ALLOC_CONF or "
            f"PYTORCH_ALLOC_CONF: leave out one of them"
        )


def _swap(automatic: bool) -> None:
    other_torch = None
    ours: _CUDAAllocator
    _check_no_other(need_torch())
    try:
        ours = allocator()
    except OtherTorchError as error:
        if automatic:  # function pointers cannot have them
            raise
        other_torch = error.difference
        _check_backend(need_torch())
        ours = pluggable_allocator()
    import torch

    if untyped(torch.cuda).is_initialized():
        raise RuntimeError(
            "esper_alloc.enable() came too late: CUDA is initialised and "
            "PyTorch cannot change its allocator any more. Call it before the "
            "first CUDA tensor, stream or torch.cuda call (right after `import "
            "torch`), or leave the script alone and start it with `python -m "
            "esper_alloc run script.py`."
        )
    torch.cuda.memory.change_current_allocator(ours)
    if other_torch is not None:
        warnings.warn(
            f"esper_alloc {other_torch}: until you run `{REINSTALL}` in its source folder, it "
            "works through PyTorch's pluggable allocator, without statistics, snapshots and "
            "automatic uses.",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )


def enable_from_environment() -> None:
    """What ``ESPER_ALLOC=1`` asks for at ``import esper_alloc``.

    An import must not fail for lack of a GPU or of a matching torch, so what
    goes wrong is a warning.
    """
    if (wrong := wrong_switch()) is not None:
        warnings.warn(f"{wrong}; esper_alloc stays off.", RuntimeWarning, stacklevel=3)
    if os.environ.get(_VARIABLE) != "1":
        return
    try:
        enable()
    except (RuntimeError, ValueError) as error:  # PyTorch's options: ValueError
        warnings.warn(
            f"{_VARIABLE}=1, but PyTorch keeps its own allocator: {error}",
            RuntimeWarning,
            stacklevel=3,
        )
