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
from dataclasses import dataclass

import pytest

from services.adapters.redis.limiter import RedisLimiter
from services.core.errors import BudgetExceeded, OverQuota
from services.core.generation import Usage
from services.core.limits import Claim, Limit, LimitKind, Price, Scope
from services.ports.clock import Clock
from services.ports.limiter import Reservation, Spent
from services.runtime.clock import SystemClock
from simulator.stores.limiter import MemoryLimiter
from tests.support.clocks import HandClock
from tests.support.metered import limits

LEASE_S = 0.25
LONGEST_S = 0.005  # that a call may take
MARGIN_S = 2 * LONGEST_S  # more than the model's times of earlier operations may be off by
LOOK_S = LONGEST_S / 4  # between instants; what lapses at once, in Redis as in the model, needs no less
LIMITS = (limits(), limits(0, 2), limits(4, 0), limits(8, 3), limits(6, 1))
KEY_SLOTS = Limit(LimitKind.CONCURRENCY, 2, Scope.KEY, "k")
USER_REQUESTS = Limit(LimitKind.REQUESTS, 5, Scope.USER, "ann")
TOKEN_RATES = (0, 3000, 12_000)  # of a tenant whose limit changes
USER_OUTPUT = Limit(LimitKind.OUTPUT_TOKENS, 2000, Scope.USER, "ann")
BUDGETS = (Limit(LimitKind.MONTH_MICROS, 9000), Limit(LimitKind.DAY_MICROS, 5000, Scope.KEY, "k"))
PRICE = Price(10**6, 500_000, 3 * 10**6)
PAUSES_S = (0.0, 0.0, 0.01, 0.04, 0.12)
SEEDS = range(4)
AHEAD_S = SystemClock().unix_s() - SystemClock().monotonic_s()
STEPS = 60
ATTEMPTS = 3 * STEPS


@dataclass(frozen=True)
class Operation:
    kind: str
    request_id: str
    limits: tuple[Limit, ...]
    claims: tuple[Claim, ...]
    usage: Usage


@dataclass(frozen=True)
class Outcome:
    """``wait_s`` is compared with tolerance, the rest exactly."""

    kind: str
    value: int = 0
    wait_s: float = 0.0


Held = dict[str, Reservation]
Seen = tuple[Outcome, tuple[Spent, ...]]


async def outcome_of(
    limiter: RedisLimiter | MemoryLimiter, tenant: str, held: Held, operation: Operation, clock: Clock
) -> Outcome:
    request_id, value = operation.request_id, 0
    now_us = round(clock.unix_s() * 1e6)
    reservation = held.get(request_id, Reservation(tenant, request_id, admitted_us=now_us))
    try:
        match operation.kind:
            case "admit":
                held[request_id] = await limiter.admit(tenant, request_id, operation.limits)
            case "reserve":
                held[request_id] = await limiter.reserve(reservation, operation.claims, PRICE)
                value = len(held[request_id].claims)
            case "renew":
                await limiter.renew([(reservation, operation.usage)])
            case "settle":
                await limiter.settle(reservation, operation.usage)
            case "checkpoint":
                await limiter.checkpoint(tenant, request_id, operation.usage)
            case "settle_lapsed":
                value = await limiter.settle_lapsed(tenant)
            case "concurrency":
                value = await limiter.concurrency(tenant)
    except OverQuota as error:
        timed = not isinstance(error, BudgetExceeded)  # its period ends at a real date
        return Outcome(error.reason, 0, error.retry_after_s or 0.0 if timed else 0.0)
    return Outcome("done", value)


class RealDate(HandClock):
    def unix_s(self) -> float:
        return self.now_s + AHEAD_S


class Model:
    """The executable model, asked for what it would do at a time."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.clock = RealDate(0.0)
        self.limiter = MemoryLimiter(self.clock, lease_s=LEASE_S)
        self.held: Held = {}

    async def at(self, now_s: float, operation: Operation) -> tuple[Model, Seen]:
        """Return the model as it is after the operation, and the outcome; this one stays as it is."""
        after = copy.deepcopy(self)
        after.clock.now_s = now_s
        outcome = await outcome_of(after.limiter, after.tenant, after.held, operation, after.clock)
        return after, (outcome, await after.limiter.spent(after.tenant, BUDGETS))


KINDS = {
    "admit": 6, "reserve": 5, "renew": 3, "settle": 3, "checkpoint": 2, "settle_lapsed": 1, "concurrency": 2,
}  # fmt: skip


def draw(rng: random.Random) -> Operation:
    kind = rng.choices(tuple(KINDS), tuple(KINDS.values()))[0]
    usage = Usage(rng.randint(0, 900), rng.randint(0, 900), rng.randint(0, 900))
    scoped = tuple(limit for limit in (KEY_SLOTS, USER_REQUESTS) if rng.random() < 0.3)
    tokens = Claim(Limit(LimitKind.TOKENS, rng.choice(TOKEN_RATES)), rng.choice((0, 10, 1000, 2990, 5000)))
    claims = [tokens] if rng.random() < 0.6 else []
    claims += [Claim(USER_OUTPUT, rng.choice((100, 1500)))] if rng.random() < 0.3 else []
    claims += [Claim(budget, rng.choice((500, 2000, 4900))) for budget in BUDGETS if rng.random() < 0.5]
    return Operation(kind, f"r{rng.randint(0, 5)}", rng.choice(LIMITS) + scoped, tuple(claims), usage)


@pytest.mark.parametrize("seed", SEEDS)
async def test_redis_and_the_model_agree(seed: int, redis_url: str) -> None:
    rng = random.Random(seed)
    clock = SystemClock()
    limiter = RedisLimiter(redis_url, clock, timeout_s=5.0, lease_s=LEASE_S, grace_s=0.0)
    models, held = [Model(f"model-{uuid.uuid4().hex}")], dict[str, Reservation]()
    try:
        compared = 0
        for step in range(ATTEMPTS):
            if compared == STEPS:
                break
            await clock.sleep(rng.choice(PAUSES_S))
            operation = draw(rng)
            began_s = clock.monotonic_s()
            tenant = models[0].tenant
            outcome = await outcome_of(limiter, tenant, held, operation, clock)
            took_s = clock.monotonic_s() - began_s
            if took_s > LONGEST_S:  # when it was done is not known well enough to go on from
                models, held = [Model(f"model-{uuid.uuid4().hex}")], {}
                continue
            found = outcome, await limiter.spent(tenant, BUDGETS)
            slack_s = took_s + 2 * MARGIN_S
            instants = [began_s - MARGIN_S + LOOK_S * look for look in range(int(slack_s / LOOK_S) + 2)]
            candidates = [await model.at(now_s, operation) for model in models for now_s in instants]
            agreed = [after for after, said in candidates if agrees(found, said, slack_s)]
            said = [candidates[0][1], candidates[-1][1]]
            assert agreed, f"seed {seed}, step {step}, {operation}: Redis {found}, models {said}"
            models = [agreed[0], agreed[-1]]
            compared += 1
        assert compared >= STEPS // 2, f"{ATTEMPTS} steps, and {compared} were short enough to compare"
    finally:
        await limiter.close()


def agrees(found: Seen, said: Seen, slack_s: float) -> bool:
    (outcome, spent), (modelled, modelled_spent) = found, said
    if (outcome.kind, outcome.value, spent) != (modelled.kind, modelled.value, modelled_spent):
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
    assert kinds == {
        "done",
        "REQUEST_RATE_EXCEEDED",
        "CONCURRENCY_EXCEEDED",
        "TOKEN_RATE_EXCEEDED",
        "BUDGET_EXCEEDED",
    }
