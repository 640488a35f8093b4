"""Random lives of requests with budgets, on both limiters, against a model that adds up what each holds.

Renewals, checkpoints, lapses and settlements come in any order and any number. At every step a budget is the
sum of its requests' charges and reservations. It is above its limit by no more than what requests took after
their lease had lapsed, or after a settlement with less. At rest nothing is reserved.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import redis.asyncio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from services.adapters.redis.limiter import RedisLimiter
from services.core.errors import BudgetExceeded
from services.core.generation import Usage
from services.core.limits import Claim, Limit, LimitKind, Price, Scope
from services.ports.limiter import Reservation
from services.runtime.clock import SystemClock
from simulator.stores.limiter import MemoryLimiter
from tests.support.clocks import HandClock

PRICE = Price(10**6, 250_000, 3 * 10**6)
LEASE_S = 3600.0
WORST = 40  # the most that a request's usage costs
TENANT = Limit(LimitKind.MONTH_MICROS, 4 * WORST + 5)
KEYS = tuple(Limit(LimitKind.DAY_MICROS, 2 * WORST + 30, Scope.KEY, f"k{number}") for number in range(2))
IDS = st.integers(0, 5)
NOTHING = Usage(0, 0)
USAGES = st.builds(Usage, st.integers(0, 10), st.integers(0, 10), st.integers(0, 10))


class StillClock(HandClock):
    """Its date stands still but for a microsecond a reading: a lapse is an hour."""

    readings = 0

    def unix_s(self) -> float:
        self.readings += 1
        return 1e9 + self.readings / 1e6


@dataclass
class Life:
    """What the limiter should hold of one request id. ``micros``: charged."""

    state: str = ""
    amount: int = 0
    checkpoint: Usage = NOTHING
    charged: Usage = NOTHING
    micros: int = 0

    @property
    def reserved(self) -> int:
        most = max(self.amount, PRICE.cost_micros(self.checkpoint))
        return max(0, most - self.micros) if self.state in ("running", "lapsed") else 0

    def charge(self, usage: Usage, state: str) -> None:
        self.charged, self.state = most_of(self.charged, usage), state
        self.micros = max(self.micros, PRICE.cost_micros(self.charged))


def most_of(left: Usage, right: Usage) -> Usage:
    return Usage(
        max(left.prompt_tokens, right.prompt_tokens),
        max(left.output_tokens, right.output_tokens),
        max(left.cached_tokens, right.cached_tokens),
    )


class Lives(RuleBasedStateMachine):
    url: ClassVar[str] = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = StillClock()
        self.tenant = f"acme-{uuid.uuid4().hex}"
        self.limiter: RedisLimiter | MemoryLimiter = self.run(self._limiter())
        self.lives = [Life() for _ in range(6)]
        self.held: dict[int, list[Reservation]] = {}
        self.beyond = 0  # what requests took after their reservation had lapsed or was settled

    async def _limiter(self) -> RedisLimiter | MemoryLimiter:
        if not self.url:
            return MemoryLimiter(self.clock, lease_s=LEASE_S, settled_keep_s=1e9)
        self.raw = redis.asyncio.Redis.from_url(self.url)
        return RedisLimiter(self.url, SystemClock(), timeout_s=5.0, lease_s=LEASE_S, grace_s=0.0)

    def run(self, work: Awaitable[Any]) -> Any:
        async def done() -> Any:
            return await work

        return self.runner.run(done())

    def teardown(self) -> None:
        for number, life in enumerate(self.lives):
            if life.state in ("running", "lapsed"):
                self.settle(number, Usage(10, 10), 0, 1)
        self.budgets_add_up()
        assert all(life.reserved == 0 for life in self.lives), "reserved at rest"
        assert self.run(self.limiter.concurrency(self.tenant)) == 0
        if isinstance(self.limiter, RedisLimiter):
            self.run(self.limiter.close())
            self.run(self.raw.aclose())
        self.runner.close()

    @rule(number=IDS, extra=st.integers(0, 30), at_once=st.booleans())
    def begin(self, number: int, extra: int, at_once: bool) -> None:
        """A new request, one that is resumed, or one that another gateway takes over.

        ``at_once``: the claims come with the admission.
        """
        life, request_id = self.lives[number], f"r{number}"
        claims = [Claim(TENANT, WORST + extra), Claim(KEYS[number % 2], WORST + extra)]
        slot = self.run(self.limiter.admit(self.tenant, request_id, (), claims if at_once else (), PRICE))
        running = life.state == "running"
        if not running:  # an admission settles lapsed requests, a repeated one does not
            self._lapsed_are_settled()
        need = 0 if running else max(0, WORST + extra - life.micros)
        fits = all(sum(self._expected(claim.limit)) + need <= claim.limit.limit for claim in claims)
        try:
            slot = self.run(self.limiter.reserve(slot, claims, PRICE))
        except BudgetExceeded:
            assert not fits, "a false rejection"
            self.run(self.limiter.settle(slot, Usage(0, 0)))
            life.state = "settled"
            return
        assert fits or running, "reserved without room"
        if not running:
            life.state, life.amount, life.checkpoint = "running", WORST + extra, life.charged
        self.held.setdefault(number, []).append(slot)

    @rule(number=IDS, usage=USAGES)
    def renew(self, number: int, usage: Usage) -> None:
        life = self.lives[number]
        if life.state:
            self.run(self.limiter.renew([(self.held[number][-1], usage)] if number in self.held else []))
            if number in self.held and life.state != "settled":
                returned = life.state == "charged"
                life.state = "running"
                life.checkpoint = most_of(life.checkpoint, usage)
                self.beyond += life.reserved if returned else 0

    @rule(number=IDS, usage=USAGES)
    def checkpoint(self, number: int, usage: Usage) -> None:
        life = self.lives[number]
        self.run(self.limiter.checkpoint(self.tenant, f"r{number}", usage))
        if life.state in ("running", "lapsed"):
            life.checkpoint = most_of(life.checkpoint, usage)
        elif life.state == "charged":
            self._charge(life, usage, "charged")

    @rule(number=IDS, usage=USAGES, admission=st.integers(0, 3), times=st.integers(1, 3))
    def settle(self, number: int, usage: Usage, admission: int, times: int) -> None:
        """``admission``: which one, from the last."""
        if number not in self.held:
            return
        admissions = list(dict.fromkeys(each.admitted_us for each in self.held[number]))
        admitted_us = admissions[max(-len(admissions), -1 - admission)]
        slot = next(each for each in reversed(self.held[number]) if each.admitted_us == admitted_us)
        for _ in range(times):
            self.run(self.limiter.settle(slot, usage))
        life = self.lives[number]
        earlier = admitted_us != admissions[-1] and life.state in ("running", "lapsed")
        self._charge(life, usage, life.state if earlier else "settled")

    @rule()
    def leases_lapse(self) -> None:
        async def in_redis() -> None:
            key = f"fw:{{{self.tenant}}}:slots"
            for member in await self.raw.zrange(key, 0, -1):
                await self.raw.zadd(key, {member.decode() if isinstance(member, bytes) else str(member): 1})

        if self.url:
            self.run(in_redis())
        self.clock.now_s += LEASE_S
        for life in self.lives:
            life.state = "lapsed" if life.state == "running" else life.state

    @rule()
    def settle_lapsed(self) -> None:
        lapsed = sum(life.state == "lapsed" for life in self.lives)
        assert self.run(self.limiter.settle_lapsed(self.tenant)) == lapsed
        self._lapsed_are_settled()

    def _lapsed_are_settled(self) -> None:
        for life in self.lives:
            if life.state == "lapsed":
                life.charge(life.checkpoint, "charged")

    def _charge(self, life: Life, usage: Usage, state: str) -> None:
        before, reserved = life.micros, life.reserved
        life.charge(usage, state)
        self.beyond += max(0, life.micros - before - reserved)

    def _expected(self, limit: Limit) -> tuple[int, int]:
        lives = [life for number, life in enumerate(self.lives) if limit in (TENANT, KEYS[number % 2])]
        return sum(life.micros for life in lives), sum(life.reserved for life in lives)

    @invariant()
    def budgets_add_up(self) -> None:
        for spent in self.run(self.limiter.spent(self.tenant, (TENANT, *KEYS))):
            found = spent.settled_micros, spent.reserved_micros
            assert found == self._expected(spent.limit)
            assert sum(found) <= spent.limit.limit + self.beyond, "over the budget"

    @invariant()
    def slots_are_those_that_run(self) -> None:
        running = sum(life.state == "running" for life in self.lives)
        assert self.run(self.limiter.concurrency(self.tenant)) == running


@pytest.mark.parametrize("kind", ["redis", "memory"])
def test_lives_of_reservations(kind: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue("redis_url") if kind == "redis" else ""
    machine = type("LivesOf", (Lives,), {"url": url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=15 if kind == "redis" else 40,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
