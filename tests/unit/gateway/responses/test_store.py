"""Stored responses, on records in this process that are encrypted as in production."""

from __future__ import annotations

import asyncio

import pytest

from services.adapters.record_cipher import EncryptedRecords
from services.core.errors import InvalidInput, OverQuota, ResultExpired
from services.gateway.responses.store import (
    MAX_BEGIN_BYTES,
    BegunResponse,
    ResponseAnswer,
    ResponseStore,
    StoredResponse,
)
from services.ports.idempotency import RecordLimits
from simulator.stores.idempotency import MemoryIdempotency
from simulator.stores.limiter import MemoryLimiter
from tests.support.clocks import HandClock
from tests.support.tenant_keys import record_cipher

BEGUN = BegunResponse("req_1", "m", "", background=True, response=b"{}", items=b"[1]", generation=b"g")
ANSWER = ResponseAnswer(b'{"a":1}', b"[2]")
RETENTION_S = 1000.0
OPEN_S = 100.0


class Rig:
    """Two gateways' stores over the same records."""

    def __init__(self, **limits: int) -> None:
        self.clock = HandClock()
        limited = RecordLimits(body_s=RETENTION_S, tombstone_s=RETENTION_S, open_s=OPEN_S, **limits)
        self.records = MemoryIdempotency(self.clock, MemoryLimiter(self.clock), limited)
        cipher = record_cipher()
        self.left, self.right = (
            ResponseStore(EncryptedRecords(self.records, cipher), b"n" * 32, owner, self.clock)
            for owner in ("left", "right")
        )


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_what_one_gateway_stores_another_finds(rig: Rig) -> None:
    assert await rig.left.begin("acme", "r", BEGUN) is None
    assert await rig.right.find("acme", "r") == StoredResponse(BEGUN, None)
    assert await rig.right.is_open("acme", "r")
    assert await rig.right.end("acme", "r", ANSWER)
    assert await rig.left.find("acme", "r") == StoredResponse(BEGUN, ANSWER)
    assert not await rig.left.is_open("acme", "r")


async def test_a_whole_response_is_kept_once(rig: Rig) -> None:
    assert await rig.left.keep("acme", "r", BEGUN, ANSWER)
    assert await rig.right.keep("acme", "r", BEGUN, ResponseAnswer(b"other", b"[]")), "a replay of the key"
    assert await rig.right.find("acme", "r") == StoredResponse(BEGUN, ANSWER)


async def test_another_tenants_response_is_not_found_and_not_touched(rig: Rig) -> None:
    await rig.left.keep("acme", "r", BEGUN, ANSWER)
    assert await rig.left.find("evil", "r") is None
    assert not await rig.left.delete("evil", "r")
    assert not await rig.left.end("evil", "r", ANSWER)
    assert await rig.left.find("evil", "r") is None
    assert await rig.left.find("acme", "r") is not None
    assert rig.left.id_of_key("acme", "k") != rig.left.id_of_key("evil", "k")


async def test_of_many_beginnings_one_is_new_and_of_many_ends_one_counts(rig: Rig) -> None:
    stores = (rig.left, rig.right) * 10
    found = await asyncio.gather(*(store.begin("acme", "r", BEGUN) for store in stores))
    assert sorted(each is None for each in found) == [False] * 19 + [True]
    answers = [ResponseAnswer(b"%d" % number, b"[]") for number in range(20)]
    ended = await asyncio.gather(*(s.end("acme", "r", a) for s, a in zip(stores, answers, strict=True)))
    assert ended.count(True) == 1
    stored = await rig.left.find("acme", "r")
    assert stored is not None
    assert stored.answer == answers[ended.index(True)], "the first stays"


async def test_a_deleted_response_has_no_end(rig: Rig) -> None:
    await rig.left.begin("acme", "r", BEGUN)
    assert await rig.right.delete("acme", "r")
    assert not await rig.left.is_open("acme", "r")
    assert not await rig.left.end("acme", "r", ANSWER)
    assert await rig.left.find("acme", "r") is None
    assert not await rig.left.delete("acme", "r"), "the late end left nothing"


async def test_a_response_expires(rig: Rig) -> None:
    await rig.left.keep("acme", "r", BEGUN, ANSWER)
    rig.clock.now_s += RETENTION_S - 1
    assert await rig.left.find("acme", "r") is not None
    rig.clock.now_s += 2
    assert await rig.left.find("acme", "r") is None


async def test_what_is_too_large_or_too_many_is_refused(rig: Rig) -> None:
    with pytest.raises(InvalidInput) as large:
        await rig.left.begin("acme", "r", BegunResponse("r", "m", "", True, b"", b"x" * MAX_BEGIN_BYTES))
    assert large.value.metadata["field"] == "store"
    full = Rig(max_tenant_keys=1)
    await full.left.keep("acme", "r", BEGUN, ANSWER)
    with pytest.raises(OverQuota, match="1 responses of this tenant are stored"):
        await full.left.begin("acme", "other", BEGUN)
    assert not await full.left.keep("acme", "other", BEGUN, ANSWER)


async def test_the_oldest_give_room(rig: Rig) -> None:
    small = Rig(max_tenant_bytes=4000)
    large = BegunResponse("req_1", "m", "", True, b"", b"x" * 1500)
    for name in ("a", "b", "c"):
        assert await small.left.keep("acme", name, large, ANSWER)
        small.clock.now_s += 1
    found = [await small.left.find("acme", name) is not None for name in ("a", "b", "c")]
    assert found == [False, True, True]


async def test_what_has_no_room_is_refused_and_leaves_nothing() -> None:
    small = Rig(max_tenant_bytes=2000)
    large = BegunResponse("req_1", "m", "", True, b"", b"x" * 3000)
    with pytest.raises(OverQuota, match="no room to store 3"):
        await small.left.begin("acme", "r", large)
    assert not await small.left.delete("acme", "r")
    assert await small.left.begin("acme", "r", BEGUN) is None


async def test_an_answer_without_room_leaves_its_response_to_a_smaller_one() -> None:
    small = Rig(max_record_bytes=2000)
    await small.left.begin("acme", "r", BEGUN)
    with pytest.raises(OverQuota, match="answer has 3"):
        await small.left.end("acme", "r", ResponseAnswer(b"x" * 3000, b"[]"))
    assert await small.right.is_open("acme", "r")
    assert await small.left.end("acme", "r", ANSWER)
    assert await small.right.find("acme", "r") == StoredResponse(BEGUN, ANSWER)


async def test_one_that_runs_makes_no_room_and_ends_in_any_case() -> None:
    small = Rig(max_tenant_bytes=4000)
    large = BegunResponse("req_1", "m", "", True, b"", b"x" * 1500)
    await small.left.begin("acme", "open", large)
    for name in ("a", "b"):
        small.clock.now_s += 1
        await small.left.keep("acme", name, large, ANSWER)
    assert await small.left.find("acme", "a") is None
    await small.left.begin("acme", "other", large)
    assert await small.left.find("acme", "b") is None
    with pytest.raises(OverQuota, match="beside the tenant's others that run in the background") as caught:
        await small.left.begin("acme", "third", large)
    assert caught.value.retry_after_s
    assert not await small.left.delete("acme", "third")
    assert await small.right.end("acme", "open", ResponseAnswer(b"y" * 3000, b"[]"))
    found = await small.left.find("acme", "open")
    assert found is not None
    assert found.answer is not None
    assert await small.left.is_open("acme", "other")
    assert await small.left.begin("acme", "third", BEGUN) is None, "ended ones make room"
    assert await small.left.find("acme", "open") is None


async def test_a_run_that_cannot_go_on_any_more_makes_room() -> None:
    small = Rig(max_tenant_bytes=2000)
    large = BegunResponse("req_1", "m", "", True, b"", b"x" * 1500)
    await small.left.begin("acme", "lost", large)
    small.clock.now_s += OPEN_S - 1
    with pytest.raises(OverQuota):
        await small.left.begin("acme", "next", large)
    small.clock.now_s += 1
    assert await small.left.begin("acme", "next", large) is None


async def test_a_response_that_made_room_does_not_begin_again() -> None:
    small = Rig(max_tenant_bytes=4000)
    large = BegunResponse("req_1", "m", "", True, b"", b"x" * 3000)
    for name in ("a", "b"):
        await small.left.keep("acme", name, large, ANSWER)
    with pytest.raises(ResultExpired):
        await small.left.begin("acme", "a", BEGUN)
