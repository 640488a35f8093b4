"""Blocks that several sequences share: what counts how often, what is free, and what the leader is told."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from prometheus_client import generate_latest

from services.core.generation import NotAdmittedReason, Prompt, StartSpec
from services.runtime.telemetry.metrics import Metrics
from services.worker.streams.kv import PrefixSet, SharedBlocks
from services.worker.telemetry import WorkerTelemetry
from tests.support.metrics import values
from tests.unit.worker.agent.test_report import report, step
from tests.unit.worker.bench import Bench
from tests.unit.worker.reader import Reader
from tests.unit.worker.streams.test_sequences import A


@pytest.fixture
def reader(bench: Bench) -> Reader:
    return Reader(bench)


def alike(bench: Bench, *names: int, blocks: int = 5, prompt: int = 66) -> StartSpec:
    """Five blocks of the pool's ten, four of which hold the prefix block ``names`` begin with."""
    spec = bench.spec(prompt=prompt, blocks=blocks)
    return replace(
        spec,
        generation=replace(spec.generation, prompt=Prompt(spec.generation.prompt.ids, names or (7,), 1)),
    )


def two_alike(bench: Bench, reader: Reader) -> None:
    """The first computed the prefix, the second found it."""
    reader.stream.start(1, alike(bench))
    step(bench, {1: A}, prefix_added=[7], cached={1: 0})
    reader.stream.start(2, alike(bench))


def test_a_prefix_counts_once_however_many_refer_to_it(bench: Bench, reader: Reader) -> None:
    two_alike(bench, reader)
    assert bench.table.kv.blocks == 6
    for handle in (3, 4, 5, 6):
        reader.stream.start(handle, alike(bench))
    assert bench.table.kv.blocks == 10
    reader.stream.start(7, alike(bench))
    reader.read()
    assert reader.refused == {7: NotAdmittedReason.NO_ROOM}
    bench.host.check_integrity()
    reader.stream.cancel([1, 2, 3, 4, 5])
    assert bench.table.kv.blocks == 5, "the last one needs all of it"
    bench.host.check_integrity()


def test_those_that_computed_one_prefix_at_a_time_share_it_from_their_first_tokens_on(
    bench: Bench, reader: Reader
) -> None:
    reader.stream.start(1, alike(bench))
    reader.stream.start(2, alike(bench))
    step(bench, {}, prefill_tokens=64, cached={1: 0, 2: 0})
    assert bench.table.kv.blocks == 10
    step(bench, {1: A, 2: A}, prefix_added=[7])
    assert bench.table.kv.blocks == 6


def test_what_is_cached_is_free_until_somebody_refers_to_it(bench: Bench, reader: Reader) -> None:
    step(bench, {}, prefix_added=[7])
    assert bench.table.kv.blocks == 0
    reader.stream.start(1, alike(bench))
    assert bench.table.kv.blocks == 5
    reader.stream.cancel([1])
    assert bench.table.kv.blocks == 0
    reader.stream.start(2, bench.spec(prompt=16, blocks=6))
    reader.stream.start(3, alike(bench))
    reader.read()
    assert (reader.accepted, reader.refused) == ([2], {3: NotAdmittedReason.NO_ROOM})


def test_a_sequence_that_finds_nothing_grows_to_its_need(bench: Bench, reader: Reader) -> None:
    two_alike(bench, reader)
    before = bench.changes
    step(bench, {}, cached={2: 0})
    assert (bench.table.kv.blocks, bench.table.kv.lost_blocks) == (10, 4)
    assert bench.changes > before, "the room says so"
    step(bench, {2: A})
    assert bench.table.kv.blocks == 6, "what it computed is one with what is cached"


def test_operators_see_what_was_taken_to_be_shared_and_was_not(bench: Bench, reader: Reader) -> None:
    """Each once: found missing by the engine, or evicted before."""
    metrics = Metrics()
    bench.table._telemetry = WorkerTelemetry(metrics, clock=bench.clock).version("chat")

    def lost() -> dict[tuple[tuple[str, str], ...], float]:
        text = generate_latest(metrics.registry).decode()
        return values(text, "fairway_worker_shared_blocks_lost_total")

    assert lost() == {(("model", "chat"),): 0.0}
    two_alike(bench, reader)
    step(bench, {}, cached={2: 0})
    step(bench, {2: A})
    assert lost() == {(("model", "chat"),): 4.0}
    reader.stream.start(3, alike(bench))
    step(bench, {1: A}, prefix_removed=[7])
    lost_blocks = bench.table.kv.lost_blocks
    assert lost_blocks > 4
    step(bench, {1: A})
    assert lost() == {(("model", "chat"),): float(lost_blocks)}


def test_an_evicted_prefix_is_nobodys(bench: Bench, reader: Reader) -> None:
    step(bench, {}, prefix_added=[7])
    for handle in (1, 2, 3):
        reader.stream.start(handle, alike(bench))
    assert bench.table.kv.blocks == 7
    before = bench.changes
    step(bench, {}, prefix_removed=[7])
    assert bench.table.kv.blocks == 15, "more than there is: the engine lets them wait"
    assert bench.changes > before, "the room says so"
    reader.stream.start(4, bench.spec(prompt=16, blocks=1))
    reader.read()
    assert reader.refused == {4: NotAdmittedReason.NO_ROOM}


def test_of_a_chain_what_comes_before_the_evicted_block_stays(bench: Bench, reader: Reader) -> None:
    step(bench, {}, prefix_added=[7, 8])
    for handle in (1, 2):
        reader.stream.start(handle, alike(bench, 7, 8, blocks=1, prompt=129))
    assert bench.table.kv.blocks == 8 + 1 + 1
    step(bench, {}, prefix_removed=[8])
    assert bench.table.kv.blocks == 4 + 5 + 5


def test_the_last_token_is_always_computed(bench: Bench, reader: Reader) -> None:
    step(bench, {}, prefix_added=[7])
    reader.stream.start(1, alike(bench, 7, prompt=64))
    reader.stream.start(2, alike(bench, 7, prompt=64))
    assert bench.table.kv.blocks == 10


def test_the_engine_says_what_a_sequence_refers_to(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, alike(bench, 7, 8, blocks=9, prompt=130))
    step(bench, {}, cached={1: 64, 99: 64})
    assert [sequence.shared_prefixes for sequence in bench.table.sequences()] == [1]
    step(bench, {}, cached={1: 4096})
    assert [sequence.shared_prefixes for sequence in bench.table.sequences()] == [2]


def test_without_a_cache_each_counts_whole(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, alike(bench))
    reader.stream.start(2, alike(bench))
    step(bench, {1: A, 2: A})
    assert bench.table.kv.blocks == 10
    assert (len(bench.table.kv.shared.reported), bench.table.kv.shared.blocks) == (0, 0)


def test_the_leader_is_told_of_what_more_than_one_had_use_of(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, alike(bench))
    step(bench, {1: A}, prefix_added=[7])
    assert report(bench, whole=True).pools[0].prefix_shared == (), "so far it is of use to one"
    reader.stream.start(2, alike(bench))
    pool = report(bench).pools[0]
    assert (pool.prefix_shared, pool.kv_blocks_reserved) == ((7,), 6)
    reader.stream.cancel([1])
    pool = report(bench).pools[0]
    assert (pool.prefix_shared, pool.prefix_unshared, pool.kv_blocks_reserved) == ((), (), 5)
    reader.stream.cancel([2])
    pool = report(bench).pools[0]
    assert (pool.prefix_unshared, pool.kv_blocks_reserved) == ((7,), 0)
    reader.stream.start(3, alike(bench))
    assert report(bench).pools[0].prefix_shared == (7,), "it is known to be of use"
    assert report(bench, whole=True).pools[0].prefix_shared == (7,)
    reader.stream.cancel([3])
    step(bench, {}, prefix_removed=[7])
    step(bench, {}, prefix_added=[7])
    report(bench)
    reader.stream.start(4, alike(bench))
    assert report(bench).pools[0].prefix_shared == (), "evicted, it begins anew"


def test_what_a_lost_engine_shared_is_taken_back(bench: Bench, reader: Reader) -> None:
    two_alike(bench, reader)
    report(bench, whole=True)
    bench.restart()
    assert report(bench).pools[0].prefix_unshared == (7,)


def test_blocks_that_do_not_divide_a_prefix_block_are_not_shared() -> None:
    cached = PrefixSet()
    cached.change([1, 2], [])
    assert SharedBlocks(48, cached).reach((1, 2), 1000) == 0
    assert SharedBlocks(64, cached).reach((1, 2), 1000) == 2


def test_references_are_those_of_a_plain_count() -> None:
    rng = Random(5)
    cached = PrefixSet()
    cached.change(range(1, 40), [])
    shared = SharedBlocks(16, cached, most=6)
    runs: list[tuple[int, ...]] = []
    known: set[int] = set()
    for _ in range(2000):
        if runs and rng.random() < 0.5:
            run = runs.pop(rng.randrange(len(runs)))
            shared.release(run)
        else:
            run = tuple(range(1, rng.randint(1, 6))) + tuple(
                range(10 * rng.randint(1, 3), 10 * rng.randint(1, 4))
            )
            shared.refer(run)
            runs.append(run)
        came, left = shared.reported.take(whole=False)
        assert not known & set(came)
        known = (known - set(left)) | set(came)
        assert known <= {name for run in runs for name in run}
        assert len(known) <= 6
        shared.check_integrity(runs)
        assert shared.blocks == 4 * len({name for run in runs for name in run})
