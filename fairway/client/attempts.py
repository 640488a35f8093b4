"""One logical call and its attempts: deadline, budget, backoff, blame. Streams and unary calls share it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from fairway.client import policy
from fairway.client.endpoints import Endpoint, EndpointPool, Metadata
from fairway.client.errors import ConnectionLost, DeadlineExceeded, FairwayError, OverQuota, Unavailable
from fairway.client.errors import deadline_exceeded as _deadline_exceeded
from fairway.client.values import ClientOptions


@dataclass(frozen=True, slots=True)
class Core:
    """What every call of a client acts through."""

    pool: EndpointPool
    budget: policy.RetryBudget
    options: ClientOptions
    metadata: Metadata
    now: Callable[[], float]
    rng: Random
    new_key: Callable[[], str]

    def key(self, asked: str | None) -> str:
        """Return the caller's idempotency key, else a new one where the client makes them; empty: none."""
        if asked is not None:
            return asked
        return self.new_key() if self.options.idempotency else ""


class Attempts:
    """Counts the attempts of one call. Made when the call begins; its deadline holds for all of them."""

    def __init__(self, core: Core, timeout_s: float) -> None:
        """Raises ValueError unless ``timeout_s`` is above 0: no call is without a deadline."""
        if not timeout_s > 0:
            raise ValueError("timeout_s must be above 0 seconds")
        self._core = core
        self.deadline_s = core.now() + timeout_s
        self.count = 0
        self._not_this = ""
        core.budget.request_began(core.now())

    @property
    def time_left_s(self) -> float:
        """Raises DeadlineExceeded when there is none."""
        left_s = self.deadline_s - self._core.now()
        if left_s <= 0:
            raise self._ended(_deadline_exceeded(), "")
        return left_s

    async def begin(self) -> Endpoint:
        """Return the gateway of the next attempt. Raises NoGateway or DeadlineExceeded."""
        left_s = self.time_left_s
        connect_s = min(left_s, self._core.options.connect_timeout_s)
        try:
            endpoint = await self._core.pool.take(connect_s, not_this=self._not_this)
        except FairwayError as error:
            raise self._ended(error, "no gateway could be reached") from None
        self.count += 1
        return endpoint

    async def failed(
        self, error: FairwayError, endpoint: Endpoint, *, repeatable: bool = True, attaches: bool = False
    ) -> None:
        """Return after the wait when the call may be sent again; else raise ``error``, which says why not.

        ``repeatable``: nothing would reach the caller twice. ``attaches``: the server took the request.
        """
        core = self._core
        core.pool.failed(endpoint, error)
        blamed = policy.blame(error.reason)
        elsewhere = blamed is policy.Blame.GATEWAY and core.pool.has_other(endpoint)
        failure = policy.Failure(
            error.reason,
            isinstance(error, Unavailable),
            isinstance(error, OverQuota),
            # What a gateway says of itself does not hold for another one.
            retry_after_s=None if elsewhere else error.retry_after_s,
            repeatable=repeatable,
            free=attaches and isinstance(error, ConnectionLost),
        )
        decision = policy.after_failure(
            core.options.retry,
            core.budget,
            failure,
            attempt=self.count,
            now_s=core.now(),
            deadline_s=self.deadline_s,
            jitter=core.rng.random(),
        )
        if isinstance(decision, policy.GiveUp):
            raise self._ended(error, decision.why) from None
        self._not_this = "" if blamed is policy.Blame.NOBODY else endpoint.address
        await asyncio.sleep(decision.delay_s)

    def late(self) -> DeadlineExceeded:
        """Return the error of a deadline that passed while an attempt ran."""
        error = _deadline_exceeded()
        self._ended(error, "")
        return error

    def _ended(self, error: FairwayError, why: str) -> FairwayError:
        error.attempts, error.gave_up = self.count, why
        return error
