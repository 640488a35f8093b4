"""Health of a process: named checks, each of which tests the work and not only the port."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.runtime.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Check:
    """``problem`` returns the current problem, in a text that may be public, or an empty text.

    ``withdraws``: the process does not serve while there is a problem; otherwise it serves and reports it.
    """

    name: str
    problem: Callable[[], str]
    withdraws: bool = True


class Health:
    """Serving once opened and while no check reports a problem. Computed at each call."""

    def __init__(self, metrics: Metrics) -> None:
        self._checks: tuple[Check, ...] = ()
        self._closed_because = "starting"
        is_serving = "1 while the process is ready, else 0"
        metrics.level("fairway_runtime_serving", is_serving, lambda: float(not self.problems()))
        metrics.gauge(
            "fairway_runtime_check_failing",
            "1 while the health check fails, else 0",
            lambda: [((check.name,), float(bool(check.problem()))) for check in self._checks],
            ("check",),
        )

    def add(self, checks: Sequence[Check]) -> None:
        self._checks += tuple(checks)

    def open(self) -> None:
        """Let the checks decide from now on."""
        self._closed_because = ""

    def close(self, reason: str) -> None:
        """Report NOT_SERVING from now on, whatever the checks return."""
        self._closed_because = reason

    def problems(self) -> tuple[str, ...]:
        """Return why the process does not serve; empty when it serves."""
        if self._closed_because:
            return (self._closed_because,)
        return self._found(withdraws=True)

    def notices(self) -> tuple[str, ...]:
        """Return the problems with which the process still serves."""
        return self._found(withdraws=False)

    def _found(self, *, withdraws: bool) -> tuple[str, ...]:
        found = ((check.name, check.problem()) for check in self._checks if check.withdraws is withdraws)
        return tuple(f"{name}: {problem}" for name, problem in found if problem)
