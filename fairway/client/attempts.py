"""One logical call and its attempts: deadline, retry budget, backoff. For streams and unary calls."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, TypeVar

import grpc

from fairway.client import policy
from fairway.client.endpoints import Credentials, Endpoint, EndpointPool, Metadata, open_endpoints
from fairway.client.errors import (
    ConnectionLost,
    DeadlineExceeded,
    FairwayError,
    OverQuota,
    Unauthenticated,
    Unavailable,
    connection_lost,
    from_rpc,
)
from fairway.client.errors import deadline_exceeded as _deadline_exceeded
from fairway.client.values import ClientOptions, checked_timeout_s
from fairway.login import Bearer, LoginFailed
from fairway.v1 import inference_pb2 as pb

T = TypeVar("T")
ATTEMPT_HEADER: Final = "x-fairway-attempt"
# With a key, a server rejects with these before it runs anything: it cannot store the key.
_KEY_REFUSED: Final = frozenset(("STORE_UNAVAILABLE", "IDEMPOTENCY_KEYS_EXCEEDED"))


@dataclass(frozen=True, slots=True)
class Core:
    """The shared state of a client's calls."""

    pool: EndpointPool  # the client's gateways
    budget: policy.RetryBudget  # shared by all calls
    options: ClientOptions  # defaults of the calls
    # Source of what is sent with every call.
    bearer: Bearer
    # Monotonic seconds.
    now: Callable[[], float]
    rng: Random  # source of jitter
    # Generates idempotency keys.
    new_key: Callable[[], str]

    @classmethod
    def opened(
        cls,
        addresses: Sequence[str],
        api_key: str,
        options: ClientOptions,
        *,
        credentials: Credentials,
        rng: Random,
        noun: str = "gateway",
    ) -> Core:
        """Return the core of a client of the running loop, with open channels; the caller closes its pool."""
        now = asyncio.get_running_loop().time
        endpoints = open_endpoints(addresses, credentials, options.max_message_bytes, now=now)
        return cls(
            pool=EndpointPool(endpoints, now=now, rng=rng, noun=noun),
            budget=policy.RetryBudget(options.retry, now()),
            options=options,
            bearer=Bearer(api_key),
            now=now,
            rng=rng,
            new_key=lambda: secrets.token_hex(16),
        )

    @property
    def metadata(self) -> Metadata:
        """Sent with every call; current after ``Attempts.begin``."""
        return self.bearer.metadata

    def key(self, requested: str | None) -> str:
        """Return the caller's idempotency key, else a new one if the options enable keys; empty: none."""
        if requested is not None:
            return requested
        return self.new_key() if self.options.idempotency else ""


class Attempts:
    """Counts the attempts of one call. Created at the call's start; its deadline covers all attempts."""

    def __init__(self, core: Core, timeout_s: float) -> None:
        """Raises ValueError unless ``timeout_s`` is above 0: every call has a deadline."""
        self._core = core
        self.deadline_s = core.now() + checked_timeout_s(timeout_s)
        self.count = 0
        self._last_failed = ""
        core.budget.request_began(core.now())

    @property
    def metadata(self) -> Metadata:
        """Metadata of the current attempt. A retry is marked, since servers shed retries first."""
        if self.count <= 1:
            return self._core.metadata
        return (*self._core.metadata, (ATTEMPT_HEADER, str(self.count - 1)))

    @property
    def time_left_s(self) -> float:
        """Raises DeadlineExceeded when there is none."""
        left_s = self.deadline_s - self._core.now()
        if left_s <= 0:
            raise self._ended(_deadline_exceeded(), "")
        return left_s

    async def begin(self) -> Endpoint:
        """Return the gateway of the next attempt. Raises NoGateway, DeadlineExceeded, or Unauthenticated
        when a login has ended.
        """
        try:
            await self._core.bearer.renew()
        except LoginFailed as error:
            raise self._ended(Unauthenticated(str(error), reason="LOGIN_ENDED"), "") from error
        left_s = self.time_left_s
        connect_s = min(left_s, self._core.options.connect_timeout_s)
        try:
            endpoint = await self._core.pool.take(
                connect_s, last_failed=self._last_failed, wait_for_ready=self._core.options.wait_for_ready
            )
        except FairwayError as error:
            raise self._ended(error, "nothing could be reached") from None
        self.count += 1
        return endpoint

    async def failed(
        self, error: FairwayError, endpoint: Endpoint, *, repeatable: bool = True, attaches: bool = False
    ) -> None:
        """Return after the backoff if the call may be sent again; else raise ``error`` with the reason.

        ``repeatable``: the caller would receive nothing twice. ``attaches``: the server accepted the request.
        """
        core = self._core
        core.pool.failed(endpoint, error)
        scope = policy.fault_scope(error.reason)
        elsewhere = scope is policy.FaultScope.GATEWAY and core.pool.has_other(endpoint)
        failure = policy.Failure(
            error.reason,
            isinstance(error, Unavailable),
            isinstance(error, OverQuota),
            # Another gateway is not bound by this gateway's delay.
            retry_after_s=None if elsewhere else error.retry_after_s,
            repeatable=repeatable,
            attaches=attaches and isinstance(error, ConnectionLost),
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
        self._last_failed = "" if scope is policy.FaultScope.NONE else endpoint.address
        await asyncio.sleep(decision.delay_s)

    def drop_key(self, error: FairwayError, endpoint: Endpoint, generation: pb.Generation) -> bool:
        """Remove the key if it caused the rejection of the first attempt; the next may follow at once.

        For a key that the client generated to make retries safe. After such a rejection nothing runs under
        it, unless an earlier attempt was accepted: that one keeps its key.
        """
        if self.count != 1 or not generation.idempotency_key or error.reason not in _KEY_REFUSED:
            return False
        self._core.pool.failed(endpoint, error)
        generation.idempotency_key = ""
        return True

    def deadline_error(self) -> DeadlineExceeded:
        """Return the error of a deadline that passed during an attempt."""
        error = _deadline_exceeded()
        self._ended(error, "")
        return error

    def _ended(self, error: FairwayError, why: str) -> FairwayError:
        error.attempts, error.gave_up = self.count, why
        return error


async def unary(
    core: Core,
    send: Callable[[Endpoint, float, Metadata], Awaitable[T]],
    timeout_s: float,
    *,
    attempt_s: float | None = None,
    own_key: pb.Generation | None = None,
) -> T:
    """Send until there is a response or no further attempt is allowed. A response is complete or absent.

    ``send``: one attempt, within a time, with this metadata. ``attempt_s``: the limit of an attempt while
    another endpoint is available. ``own_key``: the generation whose key the client generated.
    """
    attempts = Attempts(core, timeout_s)
    while True:
        endpoint = await attempts.begin()
        cut = attempt_s is not None and core.pool.has_other(endpoint)
        left_s = attempts.time_left_s
        limit_s = min(left_s, attempt_s) if attempt_s is not None and cut else left_s
        try:
            answer = await send(endpoint, limit_s, attempts.metadata)
        except grpc.aio.AioRpcError as exc:
            error = from_rpc(exc)
            if isinstance(error, DeadlineExceeded) and limit_s < left_s:
                error = connection_lost(f"{endpoint.address} did not answer within {limit_s:g} s")
        else:
            core.pool.succeeded(endpoint)
            return answer
        finally:
            core.pool.release(endpoint)
        if own_key is None or not attempts.drop_key(error, endpoint, own_key):
            await attempts.failed(error, endpoint)
