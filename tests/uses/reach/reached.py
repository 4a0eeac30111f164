"""Cases in which somebody else can reach the marked memory, and might read it again: the mark
lasts until the free."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
import torch.utils.dlpack
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
    run_script,
    side,
)
from torch.autograd import forward_ad

import esper_alloc
from esper_alloc import record_use as mark


def save(x: torch.Tensor) -> torch.Tensor:
    """Autograd saves x, of shape (n, 1), in a product without elements."""
    y = x * empty(0, requires_grad=True)
    assert y.grad_fn is not None
    KEPT.append(y)
    return y


# Saved by autograd


@case
def saved():
    x = empty(N, 1)
    save(x)
    mark(x, side())
    return x


@case
def saved_view():
    x = empty().view(N, 1)
    save(x)
    mark(x, side())
    return x


@case
def view_whose_base_is_saved():
    base = empty(N, 1)
    save(base)
    x = base.view(1024, 1024)
    del base
    mark(x, side())
    return x


@case
def view_whose_sibling_is_saved():
    base = empty()
    save(base.view(N, 1))
    x = base.view(1024, 1024)
    del base
    mark(x, side())
    return x


@case
def views_of_which_one_is_saved():
    views = list(empty(8, N // 8, 1).unbind())
    save(views[3])
    mark(views, side())
    return views[0]


@case
def all_views_and_the_base_is_saved():
    base = empty(N, 1)
    save(base)
    views = list(base.split(N // 8))
    del base
    mark(views, side())
    return views[0]


@case
def saved_after_detach():
    x = gathered().view(N, 1)
    save(x.detach())
    mark(x, side())
    return x


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, how):
        if how == "saved":
            ctx.save_for_backward(x)
        elif how == "attribute":
            ctx.x = x
        elif how == "base":
            ctx.x = x._base
        elif how == "output":
            y = empty()
            ctx.save_for_backward(y)
            return y
        return torch.empty(1, device="cuda")

    @staticmethod
    def backward(ctx, grad):
        return None, None


def custom(x: torch.Tensor, how: str) -> torch.Tensor:
    y = Saves.apply(x, how)
    if how != "output":
        KEPT.append(y)
    return y


@case
def save_for_backward():
    x = gathered()
    custom(x, "saved")
    mark(x, side())
    return x


NO_MODE = contextlib.nullcontext()


class Marks(torch.autograd.Function):
    """Saves what it marks. Grad mode is off in its forward."""

    @staticmethod
    def forward(ctx, x, w, scope, mode):
        ctx.save_for_backward(x)
        with mode:
            if scope:
                with esper_alloc.using(x, stream=side()):
                    pass
            else:
                mark(x, side())
        return torch.empty(1, device="cuda")

    @staticmethod
    def backward(ctx, grad):
        return None, None, None, None


def marked_in_forward(scope: bool, under: Any, mode: Any = NO_MODE) -> torch.Tensor:
    """`mode` is entered in forward, and `under` outside of it."""
    x = gathered().detach()
    with under:
        KEPT.append(Marks.apply(x, empty(1, requires_grad=True), scope, mode))
    return x


@case
def marked_in_the_forward_that_saves_it():
    return marked_in_forward(False, NO_MODE)


@case
def scope_in_the_forward_that_saves_it():
    return marked_in_forward(True, NO_MODE)


@case
def marked_in_forward_under_no_grad():
    return marked_in_forward(False, torch.no_grad())


@case
def marked_in_inference_mode_in_forward():
    return marked_in_forward(False, NO_MODE, torch.inference_mode())


@case
def scope_in_inference_mode_in_forward():
    return marked_in_forward(True, NO_MODE, torch.inference_mode())


@case_where(not FORWARD_IS_SEEN)
def tensor_marked_in_inference_mode():
    x = empty()
    KEPT.append(x)
    with torch.inference_mode():
        mark(x, side())
    return x


@case
def scope_in_grad_mode_in_forward():
    return marked_in_forward(True, NO_MODE, torch.enable_grad())


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return empty()


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.x = x
        return torch.empty(1, device="cuda")

    @staticmethod
    def backward(ctx, grad):
        return None, None


@case
def inference_tensor_in_a_context():
    x = inference_tensor()
    KEPT.append(Keeps.apply(x, empty(1, requires_grad=True)))
    mark(x, side())
    return x


@case
def inference_tensor_in_a_list():
    x = inference_tensor()
    KEPT.append(x)
    mark(x, side())
    return x


@case
def attribute_of_a_context():
    x = gathered()
    custom(x, "attribute")
    mark(x, side())
    return x


@case
def base_in_a_context():
    x = gathered().view(1024, 1024)
    custom(x, "base")
    mark(x, side())
    return x


@case
def saved_output():
    x = custom(empty(1, requires_grad=True), "output")
    mark(x, side())
    return x


@case
def view_of_a_saved_output():
    x = custom(empty(1, requires_grad=True), "output").view(1024, 1024)
    mark(x, side())
    return x


def checkpointed(reentrant: bool) -> torch.Tensor:
    x = gathered().view(N, 1)
    w = empty(0, requires_grad=True)
    KEPT.append(torch.utils.checkpoint.checkpoint(torch.mul, x, w, use_reentrant=reentrant))
    mark(x, side())
    return x


@case
def checkpoint():
    return checkpointed(False)


@case
def reentrant_checkpoint():
    return checkpointed(True)


@case
def inside_a_checkpoint():
    """The checkpoint holds what its function marks, to compute it again."""
    marked = []

    def function(x, w):
        mark(x, side())
        marked.append(kinds(x))
        return x * w

    args = gathered().view(N, 1), empty(0, requires_grad=True)
    KEPT.append(torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False))
    return marked[0]


@case
def hooks_of_saved_tensors():
    x = empty(N, 1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t,), lambda t: t[0]):
        save(x)
    mark(x, side())
    return x


def marked_while_packed(how: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """Autograd keeps what the hook returns. Grad mode is off in it."""

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.numel():
            assert not torch.is_grad_enabled()
            how(t)
        return t

    x = empty(N, 1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        save(x)
    return x


@case
def marked_by_the_hook_that_packs_it():
    return marked_while_packed(lambda t: mark(t, side()))


@case
def scope_in_the_hook_that_packs_it():
    def use(t: torch.Tensor) -> None:
        with esper_alloc.using(t, stream=side()):
            pass

    return marked_while_packed(use)


@case
def marked_in_inference_mode_by_the_hook_that_packs_it():
    def use(t: torch.Tensor) -> None:
        with torch.inference_mode():
            mark(t, side())

    return marked_while_packed(use)


@case
def marked_without_grad_mode_after_hooks_packed_it():
    x = empty(N, 1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        save(x)
        with torch.no_grad():
            mark(x, side())
    return x


@case
def hooks_that_keep_a_view():
    x = empty(N, 1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.view(-1), lambda t: t.view(N, 1)):
        save(x)
    mark(x, side())
    return x


@case
def hooks_that_keep_a_weak_reference():
    x = empty(N, 1)
    with torch.autograd.graph.saved_tensors_hooks(weakref.ref, lambda t: t()):
        save(x)
    mark(x, side())
    return x


def hook_with(x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda grad: grad * x


@case
def marked_by_a_hook_in_backward():
    """A node that runs later may have saved it. Grad mode is off in the hook."""
    x = empty(N, 1)
    save(x)

    def hook(grad: torch.Tensor) -> None:
        assert not torch.is_grad_enabled()
        mark(x, side())

    y = torch.ones(1, requires_grad=True) * 2
    y.register_hook(hook)
    y.backward()
    return x


@case
def tensor_hook():
    x, y = empty(), gathered()
    y.register_hook(hook_with(x))
    KEPT.append(y)
    mark(x, side())
    return x


@case
def accumulated():
    x = empty(requires_grad=True)
    KEPT.append(x[:0] * 2)
    mark(x, side())
    return x


@case
def a_gradient():
    p, x = torch.nn.Parameter(empty()), empty()
    p.grad = x
    KEPT.append(p)
    mark(x, side())
    return x


@case
def tangent():
    with forward_ad.dual_level():
        x = empty()
        KEPT.append(forward_ad.make_dual(empty(), x))
        mark(x, side())
        return kinds(x)


# Held by others in Python


@case
def list_that_others_hold():
    views = list(empty().split(N // 8))
    KEPT.append(views)
    mark(views, side())
    return views[0]


@case
def copy_of_a_list_that_others_hold():
    views = list(empty().split(N // 8))
    mark(list(views), side())
    return views[0]


@case
def element_that_others_hold():
    views = list(empty().split(N // 8))
    KEPT.append(views[3])
    mark(views, side())
    return views[0]


@case
def inner_list_that_others_hold():
    lists = [list(empty().split(N // 8))]
    KEPT.append(lists[0])
    mark(lists, side())
    return lists[0][0]


@case
def view_that_is_missing():
    views = list(empty().split(N // 8))
    KEPT.append(views.pop())
    mark(views, side())
    return views[0]


@case
def base_that_others_hold():
    flat = empty()
    KEPT.append(flat)
    x = flat.view(1024, 1024)
    mark(x, side())
    return flat


@case
def base_that_others_hold_of_all_views():
    flat = empty()
    KEPT.append(flat)
    views = list(flat.split(N // 8))
    mark(views, side())
    return flat


@case
def detached_that_others_hold():
    x = gathered().view(1024, 1024)
    KEPT.append(x.detach())
    mark(x, side())
    return x


@case
def data_that_others_hold():
    x = empty()
    KEPT.append(x.data)
    mark(x, side())
    return x


@case
def parameter():
    layer = torch.nn.Linear(1024, 1024, device="meta")
    layer.weight = torch.nn.Parameter(empty(1024, 1024))
    KEPT.append(layer)
    mark(layer.weight, side())
    return layer.weight


@case
def view_of_a_parameter():
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(empty(1024, 1024))
    KEPT.append(layer)
    x = layer.weight.view(-1)
    mark(x, side())
    return x


@case
def attribute_of_a_module():
    layer, x = torch.nn.Module(), empty()
    layer.register_buffer("x", x)
    KEPT.append(layer)
    mark(x, side())
    return x


@case
def closure():
    x = empty()
    KEPT.append(hook_with(x))
    mark(x, side())
    return x


@case
def variable_that_a_closure_reads():
    x = empty()
    KEPT.append(lambda grad: grad * x)
    mark(x, side())
    return x


@case
def attribute():
    layer = torch.nn.Module()
    layer.register_buffer("x", empty())
    KEPT.append(layer)
    mark(layer.x, side())
    return layer.x


@case
def method_of_an_attribute():
    layer = torch.nn.Module()
    layer.register_buffer("x", empty())
    KEPT.append(layer)
    layer.x.record_use(side())
    return layer.x


@case
def list_in_an_attribute():
    layer = torch.nn.Module()
    layer.views = list(empty().split(N // 8))
    KEPT.append(layer)
    mark(layer.views, side())
    return layer.views[0]


# Containers whose elements something else holds


def kept_dict() -> dict[Any, Any]:
    KEPT.append({0: empty()})
    return KEPT[-1]


@case
def values_of_a_dict_that_others_hold():
    values = kept_dict().values()
    mark(values, side())
    return KEPT[-1][0]


@case
def items_of_a_dict_that_others_hold():
    mark(kept_dict().items(), side())
    return KEPT[-1][0]


@case
def keys_of_a_dict_that_others_hold():
    KEPT.append({empty(): 0})
    mark(KEPT[-1].keys(), side())
    return next(iter(KEPT[-1]))


@case
def proxy_of_a_dict_that_others_hold():
    mark(types.MappingProxyType(kept_dict()), side())
    return KEPT[-1][0]


@case
def chain_of_dicts_that_others_hold():
    mark(collections.ChainMap(kept_dict()), side())
    return KEPT[-1][0]


@case
def user_dict_over_one_that_others_hold():
    user = collections.UserDict()
    user.data = kept_dict()
    mark(user, side())
    return KEPT[-1][0]


class Window(collections.abc.Sequence):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]


@case
def sequence_over_a_list_that_others_hold():
    KEPT.append([empty()])
    mark(Window(KEPT[-1]), side())
    return KEPT[-1][0]


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


@case
def dataclass_whose_attributes_others_hold():
    batch = Batch(empty())
    KEPT.append(vars(batch))
    mark(batch, side())
    return batch.x


@dataclasses.dataclass(slots=True)
class Lends:
    """Its slot is empty: it gives what others hold."""

    x: torch.Tensor

    def __getattr__(self, name: str) -> torch.Tensor:
        if name != "x":
            raise AttributeError(name)
        return KEPT[-1]


@case
def dataclass_with_an_empty_slot():
    KEPT.append(empty())
    lender = Lends(empty(1))
    del lender.x
    mark(lender, side())
    return KEPT[-1]


@dataclasses.dataclass(slots=True)
class SameSlot:
    """Both of its fields name one slot."""

    x: torch.Tensor
    y: torch.Tensor


SameSlot.y = SameSlot.__dict__["x"]  # type: ignore[assignment]


@case
def dataclass_with_one_slot_for_two_fields():
    x = empty()
    same = SameSlot(x, x)
    KEPT.append(x)
    del x
    mark(same, side())
    return same.x


@dataclasses.dataclass(slots=True)
class LendsAlways:
    """It gives what others hold, whatever its slot has."""

    x: torch.Tensor

    def __getattribute__(self, name: str) -> Any:
        return KEPT[-1] if name == "x" else object.__getattribute__(self, name)


@case
def dataclass_with_slots_that_looks_elsewhere():
    KEPT.append(empty())
    mark(LendsAlways(empty(1)), side())
    return KEPT[-1]


@case
def dataclass_with_a_property():
    class Reads(Batch):
        def __init__(self) -> None:
            pass

        x = property(lambda self: KEPT[-1][0])

    KEPT.append([empty()])
    mark(Reads(), side())
    return KEPT[-1][0]


@case
def weak_reference_to_a_dataclass():
    batch = Batch(empty())
    KEPT.append(weakref.ref(batch))
    mark(batch, side())
    return batch.x


@case
def weak_reference_to_a_set():
    views = {empty()}
    KEPT.append(weakref.ref(views))
    mark(views, side())
    return views.pop()


# Calls by C code, generators


class Layer:
    """With an attribute that others read."""

    def __init__(self) -> None:
        self.x = empty()
        KEPT.append(self)


@case
def variable_of_the_callers_caller():
    def marks(x: torch.Tensor) -> None:
        mark(x, side())

    x = empty()
    marks(x)
    return x


@case
def list_of_the_callers_caller():
    def marks(views: list[torch.Tensor]) -> None:
        mark(views, side())

    def passes_on(*arguments: Any, **keywords: Any) -> None:
        marks(*arguments, **keywords)

    flat = empty()
    views = list(flat.split(N // 2))
    del flat
    passes_on(views=views)
    return views[0]


@case
def variable_of_a_generators_caller():
    def generate(x: torch.Tensor) -> Iterator[None]:
        yield mark(x, side())

    x = empty()
    next(generate(x))
    return x


@case
def attribute_among_unpacked_arguments():
    mark(*[Layer().x, side()])
    return KEPT[-1].x


@case
def attribute_among_unpacked_keywords():
    mark(Layer().x, **{"stream": side()})
    return KEPT[-1].x


@case
def attribute_through_a_decorator():
    @functools.wraps(mark)
    def decorated(*args: Any, **keywords: Any) -> None:
        return mark(*args, **keywords)

    decorated(Layer().x, side())
    return KEPT[-1].x


@case
def items_of_a_list_that_are_mapped():
    KEPT.append([empty()])
    list(map(mark, KEPT[-1], [side()]))
    return KEPT[-1][0]


@case
def attribute_in_a_generator():
    def generate(layer: Layer) -> Iterator[None]:
        yield mark(layer.x, side())

    list(generate(Layer()))
    return KEPT[-1].x


@case
def attribute_in_a_generator_expression():
    list(mark(layer.x, side()) for layer in [Layer()])
    return KEPT[-1].x


@case
def attribute_in_a_coroutine():
    async def function(layer: Layer) -> None:
        mark(layer.x, side())

    asyncio.run(function(Layer()))
    return KEPT[-1].x


@case
def variable_of_a_closure_in_a_generator():
    x = empty()

    def generate() -> Iterator[None]:
        yield mark(x, side())

    KEPT.append(hook_with(x))
    list(generate())
    return x


@case
def item_of_a_list_that_others_hold():
    views = [empty()]
    KEPT.append(views)
    mark(views[0], side())
    return views[0]


@case
def items_of_a_list_that_others_hold():
    views = list(empty().split(N // 2))
    KEPT.append(views)
    mark([views[0], views[1]], side())
    return views[0]


@case
def twice_in_a_list_and_held_by_others():
    x = empty()
    KEPT.append(x)
    mark([x, x], side())
    return x


@case
def global_variable():
    global shared
    shared = empty()
    mark(shared, side())
    return kinds(shared)


@case
def variable_of_a_script():
    """Which a hook, for example, could read by its name."""
    return run_script("x = empty(); mark(x, side())")


@case
def variable_of_a_script_in_a_class():
    return run_script("class Holds:\n    x = empty()\n    mark(x, side())\nx = Holds.x")


@case
def variable_of_a_script_that_others_hold():
    KEPT.append({})
    script = "x = empty(); kept['x'] = x; mark(x, side())"
    return run_script(script.replace("kept", "__import__('helper').KEPT[-1]"))


@case
def default_argument():
    """The function holds it, and the call does too."""

    given = empty()

    def function(x: torch.Tensor = given) -> torch.Tensor:
        mark(x, side())
        return x

    del given
    KEPT.append(function)
    return function()


@case
def class_variable():
    class Layer:
        x = empty()

    KEPT.append(Layer)
    mark(Layer.x, side())
    return Layer.x


@case
def slot():
    class Layer:
        __slots__ = ("x",)

    layer = Layer()
    layer.x = empty()
    KEPT.append(layer)
    mark(layer.x, side())
    return layer.x


@case
def cached_result():
    cached = functools.lru_cache(empty)
    KEPT.append(cached)
    mark(cached(N), side())
    return cached(N)


@case
def attribute_of_a_tensor():
    x, y = empty(), empty()
    y.peer = x
    KEPT.append(y)
    mark(x, side())
    return x


@case
def loop_over_a_list_that_others_hold():
    views = list(empty().split(N))
    KEPT.append(views)
    for x in views:
        mark(x, side())
    return x


@case
def comprehension_over_a_list_that_others_hold():
    views = list(empty().split(N))
    KEPT.append(views)
    [mark(x, side()) for x in views]
    return views[0]


@case
def traceback_of_an_error():
    """It keeps the variables of the function that raised."""

    def fail(x: torch.Tensor) -> None:
        raise ValueError

    x = empty()
    try:
        fail(x)
    except ValueError as error:
        KEPT.append(error)
    mark(x, side())
    return x


@case
def method_that_others_hold():
    KEPT.append(empty().record_use)
    KEPT[0](side())
    return KEPT[0].__self__


@case
def state_of_an_optimizer():
    weight = torch.nn.Parameter(empty())
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = empty()
    KEPT.append(optimizer)
    mark(optimizer.state[weight], side())
    return optimizer.state[weight]["momentum_buffer"]


@case
def result_of_a_future():
    """C++ code holds it."""
    x, future = empty(), torch.futures.Future()
    future.set_result(x)
    KEPT.append(future)
    mark(x, side())
    return x


@case
def partial():
    x = empty().view(1024, 1024)
    KEPT.append(functools.partial(torch.mul, x))
    mark(x, side())
    return x


@case
def partial_that_marks():
    """It lends its tensor to the call, in the caller's frame."""
    call = functools.partial(mark, empty())
    KEPT.append(call)
    call(side())
    return call.args[0]


@case
def partial_that_marks_a_view_by_name():
    call = functools.partial(mark, empty().view(-1))
    KEPT.append(call)
    call(stream=side())
    return call.args[0]


@case
def partial_of_the_tensors_method():
    call = functools.partial(torch.Tensor.record_use, empty())
    KEPT.append(call)
    call(side())
    return call.args[0]


@case_where(sys.version_info >= (3, 11))
def bound_method_that_c_code_calls():
    call = types.MethodType(mark, empty())
    KEPT.append(call)
    operator.call(call, side())
    return call.__self__


@case
def bound_method_that_others_hold():
    call = types.MethodType(torch.Tensor.record_use, empty())
    KEPT.append(call)
    call(stream=side())
    return call.__self__


@case
def generator():
    def generate(x: torch.Tensor) -> Iterator[int]:
        yield 1
        yield x.numel()

    x = empty()
    waiting = generate(x)
    next(waiting)
    KEPT.append(waiting)
    mark(x, side())
    return x


@case
def queue():
    x = empty()
    KEPT.append(collections.deque([x]))
    mark(x, side())
    return x


@case
def other_thread():
    def work(x: torch.Tensor) -> None:
        begun.set()
        go_on.wait()

    begun, go_on, x = threading.Event(), threading.Event(), empty()
    thread = threading.Thread(target=work, args=(x,))
    thread.start()
    begun.wait()
    mark(x, side())
    go_on.set()
    thread.join()
    return x


@case
def weak_reference():
    x = empty()
    KEPT.append(weakref.ref(x))
    mark(x, side())
    return x


@case
def weak_reference_to_the_base():
    flat = empty()
    KEPT.append(weakref.ref(flat))
    x = flat.view(1024, 1024)
    del flat
    mark(x, side())
    return x


@case
def storage():
    x = empty()
    KEPT.append(x.untyped_storage())
    mark(x, side())
    return x


@case
def weak_reference_to_the_storage():
    from torch.multiprocessing.reductions import StorageWeakRef

    x = empty()
    KEPT.append(StorageWeakRef(x.untyped_storage()))
    mark(x, side())
    return x


class Tagged(torch.Tensor):
    pass


@case
def subclass():
    x = empty().as_subclass(Tagged)
    mark(x, side())
    return x


# Memory behind two storages


@case
def dlpack():
    x = empty()
    y = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))
    KEPT.append(x)
    mark(y, side())
    return y


@case
def dlpack_of_the_marked():
    x = empty()
    KEPT.append(torch.utils.dlpack.from_dlpack(x))
    mark(x, side())
    return x


@case
def copy_on_write():
    x = empty()
    address = x.data_ptr()  # asked for later, it makes the copy
    KEPT.append(torch._lazy_clone(x))
    mark(x, side())
    return kinds(address)


@case
def array_interface():
    x = empty()
    y = torch.as_tensor(Array(x), device="cuda")
    assert y.data_ptr() == x.data_ptr()
    KEPT.append(x)
    mark(y, side())
    return y


class Array:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.x.__cuda_array_interface__


# Transforms


@case
def grad_transform():
    return transformed(lambda f: torch.func.grad(lambda x: f(x)[0]))


@case
def vmap():
    return transformed(lambda f: torch.func.vmap(f), empty(1, N))


@case
def jvp():
    return transformed(lambda f: lambda x: torch.func.jvp(f, (x,), (empty(),)))


def transformed(transform: Callable[..., Any], x: torch.Tensor | None = None) -> torch.Tensor:
    def function(x: torch.Tensor) -> torch.Tensor:
        mark(x, side())
        return x.view(-1)

    x = empty() if x is None else x
    transform(function)(x)
    return x


if __name__ == "__main__":
    main()
