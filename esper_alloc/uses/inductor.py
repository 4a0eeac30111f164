"""What Inductor is told of the operators that stand for marks and scopes.

A mark in compiled code lasts until the free, so where it stands among the reads
does not matter: it only has to be on the memory that is read, and nothing else
may get that memory before the free. Inductor computes values anew for each
reader, copies those with the wrong strides, and lets one buffer take over the
memory of another. So

- a marked value is computed into one buffer before its first reader
  (`in_memory`, which is put right behind it), and its memory goes to no other
  buffer, but to the allocator, which knows of the mark;
- no operation is made one that writes into it.

The ends of a scope (`order`) must stay between the operations before and behind
them. They become the overload that declares to write every value that was
computed before and is read behind.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

__all__ = [
    "keep_out_of_marked",
    "register_last_rewrites",
    "register_lowerings",
    "register_rewrites",
    "tag_compiled_code",
]

#: Raise it when the code that is compiled for marks changes.
RULES = 3


def tag_compiled_code(config: Any) -> None:
    """For ``torch.compiler.config``: code that Inductor compiled by other rules than these, and
    keeps on the disk, is not taken."""
    rules = f"esper_alloc {RULES}"
    if rules not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag} {rules}".strip()


# On graphs


def register_rewrites(joint_graph: Any) -> None:
    """For ``torch._inductor.fx_passes.joint_graph``: on graphs that are not split into forward and
    backward yet."""
    _rewrite_each(_operators().record_use.default, _mark_again, joint_graph.patterns)
    _rewrite_each(_operators().order.default, _put_between, joint_graph.patterns)


def register_last_rewrites(post_grad: Any) -> None:
    """For ``torch._inductor.fx_passes.post_grad``: on graphs that are lowered next."""
    _rewrite_each(_operators().record_use.default, _put_in_memory, post_grad.pass_patterns[0])
    _rewrite_each(_operators().record_use.again, _put_in_memory, post_grad.pass_patterns[0])


def _rewrite_each(overload: Any, rewrite: Callable[[Any], None], patterns: Any) -> None:
    from torch._inductor import pattern_matcher

    def handle(match: Any, *args: Any, **kwargs: Any) -> None:
        rewrite(match.output_node())

    pattern = pattern_matcher.CallFunctionVarArgs(overload)
    pattern_matcher.register_graph_pattern(pattern, pass_dict=patterns)(handle)


def _mark_again(mark: Any) -> None:
    """Tells backward which values forward marks. An operation without a result is certain to become
    part of backward only behind backward's first operation."""
    graph = mark.graph
    last = graph.output_node()
    tags = [node.meta.get("partitioner_tag") for node in (mark, *last.all_input_nodes)]
    if tags[0] != "is_backward" and "is_backward" in tags:
        arguments = (*mark.args[:3], len(graph.nodes))
        with graph.inserting_before(last):
            node = graph.call_function(_operators().record_use.again, arguments)
        node.meta.update(mark.meta)


def _put_in_memory(mark: Any) -> None:
    for root in map(_root, mark.args[0]):
        if root.op == "call_function" and not _is_marked(root):
            with root.graph.inserting_after(root):
                node = root.graph.call_function(_operators().in_memory.default, ([root],))
            node.meta.update(root.meta | {"val": None})
            node.meta.pop("unbacked_bindings", None)


def _put_between(order: Any) -> None:
    """Gives the end of a scope what was computed before it and is read behind it."""
    before: dict[Any, None] = {}
    for node in order.graph.nodes:
        if node is order:
            break
        before[node] = None
    live = [
        node
        for node in before
        if _is_tensor(node)
        and not _is_view(node)
        and any(user not in before for view in _views(node) for user in view.users)
    ]
    tensors = list(dict.fromkeys([*map(_root, order.args[0]), *live]))
    order.args = (tensors, *order.args[1:4], len(before))


def _is_marked(node: Any) -> bool:
    return any(user.target is _operators().in_memory.default for user in _root(node).users)


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
    """Whether the node stands for memory that another node stands for, too."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if node.target is operator.getitem:
        return _is_view(node.args[0])
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def _is_tensor(node: Any) -> bool:
    import torch

    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)


def keep_out_of_marked(reinplace: Any) -> None:
    """For ``torch._inductor.fx_passes.reinplace``, which lets an operation write into its argument
    if nobody reads that again."""
    for overload, entry in reinplace.inplaceable_ops.items():
        reinplace.inplaceable_ops[overload] = dataclasses.replace(
            entry, extra_check=functools.partial(_may_write, entry.extra_check)
        )


def _may_write(check: Callable[[Any], bool], node: Any) -> bool:
    return check(node) and not any(map(_is_marked, node.all_input_nodes))


# While lowering


def register_lowerings(lowering: Any) -> None:
    """For ``torch._inductor.lowering``."""
    for overload, lower in (
        (_operators().in_memory.default, _lower_in_memory),
        (_operators().record_use.default, _lower_record_use),
        (_operators().record_use.again, _lower_again),
        (_operators().order.default, _lower_order),
    ):
        lowering.register_lowering(overload, type_promotion_kind=None)(lower)


def _lower_in_memory(tensors: list[Any]) -> None:
    from torch._inductor import ir

    (tensor,) = tensors
    (node,) = _graph().current_node.args[0]
    root = _root(node)  # node itself, unless it was what an operator has written into
    if _is_of_forward(root) and not _is_read_elsewhere(root):
        return
    tensor.realize()
    if node is root and isinstance(tensor.get_layout(), ir.FlexibleLayout):
        strides = [_expression(stride) for stride in root.meta["val"].stride()]
        ir.as_storage_and_layout(tensor, exact_strides=strides)
    _keep_from_reuse([tensor])


def _expression(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr


def _lower_record_use(tensors: list[Any], stream: int, device: int, until_free: bool) -> None:
    if not _is_of_forward(_graph().current_node):
        _mark(tensors, stream, device)


def _lower_again(tensors: list[Any], stream: int, device: int, place: int) -> None:
    if not _graph().is_backward:
        return
    roots = list(map(_root, _graph().current_node.args[0]))
    if any(map(_is_read_elsewhere, roots)):
        _mark(tensors, stream, device)
    else:  # what forward saved would be this graph's to overwrite
        _keep_from_reuse([t for t, root in zip(tensors, roots) if root.op == "placeholder"])


def _mark(tensors: list[Any], stream: int, device: int) -> None:
    marked = _realized([*tensors, *_inputs_written_later()])
    _keep_from_reuse(marked)
    _call(_operators().record_use.default, marked, stream, device, True)


def _lower_order(tensors: list[Any], *rest: Any) -> None:
    if not _is_of_forward(_graph().current_node):
        _call(_operators().order.pinned, _realized(tensors), *rest)


def _call(overload: Any, buffers: list[Any], *rest: Any) -> None:
    from torch._inductor import config, ir

    if not (config.pattern_matcher and config.use_joint_graph_passes):
        raise RuntimeError(
            "marks and scopes of esper_alloc need torch._inductor.config.pattern_matcher and "
            "use_joint_graph_passes: switch both on, or call them in a function under "
            "torch.compiler.disable()"
        )
    ir.FallbackKernel.create(overload, buffers, *rest)


def _keep_from_reuse(buffers: list[Any]) -> None:
    from torch._inductor import ir

    graph = _graph()
    while graph is not None:
        # PyTorch 2.11 also frees what is in its only such set no earlier than at the end.
        kept = getattr(graph, "never_reuse_but_free_buffers", graph.never_reuse_buffers)
        kept.update(buffer.get_name() for buffer in buffers)
        graph = getattr(graph, "parent", None)
        if graph is not None:  # that of torch.cond, where its inputs have other names
            inputs = [graph.env.get(node) for node in graph.current_node.all_input_nodes]
            buffers = _realized([value for value in inputs if isinstance(value, ir.TensorBox)])


def _realized(values: list[Any]) -> list[Any]:
    """The same, each once, as buffers."""
    once: dict[str, Any] = {}
    for value in values:
        value.realize()
        once.setdefault(value.get_name(), value)
    return list(once.values())


def _inputs_written_later() -> list[Any]:
    """The inputs of the graph that get the contents of what the current node marks. In the
    program they are what is marked."""
    import torch

    mark = _graph().current_node
    marked = set(map(_root, mark.args[0]))
    return [
        _graph().env[node.args[0]]
        for node in mark.graph.nodes
        if node.target is torch.ops.aten.copy_.default
        and node.args[0].op == "placeholder"
        and _root(node.args[1]) in marked
    ]


# In backward


def _is_of_forward(node: Any) -> bool:
    """Whether this is backward's graph, and the node forward's: PyTorch may leave what has no
    result in both."""
    return bool(_graph().is_backward and node.meta.get("partitioner_tag") == "is_forward")


def _is_read_elsewhere(root: Any) -> bool:
    """Whether the value is computed here, and read by an operator that may read it on a stream of
    its own: PyTorch's do not."""
    return root.op == "call_function" and any(
        getattr(user.target, "namespace", "aten") not in ("aten", "prims", "esper_alloc")
        for view in _views(root)
        for user in view.users
    )


def _graph() -> Any:
    """What is being lowered."""
    from torch._inductor.virtualized import V

    return V.graph


def _operators() -> Any:
    import torch

    return torch.ops.esper_alloc
