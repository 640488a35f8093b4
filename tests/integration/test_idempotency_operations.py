"""Keys as their operators see them: what is counted, a slow tenant, a frozen store, bugs, a drain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from services.core import errors
from services.core.generation import Usage
from services.gateway.service import drain
from services.ports.idempotency import (
    Addition,
    Claim,
    Hold,
    IdempotencyStore,
    LogTail,
    RecordKey,
    Written,
)
from services.ports.limiter import Reservation
from tests.support.keyed_gateways import CLOCK, Answer, Fleet, Gateway, gateways, keyed_limits
from tests.support.waiting import until

TIMEOUT_S = 60
CLIENTS = "fairway_idempotency_clients_total"
CLAIMS = "fairway_idempotency_claims_total"
ENDINGS = "fairway_idempotency_endings_total"
FLUSHES = "fairway_idempotency_flush_seconds_count"


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


class Between:
    """``IdempotencyStore`` in front of another: appends of one tenant wait for ``go``; an operation
    that is named in ``broken`` has a bug."""

    def __init__(self, inner: IdempotencyStore, slow_tenant: str = "", broken: str = "") -> None:
        self._inner = inner
        self._slow_tenant = slow_tenant
        self._broken = broken
        self.go = asyncio.Event()
        self.waiting = 0

    async def claim(self, key: RecordKey, fingerprint: str, owner: str) -> Claim:
        self._break("claim")
        return await self._inner.claim(key, fingerprint, owner)

    async def append(self, additions: Sequence[Addition]) -> tuple[Written, ...]:
        if any(addition.hold.key.tenant_id == self._slow_tenant for addition in additions):
            self.waiting += 1
            await self.go.wait()
        return await self._inner.append(additions)

    async def finish(
        self, hold: Hold, chunk: bytes, reservation: Reservation | None, usage: Usage
    ) -> Written:
        self._break("finish")
        return await self._inner.finish(hold, chunk, reservation, usage)

    async def release(
        self, hold: Hold, chunk: bytes, reservation: Reservation | None, usage: Usage
    ) -> Written:
        return await self._inner.release(hold, chunk, reservation, usage)

    async def read(self, key: RecordKey, start: int, *, watch: bool) -> LogTail:
        self._break("read")
        return await self._inner.read(key, start, watch=watch)

    async def delete(self, key: RecordKey) -> bool:
        self._break("delete")
        return await self._inner.delete(key)

    def _break(self, operation: str) -> None:
        if operation == self._broken:
            raise ZeroDivisionError(operation)


async def test_clients_are_counted_by_what_they_came_to(redis_url: str, fleet: Fleet) -> None:
    fleet.hold_at = 5
    async with gateways(redis_url, fleet, 2, keyed=keyed_limits(max_tenant_followers=3)) as (left, right):
        here = [asyncio.create_task(left.ask("k")) for _ in range(3)]
        await until(lambda: fleet.engine_tokens == 5)
        assert isinstance((await left.ask("k")).error, errors.ConcurrencyExceeded)
        there = asyncio.create_task(right.ask("k"))
        await until(lambda: right.counted(CLIENTS))
        assert left.counted("fairway_idempotency_followers") == 3
        assert left.counted("fairway_idempotency_records_owned") == 1
        assert right.counted("fairway_idempotency_followers") == 1
        assert right.counted("fairway_idempotency_records_owned") == 0
        fleet.hold.set()
        assert all(answer.finished for answer in await asyncio.gather(*here, there))
        assert (await right.ask("k")).finished is not None
        assert isinstance((await right.ask("k", prompt="other")).error, errors.IdempotencyConflict)
        heard = {
            name: {
                outcome: count
                for outcome in ("new", "attached", "replayed", "conflict", "expired", "takeover", "refused")
                if (count := gateway.counted(CLIENTS, outcome=outcome, tenant=fleet.tenant))
            }
            for name, gateway in (("left", left), ("right", right))
        }
        assert heard == {
            "left": {"new": 1, "attached": 2, "refused": 1},
            "right": {"attached": 1, "replayed": 1, "conflict": 1},
        }
        assert left.counted(CLAIMS) == 1, "who joins here claims nothing"
        assert right.counted(CLAIMS) == 3
        assert left.counted(ENDINGS, outcome="written") == 1
        assert left.counted(FLUSHES, outcome="written") >= 1
        await asyncio.gather(left.at_rest(), right.at_rest())
        assert left.counted("fairway_idempotency_followers") == 0
        assert left.counted("fairway_idempotency_records_owned") == 0


async def test_takeovers_and_lost_records_are_counted(redis_url: str, fleet: Fleet) -> None:
    fleet.hold_at = 10
    async with gateways(redis_url, fleet, 2) as (left, right):
        first = asyncio.create_task(left.ask("k"))
        await until(lambda: fleet.engine_tokens == 10 and left.counted(FLUSHES))
        (flush,) = (task for task in asyncio.all_tasks() if task.get_name() == "flush g0")
        flush.cancel()  # its lease lapses
        second = asyncio.create_task(right.ask("k"))
        await until(lambda: right.counted(CLAIMS, outcome="takeover"))
        fleet.hold.set()
        assert (await first).same_as(await second)
        assert right.counted(CLIENTS, outcome="attached") == 1, "it followed before it took over"
        assert left.counted(ENDINGS, outcome="fenced") == 1
        assert right.counted(ENDINGS, outcome="written") == 1


async def test_a_slow_tenant_holds_up_no_other(redis_url: str, fleet: Fleet) -> None:
    between: list[Between] = []

    def wrap(store: IdempotencyStore) -> IdempotencyStore:
        between.append(Between(store, slow_tenant="slow"))
        return between[-1]

    fleet.hold_at = 5
    async with gateways(redis_url, fleet, 1, wrap=wrap) as (gateway,):
        (store,) = between
        store.go.set()  # until it is accepted
        slow = []

        def produced(tokens: int) -> bool:
            return fleet.engine_tokens == tokens

        # At different times: the lease of the one is due while the other's is renewed.
        for number in range(2):
            slow.append(asyncio.create_task(gateway.ask(f"k{number}", tenant="slow")))
            await until(partial(produced, 5 * (number + 1)))
        store.go.clear()
        before = store.waiting
        await until(
            lambda: store.waiting > before
        )  # its lease is to be renewed, and the call does not return
        quick = asyncio.create_task(gateway.ask("k"))
        await until(lambda: fleet.engine_tokens == 15)
        flushed = gateway.counted(FLUSHES, outcome="written")
        await until(lambda: gateway.counted(FLUSHES, outcome="written") >= flushed + 3)
        assert store.waiting == before + 1, "one call of a tenant at a time"
        store.go.set()
        fleet.hold.set()
        assert all(answer.finished for answer in await asyncio.gather(*slow, quick))


async def test_a_frozen_redis_costs_keys_a_bounded_time_and_the_rest_nothing(
    own_redis: Any, fleet: Fleet
) -> None:
    """The bound catches hangs; docs/idempotency.md has measured figures."""
    fleet.hold_at = 10
    async with gateways(f"redis://{own_redis.address}/0", fleet, 2, timeout_s=0.5) as (left, right):
        running = [asyncio.create_task(left.ask(f"k{number}", max_output_tokens=200)) for number in range(4)]
        await until(lambda: fleet.engine_tokens == 40)
        own_redis.freeze()
        try:
            fleet.hold.set()
            spent: dict[str, list[float]] = {"with a key": [], "without": []}
            for _ in range(8):
                began_s = CLOCK.monotonic_s()
                assert isinstance((await right.ask("new")).error, errors.StoreUnavailable)
                spent["with a key"].append(CLOCK.monotonic_s() - began_s)
                began_s = CLOCK.monotonic_s()
                assert (await right.ask("", max_output_tokens=1)).finished is not None
                spent["without"].append(CLOCK.monotonic_s() - began_s)
            assert max(map(max, spent.values())) < 10
            answers = await asyncio.gather(*running)
            assert all(answer.finished for answer in answers), "what runs goes on to its end"
            assert left.counted("fairway_idempotency_endings_unwritten") == 4
        finally:
            own_redis.thaw()
        await until(lambda: not left.counted("fairway_idempotency_endings_unwritten"))
        await until_asked(right)
        for number, answer in enumerate(answers):
            again = await until_answered(right, f"k{number}", max_output_tokens=200)
            assert again.finished is not None, again.error
            assert again.ids == answer.ids
        await asyncio.gather(left.at_rest(), right.at_rest())


@pytest.mark.parametrize("broken", ["claim", "finish", "read"])
async def test_a_bug_ends_the_clients_with_an_incident(redis_url: str, fleet: Fleet, broken: str) -> None:
    async with gateways(redis_url, fleet, 1) as (whole,):
        if broken == "read":
            assert (await whole.ask("k")).finished is not None
        async with gateways(redis_url, fleet, 1, wrap=lambda store: Between(store, broken=broken)) as (
            gateway,
        ):
            async with asyncio.timeout(TIMEOUT_S):
                answer = await gateway.ask("k")
            assert isinstance(answer.error, errors.InternalError)
            assert answer.error.metadata["incident"] == "inc_1"
            assert broken not in answer.error.message
            await until(lambda: not gateway.keyed.busy)


async def test_a_drain_ends_every_client_of_a_key(redis_url: str, fleet: Fleet) -> None:
    """Also those whose request runs elsewhere or ended long ago, and those that came right before."""
    async with gateways(redis_url, fleet, 2, window_tokens=8) as (left, right):
        slow = right.stream("slow")
        await anext(slow)
        await until(lambda: right.counted(ENDINGS) == 1)  # it does not take the rest
        fleet.engine_tokens, fleet.hold_at = 0, 5
        owner = asyncio.create_task(left.ask("k"))
        await until(lambda: fleet.engine_tokens == 5)
        followers = [asyncio.create_task(right.ask("k")) for _ in range(3)]
        await until(lambda: right.counted(CLAIMS, outcome="attached") == 1)
        stream = right.stream("another", max_output_tokens=1)
        late = asyncio.ensure_future(anext(stream))
        drained = asyncio.create_task(drain(right.service, CLOCK, 0.0))
        assert isinstance((await asyncio.gather(late, return_exceptions=True))[0], errors.Draining)
        answers = await asyncio.gather(*followers)
        assert all(isinstance(answer.error, errors.Draining) for answer in answers), answers
        await drained
        assert not right.keyed.busy
        with pytest.raises(errors.Draining):
            [event async for event in slow]
        fleet.hold.set()
        assert (await owner).finished is not None
        await left.at_rest()


async def test_a_drain_writes_the_ends_that_were_kept(own_redis: Any, fleet: Fleet) -> None:
    fleet.hold_at = 10
    keyed = keyed_limits(flush_s=3600.0)  # nobody else writes them
    async with gateways(f"redis://{own_redis.address}/0", fleet, 2, keyed=keyed) as (left, right):
        first = asyncio.create_task(left.ask("k"))
        await until(lambda: fleet.engine_tokens == 10)
        own_redis.kill()
        fleet.hold.set()
        answer = await first
        assert answer.finished is not None
        assert left.counted("fairway_idempotency_endings_unwritten") == 1
        await asyncio.to_thread(own_redis.start)
        await until_asked(left)
        await drain(left.service, CLOCK, 1.0)
        assert left.counted("fairway_idempotency_endings_unwritten") == 0
        again = await right.ask("k")
        assert again.same_as(answer)
        assert fleet.engine_tokens == 20


async def until_answered(gateway: Gateway, key: str, **options: Any) -> Answer:
    """Ask until the store answers in its time, which a machine that others use may not leave it."""
    async with asyncio.timeout(TIMEOUT_S):
        while isinstance((answer := await gateway.ask(key, **options)).error, errors.StoreUnavailable):
            await asyncio.sleep(0.05)
        return answer


async def until_asked(gateway: Gateway) -> None:
    """Return once the gateway finds the store again: a breaker asks once a second."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                await gateway.store.read(RecordKey(gateway.fleet.tenant, "0" * 32), 0, watch=False)
                return
            except errors.StoreUnavailable:
                await asyncio.sleep(0.05)
