"""Random operations with time passing, on a real Redis and on the model: the same outcomes.

Redis takes the time while it runs a script, somewhere between call and answer. So the model is asked for
instants from a little before the call to a little after the answer. Where all say the same, Redis says it
too; where something lapses in between, Redis says one of what they say. A step that took so long that this
says little is done again on a tenant of its own.
"""

from __future__ import annotations

import copy
import random
import uuid
from dataclasses import dataclass, replace

import pytest

from services.adapters.memory.limiter import MemoryLimiter
from services.adapters.redis.limiter import RedisLimiter
from services.core.errors import ConcurrencyExceeded, RequestRateExceeded, TokenRateExceeded
from services.core.generation import Usage
from services.ports.limiter import Limits, Reservation
from services.runtime.clock import SystemClock
from tests.support.clocks import HandClock

LEASE_S = 0.25
LONGEST_S = 0.005  # that a call may take
MARGIN_S = 2 * LONGEST_S  # more than the model's times of earlier operations may be off by
LOOK_S = LONGEST_S / 4  # between instants; what lapses at once, in Redis as in the model, needs no less
LIMITS = (Limits(), Limits(0, 2), Limits(4, 0), Limits(8, 3), Limits(6, 1))
TOKEN_RATES = (0, 3000, 12_000)  # of a tenant whose limit changes
PAUSES_S = (0.0, 0.0, 0.01, 0.04, 0.12)
SEEDS = range(4)
STEPS = 60
ATTEMPTS = 3 * STEPS


@dataclass(frozen=True)
class Operation:
    kind: str
    request_id: str
    limits: Limits
    usage: Usage
    tokens: int = 0


@dataclass(frozen=True)
class Outcome:
    """``wait_s`` is compared with tolerance, the rest exactly."""

    kind: str
    value: int = 0
    wait_s: float = 0.0


async def outcome_of(
    limiter: RedisLimiter | MemoryLimiter, tenant: str, operation: Operation
) -> tuple[Outcome, Usage]:
    rate = operation.limits.tokens_per_minute
    reservation = Reservation(tenant, operation.request_id, tokens=operation.tokens, tokens_per_minute=rate)
    value = 0
    try:
        match operation.kind:
            case "admit":
                await limiter.admit(tenant, operation.request_id, operation.limits)
            case "reserve":
                held = Reservation(tenant, operation.request_id)
                value = (await limiter.reserve_tokens(held, operation.tokens, operation.limits)).tokens
            case "renew":
                await limiter.renew([reservation])
            case "settle":
                await limiter.settle(reservation, operation.usage)
            case "concurrency":
                value = await limiter.concurrency(tenant)
    except (RequestRateExceeded, ConcurrencyExceeded, TokenRateExceeded) as error:
        return Outcome(error.reason, 0, error.retry_after_s or 0.0), await limiter.usage(tenant)
    return Outcome("done", value), await limiter.usage(tenant)


class Model:
    """The executable model, asked for what it would do at a time."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.clock = HandClock(0.0)
        self.limiter = MemoryLimiter(self.clock, lease_s=LEASE_S)

    async def at(self, now_s: float, operation: Operation) -> tuple[Model, tuple[Outcome, Usage]]:
        """Return the model as it is after the operation, and the outcome; this one stays as it is."""
        after = copy.deepcopy(self)
        after.clock.now_s = now_s
        return after, await outcome_of(after.limiter, after.tenant, operation)


def draw(rng: random.Random) -> Operation:
    kind = rng.choices(("admit", "renew", "settle", "concurrency", "reserve"), (6, 2, 3, 2, 3))[0]
    usage = Usage(rng.randint(0, 9), rng.randint(0, 9), rng.randint(0, 9))
    limits = replace(rng.choice(LIMITS), tokens_per_minute=rng.choice(TOKEN_RATES))
    # A request reserves once.
    request_id = f"t{rng.random()}" if kind == "reserve" else f"r{rng.randint(0, 5)}"
    return Operation(kind, request_id, limits, usage, rng.choice((0, 10, 1000, 2990, 5000)))


@pytest.mark.parametrize("seed", SEEDS)
async def test_redis_and_the_model_agree(seed: int, redis_url: str) -> None:
    rng = random.Random(seed)
    clock = SystemClock()
    limiter = RedisLimiter(redis_url, clock, timeout_s=5.0, lease_s=LEASE_S)
    model = Model(f"model-{uuid.uuid4().hex}")
    try:
        compared = 0
        for step in range(ATTEMPTS):
            if compared == STEPS:
                break
            await clock.sleep(rng.choice(PAUSES_S))
            operation = draw(rng)
            began_s = clock.monotonic_s()
            found = await outcome_of(limiter, model.tenant, operation)
            took_s = clock.monotonic_s() - began_s
            if took_s > LONGEST_S:  # when it was done is not known well enough to go on from
                model = Model(f"model-{uuid.uuid4().hex}")
                continue
            slack_s = took_s + 2 * MARGIN_S
            instants = [began_s - MARGIN_S + LOOK_S * look for look in range(int(slack_s / LOOK_S) + 2)]
            candidates = [await model.at(now_s, operation) for now_s in instants]
            agreed = [held for held, said in candidates if agrees(found, said, slack_s)]
            said = [said for _, said in candidates]
            assert agreed, f"seed {seed}, step {step}, {operation}: Redis {found}, model {said}"
            model = agreed[len(agreed) // 2]
            compared += 1
        assert compared >= STEPS // 2, f"{ATTEMPTS} steps, and {compared} were short enough to compare"
    finally:
        await limiter.close()


def agrees(found: tuple[Outcome, Usage], said: tuple[Outcome, Usage], slack_s: float) -> bool:
    (outcome, usage), (modelled, modelled_usage) = found, said
    if (outcome.kind, outcome.value, usage) != (modelled.kind, modelled.value, modelled_usage):
        return False
    # An error in time counts double where the bucket drained at another rate than the wait is stated for.
    return abs(outcome.wait_s - modelled.wait_s) <= 3 * slack_s


async def test_every_outcome_is_drawn() -> None:
    """Else the comparison shows nothing: with these draws the model gives each of them."""
    model, kinds, now_s = Model("t"), set(), 0.0
    for seed in SEEDS:
        rng = random.Random(seed)
        for _ in range(STEPS):
            now_s += rng.choice(PAUSES_S)
            model, (outcome, _) = await model.at(now_s, draw(rng))
            kinds.add(outcome.kind)
    assert kinds == {"done", "REQUEST_RATE_EXCEEDED", "CONCURRENCY_EXCEEDED", "TOKEN_RATE_EXCEEDED"}
