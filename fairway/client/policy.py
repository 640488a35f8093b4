"""When the client sends again, and whom it leaves alone. Pure: time and jitter are arguments.

A retry needs all of: a reason that a retry can cure, attempts left, time left after the wait, and a token of
the budget. The budget holds retries to a share of the requests, so that a fleet in trouble is not sent a
multiple of its load. Backoff is exponential, capped, with full jitter (AWS Builders' Library, "Timeouts,
retries and backoff with jitter"); the server's RetryInfo is its floor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

# A retry cures these whatever else the server says.
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


class Blame(Enum):
    """Where the fault lies, as far as the choice of the next gateway is concerned."""

    GATEWAY = auto()  # leave it alone for a while, all calls of this client
    CALL = auto()  # this call goes elsewhere
    NOBODY = auto()


_BLAME: Final = {
    "CONNECTION_LOST": Blame.GATEWAY,
    "DRAINING": Blame.GATEWAY,
    "NO_LEADER": Blame.CALL,
    "QUEUE_FULL": Blame.CALL,
    "SHARE_EXCEEDED": Blame.CALL,
    "STORE_UNAVAILABLE": Blame.CALL,
    "STREAM_BROKEN": Blame.CALL,
    "UNAVAILABLE": Blame.CALL,
}


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """``max_attempts`` counts the first one.

    The budget: ``budget_ratio`` of the requests, plus ``budget_floor`` at the start and
    ``budget_floor_per_s`` from then on, never more than ``budget_max`` saved up.
    """

    max_attempts: int = 5
    first_delay_s: float = 0.05
    max_delay_s: float = 2.0
    budget_ratio: float = 0.1
    budget_floor: float = 10.0
    budget_floor_per_s: float = 0.2
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
    """A bucket that requests and time fill and retries empty.

    Over any span in which n requests began and t seconds passed, retries are at most
    ``budget_max + budget_ratio * n + budget_floor_per_s * t``; from the start on, ``budget_floor`` stands for
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
        """Take one retry. Returns False, and takes nothing, when there is none."""
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
    """What went wrong with an attempt.

    ``repeatable``: the same call again cannot give the caller anything twice. ``free``: the server had taken
    the request under its key, so that sending it again attaches to it: no new work, and no budget is taken.
    """

    reason: str
    unavailable: bool
    over_quota: bool
    retry_after_s: float | None = None
    repeatable: bool = True
    free: bool = False


@dataclass(frozen=True, slots=True)
class Retry:
    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    why: str


def is_retryable(failure: Failure) -> bool:
    """A known reason; or one that a newer server sends and says that a retry helps."""
    if failure.reason in _RETRIED:
        return True
    return failure.retry_after_s is not None and (failure.unavailable or failure.over_quota)


def blame(reason: str) -> Blame:
    return _BLAME.get(reason, Blame.NOBODY)


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
        return GiveUp("a retry cannot cure it")
    if not failure.repeatable:
        return GiveUp("tokens were delivered and there is no idempotency key to continue by")
    if attempt >= policy.max_attempts:
        return GiveUp(f"the limit is {policy.max_attempts} attempts")
    delay_s = (failure.retry_after_s or 0.0) + backoff_s(policy, attempt, jitter)
    if now_s + delay_s >= deadline_s:
        return GiveUp(f"the deadline passes before the wait of {delay_s:.2f} s")
    if not failure.free and not budget.take(now_s):
        return GiveUp("the retry budget is spent")
    return Retry(delay_s)


# Gateways that failed.

_FIRST_AVOIDED_S: Final = 0.5
_MAX_AVOIDED_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Standing:
    """What the client thinks of one gateway."""

    failures: int = 0
    avoided_until_s: float = 0.0

    def avoided(self, now_s: float) -> bool:
        return now_s < self.avoided_until_s

    def failed(self, now_s: float, *, jitter: float, retry_after_s: float | None = None) -> Standing:
        """Leave it alone for a wait that doubles with each failure in a row, between half and whole.

        Many calls fail at once when a gateway goes: while it is avoided, further failures are the same one.
        """
        if self.avoided(now_s):
            return self
        wait_s = min(_MAX_AVOIDED_S, _FIRST_AVOIDED_S * 2 ** min(self.failures, _MAX_DOUBLINGS))
        wait_s = max(wait_s * (0.5 + 0.5 * jitter), retry_after_s or 0.0)
        return Standing(self.failures + 1, now_s + wait_s)

    def answered(self, now_s: float) -> Standing:
        """It serves: readmitted, unless the answer is of before it failed."""
        return self if self.avoided(now_s) else Standing()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A gateway to choose from. ``down``: its connection failed and is not back."""

    address: str
    standing: Standing
    in_flight: int
    down: bool


def choose(candidates: tuple[Candidate, ...], *, now_s: float, jitter: float, not_this: str = "") -> str:
    """Return the address to send to: least calls in flight of the best class, ties broken by ``jitter``.

    Classes, best first: usable; avoided; down. ``not_this`` comes last within its class. When all are
    avoided, the one whose time is up first: refusing would help nobody.
    """
    assert candidates, "a client has at least one endpoint"

    def rank(one: Candidate) -> tuple[bool, bool, bool, float, int]:
        avoided = one.standing.avoided(now_s)
        until_s = one.standing.avoided_until_s if avoided else 0.0
        return (one.down, avoided, one.address == not_this, until_s, one.in_flight)

    best = min(map(rank, candidates))
    ties = [one for one in candidates if rank(one) == best]
    return ties[min(int(jitter * len(ties)), len(ties) - 1)].address
