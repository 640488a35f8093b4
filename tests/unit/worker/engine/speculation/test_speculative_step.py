"""The engine with proposals of any quality: its tokens are those without, and its books hold at each step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.engine.sequence import SequenceState
from services.worker.engine.speculation.speculator import Speculator
from services.worker.engine_protocol import Cancel, Credit
from services.worker.policy.speculation import SpeculationPolicy
from tests.unit.worker.engine.plan.test_planner import Ledger, operations

COMMON = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Guesses:
    """Proposes what will be sampled, each token with a chance of being another."""

    def __init__(self, token_of: Callable[[int, int], int], *, wrong: float = 0.0, seed: int = 0) -> None:
        self.token_of, self.wrong, self.rng = token_of, wrong, random.Random(seed)
        self.forgotten: list[int] = []

    def propose(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[list[int]]:
        return [
            [
                self._token(sequence, place)
                for place in range(self.rng.randint(0, most) if self.wrong else most)
            ]
            for sequence, most in wanted
        ]

    def resize(self, blocks: int) -> None: ...

    def forget(self, handle: int) -> None:
        self.forgotten.append(handle)

    def _token(self, sequence: SequenceState, place: int) -> int:
        right = self.token_of(sequence.handle, sequence.output_tokens + place)
        return right if self.rng.random() >= self.wrong else (right + 1) % 97


def token_of(handle: int, position: int) -> int:
    return (handle * 31 + position) % 97


def speculator(proposer: Any, most: int = 8) -> Speculator:
    """Every step takes a second, whatever it computes: all proposals pay."""
    return Speculator(proposer, SpeculationPolicy(most_tokens=most), clock=lambda: 0.0)


def speculating(make_bench: Any, *, wrong: float = 0.0, seed: int = 0, most: int = 8, **options: Any) -> Any:
    guesses = Guesses(options.pop("token_of", token_of), wrong=wrong, seed=seed)
    ticks = count()
    bench = make_bench(
        speculation=speculator(guesses, most),
        clock=lambda: float(next(ticks)),
        **({"vocab_size": 97} | options),
    )
    bench.executor.token_of = guesses.token_of
    return bench


@COMMON
@given(
    operations=operations,
    blocks=st.integers(3, 16),
    block_size=st.integers(1, 4),
    max_sequences=st.integers(1, 5),
    spare_budget=st.integers(0, 15),
    wrong=st.sampled_from([0.0, 0.2, 0.9]),
    seed=st.integers(0, 99),
)
def test_every_promise_of_the_planner_holds(
    make_bench: Callable[..., Any],
    submit: Callable[..., Any],
    operations: list[tuple[str, Any]],
    blocks: int,
    block_size: int,
    max_sequences: int,
    spare_budget: int,
    wrong: float,
    seed: int,
) -> None:
    """No leak, no overcommit, budget and credit respected, no token lost or made twice, all finish."""
    bench = speculating(
        make_bench,
        wrong=wrong,
        seed=seed,
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


def test_a_run_of_accepted_tokens_comes_in_one_step(make_bench: Any, submit: Any) -> None:
    bench = speculating(make_bench, token_budget=32, max_sequences=2)
    bench.engine.apply(submit(3, [1, 2, 3], 30))
    events = [bench.step() for _ in range(12) if bench.engine.has_work]
    assert bench.tokens[3] == [token_of(3, position) for position in range(30)]
    assert bench.finished == {3: "length"}
    assert len(events) < 10
    assert max(len(event.handles) for event in events) == 9
    assert sum(event.accepted_tokens for event in events) == 30 - len(events)
    assert sum(event.proposed_tokens for event in events) == sum(event.accepted_tokens for event in events)


def test_a_stop_token_inside_a_run_ends_it_there(make_bench: Any, submit: Any) -> None:
    for stop in range(1, 12):
        bench = speculating(make_bench, token_budget=32)
        bench.engine.apply(submit(0, [1], 30, stop_token_ids=(token_of(0, stop),), min_tokens=0))
        bench.run()
        assert bench.tokens[0] == [token_of(0, position) for position in range(stop + 1)]
        assert bench.finished == {0: "stop"}
        assert bench.engine.heartbeat().kv_blocks_used == 0


def test_min_tokens_holds_the_end_back_inside_a_run(make_bench: Any, submit: Any) -> None:
    bench = speculating(make_bench, token_budget=32, token_of=lambda handle, position: 5)
    bench.engine.apply(submit(0, [1], 30, stop_token_ids=(5,), min_tokens=10))
    bench.run()
    assert bench.tokens[0] == [5] * 11


def test_credit_is_never_passed(make_bench: Any, submit: Any) -> None:
    bench = speculating(make_bench, token_budget=32, blocks=64)
    bench.engine.apply(submit(0, [1], 60, credit=1))
    for limit in range(2, 61, 7):
        while bench.engine.has_work:
            bench.step()
        assert len(bench.tokens[0]) == max(1, limit - 7)
        bench.engine.apply(Credit([0], [limit]))
    bench.run()


def test_an_error_counts_where_it_is_reached(make_bench: Any, submit: Any) -> None:
    """A row behind a rejected proposal was computed from no output: its error is nobody's."""
    bench = speculating(make_bench, token_budget=32, wrong=0.0)
    run, steps = bench.executor.run, []

    def failing(batch: Any) -> Any:
        samples = run(batch)
        steps.append(batch.proposals)
        if len(batch.proposals.get(0, ())) >= 3:
            proposed = batch.proposals[0]
            samples.tokens[1] = (proposed[1] + 1) % 97  # the second proposal is rejected
            samples.errors[2] = "not finite"
        return samples

    bench.executor.run = failing
    bench.engine.apply(submit(0, [1], 40))
    bench.run()
    assert max(len(each.get(0, ())) for each in steps) >= 3
    assert not bench.errors


def test_an_error_that_is_reached_ends_the_sequence_after_what_stands(make_bench: Any, submit: Any) -> None:
    bench = speculating(make_bench, token_budget=32)
    run = bench.executor.run

    def failing(batch: Any) -> Any:
        samples = run(batch)
        if batch.decodes and batch.decodes[0].handle == 0 and len(batch.proposals.get(0, ())) >= 3:
            samples.errors[2] = "not finite"
        return samples

    bench.executor.run = failing
    bench.engine.apply(submit(0, [1], 30))
    bench.engine.apply(submit(1, [1], 30))
    bench.run()
    assert bench.finished == {0: "not_finite", 1: "length"}
    assert bench.tokens[0] == [token_of(0, position) for position in range(len(bench.tokens[0]))]


def test_logprobs_come_with_each_token_of_a_run(make_bench: Any, submit: Any) -> None:
    bench = speculating(make_bench, token_budget=64, wrong=0.3, blocks=64)
    bench.engine.apply(submit(0, [1], 30, logprobs=0))
    bench.engine.apply(submit(1, [1], 30))
    while bench.engine.has_work:
        event = bench.step()
        assert len(event.logprobs.get(0, [])) == event.handles.count(0)
        assert 1 not in event.logprobs


def test_blocks_of_proposals_are_taken_from_nobody_and_given_back(make_bench: Any, submit: Any) -> None:
    """In a pool that is full without proposals nobody is preempted who was not."""
    plain = make_bench(blocks=12, block_size=2, token_budget=40, max_sequences=3)
    bench = speculating(make_bench, wrong=0.4, blocks=12, block_size=2, token_budget=40, max_sequences=3)
    for each in (plain, bench):
        for handle in range(3):
            each.engine.apply(submit(handle, [1, 2], 6))
        each.run()
    assert bench.tokens == {h: [token_of(h, p) for p in range(6)] for h in range(3)}
    assert plain.engine.planner.preemptions == bench.engine.planner.preemptions == 0


def test_what_is_gone_is_forgotten(make_bench: Any, submit: Any) -> None:
    bench = speculating(make_bench)
    guesses = bench.engine._speculation._proposer
    for handle in range(3):
        bench.engine.apply(submit(handle, [1], 4 if handle else 40))
    bench.step()
    bench.engine.apply(Cancel([0]))
    bench.run()
    assert sorted(guesses.forgotten) == [0, 1, 2]
    assert not bench.engine._speculation._policy._sequences


def test_proposals_take_what_the_token_budget_leaves(make_bench: Any, submit: Any) -> None:
    bench = speculating(make_bench, token_budget=6, max_sequences=4, blocks=64)
    for handle in range(4):
        bench.engine.apply(submit(handle, [1], 20))
    while bench.engine.has_work:
        decoding = len(bench.engine.planner.decoding)
        assert bench.step().proposed_tokens <= 6 - decoding  # the executor checks the sum


class Noting(SpeculationPolicy):
    """Notes which steps it was told prefill, too."""

    def __init__(self) -> None:
        super().__init__(most_tokens=2)
        self.told: list[bool] = []

    def counts(self, handles: Sequence[int], *, most_rows: int, prefills: bool = False) -> dict[int, int]:
        self.told.append(prefills)
        return super().counts(handles, most_rows=most_rows, prefills=prefills)


def test_the_policy_knows_which_steps_prefill(make_bench: Any, submit: Any) -> None:
    policy, ticks = Noting(), count()
    bench = make_bench(
        speculation=Speculator(Guesses(token_of), policy, clock=lambda: 0.0),
        clock=lambda: float(next(ticks)),
        vocab_size=97,
        blocks=64,
        block_size=4,
        token_budget=16,
        max_sequences=2,
    )
    asked = []  # of the steps before which the policy was asked: whether they prefilled
    bench.engine.apply(submit(0, [1, 2, 3], 60))
    for step in range(16):
        if step == 6:
            bench.engine.apply(submit(1, [4] * 38, 2))  # chunks of 15 and 15, and one that leaves room
        before = len(policy.told)
        prefilled = bench.step().prefill_tokens > 0
        asked += [prefilled] * (len(policy.told) - before)
    assert policy.told == asked
    assert set(asked) == {False, True}
