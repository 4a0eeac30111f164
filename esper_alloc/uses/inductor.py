"""What Inductor is told of the operators that stand for marks and scopes.

Inductor moves operations that do not depend on each other, and lets one buffer
of its own take over the memory of another. A mark has no result, so to Inductor
nothing depends on it. These things pin it down:

- while the graph is traced, a mark comes to take what was computed from the
  tensor so far as arguments (`after`), so that no pass on the graph moves one of
  those operations behind it;
- what is marked is computed into one buffer, before its first reader: else each
  reader might get a copy of its own, and the mark another one;
- when the graph is lowered, it becomes the overload that declares to write what
  it marks: the scheduler then keeps earlier reads before it and later ones
  behind it, without a copy, since nothing is written;
- a marked buffer is given back to the allocator, which knows of the mark, and
  not to another buffer of the same graph;
- a mark lasts until the free, since later passes may still move a read behind it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["register_decompositions", "register_lowerings", "tag_compiled_code"]

#: Raise it when the code that is compiled for marks changes.
RULES = 2


# While tracing


def register_decompositions(decomposition: Any) -> None:
    """For ``torch._inductor.decomposition``."""
    import torch

    operators: Any = torch.ops.esper_alloc

    def record_use(tensors: Any, *rest: Any) -> Any:
        return _put_ordered(operators.record_use.ordered, tensors, _readers, rest)

    def leave_scope(tensors: Any, *rest: Any) -> Any:
        return _put_ordered(operators.leave_scope.ordered, tensors, _scope_ends, rest)

    decomposition.register_decomposition([operators.record_use.default])(record_use)
    decomposition.register_decomposition([operators.leave_scope.default])(leave_scope)
    # Inductor compiles with a copy of its table. It is older than the first mark if anything
    # was compiled before.
    copied = getattr(decomposition, "fast_random_decomps", None)
    forget = getattr(copied, "cache_clear", None)
    if forget is not None:
        forget()


def tag_compiled_code(config: Any) -> None:
    """For ``torch.compiler.config``: what Inductor compiled by other rules than these, and keeps
    on the disk, is not taken."""
    rules = f"esper_alloc {RULES}"
    if rules not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag} {rules}".strip()


def _put_ordered(
    overload: Any,
    tensors: Any,
    find: Callable[[list[Any]], list[Any]],
    rest: tuple[Any, ...],
) -> Any:
    """Puts `overload` into the graph that is being traced, with what `find`
    says of the graph's nodes for `tensors`."""
    import torch
    from torch.fx.experimental import proxy_tensor

    mode: Any = proxy_tensor.get_proxy_mode()
    if mode is None:
        return NotImplemented
    slots: list[Any] = [proxy_tensor.get_proxy_slot(t, mode.tracer, None) for t in tensors]
    if not slots or None in slots:  # nothing, or a constant, is marked
        return NotImplemented
    marked = [slot.proxy for slot in slots]
    nodes = [proxy.node for proxy in marked]
    for node in nodes:
        _put_in_memory(_root(node))
    after = [torch.fx.Proxy(node, mode.tracer) for node in find(nodes)]
    mode.tracer.create_proxy("call_function", overload, (marked, after, *rest), {})
    return None


def _put_in_memory(root: Any) -> None:
    """Makes what follows read the one buffer that `root` is computed into."""
    import torch

    in_memory = torch.ops.esper_alloc.in_memory.default
    if root.op != "call_function" or root.target is in_memory:
        return
    present = [user for user in root.users if user.target is in_memory]
    if present:
        kept = present[0]
    else:
        with root.graph.inserting_after(root):
            kept = root.graph.call_function(in_memory, (root,))
        # A symbol for a size that depends on data is the first node's alone to define.
        same = {name: value for name, value in root.meta.items() if name != "unbacked_bindings"}
        kept.meta.update(same)
    root.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)


def _readers(nodes: list[Any]) -> list[Any]:
    """The results so far of operations on the memory that `nodes` stand for,
    views of it included."""
    found: dict[Any, None] = {}
    for node in nodes:
        for view in _views(_root(node)):
            for user in view.users:
                if not _is_view(user):
                    found.update(dict.fromkeys(_results(user)))
    return list(found)


def _scope_ends(nodes: list[Any]) -> list[Any]:
    """What was computed in the scope that ends, and not read again in it."""
    import torch

    scope: Any = torch.ops.esper_alloc
    found: dict[Any, None] = dict.fromkeys(_readers(nodes))
    depth = 0
    for node in reversed(nodes[0].graph.nodes):
        if node.target in (scope.leave_scope.default, scope.leave_scope.ordered):
            depth += 1
        elif node.target is scope.enter_scope.default:
            if depth == 0:
                break
            depth -= 1
        elif not node.users and _is_tensor(node):
            found[node] = None
    return list(found)


def _root(node: Any) -> Any:
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _views(root: Any) -> Iterator[Any]:
    """`root` and, to any depth, views of it."""
    todo = [root]
    while todo:
        node = todo.pop()
        yield node
        todo.extend(user for user in node.users if _is_view(user))


def _is_view(node: Any) -> bool:
    """Whether the node stands for memory that another node stands for too."""
    import torch

    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if node.target is operator.getitem:
        return _is_view(node.args[0])
    if node.target is torch.ops.esper_alloc.in_memory.default:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def _results(node: Any) -> list[Any]:
    """The tensors that an operation returns, as nodes."""
    if _is_tensor(node):
        return [node]
    return [user for user in node.users if user.target is operator.getitem and _is_tensor(user)]


def _is_tensor(node: Any) -> bool:
    import torch

    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)


# While lowering


def register_lowerings(lowering: Any) -> None:
    """For ``torch._inductor.lowering``."""
    import torch

    operators: Any = torch.ops.esper_alloc

    def register(overload: Any, lower: Callable[..., Any]) -> None:
        lowering.register_lowering(overload, type_promotion_kind=None)(lower)

    register(operators.in_memory.default, _lower_in_memory)
    for name in ("hold", "take", "enter_scope"):
        packet = getattr(operators, name)
        register(packet.default, _lower_to(packet.pinned))
    for name in ("record_use", "leave_scope"):
        packet = getattr(operators, name)
        register(packet.default, _lower_mark_to(packet.pinned))
        register(packet.ordered, _lower_ordered_to(packet.pinned))


def _lower_in_memory(tensor: Any) -> Any:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    tensor.realize()
    if isinstance(tensor.get_layout(), ir.FlexibleLayout):
        value = V.graph.current_node.meta["val"]
        ir.as_storage_and_layout(
            tensor,
            exact_strides=[_expression(stride) for stride in value.stride()],
        )
    return tensor


def _expression(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr


def _lower_to(pinned: Any) -> Callable[..., None]:
    def lower(tensors: list[Any], *rest: Any) -> None:
        _put_pinned(pinned, tensors, *rest)

    return lower


def _lower_mark_to(pinned: Any) -> Callable[..., None]:
    def lower(tensors: list[Any], *rest: Any) -> None:
        _put_mark(pinned, tensors, [], *rest)

    return lower


def _lower_ordered_to(pinned: Any) -> Callable[..., None]:
    import torch

    is_scope = pinned is torch.ops.esper_alloc.leave_scope.pinned

    def lower(tensors: list[Any], after: list[Any], *rest: Any) -> None:
        late = _live_results() if is_scope else []
        _put_mark(pinned, tensors, _realized([*after, *late]), *rest)

    return lower


def _put_mark(pinned: Any, tensors: list[Any], after: list[Any], *rest: Any) -> None:
    """A mark in compiled code lasts until the free, whatever it says: Inductor may still move a
    read behind it (through a view that the graph does not know, or where a copy turns out to be
    none), but never behind the free."""
    _put_pinned(pinned, [*tensors, *_inputs_written_later()], after, *rest[:-1], True)


def _inputs_written_later() -> list[Any]:
    """The inputs of the graph that get the contents of what the current node marks. In the
    program they are what is marked."""
    import torch
    from torch._inductor.virtualized import V

    graph: Any = V.graph
    marked = {_root(node) for node in graph.current_node.args[0]}
    return [
        graph.env[node.args[0]]
        for node in graph.current_node.graph.nodes
        if node.target is torch.ops.aten.copy_.default
        and node.args[0].op == "placeholder"
        and _root(node.args[1]) in marked
    ]


def _realized(values: list[Any]) -> list[Any]:
    """The same, each once, as buffers."""
    once: dict[str, Any] = {}
    for value in values:
        if value is not None:  # a token that orders effects
            value.realize()
            once.setdefault(value.get_name(), value)
    return list(once.values())


def _put_pinned(pinned: Any, tensors: list[Any], *rest: Any) -> None:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    graph: Any = V.graph
    if _is_of_other_pass(graph):
        return
    buffers = _realized(tensors)
    graph.never_reuse_buffers.update(buffer.get_name() for buffer in buffers)
    ir.FallbackKernel.create(pinned, buffers, *rest)


def _is_of_other_pass(graph: Any) -> bool:
    """Whether the mark is a copy: what has no result, PyTorch puts into each of
    forward and backward that has its arguments."""
    tag = graph.current_node.meta.get("partitioner_tag")
    return bool(tag == ("is_forward" if graph.is_backward else "is_backward"))


def _live_results() -> list[Any]:
    """What the scope that ends has computed and somebody reads behind it."""
    from torch._inductor.virtualized import V

    graph: Any = V.graph
    return [
        graph.env[node]
        for node in _nodes_of_scope(graph.current_node)
        if node in graph.env
        and hasattr(graph.env[node], "realize")
        and any(user not in graph.env for user in node.users)
    ]


def _nodes_of_scope(leave: Any) -> Iterable[Any]:
    import torch

    scope: Any = torch.ops.esper_alloc
    depth = 0
    node = leave.prev
    while node.op == "call_function":
        if node.target is scope.leave_scope.ordered:
            depth += 1
        elif node.target is scope.enter_scope.default:
            if depth == 0:
                return
            depth -= 1
        elif _is_tensor(node) and not _is_view(node):
            yield node
        node = node.prev
