"""Whether a process truly serves: named checks, each of which looks at the work and not at the port."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.runtime.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Check:
    """``problem`` returns what is wrong now, in words that may be read by anyone, or an empty text.

    ``withdraws``: the process does not serve while there is one; else it is reported, and the process serves.
    """

    name: str
    problem: Callable[[], str]
    withdraws: bool = True


class Health:
    """Serving while it was opened and no check objects. The answer is worked out when it is asked for."""

    def __init__(self, metrics: Metrics) -> None:
        self._checks: tuple[Check, ...] = ()
        self._closed_because = "starting"
        metrics.level("fairway_runtime_serving", "1 while the process is ready, else 0", self._serving)
        metrics.gauge(
            "fairway_runtime_check_failing",
            "1 while the health check fails, else 0",
            lambda: [((check.name,), float(bool(check.problem()))) for check in self._checks],
            ("check",),
        )

    def add(self, checks: Sequence[Check]) -> None:
        self._checks += tuple(checks)

    def open(self) -> None:
        """From now on the checks decide."""
        self._closed_because = ""

    def close(self, reason: str) -> None:
        """Not serving from now on, whatever the checks say."""
        self._closed_because = reason

    def problems(self) -> tuple[str, ...]:
        """Return why the process does not serve; nothing when it does."""
        if self._closed_because:
            return (self._closed_because,)
        return self._found(withdraws=True)

    def notices(self) -> tuple[str, ...]:
        """Return the problems that keep the process from nothing."""
        return self._found(withdraws=False)

    def _found(self, *, withdraws: bool) -> tuple[str, ...]:
        found = ((check.name, check.problem()) for check in self._checks if check.withdraws is withdraws)
        return tuple(f"{name}: {problem}" for name, problem in found if problem)

    def _serving(self) -> float:
        return float(not self.problems())
