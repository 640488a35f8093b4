"""Circuit breakers: a worker, version or zone that fails most requests gets only trial requests for a while.

    closed ──failures, enough of them and most of what is seen──► open ──its time is over──► half-open
       ▲                                                           ▲                             │
       └─────────────trials that succeed───────────────────────────┼─────────────────────────────┘
                                                                   └──a trial fails: open for twice as long

One circuit belongs to one worker, version or zone. Pure: time is an argument, in monotonic seconds.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeVar


class CircuitState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """Thresholds and times of a circuit."""

    # Failures and results are counted over about this time.
    window_s: float = 30.0
    # So many failures open a circuit ...
    min_failures: int = 5
    # ... if they are at least this share of all results.
    failure_ratio: float = 0.5
    # How long an open circuit rejects all requests; doubled each time ...
    base_open_s: float = 5.0
    # ... up to this.
    max_open_s: float = 120.0
    # Time between the trials that a half-open circuit admits.
    trial_interval_s: float = 1.0
    # So many of them close it.
    trial_successes: int = 3
    # Time without a failure that resets the doubling.
    forgive_s: float = 300.0

    def __post_init__(self) -> None:
        if self.min_failures < 1 or not 0.0 < self.failure_ratio <= 1.0:
            raise ValueError("a circuit opens at one failure or more, and at a share above 0")


@dataclass(slots=True, eq=False)
class Circuit:
    """One breaker. Counts decay with age, so that a window needs no list of results."""

    policy: BreakerPolicy
    since_s: float = 0.0
    state: CircuitState = CircuitState.CLOSED
    until_s: float = 0.0  # open: when the first trial may start; half-open: when the next may
    opened: int = 0  # times in a row
    _failures: float = 0.0
    _successes: float = 0.0
    _seen_s: float = 0.0
    _failed_s: float = -math.inf
    _good_trials: int = 0

    def failed(self, now_s: float, count: int = 1) -> bool:
        """Count failures; return whether that opened the circuit."""
        self._fade(now_s)
        self._failures += count
        self._failed_s = now_s
        if self.state is CircuitState.OPEN:
            return False
        if self.state is CircuitState.HALF_OPEN:
            self._open(now_s)
            return True
        share = self._failures / (self._failures + self._successes)
        if self._failures < self.policy.min_failures or share < self.policy.failure_ratio:
            return False
        self._open(now_s)
        return True

    def succeeded(self, now_s: float, count: int = 1) -> bool:
        """Count successes; return whether that closed the circuit. Successes of an open circuit do not count
        as trials."""
        self._fade(now_s)
        self._successes += count
        if self.state is not CircuitState.HALF_OPEN:
            return False
        self._good_trials += count
        if self._good_trials < self.policy.trial_successes:
            return False
        self._set(CircuitState.CLOSED, now_s)
        self._failures = self._successes = 0.0
        return True

    def advance(self, now_s: float) -> bool:
        """Advance the time; return whether that changed an open circuit to half-open."""
        if self.state is CircuitState.OPEN and now_s >= self.until_s:
            self._set(CircuitState.HALF_OPEN, now_s)
            self._good_trials = 0
            return True
        if self.state is CircuitState.CLOSED and now_s - self._failed_s >= self.policy.forgive_s:
            self.opened = 0
        return False

    def lets_through(self, now_s: float) -> bool:
        """Whether a request may pass now."""
        if self.state is CircuitState.CLOSED:
            return True
        return self.state is CircuitState.HALF_OPEN and now_s >= self.until_s

    def passed(self, now_s: float) -> None:
        """Record that a request was admitted: a trial, when the circuit is half-open."""
        if self.state is CircuitState.HALF_OPEN:
            self.until_s = now_s + self.policy.trial_interval_s

    def idle(self, now_s: float) -> bool:
        """Whether the circuit equals a new one."""
        quiet = now_s - max(self._seen_s, self._failed_s) >= self.policy.forgive_s
        return self.state is CircuitState.CLOSED and quiet

    def _open(self, now_s: float) -> None:
        self._set(CircuitState.OPEN, now_s)
        self.until_s = now_s + min(
            self.policy.max_open_s, self.policy.base_open_s * 2.0 ** min(self.opened, 32)
        )
        self.opened += 1

    def _set(self, state: CircuitState, now_s: float) -> None:
        self.state, self.since_s = state, now_s

    def _fade(self, now_s: float) -> None:
        if now_s == self._seen_s:
            return  # usual for all but the first event of a report
        kept = math.exp(-max(0.0, now_s - self._seen_s) / self.policy.window_s)
        self._failures *= kept
        self._successes *= kept
        self._seen_s = now_s


@dataclass(frozen=True, slots=True)
class CircuitChange:
    """The circuit of ``kind`` (worker, version, zone) and ``name`` is in another state."""

    kind: str
    name: str
    state: CircuitState
    until_s: float


Key = TypeVar("Key", bound=Hashable)


class Circuits(Generic[Key]):
    """The circuits of one kind, at most ``max_circuits``. Beyond that, the closed one used least recently is
    removed, or the least recently used one when none is closed: an open circuit gets no events."""

    def __init__(self, kind: str, policy: BreakerPolicy, *, max_circuits: int = 4096) -> None:
        self.kind: Final = kind
        self.policy: Final = policy
        self._max = max_circuits
        self._circuits: OrderedDict[Key, Circuit] = OrderedDict()

    def __len__(self) -> int:
        return len(self._circuits)

    def get(self, key: Key) -> Circuit | None:
        return self._circuits.get(key)

    def failed(self, key: Key, now_s: float) -> bool:
        """Count a failure of the key; return whether its circuit opened."""
        return self._of(key, now_s).failed(now_s)

    def succeeded(self, key: Key, now_s: float, count: int = 1) -> bool:
        """Count successes; return whether the circuit closed."""
        return self._of(key, now_s).succeeded(now_s, count)

    def passed(self, key: Key, now_s: float) -> None:
        if (circuit := self._circuits.get(key)) is not None:
            circuit.passed(now_s)

    def lets_through(self, key: Key, now_s: float) -> bool:
        circuit = self._circuits.get(key)
        return circuit is None or circuit.lets_through(now_s)

    def forget(self, key: Key) -> None:
        self._circuits.pop(key, None)

    def advance(self, now_s: float) -> tuple[Key, ...]:
        """Advance the time; return the keys whose circuit became half-open. Idle circuits are removed."""
        found = tuple(key for key, circuit in self._circuits.items() if circuit.advance(now_s))
        for key in [key for key, circuit in self._circuits.items() if circuit.idle(now_s)]:
            del self._circuits[key]
        return found

    def change(self, key: Key, name: Callable[[Key], str] = str) -> CircuitChange:
        """Return the present state of the key's circuit, to log it."""
        circuit = self._circuits[key]
        return CircuitChange(self.kind, name(key), circuit.state, circuit.until_s)

    def not_closed(self) -> tuple[tuple[Key, Circuit], ...]:
        return tuple(found for found in self._circuits.items() if found[1].state is not CircuitState.CLOSED)

    def _least_worth(self) -> Key:
        closed = (key for key, found in self._circuits.items() if found.state is CircuitState.CLOSED)
        return next(closed, next(iter(self._circuits)))

    def _of(self, key: Key, now_s: float) -> Circuit:
        circuit = self._circuits.get(key)
        if circuit is None:
            while len(self._circuits) >= self._max:
                del self._circuits[self._least_worth()]
            circuit = self._circuits[key] = Circuit(self.policy, now_s)
        self._circuits.move_to_end(key)
        return circuit
