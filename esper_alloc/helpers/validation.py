"""Validating several configurations of a model in one pass, on a stream of its own.

:func:`fused_validation_batch` moves a batch to the device, repeats it once for
each configuration and evaluates all of them together. Every tensor that a
stream reads and another stream allocated carries a use, so the caller may drop
whatever it passed as soon as the call returns. :func:`process_fused_val_batch`
is the same behind the signature that esper-lite's trainer calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..installation.bools import checked_bool
from ..uses.containers import find_tensors
from ..uses.streams import check_stream, is_cpu_stream
from ..uses.use import using

if TYPE_CHECKING:
    import torch

__all__ = [
    "FusedValidation",
    "fused_validation_batch",
    "process_fused_val_batch",
]


class FusedValidation(NamedTuple):
    """What each of the K configurations scored; unpacks as a tuple of three.

    Attributes:
        loss: ``[K]``, the mean loss of each configuration, of the loss's dtype.
        correct: ``[K]``, how many elements each got right; int64, unless `evaluate`
            returned floating-point numbers: then of their dtype, and float32 for half precision.
        total: elements of *one* configuration; at least 1, so that it may divide.
    """

    loss: torch.Tensor
    correct: torch.Tensor
    total: int


def fused_validation_batch(
    inputs: Any,
    targets: Any,
    num_configs: int,
    stream: torch.Stream | None = None,
    *,
    evaluate: Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor, int]],
    device: torch.device | str | int | None = None,
    reads: Any = (),
    take: bool = False,
) -> FusedValidation:
    """Evaluates a batch under `num_configs` configurations at once.

    ::

        def evaluate(inputs, targets):            # [K*B, ...], [K*B, ...]
            logits = model.fused_forward(inputs, overrides)
            loss = cross_entropy(logits, targets, reduction="none")
            return loss, logits.argmax(1) == targets, targets.numel()

        loss, correct, total = fused_validation_batch(
            inputs, targets, 4, env_stream, evaluate=evaluate, reads=overrides
        )

    The copies to the device are non-blocking and are made on `stream`, after
    everything that the current stream has been given. Configuration k sees
    elements ``[k * B, (k + 1) * B)`` of what `evaluate` gets: the batch in its
    order, with dtype and memory format (channels_last) kept.

    On return the work may not have begun. The inputs, the targets and `reads`
    may be dropped, and host memory that is not pinned may be written. *Pinned*
    memory that is not dropped must not be written before `stream` has copied it,
    as with any non-blocking copy.

    Args:
        inputs: ``[B, ...]``, any dtype, on the CPU or on a device; or dicts,
            lists and tuples of such tensors, with one B.
        targets: likewise, with the same B.
        num_configs: K, at least 1.
        stream: where to copy, repeat and evaluate. None: the current stream.
        evaluate: called once, under ``torch.inference_mode()``, with the
            repeated inputs and targets. It returns

            - the loss: per element, with a size that K divides, those of a
              configuration side by side (``[K*B]``, ``[K*B, T]``, ``[K*B*T]``);
              or a scalar, which then stands for every configuration;
            - which elements are correct, likewise, but no scalar;
            - the number of elements of all configurations together: K divides it,
              and it is at most the number of elements of the second.
        device: where to evaluate. None: the device of `stream`, else the one
            that `inputs` are on.
        reads: further tensors, or containers of them, that `evaluate` reads and
            that may be dropped before `stream` has read them: overrides made for
            this batch; ``list(model.parameters())`` of a model that may be gone.
        take: make the current stream wait for the results, and protect them
            on it. Without it they belong to `stream`: read them there, or
            after synchronising with it.

    Returns:
        A :class:`FusedValidation` of loss ``[K]``, correct ``[K]`` and total, an int.

    Raises:
        TypeError: something is not of the type asked for above.
        ValueError: `num_configs` is below 1, the batch is empty, its parts
            differ in B, `device` is not that of `stream`, or what `evaluate`
            returned cannot be split into K parts. Only in the last case was
            anything copied.
    """
    import torch

    configs = _check_configs(num_configs)
    check_stream(stream)
    take = checked_bool("take", take)
    if not callable(evaluate):
        raise TypeError(
            f"evaluate must be callable with the repeated inputs and targets, "
            f"not {type(evaluate).__name__}"
        )
    _batch_size(inputs, targets)
    try:
        find_tensors(reads, [])
    except TypeError as error:
        raise TypeError(f"reads: {error}") from None
    where = _device(device, stream, inputs)
    # Everything that another stream allocated: the batch, where it is on the
    # device already, and what evaluate() reads. What is made inside belongs to
    # the stream itself.
    scope = using(inputs, targets, reads, stream=stream)
    # Results are ordinary tensors, whatever mode the caller is in.
    with torch.inference_mode(False), torch.no_grad():
        with scope:
            with torch.inference_mode():
                repeated = [
                    _map(part, lambda x: _repeat(_move(x, where), configs))
                    for part in (inputs, targets)
                ]
                scored = evaluate(*repeated)
            found = _split(scored, configs)
        if take and stream is not None:
            scope.take(found.loss, found.correct)
    return found


def process_fused_val_batch(
    env_state: Any,
    inputs: Any,
    targets: Any,
    criterion: Any,
    alpha_overrides: Mapping[str, torch.Tensor],
    num_configs: int,
    *,
    task_spec: Any,
    loss_and_correct_fn: Callable[..., Any] | None = None,
    compiled_loss_and_correct: Callable[..., Any] | None = None,
) -> FusedValidation:
    """esper-lite's function of this name, with its arguments and results.

    Puts ``env_state.model`` into eval mode and evaluates, on
    ``env_state.stream`` and ``env_state.env_device``,
    ``model.fused_forward(inputs, alpha_overrides)``; what that returns goes to
    ``loss_and_correct_fn(outputs, targets, criterion,
    task_type=task_spec.task_type, elementwise=True)``, which returns (loss,
    correct, total) as `evaluate` does in :func:`fused_validation_batch`. Both
    names that esper-lite has had for the function are taken.

    The batch and `alpha_overrides` may be dropped when it returns; the model
    must live until the stream was synchronised, as in esper-lite's trainer.

    Returns:
        (loss ``[K]``, correct ``[K]``, elements of one configuration).

    Raises:
        TypeError: neither or both of the two functions were given.
        TypeError, ValueError: as :func:`fused_validation_batch`.
    """
    given = [
        function
        for function in (loss_and_correct_fn, compiled_loss_and_correct)
        if function is not None
    ]
    if len(given) != 1:
        raise TypeError(
            "pass exactly one of loss_and_correct_fn and "
            f"compiled_loss_and_correct (got {len(given)})"
        )
    model = env_state.model

    def evaluate(fused_inputs: Any, fused_targets: Any) -> Any:
        model.eval()
        outputs = model.fused_forward(fused_inputs, alpha_overrides)
        return given[0](
            outputs,
            fused_targets,
            criterion,
            task_type=task_spec.task_type,
            elementwise=True,
        )

    return fused_validation_batch(
        inputs,
        targets,
        num_configs,
        env_state.stream or None,
        evaluate=evaluate,
        device=env_state.env_device,
        reads=alpha_overrides,
    )


# Arguments


def _check_configs(num_configs: Any) -> int:
    try:
        configs = operator.index(num_configs)
    except TypeError:
        raise TypeError(
            f"num_configs must be an integer, not {type(num_configs).__name__}"
        ) from None
    if configs < 1:
        raise ValueError(
            f"num_configs is {configs}: it must be the number of configurations, 1 or more"
        )
    return configs


def _tensors(value: Any, name: str) -> list[torch.Tensor]:
    """The tensors of a batch's part; what is neither is an error."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        children = list(value.values())
    elif isinstance(value, (list, tuple)):
        children = list(value)
    else:
        raise TypeError(
            f"{name} must be tensors, or dicts, lists and tuples of tensors, "
            f"not {type(value).__name__}"
        )
    return [tensor for child in children for tensor in _tensors(child, name)]


def _batch_size(inputs: Any, targets: Any) -> int:
    """B, which every tensor of the batch must have as its first size."""
    import torch

    sizes: dict[int, str] = {}  # and which part has it
    for name, part in (("inputs", inputs), ("targets", targets)):
        tensors = _tensors(part, name)
        if not tensors:
            raise ValueError(f"{name} contain no tensor")
        for tensor in tensors:
            if tensor.layout != torch.strided or tensor.is_nested:
                kind = "a nested tensor" if tensor.is_nested else f"a tensor of {tensor.layout}"
                raise TypeError(f"{name} contain {kind}: only dense ones can be repeated")
            if tensor.dim() == 0:
                raise ValueError(
                    f"{name} contain a tensor without dimensions: the first "
                    "dimension must be the batch"
                )
            sizes.setdefault(tensor.shape[0], name)
    if len(sizes) > 1:
        raise ValueError(
            "inputs and targets differ in their first dimension, the batch: "
            + ", ".join(f"{size} ({name})" for size, name in sizes.items())
        )
    (size,) = sizes
    if size == 0:
        raise ValueError("the batch is empty: skip it")
    return size


def _device(
    device: torch.device | str | int | None,
    stream: torch.Stream | None,
    inputs: Any,
) -> torch.device:
    """Where to evaluate, with an index where the kind of device has several."""
    import torch

    of_stream = None if stream is None or is_cpu_stream(stream) else stream.device
    if device is None:
        return of_stream or _tensors(inputs, "inputs")[0].device
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f'device must be a torch.device, a name such as "cuda:0" or an index, not {device!r}'
        ) from None
    if of_stream is None:
        return found
    if str(found) == of_stream.type:
        # No index: as .to(found) means it, the current device of that kind.
        current = torch.get_device_module(found).current_device()
        found = torch.device(found.type, current)
    if found != of_stream:
        raise ValueError(
            f"device is {found} and stream belongs to {of_stream}: pass a "
            "stream of the device, or leave device out"
        )
    return found


# The batch


def _map(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with each tensor replaced, in new dicts, lists and (named) tuples."""
    import torch

    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _map(child, function) for key, child in value.items()}
    children = [_map(child, function) for child in value]
    if isinstance(value, list):
        return children
    if hasattr(value, "_fields"):  # a named tuple
        return type(value)(*children)
    return tuple(children)


def _move(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the current stream, to which a copy then belongs."""
    return x.to(device, non_blocking=True)


def _repeat(x: torch.Tensor, configs: int) -> torch.Tensor:
    """``[K*B, ...]``: x K times over, in one copy, its memory format kept."""
    import torch

    size = (configs * x.shape[0], *x.shape[1:])
    repeated = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=_format(x))
    repeated.view(configs, *x.shape).copy_(x.expand(configs, *x.shape))
    return repeated


def _format(x: torch.Tensor) -> torch.memory_format:
    import torch

    if not x.is_contiguous():
        for dimensions, kept in (
            (4, torch.channels_last),
            (5, torch.channels_last_3d),
        ):
            if x.dim() == dimensions and x.is_contiguous(memory_format=kept):
                return kept
    return torch.contiguous_format


# The results


def _split(found: Any, configs: int) -> FusedValidation:
    """Per configuration what `evaluate` returned for all of them."""
    import torch

    if not isinstance(found, tuple) or len(found) != 3:
        raise TypeError(f"evaluate must return (loss, correct, total), not {type(found).__name__}")
    loss, correct, total = found
    for name, tensor in (("loss", loss), ("correct", correct)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"evaluate must return {name} as a tensor, not {type(tensor).__name__}")
    try:
        elements = operator.index(total)
    except TypeError:
        raise TypeError(f"evaluate must return total as an integer, not {total!r}") from None
    if not (loss.is_floating_point() or loss.is_complex()):
        raise TypeError(f"evaluate must return a floating-point loss, not {loss.dtype}")
    if loss.dim() == 0 or loss.numel() == 1:
        per_loss = loss.reshape(1).repeat(configs)
    else:
        per_loss = _rows(loss, configs, "loss").mean(dim=1)
    rows = _rows(correct, configs, "correct")
    # Elements may be left out (padding), but of each configuration the same.
    if not 0 <= elements <= rows.numel() or elements % configs:
        raise ValueError(
            f"evaluate returned a total of {elements} for {rows.numel()} elements of correct and "
            f"{configs} configurations: return the number of elements of all configurations "
            "together"
        )
    # Sums in half precision would be rounded, and float16 ends at 65504.
    half = rows.is_floating_point() and rows.itemsize <= 2
    right = rows.sum(dim=1, dtype=torch.float32 if half else None)
    return FusedValidation(per_loss, right, max(1, elements // configs))


def _rows(tensor: torch.Tensor, configs: int, name: str) -> torch.Tensor:
    """``[K, elements]``."""
    if tensor.dim() == 0 or tensor.numel() == 0 or tensor.numel() % configs:
        raise ValueError(
            f"evaluate returned {name} of shape {list(tensor.shape)}, which "
            f"cannot be split into {configs} configurations: return it for "
            "each element"
        )
    return tensor.reshape(configs, -1)
