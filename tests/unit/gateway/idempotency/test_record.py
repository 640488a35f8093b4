"""A request wrapped by its record: whatever ends it, the record ends or is released with its settlement."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from services.core.errors import Draining, RequestCancelled
from services.core.usage import RequestUsage
from services.gateway.idempotency.ownership import RecordOwnership
from services.gateway.idempotency.record import KeyedRecord
from services.gateway.idempotency.record_codec import terms_of
from services.gateway.idempotency.record_reader import EarlierRun
from services.gateway.requests.request import Admit, Request, RequestWork
from services.ports.idempotency import Owned, RecordKey
from simulator.stores.idempotency import MemoryIdempotency
from tests.support.waiting import until
from tests.unit.gateway.idempotency.test_ownership import CLOCK, PORTS
from tests.unit.gateway.requests.test_request import Harness, Sink, emit

KEY = RecordKey("acme", "2" * 32)


@pytest.mark.parametrize("by_its_task", [False, True])
async def test_a_request_that_is_cut_releases_its_record_with_its_settlement(by_its_task: bool) -> None:
    """Another gateway claims the record at once, behind what was produced, and the usage counts once."""
    harness, client, reported = Harness(emit(2, None)), Sink(), list[RequestUsage]()
    store = MemoryIdempotency(CLOCK, harness.limiter)
    ports = replace(PORTS, store=store, limiter=harness.limiter, report_usage=reported.append)
    entered: set[Request] = set()

    def launch(ownership: RecordOwnership, earlier: EarlierRun | None) -> tuple[Request, Admit]:
        assert earlier is None
        harness.sink = ownership  # type: ignore[assignment]
        harness.terms = replace(harness.terms, settlement=ownership)
        harness.use(harness.ports)

        async def admit() -> RequestWork:
            await ownership.accept(terms_of(harness.spec, (), 1.0))
            return await harness.admit()

        return harness.request, admit

    def enter(_: str, request: Request) -> object:
        entered.add(request)
        return lambda: entered.remove(request)

    record = KeyedRecord(KEY, "body", ports, launch, enter, lambda follower: None)  # type: ignore[arg-type]
    record.join(client, None, None, first=True)
    task = asyncio.create_task(record.serve())
    record.start(task)
    await until(lambda: client.tokens.get(0) == [100, 101])
    assert entered == {harness.request}
    if by_its_task:
        task.cancel()
    else:
        record.stop(Draining("this gateway is shutting down"))
    await asyncio.wait([task])
    assert task.cancelled() == by_its_task
    assert isinstance(client.end, RequestCancelled if by_its_task else Draining)
    claim = await store.claim(KEY, "body", "another")
    assert isinstance(claim, Owned)
    assert claim.chunks > 0
    assert [event.usage.output_tokens for event in reported] == [2]
    assert not entered
    assert await harness.limiter.concurrency("acme") == 0
