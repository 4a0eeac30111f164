"""What PyTorch's CUDA graph trees say of the graphs that are alive.

The trees are not public. A manager for each device knows its current path:
the runs, each with its outputs, that were made since nothing was alive. Where
a future PyTorch arranges this otherwise, everything is copied that may have
to be, and steps are left to PyTorch.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any


def _trees() -> Any:
    """The module, if anything was compiled with graphs."""
    return sys.modules.get("torch._inductor.cudagraph_trees")


def _managers() -> list[Any]:
    """This thread's managers that have a current path."""
    trees = _trees()
    if trees is None:
        return []
    import torch

    name = "tree_manager_containers"
    containers = getattr(trees.local, name, None)
    if containers is None and torch._C._is_key_in_tls(name):
        containers = torch._C._get_obj_in_tls(name)  # a thread of autograd
    managers = [one.tree_manager for one in list((containers or {}).values())]
    return [one for one in managers if one is not None and one.current_node is not None]


def live_outputs(manager: Any) -> int:
    return sum(1 for _ in manager.current_node.path_live_weakrefs())


def managers_with_live_outputs() -> list[Any]:
    try:
        return [one for one in _managers() if live_outputs(one)]
    except AttributeError:
        return []


def steps_are_counted() -> bool:
    box = getattr(_trees(), "MarkStepBox", None)
    return getattr(box, "mark_step_counter", 0) != 0


#: The addresses of each path's outputs, by the last run of the path. They do
#: not change once the run has been made.
_storages_of_path: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()


def graph_storages() -> frozenset[int] | None:
    """Where the storages begin that belong to graphs; None: nobody can tell."""
    try:
        paths = [_path_storages(one.current_node) for one in _managers()]
    except AttributeError:
        return None
    return frozenset[int]().union(*paths)


def _path_storages(last: Any) -> frozenset[int]:
    found = _storages_of_path.get(last)
    if found is None:
        found = frozenset(
            reference.data_ptr()
            for node in last._path_from_root
            for reference in node.outputs_weakrefs
            if reference is not None
        )
        _storages_of_path[last] = found
    return found
