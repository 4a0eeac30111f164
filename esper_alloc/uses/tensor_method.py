"""``Tensor.record_use``: marking as a method, for programs that want it."""

from __future__ import annotations

from typing import Any

from ..installation.pytorch import need_torch
from . import teaching, use

__all__ = ["install_tensor_method", "uninstall_tensor_method"]

_NAME = "record_use"


def install_tensor_method() -> None:
    """Gives ``torch.Tensor`` a method ``record_use(stream=None, *, event=None)``,
    which is :func:`esper_alloc.record_use` of that tensor.

    PyTorch's own class is changed, for every user of it in the process, which
    is why nothing but this call does it. Calling it again changes nothing;
    :func:`uninstall_tensor_method` removes the method.

    mypy learns of the method from the plugin ``esper_alloc.mypy_plugin``.

    Raises:
        RuntimeError: ``torch.Tensor`` has a ``record_use`` already that is not
            this one; it was left alone.
        UnavailableError: there is no PyTorch.

    Example::

        esper_alloc.install_tensor_method()
        x.record_use(side)
    """
    tensor: Any = need_torch().Tensor
    present = getattr(tensor, _NAME, None)
    if present is None:
        method = _make_method(tensor)
        setattr(tensor, _NAME, method)
        _installed.append(method)
        teaching.tensor_methods_changed()
    elif not _is_ours(present):
        raise RuntimeError(
            f"torch.Tensor has a method record_use of its own, by "
            f"{_origin(present)}: it was left alone. Use that one, or call "
            f"esper_alloc.record_use(x, stream)."
        )


def uninstall_tensor_method() -> None:
    """Removes the method that :func:`install_tensor_method` added, if any.

    Raises:
        UnavailableError: there is no PyTorch.

    Example::

        esper_alloc.install_tensor_method()
        esper_alloc.uninstall_tensor_method()
        assert not hasattr(torch.Tensor, "record_use")
    """
    tensor: Any = need_torch().Tensor
    if _is_ours(vars(tensor).get(_NAME)):
        delattr(tensor, _NAME)
        teaching.tensor_methods_changed()
    _installed.clear()


_installed: list[Any] = []


def _is_ours(method: Any) -> bool:
    return any(method is ours for ours in _installed)


def _origin(method: Any) -> str:
    module = getattr(method, "__module__", None)
    return str(module) if module else "PyTorch"


def _make_method(tensor: Any) -> Any:
    if use._compiled is not None:
        return use._compiled.make_tensor_method(tensor)

    def record_use(self: Any, stream: Any = None, *, event: Any = None) -> None:
        use.record_use(self, stream, event=event)

    record_use.__doc__ = use.record_use.__doc__
    return record_use
