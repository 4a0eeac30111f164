"""The figures in the logs of Lightning and of transformers' Trainer, and so in TensorBoard, W&B and
what else these write to. Names are those of ``esper_alloc.metrics()`` with ``esper_alloc/`` before
them."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from .metrics import metrics

__all__ = ["add_to_trainer", "lightning_callback"]


def _logged() -> dict[str, float]:
    return {f"esper_alloc/{name}": value for name, value in metrics().items()}


def lightning_callback() -> Any:
    """A callback for Lightning's Trainer, of ``lightning`` or ``pytorch_lightning``. Every
    ``log_every_n_steps`` steps it hands the figures to the trainer's loggers, which write those of
    rank 0. Nothing is copied to or from a GPU. Where CUDA is not used it logs nothing.

    Raises:
        ImportError: neither library is installed.

    Example::

        trainer = lightning.Trainer(callbacks=[lightning_callback()])
    """
    base: Any = _lightning().Callback

    class MemoryCallback(base):  # type: ignore[misc]
        logged = 0  # the last step: with gradient accumulation several batches are of one

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            every, step = trainer.log_every_n_steps, trainer.global_step
            if (
                every
                and trainer.loggers
                and step != self.logged
                and step % every == 0
                and (found := _logged())
            ):
                self.logged = step
                for logger in trainer.loggers:
                    logger.log_metrics(found, step=step)

    return MemoryCallback()


def _lightning() -> Any:
    """The library that the program uses, or else one that is installed: a callback of the one is
    none for the other."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    names.sort(key=lambda name: name not in sys.modules)
    try:
        return importlib.import_module(names[0])
    except ModuleNotFoundError as error:
        if error.name not in ("lightning", "pytorch_lightning"):
            raise
    return importlib.import_module(names[1])


def add_to_trainer(trainer: Any) -> None:
    """Adds the figures to what a ``transformers.Trainer`` logs of training steps. It becomes the
    first of the trainer's callbacks, because those that write to TensorBoard, W&B and so on come
    before the user's own. Where CUDA is not used it adds nothing.

    Example::

        trainer = transformers.Trainer(model, args)
        add_to_trainer(trainer)
    """
    base: Any = importlib.import_module("transformers").TrainerCallback

    class MemoryCallback(base):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs is not None and "loss" in logs:  # what evaluate() logs is what it returns
                logs.update(_logged())

    trainer.callback_handler.callbacks.insert(0, MemoryCallback())
