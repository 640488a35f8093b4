"""Usage is counted once: over an outage, a lost answer, a restart, an hour, a torn file and a full disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import pytest_asyncio
import redis.asyncio
from redis.asyncio import Redis
from structlog.testing import capture_logs

from services.adapters.quotas.gateway_limiter import GatewayLimiter
from services.adapters.quotas.settlement_spool import SettlementSpool
from services.adapters.redis.limiter import RedisLimiter
from services.core.errors import ConcurrencyExceeded, FailedPrecondition, StoreUnavailable, Unavailable
from services.core.generation import Usage
from services.core.limits import Claim, Limit, LimitKind, Scope
from services.ports.idempotency import IdempotencyStore
from services.ports.limiter import Reservation
from services.runtime.clock import SystemClock
from tests.chaos.proxy import Proxy, Rule
from tests.support.keyed_gateways import Fleet, gateways
from tests.support.local_servers import free_port
from tests.support.metered import METER, PRICE, MeteredLimiter, charged, limits
from tests.support.waiting import until

CLOCK = SystemClock()
NONE = limits()
KEEP_S = 0.3


def metered(reservation: Reservation) -> Reservation:
    """Return a reservation as its claims would be read from a spool."""
    admitted_us = round(CLOCK.unix_s() * 1e6)
    return replace(reservation, claims=(Claim(METER, 0),), price=PRICE, admitted_us=admitted_us)


class Gateway:
    """One life of a gateway's limiter, with its state folder."""

    def __init__(self, port: int, folder: Path, *, max_bytes: int = 1024**2) -> None:
        url = f"redis://127.0.0.1:{port}/0"
        self.shared = RedisLimiter(url, CLOCK, settled_keep_s=KEEP_S)
        self.spool = SettlementSpool(folder, max_bytes=max_bytes)
        self.limiter = GatewayLimiter(MeteredLimiter(self.shared), CLOCK, spool=self.spool)

    async def written(self) -> None:
        """The spool has nothing under way."""
        await until(lambda: self.spool._writing is None)

    async def reached(self) -> None:
        async with asyncio.timeout(10):
            while True:
                try:
                    await self.shared.connect()
                    return
                except StoreUnavailable:
                    await asyncio.sleep(0.05)

    async def close(self) -> None:
        await self.spool.close()
        await self.shared.close()


@pytest_asyncio.fixture
async def gateway(own_redis: Any, tmp_path: Path) -> AsyncIterator[Gateway]:
    gateway = Gateway(own_redis.port, tmp_path / "spool")
    yield gateway
    await gateway.close()


async def test_settlements_of_an_outage_survive_the_gateway_and_count_once(
    own_redis: Any, gateway: Gateway, tmp_path: Path
) -> None:
    held = [await gateway.limiter.admit("t", f"r{number}", NONE) for number in range(500)]
    own_redis.kill()
    await asyncio.gather(*(gateway.limiter.settle(each, Usage(2, 1)) for each in held))
    assert gateway.limiter.unsettled == 500
    await gateway.written()
    # The process is gone here without a farewell; another begins in its folder.
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "settlements.log").write_bytes((tmp_path / "spool" / "settlements.log").read_bytes())
    await asyncio.to_thread(own_redis.start)
    await gateway.reached()
    await gateway.limiter.renew([])
    assert await charged(gateway.shared, "t") == Usage(1000, 500)
    await asyncio.sleep(2 * KEEP_S)
    after = Gateway(own_redis.port, tmp_path / "copy")
    await after.limiter.recover()
    assert after.limiter.unsettled == 500
    await after.limiter.renew([])
    assert after.limiter.unsettled == 0
    assert await charged(after.shared, "t") == Usage(1000, 500), "counted once, also long after"
    await after.close()
    assert (tmp_path / "copy" / "settlements.log").read_bytes() == b""


async def test_a_settlement_whose_answer_was_lost_counts_once_long_after(
    own_redis: Any, tmp_path: Path
) -> None:
    """Redis counts it, and the answer never comes: the network swallows it."""
    proxy, port = Proxy(), free_port()
    listener = await proxy.listen("redis", port, own_redis.port)
    gateway = Gateway(port, tmp_path / "spool")
    direct = RedisLimiter(f"redis://127.0.0.1:{own_redis.port}/0", CLOCK, settled_keep_s=KEEP_S)
    try:
        held = await gateway.limiter.admit("t", "r", NONE)
        before = await gateway.limiter.admit("t", "before", NONE)
        await gateway.limiter.settle(before, Usage(1, 1))
        own_redis.freeze()
        settling = asyncio.ensure_future(gateway.limiter.settle(held, Usage(10, 5)))
        await asyncio.sleep(0.1)  # it is sent
        proxy.apply([Rule("*", "redis", "cut")])
        await settling
        own_redis.thaw()
        async with asyncio.timeout(30):
            while await charged(direct, "t") != Usage(11, 6):
                await asyncio.sleep(0.01)
        assert gateway.limiter.unsettled == 1
        await asyncio.sleep(2 * KEEP_S)  # an hour, where settlements are remembered for ten minutes
        proxy.apply([])
        await gateway.reached()
        await gateway.limiter.renew([])
        assert gateway.limiter.unsettled == 0
        assert await charged(direct, "t") == Usage(11, 6)
    finally:
        await gateway.close()
        await direct.close()
        listener.close()
        proxy.apply([Rule("*", "*", "cut")])


async def test_confirmed_settlements_are_forgotten(own_redis: Any, gateway: Gateway) -> None:
    for number in range(50):
        await gateway.limiter.settle(await gateway.limiter.admit("t", f"r{number}", NONE), Usage(1, 1))
    await gateway.limiter.renew([])
    await asyncio.sleep(2 * KEEP_S)
    await gateway.limiter.settle(await gateway.limiter.admit("t", "last", NONE), Usage(1, 1))
    async with redis.asyncio.Redis.from_url(f"redis://{own_redis.address}/0") as client:
        assert [key async for key in client.scan_iter("fw:{t}:request:*")] == [b"fw:{t}:request:last"]


@pytest.mark.parametrize("key", ["slots", "month_micros"])
async def test_settlements_that_fail_for_ever_hold_no_other_back(
    own_redis: Any, gateway: Gateway, key: str
) -> None:
    """More of them than are sent at once, of a tenant whose keys in the store are damaged."""
    limiter = gateway.limiter
    damaged = [await limiter.admit("damaged", f"r{number}", NONE) for number in range(300)]
    whole = [await limiter.admit("t", f"r{number}", NONE) for number in range(3)]
    own_redis.kill()
    for each in (*damaged, *whole):
        await limiter.settle(each, Usage(1, 1))
    await asyncio.to_thread(own_redis.start)
    await gateway.reached()
    async with Redis(port=own_redis.port) as store:
        await store.set(f"fw:{{damaged}}:{key}", "of another type")
    held = await limiter.admit("u", "r", limits(slots=1))
    for _ in range(3):
        await limiter.renew([])
        with pytest.raises(ConcurrencyExceeded):
            await limiter.admit("u", "another", limits(slots=1))
    await limiter.settle(held, Usage(1, 1))
    assert limiter.unsettled == 300
    assert (await charged(gateway.shared, "t")).output_tokens == 3
    async with Redis(port=own_redis.port) as store:
        await store.delete(f"fw:{{damaged}}:{key}")
    await limiter.renew([])
    assert limiter.unsettled == 0
    assert (await charged(gateway.shared, "damaged")).output_tokens == 300


async def test_a_full_spool_refuses_new_work_until_it_drains(own_redis: Any, tmp_path: Path) -> None:
    gateway = Gateway(own_redis.port, tmp_path / "spool", max_bytes=2000)
    try:
        held = [await gateway.limiter.admit("t", f"r{number}", NONE) for number in range(100)]
        own_redis.kill()
        for each in held:
            await gateway.limiter.settle(each, Usage(1, 1))
        with pytest.raises(Unavailable, match="as many settlements wait as may") as caught:
            await gateway.limiter.admit("t", "more", NONE)
        assert caught.value.retry_after_s
        assert "as many settlements wait as may" in gateway.limiter.problem(), "the gateway is not ready"
        assert gateway.limiter.unsettled == 100, "what ran is kept beyond the bound: none is dropped"
        await asyncio.to_thread(own_redis.start)
        await gateway.reached()
        await gateway.limiter.renew([])
        await gateway.written()
        assert gateway.limiter.problem() == ""
        assert not (await gateway.limiter.admit("t", "after", NONE)).local
        assert await charged(gateway.shared, "t") == Usage(100, 100)
    finally:
        await gateway.close()


async def test_one_tenants_settlements_leave_half_of_the_spool_to_others(
    own_redis: Any, tmp_path: Path
) -> None:
    gateway = Gateway(own_redis.port, tmp_path / "spool", max_bytes=4000)
    try:
        held = [await gateway.limiter.admit("t", f"r{number}", NONE) for number in range(100)]
        own_redis.kill()
        for number, each in enumerate(held):
            await gateway.limiter.settle(each, Usage(1, 1))
            await gateway.limiter.admit("other", f"o{number}", NONE)
            if gateway.spool.size_bytes >= 2000:
                break
        with pytest.raises(Unavailable, match="settlements are half of what may wait") as caught:
            await gateway.limiter.admit("t", "more", NONE)
        assert caught.value.retry_after_s
        assert gateway.spool.size_bytes < 2200
        await gateway.limiter.admit("other", "more", NONE)
    finally:
        await gateway.close()


async def test_a_disk_that_refuses_is_tried_again(own_redis: Any, gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("a file where the folder belongs")
    held = [await gateway.limiter.admit("t", f"r{number}", NONE) for number in range(3)]
    own_redis.kill()
    for each in held:
        await gateway.limiter.settle(each, Usage(1, 1))
    await gateway.written()
    with pytest.raises(Unavailable, match="the disk does not take settlements"):
        await gateway.limiter.admit("t", "more", NONE)
    (tmp_path / "spool").unlink()
    await asyncio.sleep(1.1)  # the breaker lets a call through
    await gateway.limiter.renew([])
    await gateway.written()
    assert (await gateway.limiter.admit("t", "more", NONE)).local
    assert len((tmp_path / "spool" / "settlements.log").read_bytes().splitlines()) >= 3


async def test_a_torn_line_costs_no_other(own_redis: Any, tmp_path: Path) -> None:
    first = Gateway(1, tmp_path / "spool")
    for number in range(3):
        await first.limiter.settle(metered(await first.limiter.admit("t", f"r{number}", NONE)), Usage(1, 1))
    await first.written()
    await first.close()
    path = tmp_path / "spool" / "settlements.log"
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0
    path.write_bytes(path.read_bytes()[:-7])
    second = Gateway(1, tmp_path / "spool")
    await second.limiter.recover()
    assert second.limiter.unsettled == 2
    await second.limiter.settle(metered(await second.limiter.admit("t", "r9", NONE)), Usage(1, 1))
    await second.close()
    third = Gateway(own_redis.port, tmp_path / "spool")
    await third.limiter.recover()
    await third.limiter.renew([])
    assert await charged(third.shared, "t") == Usage(3, 3)
    await third.close()


async def test_a_damaged_line_costs_no_other(tmp_path: Path) -> None:
    """A bit that flipped in a name is no UTF-8 any more; the gateway starts all the same."""
    (tmp_path / "spool").mkdir()
    good = b'["t","r1",false,[1,1,0],0,[[0,0,0],[]]]\n'
    (tmp_path / "spool" / "settlements.log").write_bytes(good.replace(b"r1", b"\xff1") + good)
    gateway = Gateway(1, tmp_path / "spool")
    await gateway.limiter.recover()
    assert gateway.limiter.unsettled == 1
    await gateway.close()


async def test_a_second_gateway_in_the_same_folder_does_not_start(tmp_path: Path) -> None:
    """It would rewrite the file without the first one's settlements."""
    first, second = Gateway(1, tmp_path / "spool"), Gateway(1, tmp_path / "spool")
    await first.limiter.recover()
    with pytest.raises(FailedPrecondition, match="give each gateway its own"):
        await second.limiter.recover()
    await first.close()
    await second.limiter.recover()
    await second.close()


async def test_what_was_settled_while_the_file_was_written_leaves_it_later(
    own_redis: Any, gateway: Gateway, tmp_path: Path
) -> None:
    """Else a restart more than a week later counts it again."""
    own_redis.kill()
    await gateway.limiter.settle(await gateway.limiter.admit("t", "r", NONE), Usage(1, 1))
    await gateway.written()
    await asyncio.to_thread(own_redis.start)
    await gateway.reached()
    slow = threading.Event()
    gateway.spool._thread.submit(slow.wait)
    own_redis.freeze()
    try:
        settling = asyncio.ensure_future(
            gateway.limiter.settle(await gateway.limiter.admit("t", "late", NONE), Usage(1, 1))
        )
        await settling
    finally:
        own_redis.thaw()
    await gateway.reached()
    await gateway.limiter.renew([])
    assert gateway.limiter.unsettled == 0
    slow.set()
    await gateway.written()
    await gateway.limiter.renew([])
    await gateway.written()
    assert (tmp_path / "spool" / "settlements.log").read_bytes() == b""


class EndsLost:
    """A store of records that takes no end while ``away``."""

    def __init__(self, store: IdempotencyStore) -> None:
        self._store = store
        self.away = True

    def __getattr__(self, name: str) -> Any:
        if name in ("finish", "release") and self.away:
            return self._refuse
        return getattr(self._store, name)

    async def _refuse(self, *_: Any) -> None:
        raise StoreUnavailable("no answer", retry_after_s=1.0)


async def test_the_usage_of_a_keyed_request_does_not_wait_for_its_record(redis_url: str) -> None:
    """The end of the record is kept in memory, and may be lost with the process; its usage is not."""
    lost: list[EndsLost] = []

    def wrap(store: IdempotencyStore) -> IdempotencyStore:
        lost.append(EndsLost(store))
        return cast(IdempotencyStore, lost[-1])

    fleet = Fleet()
    async with gateways(redis_url, fleet, 1, wrap=wrap) as (gateway,):
        answer = await gateway.ask("k")
        assert answer.finished is not None, answer.error
        assert await charged(gateway.limiter, fleet.tenant) == Usage(5, 20)
        assert await gateway.limiter.concurrency(fleet.tenant) == 0
        lost[0].away = False
        await gateway.at_rest()
        await until(lambda: not gateway.keyed._pending_ends)
        assert await charged(gateway.limiter, fleet.tenant) == Usage(5, 20), "counted once, by either way"


@pytest.mark.parametrize("seed", range(3))
async def test_flipped_bits_and_cuts_cost_one_line_and_change_none(tmp_path: Path, seed: int) -> None:
    rng, folder = Random(seed), tmp_path / "spool"
    spool = SettlementSpool(folder)
    await spool.load()
    # A user's name that looks like the end of a line is no end.
    users = [f"u{number}]\x1f{number:08x}" for number in range(12)]
    rows = [
        (
            Reservation("t", f"r{number}", claims=(Claim(Limit(LimitKind.TOKENS, 9, Scope.USER, user), 5),)),
            Usage(number, 3, 1),
        )
        for number, user in enumerate(users)
    ]
    for reservation, usage in rows:
        spool.add(reservation, usage)
    await spool.close()
    path = folder / "settlements.log"
    data = path.read_bytes()
    for number in range(130):
        copy = bytearray(data)
        if number < 100:
            copy[rng.randrange(len(copy))] ^= 1 << rng.randrange(8)
        else:
            del copy[rng.randrange(len(copy)) :]
        path.write_bytes(copy)
        damaged = SettlementSpool(folder)
        with capture_logs() as logs:
            found = await damaged.load()
        await damaged.close()
        assert [one for one in rows if one in found] == found
        assert damaged.lost >= len(rows) - len(found) or number >= 100
        if number < 100:
            assert len(found) >= len(rows) - 1
            assert any(log["event"] == "settlements.line_damaged" for log in logs) or found == rows
    assert path.with_suffix(".damaged").exists()


async def test_a_damaged_file_is_copied_once_and_starts_without_room_for_a_copy(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    good = b'["t","r1",false,[1,1,0],0,[[0,0,0],[]]]\n'
    data = good.replace(b"r1", b"\xff1") * 50 + good
    (folder / "settlements.log").write_bytes(data)
    (folder / "settlements.new").mkdir()  # no copy can be written
    spool = SettlementSpool(folder)
    with capture_logs() as logs:
        assert len(await spool.load()) == 1
    assert spool.lost == 50
    assert [log["event"] for log in logs] == ["settlements.line_damaged", "settlements.no_copy"]
    assert logs[0]["lines"] == 50
    await spool.close()
    (folder / "settlements.new").rmdir()
    again = SettlementSpool(folder)
    with capture_logs() as logs:
        assert len(await again.load()) == 1
    assert [log["event"] for log in logs] == ["settlements.line_damaged"]
    assert (folder / "settlements.damaged").read_bytes() == data
    await again.close()
