"""A worker takes what a gateway placed by itself only while nobody leads, and within its credit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.core.generation import FallbackGrant, NotAdmittedReason, StartSpec
from services.worker.agent.report import WorkerIdentity, take_snapshot
from services.worker.streams.admission import FallbackAdmission, FallbackRules
from tests.unit.worker.bench import DIGEST, Bench
from tests.unit.worker.reader import Reader
from tests.unit.worker.streams.test_sequences import A

AFTER_S = 1.5


class Alone:
    """A bench of 10 blocks whose worker takes fallback placements, 4 blocks of them."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.started = 0
        rules = FallbackRules(after_s=AFTER_S, credit_ratio=0.45)
        bench.host._fallback = FallbackAdmission(bench.clock, rules, started=self._count)
        self.reader = Reader(bench)
        bench.host.on_leader(3)

    def _count(self) -> None:
        self.started += 1

    def spec(self, *, blocks: int = 2, **fields: Any) -> StartSpec:
        spec = self.bench.spec(blocks=blocks)
        values: dict[str, Any] = {
            "worker_id": "",
            "address": "",
            "incarnation": 5,
            "last_epoch": 3,
            "kv_blocks": blocks,
            "version_digest": DIGEST,
        }
        return replace(spec, grant=FallbackGrant(**{**values, **fields}))

    def wait(self, seconds: float) -> None:
        self.bench.clock.now_s += seconds
        self.bench.table.reset_silence()


@pytest.fixture
def alone(bench: Bench) -> Alone:
    return Alone(bench)


def test_a_worker_without_the_rule_takes_none(bench: Bench) -> None:
    alone = Alone(bench)
    bench.host._fallback = None
    alone.wait(100.0)
    alone.reader.stream.start(1, alone.spec())
    alone.reader.read()
    assert alone.reader.refused == {1: NotAdmittedReason.NO_FALLBACK}


def test_it_is_taken_only_after_no_leader_was_heard_for_a_while(alone: Alone) -> None:
    stream = alone.reader.stream
    alone.wait(AFTER_S - 0.01)
    stream.start(1, alone.spec())
    alone.bench.host.on_leader(3)
    alone.wait(AFTER_S - 0.01)
    stream.start(2, alone.spec())
    alone.wait(0.02)
    stream.start(3, alone.spec())
    alone.reader.read()
    assert alone.reader.refused == dict.fromkeys((1, 2), NotAdmittedReason.NO_FALLBACK)
    assert (alone.reader.accepted, alone.started) == ([3], 1)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"incarnation": 4}, NotAdmittedReason.STALE_INCARNATION),
        ({"last_epoch": 2}, NotAdmittedReason.STALE_EPOCH),
        ({"version_digest": "sha256:other"}, NotAdmittedReason.NOT_READY),
        ({"last_epoch": 4}, None),
    ],
)
def test_what_is_not_meant_for_this_life_is_refused(
    alone: Alone, fields: dict[str, Any], reason: NotAdmittedReason | None
) -> None:
    alone.wait(AFTER_S)
    alone.reader.stream.start(1, alone.spec(**fields))
    alone.reader.read()
    assert alone.reader.refused.get(1) == reason
    assert alone.started == (reason is None)


def test_the_credit_is_fixed_and_comes_back_with_the_ends(alone: Alone) -> None:
    stream, bench = alone.reader.stream, alone.bench
    alone.wait(AFTER_S)
    stream.start(1, alone.spec(blocks=3))
    stream.start(2, alone.spec(blocks=2))
    stream.start(3, alone.spec(blocks=1))
    alone.reader.read()
    assert alone.reader.refused == {2: NotAdmittedReason.NO_FALLBACK}
    assert bench.table.kv.fallback_blocks == 4
    stream.start(4, bench.spec(blocks=6))  # a leader's grant still finds the rest
    bench.stepped({1: A}, finished={1: "length"})
    stream.start(5, alone.spec(blocks=3))
    alone.reader.read()
    assert alone.reader.accepted == [1, 3, 4, 5]


def test_what_outgrows_its_grant_counts_against_the_credit(alone: Alone) -> None:
    alone.wait(AFTER_S)
    alone.reader.stream.start(1, alone.spec(blocks=1))
    bench = alone.bench
    for _ in range(17):
        bench.stepped({1: A})
    assert bench.table.kv.fallback_blocks == 3


def test_a_leader_that_comes_counts_what_runs(alone: Alone) -> None:
    bench = alone.bench
    alone.wait(AFTER_S)
    alone.reader.stream.start(1, alone.spec(blocks=3))
    bench.stepped({1: A})
    bench.host.on_leader(9)
    report = take_snapshot(bench.host, WorkerIdentity("w1", "a:1"), whole=True)
    assert (report.epoch, report.grants_seen) == (9, ())
    assert report.pools[0].kv_blocks_reserved == 3
    assert [(live.request_id, live.kv_blocks, live.placed_alone) for live in report.live] == [("r1", 3, True)]
    assert [(use.tenant, use.prefill, use.output) for use in report.tenants] == [("t1", 16, 1)]
    bench.stepped({1: A}, finished={1: "length"})
    after = take_snapshot(bench.host, WorkerIdentity("w1", "a:1"), whole=False)
    assert [(use.tenant, use.prefill, use.output) for use in after.tenants] == [("t1", 0, 1)]
    assert [(use.request_id, use.output_tokens, use.ended) for use in after.usage] == [("r1", 2, True)]


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_in_any_order_the_credit_holds(bench_factory: Callable[[], Bench], data: st.DataObject) -> None:
    alone = Alone(bench_factory())
    bench, stream = alone.bench, alone.reader.stream
    for handle in range(1, data.draw(st.integers(1, 25))):
        numbers = [sequence.number for sequence in bench.table.sequences()]
        match data.draw(st.sampled_from(("alone", "granted", "wait", "lead", "step", "cancel"))):
            case "alone":
                before = bench.table.kv.fallback_blocks
                stream.start(handle, alone.spec(blocks=data.draw(st.integers(1, 4))))
                assert bench.table.kv.fallback_blocks in (before, *range(before + 1, 5))
            case "granted":
                stream.start(handle, bench.spec(blocks=data.draw(st.integers(1, 4))))
            case "wait":
                alone.wait(data.draw(st.sampled_from((0.5, 2.0))))
            case "lead":
                bench.host.on_leader(3)
            case "step" if numbers:
                number = data.draw(st.sampled_from(numbers))
                bench.stepped({number: A}, finished={number: "length"} if data.draw(st.booleans()) else None)
            case "cancel" if numbers:
                stream.cancel([sequence.handle for sequence in bench.table.sequences()][:1])
        bench.host.check_integrity()
    stream.close()
    assert (bench.table.kv.blocks, bench.table.kv.fallback_blocks) == (0, 0)


@pytest.mark.parametrize("placed_alone", [True, False])
def test_the_last_word_says_who_placed_it(alone: Alone, placed_alone: bool) -> None:
    """It may be all that a leader ever hears of the sequence."""
    alone.wait(AFTER_S)
    spec = alone.spec() if placed_alone else alone.bench.spec(blocks=2)
    alone.reader.stream.start(1, spec)
    alone.bench.stepped({1: A}, finished={1: "length"})
    snapshot = take_snapshot(alone.bench.host, WorkerIdentity("w1", "w1:1"), whole=True)
    assert snapshot.live == ()
    (last,) = snapshot.usage
    assert (last.ended, last.placed_alone) == (True, placed_alone)
    assert last.priority == spec.generation.priority
