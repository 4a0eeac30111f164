"""The figures of the running process, for dashboards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..installation.devices import check_device_name, device_index
from ..installation.pytorch import untyped
from .figures import FIGURES, figures_of, is_ours, used_devices

if TYPE_CHECKING:
    import torch

__all__ = ["PrometheusCollector", "metrics", "prometheus_text"]


def metrics(device: torch.device | str | int | None = None) -> dict[str, float]:
    """The figures of a device (None: the current one), by name.

    At this moment, in bytes:

    - ``device_total_bytes``, ``device_free_bytes``: memory of the device, and how much of it no
      process has; only where this process has some;
    - ``reserved_bytes``: taken from the driver; ``allocated_bytes``: live;
      ``allocated_peak_bytes``: its peak since peaks were reset;
    - ``pending_bytes``: freed, but marked uses on other streams are not over.

    Since the process began:

    - ``mallocs``, ``frees``, and ``out_of_memory``, the requests that failed: counts, the first two
      since PyTorch's accumulated figures were reset;
    - ``grown_bytes``: taken from the driver in all, likewise;
    - ``held_back``, ``held_back_seconds``: how often and how long the host was held back.

    On PyTorch's own allocator the figures are its own; nothing is pending or held back there.
    Empty before the process uses CUDA, as on a machine without a GPU, and on
    ``pluggable_allocator()``.

    Raises:
        ValueError: this process has no such CUDA device. Before CUDA is used only the name is
            checked.
        TypeError: `device` is neither index, name nor torch.device.

    Example::

        live = esper_alloc.metrics().get("allocated_bytes", 0)
    """
    torch = untyped(sys.modules.get("torch"))
    if torch is None or not torch.cuda.is_initialized():
        check_device_name(device)
        return {}
    return figures_of(device_index(device))


def _families() -> Iterator[tuple[str, bool, str, list[tuple[dict[str, str], float]]]]:
    """Name, whether it is a counter, what it is, and labels and value of each sample."""
    yield (
        "esper_alloc_enabled", False, "1 if PyTorch runs on esper_alloc.", [({}, float(is_ours()))]
    )  # fmt: skip
    devices = {str(device): figures_of(device) for device in used_devices()}
    for name, (counter, about) in FIGURES.items():
        samples = [
            ({"device": device}, found[name]) for device, found in devices.items() if name in found
        ]
        if samples:
            yield f"esper_alloc_{name}", counter, about, samples


def prometheus_text() -> str:
    """The figures of all devices that this process uses, in Prometheus's text format (0.0.4).

    Names are those of :func:`metrics` with ``esper_alloc_`` before them, and ``_total`` behind
    those that only rise; the label ``device`` is the index. ``esper_alloc_enabled`` is 1 if
    PyTorch runs on esper_alloc, else 0. ``esper_alloc.live.metrics.PrometheusCollector`` is the
    same for ``prometheus_client``.

    Example::

        with open("esper_alloc.prom", "w") as file:  # for node_exporter's textfile collector
            file.write(esper_alloc.prometheus_text())
    """
    lines = []
    for name, counter, about, samples in _families():
        name += "_total" if counter else ""
        lines += [f"# HELP {name} {about}", f"# TYPE {name} {'counter' if counter else 'gauge'}"]
        for labels, value in samples:
            inside = ",".join(f'{key}="{label}"' for key, label in labels.items())
            lines.append(f"{name}{{{inside}}} {value}" if inside else f"{name} {value}")
    return "\n".join(lines) + "\n"


class PrometheusCollector:
    """Has the figures of :func:`prometheus_text` collected by ``prometheus_client``, when it is
    asked for them.

    Raises:
        ImportError: there is no ``prometheus_client``.

    Example::

        prometheus_client.REGISTRY.register(PrometheusCollector())
    """

    def __init__(self) -> None:
        import prometheus_client.core  # type: ignore[import-not-found, unused-ignore]

        self._core: Any = prometheus_client.core

    def collect(self) -> Iterator[Any]:
        """As ``prometheus_client`` calls it."""
        for name, counter, about, samples in _families():
            kind = self._core.CounterMetricFamily if counter else self._core.GaugeMetricFamily
            family = kind(name, about, labels=list(samples[0][0]))
            for labels, value in samples:
                family.add_metric(list(labels.values()), value)
            yield family
