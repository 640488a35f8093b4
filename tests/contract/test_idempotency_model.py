"""Random lives of records, on both stores, against a model of a few lines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from services.adapters.record_cipher import OVERHEAD_BYTES
from services.core.generation import Usage
from services.ports.idempotency import (
    Addition,
    Ended,
    Expired,
    Hold,
    OtherBody,
    Owned,
    RecordLimits,
    RecordState,
    Running,
    Written,
)
from tests.support.idempotency import Bench, encrypted, memory_bench, redis_bench
from tests.support.metered import admit_metered, charged


def limits_of(overhead: int) -> RecordLimits:
    return RecordLimits(lease_s=1e3, body_s=1e6, tombstone_s=1e9, max_record_bytes=6 + 4 * overhead)


NAMES = st.sampled_from(["k", "l"])
CHUNKS = st.sampled_from([b"", b"1", b"22"])


@dataclass
class Modelled:
    """What the port promises of one record. ``hold`` is of its one owner, None without a live claim."""

    fingerprint: str
    life: int
    hold: Hold | None
    lapsed: bool = False
    ended: bool = False
    dropped: bool = False
    chunks: list[bytes] = field(default_factory=list)
    written: int = 0  # chunks since its owner found what was there
    charged: int = 0

    @property
    def state(self) -> RecordState:
        if self.dropped or (self.ended and not self.chunks):
            return RecordState.EXPIRED
        if self.ended:
            return RecordState.ENDED
        return RecordState.RUNNING if self.hold is not None and not self.lapsed else RecordState.FREE


class Lives(RuleBasedStateMachine):
    url: ClassVar[str] = ""
    sealed: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.context = self._bench()
        bench: Bench = self.run(self.context.__aenter__())
        self.bench = encrypted(bench) if self.sealed else bench
        self.records: dict[str, Modelled] = {}
        self.holds: list[Hold] = []
        self.charged = 0
        self.slots: set[str] = set()

    def _bench(self) -> AbstractAsyncContextManager[Bench]:
        limits = limits_of(OVERHEAD_BYTES if self.sealed else 0)
        return redis_bench(self.url, limits) if self.url else memory_bench(limits)

    def run(self, work: Awaitable[Any]) -> Any:
        async def done() -> Any:
            return await work

        return self.runner.run(done())

    def teardown(self) -> None:
        self.run(self.context.__aexit__(None, None, None))
        self.runner.close()

    @rule(name=NAMES, fingerprint=st.sampled_from("fg"), owner=st.sampled_from("ab"))
    def claim(self, name: str, fingerprint: str, owner: str) -> None:
        found = self.run(self.bench.store.claim(self.bench.key(name), fingerprint, owner))
        record = self.records.get(name)
        if record is None:
            assert isinstance(found, Owned)
            assert found.chunks == 0
            self.records[name] = Modelled(fingerprint, len(self.holds), found.hold)
        elif record.fingerprint != fingerprint:
            assert found == OtherBody()
        elif record.state is RecordState.FREE:
            assert isinstance(found, Owned)
            assert found.chunks == len(record.chunks)
            record.hold, record.lapsed = found.hold, False
            record.written = len(record.chunks)
        else:
            expected = {
                RecordState.RUNNING: Running(),
                RecordState.ENDED: Ended(),
                RecordState.EXPIRED: Expired(),
            }
            assert found == expected[record.state]
        if isinstance(found, Owned):
            assert found.hold not in self.holds, "an epoch was given twice"
            self.holds.append(found.hold)

    @rule(data=st.data(), chunk=CHUNKS)
    def append(self, data: st.DataObject, chunk: bytes) -> None:
        if self.holds:
            hold = data.draw(st.sampled_from(self.holds))
            (found,) = self.run(self.bench.store.append([Addition(hold, chunk)]))
            record = self._held(hold, found)
            if record is not None:
                record.lapsed = False
                self._put(record, chunk, found)

    @rule(data=st.data(), chunk=CHUNKS, tokens=st.integers(0, 9), final=st.booleans())
    def end(self, data: st.DataObject, chunk: bytes, tokens: int, final: bool) -> None:
        if not self.holds:
            return
        hold = data.draw(st.sampled_from(self.holds))
        life = self.records[hold.key.digest].life if hold.key.digest in self.records else 0
        request_id = f"r-{hold.key.digest}-{life}"  # a record goes on with one request
        slot = self.run(admit_metered(self.bench.limiter, self.bench.tenant, request_id))
        self.slots.add(slot.request_id)
        write = self.bench.store.finish if final else self.bench.store.release
        found = self.run(write(hold, chunk, slot, Usage(0, tokens)))
        record = self._held(hold, found)
        if record is None:
            return
        self._put(record, chunk, found)
        self.slots.discard(slot.request_id)
        self.charged += max(0, tokens - record.charged)
        record.charged = max(tokens, record.charged)
        record.hold, record.ended = None, final
        if not final and not record.chunks and not record.dropped:
            del self.records[hold.key.digest]

    @rule()
    def leases_lapse(self) -> None:
        self.run(self.bench.lapse_leases())
        for record in self.records.values():
            record.lapsed = True

    @rule()
    def bodies_lapse(self) -> None:
        self.run(self.bench.lapse_bodies())
        for record in self.records.values():
            record.lapsed = True
            record.chunks.clear()

    def _held(self, hold: Hold, found: Written) -> Modelled | None:
        """Return the record if the hold is its owner's; check the refusal otherwise."""
        record = self.records.get(hold.key.digest)
        if record is None:
            assert found is Written.GONE
        elif record.hold != hold:
            assert found is Written.FENCED
        else:
            return record
        return None

    def _put(self, record: Modelled, chunk: bytes, found: Written) -> None:
        if chunk and not record.dropped:
            has_hole = record.written != len(record.chunks)
            size = sum(len(each) + self.bench.overhead for each in (*record.chunks, chunk))
            record.dropped = has_hole or size > self.bench.limits.max_record_bytes
        if record.dropped:
            record.chunks.clear()
            assert found is Written.TOO_LARGE
        else:
            record.chunks += [chunk] if chunk else []
            record.written += bool(chunk)
            assert found is Written.KEPT

    @invariant()
    def reads_are_as_modelled(self) -> None:
        for name in ("k", "l"):
            tail = self.run(self.bench.store.read(self.bench.key(name), 0, watch=False))
            record = self.records.get(name)
            assert tail.state is (RecordState.GONE if record is None else record.state)
            if record is not None and tail.state is not RecordState.EXPIRED:
                assert tail.chunks == tuple(record.chunks)

    @invariant()
    def every_token_is_charged_once(self) -> None:
        assert self.run(charged(self.bench.limiter, self.bench.tenant)) == Usage(0, self.charged)
        assert self.run(self.bench.limiter.concurrency(self.bench.tenant)) == len(self.slots)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("kind", ["redis", "memory"])
def test_lives_of_records(kind: str, sealed: bool, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue("redis_url") if kind == "redis" else ""
    machine = type("LivesOf", (Lives,), {"url": url, "sealed": sealed})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=15 if kind == "redis" else 40,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
