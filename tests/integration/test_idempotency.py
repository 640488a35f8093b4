"""One key, one run, one charge: over several gateways on a real Redis, whatever happens between two tries."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio

from services.core import errors
from services.core.generation import Usage
from services.gateway.service import drain
from services.ports.idempotency import RecordLimits
from tests.support.keyed_gateways import CLOCK, Answer, Fleet, Gateway, gateways, keyed_limits, token
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


async def test_the_first_request_of_a_key_is_as_any_other(redis_url: str, fleet: Fleet) -> None:
    async with gateways(redis_url, fleet, 1) as (gateway,):
        answer = await gateway.ask("k", choices=2, logprobs=0)
        assert answer.finished is not None, answer.error
        assert answer.accepted is not None
        assert not answer.accepted.replayed
        for choice in range(2):
            assert answer.ids[choice] == expected(answer, 20, choice)
            assert [each.token for each in answer.logprobs[choice]] == answer.text[choice].replace(
                " ", " |"
            ).split("|")[:-1]
        assert answer.finished.usage == Usage(5, 40)
        assert await usage(gateway) == Usage(5, 40)
        await gateway.at_rest()


async def test_a_second_try_is_the_recorded_answer_on_every_gateway(redis_url: str, fleet: Fleet) -> None:
    async with gateways(redis_url, fleet, 2) as (left, right):
        first = await left.ask("k", choices=3, logprobs=0)
        for gateway in (left, right, right):
            again = await gateway.ask("k", choices=3, logprobs=0)
            assert again.same_as(first)
            assert again.accepted is not None
            assert again.accepted.replayed
        assert fleet.engine_tokens == 60
        assert await usage(left) == Usage(5, 60)
        await asyncio.gather(left.at_rest(), right.at_rest())


async def test_fifty_duplicates_at_once_are_one_run(redis_url: str, fleet: Fleet) -> None:
    async with gateways(redis_url, fleet, 2) as (left, right):
        answers = await asyncio.gather(*((left, right)[n % 2].ask("k") for n in range(50)))
        assert all(answer.same_as(answers[0]) for answer in answers)
        assert answers[0].ids == {0: expected(answers[0], 20)}
        assert fleet.engine_tokens == 20
        assert await usage(left) == Usage(5, 20)
        assert sum(not answer.accepted.replayed for answer in answers if answer.accepted) == 1
        await asyncio.gather(left.at_rest(), right.at_rest())


@pytest.mark.parametrize("other", [0, 1])
async def test_a_try_while_it_runs_hears_it_from_the_first_token_then_live(
    redis_url: str, fleet: Fleet, other: int
) -> None:
    fleet.hold_at = 10
    async with gateways(redis_url, fleet, 2) as both:
        first = asyncio.create_task(both[0].ask("k"))
        await until(lambda: fleet.engine_tokens == 10)
        heard: list[int] = []
        stream = both[other].stream("k")
        async for event in stream:
            heard += getattr(event, "ids", [])
            if len(heard) >= 9:  # the token before the hold is recorded with the next one
                fleet.hold.set()
        whole = await first
        assert heard == whole.ids[0] == expected(whole, 20)
        assert fleet.engine_tokens == 20


@pytest.mark.parametrize("ended", [False, True])
async def test_another_body_is_a_conflict(redis_url: str, fleet: Fleet, ended: bool) -> None:
    fleet.hold_at = None if ended else 5
    async with gateways(redis_url, fleet, 2) as both:
        first = asyncio.create_task(both[0].ask("k"))
        await until(lambda: fleet.engine_tokens >= 5)
        if ended:
            await first
        for gateway in both:
            for change in ({"prompt": "hallo"}, {"max_output_tokens": 21}, {"choices": 2}, {"stop": ["x"]}):
                conflict = await gateway.ask("k", **change)
                assert isinstance(conflict.error, errors.IdempotencyConflict)
                assert conflict.accepted is None
        fleet.hold.set()
        assert (await first).finished is not None
        assert fleet.engine_tokens == 20


async def test_how_long_a_client_waits_is_no_other_body(redis_url: str, fleet: Fleet) -> None:
    async with gateways(redis_url, fleet, 1) as (gateway,):
        first = await gateway.ask("k", timeout={"seconds": 50})
        assert (await gateway.ask("k", timeout={"seconds": 40}, timeout_s=5.0)).same_as(first)


async def test_another_tenant_has_records_of_its_own(redis_url: str, fleet: Fleet) -> None:
    async with gateways(redis_url, fleet, 1) as (gateway,):
        mine = await gateway.ask("k")
        theirs = await gateway.ask("k", tenant=fleet.tenant + "-b", prompt="another body")
        assert theirs.finished is not None
        assert theirs.request_id != mine.request_id
        assert fleet.engine_tokens == 40


async def test_who_may_not_use_the_model_does_not_hear_its_output(redis_url: str, fleet: Fleet) -> None:
    async with gateways(redis_url, fleet, 1) as (gateway,):
        await gateway.ask("k")
        assert isinstance((await gateway.ask("k", models=("other",))).error, errors.ModelNotFound)


async def test_a_body_that_is_gone_is_a_tombstone(redis_url: str, fleet: Fleet) -> None:
    records = RecordLimits(lease_s=1, body_s=0.2)
    async with gateways(redis_url, fleet, 2, records=records) as (left, right):
        await left.ask("k")
        await asyncio.sleep(0.3)
        for gateway in (left, right):
            assert isinstance((await gateway.ask("k")).error, errors.ResultExpired)
        assert isinstance((await right.ask("k", prompt="other")).error, errors.IdempotencyConflict)
        assert fleet.engine_tokens == 20


async def test_clients_of_keys_count_for_their_tenants_share_of_a_gateway(
    redis_url: str, fleet: Fleet
) -> None:
    """Of eight places a tenant has four: the run of a key, and three clients of it."""
    async with gateways(redis_url, fleet, 1, max_requests=8) as (gateway,):
        fleet.hold_at = 0
        clients = [asyncio.create_task(gateway.ask("k")) for _ in range(3)]
        await until(lambda: len(gateway.workers.started) == 1)
        with pytest.raises(
            errors.ShareExceeded, match="at most 4 of one tenant; send it to another gateway, or retry"
        ):
            await anext(gateway.stream("k"))
        fleet.hold.set()
        assert all(answer.finished is not None for answer in await asyncio.gather(*clients))
        await gateway.at_rest()
        assert (await gateway.ask("k")).finished is not None


async def test_what_fails_before_it_is_accepted_may_be_tried_again(redis_url: str, fleet: Fleet) -> None:
    async with gateways(redis_url, fleet, 1) as (gateway,):
        refused = await gateway.ask("k", model="none")
        assert isinstance(refused.error, errors.ModelNotFound)
        assert (await gateway.ask("k")).finished is not None, "another body, even"
        fleet.max_concurrency, fleet.hold_at = 1, 0
        holder = asyncio.create_task(gateway.ask("other"))
        await until(lambda: len(gateway.workers.started) == 2)
        assert isinstance((await gateway.ask("late")).error, errors.ConcurrencyExceeded)
        fleet.hold.set()
        await holder
        late = await gateway.ask("late")
        assert late.finished is not None
        assert late.accepted is not None
        assert not late.accepted.replayed
        await gateway.at_rest()


async def test_a_passing_failure_is_gone_on_from(redis_url: str, fleet: Fleet) -> None:
    """Drained in the middle: the tokens so far are kept, and charged once in the end."""
    fleet.hold_at = 12
    async with gateways(redis_url, fleet, 2) as (left, right):
        first = asyncio.create_task(left.ask("k"))
        await until(lambda: fleet.engine_tokens == 12)
        assert await drain(left.service, CLOCK, 0.1) == 1
        cut = await first
        assert isinstance(cut.error, errors.Draining)
        assert await usage(right) == Usage(5, 12)
        fleet.hold.set()
        again = await right.ask("k")
        assert again.finished is not None, again.error
        assert again.ids == {0: expected(again, 20)}
        assert (again.request_id, again.finished.resumes) == (cut.request_id, 1)
        (resumed,) = right.workers.started
        assert len(resumed.spec.produced_ids) == 11, "all that is sure not to be the last"
        assert fleet.engine_tokens == 12 + 9
        assert await usage(right) == Usage(5, 20)
        assert again.same_as(await right.ask("k"))
        await right.at_rest()


async def test_no_worker_is_no_result(redis_url: str, fleet: Fleet) -> None:
    fleet.place_error = errors.NoWorkerAvailable("none", retry_after_s=1.0)
    async with gateways(redis_url, fleet, 2) as (left, right):
        failed = await left.ask("k")
        assert isinstance(failed.error, errors.NoWorkerAvailable)
        fleet.place_error = None
        again = await right.ask("k")
        assert again.finished is not None
        assert again.request_id == failed.request_id
        assert again.accepted is not None
        assert failed.accepted is not None
        assert again.accepted.seed == failed.accepted.seed
        assert await usage(left) == Usage(5, 20)


async def test_a_failure_for_good_is_the_result(redis_url: str, fleet: Fleet) -> None:
    fleet.place_error = errors.PromptTooLong("never fits", field="prompt")
    async with gateways(redis_url, fleet, 2) as (left, right):
        failed = await left.ask("k")
        assert isinstance(failed.error, errors.PromptTooLong)
        fleet.place_error = None
        again = await right.ask("k")
        assert isinstance(again.error, errors.PromptTooLong)
        assert (again.error.message, again.error.metadata["field"]) == ("never fits", "prompt")
        assert fleet.engine_tokens == 0
        await left.at_rest()


async def test_a_client_that_left_finds_its_request_running(redis_url: str, fleet: Fleet) -> None:
    fleet.hold_at = 10
    async with gateways(redis_url, fleet, 2) as (left, right):
        gone = await left.ask("k", until=5)
        again = asyncio.create_task(right.ask("k"))
        await until(lambda: fleet.engine_tokens == 10)
        fleet.hold.set()
        whole = await again
        assert whole.finished is not None
        assert whole.request_id == gone.request_id
        assert whole.ids[0][: len(gone.ids[0])] == gone.ids[0]
        assert (fleet.engine_tokens, len(left.workers.started), right.workers.started) == (20, 1, [])
        await asyncio.gather(left.at_rest(), right.at_rest())


async def test_nobody_comes_back_and_it_ends(redis_url: str, fleet: Fleet) -> None:
    fleet.hold_at = 10
    async with gateways(redis_url, fleet, 1, keyed=keyed_limits(detach_grace_s=0.3)) as (gateway,):
        await gateway.ask("k", until=5)
        await gateway.at_rest()
        (running,) = gateway.workers.started
        assert not running.live
        fleet.hold.set()
        again = await gateway.ask("k")
        assert again.ids == {0: expected(again, 20)}
        assert await usage(gateway) == Usage(5, 20)


async def test_without_a_grace_it_is_cancelled_with_its_client(redis_url: str, fleet: Fleet) -> None:
    fleet.hold_at = 10
    async with gateways(redis_url, fleet, 1, keyed=keyed_limits(detach_grace_s=0.0)) as (gateway,):
        await gateway.ask("k", until=5)
        await gateway.at_rest()
        assert not gateway.workers.started[0].live


async def test_a_follower_elsewhere_keeps_it_running(
    redis_url: str, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.idempotency.ownership.WATCHED_S", 30.0)
    fleet.hold_at, keyed, patient = 5, keyed_limits(detach_grace_s=0.5), RecordLimits(lease_s=10.0)
    async with gateways(redis_url, fleet, 2, keyed=keyed, records=patient, timeout_s=10.0) as (left, right):
        first = asyncio.create_task(left.ask("k", until=10))
        await until(lambda: fleet.engine_tokens == 5)
        second = asyncio.create_task(right.ask("k"))
        (owned,) = left.keyed.owned()
        await until(lambda: owned.watched_until_s)  # It is there before the client leaves.
        fleet.hold_at = 10
        await first
        await asyncio.sleep(1.5)
        assert left.workers.started[0].live
        fleet.hold.set()
        assert (await second).finished is not None
        assert (fleet.engine_tokens, right.workers.started) == (20, [])


async def test_the_deadline_of_one_client_is_its_own(redis_url: str, fleet: Fleet) -> None:
    fleet.hold_at = 10
    async with gateways(redis_url, fleet, 1) as (gateway,):
        patient = asyncio.create_task(gateway.ask("k"))
        hasty = await gateway.ask("k", timeout_s=0.3)
        assert isinstance(hasty.error, errors.DeadlineExceeded)
        fleet.hold.set()
        assert (await patient).finished is not None
        await gateway.at_rest()


async def test_a_slow_reader_holds_up_neither_the_run_nor_its_neighbour(redis_url: str, fleet: Fleet) -> None:
    async with gateways(redis_url, fleet, 1, window_tokens=8) as (gateway,):
        slow = gateway.stream("k", max_output_tokens=100)
        await anext(slow)
        quick = await gateway.ask("k", max_output_tokens=100)
        assert quick.finished is not None
        heard: list[int] = []
        async for event in slow:
            ids = getattr(event, "ids", [])
            assert len(ids) <= 16, "what is not taken piles up"
            heard += ids
        assert heard == quick.ids[0]


async def test_an_output_that_outgrows_its_record_goes_on_for_its_client_and_never_again(
    redis_url: str, fleet: Fleet
) -> None:
    records = RecordLimits(lease_s=1, max_record_bytes=600)
    async with gateways(redis_url, fleet, 2, records=records, window_tokens=16) as (left, right):
        answer = await left.ask("k", max_output_tokens=400)
        assert answer.finished is not None, answer.error
        assert answer.ids == {0: expected(answer, 400)}
        for gateway in (left, right):
            assert isinstance((await gateway.ask("k", max_output_tokens=400)).error, errors.ResultExpired)
        assert fleet.engine_tokens == 400
        assert await usage(left) == Usage(5, 400)
        await left.at_rest()


async def test_too_large_for_memory_is_the_same(redis_url: str, fleet: Fleet) -> None:
    keyed = keyed_limits(max_log_bytes=4000)
    async with gateways(redis_url, fleet, 2, keyed=keyed, window_tokens=16) as (left, right):
        answer = await left.ask("k", max_output_tokens=400)
        assert answer.finished is not None, answer.error
        assert answer.ids == {0: expected(answer, 400)}
        again = await right.ask("k", max_output_tokens=400)
        assert isinstance(again.error, errors.ResultExpired)
        assert await usage(left) == Usage(5, 400)
        await left.at_rest()


async def test_one_tenants_followers_are_bounded(redis_url: str, fleet: Fleet) -> None:
    fleet.hold_at = 5
    async with gateways(redis_url, fleet, 1, keyed=keyed_limits(max_tenant_followers=3)) as (gateway,):
        three = [asyncio.create_task(gateway.ask("k")) for _ in range(3)]
        await until(lambda: fleet.engine_tokens == 5)
        fourth = await gateway.ask("k")
        assert isinstance(fourth.error, errors.ConcurrencyExceeded)
        fleet.hold.set()
        assert all(answer.finished for answer in await asyncio.gather(*three))
        await gateway.at_rest()


async def test_a_redis_that_is_away_refuses_keys_and_nothing_else(own_redis: Any, fleet: Fleet) -> None:
    async with gateways(f"redis://{own_redis.address}/0", fleet, 1) as (gateway,):
        own_redis.kill()
        refused = await gateway.ask("k")
        assert isinstance(refused.error, errors.StoreUnavailable)
        assert refused.error.retry_after_s is not None
        assert (await gateway.ask("")).finished is not None, "a request without a key is served"


async def test_a_redis_that_goes_in_the_middle_is_told_the_end_when_it_is_back(
    own_redis: Any, fleet: Fleet
) -> None:
    fleet.hold_at = 10
    async with gateways(f"redis://{own_redis.address}/0", fleet, 2) as (left, right):
        first = asyncio.create_task(left.ask("k"))
        await until(lambda: fleet.engine_tokens == 10)
        await asyncio.sleep(0.2)
        own_redis.kill()
        fleet.hold.set()
        answer = await first
        assert answer.finished is not None, "the live client has its output"
        here = await left.ask("k")
        assert here.same_as(answer), "and whoever asks here again, from memory"
        await asyncio.to_thread(own_redis.start)
        await left.at_rest()
        again = await right.ask("k")
        assert again.same_as(answer)
        assert fleet.engine_tokens == 20
        async with asyncio.timeout(TIMEOUT_S):
            while await usage(left) != Usage(5, 20):
                await asyncio.sleep(0.05)


async def test_a_redis_that_lost_its_data_has_forgotten_the_key(own_redis: Any, fleet: Fleet) -> None:
    fleet.hold_at = 10
    async with gateways(f"redis://{own_redis.address}/0", fleet, 2) as (left, right):
        first = asyncio.create_task(left.ask("k"))
        await until(lambda: fleet.engine_tokens == 10)
        async with redis.asyncio.Redis.from_url(f"redis://{own_redis.address}/0") as client:
            await client.flushall()
        fleet.hold.set()
        answer = await first
        assert answer.finished is not None
        assert await usage(left) == Usage(5, 20), "charged as any other"
        anew = await right.ask("k")
        assert anew.request_id != answer.request_id
        await left.at_rest()
