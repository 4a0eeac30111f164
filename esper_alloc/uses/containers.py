"""The tensors inside whatever is marked: which containers are looked into.

Dynamo traces these functions, so they are Python that it understands: no
generators.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set, ValuesView
from typing import TYPE_CHECKING, Any

from ..installation.callers import user_stacklevel

if TYPE_CHECKING:
    import torch


def children(value: Any) -> tuple[Any, ...] | None:
    """What a container other than list and tuple holds; None for a leaf."""
    if value is None or isinstance(value, _SCALARS):
        return None
    if isinstance(value, Mapping):
        return tuple(value.values())
    if isinstance(value, (Set, Sequence, ValuesView)):
        return tuple(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple([getattr(value, field.name, None) for field in dataclasses.fields(value)])
    return None


#: Kinds of devices whose tensors need no mark.
_HOST = ("cpu", "meta")
_SCALARS = (bool, int, float, complex, str, bytes, bytearray, memoryview, range)
_PLAIN_TYPES = (bool, int, float, complex, str, bytes, bytearray, type)
_PLAIN_PACKAGES = frozenset(("builtins", "datetime", "decimal", "enum", "numpy", "pathlib"))
#: Where torch has its types that hold no tensors: dtypes, devices, streams.
_PLAIN_MODULES = frozenset(("torch", "torch._C", "torch.cuda.streams"))


def pass_over(leaf: Any) -> None:
    """Skips something inside a container that is no tensor.

    A tensor inside it would go unprotected, so unless it certainly holds none
    its type is named in a warning, once.
    """
    pass_over_type(type(leaf))


def pass_over_type(kind: type) -> None:
    if kind is type(None) or issubclass(kind, _PLAIN_TYPES):
        return
    module = kind.__module__
    plain = module.partition(".")[0] in _PLAIN_PACKAGES or module in _PLAIN_MODULES
    if not plain or issubclass(kind, Iterator):
        warn_of(kind)


# For Dynamo: called while it traces, and a constant in the graph.
pass_over_type._dynamo_marked_constant = True  # type: ignore[attr-defined]

_warned_of: set[type] = set()


def warn_of(kind: type) -> None:
    if kind in _warned_of:
        return
    _warned_of.add(kind)
    warnings.warn(
        f"esper_alloc does not look for tensors inside {kind.__module__}."
        f"{kind.__qualname__}: if it contains some, pass those.",
        RuntimeWarning,
        stacklevel=user_stacklevel(),
    )


def check_scope(tensors: tuple[Any, ...]) -> None:
    """Refuses what `using` cannot take before its block runs.

    Raises:
        TypeError: one of `tensors` is neither tensor nor container, or a stream is
            among them, at any depth.
    """
    torch = sys.modules.get("torch")
    for value in tensors:
        if not _check_no_stream(value, torch) and value is not None:
            raise _no_tensor(value)


def _check_no_stream(value: Any, torch: Any) -> bool:
    """False: `value` is neither tensor nor container."""
    if torch is not None and isinstance(value, torch.Tensor):
        return True
    if torch is not None and isinstance(value, (torch.Stream, torch.cpu.Stream)):
        raise TypeError("a stream is among the tensors: pass it by name, using(x, stream=side)")
    elements = value if isinstance(value, (list, tuple)) else children(value)
    if elements is None:
        return False
    for child in elements:
        _check_no_stream(child, torch)
    return True


def _no_tensor(value: Any) -> TypeError:
    hint = ""
    if isinstance(value, Iterator):
        hint = ": make a list of it"
    elif hasattr(value, "parameters"):
        hint = ": pass list(module.parameters())"
    said = f"expected a tensor, or a container of tensors, not {type(value).__name__}"
    return TypeError(said + hint)


def find_tensors(argument: Any, found: list[torch.Tensor]) -> None:
    """Appends the tensors in `argument` that do not live in host memory."""
    if not _search(argument, found) and argument is not None:
        raise _no_tensor(argument)


def _search(value: Any, found: list[torch.Tensor]) -> bool:
    """The same; False: `value` is neither tensor nor container."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            for name in names:
                _search(getattr(value, name), found)
        elif value.device.type not in _HOST:
            found.extend(parts(value))
        return True
    elements = value if isinstance(value, (list, tuple)) else children(value)
    if elements is None:
        return False
    for child in elements:
        if not _search(child, found):
            pass_over(child)
    return True


def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that a sparse one has its memory in; else itself."""
    import torch

    if tensor.layout == torch.strided:
        return (tensor,)
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)
