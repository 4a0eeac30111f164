"""What PyTorch's compilers are told of marks and scopes.

Dynamo is told to trace the functions of tracing.py in place of the real ones;
torch.fx that the operators have effects; and Inductor what may not pass them
(inductor.py). All of that happens when those parts of PyTorch are first
imported, so that a program that compiles nothing does not load them.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from ..installation.import_watch import when_imported
from . import containers, inductor, tracing


def _teach_fx(fx_node: Any) -> None:
    import torch

    operators: Any = torch.ops.esper_alloc
    for packet in (operators.record_use, operators.order, operators.in_memory):
        for overload in packet.overloads():
            fx_node.has_side_effect(getattr(packet, overload))


class Calls(NamedTuple):
    """The functions that Dynamo must not trace, or the ones to trace in their places."""

    record_use: Callable[..., Any]
    touch: Callable[..., Any]
    enter: Callable[..., Any]
    hand_over: Callable[..., Any]


_TRACED = Calls(tracing.record_use, tracing.touch, tracing.enter, tracing.hand_over)


def _teach_dynamo(calls: Calls, instead: Calls, decorators: Any) -> None:
    for original, traced in zip(calls, instead, strict=True):
        decorators.substitute_in_graph(original, skip_signature_check=True)(traced)


_method: Callable[..., Any] = tracing.record_use


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


def _teach_dynamo_streams(streams: Any) -> None:
    """A graph is for one stream (_fixed() in tracing.py), so what says which one is a
    constant in it. Dynamo would make a node of it, which a graph inside of that graph, as a
    checkpoint has it, cannot use."""
    variables = importlib.import_module("torch._dynamo.variables")
    variable = streams.StreamVariable
    get_any = getattr(variable, "var_getattr", None)
    if get_any is None:  # a newer Dynamo
        return

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        if name in ("stream_id", "device_index") and self.source is not None:
            return variables.ConstantVariable.create(getattr(self.value, name))
        return get_any(self, tx, name)

    variable.var_getattr = var_getattr


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


def _teach_wrapper(module: Any) -> None:
    """A mark of such a tensor is one of the tensors inside. (Others get the
    operator, and see for themselves.)"""
    import torch

    def mark_parts(cls: Any, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        parts: list[Any] = []
        containers.find_tensors(args[0], parts)
        return func(parts, *args[1:], **(kwargs or {}))

    wrapper = module.DTensor if hasattr(module, "DTensor") else module.NestedTensor
    for name in tracing.OPERATORS:
        overload = getattr(torch.ops.esper_alloc, name).default
        torch.library.register_torch_dispatch(overload, wrapper, mark_parts)


def _teach_inductor_rewrites(joint_graph: Any) -> None:
    inductor.register_rewrites(joint_graph)
    inductor.tag_compiled_code(importlib.import_module("torch.compiler.config"))


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
            f"using out of compiled functions, or put them into a function under "
            f"torch.compiler.disable().",
            RuntimeWarning,
            stacklevel=2,
        )


def install(calls: Calls) -> None:
    """Called once, by use.py with its functions, when torch is there."""
    for what, module, teach in (
        ("torch.fx", "torch.fx.node", _teach_fx),
        ("Dynamo", "torch._dynamo.decorators", functools.partial(_teach_dynamo, calls, _TRACED)),
        ("Dynamo", "torch._dynamo.variables.tensor", _teach_dynamo_method),
        ("Dynamo", "torch._dynamo.variables.torch_function", _teach_dynamo_subclasses),
        ("Dynamo", "torch._dynamo.variables.streams", _teach_dynamo_streams),
        ("Inductor", "torch._inductor.fx_passes.joint_graph", _teach_inductor_rewrites),
        ("Inductor", "torch._inductor.fx_passes.post_grad", inductor.register_last_rewrites),
        ("Inductor", "torch._inductor.fx_passes.reinplace", inductor.keep_out_of_marked),
        ("Inductor", "torch._inductor.lowering", inductor.register_lowerings),
        ("DTensor", "torch.distributed.tensor._api", _teach_wrapper),
        ("nested tensors", "torch.nested._internal.nested_tensor", _teach_wrapper),
    ):
        when_imported(module, functools.partial(_teach, what, teach))


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
            f"{_NOT_TRACED}. Here they break the graph, and run as in eager code.",
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


def install_breaks(calls: Calls) -> None:
    """In place of install(), where the operators are missing."""
    global _method
    instead = Calls(*map(_break_at, calls))
    _method = instead.record_use
    for module, teach in (
        ("torch._dynamo.decorators", functools.partial(_teach_dynamo, calls, instead)),
        ("torch._dynamo.variables.tensor", _teach_dynamo_method),
        ("torch._dynamo.variables.torch_function", _teach_dynamo_subclasses),
    ):
        when_imported(module, functools.partial(_teach, "Dynamo", teach))
