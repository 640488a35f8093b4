"""A prompt is as long as what is left to compute of it: a cached one takes no long prompt's place."""

from __future__ import annotations

import pytest

from services.core.prefix import prefix_chain
from services.worker.engine.plan.planner import Planner, PlannerLimits
from services.worker.engine.sequence import SequenceState, Status
from simulator.engine.sim_engine import SimKvPool
from simulator.engine.sim_executor import SimIntake
from simulator.engine.tokens import SimVocabulary
from tests.support.submits import make_submit

PROMPT_TOKENS = 5000
PREFIX_BLOCKS = PROMPT_TOKENS // 64 * 4  # of KV


class Bench:
    """A planner with one place for a long prefill, which is taken; a prompt of 5,000 tokens is cached."""

    def __init__(self, blocks: int = 2000) -> None:
        self.pool = SimKvPool(blocks, 16)
        self.intake = SimIntake(SimVocabulary(101), None)
        limits = PlannerLimits(token_budget=512, max_sequences=8, max_long_prefills=1)
        self.planner = Planner(self.pool, limits, reuse=self.pool)
        earlier = self.sequence(0, PROMPT_TOKENS, root=1)
        earlier.blocks = self.pool.allocate(self.pool.blocks_for(PROMPT_TOKENS))
        earlier.computed = PROMPT_TOKENS
        self.pool.publish(earlier)
        self.pool.release(earlier.blocks)
        self.long = self.sequence(1, 8000, root=2)
        self.planner.add(self.long)
        self.planner.plan()

    def sequence(self, handle: int, tokens: int, *, root: int) -> SequenceState:
        ids = [index % 97 for index in range(tokens)]
        names = list(prefix_chain(root, ids))
        command = make_submit(handle, ids, 9, seed=1, prefix_hashes=names, prefix_root=root)
        return self.intake.sequence(command, arrival=handle, eos_ids=frozenset())


@pytest.mark.parametrize("first", ["long", "cached"])
def test_a_cached_prompt_passes_long_ones_that_wait_for_their_place(first: str) -> None:
    bench = Bench()
    cached, long = bench.sequence(2, PROMPT_TOKENS, root=1), bench.sequence(3, PROMPT_TOKENS, root=3)
    for sequence in (long, cached) if first == "long" else (cached, long):
        bench.planner.add(sequence)
    batch, _ = bench.planner.plan()
    assert (cached.status, long.status) == (Status.PREFILLING, Status.WAITING)
    assert any(chunk.sequence is cached and chunk.end == PROMPT_TOKENS for chunk in batch.prefills)
    bench.planner.check_integrity()


def test_one_whose_prefix_is_evicted_while_it_waits_is_long_again() -> None:
    bench = Bench()
    others = bench.pool.allocate(bench.pool.blocks_free - PREFIX_BLOCKS)
    cached = bench.sequence(2, PROMPT_TOKENS, root=1)
    bench.planner.add(cached)
    bench.planner.plan()
    assert cached.status is Status.WAITING, "it lacks a block"
    others += bench.pool.allocate(PREFIX_BLOCKS)
    bench.pool.release(others)
    bench.planner.plan()
    assert cached.status is Status.WAITING, "the long prompt's place is taken"
    bench.planner.check_integrity()
    bench.planner.remove(bench.long)
    bench.planner.plan()
    assert (bench.planner.running, bench.planner.waiting) == (1, 0)
    bench.planner.check_integrity()
