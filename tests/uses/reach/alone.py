"""Cases in which only the caller can reach the marked memory: the mark is exact."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import sys
import weakref

import torch
from helper import (
    FORWARD_IS_SEEN,
    KEPT,
    N,
    case,
    case_where,
    empty,
    gathered,
    kinds,
    main,
    side,
)
from torch.autograd import forward_ad

import esper_alloc
from esper_alloc import record_use as mark


@case
def plain():
    x = empty()
    mark(x, side())
    return x


@case
def leaf_that_wants_a_gradient():
    x = empty(requires_grad=True)
    mark(x, side())
    return x


@case
def output_of_an_operation():
    x = gathered()
    mark(x, side())
    return x


@case
def view():
    x = empty().view(1024, 1024)
    mark(x, side())
    return x


@case
def view_of_gathered_shards():
    w = gathered().view(1024, 1024)
    mark(w, side())
    return w


@case
def view_of_a_view():
    x = empty().view(1024, 1024).t()[3:7, 5]
    mark(x, side())
    return x


@case
def view_whose_base_never_had_an_object():
    with torch.no_grad():
        x = torch.ops.aten.split.Tensor(empty(), N)[0].view(1024, 1024)
    mark(x, side())
    return x


@case
def view_made_without_grad_mode():
    with torch.no_grad():
        x = empty().view(1024, 1024)
    mark(x, side())
    return x


@case
def detached():
    x = gathered().detach()
    mark(x, side())
    return x


@case
def detached_view():
    x = gathered().view(1024, 1024).detach()
    mark(x, side())
    return x


@case
def view_of_what_was_detached():
    x = gathered().detach().view(1024, 1024)
    mark(x, side())
    return x


@case
def data():
    x = gathered().view(1024, 1024).data
    mark(x, side())
    return x


@case
def other_data():
    """What `.data` replaces is no longer behind the base."""
    x = empty(N // 2)
    x.data = empty()
    mark(x, side())
    return x


@case
def storage_object_that_is_gone():
    x = empty().view(1024, 1024)
    assert x.untyped_storage().nbytes() == 4 * N
    mark(x, side())
    return x


@case
def weak_reference_that_is_gone():
    x = empty()
    assert weakref.ref(x)() is x
    mark(x, side())
    return x


@case
def method():
    x = empty().view(1024, 1024)
    x.record_use(side())
    return x


@case
def dual_number():
    """The tangent has memory of its own."""
    with forward_ad.dual_level():
        forward_ad.make_dual(empty(), empty())  # imports, and keeps the variables of this call
        x = forward_ad.make_dual(empty(), empty())
        mark(x, side())
        return kinds(x)


@case
def all_views_in_a_list():
    views = list(empty().split(N // 8))
    mark(views, side())
    return views[0]


@case
def all_views_in_a_tuple():
    views = gathered().chunk(4)
    mark(views, side())
    return views[0]


@case
def all_views_in_a_dict():
    views = {i: one for i, one in enumerate(empty(16, N // 16).unbind())}
    one = None  # noqa: F841
    mark(views, side())
    return views[0]


@case
def all_views_with_their_base():
    flat = empty()
    views = [flat, *flat.split(N // 8)]
    del flat
    mark(views, side())
    return views[0]


@case
def views_of_views_with_their_base():
    flat = gathered()
    views = [one.view(-1, 2).t() for one in flat.split(N // 8)]
    views.append(flat)
    del flat
    mark(views, side())
    return views[0]


@case
def views_of_two_bases_over_one_storage():
    flat = empty()
    views = [flat.view(1024, 1024), flat.detach().view(1024, 1024), flat.data]
    del flat
    mark(views, side())
    return views[0]


@case
def several_storages_in_one_call():
    views = [one for _ in range(3) for one in empty().split(N // 2)]
    mark(views, side())
    assert kinds(views[2]) == kinds(views[4]) == kinds(views[0])
    return views[0]


@case
def one_tensor_twice_in_a_list():
    pair = [empty().view(1024, 1024)] * 2
    mark(pair, side())
    return pair[0]


@case
def two_variables():
    x = y = empty().view(1024, 1024)
    mark(x, side())
    return y


@case
def list_of_variables():
    flat = empty()
    x, y = flat.split(N // 2)
    mark([x, y, flat], side())
    return x


@case
def tensor_in_a_list_and_a_variable():
    x = empty().view(1024, 1024)
    pair = [x, x]
    mark(pair, side())
    return x


@case
def base_in_a_variable():
    flat = empty()
    x = flat.view(1024, 1024)
    mark(x, side())
    return flat


@case
def views_whose_base_is_in_a_variable():
    flat = gathered()
    views = list(flat.split(N // 8))
    mark(views, stream=side(), gate=True)
    return flat


@case
def variable_of_a_method_call():
    flat = empty()
    x = flat.view(1024, 1024)
    x.record_use(stream=side())
    return flat


@case
def variable_that_gets_the_next_tensor():
    """As where the next layer's weight is gathered before the current one is marked."""
    following = gathered().view(1024, 1024)
    for _ in range(2):
        x, following = following, gathered().view(1024, 1024)
        mark(x, side())
    return x


# Before 3.11 the stack of the function's caller holds the argument, too.
@case_where(sys.version_info >= (3, 11))
def argument_that_its_caller_dropped():
    def function(x: torch.Tensor) -> torch.Tensor:
        mark(x, side())
        return x

    return function(gathered().view(1024, 1024))


@case
def variable_of_a_generator():
    def generate():
        x = empty().view(1024, 1024)
        mark(x, side())
        yield kinds(x)

    return next(generate())


@case
def variables_of_a_generator():
    def generate():
        flat = empty()
        x, y = flat.split(N // 2)
        mark([x, y], side())
        yield kinds(x)

    return next(generate())


@case
def variable_of_a_coroutine():
    async def function():
        x = gathered().view(1024, 1024)
        mark(x, side())
        return kinds(x)

    return asyncio.run(function())


Pair = collections.namedtuple("Pair", "left, right")


@case
def all_views_in_a_named_tuple():
    pair = Pair(*empty().split(N // 2))
    mark(pair, side())
    return pair.left


@case
def all_views_in_a_set():
    views = set(empty().split(N // 8))
    mark(views, side())
    return views.pop()


@case
def all_views_in_a_deque():
    views = collections.deque(empty().split(N // 8))
    mark(views, side())
    return views[0]


@case
def all_views_in_a_dictionary_with_defaults():
    lists = collections.defaultdict(list)
    lists[0].extend(empty().split(N // 8))
    mark(lists, side())
    return lists[0][0]


@dataclasses.dataclass(slots=True)
class Slots:
    x: torch.Tensor


@case
def view_in_a_dataclass_with_slots():
    slots = Slots(gathered().view(1024, 1024))
    mark(slots, side())
    return slots.x


@dataclasses.dataclass
class Batch:
    left: torch.Tensor
    rest: list[torch.Tensor]


@case
def all_views_in_a_dataclass():
    views = empty().split(N // 4)
    batch = Batch(views[0], list(views[1:]))
    del views
    mark(batch, side())
    return batch.left


@case
def inference_tensor():
    with torch.inference_mode():
        x = empty()
    mark(x, side())
    return x


@case
def inference_tensor_in_inference_mode():
    """Nobody can save it, so it does not matter who holds it."""
    with torch.inference_mode():
        x = empty()
        KEPT.append(x)
        mark(x, side())
    return x


@case
def inference_tensor_of_a_scope_in_inference_mode():
    with torch.inference_mode():
        x = empty()
        with esper_alloc.using(x, stream=side()):
            KEPT.append(x)
    return x


@case_where(FORWARD_IS_SEEN)
def tensor_that_others_hold_in_inference_mode():
    """Nobody saves there but a custom function, in its forward."""
    x = empty()
    KEPT.append(x)
    with torch.inference_mode():
        mark(x, side())
    return x


@case_where(FORWARD_IS_SEEN)
def tensor_of_a_scope_in_inference_mode():
    x = empty()
    with torch.inference_mode(), esper_alloc.using(x, stream=side()):
        KEPT.append(x)
    return x


@case
def scope_in_grad_mode_while_hooks_of_saved_tensors_are_set():
    x = empty()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        with esper_alloc.using(x, stream=side()):
            KEPT.append(x)
    return x


class Gathers(torch.autograd.Function):
    """Marks what nobody else has, in its forward."""

    @staticmethod
    def forward(ctx, w):
        x = torch.cat([w, w])
        mark(x, side())
        KEPT.append(kinds(x))
        return w * 2

    @staticmethod
    def backward(ctx, grad):
        return grad


@case
def local_variable_of_a_custom_function():
    Gathers.apply(empty(N // 2, requires_grad=True))
    return KEPT.pop()


@case
def local_variable_while_hooks_of_saved_tensors_are_set():
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), torch.no_grad():
        x = empty()
        mark(x, side())
    return x


@case
def local_variable_of_a_hook_in_backward():
    found = []

    def hook(grad):
        x = empty()
        mark(x, side())
        found.append(kinds(x))

    y = torch.ones(1, requires_grad=True) * 2
    y.register_hook(hook)
    y.backward()
    return found.pop()


if __name__ == "__main__":
    main()
