"""Suspects of a crash run first, one at a time, in steps of their own; others go on between these steps."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from services.worker.engine.core import Engine
from services.worker.engine.execute.executor import Batch, Inline, Samples
from services.worker.engine.plan.block_manager import BlockManager
from services.worker.engine.plan.planner import PlannerLimits
from services.worker.engine.sequence import ModelLimits
from services.worker.engine_protocol import Cancel
from services.worker.step_page import StepPage, size_of
from tests.support.run_ahead import RunsAhead
from tests.support.submits import make_submit

PROMPT = [1, 2, 3, 4, 5, 6]


class Recorder:
    """Notes the members of each batch and what the page announces meanwhile."""

    def __init__(self, page: StepPage, *, ahead: bool) -> None:
        self.page = page
        self.ahead = ahead
        self.steps: list[list[int]] = []

    def run(self, batch: Batch) -> Samples:
        members = [*batch.decodes, *(chunk.sequence for chunk in batch.prefills)]
        handles = tuple(sequence.handle for sequence in members)
        announced = self.page.members()
        assert announced == handles if not self.ahead else set(announced) >= set(handles)
        if any(sequence.is_suspect for sequence in members):
            assert announced == handles, "a suspect's step was submitted while another runs"
        self.steps.append(list(handles))
        return Samples([sequence.handle for sequence in batch.sampled])

    def resize(self, blocks: int) -> None: ...


class Rig:
    def __init__(
        self, *, blocks: int = 64, max_sequences: int = 4, token_budget: int = 16, ahead: bool = False
    ) -> None:
        page = StepPage(memoryview(bytearray(size_of(max_sequences))).cast("Q"), max_sequences)
        self.recorder = Recorder(page, ahead=ahead)
        self.launch = RunsAhead(self.recorder) if ahead else Inline(self.recorder)
        self.engine = Engine(
            self.launch,
            blocks=BlockManager(blocks, 4),
            limits=PlannerLimits(token_budget, max_sequences),
            model=ModelLimits(97, 64),
            eos_ids=frozenset(),
            clock=lambda: 0.0,
            page=page,
        )
        self.finished: dict[int, str] = {}
        self.tokens: dict[int, int] = {}

    def submit(self, handle: int, tokens: int = 8, *, apart: int = 0, **options: Any) -> None:
        submit = make_submit(handle, PROMPT, 1000, seed=1, max_tokens=tokens, **options)
        self.engine.apply(structs.replace(submit, apart_tokens=apart))

    def step(self) -> list[int]:
        """Run a step and return its members."""
        event = self.engine.step()
        self.engine.check_integrity()
        self.finished |= event.finished
        for handle in event.handles:
            self.tokens[handle] = self.tokens.get(handle, 0) + 1
        assert self.recorder.page.members() == ()
        return self.recorder.steps[-1]

    def run_ahead(self) -> None:
        """Run to the end an engine that has a step under way between two steps."""
        while self.engine.has_work:
            self.finished |= self.engine.step().finished

    def run(self) -> None:
        for _ in range(3000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")


def test_suspects_take_turns_with_all_others_and_one_follows_the_other() -> None:
    rig = Rig(max_sequences=8)
    rig.submit(1)
    rig.submit(2)
    assert rig.step() == [1, 2]
    rig.submit(3, apart=2)
    rig.submit(4, apart=2)
    rig.submit(5)
    steps = [rig.step() for _ in range(8)]
    assert steps == [[3], [1, 2, 5], [3], [1, 2, 3, 5], [4], [1, 2, 3, 5], [4], [1, 2, 3, 5, 4]]


def test_without_others_a_suspect_runs_step_after_step() -> None:
    rig = Rig()
    rig.submit(1, apart=3)
    rig.submit(2, apart=3)
    assert [rig.step() for _ in range(7)] == [[1], [1], [1], [1], [2], [1], [2]]


def test_a_suspect_of_the_last_kind_is_alone_to_its_end() -> None:
    rig = Rig()
    rig.submit(1, tokens=20)
    rig.submit(2, tokens=6, apart=1 << 20)
    rig.run()
    assert [step for step in rig.recorder.steps if 2 in step] == [[2]] * 6
    assert rig.finished == {1: "length", 2: "length"}


def test_a_long_prompt_of_a_suspect_is_prefilled_alone() -> None:
    rig = Rig(token_budget=4)
    rig.submit(1)
    rig.step()
    rig.submit(2, apart=2)
    steps = [rig.step() for _ in range(6)]
    assert steps == [[2], [1], [2], [1], [2], [1, 2]]


def test_a_suspect_without_a_reader_gives_its_turn_away() -> None:
    rig = Rig()
    submit = make_submit(1, PROMPT, 1, seed=1, max_tokens=8)
    rig.engine.apply(structs.replace(submit, apart_tokens=4))
    rig.submit(2, apart=1)
    assert [rig.step(), rig.step()] == [[1], [2]]


def test_a_suspect_that_is_cancelled_gives_its_turn_away() -> None:
    rig = Rig()
    rig.submit(1, apart=4)
    rig.submit(2, apart=1)
    rig.submit(3, apart=1)
    rig.step()
    rig.engine.apply(Cancel([1, 3]))
    assert rig.step() == [2]
    rig.run()
    assert rig.finished == {2: "length"}


def test_a_suspect_that_lacks_blocks_is_not_overtaken() -> None:
    rig = Rig(blocks=5, max_sequences=4)
    rig.submit(1, tokens=6)
    rig.step()
    rig.submit(2, tokens=6, apart=2)
    rig.submit(3, tokens=6)
    rig.run()
    assert set(rig.finished) == {1, 2, 3}
    first = {
        handle: next(n for n, step in enumerate(rig.recorder.steps) if handle in step) for handle in (2, 3)
    }
    assert first[2] < first[3]


def test_a_suspects_step_is_not_submitted_while_another_runs() -> None:
    rig = Rig(ahead=True)
    rig.submit(1, tokens=30)
    rig.submit(2, tokens=30)
    for _ in range(4):
        rig.engine.step()
    rig.submit(3, tokens=30, apart=4)
    for _ in range(12):
        rig.engine.step()
    assert isinstance(rig.launch, RunsAhead)
    ahead = rig.launch.ahead
    assert [step for step in rig.recorder.steps if step == [3]] == [[3]] * 4
    rig.run_ahead()
    assert rig.launch.ahead > ahead, "it runs ahead again once the suspect is cleared"
    assert rig.finished == {1: "length", 2: "length", 3: "length"}


_SEQUENCE = st.tuples(st.integers(1, 12), st.sampled_from([0, 0, 1, 2, 5, 100]), st.integers(0, 20))


@settings(max_examples=60, deadline=None)
@given(st.lists(_SEQUENCE, min_size=1, max_size=10), st.integers(8, 40), st.integers(1, 4))
def test_no_step_of_a_suspect_has_another_member(
    sequences: list[tuple[int, int, int]], blocks: int, max_sequences: int
) -> None:
    """``sequences``: output tokens, tokens apart, and the step before which each arrives."""
    rig = Rig(blocks=blocks, max_sequences=max_sequences)
    left = {handle: apart for handle, (_, apart, _) in enumerate(sequences)}
    made: dict[int, int] = dict.fromkeys(left, 0)
    coming = sorted((arrives, handle) for handle, (_, _, arrives) in enumerate(sequences))
    for number in range(3000):
        while coming and coming[0][0] <= number:
            handle = coming.pop(0)[1]
            rig.submit(handle, sequences[handle][0], apart=left[handle])
        if not rig.engine.has_work:
            if not coming:
                break
            continue
        steps = len(rig.recorder.steps)
        event = rig.engine.step()
        rig.engine.check_integrity()
        rig.finished |= event.finished
        for members in rig.recorder.steps[steps:]:
            suspects = [handle for handle in members if made[handle] < left[handle]]
            assert not suspects or len(members) == 1
        for handle in event.handles:
            made[handle] += 1
    ended = {handle for handle, reason in rig.finished.items() if reason == "length"}
    handed_back = {handle for handle, reason in rig.finished.items() if reason == "preempted"}
    assert ended | handed_back == set(left)
