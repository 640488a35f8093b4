"""What a worker reports beyond its room: work done, usage by class, ends, prefixes, counters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from services.core.fleet import LONG_PROMPT_TOKENS, ReportSnapshot, SequenceUsage, TenantCounter, TenantTokens
from services.core.generation import FinishReason, StartSpec
from services.core.records import Priority
from services.worker import engine_protocol as wire
from services.worker.agent.report import WorkerIdentity, take_snapshot
from services.worker.policy.engine_failures import ABANDON_S
from services.worker.streams.charges import Tally
from services.worker.streams.host import FairnessCounters
from services.worker.streams.kv import PoolLimits
from services.worker.streams.sequences import CHARGE_S
from tests.unit.worker.bench import DIGEST, Bench
from tests.unit.worker.reader import Reader
from tests.unit.worker.streams.test_sequences import A, B

WHO = WorkerIdentity("w1", "a:1", "z", device_type="nvidia-h100", cost_per_hour=2.5)


def report(bench: Bench, *, whole: bool = False) -> ReportSnapshot:
    return take_snapshot(bench.host, WHO, whole=whole)


def step(bench: Bench, tokens: dict[int, int], **fields: Any) -> None:
    values: dict[str, Any] = {
        "step": bench.step + 1,
        "step_s": 0.25,
        "handles": list(tokens),
        "tokens": list(tokens.values()),
        "finished": {},
        "prefill_tokens": 0,
        "kv_blocks_used": 0,
        "running": 0,
        "waiting": 0,
    }
    bench.step += 1
    bench.table.on_stepped(wire.Stepped(**{**values, **fields}))
    bench.host.check_integrity()


def of_class(spec: StartSpec, priority: Priority) -> StartSpec:
    return replace(spec, generation=replace(spec.generation, priority=priority))


@pytest.fixture
def reader(bench: Bench) -> Reader:
    return Reader(bench)


def test_who_reports_is_said_each_time(bench: Bench) -> None:
    for whole in (True, False):
        found = report(bench, whole=whole)
        assert (found.worker_id, found.address, found.zone) == ("w1", "a:1", "z")
        assert (found.device_type, found.cost_per_hour) == ("nvidia-h100", 2.5)


def test_work_counts_since_the_engine_started(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(prompt=20))
    reader.stream.start(2, bench.spec(prompt=30))
    step(bench, {1: A}, prefill_tokens=20)
    step(bench, {1: A}, prefill_tokens=16, attended_tokens=21)
    step(bench, {1: A, 2: A}, prefill_tokens=14, attended_tokens=22)
    step(bench, {1: A, 2: B}, attended_tokens=54)
    (pool,) = report(bench).pools
    assert (pool.steps, pool.step_seconds) == (4, 1.0)
    assert (pool.prefill_tokens, pool.decode_tokens, pool.attended_tokens) == (50, 4, 97)
    assert report(bench).pools == (pool,), "levels do not depend on who read them"


@pytest.mark.parametrize("how", ["first token", "cancelled", "lost"])
def test_long_prompts_count_until_they_are_prefilled(bench: Bench, reader: Reader, how: str) -> None:
    limits = PoolLimits(kv_blocks_total=10_000, block_size=16, max_model_len=160_000, max_sequences=8)
    bench.restart(limits)
    for handle, prompt in enumerate((LONG_PROMPT_TOKENS - 1, LONG_PROMPT_TOKENS, LONG_PROMPT_TOKENS + 1), 1):
        reader.stream.start(handle, bench.spec(prompt=prompt, blocks=0))
    assert report(bench).pools[0].long_prefills == 2
    match how:
        case "first token":
            step(bench, {1: A, 2: A})
        case "cancelled":
            reader.stream.cancel([2])
        case "lost":
            step(bench, {3: A})
            bench.table.lost()
    assert report(bench).pools[0].long_prefills == (0 if how == "lost" else 1)


def test_a_long_prompt_that_is_mostly_cached_counts_no_more(bench: Bench, reader: Reader) -> None:
    limits = PoolLimits(kv_blocks_total=10_000, block_size=16, max_model_len=160_000, max_sequences=8)
    bench.restart(limits)
    for handle in (1, 2):
        reader.stream.start(handle, bench.spec(prompt=LONG_PROMPT_TOKENS + 64, blocks=0))
    step(bench, {}, cached={1: 64, 2: 128})
    assert report(bench).pools[0].long_prefills == 1
    step(bench, {1: A, 2: A})
    assert report(bench).pools[0].long_prefills == 0


def test_tokens_are_told_by_tenant_and_class(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, of_class(bench.spec(prompt=10, tenant="x"), Priority.BATCH))
    reader.stream.start(2, of_class(bench.spec(prompt=20, tenant="x"), Priority.INTERACTIVE))
    reader.stream.start(3, of_class(bench.spec(prompt=30, tenant="x"), Priority.INTERACTIVE))
    step(bench, {1: A, 2: A, 3: A}, cached={2: 16, 3: 16})
    step(bench, {1: A})
    bench.clock.now_s += CHARGE_S
    assert report(bench).tenants == (
        TenantTokens("x", DIGEST, 10, 2, Priority.BATCH),
        TenantTokens("x", DIGEST, 50, 2, Priority.INTERACTIVE, cached=32),
    )
    assert report(bench).tenants == ()


def test_what_runs_is_charged_now_and_then_and_what_ends_at_once(bench: Bench, reader: Reader) -> None:
    for number, tenant in ((1, "x"), (2, "y")):
        reader.stream.start(number, bench.spec(prompt=10, tenant=tenant))
    step(bench, {1: A, 2: A})
    assert report(bench).tenants == (TenantTokens("x", DIGEST, 10, 0), TenantTokens("y", DIGEST, 10, 0))
    step(bench, {1: A, 2: A}, finished={2: "length"})
    assert report(bench).tenants == (TenantTokens("y", DIGEST, 0, 2),), "what runs is not due yet"
    step(bench, {1: A})
    bench.clock.now_s += CHARGE_S
    assert report(bench).tenants == (TenantTokens("x", DIGEST, 0, 3),)
    step(bench, {1: A})
    assert report(bench, whole=True).tenants == (TenantTokens("x", DIGEST, 0, 1),), "a new leader is told all"


def test_what_is_cached_needs_no_prefill_and_is_told_to_the_client(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(prompt=40, blocks=3))
    assert bench.table.prefills.queued_tokens == 40
    step(bench, {}, cached={1: 32, 99: 5}, prefill_tokens=4)
    assert bench.table.prefills.queued_tokens == 8
    step(bench, {1: A}, prefill_tokens=4, finished={1: "length"})
    reader.read()
    assert reader.ends[1].cached_tokens == 32
    assert bench.table.prefills.queued_tokens == 0


def test_no_more_is_told_as_cached_than_the_prompt_has(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec(prompt=20, produced=(A,) * 12))
    step(bench, {1: A}, cached={1: 32}, finished={1: "length"})
    ((_, end),) = reader.take().finished
    assert end.cached_tokens == 20
    assert report(bench).tenants[0].cached == 32


@pytest.mark.parametrize(
    ("how", "ended"),
    [("stop", True), ("length", True), ("preempted", False), ("error", False), ("cancel", False)],
)
def test_each_sequence_that_is_gone_is_told_once(bench: Bench, reader: Reader, how: str, ended: bool) -> None:
    reader.stream.start(1, bench.spec(prompt=20, tenant="x"))
    step(bench, {1: A}, cached={1: 16})
    if how == "cancel":
        reader.stream.cancel([1])
    else:
        step(bench, {1: A}, finished={1: how})
    outputs = 1 if how == "cancel" else 2
    want = SequenceUsage("r1", 0, "x", DIGEST, 20, outputs, cached_tokens=16, ended=ended)
    assert report(bench).usage == (want,)
    assert report(bench).usage == ()


def test_sequences_of_a_lost_engine_have_not_ended(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec())
    bench.clock.now_s += ABANDON_S + 0.1
    bench.host.sweep(bench.clock.now_s)
    reader.read()
    assert reader.ends[1].reason is FinishReason.ENGINE_LOST
    assert [use.ended for use in report(bench).usage] == [False]


def test_ends_are_bounded_and_the_last_word_counts() -> None:
    tally = Tally(max_ended=2)
    words = [SequenceUsage(name, choice, "x", "d", 1, 1) for name, choice in (("a", 0), ("a", 1), ("b", 0))]
    for word in (*words[:2], replace(words[0], output_tokens=9)):
        tally.add_ended(word)
    tally.add_ended(words[2])
    assert tally.take_ended(1) == (replace(words[0], output_tokens=9),)
    assert tally.take_ended(5) == (words[2],)


def test_live_sequences_prefixes_and_counters_are_whole_on_a_new_stream_only(
    bench: Bench, reader: Reader
) -> None:
    counter = TenantCounter("x", DIGEST, Priority.STANDARD, 7.0)
    bench.host.counters.store([counter])
    reader.stream.start(1, bench.spec())
    step(bench, {1: A}, prefix_added=[5, 6])
    first, second = report(bench, whole=True), report(bench)
    assert [live.request_id for live in first.live] == ["r1"]
    assert (first.counters, first.pools[0].prefix_added) == ((counter,), (5, 6))
    assert (second.live, second.counters, second.pools[0].prefix_added) == ((), (), ())
    step(bench, {1: A}, prefix_added=[7], prefix_removed=[5])
    third, fourth = report(bench), report(bench, whole=True)
    assert (third.pools[0].prefix_added, third.pools[0].prefix_removed) == ((7,), (5,))
    assert (fourth.pools[0].prefix_added, fourth.counters) == ((6, 7), (counter,))


def test_an_engine_that_came_back_takes_the_prefixes_of_the_one_before_back(
    bench: Bench, reader: Reader
) -> None:
    step(bench, {}, prefix_added=[5, 6])
    report(bench, whole=True)
    bench.restart()
    (pool,) = report(bench).pools
    assert (pool.prefix_added, pool.prefix_removed, pool.steps) == ((), (5, 6), 0)


def test_counters_are_bounded_and_the_newest_word_stays() -> None:
    book = FairnessCounters(most=2)
    words = [TenantCounter(name, "d", Priority.STANDARD, 1.0) for name in ("a", "b", "c")]
    book.store(words[:2])
    newer = msgspec.structs.replace(words[0], virtual_tokens=5.0)
    book.store([newer, words[2]])
    assert book.all() == (newer, words[2])


def test_only_what_a_sequence_found_first_is_cached(bench: Bench, reader: Reader) -> None:
    """After a preemption it finds its own work: that is neither cheaper for the tenant nor a hit."""
    reader.stream.start(1, bench.spec(prompt=30, tenant="x"))
    step(bench, {}, cached={1: 0})
    step(bench, {1: A}, cached={1: 16})
    bench.clock.now_s += CHARGE_S
    assert [each.cached for each in report(bench).tenants] == [0]
