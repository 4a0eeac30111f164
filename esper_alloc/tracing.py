"""Marks and scopes where PyTorch traces: ``torch.compile``, ``make_fx``, fake
tensors, functorch, and any other dispatch mode.

There the calls become the operators ``torch.ops.esper_alloc.*``, which the
compiled half defines (csrc/torch/operators.cpp says what each does). This
module makes the compiler treat them rightly. Dynamo traces the functions below
in place of the real ones; torch.fx is told that the operators have effects; and
Inductor is told what may not pass them (inductor.py). All of that happens when
those parts of PyTorch are first imported, so that a program that compiles
nothing does not load them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence, Set, ValuesView
from types import ModuleType
from typing import Any

#: Kinds of devices whose tensors are marked.
_MARKED = ("cuda",)

_OPERATORS = ("record_use", "hold", "enter_scope", "leave_scope", "take")


# The calls, on tensors of CUDA devices that were found already


def mark(tensors: list[Any], stream: Any, event: Any, gate: bool, until_free: bool) -> None:
    """Marks by operator. An event cannot stand in a graph: instead of it, the
    memory is held, after its free, until its device has done all it had then.
    """
    import torch

    operators: Any = torch.ops.esper_alloc
    if event is not None:
        operators.hold.default(tensors)
    elif stream is None:
        operators.record_use.default(tensors, 0, -1, gate, until_free)
    else:
        operators.record_use.default(
            tensors, stream.stream_id, stream.device_index, gate, until_free
        )


# What Dynamo traces in place of the functions of use.py. Python that Dynamo
# understands: no compiled function, no sys.modules, no generator.


def _record_use(tensors: Any, stream: Any = None, *, event: Any = None, gate: bool = True) -> None:
    import torch

    # (Dynamo cannot be asked of what type an event is.)
    _fix_stream(stream)
    found: list[Any] = []
    if not _search(tensors, found) and tensors is not None:
        raise TypeError(
            f"expected a tensor, or a container of tensors, not {type(tensors).__name__}"
        )
    if len(found) != 0:
        # Nobody's references can be counted here: in grad mode any tensor may
        # have been saved for backward.
        stream = stream if isinstance(stream, torch.Stream) else None
        mark(found, stream, event, bool(gate), torch.is_grad_enabled())


def _fix_stream(stream: Any) -> None:
    """Makes the graph one for this stream, whose id stands in it: comparing is
    what Dynamo takes as a reason to compile again for another."""
    _check_stream(stream)
    if stream is not None:
        stream == stream  # noqa: B015


def _search(value: Any, found: list[Any]) -> bool:
    import torch

    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                _search(getattr(value, name), found)
        elif value.device.type in _MARKED:
            found.append(value)
        return True
    if isinstance(value, dict):
        for child in value.values():
            _search_element(child, found)
        return True
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return False
    if isinstance(value, Mapping):
        for key in value:
            _search_element(value[key], found)
        return True
    if isinstance(value, (Set, Sequence, ValuesView)):
        for child in value:
            _search_element(child, found)
        return True
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        for name in value.__dataclass_fields__:
            if hasattr(value, name):  # an InitVar is listed, too, and not kept
                _search_element(getattr(value, name), found)
        return True
    return False


def _search_element(value: Any, found: list[Any]) -> None:
    if not _search(value, found) and value is not None:
        _pass_over_type(type(value))


def _pass_over_type(kind: type) -> None:
    from . import use

    use._pass_over_type(kind)


# For Dynamo: called while it traces, and a constant in the graph.
_pass_over_type._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _EnteredTraced:
    """One entry into a scope inside a graph. Where the graph's operations run
    is the compiler's to say, so the stream is not made current: the operators
    put the scope in order with what the stream does before and after it.
    """

    def __init__(self, stream: Any, tensors: tuple[Any, ...]) -> None:
        import torch

        found: list[Any] = []
        _search(tensors, found)
        self._stream = stream
        _fix_stream(stream)
        operators: Any = torch.ops.esper_alloc
        operators.enter_scope.default(found, stream.stream_id, stream.device_index)

    def leave(self, tensors: tuple[Any, ...]) -> None:
        import torch

        found: list[Any] = []
        for value in tensors:
            if not _search(value, found) and value is not None:
                raise TypeError(
                    f"expected a tensor, or a container of tensors, not {type(value).__name__}"
                )
        stream = self._stream
        operators: Any = torch.ops.esper_alloc
        operators.leave_scope.default(
            found,
            stream.stream_id,
            stream.device_index,
            torch.is_grad_enabled(),
        )


class _EnteredCurrentTraced:
    """The same for a scope without a stream."""

    #: All of a graph runs on one stream: there is nothing to wait for.
    current = None

    def leave(self, tensors: tuple[Any, ...]) -> None:
        for value in tensors:
            _record_use(value)


def _enter(stream: Any, tensors: tuple[Any, ...]) -> Any:
    import torch

    if not isinstance(stream, torch.Stream):  # none, or one of the CPU
        return _EnteredCurrentTraced()
    return _EnteredTraced(stream, tensors)


def _hand_over(tensors: tuple[Any, ...], stream: Any) -> None:
    import torch

    if not isinstance(stream, torch.Stream):  # none, or one of the CPU
        return
    found: list[Any] = []
    _search(tensors, found)
    _fix_stream(stream)
    operators: Any = torch.ops.esper_alloc
    operators.take.default(found, stream.stream_id, stream.device_index)


def _check_stream(stream: Any) -> None:
    import torch

    if stream is not None and not isinstance(stream, (torch.Stream, torch.cpu.Stream)):
        raise TypeError(f"stream must be a torch.cuda.Stream or None, not {type(stream).__name__}")


# Telling PyTorch


def _teach_fx(fx_node: Any) -> None:
    import torch

    for operator in _OPERATORS:
        packet = getattr(torch.ops.esper_alloc, operator)
        for overload in packet.overloads():
            fx_node.has_side_effect(getattr(packet, overload))


def _teach_dynamo(decorators: Any) -> None:
    from . import use

    pairs: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (use.record_use, _record_use),
        (use._enter, _enter),
        (use._hand_over, _hand_over),
        (use._check_stream, _check_stream),
    ]
    for original, traced in pairs:
        decorators.substitute_in_graph(original, skip_signature_check=True)(traced)


_method: Callable[..., Any] = _record_use


def _trace_method(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """``x.record_use(...)`` on a traced tensor is traced as the function."""
    builder = importlib.import_module("torch._dynamo.variables.builder")
    function = builder.SourcelessBuilder.create(tx, _method)
    return function.call_function(tx, [self, *args], kwargs)


def _teach_dynamo_method(variables: Any) -> None:
    tensor = variables.TensorVariable
    methods = getattr(tensor, "tp_methods", None)
    if methods is None:
        tensor.method_record_use = _trace_method
    else:
        base = importlib.import_module("torch._dynamo.variables.base")
        methods["record_use"] = base.Method(_trace_method)


def tensor_methods_changed() -> None:
    """Dynamo lists the methods of ``torch.Tensor`` when it first needs them; a method
    that came later is none to it when it is called through the class."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    listed = getattr(rules, "get_tensor_method", None)
    forget = getattr(listed, "cache_clear", None)
    if forget is not None:
        forget()


def _teach_dynamo_subclasses(torch_function: Any) -> None:
    """Of subclasses with ``__torch_function__``, which is not asked about a mark
    in eager code either."""
    variable = torch_function.TensorWithTFOverrideVariable
    call_any, is_overridden = variable.call_method, torch_function._is_attr_overridden

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "record_use" and not is_overridden(tx, self, name):
            return _trace_method(self, tx, *args, **kwargs)
        return call_any(self, tx, name, args, kwargs)

    variable.call_method = call_method


def _teach_wrapper(wrapper: Any) -> None:
    """A mark of such a tensor is one of the tensors inside. (Others get the
    operator, and see for themselves.)"""
    import torch

    def mark_parts(cls: Any, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        parts: list[Any] = []
        for tensor in args[0]:
            if isinstance(tensor, wrapper):
                names = tensor.__tensor_flatten__()[0]
                inner = [getattr(tensor, name) for name in names]
                # Some name what is no tensor, as a mesh of devices, too.
                parts += [one for one in inner if isinstance(one, torch.Tensor)]
            else:
                parts.append(tensor)
        return func(parts, *args[1:], **(kwargs or {}))

    for name in _OPERATORS:
        overload = getattr(torch.ops.esper_alloc, name).default
        torch.library.register_torch_dispatch(overload, wrapper, mark_parts)


def _teach_dtensor(api: Any) -> None:
    _teach_wrapper(api.DTensor)


def _teach_nested(nested_tensor: Any) -> None:
    import torch

    # Autograd has a key of its own for them, and nothing to do there.
    torch_library: Any = torch.library
    library = torch_library.Library("esper_alloc", "IMPL")
    for name in _OPERATORS:
        library.impl(name, torch_library.fallthrough_kernel, "AutogradNestedTensor")
    _libraries.append(library)
    _teach_wrapper(nested_tensor.NestedTensor)


#: What is registered goes with them.
_libraries: list[Any] = []


def _teach_inductor_order(decomposition: Any) -> None:
    from . import inductor

    inductor.register_decompositions(decomposition)


def _teach_inductor(lowering: Any) -> None:
    from . import inductor

    inductor.register_lowerings(lowering)


_said = False


def _teach(what: str, teach: Callable[[Any], None], module: ModuleType) -> None:
    """A torch that cannot be taught is said once, and nothing else fails."""
    global _said
    try:
        teach(module)
    except Exception as error:
        import torch

        if _said:
            return
        _said = True
        warnings.warn(
            f"esper_alloc cannot teach {what} of torch {torch.__version__} what "
            f"a mark is ({type(error).__name__}: {error}): keep record_use and "
            f"using out of compiled functions, or put them into one that "
            f"torch.compiler.disable() takes out.",
            RuntimeWarning,
            stacklevel=2,
        )


def install() -> None:
    """Called once, when use.py is imported and torch is there."""
    for what, module, teach in (
        ("torch.fx", "torch.fx.node", _teach_fx),
        ("Dynamo", "torch._dynamo.decorators", _teach_dynamo),
        ("Dynamo", "torch._dynamo.variables.tensor", _teach_dynamo_method),
        ("Dynamo", "torch._dynamo.variables.torch_function", _teach_dynamo_subclasses),
        ("Inductor", "torch._inductor.decomposition", _teach_inductor_order),
        ("Inductor", "torch._inductor.lowering", _teach_inductor),
        ("DTensor", "torch.distributed.tensor._api", _teach_dtensor),
        ("nested tensors", "torch.nested._internal.nested_tensor", _teach_nested),
    ):
        _when_imported(module, functools.partial(_teach, what, teach))


# A torch that the compiled half was not built for: there are no operators


_NOT_TRACED = (
    "esper_alloc's PyTorch part is not there for this torch, so record_use() and "
    "using() cannot stand in a graph: `python -m esper_alloc doctor` says why"
)


def _say_not_traced() -> None:
    global _said
    if not _said:
        _said = True
        warnings.warn(
            f"{_NOT_TRACED}. Here they are a break in the graph, and run as in eager code.",
            RuntimeWarning,
            stacklevel=2,
        )


_say_not_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _break_at(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_eagerly(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    call_eagerly._torchdynamo_disable = True  # type: ignore[attr-defined]
    call_eagerly._torchdynamo_disable_msg = _NOT_TRACED  # type: ignore[attr-defined]

    def traced(*args: Any, **kwargs: Any) -> Any:
        _say_not_traced()
        return call_eagerly(*args, **kwargs)

    return traced


def _teach_breaks(decorators: Any) -> None:
    from . import use

    pairs: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (use._check_stream, _check_stream),
        (use.record_use, _method),
        (use._enter, _break_at(use._enter)),
        (use._hand_over, _break_at(use._hand_over)),
    ]
    for original, traced in pairs:
        decorators.substitute_in_graph(original, skip_signature_check=True)(traced)


def install_breaks() -> None:
    """In place of install(), where the operators are missing."""
    from . import use

    global _method
    _method = _break_at(use.record_use)
    for module, teach in (
        ("torch._dynamo.decorators", _teach_breaks),
        ("torch._dynamo.variables.tensor", _teach_dynamo_method),
        ("torch._dynamo.variables.torch_function", _teach_dynamo_subclasses),
    ):
        _when_imported(module, functools.partial(_teach, "Dynamo", teach))


# Waiting for an import


_waiting: dict[str, Callable[[ModuleType], None]] = {}


def _when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Calls `then` with module `name` once it has been imported, or now."""
    module = sys.modules.get(name)
    if module is not None:
        then(module)
        return
    if not _waiting:
        sys.meta_path.insert(0, _Watch())
    _waiting[name] = then


class _Watch(importlib.abc.MetaPathFinder):
    """A finder that finds nothing of its own: it lets the others find a module
    that is waited for, and calls back once that has been executed."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _waiting:
            return None
        for finder in list(sys.meta_path):
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._watch(name, spec)
                return spec
        return None

    def _watch(self, name: str, spec: importlib.machinery.ModuleSpec) -> None:
        # The loader stays what it is, since sources are read through it. Each
        # search makes a fresh one.
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            vars(loader).pop("exec_module", None)
            then = _waiting.pop(name, None)
            if not _waiting and self in sys.meta_path:
                sys.meta_path.remove(self)
            if then is not None:
                then(module)

        loader.exec_module = exec_module
