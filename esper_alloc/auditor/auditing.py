"""``with esper_alloc.audit() as report:``."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any, Literal

from ..installation.pytorch import load_shim
from ..torch_allocator.choices import SEGMENTS
from . import observation
from .findings import Finding, json_of, parse, text_of

MODES = ("raise", "warn", "collect")


class AuditError(RuntimeError):
    """An audit with ``mode="raise"`` found something. `findings` has what is new."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__(text_of(findings))
        self.findings = findings


class AuditWarning(UserWarning):
    """An audit with ``mode="warn"`` found something."""


class Report:
    """What an audit has found so far.

    Attributes:
        findings: one for each combination of places, in the order of discovery. During the
            audit, frees that nothing has followed yet are not among them.
        complete: False if host memory ran out, so that something may be missing.
    """

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._final: tuple[list[Finding], bool] | None = None

    def _read(self) -> tuple[list[Finding], bool]:
        if self._final is not None:
            return self._final
        found = [parse(one) for one in self._compiled.audit_findings()]
        return found, self._compiled.audit_state()[1]

    @property
    def findings(self) -> list[Finding]:
        return self._read()[0]

    @property
    def complete(self) -> bool:
        return self._read()[1]

    def text(self) -> str:
        """For people."""
        return text_of(*self._read())

    def json(self) -> str:
        """For programs: ``{"complete": bool, "findings": [...]}``."""
        return json_of(*self._read())

    def _end(self) -> None:
        self._final = self._read()


def _check_poison(compiled: Any) -> None:
    if not compiled.is_current():
        raise RuntimeError(
            "poison=True works on esper_alloc's memory only: call esper_alloc.enable() first."
        )
    if SEGMENTS.in_environment() != "classic":
        raise RuntimeError(
            "poison=True needs classic segments, whose memory stays at its addresses: call "
            'esper_alloc.enable(segments="classic"), or set ESPER_ALLOC_SEGMENTS=classic.'
        )


class audit:
    """Watches what the program does with GPU memory on several streams, and finds accesses
    that nothing orders, whichever allocator PyTorch uses.

    A context manager; its value is a :class:`Report`. One audit can run in a process.

    Args:
        mode: ``"collect"`` only collects findings in the report. ``"warn"`` also gives an
            :class:`AuditWarning` for each, ``"raise"`` raises an :class:`AuditError`, both in
            the main thread soon after the line that the finding is about, or at the end.
        poison: freed memory is filled with 0xff, which is NaN, as soon as it may be reused, and
            checked when it is handed out again, so that writes after the free are found. Only
            with esper_alloc as the allocator and classic segments. The host waits at each
            allocation.

    Raises:
        ValueError: there is no such mode.
        RuntimeError: an audit is running already; or memory cannot be poisoned.
        UnavailableError: esper_alloc's PyTorch part does not work with this torch.
    """

    def __init__(
        self,
        *,
        mode: Literal["raise", "warn", "collect"] = "collect",
        poison: bool = False,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: there are {', '.join(map(repr, MODES))}")
        self._mode = mode
        self._poison = bool(poison)
        self._told = 0
        self._report: Report | None = None

    def __enter__(self) -> Report:
        compiled = load_shim()
        if self._poison:
            _check_poison(compiled)
        observation.install(compiled)
        collects = self._mode == "collect"
        notify = None if collects else self._tell
        compiled.audit_start(observation.foreign_folders(), notify, self._poison)
        try:
            observation.tell_what_is_live(compiled)
        except BaseException:
            compiled.audit_stop()
            raise
        self._told = 0
        self._report = Report(compiled)
        return self._report

    def _tell(self) -> None:
        """Warns of what is new, or raises."""
        assert self._report is not None
        found = self._report.findings
        new, self._told = found[self._told :], len(found)
        if new and self._mode == "raise":
            raise AuditError(new)
        if self._mode == "warn":
            for finding in new:
                warnings.warn(finding.text(), AuditWarning, stacklevel=3)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        if kind is None:
            self._tell()

    def stop(self) -> None:
        """Ends the audit without warnings and errors; the report is complete then."""
        assert self._report is not None
        load_shim().audit_stop()
        self._report._end()
