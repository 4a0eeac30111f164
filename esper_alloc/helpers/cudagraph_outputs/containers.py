"""The tensors inside of what a function takes and returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ...uses.containers import children, pass_over, warn_of

if TYPE_CHECKING:
    import torch


def leaves(value: Any) -> Iterable[Any]:
    import torch
    from torch.utils import _pytree

    if isinstance(value, torch.Tensor):
        return (value,)
    if type(value) in (int, float, str, bool, type(None)):
        return ()
    return _pytree.tree_leaves(value)


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """The tensors in what a caller passes: other objects hold what they like."""
    import torch

    seen = set() if seen is None else seen
    for leaf in leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif id(leaf) not in seen:  # fields may lead in a circle
            seen.add(id(leaf))
            inside = [getattr(leaf, name, None) for name in fields(leaf) or ()]
            for one in leaf if isinstance(leaf, (set, frozenset)) else inside:
                yield from tensors_in(one, seen)


def elements(value: Any) -> list[Any]:
    """What a leaf of a pytree holds after all: elements of a set, fields."""
    if isinstance(value, (set, frozenset)):
        return list(value)
    names = fields(value)
    if names is None:
        pass_over(value)  # warns of what may hold tensors unseen
        if any(map(leaves, children(value) or ())):  # a view of a dict, say
            warn_of(type(value))
    return [getattr(value, name, None) for name in names or ()]


def fields(value: Any) -> list[str] | None:
    """The fields of a dataclass's instance, which pytrees do not look into."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in dataclasses.fields(value)]
    return None


def find_tensors(
    value: Any,
    belongs: Callable[[torch.Tensor], bool],
    found: dict[int, torch.Tensor],
    seen: set[int] | None = None,
) -> None:
    """Collects the tensors in `value` that belong to a graph, by identity."""
    import torch

    seen = set() if seen is None else seen
    for leaf in leaves(value):
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in found and belongs(leaf):
                found[id(leaf)] = leaf
        elif id(leaf) not in seen:  # fields may lead in a circle
            seen.add(id(leaf))
            for element in elements(leaf):
                find_tensors(element, belongs, found, seen)


def replace_tensors(
    value: Any, copies: dict[int, torch.Tensor], made: dict[int, Any] | None = None
) -> Any:
    """`value` anew, with the copies in their places."""
    from torch.utils import _pytree

    done = {} if made is None else made

    def replaced(leaf: Any) -> Any:
        if id(leaf) in copies:
            return copies[id(leaf)]
        if isinstance(leaf, (set, frozenset)):
            return type(leaf)(replace_tensors(x, copies, done) for x in leaf)
        names = fields(leaf)
        if names is None:
            return leaf
        if id(leaf) in done:
            return done[id(leaf)]
        anew = done[id(leaf)] = copy.copy(leaf)
        for name in names:
            if hasattr(leaf, name):
                field = replace_tensors(getattr(leaf, name), copies, done)
                object.__setattr__(anew, name, field)  # frozen ones too
        return anew

    return _pytree.tree_map(replaced, value)
