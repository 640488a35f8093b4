"""Retry policy and choice of the gateway. Pure: time and jitter are arguments.

A retry needs all of: a retryable reason, attempts left, time left after the wait, and a token of the budget.
The budget limits retries to a share of the requests, so that an overloaded fleet does not get a multiple of
its load. Backoff is exponential, capped, with full jitter (AWS Builders' Library, "Timeouts, retries and
backoff with jitter"); the server's RetryInfo is its minimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

# Always retryable, with or without the server's RetryInfo.
_RETRIED: Final = frozenset(
    (
        "CONNECTION_LOST",
        "UNAVAILABLE",
        "DRAINING",
        "NO_LEADER",
        "NO_WORKER_AVAILABLE",
        "QUEUE_FULL",
        "QUEUE_TIMEOUT",
        "SHARE_EXCEEDED",
        "STORE_UNAVAILABLE",
        "STREAM_BROKEN",
    )
)
_MAX_DOUBLINGS: Final = 32


class FaultScope(Enum):
    """The cause of a failure, for the choice of the next gateway."""

    GATEWAY = auto()  # all calls of this client avoid it for a while
    CALL = auto()  # this call goes to another gateway
    NONE = auto()  # no effect on the choice


_FAULT_SCOPES: Final = {
    "CONNECTION_LOST": FaultScope.GATEWAY,
    "DRAINING": FaultScope.GATEWAY,
    "NO_LEADER": FaultScope.CALL,
    "QUEUE_FULL": FaultScope.CALL,
    "SHARE_EXCEEDED": FaultScope.CALL,
    "STORE_UNAVAILABLE": FaultScope.CALL,
    "STREAM_BROKEN": FaultScope.CALL,
    "UNAVAILABLE": FaultScope.CALL,
}


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of retries: attempts per call, backoff, and the budget of ``RetryBudget``."""

    # Includes the first attempt.
    max_attempts: int = 5
    first_delay_s: float = 0.05  # backoff after the first failure, before jitter
    max_delay_s: float = 2.0  # cap of the backoff
    # Share of the requests that adds to the budget.
    budget_ratio: float = 0.1
    # Budget at the start.
    budget_floor: float = 10.0
    # Added per second after that.
    budget_floor_per_s: float = 0.2
    # Maximum of the saved budget.
    budget_max: float = 100.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError("max_attempts counts the first attempt: at least 1")
        if not 0 < self.first_delay_s <= self.max_delay_s:
            raise ValueError("first_delay_s must be above 0 and at most max_delay_s")
        if not 0 <= self.budget_ratio <= 1 or self.budget_floor < 0 or self.budget_floor_per_s < 0:
            raise ValueError("budget_ratio is 0..1; the floors are not negative")
        if self.budget_max < max(self.budget_floor, 1.0):
            raise ValueError("budget_max must be at least 1 and at least budget_floor")


class RetryBudget:
    """A token bucket: requests and time fill it, retries empty it.

    Over any span with n new requests and t seconds, retries are at most
    ``budget_max + budget_ratio * n + budget_floor_per_s * t``; from the start on, ``budget_floor`` replaces
    ``budget_max``.
    """

    def __init__(self, policy: RetryPolicy, now_s: float) -> None:
        self._policy = policy
        self._balance = policy.budget_floor
        self._as_of_s = now_s

    @property
    def balance(self) -> float:
        return self._balance

    def request_began(self, now_s: float) -> None:
        self._fill(now_s, self._policy.budget_ratio)

    def take(self, now_s: float) -> bool:
        """Take one retry. Return False, and take nothing, when there is none."""
        self._fill(now_s, 0.0)
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True

    def _fill(self, now_s: float, extra: float) -> None:
        passed_s = max(0.0, now_s - self._as_of_s)
        self._as_of_s = max(self._as_of_s, now_s)
        grown = self._balance + passed_s * self._policy.budget_floor_per_s + extra
        self._balance = min(self._policy.budget_max, grown)


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of an attempt.

    ``repeatable``: a repeated call cannot deliver anything twice. ``attaches``: the server had accepted the
    request under its key, so that a repeated call attaches to it: no new work, and no budget is taken.
    """

    reason: str
    unavailable: bool
    over_quota: bool
    retry_after_s: float | None = None
    repeatable: bool = True
    attaches: bool = False


@dataclass(frozen=True, slots=True)
class Retry:
    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    why: str


def is_retryable(failure: Failure) -> bool:
    """Whether the reason is retryable, or the server sent a delay for it."""
    if failure.reason in _RETRIED:
        return True
    return failure.retry_after_s is not None and (failure.unavailable or failure.over_quota)


def fault_scope(reason: str) -> FaultScope:
    return _FAULT_SCOPES.get(reason, FaultScope.NONE)


def backoff_s(policy: RetryPolicy, attempt: int, jitter: float) -> float:
    """Return the wait after the failure of attempt ``attempt`` (from 1); ``jitter`` is uniform in 0..1."""
    return jitter * min(policy.max_delay_s, policy.first_delay_s * 2.0 ** min(attempt - 1, _MAX_DOUBLINGS))


def after_failure(
    policy: RetryPolicy,
    budget: RetryBudget,
    failure: Failure,
    *,
    attempt: int,
    now_s: float,
    deadline_s: float,
    jitter: float,
) -> Retry | GiveUp:
    """Decide after the failure of attempt ``attempt`` (from 1). Takes from the budget only for a Retry."""
    if not is_retryable(failure):
        return GiveUp("the error is not retryable")
    if not failure.repeatable:
        return GiveUp("tokens were delivered and there is no idempotency key to continue by")
    if attempt >= policy.max_attempts:
        return GiveUp(f"the limit is {policy.max_attempts} attempts")
    delay_s = (failure.retry_after_s or 0.0) + backoff_s(policy, attempt, jitter)
    if now_s + delay_s >= deadline_s:
        return GiveUp(f"the deadline passes before the wait of {delay_s:.2f} s")
    if not failure.attaches and not budget.take(now_s):
        return GiveUp("the retry budget is spent")
    return Retry(delay_s)


# Avoidance of gateways that failed.

_FIRST_AVOIDED_S: Final = 0.5
_MAX_AVOIDED_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """The client's failure record of one gateway."""

    count: int = 0  # failures in a row
    avoided_until_s: float = 0.0

    def avoided(self, now_s: float) -> bool:
        return now_s < self.avoided_until_s

    def failed(self, now_s: float, *, jitter: float, retry_after_s: float | None = None) -> FailureRecord:
        """Avoid it for a wait that doubles with each failure in a row, jittered between half and whole.

        When a gateway fails, many calls fail at once: failures while it is avoided count as the same one.
        """
        if self.avoided(now_s):
            return self
        wait_s = min(_MAX_AVOIDED_S, _FIRST_AVOIDED_S * 2 ** min(self.count, _MAX_DOUBLINGS))
        wait_s = max(wait_s * (0.5 + 0.5 * jitter), retry_after_s or 0.0)
        return FailureRecord(self.count + 1, now_s + wait_s)

    def succeeded(self, now_s: float) -> FailureRecord:
        """Reset the record. While the gateway is avoided this has no effect: the response is older."""
        return self if self.avoided(now_s) else FailureRecord()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A gateway to choose from. ``down``: its connection failed and is not restored."""

    address: str
    failures: FailureRecord
    in_flight: int
    down: bool


def choose(candidates: tuple[Candidate, ...], *, now_s: float, jitter: float, last_failed: str = "") -> str:
    """Return the address to send to: least calls in flight of the best class, ties broken by ``jitter``.

    Classes, best first: usable; avoided; down. ``last_failed`` comes last within its class. When all are
    avoided, the one whose wait ends first is used.
    """
    assert candidates, "a client has at least one endpoint"

    def rank(one: Candidate) -> tuple[bool, bool, bool, float, int]:
        avoided = one.failures.avoided(now_s)
        until_s = one.failures.avoided_until_s if avoided else 0.0
        return (one.down, avoided, one.address == last_failed, until_s, one.in_flight)

    best = min(map(rank, candidates))
    ties = [one for one in candidates if rank(one) == best]
    return ties[min(int(jitter * len(ties)), len(ties) - 1)].address
