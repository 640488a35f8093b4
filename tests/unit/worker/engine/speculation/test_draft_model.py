"""The draft over its own KV pool, whose every slot is checked before it is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.generation import Sampling
from services.worker.engine.execute.executor import Batch, Samples
from services.worker.engine.plan.block_manager import BlockManager
from services.worker.engine.sequence import SequenceState, sequence_of
from services.worker.engine.speculation.draft_model import DraftModel
from tests.support.submits import make_submit
from tests.unit.worker.engine.conftest import CheckingExecutor

BLOCK = 4


def token_of(handle: int, position: int) -> int:
    return (handle * 31 + position) % 97


def sequence(handle: int, prompt: int, **sampling: Any) -> SequenceState:
    command = make_submit(handle, list(range(1, prompt + 1)), 99, seed=0, max_tokens=99, **sampling)
    return sequence_of(command, arrival=0, eos_ids=frozenset())


@dataclass
class Rig:
    blocks: int = 64
    token_budget: int = 400
    max_model_len: int = 1000
    runner: CheckingExecutor = field(init=False)
    draft: DraftModel = field(init=False)
    pool: BlockManager = field(init=False)

    def __post_init__(self) -> None:
        self.runner = CheckingExecutor(1 << 20, BLOCK, token_of)
        self.pool = BlockManager(self.blocks, BLOCK)
        self.texts: dict[int, list[int]] = {}  # by handle, as the draft computed it last
        self.draft = DraftModel(
            self, blocks=self.pool, max_model_len=self.max_model_len, token_budget=self.token_budget
        )

    def run(self, batch: Batch) -> Samples:
        self.texts |= {state.handle: list(state.tokens) for state in batch.sampled}
        return self.runner.run(batch)

    def resize(self, blocks: int) -> None:
        self.runner.resize(blocks)

    def propose(self, *wanted: tuple[SequenceState, int]) -> list[list[int]]:
        self.texts.clear()
        found = self.draft.propose(wanted)
        for state, _ in wanted:
            text = self.texts.get(state.handle, state.tokens)
            assert text[: len(state.tokens)] == state.tokens, "the draft goes on from another text"
        self.draft.check_integrity()
        return found


def expected(state: SequenceState, count: int) -> list[int]:
    return [token_of(state.handle, state.output_tokens + place) for place in range(count)]


def test_it_runs_ahead_of_each_sequence_by_what_is_wanted() -> None:
    rig, one, two = Rig(), sequence(1, 5), sequence(2, 9)
    assert rig.propose((one, 3), (two, 1)) == [expected(one, 3), expected(two, 1)]
    assert rig.runner.prefilled == 5 + 9


@settings(deadline=None, max_examples=80)
@given(
    turns=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 6), st.lists(st.integers(0, 96), max_size=3)), max_size=12
    ),
    blocks=st.sampled_from([10, 64]),
)
def test_what_was_accepted_stays_and_what_was_not_is_computed_again(
    turns: list[tuple[int, int, list[int]]], blocks: int
) -> None:
    """The text goes on with some of the proposals and then with others; KV of another text is never read."""
    rig = Rig(blocks=blocks)
    states = [sequence(handle, 4 + handle) for handle in range(3)]
    for accepted, most, others in turns:
        found = rig.propose(*((state, most) for state in states))
        for state, proposed in zip(states, found, strict=True):
            assert proposed in ([], expected(state, most))
            state.tokens += proposed[:accepted]
            state.tokens += others


def test_only_what_is_new_is_computed() -> None:
    rig, state = Rig(), sequence(1, 50)
    state.tokens += rig.propose((state, 4))[0]
    state.tokens.append(7)
    before = rig.runner.prefilled
    rig.propose((state, 4))
    assert rig.runner.prefilled - before == 2  # its last proposal was not computed, nor the token after it


def test_a_long_text_is_caught_up_with_over_several_steps() -> None:
    rig, state, short = Rig(token_budget=40), sequence(1, 35), sequence(2, 3)
    found = [rig.propose((short, 2), (state, 2)) for _ in range(5)]
    assert [bool(mine) for _, mine in found] == [False, False, False, True, True]
    assert all(theirs == expected(short, 2) for theirs, _ in found)


def test_where_blocks_are_short_who_was_asked_least_lately_is_forgotten() -> None:
    rig = Rig(blocks=6)
    one, two = sequence(1, 9), sequence(2, 9)
    assert rig.propose((one, 2)) == [expected(one, 2)]
    assert rig.propose((two, 2)) == [expected(two, 2)]
    assert rig.propose((two, 2), (one, 2)) == [expected(two, 2), expected(one, 2)]
    assert rig.propose((sequence(3, 40), 2)) == [[]]


def test_a_sequence_that_is_gone_leaves_its_blocks() -> None:
    rig, state = Rig(), sequence(1, 9)
    rig.propose((state, 2))
    assert rig.pool.blocks_used
    rig.draft.forget(1)
    rig.draft.forget(1)
    assert not rig.pool.blocks_used


def test_a_context_that_the_draft_does_not_have_is_not_asked_of_it() -> None:
    rig = Rig(max_model_len=10)
    assert rig.propose((sequence(1, 7), 8), (sequence(2, 10), 8)) == [expected(sequence(1, 7), 3), []]


def test_nothing_is_proposed_after_an_end() -> None:
    rig = Rig()
    state = sequence(1, 5, stop_token_ids=(token_of(1, 1),))
    assert rig.propose((state, 4)) == [expected(state, 2)]


def test_a_draft_whose_pool_changes_forgets_and_proposes_the_same() -> None:
    rig, state = Rig(), sequence(1, 5)
    before = rig.propose((state, 3))
    for blocks in (rig.blocks // 2, rig.blocks * 2):
        rig.draft.resize(blocks)
        assert (rig.pool.blocks_total, rig.pool.blocks_used) == (blocks, 0)
        assert rig.propose((state, 3)) == before
        rig.draft.check_integrity()


@pytest.mark.parametrize("logprobs", [None, 3])
def test_the_draft_samples_as_the_target_does(logprobs: int | None) -> None:
    seen: list[Sampling] = []
    rig, state = Rig(), sequence(1, 5, temperature=0.7, top_p=0.9, logprobs=logprobs)
    run = rig.runner.run

    class Watching:
        def run(self, batch: Any) -> Any:
            seen.extend(each.sampling for each in batch.sampled)
            assert {each.key for each in batch.sampled} == {state.key}
            return run(batch)

        def resize(self, blocks: int) -> None: ...

    draft = DraftModel(Watching(), blocks=rig.pool, max_model_len=99, token_budget=400)
    draft.propose([(state, 2)])
    assert {(each.temperature, each.top_p, each.logprobs) for each in seen} == {(0.7, 0.9, None)}
