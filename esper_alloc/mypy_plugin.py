"""Tells mypy of ``Tensor.record_use``; see ``install_tensor_method``.

In the configuration of mypy::

    [tool.mypy]
    plugins = ["esper_alloc.mypy_plugin"]
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.nodes import ARG_NAMED_OPT, ARG_OPT, ArgKind, Argument, Var
from mypy.plugin import ClassDefContext, Plugin
from mypy.plugins.common import add_method_to_class
from mypy.types import AnyType, NoneType, Type, TypeOfAny, UnionType

_TENSOR = "torch._tensor.Tensor"
_BASE = "torch._C.TensorBase"
_EVENTS = ("torch._C.Event", "torch._C._CudaEventBase")


def _add_method(context: ClassDefContext) -> None:
    if context.cls.fullname != _TENSOR:
        return
    api = context.api

    def optional(*names: str) -> Type:
        found = [api.named_type_or_none(name) for name in names]
        kinds = [kind or AnyType(TypeOfAny.special_form) for kind in found]
        return UnionType([*kinds, NoneType()])

    def argument(name: str, kind_of: Type, kind: ArgKind) -> Argument:
        return Argument(Var(name, kind_of), kind_of, None, kind)

    add_method_to_class(
        api,
        context.cls,
        "record_use",
        [
            argument("stream", optional("torch._C.Stream"), ARG_OPT),
            argument("event", optional(*_EVENTS), ARG_NAMED_OPT),
        ],
        NoneType(),
    )


class TensorMethodPlugin(Plugin):
    """Adds the method while mypy reads torch's Tensor class."""

    def get_base_class_hook(self, fullname: str) -> Callable[[ClassDefContext], None] | None:
        return _add_method if fullname == _BASE else None


def plugin(version: str) -> type[Plugin]:
    return TensorMethodPlugin
