"""Planning, through the engine. Whatever is submitted, credited, cancelled, each step keeps the promises."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.engine.core import Engine
from services.worker.engine.execute.executor import Inline, Samples
from services.worker.engine.plan.block_manager import BlockManager
from services.worker.engine.plan.planner import PlannerLimits
from services.worker.engine.sequence import ModelLimits
from services.worker.engine_protocol import Cancel, Credit, Park
from services.worker.policy.prefill import PrefillBudget

COMMON = settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

operations = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(
            st.just("submit"),
            st.tuples(
                st.integers(1, 14),  # prompt
                st.integers(1, 10),  # max_tokens
                st.sampled_from([0, 1, 3, 1 << 30]),  # credit
                st.integers(0, 2),  # priority
                st.integers(0, 3),  # produced before
            ),
        ),
        st.tuples(st.just("credit"), st.tuples(st.integers(0, 30), st.integers(0, 12))),
        st.tuples(st.just("park"), st.integers(0, 30)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
    ),
    max_size=40,
)


class Ledger:
    """What the test knows of each handle, to hold against what the engine does."""

    def __init__(self, bench: Any, submit: Callable[..., Any], capacity: int) -> None:
        self.bench, self.submit, self.capacity = bench, submit, capacity
        self.limit: dict[int, int] = {}
        self.base: dict[int, int] = {}
        self.max_tokens: dict[int, int] = {}
        self.fits: dict[int, bool] = {}
        self.cancelled: set[int] = set()

    def apply(self, operation: tuple[str, Any]) -> None:
        kind, value = operation
        if kind == "step":
            for _ in range(value):
                if self.bench.engine.has_work:
                    self.step()
        elif kind == "submit":
            self._submit(*value)
        elif kind == "credit":
            handle, limit = value
            self.bench.engine.apply(Credit([handle], [limit]))
            if handle in self.limit:
                self.limit[handle] = max(self.limit[handle], limit)
        elif kind == "park":
            self.bench.engine.apply(Park([value]))
            if value in self.limit:  # what it makes from now on; it may have more than it is allowed
                made = self.base[value] + len(self.bench.tokens.get(value, []))
                self.limit[value] = min(self.limit[value], made + 1)
        else:
            self.bench.engine.apply(Cancel([value]))
            if value in self.limit and value not in self.bench.finished:
                self.cancelled.add(value)

    def _submit(self, prompt: int, max_tokens: int, credit: int, priority: int, produced: int) -> None:
        handle = len(self.limit)
        produced = min(produced, max_tokens)
        before = [self.bench.executor.token_of(handle, position) for position in range(produced)]
        self.limit[handle], self.base[handle], self.max_tokens[handle] = credit, produced, max_tokens
        self.fits[handle] = prompt + max_tokens <= self.capacity
        tokens = range(1, prompt + 1)
        self.bench.engine.apply(
            self.submit(handle, tokens, max_tokens, credit=credit, priority=priority, produced=before)
        )

    def step(self) -> None:
        self.bench.step()
        for handle, tokens in self.bench.tokens.items():
            base = self.base[handle]
            assert base + len(tokens) <= min(self.limit[handle], self.max_tokens[handle]), "past its credit"
            expected = [self.bench.executor.token_of(handle, base + i) for i in range(len(tokens))]
            assert tokens == expected, "a position was skipped or repeated"
        assert not self.cancelled & self.bench.finished.keys(), "an event for a cancelled sequence"

    def finish(self) -> None:
        handles = list(self.limit)
        self.bench.engine.apply(Credit(handles, [1 << 30] * len(handles)))
        self.limit = dict.fromkeys(handles, 1 << 30)
        for _ in range(3000):
            if not self.bench.engine.has_work:
                break
            self.step()
        assert set(handles) == self.cancelled | self.bench.finished.keys()
        for handle, reason in self.bench.finished.items():
            made = self.base[handle] + len(self.bench.tokens.get(handle, []))
            assert (reason == "error") == (not self.fits[handle])
            assert (reason == "length") == (made == self.max_tokens[handle] and self.fits[handle])
        assert self.bench.engine.heartbeat().kv_blocks_used == 0


@COMMON
@given(
    operations=operations,
    blocks=st.integers(3, 16),
    block_size=st.integers(1, 4),
    max_sequences=st.integers(1, 5),
    spare_budget=st.integers(0, 9),
)
def test_every_promise_holds(
    make_bench: Callable[..., Any],
    submit: Callable[..., Any],
    operations: list[tuple[str, Any]],
    blocks: int,
    block_size: int,
    max_sequences: int,
    spare_budget: int,
) -> None:
    """No leak, no overcommit, budget and credit respected, no token lost, everything finishes."""
    bench = make_bench(
        blocks=blocks,
        block_size=block_size,
        max_sequences=max_sequences,
        token_budget=max_sequences + spare_budget,
    )
    ledger = Ledger(bench, submit, blocks * block_size)
    for operation in operations:
        ledger.apply(operation)
        bench.engine.check_integrity()
    ledger.finish()


def test_decodes_come_first_and_prefill_is_cut_to_the_budget(make_bench: Any, submit: Any) -> None:
    bench = make_bench(token_budget=8, max_sequences=4)
    bench.engine.apply(submit(0, [1, 2], 10))
    assert bench.step().handles == [0]
    bench.engine.apply(submit(1, range(20), 2))
    chunks = []
    while 1 not in bench.tokens:
        event = bench.step()
        assert 0 in event.handles  # the stream is not held up by the long prompt
        chunks.append(event.prefill_tokens)
    assert chunks == [7, 7, 6]


def test_the_line_is_by_priority_then_arrival(make_bench: Any, submit: Any) -> None:
    bench = make_bench(max_sequences=1)
    for handle, priority in enumerate([1, 0, 1, 0]):
        bench.engine.apply(submit(handle, [1], 1, priority=priority))
    bench.run()
    assert list(bench.finished) == [1, 3, 0, 2]


def test_the_youngest_gives_way_and_the_oldest_does_not(make_bench: Any, submit: Any) -> None:
    bench = make_bench(blocks=6, block_size=2, max_sequences=3)
    for handle in range(3):
        bench.engine.apply(submit(handle, [1, 2], 8))
    bench.run()
    assert bench.finished[0] == "length"
    assert bench.executor.prefilled > 6  # something was computed again


def test_a_second_preemption_hands_the_sequence_back(make_bench: Any, submit: Any) -> None:
    bench = make_bench(blocks=8, block_size=1, max_sequences=4, token_budget=8)
    for handle in range(4):
        bench.engine.apply(submit(handle, [1], 7))
    bench.run()
    handed_back = [handle for handle, reason in bench.finished.items() if reason == "preempted"]
    assert handed_back
    assert 0 not in handed_back
    assert all(len(bench.tokens[handle]) < 7 for handle in handed_back)


def test_a_preempted_sequence_goes_before_new_ones(make_bench: Any, submit: Any) -> None:
    bench = make_bench(blocks=6, block_size=2, max_sequences=2, token_budget=8)
    bench.engine.apply(submit(0, [1, 2], 9))
    bench.engine.apply(submit(1, [1, 2], 8))
    bench.step()
    while bench.engine.heartbeat().waiting == 0:
        bench.step()
    bench.engine.apply(submit(2, [1], 2))  # there is room for this one at once
    while 2 not in (handles := bench.step().handles):
        assert bench.engine.has_work
    assert 1 in handles


def test_a_stalled_sequence_keeps_its_kv_and_costs_no_step(make_bench: Any, submit: Any) -> None:
    bench = make_bench()
    bench.engine.apply(submit(0, [1, 2], 6, credit=2))
    bench.run()
    assert len(bench.tokens[0]) == 2
    assert not bench.engine.has_work
    assert bench.engine.heartbeat().running == 1
    bench.engine.apply(Credit([0], [1]))  # credit never falls
    assert not bench.engine.has_work
    bench.engine.apply(Credit([0, 99], [6, 6]))
    bench.run()
    assert bench.finished == {0: "length"}
    assert bench.executor.prefilled == 2  # nothing was computed again


def test_a_slow_reader_gives_way_to_younger_streams(make_bench: Any, submit: Any) -> None:
    bench = make_bench(blocks=8, block_size=2, max_sequences=3, token_budget=16)
    bench.engine.apply(submit(0, range(6), 10, credit=3))
    bench.run()
    assert bench.engine.heartbeat().running == 1  # it holds five of the blocks and waits for its reader
    bench.engine.apply(submit(1, [1, 2], 12))
    bench.run()
    assert bench.finished == {1: "length"}
    bench.engine.apply(Credit([0], [10]))
    bench.run()
    assert bench.finished[0] == "length"
    assert len(bench.tokens[0]) == 10


def test_without_credit_nothing_starts(make_bench: Any, submit: Any) -> None:
    bench = make_bench()
    bench.engine.apply(submit(0, [1], 2, credit=0))
    bench.engine.apply(submit(1, [1], 2))
    bench.run()
    assert bench.finished == {1: "length"}
    assert bench.engine.heartbeat().kv_blocks_used == 0
    bench.engine.apply(Credit([0], [2]))
    bench.run()
    assert bench.finished[0] == "length"


def test_cancel_frees_kv_at_once(make_bench: Any, submit: Any) -> None:
    bench = make_bench()
    for handle in range(6):  # two of them wait
        bench.engine.apply(submit(handle, range(10), 4))
    bench.step()
    bench.engine.apply(Cancel(list(range(6))))
    bench.engine.check_integrity()
    beat = bench.engine.heartbeat()
    assert (beat.kv_blocks_used, beat.running, beat.waiting) == (0, 0, 0)
    event = bench.step()  # all that is left is to report what they were charged
    assert (event.handles, event.settled) == ([], list(range(6)))
    assert not bench.engine.has_work


def test_a_preempted_head_is_admitted_over_readers_that_stay_away(make_bench: Any, submit: Any) -> None:
    bench = make_bench(blocks=8, block_size=2, max_sequences=3, token_budget=16)
    bench.engine.apply(submit(0, [1, 2], 12, credit=2))  # these two come to hold all but two blocks
    bench.engine.apply(submit(1, range(6), 4, credit=1))
    bench.engine.apply(submit(2, range(4), 10))
    for handle in (0, 1):
        bench.engine.apply(Credit([handle], [3]))
    bench.run()
    assert bench.finished[2] == "length"
    assert bench.engine.heartbeat().waiting + bench.engine.heartbeat().running >= 1  # they wait for credit
    bench.engine.apply(Credit([0, 1], [12, 12]))
    bench.run()
    assert {0, 1, 2} == set(bench.finished)


def test_readers_that_stay_away_do_not_hold_up_a_new_sequence(make_bench: Any, submit: Any) -> None:
    bench = make_bench(blocks=4, block_size=2, max_sequences=4, token_budget=16)
    bench.engine.apply(submit(0, [1, 2, 3], 5, credit=1))
    bench.run()
    bench.engine.apply(submit(1, range(5), 3))  # it takes three blocks, of which two are held
    assert bench.engine.has_work
    bench.run()
    assert bench.finished == {1: "length"}
    bench.engine.apply(Credit([0], [5]))
    bench.run()
    assert bench.finished[0] == "length"
    assert len(bench.tokens[0]) == 5


def test_readers_that_stay_away_keep_their_kv_where_it_does_not_help(make_bench: Any, submit: Any) -> None:
    bench = make_bench(blocks=8, block_size=2, max_sequences=4, token_budget=16)
    bench.engine.apply(submit(0, [1, 2], 2, credit=1))  # a block or two, and it waits
    bench.engine.apply(submit(1, range(8), 4))
    bench.step()
    bench.engine.apply(submit(2, range(14), 2))  # more than what 1 leaves
    prefilled = bench.executor.prefilled
    bench.step()
    assert bench.executor.prefilled == prefilled
    assert bench.engine.heartbeat().running == 2


def test_a_short_prompt_passes_a_long_one(make_bench: Any, submit: Any) -> None:
    bench = make_bench(blocks=64, token_budget=16, max_sequences=4)
    bench.engine.apply(submit(0, range(90), 2))
    bench.step()
    bench.engine.apply(submit(1, [1, 2, 3], 2))
    assert bench.step().handles == [1]
    bench.run()
    assert bench.finished == {0: "length", 1: "length"}


def test_a_long_prompt_moves_whatever_passes_it(make_bench: Any, submit: Any) -> None:
    bench = make_bench(blocks=64, token_budget=16, max_sequences=4)
    bench.engine.apply(submit(0, range(90), 2))
    steps = 0
    while 0 not in bench.tokens:
        bench.engine.apply(submit(1 + steps, range(10), 1))
        bench.step()
        steps += 1
    assert steps <= 90 // 4 + 2  # a quarter of each step, while short ones could fill them all


def test_long_prefills_are_capped_and_short_prompts_pass_those_that_wait(
    make_bench: Any, submit: Any
) -> None:
    bench = make_bench(blocks=1 << 12, block_size=16, token_budget=512, max_sequences=8)
    for handle in range(4):
        bench.engine.apply(submit(handle, [1] * 5000, 1))
    bench.engine.apply(submit(9, [1] * 50, 1))
    event = bench.step()
    assert (event.handles, event.running, event.waiting) == ([9], 2, 2)
    most = event.running
    while bench.engine.has_work:
        event = bench.step()
        most = max(most, event.running)
    assert most == 2
    assert sorted(bench.finished) == [0, 1, 2, 3, 9]


def test_a_step_says_what_its_decodes_attended_to(make_bench: Any, submit: Any) -> None:
    bench = make_bench()
    bench.engine.apply(submit(0, [1, 2, 3], 4))
    bench.engine.apply(submit(1, [1] * 5, 4))
    assert bench.step().attended_tokens == 0
    assert bench.step().attended_tokens == 4 + 6
    assert bench.step().attended_tokens == 5 + 7


def test_a_paced_engine_keeps_its_steps_to_the_target(submit: Any) -> None:
    """A stream beside a long prompt: its gaps are the target's, and the prompt comes to its end."""
    now_s, steps_s = 0.0, []

    def run(batch: Any) -> Samples:
        nonlocal now_s
        step_s = 0.004 + 0.0002 * batch.prefill_tokens
        now_s += step_s
        steps_s.append((step_s, bool(batch.decodes)))
        return Samples([1] * len(batch.sampled))

    engine = Engine(
        Inline(SimpleNamespace(run=run)),
        blocks=BlockManager(2048, 16),
        limits=PlannerLimits(1024, 8),
        model=ModelLimits(97, 32768),
        eos_ids=frozenset(),
        clock=lambda: now_s,
        budget=PrefillBudget(0.05, most_tokens=1024),
    )
    engine.apply(submit(0, [1], 400))
    engine.step()
    engine.apply(submit(1, [1] * 20_000, 1))
    started_s = now_s
    for _ in range(300):
        engine.step()
    beside = [step_s for step_s, decodes in steps_s if decodes]
    assert max(beside[5:]) <= 0.05 * 1.05
    assert now_s - started_s < 0.0002 * 20_000 * 1.5 + 300 * 0.004
    assert engine.heartbeat().running == 1


def test_a_budget_below_the_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="token_budget"):
        PlannerLimits(token_budget=3, max_sequences=4)
