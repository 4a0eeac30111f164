"""Outputs of CUDA graphs that outlive the next run: :class:`cudagraph_outputs`.

``torch.compile(mode="reduce-overhead")`` replays CUDA graphs, which write to the
same addresses every time. What a graph returned is overwritten by its next run;
whoever kept it reads the new values, or gets "accessing tensor output of
CUDAGraphs that has been overwritten by a subsequent run". The general remedy is
to copy, outside the compiled function, whatever has to live longer. That is
what is done here, for those tensors alone whose memory belongs to a graph.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    TypeVar,
    overload,
)

from ...installation.callers import user_stacklevel
from ...installation.pytorch import untyped
from . import memory
from .containers import find_tensors, replace_tensors, tensors_in
from .copies import copies_of, copy_of
from .memory import Elsewhere, is_among
from .trees import graph_storages, live_outputs, managers_with_live_outputs, steps_are_counted

if TYPE_CHECKING:
    import torch
    import typing_extensions

    P = typing_extensions.ParamSpec("P", default=...)
    R = typing_extensions.TypeVar("R", default=Any)
else:
    P, R = ParamSpec("P"), TypeVar("R")
OtherP = ParamSpec("OtherP")
OtherR = TypeVar("OtherR")
Module = TypeVar("Module", bound="torch.nn.Module")
Value = TypeVar("Value")

__all__ = ["CloneCounts", "cudagraph_outputs"]


@dataclasses.dataclass
class CloneCounts:
    """What one :class:`cudagraph_outputs` has done so far.

    Attributes:
        steps: outermost calls and ``with`` blocks on a machine with CUDA.
        marked: steps that began with ``torch.compiler.cudagraph_mark_step_begin()``.
        clones: copies of outputs.
        bytes: bytes of these copies.
        gradient_clones: copies of gradients that a graph computed.
        gradient_bytes: bytes of these copies.

    Example::

        step = esper_alloc.cudagraph_outputs(compiled)
        step(x)
        print(step.counts.clones, step.counts.bytes)
    """

    steps: int = 0
    marked: int = 0
    clones: int = 0
    bytes: int = 0
    gradient_clones: int = 0
    gradient_bytes: int = 0


#: Steps that begin while graphs' tensors of earlier ones are alive, in a row,
#: before their maker is told.
_PATIENCE = 16

#: The attributes of a wrapper itself; others are its function's.
_HOOKS = ("_to_hook", "_registered")
_OWN = frozenset(("_function", "_clone", "_mark", "_unmarked_in_a_row", "counts", *_HOOKS))


class cudagraph_outputs(Generic[P, R]):
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

    A step begins with a call of ``torch.compiler.cudagraph_mark_step_begin()``. That
    call would invalidate tensors of earlier steps' graphs that are still alive: what a
    backward has yet to read, or what an unwrapped compiled function returned. So the
    step leaves the call out while there are such tensors. PyTorch then keeps their
    memory apart and records the graphs once more, which is correct but slow; a warning
    says so if it continues. PyTorch counts steps for the whole process, and once it was
    called, begins no step by itself: do not mix wrapped and unwrapped functions.

    Type checkers see what is wrapped: the signature of a function, the class of a
    module. ``isinstance`` also takes a wrapped module for one of its class.

    Steps nest: an inner one copies, and marks nothing. Where there is no GPU,
    and inside ``torch.compile``, the function is simply called.

    Args:
        function (Callable | None): what to wrap. None: a context manager, or a decorator with
            options.
        clone (str): "graphs", to copy what belongs to a graph of ``torch.compile``;
            "all", to copy every CUDA tensor that shares no memory with the
            arguments, and every gradient: for ``torch.cuda.make_graphed_callables`` and graphs
            replayed by hand, which PyTorch does not keep an account of.
        mark (str): "auto", as above; "always", to begin each step even if that
            invalidates tensors; "never", where the program marks its steps.

    Attributes:
        counts: a :class:`CloneCounts`; may be read and replaced at any time.

    Raises:
        TypeError: `function` is not callable.
        ValueError: `clone` or `mark` is none of the above.
    """

    counts: CloneCounts
    _function: Callable[..., Any] | None
    _clone: str
    _mark: str
    _unmarked_in_a_row: int
    _to_hook: list[torch.Tensor]  # parameters
    _registered: int  # how many parameters had been registered when these were looked for

    @overload
    def __new__(
        cls, function: None = None, *, clone: str = "graphs", mark: str = "auto"
    ) -> cudagraph_outputs[[], None]: ...
    @overload
    def __new__(  # type: ignore[misc, overload-overlap]  # no subclass of this, but see __class__
        cls, function: Module, *, clone: str = "graphs", mark: str = "auto"
    ) -> Module: ...
    @overload
    def __new__(
        cls, function: Callable[P, R], *, clone: str = "graphs", mark: str = "auto"
    ) -> cudagraph_outputs[P, R]: ...
    # Everything is done here, since type checkers would look at an __init__ instead.
    def __new__(cls, function: Any = None, *, clone: str = "graphs", mark: str = "auto") -> Any:
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
        self = super().__new__(cls)
        if function is not None:
            functools.update_wrapper(self, function, updated=())
        self._function = function
        self._clone = clone
        self._mark = mark
        self._unmarked_in_a_row = 0
        self._to_hook = []
        self._registered = -1
        self.counts = CloneCounts()
        return self

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # What asks isinstance(..., torch.nn.Module) wants the parameters, which are there.
        function = self.__dict__.get("_function")
        return type(function) if is_module(function) else cudagraph_outputs

    @overload
    def __call__(
        self: cudagraph_outputs[[], None], function: Callable[OtherP, OtherR], /
    ) -> cudagraph_outputs[OtherP, OtherR]: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
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

    def __enter__(self) -> cudagraph_outputs[P, R]:
        if _graphs_are_possible():
            if _thread.depth == 0:
                self._begin_step()
            _thread.depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        if _graphs_are_possible():
            if _thread.depth == 0:
                raise RuntimeError("a step of cudagraph_outputs() is left, but was not entered")
            _thread.depth -= 1
            if _thread.depth == 0:
                _steps.leave()

    def keep(self, value: Value) -> Value:
        """`value` with copies of the tensors in it that belong to a graph.

        For ``with`` blocks: call it in the block, before the compiled function
        that made them runs again. A value that needs no copy is returned
        itself.
        """
        kept: Value = self._keep(value, ()) if _graphs_are_possible() else value
        return kept

    @overload
    def __get__(self, instance: None, owner: type) -> cudagraph_outputs[P, R]: ...
    @overload
    def __get__(
        self: cudagraph_outputs[Concatenate[Any, OtherP], OtherR],
        instance: object,
        owner: type | None = None,
    ) -> Callable[OtherP, OtherR]: ...
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
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = value(*args, **kwargs)
            # to(), eval() and the like return their module: that is still wrapped.
            return self if result is self._function else result

        return types.MethodType(method, self)

    def __setattr__(self, name: str, value: Any) -> None:
        # Written where it would be read.
        function = self.__dict__.get("_function")
        own = name in _OWN or name.startswith("__") or name in self.__dict__
        if own or not hasattr(function, name):
            super().__setattr__(name, value)
        else:
            setattr(function, name, value)

    def __reduce__(self) -> Any:
        # A decorated function is found under its name, where pickle would expect the function.
        name = vars(self).get("__qualname__", "")
        if name and _named(self.__module__, name) is self:
            return name
        # Of a wrapped module pickle would ask for the class.
        state = {name: value for name, value in vars(self).items() if name not in _HOOKS}
        return _wrap, (self._function, self._clone, self._mark), state

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
        alive = managers_with_live_outputs()
        if self._mark == "always" or (alone and not alive):
            _mark_step_begin()
            self.counts.marked += 1
            self._unmarked_in_a_row = 0
            return
        if not steps_are_counted():
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
        outputs = sum(map(live_outputs, alive))
        warnings.warn(
            f"{_PATIENCE} steps of cudagraph_outputs in a row began with "
            f"{outputs} tensors of earlier steps' CUDA graphs alive, so "
            "PyTorch records graphs again each time. The program keeps what an unwrapped "
            "compiled function returned, or results whose backward never ran: "
            "wrap, drop or detach them, or call under torch.no_grad().",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )

    # Copies

    def _keep(self, value: Any, arguments: Any) -> Any:
        if self._clone == "all":
            belongs: Callable[[torch.Tensor], bool] = Elsewhere(arguments, self._function)
        else:
            storages = graph_storages()
            if storages is None:  # a PyTorch that keeps another account
                belongs = Elsewhere(arguments, self._function)
            elif not storages:
                return value
            else:
                belongs = functools.partial(is_among, storages)
        found: dict[int, torch.Tensor] = {}
        find_tensors(value, belongs, found)
        if not found:
            return value
        copies, size = copies_of(found)
        self.counts.clones += len(copies)
        self.counts.bytes += size
        return replace_tensors(value, copies)

    def _hook_gradients(self, args: Any, kwargs: Any) -> None:
        for argument in (*args, *kwargs.values()):
            for tensor in tensors_in(argument):
                self._hook(tensor)
        if is_module(self._function) and self._registered != _registrations().count:
            self._registered = _registrations().count  # perhaps one took another's place
            self._to_hook = list(untyped(self._function).parameters())
        if self._to_hook:  # frozen ones stay, for when they are no longer
            self._to_hook = [one for one in self._to_hook if not self._hook(one)]

    def _hook(self, tensor: torch.Tensor) -> bool:
        """Whether its gradients are seen to."""
        if not tensor.requires_grad or tensor.device.type != memory.DEVICE:
            return False
        hooked = _hooked()
        if hooked.get(tensor) not in (self._clone, "all"):
            hooked[tensor] = self._clone
            untyped(tensor).register_hook(self._keep_gradient)
        return True

    def _keep_gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """A hook on what a graph may have computed a gradient for."""
        if self._clone != "all":
            storages = graph_storages()
            # None: a PyTorch that keeps another account.
            if storages is not None and not is_among(storages, gradient):
                return None
        kept, size = copy_of(gradient)
        self.counts.gradient_clones += 1
        self.counts.gradient_bytes += size
        return kept


def _named(module: str, name: str) -> Any:
    """What stands in a module under a qualified name; None: nothing does."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _wrap(function: Any, clone: str, mark: str) -> Any:
    return cudagraph_outputs(function, clone=clone, mark=mark)


def is_module(function: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(function, torch.nn.Module)


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

    def begin_anew(self) -> None:
        """In a forked child, which has the forking thread alone."""
        self._lock = threading.Lock()
        self._open = int(_thread.depth > 0)


_thread = _Thread()
_steps = _Steps()
os.register_at_fork(after_in_child=_steps.begin_anew)


def _mark_step_begin() -> None:
    import torch

    untyped(torch.compiler).cudagraph_mark_step_begin()


@functools.cache
def _graphs_are_possible() -> bool:
    import torch

    return torch.cuda.is_available()


class _Registrations:
    """Counts the parameters that modules were given since this was made."""

    def __init__(self) -> None:
        from torch.nn.modules.module import register_module_parameter_registration_hook

        self.count = 0
        register_module_parameter_registration_hook(self)

    def __call__(self, *_: object) -> None:
        self.count += 1


_registrations = functools.cache(_Registrations)


@functools.cache
def _hooked() -> Any:
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()
