"""Outputs of CUDA graphs that outlive the next run: :class:`cudagraph_outputs`.

``torch.compile(mode="reduce-overhead")`` replays CUDA graphs, which write to the
same addresses every time. What a graph returned is overwritten by its next run;
whoever kept it reads the new values, or gets "accessing tensor output of
CUDAGraphs that has been overwritten by a subsequent run". The general remedy is
to copy, outside the compiled function, whatever has to live longer. That is
what is done here, for those tensors alone whose memory belongs to a graph.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .allocator import _untyped

if TYPE_CHECKING:
    import torch

__all__ = ["CloneCounts", "cudagraph_outputs"]


@dataclasses.dataclass
class CloneCounts:
    """What one :class:`cudagraph_outputs` has done so far."""

    steps: int = 0
    """Outermost calls and ``with`` blocks on a machine with CUDA."""
    marked: int = 0
    """Steps that began with ``torch.compiler.cudagraph_mark_step_begin()``."""
    clones: int = 0
    """Copies of outputs."""
    bytes: int = 0
    """Bytes of these copies."""
    gradient_clones: int = 0
    """Copies of gradients that a graph computed."""
    gradient_bytes: int = 0
    """Bytes of these copies."""


#: Steps that begin while graphs' tensors of earlier ones are alive, in a row,
#: before their maker is told.
_PATIENCE = 16

#: The attributes of a wrapper itself; others are its function's.
_OWN = frozenset(("_function", "_clone", "_mark", "_unmarked_in_a_row", "_to_hook", "counts"))

#: Where graphs run.
_DEVICE = "cuda"


class cudagraph_outputs:
    """Makes the outputs of CUDA graphs the caller's own.

    As a wrapper around a compiled function or module, or around a plain
    function that calls several of them, one *step*::

        step = cudagraph_outputs(torch.compile(f, mode="reduce-overhead"))
        results = [step(x) for x in batches]      # each keeps its values

    or around a piece of code::

        with cudagraph_outputs() as step:
            direction = compiled_direction(angles)
            image = step.keep(compiled_image(direction))

    Within a step the outputs of one compiled function can be handed to the
    next as they are. What the step returns is copied outside the graphs, if
    its memory belongs to one: tensors in tuples, lists, dicts, dataclasses and
    other pytrees, to any depth. Everything else comes back as it is, numbers
    and CPU tensors, and tensors that are inputs, parameters, or views of them.
    Gradients flow through the copies, and gradients that a graph computed for
    arguments and for parameters of a wrapped module are copied too, so that
    ``.grad`` and what ``torch.autograd.grad`` returned are the caller's own.

    Outputs that share memory go on sharing it, unless they require gradients:
    then each gets its own.

    A step begins with ``torch.compiler.cudagraph_mark_step_begin()``. It does
    not while a tensor of an earlier step's graphs is alive: what a backward is
    still to read, or what an unwrapped compiled function returned. That call
    would invalidate it. PyTorch then keeps its memory apart and records the
    graphs once more, which is right and slow; a warning says so when it goes on.
    PyTorch counts steps for the whole process, and from the first one on does
    not begin any by itself: do not mix wrapped and unwrapped functions.

    Steps nest: an inner one copies, and marks nothing. Where there is no GPU,
    and inside ``torch.compile``, the function is simply called.

    Args:
        function: what to wrap. None: a context manager, or a decorator with
            options.
        clone: "graphs", to copy what belongs to a graph of ``torch.compile``;
            "all", to copy every CUDA tensor that shares no memory with the
            arguments, and every gradient: for ``torch.cuda.make_graphed_callables`` and graphs
            replayed by hand, which PyTorch does not keep an account of.
        mark: "auto", as above; "always", to begin each step even if that
            invalidates tensors; "never", where the program marks its steps.

    Attributes:
        counts: a :class:`CloneCounts`; may be read and replaced at any time.

    Raises:
        TypeError: `function` is not callable.
        ValueError: `clone` or `mark` is none of the above.
    """

    def __init__(
        self,
        function: Callable[..., Any] | None = None,
        *,
        clone: str = "graphs",
        mark: str = "auto",
    ) -> None:
        if function is not None and not callable(function):
            raise TypeError(
                "cudagraph_outputs wraps a function or module, not "
                f"{type(function).__name__}: call it with nothing for a "
                "context manager"
            )
        if clone not in ("graphs", "all"):
            raise ValueError(f"clone={clone!r}: use 'graphs' or 'all'")
        if mark not in ("auto", "always", "never"):
            raise ValueError(f"mark={mark!r}: use 'auto', 'always' or 'never'")
        if function is not None:
            functools.update_wrapper(self, function, updated=())
        self._function = function
        self._clone = clone
        self._mark = mark
        self._unmarked_in_a_row = 0
        self._to_hook: list[torch.Tensor] | None = None  # None: not looked for yet
        self.counts = CloneCounts()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        function = self._function
        if function is None:
            if len(args) != 1 or kwargs:
                raise TypeError(
                    "cudagraph_outputs() wraps nothing: use it in a with "
                    "statement, or call it with the one function to wrap"
                )
            return cudagraph_outputs(args[0], clone=self._clone, mark=self._mark)
        if torch.compiler.is_compiling() or not _graphs_are_possible():
            return function(*args, **kwargs)
        with self:
            if torch.is_grad_enabled():
                self._hook_gradients(args, kwargs)
            result = function(*args, **kwargs)
            return self._keep(result, (args, kwargs))

    def __enter__(self) -> cudagraph_outputs:
        if _graphs_are_possible():
            if _thread.depth == 0:
                self._begin_step()
            _thread.depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        if _graphs_are_possible():
            _thread.depth -= 1
            if _thread.depth == 0:
                _steps.leave()

    def keep(self, value: Any) -> Any:
        """`value` with copies of the tensors in it that belong to a graph.

        For ``with`` blocks: call it in the block, before the compiled function
        that made them runs again. A value that needs no copy is returned
        itself.
        """
        return self._keep(value, ()) if _graphs_are_possible() else value

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # A wrapped method is bound as any function.
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        # A wrapped module is still asked for its parameters and its state.
        if name.startswith("__") or self.__dict__.get("_function") is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self._function, name)
        if getattr(value, "__self__", None) is not self._function:
            return value

        @functools.wraps(value)
        def method(*args: Any, **kwargs: Any) -> Any:
            result = value(*args, **kwargs)
            # to(), eval() and the like return their module: that is still wrapped.
            return self if result is self._function else result

        return method

    def __setattr__(self, name: str, value: Any) -> None:
        # Written where it would be read.
        function = self.__dict__.get("_function")
        own = name in _OWN or name.startswith("__") or name in self.__dict__
        if own or not hasattr(function, name):
            super().__setattr__(name, value)
        else:
            setattr(function, name, value)

    def __repr__(self) -> str:
        return f"cudagraph_outputs({self._function!r})"

    # Steps

    def _begin_step(self) -> None:
        alone = _steps.enter()
        try:
            self.counts.steps += 1
            if self._mark != "never":
                self._mark_step(alone)
        except BaseException:
            _steps.leave()
            raise

    def _mark_step(self, alone: bool) -> None:
        alive = _managers_with_live_outputs()
        if self._mark == "always" or (alone and not alive):
            _mark_step_begin()
            self.counts.marked += 1
            self._unmarked_in_a_row = 0
            return
        if not _steps_are_counted():
            # PyTorch would begin a step at each compiled call; from the first
            # mark on it leaves that to us.
            _mark_step_begin()
        for manager in alive:
            manager.update_generation()  # they live on, in this step
        if alive:
            self._unmarked_in_a_row += 1
            if self._unmarked_in_a_row == _PATIENCE:
                self._warn(alive)

    def _warn(self, alive: list[Any]) -> None:
        outputs = sum(map(_live_outputs, alive))
        warnings.warn(
            f"{_PATIENCE} steps of cudagraph_outputs in a row began with "
            f"{outputs} tensors of earlier steps' CUDA graphs alive, so "
            "PyTorch records graphs anew. Somebody holds what an unwrapped "
            "compiled function returned, or results whose backward never ran: "
            "wrap, drop or detach them, or call under torch.no_grad().",
            RuntimeWarning,
            stacklevel=_level_of_caller(),
        )

    # Copies

    def _keep(self, value: Any, arguments: Any) -> Any:
        import torch

        if self._clone == "all":
            belongs: Callable[[torch.Tensor], bool] = _Elsewhere(arguments, self._function)
        else:
            storages = _graph_storages()
            if storages is None:  # a PyTorch that keeps another account
                belongs = _Elsewhere(arguments, self._function)
            elif not storages:
                return value
            else:
                belongs = functools.partial(_is_among, storages)
        found: dict[int, torch.Tensor] = {}
        _find(value, belongs, found)
        if not found:
            return value
        copies, size = _copies(found)
        self.counts.clones += len(copies)
        self.counts.bytes += size
        return _replace(value, copies)

    def _hook_gradients(self, args: Any, kwargs: Any) -> None:
        import torch

        for argument in (*args, *kwargs.values()):
            for value in _leaves(argument):
                if isinstance(value, torch.Tensor):
                    self._hook(value)
        if self._to_hook is None:
            is_module = isinstance(self._function, torch.nn.Module)
            self._to_hook = list(_untyped(self._function).parameters()) if is_module else []
        if self._to_hook:  # frozen ones stay, for when they are no longer
            self._to_hook = [one for one in self._to_hook if not self._hook(one)]

    def _hook(self, tensor: torch.Tensor) -> bool:
        """Whether its gradients are seen to."""
        if not tensor.requires_grad or tensor.device.type != _DEVICE:
            return False
        hooked = _hooked()
        if hooked.get(tensor) not in (self._clone, "all"):
            hooked[tensor] = self._clone
            _untyped(tensor).register_hook(self._keep_gradient)
        return True

    def _keep_gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """A hook on what a graph may have computed a gradient for."""
        if self._clone != "all":
            storages = _graph_storages()
            # None: a PyTorch that keeps another account.
            if storages is not None and not _is_among(storages, gradient):
                return None
        kept, size = _copy(gradient)
        self.counts.gradient_clones += 1
        self.counts.gradient_bytes += size
        return kept


# Steps


class _Thread(threading.local):
    depth = 0  # how many steps this thread is inside


class _Steps:
    """The threads that are inside a step: PyTorch counts steps for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0

    def enter(self) -> bool:
        """Whether no other thread is inside one."""
        with self._lock:
            self._open += 1
            return self._open == 1

    def leave(self) -> None:
        with self._lock:
            self._open -= 1


_thread = _Thread()
_steps = _Steps()


def _mark_step_begin() -> None:
    import torch

    _untyped(torch.compiler).cudagraph_mark_step_begin()


def _level_of_caller() -> int:
    """The stacklevel, for a caller here, of the first frame outside this file."""
    frame, level = sys._getframe(1), 1
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level


@functools.cache
def _graphs_are_possible() -> bool:
    import torch

    return torch.cuda.is_available()


# What PyTorch's CUDA graph trees say
#
# The trees are not public. A manager for each device knows its current path:
# the runs, each with its outputs, that were made since nothing was alive. Where
# a future PyTorch arranges this otherwise, everything is copied that may have
# to be, and steps are left to PyTorch.


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


def _live_outputs(manager: Any) -> int:
    return sum(1 for _ in manager.current_node.path_live_weakrefs())


def _managers_with_live_outputs() -> list[Any]:
    try:
        return [one for one in _managers() if _live_outputs(one)]
    except AttributeError:
        return []


def _steps_are_counted() -> bool:
    box = getattr(_trees(), "MarkStepBox", None)
    return getattr(box, "mark_step_counter", 0) != 0


#: The addresses of each path's outputs, by the last run of the path. They do
#: not change once the run has been made.
_storages_of_path: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()


def _graph_storages() -> frozenset[int] | None:
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


# Whose memory it is


def _storages(tensor: torch.Tensor) -> list[int]:
    """Where the storages begin that a CUDA tensor lives in; [] for others."""
    import torch

    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
        parts = [part for part in parts if isinstance(part, torch.Tensor)]
        return [one for part in parts for one in _storages(part)]
    if tensor.device.type != _DEVICE:
        return []
    if tensor.layout == torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
        return [one for part in parts for one in _storages(part)]
    if tensor.layout != torch.strided:
        return _storages(tensor.detach().values())
    try:
        return [tensor.untyped_storage().data_ptr()]
    except NotImplementedError:  # inside vmap and the like: no memory to copy
        return []


def _is_among(storages: frozenset[int], tensor: torch.Tensor) -> bool:
    return any(one in storages for one in _storages(tensor))


class _Elsewhere:
    """Is a CUDA tensor neither an argument nor a parameter, nor a view of one?"""

    def __init__(self, arguments: Any, function: Any) -> None:
        import torch

        known = [x for x in _leaves(arguments) if isinstance(x, torch.Tensor)]
        if isinstance(function, torch.nn.Module):
            known += [*function.parameters(), *function.buffers()]
        self._known = frozenset(one for x in known for one in _storages(x))

    def __call__(self, tensor: torch.Tensor) -> bool:
        storages = _storages(tensor)
        return bool(storages) and not any(x in self._known for x in storages)


@functools.cache
def _hooked() -> Any:
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()


# Containers


def _leaves(value: Any) -> Iterable[Any]:
    import torch
    from torch.utils import _pytree

    if isinstance(value, torch.Tensor):
        return (value,)
    if type(value) in (int, float, str, bool, type(None)):
        return ()
    return _pytree.tree_leaves(value)


def _elements(value: Any) -> list[Any]:
    """What a leaf of a pytree holds after all: elements of a set, fields."""
    if isinstance(value, (set, frozenset)):
        return list(value)
    names = _fields(value)
    if names is None:
        from .use import _pass_over  # warns of what may hold tensors unseen

        _pass_over(value)
    return [getattr(value, name, None) for name in names or ()]


def _fields(value: Any) -> list[str] | None:
    """The fields of a dataclass's instance, which pytrees do not look into."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in dataclasses.fields(value)]
    return None


def _find(
    value: Any,
    belongs: Callable[[torch.Tensor], bool],
    found: dict[int, torch.Tensor],
) -> None:
    """Collects the tensors in `value` that belong to a graph, by identity."""
    import torch

    for leaf in _leaves(value):
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in found and belongs(leaf):
                found[id(leaf)] = leaf
        else:
            for element in _elements(leaf):
                _find(element, belongs, found)


def _replace(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """`value` anew, with the copies in their places."""
    from torch.utils import _pytree

    def replaced(leaf: Any) -> Any:
        if id(leaf) in copies:
            return copies[id(leaf)]
        if isinstance(leaf, (set, frozenset)):
            return type(leaf)(_replace(element, copies) for element in leaf)
        names = _fields(leaf)
        if names is None:
            return leaf
        anew = copy.copy(leaf)
        for name in names:
            if hasattr(leaf, name):
                field = _replace(getattr(leaf, name), copies)
                object.__setattr__(anew, name, field)  # frozen ones too
        return anew

    return _pytree.tree_map(replaced, value)


# Copies


def _copies(
    found: dict[int, torch.Tensor],
) -> tuple[dict[int, torch.Tensor], int]:
    """A copy of each, by identity, and how many bytes were copied."""
    copies: dict[int, torch.Tensor] = {}
    copied = 0
    sharing: dict[int, list[torch.Tensor]] = {}
    for tensor in found.values():
        if _is_plain(tensor):
            start = tensor.untyped_storage().data_ptr()
            sharing.setdefault(start, []).append(tensor)
        else:
            copies[id(tensor)], size = _copy(tensor)
            copied += size
    for tensors in sharing.values():
        if len(tensors) == 1:
            copies[id(tensors[0])], size = _copy(tensors[0])
        else:
            size = _copy_sharing(tensors, copies)
        copied += size
    return copies, copied


def _is_plain(tensor: torch.Tensor) -> bool:
    """Can it be rebuilt from its storage, sizes and strides alone?"""
    import torch

    return (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _copy(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A copy, through which gradients flow; what expand() repeats is copied
    once and expanded again."""
    import torch

    thin = tensor
    if tensor.layout == torch.strided and tensor.numel() > 0:
        for dimension in range(tensor.dim()):
            if tensor.stride(dimension) == 0 and tensor.shape[dimension] > 1:
                thin = thin.narrow(dimension, 0, 1)
    if torch.is_grad_enabled() and thin.requires_grad:
        kept = _clone_and_hold(thin)
    else:
        kept = thin.clone()
    size = thin.numel() * thin.element_size()
    return (kept if thin is tensor else kept.expand(tensor.shape)), size


def _clone_and_hold(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose backward, as long as it is pending, holds the original.

    What the graph saved for its backward must not be overwritten before. PyTorch
    knows by who holds the graph's tensors from Python, and in some versions by
    nothing else (2.11; not 2.15); of a copied output nobody would.
    """
    import torch

    # In a list: held from Python. Autograd drops it when it frees its buffers.
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda original: [original], lambda held: held[0]
    )
    with hooks:
        kept: torch.Tensor = _untyped(_clone_function()).apply(tensor)
    return kept


@functools.cache
def _clone_function() -> Any:
    import torch

    class CloneAndHold(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(tensor)
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    return CloneAndHold


#: Views of one storage may differ in dtype: none is wider than complex128.
_ALIGNMENT = 16


def _copy_sharing(tensors: list[torch.Tensor], copies: dict[int, torch.Tensor]) -> int:
    """Copies tensors of one storage, which share the new one as they do now."""
    import torch

    spans = [_span(tensor) for tensor in tensors]
    first = min(start for start, _ in spans) // _ALIGNMENT * _ALIGNMENT
    end = max(end for _, end in spans)
    storage = tensors[0].untyped_storage()
    device = tensors[0].device
    piece = torch.empty(0, dtype=torch.uint8, device=device)
    piece.set_(storage, first, (end - first,), (1,))
    kept = piece.clone().untyped_storage()
    for tensor in tensors:
        offset = tensor.storage_offset() - first // tensor.element_size()
        anew = torch.empty(0, dtype=tensor.dtype, device=device)
        anew.set_(kept, offset, tensor.shape, tensor.stride())
        copies[id(tensor)] = anew
    return end - first


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of its storage that it uses, and the one after the last."""
    size = tensor.element_size()
    last = sum(
        (extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    first = int(tensor.storage_offset())
    return first * size, (first + int(last) + 1) * size
