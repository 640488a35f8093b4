"""Another gateway goes on with the request of a key: the same version, seed, terms and tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.core import errors
from services.core.generation import Usage
from services.core.outputs.forms import named_form
from services.core.records import Degrade
from services.gateway.policy.degrade import Degradation, DegradationKind
from services.ports.idempotency import IdempotencyStore, RecordState, Written
from tests.support.keyed_gateways import Answer, Fleet, Gateway, gateways, keyed_limits, token
from tests.support.metered import charged
from tests.support.waiting import until

TIMEOUT_S = 60


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def expected(answer: Answer, tokens: int, choice: int = 0) -> list[int]:
    assert answer.accepted is not None
    return [token(answer.accepted.seed, choice, position) for position in range(tokens)]


async def usage(gateway: Gateway) -> Usage:
    return await charged(gateway.limiter, gateway.fleet.tenant)


async def test_a_version_that_is_gone_ends_the_record(redis_url: str, fleet: Fleet) -> None:
    fleet.hold_at = 10
    async with gateways(redis_url, fleet, 2, keyed=keyed_limits(detach_grace_s=0.0)) as (left, right):
        await left.ask("k", until=8)
        await left.at_rest()
        fleet.gone, fleet.digest = {fleet.digest}, "sha256:two"
        for gateway in (right, left):
            gone = await gateway.ask("k")
            assert isinstance(gone.error, errors.VersionGone)
        assert fleet.engine_tokens <= 10


@pytest.mark.parametrize("asked", [{}, {"max_output_tokens": None}], ids=["asked", "left-out"])
@pytest.mark.parametrize("unloaded", [True, False])
async def test_a_record_without_output_moves_to_the_present_version(
    redis_url: str, fleet: Fleet, asked: dict[str, Any], unloaded: bool
) -> None:
    """It timed out in the queue; then the deployment was updated, and its version unloaded, or not yet."""
    fleet.place_error = errors.QueueTimeout("no place in time", retry_after_s=1.0)
    async with gateways(redis_url, fleet, 2) as (left, right):
        refused = await left.ask("k", **asked)
        assert isinstance(refused.error, errors.QueueTimeout)
        assert refused.accepted is not None, "its acceptance is recorded"
        fleet.gone = {fleet.digest} if unloaded else set()
        fleet.digest, fleet.place_error = "sha256:two", None
        answer = await right.ask("k", **asked)
        assert answer.accepted is not None, answer.error
        tokens = 20 if not asked else 8
        assert answer.ids == {0: expected(answer, tokens)}
        assert answer.accepted.version_digest == "sha256:two"
        same = [(one.request_id, one.accepted.seed) for one in (refused, answer) if one.accepted]
        assert same[0] == same[1]
        assert (await left.ask("k", **asked)).same_as(answer), "the record has the version that ran"
        assert await usage(left) == Usage(5, tokens)


async def test_a_takeover_keeps_version_seed_and_id(redis_url: str, fleet: Fleet) -> None:
    """The owner stops writing, as a frozen one does: it is replaced, and what it does then counts nothing."""
    fleet.hold_at = 10
    async with gateways(redis_url, fleet, 2) as (left, right):
        first = asyncio.create_task(left.ask("k"))
        await until(lambda: fleet.engine_tokens == 10)
        await stop_flushing(left)
        fleet.digest = "sha256:two"
        second = asyncio.create_task(right.ask("k"))
        await until(lambda: right.workers.started)
        assert right.workers.started[0].spec.generation.version_digest == "sha256:one"
        fleet.hold.set()
        answers = await asyncio.gather(first, second)
        assert answers[0].same_as(answers[1]), answers
        assert answers[0].ids == {0: expected(answers[0], 20)}
        assert await usage(left) == Usage(5, 20)
        await asyncio.gather(left.at_rest(), right.at_rest())


ALLOWED = Degrade(max_output_tokens=12, smaller_models={"m": "small"})
CAPPED = Degradation(DegradationKind.OUTPUT_CAPPED, "20", "12", 0.7)


async def test_what_was_degraded_once_stays_so_and_is_said_each_time(redis_url: str, fleet: Fleet) -> None:
    fleet.degrade, fleet.pressure, fleet.hold_at = ALLOWED, {fleet.digest: 0.7}, 5
    async with gateways(redis_url, fleet, 2) as (left, right):
        first = asyncio.create_task(left.ask("k"))
        await until(lambda: fleet.engine_tokens == 5)
        fleet.pressure = {}
        followers = [asyncio.create_task(gateway.ask("k")) for gateway in (left, right)]
        fleet.hold.set()
        whole = await first
        assert whole.accepted is not None
        assert whole.accepted.degradations == (CAPPED,)
        assert whole.ids == {0: expected(whole, 12)}
        answers = [*await asyncio.gather(*followers), await left.ask("k"), await right.ask("k")]
        assert all(answer.same_as(whole) for answer in answers), answers
        assert left.counted("fairway_gateway_degraded_total") == 1, "one run"
        assert right.counted("fairway_gateway_degraded_total") == 0
        fresh = await right.ask("another key")
        assert fresh.ids == {0: expected(fresh, 20)}


@pytest.mark.parametrize("degraded", [False, True])
async def test_a_takeover_keeps_the_terms_of_the_first_run(
    redis_url: str, fleet: Fleet, degraded: bool
) -> None:
    """The pressure at the takeover is the opposite of what it was at the beginning."""
    fleet.degrade, fleet.digests, fleet.hold_at = ALLOWED, {"small": "sha256:small"}, 5
    pressed = {fleet.digest: 0.9}
    fleet.pressure = pressed if degraded else {}
    async with gateways(redis_url, fleet, 2) as (left, right):
        first = asyncio.create_task(left.ask("k"))
        await until(lambda: fleet.engine_tokens == 5)
        fleet.pressure = {} if degraded else pressed
        await stop_flushing(left)
        second = asyncio.create_task(right.ask("k"))
        await until(lambda: right.workers.started)
        fleet.hold.set()
        answers = await asyncio.gather(first, second)
        assert answers[0].same_as(answers[1]), answers
        assert answers[0].accepted is not None
        kinds = [found.kind for found in answers[0].accepted.degradations]
        run = right.workers.started[0].spec.generation
        terms = run.model, run.version_digest, run.limits.max_tokens
        if degraded:
            assert kinds == [DegradationKind.SMALLER_MODEL, DegradationKind.OUTPUT_CAPPED]
            assert terms == ("small", "sha256:small", 12)
        else:
            assert kinds == []
            assert terms == ("m", "sha256:one", 20)
        assert answers[0].ids == {0: expected(answers[0], 12 if degraded else 20)}
        assert right.counted("fairway_gateway_degraded_total") == 0, "it was counted where it began"
        await asyncio.gather(left.at_rest(), right.at_rest())


async def stop_flushing(gateway: Gateway) -> None:
    """Cancel the flusher, and wait until the record's lease is over."""
    (task,) = (found for found in asyncio.all_tasks() if found.get_name() == f"flush {gateway.name}")
    task.cancel()
    async with asyncio.timeout(TIMEOUT_S):
        for ownership in gateway.keyed.owned():
            while (await gateway.store.read(ownership.hold.key, 0, watch=False)).state is RecordState.RUNNING:
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("parts", [True, False])
async def test_a_takeover_keeps_how_the_output_is_written(redis_url: str, fleet: Fleet, parts: bool) -> None:
    """The retry asks otherwise for parts, and the deployment's form is another one meanwhile."""
    fleet.form, fleet.hold_at = named_form("hermes"), 5
    async with gateways(redis_url, fleet, 2) as (left, right):
        first = asyncio.create_task(left.ask("k", parts=parts))
        await until(lambda: fleet.engine_tokens == 5)
        await stop_flushing(left)
        fleet.form = named_form("mistral")
        second = asyncio.create_task(right.ask("k", parts=not parts))
        await until(lambda: right.workers.started)
        fleet.hold.set()
        answers = await asyncio.gather(first, second)
        runs = [gateway.workers.started[0].spec.generation for gateway in (left, right)]
        forms = [(run.form, run.constrained_form) for run in runs]
        assert (
            forms[0] == forms[1] == ((named_form("hermes"), None) if parts else (None, named_form("hermes")))
        )
        assert answers[0].ids == answers[1].ids
        await asyncio.gather(left.at_rest(), right.at_rest())


class HeldEnd:
    """A store whose ``finish`` waits for ``go``."""

    def __init__(self, store: IdempotencyStore) -> None:
        self.reached = asyncio.Event()
        self.go = asyncio.Event()
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def finish(self, *values: Any) -> Written:
        self.reached.set()
        await self.go.wait()
        return await self._store.finish(*values)


@pytest.mark.parametrize("ended", [False, True], ids=["running", "ended-and-not-written"])
async def test_a_continuation_that_differs_fails_clients_with_other_tokens(
    redis_url: str, fleet: Fleet, ended: bool
) -> None:
    stores: list[HeldEnd] = []

    def wrap(store: IdempotencyStore) -> IdempotencyStore:
        stores.append(HeldEnd(store))
        return stores[-1]

    fleet.hold_at = 10
    async with gateways(redis_url, fleet, 2, wrap=wrap) as (left, right):
        stores[1].go.set()
        first = asyncio.create_task(left.ask("k"))
        await until(lambda: fleet.engine_tokens == 10)
        await stop_flushing(left)
        if ended:
            fleet.hold.set()
            await stores[0].reached.wait()
        fleet.diverge = True
        second = asyncio.create_task(right.ask("k"))
        # The record refuses the first owner from this claim on. Until then the first owner may end it.
        await until(lambda: right.workers.started)
        fleet.hold.set()
        stores[0].go.set()
        continued = await second
        assert continued.finished is not None, continued.error
        failed = await first
        assert failed.finished is None, "its client has other tokens than the record"
        assert isinstance(failed.error, errors.StreamBroken)
        assert failed.error.retry_after_s is not None
        assert (await left.ask("k")).same_as(continued), "who comes back has the one result"
        assert await usage(left) == Usage(5, 20)


async def test_an_owner_without_a_lease_ends_the_record_unless_another_claimed_it(
    redis_url: str, fleet: Fleet
) -> None:
    fleet.hold_at = 10
    async with gateways(redis_url, fleet, 2) as (left, right):
        first = asyncio.create_task(left.ask("k"))
        await until(lambda: fleet.engine_tokens == 10)
        await stop_flushing(left)
        fleet.hold.set()
        answer = await first
        assert answer.finished is not None, answer.error
        fleet.diverge = True
        assert (await right.ask("k")).same_as(answer)
        assert not right.workers.started
        assert await usage(left) == Usage(5, 20)
