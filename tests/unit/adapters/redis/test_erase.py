"""Erasing the records of a tenant leaves those of others."""

from __future__ import annotations

from uuid import uuid4

import redis.asyncio

from services.adapters.redis.idempotency import RedisIdempotency
from services.core.generation import Usage
from services.ports.idempotency import Owned, RecordKey, RecordState
from services.runtime.clock import SystemClock


async def test_every_record_of_a_tenant_is_erased_and_none_of_another(redis_url: str) -> None:
    store = RedisIdempotency(redis_url, SystemClock(), timeout_s=5.0)
    mine, other = f"acme-{uuid4().hex}", f"other-{uuid4().hex}"
    for tenant, records in ((mine, 300), (other, 2)):
        for number in range(records):
            claim = await store.claim(RecordKey(tenant, f"{number:032x}"), "f", "g")
            assert isinstance(claim, Owned)
            if number % 2:
                await store.finish(claim.hold, b"chunk", None, Usage(0, 0))
    assert await store.erase(mine) == 300
    assert await store.erase(mine) == 0
    tail = await store.read(RecordKey(other, f"{1:032x}"), 0, watch=False)
    assert (tail.state, tail.chunks) == (RecordState.ENDED, (b"chunk",))
    client = redis.asyncio.Redis.from_url(redis_url)
    assert [name async for name in client.scan_iter(match=f"fw:{{{mine}}}:idem:*")] == []
    await client.aclose()
    await store.close()
