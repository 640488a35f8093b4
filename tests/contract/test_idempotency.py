"""What every ``IdempotencyStore`` does, checked on Redis and in memory, in clear and encrypted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from services.core.errors import IdempotencyKeysExceeded, TokenRateExceeded
from services.core.generation import Usage
from services.core.limits import Claim as LimitClaim
from services.core.limits import Limit, LimitKind
from services.ports.idempotency import (
    Addition,
    Ended,
    Expired,
    Hold,
    OtherBody,
    Owned,
    RecordKey,
    RecordLimits,
    RecordState,
    Running,
    Written,
)
from services.ports.limiter import Reservation
from tests.support.idempotency import Bench, encrypted, memory_bench, redis_bench
from tests.support.metered import PRICE, admit_metered, charged

Make = Callable[[RecordLimits], Awaitable[Bench]]
NONE = Usage(0, 0)


@pytest_asyncio.fixture(params=["redis", "memory", "redis encrypted", "memory encrypted"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    kind, _, sealed = request.param.partition(" ")
    async with AsyncExitStack() as stack:

        async def with_limits(limits: RecordLimits) -> Bench:
            if kind == "memory":
                made = memory_bench(limits)
            else:
                made = redis_bench(request.getfixturevalue("redis_url"), limits)
            bench = await stack.enter_async_context(made)
            return encrypted(bench) if sealed else bench

        yield with_limits


@pytest_asyncio.fixture
async def bench(make: Make) -> Bench:
    return await make(RecordLimits(lease_s=60.0))


async def owned(bench: Bench, owner: str = "a", name: str = "k", fingerprint: str = "f") -> Hold:
    claim = await bench.store.claim(bench.key(name), fingerprint, owner)
    assert isinstance(claim, Owned), claim
    return claim.hold


async def add(bench: Bench, hold: Hold, *chunks: bytes) -> list[Written]:
    return [(await bench.store.append([Addition(hold, chunk)]))[0] for chunk in chunks]


async def admitted(bench: Bench, request_id: str = "r") -> Reservation:
    return await admit_metered(bench.limiter, bench.tenant, request_id)


async def test_a_new_key_is_owned_and_a_second_claim_finds_it_running(bench: Bench) -> None:
    await owned(bench)
    for owner in ("a", "b"):
        assert await bench.store.claim(bench.key(), "f", owner) == Running()


async def test_of_many_claims_at_once_one_owns(bench: Bench) -> None:
    claims = await asyncio.gather(*(bench.store.claim(bench.key(), "f", f"g{n}") for n in range(50)))
    assert sum(isinstance(claim, Owned) for claim in claims) == 1
    assert sum(claim == Running() for claim in claims) == 49


async def test_another_body_is_a_conflict_while_it_runs_and_afterwards(bench: Bench) -> None:
    hold = await owned(bench)
    assert await bench.store.claim(bench.key(), "other", "b") == OtherBody()
    await bench.store.finish(hold, b"end", await admitted(bench), NONE)
    assert await bench.store.claim(bench.key(), "other", "b") == OtherBody()
    await bench.lapse_bodies()
    assert await bench.store.claim(bench.key(), "other", "b") == OtherBody()


async def test_tenants_do_not_see_each_others_keys(bench: Bench) -> None:
    await owned(bench)
    claim = await bench.store.claim(RecordKey(bench.tenant + "-b", "k"), "other", "b")
    assert isinstance(claim, Owned)
    assert claim.chunks == 0


async def test_what_was_appended_is_read_in_order(bench: Bench) -> None:
    hold = await owned(bench)
    assert await add(bench, hold, b"1", b"2", b"") == [Written.KEPT] * 3
    tail = await bench.store.read(bench.key(), 0, watch=False)
    assert (tail.state, tail.chunks, tail.more) == (RecordState.RUNNING, (b"1", b"2"), False)
    tail = await bench.store.read(bench.key(), 1, watch=False)
    assert tail.chunks == (b"2",)
    assert (await bench.store.read(bench.key(), 2, watch=False)).chunks == ()


async def test_a_long_log_is_read_in_parts(bench: Bench) -> None:
    hold = await owned(bench)
    chunks = [str(number).encode() for number in range(600)]
    for start in range(0, 600, 100):
        await bench.store.append([Addition(hold, chunk) for chunk in chunks[start : start + 100]])
    found: list[bytes] = []
    more, reads = True, 0
    while more:
        tail = await bench.store.read(bench.key(), len(found), watch=False)
        assert len(tail.chunks) <= 256
        found += tail.chunks
        more, reads = tail.more, reads + 1
    assert found == chunks
    assert reads == 3


async def test_an_ended_record_replays(bench: Bench) -> None:
    hold = await owned(bench)
    await add(bench, hold, b"1")
    assert await bench.store.finish(hold, b"end", await admitted(bench), NONE) is Written.KEPT
    assert await bench.store.claim(bench.key(), "f", "b") == Ended()
    tail = await bench.store.read(bench.key(), 0, watch=True)
    assert (tail.state, tail.chunks) == (RecordState.ENDED, (b"1", b"end"))


async def test_an_evicted_body_is_a_tombstone_and_never_owned(bench: Bench) -> None:
    hold = await owned(bench)
    await bench.store.finish(hold, b"end", await admitted(bench), NONE)
    await bench.lapse_bodies()
    assert await bench.store.claim(bench.key(), "f", "b") == Expired()
    assert (await bench.store.read(bench.key(), 0, watch=False)).state is RecordState.EXPIRED


async def test_a_lapsed_owner_is_replaced_and_can_do_nothing_more(bench: Bench) -> None:
    old = await owned(bench)
    await add(bench, old, b"1")
    slot = await admitted(bench)
    await bench.lapse_leases()
    assert (await bench.store.read(bench.key(), 0, watch=False)).state is RecordState.FREE
    claim = await bench.store.claim(bench.key(), "f", "b")
    assert isinstance(claim, Owned)
    assert claim.chunks == 1
    assert claim.hold.epoch > old.epoch
    assert await add(bench, old, b"stale", b"") == [Written.FENCED] * 2
    assert await bench.store.finish(old, b"stale", slot, Usage(9, 9)) is Written.FENCED
    assert await bench.store.release(old, b"stale", slot, Usage(9, 9)) is Written.FENCED
    assert await charged(bench.limiter, bench.tenant) == NONE
    assert await bench.limiter.concurrency(bench.tenant) == 1
    assert await bench.store.finish(claim.hold, b"end", slot, Usage(2, 1)) is Written.KEPT
    assert await bench.store.finish(old, b"stale", slot, Usage(9, 9)) is Written.FENCED
    assert (await bench.store.read(bench.key(), 0, watch=False)).chunks == (b"1", b"end")
    assert await charged(bench.limiter, bench.tenant) == Usage(2, 1)
    assert await bench.limiter.concurrency(bench.tenant) == 0


async def test_the_same_owner_claims_again_with_another_epoch(bench: Bench) -> None:
    old = await owned(bench, "a")
    await bench.lapse_leases()
    new = await owned(bench, "a")
    assert new.epoch > old.epoch
    assert await add(bench, old, b"stale") == [Written.FENCED]


async def test_a_late_renewal_keeps_a_record_that_nobody_took(bench: Bench) -> None:
    hold = await owned(bench)
    await bench.lapse_leases()
    assert await add(bench, hold, b"") == [Written.KEPT]
    assert await bench.store.claim(bench.key(), "f", "b") == Running()


async def test_an_epoch_of_a_forgotten_record_is_not_given_again(bench: Bench) -> None:
    old = await owned(bench)
    await bench.store.release(old, b"", None, NONE)
    assert await add(bench, old, b"stale") == [Written.GONE]
    new = await owned(bench)
    assert new.epoch > old.epoch
    assert await add(bench, old, b"stale") == [Written.FENCED]


async def test_a_release_without_a_log_leaves_nothing(bench: Bench) -> None:
    slot = await admitted(bench)
    assert await bench.store.release(await owned(bench), b"", slot, NONE) is Written.KEPT
    assert await bench.limiter.concurrency(bench.tenant) == 0
    assert (await bench.store.read(bench.key(), 0, watch=False)).state is RecordState.GONE
    await owned(bench, fingerprint="another body")


async def test_a_release_with_a_log_is_gone_on_from_and_charged_once(bench: Bench) -> None:
    hold = await owned(bench)
    slot = await admitted(bench)
    await add(bench, hold, b"1")
    assert await bench.store.release(hold, b"2", slot, Usage(10, 3, 4)) is Written.KEPT
    assert await add(bench, hold, b"late") == [Written.FENCED]
    assert await bench.limiter.concurrency(bench.tenant) == 0
    assert await charged(bench.limiter, bench.tenant) == Usage(10, 3, 4)
    claim = await bench.store.claim(bench.key(), "f", "b")
    assert isinstance(claim, Owned)
    assert claim.chunks == 2
    slot = await admitted(bench)
    await bench.store.finish(claim.hold, b"end", slot, Usage(10, 8, 2))
    assert await charged(bench.limiter, bench.tenant) == Usage(10, 8, 4)
    assert await bench.limiter.concurrency(bench.tenant) == 0


async def test_the_end_of_a_record_corrects_the_reserved_tokens_once(bench: Bench) -> None:
    rate = Limit(LimitKind.TOKENS, 1200)  # 20 a second
    hold = await owned(bench)
    slot = await bench.limiter.reserve(await admitted(bench), [LimitClaim(rate, 1200)], PRICE)
    await bench.store.finish(hold, b"end", slot, Usage(100, 500))
    await bench.limiter.settle(slot, Usage(100, 500))
    await bench.limiter.reserve(await admitted(bench, "fits"), [LimitClaim(rate, 600)], PRICE)
    with pytest.raises(TokenRateExceeded):
        await bench.limiter.reserve(await admitted(bench, "more"), [LimitClaim(rate, 300)], PRICE)


async def test_a_settlement_after_the_end_counts_nothing(bench: Bench) -> None:
    hold = await owned(bench)
    slot = await admitted(bench)
    await bench.store.finish(hold, b"end", slot, Usage(5, 5))
    await bench.limiter.settle(slot, Usage(5, 5))
    await bench.limiter.renew([(slot, Usage(0, 0))])
    assert await charged(bench.limiter, bench.tenant) == Usage(5, 5)
    assert await bench.limiter.concurrency(bench.tenant) == 0


@pytest.mark.parametrize("apart_first", [True, False])
async def test_a_run_that_is_settled_apart_from_its_record_is_charged_once(
    bench: Bench, apart_first: bool
) -> None:
    """The store was away at its end, so its usage waited elsewhere; another gateway went on meanwhile."""
    hold, reservation = await owned(bench), await admitted(bench)
    await add(bench, hold, b"part")
    apart = reservation
    if apart_first:
        await bench.limiter.settle(apart, Usage(3, 4, 1))
        await bench.limiter.settle(apart, Usage(3, 4, 1))
        assert await charged(bench.limiter, bench.tenant) == Usage(3, 4, 1)
    await bench.lapse_leases()
    other = await owned(bench, "b")
    again = await admitted(bench)
    assert await bench.store.finish(other, b"rest", again, Usage(3, 9, 1)) is Written.KEPT
    assert await charged(bench.limiter, bench.tenant) == Usage(3, 9, 1)
    await bench.limiter.settle(apart, Usage(3, 4, 1))
    assert await charged(bench.limiter, bench.tenant) == Usage(3, 9, 1)
    assert await bench.limiter.concurrency(bench.tenant) == 0


async def test_the_owner_hears_that_somebody_follows(bench: Bench) -> None:
    hold = await owned(bench)
    await bench.store.read(bench.key(), 0, watch=False)
    assert await add(bench, hold, b"1") == [Written.KEPT]
    await bench.store.read(bench.key(), 0, watch=True)
    assert await add(bench, hold, b"2") == [Written.WATCHED]


async def test_one_append_serves_many_records_of_many_tenants(bench: Bench) -> None:
    holds = []
    for number in range(150):
        key = RecordKey(f"{bench.tenant}-{number % 3}", str(number))
        claim = await bench.store.claim(key, "f", "a")
        assert isinstance(claim, Owned)
        holds.append(claim.hold)
    stale = Hold(holds[7].key, "b", holds[7].epoch)
    additions = [Addition(hold, str(n).encode()) for n, hold in enumerate(holds)]
    additions[7] = Addition(stale, b"7")
    answers = await bench.store.append(additions)
    assert answers[7] is Written.FENCED
    assert [answer for n, answer in enumerate(answers) if n != 7] == [Written.KEPT] * 149
    for number, hold in enumerate(holds):
        expected = () if number == 7 else (str(number).encode(),)
        assert (await bench.store.read(hold.key, 0, watch=False)).chunks == expected


async def test_a_record_that_outgrows_its_bound_becomes_a_tombstone(make: Make) -> None:
    bench = await make(RecordLimits(lease_s=60, max_record_bytes=100))
    hold = await owned(bench)
    slot = await admitted(bench)
    full = b"x" * (100 - bench.overhead)
    assert await add(bench, hold, full, b"y", b"", b"z") == [Written.KEPT, *[Written.TOO_LARGE] * 3]
    assert await bench.store.claim(bench.key(), "f", "b") == Expired()
    assert (await bench.store.read(bench.key(), 0, watch=False)).state is RecordState.EXPIRED
    assert await bench.store.finish(hold, b"end", slot, Usage(1, 9)) is Written.TOO_LARGE
    assert await charged(bench.limiter, bench.tenant) == Usage(1, 9)
    assert await bench.store.claim(bench.key(), "f", "b") == Expired()


async def test_a_tenants_bodies_make_room_oldest_first_but_not_running_ones(make: Make) -> None:
    bench = await make(RecordLimits(lease_s=60, max_tenant_bytes=300))
    size = 100 - bench.overhead
    running = await owned(bench, name="running")
    await add(bench, running, b"r" * size)
    for name in ("first", "second"):
        hold = await owned(bench, name=name)
        await bench.store.finish(hold, b"e" * size, await admitted(bench, name), NONE)
    third = await owned(bench, name="third")
    assert await add(bench, third, b"t" * size) == [Written.KEPT]
    assert await bench.store.claim(bench.key("first"), "f", "b") == Expired()
    assert await bench.store.claim(bench.key("second"), "f", "b") == Ended()
    assert await add(bench, third, b"t" * size) == [Written.KEPT]
    assert await bench.store.claim(bench.key("second"), "f", "b") == Expired()
    assert await add(bench, running, b"r" * size) == [Written.TOO_LARGE], "nothing is left to give way"
    assert await add(bench, third, b"t" * size) == [Written.KEPT]


async def test_where_open_records_are_kept_only_ended_ones_make_room(make: Make) -> None:
    bench = await make(RecordLimits(lease_s=60, max_tenant_bytes=300, max_record_bytes=300, open_s=60))
    size = 100 - bench.overhead
    ended, opened, other = [await owned(bench, name=name) for name in ("ended", "opened", "other")]
    await bench.store.release(opened, b"o" * size, None, NONE)
    await bench.store.finish(ended, b"e" * size, None, NONE)
    await bench.store.release(other, b"p" * size, None, NONE)
    new = await owned(bench, name="new")
    assert await bench.store.release(new, b"n" * size, None, NONE) is Written.KEPT
    assert await bench.store.claim(bench.key("ended"), "f", "b") == Expired()
    for _ in range(2):  # the refused one is new again
        more = await owned(bench, name="more")
        assert await bench.store.release(more, b"m" * size, None, NONE) is Written.TOO_LARGE
        assert (await bench.store.read(more.key, 0, watch=False)).state is RecordState.GONE
    again = await owned(bench, name="opened")
    assert await add(bench, again, b"x") == [Written.TOO_LARGE]
    assert await bench.store.finish(again, b"x" * 250, None, NONE) is Written.TOO_LARGE, "of a record"
    tail = await bench.store.read(again.key, 0, watch=False)
    assert (tail.state, tail.chunks) == (RecordState.FREE, (b"o" * size,))
    again = await owned(bench, name="opened")
    assert await bench.store.finish(again, b"x" * size, None, NONE) is Written.KEPT, "of the tenant"
    tail = await bench.store.read(again.key, 0, watch=False)
    assert (tail.state, tail.chunks) == (RecordState.ENDED, (b"o" * size, b"x" * size))


async def test_an_open_record_is_kept_for_its_time(make: Make) -> None:
    bench = await make(RecordLimits(lease_s=60, max_tenant_bytes=200, open_s=0.2))
    size = 100 - bench.overhead
    for name in ("first", "second"):
        await bench.store.release(await owned(bench, name=name), b"o" * size, None, NONE)
    async with asyncio.timeout(10):
        while True:
            third = await owned(bench, name="third")
            if await bench.store.release(third, b"t" * size, None, NONE) is Written.KEPT:
                break
            await bench.lapse_leases()
            await asyncio.sleep(0.05)
    assert (await bench.store.read(bench.key("first"), 0, watch=False)).chunks == ()


async def test_a_large_record_takes_the_room_of_many_small_ones(make: Make) -> None:
    """Of more than one look at the oldest in the script, and past as many that run."""
    bench = await make(RecordLimits(lease_s=60, max_tenant_bytes=40_000))
    small, count = b"s" * (100 - bench.overhead), 300
    holds = [await owned(bench, name=str(number)) for number in range(count)]
    running = holds[:70]
    await bench.store.append([Addition(hold, small) for hold in running])
    for hold in holds[70:]:
        await bench.store.finish(hold, small, None, NONE)
    large = await owned(bench, name="large")
    assert await add(bench, large, b"l" * (25_000 - bench.overhead)) == [Written.KEPT]
    states = [(await bench.store.read(hold.key, 0, watch=False)).state for hold in holds]
    ended = [RecordState.EXPIRED] * 150 + [RecordState.ENDED] * 80
    assert states == [RecordState.RUNNING] * 70 + ended, "the oldest, and as few as possible"
    over = await owned(bench, name="over")
    assert await add(bench, over, b"l" * (40_000 - bench.overhead)) == [Written.TOO_LARGE]


async def test_a_tenants_keys_are_bounded_and_the_refusal_says_when(make: Make) -> None:
    bench = await make(RecordLimits(lease_s=60, max_tenant_keys=3))
    holds = [await owned(bench, name=str(number)) for number in range(3)]
    with pytest.raises(IdempotencyKeysExceeded) as caught:
        await bench.store.claim(bench.key("more"), "f", "a")
    assert caught.value.retry_after_s is not None
    assert 86_000 < caught.value.retry_after_s <= 86_400
    assert await bench.store.claim(bench.key("1"), "f", "a") == Running()
    await bench.store.release(holds[1], b"", None, NONE)
    await owned(bench, name="more")


async def test_a_tombstone_goes_after_its_time(make: Make) -> None:
    bench = await make(RecordLimits(lease_s=0.05, body_s=0.1, tombstone_s=3.0, max_tenant_keys=1))
    hold = await owned(bench)
    await bench.store.finish(hold, b"end", await admitted(bench), NONE)
    await bench.lapse_bodies()
    assert await bench.store.claim(bench.key(), "f", "b") == Expired()
    async with asyncio.timeout(60):
        while not isinstance(await bench.store.claim(bench.key(), "another body", "b"), Owned):
            await bench.lapse_leases()
            await asyncio.sleep(0.02)


async def test_names_are_data(bench: Bench) -> None:
    for number, name in enumerate(("}:log", "ü\n*", "0", "")):
        hold = await owned(bench, name=name, owner=f"o{name}", fingerprint=f"f{number}")
        assert await add(bench, hold, b"\x00\xff\r\n") == [Written.KEPT]
        assert (await bench.store.read(bench.key(name), 0, watch=False)).chunks == (b"\x00\xff\r\n",)


async def test_a_deleted_record_is_gone_with_its_log_in_any_state(bench: Bench) -> None:
    running, ended, idle = [await owned(bench, name=name) for name in ("running", "ended", "idle")]
    await add(bench, running, b"1")
    await bench.store.finish(ended, b"end", None, NONE)
    await bench.store.release(idle, b"1", None, NONE)
    for hold in (running, ended, idle):
        assert await bench.store.delete(hold.key)
        assert not await bench.store.delete(hold.key)
        assert (await bench.store.read(hold.key, 0, watch=False)).state is RecordState.GONE
        assert await add(bench, hold, b"late") == [Written.GONE]
        claim = await bench.store.claim(hold.key, "another body", "b")
        assert isinstance(claim, Owned)
        assert claim.chunks == 0


async def test_a_deleted_record_leaves_its_room_to_others(make: Make) -> None:
    bench = await make(RecordLimits(lease_s=60, max_tenant_bytes=100, max_tenant_keys=1))
    full = b"x" * (100 - bench.overhead)
    for name in ("first", "second"):
        assert await add(bench, await owned(bench, name=name), full) == [Written.KEPT]
        await bench.store.delete(bench.key(name))
