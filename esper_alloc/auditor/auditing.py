"""``with esper_alloc.audit() as report:``."""

from __future__ import annotations

import sys
import warnings
from types import TracebackType
from typing import Any, Literal

from ..installation.bools import checked_bool
from ..installation.pytorch import load_shim, untyped
from ..torch_allocator.enabling import why_off
from . import observation
from .causes import by_cause
from .fence import Fault, Freed, explain, fault_in, parse_freed
from .findings import Finding, json_of, text_of

MODES = ("raise", "warn", "collect")

NO_CUDA = "esper_alloc audit: the program did not use CUDA, so there was nothing to audit"


def _uses_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(untyped(torch.cuda).is_initialized())


class AuditError(RuntimeError):
    """An audit with ``mode="raise"`` found something, or an access faulted at a fence.

    `findings` has what is new, or all there is after a fault; `fault` is a ``Fault`` or None.

    Example::

        try:
            with esper_alloc.audit(mode="raise"):
                train_step()
        except esper_alloc.AuditError as error:
            print(error.findings[0].place.frames)
            raise
    """

    def __init__(self, findings: list[Finding], fault: Fault | None = None) -> None:
        super().__init__(fault.text() if fault else text_of(findings))
        self.findings = findings
        self.fault = fault

    def __reduce__(self) -> tuple[Any, ...]:
        return AuditError, (self.findings, self.fault)


class AuditWarning(UserWarning):
    """An audit with ``mode="warn"`` found something.

    Example::

        warnings.simplefilter("error", esper_alloc.AuditWarning)
        with esper_alloc.audit(mode="warn"):
            train_step()
    """


class Report:
    """What an audit has found so far.

    Attributes:
        findings: one for each wait, mark, copy or reference that is missing, the most harmful
            first. During the audit, frees that nothing has followed yet are not among them.
        complete: False if host memory ran out, so that something may be missing, and if the
            program has not used CUDA, so that nothing was audited.
        fault: with a fence, what is known of an access that faulted; None during the audit.
    """

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._final: tuple[list[tuple[list[int], Finding]], bool] | None = None
        self._used_cuda: bool | None = None  # None: the audit goes on
        self.fault: Fault | None = None

    def _read(self) -> tuple[list[tuple[list[int], Finding]], bool]:
        if self._final is not None:
            return self._final
        return by_cause(self._compiled.audit_findings()), self._compiled.audit_state()[1]

    @property
    def findings(self) -> list[Finding]:
        return [finding for _, finding in self._read()[0]]

    @property
    def complete(self) -> bool:
        return self._read()[1] and self.used_cuda

    @property
    def used_cuda(self) -> bool:
        """Whether there was anything to audit."""
        return _uses_cuda() if self._used_cuda is None else self._used_cuda

    def text(self) -> str:
        """For people."""
        said = text_of(self.findings, self._read()[1]) if self.used_cuda else NO_CUDA
        return f"{self.fault.text()}\n{said}" if self.fault else said

    def json(self) -> str:
        """For programs: ``{"complete": bool, "used_cuda": bool, "findings": [...]}``, and
        ``"fault"`` after one."""
        fault = self.fault.as_dict() if self.fault else None
        return json_of(self.findings, self.complete, self.used_cuda, fault)

    def freed_at(self, address: int) -> Freed | None:
        """With a fence, what was freed at the address last, for an address that a debugger or the
        kernel's log names. None: it is live, was never behind a fence, or was freed long ago."""
        return parse_freed(self._compiled.audit_freed_at(address))

    def _end(self, error: BaseException | None) -> None:
        self._final, self._used_cuda = self._read(), self.used_cuda
        if error is not None:
            self.fault = explain(self._compiled, error, self.findings)


def _needs_ours(asked: str) -> RuntimeError:
    why = why_off()
    remedy = f", and {why}" if why else ": call esper_alloc.enable() first"
    return RuntimeError(f"{asked} works on esper_alloc's memory only{remedy}.")


def _check_fence(compiled: Any) -> None:
    if not compiled.is_current():
        raise _needs_ours("fence=True")


def _fault_in_what_is_enqueued() -> BaseException | None:
    """Waits for each device that has had memory; others would be initialised by that."""
    import torch

    if not untyped(torch.cuda).is_initialized():
        return None
    for device in range(torch.cuda.device_count()):
        try:
            if torch.cuda.memory_stats(device).get("segment.all.allocated"):
                torch.cuda.synchronize(device)
        except RuntimeError as error:
            if fault := fault_in(error):
                return fault
    return None


def is_running() -> bool:
    """Whether an audit is under way in this process."""
    return bool(load_shim().audit_state()[0])


class audit:
    """Watches what the program does with GPU memory on several streams, and finds accesses
    that nothing orders, whichever allocator PyTorch uses.

    A context manager; its value is a :class:`Report`. One audit can run in a process.

    Args:
        mode: ``"collect"`` only collects findings in the report. ``"warn"`` also gives an
            :class:`AuditWarning` for each when it is first seen, ``"raise"`` raises an
            :class:`AuditError`, both in the main thread soon after that line, or at the end.
        fence: memory that is allocated from now on gets pages of its own, which are unmapped
            after the free, so that a later access faults. CUDA then raises an error, and the
            audit an :class:`AuditError` from it, which names the memory. Only with esper_alloc
            as the allocator. Each allocation takes whole pages of 2 MiB.

    Raises:
        ValueError: there is no such mode.
        TypeError: `fence` is not a bool.
        RuntimeError: an audit is running already; or memory can get no fence.
        AuditError: at the end, if an access faulted, with each mode.
        UnavailableError: esper_alloc's PyTorch part does not work with this torch.

    Example::

        with esper_alloc.audit() as report:
            train_step()
        assert not report.findings, report.text()
    """

    def __init__(
        self,
        *,
        mode: Literal["raise", "warn", "collect"] = "collect",
        fence: bool = False,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: there are {', '.join(map(repr, MODES))}")
        self._mode = mode
        self._fence = checked_bool("fence", fence)
        self._told = 0
        self._report: Report | None = None

    def __enter__(self) -> Report:
        compiled = load_shim()
        if self._fence:
            _check_fence(compiled)
        observation.install(compiled)
        collects = self._mode == "collect"
        notify = None if collects else self._notified
        before = self._report, self._told
        report = self._report = Report(compiled)  # before anything can be found
        self._told = 0
        try:
            compiled.audit_start(observation.foreign_folders(), notify, self._fence)
            try:
                observation.tell_what_is_live(compiled)
            except BaseException:
                compiled.audit_stop()
                raise
        except BaseException:
            self._report, self._told = before
            raise
        return report

    def _notified(self) -> None:
        """The compiled half calls it wherever the main thread happens to be. An exception must not
        keep a context manager from entering or leaving: it comes at the end then."""
        interrupted = sys._getframe().f_back
        if interrupted is None or interrupted.f_code.co_name not in ("__enter__", "__exit__"):
            self._tell(level=3)

    def _tell(self, level: int) -> None:
        """Warns of what is new, or raises."""
        assert self._report is not None
        found = self._report._read()[0]
        new = [finding for members, finding in found if members[0] >= self._told]
        self._told = sum(len(members) for members, _ in found)
        if new and self._mode == "raise":
            raise AuditError(new)
        if self._mode == "warn":
            for finding in new:
                warnings.warn(finding.text(), AuditWarning, stacklevel=level)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._report is None or self._report._final is not None:
            raise RuntimeError("an audit is left, but was not entered")
        self.stop(error)
        if self._report.fault is not None:
            raise AuditError(self._report.findings, self._report.fault) from error
        if kind is None:
            self._tell(level=3)

    def stop(self, error: BaseException | None = None) -> None:
        """Ends the audit without warnings and errors; the report is complete then. `error`: what
        has ended the program."""
        assert self._report is not None
        load_shim().audit_stop()
        fault: BaseException | None = None
        if self._fence:
            fault = fault_in(error, self._report.findings) or _fault_in_what_is_enqueued()
        self._report._end(fault)
